"""The same curves and heat maps as images, for READMEs and slides, with matplotlib: plotly's export wants a browser."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tunedcomm.report import ceiling
from tunedcomm.report.heat import INK, MOST, SCALE, grid_of
from tunedcomm.report.measured import Group, Measured, lines
from tunedcomm.report.panels import size_text, size_ticks
from tunedcomm.report.styles import CEILING, CHOSEN_COLOUR, Style

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["write_images"]

_MARKS = {
    "circle": "o",
    "circle-open": "o",
    "square": "s",
    "diamond": "D",
    "triangle-up": "^",
    "triangle-down": "v",
    "cross": "P",
    "x": "X",
    "pentagon": "p",
    "hexagram": "h",
    "star": "*",
}
_DASHES = {"solid": "-", "dot": ":", "dash": "--"}
_THEMES = {
    "": {"ground": "#ffffff", "text": "#1a2230", "grid": "#e3e7ed"},
    "-dark": {"ground": "#0d1117", "text": "#e6eaf0", "grid": "#2b3440"},
}


def write_images(
    groups: Mapping[Group, Sequence[Measured]],
    folder: Path,
    styles: Mapping[str, Style],
    link_gb_s: float | None = None,
) -> list[Path]:
    """Write `SLUG-latency.png`, `SLUG-busbw.png` or `SLUG-speedup.png`, and the same with `-dark`.

    Groups of one size are left out.

    Returns:
        The files, in the order of the groups.
    """
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for group, found in groups.items():
        for suffix, theme in _THEMES.items():
            if group.is_gemm:
                written.append(_save(folder / f"{group.slug}-speedup{suffix}.png", theme, group, _heat, found))
                continue
            if len({one.message_bytes for one in found}) < 2:
                continue
            link = ceiling.link_gb_s(group, link_gb_s)

            def curves(
                axes: Axes, found: Sequence[Measured], *, busbw: bool, group: Group = group, link: Any = link
            ) -> None:
                _curves(axes, group, found, styles, link, busbw=busbw)

            written.append(
                _save(folder / f"{group.slug}-latency{suffix}.png", theme, group, curves, found, busbw=False)
            )
            if any(one.busbw_gb_s is not None for one in found):
                written.append(
                    _save(folder / f"{group.slug}-busbw{suffix}.png", theme, group, curves, found, busbw=True)
                )
    return written


def _save(
    path: Path, theme: Mapping[str, str], group: Group, draw: Any, found: Sequence[Measured], **options: Any
) -> Path:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.6, 5.2), dpi=160, facecolor=theme["ground"], layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot(facecolor=theme["ground"])
    draw(axes, found, **options)
    axes.set_title(group.title, color=theme["text"], fontsize=12, loc="left")
    axes.tick_params(colors=theme["text"], which="both", labelsize=10)
    axes.xaxis.label.set_color(theme["text"])
    axes.yaxis.label.set_color(theme["text"])
    for spine in axes.spines.values():
        spine.set_color(theme["grid"])
    if not group.is_gemm:
        axes.grid(True, which="major", color=theme["grid"], linewidth=0.8)
        legend = axes.legend(loc="best", fontsize=9.5, frameon=False, ncols=2)
        for text in legend.get_texts():
            text.set_color(theme["text"])
    # A fixed date and no version: the same numbers give the same file.
    figure.savefig(path, facecolor=theme["ground"], metadata={"Software": None})
    return path


def _curves(
    axes: Axes, group: Group, found: Sequence[Measured], styles: Mapping[str, Style], link: float | None, *, busbw: bool
) -> None:
    sizes = sorted({one.message_bytes for one in found})
    shown = [(one, one.busbw_gb_s if busbw else one.latency_p50_us) for one in found]
    least = min(value for _, value in shown if value is not None)
    floors = [] if link is None else [(size, ceiling.floor_us(group, size, link)) for size in sizes]
    known = [(size, (link or 0.0) if busbw else floor) for size, floor in floors if floor is not None]
    known = [(size, value) for size, value in known if value >= least / 3]
    if known:
        axes.plot(
            *zip(*known, strict=True), color=CEILING.colour, linestyle="--", linewidth=1.4, label="measured ceiling"
        )
    for line in lines(found):
        style = styles[line.name]
        points = [(p.message_bytes, p.busbw_gb_s if busbw else p.latency_p50_us) for p in line.points]
        drawn = [(size, value) for size, value in points if value is not None]
        if drawn:
            _plot(axes, drawn, line.name, style)
    chosen = [(one.message_bytes, value) for one, value in shown if one.is_chosen and value is not None]
    if chosen and all(one.contender != "tuned" for one in found):
        x, y = zip(*chosen, strict=True)
        axes.scatter(x, y, marker="*", s=150, facecolors="none", edgecolors=CHOSEN_COLOUR, zorder=5, label="chosen")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(size_ticks(sizes), [size_text(tick) for tick in size_ticks(sizes)])
    axes.set_xlabel("message")
    axes.set_ylabel("bus bandwidth, 1e9 bytes/s" if busbw else "latency, µs")
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")


def _plot(axes: Axes, points: Sequence[tuple[int, float]], name: str, style: Style) -> None:
    x, y = zip(*points, strict=True)
    axes.plot(
        x,
        y,
        color=style.colour,
        linestyle=_DASHES[style.dash],
        linewidth=style.width,
        marker=_MARKS[style.mark],
        markersize=9 if style.mark == "star" else 5,
        markerfacecolor="none" if style.mark.endswith("-open") else style.colour,
        label=name,
        zorder=4 if style.width > 2.5 else 3,
    )


def _heat(axes: Axes, found: Sequence[Measured]) -> None:
    from matplotlib.colors import LinearSegmentedColormap

    columns, rows, values = grid_of(found)
    logs = [[math.nan if not value else math.log2(value) for value in line] for line in values]
    scale = LinearSegmentedColormap.from_list("speedup", SCALE)
    axes.imshow(logs, cmap=scale, vmin=-MOST, vmax=MOST, aspect="auto", origin="lower")
    axes.set_xticks(range(len(columns)), columns)
    axes.set_yticks(range(len(rows)), rows)
    for i, line in enumerate(values):
        for j, value in enumerate(line):
            if value is not None:
                axes.text(j, i, f"{value:.2f}×", ha="center", va="center", color=INK, fontsize=10, weight="bold")
    axes.set_xlabel("M")
    axes.set_ylabel("N×K")
