"""lamport: rows that announce themselves, behind a greeting that says how many there are; best for few rows.

The protocol is `common.lamport`'s. A stage holds a slot of packets for each rank, as many as max_count rows take, in
all_gather_v a mask word for each (see `packets`), and a greeting of every block of every rank: one packet whose first
word is the number of rows that its rank sends. So a rank without rows sends and gets something, too, and a call polls
exactly what was sent. Each block polls and clears the greetings of its counterparts.

all_gather_v: threads share the packets of all peers, which the greetings count, as one list. So a rank with many rows
takes no longer than ranks with as many rows in all.

Numerics: ordered. Graph-safe: the call counter lives in the lane.
Source: own; the protocol as in all_reduce's `lamport`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tunedcomm.kernels.by_counts.op import (
    GATHER,
    SCATTER,
    ByCountsVariant,
    pick,
    read_counts,
    rows_before,
    write_counts,
)
from tunedcomm.kernels.common.feasibility import refuse_stage
from tunedcomm.kernels.common.lamport import begin_call, end_call, launch_next
from tunedcomm.kernels.common.lane import block_range, select_peer
from tunedcomm.kernels.common.packets import (
    PACKET_BYTES,
    escape,
    escape_sentinels,
    has_escape,
    insert_own,
    load_bytes,
    packets_of,
    restore,
    sentinel_mask_of,
    store_bytes,
    sum_packets,
)
from tunedcomm.kernels.common.sync import (
    INTERPRET,
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
from tunedcomm.symm.layout import MAX_WORLD_SIZE, LaneLayout, Room

_RANKS = tl.constexpr(MAX_WORLD_SIZE)


@triton.jit
def greet(counts, greetings, peers, rank, WORLD_SIZE: tl.constexpr, BLOCK: tl.constexpr, TO_ALL: tl.constexpr):
    """Tell the same block of every peer how many rows come from this rank: its own, or the peer's."""
    turn = tl.arange(0, BLOCK)
    count = tl.zeros((BLOCK,), tl.int64) + pick(counts, rank, WORLD_SIZE)
    if not TO_ALL:
        count = pick(counts, (rank.to(tl.int32) + 1 + turn) % WORLD_SIZE, WORLD_SIZE)
    place = greetings + (rank * tl.num_programs(0) + tl.program_id(0)) * 16
    word = count.to(tl.int32)
    store_packets(select_peer(peers, turn) + place, word, word, word, word, turn < WORLD_SIZE - 1, REMOTE=True)


