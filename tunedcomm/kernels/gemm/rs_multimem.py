"""multimem: one persistent GEMM into own panels; then the switch sums the own rows of all ranks' panels.

Tiles are walked as in push_reduce and stored into this rank's slot of that owner in its own panels, those of the own
shard too. The block that comes last to a chunk raises its flag at the owner, be it this rank. When a block has no tiles
left it waits for the flags of all ranks chunk by chunk and loads sums of the own rows with `multimem.ld_reduce`.

The end: the block that is the last to have read raises a further flag at all peers and waits for theirs, for nobody may
write into panels that peers still read.

Waits end: all blocks are resident, and no tile waits for anything.

Numerics: library (each element is summed once, for its one owner, in an order that is the switch's). Graph-safe.
Refused where the fabric reports no multicast.
Source: NVLink SHARP as PyTorch's multimem operators use it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import triton
import triton.language as tl

from tunedcomm.kernels.common.feasibility import Launch, closest, refuse_multicast
from tunedcomm.kernels.common.lane import address_of
from tunedcomm.kernels.common.launch import CompileRequest, ManyLaunch
from tunedcomm.kernels.common.packets import load_reduce, mean_packets, num_packets, write_elements
from tunedcomm.kernels.gemm.panels import (
    announce,
    announce_to,
    await_chunk_of_all,
    begin_panels_kernel,
    bind_begin,
    call_number,
    is_last,
)
from tunedcomm.kernels.gemm.problem import out_itemsize
from tunedcomm.kernels.gemm.rs import DATA, partial_tile, place_of, store_rounded
from tunedcomm.kernels.gemm.rs_common import (
    GRID_AXES,
    addresses,
    bind_gemm,
    gemm_request,
    grid_of,
    refuse,
    refuse_gemm_kernel,
    requests_with_begin,
    slot_bytes,
    usual_wish,
    whole_packets,
)
from tunedcomm.kernels.gemm.tiles import matrix, operand_b
from tunedcomm.kernels.gemm.variant import tile_space
from tunedcomm.space import Config, Value
from tunedcomm.spec import Limits, Problem, Variant, register_variant

if TYPE_CHECKING:
    from tunedcomm.symm.workspace import Workspace

__all__ = ["MULTIMEM", "multimem_gemm_kernel"]


@triton.jit
def _load_sums(
    out, panels, peers, multicast, slot_bytes, rank, numel, span, number, timeout_ns, status,
    WORLD_SIZE: tl.constexpr, OUT: tl.constexpr, WIDTH: tl.constexpr, CHUNKS: tl.constexpr, AVG: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """The own rows' sums, chunks of `span` packets, as their flags go up."""
    total = num_packets(numel, WIDTH)
    lanes = tl.arange(0, BLOCK).to(tl.int64)
    step = tl.num_programs(0).to(tl.int64) * BLOCK
    for chunk in tl.static_range(CHUNKS):
        await_chunk_of_all(panels, chunk, -1, number, timeout_ns, status, WORLD_SIZE)
        end = tl.minimum(total, (chunk + 1) * span)
        for start in tl.range(chunk * span + tl.program_id(0).to(tl.int64) * BLOCK, end, step):
            packet = start + lanes
            here = packet < end
            sums = load_reduce(multicast, peers, panels, DATA + rank * slot_bytes + packet * 16, here, OUT, WORLD_SIZE)
            s0, s1, s2, s3 = mean_packets(sums, OUT, AVG, WORLD_SIZE)
            write_elements(out, packet, numel, s0, s1, s2, s3, here, WIDTH, True)


@triton.jit
def multimem_gemm_kernel(
    a, b, scale_a, scale_b, out, m, n, depth, panels, p0, p1, p2, p3, p4, p5, p6, rank, timeout_ns, status, slot_bytes,
    multicast,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr, NK: tl.constexpr,
    DTYPE: tl.constexpr, OUT: tl.constexpr, SCALING: tl.constexpr, WORLD_SIZE: tl.constexpr, CHUNKS: tl.constexpr,
    AVG: tl.constexpr, ALIGNED: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
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
        store_rounded(
            panels + DATA + owner * slot_bytes, total, row, column, rows, n, BLOCK_M, BLOCK_N, OUT, ALIGNED
        )  # fmt: skip
        if is_last(panels, step * CHUNKS + chunk, count):
            announce_to(address_of(peers, panels, owner, rank, WORLD_SIZE), rank, chunk, number)
    span = (tile_rows + CHUNKS - 1) // CHUNKS * BLOCK_M * n * WIDTH // 16
    if CHUNKS == 1:
        span = slot_bytes // 16
    _load_sums(
        out, panels, peers, multicast, slot_bytes, rank, rows * n, span, number, timeout_ns, status,
        WORLD_SIZE, OUT, WIDTH, CHUNKS, AVG, BLOCK,
    )  # fmt: skip
    if is_last(panels, WORLD_SIZE * CHUNKS, tl.num_programs(0)):
        announce(p0, p1, p2, p3, p4, p5, p6, rank, CHUNKS, number, WORLD_SIZE)
        await_chunk_of_all(panels, CHUNKS, rank, number, timeout_ns, status, WORLD_SIZE)


_SPACE = tile_space(**GRID_AXES)


def _infeasible(problem: Problem, config: Config, limits: Limits) -> str | None:
    if reason := refuse_multicast(limits) or refuse(problem, limits, descriptors=True):
        return reason
    if int(config["chunks"]) > 1 and not whole_packets(problem):
        return f"rows of {problem.shape[1]} results are no whole packets, so chunks would share some: only chunks=1"
    return refuse_gemm_kernel(problem, config, limits)


def _default(problem: Problem, limits: Limits) -> dict[str, Value]:
    return closest(usual_wish(problem, limits), _SPACE, problem, limits, _infeasible)


def _request(problem: Problem, config: Config) -> CompileRequest:
    own: dict[str, Value] = {"WIDTH": out_itemsize(problem), "BLOCK": 32 * int(config["num_warps"])}
    return gemm_request(multimem_gemm_kernel, problem, config, **own)


def _requests(problem: Problem, config: Config) -> Iterable[Any]:
    return requests_with_begin(problem, _request(problem, config))


def _bind(problem: Problem, config: Config, workspace: Workspace) -> Launch:
    panels = workspace.panels(problem.mode, problem.world_size * slot_bytes(problem))
    begin, request = bind_begin(problem, workspace, panels), _request(problem, config)
    gemm = bind_gemm(problem, workspace, panels, request, grid_of(problem, config), panels.multicast)

    def by_address(stream: int, *given: int) -> None:
        begin(stream)
        gemm(stream, *given)

    return ManyLaunch(by_address, addresses(problem))


MULTIMEM = register_variant(
    Variant(
        op="gemm_rs",
        name="multimem",
        numerics="library",
        summary="one persistent GEMM into own panels, whose rows the switch sums (NVLink multicast)",
        space=_SPACE,
        infeasible=_infeasible,
        default=_default,
        bind=_bind,
        num_blocks=grid_of,
        kernels=(begin_panels_kernel, multimem_gemm_kernel),
        compile_requests=_requests,
    )
)
