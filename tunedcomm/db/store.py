"""One tuning database: open it, add trials to it, read them back."""

from __future__ import annotations

import getpass
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

from sqlalchemy import BigInteger, ColumnElement, Connection, Engine, delete, func, insert, literal, select, update

from tunedcomm.db import engine, query
from tunedcomm.db.records import Pin, Reader, Run, StoredVariant, Trial, config_digest, own_columns
from tunedcomm.db.schema import Base, EnvironmentRow, PinRow, ProblemRow, RunRow, TrialRow, VariantRow
from tunedcomm.db.targets import (
    BUSY_TIMEOUT_S,
    Target,
    is_immutable,
    parse_target,
    prepare_file,
    refuse_network,
    warn_once,
)
from tunedcomm.db.values import STATUSES, canonical_json, row_of_problem, utc_now
from tunedcomm.errors import DatabaseAccessError, DatabaseBusyError, DatabaseCorruptError
from tunedcomm.hardware import Environment
from tunedcomm.spec import DTYPES, Candidate, Problem
from tunedcomm.version import VERSION

T = TypeVar("T")
_Thing = TypeVar("_Thing", Problem, Environment, StoredVariant)


class Database:
    """A tuning database. Use as a context manager; safe for concurrent threads and processes.

    Trials are only ever added: `record` never changes or removes a row. Open it after a fork, not before.

    Example:
        with Database.open("tuned.db") as database:
            for trial in database.trials(op="all_reduce", world_size=4):
                print(trial.candidate, trial.status, trial.latency_p50_us)
            database.record([replace(trial, final=True)])
            problem, environment = trial.problem, trial.environment
            database.pin(problem, trial.candidate, environment=environment, reason="until the driver is mended")

    Attributes:
        path: the SQLite file, or None for a server.
        url: the SQLAlchemy URL, its password hidden.
        target: the file's path, or the server's URL with its password: what `open` takes.
        readonly: nothing is ever written.
        schema_version: the schema revision.
    """

    def __init__(self, target: Target, made: Engine, *, readonly: bool, patience_s: float, stamp: object) -> None:
        self._target = target
        self._engine = made
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
        made = engine.make_engine(where, readonly=readonly, immutable=bool(immutable), busy_timeout_s=busy_timeout_s)
        opened = cls(where, made, readonly=readonly, patience_s=patience_s, stamp=stamp)
        try:
            with engine.translated(where):
                opened.schema_version = engine.ensure_schema(made, where, create=create, readonly=readonly)
        except BaseException:
            opened.close()
            raise
        return opened

    def __enter__(self) -> Database:
        return self

    def __exit__(self, *_: object) -> None:
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
                engine.translated(self._target),
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

    def change(
        self,
        change: Callable[[Connection], T],
        *,
        is_stored: Callable[[Connection, T], bool] = lambda _connection, _result: True,
    ) -> T:
        """Run `change` in one transaction that writes, all or nothing; again while the database is away or locked.

        Nothing is done twice: when a connection breaks during a commit, PostgreSQL is asked what became of it. A server
        that crashes may forget a transaction and give its id to another one, so `is_stored` also looks for the rows of
        the result; the default trusts the server.
        """
        if self.readonly:
            raise DatabaseAccessError(f"{self._target} is open for reading only; open it without readonly to write")
        # Id and result of a transaction that PostgreSQL was asked to commit. SQLite: a refused commit did not happen,
        # so retry. Other servers: we cannot know, so do not retry.
        sent: tuple[int, T] | None = None
        dialect = self._engine.dialect.name

        def attempt() -> T:
            nonlocal sent
            with (
                engine.translated(self._target),
                self._engine.connect().execution_options(**{engine.IMMEDIATE: True}) as connection,
                connection.begin(),
            ):
                if sent is not None:
                    state = _transaction_state(connection, sent[0])
                    if state == "in progress":
                        raise DatabaseBusyError(f"{self._target} has not ended a transaction whose connection broke")
                    if state == "committed" and is_stored(connection, sent[1]):
                        return sent[1]
                found, sent = change(connection), None
                if dialect == "postgresql":
                    transaction_id = connection.execute(select(func.txid_current_if_assigned())).scalar()
                    sent = None if transaction_id is None else (transaction_id, found)
            return found

        return engine.retry(attempt, self._patience_s if dialect in ("sqlite", "postgresql") else 0.0)

    def _add(self, model: type[Base], rows_of: Callable[[Connection], list[dict[str, Any]]]) -> list[int]:
        """Add the rows that `rows_of` makes in the same transaction; returns their ids in the same order."""
        rows: list[dict[str, Any]] = []

        def insert_rows(connection: Connection) -> list[int]:
            nonlocal rows
            rows = rows_of(connection)
            return _insert(connection, model, rows)

        return self.change(insert_rows, is_stored=lambda connection, ids: _are_stored(connection, model, ids, rows))

    def ask(self, ask: Callable[[Connection, Reader], T]) -> T:
        """Run `ask` in one transaction that reads, again while the database is away; warn of rows that it skipped."""

        def attempt() -> T:
            reader = Reader()
            with self.reading() as connection:
                found = ask(connection, reader)
            self.warn_skipped(reader)
            return found

        return engine.retry(attempt, self._patience_s)

    def warn_skipped(self, reader: Reader) -> None:
        """Log once what could not be read; the process goes on without these rows."""
        if reader.skipped.count:
            warn_once(
                f"{self._target}: skipped invalid rows, the first: {reader.skipped.first}. `tunedcomm db "
                "check` lists them",
                about=f"skipped rows of {self._target}",
            )

    # Writing

    def start_run(self, *, command: str, seed: int | None, budget: str, host: str) -> int:
        """Register a command that is about to record trials; returns its run id."""
        if seed is not None and not -(2**63) <= seed < 2**63:
            raise ValueError(f"seed must fit in 64 bits, got {seed}")
        values: dict[str, Any] = {"command": command, "seed": seed, "budget": budget, "host": host, "user": login()}
        values |= {"version": VERSION, "started_at": utc_now()}
        return self._add(RunRow, lambda _: [values])[0]

    def finish_run(self, run_id: int) -> None:
        """Note that the run ended of its own accord."""
        ended = update(RunRow).where(RunRow.id == run_id).values(finished_at=utc_now())
        if self.change(lambda connection: connection.execute(ended).rowcount) == 0:
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

        def rows_of(connection: Connection) -> list[dict[str, Any]]:
            then(connection)
            return trial_rows(connection, batch)

        return self._add(TrialRow, rows_of) if batch else []

    def pin(self, problem: Problem, candidate: Candidate, *, environment: Environment, reason: str) -> int:
        """Override what is dispatched for `problem` on machines like `environment`; replaces an earlier pin."""
        values: dict[str, Any] = {"variant": candidate.variant, "config": canonical_json(candidate.config_dict)}
        values |= {"reason": reason, "user": login(), "created_at": utc_now()}

        def replace(connection: Connection) -> list[dict[str, Any]]:
            values["problem_id"] = get_or_create(connection, [problem])[problem]
            values["environment_id"] = get_or_create(connection, [environment])[environment]
            _remove_pins(connection, problem, environment)
            return [values]

        return self._add(PinRow, replace)[0]

    def unpin(self, problem: Problem, *, environment: Environment) -> bool:
        """Remove the pin of `problem` on machines like `environment`; False if there was none."""
        return self.change(lambda connection: _remove_pins(connection, problem, environment))

    # Reading

    def trials(
        self,
        *,
        op: str | None = None,
        problem: Problem | None = None,
        world_size: int | None = None,
        after_id: int | None = None,
    ) -> list[Trial]:
        """Trials that match every given filter, oldest first.

        With `after_id`, only trials with a higher id. A server assigns ids before rows become visible: to follow a
        growing table, start some ids before the last one seen.
        """
        digest = None if problem is None else problem.digest
        of = _equal((ProblemRow.op, op), (ProblemRow.world_size, world_size), (ProblemRow.digest, digest))
        where: list[ColumnElement[bool]] = [] if after_id is None else [TrialRow.id > after_id]
        if of:
            where.append(TrialRow.problem_id.in_(select(ProblemRow.id).where(*of).correlate(None)))
        return self.ask(lambda connection, reader: query.trials(connection, reader, *where))

    def environments(self, *, op: str | None = None, world_size: int | None = None) -> list[Environment]:
        """Every environment, in the order in which they were first seen.

        Args:
            op: only environments with an ok trial of this op.
            world_size: only environments with an ok trial of this world size.
        """
        ran = select(TrialRow.id).where(
            TrialRow.environment_id == EnvironmentRow.id,
            TrialRow.status == "ok",
            TrialRow.final.in_([True, False]),  # lets the index be used through to the problem
        )
        of = _equal((ProblemRow.op, op), (ProblemRow.world_size, world_size))
        where = [ran.where(TrialRow.problem_id.in_(select(ProblemRow.id).where(*of))).exists()] if of else []
        return list(self.ask(lambda connection, reader: query.load_environments(connection, reader, *where)).values())

    def dtypes(self, *, op: str, world_size: int, environment: Environment) -> set[str]:
        """The dtypes in which `op` has an ok trial of this world size on hardware like `environment`."""

        def ask(connection: Connection, reader: Reader) -> set[str]:
            like = TrialRow.environment_id.in_(query.environments_like(connection, environment, reader))
            of = _equal((ProblemRow.op, op), (ProblemRow.world_size, world_size))
            ran = select(TrialRow.id).where(TrialRow.problem_id == ProblemRow.id, TrialRow.status == "ok", like)
            found = connection.execute(select(query.raw(ProblemRow.dtype)).where(*of, ran.exists()).distinct())
            return set(found.scalars()).intersection(DTYPES)

        return self.ask(ask)

    def problems(self) -> list[Problem]:
        """Every problem, sorted."""
        return sorted(self.ask(query.load_problems).values())

    def runs(self) -> list[Run]:
        """Every run, oldest first."""
        return self.ask(query.runs)

    def pins(self) -> list[Pin]:
        """Every pin, oldest first."""
        return self.ask(query.pins)

    def stats(self) -> dict[str, int]:
        """Rows of each table, trials of each status (`trials_ok`, …) and finals."""

        def count(connection: Connection, _: Reader) -> dict[str, int]:
            tables = Base.metadata.tables.items()
            found = {f"{name}s": query.count(connection, select(table.c.id)) for name, table in tables}
            ended = connection.execute(select(TrialRow.status, func.count()).group_by(TrialRow.status))
            by_status = {row[0]: row[1] for row in ended}
            found |= {f"trials_{status}": by_status.get(status, 0) for status in STATUSES}
            return found | {"finals": query.count(connection, select(TrialRow.id).where(TrialRow.final))}

        return self.ask(count)


