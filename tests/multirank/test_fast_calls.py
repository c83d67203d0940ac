"""A call besides its launch: a repeated one takes the shortest way if it may, and asks nothing of anybody."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cases import Ranks, replaced

import tunedcomm
from tunedcomm import kernels
from tunedcomm.dispatch import communicator as communicator_module
from tunedcomm.dispatch import plans as plans_module
from tunedcomm.dispatch.groups import get_communicator
from tunedcomm.kernels.common.launch import AddressLaunch
from tunedcomm.ops import call as call_module
from tunedcomm.ops import fast_call
from tunedcomm.spec import Problem, get_variant, register_variant

NUMEL = 600
found: list[bool] = []


def spy() -> None:
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


def test_calls_that_never_ask_the_last_fast_call(rank: int) -> None:
    x, ids, weights = torch.ones(4, 16), torch.tensor([[0, 3]] * 4), torch.full((4, 2), 0.5)
    sent = tunedcomm.ep_dispatch(x, ids, num_experts=4)
    with torch.no_grad():
        for number in range(5):
            fast, out = went(lambda: tunedcomm.ep_combine(sent.tokens, sent, weights))
            assert fast or number < 2
            assert torch.equal(out, x)


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
        tunedcomm.all_reduce(shared)
        for tensor in (plain, shared, plain, shared):
            fast, result = went(lambda tensor=tensor: tunedcomm.all_reduce(tensor))  # type: ignore[misc]
            assert fast, "each by a call of its own"
            assert torch.equal(result, torch.full((NUMEL,), 3.0))
    dist.barrier()


# The rest of a call besides its launch: a new problem asks no other rank, a repeated call asks nothing at all


CALLS = 200
MOST_FILES = 12
# Audit events of the interpreter that no repeated call may raise.
FORBIDDEN = ("open", "compile", "exec", "import", "socket.", "subprocess.", "os.", "shutil.", "sqlite3.", "marshal.")
seen: list[str] = []
watching: list[bool] = []
launches: list[int] = []


def plant() -> None:
    """`nothing`: a kernel that costs nothing, for Triton's interpreter is no part of the path."""
    kernels.discover()
    good = get_variant("all_reduce", "lamport")

    def bind(problem: Problem, config: Mapping[str, Any], workspace: Any) -> AddressLaunch:
        return AddressLaunch(lambda stream, x, out: launches.append(out))

    register_variant(dataclasses.replace(good, name="nothing", bind=bind))
    sys.addaudithook(lambda event, _: seen.append(event) if watching and event.startswith(FORBIDDEN) else None)


def setup(rank: int) -> None:
    spy()
    plant()


RANKS = Ranks(setup=setup)


@contextmanager
def no_communication() -> Iterator[None]:
    """Inside the block nothing may be asked of `torch.distributed`."""

    def refuse(*arguments: Any, **options: Any) -> Any:
        raise AssertionError("a rank asked the others")

    names = ("all_gather_object", "broadcast_object_list", "all_reduce", "all_gather", "broadcast", "barrier")
    with ExitStack() as stack:
        for owner in (dist, dist.distributed_c10d):
            for name in names:
                stack.enter_context(replaced(owner, name, refuse))
        yield


def test_selection_does_not_communicate(rank: int) -> None:
    """Called by one rank alone each time, with problems that were never met: nobody else is asked, nothing is read."""
    get_communicator()
    with tunedcomm.force("all_reduce", "nothing"), no_communication():
        with replaced(communicator_module, "kept_snapshot", None):
            for numel in range(1, 40) if rank == 0 else range(400, 440):
                tunedcomm.all_reduce(torch.ones(numel))
                tunedcomm.all_reduce(torch.ones(numel), numerics="any", max_sms=8)
    dist.barrier()


def test_a_repeated_call_does_nothing_but_launch(rank: int) -> None:
    """It decides nothing, compiles nothing, opens no file, and allocates its output alone."""
    allocated: list[object] = []
    real = fast_call.empty

    def empty(*arguments: Any) -> torch.Tensor:
        allocated.append(arguments)
        return real(*arguments)

    def decide(*arguments: Any, **options: Any) -> Any:
        raise AssertionError("a repeated call was decided anew")

    x, out = torch.ones(64), torch.empty(64)
    several: list[tuple[Callable[[], object], int]] = [
        (lambda: tunedcomm.all_reduce(x), 1),
        (lambda: tunedcomm.all_reduce(x, out=out), 0),
        (lambda: tunedcomm.all_reduce_(x), 0),
    ]
    with tunedcomm.force("all_reduce", "nothing"), replaced(fast_call, "empty", empty):
        for call, num_allocations in several:
            for _ in range(3):
                call()
            with replaced(plans_module, "decide", decide), no_communication():
                for kept in (allocated, launches, seen):
                    kept.clear()
                watching.append(True)
                for _ in range(CALLS):
                    call()
                watching.clear()
            assert seen == []
            assert len(launches) == CALLS
            assert len(allocated) == num_allocations * CALLS


def test_a_first_call_reaches_its_kernel_through_few_files(rank: int) -> None:
    """Whatever asks or launches the variant: the files on the stack, from `ops` to the kernel's, are 12 at most."""
    package, crossed = Path(tunedcomm.__file__).parent, set()

    def profile(frame: FrameType | None, event: str, argument: object) -> None:
        files = []
        while event == "call" and frame is not None:
            files.append(Path(frame.f_code.co_filename))
            frame = frame.f_back
        if files and files[0] == package / "kernels" / "all_reduce" / "one_shot.py":
            crossed.add(frozenset(file for file in files if package in file.parents))

    group = dist.new_group()
    with tunedcomm.force("all_reduce", "one_shot"):
        sys.setprofile(profile)
        tunedcomm.all_reduce(torch.ones(64), group=group)
        sys.setprofile(None)
    assert all(package / "ops" / "collectives.py" in files for files in crossed)
    assert 1 <= max(map(len, crossed)) <= MOST_FILES
