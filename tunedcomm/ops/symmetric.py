"""Tensors in symmetric memory: peers address them, so that ops can read and write them in place."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from tunedcomm.dispatch.communicator import get_communicator
from tunedcomm.errors import UnsupportedInputError, WorkspaceError
from tunedcomm.symm.workspace import allocate

__all__ = ["register_symmetric", "symmetric_empty"]


def symmetric_empty(
    size: Sequence[int] | int,
    *,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str | None = None,
    group: dist.ProcessGroup | None = None,
) -> torch.Tensor:
    """A zero-filled tensor in symmetric memory of `group`; collective over the group, never inside a graph capture.

    Pass it, or views of it at the same offset on every rank, to ops of the same group. The memory stays allocated until
    `tunedcomm.release_communicators()`, for peers may read it at any time: make it once and reuse it.

    Args:
        size: the shape, the same on every rank.
        dtype: any dtype.
        device: by default the current CUDA device, or the CPU where there is none.
        group: by default the default group.

    Raises:
        UnsupportedInputError: a negative extent.
        WorkspaceError: the ranks cannot address each other's memory, there is too little of it, they asked for
            different sizes, or a graph is being captured.
    """
    shape = torch.Size((size,) if isinstance(size, int) else size)
    if any(extent < 0 for extent in shape):
        raise UnsupportedInputError(f"size={size!r} has a negative extent; give a shape such as (4096, 8192)")
    where = None if device is None else torch.device(device)
    if where == torch.device("cuda"):
        where = torch.device("cuda", torch.cuda.current_device())
    communicator = get_communicator(group, where)
    numel = shape.numel()
    if communicator.workspace is None:
        raise WorkspaceError(
            "the ranks of this group cannot address each other's memory; use an ordinary tensor (`tunedcomm doctor` "
            "says why)"
        )
    _refuse_capture(communicator.device)
    buffer = allocate(communicator.group, communicator.device, max(numel * dtype.itemsize, 16))
    tensor = buffer.local[: numel * dtype.itemsize].view(dtype).view(shape)
    communicator.register_symmetric(tensor, buffer)
    return tensor


def _refuse_capture(device: torch.device) -> None:
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise WorkspaceError("symmetric memory cannot be made during a graph capture; make it before the capture")


def register_symmetric(x: torch.Tensor, *, group: dist.ProcessGroup | None = None) -> torch.Tensor:
    """Tell the group about a tensor allocated with `torch.distributed._symmetric_memory.empty`; collective.

    Returns:
        `x`.

    Raises:
        UnsupportedInputError: not a CUDA tensor.
        WorkspaceError: not symmetric memory, or a graph is being captured.
    """
    if not x.is_cuda:
        raise UnsupportedInputError(
            f"only CUDA tensors come from PyTorch's symmetric memory, not {x.device}; tunedcomm.symmetric_empty() "
            "makes one on any device"
        )
    from tunedcomm.symm.cuda import map_tensor

    communicator = get_communicator(group, x.device)
    _refuse_capture(communicator.device)
    communicator.register_symmetric(x, map_tensor(x, communicator.group))
    return x
