"""ag_gemm by the library's GEMM (cuBLAS), a product for rows of A as they come, beside what pushes them.

A call begins with an exchange of flags, after which nobody reads the panels. Then side streams push this rank's shard
into the peers' panels. Meanwhile the own shard is multiplied, then those of the peers, in turn on `gemm_streams`
streams, the first of which is the caller's; before each product a kernel of one block waits for the flags of its rows.
With two streams, a product's first tiles take the SMs that the last tiles of the one before leave, and the wait is not
felt. The call's beginning is on a side stream: the own shard need not wait for anybody.

- chunked: a product for each chunk of the shards of rank − 1, rank − 2, …. Copy engines push, chunk by chunk (see
  `ag.Pushes`), or a kernel of a few blocks (see `ag.send_shard`).
- doubling: a product of the own shard, then of one other, then of two, of four: as many as there are already. The j-th,
  from j = 0 on, is of the 2^j ranks whose numbers differ from this one's in bit j and perhaps in lower bits: neighbours
  in the gathered A. Copy engines push to rank ⊕ 1, rank ⊕ 2, …: in every step each rank sends to one peer and hears
  from one, and the shards come in the order of the products. There are fewer and larger products, log₂ n + 1 instead of
  n, which is what few columns want; but the last one waits for all of its shards.

No rank waits in a circle: pushing waits for nothing but the call's beginning; the GEMMs end by themselves and leave
room for the blocks that push, and so does the block that waits.

Numerics: library (nothing is summed over ranks, but how the library adds is its own affair). Graph-safe.
Source: asynchronous tensor parallelism in PyTorch, cut by chunk, with call numbers as progress signals; the pairs of
recursive-doubling all-gathers.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import triton
import triton.language as tl

from tunedcomm.kernels.common.copies import NUM_EVENTS, Copies, copies_of
from tunedcomm.kernels.common.feasibility import Launch
from tunedcomm.kernels.common.launch import CompileRequest, bind_kernel
from tunedcomm.kernels.common.variant import VariantBase
from tunedcomm.kernels.gemm.ag import (
    HERE,
    LEAST_SENT_BYTES,
    SENT_EVENT,
    Gathered,
    Pushes,
    gathered_in,
    panel_bytes,
    refuse_chunks,
    refuse_gather,
    refuse_streams,
    rows_of_chunk,
    scales_in,
    send_arguments,
    send_kernel,
)
from tunedcomm.kernels.gemm.library import refuse_scaled
from tunedcomm.kernels.gemm.op import Operands, operands_of, product, ready_to_cut, rows_of
from tunedcomm.kernels.gemm.panels import await_chunk, begin_panels_kernel, begin_request, bind_begin, call_number
from tunedcomm.space import Choice, Config, Space, Value
from tunedcomm.spec import ITEMSIZE, Limits, Numerics, Problem

if TYPE_CHECKING:
    from tunedcomm.symm.workspace import Panels, Workspace

_START, _BEGUN, _BESIDE = NUM_EVENTS - 3, NUM_EVENTS - 2, NUM_EVENTS - 1
_MULTIPLE = 16  # of rows in a chunk
_SEND_WARPS = 16
_LEAST_RANKS = 4  # with fewer, products of doubling are those of chunked


@triton.jit
def await_kernel(panels, source, chunk, timeout_ns, status):
    """One block: chunk `chunk` of rank `source` is here."""
    await_chunk(panels, source, chunk, call_number(panels), timeout_ns, status)


@triton.jit
def await_ranks_kernel(panels, first, count, timeout_ns, status):
    """One block: the shards of `count` ranks from `first` on are here."""
    number = call_number(panels)
    for source in tl.range(first, first + count):
        await_chunk(panels, source, 0, number, timeout_ns, status)


@dataclass(frozen=True, slots=True)
class _Piece:
    """One product.

    Attributes:
        ready: `(stream)` waits for its rows; None for the own ones.
        begin, end: rows of the own shard, or of the gathered A.
        target: the first of its rows in the result.
    """

    ready: Callable[..., None] | None
    begin: int
    end: int
    target: int


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
        self.copies.record(HERE, stream)
        self.copies.wait(side, HERE)
        self.send(side, a, scale_a)
        self.copies.record(SENT_EVENT, side)

    def end(self, stream: int) -> None:
        self.copies.wait(stream, SENT_EVENT)


class _PieceVariant(VariantBase):
    """A variant that multiplies pieces; its second kernel waits for one."""

    op = "ag_gemm"
    numerics: Numerics = "library"

    def await_request(self) -> CompileRequest:
        return CompileRequest.of(self.kernels[1], {}, num_warps=1)

    def compile_requests(self, problem: Problem, config: Config) -> Iterable[CompileRequest]:
        return (begin_request(problem.world_size), self.await_request())

    def waits(
        self, problem: Problem, workspace: Workspace, panels: Panels
    ) -> Callable[[int, int], Callable[..., None]]:
        """`(rank, chunk)`, or `(first rank, count)`, to a launch that waits for it on a stream."""
        kernel = bind_kernel(self.await_request(), 1, workspace.device)
        bound = (workspace.timeout_ns, workspace.status_argument(problem))
        return lambda source, which: kernel.fix((panels.local, source, which, *bound))

    def launch(
        self, problem: Problem, config: Config, workspace: Workspace, panels: Panels, pieces: Sequence[_Piece],
        pushes: Pushes | _BlockPushes,
    ) -> Launch:  # fmt: skip
        """A launch of the call's begin, the pushes and all pieces, the own one first."""
        begin, beside = bind_begin(problem, workspace, panels), config["gemm_streams"] == 2
        copied = Gathered(problem, workspace, panels)
        copies = copies_of(workspace, problem.mode)
        first, aside = copies.streams[0], copies.beside
        everything = gathered_in(panels, problem)
        scales = scales_in(panels, problem) if problem.scaling == "rowwise" else None

        def multiply(operands: Operands, out: Any, piece: _Piece) -> None:
            rows = slice(piece.begin, piece.end)
            a = (operands.a if piece.ready is None else everything)[rows]
            if scales is not None:
                operands = operands._replace(scale_a=(operands.scale_a if piece.ready is None else scales)[rows])
            product(problem, operands, out[piece.target : piece.target + piece.end - piece.begin], a)

        def run(inputs: tuple[Any, ...], outputs: tuple[Any, ...], stream: int) -> None:
            operands = ready_to_cut(problem, operands_of(problem, inputs))
            a = operands.a.data_ptr()
            copies.record(_START, stream)
            copies.wait(first, _START)
            begin(first)
            copies.record(_BEGUN, first)
            pushes.begin(first, a, operands.scale_a.data_ptr() if problem.scaling else 0)
            copied.begin(stream, a, outputs)
            multiply(operands, outputs[0], pieces[0])
            copies.wait(stream, _BEGUN)
            if beside:
                copies.wait(aside, _BEGUN)
            for number, piece in enumerate(pieces[1:]):
                away = beside and number % 2 == 0
                if piece.ready is not None:
                    piece.ready(aside if away else stream)
                with copies.current(aside) if away else contextlib.nullcontext():
                    multiply(operands, outputs[0], piece)
            if beside:
                copies.record(_BESIDE, aside)
                copies.wait(stream, _BESIDE)
            copied.end(stream, outputs)
            pushes.end(stream)

        return run


