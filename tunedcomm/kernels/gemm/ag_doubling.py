"""doubling: the library's GEMM of the own shard, then of one other, then of two, of four: as many as there are already.

The j-th product, from j = 0 on, is of the 2^j ranks whose numbers differ from this one's in bit j and perhaps in lower
bits: neighbours in the gathered A, so one product takes them all. Copy engines push each rank's shard into the peers'
panels (see `_push`) in the order rank ⊕ 1, rank ⊕ 2, …: in every step each rank sends to one peer and hears from one,
and the shards come in the order of the products. Before each product a kernel of one block waits for its ranks' flags.

Against `chunked` there are fewer and larger products, log₂ n + 1 instead of n, which is what few columns want; but the
last one waits for all of its shards.

No rank waits in a circle: pushing waits for nothing but the call's beginning; the GEMMs end by themselves.

Numerics: library (nothing is summed over ranks, but how the library adds is its own affair). Graph-safe.
Source: `chunked`, with the pairs of recursive-doubling all-gathers.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import triton
import triton.language as tl

from tunedcomm.kernels.common.feasibility import Launch, closest
from tunedcomm.kernels.common.launch import CompileRequest, bind_kernel
from tunedcomm.kernels.gemm.ag_common import panel_bytes, refuse_gather, rows_of
from tunedcomm.kernels.gemm.ag_products import Piece, bind_products, refuse_products
from tunedcomm.kernels.gemm.ag_push import make_pushes
from tunedcomm.kernels.gemm.panels import await_chunk, begin_panels_kernel, begin_request, call_number
from tunedcomm.space import Choice, Config, Space, Value
from tunedcomm.spec import Limits, Problem, Variant, register_variant

if TYPE_CHECKING:
    from tunedcomm.symm.workspace import Panels, Workspace

__all__ = ["DOUBLING", "await_ranks_kernel"]

_SPACE = Space({"gemm_streams": Choice(1, 2), "streams": Choice(1, 2, 3)})
_LEAST_RANKS = 4  # with fewer, products are those of `chunked`


@triton.jit
def await_ranks_kernel(panels, first, count, timeout_ns, status):
    """One block: the shards of `count` ranks from `first` on are here."""
    number = call_number(panels)
    for source in tl.range(first, first + count):
        await_chunk(panels, source, 0, number, timeout_ns, status)


def _infeasible(problem: Problem, config: Config, limits: Limits) -> str | None:
    if reason := refuse_gather(problem, limits, descriptors=False) or refuse_products(problem, limits):
        return reason
    count = problem.world_size
    if count < _LEAST_RANKS or count & (count - 1):
        return f"{count} ranks are no power of two from {_LEAST_RANKS} on"
    if int(config["streams"]) > count - 1:
        return f"{config['streams']} streams, but only {count - 1} peers to copy to"
    return None


def _default(problem: Problem, limits: Limits) -> dict[str, Value]:
    return closest({"gemm_streams": 1, "streams": 1}, _SPACE, problem, limits, _infeasible)


def _await_request() -> CompileRequest:
    return CompileRequest.of(await_ranks_kernel, {}, num_warps=1)


def _requests(problem: Problem, config: Config) -> Iterable[Any]:
    return (begin_request(problem.world_size), _await_request())


def _pieces(problem: Problem, workspace: Workspace, panels: Panels) -> list[Piece]:
    """The products in order."""
    rows, rank = rows_of(problem), workspace.rank
    waits = (workspace.timeout_ns, workspace.status_argument(problem))
    kernel = bind_kernel(_await_request(), 1, workspace.device)
    found, count = [Piece(None, 0, rows, rank * rows)], 1
    while count < problem.world_size:
        first = (rank // count ^ 1) * count
        begin, end = first * rows, (first + count) * rows
        found.append(Piece(kernel.fix((panels.local, first, count, *waits)), begin, end, begin))
        count *= 2
    return found


def _bind(problem: Problem, config: Config, workspace: Workspace) -> Launch:
    panels, count, rank = workspace.panels(problem.mode, panel_bytes(problem)), problem.world_size, workspace.rank
    order = [((rank ^ turn) - rank) % count for turn in range(1, count)]
    streams = int(config["streams"])
    pushes = make_pushes(
        problem, workspace, panels, num_streams=streams, chunk_rows=rows_of(problem), order=order
    )  # fmt: skip
    pieces = _pieces(problem, workspace, panels)
    return bind_products(problem, workspace, panels, pieces, pushes, beside=config["gemm_streams"] == 2)


DOUBLING = register_variant(
    Variant(
        op="ag_gemm",
        name="doubling",
        numerics="library",
        summary="cuBLAS of the own shard, then of 1, 2, 4 others, as copy engines bring them",
        space=_SPACE,
        infeasible=_infeasible,
        default=_default,
        bind=_bind,
        num_blocks=lambda problem, config: -1,
        kernels=(begin_panels_kernel, await_ranks_kernel),
        compile_requests=_requests,
    )
)
