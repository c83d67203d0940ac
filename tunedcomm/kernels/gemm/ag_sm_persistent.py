"""sm_persistent: one kernel whose first blocks push the shard to the peers, while all others work through the tiles.

As copy_engine_persistent, but what crosses the links is sent by `comm_blocks` blocks of the GEMM kernel itself (see
`_send`), in the order in which the peers want it. Tiles are handed out by a counter, in the order of the queue (see
`_queue`), so blocks that have sent everything take tiles too. The last block to leave sets the counter back.

No rank waits in a circle: blocks that send wait for nothing before they have sent, and the first blocks of a grid that
fits on the GPU are there when the others are.

Numerics: ordered (nothing is summed over ranks; a tile's bits do not depend on who computes it, or when). Graph-safe.
Source: fused all-gather GEMMs that give some SMs to communication (FLUX, Triton-distributed).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import triton
import triton.language as tl

from tunedcomm.kernels.common.feasibility import Launch
from tunedcomm.kernels.common.launch import CompileRequest, bind_kernel
from tunedcomm.kernels.gemm.ag import num_queued, operands, put_back, queued_tile, take
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
from tunedcomm.kernels.gemm.ag_push import make_gathered
from tunedcomm.kernels.gemm.ag_send import send_shard
from tunedcomm.kernels.gemm.op import wanted_of
from tunedcomm.kernels.gemm.panels import begin_panels_kernel, begin_request, bind_begin, call_number, is_last
from tunedcomm.kernels.gemm.variant import tile_request, tile_space
from tunedcomm.space import Choice, Config, Value
from tunedcomm.spec import ITEMSIZE, Limits, Problem, Variant, register_variant

if TYPE_CHECKING:
    from tunedcomm.symm.workspace import Workspace

__all__ = ["SM_PERSISTENT", "sending_kernel"]

_TAKEN, _LEFT = tl.constexpr(0), tl.constexpr(1)  # counters
_LEAST_BYTES = 64 * 1024  # that a block should have to send


@triton.jit
def sending_kernel(
    a, b, out, scale_a, scale_b, panels, p0, p1, p2, p3, p4, p5, p6, scales, rows, columns, depth, chunk_rows,
    num_senders, rank, timeout_ns, status,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr, NK: tl.constexpr,
    DTYPE: tl.constexpr, OUT: tl.constexpr, SCALING: tl.constexpr, WORLD_SIZE: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """Send if it is this block's part, then take tiles until there are none."""
    number = call_number(panels)
    if tl.program_id(0) < num_senders:
        send_shard(
            a, scale_a, panels, p0, p1, p2, p3, p4, p5, p6, scales, number, rows, depth, chunk_rows, num_senders, rank,
            DTYPE, SCALING, WORLD_SIZE,
        )  # fmt: skip
    own, gathered, y = operands(
        a, b, panels, rows, columns, depth, BLOCK_M, BLOCK_N, BLOCK_K, NK, DTYPE, WORLD_SIZE
    )  # fmt: skip
    count = num_queued(rows, columns, BLOCK_M, BLOCK_N, WORLD_SIZE)
    index = take(panels, _TAKEN)
    while index < count:
        queued_tile(
            index, own, gathered, y, out, scale_a, scale_b, panels, panels + scales, number, rows, columns, depth,
            chunk_rows, rank, timeout_ns, status,
            BLOCK_M, BLOCK_N, BLOCK_K, GROUP, NK, DTYPE, OUT, SCALING, WORLD_SIZE, PACKED,
        )  # fmt: skip
        index = take(panels, _TAKEN)
    if is_last(panels, _LEFT, tl.num_programs(0)):
        put_back(panels, _TAKEN)


_SPACE = tile_space(comm_blocks=Choice(1, 2, 4, 8, 16, 32), chunks=Choice(1, 2, 4))


def _infeasible(problem: Problem, config: Config, limits: Limits) -> str | None:
    if reason := refuse_queue(problem, config, limits):
        return reason
    senders = int(config["comm_blocks"])
    if limits.backend == "host":
        return None if senders == 1 else "interpreted blocks run one after another: only comm_blocks=1"
    if senders == 1:
        return "one block cannot keep a link busy"
    if senders > limits.num_sms // 2:
        return f"{senders} of {limits.num_sms} SMs leave too few for the products"
    shard = rows_of(problem) * problem.shape[2] * ITEMSIZE[problem.dtype]
    if senders > 2 and shard < senders * _LEAST_BYTES:
        return f"{shard} bytes are too few for {senders} blocks to send"
    return None


def _default(problem: Problem, limits: Limits) -> dict[str, Value]:
    senders: list[Value] = [1] if limits.backend == "host" else [16, 8, 4, 2]
    found: dict[str, Value] = {}
    for count in senders:
        found = closest_tiles(problem, limits, {"comm_blocks": count, "chunks": 1}, _infeasible)
        if _infeasible(problem, found, limits) is None:
            break
    return found


def _request(problem: Problem, config: Config) -> CompileRequest:
    return tile_request(sending_kernel, problem, config, PACKED=is_packed(problem))


def _requests(problem: Problem, config: Config) -> Iterable[Any]:
    return (begin_request(problem.world_size), _request(problem, config))


def _bind(problem: Problem, config: Config, workspace: Workspace) -> Launch:
    panels = workspace.panels(problem.mode, panel_bytes(problem))
    rows, (_, n, k), senders = rows_of(problem), problem.shape, int(config["comm_blocks"])
    chunk_rows = rows_of_chunk(problem, int(config["chunks"]), int(config["block_m"]))
    begin = bind_begin(problem, workspace, panels)
    grid = grid_of(workspace.device, queue_length(problem, config) + senders)
    waits = (workspace.rank, workspace.timeout_ns, workspace.status_argument(problem))
    fixed = (panels.local, *panels.peers, scales_offset(problem), rows, n, k, chunk_rows, senders, *waits)
    multiply = bind_kernel(_request(problem, config), grid, workspace.device).fix((*(None,) * 5, *fixed))
    gathered = make_gathered(problem, workspace, panels) if wanted_of(problem).gathered else None

    def run(inputs: tuple[Any, ...], outputs: tuple[Any, ...], stream: int) -> None:
        a = inputs[0].data_ptr()
        scales = (inputs[2].data_ptr(), inputs[3].data_ptr()) if problem.scaling else (0, 0)
        begin(stream)
        if gathered is not None:
            gathered.begin(stream, a, outputs[1].data_ptr())
        multiply(stream, a, inputs[1].data_ptr(), outputs[0].data_ptr(), *scales)
        if gathered is not None:
            gathered.end(stream, outputs[1].data_ptr())

    return run


SM_PERSISTENT = register_variant(
    Variant(
        op="ag_gemm",
        name="sm_persistent",
        numerics="ordered",
        summary="one persistent GEMM, of which some blocks push the shards first",
        space=_SPACE,
        infeasible=_infeasible,
        default=_default,
        bind=_bind,
        num_blocks=lambda problem, config: -1,  # as many as there are SMs
        kernels=(begin_panels_kernel, sending_kernel),
        compile_requests=_requests,
    )
)
