"""one_shot_quantized, two_shot_quantized: quantised payloads through the peers' memory, ordered by flags.

**one_shot_quantized** of all three ops: a rank quantises what a peer shall get, pushes packets and scales into its slot
of that peer's scatter area, and its own part into the own area. Every rank then takes all slots in rank order: sums
them, or writes them one after another (all_gather). On two ranks all_reduce moves the bytes of a two-shot that way and
quantises once. Piece c is pushed in round c and taken in round c + 1; slots hold `RING` pieces.

Why no slot is overwritten too early, within a call: in round c a block pushes piece c into the place of piece c − 4. In
round c − 1 it waited for the flags that its counterparts raised after they pushed piece c − 2; before that, in their
round c − 3, they had taken piece c − 4. From call to call: a call ends when every peer has raised its last flag, after
its last read of its scatter area.

**two_shot_quantized** of all_reduce: `all_reduce`'s `two_shot` for plain input, its flags and its proof included, with
quantised slices of whole groups. The owner sums its slice, quantises the sum, pushes it and keeps what the peers get.
Its own part goes through the own scatter area, which nobody else touches.

An input may be the output: a piece is written after it was read.

Numerics: quantized. Graph-safe.
Source: own; the rings are those of all_to_all's `push` and all_reduce's `two_shot`.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from tunedcomm.kernels.all_reduce.two_shot import RING as TWO_SHOT_RING
from tunedcomm.kernels.all_to_all.push import RING
from tunedcomm.kernels.common.feasibility import packets_a_block, refuse_kernels, refuse_result
from tunedcomm.kernels.common.lane import (
    EPOCH_OFFSET,
    address_of,
    arrive,
    await_peers,
    block_range,
    read_counter,
    write_counter,
)
from tunedcomm.kernels.common.packets import PACKET_BYTES, alignment_of, mean
from tunedcomm.kernels.common.reference import SUM_DTYPES
from tunedcomm.kernels.common.variant import PUSH_GRID, KernelVariant, RingVariant
from tunedcomm.kernels.common.wire import (
    load_wire,
    num_wire_packets,
    quantise,
    read_values,
    store_wire,
    sum_wires,
    wire_packets,
    write_values,
)
from tunedcomm.space import Config, PowerOfTwo, Space, Value
from tunedcomm.spec import ITEMSIZE, Limits, Problem


@triton.jit
def reduced_wires(wires, WIRE: tl.constexpr, AVG: tl.constexpr, WORLD_SIZE: tl.constexpr):
    """The fp32 sums or means of all ranks' wires, 16 a packet."""
    sums = sum_wires(wires, 0, WORLD_SIZE, WIRE)
    if AVG:
        means = ()
        for k in tl.static_range(16):
            means = means + (mean(sums[k], WORLD_SIZE),)  # type: ignore[assignment]
        return means
    else:
        return sums


