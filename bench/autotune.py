"""Tune in the running job, tune everything, and time both winners in turns of one run:

    torchrun --nproc-per-node 2 bench/autotune.py --budget 5 --csv bench/results/tuner/autotune_host.csv

On CPU tensors, or with --kind cuda on GPUs in CUDA graphs. `seconds` is how long the call took, `again_ms` how
long a second start with the stored rows did, with `again_trials`. The sweep tries every candidate of variants that are
not interpreted, in the same process group, with finals and no budget; `ratio` is autotune's winner over the sweep's.
"""

from __future__ import annotations

import os
import tempfile
import time
from dataclasses import replace

import torch
import torch.distributed as dist
from ranks import everyones, slowest
from rows import arguments, of_run, show

import tunedcomm
from tunedcomm.db.records import fastest
from tunedcomm.dispatch.communicator import Communicator
from tunedcomm.spec import Candidate, Problem, get_op
from tunedcomm.tuner.in_job import job_settings, run_in_job
from tunedcomm.tuner.measure import timing
from tunedcomm.tuner.search.coordinator import Coordinator
from tunedcomm.tuner.search.sweep import hash_if_known

SAMPLE_US = 5000.0


def sweep(communicator: Communicator, problems: list[Problem], trials: int) -> dict[Problem, Candidate]:
    """The winner of every problem after a search without a budget."""
    settings = replace(job_settings(communicator.limits, problems, "default"), trials=trials, final_rounds=25)
    coordinator = Coordinator(problems, settings, source_hash=hash_if_known) if communicator.rank == 0 else None
    run_in_job(communicator, settings, coordinator)
    found: dict[Problem, Candidate] = {}
    known = None if coordinator is None else coordinator.knowledge
    for problem in problems if known is not None else ():
        ran = [trial for trial in known.trials(problem) if trial.status == "ok"]
        best = fastest([trial for trial in ran if trial.final] or ran)
        found[problem] = best.candidate if best is not None else Candidate.of(problem.op, "library", {})
    return everyones(found)[0]


def compare(communicator: Communicator, problem: Problem, candidates: list[Candidate], rounds: int) -> list[float]:
    """Medians in µs of the slowest rank, of launches that take turns."""
    op, device = get_op(problem.op), communicator.device
    stream = torch.cuda.Stream(device) if device.type == "cuda" else None
    inputs = op.make_inputs(problem, communicator.rank, 0, "random", device)
    outputs, token = op.make_outputs(problem, device), torch.zeros(1, device=device)
    launches = [communicator.bind(problem, candidate) for candidate in candidates]

    def contenders(calls: int) -> list[timing.Contender]:
        graph = problem.mode == "graph"
        return [timing.contend(run, inputs, outputs, calls=calls, graph=graph, stream=stream) for run in launches]

    def time_them(calls: int, rounds: int) -> list[float]:
        def barrier() -> None:
            dist.all_reduce(token)

        return [one.p50_us for one in slowest(timing.take_rounds(barrier, contenders(calls), rounds, stream))]

    return time_them(max(2, min(200, int(SAMPLE_US / min(time_them(5, 5))))), rounds)


def main() -> None:
    args = arguments(
        __doc__, budget=5.0, kind="cpu", sizes=[1 << bits for bits in range(10, 25, 2)], trials=400, rounds=41, csv=None
    )
    rank, on_gpu = int(os.environ["RANK"]), args.kind == "cuda"
    folder = tempfile.mkdtemp()
    os.environ["TUNEDCOMM_DB"] = f"{folder}/tuned.db"
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count()) if on_gpu else None
    if device is not None:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpu else "gloo")
    torch.set_num_threads(1)
    communicator = tunedcomm.get_communicator(device=device)
    dtype, mode = ("bfloat16", "graph") if on_gpu else ("float32", "eager")
    width = 2 if on_gpu else 4
    world_size = communicator.world_size
    problems = [Problem("all_reduce", (size // width,), dtype, world_size, mode=mode) for size in args.sizes]
    begin = time.perf_counter()
    tuned = tunedcomm.autotune(problems, budget_s=args.budget, device=device)
    seconds = time.perf_counter() - begin
    tunedcomm.release_communicators()
    communicator = tunedcomm.get_communicator(device=device)
    mine = {problem: tunedcomm.explain(communicator, problem) for problem in problems}
    begin = time.perf_counter()
    again = tunedcomm.autotune(problems, budget_s=args.budget, device=device)
    again_ms = (time.perf_counter() - begin) * 1e3
    best = sweep(communicator, problems, args.trials)
    found = []
    for problem in problems:
        chosen = mine[problem]
        if chosen.candidate == best[problem]:
            us = compare(communicator, problem, [chosen.candidate], args.rounds) * 2
        else:
            us = compare(communicator, problem, [chosen.candidate, best[problem]], args.rounds)
        row = {
            "op": problem.op, "message_bytes": problem.nbytes, "dtype": dtype, "mode": mode, "world_size": world_size,
            "autotune": str(chosen.candidate), "source": chosen.source, "sweep": str(best[problem]),
            "autotune_us": round(us[0], 3), "sweep_us": round(us[1], 3), "ratio": round(us[0] / us[1], 4),
            "budget_s": args.budget, "seconds": round(seconds, 3), "trials": tuned.num_trials,
            "again_trials": again.num_trials, "again_ms": round(again_ms, 1), "load": round(os.getloadavg()[0], 1),
        }  # fmt: skip
        found.append({**row, **of_run(communicator.environment)})
    if rank == 0:
        show(found, args.csv)
        ratios = [row["ratio"] for row in found]
        print(f"ratio: mean {sum(ratios) / len(ratios):.3f}, worst {max(ratios):.3f}; left in {seconds:.2f} s")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
