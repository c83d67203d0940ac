"""reduce_scatter: rank r gets the elementwise reduction of every rank's r-th chunk; the base class of its variants."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tunedcomm.kernels.common.feasibility import Launch, refuse_kernels
from tunedcomm.kernels.common.packets import alignment_of
from tunedcomm.kernels.common.reference import ordered_sum, outputs_like, powers_of_two, reduced, summands
from tunedcomm.kernels.common.variant import KernelVariant, LibraryVariant, Workspace, reduce_scatter_single
from tunedcomm.metrics import busbw_factor
from tunedcomm.space import Config, Value
from tunedcomm.spec import ITEMSIZE, Limits, OpSpec, Problem, register_op

if TYPE_CHECKING:
    import torch

KERNEL_DTYPES = ("bfloat16", "float16", "float32")


def _make_inputs(problem: Problem, rank: int, seed: int, kind: str, device: Any) -> tuple[torch.Tensor]:
    return (summands(problem.numel * problem.world_size, problem.dtype, rank, seed, kind, device),)


def _chunks(problem: Problem, inputs: Sequence[tuple[Any, ...]], rank: int) -> list[torch.Tensor]:
    return [values[rank * problem.numel : (rank + 1) * problem.numel] for (values,) in inputs]


def _reference(problem: Problem, inputs: Sequence[tuple[Any, ...]], rank: int) -> tuple[torch.Tensor]:
    import torch

    return (reduced(_chunks(problem, inputs, rank), problem.reduction, torch.float64),)


def _ordered_reference(problem: Problem, inputs: Sequence[tuple[Any, ...]], rank: int) -> tuple[torch.Tensor]:
    return (ordered_sum(_chunks(problem, inputs, rank), problem.reduction),)


REDUCE_SCATTER = register_op(
    OpSpec(
        name="reduce_scatter",
        summary="rank r gets the elementwise sum (avg, max, min) of all ranks' r-th chunks",
        reductions=("sum", "avg", "max", "min"),
        dtypes=KERNEL_DTYPES,
        shape_help="number of elements of one rank's result, e.g. 98304",
        rank_of_shape=1,
        make_inputs=_make_inputs,
        make_outputs=outputs_like,
        reference=_reference,
        # ‖out − ref‖ / ‖ref‖ of a sum of up to 8 ranks: a few roundings in the payload's dtype.
        tolerance={"bfloat16": 8e-3, "float16": 1e-3, "float32": 1e-6, "float64": 1e-14},
        message_bytes=lambda problem: problem.nbytes,
        busbw_factor=lambda world_size: busbw_factor("reduce_scatter", world_size),
        default_shapes=functools.partial(powers_of_two, largest_mib=128),
        ordered_reference=_ordered_reference,
    )
)


class ReduceScatterVariant(KernelVariant):
    """A variant of reduce_scatter; its threads share one chunk, which is a rank's result."""

    op = "reduce_scatter"

    def refuse(self, problem: Problem, limits: Limits) -> str | None:
        return refuse_kernels(problem, limits, KERNEL_DTYPES, ("sum", "avg"))

    def constants(self, problem: Problem, config: Config) -> dict[str, Value]:
        return {
            "WORLD_SIZE": problem.world_size,
            "DTYPE": problem.dtype,
            "WIDTH": ITEMSIZE[problem.dtype],
            "AVG": problem.reduction == "avg",
            "ALIGN": alignment_of(problem.nbytes),
            "BLOCK": 32 * int(config["num_warps"]) * int(config.get("items", 1)),
        }


class Library(LibraryVariant):
    """NCCL (gloo on CPUs). Takes whatever the backend takes. Numerics: library. Graph-safe on NCCL."""

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
