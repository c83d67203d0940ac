"""The collectives: `all_reduce`, `all_gather`, `reduce_scatter`, `all_to_all` and the fused forms of `all_reduce`.

Each op is a small `Form` that says what it takes, and a public function that runs the last call's fast call or hands
over to the op's `CallPath`. The functions repeat these few lines because a call shared by them would cost what fast
calls save.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, Literal, TypeAlias, overload

import torch
import torch.distributed as dist
from torch.compiler import is_dynamo_compiling

from tunedcomm.dispatch.dispatcher import check_limit
from tunedcomm.errors import UnsupportedInputError
from tunedcomm.kernels.all_reduce_rms_norm.op import (
    EPS,
    GROUP,
    Given,
    add_and_norm,
    eps_bits,
    form_named,
    form_of,
    given_of,
)
from tunedcomm.kernels.all_to_all.op import layout_of
from tunedcomm.ops.call import CallPath, Form, Group, Results, Tensors, problem_of, stride_of, world
from tunedcomm.ops.checks import (
    FLOATS,
    INTEGERS,
    MOVED,
    check_bias,
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
Quantize: TypeAlias = Literal["tensor", "token", "group128"]
# `quantize` of all_reduce_rms_norm, "" for None, to its name in problems.
QUANTIZE = {"": "", "tensor": "fp8", "token": "token", "group128": "group128"}


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
    numerics: NumericsPolicy | None = None,
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
    numerics: NumericsPolicy | None = None,
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
    numerics: NumericsPolicy | None = None,
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
            raise UnsupportedInputError(f"{self.op} wants x [..., n] and bias [n] or [..., n], but {what}")
        check_bias(self.op, x, bias)

    def problem(self, inputs: Tensors, options: Any, world_size: int) -> Problem:
        x, bias = inputs
        columns = x.numel() if bias.dim() > 1 else x.shape[-1]  # with a bias of x's shape all of x is one row
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
    numerics: NumericsPolicy | None = None,
    max_sms: int | None = None,
) -> torch.Tensor:
    """Sum `x` over all ranks of `group` and add `bias`; every rank gets the result.

    The sum is rounded to `x`'s dtype as `all_reduce` rounds it, then the bias is added in fp32 and rounded once more.

    Args:
        x: [..., n], any strides. Kernels take bf16, fp16 and fp32; fp64 runs the variant `library` on GPUs. The same
            shape and dtype on every rank. Left as it is unless `out` is `x`.
        bias: [n], added to every row, or of `x`'s shape; of `x`'s dtype, the same on every rank.
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
    """The basic forms: y in x's dtype, or in fp8 with a given scale."""

    op = "all_reduce_rms_norm"
    inputs = ("x", "weight", "bias", "residual", "scale")
    outputs: tuple[str, ...] = ("out", "residual_out")
    aliases = {"residual_out": "residual"}  # noqa: RUF012 - never changed
    optional = ("bias", "residual", "scale")
    options: tuple[str, ...] = ("float eps", "ScalarType? out_dtype")

    def check(self, inputs: Tensors, options: Any, world_size: int) -> None:
        self.check_operands(inputs, options[0])
        out_dtype, scale = options[1], inputs[4]
        check_extra(self.op, inputs[0], inputs[2], "bias", (inputs[0].shape[-1],))
        if out_dtype not in (None, torch.float8_e4m3fn):
            raise UnsupportedInputError(f"out_dtype={out_dtype!r} is neither None (x's dtype) nor torch.float8_e4m3fn")
        if (scale is None) != (out_dtype is None):
            raise UnsupportedInputError(
                "out_dtype=torch.float8_e4m3fn and scale= belong together; pass both or neither"
            )

    def check_operands(self, inputs: Tensors, eps: Any) -> None:
        """Refuse tensors, and an eps, that no form takes."""
        x, weight, _, residual, scale = inputs
        check_dtype(self.op, x, FLOATS)
        if x.dim() == 0:
            raise UnsupportedInputError(
                f"x of {self.op} has no dimensions; the last one is normalised: pass [..., hidden]"
            )
        if weight is None:
            raise UnsupportedInputError(f"{self.op} wants a weight of shape ({x.shape[-1]},), got None")
        check_extra(self.op, x, weight, "weight", (x.shape[-1],))
        check_extra(self.op, x, residual, "residual", tuple(x.shape))
        if not isinstance(eps, (int, float)) or isinstance(eps, bool) or not 0 <= eps < math.inf:
            raise UnsupportedInputError(f"eps={eps!r} is no number from 0 on; 1e-6 is the default")
        if scale is not None and (scale.numel() != 1 or scale.dtype != torch.float32):
            raise UnsupportedInputError(
                f"scale has {scale.numel()} elements of {scale.dtype}; it must be one torch.float32"
            )

    def named(self, inputs: Tensors, options: Any) -> tuple[str, str]:
        """Layout and scaling of the problem."""
        _, _, bias, residual, scale = inputs
        layout = "+".join(n for n, extra in (("bias", bias), ("residual", residual)) if extra is not None)
        return layout, "fp8" if scale is not None else ""

    def problem(self, inputs: Tensors, options: Any, world_size: int) -> Problem:
        x, hidden = inputs[0], inputs[0].shape[-1]
        layout, scaling = self.named(inputs, options)
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
        given = Given._make((*inputs, float(options[0]), 0.0))
        return add_and_norm(given.x, given, form_named(*self.named(inputs, options)))


