"""Is a database sound? Looks at the file, the schema and every row, and says what to do about what is wrong."""

from __future__ import annotations

import os
import sqlite3
import stat
from contextlib import closing
from pathlib import Path

from tunedcomm.db.check_rows import RowReport, check_rows
from tunedcomm.db.engine import Target, file_uri, is_immutable, network_of, parse_target, prepare_file
from tunedcomm.db.findings import Finding
from tunedcomm.db.migrate import upgrade_database
from tunedcomm.db.schema import SOUND
from tunedcomm.db.sources import SourceHash
from tunedcomm.db.store import Database
from tunedcomm.errors import DatabaseBusyError, DatabaseError, DatabaseVersionError

__all__ = ["check_database", "invalid_rows"]

_TIMEOUT_S = 30.0
_MAX_FAULTS = 20
_RESTORE = (
    "move it away and restore a copy or an exported file; the `.recover` of the program sqlite3 may save what it held, "
    "else tune again"
)


def check_database(target: str | Path, source_hash: SourceHash) -> list[Finding]:
    """Look at everything about a database; nothing is changed, and tuners may go on writing to it.

    Args:
        target: a file or any SQLAlchemy URL.
        source_hash: what the variants' sources are now; the variants must be registered.

    Returns:
        A finding for everything that was looked at; the database is sound where none has the level `fail`.

    Raises:
        DatabaseBusyError: another process has held it locked for half a minute.
    """
    where = parse_target(target)
    found: list[Finding] = []
    if where.path is not None:
        try:
            prepare_file(where.path, create=False)
        except DatabaseError as error:
            return [Finding("file", "fail", str(error), _RESTORE if where.path.is_file() else "give another path")]
        found += [*_side_files(where.path), *_permissions(where.path), _file_system(where.path)]
        damage = _damage(where)
        found += damage
        if any(finding.name == "integrity" and finding.level == "fail" for finding in damage):
            return found  # what its rows hold means nothing then
    return [*found, *_content(target, source_hash)]


def invalid_rows(database: Database, source_hash: SourceHash) -> RowReport:
    """What is wrong with the rows of an open database; see `check_rows`."""
    with database.reading() as connection:
        return check_rows(connection, source_hash)


def _content(target: str | Path, source_hash: SourceHash) -> list[Finding]:
    try:
        state = upgrade_database(target, check=True)
        if state.before not in SOUND:
            text = f"revision {state.before}, and this tunedcomm reads {state.after}"
            return [Finding("schema", "fail", text, f"`tunedcomm db upgrade --db {state.target}`")]
        with Database.open(target, readonly=True) as database:
            schema = Finding("schema", "ok", f"revision {database.schema_version}")
            return [schema, *invalid_rows(database, source_hash).findings]
    except DatabaseVersionError as error:
        return [Finding("schema", "fail", str(error), "upgrade tunedcomm")]
    except DatabaseBusyError:
        raise
    except DatabaseError as error:
        return [Finding("content", "fail", str(error), _RESTORE)]


def _side_files(path: Path) -> list[Finding]:
    """What SQLite keeps beside a file that is open, and leaves there when its process is killed."""
    found = []
    for suffix in ("-wal", "-journal"):
        side = path.with_name(path.name + suffix)
        size = side.stat().st_size if side.exists() else 0
        if not size:
            continue
        text = f"{side.name} holds {size} bytes: a process has the database open, or one was killed"
        mend = f"nothing while one has; the next command that writes folds it in. Never move {path.name} without it"
        found.append(Finding("side files", "warn", text, mend))
    return found or [Finding("side files", "ok", "none")]


def _permissions(path: Path) -> list[Finding]:
    found = []
    writable, folder = _may_write(path), _may_write(path.parent)
    if writable and not folder:
        text = f"{path} may be written and its directory may not, so that SQLite cannot write it either"
        found.append(Finding("permissions", "warn", text, "make the directory writable, or the file read-only"))
    for place in (path, path.parent):
        mode = place.stat().st_mode
        if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
            text = f"every user may change {place}, and with it which kernels run for others"
            found.append(Finding("permissions", "warn", text, f"chmod o-w {place}"))
    rights = "it can be read and written" if writable and folder else "it can be read, not written"
    return found or [Finding("permissions", "ok", rights)]


def _file_system(path: Path) -> Finding:
    kind = network_of(path)
    if not kind:
        return Finding("file system", "ok", "local to this host")
    text = f"{path} lies on a network file system ({kind}), where SQLite's locks do not hold between hosts"
    return Finding("file system", "warn", text, "only read it, as a site database")


def _may_write(path: Path) -> bool:
    return os.access(path, os.W_OK, effective_ids=os.access in os.supports_effective_ids)


def _damage(where: Target) -> list[Finding]:
    """What SQLite itself says of the file, and what nobody but an intruder would have put into it."""
    assert where.path is not None
    uri = file_uri(where.path, readonly=True, immutable=is_immutable(where.path))
    try:
        with closing(sqlite3.connect(uri, uri=True, timeout=_TIMEOUT_S)) as connection:
            connection.text_factory = bytes
            connection.execute("PRAGMA trusted_schema=OFF")
            faults = [_text(row[0]) for row in connection.execute(f"PRAGMA integrity_check({_MAX_FAULTS})")]
            dangling = connection.execute("PRAGMA foreign_key_check").fetchall() if faults == ["ok"] else []
            strange = connection.execute("SELECT type, name FROM sqlite_master WHERE type IN ('trigger', 'view')")
            made = [f"{_text(kind)} {_text(name)}" for kind, name in strange]
    except (sqlite3.Error, UnicodeDecodeError) as error:  # the last of what SQLite says of names
        if "locked" in str(error):
            raise DatabaseBusyError(f"{where} is locked by another process ({error}); run the command again") from error
        return [Finding("integrity", "fail", f"SQLite cannot read it: {error}", _RESTORE)]
    if faults != ["ok"]:
        return [Finding("integrity", "fail", f"SQLite finds it damaged: {'; '.join(faults)[:600]}", _RESTORE)]
    found = [Finding("integrity", "ok", "SQLite finds nothing wrong")]
    if dangling:
        first = ", ".join(f"{_text(row[0])} {row[1]}" for row in dangling[:3])
        text = f"{len(dangling)} rows refer to rows that are not there: {first}"
        found.append(Finding("references", "fail", text, "`tunedcomm db prune --invalid` removes them"))
    else:
        found.append(Finding("references", "ok", "every row that another one refers to is there"))
    if made:
        text = f"it holds what tunedcomm does not make: {', '.join(made)[:300]}"
        found.append(Finding("objects", "fail", text, "do not write to it; export what it holds to a new file"))
    return found


def _text(raw: object) -> str:
    return raw.decode("utf-8", "replace") if isinstance(raw, bytes) else str(raw)
