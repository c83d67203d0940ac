"""Symmetric memory of GPUs, through `torch.distributed._symmetric_memory`."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem

from tunedcomm.errors import WorkspaceError
from tunedcomm.symm.buffer import SymmetricBuffer

__all__ = ["allocate", "map_tensor"]


def map_tensor(tensor: torch.Tensor, group: dist.ProcessGroup) -> SymmetricBuffer:
    """Exchange the addresses of a tensor allocated with `symm_mem.empty`; collective over the group.

    Raises:
        WorkspaceError: the tensor was not allocated as symmetric memory, or the exchange failed.
    """
    try:
        handle = symm_mem.rendezvous(tensor, group)
    except RuntimeError as error:
        raise WorkspaceError(f"PyTorch's symmetric memory could not map the tensor for this group: {error}") from error
    offset = int(getattr(handle, "offset", 0))  # newer PyTorch packs several tensors into one allocation
    return SymmetricBuffer(
        local=tensor.view(torch.uint8).view(-1),
        addresses=tuple(int(address) + offset for address in handle.buffer_ptrs),
        rank=int(handle.rank),
        multicast_address=int(handle.multicast_ptr) + offset if handle.multicast_ptr else 0,
        owner=(tensor, handle),
    )


def allocate(group: dist.ProcessGroup, device: torch.device, nbytes: int) -> SymmetricBuffer:
    """See `tunedcomm.symm.buffer.allocate`."""
    failure: str | None = None
    try:
        tensor = symm_mem.empty(nbytes, dtype=torch.uint8, device=device)
        tensor.zero_()
    except RuntimeError as error:
        failure = str(error)
    failures: list[str | None] = [None] * dist.get_world_size(group)
    # Before the addresses are exchanged: the others would wait there for a rank that has none.
    dist.all_gather_object(failures, failure, group=group)
    failed = [f"rank {rank}: {text}" for rank, text in enumerate(failures) if text]
    if failed:
        raise WorkspaceError(
            f"{nbytes} bytes of symmetric memory could not be allocated on {device} ({'; '.join(failed)}); "
            "lower TUNEDCOMM_WORKSPACE_MIB or free device memory"
        )
    torch.cuda.synchronize(device)  # no peer may write before the zeros are there
    buffer = map_tensor(tensor, group)
    if buffer.addresses[buffer.rank] != tensor.data_ptr():
        raise WorkspaceError(
            f"symmetric memory maps this rank's buffer at {buffer.addresses[buffer.rank]:#x}, but it lies at "
            f"{tensor.data_ptr():#x}; this PyTorch ({torch.__version__}) lays it out in a way that is not supported"
        )
    return buffer
