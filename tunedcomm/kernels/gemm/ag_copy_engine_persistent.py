"""copy_engine_persistent: copy engines push the shards into the peers' panels; one GEMM kernel computes what is there.

A call begins with an exchange of flags, after which nobody reads the panels. Then the copy engines send this rank's
shard, chunk by chunk, to rank + 1, rank + 2, …, and each chunk's flag behind it (see `_push`), while one kernel works
through the queue of all shards' tiles, the own shard first (see `_queue`). A block waits for the flag of the chunk that
its tile needs; what it waits for needs no SM, and depends on nothing but the peer's beginning of the call. So no rank
waits in a circle, wherever the blocks run.

Every chunk is waited for by some tile, so all that peers push into this rank's panels is there when the kernel ends.

Numerics: ordered (nothing is summed over ranks; a tile's products are added in the order of the depth). Graph-safe.
Source: asynchronous tensor parallelism in PyTorch and fused all-gather GEMMs, with call numbers as progress signals.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import triton
import triton.language as tl

from tunedcomm.kernels.common.feasibility import Launch
from tunedcomm.kernels.common.launch import CompileRequest, bind_kernel
from tunedcomm.kernels.gemm.ag import num_queued, operands, queued_tile
from tunedcomm.kernels.gemm.ag_common import (
    closest_tiles,
    grid_of,
    is_packed,
    panel_bytes,
    queue_length,
    refuse_queue,
    rows_of,
    rows_of_chunk,
    scales_offset,
)
from tunedcomm.kernels.gemm.ag_push import make_gathered, make_pushes
from tunedcomm.kernels.gemm.op import wanted_of
from tunedcomm.kernels.gemm.panels import begin_panels_kernel, begin_request, bind_begin, call_number
from tunedcomm.kernels.gemm.variant import tile_request, tile_space, two_fit
from tunedcomm.space import Choice, Config, Value
from tunedcomm.spec import Limits, Problem, Variant, register_variant

if TYPE_CHECKING:
    from tunedcomm.symm.workspace import Workspace

__all__ = ["COPY_ENGINE_PERSISTENT", "queue_kernel"]

_SHARED_BYTES = 227 * 1024  # of an SM
_REGISTER_BYTES = 256 * 1024


@triton.jit
def queue_kernel(
    a, b, out, scale_a, scale_b, panels, scales, rows, columns, depth, chunk_rows, rank, timeout_ns, status,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr, NK: tl.constexpr,
    DTYPE: tl.constexpr, OUT: tl.constexpr, SCALING: tl.constexpr, WORLD_SIZE: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """Every block takes one of so many tiles as there are blocks."""
    number = call_number(panels)
    own, gathered, y = operands(
        a, b, panels, rows, columns, depth, BLOCK_M, BLOCK_N, BLOCK_K, NK, DTYPE, WORLD_SIZE
    )  # fmt: skip
    count = num_queued(rows, columns, BLOCK_M, BLOCK_N, WORLD_SIZE)
    for index in tl.range(tl.program_id(0), count, tl.num_programs(0)):
        queued_tile(
            index, own, gathered, y, out, scale_a, scale_b, panels, scales, number, rows, columns, depth, chunk_rows,
            rank, timeout_ns, status, BLOCK_M, BLOCK_N, BLOCK_K, GROUP, NK, DTYPE, OUT, SCALING, WORLD_SIZE, PACKED,
        )  # fmt: skip


_SPACE = tile_space(blocks_per_sm=Choice(1, 2), chunks=Choice(1, 2, 4), streams=Choice(1, 2, 3))


def _infeasible(problem: Problem, config: Config, limits: Limits) -> str | None:
    if reason := refuse_queue(problem, config, limits):
        return reason
    if int(config["streams"]) > problem.world_size - 1:
        return f"{config['streams']} streams, but only {problem.world_size - 1} peers to copy to"
    if config["blocks_per_sm"] == 1:
        return None
    if limits.backend == "host" or queue_length(problem, config) <= limits.num_sms:
        return "there is no tile for a second block on an SM"
    if not two_fit(problem, config):
        return "two blocks with such tiles do not fit on an SM"
    return None


def _default(problem: Problem, limits: Limits) -> dict[str, Value]:
    rest: dict[str, Value] = {"blocks_per_sm": 1, "chunks": 1, "streams": 1}
    return closest_tiles(problem, limits, rest, _infeasible)


def _request(problem: Problem, config: Config) -> CompileRequest:
    return tile_request(queue_kernel, problem, config, PACKED=is_packed(problem))


def _requests(problem: Problem, config: Config) -> Iterable[Any]:
    return (begin_request(problem.world_size), _request(problem, config))


def _bind(problem: Problem, config: Config, workspace: Workspace) -> Launch:
    panels = workspace.panels(problem.mode, panel_bytes(problem))
    rows, (_, n, k) = rows_of(problem), problem.shape
    chunk_rows = rows_of_chunk(problem, int(config["chunks"]), int(config["block_m"]))
    begin = bind_begin(problem, workspace, panels)
    grid = grid_of(workspace.device, queue_length(problem, config), int(config["blocks_per_sm"]))
    waits = (workspace.rank, workspace.timeout_ns, workspace.status_argument(problem))
    fixed = (panels.local, panels.local + scales_offset(problem), rows, n, k, chunk_rows, *waits)
    multiply = bind_kernel(_request(problem, config), grid, workspace.device).fix((*(None,) * 5, *fixed))
    pushes = make_pushes(problem, workspace, panels, num_streams=int(config["streams"]), chunk_rows=chunk_rows)
    gathered = make_gathered(problem, workspace, panels) if wanted_of(problem).gathered else None

    def run(inputs: tuple[Any, ...], outputs: tuple[Any, ...], stream: int) -> None:
        a = inputs[0].data_ptr()
        scale_a, scale_b = (inputs[2].data_ptr(), inputs[3].data_ptr()) if problem.scaling else (0, 0)
        begin(stream)
        pushes.begin(stream, a, scale_a)
        if gathered is not None:
            gathered.begin(stream, a, outputs[1].data_ptr())
        multiply(stream, a, inputs[1].data_ptr(), outputs[0].data_ptr(), scale_a, scale_b)
        if gathered is not None:
            gathered.end(stream, outputs[1].data_ptr())
        pushes.end(stream)

    return run


COPY_ENGINE_PERSISTENT = register_variant(
    Variant(
        op="ag_gemm",
        name="copy_engine_persistent",
        numerics="ordered",
        summary="copy engines push shards and their flags; one persistent GEMM takes tiles in the order of arrival",
        space=_SPACE,
        infeasible=_infeasible,
        default=_default,
        bind=_bind,
        num_blocks=lambda problem, config: -1,  # as many as there are SMs
        kernels=(begin_panels_kernel, queue_kernel),
        compile_requests=_requests,
    )
)
