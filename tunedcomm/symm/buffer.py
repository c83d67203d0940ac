"""Symmetric memory: a buffer of the same size on every rank of a group, all of them addressable.

Two backends make it: `cuda` (PyTorch's symmetric memory over NVLink), and the host's here: POSIX shared memory for CPU
tensors, whose kernels run in Triton's interpreter. `workspace.allocate` chooses one.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tunedcomm.errors import WorkspaceError

_SHM = Path("/dev/shm")
_HUGE_PAGE = 2 << 20
_ADVICE = getattr(mmap, "MADV_HUGEPAGE", None)
_madvise = getattr(ctypes.CDLL(None), "madvise", None)


@dataclass(frozen=True, slots=True, eq=False)
class SymmetricBuffer:
    """One rank's view of a symmetric allocation.

    Attributes:
        local: this rank's bytes, uint8, zero-filled.
        addresses: where each rank's bytes lie in *this* process's address space, by rank.
        rank: the caller's rank in the group.
        multicast_address: address whose stores reach every rank, 0 where the fabric has none or it is switched off.
        owner: an object that must stay alive as long as the buffer is in use.
    """

    local: torch.Tensor
    addresses: tuple[int, ...]
    rank: int
    multicast_address: int
    owner: object

    @property
    def world_size(self) -> int:
        return len(self.addresses)

    @property
    def nbytes(self) -> int:
        return self.local.numel()


def _create(path: Path, nbytes: int) -> str | None:
    """Make the shared file; an error text or None."""
    try:
        descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
    except OSError as error:
        return f"cannot create {path}: {error}"
    try:
        # Reserves the pages: a full /dev/shm is an error here and not a SIGBUS in some later store.
        os.posix_fallocate(descriptor, 0, nbytes)
    except OSError as error:
        path.unlink(missing_ok=True)
        return f"cannot reserve {nbytes} bytes in {_SHM}: {error}"
    finally:
        os.close(descriptor)
    return None


def _map(path: Path, nbytes: int) -> mmap.mmap | str:
    try:
        with path.open("r+b") as file:
            return mmap.mmap(file.fileno(), nbytes)
    except (OSError, ValueError) as error:
        return f"cannot map {path}: {error}"


def with_huge_pages(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, new in CPU memory, after asking the kernel for huge pages, which it may not have.

    To make 64 MiB of small pages takes longer than to sum that much.
    """
    first = -(-tensor.data_ptr() // _HUGE_PAGE) * _HUGE_PAGE
    end = (tensor.data_ptr() + tensor.nbytes) // _HUGE_PAGE * _HUGE_PAGE
    if _madvise is not None and _ADVICE is not None and first < end:
        _madvise(ctypes.c_void_p(first), ctypes.c_size_t(end - first), _ADVICE)
    return tensor


def allocate_on_host(group: dist.ProcessGroup, nbytes: int) -> SymmetricBuffer:
    """See `workspace.allocate`. One shared file, a slice for each rank, unlinked as soon as every rank has mapped it.

    Raises:
        WorkspaceError: on every rank of the group if it failed on any.
    """
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    stride = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
    path = _SHM / f"tunedcomm-{os.getpid()}-{uuid.uuid4().hex}"
    failure = _create(path, stride * world_size) if rank == 0 else None
    offer: list[Any] = [str(path), failure, nbytes]
    dist.broadcast_object_list(offer, src=dist.get_global_rank(group, 0), group=group)
    path, failure = Path(offer[0]), offer[1]
    if offer[2] != nbytes:
        failure = failure or f"asked for {nbytes} bytes, rank 0 for {offer[2]}: the size must be the same on every rank"
    mapping = failure or _map(path, stride * world_size)
    outcomes: list[str | None] = [None] * world_size
    dist.all_gather_object(outcomes, mapping if isinstance(mapping, str) else None, group=group)
    if rank == 0:
        path.unlink(missing_ok=True)
    failed = [f"rank {r}: {text}" for r, text in enumerate(outcomes) if text]
    if failed or isinstance(mapping, str):
        raise WorkspaceError(
            f"shared memory of {stride * world_size} bytes could not be set up ({'; '.join(failed)}); "
            "free space in /dev/shm or lower TUNEDCOMM_WORKSPACE_MIB"
        )
    whole = torch.frombuffer(mapping, dtype=torch.uint8)
    base = whole.data_ptr()
    return SymmetricBuffer(
        local=whole[rank * stride : rank * stride + nbytes],
        addresses=tuple(base + r * stride for r in range(world_size)),
        rank=rank,
        multicast_address=0,
        owner=mapping,
    )
