"""The merged snapshot that a start keeps: it decides as the databases do, and every change of them is seen."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cli_samples import record
from db_samples import H200, OLDER, candidate, decide, problem, row, snapshot, trial

from tunedcomm.db import kept
from tunedcomm.db.kept import kept_snapshot
from tunedcomm.db.layers import load_snapshot, packaged_databases
from tunedcomm.db.sidecar import store_check, with_checks
from tunedcomm.db.store import Database
from tunedcomm.selection.snapshot import Check, Failure, Pinned, Snapshot

H100 = replace(H200, gpu="NVIDIA H100")
SOURCES = {"all_reduce.one_shot": "current"}


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("tunedcomm.db.layers.packaged_databases", list)
    monkeypatch.setattr(kept, "_STEP_NS", -(10**15))  # a database that was just written counts as settled
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """How often databases have been read since it was last called."""
    count, merge = [0], kept.merge

    def counted(*args: Any, **options: Any) -> Any:
        count[0] += 1
        return merge(*args, **options)

    def since() -> int:
        found, count[0] = count[0], 0
        return found

    monkeypatch.setattr(kept, "merge", counted)
    return since


def start(**changes: Any) -> Snapshot:
    """What rank 0 of a new process dispatches from."""
    given: dict[str, Any] = {"environment": H200, "world_size": 4, "borrow": (), "sources": SOURCES, **changes}
    return kept_snapshot(given.pop("environment"), given.pop("world_size"), **given)


def files(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "cache" / "tunedcomm").glob("*"))


def rich(path: Path) -> None:
    """Rows of two environments, of searches and finals; a failure, a pin, and what siblings lend."""
    record(
        path,
        trial("library", 10.0, final=True, latency_p10_us=1 / 3, samples=3),
        trial("one_shot", 0.1 + 0.2, final=True, baseline_p50_us=None),
        trial("lamport", 4.0, environment=OLDER, problem=problem(1 << 20)),
        trial("two_shot", 7.0, config={"num_blocks": 8, "wide": True, "kind": "µ"}, problem=problem(8192)),
        trial("two_shot", None, status="hung", problem=problem(4096)),
        trial("lamport", 3.0, final=True, environment=H100, problem=problem(1 << 14, in_place=True)),
    )
    with Database.open(path) as database:
        database.pin(problem(64), candidate("two_shot"), environment=H200, reason='µ "quoted"')


def test_a_kept_snapshot_is_the_databases_snapshot(
    tmp_path: Path, reads: Callable[[], int], caplog: pytest.LogCaptureFixture
) -> None:
    rich(tmp_path / "user.db")
    borrow = ("siblings", "H100")
    expected = load_snapshot(H200, 4, borrow=borrow)
    assert any(row.borrowed for row in expected.rows)
    assert expected.pins
    assert expected.failures
    assert expected.notes
    assert start(borrow=borrow) == expected
    assert reads() == 1
    found = start(borrow=borrow)
    assert reads() == 0
    assert found == expected
    for size in (64, 4096, 5000, 8192, 1 << 20, 1 << 24):
        for like in ({}, {"in_place": True}, {"mode": "eager"}):
            assert decide(found, problem(size, **like)) == decide(expected, problem(size, **like))
    assert all(note in caplog.text for note in expected.notes), "a start from the file warns as well"


def test_shipped_rows_are_exact(monkeypatch: pytest.MonkeyPatch, reads: Callable[[], int]) -> None:
    monkeypatch.undo()
    for path in packaged_databases():
        with Database.open(path, readonly=True, immutable=True) as database:
            environment = next(iter(database.trials())).environment
        for world_size in (2, 4):
            expected = load_snapshot(environment, world_size)
            assert Snapshot.from_dict(json.loads(json.dumps(expected.to_dict()))) == expected


def test_every_change_of_a_layer_is_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reads: Callable[[], int]
) -> None:
    user, site = tmp_path / "user.db", tmp_path / "sites"
    site.mkdir()
    monkeypatch.setenv("TUNEDCOMM_DB_PATH", str(site))

    def seen(num_rows: int) -> None:
        found = start()
        assert found == load_snapshot(H200, 4)
        assert len(found.rows) == num_rows
        assert reads() == 1, "the databases have changed"
        assert start() == found
        assert reads() == 0

    seen(0)
    record(user, trial("one_shot"))
    seen(1)
    record(site / "one.db", trial("lamport"))
    seen(2)
    with Database.open(user) as writer:
        writer.record([trial("two_shot")])
        assert user.with_name("user.db-wal").stat().st_size, "the row is in the log alone"
        seen(3)
        writer.record([trial("library")])
        seen(4)
    seen(4)
    (site / "one.db").unlink()
    seen(3)
    user.rename(tmp_path / "away.db")
    seen(0)
    (tmp_path / "away.db").rename(user)
    seen(3)
    record(site / "one.db", trial("lamport"))
    seen(4)
    monkeypatch.setenv("TUNEDCOMM_DB", str(site / "one.db"))
    monkeypatch.setenv("TUNEDCOMM_DB_PATH", str(user))
    seen(4)


def test_what_else_decides_is_part_of_the_key(tmp_path: Path, reads: Callable[[], int]) -> None:
    rich(tmp_path / "user.db")
    start()
    assert reads() == 1
    newer = replace(H200, driver="580.1")
    for changes in (
        {"borrow": ("H100",)},
        {"sources": {**SOURCES, "all_reduce.lamport": "other"}},
        {"environment": newer},
        {"environment": OLDER},
        {"world_size": 2},
    ):
        found = start(**changes)
        assert reads() == 1, changes
        of = changes.get("environment", H200), changes.get("world_size", 4)
        assert found == load_snapshot(*of, borrow=changes.get("borrow", ()))


@pytest.mark.parametrize("harm", ["empty", "half", "list", "rows", "digest", "binary", "folder"])
def test_a_damaged_file_costs_nothing_but_time(tmp_path: Path, reads: Callable[[], int], harm: str) -> None:
    rich(tmp_path / "user.db")
    expected = start()
    (file,) = files(tmp_path)
    text = file.read_text()
    held = json.loads(text)
    file.unlink()
    if harm == "folder":
        file.mkdir()
    elif harm == "binary":
        file.write_bytes(b"\xff\x00" * 99)
    else:
        rows = held["value"]["rows"]
        fewer = {**held["value"], "rows": {name: column[1:] for name, column in rows.items()}}
        other = {**held["value"], "world_size": 2}
        planted = {"empty": "", "half": text[: len(text) // 2], "list": "[]"}
        planted |= {"rows": json.dumps({**held, "value": fewer}), "digest": json.dumps({**held, "value": other})}
        file.write_text(planted[harm])
    reads()
    assert start() == expected
    assert reads() == 1
    assert start() == expected
    assert reads() == (harm == "folder"), "it was written anew, where that is possible"


def test_no_place_for_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reads: Callable[[], int]) -> None:
    rich(tmp_path / "user.db")
    (tmp_path / "file").touch()
    for place in ("/proc/none", str(tmp_path / "file")):
        monkeypatch.setenv("XDG_CACHE_HOME", place)
        assert start() == start() == load_snapshot(H200, 4)
        assert reads() == 2


def test_what_no_file_vouches_for_is_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reads: Callable[[], int], caplog: pytest.LogCaptureFixture
) -> None:
    def is_never_kept() -> None:
        assert start() == start()
        assert reads() == 2
        assert files(tmp_path) == []

    rich(tmp_path / "user.db")
    monkeypatch.setenv("TUNEDCOMM_DB_PATH", "postgresql+psycopg://u@127.0.0.1:1/none")
    is_never_kept()
    monkeypatch.setenv("TUNEDCOMM_DB_PATH", str(tmp_path / "none.db"))
    is_never_kept()
    assert "none.db" in caplog.text
    (tmp_path / "bad.db").write_bytes(b"no database" * 99)
    monkeypatch.setenv("TUNEDCOMM_DB_PATH", str(tmp_path / "bad.db"))
    is_never_kept()
    monkeypatch.delenv("TUNEDCOMM_DB_PATH")
    with monkeypatch.context() as network:
        network.setattr("tunedcomm.db.targets.file_system", lambda path, mounts: "nfs4")
        network.setenv("TUNEDCOMM_DB_NETWORK", "no")
        is_never_kept()
    with monkeypatch.context() as young:
        young.setattr(kept, "_STEP_NS", 10**12)
        is_never_kept()
    record(tmp_path / "user.db", trial("lamport", final=True, created_at=trial().created_at.replace(year=2999)))
    is_never_kept()


def test_a_write_between_two_looks_is_not_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record(tmp_path / "user.db", trial("one_shot"))
    merge = kept.merge

    def disturbed(*args: Any, **options: Any) -> Any:
        found = merge(*args, **options)
        record(tmp_path / "user.db", trial("lamport"))
        return found

    with monkeypatch.context() as once:
        once.setattr(kept, "merge", disturbed)
        assert len(start().rows) == 1
    assert files(tmp_path) == []
    assert len(start().rows) == 2


def test_checks_are_read_apart(tmp_path: Path, reads: Callable[[], int]) -> None:
    record(tmp_path / "user.db", trial("one_shot"))
    start()
    check = Check(problem=problem(), candidate=candidate("lamport"), source_hash="x", status="failed", why="wrong")
    store_check(H200, check)
    reads()
    assert with_checks(start()).checks == (check,)
    assert reads() == 0
    code = (
        "import sys; from tunedcomm.db import kept, misses, sidecar\n"
        "from tunedcomm.hardware import Environment\n"
        f"kept._STEP_NS = -(10**15); kept.all_layers.__globals__['packaged_databases'] = list\n"
        f"found = kept.kept_snapshot(Environment(**{H200.to_dict()!r}), 4, borrow=(), sources={SOURCES!r})\n"
        "print(len(found.rows), sidecar.with_checks(found).checks[0].status, 'sqlalchemy' in sys.modules)"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.split() == ["1", "failed", "False"]


def test_processes_at_once(tmp_path: Path) -> None:
    """Readers, each a process, beside a writer: every one sees rows that the database had meanwhile."""
    record(tmp_path / "user.db", trial("one_shot"))
    code = (
        "from tunedcomm.db import kept\n"
        "from tunedcomm.hardware import Environment\n"
        f"kept._STEP_NS = -(10**15); kept.all_layers.__globals__['packaged_databases'] = list\n"
        f"here = Environment(**{H200.to_dict()!r})\n"
        f"print([len(kept.kept_snapshot(here, 4, borrow=(), sources={SOURCES!r}).rows) for _ in range(25)])"
    )
    started = [subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) for _ in range(3)]
    ended = threading.Event()
    written = 1

    def write() -> None:
        nonlocal written
        while not ended.wait(0.05):
            record(tmp_path / "user.db", trial("lamport", config={"num_blocks": written}))
            written += 1

    writer = threading.Thread(target=write)
    writer.start()
    try:
        seen = [json.loads(process.communicate(timeout=120)[0]) for process in started]
    finally:
        ended.set()
        writer.join()
    assert all(counts == sorted(counts) and len(counts) == 25 for counts in seen), seen
    assert start() == load_snapshot(H200, 4)
    assert len(files(tmp_path)) == 1, "no file is left half-written"
    assert os.stat(files(tmp_path)[0]).st_mode & 0o077 == 0, "rows of a private database stay private"  # noqa: PTH116


def test_plain_values_of_every_kind() -> None:
    found = snapshot(
        [
            row("lamport", 0.1 + 0.2, latency_p10_us=1 / 3, latency_p90_us=2.9, environment=OLDER, drift=True),
            row("two_shot", 1e-7, 1 << 40, baseline_p50_us=None, trial_id=None, like={"in_place": True}),
        ],
        pins=(Pinned(problem=problem(2), candidate=candidate("two_shot"), reason='µ "quoted"'),),
        failures=(Failure(problem=problem(2), candidate=candidate("lamport"), source_hash="x", status="hung"),),
        notes=("a note",),
    )
    data = json.loads(json.dumps(found.to_dict()))
    assert Snapshot.from_dict(data) == found
    with pytest.raises(ValueError, match="digest"):
        Snapshot.from_dict({**data, "notes": []})
