"""Searches over recorded trials: the answers, the order in which they are asked for, and a resumed search's end."""

from __future__ import annotations

import functools
import gzip
import itertools
import math
import random
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
from replay import Replay, SearchRun, read_recording, run_search, write_recording

from tunedcomm import kernels
from tunedcomm.db.records import Trial
from tunedcomm.dispatch.communicator import limits_for
from tunedcomm.spec import Candidate, Limits, Problem
from tunedcomm.tuner.gang.protocol import Command, Settings
from tunedcomm.tuner.search.study import search_space

ROOT = Path(__file__).parents[2]
RECORDING = ROOT / "tests" / "data" / "trials_h200_x4.jsonl.gz"
SETTINGS = Settings(backend="cuda", world_size=4, trials=160, patience=48)
NUMELS = (1 << 15, 1 << 19, 1 << 23)  # 64 KiB, 1 MiB and 16 MiB
LIBRARY = Candidate.of("all_reduce", "library", {})
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


def command_of(problem: Problem, candidate: Candidate, threshold_us: float = math.inf, **changes: Any) -> Command:
    return Command(
        kind="trial", problem=problem, candidate=candidate, baseline=LIBRARY, threshold_us=threshold_us, **changes
    )


def lamport(num_blocks: int) -> Candidate:
    return Candidate.of("all_reduce", "lamport", {"num_blocks": num_blocks, "num_warps": 2, "launch_pdl": True})


def test_answers_are_pruned_anew_from_the_threshold() -> None:
    problem = PROBLEMS[0]
    replay = Replay(
        [
            record(problem, lamport(8), 5.0, baseline_p50_us=12.0, error=1e-3),
            record(problem, lamport(16), 4.0, status="pruned", samples=3),
            record(problem, LIBRARY, 11.0),
        ]
    )
    good = replay.answer(command_of(problem, lamport(8), 4.0), SETTINGS)
    assert (good.status, good.baseline_us, good.error) == ("ok", 12.0, 1e-3)
    assert good.latency is not None
    assert (good.latency.p10_us, good.latency.p50_us, good.latency.p90_us) == (4.75, 5.0, 5.5)
    assert good.latency.samples == SETTINGS.more_rounds
    slow = replay.answer(command_of(problem, lamport(8), 3.0), SETTINGS)
    assert (slow.status, slow.baseline_us) == ("pruned", None)
    assert slow.latency is not None
    assert slow.latency.samples == SETTINGS.first_rounds
    # Pruned when it was recorded, within reach now: the library's own trial stands in for the one beside it.
    again = replay.answer(command_of(problem, lamport(16)), SETTINGS)
    assert (again.status, again.baseline_us) == ("ok", 11.0)
    # The library is always measured well.
    assert replay.answer(command_of(problem, LIBRARY, 1.0), SETTINGS).status == "ok"


def test_finals_are_never_pruned_and_prefer_what_the_finals_measured() -> None:
    problem = PROBLEMS[0]
    only = [record(problem, lamport(8), 5.0)]
    both = Replay([*only, record(problem, lamport(8), 4.5, final=True)])
    near = both.answer(command_of(problem, lamport(8), 4.0, final=True), SETTINGS)
    far = both.answer(command_of(problem, lamport(8), 1.0, final=True), SETTINGS)
    assert near.latency is not None
    assert far.latency is not None
    assert (near.status, near.latency.p50_us, near.latency.samples) == ("ok", 4.5, SETTINGS.final_rounds)
    assert (far.status, far.latency.p50_us, far.latency.samples) == ("ok", 4.5, SETTINGS.first_rounds)
    alone = Replay(only).answer(command_of(problem, lamport(8), final=True), SETTINGS)
    assert alone.latency is not None
    assert alone.latency.p50_us == 5.0


def test_failures_are_answered_as_recorded_and_the_newest_trial_counts() -> None:
    problem = PROBLEMS[0]
    rows = [
        record(problem, lamport(8), None, status="hung", reason="no answer in 30 s", created_at=NOON),
        record(problem, lamport(8), 5.0, created_at=NOON - timedelta(days=1)),
        record(problem, lamport(16), None, status="incorrect", reason="wrong", error=0.5),
    ]
    for order in itertools.permutations(rows):
        hung = Replay(order).answer(command_of(problem, lamport(8)), SETTINGS)
        assert (hung.status, hung.reason, hung.latency) == ("hung", "no answer in 30 s", None)
        wrong = Replay(order).answer(command_of(problem, lamport(16)), SETTINGS)
        assert (wrong.status, wrong.error) == ("incorrect", 0.5)


def test_candidate_that_was_never_measured_is_infeasible_and_says_so() -> None:
    replay = Replay([record(PROBLEMS[0], lamport(8), 5.0)])
    for problem, candidate in ((PROBLEMS[0], lamport(16)), (PROBLEMS[1], lamport(8))):
        outcome = replay.answer(command_of(problem, candidate), SETTINGS)
        assert (outcome.status, outcome.latency) == ("infeasible", None)
        assert outcome.reason == f"{candidate} was never measured on {problem}"


def test_noise_is_the_same_for_a_seed_and_stays_within_the_recorded_spread() -> None:
    problem = PROBLEMS[0]
    rows = [record(problem, lamport(8), 5.0)]
    medians = []
    for seed in range(20):
        replay = Replay(rows, noise_seed=seed)
        first = replay.answer(command_of(problem, lamport(8)), SETTINGS).latency
        replay.answer(command_of(problem, lamport(16)), SETTINGS)
        assert replay.answer(command_of(problem, lamport(8)), SETTINGS).latency == first
        assert first is not None
        assert 4.75 <= first.p50_us <= 5.5
        medians.append(first.p50_us)
    assert len(set(medians)) > 15
    # The first look is drawn by itself: one right at the edge of reach is pruned by some seeds only.
    edge = command_of(problem, lamport(8), 5.0 / SETTINGS.reach)
    assert {Replay(rows, noise_seed=seed).answer(edge, SETTINGS).status for seed in range(20)} == {"ok", "pruned"}


