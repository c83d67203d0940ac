"""lamport: the root pushes packets that announce themselves to every rank; best at small sizes.

The protocol is `common.lamport`'s, with all_gather's escapes and masks, because every bit of a payload counts. Its
proof needs every rank to hear from every peer in each call: otherwise a root that only sends could run several calls
ahead and overwrite a stage that is still read. So each rank also sends each peer one empty packet, the greeting. A
stage holds a greeting of each rank, then the root's packets, then their masks.

Example:
    3 ranks, root 1, one packet P. Every rank writes its greeting into slot `rank` of the others' stages. Rank 1 stores
    P behind the 3 greetings of ranks 0 and 2. Ranks 0 and 2 poll P, clear it and write it out; all ranks poll and clear
    2 greetings.

Numerics: ordered (nothing is computed). Graph-safe.
Source: as all_gather's `lamport`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tunedcomm.kernels.broadcast.op import BroadcastVariant
from tunedcomm.kernels.common.feasibility import refuse_stage
from tunedcomm.kernels.common.lamport import begin_call, end_call, launch_next
from tunedcomm.kernels.common.lane import block_range
from tunedcomm.kernels.common.packets import PACKET_BYTES, escape, has_escape, restore, sentinel_mask_of, store_bytes
from tunedcomm.kernels.common.sync import (
    SENTINEL,
    load_packets,
    poll_from,
    poll_packets,
    poll_words,
    store_packets,
    store_word,
)
from tunedcomm.kernels.common.variant import LamportVariant
from tunedcomm.space import Config
from tunedcomm.spec import Limits, Problem
from tunedcomm.symm.layout import LaneLayout, Room

_MASK_BYTES = 4


@triton.jit
def lamport_kernel(
    x, out, root, nbytes, local, peers, rank, timeout_ns, status, arena, stage_bytes,
    WORLD_SIZE: tl.constexpr, ALIGN: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Greet the peers; push the root's packets, or write out what the root pushed; wait for the peers' greetings."""
    calls, stage = begin_call(local, arena, stage_bytes, PDL)
    total = (nbytes + 15) // 16
    packets = stage + WORLD_SIZE * 16
    masks = packets + total * 16
    offsets, first, stride = block_range(BLOCK)
    empty = tl.full((BLOCK,), SENTINEL, tl.int32)

    # 1. Greet every peer: one thread of block 0.
    greets = (offsets + first) == 0
    zero = tl.zeros((BLOCK,), tl.int32)
    for i in tl.static_range(WORLD_SIZE - 1):
        store_packets(peers[i] + stage + rank * 16 + offsets * 16, zero, zero, zero, zero, greets, REMOTE=True)

    # 2. The root pushes its packets, and copies them to its output unless that is its input.
    for start in tl.range(first, tl.where(rank == root, total, 0), stride):
        packet = start + offsets
        mask = packet < total
        w0, w1, w2, w3 = load_packets(x + packet * 16, mask)
        sentinels = sentinel_mask_of(w0, w1, w2, w3)
        e0, e1, e2, e3 = escape(w0), escape(w1), escape(w2), escape(w3)
        marked = mask & has_escape(e0, e1, e2, e3)
        for i in tl.static_range(WORLD_SIZE - 1):
            store_packets(peers[i] + packets + packet * 16, e0, e1, e2, e3, mask, REMOTE=True)
            store_word(peers[i] + masks + packet * 4, sentinels, marked)
        store_bytes(out + packet * 16, nbytes - packet * 16, w0, w1, w2, w3, mask & (x != out), ALIGN)
    launch_next(PDL)

    # 3. The others poll the root's packets, clear them and write them out.
    for start in tl.range(first, tl.where(rank == root, 0, total), stride):
        packet = start + offsets
        mask = packet < total
        place = local + packets + packet * 16
        w0, w1, w2, w3 = poll_from(place, mask, zero + root.to(tl.int32), timeout_ns, status)
        marked = mask & has_escape(w0, w1, w2, w3)
        mask_address = local + masks + packet * 4
        slots = marked.to(tl.int32) << root.to(tl.int32)  # the root's, which an error names
        found = poll_words(mask_address, nbytes * 0, slots, timeout_ns, status, WORLD_SIZE)
        sentinels = found[0]
        for i in tl.static_range(1, WORLD_SIZE):
            sentinels |= found[i]
        store_packets(place, empty, empty, empty, empty, mask)
        store_word(mask_address, empty, marked)
        w0, w1, w2, w3 = (
            restore(w0, sentinels, 0), restore(w1, sentinels, 1), restore(w2, sentinels, 2), restore(w3, sentinels, 3)
        )  # fmt: skip
        store_bytes(out + packet * 16, nbytes - packet * 16, w0, w1, w2, w3, mask, ALIGN)

    # 4. Wait for the peers' greetings, and clear them.
    greeting = local + stage + offsets * 16
    poll_packets(greeting, nbytes * 0 + 16, greets, rank, timeout_ns, status, WORLD_SIZE)
    for i in tl.static_range(WORLD_SIZE):
        store_packets(greeting + i * 16, empty, empty, empty, empty, greets & (rank != i))
    end_call(local, calls)


class Lamport(LamportVariant, BroadcastVariant, registered=True):
    name = "lamport"
    summary = "the root pushes packets that announce themselves; best at small sizes"
    kernels = (lamport_kernel,)

    def refuse_config(self, problem: Problem, config: Config, limits: Limits) -> str | None:
        return refuse_stage(problem, limits, -(-self._staged(problem) // problem.world_size))

    def _staged(self, problem: Problem) -> int:
        """Bytes of packets, masks and greetings."""
        return self.work_packets(problem) * (PACKET_BYTES + _MASK_BYTES) + problem.world_size * PACKET_BYTES

    def lane_room(self, problem: Problem, config: Config, layout: LaneLayout) -> Room:
        return Room(stage=self._staged(problem))
