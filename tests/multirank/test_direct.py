"""Calls of `torch.ops.symm_mem` under `tunedcomm.intercept(symm_mem=True)`, beside stand-ins for PyTorch's kernels."""

from __future__ import annotations

import dataclasses
import functools
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem
from cases import HOST, Ranks, same_bits
from gemm_samples import FP8, drawn, scale, stored

import tunedcomm
from tunedcomm.spec import Problem, register_variant, variants

NATIVE = torch.ops.symm_mem
RANKS = Ranks(env=HOST, forget=False)
ranks = pytest.mark.parametrize("world_size", [2, 3])
stock: list[str] = []  # calls that came to the stand-ins
slow: list[float] = []  # seconds after a launch of more than a word


def group_name() -> str:
    assert dist.group.WORLD is not None
    return dist.group.WORLD.group_name


def summed(x: torch.Tensor, *_: object) -> torch.Tensor:
    stock.append("all_reduce")
    dist.all_reduce(x)
    return x


STAND_INS: dict[str, Callable[..., Any]] = {
    "one_shot_all_reduce": lambda x, op, group: summed(x.clone()),
    "one_shot_all_reduce_copy": lambda buffer, x, op, group: summed(x.clone()),
    "two_shot_all_reduce_": summed,
    "multimem_all_reduce_": summed,
    "fused_all_gather_matmul": symm_mem._fused_all_gather_matmul_fallback,
    "fused_matmul_reduce_scatter": symm_mem._fused_matmul_reduce_scatter_fallback,
    # gloo moves no fp8
    "fused_all_gather_scaled_matmul": lambda a, bs, *rest: (a, [torch.zeros(1) for _ in bs]),
    "fused_scaled_matmul_reduce_scatter": lambda a, *rest, out_dtype=None: torch.zeros(1),
}


@contextmanager
def stand_ins() -> Iterator[None]:
    """PyTorch has no kernels of these operators for CPUs."""
    library = torch.library.Library("symm_mem", "IMPL")
    for name, kernel in STAND_INS.items():
        library.impl(name, kernel, "CPU")
    stock.clear()
    try:
        yield
    finally:
        library._destroy()


def whole(rank: int, *shape: int) -> torch.Tensor:
    return torch.randint(-8, 9, shape, generator=torch.Generator().manual_seed(rank)).float()


def tensors(found: Any) -> list[torch.Tensor]:
    return (
        [found] if isinstance(found, torch.Tensor) else [t for each in found if each is not None for t in tensors(each)]
    )


def equal_to_the_library(call: Callable[[], Any], *, served: int = 1) -> None:
    """The same call with and without; whole numbers, so that any order of sums gives the same bits."""
    with stand_ins():
        expected = tensors(call())
        stock.clear()
        with tunedcomm.intercept(symm_mem=True) as seen:
            found = tensors(call())
        assert (seen.num_served, seen.num_passed_on) == (served, 1 - served), str(seen)
        assert "symm_mem::" in str(seen)
    assert len(found) == len(expected)
    for got, due in zip(found, expected, strict=True):
        assert (got.shape, got.dtype, got.stride()) == (due.shape, due.dtype, due.stride())
        assert same_bits(got, due), (got, due)


@ranks
def test_all_reduces(rank: int, world_size: int) -> None:
    name = group_name()
    for shape in ((300,), (5, 7), (1,)):
        buffer = torch.zeros(1000)
        equal_to_the_library(lambda shape=shape: NATIVE.one_shot_all_reduce(whole(rank, *shape), "sum", name))
        equal_to_the_library(
            lambda shape=shape, buffer=buffer: NATIVE.one_shot_all_reduce_copy(buffer, whole(rank, *shape), "sum", name)
        )
        assert not buffer.any()
        for operator in (NATIVE.two_shot_all_reduce_, NATIVE.multimem_all_reduce_):

            def in_place(shape: tuple[int, ...] = shape, operator: Any = operator) -> torch.Tensor:
                x = whole(rank, *shape)
                assert operator(x, "sum", name) is x
                return x

            equal_to_the_library(in_place)
    x = tunedcomm.symmetric_empty(64, dtype=torch.float32).copy_(whole(rank, 64))
    with tunedcomm.intercept(symm_mem=True) as seen:
        assert NATIVE.two_shot_all_reduce_(x, "sum", name) is x
    assert seen.num_served == 1
    assert same_bits(x, sum(whole(r, 64) for r in range(world_size)))  # type: ignore[arg-type]


@ranks
def test_products_of_what_is_gathered(rank: int, world_size: int) -> None:
    name, b, wide = group_name(), whole(9 + rank, 16, 8), stored(whole(19 + rank, 16, 24), "nk")
    gather = NATIVE.fused_all_gather_matmul
    for return_a in (True, False):
        equal_to_the_library(lambda of=return_a: gather(whole(rank, 6, 16), [b], 0, name, return_A=of))
        equal_to_the_library(lambda of=return_a: gather(whole(rank, 2, 3, 16), [b, wide], 0, name, return_A=of))
        equal_to_the_library(lambda of=return_a: gather(whole(rank, 2, 3, 16), [wide, b], 1, name, return_A=of))
    equal_to_the_library(lambda: gather(whole(rank, 6, 16), [whole(3, 16 * world_size, 8)], 1, name), served=0)


