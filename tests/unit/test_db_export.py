from __future__ import annotations

import hashlib
import json
import shlex
import shutil
import sqlite3
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cli_samples import run
from db_samples import H200, OLDER, candidate, decide, problem, trial
from transfer_samples import SIZES, config, everything, in_words, snapshot_of, store, sweep

from tunedcomm import settings
from tunedcomm.db.layers import Layer, load_snapshot, packaged_databases, site_databases
from tunedcomm.db.manifest import manifest_path, verify_manifest
from tunedcomm.db.schema import Base
from tunedcomm.db.store import Database
from tunedcomm.db.transfer import Form, cluster_file, export_database, import_databases, merge_databases
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


def test_gives_the_same_bytes_in_every_process(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    digests = set()
    for is_reversed in (False, True):
        for table in Base.metadata.tables.values():  # whose indexes are a set, in another order in every process
            ordered = sorted(table.indexes, key=lambda index: str(index.name), reverse=is_reversed)
            monkeypatch.setattr(table, "indexes", ordered)
        digests.add(export_database([source], tmp_path / f"{is_reversed}.db").sha256)
    assert len(digests) == 1


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


def refused(error: type[DatabaseError], sources: list[Any], out: Path) -> str:
    before = out.read_bytes() if out.is_file() else None
    with pytest.raises(error) as caught:
        export_database(sources, out, force=True)
    assert (out.read_bytes() if out.is_file() else None) == before
    assert not list(out.parent.glob(f".{out.name}.*"))
    return str(caught.value)


def test_does_not_replace_what_the_sources_lack(source: Path, tmp_path: Path) -> None:
    """A database that somebody tuned into, with no manifest or with that of an export that it once was."""
    tuned = store(tmp_path / "tuned.db", [trial(latency_us=4.0)])
    added = tmp_path / "added.db"
    export_database([source], added)
    store(added, [trial(latency_us=4.0)])
    for out in (tuned, added):
        text = refused(DatabaseAccessError, [source], out)
        assert "1 trials that the sources lack" in text
        assert "tunedcomm db merge" in text
        assert export_database([source, shutil.copy(out, tmp_path / "copy.db")], out, force=True).rows["finals"] > 1
        assert export_database([source], out, force=True).rows["finals"] > 1


def test_does_not_replace_a_source(source: Path, tmp_path: Path) -> None:
    link = tmp_path / "link.db"
    link.symlink_to(source)
    for out in (source, link):
        assert "one of the sources" in refused(DatabaseAccessError, [source], out)


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


# The manifest beside an exported file, and the files that users of a cluster are told of


def said(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(manifest_path(path).read_text())
    return found


@pytest.mark.parametrize("form", ["sqlite", "jsonl"])
def test_says_what_the_file_is(tmp_path: Path, form: Form) -> None:
    source = store(tmp_path / "source.db", sweep())
    out = tmp_path / f"out.{form}"
    export = export_database([source], out, form=form)
    manifest = said(out)
    data = out.read_bytes()
    assert manifest["file"] == out.name
    assert (manifest["sha256"], manifest["num_bytes"]) == (hashlib.sha256(data).hexdigest(), len(data))
    assert (export.sha256, export.num_bytes) == (manifest["sha256"], manifest["num_bytes"])
    assert (manifest["file_format"], manifest["schema"], manifest["everything"]) == (form, "0004", False)
    assert manifest["rows"] == export.rows
    assert manifest["left_out"] == export.left_out > 0
    assert [entry["digest"] for entry in manifest["environments"]] == [H200.digest, OLDER.digest]
    assert manifest["environments"][0] == {"digest": H200.digest, **H200.to_dict()}
    assert (manifest["ops"], manifest["dtypes"], manifest["modes"]) == (["all_reduce"], ["bfloat16"], ["graph"])
    assert manifest["world_sizes"] == [2, 4]
    assert manifest["sources"] == [{"source": str(source), "trials": len(sweep()), "known": 0}]
    assert verify_manifest(out)
    before = manifest_path(out).read_bytes()
    export_database([source], out, form=form, force=True)
    assert manifest_path(out).read_bytes() == before


CHANGES: list[Callable[[Path], object]] = [
    lambda path: path.write_bytes(path.read_bytes()[:-1]),
    lambda path: path.write_bytes(path.read_bytes() + b"\n"),
    lambda path: path.write_bytes(path.read_bytes().replace(b"one_shot", b"two_shot", 1)),
    *(
        lambda path, text=text: manifest_path(path).write_text(text)
        for text in (
            "{",
            "[" * 100_000,
            "{}",
            '{"format": "tunedcomm-manifest", "version": 1}',
            '{"format": "tunedcomm-manifest", "version": 2, "sha256": 1}',
        )
    ),
]


@pytest.mark.parametrize("form", ["sqlite", "jsonl"])
def test_a_file_that_changed_is_not_brought(tmp_path: Path, form: Form) -> None:
    out, target = tmp_path / "out", tmp_path / "target.db"
    export_database([store(tmp_path / "source.db", [trial(final=True)])], out, form=form)
    for bring in (import_databases, merge_databases):
        assert bring([out], target).verified == (str(out),)
        target.unlink()
    sound = {path: path.read_bytes() for path in (out, manifest_path(out))}
    for change in CHANGES:
        for path, content in sound.items():
            path.write_bytes(content)
        change(out)
        for bring in (import_databases, merge_databases):
            with pytest.raises(DatabaseCorruptError, match=r"manifest\.json"):
                bring([out], target)
    assert not target.exists()
    manifest_path(out).unlink()
    assert not verify_manifest(out)


def test_a_cluster_reads_the_file_under_its_setting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = store(tmp_path / "source.db", [trial(final=True)])
    shared = tmp_path / "shared 1:2"
    export = ("db", "export", "--cluster", "h200-prod", shared, "--db", source)
    told = run(*export, "--json").json
    assert told["path"] == str(shared / "h200-prod.db")
    assert verify_manifest(shared / "h200-prod.db")
    name, _, value = told["setting"].partition("=")
    (word,) = shlex.split(value)
    monkeypatch.setenv(name, word)
    assert settings.db_path() == (str(shared / "h200-prod.db"),)
    assert site_databases() == [str(shared / "h200-prod.db")]
    assert run(*export, "--force").out.splitlines()[-1] == f"export {told['setting']}"
    # A folder is read too, and the manifest in it is no database.
    monkeypatch.setenv("TUNEDCOMM_DB_PATH", f"{shared};")
    assert site_databases() == [str(shared / "h200-prod.db")]


def test_names_of_clusters_are_checked(tmp_path: Path) -> None:
    for name in ("", "../up", "H200", "h200.db", "-x", "a" * 65):
        with pytest.raises(ValueError, match="cannot name a cluster"):
            cluster_file(name, tmp_path)


@pytest.mark.parametrize("path", packaged_databases(), ids=lambda path: path.name)
def test_shipped_databases_are_what_their_manifests_say(path: Path) -> None:
    assert verify_manifest(path)
    manifest = said(path)
    assert manifest["file"] == path.name
    readme = (path.parent / "README.md").read_text(encoding="utf-8")
    assert manifest["command"] in readme
    with Database.open(path, immutable=True) as database:
        assert manifest["rows"] == database.stats()
        assert manifest["world_sizes"] == sorted({p.world_size for p in database.problems()})
        assert [e["digest"] for e in manifest["environments"]] == [e.digest for e in database.environments()]
    assert problem().op in manifest["ops"]
