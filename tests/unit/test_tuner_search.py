"""What a sweep tries, in which order, and what not again: an op of made-up variants on a made-up machine."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from replay import Replay, SearchRun
from replay import run_search as run_replayed
from spec_samples import toy_op, toy_variant

from tunedcomm import kernels, spec
from tunedcomm.db.records import Trial
from tunedcomm.db.store import Database
from tunedcomm.errors import TuningError
from tunedcomm.hardware import Environment, detect
from tunedcomm.space import Choice, Config, PowerOfTwo, Space
from tunedcomm.spec import Candidate, Limits, Problem, get_variant, register_op, register_variant
from tunedcomm.symm.layout import limits_for
from tunedcomm.tuner.gang.protocol import Latency, Settings, TrialResult
from tunedcomm.tuner.gang.supervisor import Supervisor
from tunedcomm.tuner.machine import backend_settings
from tunedcomm.tuner.search.coordinator import Coordinator
from tunedcomm.tuner.search.knowledge import Knowledge
from tunedcomm.tuner.search.spec import SweepSpec, load_variants, problems_of
from tunedcomm.tuner.search.study import Search, default_candidates, interleave, search_space
from tunedcomm.tuner.search.sweep import sweep

OP = "search_op"
LIMITS = Limits("host", 1, False, 64, 1 << 20, 1 << 20, 1 << 20)
HERE = Environment("gpu", 1, 0, 0, "host", 0, False, 1, "", "", "2.9", "", "", "1")
SETTINGS = Settings(backend="host", world_size=2, trials=6)
WIDE = Space({"num_blocks": PowerOfTwo(1, 64), "num_warps": PowerOfTwo(1, 16), "pdl": Choice(False, True)})
LIBRARY, LOOSE = Candidate.of(OP, "library", {}), Candidate.of(OP, "loose", {})


def refuse_large(problem: Problem, config: Config, limits: Limits) -> str | None:
    return "too many blocks" if int(config["num_blocks"]) * 64 > problem.numel else None


@pytest.fixture(autouse=True)
def _registered(monkeypatch: pytest.MonkeyPatch) -> None:
    load_variants(())
    for name in ("_ops", "_variants"):
        monkeypatch.setattr(spec, name, dict(getattr(spec, name)))
    register_op(toy_op(OP))
    register_variant(toy_variant(OP, "library", numerics="library"))
    register_variant(toy_variant(OP, "small", Space({"chunks": Choice(1, 2, 4)})))
    register_variant(toy_variant(OP, "wide", WIDE, infeasible=refuse_large))
    register_variant(toy_variant(OP, "loose", numerics="unordered"))
    register_variant(toy_variant(OP, "absent", infeasible=lambda problem, config, limits: "not here"))


def problem_of(numel: int = 4096) -> Problem:
    return Problem(op=OP, shape=(numel,), dtype="float32", world_size=2)


def wide(num_blocks: int, num_warps: int) -> Candidate:
    return Candidate.of(OP, "wide", {"num_blocks": num_blocks, "num_warps": num_warps, "pdl": False})


def cost_us(candidate: Candidate) -> float:
    """A made-up machine: best at 16 blocks of 4 warps, with pdl."""
    config = candidate.config_dict
    if candidate.variant != "wide":
        return {"library": 20.0, "small": 15.0, "loose": 8.0}[candidate.variant] + len(str(candidate)) * 1e-3
    off = abs(math.log2(int(config["num_blocks"]) / 16)) + abs(math.log2(int(config["num_warps"]) / 4))
    return 5.0 + off - bool(config["pdl"]) * 0.5


def stored(problem: Problem, candidate: Candidate, status: str = "ok") -> Trial:
    return Trial(
        problem=problem,
        environment=HERE,
        variant=candidate.variant,
        numerics=get_variant(OP, candidate.variant).numerics,
        source_hash="v1",
        config=candidate.config_dict,
        status=status,
        latency_p50_us=cost_us(candidate) if status == "ok" else None,
    )


def knowledge_of(*problems: Problem, known: tuple[Trial, ...] = (), retry: bool = False) -> Knowledge:
    return Knowledge(problems, HERE, LIMITS, lambda op, variant: "v1", retry=retry, stored=known)


# One search


def search_of(problem: Problem, **changes: Any) -> Search:
    settings = replace(SETTINGS, **changes)
    return Search(problem, search_space(problem, LIMITS, settings), settings, default_candidates(problem, LIMITS))


def run_search(search: Search, known: Mapping[Candidate, float | None] | None = None) -> list[Candidate]:
    asked, told = [], dict(known or {})
    while (candidate := search.next(told)) is not None:
        asked.append(candidate)
        told[candidate] = cost_us(candidate)
    return asked


def test_small_space_is_searched_whole_with_seeds_first() -> None:
    problem, changes = problem_of(64), {"trials": 50, "variants": ("small", "loose")}
    asked = run_search(search_of(problem, **changes))
    space = search_space(problem, LIMITS, replace(SETTINGS, **changes))
    assert set(asked) == set(space)
    assert len(asked) == len(interleave(space)) == 5
    assert [c.variant for c in asked[:3]] == ["library", "loose", "small"]


def test_large_space_is_sampled_without_repeats_and_found_well_the_same_way_for_a_seed() -> None:
    runs = [run_search(search_of(problem_of(8192), trials=40, seed=seed)) for seed in (0, 0, 2)]
    assert len(runs[0]) == len(set(runs[0])) == 40
    assert min(map(cost_us, runs[0])) <= 5.5  # of 70 wide configs, 3 are as good
    assert runs[0] == runs[1] != runs[2]


def test_settled_candidates_count_and_the_search_goes_on_as_it_would_have() -> None:
    problem = problem_of(8192)
    whole = run_search(search_of(problem, trials=30))
    for cut in (1, 20, 30):
        known = {candidate: cost_us(candidate) for candidate in whole[:cut]}
        assert run_search(search_of(problem, trials=30), known) == whole[cut:]


def test_busy_candidates_count_and_are_not_given_out() -> None:
    search = search_of(problem_of(8192), trials=30)
    busy: list[Candidate] = []
    while (candidate := search.next({}, busy)) is not None:
        busy.append(candidate)
    assert len(busy) == len(set(busy)) == 30
    assert search.next({}, busy[:-1]) == busy[-1]


# What is known


def test_retry_settles_a_failure_only_once_it_was_tried_again() -> None:
    problem = problem_of()
    knowledge = knowledge_of(problem, known=(stored(problem, wide(1, 1), "crashed"),), retry=True)
    assert knowledge.settled(problem) == {}
    knowledge.add(stored(problem, wide(1, 1), "crashed"))
    assert knowledge.settled(problem) == {wide(1, 1): None}


def test_proposals_come_from_the_nearest_shapes_and_are_feasible() -> None:
    near, far, here = problem_of(2048), problem_of(64), problem_of(1024)
    known = (stored(near, wide(32, 4)), stored(near, wide(8, 4)), stored(far, wide(1, 4)))
    proposals = knowledge_of(here, near, far, known=known).proposals(here, 2, (near, far))
    assert proposals == [wide(8, 4), wide(1, 4)]  # 32 blocks are too many for 1024 elements


def test_reach_is_judged_within_what_a_class_promises() -> None:
    problem = problem_of()
    knowledge = knowledge_of(problem, known=tuple(stored(problem, c) for c in (LOOSE, wide(1, 1), LIBRARY)))
    assert knowledge.best_us(problem, "unordered") == cost_us(LOOSE)
    assert knowledge.best_us(problem, "ordered") == cost_us(wide(1, 1))
    assert set(knowledge.finalists([problem], 2)) == {LOOSE, wide(1, 1)}


# A coordinator with one gang


def sweep_of(
    *problems: Problem, seconds_left: float | None = None, trial_seconds: float = 0.0, **changes: Any
) -> SearchRun:
    """By one gang, on a machine that takes `cost_us`."""
    settings = replace(SETTINGS, **changes)
    answers = Replay([stored(p, c) for p in problems for c in search_space(p, LIMITS, replace(settings, trials=10**6))])
    times = {"seconds_left": seconds_left, "trial_seconds": trial_seconds}
    return run_replayed(problems, settings, answers, limits=LIMITS, **times)


def asked(run: SearchRun, problem: Problem, *, final: bool) -> list[Candidate]:
    commands = [step.command for step in run.steps]
    return [c.candidate for c in commands if c.problem == problem and c.final == final and c.candidate]


def test_coordinator_searches_small_to_large_then_runs_finals_everywhere() -> None:
    small, large = problem_of(256), problem_of(4096)
    run = sweep_of(large, small, trials=12)
    assert run.reason == "done"
    commands = [step.command for step in run.steps]
    searches = [c.problem for c in commands if not c.final]
    assert searches == sorted(searches, key=lambda p: p.numel if p else 0)
    assert [asked(run, problem, final=False)[0] for problem in (small, large)] == [LIBRARY] * 2
    # Every winner is measured on every shape on which it can run, and so are the shape's own best and most frugal.
    knowledge = knowledge_of(small, large, known=run.stored)
    winners = set(knowledge.finalists([small, large], 2))
    for problem in (small, large):
        measured = set(asked(run, problem, final=True))
        own = {*knowledge.fastest(problem, 8, "default"), *knowledge.best_per_sm_limit(problem)}
        assert measured == {*knowledge.feasible(problem, winners), *own, LIBRARY}
        assert len(own) > 2
    seen: set[Candidate | None] = set()
    for command in commands:
        assert command.full_check == (command.candidate not in seen)
        seen.add(command.candidate)


def test_finals_begin_with_the_best_of_the_search() -> None:
    """A final outranks what was searched, and a budget may end after one of them."""
    problems = [problem_of(numel) for numel in (256, 1024, 4096, 16384)]
    run = sweep_of(*problems, trials=8)
    knowledge = knowledge_of(*problems, known=run.stored)
    best = [knowledge.fastest(problem, 1, "default") for problem in problems]
    assert len({candidate for (candidate,) in best}) > 1
    assert [asked(run, problem, final=True)[1:2] for problem in problems] == best


def test_budget_is_shared_and_keeps_time_for_finals() -> None:
    problems = tuple(problem_of(n) for n in (256, 1024, 4096, 8192))
    run = sweep_of(*problems, seconds_left=40.0, trial_seconds=1.0, trials=50)
    assert run.reason == "budget"
    searched = [len(asked(run, problem, final=False)) for problem in problems]
    assert min(searched) >= 7
    assert sum(searched) <= 36
    assert asked(run, problems[0], final=True)


def test_gang_in_another_environment_is_refused() -> None:
    coordinator = Coordinator((problem_of(256),), SETTINGS, source_hash=lambda op, variant: "v1")
    coordinator.gang_ready(1, HERE, LIMITS)
    for change, token in (({"gpu": "another"}, "'another'"), ({"torch": "2.8"}, "torch 2.8")):
        with pytest.raises(TuningError, match=f"gang 2 .*{token}"):
            coordinator.gang_ready(2, replace(HERE, **change), LIMITS)


def test_default_outside_of_its_space_is_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    spec._variants[OP, "small"] = replace(get_variant(OP, "small"), default=lambda problem, limits: {"chunks": 3})
    sweep_of(problem_of(256), problem_of(4096), trials=1, finals=False)
    (record,) = caplog.records
    for part in ("search_op.small", "chunks=3", "[1, 2, 4]"):
        assert part in record.message


@pytest.mark.parametrize("is_finished", [True, False])
def test_finished_sweep_starts_no_gang(is_finished: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = replace(backend_settings("host", 2), variants=("host_one_shot",))
    wanted = SweepSpec(op="all_reduce", settings=settings, shapes=((256,), (4096,)))
    coordinator = Coordinator(problems_of(wanted), settings, source_hash=kernels.source_hash_of)
    coordinator.gang_ready(0, detect(None), limits_for(detect(None), 2))
    while coordinator.next(0).kind == "trial":
        latency = Latency(p10_us=4.0, p50_us=4.0, p90_us=4.0, samples=3)
        coordinator.learn(0, TrialResult(status="ok", latency=latency, baseline_us=9.0))
    started: list[object] = []
    monkeypatch.setattr(Supervisor, "run", lambda self, on_known: started.append(self) or "done")
    with Database.open(tmp_path / "tuned.db", create=True) as database:
        trials = [trial for trial, _ in coordinator.unstored]
        database.record(trials if is_finished else trials[:-1])
        outcome = sweep(wanted, database)
    assert (len(started), outcome.reason) == (0 if is_finished else 1, "done")
    assert all(result.best is not None for result in outcome.problems if is_finished)
