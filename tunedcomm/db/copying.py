"""The engine that copies databases: every form of one becomes a SQLite file, and one SQL merge adds it to another.

The forms are SQLite files, database servers, and JSON lines. Columns are those of the models, so a new one is copied
without a change here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, TypeAlias

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

from tunedcomm.db.engine import Target, connected, exclusive, file_uri, is_immutable, parse_target, translated
from tunedcomm.db.jsonl import RUN_IDENTITY, RowWriter, is_jsonl, lines, read_lines
from tunedcomm.db.migrate import copy_file, create_file, ensure_schema, upgrade_database
from tunedcomm.db.query import table
from tunedcomm.db.schema import (
    HEAD,
    Base,
    EnvironmentRow,
    PinRow,
    ProblemRow,
    RunRow,
    TrialRow,
    VariantRow,
)
from tunedcomm.db.store import Database
from tunedcomm.errors import DatabaseCorruptError

_BATCH = 2000
# Columns by which a row of one database is the same as a row of another; a run's end may be known to one alone.
_IDENTITY: Mapping[type[Base], tuple[str, ...]] = {
    EnvironmentRow: ("digest",),
    ProblemRow: ("digest",),
    VariantRow: ("op", "name", "numerics", "source_hash"),
    RunRow: RUN_IDENTITY,
}


# Any form to a SQLite file


@dataclass(frozen=True, slots=True)
class Source:
    """A database of any form as a SQLite file of this schema.

    Attributes:
        name: the source, as messages name it: without a password.
        path: the file: the source itself where it is one already.
        schema: the revision that the source has.
    """

    name: str
    path: Path
    schema: str = HEAD


def as_sqlite(source: str | Path, scratch: Path, *, is_checked: bool = False) -> Source:
    """The source as a SQLite file; it is not changed.

    Args:
        source: a SQLite file, a file of JSON lines, or the URL of a server.
        scratch: a file to make where the source is no such file itself.
        is_checked: check every row, and make the file of the rows alone.

    Raises:
        DatabaseAccessError: it cannot be read.
        DatabaseCorruptError: it is neither, is damaged, or a row that is to be checked makes no sense.
        DatabaseVersionError: it is of a later schema than this tunedcomm.
        DatabaseAwayError: the server does not answer.
    """
    target = parse_target(source)
    name, schema, path = str(target), HEAD, target.path
    if path is None:
        # Every row as it is at one moment, with its id.
        with connected(target, readonly=True) as there, connected(create_file(scratch)) as here:
            ensure_schema(there.engine, target, create=False, readonly=True)
            there.execution_options(isolation_level="REPEATABLE READ")
            with there.begin(), here.begin():
                for ours in Base.metadata.sorted_tables:
                    _copy_rows(there, ours, here, ours)
        path = scratch
    elif path.is_file() and is_jsonl(path):
        with connected(create_file(scratch)) as connection, connection.begin():
            read_lines(path, connection)
        return Source(name, scratch)
    elif (schema := upgrade_database(path, check=True).before) != HEAD:
        copy_file(path, scratch)
        create_file(scratch)
        path = scratch
    if is_checked:
        path = _checked(name, path, scratch.with_name(f"checked-{scratch.name}"))
    return Source(name, path, schema)


def _checked(name: str, path: Path, checked: Path) -> Path:
    """Fill a new database with the rows of another one, each of them checked."""

    def refuse(table_name: str, id_: Any, what: str) -> NoReturn:
        raise ValueError(f"{table_name} {id_}: {what}")

    with (
        Database.open(path, readonly=True) as database,
        database.reading() as reading,
        connected(create_file(checked)) as connection,
        connection.begin(),
    ):
        try:
            writer = RowWriter(connection)
            for line in lines(reading, refuse):
                if line.get("kind", "end") != "end":
                    writer.add(line)
            writer.finish()
        except ValueError as error:
            raise DatabaseCorruptError(
                f"{name}, {error}; nothing was imported: restore a copy of the database"
            ) from None
    return checked


def _copy_rows(reading: Connection, source: Table, writing: Connection, into: Table) -> None:
    rows = reading.execute(select(source).order_by(source.c.id), execution_options={"yield_per": _BATCH})
    for chunk in rows.mappings().partitions():
        writing.execute(insert(into), [dict(row) for row in chunk])


# A SQLite file into another database
#
# A SQLite database has the source attached, a server gets its rows in temporary tables; the statements are the same.
# The source is read in one transaction, so that a tuner may go on writing to it.

# Where the source's rows have gone. Made once, as all that statements are made of: so they are compiled once.
_MOVED = Table(
    "moved",
    MetaData(),
    Column("kind", String, primary_key=True),
    Column("old", BigInteger, primary_key=True),
    Column("new", BigInteger, nullable=False),
    prefixes=["TEMPORARY"],
)
_attached = MetaData(schema="source")
_ATTACHED = {name: ours.to_metadata(_attached).alias("theirs") for name, ours in Base.metadata.tables.items()}
_Theirs: TypeAlias = Mapping[str, FromClause]


@dataclass(frozen=True, slots=True, kw_only=True)
class Absorbed:
    """The part that one source had in a merge.

    Attributes:
        source: the file or server.
        trials: trials that it holds.
        known: those of them that were there already, equal in every column.
    """

    source: str
    trials: int
    known: int


def absorb(connection: Connection, source: Source, *, in_order: bool = False) -> Absorbed:
    """Copy all rows of `source` into the open database, all or none; a row that both hold is there once.

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
    target = parse_target(source.path)
    if connection.dialect.name != "sqlite":
        with translated(target), connection.begin():
            return _merge(connection, source.name, _upload(connection, target), in_order=in_order)
    driver = connection.connection.driver_connection
    assert driver is not None
    with translated(target):
        # Outside of a transaction: within one nothing can be attached.
        uri = file_uri(source.path, readonly=True, immutable=is_immutable(source.path))
        driver.execute("ATTACH DATABASE ? AS source", (uri,))
        try:
            with connection.begin():
                return _merge(connection, source.name, _ATTACHED, in_order=in_order)
        finally:
            driver.execute("DETACH DATABASE source")


