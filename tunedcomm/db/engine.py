"""Engines for SQLite files and database servers, with the guards that untrusted files and many processes need.

A SQLite file may come from elsewhere, be damaged or be made to do harm. So it is opened with `trusted_schema` off, its
tables must be plain tables, no value may be larger than 16 MiB, and a read transaction is interrupted once it takes
more steps than a sound file of its size needs. A driver's exception comes out as a `DatabaseError` with the fix.
"""

from __future__ import annotations

import glob
import hashlib
import itertools
import logging
import operator
import os
import random
import re
import shutil
import sqlite3
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias, TypeVar
from urllib.parse import quote

import platformdirs
from sqlalchemy import URL, Connection, Engine, create_engine, event, func, make_url, select
from sqlalchemy.exc import ArgumentError, DBAPIError, IntegrityError

from tunedcomm import settings
from tunedcomm.db.schema import VERSION_TABLE, Base
from tunedcomm.errors import (
    DatabaseAccessError,
    DatabaseAwayError,
    DatabaseBusyError,
    DatabaseCorruptError,
    DatabaseError,
    DatabaseFullError,
    printable,
)

BUSY_TIMEOUT_S = 30.0
# Execution option of connections that will write: SQLite takes its write lock at BEGIN. A transaction that begins by
# reading and writes later fails at once, whatever the busy timeout, when another writer came between.
IMMEDIATE = "tunedcomm_immediate"

T = TypeVar("T")
_log = logging.getLogger("tunedcomm")
_warned: set[str] = set()


def warn_once(message: str, about: str = "") -> None:
    """Log a warning with stored text made printable, unless this process has logged it before.

    Args:
        message: the text.
        about: the subject, where one warning is enough for all that is said of it; by default the text.
    """
    if (about or message) not in _warned:
        _warned.add(about or message)
        _log.warning("%s", printable(message))


# Targets


class Target(NamedTuple):
    """Where a database is: a SQLAlchemy URL and, for a SQLite file, its path; None for a server."""

    url: URL
    path: Path | None

    @property
    def name(self) -> str:
        """The path, or the URL with its password: what `parse_target` takes."""
        return str(self.path or self.url.render_as_string(hide_password=False))

    def __str__(self) -> str:
        return str(self.path or self.url.render_as_string(hide_password=True))


def parse_target(target: str | Path) -> Target:
    """Read a path or a SQLAlchemy URL.

    Raises:
        DatabaseAccessError: neither, or a SQLite database that is not simply a file.
    """
    text = str(target)
    if "://" not in text:
        if not text or "\x00" in text:
            raise DatabaseAccessError(f"database path {text!r} is empty or holds NUL; pass a file or a SQLAlchemy URL")
        path = expand_home(text)
        return Target(URL.create("sqlite", database=str(path)), path)
    try:
        url = make_url(text)
    except ArgumentError as error:  # passwords stay out of messages, so the text itself is never quoted
        raise DatabaseAccessError(
            f"not a database URL: {error}; use a file path or e.g. postgresql+psycopg://user@host/name"
        ) from None
    if url.get_backend_name() != "sqlite":
        return Target(url, None)
    if url.database in (None, "", ":memory:") or url.query:
        raise DatabaseAccessError(
            f"{url} is a database in memory, or a URL with options, which processes cannot share; give a file's path"
        )
    return Target(url, Path(str(url.database)))


def data_directory() -> Path:
    """The user's data directory for tunedcomm; it need not exist.

    Raises:
        DatabaseAccessError: the user has no home directory.
    """
    try:
        folder = Path(platformdirs.user_data_dir("tunedcomm", appauthor=False))
    except RuntimeError:  # older versions leave the `~` as it stands
        folder = Path("~")
    if folder.parts[0] == "~":
        raise DatabaseAccessError(
            f"user {os.getuid()} has no home directory (HOME is not set, and the system knows no such user): there is "
            "no user database, and untuned problems are not noted. Set HOME, or TUNEDCOMM_DB to a file that may be "
            "written"
        )
    return folder


def expand_home(text: str) -> Path:
    """The path with a leading `~` replaced by the home directory.

    Raises:
        DatabaseAccessError: there is no such directory.
    """
    try:
        return Path(text).expanduser()
    except RuntimeError:
        raise DatabaseAccessError(
            f"database path {text!r} begins with a home directory that is not known (HOME is not set, or there is no "
            "such user); write the path in full"
        ) from None


