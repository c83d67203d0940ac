"""The immutable table that a group of ranks agrees on, and that selection reads. Pure: no database, no torch."""

from __future__ import annotations

import gc
import hashlib
import itertools
import json
import math
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from fnmatch import fnmatchcase
from operator import attrgetter
from typing import Any, Generic, Literal, TypeAlias, TypeVar

from tunedcomm.hardware import SOFT_FIELDS, Environment, Fabric
from tunedcomm.settings import SIBLINGS
from tunedcomm.spec import Candidate, Problem

_FORMAT = 3

T = TypeVar("T")


def is_drift(local: Environment, other: Environment) -> bool:
    """True if other software was measured. tunedcomm's own version is no drift: source hashes cover its kernels."""
    return any(getattr(local, name) != getattr(other, name) for name in SOFT_FIELDS if name != "tunedcomm")


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One `ok` trial, as far as selection needs it.

    Attributes:
        source_hash: the variant's source hash when it ran.
        environment: where it ran; equal to the snapshot's in every hard field unless `borrowed`.
        latency_p50_us: median of the slowest rank; its spread is None where unknown.
        samples: iterations behind the percentiles; 0 where unknown.
        baseline_p50_us: the library in the same interleaved run, None where unknown.
        drift: the software differs from the snapshot's environment.
        borrowed: measured on other hardware that the user allows where nothing was measured on this.
        layer_rank: 0 for the nearest layer.
        created_at: ISO 8601 in UTC.
        trial_id: row id within its layer; not part of the digest, and no decision depends on it.
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


