"""Collectives of `torch.distributed` as the installed torch calls them: newer ones warn of the older names."""

from __future__ import annotations

from typing import Any

__all__ = ["all_gather_single", "reduce_scatter_single"]


def all_gather_single() -> Any:
    """The function that gathers every rank's tensor into one."""
    import torch.distributed as dist

    return getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def reduce_scatter_single() -> Any:
    """The function that reduces one tensor and leaves each rank its share."""
    import torch.distributed as dist

    return getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
