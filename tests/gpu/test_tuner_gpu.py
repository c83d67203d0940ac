"""The tuner on real GPUs: a sweep with every kind of bad candidate ends, and leaves nothing behind."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from planted_gpu_cases import BAD, SHAPE
from programs import python

from tunedcomm.db.store import Database
from tunedcomm.hardware import ranks_share_a_gpu

SWEEP = """
import json, sys, time
from tunedcomm.db.store import Database
from tunedcomm.tuner.gang.protocol import Settings
from tunedcomm.tuner.search.spec import SweepSpec
from tunedcomm.tuner.search.sweep import sweep
path, names, plugins, sizes = sys.argv[1], *(json.loads(text) for text in sys.argv[2:])
settings = Settings(
    backend="cuda", world_size=2, variants=tuple(names), plugins=tuple(plugins), trials=1000,
    compile_timeout_s=8.0, trial_timeout_s=8.0,
)
spec = SweepSpec(op="all_reduce", settings=settings, shapes=tuple((size,) for size in sizes))
begin = time.monotonic()
with Database.open(path, create=True) as database:
    outcome = sweep(spec, database)
done = outcome.progress
print(json.dumps({"seconds": time.monotonic() - begin, "reason": outcome.reason, "gangs": done.num_gangs,
                  "starts_s": outcome.start_s, "trials": done.trials, "failures": done.failures}))
"""
# Where ranks share a GPU every launch takes milliseconds: one size and the variants of least candidates.
SHARED = ranks_share_a_gpu()
GOOD = ("one_shot",) if SHARED else ("lamport", "one_shot", "two_shot", "two_shot_lamport")
SIZES = SHAPE if SHARED else [SHAPE[0] << step for step in range(0, 16, 2)]
# Bad candidates that only the watchdog ends, by the wait that it grants them.
WAITED_FOR = {"compiles_for_ever": 8.0, "device_spins_on_one_rank": 8.0, "host_sleeps_on_one_rank": 8.0}


def run(path: Path, variants: tuple[str, ...], plugins: tuple[str, ...]) -> dict[str, Any]:
    # Each sweep compiles for itself: neither is measured by what the other has left in the cache.
    cache = str(path.with_suffix(".cache"))
    arguments = (path, *map(json.dumps, (variants, plugins, SIZES)))
    done = python("-c", SWEEP, *arguments, timeout=400, TRITON_CACHE_DIR=cache)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    sys.stderr.write(f"\n{variants}: {found}\n")
    return found


def memory_used() -> list[int]:
    import pynvml

    pynvml.nvmlInit()
    handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
    return [pynvml.nvmlDeviceGetMemoryInfo(handle).used >> 20 for handle in handles]


@pytest.mark.gpu(2)
def test_a_sweep_survives_every_kind_of_bad_candidate(tmp_path: Path) -> None:
    before = memory_used()
    faulty = run(tmp_path / "faulty.db", (*GOOD, *BAD), ("planted_gpu",))
    clean = run(tmp_path / "clean.db", GOOD, ())
    with Database.open(tmp_path / "clean.db") as database:
        wanted = {
            (t.problem.shape, str(t.candidate)) for t in database.trials() if not t.final and t.status != "infeasible"
        }
    with Database.open(tmp_path / "faulty.db") as database:
        trials = database.trials()
    ran = [t for t in trials if t.status in ("ok", "pruned") and not t.final]
    assert {(t.problem.shape, str(t.candidate)) for t in ran} == wanted, "every good candidate is measured"
    assert len(ran) == len(wanted)
    for name, status in BAD.items():
        mine = [t for t in trials if t.variant == name and t.problem.shape == SHAPE]
        assert [t.status for t in mine] == [status], (name, [(t.status, t.reason) for t in mine])
        assert mine[0].reason
    assert faulty["reason"] == "done"
    # Times of ranks that share a GPU mean nothing. What crashed has a fresh gang to crash in again.
    again_s = faulty["starts_s"] / faulty["gangs"] * sum(status == "crashed" for status in BAD.values())
    assert SHARED or faulty["seconds"] <= 2 * clean["seconds"] + sum(WAITED_FOR.values()) + again_s
    time.sleep(2)
    assert all(now <= then + 64 for now, then in zip(memory_used(), before, strict=True)), "GPU memory is left"
    left = subprocess.run(["pgrep", "-f", "tunedcomm.tuner.gang.worker"], capture_output=True, text=True, check=False)
    assert not left.stdout.split()
