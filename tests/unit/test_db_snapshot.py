"""Snapshots: which rows they hold, in what order, under which digest."""

from __future__ import annotations

import pickle
from dataclasses import replace
from pathlib import Path

import pytest
from cli_samples import record
from db_samples import H200, OLDER, candidate, problem, row, snapshot, trial

from tunedcomm.db.layers import Layer, load_snapshot
from tunedcomm.db.records import Trial
from tunedcomm.db.store import Database
from tunedcomm.selection.snapshot import Failure, Pinned, Snapshot


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
