"""two_shot: one persistent kernel that multiplies, scatters tiles to their owners, sums, and gathers the sums.

The tiles of block b are b, b + G, b + 2G, … on every rank; the i-th of them belongs to rank i mod n. A chunk is n such
tiles, one for each owner. In round c block b

- computes chunk c, the tile of rank + 1 first and the own one last, and stores each tile, rounded, into this rank's
  slot in its owner's panels;
- sums the own tile of chunk c − 1 from its slots in rank order, adds the bias, stores the sum to the output and into
  all peers' panels;
- copies the peers' tiles of chunk c − 2 from the own panels to the output.

So partial tiles of one chunk travel while the next is computed, and so do sums. Flags in the lane's row b count a
block's steps as in all_reduce's `two_shot`: with C chunks, scattering chunk c is step max(1, 2c) and summing it
min(2c + 3, 2C). A block waits for the peers' blocks of its own number alone, for steps that these reach without waiting
for a later one of its own; all blocks are resident.

Every slot is written once in a call, by one rank, after the first flags of the call: see `_slots`.

Numerics: ordered (every element is summed once, by its tile's owner). Graph-safe: the epochs live in the lane.
Source: the two-shot scheme of serving stacks in a persistent GEMM, with owners dealt out tile by tile.
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
    copy_slot,
    packets_in,
    refuse_slots,
    rounds_of,
    scattered_bytes,
    slot_request,
    slot_space,
    slot_wish,
    store_slot,
    turns_of,
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

__all__ = ["TWO_SHOT", "gemm_two_shot_kernel"]


@triton.jit
def _sum_tile(
    bias, out, m, packets, panels, peers, gather, slot, row, column, rank,
    BLOCK_N: tl.constexpr, OUT: tl.constexpr, WORLD_SIZE: tl.constexpr, BIAS: tl.constexpr, SLOT: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Sum the tile whose partial ones are in the slots from `slot` on; store it here and into the peers' slots."""
    lanes = tl.arange(0, BLOCK).to(tl.int64)
    for start in tl.range(0, SLOT, BLOCK):
        at = start + lanes
        c, packet, here = packets_in(at, row, column, m, packets, BLOCK_N, OUT)
        here = here & (at < SLOT)
        words = ()
        for i in tl.static_range(WORLD_SIZE):
            words = words + load_packets(panels + (slot + i) * (SLOT * 16) + at * 16, here)
        s0, s1, s2, s3 = sum_and_bias(words, bias, c, here, OUT, BIAS, WORLD_SIZE)
        for i in tl.static_range(WORLD_SIZE - 1):
            store_packets(peers[i] + gather + (slot + rank) * (SLOT * 16) + at * 16, s0, s1, s2, s3, here)
        store_packets(out + packet * 16, s0, s1, s2, s3, here)


