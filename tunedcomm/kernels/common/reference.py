"""Inputs that every rank can make again, sums to compare with and sizes to sweep, for the specs of several ops."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from tunedcomm.spec import Problem

_KIB, _MIB = 1 << 10, 1 << 20


def generator_of(rank: int, seed: int, device: Any) -> torch.Generator:
    """Random numbers of one rank, the same wherever they are drawn on that kind of device."""
    import torch

    return torch.Generator(device=device).manual_seed((seed * 1_000_003 + rank * 7919 + 17) % 2**62)


def draw(shape: tuple[int, ...], dtype_name: str, generator: torch.Generator, kind: str) -> torch.Tensor:
    """Values of an op that sums, on the generator's device; `kind` as in `OpSpec.make_inputs`."""
    import torch

    dtype, device = getattr(torch, dtype_name), generator.device
    if kind == "integers":
        # Sums of up to 8 of these are exact in 8 bits of mantissa, and so is their mean for powers of two.
        return torch.randint(-8, 9, shape, generator=generator, device=device, dtype=torch.int32).to(dtype)
    return torch.randn(shape, generator=generator, device=device, dtype=torch.float32).to(dtype)


def summands(numel: int, dtype_name: str, rank: int, seed: int, kind: str, device: Any) -> torch.Tensor:
    """One rank's values of an op that sums; `kind` as in `OpSpec.make_inputs`."""
    return draw((numel,), dtype_name, generator_of(rank, seed, device), kind)


def reduced(parts: Sequence[torch.Tensor], reduction: str, dtype: torch.dtype) -> torch.Tensor:
    """All ranks' `parts` reduced in rank order in `dtype`."""
    import torch

    if reduction in ("max", "min"):
        pick = torch.maximum if reduction == "max" else torch.minimum
        total = parts[0].to(dtype)
        for part in parts[1:]:
            total = pick(total, part.to(dtype))
        return total
    total = torch.zeros_like(parts[0], dtype=dtype)
    for part in parts:
        total += part.to(dtype)
    return total / len(parts) if reduction == "avg" else total


def outputs_like(problem: Problem, device: Any) -> tuple[torch.Tensor]:
    """The one output of an op that returns the problem's shape and dtype."""
    import torch

    return (torch.empty(problem.shape, dtype=getattr(torch, problem.dtype), device=device),)


def outputs_of_ranks(problem: Problem, device: Any) -> tuple[torch.Tensor]:
    """The one output of an op that returns the problem's number of elements from every rank."""
    import torch

    numel = problem.numel * problem.world_size
    return (torch.empty(numel, dtype=getattr(torch, problem.dtype), device=device),)


def ordered_sum(parts: Sequence[torch.Tensor], reduction: str) -> torch.Tensor:
    """The bits that `ordered` kernels give: fp32 in rank order, rounded once."""
    import torch

    # A mean that rounds to −0.0 is written as +0.0.
    return reduced(parts, reduction, torch.float32).to(parts[0].dtype) + 0.0


def with_extras(s: torch.Tensor, *extras: torch.Tensor | None) -> torch.Tensor:
    """A rounded sum plus a bias and a residual, from left to right in fp32, rounded once more."""
    total = s.float()
    for extra in extras:
        if extra is not None:
            total = total + extra.float()
    return total.to(s.dtype)


def powers_of_two(backend: str, itemsize: int, *, largest_mib: int) -> list[tuple[int, ...]]:
    """Sizes from 1 KiB on, in elements: by 2 up to `largest_mib` on GPUs, by 8 up to 64 KiB on the host."""
    smallest, largest = (_KIB, largest_mib * _MIB) if backend == "cuda" else (_KIB, 64 * _KIB)
    sizes: list[tuple[int, ...]] = []
    size = smallest
    while size <= largest:
        sizes.append((size // itemsize,))
        size *= 2 if backend == "cuda" else 8
    return sizes
