"""A lock that a process holds for as long as it lives, and that others of the same host can see, in any container.

Process numbers mean something in one container only. Locks belong to the file, so whoever shares the file shares them,
and the kernel lifts them when their holder dies.
"""

from __future__ import annotations

import fcntl
import secrets
import struct
from pathlib import Path

__all__ = ["LifeLock"]

# `struct flock` of Linux: type, whence, start, length, pid.
_FLOCK = struct.Struct("@hhqqi4x")


class LifeLock:
    """One byte of a file, locked until `close` or the end of the process; the byte's place is chosen at random.

    Such a lock belongs to the open file and not to the process, so several in one process are apart.

    Args:
        path: made if it is not there; nothing is ever written to it.

    Attributes:
        place: tells it from all others.
    """

    def __init__(self, path: Path) -> None:
        self._file = path.open("ab")
        self.place = secrets.randbelow(1 << 62)
        try:
            fcntl.fcntl(self._file, fcntl.F_OFD_SETLK, self._pack(self.place))
        except BaseException:
            self._file.close()
            raise

    @staticmethod
    def _pack(place: int) -> bytes:
        return _FLOCK.pack(fcntl.F_WRLCK, 0, place, 1, 0)

    def is_held(self, place: int) -> bool:
        """True if somebody else holds the lock with this place."""
        kind = _FLOCK.unpack(fcntl.fcntl(self._file, fcntl.F_OFD_GETLK, self._pack(place)))[0]
        return bool(kind != fcntl.F_UNLCK)

    def close(self) -> None:
        """Give it up."""
        self._file.close()
