"""all_reduce: every rank gets the elementwise reduction of all ranks' inputs; the base class of its variants."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tunedcomm.kernels.common.feasibility import packets_a_block, refuse_kernels
from tunedcomm.kernels.common.packets import PACKET_BYTES, packets_of
from tunedcomm.kernels.common.reference import ordered_sum, outputs_like, powers_of_two, reduced, summands
from tunedcomm.kernels.common.variant import KernelVariant
from tunedcomm.metrics import busbw_factor
from tunedcomm.space import Config, Value
from tunedcomm.spec import ITEMSIZE, Limits, OpSpec, Problem, register_op

if TYPE_CHECKING:
    import torch

KERNEL_DTYPES = ("bfloat16", "float16", "float32")


def _make_inputs(problem: Problem, rank: int, seed: int, kind: str, device: Any) -> tuple[torch.Tensor]:
    return (summands(problem.numel, problem.dtype, rank, seed, kind, device),)


def _reference(problem: Problem, inputs: Sequence[tuple[Any, ...]], rank: int) -> tuple[torch.Tensor]:
    import torch

    return (reduced([values for (values,) in inputs], problem.reduction, torch.float64),)


def _ordered_reference(problem: Problem, inputs: Sequence[tuple[Any, ...]], rank: int) -> tuple[torch.Tensor]:
    return (ordered_sum([values for (values,) in inputs], problem.reduction),)


ALL_REDUCE = register_op(
    OpSpec(
        name="all_reduce",
        summary="every rank gets the elementwise sum (avg, max, min) of all ranks' inputs",
        reductions=("sum", "avg", "max", "min"),
        dtypes=("bfloat16", "float16", "float32"),
        shape_help="number of elements of the tensor, e.g. 98304",
        rank_of_shape=1,
        make_inputs=_make_inputs,
        make_outputs=outputs_like,
        reference=_reference,
        # ‖out − ref‖ / ‖ref‖ of a sum of up to 8 ranks: a few roundings in the payload's dtype.
        tolerance={"bfloat16": 8e-3, "float16": 1e-3, "float32": 1e-6, "float64": 1e-14},
        message_bytes=lambda problem: problem.nbytes,
        busbw_factor=lambda world_size: busbw_factor("all_reduce", world_size),
        default_shapes=functools.partial(powers_of_two, largest_mib=256),
        ordered_reference=_ordered_reference,
        in_place=True,
    )
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
    if reason := refuse_kernels(problem, limits, KERNEL_DTYPES, ("sum",)):
        return reason
    if problem.shape[-1] * ITEMSIZE[problem.dtype] % PACKET_BYTES:
        return f"rows of {problem.shape[-1]} {problem.dtype} are no whole packets of {PACKET_BYTES} bytes"
    return None


class AllReduceVariant(KernelVariant):
    """A variant of all_reduce; its threads share the whole message, or each rank's slice of it (`sliced`)."""

    op = "all_reduce"
    sliced = False

    def refuse(self, problem: Problem, limits: Limits) -> str | None:
        return refuse_kernels(problem, limits, KERNEL_DTYPES, ("sum", "avg"))

    def constants(self, problem: Problem, config: Config) -> dict[str, Value]:
        return {
            "WORLD_SIZE": problem.world_size,
            "DTYPE": problem.dtype,
            "WIDTH": ITEMSIZE[problem.dtype],
            "AVG": problem.reduction == "avg",
            "TAIL": problem.nbytes % PACKET_BYTES != 0,
            "BLOCK": packets_a_block(config),
        }

    def work_packets(self, problem: Problem) -> int:
        return slice_packets(problem) if self.sliced else packets_of(problem.nbytes)
