"""The collectives: reductions, gathers, exchanges, `broadcast`, and `all_reduce_bias`.

Each op is a small `OpAdapter` that says what it takes, and a public function that runs the last call's fast call or,
where that returns None or the group has none, hands over to the op's `CallPath`. The functions repeat these few lines
because a call shared by them would cost what fast calls save.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Hashable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, overload

import torch
import torch.distributed as dist
from torch.compiler import is_dynamo_compiling

from tunedcomm.dispatch.decide import check_limit
from tunedcomm.errors import UnsupportedInputError
from tunedcomm.fp8 import Wire
from tunedcomm.kernels.all_gather.several import MAX_TENSORS, aligned
from tunedcomm.kernels.all_to_all.op import layout_of, row_numel
from tunedcomm.kernels.common.packets import alignment_of
from tunedcomm.kernels.common.reference import WIDE
from tunedcomm.ops import autograd
from tunedcomm.ops.adapter import CallArguments, Group, OpAdapter, Results, Tensors, TorchCall, TorchServe, problem_of
from tunedcomm.ops.arguments import (
    FLOATS,
    INTEGERS,
    MOVED,
    check_bias,
    check_dtype,
    check_input,
    check_plain,
    check_reduction,
    check_wire,
    is_wide,
    normal_dim,
    reduction_name,
    refuse_async,
    refuse_wide,
)
from tunedcomm.ops.call import CallPath
from tunedcomm.ops.fast_call import world
from tunedcomm.spec import NumericsPolicy, Problem

if TYPE_CHECKING:
    from tunedcomm.dispatch.communicator import Communicator


_REDUCED = {**FLOATS, **INTEGERS}
_REDUCTIONS = ("sum", "avg", "max", "min")
_LINEAR = ("sum", "avg")
_HALVES = {dtype: name for dtype, name in FLOATS.items() if dtype.itemsize == 2}
# Names in problems of dtypes that `MOVED` lacks: the integer of their size, for bytes are bytes.
_BY_SIZE = {1: "uint8", 2: "int16", 4: "int32", 8: "int64"}
_WIDEST = 8


class _Reduction(OpAdapter):
    """An op that does nothing but reduce; the first option says how."""

    depends_on_memory = True

    def check(self, inputs: Tensors, options: Any, world_size: int) -> None:
        check_dtype(self.op, inputs[0], _REDUCED, ", whose sum and avg are the same")
        check_reduction(options[0], inputs[0], _REDUCTIONS)

    def call_of(self, problem: Problem, inputs: Tensors, outputs: Tensors) -> tuple[Tensors, tuple[Any, ...]]:
        return (*inputs, *outputs), (problem.reduction, 0)[: len(self.options)]

    def asks_for(self, problem: Problem) -> bool:
        return not (problem.layout or problem.scaling)

    def refusal(self, inputs: Tensors, options: Any) -> str:
        return "" if options[0] in _LINEAR else f"{self.op} with op={options[0]!r}"


class _AllReduce(_Reduction):
    op = "all_reduce"
    options: tuple[str, ...] = ("str op",)
    aliases = {"out": "x"}  # noqa: RUF012 - never changed
    gradient = autograd.keep_nothing, autograd.all_reduce
    torch_operators: tuple[str, ...] = (
        "c10d::allreduce_",
        "c10d::allreduce_coalesced_",
        "_c10d_functional::all_reduce",
        "_c10d_functional::all_reduce_",
        "_c10d_functional::all_reduce_coalesced",
        "_c10d_functional::all_reduce_coalesced_",
    )

    def serve_torch(self, call: TorchCall) -> TorchServe | None:
        return None if call.arguments.get("sparse_indices") is not None else TorchServe((call.reduction,), call.x)

    def problem(self, inputs: Tensors, options: Any, world_size: int) -> Problem:
        x = inputs[0]
        return problem_of(self.op, (x.numel(),), _REDUCED[x.dtype], world_size, reduction=options[0], mode="eager")


_all_reduce: CallPath[torch.Tensor] = CallPath(_AllReduce())


class _Wide(_Reduction):
    """A reduction of 16-bit floats with fp32 results, mixed in before the reduction's own adapter."""

    suffix = "_fp32"
    torch_operators: tuple[str, ...] = ()

    def asks_for(self, problem: Problem) -> bool:
        return problem.layout == WIDE

    def check(self, inputs: Tensors, options: Any, world_size: int) -> None:
        super().check(inputs, options, world_size)
        check_dtype(self.operator, inputs[0], _HALVES)
        check_reduction(options[0], inputs[0], _LINEAR)

    def problem(self, inputs: Tensors, options: Any, world_size: int) -> Problem:
        plain: Any = super()
        return _widened(plain.problem(inputs, options, world_size))

    def results(self, inputs: Tensors, options: Any, world_size: int) -> Results:
        return [(shape, torch.float32) for shape, _ in super().results(inputs, options, world_size)]

    def single_rank_result(self, inputs: Tensors, options: Any) -> Tensors:
        return (inputs[0].float(),)


