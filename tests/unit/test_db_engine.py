"""Files that are hostile, on a network, read-only, locked or full, and servers that go away: bounded, nothing lost."""

from __future__ import annotations

import contextlib
import os
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from cli_samples import record, run
from db_samples import H200, problem, trial
from postgres import PostgresServer
from sqlalchemy import event, make_url
from transfer_samples import change, rows_of

from tunedcomm.db import engine, layers, targets
from tunedcomm.db.engine import retry
from tunedcomm.db.layers import Layer, load_snapshot, writable_database
from tunedcomm.db.store import Database
from tunedcomm.db.targets import file_system, is_immutable, network_of
from tunedcomm.errors import (
    DatabaseAccessError,
    DatabaseAwayError,
    DatabaseBusyError,
    DatabaseCorruptError,
    DatabaseError,
    DatabaseFullError,
)

ENDLESS = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n)"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return Path(record(tmp_path / "tuned.db", trial(final=True), trial("two_shot", problem=problem(1 << 20))))


# A file that is more than rows, or less than it says


@pytest.mark.parametrize(
    ("table", "made", "what"),
    [
        ("trial", f"VIEW trial AS {ENDLESS} SELECT kept.* FROM kept, n", "view trial"),
        ("tunedcomm_version", f"VIEW tunedcomm_version AS {ENDLESS} SELECT '0003' FROM n", "view tunedcomm_version"),
        ("pin", "VIEW PIN AS SELECT * FROM kept", "view PIN"),
        ("pin", "VIRTUAL TABLE pin USING rtree(id, a, b)", "table pin"),
    ],
)
def test_what_is_no_plain_table_is_not_written_and_read_in_a_bounded_time(
    path: Path, table: str, made: str, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "QUERY_LIMIT_S", 1.0)
    change(path, f"ALTER TABLE {table} RENAME TO kept", f"CREATE {made}")
    begin = time.monotonic()
    with pytest.raises(DatabaseCorruptError, match=what):
        Database.open(path)
    with contextlib.suppress(DatabaseCorruptError), Database.open(path, readonly=True) as database:
        database.trials()
        database.pins()
        assert "n(i)" not in made, "what has no end was read to its end"
    assert len(load_snapshot(H200, 4, layers=[Layer("user", str(path))]).rows) in (0, 2)
    assert time.monotonic() - begin < 60


def test_the_deadline_is_of_each_query(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "QUERY_LIMIT_S", 0.5)
    with Database.open(path, readonly=True) as database:
        with database.reading() as connection:
            time.sleep(0.6)
            assert connection.exec_driver_sql("SELECT count(*) FROM trial").scalar() == 2
        with pytest.raises(DatabaseCorruptError, match="query"), database.reading() as connection:
            connection.exec_driver_sql(f"{ENDLESS} SELECT count(*) FROM n")


def test_other_views_and_tables_are_none_of_our_business(path: Path) -> None:
    change(path, "CREATE VIEW best AS SELECT id FROM trial", "CREATE TABLE notes (text, more AS (text))")
    with Database.open(path) as database:
        database.record([trial()])
        assert len(database.trials()) == 3


def test_a_trigger_is_refused_where_it_would_be_fired(path: Path) -> None:
    change(path, "CREATE TRIGGER gone AFTER INSERT ON trial BEGIN DELETE FROM trial; END")
    with Database.open(path, readonly=True) as database:
        assert len(database.trials()) == 2
    with pytest.raises(DatabaseCorruptError, match="trigger gone"):
        Database.open(path)


@pytest.mark.parametrize("suffix", ["-wal", "-shm", "-journal"])
@pytest.mark.parametrize("what", ["pipe", "directory", "link to itself", "device"])
def test_what_lies_beside_the_file_is_a_file(path: Path, suffix: str, what: str) -> None:
    side = path.with_name(path.name + suffix)
    match what:
        case "pipe":
            os.mkfifo(side)
        case "directory":
            side.mkdir()
        case "link to itself":
            side.symlink_to(side)
        case _:
            side.symlink_to("/dev/zero")
    for readonly in (True, False):
        with pytest.raises(DatabaseAccessError, match="remove it"):
            Database.open(path, readonly=readonly)


# Network file systems

MOUNTS = """\
/dev/sda1 / ext4 rw,relatime 0 0
proc /proc proc rw,nosuid 0 0
server:/export /data nfs4 rw,vers=4.2,addr=10.0.0.1 0 0
tmpfs /data/fast tmpfs rw,relatime 0 0
//box/share /mnt/with\\040space cifs rw 0 0
/etc/auto.users /users autofs rw,fd=6 0 0
mgs@tcp:/users /users/ann lustre rw 0 0
/dev/sdc1 /twice ext4 rw 0 0
me@host:/ /twice fuse.sshfs rw 0 0
broken
"""


