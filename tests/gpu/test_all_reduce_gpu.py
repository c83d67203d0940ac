"""all_reduce on real GPUs, one process each; every test starts its own ranks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

BODIES = Path(__file__).with_name("bodies.py")


def run(name: str, world_size: int, *, timeout: float = 150.0, **environment: str) -> list[dict[str, object]]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world_size}"]
    settings = {"TUNEDCOMM_PEER_TIMEOUT_S": "5", "OMP_NUM_THREADS": "1", **environment}
    root = str(BODIES.parents[2])
    path = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [*command, str(BODIES), name],
        env={**os.environ, **settings, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    results = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert sorted(result["rank"] for result in results) == list(range(world_size))
    return results


@pytest.mark.parametrize("name", ["variants", "chain", "streams", "groups", "symmetric", "dispatch", "stress"])
@pytest.mark.gpu(4)
def test_on_four(name: str) -> None:
    assert len(run(name, 4)) == 4


@pytest.mark.parametrize("name", ["variants", "dispatch"])
@pytest.mark.gpu(3)
def test_on_three(name: str) -> None:
    assert len(run(name, 3)) == 3


@pytest.mark.parametrize("name", ["variants", "chain", "streams", "symmetric"])
@pytest.mark.gpu(2)
def test_on_two(name: str) -> None:
    assert len(run(name, 2)) == 2


@pytest.mark.parametrize("variant", ["lamport", "one_shot", "two_shot", "two_shot_lamport"])
@pytest.mark.gpu(2)
def test_a_lost_peer_is_an_error(variant: str) -> None:
    results = run("lost_peer", 2, TUNEDCOMM_PEER_TIMEOUT_S="2", LOST_VARIANT=variant)
    waited = max(float(str(result["waited"])) for result in results)
    assert 1.5 <= waited <= 7.0
