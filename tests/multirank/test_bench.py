"""bench/stress.py on the host; `tunedcomm bench --peers` through stand-ins in tests/data/fake_peers."""

from __future__ import annotations

import csv
import importlib
import os
import runpy
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from harness import run_ranks
from planted_cases import OP

ROOT = Path(__file__).parents[2]
OPS = ("all_to_all_v", "all_reduce_bias")
MORE = ("ag_gemm", "gemm_rs", "gemm_ar", "ep_dispatch", "ep_combine")
REST = ("all_to_all", "reduce_scatter", "all_gather", "all_reduce", "all_reduce_rms_norm", *MORE)


def plant_one_that_writes_behind() -> None:
    planted = importlib.import_module("planted")
    spoil = planted.after(lambda problem, output: output.as_strided((problem.numel + 1,), (1,))[-1:].fill_(1.0))
    planted.plant("writes_behind", spoil)


def body(
    rank: int, world_size: int, names: tuple[str, ...], only: tuple[str, ...], mode: str = ""
) -> list[dict[str, Any]]:
    sys.path.insert(0, str(ROOT / "bench"))
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
    ran = Counter[tuple[str, str]]()
    for row in rows:
        ran[row["op"], row["variant"]] += 2 if row["not_run"] else row["launches"]
    assert set(ran.values()) == {2}, ran
    assert {row["variant"] for row in rows if row["launches"]} >= {"library", "lamport"}
    assert not any(row["wrong"] for row in rows)


def test_launches_of_a_graph_are_counted_and_right() -> None:
    """Here a graph is a function; each trial is launched once before it is captured."""
    rows, others = run_ranks(2, body, ("all_reduce_bias",), ("library", "lamport"), "graph", timeout=120)
    assert [row["launches"] for row in rows] == [row["launches"] for row in others]
    assert {row["variant"]: row["launches"] - row["problems"] for row in rows} == {"library": 2, "lamport": 2}
    assert not any(row["wrong"] for row in rows)


def test_buffers_that_peers_address_are_stressed() -> None:
    variants = ("tokens_direct", "tokens_pull")
    rows, _ = run_ranks(2, body, ("ep_dispatch", "ep_combine"), variants, "buffers", timeout=200)
    assert {(row["op"], row["variant"]): row["launches"] for row in rows} == {
        ("ep_dispatch", "tokens_direct"): 2, ("ep_combine", "tokens_pull"): 2
    }  # fmt: skip
    assert not any(row["wrong"] for row in rows)


SPOILT = ("other_bits", "nan_on_odd_sizes", "wrong_by_one_element")


@pytest.mark.parametrize(
    ("mode", "wrong"),
    [("", SPOILT), ("graph", SPOILT), ("concurrent", (*SPOILT, "wrong_second_launch", "writes_behind"))],
)
def test_what_is_wrong_is_found(mode: str, wrong: tuple[str, ...]) -> None:
    """Beside others also results of the launch before, and bytes behind an output."""
    right = ("good", "library") if mode == "concurrent" else ("good",)
    for rows in run_ranks(2, body, (OP,), (*right, *wrong), mode, timeout=120):
        assert {row["variant"]: row["wrong"] > 0 for row in rows} == {n: n in wrong for n in (*right, *wrong)}


def test_both_lanes_run_beside_each_other_with_small_grids() -> None:
    rows, others = run_ranks(2, body, ("all_to_all_v",), (), "concurrent", timeout=300)
    assert [row["launches"] for row in rows] == [row["launches"] for row in others]
    assert {row["variant"] for row in rows if row["not_run"]} == {"library"}
    assert all(row["launches"] >= 2 for row in rows if not row["not_run"])
    assert not any(row["wrong"] for row in rows)


# `tunedcomm bench --peers`: other projects' kernels beside ours, through stand-ins in tests/data/fake_peers


