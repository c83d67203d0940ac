"""`all_reduce_rms_norm`: the adapters of its basic forms and of those that make scales, and the public function."""

from __future__ import annotations

import math
from typing import Any, Literal, TypeAlias, overload

import torch
import torch.distributed as dist
from torch.compiler import is_dynamo_compiling

from tunedcomm.errors import UnsupportedInputError
from tunedcomm.fp8 import GROUP
from tunedcomm.kernels.all_reduce_rms_norm.op import (
    EPS,
    Given,
    add_and_norm,
    eps_bits,
    form_named,
    form_of,
    given_of,
)
from tunedcomm.ops import autograd
from tunedcomm.ops.adapter import Formula, Group, OpAdapter, Results, Tensors, problem_of
from tunedcomm.ops.arguments import (
    FLOATS,
    check_bias,
    check_dtype,
    check_extra,
)
from tunedcomm.ops.call import CallPath
from tunedcomm.ops.fast_call import stride_of, world
from tunedcomm.spec import NumericsPolicy, Problem

Quantize: TypeAlias = Literal["tensor", "token", "group128"]
# `quantize` of all_reduce_rms_norm, "" for None, to its name in problems.
QUANTIZE = {"": "", "tensor": "fp8", "token": "token", "group128": "group128"}


class _AllReduceRmsNorm(OpAdapter):
    """The basic forms: y in x's dtype, or in fp8 with a given scale."""

    op = "all_reduce_rms_norm"
    inputs = ("x", "weight", "bias", "residual", "scale")
    outputs: tuple[str, ...] = ("out", "residual_out")
    aliases = {"residual_out": "residual"}  # noqa: RUF012 - never changed
    optional = ("bias", "residual", "scale")
    options: tuple[str, ...] = ("float eps", "ScalarType? out_dtype")
    gradient: Formula | None = autograd.keep_norm, autograd.all_reduce_rms_norm

    def check(self, inputs: Tensors, options: Any, world_size: int) -> None:
        self.check_operands(inputs, options[0])
        out_dtype, scale = options[1], inputs[4]
        check_extra(self.op, inputs[0], inputs[2], "bias", (inputs[0].shape[-1],))
        if out_dtype not in (None, torch.float8_e4m3fn):
            raise UnsupportedInputError(f"out_dtype={out_dtype!r} is neither None (x's dtype) nor torch.float8_e4m3fn")
        if (scale is None) != (out_dtype is None):
            raise UnsupportedInputError(
                "out_dtype=torch.float8_e4m3fn and scale= belong together; pass both or neither"
            )

    def check_operands(self, inputs: Tensors, eps: Any) -> None:
        """Refuse tensors, and an eps, that no form takes."""
        x, weight, _, residual, scale = inputs
        check_dtype(self.op, x, FLOATS)
        if x.dim() == 0:
            raise UnsupportedInputError(
                f"x of {self.op} has no dimensions; the last one is normalised: pass [..., hidden]"
            )
        if weight is None:
            raise UnsupportedInputError(f"{self.op} wants a weight of shape ({x.shape[-1]},), got None")
        check_extra(self.op, x, weight, "weight", (x.shape[-1],))
        check_extra(self.op, x, residual, "residual", tuple(x.shape))
        if not isinstance(eps, (int, float)) or isinstance(eps, bool) or not 0 <= eps < math.inf:
            raise UnsupportedInputError(f"eps={eps!r} is not a number from 0 on; 1e-6 is the default")
        if scale is not None and (scale.numel() != 1 or scale.dtype != torch.float32):
            raise UnsupportedInputError(
                f"scale has {scale.numel()} elements of {scale.dtype}; it must be one torch.float32"
            )

    def named(self, inputs: Tensors, options: Any) -> tuple[str, str]:
        """Layout and scaling of the problem."""
        _, _, bias, residual, scale = inputs
        layout = "+".join(n for n, extra in (("bias", bias), ("residual", residual)) if extra is not None)
        return layout, "fp8" if scale is not None else ""

    def problem(self, inputs: Tensors, options: Any, world_size: int) -> Problem:
        x, hidden = inputs[0], inputs[0].shape[-1]
        layout, scaling = self.named(inputs, options)
        shape = (x.numel() // max(hidden, 1), hidden)
        return problem_of(self.op, shape, FLOATS[x.dtype], world_size, layout=layout, scaling=scaling, mode="eager")

    def results(self, inputs: Tensors, options: Any, world_size: int) -> Results:
        x, shape = inputs[0], tuple(inputs[0].shape)
        return [(shape, options[1] or x.dtype), (shape, x.dtype)]

    def asks_for(self, problem: Problem) -> bool:
        return form_of(problem).is_basic

    def call_of(self, problem: Problem, inputs: Tensors, outputs: Tensors) -> tuple[Tensors, tuple[Any, ...]]:
        return (*given_of(problem, inputs)[:5], *outputs), (EPS, torch.float8_e4m3fn if problem.scaling else None)

    def refusal(self, inputs: Tensors, options: Any) -> str:
        return f"{self.op} with out_dtype={options[1]}" if options[1] is not None else ""

    def scalars(self, inputs: Tensors, options: Any) -> Tensors:
        return (float(options[0]),)

    def scalar_args(self, options: Any) -> tuple[int, ...]:
        return (eps_bits(float(options[0])),)

    def single_rank_result(self, inputs: Tensors, options: Any) -> Tensors:
        given = Given._make((*inputs, float(options[0]), 0.0))
        return add_and_norm(given.x, given, form_named(*self.named(inputs, options)))


class _AllReduceRmsNormQuantized(_AllReduceRmsNorm):
    """The other forms. Scales have the shape of their memory; outputs that a form does not have are empty."""

    suffix = "_quantized"
    outputs = ("out", "residual_out", "scales", "norm_out")
    options = (
        *("float eps", "str quantize", "str scales_layout", "bool pow2_scales", "bool with_norm"),
        "float weight_offset",
    )
    gradient = autograd.keep_nothing, autograd.refused

    def check(self, inputs: Tensors, options: Any, world_size: int) -> None:
        x, _, bias, residual, scale = inputs
        eps, quantize, scales_layout, pow2_scales, _, offset = options
        self.check_operands(inputs, eps)
        check_bias(self.op, x, bias)
        if quantize not in QUANTIZE:
            allowed = ", ".join(repr(name) for name in QUANTIZE if name)
            raise UnsupportedInputError(f"quantize={quantize!r} is neither None nor one of {allowed}")
        if (scale is not None) != (quantize == "tensor"):
            raise UnsupportedInputError("quantize='tensor' and scale= belong together; other forms make their scales")
        if scales_layout not in ("row", "column"):
            raise UnsupportedInputError(f"scales_layout={scales_layout!r} is neither 'row' nor 'column'")
        if quantize != "group128" and (pow2_scales or scales_layout == "column"):
            raise UnsupportedInputError("pow2_scales=True and scales_layout='column' are for quantize='group128' alone")
        if quantize == "group128" and x.shape[-1] % GROUP:
            raise UnsupportedInputError(
                f"quantize='group128' wants a multiple of {GROUP} columns, x has {x.shape[-1]}; pad them, or pass "
                "quantize='token'"
            )
        if not isinstance(offset, (int, float)) or isinstance(offset, bool) or not math.isfinite(offset):
            raise UnsupportedInputError(f"weight_offset={offset!r} is not a finite number; 0.0 is the default")
        if form_named(*self.named(inputs, options)).is_basic or (_is_full(bias) and residual is None):
            raise UnsupportedInputError(
                f"{self.operator} serves what {self.op} does not; call that, with a bias of x's shape as the residual"
            )

    def named(self, inputs: Tensors, options: Any) -> tuple[str, str]:
        _, _, bias, residual, _ = inputs
        _, quantize, scales_layout, pow2_scales, with_norm, offset = options
        layout = {
            "full_bias" if _is_full(bias) else "bias": bias is not None,
            "residual": residual is not None,
            "offset": bool(offset),
        }
        scaling = {
            QUANTIZE[quantize]: bool(quantize),
            "columns": scales_layout == "column",
            "pow2": pow2_scales,
            "norm": with_norm and bool(quantize),
        }
        return tuple("+".join(name for name, there in parts.items() if there) for parts in (layout, scaling))  # type: ignore[return-value]

    def results(self, inputs: Tensors, options: Any, world_size: int) -> Results:
        x, shape = inputs[0], tuple(inputs[0].shape)
        form = form_named(*self.named(inputs, options))
        scales = form.scales_shape(math.prod(shape[:-1]), shape[-1])
        if not form.columns:
            scales = (*shape[:-1], *scales[1:]) if form.num_scales(shape[-1]) else scales
        dtype = torch.float8_e4m3fn if form.quantize else x.dtype
        return [(shape, dtype), (shape, x.dtype), (scales, torch.float32), (shape if form.norm else (0,), x.dtype)]

    def asks_for(self, problem: Problem) -> bool:
        return not form_of(problem).is_basic

    def call_of(self, problem: Problem, inputs: Tensors, outputs: Tensors) -> tuple[Tensors, tuple[Any, ...]]:
        given, form, (out, residual_out, scales, norm) = given_of(problem, inputs), form_of(problem), outputs
        quantize = next(name for name, value in QUANTIZE.items() if value == form.quantize)
        shape = form.scales_shape(*problem.shape)
        tensors = (*given[:5], out, residual_out, scales.as_strided(shape, stride_of(shape)), norm)
        return tensors, (EPS, quantize, "column" if form.columns else "row", form.pow2, form.norm, given.offset)

    def refusal(self, inputs: Tensors, options: Any) -> str:
        return f"{self.op} with quantize={options[1] or None!r}, weight_offset={options[5]!r} and a bias of x's shape"

    def scalars(self, inputs: Tensors, options: Any) -> Tensors:
        return float(options[0]), float(options[5])

    def scalar_args(self, options: Any) -> tuple[int, ...]:
        return eps_bits(float(options[0])), eps_bits(float(options[5]))

    def single_rank_result(self, inputs: Tensors, options: Any) -> Tensors:
        given, form = Given(*inputs, *self.scalars(inputs, options)), form_named(*self.named(inputs, options))
        y, h, scales, norm = add_and_norm(given.x, given, form)
        if form.columns:
            rows = scales.reshape(-1, scales.shape[-1]).t()
            scales = torch.nn.functional.pad(rows, (0, -rows.shape[1] % 4))
        return y, h, scales, norm


_all_reduce_rms_norm: CallPath[tuple[torch.Tensor, torch.Tensor]] = CallPath(_AllReduceRmsNorm())
_quantized: CallPath[tuple[torch.Tensor, ...]] = CallPath(_AllReduceRmsNormQuantized())


def _is_full(bias: torch.Tensor | None) -> bool:
    """True for a bias of x's shape and not of a row's."""
    return isinstance(bias, torch.Tensor) and bias.dim() > 1


def rms_norm_quantized(
    tensors: Tensors, options: tuple[Any, ...], group: Group, numerics: NumericsPolicy | None, max_sms: int | None
) -> tuple[torch.Tensor, ...]:
    """(y, residual_out, scales, norm) of a form that is not basic, as the operator has them."""
    if not is_dynamo_compiling():
        fast = _quantized.last_fast_calls[world._default_pg if group is None else group]
        if (results := fast(*tensors, *options, numerics, max_sms)) is not None:
            return results
    return _quantized.call(tensors, options, group, numerics, max_sms)


@overload
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
    numerics: NumericsPolicy | None = None,
    max_sms: int | None = None,
    quantize: Literal["tensor"] | None = None,
    with_norm: Literal[False] = False,
    weight_offset: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]: ...
