"""Products by the library of rows of A as they come, beside what pushes them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from tunedcomm.kernels.common.copies import NUM_EVENTS, copies_of
from tunedcomm.kernels.common.feasibility import Launch
from tunedcomm.kernels.gemm.ag_common import gathered_in, scales_in
from tunedcomm.kernels.gemm.ag_push import make_gathered
from tunedcomm.kernels.gemm.op import Operands, operands_of, product, ready_to_cut, wanted_of
from tunedcomm.kernels.gemm.panels import bind_begin
from tunedcomm.spec import Limits, Problem

if TYPE_CHECKING:
    from tunedcomm.symm.workspace import Panels, Workspace

__all__ = ["Piece", "Sending", "bind_products", "refuse_products"]

_START, _BEGUN, _BESIDE = NUM_EVENTS - 3, NUM_EVENTS - 2, NUM_EVENTS - 1


class Sending(Protocol):
    """The pushes of this rank's shard."""

    def begin(self, stream: int, a: int, scale_a: int) -> None:
        """Queue them, after what is queued on `stream` now."""

    def end(self, stream: int) -> None:
        """Hold the stream back until everything is sent."""


@dataclass(frozen=True, slots=True)
class Piece:
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


def refuse_products(problem: Problem, limits: Limits) -> str | None:
    """Why the library does not multiply shards of a problem, or None."""
    if problem.scaling and limits.backend == "cuda" and (problem.shape[1] % 16 or problem.shape[2] % 16):
        return f"the library multiplies fp8 matrices by whole 16 rows and columns, not {problem.shape[1:]}"
    return None


def bind_products(
    problem: Problem, workspace: Workspace, panels: Panels, pieces: Sequence[Piece], pushes: Sending, *, beside: bool
) -> Launch:
    """A launch of the call's begin, the pushes and all pieces, the own one first.

    Args:
        beside: every other piece goes to a stream of its own.
    """
    begin = bind_begin(problem, workspace, panels)
    copied = make_gathered(problem, workspace, panels) if wanted_of(problem).gathered else None
    copies = copies_of(workspace, problem.mode)
    first, aside = copies.streams[0], copies.beside
    everything = gathered_in(panels, problem)
    scales = scales_in(panels, problem) if problem.scaling == "rowwise" else None

    def multiply(operands: Operands, out: Any, piece: Piece) -> None:
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
        if copied is not None:
            copied.begin(stream, a, outputs[1].data_ptr())
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
        if copied is not None:
            copied.end(stream, outputs[1].data_ptr())
        pushes.end(stream)

    return run
