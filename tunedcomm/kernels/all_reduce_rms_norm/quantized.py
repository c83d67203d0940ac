"""The forms of all_reduce_rms_norm that are not basic: fp8 with scales made on the way, the norm beside, an offset.

Protocols, areas, flags and lane rules are those of the variants whose names these have without `_quantized`, and so are
the spaces; only the end of a row differs (`rows.finish_form`). They are variants of their own because a variant has one
source hash: an edit here does not retire what was measured of the basic forms, and one there leaves these rows alone.

Numerics: ordered. Graph-safe. Source: as of the variants named.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tunedcomm.kernels.all_reduce.unfused import SUM_KERNELS
from tunedcomm.kernels.all_reduce_rms_norm.flags import TwoShot, push_chunk, reduce_chunk
from tunedcomm.kernels.all_reduce_rms_norm.lamport import Lamport, TwoShotLamport
from tunedcomm.kernels.all_reduce_rms_norm.op import GROUP, RowKernels, eps_bits, form_of, given_of, row_packets
from tunedcomm.kernels.all_reduce_rms_norm.rows import finish_form, row_block, row_extras
from tunedcomm.kernels.all_reduce_rms_norm.unfused import Unfused
from tunedcomm.kernels.common.lane import (
    EPOCH_OFFSET,
    STATE_OFFSET,
    arrive,
    await_peers,
    block_range,
    read_counter,
    write_counter,
)
from tunedcomm.kernels.common.packets import arm, insert_own, sum_packets
from tunedcomm.kernels.common.sync import INTERPRET, SENTINEL, load_packets, poll_from, poll_packets, store_packets
from tunedcomm.space import Config, Value
from tunedcomm.spec import Limits, Problem


@triton.jit
def form_lamport_kernel(
    x, weight, bias, residual, scale, out, residual_out, scales, norm_out, eps, offset, tokens, row, row_step,
    scale_step, local, q0, q1, q2, q3, q4, q5, q6, rank, timeout_ns, status, arena, stage_bytes,
    WORLD_SIZE: tl.constexpr, DTYPE: tl.constexpr, BIAS: tl.constexpr, FULL: tl.constexpr, RESIDUAL: tl.constexpr,
    QUANTIZE: tl.constexpr, NORM: tl.constexpr, POW2: tl.constexpr, OFFSET: tl.constexpr, BLOCK: tl.constexpr,
    THREADS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Push all packets, then row by row: poll, sum, add, normalise, quantise."""
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
        b, extra = row_extras(bias, residual, packet if FULL else at, packet, here, BIAS, RESIDUAL)
        place = local + stage + packet * 16
        words = poll_packets(place, total * 16, here, rank, timeout_ns, status, WORLD_SIZE)
        for i in tl.static_range(WORLD_SIZE):
            store_packets(place + i * total * 16, empty, empty, empty, empty, here & (rank != i))
        s = sum_packets(insert_own(words, own, rank, WORLD_SIZE), DTYPE, False, WORLD_SIZE)
        finish_form(
            s, b, extra, of_row, out, residual_out, scale, scales, norm_out, eps, offset, row, r, row_step, scale_step,
            packet, here, r < tokens, DTYPE, BIAS, RESIDUAL, QUANTIZE, NORM, POW2, OFFSET, BLOCK,
        )  # fmt: skip
    write_counter(local, calls + 1, STATE_OFFSET)


