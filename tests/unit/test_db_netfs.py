"""Network file systems: finding them, a file for each host, and no write-ahead log there."""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import sqlite3
from pathlib import Path

import pytest
from db_samples import H200, trial
from typer.testing import CliRunner

from tunedcomm import kernels
from tunedcomm.cli import main
from tunedcomm.db import layers as layers_module
from tunedcomm.db import netfs
from tunedcomm.db.layers import Layer, layers, load_snapshot, named_layers, user_layers, writable_database
from tunedcomm.db.netfs import file_system, host_name, network_of, own_file
from tunedcomm.db.store import Database
from tunedcomm.errors import DatabaseCorruptError, SettingError
from tunedcomm.tuner.verify import VerifyOutcome, VerifySpec

MOUNTS = """\
21 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw
22 21 0:21 / /proc rw,nosuid shared:5 - proc proc rw
30 21 0:40 / /data rw,relatime shared:9 - nfs4 server:/export rw,vers=4.2,addr=10.0.0.1
31 30 0:41 / /data/fast rw,relatime - tmpfs tmpfs rw
32 21 0:42 / /mnt/with\\040space rw - cifs //box/share rw
33 21 0:43 / /users rw - autofs /etc/auto.users rw,fd=6
34 33 0:44 / /users/ann rw - lustre mgs@tcp:/users rw
35 21 0:45 / /covered/deep rw - nfs server:/old rw
36 21 8:2 / /covered rw - xfs /dev/sdb1 rw
37 21 0:46 / /twice rw - ext4 /dev/sdc1 rw
38 37 0:47 / /twice rw master:1 propagate_from:2 - fuse.sshfs me@host:/ rw
39 21 0:48 / /crypt rw - fuse.gocryptfs /secret rw
40 21 0:49 / /gone// rw
broken
41 x 0:50 / /data rw - ext4 /dev/sdd rw
"""


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/home.db", "ext4"),
        ("/data/tuned.db", "nfs4"),
        ("/data", "nfs4"),
        ("/database/tuned.db", "ext4"),
        ("/data/fast/tuned.db", "tmpfs"),
        ("/data/fastest/tuned.db", "nfs4"),
        ("/mnt/with space/tuned.db", "cifs"),
        ("/users/ann/.local/share/tunedcomm/tuned.db", "lustre"),
        ("/users/bob/tuned.db", "autofs"),
        ("/covered/deep/tuned.db", "xfs"),
        ("/twice/tuned.db", "fuse.sshfs"),
    ],
)
def test_file_system_of_a_path(path: str, kind: str) -> None:
    assert file_system(path, MOUNTS) == kind


@pytest.mark.parametrize("order", [1, -1])
def test_the_order_of_the_table_does_not_matter(order: int) -> None:
    table = "\n".join(sorted(MOUNTS.splitlines())[::order])
    assert file_system("/covered/deep/x", table) == "xfs"
    assert file_system("/data/fast/x", table) == "tmpfs"


def test_a_table_that_says_nothing() -> None:
    assert file_system("/data/x", "") == ""
    assert file_system("/data/x", "30 21 0:40 / /other rw - nfs4 s:/ rw") == ""
    assert file_system("/data/x", "30 30 0:40 / / rw - nfs4 s:/ rw") == "nfs4"


@pytest.mark.parametrize(
    ("kind", "network"),
    [
        *((kind, True) for kind in ("nfs", "nfs4", "lustre", "gpfs", "beegfs", "cifs", "smb3", "9p", "ceph", "wekafs")),
        *((kind, True) for kind in ("fuse.sshfs", "fuse.glusterfs", "fuse.juicefs", "fuse")),
        *(
            (kind, False)
            for kind in ("ext4", "xfs", "btrfs", "zfs", "tmpfs", "overlay", "fuseblk", "fuse.gocryptfs", "")
        ),
    ],
)
def test_what_counts_as_a_network(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kind: str, network: bool) -> None:
    monkeypatch.setattr(netfs, "file_system", lambda path, mountinfo: kind)
    assert network_of(tmp_path) == (kind if network else "")
    monkeypatch.setenv("TUNEDCOMM_DB_NETWORK", "no")
    assert network_of(tmp_path) == ""
    monkeypatch.setenv("TUNEDCOMM_DB_NETWORK", "per-host")
    assert network_of(tmp_path) != ""
    monkeypatch.setenv("TUNEDCOMM_DB_NETWORK", "sometimes")
    with pytest.raises(SettingError, match="TUNEDCOMM_DB_NETWORK='sometimes'"):
        network_of(tmp_path)


def test_links_are_followed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("/data/far")
    asked = []
    monkeypatch.setattr(netfs, "file_system", lambda path, mountinfo: asked.append(path) or "ext4")
    network_of(tmp_path / "link" / "tuned.db")
    assert asked == ["/data/far/tuned.db"]


