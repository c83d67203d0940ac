"""all_gather_v and reduce_scatter_v: every rank has a number of rows of its own.

Problems know a bound of the counts alone. A call's own number of rows is one of its options, which differ from rank to
rank; so are counts in the tensors' memory, which nobody reads on the host.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.compiler import is_dynamo_compiling

from tunedcomm.errors import UnsupportedInputError
from tunedcomm.kernels.by_counts.op import DEVICE, GATHER, PACKED, PADDED, SCATTER, as_argument
from tunedcomm.ops import autograd
from tunedcomm.ops.adapter import Group, Maker, OpAdapter, Results, Tensors, problem_of
from tunedcomm.ops.arguments import FLOATS, INTEGERS, MOVED, check_dtype
from tunedcomm.ops.call import CallPath
from tunedcomm.ops.fast_call import world
from tunedcomm.spec import NumericsPolicy, Problem

Counts = Sequence[int] | torch.Tensor


class _ByCounts(OpAdapter):
    """The options are counts that the host knows, this rank's number of rows, and the bound of all."""

    inputs = ("x", "counts")
    optional = ("counts",)
    options = ("int[]? sizes", "int rows", "int max_count")

    def layout(self, inputs: Tensors, options: Any) -> str:
        return DEVICE if inputs[1] is not None else PADDED if options[0] is None else PACKED

    def check_rows(self, x: torch.Tensor, num_rows: int, world_size: int, *, all_ranks: bool) -> None:
        if x.dim() == 0 or x.shape[0] != num_rows:
            refusal = UnsupportedInputError(
                f"x of {self.op} has shape {tuple(x.shape)}; these counts need {num_rows} rows along dimension 0"
            )
            refusal.ends_group = world_size > 1 and not all_ranks  # peers do not know this rank's rows
            raise refusal

    def check_counts(self, inputs: Tensors, options: Any, world_size: int) -> None:
        counts, (sizes, _, max_count) = inputs[1], options
        if not isinstance(max_count, int) or isinstance(max_count, bool) or max_count < 0:
            raise UnsupportedInputError(f"max_count={max_count!r} is not a number of rows; pass an integer from 0 on")
        if counts is not None and (counts.dtype != torch.int32 or tuple(counts.shape) != (world_size,)):
            raise UnsupportedInputError(
                f"counts of {self.op} have shape {tuple(counts.shape)} and {counts.dtype}; in a tensor on x's device "
                f"they must be [{world_size}] int32"
            )
        if sizes is not None and (len(sizes) != world_size or not all(0 <= size <= max_count for size in sizes)):
            raise UnsupportedInputError(
                f"counts={list(sizes)} of {self.op} are not a number of rows from 0 to max_count={max_count} for each "
                f"of the {world_size} ranks"
            )

    def problem(self, inputs: Tensors, options: Any, world_size: int, make: Maker = problem_of) -> Problem:
        x, max_count = inputs[0], options[2]
        names, reduction = (MOVED, "") if self.op == GATHER else ({**FLOATS, **INTEGERS}, "sum")
        shape = (max_count, math.prod(x.shape[1:]))
        layout = self.layout(inputs, options)
        return make(self.op, shape, names[x.dtype], world_size, reduction=reduction, layout=layout, mode="eager")

    def call_of(self, problem: Problem, inputs: Tensors, outputs: Tensors) -> tuple[Tensors, tuple[Any, ...]]:
        x, *given = inputs
        rows, counts = x.shape[0] if problem.op == GATHER else outputs[0].shape[0], None
        sizes = tuple(given[0].tolist()) if problem.layout == PACKED else None
        if problem.layout == DEVICE:
            counts, rows = given[0], problem.shape[0]
        return (x, counts, *outputs), (sizes, rows, problem.shape[0])

    def common_options(self, options: Any) -> Any:
        return options[0], options[2]

    def key(self, tensors: Tensors) -> Any:
        return tuple(tensors[0].shape), tensors[1] is None

    def needs_no_peers(self, inputs: Tensors, results: Tensors, options: Any) -> bool:
        """No rank has rows, or rows have no elements."""
        if options[2] and math.prod(inputs[0].shape[1:]):
            return False
        for result in results:
            result.zero_()
        return True

    def scalars(self, inputs: Tensors, options: Any) -> Tensors:
        return () if options[0] is None else (torch.tensor(options[0], dtype=torch.int64, device="cpu"),)

    def scalar_args(self, options: Any) -> Any:
        return (as_argument(options[0] if options[0] is not None else [options[1]] * len(as_argument(()))),)


