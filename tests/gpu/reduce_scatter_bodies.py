"""What each rank of a test of reduce_scatter runs, by `run_bodies.py`."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from bodies import Launch, captured, chains, lose_peer, lost, same_bits, stream

import tunedcomm
from tunedcomm.dispatch.groups import get_communicator
from tunedcomm.errors import InfeasibleError
from tunedcomm.spec import Candidate, Problem, get_op, get_variant, variants

OP = "reduce_scatter"
LARGE = "copy_engine"  # from 512 KiB on


def ordered(op: str = OP) -> list[str]:
    return sorted(name for name, variant in variants(op).items() if variant.numerics == "ordered")


def expected_of(problem: Problem, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(this rank's input, exact bits of every ordered variant)."""
    op, rank = get_op(problem.op), dist.get_rank()
    everyone = [op.make_inputs(problem, r, seed, "random", "cuda") for r in range(problem.world_size)]
    assert op.ordered_reference is not None
    (expected,) = op.ordered_reference(problem, everyone, rank)
    return everyone[rank][0], expected


def some_configs(problem: Problem, name: str, shuffle: random.Random, count: int) -> Iterator[dict[str, Any]]:
    """The default and a few others that can run, the same on every rank."""
    limits, variant = get_communicator().limits, get_variant(problem.op, name)
    default = variant.default(problem, limits)
    feasible = [c for c in variant.space.enumerate() if variant.infeasible(problem, c, limits) is None]
    if default in feasible:
        yield default
        yield from shuffle.sample(feasible, min(count, len(feasible)))


def large_body() -> dict[str, object]:
    """Messages far larger than what the areas hold, against NCCL, small whole numbers so that any order is exact."""
    comm, checked = get_communicator(), 0
    for numel in (8 << 20, (16 << 20) + 8, (5 << 20) + 3):
        problem = Problem(OP, (numel,), "bfloat16", comm.world_size)
        (x,) = get_op(OP).make_inputs(problem, comm.rank, 5, "integers", "cuda")
        wanted = torch.empty(numel, dtype=torch.bfloat16, device="cuda")
        dist.reduce_scatter_tensor(wanted, x)
        for name in ordered():
            for config in some_configs(problem, name, random.Random(numel), 4):
                with contextlib.suppress(InfeasibleError):
                    launch = comm.bind(problem, Candidate.of(OP, name, config))
                    for _ in range(2):
                        out = torch.full_like(wanted, float("nan"))
                        launch((x,), (out,), stream())
                        assert torch.equal(out, wanted), (name, config, numel)
                    checked += 1
    comm.check_peers()
    assert checked >= 5, checked
    return {"checked": checked}


def simulated(everyone: list[list[torch.Tensor]], length: int) -> list[list[torch.Tensor]]:
    """All ranks' three buffers after the chain of `chain_body`."""
    count = len(everyone)
    held = [[buffer.clone() for buffer in buffers] for buffers in everyone]
    for i in range(length):
        for rank, total in enumerate(sum(buffers[i % 3] for buffers in held).view(count, -1).clone()):
            held[rank][(i + 1) % 3].view(count, -1)[i % count] = total
    return held


