"""Opening the Optuna storage that belongs to a tuned database, apart from its tables.

Beside a SQLite file it is a journal, on PostgreSQL tables in a schema of their own. What Optuna and the drivers raise
comes out as a `DatabaseError`.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import optuna
from optuna.storages import BaseStorage, JournalStorage, RDBStorage, get_storage
from optuna.storages.journal import JournalFileBackend
from sqlalchemy import Engine, text
from sqlalchemy.exc import DBAPIError

from tunedcomm.db.driver_errors import full, named
from tunedcomm.db.engine import Target, exclusive, make_engine, parse_target, server_options, translated
from tunedcomm.errors import DatabaseAccessError, DatabaseCorruptError, DatabaseVersionError
from tunedcomm.tuner.board import Board, StorageBoard
from tunedcomm.tuner.board_postgres import REVISION, PostgresBoard

__all__ = ["SCHEMA", "Studies", "journal_path", "open_studies"]

SCHEMA = "optuna"
# Optuna names no schema, and stores times without their zone, as the session has it. Every query has its index; but the
# tables begin empty, and a plan that is made then would read them from end to end even when they have grown.
_SESSION = {"search_path": SCHEMA, "timezone": "UTC", "enable_seqscan": "off"}
_CONNECT_S = 30.0


@dataclass(frozen=True, slots=True)
class Studies:
    """An open storage.

    Attributes:
        target: the tuned database that it belongs to.
        storage: what Optuna made of it.
        board: claims in it.
        close: ends its connections.
    """

    target: Target
    storage: BaseStorage
    board: Board
    close: Callable[[], None]

    @contextmanager
    def translated(self) -> Iterator[None]:
        """Turn what the storage raises inside into a `DatabaseError`; what Optuna says of trials passes."""
        with _named_errors(self.target):
            yield


def open_studies(database: str | Path, *, heartbeat_s: int, grace_s: int) -> Studies:
    """Open the storage that belongs to a tuned database, and make it where there is none.

    Args:
        database: path or URL of the tuned database.
        heartbeat_s: whole seconds between two heartbeats; PostgreSQL only.
        grace_s: heartbeats older than this are out of date.

    Raises:
        DatabaseError: it cannot be opened or made.
        ValueError: a database in memory, which no other process can share.
    """
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    target = parse_target(database)
    if target.is_sqlite:
        if target.path is None:
            raise ValueError("a database in memory is shared with nobody and needs no ledger")
        return _open_journal(target, journal_path(target.path))
    with _named_errors(target):
        storage = _open_tables(target, heartbeat_s, grace_s)

    def close() -> None:
        storage.remove_session()
        storage.engine.dispose()

    board: Board = StorageBoard(get_storage(storage))
    if target.url.get_backend_name() == "postgresql" and storage.get_current_version() == REVISION:
        board = PostgresBoard(storage.engine, board)
    return Studies(target, storage, board, close)


def journal_path(database: Path) -> Path:
    """The journal that lies beside a SQLite file."""
    return database.with_name(database.name + ".studies.journal")


@contextmanager
def _named_errors(target: Target) -> Iterator[None]:
    try:
        with translated(target):
            yield
    except optuna.exceptions.StorageInternalError as error:
        cause = error.__cause__
        raise named(target, cause.orig if isinstance(cause, DBAPIError) else cause or error) from error
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise full(target, str(error)) from error
        raise DatabaseAccessError(
            f"the journal beside {target} cannot be used ({error}); check the permissions of its directory, or set "
            "TUNEDCOMM_DB to a file on a local disk"
        ) from error
    except json.JSONDecodeError as error:
        raise DatabaseCorruptError(
            f"the journal beside {target} is damaged ({error}); end the sweeps that use it and remove it: it holds no "
            "results"
        ) from error


# Journal


class _FileLock:
    """A lock as Optuna wants one; the kernel lifts it when its holder dies, so that it is never left behind.

    Whoever takes it finds the end of the file as it should be: a line that a killed writer left half written, or that
    met a full disk, is cut off before anything is added to it.
    """

    def __init__(self, path: Path) -> None:
        self._file = path.open("r+b", buffering=0)

    def acquire(self) -> bool:
        fcntl.flock(self._file, fcntl.LOCK_EX)
        size = os.fstat(self._file.fileno()).st_size
        if size and os.pread(self._file.fileno(), 1, size - 1) != b"\n":
            self._cut(size)
        return True

    def _cut(self, size: int) -> None:
        while size:
            begin = max(0, size - 4096)
            newline = os.pread(self._file.fileno(), size - begin, begin).rfind(b"\n")
            if newline >= 0:
                size = begin + newline + 1
                break
            size = begin
        os.ftruncate(self._file.fileno(), size)

    def release(self) -> None:
        fcntl.flock(self._file, fcntl.LOCK_UN)

    def close(self) -> None:
        self._file.close()


class _JournalFile(JournalFileBackend):
    """Optuna's journal file without its wait for the disk at every line.

    Claims need not outlive a loss of power: every process that held one is gone then too. What a writer without space
    leaves of a line is cut off by the next one's lock.
    """

    def __init__(self, path: Path, lock: _FileLock) -> None:
        super().__init__(str(path), lock)  # type: ignore[arg-type]
        self._path = path

    def append_logs(self, logs: list[dict[str, Any]]) -> None:
        data = b"".join(json.dumps(log, separators=(",", ":")).encode() + b"\n" for log in logs)
        self._lock.acquire()
        try:
            with self._path.open("ab", buffering=0) as file:
                if file.write(data) != len(data):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self._path))
        finally:
            self._lock.release()


def _open_journal(target: Target, path: Path) -> Studies:
    """Open the journal; who finds nobody else there begins it anew, as it only says who runs what now."""
    with _named_errors(target):
        users = path.with_suffix(".users").open("ab")
        try:
            try:
                fcntl.flock(users, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.write_bytes(b"")
            except BlockingIOError:
                path.touch()
            fcntl.flock(users, fcntl.LOCK_SH)
            lock = _FileLock(path)
            storage = JournalStorage(_JournalFile(path, lock))
        except BaseException:
            users.close()
            raise

    def close() -> None:
        lock.close()
        users.close()

    return Studies(target, storage, StorageBoard(storage), close)


# PostgreSQL and other servers


def _open_tables(target: Target, heartbeat_s: int, grace_s: int) -> RDBStorage:
    is_postgres = target.url.get_backend_name() == "postgresql"
    options: dict[str, Any] = server_options(target, _SESSION if is_postgres else None)
    url = target.url.render_as_string(hide_password=False)

    def open_storage() -> RDBStorage:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            return RDBStorage(url, engine_kwargs=options, heartbeat_interval=heartbeat_s, grace_period=grace_s)

    engine = make_engine(target, readonly=False, immutable=False, busy_timeout_s=_CONNECT_S)
    try:
        if is_postgres and not _is_made(engine):
            # Optuna makes its tables without regard to others that do so at the same time.
            with engine.begin() as connection:
                exclusive(connection, "studies")
                if not _is_made(engine):
                    _ensure_schema(target, engine)
                    open_storage().engine.dispose()
        return open_storage()
    except RuntimeError as error:
        if "no longer compatible" not in str(error):
            raise
        raise DatabaseVersionError(
            f"Optuna's tables in {target} are of another version of Optuna ({error}); or drop them when no sweep runs "
            f"(DROP SCHEMA {SCHEMA} CASCADE): they hold no results"
        ) from None
    finally:
        engine.dispose()


def _is_made(engine: Engine) -> bool:
    """True if Optuna's tables are complete: it notes their revision last."""
    query = text(
        "SELECT count(*) FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace "
        "WHERE n.nspname = :name AND c.relname = 'alembic_version' AND has_schema_privilege(n.oid, 'USAGE')"
    )
    with engine.begin() as connection:
        if not connection.execute(query, {"name": SCHEMA}).scalar():
            return False
        return connection.execute(text(f"SELECT count(*) FROM {SCHEMA}.alembic_version")).scalar() == 1  # noqa: S608


def _ensure_schema(target: Target, engine: Engine) -> None:
    query = text("SELECT has_schema_privilege(oid, 'USAGE') FROM pg_namespace WHERE nspname = :name")
    with engine.begin() as connection:
        usable = connection.execute(query, {"name": SCHEMA}).scalar()
        if usable is None:
            may = "SELECT has_database_privilege(current_database(), 'CREATE')"
            if not connection.execute(text(may)).scalar():
                raise _no_schema(target, "does not exist, and this user may not create it")
            connection.execute(text(f"CREATE SCHEMA IF NOT EXISTS {SCHEMA}"))
        elif not usable:
            raise _no_schema(target, "belongs to another user")


def _no_schema(target: Target, what: str) -> DatabaseAccessError:
    user = target.url.username or "the user"
    return DatabaseAccessError(
        f"schema {SCHEMA!r} of {target}, in which sweeps share their work, {what}; as the owner of the database run "
        f"CREATE SCHEMA IF NOT EXISTS {SCHEMA}; GRANT ALL ON SCHEMA {SCHEMA} TO {user}, and grant its tables if there "
        "are any"
    )
