"""What the gemm_rs variants share on the host: feasibility, where partial results lie, what a launch is given.

A rank's panels hold one *slot* for each rank's partial result of its rows, of the result's dtype, rows × N each; slots
follow each other at whole packets.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from tunedcomm.kernels.common.launch import ManyLaunch, bind_kernel
from tunedcomm.kernels.common.packets import PACKET_BYTES
from tunedcomm.kernels.gemm.panels import begin_request, bind_begin
from tunedcomm.kernels.gemm.problem import operands_of, out_itemsize, refuse_gemm
from tunedcomm.kernels.gemm.variant import num_tiles, refuse_tiles, tile_request, tile_wish, two_fit
from tunedcomm.space import Axis, Choice, Config, Value
from tunedcomm.spec import Limits, Problem

if TYPE_CHECKING:
    from tunedcomm.kernels.common.launch import CompileRequest
    from tunedcomm.symm.workspace import Panels, Workspace

__all__ = [
    "EPILOGUE_AXES",
    "GRID_AXES",
    "NUM_BLOCKS",
    "addresses",
    "bind_gemm",
    "bind_one_kernel",
    "epilogue_constants",
    "gemm_request",
    "grid_of",
    "pieces_of",
    "refuse",
    "refuse_epilogue",
    "refuse_gemm_kernel",
    "requests_with_begin",
    "rows_of",
    "slot_bytes",
    "usual_wish",
    "whole_packets",
]

# As many as there are SMs, fewer to leave some to others, or two an SM, one of which multiplies while the other stores.
NUM_BLOCKS = Choice(1, 64, 120, 132, 264)
_BLOCKS_A_SM = 2
_PIECE = 64  # elements a thread of a piece of a tile that is summed at once, beside the accumulator
GRID_AXES: dict[str, Axis] = {"chunks": Choice(1, 2, 4), "num_blocks": NUM_BLOCKS}
EPILOGUE_AXES: dict[str, Axis] = {**GRID_AXES, "epilogue": Choice("descriptor", "pointer")}


def rows_of(problem: Problem) -> int:
    """Rows of the result on one rank."""
    return problem.shape[0] // problem.world_size


def whole_packets(problem: Problem) -> bool:
    """The result's rows are whole packets."""
    return problem.shape[1] * out_itemsize(problem) % PACKET_BYTES == 0