@pytest.mark.parametrize(
    ("host", "name"),
    [("node07", "node07"), ("gpu-1.cluster.local", "gpu-1.cluster.local"), ("a/../b c\x00", "a-..-b-c"), ("..", None)],
)
def test_host_names_are_names_of_files(monkeypatch: pytest.MonkeyPatch, host: str, name: str | None) -> None:
    monkeypatch.setattr(netfs.socket, "gethostname", lambda: host)
    assert host_name() == name or (name is None and host_name().startswith("localhost-"))
    assert "/" not in host_name()


def test_hosts_without_a_name_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(netfs.socket, "gethostname", lambda: "localhost")
    found = set()
    for card in (1, 2):
        monkeypatch.setattr(netfs.uuid, "getnode", lambda card=card: card)
        found.add(host_name())
    assert found == {"localhost-000000000001", "localhost-000000000002"}


@pytest.fixture
def on_host(monkeypatch: pytest.MonkeyPatch) -> object:
    """Makes this process one of the host of that name, which finds all of its files on NFS."""
    monkeypatch.setattr(netfs, "file_system", lambda path, mountinfo: "nfs4")
    monkeypatch.setattr(layers_module, "packaged_databases", list)
    kernels.discover()

    def become(host: str) -> None:
        monkeypatch.setattr(netfs.socket, "gethostname", lambda: host)

    return become


def _store(path: str, *records: object) -> None:
    with Database.open(path, create=True) as database:
        database.record(records)  # type: ignore[arg-type]


def test_each_host_writes_its_own_file_and_reads_all(tmp_path: Path, on_host, caplog: pytest.LogCaptureFixture) -> None:  # type: ignore[no-untyped-def]
    named = tmp_path / "user.db"
    caplog.set_level(logging.WARNING, "tunedcomm")
    for host, variant in (("b", "one_shot"), ("a", "two_shot"), ("c.d", "lamport")):
        on_host(host)
        assert writable_database() == writable_database() == str(tmp_path / f"user.{host}.db")
        _store(writable_database(), trial(variant, final=True))
        assert not named.exists()
    assert writable_database(str(tmp_path / "user.c.d.db")) == str(tmp_path / "user.c.d.db"), "is this host's already"
    assert len(caplog.records) == 3
    assert "network file system (nfs4)" in caplog.text
    assert f"`tunedcomm db merge {tmp_path} --into FILE`" in caplog.text
    assert layers()[0] == Layer("user", str(tmp_path / "user.c.d.db"))
    found = load_snapshot(H200, 4)
    assert {row.candidate.variant for row in found.rows} == {"one_shot", "two_shot", "lamport"}
    assert {(row.layer, row.layer_rank) for row in found.rows} == {("user", 0)}
    on_host("z")
    assert load_snapshot(H200, 4).digest == found.digest, "whichever host reads"
    assert [layer.target for layer in named_layers(str(named))] == [
        str(tmp_path / f"user.{host}.db") for host in ("a", "b", "c.d")
    ]
    assert len(caplog.records) == 3, "reading says nothing"


def test_what_was_stored_before_is_still_read(tmp_path: Path, on_host) -> None:  # type: ignore[no-untyped-def]
    on_host("a")
    _store(str(tmp_path / "user.db"), trial("one_shot", 5.0))
    (tmp_path / "user.backup.txt").touch()
    (tmp_path / "users.b.db").touch()
    _store(writable_database(), trial("one_shot", 6.0, after=9))
    assert [Path(layer.target).name for layer in user_layers()] == ["user.a.db", "user.db"]
    assert [row.latency_p50_us for row in load_snapshot(H200, 4).rows] == [6.0], "the newest of one place"


