from __future__ import annotations

import shutil
import sqlite3
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from db_samples import H200, OLDER, candidate, decide, problem, trial
from transfer_samples import SIZES, config, everything, in_words, snapshot_of, store, sweep

from tunedcomm.db.layers import Layer, load_snapshot
from tunedcomm.db.store import Database
from tunedcomm.db.transfer import export_database
from tunedcomm.errors import DatabaseAccessError, DatabaseCorruptError, DatabaseError
from tunedcomm.selection.select import Decision
from tunedcomm.spec import Problem


def decisions(path: Path) -> list[Decision]:
    """At every size of the sweep, between them, and beyond."""
    sizes = sorted({size * factor // 8 for size in (*SIZES, 1 << 25) for factor in (1, 5, 8, 12, 16)})
    asked: list[Problem] = [problem(size // 2 * 2) for size in sizes]
    asked += [replace(p, dtype="float16", input_kind="symmetric") for p in asked]
    snapshot = snapshot_of(path)
    found = [decide(snapshot, p, policy=policy) for p in asked for policy in ("default", "any")]
    return [replace(decision, trial_id=None) for decision in found]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = store(tmp_path / "source.db", sweep())
    with Database.open(path) as database:
        database.pin(problem(SIZES[1]), candidate("two_shot", 8), environment=H200, reason="known good")
    return path


def test_decides_as_its_source_does(source: Path, tmp_path: Path) -> None:
    out = export_database([source], tmp_path / "out.db").path
    assert decisions(out) == decisions(source)
    assert len({str(d.candidate) for d in decisions(out)}) > 3
    for world_size in (2, 4):
        assert snapshot_of(out, world_size).digest == snapshot_of(source, world_size).digest


def test_keeps_what_is_needed_and_leaves_out_the_rest(source: Path, tmp_path: Path) -> None:
    export = export_database([source], tmp_path / "out.db")
    with Database.open(source, readonly=True) as database:
        before, all_trials = database.stats(), database.trials()
    with Database.open(export.path, immutable=True) as database:
        after, kept = database.stats(), database.trials()
        assert [run.command for run in database.runs()] == ["tunedcomm tune"]
        assert [pin.reason for pin in database.pins()] == ["known good"]
    same = ("finals", "pins", "runs", "environments", "problems", "variants")
    same += ("trials_incorrect", "trials_crashed", "trials_hung")
    assert {name: after[name] for name in same} == {name: before[name] for name in same}
    # Whether a candidate can run is asked of the variant, and why one of several did not run of nobody.
    assert after["trials_infeasible"] == after["trials_compile_error"] == 0
    assert all(record.run_id is not None for record in kept)
    assert {in_words(record) for record in kept} < {in_words(record) for record in all_trials}
    assert export.rows == after
    assert export.left_out == before["trials"] - after["trials"] > before["trials"] / 3
    # What `explain` says of a variant that never ran.
    words = {t.reason for t in kept if t.status == "pruned" and t.problem == problem(SIZES[2])}
    assert words == {"too slow"}


def test_is_one_file_that_needs_no_other(source: Path, tmp_path: Path) -> None:
    folder = tmp_path / "shipped"
    export = export_database([source], folder / "out.db")
    names = {"out.db", "out.db.manifest.json"}
    assert {path.name for path in folder.iterdir()} == names
    (folder / "out.db.manifest.json").unlink()
    with sqlite3.connect(f"file:{export.path}?mode=ro&immutable=1", uri=True) as plain:
        assert plain.execute("PRAGMA journal_mode").fetchone() == ("delete",)
        assert plain.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        assert plain.execute("PRAGMA foreign_key_check").fetchall() == []
        assert plain.execute("PRAGMA freelist_count").fetchone() == (0,)
    folder.chmod(0o555)
    try:
        assert snapshot_of(export.path).rows
        assert [path.name for path in folder.iterdir()] == ["out.db"]
    finally:
        folder.chmod(0o755)


def test_is_reproducible_and_says_its_digest(source: Path, tmp_path: Path) -> None:
    first = export_database([source], tmp_path / "first.db")
    second = export_database([source], tmp_path / "second.db")
    assert first.path.read_bytes() == second.path.read_bytes()
    assert first.sha256 == second.sha256
    shown = subprocess.run(["sha256sum", str(first.path)], capture_output=True, text=True, check=True)
    assert shown.stdout.split()[0] == first.sha256
    assert first.num_bytes == first.path.stat().st_size


def test_merging_loses_nothing(tmp_path: Path) -> None:
    """Finals alone, so that nothing is left out, of two sources that share a problem, an environment and a variant."""
    ours = [trial("one_shot", 5.0 + n, final=True, after=n, **config(n + 1)) for n in range(3)]
    theirs = [
        trial("one_shot", 7.0, final=True, after=10, **config(9)),
        trial("two_shot", 8.0, final=True, after=11, environment=OLDER),
        trial("lamport", 6.0, final=True, after=12, problem=problem(world_size=2), source_hash="other"),
    ]
    a = store(tmp_path / "a.db", ours, command="tune a")
    b = store(tmp_path / "b.db", theirs, command="tune b")
    export = export_database([a, b], tmp_path / "out.db")
    assert everything(export.path) == everything(a) | everything(b)
    assert len(everything(export.path)) == 6
    assert [(s.trials, s.known) for s in export.sources] == [(3, 0), (3, 0)]
    assert export.left_out == 0
    rows = export.rows
    assert (rows["trials"], rows["environments"], rows["problems"], rows["variants"], rows["runs"]) == (6, 2, 2, 3, 2)


def test_merging_a_copy_changes_nothing(source: Path, tmp_path: Path) -> None:
    """Also one that was made earlier, in whatever order they are given."""
    earlier = tmp_path / "earlier.db"
    shutil.copy(source, earlier)
    with Database.open(source) as database:
        database.record([trial("two_shot", 1.0, final=True, after=9999, **config(32))])
    alone = export_database([source], tmp_path / "alone.db")
    for name, sources in (("after", [earlier, source]), ("before", [source, earlier])):
        both = export_database(sources, tmp_path / f"{name}.db")
        assert both.rows == alone.rows
        assert both.left_out == alone.left_out
        assert sum(s.known for s in both.sources) == min(s.trials for s in both.sources)
        assert snapshot_of(both.path).digest == snapshot_of(alone.path).digest


def test_of_two_pins_the_newer_is_kept(tmp_path: Path) -> None:
    paths = [tmp_path / "a.db", tmp_path / "b.db"]
    for path, reason in zip(paths, ("earlier", "later"), strict=True):
        store(path, [trial(final=True)])
        with Database.open(path) as database:
            database.pin(problem(), candidate("two_shot"), environment=H200, reason=reason)
    for sources in (paths, paths[::-1]):
        export = export_database(sources, tmp_path / "out.db", force=True)
        with Database.open(export.path, readonly=True) as database:
            assert [pin.reason for pin in database.pins()] == ["later"]


def refused(error: type[DatabaseError], sources: list[Any], out: Path, *, force: bool = False) -> str:
    before = out.read_bytes() if out.is_file() else None
    with pytest.raises(error) as caught:
        export_database(sources, out, force=force)
    assert (out.read_bytes() if out.is_file() else None) == before
    assert not list(out.parent.glob(f".{out.name}.*"))
    return str(caught.value)


def test_does_not_overwrite_unasked(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.db"
    export_database([store(tmp_path / "other.db", [trial()])], out)
    assert "--force" in refused(DatabaseAccessError, [source], out)
    assert export_database([source], out, force=True).rows["finals"] > 1
    assert snapshot_of(out).digest == snapshot_of(source).digest


def test_does_not_replace_what_the_sources_lack(source: Path, tmp_path: Path) -> None:
    """A database that somebody tuned into, with no manifest or with that of an export that it once was."""
    tuned = store(tmp_path / "tuned.db", [trial(latency_us=4.0)])
    added = tmp_path / "added.db"
    export_database([source], added)
    store(added, [trial(latency_us=4.0)])
    for out in (tuned, added):
        text = refused(DatabaseAccessError, [source], out, force=True)
        assert "holds 1 trials that the sources lack" in text
        assert f"tunedcomm db merge {out} --into" in text
        assert export_database([source, shutil.copy(out, tmp_path / "copy.db")], out, force=True).rows["finals"] > 1
        assert export_database([source], out, force=True).rows["finals"] > 1


def test_does_not_replace_a_source(source: Path, tmp_path: Path) -> None:
    link = tmp_path / "link.db"
    link.symlink_to(source)
    for out in (source, link):
        assert "one of the sources" in refused(DatabaseAccessError, [source], out, force=True)


def test_a_server_is_exported_like_a_file_with_its_rows(source: Path, postgres_url: str, tmp_path: Path) -> None:
    with Database.open(source, readonly=True) as database:
        runs, records, pins = database.runs(), database.trials(), database.pins()
    with Database.open(postgres_url, create=True) as database:
        for run in runs:
            database.start_run(command=run.command, seed=run.seed, budget=run.budget, host=run.host)
        database.record(records)
        for pin in pins:
            database.pin(pin.problem, pin.candidate, environment=pin.environment, reason=pin.reason)
    out = export_database([postgres_url], tmp_path / "server.db")
    assert out.sources[0].source.startswith("postgresql+psycopg://")
    assert out.rows == export_database([source], tmp_path / "file.db").rows
    assert decisions(out.path) == decisions(source)
    for world_size in (2, 4):
        assert snapshot_of(out.path, world_size).digest == snapshot_of(source, world_size).digest
        live = load_snapshot(H200, world_size, layers=[Layer("packaged", postgres_url)], strict=True)
        assert live.digest == snapshot_of(source, world_size).digest
    both = export_database([postgres_url, out.path], tmp_path / "both.db")
    assert both.sources[1].known == both.sources[1].trials == out.rows["trials"]


@pytest.mark.parametrize(
    ("statement", "complaint"),
    [
        ("UPDATE problem SET shape = '77' WHERE id = 1", "its digest is"),
        ("DELETE FROM variant WHERE id = 1", "refers to variant"),
    ],
)
def test_refuses_sources_that_contradict(source: Path, tmp_path: Path, statement: str, complaint: str) -> None:
    forged = tmp_path / "forged.db"
    shutil.copy(source, forged)
    with sqlite3.connect(forged) as plain:
        plain.execute(statement)
    text = refused(DatabaseCorruptError, [source, forged], tmp_path / "out.db")
    assert complaint in text
    assert str(forged) in text
