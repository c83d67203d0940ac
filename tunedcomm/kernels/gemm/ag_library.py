"""library: NCCL's all_gather (gloo on CPUs), then the library's GEMM (cuBLAS on GPUs); every problem's fall-back.

Takes whatever the libraries take. Numerics: library. Graph-safe on NCCL.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tunedcomm.kernels.common.feasibility import Launch
from tunedcomm.kernels.common.variant import all_gather_single
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

    del config
    group, wanted, (m, _, k) = workspace.group, wanted_of(problem), problem.shape
    gather_single = all_gather_single()
    rowwise, dtype = problem.scaling == "rowwise", getattr(torch, problem.dtype)

    def gather(whole: Any, part: Any) -> None:
        if part.element_size() == 1:
            whole, part = whole.view(torch.uint8), part.view(torch.uint8)
        gather_single(whole, part, group=group)

    def run(inputs: tuple[Any, ...], outputs: tuple[Any, ...], stream: int) -> None:
        del stream
        operands = operands_of(problem, inputs)
        whole = outputs[1] if wanted.gathered else torch.empty((m, k), dtype=dtype, device=outputs[0].device)
        gather(whole, operands.a)
        if rowwise:
            scales = torch.empty((m, 1), device=whole.device)
            gather(scales, operands.scale_a)
            operands = operands._replace(scale_a=scales)
        product(problem, operands, outputs[0], whole)

    return run


LIBRARY = register_variant(
    Variant(
        op="ag_gemm",
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
