"""Verdicts on 95 winners that were timed again minutes later, on 2 H200 GPUs whose host had become faster.

`then` are the finals of the sweep, `now` what `db verify` measured: in graphs the same to a few per cent, eager calls
of small messages 0.6 to 1.3 times as long, and the library's 0.4 to 1.9 times. Nothing was wrong with any winner.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from replay import read_recording

from tunedcomm import kernels
from tunedcomm.db.layers import Layer, load_snapshot
from tunedcomm.db.records import Trial
from tunedcomm.db.store import Database
from tunedcomm.dispatch.communicator import limits_for
from tunedcomm.dispatch.dispatcher import source_hash_of
from tunedcomm.selection.snapshot import Row
from tunedcomm.spec import Candidate, Problem
from tunedcomm.tuner.verify import Verified, Winner, judge, stored_winners, uncertainty

DATA = Path(__file__).parents[1] / "data"
TIMES = ("latency_p10_us", "latency_p50_us", "latency_p90_us")


@functools.cache
def recorded(name: str) -> tuple[Trial, ...]:
    """As if the kernels of today had been measured."""
    kernels.discover()
    found = read_recording(DATA / f"verify_h200_x2_{name}.jsonl.gz")
    return tuple(replace(r, final=True, source_hash=source_hash_of("all_reduce", r.variant) or "") for r in found)


@pytest.fixture(scope="module")
def winners(tmp_path_factory: pytest.TempPathFactory) -> list[Winner]:
    path = tmp_path_factory.mktemp("verdict") / "tuned.db"
    with Database.open(path, create=True) as database:
        database.record(recorded("then"))
    here = recorded("then")[0].environment
    snapshot = load_snapshot(here, 2, layers=[Layer("user", str(path))], strict=True)
    found = stored_winners(snapshot, limits_for(here, 2), source_hash_of)
    return [winner for stored in found.values() for winner in stored]


def scaled(record: Trial, factor: float) -> Trial:
    changes: dict[str, Any] = {name: (getattr(record, name) or 0.0) * factor for name in TIMES}
    return replace(record, **changes)


def all_kernels(factor: float) -> list[Trial]:
    """What was measured, with every kernel but the library's so many times slower."""
    return [record if record.variant == "library" else scaled(record, factor) for record in recorded("now")]


def judged(winners: Iterable[Winner], records: list[Trial]) -> list[Verified]:
    return [judge(winner, records, tolerance=0.1) for winner in winners]


def test_the_recording_is_of_calls_whose_host_changed(winners: list[Winner]) -> None:
    """Or there would be nothing to be calm about."""
    lost = [
        found.ratio / found.winner.ratio
        for found in judged(winners, list(recorded("now")))
        if found.ratio and found.winner.ratio and found.winner.problem.mode == "eager"
    ]
    assert len(winners) == 95
    assert sum(ratio > 1.15 for ratio in lost) >= 15


def test_no_winner_is_said_to_have_drifted(winners: list[Winner]) -> None:
    found = judged(winners, list(recorded("now")))
    assert Counter(result.verdict for result in found) == {"ok": 95}
    told = [result for result in found if "the library's doing" in result.why]
    assert len(told) >= 10
    assert {result.winner.problem.mode for result in told} == {"eager"}


def test_what_is_said_to_be_faster_is(winners: list[Winner]) -> None:
    now = {(record.problem, record.candidate): record for record in recorded("now")}
    told = [result for result in judged(winners, list(recorded("now"))) if result.faster is not None]
    assert len(told) <= 2
    for result in told:
        assert result.faster is not None
        other, mine = (
            now[result.winner.problem, result.faster.candidate],
            now[result.winner.problem, result.winner.candidate],
        )
        assert other.latency_p50_us is not None
        assert mine.latency_p10_us is not None
        assert other.latency_p50_us < mine.latency_p10_us


@pytest.mark.parametrize(("factor", "mode", "least"), [(1.2, "graph", 57), (2.0, "eager", 36)])
def test_kernels_that_have_become_slower_are_found(winners: list[Winner], factor: float, mode: str, least: int) -> None:
    found = [result for result in judged(winners, all_kernels(factor)) if result.winner.problem.mode == mode]
    assert sum(result.is_wrong for result in found) >= least


def test_a_machine_that_is_slower_as_a_whole_has_not_drifted(winners: list[Winner]) -> None:
    """Three times, the library too. Eager calls are left out: their ratio to the library moves by itself."""
    slow = [scaled(replace(r, baseline_p50_us=3 * (r.baseline_p50_us or 0.0)), 3.0) for r in recorded("now")]
    found = [result for result in judged(winners, slow) if result.winner.problem.mode == "graph"]
    assert len(found) == 57
    assert not any(result.is_wrong for result in found)


# The parts


def problem_of(mode: str) -> Problem:
    return replace(Problem("all_reduce", (4096,), "bfloat16", 2), mode=mode)  # type: ignore[arg-type]


def row_of(mode: str, low: float, middle: float, high: float) -> Row:
    return Row(
        problem=problem_of(mode),
        candidate=Candidate.of("all_reduce", "lamport", {"num_blocks": 8, "num_warps": 2, "launch_pdl": True}),
        source_hash="current",
        environment=recorded("now")[0].environment,
        latency_p50_us=middle,
        latency_p10_us=low,
        latency_p90_us=high,
        samples=100,
        baseline_p50_us=10.0,
        final=True,
    )


def test_uncertainty_of_eager_calls_does_not_shrink_with_the_samples() -> None:
    assert uncertainty(row_of("graph", 4.0, 5.0, 7.0)) == pytest.approx(0.03)
    assert uncertainty(row_of("eager", 4.0, 5.0, 7.0)) == pytest.approx(0.3)
    assert uncertainty(row_of("eager", 5.0, 5.0, 5.0)) == pytest.approx(0.01)
    assert uncertainty(replace(row_of("eager", 4.0, 5.0, 7.0), latency_p10_us=None)) == pytest.approx(0.01)
