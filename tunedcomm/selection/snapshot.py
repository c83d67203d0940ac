"""The immutable table that a group of ranks agrees on, and that selection reads. Pure: no database, no torch."""

from __future__ import annotations

import gc
import hashlib
import json
import math
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from fnmatch import fnmatchcase
from operator import attrgetter
from typing import Any, Generic, TypeVar

from tunedcomm.hardware import SOFT_FIELDS, Environment, Fabric
from tunedcomm.spec import Candidate, Problem

_FORMAT = 2

T = TypeVar("T")


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
        put = object.__setattr__
        problems: Numbers[Problem] = Numbers()
        candidates: Numbers[Candidate] = Numbers()
        items: list[Row | Failure] = [*self.rows, *self.failures]
        numbered = [(problems.of(item.problem), candidates.of(item.candidate), item) for item in items]
        # Thousands of rows share some hundred problems and candidates: those are compared, rows by their places.
        place = _places(problems.values, key=lambda problem: problem)
        other = _places(candidates.values, key=str)
        numbered.sort(key=lambda item: (place[item[0]], other[item[1]], item[2].source_hash))
        put(self, "rows", tuple(item for _, _, item in numbered if isinstance(item, Row)))
        put(self, "failures", tuple(item for _, _, item in numbered if isinstance(item, Failure)))
        put(self, "pins", tuple(sorted(self.pins, key=lambda pin: pin.problem)))
        put(self, "digest", hashlib.sha256(_dump(self._encode(with_ids=False)).encode()).hexdigest())
        family_of = [problem.family for problem in problems.values]
        families: dict[tuple[Problem, bool], list[Row]] = {}
        last: tuple[int, bool] | None = None
        rows: list[Row] = []
        for problem, _, item in numbered:
            if not isinstance(item, Row):
                continue
            if (problem, item.borrowed) != last:
                last, rows = (problem, item.borrowed), families.setdefault((family_of[problem], item.borrowed), [])
            rows.append(item)
        put(self, "_families", {family: tuple(rows) for family, rows in families.items()})

    def family_rows(self, problem: Problem, *, borrowed: bool = False) -> tuple[Row, ...]:
        """Rows of all sizes of the family of `problem`: those of this hardware, or those that are borrowed."""
        return self._families.get((problem.family, borrowed), ())

    def _encode(self, *, with_ids: bool) -> dict[str, Any]:
        """Plain JSON values; what repeats is listed once and referred to by index, and rows are listed by column."""
        environments: Numbers[Environment] = Numbers()
        problems: Numbers[Problem] = Numbers()
        candidates: Numbers[Candidate] = Numbers()
        texts: Numbers[str] = Numbers()
        numbers: dict[str, Numbers[Any]] = {"problem": problems, "candidate": candidates, "environment": environments}
        numbers |= dict.fromkeys(_REPEATED, texts)
        rows: dict[str, Any] = {}
        for name in _ROW_FIELDS:
            column = map(attrgetter(name), self.rows)
            rows[name] = list(map(numbers[name].of, column) if name in numbers else column)
        for name in _TIMES:
            rows[name] = _pack(rows[name])
        if with_ids:
            rows["trial_id"] = [row.trial_id for row in self.rows]
        pins = [(problems.of(p.problem), candidates.of(p.candidate), p.reason, p.layer) for p in self.pins]
        failures = [
            (problems.of(f.problem), candidates.of(f.candidate), f.source_hash, f.status) for f in self.failures
        ]
        return {
            "format": _FORMAT,
            "environment": self.environment.to_dict(),
            "world_size": self.world_size,
            "environments": [environment.to_dict() for environment in environments.values],
            "problems": list(map(_problem_fields, problems.values)),
            "candidates": [[c.op, c.variant, c.config_dict] for c in candidates.values],
            "texts": texts.values,
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
        except (KeyError, TypeError, IndexError, AttributeError, ValueError, struct.error) as error:
            raise ValueError(f"not a tunedcomm snapshot of format {_FORMAT}: {text[:60]!r} ({error})") from None

    @classmethod
    def _decode(cls, data: Any) -> Snapshot:
        if data["format"] != _FORMAT:
            raise ValueError(f"format {data['format']!r}")
        environments = [Environment.from_dict(item) for item in data["environments"]]
        problems = [Problem.from_dict(dict(zip(_PROBLEM, item, strict=True))) for item in data["problems"]]
        candidates = [Candidate.of(op, variant, config) for op, variant, config in data["candidates"]]
        listed: dict[str, Any] = {"problem": problems, "candidate": candidates, "environment": environments}
        listed |= dict.fromkeys(_REPEATED, data["texts"])
        columns: dict[str, Any] = {
            name: [listed[name][number] for number in column] if name in listed else column
            for name, column in data["rows"].items()
        }
        columns |= {name: _unpack(columns[name]) for name in _TIMES}
        return cls(
            environment=Environment.from_dict(data["environment"]),
            world_size=data["world_size"],
            rows=tuple(
                Row(**dict(zip(columns, values, strict=True))) for values in zip(*columns.values(), strict=True)
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


_REPEATED = ("source_hash", "layer")
_TIMES = ("latency_p50_us", "latency_p10_us", "latency_p90_us", "baseline_p50_us")
_ROW_FIELDS = (
    "problem",
    "candidate",
    "environment",
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


_PROBLEM = tuple(item.name for item in fields(Problem))
_problem_fields = attrgetter(*_PROBLEM)


class Numbers(Generic[T]):
    """Numbers equal values alike, in the order of their first appearance; compares each object only once.

    Problems and candidates are slow to compare, and thousands of rows refer to the same few hundred objects.
    """

    __slots__ = ("_by_identity", "_by_value", "_kept", "values")

    def __init__(self) -> None:
        self.values: list[T] = []
        self._by_value: dict[T, int] = {}
        self._by_identity: dict[int, int] = {}
        # While an object is kept, no other one has its identity.
        self._kept: list[T] = []

    def of(self, value: T) -> int:
        """The value's number."""
        try:
            return self._by_identity[id(value)]
        except KeyError:
            number = self._by_value.setdefault(value, len(self.values))
            if number == len(self.values):
                self.values.append(value)
            self._kept.append(value)
            self._by_identity[id(value)] = number
            return number


def _pack(times: Sequence[float | None]) -> str:
    """Times as the hexadecimal digits of doubles: to write them as decimals takes longer than all the rest."""
    return struct.pack(f"<{len(times)}d", *(math.nan if time is None else time for time in times)).hex()


def _unpack(text: str) -> list[float | None]:
    """Inverse of `_pack`."""
    return [None if math.isnan(time) else time for (time,) in struct.iter_unpack("<d", bytes.fromhex(text))]


def _places(values: Sequence[T], key: Callable[[T], Any]) -> list[int]:
    """By number of a value, its place among them all in the order of `key`."""
    places = [0] * len(values)
    for place, number in enumerate(sorted(range(len(values)), key=lambda number: key(values[number]))):
        places[number] = place
    return places


def _dump(value: object) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


@contextmanager
def gc_paused() -> Iterator[None]:
    """Pause the garbage collector while something is loaded that is kept, in a fraction of a second.

    Reading 10,000 rows, or importing a library, makes so many objects that the collector looks through all that the
    process holds, and finds nothing: a quarter of the time, more in a process that holds torch.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


# Rows of other hardware, which the user may allow to stand in.

_PATTERN = frozenset("*?[")


@dataclass(frozen=True, slots=True)
class Loan:
    """A stored environment of other hardware that the user named.

    Attributes:
        environment: where its rows were measured.
        objection: why they cannot serve here, None if they can.
    """

    environment: Environment
    objection: str | None


def matches(name: str, environment: Environment) -> bool:
    """True if `name` is part of the GPU's name, a pattern that it fits, or the beginning of the digest."""
    wanted = name.strip().lower()
    gpu = environment.gpu.lower()
    if _PATTERN & set(wanted):
        return fnmatchcase(gpu, wanted)
    return wanted in gpu or environment.digest.startswith(wanted)


def why_not_borrowed(here: Environment, there: Environment) -> str | None:
    """Why rows that were measured `there` cannot serve `here` however much the user may want it, or None.

    GPU model, number of SMs, memory and number of links may differ: kernels are ranked much alike then. Where the
    architecture or the way from GPU to GPU is another one, the ranking is too.
    """
    fields = [
        ("compute capability", here.compute_capability, there.compute_capability),
        ("kind of fabric", Fabric.parse(here.fabric).kind_in_words, Fabric.parse(there.fabric).kind_in_words),
        ("multicast", _yes(here.multicast), _yes(there.multicast)),
        ("number of hosts", here.nodes, there.nodes),
    ]
    different = [f"{name} is {mine} here and {theirs} there" for name, mine, theirs in fields if mine != theirs]
    return "; ".join(different) or None


def _yes(value: bool) -> str:
    return "on" if value else "off"


def loans(here: Environment, names: Sequence[str], stored: Iterable[Environment]) -> list[Loan]:
    """Stored environments of other hardware that any of the names means, each once, in the order of `stored`."""
    found: dict[str, Loan] = {}
    for environment in stored:
        if environment.hard_key != here.hard_key and any(matches(name, environment) for name in names):
            found.setdefault(environment.digest, Loan(environment, why_not_borrowed(here, environment)))
    return list(found.values())
