"""library: NCCL (gloo on CPUs) through `torch.distributed`; every problem's fall-back.

Takes whatever the backend takes. Numerics: library. Graph-safe on NCCL.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tunedcomm.kernels.common.feasibility import Launch
from tunedcomm.kernels.common.variant import reduce_scatter_single, register_library
from tunedcomm.space import Config
from tunedcomm.spec import Problem

if TYPE_CHECKING:
    from tunedcomm.symm.workspace import Workspace

__all__ = ["LIBRARY"]


def _bind(problem: Problem, config: Config, workspace: Workspace) -> Launch:
    import torch.distributed as dist

    del config
    scatter = reduce_scatter_single()
    ops = {"sum": dist.ReduceOp.SUM, "avg": dist.ReduceOp.AVG, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}
    reduction, group, op, world_size = problem.reduction, workspace.group, ops[problem.reduction], problem.world_size

    def run(inputs: tuple[Any, ...], outputs: tuple[Any, ...], stream: int) -> None:
        del stream
        x, out = inputs[0].view(-1), outputs[0].view(-1)
        if reduction == "avg" and not x.is_cuda:  # gloo has no average
            scatter(out, x, dist.ReduceOp.SUM, group=group)
            out.div_(world_size)
        else:
            scatter(out, x, op, group=group)

    return run


LIBRARY = register_library("reduce_scatter", _bind)
