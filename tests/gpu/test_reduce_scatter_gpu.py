"""reduce_scatter on real GPUs, one process each; every test starts its own ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_all_reduce_gpu import run

BODIES = Path(__file__).with_name("reduce_scatter_bodies.py")
NAMES = ["variants", "large", "dispatch", "symmetric", "chain"]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.gpu(2)
def test_on_two(name: str) -> None:
    assert len(run(name, 2, bodies=BODIES, timeout=300.0)) == 2


@pytest.mark.parametrize("name", ["variants", "dispatch"])
@pytest.mark.gpu(3)
def test_on_three(name: str) -> None:
    assert len(run(name, 3, bodies=BODIES, timeout=300.0)) == 3


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.gpu(4)
def test_on_four(name: str) -> None:
    assert len(run(name, 4, bodies=BODIES, timeout=300.0)) == 4


@pytest.mark.gpu(2)
def test_a_lost_peer_is_an_error() -> None:
    results = run("lost_peer", 2, bodies=BODIES, TUNEDCOMM_PEER_TIMEOUT_S="2", TUNEDCOMM_WORKSPACE_MIB="8")
    assert 1.5 <= max(float(str(result["waited"])) for result in results) <= 7.0
