"""Latency and bus bandwidth against size, for every contender of one group, with plotly."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tunedcomm.report import ceiling
from tunedcomm.report.library import library_of
from tunedcomm.report.measured import CHOSEN, TUNED, Group, Line, Measured, lines
from tunedcomm.report.panels import Figure, KeyEntry, Panel, Table, size_text, size_ticks
from tunedcomm.report.styles import CEILING, CHOSEN_COLOUR, Style

if TYPE_CHECKING:
    import plotly.graph_objects as go

__all__ = ["CEILING_NAME", "HOW", "axis_of_sizes", "axis_of_values", "curves_panel", "rows_table"]

CEILING_NAME = "measured ceiling"
_COLUMNS = (
    "size",
    "shape",
    "contender",
    "p10 µs",
    "p50 µs",
    "p90 µs",
    "library in that run µs",
    "vs library",
    "busbw GB/s",
    "of ceiling",
    "config",
)
# Beside tables of rows of several runs.
HOW = (
    "vs library is the library's time in the row's own run over the row's p50. Dispatch compares rows by that ratio, "
    "so of two rows the one with more µs may be the faster. †: the time after the mark counts instead. That is the "
    "library's median at that size where its time in that run is missing or was disturbed, and for eager calls, whose "
    "host moves both, the root of their product. ‡: uncertain, for the time that counts is a half more or less than in "
    "the library's own row."
)


def curves_panel(
    group: Group, found: Sequence[Measured], styles: Mapping[str, Style], link_gb_s: float | None = None
) -> Panel:
    """Two figures: latency and bus bandwidth. Bars where there is but one size."""
    drawn = lines(found)
    sizes = sorted({one.message_bytes for one in found})
    link = ceiling.link_gb_s(group, link_gb_s)
    key = [KeyEntry(line.name, styles[line.name]) for line in drawn]
    figures: list[tuple[str, Figure]]
    if len(sizes) < 2:
        figures = [(f"Latency at {size_text(sizes[0])}, µs", _bars(drawn, styles))]
        key = []
    else:
        with_floor = link is not None and ceiling.floor_us(group, sizes[0], link) is not None
        figures = [("Latency, µs", _latency(group, drawn, sizes, styles, link))]
        if any(one.busbw_gb_s is not None for one in found):
            figures.append(("Bus bandwidth, 1e9 bytes/s", _busbw(drawn, sizes, styles, link if with_floor else None)))
        if any(one.is_chosen and one.contender != TUNED for one in found):
            key.append(KeyEntry(CHOSEN, Style(CHOSEN_COLOUR, "star-open", "none"), "what dispatch runs"))
        if with_floor:
            key.append(KeyEntry(CEILING_NAME, CEILING, f"{link:g} GB/s out of each GPU"))
    return Panel(
        title=group.title,
        anchor=group.slug,
        note=f"The library is {library_of(group)}. From {group.origin}.",
        figures=figures,
        key=key,
        tables=[rows_table(group, found, link)],
    )


def rows_table(group: Group, found: Sequence[Measured], link: float | None) -> Table:
    """Every number of the figures."""
    rows = []
    for one in found:
        floor = None if link is None else ceiling.floor_us(group, one.message_bytes, link)
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
    return Table(_COLUMNS, rows, summary=f"Table of {len(rows)} rows; ★ is what dispatch runs")


def _library(one: Measured) -> str:
    own = "–" if one.library_us is None else f"{one.library_us:.2f}"
    return own if one.library_reckoned_us is None else f"{own} † {one.library_reckoned_us:.2f}"


def axis_of_sizes(sizes: Sequence[int]) -> dict[str, Any]:
    """A logarithmic axis in powers of two."""
    ticks = size_ticks(sizes)
    return {
        "type": "log",
        "tickmode": "array",
        "tickvals": ticks,
        "ticktext": [size_text(tick) for tick in ticks],
        "title": {"text": "message"},
    }


def axis_of_values(values: Sequence[float], title: str) -> dict[str, Any]:
    """A logarithmic axis with labels at 1, 2 and 5 where the values span little, else at powers of ten."""
    low, high = min(values), max(values)
    steps: tuple[float, ...] = (1, 2, 5) if high / low < 300 else (1,)
    if high / low < 4:
        steps = (1, 1.1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 6, 8)
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    ticks: list[float] = [step * 10.0**power for power in range(first, last + 1) for step in steps]
    if low < high and sum(low <= tick <= high for tick in ticks) < 2:
        ticks = _even_ticks(low, high)
    return {
        "type": "log",
        "tickmode": "array",
        "tickvals": ticks,
        "ticktext": [f"{tick:g}" for tick in ticks],
        "title": {"text": title},
    }


def _even_ticks(low: float, high: float) -> list[float]:
    """Some three to six round values from `low` to `high`, and one beyond either."""
    unit = 10.0 ** math.floor(math.log10((high - low) / 2))
    step = next(unit * times for times in (1, 2, 5, 10) if (high - low) / (unit * times) <= 5)
    first = max(1, math.floor(low / step))
    return [round(i * step, 12) for i in range(first, math.ceil(high / step) + 1)]


def _latency(
    group: Group, drawn: Sequence[Line], sizes: Sequence[int], styles: Mapping[str, Style], link: float | None
) -> Figure:
    import plotly.graph_objects as go

    figure = go.Figure()
    floors = [(size, ceiling.floor_us(group, size, link)) for size in sizes] if link is not None else []
    # Where a line is far below every other one, it would only press them together.
    least = min(one.latency_p50_us for line in drawn for one in line.points) / 3
    known = [(size, floor) for size, floor in floors if floor is not None and floor >= least]
    if known:
        figure.add_trace(_ceiling([size for size, _ in known], [floor for _, floor in known]))
    for line in drawn:
        figure.add_trace(_trace(line, styles[line.name], [one.latency_p50_us for one in line.points], "µs"))
    _mark(figure, drawn, lambda one: one.latency_p50_us)
    return _done(
        figure,
        axis_of_sizes(sizes),
        axis_of_values([one.latency_p50_us for line in drawn for one in line.points], "µs"),
    )


def _busbw(drawn: Sequence[Line], sizes: Sequence[int], styles: Mapping[str, Style], link: float | None) -> Figure:
    import plotly.graph_objects as go

    figure = go.Figure()
    if link is not None:
        figure.add_trace(_ceiling([sizes[0], sizes[-1]], [link, link]))
    for line in drawn:
        points = tuple(one for one in line.points if one.busbw_gb_s is not None)
        if points:
            shown = Line(line.name, points)
            figure.add_trace(_trace(shown, styles[line.name], [one.busbw_gb_s or 0.0 for one in points], "GB/s"))
    _mark(figure, drawn, lambda one: one.busbw_gb_s)
    values = [one.busbw_gb_s or 1.0 for line in drawn for one in line.points]
    return _done(figure, axis_of_sizes(sizes), axis_of_values([*values, link or values[0]], "1e9 bytes/s"))


def _trace(line: Line, style: Style, values: Sequence[float], unit: str) -> go.Scatter:
    import plotly.graph_objects as go

    return go.Scatter(
        x=[one.message_bytes for one in line.points],
        y=list(values),
        name=line.name,
        mode="lines+markers",
        line={"color": style.colour, "dash": style.dash, "width": style.width},
        marker={"symbol": style.mark, "size": 8 if style.width > 2 else 6, "color": style.colour},
        text=[_hover(one) for one in line.points],
        hovertemplate=f"<b>%{{fullData.name}}</b> %{{y:.4~g}} {unit}<br>%{{text}}<extra></extra>",
    )


def _hover(one: Measured) -> str:
    spread = ""
    if one.latency_p10_us is not None and one.latency_p90_us is not None:
        spread = f"<br>p10 {one.latency_p10_us:.2f}, p90 {one.latency_p90_us:.2f} µs"
    versus = "" if one.over_library is None else f"<br>{one.over_library_text} the library, {_library(one)} µs"
    return f"{size_text(one.message_bytes)} ({one.shape}){spread}{versus}<br>{one.config}"


def _ceiling(x: Sequence[int], y: Sequence[float]) -> go.Scatter:
    import plotly.graph_objects as go

    return go.Scatter(
        x=list(x),
        y=list(y),
        name=CEILING_NAME,
        mode="lines",
        line={"color": CEILING.colour, "dash": CEILING.dash, "width": CEILING.width},
        hovertemplate="measured ceiling %{y:.4~g}<extra></extra>",
    )


def _mark(figure: go.Figure, drawn: Sequence[Line], value: Any) -> None:
    """Open stars around what dispatch runs."""
    import plotly.graph_objects as go

    # Where what dispatch ran was measured as a contender of its own, its line says all.
    rivals = [line for line in drawn if line.name != TUNED]
    chosen = [one for line in rivals for one in line.points if one.is_chosen and value(one) is not None]
    if not chosen:
        return
    figure.add_trace(
        go.Scatter(
            x=[one.message_bytes for one in chosen],
            y=[value(one) for one in chosen],
            name=CHOSEN,
            mode="markers",
            marker={"symbol": "star-open", "size": 13, "color": CHOSEN_COLOUR, "line": {"width": 1.6}},
            text=[f"{size_text(one.message_bytes)}: {one.config}{_wrapped(one.why)}" for one in chosen],
            hovertemplate="<b>chosen</b> %{text}<extra></extra>",
        )
    )


def _wrapped(text: str, width: int = 60) -> str:
    import html
    import textwrap

    return "".join("<br>" + html.escape(part) for part in textwrap.wrap(text, width))


def _bars(drawn: Sequence[Line], styles: Mapping[str, Style]) -> Figure:
    import plotly.graph_objects as go

    figure = go.Figure(
        go.Bar(
            x=[line.points[0].latency_p50_us for line in drawn],
            y=[line.name for line in drawn],
            orientation="h",
            marker={"color": [styles[line.name].colour for line in drawn]},
            text=[f"{line.points[0].latency_p50_us:.2f}" for line in drawn],
            hovertext=[_hover(line.points[0]) for line in drawn],
            hovertemplate="<b>%{y}</b> %{x} µs<br>%{hovertext}<extra></extra>",
        )
    )
    return _done(
        figure, {"title": {"text": "µs"}, "rangemode": "tozero"}, {"autorange": "reversed", "automargin": True}
    )


def _done(figure: go.Figure, xaxis: Mapping[str, Any], yaxis: Mapping[str, Any]) -> Figure:
    figure.update_layout(xaxis=xaxis, yaxis=yaxis, showlegend=False, template="none")
    plain: Figure = figure.to_plotly_json()
    return plain