def chain_body() -> dict[str, object]:
    """Back-to-back launches that depend on each other over rotating buffers, replayed with new inputs.

    A launch writes its result into a chunk of the next one's input. If a kernel that started early read its input, or
    overwrote a buffer, too early, stale values of the replay before would show.
    """
    replays, length, world_size, rank = 25, 7, dist.get_world_size(), dist.get_rank()

    def problem_of(numel: int) -> Problem:
        return Problem(OP, (numel,), "float32", world_size)

    def inputs_of(problem: Problem, r: int, replay: int) -> list[torch.Tensor]:
        make = get_op(OP).make_inputs
        return [make(problem, r, 3 * replay + b, "integers", "cuda")[0] for b in range(3)]

    for what, problem, launch in chains(ordered(), (512, 16384, 131072), problem_of):
        buffers = [torch.zeros(problem.numel * world_size, device="cuda") for _ in range(3)]

        def step(i: int, launch: Launch = launch, buffers: list[torch.Tensor] = buffers) -> None:
            launch((buffers[i % 3],), (buffers[(i + 1) % 3].view(world_size, -1)[i % world_size],), stream())

        graph = captured(step, length)
        for replay in range(replays):
            everyone = [inputs_of(problem, r, replay) for r in range(world_size)]
            for buffer, values in zip(buffers, everyone[rank], strict=True):
                buffer.copy_(values)
            graph.replay()
            for buffer, wanted in zip(buffers, simulated(everyone, length)[rank], strict=True):
                assert torch.equal(buffer, wanted), (what, replay)
    return {}


def symmetric_body() -> dict[str, object]:
    """Inputs that the peers read in place, overwritten at once after the call."""
    comm = get_communicator()
    for numel in (64, 5001, 3_000_000):
        problem = Problem(OP, (numel,), "bfloat16", comm.world_size)
        values, expected = expected_of(problem, numel)
        whole = tunedcomm.symmetric_empty(numel * comm.world_size + 64, dtype=torch.bfloat16)
        x = whole[64:]
        for name in ("one_shot", "push"):
            with tunedcomm.force(OP, name):
                for _ in range(3):
                    x.copy_(values)
                    out = tunedcomm.reduce_scatter(x)
                    x.fill_(float("nan"))
                    assert same_bits(out, expected), (name, numel)
        torch.cuda.synchronize()
        dist.barrier()
    return {}


def dispatch_body() -> dict[str, object]:
    """The public call as users make it: any tensor and dimension, first in a capture, unusual strides and alignment."""
    world_size, rank = dist.get_world_size(), dist.get_rank()
    total = sum(range(1, world_size + 1))
    base = (torch.arange(12 * world_size * 6 * world_size, device="cuda") % 7).view(12 * world_size, 6 * world_size)
    for dtype in (torch.bfloat16, torch.float32, torch.float64, torch.int32, torch.uint8):
        plain = base.to(dtype)
        mine = plain * (rank + 1)
        padded = torch.zeros(mine.shape[0], mine.shape[1] + 1, device="cuda", dtype=dtype)[:, 1:]
        padded.copy_(mine)
        for x in (mine, mine.t().contiguous().t(), padded):
            for dim in (0, 1, -1):
                wanted = plain.chunk(world_size, dim)[rank] * total
                for _ in range(3):
                    assert torch.equal(tunedcomm.reduce_scatter(x, dim=dim), wanted), (dtype, dim)
                strided = torch.zeros(*wanted.shape, 2, device="cuda", dtype=dtype)[..., 0]
                assert tunedcomm.reduce_scatter(x, dim=dim, out=strided) is strided
                assert torch.equal(strided, wanted)
        wanted = plain.chunk(world_size)[rank]
        assert torch.equal(tunedcomm.reduce_scatter(mine, op="max"), wanted * world_size)
        assert torch.equal(tunedcomm.reduce_scatter(mine, op="min"), wanted)
    assert tunedcomm.reduce_scatter(base[:0].to(torch.float32)).shape == (0, 6 * world_size)
    fresh = torch.full((world_size * 777,), float(rank + 1), device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):  # never called before: the library serves it
        out = tunedcomm.reduce_scatter(fresh)
    graph.replay()
    assert torch.equal(out, torch.full_like(out, float(total)))
    return {}


def lost_peer_body() -> dict[str, object]:
    """One rank stops calling: the others give up within the bound, say for whom, and refuse further calls."""
    world_size = dist.get_world_size()
    waited = [lose_peer(OP, name, mode, numel * world_size) for name, mode, numel in lost(ordered(), LARGE, 1 << 18)]
    return {"waited": max(waited)}
