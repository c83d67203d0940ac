"""reduce_scatter: rank r gets the elementwise reduction of every rank's r-th chunk.

Base class of its variants, `library`, `in_order` and `host_one_shot`.
"""

from __future__ import annotations

from typing import Any

from tunedcomm.kernels.common.feasibility import Launch, refuse_kernels, refuse_result
from tunedcomm.kernels.common.host import REDUCED, HostStage, ScatterVariant
from tunedcomm.kernels.common.in_order import InOrderVariant, scatter_in_order
from tunedcomm.kernels.common.packets import alignment_of
from tunedcomm.kernels.common.reference import SUM_DTYPES, register_reduction
from tunedcomm.kernels.common.variant import KernelVariant, LibraryVariant, Workspace, reduce_scatter_single
from tunedcomm.space import Config, Value
from tunedcomm.spec import ITEMSIZE, Limits, Problem

REDUCE_SCATTER = register_reduction(
    "reduce_scatter",
    "rank r gets the elementwise sum (avg, max, min) of all ranks' r-th chunks",
    shape_help="number of elements of one rank's result, e.g. 98304",
    largest_mib=128,
    scatters=True,
)


class ReduceScatterVariant(KernelVariant):
    """A variant of reduce_scatter; its threads share one chunk, which is a rank's result."""

    op = "reduce_scatter"

    wide = False  # results are fp32, and payloads 16-bit floats

    def refuse(self, problem: Problem, limits: Limits) -> str | None:
        dtypes = SUM_DTYPES[:2] if self.wide else SUM_DTYPES
        return refuse_result(problem, wide=self.wide) or refuse_kernels(problem, limits, dtypes, ("sum", "avg"))

    def constants(self, problem: Problem, config: Config) -> dict[str, Value]:
        return {
            "WORLD_SIZE": problem.world_size,
            "DTYPE": problem.dtype,
            "WIDTH": ITEMSIZE[problem.dtype],
            "AVG": problem.reduction == "avg",
            "ALIGN": alignment_of(problem.nbytes),
            "BLOCK": 32 * int(config["num_warps"]) * int(config.get("items", 1)),
        }


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
