"""The time that interception adds to a call on the host, µs: to calls that are served, passed on, or not routed.

    torchrun --nproc-per-node 2 bench/intercept_cost.py --csv intercept_cost.csv --check

Each kind of call is timed in blocks, outside of interception and inside in turn, each block as long as on its slowest
rank. Compared are the tenth percentiles of the blocks: the host's other work, which comes and goes, is in none of them.
(Medians of one run were 291 and 358 us where neighbours differed by 5.) `step` is a model's step of matrix products, a
norm and a broadcast, none of which is routed: what is added there must be at most 1 % of it (`--check`). On CPUs the
collectives' times are gloo's; what is added is Python's either way.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import sys
from collections.abc import Callable, Iterable
from typing import Any

# Nothing may make multicast objects; torch reads these when it is imported.
os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")

import torch
import torch.distributed as dist
from ranks import block_us
from rows import Row, append, arguments, of_run

import tunedcomm
from tunedcomm.bench.runner import start_group

COLUMNS = ("call", "outside_us", "inside_us", "added_us", "added_percent", "blocks", "calls", "world_size")
MOST_PERCENT = 1.0  # of a step that is not served


def compare(call: Callable[[], object], calls: int, blocks: int, device: torch.device) -> tuple[float, float, float]:
    """Tenth percentiles outside and inside, and their difference; the order changes from pair to pair."""
    times: dict[bool, list[float]] = {False: [], True: []}
    for number in range(blocks + 2):
        for within in (False, True) if number % 2 else (True, False):
            with tunedcomm.intercept() if within else contextlib.nullcontext():
                call()  # the choice is made at the first call
                times[within].append(block_us(call, calls, device, to_end=True))
    slowest = torch.tensor([times[False][2:], times[True][2:]], dtype=torch.float64, device=device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    outside, inside = slowest.tolist()
    fast = [statistics.quantiles(blocks_us, n=10, method="inclusive")[0] for blocks_us in (outside, inside)]
    return fast[0], fast[1], fast[1] - fast[0]


def calls_of(device: torch.device) -> dict[str, Callable[[], object]]:
    other = dist.new_group()
    numbers = torch.ones(1024, dtype=torch.int64, device=device)
    x, weight = torch.ones(64, 1024, device=device), torch.ones(1024, 1024, device=device) / 1024
    pair = [torch.empty_like(x) for _ in range(dist.get_world_size())]

    def step() -> None:
        y = x
        for _ in range(8):
            y = torch.nn.functional.rms_norm(y @ weight, (1024,))
        dist.broadcast(y, 0)

    return {
        "matmul": lambda: x @ weight,
        "broadcast": lambda: dist.broadcast(x, 0),
        "all_gather of lists": lambda: dist.all_gather(pair, x),
        "all_reduce passed on": lambda: dist.all_reduce(numbers, op=dist.ReduceOp.MAX),
        "all_reduce of another group": lambda: dist.all_reduce(numbers, op=dist.ReduceOp.MAX, group=other),
        "step": step,
    }


def is_cheap(rows: Iterable[Row]) -> bool:
    """True if a step that is not served costs no more than it may."""
    return all(float(row["added_percent"]) <= MOST_PERCENT for row in rows if row["call"] == "step")


def main() -> int:
    args = arguments(__doc__, csv=None, calls=200, blocks=31, check=False)
    device = start_group()
    rows: list[dict[str, Any]] = []
    for name, call in calls_of(device).items():
        outside, inside, added = compare(call, args.calls, args.blocks, device)
        figures = (name, *(round(each, 3) for each in (outside, inside, added, 100 * added / outside)))
        sizes = (args.blocks, args.calls, dist.get_world_size())
        rows.append(dict(zip(COLUMNS, (*figures, *sizes), strict=True)))
    if dist.get_rank() == 0:
        for row in rows:
            times = f"{row['outside_us']:>11} -> {row['inside_us']:>11} us"
            print(f"{row['call']:28} {times}, {row['added_us']:>9} us added, {row['added_percent']:>8} %")
        if args.csv:
            run = of_run(tunedcomm.get_communicator().environment)
            append(args.csv, [{**row, **run} for row in rows])
    tunedcomm.release_communicators()
    dist.destroy_process_group()
    return int(args.check and not is_cheap(rows))


if __name__ == "__main__":
    sys.exit(main())
