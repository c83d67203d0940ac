"""gemm_ar: the ranks' products A·B summed, the whole sum on every rank, and a bias added to it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tunedcomm.kernels.gemm.problem import (
    SCALINGS,
    TOLERANCE,
    layouts,
    make_inputs,
    operands_of,
    out_itemsize,
    product_reference,
    wanted_of,
)
from tunedcomm.spec import OpSpec, Problem, register_op

if TYPE_CHECKING:
    import torch

__all__ = ["GEMM_AR"]

_DTYPES = ("bfloat16", "float16", "float8_e4m3fn")


def _make_inputs(problem: Problem, rank: int, seed: int, kind: str, device: Any) -> tuple[torch.Tensor, ...]:
    return make_inputs(problem, rank, seed, kind, device, rows=problem.shape[0])


def _make_outputs(problem: Problem, device: Any) -> tuple[torch.Tensor, ...]:
    import torch

    return (torch.empty(problem.shape[:2], dtype=getattr(torch, wanted_of(problem).dtype), device=device),)


def _reference(problem: Problem, inputs: Sequence[tuple[Any, ...]], rank: int) -> tuple[torch.Tensor, ...]:
    total = product_reference(problem, inputs[0])
    for given in inputs[1:]:
        total += product_reference(problem, given)
    bias = operands_of(problem, inputs[rank]).bias
    return (total if bias is None else total + bias.double(),)


def _message_bytes(problem: Problem) -> int:
    m, n, _ = problem.shape
    return 2 * m * n * out_itemsize(problem) * (problem.world_size - 1) // problem.world_size


def _default_shapes(backend: str, itemsize: int) -> list[tuple[int, ...]]:
    del itemsize
    if backend != "cuda":
        return [(48, 32, 32)]
    decode = [(m, 8192, k) for m in (1, 16, 64, 256) for k in (2048, 7168)]
    return [*decode, (2048, 8192, 3584), (4096, 8192, 3584), (8192, 8192, 3584)]


GEMM_AR = register_op(
    OpSpec(
        name="gemm_ar",
        summary="the ranks' products A x B, summed, plus a bias",
        reductions=("sum",),
        dtypes=_DTYPES,
        shape_help="M x N x K of the GEMM that one rank computes, e.g. 64x8192x2048",
        rank_of_shape=3,
        make_inputs=_make_inputs,
        make_outputs=_make_outputs,
        reference=_reference,
        tolerance=TOLERANCE,
        message_bytes=_message_bytes,
        busbw_factor=None,
        default_shapes=_default_shapes,
        layouts=layouts("bias"),
        scalings=SCALINGS,
        cold=True,
    )
)
