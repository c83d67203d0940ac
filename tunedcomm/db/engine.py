"""Engines for SQLite files and database servers, with the guards that untrusted files and many processes need.

A SQLite file may come from elsewhere or be damaged. It is opened with `trusted_schema` off, a query that reads has a
deadline, and only plain tables are written. A driver's exception becomes a `DatabaseError` that names the fix.
"""

from __future__ import annotations

import logging
import operator
import os
import random
import shutil
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote

import sqlalchemy as sa
from sqlalchemy.exc import ArgumentError, DBAPIError, IntegrityError
from sqlalchemy.util import OrderedSet

from tunedcomm.db.schema import HEAD, READABLE, REVISIONS, VERSION_TABLE, Base, WorkingBase
from tunedcomm.db.targets import BUSY_TIMEOUT_S, Target, is_immutable, leftovers, parse_target, prepare_file
from tunedcomm.errors import (
    DatabaseAccessError,
    DatabaseAwayError,
    DatabaseBusyError,
    DatabaseCorruptError,
    DatabaseError,
    DatabaseFullError,
    DatabaseVersionError,
    printable,
)

# A query takes a few seconds of a million trials. Of a damaged file, whose pages point at each other, it never ends.
QUERY_LIMIT_S = 30.0
# Execution option of connections that will write: SQLite takes its write lock at BEGIN. A transaction that begins by
# reading and writes later fails at once, whatever the busy timeout, when another writer came between.
IMMEDIATE = "tunedcomm_immediate"
_LOCK = int.from_bytes(b"tunedcom", "big")  # other applications on a server take locks of other numbers

T = TypeVar("T")
_log = logging.getLogger("tunedcomm")


# Engines


# Seconds, but for the last, which is in milliseconds: unanswered data, a machine that is gone.
_LIBPQ_DEFAULTS = {
    "application_name": "tunedcomm",
    "connect_timeout": 10,
    "keepalives_idle": 30,
    "keepalives_interval": 10,
    "keepalives_count": 3,
    "tcp_user_timeout": 60_000,
}


def make_engine(
    target: Target, *, readonly: bool, immutable: bool = False, busy_timeout_s: float = BUSY_TIMEOUT_S
) -> sa.Engine:
    """An engine of a file or server; `immutable` reads a file that cannot change, without locks and side files.

    A cluster has many processes with an engine or two each, and a server has a limit of connections: an engine keeps
    few. None waits for ever: one that was cut off is noticed when it is taken from the pool, a server that has vanished
    without a word by time-outs.
    """
    path = target.path
    if path is None:
        options: dict[str, Any] = {"pool_pre_ping": True, "pool_size": 1, "max_overflow": 4}
        try:
            if target.url.get_driver_name() in ("psycopg", "psycopg2"):
                given = target.url.query
                options["connect_args"] = {name: value for name, value in _LIBPQ_DEFAULTS.items() if name not in given}
            return sa.create_engine(target.url, **options)
        except (ArgumentError, ImportError) as error:
            raise DatabaseAccessError(
                f"no driver for database {target}: {error}; install it, e.g. pip install 'tunedcomm[postgres]'"
            ) from None
    mode = f"mode={'ro' if readonly else 'rwc'}{'&immutable=1' if immutable else ''}"
    uri = f"file:{quote(os.fsencode(path.absolute()))}?{mode}"
    engine = sa.create_engine(
        "sqlite://", creator=lambda: sqlite3.connect(uri, uri=True, timeout=busy_timeout_s, check_same_thread=False)
    )

    @sa.event.listens_for(engine, "connect")
    def _on_connect(connection: sqlite3.Connection, _: object) -> None:
        set_up(connection, target, readonly=readonly, busy_timeout_s=busy_timeout_s)

    @sa.event.listens_for(engine, "before_cursor_execute")
    def _on_query(_: sa.Connection, cursor: sqlite3.Cursor, *_query: object) -> None:
        if readonly:
            deadline = time.monotonic() + QUERY_LIMIT_S
            cursor.connection.set_progress_handler(lambda: time.monotonic() > deadline, _STEPS_A_LOOK)

    @sa.event.listens_for(engine, "begin")
    def _on_begin(connection: sa.Connection) -> None:
        immediate = connection.get_execution_options().get(IMMEDIATE, False)
        connection.exec_driver_sql("BEGIN IMMEDIATE" if immediate else "BEGIN")

    return engine