FAKES = ROOT / "tests" / "data" / "fake_peers"
ALL = ("deepep", "flashinfer", "helion", "kraken", "triton_distributed")
# Op and shape to the peers that have an adapter for it.
CASES = {
    ("all_reduce", "4096"): set(ALL) - {"deepep"},
    ("all_gather", "1024"): {"kraken"},
    ("all_reduce_bias", "4x256"): {"kraken"},
    ("all_reduce_rms_norm", "4x256"): {"flashinfer"},
    ("ag_gemm", "256x64x32"): {"helion", "kraken", "triton_distributed"},
    ("gemm_rs", "128x64x32"): {"helion", "kraken", "triton_distributed"},
    ("gemm_ar", "16x64x32"): {"kraken"},
    ("ep_dispatch", "7x128x2x8"): set(),
}
Found = tuple[list[dict[str, Any]], list[dict[str, str]]]


def _no_gemm(op: str) -> list[str]:
    """The contender that is left out of an op without a GEMM."""
    return [] if "gemm" in op else ["cublas"]


def measure(rank: int, world_size: int, mode: Any) -> dict[tuple[str, str], Found]:
    """Rows and who was left out, by op and shape, as a rank of the benchmark has them."""
    sys.path.insert(0, str(FAKES))
    import torch

    from tunedcomm import kernels
    from tunedcomm.bench.runner import Bencher
    from tunedcomm.dispatch.groups import get_communicator
    from tunedcomm.spec import Problem, get_op, parse_shape

    kernels.discover()
    communicator = get_communicator(None, torch.device("cpu"))
    paths = [str(path) for path in (ROOT / "bench" / "peers").glob("[!_]*.py")]
    found = {}
    for op, shape in CASES:
        job = {
            "contenders": ["library", *ALL, *_no_gemm(op)], "peers": paths, "link_gb_s": 100.0, "seed": 0,
            "inputs": "random", "run_id": "1", "command": "bench",
        }  # fmt: skip
        bencher = Bencher(communicator, job)
        spec = get_op(op)
        problem = Problem(
            op, parse_shape(shape), "bfloat16", world_size, reduction=next(iter(spec.reductions), ""),
            layout=spec.layouts[0], mode=mode,
        )  # fmt: skip
        found[op, shape] = bencher.rows(problem), bencher.left_out
    return found


@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_peers_run_beside_the_library(mode: str) -> None:
    mine, other = run_ranks(2, measure, mode, timeout=300, env={"NVSHMEM_DISABLE_NVLS": "1"})
    assert mine.keys() == other.keys() == CASES.keys()
    for (op, shape), eager in CASES.items():
        expected = eager - {"triton_distributed"} if mode == "graph" and "gemm" in op else eager
        rows, left_out = mine[op, shape]
        assert {row["contender"] for row in rows} == {"library", *expected}, (op, left_out)
        for row in rows:
            assert 0 < row["latency_p10_us"] <= row["latency_p50_us"] <= row["latency_p90_us"]
            assert row["error"] <= 8e-3
            assert row["config"] or row["contender"] == "library"
            assert ("gemm" in op) == (row["ceiling_share"] is None)  # of a GEMM only beside the GEMM alone
        assert {one["peer"] for one in left_out} == {*ALL, *_no_gemm(op)} - expected
        assert left_out == other[op, shape][1]


