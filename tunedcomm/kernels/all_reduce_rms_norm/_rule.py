"""The rounding rule of `kernels.common.rows` in PyTorch, operation by operation: what ordered variants must give."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

__all__ = ["E4M3_MAX", "h_of", "norm_of", "ordered_sum", "to_e4m3"]

E4M3_MAX = 448.0


def ordered_sum(values: Sequence[torch.Tensor]) -> torch.Tensor:
    """Sum in fp32 in rank order, rounded once to the payload's dtype."""
    import torch

    total = torch.zeros_like(values[0], dtype=torch.float32)
    for value in values:
        total += value.float()
    return total.to(values[0].dtype)


def h_of(s: torch.Tensor, bias: torch.Tensor | None, residual: torch.Tensor | None) -> torch.Tensor:
    """The rounded sum with what is added to it."""
    total = s.float()
    for extra in (bias, residual):
        if extra is not None:
            total = total + extra.float()
    return total.to(s.dtype)


def to_e4m3(values: torch.Tensor) -> torch.Tensor:
    """fp32 in e4m3, saturated."""
    import torch

    return values.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)


def _halved(values: torch.Tensor) -> torch.Tensor:
    """Sum over the last extent, 32, as a butterfly does."""
    for half in (16, 8, 4, 2, 1):
        values = values[..., :half] + values[..., half:]
    return values[..., 0]


def _by_32(values: torch.Tensor) -> torch.Tensor:
    """The last extent cut into pieces of 32, with zeros behind its end."""
    import torch

    padded = torch.nn.functional.pad(values, (0, -values.shape[-1] % 32))
    return padded.reshape(*padded.shape[:-1], -1, 32)


def _square_sum(h: torch.Tensor) -> torch.Tensor:
    """Σ h² over the last extent in the order of `kernels.common.rows`."""
    import torch

    squares = h.float() * h.float()
    if h.element_size() == 2:
        pairs = torch.nn.functional.pad(squares, (0, -squares.shape[-1] % 2)).unflatten(-1, (-1, 2))
        squares = pairs[..., 0] + pairs[..., 1]
    squares = torch.nn.functional.pad(squares, (0, -squares.shape[-1] % 4))
    words = squares.unflatten(-1, (-1, 4))
    packets = (words[..., 0] + words[..., 1]) + (words[..., 2] + words[..., 3])
    groups = _by_32(_halved(_by_32(packets)))
    total = groups[..., 0, :]
    for index in range(1, groups.shape[-2]):
        total = total + groups[..., index, :]
    return _halved(total)


def norm_of(h: torch.Tensor, weight: torch.Tensor, eps: float, scale: torch.Tensor | None) -> torch.Tensor:
    """Y of the stored h.

    Divisors are tensors on purpose: PyTorch divides by numbers by multiplying with their reciprocals on GPUs. Its fp32
    root on CPUs may be a bit off, that of fp64 rounded to fp32 is not.
    """
    import torch

    total = _square_sum(h)
    mean = total / torch.full_like(total, h.shape[-1])
    root = (mean + torch.full_like(total, eps)).double().sqrt().float()
    factor = (torch.ones_like(root) / root).unsqueeze(-1)
    y = h.float() * factor * weight.float()
    if scale is not None:
        return to_e4m3(y * (torch.ones_like(scale) / scale))
    return y.to(h.dtype)
