"""The schema version of a database, and bringing it up to date.

A new database gets the tables of the models. An older one is upgraded by Alembic in one transaction: killed at any
moment it is as it was, or upgraded. A SQLite file is copied before, under the lock that keeps writers out.
"""

from __future__ import annotations

import errno
import logging
import os
import shutil
import sqlite3
import threading
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import sqlalchemy as sa
from sqlalchemy import Connection, Engine

from tunedcomm.db.engine import (
    BUSY_TIMEOUT_S,
    IMMEDIATE,
    Target,
    connected,
    disk_full,
    exclusive,
    file_uri,
    is_immutable,
    parse_target,
    prepare_file,
    translated,
)
from tunedcomm.db.schema import HEAD, READABLE, REVISIONS, VERSION_TABLE, Base, WorkingBase
from tunedcomm.errors import DatabaseAccessError, DatabaseCorruptError, DatabaseVersionError

MIGRATIONS = Path(__file__).parent / "migrations"
_log = logging.getLogger("tunedcomm")
# As Alembic makes it.
_MAX_VERSION = 32
_VERSIONS = sa.Table(
    VERSION_TABLE,
    sa.MetaData(),
    sa.Column("version_num", sa.String(_MAX_VERSION)),
    sa.PrimaryKeyConstraint("version_num", name=f"{VERSION_TABLE}_pkc"),
)
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


def schema_version(connection: Connection) -> str | None:
    """The stored revision, or None where there is no version table."""
    if not sa.inspect(connection).has_table(VERSION_TABLE):
        return None
    version = connection.execute(sa.select(_VERSIONS.c.version_num)).scalar()
    return str(version)[:_MAX_VERSION] if version is not None else None


def _known_revision(target: Target, version: str | None) -> str:
    """The revision; an error where there is none, or where it is a later one than this tunedcomm knows."""
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


def ensure_schema(engine: Engine, target: Target, *, create: bool, readonly: bool) -> str:
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


def _migrate(connection: Connection, target: Target, *, create: bool) -> Path | None:
    """Bring the tables to `HEAD` in one transaction; returns the copy that is kept of a SQLite file with older ones."""
    with connection.begin():
        # Looked at again under the lock: another process may have made the tables meanwhile.
        exclusive(connection, "migrate")
        version = schema_version(connection)
        # A shared server's other tables are none of our business.
        if version is None and create and not (target.path is not None and sa.inspect(connection).get_table_names()):
            _create_tables(connection)
            return None
        version = _known_revision(target, version)
        if version == HEAD:
            return None
        copy = _back_up(target.path, f"bak-{version}") if target.path is not None else None
        try:
            _upgrade_tables(connection)
        except BaseException:
            if copy is not None:  # The file stays as it was.
                copy.unlink()
            raise
        return copy


def _create_tables(connection: Connection) -> None:
    for metadata in (Base.metadata, WorkingBase.metadata, _VERSIONS.metadata):
        metadata.create_all(connection, checkfirst=False)
    connection.execute(sa.insert(_VERSIONS).values(version_num=HEAD))


def _upgrade_tables(connection: Connection) -> None:
    # Imported here: readers and up-to-date databases never pay for it.
    from alembic import command
    from alembic.config import Config

    config = Config(attributes={"connection": connection})
    # The option passes through ConfigParser, where a per cent sign starts an interpolation.
    config.set_main_option("script_location", str(MIGRATIONS).replace("%", "%%"))
    with _alembic_lock:
        command.upgrade(config, "head")


def _back_up(path: Path, suffix: str) -> Path:
    """Copy a SQLite file to `NAME.<suffix>`, or `NAME.<suffix>-2` and so on; it appears complete or not at all."""
    copy, number = path.with_name(f"{path.name}.{suffix}"), 1
    while os.path.lexists(copy):  # an earlier copy may hold what a later one does not
        number += 1
        copy = path.with_name(f"{path.name}.{suffix}-{number}")
    partial = path.with_name(f".{copy.name}.{os.getpid()}")
    try:
        copy_file(path, partial)
        shutil.copymode(path, partial)
        with partial.open("rb") as written:
            os.fsync(written.fileno())
        return partial.rename(copy)
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise disk_full(copy, str(error)) from error
        raise DatabaseAccessError(
            f"cannot write {copy}, the copy that is kept of {path}: {error.strerror}; make its directory writable"
        ) from error
    finally:
        partial.unlink(missing_ok=True)


def copy_file(path: Path, copy: Path) -> None:
    """Copy a SQLite file as it is at one moment, its log included, to one new file."""
    with (
        translated(parse_target(path)),
        closing(sqlite3.connect(file_uri(path, readonly=True), uri=True, timeout=BUSY_TIMEOUT_S)) as source,
        closing(sqlite3.connect(copy)) as to,
    ):
        source.backup(to)
        to.execute("PRAGMA journal_mode=DELETE")
