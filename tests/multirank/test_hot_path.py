"""The rest of a call besides its launch: a new problem asks no other rank, a repeated call asks nothing at all."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from cases import Ranks, replaced

import tunedcomm
from tunedcomm import kernels
from tunedcomm.dispatch import communicator as communicator_module
from tunedcomm.dispatch import plans as plans_module
from tunedcomm.dispatch.communicator import get_communicator
from tunedcomm.kernels.common.launch import AddressLaunch
from tunedcomm.ops import call as call_module
from tunedcomm.spec import Problem, get_variant, register_variant

CALLS = 200
MOST_FILES = 12
# Audit events of the interpreter that no repeated call may raise.
FORBIDDEN = ("open", "compile", "exec", "import", "socket.", "subprocess.", "os.", "shutil.", "sqlite3.", "marshal.")
seen: list[str] = []
watching: list[bool] = []
launches: list[int] = []


def plant(rank: int) -> None:
    """`nothing`: a kernel that costs nothing, for Triton's interpreter is no part of the path."""
    kernels.discover()
    good = get_variant("all_reduce", "lamport")

    def bind(problem: Problem, config: Mapping[str, Any], workspace: Any) -> AddressLaunch:
        return AddressLaunch(lambda stream, x, out: launches.append(out))

    register_variant(dataclasses.replace(good, name="nothing", bind=bind))
    sys.addaudithook(lambda event, _: seen.append(event) if watching and event.startswith(FORBIDDEN) else None)


RANKS = Ranks(setup=plant)


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
        with replaced(communicator_module, "load_snapshot", None):
            for numel in range(1, 40) if rank == 0 else range(400, 440):
                tunedcomm.all_reduce(torch.ones(numel))
                tunedcomm.all_reduce(torch.ones(numel), numerics="any", max_sms=8)
    dist.barrier()


def test_a_repeated_call_does_nothing_but_launch(rank: int) -> None:
    """It decides nothing, compiles nothing, opens no file, and allocates its output alone."""
    allocated: list[object] = []
    real = call_module.empty

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
    with tunedcomm.force("all_reduce", "nothing"), replaced(call_module, "empty", empty):
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
