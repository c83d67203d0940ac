"""`ep_dispatch` and `ep_combine`: tokens to the ranks of their experts, and the experts' results back."""

from __future__ import annotations

import contextlib
import math
from dataclasses import dataclass
from typing import Any, Literal, NoReturn, TypeAlias

import torch
import torch.distributed as dist
from torch.compiler import is_dynamo_compiling

from tunedcomm.dispatch.communicator import Communicator
from tunedcomm.dispatch.dispatcher import check_limit
from tunedcomm.dispatch.launches import no_intercept
from tunedcomm.dispatch.plans import Plan
from tunedcomm.errors import TunedCommError, UnsupportedInputError
from tunedcomm.kernels.moe.op import (
    ALIGNMENT,
    LAYOUTS,
    NO_ROOM,
    Overflow,
    bound_of,
    check,
    default_capacity,
    dispatched,
    offsets_of,
    some_rows,
    token_shapes,
    unfit,
    weighted_sum,
)
from tunedcomm.ops import autograd
from tunedcomm.ops.adapter import CallSignature, Group, OpAdapter, Results, Tensors, problem_of
from tunedcomm.ops.call import CallPath
from tunedcomm.ops.checks import FLOATS, check_dtype, is_traced
from tunedcomm.ops.fast_call import is_capturing, raw_stream, world
from tunedcomm.spec import NumericsPolicy, Problem

Layout: TypeAlias = Literal["padded", "contiguous"]
Quantisation: TypeAlias = Literal["token", "group128"]
_IDS = (torch.int32, torch.int64)
_QUANTISED = ("", "token", "group128")


@dataclass(frozen=True, slots=True, eq=False)
class DispatchResult:
    """The result of `ep_dispatch`: the tokens of this rank's experts, and the fields that `ep_combine` needs.

    Attributes:
        tokens: [E_local, capacity, H] if `padded`, [capacity, H] if `contiguous`; e4m3 if quantised. Rows behind an
            expert's count hold nothing.
        scales: fp32 factors of the tokens: one a token or one for 128 elements, in the shape of tokens; None if not
            quantised.
        counts: [E_local] int32, tokens of each expert.
        offsets: [E_local + 1] int32: the first row of each expert of tokens as a matrix [rows, H], and the row behind
            the last expert.
        rows: [world_size, T, K] int32: row of every rank's token t for its k-th expert; below 0 if it is not here.
        topk_ids: as they were passed, [T, K].
        num_experts: of all ranks.
        group: as it was passed.
    """

    tokens: torch.Tensor
    scales: torch.Tensor | None
    counts: torch.Tensor
    offsets: torch.Tensor
    rows: torch.Tensor
    topk_ids: torch.Tensor
    num_experts: int
    group: dist.ProcessGroup | None = None

    def check(self) -> None:
        """Wait for the device and raise if tokens had no room.

        Raises:
            PeerTimeoutError: a kernel gave up waiting for a peer.
            CapacityError: names the expert and its count.
            UnsupportedInputError: `topk_ids` named an expert that does not exist, or `expert_out` lacked rows in use,
                which ends the group.
        """
        if self.tokens.is_cuda:
            torch.cuda.current_stream(self.tokens.device).synchronize()
        communicator = _dispatch.communicator(self.tokens, world._default_pg if self.group is None else self.group)
        with communicator.whole("ep_combine"):
            communicator.check_peers()
            Overflow.of(communicator.group, communicator.device).check(communicator)


Sent = DispatchResult  # its name until now


