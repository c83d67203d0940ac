"""reduce_scatter: rank r gets the elementwise reduction of every rank's r-th chunk.

Base class of its variants, `library`, `in_order` and `host_one_shot`.
"""

from __future__ import annotations

from typing import Any

from tunedcomm.kernels.common.feasibility import Launch
from tunedcomm.kernels.common.host import REDUCED, HostStage, ScatterVariant
from tunedcomm.kernels.common.in_order import InOrderVariant, scatter_in_order
from tunedcomm.kernels.common.packets import alignment_of
from tunedcomm.kernels.common.reference import register_reduction
from tunedcomm.kernels.common.variant import LibraryVariant, ReductionVariant, Workspace, reduce_scatter_single
from tunedcomm.space import Config, Value
from tunedcomm.spec import Problem

REDUCE_SCATTER = register_reduction(
    "reduce_scatter",
    "rank r gets the elementwise sum (avg, max, min) of all ranks' r-th chunks",
    shape_help="number of elements of one rank's result, e.g. 98304",
    largest_mib=128,
    scatters=True,
)


class ReduceScatterVariant(ReductionVariant):
    """A variant of reduce_scatter; its threads share one chunk, which is a rank's result."""

    op = "reduce_scatter"

    def constants(self, problem: Problem, config: Config) -> dict[str, Value]:
        return {**super().constants(problem, config), "ALIGN": alignment_of(problem.nbytes)}


class Library(LibraryVariant, registered=True):
    """NCCL (gloo on CPUs). Takes whatever the backend takes. Numerics: library. Graph-safe on NCCL."""

    op = "reduce_scatter"

    def bind(self, problem: Problem, config: Config, workspace: Workspace) -> Launch:
        import torch.distributed as dist

        scatter = reduce_scatter_single()
        op = getattr(dist.ReduceOp, problem.reduction.upper())
        group, averages = workspace.group, problem.reduction == "avg"

        def run(inputs: tuple[Any, ...], outputs: tuple[Any, ...], stream: int) -> None:
            out = outputs[0].view(-1)
            x = inputs[0].view(-1).to(out.dtype)
            if averages and not x.is_cuda:  # gloo has no average
                scatter(out, x, dist.ReduceOp.SUM, group=group)
                out.div_(problem.world_size)
            else:
                scatter(out, x, op, group=group)

        return run


class InOrder(InOrderVariant, registered=True):
    op = "reduce_scatter"

    def bind(self, problem: Problem, config: Config, workspace: Workspace) -> Launch:
        def run(inputs: tuple[Any, ...], outputs: tuple[Any, ...], stream: int) -> None:
            x = inputs[0].view(problem.world_size, -1)
            scatter_in_order(x, outputs[0].view(-1), problem.reduction, workspace.group)

        return run


class HostOneShot(ScatterVariant, registered=True):
    """A pass through the ring of slots in shared memory (`symm.ring`): every rank sums its segment of all slots.

    Numerics: ordered.
    """

    op = "reduce_scatter"
    name = "host_one_shot"
    summary = "CPU tensors: every rank sums its chunks of all inputs from shared memory"
    dtypes = REDUCED

    def bind(self, problem: Problem, config: Config, workspace: Workspace) -> Launch:
        stage = HostStage(workspace, problem, config, segments=problem.world_size)
        sums = stage.take_sums(problem, stage.ring.rank * stage.chunk)
        return stage.one_pass(stage.put_segments(), sums)
