from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from cli_samples import record, run
from db_samples import H200, OLDER, START, problem, trial

from tunedcomm import kernels
from tunedcomm.db.layers import Layer, load_snapshot, packaged_databases
from tunedcomm.db.maintenance import DatabaseStats, collect_stats
from tunedcomm.db.records import Trial
from tunedcomm.db.schema import HEAD
from tunedcomm.db.store import Database
from tunedcomm.dispatch.dispatcher import decide, source_hash_of
from tunedcomm.symm.layout import limits_for

CURRENT = {"library": "v1", "one_shot": "current", "two_shot": "current", "lamport": "current"}


def finals(size: int, **latencies: float) -> list[Trial]:
    """Finals of one size, the library's at 10 µs."""
    here: dict[str, Any] = {"problem": problem(size), "final": True}
    return [trial("library", 10.0, **here), *(trial(name, us, **here) for name, us in latencies.items())]


@pytest.fixture
def path(tmp_path: Path) -> Path:
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


def test_groups_and_the_file(path: Path) -> None:
    stats = stats_of(path)
    assert (stats.target, stats.schema, stats.num_bytes) == (str(path), HEAD, path.stat().st_size)
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


def test_server(postgres_url: str) -> None:
    record(postgres_url, *finals(1024, one_shot=5.0), trial("one_shot", None, status="crashed", after=3))
    stats = stats_of(postgres_url)
    (group,) = stats.groups
    assert (group.trials, group.finals, group.winners) == ({"ok": 2, "crashed": 1}, 2, {"one_shot": 1})
    assert group.newest == START + timedelta(seconds=3)
    assert stats.num_bytes is None


@pytest.mark.parametrize("shipped", packaged_databases(), ids=lambda path: path.name)
def test_winners_are_what_dispatch_runs(shipped: Path) -> None:
    """Near ties aside: dispatch looks at the neighbouring sizes there."""
    stats = stats_of(shipped, source_hash_of)
    for world_size in {group.world_size for group in stats.groups}:
        environment = stats.groups[0].environment
        snapshot = load_snapshot(environment, world_size, layers=[Layer("packaged", str(shipped))], strict=True)
        limits = limits_for(environment, world_size)
        asked = {row.problem for row in snapshot.rows}
        libraries = sum(decide(p, snapshot, limits).candidate.variant == "library" for p in asked)
        assert sum(group.winners.get("library", 0) for group in stats.groups) == libraries
        assert sum(sum(group.winners.values()) for group in stats.groups) == len(asked)


def test_verb(path: Path) -> None:
    shown = run("db", "stats", "--db", path)
    assert shown.code == 0
    for part in (f"schema {HEAD}", "15 trials", "NVIDIA H200", "torch 2.9.0", "1 hung, 1 infeasible", "KiB"):
        assert part in shown.out
    (entry,) = run("db", "stats", "--db", path, "--json", "--hardware", H200.digest[:8]).json
    assert (entry["num_bytes"], len(entry["groups"])) == (path.stat().st_size, 3)
    # The samples' sources are none of this version's.
    assert entry["groups"][1]["stale"] + entry["groups"][1]["unknown"] > 0
    assert run("db", "stats", "--db", path, "--op", "all_gather", "--json").out.count('"op"') == 0
