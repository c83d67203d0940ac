"""The schema version of an open database, and bringing it up to date."""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass
from pathlib import Path

from sqlalchemy import Connection, Engine, String, column, inspect, select, table

from tunedcomm.db.backup import back_up
from tunedcomm.db.engine import IMMEDIATE, Target, exclusive
from tunedcomm.db.schema import HEAD, READABLE, REVISIONS, VERSION_TABLE
from tunedcomm.errors import DatabaseCorruptError, DatabaseVersionError

__all__ = ["Migrated", "ensure_schema", "known", "migrate", "schema_version"]

MIGRATIONS = Path(__file__).parent / "migrations"
_log = logging.getLogger("tunedcomm")
_MAX_VERSION = 32
# Alembic keeps its context in module globals.
_alembic_lock = threading.Lock()


def schema_version(connection: Connection) -> str | None:
    """The stored revision, or None where there is no version table."""
    if not inspect(connection).has_table(VERSION_TABLE):
        return None
    version = connection.execute(select(column("version_num", String)).select_from(table(VERSION_TABLE))).scalar()
    return str(version)[:_MAX_VERSION] if version is not None else None


def ensure_schema(engine: Engine, target: Target, *, create: bool, readonly: bool) -> str:
    """Check the version, create or upgrade the tables where that is allowed, and return the version.

    Raises:
        DatabaseCorruptError: no tunedcomm database, and not to be made one.
        DatabaseVersionError: newer than this tunedcomm, or older and open for reading only.
    """
    with engine.connect() as connection:
        version = schema_version(connection)
    if version == HEAD or (readonly and version in READABLE):
        return version
    if readonly:
        raise DatabaseVersionError(
            f"{target} has schema {known(target, version)} and this tunedcomm reads {HEAD}; run `tunedcomm db upgrade "
            f"--db {target}`, on a copy of it if it cannot be written"
        )
    done = migrate(engine, target, create=create)
    if done.copy is not None:
        _log.warning("%s was upgraded from schema %s to %s; %s is as it was", target, done.before, HEAD, done.copy)
    return HEAD


@dataclass(frozen=True, slots=True)
class Migrated:
    """What `migrate` did.

    Attributes:
        before: the revision that it found; None where there were no tables.
        copy: of the file as it was; None for servers, and where nothing had to be done.
    """

    before: str | None
    copy: Path | None = None


def migrate(engine: Engine, target: Target, *, create: bool = False) -> Migrated:
    """Bring the tables to `HEAD` in one transaction; of a SQLite file that has older ones a copy is kept.

    Args:
        engine: may write.
        target: what it is an engine of.
        create: make the tables in a database that has none.

    Raises:
        DatabaseCorruptError: no tunedcomm database, and not to be made one.
        DatabaseVersionError: newer than this tunedcomm.
    """
    with engine.connect().execution_options(**{IMMEDIATE: True}) as connection, connection.begin():
        # Looked at again under the lock: another process may have made the tables meanwhile.
        exclusive(connection, "migrate")
        version = schema_version(connection)
        if version is None and create and not _tables(connection, target):
            _upgrade(connection)
            return Migrated(None)
        version = known(target, version)
        if version == HEAD:
            return Migrated(version)
        # Under the lock, so that no other process adds a trial that the copy lacks.
        copy = back_up(target, f"bak-{version}") if target.path is not None else None
        try:
            _upgrade(connection)
        except BaseException:
            if copy is not None:  # The file stays as it was.
                copy.unlink()
            raise
        return Migrated(version, copy)


def _tables(connection: Connection, target: Target) -> list[str]:
    """What a SQLite file holds already; a shared server's other tables are none of our business."""
    return inspect(connection).get_table_names() if target.is_sqlite else []


def known(target: Target, version: str | None) -> str:
    """The revision, where this tunedcomm knows it.

    Raises:
        DatabaseCorruptError: there is none.
        DatabaseVersionError: it is a later one.
    """
    if version is None:
        raise DatabaseCorruptError(
            f"{target} holds no tunedcomm tables: it is empty or belongs to another program; give another path, or "
            "remove it if it is empty and let `tunedcomm tune` make a new one"
        )
    if version not in REVISIONS:
        raise DatabaseVersionError(
            f"{target} was written by a newer tunedcomm (schema {version!r}; this one knows up to {HEAD!r}): upgrade "
            "tunedcomm, or set TUNEDCOMM_DB to another file. It was left untouched"
        )
    return version


def _upgrade(connection: Connection) -> None:
    # Imported here: readers and up-to-date databases never pay for it.
    from alembic import command
    from alembic.config import Config

    config = Config(attributes={"connection": connection})
    # The option passes through ConfigParser, where a per cent sign starts an interpolation.
    config.set_main_option("script_location", str(MIGRATIONS).replace("%", "%%"))
    with _alembic_lock:
        command.upgrade(config, "head")
