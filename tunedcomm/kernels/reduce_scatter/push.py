"""push, push_fp32: every rank pushes its chunks to their owners' scatter areas piece by piece; best at large sizes.

Chunks are cut into `num_chunks` pieces. The scatter area holds `RING` pieces of every rank, so messages of any size fit
if they are cut often enough, and the links stay busy while pieces that have arrived are summed.

`split` False: every block does both. In round c it pushes piece c, raises its flags to c + 1 and sums piece c − 1,
which the peers' flags of round c − 1 announce. A flag of round c says two things, since it comes after both: piece c is
there, and piece c − 2 was read. So before piece c is pushed into the place of piece c − 4, the peers' flags of round
c − 2, which say that they have read it, have been waited for, in round c − 1.

`split` True: one half of the blocks pushes and the other half sums, pusher k for reducer k, so that links never idle
while sums are made. The peers' pushers raise the flags in a reducer's row to c + 1 once piece c is there; the peers'
reducers raise those in a pusher's row to c + 1 once they have read piece c. A pusher waits for the flag c − 3 before it
pushes piece c into the place of piece c − 4.

Why no area is overwritten from call to call: peers may write the scatter area from the start of their next call. A call
ends only after all blocks, or all reducers, have waited for flags that the peers raised after their last read: of round
`num_chunks`, or in the pusher's row. Both ways all flags are at most the epoch at the end, which grows by `num_chunks`
+ 1 on every rank.

`push_fp32` gives fp32 sums of 16-bit floats; the sums alone differ.

Numerics: ordered; rank order whatever the order of arrival. Graph-safe.
Source: the first half of a two-shot all_reduce; blocks of two kinds as in other libraries' proxy and copy kernels.
"""

from __future__ import annotations

from collections.abc import Mapping

import triton
import triton.language as tl

from tunedcomm.kernels.common.feasibility import blocks_and_threads, packets_a_block
from tunedcomm.kernels.common.lane import EPOCH_OFFSET, arrive_at, await_at, read_counter, write_counter
from tunedcomm.kernels.common.packets import (
    insert_own,
    load_bytes,
    num_packets,
    packets_of,
    sum_packets,
    write_elements,
)
from tunedcomm.kernels.common.sync import INTERPRET, load_packets, store_packets
from tunedcomm.kernels.common.variant import HOST_GRID, PUSH_GRID, RingVariant
from tunedcomm.kernels.common.wide import write_wide_sum
from tunedcomm.kernels.reduce_scatter.op import ReduceScatterVariant
from tunedcomm.space import Choice, Config, PowerOfTwo, Space, Value
from tunedcomm.spec import Limits, Problem

RING = tl.constexpr(4)


