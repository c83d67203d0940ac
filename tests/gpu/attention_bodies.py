"""What each rank of a GPU test of dcp_combine, ulysses_scatter and ulysses_gather runs, by `run_bodies.py`."""

from __future__ import annotations

import contextlib
import itertools
from typing import Any

import torch
import torch.distributed as dist
from bodies import captured, same_bits

import tunedcomm
from tunedcomm.kernels.common.packets import ESCAPE
from tunedcomm.kernels.common.sync import SENTINEL
from tunedcomm.spec import Problem, get_op

Tensors = tuple[torch.Tensor, ...]
MERGES, MOVES = ("lamport", "push"), ("push", "pull", "library")


def merge_case(shape: tuple[int, ...], dtype: str, base: str, seed: int) -> tuple[Tensors, Tensors]:
    """This rank's inputs, with −0.0 and ranks that count nothing, and the bits of the result."""
    world_size, spec = dist.get_world_size(), get_op("dcp_combine")
    problem = Problem("dcp_combine", shape, dtype, world_size, reduction="", layout=base)
    everyone = [spec.make_inputs(problem, rank, seed, "random", "cuda") for rank in range(world_size)]
    for x, lse in everyone:
        x[..., 1:3] = -0.0
        x[:, 0], lse[:, 0] = x[:, 0].nan_to_num(), -0.0  # what counts is no NaN
        if shape[0] > 2:
            lse[1], lse[2, -1] = float("nan"), float("inf")
            x[1] = float("nan")
    assert spec.ordered_reference is not None
    return everyone[dist.get_rank()], spec.ordered_reference(problem, everyone, dist.get_rank())


def merges_body() -> dict[str, object]:
    """Every ordered variant, dtype, base and row: bits, eagerly and in graphs that are replayed with new inputs."""
    world_size, checked = dist.get_world_size(), 0
    heads = 4 * world_size
    shapes = (
        (1, world_size, 8),
        (1, heads, 128),
        (7, heads, 24),
        (64, heads, 512),
        (33, heads, 576),
        (513, heads, 128),
    )
    dtypes, bases = ("bfloat16", "float16", "float32"), ("e", "2")
    cases = [(shape, dtypes[i % 3], bases[i % 2]) for i, shape in enumerate(shapes)]
    cases += [((64, heads, 512), dtype, base) for dtype in dtypes for base in bases]  # each compiles kernels of its own
    for number, (shape, dtype, base) in enumerate(cases):
        inputs, due = merge_case(shape, dtype, base, number)
        for variant in MERGES:
            with tunedcomm.force("dcp_combine", variant):
                for _ in range(3):
                    with contextlib.suppress(tunedcomm.InfeasibleError):
                        found = tunedcomm.dcp_combine(*inputs, base=base, return_lse=True)  # type: ignore[arg-type]
                        assert all(map(same_bits, found, due)), (variant, shape, dtype, base)
                        checked += 1
        out = tunedcomm.dcp_combine(*inputs, base=base)  # type: ignore[arg-type]
        wrong = (out.double() - due[0].double()).norm() / due[0].double().norm()
        assert wrong < 1e-2, ("by itself", shape, dtype, float(wrong))
        found = tunedcomm.dcp_combine(*inputs, base=base, return_lse=True, numerics="ordered")  # type: ignore[arg-type]
        assert all(map(same_bits, found, due)), ("ordered", shape, dtype, base)
    for variant, shape in itertools.product(("lamport", "push"), ((1, heads, 128), (100, heads, 512))):
        with tunedcomm.force("dcp_combine", variant):
            drawn = [merge_case(shape, "bfloat16", "e", seed) for seed in range(4)]
            x, lse = (tensor.clone() for tensor in drawn[0][0])
            results = [torch.empty_like(tensor) for tensor in drawn[0][1]]

            def step(_: int, x: Any = x, lse: Any = lse, results: Any = results) -> None:
                tunedcomm.dcp_combine(x, lse, out=results[0], lse_out=results[1])

            graph = captured(step, 3)
            for turn in range(40):
                (values, lses), due = drawn[turn % len(drawn)]
                x.copy_(values)
                lse.copy_(lses)
                for result in results:
                    result.fill_(7.0)
                graph.replay()
                assert all(map(same_bits, results, due)), (variant, shape, turn)
                checked += 1
    assert checked > 200, checked
    return {"checked": checked}


def share(op: str, x: torch.Tensor) -> torch.Tensor:
    """The result of an op by NCCL, from every rank's whole input."""
    everyone = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather([each.view(torch.uint8) for each in everyone], x.view(torch.uint8))
    cut, joined = (2, 1) if op == "ulysses_scatter" else (1, 2)
    return torch.cat([each.chunk(len(everyone), cut)[dist.get_rank()] for each in everyone], joined).contiguous()


