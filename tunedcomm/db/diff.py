"""The answers of databases for the problems that they hold, and the differences between two of them.

A database is asked by itself, by selection without the kernels of this tunedcomm: every candidate counts as feasible,
and of each variant the newest source that the database holds counts as current. So two databases can be compared on any
machine, and one whose kernels have changed since still says what it said.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

from sqlalchemy import String, func, select, true, type_coerce

from tunedcomm.db import query
from tunedcomm.db.copying import Source, absorb, as_sqlite
from tunedcomm.db.engine import connected
from tunedcomm.db.layers import Layer, load_snapshot
from tunedcomm.db.migrate import create_file
from tunedcomm.db.records import Pin, Reader, StoredVariant
from tunedcomm.db.schema import TrialRow, VariantRow
from tunedcomm.db.store import Database
from tunedcomm.hardware import Environment
from tunedcomm.selection.score import noise
from tunedcomm.selection.select import Catalog, Decision, choose
from tunedcomm.selection.snapshot import Row, Snapshot
from tunedcomm.spec import Candidate, Numerics, Problem

Kind: TypeAlias = Literal["only before", "only after", "winner", "latency"]
# Sizes on either side of a problem that are looked at, where there are more.
_NEIGHBOURS = 16


@dataclass(frozen=True, slots=True)
class Answers:
    """Answers of a database on one kind of machine for one number of ranks.

    Attributes:
        snapshot: what it was decided from.
        decisions: problems that have rows or pins to what runs.
    """

    snapshot: Snapshot
    decisions: Mapping[Problem, Decision]

    def row(self, problem: Problem) -> Row | None:
        """The measurement that decided, None where there is none."""
        decision = self.decisions[problem]
        for row in self.snapshot.family_rows(problem):
            if row.problem == problem and row.candidate == decision.candidate:
                return row
        return None


@dataclass(frozen=True, slots=True)
class _Stored(Catalog):
    """The variants of a database: every candidate can run, and each variant's newest stored source is current."""

    variants: Mapping[tuple[str, str], StoredVariant]

    def infeasible_reason(self, problem: Problem, candidate: Candidate, *, by_name: bool) -> str | None:
        return None

    def source_hash(self, op: str, variant: str) -> str | None:
        return self.variants[op, variant].source_hash if (op, variant) in self.variants else None

    def numerics(self, op: str, variant: str) -> Numerics:
        # Of a variant that was never measured there are only pins, which a person made knowingly.
        return self.variants[op, variant].numerics if (op, variant) in self.variants else "ordered"


def answers(file: str | Path, environment: Environment, world_size: int) -> Answers:
    """Decide every problem that the database holds for `world_size` ranks on machines like `environment`.

    Raises:
        DatabaseError: the database cannot be read.
    """
    snapshot = load_snapshot(environment, world_size, layers=[Layer("user", str(file))], strict=True)
    catalog = _Stored(newest_variants(file))
    problems = {row.problem for row in snapshot.rows} | {pin.problem for pin in snapshot.pins}

    curves = _curves(problems)
    decisions: dict[Problem, Decision] = {}
    for problem in sorted(problems):
        near = _near(snapshot, problem, curves[problem.family, problem.shape[1:]])
        decision = choose(near, problem, catalog)
        # Whatever was not measured itself may be answered from further away.
        is_sure = near is snapshot or decision.source in ("exact", "pin")
        decisions[problem] = decision if is_sure else choose(snapshot, problem, catalog)
    return Answers(snapshot, decisions)


def _curves(problems: Iterable[Problem]) -> dict[tuple[Problem, tuple[int, ...]], list[Problem]]:
    """Problems that differ in their first extent alone, smallest first, by family and the other extents."""
    found: dict[tuple[Problem, tuple[int, ...]], list[Problem]] = {}
    for problem in sorted(problems, key=lambda problem: problem.nbytes):
        found.setdefault((problem.family, problem.shape[1:]), []).append(problem)
    return found


def _near(snapshot: Snapshot, problem: Problem, curve: list[Problem]) -> Snapshot:
    """The part of a snapshot that decides about a problem that it has rows of, for selection looks at whole families.

    The neighbours break ties: the nearest two on either side that are of use, and these are among the nearest few.
    """
    if len(curve) <= 2 * _NEIGHBOURS:
        return snapshot
    place = curve.index(problem)
    near = set(curve[max(0, place - _NEIGHBOURS) : place + _NEIGHBOURS + 1])
    return Snapshot(
        environment=snapshot.environment,
        world_size=snapshot.world_size,
        rows=tuple(row for row in snapshot.family_rows(problem) if row.problem in near),
        pins=tuple(pin for pin in snapshot.pins if pin.problem == problem),
        failures=tuple(failure for failure in snapshot.failures if failure.problem.family == problem.family),
    )


