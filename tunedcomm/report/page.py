"""The page: one HTML file that needs no network, with its style, its script and the plotting library in it."""

from __future__ import annotations

import html
import json
from collections.abc import Iterable, Sequence
from importlib import resources

from tunedcomm.report.panels import Figure, KeyEntry, Panel, Section, Table
from tunedcomm.report.styles import Style

__all__ = ["page"]

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


def page(title: str, subtitle: str, sections: Sequence[Section], footer: str) -> str:
    """The whole file.

    Args:
        title, subtitle: of the page, plain text.
        sections: those without panels are left out.
        footer: plain text.
    """
    from plotly.offline import get_plotlyjs

    shown = [section for section in sections if section.panels]
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
        figures = "".join(_figure(heading, figure, panel.title) for heading, figure in panel.figures)
        parts.append(f'<div class="figures">{figures}</div>')
    if panel.key:
        parts.append(f'<ul class="key" aria-label="Key">{"".join(map(_key_entry, panel.key))}</ul>')
    parts += [_table(table) for table in panel.tables]
    return "\n".join([*parts, "</article>"])


def _figure(heading: str, figure: Figure, title: str) -> str:
    """A place for the figure and its data; `</` would end the script that holds them."""
    layout = {name: value for name, value in figure["layout"].items() if name != "template"}
    plain = json.dumps({"data": figure["data"], "layout": layout}, allow_nan=False, separators=(",", ":"))
    data = plain.replace("</", r"<\/")
    label = _text(f"{heading}: {title}")
    return (
        f'<div><h4>{_text(heading)}</h4><div class="figure" role="img" aria-label="{label}"></div>'
        f'<script type="application/json">{data}</script></div>'
    )


def _key_entry(entry: KeyEntry) -> str:
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
