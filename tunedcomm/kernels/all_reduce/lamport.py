"""lamport, two_shot_lamport: all_reduce without flags; ranks push packets that announce themselves.

**lamport**, one-shot: a rank pushes its packets into its slot of every peer's stage, polls its own stage until no word
is the sentinel, writes the sentinel back at once and sums in rank order. Two stages take turns (call k uses stage k mod
2), each filled with the sentinel before use.

Why two stages are enough: a peer writes stage k again in its call k + 2. In call k + 1 it waited for this rank's
packets, which this rank sends only after its own call k has ended (stream order), clears included.

Why any mix of sizes is right: a call clears all that it polls, so every stage is clean when a call ends.

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

from tunedcomm.kernels.all_reduce.op import AllReduceVariant, slice_packets
from tunedcomm.kernels.common.lamport import begin_call, end_call, launch_next, push_to_all, take_sum
from tunedcomm.kernels.common.lane import block_range
from tunedcomm.kernels.common.packets import (
    PACKET_BYTES,
    escape_sentinels,
    insert_own,
    num_packets,
    read_elements,
    sum_packets,
    write_elements,
)
from tunedcomm.kernels.common.sync import SENTINEL, poll_packets, store_packets
from tunedcomm.kernels.common.variant import LamportVariant
from tunedcomm.space import Choice, PowerOfTwo, Space
from tunedcomm.spec import Limits, Problem


@triton.jit
def lamport_kernel(
    x, out, numel, local, peers, rank, timeout_ns, status, arena, stage_bytes,
    WORLD_SIZE: tl.constexpr, DTYPE: tl.constexpr, WIDTH: tl.constexpr, AVG: tl.constexpr, TAIL: tl.constexpr,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Push own packets to all peers, poll the peers' packets, sum.

    Slot r of a stage holds rank r's packets, tightly packed. `common.lamport` has an example.
    """
    calls, stage = begin_call(local, arena, stage_bytes, PDL)
    total = num_packets(numel, WIDTH)
    # 1. Push the own packets into slot `rank` of every peer's stage.
    push_to_all(x, total, stage, peers, rank, WORLD_SIZE, BLOCK, numel, WIDTH, TAIL)
    launch_next(PDL)

    offsets, first, stride = block_range(BLOCK)
    empty = tl.full((BLOCK,), SENTINEL, tl.int32)
    # 2. Poll the peers' packets in the own stage, clear their places, sum in rank order.
    for start in tl.range(first, total, stride):
        packet = start + offsets
        mask = packet < total
        own = read_elements(x, packet, numel, mask, WIDTH, TAIL)
        slot = local + stage + packet * 16
        s0, s1, s2, s3 = take_sum(own, slot, total * 16, empty, mask, rank, timeout_ns, status, DTYPE, AVG, WORLD_SIZE)
        write_elements(out, packet, numel, s0, s1, s2, s3, mask, WIDTH, TAIL)
    end_call(local, calls)


