"""Trials, runs and pins as plain values, and the checks of what a database says they are."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import Any, Literal, NoReturn, TypeAlias, cast, get_args

from tunedcomm.db.rekey import current_hash
from tunedcomm.errors import TunedCommError
from tunedcomm.hardware import Environment
from tunedcomm.space import Value
from tunedcomm.spec import Candidate, InputKind, Mode, Numerics, Problem, parse_shape

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
class Trial:
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


def fastest(trials: Iterable[Trial]) -> Trial | None:
    """The trial that took least beside the library in its own run, since no machine is equally fast at all times.

    By the latencies themselves if there is one without a library beside it. None of no trials.

    Args:
        trials: `ok` ones.
    """
    ran = [trial for trial in trials if trial.latency_p50_us is not None]
    known = all(trial.variant == "library" or trial.baseline_p50_us is not None for trial in ran)

    def order(trial: Trial) -> tuple[float, str]:
        latency_us = trial.latency_p50_us or 0.0
        library_us = latency_us if trial.variant == "library" else trial.baseline_p50_us
        return latency_us / library_us if known and library_us else latency_us, str(trial.candidate)

    return min(ran, key=order, default=None)


# Stored values back into objects, trusting none of them
#
# A database may come from elsewhere or be damaged. A value that makes no sense raises ValueError here and is counted in
# a `Skipped` by the caller, who goes on without the row.

_MAX_TEXT = 100_000
_MAX_CONFIG = 10_000
_MAX_EXTENTS = 16
_MAX_EXTENT = 2**63
# A thousandth of a nanosecond, and two weeks.
LEAST_US, MOST_US = 1e-6, 1e12
_SURROGATE = re.compile("[\ud800-\udfff]")  # what JSON can name and UTF-8 cannot


@dataclass(slots=True)
class Skipped:
    """Number of rows that made no sense, and the first reason."""

    count: int = 0
    first: str = ""

    def add(self, what: str) -> None:
        self.count += 1
        self.first = self.first or what[:300]


@dataclass(frozen=True, slots=True)
class StoredVariant:
    """A row of table `variant`."""

    op: str
    name: str
    numerics: Numerics
    source_hash: str


def _refuse_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is not JSON")


def text_of(value: object, name: str) -> str:
    """A text of bearable length."""
    if not isinstance(value, str) or len(value) > _MAX_TEXT:
        raise ValueError(f"{name} is not a text: {value!r:.80}")
    return value


def int_of(value: object, name: str, *, low: int = 0) -> int:
    """An integer that is no boolean."""
    if type(value) is not int or value < low:
        raise ValueError(f"{name} is not an integer >= {low}: {value!r:.80}")
    return value


def id_of(value: object) -> int:
    """A row id."""
    return int_of(value, "id", low=-(2**63))


def bool_of(value: object, name: str) -> bool:
    """A boolean, which SQLite stores as an integer."""
    if value not in (0, 1, False, True):
        raise ValueError(f"{name} is not a boolean: {value!r:.80}")
    return bool(value)


def latency_of(value: object, name: str) -> float | None:
    """µs; selection multiplies and divides them, which nothing between these bounds makes 0 or infinite."""
    if value is None:
        return None
    if type(value) is float and LEAST_US <= value <= MOST_US:  # nearly all of them
        return value
    if type(value) not in (int, float) or not LEAST_US <= cast(float, value) <= MOST_US:
        raise ValueError(f"{name} is not a time: {value!r:.80}")
    return float(cast(float, value))


def number_of(value: object, name: str) -> float | None:
    """A number, which may be infinite, or None."""
    if value is not None and type(value) not in (int, float):
        raise ValueError(f"{name} is not a number: {value!r:.80}")
    return None if value is None else float(cast(float, value))


def time_of(value: object) -> datetime:
    """SQLite gives the stored text, other drivers a datetime."""
    if isinstance(value, str):
        value = datetime.fromisoformat(value)
    if not isinstance(value, datetime):
        raise ValueError(f"not a time: {value!r:.80}")
    try:
        return value.replace(tzinfo=timezone.utc) if value.tzinfo is None else value.astimezone(timezone.utc)
    except OverflowError:
        raise ValueError(f"not a time that UTC knows: {value}") from None


def time_text(value: object) -> str:
    """ISO 8601 in UTC of what `time_of` reads; aware times cost as much as the rest of a row."""
    if isinstance(value, str):
        value = datetime.fromisoformat(value)
        if value.tzinfo is None:
            return f"{value.isoformat()}+00:00"
    return time_of(value).isoformat()


def status_of(value: object) -> Status:
    """A status of a trial."""
    if value not in STATUSES:
        raise ValueError(f"unknown status {value!r:.80}")
    return cast(Status, value)


def parse_config(value: object) -> dict[str, Value]:
    """A stored config; whether it lies in its variant's space is for whoever knows the space."""
    text = text_of(value, "config")
    if len(text) > _MAX_CONFIG:
        raise ValueError(f"config is too long: {len(text)} characters")
    try:
        config = json.loads(text, parse_constant=_refuse_constant)
    except RecursionError:
        raise ValueError("config is nested too deeply") from None
    if not isinstance(config, dict) or not all(isinstance(v, (bool, int, str)) for v in config.values()):
        raise ValueError(f"config is not a flat JSON object of int, bool and str: {text!r:.80}")
    if any(_SURROGATE.search(part) for item in config.items() for part in item if isinstance(part, str)):
        raise ValueError(f"config holds half a character, which nothing can print: {text!r:.80}")
    return config


