from __future__ import annotations

import shutil
import sqlite3
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from db_samples import H200, OLDER, candidate, decide, problem, trial
from transfer_samples import SIZES, config, everything, in_words, snapshot_of, store, sweep

from tunedcomm.cli.explain import _stored_reasons
from tunedcomm.db.layers import Layer, load_snapshot
from tunedcomm.db.store import Database
from tunedcomm.db.transfer import export_database
from tunedcomm.errors import (
    DatabaseAccessError,
    DatabaseAwayError,
    DatabaseBusyError,
    DatabaseCorruptError,
    DatabaseError,
)
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


def test_keeps_winners_and_runners_up_only(source: Path, tmp_path: Path) -> None:
    """At problems with finals the finalists, and the best two of what did not come so far; elsewhere the best two."""
    kept: dict[tuple[Problem, str, bool], list[float]] = {}
    with Database.open(export_database([source], tmp_path / "out.db").path or "", immutable=True) as database:
        for record in database.trials(environment=H200, world_size=4, status="ok"):
            if record.source_hash == "current" and record.problem != problem(SIZES[0]):
                key = (record.problem, record.variant, record.final)
                kept.setdefault(key, []).append(record.latency_p50_us or 0.0)
    for index, size in list(enumerate(SIZES))[1:]:
        found = {key[1:]: sorted(latencies) for key, latencies in kept.items() if key[0] == problem(size)}
        searched = {"two_shot": [4.125 + index, 4.25 + index], "lamport": [5.125 + index, 5.25 + index]}
        if index == 3:
            # Good again since it hung: kept beside the best two.
            searched["two_shot"].append(9.5)
            assert found == {(name, False): found[name, False] for name in ("one_shot", "two_shot", "lamport")}
            assert {name: found[name, False] for name in searched} == searched
        else:
            finals = {("library", True): [10.0], ("one_shot", True): [4.5], ("lamport", True): [4.4 + index]}
            assert found == {**finals, ("two_shot", False): searched["two_shot"]}


def test_keeps_the_newest_final_of_a_candidate(tmp_path: Path) -> None:
    finals = [trial("one_shot", 5.0 + n, final=True, after=n) for n in range(3)]
    export = export_database([store(tmp_path / "source.db", finals)], tmp_path / "out.db")
    with Database.open(tmp_path / "out.db", immutable=True) as database:
        assert [t.latency_p50_us for t in database.trials()] == [7.0]
    assert export.left_out == 2
    assert snapshot_of(tmp_path / "out.db").digest == snapshot_of(tmp_path / "source.db").digest


def test_explains_as_its_source_does(source: Path, tmp_path: Path) -> None:
    """Of variants without finals, that is: what has finals competes, and the comparison is the reason."""
    export_database([source], tmp_path / "out.db")
    finals = {(row.problem, row.candidate.variant) for row in snapshot_of(source).rows if row.final}

    def reasons(path: Path, asked: Problem) -> dict[str, str]:
        found = _stored_reasons(asked, H200, [Layer("user", str(path))])
        return {name: reason for name, reason in found.items() if (asked, name) not in finals}

    told = {asked: reasons(source, asked) for asked in map(problem, SIZES)}
    assert {asked: reasons(tmp_path / "out.db", asked) for asked in told} == told
    assert {"atomic", "one_shot", "two_shot"} <= {name for found in told.values() for name in found}


def test_exports_of_exports_are_the_same(source: Path, tmp_path: Path) -> None:
    """Nothing more is left out, for the file of a host that is merged with others."""
    one = export_database([source], tmp_path / "one.db")
    other = export_database([tmp_path / "one.db"], tmp_path / "other.db")
    assert (other.left_out, other.rows) == (0, one.rows)


def test_all_rows_if_asked_for(source: Path, tmp_path: Path) -> None:
    export = export_database([source], tmp_path / "out.db", everything=True)
    assert export.left_out == 0
    assert everything(tmp_path / "out.db") == everything(source)


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


def test_reads_beside_a_writer(source: Path, tmp_path: Path) -> None:
    with Database.open(source) as database:
        database.record([trial("one_shot", 1.5, final=True, problem=problem(SIZES[2]), **config(2))])
        assert source.with_name("source.db-wal").exists()
        before = database.stats()
        export = export_database([source], tmp_path / "out.db")
        assert database.stats() == before
    assert export.rows["finals"] == before["finals"]


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


