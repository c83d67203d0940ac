"""Places of databases: paths and URLs, the user's directories, and what the file system says of a file.

Calls need this of a database whose rows are kept (`tunedcomm.db.kept`), so nothing here imports SQLAlchemy before a URL
is named: it takes longer to import than all else that a first call does.
"""

from __future__ import annotations

import logging
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import platformdirs

from tunedcomm import settings
from tunedcomm.errors import DatabaseAccessError, DatabaseBusyError, printable

if TYPE_CHECKING:
    from sqlalchemy import URL

BUSY_TIMEOUT_S = 30.0
_log = logging.getLogger("tunedcomm")
_warned: set[str] = set()


def warn_once(message: str, about: str = "") -> None:
    """Log a warning with stored text made printable, unless this process has logged it, or another about `about`."""
    if (about or message) not in _warned:
        _warned.add(about or message)
        _log.warning("%s", printable(message))


# Targets


class Target(NamedTuple):
    """The place of a database: a server's SQLAlchemy URL, or the path of a SQLite file; the other one is None."""

    server: URL | None
    path: Path | None

    @property
    def url(self) -> URL:
        """The SQLAlchemy URL of either."""
        from sqlalchemy import URL

        return self.server or URL.create("sqlite", database=printable(str(self.path)))

    @property
    def name(self) -> str:
        """The path, or the URL with its password: what `parse_target` takes."""
        return str(self.path or self.url.render_as_string(hide_password=False))

    def __str__(self) -> str:
        return str(self.path or self.url.render_as_string(hide_password=True))


def parse_target(target: str | Path) -> Target:
    """Read a path or a SQLAlchemy URL; DatabaseAccessError for a SQLite database that is not simply a file."""
    text = str(target)
    if "://" not in text:
        if not text or "\x00" in text:
            raise DatabaseAccessError(f"database path {text!r} is empty or holds NUL; pass a file or a SQLAlchemy URL")
        try:
            path = Path(text).expanduser()
        except RuntimeError:
            raise DatabaseAccessError(
                f"database path {text!r} begins with a home directory that is not known (HOME is not set, or there is "
                "no such user); write the path in full"
            ) from None
        return Target(None, path)
    from sqlalchemy import make_url
    from sqlalchemy.exc import ArgumentError

    try:
        text.encode()  # a byte that is not UTF-8 fails here
        url = make_url(text)
    except (ArgumentError, ValueError) as error:  # passwords stay out of messages, so the text itself is never quoted
        why = error if isinstance(error, ArgumentError) else "the port is not a number, or the text is not UTF-8"
        raise DatabaseAccessError(
            f"not a database URL: {why}; use a file path or e.g. postgresql+psycopg://user@host/name, with @ and : of "
            "a password as %40 and %3A"
        ) from None
    if url.get_backend_name() != "sqlite":
        return Target(url, None)
    if url.database in (None, "", ":memory:") or url.query:
        raise DatabaseAccessError(
            f"{url} is a database in memory, or a URL with options, which processes cannot share; give a file's path"
        )
    return Target(None, Path(str(url.database)))


def data_directory() -> Path:
    """The user's data directory for tunedcomm, which need not exist; DatabaseAccessError without a home directory."""
    try:
        return Path(platformdirs.user_data_dir("tunedcomm", appauthor=False)).expanduser()
    except RuntimeError:
        raise DatabaseAccessError(
            f"user {os.getuid()} has no home directory (HOME is not set, and the system knows no such user): there is "
            "no user database, and untuned problems are not noted. Set HOME, or TUNEDCOMM_DB to a file that may be "
            "written"
        ) from None


# Files


def prepare_file(path: Path, *, create: bool) -> None:
    """Check a SQLite file before SQLite opens it; with `create`, make its directory if it is missing.

    Raises:
        DatabaseAccessError: missing, a directory, not a regular file, or not readable; or one beside it is none.
    """
    try:
        if create:
            path.parent.mkdir(parents=True, exist_ok=True)
        path.stat()
        for file in (path, *side_files(path)):  # SQLite would wait for ever for a pipe there
            if os.path.lexists(file) and not file.is_file():
                raise DatabaseAccessError(f"{file} is a directory or special file; give a file's path, or remove it")
        path.open("rb").close()
    except FileNotFoundError:
        if not create:
            raise DatabaseAccessError(
                f"{path} does not exist; correct the path (an argument, --db, TUNEDCOMM_DB or TUNEDCOMM_DB_PATH)"
            ) from None
    except OSError as error:
        raise DatabaseAccessError(
            f"cannot open database {path}: {error.strerror}; check the permissions of the file and its directories, "
            "or set TUNEDCOMM_DB to another file"
        ) from None


