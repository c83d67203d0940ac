"""Starts with a cold Triton cache, and with one that `db compile` filled; `run_bodies.py` runs these.

torchrun --standalone --nproc-per-node 2 tests/gpu/run_bodies.py binaries_bodies compiled,autotune
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
from bodies import captured

import tunedcomm
from tunedcomm.db import layers
from tunedcomm.kernels.common.launch import compile_request
from tunedcomm.spec import Problem
from tunedcomm.tuner.measure.trial import CompileCount

SIZES = (1 << 9, 1 << 12, 1 << 14, 1 << 16, 1 << 18, 1 << 19, 1 << 20, 1 << 22, 1 << 23, 1 << 25)
# The compiler of `db compile` sees no GPU.
HIDDEN = {"CUDA_VISIBLE_DEVICES": "", "TRITON_INTERPRET": "0"}


def start() -> CompileCount:
    """Begin as a new process does, with an empty cache directory that all ranks share; counts what is compiled."""
    folder: list[str] = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)
    os.environ.update(TRITON_CACHE_DIR=f"{folder[0]}/cache", TUNEDCOMM_DB=f"{folder[0]}/tuned.db")
    tunedcomm.release_communicators()
    compile_request.cache_clear()
    return CompileCount()


def compiled_body() -> dict[str, object]:
    """No kernel is compiled at first calls of 10 sizes in both modes, after `db compile` without a GPU in sight."""
    count = start()
    here = torch.cuda.get_device_name().split()[1].lower()
    (database,) = [path for path in layers.packaged_databases() if path.name.startswith(here) and "x2" in path.name]
    begin = time.monotonic()
    if dist.get_rank() == 0:
        command = [sys.executable, "-m", "tunedcomm.cli.main", "db", "compile", "--cluster", str(database)]
        subprocess.run(command, env={**os.environ, **HIDDEN}, check=True)
    dist.barrier()
    seconds = time.monotonic() - begin
    num_files = len(list(Path(os.environ["TRITON_CACHE_DIR"]).rglob("*.cubin")))
    for numel in SIZES:
        x = torch.ones(numel, dtype=torch.bfloat16, device="cuda")
        tunedcomm.all_reduce(x)
        captured(lambda turn, x=x: tunedcomm.all_reduce(x), 1).replay()
    torch.cuda.synchronize()
    count.close()
    assert num_files > 0
    assert count.num_compiled == 0, count.num_compiled
    return {"compile_s": round(seconds, 1), "cubins": num_files}


def autotune_body() -> dict[str, object]:
    """With nothing but a cold cache 10 problems are tuned in a budget of 3 s; the second start measures nothing."""
    packaged, layers.packaged_databases = layers.packaged_databases, list
    try:
        start().close()
        wanted = [Problem("all_reduce", (numel,), "bfloat16", dist.get_world_size()) for numel in SIZES]
        begin = time.monotonic()
        tuned = tunedcomm.autotune(wanted, budget_s=3.0)
        seconds = time.monotonic() - begin
        tunedcomm.release_communicators()
        tunedcomm.get_communicator()
        begin = time.monotonic()
        again = tunedcomm.autotune(wanted, budget_s=3.0)
        again_ms = 1e3 * (time.monotonic() - begin)
        assert again.num_trials == 0
        assert len(tuned.results) == len(SIZES), str(tuned)
        return {"seconds": round(seconds, 1), "trials": tuned.num_trials, "again_ms": round(again_ms, 1)}
    finally:
        layers.packaged_databases = packaged
