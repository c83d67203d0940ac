"""What is lost at sizes that were not tuned: by rule of selection, and by what a database chooses there."""

from __future__ import annotations

from collections.abc import Sequence

from tunedcomm.report.bench_rows import BenchFile, RegretRule
from tunedcomm.report.curves import axis_of_sizes, axis_of_values
from tunedcomm.report.measured import LIBRARY, Measured
from tunedcomm.report.panels import Figure, KeyEntry, Panel, Table, size_text
from tunedcomm.report.styles import Style

__all__ = ["losses", "regret_panels"]

_MEAN, _WORST = Style("#2f86d6", "square", "none"), Style("#e69f00", "square", "none")


def regret_panels(file: BenchFile) -> list[Panel]:
    """The figures of one file: a table of rules, or candidates that were timed beside each other."""
    panels = []
    for world_size in sorted({rule.world_size for rule in file.rules}):
        panels.append(_of_rules(file.name, world_size, [r for r in file.rules if r.world_size == world_size]))
    if found := losses(file.candidates):
        panels.append(_of_library(file.name, found))
    return panels


def _percent(ratio: float) -> float:
    return round(100 * (ratio - 1), 3)


def _of_rules(origin: str, world_size: int, rules: Sequence[RegretRule]) -> Panel:
    import plotly.graph_objects as go

    figure = go.Figure()
    for name, style in (("mean", _MEAN), ("worst", _WORST)):
        figure.add_trace(
            go.Bar(
                x=[_percent(getattr(rule, name)) for rule in rules],
                y=[rule.rule for rule in rules],
                name=name,
                orientation="h",
                marker={"color": style.colour},
                hovertemplate=f"<b>%{{y}}</b> {name}: %{{x:.1f}} %<extra></extra>",
            )
        )
    figure.update_layout(
        barmode="group",
        xaxis={"title": {"text": "% over the best candidate"}, "type": "linear"},
        yaxis={"autorange": "reversed", "automargin": True},
        height=max(240, 110 + 44 * len(rules)),
        showlegend=False,
        template="none",
    )
    rows = [[r.rule, r.sizes or "–", f"{_percent(r.mean):.1f} %", f"{_percent(r.worst):.1f} %"] for r in rules]
    return Panel(
        title=f"By rule of selection, {world_size} ranks",
        anchor=f"regret-rules-{world_size}",
        note=f"Latency of each rule's choice over the best candidate's, at sizes that were not tuned. From {origin}.",
        figures=[("Regret, %", figure.to_plotly_json())],
        key=[KeyEntry("mean", _MEAN), KeyEntry("worst", _WORST)],
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


def _of_library(origin: str, found: dict[int, list[tuple[int, float, float]]]) -> Panel:
    """What one would lose by never choosing: the library's time over the best candidate's."""
    import plotly.graph_objects as go

    styles = [
        Style("#2f86d6", "circle"),
        Style("#e69f00", "square"),
        Style("#00a37a", "diamond"),
        Style("#d678ac", "x"),
    ]
    figure, key, rows = go.Figure(), [], []
    for (world_size, points), style in zip(sorted(found.items()), styles, strict=False):
        name = f"{world_size} ranks"
        figure.add_trace(
            go.Scatter(
                x=[size for size, _, _ in points],
                y=[library / best for _, best, library in points],
                name=name,
                mode="lines+markers",
                line={"color": style.colour, "width": style.width},
                marker={"symbol": style.mark, "size": 7},
                text=[size_text(size) for size, _, _ in points],
                hovertemplate="<b>%{fullData.name}</b> %{text}: %{y:.2f}×<extra></extra>",
            )
        )
        key.append(KeyEntry(name, style))
        rows += [
            [str(world_size), size_text(size), f"{best:.2f}", f"{library:.2f}", f"{library / best:.2f}×"]
            for size, best, library in points
        ]
    sizes = [size for points in found.values() for size, _, _ in points]
    figure.update_layout(
        xaxis=axis_of_sizes(sizes),
        yaxis=axis_of_values(
            [library / best for points in found.values() for _, best, library in points], "× the best"
        ),
        showlegend=False,
        template="none",
    )
    figures: list[tuple[str, Figure]] = [("Library over the best candidate", figure.to_plotly_json())]
    return Panel(
        title="Between the tuned sizes: the library against the best candidate",
        anchor="regret-library",
        note=f"What always running the library would cost at the sizes at which regret was measured. From {origin}.",
        figures=figures,
        key=key,
        tables=[
            Table(("ranks", "size", "best µs", "library µs", "ratio"), rows, summary=f"Table of {len(rows)} sizes")
        ],
    )
