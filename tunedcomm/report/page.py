"""The page: one HTML file that needs no network, with its style, its script and the plotting library in it."""

from __future__ import annotations

import html
import importlib.util
import json
from collections.abc import Iterable, Sequence
from importlib import resources

from tunedcomm.db.records import utc_now
from tunedcomm.errors import MissingPackageError
from tunedcomm.report.data import Material
from tunedcomm.report.figures import Figure, Panel, Section, Table, Trace, sections
from tunedcomm.version import VERSION

# The key's characters for plotly's markers.
_SYMBOLS = {
    "circle": "●",
    "circle-open": "○",
    "square": "■",
    "diamond": "◆",
    "triangle-up": "▲",
    "triangle-down": "▼",
    "cross": "✚",
    "x": "✖",
    "pentagon": "⬟",
    "hexagram": "✶",
    "star": "★",
    "star-open": "☆",
    "": "—",
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
    described = {"data": figure.data, "layout": {"showlegend": False, **figure.layout}}
    data = json.dumps(described, allow_nan=False, separators=(",", ":")).replace("</", r"<\/")
    label = _text(f"{figure.heading}: {title}")
    return (
        f'<div><h4>{_text(figure.heading)}</h4><div class="figure" role="img" aria-label="{label}"></div>'
        f'<script type="application/json">{data}</script></div>'
    )


def _key_entry(trace: Trace) -> str:
    name, note, marker = _text(trace["name"]), trace.get("meta"), trace["marker"]
    small = f" <small>{_text(note)}</small>" if note else ""
    symbol = f'<span style="color:{marker["color"]}" aria-hidden="true">{_SYMBOLS[marker["symbol"]]}</span>'
    return f'<li><button type="button" aria-pressed="true" data-name="{name}">{symbol}{name}{small}</button></li>'


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
