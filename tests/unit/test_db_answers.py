"""What a database answers by itself: as selection does, whatever this tunedcomm's kernels are by now."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

from db_samples import H200, OLDER, candidate, decide, problem, trial
from transfer_samples import H100, SIZES, snapshot_of, store, sweep

from tunedcomm.db.diff import answers, measured, newest_variants
from tunedcomm.db.store import Database


def test_answers_as_selection_does(tmp_path: Path) -> None:
    source = store(tmp_path / "source.db", [t for t in sweep() if t.source_hash == "current"])
    found = answers(source, H200, 4)
    expected = {asked: decide(found.snapshot, asked) for asked in map(problem, SIZES)}
    assert found.decisions == expected
    assert found.snapshot.rows == tuple(replace(row, layer="user") for row in snapshot_of(source).rows)
    assert {decision.source for decision in expected.values()} == {"exact"}


def test_many_sizes_are_answered_as_few_are(tmp_path: Path) -> None:
    """Near ties at every size, with sizes among them that only the library has, and candidates that failed."""
    values = random.Random(7)
    records = []
    for index in range(80):
        asked = problem(1024 + 256 * index)
        records.append(trial("library", 10.0, problem=asked, final=True))
        for variant in () if index % 9 == 4 else ("one_shot", "two_shot", "lamport"):
            latency = values.choice([4.0, 4.01, 4.02, 4.3])
            records.append(trial(variant, latency, problem=asked, final=True, config={"num_blocks": 1 + index % 2}))
    records.append(trial("lamport", None, status="hung", problem=problem(4096 << 3), config={"num_blocks": 1}))
    source = store(tmp_path / "source.db", records)
    found = answers(source, H200, 4)
    whole = found.snapshot
    assert len(found.decisions) == 80
    for asked, decision in found.decisions.items():
        expected = decide(whole, asked)
        told = (decision.candidate, decision.source, decision.latency_us)
        assert told == (expected.candidate, expected.source, expected.latency_us)
    assert {decision.source for decision in found.decisions.values()} == {"exact", "interpolated"}


def test_the_newest_stored_source_counts(tmp_path: Path) -> None:
    records = [trial("one_shot", 2.0, final=True, source_hash="former")]
    records += [trial("one_shot", 6.0, final=True, source_hash="later", after=9), trial("lamport", 5.0, final=True)]
    source = store(tmp_path / "source.db", records)
    assert newest_variants(source)["all_reduce", "one_shot"].source_hash == "later"
    assert answers(source, H200, 4).decisions[problem()].candidate == candidate("lamport")


def test_a_pin_of_what_was_never_measured_counts(tmp_path: Path) -> None:
    source = store(tmp_path / "source.db", [trial("one_shot", 2.0, final=True)])
    with Database.open(source) as database:
        database.pin(problem(), candidate("two_shot"), environment=H200, reason="")
    decision = answers(source, H200, 4).decisions[problem()]
    assert (decision.candidate, decision.source) == (candidate("two_shot"), "pin")


def test_environments_come_in_the_order_of_their_last_trials(tmp_path: Path) -> None:
    records = [trial(environment=H100, after=30), trial(environment=H200, after=10)]
    records += [trial(environment=OLDER, after=20, problem=problem(world_size=2)), trial(environment=H200, after=40)]
    source = store(tmp_path / "source.db", records)
    assert list(measured(source).items()) == [(e, frozenset({2, 4})) for e in (H200, H100, OLDER)]
