"""Stored winners timed again: recorded answers in the gangs' place, with every kind of drift planted in them."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tunedcomm import kernels
from tunedcomm.cli import db_verify, main
from tunedcomm.communicator import limits_for
from tunedcomm.db.layers import Layer, load_snapshot
from tunedcomm.db.records import TrialRecord
from tunedcomm.db.store import Database
from tunedcomm.dispatcher import decide, source_hash_of
from tunedcomm.errors import TuningError
from tunedcomm.hardware import Environment
from tunedcomm.spec import Candidate, Problem, candidates, check_candidate, get_variant
from tunedcomm.tuner.compile_ahead import compile_ahead
from tunedcomm.tuner.job import Settings
from tunedcomm.tuner.outcome import Progress
from tunedcomm.tuner.recording import read_recording, write_recording
from tunedcomm.tuner.verdict import Verified, judge
from tunedcomm.tuner.verify import VerifyOutcome, VerifySpec, verify
from tunedcomm.tuner.winners import Stored, Winner, candidates_to_measure, stored_winners

RECORDING = Path(__file__).parents[1] / "data" / "trials_h200_x4.jsonl.gz"
# Three neighbours, then two more; all have several finals.
SIZES = (16384, 32768, 65536, 8388608, 33554432)
Change = Callable[[TrialRecord], TrialRecord]


def problem_of(numel: int) -> Problem:
    return Problem("all_reduce", (numel,), "bfloat16", 4)


@functools.cache
def recorded() -> tuple[TrialRecord, ...]:
    """As if the kernels of today had been measured."""
    kernels.discover()
    wanted = {problem_of(numel) for numel in SIZES}
    found = [r for r in read_recording(RECORDING) if r.problem in wanted]
    return tuple(replace(r, source_hash=source_hash_of("all_reduce", r.variant) or "") for r in found)


def here() -> Environment:
    return recorded()[0].environment


def known(path: Path, **selected: Any) -> dict[Problem, Stored]:
    snapshot = load_snapshot(here(), 4, layers=[Layer("user", str(path))], strict=True)
    return stored_winners(snapshot, limits_for(here(), 4), source_hash_of, **selected)


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("verify") / "tuned.db"
    with Database.open(path, create=True) as database:
        database.record(recorded())
    return path


@pytest.fixture
def path(tuned: Path, tmp_path: Path) -> Path:
    """A database of one's own."""
    copy = tmp_path / "tuned.db"
    copy.write_bytes(tuned.read_bytes())
    return copy


@pytest.fixture(scope="module")
def winners(tuned: Path) -> dict[int, Candidate]:
    return {problem.shape[0]: stored.winners[0].candidate for problem, stored in known(tuned).items()}


def run(
    path: Path, tmp_path: Path, changes: Mapping[tuple[int, Candidate], Change] | None = None, **options: Any
) -> VerifyOutcome:
    """Verify against a machine that answers as recorded but for `changes`; `store=False` keeps nothing.

    `extra` are all answers for their variants.
    """
    planted = changes or {}
    extra: list[TrialRecord] = options.pop("extra", [])
    kept = [r for r in recorded() if r.variant not in {e.variant for e in extra}]
    answers = [planted.get((r.problem.shape[0], r.candidate), lambda record: record)(r) for r in kept] + extra
    recording = tmp_path / "machine.jsonl"
    environment = options.pop("environment", here())
    write_recording(recording, [replace(r, environment=environment) for r in answers])
    values: dict[str, Any] = {"layers": (Layer("user", str(path)),), "replay": str(recording), "command": "pytest"}
    store, progress = options.pop("store", True), options.pop("progress", None)
    spec = VerifySpec(**{**values, **options})
    if not store:
        return verify(spec, None, progress)
    with Database.open(path) as database:
        return verify(spec, database, progress)


def slower(factor: float) -> Change:
    return lambda record: replace(
        record,
        **{
            name: value * factor
            for name in ("latency_p10_us", "latency_p50_us", "latency_p90_us")
            if (value := getattr(record, name)) is not None
        },
    )