@functools.lru_cache(1024)
def _widened(problem: Problem) -> Problem:
    return replace(problem, layout=WIDE)


class _AllReduceWide(_Wide, _AllReduce):
    aliases = {}  # noqa: RUF012 - never changed


_all_reduce_wide: CallPath[torch.Tensor] = CallPath(_AllReduceWide())


@functools.lru_cache(1024)
def _on_wire(problem: Problem, wire: str) -> Problem:
    return replace(problem, scaling=wire)


class _Wire(OpAdapter):
    """An op with payloads that travel quantised, mixed in before its own adapter; the last option names the wire."""

    suffix = "_wire"
    depends_on_memory = False
    torch_operators: tuple[str, ...] = ()

    def asks_for(self, problem: Problem) -> bool:
        return bool(problem.scaling)

    def check(self, inputs: Tensors, options: Any, world_size: int) -> None:
        plain: Any = super()
        plain.check(inputs, options, world_size)
        check_wire(self.op, inputs[0], options[-1])
        if isinstance(self, _Reduction):
            check_reduction(options[0], inputs[0], _LINEAR)

    def problem(self, inputs: Tensors, options: Any, world_size: int) -> Problem:
        plain: Any = super()
        return _on_wire(plain.problem(inputs, options, world_size), options[-1])

    def call_of(self, problem: Problem, inputs: Tensors, outputs: Tensors) -> tuple[Tensors, tuple[Any, ...]]:
        tensors, options = super().call_of(problem, inputs, outputs)
        return tensors, (*options[: len(self.options) - 1], problem.scaling)

    def under_policy(self, problem: Problem, policy: NumericsPolicy) -> Problem:
        return replace(problem, scaling="") if policy == "ordered" else problem


class _AllReduceWire(_Wire, _AllReduce):
    options = ("str op", "str wire")


_all_reduce_wire: CallPath[torch.Tensor] = CallPath(_AllReduceWire())


