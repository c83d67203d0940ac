"""Sections of a report, with figures in plotly's form; page.py writes them as HTML, images.py with matplotlib."""

from __future__ import annotations

import functools
import html
import itertools
import math
import re
import statistics
import textwrap
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from tunedcomm import kernels
from tunedcomm.bench.csv import floor_us
from tunedcomm.db.records import Trial
from tunedcomm.errors import printable
from tunedcomm.metrics import format_bytes
from tunedcomm.report.data import (
    CHOSEN,
    LIBRARY,
    TUNED,
    Group,
    Material,
    Measured,
    RegretRule,
    StoredFile,
    best_by_shape,
    lines,
)
from tunedcomm.spec import ops, parse_shape, variants

# Okabe and Ito's colours, which the colour-blind can tell apart, with the darkest a little lighter.
_COLOURS = "#2f86d6 #e69f00 #00a37a #d678ac #8b6cf0 #56b4e9 #a39a00 #b0764a #1fb5b0 #e06c75".split()
# Plotly's marker names to the key's characters and matplotlib's names; contenders share the first nine.
MARKS = {
    "circle": ("●", "o"),
    "square": ("■", "s"),
    "diamond": ("◆", "D"),
    "triangle-up": ("▲", "^"),
    "cross": ("✚", "P"),
    "x": ("✖", "X"),
    "triangle-down": ("▼", "v"),
    "pentagon": ("⬟", "p"),
    "hexagram": ("✶", "h"),
    "circle-open": ("○", "o"),
    "star": ("★", "*"),
    "star-open": ("☆", "*"),
    "": ("—", ""),
}
_SYMBOLS = [*MARKS][:9]
_STRONG, _GREY = "#e05a2b", "#8a94a6"
_STATUS_COLOURS = {
    "compile_error": "#2f86d6",
    "incorrect": "#d678ac",
    "crashed": _STRONG,
    "hung": "#8b6cf0",
}
# Colours of heat maps: orange is slower than the library, pale grey as fast, blue faster. The scale goes from half to
# twice as fast in every figure, so that a colour always has the same meaning. INK is legible on each colour, in dark
# mode, too.
SCALE = [(0.0, "#e8793a"), (0.25, "#f3b98d"), (0.5, "#eef1f5"), (0.75, "#9cc7ef"), (1.0, "#4391dd")]
MOST = 1.0  # end of the scale, as a power of two
INK = "#0b1220"

Trace = dict[str, Any]
Axis = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Style:
    """Look of one contender, the same in every figure of a report.

    Attributes:
        colour: `#rrggbb`.
        symbol: plotly's name of the marker; empty for a line without markers.
        dash: plotly's name of the line's pattern.
        width: of the line.
    """

    colour: str
    symbol: str = "circle"
    dash: str = "solid"
    width: float = 1.8


_FIXED = {TUNED: Style(_STRONG, "star", width=3.2), LIBRARY: Style(_GREY, "circle-open", width=2.2)}


@dataclass(frozen=True, slots=True)
class Figure:
    """A figure in plotly's form.

    Attributes:
        heading: text above the figure.
        data: traces, from back to front. Names and positions on axes are plain text, `text` is plotly's markup. Traces
            of one name are shown and hidden together; `meta` is a note beside the name in the key.
        layout: axes and the like; the page adds the theme.
    """

    heading: str
    data: list[Trace]
    layout: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Table:
    """The figures' numbers as a table of text."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    summary: str = "Table"
    is_open: bool = False


@dataclass(frozen=True, slots=True)
class Panel:
    """One or several figures side by side, which share a key, above tables.

    Attributes:
        title, note: above the figures; the note is plain text.
    """

    title: str
    note: str = ""
    figures: Sequence[Figure] = ()
    tables: Sequence[Table] = ()

    @property
    def key(self) -> list[Trace]:
        """A trace of each name that has an entry in the key."""
        named = {trace["name"]: trace for figure in self.figures for trace in figure.data if trace.get("showlegend")}
        return list(named.values())


@dataclass(frozen=True, slots=True)
class Section:
    """Panels under one heading."""

    title: str
    anchor: str
    note: str = ""
    panels: Sequence[Panel] = ()


def label(text: str) -> str:
    """Text from a file or a database, escaped for plotly's labels, which interpret some HTML."""
    return html.escape(printable(text), quote=False)


