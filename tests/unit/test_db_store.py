"""Recording and reading back: round trips, filters, runs, pins, append-only history."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path

import pytest
from db_samples import H200, OLDER, candidate, problem, trial
from sqlalchemy import text

from tunedcomm.db.store import Database
from tunedcomm.errors import DatabaseAccessError, DatabaseError
from tunedcomm.spec import Problem


@pytest.fixture
def database(database_url: str) -> Iterator[Database]:
    with Database.open(database_url, create=True) as opened:
        yield opened


def test_trials_come_back_as_they_were(database: Database) -> None:
    run = database.start_run(command="tunedcomm tune", seed=7, budget="60 s", host="node1")
    options = {"input_kind": "symmetric", "in_place": True, "layout": "nk", "scaling": "rowwise"}
    gemm = Problem("ag_gemm", (4096, 3584, 8192), "float16", 2, "", **options)  # type: ignore[arg-type]
    config = {"num_blocks": 4, "launch_pdl": True, "order": "rank"}
    times = {"latency_p10_us": 2.8, "latency_p90_us": 3.1, "samples": 200, "error": 1e-3}
    records = [
        trial("lamport", 2.9, config=config, final=True, run_id=run, **times),
        trial("library", 12.0, problem=gemm, environment=OLDER),
        trial("two_shot", None, status="hung", reason="'quoted' \"text\" µs", error=math.inf, after=5),
        trial("one_shot", None, status="infeasible", reason="too large", problem=problem(0)),
    ]
    ids = database.record(records)
    assert len(set(ids)) == 4
    assert database.trials() == [replace(record, id=key) for record, key in zip(records, ids, strict=True)]
    assert database.environments() == [H200, OLDER]
    assert database.problems() == sorted({record.problem for record in records})


def test_each_filter_narrows(database: Database) -> None:
    other = problem(8192, world_size=2)
    ids = database.record([trial(), trial(problem=other, final=True), trial(environment=OLDER), trial(status="pruned")])
    assert len(database.trials()) == 4
    assert [t.problem for t in database.trials(world_size=2)] == [other]
    assert [t.problem for t in database.trials(problem=other)] == [other]
    assert [t.id for t in database.trials(after_id=ids[1])] == ids[2:]
    assert database.trials(after_id=ids[-1]) == database.trials(op="all_gather") == []
    assert len(database.trials(op="all_reduce", problem=problem())) == 3


def test_record_is_all_or_nothing(database: Database) -> None:
    database.record([trial()])
    with pytest.raises(DatabaseError, match="nothing of this call was stored"):
        database.record([trial(), trial(run_id=4711)])
    assert len(database.trials()) == 1
    assert database.record([]) == []


def test_runs_keep_provenance(database: Database) -> None:
    run = database.start_run(command="tunedcomm tune --op all_reduce", seed=None, budget="", host="n")
    assert database.runs()[0].finished_at is None
    database.finish_run(run)
    (stored,) = database.runs()
    assert (stored.id, stored.command, stored.seed, stored.host) == (run, "tunedcomm tune --op all_reduce", None, "n")
    assert stored.finished_at is not None
    assert stored.finished_at >= stored.started_at
    assert stored.started_at.tzinfo is timezone.utc
    with pytest.raises(ValueError, match="has no run 99"):
        database.finish_run(99)
    with pytest.raises(ValueError, match="64 bits"):
        database.start_run(command="", seed=2**64, budget="", host="")


def test_a_pin_replaces_the_earlier_one_of_the_same_hardware(database: Database) -> None:
    elsewhere = replace(H200, gpu="NVIDIA H100")
    database.pin(problem(), candidate("one_shot"), environment=OLDER, reason="first")
    database.pin(problem(), candidate("two_shot"), environment=H200, reason="second")
    database.pin(problem(), candidate("lamport"), environment=elsewhere, reason="other machine")
    assert [(p.candidate.variant, p.reason) for p in database.pins()] == [
        ("two_shot", "second"),
        ("lamport", "other machine"),
    ]
    assert database.unpin(problem(), environment=OLDER)
    assert not database.unpin(problem(), environment=H200)
    assert not database.unpin(problem(1 << 20), environment=H200)
    assert [p.environment for p in database.pins()] == [elsewhere]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"latency_us": None}, "without latency_p50_us"),
        ({"latency_us": 0.0}, "latency_p50_us"),
        ({"baseline_p50_us": math.nan}, "baseline_p50_us"),
        ({"status": "fine"}, "'fine'"),
        ({"numerics": "exact"}, "'exact'"),
        ({"config": {"num_blocks": 1.5}}, "config"),
        ({"samples": -1}, "samples"),
        ({"variant": ""}, "variant"),
        ({"created_at": datetime(2026, 1, 1)}, "time zone"),
    ],
)
def test_a_record_refuses_nonsense(changes: dict[str, object], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        trial(**changes)  # type: ignore[arg-type]


def test_sqlite_is_set_up_for_concurrency(tmp_path: Path) -> None:
    with Database.open(tmp_path / "tuned.db", create=True) as database, database.reading() as connection:
        wanted = {
            "journal_mode": "wal",
            "synchronous": 1,
            "foreign_keys": 1,
            "busy_timeout": 30000,
            "trusted_schema": 0,
        }
        assert {name: connection.execute(text(f"PRAGMA {name}")).scalar() for name in wanted} == wanted


def test_any_url_is_accepted(tmp_path: Path) -> None:
    with Database.open(f"sqlite:///{tmp_path}/by_url.db", create=True) as database:
        database.record([trial()])
        assert database.path == tmp_path / "by_url.db"
        assert database.url == f"sqlite:///{tmp_path}/by_url.db"
    with Database.open(tmp_path / "by_url.db", readonly=True) as database:
        assert len(database.trials()) == 1
    for url in ("sqlite://", "sqlite:///:memory:", f"sqlite:///{tmp_path}/by_url.db?timeout=5"):
        with pytest.raises(DatabaseAccessError, match="give a file's path"):
            Database.open(url, create=True)


def test_an_immutable_database_leaves_no_side_files_and_refuses_to_write(tmp_path: Path) -> None:
    path = tmp_path / "shipped.db"
    with Database.open(path, create=True) as database:
        database.record([trial()])
    before = path.read_bytes()
    with Database.open(path, immutable=True) as database:
        assert len(database.trials()) == 1
        assert database.readonly
        with pytest.raises(DatabaseAccessError, match="open for reading only"):
            database.record([trial()])
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith("shipped")] == ["shipped.db"]
    assert path.read_bytes() == before