@triton.jit
def gemm_two_shot_kernel(
    a, b, bias, scale_a, scale_b, out, m, n, k, local, q0, q1, q2, q3, q4, q5, q6, rank, timeout_ns, status,
    panels, p0, p1, p2, p3, p4, p5, p6, gather, chunks,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr, NK: tl.constexpr,
    DTYPE: tl.constexpr, OUT: tl.constexpr, SCALING: tl.constexpr, WORLD_SIZE: tl.constexpr, BIAS: tl.constexpr,
    BLOCK: tl.constexpr, COPY: tl.constexpr,
):  # fmt: skip
    """See the module's text.

    Slot (c × grid + b) × n + r of the panels holds rank r's part of the own tile in chunk c of block b; that many bytes
    `gather` further lies what rank r summed, its own tile there.
    """
    peers = (p0, p1, p2, p3, p4, p5, p6)
    epoch = read_counter(local, EPOCH_OFFSET)
    arrive(local, q0, q1, q2, q3, q4, q5, q6, rank, epoch + 1, WORLD_SIZE)
    base = epoch + 1
    PER: tl.constexpr = 128 // element_type(OUT).primitive_bitwidth
    SLOT: tl.constexpr = BLOCK_M * BLOCK_N // PER
    packets = n // PER
    rows, columns = (m + BLOCK_M - 1) // BLOCK_M, (n + BLOCK_N - 1) // BLOCK_N
    grid = tl.num_programs(0).to(tl.int64)
    block = tl.program_id(0).to(tl.int64)
    x = matrix(a, m, k, BLOCK_M, BLOCK_K, DTYPE)
    y = operand_b(b, k, n, BLOCK_N, BLOCK_K, NK, DTYPE)

    for c in tl.range(0, chunks + 2):
        if c < chunks:
            for s in tl.range(0, WORLD_SIZE):
                owner = (rank + 1 + s) % WORLD_SIZE
                tile = block + (c * WORLD_SIZE + owner) * grid
                if tile < rows * columns:
                    down, across = tile_of(tile, rows, columns, GROUP)
                    row, column = (down * BLOCK_M).to(tl.int32), (across * BLOCK_N).to(tl.int32)
                    total = tile_product(x, y, row, column, k, BLOCK_M, BLOCK_N, BLOCK_K, NK)
                    total = scaled(total, scale_a, scale_b, row, column, m, n, SCALING, BLOCK_M, BLOCK_N)
                    if c == 0:
                        await_peers_together(local, rank, base, timeout_ns, status, WORLD_SIZE)
                    target = address_of(peers, panels, owner, rank, WORLD_SIZE)
                    slot = (c * grid + block) * WORLD_SIZE + rank
                    store_slot(target + slot * (SLOT * 16), total, BLOCK_M, BLOCK_N, OUT)
            arrive(local, q0, q1, q2, q3, q4, q5, q6, rank, base + tl.maximum(1, 2 * c), WORLD_SIZE)
        if (c >= 1) & (c <= chunks):
            d = c - 1
            await_peers_together(local, rank, base + tl.maximum(1, 2 * d), timeout_ns, status, WORLD_SIZE)
            tile = block + (d * WORLD_SIZE + rank) * grid
            if tile < rows * columns:
                down, across = tile_of(tile, rows, columns, GROUP)
                _sum_tile(
                    bias, out, m, packets, panels, peers, gather, (d * grid + block) * WORLD_SIZE,
                    down * BLOCK_M, across * BLOCK_N, rank, BLOCK_N, OUT, WORLD_SIZE, BIAS, SLOT, BLOCK,
                )  # fmt: skip
            summed = base + tl.minimum(2 * d + 3, 2 * chunks)
            arrive(local, q0, q1, q2, q3, q4, q5, q6, rank, summed, WORLD_SIZE)
        if c >= 2:
            e = c - 2
            await_peers_together(local, rank, base + tl.minimum(2 * e + 3, 2 * chunks), timeout_ns, status, WORLD_SIZE)
            for s in tl.range(0, WORLD_SIZE - 1):
                owner = (rank + 1 + s) % WORLD_SIZE
                tile = block + (e * WORLD_SIZE + owner) * grid
                if tile < rows * columns:
                    down, across = tile_of(tile, rows, columns, GROUP)
                    slot = (e * grid + block) * WORLD_SIZE + owner
                    copy_slot(
                        out, panels + gather + slot * (SLOT * 16), m, packets, down * BLOCK_M, across * BLOCK_N,
                        BLOCK_N, OUT, SLOT, COPY,
                    )  # fmt: skip
    write_counter(local, base + 2 * chunks, EPOCH_OFFSET)


_SPACE = slot_space()


def _infeasible(problem: Problem, config: Config, limits: Limits) -> str | None:
    return refuse_slots(problem, config, limits, panel_bytes=2 * scattered_bytes(problem, config))


def _default(problem: Problem, limits: Limits) -> dict[str, Value]:
    return closest(slot_wish(problem, limits), _SPACE, problem, limits, _infeasible)


def _request(problem: Problem, config: Config) -> CompileRequest:
    return slot_request(gemm_two_shot_kernel, problem, config, COPY=128 * int(config["num_warps"]))


def _requests(problem: Problem, config: Config) -> Iterable[Any]:
    return (_request(problem, config),)


def _bind(problem: Problem, config: Config, workspace: Workspace) -> Launch:
    gather, chunks = scattered_bytes(problem, config), turns_of(problem, config)
    return bind_slots(problem, config, workspace, _request(problem, config), 2 * gather, gather, chunks)


TWO_SHOT = register_variant(
    Variant(
        op="gemm_ar",
        name="two_shot",
        numerics="ordered",
        summary="one persistent kernel: products scattered to the tiles' owners, summed, and the sums gathered",
        space=_SPACE,
        infeasible=_infeasible,
        default=_default,
        bind=_bind,
        num_blocks=kernel_blocks,
        num_rounds=rounds_of,
        kernels=(gemm_two_shot_kernel,),
        compile_requests=_requests,
    )
)
