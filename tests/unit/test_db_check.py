"""What `db check` finds, each fault planted; and that what it finds can be mended as it says."""

from __future__ import annotations

import json
import os
import sqlite3
from contextlib import closing
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
from db_samples import H200
from typer.testing import CliRunner

from tunedcomm import kernels
from tunedcomm.cli import main
from tunedcomm.db.layers import Layer, load_snapshot, packaged_databases
from tunedcomm.db.maintenance import Finding, Selection, check_database, prune
from tunedcomm.db.records import Trial, config_digest
from tunedcomm.db.schema import VERSION_TABLE
from tunedcomm.db.store import Database
from tunedcomm.dispatch.communicator import limits_for
from tunedcomm.dispatch.dispatcher import source_hash_of
from tunedcomm.spec import Candidate, Problem, candidates

PROBLEM = Problem("all_reduce", (32768,), "bfloat16", 4)
Sql = str | tuple[str, tuple[Any, ...]]


def sound(variant: str = "lamport", latency_us: float | None = 5.0, **changes: Any) -> Trial:
    """A trial as `tune` would store it: of a real variant, its config in the space, its source as it is now."""
    kernels.discover()
    limits = limits_for(H200, 4)
    first = next(c for c in candidates(PROBLEM, limits, "any") if c.variant == variant)
    values: dict[str, Any] = {
        "problem": PROBLEM,
        "environment": H200,
        "variant": variant,
        "numerics": "library" if variant == "library" else "ordered",
        "source_hash": source_hash_of("all_reduce", variant),
        "config": first.config_dict,
        "status": "ok",
        "latency_p10_us": latency_us,
        "latency_p50_us": latency_us,
        "latency_p90_us": latency_us,
        "samples": 20,
        "baseline_p50_us": None if latency_us is None else 12.0,
        "error": 1e-3,
        **changes,
    }
    return Trial(**values)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A sound database: 4 trials (ids 1 to 4), a pin, a run."""
    path = tmp_path / "tuned.db"
    with Database.open(path, create=True) as database:
        run = database.start_run(command="tunedcomm tune", seed=1, budget="", host="node")
        records = [sound("library", 12.0), sound(), sound("two_shot", 7.0), sound("one_shot", None, status="hung")]
        database.record([replace(record, run_id=run) for record in records])
        pinned = Candidate.of("all_reduce", "lamport", sound().config)
        database.pin(PROBLEM, pinned, environment=H200, reason="known good")
        database.finish_run(run)
    return path


def spoil(path: Path, *statements: Sql) -> None:
    with closing(sqlite3.connect(path)) as plain:
        plain.execute("PRAGMA foreign_keys=OFF")
        for statement in statements:
            text, values = (statement, ()) if isinstance(statement, str) else statement
            assert plain.execute(text, values).rowcount != 0, text
        plain.commit()


def check(path: Path | str) -> dict[str, list[Finding]]:
    found: dict[str, list[Finding]] = {}
    for finding in check_database(path, source_hash_of):
        found.setdefault(finding.name, []).append(finding)
    return found


def levels(path: Path | str) -> dict[str, str]:
    """The worst level of each thing that was looked at, without what is well."""
    order = ("ok", "warn", "fail")
    worst = {name: max((f.level for f in found), key=order.index) for name, found in check(path).items()}
    return {name: level for name, level in worst.items() if level != "ok"}


def told(path: Path | str) -> str:
    return "\n".join(f"{f.detail} -> {f.mend}" for found in check(path).values() for f in found if f.level != "ok")


def test_sound_database_is_sound(path: Path) -> None:
    before = path.read_bytes()
    assert levels(path) == {}
    assert path.read_bytes() == before
    assert {"side files", "permissions", "integrity", "references", "schema", "trials", "pins", "sources"} <= set(
        check(path)
    )


@pytest.mark.parametrize("shipped", packaged_databases(), ids=lambda path: path.name)
def test_shipped_databases_are_sound(shipped: Path) -> None:
    assert "fail" not in levels(shipped).values()


def test_server_is_looked_at_too(postgres_url: str) -> None:
    with Database.open(postgres_url, create=True) as database:
        (first,) = database.record([sound()])
        assert levels(postgres_url) == {}
        with database._engine.begin() as connection:
            connection.exec_driver_sql(f"UPDATE trial SET status = 'great' WHERE id = {first}")
    assert levels(postgres_url) == {"trials": "fail"}


ODD = {"num_blocks": 3}
LATER = (datetime.now(timezone.utc) + timedelta(days=30)).strftime("%Y-%m-%d %H:%M:%S.%f")
CASES: dict[str, tuple[Sql, str, str]] = {
    "problem's digest": ("UPDATE problem SET shape = '4096'", "problems", "its digest is"),
    "environment's digest": ("UPDATE environment SET num_sms = 7", "environments", "its digest is"),
    "config's digest": ("UPDATE trial SET config_digest = 'feed' WHERE id = 2", "trials", "config_digest is 'feed'"),
    "config outside the space": (
        ("UPDATE trial SET config = ?, config_digest = ? WHERE id = 2", ('{"num_blocks":3}', config_digest(ODD))),
        "trials",
        "trial 2: its config is outside of the space of lamport: num_blocks=3 is not in its axis",
    ),
    "unknown status": ("UPDATE trial SET status = 'great' WHERE id = 2", "trials", "unknown status 'great'"),
    "infinite latency": ("UPDATE trial SET latency_p50_us = 9e999 WHERE id = 2", "trials", "is not a time"),
    "percentiles that fall": ("UPDATE trial SET latency_p10_us = 9 WHERE id = 2", "trials", "percentiles do not rise"),
    "negative samples": ("UPDATE trial SET samples = -3 WHERE id = 2", "trials", "samples is not an integer"),
    "from the future": (f"UPDATE trial SET created_at = '{LATER}' WHERE id = 2", "trials", "made in the future"),
    "trial of no problem": ("UPDATE trial SET problem_id = 77 WHERE id = 2", "trials", "is not there"),
    "unknown numerics": ("UPDATE variant SET numerics = 'magic' WHERE name = 'lamport'", "variants", "'magic'"),
    "run without a time": ("UPDATE run SET started_at = 'noon'", "runs", "run 1"),
}


@pytest.mark.parametrize("name", CASES)
def test_planted_fault_is_found(path: Path, name: str) -> None:
    statement, where, text = CASES[name]
    spoil(path, statement)
    found = levels(path)
    assert found[where] == "fail", told(path)
    assert text in told(path)
    assert all(finding.mend for parts in check(path).values() for finding in parts if finding.level != "ok")


@pytest.mark.parametrize("name", ["config's digest", "percentiles that fall", "from the future"])
def test_readers_leave_out_what_it_finds(path: Path, name: str, caplog: pytest.LogCaptureFixture) -> None:
    """`db check` and the readers say the same of the same row, in the same words."""

    def variants_read() -> tuple[set[str], set[str]]:
        snapshot = load_snapshot(H200, 4, layers=[Layer("user", str(path))], strict=True)
        with Database.open(path, readonly=True) as database:
            return {row.candidate.variant for row in snapshot.rows}, {trial.variant for trial in database.trials()}

    assert variants_read() == ({"library", "lamport", "two_shot"}, {"library", "lamport", "two_shot", "one_shot"})
    spoil(path, CASES[name][0])
    assert variants_read() == ({"library", "two_shot"}, {"library", "two_shot", "one_shot"})
    (warned,) = [record.getMessage() for record in caplog.records]
    (found,) = [finding.detail for finding in check(path)["trials"]]
    reason = found.partition("make no sense: ")[2]
    assert reason.startswith("trial 2: ")
    assert f"the first: {reason}." in warned


def test_stale_and_unknown_variants_are_said_and_are_no_fault(path: Path) -> None:
    with Database.open(path) as database:
        odd = {"num_blocks": 3, "of": "an earlier space"}
        database.record([sound(source_hash="0" * 16, config=odd), sound(variant="two_shot", source_hash="1" * 16)])
    spoil(path, "UPDATE variant SET name = 'warp_drive' WHERE source_hash = '1111111111111111'")
    assert levels(path) == {"sources": "warn"}
    assert "1 of all_reduce lamport" in told(path)
    assert "1 of all_reduce warp_drive" in told(path)
    assert "db prune --stale" in told(path)


def test_pins(path: Path) -> None:
    spoil(path, """UPDATE pin SET config = '{"num_blocks":3}'""")
    assert levels(path) == {"pins": "fail"}
    assert "db unpin" in told(path)
    spoil(path, "UPDATE pin SET variant = 'warp_drive', config = '{}'")
    assert levels(path) == {"pins": "warn"}


def test_triggers_and_views_are_nothing_of_ours(path: Path) -> None:
    spoil(path, "CREATE TRIGGER quiet AFTER INSERT ON trial BEGIN DELETE FROM trial; END")
    assert levels(path) == {"objects": "fail"}
    assert "trigger quiet" in told(path)


def test_damage(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    raw[8192:20480] = os.urandom(12288)
    path.write_bytes(raw)
    assert levels(path)["integrity"] == "fail"
    assert "restore a copy" in told(path)
    path.write_bytes(bytes(raw[: len(raw) // 2 + 100]))
    assert "fail" in levels(path).values()
    path.write_bytes(b"no database " * 1000)
    assert levels(path) == {"integrity": "fail"}
    assert levels(path.with_name("none.db")) == {"file": "fail"}


def test_other_schemas(path: Path, tmp_path: Path) -> None:
    spoil(path, f"UPDATE {VERSION_TABLE} SET version_num = '0417'")
    assert levels(path) == {"schema": "fail"}
    assert "upgrade tunedcomm" in told(path)
    empty = tmp_path / "empty.db"
    empty.touch()
    assert levels(empty) == {"content": "fail"}


def test_what_a_killed_writer_left(path: Path) -> None:
    with closing(sqlite3.connect(path)) as writer:
        writer.execute("UPDATE run SET command = 'late'")
        writer.commit()
        assert levels(path) == {"side files": "warn"}
        assert "tuned.db-wal" in told(path)


def test_permissions(path: Path) -> None:
    path.chmod(0o666)
    assert levels(path) == {"permissions": "warn"}
    assert f"chmod o-w {path}" in told(path)
    path.chmod(0o644)
    path.parent.chmod(0o777)
    assert levels(path) == {"permissions": "warn"}


def invoke(*arguments: str) -> tuple[int, str]:
    shown = CliRunner().invoke(main.app, ["db", "check", *arguments])
    return shown.exit_code, shown.stdout


def test_verb(path: Path) -> None:
    assert invoke("--db", str(path))[0] == 0
    spoil(path, CASES["unknown status"][0])
    code, text = invoke("--db", str(path))
    assert code == 1
    assert "fail  trials" in text
    assert "-> `tunedcomm db prune --invalid` removes them" in text
    code, text = invoke("--db", str(path), "--json")
    assert code == 1
    (entry,) = json.loads(text)
    assert entry["database"] == str(path)
    assert {finding["level"] for finding in entry["findings"]} == {"ok", "fail"}


@pytest.mark.parametrize("name", ["unknown status", "unknown numerics"])
def test_what_makes_no_sense_can_be_removed(path: Path, name: str) -> None:
    """`db prune --invalid` is what the finding recommends."""
    spoil(path, CASES[name][0])
    with Database.open(path) as database:
        done = prune(database, Selection(invalid=True), source_hash_of, dry_run=False)
        assert done.trials == 1
        assert len(database.trials()) == 3
    assert levels(path) == {}
