"""Time gathers and scatters of unequal rows, and of several tensors at once, in CUDA graphs.

    TUNEDCOMM_DB=tuned.db torchrun --nproc-per-node 2 bench/by_counts.py --rows 1 8 64 512 --csv by_counts.csv

For each number of rows and skew s, rank r has round(rows · (1 − s · r / (n − 1))) rows of --hidden bf16 elements, in
counts that the host knows: all_gather_v and reduce_scatter_v as dispatch serves them, in turn with the variant
`library`, NCCL's grouped broadcasts or reduces. Then all_gather of a list of three tensors of 4 KiB, in turn with
three calls. What dispatch serves comes from the database; tune it first:

    tunedcomm tune --op all_gather_v --shape 1x7168,8x7168,64x7168,512x7168
    tunedcomm tune --op all_gather_list --shape 12288 --dtype uint8

The slowest rank's median counts.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable
from typing import Any

import torch
from ranks import finish, row_of, slowest, times_in_turn
from rows import arguments

import tunedcomm
from tunedcomm import kernels
from tunedcomm.dispatch.groups import get_communicator
from tunedcomm.spec import Problem, format_shape
from tunedcomm.tuner.gang.ranks import join_group
from tunedcomm.tuner.measure import timing

CALLS, ROUNDS = 10, 25
SKEWS = (0.0, 0.5, 1.0)
TENSORS, TENSOR_BYTES = 3, 4096
Call = Callable[[], object]


def timed(call: Call, stream: torch.cuda.Stream) -> timing.TimedRun:
    """CALLS calls in a graph."""
    with torch.cuda.stream(stream):
        for _ in range(2):
            call()
    stream.synchronize()

    def run() -> None:
        for _ in range(CALLS):
            call()

    return timing.TimedRun(timing.capture(run, stream).replay, CALLS, eager=False)


def both(op: str, call: Call, stream: torch.cuda.Stream) -> list[timing.TimedRun]:
    """As dispatch serves it, and by the library."""
    made = []
    for block in (contextlib.nullcontext(), tunedcomm.force(op, "library")):
        with block:
            made.append(timed(call, stream))
    return made


def main() -> None:
    """Measure."""
    options = arguments(__doc__, rows=[1, 8, 64, 512], hidden=7168, csv=None)
    device = join_group()
    kernels.discover()
    communicator = get_communicator(None, device)
    n, rank = communicator.world_size, communicator.rank
    stream = torch.cuda.Stream(device)
    rows: list[dict[str, Any]] = []

    def compare(problem: Problem, note: str, names: tuple[str, str], runs: list[timing.TimedRun]) -> None:
        found = slowest(times_in_turn(runs, ROUNDS, stream))
        rows.extend(row_of(problem, name, note, latency) for name, latency in zip(names, found, strict=True))
        if rank == 0:
            ours, theirs = (latency.p50_us for latency in found)
            name = f"{problem.op:17} {format_shape(problem.shape):>10} {note:9}"
            print(f"{name} {names[0]} {ours:8.2f} us, {names[1]} {theirs:8.2f} us, x{theirs / ours:.2f}", flush=True)

    for most, skew in itertools.product(options.rows, SKEWS):
        counts = [round(most * (1 - skew * r / max(n - 1, 1))) for r in range(n)]
        mine = torch.randn(counts[rank], options.hidden, device=device).bfloat16()
        everyone = torch.randn(sum(counts), options.hidden, device=device).bfloat16()
        for op, x in (("all_gather_v", mine), ("reduce_scatter_v", everyone)):
            function: Any = getattr(tunedcomm, op)
            out = torch.empty_like(everyone if op == "all_gather_v" else mine)
            reduction = "" if op == "all_gather_v" else "sum"
            problem = Problem(op, (most, options.hidden), "bfloat16", n, reduction)

            def call(
                function: Any = function, x: Any = x, out: Any = out, counts: Any = counts, most: int = most
            ) -> object:
                return function(x, counts, max_count=most, out=out)

            compare(problem, f"skew {skew}", ("tuned", "library"), both(op, call, stream))

    several = [torch.full((TENSOR_BYTES,), rank, dtype=torch.uint8, device=device) for _ in range(TENSORS)]
    results = [torch.empty(n * TENSOR_BYTES, dtype=torch.uint8, device=device) for _ in range(TENSORS)]

    def together() -> object:
        return tunedcomm.all_gather(several)

    def one_by_one() -> object:
        return [tunedcomm.all_gather(x, out=out) for x, out in zip(several, results, strict=True)]

    problem = Problem("all_gather_list", (TENSORS * TENSOR_BYTES,), "uint8", n, "")
    compare(problem, "3 tensors", ("list", "three calls"), [timed(together, stream), timed(one_by_one, stream)])
    communicator.check_peers()
    finish(communicator, rows, options.csv)


if __name__ == "__main__":
    main()
