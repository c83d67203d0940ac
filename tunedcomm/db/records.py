"""Trials, runs and pins as plain values, and the checks of what a database says they are."""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from typing import Any, get_args

from sqlalchemy import BigInteger, Boolean, Column, Float, Integer, Text

from tunedcomm.db.rekey import current_hash
from tunedcomm.db.schema import Base, EnvironmentRow, TrialRow, UtcDateTime, VariantRow
from tunedcomm.db.values import (
    STATUSES,
    Status,
    canonical_json,
    check_digest,
    flag_of,
    id_of,
    int_of,
    refuse_constant,
    text_of,
    time_of,
    utc_now,
)
from tunedcomm.hardware import Environment
from tunedcomm.space import Value
from tunedcomm.spec import Candidate, Numerics, Problem

_NUMERICS: tuple[str, ...] = get_args(Numerics)


def config_digest(config: Mapping[str, Value]) -> str:
    """SHA-256 over the config's canonical JSON, first 16 hex digits."""
    return hashlib.sha256(canonical_json(dict(config)).encode()).hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class StoredVariant:
    """A row of table `variant`."""

    op: str
    name: str
    numerics: Numerics
    source_hash: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One candidate tried on one problem in one environment; `schema.TrialRow` explains the fields.

    Attributes:
        config: a point of the variant's space, as a plain dict.
        error: ||out - ref|| / ||ref||. SQLite stores NaN as NULL.
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
        check_one_of(self.numerics, _NUMERICS, "numerics class")
        if not self.variant:
            raise ValueError("a trial needs the name of its variant, got ''")
        if not _is_flat(self.config):
            raise ValueError(f"config {self.config!r}: axes are str and values are int, bool or str")
        if self.created_at.tzinfo is None:
            raise ValueError(
                f"created_at={self.created_at!r} has no time zone; pass an aware one, e.g. in timezone.utc"
            )
        for column in own_columns(TrialRow):
            if column.name != "config":
                typed(column, getattr(self, column.name))
        check_outcome(self.status, self.latency_p10_us, self.latency_p50_us, self.latency_p90_us)

    @property
    def candidate(self) -> Candidate:
        """The variant with its config."""
        return Candidate.of(self.problem.op, self.variant, self.config)

    @property
    def library_us(self) -> float | None:
        """The library's median in the trial's own run."""
        return self.latency_p50_us if self.variant == "library" else self.baseline_p50_us

    @property
    def stored_variant(self) -> StoredVariant:
        """The variant at the state of its source."""
        source_hash = current_hash(self.problem.op, self.variant, self.source_hash)
        return StoredVariant(self.problem.op, self.variant, self.numerics, source_hash)


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
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
class Pin:
    """A person's override of what is dispatched for one problem on machines like `environment`."""

    problem: Problem
    environment: Environment
    candidate: Candidate
    reason: str
    user: str = ""
    created_at: datetime = field(default_factory=utc_now)
    id: int | None = None


# Stored values back into objects, trusting none of them
#
# A database may come from elsewhere or be damaged. An invalid value raises ValueError here. The caller counts the row
# in a `Skipped` and goes on without it.

LATENCIES = ("latency_p10_us", "latency_p50_us", "latency_p90_us", "baseline_p50_us")
# Clocks of hosts differ a little. A trial from further ahead would outrank everything that is measured until then.
_AHEAD = timedelta(days=1)
# A thousandth of a nanosecond, and two weeks: selection multiplies and divides times, which makes none between these
# bounds 0 or infinite.
LEAST_US, MOST_US = 1e-6, 1e12


@dataclass(slots=True)
class Skipped:
    """Invalid rows: table and id to the reason."""

    rows: dict[tuple[str, Any], str] = field(default_factory=dict)

    def add(self, table: str, id_: object, why: object) -> None:
        """Note a row, once."""
        self.rows.setdefault((table, id_), str(why)[:300])

    @property
    def count(self) -> int:
        """Number of rows."""
        return len(self.rows)

    @property
    def first(self) -> str:
        """The first row, with its reason; empty if there is none."""
        return next((f"{table} {id_}: {why}" for (table, id_), why in self.rows.items()), "")


def check_one_of(value: object, allowed: Sequence[str], name: str) -> None:
    """Raise ValueError unless `value` is one of `allowed`."""
    if value not in allowed:
        raise ValueError(f"unknown {name} {value!r:.80}; known are {', '.join(allowed)}")


def check_outcome(status: object, p10: float | None, p50: float | None, p90: float | None) -> None:
    """Refuse an unknown status, an `ok` trial without a median, and percentiles that do not rise."""
    check_one_of(status, STATUSES, "status")
    if status == "ok" and p50 is None:
        raise ValueError("an ok trial without latency_p50_us")
    known = [time for time in (p10, p50, p90) if time is not None]
    if known != sorted(known):
        raise ValueError(f"its percentiles do not rise: p10 {p10}, p50 {p50}, p90 {p90}")


