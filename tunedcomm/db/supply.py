"""Whatever a database is given as, as a SQLite file of this schema: a file, a server, or lines of JSON."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from tunedcomm.db.download import download
from tunedcomm.db.engine import Target, file_uri, make_engine, parse_target, translated
from tunedcomm.db.intake import Intake, is_jsonl, read_lines
from tunedcomm.db.jsonl import lines
from tunedcomm.db.migrate import ensure_schema, schema_version
from tunedcomm.db.schema import HEAD, REVISIONS
from tunedcomm.db.store import Database
from tunedcomm.errors import DatabaseAccessError, DatabaseCorruptError, DatabaseVersionError

__all__ = ["Supply", "fresh", "supply"]

_TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True)
class Supply:
    """A source as a SQLite file of this schema.

    Attributes:
        name: the source, as messages name it: without a password.
        file: the file: the source itself where it is one already.
        schema: the revision that the source has.
    """

    name: str
    file: Target
    schema: str


def supply(source: str | Path, scratch: Path, *, is_checked: bool = False) -> Supply:
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
    if target.is_sqlite and target.path is None:
        raise DatabaseAccessError(f"{target} is not a SQLite file; give the path of a file, or the URL of a server")
    if target.path is None:
        with Database.open(source, readonly=True) as database:
            schema = database.schema_version
        download(target, scratch)
        found = Supply(str(target), parse_target(scratch), schema)
    elif target.path.is_file() and is_jsonl(target.path):
        _from_lines(target.path, scratch)
        return Supply(str(target), parse_target(scratch), HEAD)
    else:
        found = _of_file(target, scratch)
    if is_checked:
        checked = scratch.with_name(f"checked-{scratch.name}")
        _from_rows(found, checked)
        found = Supply(found.name, parse_target(checked), found.schema)
    return found


def fresh(path: Path) -> Target:
    """A new SQLite file with the tables of this schema and no rows."""
    target = parse_target(path)
    engine = make_engine(target, readonly=False, immutable=False, busy_timeout_s=_TIMEOUT_S)
    try:
        with translated(target):
            ensure_schema(engine, target, create=True, readonly=False)
    finally:
        engine.dispose()
    return target


def _of_file(target: Target, scratch: Path) -> Supply:
    """The file itself, or a copy of it that has this schema."""
    assert target.path is not None
    try:
        with Database.open(target.path, readonly=True) as database:
            if (version := database.schema_version) == HEAD:
                return Supply(str(target), target, version)
    except DatabaseVersionError:
        if (older := _version(target)) not in REVISIONS:
            raise
        version = str(older)
    with (
        translated(target),
        closing(sqlite3.connect(file_uri(target.path, readonly=True, immutable=False), uri=True)) as of,
        closing(sqlite3.connect(scratch)) as to,
    ):
        of.backup(to)
    return Supply(str(target), fresh(scratch), version)


def _version(target: Target) -> str | None:
    engine = make_engine(target, readonly=True, immutable=False, busy_timeout_s=_TIMEOUT_S)
    try:
        with translated(target), engine.connect() as connection:
            return schema_version(connection)
    finally:
        engine.dispose()


def _from_lines(path: Path, scratch: Path) -> None:
    target = fresh(scratch)
    engine = make_engine(target, readonly=False, immutable=False, busy_timeout_s=_TIMEOUT_S)
    try:
        with translated(target), engine.begin() as connection:
            read_lines(path, Intake(connection))
    finally:
        engine.dispose()


def _from_rows(found: Supply, checked: Path) -> None:
    """Fill a new database with what the rows of another one say, row by row."""

    def refuse(row: str, what: str) -> NoReturn:
        raise DatabaseCorruptError(f"{found.name}, {row}: {what}; nothing was imported: restore a copy of the database")

    target = fresh(checked)
    engine = make_engine(target, readonly=False, immutable=False, busy_timeout_s=_TIMEOUT_S)
    try:
        with (
            Database.open(found.file.path or "", readonly=True) as database,
            database.reading() as reading,
            translated(target),
            engine.begin() as connection,
        ):
            intake = Intake(connection)
            for line in lines(reading, refuse):
                if "kind" in line and line["kind"] != "end":
                    intake.add(line)
            intake.finish()
    except ValueError as error:
        raise DatabaseCorruptError(
            f"{found.name}: {error}; nothing was imported: restore a copy of the database"
        ) from None
    finally:
        engine.dispose()
