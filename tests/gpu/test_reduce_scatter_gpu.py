"""reduce_scatter on real GPUs, one process each; every test starts its own ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_all_reduce_gpu import run

BODIES = Path(__file__).with_name("reduce_scatter_bodies.py")
NAMES = ["variants", "large", "dispatch", "chain"]


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
