"""two_shot_lamport: reduce-scatter and all-gather in one kernel, both halves carried by self-announcing packets.

Slice j of the message belongs to rank j. Push packet i of slice j to rank j; sum the own slice's packets in rank order;
push the sums to all; collect the other slices. A stage holds n scatter slots and n gather slots of a slice each. Stages
take turns and are cleared as in `lamport`, for the same reasons. Slices are padded to equal length, so every rank sends
and awaits the same packets; padding reads as zero and is never written to the output.

Block b only ever waits for packets of its peers' blocks b.

Numerics: ordered (every element is summed once, by its slice's owner). Graph-safe.
Source: the packets of `lamport` in the two-shot scheme known from NCCL's LL protocol and TensorRT-LLM.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tunedcomm.kernels.all_reduce.op import AllReduceVariant, slice_packets
from tunedcomm.kernels.common.feasibility import blocks_and_threads, refuse_launch_pdl, two_shot_lamport_wish
from tunedcomm.kernels.common.lane import STATE_OFFSET, block_range, read_counter, write_counter
from tunedcomm.kernels.common.packets import arm, insert_own, num_packets, read_elements, sum_packets, write_elements
from tunedcomm.kernels.common.sync import INTERPRET, SENTINEL, poll_packets, store_packets
from tunedcomm.space import Choice, Config, PowerOfTwo, Space
from tunedcomm.spec import Limits, Problem


@triton.jit
def two_shot_lamport_kernel(
    x, out, numel, local, q0, q1, q2, q3, q4, q5, q6, rank, timeout_ns, status, arena, stage_bytes,
    WORLD_SIZE: tl.constexpr, DTYPE: tl.constexpr, WIDTH: tl.constexpr, AVG: tl.constexpr, TAIL: tl.constexpr,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Three loops over a slice: push all, reduce and push sums, collect all."""
    if PDL and not INTERPRET:
        gdc_wait()
    peers = (q0, q1, q2, q3, q4, q5, q6)
    calls = read_counter(local, STATE_OFFSET)
    scatter = arena + (calls & 1) * stage_bytes
    share = (num_packets(numel, WIDTH) + WORLD_SIZE - 1) // WORLD_SIZE
    gather = scatter + WORLD_SIZE * share * 16
    lanes, first, step = block_range(BLOCK)
    empty = tl.full((BLOCK,), SENTINEL, tl.int32)

    for start in tl.range(first, share, step):
        at = start + lanes
        here = at < share
        place = scatter + (rank * share + at) * 16
        for i in tl.static_range(WORLD_SIZE - 1):
            owner = (rank + 1 + i) % WORLD_SIZE
            w0, w1, w2, w3 = read_elements(x, owner * share + at, numel, here, WIDTH, TAIL)
            store_packets(peers[i] + place, arm(w0), arm(w1), arm(w2), arm(w3), here, REMOTE=True)

    for start in tl.range(first, share, step):
        at = start + lanes
        here = at < share
        own = read_elements(x, rank * share + at, numel, here, WIDTH, TAIL)
        place = local + scatter + at * 16
        words = poll_packets(place, share * 16, here, rank, timeout_ns, status, WORLD_SIZE)
        s0, s1, s2, s3 = sum_packets(insert_own(words, own, rank, WORLD_SIZE), DTYPE, AVG, WORLD_SIZE)
        s0, s1, s2, s3 = arm(s0), arm(s1), arm(s2), arm(s3)
        for i in tl.static_range(WORLD_SIZE - 1):
            store_packets(peers[i] + gather + (rank * share + at) * 16, s0, s1, s2, s3, here, REMOTE=True)
        write_elements(out, rank * share + at, numel, s0, s1, s2, s3, here, WIDTH, TAIL)
        for i in tl.static_range(WORLD_SIZE):
            store_packets(place + i * share * 16, empty, empty, empty, empty, here & (rank != i))
    if PDL and not INTERPRET:
        gdc_launch_dependents()

    for start in tl.range(first, share, step):
        at = start + lanes
        here = at < share
        place = local + gather + at * 16
        words = poll_packets(place, share * 16, here, rank, timeout_ns, status, WORLD_SIZE)
        for i in tl.static_range(WORLD_SIZE):
            theirs = here & (rank != i)
            write_elements(
                out, i * share + at, numel, words[4 * i], words[4 * i + 1], words[4 * i + 2], words[4 * i + 3],
                theirs, WIDTH, TAIL,
            )  # fmt: skip
            store_packets(place + i * share * 16, empty, empty, empty, empty, theirs)
    write_counter(local, calls + 1, STATE_OFFSET)


class TwoShotLamport(AllReduceVariant):
    name = "two_shot_lamport"
    summary = "reduce-scatter and all-gather by self-announcing packets in one kernel; best at medium sizes"
    kernels = (two_shot_lamport_kernel,)
    areas = ("arena", "stage_bytes")
    space = Space(
        {
            "num_blocks": Choice(1, 2, 4, 8, 16, 32, 64, 96, 132, 264),
            "num_warps": PowerOfTwo(1, 16),
            "launch_pdl": Choice(False, True),
        }
    )
    sliced = True

    def infeasible(self, problem: Problem, config: Config, limits: Limits) -> str | None:
        if reason := self.refuse(problem, limits):
            return reason
        share = slice_packets(problem)
        if 2 * problem.world_size * share * 16 > limits.stage_bytes:
            return f"{problem.nbytes} bytes need more than a stage of {limits.stage_bytes} bytes"
        return refuse_launch_pdl(config, limits) or blocks_and_threads(config, limits, share, most_rounds=4)

    def wish(self, problem: Problem, limits: Limits) -> dict[str, float]:
        return two_shot_lamport_wish(slice_packets(problem), limits)


TWO_SHOT_LAMPORT = TwoShotLamport().register()
