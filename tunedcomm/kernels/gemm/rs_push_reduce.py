"""push_reduce: one persistent GEMM whose tiles go straight to their owners, the own rows last and with the sums.

Tiles are walked shard by shard, rank + 1's first and the own last, each shard chunk by chunk (`chunks` groups of tile
rows). A tile of another rank's shard is rounded and stored into this rank's slot of the owner's panels; the block that
comes last to a chunk's counter raises the owner's flag of that chunk. A tile of the own shard stays in the accumulator
until the peers' flags of its chunk are up; then their partial results are added to it, and the sum goes to the result.
There is no other pass. With `late` a block comes to a tile's counter only when its next product is made: what it stored
to the peer has arrived by then, and it does not stand still for that.

Waits end: all blocks are resident, and every block does and counts all its tiles for others before it waits for its
first own one, so that each rank's flags go up whether or not the peers' have. The peers' slots may be overwritten from
the next call's begin on, which comes after this kernel in stream order.

`epilogue` says how the peers' partial results are read: through descriptors, three on their way at once, or by plain
loads.

Numerics: ordered. Graph-safe: flags hold call numbers, counters end at 0.
Source: fused GEMM + reduce-scatter kernels with an owner-last order, whose separate reduce pass this one has not.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import triton
import triton.language as tl

from tunedcomm.kernels.common.feasibility import Launch, closest
from tunedcomm.kernels.common.lane import address_of
from tunedcomm.kernels.common.launch import CompileRequest
from tunedcomm.kernels.gemm.panels import announce_to, begin_panels_kernel, call_number, is_last
from tunedcomm.kernels.gemm.rs import DATA, finish_tile, partial_tile, place_of, staged_matrix, store_rounded
from tunedcomm.kernels.gemm.rs_common import (
    EPILOGUE_AXES,
    bind_one_kernel,
    epilogue_constants,
    gemm_request,
    grid_of,
    refuse,
    refuse_epilogue,
    refuse_gemm_kernel,
    requests_with_begin,
    slot_bytes,
    usual_wish,
)
from tunedcomm.kernels.gemm.tiles import matrix, operand_b
from tunedcomm.kernels.gemm.variant import tile_space
from tunedcomm.space import Choice, Config, Value
from tunedcomm.spec import Limits, Problem, Variant, register_variant

if TYPE_CHECKING:
    from tunedcomm.symm.workspace import Workspace

__all__ = ["PUSH_REDUCE", "push_reduce_kernel"]


@triton.jit
def _count(panels, peers, rank, step, chunk, tiles, number, CHUNKS: tl.constexpr, WORLD_SIZE: tl.constexpr):
    """Count a tile of the chunk that goes to rank + 1 + step, and tell that rank of the last one."""
    if is_last(panels, step * CHUNKS + chunk, tiles):
        owner = ((rank + 1 + step) % WORLD_SIZE).to(tl.int32)
        announce_to(address_of(peers, panels, owner, rank, WORLD_SIZE), rank, chunk, number)


@triton.jit
def push_reduce_kernel(
    a, b, scale_a, scale_b, out, m, n, depth, panels, p0, p1, p2, p3, p4, p5, p6, rank, timeout_ns, status, slot_bytes,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr, NK: tl.constexpr,
    DTYPE: tl.constexpr, OUT: tl.constexpr, SCALING: tl.constexpr, WORLD_SIZE: tl.constexpr, CHUNKS: tl.constexpr,
    AVG: tl.constexpr, ALIGNED: tl.constexpr, PIECES: tl.constexpr, DESCRIPTOR: tl.constexpr, LATE: tl.constexpr,
):  # fmt: skip
    """See the module's text."""
    peers = (p0, p1, p2, p3, p4, p5, p6)
    number = call_number(panels)
    rows = (m // WORLD_SIZE).to(tl.int32)
    tile_rows, tile_columns = tl.cdiv(rows, BLOCK_M), tl.cdiv(n, BLOCK_N).to(tl.int32)
    shard = tile_rows * tile_columns
    x = matrix(a, m, depth, BLOCK_M, BLOCK_K, DTYPE)
    y = operand_b(b, depth, n, BLOCK_N, BLOCK_K, NK, DTYPE)
    staged = staged_matrix(panels, rows, n, BLOCK_M, BLOCK_N // PIECES, OUT, WORLD_SIZE, DESCRIPTOR)
    due = tl.program_id(0) * 0  # tiles stored, but not counted
    last_step, last_chunk, last_count = due, due, due
    for tile in tl.range(tl.program_id(0), shard * WORLD_SIZE, tl.num_programs(0)):
        step = tile // shard
        owner = ((rank + 1 + step) % WORLD_SIZE).to(tl.int32)
        chunk, tile_row, tile_column, count = place_of(tile - step * shard, tile_rows, tile_columns, CHUNKS, GROUP)
        row, column = tile_row * BLOCK_M, tile_column * BLOCK_N
        total = partial_tile(
            x, y, scale_a, scale_b, owner * rows + row, column, m, n, depth, BLOCK_M, BLOCK_N, BLOCK_K, NK, SCALING
        )  # fmt: skip
        if LATE:  # noqa: SIM102 - the compiler's choice, then the GPU's
            if due > 0:
                _count(panels, peers, rank, last_step, last_chunk, last_count, number, CHUNKS, WORLD_SIZE)
                due -= 1
        if step < WORLD_SIZE - 1:
            target = address_of(peers, panels, owner, rank, WORLD_SIZE)
            slot = target + DATA + rank * slot_bytes
            store_rounded(slot, total, row, column, rows, n, BLOCK_M, BLOCK_N, OUT, ALIGNED)
            if LATE:
                due, last_step, last_chunk, last_count = due + 1, step, chunk, count
            else:
                _count(panels, peers, rank, step, chunk, count, number, CHUNKS, WORLD_SIZE)
        else:
            finish_tile(
                total, staged, panels, slot_bytes, out, rank, row, column, rows, n, chunk, number, timeout_ns, status,
                BLOCK_M, BLOCK_N, PIECES, OUT, WORLD_SIZE, DESCRIPTOR, AVG, ALIGNED,
            )  # fmt: skip
    if LATE:  # noqa: SIM102
        if due > 0:
            _count(panels, peers, rank, last_step, last_chunk, last_count, number, CHUNKS, WORLD_SIZE)


_SPACE = tile_space(**EPILOGUE_AXES, late=Choice(False, True))


def _infeasible(problem: Problem, config: Config, limits: Limits) -> str | None:
    return (
        refuse(problem, limits, descriptors=True)
        or refuse_gemm_kernel(problem, config, limits)
        or refuse_epilogue(problem, config, limits)
    )


def _default(problem: Problem, limits: Limits) -> dict[str, Value]:
    return closest({**usual_wish(problem, limits), "late": False}, _SPACE, problem, limits, _infeasible)


def _request(problem: Problem, config: Config) -> CompileRequest:
    constants = {**epilogue_constants(problem, config), "LATE": bool(config["late"])}
    return gemm_request(push_reduce_kernel, problem, config, **constants)


def _requests(problem: Problem, config: Config) -> Iterable[Any]:
    return requests_with_begin(problem, _request(problem, config))


def _bind(problem: Problem, config: Config, workspace: Workspace) -> Launch:
    room = problem.world_size * slot_bytes(problem)
    return bind_one_kernel(problem, workspace, _request(problem, config), grid_of(problem, config), room)


PUSH_REDUCE = register_variant(
    Variant(
        op="gemm_rs",
        name="push_reduce",
        numerics="ordered",
        summary="one persistent GEMM that stores tiles to their owners and sums the own rows in its last tiles",
        space=_SPACE,
        infeasible=_infeasible,
        default=_default,
        bind=_bind,
        num_blocks=grid_of,
        kernels=(begin_panels_kernel, push_reduce_kernel),
        compile_requests=_requests,
    )
)
