"""multimem: a persistent GEMM whose tiles are left in the own panels; the switch sums each for its owner, and gathers.

Tiles are dealt out as in `two_shot`: the i-th tile of block b belongs to rank i mod n, a chunk is n of them. In round c
block b

- computes chunk c and stores the tiles, rounded, in the own panels;
- loads its own tile of chunk c − 1, summed over all ranks, with `multimem.ld_reduce`, adds the bias, and stores it to
  the output and, with `multimem.st`, into the panels of all ranks;
- copies the peers' tiles of chunk c − 2 from the own panels to the output.

Flags and steps are those of `two_shot`. Every slot of partial tiles is written once in a call by its own rank, every
slot of sums by the tile's owner, both after the first flags of the call (see `_slots`); the peers that read a rank's
partial tiles end their call after that.

Numerics: library (each element is summed once, so all ranks get the same bits, in an order that is the switch's).
Graph-safe: the epochs live in the lane. Refused where the fabric reports no multicast.
Source: NVLink SHARP as PyTorch's multimem operators use it, fed by the GEMM tile by tile.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import triton
import triton.language as tl

from tunedcomm.kernels.common.feasibility import Launch, closest, kernel_blocks, refuse_multicast
from tunedcomm.kernels.common.lane import EPOCH_OFFSET, arrive, await_peers_together, read_counter, write_counter
from tunedcomm.kernels.common.launch import CompileRequest
from tunedcomm.kernels.common.packets import add_extras, load_reduce, store_all
from tunedcomm.kernels.common.sync import load_packets, store_packets
from tunedcomm.kernels.gemm.ar import (
    bind_slots,
    copy_slot,
    packets_in,
    refuse_slots,
    rounds_of,
    slot_bytes,
    slot_request,
    slot_space,
    slot_wish,
    store_slot,
)
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

__all__ = ["MULTIMEM", "gemm_multimem_kernel"]


@triton.jit
def _sum_tile(
    bias, out, m, packets, panels, peers, multicast, place, gather, row, column,
    BLOCK_N: tl.constexpr, OUT: tl.constexpr, WORLD_SIZE: tl.constexpr, BIAS: tl.constexpr, SLOT: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Sum the tile that lies `place` bytes into every rank's panels; store it here, and `gather` further there."""
    lanes = tl.arange(0, BLOCK).to(tl.int64)
    for start in tl.range(0, SLOT, BLOCK):
        at = start + lanes
        c, packet, here = packets_in(at, row, column, m, packets, BLOCK_N, OUT)
        here = here & (at < SLOT)
        s = load_reduce(multicast, peers, panels, place + at * 16, here, OUT, WORLD_SIZE)
        if BIAS:
            b = load_packets(bias + c * 16, here)
            s = add_extras(s, b, b, OUT, True, False)
        store_packets(out + packet * 16, s[0], s[1], s[2], s[3], here)
        store_all(multicast, peers, panels, place + gather + at * 16, s[0], s[1], s[2], s[3], here, WORLD_SIZE)


