"""The committed measurements: their columns, and the bars that they have to clear."""

from __future__ import annotations

import csv
import os
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest

from tunedcomm import kernels
from tunedcomm.bench.csv import COLUMNS
from tunedcomm.spec import get_op, ops, variants

RESULTS = Path(__file__).parents[2] / "bench" / "results"
PEERS = ("library", "torch_one_shot_symmetric", "torch_two_shot_symmetric")
Runs = dict[tuple[str, str], dict[str, float]]

# bytes of all_reduce on 4 GPUs: (most µs or None, least ratio of the best peer's time in the same run to ours)
BARS = {
    4 << 10: (3.2, 2.1),
    64 << 10: (3.6, 2.3),
    256 << 10: (5.5, 1.65),
    1 << 20: (8.9, 1.45),
    2 << 20: (13.6, 1.35),
    4 << 20: (24.5, 1.15),
    16 << 20: (None, 1.05),
    64 << 20: (None, 1.0),
    256 << 20: (None, 1.0),
}
# least ratio of NCCL's time to ours on 4 GPUs, by bytes up to which it holds
OVER_NCCL = {
    "all_gather": {64 << 10: 2.5, 4 << 20: 1.3, 1 << 40: 1.08},
    "reduce_scatter": {64 << 10: 2.5, 4 << 20: 1.25, 1 << 40: 1.04},
    "all_to_all": {64 << 10: 2.5, 1 << 40: 1.05},
}


def rows(name: str) -> list[dict[str, str]]:
    with (RESULTS / name).open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def runs(name: str, op: str, world_size: int, mode: str = "graph") -> Runs:
    """(Message bytes or shape, run) to contender to median in µs, in bf16."""
    found: Runs = defaultdict(dict)
    for row in rows(name):
        if (row["op"], row["world_size"], row["mode"], row["dtype"]) == (op, str(world_size), mode, "bfloat16"):
            key = row["shape"] if "x" in row["shape"] else row["message_bytes"]
            found[key, row["run_id"]][row["contender"]] = float(row["latency_p50_us"])
    return {key: run for key, run in found.items() if "tuned" in run}


@pytest.mark.parametrize("path", sorted(RESULTS.glob("*.csv")), ids=lambda path: path.name)
def test_columns(path: Path) -> None:
    found = rows(path.name)
    assert found
    for row in found:
        assert tuple(row) == tuple(COLUMNS)[: len(row)]  # later versions added columns at the end
        for column in ("gpu", "torch", "command", "run_id", "date", "contender"):
            assert row[column], (column, row)
        low, middle, high = (float(row[f"latency_{q}_us"]) for q in ("p10", "p50", "p90"))
        assert 0 < low <= middle <= high
        assert not row["error"] or "norm" in row["op"] or float(row["error"]) <= 1e-2, row


@pytest.mark.parametrize("size", sorted(BARS))
def test_all_reduce_clears_its_bar_on_four_gpus(size: int) -> None:
    most_us, least_ratio = BARS[size]
    found = [run for (key, _), run in runs("all_reduce_h200.csv", "all_reduce", 4).items() if key == str(size)]
    complete = [run for run in found if set(PEERS[::2]) <= set(run)]
    assert complete, "no run holds dispatch's choice beside NCCL and PyTorch's operators"
    for run in complete:
        assert min(run[name] for name in PEERS if name in run) / run["tuned"] >= least_ratio, run
        assert most_us is None or run["tuned"] <= most_us, run


@pytest.mark.parametrize("op", OVER_NCCL)
def test_other_collectives_beat_nccl_on_four_gpus(op: str) -> None:
    found = runs("collectives_h200.csv", op, 4)
    assert len(found) >= 8
    for (size, _), run in found.items():
        least = next(ratio for most, ratio in OVER_NCCL[op].items() if int(size) <= most)
        assert run["library"] >= least * run["tuned"], (size, run)


