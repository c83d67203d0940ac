"""Calls of `torch.ops.symm_mem`, read as calls of tunedcomm's ops, for `tunedcomm.intercept(symm_mem=True)`.

**Order.** PyTorch's all-reduces of symmetric memory begin and end with a barrier, and programs rely on both: a peer may
have written to my input before it makes the call, and may read my result in place, or write to my input again, as soon
as its own call has returned. Ours do neither of themselves, so a served call is put between barriers:

- `two_shot_all_reduce_`, `multimem_all_reduce_`: a barrier before and after, for peers may read the result where it is.
- `one_shot_all_reduce`: before only. A kernel reads no input but its own rank's, and a rank that has its result has
  heard of all inputs.
- `one_shot_all_reduce_copy`: none. PyTorch's kernel copies the ordinary input before its first barrier, so peers cannot
  write to that input in time, and here nothing touches the symmetric buffer.
- The fused products: none. PyTorch's stage their operands themselves.

A barrier is an all-reduce of 1 KiB: a rank has its sum once every rank has come, and the writes of kernels before it on
a rank's stream are visible then. It can be captured, its waits are bounded, and its time is known from rows.

**Ranks.** All facts that decide are the same on every rank but two: the matrices `b` of fused products may differ in
shape or strides, where a model was split unevenly. So ranks compare them before they are multiplied the first time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from tunedcomm.dispatch.plans import Plan
from tunedcomm.errors import UnsupportedInputError
from tunedcomm.ops.adapter import Tensors
from tunedcomm.ops.arguments import is_nk
from tunedcomm.ops.call import paths
from tunedcomm.ops.fast_call import is_capturing
from tunedcomm.ops.gemm import OUT_DTYPES, ag_gemm, gemm_rs, list_path
from tunedcomm.selection.select import Decision
from tunedcomm.spec import Problem, admits, get_op

# Above it PyTorch's two-shot takes as long as ours and two barriers: bench/results/collectives_h100.csv.
_MOST_BYTES = 8 << 20
_CAPTURED_FIRST = "it is captured without having been called before"
# Elements of a list of dtypes arrive as c10::ScalarType.
_SCALAR_TYPES = {5: torch.float16, 6: torch.float32, 15: torch.bfloat16}


class DirectCall(NamedTuple):
    """A call of one of PyTorch's operators on symmetric memory, as a call of ours.

    Attributes:
        op: the operator of ours from which the call is planned.
        inputs, options: of that op.
        why: the reason why it cannot do what is asked for, from facts that all ranks share; "" if it can.
        run: makes the call, for a group and a policy; None: an all_reduce of the input.
        in_place: the result takes the first input's place.
        meets: whether there is a barrier before and after it.
        weights: the facts that ranks may not share, to be compared.
    """

    op: str
    inputs: Tensors
    options: tuple[Any, ...]
    why: str = ""
    run: Callable[..., Any] | None = None
    in_place: bool = False
    meets: tuple[bool, bool] = (False, False)
    weights: Hashable = None


def why_slower(decision: Decision, problem: Problem, barriers_us: float | None, num_barriers: int) -> str:
    """The reason why PyTorch's all-reduce of symmetric memory is left alone on GPUs, or "".

    Args:
        decision: for `problem`: a kernel.
        barriers_us: time of the barriers, None where that is not known.
        num_barriers: how many they are.
    """
    if decision.source in ("forced", "pin"):
        return ""
    if problem.mode == "eager":
        return "in eager calls PyTorch's own operator is launched sooner; captured calls may be served"
    if not num_barriers:
        return ""
    if get_op(problem.op).message_bytes(problem) > _MOST_BYTES:
        return f"PyTorch's own operator is as fast above {_MOST_BYTES >> 20} MiB"
    if barriers_us is None or decision.latency_us is None or decision.library_us is None:
        return "its order needs barriers, and no time is measured here to set against theirs"
    if decision.latency_us + barriers_us < decision.library_us:
        return ""
    return (
        f"its order needs barriers of {barriers_us:.1f} µs; with {decision.latency_us:.1f} µs for the kernel the "
        f"library's {decision.library_us:.1f} µs are no longer"
    )


def _one_shot(world_size: int, x: torch.Tensor, reduction: str, group_name: str) -> DirectCall:
    return DirectCall("all_reduce", (x,), (reduction,), meets=(True, False))


def _in_place(world_size: int, x: torch.Tensor, reduction: str, group_name: str) -> DirectCall:
    return DirectCall("all_reduce", (x,), (reduction,), in_place=True, meets=(True, True))


def _one_shot_copy(
    world_size: int, buffer: torch.Tensor, x: torch.Tensor, reduction: str, group_name: str
) -> DirectCall:
    fits = buffer.dtype == x.dtype and buffer.numel() >= x.numel()
    return DirectCall("all_reduce", (x,), (reduction,), "" if fits else "the buffer does not hold the input")


def _gather(
    world_size: int, a: torch.Tensor, bs: Sequence[torch.Tensor], dim: int, group_name: str, return_a: bool = True
) -> DirectCall:
    return _gathered(world_size, a, bs, None, [None] * len(bs), dim, None, "", return_a=return_a)


def _gather_scaled(
    world_size: int,
    a: torch.Tensor,
    bs: Sequence[torch.Tensor],
    scale_a: torch.Tensor,
    scales: Sequence[torch.Tensor],
    dim: int,
    group_name: str,
    biases: Sequence[torch.Tensor | None],
    result_scales: Sequence[torch.Tensor | None],
    out_dtypes: Sequence[Any],
    fast: Sequence[bool],
) -> DirectCall:
    dtype = {_SCALAR_TYPES.get(each, each) for each in out_dtypes}
    lists = (scales, biases, result_scales, out_dtypes)
    why = _unscaled((*biases, *result_scales), dtype)
    if any(len(each) != len(bs) for each in lists):
        why = "lists of different lengths"
    return _gathered(world_size, a, bs, scale_a, scales, dim, next(iter(dtype), None), why, return_a=True)


def _unscaled(added: Sequence[torch.Tensor | None], out_dtypes: set[Any]) -> str:
    """The reason why a scaled product has no counterpart, or ""."""
    if any(each is not None for each in added):
        return "a bias or a scale of the result"
    if len(out_dtypes) != 1 or not out_dtypes <= set(OUT_DTYPES[torch.float8_e4m3fn]):
        return f"results of {', '.join(map(str, out_dtypes))}"
    return ""


def _gathered(
    world_size: int,
    a: torch.Tensor,
    bs: Sequence[torch.Tensor],
    scale_a: torch.Tensor | None,
    scales: Any,
    dim: int,
    out_dtype: torch.dtype | None,
    why: str,
    *,
    return_a: bool,
) -> DirectCall:
    """Products of the matrix that is gathered along `dim`."""
    if not bs or dim not in range(a.dim() - 1):
        why = why or f"a gather along dimension {dim} of {a.dim()}, for {len(bs)} products"
    if why:
        return DirectCall("ag_gemm", (a, None, None, None), (out_dtype,), why)
    a, scale_a = _front(a, scale_a, dim)
    bs, adapter = [b.detach() for b in bs], list_path(len(bs)).adapter
    inputs = (a, scale_a, *bs, *scales)
    try:
        adapter.check(inputs, (out_dtype,), world_size)
    except UnsupportedInputError as error:
        return DirectCall("ag_gemm", (a, None, None, None), (out_dtype,), str(error))
    widest = adapter.widest(inputs)

    def run(group: Any, numerics: Any) -> Any:
        outs, gathered = ag_gemm(
            a, bs, scale_a=scale_a, scale_b=None if scale_a is None else scales, out_dtype=out_dtype,
            return_gathered=True, group=group, numerics=numerics,
        )  # fmt: skip
        return gathered.movedim(0, dim) if return_a else None, [out.movedim(0, dim) for out in outs]

    def run_alone(group: Any, numerics: Any) -> Any:
        out: Any = ag_gemm(
            a, bs[0], scale_a=scale_a, scale_b=scales[0], out_dtype=out_dtype, group=group, numerics=numerics
        )
        return None, [out.movedim(0, dim)]

    alone = len(bs) == 1 and not return_a
    return DirectCall(
        "ag_gemm" if alone else "ag_gemm_gathered",
        (a, bs[widest], scale_a, scales[widest]),
        (out_dtype,),
        run=run_alone if alone else run,
        weights=_facts(a, scale_a, bs, scales),
    )


def _scatter(
    world_size: int, a: torch.Tensor, b: torch.Tensor, reduction: str, dim: int, group_name: str
) -> DirectCall:
    return _scattered(a, b, None, None, reduction, dim, None, (), "")


def _scatter_scaled(
    world_size: int,
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    reduction: str,
    dim: int,
    dim_of_a: int,
    group_name: str,
    shape: Sequence[int] | None,
    bias: torch.Tensor | None = None,
    result_scale: torch.Tensor | None = None,
    out_dtype: Any = None,
    fast: bool = False,
) -> DirectCall:
    dtype, shape = _SCALAR_TYPES.get(out_dtype, out_dtype), list(shape or ())
    why = _unscaled((bias, result_scale), {dtype})
    leading, rows = shape[:-1], tuple(a.shape[:-1])
    splits_rows = dim == 0 and leading and leading[0] % world_size == 0 and math.prod(leading) == math.prod(rows)
    if dim != dim_of_a or not (splits_rows or leading == list(rows)):
        why = why or f"dimension {dim} of {shape} is scattered, which is {dim_of_a} of the matrix {tuple(a.shape)}"
    elif b.dim() == 2 and shape[-1] != b.shape[1]:
        why = why or f"a result of {shape}"
    else:
        shape[dim] //= world_size
    return _scattered(a, b, scale_a, scale_b, reduction, dim, dtype, shape, why)


def _scattered(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor | None,
    scale_b: torch.Tensor | None,
    reduction: str,
    dim: int,
    out_dtype: torch.dtype | None,
    shape: Sequence[int],
    why: str,
) -> DirectCall:
    """The product, summed and scattered along `dim`, in `shape` if that is not empty."""
    options = (out_dtype, reduction)
    if dim not in range(a.dim() - 1) or b.dim() != 2:
        why = why or f"a scatter along dimension {dim} of {a.dim()}, with b of {b.dim()}"
    if why:
        return DirectCall("gemm_rs", (a, None, None, None), options, why)
    a, scale_a = _front(a, scale_a, dim)
    b = b.detach()

    def run(group: Any, numerics: Any) -> torch.Tensor:
        out = gemm_rs(
            a, b, op=reduction, scale_a=scale_a, scale_b=scale_b, out_dtype=out_dtype, group=group, numerics=numerics
        )
        out = out.movedim(0, dim).contiguous()
        return out.view(shape) if shape else out

    weights = _facts(a, scale_a, [b], [scale_b])
    return DirectCall("gemm_rs", (a, b, scale_a, scale_b), options, run=run, weights=weights)


def _front(a: torch.Tensor, scale: torch.Tensor | None, dim: int) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The operand and its scales for rows, if it has them, with dimension `dim` as the first."""
    if scale is not None and scale.dim() == a.dim():
        scale = scale.movedim(dim, 0)
    return a.detach().movedim(dim, 0), scale


