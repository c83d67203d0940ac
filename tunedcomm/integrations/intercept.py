"""`tunedcomm.intercept`, `install` and `uninstall`: unmodified models, served by the dispatcher.

    with tunedcomm.intercept(mesh.get_group()) as calls:
        model(x)                      # torch.distributed, functional collectives, DTensor's tensor parallel plans
    print(calls)                      # which calls were served, by what, how often; which were not, and why

**The mechanism.** Every collective of PyTorch ends in an operator of the dispatcher: `torch.distributed.all_reduce` in
`c10d::allreduce_`, a functional collective, and so DTensor, its autograd formula and compiled code, in
`_c10d_functional::*`. Kernels for these operators are registered with `torch.library` while at least one group is
intercepted, under the dispatch key that comes right before those of devices, `BackendSelect`. They look the group up,
and redispatch the arguments as they came to the device's kernel wherever the dispatcher would run the library, or the
group is another one. (`torch.library.get_kernel` would keep the interpreter's lock, and a gloo group then waits for its
worker for ever; dispatch modes see every operator and neither autograd's threads nor compiled code; functions of
`torch.distributed` may have been imported before they could be replaced.)

**Consequences.** Other operators cost the same as before. Registration is for the process: autograd's threads are
served, and others that call on the group inside of the block. Autograd's formulas lie above our kernels. Compiled code
is served if it runs inside of the block, whenever it was compiled.

**Streams.** A served call runs on the current stream. With `async_op=True` it runs on a stream of the group's own, and
the work's `wait()` makes the current stream wait for it, as the library's does. A functional collective is always
asynchronous in name; those served run on the current stream, for a tensor parallel model uses the result at once.

**Ranks.** All ranks of a group enter and leave together, for a call must be served everywhere or nowhere, and making
the group's communicator is collective.
"""

from __future__ import annotations

import atexit
import contextlib
import math
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from tunedcomm.dispatch import misses
from tunedcomm.dispatch.communicator import Communicator, drop_at_exit, get_communicator, on_forget
from tunedcomm.dispatch.dispatcher import MISSES, check_limit, check_policy
from tunedcomm.dispatch.launches import intercepted, may_intercept, no_intercept
from tunedcomm.dispatch.plans import Plan
from tunedcomm.errors import InfeasibleError, UnsupportedInputError
from tunedcomm.integrations import after_warmup, check_torch
from tunedcomm.ops.call import is_capturing, paths
from tunedcomm.ops.collectives import all_gather, all_reduce, all_to_all, all_to_all_v, reduce_scatter
from tunedcomm.spec import NumericsPolicy, admits

_lock = threading.RLock()
# Groups that are intercepted now. Read without a lock: a call that races with a block's end goes either way.
_by_group: dict[dist.ProcessGroup, RoutedGroup] = {}
atexit.register(_by_group.clear)  # see drop_at_exit
_device_keys: set[Any] = set()
_libraries: list[Any] = []
_installed: list[tuple[RoutedGroup, ...]] = []


@dataclass(frozen=True, slots=True)
class RoutedCall:
    """The record of calls of one kind.

    Attributes:
        group: the process group's name.
        call: the operator that was called, e.g. `c10d::allreduce_`.
        problem: the problem, in words.
        served_by: the candidate that serves it, or "" where it goes to the library.
        why: the dispatcher's reason, or why it does not come to the dispatcher.
    """

    group: str
    call: str
    problem: str
    served_by: str
    why: str

    def __str__(self) -> str:
        by = self.served_by or "the library"
        return f"group {self.group}: {self.call} of {self.problem}: {by} ({self.why})"


@dataclass(slots=True)
class Routing:
    """The decision for calls that look alike, and how many there were so far.

    Attributes:
        served: True if kernels serve these calls.
        miss: counts a call of an untuned problem that the library serves; None where that is not noted.
    """

    served: bool
    count: int = 0
    miss: misses.Counter | None = None