def test_site_layers_come_after_all_files_of_the_user(tmp_path: Path, on_host, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[no-untyped-def]
    _store(str(tmp_path / "site.db"), trial("atomic"))
    monkeypatch.setenv("TUNEDCOMM_DB_PATH", str(tmp_path / "site.db"))
    for host in "ab":
        on_host(host)
        _store(writable_database(), trial("one_shot" if host == "a" else "two_shot"))
    ranks = {row.candidate.variant: (row.layer, row.layer_rank) for row in load_snapshot(H200, 4).rows}
    assert ranks == {"one_shot": ("user", 0), "two_shot": ("user", 0), "atomic": ("site", 1)}


def run(*arguments: str) -> tuple[int, str]:
    shown = CliRunner().invoke(main.app, list(arguments))
    assert shown.exception is None or isinstance(shown.exception, SystemExit), shown.exception
    return shown.exit_code, shown.stdout + shown.stderr


PINNED = ("--op", "all_reduce", "--shape", "2048", "--world-size", "4", "--hardware", "H200")


@pytest.mark.parametrize("named", [False, True])
def test_verbs_that_change_a_database_change_this_hosts_file(tmp_path: Path, on_host, named: bool) -> None:  # type: ignore[no-untyped-def]
    shared, db = tmp_path / "user.db", ("--db", str(tmp_path / "user.db")) if named else ()
    on_host("a")
    _store(writable_database(), trial(final=True), trial("two_shot", None, status="hung", after=3))
    for host in "abb":
        on_host(host)
        code, text = run("db", "pin", *PINNED, "--variant", "library", "--reason", f"by {host}", *db)
        assert (code, f"pinned in {tmp_path}/user.{host}.db" in text) == (0, True), text
    for host in "abc":
        on_host(host)
        assert [pin.reason for pin in load_snapshot(H200, 4).pins] == ["by b"], "the newest, whichever host reads"
    on_host("a")
    assert "1 of 2 trials" in run("db", "prune", "--failed", "--yes", *db)[1]
    assert run("db", "upgrade", *db)[0] == 0
    code, text = run("db", "unpin", *PINNED, *db)
    assert (code, f"still pinned in {tmp_path}/user.b.db" in text) == (1, True), text
    on_host("b")
    assert run("db", "unpin", *PINNED, *db)[0] == 0
    on_host("c")
    code, text = run("db", "unpin", *PINNED, *db)
    assert (code, "no pin of" in text) == (1, True), text
    assert load_snapshot(H200, 4).pins == ()
    assert not shared.exists()
    assert sorted(path.name for path in tmp_path.glob("user.*.db")) == ["user.a.db", "user.b.db"]


def test_verifying_reads_every_hosts_file_and_writes_this_hosts(  # type: ignore[no-untyped-def]
    tmp_path: Path, on_host, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_host("a")
    _store(writable_database(), trial(final=True))
    on_host("b")
    seen = []

    def look(spec: VerifySpec, opened: Database | None, progress: object) -> VerifyOutcome:
        assert opened is not None
        seen.append((opened.path, [layer.target for layer in spec.layers or ()]))
        return VerifyOutcome(environment=None, world_size=2, results=(), run_id=1, num_trials=0, num_gangs=0, seconds=0)

    monkeypatch.setattr("tunedcomm.tuner.verify.verify", look)
    assert run("db", "verify", "--backend", "host", "--db", str(tmp_path / "user.db"))[0] == 1  # nothing is stored
    assert seen == [(tmp_path / "user.b.db", [str(tmp_path / "user.a.db")])]
    assert not (tmp_path / "user.db").exists()


def test_servers_and_local_files_are_written_as_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, on_host) -> None:  # type: ignore[no-untyped-def]
    on_host("a")
    assert writable_database("postgresql+psycopg://host/name") == "postgresql+psycopg://host/name"
    monkeypatch.setattr(netfs, "file_system", lambda path, mountinfo: "ext4")
    assert writable_database("/x/y.db") == "/x/y.db"
    assert user_layers() == [Layer("user", str(tmp_path / "user.db"))]


def _journal_mode(path: Path) -> str:
    connection = sqlite3.connect(path)
    mode: str = connection.execute("PRAGMA journal_mode").fetchone()[0]
    connection.close()
    return mode


def test_no_write_ahead_log_on_a_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "tuned.db"
    _store(str(path), trial("one_shot"))
    assert _journal_mode(path) == "wal"
    monkeypatch.setattr(netfs, "file_system", lambda path, mountinfo: "nfs4")
    _store(str(path), trial("two_shot"))
    assert _journal_mode(path) == "delete", "also a file that was moved there"
    with Database.open(path) as database:
        with database.reading() as connection:
            assert connection.exec_driver_sql("PRAGMA synchronous").scalar() == 2
        assert [entry.name for entry in tmp_path.iterdir()] == ["tuned.db"]
        with Database.open(path, readonly=True) as reader:
            assert len(reader.trials()) == 2
    monkeypatch.setattr(netfs, "file_system", lambda path, mountinfo: "ext4")
    _store(str(path), trial("lamport"))
    assert _journal_mode(path) == "wal"


def _write_many(path: str, number: int) -> None:
    with Database.open(path, create=True) as database:
        for i in range(20):
            database.record([trial("one_shot", config={"num_blocks": 100 * number + i})])


@pytest.mark.slow
def test_processes_of_one_host_share_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Readers ask for no lock there, and see whole transactions all the same."""
    monkeypatch.setenv("TUNEDCOMM_DB_NETWORK", "per-host")
    path = writable_database()
    spawn = multiprocessing.get_context("spawn")
    writers = [spawn.Process(target=_write_many, args=(path, number)) for number in range(3)]
    for writer in writers:
        writer.start()
    sizes = []
    while any(writer.is_alive() for writer in writers):
        if Path(path).exists():
            with contextlib.suppress(DatabaseCorruptError):  # the tables are still to be made
                sizes.append(len(load_snapshot(H200, 4, layers=[Layer("user", path)], strict=True).rows))
        writers[0].join(0.01)
    assert [writer.exitcode for writer in writers] == [0, 0, 0]
    assert len(sizes) > 2
    with Database.open(path, readonly=True) as database:
        assert len(database.trials()) == 60
    assert _journal_mode(Path(path)) == "delete"


def test_the_name_of_an_own_file() -> None:
    host = host_name()
    assert own_file(Path("/x/tuned.db")) == Path(f"/x/tuned.{host}.db")
    assert own_file(Path("/x/tuned")) == Path(f"/x/tuned.{host}")
    assert own_file(Path(f"/x/tuned.{host}.db")) == Path(f"/x/tuned.{host}.db")