@triton.jit
def two_shot_lamport_kernel(
    x, out, numel, local, peers, rank, timeout_ns, status, arena, stage_bytes,
    WORLD_SIZE: tl.constexpr, DTYPE: tl.constexpr, WIDTH: tl.constexpr, AVG: tl.constexpr, TAIL: tl.constexpr,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Three loops over a slice: push all, reduce and push sums, collect all.

    Example:
        2 ranks, 8 fp32 elements: 2 packets, so slice j is packet j. Rank 0 pushes packet 1 to offset `scatter` of rank
        1's lane, rank 1 pushes packet 0 to `scatter` + 16 of rank 0's lane. Rank 0 sums packet 0, writes the sum to its
        output and pushes it to `gather` of rank 1's lane; rank 1 pushes the sum of packet 1 to `gather` + 16 of rank
        0's lane. Each rank writes the sum that it gets to its output.
    """
    calls, scatter = begin_call(local, arena, stage_bytes, PDL)
    share = (num_packets(numel, WIDTH) + WORLD_SIZE - 1) // WORLD_SIZE
    gather = scatter + WORLD_SIZE * share * 16
    offsets, first, stride = block_range(BLOCK)
    empty = tl.full((BLOCK,), SENTINEL, tl.int32)

    # 1. Push slice j to rank j.
    for start in tl.range(first, share, stride):
        at = start + offsets
        mask = at < share
        place = scatter + (rank * share + at) * 16
        for i in tl.static_range(WORLD_SIZE - 1):
            owner = (rank + 1 + i) % WORLD_SIZE
            w0, w1, w2, w3 = read_elements(x, owner * share + at, numel, mask, WIDTH, TAIL)
            address = peers[i] + place
            w0, w1, w2, w3 = escape_sentinels(w0, w1, w2, w3)
            store_packets(address, w0, w1, w2, w3, mask, REMOTE=True)

    # 2. Sum the own slice in rank order, push the sums to every peer, clear the polled places.
    for start in tl.range(first, share, stride):
        at = start + offsets
        mask = at < share
        own = read_elements(x, rank * share + at, numel, mask, WIDTH, TAIL)
        place = local + scatter + at * 16
        words = poll_packets(place, share * 16, mask, rank, timeout_ns, status, WORLD_SIZE)
        s0, s1, s2, s3 = sum_packets(insert_own(words, own, rank, WORLD_SIZE), DTYPE, AVG, WORLD_SIZE)
        s0, s1, s2, s3 = escape_sentinels(s0, s1, s2, s3)
        for i in tl.static_range(WORLD_SIZE - 1):
            store_packets(peers[i] + gather + (rank * share + at) * 16, s0, s1, s2, s3, mask, REMOTE=True)
        write_elements(out, rank * share + at, numel, s0, s1, s2, s3, mask, WIDTH, TAIL)
        for i in tl.static_range(WORLD_SIZE):
            store_packets(place + i * share * 16, empty, empty, empty, empty, mask & (rank != i))
    launch_next(PDL)

    # 3. Collect the peers' sums and clear their places.
    for start in tl.range(first, share, stride):
        at = start + offsets
        mask = at < share
        place = local + gather + at * 16
        words = poll_packets(place, share * 16, mask, rank, timeout_ns, status, WORLD_SIZE)
        for i in tl.static_range(WORLD_SIZE):
            peer_mask = mask & (rank != i)
            write_elements(
                out, i * share + at, numel, words[4 * i], words[4 * i + 1], words[4 * i + 2], words[4 * i + 3],
                peer_mask, WIDTH, TAIL,
            )  # fmt: skip
            store_packets(place + i * share * 16, empty, empty, empty, empty, peer_mask)
    end_call(local, calls)


class Lamport(LamportVariant, AllReduceVariant, registered=True):
    name = "lamport"
    summary = "one-shot push without flags: packets announce themselves; best at small sizes"
    kernels = (lamport_kernel,)


class TwoShotLamport(LamportVariant, AllReduceVariant, registered=True):
    name = "two_shot_lamport"
    summary = "reduce-scatter and all-gather by self-announcing packets in one kernel; best at medium sizes"
    kernels = (two_shot_lamport_kernel,)
    space = Space(
        {
            "num_blocks": Choice(1, 2, 4, 8, 16, 32, 64, 96, 132, 264),
            "num_warps": PowerOfTwo(1, 16),
            "launch_pdl": Choice(False, True),
        }
    )
    sliced = True
    packet_bytes = 2 * PACKET_BYTES  # in a scatter slot and in a gather slot

    def preferred_config(self, problem: Problem, limits: Limits) -> dict[str, float]:
        share = slice_packets(problem)
        warps = 4 if share <= 132 * 128 else 8
        return {"num_blocks": min(share / (32 * warps), 132), "num_warps": warps}
