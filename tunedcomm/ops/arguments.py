"""Checks of arguments that ops share, with errors that say what to do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.autograd import forward_ad

from tunedcomm.errors import UnsupportedInputError
from tunedcomm.fp8 import WIRES
from tunedcomm.kernels.common.reference import SUM_DTYPES

FLOATS: Mapping[torch.dtype, str] = {
    torch.bfloat16: "bfloat16",
    torch.float16: "float16",
    torch.float32: "float32",
    torch.float64: "float64",
}
# Dtypes that kernels sum.
SUMMED: Mapping[torch.dtype, str] = {dtype: name for dtype, name in FLOATS.items() if name in SUM_DTYPES}
INTEGERS: Mapping[torch.dtype, str] = {
    torch.int8: "int8",
    torch.uint8: "uint8",
    torch.int32: "int32",
    torch.int64: "int64",
}
# Dtypes of ops that move and do not reduce; one without a name among problems' goes by the name of one of its size.
MOVED: Mapping[torch.dtype, str] = {
    **FLOATS,
    **INTEGERS,
    torch.int16: "int16",
    torch.bool: "uint8",
    torch.float8_e4m3fn: "float8_e4m3fn",
    torch.float8_e5m2: "float8_e5m2",
    torch.float8_e4m3fnuz: "uint8",
    torch.float8_e5m2fnuz: "uint8",
    torch.float8_e8m0fnu: "uint8",
    torch.float4_e2m1fn_x2: "uint8",  # two numbers
    torch.uint16: "int16",
    torch.uint32: "int32",
    torch.uint64: "int64",
}


def check_tensor(op: str, x: Any, name: str = "") -> None:
    """Refuse anything but a tensor; `name` is the argument's, where there are several."""
    if not isinstance(x, torch.Tensor):
        said = f"{name} of {op}" if name else op
        advice = f"; pass torch.from_numpy({name or 'x'})" if type(x).__module__ == "numpy" else ""
        raise UnsupportedInputError(f"{said} wants a torch.Tensor, got {type(x).__name__}{advice}")


def check_nested(tensors: Sequence[Any]) -> None:
    """Refuse nested tensors: their parts have different shapes, on every rank others."""
    if any(isinstance(tensor, torch.Tensor) and tensor.is_nested for tensor in tensors):
        raise UnsupportedInputError(
            "nested tensors have no shape that ranks could share; pass x.values() or x.to_padded_tensor(0.0)"
        )


def check_input(op: str, x: Any, name: str = "") -> None:
    """Refuse anything but a dense tensor."""
    check_tensor(op, x, name)
    if x.layout is not torch.strided:
        said = f"{name} of {op}" if name else op
        raise UnsupportedInputError(f"{said} wants a dense tensor, got layout {x.layout}; call .to_dense() first")


def refuse_async(op: str, async_op: bool) -> None:
    """Refuse `async_op=True`, with the way to a work object."""
    if async_op:
        raise UnsupportedInputError(
            f"{op} returns tensors and no work objects; leave async_op out, or call the collectives of "
            "torch.distributed with async_op=True inside of tunedcomm.intercept()"
        )


def check_dtype(op: str, x: torch.Tensor, dtypes: Mapping[torch.dtype, str], complex_advice: str = "") -> None:
    """Refuse dtypes that no variant takes."""
    if x.is_complex():
        advice = f"pass torch.view_as_real(x){complex_advice}"
        raise UnsupportedInputError(f"{op} does not take {x.dtype}; {advice}")
    if x.dtype not in dtypes:
        advice = "; pass x.to(torch.uint8)" if x.dtype == torch.bool and torch.uint8 in dtypes else ""
        allowed = ", ".join(sorted(dtypes.values()))
        raise UnsupportedInputError(f"{op} does not take {x.dtype}; allowed: {allowed}{advice}")


def check_extra(op: str, x: torch.Tensor, extra: torch.Tensor | None, name: str, shape: tuple[int, ...]) -> None:
    """Refuse a further tensor of another shape or dtype than it must have beside `x`."""
    if extra is not None and (tuple(extra.shape) != shape or extra.dtype != x.dtype):
        raise UnsupportedInputError(
            f"{name} of {op} has shape {tuple(extra.shape)} and {extra.dtype}; with this x it must have {shape} and "
            f"{x.dtype}"
        )


def check_bias(op: str, x: torch.Tensor, bias: torch.Tensor | None) -> None:
    """Refuse a bias that is neither a row of `x` nor of its shape."""
    if bias is None or bias.dim() != x.dim() or bias.dim() == 1:
        check_extra(op, x, bias, "bias", (x.shape[-1],))
    else:
        check_extra(op, x, bias, "bias", tuple(x.shape))


