"""Selection: each rule of `selection/select.py` and its parts, on made-up latencies."""

from __future__ import annotations

import json
import math
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from db_samples import H200, NUMERICS, OLDER, candidate, decide, problem, row, snapshot, trial
from programs import python

from tunedcomm import kernels
from tunedcomm.db.layers import Layer, load_snapshot
from tunedcomm.db.store import Database
from tunedcomm.errors import InfeasibleError
from tunedcomm.selection.interpolate import MAX_GAP
from tunedcomm.selection.score import MAX_NOISE, MIN_NOISE, comparable, noise, pool
from tunedcomm.selection.select import Decision
from tunedcomm.selection.snapshot import Failure, Pinned, Row, Snapshot
from tunedcomm.spec import Candidate, Problem, get_variant
from tunedcomm.symm.layout import limits_for

EAGER: dict[str, Any] = {"mode": "eager"}


def reasons(decision: Decision) -> dict[str, str]:
    """Why others were passed over, by variant."""
    return {name.partition("(")[0]: why for name, why in decision.passed_over}


def chosen(rows: Any, asked: Problem | None = None, **options: Any) -> tuple[str, str]:
    """The source and the variant of the decision."""
    decision = decide(rows, asked, **options)
    return decision.source, decision.candidate.variant


def curve(variant: str, latencies: dict[int, float], library: dict[int, float] | None = None) -> list[Row]:
    """Finals of one candidate at several sizes."""
    known = library or {}
    return [row(variant, us, size, baseline_p50_us=known.get(size, 10.0)) for size, us in latencies.items()]


def refusing(variant: str) -> Any:
    return lambda which: "too large" if which.variant == variant else None


def test_importing_selection_needs_neither_torch_nor_a_database() -> None:
    heavy = {"torch", "triton", "sqlalchemy", "alembic", "numpy", "optuna"}
    code = f"import sys, tunedcomm.selection.select; print(sorted({heavy} & set(sys.modules)))"
    assert python("-c", code).stdout.strip() == "[]"


# Exact


def test_the_fastest_challenger_wins_and_says_by_how_much() -> None:
    decision = decide([row("library", 10.0), row("lamport", 2.5), row("one_shot", 5.0, trial_id=8)])
    assert decision.candidate == candidate("lamport")
    assert (decision.source, decision.latency_us, decision.library_us) == ("exact", 2.5, 10.0)
    assert (decision.runner_up, decision.runner_up_us) == (candidate("one_shot"), 5.0)
    assert (decision.trial_id, decision.layer, decision.environment) == (7, "user", H200)
    for token in ("4.00x as fast", "2.00x as fast as the runner-up", "trial 7 of the user layer"):
        assert token in decision.why
    assert "5.00 µs against 2.50 µs" in reasons(decision)["one_shot"]


def test_a_ratio_to_a_disturbed_library_wins_nothing() -> None:
    """Something else ran while the library was measured beside `one_shot`: its own time is what is known of it."""
    rows = [row("library", 10.0), row("lamport", 9.5), row("two_shot", 9.8)]
    lucky = row("one_shot", 12.0, baseline_p50_us=60.0)
    decision = decide([*rows, lucky])
    assert decision.candidate == candidate("lamport")
    assert "12.0 µs" in reasons(decision)["one_shot"]
    assert chosen([row("library", 10.0), lucky, row("two_shot", 10.8)]) == ("exact", "library")
    throttled = row("one_shot", 6.0, baseline_p50_us=14.0)
    assert chosen([*rows, throttled]) == ("exact", "one_shot"), "within a half more, ratios are compared"


def test_runs_are_compared_by_their_ratio_to_the_library() -> None:
    slow_run = row("one_shot", 6.0, baseline_p50_us=20.0)
    fast_run = row("two_shot", 5.0, baseline_p50_us=10.0)
    decision = decide([slow_run, fast_run])
    assert (decision.candidate, decision.library_us) == (candidate("one_shot"), 15.0)
    assert (decision.latency_us, decision.runner_up_us) == pytest.approx((4.5, 7.5))


def test_a_challenger_must_beat_the_library_by_more_than_the_noise() -> None:
    assert chosen([row("lamport", 9.95)])[1] == "library"
    assert chosen([row("lamport", 9.85)])[1] == "lamport"
    erratic = {"latency_p10_us": 5.0, "latency_p90_us": 15.0, "samples": 100}
    decision = decide([row("lamport", 9.55, **erratic), row("library", 10.0, trial_id=3)])
    assert (decision.candidate, decision.source, decision.trial_id) == (candidate("library"), "exact", 3)
    assert "the nearest is lamport(num_blocks=4)" in decision.why
    assert "noise of 5.0%" in reasons(decision)["lamport"]
    assert chosen([row("lamport", 9.45, **erratic)])[1] == "lamport"


