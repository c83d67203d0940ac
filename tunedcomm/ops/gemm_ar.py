"""`tunedcomm.gemm_ar`."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.compiler import is_dynamo_compiling

from tunedcomm.kernels.gemm.op import operands_of, wanted_of
from tunedcomm.ops._gemm import GemmForm
from tunedcomm.ops._many import ManyPath
from tunedcomm.ops._path import world
from tunedcomm.spec import NumericsPolicy, Problem

__all__ = ["gemm_ar", "run_problem"]


class _GemmAr(GemmForm):
    op = "gemm_ar"
    inputs = ("a", "b", "bias", "scale_a", "scale_b")
    optional = ("bias", "scale_a", "scale_b")
    reduction = "sum"
    least_dims = 1


_path = ManyPath(_GemmAr())
_last = _path.last


def gemm_ar(
    a: torch.Tensor,
    b: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    scale_a: torch.Tensor | None = None,
    scale_b: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    out: torch.Tensor | None = None,
    group: dist.ProcessGroup | None = None,
    numerics: NumericsPolicy = "default",
    max_sms: int | None = None,
) -> torch.Tensor:
    """Multiply `a @ b` on every rank and sum the products over all ranks of `group`; every rank gets the whole sum.

    Args:
        a: [..., K], any strides: this rank's columns of A. Kernels take bf16, fp16 and fp8 e4m3; fp32 and fp64 always
            run the variant `library`. The same shape and dtype on every rank.
        b: [K, N] of `a`'s dtype. A contiguous matrix and the transposed view of a contiguous [N, K] weight are taken as
            they lie, anything else is copied; which of the two it is must be alike on every rank, as all shapes must.
        bias: [N] of the result's dtype, added once to the sum; None adds nothing. The same on every rank for the
            results to be.
        scale_a, scale_b: fp32 on the device, with fp8 operands and only then: one element each, or [..., 1] and [1, N]
            for every row of `a` and every column of `b`. They multiply the product before it is rounded and summed.
        out_dtype: of the result. With bf16 and fp16 operands theirs (as None) or fp32; with fp8 operands bf16 (as
            None), fp16 or fp32; fp32 and fp64 operands keep their own.
        out: where to write: [..., N] of the result's dtype, any strides, memory of its own. None allocates it.
        group: process group; None is the default group. Its first call is collective set-up: all ranks make it, outside
            of graph captures.
        numerics: classes of variants that may run: `default` admits `ordered` and `library`, `ordered` that one alone,
            `any` all. Ordered: multiplied in fp32 with one accumulator, each rank's product rounded once, summed in
            rank order with one rounding at the end.
        max_sms: SMs at most that the kernels may take, a whole number, the same on every rank, for callers that compute
            beside it. The best candidate that takes no more runs, or, where there is none, the variant `library`, which
            chooses for itself. None: no limit.

    Returns:
        `out`, or a new contiguous tensor [..., N].

    Raises:
        NotInitializedError: no default process group, or a first call inside a graph capture.
        GroupError: this rank is not a member of `group`, or the group has no backend for the tensors' device.
        UnsupportedInputError: shapes, dtypes, scales, a device, option or output that cannot be served; says what to
            do.
        InfeasibleError: a variant that is forced cannot run the call; `numerics` leaves no candidate that can; or with
            TUNEDCOMM_MODE=force no database has an answer.
        PeerTimeoutError: an earlier call on the group waited for a peer in vain.

    Can be captured in CUDA graphs; enqueues on the current stream; never synchronises the host.
    """
    tensors, option = (a, b, bias, scale_a, scale_b, out), (out_dtype,)
    if is_dynamo_compiling():
        return _path.operate(tensors, option, group, numerics, max_sms)[0]
    if group is None:
        group = world._default_pg  # looked up anew: groups may be destroyed and made again
    fast = _last.get(group)
    if fast is not None:
        results = fast(tensors, option, numerics, max_sms)
        if results is not None:
            return results[0]
    return _path.call(tensors, option, group, numerics, max_sms)[0]


def run_problem(problem: Problem, inputs: tuple[torch.Tensor, ...], outputs: tuple[torch.Tensor, ...]) -> None:
    """The public call that asks for `problem` on the default group, for benchmarks."""
    operands = operands_of(problem, inputs)
    gemm_ar(
        operands.a,
        operands.b.t() if wanted_of(problem).nk else operands.b,
        bias=operands.bias,
        scale_a=operands.scale_a,
        scale_b=operands.scale_b,
        out_dtype=outputs[0].dtype,
        out=outputs[0],
    )
