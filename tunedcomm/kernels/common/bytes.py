"""What variants that move payloads and do not reduce them share on the host; their kernels see bytes, no elements.

Such kernels take `(x, out, nbytes, …)` with the size of one chunk in bytes and the constant `ALIGN` (see `_move`), so
that one binary serves every dtype.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from tunedcomm.kernels.common.feasibility import Launch, grid_rounds, launch_flagged, refuse_kernels
from tunedcomm.kernels.common.launch import AddressLaunch, CompileRequest, bind_kernel
from tunedcomm.kernels.common.move import alignment_of
from tunedcomm.kernels.common.packets import packets_of
from tunedcomm.space import Config, Value
from tunedcomm.spec import DTYPES, Limits, Problem

if TYPE_CHECKING:
    from tunedcomm.symm.workspace import Workspace

__all__ = ["bind_bytes", "bind_bytes_flagged", "byte_request", "chunk_rounds", "refuse_moves"]


def refuse_moves(problem: Problem, limits: Limits) -> str | None:
    """Why no kernel of ours can run `problem`, whatever the config; None if one might."""
    return refuse_kernels(problem, limits, DTYPES, ("",))


def chunk_rounds(problem: Problem, config: Config) -> int:
    """How often a grid goes round whose threads share one chunk."""
    return grid_rounds(packets_of(problem.nbytes), config)


def byte_request(
    kernel: Any, problem: Problem, config: Config, more: Mapping[str, Value], *, launch_pdl: bool = False
) -> CompileRequest:
    """The binary of a kernel that moves bytes; `more` holds the constants besides WORLD_SIZE, ALIGN and BLOCK."""
    constants = {
        "WORLD_SIZE": problem.world_size,
        "ALIGN": alignment_of(problem.nbytes),
        "BLOCK": 32 * int(config["num_warps"]) * int(config.get("items", 1)),
        **more,
    }
    return CompileRequest.of(kernel, constants, num_warps=int(config["num_warps"]), launch_pdl=launch_pdl)


def _head(problem: Problem, workspace: Workspace) -> tuple[int | None, ...]:
    lane = workspace.lanes[problem.mode]
    lane_arguments = (problem.nbytes, lane.local, *lane.peers, workspace.rank, workspace.timeout_ns)
    return (None, None, *lane_arguments, workspace.status_argument(problem))


def bind_bytes(problem: Problem, config: Config, workspace: Workspace, request: CompileRequest, *extra: int) -> Launch:
    """Launch of a kernel `(x, out, nbytes, local, q0 … q6, rank, timeout_ns, status, *extra, constants)`."""
    kernel = bind_kernel(request, int(config["num_blocks"]), workspace.device)
    return AddressLaunch(kernel.fix((*_head(problem, workspace), *extra)))


def bind_bytes_flagged(
    problem: Problem, config: Config, workspace: Workspace, request: CompileRequest, *extra: int
) -> Launch:
    """Launch of a kernel like `bind_bytes`'s with the peers' addresses of the input, x0 … x6, before `extra`.

    The request's constant SYMMETRIC says whether the input is addressed on the peers; where it is not, they are 0.
    """
    return launch_flagged(config, workspace, request, _head(problem, workspace), extra)