class _AllGatherV(_ByCounts):
    op = GATHER
    outputs = ("out", "counts_out")
    reduces = False
    gradient = autograd.keep_counts, autograd.all_gather_v

    def check(self, inputs: Tensors, options: Any, world_size: int) -> None:
        x, (_, rows, max_count) = inputs[0], options
        check_dtype(self.op, x, MOVED)
        self.check_counts(inputs, options, world_size)
        layout = self.layout(inputs, options)
        self.check_rows(x, max_count if layout == DEVICE else rows, world_size, all_ranks=layout == DEVICE)
        if layout == PADDED and rows > max_count:
            refusal = UnsupportedInputError(f"x of {self.op} has {rows} rows, more than max_count={max_count}")
            refusal.ends_group = world_size > 1
            raise refusal
        if layout == PADDED and max_count and not math.prod(x.shape[1:]):
            raise UnsupportedInputError(f"rows of {self.op} have no elements; pass counts, or gather the counts alone")

    def results(self, inputs: Tensors, options: Any, world_size: int) -> Results:
        x, (sizes, _, max_count) = inputs[0], options
        rest, layout = tuple(x.shape[1:]), self.layout(inputs, options)
        rows = sum(sizes) if layout == PACKED else world_size * max_count
        shape = (world_size, max_count, *rest) if layout == PADDED else (rows, *rest)
        return [(shape, x.dtype), ((world_size,), torch.int32)]

    def refusal(self, inputs: Tensors, options: Any) -> str:
        return "" if inputs[0].dtype in FLOATS else f"{self.op} of {inputs[0].dtype}"

    def single_rank_result(self, inputs: Tensors, options: Any) -> Tensors:
        x, counts = inputs
        sizes, rows, max_count = options
        if counts is not None:
            return x, counts.clamp(0, max_count)
        padded = torch.cat([x, x.new_zeros(max_count - rows, *x.shape[1:])]) if sizes is None else x
        return padded.view(1, *padded.shape) if sizes is None else x, torch.full(
            (1,), rows, dtype=torch.int32, device=x.device
        )


class _ReduceScatterV(_ByCounts):
    op = SCATTER
    gradient = autograd.keep_counts, autograd.reduce_scatter_v

    def check(self, inputs: Tensors, options: Any, world_size: int) -> None:
        x, (sizes, _, max_count) = inputs[0], options
        check_dtype(self.op, x, {**FLOATS, **INTEGERS})
        self.check_counts(inputs, options, world_size)
        if self.layout(inputs, options) == PADDED:
            raise UnsupportedInputError(f"{self.op} needs counts")
        self.check_rows(x, world_size * max_count if sizes is None else sum(sizes), world_size, all_ranks=True)

    def results(self, inputs: Tensors, options: Any, world_size: int) -> Results:
        return [((options[1], *inputs[0].shape[1:]), inputs[0].dtype)]

    def single_rank_result(self, inputs: Tensors, options: Any) -> Tensors:
        x, counts = inputs
        if counts is None:
            return (x,)
        used = torch.arange(len(x), dtype=torch.int64, device=x.device) < counts
        return (torch.where(used.view(-1, *(1,) * (x.dim() - 1)), x, torch.zeros_like(x)),)


_all_gather_v: CallPath[tuple[torch.Tensor, torch.Tensor]] = CallPath(_AllGatherV())
_reduce_scatter_v: CallPath[torch.Tensor] = CallPath(_ReduceScatterV())


def _given(x: Any, counts: Any, group: Group) -> tuple[Any, tuple[int, ...] | None, int | None]:
    """Counts in a tensor on x's device, counts that the host knows, and this rank's of these."""
    if isinstance(counts, torch.Tensor) and isinstance(x, torch.Tensor) and counts.device == x.device:
        return counts, None, None
    if counts is None:
        return None, None, None
    try:
        given = counts.tolist() if isinstance(counts, torch.Tensor) else counts
        sizes = tuple(given)
        if not all(isinstance(size, int) and not isinstance(size, bool) for size in sizes):
            raise TypeError
    except TypeError:
        raise UnsupportedInputError(
            f"counts={counts!r} are not numbers of rows; pass integers, or int32 in a tensor on x's device"
        ) from None
    group = dist.group.WORLD if group is None else group
    rank = group.rank() if isinstance(group, dist.ProcessGroup) else 0
    return None, sizes, sizes[rank] if rank < len(sizes) else 0


