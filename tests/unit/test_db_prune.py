"""What `db prune` removes, and that nothing else goes with it, whoever reads and writes meanwhile."""

from __future__ import annotations

import random
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from cli_samples import record, refused, run
from db_samples import H200, OLDER, START, candidate, decide, problem, trial

from tunedcomm import kernels
from tunedcomm.db.layers import Layer, load_snapshot
from tunedcomm.db.maintenance import Pruned, Selection, prune
from tunedcomm.db.records import Trial
from tunedcomm.db.store import Database
from tunedcomm.db.values import DANGEROUS, FAILURES, STATUSES
from tunedcomm.selection.snapshot import Snapshot

SIZES = tuple(1 << exponent for exponent in range(10, 20, 2))
VARIANTS = ("library", "one_shot", "two_shot", "lamport", "atomic")


def hash_of(op: str, variant: str) -> str | None:
    return "current" if variant in VARIANTS else None


@pytest.fixture(autouse=True)
def _registered() -> None:
    kernels.discover()


def random_trial(source: random.Random) -> Trial:
    variant = source.choice(VARIANTS)
    status = source.choices(STATUSES, weights=[20, 1, 1, 2, 2, 2, 3])[0]
    values: dict[str, Any] = {
        "problem": problem(source.choice(SIZES), world_size=source.choice([4, 4, 4, 2])),
        "environment": source.choice([H200, H200, H200, OLDER]),
        "source_hash": source.choice(["current", "current", "earlier"]),
        "status": status,
        "final": status == "ok" and source.random() < 0.3,
        "after": source.randrange(40),
    }
    if variant != "library":
        values["config"] = {"num_blocks": source.choice([1, 2, 4, 8])}
    latency_us = round(source.uniform(2, 12), 3) if status in ("ok", "pruned") else None
    return trial(variant, latency_us, **values)


def make(path: Path, seed: int, count: int = 400) -> Path:
    source = random.Random(seed)
    with Database.open(path, create=True) as database:
        run = database.start_run(command="tunedcomm tune", seed=seed, budget="", host="node")
        database.record([replace(random_trial(source), run_id=run) for _ in range(count)])
        database.pin(problem(SIZES[1]), candidate("two_shot", 8), environment=H200, reason="known good")
        database.finish_run(run)
    return path


def pruned(path: Path | str, *, dry_run: bool = False, **selected: Any) -> Pruned:
    with Database.open(path, readonly=dry_run) as database:
        return prune(database, Selection(**selected), hash_of, dry_run=dry_run)


def snapshots(path: Path) -> list[Snapshot]:
    layers = [Layer("user", str(path))]
    return [load_snapshot(e, w, layers=layers, strict=True) for e in (H200, OLDER) for w in (2, 4)]


def trials_of(path: Path | str) -> list[Trial]:
    with Database.open(path, readonly=True) as database:
        return database.trials()