def _upload(connection: Connection, source: Target) -> _Theirs:
    """Send the source's rows to temporary tables of the server's session."""
    # Whoever adds such rows waits for this transaction, as they do for each other.
    exclusive(connection, "intern")
    metadata, theirs = MetaData(), {}
    with connected(source, readonly=True) as reading, reading.begin():
        for ours in Base.metadata.sorted_tables:
            columns = [Column(column.name, column.type) for column in ours.columns]
            copy = Table(f"source_{ours.name}", metadata, *columns, prefixes=["TEMPORARY"])
            copy.create(connection, checkfirst=False)
            _copy_rows(reading, ours, connection, copy)
            connection.exec_driver_sql(f"ANALYZE {copy.name}")
            theirs[ours.name] = copy
    return theirs


def _merge(connection: Connection, name: str, theirs: _Theirs, *, in_order: bool) -> Absorbed:
    had_variants = _count(connection, select(VariantRow.id)) > 0
    _MOVED.create(connection, checkfirst=False)
    for model, identity in _IDENTITY.items():
        _get_or_create(connection, name, theirs, model, identity)
    _finish_runs(connection, theirs)
    absorbed = _append_trials(connection, name, theirs)
    _merge_pins(connection, theirs)
    for temporary in (_MOVED, *(copy for copy in theirs.values() if isinstance(copy, Table))):
        temporary.drop(connection, checkfirst=False)
    if in_order and had_variants and absorbed.known < absorbed.trials:
        _order_variants(connection)
    return absorbed


def _same(ours: Table, theirs: Any, names: Iterable[str]) -> ColumnElement[bool]:
    """NULL equals NULL; where there is none a plain comparison lets a server use hashes and indexes."""

    def equal(name: str) -> ColumnElement[bool]:
        one, other = ours.c[name], theirs.c[name]
        return one.is_not_distinct_from(other) if one.nullable else one == other

    return and_(*map(equal, names))


def _get_or_create(
    connection: Connection, source: str, tables: _Theirs, model: type[Base], identity: tuple[str, ...]
) -> None:
    """Add rows that are new and note where every row has gone."""
    ours, theirs = table(model), tables[model.__tablename__]
    same = _same(ours, theirs, identity)
    names = [column.name for column in ours.columns if column.name != "id"]
    new = select(*(theirs.c[name] for name in names)).where(~exists().where(same).select_from(ours).correlate(theirs))
    connection.execute(insert(ours).from_select(names, new.order_by(theirs.c.id)))
    other = ~_same(ours, theirs, names)
    if identity == ("digest",) and (count := _count(connection, select(ours.c.id).join(theirs, same).where(other))):
        raise DatabaseCorruptError(
            f"{source} holds {count} rows in table {ours.name} that have the digest of another one; leave it out, "
            "or restore a copy of it"
        )
    moved = select(literal(ours.name), theirs.c.id, func.min(ours.c.id)).join(ours, same).group_by(theirs.c.id)
    connection.execute(insert(_MOVED).from_select(["kind", "old", "new"], moved))


def _finish_runs(connection: Connection, tables: _Theirs) -> None:
    """Note the end of runs: a copy that was made while a command ran does not know it."""
    ours, theirs = table(RunRow), tables[RunRow.__tablename__]
    end = (
        select(func.max(theirs.c.finished_at))
        .join(_MOVED, and_(_MOVED.c.kind == ours.name, _MOVED.c.old == theirs.c.id))
        .where(_MOVED.c.new == ours.c.id)
        .correlate(ours)
    )
    connection.execute(update(ours).where(ours.c.finished_at.is_(None)).values(finished_at=end.scalar_subquery()))


def _moved_rows(tables: _Theirs, model: type[Base]) -> tuple[Select[Any], list[str]]:
    """Rows of the source with the ids that they refer to replaced, and the names of their columns."""
    ours, theirs = table(model), tables[model.__tablename__]
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


def _append_trials(connection: Connection, source: str, tables: _Theirs) -> Absorbed:
    ours, theirs = table(TrialRow), tables[TrialRow.__tablename__]
    rows, names = _moved_rows(tables, TrialRow)
    held, whole = _count(connection, select(theirs.c.id)), _count(connection, rows)
    if whole != held:
        raise DatabaseCorruptError(
            f"{held - whole} trials of {source} refer to problems, environments or variants that it does not "
            "hold; leave it out, or restore a copy of it"
        )
    moved = rows.subquery()
    known = exists().where(_same(ours, moved, names)).select_from(ours).correlate(moved)
    before = _count(connection, select(ours.c.id))
    new = select(*(moved.c[name] for name in names)).where(~known).order_by(moved.c.old)
    connection.execute(insert(ours).from_select(names, new))
    added = _count(connection, select(ours.c.id)) - before
    return Absorbed(source=source, trials=held, known=held - added)


def _merge_pins(connection: Connection, tables: _Theirs) -> None:
    ours = table(PinRow)
    rows, names = _moved_rows(tables, PinRow)
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
