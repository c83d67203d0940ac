"""The cost of bounding every wait: the same kernels built with the bound and without it, in one process and run.

    torchrun --nproc-per-node 4 bench/bound_cost.py --csv bench/results/bound_cost.csv

Graph replays in turn, slowest rank, µs. Each variant runs with its default config. Columns as in the other files of
bench/results; the contender names the build. A build without the bound spins for ever if a rank is lost: it exists in
this script alone.
"""

from __future__ import annotations

import tempfile

import torch
import triton
from ranks import bf16_sum, finish, latencies, row_of
from rows import arguments

from tunedcomm import spec
from tunedcomm.bench.runner import start_group
from tunedcomm.dispatch.communicator import Communicator, get_communicator
from tunedcomm.dispatch.launches import Launch
from tunedcomm.kernels.common import launch, sync
from tunedcomm.tuner.measure.timing import contend

VARIANTS = ("lamport", "one_shot", "two_shot", "two_shot_lamport")
CALLS = 100


def unbounded_loop(poll: list[str], missed: list[str], timeout: str, status: str) -> str:
    """The loop that `sync._bounded_loop` makes, without the bound."""
    return "\n".join(["LOOP:", *poll, "vote.sync.any.pred any, any, 0xffffffff;", "@any bra LOOP;"])


def bind(communicator: Communicator, problem: spec.Problem, candidate: spec.Candidate, *, bounded: bool) -> Launch:
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
    args = arguments(__doc__, bytes=[4096, 65536], rounds=200, csv=None)
    start_group()
    communicator, stream, rows = get_communicator(), torch.cuda.Stream(), []
    op = spec.get_op("all_reduce")
    for nbytes in args.bytes:
        problem = bf16_sum(nbytes // 2)
        inputs = op.make_inputs(problem, communicator.rank, 1, "random", "cuda")
        outputs = op.make_outputs(problem, "cuda")
        for name in VARIANTS:
            config = spec.get_variant("all_reduce", name).default(problem, communicator.limits)
            candidate = spec.Candidate.of("all_reduce", name, config)
            contenders = []
            for bounded in (True, False):
                bound = bind(communicator, problem, candidate, bounded=bounded)
                with torch.cuda.stream(stream):
                    contenders.append(contend(bound, inputs, outputs, calls=CALLS, graph=True, stream=stream))
            found = latencies(communicator, contenders, args.rounds, stream)
            for build, latency in zip(("bounded", "unbounded"), found, strict=True):
                rows.append(row_of(problem, f"{name}:{build}", str(candidate), latency))
    finish(communicator, rows, args.csv)


if __name__ == "__main__":
    main()
