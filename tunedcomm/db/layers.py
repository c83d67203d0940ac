"""The databases a process reads, nearest first, and their merge into one snapshot.

Layers: the user database (`TUNEDCOMM_DB`, or a file in the user's data directory; on a network file system with the
files that other hosts wrote in its place), site databases (`TUNEDCOMM_DB_PATH`), and the databases shipped with the
package.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tunedcomm import settings
from tunedcomm.db import query, snapshot_query
from tunedcomm.db.engine import parse_target
from tunedcomm.db.gather import Gathered, Names, snapshot_of
from tunedcomm.db.home import data_directory, expanded
from tunedcomm.db.netfs import network_of, other_hosts, own_file
from tunedcomm.db.once import warn_once
from tunedcomm.db.rows import Reader
from tunedcomm.db.schema import PinRow
from tunedcomm.db.store import Database
from tunedcomm.errors import DatabaseAccessError, DatabaseBusyError, DatabaseError
from tunedcomm.hardware import Environment
from tunedcomm.selection.snapshot import Loan, Snapshot, gc_paused, loans, matches
from tunedcomm.spec import Problem

__all__ = [
    "Layer",
    "is_absent",
    "layers",
    "layers_beside",
    "load_snapshot",
    "may_be_made",
    "named_layers",
    "packaged_databases",
    "user_database",
    "user_layers",
    "writable_database",
]

# Readers of a snapshot wait for nobody: WAL lets them read beside a writer, anything longer is a stuck file system.
_READ_TIMEOUT_S = 5.0
_READ_AGAIN_S = 0.05


@dataclass(frozen=True, slots=True)
class Layer:
    """One database and its place in the order.

    Attributes:
        name: `user`, `site` or `packaged`.
        target: file or SQLAlchemy URL.
        is_beside: it shares the place of the layer before it: both were written in place of one file.
    """

    name: str
    target: str
    is_beside: bool = False


def user_database() -> str:
    """The database that is the user's own: `TUNEDCOMM_DB`, or `tuned.db` in the user's data directory.

    What is tuned is stored in `writable_database()`, which is another file where this one lies on a network.

    Raises:
        DatabaseAccessError: TUNEDCOMM_DB is not set, and the user has no home directory.
    """
    return settings.db_url() or str(data_directory() / "tuned.db")


def writable_database(target: str | None = None) -> str:
    """Where this host stores what is meant for `target`, by default for the user database.

    That is the target itself, but for a SQLite file on a network file system the file of this host beside it.

    Raises:
        DatabaseAccessError: no target is given, and there is no place for a user database; or it is a SQLite database
            but not simply a file.
    """
    named = user_database() if target is None else target
    parsed = parse_target(named)
    path = parsed.path
    if path is None and parsed.is_sqlite:
        raise DatabaseAccessError(
            f"{parsed} is a database in memory, or a URL with options, which commands cannot share; give a file's path"
        )
    network = "" if path is None else network_of(path)
    if path is None or not network:
        return named
    own = own_file(path)
    if own == path:
        return named
    warn_once(
        f"{path} lies on a network file system ({network}), where SQLite's locks may not hold between hosts: this host "
        f"writes {own}, and every host's file is read. `tunedcomm db merge {path.parent} --into FILE` makes one of "
        "them; TUNEDCOMM_DB_NETWORK=no trusts the locks"
    )
    return str(own)


def may_be_made(target: str | None = None) -> bool:
    """True if a command that changes a database makes `writable_database(target)` where it is not there.

    That is the user database, and of another one that hosts have written the file of this host.

    Raises:
        DatabaseAccessError: `target` is neither a path nor a URL.
    """
    if target is None:
        return True
    return writable_database(target) != target and not all(map(is_absent, user_layers(target)))


def user_layers(target: str | None = None) -> list[Layer]:
    """The user database, or `target` in its place, and what hosts have written in place of it.

    Raises:
        DatabaseAccessError: no target is given, and there is no place for a user database.
    """
    named = user_database() if target is None else target
    path = parse_target(named).path
    if path is None or not network_of(path):
        return [Layer("user", named)]
    # This host's file first, which need not be there yet: it is the one that `tune` will make.
    targets = dict.fromkeys([str(own_file(path)), str(path), *map(str, other_hosts(path))])
    return [Layer("user", target, is_beside=number > 0) for number, target in enumerate(targets)]


def named_layers(target: str | None = None) -> list[Layer]:
    """`target`, by default the user database, and what hosts have written in place of it: all that are there.

    Where nothing is there, the database itself, for whoever opens it to say so.

    Raises:
        DatabaseAccessError: `target` is neither a path nor a URL, or there is no place for a user database.
    """
    there = [layer for layer in user_layers(target) if not is_absent(layer)]
    return there or [Layer("user", user_database() if target is None else target)]


def packaged_databases() -> list[Path]:
    """The shipped databases, sorted: in the wheel within the package, in a checkout next to it."""
    package = Path(__file__).resolve().parent.parent
    folder = package / "_tuning_db"
    if not folder.is_dir():
        # A directory of that name next to an installed package would be somebody else's.
        folder = package.parent / "tuning_db" if (package.parent / "pyproject.toml").is_file() else folder
    return sorted(folder.glob("*.db")) if folder.is_dir() else []


def site_databases(*, is_quiet: bool = False) -> list[str]:
    """What `TUNEDCOMM_DB_PATH` lists, each once in its order; a directory stands for its `*.db` files, sorted.

    A directory that cannot be listed is left out with a warning, unless `is_quiet`.
    """
    found: list[str] = []
    for entry in settings.db_path():
        try:
            folder = Path(entry) if "://" in entry else expanded(entry)
            is_folder = os.path.isdir(folder)  # noqa: PTH112 - Path.is_dir() raises where it may not look
            names = sorted(os.listdir(folder)) if is_folder else None  # noqa: PTH208 - globs hide what they may not list
        except DatabaseError:  # whoever opens it says so
            names = None
        except OSError as error:
            if not is_quiet:
                warn_once(f"site databases left out: cannot list {entry} of TUNEDCOMM_DB_PATH: {error.strerror}")
            continue
        found += [entry] if names is None else [str(folder / name) for name in names if name.endswith(".db")]
    return list(dict.fromkeys(found))


def _all_layers() -> list[Layer]:
    try:
        user = user_layers()
    except DatabaseError as error:
        warn_once(str(error))
        user = []
    return [
        *user,
        *(Layer("site", target) for target in site_databases()),
        *(Layer("packaged", str(path)) for path in packaged_databases()),
    ]


def layers() -> list[Layer]:
    """Every layer, nearest first; a user without a place for a database has none, which is said once."""
    return _all_layers()


def layers_beside(target: str | None = None) -> list[Layer]:
    """Every layer, and what hosts have written in place of `target`, but for what this host writes itself.

    Raises:
        DatabaseAccessError: `target` is neither a path nor a URL, or there is no place for a user database.
    """
    there = [layer for layer in (*user_layers(target), *_all_layers()) if not is_absent(layer)]
    found = {_place(layer.target): layer for layer in there}
    found.pop(_place(writable_database(target)), None)
    return list(found.values())


def _place(target: str) -> str:
    """What two names of one database have in common."""
    try:
        path = parse_target(target).path
        return target if path is None else str(path.resolve())
    except (DatabaseError, OSError, RuntimeError):  # whoever opens it says so
        return target


def is_absent(layer: Layer) -> bool:
    """True for a user database that was never made, which is no fault; one that cannot be looked at may be there."""
    try:
        path = parse_target(layer.target).path
        if layer.name != "user" or path is None:
            return False
        path.lstat()
    except FileNotFoundError:
        return True
    except (DatabaseError, OSError):
        return False
    return False


@dataclass(slots=True)
class _Reading:
    """What is read of all layers.

    Attributes:
        own, borrowed: rows of this hardware, and of what may stand in for it.
        names: the hardware that may stand in.
        loans: what the layers hold of it.
    """

    own: Gathered
    borrowed: Gathered
    names: Sequence[str]
    loans: dict[str, Loan]

    def notes(self) -> list[str]:
        """What a person should know who named hardware that does not serve."""
        said = [
            f"nothing is borrowed from {loan.environment}: {loan.objection}"
            for loan in self.loans.values()
            if loan.objection is not None
        ]
        unknown = [n for n in self.names if not any(matches(n, loan.environment) for loan in self.loans.values())]
        return sorted(said) + [f"nothing is borrowed from {n!r}: no database holds such hardware" for n in unknown]


def _read(layer: Layer, rank: int, world_size: int, into: _Reading, like: Problem | None) -> None:
    """Add a layer, read again if somebody wrote to it meanwhile who cannot be locked out."""
    deadline = time.monotonic() + _READ_TIMEOUT_S
    while not _read_once(layer, rank, world_size, into, like, is_last=time.monotonic() > deadline):
        time.sleep(_READ_AGAIN_S)


def _read_once(
    layer: Layer, rank: int, world_size: int, into: _Reading, like: Problem | None, *, is_last: bool
) -> bool:
    """False if the file changed under the reader, who is to try again."""
    immutable = True if layer.name == "packaged" else None
    own, lent = into.own, into.borrowed
    with Database.open(layer.target, readonly=True, immutable=immutable, busy_timeout_s=_READ_TIMEOUT_S) as database:
        reader = Reader()
        try:
            with database.reading() as connection:
                environments = query.environments_like(connection, own.environment, reader)
                stored = query.load_environments(connection, reader) if into.names else {}
                found = loans(own.environment, into.names, stored.values())
                serving = {loan.environment.digest for loan in found if loan.objection is None}
                others = {key: there for key, there in stored.items() if there.digest in serving}
                trials, failures = [], []
                for here in (environments, others):
                    asked = (connection, here, world_size, reader)
                    trials.append(snapshot_query.ok_trials(*asked, like=like) if here else [])
                    failures.append(snapshot_query.failed_trials(*asked, like=like) if here else [])
                pins = query.pins(connection, reader, PinRow.environment_id.in_(list(environments)))
        except DatabaseError:
            if database.is_overtaken and not is_last:
                return False
            raise
        if database.is_overtaken:
            if is_last:
                raise DatabaseBusyError(f"{layer.target} is being written all the time by another host or user")
            return False
        database.warn_skipped(reader)
    # Added only now: a layer that turns out damaged half way must not leave half of itself behind.
    for gathered, good, failed in zip((own, lent), trials, failures, strict=True):
        for trial in good:
            gathered.add_trial(trial, layer=layer.name, rank=rank)
        for failure in failed:
            gathered.add_failure(failure)
    own.add_pins(pins, layer=layer.name, rank=rank, world_size=world_size)
    for loan in found:
        into.loans.setdefault(str(loan.environment), loan)
    return True


def load_snapshot(
    environment: Environment,
    world_size: int,
    *,
    layers: Sequence[Layer] | None = None,
    strict: bool = False,
    borrow: Sequence[str] = (),
    like: Problem | None = None,
) -> Snapshot:
    """Merge what every layer knows about this environment's hard fields and this world size.

    For each candidate and problem the most conclusive row is kept: finals before others, the same software before
    older, nearer layers before farther ones, then the newest.

    Args:
        environment: where the calls will run.
        world_size: ranks of the group.
        layers: what to read instead of `layers()`.
        strict: raise what is wrong with a layer instead of leaving the layer out with a warning; a user database
            that was never made counts as wrong too.
        borrow: names of other hardware whose rows may serve where there are none of this, as TUNEDCOMM_BORROW has them.
        like: keep only what the choice for this problem may depend on, which takes a fraction of the time. Such a
            snapshot answers for this problem alone.

    Raises:
        DatabaseError: only with `strict`.
    """
    names = Names()
    own, lent = Gathered(environment, names), Gathered(environment, names, borrowed=True)
    into = _Reading(own, lent, borrow, {})
    rank = -1
    with gc_paused():
        for layer in _all_layers() if layers is None else layers:
            rank += rank < 0 or not layer.is_beside
            try:
                if strict or not is_absent(layer):
                    _read(layer, rank, world_size, into, like)
            except DatabaseError as error:
                if strict:
                    raise
                warn_once(f"tuning database left out ({layer.name}): {error}")
        snapshot = snapshot_of(own, lent, world_size, into.notes())
    for note in snapshot.notes:
        warn_once(note)
    return snapshot
