"""The databases a process reads, nearest first, and their merge into one snapshot.

Layers: the user database (`TUNEDCOMM_DB`, or a file in the user's data directory), site databases
(`TUNEDCOMM_DB_PATH`), and the databases shipped with the package.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from tunedcomm import settings
from tunedcomm.db.targets import BUSY_TIMEOUT_S, data_directory, parse_target, refuse_network, warn_once
from tunedcomm.errors import DatabaseBusyError, DatabaseError
from tunedcomm.hardware import Environment
from tunedcomm.selection.snapshot import Snapshot, gc_paused
from tunedcomm.spec import Problem

if TYPE_CHECKING:
    from tunedcomm.db.snapshot import Fetched
    from tunedcomm.db.store import Database

# WAL lets readers read beside a writer: only a stuck file system takes longer.
_READ_TIMEOUT_S = 5.0
# Ranks that are listed by number.
_SHOWN = 8


@dataclass(frozen=True, slots=True)
class Layer:
    """One database and its place in the order.

    Attributes:
        name: `user`, `site` or `packaged`.
        target: file or SQLAlchemy URL.
    """

    name: str
    target: str

    def open(self, *, busy_timeout_s: float = BUSY_TIMEOUT_S) -> Database:
        """The database, open for reading; what ships with the package cannot change while it is open."""
        from tunedcomm.db.store import Database

        immutable = True if self.name == "packaged" else None
        return Database.open(self.target, readonly=True, immutable=immutable, busy_timeout_s=busy_timeout_s)


def user_database() -> str:
    """The user's own database: `TUNEDCOMM_DB`, or `tuned.db` in the user's data directory.

    Raises:
        DatabaseAccessError: TUNEDCOMM_DB is not set, and the user has no home directory.
    """
    return settings.db_url() or str(data_directory() / "tuned.db")


def writable_database(target: str | None = None) -> str:
    """`target`, by default the user database, where commands may store something in it.

    Raises:
        DatabaseAccessError: there is no place for a user database, `target` is neither path nor URL, or it lies on a
            network file system.
    """
    named = user_database() if target is None else target
    if (path := parse_target(named).path) is not None:
        refuse_network(path)
    return named


def named_layers(target: str | None = None) -> list[Layer]:
    """`target`, by default the user database, as the only layer."""
    return [Layer("user", user_database() if target is None else target)]


def packaged_databases() -> list[Path]:
    """The shipped databases, sorted: in the wheel within the package, in a checkout next to it."""
    package = Path(__file__).resolve().parent.parent
    folder = package / "_tuning_db"
    if not folder.is_dir():
        # A directory of that name next to an installed package would be somebody else's.
        folder = package.parent / "tuning_db" if (package.parent / "pyproject.toml").is_file() else folder
    return sorted(folder.glob("*.db")) if folder.is_dir() else []


def site_databases(*, is_quiet: bool = False) -> list[str]:
    """The databases of `TUNEDCOMM_DB_PATH`, each once in its order; a directory stands for its `*.db` files, sorted.

    A directory that cannot be listed is left out with a warning, unless `is_quiet`.
    """
    found: list[str] = []
    for entry in settings.db_path():
        try:
            folder = Path(os.path.expanduser(entry))  # noqa: PTH111 - leaves `~` alone where there is no home
            is_folder = os.path.isdir(folder)  # noqa: PTH112 - Path.is_dir() raises where it may not look
            names = sorted(os.listdir(folder)) if is_folder else None  # noqa: PTH208 - globs hide what they may not list
        except OSError as error:
            if not is_quiet:
                warn_once(f"site databases left out: cannot list {entry} of TUNEDCOMM_DB_PATH: {error.strerror}")
            continue
        found += [entry] if names is None else [str(folder / name) for name in names if name.endswith(".db")]
    return list(dict.fromkeys(found))


def all_layers(*, is_quiet: bool = False) -> list[Layer]:
    """Every layer, nearest first. Warns once if the user has no place for a database."""
    try:
        user = named_layers()
    except DatabaseError as error:
        user = []
        if not is_quiet:
            warn_once(f"tuning database left out (user): {error}", str(error))
    site = [Layer("site", target) for target in site_databases(is_quiet=is_quiet)]
    return [*user, *site, *(Layer("packaged", str(path)) for path in packaged_databases())]


def layers_beside(target: str | None = None) -> list[Layer]:
    """Every layer that is there, but for `target`, by default the user database."""
    found = {identity_of(layer.target): layer for layer in all_layers() if not is_absent(layer)}
    found.pop(identity_of(named_layers(target)[0].target), None)
    return list(found.values())


def identity_of(target: str | Path) -> str:
    """A name that all spellings of one database share."""
    try:
        path = parse_target(target).path
        return str(target if path is None else path.resolve())
    except (DatabaseError, OSError, RuntimeError):  # whoever opens it says so
        return str(target)


def is_absent(layer: Layer) -> bool:
    """True for a user database that does not exist yet, which is no error; False if the path cannot be inspected."""
    try:
        path = parse_target(layer.target).path
        if layer.name == "user" and path is not None:
            path.lstat()
    except FileNotFoundError:
        return True
    except (DatabaseError, OSError):
        pass
    return False


def load_snapshot(
    environment: Environment,
    world_size: int,
    *,
    layers: Sequence[Layer] | None = None,
    strict: bool = False,
    borrow: Sequence[str] = (),
    like: Problem | None = None,
) -> Snapshot:
    """Merge the rows of every layer for this environment's hard fields and this world size; see `build_snapshot`.

    Args:
        layers: read these instead of `all_layers()`.
        strict: raise a layer's error instead of leaving the layer out with a warning, also if there is no user
            database.
        borrow: names of other hardware whose rows may serve where there are none of this, as in TUNEDCOMM_BORROW.
        like: keep only what the choice for this problem may depend on, which takes a fraction of the time. Such a
            snapshot answers for this problem alone.
    """
    read = all_layers() if layers is None else layers
    snapshot, _ = merge(environment, world_size, read, strict=strict, borrow=borrow, like=like)
    for note in snapshot.notes:
        warn_once(note)
    return snapshot


def merge(
    environment: Environment,
    world_size: int,
    layers: Sequence[Layer],
    *,
    strict: bool = False,
    borrow: Sequence[str] = (),
    like: Problem | None = None,
) -> tuple[Snapshot, bool]:
    """The snapshot of `load_snapshot`, and whether every layer that exists was read whole."""
    from tunedcomm.db.snapshot import build_snapshot, fetch

    found: list[Fetched] = []
    is_whole = True
    read = partial(fetch, environment=environment, world_size=world_size, borrow=borrow, like=like)
    with gc_paused():
        for rank, layer in enumerate(layers):
            try:
                if strict or not is_absent(layer):
                    found.append(_read(layer, partial(read, layer=layer.name, layer_rank=rank)))
            except Exception as error:
                if strict:
                    raise
                is_whole = False
                kind = "" if isinstance(error, DatabaseError) else f"{type(error).__name__}: "
                warn_once(f"tuning database left out ({layer.name}): {kind}{error}")
        snapshot = build_snapshot(environment, world_size, found, borrow)
    return snapshot, is_whole and not any(each.num_skipped for each in found)


def _read(layer: Layer, read: Callable[..., Fetched]) -> Fetched:
    """Read a layer, and again if a writer that SQLite cannot lock out changed it meanwhile."""
    deadline = time.monotonic() + _READ_TIMEOUT_S
    while True:
        try:
            with layer.open(busy_timeout_s=_READ_TIMEOUT_S) as database:
                return database.ask(read)
        except DatabaseBusyError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)


# Fingerprints
#
# All ranks dispatch from the databases of the group's first rank, so a difference between ranks does no harm. But a
# user who gave a rank another database expects it to be used, and is warned.


@dataclass(frozen=True, slots=True)
class LayerFingerprint:
    """One database as a rank sees it, without opening it.

    Attributes:
        layer: `user`, `site` or `packaged`.
        target: file, or URL without its password; of a packaged database, the file's name.
        identities: two databases that share one of these are the same: the place of a file (host, device and inode)
            and its content (size and time of change), name and size of a packaged file, or the target itself.
        is_new: this process has made it, see `note_made`.
    """

    layer: str
    target: str
    identities: frozenset[tuple[object, ...]]
    is_new: bool = False


# User databases that this process has made.
_made: set[str] = set()


def note_made(target: str) -> None:
    """Remember that this process has made a user database: that other ranks have none is no surprise then."""
    _made.add(identity_of(target))


def layer_fingerprints() -> tuple[LayerFingerprint, ...]:
    """Every database that this process would read, nearest layer first, without missing ones.

    Logs no warning: the rank that reads the layers warns.
    """
    return tuple(_fingerprint(layer) for layer in all_layers(is_quiet=True) if not is_absent(layer))


def _fingerprint(layer: Layer) -> LayerFingerprint:
    name = layer.target
    try:
        target = parse_target(name)
        name = str(target)
        if target.path is None:
            identities: set[tuple[object, ...]] = {(name,)}
        else:
            found = target.path.stat()
            place, content = (socket.gethostname(), found.st_dev, found.st_ino), (found.st_size, found.st_mtime_ns)
            identities = {place, content}
            if layer.name == "packaged":  # every host has its own copy
                name = target.path.name
                identities = {(name, found.st_size)}
    except (DatabaseError, OSError):  # opening it raises the error
        identities = {(name,)}
    return LayerFingerprint(layer.name, name, frozenset(identities), identity_of(layer.target) in _made)


def differences(seen: Sequence[tuple[LayerFingerprint, ...]]) -> list[str]:
    """Sentences that say how each rank's layers differ from rank 0's; `seen` is by rank."""
    found: dict[str, list[int]] = {}
    for rank, fingerprints in enumerate(seen):
        for layer in ("user", "site", "packaged"):
            first, others = ([each for each in every if each.layer == layer] for every in (seen[0], fingerprints))
            if not others and all(each.is_new for each in first):
                continue
            same = [bool(one.identities & other.identities) for one, other in zip(first, others, strict=False)]
            if len(first) != len(others) or not all(same):
                names = [", ".join(each.target for each in every) or "none" for every in (others, first)]
                found.setdefault(f"{names[0]} as {layer} database where rank 0 has {names[1]}", []).append(rank)
    return [f"{_ranks(ranks)} {text}" for text, ranks in found.items()]


def _ranks(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]} has"
    return f"ranks {', '.join(map(str, ranks[:_SHOWN]))}{' and more' if len(ranks) > _SHOWN else ''} have"