@triton.jit
def form_two_shot_lamport_kernel(
    x, weight, bias, residual, scale, out, residual_out, scales, norm_out, eps, offset, tokens, row, row_step,
    scale_step, local, q0, q1, q2, q3, q4, q5, q6, rank, timeout_ns, status, arena, stage_bytes,
    WORLD_SIZE: tl.constexpr, DTYPE: tl.constexpr, BIAS: tl.constexpr, FULL: tl.constexpr, RESIDUAL: tl.constexpr,
    QUANTIZE: tl.constexpr, NORM: tl.constexpr, POW2: tl.constexpr, OFFSET: tl.constexpr, BLOCK: tl.constexpr,
    THREADS: tl.constexpr, PDL: tl.constexpr,
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
        b, extra = row_extras(bias, residual, packet if FULL else at, packet, of_row, BIAS, RESIDUAL)
        owner = (packet.to(tl.int32) // share.to(tl.int32)).to(tl.int32)
        place = local + gather + packet * 16
        s = poll_from(place, of_row, owner, timeout_ns, status)
        store_packets(place, empty, empty, empty, empty, of_row)
        finish_form(
            s, b, extra, weights, out, residual_out, scale, scales, norm_out, eps, offset, row, r, row_step, scale_step,
            packet, of_row, r < tokens, DTYPE, BIAS, RESIDUAL, QUANTIZE, NORM, POW2, OFFSET, BLOCK,
        )  # fmt: skip
    write_counter(local, calls + 1, STATE_OFFSET)


@triton.jit
def form_two_shot_kernel(
    x, weight, bias, residual, scale, out, residual_out, scales, norm_out, eps, offset, tokens, row, row_step,
    scale_step, local, q0, q1, q2, q3, q4, q5, q6, rank, timeout_ns, status, scatter, gather, num_chunks, rows, lag,
    WORLD_SIZE: tl.constexpr, DTYPE: tl.constexpr, BIAS: tl.constexpr, FULL: tl.constexpr, RESIDUAL: tl.constexpr,
    QUANTIZE: tl.constexpr, NORM: tl.constexpr, POW2: tl.constexpr, OFFSET: tl.constexpr, BLOCK: tl.constexpr,
    THREADS: tl.constexpr,
):  # fmt: skip
    """In round c: push chunk c, reduce chunk c − lag, finish chunk c − 2 · lag; flags as in `flags`."""
    peers = (q0, q1, q2, q3, q4, q5, q6)
    epoch = read_counter(local, EPOCH_OFFSET)
    block, grid = tl.program_id(0).to(tl.int64), tl.num_programs(0).to(tl.int64)
    share = (row + WORLD_SIZE - 1) // WORLD_SIZE
    ring = tl.minimum(num_chunks, 2 * lag + 1)
    at = tl.arange(0, BLOCK).to(tl.int64)

    for c in tl.range(0, num_chunks + 2 * lag):
        if c < num_chunks:
            chunk, top = (c % ring * grid + block) * rows, block + c * rows * grid
            push_chunk(x, peers, local, scatter, chunk, top, grid, rows, tokens, row, share, rank, WORLD_SIZE, BLOCK)
            arrive(local, q0, q1, q2, q3, q4, q5, q6, rank, epoch + 2 * c + 1, WORLD_SIZE)
        if (c >= lag) & (c < num_chunks + lag):
            d = c - lag
            chunk, top = (d % ring * grid + block) * rows, block + d * rows * grid
            await_peers(local, rank, epoch + 2 * d + 1, timeout_ns, status, WORLD_SIZE)
            reduce_chunk(
                x, peers, local, scatter, gather, chunk, top, grid, rows, tokens, row, share, rank,
                WORLD_SIZE, DTYPE, THREADS,
            )  # fmt: skip
            arrive(local, q0, q1, q2, q3, q4, q5, q6, rank, epoch + 2 * c + 2, WORLD_SIZE)
        if c >= 2 * lag:
            e = c - 2 * lag
            chunk, top = (e % ring * grid + block) * rows, block + e * rows * grid
            await_peers(local, rank, epoch + 2 * (e + lag) + 2, timeout_ns, status, WORLD_SIZE)
            weights = load_packets(weight + at * 16, at < row)
            for j in tl.range(0, rows):
                r = top + j * grid
                here, packet = (at < row) & (r < tokens), r * row + at
                s = load_packets(local + gather + ((chunk + j) * row + at) * 16, here)
                b, extra = row_extras(bias, residual, packet if FULL else at, packet, here, BIAS, RESIDUAL)
                finish_form(
                    s, b, extra, weights, out, residual_out, scale, scales, norm_out, eps, offset, row, r, row_step,
                    scale_step, packet, here, r < tokens, DTYPE, BIAS, RESIDUAL, QUANTIZE, NORM, POW2, OFFSET, BLOCK,
                )  # fmt: skip
    write_counter(local, epoch + 2 * (num_chunks + lag), EPOCH_OFFSET)


@triton.jit
def form_rows_kernel(
    s, weight, bias, residual, scale, out, residual_out, scales, norm_out, eps, offset, tokens, row, row_step,
    scale_step,
    DTYPE: tl.constexpr, BIAS: tl.constexpr, FULL: tl.constexpr, RESIDUAL: tl.constexpr, QUANTIZE: tl.constexpr,
    NORM: tl.constexpr, POW2: tl.constexpr, OFFSET: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Rows that hold sums; no peers."""
    if PDL and not INTERPRET:
        gdc_wait()
    at = tl.arange(0, BLOCK).to(tl.int64)
    here = at < row
    weights = load_packets(weight + at * 16, here)
    for r in tl.range(tl.program_id(0), tokens, tl.num_programs(0)):
        packet = at + r * row
        words = load_packets(s + packet * 16, here)
        b, extra = row_extras(bias, residual, packet if FULL else at, packet, here, BIAS, RESIDUAL)
        finish_form(
            words, b, extra, weights, out, residual_out, scale, scales, norm_out, eps, offset, row, r, row_step,
            scale_step, packet, here, r < tokens, DTYPE, BIAS, RESIDUAL, QUANTIZE, NORM, POW2, OFFSET, BLOCK,
        )  # fmt: skip


class _FormKernels(RowKernels):
    num_varying = 11  # x, weight, bias, residual, scale, four outputs, eps, offset

    def refuse(self, problem: Problem) -> str | None:
        form = form_of(problem)
        if form.is_basic:
            return "the variant without `_quantized` in its name serves this form"
        if form.quantize == "group128" and problem.shape[-1] % GROUP:
            return f"rows of {problem.shape[-1]} columns are no whole groups of {GROUP}"
        return None

    def leading(self, problem: Problem) -> tuple[int | None, ...]:
        return (*super().leading(problem), *form_of(problem).scale_strides(*problem.shape))

    def arrange(self, problem: Problem, inputs: tuple[Any, ...], outputs: tuple[Any, ...]) -> tuple[int, ...]:
        return (*super().arrange(problem, inputs, outputs), eps_bits(given_of(problem, inputs).offset))

    def constants(self, problem: Problem) -> dict[str, Value]:
        form, constants = form_of(problem), super().constants(problem)
        del constants["FP8"]
        return {
            **constants,
            "FULL": form.full_bias,
            "QUANTIZE": form.quantize,
            "NORM": form.norm,
            "POW2": form.pow2,
            "OFFSET": form.offset,
        }


_FORM_ROWS = _FormKernels()


def _refuse_warps(problem: Problem, num_warps: int, most: int) -> str | None:
    """Return why rows do not fit into blocks of so many warps; None if they do.

    Each of 512 threads may hold `most` packets of a row, each of more threads one, each of fewer any number.
    """
    share = -(-row_block(row_packets(problem)) // (32 * num_warps))
    if num_warps >= 16 and share > (most if num_warps == 16 else 1):
        return f"{share} packets of a row for each of {32 * num_warps} threads spill what quantising holds besides"
    return None


class _Forms:
    """The differences from the variant of a basic form.

    Attributes:
        most_share: packets of a row that each of 512 threads may hold.
    """

    rows: RowKernels = _FORM_ROWS
    most_share = 2

    def refuse_config(self, problem: Problem, config: Config, limits: Limits) -> str | None:
        reason = _refuse_warps(problem, int(config["num_warps"]), self.most_share) if limits.backend == "cuda" else None
        return reason or super().refuse_config(problem, config, limits)  # type: ignore[misc]


class LamportQuantized(_Forms, Lamport, registered=True):
    name = "lamport_quantized"
    summary = "`lamport` for scales made on the way, the norm beside and weights with an offset"
    kernels = (form_lamport_kernel,)


class TwoShotLamportQuantized(_Forms, TwoShotLamport, registered=True):
    name = "two_shot_lamport_quantized"
    summary = "`two_shot_lamport` for scales made on the way, the norm beside and weights with an offset"
    kernels = (form_two_shot_lamport_kernel,)


class TwoShotQuantized(_Forms, TwoShot, registered=True):
    name = "two_shot_quantized"
    summary = "`two_shot` for scales made on the way, the norm beside and weights with an offset"
    kernels = (form_two_shot_kernel,)
    most_share = 1


class UnfusedQuantized(Unfused, registered=True):
    name = "unfused_quantized"
    summary = "an ordered all_reduce kernel, then one kernel that adds, normalises and quantises"
    kernels = (*SUM_KERNELS, form_rows_kernel)
    rows: RowKernels = _FORM_ROWS

    def refuse_second(self, problem: Problem, config: Config, limits: Limits) -> str | None:
        reason = _refuse_warps(problem, int(config["norm_warps"]), 2) if limits.backend == "cuda" else None
        return reason or super().refuse_second(problem, config, limits)