def at_ratio(ratio: float) -> Change:
    """So long against the library, whatever it was."""

    def change(record: TrialRecord) -> TrialRecord:
        assert record.baseline_p50_us is not None
        us = record.baseline_p50_us * ratio
        return replace(record, latency_p10_us=us, latency_p50_us=us, latency_p90_us=us)

    return change


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


def test_tolerance_decides(path: Path, tmp_path: Path, winners: dict[int, Candidate]) -> None:
    change = {(SIZES[0], winners[SIZES[0]]): slower(1.3)}
    verdicts = [by_size(run(path, tmp_path, change, tolerance=t, store=False))[SIZES[0]].verdict for t in (0.2, 0.4)]
    assert verdicts == ["drifted", "ok"]


def test_runner_up_that_is_faster_now_is_said(path: Path, tmp_path: Path, winners: dict[int, Candidate]) -> None:
    stored = known(path)[problem_of(SIZES[3])]
    assert stored.runner_up is not None
    outcome = run(path, tmp_path, {(SIZES[3], stored.runner_up): slower(0.5)}, store=False)
    found = by_size(outcome)[SIZES[3]]
    assert (found.verdict, found.faster) == ("ok", stored.runner_up)
    assert not outcome.wrong


def all_won_by(candidate: Candidate, sizes: tuple[int, ...], path: Path) -> None:
    now = datetime.now(timezone.utc)
    with Database.open(path) as database:
        fastest = [{**at(candidate, size), "status": "ok", "final": True, "created_at": now} for size in sizes]
        database.record([replace(recorded()[0], **fields) for fields in fastest])
    assert {known(path)[problem_of(size)].winners[0].candidate for size in sizes} == {candidate}


def test_winner_that_hangs_is_found_out_at_every_size_that_it_wins(path: Path, tmp_path: Path) -> None:
    """A failure at one size takes nothing from what is stored of another: dispatch would go on launching it there."""
    common, won = known(path)[problem_of(SIZES[0])].winners[0].candidate, SIZES[:2]
    all_won_by(common, won, path)
    outcome = run(path, tmp_path, {(size, common): failing("hung", "no sign of life for 30 s") for size in SIZES})
    found = by_size(outcome)
    assert [found[size].verdict for size in SIZES] == ["failed", "failed", "ok", "ok", "ok"]
    assert outcome.num_gangs == 3  # it is a neighbour's winner too, and not tried there
    snapshot = load_snapshot(here(), 4, layers=[Layer("user", str(path))], strict=True)
    for size in won:
        assert decide(problem_of(size), snapshot, limits_for(here(), 4)).candidate != common


def test_variant_that_cost_too_many_gangs_is_left_alone_and_that_is_said(path: Path, tmp_path: Path) -> None:
    """By its name, whatever its config."""
    limits, won = limits_for(here(), 4), SIZES[:4]
    of_size = {n: [c for c in candidates(problem_of(n), limits) if c.variant == "two_shot"] for n in SIZES}
    for size in won:
        all_won_by(of_size[size][0], (size,), path)
    crash = failing("crashed", "planted")
    crashes = [crash(replace(recorded()[0], **at(c, size))) for size in SIZES for c in of_size[size]]
    outcome = run(path, tmp_path, extra=crashes)
    found = by_size(outcome)
    verdicts = [found[size].verdict for size in won]
    assert (verdicts[0], verdicts[-1], set(verdicts)) == ("failed", "unmeasured", {"failed", "unmeasured"})
    assert f"two_shot had cost 3 gangs: crashed at {problem_of(won[0])}" in found[won[3]].why
    assert outcome.num_gangs == 4