def _equal(*wanted: tuple[Any, Any]) -> list[ColumnElement[bool]]:
    """Conditions of the columns for which there is a value."""
    return [column == value for column, value in wanted if value is not None]


def login() -> str:
    """The user's name; empty where unknown."""
    try:
        return getpass.getuser()
    except (KeyError, OSError, ImportError):  # no such user id in a container
        return ""


def _stamp(path: Path) -> tuple[object, ...] | None:
    """The state of a file, which differs once somebody has written to it; None where it cannot be read."""
    # Opened rather than asked about: that is when a network file system looks whether its cache is still right.
    with suppress(OSError), path.open("rb") as file:
        found = os.fstat(file.fileno())
        # The header counts changes, which tells apart what happens between two ticks of the file system's clock.
        return (found.st_ino, found.st_size, found.st_mtime_ns, file.read(100))
    return None


# Adding rows


# Each thing that trials refer to: its table, its reader, and the column and attribute that it is looked for by.
_REFERRED: Mapping[type, tuple[Any, Callable[..., dict[int, Any]], str]] = {
    Problem: (ProblemRow, query.load_problems, "digest"),
    Environment: (EnvironmentRow, query.load_environments, "digest"),
    StoredVariant: (VariantRow, query.load_variants, "source_hash"),
}