def test_merging_knows_the_newest_source_of_a_variant(tmp_path: Path) -> None:
    """Finals of an older kernel must not hide what was measured of the newer one, whichever file comes first."""
    old = store(tmp_path / "old.db", [trial("one_shot", 5.0, final=True, source_hash="outdated")])
    new = store(tmp_path / "new.db", [trial("one_shot", 4.0, after=50, problem=problem())])
    for sources in ([old, new], [new, old]):
        export = export_database(sources, tmp_path / "out.db", force=True)
        assert decide(snapshot_of(export.path)).candidate == candidate("one_shot")


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


def test_a_run_that_ended_after_the_copy_has_ended(tmp_path: Path) -> None:
    path, copy = tmp_path / "a.db", tmp_path / "copy.db"
    with Database.open(path, create=True) as database:
        run = database.start_run(command="tune", seed=None, budget="", host="node")
        database.record([replace(trial(final=True), run_id=run)])
    shutil.copy(path, copy)
    with Database.open(path) as database:
        database.finish_run(run)
    export = export_database([copy, path], tmp_path / "out.db")
    with Database.open(export.path, readonly=True) as database:
        (only,) = database.runs()
    assert only.finished_at is not None


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


def test_does_not_replace_pins_that_the_sources_lack(source: Path, tmp_path: Path) -> None:
    out = Path(shutil.copy(source, tmp_path / "out.db"))
    with Database.open(out) as database:
        database.pin(problem(), candidate("two_shot"), environment=H200, reason="ticket 12")
    assert "holds 1 pins that" in refused(DatabaseAccessError, [source], out, force=True)
    with Database.open(source) as database:
        database.pin(problem(), candidate("library"), environment=H200, reason="newer")
    assert export_database([source], out, force=True).rows["finals"] > 1


def test_replaces_an_empty_file(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.db"
    out.touch()
    assert export_database([source], out, force=True).rows["finals"] > 1


def test_does_not_replace_what_is_no_database(source: Path, tmp_path: Path) -> None:
    text = tmp_path / "notes.txt"
    text.write_text("not a database")
    assert "not a SQLite database" in refused(DatabaseCorruptError, [source], text, force=True)
    assert "directory" in refused(DatabaseAccessError, [source], tmp_path, force=True)


def test_does_not_replace_a_source(source: Path, tmp_path: Path) -> None:
    link = tmp_path / "link.db"
    link.symlink_to(source)
    for out in (source, link):
        assert "one of the sources" in refused(DatabaseAccessError, [source], out, force=True)


def test_does_not_replace_an_open_database(source: Path, tmp_path: Path) -> None:
    out = store(tmp_path / "out.db", [trial()])
    with Database.open(out) as database:
        database.record([trial(latency_us=4.0)])
        assert "out.db-wal" in refused(DatabaseBusyError, [source], out, force=True)


def test_refuses_what_can_hold_nothing(tmp_path: Path) -> None:
    assert "give a file's path" in refused(DatabaseAccessError, ["sqlite://"], tmp_path / "out.db")
    url = f"postgresql+psycopg://user:secret@/name?host={tmp_path}"
    text = refused(DatabaseAwayError, [url], tmp_path / "out.db")
    assert "does not answer" in text
    assert "secret" not in text


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


def test_refuses_sources_that_cannot_be_read(source: Path, tmp_path: Path) -> None:
    damaged = tmp_path / "damaged.db"
    damaged.write_bytes(b"no database at all " * 100)
    refused(DatabaseAccessError, [source, tmp_path / "absent.db"], tmp_path / "out.db")
    refused(DatabaseCorruptError, [source, damaged], tmp_path / "out.db")
    with pytest.raises(ValueError, match="at least one"):
        export_database([], tmp_path / "out.db")


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


def test_foreign_tables_and_triggers_stay_behind(source: Path, tmp_path: Path) -> None:
    with sqlite3.connect(source) as plain:
        plain.execute("CREATE TABLE extra (x)")
        plain.execute("CREATE TRIGGER gone AFTER INSERT ON trial BEGIN DELETE FROM trial; END")
    export = export_database([source], tmp_path / "out.db")
    with sqlite3.connect(export.path) as plain:
        names = {name for (name,) in plain.execute("SELECT name FROM sqlite_master")}
    assert not names & {"extra", "gone"}
    assert export.rows["finals"] > 0


def test_a_directory_that_cannot_be_written_is_named(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "cannot open database" in refused(DatabaseAccessError, [source], source / "out.db")

    def deny(**_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(tempfile, "TemporaryDirectory", deny)
    assert f"cannot write {tmp_path / 'out.db'}" in refused(DatabaseAccessError, [source], tmp_path / "out.db")


def test_needs_no_torch() -> None:
    code = "import sys, tunedcomm.db.transfer; print(sorted({'torch', 'triton', 'optuna'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