@ranks
def test_products_that_are_scattered(rank: int, world_size: int) -> None:
    name, b, rows = group_name(), whole(9 + rank, 16, 8), 2 * world_size
    scatter = NATIVE.fused_matmul_reduce_scatter
    equal_to_the_library(lambda: scatter(whole(rank, rows, 16), b, "sum", 0, name))
    equal_to_the_library(lambda: scatter(whole(rank, rows, 3, 16), b, "sum", 0, name))
    equal_to_the_library(lambda: scatter(whole(rank, 3, rows, 16), stored(b, "nk"), "sum", 1, name))
    equal_to_the_library(lambda: scatter(whole(rank, 3, 16), whole(9 + rank, 16, rows), "sum", 1, name), served=0)
    with tunedcomm.intercept(symm_mem=True) as seen:
        found = scatter(world_size * whole(rank, rows, 16), b, "avg", 0, name)
    assert seen.num_served == 1
    due = sum(whole(r, rows, 16) @ whole(9 + r, 16, 8) for r in range(world_size))
    assert same_bits(found, due.chunk(world_size)[rank])  # type: ignore[union-attr]


def near(found: torch.Tensor, due: torch.Tensor) -> None:
    assert found.dtype == torch.bfloat16
    assert found.shape == due.shape
    assert (found.double() - due).norm() < 0.02 * due.norm()


