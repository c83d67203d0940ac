"""`tunedcomm.ag_gemm`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch.compiler import is_dynamo_compiling

from tunedcomm.kernels.gemm.op import operands_of, wanted_of
from tunedcomm.ops import torch_ops
from tunedcomm.ops._gemm import GemmForm
from tunedcomm.ops._gemm_several import Several
from tunedcomm.ops._many import ManyPath, Tensors
from tunedcomm.ops._path import world
from tunedcomm.spec import NumericsPolicy, Problem

__all__ = ["ag_gemm", "run_problem"]

Result: TypeAlias = "torch.Tensor | list[torch.Tensor]"


class _AgGemm(GemmForm):
    op = "ag_gemm"

    def leading(self, a: torch.Tensor, world_size: int) -> tuple[int, ...]:
        return (a.shape[0] * world_size, *a.shape[1:-1])

    def problem_rows(self, a: torch.Tensor, world_size: int) -> tuple[int, ...]:
        return self.leading(a, world_size)

    def words(self, option: Any) -> tuple[int, ...]:
        return (0,)  # in place of the gathered a

    def is_idle(self, inputs: Tensors, results: Tensors, option: Any) -> bool:
        """Nothing is gathered where K is 0, on every rank alike; where N is, A may still be."""
        if inputs[0].shape[-1]:
            return super().is_idle(inputs, results, option)
        results[0].zero_()
        return True


class _AgGemmGathered(_AgGemm):
    outputs = ("out", "gathered")

    @property
    def operator(self) -> str:
        return "ag_gemm_gathered"

    def words(self, option: Any) -> tuple[int, ...]:
        return ()


_path, _gathered_path = ManyPath(_AgGemm()), ManyPath(_AgGemmGathered())
_last, _gathered_last = _path.last, _gathered_path.last


def _call(
    tensors: tuple[Any, ...], out_dtype: Any, group: Any, numerics: NumericsPolicy, max_sms: int | None
) -> tuple[torch.Tensor, ...]:
    """One b; tensors are a, b, the scales and out, and a None behind them where the gathered a is wanted."""
    gathered = len(tensors) > 5
    fast = (_gathered_last if gathered else _last).get(group)
    option = (out_dtype,)
    if fast is not None:
        results = fast(tensors, option, numerics, max_sms)
        if results is not None:
            return results
    return (_gathered_path if gathered else _path).call(tensors, option, group, numerics, max_sms)


_several = Several(_AgGemm(), _call)
torch_ops.define(torch_ops.ListOperator("ag_gemm_list", _several))


def ag_gemm(
    a_shard: torch.Tensor,
    b: torch.Tensor | Sequence[torch.Tensor],
    *,
    scale_a: torch.Tensor | None = None,
    scale_b: torch.Tensor | Sequence[torch.Tensor] | None = None,
    out_dtype: torch.dtype | None = None,
    return_gathered: bool = False,
    out: torch.Tensor | Sequence[torch.Tensor] | None = None,
    group: dist.ProcessGroup | None = None,
    numerics: NumericsPolicy = "default",
    max_sms: int | None = None,
) -> Result | tuple[Result, torch.Tensor]:
    """Gather the ranks' `a_shard` along the first dimension and multiply: `all_gather(a_shard) @ b`.

    Args:
        a_shard: [m, ..., K], any strides: this rank's rows of A. Kernels take bf16, fp16 and fp8 e4m3; fp32 and fp64
            always run the variant `library`. The same shape and dtype on every rank.
        b: [K, N] of `a_shard`'s dtype. A contiguous matrix and the transposed view of a contiguous [N, K] weight are
            taken as they lie, anything else is copied; which of the two it is must be alike on every rank, as all
            shapes must. A list or tuple of them is multiplied one by one by what was gathered once: the first of the
            widest as one `b` would be, the others by cuBLAS (PyTorch's product on CPUs).
        scale_a, scale_b: fp32 on the device, with fp8 operands and only then. Either one element each, `scale_a` the
            same on every rank, for it is that of the whole gathered matrix; or [m, ..., 1], gathered with `a_shard`,
            and [1, N]. They multiply the product. With a list of b `scale_b` is a list as long.
        out_dtype: of the result. With bf16 and fp16 operands theirs (as None) or fp32; with fp8 operands bf16 (as
            None), fp16 or fp32; fp32 and fp64 operands keep their own.
        return_gathered: also return the gathered `a_shard`.
        out: where to write: [m · world_size, ..., N] of the result's dtype, any strides, memory of its own. With a list
            of b a list as long. None allocates it.
        group: process group; None is the default group. Its first call is collective set-up: all ranks make it, outside
            of graph captures.
        numerics: classes of variants that may run: `default` admits `ordered` and `library`, `ordered` that one alone,
            `any` all. Ordered: multiplied in fp32 with one accumulator, rounded once.
        max_sms: SMs at most that the kernels may take, a whole number, the same on every rank, for callers that compute
            beside it. The best candidate that takes no more runs, or, where there is none, the variant `library`, which
            chooses for itself. None: no limit.

    Returns:
        `out`, or a new contiguous tensor, or a list of them; with `return_gathered` that and the gathered `a_shard`, [m
        · world_size, ..., K].

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
    compiling = is_dynamo_compiling()
    if group is None and not compiling:
        group = world._default_pg  # looked up anew: groups may be destroyed and made again
    if isinstance(b, (list, tuple)):
        found, gathered = _several.call(a_shard, b, (scale_a, scale_b, out), out_dtype, group, numerics, max_sms)
        return (found, gathered) if return_gathered else found
    tensors = (a_shard, b, scale_a, scale_b, out, None) if return_gathered else (a_shard, b, scale_a, scale_b, out)
    if compiling:
        path = _gathered_path if return_gathered else _path
        results = path.operate(tensors, (out_dtype,), group, numerics, max_sms)
    else:
        results = _call(tensors, out_dtype, group, numerics, max_sms)
    return results if return_gathered else results[0]  # type: ignore[return-value]


def run_problem(problem: Problem, inputs: tuple[torch.Tensor, ...], outputs: tuple[torch.Tensor, ...]) -> None:
    """The public call that asks for `problem` on the default group, for benchmarks."""
    operands, wanted = operands_of(problem, inputs), wanted_of(problem)
    b = operands.b.t() if wanted.nk else operands.b
    tensors = (operands.a, b, operands.scale_a, operands.scale_b, *outputs)
    _call(tensors, outputs[0].dtype, world._default_pg, "default", None)
