"""Stored winners timed again: recorded answers in the gangs' place, with every kind of drift planted in them."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest
from verify_samples import SIZES, Change, at, at_ratio, here, known, problem_of, recorded, run, tuned, tuned_copy

from tunedcomm.db.layers import Layer, load_snapshot
from tunedcomm.db.store import Database
from tunedcomm.dispatch.communicator import limits_for
from tunedcomm.dispatch.dispatcher import decide
from tunedcomm.errors import TuningError
from tunedcomm.spec import Candidate, check_candidate
from tunedcomm.tuner.search.sweep import Progress
from tunedcomm.tuner.verify import Verified, VerifyOutcome, VerifySpec, verify


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A database of one's own."""
    return tuned_copy(tmp_path)


@pytest.fixture
def winners() -> dict[int, Candidate]:
    return dict(tuned()[1])


def slower(factor: float) -> Change:
    return lambda record: replace(
        record,
        **{
            name: value * factor
            for name in ("latency_p10_us", "latency_p50_us", "latency_p90_us")
            if (value := getattr(record, name)) is not None
        },
    )


def failing(status: str, reason: str) -> Change:
    return lambda record: replace(
        record, status=status, reason=reason, latency_p10_us=None, latency_p50_us=None, latency_p90_us=None, final=False
    )  # type: ignore[arg-type]


def by_size(outcome: VerifyOutcome) -> dict[int, Verified]:
    """What came of the default policy's winners."""
    return {r.winner.problem.shape[0]: r for r in outcome.results if "default" in r.winner.policies}


def test_what_has_not_changed_holds(path: Path, tmp_path: Path, winners: dict[int, Candidate]) -> None:
    seen: list[Progress] = []
    outcome = run(path, tmp_path, progress=seen.append)
    assert {size: r.winner.candidate for size, r in by_size(outcome).items()} == winners
    assert {r.verdict for r in outcome.results} == {"ok"}, [r.why for r in outcome.wrong]
    assert not outcome.wrong
    assert outcome.environment == here()
    assert seen[-1].problems_done == seen[-1].problems == len(SIZES)
    assert seen[-1].trials == outcome.num_trials
    assert seen[-1].trials_planned == 0


def test_new_timings_are_stored_as_finals(path: Path, tmp_path: Path, winners: dict[int, Candidate]) -> None:
    outcome = run(path, tmp_path, {(SIZES[0], winners[SIZES[0]]): slower(1.01)})
    with Database.open(path) as database:
        mine = [t for t in database.trials() if t.run_id == outcome.run_id]
        (made,) = [r for r in database.runs() if r.id == outcome.run_id]
    assert len(mine) == outcome.num_trials
    assert all(t.final and t.status == "ok" and t.baseline_p50_us and t.samples for t in mine)
    assert made.command == "pytest"
    assert made.finished_at is not None
    for size, candidate in winners.items():
        there = [t.candidate.variant for t in mine if t.problem == problem_of(size)]
        assert candidate.variant in there
        assert "library" in there
    latest = load_snapshot(here(), 4, layers=[Layer("user", str(path))], strict=True)
    (row,) = [r for r in latest.rows if r.problem == problem_of(SIZES[0]) and r.candidate == winners[SIZES[0]]]
    assert row.latency_p50_us == next(
        t.latency_p50_us for t in mine if (t.problem, t.candidate) == (row.problem, row.candidate)
    )


def test_every_kind_of_drift_is_flagged(path: Path, tmp_path: Path, winners: dict[int, Candidate]) -> None:
    a, b, c, d, e = SIZES
    changes = {
        (a, winners[a]): slower(1.3),
        (b, winners[b]): at_ratio(1.2),
        (c, winners[c]): failing("incorrect", "planted: one element is wrong"),
        (d, winners[d]): at_ratio(0.998),
    }
    outcome = run(path, tmp_path, changes, tolerance=0.1)
    found = by_size(outcome)
    assert {size: r.verdict for size, r in found.items()} == {
        a: "drifted",
        b: "slower",
        c: "failed",
        d: "tied" if (found[d].winner.ratio or 0) > 0.88 else "drifted",
        e: "ok",
    }
    assert "lost 30.0%" in found[a].why
    assert "30.0% longer" in found[a].why
    assert "20.0% longer than the library" in found[b].why
    assert found[c].why == "incorrect: planted: one element is wrong"
    assert {r.winner.problem.shape[0] for r in outcome.wrong} >= {a, b, c}
    # What is stored is what dispatch goes by from now on.
    snapshot = load_snapshot(here(), 4, layers=[Layer("user", str(path))], strict=True)
    limits = limits_for(here(), 4)
    for size in (b, c):
        assert decide(problem_of(size), snapshot, limits).candidate != winners[size]


