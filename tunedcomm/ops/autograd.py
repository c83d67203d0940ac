"""Gradients of the operators `torch.ops.tunedcomm.*`, registered where those are defined, in `torch_ops`.

The convention is `torch.distributed.nn.functional`'s: the function differentiated is the sum of what all ranks
compute from their results. So the gradient of an `all_reduce` is the `all_reduce` of the gradients, and an
`all_gather`'s is the `reduce_scatter` and the other way round; an `all_to_all` sends the gradients back. All of them
call operators, which have gradients of their own; a `broadcast`'s is the sum at its root and zero elsewhere. Every rank
must take part in the backward pass, as in the forward one.

For the fused GEMMs, with G the gathered rows of all ranks, ' for a gradient and ᵀ for a transpose:

    ag_gemm   y = G·b                          a' = reduce_scatter(y'·bᵀ), a gemm_rs       b' = Gᵀ·y'
    gemm_rs   y = reduce_scatter(a·b)          a' = all_gather(y')·bᵀ, an ag_gemm          b' = aᵀ·all_gather(y')
    gemm_ar   y = all_reduce(a·b) + bias       a' = all_reduce(y')·bᵀ                      b' = aᵀ·all_reduce(y')

`ag_gemm` keeps this rank's rows only and gathers once more for b'; `ag_gemm_gathered` and `ag_gemm_list` keep the G
that they return, and their a' is a reduce_scatter of the sum of all gradients with respect to G. Gradients are rounded
to the operands' dtype where the result has another.

The gradient of an `ep_dispatch` is an `ep_combine` with weights of 1, and the other way round. In the layout `tokens`
neither has weights; those that travel along go to all ranks, so their gradient is a reduce_scatter. The gradient of
`ep_combine_rank` is computed where the experts are, to which a token's gradient goes once; so is the weights'.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist

from tunedcomm.ops.arguments import is_nk

# `torch_ops` fills ctx.shape and ctx.dtype (of the first input), ctx.options and ctx.settings (the arguments behind the
# options), refuses calls without a gradient, and adds None for the arguments behind those whose gradients come back.
_ops: Any = torch.ops.tunedcomm


def _sum_rows(grad: torch.Tensor) -> torch.Tensor:
    """The sum over all dimensions but the last."""
    return grad.sum(dim=tuple(range(grad.dim() - 1))) if grad.dim() > 1 else grad


def keep_nothing(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    """Nothing is kept: the gradient depends on no tensor of the call."""


def all_reduce(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    """The gradient of `all_reduce`: not quantised, and of fp32 results summed in fp32 and rounded once."""
    return (_ops.all_reduce(grad, ctx.options[0], *ctx.settings).to(ctx.dtype),)


def all_gather(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    """The gradient of `all_gather`."""
    (dim,), (group_size, group, max_sms) = ctx.options, ctx.settings
    rest = (group_size, group, None, max_sms)
    if grad.is_complex():
        whole = torch.view_as_real(grad.resolve_conj())  # as the gradient of a conjugate is
        mine = torch.view_as_complex(_ops.reduce_scatter(whole, "sum", dim % max(grad.dim(), 1), *rest))
    else:
        mine = _ops.reduce_scatter(grad, "sum", dim, *rest)
    return (mine.reshape(ctx.shape),)  # a tensor without dimensions comes back as one


def broadcast(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    """The gradient of `broadcast`."""
    (root,), (group_size, group, max_sms) = ctx.options, ctx.settings
    total = _ops.all_reduce(grad, "sum", group_size, group, None, max_sms)
    resolve: Any = dist.distributed_c10d._resolve_process_group  # type: ignore[attr-defined]
    if resolve(group).rank() == root:
        return (total,)
    # Zeros that are made of the sum: this rank's second derivative takes part in the root's.
    return (total.masked_fill(torch.ones((), dtype=torch.bool, device=total.device), 0),)


def reduce_scatter(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    """The gradient of `reduce_scatter`: not quantised, and of fp32 results rounded before it is gathered."""
    (op, dim, *_), (group_size, group, _, max_sms) = ctx.options, ctx.settings
    mine = grad / group_size if op == "avg" else grad
    return (_ops.all_gather(mine.to(ctx.dtype), dim, group_size, group, max_sms).reshape(ctx.shape),)


def all_gather_wire(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    """The gradient of `all_gather` with a quantised wire, which is not quantised."""
    return (_ops.reduce_scatter(grad, "sum", ctx.options[0], *ctx.settings).reshape(ctx.shape),)


def all_to_all(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    """The gradient of `all_to_all`."""
    return (_ops.all_to_all(grad, *ctx.settings),)


def ulysses_scatter(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    """The gradient of `ulysses_scatter`."""
    return (_ops.ulysses_gather(grad, *ctx.settings),)


def ulysses_gather(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    """The gradient of `ulysses_gather`."""
    return (_ops.ulysses_scatter(grad, *ctx.settings),)


def keep_counts(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    """Keep counts in a tensor; all_gather_v's are its result's counts, which are within their bound."""
    ctx.save_for_backward(output[1] if isinstance(output, tuple) else inputs[1])
    ctx.has_counts = inputs[1] is not None
    if isinstance(output, tuple):
        ctx.mark_non_differentiable(output[1])


def all_gather_v(ctx: Any, grad: torch.Tensor, _: Any) -> tuple[Any, ...]:
    """The gradient of `all_gather_v`: rows that nobody sent have none."""
    (counts,), (sizes, rows, max_count), (group_size, group, max_sms) = ctx.saved_tensors, ctx.options, ctx.settings
    rest = (group_size, group, None, max_sms)
    if ctx.has_counts or sizes is not None:
        given = counts if ctx.has_counts else None
        return (_ops.reduce_scatter_v(grad, given, sizes, rows, max_count, *rest),)
    return (_ops.reduce_scatter(grad.flatten(0, 1), "sum", 0, *rest)[:rows],)


def reduce_scatter_v(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    """The gradient of `reduce_scatter_v`: zero where nothing was read."""
    (counts,), (group_size, group, _, max_sms) = ctx.saved_tensors, ctx.settings
    found, used = _ops.all_gather_v(grad, counts, *ctx.options, group_size, group, max_sms)
    if counts is not None:
        rows = torch.arange(len(found), dtype=torch.int64, device=found.device) < used.sum()
        found = found.masked_fill(~rows.view(-1, *(1,) * (found.dim() - 1)), 0)
    return (found,)


def keep_merged(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    """Keep the inputs, the result and its LSE."""
    ctx.save_for_backward(*inputs[:2], *output)


def dcp_combine(ctx: Any, grad: torch.Tensor, grad_lse: torch.Tensor) -> tuple[Any, ...]:
    """With a = b^(l − L) the share of this rank's x: x' = a·y', l' = a·(ln b · y'·(x − y) + L'), for all heads.

    y', L' and y belong to the ranks that have the heads, so they are gathered; of y only y'·y is.
    """
    x, lse, out, lse_out = ctx.saved_tensors
    wants_x, wants_lse, *_ = ctx.needs_input_grad  # of this rank alone: all exchanges are made
    (base,), (group_size, group, _, max_sms) = ctx.options, ctx.settings
    rest, per_bit = (group_size, group, max_sms), math.log(2) if base == "2" else 1.0
    constant = grad_lse - per_bit * (grad.float() * out.float()).sum(-1)
    every_grad = _ops.all_gather(grad, 1, *rest).float()
    total, constant = _ops.all_gather(torch.stack([lse_out, constant]), 2, *rest)
    counts = lse.isfinite()
    share = torch.where(counts, torch.exp((torch.where(counts, lse, 0.0) - total) * per_bit), 0.0)
    dots = (every_grad * x.float().masked_fill(~counts.unsqueeze(-1), 0.0)).sum(-1)
    grad_x = (share.unsqueeze(-1) * every_grad).to(x.dtype) if wants_x else None
    return grad_x, torch.where(counts, share * (per_bit * dots + constant), 0.0) if wants_lse else None


def keep_bias(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    """Keep whether the bias is a row."""
    ctx.is_row = inputs[1].dim() == 1


def all_reduce_bias(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    """The gradient of `all_reduce_bias`."""
    wants_x, wants_bias, *_ = ctx.needs_input_grad
    x = _ops.all_reduce(grad, "sum", *ctx.settings) if wants_x else None
    bias = _sum_rows(grad) if ctx.is_row else grad
    return x, bias if wants_bias else None


def refused(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
    """Never called: the form's `refusal` is raised before."""
    raise AssertionError


