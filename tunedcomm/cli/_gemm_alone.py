"""The GEMM of a fused problem by the library alone: what a fused kernel would take if communication cost nothing."""

from __future__ import annotations

import torch

from tunedcomm.kernels.gemm.problem import operands_of, product, product_reference, wanted_of
from tunedcomm.spec import Problem

__all__ = ["NAME", "inputs_of", "output_of", "reference", "run", "suits"]

NAME = "cublas"
_Tensors = tuple[torch.Tensor, ...]


def suits(problem: Problem) -> bool:
    """True for problems with a GEMM in them."""
    return problem.op in ("ag_gemm", "gemm_ar", "gemm_rs")


def inputs_of(problem: Problem, inputs: _Tensors) -> _Tensors:
    """Operands of the whole GEMM; where A is gathered the own rows stand for everyone's."""
    if problem.op != "ag_gemm":
        return inputs
    repeated = (problem.world_size, 1)
    a, *rest = inputs
    if problem.scaling == "rowwise":
        rest[-2] = rest[-2].repeat(repeated)
    return a.repeat(repeated), *rest


def output_of(problem: Problem, inputs: _Tensors) -> torch.Tensor:
    """Where the product goes."""
    dtype = getattr(torch, wanted_of(problem).dtype)
    return torch.empty(problem.shape[:2], dtype=dtype, device=inputs[0].device)


def run(problem: Problem, inputs: _Tensors, out: torch.Tensor) -> None:
    """One product, without a bias, on the current stream."""
    product(problem, operands_of(problem, inputs), out)


def reference(problem: Problem, inputs: _Tensors) -> _Tensors:
    """The product in float64."""
    return (product_reference(problem, inputs),)