def exchange(rank: int, world_size: int) -> tuple[bool, str]:
    """Whether DeepEP's pair, by its stand-in, sends each token to its experts' ranks and back; its refusal of fp32."""
    sys.path.insert(0, str(FAKES))
    import torch

    from tunedcomm.peers import LeftOut
    from tunedcomm.spec import Problem

    adapter = runpy.run_path(str(ROOT / "bench" / "peers" / "deepep.py"))
    problem = Problem("ep_dispatch", (6, 64, 2, 8), "bfloat16", world_size, reduction="", layout="tokens")
    x = torch.arange(6 * 64).reshape(6, 64).add(rank).bfloat16()
    ids = torch.tensor([[0, 1], [0, 7], [4, 5], [3, 4], [7, 6], [2, 3]], dtype=adapter["IDS"])
    came = adapter["experts_pair"](problem, x.device)((x, ids, torch.ones(6, 2)))
    with pytest.raises(LeftOut) as refused:
        adapter["experts_pair"](replace(problem, dtype="float32"), x.device)
    num_ranks = (ids // 4).eq(0).any(1).int() + (ids // 4).eq(1).any(1)
    return torch.equal(came, (x.float() * num_ranks[:, None]).bfloat16()), str(refused.value)


def test_deepeps_pair_comes_back_once_a_rank() -> None:
    for is_right, refusal in run_ranks(2, exchange):
        assert is_right
        assert "bfloat16" in refusal


def measure_plugin(rank: int, world_size: int) -> list[dict[str, Any]]:
    import torch

    from tunedcomm import kernels
    from tunedcomm.bench.runner import Bencher
    from tunedcomm.dispatch.groups import get_communicator
    from tunedcomm.spec import Problem, get_op, get_variant, register_op, register_variant

    kernels.discover()
    register_op(replace(get_op("all_reduce"), name="all_sum"))
    register_variant(replace(get_variant("all_reduce", "library"), op="all_sum"))
    job = {"contenders": ["tuned"], "peers": [], "link_gb_s": 1.0, "seed": 0, "inputs": "random"}
    bencher = Bencher(get_communicator(None, torch.device("cpu")), {**job, "run_id": "1", "command": "bench"})
    return bencher.rows(Problem("all_sum", (512,), "float32", world_size, mode="eager"))


def test_a_plugins_op_without_a_public_function_is_measured() -> None:
    for rows in run_ranks(2, measure_plugin):
        assert {row["contender"] for row in rows} == {"library", "tuned"}
        assert all(row["error"] <= 1e-6 and row["ceiling_share"] > 0 for row in rows)


def test_what_may_make_multicast_objects_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    from tunedcomm.bench.contenders import load_adapter
    from tunedcomm.peers import LeftOut
    from tunedcomm.spec import Problem

    monkeypatch.syspath_prepend(str(FAKES))
    monkeypatch.setenv("NVSHMEM_DISABLE_NVLS", "0")
    adapter = load_adapter(ROOT / "bench" / "peers" / "triton_distributed.py")
    try:
        with pytest.raises(LeftOut, match="set NVSHMEM_DISABLE_NVLS=1"):
            list(adapter.peers(Problem("all_reduce", (512,), "bfloat16", 2), torch.device("cpu")))
    finally:  # other tests count on the package being absent
        for name in [name for name in sys.modules if name.partition(".")[0] == "triton_dist"]:
            del sys.modules[name]


@pytest.mark.slow
def test_ctrl_c_keeps_what_was_measured_and_no_rank_reports_it(tmp_path: Path) -> None:
    """No kernel is interpreted unless it is named: the first problem ends within seconds."""
    table, command = tmp_path / "rows.csv", [sys.executable, "-m", "tunedcomm.cli.main", "bench", "--op", "all_reduce"]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job ignores it, and so would its children
    said = tmp_path / "said.txt"
    with (
        said.open("w") as out,
        subprocess.Popen(
            [*command, "--shape", "512,33554432", "--csv", str(table)],
            env=environment, stdout=out, stderr=subprocess.PIPE, text=True,
        ) as bench,
    ):  # fmt: skip
        deadline = time.monotonic() + 300
        while "host_one_shot" not in said.read_text():  # printed a moment after the table has it
            assert time.monotonic() < deadline
            assert bench.poll() is None
            time.sleep(0.05)
        bench.send_signal(signal.SIGINT)
        _, err = bench.communicate(timeout=60)
    assert bench.returncode == 130, err
    assert "Traceback" not in err
    found = {row["contender"] for row in csv.DictReader(table.open())}
    assert "library" in found
    assert found <= {
        "library",
        "tuned",
        "host_one_shot",
        "host_two_shot",
    }
