"""A sweep over good and bad variants ends, measures the good ones and records each bad one under its status."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from cases import processes
from planted_cases import BAD, GOOD, LATE_BAD, LATE_OP, NEVER, NEXT, OP, TOO_LARGE, TOO_LARGE_TO_CHECK
from spec_samples import spec_with

from tunedcomm.db.layers import Layer, load_snapshot
from tunedcomm.db.records import Trial
from tunedcomm.db.store import Database
from tunedcomm.errors import TuningError
from tunedcomm.hardware import process_start
from tunedcomm.kernels import source_hash_of
from tunedcomm.selection.select import Registered, choose
from tunedcomm.spec import Problem
from tunedcomm.symm.layout import limits_for
from tunedcomm.tuner.machine import backend_settings
from tunedcomm.tuner.search.spec import SweepSpec
from tunedcomm.tuner.search.summary import SweepOutcome
from tunedcomm.tuner.search.sweep import sweep

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("planted_ops")]
# Where candidates hang on purpose; twice what beside other tests on two cores a good one was seen to stand still.
HANGS_S = 10.0


def spec_of(*variants: str, **changes: object) -> SweepSpec:
    values: dict[str, object] = {
        "op": OP,
        "dtypes": ("float32",),
        "variants": variants,
        "plugins": ("planted",),
        "trials": 30,
        "compile_timeout_s": 60.0,
        "trial_timeout_s": 60.0,
        "command": "pytest",
    }
    spec: SweepSpec = spec_with(SweepSpec, backend_settings("host", 2), **{**values, **changes})
    return spec


def gang_processes(supervisor: int) -> list[int]:
    """Live ranks of a supervisor, whose pid they carry in their command line."""
    return processes("tunedcomm.tuner.gang.worker", str(supervisor))


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[SweepOutcome, list[Trial], Path]]:
    """One sweep of everything at one shape: each lost gang costs seconds, so all tests look at the same one."""
    path = tmp_path_factory.mktemp("faults") / "tuned.db"
    with Database.open(path, create=True) as database:
        outcome = sweep(spec_of(shapes=((64,),), compile_timeout_s=HANGS_S, trial_timeout_s=HANGS_S), database)
        yield outcome, database.trials(), path


def test_good_variants_are_measured(swept: tuple[SweepOutcome, list[Trial], Path]) -> None:
    outcome, trials, _ = swept
    ran = {str(t.candidate) for t in trials if t.status in ("ok", "pruned")}
    assert ran == {"library()", "unordered(delay_ms=5)", *GOOD}
    assert outcome.reason == "done"
    assert outcome.num_skipped == 0
    assert outcome.progress.num_gangs > 4
    assert 0 < outcome.start_s < outcome.progress.elapsed_s
    assert not outcome.unsolved
    ok = [t for t in trials if t.status == "ok"]
    assert all(t.samples >= 2 and t.baseline_p50_us and t.error is not None and t.error < 1e-6 for t in ok)
    assert all(t.latency_p10_us <= t.latency_p50_us <= t.latency_p90_us for t in ok)  # type: ignore[operator]


@pytest.mark.parametrize(
    ("variant", "text"),
    [
        ("raises_on_one_rank", "planted launch error.*; the other ranks waited for it for [5-9] s"),
        ("bind_fails_on_one_rank", r"on rank 1 of 2: RuntimeError: planted .* at planted\.py:\d+"),
        ("segfaults", "SIGSEGV"),
        ("peer_times_out", "waited for rank 0"),
        ("deadlocks", "no sign of life for 10 s while running"),
        ("bind_takes_for_ever", "while binding"),
        ("wrong_by_one_element", "on rank 1 of 2: .*1 of 64 elements"),
        ("wrong_second_launch", "launch 2"),
        ("nan_on_odd_sizes", r"shape \((63|67),\).*nan"),
        ("other_bits", "bits of the ordered sum"),
        ("leaves_packets", r"on rank 1 of 2: left 4 words in the arena, which a later call would take for data"),
        ("infeasible", "planted: not on this machine"),
        ("bind_takes_too_much", "on rank 1 of 2: no memory is left to bind it: OutOfMemoryError: planted"),
    ],
)
def test_bad_variant_is_recorded_once(swept: tuple[SweepOutcome, list[Trial], Path], variant: str, text: str) -> None:
    mine = [trial for trial in swept[1] if trial.variant == variant]
    assert [trial.status for trial in mine] == [BAD.get(variant, "infeasible")]
    assert re.search(text, mine[0].reason), mine[0].reason


def test_no_process_is_left(swept: tuple[SweepOutcome, list[Trial], Path]) -> None:
    assert not gang_processes(os.getpid())


def test_second_sweep_has_nothing_to_do(swept: tuple[SweepOutcome, list[Trial], Path]) -> None:
    _, trials, path = swept
    with Database.open(path) as database:
        outcome = sweep(spec_of(shapes=((64,),)), database)
        assert outcome.progress.trials == 0
        assert outcome.progress.num_gangs == 0
        assert len(database.trials()) == len(trials)
        assert outcome.num_skipped == 11
        broken = {one.variant for one in outcome.variants if one.is_broken}
        assert broken == {variant for variant, status in BAD.items() if status != "infeasible"}
        infeasible = {one.variant: one.infeasible for one in outcome.variants if one.infeasible}
        assert infeasible.keys() == {"infeasible", "bind_takes_too_much"}
        assert infeasible["infeasible"] == "planted: not on this machine"
        assert outcome.problems[0].failures == {"incorrect": 5, "compile_error": 1, "hung": 3, "crashed": 2}


def test_problem_that_does_not_fit_is_skipped_and_nobody_blamed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shapes = ((64,), (TOO_LARGE,), (TOO_LARGE_TO_CHECK,))
    with Database.open(tmp_path / "tuned.db", create=True) as database:
        outcome = sweep(spec_of("good", shapes=shapes), database)
        trials = database.trials()
    assert outcome.reason == "done"
    assert outcome.progress.num_gangs == 1
    assert outcome.dropped == ()
    assert [problem.shape for problem in outcome.unsolved] == [(TOO_LARGE,), (TOO_LARGE_TO_CHECK,)]
    tried = [trial for trial in trials if trial.status != "infeasible"]
    assert {trial.problem.shape for trial in tried} == {(64,)}
    assert {trial.status for trial in tried} <= {"ok", "pruned"}
    assert {str(trial.candidate) for trial in trials if trial.final} >= {"library()", "good(delay_ms=20)"}
    said = [record.getMessage() for record in caplog.records if "is skipped" in record.getMessage()]
    assert len(said) == 2
    assert "on rank 1 of 2: OutOfMemoryError: planted" in said[0]


def test_gang_that_cannot_start_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TUNEDCOMM_WORKSPACE_MIB", "nonsense")
    with (
        Database.open(tmp_path / "tuned.db", create=True) as database,
        pytest.raises(TuningError, match=r"3 gangs .*TUNEDCOMM_WORKSPACE_MIB='nonsense'"),
    ):
        sweep(spec_of("good"), database)


SWEEP_SCRIPT = """
import sys
import test_tuner_faults as t
from tunedcomm.db.store import Database
from tunedcomm.tuner.search.sweep import sweep
with Database.open(sys.argv[1], create=True) as database:
    slow = {"more_rounds": 200, "round_budget_us": 0.0, "trial_timeout_s": 300.0}  # seconds a trial
    sweep(t.spec_of("good", shapes=((64,),), **slow), database)
