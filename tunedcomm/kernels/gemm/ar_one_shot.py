"""one_shot: a persistent GEMM whose tiles are left in the own panels; every rank then reads all ranks' tiles.

Block b stores its tiles, rounded, in the own panels and raises its flags on all peers after each. Then, tile by tile,
it waits for the flags of the peers' blocks b, reads the tile on all ranks, sums in rank order and adds the bias. Last
it says that it has read, and waits until its peers have.

What peers read is not overwritten too early: a rank's call is done once its peers have read its panels.

A block waits for the peers' blocks of its own number alone, and all blocks are resident. The first flags are raised at
once, the others before any but the first ones are waited for.

Numerics: ordered. Graph-safe: the epochs live in the lane.
Source: one-shot all-reduces of serving stacks, fed by the GEMM tile by tile.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import triton
import triton.language as tl

from tunedcomm.kernels.common.feasibility import Launch, closest, kernel_blocks
from tunedcomm.kernels.common.lane import (
    EPOCH_OFFSET,
    address_of,
    arrive,
    await_peers_together,
    read_counter,
    write_counter,
)
from tunedcomm.kernels.common.launch import CompileRequest
from tunedcomm.kernels.common.sync import load_packets, store_packets
from tunedcomm.kernels.gemm.ar import (
    bind_slots,
    packets_in,
    refuse_slots,
    rounds_of,
    slot_bytes,
    slot_request,
    slot_space,
    slot_wish,
    store_slot,
)
from tunedcomm.kernels.gemm.ar_sums import sum_and_bias
from tunedcomm.kernels.gemm.tiles import (
    element_type,
    matrix,
    operand_b,
    scaled,
    tile_of,
    tile_product,
)
from tunedcomm.space import Config, Value
from tunedcomm.spec import Limits, Problem, Variant, register_variant

if TYPE_CHECKING:
    from tunedcomm.symm.workspace import Workspace

__all__ = ["ONE_SHOT", "gemm_one_shot_kernel"]


@triton.jit
def gemm_one_shot_kernel(
    a, b, bias, scale_a, scale_b, out, m, n, k, local, q0, q1, q2, q3, q4, q5, q6, rank, timeout_ns, status,
    panels, p0, p1, p2, p3, p4, p5, p6,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr, NK: tl.constexpr,
    DTYPE: tl.constexpr, OUT: tl.constexpr, SCALING: tl.constexpr, WORLD_SIZE: tl.constexpr, BIAS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Slot i × grid + b holds the tile that block b computes in round i."""
    peers = (p0, p1, p2, p3, p4, p5, p6)
    epoch = read_counter(local, EPOCH_OFFSET)
    arrive(local, q0, q1, q2, q3, q4, q5, q6, rank, epoch + 1, WORLD_SIZE)
    PER: tl.constexpr = 128 // element_type(OUT).primitive_bitwidth
    SLOT: tl.constexpr = BLOCK_M * BLOCK_N // PER
    packets = n // PER
    rows, columns = (m + BLOCK_M - 1) // BLOCK_M, (n + BLOCK_N - 1) // BLOCK_N
    rounds = (rows * columns + tl.num_programs(0) - 1) // tl.num_programs(0)
    x = matrix(a, m, k, BLOCK_M, BLOCK_K, DTYPE)
    y = operand_b(b, k, n, BLOCK_N, BLOCK_K, NK, DTYPE)

    for i in tl.range(0, rounds):
        tile = tl.program_id(0) + i * tl.num_programs(0)
        if tile < rows * columns:
            down, across = tile_of(tile, rows, columns, GROUP)
            row, column = (down * BLOCK_M).to(tl.int32), (across * BLOCK_N).to(tl.int32)
            total = tile_product(x, y, row, column, k, BLOCK_M, BLOCK_N, BLOCK_K, NK)
            total = scaled(total, scale_a, scale_b, row, column, m, n, SCALING, BLOCK_M, BLOCK_N)
            if i == 0:
                await_peers_together(local, rank, epoch + 1, timeout_ns, status, WORLD_SIZE)
            store_slot(panels + tile.to(tl.int64) * (SLOT * 16), total, BLOCK_M, BLOCK_N, OUT)
        arrive(local, q0, q1, q2, q3, q4, q5, q6, rank, epoch + 2 + i, WORLD_SIZE)

    lanes = tl.arange(0, BLOCK).to(tl.int64)
    for i in tl.range(0, rounds):
        await_peers_together(local, rank, epoch + 2 + i, timeout_ns, status, WORLD_SIZE)
        tile = tl.program_id(0) + i * tl.num_programs(0)
        if tile < rows * columns:
            down, across = tile_of(tile, rows, columns, GROUP)
            place = tile.to(tl.int64) * (SLOT * 16)
            for start in tl.range(0, SLOT, BLOCK):
                at = start + lanes
                c, packet, here = packets_in(at, down * BLOCK_M, across * BLOCK_N, m, packets, BLOCK_N, OUT)
                here = here & (at < SLOT)
                words = ()
                for r in tl.static_range(WORLD_SIZE):
                    source = address_of(peers, panels, r, rank, WORLD_SIZE)
                    words = words + load_packets(source + place + at * 16, here)
                s0, s1, s2, s3 = sum_and_bias(words, bias, c, here, OUT, BIAS, WORLD_SIZE)
                store_packets(out + packet * 16, s0, s1, s2, s3, here)

    arrive(local, q0, q1, q2, q3, q4, q5, q6, rank, epoch + 2 + rounds, WORLD_SIZE)
    await_peers_together(local, rank, epoch + 2 + rounds, timeout_ns, status, WORLD_SIZE)
    write_counter(local, epoch + 2 + rounds, EPOCH_OFFSET)


_SPACE = slot_space()
_MOST_BYTES = 32 << 20  # every rank reads all of the others: beyond this, two shots move less


def _panel_bytes(problem: Problem, config: Config) -> int:
    return rounds_of(problem, config) * int(config["num_blocks"]) * slot_bytes(problem, config)


def _infeasible(problem: Problem, config: Config, limits: Limits) -> str | None:
    nbytes = _panel_bytes(problem, config)
    if nbytes > _MOST_BYTES:
        return f"one shot is out of the question at {nbytes} bytes a rank"
    return refuse_slots(problem, config, limits, panel_bytes=nbytes)


def _default(problem: Problem, limits: Limits) -> dict[str, Value]:
    return closest(slot_wish(problem, limits), _SPACE, problem, limits, _infeasible)


def _request(problem: Problem, config: Config) -> CompileRequest:
    return slot_request(gemm_one_shot_kernel, problem, config)


def _requests(problem: Problem, config: Config) -> Iterable[Any]:
    return (_request(problem, config),)


def _bind(problem: Problem, config: Config, workspace: Workspace) -> Launch:
    return bind_slots(problem, config, workspace, _request(problem, config), _panel_bytes(problem, config))


ONE_SHOT = register_variant(
    Variant(
        op="gemm_ar",
        name="one_shot",
        numerics="ordered",
        summary="one persistent GEMM kernel; every rank reads and sums all ranks' tiles as they come",
        space=_SPACE,
        infeasible=_infeasible,
        default=_default,
        bind=_bind,
        num_blocks=kernel_blocks,
        num_rounds=rounds_of,
        kernels=(gemm_one_shot_kernel,),
        compile_requests=_requests,
    )
)
