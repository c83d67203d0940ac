"""What a machine without rows of its own loses: siblings' winners beside its own ones, in turns of one run.

    torchrun --nproc-per-node 2 bench/siblings.py --own tuning_db/h200-nvswitch18-x2.db \\
        --sibling tuning_db/h100-nvswitch18-x2.db --csv bench/results/tuner/siblings_h200.csv

Dispatch decides once from the packaged rows of --own and once from those of --sibling alone: at 19 sizes of all_reduce,
and for the other ops at up to 6 sizes that --own has in graphs; in bf16, in graphs and eagerly. First-use checks and
what they would rule out are left aside. `ratio` is the time of the sibling's choice over the time of the own one, of
the slowest rank; `library` the time of the library over the own one.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch.distributed as dist
from ranks import compare, compile_all
from rows import arguments, of_run, show

from tunedcomm import kernels, settings
from tunedcomm.db.layers import Layer, load_snapshot
from tunedcomm.dispatch.decide import decide
from tunedcomm.dispatch.groups import get_communicator
from tunedcomm.selection.snapshot import Snapshot
from tunedcomm.spec import Candidate, Problem, get_op
from tunedcomm.tuner.gang.ranks import join_group

SIZES = [1 << bits for bits in range(10, 29)]  # bytes
OTHERS = ("all_gather", "reduce_scatter", "all_reduce_rms_norm", "gemm_rs", "ag_gemm")
SHAPES = 6  # of an op


def problems(own: Snapshot, world_size: int) -> Iterator[Problem]:
    """What is compared, in graphs."""
    for size in SIZES:
        yield Problem("all_reduce", (size // 2,), "bfloat16", world_size)
    for op in OTHERS:
        held = {row.problem for row in own.rows if row.problem.op == op and row.problem.mode == "graph"}
        plain = {get_op(op).layouts[0], "residual"}
        some = [p for p in held if p.dtype == "bfloat16" and p.layout in plain and not p.scaling and not p.in_place]
        some = sorted((p for p in some if p.input_kind == "plain"), key=lambda p: (p.numel, p.shape))
        step = max(1, (len(some) - 1) / (SHAPES - 1))
        yield from (some[round(number * step)] for number in range(min(SHAPES, len(some))))


def main() -> None:
    """Measure."""
    options = arguments(__doc__, own=None, sibling=None, rounds=21, csv=None)
    join_group()
    kernels.discover()
    communicator = get_communicator()
    environment, limits, n = communicator.environment, communicator.limits, communicator.world_size

    def snapshot_of(path: Path) -> Snapshot:
        return load_snapshot(
            environment, n, layers=[Layer("packaged", str(path))], strict=True, borrow=settings.borrow()
        )

    own, lent = snapshot_of(options.own), snapshot_of(options.sibling)
    asked = [replace(p, mode=mode) for p in problems(own, n) for mode in ("graph", "eager")]  # type: ignore[arg-type]
    chosen = {p: [decide(p, snapshot, limits) for snapshot in (own, lent)] for p in asked}
    compile_all((p, decision.candidate) for p, decisions in chosen.items() for decision in decisions)
    found: list[dict[str, Any]] = []
    for problem, (best, borrowed) in chosen.items():
        library = Candidate.of(problem.op, "library", {})
        every = list(dict.fromkeys((best.candidate, borrowed.candidate, library)))
        us = dict(zip(every, compare(communicator, problem, every, options.rounds), strict=True))
        row = {
            "op": problem.op, "shape": "x".join(map(str, problem.shape)), "dtype": problem.dtype, "mode": problem.mode,
            "world_size": n, "own": str(best.candidate), "own_source": best.source,
            "sibling": str(borrowed.candidate), "sibling_source": borrowed.source,
            "own_us": round(us[best.candidate], 3), "sibling_us": round(us[borrowed.candidate], 3),
            "ratio": round(us[borrowed.candidate] / us[best.candidate], 4),
            "library": round(us[library] / us[best.candidate], 4), **of_run(environment),
        }  # fmt: skip
        found.append(row)
    communicator.check_peers()
    if communicator.rank == 0:
        show(found, options.csv)
        for op, mode in dict.fromkeys((row["op"], row["mode"]) for row in found):
            ratios = [row["ratio"] for row in found if (row["op"], row["mode"]) == (op, mode)]
            print(f"{op} {mode}: {len(ratios)} sizes, mean {statistics.fmean(ratios):.3f}, worst {max(ratios):.3f}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
