"""Speed-up heat maps of fused GEMMs: the library's time over that of what dispatch runs, by M and by NxK."""

from __future__ import annotations

import math
from collections.abc import Sequence

from tunedcomm.report.curves import rows_table
from tunedcomm.report.library import library_of
from tunedcomm.report.measured import CHOSEN, TUNED, Group, Measured, speedup
from tunedcomm.report.panels import Figure, Panel, Table

__all__ = ["INK", "MOST", "SCALE", "grid_of", "heat_panel"]

# Slower than the library in orange, as fast in a pale grey, faster in blue; from half to twice as fast in every figure,
# beyond that alike, so that a colour always says the same. INK reads on each of them, in dark mode, too.
SCALE = [(0.0, "#e8793a"), (0.25, "#f3b98d"), (0.5, "#eef1f5"), (0.75, "#9cc7ef"), (1.0, "#4391dd")]
MOST = 1.0  # of the scale, as the power of two
INK = "#0b1220"


def grid_of(found: Sequence[Measured]) -> tuple[list[str], list[str], list[list[float | None]]]:
    """Columns (M), rows (N×K) and the speed-ups between them; None where nothing was measured."""
    ratios = {tuple(int(part) for part in shape.split("x")): value for shape, value in speedup(found).items()}
    three = {extents: value for extents, value in ratios.items() if len(extents) == 3}
    columns = sorted({m for m, _, _ in three})
    rows = sorted({(n, k) for _, n, k in three}, key=lambda nk: (nk[0] * nk[1], nk))
    values = [[three.get((m, n, k)) for m in columns] for n, k in rows]
    return [str(m) for m in columns], [f"{n}×{k}" for n, k in rows], values


def heat_panel(group: Group, found: Sequence[Measured]) -> Panel:
    """One heat map, or a table of one row or column; of the fastest contender where no row says what runs."""
    columns, rows, values = grid_of(found)
    says = any(one.contender in (TUNED, CHOSEN) or one.is_chosen for one in found)
    what = "what dispatch runs" if says else "the fastest contender"
    note = f"Speed-up of {what} over {library_of(group)} by problem MxNxK; above 1 it is faster. From {group.origin}."
    is_grid = len(rows) > 1 and len(columns) > 1
    table = Table(
        ("N×K \\ M", *columns),
        [
            [name, *("–" if value is None else f"{value:.2f}×" for value in line)]
            for name, line in zip(rows, values, strict=True)
        ],
        summary="Table of speed-ups",
        is_open=not is_grid,
    )
    return Panel(
        title=group.title,
        anchor=group.slug,
        note=note,
        figures=[("Speed-up over the library", _heat(columns, rows, values))] if is_grid else [],
        tables=[table, rows_table(group, found, None)],
    )


def _heat(columns: list[str], rows: list[str], values: list[list[float | None]]) -> Figure:
    import plotly.graph_objects as go

    ticks = {-MOST: "≤ 0.5×", math.log2(0.75): "0.75×", 0.0: "1×", math.log2(1.5): "1.5×", MOST: "≥ 2×"}
    figure = go.Figure(
        go.Heatmap(
            x=columns,
            y=rows,
            z=[[None if not value else math.log2(value) for value in line] for line in values],
            zmin=-MOST,
            zmax=MOST,
            colorscale=[list(stop) for stop in SCALE],
            text=[["" if value is None else f"{value:.2f}" for value in line] for line in values],
            texttemplate="%{text}",
            textfont={"color": INK},
            hovertemplate="M %{x}, N×K %{y}: %{text}×<extra></extra>",
            hoverongaps=False,
            xgap=2,
            ygap=2,
            colorbar={
                "tickvals": list(ticks),
                "ticktext": list(ticks.values()),
                "thickness": 12,
                "outlinewidth": 0,
            },
        )
    )
    figure.update_layout(
        xaxis={"type": "category", "title": {"text": "M"}},
        yaxis={"type": "category", "automargin": True, "title": {"text": "N×K"}},
        height=max(240, 130 + 34 * len(rows)),
        template="none",
    )
    plain: Figure = figure.to_plotly_json()
    return plain
