"""bench/stress.py on the host: variants of several ops in the midst of each other; what is wrong is found."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest
from harness import run_ranks
from planted_cases import OP

BENCH = Path(__file__).parents[2] / "bench"
OPS = ("all_to_all", "all_to_all_v", "all_reduce_bias", "reduce_scatter")
REST = ("all_gather", "all_reduce", "all_reduce_rms_norm", "ag_gemm", "gemm_rs", "gemm_ar")


def body(
    rank: int, world_size: int, names: tuple[str, ...], only: tuple[str, ...], graph: bool = False
) -> list[dict[str, Any]]:
    sys.path.insert(0, str(BENCH))
    if OP in names:
        importlib.import_module("planted")
    stress = importlib.import_module("stress")
    stress.kernels.discover()
    rows: list[dict[str, Any]] = stress.stress(names, 2, 300.0, only, graph=graph)
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
    rows, others = run_ranks(2, body, ("all_reduce_bias",), ("library", "lamport"), True, timeout=120)
    assert [row["launches"] for row in rows] == [row["launches"] for row in others]
    assert {row["variant"]: row["launches"] - row["problems"] for row in rows} == {"library": 2, "lamport": 2}
    assert not any(row["wrong"] for row in rows)


@pytest.mark.parametrize("graph", [False, True])
def test_what_is_wrong_is_found(graph: bool) -> None:
    only = ("good", "other_bits", "nan_on_odd_sizes", "wrong_by_one_element")
    for rows in run_ranks(2, body, (OP,), only, graph, timeout=120):
        assert {row["variant"]: row["wrong"] > 0 for row in rows} == {name: name != "good" for name in only}
