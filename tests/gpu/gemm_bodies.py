"""What each rank of a test of the fused GEMMs runs, by `run_bodies.py`, with the op's name in GEMM_OP."""

from __future__ import annotations

import math
import os
from typing import Any

import torch
import torch.distributed as dist
from bodies import captured, stream

import tunedcomm
from tunedcomm.dispatch.groups import get_communicator
from tunedcomm.errors import InfeasibleError
from tunedcomm.kernels.gemm.op import TOLERANCE
from tunedcomm.spec import Candidate, Problem, check_candidate, get_op, get_variant, variants

OP = os.environ.get("GEMM_OP", "gemm_rs")
FP8 = torch.float8_e4m3fn


# (dtype, how B is stored, scaling)
KINDS = (("bfloat16", "nk", ""), ("bfloat16", "kn", ""), ("float8_e4m3fn", "nk", "rowwise"))
Tensors = tuple[torch.Tensor, ...]


def names() -> list[str]:
    """Variants that are to be tried; those that only run when they are forced are somebody else's.

    Where ranks share a GPU, what copies from one to the other probably takes SMs, and none is left beside a GEMM that
    waits: such a launch ran into its time limit there.
    """
    shared = torch.cuda.device_count() < dist.get_world_size()
    found = [name for name, variant in variants(OP).items() if variant.waits_time_out]
    return [name for name in found if not (shared and OP == "gemm_rs" and name == "copy_engine")]


def problem_of(shape: tuple[int, int, int], kind: tuple[str, str, str]) -> Problem:
    dtype, stored, scaling = kind
    reduction = "" if OP == "ag_gemm" else "sum"
    return Problem(OP, shape, dtype, dist.get_world_size(), reduction, layout=stored, scaling=scaling)


def case_of(problem: Problem, seed: int, kind: str = "random") -> tuple[Tensors, Tensors]:
    """(this rank's inputs, results in float64)."""
    op, rank = get_op(problem.op), dist.get_rank()
    everyone = [op.make_inputs(problem, peer, seed, kind, "cuda") for peer in range(problem.world_size)]
    return everyone[rank], op.reference(problem, everyone, rank)


def poisoned(problem: Problem) -> Tensors:
    outputs = get_op(problem.op).make_outputs(problem, "cuda")
    for output in outputs:
        output.fill_(float("nan"))
    return outputs


def error_of(outputs: Tensors, expected: Tensors) -> float:
    return max(
        ((output.double() - wanted).norm() / wanted.norm().clamp_min(1e-30)).item()
        for output, wanted in zip(outputs, expected, strict=True)
    )


def is_exact(outputs: Tensors, expected: Tensors) -> bool:
    """For whole numbers, of which every partial sum can be held."""
    return all(torch.equal(a.double(), b.to(a.dtype).double()) for a, b in zip(outputs, expected, strict=True))


def is_right(name: str, problem: Problem, outputs: Tensors, expected: Tensors) -> bool:
    """For whole numbers: exact, but where partial results with their own scales are rounded before they are summed."""
    rounded = bool(problem.scaling) and get_variant(problem.op, name).numerics != "ordered"
    if rounded and problem.op != "ag_gemm":
        return error_of(outputs, expected) <= TOLERANCE[problem.scaling]
    return is_exact(outputs, expected)


def chain_body() -> dict[str, object]:
    """Graphs of launches that follow each other, with inputs that are overwritten at once, replayed with new ones."""
    comm, length, replays = get_communicator(), 6, 12
    for shape, kind in (((48, 512, 520), KINDS[0]), ((516, 520, 1032), KINDS[1]), ((1032, 1024, 528), KINDS[2])):
        problem = problem_of(shape, kind)
        for name in names():
            config = get_variant(OP, name).default(problem, comm.limits)
            if check_candidate(problem, Candidate.of(OP, name, config), comm.limits):
                continue
            try:
                launch = comm.bind(problem, Candidate.of(OP, name, config))
            except InfeasibleError:  # it does not fit on the GPU; the ranks come to the same answer, for they are alike
                continue
            sources = [case_of(problem, seed, "integers")[0] for seed in range(length)]
            held = tuple(torch.empty_like(tensor) for tensor in sources[0])
            outputs = [poisoned(problem) for _ in range(length)]

            def step(
                i: int,
                launch: Any = launch,
                held: Tensors = held,
                sources: list[Tensors] = sources,
                outputs: list[Tensors] = outputs,
            ) -> None:
                copy(held, sources[i])
                launch(held, outputs[i], stream())

            graph = captured(step, length)
            for replay in range(replays):
                cases = [case_of(problem, 100 * replay + seed, "integers") for seed in range(length)]
                for source, output, (values, _) in zip(sources, outputs, cases, strict=True):
                    copy(source, values)
                    for tensor in output:
                        tensor.fill_(float("nan"))
                for _ in range(1 + replay % 2):  # twice in a row, without a look in between
                    graph.replay()
                for step, (output, (_, expected)) in enumerate(zip(outputs, cases, strict=True)):
                    assert is_right(name, problem, output, expected), (str(problem), name, config, replay, step)
            comm.check_peers()
    return {}


def copy(targets: Tensors, sources: Tensors) -> None:
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source)


def operands(k: int, n: int, dtype: torch.dtype, shape: tuple[int, ...], seed: int) -> list[tuple[Any, Any]]:
    """Every rank's a and b."""
    found = []
    for rank in range(dist.get_world_size()):
        generator = torch.Generator("cuda").manual_seed(1000 * seed + rank)
        a, b = (torch.randn(*s, generator=generator, device="cuda") for s in ((*shape, k), (k, n)))
        found.append((a.to(dtype), b.to(dtype)))
    return found


