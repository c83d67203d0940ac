"""Selection where nothing of the family is measured, and properties of every decision."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from db_samples import NUMERICS, candidate, decide, problem, row, snapshot

from tunedcomm.errors import InfeasibleError
from tunedcomm.selection.select import Decision
from tunedcomm.selection.snapshot import Failure, Pinned
from tunedcomm.spec import Candidate


def reasons(decision: Decision) -> dict[str, str]:
    return dict(decision.passed_over)


# Relatives


@pytest.mark.parametrize(
    ("stored", "asked", "said"),
    [
        ({}, {"reduction": "avg"}, "reduction=sum"),
        ({}, {"in_place": True}, "in_place=False"),
        ({"in_place": True}, {}, "in_place=True"),
        ({}, {"input_kind": "symmetric"}, "input_kind=plain"),
        ({}, {"dtype": "float16"}, "dtype=bfloat16"),
        ({"dtype": "float16"}, {"reduction": "avg"}, "reduction=sum, dtype=float16"),
        ({}, {"reduction": "avg", "in_place": True}, "reduction=sum, in_place=False"),
    ],
)
def test_a_family_without_rows_asks_its_relatives(stored: dict[str, Any], asked: dict[str, Any], said: str) -> None:
    rows = [row("one_shot", 4.0, 4096, like=stored), row("one_shot", 6.0, 16384, like=stored)]
    decision = decide(rows, problem(8192, **asked))
    assert (decision.candidate, decision.source) == (candidate("one_shot"), "interpolated")
    assert f"predicted between 4 KiB and 16 KiB with {said}: " in decision.why
    same_size = decide(rows, problem(4096, **asked))
    assert (same_size.source, same_size.latency_us) == ("interpolated", 4.0)
    assert f"measured at 4 KiB with {said}: " in same_size.why


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
    assert "nothing of this kind is measured" in decision.why


# Heuristic, library, and the whole


def test_eager_calls_that_were_not_tuned_run_as_in_graphs() -> None:
    graphs = [row("one_shot", 4.0, 4096), row("one_shot", 6.0, 16384)]
    for asked in (
        problem(4096, mode="eager"),
        problem(8192, mode="eager"),
        problem(8192, mode="eager", dtype="float16"),
    ):
        decision = decide(graphs, asked)
        assert (decision.candidate, decision.source) == (candidate("one_shot"), "heuristic")
        assert decision.why.startswith("not tuned outside of graphs; in graphs: ")
        assert (decision.latency_us, decision.library_us) == (None, None), "times in graphs are none of eager calls"
    own = [*graphs, row("two_shot", 9.0, 4096, like={"mode": "eager"})]
    assert decide(own, problem(4096, mode="eager")).candidate == candidate("two_shot")
    assert decide(own, problem(4096, mode="eager")).source == "exact"
    refused = decide(graphs, problem(4096, mode="eager"), feasible=lambda which: "no")
    assert (refused.source, reasons(refused)) == ("library", {"one_shot(num_blocks=4)": "no"})
    eager = [row("one_shot", 4.0, 4096, like={"mode": "eager"})]
    assert decide(eager, problem(4096)).source == "library", "graphs never run as eager calls do"


def test_a_rule_of_thumb_holds_where_no_size_near_is_measured() -> None:
    rule, rows = candidate("one_shot"), [row("two_shot", 4.0, 4096), row("library", 9.0, 4096)]
    for known, asked in (([], problem()), (rows, problem(1 << 30))):
        decision = decide(known, asked, by_rule_of_thumb=rule)
        assert (decision.candidate, decision.source, decision.latency_us) == (rule, "heuristic", None)
    assert decide(rows, problem(), by_rule_of_thumb=rule).candidate == candidate("two_shot")
    lost = [row("two_shot", 12.0, 4096), row("library", 9.0, 4096)]
    assert decide(lost, problem(), by_rule_of_thumb=rule).candidate == candidate("library")
    failure = Failure(problem=problem(), candidate=rule, source_hash="current", status="incorrect")
    failed = snapshot(rows, failures=(failure,))
    assert decide(failed, problem(1 << 30), by_rule_of_thumb=rule).candidate == candidate("library")
    refused = decide(rows, problem(1 << 30), by_rule_of_thumb=rule, feasible=lambda which: "no")
    assert refused.candidate == candidate("library")


# Few SMs


def sms(which: Candidate) -> int:
    return {"library": -1, "two_shot": 0}.get(which.variant, int(which.config_dict.get("num_blocks", -1)))


def test_max_sms_leaves_out_what_takes_more() -> None:
    rows = [
        row("one_shot", 3.0, num_blocks=64),
        row("one_shot", 4.0, num_blocks=8, final=False),
        row("lamport", 5.0, num_blocks=2, final=False),
        row("two_shot", 30.0, final=False),
    ]
    assert decide(rows, blocks_of=sms).candidate == candidate("one_shot", 64)
    for limit, chosen in (
        (64, candidate("one_shot", 64)), (63, candidate("one_shot", 8)), (8, candidate("one_shot", 8)),
        (7, candidate("lamport", 2)), (1, candidate("two_shot")), (0, candidate("two_shot")),
    ):  # fmt: skip
        decision = decide(rows, blocks_of=sms, max_sms=limit)
        assert decision.candidate == chosen, limit
        assert decision.source == "exact"
    passed = reasons(decide(rows, blocks_of=sms, max_sms=7))
    assert passed["one_shot(num_blocks=64)"] == "takes 64 SMs, with max_sms=7"


def test_what_fits_need_not_beat_the_library_which_serves_where_nothing_does() -> None:
    slow = [row("lamport", 50.0, num_blocks=2)]
    assert decide(slow, blocks_of=sms).candidate == candidate("library")
    assert decide(slow, blocks_of=sms, max_sms=2).candidate == candidate("lamport", 2)
    decision = decide(slow, blocks_of=sms, max_sms=1)
    assert (decision.candidate, decision.source) == (candidate("library"), "library")
    unknown = decide(slow, max_sms=132)
    assert unknown.candidate == candidate("library")
    assert "max_sms=132" in reasons(unknown)["lamport(num_blocks=2)"]


def test_max_sms_holds_between_sizes_and_for_pins_but_not_for_the_forced() -> None:
    rows = [
        row("one_shot", 3.0, 4096, num_blocks=64), row("one_shot", 4.0, 8192, num_blocks=64),
        row("one_shot", 5.0, 4096, num_blocks=8), row("one_shot", 6.0, 8192, num_blocks=8),
    ]  # fmt: skip
    assert decide(rows, problem(6000), blocks_of=sms, max_sms=16).candidate == candidate("one_shot", 8)
    pin = Pinned(problem=problem(), candidate=candidate("one_shot", 64), reason="test")
    assert decide(snapshot(rows, pins=(pin,)), blocks_of=sms).source == "pin"
    assert decide(snapshot(rows, pins=(pin,)), blocks_of=sms, max_sms=16).source == "exact"
    forced = decide(rows, blocks_of=sms, max_sms=16, forced=candidate("one_shot", 64))
    assert forced.candidate == candidate("one_shot", 64)


def test_an_empty_snapshot_gives_the_library() -> None:
    decision = decide([])
    assert (decision.candidate, decision.source, decision.passed_over) == (candidate("library"), "library", ())
    assert decide([], problem(0)).candidate == candidate("library")
    assert decide([row("one_shot", 4.0)], problem(0)).candidate == candidate("library")


def test_tuning_is_not_recommended_where_it_can_find_nothing() -> None:
    with pytest.raises(InfeasibleError, match=r"run `tunedcomm tune`, or allow numerics='default'$"):
        decide([], policy="ordered")
    with pytest.raises(InfeasibleError) as caught:
        decide([], policy="ordered", no_kernel="one_shot: no max")
    assert "tuning would find none: one_shot: no max. Allow numerics='default'" in str(caught.value)
    assert "tunedcomm tune" not in str(caught.value)
    assert decide([row("one_shot", 4.0)], policy="ordered", no_kernel="unasked").source == "exact"
    assert decide([], no_kernel="the library may run").source == "library"


def test_decisions_are_pure_and_do_not_depend_on_row_order() -> None:
    rng = random.Random(3)
    rows = [
        row(
            variant,
            rng.uniform(2, 12),
            1024 << e,
            num_blocks=blocks,
            final=rng.random() < 0.7,
            layer_rank=rng.randint(0, 2),
        )
        for variant in ("one_shot", "two_shot", "lamport", "atomic")
        for blocks in (1, 4)
        for e in range(6)
    ]
    for size in (1024, 1500, 5000, 40000, 70000, 100):
        first = decide(rows, problem(size))
        for _ in range(5):
            rng.shuffle(rows)
            assert decide(rows, problem(size)) == first
        assert first.candidate.variant in NUMERICS
        assert str(first.candidate) not in reasons(first)
        json.dumps(first.to_dict(), allow_nan=False)
