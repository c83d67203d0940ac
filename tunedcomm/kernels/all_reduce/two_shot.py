"""two_shot, two_shot_split: reduce-scatter then all-gather in one kernel, ordered by flags; best at large sizes.

Slice j of the message belongs to rank j. Every rank pushes its part of every slice into the owner's scatter area; the
owner sums its slice in rank order and pushes the sums into every peer's gather area; every rank copies what was
gathered to the output. All this goes chunk by chunk. The areas hold `RING` (`SPLIT_RING`) chunks of every rank, so
messages of any size fit if they are cut often enough. They lie apart for every size, so calls of different sizes do not
change what follows.

**two_shot, plain input.** Each block does all three and exchanges flags between them. With `num_chunks` > 1 it pushes
the next chunk before it waits for the last one, so that links do not idle while flags travel.

Why no area is overwritten too early, within a call: in round c a block pushes chunk c into the place of chunk c − 3; in
round c − 1 it waited until all peers had reduced (read) that one. It then reduces chunk c − 1 into the peers' gather
place of chunk c − 4, after it waited for their push of chunk c − 1, which they make after they collected chunk c − 4.
From call to call: a peer pushes the next call's scatter only after its own call ended, in which it waited for this
rank's last flag, set after this rank's last read of its scatter area. It pushes the next call's sums only after this
rank's first flag of that call, which this rank sets after its own call, and all reads of its gather area, ended.

**two_shot, symmetric input in place.** Flags, read the own slice on all ranks, sum, write it to all ranks, flags.
Nobody else touches that slice in between.

**two_shot_split.** One third of the blocks pushes, one third sums, one third collects, so that links never wait for
sums. Pusher, reducer and collector k are a team: they take the same packets of every slice, cut into `num_chunks`
pieces. Each team has three rows of flags, and raises the flags of its row on all peers to c + 1 where piece c

- was pushed (seen by the peers' reducers),
- was summed: the scatter area is read and the sums are pushed (seen by the peers' pushers and collectors),
- was collected: the gather area is read (seen by the peers' reducers).

Why no area is overwritten too early, within a call: a pusher waits until the peers have summed piece c − 4 before it
pushes piece c into its place; a reducer waits until they have collected piece c − 4 before it pushes the sums of piece
c. From call to call: peers push the next call's scatter only after their own call ended, in which their collectors
waited for this rank's last flag of sums, raised after its last read of its scatter area. They push sums only after they
have seen a flag of a pusher of this rank, which is raised after this rank's call before, and all reads of its gather
area, ended. In place: a piece of a peer's slice is collected once it is summed, for which this rank's part was read.
All flags are at most the epoch at the end, which grows by `num_chunks` on every rank.

Numerics: ordered (every element is summed once, by its slice's owner). Graph-safe.
Source: the two-shot scheme of NCCL-free serving stacks and PyTorch's symmetric memory operators; blocks of several
kinds as in other libraries' proxy and copy kernels.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import triton
import triton.language as tl

from tunedcomm.kernels.all_reduce.op import AllReduceVariant, slice_packets
from tunedcomm.kernels.common.feasibility import packets_a_block, refuse_residence
from tunedcomm.kernels.common.lane import (
    EPOCH_OFFSET,
    address_of,
    arrive,
    arrive_at,
    await_at,
    await_peers,
    block_range,
    exchange_flags,
    read_counter,
    write_counter,
)
from tunedcomm.kernels.common.packets import insert_own, num_packets, read_elements, sum_packets, write_elements
from tunedcomm.kernels.common.sync import INTERPRET, load_packets, store_packets
from tunedcomm.kernels.common.variant import PUSH_GRID, RingVariant
from tunedcomm.space import Choice, Config, PowerOfTwo, Space, Value
from tunedcomm.spec import Limits, Problem
from tunedcomm.symm.layout import LaneLayout, Room

RING = tl.constexpr(3)
SPLIT_RING = tl.constexpr(4)
_KINDS = tl.constexpr(3)
_MANY_BLOCKS_BYTES = 16 << 20  # bytes from which fewer than 32 blocks of a kind never won


@triton.jit
def two_shot_kernel(
    x, out, numel, local, peers, rank, timeout_ns, status,
    input_peers, scatter, gather, num_chunks,
    WORLD_SIZE: tl.constexpr, DTYPE: tl.constexpr, WIDTH: tl.constexpr, AVG: tl.constexpr, TAIL: tl.constexpr,
    BLOCK: tl.constexpr, SYMMETRIC: tl.constexpr,
):  # fmt: skip
    """Plain input. In round c: push chunk c, reduce chunk c − 1, collect chunk c − 2.

    A block raises its flags to max(1, 2c) when it has pushed chunk c, and to min(2c + 3, 2C) when it has reduced chunk
    c, of C chunks.

    Example:
        2 ranks, 8 fp32 elements (2 packets, slice j is packet j), 1 chunk. Rank 0 pushes packet 1 into slot 0 of rank
        1's scatter area, rank 1 pushes packet 0 into slot 1 of rank 0's. Rank 0 adds its packet 0 and slot 1, writes
        the sum to its output and pushes it into slot 0 of rank 1's gather area. Rank 1 does the same with packet 1 and
        slot 1 of rank 0's gather area. Each rank copies the peer's slot of its own gather area to its output.
    """
    epoch = read_counter(local, EPOCH_OFFSET)
    share = (num_packets(numel, WIDTH) + WORLD_SIZE - 1) // WORLD_SIZE
    offsets, first, stride = block_range(BLOCK)
    span = ((share + stride - 1) // stride + num_chunks - 1) // num_chunks * stride
    ring = tl.minimum(num_chunks, RING)
    slot = ring * span

    for c in tl.range(0, num_chunks + 2):
        # 1. Push chunk c of slice j to rank j.
        if c < num_chunks:
            lap = (c - c % ring) * span
            for start in tl.range(first + c * span, tl.minimum(share, (c + 1) * span), stride):
                at = start + offsets
                mask = at < share
                for i in tl.static_range(WORLD_SIZE - 1):
                    owner = (rank + 1 + i) % WORLD_SIZE
                    w0, w1, w2, w3 = read_elements(x, owner * share + at, numel, mask, WIDTH, TAIL)
                    store_packets(peers[i] + scatter + (rank * slot + at - lap) * 16, w0, w1, w2, w3, mask)
            arrive(peers, rank, epoch + tl.maximum(1, 2 * c), WORLD_SIZE)
        # 2. Sum chunk c − 1 of the own slice in rank order, push the sums to every peer.
        if (c >= 1) & (c <= num_chunks):
            d = c - 1
            lap = (d - d % ring) * span
            await_peers(local, rank, epoch + tl.maximum(1, 2 * d), timeout_ns, status, WORLD_SIZE)
            for start in tl.range(first + d * span, tl.minimum(share, (d + 1) * span), stride):
                at = start + offsets
                mask = at < share
                own = read_elements(x, rank * share + at, numel, mask, WIDTH, TAIL)
                words = ()
                for i in tl.static_range(WORLD_SIZE):
                    words = words + load_packets(local + scatter + (i * slot + at - lap) * 16, mask & (rank != i))
                s0, s1, s2, s3 = sum_packets(insert_own(words, own, rank, WORLD_SIZE), DTYPE, AVG, WORLD_SIZE)
                for i in tl.static_range(WORLD_SIZE - 1):
                    store_packets(peers[i] + gather + (rank * slot + at - lap) * 16, s0, s1, s2, s3, mask)
                write_elements(out, rank * share + at, numel, s0, s1, s2, s3, mask, WIDTH, TAIL)
            reduced = epoch + tl.minimum(2 * d + 3, 2 * num_chunks)
            arrive(peers, rank, reduced, WORLD_SIZE)
        # 3. Copy chunk c − 2 of the peers' slices to the output.
        if c >= 2:
            e = c - 2
            lap = (e - e % ring) * span
            await_peers(local, rank, epoch + tl.minimum(2 * e + 3, 2 * num_chunks), timeout_ns, status, WORLD_SIZE)
            for start in tl.range(first + e * span, tl.minimum(share, (e + 1) * span), stride):
                at = start + offsets
                mask = at < share
                for i in tl.static_range(WORLD_SIZE):
                    peer_mask = mask & (rank != i)
                    w0, w1, w2, w3 = load_packets(local + gather + (i * slot + at - lap) * 16, peer_mask)
                    write_elements(out, i * share + at, numel, w0, w1, w2, w3, peer_mask, WIDTH, TAIL)
    write_counter(local, epoch + 2 * num_chunks, EPOCH_OFFSET)


@triton.jit
def two_shot_inplace_kernel(
    x, out, numel, local, peers, rank, timeout_ns, status,
    input_peers, scatter, gather, num_chunks,
    WORLD_SIZE: tl.constexpr, DTYPE: tl.constexpr, WIDTH: tl.constexpr, AVG: tl.constexpr, TAIL: tl.constexpr,
    BLOCK: tl.constexpr, SYMMETRIC: tl.constexpr,
):  # fmt: skip
    """Symmetric input in place: read the own slice from all ranks, write its sum to all ranks; `out` is `x`."""
    epoch = read_counter(local, EPOCH_OFFSET)
    share = (num_packets(numel, WIDTH) + WORLD_SIZE - 1) // WORLD_SIZE
    offsets, first, stride = block_range(BLOCK)
    # 1. Exchange flags. Orders what wrote the inputs before the peers' reads.
    exchange_flags(local, peers, rank, epoch + 1, timeout_ns, status, WORLD_SIZE)
    # 2. Sum the own slice of all inputs in rank order, write the sum into every rank's tensor.
    for start in tl.range(first, share, stride):
        at = start + offsets
        mask = at < share
        packet = rank * share + at
        words = ()
        for i in tl.static_range(WORLD_SIZE):
            source = address_of(input_peers, x, i, rank, WORLD_SIZE)
            words = words + read_elements(source, packet, numel, mask, WIDTH, TAIL)
        s0, s1, s2, s3 = sum_packets(words, DTYPE, AVG, WORLD_SIZE)
        for i in tl.static_range(WORLD_SIZE - 1):
            write_elements(input_peers[i], packet, numel, s0, s1, s2, s3, mask, WIDTH, TAIL)
        write_elements(x, packet, numel, s0, s1, s2, s3, mask, WIDTH, TAIL)
    # 3. Exchange flags. Orders the sums written to this rank before whatever follows this kernel.
    exchange_flags(local, peers, rank, epoch + 2, timeout_ns, status, WORLD_SIZE)
    write_counter(local, epoch + 2, EPOCH_OFFSET)


@triton.jit
def _push(
    x, numel, peers, place, first, end, stride, share, rank,
    WORLD_SIZE: tl.constexpr, WIDTH: tl.constexpr, TAIL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Push a piece of every slice to its owner; all peers' packets are loaded before the first is stored."""
    offsets = tl.arange(0, BLOCK).to(tl.int64)
    for start in tl.range(first, end, stride):
        at = start + offsets
        mask = at < end
        words = ()
        for i in tl.static_range(WORLD_SIZE - 1):
            owner = (rank + 1 + i) % WORLD_SIZE
            words = words + read_elements(x, owner * share + at, numel, mask, WIDTH, TAIL)
        for i in tl.static_range(WORLD_SIZE - 1):
            target = peers[i] + place + at * 16
            store_packets(target, words[4 * i], words[4 * i + 1], words[4 * i + 2], words[4 * i + 3], mask)