def test_without_a_measurement_of_the_library_nothing_beats_it() -> None:
    decision = decide([row("lamport", 2.0, baseline_p50_us=None)])
    assert decision.candidate == candidate("library")
    assert "never compared" in reasons(decision)["lamport"]
    both = [row("lamport", 2.0, baseline_p50_us=None), row("library", 10.0, baseline_p50_us=None)]
    assert chosen(both)[1] == "lamport"


@pytest.mark.parametrize(
    ("p10", "p90", "samples", "expected"),
    [
        (None, None, 1000, MIN_NOISE),
        (8.0, 12.0, 100, 0.02),
        (8.0, 12.0, 1, MAX_NOISE),
        (9.99, 10.0, 100, MIN_NOISE),
        (1.0, 99.0, 0, MIN_NOISE),
    ],
)
def test_noise_is_half_the_spread_over_the_root_of_the_samples_within_bounds(
    p10: float | None, p90: float | None, samples: int, expected: float
) -> None:
    measured = row("lamport", 10.0, latency_p10_us=p10, latency_p90_us=p90, samples=samples)
    assert noise(measured) == pytest.approx(expected)


def test_near_ties_go_to_the_candidate_that_wins_nearby() -> None:
    tie = [row("one_shot", 5.00), row("two_shot", 5.03)]
    assert chosen(tie)[1] == "one_shot", "without neighbours the name decides"
    near = [row("one_shot", 6.0, 8192), row("two_shot", 5.0, 8192)]
    decision = decide(tie + near)
    assert (decision.candidate, decision.runner_up) == (candidate("two_shot"), candidate("one_shot"))
    assert "tie" in reasons(decision)["one_shot"]
    assert "0.6% slower than the runner-up" in decision.why
    against = [row(name, us, size) for size in (1024, 2048) for name, us in (("one_shot", 3.0), ("two_shot", 4.0))]
    assert chosen(tie + near + against)[1] == "one_shot"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"final": False}, "finals"),
        ({"environment": OLDER, "drift": True}, "other software"),
        ({"layer": "packaged", "layer_rank": 1}, "the user layer"),
    ],
)
def test_more_conclusive_rows_outrank_faster_ones(changes: dict[str, Any], reason: str) -> None:
    other = row("two_shot", 3.0, **changes)
    decision = decide([row("one_shot", 5.0), other])
    assert decision.candidate == candidate("one_shot")
    assert reason in reasons(decision)["two_shot"]
    assert chosen([other])[1] == "two_shot", "used where there is nothing better"


def test_between_sizes_the_same_software_outranks_a_nearer_layer() -> None:
    older = [row("one_shot", 2.0, size, environment=OLDER, drift=True) for size in (4096, 16384)]
    farther = [row("two_shot", 3.0, size, layer="packaged", layer_rank=1) for size in (4096, 16384)]
    assert chosen(older + farther, problem(8192)) == ("interpolated", "two_shot")
    assert chosen(older, problem(8192)) == ("interpolated", "one_shot")


# Graphs and eager calls


def of_eager(variant: str, latency_us: float, library_us: float | None) -> Row:
    return row(variant, latency_us, baseline_p50_us=library_us, like=EAGER)


def test_the_librarys_time_counts_in_full_in_graphs_and_with_its_root_in_eager_calls() -> None:
    graph = row("one_shot", 6.1, baseline_p50_us=13.7)
    assert comparable(graph, 11.3) == 6.1 / 13.7 * 11.3, "to the last bit"
    eager = of_eager("one_shot", 6.1, 13.7)
    assert comparable(eager, 11.3) == pytest.approx(6.1 * math.sqrt(11.3 / 13.7))
    assert comparable(eager, 13.7) == pytest.approx(6.1)


def test_an_eager_choice_does_not_follow_the_host_alone() -> None:
    """`lamport` is 10 % slower, and NCCL took 30 % longer beside it."""
    others = [of_eager("one_shot", 10.0, 30.0), of_eager("two_shot", 12.0, 30.0)]
    decision = decide([*others, of_eager("lamport", 11.0, 39.0)], problem(mode="eager"))
    assert (decision.candidate, decision.library_us) == (candidate("lamport"), 30.0)
    assert decision.latency_us == pytest.approx(11 / math.sqrt(1.3))
    assert chosen([*others, of_eager("lamport", 11.8, 39.0)], problem(mode="eager"))[1] == "one_shot"
    in_graphs = [row("one_shot", 10.0, baseline_p50_us=30.0), row("lamport", 11.8, baseline_p50_us=39.0)]
    assert chosen(in_graphs)[1] == "lamport", "11.8 / 39 is less than 10 / 30"


