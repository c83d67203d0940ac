"""What each rank of a GPU test of ep_dispatch and ep_combine runs, by `run_bodies.py`."""

from __future__ import annotations

import itertools
import random
import sys
from typing import Any

import torch
import torch.distributed as dist
from bodies import captured, same_bits, stream

import tunedcomm
from tunedcomm.dispatch.groups import get_communicator
from tunedcomm.kernels.common.reference import fill_sentinel
from tunedcomm.kernels.moe.push import FEW
from tunedcomm.spec import Candidate, Problem, check_candidate, get_op, get_variant

SHAPES = (
    (1, 7168, 8, 256), (16, 7168, 8, 256), (5, 128, 3, 24), (64, 7168, 8, 256), (128, 4096, 8, 64), (300, 256, 1, 8),
    (1000, 2048, 8, 128), (4096, 7168, 8, 256),
)  # fmt: skip
BY_TOKEN, BY_EXPERT = ("library", "tokens_lamport", "tokens_push"), ("library", "lamport", "push", "two_phase")
FORMS = (
    ("ep_dispatch", "tokens", BY_TOKEN), ("ep_combine", "tokens", BY_TOKEN), ("ep_combine", "rank", BY_TOKEN),
    ("ep_dispatch", "padded", BY_EXPERT), ("ep_dispatch", "contiguous", BY_EXPERT),
)  # fmt: skip
WAYS = (
    ("tokens_lamport", "tokens_lamport"), ("tokens_push", "tokens_push"), ("tokens_direct", "tokens_pull"),
    ("tokens_lamport", "tokens_pull"), ("tokens_direct", "tokens_lamport"),
)  # fmt: skip


def variants_body() -> dict[str, object]:
    """Every plain variant in a few configs, at all sizes, random and skewed routing, -0.0 too: the reference's bits."""
    return _compared(weighted=False)


def weighted_body() -> dict[str, object]:
    """The same of sorted layouts with weights, which travel beside the rows."""
    return _compared(weighted=True)


def _compared(*, weighted: bool) -> dict[str, object]:
    communicator, checked, shuffle = get_communicator(), 0, random.Random(3)
    ranks = range(communicator.world_size)
    for number, shape in enumerate(SHAPES):
        for (op, layout, names), kind in itertools.product(FORMS, ("random", "integers")):
            if (names == BY_EXPERT and shape[0] > 1000) or (names == BY_TOKEN and weighted):
                continue
            dtype = ("bfloat16", "float32", "float16")[number % 3]
            problem = Problem(op, shape, dtype, communicator.world_size, reduction="", layout=layout)
            spec = get_op(op)
            everyone = [spec.make_inputs(problem, rank, number, kind, "cuda") for rank in ranks]
            for given in everyone:
                given[0].view(-1)[:: 7 + number] *= -0.0
            if weighted:  # those of the layout `tokens` always have weights
                drawn = torch.Generator("cuda").manual_seed(number)
                weights = torch.randn(len(ranks), shape[0], shape[2], generator=drawn, device="cuda").round(decimals=1)
                everyone = [(*given, own) for given, own in zip(everyone, weights, strict=True)]
            assert spec.ordered_reference is not None
            due = spec.ordered_reference(problem, everyone, communicator.rank)
            for name in names:
                variant = get_variant(op, name)
                configs = [variant.default(problem, communicator.limits)]
                feasible = [
                    config
                    for config in variant.space.enumerate()
                    if variant.infeasible(problem, config, communicator.limits) is None
                ]
                configs += shuffle.sample(feasible, min(1, len(feasible)))
                for config in configs:
                    candidate = Candidate.of(op, name, config)
                    if check_candidate(problem, candidate, communicator.limits) is not None:
                        continue
                    try:
                        launch = communicator.bind(problem, candidate)
                    except tunedcomm.InfeasibleError:
                        continue
                    outputs = spec.make_outputs(problem, "cuda")
                    if weighted:
                        outputs = (*outputs[:5], torch.empty_like(due[5]))
                    for _ in range(3):
                        fill_sentinel(outputs)
                        launch(everyone[communicator.rank], outputs, stream())
                        found = spec.mask_unspecified(problem, (), outputs)[1]
                        communicator.check_peers()
                        for got, wanted in zip(found, due, strict=True):
                            assert same_bits(got, wanted), (str(problem), str(candidate))
                        checked += 1
    return {"checked": checked}


