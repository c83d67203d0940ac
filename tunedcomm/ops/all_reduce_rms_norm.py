"""`tunedcomm.all_reduce_rms_norm`."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from torch.compiler import is_dynamo_compiling

from tunedcomm.errors import UnsupportedInputError
from tunedcomm.kernels.all_reduce_rms_norm.library import add_and_norm
from tunedcomm.kernels.all_reduce_rms_norm.op import eps_bits
from tunedcomm.ops._checks import FLOATS, check_dtype, check_extra
from tunedcomm.ops._many import ManyForm, ManyPath, Tensors
from tunedcomm.ops._path import world
from tunedcomm.spec import NumericsPolicy, Problem

__all__ = ["all_reduce_rms_norm", "run_problem"]


class _AllReduceRmsNorm(ManyForm):
    """The option is (eps, dtype of the result, None for x's)."""

    op = "all_reduce_rms_norm"
    inputs = ("x", "weight", "bias", "residual", "scale")
    outputs = ("out", "residual_out")
    aliases = {"residual_out": "residual"}  # noqa: RUF012 - never changed
    optional = ("bias", "residual", "scale")
    arguments = ("float eps", "ScalarType? out_dtype")

    def check(self, inputs: Tensors, option: Any, world_size: int) -> None:
        del world_size
        x, weight, bias, residual, scale = inputs
        eps, out_dtype = option
        check_dtype(self.op, x, FLOATS)
        if x.dim() == 0:
            raise UnsupportedInputError(
                f"x of {self.op} has no dimensions; the last one is normalised: pass [..., hidden]"
            )
        if weight is None:
            raise UnsupportedInputError(f"{self.op} wants a weight of shape ({x.shape[-1]},), got None")
        check_extra(self.op, x, weight, "weight", (x.shape[-1],))
        check_extra(self.op, x, bias, "bias", (x.shape[-1],))
        check_extra(self.op, x, residual, "residual", tuple(x.shape))
        if not isinstance(eps, (int, float)) or isinstance(eps, bool) or not 0 <= eps < math.inf:
            raise UnsupportedInputError(f"eps={eps!r} is no number from 0 on; 1e-6 is the default")
        if out_dtype not in (None, torch.float8_e4m3fn):
            raise UnsupportedInputError(f"out_dtype={out_dtype!r} is neither None (x's dtype) nor torch.float8_e4m3fn")
        if (scale is None) != (out_dtype is None):
            raise UnsupportedInputError(
                "out_dtype=torch.float8_e4m3fn and scale= belong together; pass both or neither"
            )
        if scale is not None and (scale.numel() != 1 or scale.dtype != torch.float32):
            raise UnsupportedInputError(
                f"scale has {scale.numel()} elements of {scale.dtype}; it must be one torch.float32"
            )

    def problem(self, inputs: Tensors, option: Any, world_size: int) -> Problem:
        x, _, bias, residual, scale = inputs
        hidden = x.shape[-1]
        layout = "+".join(n for n, extra in (("bias", bias), ("residual", residual)) if extra is not None)
        scaling = "fp8" if scale is not None else ""
        shape = (x.numel() // hidden, hidden)
        return Problem(self.op, shape, FLOATS[x.dtype], world_size, layout=layout, scaling=scaling, mode="eager")

    def results(self, inputs: Tensors, option: Any, world_size: int) -> list[tuple[tuple[int, ...], torch.dtype]]:
        del world_size
        x, shape = inputs[0], tuple(inputs[0].shape)
        return [(shape, option[1] or x.dtype), (shape, x.dtype)]

    def refusal(self, inputs: Tensors, option: Any) -> str:
        del inputs
        return f"{self.op} with out_dtype={option[1]}" if option[1] is not None else ""

    def scalars(self, option: Any) -> tuple[float, ...]:
        return (float(option[0]),)

    def words(self, option: Any) -> tuple[int, ...]:
        return (eps_bits(float(option[0])),)

    def alone(self, inputs: Tensors, option: Any) -> tuple[torch.Tensor, ...]:
        x, weight, bias, residual, scale = inputs
        return add_and_norm(x, weight, bias, residual, scale, float(option[0]))


_path = ManyPath(_AllReduceRmsNorm())
_last = _path.last


def all_reduce_rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    eps: float = 1e-6,
    group: dist.ProcessGroup | None = None,
    out: torch.Tensor | None = None,
    residual_out: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    scale: torch.Tensor | None = None,
    numerics: NumericsPolicy = "default",
    max_sms: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sum `x` over all ranks of `group`, add bias and residual, and take the RMS norm over the last dimension.

    With s the sum, rounded to `x`'s dtype as `all_reduce` rounds it:

        residual_out = s + bias + residual                                    added in fp32, rounded once
        y = residual_out / sqrt(mean(residual_out²) + eps) · weight           from the rounded residual_out, in fp32

    Args:
        x: partial sums, [..., hidden], any strides. Kernels take bf16, fp16 and fp32; fp64 always runs the variant
            `library`. The same shape and dtype on every rank. Left as it is.
        weight: [hidden], of `x`'s dtype. As bias, residual, eps and scale the same on every rank for the results to be.
        bias: [hidden], of `x`'s dtype, added to every row of the sum; None adds nothing.
        residual: of `x`'s shape and dtype, added to the sum; None adds nothing.
        eps: added to the mean of squares; a number from 0 on.
        group: process group; None is the default group. Its first call is collective set-up: all ranks make it, outside
            of graph captures.
        out: where to write y: of `x`'s shape and `out_dtype`, any strides, memory of its own. None allocates it.
        residual_out: where to write s + bias + residual: of `x`'s shape and dtype, any strides; may be `residual`. None
            allocates it.
        out_dtype: `torch.float8_e4m3fn` for y / scale, saturated, in that dtype; None for y in `x`'s.
        scale: one fp32 on the device, with `out_dtype` and only then. y is multiplied by its reciprocal.
        numerics: classes of variants that may run: `default` admits `ordered` and `library`, `ordered` that one alone,
            `any` all. Ordered: summed in fp32 in rank order, then the rule above with all sums in a fixed order; the
            bits do not depend on tuning.
        max_sms: SMs at most that the kernels may take, a whole number, the same on every rank, for callers that compute
            beside it. The best candidate that takes no more runs, or, where there is none, the variant `library`, which
            chooses for itself. None: no limit.

    Returns:
        (y, residual_out): what was given, or new contiguous tensors.

    Raises:
        NotInitializedError: no default process group, or a first call inside a graph capture.
        GroupError: this rank is not a member of `group`, or the group has no backend for the tensors' device.
        UnsupportedInputError: a dtype, layout, device, shape, option or output that cannot be served; says what to do.
        InfeasibleError: a variant that is forced cannot run the call; `numerics` leaves no candidate that can; or with
            TUNEDCOMM_MODE=force no database has an answer.
        PeerTimeoutError: an earlier call on the group waited for a peer in vain.

    Rows that are no multiple of 16 bytes, or longer than 32 KiB, run the variant `library`. Can be captured in CUDA
    graphs; enqueues on the current stream; never synchronises the host.
    """
    tensors = (x, weight, bias, residual, scale, out, residual_out)
    option = (eps, out_dtype)
    if is_dynamo_compiling():
        return _path.operate(tensors, option, group, numerics, max_sms)  # type: ignore[return-value]
    if group is None:
        group = world._default_pg  # looked up anew: groups may be destroyed and made again
    fast = _last.get(group)
    if fast is not None:
        results = fast(tensors, option, numerics, max_sms)
        if results is not None:
            return results  # type: ignore[return-value]
    return _path.call(tensors, option, group, numerics, max_sms)  # type: ignore[return-value]


def run_problem(problem: Problem, inputs: tuple[torch.Tensor, ...], outputs: tuple[torch.Tensor, ...]) -> None:
    """The public call that asks for `problem` on the default group, for benchmarks."""
    rest = list(inputs[2:])
    bias = rest.pop(0) if "bias" in problem.layout else None
    residual = rest.pop(0) if "residual" in problem.layout else None
    scale = rest.pop(0) if problem.scaling else None
    y, h = outputs
    dtype = torch.float8_e4m3fn if problem.scaling else None
    all_reduce_rms_norm(
        inputs[0], inputs[1], bias=bias, residual=residual, out=y, residual_out=h, out_dtype=dtype, scale=scale
    )
