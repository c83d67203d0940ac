"""What tables say of a problem beside its shape."""

from __future__ import annotations

from tunedcomm.cli._output import format_bytes
from tunedcomm.errors import UnknownNameError
from tunedcomm.spec import OpSpec, Problem, get_op

__all__ = ["kind_of", "message_of"]


def _spec(problem: Problem) -> OpSpec | None:
    from tunedcomm import kernels  # what reads no problem needs no op

    kernels.discover()
    try:
        return get_op(problem.op)
    except UnknownNameError:
        return None


def message_of(problem: Problem) -> str:
    """The bytes by which sizes of the op are compared, as `192 KiB`; `-` of an op that nothing here has registered."""
    spec = _spec(problem)
    return "-" if spec is None else format_bytes(spec.message_bytes(problem))


def kind_of(problem: Problem) -> str:
    """`symmetric, nk+gathered, in place`: where the input lies, and what is not the op's usual."""
    spec, usual = _spec(problem), ("", "", "")
    if spec is not None:
        usual = next(iter(spec.reductions), ""), spec.layouts[0], spec.scalings_of(problem.dtype)[0]
    asked = problem.reduction, problem.layout, problem.scaling
    words = [problem.input_kind, *(text for text, norm in zip(asked, usual, strict=True) if text != norm)]
    return ", ".join([*filter(None, words), *(["in place"] if problem.in_place else [])])
