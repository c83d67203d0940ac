"""From databases and CSV files to a page and images."""

from __future__ import annotations

import importlib.util
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tunedcomm.db.layers import Layer
from tunedcomm.db.records import utc_now
from tunedcomm.errors import MissingPackageError
from tunedcomm.report.bench_rows import BenchFile, read_csv
from tunedcomm.report.curves import HOW, curves_panel
from tunedcomm.report.failures import failure_panels
from tunedcomm.report.glance import glance_panels
from tunedcomm.report.heat import heat_panel
from tunedcomm.report.measured import Group, Measured, group_up, in_order
from tunedcomm.report.page import page
from tunedcomm.report.panels import Panel, Section, Table
from tunedcomm.report.png import write_images
from tunedcomm.report.regret import regret_panels
from tunedcomm.report.stored import Chooser, StoredFile, measurements, read_layer
from tunedcomm.report.styles import Style, styles_of
from tunedcomm.report.sweeps import sweep_panels
from tunedcomm.version import VERSION

__all__ = ["Material", "gather", "need", "render", "write_png"]

_PACKAGES = ("plotly", "matplotlib")


def need(package: str) -> None:
    """Raise what to do if a package of the extra `report` is missing.

    Raises:
        MissingPackageError: it is not installed.
    """
    if importlib.util.find_spec(package) is None:
        raise MissingPackageError(
            f"a report is drawn with {package}, which is not installed; run `pip install 'tunedcomm[report]'`, which "
            f"brings {' and '.join(_PACKAGES)}"
        )


@dataclass(slots=True)
class Material:
    """Everything that a report shows.

    Attributes:
        files: the CSV files.
        databases: the databases, in their order.
        bench, stored: measurements by figure, of the files and of the databases.
        link_gb_s: the measured ceiling that the caller gave; None for what is known of the hardware.
    """

    files: list[BenchFile] = field(default_factory=list)
    databases: list[StoredFile] = field(default_factory=list)
    bench: dict[Group, list[Measured]] = field(default_factory=dict)
    stored: dict[Group, list[Measured]] = field(default_factory=dict)
    link_gb_s: float | None = None

    @property
    def styles(self) -> dict[str, Style]:
        """Of every contender."""
        return styles_of(
            one.contender for group in (self.bench, self.stored) for found in group.values() for one in found
        )


def gather(
    layers: Sequence[Layer], csv_files: Sequence[Path], *, op: str | None = None, link_gb_s: float | None = None
) -> Material:
    """Read databases and CSV files.

    Args:
        layers: databases to read, nearest first; dispatch is asked what it makes of them together.
        csv_files: what `tunedcomm bench --csv` and bench/regret.py wrote.
        op: only this op's rows.
        link_gb_s: what one GPU sends to its peers at most, in 1e9 bytes/s; None for what is known of the hardware.

    Raises:
        DatabaseError: a database cannot be read.
        ValueError: a file cannot be read or holds something else.
    """
    material = Material(link_gb_s=link_gb_s)
    material.files = [read_csv(path) for path in csv_files]
    rows = [row for file in material.files for row in file.rows]
    material.bench = group_up(row for row in rows if op in (None, row.group.op))
    chooser = Chooser(layers)
    names: Counter[str] = Counter()
    for layer in layers:
        name = Path(layer.target).name if "://" not in layer.target else layer.name
        names[name] += 1
        name += f" ({names[name]})" if names[name] > 1 else ""
        material.databases.append(read_layer(layer, name=name, op=op))
    material.stored = group_up(one for database in material.databases for one in measurements(database, chooser))
    return material


def render(material: Material, *, title: str = "tunedcomm report") -> str:
    """The page.

    Raises:
        MissingPackageError: plotly is not installed.
    """
    need("plotly")
    made = utc_now().strftime("%Y-%m-%d %H:%M UTC")
    what = [*(database.name for database in material.databases), *(file.name for file in material.files)]
    return page(
        title,
        f"Made {made} by tunedcomm {VERSION} from {', '.join(what) or 'nothing'}.",
        _sections(material),
        "Times are medians of the slowest rank, in µs. algbw = size/time and busbw = algbw × traffic a byte, by "
        "nccl-tests' definitions. One file, no network: plotly.js is in it.",
    )


def _sections(material: Material) -> list[Section]:
    regret = [panel for file in material.files for panel in regret_panels(file)]
    return [
        Section("At a glance", "glance", panels=glance_panels({**material.bench, **material.stored})),
        Section(
            "Benchmarks",
            "benchmarks",
            f"Contenders that were measured beside each other, by message size. Tap a name to hide it. {HOW}",
            _curves(material, material.bench),
        ),
        Section(
            "Tuned",
            "tuned",
            f"The best config of each variant at each size in the databases; a star marks what dispatch runs. {HOW}",
            _curves(material, material.stored),
        ),
        Section("Fused GEMMs", "gemms", HOW, _heats({**material.bench, **material.stored})),
        Section("Regret", "regret", "What is lost at sizes that were not tuned.", regret),
        Section("Sweeps", "sweeps", "How fast the search came to its best.", sweep_panels(material.databases)),
        Section(
            "Failures", "failures", "Trials that failed or could not run, by kind.", failure_panels(material.databases)
        ),
        Section("Environment", "environment", panels=_environments(material)),
    ]


def _curves(material: Material, groups: Mapping[Group, Sequence[Measured]]) -> list[Panel]:
    styles = material.styles
    return [
        curves_panel(group, found, styles, material.link_gb_s) for group, found in groups.items() if not group.is_gemm
    ]


def _heats(groups: Mapping[Group, Sequence[Measured]]) -> list[Panel]:
    return [heat_panel(group, found) for group, found in in_order(groups).items() if group.is_gemm]


def _environments(material: Material) -> list[Panel]:
    panels = []
    for file in material.files:
        if file.software:
            columns = tuple(file.software[0])
            rows = [[software[name] or "–" for name in columns] for software in file.software]
            panels.append(_plain(file.name, f"environment-{file.name}", columns, rows, "Measured with"))
        if file.skipped:
            lines = [[str(line), reason] for line, reason in file.skipped.items()]
            panels.append(
                _plain(f"{file.name}: lines left out", f"skipped-{file.name}", ("line", "reason"), lines, "Lines")
            )
    for database in material.databases:
        found = [{"digest": there.digest[:8], **there.to_dict()} for there in database.environments]
        if found:
            columns = tuple(found[0])
            rows = [[str(row[name]) for name in columns] for row in found]
            panels.append(_plain(database.name, f"environment-{database.name}", columns, rows, "Measured in"))
        runs = [
            [str(run.id), run.command, run.started_at.strftime("%Y-%m-%d %H:%M"), run.budget, run.version]
            for run in database.runs
        ]
        if runs:
            columns = ("run", "command", "started", "budget", "tunedcomm")
            panels.append(_plain(f"{database.name}: runs", f"runs-{database.name}", columns, runs, "Commands"))
    return panels


def _plain(title: str, anchor: str, columns: Sequence[str], rows: Sequence[Sequence[str]], summary: str) -> Panel:
    return Panel(title, anchor, tables=[Table(columns, rows, summary=summary, is_open=len(rows) <= 12)])


def write_png(material: Material, folder: Path) -> list[Path]:
    """Write every curve and heat map as an image, for light and for dark ground.

    Raises:
        MissingPackageError: matplotlib is not installed.
    """
    need("matplotlib")
    return write_images({**material.bench, **material.stored}, folder, material.styles, material.link_gb_s)
