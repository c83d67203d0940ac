"""The collectives: `all_reduce`, `all_gather`, `reduce_scatter`, `all_to_all` and the fused forms of `all_reduce`.

Each op is a small `Form` that says what it takes, and a public function that runs the last call's fast call or hands
over to the op's `CallPath`. The functions repeat these few lines because a call shared by them would cost what fast
calls save.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.compiler import is_dynamo_compiling

from tunedcomm.dispatch.dispatcher import check_limit
from tunedcomm.errors import UnsupportedInputError
from tunedcomm.kernels.all_reduce_rms_norm.op import add_and_norm, eps_bits
from tunedcomm.kernels.all_to_all.op import layout_of
from tunedcomm.ops.call import CallPath, Form, Results, Tensors, problem_of, world
from tunedcomm.ops.checks import (
    FLOATS,
    INTEGERS,
    MOVED,
    check_dtype,
    check_extra,
    check_input,
    check_plain,
    check_reduction,
    normal_dim,
    refuse_async,
)
from tunedcomm.spec import NumericsPolicy, Problem

_REDUCED = {**FLOATS, **INTEGERS}
_REDUCTIONS = ("sum", "avg", "max", "min")
_LINEAR = ("sum", "avg")
# Dtypes that all_gather's problems name; others go by the integer of their size, for bytes are bytes.
_GATHERED = {
    **FLOATS,
    **INTEGERS,
    torch.int16: "int16",
    torch.float8_e4m3fn: "float8_e4m3fn",
    torch.float8_e5m2: "float8_e5m2",
}
_BY_SIZE = {1: "uint8", 2: "int16", 4: "int32", 8: "int64"}
_WIDEST = 8


class _Reduction(Form):
    """An op that does nothing but reduce; the first option says how."""

    tells_memory = True

    def check(self, inputs: Tensors, options: Any, world_size: int) -> None:
        check_dtype(self.op, inputs[0], _REDUCED, ", whose sum and avg are the same")
        check_reduction(options[0], inputs[0], _REDUCTIONS)

    def refusal(self, inputs: Tensors, options: Any) -> str:
        return "" if options[0] in _LINEAR else f"{self.op} with op={options[0]!r}"


class _AllReduce(_Reduction):
    op = "all_reduce"
    options = ("str op",)
    aliases = {"out": "x"}  # noqa: RUF012 - never changed

    def problem(self, inputs: Tensors, options: Any, world_size: int) -> Problem:
        x = inputs[0]
        return problem_of(self.op, (x.numel(),), _REDUCED[x.dtype], world_size, reduction=options[0], mode="eager")


_all_reduce: CallPath[torch.Tensor] = CallPath(_AllReduce())


def all_reduce(
    x: torch.Tensor,
    *,
    op: str = "sum",
    group: dist.ProcessGroup | None = None,
    out: torch.Tensor | None = None,
    numerics: NumericsPolicy = "default",
    max_sms: int | None = None,
    async_op: bool = False,
) -> torch.Tensor:
    """Reduce `x` elementwise over all ranks of `group`; every rank gets the result.

    Args:
        x: any shape, any strides. Kernels take bf16, fp16 and fp32; fp64, int8, uint8, int32 and int64 run the variant
            `library` on GPUs. The same number of elements and dtype on every rank. Left as it is unless `out` is `x`.
        op: `sum`, `avg`, `max` or `min`; `avg` not for integers. Kernels do `sum` and `avg`, the variant `library` does
            all.
        group: process group; None is the default group. Its first call is collective set-up: all ranks make it, outside
            of graph captures.
        out: where to write: same shape, dtype and device as `x`, any strides; may be `x`. None allocates it.
        numerics: classes of variants that may run: `default` admits `ordered` and `library`, `ordered` that one alone,
            `any` all. Ordered: summed in fp32 in rank order, rounded once at the end; the bits do not depend on tuning.
        max_sms: SMs at most that the kernel may take, a whole number, the same on every rank, for callers that compute
            beside it. The best candidate that takes no more runs, or, where there is none, the variant `library`, which
            chooses for itself. None: no limit.
        async_op: False, as in `torch.distributed`. Calls are enqueued on the current stream and return tensors;
            `tunedcomm.intercept` serves those of `torch.distributed` that return a work object.

    Returns:
        `out`, or a new contiguous tensor of `x`'s shape and dtype.

    Raises:
        NotInitializedError: no default process group, or a first call inside a graph capture.
        GroupError: this rank is not a member of `group`, or the group has no backend for the tensors' device.
        UnsupportedInputError: a dtype, layout, device, shape, option or output that cannot be served; says what to do.
        InfeasibleError: a variant that is forced cannot run the call; `numerics` leaves no candidate that can; or with
            TUNEDCOMM_MODE=force no database has an answer.
        PeerTimeoutError: an earlier call on the group timed out waiting for a peer.

    `tunedcomm.all_reduce_(x)` is the same with `out=x`. Can be captured in CUDA graphs; enqueues on the current stream;
    never synchronises the host.
    """
    if not (async_op or is_dynamo_compiling()):
        fast = _all_reduce.last.get(world._default_pg if group is None else group)
        if fast is not None:
            result = fast(x, out, op, numerics, max_sms)
            if result is not None:
                return result
    refuse_async("all_reduce", async_op)
    return _all_reduce.call((x, out), (op,), group, numerics, max_sms)


def all_reduce_(
    x: torch.Tensor,
    *,
    op: str = "sum",
    group: dist.ProcessGroup | None = None,
    numerics: NumericsPolicy = "default",
    max_sms: int | None = None,
    async_op: bool = False,
) -> torch.Tensor:
    """`all_reduce` in place: `x` holds the result and is returned."""
    return all_reduce(x, op=op, group=group, out=x, numerics=numerics, max_sms=max_sms, async_op=async_op)


def _leads(x: torch.Tensor, dim: int) -> bool:
    """True if nothing but dimensions of one element comes before `dim`: its chunks lie one after another."""
    return all(extent == 1 for extent in x.shape[: dim % max(x.dim(), 1)])


class _AllGather(Form):
    """Kernels gather along the first dimension that is longer than 1; along others their result is permuted."""

    op = "all_gather"
    options = ("int dim",)
    reduces = False
    tells_memory = True

    def check(self, inputs: Tensors, options: Any, world_size: int) -> None:
        normal_dim(self.op, inputs[0], options[0])
        if inputs[0].is_quantized:
            raise UnsupportedInputError(
                f"{self.op} does not take {inputs[0].dtype}; gather x.int_repr() and its scales"
            )

    def problem(self, inputs: Tensors, options: Any, world_size: int) -> Problem:
        x = inputs[0]
        size = x.element_size()
        dtype = _GATHERED.get(x.dtype) or _BY_SIZE[min(size, _WIDEST)]
        numel = x.numel() * max(size // _WIDEST, 1)
        return problem_of(self.op, (numel,), dtype, world_size, reduction="", mode="eager")

    def refusal(self, inputs: Tensors, options: Any) -> str:
        x = inputs[0]
        # The gradient is a reduce_scatter: of the parts where numbers are complex, and of none in 8 bits.
        return "" if x.is_complex() or x.dtype in FLOATS else f"{self.op} of {x.dtype}"

    def results(self, inputs: Tensors, options: Any, world_size: int) -> Results:
        x = inputs[0]
        shape = list(x.shape) or [1]
        shape[options[0]] *= world_size
        return [(tuple(shape), x.dtype)]

    def is_direct(self, inputs: Tensors, options: Any) -> bool:
        return _leads(inputs[0], options[0])

    def leave(self, written: torch.Tensor, inputs: Tensors, options: Any, world_size: int) -> torch.Tensor:
        x = inputs[0]
        # The dimension stays split by rank: merged, it would be a copy more.
        return written.view(world_size, *x.shape).movedim(0, options[0] % x.dim())


_all_gather: CallPath[torch.Tensor] = CallPath(_AllGather())


def all_gather(
    x: torch.Tensor,
    *,
    dim: int = 0,
    group: dist.ProcessGroup | None = None,
    out: torch.Tensor | None = None,
    max_sms: int | None = None,
    async_op: bool = False,
) -> torch.Tensor:
    """Concatenate the tensors of all ranks of `group` along `dim`, in rank order; every rank gets the result.

    Args:
        x: any shape, any strides, any dtype but quantized ones; the same shape and dtype on every rank. A tensor
            without dimensions counts as one of one element. Left as it is. Gathering along another dimension than the
            first that is longer than 1 costs a copy of the result.
        dim: dimension along which to concatenate, from the end if negative.
        group: as in `all_reduce`.
        out: where to write: of the result's shape, dtype and device, any strides; must not overlap `x`. None allocates
            it.
        max_sms: as in `all_reduce`. 0 admits copy engines alone.
        async_op: as in `all_reduce`.

    Returns:
        `out`, or a new contiguous tensor of `x`'s shape and dtype with `dim` `world_size` times as long.

    Raises:
        NotInitializedError, GroupError, UnsupportedInputError, InfeasibleError, PeerTimeoutError: as in `all_reduce`.

    Moves bytes: every bit arrives as it was, NaN payloads and the sign of zeros included. Can be captured in CUDA
    graphs; enqueues on the current stream; never synchronises the host.
    """
    if not (async_op or is_dynamo_compiling()):
        fast = _all_gather.last.get(world._default_pg if group is None else group)
        if fast is not None:
            result = fast(x, out, dim, "default", max_sms)
            if result is not None:
                return result
    refuse_async("all_gather", async_op)
    return _all_gather.call((x, out), (dim,), group, "default", max_sms)


class _ReduceScatter(_Reduction):
    """A result is one chunk of the input along the dimension."""

    op = "reduce_scatter"
    options = ("str op", "int dim")

    def check(self, inputs: Tensors, options: Any, world_size: int) -> None:
        super().check(inputs, options, world_size)
        self.results(inputs, options, world_size)

    def problem(self, inputs: Tensors, options: Any, world_size: int) -> Problem:
        x = inputs[0]
        shape = (x.numel() // world_size,)
        return problem_of(self.op, shape, _REDUCED[x.dtype], world_size, reduction=options[0], mode="eager")

    def results(self, inputs: Tensors, options: Any, world_size: int) -> Results:
        x = inputs[0]
        dim = normal_dim(self.op, x, options[1])
        extent = x.shape[dim] if x.dim() else 1
        if extent % world_size:
            raise UnsupportedInputError(
                f"{self.op} splits dimension {dim} of x, {extent} long, into {world_size} equal chunks; it must be a "
                f"multiple of {world_size} (shape {tuple(x.shape)}): pad x, or choose another dim"
            )
        return [((*x.shape[:dim], extent // world_size, *x.shape[dim + 1 :]) if x.dim() else (), x.dtype)]

    def is_direct(self, inputs: Tensors, options: Any) -> bool:
        return _leads(inputs[0], options[1])

    def operands(self, inputs: Tensors, options: Any) -> Tensors:
        if self.is_direct(inputs, options):
            return inputs
        return (inputs[0].movedim(options[1], 0).contiguous(),)

    def leave(self, written: torch.Tensor, inputs: Tensors, options: Any, world_size: int) -> torch.Tensor:
        moved = list(inputs[0].movedim(options[1], 0).shape)
        return written.view(moved[0] // world_size, *moved[1:]).movedim(0, options[1])


_reduce_scatter: CallPath[torch.Tensor] = CallPath(_ReduceScatter())


def reduce_scatter(
    x: torch.Tensor,
    *,
    op: str = "sum",
    dim: int = 0,
    group: dist.ProcessGroup | None = None,
    out: torch.Tensor | None = None,
    numerics: NumericsPolicy = "default",
    max_sms: int | None = None,
    async_op: bool = False,
) -> torch.Tensor:
    """Reduce `x` elementwise over all ranks of `group`; rank r gets the r-th of as many equal chunks along `dim`.

    Args:
        x: any shape whose extent along `dim` is a multiple of the group's size, any strides. Kernels take bf16, fp16
            and fp32; fp64, int8, uint8, int32 and int64 run the variant `library` on GPUs. The same shape and dtype on
            every rank. Left as it is.
        op: as in `all_reduce`.
        dim: dimension to split, from the end if negative. Where it is not the first, `x` is copied into an order in
            which chunks are contiguous, and the result copied back.
        group: as in `all_reduce`.
        out: where to write: `x`'s shape with `dim` divided by the group's size, same dtype and device, any strides; no
            memory shared with `x`. None allocates it.
        numerics: as in `all_reduce`. Ordered: summed in fp32 in rank order, rounded once at the end; the bits do not
            depend on tuning and are those of the same part of an ordered `all_reduce`.
        max_sms: as in `all_reduce`.
        async_op: as in `all_reduce`.

    Returns:
        `out`, or a new contiguous tensor of `x`'s dtype, `dim` divided by the group's size.

    Raises:
        NotInitializedError, GroupError, UnsupportedInputError, InfeasibleError, PeerTimeoutError: as in `all_reduce`.

    Can be captured in CUDA graphs; enqueues on the current stream; never synchronises the host.
    """
    if not (async_op or is_dynamo_compiling()):
        fast = _reduce_scatter.last.get(world._default_pg if group is None else group)
        if fast is not None:
            result = fast(x, out, op, dim, numerics, max_sms)
            if result is not None:
                return result
    refuse_async("reduce_scatter", async_op)
    return _reduce_scatter.call((x, out), (op, dim), group, numerics, max_sms)


class _AllToAll(Form):
    """Chunks lie one after another along dimension 0, in the input as in the result."""

    op = "all_to_all"
    reduces = False
    tells_memory = True

    def check(self, inputs: Tensors, options: Any, world_size: int) -> None:
        x = inputs[0]
        check_dtype(self.op, x, MOVED)
        if x.dim() == 0 or x.shape[0] % world_size:
            extent = f"{x.shape[0]} of a tensor of shape {tuple(x.shape)}" if x.dim() else "of a tensor without any"
            raise UnsupportedInputError(
                f"{self.op} cuts dimension 0 into a chunk for each of the {world_size} ranks; {extent} cannot be cut "
                f"so. Pad it to a multiple of {world_size}, or call all_to_all_v with the number of rows for each rank"
            )

    def problem(self, inputs: Tensors, options: Any, world_size: int) -> Problem:
        x = inputs[0]
        return problem_of(self.op, (x.numel() // world_size,), MOVED[x.dtype], world_size, reduction="", mode="eager")


_all_to_all: CallPath[torch.Tensor] = CallPath(_AllToAll())


def all_to_all(
    x: torch.Tensor,
    *,
    group: dist.ProcessGroup | None = None,
    out: torch.Tensor | None = None,
    max_sms: int | None = None,
    async_op: bool = False,
) -> torch.Tensor:
    """Send chunk j of `x` to rank j of `group`; chunk i of the result comes from rank i.

    Args:
        x: any shape whose dimension 0 is a multiple of the group's size, any strides, any floating-point (fp8 too),
            integer or bool dtype; complex ones as `torch.view_as_real(x)`. It is cut along dimension 0 into a chunk for
            each rank. The same number of elements and dtype on every rank. Left as it is.
        group: as in `all_reduce`.
        out: where to write: same shape, dtype and device as `x`, any strides; no memory in common with `x`. None
            allocates it.
        max_sms: as in `all_reduce`. 0 admits copy engines alone.
        async_op: as in `all_reduce`.

    Returns:
        `out`, or a new contiguous tensor of `x`'s shape and dtype.

    Raises:
        NotInitializedError, GroupError, UnsupportedInputError, InfeasibleError, PeerTimeoutError: as in `all_reduce`.

    Every bit comes through as it was sent, NaN payloads and negative zeros included. Can be captured in CUDA graphs;
    enqueues on the current stream; never synchronises the host.
    """
    if not (async_op or is_dynamo_compiling()):
        fast = _all_to_all.last.get(world._default_pg if group is None else group)
        if fast is not None:
            result = fast(x, out, "default", max_sms)
            if result is not None:
                return result
    refuse_async("all_to_all", async_op)
    return _all_to_all.call((x, out), (), group, "default", max_sms)


class _AllToAllV(Form):
    """The options are the rows for and from each rank, and their bound; the problem depends on the bound alone."""

    op = "all_to_all_v"
    options = ("int[] send_counts", "int[] recv_counts", "int? max_count")
    reduces = False
    has_operator = False
    repeats = False

    def check(self, inputs: Tensors, options: Any, world_size: int) -> None:
        x, send = inputs[0], options[0]
        check_dtype(self.op, x, MOVED)
        if send is not None and (x.dim() == 0 or x.shape[0] != sum(send)):  # None: planned for any counts
            raise UnsupportedInputError(
                f"send_counts={list(send)} names {sum(send)} rows, but x has shape {tuple(x.shape)}; its dimension 0 "
                "must be their sum"
            )

    def problem(self, inputs: Tensors, options: Any, world_size: int) -> Problem:
        return _rows_problem(math.prod(inputs[0].shape[1:]), inputs[0].dtype, options[2], world_size)

    def common_options(self, options: Any) -> Any:
        return options[2:]

    def is_bounded(self, options: Any) -> bool:
        return options[2] is not None

    def results(self, inputs: Tensors, options: Any, world_size: int) -> Results:
        return [((sum(options[1]), *inputs[0].shape[1:]), inputs[0].dtype)]

    def is_idle(self, inputs: Tensors, results: Tensors, options: Any) -> bool:
        """Nothing moves on any rank; a rank that sends and gets nothing comes along where others may."""
        return options[2] == 0 or 0 in inputs[0].shape[1:]

    def scalars(self, inputs: Tensors, options: Any) -> Tensors:
        row = math.prod(inputs[0].shape[1:])
        send, recv = ([count * row for count in counts] for counts in options[:2])
        return torch.tensor(send, device="cpu"), torch.tensor(recv, device="cpu")


@functools.lru_cache
def _rows_problem(row: int, dtype: torch.dtype, max_count: int | None, world_size: int) -> Problem:
    """The problem of moving at most `max_count` rows between any two ranks; without a bound one of no size."""
    numel, layout = (0, "") if max_count is None else (max_count * row, layout_of(row * dtype.itemsize, max_count))
    return Problem("all_to_all_v", (numel,), MOVED[dtype], world_size, reduction="", layout=layout, mode="eager")


_all_to_all_v: CallPath[torch.Tensor] = CallPath(_AllToAllV())


def _counts(name: str, counts: Any, world_size: int, max_count: int | None) -> list[int]:
    """The counts as a list of ints, one a rank."""
    try:
        given = counts.tolist() if isinstance(counts, torch.Tensor) and not counts.is_cuda else list(counts)
    except TypeError:
        given = []
    if isinstance(counts, torch.Tensor) and counts.is_cuda:
        raise UnsupportedInputError(f"{name} is on {counts.device}; pass host integers, e.g. {name}.tolist()")
    if len(given) != world_size or any(not isinstance(n, int) or isinstance(n, bool) or n < 0 for n in given):
        raise UnsupportedInputError(
            f"{name}={counts!r} is not a number of rows from 0 on for each of the {world_size} ranks"
        )
    if max_count is not None and max(given) > max_count:
        raise UnsupportedInputError(
            f"{name}={given} exceeds max_count={max_count}; pass the same larger max_count on every rank, or none"
        )
    return given


def all_to_all_v(
    x: torch.Tensor,
    send_counts: Sequence[int],
    recv_counts: Sequence[int],
    *,
    max_count: int | None = None,
    group: dist.ProcessGroup | None = None,
    out: torch.Tensor | None = None,
    max_sms: int | None = None,
    async_op: bool = False,
) -> torch.Tensor:
    """Send the first `send_counts[0]` rows of `x` to rank 0, the next `send_counts[1]` to rank 1, and so on.

    Args:
        x: rows along dimension 0, as many as `send_counts` names; any strides, any floating-point (fp8 too), integer or
            bool dtype; complex ones as `torch.view_as_real(x)`. Dtype and all dimensions but the first are the same on
            every rank. Left as it is.
        send_counts: rows for each rank of the group, one integer a rank, on the host (a list or a CPU tensor); 0 is
            allowed.
        recv_counts: rows that come from each rank, likewise: `recv_counts[i]` here is `send_counts[r]` on rank i, where
            r is this rank.
        max_count: rows at most that any rank sends any rank, the same on every rank, e.g. a capacity. Ranks do not know
            each other's counts, and all must run the same kernel: it is chosen by this bound alone, and tuned for it.
            As None the variant `library` serves the call. Round it up to few different values, e.g. to powers of two:
            every new one is a new problem.
        group: as in `all_reduce`.
        out: where to write: `sum(recv_counts)` rows of `x`'s dtype and device, any strides; no memory in common with
            `x`. None allocates it.
        max_sms: as in `all_reduce`.
        async_op: as in `all_reduce`.

    Returns:
        `out`, or a new contiguous tensor: the rows from rank 0, then those from rank 1, and so on.

    Raises:
        NotInitializedError, GroupError, UnsupportedInputError, InfeasibleError, PeerTimeoutError: as in `all_reduce`.

    Every bit comes through as it was sent. Can be captured in CUDA graphs, which replay the counts of the capture;
    enqueues on the current stream; never synchronises the host. Every rank must make the call, also one without rows.
    """
    op = _all_to_all_v.form.op
    refuse_async(op, async_op)
    check_input(op, x)
    check_plain(op, (x, out))
    check_limit("max_count", max_count, "rows")
    group = world._default_pg if group is None else group
    communicator = _all_to_all_v.communicator(x, group)
    send = _counts("send_counts", send_counts, communicator.world_size, max_count)
    recv = _counts("recv_counts", recv_counts, communicator.world_size, max_count)
    rank = communicator.rank
    if send[rank] != recv[rank]:
        raise UnsupportedInputError(
            f"rank {rank} sends itself {send[rank]} rows and expects {recv[rank]} of itself; send_counts and "
            "recv_counts must be equal there"
        )
    return _all_to_all_v.serve((x, out), (tuple(send), tuple(recv), max_count), group, "default", max_sms)


class _AllReduceBias(Form):
    op = "all_reduce_bias"
    inputs = ("x", "bias")
    aliases = {"out": "x"}  # noqa: RUF012 - never changed

    def check(self, inputs: Tensors, options: Any, world_size: int) -> None:
        x, bias = inputs
        check_dtype(self.op, x, FLOATS)
        if x.dim() == 0 or bias is None:
            what = "x has no dimensions" if x.dim() == 0 else "bias is None"
            raise UnsupportedInputError(f"{self.op} wants x [..., n] and bias [n], but {what}")
        check_extra(self.op, x, bias, "bias", (x.shape[-1],))

    def problem(self, inputs: Tensors, options: Any, world_size: int) -> Problem:
        x, columns = inputs[0], inputs[0].shape[-1]
        return problem_of(self.op, (x.numel() // columns, columns), FLOATS[x.dtype], world_size, mode="eager")

    def alone(self, inputs: Tensors, options: Any) -> Tensors:
        return (inputs[0] + inputs[1],)


_all_reduce_bias: CallPath[torch.Tensor] = CallPath(_AllReduceBias())


def all_reduce_bias(
    x: torch.Tensor,
    bias: torch.Tensor,
    *,
    group: dist.ProcessGroup | None = None,
    out: torch.Tensor | None = None,
    numerics: NumericsPolicy = "default",
    max_sms: int | None = None,
) -> torch.Tensor:
    """Sum `x` over all ranks of `group` and add `bias` along the last dimension; every rank gets the result.

    The sum is rounded to `x`'s dtype as `all_reduce` rounds it, then the bias is added in fp32 and rounded once more.

    Args:
        x: [..., n], any strides. Kernels take bf16, fp16 and fp32; fp64 runs the variant `library` on GPUs. The same
            shape and dtype on every rank. Left as it is unless `out` is `x`.
        bias: [n], of `x`'s dtype, the same on every rank.
        group: as in `all_reduce`.
        out: as in `all_reduce`.
        numerics: as in `all_reduce`. Ordered: summed in fp32 in rank order, then the rule above; the bits do not depend
            on tuning.
        max_sms: as in `all_reduce`.

    Returns:
        `out`, or a new contiguous tensor of `x`'s shape and dtype.

    Raises:
        NotInitializedError, GroupError, UnsupportedInputError, InfeasibleError, PeerTimeoutError: as in `all_reduce`.

    On GPUs rows that are no multiple of 16 bytes run the variant `library`. Can be captured in CUDA graphs; enqueues on
    the current stream; never synchronises the host.
    """
    if not is_dynamo_compiling():
        fast = _all_reduce_bias.last.get(world._default_pg if group is None else group)
        if fast is not None:
            result = fast(x, bias, out, numerics, max_sms)
            if result is not None:
                return result
    return _all_reduce_bias.call((x, bias, out), (), group, numerics, max_sms)


class _AllReduceRmsNorm(Form):
    op = "all_reduce_rms_norm"
    inputs = ("x", "weight", "bias", "residual", "scale")
    outputs = ("out", "residual_out")
    aliases = {"residual_out": "residual"}  # noqa: RUF012 - never changed
    optional = ("bias", "residual", "scale")
    options = ("float eps", "ScalarType? out_dtype")

    def check(self, inputs: Tensors, options: Any, world_size: int) -> None:
        x, weight, bias, residual, scale = inputs
        eps, out_dtype = options
        check_dtype(self.op, x, FLOATS)
        if x.dim() == 0:
            raise UnsupportedInputError(
                f"x of {self.op} has no dimensions; the last one is normalised: pass [..., hidden]"
            )
        if weight is None:
            raise UnsupportedInputError(f"{self.op} wants a weight of shape ({x.shape[-1]},), got None")
        check_extra(self.op, x, weight, "weight", (x.shape[-1],))
        check_extra(self.op, x, bias, "bias", (x.shape[-1],))
        check_extra(self.op, x, residual, "residual", tuple(x.shape))
        if not isinstance(eps, (int, float)) or isinstance(eps, bool) or not 0 <= eps < math.inf:
            raise UnsupportedInputError(f"eps={eps!r} is no number from 0 on; 1e-6 is the default")
        if out_dtype not in (None, torch.float8_e4m3fn):
            raise UnsupportedInputError(f"out_dtype={out_dtype!r} is neither None (x's dtype) nor torch.float8_e4m3fn")
        if (scale is None) != (out_dtype is None):
            raise UnsupportedInputError(
                "out_dtype=torch.float8_e4m3fn and scale= belong together; pass both or neither"
            )
        if scale is not None and (scale.numel() != 1 or scale.dtype != torch.float32):
            raise UnsupportedInputError(
                f"scale has {scale.numel()} elements of {scale.dtype}; it must be one torch.float32"
            )

    def problem(self, inputs: Tensors, options: Any, world_size: int) -> Problem:
        x, _, bias, residual, scale = inputs
        hidden = x.shape[-1]
        layout = "+".join(n for n, extra in (("bias", bias), ("residual", residual)) if extra is not None)
        scaling = "fp8" if scale is not None else ""
        shape = (x.numel() // hidden, hidden)
        return problem_of(self.op, shape, FLOATS[x.dtype], world_size, layout=layout, scaling=scaling, mode="eager")

    def results(self, inputs: Tensors, options: Any, world_size: int) -> Results:
        x, shape = inputs[0], tuple(inputs[0].shape)
        return [(shape, options[1] or x.dtype), (shape, x.dtype)]

    def refusal(self, inputs: Tensors, options: Any) -> str:
        return f"{self.op} with out_dtype={options[1]}" if options[1] is not None else ""

    def scalars(self, inputs: Tensors, options: Any) -> Tensors:
        return (float(options[0]),)

    def scalar_args(self, options: Any) -> tuple[int, ...]:
        return (eps_bits(float(options[0])),)

    def alone(self, inputs: Tensors, options: Any) -> Tensors:
        x, weight, bias, residual, scale = inputs
        return add_and_norm(x, weight, bias, residual, scale, float(options[0]))


_all_reduce_rms_norm: CallPath[tuple[torch.Tensor, torch.Tensor]] = CallPath(_AllReduceRmsNorm())


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
    numerics: NumericsPolicy = "default",
    max_sms: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sum `x` over all ranks of `group`, add bias and residual, and take the RMS norm over the last dimension.

    With s the sum, rounded to `x`'s dtype as `all_reduce` rounds it:

        residual_out = s + bias + residual                                    added in fp32, rounded once
        y = residual_out / sqrt(mean(residual_out²) + eps) · weight           from the rounded residual_out, in fp32

    Args:
        x: partial sums, [..., hidden], any strides. Kernels take bf16, fp16 and fp32; fp64 runs the variant `library`.
            The same shape and dtype on every rank. Left as it is.
        weight: [hidden], of `x`'s dtype. As bias, residual, eps and scale the same on every rank for the results to be.
        bias: [hidden], of `x`'s dtype, added to every row of the sum; None adds nothing.
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

    Returns:
        (y, residual_out): what was given, or new contiguous tensors.

    Raises:
        NotInitializedError, GroupError, UnsupportedInputError, InfeasibleError, PeerTimeoutError: as in `all_reduce`.

    On GPUs rows that are no multiple of 16 bytes, or longer than 32 KiB, run the variant `library`. Can be captured in
    CUDA graphs; enqueues on the current stream; never synchronises the host.
    """
    if not is_dynamo_compiling():
        fast = _all_reduce_rms_norm.last.get(world._default_pg if group is None else group)
        if fast is not None:
            result = fast(x, weight, bias, residual, scale, out, residual_out, eps, out_dtype, numerics, max_sms)
            if result is not None:
                return result
    return _all_reduce_rms_norm.call(
        (x, weight, bias, residual, scale, out, residual_out), (eps, out_dtype), group, numerics, max_sms
    )