@pytest.mark.parametrize("latency_us", [5.0, 5.5])
def test_what_is_no_faster_than_the_library_beside_it_is_not_chosen(latency_us: float) -> None:
    """The host was fast in that run: half of the ratio would make it faster than the library's median."""
    lucky = of_eager("one_shot", latency_us, 5.0)
    others = [of_eager(name, 11.0, 10.0) for name in ("two_shot", "lamport")]
    scores = pool([lucky, *others], {one.candidate for one in (lucky, *others)}).scored
    assert {scored.candidate.variant: scored.score for scored in scores}["one_shot"] >= 10.0
    rows, asked = [of_eager("library", 10.0, 10.0), *others], problem(mode="eager")
    assert chosen([*rows, lucky], asked)[1] == "library"
    assert chosen([*rows, of_eager("one_shot", 4.9, 5.0)], asked)[1] == "one_shot"


def test_without_the_librarys_time_or_with_a_disturbed_one_the_latency_counts() -> None:
    for library_us in (None, 15.1):
        assert comparable(of_eager("one_shot", 6.0, library_us), 10.0) == 6.0
    assert comparable(of_eager("one_shot", 6.0, 15.0), None) == 6.0
    assert comparable(of_eager("one_shot", 6.0, 14.9), 10.0) < 6.0


def test_eager_calls_that_were_not_tuned_run_as_in_graphs() -> None:
    graphs = curve("one_shot", {4096: 4.0, 16384: 6.0})
    for asked in (problem(4096, **EAGER), problem(8192, **EAGER), problem(8192, **EAGER, dtype="float16")):
        decision = decide(graphs, asked)
        assert (decision.candidate, decision.source) == (candidate("one_shot"), "heuristic")
        assert (decision.latency_us, decision.library_us) == (None, None), "times in graphs are none of eager calls"
    own = [*graphs, row("two_shot", 9.0, 4096, like=EAGER)]
    assert chosen(own, problem(4096, **EAGER)) == ("exact", "two_shot")
    refused = decide(graphs, problem(4096, **EAGER), feasible=lambda which: "no")
    assert (refused.source, reasons(refused)) == ("library", {"one_shot": "no"})
    eager = [row("one_shot", 4.0, 4096, like=EAGER)]
    assert chosen(eager, problem(4096))[0] == "library", "graphs never run as eager calls do"


# What is never considered


def test_numerics_policy() -> None:
    rows = [row("atomic", 2.0), row("two_shot", 5.0), row("library", 10.0)]
    decision = decide(rows)
    assert decision.candidate == candidate("two_shot")
    assert reasons(decision).keys() == {"atomic"}
    assert "'unordered'" in reasons(decision)["atomic"]
    assert chosen(rows, policy="any")[1] == "atomic"
    assert chosen(rows, policy="ordered")[1] == "two_shot"


def test_policy_ordered_never_returns_the_library() -> None:
    slow, far = [row("one_shot", 12.0), row("library", 10.0)], problem(1 << 30)
    assert chosen(slow) == ("exact", "library")
    assert chosen(slow, policy="ordered") == ("exact", "one_shot")
    assert chosen(slow, far)[1] == "library"
    assert chosen(slow, far, policy="ordered") == ("interpolated", "one_shot")
    with pytest.raises(InfeasibleError, match="tunedcomm tune"):
        decide([row("library", 10.0)], policy="ordered")


def test_tuning_is_not_recommended_where_it_can_find_nothing() -> None:
    with pytest.raises(InfeasibleError, match=r"run `tunedcomm tune`.*numerics='default'"):
        decide([], policy="ordered")
    with pytest.raises(InfeasibleError, match="one_shot: no max") as caught:
        decide([], policy="ordered", no_kernel="one_shot: no max")
    assert "tunedcomm tune" not in str(caught.value)
    assert chosen([row("one_shot", 4.0)], policy="ordered", no_kernel="unasked")[0] == "exact"
    assert chosen([], no_kernel="the library may run")[0] == "library"


def test_infeasible_stale_and_unknown_candidates_are_passed_over_with_their_reason() -> None:
    rows = [row("lamport", 2.0), row("one_shot", 2.5, source_hash="before"), row("retired", 1.0), row("two_shot", 5.0)]
    decision = decide(rows, feasible=refusing("lamport"))
    assert decision.candidate == candidate("two_shot")
    assert reasons(decision)["lamport"] == "too large"
    assert "source has changed" in reasons(decision)["one_shot"]
    assert "no source here" in reasons(decision)["retired"]
    assert chosen(rows[1:2]) == ("library", "library")