def newest_variants(file: str | Path) -> dict[tuple[str, str], StoredVariant]:
    """Of each op and variant the newest source that the database holds."""
    with Database.open(file, readonly=True) as database, database.reading() as connection:
        stored = query.load_variants(connection, Reader())
    return {(variant.op, variant.name): variant for _, variant in sorted(stored.items())}


def measured(file: str | Path) -> dict[Environment, frozenset[int]]:
    """Environments with trials, the one measured last first, and the world sizes of the database."""
    with Database.open(file, readonly=True) as database, database.reading() as connection:
        environments = query.load_environments(connection, Reader())
        # As it is stored: all times of one database are in one form.
        last = type_coerce(func.max(TrialRow.created_at), String())
        ids = connection.execute(select(TrialRow.environment_id, last).group_by(TrialRow.environment_id))
        when = {int(row[0]): row[1] for row in ids if row[0] in environments and row[1] is not None}
        problems = query.load_problems(connection, Reader())
    world_sizes = frozenset(problem.world_size for problem in problems.values())
    ordered = sorted(when, key=lambda id_: (when[id_], id_), reverse=True)
    return {environments[id_]: world_sizes for id_ in ordered}


# Comparison


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The candidate that runs for a problem.

    Attributes:
        candidate: what runs.
        source: the rule that chose it.
        latency_us: what it is expected to take, None where that is not known.
        library_us: what the library is expected to take.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A problem that is answered otherwise.

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
        changes: those that are answered otherwise.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class PinChange:
    """A pin that is not the same in both databases."""

    problem: Problem
    environment: Environment
    before: Pin | None
    after: Pin | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Retired:
    """A variant of which the databases know another newest source.

    Attributes:
        op, variant: which.
        before, after: the newest source hashes, None where a database does not know the variant.
        finals: finals of the former source in the former database, which say nothing about the new one.
    """

    op: str
    variant: str
    before: str | None
    after: str | None
    finals: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """The difference between two databases.

    Attributes:
        before, after: their names.
        schemas: their schema revisions.
        trials: how many trials they hold.
        trials_only: how many of these the other one does not hold.
        environments_only: environments with trials in one of them alone.
        comparisons: what they answer.
        pins: pins that differ.
        retired: variants whose sources differ.
    """

    before: str
    after: str
    schemas: tuple[str, str]
    trials: tuple[int, int]
    trials_only: tuple[int, int]
    environments_only: tuple[tuple[Environment, ...], tuple[Environment, ...]]
    comparisons: tuple[Comparison, ...]
    pins: tuple[PinChange, ...]
    retired: tuple[Retired, ...]

    @property
    def is_empty(self) -> bool:
        """True if both hold the same trials and pins, under the same schema, and so answer the same."""
        same = self.schemas[0] == self.schemas[1] and not any(self.trials_only) and not any(self.environments_only)
        return same and not self.pins and not self.retired and not any(c.changes for c in self.comparisons)


def diff_databases(before: str | Path, after: str | Path) -> Difference:
    """Compare two databases: SQLite files, files of JSON lines, or URLs of servers. Neither is changed.

    Both are asked as a machine would ask them that has the hardware and the software of their trials: in every
    environment that both hold, and on each kind of hardware in the environment that each of them measured last.

    Raises:
        DatabaseError: one of them cannot be read.
    """
    with tempfile.TemporaryDirectory(prefix="tunedcomm-diff.") as folder:
        one, other = as_sqlite(before, Path(folder) / "before.db"), as_sqlite(after, Path(folder) / "after.db")
        files = (one.path, other.path)
        held = (measured(files[0]), measured(files[1]))
        trials, known = _count_trials(one, other, Path(folder) / "union.db")
        return Difference(
            before=one.name,
            after=other.name,
            schemas=(one.schema, other.schema),
            trials=trials,
            trials_only=(max(0, trials[0] - known), trials[1] - known),
            environments_only=(
                tuple(e for e in held[0] if e not in held[1]),
                tuple(e for e in held[1] if e not in held[0]),
            ),
            comparisons=tuple(_comparisons(files, held)),
            pins=tuple(_pin_changes(files)),
            retired=tuple(_retired(files)),
        )


def compare(before: Answers, after: Answers) -> Comparison:
    """Compare the answers of two databases for one number of ranks."""
    problems = sorted({*before.decisions, *after.decisions}, key=lambda p: (p.family, p.shape))
    return Comparison(
        before=before.snapshot.environment,
        after=after.snapshot.environment,
        world_size=after.snapshot.world_size,
        problems=len(problems),
        changes=tuple(
            change for p in problems if (change := _change(p, _answer(before, p), _answer(after, p))) is not None
        ),
    )


