"""The forms of all_reduce_rms_norm that are not basic: fp8 with scales made on the way, the norm beside, an offset.

Protocols, areas, flags and lane rules are as in the variants whose names these have without `_quantized`, and so are
the spaces; only the end of a row differs (`rows.finish_form`). They are variants of their own because a variant has one
source hash: an edit here does not retire what was measured of the basic forms, and one there leaves these rows alone.

Numerics: ordered. Graph-safe. Source: as of the variants named.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from tunedcomm.fp8 import GROUP
from tunedcomm.kernels.all_reduce_rms_norm.flags import TwoShot, push_chunk, reduce_chunk
from tunedcomm.kernels.all_reduce_rms_norm.lamport import Lamport, TwoShotLamport
from tunedcomm.kernels.all_reduce_rms_norm.op import RmsNormVariant, eps_bits, form_of, given_of, row_packets
from tunedcomm.kernels.all_reduce_rms_norm.rows import finish_form, row_block, row_extras
from tunedcomm.kernels.common.lamport import begin_call, end_call, exchange_slices, launch_next, push_to_all, take_sum
from tunedcomm.kernels.common.lane import EPOCH_OFFSET, arrive, await_peers, read_counter, write_counter
from tunedcomm.kernels.common.launch import Argument
from tunedcomm.kernels.common.sync import SENTINEL, load_packets, poll_from, store_packets
from tunedcomm.space import Config, Value
from tunedcomm.spec import Limits, Problem


@triton.jit
def form_lamport_kernel(
    x, weight, bias, residual, scale, out, residual_out, scales, norm_out, eps, offset, shape, scale_strides,
    local, peers, rank, timeout_ns, status, arena, stage_bytes,
    WORLD_SIZE: tl.constexpr, DTYPE: tl.constexpr, BIAS: tl.constexpr, FULL: tl.constexpr, RESIDUAL: tl.constexpr,
    QUANTIZE: tl.constexpr, NORM: tl.constexpr, POW2: tl.constexpr, OFFSET: tl.constexpr, BLOCK: tl.constexpr,
    THREADS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Push all packets, then row by row: poll, sum, add, normalise, quantise."""
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
        b, extra = row_extras(bias, residual, packet if FULL else at, packet, mask, BIAS, RESIDUAL)
        slot = local + stage + packet * 16
        s = take_sum(own, slot, total * 16, empty, mask, rank, timeout_ns, status, DTYPE, False, WORLD_SIZE)
        finish_form(
            s, b, extra, of_row, out, residual_out, scale, scales, norm_out, eps, offset, row, r, scale_strides,
            packet, mask, r < tokens, DTYPE, BIAS, RESIDUAL, QUANTIZE, NORM, POW2, OFFSET, BLOCK,
        )  # fmt: skip
    end_call(local, calls)


