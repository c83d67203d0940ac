"""library: NCCL (gloo on CPUs), then PyTorch operators one by one; every problem's fall-back and baseline.

Sums as the backend does, and takes h and y by the same rounding points as the kernels, with the norm's sum in
PyTorch's order. fp64 is computed in fp64.

Numerics: library. Graph-safe on NCCL.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tunedcomm.kernels.all_reduce.library import library_reduction
from tunedcomm.kernels.all_reduce_rms_norm.op import E4M3_MAX, given_of
from tunedcomm.kernels.common.feasibility import Launch
from tunedcomm.kernels.common.variant import LibraryVariant
from tunedcomm.space import Config
from tunedcomm.spec import Problem

if TYPE_CHECKING:
    import torch

    from tunedcomm.symm.workspace import Workspace


def add_and_norm(
    s: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    scale: torch.Tensor | None,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(y, h) of a sum, as a model would write it."""
    import torch

    wide = torch.promote_types(s.dtype, torch.float32)
    h = s
    if bias is not None or residual is not None:
        total = s.to(wide)
        if bias is not None:
            total = total + bias
        if residual is not None:
            total = total + residual
        h = total.to(s.dtype)
    held = h.to(wide)
    y = held * (held.square().mean(-1, keepdim=True) + eps).rsqrt() * weight
    if scale is not None:
        return (y / scale).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn), h
    return y.to(s.dtype), h


class Library(LibraryVariant):
    op = "all_reduce_rms_norm"
    summary = "NCCL on GPUs, gloo on CPUs, then PyTorch operators"

    def bind(self, problem: Problem, config: Config, workspace: Workspace) -> Launch:
        reduce = library_reduction("sum", workspace.group)

        def run(inputs: tuple[Any, ...], outputs: tuple[Any, ...], stream: int) -> None:
            given = given_of(problem, inputs)
            s = given.x.clone()
            reduce(s)
            s = s.reshape(problem.shape)
            extra = None if given.residual is None else given.residual.reshape(problem.shape)
            y, h = add_and_norm(s, given.weight, given.bias, extra, given.scale, given.eps)
            outputs[0].copy_(y.reshape(outputs[0].shape))
            outputs[1].copy_(h.reshape(outputs[1].shape))

        return run


LIBRARY = Library().register()
