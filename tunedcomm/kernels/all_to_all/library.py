"""library: NCCL (gloo on CPUs) through `torch.distributed.all_to_all_single`; every problem's fall-back and baseline.

Payloads that the backend has no name for travel as bytes.
Numerics: library (nothing is rounded). Graph-safe on NCCL.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tunedcomm.kernels.common.feasibility import Launch
from tunedcomm.kernels.common.variant import register_library
from tunedcomm.space import Config
from tunedcomm.spec import Problem

if TYPE_CHECKING:
    from tunedcomm.symm.workspace import Workspace

__all__ = ["LIBRARY", "NCCL_DTYPES"]

NCCL_DTYPES = ("bfloat16", "float16", "float32", "float64", "int8", "uint8", "int32", "int64")


def _bind(problem: Problem, config: Config, workspace: Workspace) -> Launch:
    import torch
    import torch.distributed as dist

    del config
    group, exchange = workspace.group, dist.all_to_all_single
    as_bytes = workspace.device.type == "cpu" or problem.dtype not in NCCL_DTYPES

    def run(inputs: tuple[Any, ...], outputs: tuple[Any, ...], stream: int) -> None:
        del stream
        exchange(outputs[0].view(-1), inputs[0].view(-1), group=group)

    def run_bytes(inputs: tuple[Any, ...], outputs: tuple[Any, ...], stream: int) -> None:
        del stream
        exchange(outputs[0].view(-1).view(torch.uint8), inputs[0].view(-1).view(torch.uint8), group=group)

    return run_bytes if as_bytes else run


LIBRARY = register_library("all_to_all", _bind)
