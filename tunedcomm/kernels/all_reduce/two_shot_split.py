"""two_shot_split: the two-shot by blocks of three kinds, so that links never wait for sums; best at large sizes.

Slice j of the message belongs to rank j. One third of the blocks pushes the own part of every slice into its owner's
scatter area, one third sums the own slice in rank order and pushes the result into every peer's gather area, one third
copies what was gathered to the output. Pusher, reducer and collector k share a lane: they take the same packets of
every slice, cut into `num_chunks` pieces. Scatter and gather area hold `RING` = 4 pieces of every rank, so messages of
any size fit if they are cut often enough.

Each lane has three rows of flags, and raises those of its row on all peers to c + 1 where piece c

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
Source: the two-shot scheme of `two_shot`; blocks of several kinds as in other libraries' proxy and copy kernels.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from tunedcomm.kernels.all_reduce.op import AllReduceVariant, slice_packets
from tunedcomm.kernels.common.feasibility import refuse_chunks
from tunedcomm.kernels.common.lane import EPOCH_OFFSET, arrive_at, await_at, read_counter, write_counter
from tunedcomm.kernels.common.packets import insert_own, num_packets, read_elements, sum_packets, write_elements
from tunedcomm.kernels.common.sync import INTERPRET, load_packets, store_packets
from tunedcomm.space import Choice, Config, Space
from tunedcomm.spec import Limits, Problem

if TYPE_CHECKING:
    from tunedcomm.symm.workspace import Workspace


RING = tl.constexpr(4)
_KINDS = tl.constexpr(3)
_MANY_LANES = 16 << 20  # bytes from which fewer than 32 blocks of a kind never won
_THREADS_PER_SM = 512  # whatever registers a thread takes, up to 128


@triton.jit
def _push(
    x, numel, peers, place, first, end, step, share, rank,
    WORLD_SIZE: tl.constexpr, WIDTH: tl.constexpr, TAIL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Push a piece of every slice to its owner; all peers' packets are loaded before the first is stored."""
    lanes = tl.arange(0, BLOCK).to(tl.int64)
    for start in tl.range(first, end, step):
        at = start + lanes
        here = at < end
        words = ()
        for i in tl.static_range(WORLD_SIZE - 1):
            owner = (rank + 1 + i) % WORLD_SIZE
            words = words + read_elements(x, owner * share + at, numel, here, WIDTH, TAIL)
        for i in tl.static_range(WORLD_SIZE - 1):
            target = peers[i] + place + at * 16
            store_packets(target, words[4 * i], words[4 * i + 1], words[4 * i + 2], words[4 * i + 3], here)


