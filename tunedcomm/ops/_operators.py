"""When a public call goes by its operator `torch.ops.tunedcomm.*`, and how.

Eager calls of plain tensors do not: what PyTorch's dispatcher costs is a multiple of what a call costs. Calls whose
inputs need gradients do, for the operator records them, and so does whatever is traced: by Dynamo, by `make_fx` and
`torch.export`, with fake or functional tensors.

The operators themselves are defined in `tunedcomm.integrations.operators`, on top of the ops, and are loaded by name:
with the public functions, and here before the first call that needs one.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.compiler import is_dynamo_compiling

from tunedcomm.errors import NotInitializedError, UnsupportedInputError
from tunedcomm.ops._checks import check_differentiable, check_tangents

__all__ = [
    "call",
    "call_into",
    "check_plain",
    "goes_by_operator",
    "group_arguments",
    "is_dynamo_compiling",
    "lists",
    "paths",
]

# Op to the `CallPath` or `ManyPath` that serves it.
paths: dict[str, Any] = {}
# Operator that takes a list of tensors to the `Several` that serves it.
lists: dict[str, Any] = {}

# C functions of torch that say whether a dispatch mode or a `torch.func` transform is active. Where a torch has none of
# that name, the calls concerned are served as plain ones.
_num_modes: Any = getattr(torch._C, "_len_torch_dispatch_stack", lambda: 0)
_functorch: Any = getattr(torch._C, "_functorch", None)
_transform: Any = getattr(_functorch, "peek_interpreter_stack", lambda: None)
_plain_dispatch: Any = torch.Tensor.__torch_dispatch__


def goes_by_operator(tensors: Sequence[Any]) -> bool:
    """True for inputs that need gradients or are being traced.

    Raises:
        UnsupportedInputError: inside a `torch.func` transform, which no operator of PyTorch's library supports, or a
            tensor has a forward-mode tangent.
    """
    check_tangents(tensors)
    if _num_modes():
        return True
    _check_transforms()
    recording = torch.is_grad_enabled()
    for tensor in tensors:
        if isinstance(tensor, torch.Tensor) and (
            (recording and tensor.requires_grad) or type(tensor).__torch_dispatch__ is not _plain_dispatch
        ):
            return True
    return False


def _check_transforms() -> None:
    if _transform() is not None:
        raise UnsupportedInputError(
            "torch.func transforms (grad, vmap, …) do not reach through operators of torch.library; use "
            "torch.autograd.grad, or call this outside the transform"
        )


def check_plain(op: str, tensors: Sequence[Any]) -> None:
    """Refuse what only an operator could take, for ops that have none: such tensors have no memory to read or write.

    Raises:
        UnsupportedInputError: inside a `torch.func` transform, or a tensor defines `__torch_dispatch__`, or a tangent.
    """
    check_tangents(tensors)
    _check_transforms()
    for tensor in tensors:
        if isinstance(tensor, torch.Tensor) and type(tensor).__torch_dispatch__ is not _plain_dispatch:
            raise UnsupportedInputError(
                f"{op} cannot be traced and takes plain tensors, not {type(tensor).__name__}; call it outside of what "
                "is traced, or pass .to_local() of a DTensor, .wait() of an AsyncCollectiveTensor"
            )


def group_arguments(group: dist.ProcessGroup | None) -> tuple[int, str]:
    """What stands for a group in an operator's arguments: its size and its name.

    Raises:
        NotInitializedError: there is no default group.
    """
    if group is None:
        group = dist.group.WORLD
    if group is None:
        raise NotInitializedError(
            "torch.distributed has no default process group; call torch.distributed.init_process_group() first"
        )
    return group.size(), group.group_name


def _operator(name: str) -> Any:
    """The operator's overloads; Dynamo, which cannot import, finds them defined with the public functions."""
    if not is_dynamo_compiling():
        importlib.import_module("tunedcomm.integrations.operators")
    return getattr(torch.ops.tunedcomm, name)


def call(op: str, inputs: tuple[Any, ...], settings: tuple[Any, ...], refusal: str) -> Any:
    """The operator's new results.

    Args:
        op: its name.
        inputs: tensors, and None for those that are not there.
        settings: what follows them.
        refusal: why there is no gradient, "" where there is one.

    Raises:
        UnsupportedInputError: a gradient is needed of what has none.
    """
    if refusal:
        check_differentiable(refusal, inputs)
    return _operator(op).default(*inputs, *settings)


def call_into(
    op: str,
    inputs: tuple[Any, ...],
    outputs: dict[str, torch.Tensor],
    settings: tuple[Any, ...],
    *,
    in_place: bool,
) -> None:
    """The operator into given tensors; `in_place` if there is one output and it is the first input.

    Raises:
        UnsupportedInputError: a tensor needs gradients, which nothing would record.
    """
    check_differentiable(f"{op} into a given tensor", (*inputs, *outputs.values()))
    if in_place:
        _operator(f"{op}_").default(*inputs, *settings)
    else:
        _operator(op).out(*inputs, *settings, **outputs)
