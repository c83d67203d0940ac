"""What interception adds to a call on the host, µs: calls that are served, passed on, of other groups, and not routed.

    torchrun --nproc-per-node 2 bench/intercept_cost.py --csv intercept_cost.csv

Each kind of call is timed in blocks, outside of interception and inside in turn, and the median of the differences is
what is added. `step` is a model's step of matrix products, a norm and a broadcast, none of which is routed: what is
added there must be at most 1 % of it. On CPUs the collectives' times are gloo's; what is added is Python's either way.
"""

from __future__ import annotations

import argparse
import csv
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

import tunedcomm

COLUMNS = ("call", "outside_us", "inside_us", "added_us", "added_percent", "torch", "device", "world_size")


def block_us(call: Callable[[], object], calls: int, device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
    dist.barrier()
    begin = time.perf_counter()
    for _ in range(calls):
        call()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - begin) * 1e6 / calls


def compare(call: Callable[[], object], calls: int, blocks: int, device: torch.device) -> tuple[float, float, float]:
    """Medians outside and inside, and of the differences of neighbours; the order changes from pair to pair."""
    outside, inside = [], []
    for number in range(blocks + 2):
        for within in (False, True) if number % 2 else (True, False):
            if within:
                with tunedcomm.intercept():
                    call()  # the choice is made at the first call
                    inside.append(block_us(call, calls, device))
            else:
                call()
                outside.append(block_us(call, calls, device))
    outside, inside = outside[2:], inside[2:]
    added = statistics.median(b - a for a, b in zip(outside, inside, strict=True))
    return statistics.median(outside), statistics.median(inside), added


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


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--csv", type=Path)
    parser.add_argument("--calls", type=int, default=200)
    parser.add_argument("--blocks", type=int, default=15)
    arguments = parser.parse_args()
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    rows = []
    for name, call in calls_of(device).items():
        outside, inside, added = compare(call, arguments.calls, arguments.blocks, device)
        figures = (f"{outside:.2f}", f"{inside:.2f}", f"{added:.2f}", f"{100 * added / outside:.2f}")
        rows.append((name, *figures, torch.__version__, device.type, dist.get_world_size()))
    if dist.get_rank() == 0:
        for row in rows:
            print(f"{row[0]:28} {row[1]:>10} -> {row[2]:>10} us, {row[3]:>8} us added, {row[4]:>7} %")
        if arguments.csv:
            with arguments.csv.open("w", newline="") as file:
                writer = csv.writer(file)
                writer.writerow(COLUMNS)
                writer.writerows(rows)
    tunedcomm.release_communicators()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
