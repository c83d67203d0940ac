"""`tunedcomm.reduce_scatter`."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.compiler import is_dynamo_compiling

from tunedcomm.errors import UnsupportedInputError
from tunedcomm.ops._checks import FLOATS, INTEGERS, check_dtype, check_reduction, normal_dim
from tunedcomm.ops._path import CallPath, Form, world
from tunedcomm.spec import NumericsPolicy, Problem

__all__ = ["reduce_scatter", "run_problem"]

_DTYPES = {**FLOATS, **INTEGERS}
_REDUCTIONS = ("sum", "avg", "max", "min")
_LINEAR = ("sum", "avg")


class _ReduceScatter(Form):
    """The option is (reduction, dim); a result is one chunk of the input along that dimension."""

    op = "reduce_scatter"
    arguments = ("str op", "int dim")
    reduces = True

    def check(self, x: torch.Tensor, option: Any, world_size: int) -> None:
        reduction, _ = option
        check_dtype(self.op, x, _DTYPES, ", whose sum and avg are the same")
        check_reduction(reduction, x, _REDUCTIONS)
        self.result_shape(x, option, world_size)

    def problem(self, x: torch.Tensor, option: Any, world_size: int) -> Problem:
        shape = (x.numel() // world_size,)
        return Problem(self.op, shape, _DTYPES[x.dtype], world_size, reduction=option[0], mode="eager")

    def refusal(self, x: torch.Tensor, option: Any) -> str:
        del x
        return "" if option[0] in _LINEAR else f"{self.op} with op={option[0]!r}"

    def result_shape(self, x: torch.Tensor, option: Any, world_size: int) -> tuple[int, ...]:
        # Checked here too: a plan may be known for as many elements in another shape, which did divide.
        dim = normal_dim(self.op, x, option[1])
        extent = x.shape[dim] if x.dim() else 1
        if extent % world_size:
            raise UnsupportedInputError(
                f"{self.op} splits dimension {dim} of x, {extent} long, into {world_size} equal chunks; it must be a "
                f"multiple of {world_size} (shape {tuple(x.shape)}): pad x, or choose another dim"
            )
        return (*x.shape[:dim], extent // world_size, *x.shape[dim + 1 :]) if x.dim() else ()

    def is_direct(self, x: torch.Tensor, option: Any) -> bool:
        """True where chunks lie one after another: nothing but dimensions of one element comes before `dim`."""
        dim, count = option[1], x.dim()
        if dim == 0:
            return True
        if not isinstance(dim, int) or not -count <= dim < count:
            return False  # the slow way says what is wrong
        return all(extent == 1 for extent in x.shape[: dim % count])

    def enter(self, x: torch.Tensor, option: Any, world_size: int) -> torch.Tensor:
        del world_size
        return x.movedim(option[1], 0).contiguous()

    def leave(self, written: torch.Tensor, x: torch.Tensor, option: Any, world_size: int) -> torch.Tensor:
        moved = list(x.movedim(option[1], 0).shape)
        return written.view(moved[0] // world_size, *moved[1:]).movedim(0, option[1])


_path = CallPath(_ReduceScatter())
_last = _path.last


def reduce_scatter(
    x: torch.Tensor,
    *,
    op: str = "sum",
    dim: int = 0,
    group: dist.ProcessGroup | None = None,
    out: torch.Tensor | None = None,
    numerics: NumericsPolicy = "default",
    max_sms: int | None = None,
) -> torch.Tensor:
    """Reduce `x` elementwise over all ranks of `group`; rank r gets the r-th of as many equal chunks along `dim`.

    Args:
        x: any shape whose extent along `dim` is a multiple of the group's size, any strides. Kernels take bf16, fp16
            and fp32; fp64, int8, uint8, int32 and int64 always run the variant `library`. The same shape and dtype on
            every rank. Left as it is.
        op: `sum`, `avg`, `max` or `min`; `avg` not for integers. Kernels do `sum` and `avg`, the variant `library` does
            all.
        dim: dimension to split, from the end if negative. Where it is not the first, `x` is copied into an order in
            which chunks are contiguous, and the result copied back.
        group: process group; None is the default group. Its first call is collective set-up: all ranks make it, outside
            of graph captures.
        out: where to write: `x`'s shape with `dim` divided by the group's size, same dtype and device, any strides; no
            memory shared with `x`. None allocates it.
        numerics: classes of variants that may run: `default` admits `ordered` and `library`, `ordered` that one alone,
            `any` all. Ordered: summed in fp32 in rank order, rounded once at the end; the bits do not depend on tuning
            and are those of the same part of an ordered `all_reduce`.
        max_sms: SMs at most that the kernel may take, a whole number, the same on every rank, for callers that compute
            beside it. The best candidate that takes no more runs, or, where there is none, the variant `library`, which
            chooses for itself. None: no limit.

    Returns:
        `out`, or a new contiguous tensor of `x`'s dtype, `dim` divided by the group's size.

    Raises:
        NotInitializedError: no default process group, or a first call inside a graph capture.
        GroupError: this rank is not a member of `group`, or the group has no backend for the tensors' device.
        UnsupportedInputError: a shape, dtype, layout, device, option or `out` that cannot be served; says what to do.
        InfeasibleError: a variant that is forced cannot run the call; `numerics` leaves no candidate that can; or with
            TUNEDCOMM_MODE=force no database has an answer.
        PeerTimeoutError: an earlier call on the group waited for a peer in vain.

    Can be captured in CUDA graphs; enqueues on the current stream; never synchronises the host.
    """
    if is_dynamo_compiling():
        return _path.operate(x, (op, dim), out, group, numerics, max_sms)
    if group is None:
        group = world._default_pg  # looked up anew: groups may be destroyed and made again
    fast = _last.get(group)
    if fast is not None:
        result = fast(x, (op, dim), out, numerics, max_sms)
        if result is not None:
            return result
    return _path.call(x, (op, dim), out, group, numerics, max_sms)


def run_problem(problem: Problem, inputs: tuple[torch.Tensor, ...], outputs: tuple[torch.Tensor, ...]) -> None:
    """The public call that asks for `problem` on the default group, for benchmarks."""
    reduce_scatter(inputs[0], op=problem.reduction, out=outputs[0])
