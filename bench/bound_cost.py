"""What the bound of every wait costs: the same kernels with it and built without it, in one process and run.

    torchrun --nproc-per-node 4 bench/bound_cost.py --csv bench/results/bound_cost.csv

Graph replays in turn, slowest rank, µs. Each variant runs with its default config. Columns as in the other files of
bench/results; the contender says which build. A build without the bound spins for ever if a rank is lost: it exists in
this script alone.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import triton
from rows import Line, append

from tunedcomm import spec
from tunedcomm.dispatch.communicator import Communicator, get_communicator
from tunedcomm.kernels.common import launch, sync
from tunedcomm.tuner.measure import timing as measure

VARIANTS = ("lamport", "one_shot", "two_shot", "two_shot_lamport")
CALLS = 100


class Fence:
    """The part of a gang that rounds need."""

    on_gpu = True

    def __init__(self) -> None:
        self._token = torch.zeros(1, device="cuda")

    def device_barrier(self) -> None:
        dist.all_reduce(self._token)


def unbounded_loop(poll: list[str], missed: list[str], timeout: str, status: str) -> str:
    """What `sync._bounded_loop` makes, without the bound."""
    return "\n".join(["LOOP:", *poll, "vote.sync.any.pred any, any, 0xffffffff;", "@any bra LOOP;"])


def bind(communicator: Communicator, problem: spec.Problem, candidate: spec.Candidate, *, bounded: bool) -> object:
    """A launch of one of the two builds; each build has caches of its own."""
    launch._compile.cache_clear()
    if bounded:
        return communicator.bind(problem, candidate)
    kept, folder = sync._bounded_loop.fn, triton.knobs.cache.dir
    with tempfile.TemporaryDirectory() as name:
        triton.knobs.cache.dir = name
        sync._bounded_loop.fn = unbounded_loop
        try:
            return communicator.bind(problem, candidate)
        finally:
            sync._bounded_loop.fn, triton.knobs.cache.dir = kept, folder
            launch._compile.cache_clear()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--bytes", type=int, nargs="+", default=[4096, 65536])
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--csv", type=Path)
    args = parser.parse_args()
    rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", device_id=torch.device("cuda", rank))
    communicator, stream, rows = get_communicator(), torch.cuda.Stream(), []
    op = spec.get_op("all_reduce")
    for nbytes in args.bytes:
        problem = spec.Problem("all_reduce", (nbytes // 2,), "bfloat16", communicator.world_size)
        inputs, outputs = op.make_inputs(problem, rank, 1, "random", "cuda"), op.make_outputs(problem, "cuda")
        for name in VARIANTS:
            config = spec.get_variant("all_reduce", name).default(problem, communicator.limits)
            candidate = spec.Candidate.of("all_reduce", name, config)
            contenders = []
            for bounded in (True, False):
                launch = bind(communicator, problem, candidate, bounded=bounded)
                with torch.cuda.stream(stream):
                    made = measure.contend(launch, inputs, outputs, calls=CALLS, graph=True, stream=stream)
                contenders.append(made)
            with torch.cuda.stream(stream):
                times = measure.take_rounds(Fence(), contenders, args.rounds, stream)
            communicator.check_peers()
            slowest = torch.tensor(times, dtype=torch.float64, device="cuda")
            dist.all_reduce(slowest, dist.ReduceOp.MAX)
            for build, values in zip(("bounded", "unbounded"), slowest.sort().values.tolist(), strict=True):
                low, middle, high = (values[len(values) * share // 10] for share in (1, 5, 9))
                rows.append(Line(nbytes // 2, f"{name}:{build}", str(candidate), low, middle, high))
    if rank == 0:
        for row in rows:
            spread = f"(p10 {row.p10_us:.3f}, p90 {row.p90_us:.3f})"
            print(f"{2 * row.numel:>8} bytes {row.contender:28} {row.p50_us:7.3f} us {spread}")
        if args.csv:
            append(args.csv, rows, communicator.environment, world_size=communicator.world_size, mode="graph")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