def all_won_by(candidate: Candidate, sizes: tuple[int, ...], path: Path) -> None:
    now = datetime.now(timezone.utc)
    with Database.open(path) as database:
        fastest = [{**at(candidate, size), "status": "ok", "final": True, "created_at": now} for size in sizes]
        database.record([replace(recorded()[0], **fields) for fields in fastest])
    assert {known(path)[problem_of(size)][0].candidate for size in sizes} == {candidate}


def test_winner_that_hangs_is_found_out_at_every_size_that_it_wins(path: Path, tmp_path: Path) -> None:
    """A failure at one size takes nothing from what is stored of another: dispatch would go on launching it there."""
    common, won = known(path)[problem_of(SIZES[0])][0].candidate, SIZES[:2]
    all_won_by(common, won, path)
    outcome = run(path, tmp_path, {(size, common): failing("hung", "no sign of life for 30 s") for size in SIZES})
    found = by_size(outcome)
    assert [found[size].verdict for size in SIZES] == ["failed", "failed", "ok", "ok", "ok"]
    assert outcome.num_gangs == 3  # it is a neighbour's winner too, and not tried there
    snapshot = load_snapshot(here(), 4, layers=[Layer("user", str(path))], strict=True)
    for size in won:
        assert decide(problem_of(size), snapshot, limits_for(here(), 4)).candidate != common


def test_other_software_is_healed(path: Path, tmp_path: Path, winners: dict[int, Candidate]) -> None:
    """After a new driver every row is old; once verified, dispatch has rows of its own for the winners."""
    upgraded = replace(here(), driver="999.1")
    layers = [Layer("user", str(path))]
    before = load_snapshot(upgraded, 4, layers=layers, strict=True)
    assert all(row.drift for row in before.rows)
    outcome = run(path, tmp_path, environment=upgraded)
    assert outcome.environment == upgraded
    assert not outcome.wrong
    assert all(r.winner.row.drift for r in outcome.results)
    after = load_snapshot(upgraded, 4, layers=layers, strict=True)
    limits = limits_for(upgraded, 4)
    for size, candidate in winners.items():
        decision = decide(problem_of(size), after, limits)
        assert (decision.candidate, decision.environment) == (candidate, upgraded)
    # Between two sizes the winners of both were timed at both, so that neither goes by old numbers.
    a, b = SIZES[1:3]
    between = decide(problem_of((a + b) // 2), after, limits)
    assert (between.source, between.environment) == ("interpolated", upgraded)
    timed = {(row.problem.shape[0], row.candidate) for row in after.rows if not row.drift}
    both = [(size, winners[other]) for size in (a, b) for other in (a, b)]
    can_run = {(size, c) for size, c in both if check_candidate(problem_of(size), c, limits) is None}
    assert len(can_run) > 2
    assert can_run <= timed


@pytest.mark.parametrize(
    "options", [{"ops": ("all_gather",)}, {"dtypes": ("float16",)}, {"modes": ("eager",)}], ids=str
)
def test_filters_leave_nothing(path: Path, tmp_path: Path, options: dict[str, Any]) -> None:
    outcome = run(path, tmp_path, **options)
    assert (outcome.results, outcome.num_trials, outcome.run_id) == ((), 0, None)


def test_bad_options() -> None:
    for options in ({"tolerance": -0.1}, {"tolerance": float("nan")}, {"limit": 0}):
        with pytest.raises(ValueError, match="must be"):
            VerifySpec(**options)  # type: ignore[arg-type]
    with pytest.raises(TuningError, match="no_such_module"):
        verify(VerifySpec(plugins=("no_such_module",)), None)
