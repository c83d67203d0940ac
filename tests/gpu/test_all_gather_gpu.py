"""all_gather on real GPUs, one process each; every test starts its own ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_all_reduce_gpu import run

BODIES = Path(__file__).with_name("gather_bodies.py")


@pytest.mark.parametrize("name", ["variants", "configs", "chain", "streams", "symmetric", "dispatch"])
@pytest.mark.gpu(4)
def test_on_four(name: str) -> None:
    assert len(run(name, 4, bodies=BODIES)) == 4


@pytest.mark.parametrize("name", ["variants", "dispatch"])
@pytest.mark.gpu(3)
def test_on_three(name: str) -> None:
    assert len(run(name, 3, bodies=BODIES)) == 3


@pytest.mark.parametrize("name", ["variants", "configs", "chain", "streams", "symmetric", "dispatch"])
@pytest.mark.gpu(2)
def test_on_two(name: str) -> None:
    assert len(run(name, 2, bodies=BODIES)) == 2


@pytest.mark.parametrize("world_size", [pytest.param(n, marks=pytest.mark.gpu(n)) for n in (2, 4)])
def test_a_gather_that_is_read_while_it_is_under_way(world_size: int) -> None:
    assert len(run("progress", world_size, bodies=BODIES)) == world_size


@pytest.mark.parametrize("world_size", [pytest.param(n, marks=pytest.mark.gpu(n)) for n in (2, 4)])
def test_a_lost_peer_is_an_error(world_size: int) -> None:
    settings = {"TUNEDCOMM_PEER_TIMEOUT_S": "2", "TUNEDCOMM_WORKSPACE_MIB": "8"}
    results = run("lost_peer", world_size, bodies=BODIES, **settings)
    waited = max(float(str(result["waited"])) for result in results)
    assert 1.5 <= waited <= 7.0
