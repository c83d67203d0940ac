"""How a SQLite file is opened for reading where SQLite's own way does not do.

SQLite needs to write beside a file in order to read it: the memory that readers and writers of a write-ahead log share,
or what a killed writer left to be folded in or rolled back. Where it may not write, or should not, there are two ways
out. A file without leftovers is opened as immutable, without a lock, and looked at again afterwards: if it changed
meanwhile, what was read counts for nothing. One with leftovers is copied together with them, and the copy is repaired.
"""

from __future__ import annotations

import os
import shutil
import sqlite3
import tempfile
import time
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from urllib.parse import quote

from tunedcomm.db.netfs import network_of
from tunedcomm.errors import DatabaseAccessError, DatabaseBusyError

__all__ = ["Reading", "Stamp", "cannot_change", "leftovers", "stamp_of"]

_SIDE_FILES = ("-wal", "-journal")
# The header holds a counter of changes, which tells apart what happens between two ticks of the file system's clock.
_HEADER_BYTES = 100
_COPIES = 5
_PAUSE_S = 0.1


@dataclass(frozen=True, slots=True)
class Stamp:
    """What changes when somebody writes to a file."""

    inode: int
    num_bytes: int
    changed_ns: int
    header: bytes


def stamp_of(path: Path) -> Stamp | None:
    """The file's stamp; None where it cannot be read."""
    try:
        # Opened rather than asked about: that is when a network file system looks whether its cache is still right.
        with path.open("rb") as file:
            found = os.fstat(file.fileno())
            return Stamp(found.st_ino, found.st_size, found.st_mtime_ns, file.read(_HEADER_BYTES))
    except OSError:
        return None


def leftovers(path: Path) -> list[Path]:
    """Side files that hold something: a writer is at work, or one was killed."""
    found = []
    for suffix in _SIDE_FILES:
        side = path.with_name(path.name + suffix)
        try:
            if side.stat().st_size:
                found.append(side)
        except OSError:  # most likely none
            continue
    return found


def cannot_change(path: Path) -> bool:
    """True where SQLite cannot or should not make files beside this one, and there is nothing in any."""
    effective = os.access in os.supports_effective_ids
    if os.access(path.parent, os.W_OK, effective_ids=effective) and not network_of(path):
        return False
    return not leftovers(path)


@dataclass(frozen=True, slots=True)
class Reading:
    """How one file is read.

    Attributes:
        path: what to open: the file, or its copy.
        immutable: without locks and side files.
        original: the file, if it was found to be one that nobody writes.
        stamp: of `original` before it was opened.
        folder: holds the copy.
    """

    path: Path
    immutable: bool
    original: Path | None = None
    stamp: Stamp | None = None
    folder: TemporaryDirectory[str] | None = None

    @classmethod
    def of(cls, path: Path) -> Reading:
        """Find out how to read the file.

        Raises:
            DatabaseAccessError: it needs to be copied, and there is no room for it or its side files cannot be read.
            DatabaseBusyError: it needs to be copied, and changed at every attempt.
        """
        if cannot_change(path):
            return cls(path, immutable=True, original=path, stamp=stamp_of(path))
        folder = _repaired_copy(path) if leftovers(path) and not _readable(path) else None
        if folder is None:
            return cls(path, immutable=False)
        return cls(Path(folder.name, path.name), immutable=True, folder=folder)

    @property
    def is_overtaken(self) -> bool:
        """True if somebody wrote to a file that was opened as one that nobody writes: what was read may be torn."""
        return self.original is not None and (bool(leftovers(self.original)) or stamp_of(self.original) != self.stamp)

    def close(self) -> None:
        """Remove the copy."""
        if self.folder is not None:
            self.folder.cleanup()


def _repaired_copy(path: Path) -> TemporaryDirectory[str]:
    """A directory with a copy of the file under its own name.

    It has what a writer that was killed had committed, and nothing of what it had not.
    """
    for _ in range(_COPIES):
        parts = [path, *leftovers(path)]
        before = [stamp_of(part) for part in parts]
        folder = tempfile.TemporaryDirectory(prefix="tunedcomm-")
        try:
            for part in parts:
                shutil.copyfile(part, Path(folder.name, part.name))
            if parts == [path, *leftovers(path)] and before == [stamp_of(part) for part in parts]:
                _repair(Path(folder.name, path.name))
                return folder
        except FileNotFoundError:  # the writer has just ended
            pass
        except OSError as error:
            folder.cleanup()
            raise DatabaseAccessError(
                f"cannot read database {path}: a writer was killed, and what it left beside the file cannot be copied "
                f"to {folder.name} for repair: {error.strerror}; open the database once where it can be written"
            ) from None
        folder.cleanup()
        time.sleep(_PAUSE_S)
    raise DatabaseBusyError(
        f"{path} is being written by another host or user, and could not be copied; read it again when that has ended"
    )


def _readable(path: Path) -> bool:
    """False if SQLite cannot open the file for reading because of what lies beside it."""
    try:
        with closing(sqlite3.connect(f"file:{quote(str(path.absolute()))}?mode=ro", uri=True, timeout=0)) as connection:
            connection.execute("SELECT count(*) FROM sqlite_master")
    except sqlite3.OperationalError as error:
        # Anything else, a lock among them, is said by whoever opens the file.
        return not any(text in str(error).lower() for text in ("unable to open", "readonly", "locking protocol"))
    except (sqlite3.DatabaseError, UnicodeDecodeError):
        return True
    return True


def _repair(copy: Path) -> None:
    # Damage is named when the copy is opened.
    with suppress(sqlite3.DatabaseError, UnicodeDecodeError), closing(sqlite3.connect(copy)) as connection:
        connection.execute("SELECT count(*) FROM sqlite_master")