# Problems of one dtype at which a borrowed candidate is checked, and how many of one family are enough if it passes.
_MAX_CHECKS, _ENOUGH_PASSED = 64, 3
CheckStatus: TypeAlias = Literal["passed", "slower", "failed", "skipped"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """The check of a borrowed candidate on this machine, made before its first call at `problem`.

    Attributes:
        status: `failed` rules the candidate out at every problem of the dtype; `slower` (than the library here) and
            `skipped` (this process could not check it) at this problem alone.
        why: the reason, "" where it passed.
    """

    problem: Problem
    candidate: Candidate
    source_hash: str
    status: CheckStatus
    why: str = ""

    @property
    def key(self) -> tuple[Candidate, str, str]:
        """The checked code, at every problem of one dtype."""
        return self.candidate, self.source_hash, self.problem.dtype


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Rows of one environment and world size, in one order, under one digest.

    Two snapshots with equal digests give equal decisions for every problem. Rows, pins and failures are sorted when
    the snapshot is made, so the order in which they were stored or loaded does not matter.

    Attributes:
        environment: the environment they were loaded for.
        rows: at most one for each (problem, candidate, source hash).
        pins: at most one a problem.
        notes: warnings for a person, e.g. that the rows were measured under older software.
        checks: results of the checks of borrowed candidates on this machine, oldest first.
        digest: SHA-256 over the contents without trial ids.
        arranged: tables that choices have made of the rows, see `families`.
    """

    environment: Environment
    world_size: int
    rows: tuple[Row, ...] = ()
    pins: tuple[Pinned, ...] = ()
    failures: tuple[Failure, ...] = ()
    notes: tuple[str, ...] = ()
    checks: tuple[Check, ...] = ()
    digest: str = field(init=False)
    arranged: dict[Any, Any] = field(init=False, repr=False, compare=False)
    _families: Mapping[str, Mapping[tuple[Problem, bool], tuple[Row, ...]]] = field(
        init=False, repr=False, compare=False
    )
    _variants: Mapping[str, tuple[tuple[str, str], ...]] = field(init=False, repr=False, compare=False)
    _checks: Mapping[tuple[Candidate, str, str], Mapping[Problem, Check]] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        put = object.__setattr__
        problems: Numbers[Problem] = Numbers()
        candidates: Numbers[Candidate] = Numbers()
        rows = [(problems.of(row.problem), candidates.of(row.candidate), row) for row in self.rows]
        failures = [(problems.of(f.problem), candidates.of(f.candidate), f) for f in self.failures]
        # Thousands of rows share some hundred problems and candidates: only these are compared with each other.
        place_of_problem = _places(problems.values, key=lambda problem: problem)
        place_of_candidate = _places(candidates.values, key=str)

        def place(numbered: tuple[int, int, Row | Failure]) -> tuple[int, int, str]:
            problem, candidate, item = numbered
            return place_of_problem[problem], place_of_candidate[candidate], item.source_hash

        rows.sort(key=place)
        put(self, "rows", tuple(row for _, _, row in rows))
        put(self, "failures", tuple(failure for _, _, failure in sorted(failures, key=place)))
        put(self, "pins", tuple(sorted(self.pins, key=lambda pin: pin.problem)))
        put(self, "digest", self._digest())
        put(self, "arranged", {})
        family_of = [problem.family for problem in problems.values]
        families: dict[str, dict[tuple[Problem, bool], list[Row]]] = {}
        for (problem, borrowed), group in itertools.groupby(
            rows, key=lambda numbered: (numbered[0], numbered[2].borrowed)
        ):
            of_op = families.setdefault(family_of[problem].op, {})
            of_op.setdefault((family_of[problem], borrowed), []).extend(row for _, _, row in group)
        frozen = {op: {family: tuple(found) for family, found in of_op.items()} for op, of_op in families.items()}
        put(self, "_families", frozen)
        named: dict[str, set[tuple[str, str]]] = {}
        for problem, candidate in {(problem, candidate) for problem, candidate, _ in (*rows, *failures)}:
            of = candidates.values[candidate]
            named.setdefault(problems.values[problem].op, set()).add((of.op, of.variant))
        put(self, "_variants", {op: tuple(sorted(found)) for op, found in named.items()})
        checks, known = self.checks, dict[Any, Mapping[Problem, Check]]()
        put(self, "_checks", known)
        for check in checks:
            self._add(check, known)

    def _add(self, check: Check, known: dict[Any, Mapping[Problem, Check]]) -> None:
        """Take a check into the digest and into `known`, the checks before it."""
        known[check.key] = {**known.get(check.key, {}), check.problem: check}
        values = [
            list(_problem_fields(check.problem)),
            str(check.candidate),
            check.source_hash,
            check.status,
            check.why,
        ]
        digest = hashlib.sha256(f"{self.digest} {json.dumps(values)}".encode()).hexdigest()
        object.__setattr__(self, "digest", digest)

    def with_checks(self, *checks: Check) -> Snapshot:
        """This snapshot with more checks; the tables that choices have made are shared."""
        made = object.__new__(Snapshot)
        for item in fields(self):
            object.__setattr__(made, item.name, getattr(self, item.name))
        known = dict(self._checks)
        object.__setattr__(made, "checks", (*self.checks, *checks))
        object.__setattr__(made, "_checks", known)
        for check in checks:
            made._add(check, known)
        return made

    def check_of(self, problem: Problem, candidate: Candidate, source_hash: str) -> Check | None:
        """The check that counts at `problem`: a failure at any problem of its dtype, else the problem's own check."""
        known = self._checks.get((candidate, source_hash, problem.dtype), {})
        failed = next((check for check in known.values() if check.status == "failed"), None)
        return failed or known.get(problem)

    def is_unchecked(self, problem: Problem, candidate: Candidate, source_hash: str) -> bool:
        """True if a borrowed candidate must be checked before its first call at `problem`.

        Once it has passed at `_ENOUGH_PASSED` problems of the family, or was checked at `_MAX_CHECKS`, no further one
        needs a check: programs whose sizes never repeat must not pay for one at each size.
        """
        known = self._checks.get((candidate, source_hash, problem.dtype), {})
        if len(known) >= _MAX_CHECKS or self.check_of(problem, candidate, source_hash) is not None:
            return False
        family = problem.family
        passed = sum(each.status == "passed" and each.problem.family == family for each in known.values())
        return passed < _ENOUGH_PASSED

    def was_checked(self, candidate: Candidate, source_hash: str, dtype: str) -> bool:
        """True if the candidate was checked at some problem of the dtype."""
        known = self._checks.get((candidate, source_hash, dtype), {})
        return any(check.status != "skipped" for check in known.values())

    def families(self, op: str) -> Mapping[tuple[Problem, bool], tuple[Row, ...]]:
        """The op's rows of all sizes by family, a problem without a shape, and by whether they are borrowed."""
        return self._families.get(op, {})

    def family_rows(self, problem: Problem) -> tuple[Row, ...]:
        """Rows of this hardware, of all sizes of the family of `problem`."""
        return self.families(problem.op).get((problem.family, False), ())

    def variants(self, op: str) -> tuple[tuple[str, str], ...]:
        """The variants, as op and name, of rows and failures at problems of `op`."""
        return self._variants.get(op, ())

    def __reduce__(self) -> tuple[type[Snapshot], tuple[Any, ...]]:
        """Pickle the contents alone: the digest of a snapshot that arrives is computed anew from what arrived."""
        contents = (self.environment, self.world_size, self.rows, self.pins, self.failures, self.notes, self.checks)
        return Snapshot, contents

    def _digest(self) -> str:
        text = json.dumps(self._contents(), sort_keys=True, separators=(",", ":"), allow_nan=False)
        return hashlib.sha256(text.encode()).hexdigest()

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values: all but the checks, with the digest."""
        contents = self._contents()
        contents["rows"]["trial_id"] = [row.trial_id for row in self.rows]
        return {**contents, "digest": self.digest}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Snapshot:
        """Inverse of `to_dict`; ValueError for contents of another digest, and any error for invalid values."""
        names = [item.name for item in fields(Problem)]
        of_problems = (dict(zip(names, values, strict=True)) for values in data["problems"])
        shared: dict[str, list[Any]] = {
            "environments": list(map(Environment.from_dict, data["environments"])),
            "problems": list(map(Problem.from_dict, of_problems)),
            "candidates": [Candidate.of(*values) for values in data["candidates"]],
            "texts": data["texts"],
        }
        tables: dict[str, Any] = {}
        for name, kind_of_row in _TABLES.items():
            columns: dict[str, Any] = dict(data[name])
            for column, values in columns.items():
                if column in _SHARED:
                    columns[column] = list(map(shared[_SHARED[column]].__getitem__, values))
                elif column in _TIMES:
                    columns[column] = _unpacked(values)
            rows = zip(*columns.values(), strict=True)
            tables[name] = tuple(kind_of_row(**dict(zip(columns, row, strict=True))) for row in rows)
        environment = Environment.from_dict(data["environment"])
        made = cls(environment, data["world_size"], notes=tuple(data["notes"]), **tables)
        if made.digest != data["digest"]:
            raise ValueError(f"the snapshot has the digest {made.digest}, and was written with {data['digest']!r:.80}")
        return made

    def _contents(self) -> dict[str, Any]:
        """Each table by column, with values that repeat as numbers into one list of each kind; no ids of trials."""
        shared: dict[str, Numbers[Any]] = {kind: Numbers() for kind in sorted({*_SHARED.values()})}
        tables: dict[str, dict[str, Any]] = {}
        for name, kind_of_row in _TABLES.items():
            columns: dict[str, Any] = {}
            tables[name] = columns
            for column in (item.name for item in fields(kind_of_row)):
                values = map(attrgetter(column), getattr(self, name))
                if column in _SHARED:
                    columns[column] = list(map(shared[_SHARED[column]].of, values))
                elif column in _TIMES:
                    columns[column] = _packed(list(values))
                elif column != "trial_id":
                    columns[column] = list(values)
        return {
            "format": _FORMAT,
            "environment": self.environment.to_dict(),
            "world_size": self.world_size,
            "notes": list(self.notes),
            "environments": [environment.to_dict() for environment in shared["environments"].values],
            "problems": list(map(_problem_fields, shared["problems"].values)),
            "candidates": [[c.op, c.variant, c.config_dict] for c in shared["candidates"].values],
            "texts": shared["texts"].values,
            **tables,
        }


_TABLES: Mapping[str, type[Any]] = {"rows": Row, "pins": Pinned, "failures": Failure}
# Columns whose values repeat, and the list that holds them.
_SHARED = {
    "problem": "problems",
    "candidate": "candidates",
    "environment": "environments",
    "source_hash": "texts",
    "layer": "texts",
}
_TIMES = frozenset({"latency_p50_us", "latency_p10_us", "latency_p90_us", "baseline_p50_us"})
_problem_fields = attrgetter(*(item.name for item in fields(Problem)))


def _packed(times: Sequence[float | None]) -> str:
    """Times as the hexadecimal digits of doubles: to write them as decimals takes longer than all the rest."""
    return struct.pack(f"<{len(times)}d", *(math.nan if time is None else time for time in times)).hex()


def _unpacked(times: str) -> list[float | None]:
    """Inverse of `_packed`."""
    return [None if math.isnan(time) else time for (time,) in struct.iter_unpack("<d", bytes.fromhex(times))]


class Numbers(Generic[T]):
    """Numbers of equal values, in the order of their first appearance; each object is compared only once.

    Problems and candidates are slow to compare, and thousands of rows refer to the same few hundred objects.
    """

    def __init__(self) -> None:
        self.values: list[T] = []
        self._by_value: dict[T, int] = {}
        # With the object: while it is kept, no other one has its identity.
        self._by_identity: dict[int, tuple[int, T]] = {}

    def of(self, value: T) -> int:
        """The value's number."""
        known = self._by_identity.get(id(value))
        if known is not None:
            return known[0]
        index = self._by_value.setdefault(value, len(self.values))
        if index == len(self.values):
            self.values.append(value)
        self._by_identity[id(value)] = index, value
        return index


def _places(values: Sequence[T], key: Callable[[T], Any]) -> list[int]:
    """By number of a value, its place among them all in the order of `key`."""
    places = [0] * len(values)
    for place, index in enumerate(sorted(range(len(values)), key=lambda index: key(values[index]))):
        places[index] = place
    return places


@contextmanager
def gc_paused() -> Iterator[None]:
    """Pause the garbage collector while long-lived objects are made, in a fraction of a second.

    Reading 10,000 rows or importing a library makes so many objects that the collector scans the whole process and
    finds nothing to free: a quarter of the time, more in a process that holds torch.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


# Rows of other hardware that serve here.


def is_sibling(local: Environment, other: Environment) -> bool:
    """True if two GPUs differ in the model's name alone, of all that decides where rows count."""
    return not local.is_host and set(local.differences(other)) == {"gpu"}


def matches(name: str, environment: Environment) -> bool:
    """True if `name` is part of the GPU's name, a pattern that it fits, or the beginning of the digest."""
    wanted = name.strip().lower()
    gpu = environment.gpu.lower()
    if set("*?[") & set(wanted):
        return fnmatchcase(gpu, wanted)
    return wanted in gpu or environment.digest.startswith(wanted)


def why_not_borrowed(local: Environment, other: Environment) -> str | None:
    """The reason why rows measured in `other` cannot be borrowed in `local`, or None.

    GPU model, number of SMs, memory and number of links may differ, because they hardly change the ranking of kernels.
    Another architecture or another fabric does change it.
    """
    kinds = [str(replace(Fabric.parse(environment.fabric), num_links=0)) for environment in (local, other)]
    fields = [
        ("compute capability", local.compute_capability, other.compute_capability),
        ("kind of fabric", *kinds),
        ("multicast", *("on" if environment.multicast else "off" for environment in (local, other))),
        ("number of hosts", local.nodes, other.nodes),
    ]
    different = [
        f"{name} is {value} here and {other_value} there" for name, value, other_value in fields if value != other_value
    ]
    return "; ".join(different) or None


def loans(local: Environment, names: Sequence[str], stored: Iterable[Environment]) -> dict[Environment, str | None]:
    """Stored environments of other hardware that the names mean, each with why it cannot serve here, or None."""
    found: dict[Environment, str | None] = {}
    for other in stored:
        if SIBLINGS in names and is_sibling(local, other):
            found[other] = None
        elif other.hard_key != local.hard_key and any(matches(name, other) for name in names if name != SIBLINGS):
            found[other] = why_not_borrowed(local, other)
    return found
