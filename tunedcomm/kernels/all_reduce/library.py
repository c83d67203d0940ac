"""library: NCCL (gloo on CPUs) through `torch.distributed.all_reduce`; every problem's fall-back and baseline.

Out of place it copies first, as every caller of NCCL through PyTorch must. Takes whatever the backend takes.
Numerics: library. Graph-safe on NCCL.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tunedcomm.kernels._host import Launch
from tunedcomm.space import Config, Space, Value
from tunedcomm.spec import Limits, Problem, Variant, register_variant

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


def _infeasible(problem: Problem, config: Config, limits: Limits) -> str | None:
    del problem, config, limits
    return None


def _default(problem: Problem, limits: Limits) -> dict[str, Value]:
    del problem, limits
    return {}


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