def all_reduce(
    x: torch.Tensor,
    *,
    op: str | dist.ReduceOp.RedOpType = "sum",
    group: dist.ProcessGroup | None = None,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    wire: Wire | None = None,
    numerics: NumericsPolicy | None = None,
    max_sms: int | None = None,
    async_op: bool = False,
) -> torch.Tensor:
    """Reduce `x` elementwise over all ranks of `group`; every rank gets the result.

    Args:
        x: any shape, any strides. Kernels take bf16, fp16 and fp32; fp64, int8, uint8, int32 and int64 run the variant
            `library` on GPUs. The same number of elements and dtype on every rank. Left as it is unless `out` is `x`.
        op: `sum`, `avg`, `max`, `min` or torch's `ReduceOp` of that name; `avg` not for integers. Kernels do `sum` and
            `avg`, the variant `library` does all.
        group: process group; None is the default group. Its first call is collective set-up: all ranks make it, outside
            of graph captures.
        out: where to write: same shape, dtype and device as `x`, any strides; may be `x`. None allocates it.
        out_dtype: dtype of the result, the same on every rank: `torch.float32` for the sum or mean of bf16 or fp16,
            which is made in fp32 and never rounded. `out` then has that dtype, and may not be `x`. None: `x`'s.
        wire: how payloads travel, the same on every rank: `fp8_group128` or `int8_group128` quantises every 128
            elements of bf16, fp16 or fp32 with a scale of their own; see [quantised wires](ops.md#quantised-wires).
            Sums and means alone. All ranks get the same bits, which depend on the variant. The variant `library`, which
            serves what is not tuned, quantises nothing, and neither does a call under `ordered`. 128 elements with a
            NaN or an infinity all become NaN. Gradients are not quantised. None: as they are.
        numerics: classes of variants that may run: `default` admits `ordered` and `library`, `ordered` that one alone,
            `any` all. Ordered: summed in fp32 in rank order, rounded once at the end; the bits do not depend on tuning.
        max_sms: upper limit on the kernel's SMs, a whole number, the same on every rank, for callers that compute
            beside it. The best candidate within it runs, or, if there is none, the variant `library`, which ignores it.
            None: no limit.
        async_op: False, as in `torch.distributed`. Calls are enqueued on the current stream and return tensors;
            `tunedcomm.intercept` serves calls of `torch.distributed` that return a work object.

    Returns:
        `out`, or a new contiguous tensor of `x`'s shape, and dtype unless `out_dtype` says otherwise.

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
    try:
        if not (async_op or out_dtype or wire is not None or is_dynamo_compiling()):
            fast = _all_reduce.last_fast_calls[world._default_pg if group is None else group]
            if (result := fast(x, out, op, numerics, max_sms)) is not None:
                return result
        refuse_async("all_reduce", async_op)
        if wire is not None:
            refuse_wide("all_reduce", x, out_dtype)
            return _all_reduce_wire.call((x, out), (reduction_name(op), wire), group, numerics, max_sms)
        if is_wide("all_reduce", x, out_dtype):
            return _all_reduce_wide.call((x, out), (reduction_name(op),), group, numerics, max_sms)
        return _all_reduce.call((x, out), (reduction_name(op),), group, numerics, max_sms)
    except BaseException as error:
        _all_reduce.on_error(error, x, group)
        raise


def all_reduce_(
    x: torch.Tensor,
    *,
    op: str | dist.ReduceOp.RedOpType = "sum",
    group: dist.ProcessGroup | None = None,
    wire: Wire | None = None,
    numerics: NumericsPolicy | None = None,
    max_sms: int | None = None,
    async_op: bool = False,
) -> torch.Tensor:
    """`all_reduce` in place: `x` holds the result and is returned."""
    try:
        return all_reduce(
            x, op=op, group=group, out=x, wire=wire, numerics=numerics, max_sms=max_sms, async_op=async_op
        )
    except BaseException as error:
        _all_reduce.on_error(error, x, group)
        raise


def _leads(x: torch.Tensor, dim: int) -> bool:
    """True if nothing but dimensions of one element comes before `dim`: its chunks lie one after another."""
    return all(extent == 1 for extent in x.shape[: dim % max(x.dim(), 1)])


def _bytes_problem(op: str, x: torch.Tensor, world_size: int) -> Problem:
    """The problem of an op that moves tensors of any dtype."""
    size = x.element_size()
    dtype = MOVED.get(x.dtype) or _BY_SIZE[min(size, _WIDEST)]
    return problem_of(op, (x.numel() * max(size // _WIDEST, 1),), dtype, world_size, reduction="", mode="eager")


class _AllGather(OpAdapter):
    """Kernels gather along the first dimension that is longer than 1; along others their result is permuted."""

    op = "all_gather"
    options: tuple[str, ...] = ("int dim",)
    reduces = False
    depends_on_memory = True
    gradient = autograd.keep_nothing, autograd.all_gather
    torch_operators: tuple[str, ...] = (
        "c10d::_allgather_base_",
        "c10d::allgather_into_tensor_coalesced_",
        "_c10d_functional::all_gather_into_tensor_coalesced",
        "c10d::allgather_",
        "_c10d_functional::all_gather_into_tensor",
        "_c10d_functional::all_gather_into_tensor_out",
    )

    def serve_torch(self, call: TorchCall) -> TorchServe | None:
        like = call.x if call.out is None else call.flat
        return TorchServe((0,), like) if call.gives(call.world_size, 1) else None

    def check(self, inputs: Tensors, options: Any, world_size: int) -> None:
        normal_dim(self.op, inputs[0], options[0])
        if inputs[0].is_quantized:
            raise UnsupportedInputError(
                f"{self.op} does not take {inputs[0].dtype}; gather x.int_repr() and its scales"
            )

    def asks_for(self, problem: Problem) -> bool:
        return not problem.scaling

    def problem(self, inputs: Tensors, options: Any, world_size: int) -> Problem:
        return _bytes_problem(self.op, inputs[0], world_size)

    def call_of(self, problem: Problem, inputs: Tensors, outputs: Tensors) -> tuple[Tensors, tuple[Any, ...]]:
        return (*inputs, *outputs), (0,)

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

    def may_hold_input(self, inputs: Tensors, options: Any, output: torch.Tensor, rank: int) -> bool:
        x = inputs[0]
        whole = x.is_contiguous() and output.is_contiguous() and self.is_direct(inputs, options)
        return whole and x.data_ptr() - output.data_ptr() == rank * x.nbytes

    def as_result(self, written: torch.Tensor, inputs: Tensors, options: Any, world_size: int) -> torch.Tensor:
        x = inputs[0]
        # The dimension stays split by rank: merged, it would be a copy more.
        return written.view(world_size, *x.shape).movedim(0, options[0] % x.dim())


_all_gather: CallPath[torch.Tensor] = CallPath(_AllGather())


class _AllGatherWire(_Wire, _AllGather):
    options = ("int dim", "str wire")
    reduces = True  # `ordered` excludes a wire
    gradient = autograd.keep_nothing, autograd.all_gather_wire

    def may_hold_input(self, inputs: Tensors, options: Any, output: torch.Tensor, rank: int) -> bool:
        """Never: the rank's own part of the result is quantised, too."""
        return False


