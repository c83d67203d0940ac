"""Time collectives of CPU tensors, the public call beside gloo's, in turns of one run:

    torchrun --nproc-per-node 2 bench/host_collectives.py --op all_reduce --csv bench/results/all_reduce_host.csv

A sample is several calls after a barrier, of the slowest rank. Both write into a tensor that is there: the public call
into `out`, gloo's all_reduce in place. Contenders that end in `_new` give all_reduce's result in a new tensor, to which
gloo's caller has to copy the input first. Columns as in the other files of bench/results.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
import torch.distributed as dist
from ranks import block_us, everyones, finish, row_of, slowest
from rows import arguments

import tunedcomm
from tunedcomm.spec import Problem

SIZES = (1 << 10, 8 << 10, 64 << 10, 512 << 10, 4 << 20, 16 << 20, 64 << 20)
SAMPLE_US = 20_000.0  # at least, where 200 calls take so long; ranks leave a barrier ms apart
GLOO: dict[str, Callable[..., object]] = {
    "all_gather": dist.all_gather_into_tensor,
    "reduce_scatter": dist.reduce_scatter_tensor,
    "all_to_all": dist.all_to_all_single,
}


def contenders(problem: Problem, x: torch.Tensor) -> dict[str, Callable[[], object]]:
    """Calls by name, after a comparison of the first two's results."""
    ours = getattr(tunedcomm, problem.op)
    if problem.op == "all_reduce":
        out, expected, idle = torch.empty_like(x), x.clone(), torch.zeros_like(x)
        dist.all_reduce(expected)
        calls: dict[str, Callable[[], object]] = {
            "library": partial(dist.all_reduce, idle),
            "tuned_new": partial(ours, x),
            "library_new": lambda: dist.all_reduce(x.clone()),
        }
    else:
        parts = problem.world_size if problem.op != "reduce_scatter" else 1
        out = torch.empty(problem.numel * parts, dtype=x.dtype)
        expected = torch.empty_like(out)
        calls = {"library": partial(GLOO[problem.op], expected, x)}
        calls["library"]()
    ours(x, out=out)
    torch.testing.assert_close(out, expected, rtol=1e-2, atol=1e-2)
    return {"tuned": partial(ours, x, out=out), **calls}


def main() -> None:
    args = arguments(__doc__, op=["all_reduce"], largest=SIZES[-1], dtype="float32", rounds=15, csv=None)
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    communicator, dtype, rows = tunedcomm.get_communicator(), getattr(torch, args.dtype), []
    sample_us = partial(block_us, device=torch.device("cpu"), to_end=False)
    for op, nbytes in [(op, nbytes) for op in args.op for nbytes in SIZES if nbytes <= args.largest]:
        reduction = "sum" if "reduce" in op else ""
        shape = (nbytes // dtype.itemsize,)
        problem = Problem(op, shape, args.dtype, dist.get_world_size(), reduction=reduction, mode="eager")
        parts = problem.world_size if op in ("reduce_scatter", "all_to_all") else 1
        calls = contenders(problem, torch.randn(shape[0] * parts).to(dtype))
        counts = {}
        for name, call in calls.items():
            counts[name] = 2
            while counts[name] < 200 and max(everyones(counts[name] * sample_us(call, counts[name]))) < SAMPLE_US:
                counts[name] *= 2
        rounds = [[sample_us(call, counts[name]) for name, call in calls.items()] for _ in range(args.rounds)]
        candidate = tunedcomm.explain(communicator, problem).candidate
        for name, latency in zip(calls, slowest(list(zip(*rounds, strict=True))), strict=True):
            asked = replace(problem, in_place=op == "all_reduce" and name == "library")
            row = row_of(asked, name, str(candidate) if name.startswith("tuned") else "", latency)
            rows.append(row)
    finish(communicator, rows, args.csv)


if __name__ == "__main__":
    main()
