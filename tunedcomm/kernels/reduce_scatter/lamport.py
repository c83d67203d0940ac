"""lamport: every rank pushes its chunks to their owners without flags; packets announce themselves.

The protocol of all_reduce's `lamport`, with its two stages and its proof, but rank j is sent chunk j alone, and the own
chunk never leaves. No chunk is empty, so every peer is sent at least one packet.

Numerics: ordered. Graph-safe: the call counter lives in the lane.
Source: as `all_reduce`'s `lamport`; the first half of a two-shot.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tunedcomm.kernels.common.lane import STATE_OFFSET, block_range, read_counter, write_counter
from tunedcomm.kernels.common.packets import arm, insert_own, load_bytes, num_packets, sum_packets, write_elements
from tunedcomm.kernels.common.sync import INTERPRET, SENTINEL, poll_packets, store_packets
from tunedcomm.kernels.common.variant import LamportVariant
from tunedcomm.kernels.reduce_scatter.op import ReduceScatterVariant


@triton.jit
def lamport_kernel(
    x, out, numel, local, q0, q1, q2, q3, q4, q5, q6, rank, timeout_ns, status, arena, stage_bytes,
    WORLD_SIZE: tl.constexpr, DTYPE: tl.constexpr, WIDTH: tl.constexpr, AVG: tl.constexpr, ALIGN: tl.constexpr,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Push chunks to their owners, poll the own one, sum. Slot r of a stage holds rank r's packets, tightly packed."""
    if PDL and not INTERPRET:
        gdc_wait()
    peers = (q0, q1, q2, q3, q4, q5, q6)
    calls = read_counter(local, STATE_OFFSET)
    stage = arena + (calls & 1) * stage_bytes
    total = num_packets(numel, WIDTH)
    nbytes = numel.to(tl.int64) * WIDTH
    lanes, first, step = block_range(BLOCK)

    for start in tl.range(first, total, step):
        packet = start + lanes
        here = packet < total
        left = nbytes - packet * 16
        place = stage + (rank * total + packet) * 16
        words = ()
        for i in tl.static_range(WORLD_SIZE - 1):
            owner = (rank + 1 + i) % WORLD_SIZE
            words = words + load_bytes(x + owner * nbytes + packet * 16, left, here, ALIGN)
        for i in tl.static_range(WORLD_SIZE - 1):
            w0, w1, w2, w3 = arm(words[4 * i]), arm(words[4 * i + 1]), arm(words[4 * i + 2]), arm(words[4 * i + 3])
            store_packets(peers[i] + place, w0, w1, w2, w3, here, REMOTE=True)
    if PDL and not INTERPRET:
        gdc_launch_dependents()

    for start in tl.range(first, total, step):
        packet = start + lanes
        here = packet < total
        own = load_bytes(x + rank * nbytes + packet * 16, nbytes - packet * 16, here, ALIGN)
        place = local + stage + packet * 16
        words = poll_packets(place, total * 16, here, rank, timeout_ns, status, WORLD_SIZE)
        empty = tl.full((BLOCK,), SENTINEL, tl.int32)
        for i in tl.static_range(WORLD_SIZE):
            store_packets(place + i * total * 16, empty, empty, empty, empty, here & (rank != i))
        s0, s1, s2, s3 = sum_packets(insert_own(words, own, rank, WORLD_SIZE), DTYPE, AVG, WORLD_SIZE)
        write_elements(out, packet, numel, s0, s1, s2, s3, here, WIDTH, ALIGN < 16)
    write_counter(local, calls + 1, STATE_OFFSET)


class Lamport(LamportVariant, ReduceScatterVariant):
    name = "lamport"
    summary = "chunks pushed to their owners without flags: packets announce themselves; best at small sizes"
    kernels = (lamport_kernel,)


LAMPORT = Lamport().register()