_all_gather_wire: CallPath[torch.Tensor] = CallPath(_AllGatherWire())


class _AllGatherList(OpAdapter):
    """Of lists of one length; the options are the bytes of each tensor and the dimension."""

    op = "all_gather_list"
    options = ("int[] sizes", "int dim")
    reduces = False
    has_operator = False

    def __init__(self, length: int) -> None:
        self.inputs = tuple(f"x{index}" for index in range(length))
        self.outputs = tuple(f"out{index}" for index in range(length))
        self.suffix = f"_{length}"

    def asks_for(self, problem: Problem) -> bool:
        return len(self.inputs) == _SAMPLE_LENGTH

    def check(self, inputs: Tensors, options: Any, world_size: int) -> None:
        for x in inputs:
            _all_gather.adapter.check((x,), options[1:], world_size)
        if (sizes := [x.nbytes for x in inputs]) != list(options[0]):
            raise UnsupportedInputError(f"{self.op} of tensors of {sizes} bytes was called for {list(options[0])}")

    def problem(self, inputs: Tensors, options: Any, world_size: int) -> Problem:
        sizes = options[0]
        layout = str(min(map(alignment_of, sizes)))
        nbytes = sum(map(aligned, sizes))
        return problem_of(self.op, (nbytes,), "uint8", world_size, reduction="", layout=layout, mode="eager")

    def results(self, inputs: Tensors, options: Any, world_size: int) -> Results:
        return [_all_gather.adapter.results((x,), options[1:], world_size)[0] for x in inputs]

    def call_of(self, problem: Problem, inputs: Tensors, outputs: Tensors) -> tuple[Tensors, tuple[Any, ...]]:
        return (*inputs, *outputs), (tuple(x.nbytes for x in inputs), 0)

    def key(self, tensors: Tensors) -> Hashable:
        return tuple((tuple(x.shape), x.dtype) for x in tensors[: len(self.inputs)])

    def needs_no_peers(self, inputs: Tensors, results: Tensors, options: Any) -> bool:
        return not any(options[0])

    def scalar_args(self, options: Any) -> Any:
        return options[:1]

    def single_rank_result(self, inputs: Tensors, options: Any) -> Tensors:
        return inputs


_SAMPLE_LENGTH = 3
_list_path = functools.cache(lambda length: CallPath[Any](_AllGatherList(length)))
_list_path(_SAMPLE_LENGTH)
# Bytes of a rank up to which one launch takes several tensors; above it each has the kernel that suits its size.
_MAX_LIST_BYTES = 1 << 20


def all_gather_list(
    xs: Sequence[torch.Tensor],
    *,
    dim: int = 0,
    group: dist.ProcessGroup | None = None,
    out: Sequence[torch.Tensor | None] | None = None,
    max_sms: int | None = None,
) -> list[torch.Tensor]:
    """Gather several tensors, whose dtypes may differ, as `all_gather` does each; `all_gather` of a list is the same.

    One launch gathers up to 8 tensors of at most 1 MiB a rank in all, if along `dim` the parts of each lie one after
    another. Others, and compiled calls, are gathered one by one.

    Args:
        xs: tensors as of `all_gather`; the same shapes and dtypes on every rank. Left as they are.
        dim: as in `all_gather`, of every tensor.
        group: as in `all_reduce`.
        out: where to write, one for each tensor, as of `all_gather`. None allocates them.
        max_sms: as in `all_reduce`.

    Returns:
        The results of `all_gather`, in order.

    Raises:
        NotInitializedError, GroupError, UnsupportedInputError, InfeasibleError, PeerTimeoutError: as in `all_reduce`.

    Every bit comes through as it was sent. Has no gradient: tensors that go one by one have `all_gather`'s. Can be
    captured in CUDA graphs; enqueues on the current stream; never synchronises the host.
    """
    x = xs[0] if len(xs) else None
    try:
        given = [None] * len(xs) if out is None else list(out)
        if len(given) != len(xs):
            raise UnsupportedInputError(f"{len(xs)} tensors and {len(given)} outputs; pass an out for each, or none")
        for x in xs:
            check_input("all_gather_list", x)
        is_small = sum(x.nbytes for x in xs) <= _MAX_LIST_BYTES and 1 < len(xs) <= MAX_TENSORS
        lie_together = all(_leads(x, normal_dim("all_gather_list", x, dim)) for x in xs)
        if is_dynamo_compiling() or not (is_small and lie_together):
            pairs = zip(xs, given, strict=True)
            return [all_gather(x, dim=dim, group=group, out=y, max_sms=max_sms) for x, y in pairs]
        check_plain("all_gather_list", (*xs, *given))
        group = world._default_pg if group is None else group
        options = (tuple(x.nbytes for x in xs), dim)
        results: Sequence[torch.Tensor] = _list_path(len(xs)).serve_again(
            (*xs, *given), options, group, "default", max_sms
        )
        return list(results)
    except BaseException as error:
        _list_path(_SAMPLE_LENGTH).on_error(error, x, group)
        raise


