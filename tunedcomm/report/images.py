"""The curves and heat maps as images, for READMEs and slides, with matplotlib: plotly's export wants a browser."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from tunedcomm.errors import printable
from tunedcomm.report.data import Group, Material
from tunedcomm.report.figures import INK, MARKS, MOST, SCALE, Figure, Trace, curves, heat_figure
from tunedcomm.report.page import need

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_DASHES = {"solid": "-", "dot": ":", "dash": "--"}
_THEMES = {
    "": {"ground": "#ffffff", "text": "#1a2230", "grid": "#e3e7ed"},
    "-dark": {"ground": "#0d1117", "text": "#e6eaf0", "grid": "#2b3440"},
}


def write_images(material: Material, folder: Path) -> list[Path]:
    """Write `SLUG-latency.png` and `SLUG-busbw.png`, or `SLUG-speedup.png`, and the same with `-dark`.

    Groups of one problem are left out.

    Returns:
        The files, in the order of the groups.

    Raises:
        MissingPackageError: matplotlib is not installed.
        OSError: the folder cannot take them.
    """
    need("matplotlib")
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for group, found in {**material.bench, **material.stored}.items():
        if group.is_gemm:
            figures = {"speedup": heat_figure(found)}
        elif len({one.shape for one in found}) < 2:
            continue
        else:
            drawn = curves(group, found, group.link_gb_s(material.link_gb_s))
            figures = dict(zip(("latency", "busbw"), drawn, strict=False))
        for suffix, theme in _THEMES.items():
            for name, figure in figures.items():
                written.append(_save(folder / f"{group.slug}-{name}{suffix}.png", theme, group, figure))
    return written


def _save(path: Path, theme: Mapping[str, str], group: Group, figure: Figure) -> Path:
    from matplotlib import figure as pictures
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    picture = pictures.Figure(figsize=(8.6, 5.2), dpi=160, facecolor=theme["ground"], layout="constrained")
    FigureCanvasAgg(picture)
    axes = picture.add_subplot(facecolor=theme["ground"])
    axes.set_xlabel(figure.layout["xaxis"]["title"]["text"])
    if figure.data[0]["type"] == "heatmap":
        axes.set_ylabel(figure.layout["yaxis"]["title"]["text"])
        _draw_heat(axes, figure.data[0])
    else:
        axes.set_ylabel(figure.heading)
        _draw_curves(axes, figure)
        axes.grid(True, which="major", color=theme["grid"], linewidth=0.8)
        legend = axes.legend(loc="best", fontsize=9.5, frameon=False, ncols=2, labelcolor=theme["text"])
        for text in legend.get_texts():
            text.set_parse_math(False)  # names are no formulas
    axes.set_title(printable(group.title), color=theme["text"], fontsize=12, loc="left", parse_math=False)
    axes.tick_params(colors=theme["text"], which="both", labelsize=10)
    axes.xaxis.label.set_color(theme["text"])
    axes.yaxis.label.set_color(theme["text"])
    for spine in axes.spines.values():
        spine.set_color(theme["grid"])
    # A fixed date and no version: the same numbers give the same file.
    picture.savefig(path, facecolor=theme["ground"], metadata={"Software": None})
    return path


def _draw_curves(axes: Axes, figure: Figure) -> None:
    from matplotlib.ticker import LogLocator, NullLocator, StrMethodFormatter

    places = figure.layout["xaxis"]
    by_size = places["type"] == "log"
    if by_size:
        axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    index_of = {} if by_size else {shape: index for index, shape in enumerate(places["categoryarray"])}
    for trace in figure.data:
        _draw_line(axes, {**trace, "x": [index_of.get(place, place) for place in trace["x"]]})
    if by_size:
        low, high = axes.get_xlim()
        known = zip(places["tickvals"], places["ticktext"], strict=True)
        ticks = {tick: text for tick, text in known if low <= tick <= high}
        axes.set_xticks(list(ticks), list(ticks.values()))
    else:
        axes.set_xticks(range(len(index_of)), list(index_of), rotation=40, ha="right")
    low, high = axes.get_ylim()
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if high / low < 300 else (1,)))
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axes.yaxis.set_minor_locator(NullLocator())


def _draw_line(axes: Axes, trace: Trace) -> None:
    line, symbol = trace["line"], trace["marker"]["symbol"]
    alone = trace["mode"] == "markers"
    axes.plot(
        trace["x"],
        [math.nan if value is None else float(value) for value in trace["y"]],
        color=line["color"],
        linestyle="" if alone else _DASHES[line["dash"]],
        linewidth=line["width"],
        marker=MARKS[symbol][1],
        markersize=12 if symbol == "star-open" else 9 if symbol == "star" else 5,
        markerfacecolor="none" if symbol.endswith("-open") else line["color"],
        label=printable(trace["name"]),
        zorder=5 if alone else 4 if line["width"] > 2.5 else 3,
    )


def _draw_heat(axes: Axes, trace: Trace) -> None:
    from matplotlib.colors import LinearSegmentedColormap

    logs = [[math.nan if value is None else value for value in line] for line in trace["z"]]
    scale = LinearSegmentedColormap.from_list("speedup", SCALE)
    axes.imshow(logs, cmap=scale, vmin=-MOST, vmax=MOST, aspect="auto", origin="lower")
    axes.set_xticks(range(len(trace["x"])), trace["x"])
    axes.set_yticks(range(len(trace["y"])), trace["y"])
    for i, line in enumerate(trace["text"]):
        for j, text in enumerate(line):
            if text:
                axes.text(j, i, f"{text}×", ha="center", va="center", color=INK, fontsize=10, weight="bold")