def near(got: torch.Tensor, wanted: torch.Tensor, shape: tuple[int, ...], loose: str) -> None:
    assert got.shape == shape, (got.shape, shape)
    assert error_of((got.reshape(-1),), (wanted.reshape(-1),)) <= TOLERANCE[loose]


def calls_body() -> dict[str, object]:
    """The public functions as users make them: any strides, batch dimensions, fp8, lists, out, in graphs."""
    world_size, rank = dist.get_world_size(), dist.get_rank()
    for seed, (dtype, nk) in enumerate(
        (d, nk) for d in (torch.bfloat16, torch.float16, torch.float32, FP8) for nk in (True, False)
    ):
        m, k, n = 24, 528, 272
        loose = "rowwise" if dtype == FP8 else str(dtype).removeprefix("torch.")
        every = operands(k, n, dtype, (m, 2), seed)
        a, b = every[rank]
        b = b.t().contiguous().t() if nk else b
        scales = {}
        if dtype == FP8:
            scales["scale_a"] = torch.full((m, 2, 1), 0.5, device="cuda")
            scales["scale_b"] = torch.full((1, n), 2.0, device="cuda")
        total = sum(x.double().reshape(-1, k) @ y.double() for x, y in every)
        whole = torch.cat([x for x, _ in every])
        strided = torch.zeros(*a.shape, 2, device="cuda", dtype=dtype)[..., 0]
        strided.copy_(a)
        for x in (a, strided, a):
            near(tunedcomm.gemm_ar(x, b, **scales), total, (m, 2, n), loose)
            near(tunedcomm.gemm_rs(x, b, **scales), total.chunk(world_size)[rank], (m // world_size, 2, n), loose)
            found, gathered = tunedcomm.ag_gemm(x, b, return_gathered=True, **scales)
            wanted = whole.double() @ b.double()
            near(found, wanted, (m * world_size, 2, n), loose)
            assert torch.equal(gathered.view(torch.uint8), whole.view(torch.uint8))
            near(tunedcomm.ag_gemm(x, b, out_dtype=torch.float32, **scales), wanted, found.shape, loose)
        if dtype != FP8:
            out = torch.full((m, 2, 2 * n), math.nan, device="cuda", dtype=dtype)[..., ::2]
            bias = torch.ones(n, device="cuda", dtype=dtype)
            assert tunedcomm.gemm_ar(a, b, bias=bias, out=out) is out
            near(out, total + 1, (m, 2, n), loose)
            several = tunedcomm.ag_gemm(a, [b[:, :64], b, b[:, 64:].contiguous()])
            for got, part in zip(several, (b[:, :64], b, b[:, 64:]), strict=True):
                near(got, whole.double() @ part.double(), (m * world_size, 2, part.shape[1]), loose)
    captured_calls(world_size, rank)
    return {}


def captured_calls(world_size: int, rank: int) -> None:
    """All three in one graph, called before it or not, replayed with new inputs."""
    for warm in (True, False):
        m, k, n = 48 + 24 * warm, 256, 512
        every = operands(k, n, torch.bfloat16, (m,), 77)
        a, b = every[rank]

        def calls(a: torch.Tensor = a, b: torch.Tensor = b) -> Tensors:
            several = tunedcomm.ag_gemm(a, [b, b[:, :128]])
            return tunedcomm.gemm_ar(a, b), tunedcomm.gemm_rs(a, b), several[0], several[1]

        if warm:
            calls()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            results = calls()
        for replay in range(5):
            fresh = operands(k, n, torch.bfloat16, (m,), 100 + replay)
            a.copy_(fresh[rank][0])
            b.copy_(fresh[rank][1])
            graph.replay()
            total = sum(x.double() @ y.double() for x, y in fresh)
            whole = torch.cat([x for x, _ in fresh]).double() @ fresh[rank][1].double()
            near(results[0], total, (m, n), "bfloat16")
            near(results[1], total.chunk(world_size)[rank], (m // world_size, n), "bfloat16")
            near(results[2], whole, (m * world_size, n), "bfloat16")
            near(results[3], whole[:, :128], (m * world_size, 128), "bfloat16")


def kept_body() -> dict[str, object]:
    """What graphs replay keeps its buffers: nobody else gets them once the plan is no longer dispatched."""
    world_size, rank = dist.get_world_size(), dist.get_rank()
    m, k, n = 256 * world_size, 512, 1024
    every = operands(k, n, torch.bfloat16, (m,), 5)
    a, b = every[rank]
    total = sum(x.double() @ y.double() for x, y in every)
    wanted = {"gemm_rs": total.chunk(world_size)[rank], "gemm_ar": total}
    kept: list[str] = []
    for op, names in (("gemm_rs", ("library_tuned", "chunked", "push_reduce")), ("gemm_ar", ("lamport", "two_shot"))):
        for name in names:
            graph, call = torch.cuda.CUDAGraph(), getattr(tunedcomm, op)
            try:
                with tunedcomm.force(op, name):
                    call(a, b)
                    torch.cuda.synchronize()
                    with torch.cuda.graph(graph):
                        out = call(a, b)
            except tunedcomm.InfeasibleError as error:  # by the shape, or beside the graphs of the variant before
                print(f"{op} {name}: {error}")
                continue
            torch.cuda.synchronize()
            taken = [
                torch.full((size,), 7.0, device="cuda") for size in (64, 4096, m * n // 2, m * n) for _ in range(8)
            ]
            for _ in range(3):
                out.zero_()
                call(a, b)  # dispatched anew
                graph.replay()
                torch.cuda.synchronize()
                near(out, wanted[op], tuple(out.shape), "bfloat16")
            assert all(bool((tensor == 7.0).all()) for tensor in taken), (op, name)
            kept.append(f"{op} {name}")
    assert kept
    return {"kept": kept}
