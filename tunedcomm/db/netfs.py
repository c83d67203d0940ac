"""Whether a file lies on a network file system, and the file of its own that each host writes there.

SQLite's locks do not hold between hosts on most network file systems, and its write-ahead log needs memory that all
writers share: databases that several hosts wrote to have been found damaged. So each host writes a file of its own
beside the one that was named, and readers take all of them together.
"""

from __future__ import annotations

import glob
import os
import re
import socket
import uuid
from dataclasses import dataclass
from pathlib import Path

from tunedcomm import settings

__all__ = ["NETWORK_FILE_SYSTEMS", "file_system", "host_name", "network_of", "other_hosts", "own_file"]

# Also what is shared between a host and its virtual machines or containers: to the kernels that share it, it is one.
NETWORK_FILE_SYSTEMS = frozenset(
    {
        "9p", "acfs", "afs", "beegfs", "ceph", "cifs", "coda", "gfs", "gfs2", "glusterfs", "gpfs", "lustre", "mmfs",
        "ncpfs", "nfs", "nfs4", "ocfs2", "orangefs", "panfs", "pvfs2", "quobyte", "smb2", "smb3", "smbfs", "vboxsf",
        "virtiofs", "vmhgfs", "wekafs",
    }
)  # fmt: skip
# Behind fuse may be anything. What is not known to be local is taken for a network's: that costs one file a host.
_LOCAL_FUSE = frozenset(
    f"fuse.{name}"
    for name in "bindfs cryfs encfs ext2 fuse-overlayfs gocryptfs mergerfs ntfs ntfs-3g squashfuse zfs".split()
)
_OCTAL = re.compile(r"\\([0-7]{3})")
_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9._-]+")
_NAMELESS = ("", "localhost", "localhost.localdomain", "(none)")


@dataclass(frozen=True, slots=True)
class _Mount:
    number: int
    parent: int
    point: str
    kind: str

    @classmethod
    def parse(cls, line: str) -> _Mount | None:
        """One line of `/proc/self/mountinfo`, None where it is not of that form."""
        front, separator, back = line.partition(" - ")
        fields = front.split()
        if not separator or len(fields) < 6 or not back.split() or not (fields[0] + fields[1]).isdecimal():
            return None
        point = _OCTAL.sub(lambda match: chr(int(match[1], 8)), fields[4])
        return cls(int(fields[0]), int(fields[1]), point, back.split()[0])

    def holds(self, path: str) -> bool:
        return path == self.point or path.startswith(self.point.rstrip("/") + "/")


def file_system(path: str, mountinfo: str) -> str:
    """The type of the file system that holds `path`; "" where the table does not say.

    Goes from mount to mount as the kernel does, so that what lies hidden under a later mount is not seen.

    Args:
        path: absolute, without symbolic links; need not exist.
        mountinfo: text of `/proc/self/mountinfo`.
    """
    mounts = [mount for line in mountinfo.splitlines() if (mount := _Mount.parse(line)) and mount.holds(path)]
    numbers = {mount.number for mount in mounts}
    tops = [mount for mount in mounts if mount.parent not in numbers or mount.parent == mount.number]
    if not tops:
        return ""
    here = min(tops, key=lambda mount: len(mount.point))
    passed = {here.number}
    while inside := [m for m in mounts if m.parent == here.number and m.number not in passed]:
        here = min(inside, key=lambda mount: len(mount.point))
        passed.add(here.number)
    return here.kind


def _is_network(kind: str) -> bool:
    return kind in NETWORK_FILE_SYSTEMS or (kind.partition(".")[0] == "fuse" and kind not in _LOCAL_FUSE)


def network_of(path: Path) -> str:
    """The network file system that holds `path`, e.g. `nfs4`, or "" where each host may trust its locks.

    TUNEDCOMM_DB_NETWORK overrides what is found: `no` trusts them anywhere, `per-host` nowhere.

    Raises:
        SettingError: TUNEDCOMM_DB_NETWORK holds a value that it does not take.
    """
    mode = settings.db_network()
    if mode != "auto":
        return "" if mode == "no" else "TUNEDCOMM_DB_NETWORK=per-host"
    try:
        # Symbolic links first: looking at the path also mounts what an automounter has in waiting.
        resolved = os.path.realpath(path)
        kind = file_system(resolved, Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="replace"))
    except OSError:  # no such table: not Linux, or /proc is hidden
        return ""
    return kind if _is_network(kind) else ""


def host_name() -> str:
    """This host's name as part of a file's name; hosts that have none are told apart by their network card."""
    name = _NOT_IN_NAMES.sub("-", socket.gethostname()).strip(".-")
    return f"localhost-{uuid.getnode():012x}" if name in _NAMELESS else name


def own_file(path: Path) -> Path:
    """The file that this host writes in place of `path`: `tuned.db` becomes `tuned.HOST.db`."""
    host = host_name()
    return path if path.stem.endswith(f".{host}") else path.with_name(f"{path.stem}.{host}{path.suffix}")


def other_hosts(path: Path) -> list[Path]:
    """The files that hosts, this one among them, have written in place of `path`, sorted."""
    try:
        return sorted(path.parent.glob(f"{glob.escape(path.stem)}.*{glob.escape(path.suffix)}"))
    except OSError:  # whoever reads `path` itself says what is wrong with its directory
        return []
