"""Copying all that one SQLite database holds into another; a row that both hold is there once.

The source is attached and read in one transaction, so that a tuner may go on writing to it. Columns are those of the
models, so a new one is copied without a change here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sqlalchemy import (
    Column,
    ColumnElement,
    Connection,
    Integer,
    MetaData,
    Select,
    String,
    Table,
    and_,
    delete,
    exists,
    func,
    insert,
    literal,
    select,
    update,
)

from tunedcomm.db.engine import Target, file_uri, translated
from tunedcomm.db.query import table
from tunedcomm.db.schema import Base, EnvironmentRow, PinRow, ProblemRow, RunRow, TrialRow, VariantRow
from tunedcomm.db.store import cannot_change
from tunedcomm.errors import DatabaseCorruptError

__all__ = ["Absorbed", "absorb"]

# By which columns a row of one database is the same as a row of another; a run's end may be known to one alone.
_IDENTITY: Mapping[type[Base], tuple[str, ...]] = {
    EnvironmentRow: ("digest",),
    ProblemRow: ("digest",),
    VariantRow: ("op", "name", "numerics", "source_hash"),
    RunRow: ("command", "seed", "budget", "host", "user", "version", "started_at"),
}
_SOURCE = MetaData(schema="source")
_THEIRS = {name: ours.to_metadata(_SOURCE).alias("theirs") for name, ours in Base.metadata.tables.items()}
# Where the rows of the source have gone.
_MOVED = Table(
    "moved",
    MetaData(schema="temp"),
    Column("kind", String, primary_key=True),
    Column("old", Integer, primary_key=True),
    Column("new", Integer, nullable=False),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Absorbed:
    """What came of one source.

    Attributes:
        source: the file or server.
        trials: trials that it holds.
        known: those of them that were there already, equal in every column.
    """

    source: str
    trials: int
    known: int


def absorb(connection: Connection, source: Target) -> Absorbed:
    """Copy all rows of `source`, a SQLite file of this schema version, into the open database; all or none.

    Environments, problems, variants and runs that are there already are used; a pin replaces an older one of the same
    problem and environment. Trials keep their order.

    Raises:
        DatabaseError: the source cannot be read, or its rows contradict each other or those that are there.
    """
    assert source.path is not None
    driver = connection.connection.driver_connection
    assert driver is not None
    with translated(source):
        # Outside of a transaction: within one nothing can be attached.
        uri = file_uri(source.path, readonly=True, immutable=cannot_change(source.path))
        driver.execute("ATTACH DATABASE ? AS source", (uri,))
        try:
            with connection.begin():
                return _copy(connection, source)
        finally:
            driver.execute("DETACH DATABASE source")


def _copy(connection: Connection, source: Target) -> Absorbed:
    _MOVED.create(connection)
    for model, identity in _IDENTITY.items():
        _intern(connection, source, model, identity)
    _finish_runs(connection)
    absorbed = _append_trials(connection, source)
    _merge_pins(connection)
    _MOVED.drop(connection)
    return absorbed


def _same(ours: Any, theirs: Any, names: tuple[str, ...]) -> ColumnElement[bool]:
    """NULL equals NULL."""
    return and_(*(ours.c[name].is_not_distinct_from(theirs.c[name]) for name in names))


def _intern(connection: Connection, source: Target, model: type[Base], identity: tuple[str, ...]) -> None:
    """Add what is new and note where every row has gone."""
    ours, theirs = table(model), _THEIRS[model.__tablename__]
    same = _same(ours, theirs, identity)
    names = [column.name for column in ours.columns if column.name != "id"]
    new = select(*(theirs.c[name] for name in names)).where(~exists().where(same).select_from(ours).correlate(theirs))
    connection.execute(insert(ours).from_select(names, new.order_by(theirs.c.id)))
    other = ~_same(ours, theirs, tuple(names))
    if identity == ("digest",) and (count := _count(connection, select(ours.c.id).join(theirs, same).where(other))):
        raise DatabaseCorruptError(
            f"{source} holds {count} rows in table {ours.name} that have the digest of another one; leave it out, or "
            "restore a copy of it"
        )
    moved = select(literal(ours.name), theirs.c.id, func.min(ours.c.id)).join(ours, same).group_by(theirs.c.id)
    connection.execute(insert(_MOVED).from_select(["kind", "old", "new"], moved))


def _finish_runs(connection: Connection) -> None:
    """A copy that was made while a command ran does not know that it ended."""
    ours, theirs = table(RunRow), _THEIRS[RunRow.__tablename__]
    end = (
        select(func.max(theirs.c.finished_at))
        .join(_MOVED, and_(_MOVED.c.kind == ours.name, _MOVED.c.old == theirs.c.id))
        .where(_MOVED.c.new == ours.c.id)
        .correlate(ours)
    )
    connection.execute(update(ours).where(ours.c.finished_at.is_(None)).values(finished_at=end.scalar_subquery()))


def _moved_rows(model: type[Base]) -> tuple[Select[Any], list[str]]:
    """Rows of the source with the ids that they refer to replaced, and the names of their columns."""
    ours, theirs = table(model), _THEIRS[model.__tablename__]
    names = [column.name for column in ours.columns if column.name != "id"]
    joined: Any = theirs
    columns: list[Any] = [theirs.c.id.label("old")]
    for name in names:
        keys = list(ours.c[name].foreign_keys)
        if not keys:
            columns.append(theirs.c[name])
            continue
        moved = _MOVED.alias(f"moved_{name}")
        here = and_(moved.c.kind == keys[0].column.table.name, moved.c.old == theirs.c[name])
        joined = joined.join(moved, here, isouter=bool(ours.c[name].nullable))
        columns.append(moved.c.new.label(name))
    return select(*columns).select_from(joined), names


def _append_trials(connection: Connection, source: Target) -> Absorbed:
    ours, theirs = table(TrialRow), _THEIRS[TrialRow.__tablename__]
    rows, names = _moved_rows(TrialRow)
    held, whole = _count(connection, select(theirs.c.id)), _count(connection, rows)
    if whole != held:
        raise DatabaseCorruptError(
            f"{held - whole} trials of {source} refer to problems, environments or variants that it does not hold; "
            "leave it out, or restore a copy of it"
        )
    moved = rows.subquery()
    known = exists().where(_same(ours, moved, tuple(names))).select_from(ours).correlate(moved)
    before = _count(connection, select(ours.c.id))
    new = select(*(moved.c[name] for name in names)).where(~known).order_by(moved.c.old)
    connection.execute(insert(ours).from_select(names, new))
    added = _count(connection, select(ours.c.id)) - before
    return Absorbed(source=str(source), trials=held, known=held - added)


def _merge_pins(connection: Connection) -> None:
    ours = table(PinRow)
    rows, names = _moved_rows(PinRow)
    moved = rows.subquery()
    same = _same(ours, moved, ("problem_id", "environment_id"))
    older = exists().where(same, moved.c.created_at > ours.c.created_at).select_from(moved).correlate(ours)
    connection.execute(delete(ours).where(older))
    there = exists().where(same).select_from(ours).correlate(moved)
    new = select(*(moved.c[name] for name in names)).where(~there).order_by(moved.c.old)
    connection.execute(insert(ours).from_select(names, new))


def _count(connection: Connection, rows: Select[Any]) -> int:
    return int(connection.execute(select(func.count()).select_from(rows.subquery())).scalar_one())