# Files


_HEADER = b"SQLite format 3\x00"


def prepare_file(path: Path, *, create: bool) -> None:
    """Check a SQLite file before SQLite opens it; with `create`, make its directory if it is missing.

    Raises:
        DatabaseAccessError: missing, a directory, not a regular file, or not readable; or a side file is none.
        DatabaseCorruptError: not a SQLite file.
    """
    try:
        mode = path.stat().st_mode
        if stat.S_ISDIR(mode):
            raise DatabaseAccessError(f"database {path} is a directory; give a file in it, e.g. {path / 'tuned.db'}")
        if not stat.S_ISREG(mode):
            raise DatabaseAccessError(f"database {path} is not a regular file; give the path of a SQLite file")
        for side in side_files(path):  # SQLite would wait for ever for a pipe there
            if os.path.lexists(side) and not side.is_file():
                raise DatabaseAccessError(f"{side} is not a regular file, as SQLite's own one would be; remove it")
        with path.open("rb") as file:
            header = file.read(len(_HEADER))
        if header and header != _HEADER:
            raise DatabaseCorruptError(
                f"{path} is not a SQLite database (it starts with {header!r}); move it away or give another path"
            )
    except FileNotFoundError:
        if not create:
            raise DatabaseAccessError(
                f"database {path} does not exist; `tunedcomm tune` makes one, or correct TUNEDCOMM_DB, "
                "TUNEDCOMM_DB_PATH or --db"
            ) from None
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise DatabaseAccessError(
                f"cannot make directory {path.parent} for the database: {error.strerror}; set TUNEDCOMM_DB to a file "
                "in a directory you may write"
            ) from None
    except OSError as error:
        raise DatabaseAccessError(
            f"cannot read database {path}: {error.strerror}; check the permissions of the file and its directories, "
            "or set TUNEDCOMM_DB to a file you may read"
        ) from None


def side_files(path: Path) -> list[Path]:
    """The paths of a file's write-ahead log, rollback journal and shared memory."""
    return [path.with_name(path.name + suffix) for suffix in ("-wal", "-journal", "-shm")]


def leftovers(path: Path) -> list[Path]:
    """Logs and journals beside a file that hold something: a writer has it open, or one was killed."""
    return [side for side in side_files(path)[:2] if _size(side)]


def num_bytes(path: Path) -> int:
    """Size of a SQLite file and of its write-ahead log; 0 of what is not there."""
    return _size(path) + _size(side_files(path)[0])


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def may_write(path: Path) -> bool:
    """True if this process may write to a file or folder."""
    return os.access(path, os.W_OK, effective_ids=os.access in os.supports_effective_ids)


def is_immutable(path: Path) -> bool:
    """True if a file is to be read without locks: SQLite cannot or should not make files beside it, and none is there.

    Raises:
        DatabaseBusyError: on a network file system, and another host has it open or was killed while it wrote.
    """
    network = network_of(path)
    left = leftovers(path)
    if network and left:
        raise DatabaseBusyError(
            f"{left[0]} shows that a host writes to {path} or was killed meanwhile, and it lies on a network file "
            f"system ({network}) where locks may not hold; read it when that has ended"
        )
    return not left and (bool(network) or not may_write(path.parent))


# Network file systems, and what is shared between a host and its virtual machines or containers.
_NETWORK = frozenset(
    "9p acfs afs beegfs ceph cifs coda gfs gfs2 glusterfs gpfs lustre mmfs ncpfs nfs nfs4 ocfs2 orangefs panfs pvfs2 "
    "quobyte smb2 smb3 smbfs vboxsf virtiofs vmhgfs wekafs".split()
)
_LOCAL_FUSE = frozenset("bindfs cryfs encfs ext2 fuse-overlayfs gocryptfs mergerfs ntfs ntfs-3g squashfuse zfs".split())
_OCTAL = re.compile(r"\\([0-7]{3})")


def file_system(path: str, mounts: str) -> str:
    """The type of the file system of an absolute path by the text of `/proc/self/mounts`; "" if that does not say."""
    found, longest = "", 0
    for line in mounts.splitlines():
        if len(fields := line.split()) < 3:
            continue
        _, point, kind, *_ = fields
        point = _OCTAL.sub(lambda match: chr(int(match[1], 8)), point).rstrip("/") + "/"
        if f"{path}/".startswith(point) and len(point) >= longest:
            found, longest = kind, len(point)
    return found


