"""chunked: the library's GEMM (cuBLAS) once a chunk of A's rows, as the chunks come, beside what pushes them.

A call begins with an exchange of flags, after which nobody reads the panels. Then side streams push this rank's shard
into the peers' panels, chunk by chunk: by copy engines (see `_push`), or by a kernel of a few blocks (see `_send`).
Meanwhile the own shard is multiplied, then those of rank − 1, rank − 2, …, in turn on `gemm_streams` streams, the first
of which is the caller's; before each chunk a kernel of one block waits for its flag. With two, a chunk's first tiles
take the SMs that the last tiles of the one before leave, and the wait is not felt. The call's beginning is on a side
stream: the own shard need not wait for anybody.

No rank waits in a circle: pushing waits for nothing but the call's beginning; the GEMMs end by themselves and leave
room for the blocks that push, and so does the block that waits.

Numerics: library (nothing is summed over ranks, but how the library adds is its own affair). Graph-safe.
Source: asynchronous tensor parallelism in PyTorch, cut by chunk, with call numbers as progress signals.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import triton

from tunedcomm.kernels.common.copies import Copies, copies_of
from tunedcomm.kernels.common.feasibility import Launch, closest
from tunedcomm.kernels.common.launch import CompileRequest, bind_kernel
from tunedcomm.kernels.gemm.ag_common import (
    panel_bytes,
    refuse_chunks,
    refuse_gather,
    rows_of,
    rows_of_chunk,
    scales_offset,
)
from tunedcomm.kernels.gemm.ag_products import Piece, bind_products, refuse_products
from tunedcomm.kernels.gemm.ag_push import Pushes, make_pushes
from tunedcomm.kernels.gemm.ag_send import send_kernel
from tunedcomm.kernels.gemm.panels import await_chunk, begin_panels_kernel, begin_request, call_number
from tunedcomm.space import Choice, Config, Space, Value
from tunedcomm.spec import ITEMSIZE, Limits, Problem, Variant, register_variant

if TYPE_CHECKING:
    from tunedcomm.symm.workspace import Panels, Workspace

__all__ = ["CHUNKED", "await_kernel"]

_HERE, _SENT = 0, 1  # events, as in `_push`
_MULTIPLE = 16  # of rows in a chunk
_LEAST_BYTES = 64 * 1024  # that a block should have to send
_SEND_WARPS = 16


@triton.jit
def await_kernel(panels, source, chunk, timeout_ns, status):
    """One block: chunk `chunk` of rank `source` is here."""
    await_chunk(panels, source, chunk, call_number(panels), timeout_ns, status)


@dataclass(frozen=True, slots=True)
class _BlockPushes:
    """The shard sent by a kernel on a side stream; as `Pushes` otherwise.

    Attributes:
        send: `(stream, shard, its scales)`.
    """

    copies: Copies
    send: Callable[..., None]

    def begin(self, stream: int, a: int, scale_a: int) -> None:
        side = self.copies.streams[0]
        self.copies.record(_HERE, stream)
        self.copies.wait(side, _HERE)
        self.send(side, a, scale_a)
        self.copies.record(_SENT, side)

    def end(self, stream: int) -> None:
        self.copies.wait(stream, _SENT)


_SPACE = Space(
    {
        "transport": Choice("copy_engine", "sm"),
        "chunks": Choice(1, 2),
        "gemm_streams": Choice(1, 2),
        "streams": Choice(1, 2, 3),
        "comm_blocks": Choice(1, 8, 16, 32),
    }
)


def _infeasible(problem: Problem, config: Config, limits: Limits) -> str | None:
    senders, by_copies = int(config["comm_blocks"]), config["transport"] == "copy_engine"
    if reason := refuse_gather(problem, limits, descriptors=not by_copies):
        return reason
    if reason := refuse_products(problem, limits):
        return reason
    if by_copies and senders != 1:
        return "copy engines take no blocks: only comm_blocks=1"
    if by_copies and int(config["streams"]) > problem.world_size - 1:
        return f"{config['streams']} streams, but only {problem.world_size - 1} peers to copy to"
    if not by_copies and int(config["streams"]) != 1:
        return "one kernel sends everything: only streams=1"
    shard = rows_of(problem) * problem.shape[2] * ITEMSIZE[problem.dtype]
    if limits.backend == "host" and senders > 1:
        return "interpreted blocks run one after another: more than 1 only cost time"
    if not by_copies and limits.backend == "cuda" and (senders == 1 or shard < senders * _LEAST_BYTES):
        return f"{shard} bytes are not the right work for {senders} blocks that send"
    return refuse_chunks(problem, config, limits, _MULTIPLE)


def _default(problem: Problem, limits: Limits) -> dict[str, Value]:
    wish: dict[str, Any] = {"transport": "copy_engine", "chunks": 1, "streams": 1, "comm_blocks": 1}
    wish["gemm_streams"] = 1 if limits.backend == "host" else 2
    return closest(wish, _SPACE, problem, limits, _infeasible)


def _requests_of(problem: Problem, config: Config) -> tuple[CompileRequest, ...]:
    found = (begin_request(problem.world_size), CompileRequest.of(await_kernel, {}, num_warps=1))
    if config["transport"] == "copy_engine":
        return found
    constants: dict[str, Value] = {
        "DTYPE": problem.dtype,
        "SCALING": problem.scaling,
        "WORLD_SIZE": problem.world_size,
    }
    return (*found, CompileRequest.of(send_kernel, constants, num_warps=_SEND_WARPS))


def _requests(problem: Problem, config: Config) -> Iterable[Any]:
    return _requests_of(problem, config)


def _pieces(problem: Problem, workspace: Workspace, panels: Panels, chunk_rows: int) -> list[Piece]:
    """The products in the order in which their rows come."""
    rows, rank, count = rows_of(problem), workspace.rank, problem.world_size
    waits = (workspace.timeout_ns, workspace.status_argument(problem))
    kernel = bind_kernel(CompileRequest.of(await_kernel, {}, num_warps=1), 1, workspace.device)
    found = [Piece(None, 0, rows, rank * rows)]
    for turn in range(1, count):
        source = (rank - turn) % count
        for chunk, start in enumerate(range(0, rows, chunk_rows)):
            first, end = source * rows + start, source * rows + min(start + chunk_rows, rows)
            found.append(Piece(kernel.fix((panels.local, source, chunk, *waits)), first, end, first))
    return found


def _pushes(
    problem: Problem, config: Config, workspace: Workspace, panels: Panels, chunk_rows: int
) -> Pushes | _BlockPushes:
    if config["transport"] == "copy_engine":
        return make_pushes(problem, workspace, panels, num_streams=int(config["streams"]), chunk_rows=chunk_rows)
    request = _requests_of(problem, config)[-1]
    extents = (rows_of(problem), problem.shape[2], chunk_rows, workspace.rank)
    fixed = (panels.local, *panels.peers, scales_offset(problem), *extents)
    kernel = bind_kernel(request, int(config["comm_blocks"]), workspace.device)
    return _BlockPushes(copies_of(workspace, problem.mode), kernel.fix((None, None, *fixed)))


def _bind(problem: Problem, config: Config, workspace: Workspace) -> Launch:
    panels = workspace.panels(problem.mode, panel_bytes(problem))
    chunk_rows = rows_of_chunk(problem, int(config["chunks"]), _MULTIPLE)
    pieces = _pieces(problem, workspace, panels, chunk_rows)
    pushes = _pushes(problem, config, workspace, panels, chunk_rows)
    return bind_products(problem, workspace, panels, pieces, pushes, beside=config["gemm_streams"] == 2)


CHUNKED = register_variant(
    Variant(
        op="ag_gemm",
        name="chunked",
        numerics="library",
        summary="cuBLAS once a chunk, as the chunks come; copy engines or a few blocks push them",
        space=_SPACE,
        infeasible=_infeasible,
        default=_default,
        bind=_bind,
        num_blocks=lambda problem, config: -1,
        kernels=(begin_panels_kernel, await_kernel, send_kernel),
        compile_requests=_requests,
    )
)