class _Dispatch(OpAdapter):
    op = "ep_dispatch"
    inputs = ("x", "topk_ids")
    outputs = ("tokens", "scales", "counts", "offsets", "rows")
    options = ("int num_experts", "int? capacity", "str layout", "str quantize", "int alignment", "bool zeros")
    reduces = False
    gradient = autograd.keep_sent, autograd.ep_dispatch

    def check(self, inputs: Tensors, options: Any, world_size: int) -> None:
        x, ids = inputs
        num_experts, capacity, layout, quantize, alignment, _ = options
        check_dtype(self.op, x, FLOATS)
        if x.dim() != 2 or ids.dim() != 2 or ids.shape[0] != x.shape[0]:
            raise UnsupportedInputError(
                f"{self.op} takes x of shape [tokens, hidden] and topk_ids of shape [tokens, top-k], not "
                f"{tuple(x.shape)} and {tuple(ids.shape)}"
            )
        _check_ids(self.op, ids)
        for name, limit, unit in (
            ("num_experts", num_experts, "experts"), ("capacity", capacity, "rows"), ("alignment", alignment, "rows")
        ):  # fmt: skip
            check_limit(name, limit, unit)
        if not alignment:
            raise UnsupportedInputError("alignment=0: pass 1 or more rows")
        if layout not in LAYOUTS:
            raise UnsupportedInputError(f"layout={layout!r} is none; allowed: {', '.join(LAYOUTS)}")
        if quantize not in _QUANTISED:
            raise UnsupportedInputError(f"quantize={quantize!r} is none; allowed: None, 'token', 'group128'")
        if quantize and x.dtype == torch.float64:
            raise UnsupportedInputError(f"{self.op} quantises bfloat16, float16 and float32, not float64")
        check(self.problem(inputs, options, world_size, Problem))

    def problem(self, inputs: Tensors, options: Any, world_size: int, make: Any = problem_of) -> Problem:
        x, ids = inputs
        shape = (*x.shape, ids.shape[1], options[0])
        made: Problem = make(
            self.op, shape, FLOATS[x.dtype], world_size, reduction="", layout=options[2], scaling=options[3],
            mode="eager",
        )  # fmt: skip
        return made

    def results(self, inputs: Tensors, options: Any, world_size: int) -> Results:
        problem = self.problem(inputs, options, world_size, Problem)  # sizes may be symbols, which are not looked up
        return token_shapes(problem, self.capacity(problem, options))

    @staticmethod
    def capacity(problem: Problem, options: Any) -> int:
        """Rows of an expert, or of all of them."""
        return default_capacity(problem, options[4]) if options[1] is None else int(options[1])

    def call_of(self, problem: Problem, inputs: Tensors, outputs: Tensors) -> tuple[Tensors, tuple[Any, ...]]:
        bound = bound_of(problem, outputs[0])
        options = (problem.shape[3], bound, problem.layout, problem.scaling, ALIGNMENT, False)
        return (*inputs, *outputs), options

    def refusal(self, inputs: Tensors, options: Any) -> str:
        return f"{self.op} with quantize={options[3]!r}" if options[3] else ""

    def needs_no_peers(self, inputs: Tensors, results: Tensors, options: Any) -> bool:
        """No rank has a token."""
        if inputs[0].numel() and inputs[1].numel():
            return False
        _, _, counts, offsets, rows = results
        problem = self.problem(inputs, options, len(rows))
        counts.zero_()
        rows.fill_(-1)
        offsets.copy_(offsets_of(counts, problem, self.capacity(problem, options), options[4]))
        return True

    def scalars(self, inputs: Tensors, options: Any) -> Tensors:
        return (options[4],)


class _DispatchPath(CallPath[Any]):
    """Calls where gradients are recorded leave zeros, and not just anything, behind an expert's tokens."""

    def run(self, communicator: Any, inputs: Tensors, targets: Tensors, signature: CallSignature) -> Plan | None:
        zeros = signature.options[-1]
        if zeros:
            targets[0].zero_()
        if communicator.world_size == 1 and inputs[0].numel() and inputs[1].numel():
            problem, alignment = self.adapter.problem(inputs, signature.options, 1), signature.options[4]
            bound = _Dispatch.capacity(problem, signature.options)
            results, code = dispatched([inputs], 0, problem, bound, alignment)
            for target, result in zip(targets, results, strict=True):
                target.copy_(result)
            Overflow.of(communicator.group, communicator.device).note(code, bound, communicator)
            return None
        plan = super().run(communicator, inputs, targets, signature)
        return None if zeros else plan


