"""The scripts that measure a whole model, on CPUs with toy sizes."""

from __future__ import annotations

import csv
import importlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import run_ranks

ROOT = Path(__file__).parents[2]
BENCH = ROOT / "bench"
WORLD_SIZE = 2
WORKLOADS = ("prefill", "decode_1", "decode_8", "train")
Rows = list[dict[str, str]]


def launch(script: Path, *arguments: str | Path, timeout: float = 240) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(BENCH)]), "OMP_NUM_THREADS": "1"}
    env.update(GLOO_SOCKET_IFNAME="lo", CUDA_VISIBLE_DEVICES="", TUNEDCOMM_WORKSPACE_MIB="1")
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(WORLD_SIZE)]
    return subprocess.run(
        [sys.executable, *launcher, str(script), *map(str, arguments)],
        env=env,
        cwd=script.parent,
        capture_output=True,
        text=True,
        check=False,
        timeout=timeout,
    )


def read(path: Path) -> Rows:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def of(rows: Rows, workload: str, configuration: str) -> dict[str, str]:
    found = [row for row in rows if (row["workload"], row["configuration"]) == (workload, configuration)]
    assert len(found) == 1, (workload, configuration, found)
    return found[0]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("llama")


@pytest.fixture(scope="module")
def eager(folder: Path) -> tuple[Rows, subprocess.CompletedProcess[str]]:
    names = "library_eager,intercept_eager,async_tp_compiled,fusion_compiled"
    done = launch(BENCH / "llama_tp.py", "--tiny", "--check", "--only", names, "--csv", folder / "eager.csv")
    return read(folder / "eager.csv"), done


@pytest.fixture(scope="module")
def compiled(folder: Path) -> Rows:
    names = "library_eager,library_compiled,intercept_compiled"
    options = ["--workload", "decode_1,train", "--csv", folder / "compiled.csv"]
    done = launch(BENCH / "llama_tp.py", "--tiny", "--only", names, *options)
    assert done.returncode == 0, done.stderr
    return read(folder / "compiled.csv")


@pytest.mark.slow
@pytest.mark.parametrize("workload", WORKLOADS)
def test_rows_are_right(eager: tuple[Rows, Any], workload: str) -> None:
    library, ours = (of(eager[0], workload, name) for name in ("library_eager", "intercept_eager"))
    for row in (library, ours):
        assert row["status"] == "ok", row["reason"]
        assert float(row["error"]) <= 1e-5
        low, middle, high = (float(row[f"latency_{q}_us"]) for q in ("p10", "p50", "p90"))
        assert 0 < low <= middle <= high
        assert float(row["us_per_layer"]) == pytest.approx(middle / int(row["layers"]), rel=1e-3)
        tokens = int(row["batch"]) * int(row["tokens"])
        assert float(row["tokens_per_s"]) == pytest.approx(tokens * 1e6 / middle, rel=0.1, abs=0.1)
        for column in ("gpu", "fabric", "torch", "triton", "tunedcomm", "command", "run_id", "date"):
            assert row[column], column
        assert row["command"].startswith("bench/llama_tp.py --tiny")
        assert "/" not in row["command"].removeprefix("bench/"), "folders of this machine are left out"
    assert (library["error"], library["bit_equal"], library["num_served"]) == ("0.0", "True", "0")


# Behind attention and MLP a sum; before each a gather and behind each a scatter; as many again on the way back.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("workload", "served"),
    [
        ("prefill", {"all_gather_into_tensor": 2, "reduce_scatter_tensor": 2}),
        ("decode_1", {"all_reduce": 2}),
        ("decode_8", {"all_reduce": 2}),
        ("train", {"all_gather_into_tensor": 4, "reduce_scatter_tensor": 4}),
    ],
)
def test_interception_serves_the_model(eager: tuple[Rows, Any], workload: str, served: dict[str, int]) -> None:
    row = of(eager[0], workload, "intercept_eager")
    assert row["served_by"] == ", ".join(f"{count} {call} by lamport" for call, count in served.items())
    assert (int(row["num_served"]), row["num_passed_on"]) == (sum(served.values()), "0")


@pytest.mark.slow
@pytest.mark.parametrize("workload", WORKLOADS)
def test_what_cannot_run_here_says_why(eager: tuple[Rows, Any], workload: str) -> None:
    overlapped, fused = (of(eager[0], workload, name) for name in ("async_tp_compiled", "fusion_compiled"))
    assert (overlapped["status"], fused["status"]) == ("unavailable", "unavailable")
    assert "symmetric memory on GPUs" in overlapped["reason"]
    assert "Inductor" in fused["reason"]