def all_gather_v(
    x: torch.Tensor,
    counts: Counts | None = None,
    *,
    max_count: int,
    group: dist.ProcessGroup | None = None,
    out: torch.Tensor | None = None,
    counts_out: torch.Tensor | None = None,
    max_sms: int | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Give every rank the rows of all ranks, in rank order, of which each has a number of its own.

    Args:
        x: rows along dimension 0, any strides, any floating-point (fp8 too), integer or bool dtype. Dtype and all
            dimensions but the first are the same on every rank. With counts in a tensor `max_count` rows, of which the
            first `counts[r]` on rank r are sent. Left as it is.
        counts: rows of every rank, 0 allowed, the same on every rank. Integers on the host; or [n] int32 on x's device,
            which each launch reads, so that graphs may be replayed with others. A count there that is not within 0 and
            `max_count` is clamped, and the group's next call of this op or `reduce_scatter_v` raises; on CPUs the call
            itself. None: ranks do not know each other's counts, and learn them.
        max_count: rows at most that any rank has, the same on every rank. The kernel is chosen by this bound alone.
            Round it up to few different values: every new one is a new problem.
        group: as in `all_reduce`.
        out: where to write: of the result's shape, x's dtype and device, any strides; no memory shared with `x`. None
            allocates it.
        counts_out: where to write the counts, [n] int32, likewise.
        max_sms: as in `all_reduce`.

    Returns:
        With counts on the host [Σ counts, ...]; with counts in a tensor [n · max_count, ...], the rows in front and the
        rest unspecified. Without counts a pair: [n, max_count, ...] whose rows behind a rank's count are unspecified,
        and the counts [n] int32.

    Raises:
        NotInitializedError, GroupError, UnsupportedInputError, InfeasibleError, PeerTimeoutError: as in `all_reduce`.

    Every bit comes through as it was sent. The gradient is `reduce_scatter_v`. Can be captured in CUDA graphs, which
    replay counts of the host as they were; enqueues on the current stream; never synchronises the host. Every rank must
    make the call, also one without rows.
    """
    try:
        given, sizes, rows = _given(x, counts, group)
        if rows is None:
            rows = x.shape[0] if given is None and isinstance(x, torch.Tensor) and x.dim() else max_count
        tensors, options = (x, given, out, counts_out), (sizes, rows, max_count)
        found = None
        if not is_dynamo_compiling():
            fast = _all_gather_v.last_fast_calls[world._default_pg if group is None else group]
            found = fast(*tensors, *options, "default", max_sms)
        if found is None:
            found = _all_gather_v.call(tensors, options, group, "default", max_sms)
        return found if counts is None else found[0]
    except BaseException as error:
        _all_gather_v.on_error(error, x, group)
        raise


def reduce_scatter_v(
    x: torch.Tensor,
    counts: Counts,
    *,
    max_count: int,
    group: dist.ProcessGroup | None = None,
    out: torch.Tensor | None = None,
    numerics: NumericsPolicy | None = None,
    max_sms: int | None = None,
) -> torch.Tensor:
    """Sum rows over all ranks; rank r gets `counts[r]` of them, behind the rows of the ranks before it.

    Args:
        x: rows along dimension 0, any strides: Σ counts of them, or n · `max_count` with counts in a tensor, of which
            those behind Σ counts are not read. Kernels take bf16, fp16 and fp32; fp64 and integers of 8, 32 and 64 bits
            run the variant `library` on GPUs. The same shape and dtype on every rank. Left as it is.
        counts: as in `all_gather_v`, but never None.
        max_count: as in `all_gather_v`.
        group: as in `all_reduce`.
        out: where to write: of the result's shape, x's dtype and device, any strides; no memory shared with `x`. None
            allocates it.
        numerics: as in `all_reduce`. Ordered: summed in fp32 in rank order, rounded once at the end; the bits do not
            depend on tuning.
        max_sms: as in `all_reduce`.

    Returns:
        `out`, or a new contiguous tensor: [counts[r], ...], or with counts in a tensor [max_count, ...] with zeros
        behind the rank's rows.

    Raises:
        NotInitializedError, GroupError, UnsupportedInputError, InfeasibleError, PeerTimeoutError: as in `all_reduce`.

    The gradient is `all_gather_v`. Can be captured in CUDA graphs, which replay counts of the host as they were;
    enqueues on the current stream; never synchronises the host. Every rank must make the call, also one without rows.
    """
    try:
        given, sizes, rows = _given(x, counts, group)
        tensors, options = (x, given, out), (sizes, max_count if rows is None else rows, max_count)
        if not is_dynamo_compiling():
            fast = _reduce_scatter_v.last_fast_calls[world._default_pg if group is None else group]
            if (result := fast(*tensors, *options, numerics, max_sms)) is not None:
                return result
        return _reduce_scatter_v.call(tensors, options, group, numerics, max_sms)
    except BaseException as error:
        _reduce_scatter_v.on_error(error, x, group)
        raise