def network_of(path: Path) -> str:
    """The network file system that holds `path`, e.g. `nfs4`, or "" where SQLite's locks hold.

    TUNEDCOMM_DB_NETWORK=no trusts them anywhere.
    """
    if settings.db_network() == "no":
        return ""
    try:
        # Resolving symbolic links first also mounts what an automounter has in waiting.
        resolved = os.path.realpath(path)
        kind = file_system(resolved, Path("/proc/self/mounts").read_text(encoding="utf-8", errors="replace"))
    except OSError:  # not Linux, or /proc is hidden
        return ""
    family, _, name = kind.partition(".")
    # Behind fuse may be anything: what is not known to be local counts as a network.
    return kind if kind in _NETWORK or (family == "fuse" and name not in _LOCAL_FUSE) else ""


def refuse_network(path: Path) -> None:
    """Raise DatabaseAccessError for a SQLite file that is to be written on a network file system."""
    if network := network_of(path):
        raise DatabaseAccessError(
            f"{path} lies on a network file system ({network}), where SQLite's locks may not hold between hosts. Set "
            "TUNEDCOMM_DB to a file on a local disk, and share what is tuned as a site database (`tunedcomm db "
            "export`, TUNEDCOMM_DB_PATH), or to a PostgreSQL URL; TUNEDCOMM_DB_NETWORK=no trusts the locks"
            + per_host_hint(path)
        )


def per_host_hint(path: Path) -> str:
    """A remark about the `NAME.HOST.db` files that tunedcomm wrote in place of `path` before 0.2, "" if none exist."""
    try:
        files = sorted(path.parent.glob(f"{glob.escape(path.stem)}.*{glob.escape(path.suffix)}"))
    except OSError:
        files = []
    names = " ".join(str(file) for file in files[:3]) + (" …" if len(files) > 3 else "")
    return f". Earlier versions wrote a file a host there: `tunedcomm db import {names}` takes them in" if files else ""


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
) -> Engine:
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
            return create_engine(target.url, **options)
        except (ArgumentError, ImportError) as error:
            raise DatabaseAccessError(
                f"no driver for database {target}: {error}; install it, e.g. pip install 'tunedcomm[postgres]'"
            ) from None
    uri = file_uri(path, readonly=readonly, immutable=immutable)
    engine = create_engine(
        "sqlite://", creator=lambda: sqlite3.connect(uri, uri=True, timeout=busy_timeout_s, check_same_thread=False)
    )

    @event.listens_for(engine, "connect")
    def _on_connect(connection: sqlite3.Connection, _: object) -> None:
        set_pragmas(connection, busy_timeout_s, wal=not readonly)
        if readonly:
            _limit_reading(connection, path)
        _refuse_computed(connection, target, writing=not readonly)

    @event.listens_for(engine, "begin")
    def _on_begin(connection: Connection) -> None:
        if readonly:
            _limit_steps(connection.connection.driver_connection, path)
        immediate = connection.get_execution_options().get(IMMEDIATE, False)
        connection.exec_driver_sql("BEGIN IMMEDIATE" if immediate else "BEGIN")

    return engine


@contextmanager
def connected(target: Target, *, readonly: bool = False, immutable: bool = False) -> Iterator[Connection]:
    """One connection to a database, in no transaction; driver errors come out as `DatabaseError`."""
    engine = make_engine(target, readonly=readonly, immutable=immutable)
    try:
        with translated(target), engine.connect().execution_options(**{IMMEDIATE: not readonly}) as connection:
            yield connection
    finally:
        engine.dispose()


def exclusive(connection: Connection, name: str) -> None:
    """Exclude others that ask for the same name until the transaction ends; SQLite's write lock does so by itself."""
    if connection.dialect.name == "postgresql":
        key = int.from_bytes(hashlib.sha256(f"tunedcomm {name}".encode()).digest()[:8], "big", signed=True)
        connection.execute(select(func.pg_advisory_xact_lock(key)))


def file_uri(path: Path, *, readonly: bool, immutable: bool = False) -> str:
    """SQLite's URI of a file, with which it is opened or attached."""
    return f"file:{quote(str(path.absolute()))}?mode={'ro' if readonly else 'rwc'}{'&immutable=1' if immutable else ''}"


