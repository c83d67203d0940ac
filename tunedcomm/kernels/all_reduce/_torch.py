"""What the two variants built on PyTorch's symmetric-memory operators share."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tunedcomm.kernels.common.packets import PACKET_BYTES
from tunedcomm.spec import Limits, Problem

if TYPE_CHECKING:
    import torch

    from tunedcomm.symm.workspace import Workspace

__all__ = ["refuse_torch", "staging_of"]


def staging_of(problem: Problem, workspace: Workspace) -> torch.Tensor:
    """The lane's staging as the operators want it: known to PyTorch under the group's own name; collective."""
    import torch
    import torch.distributed._symmetric_memory as symm_mem

    staging = workspace.staging(problem.mode, getattr(torch, problem.dtype), problem.numel)
    symm_mem.rendezvous(workspace.buffers[problem.mode].local, workspace.group)
    return staging


def refuse_torch(problem: Problem, limits: Limits, *, granularity: int) -> str | None:
    """Why PyTorch's operators cannot run `problem`, or None; `granularity` divides the message in bytes."""
    if limits.backend != "cuda" or not limits.symmetric:
        return "PyTorch's symmetric-memory operators need GPUs that address each other's memory"
    if problem.dtype not in ("bfloat16", "float32"):
        return f"PyTorch's operators sum bfloat16 and float32, not {problem.dtype}"
    if problem.reduction != "sum":
        return f"PyTorch's operators do sum, not {problem.reduction}"
    if problem.world_size not in (2, 4, 8):
        return f"PyTorch's operators serve 2, 4 or 8 ranks, not {problem.world_size}"
    if problem.numel == 0 or problem.nbytes % granularity:
        return f"PyTorch's operators want a multiple of {granularity} bytes, not {problem.nbytes}"
    if problem.input_kind == "plain" and problem.nbytes + PACKET_BYTES > limits.staging_bytes:
        return f"{problem.nbytes} bytes exceed the staging of {limits.staging_bytes} bytes (TUNEDCOMM_WORKSPACE_MIB)"
    return None
