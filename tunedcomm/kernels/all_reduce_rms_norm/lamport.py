"""lamport: one-shot; every rank pushes its input to all, and blocks take the sums of whole rows through the norm.

The packets, stages and clearing are those of all_reduce's `lamport`, for the same reasons: a call uses stage (calls mod
2), a packet is polled and cleared by one thread, and a peer writes a stage again two calls later, when this call is
over. All blocks share the pushing, packet by packet, so that a single row leaves through many SMs; row r is then
awaited, summed and normalised by block r mod grid alone, blocks behind the last row only push.

Lane rules: every rank has packets for every peer, polls all of them in some block, and clears what it polls. A block
waits for packets that other blocks of the peers push, and those push before they wait for anything.

Reads and writes of the residual are by the same thread, packet by packet, so residual_out may be the residual.

Numerics: ordered. Graph-safe: the call counter lives in the lane.
Source: the fused kernels of TensorRT-LLM and FlashInfer, after all_reduce's `lamport`.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tunedcomm.kernels.all_reduce_rms_norm.op import (
    LAMPORT_ROWS_SPACE,
    RmsNormVariant,
    lamport_rows_wish,
    refuse_grid,
    refuse_rows,
)
from tunedcomm.kernels.all_reduce_rms_norm.rows import finish_row, row_extras
from tunedcomm.kernels.common.feasibility import refuse_stage
from tunedcomm.kernels.common.lane import STATE_OFFSET, block_range, read_counter, write_counter
from tunedcomm.kernels.common.packets import arm, insert_own, packets_of, sum_packets
from tunedcomm.kernels.common.sync import INTERPRET, SENTINEL, load_packets, poll_packets, store_packets
from tunedcomm.space import Config
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


class Lamport(RmsNormVariant):
    name = "lamport"
    summary = "one-shot push without flags, rows summed and normalised where they arrive; best for few tokens"
    kernels = (rms_norm_lamport_kernel,)
    areas = ("arena", "stage_bytes")
    space = LAMPORT_ROWS_SPACE

    def infeasible(self, problem: Problem, config: Config, limits: Limits) -> str | None:
        return (
            refuse_rows(problem, limits, config, slots=problem.world_size)
            or refuse_stage(problem, limits, packets_of(problem.nbytes) * 16)
            or refuse_grid(problem, config, limits, mixed=True)
        )

    def wish(self, problem: Problem, limits: Limits) -> dict[str, float]:
        return lamport_rows_wish(problem, limits, packets_of(problem.nbytes))


LAMPORT = Lamport().register()
