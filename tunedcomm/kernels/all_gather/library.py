"""library: NCCL (gloo on CPUs) through `torch.distributed`; fall-back and baseline.

Takes every dtype: what the backend does not know travels as bytes. Numerics: ordered (nothing is computed).
Graph-safe on NCCL.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tunedcomm.kernels.common.feasibility import Launch
from tunedcomm.kernels.common.variant import all_gather_single, register_library
from tunedcomm.space import Config
from tunedcomm.spec import Problem

if TYPE_CHECKING:
    from tunedcomm.symm.workspace import Workspace

__all__ = ["LIBRARY"]


def _bind(problem: Problem, config: Config, workspace: Workspace) -> Launch:
    import torch

    del problem, config
    group, gather = workspace.group, all_gather_single()
    # What NCCL and gloo both have; tensors of other dtypes are seen as bytes.
    known = {torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.int8, torch.uint8, torch.int32}
    known.add(torch.int64)

    def run(inputs: tuple[Any, ...], outputs: tuple[Any, ...], stream: int) -> None:
        del stream
        x, out = inputs[0], outputs[0]
        if x.dtype in known and x.is_cuda:
            gather(out, x, group=group)
        elif x.dtype in known:  # gloo cuts the output along its first dimension
            gather(out.view(-1), x.view(-1), group=group)
        else:
            gather(out.view(-1).view(torch.uint8), x.view(-1).view(torch.uint8), group=group)

    return run


LIBRARY = register_library("all_gather", _bind, numerics="ordered")
