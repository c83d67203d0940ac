"""Gradients of the fused GEMMs, by each other.

With G the gathered rows of all ranks, ' for a gradient and ᵀ for a transpose:

    ag_gemm   y = G·b                          a' = reduce_scatter(y'·bᵀ), a gemm_rs       b' = Gᵀ·y'
    gemm_rs   y = reduce_scatter(a·b)          a' = all_gather(y')·bᵀ, an ag_gemm          b' = aᵀ·all_gather(y')
    gemm_ar   y = all_reduce(a·b) + bias       a' = all_reduce(y')·bᵀ                      b' = aᵀ·all_reduce(y')

`ag_gemm` keeps this rank's rows only and gathers once more for b'; `ag_gemm_gathered` and `ag_gemm_list` keep the G
that they return, and their a' is a reduce_scatter of the sum of what reached it. Gradients are rounded to the operands'
dtype where the result has another.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch

from tunedcomm.errors import UnsupportedInputError
from tunedcomm.ops._gemm import is_nk

__all__ = ["Formula", "formulas", "refuse", "rows_of"]

# (setup_context, backward), as torch.library.register_autograd has them.
Formula: TypeAlias = tuple[Callable[..., None], Callable[..., Any]]
_ops: Any = torch.ops.tunedcomm


def refuse(what: str) -> None:
    """Say that a call has no gradient."""
    raise UnsupportedInputError(
        f"{what} is not differentiable; call it under torch.no_grad() or pass its inputs detached"
    )


def rows_of(grad: torch.Tensor) -> torch.Tensor:
    """The sum over all dimensions but the last."""
    return grad.sum(dim=tuple(range(grad.dim() - 1))) if grad.dim() > 1 else grad


def _product(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """x·y in the operands' dtype, also under autocast: what ranks send must not depend on which of them multiplied."""
    with torch.autocast(x.device.type, enabled=False):
        return x @ y


def _of_b(x: torch.Tensor, grad: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """xᵀ·grad over all rows, stored as `b` is."""
    x, grad = x.reshape(-1, x.shape[-1]), grad.reshape(-1, grad.shape[-1])
    return _product(grad.t(), x).t() if is_nk(b) else _product(x.t(), grad)


def _check(op: str, a: torch.Tensor) -> None:
    if a.dtype.itemsize == 1:
        refuse(f"{op} of {a.dtype}")


def _keep_ag(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    a, b, _, _, _, *settings = inputs
    _check("ag_gemm", a)
    ctx.settings, ctx.from_gathered = settings, isinstance(output, tuple)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(output[1] if ctx.from_gathered else a, b)


def _ag_gemm(ctx: Any, grad: torch.Tensor | None, grad_gathered: torch.Tensor | None = None) -> tuple[Any, ...]:
    rows, b = ctx.saved_tensors
    wants_a, wants_b, *_ = ctx.needs_input_grad
    group_size, group, _, max_sms = ctx.settings
    grad_a = None
    if wants_a and ctx.from_gathered:
        grad_a = _scattered([grad], [b], grad_gathered, rows, ctx.settings)
    elif wants_a:
        grad_a = _ops.gemm_rs(grad.to(rows.dtype), b.t(), None, None, None, "sum", *ctx.settings)  # type: ignore[union-attr]
    grad_b = None
    if wants_b and grad is not None:
        gathered = rows if ctx.from_gathered else _ops.all_gather(rows, 0, group_size, group, max_sms)
        grad_b = _of_b(gathered, grad.to(b.dtype), b)
    return grad_a, grad_b, *(None,) * (3 + len(ctx.settings))


def _scattered(
    grads: Sequence[torch.Tensor | None],
    several: Sequence[torch.Tensor],
    grad_gathered: torch.Tensor | None,
    gathered: torch.Tensor,
    settings: Sequence[Any],
) -> torch.Tensor:
    """This rank's rows of the sum over ranks of what reached the gathered a.

    Which of several results a gradient reaches may differ from rank to rank, so the collective does not depend on it.
    """
    total = grad_gathered
    for grad, b in zip(grads, several, strict=True):
        if grad is not None:
            part = _product(grad.to(gathered.dtype), b.t())
            total = part if total is None else total + part
    total = torch.zeros_like(gathered) if total is None else total
    group_size, group, numerics, max_sms = settings
    return _ops.reduce_scatter(total, "sum", 0, group_size, group, numerics, max_sms)  # type: ignore[no-any-return]


def _keep_list(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    a, several, _, scales, _, *settings = inputs
    _check("ag_gemm", a)
    ctx.settings, ctx.num_scales = settings, len(scales)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(output[-1], *several)


def _ag_gemm_list(ctx: Any, found: Sequence[torch.Tensor | None]) -> tuple[Any, ...]:
    *grads, grad_gathered = found
    gathered, *several = ctx.saved_tensors
    wants_a, wants_b, *_ = ctx.needs_input_grad
    grad_a = _scattered(grads, several, grad_gathered, gathered, ctx.settings) if wants_a else None
    grad_b = [
        _of_b(gathered, grad.to(b.dtype), b) if wants and grad is not None else None
        for wants, grad, b in zip(wants_b, grads, several, strict=True)
    ]
    return grad_a, grad_b, None, [None] * ctx.num_scales, *(None,) * (1 + len(ctx.settings))


def _keep_rs(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    del output
    a, b, _, _, _, ctx.reduction, *ctx.settings = inputs
    _check("gemm_rs", a)
    ctx.save_for_backward(a, b)


def _gemm_rs(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    a, b = ctx.saved_tensors
    wants_a, wants_b, *_ = ctx.needs_input_grad
    group_size, group, _, max_sms = ctx.settings
    grad = (grad / group_size if ctx.reduction == "avg" else grad).to(a.dtype)
    grad_a = grad_b = gathered = None
    if wants_a and wants_b:
        grad_a, gathered = _ops.ag_gemm_gathered(grad, b.t(), None, None, None, *ctx.settings)
    elif wants_a:
        grad_a = _ops.ag_gemm(grad, b.t(), None, None, None, *ctx.settings)
    elif wants_b:
        gathered = _ops.all_gather(grad, 0, group_size, group, max_sms)
    if gathered is not None:
        grad_b = _of_b(a, gathered, b)
    return grad_a, grad_b, *(None,) * (4 + len(ctx.settings))


def _keep_ar(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    del output
    a, b, _, _, _, _, *ctx.settings = inputs
    _check("gemm_ar", a)
    ctx.save_for_backward(a, b)


def _gemm_ar(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    a, b = ctx.saved_tensors
    wants_a, wants_b, wants_bias, *_ = ctx.needs_input_grad
    grad_a = grad_b = None
    if wants_a or wants_b:
        summed = _ops.all_reduce(grad.to(a.dtype), "sum", *ctx.settings)
        grad_a = _product(summed, b.t()) if wants_a else None
        grad_b = _of_b(a, summed, b) if wants_b else None
    return grad_a, grad_b, rows_of(grad) if wants_bias else None, *(None,) * (3 + len(ctx.settings))


def formulas() -> dict[str, Formula]:
    """Operator to what differentiates it."""
    return {
        "ag_gemm": (_keep_ag, _ag_gemm),
        "ag_gemm_gathered": (_keep_ag, _ag_gemm),
        "ag_gemm_list": (_keep_list, _ag_gemm_list),
        "gemm_rs": (_keep_rs, _gemm_rs),
        "gemm_ar": (_keep_ar, _gemm_ar),
    }