# A damaged row must not end a whole query: what does not decode is rejected as a value later. No function of our own,
# since it is called for every text.
_lenient_text = operator.methodcaller("decode", "utf-8", "replace")


def set_pragmas(connection: sqlite3.Connection, busy_timeout_s: float, *, wal: bool) -> None:
    """Set up a new connection to a SQLite file."""
    # Transactions are begun by the engine's "begin" event; the driver's own implicit ones begin too late for DDL.
    connection.isolation_level = None
    connection.text_factory = _lenient_text
    connection.execute(f"PRAGMA busy_timeout={int(busy_timeout_s * 1000)}")
    connection.execute("PRAGMA foreign_keys=ON")
    # A file from elsewhere may define functions in views and triggers: they are not to be trusted.
    connection.execute("PRAGMA trusted_schema=OFF")
    if not wal:
        return
    connection.execute("PRAGMA synchronous=NORMAL")
    # Switching to WAL ignores the busy timeout when two processes do it at once; the switch itself lasts for ever.
    deadline = time.monotonic() + busy_timeout_s
    while True:
        try:
            if connection.execute("PRAGMA journal_mode").fetchone()[0] != "wal":
                connection.execute("PRAGMA journal_mode=wal")
            return
        except sqlite3.OperationalError as error:
            if "locked" not in str(error) or time.monotonic() >= deadline:
                raise
            time.sleep(0.02)


# Untrusted files


_MAX_VALUE_BYTES = 16 << 20
# Steps of SQLite's virtual machine. To read every row of a sound file takes a tenth of a step a byte, to sort and
# compare them all takes less than one. A few pages that point at each other hold more rows than there are atoms.
_FREE_STEPS = 1_000_000
_STEPS_A_BYTE = 5
_STEPS_A_LOOK = 100_000
_NAMES = ", ".join(f"'{name}'" for name in (*Base.metadata.tables, VERSION_TABLE))
_COMPUTED = f"""
SELECT 'a ' || type || ' ' || name FROM sqlite_master WHERE lower(tbl_name) IN ({_NAMES})
  AND (type = 'view' OR (type = 'trigger' AND :writing)
       OR (type = 'table' AND upper(ltrim(sql)) LIKE 'CREATE VIRTUAL%'))
UNION ALL
SELECT 'a computed column ' || t.name || '.' || c.name FROM sqlite_master AS t, pragma_table_xinfo(t.name) AS c
  WHERE t.type = 'table' AND lower(t.name) IN ({_NAMES}) AND c.hidden > 1
LIMIT 1
"""  # noqa: S608 - our own names


def _limit_reading(connection: sqlite3.Connection, path: Path) -> None:
    """Bound what reading an untrusted file may cost."""
    if hasattr(connection, "setlimit"):  # Python 3.11
        connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, _MAX_VALUE_BYTES)
    connection.execute("PRAGMA cell_size_check=ON")
    connection.execute("PRAGMA mmap_size=0")  # what another process cuts off a mapped file ends this one
    _limit_steps(connection, path)


def _limit_steps(connection: Any, path: Path) -> None:
    """Interrupt what takes more steps from here on than a sound file of this size needs."""
    looks, most = itertools.count(1), (_FREE_STEPS + _STEPS_A_BYTE * num_bytes(path)) // _STEPS_A_LOOK
    connection.set_progress_handler(lambda: next(looks) > most, _STEPS_A_LOOK)


def _refuse_computed(connection: sqlite3.Connection, target: Target, *, writing: bool) -> None:
    """Refuse a file in which a table is a view, is virtual or has a computed column, or `writing` fires a trigger.

    Any of these can run whatever it likes, for as long as it likes.
    """
    found = connection.execute(_COMPUTED, {"writing": writing}).fetchone()
    if found is not None:
        raise DatabaseCorruptError(
            f"{target} holds {found[0]!s:.80} where tunedcomm has plain tables; it was not made by tunedcomm, or was "
            "changed: leave it out, or restore a copy of it"
        )


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
    except (sqlite3.Error, OverflowError, UnicodeDecodeError) as error:  # the last of what SQLite says of names
        raise driver_error(target, error) from error


_NO_SPACE_BYTES = 1 << 20
_MAX_TEXT = 500  # what a driver quotes of a damaged file has no end
# What a server says that refuses a connection for now, where the driver passes no code on.
_REFUSED_FOR_NOW = ("starting up", "shutting down", "recovery mode", "too many", "connection slots", "terminating")


