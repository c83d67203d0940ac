"""library: the library's GEMM (cuBLAS on GPUs), then NCCL's reduce_scatter (gloo on CPUs); every problem's fall-back.

Takes whatever the libraries take. Numerics: library. Graph-safe on NCCL.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tunedcomm.kernels.common.feasibility import Launch
from tunedcomm.kernels.common.variant import reduce_scatter_single
from tunedcomm.kernels.gemm.problem import operands_of, product, wanted_of
from tunedcomm.space import Config, Space, Value
from tunedcomm.spec import Limits, Problem, Variant, register_variant

if TYPE_CHECKING:
    from tunedcomm.symm.workspace import Workspace

__all__ = ["LIBRARY"]


def _infeasible(problem: Problem, config: Config, limits: Limits) -> str | None:
    del problem, config, limits
    return None


def _default(problem: Problem, limits: Limits) -> dict[str, Value]:
    del problem, limits
    return {}


def _bind(problem: Problem, config: Config, workspace: Workspace) -> Launch:
    import torch
    import torch.distributed as dist

    group, shape, dtype = workspace.group, problem.shape[:2], getattr(torch, wanted_of(problem).dtype)
    del config
    scatter = reduce_scatter_single()
    mean = problem.reduction == "avg"

    def run(inputs: tuple[Any, ...], outputs: tuple[Any, ...], stream: int) -> None:
        del stream
        out = outputs[0]
        partial = product(problem, operands_of(problem, inputs), torch.empty(shape, dtype=dtype, device=out.device))
        scatter(out, partial, dist.ReduceOp.SUM, group=group)
        if mean:
            out.div_(problem.world_size)

    return run


LIBRARY = register_variant(
    Variant(
        op="gemm_rs",
        name="library",
        numerics="library",
        summary="cuBLAS and NCCL on GPUs, PyTorch and gloo on CPUs",
        space=Space(),
        infeasible=_infeasible,
        default=_default,
        bind=_bind,
        num_blocks=lambda problem, config: -1,
    )
)