def reduction_name(op: Any) -> Any:
    """The reduction's name: `sum` for "SUM" and `ReduceOp.SUM`; what names no reduction as it is."""
    name = op if isinstance(op, str) else getattr(op, "name", op)
    return name.lower() if isinstance(name, str) else op


def check_reduction(op: Any, x: torch.Tensor, reductions: Sequence[str]) -> None:
    """Refuse unknown reductions, and means of integers."""
    if op not in reductions:
        raise UnsupportedInputError(f"op={op!r} is not a reduction; allowed: {', '.join(reductions)}")
    if op == "avg" and not x.is_floating_point():
        raise UnsupportedInputError(f"avg of {x.dtype} would round; use op='sum' and divide, or a floating-point dtype")


def is_wide(op: str, x: Any, out_dtype: torch.dtype | None) -> bool:
    """True if a reduction's results have another dtype than `x`: fp32, of bf16 or fp16.

    Raises:
        UnsupportedInputError: a dtype of results that no variant gives.
    """
    if out_dtype is None or not isinstance(x, torch.Tensor) or out_dtype == x.dtype:
        return False
    if out_dtype != torch.float32 or x.dtype not in (torch.bfloat16, torch.float16):
        raise UnsupportedInputError(
            f"{op} of {x.dtype} has no results in {out_dtype}; out_dtype is x's own, or torch.float32 for bfloat16 and "
            "float16"
        )
    return True


def refuse_wide(op: str, x: Any, out_dtype: torch.dtype | None) -> None:
    """Refuse results in another dtype than `x`'s beside a wire."""
    if is_wide(op, x, out_dtype):
        raise UnsupportedInputError(f"{op} with a wire rounds its results to x's dtype; leave out_dtype out, or wire")


def check_wire(op: str, x: torch.Tensor, wire: Any) -> None:
    """Refuse wires that no variant has, and dtypes that do not travel quantised."""
    if wire not in WIRES:
        raise UnsupportedInputError(f"wire={wire!r} of {op} is unknown; allowed: {', '.join(WIRES)}, or None")
    check_dtype(op, x, SUMMED)


def normal_dim(op: str, x: torch.Tensor, dim: Any) -> int:
    """`dim` as an index from 0 on; 0 for a tensor without dimensions, which counts as one element.

    Raises:
        UnsupportedInputError: no such dimension.
    """
    count = max(x.dim(), 1)
    if not isinstance(dim, int) or isinstance(dim, bool) or not -count <= dim < count:
        raise UnsupportedInputError(
            f"dim={dim!r} of {op} is not a dimension of a tensor of shape {tuple(x.shape)}; allowed: {-count} to "
            f"{count - 1}"
        )
    return dim % count


# C functions of torch that say whether a dispatch mode or a `torch.func` transform is active. Where a torch has none of
# that name, the calls concerned are served as plain ones.
num_modes: Any = getattr(torch._C, "_len_torch_dispatch_stack", lambda: 0)
_functorch: Any = getattr(torch._C, "_functorch", None)
_transform: Any = getattr(_functorch, "peek_interpreter_stack", lambda: None)
_plain_dispatch: Any = torch.Tensor.__torch_dispatch__


def goes_by_operator(tensors: Sequence[Any]) -> bool:
    """True for inputs that need gradients or are being traced.

    Raises:
        UnsupportedInputError: inside a `torch.func` transform, which no operator of PyTorch's library supports, or a
            tensor has a forward-mode tangent.
    """
    check_tangents(tensors)
    if num_modes():
        check_nested(tensors)
        return True
    _check_transforms()
    recording = torch.is_grad_enabled()
    for tensor in tensors:
        if isinstance(tensor, torch.Tensor):
            if tensor.is_nested:
                check_nested(tensors)
            if (recording and tensor.requires_grad) or type(tensor).__torch_dispatch__ is not _plain_dispatch:
                return True
    return False


def is_traced(tensor: torch.Tensor) -> bool:
    """True for a tensor that a tracer or another subclass of Tensor stands behind."""
    return bool(num_modes()) or type(tensor).__torch_dispatch__ is not _plain_dispatch


def _check_transforms() -> None:
    if _transform() is not None:
        raise UnsupportedInputError(
            "torch.func transforms (grad, vmap, …) do not reach through operators of torch.library; use "
            "torch.autograd.grad, or call this outside the transform"
        )


