"""Tune in the running job, tune everything, and time both winners in turns of one run:

    torchrun --nproc-per-node 2 bench/autotune.py --budget 5 --csv bench/results/tuner/autotune_host.csv

In CUDA graphs, or on CPU tensors where there is no GPU. `seconds` is how long the call took, `again_ms` how long a
second start with the stored rows did, with `again_trials`. The sweep tries every candidate of variants that are not
interpreted, in the same process group, with finals and no budget; `ratio` is autotune's winner over the sweep's.
"""

from __future__ import annotations

import os
import tempfile
import time
from dataclasses import replace

import torch
import torch.distributed as dist
from ranks import compare, everyones
from rows import arguments, of_run, show

import tunedcomm
from tunedcomm import kernels
from tunedcomm.dispatch.communicator import Communicator
from tunedcomm.spec import ITEMSIZE, Candidate, Problem
from tunedcomm.tuner.gang.ranks import join_group
from tunedcomm.tuner.in_job import job_settings, run_in_job
from tunedcomm.tuner.search.coordinator import Coordinator


def sweep(communicator: Communicator, problems: list[Problem], trials: int) -> dict[Problem, Candidate]:
    """The winner of every problem after a search without a budget."""
    settings = replace(job_settings(communicator.limits, problems, "default"), trials=trials, final_rounds=25)
    coordinator = (
        Coordinator(problems, settings, source_hash=kernels.source_hash_of) if communicator.rank == 0 else None
    )
    run_in_job(communicator, settings, coordinator)
    found: dict[Problem, Candidate] = {}
    for problem in problems if coordinator is not None and coordinator.knowledge is not None else ():
        found[problem] = coordinator.knowledge.answer(problem).candidate
    return everyones(found)[0]


def main() -> None:
    sizes = [1 << bits for bits in range(10, 25, 2)]
    args = arguments(__doc__, budget=5.0, sizes=sizes, trials=400, rounds=41, csv=None)
    os.environ["TUNEDCOMM_DB"] = f"{tempfile.mkdtemp()}/tuned.db"
    dtype, mode = ("bfloat16", "graph") if join_group().type == "cuda" else ("float32", "eager")
    torch.set_num_threads(1)
    world_size = dist.get_world_size()
    problems = [Problem("all_reduce", (size // ITEMSIZE[dtype],), dtype, world_size, mode=mode) for size in args.sizes]
    begin = time.perf_counter()
    tuned = tunedcomm.autotune(problems, budget_s=args.budget)
    seconds = time.perf_counter() - begin
    tunedcomm.release_communicators()
    communicator = tunedcomm.get_communicator()
    mine = {problem: tunedcomm.explain(communicator, problem) for problem in problems}
    begin = time.perf_counter()
    again = tunedcomm.autotune(problems, budget_s=args.budget)
    again_ms = (time.perf_counter() - begin) * 1e3
    best, found, run = sweep(communicator, problems, args.trials), [], of_run(communicator.environment)
    for problem in problems:
        chosen = mine[problem]
        us = compare(communicator, problem, list(dict.fromkeys((chosen.candidate, best[problem]))), args.rounds)
        row = {
            "op": problem.op, "message_bytes": problem.nbytes, "dtype": dtype, "mode": mode, "world_size": world_size,
            "autotune": str(chosen.candidate), "source": chosen.source, "sweep": str(best[problem]),
            "autotune_us": round(us[0], 3), "sweep_us": round(us[-1], 3), "ratio": round(us[0] / us[-1], 4),
            "budget_s": args.budget, "seconds": round(seconds, 3), "trials": tuned.num_trials,
            "again_trials": again.num_trials, "again_ms": round(again_ms, 1), "load": round(os.getloadavg()[0], 1),
        }  # fmt: skip
        found.append({**row, **run})
    if communicator.rank == 0:
        show(found, args.csv)
        ratios = [row["ratio"] for row in found]
        print(f"ratio: mean {sum(ratios) / len(ratios):.3f}, worst {max(ratios):.3f}; left in {seconds:.2f} s")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
