"""`db check` finds each planted fault, and what it finds can be mended as it says."""

from __future__ import annotations

import os
import sqlite3
from contextlib import closing
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
from cli_samples import PROBLEM, real_trial, record, run
from db_samples import H200, OLDER, START, problem, trial
from transfer_samples import change

from tunedcomm import kernels
from tunedcomm.db.layers import Layer, load_snapshot, packaged_databases
from tunedcomm.db.maintenance import DatabaseStats, Finding, Selection, check_database, collect_stats, prune
from tunedcomm.db.records import Trial, config_digest
from tunedcomm.db.schema import HEAD, VERSION_TABLE
from tunedcomm.db.store import Database
from tunedcomm.kernels import source_hash_of


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A sound database: 4 trials (ids 1 to 4), a pin, a run."""
    path = tmp_path / "tuned.db"
    with Database.open(path, create=True) as database:
        run = database.start_run(command="tunedcomm tune", seed=1, budget="", host="node")
        trials = [real_trial(name, us) for name, us in {"library": 12.0, "lamport": 5.0, "two_shot": 7.0}.items()]
        trials.append(real_trial("one_shot", None, status="hung", final=False))
        database.record([replace(trial, run_id=run) for trial in trials])
        database.pin(PROBLEM, trials[1].candidate, environment=H200, reason="known good")
        database.finish_run(run)
    return path


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
    parts = {"side files", "permissions", "integrity", "references", "schema", "trials", "pins", "sources"}
    assert parts <= set(check(path))


@pytest.mark.parametrize("shipped", packaged_databases(), ids=lambda path: path.name)
def test_shipped_databases_are_sound(shipped: Path) -> None:
    assert levels(shipped) == {}


def test_server_is_looked_at_too(postgres_url: str) -> None:
    with Database.open(postgres_url, create=True) as database:
        (first,) = database.record([real_trial("lamport", 5.0)])
        assert levels(postgres_url) == {}
        with database._engine.begin() as connection:
            connection.exec_driver_sql(f"UPDATE trial SET status = 'great' WHERE id = {first}")
    assert levels(postgres_url) == {"trials": "fail"}


LATER = (datetime.now(timezone.utc) + timedelta(days=30)).strftime("%Y-%m-%d %H:%M:%S.%f")
ODD_DIGEST = config_digest({"num_blocks": 3})
CASES: dict[str, tuple[str, str, str]] = {
    "problem's digest": ("problem SET shape = '4096'", "problems", "its digest is"),
    "environment's digest": ("environment SET num_sms = 7", "environments", "its digest is"),
    "config's digest": ("trial SET config_digest = 'feed' WHERE id = 2", "trials", "config_digest is 'feed'"),
    "config outside the space": (
        f"trial SET config = '{{\"num_blocks\":3}}', config_digest = '{ODD_DIGEST}' WHERE id = 2",
        "trials",
        "num_blocks=3 is not in its axis",
    ),
    "unknown status": ("trial SET status = 'great' WHERE id = 2", "trials", "unknown status 'great'"),
    "percentiles that fall": ("trial SET latency_p10_us = 9 WHERE id = 2", "trials", "percentiles do not rise"),
    "from the future": (f"trial SET created_at = '{LATER}' WHERE id = 2", "trials", "made in the future"),
    "trial of no problem": ("trial SET problem_id = 77 WHERE id = 2", "trials", "is not there"),
    "unknown numerics": ("variant SET numerics = 'magic' WHERE name = 'lamport'", "variants", "'magic'"),
    "run without a time": ("run SET started_at = 'noon'", "runs", "run 1"),
}


@pytest.mark.parametrize("name", CASES)
def test_planted_fault_is_found(path: Path, name: str) -> None:
    statement, where, text = CASES[name]
    change(path, f"UPDATE {statement}")
    assert levels(path)[where] == "fail", told(path)
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
    change(path, f"UPDATE {CASES[name][0]}")
    assert variants_read() == ({"library", "two_shot"}, {"library", "two_shot", "one_shot"})
    (warned,) = [record.getMessage() for record in caplog.records]
    (found,) = [finding.detail for finding in check(path)["trials"]]
    reason = found.partition("are invalid: ")[2]
    assert reason.startswith("trial 2: ")
    assert reason in warned


def test_stale_and_unknown_variants_are_no_fault(path: Path) -> None:
    odd = {"num_blocks": 3, "of": "an earlier space"}
    earlier = real_trial("lamport", 5.0, source_hash="0" * 16, config=odd)
    record(path, earlier, real_trial("two_shot", 5.0, source_hash="1" * 16))
    change(path, "UPDATE variant SET name = 'warp_drive' WHERE source_hash = '1111111111111111'")
    assert levels(path) == {"sources": "warn"}
    for part in ("1 of all_reduce lamport", "1 of all_reduce warp_drive", "db prune --stale"):
        assert part in told(path)


def test_pins(path: Path) -> None:
    change(path, """UPDATE pin SET config = '{"num_blocks":3}'""")
    assert levels(path) == {"pins": "fail"}
    assert "db unpin" in told(path)
    change(path, "UPDATE pin SET variant = 'warp_drive', config = '{}'")
    assert levels(path) == {"pins": "warn"}


def test_triggers_and_views_are_nothing_of_ours(path: Path) -> None:
    change(path, "CREATE TRIGGER quiet AFTER INSERT ON trial BEGIN DELETE FROM trial; END")
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
    (path.parent / "empty.db").touch()
    assert levels(path.parent / "empty.db") == {"content": "fail"}


def test_a_newer_schema(path: Path) -> None:
    change(path, f"UPDATE {VERSION_TABLE} SET version_num = '0417'")
    assert levels(path) == {"schema": "fail"}
    assert "upgrade tunedcomm" in told(path)


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


@pytest.mark.parametrize("name", ["unknown status", "unknown numerics"])
def test_the_verb_names_what_makes_no_sense_and_prune_removes_it(path: Path, name: str) -> None:
    assert run("db", "check", "--db", path).code == 0
    change(path, f"UPDATE {CASES[name][0]}")
    shown = run("db", "check", "--db", path)
    assert shown.code == 1
    assert "tunedcomm db prune --invalid" in shown.out
    shown = run("db", "check", "--db", path, "--json")
    assert shown.code == 1
    (entry,) = shown.json
    assert entry["database"] == str(path)
    assert {finding["level"] for finding in entry["findings"]} == {"ok", "fail"}
    with Database.open(path) as database:
        assert prune(database, Selection(invalid=True), source_hash_of, dry_run=False).trials == 1
        assert len(database.trials()) == 3
    assert levels(path) == {}


# What a database amounts to


CURRENT = {"library": "v1", "one_shot": "current", "two_shot": "current", "lamport": "current"}


def finals(size: int, **latencies: float) -> list[Trial]:
    """Finals of one size, the library's at 10 µs."""
    here = {"problem": problem(size), "source_hash": "current", "baseline_p50_us": 10.0, "created_at": START}
    return [real_trial(name, us, **here) for name, us in {"library": 10.0, **latencies}.items()]


