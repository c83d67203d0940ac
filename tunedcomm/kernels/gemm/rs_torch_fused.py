"""torch_fused: PyTorch's `fused_matmul_reduce_scatter` and its scaled form, of asynchronous tensor parallelism.

Numerics: library. A lost peer leaves it spinning, so it only runs when it is forced. The result is copied to where it
is wanted, for the operators bring a tensor of their own.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from tunedcomm.kernels.common.feasibility import Launch
from tunedcomm.kernels.gemm.problem import operands_of, out_itemsize, usual_dtype, wanted_of
from tunedcomm.space import Config, Space, Value
from tunedcomm.spec import Limits, Problem, Variant, register_variant

if TYPE_CHECKING:
    from tunedcomm.symm.workspace import Workspace

__all__ = ["TORCH_FUSED"]

_SCALED_MULTIPLE = 16  # of N and K, for PyTorch's scaled products


def _infeasible(problem: Problem, config: Config, limits: Limits) -> str | None:
    del config
    m, n, k = problem.shape
    wanted, scaled = wanted_of(problem), problem.dtype == "float8_e4m3fn"
    if limits.backend != "cuda" or not limits.symmetric:
        return "PyTorch's fused operators need GPUs that address each other's memory"
    if problem.dtype not in ("bfloat16", "float16", "float8_e4m3fn") or wanted.dtype != usual_dtype(problem.dtype):
        return f"PyTorch's fused operators do not make {wanted.dtype} of {problem.dtype}"
    if problem.reduction not in ("sum", "avg"):
        return f"PyTorch's fused operators do sum and avg, not {problem.reduction}"
    if m == 0 or n == 0 or k == 0 or m % problem.world_size:
        return f"{m} rows of {n} are not the same number for each of {problem.world_size} ranks, or none"
    if scaled and not (problem.scaling and wanted.nk):
        return "PyTorch's scaled products want scales, and b stored [N, K]"
    if scaled and (n % _SCALED_MULTIPLE or k % _SCALED_MULTIPLE):
        return f"PyTorch's scaled products want N and K to be multiples of {_SCALED_MULTIPLE}"
    return None


def _default(problem: Problem, limits: Limits) -> dict[str, Value]:
    del problem, limits
    return {}


def _bind(problem: Problem, config: Config, workspace: Workspace) -> Launch:
    import torch
    import torch.distributed._symmetric_memory as symm_mem

    del config
    group, reduction, nk = workspace.group.group_name, problem.reduction, wanted_of(problem).nk
    dtype, shape = getattr(torch, wanted_of(problem).dtype), list(problem.shape[:2])
    # Not while a graph is captured, when it could not grow.
    symm_mem.get_symm_mem_workspace(group, math.prod(shape) * out_itemsize(problem))
    operators = torch.ops.symm_mem

    def run(inputs: tuple[Any, ...], outputs: tuple[Any, ...], stream: int) -> None:
        del stream
        given = operands_of(problem, inputs)
        b = given.b.T if nk else given.b
        if problem.scaling:
            found = operators.fused_scaled_matmul_reduce_scatter(
                given.a, b, given.scale_a, given.scale_b, reduction, 0, 0, group, shape, out_dtype=dtype
            )
        else:
            found = operators.fused_matmul_reduce_scatter(given.a, b, reduction, 0, group)
        outputs[0].copy_(found)

    return run


TORCH_FUSED = register_variant(
    Variant(
        op="gemm_rs",
        name="torch_fused",
        numerics="library",
        summary="PyTorch's fused_matmul_reduce_scatter; forced only, a lost peer would leave it waiting",
        space=Space(),
        infeasible=_infeasible,
        default=_default,
        bind=_bind,
        num_blocks=lambda problem, config: -1,
        bounded=False,
    )
)
