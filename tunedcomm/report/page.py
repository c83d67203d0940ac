"""The page: one HTML file that needs no network, with its style, its script and the plotting library in it."""

from __future__ import annotations

import importlib.util
import json
from typing import Any

from jinja2 import Environment, PackageLoader, select_autoescape
from markupsafe import Markup

from tunedcomm.db.values import utc_now
from tunedcomm.errors import MissingPackageError, printable
from tunedcomm.report.data import Material
from tunedcomm.report.figures import MARKS, Figure, Table, label, sections
from tunedcomm.version import VERSION


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


def _json(figure: Figure) -> Markup:
    """The figure's data; `</` would end the script that holds them."""
    labels = [{key: _labels(trace[key]) for key in ("name", "x", "y") if key in trace} for trace in figure.data]
    data = [trace | names for trace, names in zip(figure.data, labels, strict=True)]
    described = {"data": data, "layout": {"showlegend": False, **figure.layout}}
    return Markup(json.dumps(described, allow_nan=False, separators=(",", ":")).replace("</", r"<\/"))  # noqa: S704


def _labels(value: Any) -> Any:
    if isinstance(value, list):
        return [_labels(member) for member in value]
    return label(value) if isinstance(value, str) else value


def _plain(value: Any) -> Any:
    """A value that the page shows, with characters escaped that a terminal would obey."""
    return printable(value) if type(value) is str else value


def _numeric(table: Table) -> list[bool]:
    """True for each column of numbers."""
    columns = zip(*table.rows, strict=True) if table.rows else [()] * len(table.columns)
    return [all(cell == "–" or cell[:1].isdigit() for cell in column) for column in columns]


def render(material: Material, *, title: str = "tunedcomm report") -> str:
    """The whole file; sections without panels are left out.

    Raises:
        MissingPackageError: plotly is not installed.
    """
    need("plotly")
    from plotly.offline import get_plotlyjs

    made = utc_now().strftime("%Y-%m-%d %H:%M UTC")
    inputs = [*(database.name for database in material.databases), *(file.name for file in material.files)]
    shown = [section for section in sections(material) if section.panels]
    has_figures = any(panel.figures for section in shown for panel in section.panels)
    loader = PackageLoader("tunedcomm.report", "")
    environment = Environment(loader=loader, autoescape=select_autoescape(), finalize=_plain)
    environment.filters.update(json=_json, label=label, numeric=_numeric)
    return environment.get_template("page.html").render(
        title=title,
        subtitle=f"Made {made} by tunedcomm {VERSION} from {', '.join(inputs) or 'nothing'}.",
        sections=shown,
        marks=MARKS,
        plotly_js=get_plotlyjs() if has_figures else "",
    )