@triton.jit
def _reduce(
    x, out, numel, peers, source, place, slot_bytes, first, end, stride, share, rank,
    WORLD_SIZE: tl.constexpr, DTYPE: tl.constexpr, WIDTH: tl.constexpr, AVG: tl.constexpr, TAIL: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Sum a piece of the own slice, push the sums to all peers and write them to the output."""
    offsets = tl.arange(0, BLOCK).to(tl.int64)
    for start in tl.range(first, end, stride):
        at = start + offsets
        mask = at < end
        own = read_elements(x, rank * share + at, numel, mask, WIDTH, TAIL)
        words = ()
        for i in tl.static_range(WORLD_SIZE):
            words = words + load_packets(source + i * slot_bytes + at * 16, mask & (rank != i))
        s0, s1, s2, s3 = sum_packets(insert_own(words, own, rank, WORLD_SIZE), DTYPE, AVG, WORLD_SIZE)
        for i in tl.static_range(WORLD_SIZE - 1):
            store_packets(peers[i] + place + at * 16, s0, s1, s2, s3, mask)
        write_elements(out, rank * share + at, numel, s0, s1, s2, s3, mask, WIDTH, TAIL)


@triton.jit
def _collect(
    out, numel, source, slot_bytes, first, end, stride, share, rank,
    WORLD_SIZE: tl.constexpr, WIDTH: tl.constexpr, TAIL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Copy a piece of all peers' slices to the output."""
    offsets = tl.arange(0, BLOCK).to(tl.int64)
    for start in tl.range(first, end, stride):
        at = start + offsets
        mask = at < end
        words = ()
        for i in tl.static_range(WORLD_SIZE - 1):
            owner = (rank + 1 + i) % WORLD_SIZE
            words = words + load_packets(source + owner * slot_bytes + at * 16, mask)
        for i in tl.static_range(WORLD_SIZE - 1):
            owner = (rank + 1 + i) % WORLD_SIZE
            write_elements(
                out, owner * share + at, numel, words[4 * i], words[4 * i + 1], words[4 * i + 2], words[4 * i + 3],
                mask, WIDTH, TAIL,
            )  # fmt: skip


@triton.jit
def two_shot_split_kernel(
    x, out, numel, local, peers, rank, timeout_ns, status, scatter, gather, num_chunks,
    WORLD_SIZE: tl.constexpr, DTYPE: tl.constexpr, WIDTH: tl.constexpr, AVG: tl.constexpr, TAIL: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Round c: pushers do piece c, reducers piece c − 1, collectors piece c − 2, each as soon as its flags allow it.

    Interpreted blocks run one after another, so the first third does all three kinds of work in turn there.
    """
    epoch = read_counter(local, EPOCH_OFFSET)
    share = (num_packets(numel, WIDTH) + WORLD_SIZE - 1) // WORLD_SIZE
    num_teams = tl.num_programs(0) // _KINDS
    team = tl.program_id(0) % num_teams
    kind = tl.program_id(0) // num_teams
    stride = num_teams.to(tl.int64) * BLOCK
    first = team.to(tl.int64) * BLOCK
    span = ((share + stride - 1) // stride + num_chunks - 1) // num_chunks * stride
    ring = tl.minimum(num_chunks, SPLIT_RING)
    slot_bytes = ring * span * 16
    pushed, summed, collected = team, team + num_teams, team + 2 * num_teams

    for c in tl.range(0, num_chunks + 2):
        # 1. Pushers: piece c of slice j to rank j.
        if (c < num_chunks) & (kind == 0):
            lap = (c - c % ring) * span * 16
            if c >= ring:
                await_at(local, summed, rank, epoch + c - ring + 1, timeout_ns, status, WORLD_SIZE)
            end = tl.minimum(share, (c + 1) * span)
            place = scatter + rank * slot_bytes - lap
            _push(x, numel, peers, place, first + c * span, end, stride, share, rank, WORLD_SIZE, WIDTH, TAIL, BLOCK)
            arrive_at(pushed, peers, rank, epoch + c + 1, WORLD_SIZE)
        # 2. Reducers: sum piece c − 1 of the own slice, push the sums to every peer.
        if (c >= 1) & (c <= num_chunks) & (kind == (0 if INTERPRET else 1)):
            d = c - 1
            lap = (d - d % ring) * span * 16
            await_at(local, pushed, rank, epoch + d + 1, timeout_ns, status, WORLD_SIZE)
            if d >= ring:
                await_at(local, collected, rank, epoch + d - ring + 1, timeout_ns, status, WORLD_SIZE)
            end = tl.minimum(share, (d + 1) * span)
            _reduce(
                x, out, numel, peers, local + scatter - lap, gather + rank * slot_bytes - lap, slot_bytes,
                first + d * span, end, stride, share, rank, WORLD_SIZE, DTYPE, WIDTH, AVG, TAIL, BLOCK,
            )  # fmt: skip
            arrive_at(summed, peers, rank, epoch + d + 1, WORLD_SIZE)
        # 3. Collectors: copy piece c − 2 of the peers' slices to the output.
        if (c >= 2) & (kind == (0 if INTERPRET else 2)):
            e = c - 2
            lap = (e - e % ring) * span * 16
            await_at(local, summed, rank, epoch + e + 1, timeout_ns, status, WORLD_SIZE)
            end = tl.minimum(share, (e + 1) * span)
            _collect(
                out, numel, local + gather - lap, slot_bytes, first + e * span, end, stride, share, rank,
                WORLD_SIZE, WIDTH, TAIL, BLOCK,
            )  # fmt: skip
            arrive_at(collected, peers, rank, epoch + e + 1, WORLD_SIZE)
    write_counter(local, epoch + num_chunks, EPOCH_OFFSET)


def _on_peers(problem: Problem) -> bool:
    return problem.input_kind == "symmetric" and problem.in_place


class _Chunked(RingVariant, AllReduceVariant):
    """Kernels that take a rank's slice in chunks through the scatter and gather areas."""

    sliced = True
    trailing_arguments = ("scatter", "gather", "num_chunks")


class TwoShot(_Chunked, registered=True):
    name = "two_shot"
    summary = "reduce-scatter then all-gather ordered by flags, chunks overlapped; best at large sizes"
    kernels: tuple[Any, ...] = (two_shot_kernel, two_shot_inplace_kernel)
    space = Space({**PUSH_GRID, "items": Choice(1, 2, 4), "num_chunks": PowerOfTwo(1, 16)})

    ring = RING.value

    def refuse_config(self, problem: Problem, config: Config, limits: Limits) -> str | None:
        if packets_a_block(config) > 1024:
            return "more than 1024 packets a block at once spill registers"
        if not _on_peers(problem):
            return self.refuse_ring(problem, config, limits)
        if int(config["num_chunks"]) > 1:
            return "in place on symmetric memory there is nothing to overlap: only num_chunks=1"
        return None

    def lane_room(self, problem: Problem, config: Config, layout: LaneLayout) -> Room:
        return Room() if _on_peers(problem) else super().lane_room(problem, config, layout)

    def preferred_config(self, problem: Problem, limits: Limits) -> dict[str, float]:
        share = slice_packets(problem)
        chunks = 1 if _on_peers(problem) or share < 132 * 512 * 8 else 4 if share < 1 << 21 else 16
        return {"num_blocks": min(share / 512, 132), "num_warps": 16, "num_chunks": chunks}

    def kernel(self, problem: Problem) -> Any:
        return self.kernels[-1] if _on_peers(problem) else self.kernels[0]

    def constants(self, problem: Problem, config: Config) -> dict[str, Value]:
        return {**super().constants(problem, config), "SYMMETRIC": _on_peers(problem)}


class TwoShotSplit(_Chunked, registered=True):
    name = "two_shot_split"
    summary = "two-shot by blocks that push, blocks that sum and blocks that collect; best at large sizes"
    kernels = (two_shot_split_kernel,)
    space = Space(
        {
            "num_blocks": Choice(3, 48, 96, 132, 198, 264, 396),
            "num_warps": Choice(4, 8, 16),
            "items": Choice(1, 2),
            "num_chunks": Choice(1, 4, 8, 16, 32, 64),
        }
    )

    ring = SPLIT_RING.value
    host_preferred: Mapping[str, float] = {"num_blocks": 3, "num_warps": 4, "num_chunks": 4}

    def num_teams(self, config: Config) -> int:
        return int(config["num_blocks"]) // int(_KINDS.value)

    def refuse_config(self, problem: Problem, config: Config, limits: Limits) -> str | None:
        if packets_a_block(config) * problem.world_size > 4096:
            return f"{packets_a_block(config)} packets of {problem.world_size} ranks a block at once spill registers"
        if int(config["items"]) > 1 and int(config["num_warps"]) < 16:
            return "16 warps take as many packets a block with fewer of them a thread"
        return None

    def refuse_grid(self, problem: Problem, config: Config, limits: Limits) -> str | None:
        if reason := refuse_residence(config, limits):
            return reason
        teams, chunks = self.num_teams(config), int(config["num_chunks"])
        if limits.backend == "cuda" and problem.nbytes < 1 << 20:
            return f"{problem.nbytes} bytes are over before three kinds of blocks are in step"
        if limits.backend == "cuda" and (teams < (8 if problem.nbytes < _MANY_BLOCKS_BYTES else 32) or chunks == 1):
            return f"{teams} blocks of each kind and {chunks} chunks leave the links idle"
        return self.refuse_ring(problem, config, limits)

    def preferred_config(self, problem: Problem, limits: Limits) -> dict[str, float]:
        chunks = min(max(slice_packets(problem) * problem.world_size >> 19, 4), 64)  # of 8 MiB
        return {"num_blocks": 132, "num_warps": 16, "num_chunks": chunks}
