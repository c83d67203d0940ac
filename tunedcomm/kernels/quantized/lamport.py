"""lamport_quantized: quantised packets that announce themselves, one-shot and without flags.

The protocol is `common.lamport`'s. A rank quantises what a peer shall get and pushes it into the stage of that peer,
polls its own stage and sums in rank order. Its own part stays in registers, quantised as the peers get it.

**Rounds.** A block takes ITEMS packets a thread at once, all loads before the first store. It pushes a round, then
takes the round before, which has travelled meanwhile. Of a message that the grid holds at once there is one round.

**The stage** has a slot for each peer, in the order of turns: slot t holds what rank + 1 + t sent. In a slot the
packets come first. Behind them lies a packet for each 8 threads and round: the scales of their ITEMS groups, for the
8 threads of a group hold packets of one group each time.

**No word is the sentinel**, 0x80000000, and sums stay as they are:

- Scales are NaN (0x7FC00000) or at least 2^-126; the words behind them are 0.
- int8: a group with a finite scale has codes −127 … 127, so no byte is 0x80. In a group of NaN codes are any bytes.
- fp8: the sentinel is three codes +0 and one −0, so its group is not one of NaN, whose codes are all NaN.

So a word that is the sentinel is replaced by 0. In a group of NaN all codes arrive as NaN, 0 · NaN too. Elsewhere the
replacement turns a −0 into a +0. Products of both with a scale are zeros, and a sum that began with +0.0 is never −0.0,
so adding either of them changes no bit. The own part is replaced like what the peers get.

Block b waits for packets of the peers' blocks b alone, so a grid need not be resident as a whole.

Numerics: quantized, the bits of `one_shot_quantized`. Graph-safe: the call counter lives in the lane.
Source: own; the protocol is as in `all_reduce`'s `lamport`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tunedcomm.kernels.common.feasibility import packets_a_block
from tunedcomm.kernels.common.lamport import begin_call, end_call, launch_next
from tunedcomm.kernels.common.packets import PACKET_BYTES, escape_sentinels
from tunedcomm.kernels.common.sync import SENTINEL, poll_wires, store_packets
from tunedcomm.kernels.common.variant import LamportVariant
from tunedcomm.kernels.common.wire import (
    GROUP_PACKETS,
    num_wire_packets,
    quantise,
    read_values,
    write_values,
)
from tunedcomm.kernels.quantized.push import QuantizedVariant, reduced_wires
from tunedcomm.space import Choice, Config, PowerOfTwo, Space, Value
from tunedcomm.spec import Limits, Problem
from tunedcomm.symm.layout import LaneLayout, Room

_MAX_PACKETS = 8  # of all ranks that a thread holds at once


@triton.jit
def quantise_items(
    x, numel, total, start, WIRE: tl.constexpr, DTYPE: tl.constexpr, WIDTH: tl.constexpr, TAIL: tl.constexpr,
    ALIGN: tl.constexpr, BLOCK: tl.constexpr, ITEMS: tl.constexpr,
):  # fmt: skip
    """ITEMS packets a thread from packet `start` on, none with the sentinel: 4 words and the bits of a scale each."""
    packet = start + tl.arange(0, BLOCK)
    values = ()
    for j in tl.static_range(ITEMS):
        at = packet + j * BLOCK
        values = values + (read_values(x, at, numel, at < total, DTYPE, WIDTH, TAIL, ALIGN),)  # type: ignore[assignment]
    wires = ()
    for j in tl.static_range(ITEMS):
        w0, w1, w2, w3, scale = quantise(values[j], WIRE)
        wires = wires + escape_sentinels(w0, w1, w2, w3) + (scale.to(tl.int32, bitcast=True),)
    return wires


@triton.jit
def push_round(
    x, numel, nbytes, total, start, stage, slot_bytes, peers, rank,
    WORLD_SIZE: tl.constexpr, OP: tl.constexpr, WIRE: tl.constexpr, DTYPE: tl.constexpr, WIDTH: tl.constexpr,
    TAIL: tl.constexpr, ALIGN: tl.constexpr, BLOCK: tl.constexpr, ITEMS: tl.constexpr,
):  # fmt: skip
    """Push the packets of a round from `start` on to every peer; return this rank's own."""
    threads = tl.arange(0, BLOCK)
    packet = start + threads
    beside = stage + total * 16 + (start // ITEMS + threads) // GROUP_PACKETS * 16
    is_first = (threads % GROUP_PACKETS == 0) & (packet < total)
    for i in tl.static_range(WORLD_SIZE):  # this rank comes last
        if OP == "reduce_scatter":
            theirs = x + (rank + 1 + i) % WORLD_SIZE * nbytes
            wires = quantise_items(theirs, numel, total, start, WIRE, DTYPE, WIDTH, TAIL, ALIGN, BLOCK, ITEMS)
        elif i == 0:
            wires = quantise_items(x, numel, total, start, WIRE, DTYPE, WIDTH, TAIL, ALIGN, BLOCK, ITEMS)
        if i < WORLD_SIZE - 1:  # for peer i this rank comes WORLD_SIZE − 2 − i turns after its next
            slot = peers[i] + (WORLD_SIZE - 2 - i) * slot_bytes
            for j in tl.static_range(ITEMS):
                w0, w1, w2, w3 = wires[5 * j], wires[5 * j + 1], wires[5 * j + 2], wires[5 * j + 3]
                at = packet + j * BLOCK
                store_packets(slot + stage + at * 16, w0, w1, w2, w3, at < total, REMOTE=True)
            scales = ()
            for j in tl.static_range(4):
                scales = scales + (wires[5 * j + 4] if j < ITEMS else threads * 0,)  # type: ignore[assignment]
            store_packets(slot + beside, scales[0], scales[1], scales[2], scales[3], is_first, REMOTE=True)  # type: ignore[misc]
    return wires


@triton.jit
def take_round(
    out, own, numel, total, start, stage, slot_bytes, rank, timeout_ns, status,
    WORLD_SIZE: tl.constexpr, WIRE: tl.constexpr, DTYPE: tl.constexpr, WIDTH: tl.constexpr, AVG: tl.constexpr,
    TAIL: tl.constexpr, ALIGN: tl.constexpr, BLOCK: tl.constexpr, ITEMS: tl.constexpr,
):  # fmt: skip
    """Wait for the peers' packets of a round from `start` on, clear their places and write the sums in rank order."""
    threads = tl.arange(0, BLOCK)
    packet = start + threads
    wanted = threads * 0
    for j in tl.static_range(ITEMS):
        wanted |= (packet + j * BLOCK < total).to(tl.int32) << j
    place = stage + packet * 16
    beside = stage + total * 16 + (start // ITEMS + threads) // GROUP_PACKETS * 16
    come = poll_wires(place, beside, slot_bytes, wanted, rank, timeout_ns, status, WORLD_SIZE - 1, ITEMS, BLOCK * 16)
    empty = tl.full((BLOCK,), SENTINEL, tl.int32)
    for t in tl.static_range(WORLD_SIZE - 1):
        for j in tl.static_range(ITEMS):
            at = place + t * slot_bytes + j * BLOCK * 16
            store_packets(at, empty, empty, empty, empty, packet + j * BLOCK < total)
        is_first = (threads % GROUP_PACKETS == 0) & (packet < total)
        store_packets(beside + t * slot_bytes, empty, empty, empty, empty, is_first)
    for j in tl.static_range(ITEMS):
        wires = ()
        for i in tl.static_range(WORLD_SIZE):
            for w in tl.static_range(5):
                word = own[5 * j + w]
                for t in tl.static_range(WORLD_SIZE - 1):
                    theirs = come[4 * (ITEMS + 1) * t + (4 * j + w if w < 4 else 4 * ITEMS + j)]
                    word = tl.where((rank + 1 + t) % WORLD_SIZE == i, theirs, word)
                wires = wires + (word if w < 4 else word.to(tl.float32, bitcast=True),)  # type: ignore[assignment]
        at = packet + j * BLOCK
        sums = reduced_wires(wires, WIRE, AVG, WORLD_SIZE)
        write_values(out, at, numel, sums, at < total, DTYPE, WIDTH, TAIL, ALIGN)


@triton.jit
def lamport_quantized_kernel(
    x, out, numel, local, peers, rank, timeout_ns, status, arena, stage_bytes,
    WORLD_SIZE: tl.constexpr, OP: tl.constexpr, WIRE: tl.constexpr, DTYPE: tl.constexpr, WIDTH: tl.constexpr,
    AVG: tl.constexpr, TAIL: tl.constexpr, ALIGN: tl.constexpr, BLOCK: tl.constexpr, ITEMS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Push round r + 1, then take round r of all peers, clear it and sum. `numel` counts a rank's part.

    Example:
        2 ranks, all_reduce of 128 bf16 elements, ITEMS = 1: 8 packets and a scale. Rank 0 stores the packets at offsets
        0 … 112 of rank 1's stage and the scale with 3 zeros at 128, rank 1 likewise in rank 0's. Each rank polls these
        9 packets, puts the sentinel back, adds rank 0's part and rank 1's and writes 16 packets.
    """
    calls, stage = begin_call(local, arena, stage_bytes, PDL)
    numel = numel.to(tl.int64)
    nbytes = numel * WIDTH
    total = num_wire_packets(numel)
    threads = tl.arange(0, BLOCK)
    first, stride = tl.program_id(0).to(tl.int64) * (BLOCK * ITEMS), tl.num_programs(0).to(tl.int64) * (BLOCK * ITEMS)
    slot_bytes = (total + (total + BLOCK * ITEMS - 1) // (BLOCK * ITEMS) * (BLOCK // GROUP_PACKETS)) * 16
    own = ()
    for _ in tl.static_range(5 * ITEMS):
        own = own + (threads * 0,)  # type: ignore[assignment]

    for start in tl.range(first - stride, total, stride):
        # 1. Push the round after this one, if there is one.
        following = own
        if start + stride < total:
            following = push_round(
                x, numel, nbytes, total, start + stride, stage, slot_bytes, peers, rank,
                WORLD_SIZE, OP, WIRE, DTYPE, WIDTH, TAIL, ALIGN, BLOCK, ITEMS,
            )  # fmt: skip
        # 2. Take this one.
        if start >= 0:
            launch_next(PDL)
            take_round(
                out, own, numel, total, start, local + stage, slot_bytes, rank, timeout_ns, status,
                WORLD_SIZE, WIRE, DTYPE, WIDTH, AVG, TAIL, ALIGN, BLOCK, ITEMS,
            )  # fmt: skip
        own = following
    end_call(local, calls)


class _Lamport(QuantizedVariant, LamportVariant):
    name = "lamport_quantized"
    summary = "quantised payloads pushed without flags: packets and scales announce themselves; best to 16 MiB"
    kernels = (lamport_quantized_kernel,)
    space = Space(
        {
            "num_blocks": Choice(1, 2, 4, 8, 16, 32, 64, 128, 132, 256, 264, 512),
            "num_warps": PowerOfTwo(1, 16),
            "items": Choice(1, 2, 4),
            "launch_pdl": Choice(False, True),
        }
    )
    max_rounds = 16
    most_registers = 255

    def staged(self, problem: Problem, config: Config) -> int:
        """Bytes of a slot."""
        packets, block = self.work_packets(problem), packets_a_block(config)
        scales = -(-packets // block) * (4 * int(config["num_warps"]))  # one for 8 threads
        return (packets + scales) * PACKET_BYTES

    def refuse_config(self, problem: Problem, config: Config, limits: Limits) -> str | None:
        items, warps, n = int(config["items"]), int(config["num_warps"]), problem.world_size
        if limits.backend == "cuda" and (items * n > _MAX_PACKETS or (warps > 8 and n > _MAX_PACKETS // 2)):
            return f"{items} packets of {n} ranks do not fit into the registers of a thread of {warps} warps"
        if (needed := self.staged(problem, config) * (n - 1)) > limits.stage_bytes:
            return f"{needed} bytes from {n - 1} peers exceed a stage of {limits.stage_bytes} bytes"
        return None

    def lane_room(self, problem: Problem, config: Config, layout: LaneLayout) -> Room:
        return Room(stage=self.staged(problem, config) * (problem.world_size - 1))

    def preferred_config(self, problem: Problem, limits: Limits) -> dict[str, float]:
        packets = self.work_packets(problem)
        items = 1 if packets <= 1 << 16 else 2 if packets <= 1 << 17 else 4
        items = max(min(items, _MAX_PACKETS // problem.world_size), 1)
        warps = 2 if packets <= 1 << 12 else 4 if packets <= 1 << 14 else 8 if packets <= 1 << 15 else 16
        return {"num_blocks": min(packets / (32 * warps * items), 128), "num_warps": warps, "items": items}

    def constants(self, problem: Problem, config: Config) -> dict[str, Value]:
        constants = super().constants(problem, config)
        return {**constants, "BLOCK": 32 * config["num_warps"], "ITEMS": config["items"]}


class AllReduceLamport(_Lamport, registered=True):
    op = "all_reduce"


class ReduceScatterLamport(_Lamport, registered=True):
    op = "reduce_scatter"