def test_file_system_of_a_path() -> None:
    kinds = {
        "/home.db": "ext4",
        "/data/tuned.db": "nfs4",
        "/database/tuned.db": "ext4",
        "/data/fast/tuned.db": "tmpfs",
        "/mnt/with space/tuned.db": "cifs",
        "/users/ann/.local/share/tunedcomm/tuned.db": "lustre",
        "/twice/tuned.db": "fuse.sshfs",
    }
    assert {path: file_system(path, MOUNTS) for path in kinds} == kinds


@pytest.mark.parametrize(
    ("kinds", "is_network"),
    [(("nfs4", "lustre", "fuse.sshfs", "fuse"), True), (("ext4", "overlay", "fuse.gocryptfs", ""), False)],
)
def test_what_counts_as_a_network(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kinds: tuple[str, ...], is_network: bool
) -> None:
    for kind in kinds:
        monkeypatch.delenv("TUNEDCOMM_DB_NETWORK", raising=False)
        monkeypatch.setattr(targets, "file_system", lambda path, mounts, kind=kind: kind)
        assert network_of(tmp_path) == (kind if is_network else "")
        monkeypatch.setenv("TUNEDCOMM_DB_NETWORK", "no")
        assert network_of(tmp_path) == ""


@pytest.fixture
def shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user database with one trial, which from here on lies on NFS."""
    monkeypatch.setattr(layers, "packaged_databases", list)
    path = Path(record(tmp_path / "user.db", trial(final=True)))
    monkeypatch.setattr(targets, "file_system", lambda path, mounts: "nfs4")
    return path


def test_writing_to_a_network_names_the_ways_out(shared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for refused in (lambda: Database.open(shared), lambda: writable_database(str(shared)), writable_database):
        with pytest.raises(DatabaseAccessError, match=r"nfs4.*TUNEDCOMM_DB_PATH.*TUNEDCOMM_DB_NETWORK=no"):
            refused()
    assert writable_database("postgresql+psycopg://host/name") == "postgresql+psycopg://host/name"
    for verb in ("tune --op all_reduce --backend host", "db prune --failed --yes", "db verify --backend host"):
        ended = run(*verb.split(), "--db", shared)
        assert (ended.code, "nfs4" in ended.err) == (2, True), verb
    monkeypatch.setenv("TUNEDCOMM_DB_NETWORK", "no")
    record(shared, trial("two_shot"))
    with Database.open(shared, readonly=True) as database:
        assert len(database.trials()) == 2


def test_a_file_that_a_host_has_open_is_not_read(shared: Path) -> None:
    with closing(sqlite3.connect(shared)) as connection:
        connection.execute("UPDATE trial SET samples = 1")
        connection.commit()
        with pytest.raises(DatabaseBusyError, match="nfs4"):
            Database.open(shared, readonly=True)


# Files beside which SQLite may not write: what was committed is read, or nothing is

COMMITTED = 3
# A writer that is killed: in the middle of a transaction, or with all committed but still in the log.
KILLED = """
import os, sqlite3, sys
path, mode, torn = sys.argv[1], sys.argv[2], sys.argv[3] == "torn"
connection = sqlite3.connect(path, isolation_level=None)
connection.execute(f"PRAGMA journal_mode={mode}")
connection.execute("PRAGMA wal_autocheckpoint=0")
connection.execute("PRAGMA cache_size=1")
connection.execute("UPDATE trial SET latency_p50_us = 7.0")
if torn:
    connection.execute("BEGIN")
    connection.execute("UPDATE trial SET latency_p50_us = 1.0")
    connection.execute("CREATE TABLE filler (text TEXT)")
    connection.executemany("INSERT INTO filler VALUES (?)", [("x" * 500,)] * 2000)