def round_trip(
    way: tuple[str, str], sizes: tuple[int, int, int, int], turns: int, seed: int, *, numbered: bool = False
) -> int:
    """Graphs of dispatch, experts and combine with buffers and without, replayed with new tokens, routes and delays.

    `numbered`: each rank has a number of tokens, another one in each replay; behind it are NaN and ids of no expert.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    tokens, hidden, topk, experts = sizes
    local, shuffle = experts // world_size, random.Random(seed + rank)
    in_buffers = "tokens_direct" in way or "tokens_pull" in way
    buffers = tunedcomm.ep_buffers(tokens, hidden, topk, torch.float32) if in_buffers else None
    x = torch.zeros(3, tokens, hidden, device="cuda")
    ids = torch.zeros(3, tokens, topk, device="cuda", dtype=torch.int32)
    weights = torch.zeros(3, tokens, topk, device="cuda")
    number, place = torch.zeros(3, 1, device="cuda", dtype=torch.int32), torch.arange(tokens, device="cuda")
    y, seen = torch.zeros_like(x), torch.zeros(3, world_size * tokens, topk, device="cuda")

    def step(i: int) -> None:
        sent = tunedcomm.ep_dispatch(
            x[i], ids[i], num_experts=experts, layout="tokens", topk_weights=weights[i], buffers=buffers,
            num_tokens=number[i] if numbered else None,
        )  # fmt: skip
        assert sent.weights is not None
        seen[i].copy_(sent.weights)
        factors = (sent.weights * (sent.expert_ids + 1 + rank * local) * (sent.expert_ids >= 0)).sum(1, keepdim=True)
        rows = torch.where(factors > 0, sent.tokens * factors, 0.0)
        if sent.output is not None:
            sent.output.fill_(float("nan"))
            rows = sent.output.copy_(rows)
        tunedcomm.ep_combine(rows, sent, out=y[i])
        if buffers is not None:
            sent.tokens.fill_(float("nan"))

    checked = 0
    with torch.no_grad(), tunedcomm.force("ep_dispatch", way[0]), tunedcomm.force("ep_combine", way[1]):
        graph = captured(step, 3)
        generator = torch.Generator("cuda").manual_seed(seed)
        for turn in range(turns):
            drawn = torch.randint(-8, 9, (world_size, *x.shape), generator=generator, device="cuda").float()
            routes = torch.randint(-1, experts, (world_size, *ids.shape), generator=generator, device="cuda")
            if turn % 4 == 1:  # all tokens to one rank
                routes = routes.clamp(min=0) % local + turn // 4 % world_size * local
            if turn % 4 == 2:  # none of some ranks, none to others
                routes[turn // 4 % world_size] = -1
            given = torch.randint(1, 4, (world_size, *weights.shape), generator=generator, device="cuda").float()
            counts = torch.randint(0, tokens + 1, (world_size, 3, 1), generator=generator, device="cuda")
            if turn % 3 == 0:
                counts[turn % world_size :] = tokens
            if turn % 3 == 1:  # around those that go without flags, more on some ranks or on none
                around = torch.tensor([0, 1, FEW - 1, FEW, FEW + 1], device="cuda").clamp(max=tokens)
                counts = around[torch.randint(0, 5 - turn % 2, counts.shape, generator=generator, device="cuda")]
            if not numbered:
                counts.fill_(tokens)
            behind = (place >= counts).unsqueeze(-1)
            x.copy_(drawn[rank].masked_fill(behind[rank], float("nan")))
            ids.copy_(routes[rank].masked_fill(behind[rank], 1 << 20))
            weights.copy_(given[rank].masked_fill(behind[rank], float("nan")))
            number.copy_(counts[rank])
            given, routes = given.masked_fill(behind, 0), routes.masked_fill(behind, -1)
            y.fill_(float("nan"))
            if shuffle.random() < 0.3:
                torch.cuda._sleep(shuffle.randrange(200_000))
            if turn % 5 == 4:
                for i in range(3):
                    step(i)
            else:
                graph.replay()
            factors = (given[rank] * (routes[rank] + 1) * (routes[rank] >= 0)).sum(-1, keepdim=True)
            assert torch.equal(y.masked_fill(behind[rank], 0), drawn[rank] * factors), (way, sizes, turn)
            assert torch.equal(seen, given.transpose(0, 1).reshape(seen.shape)), (way, sizes, turn)
            checked += 3
    tunedcomm.get_communicator().check_peers()
    return checked


def public_body() -> dict[str, object]:
    """Round trips through experts in every way, few and many tokens."""
    checked = 0
    for seed, way in enumerate(WAYS):
        for sizes in ((1, 64, 2, 8), (16, 7168, 8, 64), (128, 512, 8, 32), (700, 512, 4, 16)):
            if sizes[0] <= 128 or "tokens_lamport" not in way:
                checked += round_trip(way, sizes, 24, seed)
    return {"checked": checked}


def numbers_body() -> dict[str, object]:
    """Numbers of tokens that the kernels read: few of many, all, none."""
    checked = 0
    for seed, way in enumerate(WAYS):
        for sizes in ((1, 64, 2, 8), (16, 7168, 6, 64), (128, 512, 8, 32), (300, 7168, 8, 64), (4096, 512, 8, 32)):
            if sizes[0] <= 128 or "tokens_lamport" not in way:
                checked += round_trip(way, sizes, 24, 20 + seed, numbered=True)
    return {"checked": checked}


# Variants of the dispatch and of the combine, how it sums, and the sizes: tokens, blocks, tokens of a piece.
FEW_TOKENS, MANY_TOKENS = ((3, 4, 2), (100, 16, 8)), ((1000, 64, 128), (4096, 64, 128))
SORTED_WAYS: tuple[tuple[str, str, str, tuple[tuple[int, int, int], ...]], ...] = (
    ("push", "push", "token", (*FEW_TOKENS, *MANY_TOKENS)),
    ("lamport", "lamport", "token", FEW_TOKENS),
    ("two_phase", "push", "token", (*FEW_TOKENS, *MANY_TOKENS)),
    ("push", "tokens_lamport", "rank", FEW_TOKENS),
    ("two_phase", "tokens_push", "rank", MANY_TOKENS),
)


def sorted_trip(way: tuple[str, str, str], size: tuple[int, int, int], turns: int, seed: int) -> int:
    """Graphs of dispatch, experts and combine in the layout `contiguous`, with another number of tokens in each replay.

    The second of three calls has no number, so that calls of either kind follow each other. Weights travel where the
    sum is by rank. Behind the number are NaN and ids of no expert.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    (dispatch, combine, reduce), (tokens, num_blocks, chunk) = way, size
    hidden, topk, local = 1024, 4, 8  # of all sizes, as the config but for its grid: so they share their kernels
    experts, shuffle, travels = local * world_size, random.Random(seed + rank), reduce == "rank"
    config = {"num_blocks": num_blocks, "num_warps": 4, "split": 2, "items": 2, "chunk_tokens": chunk}
    x = torch.zeros(3, tokens, hidden, device="cuda")
    ids = torch.zeros(3, tokens, topk, device="cuda", dtype=torch.int32)
    weights = torch.zeros(3, tokens, topk, device="cuda")
    number, place = torch.zeros(3, 1, device="cuda", dtype=torch.int32), torch.arange(tokens, device="cuda")
    y, seen = torch.zeros_like(x), torch.zeros(3, world_size, tokens, topk, device="cuda")

    def say(what: str) -> None:
        sys.stderr.write(f"sorted_numbers, rank {rank}: {way}, {tokens} tokens: {what}\n")
        sys.stderr.flush()

    def config_of(op: str, name: str) -> dict[str, int]:
        return {axis: config[axis] for axis in get_variant(op, name).space.names}

    def step(i: int) -> None:
        sent = tunedcomm.ep_dispatch(
            x[i], ids[i], num_experts=experts, layout="contiguous", alignment=16,
            num_tokens=None if i == 1 else number[i], topk_weights=weights[i] if travels else None,
        )  # fmt: skip
        if sent.weights is not None:
            seen[i].copy_(sent.weights)
        rows = torch.arange(len(sent.tokens), device="cuda", dtype=torch.int32)
        expert = torch.bucketize(rows, sent.offsets[1:], right=True).clamp(max=local - 1)
        held = rows < (sent.offsets[:-1] + sent.counts)[expert]
        factors = (expert + 1 + rank * local).unsqueeze(1)
        results = torch.where(held.unsqueeze(1), sent.tokens * factors, float("nan"))
        given: Any = None if travels else weights[i]
        tunedcomm.ep_combine(results, sent, given, reduce=reduce, out=y[i])  # type: ignore[call-overload]

    say("compiles and captures")
    with (
        torch.no_grad(),
        tunedcomm.force("ep_dispatch", dispatch, config_of("ep_dispatch", dispatch)),
        tunedcomm.force("ep_combine", combine, config_of("ep_combine", combine)),
    ):
        step(1)  # binds the kernels without a number, which a capture cannot
        graph = captured(step, 3)
        generator = torch.Generator("cuda").manual_seed(seed)
        for turn in range(turns):
            if turn % 8 == 0:
                say(f"turn {turn} of {turns}")
            drawn = torch.randint(-8, 9, (world_size, *x.shape), generator=generator, device="cuda").float()
            pool = experts if turn % 4 else local  # of rank 0 alone
            routes = torch.rand(world_size, 3, tokens, pool, generator=generator, device="cuda").argsort(-1)[..., :topk]
            routes[torch.rand(routes.shape, generator=generator, device="cuda") < 0.1] = -1
            given = torch.randint(1, 4, (world_size, *weights.shape), generator=generator, device="cuda").float()
            counts = torch.randint(0, tokens + 1, (world_size, 3, 1), generator=generator, device="cuda")
            if turn % 3 == 0:
                counts[turn % world_size :] = tokens
            if turn % 6 == 1:  # none at all, and on one rank alone
                counts[:, 0], counts[1:, 2] = 0, 0
            counts[:, 1] = tokens
            behind = (place >= counts).unsqueeze(-1)
            x.copy_(drawn[rank].masked_fill(behind[rank], float("nan")))
            ids.copy_(routes[rank].masked_fill(behind[rank], 1 << 20))
            weights.copy_(given[rank].masked_fill(behind[rank], float("nan")))
            number.copy_(counts[rank])
            given, routes = given.masked_fill(behind, 0), routes.masked_fill(behind, -1)
            y.fill_(float("nan"))
            seen.fill_(float("nan"))
            if shuffle.random() < 0.3:
                torch.cuda._sleep(shuffle.randrange(200_000))
            if turn % 5 == 4:
                for i in range(3):
                    step(i)
            else:
                graph.replay()
            factors = (given[rank] * (routes[rank] + 1) * (routes[rank] >= 0)).sum(-1, keepdim=True)
            assert torch.equal(y.masked_fill(behind[rank], 0), drawn[rank] * factors), (way, size, turn)
            assert not travels or torch.equal(seen, given.transpose(0, 1)), (way, size, turn)
    tunedcomm.get_communicator().check_peers()
    return 3 * turns


