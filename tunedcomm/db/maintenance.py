"""Care for a database: is it sound, what does it amount to, and removing what is no longer of use."""

from __future__ import annotations

import math
import sqlite3
import stat
import statistics
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, fields, replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias

from sqlalchemy import (
    BigInteger,
    Column,
    ColumnElement,
    Connection,
    MetaData,
    String,
    Table,
    case,
    delete,
    func,
    insert,
    select,
    true,
    type_coerce,
)

from tunedcomm.db import query
from tunedcomm.db import records as parse
from tunedcomm.db.engine import (
    BUSY_TIMEOUT_S,
    Target,
    file_uri,
    is_immutable,
    leftovers,
    may_write,
    network_of,
    num_bytes,
    parse_target,
    prepare_file,
    translated,
    warn_once,
)
from tunedcomm.db.jsonl import SoundRows
from tunedcomm.db.layers import Layer
from tunedcomm.db.migrate import upgrade_database
from tunedcomm.db.query import raw, table
from tunedcomm.db.records import FAILED, Reader, StoredVariant, utc_now
from tunedcomm.db.schema import (
    SOUND,
    Base,
    EnvironmentRow,
    PinRow,
    ProblemRow,
    RunRow,
    TrialRow,
    VariantRow,
)
from tunedcomm.db.snapshot import needed_trials, ok_rows
from tunedcomm.db.store import Database
from tunedcomm.errors import (
    ConfigError,
    DatabaseAccessError,
    DatabaseBusyError,
    DatabaseError,
    DatabaseFullError,
    DatabaseVersionError,
    InfeasibleError,
)
from tunedcomm.hardware import HARD_FIELDS, Environment
from tunedcomm.selection.score import pool
from tunedcomm.selection.snapshot import Row
from tunedcomm.space import Value
from tunedcomm.spec import Candidate, Limits, Problem, admits, check_candidate, get_variant, variants

Level: TypeAlias = Literal["ok", "warn", "fail"]
# Op and variant to the hash of its source as it is now; None for a variant that this tunedcomm does not have.
SourceHash: TypeAlias = Callable[[str, str], str | None]

_LIBRARY = "library"
_CHUNK = 500


def is_current(variant: StoredVariant | None, source_hash: SourceHash) -> bool | None:
    """False if a stored variant's source has changed since, None if this tunedcomm does not have the variant.

    The library is what the machine has, however this tunedcomm calls it: its trials never grow stale.
    """
    current = None if variant is None else source_hash(variant.op, variant.name)
    if variant is None or current is None:
        return None
    return variant.name == _LIBRARY or current == variant.source_hash


def pinnable(problem: Problem, variant: str, config: Mapping[str, Value] | None = None, *, limits: Limits) -> Candidate:
    """The candidate to give to `Database.pin`, which dispatch would run: any other pin would be of no effect.

    Args:
        problem: what the pin is for; its variants must be registered.
        variant: a name.
        config: a point of the variant's space; by default the variant's own for the problem.
        limits: of the machine that the pin is for.

    Raises:
        UnknownNameError: no such variant.
        ConfigError: the config is not in its space.
        InfeasibleError: dispatch would not run it there.
    """
    found = get_variant(problem.op, variant)
    values = found.default_config(problem, limits) if config is None else dict(config)
    candidate = Candidate.of(problem.op, variant, found.space.validate(values))
    reason = None if found.is_library else check_candidate(problem, candidate, limits, by_name=False)
    if reason is not None:
        raise InfeasibleError(
            f"{candidate} cannot run {problem} there: {reason}; pin another one, `tunedcomm explain` lists them"
        )
    return candidate


# Check


