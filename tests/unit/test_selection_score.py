"""Comparable scores: how much the library's time counts in graphs and in eager calls."""

from __future__ import annotations

import csv
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
from db_samples import candidate, decide, problem, row

from tunedcomm.selection.interpolate import predict_between
from tunedcomm.selection.score import Pool, comparable, pool
from tunedcomm.selection.snapshot import Row

ROOT = Path(__file__).parents[2]
STUDY = ROOT / "bench" / "results" / "db" / "eager_scores.csv"
EAGER = {"like": {"mode": "eager"}}


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


def test_without_the_librarys_time_or_with_a_disturbed_one_the_latency_counts() -> None:
    for library_us in (None, 15.1):
        assert comparable(of_eager("one_shot", 6.0, library_us), 10.0) == 6.0
    assert comparable(of_eager("one_shot", 6.0, 15.0), None) == 6.0
    assert comparable(of_eager("one_shot", 6.0, 14.9), 10.0) < 6.0


def test_predictions_between_sizes_go_by_the_same_scores() -> None:
    low = [of_eager("one_shot", 8.0, 20.0), of_eager("two_shot", 9.0, 14.0), of_eager("lamport", 9.0, 14.0)]
    high = [of_eager("one_shot", 8.0, 20.0, 8192), of_eager("two_shot", 9.0, 14.0, 8192)]
    usable = {one.candidate: None for one in low}
    found = scores(predict_between(low, high, (4096, 4096, 8192), usable))
    assert found["one_shot"] == pytest.approx(8 * math.sqrt(14 / 20))
    assert found["two_shot"] == pytest.approx(9.0)


# The study


def study() -> list[dict[str, str]]:
    with STUDY.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def test_the_exponent_is_one_that_was_measured_to_be_better() -> None:
    """At 1 MiB and above by the truth of graphs; from one window to another at every size."""
    found = {(r["truth"], r["world_size"], r["op"], r["sizes"], float(r["exponent"])): r for r in study()}
    halves = [key for key in found if key[4] == 0.5]
    assert len(halves) >= 8
    for key in halves:
        half, full = found[key], found[(*key[:4], 1.0)]
        assert half["past_library"] == "0"
        if key[0] == "again" or (key[2] == "all_reduce" and key[3] == ">= 1 MiB"):
            assert float(half["spread"]) < 0.9 * float(full["spread"]), key
        if key[0] == "graph" and key[3] == ">= 1 MiB":
            assert float(half["regret_mean"]) <= float(full["regret_mean"]), key
            assert float(half["regret_worst"]) <= min(1.07, float(full["regret_worst"])), key


def test_the_study_is_what_the_committed_rows_give(tmp_path: Path) -> None:
    out = tmp_path / "scores.csv"
    done = subprocess.run(
        [sys.executable, "bench/eager_scores.py", "--csv", str(out)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    with out.open(newline="", encoding="utf-8") as file:
        again = list(csv.DictReader(file))
    elsewhere = {"python", "command", "date"}
    assert [[r[name] for name in r if name not in elsewhere] for r in again] == [
        [r[name] for name in r if name not in elsewhere] for r in study()
    ]