@pytest.fixture
def measured(tmp_path: Path) -> Path:
    """Three problems in one group, and others elsewhere."""
    trials = [
        *finals(1024, one_shot=5.0, two_shot=8.0),
        *finals(4096, one_shot=6.0, two_shot=2.5),
        *finals(1 << 20, one_shot=9.99, two_shot=20.0),  # within the noise of the library
        trial("lamport", 1.0, final=True, source_hash="earlier", after=5),
        trial("warp_drive", 0.1, final=True),
        trial("one_shot", None, status="hung", after=7),
        trial("one_shot", None, status="infeasible"),
        trial("one_shot", 3.0, problem=problem(1024, mode="eager")),
        trial("one_shot", 4.0, problem=problem(1024, world_size=2)),
        trial("two_shot", 4.0, environment=OLDER),
    ]
    return Path(record(tmp_path / "tuned.db", *trials))


def stats_of(path: Path | str, source_hash: Any = lambda op, variant: CURRENT.get(variant)) -> DatabaseStats:
    kernels.discover()
    with Database.open(path, readonly=True) as database:
        return collect_stats(database, source_hash)


def test_groups_and_the_file(measured: Path) -> None:
    stats = stats_of(measured)
    assert (stats.target, stats.schema, stats.num_bytes) == (str(measured), HEAD, measured.stat().st_size)
    assert (stats.rows["trials"], len(stats.groups)) == (16, 4)
    (group,) = [g for g in stats.groups if (g.environment, g.world_size, g.mode) == (H200, 4, "graph")]
    assert (group.op, group.dtype, group.problems) == ("all_reduce", "bfloat16", 3)
    assert group.trials == {"ok": 11, "hung": 1, "infeasible": 1}
    assert group.finals == 11
    assert group.winners == {"one_shot": 1, "two_shot": 1, "library": 1}
    assert group.library_share == pytest.approx(1 / 3)
    assert group.speedup == pytest.approx((10 / 5 * 10 / 2.5 * 1.0) ** (1 / 3))
    assert (group.stale, group.unknown) == (1, 1)
    assert (group.oldest, group.newest) == (START, START + timedelta(seconds=7))


def test_stats_of_a_server(postgres_url: str) -> None:
    record(postgres_url, *finals(1024, one_shot=5.0), trial("one_shot", None, status="crashed", after=3))
    stats = stats_of(postgres_url)
    (group,) = stats.groups
    assert (group.trials, group.finals, group.winners) == ({"ok": 2, "crashed": 1}, 2, {"one_shot": 1})
    assert group.newest == START + timedelta(seconds=3)
    assert stats.num_bytes is None


def test_stats_verb(measured: Path) -> None:
    shown = run("db", "stats", "--db", measured)
    assert shown.code == 0
    for part in (f"schema {HEAD}", "15 trials", "NVIDIA H200", "torch 2.9.0", "1 hung, 1 infeasible", "KiB"):
        assert part in shown.out
    (entry,) = run("db", "stats", "--db", measured, "--json", "--hardware", H200.digest[:8]).json
    assert (entry["num_bytes"], len(entry["groups"])) == (measured.stat().st_size, 3)
    # The samples' sources are none of this version's.
    assert entry["groups"][1]["stale"] + entry["groups"][1]["unknown"] > 0
    assert run("db", "stats", "--db", measured, "--op", "all_gather", "--json").out.count('"op"') == 0
