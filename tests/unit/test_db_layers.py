"""Which databases a process reads: homes that are missing, site lists of every form, and what each rank sees."""

from __future__ import annotations

import os
import pickle
import pwd
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from cli_samples import record, refused
from db_samples import H200, OLDER, candidate, decide, problem, row, snapshot, trial

from tunedcomm.cli.stored import read_layers
from tunedcomm.db import layers as layers_module
from tunedcomm.db import misses as miss_log
from tunedcomm.db.layers import (
    Layer,
    LayerFingerprint,
    all_layers,
    differences,
    layer_fingerprints,
    load_snapshot,
    note_made,
    site_databases,
    user_database,
    writable_database,
)
from tunedcomm.db.records import Trial
from tunedcomm.db.store import Database
from tunedcomm.db.transfer import export_database, merge_databases
from tunedcomm.dispatch import misses
from tunedcomm.errors import DatabaseAccessError
from tunedcomm.selection.snapshot import Failure, Pinned, Snapshot
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
        assert [layer.name for layer in all_layers()] == ["site"]
        assert len(load_snapshot(H200, 4).rows) == 1
        assert [layer.name for layer in read_layers(None)] == ["site"]
        assert misses.note_problem(_first_rank(), trial().problem, "library") is None, "nothing to note it in"
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
    assert [(layer.name, layer.target) for layer in all_layers()] == [
        *found,
        ("packaged", str(tmp_path / "shipped.db")),
    ]


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


def test_a_layer_that_fails_in_any_way_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(layer: Layer, **_: object) -> None:
        if layer.name == "user":
            raise KeyError("a defect")
        return opened(layer)

    opened = Layer.open
    monkeypatch.setattr(Layer, "open", fail)
    layers = [Layer("user", _site(tmp_path / "user.db")), Layer("site", _site(tmp_path / "site.db"))]
    for _ in range(2):
        assert {row.layer for row in load_snapshot(H200, 4, layers=layers).rows} == {"site"}
    assert "KeyError" in "".join(record.getMessage() for record in caplog.records)
    assert len(caplog.records) == 1
    with pytest.raises(KeyError):
        load_snapshot(H200, 4, layers=layers, strict=True)


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
    note_made(first)
    made = _seen(monkeypatch, first)
    assert differences([made, made, _seen(monkeypatch, tmp_path / "none.db")]) == [], "rank 0 has just made it"
    assert len(differences([made, _seen(monkeypatch, other)])) == 1


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


# Snapshots: which rows they hold, in what order, under which digest


def stored(path: Path, *trials: Trial) -> Layer:
    """A layer named after its file that holds these trials."""
    return Layer(path.stem, record(path, *trials))


def variants_of(found: Snapshot) -> list[str]:
    return [r.candidate.variant for r in found.rows]


def test_pickling_is_exact_and_computes_the_digest_anew() -> None:
    found = snapshot(
        [
            row("lamport", 0.1 + 0.2, latency_p10_us=1 / 3, latency_p90_us=2.9, environment=OLDER, drift=True),
            row("two_shot", 1e-7, 1 << 40, baseline_p50_us=None, trial_id=None, like={"in_place": True}),
        ],
        pins=(Pinned(problem=problem(2), candidate=candidate("two_shot"), reason='µ "quoted"'),),
        failures=(Failure(problem=problem(4), candidate=candidate("atomic"), source_hash="x", status="hung"),),
        notes=("a note",),
    )
    again = pickle.loads(pickle.dumps(found))
    assert again == found
    assert again.digest == found.digest
    assert again.family_rows(again.rows[0].problem) == found.family_rows(found.rows[0].problem)
    damaged = pickle.dumps(found).replace(b"a note", b"a vote")
    assert pickle.loads(damaged).digest != found.digest


def test_digest_covers_what_decides_and_nothing_else() -> None:
    base = snapshot([row("lamport", 3.0), row("library", 10.0)])
    assert base.digest == snapshot([row("library", 10.0), row("lamport", 3.0, trial_id=99)]).digest
    for other in (
        snapshot([row("lamport", 3.0)]),
        snapshot([row("lamport", 3.0001), row("library", 10.0)]),
        snapshot([row("lamport", 3.0, num_blocks=8), row("library", 10.0)]),
        snapshot([row("lamport", 3.0, source_hash="x"), row("library", 10.0)]),
        snapshot([row("lamport", 3.0, final=False), row("library", 10.0)]),
        replace(base, environment=OLDER),
        replace(base, world_size=2),
    ):
        assert other.digest != base.digest