_MAX_FAULTS = 20
_MAX_EXAMPLES = 3
# Clocks of hosts differ a little; a trial from further ahead would outrank what is measured until then.
_AHEAD = timedelta(days=1)
_RESTORE = (
    "move it away and restore a copy or an exported file; the `.recover` of the program sqlite3 may save what it held, "
    "else tune again"
)
_PRUNE_INVALID = "`tunedcomm db prune --invalid` removes them"
_MEND_PIN = "`tunedcomm db unpin` it, or `tunedcomm db pin` something that can run"


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        name: what was looked at.
        level: `ok`, `warn` (it works, and somebody should know) or `fail` (the database is not sound).
        detail: what was found.
        mend: what to do; "" where all is well.
    """

    name: str
    level: Level
    detail: str
    mend: str = ""


def check_database(target: str | Path, source_hash: SourceHash) -> list[Finding]:
    """Look at everything about a database; nothing is changed, and tuners may go on writing to it.

    Args:
        target: a file or any SQLAlchemy URL.
        source_hash: what the variants' sources are now; the variants must be registered.

    Returns:
        A finding for everything that was looked at; the database is sound where none has the level `fail`.

    Raises:
        DatabaseBusyError: another process has held it locked for half a minute.
    """
    where = parse_target(target)
    found: list[Finding] = []
    if where.path is not None:
        try:
            prepare_file(where.path, create=False)
        except DatabaseError as error:
            return [Finding("file", "fail", str(error), _RESTORE if where.path.is_file() else "give another path")]
        found += [*_side_files(where.path), *_permissions(where.path), _file_system(where.path)]
        damage = _damage(where)
        found += damage
        if any(finding.name == "integrity" and finding.level == "fail" for finding in damage):
            return found  # what its rows hold means nothing then
    return [*found, *_content(target, source_hash)]


def _content(target: str | Path, source_hash: SourceHash) -> list[Finding]:
    try:
        state = upgrade_database(target, check=True)
        if state.before not in SOUND:
            text = f"revision {state.before}, and this tunedcomm reads {state.after}"
            return [Finding("schema", "fail", text, f"`tunedcomm db upgrade --db {state.target}`")]
        with Database.open(target, readonly=True) as database:
            schema = Finding("schema", "ok", f"revision {database.schema_version}")
            return [schema, *check_rows(database, source_hash).findings]
    except DatabaseVersionError as error:
        return [Finding("schema", "fail", str(error), "upgrade tunedcomm")]
    except DatabaseBusyError:
        raise
    except DatabaseError as error:
        return [Finding("content", "fail", str(error), _RESTORE)]


def _side_files(path: Path) -> list[Finding]:
    """SQLite keeps files beside one that is open, and they stay when its process is killed."""
    found = []
    for side in leftovers(path):
        text = f"{side.name} holds {side.stat().st_size} bytes: a process has the database open, or one was killed"
        mend = f"nothing while one has; the next command that writes folds it in. Never move {path.name} without it"
        found.append(Finding("side files", "warn", text, mend))
    return found or [Finding("side files", "ok", "none")]


def _permissions(path: Path) -> list[Finding]:
    found = []
    writable, folder = may_write(path), may_write(path.parent)
    if writable and not folder:
        text = f"{path} may be written and its directory may not, so that SQLite cannot write it either"
        found.append(Finding("permissions", "warn", text, "make the directory writable, or the file read-only"))
    for place in (path, path.parent):
        mode = place.stat().st_mode
        if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
            text = f"every user may change {place}, and with it which kernels run for others"
            found.append(Finding("permissions", "warn", text, f"chmod o-w {place}"))
    rights = "it can be read and written" if writable and folder else "it can be read, not written"
    return found or [Finding("permissions", "ok", rights)]


def _file_system(path: Path) -> Finding:
    kind = network_of(path)
    if not kind:
        return Finding("file system", "ok", "local to this host")
    text = f"{path} lies on a network file system ({kind}), where SQLite's locks do not hold between hosts"
    return Finding("file system", "warn", text, "only read it, as a site database")


def _damage(where: Target) -> list[Finding]:
    """Faults that SQLite itself finds, and objects that only an intruder would have put into the file."""
    assert where.path is not None
    uri = file_uri(where.path, readonly=True, immutable=is_immutable(where.path))
    try:
        with closing(sqlite3.connect(uri, uri=True, timeout=BUSY_TIMEOUT_S)) as connection:
            connection.text_factory = bytes
            connection.execute("PRAGMA trusted_schema=OFF")
            faults = [_text(row[0]) for row in connection.execute(f"PRAGMA integrity_check({_MAX_FAULTS})")]
            dangling = connection.execute("PRAGMA foreign_key_check").fetchall() if faults == ["ok"] else []
            strange = connection.execute("SELECT type, name FROM sqlite_master WHERE type IN ('trigger', 'view')")
            made = [f"{_text(kind)} {_text(name)}" for kind, name in strange]
    except (sqlite3.Error, UnicodeDecodeError) as error:  # the last of what SQLite says of names
        if "locked" in str(error):
            raise DatabaseBusyError(f"{where} is locked by another process ({error}); run the command again") from error
        return [Finding("integrity", "fail", f"SQLite cannot read it: {error}", _RESTORE)]
    if faults != ["ok"]:
        return [Finding("integrity", "fail", f"SQLite finds it damaged: {'; '.join(faults)[:600]}", _RESTORE)]
    found = [Finding("integrity", "ok", "SQLite finds nothing wrong")]
    if dangling:
        first = ", ".join(f"{_text(row[0])} {row[1]}" for row in dangling[:3])
        text = f"{len(dangling)} rows refer to rows that are not there: {first}"
        found.append(Finding("references", "fail", text, "`tunedcomm db prune --invalid` removes them"))
    else:
        found.append(Finding("references", "ok", "every row that another one refers to is there"))
    if made:
        text = f"it holds what tunedcomm does not make: {', '.join(made)[:300]}"
        found.append(Finding("objects", "fail", text, "do not write to it; export what it holds to a new file"))
    return found


def _text(raw: object) -> str:
    return raw.decode("utf-8", "replace") if isinstance(raw, bytes) else str(raw)


@dataclass(frozen=True, slots=True)
class RowReport:
    """The result of looking at every row.

    Attributes:
        findings: one a kind of fault, or one that says that all is well.
        invalid: table to the ids of rows that no reader uses; a trial that refers to such a row is one itself.
    """

    findings: tuple[Finding, ...]
    invalid: Mapping[str, frozenset[int]]


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

    Readers skip a row that makes no sense and go on; here each is found and counted. Nothing is changed.

    Args:
        database: open, for reading at least.
        source_hash: what the variants' sources are now; the variants must be registered.
    """
    with database.reading() as connection:
        return _RowCheck(connection, source_hash).report()


