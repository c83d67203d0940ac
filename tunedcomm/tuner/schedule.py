"""The order of a gang's work, decided on rank 0: searches family by family, then each family's finals.

No tensor and no process group in here: the schedule yields commands and is sent their outcomes, so that recorded
outcomes can stand in for a machine.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Literal, TypeAlias

from tunedcomm.spec import Candidate, Limits, Problem, candidates, get_op, get_variant, variants
from tunedcomm.tuner.job import FAILED, Job, StoredTrial
from tunedcomm.tuner.knowledge import Knowledge
from tunedcomm.tuner.study import Search, default_candidates

__all__ = ["Command", "Latency", "Outcome", "Schedule", "families", "search_space"]

# Share of a budget that searches may use; the rest is for the finals, without which nothing is known between shapes.
_SEARCH_SHARE = 0.85
# Proposals taken from each neighbour.
_PROPOSALS = 3
_FINALISTS_PER_SHAPE = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Latency:
    """Microseconds of the slowest rank: percentiles over `samples` rounds."""

    p10_us: float
    p50_us: float
    p90_us: float
    samples: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """What every rank does next.

    Attributes:
        kind: run a trial, or end.
        problem, candidate: of the trial.
        baseline: the library's candidate, measured interleaved with it; None where the library cannot run.
        threshold_us: latency of the best rival so far; candidates out of its reach get fewer samples.
        full_check: check thoroughly, odd sizes included.
        final: measure as in the finals.
        reason: why it ends.
    """

    kind: Literal["trial", "end"]
    problem: Problem | None = None
    candidate: Candidate | None = None
    baseline: Candidate | None = None
    threshold_us: float = math.inf
    full_check: bool = True
    final: bool = False
    reason: str = ""

    @property
    def is_library(self) -> bool:
        """True for the baseline itself, which is always measured well."""
        return self.candidate is not None and get_variant(self.candidate.op, self.candidate.variant).is_library


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a trial ended; the same on every rank."""

    status: str
    reason: str = ""
    latency: Latency | None = None
    baseline_us: float | None = None
    error: float | None = None


Work: TypeAlias = Generator[Command, Outcome, None]


def families(problems: tuple[Problem, ...]) -> list[list[Problem]]:
    """Problems by family, families in order of appearance, each from small to large messages."""
    grouped: dict[Problem, list[Problem]] = {}
    for problem in problems:
        grouped.setdefault(problem.family, []).append(problem)
    return [sorted(group, key=lambda p: (get_op(p.op).message_bytes(p), p.shape)) for group in grouped.values()]


def search_space(problem: Problem, limits: Limits, job: Job) -> list[Candidate]:
    """Every feasible candidate that the job's settings leave in."""
    wanted = {*job.settings.variants, "library"} if job.settings.variants else None
    return [
        candidate
        for candidate in candidates(problem, limits, job.settings.policy)
        if candidate.variant not in job.dropped and (wanted is None or candidate.variant in wanted)
    ]


