"""`tunedcomm.gemm_rs`."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.compiler import is_dynamo_compiling

from tunedcomm.errors import UnsupportedInputError
from tunedcomm.kernels.gemm.op import operands_of, wanted_of
from tunedcomm.ops._checks import check_reduction
from tunedcomm.ops._gemm import GemmForm
from tunedcomm.ops._many import ManyPath, Tensors
from tunedcomm.ops._path import world
from tunedcomm.spec import NumericsPolicy, Problem

__all__ = ["gemm_rs", "run_problem"]

_REDUCTIONS = ("sum", "avg")


class _GemmRs(GemmForm):
    op = "gemm_rs"
    arguments = ("ScalarType? out_dtype", "str op")

    def leading(self, a: torch.Tensor, world_size: int) -> tuple[int, ...]:
        return (a.shape[0] // world_size, *a.shape[1:-1])

    def check(self, inputs: Tensors, option: Any, world_size: int) -> None:
        super().check(inputs, option, world_size)
        a = inputs[0]
        check_reduction(option[1], a, _REDUCTIONS)
        if a.shape[0] % world_size:
            raise UnsupportedInputError(
                f"{self.op} splits dimension 0 of a, {a.shape[0]} long, into {world_size} equal parts; it must be a "
                f"multiple of {world_size} (shape {tuple(a.shape)}): pad a with rows of zeros"
            )


_path = ManyPath(_GemmRs())
_last = _path.last


def gemm_rs(
    a: torch.Tensor,
    b: torch.Tensor,
    *,
    op: str = "sum",
    scale_a: torch.Tensor | None = None,
    scale_b: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    out: torch.Tensor | None = None,
    group: dist.ProcessGroup | None = None,
    numerics: NumericsPolicy = "default",
    max_sms: int | None = None,
) -> torch.Tensor:
    """Multiply `a @ b` on every rank and sum the products over the ranks of `group`; each gets its rows of the sum.

    Args:
        a: [M, ..., K], any strides: this rank's columns of A. Kernels take bf16, fp16 and fp8 e4m3; fp32 and fp64
            always run the variant `library`. M must be a multiple of the group's size: pad it with rows of zeros where
            it is not. The same shape and dtype on every rank.
        b: [K, N] of `a`'s dtype. A contiguous matrix and the transposed view of a contiguous [N, K] weight are taken as
            they lie, anything else is copied; which of the two it is must be alike on every rank, as all shapes must.
        op: `sum` or `avg`.
        scale_a, scale_b: fp32 on the device, with fp8 operands and only then: one element each, or [M, ..., 1] and [1,
            N] for every row of `a` and every column of `b`. They multiply the product before it is rounded and summed.
        out_dtype: of the result. With bf16 and fp16 operands theirs (as None) or fp32; with fp8 operands bf16 (as
            None), fp16 or fp32; fp32 and fp64 operands keep their own.
        out: where to write: [M / world_size, ..., N] of the result's dtype, any strides, memory of its own. None
            allocates it.
        group: process group; None is the default group. Its first call is collective set-up: all ranks make it, outside
            of graph captures.
        numerics: classes of variants that may run: `default` admits `ordered` and `library`, `ordered` that one alone,
            `any` all. Ordered: multiplied in fp32 with one accumulator, each rank's product rounded once, summed in
            rank order with one rounding at the end.
        max_sms: SMs at most that the kernels may take, a whole number, the same on every rank, for callers that compute
            beside it. The best candidate that takes no more runs, or, where there is none, the variant `library`, which
            chooses for itself. None: no limit.

    Returns:
        `out`, or a new contiguous tensor [M / world_size, ..., N]: rank r has the r-th of as many equal parts of the
        rows.

    Raises:
        NotInitializedError: no default process group, or a first call inside a graph capture.
        GroupError: this rank is not a member of `group`, or the group has no backend for the tensors' device.
        UnsupportedInputError: shapes (M that is no multiple of the group's size among them), dtypes, scales, a device,
            option or output that cannot be served; says what to do.
        InfeasibleError: a variant that is forced cannot run the call; `numerics` leaves no candidate that can; or with
            TUNEDCOMM_MODE=force no database has an answer.
        PeerTimeoutError: an earlier call on the group waited for a peer in vain.

    Can be captured in CUDA graphs; enqueues on the current stream; never synchronises the host.
    """
    tensors, option = (a, b, scale_a, scale_b, out), (out_dtype, op)
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
    gemm_rs(
        operands.a,
        operands.b.t() if wanted_of(problem).nk else operands.b,
        op=problem.reduction,
        scale_a=operands.scale_a,
        scale_b=operands.scale_b,
        out_dtype=outputs[0].dtype,
        out=outputs[0],
    )