def trial_rows(connection: Connection, trials: Sequence[Trial]) -> list[dict[str, Any]]:
    """The stored values of trials without their ids; what they refer to is added if it is new."""
    problems = get_or_create(connection, (trial.problem for trial in trials))
    environments = get_or_create(connection, (trial.environment for trial in trials))
    variants = get_or_create(connection, (trial.stored_variant for trial in trials))
    return [
        {
            **{column.name: getattr(trial, column.name) for column in own_columns(TrialRow)},
            "problem_id": problems[trial.problem],
            "environment_id": environments[trial.environment],
            "variant_id": variants[trial.stored_variant],
            "run_id": trial.run_id,
            "config": canonical_json(trial.config),
            "config_digest": config_digest(trial.config),
        }
        for trial in trials
    ]


def get_or_create(connection: Connection, things: Iterable[_Thing]) -> dict[_Thing, int]:
    """Ids of problems, of environments or of variants; new ones are added.

    Raises:
        DatabaseCorruptError: a stored row is damaged: readers would skip it, and with it what refers to it.
    """
    wanted = list(dict.fromkeys(things))
    if not wanted:
        return {}
    model, load, key = _REFERRED[type(wanted[0])]
    keys = {getattr(thing, key) for thing in wanted}

    def stored() -> dict[_Thing, int]:
        reader = Reader()
        found = load(connection, reader, getattr(model, key).in_(keys))
        if reader.skipped.count:
            raise DatabaseCorruptError(
                f"a row of the database is damaged: {reader.skipped.first}. Nothing was recorded. `tunedcomm db check` "
                "lists such rows, `tunedcomm db prune --invalid` takes them out and their trials"
            )
        return {thing: id_ for id_, thing in found.items()}

    ids = stored()
    if not ids.keys() >= set(wanted):
        # New rows are rare, and writers that add the same ones in another order would deadlock: one at a time.
        engine.exclusive(connection)
        ids = stored()
        new = [thing for thing in wanted if thing not in ids]
        ids |= zip(new, _insert(connection, model, list(map(_row_of, new))), strict=True)
    return ids


