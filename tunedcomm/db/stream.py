"""One stream of records between databases: copies, imports, merges and exports are a reader, this stream and a writer.

A record is a typed value: an environment, run, variant, trial or pin. Each comes after the records that it refers to.
There is a reader for each format, databases (SQLite files, servers) and JSON lines, and one writer. Every value is
checked on the way, and a new column of the models is copied without a change here.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from tunedcomm.db import query
from tunedcomm.db.engine import connected, create_file
from tunedcomm.db.jsonl import Record, is_jsonl, read_lines
from tunedcomm.db.query import table
from tunedcomm.db.records import Pin, Reader, Run, Skipped, Trial, own_columns
from tunedcomm.db.schema import PinRow, RunRow, TrialRow, VariantRow
from tunedcomm.db.store import Database, get_or_create, trial_rows
from tunedcomm.db.targets import Target, parse_target
from tunedcomm.db.values import canonical_json
from tunedcomm.errors import DatabaseCorruptError

_BATCH = 2000


@dataclass(frozen=True, slots=True, kw_only=True)
class Absorbed:
    """The share of one source in a merge.

    Attributes:
        source: the file or server.
        trials: trials that it holds.
        known: trials that the target had already, equal in every column.
    """

    source: str
    trials: int
    known: int


def absorb(connection: sa.Connection, source: str | Path, skipped: Skipped | None = None) -> Absorbed:
    """Copy all rows of a database into the open one, all or none; a row that both hold is there once.

    Environments, problems, variants and runs that are there already are used; a pin replaces an older one of the same
    problem and environment. Trials keep their order. The sources of one variant are numbered by
    their first trials, as if all had been measured into this database.

    Args:
        connection: of the database that takes the rows, in no transaction.
        source: a SQLite file, a file of JSON lines, or the URL of a server; it is not changed.
        skipped: takes rows of a database that make no sense, which are left out; None refuses them.

    Raises:
        DatabaseAccessError: the source cannot be read.
        DatabaseCorruptError: it is damaged, or a line or row makes no sense, which is named.
        DatabaseVersionError: it is of a later schema than this tunedcomm.
        DatabaseAwayError: the server does not answer.
    """
    target = parse_target(source)
    with _read(target, skipped) as records, connection.begin():
        trials, known = _write(connection, records)
    return Absorbed(source=str(target), trials=trials, known=known)


def as_database(source: str | Path, scratch: Path) -> str:
    """The source as `Database.open` takes it: itself or, of JSON lines, a new file with their rows."""
    target = parse_target(source)
    if target.path is None or not is_jsonl(target.path):
        return target.name
    with connected(create_file(scratch)) as connection:
        absorb(connection, source)
    return str(scratch)


@contextmanager
def _read(target: Target, skipped: Skipped | None) -> Iterator[Iterator[Record]]:
    """Read the records of a database of any form, each after the records that it refers to."""
    if target.path is not None and is_jsonl(target.path):
        yield read_lines(target.path)
        return
    reader = Reader()
    reader.skipped = _Refusal(target) if skipped is None else skipped
    with Database.open(target.name, readonly=True) as database, database.reading() as connection:
        yield itertools.chain(
            query.load_environments(connection, reader).values(),
            query.runs(connection, reader),
            query.load_variants(connection, reader).values(),
            query.all_trials(connection, reader),
            query.pins(connection, reader),
        )


class _Refusal(Skipped):
    """Raises the first row that makes no sense."""

    def __init__(self, target: Target) -> None:
        super().__init__()
        self._target = target

    def add(self, table: str, id_: object, why: object) -> None:
        raise DatabaseCorruptError(
            f"{self._target}, {table} {id_}: {why}; nothing was imported: correct it, or restore a copy (`tunedcomm db "
            "check` lists the invalid rows of a database)"
        )


def _write(connection: sa.Connection, records: Iterable[Record]) -> tuple[int, int]:
    """Add records to a database, within a transaction; returns how many trials were given, and how many were there."""
    had_variants = connection.execute(sa.select(VariantRow.id).limit(1)).first() is not None
    ours = table(TrialRow)
    columns = [sa.Column(column.name, column.type) for column in ours.columns]
    incoming = sa.Table("incoming", sa.MetaData(), *columns, prefixes=["TEMPORARY"])
    incoming.create(connection, checkfirst=False)
    num_trials = 0
    # Id of a run in the source to its id in this database.
    runs: dict[int | None, int] = {}
    groups: Iterator[tuple[type, Iterator[Any]]] = itertools.groupby(records, key=type)
    for kind, group in groups:
        if kind is Trial:
            while rows := trial_rows(connection, list(itertools.islice(group, _BATCH))):
                for row in rows:
                    num_trials += 1
                    row |= {"id": num_trials, "run_id": runs.get(row["run_id"])}
                connection.execute(sa.insert(incoming), rows)
        elif kind is Run:
            runs |= {run.id: _run_id(connection, run) for run in group}
        elif kind is Pin:
            for pin in group:
                _add_pin(connection, pin)
        else:
            get_or_create(connection, group)
    if connection.dialect.name == "postgresql":
        connection.exec_driver_sql("ANALYZE incoming")
    names = [column.name for column in ours.columns if column.name != "id"]
    is_known = sa.exists().where(_same(ours, incoming, names)).select_from(ours).correlate(incoming)
    known = int(connection.execute(sa.select(sa.func.count()).select_from(incoming).where(is_known)).scalar_one())
    new = sa.select(*(incoming.c[name] for name in names)).where(~is_known).order_by(incoming.c.id)
    connection.execute(sa.insert(ours).from_select(names, new))
    incoming.drop(connection, checkfirst=False)
    if had_variants and known < num_trials:
        _order_variants(connection)
    return num_trials, known


def _run_id(connection: sa.Connection, run: Run) -> int:
    """The id of a run; a copy that was made while its command ran does not know its end."""
    ours = table(RunRow)
    values = {column.name: getattr(run, column.name) for column in own_columns(RunRow)}
    same = [ours.c[name].is_not_distinct_from(values[name]) for name in values if name != "finished_at"]
    id_ = connection.execute(sa.select(sa.func.min(ours.c.id)).where(*same)).scalar()
    if id_ is None:
        id_ = connection.execute(sa.insert(ours).values(values).returning(ours.c.id)).scalar_one()
    elif run.finished_at is not None:
        unfinished = sa.update(ours).where(ours.c.id == id_, ours.c.finished_at.is_(None))
        connection.execute(unfinished.values(finished_at=run.finished_at))
    return int(id_)


def _add_pin(connection: sa.Connection, pin: Pin) -> None:
    ours, candidate = table(PinRow), pin.candidate
    of = {
        "problem_id": get_or_create(connection, [pin.problem])[pin.problem],
        "environment_id": get_or_create(connection, [pin.environment])[pin.environment],
    }
    same = sa.and_(*(ours.c[name] == id_ for name, id_ in of.items()))
    connection.execute(sa.delete(ours).where(same, ours.c.created_at < pin.created_at))
    if connection.execute(sa.select(ours.c.id).where(same)).first() is None:
        values = {"reason": pin.reason, "user": pin.user, "created_at": pin.created_at}
        chosen = {"variant": candidate.variant, "config": canonical_json(candidate.config_dict)}
        connection.execute(sa.insert(ours).values(of | chosen | values))


def _same(ours: sa.Table, incoming: sa.Table, names: list[str]) -> sa.ColumnElement[bool]:
    """NULL equals NULL; where there is none a plain comparison lets a server use hashes and indexes."""
    pairs = [(ours.c[name], incoming.c[name]) for name in names]
    return sa.and_(*(one.is_not_distinct_from(other) if one.nullable else one == other for one, other in pairs))


def _order_variants(connection: sa.Connection) -> None:
    """Give of the variants of one name the highest number to the newest: the one whose first trial came last.

    A variant that changes its place gets a row of its own before its trials are moved there: a server checks references
    at every statement.
    """
    ours, trials = table(VariantRow), table(TrialRow)
    # As it is stored: all times of one database are in one form.
    first = sa.type_coerce(sa.func.min(trials.c.created_at), sa.String())
    firsts = dict(map(tuple, connection.execute(sa.select(trials.c.variant_id, first).group_by(trials.c.variant_id))))
    groups: dict[tuple[str, str], list[Any]] = {}
    for row in connection.execute(sa.select(ours).order_by(ours.c.id)).mappings():
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
        held = connection.execute(sa.insert(ours).values({**values, "source_hash": f"moved from {row['id']}"}))
        assert held.inserted_primary_key is not None
        new = held.inserted_primary_key[0]
        connection.execute(sa.update(trials).where(trials.c.variant_id == row["id"]).values(variant_id=new))
        connection.execute(sa.delete(ours).where(ours.c.id == row["id"]))
        connection.execute(sa.update(ours).where(ours.c.id == new).values(source_hash=row["source_hash"]))