@contextmanager
def connected(target: Target, *, readonly: bool = False, immutable: bool = False) -> Iterator[sa.Connection]:
    """One connection to a database, in no transaction; driver errors come out as `DatabaseError`."""
    engine = make_engine(target, readonly=readonly, immutable=immutable)
    try:
        with translated(target), engine.connect().execution_options(**{IMMEDIATE: not readonly}) as connection:
            yield connection
    finally:
        engine.dispose()


def exclusive(connection: sa.Connection) -> None:
    """Exclude others that ask for this until the transaction ends; SQLite's write lock does so by itself."""
    if connection.dialect.name == "postgresql":
        connection.execute(sa.select(sa.func.pg_advisory_xact_lock(_LOCK)))


_STEPS_A_LOOK = 100_000  # of SQLite's virtual machine between two looks at the clock, about a millisecond
_NAMES = ", ".join(f"'{name}'" for name in (*Base.metadata.tables, VERSION_TABLE))
# What runs when rows are written, which nothing bounds.
_PROGRAMS = f"""
SELECT type || ' ' || name FROM sqlite_master WHERE lower(tbl_name) IN ({_NAMES})
  AND (type IN ('view', 'trigger') OR upper(ltrim(sql)) LIKE 'CREATE VIRTUAL%')
"""  # noqa: S608 - our own names
# A damaged row must not end a whole query: what does not decode is rejected as a value later. No function of our own,
# since it is called for every text.
_lenient_text = operator.methodcaller("decode", "utf-8", "replace")


def set_up(connection: sqlite3.Connection, target: Target, *, readonly: bool, busy_timeout_s: float) -> None:
    """Prepare a new connection to a SQLite file, which may come from elsewhere and is not trusted."""
    # Transactions are begun by the engine's "begin" event; the driver's own implicit ones begin too late for DDL.
    connection.isolation_level = None
    connection.text_factory = _lenient_text
    connection.execute("PRAGMA foreign_keys=ON")
    # A file from elsewhere may define functions in views and triggers: they are not to be trusted.
    connection.execute("PRAGMA trusted_schema=OFF")
    if readonly:
        return
    connection.execute("PRAGMA synchronous=NORMAL")
    # Switching to WAL ignores the busy timeout when two processes do it at once; the switch itself lasts for ever.
    deadline, is_wal = time.monotonic() + busy_timeout_s, False
    while not is_wal:
        try:
            if connection.execute("PRAGMA journal_mode").fetchone()[0] != "wal":
                connection.execute("PRAGMA journal_mode=wal")
            is_wal = True
        except sqlite3.OperationalError as error:
            if "locked" not in str(error) or time.monotonic() >= deadline:
                raise
            time.sleep(0.02)
    if (found := connection.execute(_PROGRAMS).fetchone()) is not None:
        raise DatabaseCorruptError(
            f"{target} holds a {found[0]!s:.80} where tunedcomm has plain tables, and is not written: leave it out, or "
            "export its rows to a new file"
        )


# Schema
#
# A new database gets the tables of the models. An older one is upgraded by Alembic in one transaction: killed at any
# moment it is as it was, or upgraded. A SQLite file is copied before, under the lock that keeps writers out.


MIGRATIONS = Path(__file__).parent / "migrations"
_VERSIONS = sa.Table(VERSION_TABLE, sa.MetaData(), sa.Column("version_num", sa.String(32), primary_key=True))
# Alembic keeps its context in module globals.
_alembic_lock = threading.Lock()


