"""Figures and tables of a report, each described once: page.py draws them with plotly, images.py with matplotlib."""

from __future__ import annotations

import html
import math
import re
import statistics
import textwrap
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from tunedcomm.db.query import BEST_OF_VARIANT
from tunedcomm.db.records import Trial
from tunedcomm.errors import UnknownNameError
from tunedcomm.report.data import (
    CHOSEN,
    LIBRARY,
    TUNED,
    BenchFile,
    Group,
    Line,
    Material,
    Measured,
    RegretRule,
    StoredFile,
    best_by_shape,
    geomean,
    group_of,
    in_order,
    lines,
    speedup,
)
from tunedcomm.spec import Problem, format_shape, get_op

# After Okabe and Ito's colours, which can be told apart by the colour-blind, the darkest a little lighter.
_COLOURS = "#2f86d6 #e69f00 #00a37a #d678ac #8b6cf0 #56b4e9 #a39a00 #b0764a #1fb5b0 #e06c75".split()
_MARKS = "circle square diamond triangle-up cross x triangle-down pentagon hexagram".split()
_STATUS_COLOURS = {
    "infeasible": "#8a94a6",
    "compile_error": "#2f86d6",
    "incorrect": "#d678ac",
    "crashed": "#e05a2b",
    "hung": "#8b6cf0",
}


@dataclass(frozen=True, slots=True)
class Style:
    """Look of one contender, the same in every figure of a report.

    Attributes:
        colour: `#rrggbb`.
        mark: plotly's name of the marker.
        dash: plotly's name of the line's pattern; `none` for no line.
        width: of the line.
    """

    colour: str
    mark: str = "circle"
    dash: str = "solid"
    width: float = 1.8


