"""The page: one HTML file that needs no network, with its style, its script and the plotting library in it."""

from __future__ import annotations

import html
import importlib.util
import json
import math
from collections.abc import Iterable, Sequence
from importlib import resources
from typing import Any

from tunedcomm.db.records import utc_now
from tunedcomm.errors import MissingPackageError
from tunedcomm.report.data import Material
from tunedcomm.report.figures import Axis, Figure, Heat, Panel, Section, Series, Style, Table, sections
from tunedcomm.version import VERSION

# The heat maps' colours: slower than the library in orange, as fast in a pale grey, faster in blue; from half to twice
# as fast in every figure, beyond that alike, so that a colour always says the same. INK reads on each of them, in dark
# mode, too.
SCALE = [(0.0, "#e8793a"), (0.25, "#f3b98d"), (0.5, "#eef1f5"), (0.75, "#9cc7ef"), (1.0, "#4391dd")]
MOST = 1.0  # of the scale, as the power of two
INK = "#0b1220"
# Outlines of the key's marks in a box of 30 by 14, around (15, 7).
_MARKS = {
    "circle": '<circle cx="15" cy="7" r="4" {fill}/>',
    "square": '<rect x="11" y="3" width="8" height="8" {fill}/>',
    "diamond": '<path d="M15 2l5 5-5 5-5-5z" {fill}/>',
    "triangle-up": '<path d="M15 2l5 9H10z" {fill}/>',
    "triangle-down": '<path d="M15 12l5-9H10z" {fill}/>',
    "cross": '<path d="M13 2h4v3h3v4h-3v3h-4V9h-3V5h3z" {fill}/>',
    "x": '<path d="M11 3l8 8M19 3l-8 8" stroke="{colour}" stroke-width="2.6"/>',
    "pentagon": '<path d="M15 2l5 4-2 6h-6l-2-6z" {fill}/>',
    "hexagram": '<path d="M15 1l2 3.500h4l-2 2.500 2 2.500h-4l-2 3.500-2-3.500H9l2-2.500-2-2.500h4z" {fill}/>',
    "star": '<path d="M15 1l2 4 4 .5-3 3 1 4.300-4-2.100-4 2.100 1-4.300-3-3 4-.5z" {fill}/>',
    "line-ew": "",
}
# Tables of no more are as wide as what is in them.
_FEW_COLUMNS = 3


def need(package: str) -> None:
    """Raise what to do if a package of the extra `report` is missing.

    Raises:
        MissingPackageError: it is not installed.
    """
    if importlib.util.find_spec(package) is None:
        raise MissingPackageError(
            f"a report is drawn with {package}, which is not installed; run `pip install 'tunedcomm[report]'`, which "
            "brings plotly and matplotlib"
        )


