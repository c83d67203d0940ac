"""Care for a database: is it sound, what does it amount to, and removing what is no longer of use."""

from __future__ import annotations

import functools
import json
import os
import sqlite3
import stat
import statistics
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set
from contextlib import closing
from dataclasses import dataclass, field, replace
from datetime import datetime
from operator import attrgetter
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias

import sqlalchemy as sa
from sqlalchemy import Connection, func, select

from tunedcomm.db import engine, query
from tunedcomm.db import records as parse
from tunedcomm.db.engine import BUSY_TIMEOUT_S, Target, num_bytes, parse_target, translated, warn_once
from tunedcomm.db.jsonl import SoundRows
from tunedcomm.db.layers import Layer
from tunedcomm.db.records import FAILED, STATUSES, Reader, StoredVariant, Trial, canonical_json, was_tried
from tunedcomm.db.schema import HEAD, SOUND, Base, EnvironmentRow, ProblemRow, TrialRow, VariantRow
from tunedcomm.db.snapshot import needed_trials, ok_rows
from tunedcomm.db.store import Database
from tunedcomm.errors import (
    ConfigError,
    DatabaseAccessError,
    DatabaseBusyError,
    DatabaseError,
    DatabaseFullError,
    DatabaseVersionError,
)
from tunedcomm.hardware import Environment
from tunedcomm.selection.score import pool
from tunedcomm.selection.snapshot import Row
from tunedcomm.spec import Candidate, Problem, admits, variants

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
    "move it away and restore a copy or an exported file; the `.recover` of the program sqlite3 may save what it held, "
    "else tune again"
)
_PRUNE_INVALID = "`tunedcomm db prune --invalid` removes them and the trials that refer to them"
_MEND_PIN = "`tunedcomm db unpin` it, or `tunedcomm db pin` something that can run"


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at: what was found and, where not all is well, what to do.

    Level `warn` means that it works and somebody should know, `fail` that the database is not sound.
    """

    name: str
    level: Level
    detail: str
    mend: str = ""


def check_database(target: str | Path, source_hash: SourceHash) -> list[Finding]:
    """Look at everything about a database; it is sound where no finding has the level `fail`.

    Nothing is changed, and tuners may go on writing to it. The variants must be registered.

    Raises:
        DatabaseBusyError: another process has held it locked for half a minute.
    """
    where = parse_target(target)
    found: list[Finding] = []
    if where.path is not None:
        try:
            engine.prepare_file(where.path, create=False)
        except DatabaseError as error:
            return [Finding("file", "fail", str(error), _RESTORE if where.path.is_file() else "give another path")]
        damage = _damage(where, where.path)
        found = [*_surroundings(where.path), *damage]
        if damage[0].level == "fail":
            return found  # what its rows hold means nothing then
    try:
        with Database.open(target, readonly=True) as database:
            revision = database.schema_version
            if revision not in SOUND:
                text = f"revision {revision}, and this tunedcomm reads {HEAD}"
                return [*found, Finding("schema", "fail", text, f"`tunedcomm db upgrade --db {where}`")]
            found.append(Finding("schema", "ok", f"revision {revision}"))
            return [*found, *check_rows(database, source_hash).findings]
    except DatabaseVersionError as error:
        return [*found, Finding("schema", "fail", str(error), "upgrade tunedcomm")]
    except DatabaseBusyError:
        raise
    except DatabaseError as error:
        return [*found, Finding("content", "fail", str(error), _RESTORE)]


def _surroundings(path: Path) -> list[Finding]:
    """Findings about the files beside a database, its permissions and its file system."""
    sides, rights = [], []
    for side in engine.leftovers(path):
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
    if kind := engine.network_of(path):
        text = f"{path} lies on a network file system ({kind}), where SQLite's locks do not hold between hosts"
        system = Finding("file system", "warn", text, "only read it, as a site database")
    may = "it can be read and written" if writable and folder else "it can be read, not written"
    return [*_or_ok("side files", sides, "none"), *_or_ok("permissions", rights, may), system]


def _or_ok(name: str, found: list[Finding], well: str) -> list[Finding]:
    return found or [Finding(name, "ok", well)]


def _damage(where: Target, path: Path) -> list[Finding]:
    """Faults that SQLite itself finds, and objects that only an intruder would have put into the file."""
    uri = engine.file_uri(path, readonly=True, immutable=engine.is_immutable(path))
    try:
        with closing(sqlite3.connect(uri, uri=True, timeout=BUSY_TIMEOUT_S)) as connection:
            connection.text_factory = lambda text: text.decode("utf-8", "replace")
            connection.execute("PRAGMA trusted_schema=OFF")
            faults = [str(row[0]) for row in connection.execute(f"PRAGMA integrity_check({_MAX_FAULTS})")]
            dangling = connection.execute("PRAGMA foreign_key_check").fetchall() if faults == ["ok"] else []
            strange = connection.execute("SELECT type, name FROM sqlite_master WHERE type IN ('trigger', 'view')")
            made = [f"{kind} {name}" for kind, name in strange]
    except (sqlite3.Error, UnicodeDecodeError) as error:  # the last of what SQLite says of names
        if "locked" in str(error):
            raise DatabaseBusyError(f"{where} is locked by another process ({error}); run the command again") from error
        return [Finding("integrity", "fail", f"SQLite cannot read it: {error}", _RESTORE)]
    if faults != ["ok"]:
        return [Finding("integrity", "fail", f"SQLite finds it damaged: {'; '.join(faults)[:600]}", _RESTORE)]
    found = [
        Finding("integrity", "ok", "SQLite finds nothing wrong"),
        Finding("references", "ok", "every row that another one refers to is there"),
    ]
    if dangling:
        first = ", ".join(f"{row[0]} {row[1]}" for row in dangling[:3])
        text = f"{len(dangling)} rows refer to rows that are not there: {first}"
        found[1] = Finding("references", "fail", text, _PRUNE_INVALID)
    if made:
        text = f"it holds what tunedcomm does not make: {', '.join(made)[:300]}"
        found.append(Finding("objects", "fail", text, "do not write to it; export what it holds to a new file"))
    return found


class RowReport(NamedTuple):
    """Findings about every row; and by table the ids of rows that are invalid, or refer to an invalid one."""

    findings: Sequence[Finding]
    invalid: Mapping[str, Set[int]]


@dataclass(slots=True)
class _Faults:
    """Rows with one fault: how many, and the first few in words."""

    count: int = 0
    examples: list[str] = field(default_factory=list)

    def add(self, text: str) -> None:
        self.count += 1
        if len(self.examples) < _MAX_EXAMPLES:
            self.examples.append(text[:300])

    def finding(self, name: str, what: str, mend: str, *, level: Level = "fail") -> list[Finding]:
        """The finding that says so; none where nothing is wrong."""
        more = self.count - len(self.examples)
        told = "; ".join([*self.examples, *([f"and {more} more"] if more else [])])
        return [Finding(name, level, f"{self.count} {what}: {told}", mend)] if self.count else []


def check_rows(database: Database, source_hash: SourceHash) -> RowReport:
    """Check values, digests and references of every row, and that configs lie in their variants' spaces.

    Readers skip an invalid row and go on; here each is found and counted. The variants must be registered.
    """
    faults = {name: _Faults() for name in Base.metadata.tables}
    invalid: dict[str, set[int]] = {name: set() for name in Base.metadata.tables}
    unknown, by_variant = _Faults(), Counter[StoredVariant]()
    num_pins = 0
    objection = functools.cache(_objection)

    def add(name: str, id_: Any, what: str) -> None:
        faults[name].add(f"{name} {id_}: {what}")
        invalid[name].add(id_)

    with database.reading() as connection:
        sound = SoundRows(connection, add)
        for id_, line in sound.trials():
            variant = StoredVariant(line["problem"]["op"], line["variant"], line["numerics"], line["source_hash"])
            by_variant[variant] += 1
            config = canonical_json(line["config"])
            if is_current(variant, source_hash) and (reason := objection(variant.op, variant.name, config)):
                add("trial", id_, reason)
        for id_, line in sound.pins():
            num_pins, op = num_pins + 1, line["problem"]["op"]
            if line["variant"] not in variants(op):
                unknown.add(f"pin {id_}: {op} has no variant {line['variant']!r} here")
            elif reason := objection(op, line["variant"], canonical_json(line["config"])):
                add("pin", id_, reason)
    sizes = {"environment": len(sound.environments), "problem": len(sound.problems), "variant": len(sound.variants)}
    sizes |= {"run": len(sound.runs), "trial": by_variant.total(), "pin": num_pins}
    found: list[Finding] = []
    for name, size in sizes.items():
        mend = _MEND_PIN if name == "pin" else f"{_PRUNE_INVALID}; or restore a copy"
        wrong = faults[name].finding(f"{name}s", "make no sense", mend)
        if name == "pin":
            wrong += unknown.finding("pins", "name variants that this tunedcomm does not have", _MEND_PIN, level="warn")
        found += _or_ok(f"{name}s", wrong, f"{size}, all sound")
    return RowReport([*found, *_sources(by_variant, source_hash)], invalid)


def _objection(op: str, name: str, config: str) -> str | None:
    """Why a config, as JSON, is not in the space of its variant; None if it is."""
    try:
        variants(op)[name].space.validate(json.loads(config))
    except ConfigError as error:
        return f"its config is outside of the space of {name}: {error}"
    return None


def _sources(by_variant: Mapping[StoredVariant, int], source_hash: SourceHash) -> list[Finding]:
    counts: dict[bool | None, list[str]] = {True: [], False: [], None: []}
    for variant, count in sorted(by_variant.items(), key=str):
        counts[is_current(variant, source_hash)].append(f"{count} of {variant.op} {variant.name}")
    found = []
    if stale := counts[False]:
        text = f"kernels have changed since these trials, which are not used any more: {', '.join(stale)}"
        mend = "`tunedcomm tune` measures them again; `tunedcomm db prune --stale` removes the old trials"
        found.append(Finding("sources", "warn", text, mend))
    if unknown := counts[None]:
        text = f"variants that this tunedcomm does not have: {', '.join(unknown)}"
        found.append(Finding("sources", "warn", text, "nothing, where another tunedcomm reads the database too"))
    return _or_ok("sources", found, "all trials are of kernels as they are now")


# Prune


# What `failed` selects. That a candidate is infeasible is no failure, and costs nobody a launch.
FAILURES = ("compile_error", "incorrect", "crashed", "hung")
# With `ok` what a search counts as measured, and as checked.
_RAN = ("ok", "pruned")
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
        failed: the status is one of `FAILURES`. With a candidate's failures go its good trials that they hide, so that
            it is measured and checked again; failures that hide good trials of other databases stay.
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
    """Rows that were removed or, in a dry run, would be.

    Attributes:
        target: the file, or the server's URL without its password.
        held: trials that were there before.
        groups: what is removed, by environment, op, variant and status.
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
    groups: tuple[PrunedGroup, ...]
    unused: Mapping[str, int]
    bytes_before: int | None
    along: int = 0
    kept: int = 0
    bytes_after: int | None = None
    compacted: bool = False

    @property
    def trials(self) -> int:
        """Number of trials that are removed."""
        return sum(group.trials for group in self.groups)


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
    invalid = check_rows(database, source_hash).invalid if selection.invalid else {}

    def carry_out(connection: Connection) -> Pruned:
        conditions = _conditions(connection, selection, source_hash)
        ids = set(connection.execute(select(TrialRow.id).where(*conditions)).scalars())
        if selection.invalid:
            ids &= invalid["trial"]
        along, kept = _hidden_by_failures(connection, ids, elsewhere) if selection.failed else (set(), set())
        along -= ids
        _SELECTED.create(connection)  # an error rolls it back with all the rest
        if ids := (ids | along) - kept:
            connection.execute(sa.insert(_SELECTED), [{"id": id_} for id_ in ids])
        selected = select(_SELECTED.c.id)
        held, groups = query.count(connection, select(TrialRow.id)), _groups(connection)
        unused: dict[type[Base], sa.Select[Any]] = {}
        if database.path is not None:
            unused = query.unused_rows(TrialRow.id.not_in(selected), invalid.get("variant", ()))
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


