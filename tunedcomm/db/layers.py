"""The databases a process reads, nearest first, and their merge into one snapshot.

Layers: the user database (`TUNEDCOMM_DB`, or a file in the user's data directory), site databases
(`TUNEDCOMM_DB_PATH`), and the databases shipped with the package.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import platformdirs

from tunedcomm import garbage, settings
from tunedcomm.db import query, snapshot_query
from tunedcomm.db.engine import parse_target
from tunedcomm.db.records import PinRecord
from tunedcomm.db.rows import Reader
from tunedcomm.db.schema import PinRow
from tunedcomm.db.snapshot import Failure, Numbers, Pinned, Row, Snapshot, is_drift
from tunedcomm.db.snapshot_query import FailedTrial, OkTrial
from tunedcomm.db.store import Database
from tunedcomm.errors import DatabaseError
from tunedcomm.hardware import SOFT_FIELDS, Environment
from tunedcomm.spec import Candidate, Problem

__all__ = ["Layer", "is_absent", "layers", "load_snapshot", "packaged_databases", "user_database"]

_log = logging.getLogger("tunedcomm")
_warned: set[str] = set()

# Readers of a snapshot wait for nobody: WAL lets them read beside a writer, anything longer is a stuck file system.
_READ_TIMEOUT_S = 5.0

# Problem and candidate as numbers, and the source hash.
_Key: TypeAlias = tuple[int, int, str]


@dataclass(frozen=True, slots=True)
class Layer:
    """One database and its place in the order.

    Attributes:
        name: `user`, `site` or `packaged`.
        target: file or SQLAlchemy URL.
    """

    name: str
    target: str


def user_database() -> str:
    """Where tuning is stored: `TUNEDCOMM_DB`, or `tuned.db` in the user's data directory."""
    return settings.db_url() or str(Path(platformdirs.user_data_dir("tunedcomm", appauthor=False)) / "tuned.db")


def packaged_databases() -> list[Path]:
    """The shipped databases, sorted: in the wheel within the package, in a checkout next to it."""
    package = Path(__file__).resolve().parent.parent
    folder = package / "_tuning_db"
    if not folder.is_dir():
        # A directory of that name next to an installed package would be somebody else's.
        folder = package.parent / "tuning_db" if (package.parent / "pyproject.toml").is_file() else folder
    return sorted(folder.glob("*.db")) if folder.is_dir() else []


def site_databases() -> list[str]:
    """What `TUNEDCOMM_DB_PATH` lists, in its order; a directory stands for its `*.db` files, sorted."""
    found: list[str] = []
    for entry in settings.db_path():
        folder = Path(entry).expanduser()
        if "://" not in entry and os.path.isdir(folder):  # noqa: PTH112 - Path.is_dir() raises where it may not look
            found += [str(path) for path in sorted(folder.glob("*.db"))]
        else:
            found.append(entry)
    return found


def _all_layers() -> list[Layer]:
    return [
        Layer("user", user_database()),
        *(Layer("site", target) for target in site_databases()),
        *(Layer("packaged", str(path)) for path in packaged_databases()),
    ]


def layers() -> list[Layer]:
    """Every layer, nearest first."""
    return _all_layers()


@dataclass(slots=True)
class _Merge:
    """What the layers read so far amount to."""

    environment: Environment
    problems: Numbers[Problem] = field(default_factory=Numbers)
    candidates: Numbers[Candidate] = field(default_factory=Numbers)
    environments: Numbers[Environment] = field(default_factory=Numbers)
    drifts: list[bool] = field(default_factory=list)
    rows: dict[_Key, Row] = field(default_factory=dict)
    good: dict[_Key, str] = field(default_factory=dict)
    failures: dict[_Key, FailedTrial] = field(default_factory=dict)
    pins: dict[Problem, Pinned] = field(default_factory=dict)

    def _key(self, trial: OkTrial | FailedTrial) -> _Key:
        return (self.problems.of(trial.problem), self.candidates.of(trial.candidate), trial.source_hash)

    def add_trial(self, trial: OkTrial, layer: Layer, rank: int) -> None:
        row = Row(
            problem=trial.problem,
            candidate=trial.candidate,
            source_hash=trial.source_hash,
            environment=trial.environment,
            latency_p50_us=trial.latency_p50_us,
            latency_p10_us=trial.latency_p10_us,
            latency_p90_us=trial.latency_p90_us,
            samples=trial.samples,
            baseline_p50_us=trial.baseline_p50_us,
            final=trial.final,
            drift=self._is_drift(trial.environment),
            layer=layer.name,
            layer_rank=rank,
            created_at=trial.created_at,
            trial_id=trial.id,
        )
        key = self._key(trial)
        self.good[key] = max(row.created_at, self.good.get(key, ""))
        known = self.rows.get(key)
        if known is None or _better(row, known):
            self.rows[key] = row

    def _is_drift(self, there: Environment) -> bool:
        number = self.environments.of(there)
        if number == len(self.drifts):
            self.drifts.append(is_drift(self.environment, there))
        return self.drifts[number]

    def add_failure(self, trial: FailedTrial) -> None:
        key = self._key(trial)
        known = self.failures.get(key)
        if known is None or (trial.created_at, trial.status) > (known.created_at, known.status):
            self.failures[key] = trial

    def add_pins(self, pins: Sequence[PinRecord], layer: Layer, world_size: int) -> None:
        here = [
            p
            for p in pins
            if p.problem.world_size == world_size and p.environment.hard_key == self.environment.hard_key
        ]
        for pin in sorted(here, key=lambda p: p.created_at, reverse=True):
            pinned = Pinned(problem=pin.problem, candidate=pin.candidate, reason=pin.reason, layer=layer.name)
            self.pins.setdefault(pin.problem, pinned)

    def snapshot(self, world_size: int) -> Snapshot:
        # A candidate that failed after its last good trial is not to be launched, whoever measured it before.
        failures = {k: f for k, f in self.failures.items() if f.created_at >= self.good.get(k, "")}
        rows = {key: row for key, row in self.rows.items() if key not in failures}
        return Snapshot(
            environment=self.environment,
            world_size=world_size,
            rows=tuple(rows.values()),
            pins=tuple(self.pins.values()),
            failures=_one_a_family(list(failures.values())),
            notes=_drift_notes(self.environment, list(rows.values())),
        )