def side_files(path: Path) -> list[Path]:
    """The paths of a file's write-ahead log, rollback journal and shared memory."""
    return [Path(f"{path}{suffix}") for suffix in ("-wal", "-journal", "-shm")]


def leftovers(path: Path) -> list[Path]:
    """Logs and journals beside a file that hold something: a writer has it open, or one was killed."""
    return [side for side in side_files(path)[:2] if _size(side)]


def num_bytes(path: Path) -> int:
    """Size of a SQLite file and of its write-ahead log; 0 of what is not there."""
    return _size(path) + _size(side_files(path)[0])


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def is_immutable(path: Path) -> bool:
    """True if a file is to be read without locks: SQLite cannot or should not make files beside it, and none is there.

    Raises:
        DatabaseBusyError: on a network file system, and another host has it open or was killed while it wrote.
    """
    network = network_of(path)
    left = leftovers(path)
    if network and left:
        raise DatabaseBusyError(
            f"{left[0]} shows that a host writes to {path} or was killed meanwhile, and it lies on a network file "
            f"system ({network}) where locks may not hold; read it when that has ended"
        )
    return not left and (bool(network) or not os.access(path.parent, os.W_OK, effective_ids=True))


# Network file systems, and what is shared between a host and its virtual machines or containers.
_NETWORK = frozenset(
    "9p acfs afs beegfs ceph cifs coda gfs gfs2 glusterfs gpfs lustre mmfs ncpfs nfs nfs4 ocfs2 orangefs panfs pvfs2 "
    "quobyte smb2 smb3 smbfs vboxsf virtiofs vmhgfs wekafs".split()
)
_LOCAL_FUSE = frozenset("bindfs cryfs encfs ext2 fuse-overlayfs gocryptfs mergerfs ntfs ntfs-3g squashfuse zfs".split())
_OCTAL = re.compile(r"\\([0-7]{3})")


def file_system(path: str, mounts: str) -> str:
    """The type of the file system of an absolute path by the text of `/proc/self/mounts`; "" if that does not say."""
    found, longest = "", 0
    for line in mounts.splitlines():
        if len(fields := line.split()) < 3:
            continue
        _, point, kind, *_ = fields
        point = _OCTAL.sub(lambda match: chr(int(match[1], 8)), point).rstrip("/") + "/"
        if f"{path}/".startswith(point) and len(point) >= longest:
            found, longest = kind, len(point)
    return found


def network_of(path: Path) -> str:
    """The network file system that holds `path`, e.g. `nfs4`, or "" where SQLite's locks hold.

    TUNEDCOMM_DB_NETWORK=no trusts them anywhere.
    """
    return "" if settings.db_network() == "no" else network_below(path)


def network_below(path: Path) -> str:
    """The network file system that holds `path`, or "" for a local or unknown one."""
    try:
        # Resolving symbolic links first also mounts what an automounter has in waiting.
        resolved = os.path.realpath(path)
        kind = file_system(resolved, Path("/proc/self/mounts").read_text(encoding="utf-8", errors="replace"))
    except OSError:  # not Linux, or /proc is hidden
        return ""
    family, _, name = kind.partition(".")
    # Behind fuse may be anything: what is not known to be local counts as a network.
    return kind if kind in _NETWORK or (family == "fuse" and name not in _LOCAL_FUSE) else ""


def refuse_network(path: Path) -> None:
    """Raise DatabaseAccessError for a SQLite file that is to be written on a network file system."""
    if network := network_of(path):
        raise DatabaseAccessError(
            f"{path} lies on a network file system ({network}), where SQLite's locks may not hold between hosts. Set "
            "TUNEDCOMM_DB to a file on a local disk, and share what is tuned as a site database (`tunedcomm db "
            "export`, TUNEDCOMM_DB_PATH), or to a PostgreSQL URL; TUNEDCOMM_DB_NETWORK=no trusts the locks"
        )