def render(material: Material, *, title: str = "tunedcomm report") -> str:
    """The whole file; sections without panels are left out.

    Raises:
        MissingPackageError: plotly is not installed.
    """
    need("plotly")
    from plotly.offline import get_plotlyjs

    made = utc_now().strftime("%Y-%m-%d %H:%M UTC")
    what = [*(database.name for database in material.databases), *(file.name for file in material.files)]
    subtitle = f"Made {made} by tunedcomm {VERSION} from {', '.join(what) or 'nothing'}."
    footer = (
        "Times are medians of the slowest rank, in µs. algbw = size/time and busbw = algbw × traffic a byte, by "
        "nccl-tests' definitions. One file, no network: plotly.js is in it."
    )
    shown = [section for section in sections(material) if section.panels]
    has_figures = any(panel.figures for section in shown for panel in section.panels)
    links = "".join(f'<li><a href="#{section.anchor}">{_text(section.title)}</a></li>' for section in shown)
    body = "\n".join(_section(section) for section in shown)
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<link rel="icon" href="data:,">
<title>{_text(title)}</title>
<style>
{_asset("page.css")}</style>
</head>
<body>
<header><h1>{_text(title)}</h1><button class="theme" type="button" hidden>Dark</button></header>
<header><p class="note">{_text(subtitle)}</p></header>
<nav aria-label="Sections"><ul>{links}</ul></nav>
<main>
<noscript><p>The figures need scripts. Every number is in the tables, which do not.</p></noscript>
{body}
</main>
<footer>{_text(footer)}</footer>
<script>{get_plotlyjs() if has_figures else ""}</script>
<script>
{_asset("page.js")}</script>
</body>
</html>
"""


def _asset(name: str) -> str:
    return resources.files("tunedcomm.report").joinpath(name).read_text(encoding="utf-8")


def _text(text: str) -> str:
    return html.escape(text, quote=True)


def _section(section: Section) -> str:
    note = f'<p class="note">{_text(section.note)}</p>' if section.note else ""
    panels = "\n".join(_panel(panel) for panel in section.panels)
    return f'<section id="{section.anchor}"><h2>{_text(section.title)}</h2>{note}\n{panels}\n</section>'


def _panel(panel: Panel) -> str:
    parts = [f'<article class="panel" id="{panel.anchor}">']
    if panel.title:
        parts.append(f"<h3>{_text(panel.title)}</h3>")
    if panel.note:
        parts.append(f'<p class="note">{_text(panel.note)}</p>')
    if panel.figures:
        figures = "".join(_figure(figure, panel.title) for figure in panel.figures)
        parts.append(f'<div class="figures">{figures}</div>')
    if panel.key:
        parts.append(f'<ul class="key" aria-label="Key">{"".join(map(_key_entry, panel.key))}</ul>')
    parts += [_table(table) for table in panel.tables]
    return "\n".join([*parts, "</article>"])


def _figure(figure: Figure, title: str) -> str:
    """A place for the figure and its data; `</` would end the script that holds them."""
    data = json.dumps(plotly_figure(figure), allow_nan=False, separators=(",", ":")).replace("</", r"<\/")
    label = _text(f"{figure.heading}: {title}")
    return (
        f'<div><h4>{_text(figure.heading)}</h4><div class="figure" role="img" aria-label="{label}"></div>'
        f'<script type="application/json">{data}</script></div>'
    )


def plotly_figure(figure: Figure) -> dict[str, Any]:
    """What plotly.js draws; page.js adds the theme and what suits the screen."""
    layout: dict[str, Any] = {"showlegend": False, "xaxis": _axis(figure.x), "yaxis": _axis(figure.y)}
    if figure.height is not None:
        layout["height"] = figure.height
    if figure.heat is not None:
        layout["xaxis"]["type"] = "category"
        layout["yaxis"] |= {"type": "category", "automargin": True}
        return {"data": [_heat(figure.heat)], "layout": layout}
    if any(series.kind == "bars" for series in figure.series):
        layout["barmode"] = "stack" if figure.is_stacked else "group"
        layout["xaxis"]["rangemode"] = "tozero"
        layout["yaxis"] |= {"autorange": "reversed", "automargin": True}
    return {"data": [_trace(series) for series in figure.series], "layout": layout}


def _axis(axis: Axis) -> dict[str, Any]:
    found: dict[str, Any] = {"title": {"text": axis.title}}
    if axis.is_log:
        found["type"] = "log"
    if axis.ticks is not None:
        found |= {"tickmode": "array", "tickvals": list(axis.ticks), "ticktext": list(axis.ticks.values())}
    return found


def _trace(series: Series) -> dict[str, Any]:
    style, name = series.style, series.name
    if series.kind == "bars":
        value = f"<b>%{{y}}</b> {_text(name) if series.in_key else ''} %{{x:.4~g}} {series.unit}"
        return {
            "type": "bar",
            "orientation": "h",
            "name": name,
            "x": list(series.x),
            "y": list(series.y),
            "marker": {"color": style.colour},
            "text": list(series.labels),
            "hovertext": list(series.hover),
            "hovertemplate": f"{value}{'<br>%{hovertext}' if series.hover else ''}<extra></extra>",
        }
    trace: dict[str, Any] = {
        "type": "scatter",
        "name": name,
        "x": list(series.x),
        "y": list(series.y),
        "text": list(series.hover),
        "hovertemplate": f"<b>%{{fullData.name}}</b> %{{y:.4~g}} {series.unit}<br>%{{text}}<extra></extra>",
    }
    if series.kind == "marks":
        marker = {"symbol": style.mark, "size": 13, "color": style.colour, "line": {"width": 1.6}}
        return {**trace, "mode": "markers", "marker": marker}
    line = {"color": style.colour, "dash": style.dash, "width": style.width}
    if style.mark == "line-ew":  # of the key alone
        shape = "hv" if series.kind == "steps" else "linear"
        return {**trace, "mode": "lines", "line": {**line, "shape": shape}}
    marker = {"symbol": style.mark, "size": 8 if style.width > 2 else 6, "color": style.colour}
    return {**trace, "mode": "lines+markers", "line": line, "marker": marker}


def _heat(heat: Heat) -> dict[str, Any]:
    ticks = {-MOST: "≤ 0.5×", math.log2(0.75): "0.75×", 0.0: "1×", math.log2(1.5): "1.5×", MOST: "≥ 2×"}
    return {
        "type": "heatmap",
        "x": list(heat.columns),
        "y": list(heat.rows),
        "z": [[None if not value else math.log2(value) for value in line] for line in heat.values],
        "zmin": -MOST,
        "zmax": MOST,
        "colorscale": [list(stop) for stop in SCALE],
        "text": [["" if value is None else f"{value:.2f}" for value in line] for line in heat.values],
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


def _key_entry(entry: Series) -> str:
    note = f" <small>{_text(entry.note)}</small>" if entry.note else ""
    return (
        f'<li><button type="button" aria-pressed="true" data-name="{_text(entry.name)}">{_swatch(entry.style)}'
        f"{_text(entry.name)}{note}</button></li>"
    )


def _swatch(style: Style) -> str:
    dashes = {"dash": ' stroke-dasharray="6 3"', "dot": ' stroke-dasharray="2 3"'}.get(style.dash, "")
    line = ""
    if style.dash != "none":
        line = f'<path d="M0 7h30" stroke="{style.colour}" stroke-width="{style.width}"{dashes}/>'
    is_open = style.mark.endswith("-open")
    fill = f'fill="none" stroke="{style.colour}" stroke-width="1.600"' if is_open else f'fill="{style.colour}"'
    mark = _MARKS[style.mark.removesuffix("-open")].format(fill=fill, colour=style.colour)
    return f'<svg viewBox="0 0 30 14" aria-hidden="true">{line}{mark}</svg>'


def _table(table: Table) -> str:
    numeric = [_all_numbers(row[i] for row in table.rows) for i in range(len(table.columns))]
    head = "".join(
        f'<th scope="col"{" class=number" if right else ""}>{_text(name)}</th>'
        for name, right in zip(table.columns, numeric, strict=True)
    )
    narrow = " narrow" if len(table.columns) <= _FEW_COLUMNS else ""
    body = "".join(f"<tr>{_cells(row, numeric)}</tr>\n" for row in table.rows)
    return (
        f"<details{' open' if table.is_open else ''}><summary>{_text(table.summary)}</summary>"
        f'<div class="scroll{narrow}" tabindex="0"><table><thead><tr>{head}</tr></thead>'
        f"<tbody>\n{body}</tbody></table></div></details>"
    )


def _cells(row: Sequence[str], numeric: Sequence[bool]) -> str:
    found = []
    for cell, right in zip(row, numeric, strict=True):
        kind = " class=number" if right else " class=long" if len(cell) > 60 else ""
        found.append(f"<td{kind}>{_text(cell)}</td>")
    return "".join(found)


def _all_numbers(cells: Iterable[str]) -> bool:
    return all(cell == "–" or cell[:1].isdigit() for cell in cells)
