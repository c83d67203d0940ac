"""Gradients of the operators.

The convention is that of `torch.distributed.nn.functional`: what is differentiated is the sum over all ranks of what
each rank makes of its results. So the gradient of an `all_reduce` is the `all_reduce` of the gradients, that of an
`all_gather` a `reduce_scatter` and the other way round, and an `all_to_all` sends the gradients back. All of them are
operators themselves, with gradients of their own; every rank must take part in the backward pass, as in the forward
one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tunedcomm.integrations import _gemm_gradients
from tunedcomm.integrations._gemm_gradients import Formula, refuse, rows_of

__all__ = ["Formula", "formulas"]

_ops: Any = torch.ops.tunedcomm


def _keep_settings(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    del output
    ctx.settings = inputs[1:]


def _keep_linear(op: str) -> Callable[..., None]:
    def setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        if inputs[1] not in ("sum", "avg"):
            refuse(f"{op} with op={inputs[1]!r}")
        _keep_settings(ctx, inputs, output)

    return setup


def _all_reduce(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    return _ops.all_reduce(grad, *ctx.settings), *(None,) * len(ctx.settings)


def _all_gather(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    dim, group_size, group, max_sms = ctx.settings
    rest = (group_size, group, "default", max_sms)
    if grad.is_complex():
        whole = torch.view_as_real(grad.resolve_conj())  # as the gradient of a conjugate is
        mine = torch.view_as_complex(_ops.reduce_scatter(whole, "sum", dim % max(grad.dim(), 1), *rest))
    else:
        mine = _ops.reduce_scatter(grad, "sum", dim, *rest)
    return mine.reshape(ctx.shape), None, None, None, None


def _keep_gather(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    x = inputs[0]
    if not (x.is_complex() or x.dtype.itemsize > 1):
        refuse(f"all_gather of {x.dtype}")
    ctx.shape = x.shape  # a tensor without dimensions comes back as one
    _keep_settings(ctx, inputs, output)


def _reduce_scatter(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    op, dim, group_size, group, _, max_sms = ctx.settings
    mine = grad / group_size if op == "avg" else grad
    return (_ops.all_gather(mine, dim, group_size, group, max_sms).reshape(ctx.shape), *(None,) * len(ctx.settings))


def _keep_scatter(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.shape = inputs[0].shape
    _keep_linear("reduce_scatter")(ctx, inputs, output)


def _all_to_all(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    return _ops.all_to_all(grad, *ctx.settings), *(None,) * len(ctx.settings)


def _keep_bias(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    del output
    ctx.settings = inputs[2:]


def _all_reduce_bias(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    wants_x, wants_bias, *_ = ctx.needs_input_grad
    x = _ops.all_reduce(grad, "sum", *ctx.settings) if wants_x else None
    return x, rows_of(grad) if wants_bias else None, *(None,) * len(ctx.settings)


def _keep_norm(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    _, weight, _, _, _, eps, out_dtype, *settings = inputs
    if out_dtype is not None:
        refuse(f"all_reduce_rms_norm with out_dtype={out_dtype}")
    ctx.eps, ctx.settings = eps, settings
    ctx.save_for_backward(weight, output[1])


def _all_reduce_rms_norm(ctx: Any, grad_y: torch.Tensor, grad_h: torch.Tensor) -> tuple[Any, ...]:
    """With h the rounded sum, r = 1 / sqrt(mean(h²) + eps) and n = h · r, so that y = n · weight.

    dh = dh' + r · (dy · weight − n · mean(dy · weight · n)), from which dx = all_reduce(dh); all in fp32 or wider.
    """
    weight, summed = ctx.saved_tensors
    wants_x, wants_weight, wants_bias, wants_residual, *_ = ctx.needs_input_grad
    wide = torch.promote_types(summed.dtype, torch.float32)
    h, dy = summed.to(wide), grad_y.to(wide)
    scale = torch.rsqrt(h.square().mean(-1, keepdim=True) + ctx.eps)
    normal, weighed = h * scale, dy * weight.to(wide)
    inner = scale * (weighed - normal * (weighed * normal).mean(-1, keepdim=True))
    dh = (grad_h.to(wide) + inner).to(summed.dtype)
    return (
        _ops.all_reduce(dh, "sum", *ctx.settings) if wants_x else None,
        rows_of(dy * normal).to(weight.dtype) if wants_weight else None,
        rows_of(dh) if wants_bias else None,
        dh if wants_residual else None,
        *(None,) * (3 + len(ctx.settings)),
    )


def formulas() -> dict[str, Formula]:
    """Operator to what differentiates it."""
    return {
        "all_reduce": (_keep_linear("all_reduce"), _all_reduce),
        "all_gather": (_keep_gather, _all_gather),
        "reduce_scatter": (_keep_scatter, _reduce_scatter),
        "all_to_all": (_keep_settings, _all_to_all),
        "all_reduce_bias": (_keep_bias, _all_reduce_bias),
        "all_reduce_rms_norm": (_keep_norm, _all_reduce_rms_norm),
        **_gemm_gradients.formulas(),
    }
