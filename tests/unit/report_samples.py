"""What the tests of `tunedcomm report` show: a recorded sweep on H200 GPUs, and made-up rows of fused GEMMs."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from replay import recorded
from verify_samples import all_of

from tunedcomm.db.store import Database
from tunedcomm.dispatch import dispatcher
from tunedcomm.spec import Mode, get_variant
from tunedcomm.symm.layout import limits_for

GEMM_SPEEDUPS = {"512x8192x3584": 1.35, "4096x8192x3584": 0.94, "4096x8192x8192": 1.12}


def recorded_database(path: Path) -> Path:
    """The sweep as the database that it made; searches and finals."""
    with Database.open(path, create=True) as database:
        database.record(recorded())
    return path


def stored_trials(path: Path, times: Mapping[str, tuple[float, float]], mode: Mode = "graph") -> Path:
    """A database of finals of all_reduce of 512 elements: variant to its µs and the library's in its run."""
    like = next(t for t in recorded() if t.problem.shape == (512,) and t.variant == "library")
    limits = limits_for(like.environment, like.problem.world_size)
    trials = []
    for name, (us, library_us) in times.items():
        variant = get_variant("all_reduce", name)
        trials.append(
            replace(
                like,
                problem=replace(like.problem, mode=mode),
                variant=name,
                numerics=variant.numerics,
                source_hash=dispatcher.source_hash_of("all_reduce", name) or "",
                config=variant.default(like.problem, limits),
                **all_of(us),
                baseline_p50_us=library_us,
                final=True,
                status="ok",
                run_id=None,
                id=None,
            )
        )
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
