"""lamport, two_shot_lamport: packets that announce themselves, then the norm of whole rows by a block each.

Packets, stages and clearing are as in all_reduce's `lamport`, for the same reasons.

**lamport**, one-shot: all blocks share the pushing, packet by packet, so that a single row leaves through many SMs; row
r is then awaited, summed and normalised by block r mod grid alone, blocks behind the last row only push. Every rank has
packets for every peer and polls all of them in some block. A block waits for packets that other blocks of the peers
push, and those push before they wait for anything.

**two_shot_lamport**: all_reduce's, with slices of all rows taken together, but sums go to the own stage too, and blocks
take the rows of the gathered matrix through bias, residual and norm. A stage holds n scatter slots of a slice each and
the gathered matrix. Every slice has a packet (`infeasible` sees to it). A block scatters and reduces its
packets before it waits for any row, and all blocks are resident, so no block waits for one that has not begun.

Numerics: ordered. Graph-safe: the call counter lives in the lane.
Source: the fused kernels of TensorRT-LLM and FlashInfer, after all_reduce's `lamport`.
"""

from __future__ import annotations

from collections.abc import Mapping

import triton
import triton.language as tl

from tunedcomm.kernels.all_reduce.op import refuse_empty_slices, slice_packets
from tunedcomm.kernels.all_reduce_rms_norm.op import RmsNormVariant, row_warps
from tunedcomm.kernels.all_reduce_rms_norm.rows import finish_row, row_extras
from tunedcomm.kernels.common.feasibility import refuse_stage
from tunedcomm.kernels.common.lamport import begin_call, end_call, exchange_slices, launch_next, push_to_all, take_sum
from tunedcomm.kernels.common.packets import PACKET_BYTES, packets_of
from tunedcomm.kernels.common.sync import SENTINEL, load_packets, poll_from, store_packets
from tunedcomm.space import Choice, Config, PowerOfTwo, Space
from tunedcomm.spec import Limits, Problem
from tunedcomm.symm.layout import LaneLayout, Room


