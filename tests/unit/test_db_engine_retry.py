"""A database that is away, locked or full: waited for where that helps, nothing lost and nothing doubled."""

from __future__ import annotations

import logging
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
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
    DatabaseCorruptError,
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


def failing(times: int, error: Exception) -> tuple[Callable[[bool], str], list[bool]]:
    told: list[bool] = []

    def operation(again: bool) -> str:
        told.append(again)
        if len(told) <= times:
            raise error
        return "done"

    return operation, told


@pytest.mark.parametrize("error", [DatabaseAwayError("away"), DatabaseBusyError("locked")])
def test_waits_with_one_warning_and_says_that_it_runs_again(
    error: DatabaseError, caplog: pytest.LogCaptureFixture, clock: Clock
) -> None:
    operation, told = failing(12, error)
    with caplog.at_level(logging.WARNING, "tunedcomm"):
        assert retry(operation, 600) == "done"
    assert told == [False] + [True] * 12
    assert [record.message for record in caplog.records] == [f"{error}. Waiting for it, for up to 600 s"]
    assert 5 < clock.now < 60


def test_gives_up_at_the_limit(clock: Clock) -> None:
    operation, told = failing(10**6, DatabaseAwayError("away"))
    with pytest.raises(DatabaseAwayError):
        retry(operation, 30)
    assert clock.now == pytest.approx(30)
    assert len(told) < 30
    operation, told = failing(1, DatabaseAwayError("away"))
    with pytest.raises(DatabaseAwayError):
        retry(operation, 0)
    assert told == [False]


@pytest.mark.parametrize(
    "error", [DatabaseCorruptError("x"), DatabaseFullError("x"), DatabaseError("x"), KeyError("x")]
)
def test_other_errors_pass_at_once(error: Exception) -> None:
    operation, told = failing(1, error)
    with pytest.raises(type(error)):
        retry(operation, 600)
    assert told == [False]


def _lose_answers(database: Database, *, committed: bool) -> list[str]:
    """Break the connection at every first commit, before or after the server carries it out."""
    engine = database._engine
    seen: list[str] = []

    @event.listens_for(engine, "commit")
    def _on_commit(connection: Any) -> None:
        if len(seen) % 2 == 0:
            seen.append("lost")
            raw = connection.connection.driver_connection
            if committed:
                raw.commit()
            raw.close()
            raise sqlite3.OperationalError("database is locked") if database.path else _away()
        seen.append("kept")

    return seen


def _away() -> DatabaseAwayError:
    return DatabaseAwayError("server closed the connection unexpectedly")


@pytest.fixture
def patient(database_url: str) -> Iterator[Database]:
    with Database.open(database_url, create=True, patience_s=30) as database:
        yield database


@pytest.mark.parametrize("committed", [True, False], ids=["carried out", "not carried out"])
def test_a_commit_whose_answer_was_lost_doubles_nothing(patient: Database, committed: bool) -> None:
    seen = _lose_answers(patient, committed=committed)
    run = patient.start_run(command="tunedcomm tune", seed=1, budget="", host="node")
    batch = [trial(config={"num_blocks": i}, run_id=run) for i in range(5)]
    ids = patient.record(batch)
    twins = patient.record([trial("lamport", run_id=run)] * 2)
    patient.finish_run(run)
    assert seen == ["lost", "kept"] * 4
    with Database.open(patient.path or _url_of(patient), readonly=True) as database:
        stored = database.trials()
        assert [record.id for record in stored] == [*ids, *twins]
        assert [record.config["num_blocks"] for record in stored] == [0, 1, 2, 3, 4, 4, 4]
        assert [r.finished_at is not None for r in database.runs()] == [True]


def _url_of(database: Database) -> str:
    return database._target.url.render_as_string(hide_password=False)


def test_a_second_attempt_waits_for_a_commit_that_is_still_under_way(postgres_url: str) -> None:
    """The connection broke, but the server has not noticed and carries the commit out later."""
    from tunedcomm.db.store import append_trials

    record = trial()
    with Database.open(postgres_url, create=True) as first, Database.open(postgres_url) as second:
        with first._engine.connect() as connection:
            begun = connection.begin()
            ids = append_trials(connection, [record], key="batch", again=False)
            found: list[list[int]] = []
            thread = threading.Thread(
                target=lambda: found.append(
                    second._write(lambda c, _: append_trials(c, [record], key="batch", again=True))
                )
            )
            thread.start()
            thread.join(0.3)
            assert thread.is_alive()
            begun.commit()
        thread.join(10)
        assert found == [ids]
        assert len(second.trials()) == 1


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


@pytest.mark.parametrize(
    ("change", "error", "said"),
    [
        ({"database": "no_such_database"}, DatabaseAccessError, "refuses the connection"),
        ({"username": "nobody_of_that_name"}, DatabaseAccessError, "check user, password"),
        ({"query": {"host": "/nowhere"}}, DatabaseAwayError, "does not answer"),
    ],
)
def test_what_is_wrong_with_a_url_is_told(
    postgres_url: str, change: dict[str, Any], error: type[DatabaseError], said: str
) -> None:
    url = make_url(postgres_url).set(**change).render_as_string(hide_password=False)
    begin = time.monotonic()
    with pytest.raises(error, match=said):
        Database.open(url, create=True, patience_s=60)
    assert time.monotonic() - begin < 40


def test_a_server_without_connections_to_spare_counts_as_away(
    postgres_server: PostgresServer, postgres_url: str
) -> None:
    Database.open(postgres_url, create=True).close()
    name = make_url(postgres_url).database
    postgres_server.execute(f"ALTER DATABASE {name} CONNECTION LIMIT 0", "CREATE ROLE plain LOGIN SUPERUSER")
    try:
        postgres_server.execute("ALTER ROLE plain NOSUPERUSER")
        url = make_url(postgres_url).set(username="plain").render_as_string(hide_password=False)
        with pytest.raises(DatabaseAwayError, match="takes more connections"):
            Database.open(url, readonly=True)
    finally:
        postgres_server.execute("DROP ROLE plain")


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