def _conditions(connection: Connection, selection: Selection, source_hash: SourceHash) -> list[sa.ColumnElement[bool]]:
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
        same = select(EnvironmentRow.id).where(EnvironmentRow.digest.in_(selection.environments))
        found.append(TrialRow.environment_id.in_(same))
    if selection.before is not None:
        found.append(TrialRow.created_at < selection.before)
    return found


def _hidden_by_failures(
    connection: Connection, ids: Collection[int], elsewhere: Iterable[Layer]
) -> tuple[set[int], set[int]]:
    """Ids of good trials that the selected failures keep from being used, and of those failures that must stay.

    A failure counts until the candidate is good at the same problem again. While it counts, the candidate does not run
    that problem, and nothing is predicted of it in the whole family. A failure that hides good trials of another
    database stays. A database that cannot be read is left out with a warning.
    """

    def reach(trial: Trial) -> tuple[Any, ...]:
        return (trial.environment.hard_key, trial.problem.family, trial.candidate, trial.source_hash)

    def load(connection: Connection, statuses: Sequence[str]) -> list[Trial]:
        reader = Reader()
        stored = query.load_variants(connection, reader).items()
        known = [key for key, variant in stored if (variant.op, variant.name, variant.source_hash) in names]
        where = [TrialRow.status.in_(statuses), TrialRow.variant_id.in_(known)]
        return [trial for trial in query.trials(connection, reader, *where) if reach(trial) in reaches]

    failed = [trial for trial in query.trials(connection, Reader(), TrialRow.status.in_(FAILED)) if trial.id in ids]
    reaches = {reach(trial) for trial in failed}
    names = {(trial.problem.op, trial.variant, trial.source_hash) for trial in failed}
    here, there = load(connection, _RAN) if failed else [], []
    for layer in elsewhere if failed else ():
        try:
            with layer.open() as other, other.reading() as reading:
                there += load(reading, ("ok",))
        except DatabaseError as error:
            warn_once(f"what failures hide in a database of the {layer.name} layer is not known: {error}")
    good = {
        (reach(t), t.problem): t.created_at
        for t in sorted((*here, *there), key=attrgetter("created_at"))
        if t.status == "ok"
    }
    counting = [t for t in failed if t.created_at >= good.get((reach(t), t.problem), t.created_at)]
    outside = {reach(trial) for trial in there}
    gone = {reach(trial) for trial in counting} - outside
    along, kept = [t for t in here if reach(t) in gone], [t for t in counting if reach(t) in outside]
    return {t.id for t in along if t.id is not None}, {t.id for t in kept if t.id is not None}


