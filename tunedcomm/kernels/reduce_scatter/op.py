"""reduce_scatter: rank r gets the elementwise reduction of every rank's r-th chunk."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tunedcomm.metrics import busbw_factor
from tunedcomm.spec import OpSpec, Problem, register_op

if TYPE_CHECKING:
    import torch

__all__ = ["REDUCE_SCATTER"]

_KIB, _MIB = 1 << 10, 1 << 20


def _make_inputs(problem: Problem, rank: int, seed: int, kind: str, device: Any) -> tuple[torch.Tensor]:
    import torch

    dtype, numel = getattr(torch, problem.dtype), problem.numel * problem.world_size
    generator = torch.Generator(device=device).manual_seed((seed * 1_000_003 + rank * 7919 + 29) % 2**62)
    if kind == "integers":
        # Sums of up to 8 of these are exact in 8 bits of mantissa, and so is their mean for powers of two.
        values = torch.randint(-8, 9, (numel,), generator=generator, device=device, dtype=torch.int32)
        return (values.to(dtype),)
    values = torch.randn(numel, generator=generator, device=device, dtype=torch.float32)
    return (values.to(dtype),)


def _make_outputs(problem: Problem, device: Any) -> tuple[torch.Tensor]:
    import torch

    return (torch.empty(problem.numel, dtype=getattr(torch, problem.dtype), device=device),)


def _reduce(problem: Problem, inputs: Sequence[tuple[Any, ...]], rank: int, dtype: torch.dtype) -> torch.Tensor:
    import torch

    chunks: list[torch.Tensor] = [values[rank * problem.numel : (rank + 1) * problem.numel] for (values,) in inputs]
    if problem.reduction in ("max", "min"):
        pick = torch.maximum if problem.reduction == "max" else torch.minimum
        total = chunks[0].to(dtype)
        for chunk in chunks[1:]:
            total = pick(total, chunk.to(dtype))
        return total
    total = torch.zeros_like(chunks[0], dtype=dtype)
    for chunk in chunks:
        total += chunk.to(dtype)
    return total / len(chunks) if problem.reduction == "avg" else total


def _reference(problem: Problem, inputs: Sequence[tuple[Any, ...]], rank: int) -> tuple[torch.Tensor]:
    import torch

    return (_reduce(problem, inputs, rank, torch.float64),)


def _ordered_reference(problem: Problem, inputs: Sequence[tuple[Any, ...]], rank: int) -> tuple[torch.Tensor]:
    import torch

    rounded = _reduce(problem, inputs, rank, torch.float32).to(inputs[0][0].dtype)
    return (rounded + 0.0,)  # a mean that rounds to −0.0 is written as +0.0


def _default_shapes(backend: str, itemsize: int) -> list[tuple[int, ...]]:
    smallest, largest = (_KIB, 128 * _MIB) if backend == "cuda" else (_KIB, 64 * _KIB)
    sizes: list[tuple[int, ...]] = []
    size = smallest
    while size <= largest:
        sizes.append((size // itemsize,))
        size *= 2 if backend == "cuda" else 8
    return sizes


REDUCE_SCATTER = register_op(
    OpSpec(
        name="reduce_scatter",
        summary="rank r gets the elementwise sum (avg, max, min) of all ranks' r-th chunks",
        reductions=("sum", "avg", "max", "min"),
        dtypes=("bfloat16", "float16", "float32"),
        shape_help="number of elements of one rank's result, e.g. 98304",
        rank_of_shape=1,
        make_inputs=_make_inputs,
        make_outputs=_make_outputs,
        reference=_reference,
        # ‖out − ref‖ / ‖ref‖ of a sum of up to 8 ranks: a few roundings in the payload's dtype.
        tolerance={"bfloat16": 8e-3, "float16": 1e-3, "float32": 1e-6, "float64": 1e-14},
        message_bytes=lambda problem: problem.nbytes,
        busbw_factor=lambda world_size: busbw_factor("reduce_scatter", world_size),
        default_shapes=_default_shapes,
        ordered_reference=_ordered_reference,
    )
)
