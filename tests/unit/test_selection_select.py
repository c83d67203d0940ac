"""Selection: each rule of `selection/select.py`, on made-up latencies."""

from __future__ import annotations

import math
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
from db_samples import H200, OLDER, candidate, decide, problem, row, snapshot

from tunedcomm.errors import InfeasibleError
from tunedcomm.selection.score import MAX_NOISE, MIN_NOISE, noise
from tunedcomm.selection.select import Decision
from tunedcomm.selection.snapshot import Failure, Pinned, Row
from tunedcomm.spec import Candidate


def reasons(decision: Decision) -> dict[str, str]:
    return dict(decision.passed_over)


def curve(variant: str, latencies: dict[int, float], library: dict[int, float] | None = None, **more: Any) -> list[Row]:
    """Finals of one candidate at several sizes."""
    return [
        row(variant, latency, size, baseline_p50_us=(library or {}).get(size, 10.0), **more)
        for size, latency in latencies.items()
    ]


def test_importing_selection_needs_neither_torch_nor_a_database() -> None:
    code = (
        "import sys; import tunedcomm.selection.select; "
        "print(sorted({'torch', 'triton', 'sqlalchemy', 'alembic', 'numpy'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


# Exact


def test_the_fastest_challenger_wins_and_says_by_how_much() -> None:
    decision = decide([row("library", 10.0), row("lamport", 2.5), row("one_shot", 5.0, trial_id=8)])
    assert decision.candidate == candidate("lamport")
    assert (decision.source, decision.latency_us, decision.library_us) == ("exact", 2.5, 10.0)
    assert (decision.runner_up, decision.runner_up_us) == (candidate("one_shot"), 5.0)
    assert (decision.trial_id, decision.layer, decision.environment) == (7, "user", H200)
    assert "lamport(num_blocks=4) is expected to take 2.50 µs, 4.00x as fast as the library (10.0 µs)" in decision.why
    assert "+100.0% to the runner-up one_shot(num_blocks=4)" in decision.why
    assert "trial 7 of the user layer" in decision.why
    assert reasons(decision) == {"one_shot(num_blocks=4)": "5.00 µs against 2.50 µs of lamport(num_blocks=4)"}


def test_a_ratio_to_a_disturbed_library_wins_nothing() -> None:
    """Something else ran while the library was measured beside `one_shot`: its own time is what is known of it."""
    rows = [row("library", 10.0), row("lamport", 9.5), row("two_shot", 9.8)]
    lucky = row("one_shot", 12.0, baseline_p50_us=60.0)
    decision = decide([*rows, lucky])
    assert decision.candidate == candidate("lamport")
    assert reasons(decision)["one_shot(num_blocks=4)"].startswith("12.0 µs is not less than the library's 10.0 µs")
    assert decide([row("library", 10.0), lucky, row("two_shot", 10.8)]).candidate.variant == "library"
    throttled = row("one_shot", 6.0, baseline_p50_us=14.0)
    assert decide([*rows, throttled]).candidate == candidate("one_shot"), "within a half more, ratios are compared"


def test_runs_are_compared_by_their_ratio_to_the_library() -> None:
    slow_run = row("one_shot", 6.0, baseline_p50_us=20.0)
    fast_run = row("two_shot", 5.0, baseline_p50_us=10.0)
    decision = decide([slow_run, fast_run])
    assert decision.candidate == candidate("one_shot")
    assert decision.library_us == 15.0
    assert decision.latency_us == pytest.approx(4.5)
    assert decision.runner_up_us == pytest.approx(7.5)


def test_a_challenger_must_beat_the_library_by_more_than_the_noise() -> None:
    assert decide([row("lamport", 9.95)]).candidate == candidate("library")
    assert decide([row("lamport", 9.85)]).candidate == candidate("lamport")
    erratic = {"latency_p10_us": 5.0, "latency_p90_us": 15.0, "samples": 100}
    decision = decide([row("lamport", 9.55, **erratic), row("library", 10.0, trial_id=3)])
    assert (decision.candidate, decision.source, decision.trial_id) == (candidate("library"), "exact", 3)
    assert "no challenger beats it by more than the noise; the nearest is lamport(num_blocks=4)" in decision.why
    assert "by more than the noise of 5.0%" in reasons(decision)["lamport(num_blocks=4)"]
    assert decide([row("lamport", 9.45, **erratic)]).candidate == candidate("lamport")


def test_without_a_measurement_of_the_library_nothing_beats_it() -> None:
    decision = decide([row("lamport", 2.0, baseline_p50_us=None)])
    assert decision.candidate == candidate("library")
    assert reasons(decision) == {"lamport(num_blocks=4)": "was never compared with the library"}
    both = [row("lamport", 2.0, baseline_p50_us=None), row("library", 10.0, baseline_p50_us=None)]
    assert decide(both).candidate == candidate("lamport")


def test_noise_is_half_the_spread_over_the_root_of_the_samples_within_bounds() -> None:
    assert noise(row("lamport", 10.0)) == MIN_NOISE
    assert noise(row("lamport", 10.0, latency_p10_us=8.0, latency_p90_us=12.0, samples=100)) == pytest.approx(0.02)
    assert noise(row("lamport", 10.0, latency_p10_us=8.0, latency_p90_us=12.0, samples=1)) == MAX_NOISE
    assert noise(row("lamport", 10.0, latency_p10_us=9.99, latency_p90_us=10.0, samples=100)) == MIN_NOISE
    assert noise(row("lamport", 10.0, latency_p10_us=1.0, latency_p90_us=99.0, samples=0)) == MIN_NOISE


def test_near_ties_go_to_the_candidate_that_wins_nearby() -> None:
    tie = [row("one_shot", 5.00), row("two_shot", 5.03)]
    assert decide(tie).candidate == candidate("one_shot"), "without neighbours the name decides"
    near = [row("one_shot", 6.0, 8192), row("two_shot", 5.0, 8192)]
    decision = decide(tie + near)
    assert decision.candidate == candidate("two_shot")
    assert decision.runner_up == candidate("one_shot")
    assert "a tie within the noise" in reasons(decision)["one_shot(num_blocks=4)"]
    assert (
        "0.6% slower than the runner-up one_shot(num_blocks=4) (5.00 µs), a tie within the noise of 1.0% that the "
        "neighbouring sizes and the name decide"
    ) in decision.why
    against = [row("one_shot", 3.0, size) for size in (1024, 2048)] + [
        row("two_shot", 4.0, size) for size in (1024, 2048)
    ]
    assert decide(tie + near + against).candidate == candidate("one_shot")


def test_more_conclusive_rows_outrank_faster_ones() -> None:
    final = row("one_shot", 5.0)
    for other, reason in (
        (row("two_shot", 3.0, final=False), "not measured in the finals"),
        (row("two_shot", 3.0, environment=OLDER, drift=True), "measured only under other software"),
        (row("two_shot", 3.0, layer="packaged", layer_rank=1), "the user layer, which is nearer"),
    ):
        decision = decide([final, other])
        assert decision.candidate == candidate("one_shot")
        assert reason in reasons(decision)["two_shot(num_blocks=4)"]
        assert decide([other]).candidate == candidate("two_shot"), "used where there is nothing better"


# What is never considered


def test_numerics_policy() -> None:
    rows = [row("atomic", 2.0), row("two_shot", 5.0), row("library", 10.0)]
    decision = decide(rows)
    assert decision.candidate == candidate("two_shot")
    assert reasons(decision) == {
        "atomic(num_blocks=4)": "numerics class 'unordered' is not admitted by policy 'default'"
    }
    assert decide(rows, policy="any").candidate == candidate("atomic")
    assert decide(rows, policy="ordered").candidate == candidate("two_shot")


def test_policy_ordered_never_returns_the_library() -> None:
    slow = [row("one_shot", 12.0), row("library", 10.0)]
    assert decide(slow).candidate == candidate("library")
    assert decide(slow, policy="ordered").candidate == candidate("one_shot")
    far = problem(1 << 30)
    assert decide(slow, far).candidate == candidate("library")
    decision = decide(slow, far, policy="ordered")
    assert (decision.candidate, decision.source) == (candidate("one_shot"), "interpolated")
    with pytest.raises(
        InfeasibleError, match=r"policy 'ordered' admits no candidate .* run `tunedcomm tune`, or allow"
    ):
        decide([row("library", 10.0)], policy="ordered")


def test_infeasible_candidates_are_passed_over_with_their_reason() -> None:
    def feasible(which: Candidate) -> str | None:
        return "needs more staging" if which.variant == "lamport" else None

    decision = decide([row("lamport", 2.0), row("two_shot", 5.0)], feasible=feasible)
    assert decision.candidate == candidate("two_shot")
    assert reasons(decision) == {"lamport(num_blocks=4)": "needs more staging"}


def test_stale_and_unknown_kernels_are_passed_over() -> None:
    decision = decide([row("lamport", 2.0, source_hash="before"), row("retired", 1.0), row("one_shot", 5.0)])
    assert decision.candidate == candidate("one_shot")
    assert "its source has changed" in reasons(decision)["lamport(num_blocks=4)"]
    assert "'retired' has no source here" in reasons(decision)["retired(num_blocks=4)"]
    only = decide([row("lamport", 2.0, source_hash="before")])
    assert (only.candidate, only.source) == (candidate("library"), "library")
    assert "its source has changed" in reasons(only)["lamport(num_blocks=4)"]


# Forced and pinned


def test_forced_overrides_everything_but_feasibility() -> None:
    rows = [row("lamport", 2.0), row("atomic", 9.0)]
    pins = (Pinned(problem=problem(), candidate=candidate("lamport"), reason=""),)
    decision = decide(snapshot(rows, pins=pins), forced=candidate("atomic"))
    assert (decision.candidate, decision.source, decision.latency_us) == (candidate("atomic"), "forced", 9.0)
    assert "though policy 'default' excludes it" in decision.why
    assert decide(rows, forced=candidate("library")).candidate == candidate("library")
    with pytest.raises(InfeasibleError, match=r"forced candidate atomic\(num_blocks=4\) cannot run .*: too large;"):
        decide(rows, forced=candidate("atomic"), feasible=lambda which: "too large")
    with pytest.raises(InfeasibleError, match="it is a candidate of all_gather"):
        decide(rows, forced=Candidate.of("all_gather", "library", {}))


def test_a_pin_comes_before_measurements_but_not_before_policy_and_feasibility() -> None:
    def pinned(variant: str, asked: int = 4096) -> Any:
        pin = Pinned(problem=problem(asked), candidate=candidate(variant), reason="bit-exact run", layer="site")
        return snapshot([row("lamport", 2.0), row("two_shot", 5.0)], pins=(pin,))

    decision = decide(pinned("two_shot"))
    assert (decision.candidate, decision.source, decision.layer) == (candidate("two_shot"), "pin", "site")
    assert "bit-exact run" in decision.why
    assert decide(pinned("library")).candidate == candidate("library")
    assert decide(pinned("two_shot", 8192)).source == "exact"
    decision = decide(pinned("atomic"))
    assert decision.candidate == candidate("lamport")
    assert reasons(decision)["atomic(num_blocks=4)"].startswith("pinned, but numerics class 'unordered'")
    failed = Failure(problem=problem(8192), candidate=candidate("two_shot"), source_hash="current", status="incorrect")
    measured = replace(pinned("two_shot"), failures=(failed,))
    assert decide(measured).source == "pin", "it is good at this very size"
    decision = decide(replace(measured, rows=measured.rows[:1]))
    assert decision.candidate == candidate("lamport")
    assert "pinned, but was incorrect at all_reduce " in reasons(decision)["two_shot(num_blocks=4)"]
    decision = decide(pinned("two_shot"), feasible=lambda which: "no" if which.variant == "two_shot" else None)
    assert decision.candidate == candidate("lamport")


# Between the sizes


LIBRARY = {4096: 10.0, 8192: 20.0, 16384: 20.0}


def test_between_two_sizes_both_bound_what_is_expected() -> None:
    rows = [
        *curve("one_shot", {4096: 4.0, 8192: 16.0}, LIBRARY),
        *curve("two_shot", {4096: 7.0, 8192: 7.5}, LIBRARY),
        *curve("lamport", {8192: 15.0}, LIBRARY),
    ]
    decision = decide(rows, problem(5000))
    assert (decision.candidate, decision.source) == (candidate("two_shot"), "interpolated")
    way = math.log2(5000 / 4096)
    assert decision.library_us == pytest.approx(10.0 * 2**way)
    assert decision.latency_us == pytest.approx(7.0 * (7.5 / 7.0) ** way), "the line, where it is worse"
    assert decision.runner_up == candidate("one_shot")
    assert decision.runner_up_us == pytest.approx(8.0), "twice what half takes, less than by the ratio"
    assert decision.why.startswith(
        "predicted between 4 KiB and 8 KiB: two_shot(num_blocks=4) is expected to take 7.14 µs"
    )
    assert decide(rows, problem(4098)).candidate == candidate("two_shot"), "one_shot is on the edge of a step here"


def test_nothing_is_extrapolated_beyond_a_factor_of_two() -> None:
    rows = curve("one_shot", {4096: 4.0, 16384: 5.0})
    for size, source in ((2048, "interpolated"), (2046, "library"), (32768, "interpolated"), (32770, "library")):
        decision = decide(rows, problem(size))
        assert decision.source == source, size
        assert decision.candidate == candidate("one_shot" if source == "interpolated" else "library")
    assert (
        "what is measured at 16 KiB, the nearest size, may not serve this one; `tunedcomm tune` measures it"
        in decide(rows, problem(1 << 20)).why
    )


def test_every_trial_is_interpolated_but_not_of_other_software() -> None:
    finals = curve("one_shot", {4096: 5.0, 16384: 6.0})
    mixed = [row("two_shot", 1.0, 4096), row("two_shot", 1.0, 16384, final=False)]
    assert decide(finals + mixed, problem(8192)).candidate == candidate("two_shot")
    assert decide(finals + mixed, problem(16384)).candidate == candidate("one_shot"), (
        "at its own size the finals decide"
    )
    drifted = [row("two_shot", 1.0, 4096, drift=True), row("two_shot", 1.0, 16384, final=False)]
    decision = decide(finals + drifted, problem(8192))
    assert decision.candidate == candidate("one_shot")
    assert reasons(decision)["two_shot(num_blocks=4)"] == "measured only under other software"


def test_candidates_that_failed_in_the_family_are_not_interpolated() -> None:
    rows = curve("lamport", {4096: 2.0, 16384: 3.0}) + curve("one_shot", {4096: 5.0, 16384: 6.0})
    failure = Failure(problem=problem(8192), candidate=candidate("lamport"), source_hash="current", status="incorrect")
    decision = decide(snapshot(rows, failures=(failure,)), problem(6000))
    assert decision.candidate == candidate("one_shot")
    assert "was incorrect at all_reduce 4096" in reasons(decision)["lamport(num_blocks=4)"]
    exact = decide(snapshot(rows, failures=(failure,)), problem(4096))
    assert exact.candidate == candidate("lamport"), "where it was measured it was right"
    for other in (replace(failure, source_hash="before"), replace(failure, problem=problem(8192, mode="eager"))):
        assert decide(snapshot(rows, failures=(other,)), problem(6000)).candidate == candidate("lamport")
