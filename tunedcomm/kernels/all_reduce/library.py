"""library: NCCL (gloo on CPUs) through `torch.distributed.all_reduce`; every problem's fall-back and baseline.

Out of place it copies first, as every caller of NCCL through PyTorch must. Takes whatever the backend takes.
Numerics: library. Graph-safe on NCCL.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tunedcomm.kernels.common.feasibility import Launch
from tunedcomm.kernels.common.library import register_library
from tunedcomm.space import Config
from tunedcomm.spec import Problem

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

    from tunedcomm.symm.workspace import Workspace

__all__ = ["LIBRARY", "library_reduction"]


def library_reduction(reduction: str, group: dist.ProcessGroup) -> Callable[[torch.Tensor], None]:
    """What reduces a tensor in place over `group`, ordered after what the current stream holds."""
    import torch.distributed as dist

    ops = {"sum": dist.ReduceOp.SUM, "avg": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}
    all_reduce, op = dist.all_reduce, ops[reduction]

    def reduce(out: torch.Tensor) -> None:
        all_reduce(out, op, group=group)

    def average(out: torch.Tensor) -> None:
        if out.is_cuda:
            all_reduce(out, dist.ReduceOp.AVG, group=group)
            return
        all_reduce(out, op, group=group)
        out.div_(dist.get_world_size(group))  # gloo has no average

    return average if reduction == "avg" else reduce


def _bind(problem: Problem, config: Config, workspace: Workspace) -> Launch:
    del config
    reduce = library_reduction(problem.reduction, workspace.group)

    def run(inputs: tuple[Any, ...], outputs: tuple[Any, ...], stream: int) -> None:
        del stream
        out = outputs[0]
        if out is not inputs[0]:
            out.copy_(inputs[0])
        reduce(out)

    return run


LIBRARY = register_library("all_reduce", _bind)
