"""Recorded trials in a gang's place: the whole search runs without GPUs, and the same way every time.

A `Replay` answers a command as the gang did that was recorded; `run_search` walks a schedule to its end with such
answers, in this process. Recorded trials come from a database, or from a file of `tuner.recording`.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from tunedcomm.db.records import TrialRecord, canonical_json
from tunedcomm.hardware import Environment
from tunedcomm.spec import Candidate, Limits, NumericsPolicy, Problem, admits, get_variant
from tunedcomm.tuner.job import Job, Settings, StoredTrial
from tunedcomm.tuner.knowledge import Knowledge
from tunedcomm.tuner.schedule import Command, Latency, Outcome, Schedule
from tunedcomm.tuner.stages import pruned, rounds_after_look

__all__ = ["Replay", "SearchRun", "Step", "run_search"]

# Outcomes after which a gang ends itself and the supervisor starts another.
_LOST = frozenset({"crashed", "hung"})
# Standard error of a median in standard errors of a mean, for normal samples.
_MEDIAN_ERROR = 1.2533
# Standard deviations between a normal distribution's median and its 10th or 90th percentile.
_P90_DEVIATIONS = 1.2816


class Replay:
    """Answers commands from recorded trials.

    A candidate's newest trial counts; commands of a search prefer a trial of a search and those of the finals one of
    the finals, and either answers for the other where it is alone. Statuses without a latency are answered as they
    were recorded. Where there is a latency, it is what the first look sees, and `ok` or `pruned` is decided anew from
    the command's threshold, by the same rule as on GPUs: a search in another order prunes other candidates.

    A candidate that was never measured on a problem is answered `infeasible`, with a reason that says so: it costs the
    search a trial and can win nothing, so that no latency is ever made up.

    Which source the kernels had does not matter to answers.

    Args:
        records: trials of one environment, in any order.
        environment: the one to take where `records` have several.
        noise_seed: None answers recorded medians as they are. A number moves each median by what the recorded spread
            and the number of rounds make likely, the same for the same seed, problem, candidate and rounds, whatever
            was asked before.

    Raises:
        ValueError: no trial, or trials of several environments and none chosen.
    """

    def __init__(
        self,
        records: Iterable[TrialRecord],
        *,
        environment: Environment | None = None,
        noise_seed: int | None = None,
    ) -> None:
        found = [r for r in records if environment is None or r.environment == environment]
        environments = sorted({r.environment for r in found}, key=lambda e: e.digest)
        if len(environments) != 1:
            names = "; ".join(f"{e} ({e.digest})" for e in environments) or "none"
            raise ValueError(f"a replay needs trials of one environment, got {names}; pass environment= to choose")
        self.environment = environments[0]
        self._noise_seed = noise_seed
        self._rows: dict[tuple[Problem, Candidate], dict[bool, TrialRecord]] = {}
        self._hashes: dict[tuple[str, str], str] = {}
        for record in sorted(found, key=_age):
            self._rows.setdefault((record.problem, record.candidate), {})[record.final] = record
            self._hashes[record.problem.op, record.variant] = record.source_hash

    def problems(self) -> tuple[Problem, ...]:
        """Problems with a trial, sorted."""
        return tuple(sorted({problem for problem, _ in self._rows}))

    def records(self, problem: Problem) -> list[TrialRecord]:
        """The trials that answer for a problem: the newest of each candidate, in a search and in the finals."""
        return [record for (of, _), rows in self._rows.items() if of == problem for record in rows.values()]

    def source_hash(self, op: str, variant: str) -> str:
        """Of the newest trial of the variant; "" if there is none."""
        return self._hashes.get((op, variant), "")

    def recorded_us(self, problem: Problem, candidate: Candidate, *, final: bool = False) -> float | None:
        """Recorded median without noise; None if the candidate never ran there."""
        row = self._row(problem, candidate, final=final)
        return row.latency_p50_us if row is not None else None

    def measured(self, problem: Problem, policy: NumericsPolicy = "any") -> dict[Candidate, float]:
        """Recorded medians of the search, of every candidate that ran and that `policy` admits; the library's too."""
        medians = {c: self.recorded_us(p, c) for p, c in self._rows if p == problem}
        return {
            candidate: us
            for candidate, us in medians.items()
            if us is not None and admits(policy, get_variant(candidate.op, candidate.variant).numerics)
        }

    def answer(self, command: Command, settings: Settings) -> Outcome:
        """What a gang with these settings would have found."""
        problem, candidate = command.problem, command.candidate
        assert problem is not None
        assert candidate is not None
        row = self._row(problem, candidate, final=command.final)
        if row is None:
            return Outcome(status="infeasible", reason=f"{candidate} was never measured on {problem}")
        if row.latency_p50_us is None:
            return Outcome(status=row.status, reason=row.reason, error=row.error)
        look = self._latency(row, settings.first_rounds)
        rounds = rounds_after_look(command, look.p50_us, settings)
        if not rounds:
            return pruned(command, look, row.error)
        baseline_us = self._baseline_us(row, command.baseline)
        return Outcome(status="ok", latency=self._latency(row, rounds), baseline_us=baseline_us, error=row.error)

    def _row(self, problem: Problem, candidate: Candidate, *, final: bool) -> TrialRecord | None:
        rows = self._rows.get((problem, candidate), {})
        return rows.get(final, rows.get(not final))

    def _baseline_us(self, row: TrialRecord, baseline: Candidate | None) -> float | None:
        if baseline is None:
            return None
        return row.baseline_p50_us or self.recorded_us(row.problem, baseline, final=row.final)

    def _latency(self, row: TrialRecord, rounds: int) -> Latency:
        middle = row.latency_p50_us
        assert middle is not None
        low, high = row.latency_p10_us or middle, row.latency_p90_us or middle
        if self._noise_seed is not None:
            seed = f"{self._noise_seed}-{row.problem.digest}-{row.candidate}-{rounds}"
            draw = random.Random(seed).gauss(0.0, 1.0)  # noqa: S311
            spread = (high - middle if draw > 0 else middle - low) / _P90_DEVIATIONS
            middle = min(max(middle + draw * _MEDIAN_ERROR * spread / rounds**0.5, low), high)
        return Latency(p10_us=low, p50_us=middle, p90_us=high, samples=rounds)


