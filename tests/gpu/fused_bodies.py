"""What each rank of a GPU test of the fused ops runs: `torchrun tests/gpu/fused_bodies.py NAME`."""

from __future__ import annotations

import contextlib
import os
import random
import sys
from collections.abc import Callable

import bodies
import torch
import torch.distributed as dist

import tunedcomm
from tunedcomm.dispatch.communicator import get_communicator
from tunedcomm.spec import Candidate, Problem, check_candidate, get_op, get_variant, variants

OP = "all_reduce_rms_norm"
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.contiguous().view(BITS[a.element_size()]), b.contiguous().view(BITS[b.element_size()]))


def stream() -> int:
    return torch.cuda.current_stream().cuda_stream


def expected_of(problem: Problem, seed: int) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]:
    """(this rank's inputs, exact bits of every ordered variant's outputs)."""
    op = get_op(problem.op)
    everyone = [op.make_inputs(problem, rank, seed, "random", "cuda") for rank in range(problem.world_size)]
    rank = dist.get_rank()
    return everyone[rank], op.ordered_reference(problem, everyone, rank)


def poisoned(problem: Problem) -> tuple[torch.Tensor, ...]:
    outputs = get_op(problem.op).make_outputs(problem, "cuda")
    for output in outputs:
        output.fill_(float("nan"))
    return outputs


def ordered() -> list[str]:
    return [name for name, variant in variants(OP).items() if variant.numerics == "ordered"]


def variants_body() -> dict[str, object]:
    """Every ordered variant's default and two random configs at several shapes: exact bits, three launches each."""
    comm, shuffle, checked = get_communicator(), random.Random(1), 0
    shapes = ((1, 8192), (3, 8192), (64, 8192), (300, 8192), (7, 5120), (129, 4096), (33, 128), (2, 2048))
    for seed, shape in enumerate(shapes):
        for dtype in ("bfloat16", "float16", "float32"):
            layouts, scalings, turn = get_op(OP).layouts, get_op(OP).scalings, seed + len(dtype)
            layout, scaling = layouts[turn % 4], "fp8" if seed % 4 == 1 else ""
            if seed % 2 == 0:  # a form that is not basic
                layout, scaling = layouts[turn % len(layouts)], scalings[2 + turn % (len(scalings) - 2)]
            problem = Problem(OP, shape, dtype, comm.world_size, layout=layout, scaling=scaling)
            inputs, expected = expected_of(problem, seed)
            for name in ordered():
                variant = get_variant(OP, name)
                feasible = [c for c in variant.space.enumerate() if variant.infeasible(problem, c, comm.limits) is None]
                for config in [variant.default(problem, comm.limits), *shuffle.sample(feasible, min(2, len(feasible)))]:
                    candidate = Candidate.of(OP, name, config)
                    if check_candidate(problem, candidate, comm.limits) is not None:
                        continue
                    with contextlib.suppress(tunedcomm.InfeasibleError):
                        launch = comm.bind(problem, candidate)
                        for _ in range(3):
                            outputs = poisoned(problem)
                            launch(inputs, outputs, stream())
                            for got, wanted in zip(outputs, expected, strict=True):
                                assert same_bits(got, wanted), (str(problem), str(candidate))
                        checked += 1
        comm.check_peers()
    assert checked > 150, checked
    return {"checked": checked}


def layers(
    launch: Callable[..., None], weight: torch.Tensor, h: torch.Tensor, both: tuple[torch.Tensor, ...], length: int
) -> None:
    """Layers that hand their results to each other, with the residual in place."""
    for i in range(length):
        launch((both[i % 2], weight, h), (both[1 - i % 2], h), stream())


