"""Host time of calls at sizes never seen before, in pairs with the library's, and the memory that they leave behind.

    torchrun --nproc-per-node 2 bench/new_sizes.py --csv bench/results/model/new_sizes_host.csv

Of each op so many random sizes, in bf16: the message's first extent is drawn from 1 on, up to 0.5 MiB of a collective
or 2048 rows, the other extents are those of the op's default shapes. Each size is called once by the public function,
which decides, binds and launches, and once by the library, bound before; in turns, and the slowest rank counts. On GPUs
ten sizes follow each other, as in a program whose host runs ahead, and times are from call to return. On CPUs they are
CPU time of the calling thread, for ranks that share cores wait for each other.

`--profile` says where the host time of the tuned calls goes.

Columns: op, gpu, world_size, contender (tuned, library), sizes, percentiles in ms, compiled (binaries that the calls
compiled or loaded), host_mib (growth of the process's private memory), device_mib (growth of what the GPU has in use);
memory and binaries are of both contenders.
"""

from __future__ import annotations

import contextlib
import cProfile
import pstats
import random
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from ranks import everyones
from rows import arguments, of_run

import tunedcomm
from tunedcomm.bench.csv import append_rows
from tunedcomm.dispatch.communicator import Communicator
from tunedcomm.kernels.common import launch
from tunedcomm.ops.call import paths
from tunedcomm.spec import Candidate, OpSpec, Problem, ops
from tunedcomm.tuner.gang.ranks import join_group

MIB = 1 << 20
MAX_BYTES, MAX_ROWS = MIB // 2, 2048
SIZES_A_BLOCK = 10  # whose calls follow each other; the first block warms up


def new_problem(spec: OpSpec, communicator: Communicator, draw: random.Random) -> Problem:
    """A problem of a random size that the ranks can share."""
    backend = communicator.limits.backend
    while True:
        _, *rest = draw.choice(spec.default_shapes(backend, 2))
        first = int(2 ** draw.uniform(0, (MAX_ROWS if rest else MAX_BYTES // 2).bit_length() - 1))
        problem = Problem(
            spec.name, (first, *rest), "bfloat16", communicator.world_size, mode="eager",
            reduction=spec.reductions[0] if spec.reductions else "", layout=spec.layouts[0],
            scaling=spec.scalings_of("bfloat16")[0],
        )  # fmt: skip
        try:
            spec.check(problem)
        except ValueError:
            continue
        return problem


def private_mib() -> float:
    """Memory of this process that it shares with no other, MiB."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("Private_")) / 1024


def device_mib(device: torch.device) -> float:
    """Memory of the GPU in use, MiB, without what PyTorch keeps for later."""
    if device.type != "cuda":
        return 0.0
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    return (total - free) / MIB


def timed_ms(call: Callable[[], object], device: torch.device) -> float:
    """Host time of a call."""
    clock = time.perf_counter if device.type == "cuda" else time.thread_time
    begin = clock()
    call()
    return 1e3 * (clock() - begin)


def wait_for_all(device: torch.device) -> None:
    """Begin together, with an idle GPU."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    dist.barrier()


def measure(
    spec: OpSpec, communicator: Communicator, num_sizes: int, seconds: float, profile: cProfile.Profile | None
) -> list[dict[str, object]]:
    """Rows of an op."""
    draw, device = random.Random(spec.name), communicator.device
    path = next(path for path in paths.values() if path.adapter.op == spec.name)
    library = Candidate.of(spec.name, "library", {})
    times: dict[str, list[float]] = {"tuned": [], "library": []}
    seen: set[tuple[int, ...]] = set()
    end, held, binaries = time.monotonic() + seconds, (0.0, 0.0), 0
    for first in range(-SIZES_A_BLOCK, num_sizes, SIZES_A_BLOCK):
        if first == 0:
            held, binaries = (private_mib(), device_mib(device)), launch.compile_request.cache_info().misses
        if first > 0 and max(everyones(time.monotonic())) > end:
            break
        block: list[dict[str, Callable[[], object]]] = []
        for number in range(first, min(first + SIZES_A_BLOCK, num_sizes)):
            problem = new_problem(spec, communicator, draw)
            while problem.shape in seen:
                problem = new_problem(spec, communicator, draw)
            seen.add(problem.shape)
            inputs = spec.make_inputs(problem, communicator.rank, number, "random", device)
            outputs = spec.make_outputs(problem, device)
            tensors = tuple(value for value in inputs if value is not None)
            stream = torch.cuda.current_stream().cuda_stream if device.type == "cuda" else 0
            calls = {
                "tuned": partial(path.run_problem, problem, inputs, outputs),
                "library": partial(communicator.bind(problem, library), tensors, outputs, stream),
            }
            block.append(calls if number % 2 else dict(reversed(calls.items())))
        wait_for_all(device)
        for contender, call in (pair for calls in block for pair in calls.items()):
            if device.type != "cuda":
                dist.barrier()  # on CPUs a call waits for the peers'
            with profile if profile and contender == "tuned" and first >= 0 else contextlib.nullcontext():
                spent = timed_ms(call, device)
            if first >= 0:
                times[contender].append(spent)
    binaries = launch.compile_request.cache_info().misses - binaries
    grown = (private_mib() - held[0], device_mib(device) - held[1])
    rows = []
    for contender, mine in times.items():
        slowest = [max(each) for each in zip(*everyones(mine), strict=True)]
        most = [max(each) for each in zip(*everyones((binaries, *grown)), strict=True)]
        rows.append(
            {
                "op": spec.name, "gpu": communicator.environment.gpu, "world_size": communicator.world_size,
                "contender": contender, "sizes": len(slowest), "p50_ms": round(statistics.median(slowest), 4),
                "p95_ms": round(statistics.quantiles(slowest, n=20)[-1], 4), "compiled": most[0],
                "host_mib": round(most[1], 1), "device_mib": round(most[2], 1),
            }
        )  # fmt: skip
    return rows


def main() -> None:
    args = arguments(__doc__, csv=None, op=[], sizes=150, seconds=10.0, profile=False)
    join_group()
    communicator = tunedcomm.get_communicator()
    for spec in ops().values():
        if args.op and spec.name not in args.op:
            continue
        profile = cProfile.Profile() if args.profile else None
        rows = measure(spec, communicator, args.sizes, args.seconds, profile)
        if communicator.rank == 0:
            for row in rows:
                print(*row.values(), flush=True)
            if profile is not None:
                pstats.Stats(profile).sort_stats("cumulative").print_stats(60)
            if args.csv is not None:
                run = of_run(communicator.environment)
                del run["gpu"]
                append_rows(args.csv, [{**row, **run} for row in rows], columns=(*rows[0], *run))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
