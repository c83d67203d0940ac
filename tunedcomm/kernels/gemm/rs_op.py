"""gemm_rs: the ranks' products A·B summed, and this rank's rows of the sum."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tunedcomm.kernels.gemm.problem import (
    SCALINGS,
    TOLERANCE,
    layouts,
    make_inputs,
    out_itemsize,
    product_reference,
    wanted_of,
)
from tunedcomm.spec import OpSpec, Problem, register_op

if TYPE_CHECKING:
    import torch

__all__ = ["GEMM_RS", "shard_rows"]

_DTYPES = ("bfloat16", "float16", "float8_e4m3fn")


def shard_rows(problem: Problem) -> int:
    """Rows of the sum that one rank gets.

    Raises:
        ValueError: the ranks would not get the same number of rows.
    """
    rows, left = divmod(problem.shape[0], problem.world_size)
    if left:
        raise ValueError(f"M = {problem.shape[0]} of gemm_rs is no multiple of {problem.world_size} ranks")
    return rows


def _make_inputs(problem: Problem, rank: int, seed: int, kind: str, device: Any) -> tuple[torch.Tensor, ...]:
    return make_inputs(problem, rank, seed, kind, device, rows=problem.shape[0])


def _make_outputs(problem: Problem, device: Any) -> tuple[torch.Tensor, ...]:
    import torch

    shape = (shard_rows(problem), problem.shape[1])
    return (torch.empty(shape, dtype=getattr(torch, wanted_of(problem).dtype), device=device),)


def _reference(problem: Problem, inputs: Sequence[tuple[Any, ...]], rank: int) -> tuple[torch.Tensor, ...]:
    rows = shard_rows(problem)
    mine = slice(rank * rows, (rank + 1) * rows)
    total = product_reference(problem, inputs[0], mine)
    for given in inputs[1:]:
        total += product_reference(problem, given, mine)
    return (total / len(inputs) if problem.reduction == "avg" else total,)


def _message_bytes(problem: Problem) -> int:
    m, n, _ = problem.shape
    return m // problem.world_size * (problem.world_size - 1) * n * out_itemsize(problem)


def _default_shapes(backend: str, itemsize: int) -> list[tuple[int, ...]]:
    del itemsize
    if backend != "cuda":
        return [(48, 32, 32)]
    large = [(4096, 8192, 3584), (8192, 8192, 3584), (8192, 8192, 8192), (2048, 7168, 8192), (16384, 8192, 7168)]
    return [*((m, 8192, 2048) for m in (16, 64, 256)), (512, 2048, 8192), (2048, 8192, 7168), *large]


GEMM_RS = register_op(
    OpSpec(
        name="gemm_rs",
        summary="the ranks' products A x B, summed, each rank its rows of the sum",
        reductions=("sum", "avg"),
        dtypes=_DTYPES,
        shape_help="M x N x K of the GEMM before the scatter, e.g. 4096x8192x3584; every rank gets M / world_size rows",
        rank_of_shape=3,
        make_inputs=_make_inputs,
        make_outputs=_make_outputs,
        reference=_reference,
        tolerance=TOLERANCE,
        message_bytes=_message_bytes,
        busbw_factor=None,
        default_shapes=_default_shapes,
        layouts=layouts(),
        scalings=SCALINGS,
        cold=True,
        check=shard_rows,
    )
)
