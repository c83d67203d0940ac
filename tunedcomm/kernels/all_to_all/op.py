"""all_to_all: every rank sends one chunk to each rank and gets one from each; result chunk i comes from rank i."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tunedcomm.kernels.common.reference import generator_of, powers_of_two
from tunedcomm.metrics import busbw_factor
from tunedcomm.spec import DTYPES, OpSpec, Problem, register_op

if TYPE_CHECKING:
    import torch

__all__ = ["ALL_TO_ALL"]


def _make_inputs(problem: Problem, rank: int, seed: int, kind: str, device: Any) -> tuple[torch.Tensor]:
    import torch

    dtype = getattr(torch, problem.dtype)
    numel = problem.numel * problem.world_size
    generator = generator_of(rank, seed, device)
    if not dtype.is_floating_point:
        least, most = (0, 127) if kind == "random" else (0, 9)
        values = torch.randint(least, most, (numel,), generator=generator, device=device, dtype=torch.int32)
        return (values.to(dtype),)
    if kind == "integers":
        # Many zeros, every other of them negative: words like these must come through bit for bit too.
        values = torch.randint(-2, 3, (numel,), generator=generator, device=device, dtype=torch.int32).float()
        values[1::2].neg_()
        return (values.to(dtype),)
    values = torch.randn(numel, generator=generator, device=device, dtype=torch.float32)
    return (values.to(dtype),)


def _make_outputs(problem: Problem, device: Any) -> tuple[torch.Tensor]:
    import torch

    numel = problem.numel * problem.world_size
    return (torch.empty(numel, dtype=getattr(torch, problem.dtype), device=device),)


def _ordered_reference(problem: Problem, inputs: Sequence[tuple[Any, ...]], rank: int) -> tuple[torch.Tensor]:
    import torch

    return (torch.cat([sent.view(problem.world_size, -1)[rank] for (sent,) in inputs]),)


def _reference(problem: Problem, inputs: Sequence[tuple[Any, ...]], rank: int) -> tuple[torch.Tensor]:
    return (_ordered_reference(problem, inputs, rank)[0].double(),)


ALL_TO_ALL = register_op(
    OpSpec(
        name="all_to_all",
        summary="every rank sends one chunk to each rank; result chunk i comes from rank i",
        reductions=(),
        dtypes=DTYPES,
        shape_help="number of elements that one rank sends one peer, e.g. 98304",
        rank_of_shape=1,
        make_inputs=_make_inputs,
        make_outputs=_make_outputs,
        reference=_reference,
        tolerance=dict.fromkeys(DTYPES, 0.0),  # what is moved is not rounded
        message_bytes=lambda problem: problem.nbytes,
        busbw_factor=lambda world_size: busbw_factor("all_to_all", world_size),
        default_shapes=functools.partial(powers_of_two, largest_mib=64),
        ordered_reference=_ordered_reference,
    )
)
