"""What a model without fused kernels would run instead: NCCL, then the rest as PyTorch's compiler makes it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from tunedcomm.kernels.all_reduce_rms_norm._common import Given, given_of
from tunedcomm.kernels.all_reduce_rms_norm.library import add_and_norm
from tunedcomm.peers import LeftOut, Tensors
from tunedcomm.spec import Problem, get_op

__all__ = ["NCCL_COMPILED_NORM", "compiled_norm"]

NCCL_COMPILED_NORM = "nccl_compiled_norm"


def compiled_norm(problem: Problem, device: torch.device) -> Callable[[Tensors], Tensors]:
    """A launch of NCCL in place, which needs no copy, and of one compiled kernel.

    Raises:
        LeftOut: torch.compile does not work here.
    """
    compiled = torch.compile(add_and_norm, dynamic=False, fullgraph=True)

    def norm(given: Given) -> Any:
        return compiled(given.x, given.weight, given.bias, given.residual, given.scale, given.eps)

    try:
        norm(given_of(problem, get_op(problem.op).make_inputs(problem, 0, 0, "random", device)))
    except Exception as error:  # whatever the compiler raises; the plain library is there all the same
        raise LeftOut(f"torch.compile raised {type(error).__name__}: {str(error).splitlines()[0]}") from error

    def run(inputs: Tensors) -> Tensors:
        given = given_of(problem, inputs)
        dist.all_reduce(given.x)
        return tuple(norm(given))

    return run
