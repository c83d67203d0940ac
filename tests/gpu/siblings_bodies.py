"""A machine without rows of its own is served by its sibling's, as good as by its own; `run_bodies.py` runs these.

The shipped file of this GPU is left out while the calls are made, and gives the winners to compare with.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import tunedcomm
from tunedcomm.db import layers
from tunedcomm.dispatch import first_use
from tunedcomm.dispatch.decide import decide
from tunedcomm.dispatch.groups import get_communicator
from tunedcomm.dispatch.plans import plan_for
from tunedcomm.spec import Candidate, Mode, Problem, get_op

ROUNDS, CALLS = 21, 20


@contextmanager
def only_siblings() -> Iterator[tuple[list[float], list[layers.Layer]]]:
    """Inside the block there are no rows of this GPU, and no checks yet.

    Yields the seconds of each check, and the layers with this GPU's rows.
    """
    here, every = torch.cuda.get_device_name().split()[1].lower(), layers.packaged_databases
    own = [layers.Layer("packaged", str(path)) for path in every() if path.name.startswith(here)]
    seconds: list[float] = []
    check: Callable[..., None] = first_use.check

    def timed(*arguments: Any) -> None:
        begin = time.monotonic()
        check(*arguments)
        seconds.append(time.monotonic() - begin)

    with tempfile.TemporaryDirectory() as folder:
        os.environ["TUNEDCOMM_DB"] = f"{folder}/tuned.db"
        layers.packaged_databases = lambda: [path for path in every() if not path.name.startswith(here)]
        first_use.check = timed  # type: ignore[assignment]
        tunedcomm.release_communicators()
        try:
            yield seconds, own
        finally:
            layers.packaged_databases, first_use.check = every, check  # type: ignore[assignment]


def times_us(problem: Problem, candidates: list[Candidate]) -> list[float]:
    """Medians over interleaved rounds of the slowest rank."""
    communicator, spec = get_communicator(), get_op(problem.op)
    inputs = spec.make_inputs(problem, communicator.rank, 1, "random", communicator.device)
    outputs = spec.make_outputs(problem, communicator.device)
    runs: list[Callable[[], object]] = []
    for candidate in candidates:
        with tunedcomm.force(problem.op, candidate.variant, candidate.config_dict):
            plan = plan_for(communicator, problem, "default")

        def launch(plan: Any = plan) -> None:
            for _ in range(CALLS):
                plan.launch(inputs, outputs, torch.cuda.current_stream().cuda_stream)

        launch()
        torch.cuda.synchronize()
        if problem.mode == "graph":
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                launch()
            communicator.captured(plan)
            runs.append(graph.replay)
        else:
            runs.append(launch)
    found: list[list[float]] = [[] for _ in runs]
    for turn in range(ROUNDS):
        for index in [(turn + place) % len(runs) for place in range(len(runs))]:
            dist.barrier()
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            begin.record()
            runs[index]()
            end.record()
            torch.cuda.synchronize()
            found[index].append(1e3 * begin.elapsed_time(end) / CALLS)
    own = torch.tensor([statistics.median(each) for each in found], device="cuda")
    dist.all_reduce(own, dist.ReduceOp.MAX)
    return own.tolist()


def regret(problems: list[Problem], *, mean: float, worst: float) -> dict[str, object]:
    """Times of the sibling's choices over the own winners', at most `mean` and `worst`, and over the library's."""
    with only_siblings() as (seconds, with_own):
        communicator = get_communicator()
        own = layers.load_snapshot(communicator.environment, communicator.world_size, layers=with_own)
        rows = []
        for problem in problems:
            chosen = plan_for(communicator, problem, "default").decide_again()
            best = decide(problem, own, communicator.limits).candidate
            library = Candidate.of(problem.op, "library", {})
            ours, theirs, nccl = times_us(problem, [chosen.candidate, best, library])
            rows.append((str(problem), chosen.source, str(chosen.candidate), str(best), ours / theirs, ours / nccl))
            if communicator.rank == 0:
                print(f"{rows[-1]}", flush=True)
        tunedcomm.check_agreement()
    ratios = [row[4] for row in rows]
    assert any(row[1] == "borrowed" for row in rows), "nothing was borrowed: is this GPU's sibling shipped?"
    assert statistics.geometric_mean(ratios) <= mean, (statistics.geometric_mean(ratios), rows)
    assert max(ratios) <= worst, (max(ratios), rows)
    return {
        "problems": len(rows),
        "borrowed": sum(row[1] == "borrowed" for row in rows),
        "mean_over_own": round(statistics.geometric_mean(ratios), 4),
        "worst_over_own": round(max(ratios), 4),
        "mean_over_library": round(statistics.geometric_mean([row[5] for row in rows]), 4),
        "check_ms": [round(1e3 * of(seconds), 1) for of in (statistics.median, max)] if seconds else [],
    }


def all_reduce_of(mode: Mode) -> list[Problem]:
    shapes = [(2 ** (9 + step),) for step in range(19)]  # 1 KiB to 256 MiB
    return [Problem("all_reduce", shape, "bfloat16", dist.get_world_size(), mode=mode) for shape in shapes]


def all_reduce_graph_body() -> dict[str, object]:
    return regret(all_reduce_of("graph"), mean=1.02, worst=1.18)


def all_reduce_eager_body() -> dict[str, object]:
    return regret(all_reduce_of("eager"), mean=1.06, worst=1.5)


def others_body() -> dict[str, object]:
    """The sibling's own sizes of further ops, at most six each."""
    path = next(path for path in layers.packaged_databases() if path.name.startswith("h200") and "x2" in path.name)
    world_size, found = dist.get_world_size(), list[Problem]()
    with layers.Layer("packaged", str(Path(path))).open() as database:
        stored = sorted(p for p in database.problems() if p.world_size == world_size and p.mode == "graph")
    for op in ("all_gather", "reduce_scatter", "all_reduce_rms_norm", "gemm_rs", "ag_gemm"):
        asked = [problem for problem in stored if problem.op == op and problem.input_kind == "plain"]
        found += asked[:: max(1, len(asked) // 6)][:6]
    return regret([replace(problem, mode="graph") for problem in found], mean=1.06, worst=1.5)