@overload
def all_gather(
    x: torch.Tensor,
    *,
    dim: int = 0,
    group: dist.ProcessGroup | None = None,
    out: torch.Tensor | None = None,
    wire: Wire | None = None,
    max_sms: int | None = None,
    async_op: bool = False,
) -> torch.Tensor: ...


@overload
def all_gather(
    x: Sequence[torch.Tensor],
    *,
    dim: int = 0,
    group: dist.ProcessGroup | None = None,
    out: Sequence[torch.Tensor] | None = None,
    max_sms: int | None = None,
    async_op: bool = False,
) -> list[torch.Tensor]: ...


def all_gather(
    x: torch.Tensor | Sequence[torch.Tensor],
    *,
    dim: int = 0,
    group: dist.ProcessGroup | None = None,
    out: torch.Tensor | Sequence[torch.Tensor] | None = None,
    wire: Wire | None = None,
    max_sms: int | None = None,
    async_op: bool = False,
) -> torch.Tensor | list[torch.Tensor]:
    """Concatenate the tensors of all ranks of `group` along `dim`, in rank order; every rank gets the result.

    Args:
        x: any shape, any strides, any dtype but quantized ones; the same shape and dtype on every rank. A tensor
            without dimensions counts as one of one element. Left as it is. Gathering along another dimension than the
            first that is longer than 1 costs a copy of the result. Or a list of tensors, for `all_gather_list`.
        dim: dimension along which to concatenate, from the end if negative.
        group: as in `all_reduce`.
        out: where to write: of the result's shape, dtype and device, any strides; must not overlap `x`, but `x` may be
            this rank's own part of it, on every rank alike and not in symmetric memory. None allocates it.
        wire: as in `all_reduce`, of one tensor. The own part, too, arrives as quantised. None: every bit arrives.
        max_sms: as in `all_reduce`. 0 admits copy engines alone.
        async_op: as in `all_reduce`.

    Returns:
        `out`, or a new contiguous tensor of `x`'s shape and dtype with `dim` `world_size` times as long. Of a list a
        list of these.

    Raises:
        NotInitializedError, GroupError, UnsupportedInputError, InfeasibleError, PeerTimeoutError: as in `all_reduce`.

    Moves bytes, unless `wire` is given: every bit arrives as it was, NaN payloads and the sign of zeros included. Can
    be captured in CUDA graphs; enqueues on the current stream; never synchronises the host.
    """
    try:
        if not (async_op or wire is not None or is_dynamo_compiling()):
            fast = _all_gather.last_fast_calls[world._default_pg if group is None else group]
            if (result := fast(x, out, dim, "default", max_sms)) is not None:
                return result
        refuse_async("all_gather", async_op)
        if wire is not None:
            check_input("all_gather with a wire", x)
            return _all_gather_wire.call((x, out), (dim, wire), group, None, max_sms)
        if isinstance(x, (list, tuple)):
            return all_gather_list(x, dim=dim, group=group, out=out, max_sms=max_sms)  # type: ignore[arg-type]
        return _all_gather.call((x, out), (dim,), group, "default", max_sms)
    except BaseException as error:
        _all_gather.on_error(error, x[0] if isinstance(x, (list, tuple)) and x else x, group)
        raise


