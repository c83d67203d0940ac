"""in_order: the library moves every rank's parts, and PyTorch operators sum them in rank order.

It serves what no kernel takes where the policy excludes the library: any dtype that the op takes, any rows, number of
ranks and fabric, on GPUs and CPUs, in pieces, so that its extra memory does not grow with the message.

Numerics: ordered; fp64 is summed in fp64. Graph-safe on NCCL.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tunedcomm.kernels.common.reference import reduced
from tunedcomm.kernels.common.variant import LibraryVariant, all_gather_single
from tunedcomm.space import Config
from tunedcomm.spec import Limits, Problem

if TYPE_CHECKING:
    import torch

_PIECE_BYTES = 16 << 20  # of a rank's input that are under way at once


def sum_in_order(parts: torch.Tensor, reduction: str, dtype: torch.dtype) -> torch.Tensor:
    """The reduction over the first extent, in rank order, in `dtype`.

    Floats are summed in fp32, or fp64 if they are that wide, and rounded once.
    """
    import torch

    if reduction in ("max", "min") or not parts.is_floating_point():
        return reduced(parts.unbind(), reduction, parts.dtype)
    total = reduced(parts.unbind(), reduction, torch.promote_types(parts.dtype, torch.float32))
    return total.to(dtype) + 0.0  # a mean that rounds to −0.0 is written as +0.0


def _scatter(rows: torch.Tensor, reduction: str, dtype: torch.dtype, group: Any) -> torch.Tensor:
    """This rank's row of the reduction of every rank's [ranks, n], in `dtype`."""
    import torch
    import torch.distributed as dist

    come = torch.empty_like(rows)
    exchange: Any = dist.all_to_all_single
    exchange(come.view(-1).view(torch.uint8), rows.view(-1).view(torch.uint8), group=group)
    return sum_in_order(come, reduction, dtype)


def scatter_in_order(x: torch.Tensor, out: torch.Tensor, reduction: str, group: Any) -> None:
    """Reduce every rank's x [ranks, n] in rank order; rank r gets row r in out [n]."""
    piece_rows = max(_PIECE_BYTES // (len(x) * x.element_size()), 1)
    for first in range(0, len(out), piece_rows):
        rows = x[:, first : first + piece_rows].contiguous()
        out[first : first + piece_rows] = _scatter(rows, reduction, out.dtype, group)


def reduce_in_order(x: torch.Tensor, out: torch.Tensor, reduction: str, group: Any) -> None:
    """Reduce every rank's x [n] in rank order into out [n], which may be x."""
    import torch
    import torch.distributed as dist

    ranks, gather = dist.get_world_size(group), all_gather_single()
    piece_rows = max(_PIECE_BYTES // x.element_size(), 1)
    for first in range(0, len(x), piece_rows):
        piece = x[first : first + piece_rows]
        rows = piece.new_zeros((ranks, -(-len(piece) // ranks)))
        rows.view(-1)[: len(piece)] = piece
        own_rows = _scatter(rows, reduction, out.dtype, group)
        whole = own_rows.new_empty(rows.numel())
        gather(whole.view(torch.uint8), own_rows.view(torch.uint8), group=group)
        out[first : first + piece_rows] = whole[: len(piece)]


class InOrderVariant(LibraryVariant):
    """A variant that only runs where the policy excludes the library."""

    name = "in_order"
    numerics = "ordered"
    summary = "the library moves, PyTorch operators sum in rank order; runs where numerics='ordered' and no kernel can"

    def infeasible(self, problem: Problem, config: Config, limits: Limits) -> str | None:
        if not limits.ordered:
            return "it stands in for the library, and runs where numerics='ordered' excludes that"
        return "there is nothing to do" if problem.numel == 0 else None
