"""What a database answers by itself: as selection does, whatever this tunedcomm's kernels are by now."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from db_samples import H200, OLDER, candidate, decide, problem, trial
from transfer_samples import H100, SIZES, snapshot_of, store, sweep

from tunedcomm.db.diff import Answer, StoredCatalog
from tunedcomm.db.store import Database
from tunedcomm.selection.snapshot import Snapshot
from tunedcomm.spec import Problem


def assert_as_decided(found: Mapping[Problem, Answer], snapshot: Snapshot) -> None:
    for asked, answer in found.items():
        decision = decide(snapshot, asked)
        for name in ("candidate", "source", "latency_us", "library_us"):
            assert getattr(answer, name) == getattr(decision, name), asked


def test_answers_as_selection_does(tmp_path: Path) -> None:
    source = store(tmp_path / "source.db", [t for t in sweep() if t.source_hash == "current"])
    found = StoredCatalog(source).answers(H200, 4)
    assert list(found) == list(map(problem, SIZES))
    assert_as_decided(found, snapshot_of(source))
    assert {answer.source for answer in found.values()} == {"exact"}


def test_the_newest_stored_source_counts(tmp_path: Path) -> None:
    records = [trial("one_shot", 2.0, final=True, source_hash="former")]
    records += [trial("one_shot", 6.0, final=True, source_hash="later", after=9), trial("lamport", 5.0, final=True)]
    source = store(tmp_path / "source.db", records)
    stored = StoredCatalog(source)
    assert stored.source_hash("all_reduce", "one_shot") == "later"
    assert stored.answers(H200, 4)[problem()].candidate == candidate("lamport")


def test_a_pin_of_what_was_never_measured_counts(tmp_path: Path) -> None:
    source = store(tmp_path / "source.db", [trial("one_shot", 2.0, final=True)])
    with Database.open(source) as database:
        database.pin(problem(), candidate("two_shot"), environment=H200, reason="")
    decision = StoredCatalog(source).answers(H200, 4)[problem()]
    assert (decision.candidate, decision.source) == (candidate("two_shot"), "pin")


def test_environments_come_in_the_order_of_their_last_trials(tmp_path: Path) -> None:
    records = [trial(environment=H100, after=30), trial(environment=H200, after=10)]
    records += [trial(environment=OLDER, after=20, problem=problem(world_size=2)), trial(environment=H200, after=40)]
    source = store(tmp_path / "source.db", records)
    stored = StoredCatalog(source)
    assert stored.environments == [H200, H100, OLDER]
    assert stored.world_sizes == {2, 4}
