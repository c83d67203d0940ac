"""What a driver's exception means, as a named error that says what to do."""

from __future__ import annotations

import contextlib
import shutil
from typing import Any

from tunedcomm.db.target import Target
from tunedcomm.errors import (
    DatabaseAccessError,
    DatabaseAwayError,
    DatabaseBusyError,
    DatabaseCorruptError,
    DatabaseError,
    DatabaseFullError,
    printable,
)

__all__ = ["full", "named"]

# SQLSTATE codes, by their beginnings. Away: connection exceptions, shutdown, crash, start-up, too many connections.
_AWAY = ("08", "57P01", "57P02", "57P03", "57P05", "53300")
_BUSY = ("40001", "40P01", "55P03")
_FULL = ("53100",)
# What a server says that refuses a connection for now, where the driver passes no code on.
_REFUSED_FOR_NOW = ("starting up", "shutting down", "recovery mode", "too many", "connection slots", "terminating")
_NO_SPACE_BYTES = 1 << 20
_MAX_TEXT = 500  # what a driver quotes of a damaged file has no end


def named(target: Target, error: Any) -> DatabaseError:
    """The `DatabaseError` that says what the driver's exception means and what to do next."""
    text = printable(" ".join(str(error).split()))[:_MAX_TEXT]
    low = text.lower()
    found = _sqlite(target, text, low) if target.is_sqlite else _server(target, error, text, low)
    if found is not None:
        return found
    if "no such table" in low or "no such column" in low or _code(error) in ("42P01", "42703"):
        return DatabaseCorruptError(f"{target} does not have the tables of its version ({text}); restore a copy of it")
    if "readonly" in low or "read-only" in low or _code(error) == "42501":
        return DatabaseAccessError(f"{target} cannot be written ({text}); check permissions or set TUNEDCOMM_DB")
    return DatabaseAccessError(f"{target} cannot be used ({text}); check the path, the disk space and the server")


def full(where: object, text: str) -> DatabaseFullError:
    """The error for a place without space."""
    return DatabaseFullError(
        f"no space is left for {where} ({text}); what was recorded before is whole: free some space and run the same "
        "command, or set TUNEDCOMM_DB to a file elsewhere"
    )


def _sqlite(target: Target, text: str, low: str) -> DatabaseError | None:
    if "locked" in low and "locking protocol" not in low:
        return DatabaseBusyError(
            f"{target} is locked by another writer ({text}); wait for it to end, or give each host its own file and "
            "merge them"
        )
    # A log that cannot grow is reported as an I/O error.
    if "disk is full" in low or ("disk i/o" in low and _no_space(target)):
        return full(target, text)
    if "not a database" in low or "malformed" in low or "corrupt" in low or "can't decode" in low:
        return DatabaseCorruptError(
            f"{target} is damaged ({text}); move it away and tune again, or restore a copy. Read what is left with "
            "`sqlite3 FILE .recover`"
        )
    if "interrupted" in low or "too big" in low:
        return DatabaseCorruptError(
            f"{target} takes more to read than a file of its size can hold ({text}); it is damaged, or was made to do "
            "harm: leave it out, or restore a copy of it"
        )
    if "unable to open" in low:
        return DatabaseAccessError(
            f"{target} cannot be opened or made ({text}); check the permissions of it and of its directory, or set "
            "TUNEDCOMM_DB or --db to another file"
        )
    if "locking protocol" in low or "disk i/o" in low:
        return DatabaseAccessError(
            f"{target} cannot be used ({text}); on a network file system give each host a local file (TUNEDCOMM_DB) "
            "and merge them, or use PostgreSQL"
        )
    return None


def _server(target: Target, error: Any, text: str, low: str) -> DatabaseError | None:
    code = _code(error)
    if code.startswith(_BUSY):
        return DatabaseBusyError(f"{target} is held by another writer ({text}); run the command again")
    if code.startswith(_FULL):
        return full(target, text)
    # Without a code no server answered, or it refused the connection with a text alone.
    is_connection = not code and type(error).__name__ in ("OperationalError", "ConnectionTimeout", "InterfaceError")
    is_refused = "fatal:" in low and not any(reason in low for reason in _REFUSED_FOR_NOW)
    if code.startswith(_AWAY) or (is_connection and not is_refused):
        return DatabaseAwayError(
            f"{target} does not answer ({text}); check that the server runs, can be reached from here and takes more "
            "connections"
        )
    if is_refused:
        return DatabaseAccessError(f"{target} refuses the connection ({text}); check user, password and database name")
    return None


def _code(error: Any) -> str:
    """SQLSTATE, as psycopg and psycopg2 name it."""
    return str(getattr(error, "sqlstate", None) or getattr(error, "pgcode", None) or "")


def _no_space(target: Target) -> bool:
    with contextlib.suppress(OSError):
        return target.path is not None and shutil.disk_usage(target.path.parent).free < _NO_SPACE_BYTES
    return False