@dataclass(frozen=True, slots=True, kw_only=True)
class Upgrade:
    """The result of an upgrade, or what one would do.

    Attributes:
        target: the file, or the server's URL without its password.
        before, after: schema revisions; equal where nothing is to be done.
        copy: the file as it was; None for a server, and where nothing was done.
    """

    target: str
    before: str
    after: str
    copy: Path | None = None

    @property
    def is_needed(self) -> bool:
        """True if the schema was older than this tunedcomm's."""
        return self.before != self.after


def upgrade_database(target: str | Path, *, check: bool = False) -> Upgrade:
    """Upgrade a database, unless `check`; of a SQLite file a copy is kept as `NAME.bak-<revision>`.

    Raises:
        DatabaseAccessError: missing, or it or its directory cannot be written.
        DatabaseCorruptError: no SQLite file, damaged, or no tunedcomm database.
        DatabaseVersionError: written by a newer tunedcomm.
        DatabaseBusyError: another writer held it for longer than half a minute.
    """
    where = parse_target(target)
    if where.path is not None:
        prepare_file(where.path, create=False)
    # Looked at without writing: opening to write would change a file that is up to date.
    immutable = where.path is not None and is_immutable(where.path)
    with connected(where, readonly=True, immutable=immutable) as connection:
        before = _known_revision(where, schema_version(connection))
    copy = None
    if before != HEAD and not check:
        with connected(where) as connection:
            copy = _migrate(connection, where, create=False)
    return Upgrade(target=str(where), before=before, after=HEAD, copy=copy)


def schema_version(connection: sa.Connection) -> str | None:
    """The stored revision, or None where there is no version table."""
    if not sa.inspect(connection).has_table(VERSION_TABLE):
        return None
    version = connection.execute(sa.select(_VERSIONS.c.version_num)).scalar()
    return None if version is None else str(version)


def _known_revision(target: Target, version: str | None) -> str:
    """The revision; an error where there is none, or where it is a later one than this tunedcomm knows."""
    if version is None:
        raise DatabaseCorruptError(
            f"{target} holds no tunedcomm tables: it is empty or belongs to another program; give another path, or "
            "remove it if it is empty and let `tunedcomm tune` make a new one"
        )
    if version not in REVISIONS:
        raise DatabaseVersionError(
            f"{target} was written by a newer tunedcomm (schema {version!r:.40}; this one knows up to {HEAD!r}): "
            "upgrade tunedcomm, or set TUNEDCOMM_DB to another file. It was left untouched"
        )
    return version


def _may_hold_tables(connection: sa.Connection, target: Target) -> bool:
    """True where a writer may make its tables: a shared server's other tables do not matter, a file's do."""
    return target.path is None or not sa.inspect(connection).get_table_names()


def is_unused(target: Target) -> bool:
    """True for a database that exists and has no tables of tunedcomm yet, which a writer makes."""
    with connected(target, readonly=True) as connection:
        return schema_version(connection) is None and _may_hold_tables(connection, target)


def ensure_schema(engine: sa.Engine, target: Target, *, create: bool, readonly: bool) -> str:
    """Check the version, create or upgrade the tables where that is allowed, and return the version."""
    with engine.connect() as connection:
        version = schema_version(connection)
    if version == HEAD or (readonly and version in READABLE):
        return version
    if readonly:
        raise DatabaseVersionError(
            f"{target} has schema {_known_revision(target, version)} and this tunedcomm reads {HEAD}; run `tunedcomm "
            f"db upgrade --db {target}`, on a copy of it if it cannot be written"
        )
    with engine.connect().execution_options(**{IMMEDIATE: True}) as connection:
        copy = _migrate(connection, target, create=create)
    if copy is not None:
        _log.warning("%s was upgraded from schema %s to %s; %s is as it was", target, version, HEAD, copy)
    return HEAD


def create_file(path: Path) -> Target:
    """Make a new SQLite file with the tables of this schema."""
    target = parse_target(path)
    with connected(target) as connection, connection.begin():
        _create_tables(connection)
    return target


