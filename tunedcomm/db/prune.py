"""Removing trials that are no longer of use, and only those that were asked for."""

from __future__ import annotations

import sqlite3
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from sqlalchemy import (
    BigInteger,
    Column,
    ColumnElement,
    Connection,
    MetaData,
    Table,
    case,
    delete,
    func,
    insert,
    select,
    true,
)

from tunedcomm.db import query
from tunedcomm.db.check import invalid_rows
from tunedcomm.db.engine import parse_target, translated
from tunedcomm.db.layers import Layer
from tunedcomm.db.needed import needed_trials
from tunedcomm.db.reach import reached
from tunedcomm.db.rows import Reader
from tunedcomm.db.schema import Base, EnvironmentRow, PinRow, ProblemRow, RunRow, TrialRow, VariantRow
from tunedcomm.db.sources import SourceHash, is_current
from tunedcomm.db.stats import num_bytes
from tunedcomm.db.store import Database
from tunedcomm.errors import DatabaseAccessError, DatabaseBusyError, DatabaseFullError

__all__ = ["FAILURES", "Pruned", "PrunedGroup", "Selection", "prune"]

# What `failed` selects. That a candidate is infeasible is no failure, and costs nobody a launch.
FAILURES = ("compile_error", "incorrect", "crashed", "hung")
_TIMEOUT_S = 30.0
_CHUNK = 500


def _ids(name: str) -> Table:
    return Table(name, MetaData(), Column("id", BigInteger, primary_key=True), prefixes=["TEMPORARY"])


# Of one connection, for as long as a plan is made and carried out.
_SELECTED, _INVALID = _ids("tunedcomm_selected"), _ids("tunedcomm_invalid")


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """Which trials are meant: those that everything given here applies to.

    Attributes:
        stale: of a variant whose source has changed since.
        superseded: neither dispatch nor `explain` needs them.
        failed: the status is one of `FAILURES`. With a candidate's failures go its good trials that they hide, so that
            it is measured and checked again; failures that hide good trials of other databases stay.
        invalid: no reader uses them, for they make no sense.
        environments: digests; of one of these environments. Empty means any.
        before: stored before this time.
    """

    stale: bool = False
    superseded: bool = False
    failed: bool = False
    invalid: bool = False
    environments: tuple[str, ...] = ()
    before: datetime | None = None

    def __post_init__(self) -> None:
        if not any((self.stale, self.superseded, self.failed, self.invalid, self.environments, self.before)):
            raise ValueError("a selection of nothing in particular would remove every trial; select something")


@dataclass(frozen=True, slots=True, kw_only=True)
class PrunedGroup:
    """Trials that are removed: of one environment, op, variant and status; texts are as they are stored."""

    environment: str
    gpu: str
    op: str
    variant: str
    status: str
    trials: int
    finals: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Pruned:
    """What was removed, or would be.

    Attributes:
        target: the file, or the server's URL without its password.
        dry_run: nothing was removed.
        held: trials that were there before.
        groups: what is removed, by environment, op, variant and status.
        along: how many of these trials are good ones that go with a failure.
        kept: failures that were selected and stay, for they keep good trials of other databases from being used.
        unused: table to the rows that nothing refers to any more and that are removed as well; none on a server, where
            other hosts may be about to refer to them.
        bytes_before: size of the file; None for a server.
        bytes_after: the same afterwards; None where nothing was removed.
        compacted: the file was made smaller; False for a server, which does that by itself, and where other processes
            or a full disk were in the way.
    """

    target: str
    dry_run: bool
    held: int
    groups: tuple[PrunedGroup, ...]
    unused: Mapping[str, int]
    bytes_before: int | None
    along: int = 0
    kept: int = 0
    bytes_after: int | None = None
    compacted: bool = False

    @property
    def trials(self) -> int:
        """How many trials are removed."""
        return sum(group.trials for group in self.groups)


@dataclass(frozen=True, slots=True)
class _Plan:
    held: int
    groups: tuple[PrunedGroup, ...]
    unused: Mapping[type[Base], list[int]]
    along: int = 0
    kept: int = 0