@triton.jit
def rms_norm_lamport_kernel(
    x, weight, bias, residual, scale, out, residual_out, eps, shape,
    local, peers, rank, timeout_ns, status, arena, stage_bytes,
    WORLD_SIZE: tl.constexpr, DTYPE: tl.constexpr, BIAS: tl.constexpr, RESIDUAL: tl.constexpr, FP8: tl.constexpr,
    BLOCK: tl.constexpr, THREADS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Push all packets, then row by row: poll, sum, add, normalise."""
    tokens, row = shape
    calls, stage = begin_call(local, arena, stage_bytes, PDL)
    total = tokens.to(tl.int64) * row

    # 1. Push the own packets into slot `rank` of every peer's stage.
    push_to_all(x, total, stage, peers, rank, WORLD_SIZE, THREADS)
    launch_next(PDL)

    at = tl.arange(0, BLOCK).to(tl.int64)
    mask = at < row
    empty = tl.full((BLOCK,), SENTINEL, tl.int32)
    of_row = load_packets(weight + at * 16, mask & (tl.program_id(0) < tokens))
    # 2. Row by row: poll the peers' packets, clear their places, sum, add, normalise.
    for r in tl.range(tl.program_id(0), tokens, tl.num_programs(0)):
        packet = at + r * row
        own = load_packets(x + packet * 16, mask)
        b, extra = row_extras(bias, residual, at, packet, mask, BIAS, RESIDUAL)
        slot = local + stage + packet * 16
        s = take_sum(own, slot, total * 16, empty, mask, rank, timeout_ns, status, DTYPE, False, WORLD_SIZE)
        finish_row(
            s, b, extra, of_row, out, residual_out, scale, eps, row, packet, mask, DTYPE, BIAS, RESIDUAL, FP8, BLOCK
        )
    end_call(local, calls)


@triton.jit
def rms_norm_two_shot_lamport_kernel(
    x, weight, bias, residual, scale, out, residual_out, eps, shape,
    local, peers, rank, timeout_ns, status, arena, stage_bytes,
    WORLD_SIZE: tl.constexpr, DTYPE: tl.constexpr, BIAS: tl.constexpr, RESIDUAL: tl.constexpr, FP8: tl.constexpr,
    BLOCK: tl.constexpr, THREADS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Push all slices, reduce the own one and push its sums, finish the gathered rows."""
    tokens, row = shape
    calls, scatter = begin_call(local, arena, stage_bytes, PDL)
    total = tokens.to(tl.int64) * row
    share = (total + WORLD_SIZE - 1) // WORLD_SIZE
    gather = scatter + WORLD_SIZE * share * 16

    # 1. Push slice j to rank j, sum the own slice, push the sums to every rank.
    exchange_slices(
        x, scatter, gather, total, share, local, peers, rank, timeout_ns, status, DTYPE, WORLD_SIZE, THREADS
    )
    launch_next(PDL)

    at = tl.arange(0, BLOCK).to(tl.int64)
    of_row = at < row
    empty = tl.full((BLOCK,), SENTINEL, tl.int32)
    weights = load_packets(weight + at * 16, of_row & (tl.program_id(0) < tokens))
    # 2. Row by row: poll the sums, clear their places, add, normalise.
    for r in tl.range(tl.program_id(0), tokens, tl.num_programs(0)):
        packet = at + r * row
        b, extra = row_extras(bias, residual, at, packet, of_row, BIAS, RESIDUAL)
        owner = (packet.to(tl.int32) // share.to(tl.int32)).to(tl.int32)
        place = local + gather + packet * 16
        s = poll_from(place, of_row, owner, timeout_ns, status)
        store_packets(place, empty, empty, empty, empty, of_row)
        finish_row(
            s, b, extra, weights, out, residual_out, scale, eps, row, packet, of_row, DTYPE, BIAS, RESIDUAL, FP8, BLOCK
        )
    end_call(local, calls)


class _OfPackets(RmsNormVariant):
    """A variant whose blocks share the pushing and summing of packets, then take rows; `work_packets` are pushed."""

    trailing_arguments = ("arena", "stage_bytes")
    space = Space(
        {
            "num_blocks": Choice(1, 2, 4, 8, 16, 32, 64, 128),
            "num_warps": PowerOfTwo(1, 32),
            "launch_pdl": Choice(False, True),
        }
    )
    host_preferred: Mapping[str, float] = {"num_blocks": 1, "num_warps": 16}
    mixed = True

    def preferred_config(self, problem: Problem, limits: Limits) -> dict[str, float]:
        warps = row_warps(problem)
        blocks = max(problem.shape[0], self.work_packets(problem) / (32 * warps))
        return {"num_blocks": min(blocks, 128), "num_warps": warps}


class Lamport(_OfPackets, registered=True):
    name = "lamport"
    summary = "one-shot push without flags, rows summed and normalised where they arrive; best for few tokens"
    kernels = (rms_norm_lamport_kernel,)

    def refuse_config(self, problem: Problem, config: Config, limits: Limits) -> str | None:
        stage = packets_of(problem.nbytes) * PACKET_BYTES
        return super().refuse_config(problem, config, limits) or refuse_stage(problem, limits, stage)

    def lane_room(self, problem: Problem, config: Config, layout: LaneLayout) -> Room:
        return Room(stage=packets_of(problem.nbytes) * PACKET_BYTES * problem.world_size)


class TwoShotLamport(_OfPackets, registered=True):
    name = "two_shot_lamport"
    summary = "reduce-scatter and all-gather of sums by self-announcing packets, then the norm; for medium sizes"
    kernels = (rms_norm_two_shot_lamport_kernel,)
    slots = 1

    def work_packets(self, problem: Problem) -> int:
        return slice_packets(problem)

    def refuse_config(self, problem: Problem, config: Config, limits: Limits) -> str | None:
        if reason := super().refuse_config(problem, config, limits) or refuse_empty_slices(problem):
            return reason
        if self._staged(problem) > limits.stage_bytes:
            return f"{problem.nbytes} bytes need more than a stage of {limits.stage_bytes} bytes"
        return None

    def _staged(self, problem: Problem) -> int:
        """Bytes of all slices, and of the gathered sums."""
        return (problem.world_size * slice_packets(problem) + packets_of(problem.nbytes)) * PACKET_BYTES

    def lane_room(self, problem: Problem, config: Config, layout: LaneLayout) -> Room:
        return Room(stage=self._staged(problem))