@overload
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
    numerics: NumericsPolicy | None = None,
    max_sms: int | None = None,
    quantize: Quantize,
    scales_layout: Literal["row", "column"] = "row",
    pow2_scales: bool = False,
    with_norm: bool = False,
    weight_offset: float = 0.0,
) -> tuple[torch.Tensor, ...]: ...
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
    numerics: NumericsPolicy | None = None,
    max_sms: int | None = None,
    quantize: Quantize | None = None,
    scales_layout: Literal["row", "column"] = "row",
    pow2_scales: bool = False,
    with_norm: bool = False,
    weight_offset: float = 0.0,
) -> tuple[torch.Tensor, ...]:
    """Sum `x` over all ranks of `group`, add bias and residual, and take the RMS norm over the last dimension.

    With s the sum, rounded to `x`'s dtype as `all_reduce` rounds it:

        residual_out = s + bias + residual                                    added in fp32, rounded once
        y = residual_out / sqrt(mean(residual_out²) + eps) · weight           from the rounded residual_out, in fp32

    With `quantize` the result is y in fp8 e4m3, saturated. Scales that are made here follow from y rounded to `x`'s
    dtype, over a row (`token`) or each 128 columns of it (`group128`):

        scales = max(max(abs(y)), 1e-10) / 448,     out = y · (1 / scales),     so that y ≈ out · scales

    Where y has an infinity the scale is infinite, where it has a NaN the scale is NaN.

    Args:
        x: partial sums, [..., hidden], any strides. Kernels take bf16, fp16 and fp32; fp64 runs the variant `library`.
            The same shape and dtype on every rank. Left as it is.
        weight: [hidden], of `x`'s dtype. As bias, residual, eps and scale the same on every rank for the results to be.
        bias: [hidden], added to every row of the sum, or of `x`'s shape; of `x`'s dtype. None adds nothing.
        residual: of `x`'s shape and dtype, added to the sum; None adds nothing.
        eps: added to the mean of squares; a number from 0 on.
        group: as in `all_reduce`.
        out: where to write y: of `x`'s shape and `out_dtype`, any strides, memory of its own. None allocates it.
        residual_out: where to write s + bias + residual: of `x`'s shape and dtype, any strides; may be `residual`. None
            allocates it.
        out_dtype: `torch.float8_e4m3fn` for y / scale, saturated, in that dtype; None for y in `x`'s.
        scale: one fp32 on the device, with `out_dtype` and only then. y is multiplied by its reciprocal.
        numerics: as in `all_reduce`. Ordered: summed in fp32 in rank order, then the rule above with all sums in a
            fixed order; the bits do not depend on tuning.
        max_sms: as in `all_reduce`.
        quantize: `tensor` divides y by `scale`, as `out_dtype` does; `token` makes a scale for every row, [..., 1];
            `group128` one for every 128 columns of a row, [..., hidden / 128], hidden a multiple of 128. None: y in
            `x`'s dtype.
        scales_layout: `row` for contiguous scales; `column`, with `group128`, for the same shape with the scales of a
            group of columns one after another, each group at a multiple of 16 bytes, as grouped GEMMs read them.
        pow2_scales: with `group128`, scales are rounded up to powers of two.
        with_norm: with `quantize`, the norm in `x`'s dtype is returned, too.
        weight_offset: added to the weight in fp32: 1.0 for models that store weight − 1.

    Returns:
        (y, residual_out): what was given, or new contiguous tensors. With `quantize` the scales that were made follow,
        in fp32, and then the norm, if it is wanted.

    Raises:
        NotInitializedError, GroupError, UnsupportedInputError, InfeasibleError, PeerTimeoutError: as in `all_reduce`.

    On GPUs rows that are not a multiple of 16 bytes, or longer than 32 KiB, run the variant `library`. Can be captured
    in CUDA graphs; enqueues on the current stream; never synchronises the host. There is a gradient without `quantize`
    and `weight_offset`, and with a bias of `x`'s shape if there is no residual.
    """
    try:
        if _is_full(bias) and residual is None and bias.shape == x.shape:  # type: ignore[union-attr]
            bias, residual = None, bias
        if (
            quantize is not None
            or weight_offset
            or with_norm
            or pow2_scales
            or scales_layout != "row"
            or _is_full(bias)
        ):
            quantize = _quantize_of(quantize, out_dtype, with_norm=with_norm)
            is_basic = quantize in (None, "tensor") and not (
                with_norm or weight_offset or pow2_scales or _is_full(bias)
            )
            if not is_basic or scales_layout != "row":
                options = (eps, quantize or "", scales_layout, pow2_scales, with_norm, weight_offset)
                tensors = (x, weight, bias, residual, scale, out, residual_out, None, None)
                y, held, scales, norm = rms_norm_quantized(tensors, options, group, numerics, max_sms)
                found: tuple[torch.Tensor, ...] = (y, held)
                if quantize in ("token", "group128"):
                    if scales_layout == "column":
                        scales = scales.t()[: math.prod(x.shape[:-1])].view(*x.shape[:-1], scales.shape[0])
                    found = (*found, scales)
                return (*found, norm) if with_norm else found
            out_dtype = torch.float8_e4m3fn
        if not is_dynamo_compiling():
            fast = _all_reduce_rms_norm.last_fast_calls[world._default_pg if group is None else group]
            if (
                result := fast(x, weight, bias, residual, scale, out, residual_out, eps, out_dtype, numerics, max_sms)
            ) is not None:
                return result
        return _all_reduce_rms_norm.call(
            (x, weight, bias, residual, scale, out, residual_out), (eps, out_dtype), group, numerics, max_sms
        )
    except BaseException as error:
        _all_reduce_rms_norm.on_error(error, x, group)
        raise


def _quantize_of(quantize: Quantize | None, out_dtype: torch.dtype | None, *, with_norm: bool) -> Quantize | None:
    """The form of a call by either argument."""
    if out_dtype not in (None, torch.float8_e4m3fn):
        raise UnsupportedInputError(f"out_dtype={out_dtype!r} is neither None (x's dtype) nor torch.float8_e4m3fn")
    found = "tensor" if quantize is None and out_dtype is not None else quantize
    if with_norm and found is None:
        raise UnsupportedInputError("with_norm=True is for results in fp8; without quantize= y is the norm itself")
    return found
