"""Launches that are judged on the device, group by group, at the pace of CUDA graphs.

What a group's launches read and what they ought to give lies in flat tensors, so that one copy changes the inputs of
all. One small kernel then looks at every output of the group, and poisons it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from tunedcomm.kernels.common.launch import CompileRequest, bind_kernel
from tunedcomm.kernels.common.sync import load_packets, store_packets
from tunedcomm.spec import Candidate, Problem

Tensors = tuple[torch.Tensor, ...]

GROUP = 16  # launches between two looks, at most
_ALIGN, _GUARD = 256, 16  # bytes
_PACKETS, _WARPS = 2048, 16  # of a block that looks at one launch's outputs


@triton.jit
def judge_kernel(row, table, wrong, first, BLOCK: tl.constexpr):  # noqa: N803 - constexpr
    """Count the launches of a group whose outputs are not what they ought to be, note one, and poison all outputs.

    A row of the table is a launch: addresses of its outputs and of what they ought to be, packets of either, and the
    launch's place among the counters `wrong`. `first` becomes a wrong row's number plus 1 unless it is set.
    """
    at = row + tl.program_id(0)
    entry = (table + at * 32).to(tl.pointer_type(tl.int64))
    found, due = tl.load(entry), tl.load(entry + 1)
    packets, place = tl.load(entry + 2), tl.load(entry + 3)
    lanes = tl.arange(0, BLOCK).to(tl.int64)
    poison = tl.full((BLOCK,), -1, tl.int32)
    differs = tl.zeros((BLOCK,), tl.int32)
    for start in tl.range(0, packets, BLOCK):
        packet = start + lanes
        here = packet < packets
        f0, f1, f2, f3 = load_packets(found + packet * 16, here)
        d0, d1, d2, d3 = load_packets(due + packet * 16, here)
        differs = differs | (f0 ^ d0) | (f1 ^ d1) | (f2 ^ d2) | (f3 ^ d3)
        store_packets(found + packet * 16, poison, poison, poison, poison, here)
    if tl.max((differs != 0).to(tl.int32), axis=0) > 0:
        tl.atomic_add((wrong + place * 8).to(tl.pointer_type(tl.int64)), place * 0 + 1)
        tl.atomic_cas(first.to(tl.pointer_type(tl.int64)), place * 0, at + 1)


@dataclass(frozen=True, slots=True, eq=False)
class Sample:
    """One rank's inputs of a problem, and the exact outputs that are due; none where no results are exact."""

    inputs: Tensors
    due: Tensors


def _places(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Where each tensor begins in a flat one, and the flat one's size; guard bytes follow every tensor."""
    places = [0]
    for tensor in tensors:
        places.append(places[-1] + -(-(tensor.nbytes + _GUARD) // _ALIGN) * _ALIGN)
    return places


def room_for(tensors: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    """A flat tensor with room for these, of poison."""
    return torch.full((_places(tensors)[-1],), 0xFF, dtype=torch.uint8, device=device)


def parts_of(flat: torch.Tensor, like: Sequence[torch.Tensor]) -> Tensors:
    """The parts of a flat tensor, with the dtypes and shapes of these."""
    places = zip(_places(like), like, strict=False)
    return tuple(flat[at : at + tensor.nbytes].view(tensor.dtype).view(tensor.shape) for at, tensor in places)


def _on(device: torch.device, samples: Sequence[Sample]) -> list[torch.Tensor]:
    """The samples' tensors on a device; what launches read on the host is the same in all samples of a problem."""
    every = (tensor for sample in samples for tensor in (*sample.inputs, *sample.due))
    return [tensor for tensor in every if tensor.device.type == device.type]


def packed(samples: Sequence[Sample], device: torch.device) -> torch.Tensor:
    """A flat tensor that holds these, with poison between them."""
    tensors = _on(device, samples)
    flat = room_for(tensors, device)
    for part, tensor in zip(parts_of(flat, tensors), tensors, strict=True):
        part.copy_(tensor)
    return flat


def unpacked(flat: torch.Tensor, like: Sequence[Sample]) -> list[Sample]:
    """Views of a flat tensor as samples of the same problems."""
    parts = iter(parts_of(flat, _on(flat.device, like)))

    def views(tensors: Tensors) -> Tensors:
        return tuple(next(parts) if tensor.device.type == flat.device.type else tensor for tensor in tensors)

    return [Sample(views(sample.inputs), views(sample.due)) for sample in like]


@dataclass(eq=False, slots=True, kw_only=True)
class Counted:
    """One bound candidate at one problem, with how often it was launched.

    Attributes:
        wrong: how often its results were not right, on the device.
    """

    candidate: Candidate
    problem: Problem
    launch: Callable[[Tensors, Tensors, int], None]
    wrong: torch.Tensor
    count: int = 0


@dataclass(eq=False, slots=True, kw_only=True)
class Judged(Counted):
    """A candidate whose launches read one of several sets of inputs.

    Attributes:
        number: its place among the counters.
        inputs: the sets.
        outputs: views of `room`, whose guard bytes are judged too.
        due: for each set, the address of what `room` ought to hold.
    """

    number: int
    inputs: Sequence[Tensors]
    outputs: Tensors
    room: torch.Tensor
    due: Sequence[int]

    def row(self, which: int) -> tuple[int, int, int, int]:
        """The kernel's row of a launch on set `which`."""
        return self.room.data_ptr(), self.due[which], self.room.nbytes // 16, self.number


@dataclass(eq=False, slots=True)
class Group:
    """Launches without anything between them, each of another candidate and with its set of inputs, and a look."""

    launches: Sequence[tuple[Judged, int]]
    look: Callable[[int], None]

    def launch(self, stream: int) -> None:
        for trial, which in self.launches:
            trial.launch(trial.inputs[which], trial.outputs, stream)
        self.look(stream)


class Judge:
    """The table of all groups, and the kernel bound to it.

    Args:
        groups: the launches of each.
        wrong: the counters, int64.
    """

    def __init__(self, groups: Sequence[Sequence[tuple[Judged, int]]], wrong: torch.Tensor) -> None:
        rows = torch.zeros(len(groups), GROUP, 4, dtype=torch.int64)
        for number, launches in enumerate(groups):
            rows[number, : len(launches)] = torch.tensor([trial.row(which) for trial, which in launches])
        self.wrong, self._table = wrong, rows.to(wrong.device)
        self._first = torch.zeros(1, dtype=torch.int64, device=wrong.device)
        request = CompileRequest.of(judge_kernel, {"BLOCK": _PACKETS}, num_warps=_WARPS)
        fixed = (None, self._table.data_ptr(), wrong.data_ptr(), self._first.data_ptr())
        look = bind_kernel(request, GROUP, wrong.device).fix(fixed)
        self.groups = [Group(launches, _at(look, number * GROUP)) for number, launches in enumerate(groups)]

    def first_wrong(self) -> str:
        """The launch that was wrong first, or one beside it, with those before it in its group; "" if none was."""
        row = int(self._first) - 1
        if row < 0:
            return ""
        launches = self.groups[row // GROUP].launches[: row % GROUP + 1]
        return "\n".join(f"  set {which}: {trial.problem} {trial.candidate}" for trial, which in launches)


def _at(look: Callable[..., None], row: int) -> Callable[[int], None]:
    return lambda stream: look(stream, row)