class _RowCheck:
    def __init__(self, connection: Connection, source_hash: SourceHash) -> None:
        self._connection = connection
        self._source_hash = source_hash
        self._latest = (utc_now() + _AHEAD).isoformat()
        self._faults = {name: _Faults() for name in Base.metadata.tables}
        self._invalid: dict[str, set[int]] = {name: set() for name in Base.metadata.tables}
        self._objections: dict[tuple[StoredVariant, str], str | None] = {}
        self._by_variant: Counter[StoredVariant] = Counter()
        self._findings: list[Finding] = []
        self._sound = SoundRows(connection, self._add)

    def _add(self, name: str, id_: Any, what: str) -> None:
        self._faults[name].add(f"{name} {id_}: {what}")
        self._invalid[name].add(id_)

    def report(self) -> RowReport:
        mend = f"{_PRUNE_INVALID} with the trials that refer to them; or restore a copy"
        loaded: dict[str, Mapping[int, Any]] = {
            "environment": self._sound.environments,
            "problem": self._sound.problems,
            "variant": self._sound.variants,
            "run": self._sound.runs,
        }
        for name, held in loaded.items():
            found = self._faults[name].finding(f"{name}s", "rows make no sense", mend)
            self._report(f"{name}s", found, f"{len(held)}, all sound")
        self._check_trials_and_pins()
        self._check_sources()
        self._check_unused()
        return RowReport(tuple(self._findings), {name: frozenset(ids) for name, ids in self._invalid.items()})

    def _report(self, name: str, found: list[Finding], well: str) -> None:
        self._findings += found or [Finding(name, "ok", well)]

    def _check_trials_and_pins(self) -> None:
        outside, unknown = _Faults(), _Faults()
        num_trials = num_pins = 0
        for problem_id, (problem, _) in self._sound.problems.items():
            for id_, line in self._sound.trials(problem_id):
                num_trials += 1
                if reason := self._contradiction(line):
                    self._add("trial", id_, reason)
                    continue
                variant = StoredVariant(problem.op, line["variant"], line["numerics"], line["source_hash"])
                self._by_variant[variant] += 1
                if reason := self._outside(variant, line["config"]):
                    outside.add(f"trial {id_}: {reason}")
                    self._invalid["trial"].add(id_)
            for id_, line in self._sound.pins(problem_id):
                num_pins += 1
                if line["variant"] not in variants(problem.op):
                    unknown.add(f"pin {id_}: {problem.op} has no variant {line['variant']!r} here")
                elif reason := _objection(problem.op, line["variant"], line["config"]):
                    self._add("pin", id_, reason)
        self._sound.report_orphans()
        mend = f"{_PRUNE_INVALID}; or restore a copy"
        found = self._faults["trial"].finding("trials", "make no sense, readers skip them", mend)
        found += outside.finding("trials", "have configs outside of their variants' spaces", _PRUNE_INVALID)
        self._report("trials", found, f"{num_trials}, all sound")
        found = self._faults["pin"].finding("pins", "are of no effect", _MEND_PIN)
        found += unknown.finding("pins", "name variants that this tunedcomm does not have", _MEND_PIN, level="warn")
        self._report("pins", found, f"{num_pins}, all sound")

    def _contradiction(self, line: Mapping[str, Any]) -> str | None:
        low, middle, high = (line[f"latency_{name}_us"] for name in ("p10", "p50", "p90"))
        if not (low or 0.0) <= (middle or low or 0.0) <= (high or middle or low or 0.0):
            return f"its percentiles do not rise: p10 {low}, p50 {middle}, p90 {high}"
        if line["created_at"] > self._latest:
            return f"it was made in the future, {line['created_at']}, and would outrank what comes"
        return None

    def _outside(self, variant: StoredVariant, config: Mapping[str, Value]) -> str | None:
        """Why a config is not one of its variant's; None where it is, or where the source was another one."""
        key = (variant, str(config))
        if key not in self._objections:
            current = is_current(variant, self._source_hash)
            self._objections[key] = _objection(variant.op, variant.name, config) if current else None
        return self._objections[key]

    def _check_sources(self) -> None:
        stale, unknown, current = Counter[str](), Counter[str](), 0
        for variant, count in self._by_variant.items():
            state = is_current(variant, self._source_hash)
            current += count if state else 0
            if state is None:
                unknown[f"{variant.op} {variant.name}"] += count
            elif not state:
                stale[f"{variant.op} {variant.name}"] += count
        found = []
        if stale:
            text = f"kernels have changed since these trials, which are not used any more: {_listed(stale)}"
            mend = "`tunedcomm tune` measures them again; `tunedcomm db prune --stale` removes the old trials"
            found.append(Finding("sources", "warn", text, mend))
        if unknown:
            text = f"variants that this tunedcomm does not have: {_listed(unknown)}"
            found.append(Finding("sources", "warn", text, "nothing, where another tunedcomm reads the database too"))
        self._report("sources", found, f"{current} trials, all of kernels as they are now")

    def _check_unused(self) -> None:
        held = {"environment": self._sound.environments.keys(), "problem": self._sound.problems.keys()}
        unused = {name: len(ids - self._used(f"{name}_id")) for name, ids in held.items()}
        told = ", ".join(f"{count} {name}s" for name, count in unused.items() if count > 0)
        mend = "nothing: they do no harm, and `tunedcomm db prune` removes them on its way"
        found = [Finding("unused rows", "warn", f"{told} that no trial and no pin refers to", mend)] if told else []
        self._report("unused rows", found, "none")

    def _used(self, column: str) -> set[Any]:
        """The values of a column that trials and pins have."""
        columns = (table(TrialRow).c[column], table(PinRow).c[column])
        return {id_ for one in columns for id_ in self._connection.execute(select(raw(one)).distinct()).scalars()}