class _Broadcast(OpAdapter):
    """The option is the root's rank within the group."""

    op = "broadcast"
    options = ("int root",)
    aliases = {"out": "x"}  # noqa: RUF012 - never changed
    reduces = False
    gradient = autograd.keep_nothing, autograd.broadcast
    torch_operators = ("c10d::broadcast_", "_c10d_functional::broadcast", "_c10d_functional::broadcast_")

    def serve_torch(self, call: TorchCall) -> TorchServe | None:
        root = call.arguments.get("root_rank", call.arguments.get("src"))
        return TorchServe((root,), call.x)

    def check(self, inputs: Tensors, options: Any, world_size: int) -> None:
        root = options[0]
        if not isinstance(root, int) or isinstance(root, bool) or not 0 <= root < world_size:
            raise UnsupportedInputError(
                f"{self.op} from rank {root!r} of a group of {world_size}; pass one from 0 to {world_size - 1}"
            )
        if inputs[0].is_quantized:
            raise UnsupportedInputError(f"{self.op} does not take {inputs[0].dtype}; send x.int_repr() and its scales")

    def problem(self, inputs: Tensors, options: Any, world_size: int) -> Problem:
        return _bytes_problem(self.op, inputs[0], world_size)

    def call_of(self, problem: Problem, inputs: Tensors, outputs: Tensors) -> tuple[Tensors, tuple[Any, ...]]:
        return (inputs[0], *outputs), (int(inputs[1]),)

    def refusal(self, inputs: Tensors, options: Any) -> str:
        return "" if inputs[0].dtype in FLOATS else f"{self.op} of {inputs[0].dtype}"

    def scalars(self, inputs: Tensors, options: Any) -> Tensors:
        return (options[0],)

    def scalar_args(self, options: Any) -> tuple[int, ...]:
        return (options[0],)


_broadcast: CallPath[torch.Tensor] = CallPath(_Broadcast())


def broadcast(
    x: torch.Tensor,
    src: int = 0,
    *,
    group: dist.ProcessGroup | None = None,
    out: torch.Tensor | None = None,
    group_src: int | None = None,
    max_sms: int | None = None,
    async_op: bool = False,
) -> torch.Tensor:
    """Give every rank of `group` the tensor of one of them.

    Args:
        x: any shape, any strides, any dtype but quantized ones; the same shape and dtype on every rank. Only the
            root's values are read. Left as it is unless `out` is `x`.
        src: the root, by its rank in the default group.
        group: as in `all_reduce`.
        out: where to write: same shape, dtype and device as `x`, any strides; may be `x`, as in `torch.distributed`.
            None allocates it.
        group_src: the root, by its rank within `group`; `src` is ignored then.
        max_sms: as in `all_reduce`.
        async_op: as in `all_reduce`.

    Returns:
        `out`, or a new contiguous tensor of `x`'s shape and dtype.

    Raises:
        NotInitializedError, GroupError, UnsupportedInputError, InfeasibleError, PeerTimeoutError: as in `all_reduce`.

    Moves bytes: every bit arrives as it was sent. The gradient of the root's `x` is the sum of all ranks' gradients, of
    other ranks' `x` zero; if the root's `x` needs a gradient, so must every rank's, for all take part in the sum.
    TUNEDCOMM_NAN_CHECK does not look at it. Can be captured in CUDA graphs; enqueues on the current stream; never
    synchronises the host.
    """
    try:
        root = _root_of(src, group) if group_src is None else group_src
        if not (async_op or is_dynamo_compiling()):
            fast = _broadcast.last_fast_calls[world._default_pg if group is None else group]
            if (result := fast(x, out, root, "default", max_sms)) is not None:
                return result
        refuse_async("broadcast", async_op)
        return _broadcast.call((x, out), (root,), group, "default", max_sms)
    except BaseException as error:
        _broadcast.on_error(error, x, group)
        raise


def _root_of(src: int, group: Group) -> int:
    """The rank within the group of a rank of the default group."""
    if not isinstance(group, dist.ProcessGroup) or group is dist.group.WORLD:
        return src
    try:
        ranks = dist.get_process_group_ranks(group)
    except KeyError:  # the group was destroyed, which the call will say
        return src
    if src not in ranks:
        raise UnsupportedInputError(f"broadcast from src={src}, which is not one of the group's ranks {ranks}")
    return ranks.index(src)


