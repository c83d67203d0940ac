"""Attention over ranks: `dcp_combine` merges its parts, `ulysses_scatter` and `ulysses_gather` move its heads."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

import torch
import torch.distributed as dist
from torch.compiler import is_dynamo_compiling

from tunedcomm.errors import UnsupportedInputError
from tunedcomm.kernels.dcp_combine.merge import merged
from tunedcomm.kernels.dcp_combine.op import BASES, check, rows_of_rank
from tunedcomm.kernels.ulysses.op import GATHER, SCATTER
from tunedcomm.ops import autograd
from tunedcomm.ops.adapter import Maker, OpAdapter, Results, Tensors, problem_of
from tunedcomm.ops.arguments import FLOATS, MOVED, check_dtype
from tunedcomm.ops.call import CallPath
from tunedcomm.ops.fast_call import world
from tunedcomm.spec import NumericsPolicy, Problem

Base: TypeAlias = Literal["e", "2"]
_MERGED = {dtype: name for dtype, name in FLOATS.items() if dtype != torch.float64}  # LSEs are fp32


class _DcpCombine(OpAdapter):
    op = "dcp_combine"
    inputs = ("x", "lse")
    outputs = ("out", "lse_out")
    options = ("str base",)
    gradient = autograd.keep_merged, autograd.dcp_combine

    def check(self, inputs: Tensors, options: Any, world_size: int) -> None:
        x, lse = inputs
        check_dtype(self.op, x, _MERGED)
        if lse is None or x.dim() != 3 or tuple(lse.shape) != tuple(x.shape[:2]) or lse.dtype != torch.float32:
            got = "None" if lse is None else f"{lse.dtype} {tuple(lse.shape)}"
            raise UnsupportedInputError(
                f"{self.op} takes x [tokens, heads, head size] and lse [tokens, heads] in float32, not "
                f"{tuple(x.shape)} and {got}"
            )
        if options[0] not in BASES:
            raise UnsupportedInputError(f"base={options[0]!r} is not a base; allowed: 'e' and '2'")
        check(self.problem(inputs, options, world_size, Problem))

    def problem(self, inputs: Tensors, options: Any, world_size: int, make: Maker = problem_of) -> Problem:
        x = inputs[0]
        return make(
            self.op, tuple(x.shape), _MERGED[x.dtype], world_size, reduction="", layout=options[0], mode="eager"
        )

    def results(self, inputs: Tensors, options: Any, world_size: int) -> Results:
        x = inputs[0]
        rows = rows_of_rank(self.problem(inputs, options, world_size, Problem))  # sizes may be symbols
        return [(rows, x.dtype), (rows[:2], torch.float32)]

    def call_of(self, problem: Problem, inputs: Tensors, outputs: Tensors) -> tuple[Tensors, tuple[Any, ...]]:
        return (*inputs, *outputs), (problem.layout,)

    def single_rank_result(self, inputs: Tensors, options: Any) -> Tensors:
        x, lse = inputs
        return merged(x.unsqueeze(0), lse.unsqueeze(0), options[0])


_dcp_combine: CallPath[tuple[torch.Tensor, torch.Tensor]] = CallPath(_DcpCombine())


def dcp_combine(
    x: torch.Tensor,
    lse: torch.Tensor,
    *,
    base: Base = "e",
    return_lse: bool = False,
    group: dist.ProcessGroup | None = None,
    out: torch.Tensor | None = None,
    lse_out: torch.Tensor | None = None,
    numerics: NumericsPolicy | None = None,
    max_sms: int | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Merge the attention of all ranks, each over its part of the keys, by LSE; every rank gets its share of the heads.

    With l_r the LSE of rank r and m the largest, both in base b: out = Σ b^(l_r − m) · x_r / Σ b^(l_r − m), and the LSE
    is m + log_b Σ b^(l_r − m).

    Args:
        x: partial outputs of all heads, [T, H, D], any strides; H is a multiple of the group's size. The same shape
            and dtype on every rank. Kernels take bf16, fp16 and fp32; other dtypes are refused. Left as it is.
        lse: log-sum-exp of x's scores, [T, H] fp32, any strides. A rank where it is NaN or infinite counts nothing
            there, whatever its x holds; if no rank is left, the result is 0 and its LSE −inf.
        base: of the LSEs: `e`, or `2` as of FlashInfer.
        return_lse: return the LSE of the result, too.
        group: as in `all_reduce`.
        out: where to write: [T, H/n, D] of x's dtype and device, any strides; no memory shared with inputs. None
            allocates it.
        lse_out: where to write the LSE: [T, H/n] fp32, likewise.
        numerics: as in `all_reduce`. Ordered: weights and sums in fp32 in rank order, rounded once at the end; the bits
            do not depend on tuning, nor on the GPU.
        max_sms: as in `all_reduce`.

    Returns:
        `out`, or a new contiguous tensor [T, H/n, D]: heads r · H/n to (r + 1) · H/n − 1 on rank r; with `return_lse`
        a pair of it and its LSE [T, H/n] in the same base.

    Raises:
        NotInitializedError, GroupError, UnsupportedInputError, InfeasibleError, PeerTimeoutError: as in `all_reduce`.

    Differentiable in x and lse. On GPUs heads that are not a multiple of 16 bytes run the variant `library`. Can be
    captured in CUDA graphs; enqueues on the current stream; never synchronises the host.
    """
    try:
        if not is_dynamo_compiling():
            fast = _dcp_combine.last_fast_calls[world._default_pg if group is None else group]
            if (found := fast(x, lse, out, lse_out, base, numerics, max_sms)) is not None:
                return found if return_lse else found[0]
        results = _dcp_combine.call((x, lse, out, lse_out), (base,), group, numerics, max_sms)
        return results if return_lse else results[0]
    except BaseException as error:
        _dcp_combine.on_error(error, x, group)
        raise


