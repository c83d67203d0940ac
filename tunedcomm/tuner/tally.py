"""Counts of one sweep, from what its gangs report."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Collection

from tunedcomm.spec import Problem
from tunedcomm.tuner.commands import Outcome, Row
from tunedcomm.tuner.job import FAILED

__all__ = ["Tally"]

# A sweep's first binds compile whatever the pool has not come to yet: what they wait says nothing about the rest.
_WARM_UP_S = 30.0


class Tally:
    """What happened in this sweep alone; readings of the clock are seconds since it began.

    Attributes:
        trials: measured ones.
        failures: failed ones by status.
        num_compiled: trials for which a rank still had to compile.
    """

    def __init__(self) -> None:
        self.trials = self.num_compiled = 0
        self.failures: Counter[str] = Counter()
        self._by_problem: Counter[Problem] = Counter()
        self._first_s: float | None = None
        self._gang_s = self._bind_s = self._compile_s = 0.0
        self._seen_s = _WARM_UP_S

    def add(self, row: Row, now: float) -> None:
        """Count a trial; an infeasible candidate is none."""
        status = row.outcome.status
        if status == "infeasible":
            return
        self.trials += 1
        self._by_problem[row.problem] += not row.final
        if self._first_s is None:
            self._first_s = now
        if status in FAILED:
            self.failures[status] += 1

    def bound(self, outcome: Outcome, now: float) -> None:
        """Count what a trial that ended now had taken to bind."""
        self.num_compiled += outcome.compiled > 0
        if now > _WARM_UP_S:
            self._bind_s += outcome.bind_s
            self._compile_s += outcome.bind_s if outcome.compiled else 0.0

    def pass_time(self, now: float, num_gangs: int) -> None:
        """So many gangs were up until now."""
        if now > self._seen_s:
            self._gang_s += num_gangs * (now - self._seen_s)
            self._seen_s = now

    @property
    def bind_share(self) -> float | None:
        """Share of the gangs' time that went into binding, once they are warmed up."""
        return min(1.0, self._bind_s / self._gang_s) if self._gang_s > 0 else None

    @property
    def compile_share(self) -> float | None:
        """The part of `bind_share` in which a rank waited for the compiler."""
        return min(1.0, self._compile_s / self._gang_s) if self._gang_s > 0 else None

    def estimate_s(self, searched: Collection[Problem], planned: int, unopened: int, now: float) -> float | None:
        """Seconds that the rest may take: so many trials planned, and problems that will be like those before."""
        counts = [count for problem in searched if (count := self._by_problem[problem])]
        if self._first_s is None or self.trials < 2 or (unopened and not counts):
            return None
        trials = planned + (unopened * statistics.mean(counts) if unopened else 0)
        return trials * (now - self._first_s) / self.trials