class _Combine(OpAdapter):
    op = "ep_combine"
    inputs = ("expert_out", "topk_weights", "topk_ids", "rows")
    options = ("int num_experts",)
    gradient = autograd.keep_results, autograd.ep_combine

    def check(self, inputs: Tensors, options: Any, world_size: int) -> None:
        results, weights, ids, rows = inputs
        check_dtype(self.op, results, FLOATS)
        _check_ids(self.op, ids)
        if results.dim() < 2:
            raise UnsupportedInputError(
                f"{self.op} takes the experts' results as rows, in the shape of sent.tokens, not {tuple(results.shape)}"
            )
        if not weights.is_floating_point() or weights.shape != ids.shape:
            raise UnsupportedInputError(
                f"topk_weights of {self.op} have shape {tuple(weights.shape)} and {weights.dtype}; they must be "
                f"floating-point numbers in the shape of topk_ids, {tuple(ids.shape)}"
            )
        if rows.dtype != torch.int32 or tuple(rows.shape) != (world_size, *ids.shape):
            raise UnsupportedInputError(
                f"rows of {self.op} have shape {tuple(rows.shape)} and {rows.dtype}; pass rows of an ep_dispatch of "
                "the same tokens on this group"
            )
        check(self.problem(inputs, options, world_size, Problem))

    def problem(self, inputs: Tensors, options: Any, world_size: int, make: Any = problem_of) -> Problem:
        results, _, ids, _ = inputs
        shape = (ids.shape[0], results.shape[-1], ids.shape[1], options[0])
        made: Problem = make(self.op, shape, FLOATS[results.dtype], world_size, reduction="", mode="eager")
        return made

    def results(self, inputs: Tensors, options: Any, world_size: int) -> Results:
        return [((inputs[2].shape[0], inputs[0].shape[-1]), inputs[0].dtype)]

    def needs_no_peers(self, inputs: Tensors, results: Tensors, options: Any) -> bool:
        """No rank has a token, or tokens have no elements; a rank without results takes part."""
        if inputs[2].numel() and inputs[0].shape[-1]:
            return False
        results[0].zero_()
        return True

    def call_of(self, problem: Problem, inputs: Tensors, outputs: Tensors) -> tuple[Tensors, tuple[Any, ...]]:
        return (*inputs, *outputs), (problem.shape[3],)

    def key(self, tensors: Tensors) -> Any:
        return tuple(tensors[0].shape), tuple(tensors[2].shape)

    def operands(self, inputs: Tensors, options: Any) -> Tensors:
        results, weights, ids, rows = inputs
        wide = torch.promote_types(results.dtype, torch.float32)
        return results.reshape(-1, results.shape[-1]), weights.to(wide), ids, rows

    def single_rank_result(self, inputs: Tensors, options: Any) -> Tensors:
        results, weights, ids, rows = inputs
        results = some_rows(results.reshape(-1, results.shape[-1]))
        parts = [results[rows[0, :, k].long().clamp(min=0)] for k in range(ids.shape[1])]
        return (weighted_sum(parts, weights, rows[0] >= 0),)