def at(candidate: Candidate, size: int) -> dict[str, Any]:
    """Fields of a trial of `candidate` that nothing beats."""
    return {
        "problem": problem_of(size),
        "variant": candidate.variant,
        "config": candidate.config_dict,
        "numerics": "ordered",
        "source_hash": source_hash_of("all_reduce", candidate.variant),
        "reason": "",
        "latency_p10_us": 1.0,
        "latency_p50_us": 1.0,
        "latency_p90_us": 1.0,
        "samples": 20,
        "baseline_p50_us": 20.0,
    }


def test_other_software_is_healed(path: Path, tmp_path: Path, winners: dict[int, Candidate]) -> None:
    """After a new driver every row is old; once verified, dispatch has rows of its own for the winners."""
    upgraded = replace(here(), driver="999.1")
    layers = [Layer("user", str(path))]
    before = load_snapshot(upgraded, 4, layers=layers, strict=True)
    assert all(row.drift for row in before.rows)
    outcome = run(path, tmp_path, environment=upgraded)
    assert outcome.environment == upgraded
    assert not outcome.wrong
    assert all(r.winner.is_drift for r in outcome.results)
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


def test_nothing_is_stored_unless_asked_for(path: Path, tmp_path: Path) -> None:
    with Database.open(path) as database:
        before = database.stats()
    outcome = run(path, tmp_path, store=False)
    assert outcome.run_id is None
    assert outcome.num_trials > 0
    with Database.open(path) as database:
        assert database.stats() == before


def test_limit_takes_what_is_most_in_doubt(path: Path, tmp_path: Path) -> None:
    run(path, tmp_path)
    # All were just timed; the two of the largest sizes are made to look old.
    with Database.open(path) as database, database._writing() as connection:
        connection.exec_driver_sql(
            "DELETE FROM trial WHERE run_id IS NOT NULL AND problem_id IN (SELECT id FROM problem WHERE shape IN "
            "('8388608', '33554432'))"
        )
    outcome = run(path, tmp_path, limit=2)
    assert set(by_size(outcome)) == {8388608, 33554432}
    drifted = run(path, tmp_path, limit=1, environment=replace(here(), nccl="9.9.9"))
    assert len(by_size(drifted)) == 1


@pytest.mark.parametrize(
    "options", [{"ops": ("all_gather",)}, {"dtypes": ("float16",)}, {"modes": ("eager",)}], ids=str
)
def test_filters_leave_nothing(path: Path, tmp_path: Path, options: dict[str, Any]) -> None:
    outcome = run(path, tmp_path, **options)
    assert (outcome.results, outcome.num_trials, outcome.run_id) == ((), 0, None)


def test_two_gangs_share_the_work(path: Path, tmp_path: Path) -> None:
    alone, both = (run(path, tmp_path, store=False, gangs=n, replay_trial_s=0.01) for n in (1, 2))
    assert both.num_gangs == 2
    assert both.num_trials == alone.num_trials
    assert {r.verdict for r in both.results} == {"ok"}


def test_bad_options() -> None:
    for options in ({"tolerance": -0.1}, {"tolerance": float("nan")}, {"limit": 0}):
        with pytest.raises(ValueError, match="must be"):
            VerifySpec(**options)  # type: ignore[arg-type]
    with pytest.raises(TuningError, match="no_such_module"):
        verify(VerifySpec(plugins=("no_such_module",)), None)


# The parts


def winner_of(ratio: float, **changes: Any) -> Winner:
    values: dict[str, Any] = {
        "problem": problem_of(SIZES[0]),
        "candidate": Candidate.of("all_reduce", "lamport", {"num_blocks": 8, "num_warps": 2, "launch_pdl": True}),
        "policies": ("default",),
        "latency_us": 10.0 * ratio,
        "library_us": 10.0,
        "noise": 0.01,
        "measured_us": 10.0 * ratio,
        "uncertainty": 0.01,
        "environment": here(),
        "layer": "user",
        "created_at": "2026-01-01",
        "is_drift": False,
    }
    return Winner(**{**values, **changes})