def _comparisons(
    files: tuple[Path, Path], held: tuple[Mapping[Environment, frozenset[int]], Mapping[Environment, frozenset[int]]]
) -> Iterator[Comparison]:
    pairs = [(environment, environment) for environment in held[0] if environment in held[1]]
    for last in _newest_of_each_kind(held[0]):
        same_kind = [e for e in _newest_of_each_kind(held[1]) if e.hard_key == last.hard_key]
        pairs += [(last, other) for other in same_kind if (last, other) not in pairs]
    for environment in held[0]:  # Kinds of hardware that one of them alone has: all of its answers are gone, or new.
        if environment.hard_key not in {e.hard_key for e in held[1]}:
            pairs.append((environment, environment))
    pairs += [(e, e) for e in held[1] if e.hard_key not in {before.hard_key for before in held[0]}]
    for pair in pairs:
        for world_size in sorted({*held[0].get(pair[0], ()), *held[1].get(pair[1], ())}):
            found = compare(answers(files[0], pair[0], world_size), answers(files[1], pair[1], world_size))
            if found.problems:
                yield found


def _newest_of_each_kind(held: Mapping[Environment, frozenset[int]]) -> list[Environment]:
    kinds: dict[tuple[Any, ...], Environment] = {}
    for environment in held:
        kinds.setdefault(environment.hard_key, environment)
    return list(kinds.values())


def _answer(found: Answers, problem: Problem) -> Answer | None:
    decision = found.decisions.get(problem)
    if decision is None:
        return None
    row = found.row(problem)
    return Answer(
        candidate=decision.candidate,
        source=decision.source,
        latency_us=decision.latency_us,
        library_us=decision.library_us,
        noise=0.0 if row is None else noise(row),
    )


def _change(problem: Problem, before: Answer | None, after: Answer | None) -> Change | None:
    kind: Kind
    if before is None or after is None:
        kind = "only after" if before is None else "only before"
    elif before.candidate != after.candidate:
        kind = "winner"
    elif _differ(before, after):
        kind = "latency"
    else:
        return None
    return Change(problem=problem, kind=kind, before=before, after=after)


def _differ(before: Answer, after: Answer) -> bool:
    if before.latency_us is None or after.latency_us is None:
        return False
    low, high = sorted((before.latency_us, after.latency_us))
    return high > low * (1 + before.noise + after.noise)


def _count_trials(one: Source, other: Source, scratch: Path) -> tuple[tuple[int, int], int]:
    """Count the trials of each, and those of the second that the first holds too."""
    with connected(create_file(scratch)) as connection:
        first, second = absorb(connection, one), absorb(connection, other)
    return (first.trials, second.trials), second.known


def _pin_changes(files: tuple[Path, Path]) -> Iterator[PinChange]:
    before, after = (_pins(file) for file in files)
    for key in sorted({*before, *after}, key=lambda key: (key[0], str(key[1].to_dict()))):
        one, other = before.get(key), after.get(key)
        if one is None or other is None or (one.candidate, one.reason) != (other.candidate, other.reason):
            yield PinChange(problem=key[0], environment=key[1], before=one, after=other)


def _pins(file: Path) -> dict[tuple[Problem, Environment], Pin]:
    with Database.open(file, readonly=True) as database:
        return {(pin.problem, pin.environment): pin for pin in database.pins()}


def _retired(files: tuple[Path, Path]) -> Iterator[Retired]:
    before, after = newest_variants(files[0]), newest_variants(files[1])
    for key in sorted({*before, *after}):
        one, other = before.get(key), after.get(key)
        if one is not None and other is not None and one.source_hash == other.source_hash:
            continue
        yield Retired(
            op=key[0],
            variant=key[1],
            before=None if one is None else one.source_hash,
            after=None if other is None else other.source_hash,
            finals=0 if one is None else _num_finals(files[0], *key, one.source_hash),
        )


def _num_finals(file: Path, op: str, name: str, source_hash: str) -> int:
    of_source = select(VariantRow.id).where(
        VariantRow.op == op, VariantRow.name == name, VariantRow.source_hash == source_hash
    )
    finals = select(func.count()).where(
        TrialRow.variant_id.in_(of_source), TrialRow.status == "ok", TrialRow.final == true()
    )
    with Database.open(file, readonly=True) as database, database.reading() as connection:
        return int(connection.execute(finals).scalar_one())