def _age(record: TrialRecord) -> tuple[datetime, int, str]:
    """Sorts trials from old to new; the text keeps equally old ones in one order."""
    told = [record.source_hash, record.status, record.reason, record.baseline_p50_us, record.error, record.samples]
    latency = [record.latency_p10_us, record.latency_p50_us, record.latency_p90_us]
    return record.created_at, record.id or 0, canonical_json([told, latency])


@dataclass(frozen=True, slots=True)
class Step:
    """A command and its answer."""

    command: Command
    outcome: Outcome


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchRun:
    """What a replayed search did.

    Attributes:
        steps: commands in the order in which they were answered.
        stored: what is known afterwards, what the job knew before included, oldest first.
        tried: see `Job.tried`.
        reason: `done`, `budget`, or `interrupted` by `max_trials`.
        num_gangs: gangs that a sweep would have started.
        dropped: variants that were left alone in the end.
    """

    steps: tuple[Step, ...]
    stored: tuple[StoredTrial, ...]
    tried: frozenset[tuple[str, Candidate]]
    reason: str
    num_gangs: int
    dropped: frozenset[str]

    def table(self) -> dict[tuple[Problem, Candidate, bool], StoredTrial]:
        """The last trial of each candidate by problem, in a search (False) and in the finals (True)."""
        return {(trial.problem, trial.candidate, trial.final): trial for trial in self.stored}

    def winner(self, problem: Problem, policy: NumericsPolicy = "default") -> StoredTrial | None:
        """The fastest `ok` trial that `policy` admits, the library's too; finals count before searches."""
        ran = [t for t in self.table().values() if t.problem == problem and t.status == "ok" and _admitted(t, policy)]
        ran = [t for t in ran if t.final] or ran
        return min(ran, key=lambda t: (t.latency_us or 0.0, str(t.candidate)), default=None)

    def resume(self, job: Job) -> Job:
        """What the same command would be told to do after this run was killed."""
        return replace(job, stored=self.stored)