class _AllReduceRmsNormQuantized(_AllReduceRmsNorm):
    """The other forms. Scales have the shape of their memory; outputs that a form does not have are empty."""

    outputs = ("out", "residual_out", "scales", "norm_out")
    options = (
        *("float eps", "str quantize", "str scales_layout", "bool pow2_scales", "bool with_norm"),
        "float weight_offset",
    )

    @property
    def operator(self) -> str:
        return "all_reduce_rms_norm_quantized"

    def check(self, inputs: Tensors, options: Any, world_size: int) -> None:
        x, _, bias, residual, scale = inputs
        eps, quantize, scales_layout, pow2_scales, _, offset = options
        self.check_operands(inputs, eps)
        check_bias(self.op, x, bias)
        if quantize not in QUANTIZE:
            allowed = ", ".join(repr(name) for name in QUANTIZE if name)
            raise UnsupportedInputError(f"quantize={quantize!r} is neither None nor one of {allowed}")
        if (scale is not None) != (quantize == "tensor"):
            raise UnsupportedInputError("quantize='tensor' and scale= belong together; other forms make their scales")
        if scales_layout not in ("row", "column"):
            raise UnsupportedInputError(f"scales_layout={scales_layout!r} is neither 'row' nor 'column'")
        if quantize != "group128" and (pow2_scales or scales_layout == "column"):
            raise UnsupportedInputError("pow2_scales=True and scales_layout='column' are for quantize='group128' alone")
        if quantize == "group128" and x.shape[-1] % GROUP:
            raise UnsupportedInputError(
                f"quantize='group128' wants a multiple of {GROUP} columns, x has {x.shape[-1]}; pad them, or pass "
                "quantize='token'"
            )
        if not isinstance(offset, (int, float)) or isinstance(offset, bool) or not math.isfinite(offset):
            raise UnsupportedInputError(f"weight_offset={offset!r} is no finite number; 0.0 is the default")
        if form_named(*self.named(inputs, options)).is_basic or (_is_full(bias) and residual is None):
            raise UnsupportedInputError(
                f"{self.operator} serves what {self.op} does not; call that, with a bias of x's shape as the residual"
            )

    def named(self, inputs: Tensors, options: Any) -> tuple[str, str]:
        _, _, bias, residual, _ = inputs
        _, quantize, scales_layout, pow2_scales, with_norm, offset = options
        layout = {
            "full_bias" if _is_full(bias) else "bias": bias is not None,
            "residual": residual is not None,
            "offset": bool(offset),
        }
        scaling = {
            QUANTIZE[quantize]: bool(quantize),
            "columns": scales_layout == "column",
            "pow2": pow2_scales,
            "norm": with_norm and bool(quantize),
        }
        return tuple("+".join(name for name, there in parts.items() if there) for parts in (layout, scaling))  # type: ignore[return-value]

    def results(self, inputs: Tensors, options: Any, world_size: int) -> Results:
        x, shape = inputs[0], tuple(inputs[0].shape)
        form = form_named(*self.named(inputs, options))
        scales = form.scales_shape(math.prod(shape[:-1]), shape[-1])
        if not form.columns:
            scales = (*shape[:-1], *scales[1:]) if form.num_scales(shape[-1]) else scales
        dtype = torch.float8_e4m3fn if form.quantize else x.dtype
        return [(shape, dtype), (shape, x.dtype), (scales, torch.float32), (shape if form.norm else (0,), x.dtype)]

    def refusal(self, inputs: Tensors, options: Any) -> str:
        return f"{self.op} with quantize={options[1] or None!r}, weight_offset={options[5]!r} and a bias of x's shape"

    def scalars(self, inputs: Tensors, options: Any) -> Tensors:
        return float(options[0]), float(options[5])

    def scalar_args(self, options: Any) -> tuple[int, ...]:
        return eps_bits(float(options[0])), eps_bits(float(options[5]))

    def alone(self, inputs: Tensors, options: Any) -> Tensors:
        given, form = Given(*inputs, *self.scalars(inputs, options)), form_named(*self.named(inputs, options))
        y, h, scales, norm = add_and_norm(given.x, given, form)
        if form.columns:
            rows = scales.reshape(-1, scales.shape[-1]).t()
            scales = torch.nn.functional.pad(rows, (0, -rows.shape[1] % 4))
        return y, h, scales, norm


