"""Maintenance of a database: check it, sum it up, remove rows that nothing needs."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import sqlite3
import stat
import statistics
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Any, Literal, TypeAlias

import sqlalchemy as sa

from tunedcomm.db import engine, query
from tunedcomm.db.layers import Layer, packaged_databases
from tunedcomm.db.records import Reader, Skipped, StoredVariant, Trial
from tunedcomm.db.schema import HEAD, SOUND, Base, EnvironmentRow, ProblemRow, TrialRow, VariantRow
from tunedcomm.db.snapshot import needed_trials, winners_of
from tunedcomm.db.store import Database
from tunedcomm.db.targets import (
    BUSY_TIMEOUT_S,
    Target,
    is_immutable,
    leftovers,
    network_of,
    num_bytes,
    parse_target,
    prepare_file,
    warn_once,
)
from tunedcomm.db.values import DANGEROUS, FAILURES, RAN, STATUSES, canonical_json, time_of, was_tried
from tunedcomm.errors import (
    ConfigError,
    DatabaseAccessError,
    DatabaseBusyError,
    DatabaseCorruptError,
    DatabaseError,
    DatabaseFullError,
    DatabaseVersionError,
)
from tunedcomm.hardware import Environment
from tunedcomm.selection.select import Registered
from tunedcomm.spec import Problem, variants
from tunedcomm.symm.layout import limits_for

Level: TypeAlias = Literal["ok", "warn", "fail"]
# Op and variant to the hash of its source as it is now; None for a variant that this tunedcomm does not have.
SourceHash: TypeAlias = Callable[[str, str], str | None]

_LIBRARY = "library"


def is_current(variant: StoredVariant | None, source_hash: SourceHash) -> bool | None:
    """False if a stored variant's source has changed since, None if this tunedcomm does not have the variant.

    The library is what the machine has, however this tunedcomm calls it: its trials never grow stale.
    """
    current = None if variant is None else source_hash(variant.op, variant.name)
    if variant is None or current is None:
        return None
    return variant.name == _LIBRARY or current == variant.source_hash


# Check


_MAX_FAULTS = 20
_MAX_EXAMPLES = 3
_RESTORE = (
    "move it away and restore a copy or an exported file; the `.recover` of the program sqlite3 may save its rows, "
    "else tune again"
)
_PRUNE_INVALID = "`tunedcomm db prune --invalid` removes them and the trials that refer to them"
_MEND_PIN = "`tunedcomm db unpin` it, or `tunedcomm db pin` something that can run"


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check, with the remedy unless all is well.

    Level `warn`: the database works, but the user should know. Level `fail`: the database is not sound.
    """

    name: str
    level: Level
    detail: str
    mend: str = ""


def check_database(target: str | Path, source_hash: SourceHash) -> list[Finding]:
    """Check a database in every way; it is sound if no finding has the level `fail`.

    Nothing is changed, and tuners may go on writing to it. The variants must be registered.

    Raises:
        DatabaseBusyError: another process has held it locked for half a minute.
    """
    where, found, part = parse_target(target), list[Finding](), "file"
    try:
        if where.path is not None:
            prepare_file(where.path, create=False)
            found += _surroundings(where.path)
            part = "integrity"
            found += _integrity(where, where.path)
        part = "content"
        with Database.open(target, readonly=True) as database:
            revision = database.schema_version
            if revision not in SOUND:
                text = f"revision {revision}, and this tunedcomm reads {HEAD}"
                return [*found, Finding("schema", "fail", text, f"`tunedcomm db upgrade --db {where}`")]
            return [*found, Finding("schema", "ok", f"revision {revision}"), *check_rows(database, source_hash)[0]]
    except DatabaseBusyError:
        raise
    except DatabaseVersionError as error:
        return [*found, Finding("schema", "fail", str(error), "upgrade tunedcomm")]
    except DatabaseError as error:
        mend = "give another path" if where.path is not None and not where.path.is_file() else _RESTORE
        return [*found, Finding(part, "fail", str(error), mend)]