@dataclass(eq=False)
class RoutedGroup:
    """An intercepted group: which of its calls kernels serve, by which, and how often.

    Every rank must route a call the same way. So a routing depends on arguments that are equal on all ranks: operator,
    number of elements, dtype, reduction, and for different numbers of rows a bound that the caller passes. Where a
    tensor lies in memory may differ between ranks; copies take care of it.

    Attributes:
        device: where it works, known also while there is no communicator.
        max_count: bound for `all_to_all_v`, the same on every rank; None: such calls are the library's.
        numerics: policy of its calls; None: the one in force.
        depth: number of blocks and installs that hold it.
        record: every routing so far, also those that were replaced since.
    """

    group: dist.ProcessGroup
    device: torch.device
    max_count: int | None = None
    numerics: NumericsPolicy | None = None
    depth: int = 0
    record: dict[RoutedCall, Routing] = field(default_factory=dict)
    side_stream: Any = None
    _communicator: Communicator | None = None
    _routings: dict[Any, Routing] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _groups.add(self)
        drop_at_exit(self, "group")

    @property
    def communicator(self) -> Communicator:
        """The group's communicator; made anew, collectively, after it was released."""
        known = self._communicator
        if known is None:  # another thread may forget it as soon as it is there
            known = self._communicator = get_communicator(self.group, self.device)
        return known

    def serves(self, call: str, op: str, x: torch.Tensor, reduction: str = "") -> bool:
        """Count a call of the operator `call`, which is tunedcomm's `op` of `x`; True if kernels serve it."""
        capturing = is_capturing()
        policy = self.communicator.policy(self.numerics)
        key = (call, op, reduction, x.shape, x.dtype, x.device, x.layout, capturing, policy)
        routing = self._routings.get(key)
        if routing is None:
            routing = self._decide(call, op, x, reduction)
            # A problem first met in a capture goes to the library in this graph only.
            if not capturing or routing.served:
                self._routings[key] = routing
        routing.count += 1
        if routing.miss is not None:
            routing.miss.count += 1
        return routing.served

    def plain(self, x: torch.Tensor) -> torch.Tensor:
        """The tensor, or a copy where it lies in symmetric memory.

        Callers of `torch.distributed` promise nothing of where it lies there, nor that it does so on every rank.
        """
        known = self._communicator
        if known is None or not known.any_symmetric or not known.is_symmetric(x):
            return x
        return x.clone(memory_format=torch.contiguous_format)

    def forget(self) -> None:
        """Choose anew from the next calls on."""
        self._routings.clear()
        self._communicator = None

    def _decide(self, call: str, op: str, x: torch.Tensor, reduction: str) -> Routing:
        plan, by = None, ""
        problem, why = f"{op} of {tuple(x.shape)} {str(x.dtype).removeprefix('torch.')}", self._unfit(op, x)
        if not why:
            try:
                plan = self._plan(call, op, x, reduction)
            except UnsupportedInputError as error:
                why = str(error)
        if why and reduction in ("sum", "avg") and self._must_be_ordered(x):
            raise InfeasibleError(f"{problem} would go to the library, and numerics='ordered' does not admit it: {why}")
        if plan is not None:
            candidate = plan.decision.candidate
            by = "" if candidate.variant == "library" else str(candidate)
            problem, why = str(plan.problem), plan.decision.why
        entry = RoutedCall(self.group.group_name, call, problem, by, why)
        routing = self.record.setdefault(entry, Routing(bool(by)))
        if plan is not None:
            missed = not by and plan.decision.source in MISSES
            routing.miss = misses.counter(self.communicator, plan.problem, plan.decision.source) if missed else None
        return routing

    def _must_be_ordered(self, x: torch.Tensor) -> bool:
        """True if the library may not sum `x`: its sums of floats are not ordered."""
        communicator = self.communicator
        is_sum = communicator.world_size > 1 and x.numel() > 0 and x.is_floating_point()
        return is_sum and not admits(communicator.policy(self.numerics), "library")

    def _unfit(self, op: str, x: torch.Tensor) -> str:
        """The reason why a call cannot go to the dispatcher, from facts that all ranks share; "" if it can."""
        communicator = self.communicator
        if x.device.type != communicator.device.type:
            return f"tensors on {x.device.type}; this group's kernels work on {communicator.device.type}"
        if communicator.world_size == 1:
            return "a group of one rank"
        if x.layout is not torch.strided:
            return f"a tensor of layout {x.layout}"
        if op == "all_to_all_v":
            if self.max_count is None:
                return "rows by split sizes, and ranks do not know each other's; a bound is intercept()'s max_count"
            return "" if self.max_count and math.prod(x.shape[1:]) else "nothing moves"
        return "" if x.numel() else "no elements"

    @torch.no_grad()
    def _plan(self, call: str, op: str, x: torch.Tensor, reduction: str) -> Plan:
        if op == "all_to_all_v":
            return paths[op].planned((x,), (None, None, self.max_count), self.group, "default")
        reduced = (reduction,) if reduction else ()
        options = (*reduced, 0) if op in ("all_gather", "reduce_scatter") else reduced
        numerics = self.numerics if reduction else "default"
        return paths[op].planned((x,), options, self.group, numerics, in_place=call in _IN_PLACE)

    def counts(self) -> dict[RoutedCall, int]:
        """Calls of every kind so far."""
        return {entry: routing.count for entry, routing in self.record.items()}