def _better(row: Row, known: Row) -> bool:
    """True if `row` replaces `known`, of the same candidate: by tier, then the newest; never by row id."""
    if row.tier != known.tier:
        return row.tier < known.tier
    return _age(row) > _age(known)


def _age(row: Row) -> tuple[Any, ...]:
    # Equal times are told apart by content, so that the order of storing never matters.
    return (row.created_at, -row.latency_p50_us, row.samples, row.baseline_p50_us or 0.0, row.environment.digest)


def _one_a_family(trials: list[FailedTrial]) -> tuple[Failure, ...]:
    """The failure at the first problem of each family: one is enough to keep a candidate from being predicted."""
    kept: dict[tuple[Problem, Candidate, str], FailedTrial] = {}
    for trial in sorted(trials, key=lambda t: (t.problem, t.created_at, t.status)):
        kept.setdefault((trial.problem.family, trial.candidate, trial.source_hash), trial)
    return tuple(
        Failure(problem=t.problem, candidate=t.candidate, source_hash=t.source_hash, status=t.status)
        for t in kept.values()
    )


def _drift_notes(here: Environment, rows: list[Row]) -> tuple[str, ...]:
    drifted = [row for row in rows if row.drift]
    if not drifted:
        return ()
    names = [n for n in SOFT_FIELDS if n != "tunedcomm"]
    changes = sorted(
        {
            f"{name} {getattr(row.environment, name) or '(none)'} → {getattr(here, name) or '(none)'}"
            for row in drifted
            for name in names
            if getattr(row.environment, name) != getattr(here, name)
        }
    )
    return (
        f"{len(drifted)} of {len(rows)} rows were measured under other software ({', '.join(changes)}); they are used "
        "where there is nothing newer. `tunedcomm tune` measures them again",
    )


def _warn_once(message: str) -> None:
    if message not in _warned:
        _warned.add(message)
        _log.warning(message)


def is_absent(layer: Layer) -> bool:
    """True for a user database that was never made, which is no fault; one that cannot be looked at may be there."""
    path = parse_target(layer.target).path
    if layer.name != "user" or path is None:
        return False
    try:
        path.lstat()
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return False


def _read(layer: Layer, rank: int, world_size: int, merge: _Merge, like: Problem | None) -> None:
    immutable = True if layer.name == "packaged" else None
    with Database.open(layer.target, readonly=True, immutable=immutable, busy_timeout_s=_READ_TIMEOUT_S) as database:
        reader = Reader()
        with database.reading() as connection:
            environments = query.environments_like(connection, merge.environment, reader)
            if environments:
                trials = snapshot_query.ok_trials(connection, environments, world_size, reader, like=like)
                failures = snapshot_query.failed_trials(connection, environments, world_size, reader, like=like)
                pins = query.pins(connection, reader, PinRow.environment_id.in_(list(environments)))
        database.warn_skipped(reader)
    # Merged only now: a layer that turns out damaged half way must not leave half of itself behind.
    if environments:
        for trial in trials:
            merge.add_trial(trial, layer, rank)
        for failure in failures:
            merge.add_failure(failure)
        merge.add_pins(pins, layer, world_size)


def load_snapshot(
    environment: Environment,
    world_size: int,
    *,
    layers: Sequence[Layer] | None = None,
    strict: bool = False,
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
        like: keep only what the choice for this problem may depend on, which takes a fraction of the time. Such a
            snapshot answers for this problem alone.

    Raises:
        DatabaseError: only with `strict`.
    """
    merge = _Merge(environment)
    with garbage.kept():
        for rank, layer in enumerate(_all_layers() if layers is None else layers):
            try:
                if strict or not is_absent(layer):
                    _read(layer, rank, world_size, merge, like)
            except DatabaseError as error:
                if strict:
                    raise
                _warn_once(f"tuning database left out ({layer.name}): {error}")
        snapshot = merge.snapshot(world_size)
    for note in snapshot.notes:
        _warn_once(note)
    return snapshot
