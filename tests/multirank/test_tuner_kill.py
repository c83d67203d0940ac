"""Sweeps whose processes are killed, or share a database: nothing is lost or done twice, nobody else is disturbed.

No GPU is needed: the gangs answer from recorded trials, everything else is as on GPUs.
"""

from __future__ import annotations

import os
import random
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from cases import processes
from quick import FULL
from replay import stand_in
from spec_samples import spec_with
from sqlalchemy import make_url

from tunedcomm.db.records import Trial
from tunedcomm.db.store import Database
from tunedcomm.hardware import process_start
from tunedcomm.spec import Candidate, Problem
from tunedcomm.tuner.machine import backend_settings
from tunedcomm.tuner.search.progress import Progress
from tunedcomm.tuner.search.spec import SweepSpec
from tunedcomm.tuner.search.summary import SweepOutcome
from tunedcomm.tuner.search.sweep import sweep

ROOT = Path(__file__).parents[2]
RECORDING = ROOT / "tests" / "data" / "trials_h200_x4.jsonl.gz"
Tried = set[tuple[str, str, bool]]
TABLE = dict[tuple[Problem, Candidate, bool], tuple[str, float | None]]


def problems_of(*exponents: int) -> tuple[Problem, ...]:
    return tuple(Problem("all_reduce", (1 << exponent,), "bfloat16", 4) for exponent in exponents)


def spec_of(*exponents: int, **changes: Any) -> SweepSpec:
    values: dict[str, Any] = {"patience": 0, "command": "pytest", **changes}
    values["stand_in"] = stand_in(RECORDING, values.pop("replay_trial_s", 0.0))
    settings = backend_settings("cuda", 4)
    spec: SweepSpec = spec_with(SweepSpec, settings, op="all_reduce", problems=problems_of(*exponents), **values)
    return spec


def gang_pids(supervisor: int) -> list[int]:
    """Live gangs of a supervisor, whose pid they carry in their command line."""
    return processes("replay", str(supervisor))


