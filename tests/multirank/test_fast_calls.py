"""The shortest way from a call to its launch: taken when it may be, and never when it may not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from cases import Ranks

import tunedcomm
from tunedcomm.dispatch.communicator import get_communicator
from tunedcomm.ops import call as call_module

NUMEL = 600
found: list[bool] = []


def spy(rank: int) -> None:
    """Note of every call whether it went the short way."""
    real = call_module.make_fast_call

    def making(*arguments: object) -> Callable[..., torch.Tensor | None] | None:
        call = real(*arguments)  # type: ignore[arg-type]
        if call is None:
            return None

        def noting(*asked: object) -> torch.Tensor | None:
            result = call(*asked)  # type: ignore[arg-type]
            found.append(result is not None)
            return result

        return noting

    call_module.make_fast_call = making  # type: ignore[assignment]


RANKS = Ranks(setup=spy)


def went(call: Callable[[], torch.Tensor]) -> tuple[bool, torch.Tensor]:
    found.clear()
    out = call()
    return any(found), out


def ones(rank: int) -> torch.Tensor:
    return torch.full((NUMEL,), rank + 1.0)


def test_the_second_call_is_fast(rank: int) -> None:
    x, held, out = ones(rank), ones(rank), torch.empty(NUMEL)
    with tunedcomm.force("all_reduce", "lamport"):
        for call, value in (
            (lambda: tunedcomm.all_reduce(x), 3.0),
            (lambda: tunedcomm.all_reduce(x, out=out), 3.0),
            (lambda: tunedcomm.all_reduce_(held.fill_(rank + 1.0)), 3.0),
            (lambda: tunedcomm.all_reduce(x, op="avg"), 1.5),
            (lambda: tunedcomm.all_reduce(x, numerics="ordered"), 3.0),
            (lambda: tunedcomm.all_reduce(x, max_sms=4), 3.0),
        ):
            for number in range(4):
                fast, result = went(call)
                assert fast or number < 2
                assert torch.equal(result, torch.full((NUMEL,), value))
        assert went(lambda: tunedcomm.all_reduce(x, out=out))[1] is out
        assert went(lambda: tunedcomm.all_reduce_(held.fill_(2.0)))[1] is held
        assert torch.equal(held, torch.full((NUMEL,), 4.0))
        other = torch.full((NUMEL,), 5.0)
        fast, result = went(lambda: tunedcomm.all_reduce(other))
        assert fast, "another tensor of the same kind"
        assert torch.equal(result, torch.full((NUMEL,), 10.0))
        assert torch.equal(other, torch.full((NUMEL,), 5.0))


def test_what_only_looks_alike_is_not_fast(rank: int) -> None:
    """Same shape and dtype, but not the same kind of tensor: the right result, the longer way."""
    x = ones(rank)
    expected = torch.full((NUMEL,), 3.0)
    wide = torch.full((NUMEL, 2), rank + 1.0)
    unaligned = torch.full((NUMEL + 1,), rank + 1.0)[1:]
    negated = torch._neg_view(torch.full((NUMEL,), -(rank + 1.0)))
    with tunedcomm.force("all_reduce", "lamport"):
        for _ in range(3):
            tunedcomm.all_reduce(x)
        assert went(lambda: tunedcomm.all_reduce(x))[0]
        for name, odd in (("strided", wide[:, 0]), ("unaligned", unaligned), ("negated", negated)):
            fast, result = went(lambda odd=odd: tunedcomm.all_reduce(odd))  # type: ignore[misc]
            assert not fast, name
            assert torch.equal(result, expected), name
        with pytest.raises(tunedcomm.UnsupportedInputError, match="not differentiable"):
            tunedcomm.all_reduce(ones(rank).requires_grad_(), op="max")
        with torch.no_grad():
            assert torch.equal(tunedcomm.all_reduce(ones(rank).requires_grad_()), expected)
        for _ in range(3):
            with torch.inference_mode():
                assert torch.equal(tunedcomm.all_reduce(x), expected)
                assert torch.equal(tunedcomm.all_reduce(ones(rank)), expected)
        assert torch.equal(tunedcomm.all_reduce(x), expected)


def test_odd_outputs(rank: int) -> None:
    """An `out` that is not like the one that was served before."""
    x, out, expected = ones(rank), torch.empty(NUMEL), torch.full((NUMEL,), 3.0)
    with tunedcomm.force("all_reduce", "lamport"):
        for _ in range(3):
            tunedcomm.all_reduce(x, out=out)
        assert went(lambda: tunedcomm.all_reduce(x, out=out))[0]
        column = torch.empty(NUMEL, 2)[:, 1]
        unaligned = torch.empty(NUMEL + 1)[1:]
        for odd in (column, unaligned):
            fast, result = went(lambda odd=odd: tunedcomm.all_reduce(x, out=odd))  # type: ignore[misc]
            assert not fast
            assert result is odd
            assert torch.equal(result, expected)
        for bad in (torch.empty(NUMEL, dtype=torch.float64), torch.empty(NUMEL + 4), "out", torch.empty(2, NUMEL // 2)):
            with pytest.raises(tunedcomm.UnsupportedInputError, match="out"):
                tunedcomm.all_reduce(x, out=bad)  # type: ignore[arg-type]
        both = torch.full((2 * NUMEL,), rank + 1.0)
        with pytest.raises(tunedcomm.UnsupportedInputError, match="overlaps"):
            tunedcomm.all_reduce(both[:NUMEL], out=both[8 : NUMEL + 8])
        same = ones(rank)
        assert torch.equal(tunedcomm.all_reduce(same, out=same.view(NUMEL)), expected), "out covers x exactly"


def test_what_changes_the_choice(rank: int) -> None:
    """Forcing, another snapshot and released communicators are seen by the very next call."""
    x, expected = ones(rank), torch.full((NUMEL,), 3.0)
    with tunedcomm.force("all_reduce", "lamport"):
        for _ in range(3):
            tunedcomm.all_reduce(x)
        before = get_communicator()
        assert before.fast_calls
        with tunedcomm.force("all_reduce", "two_shot"):
            assert not before.fast_calls
            assert torch.equal(tunedcomm.all_reduce(x), expected)
        assert not before.fast_calls
        tunedcomm.all_reduce(x)
    before.replace_snapshot(before.snapshot)
    assert not before.fast_calls
    fast, result = went(lambda: tunedcomm.all_reduce(x))
    assert not fast
    assert torch.equal(result, expected)
    tunedcomm.release_communicators()
    assert torch.equal(tunedcomm.all_reduce(x), expected)
    assert get_communicator() is not before


def test_symmetric_tensors(rank: int) -> None:
    """A tensor that becomes symmetric is another problem, though it looks the same."""
    with tunedcomm.force("all_reduce", "one_shot"):
        plain = ones(rank)
        for _ in range(3):
            tunedcomm.all_reduce(plain)
        shared = tunedcomm.symmetric_empty(NUMEL, dtype=torch.float32)
        shared.fill_(rank + 1.0)
        fast, result = went(lambda: tunedcomm.all_reduce(shared))
        assert not fast
        assert torch.equal(result, torch.full((NUMEL,), 3.0))
        assert not went(lambda: tunedcomm.all_reduce(plain))[0], "made before any tensor was symmetric"
        for tensor in (plain, shared, plain, shared):
            fast, result = went(lambda tensor=tensor: tunedcomm.all_reduce(tensor))  # type: ignore[misc]
            assert fast, "each by a call of its own"
            assert torch.equal(result, torch.full((NUMEL,), 3.0))
    dist.barrier()
