"""What keeps a damaged or hostile SQLite file from doing more to its reader than being refused.

SQLite reads any file that looks like its own, and a file can be more than rows: a view or a trigger with the name of
one of our tables runs whatever it likes, and for as long as it likes; a column can be computed; a handful of pages that
point at each other hold more rows than there are atoms; one text can be declared to be a gigabyte. So tables have to be
tables, a read transaction may not take more steps than a sound file of that size needs, and values have a largest size.
"""

from __future__ import annotations

import sqlite3
import stat
from contextlib import suppress
from pathlib import Path

from tunedcomm.db.schema import VERSION_TABLE, Base
from tunedcomm.db.target import Target
from tunedcomm.errors import DatabaseAccessError, DatabaseCorruptError

__all__ = ["SIDE_FILES", "Steps", "check_side_files", "refuse_computed", "restrain"]

SIDE_FILES = ("-wal", "-shm", "-journal")
_MAX_VALUE_BYTES = 16 << 20
# Of SQLite's virtual machine. To read every row of a sound file takes a tenth of a step a byte, to sort and compare
# them all takes less than one.
_FREE_STEPS = 1_000_000
_STEPS_A_BYTE = 5
_STEPS_A_LOOK = 100_000
_OURS = (*Base.metadata.tables, VERSION_TABLE)
_NAMES = ", ".join(f"'{name}'" for name in _OURS)
_COMPUTED = f"""
SELECT 'a ' || type || ' ' || name FROM sqlite_master WHERE lower(tbl_name) IN ({_NAMES})
  AND (type = 'view' OR (type = 'trigger' AND :writing)
       OR (type = 'table' AND upper(ltrim(sql)) LIKE 'CREATE VIRTUAL%'))
UNION ALL
SELECT 'a computed column ' || t.name || '.' || c.name FROM sqlite_master AS t, pragma_table_xinfo(t.name) AS c
  WHERE t.type = 'table' AND lower(t.name) IN ({_NAMES}) AND c.hidden > 1
LIMIT 1
"""  # noqa: S608 - our own names


def check_side_files(path: Path) -> None:
    """SQLite opens what lies beside a file, and would wait for ever for a pipe there.

    Raises:
        DatabaseAccessError: a side file is no regular file.
    """
    for suffix in SIDE_FILES:
        side = path.with_name(path.name + suffix)
        try:
            mode = side.stat().st_mode
        except FileNotFoundError:
            continue
        except OSError as error:
            raise DatabaseAccessError(f"cannot look at {side}: {error.strerror}; remove it") from None
        if not stat.S_ISREG(mode):
            raise DatabaseAccessError(f"{side} is not a regular file, as SQLite's own one would be; remove it")


class Steps:
    """Ends a transaction that takes more steps than a sound file of this size needs."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._left = 0

    def begin(self) -> None:
        """A transaction begins; the file may have grown since the last one."""
        num_bytes = 0
        for file in (self._path, self._path.with_name(self._path.name + "-wal")):
            with suppress(OSError):
                num_bytes += file.stat().st_size
        self._left = _FREE_STEPS + _STEPS_A_BYTE * num_bytes

    def look(self) -> bool:
        """SQLite asks now and then; True interrupts it."""
        self._left -= _STEPS_A_LOOK
        return self._left < 0


def restrain(connection: sqlite3.Connection, path: Path) -> Steps:
    """Bound what reading may cost; `Steps.begin` is to be called at the beginning of every transaction."""
    if hasattr(connection, "setlimit"):  # Python 3.11
        connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, _MAX_VALUE_BYTES)
    connection.execute("PRAGMA cell_size_check=ON")
    connection.execute("PRAGMA mmap_size=0")  # what another process cuts off a mapped file ends this one
    steps = Steps(path)
    steps.begin()
    connection.set_progress_handler(steps.look, _STEPS_A_LOOK)
    return steps


def refuse_computed(connection: sqlite3.Connection, target: Target, *, writing: bool) -> None:
    """Refuse a file of which a table is no plain table.

    Raises:
        DatabaseCorruptError: it is a view, is virtual, has a computed column, or a trigger and `writing` would fire it.
    """
    found = connection.execute(_COMPUTED, {"writing": writing}).fetchone()
    if found is not None:
        raise DatabaseCorruptError(
            f"{target} holds {found[0]!s:.80} where tunedcomm has plain tables; it was not made by tunedcomm, or was "
            "changed: leave it out, or restore a copy of it"
        )
