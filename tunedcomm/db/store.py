"""One tuning database: open it, add trials to it, read them back."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from sqlalchemy import Connection, Engine, delete, insert, select, update

from tunedcomm.db import query
from tunedcomm.db.append import append_run, append_trials, login
from tunedcomm.db.engine import IMMEDIATE, Target, make_engine, parse_target, prepare_file, translated
from tunedcomm.db.intern import environment_ids, problem_ids, row_id
from tunedcomm.db.migrate import ensure_schema
from tunedcomm.db.patience import Patience
from tunedcomm.db.readonly import Reading, cannot_change
from tunedcomm.db.records import (
    STATUSES,
    PinRecord,
    RunRecord,
    Status,
    TrialRecord,
    canonical_json,
    utc_now,
)
from tunedcomm.db.rows import Reader
from tunedcomm.db.schema import EnvironmentRow, PinRow, ProblemRow, RunRow, TrialRow
from tunedcomm.errors import DatabaseAccessError
from tunedcomm.hardware import Environment
from tunedcomm.spec import Candidate, Problem
from tunedcomm.version import VERSION

__all__ = ["BUSY_TIMEOUT_S", "Database", "cannot_change"]

BUSY_TIMEOUT_S = 30.0
_INT64 = 2**63

T = TypeVar("T")
_log = logging.getLogger("tunedcomm")
_warned: set[tuple[str, str]] = set()


class Database:
    """A tuning database. Use as a context manager; safe for concurrent threads and processes.

    Trials are only ever added: `record` never changes or removes a row. Make one after a fork, not before.
    """

    def __init__(
        self,
        target: Target,
        engine: Engine,
        patience: Patience,
        *,
        readonly: bool,
        version: str,
        how: Reading | None = None,
    ) -> None:
        self._target = target
        self._how = how
        self._engine = engine
        self._patience = patience
        self._readonly = readonly
        self._version = version

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
                file is made; None finds out, and then `is_overtaken` says whether it did. Implies `readonly`.
            busy_timeout_s: how long to wait for another writer.
            patience_s: once it is open, how long every method waits for a database that is away or stays locked.

        Raises:
            DatabaseAccessError: missing, a directory, unreadable, or not writable.
            DatabaseCorruptError: no SQLite file, damaged, or no tunedcomm database.
            DatabaseVersionError: written by a newer tunedcomm, or older and `readonly`.
            DatabaseBusyError: locked by another writer for longer than `busy_timeout_s`.
            DatabaseAwayError: the server does not answer.
        """
        where = parse_target(target)
        readonly = readonly or bool(immutable)
        if readonly and create:
            raise ValueError("create=True needs a database that can be written; leave readonly and immutable out")
        what, how = where, None
        if where.path is not None:
            prepare_file(where.path, create=create)
            if readonly and immutable is None:
                how = Reading.of(where.path)
                what, immutable = Target(where.url, how.path), how.immutable
        engine = make_engine(what, readonly=readonly, immutable=bool(immutable), busy_timeout_s=busy_timeout_s)
        opened = cls(where, engine, Patience(patience_s), readonly=readonly, version="", how=how)
        try:
            with translated(where):
                opened._version = ensure_schema(engine, where, create=create, readonly=readonly)
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
        if self._how is not None:
            self._how.close()

    @property
    def is_overtaken(self) -> bool:
        """True if somebody wrote to a file that nobody seemed to write: what was read may be torn, read it again."""
        return self._how is not None and self._how.is_overtaken

    @property
    def path(self) -> Path | None:
        """The SQLite file, or None for a server."""
        return self._target.path

    @property
    def url(self) -> str:
        """The SQLAlchemy URL, its password hidden."""
        return self._target.url.render_as_string(hide_password=True)

    @property
    def target(self) -> str:
        """The file's path, or the server's URL with its password: what `open` takes."""
        return str(self.path or self._target.url.render_as_string(hide_password=False))

    @property
    def readonly(self) -> bool:
        return self._readonly

    @property
    def schema_version(self) -> str:
        """The schema revision of the open database."""
        return self._version

    @contextmanager
    def reading(self) -> Iterator[Connection]:
        """A connection in one read transaction; driver errors come out as `DatabaseError`."""
        with translated(self._target), self._engine.connect() as connection, connection.begin():
            yield connection

    @contextmanager
    def _writing(self) -> Iterator[Connection]:
        if self._readonly:
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

        return self._patience.run(attempt)

    def change(self, change: Callable[[Connection], T]) -> T:
        """Run `change` in one transaction that writes, all or nothing; it may be run again after a failure."""
        return self._write(lambda connection, _: change(connection))

    def ask(self, ask: Callable[[Connection], T]) -> T:
        """Run `ask` in one transaction that reads, again while the database is away."""

        def attempt(_: bool) -> T:
            with self.reading() as connection:
                return ask(connection)

        return self._patience.run(attempt)

    def _read(self, query_: Callable[[Connection], T]) -> T:
        """One read transaction, tried again while the database is away."""

        def attempt(_: bool) -> T:
            with self.reading() as connection:
                return query_(connection)

        return self._patience.run(attempt)

    def warn_skipped(self, reader: Reader) -> None:
        """Log once what could not be read; the process goes on without these rows."""
        if not reader.skipped.count or (str(self._target), reader.skipped.first) in _warned:
            return
        _warned.add((str(self._target), reader.skipped.first))
        _log.warning(
            "%s: skipped %d rows that make no sense, the first: %s. `tunedcomm db check` lists them",
            self._target,
            reader.skipped.count,
            reader.skipped.first,
        )

    # Writing

    def start_run(self, *, command: str, seed: int | None, budget: str, host: str) -> int:
        """Register a command that is about to record trials; returns its run id."""
        if seed is not None and not -_INT64 <= seed < _INT64:
            raise ValueError(f"seed must fit in 64 bits, got {seed}")
        values = {
            "command": command,
            "seed": seed,
            "budget": budget,
            "host": host,
            "user": login(),
            "version": VERSION,
            "started_at": utc_now(),
        }
        key = uuid.uuid4().hex
        return self._write(lambda connection, again: append_run(connection, values, key=key, again=again))

    def finish_run(self, run_id: int) -> None:
        """Note that the run ended of its own accord."""
        ended = update(RunRow).where(RunRow.id == run_id).values(finished_at=utc_now())
        if self._write(lambda connection, _: connection.execute(ended).rowcount) == 0:
            raise ValueError(f"{self._target} has no run {run_id}; pass what start_run returned")

    def record(self, records: Iterable[TrialRecord]) -> list[int]:
        """Add trials in one transaction, all or none; returns their ids in the same order."""
        batch = list(records)
        if not batch:
            return []
        key = uuid.uuid4().hex
        return self._write(lambda connection, again: append_trials(connection, batch, key=key, again=again))

    def pin(self, problem: Problem, candidate: Candidate, *, environment: Environment, reason: str) -> int:
        """Override what is dispatched for `problem` on machines like `environment`; replaces an earlier pin."""
        values = {
            "variant": candidate.variant,
            "config": canonical_json(candidate.config_dict),
            "reason": reason,
            "user": login(),
            "created_at": utc_now(),
        }

        def replace(connection: Connection, _: bool) -> int:
            keys = {
                "problem_id": problem_ids(connection, [problem])[problem],
                "environment_id": environment_ids(connection, [environment])[environment],
            }
            self._remove_pins(connection, keys["problem_id"], environment)
            return row_id(connection.execute(insert(PinRow).values(keys | values).returning(PinRow.id)).scalar_one())

        return self._write(replace)

    def unpin(self, problem: Problem, *, environment: Environment) -> bool:
        """Remove the pin of `problem` on machines like `environment`; False if there was none."""

        def remove(connection: Connection, _: bool) -> bool:
            key = connection.execute(select(ProblemRow.id).where(ProblemRow.digest == problem.digest)).scalar()
            return key is not None and self._remove_pins(connection, key, environment)

        return self._write(remove)

    @staticmethod
    def _remove_pins(connection: Connection, problem_id: int, environment: Environment) -> bool:
        same = list(query.environments_like(connection, environment, Reader()))
        where = (PinRow.problem_id == problem_id, PinRow.environment_id.in_(same))
        return connection.execute(delete(PinRow).where(*where)).rowcount > 0

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
    ) -> list[TrialRecord]:
        """Trials that match every given filter, oldest first; `environment` matches in every field.

        With `after_id`, those of a higher id. A server gives ids out before rows can be seen: whoever follows what
        others add asks from some ids further back than the last one that was seen.
        """
        if status is not None and status not in STATUSES:
            raise ValueError(f"unknown status {status!r}; the statuses are {', '.join(STATUSES)}")
        problem_where: list[Any] = []
        if op is not None:
            problem_where.append(ProblemRow.op == op)
        if world_size is not None:
            problem_where.append(ProblemRow.world_size == world_size)
        if problem is not None:
            problem_where.append(ProblemRow.digest == problem.digest)
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
        reader = Reader()
        found = self._read(lambda connection: query.trials(connection, reader, where, problem_where))
        self.warn_skipped(reader)
        return found

    def trial_ids(self, problem: Problem, *, after_id: int, except_run: int) -> list[int]:
        """Ids above `after_id` of a problem's trials in other runs: a cheap look whether there is anything to read."""
        same = select(ProblemRow.id).where(ProblemRow.digest == problem.digest).scalar_subquery()
        others = TrialRow.run_id.is_distinct_from(except_run)
        wanted = select(TrialRow.id).where(TrialRow.problem_id == same, TrialRow.id > after_id, others)
        return self._read(lambda connection: list(connection.execute(wanted).scalars()))

    def environments(self, *, op: str | None = None, world_size: int | None = None) -> list[Environment]:
        """Every environment, in the order in which they were first seen; those where something of `op` ran, if given.

        Args:
            op: only those with an ok trial of this op.
            world_size: only those with an ok trial of this world size.
        """
        reader = Reader()
        where = [] if op is None and world_size is None else [query.has_run(op, world_size)]
        found = self._read(lambda connection: query.load_environments(connection, reader, *where))
        self.warn_skipped(reader)
        return [found[key] for key in sorted(found)]

    def problems(self, *, op: str | None = None) -> list[Problem]:
        """Every problem, sorted."""
        reader = Reader()
        where = [ProblemRow.op == op] if op is not None else []
        found = self._read(lambda connection: query.load_problems(connection, reader, *where))
        self.warn_skipped(reader)
        return sorted(found.values())

    def runs(self) -> list[RunRecord]:
        """Every run, oldest first."""
        reader = Reader()
        found = self._read(lambda connection: query.runs(connection, reader))
        self.warn_skipped(reader)
        return found

    def pins(self) -> list[PinRecord]:
        """Every pin, oldest first."""
        reader = Reader()
        found = self._read(lambda connection: query.pins(connection, reader))
        self.warn_skipped(reader)
        return found

    def stats(self) -> dict[str, int]:
        """Rows of each table, trials of each status (`trials_ok`, …) and finals."""
        return self._read(query.counts)
