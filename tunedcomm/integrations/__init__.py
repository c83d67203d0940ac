"""Interception of PyTorch's collectives, the fusion pass for `torch.compile`, and an all-reduce for serving engines."""

from __future__ import annotations

from collections.abc import Iterable

import torch

import tunedcomm.kernels  # noqa: F401 - chooses Triton's interpreter before a module here imports Inductor
from tunedcomm.errors import UnsupportedVersionError

_OLDEST = (2, 11)
_NEWEST = (2, 13)
_PG, _OP = "__torch__.torch.classes.c10d.ProcessGroup", "__torch__.torch.classes.c10d.ReduceOp"
_ASYNC = ("bool", "int")  # async_op, timeout
# PyTorch's collectives and the types of their arguments; newer versions may take a group for its name.
_OPERATORS: dict[str, tuple[str, ...]] = {
    "c10d::allreduce_": ("List[Tensor]", _PG, _OP, "Optional[Tensor]", *_ASYNC),
    "c10d::_allgather_base_": ("Tensor", "Tensor", _PG, *_ASYNC),
    "c10d::_reduce_scatter_base_": ("Tensor", "Tensor", _PG, _OP, *_ASYNC),
    "c10d::alltoall_base_": ("Tensor", "Tensor", _PG, "List[int]", "List[int]", *_ASYNC),
    "_c10d_functional::all_reduce": ("Tensor", "str", "str"),
    "_c10d_functional::all_reduce_": ("Tensor", "str", "str"),
    "_c10d_functional::all_gather_into_tensor": ("Tensor", "int", "str"),
    "_c10d_functional::all_gather_into_tensor_out": ("Tensor", "int", "str", "Tensor"),
    "_c10d_functional::reduce_scatter_tensor": ("Tensor", "str", "int", "str"),
    "_c10d_functional::reduce_scatter_tensor_out": ("Tensor", "str", "int", "str", "Tensor"),
    "_c10d_functional::all_to_all_single": ("Tensor", "List[int]", "List[int]", "str"),
    "_c10d_functional::wait_tensor": ("Tensor",),
}


def check_torch(what: str, operators: Iterable[str], instead: str) -> None:
    """Refuse a torch whose operators are not those that `what` was written for.

    Args:
        what: the caller's function, for the error's text.
        operators: the operators that it needs.
        instead: what to do with such a torch.

    Raises:
        UnsupportedVersionError: an older or newer version, or one whose operators differ.
    """
    known = f"torch {'.'.join(map(str, _OLDEST))} to {'.'.join(map(str, _NEWEST))}"
    major, minor = torch.__version__.split("+")[0].split(".")[:2]
    if not _OLDEST <= (int(major), int(minor)) <= _NEWEST:
        raise UnsupportedVersionError(
            f"{what} is known to work with {known}, this is {torch.__version__}; install one of those, or {instead}"
        )
    for name in operators:
        found, types = _types_of(name), _OPERATORS[name]
        if found is None or tuple("str" if of == "Any" else of for of in found) != types:
            raise UnsupportedVersionError(
                f"{what} does not know this build of torch {torch.__version__}: {name} takes {found}, not {types}; "
                f"install a release of {known}, or {instead}"
            )


def _types_of(operator: str) -> tuple[str, ...] | None:
    """Types of an operator's arguments in this torch; None if there is no such operator."""
    namespace, name = operator.split("::")
    packet = getattr(getattr(torch.ops, namespace), name, None)
    if packet is None or "default" not in packet.overloads():
        return None
    return tuple(str(argument.type) for argument in packet.default._schema.arguments)
