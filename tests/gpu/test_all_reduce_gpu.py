"""all_reduce on real GPUs, one process each; every test starts its own ranks."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

BODIES = Path(__file__).with_name("bodies.py")
CALLS = BODIES.with_name("call_bodies.py")


def python_path() -> str:
    return os.pathsep.join([str(BODIES.parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])])


def run(
    name: str, world_size: int, *, bodies: Path = BODIES, timeout: float = 150.0, **environment: str
) -> list[dict[str, object]]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world_size}"]
    settings = {"TUNEDCOMM_PEER_TIMEOUT_S": "5", "OMP_NUM_THREADS": "1", **environment}
    done = subprocess.run(
        [*command, str(bodies), name],
        env={**os.environ, **settings, "PYTHONPATH": python_path()},
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    results = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert sorted(result["rank"] for result in results) == list(range(world_size))
    return results


@pytest.mark.parametrize("name", ["variants", "chain", "streams", "groups", "symmetric"])
@pytest.mark.gpu(4)
def test_on_four(name: str) -> None:
    assert len(run(name, 4)) == 4


@pytest.mark.gpu(4)
def test_nodes_of_two() -> None:
    assert len(run("nodes", 4, bodies=CALLS, TUNEDCOMM_NODE_OF_RANK="0,0,1,1")) == 4


@pytest.mark.gpu(3)
def test_on_three() -> None:
    assert len(run("variants", 3)) == 3


@pytest.mark.parametrize("world_size", [pytest.param(n, marks=pytest.mark.gpu(n)) for n in (2, 3, 4)])
@pytest.mark.parametrize("name", ["dispatch", "current_device", "stream_order"])
def test_calls(name: str, world_size: int) -> None:
    assert len(run(name, world_size, bodies=CALLS)) == world_size


@pytest.mark.parametrize("name", ["variants", "chain", "streams", "symmetric"])
@pytest.mark.gpu(2)
def test_on_two(name: str) -> None:
    assert len(run(name, 2)) == 2


@pytest.mark.gpu(4)
def test_a_lost_peer_is_an_error() -> None:
    results = run("lost_peer", 4, TUNEDCOMM_PEER_TIMEOUT_S="2", TUNEDCOMM_WORKSPACE_MIB="8")
    waited = max(float(str(result["waited"])) for result in results)
    assert 1.5 <= waited <= 7.0


KILLED = {"lamport": "graph", "one_shot": "eager", "two_shot": "graph", "two_shot_lamport": "eager"}


@pytest.mark.parametrize("variant", sorted(KILLED))
@pytest.mark.gpu(2)
def test_a_killed_peer_is_an_error(variant: str) -> None:
    """Without a launcher, which would end the survivor."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    ranks = []
    for rank in range(2):
        environment = {"TUNEDCOMM_PEER_TIMEOUT_S": "2", "TUNEDCOMM_WORKSPACE_MIB": "8", "LOST_VARIANT": variant}
        environment.update(LOST_MODE=KILLED[variant], RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2")
        environment.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port, PYTHONPATH=python_path())
        command = [sys.executable, str(BODIES), "lost_peer"]
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
    waited = float(json.loads(output.decode().splitlines()[-1])["waited"])
    assert 1.5 <= waited <= 7.0