def _line(
    name: str,
    style: Style,
    x: Iterable[float | str],
    y: Iterable[float | None],
    hover: Iterable[str] = (),
    unit: str = "",
    *,
    note: str = "",
) -> Trace:
    return {
        "type": "scatter",
        "name": name,
        "showlegend": True,
        "meta": note,
        "mode": "lines+markers" if style.symbol else "lines",
        "x": list(x),
        "y": list(y),
        "text": list(hover),
        "hovertemplate": f"<b>%{{fullData.name}}</b> %{{y:.4~g}} {unit}<br>%{{text}}<extra></extra>",
        "line": {"color": style.colour, "dash": style.dash, "width": style.width},
        "marker": {"symbol": style.symbol, "size": 8 if style.width > 2 else 6, "color": style.colour},
    }


def _bars(name: str, colour: str, x: Sequence[float], y: Sequence[str], unit: str = "") -> Trace:
    return {
        "type": "bar",
        "orientation": "h",
        "name": name,
        "showlegend": True,
        "x": list(x),
        "y": list(y),
        "marker": {"symbol": "square", "color": colour},
        "hovertemplate": f"<b>%{{y}}</b> {name} %{{x:.4~g}} {unit}<extra></extra>",
    }


def _bar_figure(heading: str, title: str, bars: list[Trace], *, is_stacked: bool, height: int | None = None) -> Figure:
    layout = {
        "barmode": "stack" if is_stacked else "group",
        "xaxis": {"title": {"text": title}, "rangemode": "tozero"},
        "yaxis": {"autorange": "reversed", "automargin": True},
        "height": height,
    }
    return Figure(heading, bars, layout)


def sections(material: Material) -> list[Section]:
    """All sections of the page."""
    by_ranks = attrgetter("world_size")
    measured = {**material.bench, **material.stored}
    groups = {group: measured[group] for group in sorted(measured, key=lambda group: group.sort_key)}
    heats = [heat_panel(group, found) for group, found in groups.items() if group.is_gemm]
    regret = [
        regret_panel(file.name, world_size, list(rules))
        for file in material.files
        for world_size, rules in itertools.groupby(sorted(file.rules, key=by_ranks), by_ranks)
    ]
    failures = [failure_panel(stored) for stored in material.databases]

    def curves_of(measured: Mapping[Group, Sequence[Measured]]) -> list[Panel]:
        drawn = {group: found for group, found in measured.items() if not group.is_gemm}
        return [curves_panel(group, found, material.link_gb_s) for group, found in drawn.items()]

    beside = "Contenders that were measured beside each other, by message size. Tap a name to hide it."
    best = "The best config of each variant at each size in the databases; a star marks what dispatch runs."
    return [
        Section("At a glance", "glance", panels=glance_panels(groups)),
        Section("Benchmarks", "benchmarks", beside, curves_of(material.bench)),
        Section("Tuned", "tuned", best, curves_of(material.stored)),
        Section("Fused GEMMs", "gemms", panels=heats),
        Section("Regret", "regret", "What is lost at sizes that were not tuned.", regret),
        Section("Failures", "failures", "Trials that failed, by kind.", failures),
        Section("Environment", "environment", panels=_environments(material)),
    ]


def style_of(name: str) -> Style:
    """A contender's style: the same in every report and image, and different from other variants of its ops.

    A contender that is no variant, such as another project's kernel, has a dotted line.
    """
    if name in _FIXED:
        return _FIXED[name]
    is_ours = name in _variant_indices()
    index = _variant_indices().get(name, zlib.crc32(name.encode()))
    symbol = _SYMBOLS[index % len(_SYMBOLS)]
    return Style(_COLOURS[index % len(_COLOURS)], symbol, "solid" if is_ours and index < len(_COLOURS) else "dot")


