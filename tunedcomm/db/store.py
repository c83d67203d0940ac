"""One tuning database: open it, add trials to it, read them back."""

from __future__ import annotations

import getpass
import os
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from sqlalchemy import Connection, Engine, delete, insert, select, update

from tunedcomm.db import query
from tunedcomm.db.engine import (
    BUSY_TIMEOUT_S,
    IMMEDIATE,
    Target,
    exclusive,
    is_immutable,
    make_engine,
    parse_target,
    prepare_file,
    refuse_network,
    retry,
    translated,
    warn_once,
)
from tunedcomm.db.migrate import ensure_schema
from tunedcomm.db.query import raw, table
from tunedcomm.db.records import (
    STATUSES,
    Pin,
    Reader,
    Run,
    Status,
    StoredVariant,
    Trial,
    canonical_json,
    check_one_of,
    config_digest,
    own_columns,
    utc_now,
)
from tunedcomm.db.schema import Base, EnvironmentRow, PinRow, ProblemRow, RunRow, TrialRow, VariantRow
from tunedcomm.errors import DatabaseAccessError, DatabaseBusyError, DatabaseCorruptError
from tunedcomm.hardware import Environment
from tunedcomm.spec import Candidate, Problem, format_shape
from tunedcomm.version import VERSION

_INT64 = 2**63

T = TypeVar("T")
_Thing = TypeVar("_Thing", Problem, Environment, StoredVariant)


