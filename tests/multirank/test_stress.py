"""bench/stress.py on the host: variants of several ops in the midst of each other; what is wrong is found."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from harness import run_ranks
from planted_cases import OP

BENCH = Path(__file__).parents[2] / "bench"
OPS = ("all_to_all", "all_to_all_v", "all_reduce_bias", "reduce_scatter")
REST = ("all_gather", "all_reduce", "all_reduce_rms_norm", "ag_gemm", "gemm_rs", "gemm_ar")


def plant_one_that_writes_behind() -> None:
    planted = importlib.import_module("planted")

    def writes_behind(problem: Any, config: Any, workspace: Any) -> Callable[..., None]:
        def launch(inputs: Any, outputs: Any, stream: int) -> None:
            planted.add_up(inputs, outputs)
            outputs[0].as_strided((problem.numel + 1,), (1,))[-1] = 1.0

        return launch

    planted.plant("writes_behind", writes_behind)


def body(
    rank: int, world_size: int, names: tuple[str, ...], only: tuple[str, ...], mode: str = ""
) -> list[dict[str, Any]]:
    sys.path.insert(0, str(BENCH))
    if OP in names:
        plant_one_that_writes_behind()
    stress = importlib.import_module("stress")
    stress.kernels.discover()
    rows: list[dict[str, Any]] = stress.stress(names, 2, 300.0, only, **dict.fromkeys(filter(None, [mode]), True))
    return rows


@pytest.mark.parametrize("names", [OPS, pytest.param(REST, marks=pytest.mark.slow)], ids=["some", "rest"])
def test_every_variant_is_right(names: tuple[str, ...]) -> None:
    rows, others = run_ranks(2, body, names, (), timeout=600)
    assert [row["launches"] for row in rows] == [row["launches"] for row in others]
    assert {row["op"] for row in rows} == set(names)
    assert all(row["launches"] == 2 or row["not_run"] for row in rows), rows
    assert {row["variant"] for row in rows if row["launches"]} >= {"library", "lamport"}
    assert not any(row["wrong"] for row in rows)


def test_launches_of_a_graph_are_counted_and_right() -> None:
    """Here a graph is a function; each trial is launched once before it is captured."""
    rows, others = run_ranks(2, body, ("all_reduce_bias",), ("library", "lamport"), "graph", timeout=120)
    assert [row["launches"] for row in rows] == [row["launches"] for row in others]
    assert {row["variant"]: row["launches"] - row["problems"] for row in rows} == {"library": 2, "lamport": 2}
    assert not any(row["wrong"] for row in rows)


@pytest.mark.parametrize("mode", ["", "graph", "concurrent"])
def test_what_is_wrong_is_found(mode: str) -> None:
    only = ("good", "other_bits", "nan_on_odd_sizes", "wrong_by_one_element")
    for rows in run_ranks(2, body, (OP,), only, mode, timeout=120):
        assert {row["variant"]: row["wrong"] > 0 for row in rows} == {name: name != "good" for name in only}


@pytest.mark.parametrize("name", ["library", "wrong_second_launch", "writes_behind"])
def test_every_launch_beside_others_is_judged(name: str) -> None:
    """Results of the launch before and bytes behind an output are found; `library` is judged by whole numbers."""
    for rows in run_ranks(2, body, (OP,), ("good", name), "concurrent", timeout=120):
        assert {row["variant"]: row["wrong"] > 0 for row in rows} == {"good": False, name: name != "library"}
        assert all(row["launches"] >= 2 for row in rows)


def test_both_lanes_run_beside_each_other_with_small_grids() -> None:
    rows, others = run_ranks(2, body, ("all_reduce_bias", "all_to_all_v"), (), "concurrent", timeout=300)
    assert [row["launches"] for row in rows] == [row["launches"] for row in others]
    assert {row["variant"] for row in rows if row["not_run"]} == {"library", "in_order"}
    assert all(row["launches"] >= 2 for row in rows if not row["not_run"])
    assert not any(row["wrong"] for row in rows)
