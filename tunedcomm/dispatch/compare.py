"""Checks of candidates: compares a launch's results with the library's, and tells errors of missing memory apart."""

from __future__ import annotations

from typing import Any

import torch

from tunedcomm.fp8 import GROUP, WIRES
from tunedcomm.spec import Problem, get_op

# Times an op's tolerance that a kernel's result may differ from the library's.
_ALLOWED = 4
_SIXTEEN_BITS = 2  # bytes


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


def _wide(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.float32 if x.element_size() <= _SIXTEEN_BITS else torch.float64)


def _is_strange(x: torch.Tensor) -> torch.Tensor:
    """True for infinities and NaN. `isfinite` launches twice as many kernels, and loading one takes PyTorch 10 ms."""
    return x - x != 0


def _norm(x: torch.Tensor, left_out: torch.Tensor) -> float:
    return float(torch.linalg.vector_norm(x.masked_fill(left_out, 0), dtype=torch.float64))


def norm_of_input(problem: Problem, inputs: tuple[Any, ...]) -> float:
    """Norm of the first input of a reduction, whose terms may cancel; 0 for other ops. Ask before the launch."""
    if not (problem.reduction and inputs[0].is_floating_point()):
        return 0.0
    x = _wide(inputs[0])
    return _norm(x, _is_strange(x))


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
    outputs, expected = (spec.mask_unspecified(problem, inputs, each)[1] for each in (outputs, expected))
    for index, (output, due) in enumerate(zip(outputs, expected, strict=True)):
        if tolerance and output.is_floating_point():
            got, wanted = _wide(output), _wide(due)
            strange = _is_strange(wanted)
            if problem.scaling in WIRES:  # an infinity makes NaN of its group, which begins somewhere before it
                reach = GROUP - 1
                near = torch.nn.functional.max_pool1d(strange.float().view(1, 1, -1), 2 * reach + 1, 1, reach)
                strange = near.view(strange.shape) != 0
            error, scale = _norm(got - wanted, strange), max(_norm(wanted, strange), size)
            if not error <= _ALLOWED * tolerance * scale:  # NaN where the kernel alone has one
                return f"output {index} is off by {error / scale if scale else error:.3g} of its norm"
        else:
            differs = output.reshape(-1).view(torch.uint8) != due.reshape(-1).view(torch.uint8)
            if count := int(differs.view(-1, output.element_size()).any(1).sum()):
                return f"output {index} differs in {count} of {output.numel()} elements"
    return ""