_CHOSEN_STYLE = Style("#e05a2b", "star-open", "none")
_CEILING_STYLE = Style("#8a94a6", mark="line-ew", dash="dash", width=1.6)
_FIXED = {TUNED: Style("#e05a2b", mark="star", width=3.2), LIBRARY: Style("#8a94a6", mark="circle-open", width=2.2)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """One line, row of marks or set of bars.

    Attributes:
        name: series of one name are shown and hidden together.
        style: its look.
        kind: points joined by a line, alone, as steps without marks, or horizontal bars.
        x, y: the points; of bars y is a name.
        hover: a text for each point, in which HTML may stand.
        labels: texts beside bars.
        unit: of the value, for the hover text.
        note: beside its name in the key.
        in_key: it has a line in the key.
    """

    name: str
    style: Style
    kind: Literal["line", "marks", "steps", "bars"]
    x: Sequence[float]
    y: Sequence[float | str | None]
    hover: Sequence[str] = ()
    labels: Sequence[str] = ()
    unit: str = ""
    note: str = ""
    in_key: bool = True


@dataclass(frozen=True, slots=True)
class Axis:
    """An axis; `ticks` are values and their labels, None for the drawing library's own."""

    title: str = ""
    is_log: bool = False
    ticks: Mapping[float, str] | None = None


@dataclass(frozen=True, slots=True)
class Heat:
    """Speed-ups by column and row; None where nothing was measured."""

    columns: Sequence[str]
    rows: Sequence[str]
    values: Sequence[Sequence[float | None]]


@dataclass(frozen=True, slots=True)
class Figure:
    """Series over two axes, or a heat map.

    Attributes:
        heading: above it, which says what is drawn.
        x, y: axes; of bars and heat maps y has names, and bars begin at the top.
        series: what is drawn, from back to front.
        heat: drawn instead of series.
        height: in pixels; None for the page's own.
        is_stacked: bars of one name stand behind each other.
    """

    heading: str
    x: Axis
    y: Axis
    series: Sequence[Series] = ()
    heat: Heat | None = None
    height: int | None = None
    is_stacked: bool = False


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
        figures: share one key.
        tables: below, closed unless they say otherwise.
    """

    title: str
    anchor: str
    note: str = ""
    figures: Sequence[Figure] = ()
    tables: Sequence[Table] = ()

    @property
    def key(self) -> list[Series]:
        """A series of each name that has a line in the key."""
        named = {series.name: series for figure in self.figures for series in figure.series if series.in_key}
        return list(named.values())


@dataclass(frozen=True, slots=True)
class Section:
    """Panels under one heading."""

    title: str
    anchor: str
    note: str = ""
    panels: Sequence[Panel] = field(default_factory=tuple)


# Beside tables of rows of several runs.
_HOW = (
    "vs library is the library's time in the row's own run over the row's p50. Dispatch compares rows by that ratio, "
    "so of two rows the one with more µs may be the faster. †: the time after the mark counts instead. That is the "
    "library's median at that size where its time in that run is missing or was disturbed, and for eager calls, whose "
    "host moves both, the root of their product. ‡: uncertain, for the time that counts is a half more or less than in "
    "the library's own row."
)


def sections(material: Material) -> list[Section]:
    """All sections of the page."""
    groups = {**material.bench, **material.stored}
    regret = [panel for file in material.files for panel in regret_panels(file)]
    return [
        Section("At a glance", "glance", panels=glance_panels(groups)),
        Section(
            "Benchmarks",
            "benchmarks",
            f"Contenders that were measured beside each other, by message size. Tap a name to hide it. {_HOW}",
            _curves(material, material.bench),
        ),
        Section(
            "Tuned",
            "tuned",
            f"The best config of each variant at each size in the databases; a star marks what dispatch runs. {_HOW}",
            _curves(material, material.stored),
        ),
        Section(
            "Fused GEMMs",
            "gemms",
            _HOW,
            [heat_panel(group, found) for group, found in in_order(groups).items() if group.is_gemm],
        ),
        Section("Regret", "regret", "What is lost at sizes that were not tuned.", regret),
        Section("Sweeps", "sweeps", "How fast the search came to its best.", sweep_panels(material.databases)),
        Section(
            "Failures", "failures", "Trials that failed or could not run, by kind.", failure_panels(material.databases)
        ),
        Section("Environment", "environment", panels=_environments(material)),
    ]


def _curves(material: Material, groups: Mapping[Group, Sequence[Measured]]) -> list[Panel]:
    styles = styles_of(material)
    return [
        curves_panel(group, found, styles, material.link_gb_s) for group, found in groups.items() if not group.is_gemm
    ]


def styles_of(material: Material) -> dict[str, Style]:
    """A style for each contender; those that appear most often get the colours that differ most."""
    drawn = (one for groups in (material.bench, material.stored) for found in groups.values() for one in found)
    counted = Counter(one.contender for one in drawn if one.contender not in _FIXED)
    ordered = sorted(counted, key=lambda name: (-counted[name], name))
    found = {
        name: Style(_COLOURS[i % len(_COLOURS)], _MARKS[i % len(_MARKS)], "solid" if i < len(_COLOURS) else "dot")
        for i, name in enumerate(ordered)
    }
    return {**_FIXED, **found}


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


def axis_of_sizes(sizes: Sequence[int]) -> Axis:
    """A logarithmic axis in powers of two."""
    return Axis("message", is_log=True, ticks={tick: size_text(tick) for tick in size_ticks(sizes)})


def axis_of_values(values: Sequence[float], title: str) -> Axis:
    """A logarithmic axis with labels at 1, 2 and 5 where the values span little, else at powers of ten."""
    low, high = min(values), max(values)
    steps: tuple[float, ...] = (1, 2, 5) if high / low < 300 else (1,)
    if high / low < 4:
        steps = (1, 1.1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 6, 8)
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    ticks: list[float] = [step * 10.0**power for power in range(first, last + 1) for step in steps]
    if low < high and sum(low <= tick <= high for tick in ticks) < 2:
        ticks = _even_ticks(low, high)
    return Axis(title, is_log=True, ticks={tick: f"{tick:g}" for tick in ticks})


def _even_ticks(low: float, high: float) -> list[float]:
    """Some three to six round values from `low` to `high`, and one beyond either."""
    unit = 10.0 ** math.floor(math.log10((high - low) / 2))
    step = next(unit * times for times in (1, 2, 5, 10) if (high - low) / (unit * times) <= 5)
    first = max(1, math.floor(low / step))
    return [round(i * step, 12) for i in range(first, math.ceil(high / step) + 1)]


# At a glance.


def glance_panels(groups: Mapping[Group, Sequence[Measured]]) -> list[Panel]:
    """The table of speed-ups of dispatch over the library, by op; none where nothing was compared with the library."""
    rows, is_uncertain = [], False
    for group, found in in_order(groups).items():
        ordered = sorted(best_by_shape(found).values(), key=lambda one: one.over_library or 0.0)
        mean = geomean(one.over_library for one in ordered if one.over_library is not None)
        if mean is None:
            continue
        least, most = ordered[0], ordered[-1]
        is_uncertain = is_uncertain or least.is_unsteady or most.is_unsteady
        ends = (least.over_library_text, most.over_library_text)
        rows.append([group.title, f"{mean:.2f}×", *ends, str(len(ordered)), group.library, group.origin])
    if not rows:
        return []
    note = (
        "How many times as fast as the library what dispatch runs is: the geometric mean over the sizes, the least and "
        "the most. Under “over” stands what the library is."
    )
    if is_uncertain:
        note += " ‡: the library's time behind it is a half more or less than in its own row: the number is uncertain."
    columns = ("problems", "mean", "least", "most", "sizes", "over", "from")
    return [Panel("", "speedups", note, tables=[Table(columns, rows, summary="Speed-ups", is_open=True)])]


# Latency and bus bandwidth against size, for every contender of one group.


def curves_panel(
    group: Group, found: Sequence[Measured], styles: Mapping[str, Style], link_gb_s: float | None = None
) -> Panel:
    """Two figures: latency and bus bandwidth. Bars where there is but one size."""
    link = group.link_gb_s(link_gb_s)
    return Panel(
        title=group.title,
        anchor=group.slug,
        note=f"The library is {group.library}. From {group.origin}.",
        figures=curves(group, found, styles, link),
        tables=[rows_table(group, found, link)],
    )


def curves(group: Group, found: Sequence[Measured], styles: Mapping[str, Style], link: float | None) -> list[Figure]:
    """Latency by size and, where the op has one, bus bandwidth; bars where there is but one size."""
    drawn = lines(found)
    sizes = sorted({one.message_bytes for one in found})
    if len(sizes) < 2:
        bars = [
            Series(
                name=line.name,
                style=styles[line.name],
                kind="bars",
                x=[line.points[0].latency_p50_us],
                y=[line.name],
                hover=[_hover(line.points[0])],
                labels=[f"{line.points[0].latency_p50_us:.2f}"],
                unit="µs",
                in_key=False,
            )
            for line in drawn
        ]
        return [Figure(f"Latency at {size_text(sizes[0])}, µs", Axis("µs"), Axis(), bars, is_stacked=True)]
    latency = _series(drawn, styles, lambda one: one.latency_p50_us, "µs")
    values = [one.latency_p50_us for one in found]
    floors = {size: floor for size in sizes if (floor := group.floor_us(size, link)) is not None}
    # Where a line is far below every other one, it would only press them together.
    known = {size: floor for size, floor in floors.items() if floor >= min(values) / 3}
    if known:
        latency.append(_ceiling(known, link))
    figures = [Figure("Latency, µs", axis_of_sizes(sizes), axis_of_values(values, "µs"), latency)]
    values = [one.busbw_gb_s for one in found if one.busbw_gb_s is not None]
    if values:
        busbw = _series(drawn, styles, lambda one: one.busbw_gb_s, "GB/s")
        if floors and link is not None:
            busbw.append(_ceiling({sizes[0]: link, sizes[-1]: link}, link))
            values.append(link)
        axis = axis_of_values(values, "1e9 bytes/s")
        figures.append(Figure("Bus bandwidth, 1e9 bytes/s", axis_of_sizes(sizes), axis, busbw))
    return figures


def _series(
    drawn: Sequence[Line], styles: Mapping[str, Style], value: Callable[[Measured], float | None], unit: str
) -> list[Series]:
    """The contenders' lines, and open stars around what dispatch runs."""
    found = []
    for line in drawn:
        points = [one for one in line.points if value(one) is not None]
        if points:
            sizes, values = [one.message_bytes for one in points], [value(one) for one in points]
            hover = [_hover(one) for one in points]
            found.append(
                Series(name=line.name, style=styles[line.name], kind="line", x=sizes, y=values, hover=hover, unit=unit)
            )
    # Where what dispatch ran was measured as a contender of its own, its line says all.
    others = [one for line in drawn if line.name != TUNED for one in line.points]
    chosen = [one for one in others if one.is_chosen and value(one) is not None]
    if chosen:
        found.append(
            Series(
                name=CHOSEN,
                style=_CHOSEN_STYLE,
                kind="marks",
                x=[one.message_bytes for one in chosen],
                y=[value(one) for one in chosen],
                hover=[f"{size_text(one.message_bytes)}: {one.config}{_wrapped(one.why)}" for one in chosen],
                unit=unit,
                note="what dispatch runs",
            )
        )
    return found


def _ceiling(points: Mapping[int, float], link: float | None) -> Series:
    return Series(
        name="measured ceiling",
        style=_CEILING_STYLE,
        kind="line",
        x=list(points),
        y=list(points.values()),
        note=f"{link:g} GB/s out of each GPU",
    )


def _hover(one: Measured) -> str:
    spread = ""
    if one.latency_p10_us is not None and one.latency_p90_us is not None:
        spread = f"<br>p10 {one.latency_p10_us:.2f}, p90 {one.latency_p90_us:.2f} µs"
    versus = "" if one.over_library is None else f"<br>{one.over_library_text} the library, {_library(one)} µs"
    return f"{size_text(one.message_bytes)} ({one.shape}){spread}{versus}<br>{one.config}"


def _wrapped(text: str, width: int = 60) -> str:
    return "".join("<br>" + html.escape(part) for part in textwrap.wrap(text, width))


def _library(one: Measured) -> str:
    own = "–" if one.library_us is None else f"{one.library_us:.2f}"
    return own if one.library_reckoned_us is None else f"{own} † {one.library_reckoned_us:.2f}"


def rows_table(group: Group, found: Sequence[Measured], link: float | None) -> Table:
    """Every number of the figures."""
    columns = "size,shape,contender,p10 µs,p50 µs,p90 µs,library in that run µs,vs library,busbw GB/s,of ceiling,config"
    rows = []
    for one in found:
        floor = group.floor_us(one.message_bytes, link)
        times = (one.latency_p10_us, one.latency_p50_us, one.latency_p90_us)
        rows.append(
            [
                size_text(one.message_bytes),
                one.shape,
                one.contender + (" ★" if one.is_chosen else ""),
                *("–" if value is None else f"{value:.2f}" for value in times),
                _library(one),
                one.over_library_text,
                "–" if one.busbw_gb_s is None else f"{one.busbw_gb_s:.1f}",
                "–" if floor is None else f"{floor / one.latency_p50_us:.0%}",
                one.config,
            ]
        )
    return Table(columns.split(","), rows, summary=f"Table of {len(rows)} rows; ★ is what dispatch runs")


# Speed-up heat maps of fused GEMMs: the library's time over that of what dispatch runs, by M and by NxK.


def heat_of(found: Sequence[Measured]) -> Heat:
    """Columns (M), rows (N×K) and the speed-ups between them."""
    ratios = {tuple(int(part) for part in shape.split("x")): value for shape, value in speedup(found).items()}
    three = {extents: value for extents, value in ratios.items() if len(extents) == 3}
    columns = sorted({m for m, _, _ in three})
    rows = sorted({(n, k) for _, n, k in three}, key=lambda nk: (nk[0] * nk[1], nk))
    values = [[three.get((m, n, k)) for m in columns] for n, k in rows]
    return Heat([str(m) for m in columns], [f"{n}×{k}" for n, k in rows], values)


def heat_figure(heat: Heat) -> Figure:
    """The heat map."""
    return Figure(
        "Speed-up over the library", Axis("M"), Axis("N×K"), heat=heat, height=max(240, 130 + 34 * len(heat.rows))
    )


def heat_panel(group: Group, found: Sequence[Measured]) -> Panel:
    """One heat map, or a table of one row or column; of the fastest contender where no row says what runs."""
    heat = heat_of(found)
    says = any(one.contender in (TUNED, CHOSEN) or one.is_chosen for one in found)
    what = "what dispatch runs" if says else "the fastest contender"
    is_grid = len(heat.rows) > 1 and len(heat.columns) > 1
    rows = [
        [name, *("–" if value is None else f"{value:.2f}×" for value in line)]
        for name, line in zip(heat.rows, heat.values, strict=True)
    ]
    table = Table(("N×K \\ M", *heat.columns), rows, summary="Table of speed-ups", is_open=not is_grid)
    return Panel(
        title=group.title,
        anchor=group.slug,
        note=f"Speed-up of {what} over {group.library} by problem MxNxK; above 1 it is faster. From {group.origin}.",
        figures=[heat_figure(heat)] if is_grid else [],
        tables=[table, rows_table(group, found, None)],
    )


# Regret: what is lost at sizes that were not tuned, by rule of selection, and by what a database chooses there.


def regret_panels(file: BenchFile) -> list[Panel]:
    """The figures of one file: a table of rules, or candidates that were timed beside each other."""
    by_ranks: dict[int, list[RegretRule]] = {}
    for rule in file.rules:
        by_ranks.setdefault(rule.world_size, []).append(rule)
    panels = [_rules_panel(file.name, world_size, rules) for world_size, rules in sorted(by_ranks.items())]
    if found := losses(file.candidates):
        panels.append(_losses_panel(file.name, found))
    return panels


def _percent(ratio: float) -> float:
    return round(100 * (ratio - 1), 3)


def _rules_panel(origin: str, world_size: int, rules: Sequence[RegretRule]) -> Panel:
    colours = {"mean": "#2f86d6", "worst": "#e69f00"}
    series = [
        Series(
            name=name,
            style=Style(colour, "square", "none"),
            kind="bars",
            x=[_percent(getattr(rule, name)) for rule in rules],
            y=[rule.rule for rule in rules],
            unit="%",
        )
        for name, colour in colours.items()
    ]
    rows = [[r.rule, r.sizes or "–", f"{_percent(r.mean):.1f} %", f"{_percent(r.worst):.1f} %"] for r in rules]
    height = max(240, 110 + 44 * len(rules))
    return Panel(
        title=f"By rule of selection, {world_size} ranks",
        anchor=f"regret-rules-{world_size}",
        note=f"Latency of each rule's choice over the best candidate's, at sizes that were not tuned. From {origin}.",
        figures=[Figure("Regret, %", Axis("% over the best candidate"), Axis(), series, height=height)],
        tables=[Table(("rule", "sizes", "mean", "worst"), rows, summary=f"Table of {len(rows)} rules")],
    )


def losses(candidates: Sequence[Measured]) -> dict[int, list[tuple[int, float, float]]]:
    """World size to (message bytes, best candidate's µs, library's µs), by size, each of the newest run."""
    runs: dict[tuple[int, int], dict[str, list[Measured]]] = {}
    for one in candidates:
        key = (one.group.world_size, one.message_bytes)
        runs.setdefault(key, {}).setdefault(f"{one.date} {one.run_id}", []).append(one)
    found: dict[int, list[tuple[int, float, float]]] = {}
    for (world_size, size), by_run in sorted(runs.items()):
        members = by_run[max(by_run)]
        library = [one.latency_p50_us for one in members if one.contender == LIBRARY]
        others = [one.latency_p50_us for one in members if one.contender != LIBRARY]
        if library and others:
            found.setdefault(world_size, []).append((size, min(others), min(library)))
    return found


def _losses_panel(origin: str, found: Mapping[int, Sequence[tuple[int, float, float]]]) -> Panel:
    """What one would lose by never choosing: the library's time over the best candidate's."""
    series, rows = [], []
    for i, (world_size, points) in enumerate(sorted(found.items())):
        series.append(
            Series(
                name=f"{world_size} ranks",
                style=Style(_COLOURS[i % len(_COLOURS)], _MARKS[i % len(_MARKS)]),
                kind="line",
                x=[size for size, _, _ in points],
                y=[library / best for _, best, library in points],
                hover=[size_text(size) for size, _, _ in points],
                unit="×",
            )
        )
        rows += [
            [str(world_size), size_text(size), f"{best:.2f}", f"{library:.2f}", f"{library / best:.2f}×"]
            for size, best, library in points
        ]
    every = [point for points in found.values() for point in points]
    values = axis_of_values([library / best for _, best, library in every], "× the best")
    columns = ("ranks", "size", "best µs", "library µs", "ratio")
    return Panel(
        title="Between the tuned sizes: the library against the best candidate",
        anchor="regret-library",
        note=f"What always running the library would cost at the sizes at which regret was measured. From {origin}.",
        figures=[
            Figure("Library over the best candidate", axis_of_sizes([size for size, _, _ in every]), values, series)
        ],
        tables=[Table(columns, rows, summary=f"Table of {len(rows)} sizes")],
    )


# Sweeps: best so far against trial number.

# Fewer trials of the search show no course.
_LEAST_TRIALS = 12
_NO_SEARCH = (
    f"No database here holds a search of {_LEAST_TRIALS} trials of one problem; fewer show no course. One that was "
    "exported keeps the finals: after a sweep, report from the database that tune wrote, which is the user database "
    "unless --db named another one."
)


def best_so_far(trials: Iterable[Trial]) -> list[float | None]:
    """After each trial of the search, in the order of their times, the least latency until then over that of the end.

    Trials that failed count as trials; None until one has run.
    """
    ordered = sorted((t for t in trials if not t.final), key=lambda t: (t.created_at, t.id or 0))
    best: float | None = None
    course: list[float | None] = []
    for trial in ordered:
        if trial.status == "ok" and trial.latency_p50_us is not None:
            best = trial.latency_p50_us if best is None else min(best, trial.latency_p50_us)
        course.append(best)
    return [None if value is None or best is None else value / best for value in course]


def sweep_panels(databases: Sequence[StoredFile]) -> list[Panel]:
    """The courses of all searches; where there is none, a sentence that says why. Nothing of no databases."""
    panels = [panel for stored in databases for panel in _sweeps_of(stored)]
    return [Panel("", "no-sweeps", _NO_SEARCH)] if databases and not panels else panels


def _sweeps_of(stored: StoredFile) -> list[Panel]:
    """One for each op, dtype, world size and mode whose search is stored."""
    searched: dict[Group, dict[Problem, list[Trial]]] = {}
    for trial in stored.trials:
        group = group_of(stored.name, trial.problem, trial.environment)
        searched.setdefault(group, {}).setdefault(trial.problem, []).append(trial)
    panels = []
    for group, by_problem in in_order(searched).items():
        courses = {problem: best_so_far(trials) for problem, trials in by_problem.items() if _is_whole(trials)}
        shown = {p: course for p, course in courses.items() if len(course) >= _LEAST_TRIALS and course[-1] is not None}
        if shown:
            panels.append(_sweep_panel(group, shown))
    return panels


def _is_whole(trials: Iterable[Trial]) -> bool:
    """An export keeps no more of a search than the few best of each variant, which show no course."""
    counts = Counter(trial.variant for trial in trials if trial.status == "ok" and not trial.final)
    return max(counts.values(), default=0) > BEST_OF_VARIANT


def _bytes(problem: Problem) -> int:
    try:
        return get_op(problem.op).message_bytes(problem)
    except UnknownNameError:
        return problem.nbytes


def _between(share: float, first: str = "#56b4e9", second: str = "#e05a2b") -> str:
    """The colour at `share` of the way from the first to the second."""
    parts = zip(bytes.fromhex(first[1:]), bytes.fromhex(second[1:]), strict=True)
    return "#" + "".join(f"{round(a + (b - a) * share):02x}" for a, b in parts)


def _sweep_panel(group: Group, courses: Mapping[Problem, Sequence[float | None]]) -> Panel:
    ordered = sorted(courses, key=lambda problem: (_bytes(problem), problem.shape))
    ends = {ordered[0], ordered[len(ordered) // 2], ordered[-1]}
    series = [
        _course(
            size_text(_bytes(problem)),
            courses[problem],
            Style(_between(i / max(1, len(ordered) - 1)), "line-ew", width=1.2),
            in_key=problem in ends,
        )
        for i, problem in enumerate(ordered)
    ]
    middle = _median([courses[problem] for problem in ordered])
    series.append(_course("median of the problems", middle, Style("#e05a2b", "line-ew", width=3.5), in_key=True))
    rows = [
        [
            size_text(_bytes(p)),
            format_shape(p.shape),
            str(len(courses[p])),
            _first(courses[p], 1.05),
            _first(courses[p], 1.0),
        ]
        for p in ordered
    ]
    values = axis_of_values([value for course in courses.values() for value in course if value], "× the best")
    columns = ("size", "shape", "trials", "within 5 % after", "best after")
    decades = {float(10**power): str(10**power) for power in range(len(str(max(map(len, courses.values())))) + 1)}
    return Panel(
        title=group.title,
        anchor=f"convergence-{group.slug}",
        note=f"Best latency so far over the best in the end, by trial; one line a problem. From {group.origin}.",
        figures=[Figure("Best so far over best", Axis("trial", is_log=True, ticks=decades), values, series)],
        tables=[Table(columns, rows, summary=f"Table of {len(rows)} problems")],
    )


def _course(name: str, course: Sequence[float | None], style: Style, *, in_key: bool) -> Series:
    trials = range(1, len(course) + 1)
    hover = [f"trial {trial}" for trial in trials]
    return Series(
        name=name, style=style, kind="steps", x=list(trials), y=list(course), hover=hover, unit="×", in_key=in_key
    )


def _first(course: Sequence[float | None], ratio: float) -> str:
    """The number of the first trial after which no more than `ratio` was lost."""
    return next((str(i) for i, value in enumerate(course, 1) if value is not None and value <= ratio), "–")


def _median(courses: Sequence[Sequence[float | None]]) -> list[float | None]:
    found: list[float | None] = []
    for i in range(max(len(course) for course in courses)):
        # A search that ended keeps what it found.
        values = [course[min(i, len(course) - 1)] for course in courses]
        known = [value for value in values if value is not None]
        found.append(statistics.median(known) if known else None)
    return found


# Failures: trials that failed, by variant and kind, with their reasons.

_PRUNED = "pruned"
_MOST_REASONS = 50
# Numbers, those within words such as fp16 and sm_90 apart.
_NUMBER = re.compile(r"0x[0-9a-fA-F]+|(?<![\w.])\d+(?:[.,]\d+)*(?:e[+-]?\d+)?(?![A-Za-z_])")


def template(reason: str) -> str:
    """A reason with … for its numbers: what many trials have in common."""
    return _NUMBER.sub("…", reason)


def failure_panels(databases: Sequence[StoredFile]) -> list[Panel]:
    """One for each database in which trials failed; where none did, a sentence. Nothing of no databases."""
    panels = [panel for stored in databases if (panel := _failures_of(stored)) is not None]
    if panels or not databases:
        return panels
    pruned = sum(trial.status == _PRUNED for stored in databases for trial in stored.trials)
    return [Panel("", "no-failures", f"None. {_of_pruned(pruned)}".strip())]


def _of_pruned(count: int) -> str:
    if not count:
        return ""
    what = (
        "1 trial was pruned: slow at first sight, it was"
        if count == 1
        else f"{count} trials were pruned: slow at first sight, they were"
    )
    return f"{what} not measured to the end."


def _failures_of(stored: StoredFile) -> Panel | None:
    failed = [trial for trial in stored.trials if trial.status not in ("ok", _PRUNED)]
    if not failed:
        return None
    counts: Counter[tuple[str, str]] = Counter((f"{t.problem.op} {t.variant}", t.status) for t in failed)
    names = sorted({name for name, _ in counts})
    series = [
        Series(
            name=status,
            style=Style(colour, "square", "none"),
            kind="bars",
            x=[counts[name, status] for name in names],
            y=names,
        )
        for status, colour in _STATUS_COLOURS.items()
        if any(status == other for _, other in counts)
    ]
    height = max(220, 110 + 28 * len(names))
    return Panel(
        title=f"{len(failed)} of {len(stored.trials)} trials in {stored.name}",
        anchor=f"failures-{stored.name}",
        note=_of_pruned(sum(trial.status == _PRUNED for trial in stored.trials)),
        figures=[Figure("Trials", Axis("trials"), Axis(), series, height=height, is_stacked=True)],
        tables=[_reasons(failed)],
    )


def _reasons(failed: Sequence[Trial]) -> Table:
    """By what they have in common; of a kind that there is once, the reason itself."""
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
        if file.software:
            rows = [[software[name] or "–" for name in file.software[0]] for software in file.software]
            panels.append(_plain(file.name, f"environment-{file.name}", list(file.software[0]), rows, "Measured with"))
        if file.skipped:
            rows = [[str(line), reason] for line, reason in file.skipped.items()]
            title = f"{file.name}: lines left out"
            panels.append(_plain(title, f"skipped-{file.name}", ("line", "reason"), rows, "Lines"))
    for database in material.databases:
        name = database.name
        found = [{"digest": there.digest[:8], **there.to_dict()} for there in database.environments]
        if found:
            rows = [[str(value) for value in row.values()] for row in found]
            panels.append(_plain(name, f"environment-{name}", list(found[0]), rows, "Measured in"))
        rows = [
            [str(run.id), run.command, run.started_at.strftime("%Y-%m-%d %H:%M"), run.budget, run.version]
            for run in database.runs
        ]
        if rows:
            columns = ("run", "command", "started", "budget", "tunedcomm")
            panels.append(_plain(f"{name}: runs", f"runs-{name}", columns, rows, "Commands"))
    return panels


def _plain(title: str, anchor: str, columns: Sequence[str], rows: Sequence[Sequence[str]], summary: str) -> Panel:
    return Panel(title, anchor, tables=[Table(columns, rows, summary=summary, is_open=len(rows) <= 12)])
