"""The schema version of an open database, and bringing it up to date."""

from __future__ import annotations

import threading
from pathlib import Path

from sqlalchemy import Connection, Engine, String, column, inspect, select, table

from tunedcomm.db.engine import IMMEDIATE, Target, exclusive
from tunedcomm.db.schema import HEAD, REVISIONS, VERSION_TABLE
from tunedcomm.errors import DatabaseCorruptError, DatabaseVersionError

__all__ = ["ensure_schema", "schema_version"]

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
    if version == HEAD:
        return HEAD
    if readonly:
        _refuse_unknown(target, version)
        raise DatabaseVersionError(
            f"{target} has schema {version} and this tunedcomm reads {HEAD}; run `tunedcomm db upgrade` on a copy that "
            "can be written"
        )
    with engine.connect().execution_options(**{IMMEDIATE: True}) as connection, connection.begin():
        # Looked at again under the lock: another process may have made the tables meanwhile.
        exclusive(connection, "migrate")
        version = schema_version(connection)
        if version is None and create and not _tables(connection, target):
            _upgrade(connection)
        else:
            _refuse_unknown(target, version)
            if version != HEAD:
                _upgrade(connection)
    return HEAD


def _tables(connection: Connection, target: Target) -> list[str]:
    """What a SQLite file holds already; a shared server's other tables are none of our business."""
    return inspect(connection).get_table_names() if target.is_sqlite else []


def _refuse_unknown(target: Target, version: str | None) -> None:
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


def _upgrade(connection: Connection) -> None:
    # Imported here: readers and up-to-date databases never pay for it.
    from alembic import command
    from alembic.config import Config

    config = Config(attributes={"connection": connection})
    # The option passes through ConfigParser, where a per cent sign starts an interpolation.
    config.set_main_option("script_location", str(Path(__file__).parent / "migrations").replace("%", "%%"))
    with _alembic_lock:
        command.upgrade(config, "head")
