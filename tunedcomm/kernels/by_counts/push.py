"""push: rows through the peers' memory, piece by piece, ordered by flags; for many rows.

all_gather_v goes round the ring of all_to_all's `push`, reduce_scatter_v round that of its own op's: how messages are
cut, how many flags are raised and where the slots lie follow from max_count, which all ranks know alike; the counts
only say which packets are pushed and which are read. In the layout `padded` a block writes its own count into the
scatter area of its counterparts before its first flag; they read it after that flag, and raise another one in round 0
before this block's call can end.

Numerics: ordered. Graph-safe.
Source: own; the rings as named above.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tunedcomm.kernels.all_to_all.push import RING
from tunedcomm.kernels.by_counts.lamport import fill_zeros
from tunedcomm.kernels.by_counts.op import (
    GATHER,
    PADDED,
    SCATTER,
    ByCountsVariant,
    pick,
    read_counts,
    rows_before,
    write_counts,
)
from tunedcomm.kernels.common.feasibility import packets_a_block
from tunedcomm.kernels.common.lane import (
    EPOCH_OFFSET,
    arrive,
    await_peers,
    block_range,
    by_turn,
    read_counter,
    write_counter,
)
from tunedcomm.kernels.common.packets import insert_own, load_bytes, store_bytes, sum_packets
from tunedcomm.kernels.common.sync import load_packets, store_packets
from tunedcomm.kernels.common.variant import PushRingVariant
from tunedcomm.space import Config
from tunedcomm.spec import Limits, Problem
from tunedcomm.symm.layout import MAX_WORLD_SIZE, LaneLayout, Room

_RANKS = tl.constexpr(MAX_WORLD_SIZE)
_COUNT_BYTES = 8
_MAX_PACKETS = 2048


@triton.jit
def gather_push_kernel(
    x, given, out, counts_out, row_counts, max_rows, row_bytes, local, peers, rank, timeout_ns, status,
    gather, scatter, num_chunks, cell,
    WORLD_SIZE: tl.constexpr, ALIGN: tl.constexpr, LAYOUT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """In round c: push piece c, collect piece c − 1. Slot s of a gather area holds what rank + 1 + s sent."""
    epoch = read_counter(local, EPOCH_OFFSET)
    max_rows, row_bytes = max_rows.to(tl.int64), row_bytes.to(tl.int64)
    total = (max_rows * row_bytes + 15) // 16
    offsets, first, stride = block_range(BLOCK)
    span = ((total + stride - 1) // stride + num_chunks - 1) // num_chunks * stride
    ring = tl.minimum(num_chunks, RING)
    slot = ring * span
    counts = read_counts(given, row_counts, max_rows, cell, WORLD_SIZE, LAYOUT)
    own = pick(counts, rank, WORLD_SIZE)
    nbytes = own * row_bytes

    # 1. Tell the peers that this rank reads its gather area no more, and its count where they do not know it; copy the
    # own rows until all have said so.
    block, blocks = tl.program_id(0).to(tl.int64), tl.num_programs(0).to(tl.int64)
    if LAYOUT == "padded":
        turn = tl.arange(0, _RANKS)
        theirs = by_turn(peers) + scatter + (rank * blocks + block) * 8
        tl.store(theirs.to(tl.pointer_type(tl.int64)), own + turn.to(tl.int64) * 0, mask=turn < WORLD_SIZE - 1)
    arrive(peers, rank, epoch + 1, WORLD_SIZE)
    own_place = out + rows_before(counts, rank, max_rows, WORLD_SIZE, LAYOUT) * row_bytes
    for start in tl.range(first, (nbytes + 15) // 16, stride):
        at = (start + offsets) * 16
        w0, w1, w2, w3 = load_packets(x + at, at < nbytes)
        store_bytes(own_place + at, nbytes - at, w0, w1, w2, w3, at < nbytes, ALIGN)
    await_peers(local, rank, epoch + 1, timeout_ns, status, WORLD_SIZE)
    if LAYOUT == "padded":
        counts = ()
        for i in tl.static_range(WORLD_SIZE):
            written = local + scatter + (i * blocks + block) * 8
            of_peer = tl.load(written.to(tl.pointer_type(tl.int64)), mask=rank != i, other=0)
            counts = counts + (tl.where(rank == i, own, of_peer),)
    write_counts(counts_out, counts, WORLD_SIZE)
    sizes, places = (), ()
    largest = max_rows * 0
    for i in tl.static_range(WORLD_SIZE - 1):
        peer = (rank + 1 + i) % WORLD_SIZE
        sizes = sizes + (pick(counts, peer, WORLD_SIZE) * row_bytes,)  # type: ignore[assignment]
        places = places + (out + rows_before(counts, peer, max_rows, WORLD_SIZE, LAYOUT) * row_bytes,)  # type: ignore[assignment]
        largest = tl.maximum(largest, (sizes[i] + 15) // 16)

    for c in tl.range(0, num_chunks + 1):
        # 2. Push piece c of the own rows.
        if c < num_chunks:
            lap = (c - c % ring) * span
            for start in tl.range(first + c * span, tl.minimum((nbytes + 15) // 16, (c + 1) * span), stride):
                packet = start + offsets
                mask = packet * 16 < nbytes
                w0, w1, w2, w3 = load_packets(x + packet * 16, mask)
                for i in tl.static_range(WORLD_SIZE - 1):  # this rank comes (WORLD_SIZE - 2 - i) + 1 after the peer
                    place = peers[i] + gather + ((WORLD_SIZE - 2 - i) * slot + packet - lap) * 16
                    store_packets(place, w0, w1, w2, w3, mask)
            arrive(peers, rank, epoch + 2 + c, WORLD_SIZE)
        # 3. Write out piece c − 1 of what the peers pushed.
        if c >= 1:
            d = c - 1
            lap = (d - d % ring) * span
            await_peers(local, rank, epoch + 2 + d, timeout_ns, status, WORLD_SIZE)
            for start in tl.range(first + d * span, tl.minimum(largest, (d + 1) * span), stride):
                packet = start + offsets
                words = ()
                for i in tl.static_range(WORLD_SIZE - 1):
                    mask = packet * 16 < sizes[i]
                    words = words + load_packets(local + gather + (i * slot + packet - lap) * 16, mask)
                for i in tl.static_range(WORLD_SIZE - 1):
                    left = sizes[i] - packet * 16
                    w0, w1, w2, w3 = words[4 * i], words[4 * i + 1], words[4 * i + 2], words[4 * i + 3]
                    store_bytes(places[i] + packet * 16, left, w0, w1, w2, w3, left > 0, ALIGN)
    write_counter(local, epoch + 1 + num_chunks, EPOCH_OFFSET)


@triton.jit
def scatter_push_kernel(
    x, given, out, counts_out, row_counts, max_rows, row_bytes, local, peers, rank, timeout_ns, status,
    scatter, num_chunks, cell,
    WORLD_SIZE: tl.constexpr, DTYPE: tl.constexpr, ALIGN: tl.constexpr, LAYOUT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """In round c: push piece c of every peer's rows, sum piece c − 1 of the own rows in rank order."""
    epoch = read_counter(local, EPOCH_OFFSET)
    max_rows, row_bytes = max_rows.to(tl.int64), row_bytes.to(tl.int64)
    total = (max_rows * row_bytes + 15) // 16
    offsets, first, stride = block_range(BLOCK)
    span = ((total + stride - 1) // stride + num_chunks - 1) // num_chunks * stride
    ring = tl.minimum(num_chunks, RING)
    slot_bytes = ring * span * 16
    counts = read_counts(given, row_counts, max_rows, cell, WORLD_SIZE, LAYOUT)
    nbytes = pick(counts, rank, WORLD_SIZE) * row_bytes
    own_source = x + rows_before(counts, rank, max_rows, WORLD_SIZE, LAYOUT) * row_bytes
    sizes, sources = (), ()
    largest = max_rows * 0
    for i in tl.static_range(WORLD_SIZE - 1):
        peer = (rank + 1 + i) % WORLD_SIZE
        sizes = sizes + (pick(counts, peer, WORLD_SIZE) * row_bytes,)  # type: ignore[assignment]
        sources = sources + (x + rows_before(counts, peer, max_rows, WORLD_SIZE, LAYOUT) * row_bytes,)  # type: ignore[assignment]
        largest = tl.maximum(largest, (sizes[i] + 15) // 16)

    for c in tl.range(0, num_chunks + 1):
        # 1. Push piece c of every peer's rows.
        if c < num_chunks:
            place = scatter + rank * slot_bytes - (c - c % ring) * span * 16
            for start in tl.range(first + c * span, tl.minimum(largest, (c + 1) * span), stride):
                packet = start + offsets
                words = ()
                for i in tl.static_range(WORLD_SIZE - 1):  # all loads before the first store
                    left = sizes[i] - packet * 16
                    words = words + load_bytes(sources[i] + packet * 16, left, left > 0, ALIGN)
                for i in tl.static_range(WORLD_SIZE - 1):
                    mask = packet * 16 < sizes[i]
                    at = peers[i] + place + packet * 16
                    store_packets(at, words[4 * i], words[4 * i + 1], words[4 * i + 2], words[4 * i + 3], mask)
            arrive(peers, rank, epoch + 1 + c, WORLD_SIZE)
        # 2. Sum piece c − 1 of the own rows.
        if c >= 1:
            d = c - 1
            await_peers(local, rank, epoch + 1 + d, timeout_ns, status, WORLD_SIZE)
            place = local + scatter - (d - d % ring) * span * 16
            for start in tl.range(first + d * span, tl.minimum((nbytes + 15) // 16, (d + 1) * span), stride):
                packet = start + offsets
                left = nbytes - packet * 16
                own = load_bytes(own_source + packet * 16, left, left > 0, ALIGN)
                words = ()
                for i in tl.static_range(WORLD_SIZE):
                    words = words + load_packets(place + i * slot_bytes + packet * 16, (left > 0) & (rank != i))
                s0, s1, s2, s3 = sum_packets(insert_own(words, own, rank, WORLD_SIZE), DTYPE, False, WORLD_SIZE)
                store_bytes(out + packet * 16, left, s0, s1, s2, s3, left > 0, ALIGN)
    # 3. Wait until every peer has read all of its scatter area that this block fills.
    arrive(peers, rank, epoch + 1 + num_chunks, WORLD_SIZE)
    if LAYOUT == "device":
        fill_zeros(out, nbytes, max_rows * row_bytes, first, stride, offsets, ALIGN, BLOCK)
    await_peers(local, rank, epoch + 1 + num_chunks, timeout_ns, status, WORLD_SIZE)
    write_counter(local, epoch + 1 + num_chunks, EPOCH_OFFSET)


class GatherPush(ByCountsVariant, PushRingVariant, registered=True):
    op = GATHER
    name = "push"
    summary = "push through the peers' memory ordered by flags, pieces overlapped; for many rows"
    kernels = (gather_push_kernel,)
    trailing_arguments: tuple[str, ...] = ("gather", "scatter", "num_chunks")
    ring = RING.value

    def refuse_config(self, problem: Problem, config: Config, limits: Limits) -> str | None:
        if (packets := packets_a_block(config)) * problem.world_size > _MAX_PACKETS:
            return f"{packets} packets of {problem.world_size} ranks a block at once spill registers"
        return self.refuse_ring(problem, config, limits)

    def lane_room(self, problem: Problem, config: Config, layout: LaneLayout) -> Room:
        room: Room = super().lane_room(problem, config, layout)
        counts = problem.world_size * int(config["num_blocks"]) * _COUNT_BYTES if problem.layout == PADDED else 0
        return room._replace(scatter=counts)


class ScatterPush(GatherPush, registered=True):
    op = SCATTER
    kernels = (scatter_push_kernel,)
    trailing_arguments = ("scatter", "num_chunks")

    def slots(self, problem: Problem) -> int:
        return problem.world_size

    def lane_room(self, problem: Problem, config: Config, layout: LaneLayout) -> Room:
        return PushRingVariant.lane_room(self, problem, config, layout)
