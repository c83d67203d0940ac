"""From a path or URL to an engine, and from a driver's exception to a named error."""

from __future__ import annotations

import sqlite3
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

from sqlalchemy import URL, Connection, Engine, StaticPool, create_engine, event, make_url
from sqlalchemy.exc import ArgumentError, DBAPIError, IntegrityError, NoSuchModuleError

from tunedcomm.errors import (
    DatabaseAccessError,
    DatabaseBusyError,
    DatabaseCorruptError,
    DatabaseError,
)

__all__ = ["IMMEDIATE", "Target", "file_uri", "make_engine", "parse_target", "prepare_file", "translated"]

_HEADER = b"SQLite format 3\x00"
# Execution option of connections that will write: SQLite takes its write lock at BEGIN. A transaction that begins by
# reading and writes later fails at once, whatever the busy timeout, when another writer came between.
IMMEDIATE = "tunedcomm_immediate"


class Target:
    """Where a database is: a SQLAlchemy URL and, for a SQLite file, its path."""

    def __init__(self, url: URL, path: Path | None) -> None:
        self.url = url
        self.path = path

    @property
    def is_sqlite(self) -> bool:
        return self.url.get_backend_name() == "sqlite"

    def __str__(self) -> str:
        return str(self.path) if self.path is not None else self.url.render_as_string(hide_password=True)


def parse_target(target: str | Path) -> Target:
    """Read a path or a SQLAlchemy URL.

    Raises:
        DatabaseAccessError: neither.
    """
    text = str(target)
    if "://" not in text:
        if not text or "\x00" in text:
            raise DatabaseAccessError(f"database path {text!r} is empty or holds NUL; pass a file or a SQLAlchemy URL")
        path = Path(text).expanduser()
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
                f"database {path} does not exist; `tunedcomm tune` makes one, or correct TUNEDCOMM_DB or --db"
            ) from None
        _make_parent(path)
        return
    except OSError as error:
        raise _inaccessible(path, error) from None
    if stat.S_ISDIR(mode):
        raise DatabaseAccessError(f"database {path} is a directory; give a file in it, e.g. {path / 'tuned.db'}")
    if not stat.S_ISREG(mode):
        raise DatabaseAccessError(f"database {path} is not a regular file; give the path of a SQLite file")
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
            return create_engine(target.url, pool_pre_ping=True)
        if target.path is None:
            engine = create_engine(target.url, poolclass=StaticPool if not target.url.query else None)
        else:
            engine = create_engine("sqlite://", creator=_opener(target.path, readonly, immutable, busy_timeout_s))
    except (ArgumentError, ImportError) as error:
        raise DatabaseAccessError(
            f"no driver for database {target}: {error}; install it, e.g. pip install 'tunedcomm[postgres]'"
        ) from None
    use_wal = target.path is not None and not readonly

    @event.listens_for(engine, "connect")
    def _on_connect(connection: sqlite3.Connection, record: object) -> None:
        _set_pragmas(connection, busy_timeout_s, use_wal=use_wal)

    @event.listens_for(engine, "begin")
    def _on_begin(connection: Connection) -> None:
        immediate = connection.get_execution_options().get(IMMEDIATE, False)
        connection.exec_driver_sql("BEGIN IMMEDIATE" if immediate else "BEGIN")

    return engine


def file_uri(path: Path, *, readonly: bool, immutable: bool) -> str:
    """SQLite's URI of a file, with which it is opened or attached."""
    return f"file:{quote(str(path.absolute()))}?mode={'ro' if readonly else 'rwc'}{'&immutable=1' if immutable else ''}"


def _opener(path: Path, readonly: bool, immutable: bool, busy_timeout_s: float) -> Callable[[], sqlite3.Connection]:
    uri = file_uri(path, readonly=readonly, immutable=immutable)

    def open_connection() -> sqlite3.Connection:
        return sqlite3.connect(uri, uri=True, timeout=busy_timeout_s, check_same_thread=False)

    return open_connection


def _lenient_text(raw: bytes) -> str:
    """A damaged row must not end a whole query; what does not decode is rejected as a value later."""
    return raw.decode("utf-8", "replace")


def _set_pragmas(connection: sqlite3.Connection, busy_timeout_s: float, *, use_wal: bool) -> None:
    # Transactions are begun by the engine's "begin" event; the driver's own implicit ones begin too late for DDL.
    connection.isolation_level = None
    connection.text_factory = _lenient_text
    connection.execute(f"PRAGMA busy_timeout={int(busy_timeout_s * 1000)}")
    connection.execute("PRAGMA foreign_keys=ON")
    # A file from elsewhere may define functions in views and triggers: they are not to be trusted.
    connection.execute("PRAGMA trusted_schema=OFF")
    if not use_wal:
        return
    connection.execute("PRAGMA synchronous=NORMAL")
    # Switching to WAL ignores the busy timeout when two processes do it at once; the switch itself lasts for ever.
    deadline = time.monotonic() + busy_timeout_s
    while True:
        try:
            if connection.execute("PRAGMA journal_mode").fetchone()[0] != "wal":
                connection.execute("PRAGMA journal_mode=WAL")
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
        raise _named(target, error.orig) from error
    except (sqlite3.Error, OverflowError) as error:
        raise _named(target, error) from error


def _named(target: Target, error: Any) -> DatabaseError:
    text = str(error).strip()
    low = text.lower()
    if "locked" in low and "locking protocol" not in low:
        return DatabaseBusyError(
            f"{target} is locked by another writer ({text}); wait for it to end, or give each host its own file and "
            "merge them"
        )
    if "not a database" in low or "malformed" in low or "corrupt" in low:
        return DatabaseCorruptError(
            f"{target} is damaged ({text}); move it away and tune again, or restore a copy. Read what is left with "
            "`sqlite3 FILE .recover`"
        )
    if "no such table" in low or "no such column" in low:
        return DatabaseCorruptError(f"{target} does not have the tables of its version ({text}); restore a copy of it")
    if "unable to open" in low:
        return DatabaseAccessError(
            f"{target} cannot be opened or made ({text}); check the permissions of it and of its directory, or set "
            "TUNEDCOMM_DB or --db to another file"
        )
    if "readonly" in low or "read-only" in low:
        return DatabaseAccessError(f"{target} cannot be written ({text}); check permissions or set TUNEDCOMM_DB")
    if "is full" in low or "no space" in low or "disk full" in low:
        return DatabaseAccessError(
            f"no space is left for {target} ({text}); what was stored is intact: make room and run the same command "
            "again, or set TUNEDCOMM_DB or --db to a file on another disk"
        )
    if "locking protocol" in low or "disk i/o" in low:
        return DatabaseAccessError(
            f"{target} cannot be used ({text}); on a network file system give each host a local file (TUNEDCOMM_DB) "
            "and merge them, or use PostgreSQL"
        )
    return DatabaseAccessError(f"{target} cannot be used ({text}); check the path, the disk space and the server")
