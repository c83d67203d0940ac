"""`num_tokens` of ep_dispatch in the layout `tokens`: kernels do as many tokens as it says, and read nothing behind."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from harness import run_ranks
from quick import FULL
from test_experts_tokens import EXPERTS, Case, cases_of, check_sent, due_of

import tunedcomm
from tunedcomm.dispatch.groups import get_communicator

TOPK, HIDDEN = 3, 160  # more packets than threads
SMALL = {"num_blocks": 2, "num_warps": 1, "split": 1, "items": 1}
IN_PARTS = {"num_blocks": 4, "num_warps": 1, "split": 2, "items": 2}
WIDE = {"num_blocks": 4, "num_warps": 1, "split": 1, "items": 1}  # more blocks than tokens of a piece
# Variant and config of the dispatch, then of the combine, tokens, and whether in buffers. More pieces than the ring
# holds, one piece alone, tokens that the last piece does not fill.
WAYS: tuple[tuple[Any, Any, int, bool], ...] = (
    (("tokens_push", {**SMALL, "chunk_tokens": 2}), ("tokens_push", {**SMALL, "chunk_tokens": 2}), 15, False),
    (("tokens_push", {**IN_PARTS, "chunk_tokens": 4}), ("tokens_push", {**IN_PARTS, "chunk_tokens": 2}), 9, False),
    (("tokens_push", {**WIDE, "chunk_tokens": 8}), ("tokens_push", {**WIDE, "chunk_tokens": 4}), 5, False),
    (("tokens_push", {**WIDE, "chunk_tokens": 4}), ("library", {}), 5, False),
    (("tokens_lamport", IN_PARTS), ("tokens_lamport", IN_PARTS), 7, False),
    (("tokens_lamport", SMALL), ("tokens_push", {**SMALL, "chunk_tokens": 2}), 5, False),
    (("library", {}), ("tokens_push", {**SMALL, "chunk_tokens": 2}), 7, False),
    (("host_unfused", None), ("host_unfused", None), 6, False),
    (("tokens_direct", IN_PARTS), ("tokens_pull", SMALL), 9, True),
    (("tokens_direct", SMALL), ("tokens_push", {**IN_PARTS, "chunk_tokens": 2}), 12, True),
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


def numbers_body(rank: int, world_size: int) -> None:
    """Numbers of all kinds, other ones on other ranks and in other calls, in one tensor that changes between them."""
    number, experts = torch.zeros(1, dtype=torch.int32), EXPERTS * world_size
    ways = WAYS if FULL or world_size == 2 else WAYS[{3: 0, 4: 2}[world_size] :: 3]
    for seed, ((dispatch, first), (combine, second), tokens, in_buffers) in enumerate(ways):
        buffers = tunedcomm.ep_buffers(tokens, HIDDEN, TOPK, torch.float32) if in_buffers else None
        kinds = [0, 1, tokens - 1, tokens, tokens // 2]
        with (
            torch.no_grad(),
            tunedcomm.force("ep_dispatch", dispatch, first),
            tunedcomm.force("ep_combine", combine, second),
        ):
            for turn in range(len(kinds) + 2):
                equal = turn >= len(kinds)  # none at all, then all
                counts = [(0, tokens)[turn % 2] if equal else kinds[(turn + r) % 5] for r in range(world_size)]
                everyone = cases_of(world_size, tokens, TOPK, "mixed", HIDDEN, 7 * seed + turn)
                due = [none_behind(case, count) for case, count in zip(everyone, counts, strict=True)]
                x, ids, weights = garbage_behind(everyone[rank], counts[rank])
                number.fill_(counts[rank])
                sent = tunedcomm.ep_dispatch(
                    x, ids.int() if turn % 2 else ids, num_experts=experts, layout="tokens", num_tokens=number,
                    topk_weights=weights if turn % 3 else None, compact=turn == 1, buffers=buffers,
                )  # fmt: skip
                used = check_sent(sent, due, rank)
                assert sent.token_limits is not None
                most = max(counts) if dispatch in ("tokens_push", "tokens_direct") else tokens
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
    run_ranks(world_size, numbers_body, timeout=280)


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