class Schedule:
    """Yields a gang's commands.

    Args:
        job: what to do.
        knowledge: what is known; grows with every outcome.
        limits: of the gang.
        source_hash: (op, variant) to the hash of its kernels.
        environment: digest of the gang's environment.
        report: `(event, data)` for the supervisor.
        clock: seconds, for the budget.
    """

    def __init__(
        self,
        job: Job,
        knowledge: Knowledge,
        limits: Limits,
        *,
        source_hash: Callable[[str, str], str],
        environment: str,
        report: Callable[[str, dict[str, object]], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._job = job
        self._knowledge = knowledge
        self._limits = limits
        self._source_hash = source_hash
        self._environment = environment
        self._report = report
        self._clock = clock
        self._begin = clock()
        self._searched: list[Problem] = []

    def commands(self) -> Work:
        """Every command in turn; send each outcome back. The last command is `end`."""
        spent = "done"
        for family in families(self._job.problems):
            yield from self._search_family(family)
            if self._job.settings.finals:
                yield from self._finals(family)
            if self._left() <= 0:
                spent = "budget"
        yield Command(kind="end", reason=spent)

    def _left(self, share: float = 1.0) -> float:
        """Seconds left of a share of the budget."""
        if self._job.seconds_left is None:
            return math.inf
        return self._begin + self._job.seconds_left * share - self._clock()

    def _search_family(self, family: list[Problem]) -> Work:
        problems = [problem for group in families(self._job.problems) for problem in group]
        for problem in family:
            # An even share of what is left, so that the last problem is searched as well as the first.
            remaining = len(problems) - problems.index(problem)
            until = self._clock() + self._left(_SEARCH_SHARE) / remaining
            yield from self._search(problem, until)

    def _search(self, problem: Problem, until: float) -> Work:
        self._note_infeasible(problem)
        feasible = search_space(problem, self._limits, self._job)
        settled = self._knowledge.settled(problem)
        allowed = set(feasible)
        seeds = [
            *default_candidates(problem, self._limits)[:1],
            *self._knowledge.proposals(problem, _PROPOSALS, self._searched),
            *default_candidates(problem, self._limits),
        ]
        search = Search(
            problem,
            feasible,
            self._job.settings,
            seeds=[seed for seed in seeds if seed in allowed],
            settled={c: us for c, us in settled.items() if c in allowed},
        )
        self._report("problem", {"problem": problem.to_dict(), "trials": search.planned})
        # The library is asked for first and whatever the clock says: no problem is left without it.
        must = bool(feasible) and feasible[0] not in settled
        while must or self._clock() < until:
            candidate = search.ask()
            if candidate is None:
                break
            must = False
            outcome = yield self._trial(problem, candidate)
            self._learn(problem, candidate, outcome)
            search.tell(candidate, outcome.latency.p50_us if outcome.latency else None)
        self._searched.append(problem)
        self._report("done", {"problem": problem.to_dict()})

    def _finals(self, family: list[Problem]) -> Work:
        finalists = self._knowledge.finalists(family, _FINALISTS_PER_SHAPE)
        for problem in family:
            library = default_candidates(problem, self._limits)[:1]
            for candidate in self._knowledge.feasible(problem, [*library, *finalists]):
                if self._left() <= 0:
                    return
                dropped = candidate.variant in self._job.dropped
                if not dropped and self._knowledge.wants_final(problem, candidate):
                    outcome = yield self._trial(problem, candidate, final=True)
                    self._learn(problem, candidate, outcome, final=True)

    def _trial(self, problem: Problem, candidate: Candidate, *, final: bool = False) -> Command:
        library = default_candidates(problem, self._limits)[0]
        works = self._knowledge.status(problem, library) not in FAILED and library.variant not in self._job.dropped
        return Command(
            kind="trial",
            problem=problem,
            candidate=candidate,
            baseline=library if works else None,
            threshold_us=self._knowledge.best_us(problem, get_variant(problem.op, candidate.variant).numerics),
            full_check=not self._knowledge.checked(problem, candidate),
            final=final,
        )

    def _learn(self, problem: Problem, candidate: Candidate, outcome: Outcome, *, final: bool = False) -> None:
        latency_us = outcome.latency.p50_us if outcome.latency else None
        source_hash = self._source_hash(candidate.op, candidate.variant)
        self._knowledge.add(
            StoredTrial(
                problem=problem,
                candidate=candidate,
                status=outcome.status,
                source_hash=source_hash,
                environment=self._environment,
                latency_us=latency_us,
                final=final and outcome.status == "ok",
            )
        )
        self._report("result", result_event(problem, candidate, outcome, source_hash, final=final))

    def _note_infeasible(self, problem: Problem) -> None:
        """One row for each variant that has no feasible config at all, so that `explain` can say why."""
        possible = {c.variant for c in candidates(problem, self._limits, self._job.settings.policy)}
        for variant in variants(problem.op).values():
            config = variant.default(problem, self._limits)
            candidate = Candidate.of(problem.op, variant.name, config)
            if variant.name in possible or self._knowledge.status(problem, candidate) is not None:
                continue
            reason = variant.infeasible(problem, config, self._limits)
            if reason is not None:
                self._learn(problem, candidate, Outcome(status="infeasible", reason=reason))


def result_event(
    problem: Problem, candidate: Candidate, outcome: Outcome, source_hash: str, *, final: bool
) -> dict[str, object]:
    """The fields of a trial record as plain JSON values."""
    latency = outcome.latency
    return {
        "problem": problem.to_dict(),
        "candidate": {"op": candidate.op, "variant": candidate.variant, "config": candidate.config_dict},
        "numerics": get_variant(candidate.op, candidate.variant).numerics,
        "source_hash": source_hash,
        "status": outcome.status,
        "reason": outcome.reason,
        "latency_p10_us": latency.p10_us if latency else None,
        "latency_p50_us": latency.p50_us if latency else None,
        "latency_p90_us": latency.p90_us if latency else None,
        "samples": latency.samples if latency else 0,
        "baseline_p50_us": outcome.baseline_us,
        "error": outcome.error,
        "final": final and outcome.status == "ok",
    }
