"""library: NCCL (gloo on CPUs) through `torch.distributed`; every problem's fall-back.

Takes whatever the backend takes. Numerics: library. Graph-safe on NCCL.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tunedcomm.kernels.common.feasibility import Launch
from tunedcomm.kernels.common.variant import LibraryVariant, reduce_scatter_single
from tunedcomm.space import Config
from tunedcomm.spec import Problem

if TYPE_CHECKING:
    from tunedcomm.symm.workspace import Workspace


class Library(LibraryVariant):
    op = "reduce_scatter"

    def bind(self, problem: Problem, config: Config, workspace: Workspace) -> Launch:
        import torch.distributed as dist

        scatter = reduce_scatter_single()
        ops = {"sum": dist.ReduceOp.SUM, "avg": dist.ReduceOp.AVG, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}
        group, op, averages = workspace.group, ops[problem.reduction], problem.reduction == "avg"

        def run(inputs: tuple[Any, ...], outputs: tuple[Any, ...], stream: int) -> None:
            x, out = inputs[0].view(-1), outputs[0].view(-1)
            if averages and not x.is_cuda:  # gloo has no average
                scatter(out, x, dist.ReduceOp.SUM, group=group)
                out.div_(problem.world_size)
            else:
                scatter(out, x, op, group=group)

        return run


LIBRARY = Library().register()
