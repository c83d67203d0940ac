"""ep_dispatch and ep_combine in the layouts `tokens` and `rank`: bits of the reference, public calls, buffers."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from harness import run_ranks
from quick import FULL
from test_experts import asked, check
from variant_checks import limits_of

import tunedcomm
from tunedcomm.dispatch.groups import get_communicator
from tunedcomm.fp8 import WIRES
from tunedcomm.spec import variants

SHAPES = [(7, 128, 2, 12), (3, 64, 8, 60), (2, 32, 3, 12)]
LARGE = [(1, 16, 1, 12), (40, 64, 3, 24), (64, 256, 8, 60), (300, 128, 8, 60)]
OPS = ("ep_dispatch", "ep_combine")
WAYS = (*((op, "tokens") for op in OPS), ("ep_combine", "rank"))  # with the layout
PLAIN = ("library", "host_unfused", "tokens_lamport", "tokens_push")
EXPERTS = 4  # of a rank
# Ranks that have experts of a token add this times the token.
Case = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def bits_body(rank: int, world_size: int, shapes: list[tuple[int, int, int, int]]) -> set[tuple[str, str, str]]:
    """Every variant, several times, so that stages and rings come round; then grids with lanes that have no token."""
    communicator, ran = get_communicator(), set()
    limits = limits_of(communicator)
    for seed, shape in enumerate(shapes):
        for number, (op, layout) in enumerate(WAYS):
            kind, dtype = ("random", "integers")[(seed + number) % 2], ("bfloat16", "float32", "float16")[seed % 3]
            problem = asked(op, shape, world_size, layout=layout, dtype=dtype)
            for name, variant in variants(op).items():
                if variant.infeasible(problem, variant.default(problem, limits), limits) is None:
                    for turn in range(2 if variant.kernels else 1):
                        check(communicator, problem, name, seed + turn, kind)
                    ran.add((op, layout, name))
    # More pieces than the ring holds, tokens in two parts, threads that hold several packets.
    for seed, (tokens, blocks, split, items, chunk) in enumerate(((6, 2, 2, 2, 1), (3, 4, 1, 2, 4))):
        for op, layout in WAYS if world_size == 2 else ():
            problem = asked(op, (tokens, 1024, 2, 6), world_size, layout=layout)
            config: dict[str, Any] = {"num_blocks": blocks, "num_warps": 1, "split": split, "items": items}
            check(communicator, problem, "tokens_lamport", seed, "integers", config)
            check(communicator, problem, "tokens_push", seed, "integers", {**config, "chunk_tokens": chunk})
    assert communicator.workspace is not None
    assert communicator.workspace.rearm("eager") == 0, "the sentinel is back wherever it was"
    return ran


@pytest.mark.parametrize("world_size", [2, 3])
def test_bits(world_size: int) -> None:
    shapes = SHAPES + LARGE if FULL else SHAPES
    every = {(*way, variant) for way, variant in itertools.product(WAYS, PLAIN)}
    assert all(every <= ran for ran in run_ranks(world_size, bits_body, shapes, timeout=280))


def wires_body(rank: int, world_size: int) -> set[str]:
    """Rows that travel quantised: bits of the reference, and what the public call makes of them."""
    communicator, ran = get_communicator(), set()
    limits = limits_of(communicator)
    for seed, (layout, wire) in enumerate(itertools.product(("tokens", "rank"), WIRES)):
        for shape in ((7, 256, 2, 12), (1, 128, 8, 60)):
            dtype, kind = ("bfloat16", "float32", "float16")[seed % 3], ("random", "integers")[seed % 2]
            problem = asked("ep_combine", shape, world_size, layout=layout, dtype=dtype, scaling=wire)
            for name, variant in variants("ep_combine").items():
                if variant.infeasible(problem, variant.default(problem, limits), limits) is None:
                    check(communicator, problem, name, seed, kind)
                    ran.add(name)
        # More pieces than the ring holds, tokens in two parts.
        problem = asked("ep_combine", (7, 1024, 2, 6), world_size, layout=layout, scaling=wire)
        config = {"num_blocks": 2, "num_warps": 1, "split": 1 + seed % 2, "chunk_tokens": 1 + (seed + 1) % 2}
        check(communicator, problem, "push_quantized", seed, "integers", config)
    ids = torch.arange(6).view(3, 2) % (2 * world_size)
    sent = tunedcomm.ep_dispatch(torch.randn(3, 128), ids, num_experts=2 * world_size, layout="contiguous")
    results = (torch.randn(sent.tokens.shape) + rank).requires_grad_()
    weights, sums = torch.rand(3, 2), []
    for wire in (None, *WIRES):
        sums.append(tunedcomm.ep_combine(results, sent, weights, reduce="rank", wire=wire))
    for quantised, most in zip(sums[1:], (0.04, 0.012), strict=True):
        error = (quantised - sums[0]).norm() / sums[0].norm()
        assert 0 < error < most, error
    sums[1].sum().backward()
    assert results.grad is not None
    exact = torch.autograd.grad(tunedcomm.ep_combine(results, sent, weights, reduce="rank").sum(), results)[0]
    assert torch.equal(results.grad, exact), "gradients are not quantised"
    ordered = tunedcomm.ep_combine(results, sent, weights, reduce="rank", wire=WIRES[0], numerics="ordered")
    assert torch.equal(ordered, sums[0])
    for bad in ({"wire": WIRES[0]}, {"wire": "fp4", "reduce": "rank"}):
        with pytest.raises(tunedcomm.UnsupportedInputError, match="wire"):
            tunedcomm.ep_combine(results, sent, weights, **bad)  # type: ignore[arg-type]
    return ran


@pytest.mark.parametrize("world_size", [2, 3])
def test_rows_travel_quantised(world_size: int) -> None:
    for ran in run_ranks(world_size, wires_body, timeout=200):
        assert ran == {"library", "push_quantized", "host_quantized"}


def cases_of(world_size: int, tokens: int, topk: int, how: str, hidden: int, seed: int) -> list[Case]:
    """(tokens, ids, weights) of every rank, whole numbers: all kinds of ids, all tokens to one expert, or none."""
    generator, experts, found = torch.Generator().manual_seed(seed), EXPERTS * world_size, []
    for _ in range(world_size):
        x = torch.randint(-8, 8, (tokens, hidden), generator=generator).float()
        ids = torch.randint(-1, experts, (tokens, topk), generator=generator)
        ids = {"mixed": ids, "one": torch.full_like(ids, experts - 1), "none": torch.full_like(ids, -1)}[how]
        found.append((x, ids, torch.randint(0, 4, (tokens, topk), generator=generator).float()))
    return found


def check_sent(sent: tunedcomm.TokenDispatchResult, everyone: list[Case], rank: int) -> torch.Tensor:
    """What is in use is there, and listed where that was asked for; returns which rows are."""
    ids, mine = torch.cat([each[1] for each in everyone]), rank * EXPERTS
    here = (ids >= mine) & (ids < mine + EXPERTS)
    used = here.any(1)
    assert torch.equal(sent.expert_ids, torch.where(here, ids - mine, -1).int())
    assert sent.weights is None or torch.equal(sent.weights, torch.cat([each[2] for each in everyone]))
    assert torch.equal(sent.tokens[used], torch.cat([each[0] for each in everyone])[used])
    assert sent.counts.tolist() == [int((ids == mine + e).sum()) for e in range(EXPERTS)]
    if sent.row_ids is not None:
        assert sent.num_rows is not None
        assert sent.row_ids[: int(sent.num_rows)].tolist() == used.nonzero().flatten().tolist()
    return used


def due_of(case: Case, world_size: int) -> torch.Tensor:
    """The sum of (r + 1) times the token over the ranks r that have experts of it."""
    x, ids, _ = case
    there = [((ids >= 0) & (ids // EXPERTS == r)).any(1, keepdim=True) for r in range(world_size)]
    return sum((x * (r + 1) * here for r, here in enumerate(there)), torch.zeros_like(x))


def public_body(rank: int, world_size: int) -> None:
    """Round trips: all tokens to one expert, none at all, no tokens, dropped ones; then gradients and wrong ids."""
    experts = EXPERTS * world_size
    for tokens, topk, how in itertools.product((0, 5), (1, 2), ("mixed", "one", "none")):
        everyone = cases_of(world_size, tokens, topk, how, 32, 1)
        x, ids, weights = everyone[rank]
        given = {"topk_weights": weights, "compact": True} if topk == 2 else {}
        torch.full((world_size * tokens, 32), float("nan"))  # memory that calls are given next
        sent = tunedcomm.ep_dispatch(
            x.t().contiguous().t(), ids.int() if topk == 1 else ids, num_experts=experts, layout="tokens", **given
        )
        sent.check()
        used = check_sent(sent, everyone, rank)
        assert not sent.tokens[~used].any(), "zeros, for gradients are recorded"
        out = torch.empty(2, *x.shape)[1]
        assert tunedcomm.ep_combine(sent.tokens * (rank + 1), sent, out=out, numerics="ordered") is out
        assert torch.equal(out, due_of(everyone[rank], world_size)), (tokens, topk, how)
    x, ids, weights = (each.requires_grad_(each.is_floating_point()) for each in cases_of(1, 5, 2, "mixed", 8, 2)[0])
    ids = torch.where(ids < 0, ids, ids * world_size)

    def layer(x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Expert e multiplies the sine of a token by e + 1."""
        sent = tunedcomm.ep_dispatch(x, ids, num_experts=experts, layout="tokens", topk_weights=weights)
        assert sent.weights is not None
        factors = sent.weights * (sent.expert_ids >= 0) * (sent.expert_ids + 1 + rank * EXPERTS)
        return tunedcomm.ep_combine(sent.tokens.sin() * factors.sum(1, keepdim=True), sent)

    y, alike = layer(x, weights), [each.detach().clone().requires_grad_() for each in (x, weights)]
    expected = alike[0].sin() * (alike[1] * (ids >= 0) * (ids + 1)).sum(1, keepdim=True)
    torch.testing.assert_close(y, expected)
    for result in (y, expected):
        result.square().sum().backward()  # type: ignore[no-untyped-call]
    torch.testing.assert_close([x.grad, weights.grad], [each.grad for each in alike])
    options(rank, world_size)
    x, few = torch.ones(6, 64), torch.zeros(6, 1).int()
    for variant in PLAIN if world_size > 1 else PLAIN[:1]:
        with tunedcomm.force("ep_dispatch", variant):
            with pytest.raises(tunedcomm.UnsupportedInputError, match="do not exist"):
                tunedcomm.ep_dispatch(x, few + experts * (rank == 0), num_experts=experts, layout="tokens")
            sent = tunedcomm.ep_dispatch(x, few, num_experts=experts, layout="tokens")
            assert sent.counts.tolist() == [6 * world_size * (rank == 0), 0, 0, 0], variant


