"""copy_engine: one persistent GEMM that keeps its tiles at home; copy engines take finished chunks to their owners.

As in push_reduce, but a tile of another rank's shard is stored into this rank's own panels, behind its slots, and
counted. Side streams wait for the counters (`cuStreamWaitValue32`, by the copy engines' own front end), copy a chunk
into this rank's slot at the owner when all of its tiles are there, then the call's number into the owner's flag. So
the GEMM's SMs store nothing over the links. Tiles of the own shard wait for the peers' flags and add what came.

Waits end: all blocks are resident and do their tiles for others first; copies take no SM, so they go on while the GEMM
holds all of them. The counters are cleared behind the last copy, where nothing that runs waits for it, for that may be
a kernel of the driver's. The GEMM is launched before the waits are queued.

On the host a launch ends before copies can be asked for, so there the own shard is a second launch.

Numerics: ordered. Graph-safe: side streams fork from the caller's and join it; flags hold call numbers; counters end
at 0.
Source: signals a chunk between a GEMM and copy engines, as in Triton-distributed and FLUX.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import triton
import triton.language as tl

from tunedcomm.kernels.common.copies import Copies, copies_of
from tunedcomm.kernels.common.feasibility import Launch, closest
from tunedcomm.kernels.common.launch import CompileRequest, ManyLaunch
from tunedcomm.kernels.gemm.panels import begin_panels_kernel, bind_begin, call_number
from tunedcomm.kernels.gemm.problem import out_itemsize
from tunedcomm.kernels.gemm.rs import (
    DATA,
    count_tile,
    finish_tile,
    partial_tile,
    place_of,
    staged_matrix,
    store_rounded,
)
from tunedcomm.kernels.gemm.rs_common import (
    EPILOGUE_AXES,
    addresses,
    bind_gemm,
    epilogue_constants,
    gemm_request,
    grid_of,
    refuse,
    refuse_epilogue,
    refuse_gemm_kernel,
    requests_with_begin,
    rows_of,
    slot_bytes,
    usual_wish,
)
from tunedcomm.kernels.gemm.tiles import matrix, operand_b
from tunedcomm.kernels.gemm.variant import tile_space
from tunedcomm.space import Choice, Config, Value
from tunedcomm.spec import Limits, Problem, Variant, register_variant
from tunedcomm.symm.layout import PANEL_CHUNKS, PANEL_COUNTERS_OFFSET, PANEL_DATA, PANEL_NUMBER_OFFSET

if TYPE_CHECKING:
    from tunedcomm.symm.workspace import Panels, Workspace

__all__ = ["COPY_ENGINE", "counted_gemm_kernel"]

_BEGUN, _DONE = 0, 1  # events: the begin on the caller's stream; then one a side stream at its end


@triton.jit
def counted_gemm_kernel(
    a, b, scale_a, scale_b, out, first, end, m, n, depth, panels, p0, p1, p2, p3, p4, p5, p6, rank, timeout_ns, status,
    slot_bytes,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr, NK: tl.constexpr,
    DTYPE: tl.constexpr, OUT: tl.constexpr, SCALING: tl.constexpr, WORLD_SIZE: tl.constexpr, CHUNKS: tl.constexpr,
    AVG: tl.constexpr, ALIGNED: tl.constexpr, PIECES: tl.constexpr, DESCRIPTOR: tl.constexpr,
):  # fmt: skip
    """Tiles `first` to `end` of those of all shards; see the module's text."""
    number = call_number(panels)
    rows = (m // WORLD_SIZE).to(tl.int32)
    tile_rows, tile_columns = tl.cdiv(rows, BLOCK_M), tl.cdiv(n, BLOCK_N).to(tl.int32)
    shard = tile_rows * tile_columns
    x = matrix(a, m, depth, BLOCK_M, BLOCK_K, DTYPE)
    y = operand_b(b, depth, n, BLOCK_N, BLOCK_K, NK, DTYPE)
    staged = staged_matrix(panels, rows, n, BLOCK_M, BLOCK_N // PIECES, OUT, WORLD_SIZE, DESCRIPTOR)
    for tile in tl.range(first.to(tl.int32) + tl.program_id(0), end.to(tl.int32), tl.num_programs(0)):
        step = tile // shard
        owner = ((rank + 1 + step) % WORLD_SIZE).to(tl.int32)
        chunk, tile_row, tile_column, _ = place_of(tile - step * shard, tile_rows, tile_columns, CHUNKS, GROUP)
        row, column = tile_row * BLOCK_M, tile_column * BLOCK_N
        total = partial_tile(
            x, y, scale_a, scale_b, owner * rows + row, column, m, n, depth, BLOCK_M, BLOCK_N, BLOCK_K, NK, SCALING
        )  # fmt: skip
        if step < WORLD_SIZE - 1:
            place = panels + DATA + (WORLD_SIZE + step) * slot_bytes
            store_rounded(place, total, row, column, rows, n, BLOCK_M, BLOCK_N, OUT, ALIGNED)
            count_tile(panels, step * CHUNKS + chunk)
        else:
            finish_tile(
                total, staged, panels, slot_bytes, out, rank, row, column, rows, n, chunk, number, timeout_ns, status,
                BLOCK_M, BLOCK_N, PIECES, OUT, WORLD_SIZE, DESCRIPTOR, AVG, ALIGNED,
            )  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Push:
    """A chunk on its way: which counter says that it is there, of how many tiles, and what is copied where."""

    side: int
    counter: int
    tiles: int
    target: int
    source: int
    nbytes: int
    flag: int


@dataclass(frozen=True, slots=True)
class _Job:
    """What a launch needs besides the tensors' addresses.

    Attributes:
        begin: `(stream)`.
        gemm: `(stream, *addresses, first tile, last tile)`.
        pushes: in the order in which chunks are finished.
        number: address of the call's number.
        counters: address of the first counter.
        foreign, tiles: tiles for other ranks, and all tiles.
        at_once: one launch does both.
    """

    copies: Copies
    begin: Callable[[int], None]
    gemm: Callable[..., None]
    pushes: tuple[_Push, ...]
    num_streams: int
    number: int
    counters: int
    foreign: int
    tiles: int
    at_once: bool

    def by_address(self, stream: int, *given: int) -> None:
        """See the module's text."""
        copies, sides = self.copies, self.copies.streams[: self.num_streams]
        self.begin(stream)
        copies.record(_BEGUN, stream)
        self.gemm(stream, *given, 0, self.tiles if self.at_once else self.foreign)
        for side in sides:
            copies.wait(side, _BEGUN)
        for push in self.pushes:
            side = sides[push.side]
            copies.await_count(side, push.counter, push.tiles)
            copies.copy(side, push.target, push.source, push.nbytes)
            copies.copy(side, push.flag, self.number, 8)
        for number, side in enumerate(sides[1:], 1):
            copies.record(_DONE + number, side)
            copies.wait(sides[0], _DONE + number)
        copies.clear(sides[0], self.counters, 2 * len(self.pushes))
        copies.record(_DONE, sides[0])
        copies.wait(stream, _DONE)
        if not self.at_once:
            self.gemm(stream, *given, self.foreign, self.tiles)


_SPACE = tile_space(**EPILOGUE_AXES, num_streams=Choice(1, 2, 3))


def _infeasible(problem: Problem, config: Config, limits: Limits) -> str | None:
    if reason := refuse(problem, limits, slots=2 * problem.world_size - 1, descriptors=True):
        return reason
    if int(config["num_streams"]) > problem.world_size - 1:
        return f"{config['num_streams']} streams, but only {problem.world_size - 1} peers to copy to"
    return refuse_gemm_kernel(problem, config, limits) or refuse_epilogue(problem, config, limits)


def _default(problem: Problem, limits: Limits) -> dict[str, Value]:
    wish = {**usual_wish(problem, limits), "num_streams": 1}
    return closest(wish, _SPACE, problem, limits, _infeasible)


def _request(problem: Problem, config: Config) -> CompileRequest:
    return gemm_request(counted_gemm_kernel, problem, config, **epilogue_constants(problem, config))


def _requests(problem: Problem, config: Config) -> Iterable[Any]:
    return requests_with_begin(problem, _request(problem, config))


def _pushes(problem: Problem, config: Config, panels: Panels, rank: int) -> Iterable[_Push]:
    """Every chunk of other ranks' shards, in order."""
    world_size, rows, n, slot = problem.world_size, rows_of(problem), problem.shape[1], slot_bytes(problem)
    block_m, chunks = int(config["block_m"]), int(config["chunks"])
    columns, row_bytes = -(-n // int(config["block_n"])), n * out_itemsize(problem)
    tile_rows = -(-rows // block_m)
    span = -(-tile_rows // chunks) * block_m
    for step in range(world_size - 1):
        for chunk in range(chunks):
            first, last = chunk * span, min((chunk + 1) * span, rows)
            yield _Push(
                side=step % int(config["num_streams"]),
                counter=panels.local + PANEL_COUNTERS_OFFSET + (step * chunks + chunk) * 8,
                tiles=-(-(last - first) // block_m) * columns,
                target=panels.peers[step] + PANEL_DATA + rank * slot + first * row_bytes,
                source=panels.data + (world_size + step) * slot + first * row_bytes,
                nbytes=(last - first) * row_bytes,
                flag=panels.peers[step] + (rank * PANEL_CHUNKS + chunk) * 8,
            )


def _bind(problem: Problem, config: Config, workspace: Workspace) -> Launch:
    panels = workspace.panels(problem.mode, (2 * problem.world_size - 1) * slot_bytes(problem))
    request, grid = _request(problem, config), grid_of(problem, config)
    shard = -(-rows_of(problem) // int(config["block_m"])) * -(-problem.shape[1] // int(config["block_n"]))
    job = _Job(
        copies=copies_of(workspace, problem.mode),
        begin=bind_begin(problem, workspace, panels),
        gemm=bind_gemm(problem, workspace, panels, request, grid, num_varying=7),
        pushes=tuple(_pushes(problem, config, panels, workspace.rank)),
        num_streams=int(config["num_streams"]),
        number=panels.local + PANEL_NUMBER_OFFSET,
        counters=panels.local + PANEL_COUNTERS_OFFSET,
        foreign=(problem.world_size - 1) * shard,
        tiles=problem.world_size * shard,
        at_once=workspace.device.type == "cuda",
    )
    return ManyLaunch(job.by_address, addresses(problem))


COPY_ENGINE = register_variant(
    Variant(
        op="gemm_rs",
        name="copy_engine",
        numerics="ordered",
        summary="one persistent GEMM; copy engines take its chunks to their owners, its last tiles take the sums",
        space=_SPACE,
        infeasible=_infeasible,
        default=_default,
        bind=_bind,
        num_blocks=grid_of,
        kernels=(begin_panels_kernel, counted_gemm_kernel),
        compile_requests=_requests,
    )
)
