"""The sorted layouts of ep_dispatch: weights that travel beside the places of tokens, and `num_tokens`."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from harness import run_ranks
from quick import FULL
from test_experts import asked, by_rank, dense, through_experts
from test_experts_numbers import garbage_behind, none_behind
from variant_checks import bits_of, inputs_of_all, limits_of

import tunedcomm
from tunedcomm.dispatch.communicator import Communicator
from tunedcomm.dispatch.groups import get_communicator
from tunedcomm.kernels.moe.op import dispatched, sources_of, token_shapes
from tunedcomm.kernels.moe.push import _Further
from tunedcomm.spec import Candidate, Problem, check_candidate, get_variant

VARIANTS, HIDDEN = ("push", "two_phase"), 512
SMALL = {"num_blocks": 2, "num_warps": 1, "split": 1, "items": 1}
IN_PARTS = {"num_blocks": 4, "num_warps": 1, "split": 2, "items": 2}
WIDE = {"num_blocks": 4, "num_warps": 1, "split": 1, "items": 1}  # more blocks than tokens of a piece
# Tokens, top-k and config: more pieces than the ring holds, a last piece that is not full, one piece alone.
GRIDS: tuple[tuple[int, int, Any], ...] = (
    (11, 3, {**SMALL, "chunk_tokens": 2}), (9, 2, {**IN_PARTS, "chunk_tokens": 4}), (5, 8, {**WIDE, "chunk_tokens": 8}),
    (13, 1, {**IN_PARTS, "chunk_tokens": 2}),
)  # fmt: skip


def weights_of_all(problem: Problem) -> torch.Tensor:
    """Weights of every rank, of which no two are the same but for zeros: the first of each rank are −0.0."""
    tokens, _, topk, _ = problem.shape
    made = torch.arange(1, problem.world_size * tokens * topk + 1, dtype=torch.float32).view(-1, tokens, topk) / 8
    made[:, 0, 0] = -0.0
    return made


def launched(
    communicator: Communicator, problem: Problem, variant: str, config: Any, given: tuple[Any, ...], capacity: int
) -> list[torch.Tensor]:
    """Outputs of a launch; those of tokens begin as zeros, all others as what they cannot be."""
    candidate = Candidate.of("ep_dispatch", variant, config)
    assert check_candidate(problem, candidate, limits_of(communicator)) is None
    launch = communicator.bind(problem, candidate)
    outputs = [torch.zeros(size, dtype=t) for size, t in token_shapes(problem, capacity, weighted=len(given) > 2)]
    for output in outputs[2:]:
        output.fill_(float("nan") if output.is_floating_point() else torch.iinfo(output.dtype).min)
    launch(given, tuple(outputs), 0)
    return outputs


def bits_body(rank: int, world_size: int) -> None:
    """All outputs, with weights and without in turn; also quantised, skewed, and where ids are −1."""
    communicator = get_communicator()
    forms = itertools.cycle((("padded", ""), ("contiguous", "group128"), ("padded", "token"), ("contiguous", "")))
    for seed, ((tokens, topk, config), variant) in enumerate(itertools.product(GRIDS, VARIANTS)):
        layout, scaling = next(forms)
        problem = asked(
            "ep_dispatch", (tokens, HIDDEN, topk, 4 * world_size), world_size, layout=layout, scaling=scaling
        )
        everyone = inputs_of_all(problem, seed, ("integers", "random")[seed % 3 == 2])
        weights = weights_of_all(problem)
        given = [(*inputs, own) for inputs, own in zip(everyone, weights, strict=True)]
        capacity = world_size * tokens * topk + 128 * 4
        due, _ = dispatched(given, rank, problem, capacity, 128)
        for turn in range(3):
            with_weights = turn != 1
            inputs = given[rank] if with_weights else given[rank][:2]
            outputs = launched(communicator, problem, variant, config, inputs, capacity)
            assert len(outputs[5]) == (world_size if with_weights else 0)
            for number, (got, wanted) in enumerate(zip(outputs, due, strict=False)):
                assert not got.numel() or torch.equal(bits_of(got), bits_of(wanted)), (str(problem), variant, number)


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_weights_travel_with_places(world_size: int) -> None:
    run_ranks(world_size, bits_body, timeout=240)


def overflow_body(rank: int, world_size: int) -> None:
    """Weights come also where tokens have no room, and of calls without memory or a kernel for them."""
    communicator = get_communicator()
    for variant, layout in itertools.product(VARIANTS, ("padded", "contiguous")):
        problem = asked("ep_dispatch", (6, 256, 2, 2 * world_size), world_size, layout=layout, dtype="float32")
        weights = weights_of_all(problem)
        ids = torch.tensor([[0, -1]] * 6)
        given = torch.ones(6, 256), ids, weights[rank]
        with pytest.raises(tunedcomm.CapacityError, match="expert 0"):
            launched(communicator, problem, variant, {**SMALL, "chunk_tokens": 2}, given, 6 * world_size - 1)
        for config in ({**SMALL, "chunk_tokens": 2}, {**IN_PARTS, "chunk_tokens": 8}):
            outputs = launched(communicator, problem, variant, config, given, 6 * world_size)
            assert torch.equal(bits_of(outputs[5]), bits_of(weights + 0.0)), variant


def without_kernel_body(rank: int, world_size: int) -> None:
    """Where there is no kernel that takes weights, they are gathered."""
    _Further.launch = lambda self: None  # type: ignore[method-assign]
    overflow_body(rank, world_size)


@pytest.mark.parametrize("body", [overflow_body, without_kernel_body])
def test_weights_come_where_tokens_have_no_room(body: Any) -> None:
    run_ranks(2, body, timeout=120)


def public_body(rank: int, world_size: int) -> None:
    """Round trips with sums by rank exchange nothing beside the two kernels."""
    communicator, experts = get_communicator(), 4 * world_size
    generator = torch.Generator().manual_seed(2)
    for (tokens, topk), case, variant in itertools.product(((1, 2), (7, 3)), ("mixed", "one", "none"), VARIANTS):
        everyone, weights = [], []
        for _ in range(world_size):
            ids = torch.randint(-1, experts, (tokens, topk), generator=generator)
            ids = {"mixed": ids, "one": torch.full_like(ids, experts - 1), "none": torch.full_like(ids, -1)}[case]
            everyone.append((torch.randint(-8, 8, (tokens, 32), generator=generator).float(), ids))
            weights.append(torch.rand(tokens, topk, generator=generator))
        for layout in ("padded", "contiguous"):
            with tunedcomm.force("ep_dispatch", variant), torch.no_grad():
                sent = tunedcomm.ep_dispatch(
                    *everyone[rank], num_experts=experts, layout=layout, topk_weights=weights[rank],
                    capacity=2 * world_size * tokens * topk + 4 * 128,
                )  # fmt: skip
                assert {key.problem.op for key in communicator.plans} == {"ep_dispatch"}, "no plan of another op"
            y = tunedcomm.ep_combine(through_experts(sent, rank), sent, reduce="rank")
            assert torch.equal(y, by_rank(everyone, weights, rank)), (variant, case, layout)


@pytest.mark.parametrize("world_size", [2, 3])
def test_sums_by_rank_need_no_exchange_of_weights(world_size: int) -> None:
    run_ranks(world_size, public_body, timeout=120)


# Variant and config of the dispatch, then of the combine, how it sums, tokens, and top-k.
WAYS: tuple[tuple[Any, Any, str, int, int], ...] = (
    (("push", {**SMALL, "chunk_tokens": 2}), ("push", {**SMALL, "chunk_tokens": 2}), "token", 13, 3),
    (("two_phase", {**SMALL, "chunk_tokens": 2}), ("tokens_push", {**SMALL, "chunk_tokens": 2}), "rank", 13, 3),
    (("two_phase", {**IN_PARTS, "chunk_tokens": 4}), ("push", {**IN_PARTS, "chunk_tokens": 2}), "token", 9, 2),
    (("push", {**IN_PARTS, "chunk_tokens": 4}), ("tokens_lamport", IN_PARTS), "rank", 9, 2),
    (("two_phase", {**WIDE, "chunk_tokens": 8}), ("lamport", SMALL), "token", 5, 4),
    (("push", {**WIDE, "chunk_tokens": 8}), ("library", {}), "token", 5, 1),
    (("lamport", IN_PARTS), ("host_unfused", None), "rank", 7, 3),
    (("library", {}), ("push", {**SMALL, "chunk_tokens": 2}), "token", 6, 2),
    (("host_unfused", None), ("library", {}), "rank", 6, 2),
    (("two_phase", {**SMALL, "chunk_tokens": 8}), ("push_quantized", {**SMALL, "chunk_tokens": 2}), "rank", 12, 6),
)
UNWRITTEN = ("push", "lamport", "tokens_push", "tokens_lamport")  # they leave rows of y that no token has


def case_of(world_size: int, tokens: int, topk: int, seed: int) -> list[tuple[torch.Tensor, ...]]:
    """Tokens, ids, some of them −1, and weights of every rank."""
    drawn, made = torch.Generator().manual_seed(seed), []
    for _ in range(world_size):
        x = torch.randint(-8, 8, (tokens, HIDDEN), generator=drawn).float()
        ids = torch.randint(-1, 4 * world_size, (tokens, topk), generator=drawn)
        if seed % 3 == 1:
            ids[: tokens // 2] = 4 * world_size - 1  # the last expert gets most
        made.append((x, ids, torch.rand(tokens, topk, generator=drawn)))
    return made


def numbers_body(rank: int, world_size: int) -> None:
    """Numbers of all kinds, other ones on other ranks and in other calls, in one tensor that changes between them."""
    number, experts = torch.zeros(1, dtype=torch.int32), 4 * world_size
    ways = WAYS if FULL or world_size == 2 else {3: WAYS[:2], 4: WAYS[2:4]}[world_size]
    for seed, ((dispatch, first), (combine, second), reduce, tokens, topk) in enumerate(ways):
        kinds = [0, 1, tokens - 1, tokens, tokens // 2]
        axes = get_variant("ep_combine", combine).space.names
        config = None if second is None else {name: value for name, value in second.items() if name in axes}
        with (
            torch.no_grad(),
            tunedcomm.force("ep_dispatch", dispatch, first),
            tunedcomm.force("ep_combine", combine, config),
        ):
            for turn in range(len(kinds) + 2):
                equal = turn >= len(kinds)  # none at all, then all
                counts = [(0, tokens)[turn % 2] if equal else kinds[(turn + r) % 5] for r in range(world_size)]
                everyone = case_of(world_size, tokens, topk, 7 * seed + turn)
                due = [none_behind(case, count) for case, count in zip(everyone, counts, strict=True)]  # type: ignore[arg-type]
                x, ids, weights = garbage_behind(everyone[rank], counts[rank])  # type: ignore[arg-type]
                number.fill_(counts[rank])
                layout, travel = ("padded", "contiguous")[turn % 2], reduce == "rank" and turn != 2
                quantize = "token" if turn == 3 else None
                problem = asked(
                    "ep_dispatch", (tokens, HIDDEN, topk, experts), world_size, layout=layout, scaling=quantize or "",
                    dtype="float32",
                )  # fmt: skip
                capacity = 2 * world_size * tokens * topk + 4 * 128
                wanted, _ = dispatched(due, rank, problem, capacity, 128)
                sent = tunedcomm.ep_dispatch(
                    x, ids.int() if turn % 2 else ids, num_experts=experts, layout=layout, capacity=capacity,
                    topk_weights=weights if travel else None, quantize=quantize, num_tokens=number,
                )  # fmt: skip
                held = sources_of(wanted[4].flatten(0, 1), wanted[0].numel() // HIDDEN) >= 0
                flat = sent.tokens.view(-1, HIDDEN)
                assert torch.equal(bits_of(flat[held]), bits_of(wanted[0].view(-1, HIDDEN)[held])), (dispatch, counts)
                found = (sent.counts, sent.offsets, sent.rows)
                assert all(torch.equal(got, each) for got, each in zip(found, wanted[2:], strict=False)), (
                    dispatch,
                    turn,
                )
                if sent.weights is not None:
                    assert torch.equal(sent.weights, wanted[5]), (dispatch, counts)
                assert sent.token_limits is not None
                most = max(counts) if dispatch in VARIANTS else tokens  # lamport, library
                assert sent.token_limits.tolist() == [counts[rank], most], (dispatch, counts)
                if quantize:
                    continue
                given = None if travel else weights if reduce == "token" else due[rank][2]
                wire = "int8_group128" if combine == "push_quantized" else None
                out = torch.full_like(x, 9.0)
                y = tunedcomm.ep_combine(through_experts(sent, rank), sent, given, reduce=reduce, out=out, wire=wire)  # type: ignore[call-overload]
                assert y is out
                sums = dense if reduce == "token" else by_rank
                expected = sums([case[:2] for case in due], [case[2] for case in due], rank)  # type: ignore[misc]
                used = slice(counts[rank])
                if wire:
                    assert not (y[used] - expected[used]).abs().gt(0.05 * expected.abs().max()).any(), counts
                else:
                    assert torch.equal(y[used], expected[used]), (combine, counts)
                if combine in UNWRITTEN:
                    assert (y[counts[rank] :] == 9.0).all(), "rows of other tokens are not written"
    workspace = get_communicator().workspace
    assert workspace is not None
    assert workspace.rearm("eager") == 0, "the sentinel is back wherever it was"


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_numbers(world_size: int) -> None:
    run_ranks(world_size, numbers_body, timeout=500)


def mixed_body(rank: int, world_size: int) -> None:
    """Calls with a number and without take turns; gradients and a single rank go by ids of −1."""
    experts, tokens = 4 * world_size, 6
    everyone = case_of(world_size, tokens, 2, 5)
    counts = [(2, 5, 0)[r] for r in range(world_size)]
    due = [none_behind(case, count) for case, count in zip(everyone, counts, strict=True)]  # type: ignore[arg-type]
    cut = garbage_behind(everyone[rank], counts[rank])  # type: ignore[arg-type]
    number = torch.tensor(counts[rank], dtype=torch.int32)
    for variant, layout in itertools.product(VARIANTS if world_size > 1 else (), ("padded", "contiguous")):
        with torch.no_grad(), tunedcomm.force("ep_dispatch", variant), tunedcomm.force("ep_combine", "push"):
            for turn in range(4):
                case, expected = ((everyone[rank], everyone), (cut, due))[turn % 2]
                limited: dict[str, Any] = {"num_tokens": number} if turn % 2 else {}
                sent = tunedcomm.ep_dispatch(case[0], case[1], num_experts=experts, layout=layout, **limited)
                assert (sent.token_limits is not None) == bool(limited)
                y = tunedcomm.ep_combine(through_experts(sent, rank), sent, case[2])
                used = slice(counts[rank] if limited else tokens)
                wanted = dense([each[:2] for each in expected], [each[2] for each in expected], rank)  # type: ignore[misc]
                assert torch.equal(y[used], wanted[used]), (variant, layout, turn)
    x = torch.where(torch.arange(tokens).unsqueeze(1) < counts[rank], cut[0], 0.0).requires_grad_()
    for reduce in ("token", "rank"):
        weights = due[rank][2].clone().requires_grad_()
        sent = tunedcomm.ep_dispatch(
            x, cut[1], num_experts=experts, num_tokens=number, topk_weights=weights if reduce == "rank" else None
        )
        given = None if reduce == "rank" else weights
        y = tunedcomm.ep_combine(sent.tokens * 2, sent, given, reduce=reduce)  # type: ignore[call-overload]
        factors = (due[rank][2] * (due[rank][1] >= 0)).sum(1, keepdim=True)
        torch.testing.assert_close(y, 2 * x * factors)
        assert not y[counts[rank] :].any(), "rows of other tokens are zeros where gradients are recorded"
        x.grad = None
        y.sum().backward()
        assert x.grad is not None
        assert weights.grad is not None
        torch.testing.assert_close(x.grad, (2 * factors).expand_as(x))
        of_weights = 2 * x.detach().sum(1, keepdim=True) * (due[rank][1] >= 0)
        torch.testing.assert_close(weights.grad, of_weights)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_calls_with_and_without_a_number(world_size: int) -> None:
    run_ranks(world_size, mixed_body, timeout=240)


def wrong_body(rank: int, world_size: int, variant: str, wrong: int) -> None:
    """A number out of its bounds counts as the nearest one, and ends the group with an error that names it."""
    number = torch.tensor([wrong if rank == 0 else 3], dtype=torch.int32)
    x, ids = torch.ones(5, 32), torch.zeros(5, 1).int()
    with torch.no_grad(), tunedcomm.force("ep_dispatch", variant):
        if rank == 0:
            with pytest.raises(tunedcomm.UnsupportedInputError, match=f"{wrong}"):
                tunedcomm.ep_dispatch(x, ids, num_experts=2 * world_size, num_tokens=number)
        else:
            with pytest.raises(tunedcomm.TunedCommError):
                [tunedcomm.ep_dispatch(x, ids, num_experts=2 * world_size, num_tokens=number) for _ in range(2)]


@pytest.mark.parametrize(("variant", "wrong"), [("push", 6), ("two_phase", -2), ("lamport", 1 << 30), ("library", 7)])
def test_a_wrong_number_is_an_error(variant: str, wrong: int) -> None:
    run_ranks(2, wrong_body, variant, wrong, timeout=120)


def checked_body(rank: int, world_size: int) -> None:
    """Checks with the library and for NaN leave out the tokens behind the number, too."""
    tokens, number = 6, torch.tensor((2, 5)[rank], dtype=torch.int32)
    everyone = case_of(world_size, tokens, 2, 5)
    due = [none_behind(case, count) for case, count in zip(everyone, (2, 5), strict=True)]  # type: ignore[arg-type]
    x, ids, weights = garbage_behind(everyone[rank], int(number))  # type: ignore[arg-type]
    wanted = by_rank([case[:2] for case in due], [case[2] for case in due], rank)  # type: ignore[misc]
    for dispatch, combine, layout in (
        ("push", "tokens_push", "contiguous"), ("lamport", "tokens_lamport", "padded"),
        ("tokens_push", "tokens_push", "tokens"),
    ):  # fmt: skip
        with torch.no_grad(), tunedcomm.force("ep_dispatch", dispatch), tunedcomm.force("ep_combine", combine):
            for turn in range(2):
                given: dict[str, Any] = {"num_tokens": number, "topk_weights": weights, "layout": layout}
                sent: Any = tunedcomm.ep_dispatch(x, ids, num_experts=4 * world_size, **given)
                if layout == "tokens":
                    tunedcomm.ep_combine(sent.tokens, sent)
                    continue
                y = tunedcomm.ep_combine(through_experts(sent, rank), sent, reduce="rank")
                assert torch.equal(y[:number], wanted[:number]), (dispatch, turn)


def test_checks_leave_out_the_same_tokens() -> None:
    run_ranks(2, checked_body, timeout=120, env={"TUNEDCOMM_CHECK": "1", "TUNEDCOMM_NAN_CHECK": "1"})