def _migrate(connection: sa.Connection, target: Target, *, create: bool) -> Path | None:
    """Bring the tables to `HEAD` in one transaction; returns the copy that is kept of a SQLite file with older ones."""
    with connection.begin():
        # Looked at again under the lock: another process may have made the tables meanwhile.
        exclusive(connection)
        version = schema_version(connection)
        if version is None and create and _may_hold_tables(connection, target):
            _create_tables(connection)
            return None
        version = _known_revision(target, version)
        if version == HEAD:
            return None
        copy = _back_up(target.path, version) if target.path is not None else None
        # Imported here: readers and up-to-date databases never pay for it.
        from alembic import command
        from alembic.config import Config

        config = Config(attributes={"connection": connection})
        # The option passes through ConfigParser, where a per cent sign starts an interpolation.
        config.set_main_option("script_location", str(MIGRATIONS).replace("%", "%%"))
        try:
            with _alembic_lock:
                command.upgrade(config, "head")
        except BaseException:
            if copy is not None:  # The file stays as it was.
                copy.unlink()
            raise
        return copy


def _create_tables(connection: sa.Connection) -> None:
    for metadata in (Base.metadata, WorkingBase.metadata, _VERSIONS.metadata):
        for table in metadata.tables.values():
            # SQLAlchemy makes indexes in the order of a set: another one in every process, and exports would differ.
            table.indexes = OrderedSet(sorted(table.indexes, key=lambda index: (len(index.columns), str(index.name))))
        metadata.create_all(connection, checkfirst=False)
    connection.execute(sa.insert(_VERSIONS).values(version_num=HEAD))


def _back_up(path: Path, revision: str) -> Path:
    """Copy a SQLite file with its log to `NAME.bak-<revision>[-2 and so on]`, which appears complete or not at all."""
    copy, index = path.with_name(f"{path.name}.bak-{revision}"), 1
    while os.path.lexists(copy):  # an earlier copy may hold what a later one does not
        index += 1
        copy = path.with_name(f"{path.name}.bak-{revision}-{index}")
    partial = path.with_name(f".{copy.name}.{os.getpid()}")
    try:
        with (
            translated(parse_target(path)),
            closing(sqlite3.connect(path)) as source,
            closing(sqlite3.connect(partial)) as to,
        ):
            source.backup(to)
            to.execute("PRAGMA journal_mode=DELETE")
        shutil.copymode(path, partial)
        return partial.rename(copy)
    except OSError as error:
        raise DatabaseAccessError(
            f"cannot write {copy}, the copy that is kept of {path}: {error.strerror}; make its directory writable"
        ) from error
    finally:
        partial.unlink(missing_ok=True)


# Errors


@contextmanager
def translated(target: Target) -> Iterator[None]:
    """Turn whatever the driver raises inside into a `DatabaseError` that says what to do."""
    try:
        yield
    except IntegrityError as error:
        raise DatabaseError(f"{target} refused a row: {error.orig}; nothing of this call was stored") from error
    except DBAPIError as error:
        raise driver_error(target, error.orig) from error
    except (sqlite3.Error, OverflowError, UnicodeError) as error:  # the last for names in a file, and of hosts
        raise driver_error(target, error) from error


