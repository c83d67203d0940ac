"""Where the command line writes: results on stdout, progress and messages on stderr."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from typing import Any

from tunedcomm.errors import printable

__all__ = ["emit", "emit_json", "format_bytes", "format_ratio", "format_us", "note", "table"]

KIB = 1024


def emit(text: str) -> None:
    """Print one result line on stdout."""
    sys.stdout.write(printable(text) + "\n")


def emit_json(value: Any) -> None:
    """Print the result as JSON on stdout."""
    emit(json.dumps(value, indent=2, default=str))


def note(text: str) -> None:
    """Print one line about the progress on stderr."""
    sys.stderr.write(printable(text) + "\n")
    sys.stderr.flush()


def format_us(latency_us: float | None) -> str:
    """A latency with three significant digits or more; `-` where there is none."""
    if latency_us is None:
        return "-"
    return f"{latency_us:.2f}" if latency_us < 100 else f"{latency_us:.0f}"


def format_ratio(baseline_us: float | None, latency_us: float | None) -> str:
    """Speed-up over the baseline, as `2.10x`; `-` where either is missing."""
    if not baseline_us or not latency_us:
        return "-"
    return f"{baseline_us / latency_us:.2f}x"


def format_bytes(num_bytes: int) -> str:
    """`96 KiB`, `1.5 MiB`: at most two decimals, binary units."""
    size = float(num_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < KIB or unit == "GiB":
            return f"{size:.2f}".rstrip("0").rstrip(".") + f" {unit}"
        size /= KIB
    raise AssertionError("the loop returns at its last unit")


def table(columns: Sequence[str], rows: Iterable[Sequence[Any]], *, title: str = "") -> None:
    """Print a table on stdout: boxed on a terminal, aligned columns of plain text otherwise.

    Columns whose cells all look like numbers are aligned to the right.
    """
    cells = [[printable(str(cell)) for cell in row] for row in rows]
    right = [bool(cells) and all(_numeric(row[i]) for row in cells) for i in range(len(columns))]
    if not sys.stdout.isatty():
        _plain(columns, cells, right, title)
        return
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text  # brackets in a cell are no markup

    view = Table(title=Text(printable(title)) if title else None, title_justify="left")
    for name, to_right in zip(columns, right, strict=True):
        view.add_column(name, justify="right" if to_right else "left", overflow="fold")
    for row in cells:
        view.add_row(*map(Text, row))
    Console().print(view)


def _numeric(cell: str) -> bool:
    return cell == "-" or cell[:1].isdigit() or cell[:2].lstrip("-")[:1].isdigit()


def _plain(columns: Sequence[str], cells: Sequence[Sequence[str]], right: Sequence[bool], title: str) -> None:
    if title:
        emit(title)
    widths = [max(len(text) for text in column) for column in zip(columns, *cells, strict=True)]
    for row in (columns, *cells):
        padded = [
            text.rjust(width) if to_right else text.ljust(width)
            for text, width, to_right in zip(row, widths, right, strict=True)
        ]
        emit("  ".join(padded).rstrip())