@functools.cache
def _variant_indices() -> dict[str, int]:
    """Map each variant to an index that no other variant of its ops has; the commonest get the least."""
    kernels.discover()
    names_of = {op: set(variants(op)) for op in ops()}
    counted = Counter(name for names in names_of.values() for name in names if name not in _FIXED)
    found: dict[str, int] = {}
    for name in sorted(counted, key=lambda name: (-counted[name], name)):
        used = {found[other] for names in names_of.values() if name in names for other in names & found.keys()}
        found[name] = next(index for index in itertools.count() if index not in used)
    return found


def axis_of_sizes(sizes: Sequence[int]) -> Axis:
    """A logarithmic axis with powers of two over the range of `sizes`, few enough for a phone."""
    low, high = min(sizes).bit_length() - 1, max(sizes).bit_length()
    stride = next(stride for stride in (1, 2, 4, 5, 10, 20, 40) if (high - low) / stride <= 6)
    first = -(-low // stride) * stride
    ticks = [1 << power for power in range(first, high + 1, stride)] or [min(sizes)]
    texts = [format_bytes(tick) for tick in ticks]
    return {"title": {"text": "message"}, "type": "log", "tickmode": "array", "tickvals": ticks, "ticktext": texts}


def _axis_of_values(title: str) -> Axis:
    """A logarithmic axis without ticks of its own."""
    return {"title": {"text": title}, "type": "log", "tickformat": "~r", "nticks": 3}


# At a glance.


def glance_panels(groups: Mapping[Group, Sequence[Measured]]) -> list[Panel]:
    """Dispatch's speed-ups over the library, drawn and as a table; nothing if no row was compared with the library."""
    ranked = {group: sorted(best_by_shape(found).values(), key=_speed_up) for group, found in groups.items()}
    compared = {group: found for group, found in ranked.items() if found}
    if not compared:
        return []
    origins = list(dict.fromkeys(group.origin for group in compared))
    rows, spans = [], []
    for group, found in compared.items():
        mean = statistics.geometric_mean(map(_speed_up, found))
        ends = (found[0].over_library_text, found[-1].over_library_text)
        rows.append([group.title, f"{mean:.2f}×", *ends, str(len(found)), *([group.origin] if origins[1:] else [])])
        title = f"{group.title}, {group.origin}" if origins[1:] else group.title
        spans.append((label(title), _speed_up(found[0]), mean, _speed_up(found[-1])))
    note = (
        "Speed-up of what dispatch runs over the library: the geometric mean over the sizes, the least and the most. "
        "The note of each figure below names the library."
    )
    columns = ("problems", "mean", "least", "most", "sizes", *(["from"] if origins[1:] else []))
    title = "" if origins[1:] else f"From {origins[0]}"
    table = Table(columns, rows, summary="Speed-ups", is_open=True)
    return [Panel(title, note, figures=[_spans(spans)], tables=[table])]


def _speed_up(one: Measured) -> float:
    return one.over_library or 0.0


def _spans(spans: Sequence[tuple[str, float, float, float]]) -> Figure:
    """A mark at each mean, on a bar from the least to the most; a line where the library is."""
    names, ends = [name for name, *_ in spans], [(least, mean, most) for _, least, mean, most in spans]
    trace = {
        "type": "scatter",
        "mode": "markers",
        "name": "speed-up",
        "showlegend": False,
        "x": [mean for _, mean, _ in ends],
        "y": names,
        "error_x": {
            "type": "data",
            "symmetric": False,
            "array": [most - mean for _, mean, most in ends],
            "arrayminus": [mean - least for least, mean, _ in ends],
            "color": _GREY,
            "thickness": 2,
            "width": 0,
        },
        "marker": {"symbol": "circle", "size": 9, "color": _STRONG},
        "text": [f"{least:.2f}× to {most:.2f}×" for least, _, most in ends],
        "hovertemplate": "<b>%{y}</b> %{x:.2f}×<br>%{text}<extra></extra>",
    }
    low, high = min(0.5, *(least for least, _, _ in ends)), max(2.0, *(most for _, _, most in ends))
    powers = range(math.floor(math.log2(low)), math.ceil(math.log2(high)) + 1)
    ticks = {"tickvals": [2.0**power for power in powers], "ticktext": [f"{2.0**power:g}×" for power in powers]}
    layout = {
        "xaxis": {"title": {"text": "speed-up over the library"}, "type": "log", "tickmode": "array", **ticks},
        "yaxis": {"type": "category", "autorange": "reversed", "automargin": True},
        "shapes": [
            {
                "type": "line",
                "x0": 1,
                "x1": 1,
                "y0": 0,
                "y1": 1,
                "yref": "paper",
                "line": {"color": _GREY, "dash": "dash"},
            }
        ],
        "height": max(220, 110 + 24 * len(spans)),
    }
    return Figure("Speed-up over the library", [trace], layout)


# Latency and bus bandwidth by size, for every contender of one group.


def curves_panel(group: Group, found: Sequence[Measured], link_gb_s: float | None = None) -> Panel:
    """Figures of latency and bus bandwidth; bars for a single size."""
    link = group.link_gb_s(link_gb_s)
    return Panel(
        title=group.title,
        note=f"The library is {group.library}. From {group.origin}.",
        figures=curves(group, found, link),
        tables=[rows_table(group, found, link)],
    )


def curves(group: Group, found: Sequence[Measured], link: float | None) -> list[Figure]:
    """Latency by size and, where the op has one, bus bandwidth; bars for a single problem.

    Where problems of one size differ in shape, such as experts' problems, a line would go back and forth between them:
    then there is a mark for each shape.
    """
    drawn, shapes = lines(found), _shapes(found)
    if len(shapes) < 2:
        bars = [
            {
                **_bars("", style_of(name).colour, [points[0].latency_p50_us], [name], "µs"),
                "showlegend": False,
                "text": [f"{points[0].latency_p50_us:.2f}"],
            }
            for name, points in drawn.items()
        ]
        size = format_bytes(found[0].message_bytes)
        return [_bar_figure(f"Latency at {size}, µs", "µs", bars, is_stacked=True)]
    sizes = sorted(set(shapes.values()))
    by_size = len(sizes) == len(shapes)
    axis = axis_of_sizes(sizes) if by_size else _axis_of_shapes(list(shapes))
    latency = _traces(drawn, lambda one: one.latency_p50_us, "µs", by_size=by_size)
    found_floors = {size: floor_us(group.spec, size, group.world_size, link) for size in sizes if by_size}
    floors = {size: floor for size, floor in found_floors.items() if floor is not None}
    # A line far below all others would only compress them.
    least_us = min(one.latency_p50_us for one in found)
    if known := {size: floor for size, floor in floors.items() if floor >= least_us / 3}:
        latency.append(_ceiling(known, link))
    figures = [Figure("Latency, µs", latency, {"xaxis": axis, "yaxis": _axis_of_values("µs")})]
    if any(one.busbw_gb_s is not None for one in found):
        busbw = _traces(drawn, lambda one: one.busbw_gb_s, "GB/s", by_size=by_size)
        if floors and link is not None:
            busbw.append(_ceiling({sizes[0]: link, sizes[-1]: link}, link))
        layout = {"xaxis": axis, "yaxis": _axis_of_values("1e9 bytes/s")}
        figures.append(Figure("Bus bandwidth, 1e9 bytes/s", busbw, layout))
    return figures


def _shapes(found: Iterable[Measured]) -> dict[str, int]:
    """Shape to its size in bytes, by size and then by extents."""
    sizes = {one.shape: one.message_bytes for one in found}
    return dict(sorted(sizes.items(), key=lambda item: (item[1], parse_shape(item[0]))))


def _axis_of_shapes(shapes: Sequence[str]) -> Axis:
    title = {"text": "shape"}
    return {"title": title, "type": "category", "categoryorder": "array", "categoryarray": list(shapes)}


def _traces(
    drawn: Mapping[str, Sequence[Measured]], value: Callable[[Measured], float | None], unit: str, *, by_size: bool
) -> list[Trace]:
    """The contenders' lines, or marks by shape, and open stars around the candidates that dispatch runs."""

    def place(one: Measured) -> float | str:
        return one.message_bytes if by_size else one.shape

    found = []
    for name, line in drawn.items():
        if points := [one for one in line if value(one) is not None]:
            hover = [_hover(one) for one in points]
            trace = _line(name, style_of(name), map(place, points), map(value, points), hover, unit)
            found.append(trace if by_size else {**trace, "mode": "markers"})
    # The contender `tuned` is dispatch, so its line needs no stars.
    others = [one for name, line in drawn.items() if name != TUNED for one in line]
    if chosen := [one for one in others if one.is_chosen and value(one) is not None]:
        hover = [f"{format_bytes(one.message_bytes)}: {label(one.config)}{_wrapped(one.why)}" for one in chosen]
        note = "what dispatch runs"
        stars = _line(CHOSEN, Style(_STRONG), map(place, chosen), map(value, chosen), hover, unit, note=note)
        marker = {"symbol": "star-open", "size": 13, "color": _STRONG, "line": {"width": 1.6}}
        found.append({**stars, "mode": "markers", "marker": marker})
    return found


def _ceiling(points: Mapping[int, float], link: float | None) -> Trace:
    style = Style(_GREY, symbol="", dash="dash", width=1.6)
    note = f"{link:g} GB/s out of each GPU"
    return _line("measured ceiling", style, points, points.values(), note=note)


def _hover(one: Measured) -> str:
    spread = ""
    if one.latency_p10_us is not None and one.latency_p90_us is not None:
        spread = f"<br>p10 {one.latency_p10_us:.2f}, p90 {one.latency_p90_us:.2f} µs"
    versus = "" if one.over_library is None else f"<br>{one.over_library_text} the library"
    return f"{format_bytes(one.message_bytes)} ({one.shape}){spread}{versus}<br>{label(one.config)}"


def _wrapped(text: str, width: int = 60) -> str:
    return "".join("<br>" + label(part) for part in textwrap.wrap(text, width))


def rows_table(group: Group, found: Sequence[Measured], link: float | None) -> Table:
    """Every number of the figures."""
    columns = "size,shape,contender,p10 µs,p50 µs,p90 µs,library in that run µs,vs library,busbw GB/s,of ceiling,config"
    rows = []
    for one in found:
        floor = floor_us(group.spec, one.message_bytes, group.world_size, link)
        times = (one.latency_p10_us, one.latency_p50_us, one.latency_p90_us, one.library_us)
        rows.append(
            [
                format_bytes(one.message_bytes),
                one.shape,
                one.contender + (" ★" if one.is_chosen else ""),
                *("–" if value is None else f"{value:.2f}" for value in times),
                one.over_library_text,
                "–" if one.busbw_gb_s is None else f"{one.busbw_gb_s:.1f}",
                "–" if floor is None else f"{floor / one.latency_p50_us:.0%}",
                one.config,
            ]
        )
    return Table(columns.split(","), rows, summary=f"Table of {len(rows)} rows; ★ is what dispatch runs")


# Heat maps of fused GEMMs: dispatch's speed-up over the library, by M and by NxK.


def heat_figure(found: Sequence[Measured]) -> Figure:
    """The heat map of a group's GEMMs; cells without a measurement are empty."""
    ratios = {tuple(map(int, shape.split("x"))): one.over_library for shape, one in best_by_shape(found).items()}
    three = {extents: value for extents, value in ratios.items() if len(extents) == 3}
    columns = sorted({m for m, _, _ in three})
    rows = sorted({(n, k) for _, n, k in three}, key=lambda nk: (nk[0] * nk[1], nk))
    values = [[three.get((m, n, k)) for m in columns] for n, k in rows]
    ticks = {-MOST: "≤ 0.5×", math.log2(0.75): "0.75×", 0.0: "1×", math.log2(1.5): "1.5×", MOST: "≥ 2×"}
    trace = {
        "type": "heatmap",
        "x": [str(m) for m in columns],
        "y": [f"{n}×{k}" for n, k in rows],
        "z": [[None if not value else math.log2(value) for value in line] for line in values],
        "zmin": -MOST,
        "zmax": MOST,
        "colorscale": [list(stop) for stop in SCALE],
        "text": [["" if value is None else f"{value:.2f}" for value in line] for line in values],
        "texttemplate": "%{text}",
        "textfont": {"color": INK},
        "hovertemplate": "M %{x}, N×K %{y}: %{text}×<extra></extra>",
        "hoverongaps": False,
        "xgap": 2,
        "ygap": 2,
        "colorbar": {
            "tickvals": list(ticks),
            "ticktext": list(ticks.values()),
            "thickness": 12,
            "outlinewidth": 0,
        },
    }
    layout = {
        "xaxis": {"title": {"text": "M"}, "type": "category"},
        "yaxis": {"title": {"text": "N×K"}, "type": "category", "automargin": True},
        "height": max(240, 130 + 34 * len(rows)),
    }
    return Figure("Speed-up over the library", [trace], layout)


def heat_panel(group: Group, found: Sequence[Measured]) -> Panel:
    """One heat map, or a table for a single row or column; of the fastest contender if no row says what runs."""
    figure = heat_figure(found)
    columns, names, cells = (figure.data[0][axis] for axis in ("x", "y", "text"))
    says = any(one.contender in (TUNED, CHOSEN) or one.is_chosen for one in found)
    what = "what dispatch runs" if says else "the fastest contender"
    is_grid = len(names) > 1 and len(columns) > 1
    rows = [[name, *(f"{text}×" if text else "–" for text in line)] for name, line in zip(names, cells, strict=True)]
    table = Table(("N×K \\ M", *columns), rows, summary="Table of speed-ups", is_open=not is_grid)
    return Panel(
        title=group.title,
        note=f"Speed-up of {what} over {group.library} by problem MxNxK; above 1 it is faster. From {group.origin}.",
        figures=[figure] if is_grid else [],
        tables=[table, rows_table(group, found, None)],
    )


# Regret of each rule of selection, at sizes that were not tuned.

_MOST_REGRET = 1.5


def _percent(ratio: float) -> float:
    return round(100 * (ratio - 1), 3)


def regret_panel(origin: str, world_size: int, rules: Sequence[RegretRule]) -> Panel:
    """Mean and worst regret of each rule, at one world size of a file."""
    # A bar of several hundred percent, such as the library's, would hide the others; the table has its value.
    drawn = [rule for rule in rules if rule.mean < _MOST_REGRET] or rules
    names = [rule.rule for rule in drawn]
    bars = [
        _bars("mean", "#2f86d6", [_percent(rule.mean) for rule in drawn], names, "%"),
        _bars("worst", "#e69f00", [_percent(rule.worst) for rule in drawn], names, "%"),
    ]
    rows = [[r.rule, r.sizes or "–", f"{_percent(r.mean):.1f} %", f"{_percent(r.worst):.1f} %"] for r in rules]
    height = max(240, 110 + 44 * len(drawn))
    return Panel(
        title=f"By rule of selection, {world_size} ranks",
        note=f"Latency of each rule's choice over the best candidate's, at sizes that were not tuned. From {origin}.",
        figures=[_bar_figure("Regret, %", "% over the best candidate", bars, is_stacked=False, height=height)],
        tables=[Table(("rule", "sizes", "mean", "worst"), rows, summary=f"Table of {len(rows)} rules")],
    )


# Failures: trials that failed, by variant and kind, with their reasons.

_MOST_REASONS = 50
# Numbers outside of words such as fp16 and sm_90.
_NUMBER = re.compile(r"0x[0-9a-fA-F]+|(?<![\w.])\d+(?:[.,]\d+)*(?:e[+-]?\d+)?(?![A-Za-z_])")


def template(reason: str) -> str:
    """A reason with … for each number, so that similar reasons are equal."""
    return _NUMBER.sub("…", reason)


def failure_panel(stored: StoredFile) -> Panel:
    """The failed trials of one database, and how many were pruned or infeasible, which is no failure."""
    failed = [trial for trial in stored.trials if trial.status in _STATUS_COLOURS]
    kinds = Counter(trial.status for trial in stored.trials)
    said = (
        ("Pruned, because slow at first sight, and not measured to the end", kinds["pruned"]),
        ("Infeasible: the candidate does not fit the problem or the machine", kinds["infeasible"]),
    )
    counts: Counter[tuple[str, str]] = Counter((f"{t.problem.op} {t.variant}", t.status) for t in failed)
    names = sorted({name for name, _ in counts})
    seen = {status for _, status in counts}
    bars = [
        _bars(status, colour, [counts[name, status] for name in names], names)
        for status, colour in _STATUS_COLOURS.items()
        if status in seen
    ]
    height = max(220, 110 + 28 * len(names))
    return Panel(
        title=f"{len(failed)} of {len(stored.trials)} trials in {stored.name}",
        note=" ".join(f"{text}: {count}." for text, count in said if count),
        figures=[_bar_figure("Trials", "trials", bars, is_stacked=True, height=height)] if failed else [],
        tables=[_reasons(failed)] if failed else [],
    )


def _reasons(failed: Sequence[Trial]) -> Table:
    """Reasons by template; a reason that occurs once is shown as it is."""
    kinds: dict[tuple[str, str, str, str], list[str]] = {}
    for trial in failed:
        kind = (trial.problem.op, trial.variant, trial.status, template(trial.reason))
        kinds.setdefault(kind, []).append(trial.reason)
    ordered = sorted(kinds.items(), key=lambda item: -len(item[1]))
    rows = [
        [str(len(reasons)), *kind[:3], kind[3] if len(set(reasons)) > 1 else reasons[0]]
        for kind, reasons in ordered[:_MOST_REASONS]
    ]
    summary = "Reasons, the commonest first; … stands for numbers"
    if len(ordered) > _MOST_REASONS:
        summary += f"; {len(ordered) - _MOST_REASONS} rarer ones are left out"
    return Table(("trials", "op", "variant", "status", "reason"), rows, summary=summary)


# Environments and runs.


def _environments(material: Material) -> list[Panel]:
    panels = []
    for file in material.files:
        skipped = [{"line": line, "reason": reason} for line, reason in file.skipped.items()]
        panels += [_plain(file.name, "Measured with", file.software)]
        panels += [_plain(f"{file.name}: lines left out", "Lines", skipped)]
    for database in material.databases:
        found = [{"digest": there.digest[:8], **there.to_dict()} for there in database.environments]
        runs = [
            {
                "run": run.id,
                "command": run.command,
                "started": run.started_at.strftime("%Y-%m-%d %H:%M"),
                "budget": run.budget,
                "tunedcomm": run.version,
            }
            for run in database.runs
        ]
        panels += [_plain(database.name, "Measured in", found), _plain(f"{database.name}: runs", "Commands", runs)]
    return [panel for panel in panels if panel.tables[0].rows]


def _plain(title: str, summary: str, records: Sequence[Mapping[str, object]]) -> Panel:
    rows = [["–" if value == "" else str(value) for value in record.values()] for record in records]
    columns = list(records[0]) if records else []
    return Panel(title, tables=[Table(columns, rows, summary=summary, is_open=len(rows) <= 12)])