@triton.jit
def _reduce(
    x, out, numel, peers, source, place, slot_bytes, first, end, step, share, rank,
    WORLD_SIZE: tl.constexpr, DTYPE: tl.constexpr, WIDTH: tl.constexpr, AVG: tl.constexpr, TAIL: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Sum a piece of the own slice, push the sums to all peers and write them to the output."""
    lanes = tl.arange(0, BLOCK).to(tl.int64)
    for start in tl.range(first, end, step):
        at = start + lanes
        here = at < end
        own = read_elements(x, rank * share + at, numel, here, WIDTH, TAIL)
        words = ()
        for i in tl.static_range(WORLD_SIZE):
            words = words + load_packets(source + i * slot_bytes + at * 16, here & (rank != i))
        s0, s1, s2, s3 = sum_packets(insert_own(words, own, rank, WORLD_SIZE), DTYPE, AVG, WORLD_SIZE)
        for i in tl.static_range(WORLD_SIZE - 1):
            store_packets(peers[i] + place + at * 16, s0, s1, s2, s3, here)
        write_elements(out, rank * share + at, numel, s0, s1, s2, s3, here, WIDTH, TAIL)


@triton.jit
def _collect(
    out, numel, source, slot_bytes, first, end, step, share, rank,
    WORLD_SIZE: tl.constexpr, WIDTH: tl.constexpr, TAIL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Copy a piece of all peers' slices to the output."""
    lanes = tl.arange(0, BLOCK).to(tl.int64)
    for start in tl.range(first, end, step):
        at = start + lanes
        here = at < end
        words = ()
        for i in tl.static_range(WORLD_SIZE - 1):
            owner = (rank + 1 + i) % WORLD_SIZE
            words = words + load_packets(source + owner * slot_bytes + at * 16, here)
        for i in tl.static_range(WORLD_SIZE - 1):
            owner = (rank + 1 + i) % WORLD_SIZE
            write_elements(
                out, owner * share + at, numel, words[4 * i], words[4 * i + 1], words[4 * i + 2], words[4 * i + 3],
                here, WIDTH, TAIL,
            )  # fmt: skip


@triton.jit
def two_shot_split_kernel(
    x, out, numel, local, q0, q1, q2, q3, q4, q5, q6, rank, timeout_ns, status, scatter, gather, num_chunks,
    WORLD_SIZE: tl.constexpr, DTYPE: tl.constexpr, WIDTH: tl.constexpr, AVG: tl.constexpr, TAIL: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Round c: pushers do piece c, reducers piece c − 1, collectors piece c − 2, each as soon as its flags allow it.

    Interpreted blocks run one after another, so the first third does all three kinds of work in turn there.
    """
    peers = (q0, q1, q2, q3, q4, q5, q6)
    epoch = read_counter(local, EPOCH_OFFSET)
    share = (num_packets(numel, WIDTH) + WORLD_SIZE - 1) // WORLD_SIZE
    num_lanes = tl.num_programs(0) // _KINDS
    lane = tl.program_id(0) % num_lanes
    kind = tl.program_id(0) // num_lanes
    step = num_lanes.to(tl.int64) * BLOCK
    first = lane.to(tl.int64) * BLOCK
    span = ((share + step - 1) // step + num_chunks - 1) // num_chunks * step
    ring = tl.minimum(num_chunks, RING)
    slot_bytes = ring * span * 16
    pushed, summed, collected = lane, lane + num_lanes, lane + 2 * num_lanes

    for c in tl.range(0, num_chunks + 2):
        if (c < num_chunks) & (kind == 0):
            lap = (c - c % ring) * span * 16
            if c >= ring:
                await_at(local, summed, rank, epoch + c - ring + 1, timeout_ns, status, WORLD_SIZE)
            end = tl.minimum(share, (c + 1) * span)
            place = scatter + rank * slot_bytes - lap
            _push(x, numel, peers, place, first + c * span, end, step, share, rank, WORLD_SIZE, WIDTH, TAIL, BLOCK)
            arrive_at(pushed, q0, q1, q2, q3, q4, q5, q6, rank, epoch + c + 1, WORLD_SIZE)
        if (c >= 1) & (c <= num_chunks) & (kind == (0 if INTERPRET else 1)):
            d = c - 1
            lap = (d - d % ring) * span * 16
            await_at(local, pushed, rank, epoch + d + 1, timeout_ns, status, WORLD_SIZE)
            if d >= ring:
                await_at(local, collected, rank, epoch + d - ring + 1, timeout_ns, status, WORLD_SIZE)
            end = tl.minimum(share, (d + 1) * span)
            _reduce(
                x, out, numel, peers, local + scatter - lap, gather + rank * slot_bytes - lap, slot_bytes,
                first + d * span, end, step, share, rank, WORLD_SIZE, DTYPE, WIDTH, AVG, TAIL, BLOCK,
            )  # fmt: skip
            arrive_at(summed, q0, q1, q2, q3, q4, q5, q6, rank, epoch + d + 1, WORLD_SIZE)
        if (c >= 2) & (kind == (0 if INTERPRET else 2)):
            e = c - 2
            lap = (e - e % ring) * span * 16
            await_at(local, summed, rank, epoch + e + 1, timeout_ns, status, WORLD_SIZE)
            end = tl.minimum(share, (e + 1) * span)
            _collect(
                out, numel, local + gather - lap, slot_bytes, first + e * span, end, step, share, rank,
                WORLD_SIZE, WIDTH, TAIL, BLOCK,
            )  # fmt: skip
            arrive_at(collected, q0, q1, q2, q3, q4, q5, q6, rank, epoch + e + 1, WORLD_SIZE)
    write_counter(local, epoch + num_chunks, EPOCH_OFFSET)


class TwoShotSplit(AllReduceVariant):
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
    sliced = True
    areas = ("scatter", "gather")

    def num_rounds(self, problem: Problem, config: Config) -> int:
        """How often a lane goes round."""
        return super().num_rounds(problem, {**config, "num_blocks": int(config["num_blocks"]) // _KINDS.value})

    def infeasible(self, problem: Problem, config: Config, limits: Limits) -> str | None:
        if reason := self.refuse(problem, limits):
            return reason
        chunks, blocks = int(config["num_chunks"]), int(config["num_blocks"])
        lanes, threads = blocks // _KINDS.value, 32 * int(config["num_warps"])
        per_block = threads * int(config["items"])
        if per_block * problem.world_size > 4096:
            return f"{per_block} packets of {problem.world_size} ranks a block at once spill registers"
        if int(config["items"]) > 1 and threads < 512:
            return "16 warps take as many packets a block with fewer of them a thread"
        if limits.backend == "host" and lanes > 1:
            return "interpreted blocks run one after another: more than 3 only cost time"
        if blocks > limits.max_blocks:
            return f"{blocks} blocks, but the signal area has {limits.max_blocks} rows"
        if limits.backend == "cuda" and blocks * threads > limits.num_sms * _THREADS_PER_SM:
            return f"{blocks} blocks of {threads} threads do not all fit on {limits.num_sms} SMs at once"
        if limits.backend == "cuda" and problem.nbytes < 1 << 20:
            return f"{problem.nbytes} bytes are over before three kinds of blocks are in step"
        if limits.backend == "cuda" and (lanes < (8 if problem.nbytes < _MANY_LANES else 32) or chunks == 1):
            return f"{lanes} blocks of each kind and {chunks} chunks leave the links idle"
        return refuse_chunks(
            problem, limits, rounds=self.num_rounds(problem, config), chunks=chunks, blocks=lanes,
            per_block=per_block, slots=problem.world_size, ring=RING.value,
        )  # fmt: skip

    def wish(self, problem: Problem, limits: Limits) -> dict[str, float]:
        if limits.backend == "host":
            return {"num_blocks": 3, "num_warps": 4, "items": 1, "num_chunks": 4}
        chunks = min(max(slice_packets(problem) * problem.world_size >> 19, 4), 64)  # of 8 MiB
        return {"num_blocks": 132, "num_warps": 16, "items": 1, "num_chunks": chunks}

    def arguments(self, problem: Problem, config: Config, workspace: Workspace) -> tuple[int, ...]:
        return *super().arguments(problem, config, workspace), int(config["num_chunks"])


TWO_SHOT_SPLIT = TwoShotSplit().register()
