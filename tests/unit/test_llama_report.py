"""What is made of the model's measurements: bars, and the environment that they are taken in."""

from __future__ import annotations

import copy
import csv
import importlib
import math
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parents[2]
BENCH = ROOT / "bench"
# µs a step where every bar is cleared
GOOD = {
    "library_eager": 300.0,
    "library_compiled": 200.0,
    "async_tp_compiled": 190.0,
    "intercept_eager": 250.0,
    "intercept_compiled": 170.0,
    "fusion_compiled": 150.0,
}


def bench(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCH))
    return importlib.import_module(name)


@pytest.fixture
def report(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return bench("llama_tp", monkeypatch)


def rows_of(report: ModuleType, times: dict[str, float], *, workloads: Any = None, run_id: str = "a") -> list[Any]:
    blank = dict.fromkeys(report.COLUMNS, "")
    common = {"status": "ok", "mode": "graph", "tokens_per_s": 1.0, "error": 0.0, "gpu": "NVIDIA H200", "world_size": 4}
    return [
        blank
        | common
        | {"workload": workload, "configuration": name, "latency_p50_us": time, "us_per_layer": time, "run_id": run_id}
        for workload in workloads or report.BARS
        for name, time in times.items()
    ]


def missed(report: ModuleType, rows: list[Any]) -> list[str]:
    return [str(verdict) for verdict in report.verdicts(rows) if not verdict.passed]


def test_bars_are_cleared(report: ModuleType) -> None:
    assert missed(report, rows_of(report, GOOD)) == []
    assert len(report.verdicts(rows_of(report, GOOD))) == 5 + 5 * 3


def test_the_best_of_pytorch_is_what_counts(report: ModuleType) -> None:
    found = missed(report, rows_of(report, GOOD | {"async_tp_compiled": 160.0}))
    assert len(found) == 4  # 160 / 150 is enough for training only
    assert all("fusion_compiled is 1.067 times as fast as async_tp_compiled" in text for text in found)


def test_each_way_may_not_be_slower_than_the_same_without_us(report: ModuleType) -> None:
    found = missed(report, rows_of(report, GOOD | {"intercept_eager": 304.0}))
    assert len(found) == 5
    assert all("intercept_eager is 0.987 times as fast as library_eager" in text for text in found)
    assert missed(report, rows_of(report, GOOD | {"intercept_eager": 302.0})) == []


def test_training_has_to_be_faster(report: ModuleType) -> None:
    rows = rows_of(report, GOOD | {"fusion_compiled": 190.0, "intercept_compiled": 190.0}, workloads=["train"])
    verdicts = report.verdicts(rows, ["train"])
    assert not verdicts[0].passed
    assert "more than 1" in verdicts[0].text


@pytest.mark.parametrize("status", ["wrong", "failed", "stalled"])
def test_what_failed_is_missed(report: ModuleType, status: str) -> None:
    rows = rows_of(report, GOOD)
    slower = next(row for row in rows if row["configuration"] == "intercept_compiled")
    slower.update(status=status, reason="it is broken")
    assert missed(report, rows) == [f"MISSED   prefill: intercept_compiled {status}: it is broken"]


def test_what_was_not_measured_is_missed(report: ModuleType) -> None:
    rows = [row for row in rows_of(report, GOOD) if row["workload"] != "decode_8"]
    assert missed(report, rows) == ["MISSED   decode_8: not measured on both sides"]


@pytest.mark.slow
def test_a_file_is_checked_by_its_last_runs(
    report: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "new" / "rows.csv"
    slow = GOOD | {"fusion_compiled": 500.0, "intercept_compiled": 500.0}
    command = [sys.executable, str(BENCH / "llama_tp.py"), "--report", str(path), "--check"]
    exits = []
    for times, workloads, run_id in ((slow, None, "a"), (GOOD, None, "b"), (slow, ["decode_64"], "c")):
        bench("rows", monkeypatch).append(path, rows_of(report, times, workloads=workloads, run_id=run_id))
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.stderr == ""
        exits.append(done.returncode)
    assert exits == [1, 0, 1]
    lost = [line for line in done.stdout.splitlines() if line.startswith("MISSED")]
    assert lost
    assert all("decode_64" in line for line in lost)
    with path.open(newline="", encoding="utf-8") as file:
        assert len(list(csv.DictReader(file))) == 2 * 5 * 6 + 6


def test_differences(monkeypatch: pytest.MonkeyPatch) -> None:
    difference = bench("llama_tp", monkeypatch).difference
    x = torch.ones(4)
    assert difference([x, x], [x, x]) == (0.0, True)
    error, same = difference([x, x * 1.5], [x, x])
    assert (error, same) == (pytest.approx(0.5), False)
    assert difference([x * math.nan], [x]) == (math.inf, False)


def test_what_moves_data_in_a_graph_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind the fusion pass, which knows process groups: Inductor's copy of its settings must not copy it."""
    counting = bench("llama_tp", monkeypatch).Counting
    functional = torch.ops._c10d_functional
    graph, seen = torch.fx.Graph(), []
    x = graph.placeholder("x")
    for _ in range(2):
        x = graph.call_function(functional.all_reduce.default, (x, "sum", "0"))
        x = graph.call_function(functional.wait_tensor.default, (x,))
    graph.output(graph.call_function(torch.ops.aten.relu.default, (x,)))
    found = counting(seen.append)
    assert copy.deepcopy(found) is found
    found(graph)
    assert str(found) == "2 all_reduce"
    assert seen == [graph]


def test_multicast_is_off_before_torch_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch reads the variables as it is imported."""
    names = ("NCCL_NVLS_ENABLE", "TORCH_SYMM_MEM_DISABLE_MULTICAST")
    for name in names:
        monkeypatch.delenv(name, raising=False)
    code = f"""
import builtins, os
seen, kept = [], builtins.__import__
def look(name, *rest):
    if name.partition(".")[0] == "torch" and not seen:
        seen.append([os.environ.get(each) for each in {names}])
    return kept(name, *rest)
builtins.__import__ = look
import llama_tp
print(*seen[0])
"""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(BENCH)])}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["0", "1"], done.stderr


@pytest.mark.parametrize("arguments", [["--only", "library_eager,magic"], ["--workload", "sleep"]])
def test_unknown_names_are_refused(arguments: list[str]) -> None:
    command = [sys.executable, str(BENCH / "llama_tp.py"), "--tiny", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert f"{arguments[1].rpartition(',')[2]}: not among" in done.stderr


def test_the_cost_of_interception_has_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NCCL_NVLS_ENABLE", "TORCH_SYMM_MEM_DISABLE_MULTICAST"):  # which it sets
        monkeypatch.setenv(name, os.environ.get(name, "0"))
    is_cheap = bench("intercept_cost", monkeypatch).is_cheap
    passed_on = {"call": "all_reduce passed on", "added_percent": 40.0}
    assert is_cheap([passed_on, {"call": "step", "added_percent": "0.9"}])
    assert is_cheap([passed_on, {"call": "step", "added_percent": -2.0}])
    assert not is_cheap([passed_on, {"call": "step", "added_percent": 1.1}])
