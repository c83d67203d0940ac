"""library: NCCL (gloo on CPUs) through `torch.distributed`; fall-back and baseline.

Takes every dtype: what the backend does not know travels as bytes. Numerics: ordered (nothing is computed).
Graph-safe on NCCL.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tunedcomm.kernels.common.feasibility import Launch
from tunedcomm.kernels.common.variant import LibraryVariant, all_gather_single
from tunedcomm.space import Config
from tunedcomm.spec import Numerics, Problem

if TYPE_CHECKING:
    from tunedcomm.symm.workspace import Workspace


class Library(LibraryVariant):
    op = "all_gather"
    numerics: Numerics = "ordered"

    def bind(self, problem: Problem, config: Config, workspace: Workspace) -> Launch:
        import torch

        group, gather = workspace.group, all_gather_single()
        known = {getattr(torch, name) for name in self.named_dtypes}

        def run(inputs: tuple[Any, ...], outputs: tuple[Any, ...], stream: int) -> None:
            x, out = inputs[0], outputs[0]
            if x.dtype in known and x.is_cuda:
                gather(out, x, group=group)
            elif x.dtype in known:  # gloo cuts the output along its first dimension
                gather(out.view(-1), x.view(-1), group=group)
            else:
                gather(out.view(-1).view(torch.uint8), x.view(-1).view(torch.uint8), group=group)

        return run


LIBRARY = Library().register()