class Chunked(_PieceVariant):
    name = "chunked"
    summary = "cuBLAS once a chunk, as the chunks come; copy engines or a few blocks push them"
    kernels = (begin_panels_kernel, await_kernel, send_kernel)
    space = Space(
        {
            "transport": Choice("copy_engine", "sm"),
            "chunks": Choice(1, 2),
            "gemm_streams": Choice(1, 2),
            "streams": Choice(1, 2, 3),
            "comm_blocks": Choice(1, 8, 16, 32),
        }
    )

    def infeasible(self, problem: Problem, config: Config, limits: Limits) -> str | None:
        senders, by_copies = int(config["comm_blocks"]), config["transport"] == "copy_engine"
        if reason := refuse_gather(problem, limits, descriptors=not by_copies) or refuse_scaled(problem, limits):
            return reason
        if by_copies and senders != 1:
            return "copy engines take no blocks: only comm_blocks=1"
        if by_copies and (reason := refuse_streams(problem, config)):
            return reason
        if not by_copies and int(config["streams"]) != 1:
            return "one kernel sends everything: only streams=1"
        shard = rows_of(problem) * problem.shape[2] * ITEMSIZE[problem.dtype]
        if limits.backend == "host" and senders > 1:
            return "interpreted blocks run one after another: more than 1 only cost time"
        if not by_copies and limits.backend == "cuda" and (senders == 1 or shard < senders * LEAST_SENT_BYTES):
            return f"{shard} bytes are not the right work for {senders} blocks that send"
        return refuse_chunks(problem, config, limits, _MULTIPLE)

    def wish(self, problem: Problem, limits: Limits) -> dict[str, Any]:
        streams = 1 if limits.backend == "host" else 2
        return {"transport": "copy_engine", "chunks": 1, "streams": 1, "comm_blocks": 1, "gemm_streams": streams}

    def _send_request(self, problem: Problem) -> CompileRequest:
        constants: dict[str, Value] = {"DTYPE": problem.dtype, "SCALING": problem.scaling}
        constants["WORLD_SIZE"] = problem.world_size
        return CompileRequest.of(send_kernel, constants, num_warps=_SEND_WARPS)

    def compile_requests(self, problem: Problem, config: Config) -> Iterable[CompileRequest]:
        found = super().compile_requests(problem, config)
        return found if config["transport"] == "copy_engine" else (*found, self._send_request(problem))

    def bind(self, problem: Problem, config: Config, workspace: Workspace) -> Launch:
        rows, rank, count = rows_of(problem), workspace.rank, problem.world_size
        panels = workspace.panels(problem.mode, panel_bytes(problem))
        chunk_rows = rows_of_chunk(problem, int(config["chunks"]), _MULTIPLE)
        wait_for = self.waits(problem, workspace, panels)
        pieces = [_Piece(None, 0, rows, rank * rows)]
        for turn in range(1, count):
            source = (rank - turn) % count
            for chunk, start in enumerate(range(0, rows, chunk_rows)):
                first, end = source * rows + start, source * rows + min(start + chunk_rows, rows)
                pieces.append(_Piece(wait_for(source, chunk), first, end, first))
        pushes: Pushes | _BlockPushes
        if config["transport"] == "copy_engine":
            pushes = Pushes(problem, workspace, panels, int(config["streams"]), chunk_rows)
        else:
            kernel = bind_kernel(self._send_request(problem), int(config["comm_blocks"]), workspace.device)
            send = kernel.fix((None, None, *send_arguments(problem, workspace, panels, chunk_rows)))
            pushes = _BlockPushes(copies_of(workspace, problem.mode), send)
        return self.launch(problem, config, workspace, panels, pieces, pushes)