# By identity, which is how groups are compared; one that is not held any more drops out.
_groups: weakref.WeakSet[RoutedGroup] = weakref.WeakSet()


def _forget_all() -> None:
    for group in list(_groups):
        group.forget()


# Routings and plans are dropped together, so that a call here runs what the op's own path would run.
on_forget(_forget_all)


def _inside(call: Callable[[], Any]) -> Any:
    """The result of a served call; what it asks of torch.distributed itself is the library's."""
    with no_intercept():
        return call()


# A served call, on tensors as torch.distributed takes them: it counts elements where tunedcomm's ops look at shapes,
# and allows the input to be a part of the output. So tensors are seen as flat, and a shared input is copied first.


def _start(
    of: RoutedGroup, call: Callable[[], Any], results: Any, tensors: Sequence[torch.Tensor], beside: bool
) -> Any:
    """Run a served call, which reads and writes `tensors`, and give the work object that operators return for it.

    It runs on the current stream, or `beside` it on a stream of the group's own while the caller goes on.
    """
    if beside and tensors[0].is_cuda:
        device = tensors[0].device
        if of.side_stream is None:
            of.side_stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        of.side_stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(of.side_stream):
            _inside(call)
            for tensor in tensors:  # their memory may be given to others once the caller drops them
                tensor.record_stream(of.side_stream)
            return _work(results, [device])
    _inside(call)
    return _work(results, [tensors[0].device] if tensors[0].is_cuda else None)


def _work(results: Any, devices: list[int | str | torch.device] | None) -> Any:
    """A work object that is done when the current stream is here; its wait() makes the stream of then wait.

    It is torch's own around a future, which refuses a timeout. A class of Python's would take one, but what it
    overrides is lost once only C++ holds it, as functional collectives and DDP do: they would then wait for ever.
    """
    future: Any = torch.futures.Future(devices=devices)
    future.set_result(results)
    c10d: Any = torch._C._distributed_c10d
    return c10d._create_work_from_future(future).boxed()