def _surroundings(path: Path) -> list[Finding]:
    """Findings about the files beside a database, its permissions and its file system."""
    sides, rights = [], []
    for side in leftovers(path):
        text = f"{side.name} holds {side.stat().st_size} bytes: a process has the database open, or one was killed"
        mend = f"nothing while one has; the next command that writes folds it in. Never move {path.name} without it"
        sides.append(Finding("side files", "warn", text, mend))
    writable, folder = (os.access(place, os.W_OK, effective_ids=True) for place in (path, path.parent))
    if writable and not folder:
        text = f"{path} may be written and its directory may not, so that SQLite cannot write it either"
        rights.append(Finding("permissions", "warn", text, "make the directory writable, or the file read-only"))
    for place in (path, path.parent):
        mode = place.stat().st_mode
        if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
            text = f"every user may change {place}, and with it which kernels run for others"
            rights.append(Finding("permissions", "warn", text, f"chmod o-w {place}"))
    system = Finding("file system", "ok", "local to this host")
    if kind := network_of(path):
        text = f"{path} lies on a network file system ({kind}), where SQLite's locks do not hold between hosts"
        system = Finding("file system", "warn", text, "only read it, as a site database")
    may = "it can be read and written" if writable and folder else "it can be read, not written"
    return [*_or_ok("side files", sides, "none"), *_or_ok("permissions", rights, may), system]


def _or_ok(name: str, found: list[Finding], well: str) -> list[Finding]:
    return found or [Finding(name, "ok", well)]


def _integrity(where: Target, path: Path) -> list[Finding]:
    """List what SQLite finds wrong with the file, and triggers and views, which tunedcomm never makes.

    Raises:
        DatabaseCorruptError: the file is damaged: its rows mean nothing.
    """
    with engine.connected(where, readonly=True, immutable=is_immutable(path)) as connection:
        faults = connection.exec_driver_sql(f"PRAGMA integrity_check({_MAX_FAULTS})").scalars().all()
        if faults != ["ok"]:
            raise DatabaseCorruptError(f"SQLite finds it damaged: {'; '.join(map(str, faults))[:600]}")
        dangling = connection.exec_driver_sql("PRAGMA foreign_key_check").all()
        made = connection.exec_driver_sql(
            "SELECT type, name FROM sqlite_master WHERE type IN ('trigger', 'view')"
        ).all()
    found = [Finding("integrity", "ok", "SQLite finds nothing wrong")]
    refer = [f"{table} {id_}" for table, id_, *_ in dangling]
    wrong = [Finding("references", "fail", _told(refer, "rows refer to rows that are not there"), _PRUNE_INVALID)]
    found += _or_ok("references", wrong if refer else [], "every row that another one refers to is there")
    if made:
        text = f"it holds what tunedcomm does not make: {', '.join(f'{kind} {name}' for kind, name in made)[:300]}"
        found.append(Finding("objects", "fail", text, "do not write to it; export its rows to a new file"))
    return found


def check_rows(database: Database, source_hash: SourceHash) -> tuple[list[Finding], Skipped]:
    """Read every row as readers do, and check that configs lie in their variants' spaces.

    Reports each invalid row, which readers skip, and every row that refers to one. The variants must be registered.
    """
    reader, objection = Reader(), functools.cache(_objection)
    invalid, by_variant, unknown = reader.skipped, Counter[StoredVariant](), list[str]()
    with database.reading() as connection:
        sizes = {
            "environment": len(query.load_environments(connection, reader)),
            "problem": len(query.load_problems(connection, reader)),
            "variant": len(query.load_variants(connection, reader)),
            "run": len(query.runs(connection, reader)),
        }
        for trial in query.all_trials(connection, reader):
            by_variant[trial.stored_variant] += 1
            of_config = (trial.problem.op, trial.variant, canonical_json(trial.config))
            if is_current(trial.stored_variant, source_hash) and (reason := objection(*of_config)):
                invalid.add("trial", trial.id, reason)
        pins = query.pins(connection, reader)
    for pin in pins:
        op, variant = pin.problem.op, pin.candidate.variant
        if variant not in variants(op):
            unknown.append(f"pin {pin.id}: {op} has no variant {variant!r} here")
        elif reason := objection(op, variant, canonical_json(pin.candidate.config_dict)):
            invalid.add("pin", pin.id, reason)
    found: list[Finding] = []
    for name, size in (sizes | {"trial": by_variant.total(), "pin": len(pins)}).items():
        rows = [f"{table} {id_}: {why}" for (table, id_), why in invalid.rows.items() if table == name]
        mend = _MEND_PIN if name == "pin" else f"{_PRUNE_INVALID}; or restore a copy"
        wrong = [Finding(f"{name}s", "fail", _told(rows, "are invalid"), mend)] if rows else []
        if name == "pin" and unknown:
            text = _told(unknown, "name variants that this tunedcomm does not have")
            wrong.append(Finding("pins", "warn", text, _MEND_PIN))
        found += _or_ok(f"{name}s", wrong, f"{size}, all sound")
    return [*found, *_sources(by_variant, source_hash, is_packaged=database.path in packaged_databases())], invalid


