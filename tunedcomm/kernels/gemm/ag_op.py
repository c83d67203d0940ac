"""ag_gemm: every rank's rows of A gathered, times this rank's columns of B."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tunedcomm.kernels.gemm.problem import (
    SCALINGS,
    TOLERANCE,
    layouts,
    make_inputs,
    product_reference,
    wanted_of,
)
from tunedcomm.spec import ITEMSIZE, OpSpec, Problem, register_op

if TYPE_CHECKING:
    import torch

__all__ = ["AG_GEMM", "shard_rows"]

_DTYPES = ("bfloat16", "float16", "float8_e4m3fn")


def shard_rows(problem: Problem) -> int:
    """Rows of A that one rank has.

    Raises:
        ValueError: the ranks do not have the same number of rows.
    """
    rows, left = divmod(problem.shape[0], problem.world_size)
    if left:
        raise ValueError(f"M = {problem.shape[0]} of ag_gemm is no multiple of {problem.world_size} ranks")
    return rows


def _make_inputs(problem: Problem, rank: int, seed: int, kind: str, device: Any) -> tuple[torch.Tensor, ...]:
    return make_inputs(problem, rank, seed, kind, device, rows=shard_rows(problem))


def _make_outputs(problem: Problem, device: Any) -> tuple[torch.Tensor, ...]:
    import torch

    (m, n, k), wanted = problem.shape, wanted_of(problem)
    out = torch.empty((m, n), dtype=getattr(torch, wanted.dtype), device=device)
    if not wanted.gathered:
        return (out,)
    return out, torch.empty((m, k), dtype=getattr(torch, problem.dtype), device=device)


def _reference(problem: Problem, inputs: Sequence[tuple[Any, ...]], rank: int) -> tuple[torch.Tensor, ...]:
    import torch

    own = inputs[rank]
    parts = [product_reference(problem, (given[0], own[1], *_scales(problem, given, own))) for given in inputs]
    out = torch.cat(parts)
    return (out, torch.cat([given[0].double() for given in inputs])) if wanted_of(problem).gathered else (out,)


def _scales(problem: Problem, given: tuple[Any, ...], own: tuple[Any, ...]) -> tuple[Any, ...]:
    """The scale of another rank's rows of A with that of the own B; one for the tensor is the own one."""
    if not problem.scaling:
        return ()
    return (given if problem.scaling == "rowwise" else own)[-2], own[-1]


def _message_bytes(problem: Problem) -> int:
    m, _, k = problem.shape
    return m // problem.world_size * (problem.world_size - 1) * k * ITEMSIZE[problem.dtype]


def _default_shapes(backend: str, itemsize: int) -> list[tuple[int, ...]]:
    del itemsize
    if backend != "cuda":
        return [(48, 32, 32)]
    large = [(4096, 3584, 8192), (8192, 3584, 8192), (8192, 8192, 8192), (2048, 8192, 7168), (16384, 7168, 8192)]
    return [*((m, 2560, 8192) for m in (16, 64, 256)), (512, 8192, 2048), (2048, 7168, 8192), *large]


AG_GEMM = register_op(
    OpSpec(
        name="ag_gemm",
        summary="the ranks' rows of A, gathered, times this rank's B",
        reductions=("",),
        dtypes=_DTYPES,
        shape_help="M x N x K of the GEMM after the gather, e.g. 4096x3584x8192; a rank has M / world_size rows of A",
        rank_of_shape=3,
        make_inputs=_make_inputs,
        make_outputs=_make_outputs,
        reference=_reference,
        tolerance=TOLERANCE,
        message_bytes=_message_bytes,
        busbw_factor=None,
        default_shapes=_default_shapes,
        layouts=layouts("gathered"),
        scalings=SCALINGS,
        cold=True,
        check=shard_rows,
    )
)
