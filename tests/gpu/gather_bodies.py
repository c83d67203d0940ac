"""What each rank of a test of all_gather runs, by `run_bodies.py`."""

from __future__ import annotations

import functools
import random
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from bodies import (
    Launch,
    bytes_of,
    captured,
    chains,
    interleaved,
    lose_peer,
    lost,
    pin_variants,
    stream,
)

import tunedcomm
from tunedcomm.dispatch.groups import get_communicator
from tunedcomm.kernels.common.packets import ESCAPE
from tunedcomm.kernels.common.sync import SENTINEL
from tunedcomm.spec import Problem

PACKETS, OTHERS = ("lamport", "pull", "push"), ("copy_engine", "multimem")
WORDS = (SENTINEL.value, ESCAPE.value, 0x7FC01234, 0)


def gather(numel: int, dtype: str = "bfloat16") -> Problem:
    return Problem("all_gather", (numel,), dtype, dist.get_world_size(), reduction="")


def payload(problem: Problem, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(this rank's input, what every rank must get): any bits, many of them words that the packets disguise."""
    parts = []
    for rank in range(problem.world_size):
        generator = torch.Generator(device="cuda").manual_seed(seed * 1009 + rank)
        room = -(-problem.nbytes // 16) * 4
        words = torch.randint(-(2**31), 2**31, (room,), generator=generator, device="cuda").to(torch.int32)
        for index, word in enumerate(WORDS[: (seed + rank) % 5]):
            words[torch.randint(0, 8, (room,), generator=generator, device="cuda") == index] = word
        parts.append(words.view(torch.uint8)[: problem.nbytes])
    dtype = getattr(torch, problem.dtype)
    return parts[dist.get_rank()].clone().view(dtype), torch.cat(parts)


def chain_body() -> dict[str, object]:
    """Launches whose input is a part of the result before them, in a graph that is replayed with new inputs.

    With programmatic dependent launch a kernel starts before its predecessor ends: if it read its input, or overwrote
    a buffer, too early, stale values of the replay before would show.
    """
    length, rank, world_size = 12, dist.get_rank(), dist.get_world_size()
    for what, problem, launch in chains(
        (*PACKETS, *OTHERS), (2048, 65536, 1 << 20), functools.partial(gather, dtype="float32")
    ):
        numel = problem.numel
        x = torch.zeros(numel, device="cuda")
        outs = [torch.zeros(numel * world_size, device="cuda") for _ in range(3)]
        mine = slice((rank + 1) % world_size * numel, ((rank + 1) % world_size + 1) * numel)

        def step(
            i: int,
            launch: Launch = launch,
            x: torch.Tensor = x,
            outs: list[torch.Tensor] = outs,
            mine: slice = mine,
        ) -> None:
            launch((x if i == 0 else outs[(i - 1) % 3][mine],), (outs[i % 3],), stream())

        graph = captured(step, length)
        for replay in range(30):
            values, everyone = payload(problem, replay)
            x.copy_(values)
            graph.replay()
            # Each launch passes every rank's part on to the rank before it.
            turned = everyone.view(world_size, -1).roll(-(length - 1), 0).flatten()
            assert torch.equal(bytes_of(outs[(length - 1) % 3]), turned), (what, replay)
    return {}


def streams_body() -> dict[str, object]:
    pin_variants("all_gather", {512: "lamport", 4096: "pull", 600_000: "push", 300_000: "copy_engine"})
    return interleaved(tunedcomm.all_gather, [payload(gather(n), n) for n in (512, 4096, 600_000, 300_000)])


def symmetric_body() -> dict[str, object]:
    """Symmetric inputs, overwritten as soon as the call has ended."""
    for numel in (64, 5000, 300_001):
        for name in ("pull", "copy_engine", "lamport", "push"):
            x = tunedcomm.symmetric_empty(numel + 64, dtype=torch.bfloat16)[64:]
            with tunedcomm.force("all_gather", name):
                for seed in range(20):
                    values, expected = payload(gather(numel), seed)
                    x.copy_(values)
                    out = tunedcomm.all_gather(x)
                    x.fill_(-1.0)
                    assert torch.equal(bytes_of(out), expected), (name, numel, seed)
            torch.cuda.synchronize()
            dist.barrier()
    return {}


def progress_body() -> dict[str, object]:
    """A kernel sums chunks while they come: eagerly, and in a graph that is replayed with new inputs and delays."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "multirank"))
    from progress_consumer import sum_kernel

    rank, world_size, columns = dist.get_rank(), dist.get_world_size(), 1024
    noise = random.Random(rank)

    def values(r: int, rows: int, seed: int) -> torch.Tensor:
        generator = torch.Generator(device="cuda").manual_seed(seed * 31 + r)
        return torch.randint(-3, 4, (rows, columns), generator=generator, device="cuda").float()

    def read(gather: tunedcomm.GatherProgress) -> torch.Tensor:
        sums = torch.full((world_size, gather.num_chunks), float("nan"), device="cuda")
        extents = (gather.num_rows * columns, gather.chunk_rows * columns, gather.num_chunks)
        sum_kernel[(world_size,)](
            gather.out.data_ptr(), sums.data_ptr(), *extents, *gather.kernel_arguments, BLOCK=1024
        )
        return sums

    def wanted(gather: tunedcomm.GatherProgress, every: list[torch.Tensor]) -> torch.Tensor:
        return torch.stack([torch.stack([c.sum() for c in t.split(gather.chunk_rows)]) for t in every])

    calls = 0
    for rows, num_chunks, aside in ((64, 4, True), (1000, 7, True), (1000, 3, False), (5, 64, True)):
        out = tunedcomm.symmetric_empty((rows * world_size, columns), dtype=torch.float32)
        x = torch.empty(rows, columns, device="cuda")
        for seed in range(20):
            every = [values(r, rows, seed) for r in range(world_size)]
            x.copy_(every[rank])
            torch.cuda._sleep(noise.randrange(100_000))
            gather = tunedcomm.all_gather_with_progress(x, out=out, num_chunks=num_chunks, aside=aside)
            sums = read(gather)
            whole = gather.finish().clone()
            x.fill_(float("nan"))
            assert torch.equal(sums, wanted(gather, every)), (rows, seed)
            assert torch.equal(whole, torch.cat(every)), (rows, seed)
            calls += 1
        graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side), torch.cuda.graph(graph, stream=side):
            kept = []
            for _ in range(3):
                gather = tunedcomm.all_gather_with_progress(x, out=out, num_chunks=num_chunks, aside=aside)
                kept.append(read(gather))
                gather.finish()
        for seed in range(20):
            every = [values(r, rows, seed + 50) for r in range(world_size)]
            x.copy_(every[rank])
            torch.cuda._sleep(noise.randrange(100_000))
            graph.replay()
            assert all(torch.equal(sums, wanted(gather, every)) for sums in kept), (rows, seed)
            calls += 1
    get_communicator().check_peers()
    return {"calls": calls}


def dispatch_body() -> dict[str, object]:
    """The public call as users make it: any tensor, dimension and group, and first in a capture."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    base = torch.arange(64 * 130, device="cuda").view(64, 130)
    for dtype in (torch.bfloat16, torch.float64, torch.int16, torch.bool, torch.complex64, torch.complex128):
        every = [((base + r) % 97).to(dtype) for r in range(world_size)]
        for view in (lambda t: t, lambda t: t.t(), lambda t: t[:, 1:], lambda t: t[3:, ::2], lambda t: t[:0]):
            x = view(every[rank])
            for dim in (0, 1, -1):
                wanted = torch.cat([view(t) for t in every], dim)
                assert torch.equal(tunedcomm.all_gather(x, dim=dim), wanted), (dtype, tuple(x.shape), dim)
                out = torch.empty(*wanted.shape[:-1], 2 * wanted.shape[-1], dtype=dtype, device="cuda")[..., ::2]
                assert tunedcomm.all_gather(x, dim=dim, out=out) is out
                assert torch.equal(out, wanted), (dtype, dim)
    pair = dist.new_group([0, 1])
    if rank < 2:
        out = tunedcomm.all_gather(torch.full((1000,), float(rank), device="cuda"), group=pair)
        assert out.sum().item() == 1000.0
    fresh = torch.full((777,), float(rank), device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):  # never called before: the library serves it
        out = tunedcomm.all_gather(fresh)
    graph.replay()
    assert torch.equal(out, torch.arange(float(world_size), device="cuda").repeat_interleave(777))
    return {}


def lost_peer_body() -> dict[str, object]:
    """One rank stops calling: the others give up within the bound, say for whom, and refuse further calls."""
    return {"waited": max(lose_peer("all_gather", *each) for each in lost((*PACKETS, "copy_engine"), "", 0))}