def options(rank: int, world_size: int) -> None:
    """Tokens in fp8 with their scales, replicas of experts, and fewer tokens than x has room for."""
    experts, tokens = EXPERTS * world_size, 5
    everyone = cases_of(world_size, tokens, 2, "mixed", 128, 3)
    x, ids, weights = everyone[rank]
    narrow, ids_of_all = [each[0].to(torch.float8_e4m3fn) for each in everyone], torch.stack([c[1] for c in everyone])
    for layout, shape in itertools.product(("tokens", "padded", "contiguous"), ((), (1,))):
        every_scale = torch.arange(1.0, 1 + world_size * tokens).view(world_size, tokens, *shape)
        given: dict[str, Any] = {"num_experts": experts, "layout": layout}
        sent = tunedcomm.ep_dispatch(narrow[rank], ids, scales=every_scale[rank], **given)
        assert sent.scales is not None
        assert sent.tokens.dtype == torch.float8_e4m3fn
        flat, scales = sent.tokens.float().reshape(-1, 128), sent.scales.reshape(-1)
        here = (ids_of_all >= rank * EXPERTS) & (ids_of_all < (rank + 1) * EXPERTS)
        rows = torch.arange(world_size * tokens).view(world_size, tokens, 1).expand(here.shape)
        for r, t, k in here.nonzero().tolist():
            row = int((rows if isinstance(sent, tunedcomm.TokenDispatchResult) else sent.rows)[r, t, k])
            assert torch.equal(flat[row], narrow[r][t].float())
            assert scales[row] == every_scale.view(world_size, tokens)[r, t]
        y = tunedcomm.ep_combine(sent.tokens.float(), sent, *([] if layout == "tokens" else [torch.ones(tokens, 2)]))
        assert y.shape == x.shape
    table = torch.tensor([[1, 3, -1], [0, -1, -1], [3, 2, 1]]).int()  # of 3 logical experts
    logical, count = ids_of_all[rank].remainder(4) - 1, torch.tensor([rank + 2]).int()
    sent = tunedcomm.ep_dispatch(
        x, logical, num_experts=experts, layout="tokens", expert_map=table, num_tokens=count, topk_weights=weights
    )
    for t, k in itertools.product(range(tokens), range(2)):
        chosen = [each for each in table[logical[t, k]].tolist() if each >= 0]
        due = -1 if logical[t, k] < 0 or t >= rank + 2 else chosen[(t + rank) % len(chosen)]
        assert int(sent.topk_ids[t, k]) == due, (t, k)
    y = tunedcomm.ep_combine(sent.tokens * (rank + 1), sent)
    assert torch.equal(y, due_of((x, sent.topk_ids, weights), world_size))
    assert not y[rank + 2 :].any()
    wrong: list[tuple[str, dict[str, Any]]] = [
        ("scales", {"x": narrow[rank], "scales": x}), ("scales", {"scales": torch.ones(5)}),
        ("quantize", {"x": narrow[rank], "scales": torch.ones(5), "quantize": "token"}),
        ("expert_map", {"expert_map": table.long()}), ("num_tokens", {"num_tokens": torch.tensor(3)}),
        ("do not exist", {"topk_ids": torch.full_like(logical, 3), "expert_map": table}),
    ]  # fmt: skip
    for match, change in wrong:
        with pytest.raises(tunedcomm.UnsupportedInputError, match=match):
            tunedcomm.ep_dispatch(**{"x": x, "topk_ids": logical, "num_experts": experts, **change})