@triton.jit
def form_two_shot_lamport_kernel(
    x, weight, bias, residual, scale, out, residual_out, scales, norm_out, eps, offset, shape, scale_strides,
    local, peers, rank, timeout_ns, status, arena, stage_bytes,
    WORLD_SIZE: tl.constexpr, DTYPE: tl.constexpr, BIAS: tl.constexpr, FULL: tl.constexpr, RESIDUAL: tl.constexpr,
    QUANTIZE: tl.constexpr, NORM: tl.constexpr, POW2: tl.constexpr, OFFSET: tl.constexpr, BLOCK: tl.constexpr,
    THREADS: tl.constexpr, PDL: tl.constexpr,
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
        b, extra = row_extras(bias, residual, packet if FULL else at, packet, of_row, BIAS, RESIDUAL)
        owner = (packet.to(tl.int32) // share.to(tl.int32)).to(tl.int32)
        place = local + gather + packet * 16
        s = poll_from(place, of_row, owner, timeout_ns, status)
        store_packets(place, empty, empty, empty, empty, of_row)
        finish_form(
            s, b, extra, weights, out, residual_out, scale, scales, norm_out, eps, offset, row, r, scale_strides,
            packet, of_row, r < tokens, DTYPE, BIAS, RESIDUAL, QUANTIZE, NORM, POW2, OFFSET, BLOCK,
        )  # fmt: skip
    end_call(local, calls)


@triton.jit
def form_two_shot_kernel(
    x, weight, bias, residual, scale, out, residual_out, scales, norm_out, eps, offset, shape, scale_strides,
    local, peers, rank, timeout_ns, status, scatter, gather, num_chunks, rows, lag,
    WORLD_SIZE: tl.constexpr, DTYPE: tl.constexpr, BIAS: tl.constexpr, FULL: tl.constexpr, RESIDUAL: tl.constexpr,
    QUANTIZE: tl.constexpr, NORM: tl.constexpr, POW2: tl.constexpr, OFFSET: tl.constexpr, BLOCK: tl.constexpr,
    THREADS: tl.constexpr,
):  # fmt: skip
    """In round c: push chunk c, reduce chunk c − lag, finish chunk c − 2 · lag; flags as in `flags`."""
    tokens, row = shape
    epoch = read_counter(local, EPOCH_OFFSET)
    block, grid = tl.program_id(0).to(tl.int64), tl.num_programs(0).to(tl.int64)
    share = (row + WORLD_SIZE - 1) // WORLD_SIZE
    ring = tl.minimum(num_chunks, 2 * lag + 1)
    at = tl.arange(0, BLOCK).to(tl.int64)

    for c in tl.range(0, num_chunks + 2 * lag):
        # 1. Push chunk c of slice j to rank j.
        if c < num_chunks:
            chunk, top = (c % ring * grid + block) * rows, block + c * rows * grid
            push_chunk(x, peers, local, scatter, chunk, top, grid, rows, tokens, row, share, rank, WORLD_SIZE, BLOCK)
            arrive(peers, rank, epoch + 2 * c + 1, WORLD_SIZE)
        # 2. Sum chunk c − lag of the own slices, push the sums to every rank.
        if (c >= lag) & (c < num_chunks + lag):
            d = c - lag
            chunk, top = (d % ring * grid + block) * rows, block + d * rows * grid
            await_peers(local, rank, epoch + 2 * d + 1, timeout_ns, status, WORLD_SIZE)
            reduce_chunk(
                x, peers, local, scatter, gather, chunk, top, grid, rows, tokens, row, share, rank,
                WORLD_SIZE, DTYPE, THREADS,
            )  # fmt: skip
            arrive(peers, rank, epoch + 2 * c + 2, WORLD_SIZE)
        # 3. Take the gathered rows of chunk c − 2 · lag through bias, residual and norm.
        if c >= 2 * lag:
            e = c - 2 * lag
            chunk, top = (e % ring * grid + block) * rows, block + e * rows * grid
            await_peers(local, rank, epoch + 2 * (e + lag) + 2, timeout_ns, status, WORLD_SIZE)
            weights = load_packets(weight + at * 16, at < row)
            for j in tl.range(0, rows):
                r = top + j * grid
                mask, packet = (at < row) & (r < tokens), r * row + at
                s = load_packets(local + gather + ((chunk + j) * row + at) * 16, mask)
                b, extra = row_extras(bias, residual, packet if FULL else at, packet, mask, BIAS, RESIDUAL)
                finish_form(
                    s, b, extra, weights, out, residual_out, scale, scales, norm_out, eps, offset, row, r,
                    scale_strides, packet, mask, r < tokens, DTYPE, BIAS, RESIDUAL, QUANTIZE, NORM, POW2, OFFSET, BLOCK,
                )  # fmt: skip
    write_counter(local, epoch + 2 * (num_chunks + lag), EPOCH_OFFSET)


def _refuse_warps(problem: Problem, num_warps: int, most: int) -> str | None:
    """Return why rows do not fit into blocks of so many warps; None if they do.

    With 512 threads each may hold `most` packets of a row; with more threads one, with fewer any number.
    """
    share = -(-row_block(row_packets(problem)) // (32 * num_warps))
    if num_warps >= 16 and share > (most if num_warps == 16 else 1):
        return f"{share} packets of a row for each of {32 * num_warps} threads spill what quantising holds besides"
    return None


class _Forms(RmsNormVariant):
    """The differences from the variant of a basic form.

    Attributes:
        max_share: packets of a row that each of 512 threads may hold.
    """

    num_varying = 11  # x, weight, bias, residual, scale, four outputs, eps, offset
    max_share = 2

    def refuse_form(self, problem: Problem) -> str | None:
        form = form_of(problem)
        if form.is_basic:
            return "the variant without `_quantized` in its name serves this form"
        if form.quantize == "group128" and problem.shape[-1] % GROUP:
            return f"rows of {problem.shape[-1]} columns are not whole groups of {GROUP}"
        return None

    def first_arguments(self, problem: Problem) -> tuple[Argument | None, ...]:
        return (*super().first_arguments(problem), form_of(problem).scale_strides(*problem.shape))

    def addresses(self, problem: Problem, inputs: tuple[Any, ...], outputs: tuple[Any, ...]) -> tuple[int, ...]:
        return (*super().addresses(problem, inputs, outputs), eps_bits(given_of(problem, inputs).offset))

    def constants(self, problem: Problem, config: Config) -> dict[str, Value]:
        form, constants = form_of(problem), super().constants(problem, config)
        del constants["FP8"]
        return {
            **constants,
            "FULL": form.full_bias,
            "QUANTIZE": form.quantize,
            "NORM": form.norm,
            "POW2": form.pow2,
            "OFFSET": form.offset,
        }

    def refuse_config(self, problem: Problem, config: Config, limits: Limits) -> str | None:
        reason = _refuse_warps(problem, int(config["num_warps"]), self.max_share) if limits.backend == "cuda" else None
        return reason or super().refuse_config(problem, config, limits)


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
    max_share = 1
