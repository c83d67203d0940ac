"""lamport, two_shot_lamport: all_reduce without flags; ranks push packets that announce themselves.

**lamport**, one-shot: a rank pushes its packets into its slot of every peer's stage, polls its own stage until no word
is the sentinel, writes the sentinel back at once and sums in rank order. Two stages take turns (call k uses stage k mod
2), each filled with the sentinel before use.

Why two stages are enough: a peer writes stage k again in its call k + 2. In call k + 1 it waited for this rank's
packets, which this rank sends only after its own call k has ended (stream order), clears included.

Why any mix of sizes is right: what a call polls is what it clears, so every stage is clean when a call ends.

**two_shot_lamport**, reduce-scatter and all-gather in one kernel: slice j of the message belongs to rank j. Push packet
i of slice j to rank j; sum the own slice's packets in rank order; push the sums to all; collect the other slices. A
stage holds n scatter slots and n gather slots of a slice each. Slices are padded to equal length, so every rank sends
and awaits the same packets; padding reads as zero and is never written to the output. Block b only ever waits for
packets of its peers' blocks b.

Programmatic dependent launch lets the next kernel's blocks take their places while this one still polls; a kernel
touches nothing before `gdc_wait`, which returns when the kernel before has ended and its writes are visible.

Numerics: ordered. Graph-safe: the call counter lives in the lane.
Source: the protocol of TensorRT-LLM's and FlashInfer's low-latency all-reduce (after L. Lamport's flagless
synchronisation), redesigned for Triton: packets of 16 bytes, one thread each; the two-shot as in NCCL's LL protocol.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tunedcomm.kernels.all_reduce.op import AllReduceVariant, slice_packets
from tunedcomm.kernels.common.feasibility import refuse_stage
from tunedcomm.kernels.common.lane import STATE_OFFSET, block_range, read_counter, write_counter
from tunedcomm.kernels.common.packets import (
    PACKET_BYTES,
    arm,
    insert_own,
    num_packets,
    read_elements,
    sum_packets,
    write_elements,
)
from tunedcomm.kernels.common.sync import INTERPRET, SENTINEL, poll_packets, store_packets
from tunedcomm.kernels.common.variant import HOST_GRID, LamportVariant
from tunedcomm.space import Choice, Config, PowerOfTwo, Space
from tunedcomm.spec import Limits, Problem


@triton.jit
def lamport_kernel(
    x, out, numel, local, q0, q1, q2, q3, q4, q5, q6, rank, timeout_ns, status, arena, stage_bytes,
    WORLD_SIZE: tl.constexpr, DTYPE: tl.constexpr, WIDTH: tl.constexpr, AVG: tl.constexpr, TAIL: tl.constexpr,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Push own packets to all peers, poll theirs, sum. Slot r of a stage holds rank r's packets, tightly packed."""
    if PDL and not INTERPRET:
        gdc_wait()
    peers = (q0, q1, q2, q3, q4, q5, q6)
    calls = read_counter(local, STATE_OFFSET)
    stage = arena + (calls & 1) * stage_bytes
    total = num_packets(numel, WIDTH)
    lanes, first, step = block_range(BLOCK)

    for start in tl.range(first, total, step):
        packet = start + lanes
        here = packet < total
        w0, w1, w2, w3 = read_elements(x, packet, numel, here, WIDTH, TAIL)
        w0, w1, w2, w3 = arm(w0), arm(w1), arm(w2), arm(w3)
        place = stage + (rank * total + packet) * 16
        for i in tl.static_range(WORLD_SIZE - 1):
            store_packets(peers[i] + place, w0, w1, w2, w3, here, REMOTE=True)
    if PDL and not INTERPRET:
        gdc_launch_dependents()

    for start in tl.range(first, total, step):
        packet = start + lanes
        here = packet < total
        own = read_elements(x, packet, numel, here, WIDTH, TAIL)
        place = local + stage + packet * 16
        words = poll_packets(place, total * 16, here, rank, timeout_ns, status, WORLD_SIZE)
        empty = tl.full((BLOCK,), SENTINEL, tl.int32)
        for i in tl.static_range(WORLD_SIZE):
            store_packets(place + i * total * 16, empty, empty, empty, empty, here & (rank != i))
        s0, s1, s2, s3 = sum_packets(insert_own(words, own, rank, WORLD_SIZE), DTYPE, AVG, WORLD_SIZE)
        write_elements(out, packet, numel, s0, s1, s2, s3, here, WIDTH, TAIL)
    write_counter(local, calls + 1, STATE_OFFSET)


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


class Lamport(LamportVariant, AllReduceVariant, registered=True):
    name = "lamport"
    summary = "one-shot push without flags: packets announce themselves; best at small sizes"
    kernels = (lamport_kernel,)


class TwoShotLamport(AllReduceVariant, registered=True):
    name = "two_shot_lamport"
    summary = "reduce-scatter and all-gather by self-announcing packets in one kernel; best at medium sizes"
    kernels = (two_shot_lamport_kernel,)
    areas = ("arena", "stage_bytes")
    most_rounds = 4
    host_wish = HOST_GRID
    space = Space(
        {
            "num_blocks": Choice(1, 2, 4, 8, 16, 32, 64, 96, 132, 264),
            "num_warps": PowerOfTwo(1, 16),
            "launch_pdl": Choice(False, True),
        }
    )
    sliced = True

    def refuse_config(self, problem: Problem, config: Config, limits: Limits) -> str | None:
        return refuse_stage(problem, limits, 2 * slice_packets(problem) * PACKET_BYTES)

    def wish(self, problem: Problem, limits: Limits) -> dict[str, float]:
        share = slice_packets(problem)
        warps = 4 if share <= 132 * 128 else 8
        return {"num_blocks": min(share / (32 * warps), 132), "num_warps": warps}
