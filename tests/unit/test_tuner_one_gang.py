"""A coordinator with one gang: the order of searches and finals, budgets, what is dropped. No process is started."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
from search_samples import HERE, LIMITS, OP, SETTINGS, Job, cost_us, job_of, knowledge_of, problem_of, registered

from tunedcomm.db.records import Trial
from tunedcomm.errors import TuningError
from tunedcomm.spec import Candidate, Problem
from tunedcomm.tuner.gang.protocol import Command, Latency, TrialResult
from tunedcomm.tuner.search.coordinator import Coordinator


@pytest.fixture(autouse=True)
def _registered() -> Iterator[None]:
    with registered():
        yield


class Machine:
    """One gang that answers commands from `cost_us`, and keeps what was asked and stored."""

    def __init__(self, job: Job, seconds_a_trial: float = 0.0) -> None:
        self.now, self.seconds_a_trial = 0.0, seconds_a_trial
        self.commands: list[Command] = []
        self.coordinator = Coordinator(
            job.problems,
            job.settings,
            source_hash=lambda op, variant: "v1",
            clock=lambda: self.now,
            seconds_left=job.seconds_left,
            **job.known(),
        )
        self.coordinator.gang_ready(0, HERE, LIMITS)

    def answer(self, command: Command) -> TrialResult:
        assert command.candidate is not None
        us = cost_us(command.candidate)
        pruned = us > 1.3 * command.threshold_us and not command.final and command.candidate.variant != "library"
        latency = Latency(p10_us=us, p50_us=us, p90_us=us, samples=3)
        return TrialResult(status="pruned" if pruned else "ok", latency=latency, baseline_us=20.0)

    def run(self) -> str:
        while (command := self.coordinator.next(0)).kind == "trial":
            self.commands.append(command)
            self.now += self.seconds_a_trial
            self.coordinator.learn(0, self.answer(command))
        assert command.kind == "end"
        return command.reason

    def known(self) -> tuple[Trial, ...]:
        return tuple(trial for trial, _ in self.coordinator.unstored)

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
        own = {*knowledge.winners(problem, 8, "default"), *knowledge.best_per_sm_limit(problem)}
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


def test_budget_is_shared_and_keeps_time_for_finals() -> None:
    problems = tuple(problem_of(n) for n in (256, 1024, 4096, 8192))
    machine = Machine(replace(job_of(*problems, trials=50), seconds_left=40.0), seconds_a_trial=1.0)
    assert machine.run() == "budget"
    searched = [len(machine.asked(problem, final=False)) for problem in problems]
    assert min(searched) >= 7
    assert sum(searched) <= 36
    assert machine.asked(problems[0], final=True)


def test_dropped_variants_are_left_alone() -> None:
    class Crashing(Machine):
        def answer(self, command: Command) -> TrialResult:
            assert command.candidate is not None
            if command.candidate.variant == "wide":
                return TrialResult(status="crashed", reason="planted")
            return super().answer(command)

    machine = Crashing(job_of(problem_of(256), trials=30))
    machine.run()
    assert machine.coordinator.dropped == {"wide"}
    tried = [c.candidate.variant for c in machine.commands if c.candidate and not c.final]
    assert tried.count("wide") == 2 * SETTINGS.failures_per_variant  # each is tried again before it is blamed
    assert set(tried) == {"library", "small", "loose", "wide"}
    # Everything else that can run was tried all the same.
    assert len(tried) == 2 * SETTINGS.failures_per_variant + 5


def test_gang_in_another_environment_is_refused() -> None:
    machine = Machine(job_of(problem_of(256)))
    machine.coordinator.gang_ready(1, HERE, LIMITS)
    with pytest.raises(TuningError, match=r"gang 2 runs in another environment .*gpu is 'gpu' here and 'another'"):
        machine.coordinator.gang_ready(2, replace(HERE, gpu="another"), LIMITS)
    with pytest.raises(TuningError, match=r"gang 2 .*torch 2.8"):
        machine.coordinator.gang_ready(2, replace(HERE, torch="2.8"), LIMITS)
