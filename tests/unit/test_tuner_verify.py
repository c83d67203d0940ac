"""Stored winners timed again: which, what they are called, and recorded answers with every kind of drift in them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest
from quick import some
from verify_samples import SIZES, all_of, at, at_ratio, here, known, problem_of, recorded, run, tuned, tuned_copy

from tunedcomm.db.layers import Layer, load_snapshot
from tunedcomm.db.records import Trial
from tunedcomm.db.store import Database
from tunedcomm.dispatch.decide import decide
from tunedcomm.errors import TuningError
from tunedcomm.selection.snapshot import Row, Snapshot
from tunedcomm.spec import Candidate, check_candidate, get_variant
from tunedcomm.symm.layout import limits_for
from tunedcomm.tuner.machine import backend_settings
from tunedcomm.tuner.search.progress import Progress
from tunedcomm.tuner.search.sweep import compile_ahead
from tunedcomm.tuner.verify import Verified, VerifyOutcome, VerifySpec, Winner, candidates_to_measure, judge, verify

SETTINGS = backend_settings("cuda", 4)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A database of one's own."""
    return tuned_copy(tmp_path)


@pytest.fixture
def winners() -> dict[int, Candidate]:
    return dict(tuned()[1])


def snapshot_at(path: Path) -> Snapshot:
    return load_snapshot(here(), 4, layers=[Layer("user", str(path))], strict=True)


# Verdicts


def winner_of(ratio: float, *, library_us: float | None = 10.0, **changes: Any) -> Winner:
    """Measured without a spread; `changes` of the row."""
    lamport = Candidate.of("all_reduce", "lamport", {"num_blocks": 8, "num_warps": 2, "launch_pdl": True})
    row = Row(
        problem=problem_of(SIZES[0]),
        candidate=lamport,
        source_hash="current",
        environment=here(),
        latency_p50_us=10.0 * ratio,
        created_at="2026-01-01",
    )
    changed = replace(row, **changes)
    return Winner(row=changed, policies=("default",), latency_us=10.0 * ratio, library_us=library_us)


def timed(winner: Winner, ratio: float, **changes: Any) -> Trial:
    fields = at(winner.candidate, winner.problem.shape[0])
    return replace(recorded()[0], **{**fields, "status": "ok", **all_of(20.0 * ratio), **changes})


EAGER: dict[str, Any] = {"problem": replace(problem_of(SIZES[0]), mode="eager")}
LIBRARY: dict[str, Any] = {"candidate": Candidate.of("all_reduce", "library", {})}
ALONE: dict[str, Any] = {"baseline_p50_us": None}


@pytest.mark.parametrize(
    ("stored", "winner", "now", "timing", "verdict"),
    [
        (0.5, {}, 0.4, {}, "ok"),
        (0.5, {}, 0.554, {}, "ok"),  # 10 % and 1 % of noise
        (0.5, {}, 0.556, {}, "drifted"),
        (0.5, {}, 1.2, {}, "slower"),
        (0.95, {}, 0.985, {}, "ok"),
        (0.95, {}, 0.995, {}, "tied"),
        (0.95, {}, 1.005, {}, "tied"),
        (0.95, {}, 1.02, {}, "slower"),
        # Against the library it has lost 60 %, which is the library's doing where it takes as long as it did: 8 µs.
        (0.5, {"latency_p50_us": 5.0}, 0.4, {"baseline_p50_us": 10.0}, "drifted"),
        (0.5, {"latency_p50_us": 8.0}, 0.4, {"baseline_p50_us": 10.0}, "ok"),
        (0.5, {"latency_p50_us": 7.25}, 0.4, {"baseline_p50_us": 10.0}, "ok"),  # 10.3 % longer
        (0.5, {"latency_p50_us": 7.15}, 0.4, {"baseline_p50_us": 10.0}, "drifted"),
        # An eager call may differ by its spread, now or then.
        (0.5, EAGER, 0.65, {**EAGER, "latency_p10_us": 12.9, "latency_p90_us": 13.1}, "drifted"),
        (0.5, EAGER, 0.65, {**EAGER, "latency_p10_us": 10.0, "latency_p90_us": 16.0}, "ok"),
        (0.5, {**EAGER, "latency_p10_us": 3.75, "latency_p90_us": 6.25, "samples": 20}, 0.65, EAGER, "ok"),
        # Without the library's time now, or then, or as the library itself.
        (0.5, {}, 0.5, ALONE, "unmeasured"),
        (0.5, {"library_us": None}, 0.9, {}, "ok"),
        (1.0, LIBRARY, 1.7, ALONE, "ok"),
        (1.0, LIBRARY, 1.7, {**ALONE, "status": "crashed", "reason": "planted", "latency_p50_us": None}, "failed"),
    ],
)
def test_verdict(stored: float, winner: dict[str, Any], now: float, timing: dict[str, Any], verdict: str) -> None:
    was = winner_of(stored, **winner)
    found = judge(was, [timed(was, now, **timing)], tolerance=0.1)
    assert found.verdict == verdict
    assert found.is_wrong == (verdict in ("drifted", "slower", "failed", "unmeasured"))
    if verdict not in ("failed", "unmeasured") and not winner.get("candidate"):
        assert found.ratio == pytest.approx(now * 20 / timing.get("baseline_p50_us", 20))