def wait_for(condition: Callable[[], object], timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it took too long"
        time.sleep(0.005)


def table(trials: list[Trial]) -> TABLE:
    """What is known in the end; fails where a trial was stored twice."""
    found: TABLE = {}
    for trial in trials:
        key = (trial.problem, trial.candidate, trial.final)
        assert key not in found, key
        found[key] = (trial.status, trial.latency_p50_us)
    return found


def test_a_budget_ends_the_sweep_in_the_midst_of_a_trial(tmp_path: Path) -> None:
    with Database.open(tmp_path / "tuned.db", create=True) as database:
        done = sweep(spec_of(13, 14, replay_trial_s=60.0, budget_s=2.0), database)
        assert not list(database.trials())
    assert done.reason == "budget"
    assert done.progress.elapsed_s <= done.start_s + 1.15 * 2.0 + 0.5
    assert [one.reached for one in done.problems] == [False, False]
    assert not done.unsolved


SCRIPT = """
import sys
import test_tuner_kill as t
from tunedcomm.db.store import Database
from tunedcomm.tuner.search.sweep import sweep
with Database.open(sys.argv[1]) as database:
    sweep(t.killed_spec(float(sys.argv[2])), database)
"""


def killed_spec(trial_s: float) -> SweepSpec:
    """A sweep that samples: what it tries depends on everything that it has tried before."""
    return spec_of(13, 14, 15, 16, 18, 20, 22, 23, trials=28, replay_trial_s=trial_s)


class Killed:
    """A sweep in a process of its own, run again whenever it was killed."""

    def __init__(self, path: Path, seed: int) -> None:
        Database.open(path, create=True).close()
        self.path = path
        self.random = random.Random(seed)
        self.environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
        self.start()

    def start(self) -> None:
        self.process = subprocess.Popen([sys.executable, "-c", SCRIPT, str(self.path), "0.03"], env=self.environment)

    def rows(self) -> int:
        with sqlite3.connect(f"file:{self.path}?mode=ro", uri=True) as connection:
            count: int = connection.execute("SELECT count(*) FROM trial").fetchone()[0]
        return count

    def wait_for_rows(self, more: int) -> None:
        """Until so many more trials are stored, and a random part of the next one."""
        wanted = self.rows() + more
        wait_for(lambda: self.rows() >= wanted or self.process.poll() is not None)
        time.sleep(self.random.uniform(0, 0.04))

    def kill_supervisor(self) -> None:
        if self.random.random() < 0.3:
            time.sleep(self.random.uniform(0, 2.0))  # while it starts
        else:
            self.wait_for_rows(self.random.randint(1, 12))
        assert self.process.poll() is None, "the sweep was over before it was killed often enough"
        gangs = gang_pids(self.process.pid)
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()
        wait_for(lambda: not any(map(process_start, gangs)), 10)
        self.start()

    def kill_gang(self, *, starting: bool) -> None:
        if starting:
            wait_for(lambda: gang_pids(self.process.pid))
        else:
            # One that is begun again is through by then: killed twice in a row it would be blamed.
            self.wait_for_rows(self.random.randint(2, 12))
        assert self.process.poll() is None, "the sweep was over before it was killed often enough"
        for pid in gang_pids(self.process.pid):
            os.kill(pid, signal.SIGKILL)
            wait_for(lambda pid=pid: not process_start(pid), 10)  # type: ignore[misc]

    def kill(self, what: str) -> None:
        if what == "supervisor":
            self.kill_supervisor()
        else:
            self.kill_gang(starting=what == "starting gang")


def kills(seed: int) -> list[str]:
    """What is killed, in order: no two gangs in a row that have not said a word, which ends a sweep, and rightly so."""
    lone, starting, gangs = (5, 4, 12) if FULL else (2, 1, 4)
    turns = [["supervisor"]] * lone + [["supervisor", "starting gang"]] * starting + [["gang"]] * gangs
    random.Random(seed).shuffle(turns)
    return [what for turn in turns for what in turn]


@pytest.mark.slow
def test_killed_again_and_again_the_table_is_that_of_an_undisturbed_sweep(tmp_path: Path) -> None:
    outcome, expected = run(tmp_path / "undisturbed.db", killed_spec(0.0))
    assert outcome.reason == "done"
    killed = Killed(tmp_path / "killed.db", seed=1)
    try:
        for what in kills(seed=1):
            killed.kill(what)
        assert killed.process.wait(120) == 0
    finally:
        killed.process.kill()
        killed.process.wait()
    assert not gang_pids(killed.process.pid)
    with Database.open(killed.path) as database:
        assert table(database.trials()) == expected
    with sqlite3.connect(killed.path) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]


def run(path: Path, spec: SweepSpec, progress: Callable[[Progress], None] | None = None) -> tuple[SweepOutcome, TABLE]:
    with Database.open(path, create=True) as database:
        outcome = sweep(spec, database, progress)
        return outcome, table(database.trials())


def searched(found: TABLE) -> set[tuple[Problem, Candidate]]:
    return {(problem, candidate) for problem, candidate, final in found if not final}


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> TABLE:
    """What one gang finds that tries everything."""
    return run(tmp_path_factory.mktemp("alone") / "tuned.db", spec_of(15, 19, trials=200))[1]


def test_killed_gang_disturbs_no_other_and_its_candidate_is_run_again(tmp_path: Path, alone: TABLE) -> None:
    killed: list[int] = []
    others: list[set[int]] = []

    def kill_one(progress: Progress) -> None:
        pids = gang_pids(os.getpid())
        if killed:
            others.append(set(pids))
        elif progress.trials > 40:
            killed.append(pids.pop())
            others.append(set(pids))
            os.kill(killed[0], signal.SIGKILL)

    outcome, found = run(tmp_path / "tuned.db", spec_of(15, 19, trials=200, gangs=2, replay_trial_s=0.02), kill_one)
    assert (outcome.reason, outcome.progress.num_gangs, outcome.progress.failures) == ("done", 3, {})
    assert len(others[0]) == 1
    assert sum(others[0] <= pids for pids in others) > 3  # the other one was left alone
    assert searched(found) == searched(alone)


