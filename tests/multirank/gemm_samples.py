"""Operands of the fused GEMMs and what is right, for their tests on the host backend."""

from __future__ import annotations

import math

import torch

from tunedcomm.kernels.gemm.op import TOLERANCE

FP8 = torch.float8_e4m3fn


def drawn(rank: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """One rank's values, which every rank can make again."""
    generator = torch.Generator().manual_seed(1000 * rank + 31 * math.prod(shape) + len(shape))
    return torch.randn(shape, generator=generator).to(dtype)


def scale(rank: int, *shape: int) -> torch.Tensor:
    return drawn(rank + 50, *shape).abs() + 0.5


def near(got: torch.Tensor, wanted: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype, loose: str = "") -> None:
    """`got` has that shape and dtype and is `wanted`, float64, as near as the op promises."""
    assert got.shape == shape, (got.shape, shape)
    assert got.dtype == dtype
    error = (got.double() - wanted.reshape(shape)).norm() / wanted.norm().clamp_min(1e-30)
    assert error <= TOLERANCE[loose or str(dtype).removeprefix("torch.")], error


def stored(b: torch.Tensor, how: str) -> torch.Tensor:
    """The matrix `b` in other strides."""
    k, n = b.shape
    if how == "nk":
        return b.t().contiguous().t()
    if how == "part of nk":
        wide = torch.zeros(n, k + 8, dtype=b.dtype)
        wide[:, 8:] = b.t()
        return wide[:, 8:].t()
    if how == "part of kn":
        wide = torch.zeros(k, 2 * n, dtype=b.dtype)
        wide[:, ::2] = b
        return wide[:, ::2]
    if how == "misaligned":
        flat = torch.zeros(k * n + 1, dtype=b.dtype)
        flat[1:] = b.flatten()
        return flat[1:].view(k, n)
    return b


HOW = ("kn", "nk", "part of nk", "part of kn", "misaligned")
DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def sums(world_size: int, a: tuple[int, ...], k: int, n: int, dtype: torch.dtype) -> torch.Tensor:
    """The sum over ranks of their products."""
    flat = [
        (drawn(r, *a, k, dtype=dtype).double().reshape(-1, k), drawn(r, k, n, dtype=dtype)) for r in range(world_size)
    ]
    return sum(x @ b.double() for x, b in flat)  # type: ignore[return-value]