class Database:
    """A tuning database. Use as a context manager; safe for concurrent threads and processes.

    Trials are only ever added: `record` never changes or removes a row. Make one after a fork, not before.

    Attributes:
        path: the SQLite file, or None for a server.
        url: the SQLAlchemy URL, its password hidden.
        target: the file's path, or the server's URL with its password: what `open` takes.
        readonly: nothing is ever written.
        schema_version: the schema revision.
    """

    def __init__(self, target: Target, engine: Engine, *, readonly: bool, patience_s: float, stamp: object) -> None:
        self._target = target
        self._engine = engine
        self._patience_s = patience_s
        self._stamp = stamp
        self.path = target.path
        self.url = target.url.render_as_string(hide_password=True)
        self.target = target.name
        self.readonly = readonly
        self.schema_version = ""

    @classmethod
    def open(
        cls,
        target: str | Path,
        *,
        create: bool = False,
        readonly: bool = False,
        immutable: bool | None = None,
        busy_timeout_s: float = BUSY_TIMEOUT_S,
        patience_s: float = 0.0,
    ) -> Database:
        """Open a database; a writable one is upgraded to the newest schema.

        Args:
            target: a file or any SQLAlchemy URL.
            create: make the file, its directories and the tables if there are none.
            readonly: never write, not even SQLite's own side files where they are not needed.
            immutable: the file cannot change while it is open (shipped databases), so nothing is locked and no side
                file is made; None finds out, and then reading fails if somebody changed it all the same. Implies
                `readonly`.
            busy_timeout_s: how long to wait for another writer.
            patience_s: once it is open, how long every method waits for a database that is away or stays locked.

        Raises:
            DatabaseAccessError: missing, a directory, unreadable, not writable, or to be written on a network file
                system.
            DatabaseCorruptError: no SQLite file, damaged, or no tunedcomm database.
            DatabaseVersionError: written by a newer tunedcomm, or older and `readonly`.
            DatabaseBusyError: locked by another writer for longer than `busy_timeout_s`.
            DatabaseAwayError: the server does not answer.
        """
        where = parse_target(target)
        readonly = readonly or bool(immutable)
        if readonly and create:
            raise ValueError("create=True needs a database that can be written; leave readonly and immutable out")
        stamp = None
        if where.path is not None:
            if not readonly:
                refuse_network(where.path)
            prepare_file(where.path, create=create)
            if readonly and immutable is None and (immutable := is_immutable(where.path)):
                stamp = _stamp(where.path)
        engine = make_engine(where, readonly=readonly, immutable=bool(immutable), busy_timeout_s=busy_timeout_s)
        opened = cls(where, engine, readonly=readonly, patience_s=patience_s, stamp=stamp)
        try:
            with translated(where):
                opened.schema_version = ensure_schema(engine, where, create=create, readonly=readonly)
        except BaseException:
            opened.close()
            raise
        return opened

    def __enter__(self) -> Database:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close every connection; SQLite then folds its write-ahead log into the file."""
        self._engine.dispose()

    @contextmanager
    def reading(self) -> Iterator[Connection]:
        """A connection in one transaction that sees one state; driver errors come out as `DatabaseError`."""
        options = {} if self.path is not None else {"isolation_level": "REPEATABLE READ"}
        try:
            with (
                translated(self._target),
                self._engine.connect().execution_options(**options) as connection,
                connection.begin(),
            ):
                yield connection
        finally:
            # What was read without locks of a file that somebody wrote to meanwhile may be torn.
            if self._stamp is not None and self.path is not None and _stamp(self.path) != self._stamp:
                raise DatabaseBusyError(
                    f"{self._target} was written by another host or user while it was read; read again"
                )

    @contextmanager
    def _writing(self) -> Iterator[Connection]:
        if self.readonly:
            raise DatabaseAccessError(f"{self._target} is open for reading only; open it without readonly to write")
        with (
            translated(self._target),
            self._engine.connect().execution_options(**{IMMEDIATE: True}) as connection,
            connection.begin(),
        ):
            yield connection

    def _write(self, change: Callable[[Connection, bool], T]) -> T:
        """One transaction, tried again while the database is away; `change` is told when it is."""

        def attempt(again: bool) -> T:
            with self._writing() as connection:
                return change(connection, again)

        return retry(attempt, self._patience_s)

    def change(self, change: Callable[[Connection], T]) -> T:
        """Run `change` in one transaction that writes, all or nothing; it may be run again after a failure."""
        return self._write(lambda connection, _: change(connection))

    def ask(self, ask: Callable[[Connection], T]) -> T:
        """Run `ask` in one transaction that reads, again while the database is away."""
        return self._read(lambda connection, _: ask(connection))

    def _read(self, ask: Callable[[Connection, Reader], T]) -> T:
        """One read transaction, tried again while the database is away; what makes no sense is warned of."""

        def attempt(_: bool) -> T:
            reader = Reader()
            with self.reading() as connection:
                found = ask(connection, reader)
            self.warn_skipped(reader)
            return found

        return retry(attempt, self._patience_s)

    def warn_skipped(self, reader: Reader) -> None:
        """Log once what could not be read; the process goes on without these rows."""
        if reader.skipped.count:
            warn_once(
                f"{self._target}: skipped rows that make no sense, the first: {reader.skipped.first}. `tunedcomm db "
                "check` lists them",
                about=f"skipped rows of {self._target}",
            )

    # Writing

    def start_run(self, *, command: str, seed: int | None, budget: str, host: str) -> int:
        """Register a command that is about to record trials; returns its run id."""
        if seed is not None and not -_INT64 <= seed < _INT64:
            raise ValueError(f"seed must fit in 64 bits, got {seed}")
        values: dict[str, Any] = {"command": command, "seed": seed, "budget": budget, "host": host, "user": login()}
        values |= {"version": VERSION, "started_at": utc_now()}
        key = uuid.uuid4().hex

        def append(connection: Connection, again: bool) -> int:
            exclusive(connection, key)
            if again and (stored := _stored(connection, RunRow, IDENTITY[RunRow], [values])):
                return stored[0]
            return _row_id(connection.execute(insert(RunRow).values(values).returning(RunRow.id)).scalar_one())

        return self._write(append)

    def finish_run(self, run_id: int) -> None:
        """Note that the run ended of its own accord."""
        ended = update(RunRow).where(RunRow.id == run_id).values(finished_at=utc_now())
        if self._write(lambda connection, _: connection.execute(ended).rowcount) == 0:
            raise ValueError(f"{self._target} has no run {run_id}; pass what start_run returned")

    def record(
        self, records: Iterable[Trial], *, then: Callable[[Connection], object] = lambda connection: None
    ) -> list[int]:
        """Add trials in one transaction, all or none; returns their ids in the same order.

        Args:
            records: the trials; none does nothing.
            then: a further change in the same transaction; it may be run again after a failure.
        """
        batch = list(records)
        if not batch:
            return []
        key = uuid.uuid4().hex

        def append(connection: Connection, again: bool) -> list[int]:
            ids = append_trials(connection, batch, key=key, again=again)
            then(connection)
            return ids

        return self._write(append)

    def pin(self, problem: Problem, candidate: Candidate, *, environment: Environment, reason: str) -> int:
        """Override what is dispatched for `problem` on machines like `environment`; replaces an earlier pin."""
        config = canonical_json(candidate.config_dict)
        values: dict[str, Any] = {"variant": candidate.variant, "config": config, "reason": reason}
        values |= {"user": login(), "created_at": utc_now()}

        def replace(connection: Connection, _: bool) -> int:
            keys = {
                "problem_id": get_or_create(connection, [problem])[problem],
                "environment_id": get_or_create(connection, [environment])[environment],
            }
            _remove_pins(connection, keys["problem_id"], environment)
            return _row_id(connection.execute(insert(PinRow).values(keys | values).returning(PinRow.id)).scalar_one())

        return self._write(replace)

    def unpin(self, problem: Problem, *, environment: Environment) -> bool:
        """Remove the pin of `problem` on machines like `environment`; False if there was none."""

        def remove(connection: Connection, _: bool) -> bool:
            key = connection.execute(select(ProblemRow.id).where(ProblemRow.digest == problem.digest)).scalar()
            return key is not None and _remove_pins(connection, key, environment)

        return self._write(remove)

    # Reading

    def trials(
        self,
        *,
        op: str | None = None,
        problem: Problem | None = None,
        environment: Environment | None = None,
        world_size: int | None = None,
        status: Status | None = None,
        final: bool | None = None,
        after_id: int | None = None,
    ) -> list[Trial]:
        """Trials that match every given filter, oldest first; `environment` matches in every field.

        With `after_id`, those of a higher id. A server gives ids out before rows can be seen: whoever follows what
        others add asks from some ids further back than the last one that was seen.
        """
        if status is not None:
            check_one_of(status, STATUSES, "status")
        digest = None if problem is None else problem.digest
        wanted = ((ProblemRow.op, op), (ProblemRow.world_size, world_size), (ProblemRow.digest, digest))
        of_problem = [column == value for column, value in wanted if value is not None]
        where: list[Any] = []
        if status is not None:
            where.append(TrialRow.status == status)
        if final is not None:
            where.append(TrialRow.final == final)
        if after_id is not None:
            where.append(TrialRow.id > after_id)
        if environment is not None:
            same = select(EnvironmentRow.id).where(EnvironmentRow.digest == environment.digest)
            where.append(TrialRow.environment_id.in_(same))
        return self._read(lambda connection, reader: query.trials(connection, reader, where, of_problem))

    def environments(self, *, op: str | None = None, world_size: int | None = None) -> list[Environment]:
        """Every environment, in the order in which they were first seen; those where something of `op` ran, if given.

        Args:
            op: only those with an ok trial of this op.
            world_size: only those with an ok trial of this world size.
        """
        where = [] if op is None and world_size is None else [query.has_run(op, world_size)]
        found = self._read(lambda connection, reader: query.load_environments(connection, reader, *where))
        return [found[key] for key in sorted(found)]

    def problems(self, *, op: str | None = None) -> list[Problem]:
        """Every problem, sorted."""
        where = [ProblemRow.op == op] if op is not None else []
        found = self._read(lambda connection, reader: query.load_problems(connection, reader, *where))
        return sorted(found.values())

    def runs(self) -> list[Run]:
        """Every run, oldest first."""
        return self._read(query.runs)

    def pins(self) -> list[Pin]:
        """Every pin, oldest first."""
        return self._read(query.pins)

    def stats(self) -> dict[str, int]:
        """Rows of each table, trials of each status (`trials_ok`, …) and finals."""
        return self._read(lambda connection, _: query.counts(connection))


def login() -> str:
    """The user's name; empty where unknown."""
    try:
        return getpass.getuser()
    except (KeyError, OSError, ImportError):  # no such user id in a container
        return ""


