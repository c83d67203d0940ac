"""library: NCCL (gloo on CPUs) through `torch.distributed.all_reduce`; every problem's fall-back and baseline.

Out of place it copies first, as every caller of NCCL through PyTorch must. Takes whatever the backend takes.
Numerics: library. Graph-safe on NCCL.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from tunedcomm.kernels.all_reduce._common import Launch
from tunedcomm.space import Config, Space, Value
from tunedcomm.spec import Limits, Problem, Variant, register_variant
from tunedcomm.symm.workspace import Workspace

__all__ = ["LIBRARY", "all_reduce_by_library"]

_OPS = {"sum": dist.ReduceOp.SUM, "avg": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}


def all_reduce_by_library(out: torch.Tensor, reduction: str, group: dist.ProcessGroup) -> None:
    """Reduce `out` in place over `group`, ordered after what the current stream holds."""
    if reduction == "avg" and out.is_cuda:
        dist.all_reduce(out, dist.ReduceOp.AVG, group=group)
        return
    dist.all_reduce(out, _OPS[reduction], group=group)
    if reduction == "avg":  # gloo has no average
        out.div_(dist.get_world_size(group))


def _infeasible(problem: Problem, config: Config, limits: Limits) -> str | None:
    del problem, config, limits
    return None


def _default(problem: Problem, limits: Limits) -> dict[str, Value]:
    del problem, limits
    return {}


def _bind(problem: Problem, config: Config, workspace: Workspace) -> Launch:
    del config
    group, reduction = workspace.group, problem.reduction

    def run(inputs: tuple[Any, ...], outputs: tuple[Any, ...], stream: int) -> None:
        del stream
        out = outputs[0]
        if out is not inputs[0]:
            out.copy_(inputs[0])
        all_reduce_by_library(out, reduction, group)

    return run


LIBRARY = register_variant(
    Variant(
        op="all_reduce",
        name="library",
        numerics="library",
        summary="NCCL on GPUs, gloo on CPUs",
        space=Space(),
        infeasible=_infeasible,
        default=_default,
        bind=_bind,
        num_blocks=lambda problem, config: -1,
    )
)
