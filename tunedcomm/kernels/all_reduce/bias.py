"""all_reduce_bias: the sum over the ranks, and a bias added to every row of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tunedcomm.kernels.all_reduce_rms_norm._rule import h_of, ordered_sum
from tunedcomm.metrics import busbw_factor
from tunedcomm.spec import OpSpec, Problem, register_op

if TYPE_CHECKING:
    import torch

__all__ = ["ALL_REDUCE_BIAS"]


def _values(problem: Problem, shape: tuple[int, ...], who: int, seed: int, kind: str, device: Any) -> torch.Tensor:
    import torch

    dtype = getattr(torch, problem.dtype)
    generator = torch.Generator(device=device).manual_seed((seed * 1_000_003 + who * 7919 + 31) % 2**62)
    if kind == "integers":
        return torch.randint(-8, 9, shape, generator=generator, device=device, dtype=torch.int32).to(dtype)
    return torch.randn(shape, generator=generator, device=device, dtype=torch.float32).to(dtype)


def _make_inputs(problem: Problem, rank: int, seed: int, kind: str, device: Any) -> tuple[torch.Tensor, ...]:
    """(x, bias), the bias the same on every rank."""
    return (
        _values(problem, problem.shape, rank, seed, kind, device),
        _values(problem, problem.shape[1:], problem.world_size, seed, kind, device),
    )


def _make_outputs(problem: Problem, device: Any) -> tuple[torch.Tensor]:
    import torch

    return (torch.empty(problem.shape, dtype=getattr(torch, problem.dtype), device=device),)


def _reference(problem: Problem, inputs: Sequence[tuple[Any, ...]], rank: int) -> tuple[torch.Tensor]:
    import torch

    total = torch.zeros(problem.shape, dtype=torch.float64, device=inputs[rank][0].device)
    for x, _ in inputs:
        total += x.double()
    return (total + inputs[rank][1].double(),)


def _ordered_reference(problem: Problem, inputs: Sequence[tuple[Any, ...]], rank: int) -> tuple[torch.Tensor]:
    del problem
    return (h_of(ordered_sum([x for x, _ in inputs]), inputs[rank][1], None),)


def _default_shapes(backend: str, itemsize: int) -> list[tuple[int, ...]]:
    del itemsize
    if backend != "cuda":
        return [(1, 256), (3, 256), (16, 1024)]
    return [(1 << power, 8192) for power in range(13)]


ALL_REDUCE_BIAS = register_op(
    OpSpec(
        name="all_reduce_bias",
        summary="the ranks' sum plus a bias",
        reductions=("sum",),
        dtypes=("bfloat16", "float16", "float32"),
        shape_help="rows x columns, the bias has one element a column, e.g. 64x8192",
        rank_of_shape=2,
        make_inputs=_make_inputs,
        make_outputs=_make_outputs,
        reference=_reference,
        # ‖out − ref‖ / ‖ref‖: two roundings in the payload's dtype.
        tolerance={"bfloat16": 8e-3, "float16": 1e-3, "float32": 1e-6, "float64": 1e-14},
        message_bytes=lambda problem: problem.nbytes,
        busbw_factor=lambda world_size: busbw_factor("all_reduce", world_size),
        default_shapes=_default_shapes,
        ordered_reference=_ordered_reference,
    )
)