def slot_bytes(problem: Problem) -> int:
    """Bytes from one slot to the next."""
    size = rows_of(problem) * problem.shape[1] * out_itemsize(problem)
    return -(-size // PACKET_BYTES) * PACKET_BYTES


@functools.lru_cache(maxsize=64)  # asked again for each of thousands of configs
def refuse(
    problem: Problem, limits: Limits, *, slots: int | None = None, bytes_each: int | None = None, descriptors: bool
) -> str | None:
    """Why no kernel of ours can run `problem`, whatever the config; None if one might.

    Args:
        problem, limits: what is asked, and where.
        slots: kept in panels; by default one a rank.
        bytes_each: of a slot, if its elements are not the result's.
        descriptors: operands are read through tensor descriptors.
    """
    if problem.shape[0] % problem.world_size:
        return f"{problem.shape[0]} rows are not the same number for each of {problem.world_size} ranks"
    if problem.reduction not in ("sum", "avg"):
        return f"kernels do sum and avg; {problem.reduction} goes to the library"
    if problem.world_size < 2:
        return "there are no peers to sum with"
    room = (problem.world_size if slots is None else slots) * (bytes_each or slot_bytes(problem))
    return refuse_gemm(replace(problem, reduction="sum"), limits, panel_bytes=room, descriptors=descriptors)


def refuse_gemm_kernel(problem: Problem, config: Config, limits: Limits) -> str | None:
    """Why a persistent GEMM kernel of `num_blocks` blocks, each shard in `chunks` groups of tile rows, is unsuited."""
    rows, blocks, chunks = rows_of(problem), int(config["num_blocks"]), int(config["chunks"])
    if reason := refuse_tiles(problem, config, limits, rows=rows, shards=problem.world_size):
        return reason
    tile_rows = -(-rows // int(config["block_m"]))
    if chunks > 1 and -(-tile_rows // -(-tile_rows // chunks)) != chunks:
        return f"{tile_rows} rows of tiles a shard do not make {chunks} chunks"
    if limits.backend == "host":
        return "an interpreted block would wait for blocks after it: only num_blocks=1" if blocks > 1 else None
    tiles = problem.world_size * num_tiles(rows, problem, config)
    if blocks > _BLOCKS_A_SM * limits.num_sms:
        return f"{blocks} blocks do not all fit on {limits.num_sms} SMs at once"
    if blocks > limits.num_sms and not two_fit(problem, config):
        return "two blocks with such tiles do not fit on an SM"
    fewer = [value for value in NUM_BLOCKS.values() if int(value) < blocks]
    if fewer and int(fewer[-1]) >= tiles:
        return f"{tiles} tiles leave some of {blocks} blocks without work"
    if blocks == 1 and tiles > 1:
        return "one block leaves the other SMs idle"
    return None


def usual_wish(problem: Problem, limits: Limits) -> dict[str, float]:
    """Tiles, chunks and blocks to try first."""
    host = limits.backend == "host"
    tiles = tile_wish(problem, limits, rows=rows_of(problem))
    wish = {**tiles, "chunks": 1, "num_blocks": 1 if host else limits.num_sms}
    return {**wish, "epilogue": "descriptor"}  # type: ignore[dict-item]


def refuse_epilogue(problem: Problem, config: Config, limits: Limits) -> str | None:
    """Why partial results cannot be read the way that `epilogue` says."""
    if config["epilogue"] == "descriptor" and not whole_packets(problem):
        return f"rows of {problem.shape[1]} results are no whole packets, as tensor descriptors want"
    if config["epilogue"] == "pointer" and whole_packets(problem) and limits.backend == "cuda":
        return "plain loads of partial results take twice as long as descriptors, which suit this result"
    if limits.backend == "host" and int(config["block_n"]) > 128:
        return "interpreted tiles are small"
    return None


def epilogue_constants(problem: Problem, config: Config) -> dict[str, Value]:
    """Constants of kernels that sum tiles of the own rows while they are in the accumulator."""
    pieces = pieces_of(config, out_itemsize(problem))
    return {"PIECES": pieces, "DESCRIPTOR": config["epilogue"] == "descriptor"}


def pieces_of(config: Config, itemsize: int) -> int:
    """In how many pieces a tile is finished, so that what is read, of elements of so many bytes, has registers."""
    a_thread = int(config["block_m"]) * int(config["block_n"]) // (32 * int(config["num_warps"]))
    return min(max(1, a_thread * itemsize // (2 * _PIECE)), 4)


def grid_of(problem: Problem, config: Config) -> int:
    """Blocks that are launched: no more than there are tiles."""
    tiles = problem.world_size * num_tiles(rows_of(problem), problem, config)
    return min(int(config["num_blocks"]), tiles)


def gemm_request(kernel: Any, problem: Problem, config: Config, **constants: Value) -> CompileRequest:
    """The binary of a persistent GEMM kernel."""
    common: dict[str, Value] = {
        "CHUNKS": int(config["chunks"]),
        "AVG": problem.reduction == "avg",
        "ALIGNED": whole_packets(problem),
    }
    return tile_request(kernel, problem, config, **common, **constants)


def addresses(problem: Problem) -> Callable[[tuple[Any, ...], tuple[Any, ...]], tuple[int, ...]]:
    """`(inputs, outputs)` to the addresses of a, b, scale_a, scale_b and the result; 0 for what there is not."""

    def arrange(inputs: tuple[Any, ...], outputs: tuple[Any, ...]) -> tuple[int, ...]:
        given = operands_of(problem, inputs)
        scales = (given.scale_a.data_ptr(), given.scale_b.data_ptr()) if problem.scaling else (0, 0)
        return (given.a.data_ptr(), given.b.data_ptr(), *scales, outputs[0].data_ptr())

    return arrange


def bind_gemm(
    problem: Problem,
    workspace: Workspace,
    panels: Panels,
    request: CompileRequest,
    grid: int,
    *extra: int,
    num_varying: int = 5,
) -> Callable[..., None]:
    """`(stream, *addresses)` to a launch of a GEMM kernel.

    The kernel's arguments are the addresses and what else varies, m, n, depth, panels, p0 … p6, rank, timeout_ns,
    status, slot_bytes, extra, constants.
    """
    kernel = bind_kernel(request, grid, workspace.device)
    waits = (workspace.rank, workspace.timeout_ns, workspace.status_argument(problem))
    return kernel.fix(
        (*(None,) * num_varying, *problem.shape, panels.local, *panels.peers, *waits, slot_bytes(problem), *extra)
    )


def bind_one_kernel(
    problem: Problem, workspace: Workspace, request: CompileRequest, grid: int, room: int
) -> ManyLaunch:
    """A launch of the call's begin and one such kernel, with `room` bytes of panels."""
    panels = workspace.panels(problem.mode, room)
    begin = bind_begin(problem, workspace, panels)
    gemm = bind_gemm(problem, workspace, panels, request, grid)

    def by_address(stream: int, *given: int) -> None:
        begin(stream)
        gemm(stream, *given)

    return ManyLaunch(by_address, addresses(problem))


def requests_with_begin(problem: Problem, request: CompileRequest) -> tuple[CompileRequest, CompileRequest]:
    """The binaries of such a launch."""
    return begin_request(problem.world_size), request
