"""A kernel's use of its lane: peers' addresses, flags, and the per-block counters."""

from __future__ import annotations

import triton
import triton.language as tl

from tunedcomm.kernels.common.sync import INTERPRET, signal, wait, wait_together
from tunedcomm.symm import layout

MAX_BLOCKS = tl.constexpr(layout.MAX_BLOCKS)
STATE_OFFSET = tl.constexpr(layout.STATE_OFFSET)
EPOCH_OFFSET = tl.constexpr(layout.EPOCH_OFFSET)
_RANKS = tl.constexpr(layout.MAX_WORLD_SIZE)


@triton.jit
def read_counter(local, OFFSET: tl.constexpr):
    """This block's copy of the counter at `OFFSET` of the lane."""
    return tl.load((local + OFFSET).to(tl.pointer_type(tl.int64)) + tl.program_id(0))


@triton.jit
def write_counter(local, value, OFFSET: tl.constexpr):
    """Write `value` to the counter's entries b, b + grid, b + 2 grid, …, for block b; the last act of a kernel.

    The block barrier keeps a fast warp from writing before a slow one has read.
    """
    if not INTERPRET:
        tl.debug_barrier()
    entries = tl.program_id(0) + tl.num_programs(0) * tl.arange(0, MAX_BLOCKS)
    p = (local + OFFSET).to(tl.pointer_type(tl.int64))
    tl.store(p + entries, tl.zeros((MAX_BLOCKS,), tl.int64) + value, mask=entries < MAX_BLOCKS)


@triton.jit
def block_range(BLOCK: tl.constexpr):
    """Which packets this block takes: offsets of one round, the first round's start, and the step to the next."""
    lanes = tl.arange(0, BLOCK).to(tl.int64)
    first = tl.program_id(0).to(tl.int64) * BLOCK
    step = tl.num_programs(0).to(tl.int64) * BLOCK
    return lanes, first, step


@triton.jit
def by_step(q0, q1, q2, q3, q4, q5, q6):
    """Peers' addresses as a tensor over steps: element s is the address of rank + 1 + s."""
    step = tl.arange(0, _RANKS)
    address = tl.where(step == 0, q0, tl.where(step == 1, q1, tl.where(step == 2, q2, q3)))
    return tl.where(step == 4, q4, tl.where(step == 5, q5, tl.where(step == 6, q6, address)))


@triton.jit
def arrive(local, q0, q1, q2, q3, q4, q5, q6, rank, epoch, WORLD_SIZE: tl.constexpr):
    """Tell this block's counterparts on all peers that this block has reached `epoch`; releases all it did before."""
    step = tl.arange(0, _RANKS)
    slot = tl.program_id(0).to(tl.int64) * (_RANKS * 8) + rank * 8
    signal(by_step(q0, q1, q2, q3, q4, q5, q6) + slot, epoch + step.to(tl.int64) * 0, step < WORLD_SIZE - 1)


@triton.jit
def await_peers(local, rank, epoch, timeout_ns, status, WORLD_SIZE: tl.constexpr):
    """Wait until this block's counterparts on all peers have reached `epoch`; acquires what they released."""
    peer = tl.arange(0, _RANKS)
    flags = local + tl.program_id(0).to(tl.int64) * (_RANKS * 8) + peer.to(tl.int64) * 8
    wait(flags, epoch + peer.to(tl.int64) * 0, (peer < WORLD_SIZE) & (peer != rank), peer, timeout_ns, status)


@triton.jit
def await_peers_together(local, rank, epoch, timeout_ns, status, WORLD_SIZE: tl.constexpr):
    """`await_peers` for blocks whose warps need each other afterwards."""
    peer = tl.arange(0, _RANKS)
    flags = local + tl.program_id(0).to(tl.int64) * (_RANKS * 8) + peer.to(tl.int64) * 8
    mask = (peer < WORLD_SIZE) & (peer != rank)
    wait_together(flags, epoch + peer.to(tl.int64) * 0, mask, peer, timeout_ns, status)


@triton.jit
def arrive_at(row, q0, q1, q2, q3, q4, q5, q6, rank, epoch, WORLD_SIZE: tl.constexpr):
    """`arrive` for the block whose flags are in `row` on the peers, where blocks of one grid do different work."""
    step = tl.arange(0, _RANKS)
    slot = row.to(tl.int64) * (_RANKS * 8) + rank * 8
    signal(by_step(q0, q1, q2, q3, q4, q5, q6) + slot, epoch + step.to(tl.int64) * 0, step < WORLD_SIZE - 1)


@triton.jit
def await_at(local, row, rank, epoch, timeout_ns, status, WORLD_SIZE: tl.constexpr):
    """`await_peers` for flags in another row than the block's own."""
    peer = tl.arange(0, _RANKS)
    flags = local + row.to(tl.int64) * (_RANKS * 8) + peer.to(tl.int64) * 8
    wait(flags, epoch + peer.to(tl.int64) * 0, (peer < WORLD_SIZE) & (peer != rank), peer, timeout_ns, status)


@triton.jit
def address_of(peers, own, index, rank, WORLD_SIZE: tl.constexpr):
    """Address of rank `index` from the peers' addresses in step order; `own` for the caller itself."""
    step = (index - rank - 1 + WORLD_SIZE) % WORLD_SIZE
    address = own
    for s in tl.static_range(WORLD_SIZE - 1):
        address = tl.where(step == s, peers[s], address)
    return address