def _told(rows: Sequence[str], what: str) -> str:
    """Number of rows, and the first few."""
    more = [f"and {len(rows) - _MAX_EXAMPLES} more"] if len(rows) > _MAX_EXAMPLES else []
    return f"{len(rows)} {what}: {'; '.join([*rows[:_MAX_EXAMPLES], *more])}"


def _objection(op: str, name: str, config: str) -> str | None:
    """Why a config, as JSON, is not in the space of its variant; None if it is."""
    try:
        variants(op)[name].space.validate(json.loads(config))
    except ConfigError as error:
        return f"its config is outside of the space of {name}: {error}"
    return None


def _sources(by_variant: Mapping[StoredVariant, int], source_hash: SourceHash, *, is_packaged: bool) -> list[Finding]:
    """Findings about kernels that changed or are gone; packaged databases keep the rows of removed variants."""
    counts: dict[bool | None, list[str]] = {True: [], False: [], None: []}
    for variant, count in sorted(by_variant.items(), key=str):
        counts[is_current(variant, source_hash)].append(f"{count} of {variant.op} {variant.name}")
    found = []
    if stale := counts[False]:
        text = f"kernels have changed since these trials, which are not used any more: {', '.join(stale)}"
        mend = "`tunedcomm tune` measures them again; `tunedcomm db prune --stale` removes the old trials"
        found.append(Finding("sources", "warn", text, mend))
    if unknown := counts[None]:
        text = f"skipped are trials of variants that this tunedcomm does not have: {', '.join(unknown)}"
        mend = "nothing to do if another version of tunedcomm reads this database"
        found.append(Finding("sources", "ok", text) if is_packaged else Finding("sources", "warn", text, mend))
    return _or_ok("sources", found, "all trials are of kernels as they are now")


# Prune


