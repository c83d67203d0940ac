"""reduce_add: one persistent GEMM whose tiles are added, in fp32 and as they come, to a sum in their owner's panels.

Tiles are walked as in push_reduce. Those of other ranks' shards go to the owner by relaxed fp32 reductions (16 bytes
each); the block that comes last to a chunk's counter raises the owner's flag. A tile of the own shard waits for the
peers' flags, takes the sum from memory and goes to the result. So only one matrix of a shard's size is kept, and it is
read once.

The sum is zeroed at the start of a call, before the begin tells the peers that they may write.

Waits end, as in push_reduce. Numerics: unordered, but with a single rounding. Graph-safe.
Source: GEMM + reduce-scatter kernels that reduce in the owner's memory.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import triton
import triton.language as tl

from tunedcomm.kernels.common.copies import copies_of
from tunedcomm.kernels.common.feasibility import Launch, closest
from tunedcomm.kernels.common.lane import address_of
from tunedcomm.kernels.common.launch import CompileRequest, ManyLaunch
from tunedcomm.kernels.gemm.panels import (
    announce_to,
    await_chunk_of_all,
    begin_panels_kernel,
    bind_begin,
    call_number,
    is_last,
)
from tunedcomm.kernels.gemm.rs import DATA, add_tile, finish_added, partial_tile, place_of
from tunedcomm.kernels.gemm.rs_common import (
    GRID_AXES,
    addresses,
    bind_gemm,
    gemm_request,
    grid_of,
    pieces_of,
    refuse,
    refuse_gemm_kernel,
    requests_with_begin,
    rows_of,
    usual_wish,
)
from tunedcomm.kernels.gemm.tiles import matrix, operand_b
from tunedcomm.kernels.gemm.variant import tile_space
from tunedcomm.space import Config, Value
from tunedcomm.spec import Limits, Problem, Variant, register_variant

if TYPE_CHECKING:
    from tunedcomm.symm.workspace import Workspace

__all__ = ["REDUCE_ADD", "reduce_add_kernel"]

_SUM_ITEMSIZE = 4


@triton.jit
def reduce_add_kernel(
    a, b, scale_a, scale_b, out, m, n, depth, panels, p0, p1, p2, p3, p4, p5, p6, rank, timeout_ns, status, slot_bytes,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr, NK: tl.constexpr,
    DTYPE: tl.constexpr, OUT: tl.constexpr, SCALING: tl.constexpr, WORLD_SIZE: tl.constexpr, CHUNKS: tl.constexpr,
    AVG: tl.constexpr, ALIGNED: tl.constexpr, PIECES: tl.constexpr,
):  # fmt: skip
    """See the module's text."""
    peers = (p0, p1, p2, p3, p4, p5, p6)
    number = call_number(panels)
    rows = (m // WORLD_SIZE).to(tl.int32)
    tile_rows, tile_columns = tl.cdiv(rows, BLOCK_M), tl.cdiv(n, BLOCK_N).to(tl.int32)
    shard = tile_rows * tile_columns
    x = matrix(a, m, depth, BLOCK_M, BLOCK_K, DTYPE)
    y = operand_b(b, depth, n, BLOCK_N, BLOCK_K, NK, DTYPE)
    for tile in tl.range(tl.program_id(0), shard * WORLD_SIZE, tl.num_programs(0)):
        step = tile // shard
        owner = ((rank + 1 + step) % WORLD_SIZE).to(tl.int32)
        chunk, tile_row, tile_column, count = place_of(tile - step * shard, tile_rows, tile_columns, CHUNKS, GROUP)
        row, column = tile_row * BLOCK_M, tile_column * BLOCK_N
        total = partial_tile(
            x, y, scale_a, scale_b, owner * rows + row, column, m, n, depth, BLOCK_M, BLOCK_N, BLOCK_K, NK, SCALING
        )  # fmt: skip
        if step < WORLD_SIZE - 1:
            target = address_of(peers, panels, owner, rank, WORLD_SIZE)
            add_tile(target + DATA, total, row, column, rows, n, BLOCK_M, BLOCK_N, ALIGNED)
            if is_last(panels, step * CHUNKS + chunk, count):
                announce_to(target, rank, chunk, number)
        else:
            await_chunk_of_all(panels, chunk, rank, number, timeout_ns, status, WORLD_SIZE)
            finish_added(
                total, panels, out, row, column, rows, n, BLOCK_M, BLOCK_N, PIECES, OUT, WORLD_SIZE, AVG, ALIGNED
            )  # fmt: skip


_SPACE = tile_space(**GRID_AXES)


def _sum_bytes(problem: Problem) -> int:
    return rows_of(problem) * problem.shape[1] * _SUM_ITEMSIZE


def _infeasible(problem: Problem, config: Config, limits: Limits) -> str | None:
    return refuse(problem, limits, slots=1, bytes_each=_sum_bytes(problem), descriptors=True) or refuse_gemm_kernel(
        problem, config, limits
    )


def _default(problem: Problem, limits: Limits) -> dict[str, Value]:
    return closest(usual_wish(problem, limits), _SPACE, problem, limits, _infeasible)


def _request(problem: Problem, config: Config) -> CompileRequest:
    return gemm_request(reduce_add_kernel, problem, config, PIECES=pieces_of(config, _SUM_ITEMSIZE))


def _requests(problem: Problem, config: Config) -> Iterable[Any]:
    return requests_with_begin(problem, _request(problem, config))


def _bind(problem: Problem, config: Config, workspace: Workspace) -> Launch:
    panels = workspace.panels(problem.mode, _sum_bytes(problem))
    begin, copies = bind_begin(problem, workspace, panels), copies_of(workspace, problem.mode)
    gemm = bind_gemm(problem, workspace, panels, _request(problem, config), grid_of(problem, config))
    words = _sum_bytes(problem) // 4

    def by_address(stream: int, *given: int) -> None:
        copies.clear(stream, panels.data, words)
        begin(stream)
        gemm(stream, *given)

    return ManyLaunch(by_address, addresses(problem))


REDUCE_ADD = register_variant(
    Variant(
        op="gemm_rs",
        name="reduce_add",
        numerics="unordered",
        summary="one persistent GEMM that adds its tiles to a sum in their owners' memory, in any order",
        space=_SPACE,
        infeasible=_infeasible,
        default=_default,
        bind=_bind,
        num_blocks=grid_of,
        kernels=(begin_panels_kernel, reduce_add_kernel),
        compile_requests=_requests,
    )
)
