"""The merged snapshot, kept for the next start in the user's cache directory.

Where no layer has changed since, a start reads one JSON file instead of the databases, and imports no SQLAlchemy. All
that decides which rows a snapshot has is part of the key. The checks of borrowed kernels, which calls add to, are not
kept: `tunedcomm.db.sidecar` reads them.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping, Sequence
from typing import Any

from tunedcomm import cache
from tunedcomm.db.layers import Layer, all_layers, is_absent, merge
from tunedcomm.db.targets import network_below, parse_target, side_files, warn_once
from tunedcomm.db.values import canonical_json
from tunedcomm.errors import DatabaseError
from tunedcomm.hardware import Environment
from tunedcomm.selection.snapshot import Snapshot, gc_paused

# File systems count times of change in steps of up to two seconds: within one, a file may change and look the same.
_STEP_NS = 3_000_000_000


def kept_snapshot(
    environment: Environment, world_size: int, *, borrow: Sequence[str], sources: Mapping[str, str]
) -> Snapshot:
    """As `load_snapshot` of all layers, but read from the file of an earlier start if nothing has changed since.

    Args:
        borrow: as in `load_snapshot`.
        sources: variant to source hash; other code reads the layers anew.
    """
    layers = all_layers()
    name = f"snapshot-{environment.digest}-{world_size}"
    begin_ns, before = time.time_ns(), _states(layers)
    code = [cache.package_state(), sorted(sources.items())]
    text = canonical_json([code, environment.to_dict(), world_size, list(borrow), before])
    key = hashlib.sha256(text.encode()).hexdigest()
    snapshot = None if before is None else _read(name, key)
    if snapshot is None:
        snapshot, is_whole = merge(environment, world_size, layers, borrow=borrow)
        if is_whole and before is not None and _newest_ns(before) < begin_ns - _STEP_NS and _states(layers) == before:
            cache.keep(name, key, snapshot.to_dict())
    for note in snapshot.notes:
        warn_once(note)
    return snapshot


def _read(name: str, key: str) -> Snapshot | None:
    try:
        with gc_paused():
            return None if (held := cache.read(name, key)) is None else Snapshot.from_dict(held)
    except Exception:  # noqa: BLE001 - whatever is wrong with the file, the databases are read
        return None


def _states(layers: Sequence[Layer]) -> list[Any] | None:
    """Name and files of each layer, with inode, size and times of change; None where these do not show every change.

    A server has no files, and a network file system may tell old times of a file. Shipped files do not change.
    """
    try:
        return [(layer.name, [] if is_absent(layer) else _files(layer)) for layer in layers]
    except (DatabaseError, OSError, RuntimeError, ValueError):  # whoever opens the layer says so
        return None


def _files(layer: Layer) -> list[tuple[str, int, int, int, int]]:
    path = parse_target(layer.target).path
    if path is None or (layer.name != "packaged" and network_below(path)):
        raise DatabaseError(f"no file says when {layer.target} changes")
    path = path.resolve()
    there = path.stat()
    found = [(str(path), there.st_ino, there.st_size, there.st_mtime_ns, there.st_ctime_ns)]
    for side in side_files(path)[:2]:
        # Reading makes an empty log, and gives a log of root its owner again, which counts as a change of the inode.
        if side.exists() and (there := side.stat()).st_size:
            found.append((str(side), there.st_ino, there.st_size, there.st_mtime_ns, 0))
    return found


def _newest_ns(states: Sequence[Any]) -> int:
    """The latest time at which one of the files changed."""
    return max((max(file[3:]) for _, files in states for file in files), default=0)
