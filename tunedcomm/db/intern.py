"""Get-or-insert for the tables that trials refer to: environment, problem, variant."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias

from sqlalchemy import Connection, insert, select
from sqlalchemy.exc import IntegrityError

from tunedcomm.db.engine import exclusive
from tunedcomm.db.query import raw, table
from tunedcomm.db.records import TrialRecord
from tunedcomm.db.rows import parse_environment, parse_problem
from tunedcomm.db.schema import Base, EnvironmentRow, ProblemRow, VariantRow
from tunedcomm.errors import DatabaseCorruptError
from tunedcomm.hardware import Environment
from tunedcomm.spec import Problem, format_shape

__all__ = ["VariantKey", "environment_ids", "problem_ids", "row_id", "variant_ids", "variant_key"]

VariantKey: TypeAlias = tuple[str, str, str, str]
_PARSERS: Mapping[type[Base], Any] = {EnvironmentRow: parse_environment, ProblemRow: parse_problem}
_CHUNK = 500  # below every driver's limit of parameters in one statement


def environment_ids(connection: Connection, environments: Iterable[Environment]) -> dict[Environment, int]:
    """Ids of the environments, which are added where they are new."""
    distinct = dict.fromkeys(environments)
    wanted = {(e.digest,): {"digest": e.digest, **e.to_dict()} for e in distinct}
    ids = _intern(connection, EnvironmentRow, ("digest",), wanted)
    return {e: row_id(ids.get((e.digest,))) for e in distinct}


def problem_ids(connection: Connection, problems: Iterable[Problem]) -> dict[Problem, int]:
    """Ids of the problems, which are added where they are new."""
    distinct = dict.fromkeys(problems)
    wanted = {(p.digest,): {"digest": p.digest, **p.to_dict(), "shape": format_shape(p.shape)} for p in distinct}
    ids = _intern(connection, ProblemRow, ("digest",), wanted)
    return {p: row_id(ids.get((p.digest,))) for p in distinct}


def variant_key(record: TrialRecord) -> VariantKey:
    """What `variant_ids` calls the record's variant."""
    return (record.source_hash, record.problem.op, record.variant, record.numerics)


def variant_ids(connection: Connection, records: Iterable[TrialRecord]) -> dict[tuple[Any, ...], int]:
    """Ids by `variant_key` of the records' variants, which are added where they are new."""
    columns = ("source_hash", "op", "name", "numerics")
    keys = sorted({variant_key(record) for record in records})
    ids = _intern(connection, VariantRow, columns, {key: dict(zip(columns, key, strict=True)) for key in keys})
    return {key: row_id(ids.get(key)) for key in keys}


def row_id(value: object) -> int:
    """The id of a row that was found or added just now.

    Raises:
        DatabaseCorruptError: there is none, as an index does not fit its table, or the table has no primary key.
    """
    if type(value) is not int:
        raise DatabaseCorruptError(
            "the database does not find a row that it holds: an index of it is damaged, or a table was made by another "
            "program; restore a copy of it, or read what is left with `sqlite3 FILE .recover`"
        )
    return value


def _intern(
    connection: Connection,
    model: type[Base],
    columns: tuple[str, ...],
    wanted: Mapping[tuple[Any, ...], dict[str, Any]],
) -> dict[tuple[Any, ...], int]:
    ids = _find(connection, model, columns, wanted)
    if len(ids) < len(wanted):
        # New rows are rare, and writers that add the same ones in another order would deadlock: one at a time.
        exclusive(connection, "intern")
        ids = _find(connection, model, columns, wanted)
        for values in [values for key, values in wanted.items() if key not in ids]:
            try:
                # A server other than PostgreSQL lets another writer add the same row at this moment.
                with connection.begin_nested():
                    connection.execute(insert(model).values(values))
            except IntegrityError:
                continue
        ids = _find(connection, model, columns, wanted)
    return ids


def _find(
    connection: Connection, model: type[Base], columns: tuple[str, ...], wanted: Iterable[tuple[Any, ...]]
) -> dict[tuple[Any, ...], int]:
    keys = set(wanted)
    first = sorted({key[0] for key in keys})
    selected = [raw(column) for column in table(model).columns]
    names = [column.key for column in table(model).columns]
    found: dict[tuple[Any, ...], int] = {}
    for start in range(0, len(first), _CHUNK):
        chunk = first[start : start + _CHUNK]
        for values in connection.execute(select(*selected).where(getattr(model, columns[0]).in_(chunk))):
            row = dict(zip(names, values, strict=True))
            if (key := tuple(row[name] for name in columns)) in keys:
                found[key] = row_id(row["id"])
                _check(model, row)
    return found


def _check(model: type[Base], row: Mapping[str, Any]) -> None:
    """Refuse a row that readers skip, or take for another: what refers to it would be lost.

    Raises:
        DatabaseCorruptError: it does not hold what its digest says.
    """
    if (parser := _PARSERS.get(model)) is None:
        return
    try:
        said = "" if parser(row).digest == row["digest"] else "it is not what its digest says"
    except ValueError as error:
        said = str(error)
    if said:
        raise DatabaseCorruptError(
            f"{model.__tablename__} {row['id']} of the database is damaged: {said}. Nothing was recorded. "
            "`tunedcomm db check` lists such rows, `tunedcomm db prune --invalid` takes them out and their trials"
        )
