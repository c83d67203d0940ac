"""From a path or URL to an engine, and from a driver's exception to a named error."""

from __future__ import annotations

import hashlib
import operator
import sqlite3
import stat
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

from sqlalchemy import URL, Connection, Engine, StaticPool, create_engine, event, func, make_url, select
from sqlalchemy.exc import ArgumentError, DBAPIError, IntegrityError, NoSuchModuleError
from sqlalchemy.pool import ConnectionPoolEntry

from tunedcomm.db import guard
from tunedcomm.db.driver_errors import named
from tunedcomm.db.home import expanded
from tunedcomm.db.netfs import network_of
from tunedcomm.db.target import Target
from tunedcomm.errors import DatabaseAccessError, DatabaseCorruptError, DatabaseError

__all__ = [
    "IMMEDIATE",
    "Target",
    "exclusive",
    "file_uri",
    "make_engine",
    "parse_target",
    "prepare_file",
    "server_options",
    "translated",
]

_HEADER = b"SQLite format 3\x00"
# Execution option of connections that will write: SQLite takes its write lock at BEGIN. A transaction that begins by
# reading and writes later fails at once, whatever the busy timeout, when another writer came between.
IMMEDIATE = "tunedcomm_immediate"
_STEPS = "tunedcomm_steps"  # in a connection's info: what bounds its transactions
# Seconds, but for the last, which is in milliseconds: unanswered data, a machine that is gone.
_LIBPQ_DEFAULTS = {
    "application_name": "tunedcomm",
    "connect_timeout": 10,
    "keepalives_idle": 30,
    "keepalives_interval": 10,
    "keepalives_count": 3,
    "tcp_user_timeout": 60_000,
}


def parse_target(target: str | Path) -> Target:
    """Read a path or a SQLAlchemy URL.

    Raises:
        DatabaseAccessError: neither.
    """
    text = str(target)
    if "://" not in text:
        if not text or "\x00" in text:
            raise DatabaseAccessError(f"database path {text!r} is empty or holds NUL; pass a file or a SQLAlchemy URL")
        path = expanded(text)
        return Target(URL.create("sqlite", database=str(path)), path)
    try:
        url = make_url(text)
        # Passwords stay out of messages, so the text itself is never quoted from here on.
        is_file = url.get_backend_name() == "sqlite" and url.database not in (None, "", ":memory:") and not url.query
        return Target(url, Path(str(url.database)) if is_file else None)
    except (ArgumentError, NoSuchModuleError) as error:
        raise DatabaseAccessError(
            f"not a database URL: {error}; use a file path or e.g. postgresql+psycopg://user@host/name"
        ) from None


def prepare_file(path: Path, *, create: bool) -> None:
    """Check a SQLite file before SQLite sees it; with `create`, make its directory if it is missing.

    Raises:
        DatabaseAccessError: missing, a directory, not a regular file, or not readable.
        DatabaseCorruptError: not a SQLite file.
    """
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        if not create:
            raise DatabaseAccessError(
                f"database {path} does not exist; `tunedcomm tune` makes one, or correct TUNEDCOMM_DB, "
                "TUNEDCOMM_DB_PATH or --db"
            ) from None
        _make_parent(path)
        return
    except OSError as error:
        raise _inaccessible(path, error) from None
    if stat.S_ISDIR(mode):
        raise DatabaseAccessError(f"database {path} is a directory; give a file in it, e.g. {path / 'tuned.db'}")
    if not stat.S_ISREG(mode):
        raise DatabaseAccessError(f"database {path} is not a regular file; give the path of a SQLite file")
    guard.check_side_files(path)
    try:
        with path.open("rb") as file:
            header = file.read(len(_HEADER))
    except OSError as error:
        raise _inaccessible(path, error) from None
    if header and header != _HEADER:
        raise DatabaseCorruptError(
            f"{path} is not a SQLite database (it starts with {header!r}); move it away or give another path"
        )


def _inaccessible(path: Path, error: OSError) -> DatabaseAccessError:
    return DatabaseAccessError(
        f"cannot read database {path}: {error.strerror}; check the permissions of the file and its directories, "
        "or set TUNEDCOMM_DB to a file you may read"
    )


def _make_parent(path: Path) -> None:
    # Several ranks start at once, and a cleaner may remove a directory between two steps of mkdir: try again.
    for attempt in range(5):
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            return
        except FileNotFoundError:
            time.sleep(0.01 * (attempt + 1))
        except OSError as error:
            raise DatabaseAccessError(
                f"cannot make directory {path.parent} for the database: {error.strerror}; "
                "set TUNEDCOMM_DB to a file in a directory you may write"
            ) from None
    raise DatabaseAccessError(f"directory {path.parent} keeps vanishing; set TUNEDCOMM_DB to a file elsewhere")


