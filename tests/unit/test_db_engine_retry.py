"""A database that is away, locked or full: waited for where that helps, nothing lost and nothing doubled."""

from __future__ import annotations

import logging
import sqlite3
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from db_samples import H200, problem, trial
from postgres import PostgresServer
from sqlalchemy import event, make_url

from tunedcomm.db import engine
from tunedcomm.db.engine import retry
from tunedcomm.db.store import Database
from tunedcomm.errors import (
    DatabaseAccessError,
    DatabaseAwayError,
    DatabaseBusyError,
    DatabaseError,
    DatabaseFullError,
)


class Clock:
    """Time that passes only while somebody sleeps."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        assert seconds > 0
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(engine, "time", SimpleNamespace(monotonic=clock, sleep=clock.sleep))
    return clock


def failing(times: int, error: Exception) -> tuple[Callable[[], str], list[int]]:
    """An operation that fails so many times, and one entry for each time that it has run."""
    ran: list[int] = []

    def operation() -> str:
        ran.append(len(ran))
        if len(ran) <= times:
            raise error
        return "done"

    return operation, ran


@pytest.mark.parametrize("error", [DatabaseAwayError("away"), DatabaseBusyError("locked")])
def test_waits_with_one_warning(error: DatabaseError, caplog: pytest.LogCaptureFixture, clock: Clock) -> None:
    operation, ran = failing(12, error)
    with caplog.at_level(logging.WARNING, "tunedcomm"):
        assert retry(operation, 600) == "done"
    assert len(ran) == 13
    assert [record.message for record in caplog.records] == [f"{error}. Waiting for it, for up to 600 s"]
    assert 5 < clock.now < 60


def test_gives_up_at_the_limit(clock: Clock) -> None:
    operation, ran = failing(10**6, DatabaseAwayError("away"))
    with pytest.raises(DatabaseAwayError):
        retry(operation, 30)
    assert clock.now == pytest.approx(30)
    assert len(ran) < 30
    operation, ran = failing(1, DatabaseAwayError("away"))
    with pytest.raises(DatabaseAwayError):
        retry(operation, 0)
    assert len(ran) == 1


def _lose_answers(database: Database, *, committed: bool) -> list[str]:
    """Break the connection at every first commit, before or after the server carries it out."""
    seen: list[str] = []

    @event.listens_for(database._engine, "commit")
    def _on_commit(connection: Any) -> None:
        seen.append("kept" if len(seen) % 2 else "lost")
        if seen[-1] == "lost":
            raw = connection.connection.driver_connection
            if committed:
                raw.commit()
            raw.close()
            raise sqlite3.OperationalError("database is locked") if database.path else _away()

    return seen


def _away() -> DatabaseAwayError:
    return DatabaseAwayError("server closed the connection unexpectedly")


def _record_all(patient: Database) -> list[int]:
    """A run with some trials, two of them alike, while answers to commits are lost; the ids that were returned."""
    run = patient.start_run(command="tunedcomm tune", seed=1, budget="", host="node")
    ids = patient.record([trial(config={"num_blocks": i}, run_id=run) for i in range(5)])
    ids += patient.record([trial("lamport", run_id=run)] * 2)
    patient.finish_run(run)
    return ids


def _check_all(database: Database, ids: list[int]) -> None:
    stored = database.trials()
    assert [record.id for record in stored] == ids
    assert [record.config["num_blocks"] for record in stored] == [0, 1, 2, 3, 4, 4, 4]
    assert [r.finished_at is not None for r in database.runs()] == [True]


@pytest.mark.parametrize("committed", [True, False], ids=["carried out", "not carried out"])
def test_a_commit_whose_answer_was_lost_doubles_nothing(postgres_url: str, committed: bool) -> None:
    with Database.open(postgres_url, create=True, patience_s=30) as patient:
        seen = _lose_answers(patient, committed=committed)
        ids = _record_all(patient)
        assert seen == ["lost", "kept"] * 4
        _check_all(patient, ids)


_ROWS = 60


def _record_slowly(url: str, name: str, failures: list[BaseException]) -> None:
    try:
        with Database.open(url, patience_s=60) as database:
            run = database.start_run(command=name, seed=None, budget="", host=name)
            for i in range(_ROWS):
                database.record([trial(name, problem=problem(2 << i % 5), config={"num_blocks": i}, run_id=run)])
                time.sleep(0.02)
            database.finish_run(run)
    except BaseException as error:  # noqa: BLE001
        failures.append(error)


def test_a_server_that_restarts_in_the_middle_costs_nothing(
    postgres_server: PostgresServer, postgres_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    Database.open(postgres_url, create=True).close()
    failures: list[BaseException] = []
    threads = [threading.Thread(target=_record_slowly, args=(postgres_url, n, failures)) for n in ("a", "b")]
    with caplog.at_level(logging.WARNING, "tunedcomm"):
        for thread in threads:
            thread.start()
        for away_s in (2.0, 0.1):
            time.sleep(0.4)
            postgres_server.stop()
            time.sleep(away_s)
            postgres_server.start()
        for thread in threads:
            thread.join(60)
    assert failures == []
    with Database.open(postgres_url, readonly=True) as database:
        stored = [(r.variant, r.config["num_blocks"]) for r in database.trials()]
        assert sorted(stored) == sorted((name, i) for name in ("a", "b") for i in range(_ROWS))
        assert len(database.runs()) == 2
    assert 2 <= len(caplog.records) <= 4
    assert all("does not answer" in record.message for record in caplog.records)


def test_a_locked_file_is_waited_for(tmp_path: Path) -> None:
    path = tmp_path / "tuned.db"
    with Database.open(path, create=True, busy_timeout_s=0.1, patience_s=30) as database:
        other = sqlite3.connect(path, check_same_thread=False, isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        release = threading.Timer(1.0, lambda: (other.execute("ROLLBACK"), other.close()))
        release.start()
        assert len(database.record([trial()])) == 1
        release.join()
        assert len(database.trials()) == 1


def test_no_space_says_what_to_do_and_keeps_what_was_recorded(tmp_path: Path) -> None:
    path = tmp_path / "tuned.db"
    many = [trial(config={"num_blocks": i}, reason="x" * 1000) for i in range(500)]
    with Database.open(path, create=True, patience_s=30) as database:
        database.record([trial("lamport")])

        def bound(connection: Any, *_: object) -> None:
            connection.execute("PRAGMA max_page_count = 60")

        event.listen(database._engine, "checkout", bound)
        begin = time.monotonic()
        with pytest.raises(DatabaseFullError, match=r"no space is left .* free some space and run the same command"):
            database.record(many)
        assert time.monotonic() - begin < 25, "space does not come back by waiting"
        assert [record.variant for record in database.trials()] == ["lamport"]
        event.remove(database._engine, "checkout", bound)
    with Database.open(path) as database:
        assert len(database.record(many)) == 500
        with database.reading() as connection:
            assert connection.exec_driver_sql("PRAGMA integrity_check").scalars().all() == ["ok"]


def test_a_user_who_may_not_write_is_told_so(postgres_server: PostgresServer, postgres_url: str) -> None:
    with Database.open(postgres_url, create=True) as database:
        database.record([trial(environment=H200)])
    name = str(make_url(postgres_url).database)
    postgres_server.execute("CREATE ROLE reader LOGIN")
    try:
        postgres_server.execute("GRANT SELECT ON ALL TABLES IN SCHEMA public TO reader", database=name)
        url = make_url(postgres_url).set(username="reader").render_as_string(hide_password=False)
        with Database.open(url) as database:
            assert database.trials() != []
            with pytest.raises(DatabaseAccessError, match=r"cannot be written .*permission denied"):
                database.record([trial()])
    finally:
        postgres_server.execute("DROP OWNED BY reader", database=name)
        postgres_server.execute("DROP ROLE reader")