def parse_problem(row: Mapping[str, Any]) -> Problem:
    """The problem of a row, checked like any other."""
    shape = text_of(row["shape"], "shape")
    if shape.count("x") >= _MAX_EXTENTS:
        raise ValueError(f"shape has too many extents: {shape:.80}")
    extents = parse_shape(shape) if shape else ()
    if any(extent >= _MAX_EXTENT for extent in extents):
        raise ValueError(f"shape has an extent of more than 63 bits: {shape:.80}")
    try:
        return Problem(
            op=text_of(row["op"], "op"),
            shape=extents,
            dtype=text_of(row["dtype"], "dtype"),
            world_size=int_of(row["world_size"], "world_size", low=1),
            reduction=text_of(row["reduction"], "reduction"),
            input_kind=cast(InputKind, row["input_kind"]),
            in_place=bool_of(row["in_place"], "in_place"),
            layout=text_of(row["layout"], "layout"),
            scaling=text_of(row["scaling"], "scaling"),
            mode=cast(Mode, row["mode"]),
        )
    except TunedCommError as error:
        raise ValueError(str(error)) from None


def parse_environment(row: Mapping[str, Any]) -> Environment:
    """The environment of a row."""
    texts = {n: text_of(row[n], n) for n in ("gpu", "fabric", "driver", "cuda", "torch", "triton", "nccl", "tunedcomm")}
    ints = {n: int_of(row[n], n) for n in ("num_sms", "compute_capability", "memory_gib", "num_links", "nodes")}
    return Environment.from_dict({**texts, **ints, "multicast": bool_of(row["multicast"], "multicast")})


def parse_variant(row: Mapping[str, Any]) -> StoredVariant:
    """The variant of a row, with the source hash that replaced its own."""
    numerics = row["numerics"]
    if numerics not in ("ordered", "library", "unordered"):
        raise ValueError(f"unknown numerics class {numerics!r:.80}")
    op, name = text_of(row["op"], "op"), text_of(row["name"], "name")
    source_hash = current_hash(op, name, text_of(row["source_hash"], "source_hash"))
    return StoredVariant(op, name, numerics, source_hash)


def check_op(variant: StoredVariant, problem: Problem) -> None:
    """Refuse a variant that is of another op than the problem."""
    if variant.op != problem.op:
        raise ValueError(f"a variant of {variant.op!r:.80} on a problem of {problem.op!r:.80}")


def parse_run(row: Mapping[str, Any]) -> Run:
    """The run of a row."""
    texts = {name: text_of(row[name], name) for name in ("command", "budget", "host", "user", "version")}
    seed, finished_at = row["seed"], row["finished_at"]
    return Run(
        id=id_of(row["id"]),
        seed=None if seed is None else int_of(seed, "seed", low=-(2**63)),
        started_at=time_of(row["started_at"]),
        finished_at=None if finished_at is None else time_of(finished_at),
        **texts,
    )


class Reader:
    """Parses rows of one query, each distinct config once, and counts what it had to skip."""

    def __init__(self) -> None:
        self.skipped = Skipped()
        self._configs: dict[object, dict[str, Value] | str] = {}
        self._candidates: dict[tuple[str, str, object], Candidate] = {}

    def config(self, value: object) -> dict[str, Value]:
        """Like `parse_config`; the caller must not change the result."""
        known = self._configs.get(value)
        if known is None:
            try:
                known = parse_config(value)
            except ValueError as error:
                known = str(error)
            self._configs[value] = known
        if isinstance(known, str):
            raise ValueError(known)
        return known

    def candidate(self, op: str, variant: str, config: object) -> Candidate:
        """The candidate with a stored config; one object for all rows that name it."""
        key = (op, variant, config)
        known = self._candidates.get(key)
        if known is None:
            known = self._candidates[key] = Candidate.of(op, variant, self.config(config))
        return known
