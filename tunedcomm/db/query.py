"""Reading: set-based SQL into plain rows, without ORM objects, so that 100,000 trials take milliseconds.

Typed columns are read as they lie (no result processors that would raise in the middle of a fetch) and parsed by
`records`, so that one damaged row costs that row only.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, TypeVar

from sqlalchemy import ColumnElement, Connection, Select, String, Table, func, select, type_coerce

from tunedcomm.db import records as parse
from tunedcomm.db.records import STATUSES, Pin, Reader, Run, StoredVariant, Trial
from tunedcomm.db.schema import Base, EnvironmentRow, PinRow, ProblemRow, RunRow, TrialRow, VariantRow
from tunedcomm.hardware import HARD_FIELDS, Environment
from tunedcomm.spec import Problem

# Rows kept of each variant at a problem that has no finals: a second one where limits rule the best config out.
BEST_OF_VARIANT = 2
_FEW = 500
_CHUNK = 500  # below every driver's limit of parameters in one statement

T = TypeVar("T")


def table(model: type[Base]) -> Table:
    """The Core table of a model."""
    return Base.metadata.tables[model.__tablename__]


def raw(column: Any) -> ColumnElement[Any]:
    """The column as it is stored."""
    return type_coerce(column, String()).label(column.key)


_RAW_TRIAL = tuple(raw(column) for column in table(TrialRow).columns)


def _load(
    connection: Connection, model: type[Base], where: Iterable[Any], parser: Callable[[Any], T], reader: Reader
) -> dict[int, T]:
    """Every parseable row of `model` by id."""
    columns = [raw(column) for column in table(model).columns]
    names = [column.key for column in columns]
    found: dict[int, T] = {}
    for values in connection.execute(select(*columns).where(*where)).all():
        row = dict(zip(names, values, strict=True))
        try:
            found[parse.id_of(row["id"])] = parser(row)
        except ValueError as error:
            reader.skipped.add(f"{model.__tablename__} {row['id']}: {error}")
    return found


def load_environments(connection: Connection, reader: Reader, *where: Any) -> dict[int, Environment]:
    """Stored environments by id."""
    return _load(connection, EnvironmentRow, where, parse.parse_environment, reader)


def has_run(op: str | None, world_size: int | None) -> ColumnElement[bool]:
    """True of environments with an ok trial of this op and world size, where they are given."""
    wanted = select(ProblemRow.id)
    if op is not None:
        wanted = wanted.where(ProblemRow.op == op)
    if world_size is not None:
        wanted = wanted.where(ProblemRow.world_size == world_size)
    return (
        select(TrialRow.id)
        .where(
            TrialRow.environment_id == EnvironmentRow.id,
            TrialRow.status == "ok",
            TrialRow.final.in_([True, False]),  # lets the index be used through to the problem
            TrialRow.problem_id.in_(wanted),
        )
        .exists()
    )


def load_problems(connection: Connection, reader: Reader, *where: Any) -> dict[int, Problem]:
    """Stored problems by id."""
    return _load(connection, ProblemRow, where, parse.parse_problem, reader)


def load_problems_by_id(connection: Connection, ids: Iterable[object], reader: Reader) -> dict[int, Problem]:
    """Those of the stored problems that rows refer to; of an id from a file anything may be expected."""
    wanted = sorted(key for key in ids if type(key) is int)
    found: dict[int, Problem] = {}
    for start in range(0, len(wanted), _CHUNK):
        found |= load_problems(connection, reader, ProblemRow.id.in_(wanted[start : start + _CHUNK]))
    return found


def load_variants(connection: Connection, reader: Reader, *where: Any) -> dict[int, StoredVariant]:
    """Stored variants by id."""
    return _load(connection, VariantRow, where, parse.parse_variant, reader)


def environments_like(connection: Connection, environment: Environment, reader: Reader) -> dict[int, Environment]:
    """Stored environments with the same hard fields."""
    where = [getattr(EnvironmentRow, name) == getattr(environment, name) for name in HARD_FIELDS]
    found = load_environments(connection, reader, *where)
    return {key: there for key, there in found.items() if there.hard_key == environment.hard_key}


def trials(connection: Connection, reader: Reader, where: Iterable[Any], problem_where: Iterable[Any]) -> list[Trial]:
    """Full records, oldest first."""
    query = select(*_RAW_TRIAL).where(*where).order_by(TrialRow.id)
    if problem_where := list(problem_where):
        query = query.where(TrialRow.problem_id.in_(select(ProblemRow.id).where(*problem_where)))
    rows: Sequence[Any] = connection.execute(query).mappings().all()
    # Of few trials, as a supervisor asks for again and again, only what they refer to is read.
    few = len(rows) <= _FEW

    def referred(model: type[Base], column: str) -> list[ColumnElement[bool]]:
        return [table(model).c.id.in_({row[column] for row in rows if type(row[column]) is int})] if few else []

    problems = load_problems(connection, reader, *referred(ProblemRow, "problem_id"))
    variants = load_variants(connection, reader, *referred(VariantRow, "variant_id"))
    environments = load_environments(connection, reader, *referred(EnvironmentRow, "environment_id"))
    found = []
    for row in rows:
        problem, variant = problems.get(row["problem_id"]), variants.get(row["variant_id"])
        environment = environments.get(row["environment_id"])
        if problem is None or variant is None or environment is None:
            continue
        try:
            own: dict[str, Any] = {
                **parse.parse_row(TrialRow, row),
                "config": dict(reader.config(row["config"])),
                "variant": variant.name,
                "numerics": variant.numerics,
                "source_hash": variant.source_hash,
                "run_id": None if row["run_id"] is None else parse.id_of(row["run_id"]),
                "id": parse.id_of(row["id"]),
            }
            reader.check_trial(row)
            found.append(Trial(problem=problem, environment=environment, **own))
        except ValueError as error:
            reader.skipped.add(f"trial {row['id']}: {error}")
    return found


def runs(connection: Connection, reader: Reader) -> list[Run]:
    """Every run, oldest first."""
    found = _load(connection, RunRow, (), parse.parse_run, reader)
    return [found[key] for key in sorted(found)]


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


def count(connection: Connection, rows: Select[Any]) -> int:
    """Number of rows that a query gives."""
    return int(connection.execute(select(func.count()).select_from(rows.subquery())).scalar_one())


def unused_rows(stays: ColumnElement[bool], invalid_variants: Collection[int] = ()) -> dict[type[Base], Select[Any]]:
    """Queries for the ids of the rows of each table that no pin and no trial that `stays` refers to.

    The newest source of a variant is in use, unless it is invalid: it says that older ones are out of date. So is a run
    that has not ended, whose command may be about to add its first trial.
    """
    valid = select(func.max(VariantRow.id)).where(VariantRow.id.not_in(invalid_variants))
    newest = valid.group_by(VariantRow.op, VariantRow.name).correlate(None)
    uses: dict[Any, list[Select[Any]]] = {
        EnvironmentRow: [select(TrialRow.environment_id).where(stays), select(PinRow.environment_id)],
        ProblemRow: [select(TrialRow.problem_id).where(stays), select(PinRow.problem_id)],
        VariantRow: [select(TrialRow.variant_id).where(stays), newest],
        RunRow: [select(TrialRow.run_id).where(stays, TrialRow.run_id.is_not(None))],
    }
    unused = {model: select(model.id).where(*map(model.id.not_in, used)) for model, used in uses.items()}
    unused[RunRow] = unused[RunRow].where(RunRow.finished_at.is_not(None))
    return {model: rows.correlate(None) for model, rows in unused.items()}


def pins(connection: Connection, reader: Reader, *where: Any) -> list[Pin]:
    """Pins, oldest first."""
    columns = [raw(column) for column in table(PinRow).columns]
    rows = connection.execute(select(*columns).where(*where).order_by(PinRow.id)).mappings().all()
    problems = load_problems_by_id(connection, {row["problem_id"] for row in rows}, reader)
    environments = load_environments(connection, reader) if rows else {}
    found = []
    for row in rows:
        problem, environment = problems.get(row["problem_id"]), environments.get(row["environment_id"])
        if problem is None or environment is None:
            continue
        try:
            own = parse.parse_row(PinRow, dict(row))
            chosen = reader.candidate(problem.op, own.pop("variant"), own.pop("config"))
            found.append(
                Pin(problem=problem, environment=environment, candidate=chosen, id=parse.id_of(row["id"]), **own)
            )
        except ValueError as error:
            reader.skipped.add(f"pin {row['id']}: {error}")
    return found