# Forced and pinned


def test_forced_overrides_everything_but_feasibility() -> None:
    rows = [row("lamport", 2.0), row("atomic", 9.0)]
    pins = (Pinned(problem=problem(), candidate=candidate("lamport"), reason=""),)
    decision = decide(snapshot(rows, pins=pins), forced=candidate("atomic"))
    assert (decision.candidate, decision.source, decision.latency_us) == (candidate("atomic"), "forced", 9.0)
    assert "policy 'default'" in decision.why
    assert chosen(rows, forced=candidate("library"))[1] == "library"
    with pytest.raises(InfeasibleError, match="too large"):
        decide(rows, forced=candidate("atomic"), feasible=refusing("atomic"))
    with pytest.raises(InfeasibleError, match="all_gather"):
        decide(rows, forced=Candidate.of("all_gather", "library", {}))


def pinned(variant: str, asked: int = 4096, **changes: Any) -> Snapshot:
    pin = Pinned(problem=problem(asked), candidate=candidate(variant), reason="bit-exact run", layer="site")
    return snapshot([row("lamport", 2.0), row("two_shot", 5.0)], pins=(pin,), **changes)


def test_a_pin_comes_before_measurements_but_not_before_policy_and_feasibility() -> None:
    decision = decide(pinned("two_shot"))
    assert (decision.candidate, decision.source, decision.layer) == (candidate("two_shot"), "pin", "site")
    assert "bit-exact run" in decision.why
    assert chosen(pinned("library")) == ("pin", "library")
    assert chosen(pinned("two_shot", 8192))[0] == "exact"
    assert chosen(pinned("two_shot"), feasible=refusing("two_shot"))[1] == "lamport"
    decision = decide(pinned("atomic"))
    assert decision.candidate == candidate("lamport")
    assert "'unordered'" in reasons(decision)["atomic"]
    failed = Failure(problem=problem(8192), candidate=candidate("two_shot"), source_hash="current", status="incorrect")
    measured = pinned("two_shot", failures=(failed,))
    assert chosen(measured)[0] == "pin", "it is good at this very size"
    decision = decide(replace(measured, rows=measured.rows[:1]))
    assert decision.candidate == candidate("lamport")
    assert "incorrect" in reasons(decision)["two_shot"]


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
    assert "between 4 KiB and 8 KiB" in decision.why
    assert chosen(rows, problem(4098))[1] == "two_shot", "one_shot is on the edge of a step here"


def test_a_config_measured_at_the_smaller_size_alone_takes_twice_as_long_for_twice_as_much() -> None:
    rows = [*curve("one_shot", {4096: 3.0}, LIBRARY), *curve("two_shot", {4096: 5.0, 16384: 6.0}, LIBRARY)]
    decision = decide(rows, problem(8192))
    assert (decision.candidate, decision.runner_up) == (candidate("two_shot"), candidate("one_shot"))
    assert decision.runner_up_us == pytest.approx(6.0)


def test_nothing_is_extrapolated_beyond_a_factor_of_two() -> None:
    rows = curve("one_shot", {4096: 4.0, 16384: 5.0})
    for size in (2048, 32768):
        assert chosen(rows, problem(size)) == ("interpolated", "one_shot")
    for size in (2046, 32770):
        assert chosen(rows, problem(size)) == ("library", "library")
    assert "`tunedcomm tune` measures it" in decide(rows, problem(1 << 20)).why


def test_every_trial_is_interpolated_but_not_of_other_software() -> None:
    finals, other = curve("one_shot", {4096: 5.0, 16384: 6.0}), row("two_shot", 1.0, 16384, final=False)
    mixed = [*finals, row("two_shot", 1.0, 4096), other]
    assert chosen(mixed, problem(8192))[1] == "two_shot"
    assert chosen(mixed, problem(16384))[1] == "one_shot", "at its own size the finals decide"
    decision = decide([*finals, row("two_shot", 1.0, 4096, drift=True), other], problem(8192))
    assert decision.candidate == candidate("one_shot")
    assert "other software" in reasons(decision)["two_shot"]


