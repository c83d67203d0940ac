"""The Lamport protocol: packets that announce themselves, pushed into stages that take turns.

A rank pushes its packets into its own slot of every peer's stage and polls its own stage. A packet has arrived once no
word of it is the sentinel; the rank then writes the sentinel back. Call k uses stage k mod 2; both are filled with the
sentinel before the first call.

Two stages are enough: a peer writes stage k again in its call k + 2. In its call k + 1 it waited for packets of this
rank, and this rank sends those only after its own call k, clears included, has ended (stream order).

Any mix of sizes and ops is right: a call polls exactly the packets that it clears, so every stage is clean when a call
ends.

Programmatic dependent launch (PDL) lets the blocks of the next kernel start while this kernel still polls. A kernel
touches no memory before `gdc_wait`, which returns when the previous kernel has ended and its writes are visible.

Example:
    2 ranks, 8 bf16 elements (one packet, total = 1), call 0. Rank 0 stores its packet at offset stage + 0 of rank 1's
    lane, rank 1 its packet at offset stage + 16 of rank 0's lane. Rank 0 polls stage + 16, clears it and adds: its own
    packet first, then rank 1's. Rank 1 polls stage + 0 and adds in the same order.

Source: the low-latency all-reduce of TensorRT-LLM and FlashInfer (after L. Lamport's flagless synchronisation),
redesigned for Triton: packets of 16 bytes, one thread each; the two-shot as in NCCL's LL protocol.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tunedcomm.kernels.common.lane import STATE_OFFSET, block_range, read_counter, write_counter
from tunedcomm.kernels.common.packets import escape_sentinels, insert_own, read_elements, sum_packets
from tunedcomm.kernels.common.sync import INTERPRET, SENTINEL, load_packets, poll_packets, store_packets


@triton.jit
def await_previous(PDL: tl.constexpr):
    """Wait until the previous kernel has ended, if this one was launched before that."""
    if PDL and not INTERPRET:
        gdc_wait()


@triton.jit
def launch_next(PDL: tl.constexpr):
    """Let the blocks of the next kernel start."""
    if PDL and not INTERPRET:
        gdc_launch_dependents()


@triton.jit
def begin_call(local, arena, stage_bytes, PDL: tl.constexpr):
    """Return the number of earlier calls and the offset of this call's stage."""
    await_previous(PDL)
    calls = read_counter(local, STATE_OFFSET)
    return calls, arena + (calls & 1) * stage_bytes


@triton.jit
def end_call(local, calls):
    """Count the call; the last act of a kernel."""
    write_counter(local, calls + 1, STATE_OFFSET)


@triton.jit
def read_whole(x, packet, numel, mask, ITEMSIZE: tl.constexpr, TAIL: tl.constexpr):
    """Packets at address `x`; an `ITEMSIZE` of 0 stands for a tensor that is whole packets."""
    if ITEMSIZE == 0:
        return load_packets(x + packet * 16, mask)
    else:
        return read_elements(x, packet, numel, mask, ITEMSIZE, TAIL)


@triton.jit
def push_to_all(
    x, total, stage, peers, rank, WORLD_SIZE: tl.constexpr, BLOCK_PACKETS: tl.constexpr,
    numel=0, ITEMSIZE: tl.constexpr = 0, TAIL: tl.constexpr = False,
):  # fmt: skip
    """Push `total` packets into slot `rank` of every peer's stage; a slot has room for `total` packets."""
    offsets, first, stride = block_range(BLOCK_PACKETS)
    for start in tl.range(first, total, stride):
        packet = start + offsets
        mask = packet < total
        w0, w1, w2, w3 = read_whole(x, packet, numel, mask, ITEMSIZE, TAIL)
        w0, w1, w2, w3 = escape_sentinels(w0, w1, w2, w3)
        target = stage + (rank * total + packet) * 16
        for i in tl.static_range(WORLD_SIZE - 1):
            store_packets(peers[i] + target, w0, w1, w2, w3, mask, REMOTE=True)


@triton.jit
def take_sum(
    own, slot, slot_bytes, empty, mask, rank, timeout_ns, status,
    DTYPE: tl.constexpr, AVG: tl.constexpr, WORLD_SIZE: tl.constexpr,
):  # fmt: skip
    """Wait for the peers' packets, clear their slots and return the sum in rank order.

    Args:
        own: words of this rank's packets.
        slot: addresses of the packets in slot 0; slot i lies i × `slot_bytes` further.
        empty: the sentinel, one a packet.
    """
    words = poll_packets(slot, slot_bytes, mask, rank, timeout_ns, status, WORLD_SIZE)
    for i in tl.static_range(WORLD_SIZE):
        store_packets(slot + i * slot_bytes, empty, empty, empty, empty, mask & (rank != i))
    return sum_packets(insert_own(words, own, rank, WORLD_SIZE), DTYPE, AVG, WORLD_SIZE)


@triton.jit
def exchange_slices(
    x, scatter, gather, total, share, local, peers, rank, timeout_ns, status,
    DTYPE: tl.constexpr, WORLD_SIZE: tl.constexpr, BLOCK_PACKETS: tl.constexpr,
):  # fmt: skip
    """Push all slices to their owners, sum the own slice, push the sums into every rank's `gather`, the own one too.

    The caller polls and clears `gather`. A slice has `share` packets, the last slice perhaps fewer.
    """
    offsets, first, stride = block_range(BLOCK_PACKETS)
    empty = tl.full((BLOCK_PACKETS,), SENTINEL, tl.int32)

    # 1. Push slice j to rank j.
    for start in tl.range(first, share, stride):
        target = scatter + (rank * share + start + offsets) * 16
        for i in tl.static_range(WORLD_SIZE - 1):
            packet = (rank + 1 + i) % WORLD_SIZE * share + start + offsets
            mask = (start + offsets < share) & (packet < total)
            w0, w1, w2, w3 = load_packets(x + packet * 16, mask)
            address = peers[i] + target
            w0, w1, w2, w3 = escape_sentinels(w0, w1, w2, w3)
            store_packets(address, w0, w1, w2, w3, mask, REMOTE=True)

    # 2. Sum the own slice, push the sums, clear the slots.
    for start in tl.range(first, share, stride):
        packet = rank * share + start + offsets
        mask = (start + offsets < share) & (packet < total)
        own = load_packets(x + packet * 16, mask)
        slot = local + scatter + (start + offsets) * 16
        words = poll_packets(slot, share * 16, mask, rank, timeout_ns, status, WORLD_SIZE)
        s0, s1, s2, s3 = sum_packets(insert_own(words, own, rank, WORLD_SIZE), DTYPE, False, WORLD_SIZE)
        s0, s1, s2, s3 = escape_sentinels(s0, s1, s2, s3)
        for i in tl.static_range(WORLD_SIZE - 1):
            store_packets(peers[i] + gather + packet * 16, s0, s1, s2, s3, mask, REMOTE=True)
        store_packets(local + gather + packet * 16, s0, s1, s2, s3, mask, REMOTE=True)
        for i in tl.static_range(WORLD_SIZE):
            store_packets(slot + i * share * 16, empty, empty, empty, empty, mask & (rank != i))
