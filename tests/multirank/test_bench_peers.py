"""`tunedcomm bench --peers`: other projects' kernels beside ours, through stand-ins in tests/data/fake_peers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from harness import run_ranks

ROOT = Path(__file__).parents[2]
FAKES = ROOT / "tests" / "data" / "fake_peers"
ALL = ("flashinfer", "helion", "kraken", "triton_distributed")
# Op and shape to the peers that have an adapter for it.
CASES = {
    ("all_reduce", "4096"): set(ALL),
    ("all_gather", "1024"): {"kraken"},
    ("all_reduce_bias", "4x256"): {"kraken"},
    ("all_reduce_rms_norm", "4x256"): {"flashinfer"},
    ("ag_gemm", "256x64x32"): {"helion", "kraken", "triton_distributed"},
    ("gemm_rs", "128x64x32"): {"helion", "kraken", "triton_distributed"},
    ("gemm_ar", "16x64x32"): {"kraken"},
}
Found = tuple[list[dict[str, Any]], list[dict[str, str]]]


def measure(rank: int, world_size: int, mode: Any) -> dict[tuple[str, str], Found]:
    """Rows and who was left out, by op and shape, as a rank of the benchmark has them."""
    sys.path.insert(0, str(FAKES))
    import torch

    from tunedcomm import kernels
    from tunedcomm.bench.runner import Bencher
    from tunedcomm.dispatch.communicator import get_communicator
    from tunedcomm.spec import Problem, get_op, parse_shape

    kernels.discover()
    communicator = get_communicator(None, torch.device("cpu"))
    paths = [str(path) for path in (ROOT / "bench" / "peers").glob("[!_]*.py")]
    found = {}
    for op, shape in CASES:
        job = {
            "contenders": ["library", *ALL], "peers": paths, "link_gb_s": 100.0, "seed": 0, "run_id": "1",
            "command": "bench",
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
        assert {one["peer"] for one in left_out} == set(ALL) - expected
        assert left_out == other[op, shape][1]


def bench(*arguments: str, **environment: str) -> tuple[list[dict[str, Any]], str]:
    """Rows and what stderr said of 2 ranks on the host."""
    done = subprocess.run(
        [sys.executable, "-m", "tunedcomm.cli.main", "bench", "--world-size", "2", "--json", *arguments],
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT), **environment},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout), done.stderr


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
