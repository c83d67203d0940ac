"""What the bound of every wait costs: the same kernels with it and built without it, in one process and run.

    torchrun --nproc-per-node 4 bench/bound_cost.py --csv bench/results/bound_cost.csv

Graph replays in turn, slowest rank, µs. Each variant runs with its default config. Columns as in the other files of
bench/results; the contender says which build. A build without the bound spins for ever if a rank is lost: it exists in
this script alone.
"""

from __future__ import annotations

import argparse
import csv
import os
import secrets
import sys
import tempfile
from datetime import datetime, timezone
from pathlib import Path

import torch
import torch.distributed as dist
import triton

from tunedcomm import spec
from tunedcomm.cli._bench_rank import COLUMNS
from tunedcomm.communicator import Communicator, get_communicator
from tunedcomm.kernels import _launch, _sync
from tunedcomm.tuner import measure

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
    """What `_sync._bounded_loop` makes, without the bound."""
    return "\n".join(["LOOP:", *poll, "vote.sync.any.pred any, any, 0xffffffff;", "@any bra LOOP;"])


def bind(communicator: Communicator, problem: spec.Problem, candidate: spec.Candidate, *, bounded: bool) -> object:
    """A launch of one of the two builds; each build has caches of its own."""
    _launch._compile.cache_clear()
    if bounded:
        return communicator.bind(problem, candidate)
    kept, folder = _sync._bounded_loop.fn, triton.knobs.cache.dir
    with tempfile.TemporaryDirectory() as name:
        triton.knobs.cache.dir = name
        _sync._bounded_loop.fn = unbounded_loop
        try:
            return communicator.bind(problem, candidate)
        finally:
            _sync._bounded_loop.fn, triton.knobs.cache.dir = kept, folder
            _launch._compile.cache_clear()


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
                rows.append((nbytes, f"{name}:{build}", str(candidate), low, middle, high))
    if rank == 0:
        report(rows, communicator, args.csv)
    dist.barrier()
    dist.destroy_process_group()


def report(
    rows: list[tuple[int, str, str, float, float, float]], communicator: Communicator, path: Path | None
) -> None:
    """Print the rows, and append them to the CSV."""
    for nbytes, contender, _, low, middle, high in rows:
        print(f"{nbytes:>8} bytes {contender:28} {middle:7.3f} us (p10 {low:.3f}, p90 {high:.3f})")
    if path is None:
        return
    environment, run_id = communicator.environment, secrets.token_hex(6)
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = not path.exists()
    with path.open("a", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, COLUMNS)
        if fresh:
            writer.writeheader()
        for nbytes, contender, config, low, middle, high in rows:
            writer.writerow(
                {
                    "op": "all_reduce", "shape": nbytes // 2, "message_bytes": nbytes, "dtype": "bfloat16",
                    "world_size": communicator.world_size, "mode": "graph", "contender": contender, "config": config,
                    "latency_p10_us": round(low, 4), "latency_p50_us": round(middle, 4),
                    "latency_p90_us": round(high, 4), "gpu": environment.gpu, "fabric": environment.fabric,
                    "torch": environment.torch, "triton": environment.triton, "nccl": environment.nccl,
                    "driver": environment.driver, "tunedcomm": environment.tunedcomm, "command": " ".join(sys.argv),
                    "run_id": run_id, "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
                    "input_kind": "plain", "in_place": False, "reduction": "sum",
                }
            )  # fmt: skip


if __name__ == "__main__":
    main()