def test_candidates_that_failed_in_the_family_are_not_interpolated() -> None:
    rows = curve("lamport", {4096: 2.0, 16384: 3.0}) + curve("one_shot", {4096: 5.0, 16384: 6.0})
    failure = Failure(problem=problem(8192), candidate=candidate("lamport"), source_hash="current", status="incorrect")
    decision = decide(snapshot(rows, failures=(failure,)), problem(6000))
    assert decision.candidate == candidate("one_shot")
    assert "incorrect" in reasons(decision)["lamport"]
    assert chosen(snapshot(rows, failures=(failure,)), problem(4096))[1] == "lamport", "there it was right"
    for other in (replace(failure, source_hash="before"), replace(failure, problem=problem(8192, mode="eager"))):
        assert chosen(snapshot(rows, failures=(other,)), problem(6000))[1] == "lamport"


def test_what_the_library_saves_by_another_protocol_no_kernel_saves() -> None:
    slow = {"baseline_p50_us": 40.0}
    rows = [row("one_shot", 5.0, 4096), row("one_shot", 8.0, 8192, **slow), row("two_shot", 8.2, 8192, **slow)]
    decision = decide(rows, problem(4200))
    assert decision.candidate == candidate("one_shot")
    assert decision.runner_up_us == pytest.approx(8.2 * 5.0 * (8.0 / 5.0) ** math.log2(4200 / 4096) / 8.0)


# In one round what others do in two