def _stamp(path: Path) -> tuple[object, ...] | None:
    """The state of a file, which differs once somebody has written to it; None where it cannot be read."""
    try:
        # Opened rather than asked about: that is when a network file system looks whether its cache is still right.
        with path.open("rb") as file:
            found = os.fstat(file.fileno())
            # The header counts changes, which tells apart what happens between two ticks of the file system's clock.
            return (found.st_ino, found.st_size, found.st_mtime_ns, file.read(100))
    except OSError:
        return None


# Adding rows, so that running the same transaction a second time adds none twice
#
# When the connection breaks during a commit, the client cannot know whether the rows are stored. The second attempt
# looks for them by what no two trials share: everything that was asked, the run and the microsecond at which the record
# was made. On a server the first attempt may even be in the middle of its commit then; so both take a lock that is
# named by the client, which the server holds until the first attempt has ended one way or the other.

_TRIAL_IDENTITY = ("problem_id", "environment_id", "variant_id", "config_digest", "final", "run_id", "created_at")
# Columns by which a row of one database is the same as a row of another; a run's end may be known to one alone.
IDENTITY: Mapping[type[Base], tuple[str, ...]] = {
    EnvironmentRow: ("digest",),
    ProblemRow: ("digest",),
    VariantRow: ("op", "name", "numerics", "source_hash"),
    RunRow: ("command", "seed", "budget", "host", "user", "version", "started_at"),
}
_MODELS: Mapping[type, type[Base]] = {Problem: ProblemRow, Environment: EnvironmentRow, StoredVariant: VariantRow}
_CHUNK = 500  # below every driver's limit of parameters in one statement


