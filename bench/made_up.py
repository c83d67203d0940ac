"""Trials of a busy cluster, made of a sweep that was recorded on H200 GPUs; always the same ones.

The sweep is copied to other machines, ops, dtypes, modes, world sizes and shapes of models. On top of that, as years of
use leave them: sweeps that were broken off before their finals, finals measured twice, and sweeps of kernels that have
changed since.
"""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from functools import cache
from pathlib import Path

from rows import ROOT, read_trials

from tunedcomm import kernels
from tunedcomm.db.records import Trial, config_digest
from tunedcomm.db.store import Database
from tunedcomm.hardware import Environment
from tunedcomm.spec import Problem, variants

RECORDING = ROOT / "tests" / "data" / "trials_h200_x4.jsonl.gz"
BATCH = 2000
START = datetime(2026, 1, 1, tzinfo=timezone.utc)
OPS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
# Names, SMs, compute capabilities, fabrics and links of machines that clusters have.
MACHINES = (
    ("NVIDIA H200", 132, 90, 141, "nvswitch-18", 18, True),
    ("NVIDIA H100 80GB HBM3", 132, 90, 80, "nvswitch-18", 18, True),
    ("NVIDIA B200", 148, 100, 180, "nvswitch-18", 18, True),
    ("NVIDIA A100-SXM4-80GB", 108, 80, 80, "nvswitch-12", 12, False),
    ("NVIDIA GH200 480GB", 132, 90, 96, "nvlink-6", 18, False),
    ("NVIDIA H20", 78, 90, 96, "nvswitch-18", 18, True),
    ("NVIDIA H800", 132, 90, 80, "nvswitch-8", 8, False),
    ("NVIDIA A100-SXM4-40GB", 108, 80, 40, "nvlink-4", 12, False),
    ("NVIDIA H100 NVL", 132, 90, 94, "nvlink-12", 12, False),
    ("NVIDIA B300", 148, 103, 270, "nvswitch-18", 18, True),
)


def environments(hardware: int, software: int) -> list[Environment]:
    """So many kinds of machines with so many versions of the software each, newest first."""
    versions = {"cuda": "13.0", "triton": "3.6.0", "nccl": "2.28.9", "tunedcomm": "0.1.0"}
    names = ("gpu", "num_sms", "compute_capability", "memory_gib", "fabric", "num_links", "multicast")
    return [
        Environment.from_dict(
            {
                **dict(zip(names, MACHINES[index % len(MACHINES)], strict=True)),
                "nodes": 1 + index // len(MACHINES),
                "driver": f"580.{159 - minor}.04",
                "torch": f"2.{11 - minor}.0+cu130",
                **versions,
            }
        )
        for index, minor in itertools.product(range(hardware), range(software))
    ]


@cache
def recorded() -> dict[Problem, list[Trial]]:
    """The recorded trials by problem."""
    found: dict[Problem, list[Trial]] = {}
    for trial in read_trials(RECORDING):
        found.setdefault(trial.problem, []).append(trial)
    return found


@cache
def source_of(variant: str, generation: int) -> str:
    """The source hash: of the kernels as they are, or of ones that have changed since."""
    if generation:
        return config_digest({"variant": variant, "generation": generation})
    found = variants("all_reduce").get(variant)
    return config_digest({"variant": variant}) if found is None else kernels.source_hash(found)


def sweeps(
    environment: Environment, world_sizes: Sequence[int], rng: random.Random, clock: Iterator[datetime]
) -> Iterator[Trial]:
    """The recorded sweep by kind of problem and world size, then at shapes of models alone, without end."""
    kinds = itertools.product(
        ("plain", "symmetric"), ("bfloat16", "float16"), (False, True), OPS, ("graph", "eager"), world_sizes[::-1]
    )
    for kind in itertools.chain(kinds, itertools.repeat(None)):
        input_kind, dtype, in_place, op, mode, world_size = kind or (
            *("plain", "bfloat16", False, "all_reduce"), rng.choice(("graph", "eager")), rng.choice(world_sizes)
        )  # fmt: skip
        for problem, trials in recorded().items():
            model = (rng.randrange(1, 4097) * rng.choice((2048, 2880, 4096, 5120, 7168, 8192)),)
            for shape in [problem.shape] * (kind is not None) + [model] * (kind is None or rng.random() < 0.3):
                asked = replace(
                    problem, op=op, reduction="sum" if "reduce" in op else "", shape=shape, input_kind=input_kind,
                    dtype=dtype, in_place=in_place, mode=mode, world_size=world_size,
                )  # fmt: skip
                yield from sweep(asked, environment, trials, rng, clock)


def sweep(
    problem: Problem, environment: Environment, trials: Sequence[Trial], rng: random.Random, clock: Iterator[datetime]
) -> Iterator[Trial]:
    """Trials as those of a problem elsewhere, of its search and its finals, perhaps of older kernels before them."""
    for generation in (1, 0) if rng.random() < 0.3 else (0,):
        finals = rng.choices((0, 1, 2), (10, 75, 15))[0]  # 0: broken off before
        for trial in trials:
            source = source_of(trial.variant, 0 if trial.variant == "library" else generation)
            for _ in range(finals if trial.final else 1):
                yield replace(
                    trial, problem=problem, environment=environment, source_hash=source, created_at=next(clock)
                )


def make_database(
    path: Path, *, trials: int, hardware: int, software: int, world_sizes: Sequence[int], seed: int
) -> float:
    """Fill a new file; returns the seconds that it took."""
    kernels.discover()
    where = environments(hardware, software)
    begin = time.perf_counter()
    with Database.open(path, create=True) as database:
        for environment in where:
            run = database.start_run(command="bench/db_scale.py", seed=seed, budget="", host="made-up")
            rng = random.Random(f"{seed} {environment.digest}")
            clock = (START + timedelta(seconds=0.15 * step) for step in itertools.count())
            records = itertools.islice(sweeps(environment, world_sizes, rng, clock), trials // len(where))
            while batch := [replace(record, run_id=run) for record in itertools.islice(records, BATCH)]:
                database.record(batch)
            database.finish_run(run)
    return time.perf_counter() - begin
