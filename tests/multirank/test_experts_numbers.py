"""`num_tokens` of ep_dispatch in the layout `tokens`: kernels do as many tokens as it says, and read nothing behind."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from harness import run_ranks
from quick import FULL
from test_experts import asked
from test_experts_tokens import EXPERTS, Case, cases_of, check_sent, due_of

import tunedcomm
from tunedcomm.dispatch.groups import get_communicator
from tunedcomm.kernels.moe import tokens as kernels
from tunedcomm.kernels.moe.tokens import CombineTokensPush, DispatchTokensPush
from tunedcomm.spec import Candidate, Problem, get_op
from tunedcomm.symm.layout import LaneLayout

TOPK, HIDDEN = 3, 160  # more packets than threads
SMALL = {"num_blocks": 2, "num_warps": 1, "split": 1, "items": 1}
IN_PARTS = {"num_blocks": 4, "num_warps": 1, "split": 2, "items": 2}
WIDE = {"num_blocks": 4, "num_warps": 1, "split": 1, "items": 1}  # more blocks than tokens of a piece
# Variant and config of the dispatch, then of the combine, tokens, those that may go without flags, and whether in
# buffers. More pieces than the ring holds, one piece alone, tokens that the last piece does not fill.
WAYS: tuple[tuple[Any, Any, int, int, bool], ...] = (
    (("tokens_push", {**SMALL, "chunk_tokens": 2}), ("tokens_push", {**SMALL, "chunk_tokens": 2}), 15, 4, False),
    (("tokens_push", {**IN_PARTS, "chunk_tokens": 4}), ("tokens_push", {**IN_PARTS, "chunk_tokens": 2}), 9, 2, False),
    (("tokens_push", {**WIDE, "chunk_tokens": 8}), ("tokens_push", {**WIDE, "chunk_tokens": 4}), 5, 128, False),
    (("tokens_push", {**WIDE, "chunk_tokens": 4}), ("library", {}), 5, 1, False),
    (("tokens_lamport", IN_PARTS), ("tokens_lamport", IN_PARTS), 7, 128, False),
    (("tokens_lamport", SMALL), ("tokens_push", {**SMALL, "chunk_tokens": 2}), 5, 2, False),
    (("library", {}), ("tokens_push", {**SMALL, "chunk_tokens": 2}), 7, 4, False),
    (("host_unfused", None), ("host_unfused", None), 6, 4, False),
    (("tokens_direct", IN_PARTS), ("tokens_pull", SMALL), 9, 4, True),
    (("tokens_direct", SMALL), ("tokens_push", {**IN_PARTS, "chunk_tokens": 2}), 12, 8, True),
    (("tokens_direct", SMALL), ("tokens_pull", IN_PARTS), 6, 128, True),
    (("tokens_push", {**SMALL, "chunk_tokens": 4}), ("tokens_pull", SMALL), 6, 0, True),
)
KERNELS = ("tokens_push", "tokens_lamport", "tokens_direct", "tokens_pull")


def garbage_behind(case: Case, number: int) -> Case:
    """Inputs with NaN and ids of no expert from the number on."""
    x, ids, weights = (each.clone() for each in case)
    x[number:], ids[number:], weights[number:] = float("nan"), 1 << 20, float("nan")
    return x, ids, weights


def none_behind(case: Case, number: int) -> Case:
    """The inputs as the reference sees them."""
    x, ids, weights = (each.clone() for each in case)
    ids[number:], weights[number:] = -1, 0
    return x, ids, weights


def counts_of(shuffle: random.Random, turn: int, tokens: int, few: int, world_size: int) -> list[int]:
    """Numbers of all ranks: none, all, few tokens on all ranks, which need no flags, or any."""
    if turn < 2:
        return [(0, tokens)[turn]] * world_size
    kinds = {0, 1, few - 1, few} if turn % 2 else {0, 1, few, few + 1, tokens - 1, tokens}
    return [shuffle.choice(sorted(min(max(kind, 0), tokens) for kind in kinds)) for _ in range(world_size)]


def numbers_body(rank: int, world_size: int) -> None:
    """Numbers of all kinds, other ones on other ranks and in other calls, in one tensor that changes between them."""
    number, experts, shuffle = torch.zeros(1, dtype=torch.int32), EXPERTS * world_size, random.Random(world_size)
    ways = WAYS if FULL or world_size == 2 else WAYS[{3: 0, 4: 2}[world_size] :: 3]
    for seed, ((dispatch, first), (combine, second), tokens, few, in_buffers) in enumerate(ways):
        buffers = tunedcomm.ep_buffers(tokens, HIDDEN, TOPK, torch.float32) if in_buffers else None
        turns = range(8)
        drawn = [counts_of(shuffle, turn, tokens, few, world_size) for turn in turns]
        shuffle.shuffle(drawn)
        with (
            torch.no_grad(),
            mock.patch.object(kernels._ByToken, "few", few),
            tunedcomm.force("ep_dispatch", dispatch, first),
            tunedcomm.force("ep_combine", combine, second),
        ):
            for turn, counts in zip(turns, drawn, strict=True):
                everyone = cases_of(world_size, tokens, TOPK, "mixed", HIDDEN, 7 * seed + turn)
                for x, *_ in everyone:
                    x[:, ::3] *= -0.0
                due = [none_behind(case, count) for case, count in zip(everyone, counts, strict=True)]
                x, ids, weights = garbage_behind(everyone[rank], counts[rank])
                number.fill_(counts[rank])
                sent = tunedcomm.ep_dispatch(
                    x, ids.int() if turn % 2 else ids, num_experts=experts, layout="tokens", num_tokens=number,
                    topk_weights=weights if turn % 3 else None, compact=turn == 1, buffers=buffers,
                )  # fmt: skip
                used = check_sent(sent, due, rank)
                bits = [each.view(torch.int32) for each in (sent.tokens, torch.cat([case[0] for case in due]))]
                assert torch.equal(bits[0][used], bits[1][used]), (dispatch, counts)
                assert sent.token_limits is not None
                most = max(counts) if dispatch in KERNELS else tokens
                assert sent.token_limits.tolist() == [counts[rank], most], (dispatch, counts)
                results = sent.tokens * (rank + 1)
                results[~used] = float("nan")
                if sent.output is not None:
                    results = sent.output.copy_(results)
                out = torch.full_like(x, 9.0)
                y = tunedcomm.ep_combine(results, sent, out=out)
                assert y is out
                assert torch.equal(y[: counts[rank]], due_of(due[rank], world_size)[: counts[rank]]), (combine, counts)
                if combine in KERNELS:
                    assert (y[counts[rank] :] == 9.0).all(), "rows of other tokens are not written"
    workspace = get_communicator().workspace
    assert workspace is not None
    assert workspace.rearm("eager") == 0, "the sentinel is back wherever it was"


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_numbers(world_size: int) -> None:
    run_ranks(world_size, numbers_body, timeout=500)


def mixed_body(rank: int, world_size: int) -> None:
    """Calls with a number and without take turns; gradients, a single rank, and quantised rows go by ids of −1."""
    experts, tokens = EXPERTS * world_size, 6
    everyone = cases_of(world_size, tokens, TOPK, "mixed", 128, 5)
    counts = [(2, 5, 0, 6)[r] for r in range(world_size)]
    due = [none_behind(case, count) for case, count in zip(everyone, counts, strict=True)]
    whole, cut = everyone[rank], garbage_behind(everyone[rank], counts[rank])
    number, given = torch.tensor(counts[rank], dtype=torch.int32), {"num_experts": experts, "layout": "tokens"}
    for dispatch, combine in itertools.product(("tokens_push", "tokens_lamport"), repeat=2) if world_size > 1 else ():
        with torch.no_grad(), tunedcomm.force("ep_dispatch", dispatch), tunedcomm.force("ep_combine", combine):
            for turn in range(4):
                case, expected = ((whole, everyone), (cut, due))[turn % 2]
                limited = {"num_tokens": number} if turn % 2 else {}
                sent = tunedcomm.ep_dispatch(case[0], case[1], topk_weights=case[2], **given, **limited)
                check_sent(sent, expected, rank)
                assert (sent.token_limits is not None) == bool(limited)
                y = tunedcomm.ep_combine(sent.tokens * (rank + 1), sent)
                rows = slice(counts[rank] if limited else tokens)
                assert torch.equal(y[rows], due_of(expected[rank], world_size)[rows]), (dispatch, combine, turn)
    with torch.no_grad():
        sent = tunedcomm.ep_dispatch(cut[0], cut[1], num_tokens=number, **given)
        plain = tunedcomm.ep_combine(sent.tokens * (rank + 1), sent)
        rows = slice(counts[rank])
        assert torch.equal(plain[rows], due_of(due[rank], world_size)[rows])
        if world_size > 1:
            with tunedcomm.force("ep_combine", "push_quantized"):
                y = tunedcomm.ep_combine(sent.tokens * (rank + 1), sent, wire="int8_group128")
            assert (y[rows] - plain[rows]).abs().max() < 0.05 * plain[rows].abs().max() if counts[rank] else True
    results = (sent.tokens * (rank + 1)).requires_grad_()
    y = tunedcomm.ep_combine(results, sent)
    assert torch.equal(y, due_of(due[rank], world_size)), "rows of other tokens are zeros where gradients are recorded"
    y.sum().backward()
    used = check_sent(sent, due, rank)
    assert results.grad is not None
    assert torch.equal(results.grad[used], torch.ones_like(results)[used])
    clean = torch.where(torch.arange(tokens).unsqueeze(1) < counts[rank], cut[0], 0.0).requires_grad_()
    sent = tunedcomm.ep_dispatch(clean, cut[1], num_tokens=number, **given)
    sent.tokens.sum().backward()
    assert clean.grad is not None
    there = due_of((torch.ones_like(clean), *due[rank][1:]), world_size)
    assert torch.equal(clean.grad != 0, there != 0)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_calls_with_and_without_a_number(world_size: int) -> None:
    run_ranks(world_size, mixed_body, timeout=240)


def wrong_body(rank: int, world_size: int, variant: str, wrong: int) -> None:
    """A number out of its bounds counts as the nearest one, and ends the group with an error that names it."""
    number = torch.tensor([wrong if rank == 0 else 3], dtype=torch.int32)
    x, ids = torch.ones(5, 32), torch.zeros(5, 1).int()
    dispatch = lambda: tunedcomm.ep_dispatch(  # noqa: E731
        x, ids, num_experts=EXPERTS * world_size, layout="tokens", num_tokens=number
    )
    with torch.no_grad(), tunedcomm.force("ep_dispatch", variant):
        if rank == 0:
            with pytest.raises(tunedcomm.UnsupportedInputError, match=f"{wrong}"):
                dispatch()
        else:
            with pytest.raises(tunedcomm.TunedCommError):
                [dispatch() for _ in range(2)]


@pytest.mark.parametrize(("variant", "wrong"), [("tokens_push", 6), ("tokens_lamport", -2), ("library", 1 << 30)])
def test_a_wrong_number_is_an_error(variant: str, wrong: int) -> None:
    run_ranks(2, wrong_body, variant, wrong, timeout=120)


def sorted_body(rank: int, world_size: int) -> None:
    """Rows of experts (layout `rank`) of as many tokens as the dispatch's limits say; other ids are not read."""
    communicator, shuffle, tokens, few = get_communicator(), random.Random(world_size), 11, 4
    problem = asked("ep_combine", (tokens, HIDDEN, TOPK, EXPERTS * world_size), world_size, layout="rank")
    spec = get_op("ep_combine")
    assert spec.ordered_reference is not None
    assert communicator.workspace is not None
    with mock.patch.object(kernels._ByToken, "few", few):
        for config in ({**SMALL, "chunk_tokens": 1}, {**IN_PARTS, "chunk_tokens": 4}):
            launch = communicator.bind(problem, Candidate.of("ep_combine", "tokens_push", config))
            for turn in range(8):
                counts = counts_of(shuffle, turn, tokens, few, world_size)
                everyone = [spec.make_inputs(problem, r, turn, "integers", "cpu") for r in range(world_size)]
                for each, count in zip(everyone, counts, strict=True):
                    each[2][count:] = -1
                    for r, of_rank in enumerate(counts):
                        each[3][r, of_rank:] = -1
                (due,) = spec.ordered_reference(problem, everyone, rank)
                results, weights, ids, held = everyone[rank]
                ids[counts[rank] :] = 1 << 20
                y = torch.full_like(due, 9.0)
                limits = torch.tensor([counts[rank], max(counts)], dtype=torch.int32)
                launch((results, weights, ids, held, limits), (y,), 0)
                assert torch.equal(y[: counts[rank]], due[: counts[rank]]), (config, counts)
                assert (y[counts[rank] :] == 9.0).all()
    assert communicator.workspace.rearm("eager") == 0


@pytest.mark.parametrize("world_size", [2, 3])
def test_sorted_rows(world_size: int) -> None:
    run_ranks(world_size, sorted_body, timeout=200)


def test_as_many_without_flags_as_a_stage_holds() -> None:
    """The tokens that go without flags follow from the problem and the layout alone, and a lane has room for them."""
    problem = Problem("ep_dispatch", (4096, 7168, 8, 256), "bfloat16", 8, reduction="", layout="tokens")
    config = {"num_blocks": 128, "num_warps": 8, "split": 1, "chunk_tokens": 1, "items": 4}
    for variant in (DispatchTokensPush(), CombineTokensPush()):
        found = []
        for mib in (1, 4, 64):
            layout = LaneLayout.for_messages(mib << 20)
            constants, nbytes = variant.with_number(replace(problem, op=variant.op), config, layout)
            assert variant.lane_room(replace(problem, op=variant.op), config, layout).stage == nbytes
            assert nbytes <= layout.stage_bytes
            assert (constants["PARTS"], constants["EACH"]) == (2, 2)
            found.append(constants["FEW"])
        assert found[-1] == 128
        assert sorted(set(found)) == found
