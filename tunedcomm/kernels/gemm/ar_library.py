"""library: the library's GEMM (cuBLAS on GPUs), then NCCL's all_reduce (gloo on CPUs); every problem's fall-back.

Takes whatever the libraries take. Numerics: library. Graph-safe on NCCL.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tunedcomm.kernels.common.feasibility import Launch
from tunedcomm.kernels.gemm.problem import operands_of, product
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
    import torch.distributed as dist

    del config
    group = workspace.group

    def run(inputs: tuple[Any, ...], outputs: tuple[Any, ...], stream: int) -> None:
        del stream
        operands, out = operands_of(problem, inputs), outputs[0]
        product(problem, operands, out)
        dist.all_reduce(out, dist.ReduceOp.SUM, group=group)
        if operands.bias is not None:
            out.add_(operands.bias)

    return run


LIBRARY = register_variant(
    Variant(
        op="gemm_ar",
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
