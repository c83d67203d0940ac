"""Reading files beside which SQLite may not write: what was committed is read, or nothing is."""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from db_samples import H200, trial

from tunedcomm.db.engine import is_immutable
from tunedcomm.db.layers import Layer, load_snapshot
from tunedcomm.db.store import Database
from tunedcomm.errors import DatabaseAccessError

COMMITTED = 3

# A writer that is killed: in the middle of a transaction, or with all committed but still in the log.
_KILLED = """
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


def _make(folder: Path, mode: str, *, killed: str = "") -> Path:
    path = folder / "tuned.db"
    with Database.open(path, create=True) as database:
        database.record([trial(config={"num_blocks": i}, final=True) for i in range(COMMITTED)])
    connection = sqlite3.connect(path)
    connection.execute(f"PRAGMA journal_mode={mode}")
    connection.close()
    if killed:
        subprocess.run([sys.executable, "-c", _KILLED, str(path), mode, killed], check=True)
        assert path.with_name(path.name + ("-wal" if mode == "wal" else "-journal")).stat().st_size > 0
    return path


def _close(folder: Path) -> None:
    """Nobody but root may write here, and root is not who reads."""
    for entry in folder.iterdir():
        entry.chmod(0o444)
    folder.chmod(0o555)
    if os.geteuid() == 0:
        os.seteuid(65534)


@pytest.fixture(autouse=True)
def _root_again(ordinary_user: Path) -> Iterator[None]:
    yield
    if os.getuid() == 0:
        os.seteuid(0)
    (ordinary_user / "media").chmod(0o755)


@pytest.fixture
def media(ordinary_user: Path) -> Path:
    folder = ordinary_user / "media"
    folder.mkdir()
    return folder


def _latencies(path: Path) -> list[float]:
    found = load_snapshot(H200, 4, layers=[Layer("site", str(path))], strict=True)
    return sorted(row.latency_p50_us for row in found.rows)


@pytest.mark.parametrize("mode", ["delete", "wal"])
def test_a_file_without_leftovers(media: Path, mode: str) -> None:
    path = _make(media, mode)
    _close(media)
    assert is_immutable(path)
    assert _latencies(path) == [5.0] * COMMITTED


@pytest.mark.parametrize("mode", ["delete", "wal"])
def test_what_a_killed_writer_left_is_an_error_where_sqlite_cannot_fold_it_in(media: Path, mode: str) -> None:
    """As immutable the file would lack what was committed, or hold half of what was not."""
    path = _make(media, mode, killed="torn")
    path.with_name(path.name + "-shm").unlink(missing_ok=True)
    before = {entry.name: entry.read_bytes() for entry in media.iterdir()}
    _close(media)
    with pytest.raises(DatabaseAccessError, match="a writer left that was killed: open it once"):
        _latencies(path)
    assert {entry.name: entry.read_bytes() for entry in media.iterdir()} == before, "a reader repairs nothing"


@pytest.mark.parametrize("how", ["committed", "torn"])
def test_a_log_that_a_killed_writer_left_is_read_where_sqlite_may_write(media: Path, how: str) -> None:
    path = _make(media, "wal", killed=how)
    assert _latencies(path) == [7.0] * COMMITTED
    with Database.open(path, readonly=True) as database:
        assert database.path == path
        assert database.stats()["trials"] == COMMITTED