def make_engine(target: Target, *, readonly: bool, immutable: bool, busy_timeout_s: float) -> Engine:
    """An engine with the pragmas that concurrent ranks and untrusted files need."""
    try:
        if not target.is_sqlite:
            return create_engine(target.url, **server_options(target))
        if target.path is None:
            engine = create_engine(target.url, poolclass=StaticPool if not target.url.query else None)
        else:
            engine = create_engine("sqlite://", creator=_opener(target.path, readonly, immutable, busy_timeout_s))
    except (ArgumentError, ImportError) as error:
        raise DatabaseAccessError(
            f"no driver for database {target}: {error}; install it, e.g. pip install 'tunedcomm[postgres]'"
        ) from None
    journal = None if target.path is None or readonly else _journal_for(target.path)

    @event.listens_for(engine, "connect")
    def _on_connect(connection: sqlite3.Connection, record: ConnectionPoolEntry) -> None:
        _set_pragmas(connection, busy_timeout_s, journal=journal)
        if target.path is not None:
            guard.refuse_computed(connection, target, writing=not readonly)
            if readonly:
                record.info[_STEPS] = guard.restrain(connection, target.path)

    @event.listens_for(engine, "begin")
    def _on_begin(connection: Connection) -> None:
        if steps := connection.info.get(_STEPS):
            steps.begin()
        immediate = connection.get_execution_options().get(IMMEDIATE, False)
        connection.exec_driver_sql("BEGIN IMMEDIATE" if immediate else "BEGIN")

    return engine


def server_options(target: Target, session: Mapping[str, str] | None = None) -> dict[str, Any]:
    """What `create_engine` is given for a server: few connections, and none that waits for ever.

    A cluster has many processes with an engine or two each, and a server has a limit of connections. One that was cut
    off is noticed when it is taken from the pool; a server that has vanished without a word, by time-outs.

    Args:
        target: the server.
        session: parameters of the server for each session.
    """
    options: dict[str, Any] = {"pool_pre_ping": True, "pool_size": 1, "max_overflow": 4}
    if target.url.get_driver_name() not in ("psycopg", "psycopg2"):
        return options
    arguments: dict[str, Any] = {name: value for name, value in _LIBPQ_DEFAULTS.items() if name not in target.url.query}
    if session:
        given = [target.url.query.get("options", ""), *(f"-c{name}={value}" for name, value in session.items())]
        arguments["options"] = " ".join(map(str, given)).strip()
    return {**options, "connect_args": arguments}


def exclusive(connection: Connection, name: str) -> None:
    """Exclude others that ask for the same name until the transaction ends; SQLite's write lock does so by itself."""
    if connection.dialect.name == "postgresql":
        key = int.from_bytes(hashlib.sha256(f"tunedcomm {name}".encode()).digest()[:8], "big", signed=True)
        connection.execute(select(func.pg_advisory_xact_lock(key)))


def file_uri(path: Path, *, readonly: bool, immutable: bool) -> str:
    """SQLite's URI of a file, with which it is opened or attached."""
    return f"file:{quote(str(path.absolute()))}?mode={'ro' if readonly else 'rwc'}{'&immutable=1' if immutable else ''}"


def _opener(path: Path, readonly: bool, immutable: bool, busy_timeout_s: float) -> Callable[[], sqlite3.Connection]:
    uri = file_uri(path, readonly=readonly, immutable=immutable)

    def open_connection() -> sqlite3.Connection:
        return sqlite3.connect(uri, uri=True, timeout=busy_timeout_s, check_same_thread=False)

    return open_connection


# A damaged row must not end a whole query: what does not decode is rejected as a value later. No function of our own,
# since it is called for every text.
_lenient_text = operator.methodcaller("decode", "utf-8", "replace")


def _journal_for(path: Path) -> str:
    """Hosts that share a file cannot share the memory that a write-ahead log needs."""
    return "delete" if network_of(path) else "wal"


def _set_pragmas(connection: sqlite3.Connection, busy_timeout_s: float, *, journal: str | None) -> None:
    # Transactions are begun by the engine's "begin" event; the driver's own implicit ones begin too late for DDL.
    connection.isolation_level = None
    connection.text_factory = _lenient_text
    connection.execute(f"PRAGMA busy_timeout={int(busy_timeout_s * 1000)}")
    connection.execute("PRAGMA foreign_keys=ON")
    # A file from elsewhere may define functions in views and triggers: they are not to be trusted.
    connection.execute("PRAGMA trusted_schema=OFF")
    if journal is None:
        return
    # Without a write-ahead log a power cut could damage the file if SQLite did not wait for the disk.
    connection.execute(f"PRAGMA synchronous={'NORMAL' if journal == 'wal' else 'FULL'}")
    # Switching to WAL ignores the busy timeout when two processes do it at once; the switch itself lasts for ever.
    deadline = time.monotonic() + busy_timeout_s
    while True:
        try:
            if connection.execute("PRAGMA journal_mode").fetchone()[0] != journal:
                connection.execute(f"PRAGMA journal_mode={journal}")
            return
        except sqlite3.OperationalError as error:
            if "locked" not in str(error) or time.monotonic() >= deadline:
                raise
            time.sleep(0.02)


@contextmanager
def translated(target: Target) -> Iterator[None]:
    """Turn whatever the driver raises inside into a `DatabaseError` that says what to do."""
    try:
        yield
    except IntegrityError as error:
        raise DatabaseError(f"{target} refused a row: {error.orig}; nothing of this call was stored") from error
    except DBAPIError as error:
        raise named(target, error.orig) from error
    except (sqlite3.Error, OverflowError, UnicodeDecodeError) as error:  # the last of what SQLite says of names
        raise named(target, error) from error
