"""two_shot_rolling: `two_shot` with a step for every tile, so that little is left after the last product.

The tiles of block b are b, b + G, b + 2G, … on every rank; the c-th of them, that of its round c, belongs to rank
(b + c) mod n. So in every round each rank owns the tiles of one block in n, and each block owns one tile in n rounds.
In round c block b

- computes its tile and stores it, rounded, into this rank's slot in its owner's panels;
- waits for the peers' blocks b to have ended round c − 1;
- if it owns the tile of round c − 1, sums its slots in rank order, adds the bias, and stores the sum to the output and
  into all peers' panels;
- copies the tile of round c − 2 from the own panels to the output, if a peer owns that one;
- tells the peers' blocks b that it has ended the round: one flag says both that its partial tile and that its sum are
  there, and what it stored to peers had the time of the copy to arrive.

Two more rounds without products sum and copy what is left, a tile a block. With two blocks an SM, one multiplies while
the other waits, sums or copies.

A block waits for the peers' blocks of its own number alone, for rounds that end whether or not its own goes on; all
blocks are resident. Every slot is written once in a call, by one rank, after the first flags of the call: see `_slots`.

Numerics: ordered (every element is summed once, by its tile's owner). Graph-safe: the epochs live in the lane.
Source: `two_shot`, with one step a tile in place of one a tile of every owner; space and feasibility are its own.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import triton
import triton.language as tl

from tunedcomm.kernels.common.feasibility import Launch
from tunedcomm.kernels.common.lane import (
    EPOCH_OFFSET,
    address_of,
    arrive,
    await_peers_together,
    read_counter,
    write_counter,
)
from tunedcomm.kernels.common.launch import CompileRequest
from tunedcomm.kernels.gemm.ar import bind_slots, copy_slot, rounds_of, scattered_bytes, slot_request, store_slot
from tunedcomm.kernels.gemm.ar_two_shot import TWO_SHOT, _sum_tile
from tunedcomm.kernels.gemm.tiles import (
    element_type,
    matrix,
    operand_b,
    scaled,
    tile_of,
    tile_product,
)
from tunedcomm.space import Config
from tunedcomm.spec import Problem, register_variant

if TYPE_CHECKING:
    from tunedcomm.symm.workspace import Workspace

__all__ = ["TWO_SHOT_ROLLING", "gemm_two_shot_rolling_kernel"]


@triton.jit
def _tile_in(c, grid, columns, rows, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP: tl.constexpr):
    """(whether this block has a tile in a round, its first row, its first column)."""
    tile = tl.program_id(0).to(tl.int64) + c * grid
    down, across = tile_of(tile, rows, columns, GROUP)
    return tile < rows * columns, (down * BLOCK_M).to(tl.int32), (across * BLOCK_N).to(tl.int32)


@triton.jit
def _slots_in(c, grid, WORLD_SIZE: tl.constexpr):
    """The first of the slots of this block's tile in a round, on the rank that owns it."""
    return ((c // WORLD_SIZE) * grid + tl.program_id(0)) * WORLD_SIZE


@triton.jit
def _owner_in(c, WORLD_SIZE: tl.constexpr):
    return (tl.program_id(0) + c).to(tl.int32) % WORLD_SIZE


@triton.jit
def gemm_two_shot_rolling_kernel(
    a, b, bias, scale_a, scale_b, out, m, n, k, local, q0, q1, q2, q3, q4, q5, q6, rank, timeout_ns, status,
    panels, p0, p1, p2, p3, p4, p5, p6, gather, rounds,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr, NK: tl.constexpr,
    DTYPE: tl.constexpr, OUT: tl.constexpr, SCALING: tl.constexpr, WORLD_SIZE: tl.constexpr, BIAS: tl.constexpr,
    BLOCK: tl.constexpr, COPY: tl.constexpr,
):  # fmt: skip
    """See the module's text.

    Slot (c // n × grid + b) × n + r of the panels holds rank r's part of block b's tile in round c, if this rank owns
    it; `gather` bytes further lies what rank r summed, if that rank does.
    """
    peers = (p0, p1, p2, p3, p4, p5, p6)
    epoch = read_counter(local, EPOCH_OFFSET)
    arrive(local, q0, q1, q2, q3, q4, q5, q6, rank, epoch + 1, WORLD_SIZE)
    base = epoch + 1
    SLOT: tl.constexpr = BLOCK_M * BLOCK_N // (128 // element_type(OUT).primitive_bitwidth)
    packets = n // (128 // element_type(OUT).primitive_bitwidth)
    rows, columns = (m + BLOCK_M - 1) // BLOCK_M, (n + BLOCK_N - 1) // BLOCK_N
    grid = tl.num_programs(0).to(tl.int64)
    x = matrix(a, m, k, BLOCK_M, BLOCK_K, DTYPE)
    y = operand_b(b, k, n, BLOCK_N, BLOCK_K, NK, DTYPE)

    for c in tl.range(0, rounds + 2):
        there, row, column = _tile_in(c, grid, columns, rows, BLOCK_M, BLOCK_N, GROUP)
        if (c < rounds) & there:
            total = tile_product(x, y, row, column, k, BLOCK_M, BLOCK_N, BLOCK_K, NK)
            total = scaled(total, scale_a, scale_b, row, column, m, n, SCALING, BLOCK_M, BLOCK_N)
            if c == 0:
                await_peers_together(local, rank, base, timeout_ns, status, WORLD_SIZE)
            target = address_of(peers, panels, _owner_in(c, WORLD_SIZE), rank, WORLD_SIZE)
            slot = _slots_in(c, grid, WORLD_SIZE) + rank
            store_slot(target + slot * (SLOT * 16), total, BLOCK_M, BLOCK_N, OUT)
        if c >= 1:
            await_peers_together(local, rank, base + c, timeout_ns, status, WORLD_SIZE)
        if (c >= 1) & (c <= rounds):
            there, row, column = _tile_in(c - 1, grid, columns, rows, BLOCK_M, BLOCK_N, GROUP)
            if there & (_owner_in(c - 1, WORLD_SIZE) == rank):
                _sum_tile(
                    bias, out, m, packets, panels, peers, gather, _slots_in(c - 1, grid, WORLD_SIZE), row, column, rank,
                    BLOCK_N, OUT, WORLD_SIZE, BIAS, SLOT, BLOCK,
                )  # fmt: skip
        if c >= 2:
            there, row, column = _tile_in(c - 2, grid, columns, rows, BLOCK_M, BLOCK_N, GROUP)
            owner = _owner_in(c - 2, WORLD_SIZE)
            if there & (owner != rank):
                slot = _slots_in(c - 2, grid, WORLD_SIZE) + owner
                copy_slot(
                    out, panels + gather + slot * (SLOT * 16), m, packets, row, column, BLOCK_N, OUT, SLOT, COPY
                )  # fmt: skip
        if c <= rounds:
            arrive(local, q0, q1, q2, q3, q4, q5, q6, rank, base + c + 1, WORLD_SIZE)
    write_counter(local, base + rounds + 1, EPOCH_OFFSET)


def _request(problem: Problem, config: Config) -> CompileRequest:
    return slot_request(gemm_two_shot_rolling_kernel, problem, config, COPY=128 * int(config["num_warps"]))


def _requests(problem: Problem, config: Config) -> Iterable[Any]:
    return (_request(problem, config),)


def _bind(problem: Problem, config: Config, workspace: Workspace) -> Launch:
    gather, rounds = scattered_bytes(problem, config), rounds_of(problem, config)
    return bind_slots(problem, config, workspace, _request(problem, config), 2 * gather, gather, rounds)


TWO_SHOT_ROLLING = register_variant(
    replace(
        TWO_SHOT,
        name="two_shot_rolling",
        summary="one persistent kernel: each tile scattered, summed and gathered beside the block's next two",
        bind=_bind,
        kernels=(gemm_two_shot_rolling_kernel,),
        compile_requests=_requests,
    )
)
