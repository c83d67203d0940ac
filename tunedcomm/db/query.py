"""Reading: set-based SQL into plain rows, without ORM objects, so that 100,000 trials take milliseconds.

Typed columns are read as they lie (no result processors that would raise in the middle of a fetch) and parsed by
`rows`, so that one damaged row costs that row only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any, TypeVar

from sqlalchemy import ColumnElement, Connection, Select, String, Table, exists, false, func, select, true, type_coerce
from sqlalchemy.orm import aliased

from tunedcomm.db import rows as parse
from tunedcomm.db.records import FAILED, STATUSES, PinRecord, TrialRecord
from tunedcomm.db.rows import Reader, StoredVariant
from tunedcomm.db.schema import Base, EnvironmentRow, PinRow, ProblemRow, TrialRow, VariantRow
from tunedcomm.hardware import HARD_FIELDS, Environment
from tunedcomm.spec import Candidate, Problem

__all__ = [
    "FailedTrial",
    "OkTrial",
    "counts",
    "environments_like",
    "failed_trials",
    "load_environments",
    "load_problems",
    "ok_trials",
    "pins",
    "trials",
]

# Rows kept of each variant at a problem that has no finals: a second one where limits rule the best config out.
BEST_OF_VARIANT = 2
_FEW = 500

T = TypeVar("T")


def table(model: type[Base]) -> Table:
    """The Core table of a model."""
    return Base.metadata.tables[model.__tablename__]


def _raw(column: Any) -> ColumnElement[Any]:
    return type_coerce(column, String()).label(column.key)


_NUMBERS = ("latency_p10_us", "latency_p50_us", "latency_p90_us", "baseline_p50_us")
_TRIAL_COLUMNS = (
    TrialRow.id,
    TrialRow.problem_id,
    TrialRow.environment_id,
    TrialRow.variant_id,
    TrialRow.config,
    TrialRow.config_digest,
    TrialRow.status,
    TrialRow.reason,
    TrialRow.samples,
    TrialRow.error,
    TrialRow.final,
    TrialRow.run_id,
    *(getattr(TrialRow, name) for name in _NUMBERS),
    TrialRow.created_at,
)
_RAW_TRIAL = tuple(_raw(column) for column in _TRIAL_COLUMNS)


@dataclass(frozen=True, slots=True)
class OkTrial:
    """One `ok` trial as a snapshot needs it."""

    id: int
    problem: Problem
    environment: Environment
    candidate: Candidate
    source_hash: str
    latency_p10_us: float | None
    latency_p50_us: float
    latency_p90_us: float | None
    samples: int
    baseline_p50_us: float | None
    final: bool
    created_at: str


@dataclass(frozen=True, slots=True)
class FailedTrial:
    """One trial that was incorrect, crashed or hung."""

    problem: Problem
    candidate: Candidate
    source_hash: str
    status: str
    created_at: str


def _load(
    connection: Connection, model: type[Base], where: Iterable[Any], parser: Callable[[Any], T], reader: Reader
) -> dict[int, T]:
    """Every parseable row of `model` by id."""
    columns = [_raw(column) for column in table(model).columns]
    found: dict[int, T] = {}
    for row in connection.execute(select(*columns).where(*where)).mappings():
        try:
            found[row["id"]] = parser(row)
        except ValueError as error:
            reader.skipped.add(f"{model.__tablename__} {row['id']}: {error}")
    return found


def load_environments(connection: Connection, reader: Reader, *where: Any) -> dict[int, Environment]:
    """Stored environments by id."""
    return _load(connection, EnvironmentRow, where, parse.parse_environment, reader)


def load_problems(connection: Connection, reader: Reader, *where: Any) -> dict[int, Problem]:
    """Stored problems by id."""
    return _load(connection, ProblemRow, where, parse.parse_problem, reader)


def load_variants(connection: Connection, reader: Reader, *where: Any) -> dict[int, StoredVariant]:
    """Stored variants by id."""
    return _load(connection, VariantRow, where, parse.parse_variant, reader)


def environments_like(connection: Connection, environment: Environment, reader: Reader) -> dict[int, Environment]:
    """Stored environments with the same hard fields."""
    where = [getattr(EnvironmentRow, name) == getattr(environment, name) for name in HARD_FIELDS]
    found = load_environments(connection, reader, *where)
    return {key: there for key, there in found.items() if there.hard_key == environment.hard_key}


def _finals(environment_id: int, world_size: int) -> Select[Any]:
    of_world = select(ProblemRow.id).where(ProblemRow.world_size == world_size)
    return select(*_RAW_TRIAL).where(
        TrialRow.environment_id == environment_id,
        TrialRow.status == "ok",
        TrialRow.final == true(),
        TrialRow.problem_id.in_(of_world),
    )


def _best_without_finals(environment_id: int, world_size: int) -> Select[Any]:
    """The newest trial of each candidate, and of these the best few of each variant, where finals are lacking.

    A problem lacks finals if none of its finals is of a challenger's newest source: finals of kernels that have
    changed since must not hide what was measured of the new ones.
    """
    newest = (
        select(func.max(VariantRow.id)).where(VariantRow.name != "library").group_by(VariantRow.op, VariantRow.name)
    )
    here = (TrialRow.environment_id == environment_id, TrialRow.status == "ok")
    finished = select(TrialRow.problem_id).where(*here, TrialRow.final == true(), TrialRow.variant_id.in_(newest))
    of_world = select(ProblemRow.id).where(ProblemRow.world_size == world_size, ProblemRow.id.not_in(finished))
    age = func.row_number().over(
        partition_by=(TrialRow.problem_id, TrialRow.variant_id, TrialRow.config_digest),
        order_by=(TrialRow.created_at.desc(), TrialRow.latency_p50_us, TrialRow.id),
    )
    ages = (
        select(TrialRow.id, TrialRow.problem_id, TrialRow.variant_id, TrialRow.latency_p50_us, age.label("age"))
        .where(*here, TrialRow.final == false(), TrialRow.problem_id.in_(of_world), TrialRow.latency_p50_us > 0)
        .subquery()
    )
    place = func.row_number().over(
        partition_by=(ages.c.problem_id, ages.c.variant_id), order_by=(ages.c.latency_p50_us, ages.c.id)
    )
    places = select(ages.c.id, place.label("place")).where(ages.c.age == 1).subquery()
    best = select(places.c.id).where(places.c.place <= BEST_OF_VARIANT)
    return select(*_RAW_TRIAL).where(TrialRow.id.in_(best))


def _newest_first(row: Any) -> tuple[str, float]:
    latency, created_at = row["latency_p50_us"], row["created_at"]
    if isinstance(created_at, datetime):  # servers give times in the session's zone, which has its own summer
        created_at = created_at.astimezone(timezone.utc)
    return (str(created_at), -latency if isinstance(latency, float) else 0.0)


def ok_trials(
    connection: Connection, environments: dict[int, Environment], world_size: int, reader: Reader
) -> list[OkTrial]:
    """What a snapshot needs of one database: every final, and the best of each variant where there are none."""
    problems = load_problems(connection, reader, ProblemRow.world_size == world_size)
    variants = load_variants(connection, reader)
    found: list[OkTrial] = []
    for environment_id, environment in sorted(environments.items()):
        newest: dict[tuple[Any, ...], Any] = {}
        for query in (_finals(environment_id, world_size), _best_without_finals(environment_id, world_size)):
            for row in connection.execute(query).mappings():
                key = (row["problem_id"], row["variant_id"], row["config_digest"], row["final"])
                if key not in newest or _newest_first(row) > _newest_first(newest[key]):
                    newest[key] = row
        for row in newest.values():
            if row["problem_id"] not in problems or row["variant_id"] not in variants:
                continue  # Its problem or variant was skipped and counted already.
            problem, variant = problems[row["problem_id"]], variants[row["variant_id"]]
            try:
                found.append(_ok_trial(row, problem, environment, variant, reader))
            except ValueError as error:
                reader.skipped.add(f"trial {row['id']}: {error}")
    return found


def _ok_trial(row: Any, problem: Problem, environment: Environment, variant: StoredVariant, reader: Reader) -> OkTrial:
    times = {name: parse.latency_of(row[name], name) for name in _NUMBERS}
    if times["latency_p50_us"] is None:
        raise ValueError("an ok trial without latency_p50_us")
    if variant.op != problem.op:
        raise ValueError(f"variant of {variant.op:.80} on a problem of {problem.op:.80}")
    return OkTrial(
        id=row["id"],
        problem=problem,
        environment=environment,
        candidate=reader.candidate(problem.op, variant.name, row["config"]),
        source_hash=variant.source_hash,
        latency_p10_us=times["latency_p10_us"],
        latency_p50_us=times["latency_p50_us"],
        latency_p90_us=times["latency_p90_us"],
        samples=parse.int_of(row["samples"], "samples"),
        baseline_p50_us=times["baseline_p50_us"],
        final=parse.bool_of(row["final"], "final"),
        created_at=parse.time_of(row["created_at"]).isoformat(),
    )


def failed_trials(
    connection: Connection, environments: dict[int, Environment], world_size: int, reader: Reader
) -> list[FailedTrial]:
    """Trials that were incorrect, crashed or hung, where the same candidate was not good on the same problem since."""
    problems = load_problems(connection, Reader(), ProblemRow.world_size == world_size)
    variants = load_variants(connection, Reader())
    columns = (TrialRow.id, TrialRow.problem_id, TrialRow.variant_id, TrialRow.config, TrialRow.status)
    since = aliased(TrialRow)
    good_since = exists().where(
        since.environment_id.in_(list(environments)),
        since.status == "ok",
        since.final.in_([False, True]),  # lets the index be used through to the candidate
        since.problem_id == TrialRow.problem_id,
        since.variant_id == TrialRow.variant_id,
        since.config_digest == TrialRow.config_digest,
        since.created_at > TrialRow.created_at,
    )
    query = select(*(_raw(column) for column in (*columns, TrialRow.created_at))).where(
        TrialRow.environment_id.in_(list(environments)), TrialRow.status.in_(FAILED), ~good_since
    )
    found = []
    for row in connection.execute(query).mappings():
        problem, variant = problems.get(row["problem_id"]), variants.get(row["variant_id"])
        if problem is None or variant is None or variant.op != problem.op:
            continue
        try:
            candidate = reader.candidate(problem.op, variant.name, row["config"])
            created_at = parse.time_of(row["created_at"]).isoformat()
        except ValueError as error:
            reader.skipped.add(f"trial {row['id']}: {error}")
            continue
        found.append(FailedTrial(problem, candidate, variant.source_hash, row["status"], created_at))
    return found


def trials(
    connection: Connection, reader: Reader, where: Iterable[Any], problem_where: Iterable[Any]
) -> list[TrialRecord]:
    """Full records, oldest first."""
    query = select(*_RAW_TRIAL).where(*where).order_by(TrialRow.id)
    if problem_where := list(problem_where):
        query = query.where(TrialRow.problem_id.in_(select(ProblemRow.id).where(*problem_where)))
    rows = connection.execute(query).mappings().all()
    # Of few trials, as a supervisor asks for again and again, only what they refer to is read.
    few = len(rows) <= _FEW

    def referred(model: type[Base], column: str) -> list[ColumnElement[bool]]:
        return [table(model).c.id.in_({row[column] for row in rows})] if few else []

    problems = load_problems(connection, reader, *referred(ProblemRow, "problem_id"))
    variants = load_variants(connection, reader, *referred(VariantRow, "variant_id"))
    environments = load_environments(connection, reader, *referred(EnvironmentRow, "environment_id"))
    found = []
    for row in rows:
        try:
            problem, variant = problems[row["problem_id"]], variants[row["variant_id"]]
            environment = environments[row["environment_id"]]
        except KeyError:
            continue
        try:
            found.append(_record(row, problem, environment, variant, reader))
        except ValueError as error:
            reader.skipped.add(f"trial {row['id']}: {error}")
    return found


def _record(
    row: Any, problem: Problem, environment: Environment, variant: StoredVariant, reader: Reader
) -> TrialRecord:
    return TrialRecord(
        problem=problem,
        environment=environment,
        variant=variant.name,
        numerics=variant.numerics,
        source_hash=variant.source_hash,
        config=dict(reader.config(row["config"])),
        status=parse.status_of(row["status"]),
        reason=parse.text_of(row["reason"], "reason"),
        samples=parse.int_of(row["samples"], "samples"),
        error=parse.error_of(row["error"]),
        final=parse.bool_of(row["final"], "final"),
        run_id=row["run_id"],
        created_at=parse.time_of(row["created_at"]),
        id=row["id"],
        latency_p10_us=parse.latency_of(row["latency_p10_us"], "latency_p10_us"),
        latency_p50_us=parse.latency_of(row["latency_p50_us"], "latency_p50_us"),
        latency_p90_us=parse.latency_of(row["latency_p90_us"], "latency_p90_us"),
        baseline_p50_us=parse.latency_of(row["baseline_p50_us"], "baseline_p50_us"),
    )


def counts(connection: Connection) -> dict[str, int]:
    """Rows of each table, trials of each status (`trials_ok`, …) and finals."""
    rows = {
        f"{name}s": int(connection.execute(select(func.count()).select_from(model)).scalar_one())
        for name, model in Base.metadata.tables.items()
    }
    by_status = connection.execute(select(TrialRow.status, func.count()).group_by(TrialRow.status)).all()
    finals = connection.execute(select(func.count()).where(TrialRow.final)).scalar_one()
    known = {str(status): int(count) for status, count in by_status}
    return {**rows, **{f"trials_{s}": known.get(s, 0) for s in STATUSES}, "finals": int(finals)}


def pins(connection: Connection, reader: Reader) -> list[PinRecord]:
    """Every pin, oldest first."""
    problems = load_problems(connection, reader)
    environments = load_environments(connection, reader)
    columns = [_raw(column) for column in table(PinRow).columns]
    found = []
    for row in connection.execute(select(*columns).order_by(PinRow.id)).mappings():
        problem, environment = problems.get(row["problem_id"]), environments.get(row["environment_id"])
        if problem is None or environment is None:
            continue
        try:
            variant = parse.text_of(row["variant"], "variant")
            found.append(
                PinRecord(
                    problem=problem,
                    environment=environment,
                    candidate=reader.candidate(problem.op, variant, row["config"]),
                    reason=parse.text_of(row["reason"], "reason"),
                    user=parse.text_of(row["user"], "user"),
                    created_at=parse.time_of(row["created_at"]),
                    id=row["id"],
                )
            )
        except ValueError as error:
            reader.skipped.add(f"pin {row['id']}: {error}")
    return found
