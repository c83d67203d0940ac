"""Knowledge about the problems of a sweep: stored trials, and those that were run since.

Only rows of this very environment and of the kernels as they are now count as measured. Rows of an environment that
differs in versions only are good for proposals.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace

from tunedcomm.db.records import Trial
from tunedcomm.db.snapshot import snapshot_of
from tunedcomm.db.values import LOST, UNUSABLE
from tunedcomm.hardware import Environment
from tunedcomm.selection.select import Decision, Registered, choose
from tunedcomm.spec import (
    Candidate,
    Limits,
    Numerics,
    NumericsPolicy,
    Problem,
    admits,
    check_candidate,
    get_op,
    get_variant,
)

# Finalists a family: more would cost the sweep more time than their curves are worth.
_MAX_FINALISTS = 24
# What calls beside work may leave to a kernel; 24 is what experts' exchanges get beside a GEMM.
BESIDE_WORK_SMS = 24
_SM_LIMITS = (0, 1, 2, 4, 8, 16, BESIDE_WORK_SMS, 32, 64, 128)
# The strictest policy that admits a numerics class.
_NARROWEST: Mapping[Numerics, NumericsPolicy] = {
    "ordered": "ordered",
    "library": "default",
    "quantized": "default",
    "unordered": "any",
}


class Knowledge:
    """Results of a sweep's problems, by problem and candidate.

    Args:
        problems: of the sweep.
        environment, limits: of the gangs.
        source_hash: (op, variant) to the hash of its kernels as they are now; None if there is no such variant.
        retry: what failed before the sweep is to be tried again.
        stored: what was known before the sweep, oldest first.
    """

    def __init__(
        self,
        problems: Iterable[Problem],
        environment: Environment,
        limits: Limits,
        source_hash: Callable[[str, str], str | None],
        *,
        retry: bool = False,
        stored: Iterable[Trial] = (),
    ) -> None:
        self.environment, self.limits = environment, limits
        self._retry = retry
        self.catalog = Registered(limits, source_hash)
        self._results: dict[Problem, dict[Candidate, Trial]] = {problem: {} for problem in problems}
        self._finals: dict[Problem, dict[Candidate, Trial]] = {problem: {} for problem in self._results}
        self._proposals: dict[Problem, list[Trial]] = {}
        self._tried: set[tuple[Problem, Candidate]] = set()
        self._quarantine: set[tuple[Problem, Candidate]] = set()
        # From quarantine: measured in the finals even if they took a gang along at another size.
        self.exempt: frozenset[tuple[Problem, Candidate]] = frozenset()
        for trial in stored:
            if self.counts(trial):
                self._enter(trial)
            elif trial.status == "ok" and not environment.mismatches(trial.environment):
                self._proposals.setdefault(trial.problem, []).append(trial)

    def counts(self, trial: Trial) -> bool:
        """True if a stored trial was measured in this environment, and of the kernels as they are now."""
        now = self.catalog.source_hash(trial.problem.op, trial.variant)
        return trial.environment == self.environment and trial.source_hash == now

    def add(self, trial: Trial) -> None:
        """Take in a result of this sweep; a later one of the same candidate replaces an earlier one."""
        self._tried.add((trial.problem, trial.candidate))
        self._enter(trial)

    def _enter(self, trial: Trial) -> None:
        problem, candidate = trial.problem, trial.candidate
        if trial.status in LOST and not self._is_retried(trial) and not is_library(candidate):
            self._quarantine.add((problem.family, candidate))
        table = self._finals if trial.final else self._results
        table.setdefault(problem, {})[candidate] = trial

    def _is_retried(self, trial: Trial) -> bool:
        """True if the candidate, which failed before the sweep, is tried again; the library always is."""
        may = self._retry or is_library(trial.candidate)
        return may and trial.status in UNUSABLE and (trial.problem, trial.candidate) not in self._tried

    def library(self, problem: Problem) -> Candidate:
        """The library with its default config."""
        variant = get_variant(problem.op, "library")
        return Candidate.of(problem.op, variant.name, variant.default_config(problem, self.limits))

    def trials(self, problem: Problem) -> list[Trial]:
        """The last trial of each candidate in the search and in the finals, oldest first."""
        known = [*self._results.get(problem, {}).values(), *self._finals.get(problem, {}).values()]
        return sorted(known, key=lambda trial: trial.created_at)

    def status(self, problem: Problem, candidate: Candidate) -> str | None:
        """Status of the candidate's last trial outside the finals, or None."""
        trial = self._results.get(problem, {}).get(candidate)
        return trial.status if trial else None

    def settled(self, problem: Problem, *, final: bool = False) -> dict[Candidate, float | None]:
        """Candidates that are not to be tried again, in the search or in the finals, with their latency if they ran.

        In the finals those are what has a final, failed here, or took a gang along in this family.
        """
        results = self._results.get(problem, {})
        if not final:
            known = {candidate: trial for candidate, trial in results.items() if not self._is_retried(trial)}
        else:
            known = {candidate: trial for candidate, trial in results.items() if trial.status in UNUSABLE}
            known.update(self._finals.get(problem, {}))
        settled = {c: trial.latency_p50_us if trial.status not in UNUSABLE else None for c, trial in known.items()}
        if final:
            lost = {candidate for family, candidate in self._quarantine if family == problem.family}
            settled.update((c, None) for c in lost if c not in settled and (problem, c) not in self.exempt)
        return settled

    def quarantined(self, problem: Problem, candidate: Candidate) -> bool:
        """True if the candidate took a gang along at some size of the problem's family: it is not tried at another."""
        return (problem.family, candidate) in self._quarantine

    def best_us(self, problem: Problem, numerics: Numerics) -> float:
        """Least latency that a candidate of this numerics class has to come near; infinity if nothing is `ok` yet.

        Classes that promise less do not count: a fast unordered candidate must not end the measuring of ordered ones,
        which some callers insist on. Nor does the library: how far it is ahead of the best challenger is worth knowing.
        """
        return min(self._challengers(problem, _NARROWEST[numerics]).values(), default=math.inf)

    def answer(self, problem: Problem) -> Decision:
        """Dispatch's answer by what is known of this problem alone."""
        snapshot = snapshot_of(self.environment, problem.world_size, self.trials(problem))
        return choose(snapshot, problem, self.catalog)

    def fastest(self, problem: Problem, count: int, policy: NumericsPolicy = "any") -> list[Candidate]:
        """The fastest `count` challengers of the search under `policy`, to search on from; by time, then by name."""
        cost = self._challengers(problem, policy)
        ranked = sorted(cost, key=lambda candidate: (cost[candidate], str(candidate)))
        return [c for c in ranked if get_variant(problem.op, c.variant).waits_time_out][:count]

    def best_per_sm_limit(self, problem: Problem) -> list[Candidate]:
        """The fastest challengers of the default policy that take few SMs, for calls beside work."""
        cost, sms = self._challengers(problem, "default", ("ok", "pruned")), dict[Candidate, int]()
        for candidate in cost:
            variant = get_variant(problem.op, candidate.variant)
            taken = variant.num_blocks(problem, candidate.config_dict)
            if variant.waits_time_out and taken >= 0:
                sms[candidate] = taken
        fitting = [[c for c in sms if sms[c] <= limit] for limit in _SM_LIMITS]
        return list(dict.fromkeys(min(found, key=lambda c: (cost[c], str(c))) for found in fitting if found))

    def proposals(self, problem: Problem, count: int, searched: Collection[Problem]) -> list[Candidate]:
        """Winners worth trying first: of the nearest shapes, of other families at this shape, of other versions.

        Of shapes and families only those that were `searched` count: their results are the same when a sweep is begun
        again, so that it goes the same way.
        """
        message_bytes = get_op(problem.op).message_bytes
        size = math.log2(message_bytes(problem) + 1)
        near = [
            other
            for other in searched
            if other != problem and other.op == problem.op and self._challengers(other, "any")
        ]
        near.sort(key=lambda o: (abs(math.log2(message_bytes(o) + 1) - size), o.family != problem.family, str(o)))
        found: list[Candidate] = []
        for other in near[:3]:
            found += self.fastest(other, count)
        stored = sorted(self._proposals.get(problem, []), key=lambda trial: trial.latency_p50_us or math.inf)
        found += [trial.candidate for trial in stored[:count]]
        return self.feasible(problem, found)

    def feasible(self, problem: Problem, candidates: Iterable[Candidate]) -> list[Candidate]:
        """The `candidates` that can run `problem` here, once each, in order."""
        unique = dict.fromkeys(replace(candidate, op=problem.op) for candidate in candidates)
        return [candidate for candidate in unique if check_candidate(problem, candidate, self.limits) is None]

    def finalists(self, problems: Iterable[Problem], per_shape: int) -> list[Candidate]:
        """Winners of a family's problems under every numerics policy, those that win at more shapes first.

        The best of each problem is always among them: without a final of its own a shape would lose its winner.
        """
        wins: dict[Candidate, int] = {}
        best: set[Candidate] = set()
        for problem in problems:
            first = [c for policy in ("default", "ordered", "any") for c in self.fastest(problem, 1, policy)]
            best.update(first)
            for candidate in dict.fromkeys([*first, *self.fastest(problem, per_shape, "default")]):
                wins[candidate] = wins.get(candidate, 0) + 1
        ranked = sorted(wins, key=lambda candidate: (candidate not in best, -wins[candidate], str(candidate)))
        return ranked[: max(_MAX_FINALISTS, len(best))]

    def checked(self, problem: Problem, candidate: Candidate) -> bool:
        """True if the candidate passed a check in this problem's family, so that a lighter one is enough."""
        return any(
            results[candidate].status in ("ok", "pruned")
            for other, results in self._results.items()
            if other.family == problem.family and candidate in results
        )

    def _challengers(
        self, problem: Problem, policy: NumericsPolicy, statuses: Collection[str] = ("ok",)
    ) -> dict[Candidate, float]:
        """Latencies of candidates besides the library that `policy` admits and whose search ended so."""
        return {
            candidate: trial.latency_p50_us
            for candidate, trial in self._results.get(problem, {}).items()
            if trial.status in statuses and trial.latency_p50_us and not is_library(candidate)
            if admits(policy, trial.numerics)
        }


def is_library(candidate: Candidate) -> bool:
    """True for the baseline of an op."""
    return get_variant(candidate.op, candidate.variant).is_library
