"""`tunedcomm.all_to_all`."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.compiler import is_dynamo_compiling

from tunedcomm.errors import UnsupportedInputError
from tunedcomm.ops._checks import MOVED, check_dtype
from tunedcomm.ops._path import CallPath, Form, world
from tunedcomm.spec import Problem

__all__ = ["all_to_all", "run_problem"]


class _AllToAll(Form):
    """There are no options; chunks lie one after another along dimension 0, in the input as in the result."""

    op = "all_to_all"

    def check(self, x: torch.Tensor, option: Any, world_size: int) -> None:
        del option
        check_dtype(self.op, x, MOVED)
        if x.dim() == 0 or x.shape[0] % world_size:
            extent = f"{x.shape[0]} of a tensor of shape {tuple(x.shape)}" if x.dim() else "of a tensor without any"
            raise UnsupportedInputError(
                f"{self.op} cuts dimension 0 into a chunk for each of the {world_size} ranks; {extent} cannot be cut "
                f"so. Pad it to a multiple of {world_size}, or call all_to_all_v with the number of rows for each rank"
            )

    def problem(self, x: torch.Tensor, option: Any, world_size: int) -> Problem:
        del option
        return Problem(self.op, (x.numel() // world_size,), MOVED[x.dtype], world_size, reduction="", mode="eager")

    def result_shape(self, x: torch.Tensor, option: Any, world_size: int) -> tuple[int, ...]:
        del option, world_size
        return tuple(x.shape)


_path = CallPath(_AllToAll())
_last = _path.last


def all_to_all(
    x: torch.Tensor,
    *,
    group: dist.ProcessGroup | None = None,
    out: torch.Tensor | None = None,
    max_sms: int | None = None,
) -> torch.Tensor:
    """Send chunk j of `x` to rank j of `group`; chunk i of the result comes from rank i.

    Args:
        x: any shape whose dimension 0 is a multiple of the group's size, any strides, any floating-point (fp8 too),
            integer or bool dtype; complex ones as `torch.view_as_real(x)`. It is cut along dimension 0 into a chunk for
            each rank. The same number of elements and dtype on every rank. Left as it is.
        group: process group; None is the default group. Its first call is collective set-up: all ranks make it, outside
            of graph captures.
        out: where to write: same shape, dtype and device as `x`, any strides; no memory in common with `x`. None
            allocates it.
        max_sms: SMs at most that the kernel may take, a whole number, the same on every rank, for callers that compute
            beside it. The best candidate that takes no more runs, or, where there is none, the variant `library`, which
            chooses for itself. 0 admits copy engines alone. None: no limit.

    Returns:
        `out`, or a new contiguous tensor of `x`'s shape and dtype.

    Raises:
        NotInitializedError: no default process group, or a first call inside a graph capture.
        GroupError: this rank is not a member of `group`, or the group has no backend for the tensors' device.
        UnsupportedInputError: a shape, dtype, layout, device, option or `out` that cannot be served; says what to do.
        InfeasibleError: a variant that is forced cannot run the call, or with TUNEDCOMM_MODE=force no database has an
            answer.
        PeerTimeoutError: an earlier call on the group waited for a peer in vain.

    Every bit comes through as it was sent, NaN payloads and negative zeros included. Can be captured in CUDA graphs;
    enqueues on the current stream; never synchronises the host.
    """
    if is_dynamo_compiling():
        return _path.operate(x, None, out, group, "default", max_sms)
    if group is None:
        group = world._default_pg  # looked up anew: groups may be destroyed and made again
    fast = _last.get(group)
    if fast is not None:
        result = fast(x, None, out, "default", max_sms)
        if result is not None:
            return result
    return _path.call(x, None, out, group, "default", max_sms)


def run_problem(problem: Problem, inputs: tuple[torch.Tensor, ...], outputs: tuple[torch.Tensor, ...]) -> None:
    """The public call that asks for `problem` on the default group, for benchmarks."""
    del problem
    all_to_all(inputs[0], out=outputs[0])
