"""Device functions for the lane: peers' addresses, flags and the counters of each block."""

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
    """Write `value` to the entries b, b + grid, b + 2 grid, … of the counter, for block b. A kernel calls this last.

    The block barrier keeps a fast warp from writing before a slow warp has read.
    """
    if not INTERPRET:
        tl.debug_barrier()
    entries = tl.program_id(0) + tl.num_programs(0) * tl.arange(0, MAX_BLOCKS)
    p = (local + OFFSET).to(tl.pointer_type(tl.int64))
    tl.store(p + entries, tl.zeros((MAX_BLOCKS,), tl.int64) + value, mask=entries < MAX_BLOCKS)


@triton.jit
def block_range(BLOCK: tl.constexpr):
    """Packets of this block: offsets within a round, start of the first round, stride from round to round.

    Example:
        2 blocks, BLOCK = 32: block 1 gets offsets 0 … 31, first 32 and stride 64: packets 32 … 63, 96 … 127, …
    """
    offsets = tl.arange(0, BLOCK).to(tl.int64)
    first = tl.program_id(0).to(tl.int64) * BLOCK
    stride = tl.num_programs(0).to(tl.int64) * BLOCK
    return offsets, first, stride


@triton.jit
def select_peer(peers, turn):
    """Address of the rank `turn` + 1 after this one; `turn` is a number or a tensor."""
    address = tl.where(turn == 0, peers[0], tl.where(turn == 1, peers[1], tl.where(turn == 2, peers[2], peers[3])))
    return tl.where(turn == 4, peers[4], tl.where(turn == 5, peers[5], tl.where(turn == 6, peers[6], address)))


@triton.jit
def by_turn(peers):
    """Peers' addresses as a tensor: element i is the address of rank + 1 + i."""
    return select_peer(peers, tl.arange(0, _RANKS))


@triton.jit
def shifted(peers, offset):
    """Peers' addresses plus an offset."""
    return (
        peers[0] + offset,
        peers[1] + offset,
        peers[2] + offset,
        peers[3] + offset,
        peers[4] + offset,
        peers[5] + offset,
        peers[6] + offset,
    )


@triton.jit
def arrive(peers, rank, epoch, WORLD_SIZE: tl.constexpr):
    """Tell the same block of every peer that this block has reached `epoch`; releases all it did before."""
    turn = tl.arange(0, _RANKS)
    slot = tl.program_id(0).to(tl.int64) * (_RANKS * 8) + rank * 8
    signal(by_turn(peers) + slot, epoch + turn.to(tl.int64) * 0, turn < WORLD_SIZE - 1)


@triton.jit
def await_peers(local, rank, epoch, timeout_ns, status, WORLD_SIZE: tl.constexpr):
    """Wait until the same block of every peer has reached `epoch`; acquires what these blocks released."""
    peer = tl.arange(0, _RANKS)
    flags = local + tl.program_id(0).to(tl.int64) * (_RANKS * 8) + peer.to(tl.int64) * 8
    wait(flags, epoch + peer.to(tl.int64) * 0, (peer < WORLD_SIZE) & (peer != rank), peer, timeout_ns, status)


@triton.jit
def exchange_flags(local, peers, rank, epoch, timeout_ns, status, WORLD_SIZE: tl.constexpr):
    """`arrive`, then `await_peers`: what each counterpart did before, this block sees afterwards, and vice versa."""
    arrive(peers, rank, epoch, WORLD_SIZE)
    await_peers(local, rank, epoch, timeout_ns, status, WORLD_SIZE)


@triton.jit
def await_peers_together(local, rank, epoch, timeout_ns, status, WORLD_SIZE: tl.constexpr):
    """`await_peers` for blocks whose warps need each other afterwards."""
    peer = tl.arange(0, _RANKS)
    flags = local + tl.program_id(0).to(tl.int64) * (_RANKS * 8) + peer.to(tl.int64) * 8
    mask = (peer < WORLD_SIZE) & (peer != rank)
    wait_together(flags, epoch + peer.to(tl.int64) * 0, mask, peer, timeout_ns, status)


@triton.jit
def arrive_at(row, peers, rank, epoch, WORLD_SIZE: tl.constexpr):
    """`arrive` for blocks that do different work: raise the flags in row `row` of the peers."""
    turn = tl.arange(0, _RANKS)
    slot = row.to(tl.int64) * (_RANKS * 8) + rank * 8
    signal(by_turn(peers) + slot, epoch + turn.to(tl.int64) * 0, turn < WORLD_SIZE - 1)


@triton.jit
def await_at(local, row, rank, epoch, timeout_ns, status, WORLD_SIZE: tl.constexpr):
    """`await_peers` for the flags in row `row`."""
    peer = tl.arange(0, _RANKS)
    flags = local + row.to(tl.int64) * (_RANKS * 8) + peer.to(tl.int64) * 8
    wait(flags, epoch + peer.to(tl.int64) * 0, (peer < WORLD_SIZE) & (peer != rank), peer, timeout_ns, status)


@triton.jit
def address_of(peers, own, index, rank, WORLD_SIZE: tl.constexpr):
    """Address of rank `index`: one of `peers`, which begin at rank + 1, or `own` for this rank."""
    turn = (index - rank - 1 + WORLD_SIZE) % WORLD_SIZE
    address = own
    for s in tl.static_range(WORLD_SIZE - 1):
        address = tl.where(turn == s, peers[s], address)
    return address