def test_superseded_changes_no_decision(tmp_path: Path) -> None:
    path = make(tmp_path / "tuned.db", 0)
    before, kept = snapshots(path), {t.id for t in trials_of(path)}
    done = pruned(path, superseded=True)
    assert 0 < done.trials < done.held == 400
    after = snapshots(path)
    assert [s.digest for s in after] == [s.digest for s in before]
    asked = [problem(size * factor // 8 // 2 * 2) for size in SIZES for factor in (5, 8, 12)]
    decisions = [[decide(s, p, policy="any") for p in asked] for s in (before[1], after[1])]
    assert decisions[0] == decisions[1]
    assert {t.id for t in trials_of(path)} < kept
    # Once is enough.
    assert pruned(path, superseded=True).trials == 0


STALE = [trial("one_shot", 3.0, source_hash="earlier", after=1), trial("two_shot", 3.0, source_hash="earlier", after=9)]
FAILED_ONES = [trial("lamport", None, status="hung", after=3), trial("lamport", None, status="compile_error", after=4)]
OLD_ONES = [trial("one_shot", 4.0, environment=OLDER), trial("library", 9.0, environment=OLDER, source_hash="other")]
# Not used any more since the first failure, but for what is good at its own problem later.
HIDDEN = [trial("lamport", 2.0, final=True), trial("lamport", 2.0, problem=problem(8192), after=8)]
KEPT = [trial("library", 10.0, final=True, after=8), trial("one_shot", 5.0, final=True, after=8)]


@pytest.mark.parametrize(
    ("selected", "gone", "along"),
    [
        ({"stale": True}, STALE, 0),
        ({"failed": True}, [*FAILED_ONES, *HIDDEN], 2),
        ({"environments": (OLDER.digest,)}, OLD_ONES, 0),
        ({"before": START + timedelta(seconds=2)}, [STALE[0], *OLD_ONES, HIDDEN[0]], 0),
        ({"stale": True, "environments": (H200.digest,), "before": START + timedelta(seconds=5)}, STALE[:1], 0),
    ],
)
def test_selectors(tmp_path: Path, selected: dict[str, Any], gone: list[Trial], along: int) -> None:
    everything = [*STALE, *FAILED_ONES, *OLD_ONES, *HIDDEN, *KEPT]
    path = Path(record(tmp_path / "tuned.db", *everything))
    for dry_run in (True, False):
        done = pruned(path, dry_run=dry_run, **selected)
        assert (done.trials, done.along, done.kept) == (len(gone), along, 0)
        assert sum(group["finals"] for group in done.groups) == sum(t.final for t in gone)
        assert (done.dry_run, done.compacted) == (dry_run, not dry_run)
        left = everything if dry_run else [t for t in everything if t not in gone]
        assert [replace(t, id=None) for t in trials_of(path)] == left


def chosen(size: int, *paths: Path) -> str:
    layers = [Layer("user" if number == 0 else "site", str(path)) for number, path in enumerate(paths)]
    snapshot = load_snapshot(H200, 4, layers=layers, strict=True)
    return decide(snapshot, problem(size)).candidate.variant


@pytest.mark.parametrize("status", DANGEROUS)
@pytest.mark.parametrize("size", [4096, 8192])
def test_what_failed_is_not_used_before_it_is_measured_again(tmp_path: Path, status: str, size: int) -> None:
    """Neither where it failed nor at another size, for which it would be predicted; whatever software it ran under."""
    sizes = (4096, 16384)
    good = [trial(final=True, problem=problem(s), environment=OLDER) for s in sizes]
    library = [trial("library", 10.0, final=True, problem=problem(s)) for s in sizes]
    other = trial(config={"num_blocks": 8}, latency_us=7.0, final=True, problem=problem(16384))
    search = trial(status="pruned", problem=problem(16384))
    failure = trial(latency_us=None, status=status, after=5, problem=problem(4096))
    path = Path(record(tmp_path / "tuned.db", *good, *library, other, search))
    assert chosen(size, path) == "one_shot"
    record(path, failure)
    assert chosen(4096, path) == "library"
    dry = pruned(path, dry_run=True, failed=True)
    assert (dry.trials, dry.along, dry.kept) == (4, 3, 0)
    assert pruned(path, failed=True, before=START + timedelta(days=1)).groups == dry.groups
    assert chosen(4096, path) == "library"
    left = [(t.variant, t.config.get("num_blocks")) for t in trials_of(path)]
    assert left == [("library", None)] * 2 + [("one_shot", 8)]


def test_failure_that_hides_another_database_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, site = tmp_path / "tuned.db", tmp_path / "site.db"
    record(site, trial(final=True), trial("library", 10.0, final=True))
    record(path, *(trial(v, None, status="hung", after=5) for v in ("one_shot", "two_shot")))
    assert chosen(4096, path, site) == "library"
    monkeypatch.setenv("TUNEDCOMM_DB_PATH", f"{site}:{path}")
    monkeypatch.setattr("tunedcomm.db.layers.packaged_databases", list)
    shown = run("db", "prune", "--db", path, "--failed", "--yes")
    assert (shown.code, "removed from" in shown.out) == (0, True)
    assert "tunedcomm tune --retry" in shown.err
    assert [t.variant for t in trials_of(path)] == ["one_shot"]
    assert chosen(4096, path, site) == "library"
    # Good there since: the failure does not count any more.
    record(site, trial(final=True, after=9))
    assert chosen(4096, path, site) == "one_shot"
    assert run("db", "prune", "--db", path, "--failed", "--yes").code == 0
    assert trials_of(path) == []


def test_reader_keeps_what_it_sees(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside one that reads the file cannot be compacted; the next time it is."""
    monkeypatch.setattr("tunedcomm.db.maintenance.BUSY_TIMEOUT_S", 0.2)
    path = make(tmp_path / "tuned.db", 5)
    with Database.open(path, readonly=True) as reader, reader.reading() as connection:
        count = connection.exec_driver_sql("SELECT count(*) FROM trial")
        assert count.scalar() == 400
        done = pruned(path, superseded=True)
        assert connection.exec_driver_sql("SELECT count(*) FROM trial").scalar() == 400
        assert not done.compacted
    again = pruned(path, superseded=True)
    assert again.compacted
    assert again.trials == 0
    assert len(trials_of(path)) == 400 - done.trials


def test_server(postgres_url: str) -> None:
    source = random.Random(6)
    with Database.open(postgres_url, create=True) as database:
        database.record([random_trial(source) for _ in range(300)])
        rows = database.stats()
        gone = sum(t.variant != "library" and t.source_hash != "current" for t in database.trials())
        assert prune(database, Selection(stale=True), hash_of).trials == gone
        done = prune(database, Selection(stale=True), hash_of, dry_run=False)
        assert (done.trials, done.unused, done.bytes_after, done.compacted) == (gone, {}, None, False)
        after = database.stats()
        assert after["trials"] == 300 - gone
        # Other hosts may be about to refer to them.
        assert [after[name] for name in ("problems", "variants", "environments")] == [
            rows[name] for name in ("problems", "variants", "environments")
        ]
        assert prune(database, Selection(superseded=True), hash_of, dry_run=False).trials > 0


def test_verb(tmp_path: Path) -> None:
    path = make(tmp_path / "tuned.db", 8)
    assert "A100" in refused("db", "prune", "--db", path, "--environment", "A100")
    shown = run("db", "prune", "--db", path, "--failed", "--environment", "h200", "--older-than", "1d")
    assert (shown.code, "would be removed" in shown.out, "--yes" in shown.err) == (0, True, True)
    assert len(trials_of(path)) == 400
    answer = run("db", "prune", "--db", path, "--failed", "--yes", "--json").json
    assert answer["trials"] == 400 - len(trials_of(path)) > 0
    assert {group["status"] for group in answer["groups"]} >= set(FAILURES)
    shown = run("db", "prune", "--db", path, "--superseded", "--yes")
    assert (shown.code, "KiB before" in shown.out) == (0, True)
