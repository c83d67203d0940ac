"""Comparable scores: how much the library's time counts in graphs and in eager calls."""

from __future__ import annotations

import csv
import math
from pathlib import Path

import pytest
from db_samples import candidate, decide, problem, row

from tunedcomm.selection.score import Pool, comparable, pool
from tunedcomm.selection.snapshot import Row

ROOT = Path(__file__).parents[2]
STUDY = ROOT / "bench" / "results" / "db" / "eager_scores.csv"


def scores(found: Pool) -> dict[str, float]:
    return {scored.candidate.variant: scored.score for scored in found.scored}


def of_eager(variant: str, latency_us: float, library_us: float | None, size: int = 4096) -> Row:
    return row(variant, latency_us, size, baseline_p50_us=library_us, like={"mode": "eager"})


def test_the_librarys_time_counts_in_full_in_graphs_and_with_its_root_in_eager_calls() -> None:
    graph = row("one_shot", 6.1, baseline_p50_us=13.7)
    assert comparable(graph, 11.3) == 6.1 / 13.7 * 11.3, "to the last bit"
    eager = of_eager("one_shot", 6.1, 13.7)
    assert comparable(eager, 11.3) == pytest.approx(6.1 * math.sqrt(11.3 / 13.7))
    assert comparable(eager, 13.7) == pytest.approx(6.1)
    assert [comparable(eager, 11.3, share) for share in (0.0, 1.0)] == [6.1, 6.1 / 13.7 * 11.3]


def test_an_eager_choice_does_not_follow_the_host_alone() -> None:
    """`lamport` is 10 % slower, and NCCL took 30 % longer beside it."""
    times = {"one_shot": (10.0, 30.0), "lamport": (11.0, 39.0), "two_shot": (12.0, 30.0)}
    eager = [of_eager(name, us, library_us) for name, (us, library_us) in times.items()]
    decision = decide(eager, problem(mode="eager"))
    assert (decision.candidate, decision.library_us) == (candidate("lamport"), 30.0)
    assert decision.latency_us == pytest.approx(11 / math.sqrt(1.3))
    slower = [of_eager("lamport", 11.8, 39.0) if one.candidate == candidate("lamport") else one for one in eager]
    assert decide(slower, problem(mode="eager")).candidate == candidate("one_shot")
    in_graphs = [row("one_shot", 10.0, baseline_p50_us=30.0), row("lamport", 11.8, baseline_p50_us=39.0)]
    assert decide(in_graphs).candidate == candidate("lamport"), "11.8 / 39 is less than 10 / 30"


@pytest.mark.parametrize("latency_us", [5.0, 5.5])
def test_what_is_no_faster_than_the_library_beside_it_is_not_chosen(latency_us: float) -> None:
    """The host was fast in that run: half of the ratio would make it faster than the library's median."""
    lucky = of_eager("one_shot", latency_us, 5.0)
    others = [of_eager(name, 11.0, 10.0) for name in ("two_shot", "lamport")]
    assert scores(pool([lucky, *others], {one.candidate: None for one in (lucky, *others)}))["one_shot"] >= 10.0
    asked = problem(mode="eager")
    assert decide([of_eager("library", 10.0, 10.0), lucky, *others], asked).candidate == candidate("library")
    barely = of_eager("one_shot", 4.9, 5.0)
    assert decide([of_eager("library", 10.0, 10.0), barely, *others], asked).candidate == candidate("one_shot")


# The study


def study() -> list[dict[str, str]]:
    with STUDY.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def test_without_the_librarys_time_or_with_a_disturbed_one_the_latency_counts() -> None:
    for library_us in (None, 15.1):
        assert comparable(of_eager("one_shot", 6.0, library_us), 10.0) == 6.0
    assert comparable(of_eager("one_shot", 6.0, 15.0), None) == 6.0
    assert comparable(of_eager("one_shot", 6.0, 14.9), 10.0) < 6.0