def timed(winner: Winner, ratio: float, **changes: Any) -> TrialRecord:
    us = 20.0 * ratio
    return replace(
        recorded()[0],
        **{
            **at(winner.candidate, winner.problem.shape[0]),
            "status": "ok",
            "latency_p10_us": us,
            "latency_p50_us": us,
            "latency_p90_us": us,
            **changes,
        },
    )


@pytest.mark.parametrize(
    ("stored", "now", "verdict"),
    [
        (0.5, 0.5, "ok"),
        (0.5, 0.4, "ok"),
        (0.5, 0.554, "ok"),  # 10 % and 1 % of noise
        (0.5, 0.556, "drifted"),
        (0.5, 1.2, "slower"),
        (0.95, 0.985, "ok"),
        (0.95, 0.995, "tied"),
        (0.95, 1.005, "tied"),
        (0.95, 1.02, "slower"),
    ],
)
def test_verdict(stored: float, now: float, verdict: str) -> None:
    winner = winner_of(stored)
    found = judge(winner, [timed(winner, now)], tolerance=0.1)
    assert found.verdict == verdict
    assert found.ratio == pytest.approx(now)
    assert found.is_wrong == (verdict not in ("ok", "tied"))


@pytest.mark.parametrize(
    ("then_us", "now_us", "verdict"),
    [
        (5.0, 8.0, "drifted"),
        (8.0, 8.0, "ok"),  # the library has become faster
        (7.25, 8.0, "ok"),  # 10.3 % longer: 10 % and 1 % of noise
        (7.15, 8.0, "drifted"),
        (10.0, 8.0, "ok"),
    ],
)
def test_a_winner_that_is_not_slower_than_it_was_has_not_drifted(then_us: float, now_us: float, verdict: str) -> None:
    """Against the library it has lost 60 % each time."""
    winner = winner_of(0.5, measured_us=then_us)
    times = {"latency_p10_us": now_us, "latency_p90_us": now_us, "baseline_p50_us": now_us / 0.8}
    found = judge(winner, [timed(winner, now_us / 20, **times)], tolerance=0.1)
    assert found.ratio == pytest.approx(0.8)
    assert found.verdict == verdict
    assert ("the library's doing" in found.why) == (verdict == "ok")


def test_an_eager_call_may_differ_by_its_spread() -> None:
    winner = winner_of(0.5, problem=replace(problem_of(SIZES[0]), mode="eager"))
    steady, erratic = (
        timed(winner, 0.65, problem=winner.problem, latency_p10_us=13.0 - spread, latency_p90_us=13.0 + spread)
        for spread in (0.1, 3.0)
    )
    assert judge(winner, [steady], tolerance=0.1).verdict == "drifted"
    assert judge(winner, [erratic], tolerance=0.1).verdict == "ok"
    assert judge(replace(winner, uncertainty=0.25), [steady], tolerance=0.1).verdict == "ok"


def test_only_what_is_faster_by_itself_and_against_the_library_has_overtaken() -> None:
    winner = winner_of(0.5)
    other = Candidate.of("all_reduce", "one_shot", {"items": 1, "num_blocks": 8, "num_warps": 4})
    mine, fields = timed(winner, 0.5), at(other, SIZES[0])
    for us, library_us, is_faster in ((9.0, 20.0, True), (9.0, 17.0, False), (10.5, 25.0, False), (9.95, 20.0, False)):
        times = {f"latency_p{p}_us": us for p in (10, 50, 90)}
        record = replace(timed(winner, 0.5), **{**fields, **times, "baseline_p50_us": library_us})
        found = judge(winner, [mine, record], tolerance=0.1)
        assert (found.faster == other) == is_faster, (us, library_us)


def test_verdict_where_the_library_may_not_run() -> None:
    """Callers that insist on ordered sums have no better choice, however slow it is."""
    winner = winner_of(1.5, policies=("ordered",))
    assert judge(winner, [timed(winner, 1.55)], tolerance=0.1).verdict == "ok"
    assert judge(winner, [timed(winner, 1.9)], tolerance=0.1).verdict == "drifted"