@triton.jit
def await_greetings(local, greetings, rank, timeout_ns, status, WORLD_SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Wait for the greetings of the same block of every peer, clear them and return their numbers, by rank; 0 here."""
    peer = tl.arange(0, _RANKS)
    block = tl.program_id(0).to(tl.int64)
    place = local + greetings + (peer * tl.num_programs(0) + block) * 16
    word, _, _, _ = poll_from(place, (peer < WORLD_SIZE) & (peer != rank), peer, timeout_ns, status)
    if not INTERPRET:
        tl.debug_barrier()  # every warp polls them
    rows = ()
    for i in tl.static_range(WORLD_SIZE):
        rows = rows + (tl.sum(tl.where(peer == i, word, 0), axis=0).to(tl.int64),)  # type: ignore[assignment]
    turn = tl.arange(0, BLOCK)
    empty = tl.full((BLOCK,), SENTINEL, tl.int32)
    place = local + greetings + (turn * tl.num_programs(0) + block) * 16
    store_packets(place, empty, empty, empty, empty, (turn < WORLD_SIZE) & (turn != rank))
    return rows


@triton.jit
def gather_kernel(
    x, given, out, counts_out, row_counts, max_rows, row_bytes, local, peers, rank, timeout_ns, status,
    arena, stage_bytes, cell,
    WORLD_SIZE: tl.constexpr, ALIGN: tl.constexpr, LAYOUT: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Greet the peers and push the own rows; then poll all peers' rows, clear them and write them out.

    Example:
        2 ranks, rows of one packet, max_rows = 2; rank 0 has 2 rows and rank 1 none; one block. Rank 0 stores its
        packets at offsets 0 and 16 of rank 1's stage and a greeting of 2 at 64 + 16, behind 4 packets and their 4 mask
        words. Rank 1 stores a greeting of 0 at offset 96 of rank 0's. Rank 1 polls its greeting and then two packets;
        rank 0 polls its greeting and is done.
    """
    calls, stage = begin_call(local, arena, stage_bytes, PDL)
    max_rows, row_bytes = max_rows.to(tl.int64), row_bytes.to(tl.int64)
    total = (max_rows * row_bytes + 15) // 16
    masks = stage + WORLD_SIZE * total * 16
    greetings = masks + (WORLD_SIZE * total + 3) // 4 * 16
    offsets, first, stride = block_range(BLOCK)
    empty = tl.full((BLOCK,), SENTINEL, tl.int32)
    counts = read_counts(given, row_counts, max_rows, cell, WORLD_SIZE, LAYOUT)

    # 1. Push the own rows, with masks where they have an ESCAPE, to every peer; write the own part of the output.
    greet(counts, greetings, peers, rank, WORLD_SIZE, BLOCK, True)
    nbytes = pick(counts, rank, WORLD_SIZE) * row_bytes
    own_place = out + rows_before(counts, rank, max_rows, WORLD_SIZE, LAYOUT) * row_bytes
    for start in tl.range(first, (nbytes + 15) // 16, stride):
        packet = start + offsets
        mask = packet * 16 < nbytes
        w0, w1, w2, w3 = load_packets(x + packet * 16, mask)
        sentinels = sentinel_mask_of(w0, w1, w2, w3)
        e0, e1, e2, e3 = escape(w0), escape(w1), escape(w2), escape(w3)
        marked = mask & has_escape(e0, e1, e2, e3)
        for i in tl.static_range(WORLD_SIZE - 1):
            store_packets(peers[i] + stage + (rank * total + packet) * 16, e0, e1, e2, e3, mask, REMOTE=True)
            store_word(peers[i] + masks + (rank * total + packet) * 4, sentinels, marked)
        store_bytes(own_place + packet * 16, nbytes - packet * 16, w0, w1, w2, w3, mask, ALIGN)
    launch_next(PDL)

    # 2. Wait for the greetings.
    sent = await_greetings(local, greetings, rank, timeout_ns, status, WORLD_SIZE, BLOCK)
    if LAYOUT == "padded":
        own = counts
        counts = ()
        for i in tl.static_range(WORLD_SIZE):
            counts = counts + (tl.where(rank == i, own[i], sent[i]),)
    write_counts(counts_out, counts, WORLD_SIZE)
    arriving = max_rows * 0
    for i in tl.static_range(WORLD_SIZE):
        arriving += (sent[i] * row_bytes + 15) // 16

    # 3. Poll the peers' packets and masks, clear their places, write the packets out.
    for start in tl.range(first, arriving, stride):
        at = start + offsets
        mask = at < arriving
        owner, packet, place, size = tl.zeros((BLOCK,), tl.int32), at * 0, at * 0, at * 0
        before = max_rows * 0
        for i in tl.static_range(WORLD_SIZE):
            there = (sent[i] * row_bytes + 15) // 16
            inside = (at >= before) & (at < before + there)
            owner = tl.where(inside, i, owner)
            packet = tl.where(inside, at - before, packet)
            place = tl.where(inside, rows_before(counts, i, max_rows, WORLD_SIZE, LAYOUT) * row_bytes, place)
            size = tl.where(inside, sent[i] * row_bytes, size)
            before += there
        slot = owner * total + packet
        w0, w1, w2, w3 = poll_from(local + stage + slot * 16, mask, owner, timeout_ns, status)
        marked = mask & has_escape(w0, w1, w2, w3)
        found = poll_words(
            local + masks + slot * 4, max_rows * 0, marked.to(tl.int32) << owner, timeout_ns, status, WORLD_SIZE
        )  # fmt: skip
        sentinels = found[0]
        for i in tl.static_range(1, WORLD_SIZE):
            sentinels |= found[i]
        store_packets(local + stage + slot * 16, empty, empty, empty, empty, mask)
        store_word(local + masks + slot * 4, empty, marked)
        w0, w1, w2, w3 = (
            restore(w0, sentinels, 0), restore(w1, sentinels, 1), restore(w2, sentinels, 2), restore(w3, sentinels, 3)
        )  # fmt: skip
        store_bytes(out + place + packet * 16, size - packet * 16, w0, w1, w2, w3, mask, ALIGN)
    end_call(local, calls)


@triton.jit
def fill_zeros(out, begin, end, first, stride, offsets, ALIGN: tl.constexpr, BLOCK: tl.constexpr):
    """Write zeros to bytes `begin` to `end` − 1."""
    zero = tl.zeros((BLOCK,), tl.int32)
    for start in tl.range(first, (end - begin + 15) // 16, stride):
        at = begin + (start + offsets) * 16
        store_bytes(out + at, end - at, zero, zero, zero, zero, at < end, ALIGN)


@triton.jit
def scatter_kernel(
    x, given, out, counts_out, row_counts, max_rows, row_bytes, local, peers, rank, timeout_ns, status,
    arena, stage_bytes, cell,
    WORLD_SIZE: tl.constexpr, DTYPE: tl.constexpr, ALIGN: tl.constexpr, LAYOUT: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Greet the peers and push each its rows; poll all packets of the own rows, clear them, sum in rank order."""
    calls, stage = begin_call(local, arena, stage_bytes, PDL)
    max_rows, row_bytes = max_rows.to(tl.int64), row_bytes.to(tl.int64)
    total = (max_rows * row_bytes + 15) // 16
    greetings = stage + WORLD_SIZE * total * 16
    offsets, first, stride = block_range(BLOCK)
    empty = tl.full((BLOCK,), SENTINEL, tl.int32)
    counts = read_counts(given, row_counts, max_rows, cell, WORLD_SIZE, LAYOUT)

    # 1. Push the rows of rank j to rank j.
    greet(counts, greetings, peers, rank, WORLD_SIZE, BLOCK, False)
    for i in tl.static_range(WORLD_SIZE - 1):
        owner = (rank + 1 + i) % WORLD_SIZE
        nbytes = pick(counts, owner, WORLD_SIZE) * row_bytes
        source = x + rows_before(counts, owner, max_rows, WORLD_SIZE, LAYOUT) * row_bytes
        for start in tl.range(first, (nbytes + 15) // 16, stride):
            packet = start + offsets
            mask = packet * 16 < nbytes
            w0, w1, w2, w3 = load_bytes(source + packet * 16, nbytes - packet * 16, mask, ALIGN)
            w0, w1, w2, w3 = escape_sentinels(w0, w1, w2, w3)
            store_packets(peers[i] + stage + (rank * total + packet) * 16, w0, w1, w2, w3, mask, REMOTE=True)
    launch_next(PDL)

    # 2. Poll the own rows' packets, clear their places and sum them.
    await_greetings(local, greetings, rank, timeout_ns, status, WORLD_SIZE, BLOCK)
    nbytes = pick(counts, rank, WORLD_SIZE) * row_bytes
    source = x + rows_before(counts, rank, max_rows, WORLD_SIZE, LAYOUT) * row_bytes
    for start in tl.range(first, (nbytes + 15) // 16, stride):
        packet = start + offsets
        mask = packet * 16 < nbytes
        own = load_bytes(source + packet * 16, nbytes - packet * 16, mask, ALIGN)
        place = local + stage + packet * 16
        words = poll_packets(place, total * 16, mask, rank, timeout_ns, status, WORLD_SIZE)
        for i in tl.static_range(WORLD_SIZE):
            store_packets(place + i * total * 16, empty, empty, empty, empty, mask & (rank != i))
        s0, s1, s2, s3 = sum_packets(insert_own(words, own, rank, WORLD_SIZE), DTYPE, False, WORLD_SIZE)
        store_bytes(out + packet * 16, nbytes - packet * 16, s0, s1, s2, s3, mask, ALIGN)
    if LAYOUT == "device":
        fill_zeros(out, nbytes, max_rows * row_bytes, first, stride, offsets, ALIGN, BLOCK)
    end_call(local, calls)


class GatherLamport(ByCountsVariant, LamportVariant, registered=True):
    op = GATHER
    name = "lamport"
    summary = "push without flags: rows announce themselves; best for few rows"
    kernels = (gather_kernel,)
    packet_bytes = PACKET_BYTES + 4  # with a mask
    max_rounds = 16

    def staged(self, problem: Problem, config: Config) -> int:
        """Bytes of a stage that a rank's packets and greetings take."""
        greetings = (int(config["num_blocks"]) + 1) * PACKET_BYTES  # and what aligns them
        return packets_of(problem.nbytes) * self.packet_bytes + greetings

    def refuse_config(self, problem: Problem, config: Config, limits: Limits) -> str | None:
        return refuse_stage(problem, limits, self.staged(problem, config))

    def lane_room(self, problem: Problem, config: Config, layout: LaneLayout) -> Room:
        return Room(stage=self.staged(problem, config) * problem.world_size)


class ScatterLamport(GatherLamport, registered=True):
    op = SCATTER
    kernels = (scatter_kernel,)
    packet_bytes = PACKET_BYTES
