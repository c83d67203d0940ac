"""What a database by itself answers for the problems that it holds: selection without the kernels of this tunedcomm.

Every candidate counts as feasible, and of each variant the newest source that the database holds counts as current. So
two databases can be compared on any machine, and one whose kernels have changed since still says what it said.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from sqlalchemy import String, func, select, type_coerce

from tunedcomm.db import query
from tunedcomm.db.layers import Layer, load_snapshot
from tunedcomm.db.rows import Reader, StoredVariant
from tunedcomm.db.schema import TrialRow
from tunedcomm.db.store import Database
from tunedcomm.hardware import Environment
from tunedcomm.selection.select import Catalog, Decision, choose
from tunedcomm.selection.snapshot import Row, Snapshot
from tunedcomm.spec import Candidate, Numerics, Problem

__all__ = ["Answers", "answers", "measured", "newest_variants"]

# Sizes on either side of a problem that are looked at, where there are more.
_NEIGHBOURS = 16


@dataclass(frozen=True, slots=True)
class Answers:
    """What a database answers on one kind of machine for one number of ranks.

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
