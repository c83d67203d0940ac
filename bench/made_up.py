"""Made-up trials of a busy cluster, always the same ones.

They are in the proportions of a recorded sweep on H200 GPUs: 53 trials a problem of which five are finals, the rest
mostly pruned, with the variants, configs and statuses that a sweep meets. On top of that, as years of use leave them:
sweeps that were broken off before their finals, finals measured twice, sweeps of kernels that have changed since, ops
besides all_reduce, and shapes of models between the sizes of whole sweeps.
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

from tunedcomm import kernels
from tunedcomm.db.records import Trial, config_digest
from tunedcomm.db.store import Database
from tunedcomm.hardware import Environment
from tunedcomm.space import Value
from tunedcomm.spec import InputKind, Mode, Problem, variants
from tunedcomm.symm.layout import limits_for

BATCH = 2000
TRIALS_A_PROBLEM = 48
START = datetime(2026, 1, 1, tzinfo=timezone.utc)
SHAPES = tuple(512 << i for i in range(19))
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
# Of a recorded sweep: 8,097 trials on four H200 GPUs.
STATUSES = {"pruned": 6100, "ok": 3000, "infeasible": 870, "compile_error": 15, "incorrect": 8, "crashed": 4, "hung": 3}
VARIANTS = {"lamport": 12, "two_shot": 32, "two_shot_lamport": 12, "one_shot": 9, "multimem_one_shot": 2}
REASONS = {
    "infeasible": "264 blocks of 8 warps with 166 registers a thread do not fit on 132 SMs at once (at most 132 do)",
    "compile_error": "PTXASError: register allocation failed with register count of '255'",
    "incorrect": "relative error 1.3e-01 above 8.0e-03 on random inputs",
    "crashed": "rank 2 ended with signal 11 (SIGSEGV)",
    "hung": "no progress for 20 s; killed",
}


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


def problems(world_sizes: Sequence[int], rng: random.Random) -> Iterator[Problem]:
    """Problems that a cluster tunes: the sizes of whole sweeps, and in between the shapes of models, without end."""
    modes: tuple[Mode, ...] = ("graph", "eager")
    kinds: tuple[InputKind, ...] = ("plain", "symmetric")
    ops = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
    swept = (
        Problem(op, (shape,), dtype, world_size, "sum" if "reduce" in op else "", kind, in_place, "", "", mode)
        for op, kind, in_place, dtype, mode in itertools.product(
            ops, kinds, (False, True), ("bfloat16", "float16"), modes
        )
        for shape, world_size in itertools.product(SHAPES, world_sizes)
    )
    seen = set()
    for problem in itertools.chain(swept, itertools.repeat(None)):
        if problem is not None:
            yield problem
        if problem is None or rng.random() < 0.3:
            shape = rng.randrange(1, 4097) * rng.choice((2048, 2880, 4096, 5120, 7168, 8192))
            model = Problem("all_reduce", (shape,), "bfloat16", rng.choice(world_sizes), mode=rng.choice(modes))
            if model not in seen:
                seen.add(model)
                yield model


@cache
def feasible(problem: Problem) -> dict[str, list[dict[str, Value]]]:
    """Variant to the configs that can run the problem on GPUs of the first kind."""
    limits = limits_for(environments(1, 1)[0], problem.world_size)
    like = replace(problem, op="all_reduce", reduction="sum")
    found = {}
    for name in VARIANTS:
        variant = variants("all_reduce")[name]
        found[name] = [c for c in variant.space.enumerate() if variant.infeasible(like, c, limits) is None]
    return {name: configs for name, configs in found.items() if configs}


@cache
def source_of(variant: str, generation: int) -> str:
    """The source hash: of the kernels as they are, or of ones that have changed since."""
    if generation:
        return config_digest({"variant": variant, "generation": generation})
    return kernels.source_hash(variants("all_reduce")[variant])


def sweep(problem: Problem, environment: Environment, rng: random.Random, clock: Iterator[datetime]) -> list[Trial]:
    """The trials of one problem, of its search and its finals, perhaps of older kernels before them."""
    found: list[Trial] = []
    floor_us = 2 + problem.nbytes / (environment.num_links * 20e3)

    def add(variant: str, config: dict[str, Value], status: str, generation: int, *, final: bool) -> None:
        ran = status == "ok"
        latency_us = round(floor_us * (3 if variant == "library" else rng.lognormvariate(0.3, 0.25)), 4)
        found.append(
            Trial(
                problem=problem,
                environment=environment,
                variant=variant,
                numerics="library" if variant == "library" else "ordered",
                source_hash=source_of(variant, 0 if variant == "library" else generation),
                config=config,
                status=status,  # type: ignore[arg-type]
                reason=REASONS.get(status, "") if not ran else "",
                latency_p10_us=latency_us * 0.99 if ran else None,
                latency_p50_us=latency_us if ran or status == "pruned" else None,
                latency_p90_us=latency_us * 1.02 if ran else None,
                samples=(200 if final else 12) if ran else 0,
                baseline_p50_us=floor_us * 3 * rng.uniform(0.99, 1.01) if ran else None,
                error=2e-3 if ran else None,
                final=final,
                created_at=next(clock),
            )
        )

    configs = feasible(problem)
    weights = [VARIANTS[name] for name in configs]
    finalists = [name for name in configs if name != "multimem_one_shot"]
    for generation in (1, 0) if rng.random() < 0.3 else (0,):
        add("library", {}, "ok", generation, final=False)
        for _ in range(TRIALS_A_PROBLEM - 1):
            (variant,) = rng.choices(list(configs), weights)
            (status,) = rng.choices(list(STATUSES), list(STATUSES.values()))
            add(variant, rng.choice(configs[variant]), status, generation, final=False)
        if rng.random() < 0.1:
            continue  # broken off before its finals
        for _ in range(2 if rng.random() < 0.15 else 1):
            add("library", {}, "ok", generation, final=True)
            for variant in finalists:
                # Sizes near each other share their finalists.
                config = configs[variant][problem.numel.bit_length() // 6 % len(configs[variant])]
                add(variant, config, "ok", generation, final=True)
    return found


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
            swept = (record for p in problems(world_sizes, rng) for record in sweep(p, environment, rng, clock))
            records = itertools.islice(swept, trials // len(where))
            while batch := [replace(record, run_id=run) for record in itertools.islice(records, BATCH)]:
                database.record(batch)
            database.finish_run(run)
    return time.perf_counter() - begin