def check_plain(op: str, tensors: Sequence[Any]) -> None:
    """Refuse tensors without memory to read or write, for ops that have no operator to take them.

    Raises:
        UnsupportedInputError: inside a `torch.func` transform, or a tensor defines `__torch_dispatch__`, or a tangent.
    """
    check_nested(tensors)
    check_tangents(tensors)
    _check_transforms()
    for tensor in tensors:
        if isinstance(tensor, torch.Tensor) and type(tensor).__torch_dispatch__ is not _plain_dispatch:
            raise UnsupportedInputError(
                f"{op} cannot be traced and takes plain tensors, not {type(tensor).__name__}; call it outside of what "
                "is traced, or pass .to_local() of a DTensor, .wait() of an AsyncCollectiveTensor"
            )


def check_differentiable(op: str, tensors: Sequence[torch.Tensor | None]) -> None:
    """Refuse tensors that need gradients: nothing would be recorded for them."""
    for tensor in tensors:
        if tensor is not None and tensor.requires_grad and torch.is_grad_enabled():
            raise UnsupportedInputError(f"{op} is not differentiable; call it under torch.no_grad() or pass x.detach()")


def check_tangents(tensors: Sequence[Any]) -> None:
    """Refuse tensors with forward-mode tangents, which no result would have."""
    if forward_ad._current_level < 0:
        return
    unpacked: Any = forward_ad.unpack_dual  # untyped
    for tensor in tensors:
        if isinstance(tensor, torch.Tensor) and unpacked(tensor).tangent is not None:
            raise UnsupportedInputError(
                "there are no forward-mode derivatives of collectives here; pass torch.autograd.forward_ad's "
                "unpack_dual(x).primal, and call the op on the tangent, too, where it is linear"
            )


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    """First byte and one past the last byte that a non-empty tensor covers."""
    if tensor.is_contiguous():
        return (first := tensor.data_ptr()), first + tensor.nbytes
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()


def _fitting(x: torch.Tensor, shape: Sequence[int], input_name: str) -> str:
    """The expression for an output of this shape, for errors."""
    return f"torch.empty_like({input_name})" if tuple(shape) == tuple(x.shape) else f"torch.empty({tuple(shape)}, …)"


def check_fits(
    x: torch.Tensor, out: Any, shape: Sequence[int], dtype: torch.dtype, *, name: str = "out", input_name: str = "x"
) -> None:
    """Refuse an `out` that cannot hold a result of that shape and dtype on `x`'s device; see also `check_apart`."""
    if not isinstance(out, torch.Tensor) or out.layout is not torch.strided:
        what = f"a tensor of layout {out.layout}" if isinstance(out, torch.Tensor) else f"a {type(out).__name__}"
        example = _fitting(x, shape, input_name)
        raise UnsupportedInputError(f"{name} is {what}; it must be a dense tensor, e.g. {example}")
    if tuple(out.shape) != tuple(shape) or out.dtype != dtype or out.device != x.device:
        must = f"it must match {input_name}" if tuple(shape) == tuple(x.shape) else "the result has"
        raise UnsupportedInputError(
            f"{name} has shape {tuple(out.shape)}, {out.dtype}, {out.device}; {must}: {tuple(shape)}, {dtype}, "
            f"{x.device}"
        )
    if out.numel() and any(stride == 0 and size > 1 for size, stride in zip(out.shape, out.stride(), strict=True)):
        raise UnsupportedInputError(
            f"{name} is an expanded tensor: several of its elements share one place in memory; pass e.g. "
            f"{_fitting(x, shape, input_name)}"
        )


def check_apart(other: torch.Tensor, out: torch.Tensor, *, may_be_other: bool, name: str, other_name: str) -> None:
    """Refuse an output that shares memory with another argument, unless it may be that and is."""
    if out.numel() == 0 or other.numel() == 0:
        return
    (low, high), (out_low, out_high) = _extent(other), _extent(out)
    same = may_be_other and out_low == low and out.stride() == other.stride()
    if not same and out_low < high and low < out_high:
        advice = f"pass {name}={other_name}, or a tensor with memory of its own"
        advice = advice if may_be_other else "give it memory of its own"
        without = f" without being {other_name}" if may_be_other else ""
        raise UnsupportedInputError(f"{name} overlaps {other_name}{without}; {advice}")


def is_nk(b: torch.Tensor) -> bool:
    """True if `b`, [K, N], lies in memory more like a contiguous [N, K] matrix than like itself."""
    return not b.is_contiguous() and b.stride(0) < b.stride(1)