def keep_norm(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    """Keep the weight and the rounded sum."""
    ctx.save_for_backward(inputs[1], output[1])


def all_reduce_rms_norm(ctx: Any, grad_y: torch.Tensor, grad_h: torch.Tensor) -> tuple[Any, ...]:
    """With h the rounded sum, r = 1 / sqrt(mean(h²) + eps) and n = h · r, so that y = n · weight.

    dh = dh' + r · (dy · weight − n · mean(dy · weight · n)), from which dx = all_reduce(dh); all in fp32 or wider.
    """
    weight, summed = ctx.saved_tensors
    wants_x, wants_weight, wants_bias, wants_residual, *_ = ctx.needs_input_grad
    wide = torch.promote_types(summed.dtype, torch.float32)
    h, dy = summed.to(wide), grad_y.to(wide)
    scale = torch.rsqrt(h.square().mean(-1, keepdim=True) + ctx.options[0])
    normal, weighed = h * scale, dy * weight.to(wide)
    inner = scale * (weighed - normal * (weighed * normal).mean(-1, keepdim=True))
    dh = (grad_h.to(wide) + inner).to(summed.dtype)
    return (
        _ops.all_reduce(dh, "sum", *ctx.settings) if wants_x else None,
        _sum_rows(dy * normal).to(weight.dtype) if wants_weight else None,
        _sum_rows(dh) if wants_bias else None,
        dh if wants_residual else None,
    )


def _product(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """x·y in the operands' dtype, also under autocast: what ranks send must not depend on which of them multiplied."""
    with torch.autocast(x.device.type, enabled=False):
        return x @ y


def _of_b(x: torch.Tensor, grad: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """xᵀ·grad over all rows, stored as `b` is."""
    x, grad = x.reshape(-1, x.shape[-1]), grad.reshape(-1, grad.shape[-1])
    return _product(grad.t(), x).t() if is_nk(b) else _product(x.t(), grad)


def keep_operands(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    """Keep a and b."""
    ctx.save_for_backward(*inputs[:2])


def ag_gemm(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    """The gradient of `ag_gemm`."""
    a, b = ctx.saved_tensors
    wants_a, wants_b, *_ = ctx.needs_input_grad
    group_size, group, _, max_sms = ctx.settings
    grad_a = grad_b = None
    if wants_a:
        grad_a = _ops.gemm_rs(grad.to(a.dtype), b.t(), None, None, None, "sum", *ctx.settings)
    if wants_b:
        grad_b = _of_b(_ops.all_gather(a, 0, group_size, group, max_sms), grad.to(b.dtype), b)
    return grad_a, grad_b


def keep_gathered(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    """Keep the gathered a and every b."""
    _, b, _, scales, *_ = inputs
    several = b if isinstance(b, (list, tuple)) else [b]
    ctx.num_scales = len(scales) if isinstance(b, (list, tuple)) else None
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(output[-1], *several)


def ag_gemm_gathered(ctx: Any, *found: Any) -> tuple[Any, ...]:
    """Of a product or a list of them, with the gathered a behind it.

    Which of several results a gradient reaches may differ from rank to rank, so the collective does not depend on it.
    """
    *grads, total = found if ctx.num_scales is None else found[0]
    gathered, *several = ctx.saved_tensors
    wants_a, wants_b, *_ = ctx.needs_input_grad
    grad_a, grads_b = None, []
    for wants, grad, b in zip([wants_b] if ctx.num_scales is None else wants_b, grads, several, strict=True):
        if wants_a and grad is not None:
            part = _product(grad.to(gathered.dtype), b.t())
            total = part if total is None else total + part
        grads_b.append(_of_b(gathered, grad.to(b.dtype), b) if wants and grad is not None else None)
    if wants_a:
        total = torch.zeros_like(gathered) if total is None else total
        grad_a = _ops.reduce_scatter(total, "sum", 0, *ctx.settings)
    return (grad_a, grads_b[0]) if ctx.num_scales is None else (grad_a, grads_b, None, [None] * ctx.num_scales)


def gemm_rs(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    """The gradient of `gemm_rs`."""
    a, b = ctx.saved_tensors
    wants_a, wants_b, *_ = ctx.needs_input_grad
    group_size, group, _, max_sms = ctx.settings
    grad = (grad / group_size if ctx.options[1] == "avg" else grad).to(a.dtype)
    grad_a = grad_b = gathered = None
    if wants_a and wants_b:
        grad_a, gathered = _ops.ag_gemm_gathered(grad, b.t(), None, None, None, *ctx.settings)
    elif wants_a:
        grad_a = _ops.ag_gemm(grad, b.t(), None, None, None, *ctx.settings)
    elif wants_b:
        gathered = _ops.all_gather(grad, 0, group_size, group, max_sms)
    if gathered is not None:
        grad_b = _of_b(a, gathered, b)
    return grad_a, grad_b


def gemm_ar(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    """The gradient of `gemm_ar`."""
    a, b = ctx.saved_tensors
    wants_a, wants_b, wants_bias, *_ = ctx.needs_input_grad
    grad_a = grad_b = None
    if wants_a or wants_b:
        summed = _ops.all_reduce(grad.to(a.dtype), "sum", *ctx.settings)
        grad_a = _product(summed, b.t()) if wants_a else None
        grad_b = _of_b(a, summed, b) if wants_b else None
    return grad_a, grad_b, _sum_rows(grad) if wants_bias else None


def keep_sent(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    """Keep the ids and the rows, and the dtype of weights that travel along."""
    ctx.weights_dtype = None if inputs[2] is None else inputs[2].dtype
    ctx.save_for_backward(inputs[1], output[4])


def ep_dispatch(ctx: Any, grad: torch.Tensor, *rest: Any) -> tuple[Any, ...]:
    """The gradient of `ep_dispatch`; every rank takes part in both sums, whatever it needs of them."""
    ids, rows = ctx.saved_tensors
    group_size, group, max_sms = ctx.settings
    ones = torch.ones_like(ids, dtype=torch.promote_types(grad.dtype, torch.float32))
    grad_x = _ops.ep_combine(grad, ones, ids, rows, None, ctx.options[0], group_size, group, None, max_sms)
    if ctx.weights_dtype is None:
        return grad_x, None, None
    grad_weights = _ops.reduce_scatter(rest[-2], "sum", 0, group_size, group, None, max_sms)
    return grad_x, None, grad_weights.squeeze(0).to(ctx.weights_dtype)


def keep_results(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    """Keep all inputs."""
    ctx.save_for_backward(*inputs[:4])


def ep_combine(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    """The gradient is dispatched; an expert's row gets it times its weight, and the weight its product with the row.

    It is dispatched closely packed, for neither layout nor capacity of the forward dispatch are known here; its rows
    are then taken in the order of those that `rows` names.
    """
    results, weights, ids, rows = ctx.saved_tensors
    wants_results, wants_weights, *_ = ctx.needs_input_grad  # of this rank alone: all exchanges are made
    group_size, group, _, max_sms = ctx.settings
    rest = (group_size, group, max_sms)
    sent = _ops.ep_dispatch(grad, ids, None, None, ctx.options[0], rows.numel(), "contiguous", "", 1, True, *rest)
    flat = results.reshape(-1, results.shape[-1])
    wide = torch.promote_types(flat.dtype, torch.float32)
    target = torch.where(rows < 0, len(flat), rows).long()  # one row more than there are takes what is not here

    def by_row(values: torch.Tensor) -> torch.Tensor:
        return values.new_zeros(len(flat) + 1).index_put((target,), values)[: len(flat)]

    come = sent[0][by_row(sent[4].long().clamp(min=0))].to(wide)
    every_weight = _ops.all_gather(weights.to(wide), 0, *rest).view(rows.shape)
    grad_results = (come * by_row(every_weight).unsqueeze(-1)).to(flat.dtype).view(results.shape)
    used = by_row(torch.ones_like(rows, dtype=wide)) > 0
    dots = torch.where(used, (come * flat.to(wide)).sum(-1), 0.0)
    dots = torch.nn.functional.pad(dots, (0, 1))[target].view(-1, rows.shape[2])
    grad_weights = _ops.reduce_scatter(dots, "sum", 0, group_size, group, None, max_sms).to(weights.dtype)
    return grad_results if wants_results else None, grad_weights if wants_weights else None


def ep_combine_rank(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    """The gradient of `ep_combine_rank`: a token's goes to all ranks that added to the token's sum."""
    results, weights, ids, rows = ctx.saved_tensors
    wants_results, wants_weights, *_ = ctx.needs_input_grad  # of this rank alone: all exchanges are made
    group_size, group, _, max_sms = ctx.settings
    come, *_ = _ops.ep_dispatch_tokens(grad, ids, None, None, ctx.options[0], True, False, group_size, group, max_sms)
    flat = results.reshape(-1, results.shape[-1])
    wide = torch.promote_types(flat.dtype, torch.float32)
    target = torch.where(rows < 0, len(flat), rows).flatten(0, 1).long()  # one row more takes what is not here

    def by_row(values: torch.Tensor) -> torch.Tensor:
        return values.new_zeros(len(flat) + 1).index_put((target,), values)[: len(flat)]

    tokens = torch.arange(len(come), dtype=torch.int64, device=come.device).unsqueeze(1).expand(target.shape)
    used = by_row(torch.ones_like(tokens)) > 0
    by_token = come[by_row(tokens)].to(wide)
    grad_results = torch.where(used.unsqueeze(-1), by_token * by_row(weights.flatten(0, 1).to(wide)).unsqueeze(-1), 0.0)
    dots = torch.where(used, (by_token * flat.to(wide)).sum(-1), 0.0)
    dots = torch.nn.functional.pad(dots, (0, 1))[target].view(rows.shape)
    grad_results = grad_results.to(flat.dtype).view(results.shape)
    return grad_results if wants_results else None, dots.to(weights.dtype) if wants_weights else None


def keep_ids(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    """Keep the ids here and of the own tokens, and the dtype of weights that travel along."""
    ctx.weights_dtype = None if inputs[2] is None else inputs[2].dtype
    ctx.save_for_backward(output[1], inputs[1])


def ep_dispatch_tokens(ctx: Any, *grads: Any) -> tuple[Any, ...]:
    """The gradient of `ep_dispatch_tokens`; every rank takes part in both sums, whatever it needs of them."""
    grad, _, grad_weights, _ = grads
    held, ids = ctx.saved_tensors
    group_size, group, max_sms = ctx.settings
    rest = (group_size, group, None, max_sms)
    grad_x = _ops.ep_combine_tokens(grad, held, ids, None, ctx.options[0], "", *rest)
    if ctx.weights_dtype is None:
        return grad_x, None, None
    return grad_x, None, _ops.reduce_scatter(grad_weights, "sum", 0, *rest).to(ctx.weights_dtype)


def keep_topk_ids(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    """Keep the ids of the own tokens."""
    ctx.save_for_backward(inputs[2])


def ep_combine_tokens(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    """The gradient of `ep_combine_tokens`: a token's goes to all ranks that added to the token's sum."""
    (ids,) = ctx.saved_tensors
    group_size, group, _, max_sms = ctx.settings
    sent = _ops.ep_dispatch_tokens(grad, ids, None, None, ctx.options[0], True, False, group_size, group, max_sms)
    return (sent[0],)