def _objection(op: str, name: str, config: Mapping[str, Value]) -> str | None:
    try:
        variants(op)[name].space.validate(dict(config))
    except ConfigError as error:
        return f"{name}: {error}"
    return None


def _listed(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count} of {name}" for name, count in sorted(counts.items()))


# Prune


# What `failed` selects. That a candidate is infeasible is no failure, and costs nobody a launch.
FAILURES = ("compile_error", "incorrect", "crashed", "hung")


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
    """Rows that were removed, or would be.

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
        database: open; to write unless it is a dry run.
        selection: which trials.
        source_hash: what the variants' sources are now; the variants must be registered.
        dry_run: remove nothing, only say what would be.
        elsewhere: the other databases that dispatch reads, see `layers_beside`; only looked at.

    Raises:
        DatabaseError: it cannot be written, and nothing was removed then; or it is too damaged to be made smaller.
    """
    before = None if database.path is None else num_bytes(database.path)
    invalid = check_rows(database, source_hash).invalid if selection.invalid else {}

    def carry_out(connection: Connection) -> Pruned:
        with _selected(connection, selection, source_hash, invalid.get("trial", ())):
            along, kept = _reach_out(connection, elsewhere) if selection.failed else (0, 0)
            held = int(connection.execute(select(func.count()).select_from(TrialRow)).scalar_one())
            groups = _groups(connection)
            unused = {} if database.path is None else _unused(connection, invalid)
            if not dry_run:
                connection.execute(delete(TrialRow).where(TrialRow.id.in_(select(_SELECTED.c.id))))
                for model, ids in unused.items():
                    _remove(connection, model, ids)
        return Pruned(
            target=str(database.path or database.url),
            dry_run=dry_run,
            held=held,
            groups=groups,
            unused={model.__tablename__: len(ids) for model, ids in unused.items() if ids},
            bytes_before=before,
            along=along,
            kept=kept,
        )

    if dry_run:
        with database.reading() as connection:
            return carry_out(connection)
    done = database.change(carry_out)
    if database.path is None:
        return done
    compacted = _compact(database.path)
    return replace(done, compacted=compacted, bytes_after=num_bytes(database.path))


