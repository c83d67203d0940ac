"""Checks of candidates: compares a launch's results with the library's, and tells errors of missing memory apart."""

from __future__ import annotations

from typing import Any

import torch

from tunedcomm.fp8 import GROUP, WIRES
from tunedcomm.spec import Problem, get_op

# Times an op's tolerance that a kernel's result may differ from the library's.
_ALLOWED = 4
_SIXTEEN_BITS = 2  # bytes
# Smaller tensors are compared on the host: a process spends 0.1 s to load the GPU kernels of its first comparison.
_HOST_BYTES = 256 << 10


def is_out_of_memory(error: BaseException) -> bool:
    """True if the error says that a tensor found no memory, on the GPU or on the host."""
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or "DefaultCPUAllocator" in str(error)


def fresh_copies(
    inputs: tuple[Any, ...], outputs: tuple[torch.Tensor, ...]
) -> tuple[tuple[Any, ...], tuple[torch.Tensor, ...]]:
    """A call's inputs in memory of their own, and memory for its outputs; outputs that are an input stay so."""
    copies = tuple(value.clone() if isinstance(value, torch.Tensor) else value for value in inputs)
    copy_at = {
        value.data_ptr(): copy for value, copy in zip(inputs, copies, strict=True) if isinstance(value, torch.Tensor)
    }
    found = [copy_at.get(output.data_ptr()) for output in outputs]
    return copies, tuple(
        torch.empty_like(output) if copy is None else copy if copy.shape == output.shape else copy.view(output.shape)
        for copy, output in zip(found, outputs, strict=True)
    )


def _to_compare(x: torch.Tensor) -> torch.Tensor:
    return x.cpu() if x.nbytes <= _HOST_BYTES else x


def _norm(x: torch.Tensor) -> float:
    """The norm of a tensor's finite elements."""
    wide = x.float() if x.element_size() <= _SIXTEEN_BITS else x
    return float(torch.linalg.vector_norm(wide[wide.isfinite()], dtype=torch.float64))


def norm_of_input(problem: Problem, inputs: tuple[Any, ...]) -> float:
    """Norm of the first input of a reduction, whose terms may cancel; 0 for other ops. Ask before the launch."""
    return _norm(_to_compare(inputs[0])) if problem.reduction and inputs[0].is_floating_point() else 0.0


def fault_of(
    problem: Problem,
    inputs: tuple[Any, ...],
    outputs: tuple[torch.Tensor, ...],
    expected: tuple[torch.Tensor, ...],
    size: float,
) -> str:
    """The first difference between a kernel's results and the library's, in words; "" if they agree.

    Ops that move bytes must give the same bytes. Others may differ by what both may differ from the exact result, and
    twice that, since real inputs cancel more than random ones. Where the library's sum is not finite, nothing is asked.

    Args:
        problem, inputs: of the call.
        outputs, expected: the kernel's and the library's.
        size: see `norm_of_input`.
    """
    spec = get_op(problem.op)
    tolerance = spec.tolerance_of(problem)
    results = (spec.mask_unspecified(problem, inputs, each)[1] for each in (outputs, expected))
    for index, (output, due) in enumerate(zip(*(map(_to_compare, each) for each in results), strict=True)):
        if tolerance and output.is_floating_point():
            wide = torch.float32 if output.element_size() <= _SIXTEEN_BITS else torch.float64
            finite = due.to(wide).isfinite()
            if problem.scaling in WIRES:  # an infinity makes NaN of its group, which begins somewhere before it
                reach = GROUP - 1
                strange = (~finite).float().view(1, 1, -1)
                finite = torch.nn.functional.max_pool1d(strange, 2 * reach + 1, 1, reach).view(finite.shape) == 0
            got, wanted = output.to(wide)[finite], due.to(wide)[finite]
            error, scale = _norm(got - wanted), max(_norm(wanted), size)
            if not got.isfinite().all() or error > _ALLOWED * tolerance * scale:
                return f"output {index} is off by {error / scale if scale else error:.3g} of its norm"
        else:
            differs = output.reshape(-1).view(torch.uint8) != due.reshape(-1).view(torch.uint8)
            if count := int(differs.view(-1, output.element_size()).any(1).sum()):
                return f"output {index} differs in {count} of {output.numel()} elements"
    return ""