def prune(
    database: Database,
    selection: Selection,
    source_hash: SourceHash,
    *,
    dry_run: bool = True,
    elsewhere: Sequence[Layer] = (),
) -> Pruned:
    """Remove the selected trials in one transaction, then what nothing refers to any more, then compact the file.

    Tuners may write and dispatch may read meanwhile: readers keep what they see, writers wait for the transaction. Pins
    stay, with what they refer to.

    Args:
        database: open; to write unless it is a dry run.
        selection: which trials.
        source_hash: what the variants' sources are now; the variants must be registered.
        dry_run: remove nothing, only say what would be.
        elsewhere: the other databases that dispatch reads, see `layers_beside`; only looked at.

    Raises:
        DatabaseError: it cannot be written, and nothing was removed then; or it is too damaged to be made smaller.
    """
    before = None if database.path is None else num_bytes(database.path)
    invalid = invalid_rows(database, source_hash).invalid if selection.invalid else {}

    def plan(connection: Connection) -> _Plan:
        with _selected(connection, selection, source_hash, invalid.get("trial", ())):
            along, kept = _reach_out(connection, elsewhere) if selection.failed else (0, 0)
            found = replace(_plan(connection, database, invalid), along=along, kept=kept)
            if not dry_run:
                connection.execute(delete(TrialRow).where(TrialRow.id.in_(select(_SELECTED.c.id))))
                for model, ids in found.unused.items():
                    _remove(connection, model, ids)
            return found

    if dry_run:
        with database.reading() as connection:
            found = plan(connection)
    else:
        found = database.change(plan)
    compacted = not dry_run and database.path is not None and _compact(database.path)
    return Pruned(
        target=str(database.path or database.url),
        dry_run=dry_run,
        held=found.held,
        groups=found.groups,
        unused={model.__tablename__: len(ids) for model, ids in found.unused.items() if ids},
        bytes_before=before,
        along=found.along,
        kept=found.kept,
        bytes_after=None if dry_run or database.path is None else num_bytes(database.path),
        compacted=compacted,
    )


@contextmanager
def _selected(
    connection: Connection, selection: Selection, source_hash: SourceHash, invalid: Collection[int]
) -> Iterator[None]:
    """The ids of the selected trials in a table of this connection; an error rolls it back with all the rest."""
    made = [_SELECTED, _INVALID]
    for table in made:
        table.create(connection)
    if invalid:
        connection.execute(insert(_INVALID), [{"id": id_} for id_ in invalid])
    where = list(_conditions(connection, selection, source_hash))
    connection.execute(insert(_SELECTED).from_select(["id"], select(TrialRow.id).where(*where)))
    yield
    for table in made:
        table.drop(connection)


def _conditions(connection: Connection, selection: Selection, source_hash: SourceHash) -> Iterator[ColumnElement[bool]]:
    if selection.stale:
        stored = query.load_variants(connection, Reader())
        yield TrialRow.variant_id.in_([key for key, v in stored.items() if is_current(v, source_hash) is False])
    if selection.superseded:
        yield TrialRow.id.not_in(needed_trials())
        # No answer rests on these, but a search that finds them does not try them again.
        yield TrialRow.status.not_in(("compile_error", "infeasible"))
    if selection.failed:
        yield TrialRow.status.in_(FAILURES)
    if selection.invalid:
        yield TrialRow.id.in_(select(_INVALID.c.id))
    if selection.environments:
        same = select(EnvironmentRow.id).where(EnvironmentRow.digest.in_(selection.environments))
        yield TrialRow.environment_id.in_(same)
    if selection.before is not None:
        yield TrialRow.created_at < selection.before


def _reach_out(connection: Connection, elsewhere: Sequence[Layer]) -> tuple[int, int]:
    """Select what must go with the selected failures, and not those that must stay; returns how many of each."""
    found = reached(connection, TrialRow.id.in_(select(_SELECTED.c.id)), elsewhere)
    selected = set(connection.execute(select(_SELECTED.c.id)).scalars())
    if along := found.good - selected:
        connection.execute(insert(_SELECTED), [{"id": id_} for id_ in along])
    for ids in _chunks(found.kept):
        connection.execute(delete(_SELECTED).where(_SELECTED.c.id.in_(ids)))
    return len(along), len(found.kept)


