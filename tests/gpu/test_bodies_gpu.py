"""The ops on real GPUs, one process each: every test starts its own ranks, which run a body of a module beside it."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from programs import ROOT, TORCHRUN, python

SCRIPT = Path(__file__).with_name("run_bodies.py")
GEMMS = ("ag_gemm", "gemm_rs", "gemm_ar")
LONG = {"timeout": 900.0, "DUMP_AFTER_S": "850"}
# Module, its bodies, and on how many GPUs they run; with more in the environment, and other seconds than 150.
BODIES: list[tuple[str, str, tuple[int, ...], dict[str, Any]]] = [
    ("bodies", "variants", (2, 3, 4), {}),
    ("bodies", "chain streams symmetric", (2, 4), {}),
    ("bodies", "groups", (4,), {}),
    ("bodies", "dispatch current_device stream_order", (2, 3, 4), {}),
    ("bodies", "nodes", (4,), {"TUNEDCOMM_NODE_OF_RANK": "0,0,1,1"}),
    ("gather_bodies", "dispatch", (2, 3, 4), {}),
    ("gather_bodies", "chain streams symmetric progress", (2, 4), {}),
    ("reduce_scatter_bodies", "dispatch", (2, 3, 4), {"timeout": 300.0}),
    ("reduce_scatter_bodies", "large symmetric chain", (2, 4), {"timeout": 300.0}),
    ("all_to_all_bodies", "chain public uneven unequal", (2, 4), {}),
    ("attention_bodies", "merges moves ahead", (2, 4), {"timeout": 300.0}),
    ("by_counts_bodies", "calls lists ahead", (2, 4), {"timeout": 300.0}),
    ("wires_bodies", "calls ahead", (2, 4), {"timeout": 300.0}),
    ("all_to_all_bodies", "nan", (2,), {"TUNEDCOMM_NAN_CHECK": "1"}),
    ("fused_bodies", "public chain", (2, 4), {}),
    ("gemm_bodies", "calls", (2, 3, 4), {"timeout": 300.0}),
    ("gemm_bodies", "kept", (2, 4), {"timeout": 120.0}),
    ("engine_bodies", "vllm deterministic", (2, 4), {}),
    ("fsdp_bodies", "wide in_place train", (2, 4), {"timeout": 300.0}),
    ("state_bodies", "surroundings", (2,), LONG),
    ("state_bodies", "interrupted", (2,), {}),
    ("binaries_bodies", "compiled autotune", (2,), LONG),
    *(("gemm_bodies", "chain", (2, 4), {**LONG, "GEMM_OP": op}) for op in GEMMS),
]


def run(
    module: str, name: str, num_gpus: int, *, timeout: float = 150.0, **environment: str
) -> list[dict[str, object]]:
    """What each rank's body returned."""
    settings = {"TUNEDCOMM_PEER_TIMEOUT_S": "5", "OMP_NUM_THREADS": "1", "DUMP_AFTER_S": "120", **environment}
    done = python(*TORCHRUN, num_gpus, SCRIPT, module, name, timeout=timeout, **settings)
    results = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert sorted(result["rank"] for result in results) == list(range(num_gpus))
    return results


def cases() -> Iterator[Any]:
    for module, names, sizes, options in BODIES:
        op = f"-{options['GEMM_OP']}" if "GEMM_OP" in options else ""
        for name in names.split():
            for num in sizes:
                marked = pytest.mark.gpu(num)
                yield pytest.param(module, name, num, options, marks=marked, id=f"{module}-{name}{op}-{num}")


@pytest.mark.parametrize(("module", "name", "num_gpus", "options"), list(cases()))
def test_body(module: str, name: str, num_gpus: int, options: dict[str, Any]) -> None:
    assert len(run(module, name, num_gpus, **options)) == num_gpus


LOST = [("bodies", 4), ("gather_bodies", 2), ("gather_bodies", 4), ("reduce_scatter_bodies", 2)]


@pytest.mark.parametrize(("module", "num_gpus"), [pytest.param(*lost, marks=pytest.mark.gpu(lost[1])) for lost in LOST])
def test_a_lost_peer_is_an_error(module: str, num_gpus: int) -> None:
    results = run(module, "lost_peer", num_gpus, TUNEDCOMM_PEER_TIMEOUT_S="2", TUNEDCOMM_WORKSPACE_MIB="8")
    assert 1.5 <= max(float(str(result["waited"])) for result in results) <= 7.0


KILLED = {"lamport": "graph", "one_shot": "eager", "two_shot": "graph", "two_shot_lamport": "eager"}


@pytest.mark.parametrize("variant", sorted(KILLED))
@pytest.mark.gpu(2)
def test_a_killed_peer_is_an_error(variant: str) -> None:
    """Without a launcher, which would end the survivor."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    ranks, search = [], os.pathsep.join([str(ROOT), *filter(None, sys.path)])
    for rank in range(2):
        environment = {"TUNEDCOMM_PEER_TIMEOUT_S": "2", "TUNEDCOMM_WORKSPACE_MIB": "8", "LOST_VARIANT": variant}
        environment.update(LOST_MODE=KILLED[variant], RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2")
        environment.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port, PYTHONPATH=search)
        command = [sys.executable, str(SCRIPT), "bodies", "lost_peer"]
        ranks.append(
            subprocess.Popen(command, env={**os.environ, **environment}, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        )
    try:
        output, errors = ranks[0].communicate(timeout=90)
        ranks[1].communicate(timeout=5)
    finally:
        for process in ranks:
            process.kill()
    assert ranks[1].returncode == -signal.SIGKILL
    assert ranks[0].returncode == 0, errors.decode()[-4000:]
    (said,) = (line for line in output.decode().splitlines() if line.startswith("{"))
    assert 1.5 <= float(json.loads(said)["waited"]) <= 7.0
