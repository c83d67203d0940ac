"""A group's workspace: symmetric memory with its own signal area, split into lanes.

Kernels of one lane follow each other in one order, the same on every rank. Eager calls use one lane and captured calls
another, so that a graph may be replayed while eager calls run on another stream. The caller keeps the calls within a
lane in order (see `tunedcomm.dispatch.communicator`). A lane also has panels and scratch, which are made when a plan
first needs them.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from tunedcomm.spec import Mode, Problem
from tunedcomm.state import clean_thread
from tunedcomm.symm.buffer import SymmetricBuffer, allocate_on_host
from tunedcomm.symm.control import Control
from tunedcomm.symm.exchange import exchange, set_up
from tunedcomm.symm.layout import DATA_OFFSET, LANES, PANEL_DATA, LaneLayout, Room, rotate
from tunedcomm.symm.mapped import MappedMemory
from tunedcomm.symm.ring import HostRing

_SENTINEL_WORD = -0x80000000
_MIN_PANEL_BYTES = 16 << 20
_MIN_SCRATCH_BYTES = 1 << 20


@clean_thread()
def allocate(
    group: dist.ProcessGroup, device: torch.device, nbytes: int, *, first: int | None = None
) -> SymmetricBuffer:
    """Allocate `nbytes` on every rank of `group` and exchange the addresses; collective over the group.

    Args:
        group: process group.
        device: where the memory is.
        nbytes: the same on every rank.
        first: how many of the bytes are used for now; others may lack memory until `MappedMemory.back`.

    Raises:
        WorkspaceError: the memory could not be allocated or mapped; the text names the size and the cause.
    """
    if device.type == "cuda":
        from tunedcomm.symm import cuda

        return cuda.allocate(group, device, nbytes, first=first)
    return allocate_on_host(group, nbytes)


@dataclass(frozen=True, slots=True)
class Lane:
    """Addresses of one lane.

    Attributes:
        local: base address of this rank's lane.
        peers: base addresses of the other ranks' lanes, from rank + 1 on, wrapping around, padded with 0 to
            `MAX_WORLD_SIZE - 1`: peers are addressed in an order that spreads the load over the links.
        multicast: address whose stores reach every rank's lane, or 0.
    """

    local: int
    peers: tuple[int, ...]
    multicast: int


@dataclass(frozen=True, slots=True, eq=False)
class Panels(Lane):
    """Addresses of one lane's panels, memory for the matrices of fused GEMMs; their layout is in `symm.layout`.

    Attributes:
        buffer: the memory itself.
    """

    buffer: SymmetricBuffer

    @property
    def data(self) -> int:
        """Address of the data on this rank."""
        return self.local + PANEL_DATA


def _held(buffer: SymmetricBuffer) -> int:
    """Bytes of memory that an allocation takes on this rank."""
    memory = buffer.owner
    return sum(stop - start for start, stop in memory.backed) if isinstance(memory, MappedMemory) else buffer.nbytes


class _Lanes(dict[Mode, Lane]):
    """The lanes of a workspace, each made when a plan first binds a kernel that uses it, which all ranks do alike."""

    def __init__(self, make: weakref.WeakMethod[Callable[[Mode], Lane]]) -> None:
        super().__init__()
        self._make = make  # weak: the workspace holds this dict, and must go with its last user, not with the collector

    def __missing__(self, mode: Mode) -> Lane:
        make = self._make()
        assert make is not None, "whoever looks up a lane holds the workspace"
        lane = self[mode] = make(mode)
        return lane


class Workspace:
    """Symmetric memory of one group; collective over the group.

    On GPUs both lanes are made at once. On CPUs most groups never bind a kernel, and none captures graphs, so a lane is
    made when it is first looked up: collective, too.

    Args:
        group: the process group.
        device: where the tensors live.
        layout: sizes of a lane, the same on every rank.
        control: the group's control block.

    Raises:
        WorkspaceError: no symmetric memory.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device, layout: LaneLayout, control: Control) -> None:
        self.group = group
        self.device = device
        self.layout = layout
        self.control = control
        self.timeout_ns = control.timeout_ns
        # An allocation a lane: PyTorch's operators keep their flags by allocation, so lanes do not share those either.
        self.buffers: dict[Mode, SymmetricBuffer] = {}
        self.rooms: dict[Mode, Room] = {}  # what there is memory for, where lanes have it as calls need it
        self.rank = dist.get_rank(group)
        self.world_size = dist.get_world_size(group)
        self.symmetric: dict[int, SymmetricBuffer] = {}
        self.ring: HostRing | None = None  # set where CPU tensors go through one
        # All that a lane ever had, the largest last: captured graphs may still use the smaller ones.
        self._panels: dict[Mode, list[Panels]] = {}
        self._scratch: dict[Mode, list[torch.Tensor]] = {}
        self.lanes: dict[Mode, Lane] = _Lanes(weakref.WeakMethod(self._make_lane))
        if device.type == "cuda":  # where memory may be short later, and most groups call kernels
            for mode in LANES:
                self.lanes[mode]

    def _make_lane(self, mode: Mode) -> Lane:
        buffer = allocate(self.group, self.device, self.layout.total_bytes, first=DATA_OFFSET)
        with set_up(self.group, anew=False):
            for start, stop in self._arena_of(buffer):
                buffer.local[start:stop].view(torch.int32).fill_(_SENTINEL_WORD)
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
            exchange(self.group, None)  # no rank may send before every rank has armed its arena
        self.buffers[mode], self.rooms[mode] = buffer, Room()
        return Lane(*self._addresses(buffer))

    def _arena_of(self, buffer: SymmetricBuffer) -> list[tuple[int, int]]:
        """Offsets (start, stop) of those parts of a lane's arena that are backed by memory."""
        backed = buffer.owner.backed if isinstance(buffer.owner, MappedMemory) else [(0, buffer.nbytes)]
        clipped = [(max(start, self.layout.arena), min(stop, self.layout.one_shot)) for start, stop in backed]
        return [(start, stop) for start, stop in clipped if start < stop]

    def ensure(self, mode: Mode, room: Room) -> None:
        """Have memory for what a call uses of a lane; collective where it lacks any, never during a capture.

        On GPUs a lane has addresses for its whole layout, and memory for what calls have used so far. It grows to
        powers of two. Ranks that bind the same calls in the same order grow alike.

        Raises:
            WorkspaceError: on every rank alike, where any has too little memory.
        """
        memory = self.buffers[mode].owner if mode in self.buffers else None
        if not isinstance(memory, MappedMemory) or self.rooms[mode] | room == self.rooms[mode]:
            return
        wanted = self.rooms[mode] | self.layout.rounded(room)

        def fill(piece: torch.Tensor, offset: int) -> None:
            piece.zero_()
            start, stop = max(self.layout.arena - offset, 0), min(self.layout.one_shot - offset, len(piece))
            if start < stop:
                piece[start:stop].view(torch.int32).fill_(_SENTINEL_WORD)

        memory.back(self.layout.ranges(wanted), fill)
        self.rooms[mode] = wanted

    def reserve(self, nbytes: int) -> None:
        """Have memory in all lanes for messages of up to `nbytes`; see `ensure`."""
        room = LaneLayout.for_messages(nbytes).room
        for mode in LANES:
            self.ensure(mode, room)

    def held(self) -> dict[str, int]:
        """Bytes of this rank's memory that lanes, panels, scratch and symmetric tensors take, each by its name."""
        panels = [one.buffer for made in self._panels.values() for one in made]
        buffers = {f"{mode} lane": [buffer] for mode, buffer in self.buffers.items()}
        buffers |= {"panels": panels, "symmetric tensors": list({id(b): b for b in self.symmetric.values()}.values())}
        scratch = sum(room.nbytes for made in self._scratch.values() for room in made)
        return {**{name: sum(map(_held, each)) for name, each in buffers.items()}, "scratch": scratch}

    def status_argument(self, problem: Problem) -> int:
        """The kernels' argument `status`, see `Control.status_argument`."""
        return self.control.status_argument(problem)

    def panels(self, mode: Mode, nbytes: int) -> Panels:
        """A lane's panels with room for `nbytes` of data; collective over the group, never while a graph is captured.

        Raises:
            WorkspaceError: no symmetric memory.
        """
        made = self._panels.setdefault(mode, [])
        if not made or made[-1].buffer.nbytes < nbytes + PANEL_DATA:
            size = max(_MIN_PANEL_BYTES, 1 << (nbytes + PANEL_DATA - 1).bit_length())
            buffer = allocate(self.group, self.device, size)
            made.append(Panels(*self._addresses(buffer), buffer))
        return made[-1]

    def scratch(self, mode: Mode, nbytes: int) -> torch.Tensor:
        """At least `nbytes` bytes of this rank's memory, uint8; the lane's next call may overwrite them.

        All plans of a lane share it, for their calls follow each other. Never called while a graph is captured.
        """
        made = self._scratch.setdefault(mode, [])
        if not made or made[-1].nbytes < nbytes:
            size = max(_MIN_SCRATCH_BYTES, 1 << (nbytes - 1).bit_length())
            made.append(torch.empty(size, dtype=torch.uint8, device=self.device))
        return made[-1]

    def _addresses(self, buffer: SymmetricBuffer) -> tuple[int, tuple[int, ...], int]:
        """Fields of `Lane` for a buffer."""
        return buffer.addresses[self.rank], rotate(buffer.addresses, self.rank), buffer.multicast_address

    def rearm(self, mode: Mode) -> int:
        """Restore the sentinel in a lane's arena; returns the number of words that differed, 0 after correct calls.

        Called while no rank has a call under way; waits for the device.
        """
        if mode not in self.buffers:
            return 0
        count, buffer = 0, self.buffers[mode]
        for start, stop in self._arena_of(buffer):
            arena = buffer.local[start:stop].view(torch.int32)
            if found := int((arena != _SENTINEL_WORD).sum()):
                arena.fill_(_SENTINEL_WORD)
                count += found
        if count and self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return count

    def register(self, tensor: torch.Tensor, buffer: SymmetricBuffer) -> None:
        """Remember the addresses of a symmetric tensor that the caller allocated; the same call on every rank."""
        self.symmetric[tensor.untyped_storage().data_ptr()] = buffer

    def peers_of(self, tensor: torch.Tensor) -> tuple[int, ...]:
        """Addresses of a registered symmetric tensor on the other ranks, in the order of `Lane.peers`.

        Raises:
            KeyError: the tensor's storage is not registered.
        """
        buffer = self.symmetric[tensor.untyped_storage().data_ptr()]
        offset = tensor.data_ptr() - buffer.addresses[self.rank]
        return rotate(tuple(address + offset for address in buffer.addresses), self.rank)

    def check_peers(self) -> None:
        """Raise if the group has ended, such as by a kernel that gave up waiting for a peer; see `Control.check`."""
        self.control.check()