def rounds(of: Problem, which: Candidate) -> int:
    """A grid of n blocks does n times as much in a round."""
    return -(-of.nbytes // (2048 * int(which.config_dict.get("num_blocks", 1))))


def two_blocks() -> list[Row]:
    """Goes round twice at 6000 bytes, and is expected to take 5.5 µs there."""
    return [row("lamport", 4.0, 4096, num_blocks=2), row("lamport", 5.5, 8192, num_blocks=2)]


def test_a_config_measured_further_up_joins_where_it_alone_needs_one_round() -> None:
    rows = [*two_blocks(), row("lamport", 6.0, 16384, num_blocks=4)]
    assert decide(rows, problem(6000)).candidate == candidate("lamport", 2), "rounds that nobody knows change nothing"
    decision = decide(rows, problem(6000), rounds_of=rounds)
    assert (decision.candidate, decision.source) == (candidate("lamport", 4), "interpolated")
    fastest_us = 4.0 * (5.5 / 4.0) ** math.log2(6000 / 4096)  # of both neighbours
    assert decision.latency_us == pytest.approx(1.05 * fastest_us), "no less than the fastest, and the noise"
    assert (decision.runner_up, decision.runner_up_us) == (candidate("lamport", 2), pytest.approx(5.5))


@pytest.mark.parametrize(("four_us", "num_blocks"), [(6.0, 4), (9.0, 8)])
def test_of_those_that_need_one_round_the_one_that_saves_a_round_is_preferred(four_us: float, num_blocks: int) -> None:
    """Unless it is slow; 8 blocks save none."""
    rows = [*two_blocks(), row("lamport", four_us, 16384, num_blocks=4), row("lamport", 5.8, 16384, num_blocks=8)]
    assert decide(rows, problem(6000), rounds_of=rounds).candidate == candidate("lamport", num_blocks)


@pytest.mark.parametrize(
    ("more", "size"),
    [
        (row("one_shot", 6.0, 16384, num_blocks=4), 6000),
        (row("lamport", 6.0, 16384, num_blocks=4, drift=True), 6000),
        (row("lamport", 6.0, 2 * MAX_GAP * 6000, num_blocks=4), 6000),
        (row("lamport", 6.0, 16384, num_blocks=4), 4090),
    ],
    ids=["another variant", "other software", "too far away", "nobody needs two rounds there"],
)
def test_who_does_not_join(more: Row, size: int) -> None:
    rows = [row("lamport", 3.9, 2048, num_blocks=2), *two_blocks(), more]
    assert decide(rows, problem(size), rounds_of=rounds).candidate == candidate("lamport", 2)


@pytest.mark.parametrize(
    ("variant", "config", "numel", "expected"),
    [
        ("lamport", {"num_blocks": 2, "num_warps": 2}, 1349, 2),  # 169 packets, 128 threads
        ("lamport", {"num_blocks": 2, "num_warps": 4}, 1349, 1),
        ("lamport", {"num_blocks": 2, "num_warps": 4}, 2048, 1),
        ("lamport", {"num_blocks": 2, "num_warps": 4}, 2049, 2),
        ("two_shot_lamport", {"num_blocks": 2, "num_warps": 2}, 2048, 1),  # half of 256 packets
        ("two_shot_lamport", {"num_blocks": 2, "num_warps": 2}, 2049, 2),
        ("one_shot", {"num_blocks": 2, "num_warps": 4, "items": 2}, 4096, 1),
        ("one_shot", {"num_blocks": 2, "num_warps": 4, "items": 2}, 4097, 2),
        ("two_shot", {"num_blocks": 2, "num_warps": 2, "items": 2, "num_chunks": 1}, 4096, 1),
        ("two_shot", {"num_blocks": 2, "num_warps": 2, "items": 2, "num_chunks": 1}, 40960, 10),
        ("library", {}, 4096, 0),
    ],
)
def test_rounds_of_the_variants(variant: str, config: dict[str, Any], numel: int, expected: int) -> None:
    kernels.discover()
    asked = Problem("all_reduce", (numel,), "bfloat16", 2)
    assert get_variant("all_reduce", variant).num_rounds(asked, config) == expected


def test_every_kernel_with_a_grid_says_how_often_it_goes_round() -> None:
    kernels.discover()
    limits, big = limits_for(H200, 4), Problem("all_reduce", (1 << 24,), "bfloat16", 4)
    for name in ("lamport", "one_shot", "two_shot", "two_shot_lamport", "multimem_one_shot", "multimem_two_shot"):
        variant = get_variant("all_reduce", name)
        assert variant.num_rounds(big, variant.default(big, limits)) > 1, name


@pytest.mark.parametrize("latency_us", [5e-324, 1e300])
def test_a_time_beyond_reason_is_left_out(latency_us: float, tmp_path: Path) -> None:
    """Of rows from elsewhere; a sum or a ratio of such times would be 0 or infinite."""
    with Database.open(tmp_path / "tuned.db", create=True) as database:
        database.record([trial(final=True, problem=problem(size)) for size in (4096, 16384)])
        with database._engine.begin() as connection:
            connection.exec_driver_sql("UPDATE trial SET latency_p50_us = ? WHERE id = 1", (latency_us,))
    loaded = load_snapshot(H200, 4, layers=[Layer("user", str(tmp_path / "tuned.db"))])
    assert [row.problem for row in loaded.rows] == [problem(16384)]
    assert chosen(loaded, problem(8192))[1] == "one_shot"


# Matrices (M, N, K)

SHAPE = (1024, 8192, 2048)


def gemm(m: int, n: int = SHAPE[1], k: int = SHAPE[2], **changes: Any) -> Problem:
    return problem(**{"shape": (m, n, k), "layout": "nk", **changes})


def at(variant: str, latency_us: float, shape: tuple[int, int, int], library_us: float = 100.0, **like: Any) -> Row:
    return row(variant, latency_us, baseline_p50_us=library_us, like={"shape": shape, "layout": "nk", **like})


def test_another_m_of_the_same_matrices_is_predicted_between_its_neighbours() -> None:
    low, high = (512, 8192, 2048), (2048, 8192, 2048)
    rows = [at("one_shot", 40.0, low), at("one_shot", 90.0, high, 200.0)]
    rows += [at("two_shot", 60.0, low), at("two_shot", 70.0, high, 200.0)]
    assert chosen(rows, gemm(576)) == ("interpolated", "one_shot")
    assert chosen(rows, gemm(1920)) == ("interpolated", "two_shot")
    assert chosen(rows, gemm(512))[0] == "exact"


@pytest.mark.parametrize(
    ("shape", "found"),
    [
        ((512, 8192, 2048), True),
        ((2000, 8192, 2048), True),
        ((1024, 8192, 3072), True),
        ((2048, 4096, 4096), True),
        ((512, 16384, 1024), True),
        ((2049, 8192, 3072), False),
        ((1024, 4095, 2048), False),
        ((1024, 8192, 4097), False),
        ((1024, 8192, 0), False),
    ],
)
def test_other_shapes_within_a_factor_of_two_in_each_extent(shape: tuple[int, int, int], found: bool) -> None:
    decision = decide([at("one_shot", 40.0, SHAPE)], gemm(*shape))
    assert (decision.source, decision.candidate.variant) == (
        ("interpolated", "one_shot") if found else ("library", "library")
    )
    assert decision.latency_us is None, "what it takes there is not known"


def test_the_nearest_shape_is_that_which_is_off_by_the_least_factor_in_all() -> None:
    rows = [
        at("one_shot", 40.0, (1024, 8192, 2048)),  # 1.4 in K
        at("two_shot", 40.0, (1024, 7168, 2816)),  # 1.14 in N, 1.03 in K
        at("lamport", 40.0, (2048, 8192, 2880)),  # 2 in M
    ]
    asked = gemm(1024, 8192, 2888)
    assert chosen(rows, asked)[1] == "two_shot"
    assert chosen(rows, asked, feasible=refusing("two_shot"))[1] == "one_shot"
    # Another M of the very matrices is asked before other matrices, within the same factor.
    assert chosen(rows, gemm(1024, 8192, 2880))[1] == "lamport"


# Where nothing of the family is measured


@pytest.mark.parametrize(
    ("op", "stored", "asked", "said"),
    [
        ("all_reduce", {}, {"reduction": "avg"}, "reduction=sum"),
        ("all_reduce", {}, {"in_place": True}, "in_place=False"),
        ("all_reduce", {"in_place": True}, {}, "in_place=True"),
        ("all_reduce", {}, {"input_kind": "symmetric"}, "input_kind=plain"),
        ("all_reduce", {}, {"dtype": "float16"}, "dtype=bfloat16"),
        ("all_reduce", {"dtype": "float16"}, {"reduction": "avg"}, "reduction=sum, dtype=float16"),
        ("all_reduce", {}, {"reduction": "avg", "in_place": True}, "reduction=sum, in_place=False"),
        ("ag_gemm", {}, {"layout": "nk+gathered"}, "layout=nk"),
        ("ag_gemm", {"layout": "nk+gathered"}, {}, "layout=nk+gathered"),
        ("gemm_ar", {}, {"layout": "nk+bias"}, "layout=nk"),
        ("gemm_rs", {}, {"layout": "kn"}, "layout=nk"),
        ("gemm_rs", {"layout": "nk+float32"}, {"layout": "kn+float32"}, "layout=nk+float32"),
        ("gemm_rs", {"scaling": "rowwise"}, {"scaling": "tensorwise"}, "scaling=rowwise"),
        ("gemm_rs", {}, {"reduction": "avg", "dtype": "float16"}, "reduction=sum, dtype=bfloat16"),
    ],
)
def test_a_family_without_rows_asks_its_relatives(
    op: str, stored: dict[str, Any], asked: dict[str, Any], said: str
) -> None:
    is_gemm = "gemm" in op
    shapes: list[Any] = [SHAPE, (1024, 8192, 2560)] if is_gemm else [(2048,), (4096,)]
    here = {"op": op, "layout": "nk" if is_gemm else "", "shape": shapes[0]}
    rows = [row("one_shot", 4.0, like={**here, **stored})]
    for shape in shapes:
        decision = decide(rows, problem(**{**here, **asked, "shape": shape}))
        assert (decision.candidate, decision.source) == (candidate("one_shot"), "interpolated")
        assert f"with {said}: " in decision.why
        assert shape != shapes[0] or decision.latency_us == 4.0


@pytest.mark.parametrize(
    ("stored", "asked"),
    [
        ({"mode": "eager"}, {}),
        ({"input_kind": "symmetric"}, {}),
        ({"reduction": "avg"}, {}),
        ({}, {"reduction": "max"}),
        ({}, {"dtype": "float32", "shape": (1024,)}),
        ({"dtype": "float16", "mode": "eager"}, {"mode": "graph"}),
    ],
)
def test_what_never_relaxes(stored: dict[str, Any], asked: dict[str, Any]) -> None:
    decision = decide([row("one_shot", 4.0, like=stored)], problem(**asked))
    assert (decision.candidate, decision.source) == (candidate("library"), "library")
    assert "nothing of this kind" in decision.why


def test_a_rule_of_thumb_holds_where_no_size_near_is_measured() -> None:
    rule, rows = candidate("one_shot"), [row("two_shot", 4.0, 4096), row("library", 9.0, 4096)]
    far, known = problem(1 << 30), {"by_rule_of_thumb": rule}
    for measured, asked in (([], problem()), (rows, far)):
        decision = decide(measured, asked, **known)
        assert (decision.candidate, decision.source, decision.latency_us) == (rule, "heuristic", None)
    assert chosen(rows, **known)[1] == "two_shot"
    lost = [row("two_shot", 12.0, 4096), row("library", 9.0, 4096)]
    assert chosen([*lost, row("one_shot", 11.0, 4096)], **known)[1] == "library"
    failure = Failure(problem=problem(), candidate=rule, source_hash="current", status="incorrect")
    assert chosen(snapshot(rows, failures=(failure,)), far, **known)[1] == "library"
    assert chosen(rows, far, **known, feasible=lambda which: "no")[1] == "library"


@pytest.mark.parametrize("mode", ["graph", "eager"])
def test_rows_without_the_rule_of_thumbs_variant_do_not_overrule_it(mode: str) -> None:
    """Calls ran it untuned: a sweep that has not measured it must not make them slower."""
    rule, like = candidate("one_shot"), {"like": {"mode": mode}}
    asked, library, other = problem(mode=mode), row("library", 9.0, **like), row("two_shot", 12.0, **like)
    for rows in ([library], [library, other], [row("library", 9.0), row("two_shot", 12.0)]):
        assert chosen(rows, asked, by_rule_of_thumb=rule) == ("heuristic", "one_shot")
    for slower in (row("one_shot", 12.0, **like), row("one_shot", 12.0, num_blocks=64, **like)):
        assert chosen([library, slower], asked, by_rule_of_thumb=rule) == ("exact", "library")
    stale = row("one_shot", 12.0, source_hash="older", **like)
    assert chosen([library, stale], asked, by_rule_of_thumb=rule) == ("heuristic", "one_shot")


def test_the_library_is_as_fast_as_itself() -> None:
    decision = decide([row("library", 717.0, baseline_p50_us=589.0)])
    assert (decision.source, decision.latency_us, decision.library_us) == ("library", 717.0, 717.0)


# Few SMs


def sms(which: Candidate) -> int:
    return {"library": -1, "two_shot": 0}.get(which.variant, int(which.config_dict.get("num_blocks", -1)))


@pytest.mark.parametrize(
    ("limit", "expected"),
    [
        (None, candidate("one_shot", 64)),
        (64, candidate("one_shot", 64)),
        (63, candidate("one_shot", 8)),
        (8, candidate("one_shot", 8)),
        (7, candidate("lamport", 2)),
        (1, candidate("two_shot")),
        (0, candidate("two_shot")),
    ],
)
def test_max_sms_leaves_out_what_takes_more(limit: int | None, expected: Candidate) -> None:
    rows = [
        row("one_shot", 3.0, num_blocks=64),
        row("one_shot", 4.0, num_blocks=8, final=False),
        row("lamport", 5.0, num_blocks=2, final=False),
        row("two_shot", 30.0, final=False),
    ]
    decision = decide(rows, blocks_of=sms, max_sms=limit)
    assert (decision.candidate, decision.source) == (expected, "exact")
    if limit == 7:
        assert "max_sms=7" in dict(decision.passed_over)["one_shot(num_blocks=64)"]


def test_what_fits_need_not_beat_the_library_which_serves_where_nothing_does() -> None:
    slow = [row("lamport", 50.0, num_blocks=2)]
    assert chosen(slow, blocks_of=sms)[1] == "library"
    assert chosen(slow, blocks_of=sms, max_sms=2)[1] == "lamport"
    assert chosen(slow, blocks_of=sms, max_sms=1) == ("library", "library")
    unknown = decide(slow, max_sms=132)
    assert unknown.candidate == candidate("library")
    assert "max_sms=132" in reasons(unknown)["lamport"]


def test_max_sms_holds_between_sizes_and_for_pins_but_not_for_the_forced() -> None:
    rows = [
        row("one_shot", us, size, num_blocks=blocks)
        for blocks, size, us in ((64, 4096, 3.0), (64, 8192, 4.0), (8, 4096, 5.0), (8, 8192, 6.0))
    ]
    large = candidate("one_shot", 64)
    few: dict[str, Any] = {"blocks_of": sms, "max_sms": 16}
    assert decide(rows, problem(6000), **few).candidate == candidate("one_shot", 8)
    pins = snapshot(rows, pins=(Pinned(problem=problem(), candidate=large, reason="test"),))
    assert chosen(pins, blocks_of=sms)[0] == "pin"
    assert chosen(pins, **few)[0] == "exact"
    assert decide(rows, forced=large, **few).candidate == large


# Of every decision


def test_an_empty_snapshot_gives_the_library() -> None:
    decision = decide([])
    assert (decision.candidate, decision.source, decision.passed_over) == (candidate("library"), "library", ())
    assert chosen([], problem(0))[1] == chosen([row("one_shot", 4.0)], problem(0))[1] == "library"


def test_decisions_are_pure_and_do_not_depend_on_row_order() -> None:
    rng = random.Random(3)
    rows = []
    for variant in ("one_shot", "two_shot", "lamport", "atomic"):
        for blocks in (1, 4):
            for exponent in range(6):
                tier = {"final": rng.random() < 0.7, "layer_rank": rng.randint(0, 2)}
                rows.append(row(variant, rng.uniform(2, 12), 1024 << exponent, num_blocks=blocks, **tier))
    for size in (1024, 1500, 5000, 40000, 70000, 100):
        first = decide(rows, problem(size))
        for _ in range(5):
            rng.shuffle(rows)
            assert decide(rows, problem(size)) == first
        assert first.candidate.variant in NUMERICS
        assert str(first.candidate) not in dict(first.passed_over)
        json.dumps(first.to_dict(), allow_nan=False)
