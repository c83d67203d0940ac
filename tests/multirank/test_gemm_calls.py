"""The public functions of the fused GEMMs on the host backend: any operands that they take, against float64."""

from __future__ import annotations

import math

import pytest
import torch
from gemm_samples import DTYPES, FP8, HOW, drawn, mine_of, near, scale, stored, sums
from harness import run_ranks
from quick import some

import tunedcomm
from tunedcomm import kernels

kernels.discover()


def reduce_body(rank: int, world_size: int) -> bool:
    """gemm_rs and gemm_ar: dtypes, strides of b and a, batch dimensions, results given and new."""
    for number, (how, dtype) in some(enumerate((h, d) for h in HOW for d in DTYPES)):
        k, n = 24 + 8 * (number % 2), 40
        batch = ((2 * world_size, 3), (4 * world_size,), (world_size, 1, 2))[number % 3]
        a, b = drawn(rank, *batch, k, dtype=dtype), stored(drawn(rank, k, n, dtype=dtype), how)
        if number % 4 == 1:
            a = torch.zeros(*batch, 2 * k, dtype=dtype)[..., ::2].copy_(a)
        elif number % 4 == 2:
            a = a.transpose(0, -1).contiguous().transpose(0, -1)
        total = sums(world_size, batch, k, n, dtype)
        rows = mine_of(total, rank, world_size)
        shape = (batch[0] // world_size, *batch[1:], n)
        near(tunedcomm.gemm_rs(a, b), rows, shape, dtype)
        near(tunedcomm.gemm_rs(a, b, op="avg", max_sms=8), rows / world_size, shape, dtype)
        near(tunedcomm.gemm_ar(a, b, numerics="any"), total, (*batch, n), dtype)
        bias = drawn(99, n, dtype=dtype)
        near(tunedcomm.gemm_ar(a, b, bias=bias), total + bias.double(), (*batch, n), dtype)
        held, whole = torch.full(shape, math.nan, dtype=dtype), torch.full((*batch, 2 * n), math.nan, dtype=dtype)
        assert tunedcomm.gemm_rs(a, b, out=held) is held
        near(held, rows, shape, dtype)
        out = whole[..., 1::2]
        assert tunedcomm.gemm_ar(a, b, bias=bias, out=out) is out
        near(out, total + bias.double(), (*batch, n), dtype)
        assert whole[..., ::2].isnan().all(), "nothing beside the view is written"
        if dtype.itemsize == 2:
            near(tunedcomm.gemm_rs(a, b, out_dtype=torch.float32), rows, shape, torch.float32, str(dtype)[6:])
            found = tunedcomm.gemm_ar(a, b, bias=bias.float(), out_dtype=torch.float32)
            near(found, total + bias.double(), (*batch, n), torch.float32, str(dtype)[6:])
    vector = drawn(rank, 16)
    total = sums(world_size, (), 16, 8, torch.float32)
    near(tunedcomm.gemm_ar(vector, drawn(rank, 16, 8)), total, (8,), torch.float32)
    return True


@pytest.mark.parametrize("world_size", [2, 3])
def test_reducing_calls(world_size: int) -> None:
    assert run_ranks(world_size, reduce_body, timeout=120) == [True] * world_size


def gather_body(rank: int, world_size: int) -> bool:
    """ag_gemm: dtypes, strides, batch dimensions, results given and new, what was gathered."""
    for number, (how, dtype) in enumerate((h, d) for h in HOW for d in DTYPES):
        k, n = 24 + 8 * (number % 2), 40
        batch = ((2, 3), (5,), (1, 1, 2))[number % 3]
        a, b = drawn(rank, *batch, k, dtype=dtype), stored(drawn(rank, k, n, dtype=dtype), how)
        if number % 4 == 1:
            a = torch.zeros(*batch, 2 * k, dtype=dtype)[..., ::2].copy_(a)
        everyone = torch.cat([drawn(r, *batch, k, dtype=dtype) for r in range(world_size)])
        wanted = everyone.double().reshape(-1, k) @ b.double()
        shape = (*everyone.shape[:-1], n)
        near(tunedcomm.ag_gemm(a, b), wanted, shape, dtype)
        out = torch.full((*shape[:-1], 2 * n), math.nan, dtype=dtype)[..., ::2]
        found, gathered = tunedcomm.ag_gemm(a, b, return_gathered=True, out=out)
        assert found is out
        near(found, wanted, shape, dtype)
        assert torch.equal(gathered, everyone)
        if dtype.itemsize == 2:
            near(tunedcomm.ag_gemm(a, b, out_dtype=torch.float32), wanted, shape, torch.float32, str(dtype)[6:])
    return True


@pytest.mark.parametrize("world_size", [2, 3])
def test_gathering_calls(world_size: int) -> None:
    assert run_ranks(world_size, gather_body, timeout=120) == [True] * world_size


def fp8_body(rank: int, world_size: int) -> bool:
    """Scales for the tensor and for rows, in fp8, of all three ops, with batch dimensions; every dtype of results."""
    rows, k, n = 2 * world_size, 48, 32
    for how in ("nk", "kn", "part of nk"):
        for rowwise in (False, True):
            operands = []
            for r in range(world_size):
                a, b = drawn(r, rows, 3, k, dtype=FP8), drawn(r, k, n, dtype=FP8)
                scales = (scale(r, rows, 3, 1), scale(r, 1, n)) if rowwise else (scale(7, 1), scale(r, 1))
                operands.append((a, b, *scales))
            exact = [
                ((a.double() * sa.double()).reshape(-1, k) @ (b.double() * sb.double())) for a, b, sa, sb in operands
            ]
            a, b, scale_a, scale_b = operands[rank]
            b = stored(b, how)
            for dtype in (None, torch.float16, torch.float32):
                got = dtype or torch.bfloat16
                asked = {"scale_a": scale_a, "scale_b": scale_b, "out_dtype": dtype}
                total = sum(exact)
                near(tunedcomm.gemm_ar(a, b, **asked), total, (rows, 3, n), got, "rowwise")
                bias = drawn(99, n, dtype=got)
                near(tunedcomm.gemm_ar(a, b, bias=bias, **asked), total + bias.double(), (rows, 3, n), got, "rowwise")
                mine = mine_of(total, rank, world_size)
                near(tunedcomm.gemm_rs(a, b, **asked), mine, (rows // world_size, 3, n), got, "rowwise")
                whole = torch.cat(
                    [x.double() * (s.double() if rowwise else scale_a.double()) for x, _, s, _ in operands]
                )
                wanted = whole.reshape(-1, k) @ (b.double() * scale_b.double())
                near(tunedcomm.ag_gemm(a, b, **asked), wanted, (rows * world_size, 3, n), got, "rowwise")
    return True


@pytest.mark.parametrize("world_size", [2, 3])
def test_fp8(world_size: int) -> None:
    assert run_ranks(world_size, fp8_body, timeout=120) == [True] * world_size


def alone_body(rank: int, world_size: int) -> bool:
    """A group of one multiplies and asks nobody."""
    for dtype in (torch.bfloat16, torch.float32):
        a, b, bias = drawn(0, 6, 2, 24, dtype=dtype), drawn(0, 24, 16, dtype=dtype), drawn(3, 16, dtype=dtype)
        wanted = a.double().reshape(-1, 24) @ b.double()
        for how in HOW:
            near(tunedcomm.gemm_rs(a, stored(b, how), op="avg"), wanted, (6, 2, 16), dtype)
            near(tunedcomm.gemm_ar(a, stored(b, how), bias=bias), wanted + bias.double(), (6, 2, 16), dtype)
            found, gathered = tunedcomm.ag_gemm(a, [stored(b, how), b], return_gathered=True)
            assert torch.equal(gathered, a)
            for result in found:
                near(result, wanted, (6, 2, 16), dtype)
    eight, other = drawn(0, 5, 32, dtype=FP8), drawn(1, 32, 16, dtype=FP8)
    scales = {"scale_a": scale(0, 5, 1), "scale_b": scale(0, 1, 16)}
    wanted = (eight.double() * scales["scale_a"]) @ (other.double() * scales["scale_b"])
    near(tunedcomm.gemm_ar(eight, other, **scales), wanted, (5, 16), torch.bfloat16, "rowwise")
    near(
        tunedcomm.gemm_ar(drawn(0, 16), drawn(0, 16, 3)),
        drawn(0, 16).double() @ drawn(0, 16, 3).double(),
        (3,),
        torch.float32,
    )
    return True


def test_a_group_of_one() -> None:
    assert run_ranks(1, alone_body) == [True]
