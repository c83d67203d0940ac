"""What each rank of `tunedcomm demo` runs: all_reduce through the tuned database, its sum checked."""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist

import tunedcomm
from tunedcomm.bench.runner import start_group
from tunedcomm.dispatch.communicator import release_communicators
from tunedcomm.spec import parse_shape

__all__ = ["main"]


def main(shapes: list[str]) -> int:
    """Reduce small whole numbers, whose sums are exact in bf16; 0 if every rank has every sum right."""
    device = start_group()
    rank, world_size = dist.get_rank(), dist.get_world_size()
    wrong = 0
    for text in shapes:
        (numel,) = parse_shape(text)
        pattern = torch.arange(numel, device=device) % 5
        x = (pattern + rank).to(torch.bfloat16)
        expected = (pattern * world_size + world_size * (world_size - 1) // 2).to(torch.bfloat16)
        right = bool(torch.equal(tunedcomm.all_reduce(x), expected))
        wrong += not right
        verdict = torch.tensor([int(not right)], device=device)
        dist.all_reduce(verdict)
        if rank == 0:
            state = "sum right on every rank" if not int(verdict) else f"SUM WRONG on {int(verdict)} ranks"
            sys.stdout.write(f"  all_reduce of {numel} elements on {world_size} ranks: {state}\n")
            sys.stdout.flush()
    dist.barrier()
    # A communicator that outlives its group keeps gloo's threads alive into the interpreter's end, which then aborts.
    release_communicators()
    dist.destroy_process_group()
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