@pytest.mark.parametrize(
    ("us", "library_us", "is_faster"), [(9.0, 20.0, True), (9.0, 17.0, False), (10.5, 25.0, False), (9.95, 20.0, False)]
)
def test_only_what_is_faster_by_itself_and_against_the_library_has_overtaken(
    us: float, library_us: float, is_faster: bool
) -> None:
    winner = winner_of(0.5)
    other = Candidate.of("all_reduce", "one_shot", {"items": 1, "num_blocks": 8, "num_warps": 4})
    fields = {**at(other, SIZES[0]), **all_of(us), "baseline_p50_us": library_us}
    found = judge(winner, [timed(winner, 0.5), timed(winner, 0.5, **fields)], tolerance=0.1)
    assert (found.faster is not None and found.faster.candidate == other) == is_faster


# Which are timed again


def test_winners_of_every_policy(path: Path) -> None:
    with Database.open(path) as database:
        library = next(r for r in recorded() if r.variant == "library" and r.problem == problem_of(SIZES[4]))
        fast = {**all_of(1.0), "baseline_p50_us": 1.0, "created_at": datetime.now(timezone.utc)}
        database.record([replace(library, **fast, final=True)])
    asked = [policy for winner in known(path)[problem_of(SIZES[4])] for policy in winner.policies]
    assert sorted(asked) == ["any", "default", "ordered"]


def test_neighbours_winners_are_measured_too_and_what_is_measured_is_compiled_ahead(path: Path) -> None:
    """A new Triton finds an empty cache: nothing but what is measured, at the shapes that the check launches too."""
    found = known(path)
    chosen = candidates_to_measure(found)
    for place, size in enumerate(SIZES):
        near = SIZES[max(place - 1, 0) : place + 2]
        wanted = {w.candidate for n in near for w in found[problem_of(n)] if not w.row.is_library}
        assert wanted <= set(chosen[problem_of(size)])
    assert all(c.variant != "library" for members in chosen.values() for c in members)
    submitted: list[Any] = []

    class Pool:
        def submit(self, requests: list[Any], compute_capability: int) -> int:
            assert compute_capability == 90
            submitted.extend(requests)
            return len(requests)

    settings, limits = SETTINGS, limits_for(here(), 4)
    steps = list(compile_ahead(Pool(), chosen, settings, limits, 90, chosen))
    assert len(steps) == len(SIZES)
    for problem, members in chosen.items():
        for candidate in members:
            variant = get_variant("all_reduce", candidate.variant)
            assert set(variant.compile_requests(problem, candidate.config_dict)) <= set(submitted)
    everything = list(compile_ahead(Pool(), chosen, settings, limits, 90))
    assert sum(everything) > sum(steps) > 0


# The whole


def failing(status: Any, reason: str) -> Callable[[Trial], Trial]:
    return lambda record: replace(record, status=status, reason=reason, final=False, **all_of(None))


def by_size(outcome: VerifyOutcome) -> dict[int, Verified]:
    """What came of the default policy's winners."""
    return {r.winner.problem.shape[0]: r for r in outcome.results if "default" in r.winner.policies}