def _admitted(trial: StoredTrial, policy: NumericsPolicy) -> bool:
    return admits(policy, get_variant(trial.candidate.op, trial.candidate.variant).numerics)


def run_search(
    job: Job,
    replay: Replay,
    *,
    limits: Limits,
    max_trials: int | None = None,
    trial_seconds: float = 0.0,
) -> SearchRun:
    """Drive the schedule of `job` to its end with recorded answers; no process, no clock, no tensor.

    A candidate that crashed or hung ends its gang, and the next one is told what a sweep would tell it. The ops and
    variants of the job must be registered.

    Args:
        job: what to do.
        replay: answers.
        limits: of the recorded machine, e.g. `communicator.limits_for(replay.environment, world_size)`.
        max_trials: stop after so many answers, as a kill would.
        trial_seconds: how far each trial moves the clock of the job's budget.
    """
    return _Search(job, replay, limits, max_trials, trial_seconds).run()


class _Search:
    """A supervisor's part of a search: what was found, and what the next gang is told."""

    def __init__(self, job: Job, replay: Replay, limits: Limits, max_trials: int | None, trial_seconds: float) -> None:
        here = replay.environment
        self._job = replace(job, environments=tuple({**dict(job.environments), here.digest: here.to_dict()}.items()))
        self._replay, self._limits = replay, limits
        self._max_trials, self._trial_seconds = max_trials, trial_seconds
        self._steps: list[Step] = []
        self._stored = list(job.stored)
        self._tried = set(job.tried)
        self._lost: Counter[str] = Counter()

    def run(self) -> SearchRun:
        reason, num_gangs = "unusable", 0
        while reason == "unusable":
            job = self._next_job()
            if job is None:
                reason = "budget"
                break
            num_gangs += 1
            reason = self._run_gang(job)
        return SearchRun(
            steps=tuple(self._steps),
            stored=tuple(self._stored),
            tried=frozenset(self._tried),
            reason=reason,
            num_gangs=num_gangs,
            dropped=self._dropped(),
        )

    def _dropped(self) -> frozenset[str]:
        limit = self._job.settings.failures_per_variant
        return self._job.dropped | {variant for variant, lost in self._lost.items() if lost >= limit}

    def _next_job(self) -> Job | None:
        left = self._job.seconds_left
        if left is not None:
            left -= self._clock()
            if left <= 0 and self._steps:
                return None
        return replace(
            self._job,
            seconds_left=left,
            stored=tuple(self._stored),
            tried=frozenset(self._tried),
            dropped=self._dropped(),
        )

    def _clock(self) -> float:
        return len(self._steps) * self._trial_seconds

    def _run_gang(self, job: Job) -> str:
        replay, limits = self._replay, self._limits
        schedule = Schedule(
            job,
            Knowledge(job, replay.environment, limits, replay.source_hash),
            limits,
            source_hash=replay.source_hash,
            environment=replay.environment.digest,
            report=self._take,
            clock=self._clock,
        )
        work = schedule.commands()
        command = next(work)
        while command.kind == "trial":
            if self._max_trials is not None and len(self._steps) >= self._max_trials:
                return "interrupted"
            outcome = replay.answer(command, job.settings)
            self._steps.append(Step(command, outcome))
            # The schedule reports the outcome before it yields again, so that it is stored even if the gang now ends.
            following = work.send(outcome)
            if outcome.status in _LOST:
                assert command.candidate is not None
                self._lost[command.candidate.variant] += 1
                return "unusable"
            command = following
        return command.reason

    def _take(self, event: str, data: Mapping[str, Any]) -> None:
        if event != "result":
            return
        here = {"environment": self._replay.environment.digest, "latency_us": data["latency_p50_us"]}
        trial = StoredTrial.from_dict({**data, **here})
        self._stored.append(trial)
        self._tried.add((trial.problem.digest, trial.candidate))