@triton.jit
def gemm_multimem_kernel(
    a, b, bias, scale_a, scale_b, out, m, n, k, local, q0, q1, q2, q3, q4, q5, q6, rank, timeout_ns, status,
    panels, p0, p1, p2, p3, p4, p5, p6, multicast, gather, chunks,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr, NK: tl.constexpr,
    DTYPE: tl.constexpr, OUT: tl.constexpr, SCALING: tl.constexpr, WORLD_SIZE: tl.constexpr, BIAS: tl.constexpr,
    BLOCK: tl.constexpr, COPY: tl.constexpr,
):  # fmt: skip
    """See the module's text. A tile's slot is that of its number; its sum lies `gather` bytes further."""
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
                tile = block + (c * WORLD_SIZE + s) * grid
                if tile < rows * columns:
                    down, across = tile_of(tile, rows, columns, GROUP)
                    row, column = (down * BLOCK_M).to(tl.int32), (across * BLOCK_N).to(tl.int32)
                    total = tile_product(x, y, row, column, k, BLOCK_M, BLOCK_N, BLOCK_K, NK)
                    total = scaled(total, scale_a, scale_b, row, column, m, n, SCALING, BLOCK_M, BLOCK_N)
                    if c == 0:
                        await_peers_together(local, rank, base, timeout_ns, status, WORLD_SIZE)
                    store_slot(panels + tile * (SLOT * 16), total, BLOCK_M, BLOCK_N, OUT)
            arrive(local, q0, q1, q2, q3, q4, q5, q6, rank, base + tl.maximum(1, 2 * c), WORLD_SIZE)
        if (c >= 1) & (c <= chunks):
            d = c - 1
            await_peers_together(local, rank, base + tl.maximum(1, 2 * d), timeout_ns, status, WORLD_SIZE)
            tile = block + (d * WORLD_SIZE + rank) * grid
            if tile < rows * columns:
                down, across = tile_of(tile, rows, columns, GROUP)
                _sum_tile(
                    bias, out, m, packets, panels, peers, multicast, tile * (SLOT * 16), gather,
                    down * BLOCK_M, across * BLOCK_N, BLOCK_N, OUT, WORLD_SIZE, BIAS, SLOT, BLOCK,
                )  # fmt: skip
            summed = base + tl.minimum(2 * d + 3, 2 * chunks)
            arrive(local, q0, q1, q2, q3, q4, q5, q6, rank, summed, WORLD_SIZE)
        if c >= 2:
            e = c - 2
            await_peers_together(local, rank, base + tl.minimum(2 * e + 3, 2 * chunks), timeout_ns, status, WORLD_SIZE)
            for s in tl.range(0, WORLD_SIZE - 1):
                tile = block + (e * WORLD_SIZE + (rank + 1 + s) % WORLD_SIZE) * grid
                if tile < rows * columns:
                    down, across = tile_of(tile, rows, columns, GROUP)
                    copy_slot(
                        out, panels + gather + tile * (SLOT * 16), m, packets, down * BLOCK_M, across * BLOCK_N,
                        BLOCK_N, OUT, SLOT, COPY,
                    )  # fmt: skip
    write_counter(local, base + 2 * chunks, EPOCH_OFFSET)


_SPACE = slot_space()


def _gather(problem: Problem, config: Config) -> int:
    """Bytes of the slots for partial tiles, behind which the slots for sums lie."""
    return rounds_of(problem, config) * int(config["num_blocks"]) * slot_bytes(problem, config)


def _infeasible(problem: Problem, config: Config, limits: Limits) -> str | None:
    if reason := refuse_multicast(limits):
        return reason
    return refuse_slots(problem, config, limits, panel_bytes=2 * _gather(problem, config))


def _default(problem: Problem, limits: Limits) -> dict[str, Value]:
    return closest(slot_wish(problem, limits), _SPACE, problem, limits, _infeasible)


def _request(problem: Problem, config: Config) -> CompileRequest:
    return slot_request(gemm_multimem_kernel, problem, config, COPY=128 * int(config["num_warps"]))


def _requests(problem: Problem, config: Config) -> Iterable[Any]:
    return (_request(problem, config),)


def _bind(problem: Problem, config: Config, workspace: Workspace) -> Launch:
    gather, chunks = _gather(problem, config), -(-rounds_of(problem, config) // problem.world_size)
    request = _request(problem, config)
    return bind_slots(problem, config, workspace, request, 2 * gather, gather, chunks, multicast=True)


MULTIMEM = register_variant(
    Variant(
        op="gemm_ar",
        name="multimem",
        numerics="library",
        summary="one persistent kernel; the switch sums each tile for its owner and gathers it (NVLink multicast)",
        space=_SPACE,
        infeasible=_infeasible,
        default=_default,
        bind=_bind,
        num_blocks=kernel_blocks,
        num_rounds=rounds_of,
        kernels=(gemm_multimem_kernel,),
        compile_requests=_requests,
    )
)
