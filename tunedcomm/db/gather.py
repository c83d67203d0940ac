"""What the rows of several layers amount to: at most one a candidate and problem, and what is not to be launched."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from tunedcomm.db.records import PinRecord
from tunedcomm.db.snapshot_query import FailedTrial, OkTrial
from tunedcomm.hardware import SOFT_FIELDS, Environment
from tunedcomm.selection.snapshot import (
    Failure,
    Numbers,
    Pinned,
    Row,
    Snapshot,
    is_drift,
)
from tunedcomm.spec import Candidate, Problem

__all__ = ["Gathered", "Names", "snapshot_of"]

# Problem and candidate as numbers, and the source hash.
_Key: TypeAlias = tuple[int, int, str]


@dataclass(slots=True)
class Names:
    """Numbers of the problems, candidates and environments that a reading's rows refer to: thousands share hundreds."""

    problems: Numbers[Problem] = field(default_factory=Numbers)
    candidates: Numbers[Candidate] = field(default_factory=Numbers)
    environments: Numbers[Environment] = field(default_factory=Numbers)

    def key(self, trial: OkTrial | FailedTrial) -> _Key:
        return (self.problems.of(trial.problem), self.candidates.of(trial.candidate), trial.source_hash)

    def family(self, key: _Key) -> tuple[Problem, Candidate, str]:
        problem, candidate, source_hash = key
        return (self.problems.values[problem].family, self.candidates.values[candidate], source_hash)


@dataclass(slots=True)
class Gathered:
    """The rows of one kind of hardware, from the layers read so far.

    Attributes:
        environment: where the calls will run.
        names: shared by what is compared with each other.
        borrowed: the rows are of other hardware, whose measurements the user lets stand in.
        rows, failures, pins: what is kept.
        good: when each candidate last ran well, in a row that is kept or in one that is not.
    """

    environment: Environment
    names: Names
    borrowed: bool = False
    rows: dict[_Key, Row] = field(default_factory=dict)
    good: dict[_Key, str] = field(default_factory=dict)
    failures: dict[_Key, FailedTrial] = field(default_factory=dict)
    pins: dict[Problem, Pinned] = field(default_factory=dict)
    _pin_ages: dict[Problem, tuple[Any, ...]] = field(default_factory=dict)
    _drifts: dict[int, bool] = field(default_factory=dict)

    def _is_drift(self, there: Environment) -> bool:
        number = self.names.environments.of(there)
        found = self._drifts.get(number)
        if found is None:
            found = self._drifts[number] = is_drift(self.environment, there)
        return found

    def add_trial(self, trial: OkTrial, *, layer: str, rank: int) -> None:
        """Keep the trial if it is the most conclusive one of its candidate so far."""
        row = Row(
            problem=trial.problem,
            candidate=trial.candidate,
            source_hash=trial.source_hash,
            environment=trial.environment,
            latency_p50_us=trial.latency_p50_us,
            latency_p10_us=trial.latency_p10_us,
            latency_p90_us=trial.latency_p90_us,
            samples=trial.samples,
            baseline_p50_us=trial.baseline_p50_us,
            final=trial.final,
            drift=self._is_drift(trial.environment),
            borrowed=self.borrowed,
            layer=layer,
            layer_rank=rank,
            created_at=trial.created_at,
            trial_id=trial.id,
        )
        key = self.names.key(trial)
        self.good[key] = max(row.created_at, self.good.get(key, ""))
        known = self.rows.get(key)
        if known is None or _better(row, known):
            self.rows[key] = row

    def add_failure(self, trial: FailedTrial) -> None:
        """Keep the candidate's latest failure."""
        key = self.names.key(trial)
        known = self.failures.get(key)
        if known is None or (trial.created_at, trial.status) > (known.created_at, known.status):
            self.failures[key] = trial

    def add_pins(self, pins: Sequence[PinRecord], *, layer: str, rank: int, world_size: int) -> None:
        """Keep the newest pin of each problem that has none from a nearer layer; several files may be one layer."""
        here = [
            p
            for p in pins
            if p.problem.world_size == world_size and p.environment.hard_key == self.environment.hard_key
        ]
        for pin in here:
            # Equal times are told apart by content, so that every host decides alike.
            age = (-rank, pin.created_at, str(pin.candidate), pin.reason)
            if pin.problem not in self.pins or age > self._pin_ages[pin.problem]:
                pinned = Pinned(problem=pin.problem, candidate=pin.candidate, reason=pin.reason, layer=layer)
                self.pins[pin.problem], self._pin_ages[pin.problem] = pinned, age

    def failed(self) -> dict[_Key, FailedTrial]:
        """Candidates that have not run well since they failed, whoever measured them before."""
        return {k: f for k, f in self.failures.items() if f.created_at >= self.good.get(k, "")}


