"""library: NCCL (gloo on CPUs), then PyTorch's addition; every problem's fall-back and baseline.

Numerics: library. Graph-safe on NCCL.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tunedcomm.kernels.all_reduce.library import library_reduction
from tunedcomm.kernels.common.feasibility import Launch
from tunedcomm.kernels.common.library import register_library
from tunedcomm.space import Config
from tunedcomm.spec import Problem

if TYPE_CHECKING:
    from tunedcomm.symm.workspace import Workspace

__all__ = ["LIBRARY"]


def _bind(problem: Problem, config: Config, workspace: Workspace) -> Launch:
    del problem, config
    reduce = library_reduction("sum", workspace.group)

    def run(inputs: tuple[Any, ...], outputs: tuple[Any, ...], stream: int) -> None:
        del stream
        (x, bias), (out,) = inputs, outputs
        if out is not x:
            out.copy_(x)
        reduce(out)
        out.add_(bias)

    return run


LIBRARY = register_library("all_reduce_bias", _bind, summary="NCCL on GPUs, gloo on CPUs, then an addition")