_NO_SPACE_BYTES = 1 << 20
_MAX_TEXT = 500  # what a driver quotes of a damaged file has no end
# SQLSTATEs of connection exceptions, shutdown, crash, start-up and too many connections.
_AWAY = ("08", "57P01", "57P02", "57P03", "57P05", "53300")
# What a server says that refuses a connection for now, where the driver passes no code on.
_REFUSED_FOR_NOW = (
    "starting up",
    "shutting down",
    "recovery mode",
    "accepting connections",
    "too many",
    "connection slots",
    "terminating",
)
# Error, meaning, words that the driver says, and beginnings of SQLSTATEs; the first that fits counts.
_MEANINGS: tuple[tuple[type[DatabaseError], str, tuple[str, ...], tuple[str, ...]], ...] = (
    (DatabaseFullError, "cannot grow, no space is left", ("disk is full",), ("53100",)),
    (DatabaseBusyError, "is locked by another writer", ("is locked",), ("40001", "40P01", "55P03")),
    (
        DatabaseCorruptError,
        "is not a SQLite database or is damaged",
        ("not a database", "malformed", "corrupt", "can't decode"),
        (),
    ),
    (
        DatabaseCorruptError,
        "does not have the tables of its version",
        ("no such table", "no such column"),
        ("42P01", "42703"),
    ),
)
_ADVICE: Mapping[type[DatabaseError], str] = {
    DatabaseAccessError: "check path and permissions, or user, password and database name; or set TUNEDCOMM_DB or --db "
    "to another database",
    DatabaseAwayError: "check that the server runs, can be reached from here and takes more connections",
    DatabaseBusyError: "wait for it to end, or give each host its own file and merge them",
    DatabaseCorruptError: "move it away and tune again, or restore a copy. Read what is left with `sqlite3 FILE "
    ".recover`, or leave it out if it comes from elsewhere",
    DatabaseFullError: "what was recorded before is whole: free some space and run the same command, or set "
    "TUNEDCOMM_DB to a file elsewhere",
}


def driver_error(target: Target, error: Any) -> DatabaseError:
    """The `DatabaseError` that says what a driver's exception means and what to do next."""
    text = printable(" ".join(str(error).split()))[:_MAX_TEXT]
    low = text.lower()
    # SQLSTATE, as psycopg and psycopg2 name it.
    code = str(getattr(error, "sqlstate", None) or getattr(error, "pgcode", None) or "")

    def says(*words: str) -> bool:
        return any(word in low for word in words)

    is_file = target.path is not None
    left = leftovers(target.path) if target.path is not None and says("unable to open", "readonly") else []
    # Without a code no server answered, or it refused the connection with a text alone.
    is_refused = not is_file and says("fatal:") and not says(*_REFUSED_FOR_NOW)
    is_away = not code and type(error).__name__ in ("OperationalError", "ConnectionTimeout", "InterfaceError")
    kind: type[DatabaseError] = DatabaseAccessError
    known = next((each[:2] for each in _MEANINGS if says(*each[2]) or code.startswith(each[3])), None)
    if says("disk i/o") and target.path is not None and _is_full(target.path):  # a log that cannot grow
        kind, what = _MEANINGS[0][:2]
    elif is_file and says("interrupted", "too big"):
        kind, what = DatabaseCorruptError, f"does not answer a query in {QUERY_LIMIT_S:.0f} s, or holds a value of GiB"
    elif known is not None:
        kind, what = known
    elif not is_file and (code.startswith(_AWAY) or (is_away and not is_refused)):
        kind, what = DatabaseAwayError, "does not answer"
    elif left:
        what = f"has {left[0].name}, which a writer left that was killed: open it once as a user who may write there"
    elif says("readonly", "read-only") or code == "42501":
        what = "cannot be written"
    else:
        what = "refuses the connection" if is_refused else "cannot be used"
    return kind(f"{target} {what} ({text}); {_ADVICE[kind]}")


def _is_full(path: Path) -> bool:
    try:
        return shutil.disk_usage(path.parent).free < _NO_SPACE_BYTES
    except OSError:
        return False


def retry(operation: Callable[[], T], limit_s: float) -> T:
    """Run `operation` until the database is neither away nor locked, for `limit_s` at most. Other errors pass."""
    begin, wait = time.monotonic(), 0.05
    while True:
        try:
            return operation()
        except (DatabaseAwayError, DatabaseBusyError) as error:
            left = limit_s - (time.monotonic() - begin)
            if left <= 0:
                raise
            if wait == 0.05:
                _log.warning("%s. Waiting for it, for up to %.0f s", error, limit_s)
            # Scattered, so that a cluster does not come back all at once.
            time.sleep(min(wait * random.uniform(0.5, 1.0), left))  # noqa: S311
            wait = min(wait * 1.6, 5.0)
