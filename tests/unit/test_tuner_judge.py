"""What a winner that was timed again is called: ok, drifted, slower, tied, failed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from verify_samples import SIZES, at, here, problem_of, recorded

from tunedcomm.db.records import Trial
from tunedcomm.selection.snapshot import Row
from tunedcomm.spec import Candidate, NumericsPolicy
from tunedcomm.tuner.verify import Winner, judge


def winner_of(
    ratio: float,
    *,
    policies: tuple[NumericsPolicy, ...] = ("default",),
    library_us: float | None = 10.0,
    **changes: Any,
) -> Winner:
    """Measured without a spread; `changes` of the row."""
    lamport = Candidate.of("all_reduce", "lamport", {"num_blocks": 8, "num_warps": 2, "launch_pdl": True})
    row = Row(
        problem=problem_of(SIZES[0]),
        candidate=lamport,
        source_hash="current",
        environment=here(),
        latency_p50_us=10.0 * ratio,
        created_at="2026-01-01",
    )
    return Winner(row=replace(row, **changes), policies=policies, latency_us=10.0 * ratio, library_us=library_us)


def timed(winner: Winner, ratio: float, **changes: Any) -> Trial:
    us = 20.0 * ratio
    return replace(
        recorded()[0],
        **{
            **at(winner.candidate, winner.problem.shape[0]),
            "status": "ok",
            "latency_p10_us": us,
            "latency_p50_us": us,
            "latency_p90_us": us,
            **changes,
        },
    )


@pytest.mark.parametrize(
    ("stored", "now", "verdict"),
    [
        (0.5, 0.5, "ok"),
        (0.5, 0.4, "ok"),
        (0.5, 0.554, "ok"),  # 10 % and 1 % of noise
        (0.5, 0.556, "drifted"),
        (0.5, 1.2, "slower"),
        (0.95, 0.985, "ok"),
        (0.95, 0.995, "tied"),
        (0.95, 1.005, "tied"),
        (0.95, 1.02, "slower"),
    ],
)
def test_verdict(stored: float, now: float, verdict: str) -> None:
    winner = winner_of(stored)
    found = judge(winner, [timed(winner, now)], tolerance=0.1)
    assert found.verdict == verdict
    assert found.ratio == pytest.approx(now)
    assert found.is_wrong == (verdict not in ("ok", "tied"))


@pytest.mark.parametrize(
    ("then_us", "now_us", "verdict"),
    [
        (5.0, 8.0, "drifted"),
        (8.0, 8.0, "ok"),  # the library has become faster
        (7.25, 8.0, "ok"),  # 10.3 % longer: 10 % and 1 % of noise
        (7.15, 8.0, "drifted"),
        (10.0, 8.0, "ok"),
    ],
)
def test_a_winner_that_is_not_slower_than_it_was_has_not_drifted(then_us: float, now_us: float, verdict: str) -> None:
    """Against the library it has lost 60 % each time."""
    winner = winner_of(0.5, latency_p50_us=then_us)
    times = {"latency_p10_us": now_us, "latency_p90_us": now_us, "baseline_p50_us": now_us / 0.8}
    found = judge(winner, [timed(winner, now_us / 20, **times)], tolerance=0.1)
    assert found.ratio == pytest.approx(0.8)
    assert found.verdict == verdict
    assert ("the library's doing" in found.why) == (verdict == "ok")


def test_an_eager_call_may_differ_by_its_spread() -> None:
    winner = winner_of(0.5, problem=replace(problem_of(SIZES[0]), mode="eager"))
    steady, erratic = (
        timed(winner, 0.65, problem=winner.problem, latency_p10_us=13.0 - spread, latency_p90_us=13.0 + spread)
        for spread in (0.1, 3.0)
    )
    assert judge(winner, [steady], tolerance=0.1).verdict == "drifted"
    assert judge(winner, [erratic], tolerance=0.1).verdict == "ok"
    was_erratic = winner_of(0.5, problem=winner.problem, latency_p10_us=3.75, latency_p90_us=6.25, samples=20)
    assert judge(was_erratic, [steady], tolerance=0.1).verdict == "ok"


def test_only_what_is_faster_by_itself_and_against_the_library_has_overtaken() -> None:
    winner = winner_of(0.5)
    other = Candidate.of("all_reduce", "one_shot", {"items": 1, "num_blocks": 8, "num_warps": 4})
    mine, fields = timed(winner, 0.5), at(other, SIZES[0])
    for us, library_us, is_faster in ((9.0, 20.0, True), (9.0, 17.0, False), (10.5, 25.0, False), (9.95, 20.0, False)):
        times = {f"latency_p{p}_us": us for p in (10, 50, 90)}
        record = replace(timed(winner, 0.5), **{**fields, **times, "baseline_p50_us": library_us})
        found = judge(winner, [mine, record], tolerance=0.1)
        assert (found.faster is not None and found.faster.candidate == other) == is_faster, (us, library_us)


def test_verdict_without_a_library() -> None:
    winner = winner_of(0.5)
    assert judge(winner, [timed(winner, 0.5, baseline_p50_us=None)], tolerance=0.1).verdict == "unmeasured"
    never = winner_of(0.5, library_us=None)
    assert judge(never, [timed(never, 0.9)], tolerance=0.1).verdict == "ok"
    library = winner_of(1.0, candidate=Candidate.of("all_reduce", "library", {}))
    row = timed(library, 1.7, baseline_p50_us=None)
    assert judge(library, [row], tolerance=0.1).verdict == "ok"
    broken = replace(row, status="crashed", reason="planted", latency_p50_us=None)
    assert judge(library, [broken], tolerance=0.1).verdict == "failed"
