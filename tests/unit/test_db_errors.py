"""Bad input: every database that cannot be used gives a named error that says what to do; none is changed."""

from __future__ import annotations

import logging
import os
import sqlite3
import stat
from dataclasses import replace
from pathlib import Path

import pytest
from db_samples import H200, OLDER, candidate, problem, trial
from sqlalchemy import Text

from tunedcomm.cli.stored import read_layers
from tunedcomm.db.layers import Layer, is_absent, load_snapshot
from tunedcomm.db.maintenance import check_database
from tunedcomm.db.schema import Base
from tunedcomm.db.store import Database
from tunedcomm.errors import (
    DatabaseAccessError,
    DatabaseBusyError,
    DatabaseCorruptError,
    DatabaseError,
    DatabaseVersionError,
)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A good database with a few hundred trials, closed."""
    file = tmp_path / "tuned.db"
    with Database.open(file, create=True) as database:
        database.record([trial(config={"num_blocks": i}, latency_us=5 + i) for i in range(300)])
    return file


def _drop_privileges() -> None:
    if os.geteuid() == 0:
        os.seteuid(65534)


def test_a_directory(tmp_path: Path) -> None:
    with pytest.raises(DatabaseAccessError, match="is a directory or special file; give a file"):
        Database.open(tmp_path, create=True)


def test_missing(tmp_path: Path) -> None:
    for readonly in (False, True):
        with pytest.raises(DatabaseAccessError, match="does not exist; `tunedcomm tune` makes one"):
            Database.open(tmp_path / "none.db", readonly=readonly)
    assert list(tmp_path.iterdir()) == []


def test_a_parent_that_is_a_file(path: Path) -> None:
    for below in ("tuned.db", "deeper/tuned.db"):
        with pytest.raises(DatabaseAccessError, match=r"(Not a directory|File exists); check"):
            Database.open(path / below, create=True)


def test_not_a_regular_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo.db")
    with pytest.raises(DatabaseAccessError, match="special file"):
        Database.open(tmp_path / "fifo.db")


def test_unreadable(ordinary_user: Path) -> None:
    file = ordinary_user / "tuned.db"
    Database.open(file, create=True).close()
    file.chmod(0)
    _drop_privileges()
    with pytest.raises(DatabaseAccessError, match=r"cannot open database .*: Permission denied; check the permissions"):
        Database.open(file)


def test_not_writable(ordinary_user: Path) -> None:
    file = ordinary_user / "tuned.db"
    with Database.open(file, create=True) as database:
        database.record([trial()])
    file.chmod(stat.S_IRUSR | stat.S_IRGRP | stat.S_IROTH)
    _drop_privileges()
    with Database.open(file, readonly=True) as database:
        assert len(database.trials()) == 1
    with pytest.raises(DatabaseAccessError), Database.open(file) as database:
        database.record([trial()])
    with pytest.raises(DatabaseAccessError, match="set TUNEDCOMM_DB"):
        Database.open(ordinary_user / "deeper" / "tuned.db", create=True)


@pytest.mark.parametrize("content", [b"gpu,latency\nH200,2.9\n", b"SQLite format 3", bytes(4096)])
def test_not_a_database(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "table.csv"
    file.write_bytes(content)
    for create in (False, True):
        with pytest.raises(DatabaseCorruptError, match="is not a SQLite database"):
            Database.open(file, create=create)
    assert file.read_bytes() == content


def test_truncated(path: Path) -> None:
    content = path.read_bytes()
    for keep in (100, 4096, len(content) // 2, len(content) - 4096):
        path.write_bytes(content[:keep])
        with pytest.raises(DatabaseCorruptError, match=r"is damaged .* move it away and tune again"):
            Database.open(path)


def test_damaged_in_the_middle(path: Path) -> None:
    content = bytearray(path.read_bytes())
    # Everything but the header and the schema's page.
    content[4096:] = b"\x55" * (len(content) - 4096)
    path.write_bytes(content)
    with pytest.raises(DatabaseCorruptError), Database.open(path) as database:
        database.trials()


def test_empty_file(tmp_path: Path) -> None:
    file = tmp_path / "tuned.db"
    file.touch()
    for readonly in (False, True):
        with pytest.raises(DatabaseCorruptError, match="holds no tunedcomm tables"):
            Database.open(file, readonly=readonly)
    with Database.open(file, create=True) as database:
        assert database.trials() == []


def test_another_programs_database(tmp_path: Path) -> None:
    file = tmp_path / "places.sqlite"
    with sqlite3.connect(file) as connection:
        connection.execute("CREATE TABLE bookmarks (url TEXT)")
    before = file.read_bytes()
    for create in (False, True):
        with pytest.raises(DatabaseCorruptError, match="belongs to another program"):
            Database.open(file, create=create)
    with sqlite3.connect(file) as connection:
        assert connection.execute("SELECT name FROM sqlite_master").fetchall() == [("bookmarks",)]
    assert len(file.read_bytes()) == len(before)


@pytest.mark.parametrize("readonly", [False, True])
def test_written_by_a_newer_version(path: Path, readonly: bool) -> None:
    with sqlite3.connect(path) as connection:
        connection.execute("UPDATE tunedcomm_version SET version_num = '0999'")
    with pytest.raises(
        DatabaseVersionError, match=r"written by a newer tunedcomm \(schema '0999'.*: upgrade tunedcomm"
    ):
        Database.open(path, readonly=readonly)
    with sqlite3.connect(path) as connection:
        assert connection.execute("SELECT count(*) FROM trial").fetchone() == (300,)


def test_tables_missing_though_the_version_is_right(path: Path) -> None:
    with sqlite3.connect(path) as connection:
        connection.execute("DROP TABLE trial")
    with pytest.raises(DatabaseCorruptError, match="does not have the tables"), Database.open(path) as database:
        database.trials()


def test_locked_for_longer_than_the_busy_timeout(path: Path) -> None:
    with Database.open(path, busy_timeout_s=0.2) as database:
        other = sqlite3.connect(path, isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(DatabaseBusyError, match=r"locked by another writer .*; wait for it to end"):
            database.record([trial()])
        assert len(database.trials()) == 300, "readers do not wait for writers"
        other.execute("ROLLBACK")
        other.close()
        database.record([trial()])
        assert len(database.trials()) == 301


@pytest.mark.parametrize("url", ["nosuchdialect://host/name", "sqlite+nosuch:///x", "", "a\x00b"])
def test_not_a_usable_target(url: str) -> None:
    with pytest.raises(DatabaseAccessError):
        Database.open(url)


def test_passwords_stay_out_of_messages() -> None:
    with pytest.raises(DatabaseAccessError) as caught:
        Database.open("postgresql+nosuchdriver://user:secret@localhost/name")
    assert "secret" not in str(caught.value)


def test_create_needs_a_writable_database(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="create=True"):
        Database.open(tmp_path / "x.db", create=True, readonly=True)


# A database from elsewhere: whatever a row holds, it is left out with one warning.

_HOSTILE = [
    "UPDATE trial SET config = '{\"num_blocks\": ' WHERE id = 1",
    "UPDATE trial SET config = '[1, 2]' WHERE id = 1",
    'UPDATE trial SET config = \'{"num_blocks": {"a": 1}}\' WHERE id = 1',
    "UPDATE trial SET config = '{\"num_blocks\": NaN}' WHERE id = 1",
    "UPDATE trial SET config = x'ff00fe' WHERE id = 1",
    "UPDATE trial SET config = CAST(x'fffe' AS TEXT) WHERE id = 1",
    f"UPDATE trial SET config = '{'[' * 9000}' WHERE id = 1",
    f"UPDATE trial SET config = '{{\"num_blocks\": {'9' * 6000}}}' WHERE id = 1",
    "UPDATE trial SET latency_p50_us = 'fast' WHERE id = 1",
    "UPDATE trial SET latency_p50_us = -1.0 WHERE id = 1",
    "UPDATE trial SET latency_p50_us = 9e999 WHERE id = 1",
    "UPDATE trial SET latency_p50_us = NULL WHERE id = 1",
    "UPDATE trial SET baseline_p50_us = 0 WHERE id = 1",
    "UPDATE trial SET samples = 'many' WHERE id = 1",
    "UPDATE trial SET created_at = 'yesterday' WHERE id = 1",
    "UPDATE trial SET created_at = 12345678901234567890 WHERE id = 1",
    "UPDATE trial SET status = 'ok; DROP TABLE trial' WHERE id = 1",
    "PRAGMA foreign_keys=OFF; UPDATE trial SET variant_id = 99 WHERE id = 1",
    "PRAGMA foreign_keys=OFF; UPDATE trial SET problem_id = 99 WHERE id = 1",
    "UPDATE variant SET numerics = 'exact' WHERE id = 1",
    "UPDATE variant SET op = 'all_gather' WHERE id = 1",
    "UPDATE problem SET shape = '2048xbig' WHERE id = 1",
    f"UPDATE problem SET shape = '{'9' * 30}' WHERE id = 1",
    f"UPDATE problem SET shape = '{'2x' * 99}2' WHERE id = 1",
    "UPDATE problem SET dtype = 'float3' WHERE id = 1",
    "UPDATE problem SET world_size = 'four' WHERE id = 1",
    "UPDATE problem SET mode = x'00' WHERE id = 1",
    "UPDATE problem SET in_place = 7 WHERE id = 1",
    "UPDATE environment SET nodes = 'one' WHERE id = 1",
    "UPDATE environment SET driver = x'00ff' WHERE id = 1",
]


_TEXTS = [(table.name, c.name) for table in Base.metadata.sorted_tables for c in table.columns if type(c.type) is Text]


@pytest.mark.parametrize(("table", "column"), _TEXTS)
def test_a_byte_that_is_no_text_costs_no_other_row(tmp_path: Path, table: str, column: str) -> None:
    """Also not where `db check` looks at each row."""
    file = tmp_path / "bytes.db"
    good = trial("two_shot", problem=problem(1 << 20), environment=OLDER, final=True)
    with Database.open(file, create=True) as database:
        run = database.start_run(command="tunedcomm tune", seed=1, budget="", host="node")
        database.record([trial(final=True, run_id=run), good])
        database.pin(problem(), candidate("one_shot"), environment=H200, reason="")
    with sqlite3.connect(file) as connection:
        broken = f"CAST(CAST(\"{column}\" AS BLOB) || x'ff' AS TEXT)"
        connection.execute(f'UPDATE {table} SET "{column}" = {broken} WHERE id = 1')
    found = load_snapshot(H200, 4, layers=[Layer("user", str(file))], strict=True)
    assert good.problem in {row.problem for row in found.rows}
    with Database.open(file, readonly=True) as database:
        assert good.problem in {stored.problem for stored in database.trials()}
        assert OLDER in database.environments()
        assert len(database.runs()) == 1
        assert len(database.pins()) <= 1
    assert {"trials", "pins"} <= {finding.name for finding in check_database(file, lambda op, variant: None)}


@pytest.mark.parametrize("about", ["environment SET driver = driver || '1'", "problem SET layout = 'other'"])
def test_readers_skip_what_check_calls_unsound(tmp_path: Path, about: str) -> None:
    """A row that is not that of its digest is another one, whoever changed it."""
    file = tmp_path / "digest.db"
    with Database.open(file, create=True) as database:
        database.record([trial(final=True), trial("two_shot", problem=problem(1 << 20), environment=OLDER)])
    with sqlite3.connect(file) as connection:
        connection.execute(f"UPDATE {about} WHERE id = 1")
    findings = check_database(file, lambda op, variant: None)
    assert any(finding.level == "fail" and "trial 1" in finding.detail for finding in findings)
    found = load_snapshot(H200, 4, layers=[Layer("user", str(file))], strict=True)
    assert [row.candidate.variant for row in found.rows] == ["two_shot"]
    with Database.open(file, readonly=True) as database:
        assert [stored.variant for stored in database.trials()] == ["two_shot"]


def test_what_is_skipped_is_said_once_and_is_printable(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "spoilt.db"
    with Database.open(file, create=True) as database:
        database.record([trial(final=True), trial("two_shot", environment=replace(OLDER, torch="2\x1b[2J\u202e"))])
    with sqlite3.connect(file) as connection:
        connection.execute("UPDATE trial SET status = 'great' WHERE id = 1")
        connection.execute("UPDATE variant SET numerics = 'exact' WHERE id = 1")
    with caplog.at_level(logging.WARNING, "tunedcomm"), Database.open(file, readonly=True) as database:
        database.trials()
        with sqlite3.connect(file) as connection:
            connection.execute("UPDATE variant SET numerics = 'ordered' WHERE id = 1")
        database.trials()
        load_snapshot(H200, 4, layers=[Layer("user", str(file))], strict=True)
    assert len([said for said in caplog.messages if "skipped" in said]) == 1
    assert any("torch" in said for said in caplog.messages), "other software is told of"
    assert all(said.isprintable() for said in caplog.messages)


@pytest.mark.parametrize("statements", _HOSTILE)
def test_a_hostile_row_is_left_out(tmp_path: Path, statements: str, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "hostile.db"
    good = problem(1 << 20)
    other = trial("two_shot", problem=good, environment=H200)
    with Database.open(file, create=True) as database:
        database.record([trial(final=True), other])
        database.pin(problem(), candidate("one_shot"), environment=H200, reason="")
    with sqlite3.connect(file) as connection:
        connection.executescript(statements)
    with caplog.at_level(logging.WARNING, "tunedcomm"):
        found = load_snapshot(H200, 4, layers=[Layer("user", str(file))], strict=True)
    assert all(row.problem != problem() for row in found.rows)
    if "UPDATE environment" not in statements:
        assert [row.problem for row in found.rows] == [good]
    assert len([r for r in caplog.records if "make no sense" in r.message]) <= 1
    with Database.open(file) as database:
        assert len(database.trials()) <= 2
        database.environments()
        database.problems()
        database.pins()
        database.stats()


def test_a_bad_layer_is_left_out_with_one_warning(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    bad = path.parent / "bad.db"
    bad.write_bytes(b"x" * 5000)
    wanted = [Layer("site", str(bad)), Layer("site", str(path.parent / "gone.db")), Layer("packaged", str(path))]
    with caplog.at_level(logging.WARNING, "tunedcomm"):
        found = load_snapshot(H200, 4, layers=wanted)
        again = load_snapshot(H200, 4, layers=wanted)
    assert len(found.rows) == 2
    assert found == again
    messages = [record.message for record in caplog.records]
    assert len(messages) == 2
    assert "bad.db is not a SQLite database" in messages[0]
    assert "gone.db does not exist" in messages[1]
    with pytest.raises(DatabaseError):
        load_snapshot(H200, 4, layers=wanted, strict=True)


def test_a_user_database_in_an_unreadable_directory_is_not_taken_for_absent(
    ordinary_user: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    closed = ordinary_user / "closed"
    Database.open(closed / "tuned.db", create=True).close()
    closed.chmod(0)
    _drop_privileges()
    inside, outside = Layer("user", str(closed / "tuned.db")), Layer("user", str(ordinary_user / "none.db"))
    assert (is_absent(inside), is_absent(outside)) == (False, True)
    with caplog.at_level(logging.WARNING, "tunedcomm"):
        load_snapshot(H200, 4, layers=[inside, outside])
    assert len(caplog.records) == 1
    assert f"left out (user): cannot open database {closed / 'tuned.db'}: Permission denied" in caplog.text
    monkeypatch.setenv("TUNEDCOMM_DB", inside.target)
    assert inside in read_layers(None)
    monkeypatch.setenv("TUNEDCOMM_DB", outside.target)
    assert outside not in read_layers(None)
