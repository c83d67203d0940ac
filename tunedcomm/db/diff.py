"""The answers of databases for the problems that they hold, and the differences between two of them.

A database is asked by itself, by selection without the kernels of this tunedcomm: every candidate counts as feasible,
and of each variant the newest source that the database holds counts as current. So two databases can be compared on any
machine, and a database still gives its answers after its kernels have changed.
"""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias, TypeVar

from tunedcomm.db import query
from tunedcomm.db.engine import connected, create_file
from tunedcomm.db.layers import Layer, load_snapshot
from tunedcomm.db.records import Reader, StoredVariant
from tunedcomm.db.store import Database
from tunedcomm.db.stream import absorb, as_database
from tunedcomm.hardware import Environment
from tunedcomm.selection.score import noise
from tunedcomm.selection.select import Catalog, choose
from tunedcomm.spec import Candidate, Numerics, Problem

Kind: TypeAlias = Literal["only before", "only after", "winner", "latency"]
K = TypeVar("K")
V = TypeVar("V")
_Pinned: TypeAlias = tuple[Candidate, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The candidate that runs for a problem.

    Attributes:
        candidate: what runs.
        source: the rule that chose it.
        latency_us: its expected latency, None if unknown.
        library_us: the library's expected latency.
        noise: relative uncertainty of `latency_us`; 0 where nothing was measured.
    """

    candidate: Candidate
    source: str
    latency_us: float | None
    library_us: float | None
    noise: float = 0.0

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        named = {"variant": self.candidate.variant, "config": self.candidate.config_dict}
        return named | {name: getattr(self, name) for name in ("source", "latency_us", "library_us", "noise")}


class StoredCatalog(Catalog):
    """A database that is asked by itself, as it was when this was made.

    Attributes:
        schema: its revision.
        environments: environments with trials, the one measured last first.
        world_sizes: of its problems.
        variants, sources: the newest source of each op and variant, and its hash.
        finals: number of good finals of each source.
        pins: candidate and reason by problem and environment.

    Raises:
        DatabaseError: the database cannot be read.
    """

    def __init__(self, file: str | Path) -> None:
        self._file = str(file)
        with Database.open(file, readonly=True) as database, database.reading() as connection:
            self.schema, reader = database.schema_version, Reader()
            stored = query.load_environments(connection, reader)
            variants = query.load_variants(connection, reader)
            self.variants = {(one.op, one.name): one for _, one in sorted(variants.items())}
            self.sources = {key: one.source_hash for key, one in self.variants.items()}
            self.finals, last = Counter[StoredVariant](), dict[Environment, str]()
            for group in query.tally(connection):
                if group.status == "ok" and (variant := variants.get(group.variant_id)) is not None:
                    self.finals[variant] += group.finals
                if (environment := stored.get(group.environment_id)) is not None:
                    last[environment] = max(str(group.last), last.get(environment, ""))
            self.environments = sorted(last, key=last.__getitem__, reverse=True)
            self.world_sizes = {problem.world_size for problem in query.load_problems(connection, reader).values()}
            pins = query.pins(connection, reader)
            self.pins = {(pin.problem, pin.environment): (pin.candidate, pin.reason) for pin in pins}

    def checker(self, candidate: Candidate, *, by_name: bool) -> Callable[[Problem], str | None]:
        """Every stored candidate can run."""
        return lambda problem: None

    def source_hash(self, op: str, variant: str) -> str | None:
        """The newest stored source."""
        return self.sources.get((op, variant))

    def numerics(self, op: str, variant: str) -> Numerics:
        """Numerics class; of a variant that was never measured there are only pins, which a person made knowingly."""
        return self.variants[op, variant].numerics if (op, variant) in self.variants else "ordered"

    def answers(self, environment: Environment, world_size: int) -> dict[Problem, Answer]:
        """Decide every problem that the database holds for `world_size` ranks on machines like `environment`.

        Raises:
            DatabaseError: the database cannot be read.
        """
        snapshot = load_snapshot(environment, world_size, layers=[Layer("user", self._file)], strict=True)
        rows = {(row.problem, row.candidate, row.source_hash): row for row in snapshot.rows}
        found = {}
        for problem in sorted({*(row.problem for row in snapshot.rows), *(pin.problem for pin in snapshot.pins)}):
            decision = choose(snapshot, problem, self)
            candidate = decision.candidate
            row = rows.get((problem, candidate, self.source_hash(problem.op, candidate.variant) or ""))
            found[problem] = Answer(
                candidate=candidate,
                source=decision.source,
                latency_us=decision.latency_us,
                library_us=decision.library_us,
                noise=0.0 if row is None else noise(row),
            )
        return found


# Comparison


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A problem with different answers.

    Attributes:
        problem: what is asked.
        kind: `only before` or `only after` where one of the databases has nothing on it; `winner` where another
            candidate runs; `latency` where the same one takes another time, by more than the noise of both.
        before, after: what runs, None where nothing is known.
    """

    problem: Problem
    kind: Kind
    before: Answer | None
    after: Answer | None

    @property
    def ratio(self) -> float | None:
        """Speed-up over before; None where a latency is not known."""
        one = None if self.before is None else self.before.latency_us
        other = None if self.after is None else self.after.latency_us
        return None if one is None or other is None else one / other


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Answers of two databases on one kind of machine for one number of ranks.

    Attributes:
        before, after: the environments that were asked for; they differ in software at most.
        world_size: ranks.
        problems: how many problems were asked, of both databases together.
        changes: problems with different answers.
    """

    before: Environment
    after: Environment
    world_size: int
    problems: int
    changes: tuple[Change, ...]

    @property
    def drift(self) -> list[str]:
        """Soft fields in which the environments differ, in words."""
        return self.after.drift(self.before)


class Retired(NamedTuple):
    """A variant of which the databases know another newest source.

    Attributes:
        before, after: its source hashes, None where a database does not know the variant.
        finals: finals of the former source in the former database, which say nothing about the new one.
    """

    before: str | None
    after: str | None
    finals: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """The difference between two databases; the values of both are in a pair.

    Attributes:
        before, after: their names.
        schemas: their schema revisions.
        trials: how many trials they hold.
        trials_only: how many of these the other one does not hold.
        environments_only: environments with trials in one of them alone.
        comparisons: what they answer.
        pins: pins that differ, by problem and environment: candidate and reason in each, None where there is none.
        retired: variants whose sources differ, by op and name.
    """

    before: str
    after: str
    schemas: tuple[str, str]
    trials: tuple[int, int]
    trials_only: tuple[int, int]
    environments_only: tuple[tuple[Environment, ...], tuple[Environment, ...]]
    comparisons: tuple[Comparison, ...]
    pins: Mapping[tuple[Problem, Environment], tuple[_Pinned | None, _Pinned | None]]
    retired: Mapping[tuple[str, str], Retired]

    @property
    def is_empty(self) -> bool:
        """True if both hold the same trials and pins, under the same schema, and so answer the same."""
        same = self.schemas[0] == self.schemas[1] and not any(self.trials_only) and not any(self.environments_only)
        return same and not self.retired and self.answers_alike

    @property
    def answers_alike(self) -> bool:
        """True if both answer every problem alike and hold the same pins, whatever else their rows are."""
        return not self.pins and not any(c.changes for c in self.comparisons)


def diff_databases(before: str | Path, after: str | Path) -> Difference:
    """Compare two databases: SQLite files, files of JSON lines, or URLs of servers. Neither is changed.

    Both are asked as a machine would ask them that has the hardware and the software of their trials: in every
    environment that both hold, and on each kind of hardware in the environment that each of them measured last.

    Raises:
        DatabaseError: one of them cannot be read.
    """
    with tempfile.TemporaryDirectory(prefix="tunedcomm-diff.") as folder:
        with connected(create_file(Path(folder) / "union.db")) as connection:
            first, second = absorb(connection, before), absorb(connection, after)
        old = StoredCatalog(as_database(before, Path(folder) / "before.db"))
        new = StoredCatalog(as_database(after, Path(folder) / "after.db"))
        return Difference(
            before=first.source,
            after=second.source,
            schemas=(old.schema, new.schema),
            trials=(first.trials, second.trials),
            trials_only=(max(0, first.trials - second.known), second.trials - second.known),
            environments_only=(
                tuple(e for e in old.environments if e not in new.environments),
                tuple(e for e in new.environments if e not in old.environments),
            ),
            comparisons=tuple(_comparisons(old, new)),
            pins=_changed(old.pins, new.pins),
            retired={
                key: Retired(*sources, old.finals[old.variants[key]] if key in old.variants else 0)
                for key, sources in _changed(old.sources, new.sources).items()
            },
        )


def compare(
    environments: tuple[Environment, Environment],
    world_size: int,
    before: Mapping[Problem, Answer],
    after: Mapping[Problem, Answer],
) -> Comparison:
    """Compare the answers of two databases for one number of ranks."""
    problems = sorted({*before, *after}, key=lambda p: (p.family, p.shape))
    changes = []
    for problem in problems:
        one, other = before.get(problem), after.get(problem)
        if (kind := _kind_of_change(one, other)) is not None:
            changes.append(Change(problem=problem, kind=kind, before=one, after=other))
    return Comparison(
        before=environments[0],
        after=environments[1],
        world_size=world_size,
        problems=len(problems),
        changes=tuple(changes),
    )


def _kind_of_change(before: Answer | None, after: Answer | None) -> Kind | None:
    if before is None or after is None:
        return "only after" if before is None else "only before"
    if before.candidate != after.candidate:
        return "winner"
    if before.latency_us is None or after.latency_us is None:
        return None
    low, high = sorted((before.latency_us, after.latency_us))
    return "latency" if high > low * (1 + before.noise + after.noise) else None


def _comparisons(before: StoredCatalog, after: StoredCatalog) -> Iterator[Comparison]:
    # Of each kind of hardware the environment that was measured last.
    old, new = ({e.hard_key: e for e in reversed(each.environments)} for each in (before, after))
    pairs = [(environment, environment) for environment in before.environments if environment in after.environments]
    pairs += [(old[kind], new[kind]) for kind in old if kind in new]
    # Of a kind of hardware that one of them alone has, all answers are gone, or new.
    alone = old.keys() ^ new.keys()
    pairs += [(e, e) for e in (*before.environments, *after.environments) if e.hard_key in alone]
    for pair in dict.fromkeys(pairs):
        for world_size in sorted(before.world_sizes | after.world_sizes):
            answers = before.answers(pair[0], world_size), after.answers(pair[1], world_size)
            if (found := compare(pair, world_size, *answers)).problems:
                yield found


def _changed(before: Mapping[K, V], after: Mapping[K, V]) -> dict[K, tuple[V | None, V | None]]:
    """The keys whose values differ, with both values, None where there is none."""
    pairs = {key: (before.get(key), after.get(key)) for key in sorted({*before, *after}, key=str)}
    return {key: (one, other) for key, (one, other) in pairs.items() if one != other}