@triton.jit
def one_shot_quantized_kernel(
    x, out, numel, local, peers, rank, timeout_ns, status, scatter, num_chunks,
    WORLD_SIZE: tl.constexpr, OP: tl.constexpr, WIRE: tl.constexpr, DTYPE: tl.constexpr, WIDTH: tl.constexpr,
    AVG: tl.constexpr, TAIL: tl.constexpr, ALIGN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """In round c: quantise and push piece c, take piece c − 1 of all ranks. `numel` counts a rank's part.

    Example:
        2 ranks, all_reduce of 128 bf16 elements: 8 packets and a scale. Rank 0 stores both into slot 0 of its own and
        rank 1's scatter area, rank 1 into slot 1 of both. Each rank adds slot 0 and slot 1 and writes 16 packets.
    """
    epoch = read_counter(local, EPOCH_OFFSET)
    numel = numel.to(tl.int64)
    nbytes = numel * WIDTH
    total = num_wire_packets(numel)
    offsets, first, stride = block_range(BLOCK)
    span = ((total + stride - 1) // stride + num_chunks - 1) // num_chunks * stride
    ring = tl.minimum(num_chunks, RING)
    slot = ring * span
    scales = scatter + WORLD_SIZE * slot * 16

    for c in tl.range(0, num_chunks + 1):
        # 1. Push piece c to every rank, this one included.
        if c < num_chunks:
            place = rank * slot - (c - c % ring) * span
            for start in tl.range(first + c * span, tl.minimum(total, (c + 1) * span), stride):
                packet = start + offsets
                mask = packet < total
                own = x
                if OP == "reduce_scatter":
                    own = x + rank * nbytes
                wire = quantise(read_values(own, packet, numel, mask, DTYPE, WIDTH, TAIL, ALIGN), WIRE)
                store_wire(local + scatter, local + scales, place + packet, wire, mask)
                for i in tl.static_range(WORLD_SIZE - 1):
                    if OP == "reduce_scatter":
                        theirs = x + (rank + 1 + i) % WORLD_SIZE * nbytes
                        wire = quantise(read_values(theirs, packet, numel, mask, DTYPE, WIDTH, TAIL, ALIGN), WIRE)
                    store_wire(peers[i] + scatter, peers[i] + scales, place + packet, wire, mask)
            arrive(peers, rank, epoch + 1 + c, WORLD_SIZE)
        # 2. Take piece c − 1 of every rank.
        if c >= 1:
            d = c - 1
            lap = (d - d % ring) * span
            await_peers(local, rank, epoch + 1 + d, timeout_ns, status, WORLD_SIZE)
            for start in tl.range(first + d * span, tl.minimum(total, (d + 1) * span), stride):
                packet = start + offsets
                mask = packet < total
                wires = ()
                for i in tl.static_range(WORLD_SIZE):
                    wires = wires + load_wire(local + scatter, local + scales, i * slot + packet - lap, mask)
                if OP == "all_gather":
                    for i in tl.static_range(WORLD_SIZE):
                        values = sum_wires(wires, i, 1, WIRE)
                        write_values(out + i * nbytes, packet, numel, values, mask, DTYPE, WIDTH, TAIL, ALIGN)
                else:
                    values = reduced_wires(wires, WIRE, AVG, WORLD_SIZE)
                    write_values(out, packet, numel, values, mask, DTYPE, WIDTH, TAIL, ALIGN)
    # 3. Wait until every peer has read all of its scatter area that this block fills.
    arrive(peers, rank, epoch + 1 + num_chunks, WORLD_SIZE)
    await_peers(local, rank, epoch + 1 + num_chunks, timeout_ns, status, WORLD_SIZE)
    write_counter(local, epoch + 1 + num_chunks, EPOCH_OFFSET)


@triton.jit
def two_shot_quantized_kernel(
    x, out, numel, local, peers, rank, timeout_ns, status, scatter, gather, num_chunks,
    WORLD_SIZE: tl.constexpr, WIRE: tl.constexpr, DTYPE: tl.constexpr, WIDTH: tl.constexpr, AVG: tl.constexpr,
    TAIL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """In round c: push chunk c, reduce chunk c − 1, collect chunk c − 2; flags as in `two_shot_kernel`.

    TAIL: loops over ranks stay loops. Unrolled, the accesses to single elements take two minutes to compile at 8 ranks.
    """
    epoch = read_counter(local, EPOCH_OFFSET)
    numel = numel.to(tl.int64)
    share = num_wire_packets((numel + WORLD_SIZE - 1) // WORLD_SIZE)
    offsets, first, stride = block_range(BLOCK)
    span = ((share + stride - 1) // stride + num_chunks - 1) // num_chunks * stride
    ring = tl.minimum(num_chunks, TWO_SHOT_RING)
    slot = ring * span
    all_slots = WORLD_SIZE * slot * 16

    for c in tl.range(0, num_chunks + 2):
        # 1. Push chunk c of slice j to rank j.
        if c < num_chunks:
            lap = (c - c % ring) * span
            for start in tl.range(first + c * span, tl.minimum(share, (c + 1) * span), stride):
                at = start + offsets
                mask = at < share
                if TAIL:
                    for r in tl.range(0, WORLD_SIZE):
                        area = address_of(peers, local, r, rank, WORLD_SIZE) + scatter
                        wire = quantise(read_values(x, r * share + at, numel, mask, DTYPE, WIDTH, TAIL, 16), WIRE)
                        store_wire(area, area + all_slots, rank * slot + at - lap, wire, mask)
                else:
                    for i in tl.static_range(WORLD_SIZE):
                        area = local + scatter
                        if i < WORLD_SIZE - 1:
                            area = peers[i] + scatter
                        packet = (rank + 1 + i) % WORLD_SIZE * share + at
                        wire = quantise(read_values(x, packet, numel, mask, DTYPE, WIDTH, TAIL, 16), WIRE)
                        store_wire(area, area + all_slots, rank * slot + at - lap, wire, mask)
            arrive(peers, rank, epoch + tl.maximum(1, 2 * c), WORLD_SIZE)
        # 2. Sum chunk c − 1 of the own slice in rank order, push the quantised sums to every peer.
        if (c >= 1) & (c <= num_chunks):
            d = c - 1
            lap = (d - d % ring) * span
            await_peers(local, rank, epoch + tl.maximum(1, 2 * d), timeout_ns, status, WORLD_SIZE)
            for start in tl.range(first + d * span, tl.minimum(share, (d + 1) * span), stride):
                at = start + offsets
                mask = at < share
                area = local + scatter
                wires = ()
                for i in tl.static_range(WORLD_SIZE):
                    wires = wires + load_wire(area, area + all_slots, i * slot + at - lap, mask)
                wire = quantise(reduced_wires(wires, WIRE, AVG, WORLD_SIZE), WIRE)
                for i in tl.static_range(WORLD_SIZE - 1):
                    area = peers[i] + gather
                    store_wire(area, area + all_slots, rank * slot + at - lap, wire, mask)
                values = sum_wires(wire, 0, 1, WIRE)
                write_values(out, rank * share + at, numel, values, mask, DTYPE, WIDTH, TAIL, 16)
            arrive(peers, rank, epoch + tl.minimum(2 * d + 3, 2 * num_chunks), WORLD_SIZE)
        # 3. Write chunk c − 2 of the peers' slices to the output.
        if c >= 2:
            e = c - 2
            lap = (e - e % ring) * span
            await_peers(local, rank, epoch + tl.minimum(2 * e + 3, 2 * num_chunks), timeout_ns, status, WORLD_SIZE)
            for start in tl.range(first + e * span, tl.minimum(share, (e + 1) * span), stride):
                at = start + offsets
                mask = at < share
                area = local + gather
                if TAIL:
                    for r in tl.range(0, WORLD_SIZE):
                        peer_mask = mask & (rank != r)
                        wire = load_wire(area, area + all_slots, r * slot + at - lap, peer_mask)
                        values = sum_wires(wire, 0, 1, WIRE)
                        write_values(out, r * share + at, numel, values, peer_mask, DTYPE, WIDTH, TAIL, 16)
                else:
                    for i in tl.static_range(WORLD_SIZE):
                        peer_mask = mask & (rank != i)
                        wire = load_wire(area, area + all_slots, i * slot + at - lap, peer_mask)
                        values = sum_wires(wire, 0, 1, WIRE)
                        write_values(out, i * share + at, numel, values, peer_mask, DTYPE, WIDTH, TAIL, 16)
    write_counter(local, epoch + 2 * num_chunks, EPOCH_OFFSET)


class QuantizedVariant(KernelVariant):
    """A variant of an op whose problems name a wire as their scaling."""

    numerics = "quantized"

    def refuse(self, problem: Problem, limits: Limits) -> str | None:
        reductions = ("",) if problem.op == "all_gather" else ("sum", "avg")
        return refuse_result(problem, wide=False, quantized=True) or refuse_kernels(
            problem, limits, SUM_DTYPES, reductions
        )

    def work_packets(self, problem: Problem) -> int:
        return wire_packets(problem.numel)

    def constants(self, problem: Problem, config: Config) -> dict[str, Value]:
        align = 16 if problem.op == "all_reduce" else alignment_of(problem.nbytes)
        return {
            "WORLD_SIZE": problem.world_size,
            "OP": problem.op,
            "WIRE": problem.scaling,
            "DTYPE": problem.dtype,
            "WIDTH": ITEMSIZE[problem.dtype],
            "AVG": problem.reduction == "avg",
            "TAIL": problem.nbytes % PACKET_BYTES != 0,
            "ALIGN": align,
            "BLOCK": packets_a_block(config),
        }


_MAX_PACKETS = 2048


class _Ring(QuantizedVariant, RingVariant):
    packet_bytes = PACKET_BYTES + 1  # and an eighth of a scale
    space = Space({**PUSH_GRID, "num_chunks": PowerOfTwo(1, 64)})

    def refuse_config(self, problem: Problem, config: Config, limits: Limits) -> str | None:
        if (packets := packets_a_block(config)) * problem.world_size > _MAX_PACKETS:
            return f"{packets} packets of {problem.world_size} ranks a block at once spill registers"
        return self.refuse_ring(problem, config, limits)

    def preferred_config(self, problem: Problem, limits: Limits) -> dict[str, float]:
        packets = self.work_packets(problem)
        chunks = 1 if packets < 1 << 15 else 4 if packets < 1 << 19 else 16
        return {"num_blocks": min(packets / 512, 132), "num_warps": 16, "num_chunks": chunks}


class _OneShot(_Ring):
    name = "one_shot_quantized"
    summary = "quantised payloads pushed to every rank and taken in rank order; rounds to the wire once"
    kernels: tuple[Any, ...] = (one_shot_quantized_kernel,)
    trailing_arguments: tuple[str, ...] = ("scatter", "num_chunks")
    ring = RING.value


class AllReduceOneShot(_OneShot, registered=True):
    op = "all_reduce"


class ReduceScatterOneShot(_OneShot, registered=True):
    op = "reduce_scatter"


class AllGatherOneShot(_OneShot, registered=True):
    op = "all_gather"


class AllReduceTwoShot(_Ring, registered=True):
    op = "all_reduce"
    name = "two_shot_quantized"
    summary = "quantised slices pushed to their owners, whose quantised sums come back; rounds to the wire twice"
    kernels = (two_shot_quantized_kernel,)
    trailing_arguments = ("scatter", "gather", "num_chunks")
    ring = TWO_SHOT_RING.value

    def work_packets(self, problem: Problem) -> int:
        return wire_packets(-(-problem.numel // problem.world_size))

    def constants(self, problem: Problem, config: Config) -> dict[str, Value]:
        constants = super().constants(problem, config)
        return {name: value for name, value in constants.items() if name not in ("OP", "ALIGN")}
