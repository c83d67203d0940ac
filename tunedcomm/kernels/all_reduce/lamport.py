"""lamport: one-shot all_reduce without flags; every rank pushes its input to all, and data announce themselves.

Two stages take turns (call k uses stage k mod 2), each filled with the sentinel before use. A rank pushes its packets
into its slot of every peer's stage, polls its own stage until no word is the sentinel, writes the sentinel back at
once and sums in rank order.

Why two stages are enough: a peer writes stage k again in its call k + 2. In call k + 1 it waited for this rank's
packets, which this rank sends only after its own call k has ended (stream order), clears included.

Why any mix of sizes is right: what a call polls is what it clears, so every stage is clean when a call ends.

Programmatic dependent launch lets the next kernel's blocks take their places while this one still polls; the kernel
touches nothing before `gdc_wait`, which returns when the kernel before has ended and its writes are visible.

Numerics: ordered. Graph-safe: the call counter lives in the lane.
Source: the protocol of TensorRT-LLM's and FlashInfer's low-latency all-reduce (after L. Lamport's flagless
synchronisation), redesigned for Triton: packets of 16 bytes, one thread each.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tunedcomm.kernels.all_reduce.op import AllReduceVariant
from tunedcomm.kernels.common.lane import STATE_OFFSET, block_range, read_counter, write_counter
from tunedcomm.kernels.common.packets import (
    arm,
    insert_own,
    num_packets,
    read_elements,
    sum_packets,
    write_elements,
)
from tunedcomm.kernels.common.sync import INTERPRET, SENTINEL, poll_packets, store_packets
from tunedcomm.kernels.common.variant import LamportVariant


@triton.jit
def lamport_kernel(
    x, out, numel, local, q0, q1, q2, q3, q4, q5, q6, rank, timeout_ns, status, arena, stage_bytes,
    WORLD_SIZE: tl.constexpr, DTYPE: tl.constexpr, WIDTH: tl.constexpr, AVG: tl.constexpr, TAIL: tl.constexpr,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Push own packets to all peers, poll theirs, sum. Slot r of a stage holds rank r's packets, tightly packed."""
    if PDL and not INTERPRET:
        gdc_wait()
    peers = (q0, q1, q2, q3, q4, q5, q6)
    calls = read_counter(local, STATE_OFFSET)
    stage = arena + (calls & 1) * stage_bytes
    total = num_packets(numel, WIDTH)
    lanes, first, step = block_range(BLOCK)

    for start in tl.range(first, total, step):
        packet = start + lanes
        here = packet < total
        w0, w1, w2, w3 = read_elements(x, packet, numel, here, WIDTH, TAIL)
        w0, w1, w2, w3 = arm(w0), arm(w1), arm(w2), arm(w3)
        place = stage + (rank * total + packet) * 16
        for i in tl.static_range(WORLD_SIZE - 1):
            store_packets(peers[i] + place, w0, w1, w2, w3, here, REMOTE=True)
    if PDL and not INTERPRET:
        gdc_launch_dependents()

    for start in tl.range(first, total, step):
        packet = start + lanes
        here = packet < total
        own = read_elements(x, packet, numel, here, WIDTH, TAIL)
        place = local + stage + packet * 16
        words = poll_packets(place, total * 16, here, rank, timeout_ns, status, WORLD_SIZE)
        empty = tl.full((BLOCK,), SENTINEL, tl.int32)
        for i in tl.static_range(WORLD_SIZE):
            store_packets(place + i * total * 16, empty, empty, empty, empty, here & (rank != i))
        s0, s1, s2, s3 = sum_packets(insert_own(words, own, rank, WORLD_SIZE), DTYPE, AVG, WORLD_SIZE)
        write_elements(out, packet, numel, s0, s1, s2, s3, here, WIDTH, TAIL)
    write_counter(local, calls + 1, STATE_OFFSET)


class Lamport(LamportVariant, AllReduceVariant):
    name = "lamport"
    summary = "one-shot push without flags: packets announce themselves; best at small sizes"
    kernels = (lamport_kernel,)


LAMPORT = Lamport().register()