def chain_body() -> dict[str, object]:
    """A layer after the other in a graph, the residual in place, replayed with new inputs; with PDL and without."""
    comm, length = get_communicator(), 6
    for name in ordered():
        for pdl in (False, True):
            for tokens in (1, 16, 200):
                problem = Problem(OP, (tokens, 4096), "bfloat16", comm.world_size, layout="residual")
                variant = get_variant(OP, name)
                config = dict(variant.default(problem, comm.limits))
                if "launch_pdl" in config:
                    config["launch_pdl"] = pdl
                elif pdl:
                    continue
                if check_candidate(problem, Candidate.of(OP, name, config), comm.limits):
                    continue
                launch = comm.bind(problem, Candidate.of(OP, name, config))
                (x, weight, residual), _ = expected_of(problem, 0)
                a, b, h = torch.empty_like(x), torch.empty_like(x), torch.empty_like(x)
                side, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
                side.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(side):
                    a.copy_(x)
                    h.copy_(residual)
                    layers(launch, weight, h, (a, b), length)
                    torch.cuda.synchronize()
                    with torch.cuda.graph(graph, stream=side):
                        layers(launch, weight, h, (a, b), length)
                for replay in range(15):
                    everyone = [
                        get_op(OP).make_inputs(problem, r, replay, "random", "cuda") for r in range(comm.world_size)
                    ]
                    a.copy_(everyone[comm.rank][0])
                    h.copy_(everyone[comm.rank][2])
                    graph.replay()
                    xs, r = [e[0] for e in everyone], everyone[0][2]
                    for _ in range(length):
                        # After the first layer every rank holds the same y.
                        y, r = get_op(OP).ordered_reference(problem, [(v, weight, r) for v in xs], 0)
                        xs = [y] * comm.world_size
                    assert same_bits(h, r), (name, pdl, tokens, replay)
                    assert same_bits(a, y), (name, pdl, tokens, replay)
                comm.check_peers()
    return {}


def public_body() -> dict[str, object]:
    """The public call: new outputs, given ones, residual in place, odd tensors, first in a capture, several streams."""
    world_size = dist.get_world_size()
    problem = Problem(OP, (5, 1024), "bfloat16", world_size, layout="bias+residual")
    (x, weight, bias, residual), (y, h) = expected_of(problem, 3)
    wide = torch.empty(5, 2048, device="cuda", dtype=torch.bfloat16)
    for _ in range(3):
        for name in ordered():
            with tunedcomm.force(OP, name):
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


def times_body() -> dict[str, object]:
    """µs a call in graphs: the best of a sample of each variant's configs, to be printed."""
    comm, shuffle = get_communicator(), random.Random(int(os.environ.get("SEED", "5")))
    found: dict[str, object] = {}
    count = int(os.environ.get("CONFIGS", "12"))
    for tokens in (1, 8, 64, 128, 512, 2048):
        problem = Problem(OP, (tokens, 8192), "bfloat16", comm.world_size, layout="residual")
        inputs, _ = expected_of(problem, tokens)
        for name in variants(OP):
            variant = get_variant(OP, name)
            feasible = [c for c in variant.space.enumerate() if variant.infeasible(problem, c, comm.limits) is None]
            sample = [variant.default(problem, comm.limits), *shuffle.sample(feasible, min(count, len(feasible)))]
            best = (float("inf"), "")
            for config in sample:
                with contextlib.suppress(tunedcomm.InfeasibleError):
                    if check_candidate(problem, Candidate.of(OP, name, config), comm.limits):
                        continue
                    launch = comm.bind(problem, Candidate.of(OP, name, config))
                    best = min(best, (_time(launch, inputs, poisoned(problem)), str(dict(config))))
            found[f"{tokens} {name}"] = [round(best[0], 2), best[1]]
            comm.check_peers()
    return found


def _time(
    launch: object, inputs: tuple[torch.Tensor, ...], outputs: tuple[torch.Tensor, ...], calls: int = 30
) -> float:
    """µs a call of the slowest rank, median of replays."""
    side, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        launch(inputs, outputs, stream())
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, stream=side):
            for _ in range(calls):
                launch(inputs, outputs, stream())
        times = []
        for _ in range(9):
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            dist.all_reduce(torch.zeros(1, device="cuda"))
            begin.record()
            graph.replay()
            end.record()
            times.append((begin, end))
        torch.cuda.synchronize()
    mine = sorted(begin.elapsed_time(end) * 1e3 / calls for begin, end in times)[4]
    slowest = torch.tensor([mine], device="cuda")
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return float(slowest.item())


if __name__ == "__main__":
    bodies.main(sys.argv[1], globals())
