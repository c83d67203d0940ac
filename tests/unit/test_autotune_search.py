"""The short search of a running job over recorded trials: how near it comes to the best, and in what time."""

from __future__ import annotations

import functools
import statistics
from pathlib import Path

import pytest
from replay import Replay, SearchRun, read_recording, run_search

from tunedcomm import kernels
from tunedcomm.db.records import Trial
from tunedcomm.spec import Candidate, Problem
from tunedcomm.symm.layout import limits_for
from tunedcomm.tuner.in_job import ShortSearch, in_order, is_own, job_settings

RECORDING = Path(__file__).parents[1] / "data" / "trials_h200_x4.jsonl.gz"
PROBLEMS = [Problem("all_reduce", (1 << bits,), "bfloat16", 4) for bits in range(11, 23)]  # 4 KiB to 8 MiB
BUDGET_S = 0.25 * len(PROBLEMS)


@functools.cache
def recorded() -> tuple[Trial, ...]:
    kernels.discover()
    return tuple(read_recording(RECORDING))


def tuned(trial_seconds: float, seed: int) -> SearchRun:
    limits = limits_for(recorded()[0].environment, 4)
    return run_search(
        PROBLEMS,
        job_settings(limits, PROBLEMS, "default"),
        Replay(recorded(), noise_seed=seed),
        limits=limits,
        seconds_left=BUDGET_S,
        trial_seconds=trial_seconds,
        kind=ShortSearch,
        prepare=lambda search: search.plan(dict.fromkeys(in_order(PROBLEMS, BUDGET_S), ())),
    )


def regret(run: SearchRun, problem: Problem) -> float:
    """Recorded time of the winner over that of the best that was recorded there."""
    replay, won = Replay(recorded()), run.winner(problem)
    assert won is not None
    times = {
        c: replay.recorded_us(problem, c, final=True) or us for c, us in replay.measured(problem, "default").items()
    }
    return times[won.candidate] / min(times.values())


@pytest.mark.parametrize(("trial_seconds", "seed"), [(0.03, 0), (0.05, 1), (0.06, 2)])
def test_a_quarter_of_a_second_a_problem_is_enough(trial_seconds: float, seed: int) -> None:
    run = tuned(trial_seconds, seed)
    assert run.seconds <= BUDGET_S + trial_seconds
    found = [regret(run, problem) for problem in PROBLEMS]
    assert statistics.mean(found) <= 1.05, found
    assert max(found) <= 1.15, found


def test_the_most_wanted_come_first_where_time_is_short() -> None:
    wanted = [PROBLEMS[5], PROBLEMS[9], PROBLEMS[2], PROBLEMS[7]]
    assert in_order(wanted, 60.0) == sorted(wanted)
    assert in_order(wanted, 0.4) == [PROBLEMS[5], PROBLEMS[9], PROBLEMS[2], PROBLEMS[7]]


def test_a_problem_that_no_time_is_left_for_stays_as_it_was() -> None:
    limits = limits_for(recorded()[0].environment, 4)
    replay, settings = Replay(recorded()), job_settings(limits, PROBLEMS, "default")
    run = run_search(
        PROBLEMS,
        settings,
        replay,
        limits=limits,
        seconds_left=0.2,
        trial_seconds=0.05,
        kind=ShortSearch,
        prepare=lambda search: search.plan(dict.fromkeys(PROBLEMS, ())),
    )
    assert {step.command.problem for step in run.steps} < set(PROBLEMS)


def test_own_variants_are_told_from_others() -> None:
    kernels.discover()
    assert is_own(Candidate.of("all_reduce", "lamport", {}))
