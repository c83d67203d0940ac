"""lamport, two_shot_lamport: packets that announce themselves, then the norm of whole rows by a block each.

Packets, stages and clearing are those of all_reduce's `lamport`, for the same reasons.

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
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tunedcomm.kernels.all_reduce.op import refuse_empty_slices, slice_packets
from tunedcomm.kernels.all_reduce_rms_norm.op import RmsNormVariant, row_warps
from tunedcomm.kernels.all_reduce_rms_norm.rows import finish_row, row_extras
from tunedcomm.kernels.common.feasibility import refuse_stage
from tunedcomm.kernels.common.lane import STATE_OFFSET, block_range, read_counter, write_counter
from tunedcomm.kernels.common.packets import PACKET_BYTES, arm, insert_own, packets_of, sum_packets
from tunedcomm.kernels.common.sync import INTERPRET, SENTINEL, load_packets, poll_from, poll_packets, store_packets
from tunedcomm.space import Choice, Config, PowerOfTwo, Space
from tunedcomm.spec import Limits, Problem


@triton.jit
def rms_norm_lamport_kernel(
    x, weight, bias, residual, scale, out, residual_out, eps, tokens, row,
    local, q0, q1, q2, q3, q4, q5, q6, rank, timeout_ns, status, arena, stage_bytes,
    WORLD_SIZE: tl.constexpr, DTYPE: tl.constexpr, BIAS: tl.constexpr, RESIDUAL: tl.constexpr, FP8: tl.constexpr,
    BLOCK: tl.constexpr, THREADS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Push all packets, then row by row: poll, sum, add, normalise."""
    if PDL and not INTERPRET:
        gdc_wait()
    peers = (q0, q1, q2, q3, q4, q5, q6)
    calls = read_counter(local, STATE_OFFSET)
    stage = arena + (calls & 1) * stage_bytes
    total = tokens.to(tl.int64) * row

    lanes, first, step = block_range(THREADS)
    for start in tl.range(first, total, step):
        packet = start + lanes
        here = packet < total
        w0, w1, w2, w3 = load_packets(x + packet * 16, here)
        w0, w1, w2, w3 = arm(w0), arm(w1), arm(w2), arm(w3)
        place = stage + (rank * total + packet) * 16
        for i in tl.static_range(WORLD_SIZE - 1):
            store_packets(peers[i] + place, w0, w1, w2, w3, here, REMOTE=True)
    if PDL and not INTERPRET:
        gdc_launch_dependents()

    at = tl.arange(0, BLOCK).to(tl.int64)
    here = at < row
    empty = tl.full((BLOCK,), SENTINEL, tl.int32)
    of_row = load_packets(weight + at * 16, here & (tl.program_id(0) < tokens))
    for r in tl.range(tl.program_id(0), tokens, tl.num_programs(0)):
        packet = at + r * row
        own = load_packets(x + packet * 16, here)
        b, extra = row_extras(bias, residual, at, packet, here, BIAS, RESIDUAL)
        place = local + stage + packet * 16
        words = poll_packets(place, total * 16, here, rank, timeout_ns, status, WORLD_SIZE)
        for i in tl.static_range(WORLD_SIZE):
            store_packets(place + i * total * 16, empty, empty, empty, empty, here & (rank != i))
        s = sum_packets(insert_own(words, own, rank, WORLD_SIZE), DTYPE, False, WORLD_SIZE)
        finish_row(
            s, b, extra, of_row, out, residual_out, scale, eps, row, packet, here, DTYPE, BIAS, RESIDUAL, FP8, BLOCK
        )
    write_counter(local, calls + 1, STATE_OFFSET)


@triton.jit
def rms_norm_two_shot_lamport_kernel(
    x, weight, bias, residual, scale, out, residual_out, eps, tokens, row,
    local, q0, q1, q2, q3, q4, q5, q6, rank, timeout_ns, status, arena, stage_bytes,
    WORLD_SIZE: tl.constexpr, DTYPE: tl.constexpr, BIAS: tl.constexpr, RESIDUAL: tl.constexpr, FP8: tl.constexpr,
    BLOCK: tl.constexpr, THREADS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Push all slices, reduce the own one and push its sums, finish the gathered rows."""
    if PDL and not INTERPRET:
        gdc_wait()
    peers = (q0, q1, q2, q3, q4, q5, q6)
    calls = read_counter(local, STATE_OFFSET)
    scatter = arena + (calls & 1) * stage_bytes
    total = tokens.to(tl.int64) * row
    share = (total + WORLD_SIZE - 1) // WORLD_SIZE
    gather = scatter + WORLD_SIZE * share * 16

    lanes, first, step = block_range(THREADS)
    nothing = tl.full((THREADS,), SENTINEL, tl.int32)
    for start in tl.range(first, share, step):
        place = scatter + (rank * share + start + lanes) * 16
        for i in tl.static_range(WORLD_SIZE - 1):
            packet = (rank + 1 + i) % WORLD_SIZE * share + start + lanes
            here = (start + lanes < share) & (packet < total)
            w0, w1, w2, w3 = load_packets(x + packet * 16, here)
            store_packets(peers[i] + place, arm(w0), arm(w1), arm(w2), arm(w3), here, REMOTE=True)

    for start in tl.range(first, share, step):
        packet = rank * share + start + lanes
        here = (start + lanes < share) & (packet < total)
        own = load_packets(x + packet * 16, here)
        place = local + scatter + (start + lanes) * 16
        words = poll_packets(place, share * 16, here, rank, timeout_ns, status, WORLD_SIZE)
        s0, s1, s2, s3 = sum_packets(insert_own(words, own, rank, WORLD_SIZE), DTYPE, False, WORLD_SIZE)
        s0, s1, s2, s3 = arm(s0), arm(s1), arm(s2), arm(s3)
        for i in tl.static_range(WORLD_SIZE - 1):
            store_packets(peers[i] + gather + packet * 16, s0, s1, s2, s3, here, REMOTE=True)
        store_packets(local + gather + packet * 16, s0, s1, s2, s3, here, REMOTE=True)
        for i in tl.static_range(WORLD_SIZE):
            store_packets(place + i * share * 16, nothing, nothing, nothing, nothing, here & (rank != i))
    if PDL and not INTERPRET:
        gdc_launch_dependents()

    at = tl.arange(0, BLOCK).to(tl.int64)
    of_row = at < row
    empty = tl.full((BLOCK,), SENTINEL, tl.int32)
    weights = load_packets(weight + at * 16, of_row & (tl.program_id(0) < tokens))
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
    write_counter(local, calls + 1, STATE_OFFSET)


class _OfPackets(RmsNormVariant):
    """A variant whose blocks share the pushing and summing of packets, then take rows; `work_packets` are pushed."""

    areas = ("arena", "stage_bytes")
    space = Space(
        {
            "num_blocks": Choice(1, 2, 4, 8, 16, 32, 64, 128),
            "num_warps": PowerOfTwo(1, 32),
            "launch_pdl": Choice(False, True),
        }
    )
    host_wish: Mapping[str, float] = {"num_blocks": 1, "num_warps": 16}
    mixed = True

    def wish(self, problem: Problem, limits: Limits) -> dict[str, float]:
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
        if (
            problem.world_size * slice_packets(problem) + packets_of(problem.nbytes)
        ) * PACKET_BYTES > limits.stage_bytes:
            return f"{problem.nbytes} bytes need more than a stage of {limits.stage_bytes} bytes"
        return None
