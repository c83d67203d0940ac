"""Reading files beside which SQLite may not write: what was committed is read, or nothing is."""

from __future__ import annotations

import os
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from db_samples import H200, trial

from tunedcomm.db import layers as layers_module
from tunedcomm.db import netfs, readonly
from tunedcomm.db.layers import Layer, load_snapshot
from tunedcomm.db.readonly import Reading
from tunedcomm.db.store import Database
from tunedcomm.errors import DatabaseBusyError, DatabaseError

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
def _nothing_stays(monkeypatch: pytest.MonkeyPatch, ordinary_user: Path) -> Iterator[None]:
    """Copies lie where the test looks, and are gone at its end."""
    copies = ordinary_user / "copies"
    copies.mkdir(mode=0o777)
    copies.chmod(0o777)
    monkeypatch.setattr(readonly.tempfile, "tempdir", str(copies))
    yield
    if os.getuid() == 0:
        os.seteuid(0)
    assert list(copies.iterdir()) == []
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
    assert Reading.of(path).immutable
    assert _latencies(path) == [5.0] * COMMITTED


@pytest.mark.parametrize("without_shm", [False, True])
@pytest.mark.parametrize("how", ["committed", "torn"])
def test_a_log_that_a_killed_writer_left(media: Path, how: str, without_shm: bool) -> None:
    """As immutable the file would be without what the writer committed."""
    path = _make(media, "wal", killed=how)
    if without_shm:
        path.with_name(path.name + "-shm").unlink()
    _close(media)
    assert _latencies(path) == [7.0] * COMMITTED
    with Database.open(path, readonly=True) as database:
        assert database.path == path
        assert database.stats()["trials"] == COMMITTED


@pytest.mark.parametrize("closed", [True, False])
def test_a_journal_that_a_killed_writer_left(media: Path, closed: bool) -> None:
    """As immutable the file would be half way between two transactions; and a reader may not repair it anywhere."""
    path = _make(media, "delete", killed="torn")
    before = {entry.name: entry.read_bytes() for entry in media.iterdir()}
    if closed:
        _close(media)
    assert _latencies(path) == [7.0] * COMMITTED
    assert {entry.name: entry.read_bytes() for entry in media.iterdir()} == before, "a reader repairs nothing"


def test_a_journal_on_a_network(media: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(netfs, "file_system", lambda path, mountinfo: "nfs4")
    path = _make(media, "delete")
    assert Reading.of(path).immutable, "no lock is asked for"
    subprocess.run([sys.executable, "-c", _KILLED, str(path), "delete", "torn"], check=True)
    assert _latencies(path) == [7.0] * COMMITTED


def test_leftovers_that_cannot_be_copied_are_an_error(media: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = _make(media, "delete", killed="torn")

    def no_space(source: Path, target: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(readonly.shutil, "copyfile", no_space)
    with pytest.raises(DatabaseError, match=r"a writer was killed.*No space left.*open the database once where it can"):
        Database.open(path, readonly=True)


def test_a_file_that_never_rests_cannot_be_copied(media: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = _make(media, "delete", killed="torn")
    real = shutil.copyfile

    def copy_while_written(source: Path, target: Path) -> None:
        real(source, target)
        with path.open("r+b") as file:
            file.seek(24)
            counter = int.from_bytes(file.read(4), "big") + 1
            file.seek(24)
            file.write(counter.to_bytes(4, "big"))

    monkeypatch.setattr(readonly.shutil, "copyfile", copy_while_written)
    monkeypatch.setattr(readonly, "_PAUSE_S", 0.0)
    with pytest.raises(DatabaseBusyError, match="is being written by another host or user"):
        Database.open(path, readonly=True)


@pytest.mark.parametrize("writes", [1, 10**9])
def test_a_file_that_changes_while_it_is_read_is_read_again(
    media: Path, monkeypatch: pytest.MonkeyPatch, writes: int
) -> None:
    """A writer whom no lock of ours reaches: whatever was read meanwhile may be torn."""
    monkeypatch.setattr(netfs, "file_system", lambda path, mountinfo: "nfs4")
    path = _make(media, "delete")
    real = layers_module.snapshot_query.ok_trials
    calls = []

    def written_meanwhile(*arguments: object, like: object) -> object:
        calls.append(1)
        if len(calls) <= writes:
            with sqlite3.connect(path) as connection:
                connection.execute("UPDATE trial SET latency_p50_us = ?", (5.0 + len(calls),))
            connection.close()
        return real(*arguments, like=like)  # type: ignore[arg-type]

    monkeypatch.setattr(layers_module.snapshot_query, "ok_trials", written_meanwhile)
    monkeypatch.setattr(layers_module, "_READ_TIMEOUT_S", 0.3)
    if writes == 1:
        assert _latencies(path) == [6.0] * COMMITTED
        assert len(calls) == 2
    else:
        with pytest.raises(DatabaseBusyError, match="written all the time"):
            _latencies(path)
        assert len(calls) > 2


_MOUNTED = """
import sys
sys.path[:0] = {path!r}
from db_samples import H200
from tunedcomm.db.layers import Layer, load_snapshot
from tunedcomm.db.store import Database
from tunedcomm.errors import DatabaseAccessError
found = load_snapshot(H200, 4, layers=[Layer("user", {database!r})], strict=True)
print(sorted(row.latency_p50_us for row in found.rows))
for target in ({database!r}, {database!r} + ".new"):
    try:
        Database.open(target, create=True)
    except DatabaseAccessError as error:
        print("TUNEDCOMM_DB" in str(error))
"""


@pytest.mark.parametrize(("mode", "killed"), [("wal", ""), ("wal", "committed"), ("delete", "torn")])
def test_read_only_media(media: Path, mode: str, killed: str) -> None:
    """A real read-only mount, on which root may not write either."""
    path = _make(media, mode, killed=killed)
    path.with_name(path.name + "-shm").unlink(missing_ok=True)
    mount = f"mount --bind {media} {media} && mount -o remount,ro,bind {media}"
    alone = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c"]
    if shutil.which("unshare") is None or subprocess.run([*alone, mount], capture_output=True, check=False).returncode:
        pytest.skip("this machine does not let the test mount anything")
    code = _MOUNTED.format(path=sys.path, database=str(path))
    command = f'{mount} && exec "$0" -c "$1"'
    done = subprocess.run([*alone, command, sys.executable, code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    expected = [7.0 if killed else 5.0] * COMMITTED
    assert done.stdout.split("\n") == [str(expected), "True", "True", ""]
