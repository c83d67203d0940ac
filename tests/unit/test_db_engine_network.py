"""Network file systems: finding them, refusing to write there, and the files that earlier versions wrote a host."""

from __future__ import annotations

import logging
import sqlite3
from pathlib import Path

import pytest
from db_samples import H200, trial
from typer.testing import CliRunner

from tunedcomm import kernels
from tunedcomm.cli import main
from tunedcomm.db import engine, layers
from tunedcomm.db.engine import file_system, network_of
from tunedcomm.db.layers import Layer, load_snapshot, writable_database
from tunedcomm.db.store import Database
from tunedcomm.errors import DatabaseAccessError, DatabaseBusyError

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
/secret /crypt fuse.gocryptfs rw 0 0
broken
"""


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/home.db", "ext4"),
        ("/data/tuned.db", "nfs4"),
        ("/database/tuned.db", "ext4"),
        ("/data/fast/tuned.db", "tmpfs"),
        ("/mnt/with space/tuned.db", "cifs"),
        ("/users/ann/.local/share/tunedcomm/tuned.db", "lustre"),
        ("/twice/tuned.db", "fuse.sshfs"),
    ],
)
def test_file_system_of_a_path(path: str, kind: str) -> None:
    assert file_system(path, MOUNTS) == kind


@pytest.mark.parametrize(
    ("kind", "network"),
    [
        *((kind, True) for kind in ("nfs4", "lustre", "fuse.sshfs", "fuse")),
        *((kind, False) for kind in ("ext4", "overlay", "fuse.gocryptfs", "")),
    ],
)
def test_what_counts_as_a_network(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kind: str, network: bool) -> None:
    monkeypatch.setattr(engine, "file_system", lambda path, mounts: kind)
    assert network_of(tmp_path) == (kind if network else "")
    monkeypatch.setenv("TUNEDCOMM_DB_NETWORK", "no")
    assert network_of(tmp_path) == ""


def _store(path: Path, *records: object) -> None:
    with Database.open(path, create=True) as database:
        database.record(records)  # type: ignore[arg-type]


@pytest.fixture
def shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A database with one trial, which from here on lies on NFS."""
    kernels.discover()
    monkeypatch.setattr(layers, "packaged_databases", list)
    path = tmp_path / "user.db"
    _store(path, trial(final=True))
    monkeypatch.setattr(engine, "file_system", lambda path, mounts: "nfs4")
    return path


def test_writing_names_the_ways_out(shared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for refused in (lambda: Database.open(shared), lambda: writable_database(str(shared)), writable_database):
        with pytest.raises(DatabaseAccessError, match=r"nfs4.*TUNEDCOMM_DB_PATH.*PostgreSQL.*TUNEDCOMM_DB_NETWORK=no"):
            refused()
    assert writable_database("postgresql+psycopg://host/name") == "postgresql+psycopg://host/name"
    monkeypatch.setenv("TUNEDCOMM_DB_NETWORK", "no")
    _store(shared, trial("two_shot"))
    with Database.open(shared, readonly=True) as database:
        assert len(database.trials()) == 2


@pytest.mark.parametrize(
    "verb", ["tune --op all_reduce --backend host", "db prune --failed --yes", "db verify --backend host"]
)
def test_verbs_that_change_a_database_refuse_it(shared: Path, verb: str) -> None:
    shown = CliRunner().invoke(main.app, [*verb.split(), "--db", str(shared)])
    assert isinstance(shown.exception, (DatabaseAccessError, SystemExit))
    assert "nfs4" in shown.output + str(shown.exception)


def test_a_file_that_a_host_has_open_is_not_read(shared: Path) -> None:
    connection = sqlite3.connect(shared)
    connection.execute("UPDATE trial SET samples = 1")
    connection.commit()
    with pytest.raises(DatabaseBusyError, match="nfs4"):
        Database.open(shared, readonly=True)
    connection.close()


def test_files_of_earlier_versions_are_found(
    shared: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    monkeypatch.setenv("TUNEDCOMM_DB_NETWORK", "no")
    (tmp_path / "user.backup.txt").touch()
    (tmp_path / "users.b.db").touch()
    own = tmp_path / "user.node07.db"
    _store(own, trial("two_shot"))
    monkeypatch.delenv("TUNEDCOMM_DB_NETWORK")
    caplog.set_level(logging.WARNING, "tunedcomm")
    assert len(load_snapshot(H200, 4).rows) == 1
    assert f"`tunedcomm db import {own}`" in caplog.text
    with pytest.raises(DatabaseAccessError, match=r"db import .*user\.node07\.db"):
        writable_database()
    monkeypatch.setattr(engine, "file_system", lambda path, mounts: "ext4")
    local = tmp_path / "local.db"
    shown = CliRunner().invoke(main.app, ["db", "import", str(own), "--db", str(local)])
    assert shown.exit_code == 0, shown.output
    assert len(load_snapshot(H200, 4, layers=[Layer("user", str(local))]).rows) == 1
