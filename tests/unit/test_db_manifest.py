"""The manifest beside an exported file, and the files that a cluster's users are told of."""

from __future__ import annotations

import hashlib
import json
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from db_samples import H200, OLDER, problem, trial
from transfer_samples import store, sweep
from typer.testing import CliRunner

from tunedcomm import settings
from tunedcomm.cli import main
from tunedcomm.db.layers import packaged_databases, site_databases
from tunedcomm.db.manifest import manifest_path, verify_manifest
from tunedcomm.db.store import Database
from tunedcomm.db.transfer import Form, cluster_file, export_database, import_databases, merge_databases
from tunedcomm.errors import DatabaseCorruptError


def said(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(manifest_path(path).read_text())
    return found


@pytest.mark.parametrize("form", ["sqlite", "jsonl", "nccl-csv"])
def test_says_what_the_file_is(tmp_path: Path, form: Form) -> None:
    source = store(tmp_path / "source.db", sweep())
    out = tmp_path / f"out.{form}"
    export = export_database([source], out, form=form)
    manifest = said(out)
    data = out.read_bytes()
    assert manifest["file"] == out.name
    assert (manifest["sha256"], manifest["num_bytes"]) == (hashlib.sha256(data).hexdigest(), len(data))
    assert (manifest["file_format"], manifest["schema"], manifest["everything"]) == (form, "0003", False)
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
    lambda path: manifest_path(path).write_text("{"),
    lambda path: manifest_path(path).write_text("[" * 100_000),
    lambda path: manifest_path(path).write_text("{}"),
    lambda path: manifest_path(path).write_text('{"format": "tunedcomm-manifest", "version": 1}'),
    lambda path: manifest_path(path).write_text('{"format": "tunedcomm-manifest", "version": 2, "sha256": 1}'),
]


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("form", ["sqlite", "jsonl"])
def test_a_file_that_changed_is_not_brought(tmp_path: Path, form: Form, change: Callable[[Path], object]) -> None:
    out = tmp_path / "out"
    export_database([store(tmp_path / "source.db", [trial(final=True)])], out, form=form)
    for bring in (import_databases, merge_databases):
        target = tmp_path / f"{bring.__name__}.db"
        assert bring([out], target).verified == (str(out),)
        target.unlink()
    change(out)
    for bring in (import_databases, merge_databases):
        with pytest.raises(DatabaseCorruptError, match=r"manifest\.json"):
            bring([out], tmp_path / "target.db")
    assert not (tmp_path / "target.db").exists()
    manifest_path(out).unlink()
    assert not verify_manifest(out)


def test_a_cluster_reads_the_file_under_its_setting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = store(tmp_path / "source.db", [trial(final=True)])
    shared = tmp_path / "shared 1:2"
    shown = CliRunner().invoke(
        main.app, ["db", "export", "--cluster", "h200-prod", str(shared), "--db", str(source), "--json"]
    )
    assert shown.exit_code == 0, shown.output
    told = json.loads(shown.stdout)
    assert told["path"] == str(shared / "h200-prod.db")
    assert verify_manifest(shared / "h200-prod.db")
    name, _, value = told["setting"].partition("=")
    (word,) = shlex.split(value)
    monkeypatch.setenv(name, word)
    assert settings.db_path() == (str(shared / "h200-prod.db"),)
    assert site_databases() == [str(shared / "h200-prod.db")]
    text = CliRunner().invoke(
        main.app, ["db", "export", "--cluster", "h200-prod", str(shared), "--db", str(source), "--force"]
    )
    assert text.stdout.splitlines()[-1] == f"export {told['setting']}"
    # A folder is read too, and the manifest in it is no database.
    monkeypatch.setenv("TUNEDCOMM_DB_PATH", f"{shared};")
    assert site_databases() == [str(shared / "h200-prod.db")]


@pytest.mark.parametrize("name", ["", "../up", "a b", "H200", "h200.db", "-x", "a" * 65])
def test_names_of_clusters_are_checked(name: str, tmp_path: Path) -> None:
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