def test_only_ok_rows_of_this_hardware_and_world_size(tmp_path: Path) -> None:
    layer = stored(
        tmp_path / "user.db",
        trial("one_shot"),
        trial("two_shot", status="pruned"),
        trial("lamport", environment=replace(H200, gpu="NVIDIA H100")),
        trial("lamport", environment=replace(H200, multicast=True)),
        trial("lamport", problem=problem(world_size=2)),
        trial("atomic", environment=replace(H200, memory_gib=96)),
    )
    assert variants_of(load_snapshot(H200, 4, layers=[layer])) == ["atomic", "one_shot"]
    assert variants_of(load_snapshot(H200, 2, layers=[layer])) == ["lamport"]
    assert load_snapshot(replace(H200, nodes=2), 4, layers=[layer]).rows == ()


def test_the_newest_row_of_a_candidate_is_kept(tmp_path: Path) -> None:
    newer, older = trial(latency_us=6.0, after=9), trial(latency_us=5.0, after=1)
    layer = stored(tmp_path / "user.db", newer, older)
    assert [r.latency_p50_us for r in load_snapshot(H200, 4, layers=[layer]).rows] == [6.0]
    layer = stored(tmp_path / "finals.db", replace(newer, final=True), replace(older, final=True))
    assert [r.latency_p50_us for r in load_snapshot(H200, 4, layers=[layer]).rows] == [6.0]
    versions = [replace(newer, environment=OLDER), replace(older, environment=replace(OLDER, torch="2.8.0"))]
    layer = stored(tmp_path / "versions.db", *versions)
    assert [r.latency_p50_us for r in load_snapshot(H200, 4, layers=[layer]).rows] == [6.0]


@pytest.mark.parametrize("final", [True, False], ids=["final", "searched"])
@pytest.mark.parametrize("how", ["one database", "merged", "two versions"])
def test_a_row_of_a_loaded_session_hides_none_of_a_quiet_one(how: str, final: bool, tmp_path: Path) -> None:
    """A loaded host slows the library down more than a candidate, by time and by ratio."""
    session = {"problem": problem(mode="eager"), "final": final}
    quiet = [trial("one_shot", 16.0, baseline_p50_us=60.0, **session)]
    quiet += [trial("two_shot", 15.1, baseline_p50_us=60.0, **session)]
    loaded = [trial("one_shot", 20.4, baseline_p50_us=150.0, after=9, **session)]
    loaded += [trial("two_shot", 29.0, baseline_p50_us=150.0, after=9, **session)]
    if how == "one database":
        layers = [stored(tmp_path / "user.db", *quiet, *loaded)]
    elif how == "merged":
        sources = [stored(tmp_path / f"{name}.db", *rows).target for name, rows in (("q", quiet), ("l", loaded))]
        merge_databases(sources, tmp_path / "merged.db")
        export_database([tmp_path / "merged.db"], tmp_path / "exported.db")
        layers = [Layer("user", str(tmp_path / "exported.db"))]
    else:
        other = [replace(one, environment=replace(H200, tunedcomm="0.2.0")) for one in loaded]
        layers = [stored(tmp_path / "versions.db", *quiet, *other)]
    decision = decide(load_snapshot(H200, 4, layers=layers).rows, problem(mode="eager"))
    assert decision.candidate == candidate("two_shot")
    assert (decision.latency_us, decision.runner_up_us) == pytest.approx((15.1, 16.0))


def test_the_candidates_that_are_kept_are_the_best_by_time_and_by_ratio(tmp_path: Path) -> None:
    fast = [trial(latency_us=5.0 + i, config={"num_blocks": i}) for i in range(4)]
    slow = [trial(latency_us=8.0 + i, baseline_p50_us=20.0, config={"num_blocks": 8 + i}) for i in range(4)]
    found = load_snapshot(H200, 4, layers=[stored(tmp_path / "user.db", *fast, *slow)])
    assert sorted(row.candidate.config_dict["num_blocks"] for row in found.rows) == [0, 1, 8, 9]


