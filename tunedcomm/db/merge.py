"""Copying all that a SQLite database holds into another database; a row that both hold is there once.

A SQLite database has the source attached, a server gets its rows in temporary tables; the statements are the same. The
source is read in one transaction, so that a tuner may go on writing to it. Columns are those of the models, so a new
one is copied without a change here.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sqlalchemy import (
    BigInteger,
    Column,
    ColumnElement,
    Connection,
    FromClause,
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
    type_coerce,
    update,
)

from tunedcomm.db.engine import Target, exclusive, file_uri, is_immutable, make_engine, translated
from tunedcomm.db.query import table
from tunedcomm.db.schema import Base, EnvironmentRow, PinRow, ProblemRow, RunRow, TrialRow, VariantRow
from tunedcomm.errors import DatabaseCorruptError

__all__ = ["Absorbed", "absorb"]

_TIMEOUT_S = 30.0
_CHUNK = 2000
# By which columns a row of one database is the same as a row of another; a run's end may be known to one alone.
_IDENTITY: Mapping[type[Base], tuple[str, ...]] = {
    EnvironmentRow: ("digest",),
    ProblemRow: ("digest",),
    VariantRow: ("op", "name", "numerics", "source_hash"),
    RunRow: ("command", "seed", "budget", "host", "user", "version", "started_at"),
}


@dataclass(frozen=True, slots=True)
class _Source:
    """The rows to copy, where the database can see them.

    Attributes:
        name: for messages.
        theirs: the source's tables by name.
        moved: where its rows have gone; a temporary table.
    """

    name: str
    theirs: Mapping[str, FromClause]
    moved: Table


@functools.cache  # as everything that statements are made of: so they are compiled once
def _moved_table() -> Table:
    return Table(
        "moved",
        MetaData(),
        Column("kind", String, primary_key=True),
        Column("old", BigInteger, primary_key=True),
        Column("new", BigInteger, nullable=False),
        prefixes=["TEMPORARY"],
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


def absorb(connection: Connection, source: Target, *, in_order: bool = False) -> Absorbed:
    """Copy all rows of `source`, a SQLite file of this schema version, into the open database; all or none.

    Environments, problems, variants and runs that are there already are used; a pin replaces an older one of the same
    problem and environment. Trials keep their order.

    Args:
        connection: of the database that takes the rows, in no transaction.
        source: where they come from.
        in_order: where both databases had variants, number those of one name by their first trials, as if all had been
            measured into this database.

    Raises:
        DatabaseError: the source cannot be read, or its rows contradict each other or those that are there.
    """
    assert source.path is not None
    if connection.dialect.name != "sqlite":
        with translated(source), connection.begin():
            return _copy(connection, _upload(connection, source), in_order=in_order)
    driver = connection.connection.driver_connection
    assert driver is not None
    with translated(source):
        # Outside of a transaction: within one nothing can be attached.
        uri = file_uri(source.path, readonly=True, immutable=is_immutable(source.path))
        driver.execute("ATTACH DATABASE ? AS source", (uri,))
        try:
            with connection.begin():
                return _copy(connection, _Source(str(source), _attached(), _moved_table()), in_order=in_order)
        finally:
            driver.execute("DETACH DATABASE source")


@functools.cache
def _attached() -> Mapping[str, FromClause]:
    metadata = MetaData(schema="source")
    return {name: ours.to_metadata(metadata).alias("theirs") for name, ours in Base.metadata.tables.items()}


def _upload(connection: Connection, source: Target) -> _Source:
    """Send the source's rows to temporary tables of the server's session."""
    # Whoever adds such rows waits for this transaction, as they do for each other.
    exclusive(connection, "intern")
    metadata, theirs = MetaData(), {}
    engine = make_engine(source, readonly=True, immutable=False, busy_timeout_s=_TIMEOUT_S)
    try:
        with engine.begin() as reading:
            for ours in Base.metadata.sorted_tables:
                columns = [Column(column.name, column.type) for column in ours.columns]
                copy = Table(f"source_{ours.name}", metadata, *columns, prefixes=["TEMPORARY"])
                copy.create(connection, checkfirst=False)
                rows = reading.execute(select(ours).order_by(ours.c.id), execution_options={"yield_per": _CHUNK})
                for chunk in rows.mappings().partitions():
                    connection.execute(insert(copy), [dict(row) for row in chunk])
                theirs[ours.name] = copy
    finally:
        engine.dispose()
    for copy in theirs.values():
        connection.exec_driver_sql(f"ANALYZE {copy.name}")
    return _Source(str(source), theirs, _moved_table())


def _copy(connection: Connection, source: _Source, *, in_order: bool) -> Absorbed:
    had_variants = _count(connection, select(VariantRow.id)) > 0
    source.moved.create(connection, checkfirst=False)
    for model, identity in _IDENTITY.items():
        _intern(connection, source, model, identity)
    _finish_runs(connection, source)
    absorbed = _append_trials(connection, source)
    _merge_pins(connection, source)
    for temporary in (source.moved, *(theirs for theirs in source.theirs.values() if isinstance(theirs, Table))):
        temporary.drop(connection, checkfirst=False)
    if in_order and had_variants and absorbed.known < absorbed.trials:
        _order_variants(connection)
    return absorbed


def _same(ours: Table, theirs: Any, names: tuple[str, ...]) -> ColumnElement[bool]:
    """NULL equals NULL; where there is none a plain comparison lets a server use hashes and indexes."""

    def equal(name: str) -> ColumnElement[bool]:
        one, other = ours.c[name], theirs.c[name]
        return one.is_not_distinct_from(other) if one.nullable else one == other

    return and_(*map(equal, names))


def _intern(connection: Connection, source: _Source, model: type[Base], identity: tuple[str, ...]) -> None:
    """Add what is new and note where every row has gone."""
    ours, theirs = table(model), source.theirs[model.__tablename__]
    same = _same(ours, theirs, identity)
    names = [column.name for column in ours.columns if column.name != "id"]
    new = select(*(theirs.c[name] for name in names)).where(~exists().where(same).select_from(ours).correlate(theirs))
    connection.execute(insert(ours).from_select(names, new.order_by(theirs.c.id)))
    other = ~_same(ours, theirs, tuple(names))
    if identity == ("digest",) and (count := _count(connection, select(ours.c.id).join(theirs, same).where(other))):
        raise DatabaseCorruptError(
            f"{source.name} holds {count} rows in table {ours.name} that have the digest of another one; leave it out, "
            "or restore a copy of it"
        )
    moved = select(literal(ours.name), theirs.c.id, func.min(ours.c.id)).join(ours, same).group_by(theirs.c.id)
    connection.execute(insert(source.moved).from_select(["kind", "old", "new"], moved))


def _finish_runs(connection: Connection, source: _Source) -> None:
    """A copy that was made while a command ran does not know that it ended."""
    ours, theirs = table(RunRow), source.theirs[RunRow.__tablename__]
    end = (
        select(func.max(theirs.c.finished_at))
        .join(source.moved, and_(source.moved.c.kind == ours.name, source.moved.c.old == theirs.c.id))
        .where(source.moved.c.new == ours.c.id)
        .correlate(ours)
    )
    connection.execute(update(ours).where(ours.c.finished_at.is_(None)).values(finished_at=end.scalar_subquery()))


def _moved_rows(source: _Source, model: type[Base]) -> tuple[Select[Any], list[str]]:
    """Rows of the source with the ids that they refer to replaced, and the names of their columns."""
    ours, theirs = table(model), source.theirs[model.__tablename__]
    names = [column.name for column in ours.columns if column.name != "id"]
    joined: Any = theirs
    columns: list[Any] = [theirs.c.id.label("old")]
    for name in names:
        keys = list(ours.c[name].foreign_keys)
        if not keys:
            columns.append(theirs.c[name])
            continue
        moved = source.moved.alias(f"moved_{name}")
        here = and_(moved.c.kind == keys[0].column.table.name, moved.c.old == theirs.c[name])
        joined = joined.join(moved, here, isouter=bool(ours.c[name].nullable))
        columns.append(moved.c.new.label(name))
    return select(*columns).select_from(joined), names


def _append_trials(connection: Connection, source: _Source) -> Absorbed:
    ours, theirs = table(TrialRow), source.theirs[TrialRow.__tablename__]
    rows, names = _moved_rows(source, TrialRow)
    held, whole = _count(connection, select(theirs.c.id)), _count(connection, rows)
    if whole != held:
        raise DatabaseCorruptError(
            f"{held - whole} trials of {source.name} refer to problems, environments or variants that it does not "
            "hold; leave it out, or restore a copy of it"
        )
    moved = rows.subquery()
    known = exists().where(_same(ours, moved, tuple(names))).select_from(ours).correlate(moved)
    before = _count(connection, select(ours.c.id))
    new = select(*(moved.c[name] for name in names)).where(~known).order_by(moved.c.old)
    connection.execute(insert(ours).from_select(names, new))
    added = _count(connection, select(ours.c.id)) - before
    return Absorbed(source=source.name, trials=held, known=held - added)


def _merge_pins(connection: Connection, source: _Source) -> None:
    ours = table(PinRow)
    rows, names = _moved_rows(source, PinRow)
    moved = rows.subquery()
    same = _same(ours, moved, ("problem_id", "environment_id"))
    older = exists().where(same, moved.c.created_at > ours.c.created_at).select_from(moved).correlate(ours)
    connection.execute(delete(ours).where(older))
    there = exists().where(same).select_from(ours).correlate(moved)
    new = select(*(moved.c[name] for name in names)).where(~there).order_by(moved.c.old)
    connection.execute(insert(ours).from_select(names, new))


def _count(connection: Connection, rows: Select[Any]) -> int:
    return int(connection.execute(select(func.count()).select_from(rows.subquery())).scalar_one())


def _order_variants(connection: Connection) -> None:
    """Give of the variants of one name the highest number to the newest: the one whose first trial came last.

    A variant that changes its place gets a row of its own before its trials are moved there: a server checks references
    at every statement.
    """
    ours, trials = table(VariantRow), table(TrialRow)
    # As it is stored: all times of one database are in one form.
    first = type_coerce(func.min(trials.c.created_at), String())
    made = connection.execute(select(trials.c.variant_id, first).group_by(trials.c.variant_id))
    firsts = {int(row[0]): row[1] for row in made}
    groups: dict[tuple[str, str], list[Any]] = {}
    for row in connection.execute(select(ours).order_by(ours.c.id)).mappings():
        groups.setdefault((row["op"], row["name"]), []).append(row)
    misplaced: list[Any] = []
    for rows in groups.values():
        # One without a trial was known before it could be measured.
        wanted = sorted(rows, key=lambda row: (row["id"] in firsts, firsts.get(row["id"]), row["id"]))
        start = next((i for i, pair in enumerate(zip(wanted, rows, strict=True)) if pair[0] is not pair[1]), len(rows))
        misplaced += wanted[start:]
    if misplaced and connection.dialect.name == "postgresql":
        # A tuner that has looked up the id of a variant stores its trials before the variant goes.
        connection.exec_driver_sql("LOCK TABLE variant IN ACCESS EXCLUSIVE MODE")
    for row in misplaced:
        values = {name: value for name, value in row.items() if name != "id"}
        # Not under its final name yet, which the old row has until it is gone.
        held = connection.execute(insert(ours).values({**values, "source_hash": f"moved from {row['id']}"}))
        assert held.inserted_primary_key is not None
        new = held.inserted_primary_key[0]
        connection.execute(update(trials).where(trials.c.variant_id == row["id"]).values(variant_id=new))
        connection.execute(delete(ours).where(ours.c.id == row["id"]))
        connection.execute(update(ours).where(ours.c.id == new).values(source_hash=row["source_hash"]))