def driver_error(target: Target, error: Any) -> DatabaseError:
    """The `DatabaseError` that says what a driver's exception means and what to do next."""
    text = printable(" ".join(str(error).split()))[:_MAX_TEXT]
    low = text.lower()
    # SQLSTATE, as psycopg and psycopg2 name it.
    code = str(getattr(error, "sqlstate", None) or getattr(error, "pgcode", None) or "")

    def says(*words: str) -> bool:
        return any(word in low for word in words)

    # A log that cannot grow is reported as an I/O error.
    is_full = says("disk i/o") and target.path is not None and _is_full(target.path.parent)
    if is_full or code.startswith("53100") or says("disk is full"):
        return disk_full(target, text)
    found = (_sqlite_error if target.path is not None else _server_error)(target, error, code, says)
    if found is None and (says("no such table", "no such column") or code in ("42P01", "42703")):
        found = DatabaseCorruptError, "does not have the tables of its version", "restore a copy of it"
    if found is None and (says("readonly", "read-only") or code == "42501"):
        found = DatabaseAccessError, "cannot be written", "check permissions or set TUNEDCOMM_DB"
    kind, what, advice = found or (
        DatabaseAccessError,
        "cannot be used",
        "check the path, the disk space and the server",
    )
    return kind(f"{target} {what} ({text}); {advice}")


def disk_full(where: object, text: str) -> DatabaseFullError:
    """The error for a place without space."""
    return DatabaseFullError(
        f"no space is left for {where} ({text}); what was recorded before is whole: free some space and run the same "
        "command, or set TUNEDCOMM_DB to a file elsewhere"
    )


def _is_full(folder: Path) -> bool:
    try:
        return shutil.disk_usage(folder).free < _NO_SPACE_BYTES
    except OSError:
        return False


# The class of an error, what is the matter with the database, and what to do.
_Meaning: TypeAlias = tuple[type[DatabaseError], str, str]


def _sqlite_error(target: Target, error: Any, code: str, says: Callable[..., bool]) -> _Meaning | None:
    if says("database is locked", "table is locked", "schema is locked"):
        advice = "wait for it to end, or give each host its own file and merge them"
        return DatabaseBusyError, "is locked by another writer", advice
    if says("not a database", "malformed", "corrupt", "can't decode"):
        advice = "move it away and tune again, or restore a copy. Read what is left with `sqlite3 FILE .recover`"
        return DatabaseCorruptError, "is damaged", advice
    if says("interrupted", "too big"):
        advice = "it is damaged, or was made to do harm: leave it out, or restore a copy of it"
        return DatabaseCorruptError, "takes more to read than a file of its size can hold", advice
    if says("unable to open", "readonly") and target.path is not None and (left := leftovers(target.path)):
        advice = (
            f"a writer was killed and left {left[0].name}, which only a process that may write there can fold in; open "
            "it once as such a user, e.g. with `sqlite3 FILE 'PRAGMA quick_check'`"
        )
        return DatabaseAccessError, "cannot be used", advice
    if says("unable to open"):
        advice = "check the permissions of it and of its directory, or set TUNEDCOMM_DB or --db to another file"
        return DatabaseAccessError, "cannot be opened or made", advice
    if says("locking protocol", "disk i/o"):
        advice = "on a network file system give each host a local file (TUNEDCOMM_DB) and merge them, or use PostgreSQL"
        return DatabaseAccessError, "cannot be used", advice
    return None


def _server_error(target: Target, error: Any, code: str, says: Callable[..., bool]) -> _Meaning | None:
    if code.startswith(("40001", "40P01", "55P03")):
        return DatabaseBusyError, "is held by another writer", "run the command again"
    # Connection exceptions, shutdown, crash, start-up, too many connections. Without a code no server answered, or it
    # refused the connection with a text alone.
    is_refused = says("fatal:") and not says(*_REFUSED_FOR_NOW)
    is_connection = not code and type(error).__name__ in ("OperationalError", "ConnectionTimeout", "InterfaceError")
    if code.startswith(("08", "57P01", "57P02", "57P03", "57P05", "53300")) or (is_connection and not is_refused):
        advice = "check that the server runs, can be reached from here and takes more connections"
        return DatabaseAwayError, "does not answer", advice
    if is_refused:
        return DatabaseAccessError, "refuses the connection", "check user, password and database name"
    return None


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