def test_verdict_of_a_noisy_timing() -> None:
    winner = winner_of(0.95, noise=0.01)
    noisy = timed(winner, 1.03, latency_p10_us=10.0, latency_p90_us=35.0, samples=20)
    found = judge(winner, [noisy], tolerance=0.1)
    assert (found.verdict, found.noise) == ("tied", 0.05)


def test_verdict_without_a_library() -> None:
    winner = winner_of(0.5)
    assert judge(winner, [timed(winner, 0.5, baseline_p50_us=None)], tolerance=0.1).verdict == "unmeasured"
    never = winner_of(0.5, library_us=None)
    assert judge(never, [timed(never, 0.9)], tolerance=0.1).verdict == "ok"
    library = winner_of(1.0, candidate=Candidate.of("all_reduce", "library", {}))
    row = timed(library, 1.7, baseline_p50_us=None)
    assert judge(library, [row], tolerance=0.1).verdict == "ok"
    broken = replace(row, status="crashed", reason="planted", latency_p50_us=None)
    assert judge(library, [broken], tolerance=0.1).verdict == "failed"


def test_winners_of_every_policy(path: Path) -> None:
    with Database.open(path) as database:
        library = next(r for r in recorded() if r.variant == "library" and r.problem == problem_of(SIZES[4]))
        now = datetime.now(timezone.utc)
        database.record([replace(library, latency_p50_us=1.0, baseline_p50_us=1.0, final=True, created_at=now)])
    found = known(path)
    (mine,) = [s for p, s in found.items() if p == problem_of(SIZES[4])]
    assert all(winner.policies for winner in mine.winners)
    asked = [policy for winner in mine.winners for policy in winner.policies]
    assert sorted(asked) == ["any", "default", "ordered"]


def test_neighbours_winners_are_measured_too(path: Path) -> None:
    found = known(path)
    chosen = candidates_to_measure(found)
    sizes = sorted(problem.shape[0] for problem in found)
    for place, size in enumerate(sizes):
        near = sizes[max(place - 1, 0) : place + 2]
        wanted = {w.candidate for n in near for w in found[problem_of(n)].winners if not w.is_library}
        assert wanted <= set(chosen[problem_of(size)])
    assert all(c.variant != "library" for members in chosen.values() for c in members)


def test_what_is_measured_is_compiled_ahead(path: Path) -> None:
    """A new Triton finds an empty cache: nothing but what is measured, at the shapes that the check launches too."""
    chosen = candidates_to_measure(known(path))
    submitted: list[Any] = []

    class Pool:
        def submit(self, requests: list[Any], compute_capability: int) -> int:
            assert compute_capability == 90
            submitted.extend(requests)
            return len(requests)

    settings, limits = Settings(backend="cuda", world_size=4, trials=1), limits_for(here(), 4)
    steps = list(compile_ahead(Pool(), chosen, settings, limits, 90, chosen))  # type: ignore[arg-type]
    assert len(steps) == len(SIZES)
    wanted = {
        request
        for problem, members in chosen.items()
        for candidate in members
        for request in get_variant("all_reduce", candidate.variant).compile_requests(problem, candidate.config_dict)
    }
    assert wanted <= set(submitted)
    everything: list[Any] = list(compile_ahead(Pool(), chosen, settings, limits, 90))  # type: ignore[arg-type]
    assert sum(everything) > sum(steps) > 0


def test_changed_kernels_leave_no_winner(path: Path) -> None:
    snapshot = load_snapshot(here(), 4, layers=[Layer("user", str(path))], strict=True)
    assert stored_winners(snapshot, limits_for(here(), 4), lambda op, variant: "another") == {}


def test_pins_are_not_what_is_verified(path: Path, winners: dict[int, Candidate]) -> None:
    with Database.open(path) as database:
        library = Candidate.of("all_reduce", "library", {})
        database.pin(problem_of(SIZES[0]), library, environment=here(), reason="for now")
    assert known(path)[problem_of(SIZES[0])].winners[0].candidate == winners[SIZES[0]]