class _ReduceScatter(_Reduction):
    """A result is one chunk of the input along the dimension."""

    op = "reduce_scatter"
    options: tuple[str, ...] = ("str op", "int dim")
    gradient = autograd.keep_nothing, autograd.reduce_scatter
    torch_operators: tuple[str, ...] = (
        "c10d::_reduce_scatter_base_",
        "c10d::reduce_scatter_tensor_coalesced_",
        "_c10d_functional::reduce_scatter_tensor_coalesced",
        "_c10d_functional::reduce_scatter_tensor",
        "_c10d_functional::reduce_scatter_tensor_out",
    )

    def serve_torch(self, call: TorchCall) -> TorchServe | None:
        like = call.x if call.out is None else call.flat
        return TorchServe((call.reduction, 0), like) if call.gives(1, call.world_size) else None

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

    def as_result(self, written: torch.Tensor, inputs: Tensors, options: Any, world_size: int) -> torch.Tensor:
        moved = list(inputs[0].movedim(options[1], 0).shape)
        return written.view(moved[0] // world_size, *moved[1:]).movedim(0, options[1])


_reduce_scatter: CallPath[torch.Tensor] = CallPath(_ReduceScatter())


class _ReduceScatterWide(_Wide, _ReduceScatter):
    """The reduce_scatter with fp32 results."""


_reduce_scatter_wide: CallPath[torch.Tensor] = CallPath(_ReduceScatterWide())


class _ReduceScatterWire(_Wire, _ReduceScatter):
    options = ("str op", "int dim", "str wire")


_reduce_scatter_wire: CallPath[torch.Tensor] = CallPath(_ReduceScatterWire())


def reduce_scatter(
    x: torch.Tensor,
    *,
    op: str | dist.ReduceOp.RedOpType = "sum",
    dim: int = 0,
    group: dist.ProcessGroup | None = None,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    wire: Wire | None = None,
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
        out_dtype: as in `all_reduce`: `torch.float32` gives the fp32 sums of bf16 or fp16, as gradients want them.
        wire: as in `all_reduce`; groups of 128 begin with each chunk.
        numerics: as in `all_reduce`. Ordered: summed in fp32 in rank order, rounded once at the end; the bits do not
            depend on tuning and equal the same part of an ordered `all_reduce`.
        max_sms: as in `all_reduce`.
        async_op: as in `all_reduce`.

    Returns:
        `out`, or a new contiguous tensor of `x`'s dtype or `out_dtype`, `dim` divided by the group's size.

    Raises:
        NotInitializedError, GroupError, UnsupportedInputError, InfeasibleError, PeerTimeoutError: as in `all_reduce`.

    Can be captured in CUDA graphs; enqueues on the current stream; never synchronises the host.
    """
    try:
        if not (async_op or out_dtype or wire is not None or is_dynamo_compiling()):
            fast = _reduce_scatter.last_fast_calls[world._default_pg if group is None else group]
            if (result := fast(x, out, op, dim, numerics, max_sms)) is not None:
                return result
        refuse_async("reduce_scatter", async_op)
        if wire is not None:
            refuse_wide("reduce_scatter", x, out_dtype)
            return _reduce_scatter_wire.call((x, out), (reduction_name(op), dim, wire), group, numerics, max_sms)
        if is_wide("reduce_scatter", x, out_dtype):
            return _reduce_scatter_wide.call((x, out), (reduction_name(op), dim), group, numerics, max_sms)
        return _reduce_scatter.call((x, out), (reduction_name(op), dim), group, numerics, max_sms)
    except BaseException as error:
        _reduce_scatter.on_error(error, x, group)
        raise


class _AllToAll(OpAdapter):
    """Chunks lie one after another along dimension 0, in the input as in the result."""

    op = "all_to_all"
    reduces = False
    depends_on_memory = True
    gradient = autograd.keep_nothing, autograd.all_to_all
    torch_operators = ("c10d::alltoall_base_",)

    def serve_torch(self, call: TorchCall) -> TorchServe | None:
        x, arguments = call.x, call.arguments
        if arguments["output_split_sizes"] or arguments["input_split_sizes"] or x.dim() == 0:
            return None
        return TorchServe((), call.flat) if call.gives(1, 1) and not x.shape[0] % call.world_size else None

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
    try:
        if not (async_op or is_dynamo_compiling()):
            fast = _all_to_all.last_fast_calls[world._default_pg if group is None else group]
            if (result := fast(x, out, "default", max_sms)) is not None:
                return result
        refuse_async("all_to_all", async_op)
        return _all_to_all.call((x, out), (), group, "default", max_sms)
    except BaseException as error:
        _all_to_all.on_error(error, x, group)
        raise


class _AllToAllV(OpAdapter):
    """The options are the rows for and from each rank, and their bound; the problem depends on the bound alone."""

    op = "all_to_all_v"
    options = ("int[] send_counts", "int[] recv_counts", "int? max_count")
    reduces = False
    has_operator = False
    repeats = False
    torch_operators = ("c10d::alltoall_base_", "_c10d_functional::all_to_all_single")

    def serve_torch(self, call: TorchCall) -> TorchServe | None:
        x, out, sizes = call.x, call.out, [call.arguments[f"{side}_split_sizes"] for side in ("input", "output")]
        # Split sizes that are equal on this rank need not be so on others: ranks share only that there are any.
        if x.is_nested or x.dim() == 0 or not (out is None or any(sizes)):
            return None
        if out is not None and (out.dtype != x.dtype or out.device != x.device):
            return None
        send, receive = (
            list(given) if given or rows is None else [rows.shape[0] // call.world_size] * call.world_size
            for given, rows in zip(sizes, (x, out), strict=True)
        )
        like = x  # one row: ranks have different numbers of rows
        if x.layout is torch.strided:
            like = x.detach()[:1] if x.shape[0] else x.detach().new_empty((1, *x.shape[1:]))
        return TorchServe(
            (send, receive, call.max_count), like, counts_elements=False, common=(None, None, call.max_count)
        )

    def torch_refusal(self, x: torch.Tensor, options: Any) -> str:
        if options[2] is None:
            return "rows by split sizes, and ranks do not know each other's; a bound is intercept()'s max_count"
        return "" if options[2] and math.prod(x.shape[1:]) else "nothing moves"

    def check_own(self, options: Any, communicator: Communicator) -> Any:
        rank, world_size, max_count = communicator.rank, communicator.world_size, options[2]
        try:
            send, recv = (
                tuple(_counts(name, counts, world_size, max_count))
                for name, counts in zip(("send_counts", "recv_counts"), options, strict=False)
            )
            if send[rank] != recv[rank]:
                raise UnsupportedInputError(
                    f"rank {rank} sends itself {send[rank]} rows and expects {recv[rank]} of itself; send_counts and "
                    "recv_counts must be equal there"
                )
        except UnsupportedInputError as refusal:
            communicator.refuse_call(refusal)
        return send, recv, max_count

    def check(self, inputs: Tensors, options: Any, world_size: int) -> None:
        x, send = inputs[0], options[0]
        check_dtype(self.op, x, MOVED)
        if send is not None and (x.dim() == 0 or x.shape[0] != sum(send)):  # None: planned for any counts
            refusal = UnsupportedInputError(
                f"send_counts={list(send)} names {sum(send)} rows, but x has shape {tuple(x.shape)}; its dimension 0 "
                "must be their sum"
            )
            refusal.ends_group = world_size > 1  # the counts are this rank's own
            raise refusal

    def problem(self, inputs: Tensors, options: Any, world_size: int) -> Problem:
        return _rows_problem(math.prod(inputs[0].shape[1:]), inputs[0].dtype, options[2], world_size)

    def call_of(self, problem: Problem, inputs: Tensors, outputs: Tensors) -> tuple[Tensors, tuple[Any, ...]]:
        (x, *counts), row = inputs, row_numel(problem)
        send, recv = (tuple(count // row for count in each.tolist()) for each in counts)
        return (x.view(-1, row), outputs[0].view(-1, row)), (send, recv, problem.numel // row)

    def common_options(self, options: Any) -> Any:
        return options[2:]

    def is_bounded(self, options: Any) -> bool:
        return options[2] is not None

    def results(self, inputs: Tensors, options: Any, world_size: int) -> Results:
        return [((sum(options[1]), *inputs[0].shape[1:]), inputs[0].dtype)]

    def needs_no_peers(self, inputs: Tensors, results: Tensors, options: Any) -> bool:
        """Nothing moves on any rank; a rank that sends and gets nothing comes along where others may."""
        return options[2] == 0 or 0 in inputs[0].shape[1:]

    def scalars(self, inputs: Tensors, options: Any) -> Tensors:
        row = math.prod(inputs[0].shape[1:])
        send, recv = ([count * row for count in counts] for counts in options[:2])
        return tuple(torch.tensor(counts, dtype=torch.int64, device="cpu") for counts in (send, recv))


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
    try:
        op = _all_to_all_v.adapter.op
        refuse_async(op, async_op)
        check_plain(op, (x, out))
        check_input(op, x)
        check_limit("max_count", max_count, "rows")
        group = world._default_pg if group is None else group
        options = (send_counts, recv_counts, max_count)
        return _all_to_all_v.serve(CallArguments((x, out), options, group, "default", max_sms))
    except BaseException as error:
        _all_to_all_v.on_error(error, x, group)
        raise


class _AllReduceBias(OpAdapter):
    op = "all_reduce_bias"
    inputs = ("x", "bias")
    aliases = {"out": "x"}  # noqa: RUF012 - never changed
    gradient = autograd.keep_bias, autograd.all_reduce_bias

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
        rows = x.numel() // max(columns, 1)
        return problem_of(self.op, (rows, columns), FLOATS[x.dtype], world_size, mode="eager")

    def single_rank_result(self, inputs: Tensors, options: Any) -> Tensors:
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

    On GPUs rows that are not a multiple of 16 bytes run the variant `library`. Can be captured in CUDA graphs; enqueues
    on the current stream; never synchronises the host.
    """
    try:
        if not is_dynamo_compiling():
            fast = _all_reduce_bias.last_fast_calls[world._default_pg if group is None else group]
            if (result := fast(x, bias, out, numerics, max_sms)) is not None:
                return result
        return _all_reduce_bias.call((x, bias, out), (), group, numerics, max_sms)
    except BaseException as error:
        _all_reduce_bias.on_error(error, x, group)
        raise
