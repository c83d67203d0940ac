"""`tunedcomm.all_gather`."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from torch.compiler import is_dynamo_compiling

from tunedcomm.errors import UnsupportedInputError
from tunedcomm.ops._checks import FLOATS, INTEGERS, normal_dim
from tunedcomm.ops._path import CallPath, Form, world
from tunedcomm.spec import Problem

__all__ = ["all_gather", "run_problem"]

_NAMED = {
    **FLOATS,
    **INTEGERS,
    torch.int16: "int16",
    torch.float8_e4m3fn: "float8_e4m3fn",
    torch.float8_e5m2: "float8_e5m2",
}
# What stands for a dtype that has no name of its own: bytes are bytes.
_BY_SIZE = {1: "uint8", 2: "int16", 4: "int32", 8: "int64"}
_WIDEST = 8


class _AllGather(Form):
    """The option is the dimension. Kernels gather along the first one; along others their result is permuted."""

    op = "all_gather"
    arguments = ("int dim",)

    def check(self, x: torch.Tensor, option: Any, world_size: int) -> None:
        del world_size
        normal_dim(self.op, x, option)
        if x.is_quantized:
            raise UnsupportedInputError(f"{self.op} does not take {x.dtype}; gather x.int_repr() and its scales")

    def problem(self, x: torch.Tensor, option: Any, world_size: int) -> Problem:
        del option
        size = x.element_size()
        dtype = _NAMED.get(x.dtype) or _BY_SIZE[min(size, _WIDEST)]
        numel = x.numel() * max(size // _WIDEST, 1)
        return Problem(self.op, (numel,), dtype, world_size, reduction="", mode="eager")

    def refusal(self, x: torch.Tensor, option: Any) -> str:
        del option
        # The gradient is a reduce_scatter: of the parts where numbers are complex, and of none in 8 bits.
        return "" if x.is_complex() or x.dtype in FLOATS else f"{self.op} of {x.dtype}"

    def result_shape(self, x: torch.Tensor, option: Any, world_size: int) -> tuple[int, ...]:
        if x.dim() == 0:
            return (world_size,)
        shape = list(x.shape)
        shape[option] *= world_size
        return tuple(shape)

    def is_direct(self, x: torch.Tensor, option: Any) -> bool:
        # Extents of 1 in front of the dimension do not change the order of elements.
        return math.prod(x.shape[: option % max(x.dim(), 1)]) == 1

    def enter(self, x: torch.Tensor, option: Any, world_size: int) -> torch.Tensor:
        del option, world_size
        return x

    def leave(self, written: torch.Tensor, x: torch.Tensor, option: Any, world_size: int) -> torch.Tensor:
        # The dimension stays split by rank: merged, it would be a copy more.
        return written.view(world_size, *x.shape).movedim(0, option % x.dim())


_path = CallPath(_AllGather())
_last = _path.last


def all_gather(
    x: torch.Tensor,
    *,
    dim: int = 0,
    group: dist.ProcessGroup | None = None,
    out: torch.Tensor | None = None,
    max_sms: int | None = None,
) -> torch.Tensor:
    """Concatenate the tensors of all ranks of `group` along `dim`, in rank order; every rank gets the result.

    Args:
        x: any shape, any strides, any dtype but quantized ones; the same shape and dtype on every rank. A tensor
            without dimensions counts as one of one element. Left as it is. Gathering along another dimension than the
            first that is longer than 1 costs a copy of the result.
        dim: dimension along which to concatenate, from the end if negative.
        group: process group; None is the default group. Its first call is collective set-up: all ranks make it, outside
            of graph captures.
        out: where to write: of the result's shape, dtype and device, any strides; must not overlap `x`. None allocates
            it.
        max_sms: SMs at most that the kernel may take, a whole number, the same on every rank, for callers that compute
            beside it. The best candidate that takes no more runs, or, where there is none, the variant `library`, which
            chooses for itself. 0 admits copy engines alone. None: no limit.

    Returns:
        `out`, or a new contiguous tensor of `x`'s shape and dtype with `dim` `world_size` times as long.

    Raises:
        NotInitializedError: no default process group, or a first call inside a graph capture.
        GroupError: this rank is not a member of `group`, or the group has no backend for the tensors' device.
        UnsupportedInputError: a layout, device, dimension, option or `out` that cannot be served; says what to do.
        InfeasibleError: a variant that is forced cannot run the call, or with TUNEDCOMM_MODE=force no database has an
            answer.
        PeerTimeoutError: an earlier call on the group waited for a peer in vain.

    Moves bytes: every bit arrives as it was, NaN payloads and the sign of zeros included. Can be captured in CUDA
    graphs; enqueues on the current stream; never synchronises the host.
    """
    if is_dynamo_compiling():
        return _path.operate(x, dim, out, group, "default", max_sms)
    if group is None:
        group = world._default_pg  # looked up anew: groups may be destroyed and made again
    fast = _last.get(group)
    if fast is not None:
        result = fast(x, dim, out, "default", max_sms)
        if result is not None:
            return result
    return _path.call(x, dim, out, group, "default", max_sms)


def run_problem(problem: Problem, inputs: tuple[torch.Tensor, ...], outputs: tuple[torch.Tensor, ...]) -> None:
    """The public call that asks for `problem` on the default group, for benchmarks."""
    del problem
    all_gather(inputs[0], out=outputs[0])
