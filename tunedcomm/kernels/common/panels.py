"""Panels: how a call begins, and how chunks of matrices are announced, waited for, counted and sent.

Flags hold the number of the call that raised them, which only grows, so nothing is reset, and graphs can be replayed.
The layout and the rule by which calls share panels are in `symm.layout`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import triton
import triton.language as tl

from tunedcomm.kernels.common.copies import Copies
from tunedcomm.kernels.common.lane import EPOCH_OFFSET, by_turn, exchange_flags, read_counter, write_counter
from tunedcomm.kernels.common.launch import CompileRequest, bind_kernel
from tunedcomm.kernels.common.sync import INTERPRET, fence_descriptors, signal, wait_together
from tunedcomm.kernels.common.variant import lane_arguments
from tunedcomm.spec import Problem
from tunedcomm.symm import layout

if TYPE_CHECKING:
    from tunedcomm.symm.workspace import Panels, Workspace

CHUNKS = tl.constexpr(layout.PANEL_CHUNKS)
COUNTERS = tl.constexpr(layout.PANEL_COUNTERS_OFFSET)
DATA = tl.constexpr(layout.PANEL_DATA)
_NUMBER = tl.constexpr(layout.PANEL_NUMBER_OFFSET)
_RANKS = tl.constexpr(layout.MAX_WORLD_SIZE)


@triton.jit
def begin_panels_kernel(local, peers, rank, timeout_ns, status, panels, WORLD_SIZE: tl.constexpr):
    """One block: wait until all ranks are done with their panels, then count the call."""
    epoch = read_counter(local, EPOCH_OFFSET)
    exchange_flags(local, peers, rank, epoch + 1, timeout_ns, status, WORLD_SIZE)
    place = (panels + _NUMBER).to(tl.pointer_type(tl.int64))
    calls = tl.load(place)
    if not INTERPRET:
        tl.debug_barrier()  # all threads have read before one writes
    tl.store(place, calls + 1)
    write_counter(local, epoch + 1, EPOCH_OFFSET)


@triton.jit
def call_number(panels):
    """Number of the call under way."""
    return tl.load((panels + _NUMBER).to(tl.pointer_type(tl.int64)))


@triton.jit
def announce(panel_peers, rank, chunk, epoch, WORLD_SIZE: tl.constexpr):
    """Raise the flag of this rank's chunk in all peers' panels; releases all that this block has done before."""
    peer = tl.arange(0, _RANKS)
    flags = by_turn(panel_peers) + (rank * CHUNKS + chunk) * 8
    signal(flags, epoch + peer.to(tl.int64) * 0, peer < WORLD_SIZE - 1)


@triton.jit
def announce_to(target, rank, chunk, epoch):
    """Raise the flag of this rank's chunk in the panels at address `target`; releases as `announce` does."""
    peer = tl.arange(0, _RANKS)
    flags = target + (rank * CHUNKS + chunk) * 8 + peer.to(tl.int64) * 0
    signal(flags, epoch + peer.to(tl.int64) * 0, peer == 0)


@triton.jit
def await_chunk(panels, source, chunk, epoch, timeout_ns, status):
    """Wait, as a block, until chunk `chunk` of rank `source` is here; reads of any kind see it afterwards."""
    peer = tl.arange(0, _RANKS)
    none = peer.to(tl.int64) * 0
    at = panels + (none + source * CHUNKS + chunk) * 8
    wait_together(at, epoch + none, peer == 0, (none + source).to(tl.int32), timeout_ns, status)
    fence_descriptors()


@triton.jit
def await_chunk_of_all(panels, chunk, rank, epoch, timeout_ns, status, WORLD_SIZE: tl.constexpr):
    """`await_chunk` for the same chunk of every peer."""
    peer = tl.arange(0, _RANKS)
    at = panels + (peer.to(tl.int64) * CHUNKS + chunk) * 8
    wait_together(at, epoch + peer.to(tl.int64) * 0, (peer < WORLD_SIZE) & (peer != rank), peer, timeout_ns, status)
    fence_descriptors()


@triton.jit
def is_last(panels, counter, count):
    """True for the block that comes to `counter` as the last of `count`; the counter is 0 again then.

    What the others stored before they came is visible to the last one.
    """
    if not INTERPRET:
        tl.debug_barrier()  # all threads of the block have stored
    place = (panels + COUNTERS + counter * 8).to(tl.pointer_type(tl.int64))
    last = tl.atomic_add(place, 1, sem="acq_rel", scope="sys") == count - 1
    if last:
        tl.store(place, tl.num_programs(0) * 0)
    return last


def begin_request(world_size: int) -> CompileRequest:
    """The binary of `begin_panels_kernel`."""
    return CompileRequest.of(begin_panels_kernel, {"WORLD_SIZE": world_size}, num_warps=1)


def bind_begin(problem: Problem, workspace: Workspace, panels: Panels) -> Callable[[int], None]:
    """`(stream)` to the begin of a call."""
    kernel = bind_kernel(begin_request(problem.world_size), 1, workspace.device)
    return kernel.fix((*lane_arguments(problem, workspace), panels.local))


@dataclass(frozen=True, slots=True)
class Sender:
    """Puts chunks into peers' panels, which are at `local` on this rank, by copy engines, each followed by its flag.

    A flag is a copy too, of the call's number, from this rank's panels into the peer's: it follows its chunk on the
    same stream, so the chunk is there when the flag is. No SM takes part. The number is read where the device keeps it,
    so graphs can be replayed.
    """

    copies: Copies
    rank: int
    local: int

    def send(self, stream: int, peer: int, chunk: int, *moves: tuple[int, int, int]) -> None:
        """Queue copies (offset in the panels at address `peer`, source, bytes), then the flag of this rank's chunk."""
        for offset, source, nbytes in moves:
            if nbytes:
                self.copies.copy(stream, peer + offset, source, nbytes)
        flag = (self.rank * layout.PANEL_CHUNKS + chunk) * 8
        self.copies.copy(stream, peer + flag, self.local + layout.PANEL_NUMBER_OFFSET, 8)
