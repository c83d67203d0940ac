"""TUNEDCOMM_NAN_CHECK: no NaN goes into a collective unseen.

Plans of a group that checks launch through `NanWatch.guard`, which is no launch by address, so that no call takes the
ways that ask less; plans of other groups know nothing of it. Eager calls count on their stream, wait for the count and
raise before the collective is launched. In a capture nothing can be waited for: the count is captured too, leaves what
it finds in pinned host memory at every replay, and the group's next call raises.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch

from tunedcomm.errors import NanInputError
from tunedcomm.kernels.common.launch import bind_kernel
from tunedcomm.kernels.common.nan import NAN_BITS, NUM_CELLS, WIDTHS, count_nan_request
from tunedcomm.spec import Problem, ops

__all__ = ["NanWatch"]

Launch: TypeAlias = Callable[[tuple[Any, ...], tuple[Any, ...], int], None]
_NAMES = {getattr(torch, name): name for name in NAN_BITS}


def _count(tensor: torch.Tensor) -> int:
    """Elements that are NaN; waits for the current stream."""
    if not tensor.is_floating_point():
        return 0
    if tensor.element_size() == 1:
        tensor = tensor.float()  # torch compares no 8-bit floats
    return int(torch.isnan(tensor).sum())


class NanWatch:
    """The check of one group's inputs.

    Args:
        device: where the group's tensors live.
        rank: the caller's rank in the group.
    """

    def __init__(self, device: torch.device, rank: int) -> None:
        self._rank = rank
        self._ops = sorted(ops())
        pinned = device.type == "cuda"
        self._cells = torch.zeros(len(self._ops), NUM_CELLS, dtype=torch.int64, device="cpu", pin_memory=pinned)
        # Made here, for in a capture nothing may be loaded.
        self._counts = {
            width: bind_kernel(count_nan_request(width), NUM_CELLS, device).fix((None,) * 5) for width in WIDTHS
        }

    def guard(self, problem: Problem, launch: Launch) -> Launch:
        """`launch` after a look at its inputs; those that hold no floating-point numbers are let through."""
        row = self._ops.index(problem.op)

        def look_and_launch(inputs: tuple[Any, ...], outputs: tuple[Any, ...], stream: int) -> None:
            self.check()
            found = sum(_count(tensor) for tensor in inputs if isinstance(tensor, torch.Tensor))
            if found:
                raise NanInputError(
                    f"{problem.op}: {found} NaN in the input of rank {self._rank}. This rank did not make the call, so "
                    "the others will miss it (PeerTimeoutError, or the library's own time-out) and the group is out of "
                    "step: find where the NaN comes from, or unset TUNEDCOMM_NAN_CHECK to let it through"
                )
            launch(inputs, outputs, stream)

        def count_and_launch(inputs: tuple[Any, ...], outputs: tuple[Any, ...], stream: int) -> None:
            self.check()
            for tensor in inputs:
                if isinstance(tensor, torch.Tensor):  # fused ops have numbers among their inputs
                    self._capture(tensor, row, stream)
            launch(inputs, outputs, stream)

        return count_and_launch if problem.mode == "graph" else look_and_launch

    def _capture(self, tensor: torch.Tensor, row: int, stream: int) -> None:
        name = _NAMES.get(tensor.dtype)
        if name is not None and tensor.numel():
            cells = self._cells[row].data_ptr()
            self._counts[tensor.element_size()](stream, tensor.data_ptr(), tensor.numel(), *NAN_BITS[name], cells)

    def check(self) -> None:
        """Raise if a replayed graph found NaN, once.

        Raises:
            NanInputError: names the op, the rank and how many there were in the last replay that found some.
        """
        if not self._cells.any():
            return
        found = {op: int(cells.sum()) for op, cells in zip(self._ops, self._cells, strict=True) if cells.any()}
        self._cells.zero_()
        said = "; ".join(f"{op}: {count} NaN" for op, count in found.items())
        raise NanInputError(
            f"{said} in the input of rank {self._rank}, in a captured graph that was replayed before this call. The "
            "replay sent them on: find where they come from, or unset TUNEDCOMM_NAN_CHECK to let them through"
        )
