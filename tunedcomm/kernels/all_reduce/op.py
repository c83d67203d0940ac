"""all_reduce: every rank gets the elementwise reduction of all ranks' inputs; the base class of its variants.

`library` is NCCL on GPUs, gloo on CPUs, and takes whatever the backend takes (numerics: library; graph-safe on NCCL).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tunedcomm.kernels.common.feasibility import Launch, refuse_kernels
from tunedcomm.kernels.common.in_order import InOrderVariant, reduce_in_order
from tunedcomm.kernels.common.packets import PACKET_BYTES, packets_of
from tunedcomm.kernels.common.reference import SUM_DTYPES, register_reduction
from tunedcomm.kernels.common.variant import LibraryVariant, ReductionVariant, Workspace
from tunedcomm.space import Config, Value
from tunedcomm.spec import ITEMSIZE, Limits, Problem

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

ALL_REDUCE = register_reduction(
    "all_reduce",
    "every rank gets the elementwise sum (avg, max, min) of all ranks' inputs",
    shape_help="number of elements of the tensor, e.g. 98304",
    largest_mib=256,
    scatters=False,
    host_largest=64 << 20,
)


def slice_packets(problem: Problem) -> int:
    """Packets of one rank's share of the message."""
    return -(-packets_of(problem.nbytes) // problem.world_size)


def refuse_empty_slices(problem: Problem) -> str | None:
    """Return why not every rank has packets to sum, or None."""
    packets = packets_of(problem.nbytes)
    if (problem.world_size - 1) * slice_packets(problem) >= packets:
        return f"{packets} packets leave some of {problem.world_size} ranks without a slice"
    return None


def refuse_rows(problem: Problem, limits: Limits) -> str | None:
    """Return why no kernel can sum the rows of a matrix, which must be whole packets; None if one might."""
    if reason := refuse_kernels(problem, limits, SUM_DTYPES, ("sum",)):
        return reason
    if problem.shape[-1] * ITEMSIZE[problem.dtype] % PACKET_BYTES:
        return f"rows of {problem.shape[-1]} {problem.dtype} are not whole packets of {PACKET_BYTES} bytes"
    return None


class AllReduceVariant(ReductionVariant):
    """A variant of all_reduce; its threads share the whole message, or each rank's slice of it (`sliced`)."""

    op = "all_reduce"
    sliced = False

    def constants(self, problem: Problem, config: Config) -> dict[str, Value]:
        return {**super().constants(problem, config), "TAIL": problem.nbytes % PACKET_BYTES != 0}

    def work_packets(self, problem: Problem) -> int:
        return slice_packets(problem) if self.sliced else packets_of(problem.nbytes)


def library_reduction(reduction: str, group: dist.ProcessGroup) -> Callable[[torch.Tensor], None]:
    """A function that reduces a tensor in place over `group`, on the current stream."""
    import torch.distributed as dist

    all_reduce, op = dist.all_reduce, getattr(dist.ReduceOp, reduction.upper())

    def reduce(out: torch.Tensor) -> None:
        if reduction == "avg" and not out.is_cuda:  # gloo has no average
            all_reduce(out, dist.ReduceOp.SUM, group=group)
            out.div_(dist.get_world_size(group))
        else:
            all_reduce(out, op, group=group)

    return reduce


class Library(LibraryVariant, registered=True):
    op = "all_reduce"

    def bind(self, problem: Problem, config: Config, workspace: Workspace) -> Launch:
        reduce = library_reduction(problem.reduction, workspace.group)

        def run(inputs: tuple[Any, ...], outputs: tuple[Any, ...], stream: int) -> None:
            if outputs[0] is not inputs[0]:
                outputs[0].copy_(inputs[0])
            reduce(outputs[0])

        return run


class InOrder(InOrderVariant, registered=True):
    op = "all_reduce"

    def bind(self, problem: Problem, config: Config, workspace: Workspace) -> Launch:
        def run(inputs: tuple[Any, ...], outputs: tuple[Any, ...], stream: int) -> None:
            reduce_in_order(inputs[0].view(-1), outputs[0].view(-1), problem.reduction, workspace.group)

        return run