def _row_of(thing: Problem | Environment | StoredVariant) -> dict[str, Any]:
    if isinstance(thing, StoredVariant):
        return asdict(thing)
    row = row_of_problem(thing) if isinstance(thing, Problem) else thing.to_dict()
    return {**row, "digest": thing.digest}


def _insert(connection: Connection, model: Any, rows: list[dict[str, Any]]) -> list[int]:
    """Add rows; returns their ids in the same order."""
    added = insert(model).returning(model.id, sort_by_parameter_order=True)
    ids = list(connection.execute(added, rows).scalars()) if rows else []
    if None in ids:
        raise DatabaseCorruptError(
            f"table {model.__tablename__} of the database was made by another program; move it away"
        )
    return ids


def _are_stored(connection: Connection, model: type[Base], ids: list[int], rows: list[dict[str, Any]]) -> bool:
    """True if the rows with these ids are the ones given."""
    columns = query.table(model).columns
    names = [name for name in rows[0] if name != "error"]  # NaN equals nothing
    near = select(columns.id, *(columns[name] for name in names)).where(columns.id.between(min(ids), max(ids)))
    stored = {id_: values for id_, *values in connection.execute(near)}
    return all(stored.get(id_) == [row[name] for name in names] for id_, row in zip(ids, rows, strict=True))


def _transaction_state(connection: Connection, transaction_id: int) -> str | None:
    """The state of an earlier transaction on PostgreSQL; None if a crash of the server forgot it."""
    if connection.execute(select(func.txid_current())).scalar_one() <= transaction_id:
        return None
    return connection.execute(select(func.txid_status(literal(transaction_id, BigInteger)))).scalar()


def _remove_pins(connection: Connection, problem: Problem, environment: Environment) -> bool:
    same = list(query.environments_like(connection, environment, Reader()))
    of_problem = PinRow.problem_id.in_(select(ProblemRow.id).where(ProblemRow.digest == problem.digest))
    return connection.execute(delete(PinRow).where(of_problem, PinRow.environment_id.in_(same))).rowcount > 0
