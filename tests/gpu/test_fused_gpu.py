"""all_reduce_rms_norm on real GPUs, one process each; every test starts its own ranks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

BODIES = Path(__file__).with_name("fused_bodies.py")


def run(name: str, world_size: int, *, timeout: float = 150.0) -> list[dict[str, object]]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world_size}"]
    path = os.pathsep.join([str(BODIES.parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [*command, str(BODIES), name],
        env={**os.environ, "TUNEDCOMM_PEER_TIMEOUT_S": "5", "OMP_NUM_THREADS": "1", "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    results = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert sorted(int(str(result["rank"])) for result in results) == list(range(world_size))
    return results


@pytest.mark.parametrize("name", ["variants", "public", "chain"])
@pytest.mark.gpu(4)
def test_on_four(name: str) -> None:
    assert len(run(name, 4)) == 4


@pytest.mark.parametrize("name", ["variants", "public", "chain"])
@pytest.mark.gpu(2)
def test_on_two(name: str) -> None:
    assert len(run(name, 2)) == 2
