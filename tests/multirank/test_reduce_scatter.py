"""`tunedcomm.reduce_scatter` as users call it; kernels and library, on the host backend."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from cases import Ranks
from quick import some

import tunedcomm
from tunedcomm import kernels
from tunedcomm.spec import variants

kernels.discover()
KERNELS = sorted(
    name for name, variant in variants("reduce_scatter").items() if variant.kernels and variant.numerics == "ordered"
)
WORLD_SIZE = 3
RANKS = Ranks(WORLD_SIZE)


def values(shape: tuple[int, ...], rank: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return (torch.arange(torch.Size(shape).numel(), dtype=torch.float64).view(shape) % 23 * (rank + 1)).to(dtype)


def wanted(shape: tuple[int, ...], rank: int, dim: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    total = sum(values(shape, r, torch.float64) for r in range(WORLD_SIZE))
    assert isinstance(total, torch.Tensor)
    return total.chunk(WORLD_SIZE, dim)[rank].to(dtype)


def test_every_kernel(rank: int) -> None:
    """Forced by name, at even and odd sizes, new results and given ones."""
    for variant in KERNELS:
        with tunedcomm.force("reduce_scatter", variant):
            for shape in ((WORLD_SIZE * 7,), (WORLD_SIZE * 64, 5), (WORLD_SIZE, 1)):
                for _ in some(range(3)):
                    x = values(shape, rank)
                    out = tunedcomm.reduce_scatter(x)
                    assert torch.equal(out, wanted(shape, rank)), (variant, shape)
                    given = torch.full_like(out, float("nan"))
                    assert tunedcomm.reduce_scatter(x, out=given) is given
                    assert torch.equal(given, out)
                    assert torch.equal(x, values(shape, rank)), "the input is left as it is"


def test_dimensions(rank: int) -> None:
    shapes = (((4, 6, 5), 1), ((4, 6, 9), -1), ((1, 6, 2), 1), ((1, 1, 3), -1), ((6, 3), -2), ((2, 9), 1))
    for shape, dim in some(shapes, 2):
        for variant in ("lamport", "library"):
            with tunedcomm.force("reduce_scatter", variant):
                for _ in range(2):
                    out = tunedcomm.reduce_scatter(values(shape, rank), dim=dim)
                    assert out.is_contiguous()
                    assert torch.equal(out, wanted(shape, rank, dim)), (shape, dim)
                target = torch.zeros((*out.shape, 2))[..., 0]
                assert tunedcomm.reduce_scatter(values(shape, rank), dim=dim, out=target) is target
                assert torch.equal(target, wanted(shape, rank, dim))


def test_dtypes_and_reductions(rank: int) -> None:
    for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.int8, torch.int32, torch.int64):
        x = (torch.arange(12) % 5 + rank).to(dtype)
        base = (torch.arange(12) % 5)[4 * rank : 4 * rank + 4]
        assert torch.equal(tunedcomm.reduce_scatter(x), (3 * base + 3).to(dtype))
        assert torch.equal(tunedcomm.reduce_scatter(x, op="max"), (base + 2).to(dtype))
        assert torch.equal(tunedcomm.reduce_scatter(x, op="min"), base.to(dtype))
        if dtype.is_floating_point:
            assert torch.equal(tunedcomm.reduce_scatter(x, op="avg"), (base + 1).to(dtype))


def test_symmetric_inputs(rank: int) -> None:
    """Read in place by the peers, larger than any area too; plain where the chunks do not lie one after another."""
    for shape in ((WORLD_SIZE * 5, 3), (WORLD_SIZE * 40_000, 4)):
        x = tunedcomm.symmetric_empty(shape, dtype=torch.float32)
        with tunedcomm.force("reduce_scatter", "one_shot"):
            for _ in range(2):
                x.copy_(values(shape, rank))
                out = tunedcomm.reduce_scatter(x)
                assert torch.equal(out, wanted(shape, rank))
                x.zero_()  # at once: nobody reads it any more
    whole = tunedcomm.symmetric_empty((4, 6), dtype=torch.float32)
    whole.copy_(values((4, 6), rank))
    assert torch.equal(tunedcomm.reduce_scatter(whole, dim=1), wanted((4, 6), rank, 1))
    dist.barrier()


def test_bad_input(rank: int) -> None:
    good = torch.ones(6, 4)
    assert torch.equal(tunedcomm.reduce_scatter(good), torch.full((2, 4), 3.0))
    integer, out = torch.ones(3, dtype=torch.int32), torch.empty(6, 4)
    for given, options, said in (
        *((x, {}, "multiple of 3 .*pad x") for x in (torch.ones(4, 6), torch.ones(8, 3), torch.ones(24)[:23])),
        (good, {"dim": 1}, "dimension 1 of x, 4 long"),
        (torch.tensor(1.0), {}, "dimension 0 of x, 1 long"),
        *((torch.ones(6, 6), {"dim": dim}, "is no dimension of") for dim in (2, -3, "0", 1.0, None, True)),
        (good, {"op": "prod"}, "op='prod' is no reduction"),
        (good, {"op": []}, "is no reduction"),
        (good, {"out": out}, "out has shape"),
        (good, {"out": good[:2]}, "out overlaps x"),
        (good, {"out": good}, "out has shape"),
        ([1.0], {}, "torch.Tensor"),
        (integer.to(torch.complex64), {}, "complex64"),
        (integer.short(), {}, "int16"),
        (integer, {"op": "avg"}, "would round"),
        (good.clone().requires_grad_(), {"op": "min"}, "not differentiable"),
    ):
        with pytest.raises(tunedcomm.UnsupportedInputError, match=said):
            tunedcomm.reduce_scatter(given, **options)
    assert torch.equal(tunedcomm.reduce_scatter(good), torch.full((2, 4), 3.0))
