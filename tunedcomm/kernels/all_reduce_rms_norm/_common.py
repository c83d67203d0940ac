"""What the variants of all_reduce_rms_norm share on the host.

Inputs are x, weight, then bias, residual and scale as far as the problem has them, then eps if it is not the default;
outputs are y and residual_out. Launches by address take them all, in this order, and eps as the bits of an fp32.
"""

from __future__ import annotations

import functools
import struct
from typing import TYPE_CHECKING, Any, NamedTuple

from tunedcomm.kernels.all_reduce_rms_norm.op import EPS
from tunedcomm.kernels.common.feasibility import refuse_kernels
from tunedcomm.kernels.common.launch import CompileRequest, ManyLaunch, bind_kernel
from tunedcomm.kernels.common.packets import PACKET_BYTES, packets_of
from tunedcomm.kernels.common.rows import MAX_ROW_PACKETS, row_block
from tunedcomm.space import Config, Value
from tunedcomm.spec import ITEMSIZE, Limits, Problem

if TYPE_CHECKING:
    from tunedcomm.symm.workspace import Workspace

__all__ = [
    "Given",
    "bind_rows",
    "eps_bits",
    "given_of",
    "many_launch",
    "refuse",
    "row_packets",
    "row_rounds",
    "rows_constants",
    "rows_grid",
    "rows_request",
]

KERNEL_DTYPES = ("bfloat16", "float16", "float32")
_FEWEST_SHARE = 4  # grids below a quarter of the rows that could run side by side never win
NUM_VARYING = 8  # x, weight, bias, residual, scale, out, residual_out, eps


class Given(NamedTuple):
    """Inputs by name; None for what the problem does not have."""

    x: Any
    weight: Any
    bias: Any
    residual: Any
    scale: Any
    eps: float


def given_of(problem: Problem, inputs: tuple[Any, ...]) -> Given:
    """A launch's inputs by name."""
    rest = list(inputs[2:])
    bias = rest.pop(0) if "bias" in problem.layout else None
    residual = rest.pop(0) if "residual" in problem.layout else None
    scale = rest.pop(0) if problem.scaling else None
    return Given(inputs[0], inputs[1], bias, residual, scale, float(rest[0]) if rest else EPS)


@functools.lru_cache(maxsize=64)
def eps_bits(eps: float) -> int:
    """Bits of `eps` in fp32."""
    return int(struct.unpack("<i", struct.pack("<f", eps))[0])


def _address(tensor: Any) -> int:
    return 0 if tensor is None else int(tensor.data_ptr())


def _arrange(problem: Problem, inputs: tuple[Any, ...], outputs: tuple[Any, ...]) -> tuple[int, ...]:
    given = given_of(problem, inputs)
    tensors = (*given[:5], *outputs)
    return (*(_address(tensor) for tensor in tensors), eps_bits(given.eps))


def many_launch(problem: Problem, by_address: Any) -> ManyLaunch:
    """A launch of tensors from one by addresses."""
    return ManyLaunch(by_address, functools.partial(_arrange, problem))


def row_packets(problem: Problem) -> int:
    """Packets of a row, which are full wherever kernels run."""
    return problem.shape[-1] * ITEMSIZE[problem.dtype] // PACKET_BYTES


