"""`ep_dispatch` and `ep_combine`: tokens to the ranks of their experts, and the experts' results back."""

from __future__ import annotations

import contextlib
import math
from abc import abstractmethod
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple, NoReturn, TypeAlias, overload

import torch
import torch.distributed as dist
from torch.compiler import is_dynamo_compiling

from tunedcomm.dispatch.communicator import Communicator, current
from tunedcomm.dispatch.decide import check_limit
from tunedcomm.dispatch.launches import no_intercept
from tunedcomm.dispatch.plans import Plan
from tunedcomm.errors import NotInitializedError, TunedCommError, UnsupportedInputError
from tunedcomm.fp8 import GROUP, Wire
from tunedcomm.kernels.common.reference import weighted_sum
from tunedcomm.kernels.moe.op import (
    ALIGNMENT,
    BY_RANK,
    BY_TOKEN,
    NO_ROOM,
    NOT_HERE,
    SORTED,
    WITH_WEIGHTS,
    Overflow,
    capacity_of,
    check,
    default_capacity,
    dispatched,
    in_use,
    offsets_of,
    some_rows,
    sum_by_token,
    sums_of_experts,
    token_shapes,
    unfit,
)
from tunedcomm.ops import autograd
from tunedcomm.ops.adapter import CallArguments, CallSignature, Group, Maker, OpAdapter, Results, Tensors, problem_of
from tunedcomm.ops.arguments import FLOATS, check_dtype, check_wire, is_traced
from tunedcomm.ops.call import CallPath, paths
from tunedcomm.ops.collectives import all_gather
from tunedcomm.ops.fast_call import is_capturing, raw_stream, world
from tunedcomm.ops.symmetric import symmetric_empty
from tunedcomm.spec import NumericsPolicy, Problem

Layout: TypeAlias = Literal["padded", "contiguous"]
TokenLayout: TypeAlias = Literal["tokens"]
Reduction: TypeAlias = Literal["token", "rank"]
Quantisation: TypeAlias = Literal["token", "group128"]
_IDS = (torch.int32, torch.int64)
_NO_EXPERT = torch.iinfo(torch.int32).max  # an id that is refused
_QUANTISED = ("", "token", "group128")


@dataclass(frozen=True, slots=True, eq=False)
class DispatchResult:
    """The result of `ep_dispatch`: the tokens of this rank's experts, and the fields that `ep_combine` needs.

    Attributes:
        tokens: [E_local, capacity, H] if `padded`, [capacity, H] if `contiguous`; e4m3 if quantised. Rows behind an
            expert's count hold nothing.
        scales: fp32 factors of the tokens: one a token or one for 128 elements, in the shape of tokens; None if not
            quantised. Where scales were passed, tokens and scales are views of rows that hold both.
        counts: [E_local] int32, tokens of each expert.
        offsets: [E_local + 1] int32: the first row of each expert of tokens as a matrix [rows, H], and the row behind
            the last expert.
        rows: [world_size, T, K] int32: row of every rank's token t for its k-th expert; below 0 if it is not here.
        topk_ids: as they were passed, [T, K]; with `expert_map` ids of replicas.
        num_experts: of all ranks.
        group: as it was passed.
        weights: [world_size, T, K]: `topk_weights` of all ranks, in fp32 or wider; None if none were passed.
        token_limits: as of `TokenDispatchResult`.
    """

    tokens: torch.Tensor
    scales: torch.Tensor | None
    counts: torch.Tensor
    offsets: torch.Tensor
    rows: torch.Tensor
    topk_ids: torch.Tensor
    num_experts: int
    group: dist.ProcessGroup | None = None
    weights: torch.Tensor | None = None
    token_limits: torch.Tensor | None = None

    def check(self) -> None:
        """Wait for the device and raise if tokens had no room.

        Raises:
            PeerTimeoutError: a kernel gave up waiting for a peer.
            CapacityError: names the expert and its count.
            UnsupportedInputError: `topk_ids` named an expert that does not exist, or `expert_out` lacked rows in use,
                which ends the group.
        """
        _check_sent(self.tokens, self.group)


Sent = DispatchResult  # its name until now


