"""The progress of a sweep: counts of its own trials, and an estimate of the time left."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass

from tunedcomm.db.records import Trial
from tunedcomm.db.values import FAILURES, was_tried
from tunedcomm.spec import Problem
from tunedcomm.tuner.gang.protocol import TrialResult
from tunedcomm.tuner.gang.supervisor import GangProgress


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """The state of a sweep at one moment.

    Attributes:
        problems, problems_done: all problems, and those whose search is over.
        trials, trials_planned: trials measured in this sweep, and the most that searches under way may still need.
        failures: failed trials of this sweep by status.
        gangs: the gangs that are up, by slot.
        left: gangs that went on to another problem since the last report, or ended, as they left theirs.
        num_gangs: gangs started so far.
        elapsed_s: seconds since the sweep began.
        seconds_left: seconds left of the budget, or an estimate where that is less; None while neither is known.
        num_compiled: trials for which a rank still had to compile.
        bind_share: share of the gangs' time that the slowest rank spent on binding, after the first 30 s of the sweep;
            None if the sweep was over by then.
    """

    problems: int
    problems_done: int
    trials: int
    trials_planned: int
    failures: dict[str, int]
    gangs: tuple[GangProgress, ...]
    num_gangs: int
    elapsed_s: float
    seconds_left: float | None = None
    num_compiled: int = 0
    bind_share: float | None = None
    left: tuple[GangProgress, ...] = ()

    @property
    def trials_per_minute(self) -> float:
        """Mean over the whole sweep."""
        return 60 * self.trials / self.elapsed_s if self.elapsed_s > 0 else 0.0


# The first binds of a sweep compile whatever the pool has not reached yet: their time says nothing about later binds.
_WARM_UP_S = 30.0


class SweepCounters:
    """Counts of one sweep; every time is in seconds since the sweep began."""

    def __init__(self) -> None:
        self.trials = self.num_compiled = 0
        self.failures: Counter[str] = Counter()
        self._by_problem: Counter[Problem] = Counter()
        self._first_s: float | None = None
        self._gang_s = self._bind_s = self._compile_s = 0.0
        self._counted_until_s = _WARM_UP_S

    def add_trial(self, trial: Trial, now: float) -> None:
        """Count a trial; an infeasible candidate does not count."""
        if not was_tried(trial.status):
            return
        self.trials += 1
        self._by_problem[trial.problem] += not trial.final
        if self._first_s is None:
            self._first_s = now
        if trial.status in FAILURES:
            self.failures[trial.status] += 1

    def add_binding(self, result: TrialResult, now: float) -> None:
        """Count the time that a trial, which ended at `now`, spent on binding."""
        self.num_compiled += result.compiled > 0
        if now > _WARM_UP_S:
            self._bind_s += result.bind_s
            self._compile_s += result.bind_s if result.compiled else 0.0

    def add_gang_time(self, now: float, num_gangs: int) -> None:
        """Count the time of `num_gangs` gangs that were up since the last call."""
        if now > self._counted_until_s:
            self._gang_s += num_gangs * (now - self._counted_until_s)
            self._counted_until_s = now

    @property
    def bind_share(self) -> float | None:
        """Share of the gangs' time spent on binding, after the warm-up."""
        return min(1.0, self._bind_s / self._gang_s) if self._gang_s > 0 else None

    @property
    def compile_share(self) -> float | None:
        """The part of `bind_share` in which a rank waited for the compiler."""
        return min(1.0, self._compile_s / self._gang_s) if self._gang_s > 0 else None

    def estimate_s(self, searched: Collection[Problem], trials_left: int, unopened: int, now: float) -> float | None:
        """Seconds that the rest may take; None while too little is known.

        Args:
            searched: problems whose search is over.
            trials_left: trials that searches under way may still need.
            unopened: problems whose search has not begun; each is taken to need as many trials as those `searched`.
            now: seconds since the sweep began.
        """
        counts = [count for problem in searched if (count := self._by_problem[problem])]
        if self._first_s is None or self.trials < 2 or (unopened and not counts):
            return None
        trials = trials_left + (unopened * statistics.mean(counts) if unopened else 0)
        return trials * (now - self._first_s) / self.trials