@contextmanager
def _selected(
    connection: Connection, selection: Selection, source_hash: SourceHash, invalid: Collection[int]
) -> Iterator[None]:
    """The ids of the selected trials in a table of this connection; an error rolls it back with all the rest."""
    made = [_SELECTED, _INVALID]
    for temporary in made:
        temporary.create(connection)
    if invalid:
        connection.execute(insert(_INVALID), [{"id": id_} for id_ in invalid])
    where = list(_conditions(connection, selection, source_hash))
    connection.execute(insert(_SELECTED).from_select(["id"], select(TrialRow.id).where(*where)))
    yield
    for temporary in made:
        temporary.drop(connection)


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
    found = hidden_by_failures(connection, TrialRow.id.in_(select(_SELECTED.c.id)), elsewhere)
    selected = set(connection.execute(select(_SELECTED.c.id)).scalars())
    if along := found.good - selected:
        connection.execute(insert(_SELECTED), [{"id": id_} for id_ in along])
    for ids in _chunks(found.kept):
        connection.execute(delete(_SELECTED).where(_SELECTED.c.id.in_(ids)))
    return len(along), len(found.kept)


def _groups(connection: Connection) -> tuple[PrunedGroup, ...]:
    """The selected trials, counted."""
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
    names = ("environment", "gpu", "op", "variant", "status")
    groups = [
        PrunedGroup(
            **dict(zip(names, (str(text or "") for text in texts), strict=True)),
            trials=int(trials),
            finals=int(finals or 0),
        )
        for *texts, trials, finals in connection.execute(counted)
    ]
    return tuple(sorted(groups, key=lambda g: (g.gpu, g.environment, g.op, g.variant, g.status)))


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
        id_ = table(model).c.id
        used = {key for use in uses for key in connection.execute(use).scalars()}
        if model is VariantRow:  # one that makes no sense is nobody's newest source
            needed = set(connection.execute(uses[0]).scalars())
            used -= {key for key in invalid.get("variant", ()) if key not in needed}
        found[model] = [key for key in connection.execute(select(id_)).scalars() if key not in used]
    return found