@dataclass(frozen=True, slots=True, eq=False)
class TokenDispatchResult:
    """The result of `ep_dispatch` in the layout `tokens`: every token that has experts on this rank, once.

    Row r · T + t is token t of rank r, of n ranks with T tokens each. Tensors in `ep_buffers` hold it until the slot's
    next call.

    Attributes:
        tokens: [n · T, H]. Rows of tokens that have no expert here hold nothing.
        expert_ids: [n · T, K] int32: the token's experts by their number on this rank, −1 for experts of other ranks.
        weights: [n · T, K] fp32: `topk_weights` of all ranks; None if none were passed.
        topk_ids: as they were passed, [T, K]; with `expert_map` ids of replicas.
        num_experts: of all ranks.
        row_ids: [n · T] int32: the rows that hold tokens, ascending, then −1; None without `compact`.
        num_rows: int32 without dimensions, on the tokens' device: how many rows hold tokens; None without `compact`.
        group: as it was passed.
        output: with `buffers`, [n · T, H], which peers read: pass it to `ep_combine` to spare a copy; else None.
        buffers: as they were passed.
        turn: the number of the call on the buffers.
        scales: fp32 factors of the tokens, where they were passed: [n · T] or [n · T, H / 128]; else None.
        token_limits: [2] int32: this rank's `num_tokens`, and a number that no rank's exceeds, by which `ep_combine`
            leaves the other tokens out; None without `num_tokens`.
    """

    tokens: torch.Tensor
    expert_ids: torch.Tensor
    weights: torch.Tensor | None
    topk_ids: torch.Tensor
    num_experts: int
    row_ids: torch.Tensor | None = None
    num_rows: torch.Tensor | None = None
    group: dist.ProcessGroup | None = None
    output: torch.Tensor | None = None
    buffers: ExpertBuffers | None = None
    turn: int = 0
    scales: torch.Tensor | None = None
    token_limits: torch.Tensor | None = None

    @property
    def counts(self) -> torch.Tensor:
        """[E_local] int32, tokens of each expert; computed anew, without waiting for the device."""
        ids = self.expert_ids.flatten().long() + 1
        group = world._default_pg if self.group is None else self.group
        counts = torch.zeros(self.num_experts // group.size() + 1, dtype=torch.int32, device=ids.device)
        return counts.scatter_add_(0, ids, torch.ones_like(ids, dtype=torch.int32))[1:]

    def check(self) -> None:
        """Wait for the device and raise what the exchange found.

        Raises:
            PeerTimeoutError: a kernel gave up waiting for a peer.
            UnsupportedInputError: `topk_ids` named an expert that does not exist.
        """
        _check_sent(self.tokens, self.group)


@dataclass(slots=True, eq=False)
class ExpertBuffers:
    """Memory that peers address, for the results of `ep_dispatch`; made by `ep_buffers`.

    Attributes:
        tokens, hidden, topk, dtype: what a call may have: so many tokens a rank or fewer, the others exactly.
        group: that made them; None for the default group.
        turns: calls so far; call i uses slot i mod the number of slots.
    """

    tokens: int
    hidden: int
    topk: int
    dtype: torch.dtype
    group: dist.ProcessGroup | None
    turns: int = 0
    _slots: list[tuple[torch.Tensor, ...]] = field(default_factory=list)  # tokens, ids, weights, output

    def next_slot(self, x: torch.Tensor, ids: torch.Tensor, group: Group) -> tuple[torch.Tensor, ...]:
        """Views of the next call's slot: tokens, expert_ids, weights and output.

        Raises:
            UnsupportedInputError: the buffers are for other calls.
        """
        fits = x.dim() == 2 and ids.dim() == 2 and len(x) <= self.tokens
        if not fits or (x.shape[1], ids.shape[1], x.dtype, group) != (self.hidden, self.topk, self.dtype, self.group):
            raise UnsupportedInputError(
                f"buffers hold up to {self.tokens} tokens of {self.hidden} elements with {self.topk} experts each, "
                f"{self.dtype}, of the group that made them; x is {tuple(x.shape)} {x.dtype}, topk_ids "
                f"{tuple(ids.shape)}"
            )
        slot = self._slots[self.turns % len(self._slots)]
        rows = len(slot[0]) // max(self.tokens, 1) * len(x)
        return tuple(each[:rows] for each in slot)

    def count(self) -> int:
        """Count a call and return its number."""
        self.turns += 1
        return self.turns - 1

    def check(self, turn: int) -> None:
        """Refuse a result that a later call has overwritten.

        Raises:
            UnsupportedInputError: it was.
        """
        if self.turns - turn >= len(self._slots):
            raise UnsupportedInputError(
                f"the buffers' slot of this ep_dispatch has been used again since; combine within {len(self._slots)} "
                "calls, or make buffers of a larger depth"
            )


def ep_buffers(
    tokens: int,
    hidden: int,
    topk: int,
    dtype: torch.dtype = torch.bfloat16,
    *,
    depth: int = 2,
    device: torch.device | str | None = None,
    group: dist.ProcessGroup | None = None,
) -> ExpertBuffers:
    """Memory into which peers write tokens, and from which they read results; collective, never in a graph capture.

    Args:
        tokens: most tokens of a rank in one call.
        hidden, topk, dtype: as in the calls.
        depth: slots. Call i of the program uses slot i mod `depth`, so a result holds for `depth` − 1 further calls.
        device: by default as for `symmetric_empty`.
        group: by default the default group.

    Raises:
        UnsupportedInputError: a negative extent, or no slot.
        WorkspaceError: as in `symmetric_empty`.
    """
    if depth < 1:
        raise UnsupportedInputError(f"depth={depth}: pass 1 or more slots")
    check_limit("tokens", tokens, "tokens")
    if group is None and world._default_pg is None:
        raise NotInitializedError("ep_buffers needs a process group; call torch.distributed.init_process_group() first")
    rows = (world._default_pg if group is None else group).size() * tokens
    shapes = (
        ((rows, hidden), dtype), ((rows, topk), torch.int32), ((rows, topk), torch.float32), ((rows, hidden), dtype)
    )  # fmt: skip
    made = ExpertBuffers(tokens, hidden, topk, dtype, group)
    for _ in range(depth):
        made._slots.append(tuple(symmetric_empty(s, dtype=kind, device=device, group=group) for s, kind in shapes))
    return made


def _check_sent(tokens: torch.Tensor, group: Group) -> None:
    """Wait for the device and raise what was found in calls of either op."""
    if tokens.is_cuda:
        torch.cuda.current_stream(tokens.device).synchronize()
    communicator = _dispatch.communicator(tokens, world._default_pg if group is None else group)
    with communicator.whole("ep_combine"):
        communicator.check_peers()
        Overflow.of(communicator.group, communicator.device).check(communicator)


def _check_tokens(op: str, x: torch.Tensor, ids: torch.Tensor) -> None:
    """Refuse tokens and ids that do not belong together."""
    check_dtype(op, x, FLOATS)
    if x.dim() != 2 or ids.dim() != 2 or ids.shape[0] != x.shape[0]:
        raise UnsupportedInputError(
            f"{op} takes x of shape [tokens, hidden] and topk_ids of shape [tokens, top-k], not {tuple(x.shape)} and "
            f"{tuple(ids.shape)}"
        )
    _check_ids(op, ids)


def _check_weights(op: str, weights: torch.Tensor, ids: torch.Tensor) -> None:
    if not weights.is_floating_point() or weights.shape != ids.shape:
        raise UnsupportedInputError(
            f"topk_weights of {op} have shape {tuple(weights.shape)} and {weights.dtype}; they must be "
            f"floating-point numbers in the shape of topk_ids, {tuple(ids.shape)}"
        )


class _Dispatch(OpAdapter):
    """The adapter of ep_dispatch without what depends on the layout; `named` reads the options."""

    op = "ep_dispatch"
    inputs = ("x", "topk_ids", "topk_weights", "num_tokens")
    optional = ("topk_weights", "num_tokens")
    reduces = False
    named: Any

    @abstractmethod
    def problem(self, inputs: Tensors, options: Any, world_size: int, make: Any = problem_of) -> Problem:
        """As of all adapters; `make` takes the fields."""

    @abstractmethod
    def rows_and_alignment(self, problem: Problem, options: Any) -> tuple[int, int]:
        """Rows of an expert, or of all of them, and the alignment of experts."""

    def results(self, inputs: Tensors, options: Any, world_size: int) -> Results:
        problem = self.problem(inputs, options, world_size, Problem)  # sizes may be symbols, which are not looked up
        given = {"weighted": inputs[2] is not None, "numbered": inputs[3] is not None}
        return token_shapes(problem, self.rows_and_alignment(problem, options)[0], **given)

    def operands(self, inputs: Tensors, options: Any) -> Tensors:
        x, ids, weights, number = inputs
        return x, ids, None if weights is None else weights.to(torch.float32), number

    def fill_alone(self, communicator: Communicator, inputs: Tensors, targets: Tensors, options: Any) -> None:
        problem = self.problem(inputs, options, 1)
        capacity, alignment = self.rows_and_alignment(problem, options)
        results, code = dispatched([self.operands(inputs, options)], 0, problem, capacity, alignment)
        for target, result in zip(targets, results, strict=True):
            target.copy_(result)
        Overflow.of(communicator.group, communicator.device).note(code, capacity, communicator)

    def extend(self, plan: Plan, communicator: Communicator, inputs: Tensors, signature: CallSignature) -> Plan:
        """Where gradients are recorded, rows that hold no token are zeros."""
        if not self.named(*signature.options).zeros:
            return plan

        def launch(given: Tensors, outputs: Tensors, stream: int) -> None:
            outputs[0].zero_()
            plan.launch(given, outputs, stream)

        return replace(plan, launch=launch)


class _SortedOptions(NamedTuple):
    """Options of ep_dispatch in the layouts `padded` and `contiguous`; `zeros`: gradients are recorded."""

    num_experts: int
    capacity: int | None
    layout: str
    quantize: str
    alignment: int
    zeros: bool


class _DispatchSorted(_Dispatch):
    outputs = ("tokens", "scales", "counts", "offsets", "rows", "weights", "token_limits")
    options = ("int num_experts", "int? capacity", "str layout", "str quantize", "int alignment", "bool zeros")
    named = _SortedOptions
    gradient = autograd.keep_sent, autograd.ep_dispatch

    def check(self, inputs: Tensors, options: Any, world_size: int) -> None:
        x, ids, weights, number = inputs
        num_experts, capacity, layout, quantize, alignment, _ = options
        _check_tokens(self.op, x, ids)
        _check_number(number)
        if weights is not None:
            _check_weights(self.op, weights, ids)
        for name, limit, unit in (
            ("num_experts", num_experts, "experts"), ("capacity", capacity, "rows"), ("alignment", alignment, "rows")
        ):  # fmt: skip
            check_limit(name, limit, unit)
        if not alignment:
            raise UnsupportedInputError("alignment=0: pass 1 or more rows")
        if layout not in SORTED:
            raise UnsupportedInputError(f"layout={layout!r} is not a layout; allowed: {', '.join((*SORTED, BY_TOKEN))}")
        if quantize not in _QUANTISED:
            raise UnsupportedInputError(f"quantize={quantize!r} is not a scheme; allowed: None, 'token', 'group128'")
        if quantize and x.dtype == torch.float64:
            raise UnsupportedInputError(f"{self.op} quantises bfloat16, float16 and float32, not float64")
        check(self.problem(inputs, options, world_size, Problem))

    def problem(self, inputs: Tensors, options: Any, world_size: int, make: Maker = problem_of) -> Problem:
        (x, ids, *_), given = inputs, _SortedOptions(*options)
        shape = (*x.shape, ids.shape[1], given.num_experts)
        return make(
            self.op, shape, FLOATS[x.dtype], world_size, reduction="", layout=given.layout, scaling=given.quantize,
            mode="eager",
        )  # fmt: skip

    def rows_and_alignment(self, problem: Problem, options: Any) -> tuple[int, int]:
        given = _SortedOptions(*options)
        capacity = given.capacity
        return default_capacity(problem, given.alignment) if capacity is None else int(capacity), given.alignment

    def call_of(self, problem: Problem, inputs: Tensors, outputs: Tensors) -> tuple[Tensors, tuple[Any, ...]]:
        capacity = capacity_of(problem, outputs[0])
        return (*inputs, None, None, *outputs, None), _SortedOptions(
            problem.shape[3], capacity, problem.layout, problem.scaling, ALIGNMENT, zeros=False
        )

    def asks_for(self, problem: Problem) -> bool:
        return problem.layout != BY_TOKEN

    def refusal(self, inputs: Tensors, options: Any) -> str:
        quantize = _SortedOptions(*options).quantize
        return f"{self.op} with quantize={quantize!r}" if quantize else ""

    def needs_no_peers(self, inputs: Tensors, results: Tensors, options: Any) -> bool:
        """No rank has a token."""
        if inputs[0].numel() and inputs[1].numel():
            return False
        tokens, _, counts, offsets, rows, weights, limits = results
        problem = self.problem(inputs, options, len(rows))
        tokens.zero_()
        counts.zero_()
        weights.zero_()
        limits.zero_()
        rows.fill_(-1)
        offsets.copy_(offsets_of(counts, problem, *self.rows_and_alignment(problem, options)))
        return True

    def scalars(self, inputs: Tensors, options: Any) -> Tensors:
        return (_SortedOptions(*options).alignment,)

    def extend(self, plan: Plan, communicator: Communicator, inputs: Tensors, signature: CallSignature) -> Plan:
        """Where weights travel along, but the variant does not move them, an all_gather of them follows."""
        plan = super().extend(plan, communicator, inputs, signature)
        if inputs[2] is None or plan.candidate.variant in WITH_WEIGHTS:
            return plan
        one = (inputs[2].new_empty((1, *inputs[2].shape), dtype=torch.float32),)
        gather = paths["all_gather"].planned(one, (0,), communicator.group, "default", max_sms=signature.max_sms)
        if signature.capturing:
            communicator.captured(gather)

        def launch(given: Tensors, outputs: Tensors, stream: int) -> None:
            x, ids, weights, *rest = given
            *others, gathered, limits = outputs
            plan.launch((x, ids, *rest), (*others, gathered[:0], limits), stream)
            weights = in_use(weights, rest[0], 0) if limits.numel() else weights
            gather.launch((weights.unsqueeze(0) + 0.0,), (gathered,), stream)  # −0.0 arrives as 0.0

        return replace(plan, launch=launch)


class _CombineSorted(OpAdapter):
    op = "ep_combine"
    inputs: tuple[str, ...] = ("expert_out", "topk_weights", "topk_ids", "rows", "token_limits")
    optional: tuple[str, ...] = ("token_limits",)
    layout = ""
    options: tuple[str, ...] = ("int num_experts",)
    gradient = autograd.keep_results, autograd.ep_combine

    def check(self, inputs: Tensors, options: Any, world_size: int) -> None:
        results, weights, ids, rows, limits = inputs
        check_dtype(self.op, results, FLOATS)
        _check_ids(self.op, ids)
        if results.dim() < 2:
            raise UnsupportedInputError(
                f"{self.op} takes the experts' results as rows, in the shape of sent.tokens, not {tuple(results.shape)}"
            )
        _check_weights(self.op, weights, ids)
        if rows.dtype != torch.int32 or tuple(rows.shape) != (world_size, *ids.shape):
            raise UnsupportedInputError(
                f"rows of {self.op} have shape {tuple(rows.shape)} and {rows.dtype}; pass rows of an ep_dispatch of "
                "the same tokens on this group"
            )
        _check_limits(self.op, limits)
        check(self.problem(inputs, options, world_size, Problem))

    def problem(self, inputs: Tensors, options: Any, world_size: int, make: Maker = problem_of) -> Problem:
        results, ids = inputs[0], inputs[2]
        shape = (ids.shape[0], results.shape[-1], ids.shape[1], options[0])
        return make(
            self.op, shape, FLOATS[results.dtype], world_size, reduction="", layout=self.layout, mode="eager",
            scaling=options[1] if len(options) > 1 else "",
        )  # fmt: skip

    def under_policy(self, problem: Problem, policy: NumericsPolicy) -> Problem:
        return replace(problem, scaling="") if policy == "ordered" else problem

    def results(self, inputs: Tensors, options: Any, world_size: int) -> Results:
        return [((inputs[2].shape[0], inputs[0].shape[-1]), inputs[0].dtype)]

    def needs_no_peers(self, inputs: Tensors, results: Tensors, options: Any) -> bool:
        """No rank has a token, or tokens have no elements; a rank without results takes part."""
        if inputs[2].numel() and inputs[0].shape[-1]:
            return False
        results[0].zero_()
        return True

    def call_of(self, problem: Problem, inputs: Tensors, outputs: Tensors) -> tuple[Tensors, tuple[Any, ...]]:
        return (*inputs, None, *outputs), (problem.shape[3], problem.scaling)[: len(self.options)]

    def asks_for(self, problem: Problem) -> bool:
        return problem.layout == self.layout

    def key(self, tensors: Tensors) -> Any:
        return tuple(tensors[0].shape), tuple(tensors[2].shape)

    def operands(self, inputs: Tensors, options: Any) -> Tensors:
        results, weights, ids, rows, limits = inputs
        wide = torch.promote_types(results.dtype, torch.float32)
        return results.reshape(-1, results.shape[-1]), weights.to(wide), ids, rows, limits

    def single_rank_result(self, inputs: Tensors, options: Any) -> Tensors:
        results, weights, ids, rows, _ = inputs
        results = some_rows(results.reshape(-1, results.shape[-1]))
        parts = [results[rows[0, :, k].long().clamp(min=0)] for k in range(ids.shape[1])]
        return (weighted_sum(parts, weights, rows[0] >= 0),)


class _CombineByRank(_CombineSorted):
    suffix = "_rank"
    inputs = ("expert_out", "weights", "topk_ids", "rows", "token_limits")
    layout = BY_RANK
    options = ("int num_experts", "str wire")
    gradient = autograd.keep_results, autograd.ep_combine_rank

    def check(self, inputs: Tensors, options: Any, world_size: int) -> None:
        results, weights, ids, rows, limits = inputs
        if not weights.is_floating_point() or weights.shape != rows.shape:
            raise UnsupportedInputError(
                f"weights of all ranks have shape {tuple(weights.shape)} and {weights.dtype}; they must be "
                f"floating-point numbers in the shape of rows, {tuple(rows.shape)}"
            )
        super().check((results, weights[0], ids, rows, limits), options, world_size)

    def single_rank_result(self, inputs: Tensors, options: Any) -> Tensors:
        results, weights, ids, rows, limits = inputs
        ids = ids if limits is None else in_use(ids, limits[:1], NOT_HERE)
        sums = sums_of_experts(results.reshape(-1, results.shape[-1]), weights, rows)
        return (sum_by_token([sums], ids, self.problem(inputs, options, 1)),)


class _ByTokenOptions(NamedTuple):
    """Options of ep_dispatch in the layout `tokens`; `zeros`: gradients are recorded."""

    num_experts: int
    zeros: bool
    in_buffers: bool


class _DispatchByToken(_Dispatch):
    suffix = "_tokens"
    outputs = ("tokens", "expert_ids", "weights", "token_limits")
    options = ("int num_experts", "bool zeros", "bool in_buffers")
    named = _ByTokenOptions
    gradient = autograd.keep_ids, autograd.ep_dispatch_tokens

    def check(self, inputs: Tensors, options: Any, world_size: int) -> None:
        x, ids, weights, number = inputs
        _check_tokens(self.op, x, ids)
        _check_number(number)
        check_limit("num_experts", _ByTokenOptions(*options).num_experts, "experts")
        if weights is not None:
            _check_weights(self.op, weights, ids)
        check(self.problem(inputs, options, world_size, Problem))

    def problem(self, inputs: Tensors, options: Any, world_size: int, make: Maker = problem_of) -> Problem:
        (x, ids, *_), given = inputs, _ByTokenOptions(*options)
        shape = (*x.shape, ids.shape[1], given.num_experts)
        return make(
            self.op, shape, FLOATS[x.dtype], world_size, reduction="", layout=BY_TOKEN, mode="eager",
            input_kind="symmetric" if given.in_buffers else "plain",
        )  # fmt: skip

    def rows_and_alignment(self, problem: Problem, options: Any) -> tuple[int, int]:
        """No capacity, and an alignment that nothing depends on."""
        return 0, ALIGNMENT

    def asks_for(self, problem: Problem) -> bool:
        return problem.layout == BY_TOKEN

    def call_of(self, problem: Problem, inputs: Tensors, outputs: Tensors) -> tuple[Tensors, tuple[Any, ...]]:
        in_buffers = problem.input_kind == "symmetric"
        return (*inputs, None, *outputs, None), _ByTokenOptions(problem.shape[3], zeros=False, in_buffers=in_buffers)

    def key(self, tensors: Tensors) -> Any:
        return tuple(tensors[0].shape), tuple(tensors[1].shape)

    def needs_no_peers(self, inputs: Tensors, results: Tensors, options: Any) -> bool:
        """Nothing is asked of any expert: no result has elements but those of tokens that are nowhere."""
        if inputs[1].numel():
            return False
        results[0].zero_()
        results[3].zero_()
        return True


class _CombineByToken(_CombineSorted):
    suffix = "_tokens"
    inputs = ("rows_out", "expert_ids", "topk_ids", "token_limits")
    layout = BY_TOKEN
    options = ("int num_experts", "str wire")
    depends_on_memory = True
    gradient = autograd.keep_topk_ids, autograd.ep_combine_tokens

    def check(self, inputs: Tensors, options: Any, world_size: int) -> None:
        rows, held, ids, limits = inputs
        check_dtype(self.op, rows, FLOATS)
        _check_ids(self.op, ids)
        if rows.dim() != 2 or ids.dim() != 2 or len(rows) != world_size * len(ids):
            raise UnsupportedInputError(
                f"{self.op} takes a row for each row of sent.tokens, [{world_size * len(ids)}, hidden], not "
                f"{tuple(rows.shape)}"
            )
        if held.dtype != torch.int32 or tuple(held.shape) != (len(rows), ids.shape[1]):
            raise UnsupportedInputError(
                f"expert_ids of {self.op} have shape {tuple(held.shape)} and {held.dtype}; pass those of an "
                "ep_dispatch of the same tokens on this group"
            )
        _check_limits(self.op, limits)
        check(self.problem(inputs, options, world_size, Problem))

    def operands(self, inputs: Tensors, options: Any) -> Tensors:
        return inputs

    def single_rank_result(self, inputs: Tensors, options: Any) -> Tensors:
        rows, _, ids, limits = inputs
        ids = ids if limits is None else in_use(ids, limits[:1], NOT_HERE)
        return (sum_by_token([rows], ids, self.problem(inputs, options, 1)),)


class _GuardedPath(CallPath[torch.Tensor]):
    """Calls whose results may have fewer rows than are in use: the operator's calls, and trimmed results."""

    def __init__(self, adapter: OpAdapter) -> None:
        self.whole: CallPath[torch.Tensor] = CallPath(adapter)  # of results that have them all
        super().__init__(adapter)

    def serve(self, given: CallArguments) -> torch.Tensor:
        results, weights, ids, rows, *rest = given.tensors
        num_rows = math.prod(results.shape[:-1])
        with current(results.device):
            if rows.is_cuda:  # nobody waits for the GPU
                late = rows >= num_rows
                if not is_capturing():
                    communicator = self.communicator(results, given.group)
                    Overflow.of(communicator.group, communicator.device).note(late.sum(), num_rows, communicator)
                rows = rows.masked_fill(late, NO_ROOM)
            elif rows.numel() and (needed := int(rows.max()) + 1) > num_rows:
                self.refuse(given.tensors, given.options, given.group, given.numerics, needed)
            return self.whole.serve(given._replace(tensors=(results, weights, ids, rows, *rest)))

    def run_problem(self, problem: Problem, inputs: Tensors, outputs: Tensors) -> None:
        self.whole.run_problem(problem, inputs, outputs)

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
        results, weights, ids, rows, limits, _ = tensors
        nothing = results.detach().new_full((1, results.shape[-1]), math.nan)
        own = (tensor.detach().clone(memory_format=torch.contiguous_format) for tensor in (weights, ids))
        inputs = (nothing, *own, rows.clamp(max=0), limits)
        self.checked_results(inputs, options, communicator.world_size, numerics, None)
        signature = CallSignature(options, (), (), numerics, None, is_capturing(), communicator.policy(numerics))
        problem = self._problem(communicator, inputs, signature, in_place=False, symmetric=False)
        plan = self._plan(communicator, problem, signature)[0]
        if plan.candidate.variant == "library":
            launch = communicator.bind(plan.problem, plan.candidate)  # which does not look for NaN
            target = nothing.new_empty(len(ids), nothing.shape[-1])
            with no_intercept():
                operands = tuple(each for each in self.adapter.operands(inputs, options) if each is not None)
                launch(operands, (target,), raw_stream(communicator.device_index))


def _check_number(number: torch.Tensor | None) -> None:
    if number is not None and (number.dtype != torch.int32 or number.numel() != 1):
        raise UnsupportedInputError(f"num_tokens has shape {tuple(number.shape)} and {number.dtype}; pass one int32")


def _check_limits(op: str, limits: torch.Tensor | None) -> None:
    if limits is not None and (limits.dtype != torch.int32 or limits.shape != (2,)):
        raise UnsupportedInputError(
            f"token_limits of {op} have shape {tuple(limits.shape)} and {limits.dtype}; pass `token_limits` of its "
            "result of ep_dispatch"
        )


def _check_ids(op: str, ids: torch.Tensor) -> None:
    if ids.dtype not in _IDS:
        raise UnsupportedInputError(f"topk_ids of {op} are {ids.dtype}; pass int32 or int64")


_dispatch: CallPath[Any] = CallPath(_DispatchSorted())
_combine = _GuardedPath(_CombineSorted())
_combine_rank = _GuardedPath(_CombineByRank())
_dispatch_tokens: CallPath[Any] = CallPath(_DispatchByToken())
_combine_tokens: CallPath[torch.Tensor] = CallPath(_CombineByToken())


@overload
def ep_dispatch(
    x: torch.Tensor,
    topk_ids: torch.Tensor,
    *,
    num_experts: int,
    capacity: int | None = None,
    layout: Layout = "padded",
    quantize: Quantisation | None = None,
    alignment: int = ALIGNMENT,
    topk_weights: torch.Tensor | None = None,
    scales: torch.Tensor | None = None,
    expert_map: torch.Tensor | None = None,
    num_tokens: torch.Tensor | None = None,
    compact: Literal[False] = False,
    buffers: None = None,
    group: dist.ProcessGroup | None = None,
    max_sms: int | None = None,
) -> DispatchResult: ...


@overload
def ep_dispatch(
    x: torch.Tensor,
    topk_ids: torch.Tensor,
    *,
    num_experts: int,
    layout: TokenLayout,
    topk_weights: torch.Tensor | None = None,
    scales: torch.Tensor | None = None,
    expert_map: torch.Tensor | None = None,
    num_tokens: torch.Tensor | None = None,
    compact: bool = False,
    buffers: ExpertBuffers | None = None,
    group: dist.ProcessGroup | None = None,
    max_sms: int | None = None,
) -> TokenDispatchResult: ...


def ep_dispatch(
    x: torch.Tensor,
    topk_ids: torch.Tensor,
    *,
    num_experts: int,
    capacity: int | None = None,
    layout: Layout | TokenLayout = "padded",
    quantize: Quantisation | None = None,
    alignment: int = ALIGNMENT,
    topk_weights: torch.Tensor | None = None,
    scales: torch.Tensor | None = None,
    expert_map: torch.Tensor | None = None,
    num_tokens: torch.Tensor | None = None,
    compact: bool = False,
    buffers: ExpertBuffers | None = None,
    group: dist.ProcessGroup | None = None,
    max_sms: int | None = None,
) -> DispatchResult | TokenDispatchResult:
    """Send every token to the ranks of its experts; each rank gets its experts' tokens, by expert or by token.

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
            another, each at a multiple of `alignment` rows, for grouped GEMMs. `tokens`: [n · T, H], each token once,
            in the order of (source rank, token), for kernels that find an expert's rows by `expert_ids`; nothing is
            counted, and no capacity can be exceeded.
        quantize: None; `token` or `group128`: tokens travel and arrive in e4m3, with one scale in fp32 for each token
            or for 128 elements of it: the largest magnitude over 448. Not differentiable.
        alignment: rows, for `contiguous`.
        topk_weights: [T, K], floating-point; on all ranks or on none. They travel along in fp32, −0.0 as 0.0; for
            layouts other than `tokens`, where `ep_combine(reduce="rank")` needs them, those in fp64 as they are.
        scales: of `x` in fp8 e4m3: fp32, one a token, [T], or one for 128 elements, [T, H / 128]; they travel along.
        expert_map: [num_logical, R] int32, on all ranks alike: the experts that hold each logical expert's weights,
            then −1. `topk_ids` then name logical experts, and token t of rank r goes to replica (t + r) mod their
            number; `num_experts` counts the experts that are there.
        num_tokens: int32, one number, on the tokens' device, on all ranks or on none: tokens from there on count as if
            their ids were −1. It may differ from rank to rank, and a graph's replay reads it anew; `x` has the same
            shape on every rank. The exchange leaves these tokens out, and so does `ep_combine`: it need not write their
            rows of `out`. Those of a new tensor are unspecified, but zeros unless gradients are switched off or
            `buffers` passed.
        compact: for `tokens`: also list the rows that hold tokens.
        buffers: for `tokens`, on all ranks or on none: what `ep_buffers` made. The results are views of its next slot,
            into which peers write, and are not differentiable. Work that reads or writes the slot must be in the
            current stream's past, on every rank.
        group: as in `all_reduce`.
        max_sms: as in `all_reduce`, for overlap with the experts' GEMMs.

    Returns:
        `TokenDispatchResult` for `tokens`, else `DispatchResult`. Within an expert tokens stand in the order of (source
        rank, token, k), whatever variant runs. Rows that hold no token are unspecified, but zeros unless gradients are
        switched off (`torch.no_grad()`): the gradients of the experts' weights are sums over all rows.

    Raises:
        NotInitializedError, GroupError, UnsupportedInputError, InfeasibleError, PeerTimeoutError: as in `all_reduce`.
        CapacityError: an expert was sent more tokens than it has room for; on every rank. Calls of CPU tensors raise
            it at once. GPUs write nothing out of bounds, and `DispatchResult.check()` or the next call of either op
            raises it.

    Its gradient is an `ep_combine` without weights; weights that travel along get the sum of the ranks' gradients. Can
    be captured in CUDA graphs; never synchronises the host.
    """
    path = _dispatch_tokens if layout == BY_TOKEN else _dispatch
    try:
        records = buffers is None and torch.is_grad_enabled()
        masked_from = num_tokens if records else None  # the gradient goes by the ids
        if num_tokens is not None and records and topk_weights is not None:
            topk_weights = in_use(topk_weights, num_tokens, 0)
        if expert_map is not None or masked_from is not None:
            topk_ids = _chosen_ids(topk_ids, expert_map, masked_from, group)
        if scales is not None:
            if quantize is not None or buffers is not None:
                raise UnsupportedInputError("scales are for tokens in fp8; pass no quantize and buffers beside them")
            call: Any = ep_dispatch
            sent = call(
                _packed(x, scales), topk_ids, num_experts=num_experts, capacity=capacity, layout=layout,
                alignment=alignment, topk_weights=topk_weights, compact=compact, group=group, max_sms=max_sms,
                num_tokens=num_tokens,
            )  # fmt: skip
            tokens, scales = _unpacked(sent.tokens, x.shape[1], scales)
            whole: DispatchResult | TokenDispatchResult = replace(sent, tokens=tokens, scales=scales)
            return whole
        inputs = (x, topk_ids, topk_weights, num_tokens)
        if layout == BY_TOKEN:
            if capacity is not None or quantize is not None or alignment != ALIGNMENT:
                raise UnsupportedInputError("layout='tokens' takes no capacity, quantize and alignment; leave them out")
            return _sent_by_token(inputs, num_experts, buffers, group, max_sms, records=records, compact=compact)
        if compact or buffers is not None:
            raise UnsupportedInputError(f"compact and buffers are for layout='tokens', not {layout!r}")
        options = _SortedOptions(num_experts, capacity, layout, quantize or "", alignment, zeros=records)
        return _sent_sorted(inputs, options, group, max_sms)
    except BaseException as error:
        path.on_error(error, x, group)
        raise


def _sent_by_token(
    inputs: Tensors,
    num_experts: int,
    buffers: ExpertBuffers | None,
    group: Group,
    max_sms: int | None,
    *,
    records: bool,
    compact: bool,
) -> TokenDispatchResult:
    """`ep_dispatch` in the layout `tokens`."""
    x, topk_ids, topk_weights, num_tokens = inputs
    outputs: list[Any] = [None, None, None]  # and limits of tokens
    output = None
    if buffers is not None:
        *outputs, output = buffers.next_slot(x, topk_ids, group)
        if topk_weights is None:
            outputs[2] = x.new_empty(0, dtype=torch.float32)
    choices = (num_experts, records, buffers is not None)
    found = _dispatch_tokens.call((*inputs, *outputs, None), choices, group, "default", max_sms)
    turn = 0 if buffers is None else buffers.count()
    row_ids, num_rows = _rows_in_use(found[1]) if compact else (None, None)
    weights = None if topk_weights is None else found[2]
    return TokenDispatchResult(
        found[0], found[1], weights, topk_ids, num_experts, row_ids, num_rows, group, output, buffers, turn,
        token_limits=None if num_tokens is None else found[3],
    )  # fmt: skip


def _sent_sorted(inputs: Tensors, options: _SortedOptions, group: Group, max_sms: int | None) -> DispatchResult:
    """`ep_dispatch` in the layouts `padded` and `contiguous`."""
    x, topk_ids, topk_weights, num_tokens = inputs
    wide = topk_weights is not None and topk_weights.dtype == torch.float64
    if wide:
        _check_weights("ep_dispatch", topk_weights, topk_ids)
    tensors = (x, topk_ids, None if wide else topk_weights, num_tokens, *(None,) * len(_DispatchSorted.outputs))
    found = _dispatch.call(tensors, options, group, "default", max_sms)
    tokens, scales, counts, offsets, rows, weights, limits = found
    if wide:
        in_range = topk_weights if num_tokens is None else in_use(topk_weights, num_tokens, 0)
        weights = _of_all_ranks(in_range, group, max_sms)
    return DispatchResult(
        tokens, scales if options.quantize else None, counts, offsets, rows, topk_ids, options.num_experts, group,
        None if topk_weights is None else weights, None if num_tokens is None else limits,
    )  # fmt: skip


def _chosen_ids(
    ids: torch.Tensor, expert_map: torch.Tensor | None, num_tokens: torch.Tensor | None, group: Group
) -> torch.Tensor:
    """The ids of replicas, −1 from `num_tokens` on; an id that `expert_map` does not know names no expert."""
    _check_ids("ep_dispatch", ids)
    if ids.dim() != 2:
        raise UnsupportedInputError(f"ep_dispatch takes topk_ids of shape [tokens, top-k], not {tuple(ids.shape)}")
    if expert_map is not None:
        tokens = torch.arange(len(ids), dtype=torch.int32, device=ids.device).unsqueeze(1)
        if expert_map.dtype != torch.int32 or expert_map.dim() != 2 or not expert_map.numel():
            raise UnsupportedInputError(
                f"expert_map has shape {tuple(expert_map.shape)} and {expert_map.dtype}; pass int32 of shape "
                "[num_logical, replicas], filled up with −1"
            )
        rank = (world._default_pg if group is None else group).rank()
        known = (ids >= 0) & (ids < len(expert_map))
        named = torch.where(known, ids, 0).long()
        count = (expert_map >= 0).sum(1)[named]
        replica = expert_map[named, (tokens + rank) % count.clamp(min=1)]
        ids = torch.where(known & (count > 0), replica, torch.where(ids == -1, -1, _NO_EXPERT)).to(ids.dtype)
    _check_number(num_tokens)
    return ids if num_tokens is None else in_use(ids, num_tokens, NOT_HERE)


def _packed(x: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Rows of x with their scales behind them, at a multiple of 16 bytes, as fp32."""
    fits = x.dim() == 2 and scales.dim() in (1, 2) and len(scales) == len(x) and scales.dtype == torch.float32
    if not fits or x.dtype != torch.float8_e4m3fn or (scales.dim() == 2 and scales.shape[1] * GROUP != x.shape[1]):
        raise UnsupportedInputError(
            f"scales belong to tokens in float8_e4m3fn: fp32 of shape [tokens] or [tokens, hidden / {GROUP}], not "
            f"{tuple(scales.shape)} {scales.dtype} for {tuple(x.shape)} {x.dtype}"
        )
    count = 1 if scales.dim() == 1 else scales.shape[1]
    begin = -(-x.shape[1] // 16) * 16
    rows = x.new_zeros(len(x), begin + -(-count // 4) * 16, dtype=torch.uint8)
    rows[:, : x.shape[1]] = x.view(torch.uint8)
    rows[:, begin : begin + 4 * count] = scales.contiguous().view(torch.uint8).view(len(x), 4 * count)
    return rows.view(torch.float32)


def _unpacked(rows: torch.Tensor, hidden: int, scales: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Views of the tokens and the scales, like `scales`, of rows that `_packed` made."""
    count, begin = 1 if scales.dim() == 1 else scales.shape[1], -(-hidden // 16) * 16
    tokens = rows.view(torch.uint8)[..., :hidden].view(torch.float8_e4m3fn)
    found = rows[..., begin // 4 : begin // 4 + count]
    return tokens, found.squeeze(-1) if scales.dim() == 1 else found


def _of_all_ranks(weights: torch.Tensor, group: Group, max_sms: int | None) -> torch.Tensor:
    """The weights [n, T, K] of all ranks, in fp32 or wider; collective."""
    wide = weights.to(torch.promote_types(weights.dtype, torch.float32))
    return all_gather(wide.unsqueeze(0), group=group, max_sms=max_sms)


def _rows_in_use(expert_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The rows that hold tokens, then −1, and their number; never waits for the device."""
    used = (expert_ids >= 0).any(1)
    count = len(used)
    place = torch.where(used, used.cumsum(0) - 1, count)
    rows = torch.arange(count, dtype=torch.int32, device=used.device)
    listed = torch.full((count + 1,), -1, dtype=torch.int32, device=used.device).scatter_(0, place, rows)
    return listed[:count], used.sum(dtype=torch.int32)


def _combine_refusal(sent: Any, topk_weights: Any, reduce: str, wire: str | None) -> str:
    """The reason why arguments of `ep_combine` do not go together, or ""."""
    by_token = isinstance(sent, TokenDispatchResult)
    if reduce not in ("token", "rank") or (by_token and reduce == "rank"):
        return f"reduce={reduce!r} is not possible here; allowed: 'token', and 'rank' for padded and contiguous layouts"
    if wire is not None and not by_token and reduce != "rank":
        return "wire of ep_combine is for the layout 'tokens' and for reduce='rank'"
    if not isinstance(sent, (TokenDispatchResult, DispatchResult)):
        return f"sent is a {type(sent).__name__}; pass what ep_dispatch returned"
    travelled = by_token or (reduce == "rank" and sent.weights is not None)
    if travelled != (topk_weights is not None):
        return ""
    if by_token:
        return "in the layout 'tokens' ep_combine takes no topk_weights: rows of expert_out are sums by weight"
    if travelled:
        return "topk_weights were passed to ep_dispatch; leave them out of ep_combine"
    return "ep_combine needs topk_weights of shape [tokens, top-k]"


def ep_combine(
    expert_out: torch.Tensor,
    sent: DispatchResult | TokenDispatchResult,
    topk_weights: torch.Tensor | None = None,
    *,
    reduce: Reduction = "token",
    wire: Wire | None = None,
    out: torch.Tensor | None = None,
    numerics: NumericsPolicy | None = None,
    max_sms: int | None = None,
) -> torch.Tensor:
    """Bring the experts' results back to the ranks of their tokens, and sum them by weight.

    Args:
        expert_out: results in the shape and order of `sent.tokens`, of any hidden size; in the layout `contiguous`
            rows behind the last one in use may be left out, where none is in use all of them. Kernels take bf16, fp16
            and fp32; fp64 runs the variant `library` on GPUs. Left as it is; rows that hold no token are not read. In
            the layout `tokens` one row for each row of `sent.tokens`: the sum over the experts of this rank, already
            weighted.
        sent: what `ep_dispatch` returned.
        topk_weights: [T, K], floating-point; used in fp32. None in the layout `tokens`, and for `reduce="rank"` if they
            were passed to `ep_dispatch`.
        reduce: for the layouts `padded` and `contiguous`. `token`: every result travels, and the token's rank sums.
            `rank`: each rank sums the results of its experts for a token by weight and sends one row, and the token's
            rank adds the ranks' rows: fewer bytes, but two roundings. The ranks' weights are exchanged first, unless
            they were passed to `ep_dispatch`.
        wire: for the layout `tokens` and `reduce="rank"`: rows travel quantised, as in `all_reduce`, in groups of 128
            elements; the own row counts as quantised, too. The same on every rank. Gradients are not quantised.
        out: where to write, [T, H] of expert_out's dtype, any strides. None allocates it.
        numerics: as in `all_reduce`. Ordered: summed from +0.0 in fp32 in the order of K, in the layout `tokens` of the
            ranks, rounded once; with `reduce="rank"` in the order of K on each rank, rounded once, then of the ranks,
            rounded once more. Every variant is.
        max_sms: as in `all_reduce`.

    Returns:
        `out`, or a new tensor [T, H]: the sum over K of weight · result, in the layout `tokens` the sum over the ranks;
        ids of −1 add nothing.

    Raises:
        NotInitializedError, GroupError, UnsupportedInputError, InfeasibleError, PeerTimeoutError, CapacityError: as in
            `ep_dispatch`.
        GroupAbortedError: another rank's `expert_out` has another shape, or lacks rows in use, so its results are
            missing here. On CPUs this call raises it. GPUs count such rows as zeros, and the next call raises it, or
            `DispatchResult.check`.

    Differentiable in expert_out and topk_weights. Can be captured in CUDA graphs; never synchronises the host, but for
    the variant `library`.
    """
    by_token = isinstance(sent, TokenDispatchResult)
    path = _combine_rank if reduce == "rank" else _combine
    try:
        if wire is not None:
            check_wire("ep_combine", expert_out, wire)
        if why := _combine_refusal(sent, topk_weights, reduce, wire):
            raise UnsupportedInputError(why)
        ids, limits = sent.topk_ids, sent.token_limits
        in_buffers = isinstance(sent, TokenDispatchResult) and sent.buffers is not None
        zeros = limits is not None and torch.is_grad_enabled() and not in_buffers and out is None
        if limits is not None and zeros:
            ids = in_use(ids, limits[:1], NOT_HERE)  # also for the gradient, which is dispatched
        if isinstance(sent, TokenDispatchResult):
            if sent.buffers is not None:
                sent.buffers.check(sent.turn)
            tensors = (expert_out, sent.expert_ids, ids, limits, out)
            y = _combine_tokens.call(tensors, (sent.num_experts, wire or ""), sent.group, numerics, max_sms)
            return in_use(y, limits[:1], 0) if limits is not None and zeros else y
        weights = topk_weights if reduce == "token" else sent.weights
        if weights is None and topk_weights is not None:
            _check_weights("ep_combine", topk_weights, ids)
            weights = _of_all_ranks(topk_weights, sent.group, max_sms)
        given: Tensors = (expert_out, weights, ids, sent.rows, limits, out)
        options = (sent.num_experts,) if reduce == "token" else (sent.num_experts, wire or "")
        if isinstance(expert_out, torch.Tensor) and expert_out.shape[:-1] != (due := sent.tokens.shape[:-1]):
            if expert_out.dim() != 2 or len(due) > 1 or len(expert_out) > due[0]:
                path.refuse(given, options, sent.group, numerics, tuple(due))
            y = path.call(given, options, sent.group, numerics, max_sms)
        else:
            y = path.whole.call(given, options, sent.group, numerics, max_sms)
        return in_use(y, limits[:1], 0) if limits is not None and zeros else y
    except BaseException as error:
        (_combine_tokens if by_token else path).on_error(error, expert_out, getattr(sent, "group", None))
        raise
