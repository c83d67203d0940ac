"""What goes into the database and comes out of it, as plain values."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import Any, Literal, TypeAlias, get_args

from tunedcomm.hardware import Environment
from tunedcomm.space import Value
from tunedcomm.spec import Candidate, Numerics, Problem

Status: TypeAlias = Literal["ok", "infeasible", "compile_error", "incorrect", "crashed", "hung", "pruned"]
STATUSES: tuple[str, ...] = get_args(Status)
# Statuses that say the candidate is dangerous, not just slow or impossible.
FAILED: tuple[str, ...] = ("incorrect", "crashed", "hung")
_NUMERICS: tuple[str, ...] = get_args(Numerics)


def utc_now() -> datetime:
    """Now, aware, in UTC."""
    return datetime.now(timezone.utc)


def canonical_json(value: object) -> str:
    """The one JSON text of `value`: keys sorted, no blanks, no NaN or infinity."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


def config_digest(config: Mapping[str, Value]) -> str:
    """SHA-256 over the config's canonical JSON, first 16 hex digits."""
    return hashlib.sha256(canonical_json(dict(config)).encode()).hexdigest()[:16]


def _check_config(config: Mapping[str, Any]) -> None:
    for axis, value in config.items():
        if not isinstance(axis, str) or not isinstance(value, (bool, int, str)):
            raise ValueError(f"config axis {axis!r}={value!r}: axes are str and values are int, bool or str")


def _check_aware(name: str, when: datetime) -> None:
    if when.tzinfo is None:
        raise ValueError(f"{name}={when!r} has no time zone; pass an aware datetime, e.g. in timezone.utc")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialRecord:
    """One candidate tried on one problem in one environment.

    Attributes:
        problem: what was asked.
        environment: where it was measured.
        variant: name of the variant.
        numerics: the variant's numerics class.
        source_hash: hash of the variant's source when it was measured.
        config: a point of the variant's space, as a plain dict.
        status: how the trial ended.
        reason: why it is not `ok`, as a sentence.
        latency_p10_us, latency_p50_us, latency_p90_us: percentiles over iterations of the slowest rank.
        samples: iterations behind the percentiles.
        baseline_p50_us: median of the library in the same interleaved run.
        error: ||out - ref|| / ||ref||. SQLite stores NaN as NULL.
        final: measured in the finals, with every finalist on every shape of the sweep.
        run_id: what `Database.start_run` gave.
        created_at: when, aware.
        id: the stored row's id; ignored when recording.

    Raises:
        ValueError: a value that no reader would accept, e.g. an `ok` trial without a latency.
    """

    problem: Problem
    environment: Environment
    variant: str
    numerics: Numerics
    source_hash: str
    config: dict[str, Value]
    status: Status
    reason: str = ""
    latency_p10_us: float | None = None
    latency_p50_us: float | None = None
    latency_p90_us: float | None = None
    samples: int = 0
    baseline_p50_us: float | None = None
    error: float | None = None
    final: bool = False
    run_id: int | None = None
    created_at: datetime = field(default_factory=utc_now)
    id: int | None = None

    def __post_init__(self) -> None:
        if self.status not in STATUSES:
            raise ValueError(f"unknown status {self.status!r}; the statuses are {', '.join(STATUSES)}")
        if self.numerics not in _NUMERICS:
            raise ValueError(f"unknown numerics class {self.numerics!r}; the classes are {', '.join(_NUMERICS)}")
        if not self.variant:
            raise ValueError("a trial needs the name of its variant, got ''")
        _check_config(self.config)
        _check_aware("created_at", self.created_at)
        if self.status == "ok" and self.latency_p50_us is None:
            raise ValueError(f"an ok trial of {self.variant} on {self.problem} needs latency_p50_us, got None")
        if self.samples < 0:
            raise ValueError(f"samples must be >= 0, got {self.samples}")
        for name in ("latency_p10_us", "latency_p50_us", "latency_p90_us", "baseline_p50_us"):
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and value > 0):
                raise ValueError(f"{name} must be finite and > 0, got {value!r}")

    @property
    def candidate(self) -> Candidate:
        """The variant with its config."""
        return Candidate.of(self.problem.op, self.variant, self.config)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord:
    """One command that recorded trials."""

    id: int
    command: str
    seed: int | None
    budget: str
    host: str
    user: str
    version: str
    started_at: datetime
    finished_at: datetime | None


@dataclass(frozen=True, slots=True, kw_only=True)
class PinRecord:
    """A person's override of what is dispatched for one problem on machines like `environment`."""

    problem: Problem
    environment: Environment
    candidate: Candidate
    reason: str
    user: str = ""
    created_at: datetime = field(default_factory=utc_now)
    id: int | None = None


def fastest(trials: Iterable[TrialRecord]) -> TrialRecord | None:
    """The trial that took least beside the library in its own run, since no machine is equally fast at all times.

    By the latencies themselves if there is one without a library beside it. None of no trials.

    Args:
        trials: `ok` ones.
    """
    ran = [trial for trial in trials if trial.latency_p50_us is not None]
    known = all(trial.variant == "library" or trial.baseline_p50_us is not None for trial in ran)

    def order(trial: TrialRecord) -> tuple[float, str]:
        latency_us = trial.latency_p50_us or 0.0
        library_us = latency_us if trial.variant == "library" else trial.baseline_p50_us
        return latency_us / library_us if known and library_us else latency_us, str(trial.candidate)

    return min(ran, key=order, default=None)
