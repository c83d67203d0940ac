"""A report before it is drawn: panels of figures with a key and a table, in sections."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from tunedcomm.report.styles import Style

__all__ = ["Figure", "KeyEntry", "Panel", "Section", "Table", "size_text", "size_ticks"]

# A plotly figure as JSON values: what its `to_plotly_json` gives.
Figure: TypeAlias = dict[str, Any]


@dataclass(frozen=True, slots=True)
class KeyEntry:
    """A line of a panel's key; traces of that name are shown and hidden together."""

    name: str
    style: Style
    note: str = ""


@dataclass(frozen=True, slots=True)
class Table:
    """The figures' numbers. Cells are text, numbers among them written out."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    summary: str = "Table"
    is_open: bool = False


@dataclass(frozen=True, slots=True)
class Panel:
    """One or several figures side by side.

    Attributes:
        title, note: above the figures; the note is plain text.
        anchor: unique on the page.
        figures: (heading, figure).
        key: shared by the figures; empty for none.
        tables: below, closed unless they say otherwise.
    """

    title: str
    anchor: str
    note: str = ""
    figures: Sequence[tuple[str, Figure]] = ()
    key: Sequence[KeyEntry] = ()
    tables: Sequence[Table] = ()


@dataclass(frozen=True, slots=True)
class Section:
    """Panels under one heading."""

    title: str
    anchor: str
    note: str = ""
    panels: Sequence[Panel] = field(default_factory=tuple)


def size_text(num_bytes: int) -> str:
    """`96 KiB`, at most one decimal."""
    size = float(num_bytes)
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.1f}".removesuffix(".0") + f" {unit}"
        size /= 1024
    return f"{size:.1f}".removesuffix(".0") + " GiB"


def size_ticks(sizes: Sequence[int], most: int = 6) -> list[int]:
    """Powers of two over the range of `sizes`, few enough for a phone."""
    low, high = min(sizes).bit_length() - 1, max(sizes).bit_length()
    step = next(step for step in (1, 2, 4, 5, 10, 20, 40) if (high - low) / step <= most)
    first = -(-low // step) * step if low % step else low
    return [1 << power for power in range(first, high + 1, step)] or [min(sizes)]