def append_trials(connection: Connection, batch: Sequence[Trial], *, key: str, again: bool = False) -> list[int]:
    """Add trials; returns their ids in the same order.

    Args:
        connection: in a transaction that writes.
        batch: what to add.
        key: the client's name for this batch, the same at every attempt.
        again: an attempt before may have added them.
    """
    exclusive(connection, key)
    problems = get_or_create(connection, (trial.problem for trial in batch))
    environments = get_or_create(connection, (trial.environment for trial in batch))
    variants = get_or_create(connection, (trial.stored_variant for trial in batch))
    rows = [
        {
            **{column.name: getattr(trial, column.name) for column in own_columns(TrialRow)},
            "problem_id": problems[trial.problem],
            "environment_id": environments[trial.environment],
            "variant_id": variants[trial.stored_variant],
            "run_id": trial.run_id,
            "config": canonical_json(trial.config),
            "config_digest": config_digest(trial.config),
        }
        for trial in batch
    ]
    if again and (stored := _stored(connection, TrialRow, _TRIAL_IDENTITY, rows)):
        return stored
    statement = insert(TrialRow).returning(TrialRow.id, sort_by_parameter_order=True)
    return [_row_id(id_) for id_ in connection.execute(statement, rows).scalars()]


def _stored(
    connection: Connection, model: type[Base], identity: Sequence[str], rows: Sequence[dict[str, Any]]
) -> list[int]:
    """Ids of rows that were added together, or nothing if they were not: a transaction is stored as a whole."""
    columns = table(model).columns
    ids: list[int] = []
    for row in rows:
        where = [columns[name].is_not_distinct_from(row[name]) for name in identity]
        same = connection.execute(select(columns["id"]).where(*where).order_by(columns["id"])).scalars()
        new = next((int(id_) for id_ in same if id_ not in ids), None)
        if new is None:
            return []
        ids.append(new)
    return ids


def _remove_pins(connection: Connection, problem_id: int, environment: Environment) -> bool:
    same = list(query.environments_like(connection, environment, Reader()))
    where = (PinRow.problem_id == problem_id, PinRow.environment_id.in_(same))
    return connection.execute(delete(PinRow).where(*where)).rowcount > 0


def row_of(thing: Problem | Environment | StoredVariant) -> dict[str, Any]:
    """The stored values of what trials refer to."""
    match thing:
        case Problem():
            return {**thing.to_dict(), "shape": format_shape(thing.shape), "digest": thing.digest}
        case Environment():
            return {**thing.to_dict(), "digest": thing.digest}
    return asdict(thing)


def get_or_create(connection: Connection, things: Iterable[_Thing]) -> dict[_Thing, int]:
    """Ids of problems, environments or variants; those that are new are added.

    Raises:
        DatabaseCorruptError: a stored row is damaged: readers would skip it, and with it what refers to it.
    """
    wanted = {thing: row_of(thing) for thing in dict.fromkeys(things)}
    ids = _find(connection, wanted)
    if len(ids) < len(wanted):
        # New rows are rare, and writers that add the same ones in another order would deadlock: one at a time.
        exclusive(connection, "intern")
        ids = _find(connection, wanted)
        for thing, row in wanted.items():
            if thing not in ids:
                connection.execute(insert(_MODELS[type(thing)]).values(row))
        ids = _find(connection, wanted)
    return {thing: _row_id(ids.get(thing)) for thing in wanted}


def _find(connection: Connection, wanted: Mapping[_Thing, dict[str, Any]]) -> dict[_Thing, int]:
    """Ids of the rows that are there."""
    found: dict[_Thing, int] = {}
    for model in {_MODELS[type(thing)] for thing in wanted}:
        names, columns = IDENTITY[model], table(model).columns
        by_key = {tuple(row[name] for name in names): thing for thing, row in wanted.items()}
        last = sorted({key[-1] for key in by_key})  # the digest or the source hash
        for start in range(0, len(last), _CHUNK):
            here = columns[names[-1]].in_(last[start : start + _CHUNK])
            for row in connection.execute(select(*map(raw, columns)).where(here)).mappings():
                if (thing := by_key.get(tuple(row[name] for name in names))) is None:
                    continue
                if any(row[name] != value for name, value in wanted[thing].items()):
                    raise DatabaseCorruptError(
                        f"{model.__tablename__} {row['id']} of the database is damaged: it is not what its digest "
                        "says. Nothing was recorded. `tunedcomm db check` lists such rows, `tunedcomm db prune "
                        "--invalid` takes them out and their trials"
                    )
                found[thing] = _row_id(row["id"])
    return found


def _row_id(value: object) -> int:
    """The id of a row that was found or added just now."""
    if type(value) is not int:
        raise DatabaseCorruptError(
            "the database does not find a row that it holds: an index of it is damaged, or a table was made by another "
            "program; restore a copy of it, or read what is left with `sqlite3 FILE .recover`"
        )
    return value