def _remove(connection: Connection, model: type[Base], ids: list[int]) -> None:
    id_ = table(model).c.id
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
            closing(sqlite3.connect(path, timeout=BUSY_TIMEOUT_S, isolation_level=None)) as connection,
        ):
            connection.execute("VACUUM")
            # With a write-ahead log it lies in there first, and readers of the old pages keep it there.
            (busy, *_) = connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
    except (DatabaseAccessError, DatabaseBusyError, DatabaseFullError):
        return False
    return not busy


# Failures and the good trials that they hide


_FAMILY = tuple(item.name for item in fields(Problem) if item.name != "shape")
_OK = ("ok",)
# With `ok` what a search counts as measured, and as checked.
_RAN = ("ok", "pruned")
_Reach: TypeAlias = tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Hidden:
    """Winners that removing failures would bring back.

    Attributes:
        good: ids of trials in the same database that would be used again, or count as measured.
        kept: ids of failures that keep good trials of other databases from being used.
    """

    good: frozenset[int]
    kept: frozenset[int]


class _Mark(NamedTuple):
    """The end of one trial; `reach` is the hardware, the family of its problem, and the candidate with its source."""

    id: int
    reach: _Reach
    shape: str
    status: str
    created_at: str


def hidden_by_failures(connection: Connection, failures: ColumnElement[bool], elsewhere: Iterable[Layer]) -> Hidden:
    """The good trials that failures keep from being used.

    A failure counts until the candidate is good at the same problem again. While it counts, the candidate does not run
    that problem, and nothing is predicted of it in the whole family.

    Args:
        connection: in a transaction.
        failures: true of the trials whose removal is thought of; of these only failures that count matter.
        elsewhere: other databases that dispatch reads beside this one. One that cannot be read is left out with a
            warning.
    """
    failed = _marks(connection, FAILED, None, failures)
    if not failed:
        return Hidden(frozenset(), frozenset())
    asked = {mark.reach for mark in failed}
    here = _marks(connection, _RAN, asked)
    there = [mark for layer in elsewhere for mark in _marks_of(layer, asked)]
    good: dict[tuple[_Reach, str], str] = {}
    for mark in (*here, *there):
        if mark.status == "ok":
            key = (mark.reach, mark.shape)
            good[key] = max(mark.created_at, good.get(key, ""))
    counting = [mark for mark in failed if mark.created_at >= good.get((mark.reach, mark.shape), "")]
    hidden = {mark.reach for mark in there}
    gone = {mark.reach for mark in counting} - hidden
    return Hidden(
        good=frozenset(mark.id for mark in here if mark.reach in gone),
        kept=frozenset(mark.id for mark in counting if mark.reach in hidden),
    )


def _marks_of(layer: Layer, asked: Collection[_Reach]) -> list[_Mark]:
    immutable = True if layer.name == "packaged" else None
    try:
        with (
            Database.open(layer.target, readonly=True, immutable=immutable) as database,
            database.reading() as connection,
        ):
            return _marks(connection, _OK, asked)
    except DatabaseError as error:
        warn_once(f"what failures hide in a database of the {layer.name} layer is not known: {error}")
        return []


def _marks(
    connection: Connection, statuses: Sequence[str], asked: Collection[_Reach] | None, *where: ColumnElement[bool]
) -> list[_Mark]:
    """Trials that ended so, of these reaches where they are given; rows that make no sense are no trials."""
    hardware = _by_id(connection, EnvironmentRow, HARD_FIELDS)
    family, shape = _by_id(connection, ProblemRow, _FAMILY), _by_id(connection, ProblemRow, ("shape",))
    variants = _by_id(connection, VariantRow, ("op", "name", "source_hash"))
    names = None if asked is None else {reach[2] for reach in asked}
    ids = [key for key, variant in variants.items() if names is None or variant in names]
    columns = (
        TrialRow.id,
        TrialRow.environment_id,
        TrialRow.problem_id,
        TrialRow.variant_id,
        TrialRow.config_digest,
        TrialRow.status,
        TrialRow.created_at,
    )
    query = select(*map(raw, columns)).where(TrialRow.status.in_(statuses), TrialRow.variant_id.in_(ids), *where)
    found = []
    for id_, environment, problem, variant, config, status, created_at in connection.execute(query):
        try:
            reach = (hardware[environment], family[problem], variants[variant], config)
            if asked is None or reach in asked:
                found.append(_Mark(id_, reach, shape[problem][0], status, parse.time_text(created_at)))
        except (KeyError, ValueError):
            continue
    return found