@pytest.mark.parametrize("world_size", [1, 2])
def test_public_calls(world_size: int) -> None:
    run_ranks(world_size, public_body, timeout=200)


def buffers_body(rank: int, world_size: int) -> None:
    """Slots in turn, by every variant, fewer tokens than there is room for; a slot that was used again is refused."""
    buffers = tunedcomm.ep_buffers(9, 64, 2, torch.float32)
    experts, turn = EXPERTS * world_size, 0
    ways = list(itertools.product((*PLAIN, "tokens_direct"), (*PLAIN, "tokens_pull")))
    for dispatch, combine in ways[:: 1 if FULL else 6]:
        with tunedcomm.force("ep_dispatch", dispatch), tunedcomm.force("ep_combine", combine):
            for tokens in (9, 4, 0):
                everyone = cases_of(world_size, tokens, 2, "mixed", 64, turn)
                x, ids, weights = everyone[rank]
                given = weights if turn % 3 else None
                sent = tunedcomm.ep_dispatch(
                    x, ids, num_experts=experts, layout="tokens", topk_weights=given, buffers=buffers
                )
                assert sent.output is not None
                assert not tokens or sent.tokens.data_ptr() == buffers._slots[turn % 2][0].data_ptr()
                check_sent(sent, everyone, rank)
                torch.mul(sent.tokens, rank + 1, out=sent.output)
                y = tunedcomm.ep_combine(sent.output, sent)
                assert torch.equal(y, due_of(everyone[rank], world_size)), (dispatch, combine, tokens)
                turn += 1
    x, ids = torch.ones(3, 64), torch.zeros(3, 2).int()
    with tunedcomm.force("ep_dispatch", "tokens_direct"):
        with pytest.raises(tunedcomm.UnsupportedInputError, match="do not exist"):
            tunedcomm.ep_dispatch(x, ids + experts * (rank == 0), num_experts=experts, layout="tokens", buffers=buffers)
    sent = [tunedcomm.ep_dispatch(x, ids, num_experts=experts, layout="tokens", buffers=buffers) for _ in range(3)]
    with pytest.raises(tunedcomm.UnsupportedInputError, match="depth"):
        tunedcomm.ep_combine(sent[0].tokens, sent[0])
    for match, call in (
        ("buffers", lambda: tunedcomm.ep_dispatch(x[:, :8], ids, num_experts=8, layout="tokens", buffers=buffers)),
        ("buffers", lambda: tunedcomm.ep_dispatch(x, ids, num_experts=8, buffers=buffers)),  # type: ignore[call-overload]
        ("weights", lambda: tunedcomm.ep_dispatch(x, ids, num_experts=8, topk_weights=x)),  # type: ignore[call-overload]
        ("capacity", lambda: tunedcomm.ep_dispatch(x, ids, num_experts=8, layout="tokens", capacity=9)),  # type: ignore[call-overload]
        ("quantize", lambda: tunedcomm.ep_dispatch(x, ids, num_experts=8, layout="tokens", quantize="token")),  # type: ignore[call-overload]
        ("topk_weights", lambda: tunedcomm.ep_combine(sent[2].tokens, sent[2], x[:, :2])),
        ("row", lambda: tunedcomm.ep_combine(sent[2].tokens[:2], sent[2])),
        ("expert_ids", lambda: tunedcomm.ep_combine(sent[2].tokens, replace(sent[2], expert_ids=ids))),
        ("depth", lambda: tunedcomm.ep_buffers(3, 8, 1, depth=0)),
        ("differentiable", lambda: tunedcomm.ep_dispatch(
            x.requires_grad_(), ids, num_experts=experts, layout="tokens", buffers=buffers
        )),
    ):  # fmt: skip
        with pytest.raises(tunedcomm.UnsupportedInputError, match=match):
            call()


def test_buffers() -> None:
    run_ranks(2, buffers_body, timeout=200)