class _Ulysses(OpAdapter):
    """Kernels see [B, S/n, H · D] and [B, S, H/n · D]."""

    reduces = False
    depends_on_memory = True

    def check(self, inputs: Tensors, options: Any, world_size: int) -> None:
        x = inputs[0]
        check_dtype(self.op, x, MOVED)
        dim, what = (2, "heads") if self.op == SCATTER else (1, "tokens")
        if x.dim() != 4 or x.shape[dim] % world_size:
            raise UnsupportedInputError(
                f"{self.op} takes x [batch, tokens, heads, head size] whose {what} are a multiple of {world_size}, not "
                f"{tuple(x.shape)}"
            )

    def problem(self, inputs: Tensors, options: Any, world_size: int) -> Problem:
        x = inputs[0]
        batch, tokens, heads, head_dim = x.shape
        shape = (tokens * world_size, batch, heads * head_dim)
        if self.op == GATHER:
            shape = (tokens, batch, heads * head_dim * world_size)
        return problem_of(self.op, shape, MOVED[x.dtype], world_size, reduction="", mode="eager")

    def results(self, inputs: Tensors, options: Any, world_size: int) -> Results:
        batch, tokens, heads, head_dim = inputs[0].shape
        if self.op == SCATTER:
            return [((batch, tokens * world_size, heads // world_size, head_dim), inputs[0].dtype)]
        return [((batch, tokens // world_size, heads * world_size, head_dim), inputs[0].dtype)]

    def call_of(self, problem: Problem, inputs: Tensors, outputs: Tensors) -> tuple[Tensors, tuple[Any, ...]]:
        head_dim = problem.shape[2] // problem.world_size  # one head a rank
        return tuple(tensor.unflatten(2, (-1, head_dim)) for tensor in (*inputs, *outputs)), ()


class _UlyssesScatter(_Ulysses):
    op = SCATTER
    gradient = autograd.keep_nothing, autograd.ulysses_scatter


class _UlyssesGather(_Ulysses):
    op = GATHER
    gradient = autograd.keep_nothing, autograd.ulysses_gather


_ulysses_scatter: CallPath[torch.Tensor] = CallPath(_UlyssesScatter())
_ulysses_gather: CallPath[torch.Tensor] = CallPath(_UlyssesGather())


def ulysses_scatter(
    x: torch.Tensor,
    *,
    group: dist.ProcessGroup | None = None,
    out: torch.Tensor | None = None,
    max_sms: int | None = None,
) -> torch.Tensor:
    """Give every rank all tokens of its share of the heads, from all heads of its share of the tokens.

    Args:
        x: [B, S/n, H, D] of this rank's tokens, any strides, any floating-point (fp8 too), integer or bool dtype; H is
            a multiple of the group's size n. The same shape and dtype on every rank. Left as it is.
        group: as in `all_reduce`.
        out: where to write: of the result's shape, x's dtype and device, any strides; no memory shared with `x`. None
            allocates it.
        max_sms: as in `all_reduce`.

    Returns:
        `out`, or a new contiguous tensor [B, S, H/n, D]: tokens of rank 0 first, heads r · H/n to (r + 1) · H/n − 1 on
        rank r.

    Raises:
        NotInitializedError, GroupError, UnsupportedInputError, InfeasibleError, PeerTimeoutError: as in `all_reduce`.

    Every bit comes through as it was sent. The gradient is `ulysses_gather`. On GPUs heads of a rank that are no
    multiple of 16 bytes run the variant `library`. Can be captured in CUDA graphs; enqueues on the current stream;
    never synchronises the host.
    """
    try:
        if not is_dynamo_compiling():
            fast = _ulysses_scatter.last_fast_calls[world._default_pg if group is None else group]
            if (result := fast(x, out, "default", max_sms)) is not None:
                return result
        return _ulysses_scatter.call((x, out), (), group, "default", max_sms)
    except BaseException as error:
        _ulysses_scatter.on_error(error, x, group)
        raise


def ulysses_gather(
    x: torch.Tensor,
    *,
    group: dist.ProcessGroup | None = None,
    out: torch.Tensor | None = None,
    max_sms: int | None = None,
) -> torch.Tensor:
    """Give every rank all heads of its share of the tokens, from all tokens of its share of the heads.

    Args:
        x: [B, S, H/n, D] of this rank's heads, any strides, any floating-point (fp8 too), integer or bool dtype; S is a
            multiple of the group's size n. The same shape and dtype on every rank. Left as it is.
        group: as in `all_reduce`.
        out: as in `ulysses_scatter`.
        max_sms: as in `all_reduce`.

    Returns:
        `out`, or a new contiguous tensor [B, S/n, H, D]: heads of rank 0 first, tokens r · S/n to (r + 1) · S/n − 1 on
        rank r. It undoes `ulysses_scatter`.

    Raises:
        NotInitializedError, GroupError, UnsupportedInputError, InfeasibleError, PeerTimeoutError: as in `all_reduce`.

    Every bit comes through as it was sent. The gradient is `ulysses_scatter`. On GPUs heads of a rank that are no
    multiple of 16 bytes run the variant `library`. Can be captured in CUDA graphs; enqueues on the current stream;
    never synchronises the host.
    """
    try:
        if not is_dynamo_compiling():
            fast = _ulysses_gather.last_fast_calls[world._default_pg if group is None else group]
            if (result := fast(x, out, "default", max_sms)) is not None:
                return result
        return _ulysses_gather.call((x, out), (), group, "default", max_sms)
    except BaseException as error:
        _ulysses_gather.on_error(error, x, group)
        raise
