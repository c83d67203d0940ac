"""all_reduce: every rank gets the elementwise reduction of all ranks' inputs."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tunedcomm.kernels.common.reference import ordered_sum, powers_of_two, reduced, summands
from tunedcomm.metrics import busbw_factor
from tunedcomm.spec import OpSpec, Problem, register_op

if TYPE_CHECKING:
    import torch

__all__ = ["ALL_REDUCE"]


def _make_inputs(problem: Problem, rank: int, seed: int, kind: str, device: Any) -> tuple[torch.Tensor]:
    return (summands(problem.numel, problem.dtype, rank, seed, kind, device),)


def _make_outputs(problem: Problem, device: Any) -> tuple[torch.Tensor]:
    import torch

    return (torch.empty(problem.numel, dtype=getattr(torch, problem.dtype), device=device),)


def _reference(problem: Problem, inputs: Sequence[tuple[Any, ...]], rank: int) -> tuple[torch.Tensor]:
    import torch

    del rank
    return (reduced([values for (values,) in inputs], problem.reduction, torch.float64),)


def _ordered_reference(problem: Problem, inputs: Sequence[tuple[Any, ...]], rank: int) -> tuple[torch.Tensor]:
    del rank
    return (ordered_sum([values for (values,) in inputs], problem.reduction),)


ALL_REDUCE = register_op(
    OpSpec(
        name="all_reduce",
        summary="every rank gets the elementwise sum (avg, max, min) of all ranks' inputs",
        reductions=("sum", "avg", "max", "min"),
        dtypes=("bfloat16", "float16", "float32"),
        shape_help="number of elements of the tensor, e.g. 98304",
        rank_of_shape=1,
        make_inputs=_make_inputs,
        make_outputs=_make_outputs,
        reference=_reference,
        # ‖out − ref‖ / ‖ref‖ of a sum of up to 8 ranks: a few roundings in the payload's dtype.
        tolerance={"bfloat16": 8e-3, "float16": 1e-3, "float32": 1e-6, "float64": 1e-14},
        message_bytes=lambda problem: problem.nbytes,
        busbw_factor=lambda world_size: busbw_factor("all_reduce", world_size),
        default_shapes=functools.partial(powers_of_two, largest_mib=256),
        ordered_reference=_ordered_reference,
        in_place=True,
    )
)
