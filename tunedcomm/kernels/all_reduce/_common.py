"""What the all_reduce variants share on the host."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tunedcomm.kernels.common.feasibility import Launch, bind_plain, grid_rounds, refuse_kernels
from tunedcomm.kernels.common.launch import CompileRequest
from tunedcomm.kernels.common.packets import PACKET_BYTES, packets_of
from tunedcomm.kernels.common.variant import KernelVariant
from tunedcomm.space import Config, Value
from tunedcomm.spec import ITEMSIZE, Limits, Problem

if TYPE_CHECKING:
    from tunedcomm.symm.workspace import Workspace

KERNEL_DTYPES = ("bfloat16", "float16", "float32")


def slice_packets(problem: Problem) -> int:
    """Packets of one rank's share of the message."""
    return -(-packets_of(problem.nbytes) // problem.world_size)


def refuse(problem: Problem, limits: Limits) -> str | None:
    """Why no kernel of ours can run `problem`, whatever the config; None if one might."""
    return refuse_kernels(problem, limits, KERNEL_DTYPES, ("sum", "avg"))


def message_rounds(problem: Problem, config: Config) -> int:
    """How often a grid goes round whose threads share the whole message."""
    return grid_rounds(packets_of(problem.nbytes), config)


def slice_rounds(problem: Problem, config: Config) -> int:
    """How often a grid goes round whose threads share one rank's share of the message."""
    return grid_rounds(slice_packets(problem), config)


def constants_of(problem: Problem, config: Config) -> dict[str, Value]:
    """Constants that every all_reduce kernel takes."""
    return {
        "WORLD_SIZE": problem.world_size,
        "DTYPE": problem.dtype,
        "WIDTH": ITEMSIZE[problem.dtype],
        "AVG": problem.reduction == "avg",
        "TAIL": problem.nbytes % PACKET_BYTES != 0,
        "BLOCK": 32 * int(config["num_warps"]) * int(config.get("items", 1)),
    }


def packet_request(kernel: Any, problem: Problem, config: Config) -> CompileRequest:
    """The binary of a packet kernel, whose configs have the axis `launch_pdl`."""
    pdl = bool(config["launch_pdl"])
    constants = {**constants_of(problem, config), "PDL": pdl}
    return CompileRequest.of(kernel, constants, num_warps=int(config["num_warps"]), launch_pdl=pdl)


def bind_packets(kernel: Any, problem: Problem, config: Config, workspace: Workspace) -> Launch:
    """Launch of a packet kernel on the lane's arena."""
    layout = workspace.layout
    request = packet_request(kernel, problem, config)
    return bind_plain(problem, config, workspace, request, layout.arena, layout.stage_bytes)


class AllReduceVariant(KernelVariant):
    """A variant of all_reduce; its threads share the whole message, or each rank's slice of it (`sliced`)."""

    op = "all_reduce"
    sliced = False

    def constants(self, problem: Problem, config: Config) -> dict[str, Value]:
        return constants_of(problem, config)

    def work_packets(self, problem: Problem) -> int:
        return slice_packets(problem) if self.sliced else packets_of(problem.nbytes)
