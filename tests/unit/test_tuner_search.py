"""Study, knowledge and coordinator: what is tried, in which order, and what not again. No process is started."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest

from tunedcomm import spec
from tunedcomm.errors import TuningError
from tunedcomm.hardware import Environment
from tunedcomm.space import Choice, Config, PowerOfTwo, Space
from tunedcomm.spec import Candidate, Limits, OpSpec, Problem, Variant, register_op, register_variant
from tunedcomm.tuner.commands import Command, Latency, Outcome, Row
from tunedcomm.tuner.coordinator import Coordinator
from tunedcomm.tuner.job import Settings, StoredTrial
from tunedcomm.tuner.knowledge import Knowledge
from tunedcomm.tuner.study import Search, default_candidates, families, interleave, search_space

OP = "search_op"
LIMITS = Limits("host", 1, False, 64, 1 << 20, 1 << 20, 1 << 20)
HERE = Environment("gpu", 1, 0, 0, "host", 0, False, 1, "", "", "2.9", "", "", "1")
SETTINGS = Settings(backend="host", world_size=2, trials=6)
WIDE = Space({"num_blocks": PowerOfTwo(1, 64), "num_warps": PowerOfTwo(1, 16), "pdl": Choice(False, True)})
SMALL = Space({"chunks": Choice(1, 2, 4)})


def refuse_large(problem: Problem, config: Config, limits: Limits) -> str | None:
    return "too many blocks" if int(config["num_blocks"]) * 64 > problem.numel else None


def never(problem: Problem, config: Config, limits: Limits) -> str | None:
    return "not here"


def may(problem: Problem, config: Config, limits: Limits) -> str | None:
    return None


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    def unused(*_: Any) -> Any:
        raise AssertionError("no tensor is needed to plan a search")

    register_op(
        OpSpec(
            name=OP,
            summary="",
            reductions=("sum",),
            dtypes=("float32",),
            shape_help="",
            rank_of_shape=1,
            make_inputs=unused,
            make_outputs=unused,
            reference=unused,
            tolerance={},
            message_bytes=lambda problem: problem.nbytes,
            busbw_factor=None,
            default_shapes=lambda backend, itemsize: [(256,), (4096,)],
        )
    )
    spaces: list[tuple[str, Space, spec.Numerics, Callable[[Problem, Config, Limits], str | None]]] = [
        ("library", Space(), "library", may),
        ("small", SMALL, "ordered", may),
        ("wide", WIDE, "ordered", refuse_large),
        ("loose", Space(), "unordered", may),
        ("absent", Space(), "ordered", never),
    ]
    for name, space, numerics, infeasible in spaces:
        register_variant(
            Variant(
                op=OP,
                name=name,
                numerics=numerics,
                summary="",
                space=space,
                infeasible=infeasible,
                default=lambda problem, limits, space=space: next(space.enumerate()),  # type: ignore[misc]
                bind=unused,
                num_blocks=lambda problem, config: int(config.get("num_blocks", 1)),
            )
        )
    yield
    spec._ops.pop(OP)
    for key in [key for key in spec._variants if key[0] == OP]:
        spec._variants.pop(key)


def problem_of(numel: int = 4096, **changes: Any) -> Problem:
    return Problem(op=OP, shape=(numel,), dtype="float32", world_size=2, **changes)


def wide(num_blocks: int, num_warps: int, *, pdl: bool = False) -> Candidate:
    return Candidate.of(OP, "wide", {"num_blocks": num_blocks, "num_warps": num_warps, "pdl": pdl})


def cost_us(candidate: Candidate) -> float:
    """A made-up machine: best at wide(16, 4, pdl)."""
    config = candidate.config_dict
    if candidate.variant != "wide":
        return {"library": 20.0, "small": 15.0, "loose": 8.0}[candidate.variant] + len(str(candidate)) * 1e-3
    off = abs(math.log2(int(config["num_blocks"]) / 16)) + abs(math.log2(int(config["num_warps"]) / 4))
    return 5.0 + off - bool(config["pdl"]) * 0.5


def stored(problem: Problem, candidate: Candidate, status: str = "ok", **changes: Any) -> StoredTrial:
    values: dict[str, Any] = {
        "source_hash": "v1",
        "environment": HERE.digest,
        "latency_us": cost_us(candidate) if status in ("ok", "pruned") else None,
    }
    return StoredTrial(problem=problem, candidate=candidate, status=status, **{**values, **changes})


@dataclass(frozen=True)
class Job:
    """What a coordinator is made of."""

    problems: tuple[Problem, ...]
    settings: Settings
    stored: tuple[StoredTrial, ...] = ()
    environments: tuple[Environment, ...] = (HERE,)
    seconds_left: float | None = None

    def known(self) -> dict[str, Any]:
        return {"stored": self.stored, "environments": {here.digest: here for here in self.environments}}


def job_of(*problems: Problem, known: tuple[StoredTrial, ...] = (), **changes: Any) -> Job:
    return Job(problems, replace(SETTINGS, **changes), known)


def knowledge_of(job: Job) -> Knowledge:
    retry = job.settings.retry
    return Knowledge(job.problems, HERE, LIMITS, lambda op, variant: "v1", retry=retry, **job.known())


def run_search(search: Search, cost: Callable[[Candidate], float | None] = cost_us) -> list[Candidate]:
    asked = []
    while (candidate := search.ask()) is not None:
        asked.append(candidate)
        search.tell(candidate, cost(candidate))
    return asked


def search_of(job: Job, problem: Problem, **known: Any) -> Search:
    feasible = search_space(problem, LIMITS, job.settings)
    seeds = [c for c in default_candidates(problem, LIMITS) if c in feasible]
    return Search(problem, feasible, job.settings, seeds=seeds, **known)


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


def test_failed_candidates_do_not_end_a_search() -> None:
    problem = problem_of(8192)
    asked = run_search(search_of(job_of(problem, trials=30), problem), lambda c: None if c.variant == "wide" else 9.0)
    assert len(asked) == len(set(asked)) == 30


def test_patience_ends_a_search_whose_best_stands() -> None:
    problem = problem_of(8192)
    asked = run_search(search_of(job_of(problem, trials=70, patience=8), problem), lambda candidate: 7.0)
    assert 8 <= len(asked) < 20


@pytest.mark.parametrize("cut", [1, 6, 20, 29, 30])
def test_settled_candidates_count_and_the_search_goes_on_as_it_would_have(cut: int) -> None:
    problem = problem_of(8192)
    job = job_of(problem, trials=30)
    whole = run_search(search_of(job, problem))
    known = {candidate: cost_us(candidate) for candidate in whole[:cut]}
    search = search_of(job, problem, settled=known)
    assert run_search(search) == whole[cut:]


def test_interleave_takes_one_of_each_variant_in_turn() -> None:
    job = job_of(problem_of())
    turns = interleave(search_space(problem_of(), LIMITS, job.settings))
    assert {c.variant for c in turns[:4]} == {"library", "small", "wide", "loose"}
    assert len(turns) == len(search_space(problem_of(), LIMITS, job.settings))


def test_only_current_rows_of_this_environment_are_settled() -> None:
    problem = problem_of()
    other = replace(HERE, torch="2.8")
    known = (
        stored(problem, wide(1, 1)),
        stored(problem, wide(2, 1), source_hash="v0"),
        stored(problem, wide(4, 1), environment=other.digest),
        stored(problem, wide(8, 1), "hung"),
    )
    job = replace(job_of(problem, known=known), environments=(HERE, other))
    assert knowledge_of(job).settled(problem) == {wide(1, 1): cost_us(wide(1, 1)), wide(8, 1): None}
    # What other software measured, or an older kernel, is worth trying first.
    assert set(knowledge_of(job).proposals(problem, 3, ())) == {wide(2, 1), wide(4, 1)}


def test_other_hardware_proposes_nothing() -> None:
    problem = problem_of()
    other = replace(HERE, gpu="another")
    known = (stored(problem, wide(4, 1), environment=other.digest),)
    job = replace(job_of(problem, known=known), environments=(other,))
    assert knowledge_of(job).proposals(problem, 3, ()) == []


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


def test_the_most_frugal_are_the_fastest_of_those_that_take_few_sms() -> None:
    problem = problem_of(4096)
    known = [stored(problem, wide(blocks, 4)) for blocks in (1, 2, 8, 32, 64)]
    known += [stored(problem, wide(16, 4), "pruned"), stored(problem, wide(4, 4), "incorrect")]
    frugal = knowledge_of(job_of(problem, known=tuple(known))).frugal(problem)
    assert wide(4, 4) not in frugal
    assert wide(64, 4) not in frugal, "slower than with 16"
    for limit in (1, 2, 4, 8, 16, 32, 64):
        ran = [wide(b, 4) for b in (1, 2, 8, 16, 32, 64) if b <= limit]
        assert min(ran, key=lambda c: (cost_us(c), str(c))) in frugal, limit


class Machine:
    """One gang that answers commands from `cost_us`, and keeps what was asked and stored."""

    def __init__(self, job: Job, seconds_a_trial: float = 0.0) -> None:
        self.now, self.seconds_a_trial = 0.0, seconds_a_trial
        self.rows: list[Row] = []
        self.commands: list[Command] = []
        self.coordinator = Coordinator(
            job.problems,
            job.settings,
            source_hash=lambda op, variant: "v1",
            on_row=self.rows.append,
            clock=lambda: self.now,
            seconds_left=job.seconds_left,
            **job.known(),
        )
        self.coordinator.gang_ready(0, HERE, LIMITS)

    def answer(self, command: Command) -> Outcome:
        assert command.candidate is not None
        us = cost_us(command.candidate)
        pruned = us > 1.3 * command.threshold_us and not command.final and not command.is_library
        latency = Latency(p10_us=us, p50_us=us, p90_us=us, samples=3)
        return Outcome(status="pruned" if pruned else "ok", latency=latency, baseline_us=20.0)

    def run(self) -> str:
        while (command := self.coordinator.next(0)).kind == "trial":
            self.commands.append(command)
            self.now += self.seconds_a_trial
            self.coordinator.learn(0, self.answer(command))
        assert command.kind == "end"
        return command.reason

    def known(self) -> tuple[StoredTrial, ...]:
        return tuple(row.steering(HERE.digest) for row in self.rows)

    def asked(self, problem: Problem, *, final: bool) -> list[Candidate]:
        return [c.candidate for c in self.commands if c.problem == problem and c.final == final and c.candidate]


def test_coordinator_searches_small_to_large_then_runs_finals_everywhere() -> None:
    small, large = problem_of(256), problem_of(4096)
    machine = Machine(job_of(large, small, trials=12))
    assert machine.run() == "done"
    searches = [c.problem for c in machine.commands if not c.final]
    assert searches == sorted(searches, key=lambda p: p.numel if p else 0)
    finals = [set(machine.asked(problem, final=True)) for problem in (small, large)]
    library = Candidate.of(OP, "library", {})
    assert library in finals[0] & finals[1]
    # Every winner is measured on every shape on which it can run, and so are the shape's own best and most frugal.
    knowledge = knowledge_of(job_of(small, large, known=machine.known()))
    winners = set(knowledge.finalists([small, large], 2))
    for problem, measured in zip((small, large), finals, strict=True):
        own = {*knowledge.winners(problem, 8, "default"), *knowledge.frugal(problem)}
        assert measured - {library} == set(knowledge.feasible(problem, winners)) | own
        assert len(own) > 2


def test_coordinator_starts_every_search_with_the_library_and_checks_fully_once() -> None:
    problems = (problem_of(256), problem_of(4096))
    machine = Machine(job_of(*problems, trials=12))
    machine.run()
    for problem in problems:
        assert machine.asked(problem, final=False)[0] == Candidate.of(OP, "library", {})
    seen: set[Candidate] = set()
    for command in machine.commands:
        assert command.candidate is not None
        assert command.full_check == (command.candidate not in seen)
        seen.add(command.candidate)


def test_coordinator_that_ran_through_has_nothing_left_to_do() -> None:
    job = job_of(problem_of(256), problem_of(4096), trials=12)
    first = Machine(job)
    first.run()
    second = Machine(replace(job, stored=first.known()))
    assert second.run() == "done"
    assert second.commands == []


def test_variant_without_feasible_config_is_reported_once_with_its_reason() -> None:
    machine = Machine(job_of(problem_of(256), trials=3))
    machine.run()
    rows = [row for row in machine.rows if row.outcome.status == "infeasible"]
    assert [(row.candidate.variant, row.outcome.reason) for row in rows] == [("absent", "not here")]


def test_budget_is_shared_and_keeps_time_for_finals() -> None:
    problems = tuple(problem_of(n) for n in (256, 1024, 4096, 8192))
    machine = Machine(replace(job_of(*problems, trials=50), seconds_left=40.0), seconds_a_trial=1.0)
    assert machine.run() == "budget"
    searched = [len(machine.asked(problem, final=False)) for problem in problems]
    assert min(searched) >= 7
    assert sum(searched) <= 36
    assert machine.asked(problems[0], final=True)


def test_budget_that_is_gone_still_measures_the_library_once_a_problem() -> None:
    problems = (problem_of(256), problem_of(4096))
    machine = Machine(replace(job_of(*problems), seconds_left=0.0), seconds_a_trial=1.0)
    assert machine.run() == "budget"
    assert [c.candidate for c in machine.commands] == [Candidate.of(OP, "library", {})] * 2


def test_dropped_variants_are_left_alone() -> None:
    class Crashing(Machine):
        def answer(self, command: Command) -> Outcome:
            assert command.candidate is not None
            if command.candidate.variant == "wide":
                return Outcome(status="crashed", reason="planted")
            return super().answer(command)

    machine = Crashing(job_of(problem_of(256), trials=30))
    machine.run()
    assert machine.coordinator.dropped == {"wide"}
    tried = [c.candidate.variant for c in machine.commands if c.candidate and not c.final]
    assert tried.count("wide") == SETTINGS.failures_per_variant
    assert set(tried) == {"library", "small", "loose", "wide"}
    # Everything else that can run was tried all the same.
    assert len(tried) == SETTINGS.failures_per_variant + 5


def test_families_keep_modes_apart() -> None:
    graph, eager = problem_of(64), problem_of(64, mode="eager")
    assert families((problem_of(128), eager, graph)) == [[graph, problem_of(128)], [eager]]


def test_gang_in_another_environment_is_refused() -> None:
    machine = Machine(job_of(problem_of(256)))
    machine.coordinator.gang_ready(1, HERE, LIMITS)
    with pytest.raises(TuningError, match=r"gang 2 runs in another environment .*gpu is 'gpu' here and 'another'"):
        machine.coordinator.gang_ready(2, replace(HERE, gpu="another"), LIMITS)
    with pytest.raises(TuningError, match=r"gang 2 .*torch 2.8"):
        machine.coordinator.gang_ready(2, replace(HERE, torch="2.8"), LIMITS)