def snapshot_of(own: Gathered, borrowed: Gathered, world_size: int, notes: Sequence[str] = ()) -> Snapshot:
    """What is known of this hardware, and of other hardware what may stand in.

    A borrowed row is a guess: it gives way to any row of this hardware for the same candidate and problem, and is not
    kept for candidates that failed in the family, here or there.
    """
    failures = own.failed()
    rows = {key: row for key, row in own.rows.items() if key not in failures}
    family = own.names.family
    doubtful = {family(key) for key in (*failures, *borrowed.failed())} if borrowed.rows else set()
    lent = {k: row for k, row in borrowed.rows.items() if k not in own.rows and family(k) not in doubtful}
    return Snapshot(
        environment=own.environment,
        world_size=world_size,
        rows=(*rows.values(), *lent.values()),
        pins=tuple(own.pins.values()),
        failures=_one_a_family(failures.values()),
        notes=(*_drift_notes(own.environment, rows.values()), *_borrow_notes(lent.values()), *notes),
    )


def _better(row: Row, known: Row) -> bool:
    """True if `row` replaces `known`, of the same candidate: by tier, then the newest; never by row id."""
    if row.tier != known.tier:
        return row.tier < known.tier
    return _age(row) > _age(known)


def _age(row: Row) -> tuple[Any, ...]:
    # Equal times are told apart by content, so that the order of storing never matters.
    return (row.created_at, -row.latency_p50_us, row.samples, row.baseline_p50_us or 0.0, row.environment.digest)


def _one_a_family(trials: Iterable[FailedTrial]) -> tuple[Failure, ...]:
    """The failure at the first problem of each family: one is enough to keep a candidate from being predicted."""
    kept: dict[tuple[Problem, Candidate, str], FailedTrial] = {}
    for trial in sorted(trials, key=lambda t: (t.problem, t.created_at, t.status)):
        kept.setdefault((trial.problem.family, trial.candidate, trial.source_hash), trial)
    return tuple(
        Failure(problem=t.problem, candidate=t.candidate, source_hash=t.source_hash, status=t.status)
        for t in kept.values()
    )


def _drift_notes(here: Environment, rows: Iterable[Row]) -> tuple[str, ...]:
    rows = list(rows)
    drifted = [row for row in rows if row.drift]
    if not drifted:
        return ()
    names = [n for n in SOFT_FIELDS if n != "tunedcomm"]
    changes = sorted(
        {
            f"{name} {getattr(row.environment, name) or '(none)'} → {getattr(here, name) or '(none)'}"
            for row in drifted
            for name in names
            if getattr(row.environment, name) != getattr(here, name)
        }
    )
    return (
        f"{len(drifted)} of {len(rows)} rows were measured under other software ({', '.join(changes)}); they are used "
        "where there is nothing newer. `tunedcomm tune` measures them again",
    )


def _borrow_notes(rows: Iterable[Row]) -> tuple[str, ...]:
    counts: dict[str, int] = {}
    for row in rows:
        counts[str(row.environment)] = counts.get(str(row.environment), 0) + 1
    return tuple(
        f"{count} rows are borrowed from {environment}; they serve where nothing was measured on this hardware. "
        "`tunedcomm tune` measures here"
        for environment, count in sorted(counts.items())
    )