def refuse(problem: Problem, limits: Limits, config: Config, *, slots: int = 1) -> str | None:
    """Why no kernel of ours can run `problem` with these warps; None if one might.

    Args:
        problem, limits, config: what is asked, where, and with what.
        slots: ranks from which a thread holds packets of a row at once. What fits is what compiles without spills.
    """
    if reason := refuse_kernels(problem, limits, KERNEL_DTYPES, ("sum",)):
        return reason
    if problem.shape[-1] * ITEMSIZE[problem.dtype] % PACKET_BYTES:
        return f"rows of {problem.shape[-1]} {problem.dtype} are no whole packets of {PACKET_BYTES} bytes"
    packets, threads = row_packets(problem), 32 * int(config["num_warps"])
    if packets > MAX_ROW_PACKETS:
        return f"a row of {packets} packets; a block holds at most {MAX_ROW_PACKETS}"
    block = row_block(packets)
    if block < threads:
        return f"{threads} threads for the {packets} packets of a row: some would repeat what others do"
    share = -(-block // threads)
    if limits.backend == "cuda" and (share * slots > (8 if slots == 1 else 16) or block * slots > 2048 * min(slots, 2)):
        return f"{share} packets of a row from {slots} ranks for each of {threads} threads do not fit into registers"
    if limits.backend == "cuda" and threads > 512 and problem.world_size > 4:
        return f"packets from {problem.world_size} ranks do not fit into the 64 registers of each of {threads} threads"
    if config.get("launch_pdl") and not limits.launch_pdl:
        return "programmatic dependent launch is not available here"
    return None


def rows_grid(problem: Problem, config: Config, limits: Limits, *, mixed: bool) -> str | None:
    """Why a grid that must be resident does not suit the rows and packets of a problem, or None.

    Args:
        mixed: blocks wait for what other blocks than their counterparts send.
    """
    blocks, threads = int(config["num_blocks"]), 32 * int(config["num_warps"])
    tokens, packets = problem.shape[0], packets_of(problem.nbytes)
    if blocks > limits.max_blocks:
        return f"{blocks} blocks, but the signal area has {limits.max_blocks} rows"
    if limits.backend == "cuda" and blocks > limits.num_sms * max(1, 512 // threads):
        return f"{blocks} blocks of {threads} threads do not all fit on {limits.num_sms} SMs at once"
    if limits.backend == "host" and blocks > 4:
        return "interpreted blocks run one after another: more than 4 only cost time"
    if limits.backend == "host" and mixed and blocks > 1:
        return "interpreted blocks run one after another, so none may wait for a later one: only num_blocks=1"
    if blocks >= 2 * max(tokens, -(-packets // threads)):
        return f"{tokens} rows of {packets} packets in all leave half of {blocks} blocks without work"
    if limits.backend == "cuda" and _FEWEST_SHARE * blocks < min(tokens, limits.num_sms):
        return f"{blocks} blocks leave most SMs idle at {tokens} rows"
    return None


def row_rounds(problem: Problem, config: Config) -> int:
    """How often a grid goes round whose blocks take a row each."""
    return -(-problem.shape[0] // int(config["num_blocks"]))


def rows_constants(problem: Problem) -> dict[str, Value]:
    """Constants that every kernel over rows takes."""
    return {
        "DTYPE": problem.dtype,
        "BIAS": "bias" in problem.layout,
        "RESIDUAL": "residual" in problem.layout,
        "FP8": problem.scaling == "fp8",
        "BLOCK": row_block(row_packets(problem)),
    }


def rows_request(kernel: Any, problem: Problem, config: Config) -> CompileRequest:
    """The binary of a kernel that talks to peers."""
    threads = 32 * int(config["num_warps"])
    constants = {**rows_constants(problem), "WORLD_SIZE": problem.world_size}
    if "THREADS" in kernel.arg_names:
        constants["THREADS"] = threads
    pdl = bool(config.get("launch_pdl", False))
    if "launch_pdl" in config:
        constants["PDL"] = pdl
    return CompileRequest.of(kernel, constants, num_warps=int(config["num_warps"]), launch_pdl=pdl)


def bind_rows(
    problem: Problem, config: Config, workspace: Workspace, request: CompileRequest, *extra: int
) -> ManyLaunch:
    """Launch of a kernel `(what varies, tokens, row, local, q0 … q6, rank, timeout_ns, status, *extra, constants)`."""
    lane = workspace.lanes[problem.mode]
    tail = (
        problem.shape[0], row_packets(problem), lane.local, *lane.peers, workspace.rank, workspace.timeout_ns,
        workspace.status_argument(problem), *extra,
    )  # fmt: skip
    kernel = bind_kernel(request, int(config["num_blocks"]), workspace.device)
    return many_launch(problem, kernel.fix((*(None,) * NUM_VARYING, *tail)))