def test_replay_wants_one_environment() -> None:
    here = record(PROBLEMS[0], lamport(8), 5.0)
    there = replace(here, environment=replace(here.environment, gpu="another"))
    with pytest.raises(ValueError, match="one environment"):
        Replay([here, there])
    assert Replay([here, there], environment=there.environment).environment == there.environment
    with pytest.raises(ValueError, match="got none"):
        Replay([])


def test_recording_reads_back_whatever_the_order(tmp_path: Path) -> None:
    plain, packed, again = (tmp_path / name for name in ("a.jsonl", "b.jsonl.gz", "c.jsonl.gz"))
    rows = [r for r in recorded() if r.problem in PROBLEMS]
    write_recording(plain, rows)
    write_recording(packed, random.Random(1).sample(rows, len(rows)))
    assert gzip.decompress(packed.read_bytes()) == plain.read_bytes()
    assert sorted(map(str, read_recording(packed))) == sorted(map(str, rows))
    write_recording(again, read_recording(packed))
    assert again.read_bytes() == packed.read_bytes()
    plain.write_text('{"some": "other file"}\n', encoding="utf-8")
    with pytest.raises(ValueError, match="no recording"):
        read_recording(plain)


@pytest.mark.parametrize("options", [{}, {"trials": 40, "patience": 12}], ids=["exhaustive", "sampled"])
@pytest.mark.parametrize("noise_seed", [None, 3])
def test_same_seed_and_timings_give_the_same_commands_and_choices(
    options: dict[str, int], noise_seed: int | None
) -> None:
    job = job_of(**options)
    shuffled = random.Random(7).sample(recorded(), len(recorded()))
    one, other = (search(job, Replay(rows, noise_seed=noise_seed)) for rows in (recorded(), shuffled))
    assert one.reason == other.reason == "done"
    assert one.steps == other.steps
    assert one.stored == other.stored
    assert [one.winner(problem) for problem in PROBLEMS] == [other.winner(problem) for problem in PROBLEMS]
    assert all(one.winner(problem) for problem in PROBLEMS)


def test_another_seed_samples_other_candidates() -> None:
    replay = Replay(recorded())
    runs = [search(job_of(PROBLEMS[0], trials=40, seed=seed), replay) for seed in (0, 1)]
    assert runs[0].steps != runs[1].steps


def test_exhaustive_search_finds_the_recorded_best() -> None:
    replay = Replay(recorded())
    done = search(job_of(trials=10**6, patience=0, finals=False), replay)
    for problem in PROBLEMS:
        latencies = replay.measured(problem, "default")
        best = min(latencies.get(candidate, math.inf) for candidate in search_space(problem, limits(), SETTINGS))
        found = done.winner(problem)
        assert found is not None
        assert found.latency_p50_us == best
        assert best < latencies[LIBRARY]


@pytest.mark.parametrize("options", [{}, {"trials": 40, "patience": 12}], ids=["exhaustive", "sampled"])
def test_interrupted_and_resumed_search_ends_with_the_same_table(options: dict[str, int]) -> None:
    replay = Replay(recorded())
    job = job_of(**options)
    whole = search(job, replay)
    count = len(whole.steps)
    for cut in (0, 1, 2, 17, count // 4, count // 3, count // 2, 3 * count // 4, count - 2, count):
        before = search(job, replay, max_trials=cut)
        assert len(before.steps) == cut
        assert before.reason == ("interrupted" if cut < count else "done")
        after = search(job, replay, stored=before.stored)
        assert after.table() == whole.table()
        assert cut + len(after.steps) == count


def test_search_cut_to_pieces_does_nothing_twice() -> None:
    replay = Replay(recorded())
    job = job_of(PROBLEMS[0], trials=40, patience=0)
    run = search(job, replay, max_trials=0)
    asked = []
    while run.reason == "interrupted":
        run = search(job, replay, stored=run.stored, max_trials=5)
        asked += [(step.command.candidate, step.command.final) for step in run.steps]
    assert len(asked) == len(set(asked))
    assert sum(not final for _, final in asked) == 40


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


def test_budget_is_spent_by_the_trials() -> None:
    done = search(job_of(), Replay(recorded()), seconds_left=20.0, trial_seconds=1.0)
    assert done.reason == "budget"
    searches = [step for step in done.steps if not step.command.final]
    assert 15 <= len(searches) <= 18
    assert len(done.steps) == 20
    assert all(done.winner(problem) for problem in PROBLEMS)


@pytest.mark.parametrize("gangs", [2, 3, 5])
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


def test_lost_gang_disturbs_no_other() -> None:
    problem = PROBLEMS[0]
    bad = [r for r in recorded() if r.problem == problem and r.variant == "one_shot" and not r.final]
    rows = [r for r in recorded() if r not in bad]
    rows += [replace(r, status="crashed", latency_p50_us=None) for r in bad]
    done = search(job_of(gangs=2, patience=0), Replay(rows), trial_seconds=1.0)
    asked = [(step.command.problem, step.command.candidate, step.command.final) for step in done.steps]
    crashed = [step.command.candidate for step in done.steps if step.result.status == "crashed"]
    assert done.reason == "done"
    assert len(asked) - len(set(asked)) == len(crashed) - len(set(crashed))
    assert done.num_gangs == 2 + len(crashed)
    # One more may be out at the other gang when the variant is dropped.
    assert SETTINGS.failures_per_variant <= len(set(crashed)) <= SETTINGS.failures_per_variant + 1
