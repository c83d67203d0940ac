"""all_reduce: every rank gets the elementwise reduction of all ranks' inputs; the base class of its variants."""

from __future__ import annotations

from tunedcomm.kernels.common.feasibility import packets_a_block, refuse_kernels
from tunedcomm.kernels.common.packets import PACKET_BYTES, packets_of
from tunedcomm.kernels.common.reference import register_reduction
from tunedcomm.kernels.common.variant import KernelVariant
from tunedcomm.space import Config, Value
from tunedcomm.spec import ITEMSIZE, Limits, Problem

KERNEL_DTYPES = ("bfloat16", "float16", "float32")

ALL_REDUCE = register_reduction(
    "all_reduce",
    "every rank gets the elementwise sum (avg, max, min) of all ranks' inputs",
    shape_help="number of elements of the tensor, e.g. 98304",
    largest_mib=256,
    scatters=False,
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