def _by_id(connection: Connection, model: type[Base], names: Sequence[str]) -> dict[Any, tuple[Any, ...]]:
    columns = table(model).c
    rows = connection.execute(select(raw(columns.id), *(raw(columns[name]) for name in names)))
    return {row[0]: tuple(row[1:]) for row in rows}


# Stats


_Key: TypeAlias = tuple[int, str, int, str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupStats:
    """Problems of one op, world size, dtype and mode in one environment.

    Attributes:
        environment: where they were measured.
        op, world_size, dtype, mode: what they have in common.
        problems: those with a trial.
        trials: status to how many ended so.
        finals: trials of the finals.
        winners: variant to the problems that dispatch answers with it under the default numerics policy, at the very
            problem; `library` where no challenger beats it by more than the noise.
        speedup: geometric mean over these problems of the library's latency over the winner's; None if none is known.
        stale: trials of sources that have changed since, which dispatch does not use.
        unknown: trials of variants that this tunedcomm does not have.
        oldest, newest: times of the first and the last trial; None if no time can be read.
    """

    environment: Environment
    op: str
    world_size: int
    dtype: str
    mode: str
    problems: int
    trials: dict[str, int]
    finals: int
    winners: dict[str, int]
    speedup: float | None
    stale: int
    unknown: int
    oldest: datetime | None
    newest: datetime | None

    @property
    def library_share(self) -> float | None:
        """Share of the problems with a winner that the library wins; None if there are none."""
        won = sum(self.winners.values())
        return self.winners.get(_LIBRARY, 0) / won if won else None


@dataclass(frozen=True, slots=True, kw_only=True)
class DatabaseStats:
    """One database.

    Attributes:
        target: the file, or the server's URL without its password.
        num_bytes: of the file and its write-ahead log; None for a server.
        schema: revision of its schema.
        rows: what `Database.stats` says.
        groups: sorted by GPU, environment, op, world size, dtype and mode.
    """

    target: str
    num_bytes: int | None
    schema: str
    rows: dict[str, int]
    groups: tuple[GroupStats, ...]


@dataclass(slots=True)
class _Tally:
    """Counts of one group while they are gathered."""

    problems: int = 0
    finals: int = 0
    stale: int = 0
    unknown: int = 0
    trials: Counter[str] = field(default_factory=Counter)
    winners: Counter[str] = field(default_factory=Counter)
    logs: list[float] = field(default_factory=list)
    times: list[datetime] = field(default_factory=list)


def collect_stats(database: Database, source_hash: SourceHash) -> DatabaseStats:
    """Sum up an open database; rows that make no sense are left out and warned of.

    Args:
        database: open, for reading at least.
        source_hash: what the variants' sources are now; the variants must be registered.
    """
    rows = database.stats()
    reader = Reader()
    with database.reading() as connection:
        environments = query.load_environments(connection, reader)
        tallies = _count(connection, environments, query.load_variants(connection, reader), source_hash)
        for environment_id, world_size in sorted({(key[0], key[2]) for key in tallies}):
            environment = environments[environment_id]
            trials = ok_rows(connection, {environment_id: environment}, world_size, reader)
            _add_winners(tallies, environment_id, trials, source_hash)
    database.warn_skipped(reader)
    groups = [_group(environments[key[0]], key, tally) for key, tally in tallies.items()]
    return DatabaseStats(
        target=str(database.path or database.url),
        num_bytes=None if database.path is None else num_bytes(database.path),
        schema=database.schema_version,
        rows=rows,
        groups=tuple(sorted(groups, key=_order)),
    )


def _order(group: GroupStats) -> tuple[Any, ...]:
    there = group.environment
    return (there.gpu, there.digest, group.op, group.world_size, group.dtype, group.mode)


_GROUP = (TrialRow.environment_id, ProblemRow.op, ProblemRow.world_size, ProblemRow.dtype, ProblemRow.mode)


def _count(
    connection: Connection,
    environments: dict[int, Environment],
    stored: dict[int, StoredVariant],
    source_hash: SourceHash,
) -> dict[_Key, _Tally]:
    """Every group's counts, without its winners."""
    found: dict[_Key, _Tally] = {}
    what = (*_GROUP, TrialRow.variant_id, TrialRow.status)
    times = [type_coerce(end(TrialRow.created_at), String()) for end in (func.min, func.max)]
    finals = func.sum(case((TrialRow.final == true(), 1), else_=0))
    counted = select(*what, func.count(), finals, *times).join(ProblemRow).group_by(*what)
    for *group, variant_id, status, count, num_finals, first, last in connection.execute(counted):
        key = _key(group, environments)
        if key is None:
            continue
        tally = found.setdefault(key, _Tally())
        tally.trials[str(status)] += count
        tally.finals += int(num_finals or 0)
        current = is_current(stored.get(variant_id), source_hash)
        tally.unknown += count if current is None else 0
        tally.stale += count if current is False else 0
        tally.times += _times(first, last)
    problems = select(*_GROUP, func.count(TrialRow.problem_id.distinct())).join(ProblemRow).group_by(*_GROUP)
    for *group, count in connection.execute(problems):
        key = _key(group, environments)
        if key is not None:
            found[key].problems = count
    return found


def _key(group: Sequence[Any], environments: dict[int, Environment]) -> _Key | None:
    """The group's key; None where its values make no sense, which `db check` lists."""
    environment_id, op, world_size, dtype, mode = group
    texts = all(isinstance(text, str) for text in (op, dtype, mode))
    known = environment_id in environments and type(world_size) is int and world_size >= 1
    return (environment_id, op, world_size, dtype, mode) if texts and known else None


def _times(*values: Any) -> list[datetime]:
    found = []
    for value in values:
        try:
            found.append(parse.time_of(value))
        except ValueError:
            continue
    return found


def _add_winners(
    tallies: dict[_Key, _Tally], environment_id: int, trials: Iterable[Row], source_hash: SourceHash
) -> None:
    by_problem: dict[Problem, list[Row]] = {}
    for trial in trials:
        by_problem.setdefault(trial.problem, []).append(trial)
    for problem, rows in by_problem.items():
        tally = tallies.get((environment_id, problem.op, problem.world_size, problem.dtype, problem.mode))
        if tally is not None:
            variant, speedup = _winner(problem, rows, source_hash)
            tally.winners[variant] += 1
            tally.logs += [] if speedup is None else [math.log(speedup)]


def _winner(problem: Problem, rows: list[Row], source_hash: SourceHash) -> tuple[str, float | None]:
    """Dispatch's answer at a measured problem, near ties aside, and its speed-up over the library."""
    known = variants(problem.op)
    usable: dict[Candidate, str | None] = {}
    fresh = []
    for row in rows:
        variant = known.get(row.candidate.variant)
        if row.is_library:
            fresh.append(row)
        elif variant is not None and source_hash(problem.op, variant.name) == row.source_hash:
            fresh.append(row)
            if variant.bounded and admits("default", variant.numerics):
                usable[row.candidate] = None
    found = pool(fresh, usable)
    if found.library_us is None:
        return _LIBRARY, None
    for scored in found.scored:
        if scored.score < found.library_us * (1 - scored.noise):
            return scored.candidate.variant, found.library_us / scored.score
    return _LIBRARY, 1.0


def _group(environment: Environment, key: _Key, tally: _Tally) -> GroupStats:
    return GroupStats(
        environment=environment,
        op=key[1],
        world_size=key[2],
        dtype=key[3],
        mode=key[4],
        problems=tally.problems,
        trials=dict(tally.trials),
        finals=tally.finals,
        winners=dict(tally.winners.most_common()),
        speedup=math.exp(statistics.fmean(tally.logs)) if tally.logs else None,
        stale=tally.stale,
        unknown=tally.unknown,
        oldest=min(tally.times, default=None),
        newest=max(tally.times, default=None),
    )
