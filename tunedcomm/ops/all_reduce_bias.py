"""`tunedcomm.all_reduce_bias`."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.compiler import is_dynamo_compiling

from tunedcomm.errors import UnsupportedInputError
from tunedcomm.ops._checks import FLOATS, check_dtype, check_extra
from tunedcomm.ops._many import ManyForm, ManyPath, Tensors
from tunedcomm.ops._path import world
from tunedcomm.spec import NumericsPolicy, Problem

__all__ = ["all_reduce_bias", "run_problem"]


class _AllReduceBias(ManyForm):
    """No options; the result may take the input's place."""

    op = "all_reduce_bias"
    inputs = ("x", "bias")
    outputs = ("out",)
    aliases = {"out": "x"}  # noqa: RUF012 - never changed

    def check(self, inputs: Tensors, option: Any, world_size: int) -> None:
        del option, world_size
        x, bias = inputs
        check_dtype(self.op, x, FLOATS)
        if x.dim() == 0 or bias is None:
            what = "x has no dimensions" if x.dim() == 0 else "bias is None"
            raise UnsupportedInputError(f"{self.op} wants x [..., n] and bias [n], but {what}")
        check_extra(self.op, x, bias, "bias", (x.shape[-1],))

    def problem(self, inputs: Tensors, option: Any, world_size: int) -> Problem:
        del option
        x, columns = inputs[0], inputs[0].shape[-1]
        return Problem(self.op, (x.numel() // columns, columns), FLOATS[x.dtype], world_size, mode="eager")

    def results(self, inputs: Tensors, option: Any, world_size: int) -> list[tuple[tuple[int, ...], torch.dtype]]:
        del option, world_size
        return [(tuple(inputs[0].shape), inputs[0].dtype)]

    def scalars(self, option: Any) -> tuple[float, ...]:
        del option
        return ()

    def words(self, option: Any) -> tuple[int, ...]:
        del option
        return ()

    def alone(self, inputs: Tensors, option: Any) -> tuple[torch.Tensor, ...]:
        del option
        return (inputs[0] + inputs[1],)


_path = ManyPath(_AllReduceBias())
_last = _path.last


def all_reduce_bias(
    x: torch.Tensor,
    bias: torch.Tensor,
    *,
    group: dist.ProcessGroup | None = None,
    out: torch.Tensor | None = None,
    numerics: NumericsPolicy = "default",
    max_sms: int | None = None,
) -> torch.Tensor:
    """Sum `x` over all ranks of `group` and add `bias` along the last dimension; every rank gets the result.

    The sum is rounded to `x`'s dtype as `all_reduce` rounds it, then the bias is added in fp32 and rounded once more.

    Args:
        x: [..., n], any strides. Kernels take bf16, fp16 and fp32; fp64 always runs the variant `library`. The same
            shape and dtype on every rank. Left as it is unless `out` is `x`.
        bias: [n], of `x`'s dtype, the same on every rank.
        group: process group; None is the default group. Its first call is collective set-up: all ranks make it, outside
            of graph captures.
        out: where to write: same shape, dtype and device as `x`, any strides; may be `x`. None allocates it.
        numerics: classes of variants that may run: `default` admits `ordered` and `library`, `ordered` that one alone,
            `any` all. Ordered: summed in fp32 in rank order, then the rule above; the bits do not depend on tuning.
        max_sms: SMs at most that the kernel may take, a whole number, the same on every rank, for callers that compute
            beside it. The best candidate that takes no more runs, or, where there is none, the variant `library`, which
            chooses for itself. None: no limit.

    Returns:
        `out`, or a new contiguous tensor of `x`'s shape and dtype.

    Raises:
        NotInitializedError: no default process group, or a first call inside a graph capture.
        GroupError: this rank is not a member of `group`, or the group has no backend for the tensors' device.
        UnsupportedInputError: a dtype, layout, device, shape, option or `out` that cannot be served; says what to do.
        InfeasibleError: a variant that is forced cannot run the call; `numerics` leaves no candidate that can; or with
            TUNEDCOMM_MODE=force no database has an answer.
        PeerTimeoutError: an earlier call on the group waited for a peer in vain.

    Rows that are no multiple of 16 bytes run the variant `library`. Can be captured in CUDA graphs; enqueues on the
    current stream; never synchronises the host.
    """
    if is_dynamo_compiling():
        return _path.operate((x, bias, out), None, group, numerics, max_sms)[0]
    if group is None:
        group = world._default_pg  # looked up anew: groups may be destroyed and made again
    tensors = (x, bias, out)
    fast = _last.get(group)
    if fast is not None:
        results = fast(tensors, None, numerics, max_sms)
        if results is not None:
            return results[0]
    return _path.call(tensors, None, group, numerics, max_sms)[0]


def run_problem(problem: Problem, inputs: tuple[torch.Tensor, ...], outputs: tuple[torch.Tensor, ...]) -> None:
    """The public call that asks for `problem` on the default group, for benchmarks."""
    del problem
    all_reduce_bias(inputs[0], inputs[1], out=outputs[0])