_all_reduce_rms_norm: CallPath[tuple[torch.Tensor, torch.Tensor]] = CallPath(_AllReduceRmsNorm())
_quantized: CallPath[tuple[torch.Tensor, ...]] = CallPath(_AllReduceRmsNormQuantized())


def _is_full(bias: torch.Tensor | None) -> bool:
    """True for a bias of x's shape and not of a row's."""
    return isinstance(bias, torch.Tensor) and bias.dim() > 1


def rms_norm_quantized(
    tensors: Tensors, options: tuple[Any, ...], group: Group, numerics: NumericsPolicy | None, max_sms: int | None
) -> tuple[torch.Tensor, ...]:
    """(y, residual_out, scales, norm) of a form that is not basic, as the operator has them."""
    if not is_dynamo_compiling():
        fast = _quantized.last.get(world._default_pg if group is None else group)
        if fast is not None:
            results = fast(*tensors, *options, numerics, max_sms)
            if results is not None:
                return results
    return _quantized.call(tensors, options, group, numerics, max_sms)


@overload
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
    numerics: NumericsPolicy | None = None,
    max_sms: int | None = None,
    quantize: Literal["tensor"] | None = None,
    with_norm: Literal[False] = False,
    weight_offset: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]: ...
@overload
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
    numerics: NumericsPolicy | None = None,
    max_sms: int | None = None,
    quantize: Quantize,
    scales_layout: Literal["row", "column"] = "row",
    pow2_scales: bool = False,
    with_norm: bool = False,
    weight_offset: float = 0.0,
) -> tuple[torch.Tensor, ...]: ...
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
    numerics: NumericsPolicy | None = None,
    max_sms: int | None = None,
    quantize: Quantize | None = None,
    scales_layout: Literal["row", "column"] = "row",
    pow2_scales: bool = False,
    with_norm: bool = False,
    weight_offset: float = 0.0,
) -> tuple[torch.Tensor, ...]:
    """Sum `x` over all ranks of `group`, add bias and residual, and take the RMS norm over the last dimension.

    With s the sum, rounded to `x`'s dtype as `all_reduce` rounds it:

        residual_out = s + bias + residual                                    added in fp32, rounded once
        y = residual_out / sqrt(mean(residual_out²) + eps) · weight           from the rounded residual_out, in fp32

    With `quantize` the result is y in fp8 e4m3, saturated. Scales that are made here follow from y rounded to `x`'s
    dtype, over a row (`token`) or each 128 columns of it (`group128`):

        scales = max(max(abs(y)), 1e-10) / 448,     out = y · (1 / scales),     so that y ≈ out · scales

    Where y has an infinity the scale is infinite, where it has a NaN the scale is NaN.

    Args:
        x: partial sums, [..., hidden], any strides. Kernels take bf16, fp16 and fp32; fp64 runs the variant `library`.
            The same shape and dtype on every rank. Left as it is.
        weight: [hidden], of `x`'s dtype. As bias, residual, eps and scale the same on every rank for the results to be.
        bias: [hidden], added to every row of the sum, or of `x`'s shape; of `x`'s dtype. None adds nothing.
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
        quantize: `tensor` divides y by `scale`, as `out_dtype` does; `token` makes a scale for every row, [..., 1];
            `group128` one for every 128 columns of a row, [..., hidden / 128], hidden a multiple of 128. None: y in
            `x`'s dtype.
        scales_layout: `row` for contiguous scales; `column`, with `group128`, for the same shape with the scales of a
            group of columns one after another, each group at a multiple of 16 bytes, as grouped GEMMs read them.
        pow2_scales: with `group128`, scales are rounded up to powers of two.
        with_norm: with `quantize`, the norm in `x`'s dtype is returned, too.
        weight_offset: added to the weight in fp32: 1.0 for models that store weight − 1.

    Returns:
        (y, residual_out): what was given, or new contiguous tensors. With `quantize` the scales that were made follow,
        in fp32, and then the norm, if it is wanted.

    Raises:
        NotInitializedError, GroupError, UnsupportedInputError, InfeasibleError, PeerTimeoutError: as in `all_reduce`.

    On GPUs rows that are no multiple of 16 bytes, or longer than 32 KiB, run the variant `library`. Can be captured in
    CUDA graphs; enqueues on the current stream; never synchronises the host. There is a gradient without `quantize` and
    `weight_offset`, and with a bias of `x`'s shape if there is no residual.
    """
    if _is_full(bias) and residual is None and bias.shape == x.shape:  # type: ignore[union-attr]
        bias, residual = None, bias
    if quantize is not None or weight_offset or with_norm or pow2_scales or scales_layout != "row" or _is_full(bias):
        quantize = _quantize_of(quantize, out_dtype, with_norm=with_norm)
        is_basic = quantize in (None, "tensor") and not (with_norm or weight_offset or pow2_scales or _is_full(bias))
        if not is_basic or scales_layout != "row":
            options = (eps, quantize or "", scales_layout, pow2_scales, with_norm, weight_offset)
            tensors = (x, weight, bias, residual, scale, out, residual_out, None, None)
            y, held, scales, norm = rms_norm_quantized(tensors, options, group, numerics, max_sms)
            found: tuple[torch.Tensor, ...] = (y, held)
            if quantize in ("token", "group128"):
                if scales_layout == "column":
                    scales = scales.t()[: math.prod(x.shape[:-1])].view(*x.shape[:-1], scales.shape[0])
                found = (*found, scales)
            return (*found, norm) if with_norm else found
        out_dtype = torch.float8_e4m3fn
    if not is_dynamo_compiling():
        fast = _all_reduce_rms_norm.last.get(world._default_pg if group is None else group)
        if fast is not None:
            result = fast(x, weight, bias, residual, scale, out, residual_out, eps, out_dtype, numerics, max_sms)
            if result is not None:
                return result
    return _all_reduce_rms_norm.call(
        (x, weight, bias, residual, scale, out, residual_out), (eps, out_dtype), group, numerics, max_sms
    )


