"""The public functions of the fused GEMMs on the host backend: any operands that they take, against float64."""

from __future__ import annotations

import math

import pytest
import torch
from cases import HOST, Ranks
from gemm_samples import DTYPES, FP8, HOW, drawn, mine_of, near, scale, stored, sums
from quick import some

import tunedcomm
from tunedcomm import kernels

kernels.discover()
RANKS = Ranks(env=HOST, forget=False)


@pytest.mark.parametrize("world_size", [2, 3])
def test_reducing_calls(rank: int, world_size: int) -> None:
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


@pytest.mark.parametrize("world_size", [2, 3])
def test_gathering_calls(rank: int, world_size: int) -> None:
    """ag_gemm: dtypes, strides, batch dimensions, results given and new, what was gathered."""
    for number, (how, dtype) in some(enumerate((h, d) for h in HOW for d in DTYPES)):
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


@pytest.mark.parametrize("world_size", [2, 3])
def test_fp8(rank: int, world_size: int) -> None:
    """Scales for the tensor and for rows, in fp8, of all three ops, with batch dimensions; every dtype of results."""
    rows, k, n = 2 * world_size, 48, 32
    for how in some(("nk", "kn", "part of nk"), 2):
        for rowwise in (False, True):
            operands = []
            for r in range(world_size):
                a, b = drawn(r, rows, 3, k, dtype=FP8), drawn(r, k, n, dtype=FP8)
                scales = (scale(r, rows, 3, 1), scale(r, 1, n)) if rowwise else (scale(7, 1), scale(r, 1))
                operands.append((a, b, *scales))
            exact = [(a.double() * sa).reshape(-1, k) @ (b.double() * sb) for a, b, sa, sb in operands]
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
                whole = torch.cat([x.double() * (s if rowwise else scale_a) for x, _, s, _ in operands])
                wanted = whole.reshape(-1, k) @ (b.double() * scale_b)
                near(tunedcomm.ag_gemm(a, b, **asked), wanted, (rows * world_size, 3, n), got, "rowwise")


@pytest.mark.parametrize("world_size", [pytest.param(1, id="alone")])
def test_a_group_of_one(rank: int, world_size: int) -> None:
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
    x, b = drawn(0, 16), drawn(0, 16, 3)
    near(tunedcomm.gemm_ar(x, b), x.double() @ b.double(), (3,), torch.float32)