os._exit(0)
"""


@pytest.fixture
def media(ordinary_user: Path) -> Iterator[Path]:
    folder = ordinary_user / "media"
    folder.mkdir()
    yield folder
    if os.getuid() == 0:
        os.seteuid(0)
    folder.chmod(0o755)


def committed(folder: Path, mode: str, *, killed: str = "") -> Path:
    path = folder / "tuned.db"
    record(path, *(trial(config={"num_blocks": i}, final=True) for i in range(COMMITTED)))
    change(path, f"PRAGMA journal_mode={mode}")
    if killed:
        subprocess.run([sys.executable, "-c", KILLED, str(path), mode, killed], check=True)
        assert path.with_name(path.name + ("-wal" if mode == "wal" else "-journal")).stat().st_size > 0
    return path


def close(folder: Path) -> None:
    """Nobody but root may write here, and root is not who reads."""
    for entry in folder.iterdir():
        entry.chmod(0o444)
    folder.chmod(0o555)
    if os.geteuid() == 0:
        os.seteuid(65534)


def latencies(path: Path) -> list[float]:
    return sorted(row.latency_p50_us for row in rows_of(path))


@pytest.mark.parametrize("mode", ["delete", "wal"])
def test_a_read_only_file_is_read_or_refused_if_a_killed_writer_left_something(media: Path, mode: str) -> None:
    """As immutable the file would lack what was committed, or hold half of what was not."""
    path = committed(media, mode)
    close(media)
    assert is_immutable(path)
    assert latencies(path) == [5.0] * COMMITTED
    if os.getuid() == 0:
        os.seteuid(0)
    media.chmod(0o755)
    for entry in media.iterdir():
        entry.unlink()
    path = committed(media, mode, killed="torn")
    path.with_name(path.name + "-shm").unlink(missing_ok=True)
    before = {entry.name: entry.read_bytes() for entry in media.iterdir()}
    close(media)
    with pytest.raises(DatabaseAccessError, match="a writer left that was killed"):
        latencies(path)
    assert {entry.name: entry.read_bytes() for entry in media.iterdir()} == before, "a reader repairs nothing"


@pytest.mark.parametrize("how", ["committed", "torn"])
def test_a_log_that_a_killed_writer_left_is_read_where_sqlite_may_write(media: Path, how: str) -> None:
    path = committed(media, "wal", killed=how)
    assert latencies(path) == [7.0] * COMMITTED
    with Database.open(path, readonly=True) as database:
        assert database.path == path
        assert database.stats()["trials"] == COMMITTED


# Databases that are away, locked or full


@pytest.fixture
def slept(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Seconds of each sleep; no other time passes."""
    naps: list[float] = []
    monkeypatch.setattr(engine, "time", SimpleNamespace(monotonic=lambda: sum(naps), sleep=naps.append))
    return naps


def failing(times: int, error: Exception) -> Callable[[], str]:
    """An operation that fails so many times."""
    errors = iter([error] * times)

    def operation() -> str:
        if (error := next(errors, None)) is not None:
            raise error
        return "done"

    return operation


@pytest.mark.parametrize("error", [DatabaseAwayError("away"), DatabaseBusyError("locked")])
def test_waits_with_one_warning_and_gives_up_at_the_limit(
    error: DatabaseError, caplog: pytest.LogCaptureFixture, slept: list[float]
) -> None:
    assert retry(failing(12, error), 600) == "done"
    assert len(slept) == 12
    assert 5 < sum(slept) < 60
    assert len(caplog.records) == 1
    slept.clear()
    with pytest.raises(type(error)):
        retry(failing(10**6, error), 30)
    assert sum(slept) == pytest.approx(30)
    assert len(slept) < 30
    slept.clear()
    with pytest.raises(type(error)):
        retry(failing(1, error), 0)
    assert slept == []


def lose_answers(database: Database, *, committed: bool) -> list[str]:
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
            raise DatabaseAwayError("server closed the connection unexpectedly")

    return seen


@pytest.mark.parametrize("committed", [True, False], ids=["carried out", "not carried out"])
def test_a_commit_whose_answer_was_lost_doubles_nothing(postgres_url: str, committed: bool) -> None:
    with Database.open(postgres_url, create=True, patience_s=30) as patient:
        seen = lose_answers(patient, committed=committed)
        run = patient.start_run(command="tunedcomm tune", seed=1, budget="", host="node")
        ids = patient.record([trial(config={"num_blocks": i}, run_id=run) for i in range(5)])
        ids += patient.record([trial("lamport", run_id=run)] * 2)
        patient.finish_run(run)
        assert seen == ["lost", "kept"] * 4
        stored = patient.trials()
        assert [one.id for one in stored] == ids
        assert [one.config["num_blocks"] for one in stored] == [0, 1, 2, 3, 4, 4, 4]
        assert [one.finished_at is not None for one in patient.runs()] == [True]


@pytest.mark.parametrize("reused", [False, True], ids=["forgotten", "given to another transaction"])
def test_a_transaction_that_a_crash_forgot_is_stored_again(
    postgres_server: PostgresServer, postgres_url: str, reused: bool
) -> None:
    lost: list[int] = []
    with Database.open(postgres_url, create=True, patience_s=30) as patient:
        first = patient.record([trial("library")])
        assert postgres_server.execute("CHECKPOINT") == []

        @event.listens_for(patient._engine, "commit")
        def _on_commit(connection: Any) -> None:
            if lost:
                return
            raw = connection.connection.driver_connection
            lost.append(raw.execute("SELECT txid_current()").fetchone()[0])
            raw.commit()  # into memory alone: synchronous_commit is off
            postgres_server.crash()
            postgres_server.start()
            while reused and postgres_server.execute("SELECT txid_current()")[0][0] < lost[0]:
                pass
            raise DatabaseAwayError("server closed the connection unexpectedly")

        ids = patient.record([trial(), trial("lamport")])
        assert [(one.id, one.variant) for one in patient.trials()] == [
            *zip(first, ["library"], strict=True),
            *zip(ids, ["one_shot", "lamport"], strict=True),
        ]
        assert patient.start_run(command="tunedcomm tune", seed=1, budget="", host="node") == patient.runs()[0].id


