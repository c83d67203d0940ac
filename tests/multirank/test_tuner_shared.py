"""Supervisors that write to one database share a sweep: nothing twice, nothing missing, whoever dies or is away."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from test_tuner_kill import TABLE, spec_of, table, wait_for

from tunedcomm.db.store import Database
from tunedcomm.tuner.search.sweep import SweepSpec, sweep

if TYPE_CHECKING:
    from postgres import PostgresServer

SCRIPT = """
import functools, sys
import test_tuner_shared as t
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


def tried(found: TABLE) -> set[tuple[str, str, bool]]:
    return {(str(problem), str(candidate), final) for problem, candidate, final in found}


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> set[tuple[str, str, bool]]:
    """What one supervisor tries, in its searches and in the finals."""
    with Database.open(tmp_path_factory.mktemp("alone") / "tuned.db", create=True) as database:
        sweep(shared_spec(0.0), database)
        return tried(table(database.trials()))


@contextmanager
def supervisors(database: str, count: int, trial_s: float) -> Iterator[list[subprocess.Popen[bytes]]]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    command = [sys.executable, "-c", SCRIPT, database, str(trial_s)]
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


def check(database: str, expected: set[tuple[str, str, bool]], *, share: int) -> None:
    """Every candidate is there once, as if one supervisor had run all, and each has done its part."""
    with Database.open(database, readonly=True) as opened:
        trials = opened.trials()
        runs = opened.runs()
    found = table(trials)
    assert tried(found) == expected
    assert len({problem for problem, _, final in found if final}) == 3
    counts = [sum(trial.run_id == run.id for trial in trials) for run in runs]
    assert sum(count > 0.1 * len(trials) for count in counts) >= share, counts


@pytest.mark.slow
def test_two_sweeps_at_once_are_one(database_url: str, alone: set[tuple[str, str, bool]]) -> None:
    Database.open(database_url, create=True).close()
    with supervisors(database_url, 2, 0.02) as started:
        assert [process.wait(240) for process in started] == [0, 0]
    check(database_url, alone, share=2)


@pytest.mark.slow
def test_what_a_killed_supervisor_had_claimed_is_done_by_the_other(
    database_url: str, alone: set[tuple[str, str, bool]]
) -> None:
    Database.open(database_url, create=True).close()
    with supervisors(database_url, 2, 0.03) as started:
        wait_for(lambda: rows(database_url) > 40, 120)
        started[0].send_signal(signal.SIGKILL)
        assert started[1].wait(240) == 0
    check(database_url, alone, share=1)


@pytest.mark.slow
def test_a_server_that_is_away_is_waited_for(
    postgres_server: PostgresServer, postgres_url: str, alone: set[tuple[str, str, bool]]
) -> None:
    Database.open(postgres_url, create=True).close()
    with supervisors(postgres_url, 2, 0.02) as started:
        wait_for(lambda: rows(postgres_url) > 40, 120)
        postgres_server.stop()
        time.sleep(6)
        postgres_server.start()
        assert [process.wait(240) for process in started] == [0, 0]
    check(postgres_url, alone, share=2)


def test_a_third_one_that_comes_late_has_nothing_to_do(tmp_path: Path, alone: set[tuple[str, str, bool]]) -> None:
    path = tmp_path / "tuned.db"
    with Database.open(path, create=True) as database:
        sweep(shared_spec(0.0), database)
        before = len(database.trials())
        assert sweep(shared_spec(0.0), database).progress.trials == 0
        assert len(database.trials()) == before
    check(str(path), alone, share=1)
