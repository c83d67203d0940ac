"""Time all_reduce of CPU tensors, the public call beside gloo's, in turns of one run:

    torchrun --nproc-per-node 2 bench/host_collectives.py --csv bench/results/all_reduce_host.csv

A sample is several calls after a barrier, of the slowest rank. The public call writes into a tensor of the caller's,
gloo works in place.
"""

from __future__ import annotations

import argparse
import datetime
import secrets
import shlex
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import tunedcomm
from tunedcomm import metrics
from tunedcomm.bench.csv import append_rows
from tunedcomm.spec import Problem

SIZES = (1 << 10, 8 << 10, 64 << 10, 512 << 10, 4 << 20, 16 << 20, 64 << 20)
_LEAST_SAMPLE_S = 0.005


def sample(call: Callable[[], object], calls: int) -> float:
    """Microseconds a call on the slowest rank."""
    dist.barrier()
    begin = time.perf_counter()
    for _ in range(calls):
        call()
    taken = torch.tensor([(time.perf_counter() - begin) / calls * 1e6])
    dist.all_reduce(taken, dist.ReduceOp.MAX)
    return taken.item()


def compare(contenders: dict[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Samples of every contender, taken in turns."""
    calls = {}
    for name, call in contenders.items():
        for _ in range(3):
            call()
        calls[name] = max(2, min(200, int(_LEAST_SAMPLE_S * 1e6 / sample(call, 3))))
    found: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(rounds):
        for name, call in contenders.items():
            found[name].append(sample(call, calls[name]))
    return found


def rows_of(nbytes: int, dtype: str, rounds: int, common: dict[str, Any]) -> list[dict[str, Any]]:
    """One row a contender at one size."""
    numel, world_size = nbytes // getattr(torch, dtype).itemsize, dist.get_world_size()
    x = torch.randn(numel, generator=torch.Generator().manual_seed(dist.get_rank())).to(getattr(torch, dtype))
    out, mine = torch.empty_like(x), x.clone()
    expected = x.double()
    dist.all_reduce(expected)
    error = ((tunedcomm.all_reduce(x, out=out).double() - expected).norm() / expected.norm()).item()
    found = compare(
        {"tuned": lambda: tunedcomm.all_reduce(x, out=out), "library": lambda: dist.all_reduce(mine)}, rounds
    )
    problem = Problem("all_reduce", (numel,), dtype, world_size, mode="eager")
    candidate = tunedcomm.explain(tunedcomm.get_communicator(), problem).candidate
    rows = []
    for name, samples in found.items():
        samples.sort()
        p50 = statistics.median(samples)
        algbw = nbytes / p50 / 1e3
        factor = metrics.busbw_factor("all_reduce", world_size)
        rows.append(
            {
                **common, "op": "all_reduce", "shape": numel, "message_bytes": nbytes, "dtype": dtype,
                "world_size": world_size, "mode": "eager", "contender": name,
                "config": str(candidate) if name == "tuned" else "", "latency_p10_us": round(samples[rounds // 10], 2),
                "latency_p50_us": round(p50, 2), "latency_p90_us": round(samples[-1 - rounds // 10], 2),
                "algbw_gb_s": round(algbw, 3), "busbw_gb_s": round(algbw * (factor or 1), 3), "num_sms": 0,
                "error": f"{error:.1e}" if name == "tuned" else "", "input_kind": "plain",
                "in_place": name == "library", "reduction": "sum",
            }
        )  # fmt: skip
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--csv", type=Path)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    here = tunedcomm.get_communicator().environment
    common = {
        **{name: getattr(here, name) for name in ("gpu", "fabric", "torch", "triton", "nccl", "driver", "tunedcomm")},
        "command": shlex.join(["torchrun", f"--nproc-per-node={dist.get_world_size()}", *sys.argv]),
        "run_id": secrets.token_hex(6),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
    }
    for nbytes in SIZES:
        rows = rows_of(nbytes, options.dtype, options.rounds, common)
        if dist.get_rank() == 0:
            tuned, library = (row["latency_p50_us"] for row in rows)
            print(f"{nbytes >> 10:6d} KiB {tuned:10.1f} {library:10.1f} us {library / tuned:6.1f}x {rows[0]['config']}")
            sys.stdout.flush()
            if options.csv:
                append_rows(options.csv, rows)
    dist.barrier()
    tunedcomm.release_communicators()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
