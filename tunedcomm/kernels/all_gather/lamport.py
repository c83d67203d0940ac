"""lamport: one-shot push without flags; data announce themselves. Best at small sizes.

The protocol of all_reduce's `lamport`, with its two stages and its proof; no call is empty, so every peer is sent a
packet. Every bit of a payload counts here, so sentinel words travel as escapes (see `packets`): behind the slots of
packets lies one mask word a packet, which is sent, polled and cleared exactly for packets with an ESCAPE. So a call
still clears all that is sent to it, and any mix of sizes and ops is right.

Numerics: ordered (nothing is computed). Graph-safe: the call counter lives in the lane.
Source: as `all_reduce`'s `lamport`, for payloads whose every bit counts.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tunedcomm.kernels.all_gather.op import AllGatherVariant
from tunedcomm.kernels.common.lane import STATE_OFFSET, block_range, read_counter, write_counter
from tunedcomm.kernels.common.packets import escape, escaped_slots, has_escape, restore, sentinel_mask_of, store_bytes
from tunedcomm.kernels.common.sync import (
    INTERPRET,
    SENTINEL,
    load_packets,
    poll_packets,
    poll_words,
    store_packets,
    store_word,
)
from tunedcomm.kernels.common.variant import LamportVariant


@triton.jit
def lamport_kernel(
    x, out, nbytes, local, q0, q1, q2, q3, q4, q5, q6, rank, timeout_ns, status, arena, stage_bytes,
    WORLD_SIZE: tl.constexpr, ALIGN: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Push own packets to all peers, poll theirs, write them out. Slot r of a stage holds rank r's, tightly packed."""
    if PDL and not INTERPRET:
        gdc_wait()
    peers = (q0, q1, q2, q3, q4, q5, q6)
    calls = read_counter(local, STATE_OFFSET)
    stage = arena + (calls & 1) * stage_bytes
    total = (nbytes + 15) // 16
    masks = stage + WORLD_SIZE * total * 16
    lanes, first, step = block_range(BLOCK)

    for start in tl.range(first, total, step):
        packet = start + lanes
        here = packet < total
        w0, w1, w2, w3 = load_packets(x + packet * 16, here)
        sentinels = sentinel_mask_of(w0, w1, w2, w3)
        e0, e1, e2, e3 = escape(w0), escape(w1), escape(w2), escape(w3)
        marked = here & has_escape(e0, e1, e2, e3)
        for i in tl.static_range(WORLD_SIZE - 1):
            store_packets(peers[i] + stage + (rank * total + packet) * 16, e0, e1, e2, e3, here, REMOTE=True)
            store_word(peers[i] + masks + (rank * total + packet) * 4, sentinels, marked)
        store_bytes(out + rank * nbytes + packet * 16, nbytes - packet * 16, w0, w1, w2, w3, here, ALIGN)
    if PDL and not INTERPRET:
        gdc_launch_dependents()

    for start in tl.range(first, total, step):
        packet = start + lanes
        here = packet < total
        place = local + stage + packet * 16
        words = poll_packets(place, total * 16, here, rank, timeout_ns, status, WORLD_SIZE)
        noted = local + masks + packet * 4
        slots = escaped_slots(words, WORLD_SIZE)
        sentinels = poll_words(noted, total * 4, slots, timeout_ns, status, WORLD_SIZE)
        empty = tl.full((BLOCK,), SENTINEL, tl.int32)
        for i in tl.static_range(WORLD_SIZE):
            theirs = here & (rank != i)
            store_packets(place + i * total * 16, empty, empty, empty, empty, theirs)
            store_word(noted + i * total * 4, empty, ((slots >> i) & 1) != 0)
            store_bytes(
                out + i * nbytes + packet * 16, nbytes - packet * 16,
                restore(words[4 * i], sentinels[i], 0), restore(words[4 * i + 1], sentinels[i], 1),
                restore(words[4 * i + 2], sentinels[i], 2), restore(words[4 * i + 3], sentinels[i], 3), theirs, ALIGN,
            )  # fmt: skip
    write_counter(local, calls + 1, STATE_OFFSET)


class Lamport(LamportVariant, AllGatherVariant):
    name = "lamport"
    summary = "one-shot push without flags: packets announce themselves; best at small sizes"
    kernels = (lamport_kernel,)
    packet_bytes = 16 + 4


LAMPORT = Lamport().register()