# Supervisors that write to one database share a sweep: nothing twice, nothing missing, whoever dies or is away


if TYPE_CHECKING:
    from postgres import PostgresServer

SHARED_SCRIPT = """
import functools, sys
import test_tuner_kill as t
from tunedcomm.db.store import Database
from tunedcomm.tuner.search import sweep
sweep.Claims = functools.partial(sweep.Claims, heartbeat_s=1, grace_s=4)
with Database.open(sys.argv[1], create=True, patience_s=90) as database:
    outcome = sweep.sweep(t.shared_spec(float(sys.argv[2])), database)
assert outcome.reason == "done", outcome
assert not outcome.unsolved, outcome.unsolved
"""


def shared_spec(trial_s: float) -> SweepSpec:
    """Exhaustive, so that it is known what must be there in the end."""
    return spec_of(11, 13, 16, trials=400, replay_trial_s=trial_s)


def tried(found: TABLE) -> Tried:
    return {(str(problem), str(candidate), final) for problem, candidate, final in found}


@pytest.fixture(scope="module")
def alone_shared(tmp_path_factory: pytest.TempPathFactory) -> Tried:
    """What one supervisor tries, in its searches and in the finals."""
    return tried(run(tmp_path_factory.mktemp("alone") / "tuned.db", shared_spec(0.0))[1])


@contextmanager
def supervisors(database: str, count: int, trial_s: float) -> Iterator[list[subprocess.Popen[bytes]]]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    command = [sys.executable, "-c", SHARED_SCRIPT, database, str(trial_s)]
    started = [subprocess.Popen(command, env=environment) for _ in range(count)]
    try:
        yield started
    finally:
        for process in started:
            process.kill()
            process.wait()


def rows(database: str) -> int:
    with Database.open(database, readonly=True) as opened:
        return len(opened.trials())


def check(database: str, expected: Tried, *, share: int) -> None:
    """Every candidate is there once, as if one supervisor had run all, and each has done its part."""
    with Database.open(database, readonly=True) as opened:
        trials = opened.trials()
        runs = opened.runs()
    found = table(trials)
    assert tried(found) == expected
    assert len({problem for problem, _, final in found if final}) == 3
    counts = [sum(trial.run_id == run.id for trial in trials) for run in runs]
    assert sum(count > 0.03 * len(trials) for count in counts) >= share, counts  # the second one may start late


@pytest.mark.slow
def test_two_sweeps_at_once_are_one(database_url: str, alone_shared: Tried) -> None:
    Database.open(database_url, create=True).close()
    with supervisors(database_url, 2, 0.04) as started:
        assert [process.wait(240) for process in started] == [0, 0]
    check(database_url, alone_shared, share=2)


@pytest.mark.slow
def test_what_a_killed_supervisor_had_claimed_is_done_by_the_other(database_url: str, alone_shared: Tried) -> None:
    Database.open(database_url, create=True).close()
    with supervisors(database_url, 2, 0.03) as started:
        wait_for(lambda: rows(database_url) > 40, 120)
        started[0].send_signal(signal.SIGKILL)
        assert started[1].wait(240) == 0
    check(database_url, alone_shared, share=1)


@pytest.mark.slow
@pytest.mark.parametrize("is_crash", [False, True], ids=["stop", "crash"])
def test_a_server_that_is_away_is_waited_for(
    postgres_server: PostgresServer, postgres_url: str, is_crash: bool, alone_shared: Tried
) -> None:
    # A crash costs nothing that the server said was stored.
    postgres_server.execute(f"ALTER DATABASE {make_url(postgres_url).database} SET synchronous_commit = on")
    Database.open(postgres_url, create=True).close()
    with supervisors(postgres_url, 2, 0.02) as started:
        wait_for(lambda: rows(postgres_url) > 40, 120)
        (postgres_server.crash if is_crash else postgres_server.stop)()
        time.sleep(0.1 if is_crash else 6)
        postgres_server.start()
        assert [process.wait(240) for process in started] == [0, 0]
    check(postgres_url, alone_shared, share=2)
