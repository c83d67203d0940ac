"""Many launches on real GPUs: every variant in the midst of the others, and slices of batches beside the whole."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
from programs import ROOT, TORCHRUN, python
from slices import OPS
from test_bodies_gpu import run

GEMMS = ("ag_gemm", "gemm_ar", "gemm_rs")


@pytest.mark.parametrize("world_size", [pytest.param(n, marks=pytest.mark.gpu(n)) for n in (2, 3, 4)])
@pytest.mark.parametrize("ops", [(), *((op,) for op in GEMMS)], ids=["collectives", *GEMMS])
def test_nothing_is_wrong_and_nothing_hangs(ops: tuple[str, ...], world_size: int, tmp_path: Path) -> None:
    table = tmp_path / "stress.csv"
    command = [*TORCHRUN, world_size, ROOT / "bench" / "stress.py", "--launches", 300, "--csv", table]
    for op in ops:
        command += ["--op", op]
    python(*command, paths=[ROOT / "bench"], timeout=400, OMP_NUM_THREADS="1")
    rows = list(csv.DictReader(table.open(encoding="utf-8")))
    assert all(row["launches"] == "300" or row["not_run"] for row in rows), rows
    assert {row["op"] for row in rows} >= set(ops)


@pytest.mark.timeout(1600)
@pytest.mark.parametrize("op", OPS)
@pytest.mark.gpu(2)
def test_slices_have_the_bits_of_the_whole(op: str) -> None:
    assert len(run("bodies", "slices", 2, timeout=1500.0, SLICES_OP=op, DUMP_AFTER_S="1450")) == 2
