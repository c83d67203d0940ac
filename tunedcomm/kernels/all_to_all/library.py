"""library: NCCL (gloo on CPUs) through `torch.distributed.all_to_all_single`; fall-back and baseline of both ops.

The counts of all_to_all_v are its split sizes; a graph replays those of its capture. Payloads that the backend has no
name for travel as bytes. Numerics: library (nothing is rounded). Graph-safe on NCCL.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tunedcomm.kernels.common.feasibility import Launch
from tunedcomm.kernels.common.variant import LibraryVariant
from tunedcomm.space import Config
from tunedcomm.spec import ITEMSIZE, Problem

if TYPE_CHECKING:
    from tunedcomm.symm.workspace import Workspace


class Library(LibraryVariant):
    op = "all_to_all"

    def bind(self, problem: Problem, config: Config, workspace: Workspace) -> Launch:
        import torch
        import torch.distributed as dist

        exchange: Any = dist.all_to_all_single
        group = workspace.group
        as_bytes = workspace.device.type == "cpu" or problem.dtype not in self.named_dtypes
        width = ITEMSIZE[problem.dtype] if as_bytes else 1

        def run(inputs: tuple[Any, ...], outputs: tuple[Any, ...], stream: int) -> None:
            out, x = outputs[0].view(-1), inputs[0].view(-1)
            if as_bytes:
                out, x = out.view(torch.uint8), x.view(torch.uint8)
            # Of all_to_all_v, the elements received from and sent to each rank.
            splits = [[count * width for count in counts.tolist()] for counts in reversed(inputs[1:])]
            exchange(out, x, *splits, group=group)

        return run


class LibraryV(Library):
    op = "all_to_all_v"


LIBRARY = Library().register()
LIBRARY_V = LibraryV().register()
