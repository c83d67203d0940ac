"""What a coordinator tells a gang, and what the gang answers. Plain JSON on the way."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from tunedcomm.spec import Candidate, Problem, get_variant
from tunedcomm.tuner.job import StoredTrial, candidate_from_dict, candidate_to_dict
from tunedcomm.tuner.search.claims import Claim

__all__ = ["LOST", "TOO_LARGE", "Assignment", "Command", "Latency", "Outcome", "Row"]

# Outcomes after which the ranks may be out of step: the gang ends itself and another one is started.
LOST = frozenset({"crashed", "hung"})
# What becomes of a trial where the ranks have no memory for the problem itself: it is stored for nobody.
TOO_LARGE = "too_large"
_LIBRARY = "library"


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
        kind: run a trial, wait for the next command, or end.
        problem, candidate: of the trial.
        baseline: the library's candidate, measured interleaved with it; None where the library cannot run.
        threshold_us: latency of the best rival so far; candidates out of its reach get fewer samples.
        full_check: check thoroughly, odd sizes included.
        final: measure as in the finals.
        reason: why it ends.
    """

    kind: Literal["trial", "wait", "end"]
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
        # By its name: a gang that replays recorded trials has no variants to look up.
        return self.candidate is not None and self.candidate.variant == _LIBRARY

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        if self.problem is None or self.candidate is None:
            return {"kind": self.kind, "reason": self.reason}
        return {
            "kind": self.kind,
            "problem": self.problem.to_dict(),
            "candidate": candidate_to_dict(self.candidate),
            "baseline": None if self.baseline is None else candidate_to_dict(self.baseline),
            "threshold_us": self.threshold_us if math.isfinite(self.threshold_us) else None,
            "full_check": self.full_check,
            "final": self.final,
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Command:
        """Inverse of `to_dict`."""
        if "problem" not in data:
            return cls(kind=data["kind"], reason=data["reason"])
        baseline, threshold_us = data["baseline"], data["threshold_us"]
        return cls(
            kind=data["kind"],
            problem=Problem.from_dict(data["problem"]),
            candidate=candidate_from_dict(data["candidate"]),
            baseline=None if baseline is None else candidate_from_dict(baseline),
            threshold_us=math.inf if threshold_us is None else threshold_us,
            full_check=data["full_check"],
            final=data["final"],
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a trial ended; the same on every rank.

    Attributes:
        status, reason: see `db.records.TrialRecord`, or `TOO_LARGE`; as the rest but:
        bind_s: seconds for which the slowest rank bound the candidate (and the library, where that was bound first).
        compiled: binaries that were not in the cache then, on the rank that had to compile most.
    """

    status: str
    reason: str = ""
    latency: Latency | None = None
    baseline_us: float | None = None
    error: float | None = None
    bind_s: float = 0.0
    compiled: int = 0

    @property
    def latency_us(self) -> float | None:
        """The median, if it ran."""
        return self.latency.p50_us if self.latency is not None else None

    def with_binding(self, bind_s: float, compiled: int) -> Outcome:
        """The same outcome with what binding took."""
        return replace(self, bind_s=bind_s, compiled=compiled)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Outcome:
        """Inverse of `to_dict`."""
        latency = data["latency"]
        return cls(**{**data, "latency": None if latency is None else Latency(**latency)})


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A trial that ended, as it goes into the database."""

    problem: Problem
    candidate: Candidate
    outcome: Outcome
    source_hash: str
    final: bool

    def steering(self, environment: str) -> StoredTrial:
        """The part of it that steers a sweep, as it will be read back; `environment` is the gangs' digest."""
        return StoredTrial(
            problem=self.problem,
            candidate=self.candidate,
            status=self.outcome.status,
            source_hash=self.source_hash,
            environment=environment,
            latency_us=self.outcome.latency_us,
            final=self.final,
        )

    def fields(self) -> dict[str, Any]:
        """The fields of a trial record that it decides."""
        outcome, latency = self.outcome, self.outcome.latency
        return {
            "problem": self.problem,
            "variant": self.candidate.variant,
            "config": self.candidate.config_dict,
            "numerics": get_variant(self.candidate.op, self.candidate.variant).numerics,
            "source_hash": self.source_hash,
            "status": outcome.status,
            "reason": outcome.reason,
            "latency_p10_us": latency.p10_us if latency else None,
            "latency_p50_us": latency.p50_us if latency else None,
            "latency_p90_us": latency.p90_us if latency else None,
            "samples": latency.samples if latency else 0,
            "baseline_p50_us": outcome.baseline_us,
            "error": outcome.error,
            "final": self.final,
        }


@dataclass(frozen=True, slots=True)
class Assignment:
    """What a gang was told to run.

    Attributes:
        command: as it was sent.
        problem, candidate: of the command.
        claim: the right to run it, where several supervisors share a sweep.
    """

    command: Command
    problem: Problem
    candidate: Candidate
    claim: Claim | None
