"""What the variants of all_reduce_bias share: inputs are x and bias, launches by address take (x, bias, out)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import triton
import triton.language as tl

from tunedcomm.kernels.common.feasibility import refuse_kernels
from tunedcomm.kernels.common.launch import CompileRequest, ManyLaunch, bind_kernel
from tunedcomm.kernels.common.packets import PACKET_BYTES, packets_of
from tunedcomm.kernels.common.rows import add_extras
from tunedcomm.kernels.common.sync import load_packets
from tunedcomm.space import Config, Value
from tunedcomm.spec import ITEMSIZE, Limits, Problem

if TYPE_CHECKING:
    from tunedcomm.symm.workspace import Workspace

__all__ = ["arrange", "bind_flat", "flat_request", "refuse", "with_bias"]

KERNEL_DTYPES = ("bfloat16", "float16", "float32")


def refuse(problem: Problem, limits: Limits) -> str | None:
    """Why no kernel of ours can run `problem`, whatever the config; None if one might."""
    if reason := refuse_kernels(problem, limits, KERNEL_DTYPES, ("sum",)):
        return reason
    if problem.shape[-1] * ITEMSIZE[problem.dtype] % PACKET_BYTES:
        return f"rows of {problem.shape[-1]} {problem.dtype} are no whole packets of {PACKET_BYTES} bytes"
    return None


def flat_request(kernel: Any, problem: Problem, config: Config) -> CompileRequest:
    """The binary of a kernel over all packets of the message."""
    pdl = bool(config.get("launch_pdl", False))
    constants: dict[str, Value] = {
        "WORLD_SIZE": problem.world_size,
        "DTYPE": problem.dtype,
        "BLOCK": 32 * int(config["num_warps"]) * int(config.get("items", 1)),
    }
    if "launch_pdl" in config:
        constants["PDL"] = pdl
    return CompileRequest.of(kernel, constants, num_warps=int(config["num_warps"]), launch_pdl=pdl)


def arrange(inputs: tuple[Any, ...], outputs: tuple[Any, ...]) -> tuple[int, ...]:
    """Addresses of x, bias and out."""
    return (inputs[0].data_ptr(), inputs[1].data_ptr(), outputs[0].data_ptr())


def bind_flat(
    problem: Problem, config: Config, workspace: Workspace, request: CompileRequest, *extra: int
) -> ManyLaunch:
    """Launch of a kernel `(x, bias, out, total, row, local, q0 … q6, rank, timeout_ns, status, *extra, constants)`."""
    lane = workspace.lanes[problem.mode]
    total = packets_of(problem.nbytes)
    tail = (
        total, total // problem.shape[0], lane.local, *lane.peers, workspace.rank, workspace.timeout_ns,
        workspace.status_argument(problem), *extra,
    )  # fmt: skip
    kernel = bind_kernel(request, int(config["num_blocks"]), workspace.device)
    return ManyLaunch(kernel.fix((None, None, None, *tail)), arrange)


@triton.jit
def with_bias(s, bias, packet, row, mask, DTYPE: tl.constexpr):
    """Sums that were rounded plus the bias of their columns, rounded once more."""
    column = packet.to(tl.int32) % row.to(tl.int32)
    b = load_packets(bias + column.to(tl.int64) * 16, mask)
    return add_extras(s, b, b, DTYPE, True, False)
