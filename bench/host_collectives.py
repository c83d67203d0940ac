"""Time all_reduce of CPU tensors, the public call beside gloo's, in turns of one run:

    torchrun --nproc-per-node 2 bench/host_collectives.py --csv bench/results/all_reduce_host.csv

A sample is several calls after a barrier, of the slowest rank. The public call writes into a tensor of the caller's,
gloo works in place. Columns as in the other files of bench/results.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch
import torch.distributed as dist
from ranks import block_us, everyones, finish, row_of, slowest
from rows import arguments

import tunedcomm
from tunedcomm.spec import Problem

SIZES = (1 << 10, 8 << 10, 64 << 10, 512 << 10, 4 << 20, 16 << 20, 64 << 20)
SAMPLE_US = 5000.0  # at least, where 200 calls take so long


def main() -> None:
    args = arguments(__doc__, dtype="float32", rounds=15, csv=None)
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    communicator, dtype, rows = tunedcomm.get_communicator(), getattr(torch, args.dtype), []
    sample_us = partial(block_us, device=torch.device("cpu"), to_end=False)
    for nbytes in SIZES:
        shape = (nbytes // dtype.itemsize,)
        problem = Problem("all_reduce", shape, args.dtype, dist.get_world_size(), reduction="sum", mode="eager")
        x = torch.randn(shape).to(dtype)
        out, expected = torch.empty_like(x), x.double()
        tuned, library = partial(tunedcomm.all_reduce, x, out=out), partial(dist.all_reduce, torch.zeros_like(x))
        counts = []
        for call in (tuned, library):
            sample_us(call, 3)
            counts.append(max(2, min(200, int(SAMPLE_US / max(everyones(sample_us(call, 3)))))))
        dist.all_reduce(expected)
        torch.testing.assert_close(out, expected.to(dtype), rtol=1e-2, atol=1e-2)
        rounds = [[sample_us(tuned, counts[0]), sample_us(library, counts[1])] for _ in range(args.rounds)]
        candidate = tunedcomm.explain(communicator, problem).candidate
        ours, theirs = slowest(list(zip(*rounds, strict=True)))
        rows.append(row_of(problem, "tuned", str(candidate), ours))
        rows.append(row_of(replace(problem, in_place=True), "library", "", theirs))
    finish(communicator, rows, args.csv)


if __name__ == "__main__":
    main()
