"""Launches of gemm_ar's kernels by their tensors' addresses."""

from __future__ import annotations

from typing import Any

from tunedcomm.kernels.common.launch import BoundKernel, ManyLaunch
from tunedcomm.kernels.gemm.op import wanted_of
from tunedcomm.spec import Problem

__all__ = ["bind_addresses"]


def bind_addresses(problem: Problem, kernel: BoundKernel, tail: tuple[int, ...], *, keep: Any = None) -> ManyLaunch:
    """Launch of a kernel `(a, b, bias, scale_a, scale_b, out, *tail, constants)`; addresses of what is not there are 0.

    Args:
        keep: what has to live as long as the launch.
    """
    launch: Any = kernel.fix((*(None,) * 6, *tail))
    launch.keep = keep
    bias = 2 if wanted_of(problem).bias else None
    scales = (2 + (bias is not None)) if problem.scaling else None

    def arrange(inputs: tuple[Any, ...], outputs: tuple[Any, ...]) -> tuple[int, ...]:
        return (
            inputs[0].data_ptr(),
            inputs[1].data_ptr(),
            0 if bias is None else inputs[bias].data_ptr(),
            0 if scales is None else inputs[scales].data_ptr(),
            0 if scales is None else inputs[scales + 1].data_ptr(),
            outputs[0].data_ptr(),
        )

    return ManyLaunch(launch, arrange)
