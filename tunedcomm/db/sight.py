"""What a process sees of the database layers without opening any, and in what the ranks of a group differ there.

All ranks dispatch from what the group's first rank reads, so a difference does no harm. But whoever gave a rank another
database expects something of it.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass

from tunedcomm.db.engine import parse_target
from tunedcomm.db.layers import Layer, is_absent, packaged_databases, site_databases, user_layers
from tunedcomm.errors import DatabaseError

__all__ = ["Sight", "differences", "sight"]

# Ranks that are listed by number.
_SHOWN = 8


@dataclass(frozen=True, slots=True)
class Sight:
    """One database as a rank sees it.

    Attributes:
        layer: `user`, `site` or `packaged`.
        target: file, or URL without its password; of what is packaged, the file's name.
        place: host, device and inode of a file that is there, else nothing.
        content: size and time of change of a file that is there (of what is packaged, its size), else nothing.
    """

    layer: str
    target: str
    place: tuple[str, int, int] | None = None
    content: tuple[int, ...] | None = None

    def is_same(self, other: Sight) -> bool:
        """True for one file under two names, and for two copies of one file."""
        if self.place is None or other.place is None:
            return self == other
        return self.place == other.place or self.content == other.content


def sight() -> tuple[Sight, ...]:
    """Every database that this process would read, nearest layer first; those that are not there are left out."""
    try:
        user = user_layers()
    except DatabaseError:  # no place for one: the rank that reads the layers says so
        user = []
    found = [_look(layer) for layer in (*user, *(Layer("site", target) for target in site_databases(is_quiet=True)))]
    for path in packaged_databases():
        # Every host may have installed its own copy of the package: times say nothing.
        found.append(Sight("packaged", path.name, content=(path.stat().st_size,)))
    return tuple(seen for seen in found if seen is not None)


def _look(layer: Layer) -> Sight | None:
    try:
        target = parse_target(layer.target)
        if target.path is None:
            return Sight(layer.name, str(target))
        if is_absent(layer):
            return None
        found = os.stat(target.path)  # noqa: PTH116
    except (DatabaseError, OSError):  # whoever opens it says what is wrong
        return Sight(layer.name, layer.target)
    place = (socket.gethostname(), found.st_dev, found.st_ino)
    return Sight(layer.name, str(target), place, (found.st_size, found.st_mtime_ns))


def differences(seen: Sequence[tuple[Sight, ...]]) -> list[str]:
    """In what each rank's view differs from that of rank 0, in words; empty if in nothing.

    Args:
        seen: of every rank, by rank.
    """
    found: dict[str, list[int]] = {}
    for rank, theirs in enumerate(seen):
        for layer in ("user", "site", "packaged"):
            first = [each for each in seen[0] if each.layer == layer]
            here = [each for each in theirs if each.layer == layer]
            if layer == "user":  # of the files of many hosts each host has its own first
                first, here = (sorted(files, key=lambda each: each.target) for files in (first, here))
            if len(first) != len(here) or not all(map(Sight.is_same, first, here)):
                text = f"{_named(here)} as {layer} database where rank 0 has {_named(first)}"
                found.setdefault(text, []).append(rank)
    return [f"{_ranks(ranks)} {text}" for text, ranks in found.items()]


def _named(seen: Sequence[Sight]) -> str:
    return ", ".join(each.target for each in seen) or "none"


def _ranks(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]} has"
    return f"ranks {', '.join(map(str, ranks[:_SHOWN]))}{' and more' if len(ranks) > _SHOWN else ''} have"