def _facts(a: torch.Tensor, scale_a: Any, bs: Sequence[torch.Tensor], scales: Sequence[Any]) -> Hashable:
    """The facts about operands on which the choice of a kernel rests, besides the number of rows."""
    kinds = tuple((tuple(b.shape), str(b.dtype), b.dim() == 2 and is_nk(b)) for b in bs)
    sizes = tuple(0 if scale is None else scale.numel() for scale in scales)
    return a.shape[-1], str(a.dtype), kinds, sizes, 0 if scale_a is None else min(scale_a.numel(), 2)


class DirectCalls:
    """The calls of a group that is intercepted.

    Args:
        of: the group, a `RoutedGroup` of `intercept`.
    """

    def __init__(self, of: Any) -> None:
        self._of = of
        self._word: Tensors = ()  # input and output of a barrier
        self._weights: set[Hashable] | None = set()  # alike on all ranks; None: ranks differ

    def serve(self, name: str, call: DirectCall) -> Callable[[], Any] | None:
        """Count a call of the operator `name`; the function that makes it, or None where PyTorch's serves it."""
        of, adapter, (x, *others) = self._of, paths[call.op].adapter, call.inputs
        routing = of.serves(
            name,
            adapter,
            x,
            call.options,
            in_place=call.in_place,
            others=tuple(others),
            why=call.why or self._why_unlike(call.weights),
            facts=call.weights,
            veto=partial(self._why_slower, sum(call.meets)) if call.op == "all_reduce" else None,
        )
        return None if routing is None else partial(self._run, call)

    def _run(self, call: DirectCall) -> Any:
        of, (before, after) = self._of, call.meets
        if call.run is not None:
            return call.run(of.group, of.numerics)
        if before:
            self._meet()
        found = x = call.inputs[0]
        plain = of.plain(x.detach())
        made = paths["all_reduce"].serve_again(
            (plain, plain if call.in_place else None), call.options, of.group, of.numerics, None
        )
        if not call.in_place:
            found = made
        elif plain.data_ptr() != x.data_ptr():
            x.detach().copy_(plain)
        if after:
            self._meet()
        return found

    def _meet(self) -> None:
        """Make a barrier on the current stream."""
        paths["all_reduce"].serve_again(self._word, ("sum",), self._of.group, "default", None)

    def _why_slower(self, num_barriers: int, plan: Plan) -> str:
        """`why_slower` for a plan that needs so many barriers, which are bound here if they can be."""
        of, barriers_us = self._of, None
        if num_barriers and not self._word:
            if is_capturing():
                return _CAPTURED_FIRST
            word = torch.zeros(512, dtype=torch.bfloat16, device=of.device)
            self._word = (word, torch.empty_like(word))
        if num_barriers:
            barrier = paths["all_reduce"].planned(self._word[:1], ("sum",), of.group, "default")
            latency_us = barrier.decide_again().latency_us
            barriers_us = None if latency_us is None else num_barriers * latency_us
        if plan.candidate.variant == "library" or of.device.type == "cpu" or not admits(plan.policy, "library"):
            return ""
        return why_slower(plan.decide_again(), plan.problem, barriers_us, num_barriers)

    def _why_unlike(self, weights: Hashable) -> str:
        """The reason why products of such matrices go to the library, or ""; collective if they are new."""
        if weights is None:
            return ""
        if self._weights is not None and weights not in self._weights:
            if is_capturing():
                return _CAPTURED_FIRST
            if len(set(self._of.communicator.barrier(repr(weights)))) > 1:
                self._weights = None
            else:
                self._weights.add(weights)
        return "" if self._weights is not None else "ranks multiply by matrices of different shapes or strides"


Read = Callable[..., DirectCall]
# The operators' names to what reads them and the arguments that it knows, in order.
OPERATORS: dict[str, tuple[Read, str]] = {
    "one_shot_all_reduce": (_one_shot, "input reduce_op group_name"),
    "one_shot_all_reduce_copy": (_one_shot_copy, "symm_buffer local_input reduce_op group_name"),
    "two_shot_all_reduce_": (_in_place, "input reduce_op group_name"),
    "multimem_all_reduce_": (_in_place, "input reduce_op group_name"),
    "fused_all_gather_matmul": (_gather, "A Bs gather_dim group_name return_A"),
    "fused_all_gather_scaled_matmul": (
        _gather_scaled,
        "A Bs A_scale B_scales gather_dim group_name biases result_scales out_dtypes use_fast_accum",
    ),
    "fused_matmul_reduce_scatter": (_scatter, "A B reduce_op scatter_dim group_name"),
    "fused_scaled_matmul_reduce_scatter": (
        _scatter_scaled,
        "A B A_scale B_scale reduce_op orig_scatter_dim scatter_dim_after_maybe_reshape group_name output_shape bias "
        "result_scale out_dtype use_fast_accum",
    ),
}
