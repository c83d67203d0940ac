"""A group's workspace: symmetric memory with its own signal area, split into lanes.

Kernels of one lane follow each other in one order, the same on every rank. Eager calls use one lane and captured calls
another, so that a graph may be replayed while eager calls run on another stream. The caller keeps the calls within a
lane in order (see `tunedcomm.dispatch.communicator`). A lane also has panels and scratch, which are made when a plan
first needs them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from tunedcomm.errors import PeerTimeoutError
from tunedcomm.spec import Mode, Problem, ops
from tunedcomm.symm.buffer import SymmetricBuffer, allocate_on_host
from tunedcomm.symm.layout import LANES, PANEL_DATA, STATUS_BYTES, LaneLayout, rotate
from tunedcomm.symm.ring import HostRing

_SENTINEL_WORD = -0x80000000
_LEAST_PANEL_BYTES = 16 << 20
_LEAST_SCRATCH_BYTES = 1 << 20
_WHERE: dict[Mode, str] = {"eager": "called eagerly", "graph": "captured in a graph"}


def allocate(group: dist.ProcessGroup, device: torch.device, nbytes: int) -> SymmetricBuffer:
    """Allocate `nbytes` on every rank of `group` and exchange the addresses; collective over the group.

    Raises:
        WorkspaceError: the memory could not be allocated or mapped; the text names the size and the cause.
    """
    if device.type == "cuda":
        from tunedcomm.symm import cuda

        return cuda.allocate(group, device, nbytes)
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


class Workspace:
    """Symmetric memory of one group, allocated once; collective over the group.

    Args:
        group: the process group.
        device: where the tensors live.
        layout: sizes of a lane, the same on every rank.
        timeout_ns: bound of every wait in a kernel.
        names: numbers of the ranks in error messages; None: as in the group.

    Raises:
        WorkspaceError: no symmetric memory.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        device: torch.device,
        layout: LaneLayout,
        *,
        timeout_ns: int,
        names: Sequence[int] | None = None,
    ) -> None:
        self.group = group
        self.device = device
        self.layout = layout
        self.timeout_ns = timeout_ns
        # An allocation a lane: PyTorch's operators keep their flags by allocation, so lanes do not share those either.
        self.buffers: dict[Mode, SymmetricBuffer] = {m: allocate(group, device, layout.total_bytes) for m in LANES}
        self.rank = dist.get_rank(group)
        self.world_size = dist.get_world_size(group)
        self._names = tuple(names or range(self.world_size))
        self.symmetric: dict[int, SymmetricBuffer] = {}
        self.ring: HostRing | None = None  # set where CPU tensors go through one
        self._status = _status_block(pinned=device.type == "cuda")
        self.status_view = memoryview(self._status.numpy())  # type: ignore[arg-type]
        self._callers = [(op, mode) for op in sorted(ops()) for mode in LANES]
        # All that a lane ever had, the largest last: captured graphs may still use the smaller ones.
        self._panels: dict[Mode, list[Panels]] = {}
        self._scratch: dict[Mode, list[torch.Tensor]] = {}
        self.lanes = {mode: Lane(*self._addresses(buffer)) for mode, buffer in self.buffers.items()}
        for buffer in self.buffers.values():
            buffer.local[layout.arena : layout.one_shot].view(torch.int32).fill_(_SENTINEL_WORD)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        dist.barrier(group)  # no rank may send before every rank has armed its arena

    def status_argument(self, problem: Problem) -> int:
        """The kernels' argument `status`: the block's address plus the number of the problem's op and mode."""
        return self._status.data_ptr() + 1 + self._callers.index((problem.op, problem.mode))

    def panels(self, mode: Mode, nbytes: int) -> Panels:
        """A lane's panels with room for `nbytes` of data; collective over the group, never while a graph is captured.

        Raises:
            WorkspaceError: no symmetric memory.
        """
        made = self._panels.setdefault(mode, [])
        if not made or made[-1].buffer.nbytes < nbytes + PANEL_DATA:
            size = max(_LEAST_PANEL_BYTES, 1 << (nbytes + PANEL_DATA - 1).bit_length())
            buffer = allocate(self.group, self.device, size)
            made.append(Panels(*self._addresses(buffer), buffer))
        return made[-1]

    def scratch(self, mode: Mode, nbytes: int) -> torch.Tensor:
        """At least `nbytes` bytes of this rank's memory, uint8; the lane's next call may overwrite them.

        All plans of a lane share it, for their calls follow each other. Never called while a graph is captured.
        """
        made = self._scratch.setdefault(mode, [])
        if not made or made[-1].nbytes < nbytes:
            size = max(_LEAST_SCRATCH_BYTES, 1 << (nbytes - 1).bit_length())
            made.append(torch.empty(size, dtype=torch.uint8, device=self.device))
        return made[-1]

    def _addresses(self, buffer: SymmetricBuffer) -> tuple[int, tuple[int, ...], int]:
        """Fields of `Lane` for a buffer."""
        return buffer.addresses[self.rank], rotate(buffer.addresses, self.rank), buffer.multicast_address

    def staging(self, mode: Mode, dtype: torch.dtype, numel: int) -> torch.Tensor:
        """The first `numel` elements of a lane's gather area, for library operators on peers' memory.

        Not of the scatter area: what they leave there is read after their last barrier, and by then a peer may be in
        its next call and write.
        """
        start = self.layout.gather
        return self.buffers[mode].local[start : start + numel * dtype.itemsize].view(dtype)

    def rearm(self, mode: Mode) -> int:
        """Restore the sentinel in a lane's arena; returns the number of words that differed, 0 after correct calls.

        Called while no rank has a call under way; waits for the device.
        """
        arena = self.buffers[mode].local[self.layout.arena : self.layout.one_shot].view(torch.int32)
        count = int((arena != _SENTINEL_WORD).sum())
        if count:
            arena.fill_(_SENTINEL_WORD)
            if self.device.type == "cuda":
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
        """Raise if a kernel gave up waiting for a peer.

        Raises:
            PeerTimeoutError: names the calls and the ranks that were missed. The group stays unusable: its flags and
                packets are out of step.
        """
        if not self.status_view[0]:
            return
        by_caller: dict[int, list[str]] = {}
        for rank, number in enumerate(self.status_view[1 : 1 + self.world_size]):
            if number:
                by_caller.setdefault(number - 1, []).append(str(self._names[rank]))
        # Word 0 is written last, but a block may still be noting a rank: then the call is not known yet.
        missed = [
            f"{self._callers[caller][0]} ({_WHERE[self._callers[caller][1]]}) missed rank {', '.join(ranks)}"
            for caller, ranks in sorted(by_caller.items())
        ]
        raise PeerTimeoutError(
            f"rank {self._names[self.rank]} waited more than {self.timeout_ns / 1e9:g} s for its peers: "
            f"{'; '.join(missed) or 'a rank did not come'} of the group of {self.world_size}. Such a rank died, or did "
            "not make the same call. The group cannot be used any more; make a new process group, or raise "
            "TUNEDCOMM_PEER_TIMEOUT_S if the peer was only slow"
        )


def _status_block(*, pinned: bool) -> torch.Tensor:
    """The status block's words, all 0, at a multiple of its size."""
    words = STATUS_BYTES // 4
    room = torch.zeros(2 * words, dtype=torch.int32, device="cpu", pin_memory=pinned)
    skip = -room.data_ptr() % STATUS_BYTES // 4
    return room[skip : skip + words]