def test_all_finals_but_only_the_best_of_each_variant_where_there_are_none(tmp_path: Path) -> None:
    shapes, there = [{"config": {"num_blocks": i}} for i in range(20)], {"problem": problem(8192)}
    trials = [trial(v, 5.0 + i, **config) for v in ("one_shot", "two_shot") for i, config in enumerate(shapes)]
    trials += [trial("one_shot", 5.0 + i, final=True, **config, **there) for i, config in enumerate(shapes)]
    trials += [trial("library", 11.0), trial("two_shot", 9.0, **there)]
    found = load_snapshot(H200, 4, layers=[stored(tmp_path / "user.db", *trials)])
    assert len([r for r in found.rows if r.problem == problem(8192)]) == 20
    few = [r.candidate for r in found.rows if r.problem == problem()]
    assert few == [candidate("library"), *(candidate(v, i) for v in ("one_shot", "two_shot") for i in (0, 1))]


def test_nearer_layers_come_first_but_finals_and_same_software_before_them(tmp_path: Path) -> None:
    user = stored(tmp_path / "user.db", trial("one_shot", 5.0), trial("two_shot", 5.0), trial("lamport", 5.0))
    site = stored(
        tmp_path / "site.db",
        trial("one_shot", 6.0, after=9),
        trial("two_shot", 6.0, final=True),
        trial("atomic", 6.0, environment=OLDER, after=9),
    )
    packaged = stored(tmp_path / "packaged.db", trial("atomic", 7.0), trial("lamport", 4.0))
    found = load_snapshot(H200, 4, layers=[user, site, packaged])
    kept = {r.candidate.variant: (r.layer, r.layer_rank, r.latency_p50_us) for r in found.rows}
    assert kept == {
        "one_shot": ("user", 0, 5.0),
        "two_shot": ("site", 1, 6.0),
        "lamport": ("user", 0, 5.0),
        "atomic": ("packaged", 2, 7.0),
    }


def test_rows_of_older_software_are_used_with_one_note(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    other = replace(H200, torch="2.11.7")
    old = [trial("one_shot", environment=OLDER), trial("two_shot", environment=OLDER)]
    user = stored(tmp_path / "user.db", *old, trial("one_shot", 7.0))
    found = load_snapshot(H200, 4, layers=[user])
    load_snapshot(H200, 4, layers=[user])
    assert {r.candidate.variant: (r.latency_p50_us, r.drift) for r in found.rows} == {
        "one_shot": (7.0, False),
        "two_shot": (5.0, True),
    }
    (note,) = found.notes
    assert "1 of 2 rows" in note
    assert "torch 2.9.0 → 2.11.0" in note
    assert [r.message for r in caplog.records] == list(found.notes)
    assert all(r.drift for r in load_snapshot(other, 4, layers=[user]).rows)


@pytest.mark.parametrize("status", ["incorrect", "crashed", "hung"])
def test_a_candidate_that_failed_later_is_dropped_from_every_layer(tmp_path: Path, status: str) -> None:
    failed = trial(latency_us=None, status=status, after=5)
    user = stored(tmp_path / "user.db", failed)
    packaged = stored(tmp_path / "packaged.db", trial(final=True), trial("two_shot", final=True))
    found = load_snapshot(H200, 4, layers=[user, packaged])
    assert variants_of(found) == ["two_shot"]
    assert [(f.candidate, f.status) for f in found.failures] == [(candidate("one_shot"), status)]
    stored(tmp_path / "user.db", trial(after=6))
    found = load_snapshot(H200, 4, layers=[user, packaged])
    assert found.failures == ()
    assert variants_of(found) == ["one_shot", "two_shot"]


def test_pins_of_this_hardware_nearest_layer_first(tmp_path: Path) -> None:
    targets = []
    for name, variant in (("user", "one_shot"), ("site", "two_shot")):
        with Database.open(tmp_path / f"{name}.db", create=True) as database:
            database.pin(problem(), candidate(variant), environment=OLDER, reason=name)
            database.pin(problem(64), candidate(variant), environment=replace(H200, nodes=2), reason="elsewhere")
        targets.append(Layer(name, str(tmp_path / f"{name}.db")))
    found = load_snapshot(H200, 4, layers=targets)
    assert [(p.candidate.variant, p.reason, p.layer) for p in found.pins] == [("one_shot", "user", "user")]
    assert load_snapshot(H200, 2, layers=targets).pins == ()
