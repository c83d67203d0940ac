"""all_reduce and reduce_scatter of 16-bit floats with `out_dtype=torch.float32`: fp32 sums, never rounded between."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from cases import Ranks, same_bits
from variant_checks import check_variant, limits_of

import tunedcomm
from tunedcomm import kernels
from tunedcomm.dispatch.groups import get_communicator
from tunedcomm.spec import Problem, get_variant, variants

kernels.discover()
WORLD_SIZE = 3
RANKS = Ranks(WORLD_SIZE, forget=False, env={"TUNEDCOMM_WORKSPACE_MIB": "1", "TUNEDCOMM_MISS_LOG": "0"})
OPS = ("all_reduce", "reduce_scatter")
SIZES = ((8, "float16"), (61, "float16"), (61, "bfloat16"), (2051, "bfloat16"))
HALVES = (torch.bfloat16, torch.float16)


def test_bits_of_every_variant(rank: int) -> None:
    """Tails, several chunks and rounds, means that round to −0.0, symmetric inputs."""
    communicator = get_communicator()
    for op in OPS:
        names = {"library", "host_one_shot", "one_shot_fp32"}
        names |= {"push_fp32"} if op == "reduce_scatter" else set()
        served = set()
        for name, (numel, dtype) in itertools.product(variants(op), SIZES):
            reduction = "avg" if numel % 2 else "sum"
            problem = Problem(op, (numel,), dtype, WORLD_SIZE, reduction, layout="float32", mode="eager")
            variant = get_variant(op, name)
            limits = limits_of(communicator)
            config = variant.default(problem, limits)
            if variant.infeasible(problem, config, limits) is None:
                served.add(name)
                check_variant(communicator, problem, name, seed=numel)
        assert served == names
    problem = Problem("reduce_scatter", (15_000,), "bfloat16", WORLD_SIZE, "sum", layout="float32", mode="eager")
    check_variant(communicator, problem, "push_fp32", config={
        "num_blocks": 2, "num_warps": 8, "items": 1, "num_chunks": 8, "split": True,
    })  # fmt: skip
    chunks = {"chunk_kib": 64, "spins": 1, "threads": 1}
    check_variant(communicator, problem, "host_one_shot", config=chunks)


def values(rank: int, *shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(rank)).to(dtype)


def total(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    found = torch.zeros(shape)
    for r in range(WORLD_SIZE):
        found += values(r, *shape, dtype=dtype).float()
    return found


def test_public_calls(rank: int) -> None:
    """Tuned or not, repeated, into a given tensor, along another dimension, with every policy."""
    for dtype, policy in itertools.product(HALVES, ("default", "ordered")):
        x, whole = values(rank, 6, 9, dtype=dtype), total(6, 9, dtype=dtype)
        for _ in range(3):
            found = tunedcomm.all_reduce(x, out_dtype=torch.float32, numerics=policy)
            assert same_bits(found, whole)
            found = tunedcomm.reduce_scatter(x, dim=1, out_dtype=torch.float32, numerics=policy)
            assert same_bits(found, whole.chunk(WORLD_SIZE, 1)[rank])
            out = torch.empty(2, 9)
            assert tunedcomm.reduce_scatter(x, out=out, op="avg", out_dtype=torch.float32) is out
            assert same_bits(out, whole.chunk(WORLD_SIZE)[rank] / WORLD_SIZE + 0.0)
        assert tunedcomm.all_reduce(x, out_dtype=dtype).dtype == dtype
    for op in OPS:  # in_order serves groups that share no memory
        out = torch.empty((6, 9) if op == "all_reduce" else (2, 9))
        problem = Problem(op, (out.numel(),), str(dtype).removeprefix("torch."), WORLD_SIZE, "sum", layout="float32")
        get_variant(op, "in_order").bind(problem, {}, SimpleNamespace(group=dist.group.WORLD))((x,), (out,), 0)
        assert same_bits(out, whole if op == "all_reduce" else whole.chunk(WORLD_SIZE)[rank])
    with tunedcomm.force("reduce_scatter", "library"):
        torch.testing.assert_close(tunedcomm.reduce_scatter(x, out_dtype=torch.float32), whole.chunk(WORLD_SIZE)[rank])
    symmetric = tunedcomm.symmetric_empty((6, 9))
    symmetric.copy_(values(rank, 6, 9))
    for op, force in itertools.product(OPS, ("one_shot_fp32", "library")):
        with tunedcomm.force(op, force):
            found = getattr(tunedcomm, op)(symmetric, out_dtype=torch.float32)
        whole = total(6, 9)
        torch.testing.assert_close(found, whole if op == "all_reduce" else whole.chunk(WORLD_SIZE)[rank])
    dist.barrier()


def test_gradients(rank: int) -> None:
    x = values(rank, 6, 4).requires_grad_()
    grad = values(rank + 10, 6, 4, dtype=torch.float32)
    every = sum(values(r + 10, 6, 4, dtype=torch.float32) for r in range(WORLD_SIZE))
    tunedcomm.all_reduce(x, out_dtype=torch.float32).backward(grad)
    torch.testing.assert_close(x.grad, every.to(torch.bfloat16))
    for op in ("sum", "avg"):
        x.grad, mine = None, grad[:2]
        tunedcomm.reduce_scatter(x, op=op, out_dtype=torch.float32).backward(mine)
        expected = torch.cat([values(r + 10, 6, 4, dtype=torch.float32)[:2] for r in range(WORLD_SIZE)])
        assert same_bits(x.grad, (expected / (WORLD_SIZE if op == "avg" else 1)).to(torch.bfloat16))


def test_bad_input(rank: int) -> None:
    x = values(rank, 6, 4)
    for options, told in (
        ({"out_dtype": torch.float64}, "float64"),
        ({"out_dtype": torch.float32, "op": "max"}, "max"),
        ({"out_dtype": torch.float32, "out": x}, "out has shape"),
    ):
        with pytest.raises(tunedcomm.UnsupportedInputError, match=told):
            tunedcomm.all_reduce(x, **options)
    with pytest.raises(tunedcomm.UnsupportedInputError, match="int32"):
        tunedcomm.all_reduce(x.int(), out_dtype=torch.float32)
    assert same_bits(tunedcomm.all_reduce(x, out_dtype=torch.float32), total(6, 4))
