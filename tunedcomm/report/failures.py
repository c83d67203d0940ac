"""Trials that failed, by variant and kind, with their reasons."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

from tunedcomm.db.records import TrialRecord
from tunedcomm.report.panels import Figure, KeyEntry, Panel, Table
from tunedcomm.report.stored import StoredFile
from tunedcomm.report.styles import STATUS_COLOURS, Style

__all__ = ["failure_panels", "template"]

_PRUNED = "pruned"
_MOST_REASONS = 50
# Numbers, those within words such as fp16 and sm_90 apart.
_NUMBER = re.compile(r"0x[0-9a-fA-F]+|(?<![\w.])\d+(?:[.,]\d+)*(?:e[+-]?\d+)?(?![A-Za-z_])")


def template(reason: str) -> str:
    """A reason with … for its numbers: what many trials have in common."""
    return _NUMBER.sub("…", reason)


def failure_panels(databases: Sequence[StoredFile]) -> list[Panel]:
    """One for each database in which trials failed; where none did, a sentence. Nothing of no databases."""
    panels = [panel for stored in databases if (panel := _of(stored)) is not None]
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


def _of(stored: StoredFile) -> Panel | None:
    failed = [trial for trial in stored.trials if trial.status not in ("ok", _PRUNED)]
    if not failed:
        return None
    counts: Counter[tuple[str, str]] = Counter((f"{t.problem.op} {t.variant}", t.status) for t in failed)
    names = sorted({name for name, _ in counts})
    statuses = [status for status in STATUS_COLOURS if any(status == other for _, other in counts)]
    return Panel(
        title=f"{len(failed)} of {len(stored.trials)} trials in {stored.name}",
        anchor=f"failures-{stored.name}",
        note=_of_pruned(sum(trial.status == _PRUNED for trial in stored.trials)),
        figures=[("Trials", _figure(names, statuses, counts))],
        key=[KeyEntry(status, Style(STATUS_COLOURS[status], "square", "none")) for status in statuses],
        tables=[_reasons(failed)],
    )


def _reasons(failed: Sequence[TrialRecord]) -> Table:
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


def _figure(names: Sequence[str], statuses: Sequence[str], counts: Counter[tuple[str, str]]) -> Figure:
    import plotly.graph_objects as go

    figure = go.Figure()
    for status in statuses:
        figure.add_trace(
            go.Bar(
                x=[counts[name, status] for name in names],
                y=list(names),
                name=status,
                orientation="h",
                marker={"color": STATUS_COLOURS[status]},
                hovertemplate=f"<b>%{{y}}</b> {status}: %{{x}}<extra></extra>",
            )
        )
    figure.update_layout(
        barmode="stack",
        xaxis={"title": {"text": "trials"}},
        yaxis={"autorange": "reversed", "automargin": True},
        height=max(220, 110 + 28 * len(names)),
        showlegend=False,
        template="none",
    )
    plain: Figure = figure.to_plotly_json()
    return plain