def test_what_has_not_changed_holds_and_new_timings_are_stored_as_finals(
    path: Path, tmp_path: Path, winners: dict[int, Candidate]
) -> None:
    seen: list[Progress] = []
    outcome = run(path, tmp_path, progress=seen.append)
    assert {size: r.winner.candidate for size, r in by_size(outcome).items()} == winners
    assert {r.verdict for r in outcome.results} == {"ok"}, [r.why for r in outcome.wrong]
    assert outcome.environment == here()
    assert seen[-1].problems_done == seen[-1].problems == len(SIZES)
    assert (seen[-1].trials, seen[-1].trials_planned) == (outcome.num_trials, 0)
    with Database.open(path) as database:
        mine = [t for t in database.trials() if t.run_id == outcome.run_id]
        (made,) = [r for r in database.runs() if r.id == outcome.run_id]
    assert len(mine) == outcome.num_trials
    assert all(t.final and t.status == "ok" and t.baseline_p50_us and t.samples for t in mine)
    assert made.command == "pytest"
    assert made.finished_at
    left = [gang for progress in seen for gang in progress.left]
    assert left, "gangs are reported as they leave a problem, with what they have measured there"
    assert {(gang.problem, gang.best_us) for gang in left} <= {(t.problem, t.latency_p50_us) for t in mine}
    for size, candidate in winners.items():
        there = {t.candidate: t for t in mine if t.problem == problem_of(size)}
        assert "library" in {c.variant for c in there}
        rows = [r for r in snapshot_at(path).rows if (r.problem, r.candidate) == (problem_of(size), candidate)]
        assert [r.latency_p50_us for r in rows] == [there[candidate].latency_p50_us]


def test_every_kind_of_drift_is_flagged(path: Path, tmp_path: Path, winners: dict[int, Candidate]) -> None:
    a, b, c, d, e = SIZES
    changes = {
        (a, winners[a]): lambda record: replace(record, **all_of(record.latency_p50_us * 1.3)),
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
    for size, token in ((a, "1.30x"), (b, "1.20x"), (c, "incorrect: planted")):
        assert token in found[size].why
    assert {r.winner.problem.shape[0] for r in outcome.wrong} >= {a, b, c}
    # What is stored is what dispatch goes by from now on.
    snapshot = snapshot_at(path)
    limits = limits_for(here(), 4)
    for size in (b, c):
        assert decide(problem_of(size), snapshot, limits).candidate != winners[size]


def all_won_by(candidate: Candidate, sizes: tuple[int, ...], path: Path) -> None:
    best = {"status": "ok", "final": True, "created_at": datetime.now(timezone.utc)}
    with Database.open(path) as database:
        # Beside a library as fast as it was there before: a row of a loaded machine would not count.
        beside = {
            size: min(
                t.baseline_p50_us for t in database.trials() if t.problem == problem_of(size) and t.baseline_p50_us
            )
            for size in sizes
        }
        made = [replace(recorded()[0], **at(candidate, size), **best) for size in sizes]
        database.record([replace(one, baseline_p50_us=beside[one.problem.shape[0]]) for one in made])
    assert {known(path)[problem_of(size)][0].candidate for size in sizes} == {candidate}


def test_winner_that_hangs_is_found_out_at_every_size_that_it_wins(path: Path, tmp_path: Path) -> None:
    """A failure at one size takes nothing from what is stored of another: dispatch would go on launching it there."""
    common, won = known(path)[problem_of(SIZES[0])][0].candidate, SIZES[:2]
    all_won_by(common, won, path)
    outcome = run(path, tmp_path, {(size, common): failing("hung", "no sign of life for 30 s") for size in SIZES})
    found = by_size(outcome)
    assert [found[size].verdict for size in SIZES] == ["failed", "failed", "ok", "ok", "ok"]
    assert outcome.num_gangs == 3  # it is a neighbour's winner too, and not tried there
    snapshot = snapshot_at(path)
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
    "options", some([{"ops": ("all_gather",)}, {"dtypes": ("float16",)}, {"modes": ("eager",)}]), ids=str
)
def test_filters_leave_nothing(path: Path, tmp_path: Path, options: dict[str, Any]) -> None:
    outcome = run(path, tmp_path, **options)
    assert (outcome.results, outcome.num_trials, outcome.run_id) == ((), 0, None)


def test_bad_options() -> None:
    for options in ({"tolerance": -0.1}, {"tolerance": float("nan")}, {"limit": 0}):
        with pytest.raises(ValueError, match=next(iter(options))):
            VerifySpec(settings=SETTINGS, **options)
    with pytest.raises(TuningError, match="no_such_module"):
        verify(VerifySpec(settings=replace(SETTINGS, plugins=("no_such_module",))), None)
