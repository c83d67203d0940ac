"""Symmetric memory: a buffer of the same size on every rank of a group, all of them addressable.

Two backends give it: `cuda` (PyTorch's symmetric memory over NVLink) and `host` (POSIX shared memory for CPU tensors,
whose kernels run in Triton's interpreter). `workspace.allocate` chooses one.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, eq=False)
class SymmetricBuffer:
    """One rank's view of a symmetric allocation.

    Attributes:
        local: this rank's bytes, uint8, zero-filled.
        addresses: where each rank's bytes lie in *this* process's address space, by rank.
        rank: the caller's rank in the group.
        multicast_address: address whose stores reach every rank, 0 where the fabric has none or it is switched off.
        owner: whatever must stay alive as long as the buffer is in use.
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