def sorted_numbers_body() -> dict[str, object]:
    """Numbers of tokens, and weights, in the sorted layouts: few of many, all, none."""
    checked = 0
    for seed, (dispatch, combine, reduce, sizes) in enumerate(SORTED_WAYS):
        checked += sum(sorted_trip((dispatch, combine, reduce), size, 24, 40 + seed) for size in sizes)
    return {"checked": checked}


def slots_body() -> dict[str, object]:
    """Few tokens over and over: stages, slots and flags come round many times, ranks out of step."""
    checked = sum(round_trip(way, (8, 256, 2, 8), 1200, 10 + seed) for seed, way in enumerate(WAYS))
    for seed, way in enumerate(WAYS[1:3]):  # calls with flags and calls without take turns
        checked += round_trip(way, (FEW + 8, 256, 2, 8), 400, 30 + seed, numbered=True)
    return {"checked": checked}


def wrong_body() -> dict[str, object]:
    """Every rank raises where one names an expert that does not exist, and the group goes on."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    x, ids = torch.ones(6, 64, device="cuda"), torch.zeros(6, 1, device="cuda", dtype=torch.int64)
    buffers = tunedcomm.ep_buffers(6, 64, 1, torch.float32)
    raised = 0
    for name in ("library", "tokens_lamport", "tokens_push", "tokens_direct"):
        given: dict[str, Any] = {"num_experts": 2 * world_size, "layout": "tokens"}
        given |= {"buffers": buffers} if name == "tokens_direct" else {}
        with torch.no_grad(), tunedcomm.force("ep_dispatch", name):
            try:
                tunedcomm.ep_dispatch(x, ids + 2 * world_size * (rank == 1), **given).check()
            except tunedcomm.UnsupportedInputError:
                raised += 1
            dist.barrier()
            sent = tunedcomm.ep_dispatch(x, ids, **given)
            sent.check()
            assert sent.counts.tolist() == ([6 * world_size, 0] if rank == 0 else [0, 0]), name
    assert raised == 4, raised
    return {"raised": raised}