# The verb


class Verify:
    """Stands in for `verify`, with the answers of a recording."""

    def __init__(self, path: Path, tmp_path: Path, changes: Mapping[tuple[int, Candidate], Change]) -> None:
        self.arguments = path, tmp_path, changes
        self.spec: VerifySpec | None = None
        self.stored = False

    def __call__(
        self, spec: VerifySpec, database: Database | None, progress: Callable[[Progress], None] | None = None
    ) -> VerifyOutcome:
        self.spec, self.stored = spec, database is not None
        return run(*self.arguments, tolerance=spec.tolerance, store=False, progress=progress)


def start(stand_in: Verify, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> Any:
    monkeypatch.setattr("tunedcomm.tuner.verify.verify", stand_in)
    monkeypatch.setattr(db_verify, "num_gpus", lambda: 4)
    monkeypatch.setattr(db_verify, "swept_ranks", lambda ranks, backend: ranks or 4)
    return CliRunner().invoke(main.app, ["db", "verify", *arguments])


def test_verb_prints_what_drifted(
    path: Path, tmp_path: Path, winners: dict[int, Candidate], monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in = Verify(path, tmp_path, {(SIZES[1], winners[SIZES[1]]): at_ratio(1.5)})
    shown = start(stand_in, monkeypatch, "--db", str(path), "--no-store")
    assert shown.exit_code == 1
    assert "slower: all_reduce 32768" in shown.stdout
    assert "50.0% longer than the library" in shown.stdout
    assert "nothing was stored" in shown.stdout
    assert not stand_in.stored
    line = next(line for line in shown.stdout.splitlines() if line.lstrip().startswith("32768 "))
    assert "0.67x" in line
    assert line.endswith("slower")


def test_verb_as_json(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in = Verify(path, tmp_path, {})
    options = "--op all_reduce --dtype bfloat16 --mode graph --limit 7 --tolerance 5% --gangs 2 --json"
    shown = start(stand_in, monkeypatch, "--db", str(path), *options.split())
    assert shown.exit_code == 0, shown.output
    answer = json.loads(shown.stdout)
    assert answer["num_wrong"] == 0
    assert {entry["verdict"] for entry in answer["winners"]} == {"ok"}
    assert answer["winners"][0]["stored"]["changes"] == []
    spec = stand_in.spec
    assert spec is not None
    assert (spec.ops, spec.dtypes, spec.modes) == (("all_reduce",), ("bfloat16",), ("graph",))
    assert (spec.limit, spec.tolerance, spec.gangs, spec.world_size) == (7, 0.05, 2, 4)
    assert spec.layers == (Layer("user", str(path)),)
    assert stand_in.stored


def test_verb_with_nothing_to_verify(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Database.open(path) as database, database._writing() as connection:
        connection.exec_driver_sql("DELETE FROM trial")
    shown = start(Verify(path, tmp_path, {}), monkeypatch, "--db", str(path))
    assert shown.exit_code == 1
    assert "tunedcomm tune" in shown.stdout


@pytest.mark.parametrize("text", ["much", "-1%", "200%", "", "10 %%"])
def test_bad_tolerance(text: str, monkeypatch: pytest.MonkeyPatch, path: Path, tmp_path: Path) -> None:
    assert start(Verify(path, tmp_path, {}), monkeypatch, "--tolerance", text).exit_code == 2


def test_shares() -> None:
    shares = {"10%": 0.1, "0.25": 0.25, "7.5 %": 0.075, "0": 0.0}
    assert {text: db_verify.parse_share(text) for text in shares} == pytest.approx(shares)


def test_missing_database_is_bad_usage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(db_verify, "num_gpus", lambda: 4)
    monkeypatch.setattr(db_verify, "swept_ranks", lambda ranks, backend: 4)
    with pytest.raises(SystemExit) as caught:
        main.run(["db", "verify", "--db", str(tmp_path / "none.db")])
    assert caught.value.code == 2
