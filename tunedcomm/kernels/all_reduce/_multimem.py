"""What the two multimem variants share on the host: when they may run, and their launch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tunedcomm.kernels.all_reduce._common import constants_of, refuse
from tunedcomm.kernels.common.feasibility import Launch, bind_plain, blocks_and_threads, refuse_multicast
from tunedcomm.kernels.common.launch import CompileRequest
from tunedcomm.space import Choice, Config, PowerOfTwo, Space
from tunedcomm.spec import Limits, Problem

if TYPE_CHECKING:
    from tunedcomm.symm.workspace import Workspace

__all__ = ["SPACE", "bind_multimem", "refuse_multimem", "request_multimem"]

SPACE = Space(
    {
        "num_blocks": Choice(1, 2, 4, 8, 16, 32, 64, 132),
        "num_warps": PowerOfTwo(4, 16),
    }
)


def refuse_multimem(problem: Problem, config: Config, limits: Limits, work: int, area_bytes: int) -> str | None:
    """Why a multimem variant cannot run `problem`, or None; `work` is its packets a rank, `area_bytes` its staging."""
    if reason := refuse_multicast(limits) or refuse(problem, limits):
        return reason
    if problem.nbytes + 16 * problem.world_size > area_bytes:
        return f"{problem.nbytes} bytes exceed the staging of {area_bytes} bytes"
    return blocks_and_threads(config, limits, work, most_rounds=1 << 16)


def request_multimem(kernel: Any, problem: Problem, config: Config) -> CompileRequest:
    """The binary of a multimem kernel."""
    return CompileRequest.of(kernel, constants_of(problem, config), num_warps=int(config["num_warps"]))


def bind_multimem(
    problem: Problem, config: Config, workspace: Workspace, request: CompileRequest, *extra: int
) -> Launch:
    """Launch with the lane's multicast address; 0 stands for the emulation under the interpreter."""
    multicast = workspace.lanes[problem.mode].multicast
    return bind_plain(problem, config, workspace, request, multicast, *extra)