def moved(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Random bytes of this rank, with words that packets have to disguise, in plain memory."""
    generator = torch.Generator().manual_seed(1000 * seed + dist.get_rank())
    numel = torch.empty(shape, dtype=dtype, device="meta").nbytes
    drawn = torch.randint(0, 256, (numel,), generator=generator, dtype=torch.uint8)
    words = drawn[: numel // 4 * 4].view(torch.int32)
    words[::7], words[3::11] = SENTINEL.value, ESCAPE.value
    return drawn.cuda().view(dtype).view(shape)


def moves_body() -> dict[str, object]:
    """Every variant of both ops, on plain and symmetric inputs: bits, eagerly and in graphs; and there and back."""
    world_size, checked, functions = dist.get_world_size(), 0, (tunedcomm.ulysses_scatter, tunedcomm.ulysses_gather)
    shapes = ((1, 1, 1, 8), (2, 3, 2, 24), (1, 37, 4, 128), (3, 129, 4, 64), (1, 2048, 8, 128))
    for number, (shape, dtype) in enumerate(
        itertools.product(shapes, (torch.bfloat16, torch.float32, torch.uint8, torch.int64))
    ):
        batch, tokens, heads, head_dim = shape
        for op, function in zip(("ulysses_scatter", "ulysses_gather"), functions, strict=True):
            whole = (batch, tokens, heads * world_size, head_dim)
            whole = whole if op == "ulysses_scatter" else (batch, tokens * world_size, heads, head_dim)
            x = moved(whole, dtype, number)
            due = share(op, x)
            held = tunedcomm.symmetric_empty(whole, dtype=dtype)
            held.view(torch.uint8).copy_(x.view(torch.uint8))
            for variant in MOVES:
                with tunedcomm.force(op, variant):
                    for given in (x, held):
                        with contextlib.suppress(tunedcomm.InfeasibleError):
                            for _ in range(3):
                                assert same_bits(function(given), due), (op, variant, shape, dtype)
                                checked += 1
            torch.cuda.synchronize()
            dist.barrier()
        x = moved((batch, tokens, heads * world_size, head_dim), dtype, number)
        assert same_bits(tunedcomm.ulysses_gather(tunedcomm.ulysses_scatter(x)), x)
    for variant, tokens in itertools.product(("push", "pull"), (16, 300)):
        with tunedcomm.force("ulysses_scatter", variant), tunedcomm.force("ulysses_gather", variant):
            x = torch.zeros(2, tokens, 2 * world_size, 64, device="cuda")
            back = torch.empty_like(x)
            graph = captured(
                lambda _, x=x, back=back: tunedcomm.ulysses_gather(tunedcomm.ulysses_scatter(x), out=back), 3
            )
            for turn in range(40):
                values = moved(tuple(x.shape), torch.float32, turn)
                x.copy_(values)
                back.fill_(7.0)
                graph.replay()
                assert same_bits(back, values), (variant, tokens, turn)
                checked += 1
    assert checked > 400, checked
    return {"checked": checked}


def ahead_body() -> dict[str, object]:
    """Ranks that run ahead of each other, with launches of other ops between, overwrite nothing that is still read."""
    rank, world_size, checked = dist.get_rank(), dist.get_world_size(), 0
    for variant, tokens in itertools.product(("lamport", "push"), (1, 200)):
        cases = [merge_case((tokens, 2 * world_size, 128), "bfloat16", "2", seed) for seed in range(8)]
        with tunedcomm.force("dcp_combine", variant), tunedcomm.force("all_reduce", "lamport"):
            late = []
            for turn in range(400):
                if turn % 7 == rank:
                    torch.cuda._sleep(200_000)
                inputs, due = cases[turn % len(cases)]
                late.append((tunedcomm.dcp_combine(*inputs, base="2", return_lse=True), due))
                if turn % 3 == 0:
                    total = tunedcomm.all_reduce(torch.full((100,), 1.0, device="cuda"))
                    late.append(((total,), (torch.full_like(total, float(world_size)),)))
            for found, due in late:
                assert all(map(same_bits, found, due)), (variant, tokens)
                checked += 1
    for variant, tokens in itertools.product(("push", "pull"), (2, 256)):
        with tunedcomm.force("ulysses_scatter", variant), tunedcomm.force("ulysses_gather", variant):
            late = []
            for turn in range(200):
                if turn % 5 == rank:
                    torch.cuda._sleep(200_000)
                x = torch.full((1, tokens, 2 * world_size, 64), 10.0 * turn + rank, device="cuda")
                late.append(((tunedcomm.ulysses_gather(tunedcomm.ulysses_scatter(x)),), (x,)))
            for found, due in late:
                assert all(map(same_bits, found, due)), (variant, tokens)
                checked += 1
    return {"checked": checked}