def _plan(connection: Connection, database: Database, invalid: Mapping[str, Collection[int]]) -> _Plan:
    held = int(connection.execute(select(func.count()).select_from(TrialRow)).scalar_one())
    what = (EnvironmentRow.digest, EnvironmentRow.gpu, ProblemRow.op, VariantRow.name, TrialRow.status)
    counted = (
        select(*what, func.count(), func.sum(case((TrialRow.final == true(), 1), else_=0)))
        .select_from(TrialRow)
        .join(_SELECTED, _SELECTED.c.id == TrialRow.id)
        # Rows that are not sound may refer to nothing.
        .outerjoin(EnvironmentRow, EnvironmentRow.id == TrialRow.environment_id)
        .outerjoin(ProblemRow, ProblemRow.id == TrialRow.problem_id)
        .outerjoin(VariantRow, VariantRow.id == TrialRow.variant_id)
        .group_by(*what)
    )
    groups = []
    for *texts, trials, finals in connection.execute(counted):
        environment, gpu, op, variant, status = (str(text or "") for text in texts)
        groups.append(
            PrunedGroup(
                environment=environment,
                gpu=gpu,
                op=op,
                variant=variant,
                status=status,
                trials=int(trials),
                finals=int(finals or 0),
            )
        )
    unused = {} if database.path is None else _unused(connection, invalid)
    order = sorted(groups, key=lambda g: (g.gpu, g.environment, g.op, g.variant, g.status))
    return _Plan(held, tuple(order), unused)


def _unused(connection: Connection, invalid: Mapping[str, Collection[int]]) -> dict[type[Base], list[int]]:
    """Rows that neither a trial that stays nor a pin refers to.

    The newest source of a variant stays: it says that older ones are out of date. So do runs that have not ended,
    whose command may be about to add its first trial.
    """
    stays = TrialRow.id.not_in(select(_SELECTED.c.id))
    newest = select(func.max(VariantRow.id)).group_by(VariantRow.op, VariantRow.name)
    running = select(RunRow.id).where(RunRow.finished_at.is_(None))
    kept: dict[type[Base], list[Any]] = {
        EnvironmentRow: [select(TrialRow.environment_id).where(stays), select(PinRow.environment_id)],
        ProblemRow: [select(TrialRow.problem_id).where(stays), select(PinRow.problem_id)],
        VariantRow: [select(TrialRow.variant_id).where(stays), newest],
        RunRow: [select(TrialRow.run_id).where(stays, TrialRow.run_id.is_not(None)), running],
    }
    found: dict[type[Base], list[int]] = {}
    for model, uses in kept.items():
        id_ = query.table(model).c.id
        used = {key for use in uses for key in connection.execute(use).scalars()}
        if model is VariantRow:  # one that makes no sense is nobody's newest source
            needed = set(connection.execute(uses[0]).scalars())
            used -= {key for key in invalid.get("variant", ()) if key not in needed}
        found[model] = [key for key in connection.execute(select(id_)).scalars() if key not in used]
    return found


def _remove(connection: Connection, model: type[Base], ids: list[int]) -> None:
    id_ = query.table(model).c.id
    for chunk in _chunks(ids):
        connection.execute(delete(model).where(id_.in_(chunk)))


def _chunks(ids: Iterable[int]) -> Iterator[list[int]]:
    left = sorted(ids)
    for start in range(0, len(left), _CHUNK):
        yield left[start : start + _CHUNK]


def _compact(path: Path) -> bool:
    """Give the space back to the file system, unless others use the database at this moment."""
    try:
        with (
            translated(parse_target(path)),
            closing(sqlite3.connect(path, timeout=_TIMEOUT_S, isolation_level=None)) as connection,
        ):
            connection.execute("VACUUM")
            # With a write-ahead log it lies in there first, and readers of the old pages keep it there.
            (busy, *_) = connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
    except (DatabaseAccessError, DatabaseBusyError, DatabaseFullError):
        return False
    return not busy
