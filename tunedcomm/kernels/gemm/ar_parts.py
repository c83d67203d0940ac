"""A result cut into parts by rows, for variants that multiply one while another is reduced."""

from __future__ import annotations

from typing import Any

from tunedcomm.space import Config
from tunedcomm.spec import Problem

__all__ = ["TILE", "inputs_of_rows", "parts_of"]

TILE = 128  # rows of the library's tiles


def parts_of(problem: Problem, config: Config) -> list[tuple[int, int]]:
    """First row and number of rows of each of `chunks` parts, of whole tiles if they are many.

    With `taper` the last one is cut in two. No rows are one part without any.
    """
    m = problem.shape[0]
    step = max(1, _whole(-(-m // int(config["chunks"]))))
    parts = [(row, min(step, m - row)) for row in range(0, max(1, m), step)]
    if config.get("taper", False):
        row, rows = parts.pop()
        first = min(_whole(-(-rows // 2)), rows)
        parts += [(row, first), *([(row + first, rows - first)] if first < rows else [])]
    return parts


def _whole(rows: int) -> int:
    """Rounded up to tiles, if it is more than one."""
    tile = TILE if rows > TILE else 1
    return -(-rows // tile) * tile


def inputs_of_rows(problem: Problem, inputs: tuple[Any, ...], row: int, rows: int) -> tuple[Any, ...]:
    """A launch's inputs with some rows of A only."""
    given = list(inputs)
    given[0] = inputs[0][row : row + rows]
    if problem.scaling == "rowwise":
        given[-2] = inputs[-2][row : row + rows]
    return tuple(given)
