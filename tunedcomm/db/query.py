"""Reading: set-based SQL into plain rows, without ORM objects, so that 100,000 trials take milliseconds.

Typed columns are read as they lie (no result processors that would raise in the middle of a fetch) and parsed by
`records`, so that one damaged row costs that row only.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from sqlalchemy import ColumnElement, Connection, Select, String, Table, func, select, type_coerce

from tunedcomm.db import records as parse
from tunedcomm.db.records import Pin, Reader, Run, StoredVariant, Trial
from tunedcomm.db.schema import Base, EnvironmentRow, PinRow, ProblemRow, RunRow, TrialRow, VariantRow
from tunedcomm.db.values import id_of, parse_problem
from tunedcomm.hardware import HARD_FIELDS, Environment
from tunedcomm.spec import Problem

# Rows kept of each variant at a problem that has no finals: a second one where limits rule the best config out.
BEST_OF_VARIANT = 2
_BATCH = 10_000
_CHUNK = 500  # below every driver's limit of parameters in one statement

T = TypeVar("T")


def table(model: type[Base]) -> Table:
    """The Core table of a model."""
    return Base.metadata.tables[model.__tablename__]


def raw(column: Any) -> ColumnElement[Any]:
    """The column as it is stored."""
    return type_coerce(column, String()).label(column.key)


def _load(
    connection: Connection, model: type[Base], where: Iterable[Any], parser: Callable[[Any], T], reader: Reader
) -> dict[int, T]:
    """Every parseable row of `model` by id, oldest first."""
    columns = table(model).columns
    found: dict[int, T] = {}
    # All at once: the deadline of a query does not count the parsing.
    for row in connection.execute(select(*map(raw, columns)).where(*where).order_by(columns.id)).mappings().all():
        try:
            found[id_of(row["id"])] = parser(row)
        except ValueError as error:
            reader.skipped.add(model.__tablename__, row["id"], error)
    return found


def load_environments(connection: Connection, reader: Reader, *where: Any) -> dict[int, Environment]:
    """Stored environments by id."""
    return _load(connection, EnvironmentRow, where, parse.parse_environment, reader)


def load_problems(connection: Connection, reader: Reader, *where: Any) -> dict[int, Problem]:
    """Stored problems by id."""
    return _load(connection, ProblemRow, where, parse_problem, reader)


def load_problems_by_id(connection: Connection, ids: Iterable[object], reader: Reader) -> dict[int, Problem]:
    """The stored problems with these ids, which come from a file and may be anything."""
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
    return load_environments(connection, reader, *where)


def trials(connection: Connection, reader: Reader, *where: Any) -> list[Trial]:
    """Full records, oldest first."""
    problems, environments = _referred(connection, TrialRow, where, reader)
    variants = load_variants(connection, reader, VariantRow.id.in_(select(TrialRow.variant_id).where(*where)))

    def parser(row: Any) -> Trial:
        problem, environment = _find(problems, row, "problem"), _find(environments, row, "environment")
        variant = _find(variants, row, "variant")
        parse.check_op(variant, problem)
        values = reader.trial(row)
        values |= {
            "config": dict(values["config"]),
            "run_id": None if row["run_id"] is None else id_of(row["run_id"]),
        }
        values |= {"variant": variant.name, "numerics": variant.numerics, "source_hash": variant.source_hash}
        return Trial(problem=problem, environment=environment, id=row["id"], **values)

    return list(_load(connection, TrialRow, where, parser, reader).values())


def pins(connection: Connection, reader: Reader, *where: Any) -> list[Pin]:
    """Pins, oldest first."""
    problems, environments = _referred(connection, PinRow, where, reader)

    def parser(row: Any) -> Pin:
        problem, environment = _find(problems, row, "problem"), _find(environments, row, "environment")
        values = parse.parse_row(PinRow, row)
        chosen = reader.candidate(problem.op, values.pop("variant"), values.pop("config"))
        return Pin(problem=problem, environment=environment, candidate=chosen, id=row["id"], **values)

    return list(_load(connection, PinRow, where, parser, reader).values())


def runs(connection: Connection, reader: Reader) -> list[Run]:
    """Every run, oldest first."""

    def parser(row: Any) -> Run:
        return Run(id=row["id"], **parse.parse_row(RunRow, row))

    return list(_load(connection, RunRow, (), parser, reader).values())


def _referred(
    connection: Connection, model: Any, where: Sequence[Any], reader: Reader
) -> tuple[dict[int, Problem], dict[int, Environment]]:
    """The problems and environments that rows refer to."""
    problems, environments = (select(column).where(*where) for column in (model.problem_id, model.environment_id))
    return (
        load_problems(connection, reader, ProblemRow.id.in_(problems)),
        load_environments(connection, reader, EnvironmentRow.id.in_(environments)),
    )


def _find(found: Mapping[int, T], row: Any, name: str) -> T:
    if (id_ := row[f"{name}_id"]) not in found:
        raise ValueError(f"it refers to {name} {id_!r:.20}, which is not there or makes no sense")
    return found[id_]


def all_trials(connection: Connection, reader: Reader) -> Iterator[Trial]:
    """Every trial, oldest first, some thousand at a time, without trials of a missing run."""
    ids = list(connection.execute(select(TrialRow.id).order_by(TrialRow.id)).scalars())
    runs = {None, *connection.execute(select(RunRow.id)).scalars()}
    for start in range(0, len(ids), _BATCH):
        for trial in trials(connection, reader, TrialRow.id.between(ids[start], ids[start : start + _BATCH][-1])):
            if trial.run_id in runs:
                yield trial
            else:
                reader.skipped.add("trial", trial.id, f"it refers to run {trial.run_id}, which is not there")


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


def tally(connection: Connection, *where: Any) -> Sequence[Any]:
    """The trials and finals of each environment, problem, variant and status, with the first and last time as stored.

    All times of one database are in one form.
    """
    of = (TrialRow.environment_id, TrialRow.problem_id, TrialRow.variant_id, TrialRow.status)
    finals = func.count().filter(TrialRow.final).label("finals")
    first, last = (type_coerce(end(TrialRow.created_at), String()) for end in (func.min, func.max))
    counts = (func.count().label("trials"), finals, first.label("first"), last.label("last"))
    return connection.execute(select(*of, *counts).where(*where).group_by(*of)).all()