def test_the_fused_norm_beats_a_compiled_norm_on_four_gpus() -> None:
    found = runs("collectives_h200.csv", "all_reduce_rms_norm", 4)
    assert len(found) >= 8
    for (shape, _), run in found.items():
        least = 1.5 if int(shape.partition("x")[0]) <= 128 else 1.19
        assert run["nccl_compiled_norm"] >= least * run["tuned"], (shape, run)


@pytest.mark.parametrize("op", ["gemm_rs", "ag_gemm", "gemm_ar"])
def test_a_fused_gemm_is_faster_than_every_peer(op: str) -> None:
    found = runs("gemm_h200.csv", op, 4)
    newest = {shape: run for (shape, _), run in found.items()}
    assert len(newest) >= 12
    for shape, run in newest.items():
        assert run["tuned"] < min(us for name, us in run.items() if name not in ("tuned", "cublas")), (shape, run)


def host_costs(name: str) -> dict[str, dict[str, float]]:
    found: dict[str, dict[str, float]] = defaultdict(dict)
    for row in rows(name):
        found[row["run_id"]][row["contender"].removeprefix("host_cost:")] = float(row["latency_p50_us"])
    return found


def test_an_eager_call_costs_less_than_pytorchs_operator() -> None:
    found = list(host_costs("eager_cost_h200.csv").values())
    assert len(found) >= 5
    assert all(run["tuned"] <= 0.9 * run["torch_one_shot"] for run in found)
    last = [run for run in found if "above_launch" in run][-3:]
    assert all(run["above_launch"] <= 1.5 / 8 * run["torch_one_shot"] for run in last)


def test_the_bound_of_waits_costs_at_most_two_percent() -> None:
    builds: dict[tuple[str, str], dict[str, float]] = defaultdict(dict)
    for row in rows("bound_cost_h200.csv"):
        name, _, build = row["contender"].partition(":")
        builds[name, row["message_bytes"]][build] = float(row["latency_p50_us"])
    assert {name for name, _ in builds} >= {"lamport", "one_shot", "two_shot"}
    assert all(pair["bounded"] <= 1.02 * pair["unbounded"] for pair in builds.values())


@pytest.mark.parametrize(("world_size", "most_mean", "most"), [("4", 1.015, 1.09), ("2", 1.03, 1.12)])
def test_dispatch_loses_little_between_the_tuned_sizes(world_size: str, most_mean: float, most: float) -> None:
    rules = {row["rule"]: row for row in rows("replay/regret_rules_h200.csv") if row["world_size"] == world_size}
    ours = rules["dispatch"]
    assert int(ours["sizes"]) == 40
    assert float(ours["regret_mean"]) <= most_mean
    assert float(ours["regret_worst"]) <= most
    assert float(ours["library_over_choice_least"]) >= 0.97
    assert float(ours["regret_mean"]) == min(float(row["regret_mean"]) for row in rules.values())


@pytest.mark.slow
def test_a_replay_gives_the_committed_regret(tmp_path: Path) -> None:
    root, out = RESULTS.parents[1], tmp_path / "rules.csv"
    done = subprocess.run(
        [sys.executable, "bench/regret.py", "report", "--csv", str(out)],
        cwd=root,
        env={**os.environ, "PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    committed = RESULTS / "replay" / "regret_rules_h200.csv"
    assert out.read_text(encoding="utf-8") == committed.read_text(encoding="utf-8")


def test_every_variant_that_gpus_could_run_was_launched_often_and_never_wrong() -> None:
    kernels.discover()
    launched: dict[tuple[str, str], int] = defaultdict(int)
    for row in rows("stress/stress_h200.csv"):
        assert row["wrong"] == "0", row
        launched[row["op"], row["variant"]] += int(row["launches"])
    for op in ops():
        least = 2_000 if get_op(op).rank_of_shape == 3 else 10_000
        for name in variants(op):
            if "multimem" not in name and not name.startswith("host_"):  # multicast had to stay off; CPU tensors
                assert launched[op, name] >= least, (op, name)
