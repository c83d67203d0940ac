"""How many elements go from rank to rank in problems of all_to_all_v, and how they are aligned."""

from __future__ import annotations

from tunedcomm.kernels.common.packets import alignment_of
from tunedcomm.spec import ITEMSIZE, Problem

__all__ = ["layout_of", "made_up_counts", "row_alignment", "row_numel"]

_ROWS = "rows"


def row_alignment(problem: Problem) -> int:
    """What the bytes of every chunk and its place are multiples of: 16, 4, 2 or 1.

    It is that of a row. The problem's size says it, unless the layout does: `rows4` are rows of a multiple of 4 bytes,
    so many of them at most that the size is one of 16.
    """
    return int(problem.layout.removeprefix(_ROWS)) if problem.layout else alignment_of(problem.nbytes)


def layout_of(row_bytes: int, max_count: int) -> str:
    """`Problem.layout` for rows of that size; the inverse of `row_alignment`."""
    align = alignment_of(row_bytes)
    return "" if align == alignment_of(max_count * row_bytes) else f"{_ROWS}{align}"


def row_numel(problem: Problem) -> int:
    """Elements of the smallest row that a problem stands for."""
    return max(row_alignment(problem) // ITEMSIZE[problem.dtype], 1)


def made_up_counts(problem: Problem) -> list[int]:
    """Elements that rank r sends rank r + d, by d: uneven, at most the problem's, and as many received as sent."""
    row = row_numel(problem)
    rows = problem.numel // row
    shares = (rows, rows, rows // 2, rows - rows // 4)
    return [shares[d % len(shares)] * row for d in range(problem.world_size)]
