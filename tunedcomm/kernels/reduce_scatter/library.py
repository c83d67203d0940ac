"""library: NCCL (gloo on CPUs) through `torch.distributed.reduce_scatter_tensor`; every problem's fall-back.

Takes whatever the backend takes. Numerics: library. Graph-safe on NCCL.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tunedcomm.kernels._host import Launch
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
    ops = {"sum": dist.ReduceOp.SUM, "avg": dist.ReduceOp.AVG, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}
    reduction, group, op, world_size = problem.reduction, workspace.group, ops[problem.reduction], problem.world_size

    def run(inputs: tuple[Any, ...], outputs: tuple[Any, ...], stream: int) -> None:
        del stream
        x, out = inputs[0].view(-1), outputs[0].view(-1)
        if reduction == "avg" and not x.is_cuda:  # gloo has no average
            dist.reduce_scatter_tensor(out, x, dist.ReduceOp.SUM, group=group)
            out.div_(world_size)
        else:
            dist.reduce_scatter_tensor(out, x, op, group=group)

    return run


LIBRARY = register_variant(
    Variant(
        op="reduce_scatter",
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