"""


def test_killed_supervisor_takes_its_gang_along_and_the_next_one_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "tuned.db"
    Database.open(path, create=True).close()
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    supervisor = subprocess.Popen([sys.executable, "-c", SWEEP_SCRIPT, str(path)], env=environment)
    try:
        deadline = time.monotonic() + 90
        while time.monotonic() < deadline and _stored(path) < 2:
            time.sleep(0.3)
        ranks = gang_processes(supervisor.pid)
        assert len(ranks) >= 2
    finally:
        supervisor.send_signal(signal.SIGKILL)
        supervisor.wait()
    deadline = time.monotonic() + 10
    while any(process_start(pid) for pid in ranks) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not [pid for pid in ranks if process_start(pid)]
    before = _stored(path)
    with Database.open(path) as database:
        sweep(spec_of("good", shapes=((64,),), finals=False), database)
        candidates = [str(trial.candidate) for trial in database.trials() if trial.status in ("ok", "pruned")]
    assert before >= 2
    assert sorted(candidates) == [*GOOD, "library()"]


def _stored(path: Path) -> int:
    with Database.open(path) as database:
        return len(database.trials())


# A sweep finds out variants that are right at first and do harm later, and dispatch takes the good one beside them


def late_sweep(path: Path, *variants: str, shapes: tuple[tuple[int, ...], ...]) -> tuple[SweepOutcome, list[Trial]]:
    wanted = spec_of(*variants, op=LATE_OP, plugins=("planted_late",), shapes=shapes)
    with Database.open(path, create=True) as database:
        return sweep(wanted, database), database.trials()


@pytest.fixture(scope="module")
def late(tmp_path_factory: pytest.TempPathFactory) -> tuple[SweepOutcome, list[Trial]]:
    path = tmp_path_factory.mktemp("trust") / "tuned.db"
    # What leaks takes long over it, and would be left alone beside the others.
    leaking = late_sweep(path, "leaks", shapes=((64,),))[1]
    outcome, trials = late_sweep(path, "good", "settles", *LATE_BAD, shapes=((64,),))
    assert {trial.id for trial in leaking} <= {trial.id for trial in trials}
    return outcome, trials


@pytest.mark.parametrize("variant", sorted(LATE_BAD))
def test_late_damage_is_incorrect(late: tuple[SweepOutcome, list[Trial]], variant: str) -> None:
    # On a slow machine too few launches fit into the search, and the finals find it out: the last trial counts.
    trial = [trial for trial in late[1] if trial.variant == variant][-1]
    assert trial.status == "incorrect", trial.reason
    assert re.search(LATE_BAD[variant], trial.reason), trial.reason


def test_the_good_variants_beside_them_are_taken(late: tuple[SweepOutcome, list[Trial]]) -> None:
    outcome, trials = late
    ran = {trial.variant for trial in trials if trial.status == "ok" and trial.final}
    assert ran == {"library", "good", "settles"}
    (problem,) = outcome.problems
    assert problem.best is not None
    assert problem.best.variant in ("good", "settles")


def test_damage_is_not_charged_to_the_library(tmp_path: Path) -> None:
    outcome, trials = late_sweep(tmp_path / "tuned.db", "good", "damages", shapes=((64,), (NEXT,), (NEVER,)))
    by_size = {size: [t for t in trials if t.problem.shape == (size,)] for size in (64, NEXT, NEVER)}
    for size in (64, NEXT):
        assert {t.status for t in by_size[size] if t.variant == "library"} == {"ok"}
    assert {t.status for t in by_size[NEXT] if t.variant == "good"} == {"ok"}
    assert [t.status for t in by_size[NEXT] if t.variant == "damages"] == ["crashed"]
    assert [t.status for t in by_size[NEVER] if t.variant == "library"] == ["crashed"]
    assert [result.library_failure is None for result in outcome.problems] == [True, True, False]
    assert outcome.problems[1].best is not None
    assert outcome.problems[1].best.variant == "good"
    assert outcome.problems[1].library_us is not None
    assert outcome.dropped == ()
    with Database.open(tmp_path / "tuned.db") as database:
        snapshot = load_snapshot(trials[0].environment, 2, layers=[Layer("user", database.target)], strict=True)
    limits = limits_for(trials[0].environment, 2)
    for result in outcome.problems:
        chosen = choose(snapshot, result.problem, Registered(limits, source_hash_of)).candidate
        assert result.best is None or result.best.candidate == chosen


def test_the_library_is_timed_in_place_beside_itself(tmp_path: Path) -> None:
    # So small that gloo wins, where no share is told, only on a machine that other work keeps busy.
    settings = replace(backend_settings("host", 2), trials=2, finals=False)
    shares: list[float | None] = []
    for size in (64, 128, 256):
        problems = tuple(
            Problem("all_reduce", (size,), "float32", 2, mode="eager", in_place=in_place) for in_place in (False, True)
        )
        with Database.open(tmp_path / "tuned.db", create=True) as database:
            done = sweep(SweepSpec(op="all_reduce", problems=problems, settings=settings), database)
            stored = {trial.problem for trial in database.trials() if trial.variant == "library"}
        assert set(problems) <= stored
        shares = [None if one.in_place_us is None else one.in_place_us / one.library_us for one in done.problems]
        assert shares[1] is None
        if shares[0] is not None:
            break
    assert shares[0] is not None
    assert 0.02 < shares[0] < 50
