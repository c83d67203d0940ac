"""Searches over recorded trials: the same every time, resumed, shared by gangs, and short in a running job."""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from quick import some
from replay import Replay, SearchRun, recorded, recorded_limits, run_search

from tunedcomm import kernels
from tunedcomm.spec import Candidate, Problem
from tunedcomm.tuner.gang.protocol import Settings
from tunedcomm.tuner.in_job import JobStrategy, is_own, job_settings

kernels.discover()
SETTINGS = Settings(backend="cuda", world_size=4, trials=160, patience=48)
WAYS = pytest.mark.parametrize("options", [{}, {"trials": 40, "patience": 12}], ids=["exhaustive", "sampled"])


def problem_of(numel: int) -> Problem:
    return Problem("all_reduce", (numel,), "bfloat16", 4)


PROBLEMS = tuple(map(problem_of, (1 << 15, 1 << 19, 1 << 23)))  # 64 KiB, 1 MiB and 16 MiB


def search(replay: Replay, *problems: Problem, settings: dict[str, Any] | None = None, **options: Any) -> SearchRun:
    """A sweep over the variants that there were when the trials were recorded."""
    there = tuple(sorted({record.variant for record in recorded()}))
    changed = replace(SETTINGS, **{"variants": there, **(settings or {})})
    return run_search(problems or PROBLEMS, changed, replay, limits=recorded_limits(), **options)


@WAYS
def test_same_seed_and_timings_give_the_same_commands_and_choices(options: dict[str, int]) -> None:
    shuffled = random.Random(7).sample(recorded(), len(recorded()))
    one, other = (search(Replay(rows), settings=options) for rows in (recorded(), shuffled))
    assert one.reason == "done"
    assert one == other
    assert all(one.winner(problem) for problem in PROBLEMS)


@WAYS
def test_interrupted_and_resumed_search_ends_with_the_same_table(options: dict[str, int]) -> None:
    replay = Replay(recorded())
    whole = search(replay, settings=options)
    for cut in some([len(whole.steps) // 2, 1, len(whole.steps) - 2]):
        before = search(replay, settings=options, max_trials=cut)
        assert (len(before.steps), before.reason) == (cut, "interrupted")
        after = search(replay, settings=options, stored=before.stored)
        assert after.table() == whole.table()
        kept = 0 if cut == 1 else cut  # the library's trial is not stored before a challenger's
        assert kept + len(after.steps) == len(whole.steps)


@pytest.mark.parametrize("budget_s", some([0.5, 1.5, 2.5, 4.5]))
def test_a_budget_that_ends_early_stores_no_library_alone(budget_s: float) -> None:
    run = search(Replay(recorded()), seconds_left=budget_s, trial_seconds=1.0)
    assert run.reason == "budget"
    assert run.seconds <= budget_s + 1.0  # the last trial ends
    for problem in PROBLEMS:
        ran = {trial.variant for trial in run.stored if trial.problem == problem and trial.status != "infeasible"}
        assert ran == set() or len(ran) > 1


def test_every_problem_is_reached_before_finals_where_time_is_short() -> None:
    """Two families: the finals of the first one must leave the second one its time."""
    eager = tuple(replace(problem, mode="eager") for problem in PROBLEMS)
    rows = [*recorded(), *(replace(r, problem=replace(r.problem, mode="eager")) for r in recorded())]
    run = search(Replay(rows), *PROBLEMS, *eager, seconds_left=16.0, trial_seconds=1.0)
    for problem in (*PROBLEMS, *eager):
        assert len({t.variant for t in run.stored if t.problem == problem and t.status != "infeasible"}) > 1, problem


def test_lost_gangs_are_replaced_and_their_variant_is_dropped() -> None:
    problem = PROBLEMS[0]
    bad = [r for r in recorded() if r.problem == problem and r.variant == "one_shot" and not r.final]
    rows = [r for r in recorded() if r not in bad]
    rows += [replace(r, status="crashed", latency_p50_us=None) for r in bad]
    done = search(Replay(rows), problem)
    assert (done.reason, done.dropped) == ("done", {"one_shot"})
    # Each crash costs two gangs: the second one runs the candidate first.
    assert done.num_gangs == 1 + 2 * SETTINGS.failures_per_variant
    lost = [step.command.candidate for step in done.steps if step.result.status == "crashed"]
    assert lost[::2] == lost[1::2]
    assert len(set(lost)) == SETTINGS.failures_per_variant


# In a running job

WANTED = [problem_of(1 << bits) for bits in range(11, 23)]  # 4 KiB to 8 MiB
BUDGET_S = 0.25 * len(WANTED)


def short_search(
    replay: Replay, seconds: float, trial_seconds: float, wanted: Sequence[Problem] | None = None
) -> SearchRun:
    settings = job_settings(recorded_limits(), WANTED, "default")
    guesses = dict.fromkeys(WANTED if wanted is None else wanted, ())
    return run_search(
        guesses,
        settings,
        replay,
        limits=recorded_limits(),
        seconds_left=seconds,
        trial_seconds=trial_seconds,
        strategy=JobStrategy(settings, guesses),
    )


def regret(run: SearchRun, problem: Problem) -> float:
    """Recorded time of the winner over that of the best that was recorded there."""
    replay, won = Replay(recorded()), run.winner(problem)
    measured = replay.measured(problem, "default")
    times = {c: replay.recorded_us(problem, c, final=True) or us for c, us in measured.items()}
    return times[won.candidate] / min(times.values())


@pytest.mark.parametrize(("trial_seconds", "seed"), some([(0.06, 2), (0.05, 1), (0.03, 0)]))
def test_a_quarter_of_a_second_a_problem_is_enough(trial_seconds: float, seed: int) -> None:
    run = short_search(Replay(recorded(), noise_seed=seed), BUDGET_S, trial_seconds)
    assert run.seconds <= BUDGET_S + trial_seconds
    found = [regret(run, problem) for problem in WANTED]
    assert statistics.mean(found) <= 1.05, found
    assert max(found) <= 1.16, found


def test_each_problem_gets_a_candidate_before_any_gets_a_second_one() -> None:
    wanted = [WANTED[place] for place in (5, 9, 2, 7)]
    run = short_search(Replay(recorded()), 2.0, 0.05, wanted)
    ran = [step.command for step in run.steps]
    first = [[p] * 2 for p in wanted]
    assert [c.problem for c in ran[: 2 * len(wanted)]] == [p for pair in first for p in pair], (
        "the library and one candidate each"
    )
    assert len({c.trial for c in ran[: 2 * len(wanted)]}) == 2 * len(wanted)
    assert len(ran) > 2 * len(wanted)
    early = short_search(Replay(recorded()), 0.25, 0.05, wanted)
    assert {step.command.problem for step in early.steps} == set(
        wanted[: len({s.command.problem for s in early.steps})]
    )
    assert is_own(Candidate.of("all_reduce", "lamport", {}))


def test_a_large_first_trial_is_estimated_from_the_largest_one_before() -> None:
    """Not from the very first trial, in which the GPU's libraries are loaded."""
    limits = recorded_limits()
    small, large, larger = (Problem("all_reduce", (numel,), "bfloat16", 4) for numel in (512, 1 << 25, 1 << 26))
    strategy = JobStrategy(job_settings(limits, [small], "default"), {})
    assert strategy.may_begin(small, 0.0)
    strategy.learn_cost(small, 0.5)
    assert not strategy.may_begin(large, 0.4)
    strategy.learn_cost(large, 0.1)
    assert strategy.may_begin(larger, 0.25)
    assert not strategy.may_begin(larger, 0.15)
    assert strategy.may_begin(small, 0.15)
