"""Study and knowledge: what is tried, in which order, and what not again. No process is started."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from search_samples import HERE, LIMITS, OP, Job, cost_us, job_of, knowledge_of, problem_of, registered, stored, wide

from tunedcomm import spec
from tunedcomm.db.store import Database
from tunedcomm.hardware import detect
from tunedcomm.spec import Candidate, Problem, get_variant
from tunedcomm.symm.layout import limits_for
from tunedcomm.tuner.gang.protocol import Latency, TrialResult
from tunedcomm.tuner.gang.supervisor import Supervisor
from tunedcomm.tuner.search.coordinator import Coordinator
from tunedcomm.tuner.search.study import Search, default_candidates, interleave, search_space
from tunedcomm.tuner.search.sweep import SweepSpec, hash_if_known, load_variants, resolve, sweep


@pytest.fixture(autouse=True)
def _registered() -> Iterator[None]:
    with registered():
        yield


def run_search(
    search: Search,
    cost: Callable[[Candidate], float | None] = cost_us,
    known: Mapping[Candidate, float | None] | None = None,
) -> list[Candidate]:
    asked, told = [], dict(known or {})
    while (candidate := search.next(told)) is not None:
        asked.append(candidate)
        told[candidate] = cost(candidate)
    return asked


def search_of(job: Job, problem: Problem) -> Search:
    feasible = search_space(problem, LIMITS, job.settings)
    return Search(problem, feasible, job.settings, default_candidates(problem, LIMITS))


def test_small_space_is_searched_whole_with_seeds_first() -> None:
    problem = problem_of(64)
    job = job_of(problem, trials=50, variants=("small", "loose"))
    asked = run_search(search_of(job, problem))
    assert set(asked) == set(search_space(problem, LIMITS, job.settings))
    assert len(asked) == 5
    assert [c.variant for c in asked[:3]] == ["library", "loose", "small"]


def test_large_space_is_sampled_without_repeats_and_found_well() -> None:
    problem = problem_of(8192)
    asked = run_search(search_of(job_of(problem, trials=40), problem))
    assert len(asked) == len(set(asked)) == 40
    assert min(map(cost_us, asked)) <= 5.5  # of 70 wide configs, 3 are as good


def test_same_seed_and_latencies_give_the_same_candidates() -> None:
    problem = problem_of(8192)
    runs = [run_search(search_of(job_of(problem, trials=30, seed=seed), problem)) for seed in (1, 1, 2)]
    assert runs[0] == runs[1] != runs[2]


@pytest.mark.parametrize("cut", [1, 6, 20, 29, 30])
def test_settled_candidates_count_and_the_search_goes_on_as_it_would_have(cut: int) -> None:
    problem = problem_of(8192)
    job = job_of(problem, trials=30)
    whole = run_search(search_of(job, problem))
    known = {candidate: cost_us(candidate) for candidate in whole[:cut]}
    assert run_search(search_of(job, problem), known=known) == whole[cut:]


def test_busy_candidates_count_and_are_not_given_out() -> None:
    problem = problem_of(8192)
    search = search_of(job_of(problem, trials=30), problem)
    busy: list[Candidate] = []
    while (candidate := search.next({}, busy)) is not None:
        busy.append(candidate)
    assert len(busy) == len(set(busy)) == 30
    assert search.next({}, busy[:-1]) == busy[-1]


def test_interleave_takes_one_of_each_variant_in_turn() -> None:
    job = job_of(problem_of())
    turns = interleave(search_space(problem_of(), LIMITS, job.settings))
    assert {c.variant for c in turns[:4]} == {"library", "small", "wide", "loose"}
    assert len(turns) == len(search_space(problem_of(), LIMITS, job.settings))


def test_retry_settles_a_failure_only_once_it_was_tried_again() -> None:
    problem = problem_of()
    job = job_of(problem, known=(stored(problem, wide(1, 1), "crashed"),), retry=True)
    knowledge = knowledge_of(job)
    assert knowledge.settled(problem) == {}
    knowledge.add(stored(problem, wide(1, 1), "crashed"))
    assert knowledge.settled(problem) == {wide(1, 1): None}


def test_proposals_come_from_the_nearest_shapes_and_are_feasible() -> None:
    near, far, here = problem_of(2048), problem_of(64), problem_of(1024)
    known = (stored(near, wide(32, 4)), stored(near, wide(8, 4)), stored(far, wide(1, 4)))
    proposals = knowledge_of(job_of(here, near, far, known=known)).proposals(here, 2, (near, far))
    assert proposals == [wide(8, 4), wide(1, 4)]  # 32 blocks are too many for 1024 elements


def test_reach_is_judged_within_what_a_class_promises() -> None:
    problem = problem_of()
    loose = Candidate.of(OP, "loose", {})
    library = Candidate.of(OP, "library", {})
    job = job_of(problem, known=(stored(problem, loose), stored(problem, wide(1, 1)), stored(problem, library)))
    knowledge = knowledge_of(job)
    assert knowledge.best_us(problem, "unordered") == cost_us(loose)
    assert knowledge.best_us(problem, "ordered") == cost_us(wide(1, 1))
    assert set(knowledge.finalists([problem], 2)) == {loose, wide(1, 1)}


def begin_searches(*problems: Problem) -> None:
    job = job_of(*problems, trials=1, finals=False)
    coordinator = Coordinator(problems, job.settings, source_hash=lambda op, variant: "v1")
    coordinator.gang_ready(0, HERE, LIMITS)
    while coordinator.next(0).kind == "trial":
        coordinator.learn(0, TrialResult(status="compile_error", reason="planted"))


def test_default_outside_of_its_space_is_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    stray = replace(get_variant(OP, "small"), default=lambda problem, limits: {"chunks": 3})
    spec._variants[OP, "small"] = stray
    begin_searches(problem_of(256), problem_of(4096))
    (record,) = caplog.records
    for part in ("search_op.small", "chunks=3", "[1, 2, 4]"):
        assert part in record.message


@pytest.mark.parametrize("is_finished", [True, False])
def test_finished_sweep_starts_no_gang(is_finished: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = SweepSpec(op="all_reduce", shapes=((256,), (4096,)), backend="host", variants=("host_one_shot",))
    load_variants(())
    problems, settings = resolve(wanted)
    coordinator = Coordinator(problems, settings, source_hash=hash_if_known)
    coordinator.gang_ready(0, detect(None), limits_for(detect(None), 2))
    while coordinator.next(0).kind == "trial":
        latency = Latency(p10_us=4.0, p50_us=4.0, p90_us=4.0, samples=3)
        coordinator.learn(0, TrialResult(status="ok", latency=latency, baseline_us=9.0))
    started: list[object] = []
    monkeypatch.setattr(Supervisor, "run", lambda self: started.append(self) or "done")
    with Database.open(tmp_path / "tuned.db", create=True) as database:
        trials = [trial for trial, _ in coordinator.unstored]
        database.record(trials if is_finished else trials[:-1])
        outcome = sweep(wanted, database)
    assert (len(started), outcome.reason) == (0 if is_finished else 1, "done")
    assert all(result.best is not None for result in outcome.problems if is_finished)
