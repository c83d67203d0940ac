"""A SQLite file that is more than rows, or less than it says, is refused with a named error and in a bounded time."""

from __future__ import annotations

import contextlib
import itertools
import os
import sqlite3
import struct
import sys
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
from db_samples import H200, problem, trial

from tunedcomm.db import query
from tunedcomm.db.layers import Layer, load_snapshot
from tunedcomm.db.records import Reader
from tunedcomm.db.store import Database
from tunedcomm.errors import DatabaseAccessError, DatabaseCorruptError

ENDLESS = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n)"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "tuned.db"
    with Database.open(file, create=True) as database:
        database.record([trial(final=True), trial("two_shot", problem=problem(1 << 20))])
    return file


def change(path: Path, *statements: str) -> None:
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        for statement in statements:
            connection.execute(statement)


@pytest.mark.parametrize(
    ("statements", "what"),
    [
        (
            ["ALTER TABLE trial RENAME TO kept", f"CREATE VIEW trial AS {ENDLESS} SELECT kept.* FROM kept, n"],
            "view trial",
        ),
        (
            [
                "ALTER TABLE tunedcomm_version RENAME TO kept",
                f"CREATE VIEW tunedcomm_version AS {ENDLESS} SELECT '0003' FROM n",
            ],
            "view tunedcomm_version",
        ),
        (["ALTER TABLE pin RENAME TO kept", "CREATE VIEW PIN AS SELECT * FROM kept"], "view PIN"),
        (["DROP TABLE pin", "CREATE VIRTUAL TABLE pin USING rtree(id, a, b)"], "table pin"),
    ],
)
def test_what_is_no_plain_table_is_not_written_and_read_in_a_bounded_time(
    path: Path, statements: list[str], what: str
) -> None:
    change(path, *statements)
    begin = time.monotonic()
    with pytest.raises(DatabaseCorruptError, match=f"holds a {what} where tunedcomm has plain tables"):
        Database.open(path)
    with contextlib.suppress(DatabaseCorruptError), Database.open(path, readonly=True) as database:
        database.trials()
        database.pins()
    assert len(load_snapshot(H200, 4, layers=[Layer("user", str(path))]).rows) in (0, 2)
    assert time.monotonic() - begin < 60


@pytest.mark.skipif(sys.version_info < (3, 11), reason="sqlite3 sets limits from Python 3.11 on")
def test_a_column_that_is_computed_is_read_in_a_bounded_time(path: Path) -> None:
    change(
        path,
        "ALTER TABLE trial RENAME reason TO kept",
        "ALTER TABLE trial ADD reason TEXT AS (hex(zeroblob(900000000)))",
    )
    begin = time.monotonic()
    with Database.open(path, readonly=True) as database, pytest.raises(DatabaseCorruptError):
        database.trials()
    assert time.monotonic() - begin < 30


def test_other_views_and_tables_are_none_of_our_business(path: Path) -> None:
    change(
        path, "CREATE VIEW best AS SELECT min(latency_p50_us) FROM trial", "CREATE TABLE notes (text, more AS (text))"
    )
    with Database.open(path) as database:
        database.record([trial()])
        assert len(database.trials()) == 3


def test_a_trigger_is_refused_where_it_would_be_fired(path: Path) -> None:
    change(path, "CREATE TRIGGER gone AFTER INSERT ON trial BEGIN DELETE FROM trial; END")
    with Database.open(path, readonly=True) as database:
        assert len(database.trials()) == 2
    with pytest.raises(DatabaseCorruptError, match="holds a trigger gone"):
        Database.open(path)


def many_levels(path: Path, table: str) -> None:
    """Let the inner pages of a table point at each other, so that it has more rows than could ever be read."""
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA journal_mode=DELETE")
        connection.execute("PRAGMA page_size=512")
        connection.execute("VACUUM")
        root = connection.execute("SELECT rootpage FROM sqlite_master WHERE name = ?", (table,)).fetchone()[0]
    data = bytearray(path.read_bytes())

    def children(page: int) -> list[int]:
        """Where the page's numbers of children are; empty for a leaf."""
        at = 512 * (page - 1)
        if data[at] not in (2, 5):
            return []
        cells = struct.unpack_from(">H", data, at + 3)[0]
        return [at + 8, *(at + struct.unpack_from(">H", data, at + 12 + 2 * i)[0] for i in range(cells))]

    def number(at: int) -> int:
        return int(struct.unpack_from(">I", data, at)[0])

    inner = [root]
    for page in inner:
        inner += [below for at in children(page) if children(below := number(at))]
    assert len(inner) >= 6
    leaf = number(children(inner[-1])[0])
    chain = [root, *inner[-6:], leaf]
    for page, below in itertools.pairwise(chain):
        for at in children(page):
            struct.pack_into(">I", data, at, below)
    path.write_bytes(data)


@pytest.mark.parametrize("table", ["trial", "ix_trial_snapshot"])
def test_pages_that_hold_each_other_end(path: Path, table: str) -> None:
    with Database.open(path) as database:
        database.record([trial(problem=problem(8 * i), config={"num_blocks": i}) for i in range(1, 4000)])
    many_levels(path, table)
    begin = time.monotonic()
    refused = []
    with Database.open(path, readonly=True) as database:
        readings: list[Callable[[], object]] = [database.trials, database.stats]
        readings.append(lambda: load_snapshot(H200, 4, layers=[Layer("user", str(path))], strict=True))
        for reading in readings:
            try:
                reading()
            except DatabaseCorruptError as error:
                refused.append(str(error))
    assert any("takes more to read than a file of its size can hold" in text for text in refused)
    assert time.monotonic() - begin < 120


def test_a_sound_file_stays_far_below_the_bound(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tunedcomm.db.engine._FREE_STEPS", 0)
    monkeypatch.setattr("tunedcomm.db.engine._STEPS_A_LOOK", 100)
    monkeypatch.setattr("tunedcomm.db.engine._STEPS_A_BYTE", 1)
    with Database.open(path) as database:
        database.record([trial(problem=problem(8 * i), config={"num_blocks": i % 9}) for i in range(1, 4000)])
    with Database.open(path, readonly=True) as database:
        assert len(database.trials()) == 4001
        assert database.stats()["trials"] == 4001
    assert len(load_snapshot(H200, 4, layers=[Layer("user", str(path))], strict=True).rows) == 4000


@pytest.mark.skipif(sys.version_info < (3, 11), reason="sqlite3 sets limits from Python 3.11 on")
def test_a_value_without_end(path: Path) -> None:
    change(path, "UPDATE trial SET reason = hex(zeroblob(20000000)) WHERE id = 1")
    with Database.open(path, readonly=True) as database:
        with pytest.raises(DatabaseCorruptError, match="takes more to read"):
            database.trials()
        assert database.stats()["trials"] == 2


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


def test_a_trial_of_no_problem_is_left_out_and_reported(path: Path) -> None:
    change(path, "UPDATE trial SET problem_id = 0 WHERE problem_id = 2")
    reader = Reader()
    with Database.open(path, readonly=True) as database, database.reading() as connection:
        found = list(query.all_trials(connection, reader))
    assert [trial.problem.shape for trial in found] == [(2048,)]
    assert reader.skipped.count == 1
    assert reader.skipped.first.startswith("trial 2: it refers to problem 0")
