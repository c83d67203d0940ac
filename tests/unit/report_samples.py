"""What the tests of `tunedcomm report` show: a recorded sweep on H200 GPUs, and made-up rows of fused GEMMs."""

from __future__ import annotations

import csv
import dataclasses
from pathlib import Path

from replay import recorded

from tunedcomm.db.store import Database

GEMM_SPEEDUPS = {"512x8192x3584": 1.35, "4096x8192x3584": 0.94, "4096x8192x8192": 1.12}


def recorded_database(path: Path) -> Path:
    """The sweep as the database that it made; searches and finals. Lack of registers is a failure here."""
    trials = [
        dataclasses.replace(trial, status="compile_error") if "registers" in trial.reason else trial
        for trial in recorded()
    ]
    with Database.open(path, create=True) as database:
        database.record(trials)
    return path


def gemm_csv(path: Path) -> Path:
    """Rows as `tunedcomm bench --op ag_gemm` writes them, with the speed-ups above; one variant beside them."""
    columns = "op shape message_bytes dtype world_size mode contender config latency_p50_us gpu fabric date".split()
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(columns)
        for shape, ratio in GEMM_SPEEDUPS.items():
            m, _, k = map(int, shape.split("x"))
            library_us = m / 10
            for contender, us in (("library", library_us), ("tuned", library_us / ratio), ("pull", library_us * 1.2)):
                where = ("NVIDIA H200", "nvswitch-18", "2026-11-22")
                writer.writerow(
                    ["ag_gemm", shape, m * k * 2, "bfloat16", 4, "graph", contender, "", round(us, 3), *where]
                )
    return path