@functools.cache
def own_columns(model: type[Base]) -> tuple[Column[Any], ...]:
    """The columns of values: no ids, no references, no digests of other columns."""
    return tuple(
        column
        for column in Base.metadata.tables[model.__tablename__].columns
        if not column.primary_key and not column.foreign_keys and column.name not in ("digest", "config_digest")
    )


_CHECKS: Mapping[type, Callable[[Any, str], Any]] = {
    BigInteger: id_of,
    Boolean: flag_of,
    Integer: int_of,
    Text: text_of,
    UtcDateTime: time_of,
}


def typed(column: Column[Any], value: Any) -> Any:
    """A stored value in Python's form, checked by the column's type."""
    name, kind = column.name, type(column.type)
    if value is None:
        if not column.nullable:
            raise ValueError(f"{name} is missing")
        return None
    if kind is Float:
        is_number = type(value) in (int, float)
        if name in LATENCIES and not (is_number and LEAST_US <= value <= MOST_US):
            raise ValueError(f"{name} is not a time in µs: {value!r:.80}")
        if not is_number:  # it may be infinite
            raise ValueError(f"{name} is not a number: {value!r:.80}")
        return float(value)
    return _CHECKS[kind](value, name)


def parse_row(model: type[Base], row: Mapping[str, Any]) -> dict[str, Any]:
    """The values of a row's own columns."""
    return {column.name: typed(column, row.get(column.name)) for column in own_columns(model)}


def _is_flat(config: object) -> bool:
    return isinstance(config, dict) and all(
        isinstance(axis, str) and isinstance(value, (bool, int, str)) for axis, value in config.items()
    )


def parse_config(value: object) -> dict[str, Value]:
    """A stored config; the caller checks that it lies in its variant's space."""
    text = text_of(value, "config")
    try:
        config: dict[str, Value] = json.loads(text, parse_constant=refuse_constant)
    except RecursionError:
        raise ValueError("config is nested too deeply") from None
    if not _is_flat(config):
        raise ValueError(f"config is not a flat JSON object of int, bool and str: {text!r:.80}")
    json.dumps(config, ensure_ascii=False).encode()  # half a character, which nothing can print, raises ValueError
    return config


def parse_environment(row: Mapping[str, Any]) -> Environment:
    """The environment of a row; `digest` is checked where the row has one."""
    environment = Environment.from_dict(parse_row(EnvironmentRow, row))
    check_digest(row.get("digest", environment.digest), environment.digest)
    return environment


def parse_variant(row: Mapping[str, Any]) -> StoredVariant:
    """The variant of a row, with the source hash that replaced its own."""
    variant = StoredVariant(**parse_row(VariantRow, row))
    check_one_of(variant.numerics, _NUMERICS, "numerics class")
    if not variant.name:
        raise ValueError("a variant without a name")
    return replace(variant, source_hash=current_hash(variant.op, variant.name, variant.source_hash))


def check_op(variant: StoredVariant, problem: Problem) -> None:
    """Refuse a variant that is of another op than the problem."""
    if variant.op != problem.op:
        raise ValueError(f"a variant of {variant.op!r:.80} on a problem of {problem.op!r:.80}")


class Reader:
    """Parses the rows of one query, each distinct config once, and counts invalid rows.

    Attributes:
        skipped: invalid rows.
        latest: no trial is from after this time.
        config: like `parse_config`; the caller must not change the result.
        candidate: op, variant and stored config to a candidate, one object for all rows that name it.
    """

    def __init__(self) -> None:
        self.skipped = Skipped()
        self.latest = utc_now() + _AHEAD
        self.config = functools.cache(parse_config)
        self.candidate = functools.cache(lambda op, variant, config: Candidate.of(op, variant, self.config(config)))
        self._digest = functools.cache(lambda config: config_digest(self.config(config)))

    def trial(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """The values of a trial's own columns that the row has, with the config parsed; do not change the config.

        A trial that contradicts itself is refused: every reader leaves it out, and `db check` reports it.
        """
        values = {
            column.name: typed(column, row[column.name]) for column in own_columns(TrialRow) if column.name in row
        }
        values["config"] = self.config(row["config"])
        check_outcome(values["status"], *(values[name] for name in LATENCIES[:3]))
        if values["created_at"] > self.latest:
            raise ValueError(f"it was made in the future, {values['created_at']}, and would outrank what comes")
        if row["config_digest"] != self._digest(row["config"]):
            raise ValueError(f"its config_digest is {row['config_digest']!r:.40}, not of {row['config']:.80}")
        return values
