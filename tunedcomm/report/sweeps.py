"""How sweeps went: best so far against trial number."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Sequence

from tunedcomm.db.query import BEST_OF_VARIANT
from tunedcomm.db.records import TrialRecord
from tunedcomm.errors import UnknownNameError
from tunedcomm.report.curves import axis_of_values
from tunedcomm.report.measured import Group, in_order
from tunedcomm.report.panels import Figure, KeyEntry, Panel, Table, size_text
from tunedcomm.report.stored import StoredFile, group_of
from tunedcomm.report.styles import Style, between
from tunedcomm.spec import Problem, format_shape, get_op

__all__ = ["best_so_far", "sweep_panels"]

# Fewer trials of the search show no course.
_LEAST_TRIALS = 12
_NO_SEARCH = (
    f"No database here holds a search of {_LEAST_TRIALS} trials of one problem; fewer show no course. One that was "
    "exported keeps the finals: after a sweep, report from the database that tune wrote, which is the user database "
    "unless --db named another one."
)
_MEDIAN = "median of the problems"


def best_so_far(trials: Iterable[TrialRecord]) -> list[float | None]:
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
    panels = [panel for stored in databases for panel in _panels(stored)]
    return [Panel("", "no-sweeps", _NO_SEARCH)] if databases and not panels else panels


def _panels(stored: StoredFile) -> list[Panel]:
    """One for each op, dtype, world size and mode whose search is stored."""
    searched: dict[Group, dict[Problem, list[TrialRecord]]] = {}
    for trial in stored.trials:
        group = group_of(stored.name, trial.problem, trial.environment)
        searched.setdefault(group, {}).setdefault(trial.problem, []).append(trial)
    panels = []
    for group, by_problem in in_order(searched).items():
        whole = {problem: trials for problem, trials in by_problem.items() if _is_whole(trials)}
        courses = {problem: best_so_far(trials) for problem, trials in whole.items()}
        courses = {problem: course for problem, course in courses.items() if _shows(course)}
        if courses:
            panels.append(_panel(group, courses))
    return panels


def _is_whole(trials: Iterable[TrialRecord]) -> bool:
    """An export keeps no more of a search than the few best of each variant, which show no course."""
    counts = Counter(trial.variant for trial in trials if trial.status == "ok" and not trial.final)
    return max(counts.values(), default=0) > BEST_OF_VARIANT


def _shows(course: Sequence[float | None]) -> bool:
    return len(course) >= _LEAST_TRIALS and course[-1] is not None


def _bytes(problem: Problem) -> int:
    try:
        return get_op(problem.op).message_bytes(problem)
    except UnknownNameError:
        return problem.nbytes


def _panel(group: Group, courses: dict[Problem, list[float | None]]) -> Panel:
    ordered = sorted(courses, key=lambda problem: (_bytes(problem), problem.shape))
    colours = {problem: between(i / max(1, len(ordered) - 1)) for i, problem in enumerate(ordered)}
    middle = _median([courses[problem] for problem in ordered])
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
    ends = list(dict.fromkeys((ordered[0], ordered[len(ordered) // 2], ordered[-1])))
    key = [KeyEntry(size_text(_bytes(p)), Style(colours[p], "line-ew")) for p in ends]
    return Panel(
        title=group.title,
        anchor=f"convergence-{group.slug}",
        note=f"Best latency so far over the best in the end, by trial; one line a problem. From {group.origin}.",
        figures=[("Best so far over best", _course(ordered, courses, colours, middle))],
        key=[*key, KeyEntry(_MEDIAN, Style("#e05a2b", "line-ew", width=3.5))],
        tables=[
            Table(
                ("size", "shape", "trials", "within 5 % after", "best after"),
                rows,
                summary=f"Table of {len(rows)} problems",
            )
        ],
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


def _course(
    ordered: Sequence[Problem],
    courses: dict[Problem, list[float | None]],
    colours: dict[Problem, str],
    middle: Sequence[float | None],
) -> Figure:
    import plotly.graph_objects as go

    figure = go.Figure()
    for problem in ordered:
        course, size = courses[problem], size_text(_bytes(problem))
        figure.add_trace(
            go.Scatter(
                x=list(range(1, len(course) + 1)),
                y=course,
                name=size,
                mode="lines",
                line={"color": colours[problem], "width": 1.2, "shape": "hv"},
                hovertemplate=f"<b>{size}</b> trial %{{x}}: %{{y:.3f}}<extra></extra>",
            )
        )
    figure.add_trace(
        go.Scatter(
            x=list(range(1, len(middle) + 1)),
            y=list(middle),
            name=_MEDIAN,
            mode="lines",
            line={"color": "#e05a2b", "width": 3.5, "shape": "hv"},
            hovertemplate="median, trial %{x}: %{y:.3f}<extra></extra>",
        )
    )
    figure.update_layout(
        xaxis={"title": {"text": "trial"}, "type": "log", "dtick": 1},
        yaxis=axis_of_values([value for course in courses.values() for value in course if value], "× the best"),
        showlegend=False,
        template="none",
    )
    plain: Figure = figure.to_plotly_json()
    return plain
