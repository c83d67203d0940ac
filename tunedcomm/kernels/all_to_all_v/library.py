"""library: NCCL (gloo on CPUs) through `torch.distributed.all_to_all_single` with the counts as split sizes.

Payloads that the backend has no name for travel as bytes.
Numerics: library (nothing is rounded). Graph-safe on NCCL; a graph replays the counts of its capture.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tunedcomm.kernels.all_to_all.library import LIBRARY as EVEN
from tunedcomm.kernels.all_to_all.library import NCCL_DTYPES
from tunedcomm.kernels.common.feasibility import Launch
from tunedcomm.space import Config
from tunedcomm.spec import ITEMSIZE, Problem, Variant, register_variant

if TYPE_CHECKING:
    from tunedcomm.symm.workspace import Workspace

__all__ = ["LIBRARY"]


def _bind(problem: Problem, config: Config, workspace: Workspace) -> Launch:
    import torch
    import torch.distributed as dist

    del config
    group, exchange = workspace.group, dist.all_to_all_single
    as_bytes = workspace.device.type == "cpu" or problem.dtype not in NCCL_DTYPES
    width = ITEMSIZE[problem.dtype]

    def run(inputs: tuple[Any, ...], outputs: tuple[Any, ...], stream: int) -> None:
        del stream
        x, send, recv = inputs
        exchange(outputs[0].view(-1), x.view(-1), recv.tolist(), send.tolist(), group=group)

    def run_bytes(inputs: tuple[Any, ...], outputs: tuple[Any, ...], stream: int) -> None:
        del stream
        x, send, recv = inputs
        out, given = outputs[0].view(-1).view(torch.uint8), x.view(-1).view(torch.uint8)
        exchange(out, given, [n * width for n in recv.tolist()], [n * width for n in send.tolist()], group=group)

    return run_bytes if as_bytes else run


LIBRARY = register_variant(
    Variant(
        op="all_to_all_v",
        name="library",
        numerics="library",
        summary="NCCL on GPUs, gloo on CPUs",
        space=EVEN.space,
        infeasible=EVEN.infeasible,
        default=EVEN.default,
        bind=_bind,
        num_blocks=EVEN.num_blocks,
    )
)
