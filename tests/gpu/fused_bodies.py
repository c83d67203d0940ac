"""What each rank of a test of all_reduce_rms_norm runs, by `run_bodies.py`."""

from __future__ import annotations

import contextlib

import torch
import torch.distributed as dist
from bodies import Launch, captured, chains, same_bits, stream

import tunedcomm
from tunedcomm.dispatch.groups import get_communicator
from tunedcomm.spec import Problem, get_op, variants

OP = "all_reduce_rms_norm"
Tensors = tuple[torch.Tensor, ...]


def expected_of(problem: Problem, seed: int) -> tuple[Tensors, Tensors]:
    """(this rank's inputs, exact bits of every ordered variant's outputs)."""
    op = get_op(problem.op)
    everyone = [op.make_inputs(problem, rank, seed, "random", "cuda") for rank in range(problem.world_size)]
    rank = dist.get_rank()
    return everyone[rank], op.ordered_reference(problem, everyone, rank)


def ordered() -> list[str]:
    return [name for name, variant in variants(OP).items() if variant.numerics == "ordered"]


def chain_body() -> dict[str, object]:
    """A layer after the other in a graph, the residual in place, replayed with new inputs; with PDL and without."""
    length, world_size, rank = 6, dist.get_world_size(), dist.get_rank()

    def problem_of(tokens: int) -> Problem:
        return Problem(OP, (tokens, 4096), "bfloat16", world_size, layout="residual")

    for what, problem, launch in chains(ordered(), (1, 16, 200), problem_of):
        (x, weight, residual), _ = expected_of(problem, 0)
        a, b, h = x.clone(), torch.empty_like(x), residual.clone()

        def layer(
            i: int, launch: Launch = launch, w: torch.Tensor = weight, h: torch.Tensor = h, both: Tensors = (a, b)
        ) -> None:
            """Hand the result to the next one, with the residual in place."""
            launch((both[i % 2], w, h), (both[1 - i % 2], h), stream())

        graph = captured(layer, length)
        for replay in range(15):
            everyone = [get_op(OP).make_inputs(problem, r, replay, "random", "cuda") for r in range(world_size)]
            a.copy_(everyone[rank][0])
            h.copy_(everyone[rank][2])
            graph.replay()
            torch.cuda.synchronize()
            get_communicator().check_peers()  # a kernel that waited too long has no right result
            xs, r = [e[0] for e in everyone], everyone[0][2]
            for _ in range(length):
                # After the first layer every rank holds the same y.
                y, r = get_op(OP).ordered_reference(problem, [(v, weight, r) for v in xs], 0)
                xs = [y] * world_size
            assert same_bits(h, r), (what, replay)
            assert same_bits(a, y), (what, replay)
    return {}


def public_body() -> dict[str, object]:
    """The public call: new outputs, given ones, residual in place, odd tensors, first in a capture, several streams."""
    world_size = dist.get_world_size()
    problem = Problem(OP, (5, 1024), "bfloat16", world_size, layout="bias+residual")
    (x, weight, bias, residual), (y, h) = expected_of(problem, 3)
    wide = torch.empty(5, 2048, device="cuda", dtype=torch.bfloat16)
    for _ in range(3):
        for name in ordered():
            with tunedcomm.force(OP, name), contextlib.suppress(tunedcomm.InfeasibleError):
                for _ in range(3):
                    got = tunedcomm.all_reduce_rms_norm(x, weight, bias=bias, residual=residual)
                    assert same_bits(got[0], y)
                    assert same_bits(got[1], h)
                    held, out = residual.clone(), torch.empty_like(x)
                    got = tunedcomm.all_reduce_rms_norm(x, weight, bias=bias, residual=held, residual_out=held, out=out)
                    assert got[0] is out
                    assert same_bits(out, y)
                    assert same_bits(held, h)
        odd = torch.zeros(5, 1025, device="cuda", dtype=torch.bfloat16)[:, 1:].copy_(x)
        got = tunedcomm.all_reduce_rms_norm(odd, weight, bias=bias, residual=residual, out=wide[:, ::2], numerics="any")
        assert (got[0].float() - y.float()).norm() < 0.02 * y.float().norm()
        x7 = torch.randn(3, 77, device="cuda", dtype=torch.bfloat16)
        got = tunedcomm.all_reduce_rms_norm(x7, x7[0])
        assert torch.isfinite(got[0]).all()
    streams = [torch.cuda.Stream() for _ in range(2)]
    torch.cuda.synchronize()
    late = []
    with tunedcomm.force(OP, "lamport"):
        for step in range(60):
            with torch.cuda.stream(streams[step % 2]):
                late.append(tunedcomm.all_reduce_rms_norm(x, weight, bias=bias, residual=residual))
    torch.cuda.synchronize()
    assert all(same_bits(got[0], y) and same_bits(got[1], h) for got in late)
    graph, fresh = torch.cuda.CUDAGraph(), torch.randn(9, 512, device="cuda")
    with torch.cuda.graph(graph):  # never called before: the library serves it
        out, _ = tunedcomm.all_reduce_rms_norm(fresh, fresh[0])
    graph.replay()
    assert torch.isfinite(out).all()
    return {}
