"""all_to_all on real GPUs, one process each; every test starts its own ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_all_reduce_gpu import run

BODIES = Path(__file__).with_name("all_to_all_bodies.py")
NAMES = ("variants", "chain", "public", "uneven")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.gpu(2)
def test_on_two(name: str) -> None:
    assert len(run(name, 2, bodies=BODIES)) == 2


@pytest.mark.gpu(2)
def test_nan_in_inputs_is_an_error() -> None:
    assert len(run("nan", 2, bodies=BODIES, TUNEDCOMM_NAN_CHECK="1")) == 2


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.gpu(4)
def test_on_four(name: str) -> None:
    assert len(run(name, 4, bodies=BODIES)) == 4