class _GuardedPath(CallPath[torch.Tensor]):
    """Calls whose results may have fewer rows than are in use: the operator's calls, and trimmed results."""

    def serve_here(
        self, tensors: Tensors, options: Any, group: Group, numerics: NumericsPolicy | None, max_sms: int | None
    ) -> torch.Tensor:
        results, weights, ids, rows, out = tensors
        num_rows = math.prod(results.shape[:-1])
        if rows.is_cuda:  # nobody waits for the GPU
            late = rows >= num_rows
            if not is_capturing():
                communicator = self.communicator(results, group)
                Overflow.of(communicator.group, communicator.device).note(late.sum(), num_rows, communicator)
            rows = rows.masked_fill(late, NO_ROOM)
        elif rows.numel() and (needed := int(rows.max()) + 1) > num_rows:
            self.refuse(tensors, options, group, numerics, needed)
        return _combine.serve_here((results, weights, ids, rows, out), options, group, numerics, max_sms)

    def run_problem(self, problem: Problem, inputs: Tensors, outputs: Tensors) -> None:
        _combine.run_problem(problem, inputs, outputs)

    def refuse(
        self, tensors: Tensors, options: Any, group: Group, numerics: NumericsPolicy | None, needed: Any
    ) -> NoReturn:
        """Refuse what this rank alone knows: the group ends on every rank."""
        results = tensors[0]
        refusal = unfit(tuple(results.shape[:-1]), needed)
        if is_dynamo_compiling() or is_traced(results):
            raise refusal
        communicator = self.communicator(results, group)
        try:
            communicator.refuse_call(refusal)
        finally:
            # Peers on other hosts, or in NCCL, do not look whether the group has ended.
            if refusal.ends_group and communicator.ring is None and results.dim() > 1:
                communicator.abandon(self.adapter.op, refusal)
                with contextlib.suppress(TunedCommError):
                    self._take_part(communicator, tensors, options, numerics)

    def _take_part(
        self, communicator: Communicator, tensors: Tensors, options: Any, numerics: NumericsPolicy | None
    ) -> None:
        """Send NaN where the library waits without looking whether the group has ended."""
        results, weights, ids, rows, _ = tensors
        nothing = results.detach().new_full((1, results.shape[-1]), math.nan)
        own = (tensor.detach().clone(memory_format=torch.contiguous_format) for tensor in (weights, ids))
        inputs = (nothing, *own, rows.clamp(max=0))
        self.results(inputs, options, communicator.world_size, numerics, None)
        signature = CallSignature(options, (), (), numerics, None, is_capturing(), communicator.policy(numerics))
        plan = self._plan(communicator, inputs, signature, in_place=False, symmetric=False)[0]
        if plan.decision.candidate.variant == "library":
            launch = communicator.bind(plan.problem, plan.decision.candidate)  # which does not look for NaN
            target = nothing.new_empty(len(ids), nothing.shape[-1])
            with no_intercept():
                launch(self.adapter.operands(inputs, options), (target,), raw_stream(communicator.device_index))


def _check_ids(op: str, ids: torch.Tensor) -> None:
    if ids.dtype not in _IDS:
        raise UnsupportedInputError(f"topk_ids of {op} are {ids.dtype}; pass int32 or int64")


_dispatch = _DispatchPath(_Dispatch())
_combine: CallPath[torch.Tensor] = CallPath(_Combine())
_guarded = _GuardedPath(_Combine())  # the operator's


