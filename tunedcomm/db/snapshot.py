"""The immutable table that a group of ranks agrees on, and that selection reads. Pure: no database, no torch."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tunedcomm.hardware import SOFT_FIELDS, Environment
from tunedcomm.spec import Candidate, Problem

__all__ = ["Failure", "Pinned", "Row", "Snapshot", "is_drift"]

_FORMAT = 1


def is_drift(here: Environment, there: Environment) -> bool:
    """True if other software was measured. tunedcomm's own version is no drift: source hashes cover its kernels."""
    return any(getattr(here, name) != getattr(there, name) for name in SOFT_FIELDS if name != "tunedcomm")


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What a snapshot holds of one `ok` trial.

    Attributes:
        problem: what was measured.
        candidate: what ran.
        source_hash: the variant's source hash when it ran.
        environment: where it ran; equal to the snapshot's in every hard field unless `borrowed`.
        latency_p50_us: median of the slowest rank.
        latency_p10_us, latency_p90_us: its spread, None where unknown.
        samples: iterations behind the percentiles; 0 where unknown.
        baseline_p50_us: the library in the same interleaved run, None where unknown.
        final: measured in the finals.
        drift: the software differs from the snapshot's environment.
        borrowed: measured on other hardware, which the user lets stand in where nothing was measured on this.
        layer: name of the layer it came from.
        layer_rank: 0 for the nearest layer.
        created_at: when, ISO 8601 in UTC.
        trial_id: row id within its layer; no part of the digest, and nothing is decided by it.
    """

    problem: Problem
    candidate: Candidate
    source_hash: str
    environment: Environment
    latency_p50_us: float
    latency_p10_us: float | None = None
    latency_p90_us: float | None = None
    samples: int = 0
    baseline_p50_us: float | None = None
    final: bool = False
    drift: bool = False
    borrowed: bool = False
    layer: str = "user"
    layer_rank: int = 0
    created_at: str = ""
    trial_id: int | None = None

    @property
    def is_library(self) -> bool:
        return self.candidate.variant == "library"

    @property
    def tier(self) -> tuple[bool, bool, bool, int]:
        """Smaller is more conclusive: this hardware, then finals, then the same software, then the nearest layer."""
        return (self.borrowed, not self.final, self.drift, self.layer_rank)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pinned:
    """A person's override for one problem."""

    problem: Problem
    candidate: Candidate
    reason: str
    layer: str = "user"


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """A candidate that was incorrect, crashed or hung in the family of `problem`, with no good trial there since.

    One failure stands for all of a candidate in one family.
    """

    problem: Problem
    candidate: Candidate
    source_hash: str
    status: str


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Rows of one environment and world size, in one order, under one digest.

    Two snapshots with equal digests give equal decisions for every problem. Rows, pins and failures are sorted when
    the snapshot is made, so the order in which they were stored or loaded does not matter.

    Attributes:
        environment: the environment they were loaded for.
        world_size: ranks of the group.
        rows: at most one for each (problem, candidate, source hash).
        pins: at most one a problem.
        failures: see `Failure`.
        notes: what a person should know, e.g. that the rows were measured under older software.
        digest: SHA-256 over the canonical JSON without trial ids.
    """

    environment: Environment
    world_size: int
    rows: tuple[Row, ...] = ()
    pins: tuple[Pinned, ...] = ()
    failures: tuple[Failure, ...] = ()
    notes: tuple[str, ...] = ()
    digest: str = field(init=False)
    _families: Mapping[tuple[Problem, bool], tuple[Row, ...]] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        def order(item: Row | Failure) -> tuple[Problem, str, str]:
            return (item.problem, str(item.candidate), item.source_hash)

        put = object.__setattr__
        put(self, "rows", tuple(sorted(self.rows, key=order)))
        put(self, "failures", tuple(sorted(self.failures, key=order)))
        put(self, "pins", tuple(sorted(self.pins, key=lambda pin: pin.problem)))
        put(self, "digest", hashlib.sha256(_dump(self._encode(with_ids=False)).encode()).hexdigest())
        families: dict[tuple[Problem, bool], list[Row]] = {}
        for row in self.rows:
            families.setdefault((row.problem.family, row.borrowed), []).append(row)
        put(self, "_families", {family: tuple(rows) for family, rows in families.items()})

    def family_rows(self, problem: Problem, *, borrowed: bool = False) -> tuple[Row, ...]:
        """Rows of all sizes of the family of `problem`: those of this hardware, or those that are borrowed."""
        return self._families.get((problem.family, borrowed), ())

    def _encode(self, *, with_ids: bool) -> dict[str, Any]:
        """Plain JSON values; environments and problems, which repeat, are listed once and referred to by index."""
        environments = _Table([row.environment for row in self.rows])
        items: list[Row | Pinned | Failure] = [*self.rows, *self.pins, *self.failures]
        problems = _Table([item.problem for item in items])
        candidates = _Table([item.candidate for item in items])
        rows = [
            [
                problems.index(row.problem),
                candidates.index(row.candidate),
                environments.index(row.environment),
                *(getattr(row, name) for name in _ROW_FIELDS),
                row.trial_id if with_ids else None,
            ]
            for row in self.rows
        ]
        pins = [[problems.index(p.problem), candidates.index(p.candidate), p.reason, p.layer] for p in self.pins]
        failures = [
            [problems.index(f.problem), candidates.index(f.candidate), f.source_hash, f.status] for f in self.failures
        ]
        return {
            "format": _FORMAT,
            "environment": self.environment.to_dict(),
            "world_size": self.world_size,
            "environments": [environment.to_dict() for environment in environments.items],
            "problems": [problem.to_dict() for problem in problems.items],
            "candidates": [[c.op, c.variant, c.config_dict] for c in candidates.items],
            "rows": rows,
            "pins": pins,
            "failures": failures,
            "notes": list(self.notes),
        }

    def to_json(self) -> str:
        """Canonical JSON; `from_json` gives an equal snapshot with the same digest."""
        return _dump(self._encode(with_ids=True))

    @classmethod
    def from_json(cls, text: str) -> Snapshot:
        """Inverse of `to_json`.

        Raises:
            ValueError: `text` is not a snapshot of this format.
        """
        try:
            return cls._decode(json.loads(text))
        except (KeyError, TypeError, IndexError, AttributeError, ValueError) as error:
            raise ValueError(f"not a tunedcomm snapshot of format {_FORMAT}: {text[:60]!r} ({error})") from None

    @classmethod
    def _decode(cls, data: Any) -> Snapshot:
        if data["format"] != _FORMAT:
            raise ValueError(f"format {data['format']!r}")
        environments = [Environment.from_dict(item) for item in data["environments"]]
        problems = [Problem.from_dict(item) for item in data["problems"]]
        candidates = [Candidate.of(op, variant, config) for op, variant, config in data["candidates"]]
        return cls(
            environment=Environment.from_dict(data["environment"]),
            world_size=data["world_size"],
            rows=tuple(
                Row(
                    problem=problems[problem],
                    candidate=candidates[candidate],
                    environment=environments[environment],
                    trial_id=rest[-1],
                    **dict(zip(_ROW_FIELDS, rest[:-1], strict=True)),
                )
                for problem, candidate, environment, *rest in data["rows"]
            ),
            pins=tuple(
                Pinned(problem=problems[p], candidate=candidates[c], reason=reason, layer=layer)
                for p, c, reason, layer in data["pins"]
            ),
            failures=tuple(
                Failure(problem=problems[p], candidate=candidates[c], source_hash=source_hash, status=status)
                for p, c, source_hash, status in data["failures"]
            ),
            notes=tuple(data["notes"]),
        )


_ROW_FIELDS = (
    "source_hash",
    "latency_p50_us",
    "latency_p10_us",
    "latency_p90_us",
    "samples",
    "baseline_p50_us",
    "final",
    "drift",
    "borrowed",
    "layer",
    "layer_rank",
    "created_at",
)


class _Table:
    """Distinct values in the order of their first appearance."""

    def __init__(self, values: Iterable[Any]) -> None:
        self._positions: dict[Any, int] = {}
        for value in values:
            self._positions.setdefault(value, len(self._positions))

    @property
    def items(self) -> list[Any]:
        return list(self._positions)

    def index(self, value: Any) -> int:
        return self._positions[value]


def _dump(value: object) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)
