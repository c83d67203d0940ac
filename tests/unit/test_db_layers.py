"""Which databases a process reads: homes that are missing, site lists of every form, and what each rank sees."""

from __future__ import annotations

import os
import pwd
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from cli_samples import record, refused
from db_samples import H200, trial

from tunedcomm.cli.stored import read_layers
from tunedcomm.db import layers as layers_module
from tunedcomm.db import misses as miss_log
from tunedcomm.db.layers import (
    LayerFingerprint,
    differences,
    layer_fingerprints,
    layers,
    load_snapshot,
    site_databases,
    user_database,
    writable_database,
)
from tunedcomm.db.store import Database
from tunedcomm.dispatch import misses
from tunedcomm.errors import DatabaseAccessError
from tunedcomm.symm.layout import limits_for

actual_packaged_databases = layers_module.packaged_databases


@pytest.fixture(autouse=True)
def _none_packaged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layers_module, "packaged_databases", list)


@pytest.fixture
def homeless(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No HOME, and a user of whom the system knows nothing, as in many containers."""

    def unknown(uid: int) -> None:
        raise KeyError(f"getpwuid(): uid not found: {uid}")

    for name in ("HOME", "XDG_DATA_HOME", "TUNEDCOMM_DB"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    monkeypatch.chdir(tmp_path)


def _first_rank() -> Any:
    """The part of a communicator that counters of missed problems ask."""
    return SimpleNamespace(rank=0, environment=H200, limits=limits_for(H200, 4), noted=None)


def _site(path: Path) -> str:
    return record(path, trial("one_shot"))


@pytest.mark.usefixtures("homeless")
def test_without_a_home_the_other_layers_serve(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("TUNEDCOMM_DB_PATH", _site(tmp_path / "site.db"))
    for _ in range(3):
        assert [layer.name for layer in layers()] == ["site"]
        assert len(load_snapshot(H200, 4).rows) == 1
        assert [layer.name for layer in read_layers(None)] == ["site"]
        assert misses.counter(_first_rank(), trial().problem, "library") is None, "nothing to note it in"
    assert len(caplog.records) == 1
    assert "Set HOME, or TUNEDCOMM_DB" in caplog.text
    assert not (tmp_path / "~").exists()


@pytest.mark.usefixtures("homeless")
def test_without_a_home_writing_says_what_to_set(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for where in (user_database, writable_database, miss_log.log_path):
        with pytest.raises(DatabaseAccessError, match="TUNEDCOMM_DB"):
            where()
    for arguments in (["tune", "--op", "all_reduce", "--world-size", "2"], ["db", "export", "out.db"]):
        assert "TUNEDCOMM_DB" in refused(*arguments)
    monkeypatch.setenv("TUNEDCOMM_DB", "~/tuned.db")
    with pytest.raises(DatabaseAccessError, match="home directory"):
        Database.open(user_database())
    monkeypatch.setenv("TUNEDCOMM_DB", str(tmp_path / "tuned.db"))
    assert writable_database() == str(tmp_path / "tuned.db")
    assert miss_log.log_path() == tmp_path / "misses.jsonl"
    miss_log.append(tmp_path / "misses.jsonl", [])


def test_site_lists_of_every_form(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "site"
    (folder / "deeper.db").mkdir(parents=True)
    for name in ("b.db", "a.db", ".hidden.db", "a.db-wal", "notes.txt"):
        (folder / name).touch()
    monkeypatch.setenv("HOME", str(tmp_path))
    one, url = str(tmp_path / "one.db"), "postgresql+psycopg://u@h:5432/t"
    monkeypatch.setenv("TUNEDCOMM_DB_PATH", f"{one};~/site;{url};{one};{folder}")
    inside = [str(folder / name) for name in (".hidden.db", "a.db", "b.db", "deeper.db")]
    assert site_databases() == [one, *inside, url]
    monkeypatch.setenv("TUNEDCOMM_DB_PATH", f"{folder}:{one}")
    assert site_databases() == [*inside, one]
    monkeypatch.setattr(layers_module, "packaged_databases", lambda: [tmp_path / "shipped.db"])
    found = [("user", str(tmp_path / "user.db")), *(("site", target) for target in (*inside, one))]
    assert [(layer.name, layer.target) for layer in layers()] == [*found, ("packaged", str(tmp_path / "shipped.db"))]


def test_bad_entries_are_said_once_and_the_others_serve(
    ordinary_user: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    closed, empty = ordinary_user / "closed", ordinary_user / "empty"
    closed.mkdir()
    closed.chmod(0)
    empty.mkdir()
    good = ordinary_user / "good.db"
    _site(good)
    entries = [str(closed), str(empty), str(ordinary_user / "gone.db"), "sqlite://", "nosuch://x", str(good)]
    monkeypatch.setenv("TUNEDCOMM_DB", str(ordinary_user / "user.db"))
    monkeypatch.setenv("TUNEDCOMM_DB_PATH", ";".join(entries))
    if os.geteuid() == 0:
        os.seteuid(65534)
    for _ in range(2):
        assert len(load_snapshot(H200, 4).rows) == 1
    texts = [record.getMessage() for record in caplog.records]
    assert len(texts) == 4, texts
    for part in (f"cannot list {closed} of TUNEDCOMM_DB_PATH: Permission denied", "gone.db does not exist", "nosuch"):
        assert any(part in text for text in texts)
    assert site_databases(is_quiet=True)[-1] == str(good)
    assert len(caplog.records) == 4


# What each rank sees


def _seen(monkeypatch: pytest.MonkeyPatch, database: object, path: str = "") -> tuple[LayerFingerprint, ...]:
    monkeypatch.setenv("TUNEDCOMM_DB", str(database))
    monkeypatch.setenv("TUNEDCOMM_DB_PATH", path)
    return layer_fingerprints()


def test_ranks_that_see_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, url = _site(tmp_path / "first.db"), "postgresql+psycopg://u:secret@h/t"
    (tmp_path / "link.db").symlink_to(first)
    copy = tmp_path / "copy.db"
    copy.write_bytes(Path(first).read_bytes())
    os.utime(copy, ns=(os.stat(first).st_mtime_ns,) * 2)  # noqa: PTH116
    one = _seen(monkeypatch, first, url)
    assert differences([one, one, _seen(monkeypatch, tmp_path / "link.db", url), _seen(monkeypatch, copy, url)]) == []
    assert differences([_seen(monkeypatch, tmp_path / name) for name in ("none.db", "neither.db")]) == []
    assert "secret" not in str(one)


def test_ranks_that_see_other_databases(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    first, other = _site(tmp_path / "first.db"), tmp_path / "other.db"
    other.write_bytes(b"x" * 100)
    one = _seen(monkeypatch, first)
    views = [one, _seen(monkeypatch, other), one, _seen(monkeypatch, tmp_path / "none.db"), _seen(monkeypatch, other)]
    assert differences(views) == [
        f"ranks 1, 4 have {other} as user database where rank 0 has {first}",
        f"rank 3 has none as user database where rank 0 has {first}",
    ]
    sites = [_seen(monkeypatch, first, path) for path in (first, f"{first}:{other}", "", "postgresql://h/t")]
    assert len(differences(sites)) == 3
    assert differences([one] + [_seen(monkeypatch, other)] * 20)[0].startswith("ranks 1, 2, 3, 4, 5, 6, 7, 8 and more")
    assert caplog.records == []


def test_packaged_databases_of_a_checkout_and_of_a_wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = tmp_path / "tunedcomm" / "db" / "layers.py"
    module.parent.mkdir(parents=True)
    monkeypatch.setattr(layers_module, "__file__", str(module))
    beside, within = tmp_path / "tuning_db", tmp_path / "tunedcomm" / "_tuning_db"
    beside.mkdir()
    (beside / "h200.db").touch()
    assert actual_packaged_databases() == [], "next to an installed package it is somebody else's"
    (tmp_path / "pyproject.toml").touch()
    assert actual_packaged_databases() == [beside / "h200.db"]
    within.mkdir()
    (within / "b.db").touch()
    (within / "a.db").touch()
    assert actual_packaged_databases() == [within / "a.db", within / "b.db"]