def _quantize_of(quantize: Quantize | None, out_dtype: torch.dtype | None, *, with_norm: bool) -> Quantize | None:
    """The form of a call by either argument."""
    if out_dtype not in (None, torch.float8_e4m3fn):
        raise UnsupportedInputError(f"out_dtype={out_dtype!r} is neither None (x's dtype) nor torch.float8_e4m3fn")
    found = "tensor" if quantize is None and out_dtype is not None else quantize
    if with_norm and found is None:
        raise UnsupportedInputError("with_norm=True is for results in fp8; without quantize= y is the norm itself")
    return found


def run_rms_norm(problem: Problem, inputs: Tensors, outputs: Tensors) -> None:
    """The public call that asks for `problem` on the default group."""
    given, form, (out, residual_out, *more) = given_of(problem, inputs), form_of(problem), outputs
    if form.is_basic:
        all_reduce_rms_norm(
            given.x, given.weight, bias=given.bias, residual=given.residual, out=out, residual_out=residual_out,
            out_dtype=torch.float8_e4m3fn if problem.scaling else None, scale=given.scale,
        )  # fmt: skip
        return
    quantize = next(name for name, value in QUANTIZE.items() if value == form.quantize)
    options = (EPS, quantize, "column" if form.columns else "row", form.pow2, form.norm, given.offset)
    shape = form.scales_shape(*problem.shape)
    tensors = (*given[:5], out, residual_out, more[0].as_strided(shape, stride_of(shape)), more[1])
    rms_norm_quantized(tensors, options, world._default_pg, "default", None)