@ranks
def test_scaled_products(rank: int, world_size: int) -> None:
    """Scales of rows and of whole matrices; what has no counterpart goes to PyTorch's operator."""
    name, dtype, rows = group_name(), torch.bfloat16, 16 * world_size

    def a(r: int) -> torch.Tensor:
        return drawn(r, 16, 2, 32).to(FP8)

    def exact(matrix: torch.Tensor, by: torch.Tensor, b: torch.Tensor, by_b: torch.Tensor) -> torch.Tensor:
        return (matrix.double() * by) @ (b.double() * by_b)

    for rowwise in (True, False):
        bs = [stored(drawn(r, 32, 48), "nk").to(FP8) for r in (rank + 20, rank + 30)]
        by_b = [scale(40, 1, 48) if rowwise else scale(40, 1), scale(41, 1, 48) if rowwise else scale(41, 1)]
        by = [scale(r, 16, 2, 1) if rowwise else scale(0, 1) for r in range(world_size)]

        def gather(bias: Any = None, of: Any = (by, by_b, bs)) -> Any:
            by, by_b, bs = of
            lists = [bias, None], [None, None], [dtype, dtype], [False, False]
            return NATIVE.fused_all_gather_scaled_matmul(a(rank), bs, by[rank], by_b, 0, name, *lists)

        with tunedcomm.intercept(symm_mem=True) as seen:
            gathered, found = gather()
        assert seen.num_served == 1, str(seen)
        assert same_bits(gathered, torch.cat([a(r) for r in range(world_size)]))
        for out, b, each in zip(found, bs, by_b, strict=True):
            near(out, torch.cat([exact(a(r), by[r], b, each) for r in range(world_size)]))
        with stand_ins(), tunedcomm.intercept(symm_mem=True) as seen:
            gather(torch.zeros(48, dtype=dtype))
        assert "bias" in str(seen)
        assert seen.num_served == 0

        def scatter(r: int, rowwise: bool = rowwise) -> tuple[Any, ...]:
            by = (scale(r, rows, 1), scale(r, 1, 48)) if rowwise else (scale(r, 1), scale(r + 1, 1))
            return drawn(r, rows, 32).to(FP8), stored(drawn(r + 20, 32, 48), "nk").to(FP8), *by

        due = sum(exact(x, by, b, by_b) for x, b, by, by_b in map(scatter, range(world_size)))
        assert isinstance(due, torch.Tensor)
        for shape in ([rows, 48], [world_size, 16, 48]):
            with tunedcomm.intercept(symm_mem=True) as seen:
                out = NATIVE.fused_scaled_matmul_reduce_scatter(
                    *scatter(rank), "sum", 0, 0, name, list(shape), out_dtype=dtype
                )
            assert seen.num_served == 1, str(seen)
            near(out, due.chunk(world_size)[rank].view(shape[0] // world_size, *shape[1:]))
        with stand_ins(), tunedcomm.intercept(symm_mem=True) as seen:
            NATIVE.fused_scaled_matmul_reduce_scatter(
                *scatter(rank), "sum", 1, 0, name, [16, world_size, 48], out_dtype=dtype
            )
        assert seen.num_passed_on == 1


@ranks
def test_ranks_with_uneven_matrices(rank: int, world_size: int) -> None:
    """PyTorch's operator takes them. A rank whose own matrix has not changed must choose as its peers do."""
    name = group_name()
    with stand_ins(), tunedcomm.intercept(symm_mem=True) as seen:
        for columns in (8 if rank else 12, 8, 12 if rank else 8):
            b = whole(1, 16, columns)
            _, (out,) = NATIVE.fused_all_gather_matmul(whole(rank, 4, 16), [b], 0, name, return_A=False)
            assert same_bits(out, torch.cat([whole(r, 4, 16) for r in range(world_size)]) @ b)
    assert seen.num_served == 0
    assert "matrices" in str(seen)


def delayed() -> None:
    """Let launches on real data end late on the ranks that have `slow`."""

    def bind(variant: Any, problem: Problem, config: Mapping[str, Any], workspace: Any) -> Any:
        launch = variant.bind(problem, config, workspace)

        def run(inputs: tuple[Any, ...], outputs: tuple[Any, ...], stream: int) -> None:
            launch(inputs, outputs, stream)
            if slow and problem.dtype == "float32":
                time.sleep(slow[0])

        return run

    for variant in variants("all_reduce").values():
        register_variant(dataclasses.replace(variant, bind=functools.partial(bind, variant)))


@ranks
def test_peers_may_write_before_and_read_after(rank: int, world_size: int) -> None:
    """PyTorch's barriers order this: rank 1 writes to rank 0's input before its call, and rank 0 reads its result."""
    name, numel = group_name(), 129
    folder = Path(os.environ["TEST_FOLDER"], f"shared-{world_size}")
    if rank == 0:
        folder.mkdir()
        for r in range(world_size):
            Path(folder, str(r)).write_bytes(bytes(4 * numel))
    dist.barrier()
    memory = [torch.from_file(str(folder / str(r)), shared=True, size=numel) for r in range(world_size)]
    xs = [each[1:] for each in memory]  # results are made beside such a tensor, and copied
    delayed()
    tunedcomm.release_communicators()
    for in_place in (True, False):
        dist.barrier()
        xs[rank].fill_(1.0)
        dist.barrier()
        with tunedcomm.intercept(symm_mem=True) as seen:
            if rank == 1:
                slow[:] = [0.3]
                time.sleep(0.3)
                xs[0].fill_(5.0)
            operator = NATIVE.two_shot_all_reduce_ if in_place else NATIVE.one_shot_all_reduce
            found = operator(xs[rank], "sum", name)
            theirs = xs[1].clone()
            if not in_place:
                xs[1].fill_(9.0)  # rank 1 has read it
            slow.clear()
        assert seen.num_served == 1
        total = torch.full((numel - 1,), world_size + 4.0)
        assert same_bits(found, total), found
        assert not in_place or same_bits(theirs, total), theirs


@ranks
def test_what_is_not_asked_for(rank: int, world_size: int) -> None:
    """Other groups, other blocks, other reductions, the library as choice, and the policy `ordered`."""
    name, x = group_name(), whole(rank, 64)
    total = sum(whole(r, 64) for r in range(world_size))
    with stand_ins():
        with tunedcomm.intercept() as seen:
            assert same_bits(NATIVE.one_shot_all_reduce(x, "sum", name), total)  # type: ignore[arg-type]
        assert "symm_mem" not in str(seen)
        assert stock == ["all_reduce"]
        with tunedcomm.intercept(dist.new_group(), symm_mem=True) as seen:
            NATIVE.one_shot_all_reduce(x, "sum", name)
        assert not seen.calls()
        with tunedcomm.intercept(symm_mem=True) as seen:
            with tunedcomm.force("all_reduce", "library"):
                NATIVE.one_shot_all_reduce(x, "sum", name)
            NATIVE.one_shot_all_reduce(x, "product", name)
            with pytest.raises(tunedcomm.UnsupportedInputError, match="symm_mem"):
                with tunedcomm.intercept():
                    pass
        assert (seen.num_served, seen.num_passed_on) == (0, 2), str(seen)
        with tunedcomm.intercept(symm_mem=True, numerics="ordered") as seen:
            with pytest.raises(tunedcomm.InfeasibleError):
                NATIVE.fused_matmul_reduce_scatter(whole(rank, 3, 16), whole(1, 16, 2 * world_size), "sum", 1, name)
            NATIVE.one_shot_all_reduce(x, "sum", name)
        assert seen.num_served == 1
        stock.clear()
        NATIVE.one_shot_all_reduce(x, "sum", name)
        assert stock == ["all_reduce"], "nothing is left of the blocks"


@ranks
def test_compiled(rank: int, world_size: int) -> None:
    name, b = group_name(), whole(1, 16, 8)

    @torch.compile(backend="aot_eager", fullgraph=True)
    def layer(x: torch.Tensor) -> torch.Tensor:
        x = NATIVE.one_shot_all_reduce(x * 2, "sum", name)
        return NATIVE.fused_matmul_reduce_scatter(x, b, "sum", 0, name) + 1

    with tunedcomm.intercept(symm_mem=True) as seen:
        found = layer(whole(rank, 2 * world_size, 16))
    assert seen.num_served == 2, str(seen)
    total = sum(whole(r, 2 * world_size, 16) for r in range(world_size))
    due = 2 * world_size * total @ b + 1
    assert same_bits(found, due.chunk(world_size)[rank])  # type: ignore[union-attr]