class Doubling(_PieceVariant):
    name = "doubling"
    summary = "cuBLAS of the own shard, then of 1, 2, 4 others, as copy engines bring them"
    kernels = (begin_panels_kernel, await_ranks_kernel)
    space = Space({"gemm_streams": Choice(1, 2), "streams": Choice(1, 2, 3)})

    def infeasible(self, problem: Problem, config: Config, limits: Limits) -> str | None:
        if reason := refuse_gather(problem, limits, descriptors=False) or refuse_scaled(problem, limits):
            return reason
        count = problem.world_size
        if count < _LEAST_RANKS or count & (count - 1):
            return f"{count} ranks are no power of two from {_LEAST_RANKS} on"
        return refuse_streams(problem, config)

    def wish(self, problem: Problem, limits: Limits) -> dict[str, float]:
        return {"gemm_streams": 1, "streams": 1}

    def bind(self, problem: Problem, config: Config, workspace: Workspace) -> Launch:
        panels = workspace.panels(problem.mode, panel_bytes(problem))
        rows, rank, world_size = rows_of(problem), workspace.rank, problem.world_size
        order = [((rank ^ turn) - rank) % world_size for turn in range(1, world_size)]
        pushes = Pushes(problem, workspace, panels, int(config["streams"]), rows, order)
        wait_for = self.waits(problem, workspace, panels)
        pieces, count = [_Piece(None, 0, rows, rank * rows)], 1
        while count < world_size:
            first = (rank // count ^ 1) * count
            pieces.append(_Piece(wait_for(first, count), first * rows, (first + count) * rows, first * rows))
            count *= 2
        return self.launch(problem, config, workspace, panels, pieces, pushes)


CHUNKED = Chunked().register()
DOUBLING = Doubling().register()
