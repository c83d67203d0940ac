"""What a model without fused kernels would run instead: NCCL, then the rest as PyTorch's compiler makes it."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist

from tunedcomm.cli._output import note
from tunedcomm.kernels.all_reduce_rms_norm._common import given_of
from tunedcomm.kernels.all_reduce_rms_norm.library import add_and_norm
from tunedcomm.spec import Problem, get_op

__all__ = ["NCCL_COMPILED_NORM", "compiled_norm"]

NCCL_COMPILED_NORM = "nccl_compiled_norm"
_Tensors = tuple[torch.Tensor, ...]


def compiled_norm(
    problem: Problem, device: torch.device
) -> Iterator[tuple[Callable[[_Tensors], None], Callable[[], None], Callable[[], _Tensors]]]:
    """(load, run, result) of NCCL in place, which needs no copy, and one compiled kernel; nothing where that fails."""
    held: _Tensors = get_op(problem.op).make_inputs(problem, 0, 0, "random", device)
    given = given_of(problem, held)
    compiled = torch.compile(add_and_norm, dynamic=False, fullgraph=True)
    arguments = (given.x, given.weight, given.bias, given.residual, given.scale, given.eps)
    try:
        found = [compiled(*arguments)]
    except Exception as error:  # noqa: BLE001 - whatever the compiler raises; the plain library is there all the same
        note(f"no {NCCL_COMPILED_NORM}: torch.compile raised {type(error).__name__}: {str(error).splitlines()[0]}")
        return

    def load(values: _Tensors) -> None:
        for target, value in zip(held, values, strict=True):
            target.copy_(value)

    def run() -> None:
        dist.all_reduce(given.x)
        found[0] = compiled(*arguments)

    yield load, run, lambda: found[0]
