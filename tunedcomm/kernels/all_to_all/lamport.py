"""lamport: all_to_all without flags; every rank pushes each peer its chunk, and data announce themselves.

The protocol of all_gather's `lamport`, with its masks and its proof, but rank j is sent chunk j alone. The own chunk is
copied straight. No chunk is empty, so every peer is sent at least one packet and waited for.

Numerics: ordered (bits are moved). Graph-safe: the call counter lives in the lane.
Source: as `all_reduce`'s `lamport`, without a sum and with escapes.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tunedcomm.kernels.all_to_all.op import AllToAllVariant
from tunedcomm.kernels.common.lane import STATE_OFFSET, block_range, read_counter, write_counter
from tunedcomm.kernels.common.packets import (
    escape,
    escaped_slots,
    has_escape,
    load_bytes,
    restore,
    sentinel_mask_of,
    store_bytes,
)
from tunedcomm.kernels.common.sync import INTERPRET, SENTINEL, poll_packets, poll_words, store_packets, store_word
from tunedcomm.kernels.common.variant import LamportVariant


@triton.jit
def lamport_kernel(
    x, out, nbytes, local, q0, q1, q2, q3, q4, q5, q6, rank, timeout_ns, status, arena, stage_bytes,
    WORLD_SIZE: tl.constexpr, ALIGN: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Push each peer its chunk, copy the own one, poll the peers'. Slot r of a stage holds what rank r sent."""
    if PDL and not INTERPRET:
        gdc_wait()
    peers = (q0, q1, q2, q3, q4, q5, q6)
    calls = read_counter(local, STATE_OFFSET)
    stage = arena + (calls & 1) * stage_bytes
    nbytes = nbytes.to(tl.int64)
    total = (nbytes + 15) // 16
    masks = stage + WORLD_SIZE * total * 16
    lanes, first, step = block_range(BLOCK)

    for start in tl.range(first, total, step):
        packet = start + lanes
        here = packet < total
        left = nbytes - packet * 16
        words = ()
        for i in tl.static_range(WORLD_SIZE - 1):  # all loads before the first store
            chunk = x + (rank + 1 + i) % WORLD_SIZE * nbytes
            words = words + load_bytes(chunk + packet * 16, left, here, ALIGN)
        place = rank * total + packet
        for i in tl.static_range(WORLD_SIZE - 1):
            e0, e1 = escape(words[4 * i]), escape(words[4 * i + 1])
            e2, e3 = escape(words[4 * i + 2]), escape(words[4 * i + 3])
            store_packets(peers[i] + stage + place * 16, e0, e1, e2, e3, here, REMOTE=True)
            sentinels = sentinel_mask_of(words[4 * i], words[4 * i + 1], words[4 * i + 2], words[4 * i + 3])
            store_word(peers[i] + masks + place * 4, sentinels, here & has_escape(e0, e1, e2, e3))
    if PDL and not INTERPRET:
        gdc_launch_dependents()

    for start in tl.range(first, total, step):
        packet = start + lanes
        here = packet < total
        left = nbytes - packet * 16
        w0, w1, w2, w3 = load_bytes(x + rank * nbytes + packet * 16, left, here, ALIGN)
        store_bytes(out + rank * nbytes + packet * 16, left, w0, w1, w2, w3, here, ALIGN)
        place = local + stage + packet * 16
        beside = local + masks + packet * 4
        words = poll_packets(place, total * 16, here, rank, timeout_ns, status, WORLD_SIZE)
        slots = escaped_slots(words, WORLD_SIZE)
        said = poll_words(beside, total * 4, slots, timeout_ns, status, WORLD_SIZE)
        empty = tl.full((BLOCK,), SENTINEL, tl.int32)
        for i in tl.static_range(WORLD_SIZE):
            theirs = here & (rank != i)
            store_packets(place + i * total * 16, empty, empty, empty, empty, theirs)
            store_word(beside + i * total * 4, empty, (slots & (1 << i)) != 0)
            r0, r1 = restore(words[4 * i], said[i], 0), restore(words[4 * i + 1], said[i], 1)
            r2, r3 = restore(words[4 * i + 2], said[i], 2), restore(words[4 * i + 3], said[i], 3)
            store_bytes(out + i * nbytes + packet * 16, left, r0, r1, r2, r3, theirs, ALIGN)
    write_counter(local, calls + 1, STATE_OFFSET)


class Lamport(LamportVariant, AllToAllVariant):
    name = "lamport"
    summary = "push without flags: packets announce themselves; best at small sizes"
    kernels = (lamport_kernel,)
    packet_bytes = 16 + 4


LAMPORT = Lamport().register()