@triton.jit
def push_piece(
    x, peers, place, first, end, stride, nbytes, rank,
    WORLD_SIZE: tl.constexpr, ALIGN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Push packets from `first` on, every `stride` up to `end`, of every chunk to its owner.

    Packet p of a chunk goes to `place` + 16 p in the owner's lane. All peers' packets are loaded before the first is
    stored, so that as many loads as there are peers are on their way.
    """
    offsets = tl.arange(0, BLOCK).to(tl.int64)
    for start in tl.range(first, end, stride):
        packet = start + offsets
        mask = packet < end
        words = ()
        for i in tl.static_range(WORLD_SIZE - 1):
            owner = (rank + 1 + i) % WORLD_SIZE
            words = words + load_bytes(x + owner * nbytes + packet * 16, nbytes - packet * 16, mask, ALIGN)
        for i in tl.static_range(WORLD_SIZE - 1):
            at = peers[i] + place + packet * 16
            store_packets(at, words[4 * i], words[4 * i + 1], words[4 * i + 2], words[4 * i + 3], mask)


@triton.jit
def sum_piece(
    x, out, numel, place, slot_bytes, first, end, stride, nbytes, rank,
    WORLD_SIZE: tl.constexpr, DTYPE: tl.constexpr, WIDTH: tl.constexpr, AVG: tl.constexpr, ALIGN: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Sum packets of the own chunk from `first` on, every `stride` up to `end`.

    Rank i's packet p lies at address `place` + i × `slot_bytes` + 16 p.
    """
    offsets = tl.arange(0, BLOCK).to(tl.int64)
    for start in tl.range(first, end, stride):
        packet = start + offsets
        mask = packet < end
        own = load_bytes(x + rank * nbytes + packet * 16, nbytes - packet * 16, mask, ALIGN)
        words = ()
        for i in tl.static_range(WORLD_SIZE):
            words = words + load_packets(place + i * slot_bytes + packet * 16, mask & (rank != i))
        s0, s1, s2, s3 = sum_packets(insert_own(words, own, rank, WORLD_SIZE), DTYPE, AVG, WORLD_SIZE)
        write_elements(out, packet, numel, s0, s1, s2, s3, mask, WIDTH, ALIGN < 16)


@triton.jit
def push_kernel(
    x, out, numel, local, peers, rank, timeout_ns, status, scatter, num_chunks,
    WORLD_SIZE: tl.constexpr, DTYPE: tl.constexpr, WIDTH: tl.constexpr, AVG: tl.constexpr, ALIGN: tl.constexpr,
    BLOCK: tl.constexpr, SPLIT: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """In round c: push piece c, sum piece c − 1. Packets go round the teams: block k, or pusher k and reducer k.

    Interpreted blocks run one after another, so pushers do the reducers' work in turn there.

    Example:
        2 ranks, 8 fp32 elements each: chunk j is packet j, 1 piece. Round 0: rank 0 stores packet 1 into slot 0 of rank
        1's scatter area, rank 1 stores packet 0 into slot 1 of rank 0's. Round 1: rank 0 adds its own packet 0 and slot
        1 and writes the sum to its output; rank 1 adds slot 0 and its own packet 1.
    """
    epoch = read_counter(local, EPOCH_OFFSET)
    total = num_packets(numel, WIDTH)
    nbytes = numel.to(tl.int64) * WIDTH
    num_teams = tl.num_programs(0)
    if SPLIT:
        num_teams = num_teams // 2
    team = tl.program_id(0) % num_teams
    stride = num_teams.to(tl.int64) * BLOCK
    first = team.to(tl.int64) * BLOCK
    span = ((total + stride - 1) // stride + num_chunks - 1) // num_chunks * stride
    ring = tl.minimum(num_chunks, RING)
    slot_bytes = ring * span * 16
    offsets = tl.arange(0, BLOCK).to(tl.int64)
    pushes = tl.program_id(0) < num_teams  # all blocks do, where they are not split
    sums = (tl.program_id(0) >= num_teams) if SPLIT and not INTERPRET else pushes
    # Row of flags that a pusher raises: the peers' reducers wait for it.
    reducer = team + num_teams if SPLIT else team

    for c in tl.range(0, num_chunks + 1):
        # 1. Push piece c of chunk j to rank j.
        if (c < num_chunks) & pushes:
            if SPLIT and c >= ring:
                await_at(local, team, rank, epoch + c - ring + 1, timeout_ns, status, WORLD_SIZE)
            place = scatter + rank * slot_bytes - (c - c % ring) * span * 16
            end = tl.minimum(total, (c + 1) * span)
            push_piece(x, peers, place, first + c * span, end, stride, nbytes, rank, WORLD_SIZE, ALIGN, BLOCK)
            arrive_at(reducer, peers, rank, epoch + c + 1, WORLD_SIZE)
        # 2. Sum piece c − 1 of the own chunk in rank order.
        if (c >= 1) & sums:
            d = c - 1
            await_at(local, reducer, rank, epoch + d + 1, timeout_ns, status, WORLD_SIZE)
            place = local + scatter - (d - d % ring) * span * 16
            end = tl.minimum(total, (d + 1) * span)
            if WIDE:  # beside `sum_piece`, for both are compiled as they were measured
                for start in tl.range(first + d * span, end, stride):
                    packet = start + offsets
                    mask = packet < end
                    own = load_bytes(x + rank * nbytes + packet * 16, nbytes - packet * 16, mask, ALIGN)
                    words = ()
                    for i in tl.static_range(WORLD_SIZE):
                        words = words + load_packets(place + i * slot_bytes + packet * 16, mask & (rank != i))
                    words = insert_own(words, own, rank, WORLD_SIZE)
                    write_wide_sum(words, out, packet, numel, mask, WORLD_SIZE, DTYPE, AVG, ALIGN < 16)
            else:
                sum_piece(
                    x, out, numel, place, slot_bytes, first + d * span, end, stride, nbytes, rank,
                    WORLD_SIZE, DTYPE, WIDTH, AVG, ALIGN, BLOCK,
                )  # fmt: skip
            if SPLIT:
                arrive_at(team, peers, rank, epoch + d + 1, WORLD_SIZE)
    # 3. Wait until every peer has read all of its scatter area that this team fills.
    if SPLIT:
        if sums:
            await_at(local, team, rank, epoch + num_chunks, timeout_ns, status, WORLD_SIZE)
    else:
        arrive_at(team, peers, rank, epoch + num_chunks + 1, WORLD_SIZE)
        await_at(local, team, rank, epoch + num_chunks + 1, timeout_ns, status, WORLD_SIZE)
    write_counter(local, epoch + num_chunks + 1, EPOCH_OFFSET)


class Push(RingVariant, ReduceScatterVariant, registered=True):
    name = "push"
    summary = "chunks pushed to their owners piece by piece, sums made meanwhile; best at large sizes"
    kernels = (push_kernel,)
    space = Space(
        {
            **PUSH_GRID,
            "num_warps": Choice(8, 16),
            "items": Choice(1, 2),
            "num_chunks": PowerOfTwo(1, 128),
            "split": Choice(False, True),
        }
    )
    trailing_arguments = ("scatter", "num_chunks")
    ring = RING.value
    host_preferred: Mapping[str, float] = {**HOST_GRID, "num_chunks": 2, "split": False}

    def num_teams(self, config: Config) -> int:
        """Blocks that push; with `split` as many other blocks sum."""
        return int(config["num_blocks"]) // (2 if config["split"] else 1)

    def refuse_config(self, problem: Problem, config: Config, limits: Limits) -> str | None:
        per_block, teams = packets_a_block(config), self.num_teams(config)
        if per_block * problem.world_size > 4096:
            return f"{per_block} packets of {problem.world_size} ranks a block at once spill registers"
        if int(config["items"]) > 1 and int(config["num_warps"]) < 16:
            return "16 warps take as many packets a block with fewer of them a thread"
        if config["split"] and int(config["num_chunks"]) == 1 and limits.backend == "cuda":
            return "reducers would wait for all pushers: num_chunks=1 has nothing to split"
        if teams < 1:
            return "one block cannot be split into pushers and reducers"
        if reason := self.refuse_ring(problem, config, limits):
            return reason
        if teams > 1 and (teams - 1) * per_block >= self.work_packets(problem):
            return f"{self.work_packets(problem)} packets leave some of {teams} teams without work"
        return None

    def refuse_grid(self, problem: Problem, config: Config, limits: Limits) -> str | None:
        packets = self.work_packets(problem) * (2 if config["split"] else 1)
        return blocks_and_threads(config, limits, packets, max_rounds=64 * int(config["num_chunks"]))

    def preferred_config(self, problem: Problem, limits: Limits) -> dict[str, float]:
        packets = packets_of(problem.nbytes)
        large = packets >= 1 << 18
        blocks, chunks = 132 if large else min(packets / 512, 132), min(max(packets / (1 << 17), 1), 32)
        return {"num_blocks": blocks, "num_warps": 16, "num_chunks": chunks, "split": large}

    def constants(self, problem: Problem, config: Config) -> dict[str, Value]:
        return {**super().constants(problem, config), "SPLIT": bool(config["split"]), "WIDE": self.wide}


class PushWide(Push, registered=True):
    name = "push_fp32"
    summary = "fp32 sums of 16-bit floats: chunks pushed piece by piece, sums made meanwhile; best at large sizes"
    wide = True