# Ids of one connection, for as long as a plan is made and carried out.
_SELECTED = sa.Table(
    "tunedcomm_selected", sa.MetaData(), sa.Column("id", sa.BigInteger, primary_key=True), prefixes=["TEMPORARY"]
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """The trials that everything given here applies to.

    Attributes:
        stale: of a variant whose source has changed since.
        superseded: neither dispatch nor `explain` needs them.
        failed: the status is one of FAILURES. With a candidate's failures go its good trials that they hide, so that it
            is measured and checked again; failures that hide good trials of other databases stay.
        invalid: no reader uses them.
        environments: of an environment with one of these digests; empty means any.
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
class Pruned:
    """Rows that were removed or, in a dry run, would be.

    Attributes:
        target: the file, or the server's URL without its password.
        held: trials that were there before.
        groups: what is removed, each of one `environment`, `gpu`, `op`, `variant` and `status` as they are stored, with
            the number of `trials` and `finals`.
        unused: table to the number of rows that nothing refers to any more and that are removed as well; none on a
            server, where other hosts may be about to refer to them.
        bytes_before, bytes_after: size of the file; None for a server, and where nothing was removed.
        along: how many of these trials are good ones that go with a failure.
        kept: failures that were selected and stay, for they keep good trials of other databases from being used.
        compacted: the file was made smaller; False for a server, which does that by itself, and where other processes
            or a full disk were in the way.
    """

    target: str
    dry_run: bool
    held: int
    groups: tuple[Mapping[str, Any], ...]
    unused: Mapping[str, int]
    bytes_before: int | None
    along: int = 0
    kept: int = 0
    bytes_after: int | None = None
    compacted: bool = False

    @property
    def trials(self) -> int:
        """Number of trials that are removed."""
        return sum(group["trials"] for group in self.groups)


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
        database: open; to write unless it is a dry run. The variants must be registered.
        dry_run: remove nothing, only say what would be.
        elsewhere: the other databases that dispatch reads, see `layers_beside`; only looked at.

    Raises:
        DatabaseError: it cannot be written, and nothing was removed then; or it is too damaged to be made smaller.
    """
    before = None if database.path is None else num_bytes(database.path)
    invalid = check_rows(database, source_hash)[1].rows if selection.invalid else {}

    def carry_out(connection: sa.Connection) -> Pruned:
        conditions = _conditions(connection, selection, source_hash)
        ids = set(connection.execute(sa.select(TrialRow.id).where(*conditions)).scalars())
        if selection.invalid:
            ids = {id_ for id_ in ids if ("trial", id_) in invalid}
        along, kept = _hidden_by_failures(connection, ids, elsewhere) if selection.failed else (set(), set())
        along -= ids
        _SELECTED.create(connection)  # an error rolls it back with all the rest
        if ids := (ids | along) - kept:
            connection.execute(sa.insert(_SELECTED), [{"id": id_} for id_ in ids])
        selected = sa.select(_SELECTED.c.id)
        held, groups = query.count(connection, sa.select(TrialRow.id)), _groups(connection)
        unused: dict[type[Base], sa.Select[Any]] = {}
        if database.path is not None:
            variants = [id_ for table, id_ in invalid if table == "variant"]
            unused = query.unused_rows(TrialRow.id.not_in(selected), variants)
        counts = {model.__tablename__: query.count(connection, rows) for model, rows in unused.items()}
        if not dry_run:
            connection.execute(sa.delete(TrialRow).where(TrialRow.id.in_(selected)))
            for model, rows in unused.items():
                connection.execute(sa.delete(model).where(query.table(model).c.id.in_(rows)))
        _SELECTED.drop(connection)
        return Pruned(
            target=str(database.path or database.url),
            dry_run=dry_run,
            held=held,
            groups=groups,
            unused={name: count for name, count in counts.items() if count},
            bytes_before=before,
            along=len(along),
            kept=len(kept),
        )

    if dry_run:
        with database.reading() as connection:
            return carry_out(connection)
    done = database.change(carry_out)
    if database.path is None:
        return done
    compacted = _compact(database.path)
    return replace(done, compacted=compacted, bytes_after=num_bytes(database.path))


def _conditions(
    connection: sa.Connection, selection: Selection, source_hash: SourceHash
) -> list[sa.ColumnElement[bool]]:
    found: list[sa.ColumnElement[bool]] = []
    if selection.stale:
        stored = query.load_variants(connection, Reader())
        stale = [key for key, variant in stored.items() if is_current(variant, source_hash) is False]
        found.append(TrialRow.variant_id.in_(stale))
    if selection.superseded:
        # No answer rests on trials that could not run, but a search that finds them does not try them again.
        found += [TrialRow.id.not_in(needed_trials()), TrialRow.status.not_in(("compile_error", "infeasible"))]
    if selection.failed:
        found.append(TrialRow.status.in_(FAILURES))
    if selection.environments:
        same = sa.select(EnvironmentRow.id).where(EnvironmentRow.digest.in_(selection.environments))
        found.append(TrialRow.environment_id.in_(same))
    if selection.before is not None:
        found.append(TrialRow.created_at < selection.before)
    return found


def _hidden_by_failures(
    connection: sa.Connection, ids: Collection[int], elsewhere: Iterable[Layer]
) -> tuple[set[int], set[int]]:
    """Ids of good trials that the selected failures hide, and of selected failures that must stay.

    A failure counts until the candidate is good at the same problem again. While it counts, the candidate does not run
    that problem, and nothing is predicted of it in the whole family. A failure that hides good trials of another
    database stays. A database that cannot be read is left out with a warning.
    """

    def scope(trial: Trial) -> tuple[Any, ...]:
        """A candidate on a family of problems and a kind of hardware: there a failure hides its trials."""
        return (trial.environment.hard_key, trial.problem.family, trial.candidate, trial.source_hash)

    dangerous = TrialRow.status.in_(DANGEROUS)
    failed = [trial for trial in query.trials(connection, Reader(), dangerous) if trial.id in ids]
    if not failed:
        return set(), set()
    scopes = {scope(trial) for trial in failed}

    def ran(connection: sa.Connection) -> list[Trial]:
        """The trials within these scopes that ran."""
        same = sa.select(VariantRow.id).where(VariantRow.name.in_({trial.variant for trial in failed}))
        where = (TrialRow.status.in_(RAN), TrialRow.variant_id.in_(same))
        return [trial for trial in query.trials(connection, Reader(), *where) if scope(trial) in scopes]

    local, remote = ran(connection), list[Trial]()
    for layer in elsewhere:
        try:
            with layer.open() as other, other.reading() as reading:
                remote += [trial for trial in ran(reading) if trial.status == "ok"]
        except DatabaseError as error:
            warn_once(f"what failures hide in a database of the {layer.name} layer is not known: {error}")
    last_good: dict[Any, datetime] = {}
    for trial in (*local, *remote):
        if trial.status == "ok":
            key = (scope(trial), trial.problem)
            last_good[key] = max(trial.created_at, last_good.get(key, trial.created_at))
    counting = [t for t in failed if t.created_at >= last_good.get((scope(t), t.problem), t.created_at)]
    elsewhere_good = {scope(trial) for trial in remote}
    removed = {scope(trial) for trial in counting} - elsewhere_good
    hidden = {t.id for t in local if t.id is not None and scope(t) in removed}
    return hidden, {t.id for t in counting if t.id is not None and scope(t) in elsewhere_good}


def _groups(connection: sa.Connection) -> tuple[Mapping[str, Any], ...]:
    """The selected trials, counted."""
    what: dict[str, Any] = {
        "gpu": EnvironmentRow.gpu,
        "environment": EnvironmentRow.digest,
        "op": ProblemRow.op,
        "variant": VariantRow.name,
        "status": TrialRow.status,
    }
    counts = (sa.func.count().label("trials"), sa.func.count().filter(TrialRow.final).label("finals"))
    counted = (
        sa.select(*(sa.func.coalesce(column, "").label(name) for name, column in what.items()), *counts)
        .select_from(TrialRow)
        .join(_SELECTED, _SELECTED.c.id == TrialRow.id)
        # Rows that are not sound may refer to nothing.
        .outerjoin(EnvironmentRow, EnvironmentRow.id == TrialRow.environment_id)
        .outerjoin(ProblemRow, ProblemRow.id == TrialRow.problem_id)
        .outerjoin(VariantRow, VariantRow.id == TrialRow.variant_id)
        .group_by(*what.values())
    )
    groups = [dict(row) for row in connection.execute(counted).mappings()]
    return tuple(sorted(groups, key=lambda group: [str(group[name]) for name in what]))


def _compact(path: Path) -> bool:
    """Return free space to the file system, unless other processes use the database now."""
    try:
        with (
            engine.translated(parse_target(path)),
            closing(sqlite3.connect(path, timeout=BUSY_TIMEOUT_S, isolation_level=None)) as connection,
        ):
            connection.execute("VACUUM")
            # With a write-ahead log it lies in there first, and readers of the old pages keep it there.
            (busy, *_) = connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
    except (DatabaseAccessError, DatabaseBusyError, DatabaseFullError):
        return False
    return not busy


# Stats


@dataclass(slots=True, kw_only=True)
class GroupStats:
    """Problems of one op, world size, dtype and mode in one environment.

    Attributes:
        problems: number of problems with a trial.
        trials: status to how many ended so.
        finals: trials of the finals.
        winners: variant to the number of problems that dispatch answers with it by this database, if nothing is pinned.
        speedups: the library's latency over the winner's, of the problems where both are known.
        stale: trials of sources that have changed since, which dispatch does not use.
        unknown: trials of variants that this tunedcomm does not have.
        oldest, newest: times of the first and the last trial; None if no time can be read.
    """

    environment: Environment
    op: str
    world_size: int
    dtype: str
    mode: str
    problems: int = 0
    trials: Counter[str] = field(default_factory=Counter)
    finals: int = 0
    winners: Counter[str] = field(default_factory=Counter)
    speedups: list[float] = field(default_factory=list)
    stale: int = 0
    unknown: int = 0
    oldest: datetime | None = None
    newest: datetime | None = None

    @property
    def num_tried(self) -> int:
        """Number of trials as `tune` counts them."""
        return sum(count for status, count in self.trials.items() if was_tried(status))

    @property
    def speedup(self) -> float | None:
        """Geometric mean of the speed-ups; None if none is known."""
        return statistics.geometric_mean(self.speedups) if self.speedups else None

    @property
    def library_share(self) -> float | None:
        """Share of the problems with a winner that the library wins; None if there are none."""
        won = sum(self.winners.values())
        return self.winners.get(_LIBRARY, 0) / won if won else None


@dataclass(frozen=True, slots=True, kw_only=True)
class DatabaseStats:
    """One database: `target` without a password, its size (None for a server), schema revision, rows and groups."""

    target: str
    num_bytes: int | None
    schema: str
    rows: dict[str, int]
    groups: tuple[GroupStats, ...]

    @property
    def num_tried(self) -> int:
        """Number of trials as `tune` counts them; `rows` counts every row."""
        return sum(self.rows[f"trials_{status}"] for status in STATUSES if was_tried(status))


def collect_stats(database: Database, source_hash: SourceHash) -> DatabaseStats:
    """Sum up an open database; invalid rows are left out with a warning. The variants must be registered."""
    reader = Reader()
    found: dict[tuple[str, str, str, int, str, str], GroupStats] = {}

    def group_of(environment: Environment, problem: Problem) -> GroupStats:
        same = {name: getattr(problem, name) for name in ("op", "world_size", "dtype", "mode")}
        key = (environment.gpu, environment.digest, *same.values())
        return found.setdefault(key, GroupStats(environment=environment, **same))

    with database.reading() as connection:
        environments, problems = query.load_environments(connection, reader), query.load_problems(connection, reader)
        stored = query.load_variants(connection, reader)
        seen, ran = set[tuple[int, int]](), dict[tuple[int, int], None]()
        for row in query.tally(connection):
            if row.environment_id not in environments or row.problem_id not in problems:
                continue
            group = group_of(environments[row.environment_id], problems[row.problem_id])
            group.problems += (row.environment_id, row.problem_id) not in seen
            seen.add((row.environment_id, row.problem_id))
            if row.status == "ok":
                ran[row.environment_id, row.problem_id] = None
            group.trials[str(row.status)] += row.trials
            group.finals += row.finals
            current = is_current(stored.get(row.variant_id), source_hash)
            group.unknown += row.trials if current is None else 0
            group.stale += row.trials if current is False else 0
            with contextlib.suppress(ValueError):  # no time can be read
                first, last = time_of(row.first), time_of(row.last)
                group.oldest, group.newest = min(group.oldest or first, first), max(group.newest or last, last)
        for key, world_size in sorted({(key, problems[problem].world_size) for key, problem in ran}):
            environment, catalog = environments[key], Registered(limits_for(environments[key], world_size), source_hash)
            measured = [problems[id_] for of, id_ in ran if of == key and problems[id_].world_size == world_size]
            decisions = winners_of(connection, reader, environment=environment, problems=measured, catalog=catalog)
            for problem, decision in decisions.items():
                group = group_of(environment, problem)
                group.winners[decision.candidate.variant] += 1
                if decision.latency_us is not None and decision.library_us is not None:
                    group.speedups.append(decision.library_us / decision.latency_us)
    database.warn_skipped(reader)
    return DatabaseStats(
        target=str(database.path or database.url),
        num_bytes=None if database.path is None else num_bytes(database.path),
        schema=database.schema_version,
        rows=database.stats(),
        groups=tuple(found[key] for key in sorted(found)),
    )