ROWS = 60


def record_slowly(url: str, name: str, failures: list[BaseException]) -> None:
    try:
        with Database.open(url, patience_s=60) as database:
            run = database.start_run(command=name, seed=None, budget="", host=name)
            for i in range(ROWS):
                database.record([trial(name, problem=problem(2 << i % 5), config={"num_blocks": i}, run_id=run)])
                time.sleep(0.02)
            database.finish_run(run)
    except BaseException as error:  # noqa: BLE001
        failures.append(error)


@pytest.mark.parametrize("is_crash", [False, True], ids=["stop", "crash"])
def test_a_server_that_restarts_in_the_middle_costs_nothing(
    postgres_server: PostgresServer, postgres_url: str, is_crash: bool, caplog: pytest.LogCaptureFixture
) -> None:
    # A crash costs nothing that the server said was stored.
    postgres_server.execute(f"ALTER DATABASE {make_url(postgres_url).database} SET synchronous_commit = on")
    Database.open(postgres_url, create=True).close()
    failures: list[BaseException] = []
    names = ["a", "b", "c", "d"] if is_crash else ["a", "b"]
    threads = [threading.Thread(target=record_slowly, args=(postgres_url, n, failures)) for n in names]
    for thread in threads:
        thread.start()
    for away_s in (1.0, 0.1, 0.1, 0.1) if is_crash else (1.0, 0.1):
        time.sleep(0.4)
        (postgres_server.crash if is_crash else postgres_server.stop)()
        time.sleep(away_s)
        postgres_server.start()
    for thread in threads:
        thread.join(60)
    assert failures == []
    with Database.open(postgres_url, readonly=True) as database:
        stored = [(r.variant, r.config["num_blocks"]) for r in database.trials()]
        assert sorted(stored) == sorted((name, i) for name in names for i in range(ROWS))
        assert len(database.runs()) == len(names)
    assert len(names) <= len(caplog.records) <= 4 * len(names)
    assert all("does not answer" in r.message or "has not ended" in r.message for r in caplog.records)


def test_a_locked_file_is_waited_for_and_readers_do_not_wait(tmp_path: Path) -> None:
    path = tmp_path / "tuned.db"
    with Database.open(path, create=True, busy_timeout_s=0.1, patience_s=30) as database:
        other = sqlite3.connect(path, check_same_thread=False, isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        with Database.open(path, busy_timeout_s=0.1) as hasty, pytest.raises(DatabaseBusyError):
            hasty.record([trial()])
        assert database.trials() == []
        release = threading.Timer(1.0, lambda: (other.execute("ROLLBACK"), other.close()))
        release.start()
        assert len(database.record([trial()])) == 1
        release.join()
        assert len(database.trials()) == 1


def test_no_space_says_so_at_once_and_keeps_what_was_recorded(tmp_path: Path) -> None:
    path = tmp_path / "tuned.db"
    many = [trial(config={"num_blocks": i}, reason="x" * 1000) for i in range(500)]
    with Database.open(path, create=True, patience_s=30) as database:
        database.record([trial("lamport")])

        def bound(connection: Any, *_: object) -> None:
            connection.execute("PRAGMA max_page_count = 60")

        event.listen(database._engine, "checkout", bound)
        begin = time.monotonic()
        with pytest.raises(DatabaseFullError, match="free some space"):
            database.record(many)
        assert time.monotonic() - begin < 25, "space does not come back by waiting"
        assert [record.variant for record in database.trials()] == ["lamport"]
        event.remove(database._engine, "checkout", bound)
    with Database.open(path) as database:
        assert len(database.record(many)) == 500
        with database.reading() as connection:
            assert connection.exec_driver_sql("PRAGMA integrity_check").scalars().all() == ["ok"]


def test_a_user_who_may_not_write_to_a_server_is_told_so(postgres_server: PostgresServer, postgres_url: str) -> None:
    record(postgres_url, trial())
    name = str(make_url(postgres_url).database)
    postgres_server.execute("CREATE ROLE reader LOGIN")
    try:
        postgres_server.execute("GRANT SELECT ON ALL TABLES IN SCHEMA public TO reader", database=name)
        url = make_url(postgres_url).set(username="reader").render_as_string(hide_password=False)
        with Database.open(url) as database:
            assert database.trials() != []
            with pytest.raises(DatabaseAccessError, match="permission denied"):
                database.record([trial()])
    finally:
        postgres_server.execute("DROP OWNED BY reader", database=name)
        postgres_server.execute("DROP ROLE reader")
