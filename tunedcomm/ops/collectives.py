"""`tunedcomm.all_reduce` and `tunedcomm.all_reduce_`."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.compiler import is_dynamo_compiling

from tunedcomm.ops._checks import FLOATS, INTEGERS, check_dtype, check_reduction
from tunedcomm.ops._path import CallPath, Form, world
from tunedcomm.spec import NumericsPolicy, Problem

__all__ = ["all_reduce", "all_reduce_", "run_problem"]

_DTYPES = {**FLOATS, **INTEGERS}
_REDUCTIONS = ("sum", "avg", "max", "min")
_LINEAR = ("sum", "avg")


class _AllReduce(Form):
    """The option is the reduction; a result has the input's shape and may take its place."""

    op = "all_reduce"
    arguments = ("str op",)
    reduces = True
    may_be_input = True

    def check(self, x: torch.Tensor, option: Any, world_size: int) -> None:
        del world_size
        check_dtype(self.op, x, _DTYPES, ", whose sum and avg are the same")
        check_reduction(option, x, _REDUCTIONS)

    def problem(self, x: torch.Tensor, option: Any, world_size: int) -> Problem:
        return Problem(self.op, (x.numel(),), _DTYPES[x.dtype], world_size, reduction=option, mode="eager")

    def refusal(self, x: torch.Tensor, option: Any) -> str:
        del x
        return "" if option in _LINEAR else f"{self.op} with op={option!r}"

    def result_shape(self, x: torch.Tensor, option: Any, world_size: int) -> tuple[int, ...]:
        del option, world_size
        return tuple(x.shape)


_path = CallPath(_AllReduce())
_last = _path.last


def all_reduce(
    x: torch.Tensor,
    *,
    op: str = "sum",
    group: dist.ProcessGroup | None = None,
    out: torch.Tensor | None = None,
    numerics: NumericsPolicy = "default",
    max_sms: int | None = None,
) -> torch.Tensor:
    """Reduce `x` elementwise over all ranks of `group`; every rank gets the result.

    Args:
        x: any shape, any strides. Kernels take bf16, fp16 and fp32; fp64, int8, uint8, int32 and int64 always run the
            variant `library`. The same number of elements and dtype on every rank. Left as it is unless `out` is `x`.
        op: `sum`, `avg`, `max` or `min`; `avg` not for integers. Kernels do `sum` and `avg`, the variant `library` does
            all.
        group: process group; None is the default group. Its first call is collective set-up: all ranks make it, outside
            of graph captures.
        out: where to write: same shape, dtype and device as `x`, any strides; may be `x`. None allocates it.
        numerics: classes of variants that may run: `default` admits `ordered` and `library`, `ordered` that one alone,
            `any` all. Ordered: summed in fp32 in rank order, rounded once at the end; the bits do not depend on tuning.
        max_sms: SMs at most that the kernel may take, a whole number, the same on every rank, for callers that compute
            beside it. The best candidate that takes no more runs, or, where there is none, the variant `library`, which
            chooses for itself. None: no limit.

    Returns:
        `out`, or a new contiguous tensor of `x`'s shape and dtype.

    Raises:
        NotInitializedError: no default process group, or a first call inside a graph capture.
        GroupError: this rank is not a member of `group`, or the group has no backend for the tensors' device.
        UnsupportedInputError: a dtype, layout, device, option or `out` that cannot be served; says what to do.
        InfeasibleError: a variant that is forced cannot run the call; `numerics` leaves no candidate that can; or with
            TUNEDCOMM_MODE=force no database has an answer.
        PeerTimeoutError: an earlier call on the group waited for a peer in vain.

    `tunedcomm.all_reduce_(x)` is the same with `out=x`. Can be captured in CUDA graphs; enqueues on the current stream;
    never synchronises the host.
    """
    if is_dynamo_compiling():
        return _path.operate(x, op, out, group, numerics, max_sms)
    if group is None:
        group = world._default_pg  # looked up anew: groups may be destroyed and made again
    fast = _last.get(group)
    if fast is not None:
        result = fast(x, op, out, numerics, max_sms)
        if result is not None:
            return result
    return _path.call(x, op, out, group, numerics, max_sms)


def all_reduce_(
    x: torch.Tensor,
    *,
    op: str = "sum",
    group: dist.ProcessGroup | None = None,
    numerics: NumericsPolicy = "default",
    max_sms: int | None = None,
) -> torch.Tensor:
    """`all_reduce` in place: `x` holds the result and is returned."""
    return all_reduce(x, op=op, group=group, out=x, numerics=numerics, max_sms=max_sms)


def run_problem(problem: Problem, inputs: tuple[torch.Tensor, ...], outputs: tuple[torch.Tensor, ...]) -> None:
    """The public call that asks for `problem` on the default group, for benchmarks."""
    all_reduce(inputs[0], op=problem.reduction, out=outputs[0])
