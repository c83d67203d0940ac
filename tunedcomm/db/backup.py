"""A copy of a SQLite file, whole whatever others write meanwhile."""

from __future__ import annotations

import os
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

from tunedcomm.db.driver_errors import full
from tunedcomm.db.engine import Target, file_uri, translated
from tunedcomm.errors import DatabaseAccessError

__all__ = ["back_up"]

_TIMEOUT_S = 30.0
_ENOSPC = 28


def back_up(target: Target, suffix: str) -> Path:
    """Copy the file to `NAME.<suffix>` beside it, or `NAME.<suffix>-2` and so on where that is taken; returns the copy.

    What is in the write-ahead log is in the copy too. It appears complete or not at all. Whoever wants it to hold
    everything up to this moment holds the file's write lock.

    Raises:
        DatabaseError: the file cannot be read, or there is no place for a copy.
    """
    path = target.path
    assert path is not None
    copy = _free_name(path, suffix)
    partial = path.with_name(f".{copy.name}.{os.getpid()}")
    uri = file_uri(path, readonly=True, immutable=False)
    try:
        with (
            translated(target),
            closing(sqlite3.connect(uri, uri=True, timeout=_TIMEOUT_S)) as of,
            closing(sqlite3.connect(partial)) as to,
        ):
            of.backup(to)
            to.execute("PRAGMA journal_mode=DELETE")  # one file, whatever the other one keeps beside it
        shutil.copymode(path, partial)
        with partial.open("rb") as written:
            os.fsync(written.fileno())
        partial.rename(copy)
    except OSError as error:
        if error.errno == _ENOSPC:
            raise full(copy, str(error)) from error
        raise DatabaseAccessError(
            f"cannot write {copy}, the copy that is kept of {path}: {error.strerror}; make its directory writable"
        ) from error
    finally:
        partial.unlink(missing_ok=True)
    return copy


def _free_name(path: Path, suffix: str) -> Path:
    """A name that nothing has: an earlier copy may hold what a later one does not."""
    copy, number = path.with_name(f"{path.name}.{suffix}"), 1
    while os.path.lexists(copy):
        number += 1
        copy = path.with_name(f"{path.name}.{suffix}-{number}")
    return copy
