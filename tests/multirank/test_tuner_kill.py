"""Sweeps whose processes are killed: nothing is lost, nothing is done twice, nobody else is disturbed.

No GPU is needed: the gangs answer from recorded trials, everything else is as on GPUs.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from replay import stand_in

from tunedcomm.db.records import Trial
from tunedcomm.db.store import Database
from tunedcomm.spec import Candidate, Problem
from tunedcomm.tuner.gang.process import process_start
from tunedcomm.tuner.search.sweep import Progress, SweepOutcome, SweepSpec, sweep

ROOT = Path(__file__).parents[2]
RECORDING = ROOT / "tests" / "data" / "trials_h200_x4.jsonl.gz"
TABLE = dict[tuple[Problem, Candidate, bool], tuple[str, float | None]]


def problems_of(*exponents: int) -> tuple[Problem, ...]:
    return tuple(Problem("all_reduce", (1 << exponent,), "bfloat16", 4) for exponent in exponents)


def spec_of(*exponents: int, **changes: Any) -> SweepSpec:
    values: dict[str, Any] = {"patience": 0, "command": "pytest", **changes}
    values["stand_in"] = stand_in(RECORDING, values.pop("replay_trial_s", 0.0))
    return SweepSpec(op="all_reduce", problems=problems_of(*exponents), **values)


def gang_pids(supervisor: int) -> list[int]:
    """Live gangs of a supervisor, whose pid they carry in their command line."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if b"replay" in words and str(supervisor).encode() in words:
            found.append(int(folder.name))
    return sorted(pid for pid in found if process_start(pid))


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


def stored(path: Path) -> TABLE:
    with Database.open(path) as database:
        return table(database.trials())


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


def test_two_gangs_do_everything_once_side_by_side(tmp_path: Path, alone: TABLE) -> None:
    looks: list[set[int]] = []  # slots of the gangs that run a trial

    def look(progress: Progress) -> None:
        looks.append({gang.slot for gang in progress.gangs if gang.step in ("binding", "running")})

    outcome, both = run(tmp_path / "tuned.db", spec_of(15, 19, trials=200, gangs=2, replay_trial_s=0.02), look)
    assert (outcome.reason, outcome.progress.num_gangs) == ("done", 2)
    assert searched(both) == searched(alone)
    assert {key for key in both if key[2]}  # the finals, too
    # How many looks see both depends on how long the second one takes to start.
    assert {0, 1} in looks
    assert not gang_pids(os.getpid())


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
