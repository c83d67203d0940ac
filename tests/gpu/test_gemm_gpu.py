"""The fused GEMMs on real GPUs, one process each; every test starts its own ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_all_reduce_gpu import run

BODIES = Path(__file__).with_name("gemm_bodies.py")
OPS = ["ag_gemm", "gemm_rs", "gemm_ar"]
PER_OP = ["variants", "chain"]


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("name", PER_OP)
@pytest.mark.gpu(2)
def test_on_two(name: str, op: str) -> None:
    assert len(run(name, 2, bodies=BODIES, timeout=900.0, GEMM_OP=op, DUMP_AFTER_S="850")) == 2


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("name", PER_OP)
@pytest.mark.gpu(4)
def test_on_four(name: str, op: str) -> None:
    assert len(run(name, 4, bodies=BODIES, timeout=900.0, GEMM_OP=op, DUMP_AFTER_S="850")) == 4


@pytest.mark.parametrize("world_size", [pytest.param(n, marks=pytest.mark.gpu(n)) for n in (2, 3, 4)])
def test_calls(world_size: int) -> None:
    assert len(run("calls", world_size, bodies=BODIES, timeout=300.0)) == world_size


@pytest.mark.parametrize("world_size", [pytest.param(n, marks=pytest.mark.gpu(n)) for n in (2, 4)])
def test_graphs_keep_their_buffers(world_size: int) -> None:
    assert len(run("kept", world_size, bodies=BODIES, timeout=120.0)) == world_size


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("world_size", [pytest.param(n, marks=pytest.mark.gpu(n)) for n in (2, 4)])
def test_ordered_variants_agree(op: str, world_size: int) -> None:
    assert len(run("ordered", world_size, bodies=BODIES, timeout=300.0, GEMM_OP=op)) == world_size