def ep_dispatch(
    x: torch.Tensor,
    topk_ids: torch.Tensor,
    *,
    num_experts: int,
    capacity: int | None = None,
    layout: Layout = "padded",
    quantize: Quantisation | None = None,
    alignment: int = ALIGNMENT,
    group: dist.ProcessGroup | None = None,
    max_sms: int | None = None,
) -> DispatchResult:
    """Send every token to the ranks of its experts; each rank gets its experts' tokens, sorted by expert.

    Args:
        x: tokens, [T, H], any strides. Kernels take bf16, fp16 and fp32; fp64 runs the variant `library` on GPUs. The
            same shape and dtype on every rank: fill up with tokens whose ids are −1. Left as it is.
        topk_ids: experts of each token, [T, K], int32 or int64; −1 for none. Rank d of n has the experts
            d · num_experts / n and following. A token that goes to several experts of one rank travels once.
        num_experts: of all ranks together, a multiple of the group's size.
        capacity: rows that an expert has room for (`padded`), or all experts of a rank together with what aligns them
            (`contiguous`); the same on every rank. By default room for whatever the router chooses, as long as it names
            no expert twice for one token.
        layout: `padded`: tokens have the shape [E_local, capacity, H]. `contiguous`: [capacity, H], experts one after
            another, each at a multiple of `alignment` rows, for grouped GEMMs.
        quantize: None; `token` or `group128`: tokens travel and arrive in e4m3, with one scale in fp32 for each token
            or for 128 elements of it: the largest magnitude over 448. Not differentiable.
        alignment: rows, for `contiguous`.
        group: as in `all_reduce`.
        max_sms: as in `all_reduce`, for overlap with the experts' GEMMs.

    Returns:
        `DispatchResult`. Within an expert tokens stand in the order of (source rank, token, k), whatever variant runs.
        What lies behind an expert's tokens is unspecified, but zeros unless gradients are switched off
        (`torch.no_grad()`): the gradients of the experts' weights are sums over all rows.

    Raises:
        NotInitializedError, GroupError, UnsupportedInputError, InfeasibleError, PeerTimeoutError: as in `all_reduce`.
        CapacityError: an expert was sent more tokens than it has room for; on every rank. Calls of CPU tensors raise
            it at once. GPUs write nothing out of bounds, and `DispatchResult.check()` or the next call of either op
            raises it.

    Its gradient is an `ep_combine` without weights. Can be captured in CUDA graphs; never synchronises the host.
    """
    try:
        inputs = (x, topk_ids)
        options = (num_experts, capacity, layout, quantize or "", alignment, torch.is_grad_enabled())
        tokens, scales, counts, offsets, rows = _dispatch.call(
            (*inputs, *(None,) * len(_Dispatch.outputs)), options, group, "default", max_sms
        )
        return DispatchResult(tokens, scales if quantize else None, counts, offsets, rows, topk_ids, num_experts, group)
    except BaseException as error:
        _dispatch.left(error, x, group)
        raise


def ep_combine(
    expert_out: torch.Tensor,
    sent: DispatchResult,
    topk_weights: torch.Tensor,
    *,
    out: torch.Tensor | None = None,
    numerics: NumericsPolicy | None = None,
    max_sms: int | None = None,
) -> torch.Tensor:
    """Bring the experts' results back to the ranks of their tokens, and sum them by weight.

    Args:
        expert_out: results in the shape and order of `sent.tokens`, of any hidden size; in the layout `contiguous`
            rows behind the last one in use may be left out, where none is in use all of them. Kernels take bf16, fp16
            and fp32; fp64 runs the variant `library` on GPUs. Left as it is; rows that hold no token are not read.
        sent: what `ep_dispatch` returned.
        topk_weights: [T, K], floating-point; used in fp32.
        out: where to write, [T, H] of expert_out's dtype, any strides. None allocates it.
        numerics: as in `all_reduce`. Ordered: summed from +0.0 in fp32 in the order of K, rounded once; every
            variant is.
        max_sms: as in `all_reduce`.

    Returns:
        `out`, or a new tensor [T, H]: the sum over K of weight · result; ids of −1 add nothing.

    Raises:
        NotInitializedError, GroupError, UnsupportedInputError, InfeasibleError, PeerTimeoutError, CapacityError: as in
            `ep_dispatch`.
        GroupAbortedError: another rank's `expert_out` has another shape, or lacks rows in use, so its results are
            missing here. On CPUs this call raises it. GPUs count such rows as zeros, and the next call raises it, or
            `DispatchResult.check`.

    Differentiable in expert_out and topk_weights. Can be captured in CUDA graphs; never synchronises the host, but for
    the variant `library`.
    """
    try:
        if not isinstance(sent, DispatchResult):
            raise UnsupportedInputError(f"sent is a {type(sent).__name__}; pass what ep_dispatch returned")
        tensors, options = (expert_out, topk_weights, sent.topk_ids, sent.rows, out), (sent.num_experts,)
        path = _combine
        if isinstance(expert_out, torch.Tensor) and expert_out.shape[:-1] != (due := sent.tokens.shape[:-1]):
            path = _guarded
            if expert_out.dim() != 2 or len(due) > 1 or len(expert_out) > due[0]:
                path.refuse(tensors, options, sent.group, numerics, tuple(due))
        return path.call(tensors, options, sent.group, numerics, max_sms)
    except BaseException as error:
        _combine.left(error, expert_out, getattr(sent, "group", None))
        raise