def _groups(connection: Connection) -> tuple[PrunedGroup, ...]:
    """The selected trials, counted."""
    what = {
        "gpu": EnvironmentRow.gpu,
        "environment": EnvironmentRow.digest,
        "op": ProblemRow.op,
        "variant": VariantRow.name,
        "status": TrialRow.status,
    }
    counted = (
        select(*what.values(), func.count(), func.count().filter(TrialRow.final))
        .select_from(TrialRow)
        .join(_SELECTED, _SELECTED.c.id == TrialRow.id)
        # Rows that are not sound may refer to nothing.
        .outerjoin(EnvironmentRow, EnvironmentRow.id == TrialRow.environment_id)
        .outerjoin(ProblemRow, ProblemRow.id == TrialRow.problem_id)
        .outerjoin(VariantRow, VariantRow.id == TrialRow.variant_id)
        .group_by(*what.values())
    )
    rows = sorted(([str(text or "") for text in texts], n, f) for *texts, n, f in connection.execute(counted))
    return tuple(PrunedGroup(**dict(zip(what, texts, strict=True)), trials=n, finals=f) for texts, n, f in rows)


def _compact(path: Path) -> bool:
    """Give the space back to the file system, unless others use the database at this moment."""
    try:
        with (
            translated(parse_target(path)),
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
        problems: those with a trial.
        trials: status to how many ended so.
        finals: trials of the finals.
        winners: variant to the problems that dispatch answers with it under the default numerics policy, at the very
            problem; `library` where no challenger beats it by more than the noise.
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
        seen: set[tuple[int, int]] = set()
        for environment_id, problem_id, variant_id, status, count, finals, *times in _count(connection):
            if environment_id not in environments or problem_id not in problems:
                continue
            group = group_of(environments[environment_id], problems[problem_id])
            group.problems += (environment_id, problem_id) not in seen
            seen.add((environment_id, problem_id))
            group.trials[str(status)] += count
            group.finals += finals
            current = is_current(stored.get(variant_id), source_hash)
            group.unknown += count if current is None else 0
            group.stale += count if current is False else 0
            for time in filter(None, map(_time, times)):
                group.oldest, group.newest = min(group.oldest or time, time), max(group.newest or time, time)
        for key, world_size in sorted({(key, problems[problem].world_size) for key, problem in seen}):
            by_problem: dict[Problem, list[Row]] = {}
            for row in ok_rows(connection, {key: environments[key]}, world_size, reader):
                by_problem.setdefault(row.problem, []).append(row)
            for problem, rows in by_problem.items():
                group = group_of(environments[key], problem)
                variant, speedup = _winner(problem, rows, source_hash)
                group.winners[variant] += 1
                group.speedups += [] if speedup is None else [speedup]
    database.warn_skipped(reader)
    return DatabaseStats(
        target=str(database.path or database.url),
        num_bytes=None if database.path is None else num_bytes(database.path),
        schema=database.schema_version,
        rows=database.stats(),
        groups=tuple(found[key] for key in sorted(found)),
    )


def _count(connection: Connection) -> Iterable[Any]:
    """Trials and finals, and the first and the last time, of each environment, problem, variant and status."""
    same = (TrialRow.environment_id, TrialRow.problem_id, TrialRow.variant_id, TrialRow.status)
    times = [sa.type_coerce(end(TrialRow.created_at), sa.String()) for end in (func.min, func.max)]
    finals = func.count().filter(TrialRow.final)
    return connection.execute(select(*same, func.count(), finals, *times).group_by(*same)).all()


def _time(value: object) -> datetime | None:
    try:
        return parse.time_of(value)
    except ValueError:
        return None


def _winner(problem: Problem, rows: Iterable[Row], source_hash: SourceHash) -> tuple[str, float | None]:
    """Dispatch's answer at a measured problem, near ties aside, and its speed-up over the library."""
    known = {name: each for name, each in variants(problem.op).items() if name != _LIBRARY}
    current = {name: source_hash(problem.op, name) for name in known}
    fresh = [row for row in rows if row.is_library or current.get(row.candidate.variant) == row.source_hash]
    usable: dict[Candidate, str | None] = {}
    for candidate in {row.candidate for row in fresh if not row.is_library}:
        if known[candidate.variant].bounded and admits("default", known[candidate.variant].numerics):
            usable[candidate] = None
    found = pool(fresh, usable)
    if found.library_us is None:
        return _LIBRARY, None
    for scored in found.scored:
        if scored.score < found.library_us * (1 - scored.noise):
            return scored.candidate.variant, found.library_us / scored.score
    return _LIBRARY, 1.0