@pytest.mark.slow
def test_missed_bars_end_in_an_error(eager: tuple[Rows, subprocess.CompletedProcess[str]], folder: Path) -> None:
    """Interpreted kernels are slower than the library by far."""
    rows, done = eager
    assert done.returncode != 0
    lines = [line for line in done.stdout.splitlines() if line.startswith(("MISSED", "cleared"))]
    for workload in WORKLOADS:
        assert float(of(rows, workload, "intercept_eager")["latency_p50_us"]) > 0
        assert any(line.startswith(f"MISSED   {workload}: intercept_eager is 0.") for line in lines), lines


@pytest.mark.slow
@pytest.mark.parametrize("workload", ["decode_1", "train"])
def test_compiled_code_is_served(compiled: Rows, workload: str) -> None:
    library, ours = (of(compiled, workload, name) for name in ("library_compiled", "intercept_compiled"))
    assert (library["status"], ours["status"]) == ("ok", "ok"), (library["reason"], ours["reason"])
    assert max(float(row["error"]) for row in (library, ours)) <= 1e-5
    assert library["num_served"] == "0"
    assert int(ours["num_served"]) == {"decode_1": 2, "train": 8}[workload]
    assert ours["num_passed_on"] == "0"


def split_and_whole(rank: int, world_size: int) -> None:
    """The parallel stack computes what the whole one does, and its gradients."""
    sys.path.insert(0, str(BENCH))
    model = importlib.import_module("llama_model")
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (world_size,))
    where: dict[str, Any] = {"device": torch.device("cpu"), "dtype": torch.float32}
    whole = model.build(model.TINY, 2, plan="sequence", mesh=None, tokens=12, **where)
    split = model.build(model.TINY, 2, plan="sequence", mesh=mesh, tokens=12, **where)
    x = model.seeded("x", (1, 12, model.TINY.hidden), **where).requires_grad_()
    part = x.detach().chunk(world_size, dim=1)[rank].clone().requires_grad_()
    y, of_part = whole(x), split(part)
    torch.testing.assert_close(of_part, y.chunk(world_size, dim=1)[rank], rtol=1e-4, atol=1e-5)
    y.square().sum().backward()
    of_part.square().sum().backward()
    assert x.grad is not None
    torch.testing.assert_close(part.grad, x.grad.chunk(world_size, dim=1)[rank], rtol=1e-4, atol=1e-4)
    for (name, ours), theirs in zip(split.named_parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(ours.grad.full_tensor(), theirs.grad, rtol=1e-3, atol=1e-3, msg=name)
    sizes: dict[str, Any] = {"tokens": 1, "context": 12, "batch": 3}
    whole = model.build(model.TINY, 2, plan="plain", mesh=None, **sizes, **where)
    split = model.build(model.TINY, 2, plan="plain", mesh=mesh, **sizes, **where)
    x = model.seeded("x", (3, 1, model.TINY.hidden), **where)
    with torch.no_grad():
        torch.testing.assert_close(split(x), whole(x), rtol=1e-4, atol=1e-5)


def test_the_split_model_is_the_whole_one() -> None:
    run_ranks(WORLD_SIZE, split_and_whole, timeout=120)


def what_python_runs(rank: int, world_size: int) -> list[str]:
    """Files of tunedcomm whose functions a step of unserved calls enters while its group is intercepted."""
    sys.path.insert(0, str(BENCH))
    script = importlib.import_module("intercept_cost")
    import tunedcomm

    calls, ours = script.calls_of(torch.device("cpu")), str(Path(tunedcomm.__file__).parent)
    entered: set[str] = set()

    def look(frame: Any, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(ours):
            entered.add(Path(frame.f_code.co_filename).name)

    found = []
    for name in ("step", "all_reduce passed on"):
        with tunedcomm.intercept():
            calls[name]()
            entered.clear()
            sys.setprofile(look)
            calls[name]()
            sys.setprofile(None)
        found.append(",".join(sorted(entered)))
    return found


def test_a_step_that_is_not_served_runs_none_of_our_python() -> None:
    for step, passed_on in run_ranks(WORLD_SIZE, what_python_runs, timeout=120):
        assert step == ""
        assert passed_on, "calls that are passed on by name are seen"


@pytest.mark.slow
def test_the_cost_of_interception_is_measured(folder: Path) -> None:
    path = folder / "cost.csv"
    done = launch(BENCH / "intercept_cost.py", "--calls", "3", "--blocks", "3", "--csv", path)
    assert done.returncode == 0, done.stderr
    rows = {row["call"]: row for row in read(path)}
    assert {"matmul", "step", "all_reduce passed on", "all_reduce of another group"} <= set(rows)
    for row in rows.values():
        assert float(row["outside_us"]) > 0
        assert float(row["inside_us"]) > 0
        assert row["command"].startswith("bench/intercept_cost.py")
        assert all(row[column] for column in ("gpu", "torch", "triton", "tunedcomm", "run_id", "date"))