def _run(of: RoutedGroup, op: Callable[..., torch.Tensor], x: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
    """The op's result in a new tensor or in `out`, which may have any strides and share memory with `x`."""
    if out is None:
        return op(of.plain(x.detach()), group=of.group)
    flat, target = of.plain(x.detach().reshape(-1)), out.detach()
    sink = target.view(-1) if target.is_contiguous() else torch.empty_like(target.reshape(-1))
    if -sink.nbytes < sink.data_ptr() - flat.data_ptr() < flat.nbytes:
        flat = flat.clone()
    op(flat, group=of.group, out=sink)
    if not target.is_contiguous():
        target.copy_(sink.view(target.shape))
    return out


def _reduce(of: RoutedGroup, x: torch.Tensor, reduction: str, out: torch.Tensor | None) -> torch.Tensor:
    """All-reduce `x` into a new tensor, or into `x`."""
    x = x.detach()
    plain = of.plain(x)
    target = None if out is None else plain
    found = all_reduce(plain, op=reduction, group=of.group, out=target, numerics=of.numerics)
    return x.copy_(found) if out is not None and plain is not x else found


def _to_all_rows(
    of: RoutedGroup, x: torch.Tensor, out: torch.Tensor | None, send: Sequence[int], receive: Sequence[int]
) -> torch.Tensor:
    """Exchange as many rows as the split sizes say."""
    x = x.detach()
    if out is None or not out.is_contiguous():
        rows = all_to_all_v(x, send, receive, max_count=of.max_count, group=of.group)
        return rows if out is None else out.detach().copy_(rows.view(out.shape))
    if out.untyped_storage().data_ptr() == x.untyped_storage().data_ptr():
        x = x.clone()
    shape = (sum(receive), *x.shape[1:])
    all_to_all_v(x, send, receive, max_count=of.max_count, group=of.group, out=out.detach().view(shape))
    return out


# Reductions that tunedcomm does not know are asked for all the same: its refusal is the reason in the record.
_NAMES = ("sum", "avg", "max", "min", "product", "band", "bor", "bxor")
_REDUCTIONS = {int(getattr(dist.ReduceOp, name.upper())): name for name in _NAMES}
_IN_PLACE = ("c10d::allreduce_", "_c10d_functional::all_reduce_")
# Right above the kernels of devices, below autograd's, and where none of these operators has a kernel of torch's.
_KEY = "BackendSelect"
_BELOW = torch._C._dispatch_keyset_full_after(torch._C.DispatchKey.BackendSelect)


def _routed(group: Any) -> RoutedGroup | None:
    """The intercepted group that an operator is given, as an object or by its name; None while a served call runs."""
    if not may_intercept():
        return None
    c10d: Any = torch._C._distributed_c10d
    return _by_group.get(
        c10d._resolve_process_group(group) if isinstance(group, str) else c10d.ProcessGroup.unbox(group)
    )


def _flat(x: torch.Tensor) -> torch.Tensor:
    """The tensor as one dimension, for operators whose choice depends on the number of elements alone."""
    return x.detach().reshape(-1) if x.layout is torch.strided else x


def _row(x: torch.Tensor) -> torch.Tensor:
    """One row of `x`, the tensor that a choice goes by where ranks have different numbers of rows."""
    if x.layout is not torch.strided:
        return x
    return x.detach()[:1] if x.shape[0] else x.detach().new_empty((1, *x.shape[1:]))


def _fits(x: torch.Tensor, out: torch.Tensor, times: int, over: int) -> bool:
    """True if `out` has as many elements as the operator wants; the library says what is wrong with others."""
    return out.numel() * over == x.numel() * times and out.dtype == x.dtype and out.device == x.device


# A reader takes the operator's name and its arguments, with the schema's names and defaults, for torch leaves out
# trailing arguments equal to them. It returns the call to make, or None where the library serves it.
Kernel = Callable[..., Any]
Serve = Callable[[], Any] | None


def _c10d_all_reduce(
    call: str,
    tensors: list[torch.Tensor],
    group: Any,
    op: Any,
    sparse: Any = None,
    async_op: bool = True,
    timeout: int = -1,
) -> Serve:
    of, reduction = _routed(group), _REDUCTIONS.get(op.op())
    if of is None or reduction is None or len(tensors) != 1 or sparse is not None:
        return None
    x = tensors[0]
    if not of.serves(call, "all_reduce", x, reduction):
        return None
    return lambda: (tensors, _start(of, lambda: _reduce(of, x, reduction, x), tensors, (x,), async_op))


def _c10d_all_gather(
    call: str, out: torch.Tensor, x: torch.Tensor, group: Any, async_op: bool = True, timeout: int = -1
) -> Serve:
    return _resized(call, "all_gather", x, group, out=out, async_op=async_op)


def _c10d_reduce_scatter(
    call: str, out: torch.Tensor, x: torch.Tensor, group: Any, op: Any, async_op: bool = True, timeout: int = -1
) -> Serve:
    reduction = _REDUCTIONS.get(op.op(), "unknown")
    return _resized(call, "reduce_scatter", x, group, reduction=reduction, out=out, async_op=async_op)


def _c10d_all_to_all(
    call: str,
    out: torch.Tensor,
    x: torch.Tensor,
    group: Any,
    receive: Sequence[int],
    send: Sequence[int],
    async_op: bool = True,
    timeout: int = -1,
) -> Serve:
    of = _routed(group)
    if of is None or x.dim() == 0 or out.dtype != x.dtype or out.device != x.device:
        return None
    size = of.group.size()
    if receive or send:
        # Split sizes that are equal here need not be so on other ranks: only their presence is common to all.
        if not of.serves(call, "all_to_all_v", _row(x)):
            return None
        sizes = [list(given) or [rows.shape[0] // size] * size for given, rows in ((send, x), (receive, out))]
        return lambda: _start(of, lambda: _to_all_rows(of, x, out, *sizes), [out], (x, out), async_op)
    if not _fits(x, out, 1, 1) or x.shape[0] % size or not of.serves(call, "all_to_all", _flat(x)):
        return None
    return lambda: _start(of, lambda: _run(of, all_to_all, x, out), [out], (x, out), async_op)


def _functional_all_reduce(call: str, x: torch.Tensor, reduction: str, group: Any) -> Serve:
    of, reduction, out = _routed(group), reduction.lower(), x if call in _IN_PLACE else None
    if of is None or reduction not in _NAMES or not of.serves(call, "all_reduce", x, reduction):
        return None
    if out is not None:
        return lambda: (_inside(lambda: _reduce(of, x, reduction, x)), x)[1]
    return lambda: _inside(lambda: _reduce(of, x, reduction, None))


def _functional_all_gather(
    call: str, x: torch.Tensor, size: int, group: Any, *, out: torch.Tensor | None = None
) -> Serve:
    return _resized(call, "all_gather", x, group, size=size, out=out)


def _functional_reduce_scatter(
    call: str, x: torch.Tensor, reduction: str, size: int, group: Any, *, out: torch.Tensor | None = None
) -> Serve:
    return _resized(call, "reduce_scatter", x, group, reduction=reduction.lower(), size=size, out=out)


def _functional_all_to_all(
    call: str, x: torch.Tensor, receive: Sequence[int], send: Sequence[int], group: Any
) -> Serve:
    of = _routed(group)
    if of is None or x.dim() == 0 or not of.serves(call, "all_to_all_v", _row(x)):
        return None
    return lambda: _inside(lambda: _to_all_rows(of, x, None, list(send), list(receive)))


def _resized(
    call: str,
    op: str,
    x: torch.Tensor,
    group: Any,
    *,
    reduction: str = "",
    size: int | None = None,
    out: torch.Tensor | None = None,
    async_op: bool | None = None,
) -> Serve:
    """Read an all-gather or a reduce-scatter; `async_op` is given for those of c10d, `size` for functional ones."""
    of = _routed(group)
    if of is None or reduction not in (*_NAMES, ""):
        return None
    ranks = of.group.size()
    times, over = (ranks, 1) if op == "all_gather" else (1, ranks)
    fits = size == ranks and x.dim() > 0 if out is None else _fits(x, out, times, over)
    if not fits or not of.serves(call, op, x if out is None else _flat(x), reduction):
        return None
    collective = partial(reduce_scatter, op=reduction, numerics=of.numerics) if reduction else all_gather
    if out is None or async_op is None:
        return lambda: _inside(lambda: _run(of, collective, x, out))
    return lambda: (out, _start(of, lambda: _run(of, collective, x, out), [out], (x, out), async_op))


_READERS: Mapping[str, Callable[..., Serve]] = {
    "c10d::allreduce_": _c10d_all_reduce,
    "c10d::_allgather_base_": _c10d_all_gather,
    "c10d::_reduce_scatter_base_": _c10d_reduce_scatter,
    "c10d::alltoall_base_": _c10d_all_to_all,
    "_c10d_functional::all_reduce": _functional_all_reduce,
    "_c10d_functional::all_reduce_": _functional_all_reduce,
    "_c10d_functional::all_gather_into_tensor": _functional_all_gather,
    "_c10d_functional::all_gather_into_tensor_out": _functional_all_gather,
    "_c10d_functional::reduce_scatter_tensor": _functional_reduce_scatter,
    "_c10d_functional::reduce_scatter_tensor_out": _functional_reduce_scatter,
    "_c10d_functional::all_to_all_single": _functional_all_to_all,
}


def _kernel(call: str, read: Callable[..., Serve]) -> Kernel:
    """A kernel that serves tensors of intercepted devices and passes others on, and the meta ones that compilers try.

    It redispatches to the kernel below without the interpreter's lock. One that is called by `torch.library.get_kernel`
    keeps that lock: a group waits for its worker's lock, while the worker waits for the interpreter's to let go of a
    tensor, both for ever.
    """
    namespace, name = call.split("::")
    redispatch, meta = getattr(getattr(torch.ops, namespace), name).default.redispatch, torch._C.DispatchKey.Meta

    def run(keys: Any, *given: Any, **named: Any) -> Any:
        serve = None
        if not keys.has(meta) and any(map(keys.has, _device_keys)):
            serve = read(call, *given, **named)
        if serve is not None:
            return serve()
        if namespace == "c10d":
            return redispatch(keys & _BELOW, *given, **named)
        with no_intercept():  # the library makes one of c10d of it: the same call, which was counted here
            return redispatch(keys & _BELOW, *given, **named)

    return run


class Interception:
    """The record of calls on some groups since the block was entered; readable in it and after it."""

    def __init__(self, groups: tuple[RoutedGroup, ...]) -> None:
        self._groups = groups
        self._before = self._counts()
        self._after: dict[RoutedCall, int] | None = None

    def _counts(self) -> dict[RoutedCall, int]:
        return {told: count for group in self._groups for told, count in group.counts().items()}

    def calls(self) -> dict[RoutedCall, int]:
        """Kinds of calls, in the order in which they were first met, to how often they were made."""
        if self._after is not None:
            return dict(self._after)
        new = {told: count - self._before.get(told, 0) for told, count in self._counts().items()}
        return {told: count for told, count in new.items() if count}

    @property
    def num_served(self) -> int:
        """Calls that kernels served."""
        return sum(count for told, count in self.calls().items() if told.served_by)

    @property
    def num_passed_on(self) -> int:
        """Calls that went to the library."""
        return sum(count for told, count in self.calls().items() if not told.served_by)

    def __str__(self) -> str:
        return "\n".join(f"{count} x {told}" for told, count in self.calls().items()) or "no calls"


def _register() -> None:
    """Put the kernels in place while any group is intercepted; a library that is dropped takes its kernels out."""
    wanted = {getattr(torch._C.DispatchKey, group.device.type.upper()) for group in _by_group.values()}
    _device_keys.intersection_update(wanted)
    if not wanted:
        _libraries.clear()
        intercepted.clear()
    elif not _libraries:
        make: Any = torch.library.Library  # untyped
        libraries = {namespace: make(namespace, "IMPL") for namespace in ("c10d", "_c10d_functional")}
        for call, read in _READERS.items():
            namespace, name = call.split("::")
            libraries[namespace].impl(name, _kernel(call, read), _KEY, with_keyset=True)
        _libraries.extend(libraries.values())
        intercepted.append(True)
    _device_keys.update(wanted)


def _enter(
    groups: tuple[dist.ProcessGroup | None, ...], max_count: int | None, numerics: NumericsPolicy | None
) -> tuple[RoutedGroup, ...]:
    """Intercept groups once more, collectively over each of them."""
    check_torch("tunedcomm.intercept()", "call tunedcomm.all_reduce and its like directly")
    check_limit("max_count", max_count, "rows")
    check_policy(numerics)
    # Collective; raises for a group that this rank is not in, or where there is no default group.
    communicators = [get_communicator(group) for group in groups or (None,)]
    with _lock:
        for gone in [group for group in _by_group if group not in distributed_c10d._world.pg_names]:
            del _by_group[gone]
        asked = (max_count, numerics)
        held = [_by_group.get(each.group) or RoutedGroup(each.group, each.device, *asked) for each in communicators]
        for routed in held:
            if (routed.max_count, routed.numerics) != asked:
                raise UnsupportedInputError(
                    f"the group is intercepted with max_count={routed.max_count} and numerics={routed.numerics!r} "
                    "already; pass the same"
                )
        for routed in held:
            routed.depth += 1
            _by_group[routed.group] = routed
        try:
            _register()
        except BaseException:
            _leave(tuple(held))
            raise
    return tuple(held)


def _leave(groups: tuple[RoutedGroup, ...]) -> None:
    """Take back one `_enter`; other holders of a group keep it."""
    with _lock:
        for routed in groups:
            routed.depth -= 1
            if routed.depth == 0:
                _by_group.pop(routed.group, None)
                routed.forget()
        _register()


@contextlib.contextmanager
def intercept(
    *groups: dist.ProcessGroup | None, max_count: int | None = None, numerics: NumericsPolicy | None = None
) -> Iterator[Interception]:
    """Serve PyTorch's collectives on `groups` by tunedcomm inside the `with` block, with no line of the model changed.

    Served where the dispatcher chooses a kernel: `torch.distributed`'s `all_reduce`, `all_gather_into_tensor`,
    `reduce_scatter_tensor` and `all_to_all_single`, also with `async_op=True`; the functional collectives of these and
    what is made of them: their autograd forms, DTensor's redistributions, tensor parallel plans, compiled code. All
    else, such as list forms, coalesced forms and other dtypes or reductions, goes to the library untouched.

    Args:
        groups: process groups that this rank belongs to; none, or None, for the default group. On all ranks of a group
            alike: entering is collective over each one whose first call this is. Blocks may be nested.
        max_count: rows at most that any rank sends any rank by `all_to_all_single` with split sizes, the same on every
            rank; see `all_to_all_v`. Without it such calls are the library's: ranks do not know each other's sizes and
            must choose alike. Functional all_to_all always has split sizes.
        numerics: the policy of these calls, as of `all_reduce`. With `ordered` a sum or mean of floats that no ordered
            variant can serve raises InfeasibleError and does not go to the library.

    Yields:
        Which calls were served and by what, which were not and why.

    Raises:
        NotInitializedError: no default process group.
        GroupError: not a member of a group, or it has no backend for this device.
        UnsupportedInputError: `max_count` is no number of rows, `numerics` no policy, or one of them is not that of a
            block around this.
        UnsupportedVersionError: a torch that this is not known to work with (2.11 to 2.13 are).

    Results equal the library's within the tolerance of the variants: `ordered` ones sum in fp32 in rank order.
    """
    held = _enter(groups, max_count, numerics)
    interception = Interception(held)
    try:
        yield interception
    finally:
        interception._after = interception.calls()
        _leave(held)
    for routed in held:
        after_warmup(routed.group, routed.device)


def install(
    *groups: dist.ProcessGroup | None, max_count: int | None = None, numerics: NumericsPolicy | None = None
) -> Interception:
    """`intercept` from here on, until `uninstall()` or the end of the process; arguments and errors are the same."""
    held = _enter(groups, max_count, numerics)
    _installed.append(held)
    return Interception(held)


def uninstall() -> None:
    """Take back every `install()`; blocks of `intercept` that are open stay as they are."""
    while _installed:
        _leave(_installed.pop())
