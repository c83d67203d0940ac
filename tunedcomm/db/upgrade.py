"""Bringing a database of an older tunedcomm to the schema of this one."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tunedcomm.db import migrate, schema
from tunedcomm.db.engine import Target, make_engine, parse_target, prepare_file, translated
from tunedcomm.db.store import cannot_change

__all__ = ["Upgrade", "upgrade_database"]

_TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Upgrade:
    """What was upgraded, or would be.

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
    """Upgrade a database in one transaction: killed at any moment it is as it was, or upgraded.

    A SQLite file is copied to `NAME.bak-<revision>` before, under the lock that keeps writers out. Of a server, make a
    dump with its own tools.

    Args:
        target: a file or any SQLAlchemy URL.
        check: change nothing, only say what would be done.

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
    before = _revision(where)
    if check or before == schema.HEAD:
        return Upgrade(target=str(where), before=before, after=schema.HEAD)
    engine = make_engine(where, readonly=False, immutable=False, busy_timeout_s=_TIMEOUT_S)
    try:
        with translated(where):
            done = migrate.migrate(engine, where)
    finally:
        engine.dispose()
    return Upgrade(target=str(where), before=done.before or before, after=schema.HEAD, copy=done.copy)


def _revision(where: Target) -> str:
    """The stored revision, which this tunedcomm knows."""
    immutable = where.path is not None and cannot_change(where.path)
    engine = make_engine(where, readonly=True, immutable=immutable, busy_timeout_s=_TIMEOUT_S)
    try:
        with translated(where), engine.connect() as connection:
            version = migrate.schema_version(connection)
    finally:
        engine.dispose()
    return migrate.known(where, version)
