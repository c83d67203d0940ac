"""Searches over recorded trials: the answers, the order in which they are asked for, and a resumed search's end."""

from __future__ import annotations

import functools
import random
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest
from replay import Replay, SearchRun, read_recording, run_search

from tunedcomm import kernels
from tunedcomm.db.records import Trial
from tunedcomm.dispatch.communicator import limits_for
from tunedcomm.spec import Candidate, Limits, Problem
from tunedcomm.tuner.gang.protocol import Settings

ROOT = Path(__file__).parents[2]
RECORDING = ROOT / "tests" / "data" / "trials_h200_x4.jsonl.gz"
SETTINGS = Settings(backend="cuda", world_size=4, trials=160, patience=48)
NUMELS = (1 << 15, 1 << 19, 1 << 23)  # 64 KiB, 1 MiB and 16 MiB
NOON = datetime(2026, 1, 1, 12, tzinfo=timezone.utc)


@functools.cache
def recorded() -> tuple[Trial, ...]:
    kernels.discover()
    return tuple(read_recording(RECORDING))


@functools.cache
def limits() -> Limits:
    return limits_for(recorded()[0].environment, 4)


def problem_of(numel: int) -> Problem:
    return Problem("all_reduce", (numel,), "bfloat16", 4)


PROBLEMS = tuple(problem_of(numel) for numel in NUMELS)


Job = tuple[tuple[Problem, ...], Settings]


def job_of(*problems: Problem, **changes: Any) -> Job:
    """A sweep over the variants that there were when the trials were recorded."""
    there = tuple(sorted({record.variant for record in recorded()}))
    return problems or PROBLEMS, replace(SETTINGS, **{"variants": there, **changes})


def search(job: Job, replay: Replay, **options: Any) -> SearchRun:
    return run_search(*job, replay, limits=limits(), **options)


def record(problem: Problem, candidate: Candidate, p50: float | None, **changes: Any) -> Trial:
    values: dict[str, Any] = {
        "status": "ok" if p50 else "crashed",
        "latency_p10_us": p50 and p50 * 0.95,
        "latency_p50_us": p50,
        "latency_p90_us": p50 and p50 * 1.1,
        "samples": 12,
        "created_at": NOON,
        **changes,
    }
    return Trial(
        problem=problem,
        environment=recorded()[0].environment,
        variant=candidate.variant,
        numerics="ordered",
        source_hash="v1",
        config=candidate.config_dict,
        **values,
    )


@pytest.mark.parametrize("options", [{}, {"trials": 40, "patience": 12}], ids=["exhaustive", "sampled"])
def test_same_seed_and_timings_give_the_same_commands_and_choices(options: dict[str, int]) -> None:
    job = job_of(**options)
    shuffled = random.Random(7).sample(recorded(), len(recorded()))
    one, other = (search(job, Replay(rows)) for rows in (recorded(), shuffled))
    assert one.reason == other.reason == "done"
    assert one.steps == other.steps
    assert one.stored == other.stored
    assert [one.winner(problem) for problem in PROBLEMS] == [other.winner(problem) for problem in PROBLEMS]
    assert all(one.winner(problem) for problem in PROBLEMS)


@pytest.mark.parametrize("options", [{}, {"trials": 40, "patience": 12}], ids=["exhaustive", "sampled"])
def test_interrupted_and_resumed_search_ends_with_the_same_table(options: dict[str, int]) -> None:
    replay = Replay(recorded())
    job = job_of(**options)
    whole = search(job, replay)
    count = len(whole.steps)
    for cut in (1, count // 2, count - 2):
        before = search(job, replay, max_trials=cut)
        assert len(before.steps) == cut
        assert before.reason == ("interrupted" if cut < count else "done")
        after = search(job, replay, stored=before.stored)
        assert after.table() == whole.table()
        assert cut + len(after.steps) == count


def test_lost_gangs_are_replaced_and_their_variant_is_dropped() -> None:
    problem = PROBLEMS[0]
    bad = [r for r in recorded() if r.problem == problem and r.variant == "one_shot" and not r.final]
    rows = [r for r in recorded() if r not in bad]
    rows += [replace(r, status="crashed", latency_p50_us=None) for r in bad]
    done = search(job_of(problem), Replay(rows))
    assert done.reason == "done"
    assert done.dropped == {"one_shot"}
    # Each crash costs two gangs: the second one runs the candidate first.
    assert done.num_gangs == 1 + 2 * SETTINGS.failures_per_variant
    lost = [step.command.candidate for step in done.steps if step.result.status == "crashed"]
    assert lost[::2] == lost[1::2]
    assert len(set(lost)) == SETTINGS.failures_per_variant


@pytest.mark.parametrize("gangs", [3])
@pytest.mark.parametrize("options", [{"patience": 0}, {"trials": 40, "patience": 12}], ids=["exhaustive", "sampled"])
def test_gangs_share_the_work_and_do_nothing_twice(gangs: int, options: dict[str, int]) -> None:
    replay = Replay(recorded())
    alone, many = (search(job_of(**options, gangs=n), replay, trial_seconds=1.0) for n in (1, gangs))
    assert alone.seconds == len(alone.steps)
    asked = [(step.command.problem, step.command.candidate, step.command.final) for step in many.steps]
    assert len(asked) == len(set(asked))
    assert many.reason == "done"
    assert all(many.winner(problem) for problem in PROBLEMS)
    # No gang is idle for long: what one has to wait for is the last trials of a search and of the finals.
    assert many.seconds < len(many.steps) / gangs + 2 * len(PROBLEMS)
    if not options["patience"]:
        searched = [{entry[:2] for entry in run.table() if not entry[2]} for run in (alone, many)]
        assert searched[0] == searched[1]
