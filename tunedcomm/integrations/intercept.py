"""`tunedcomm.intercept`, `install` and `uninstall`: unmodified models, served by tuned kernels.

    with tunedcomm.intercept(mesh.get_group()) as calls:
        model(x)                      # torch.distributed, functional collectives, DTensor's tensor parallel plans
    print(calls)                      # which calls were served, by what, how often; which were not, and why

**The mechanism.** Every collective of PyTorch ends in an operator of PyTorch's dispatcher:
`torch.distributed.all_reduce` in `c10d::allreduce_`, a functional collective, and so DTensor, its autograd formula and
compiled code, in `_c10d_functional::*`. Kernels for these operators are registered with `torch.library` while at least
one group is intercepted, under the dispatch key that comes right before the devices' keys, `BackendSelect`. They look
the group up, and redispatch the arguments as they came to the device's kernel wherever dispatch would run the library,
or the group is another one. (`torch.library.get_kernel` would keep the interpreter's lock, and a gloo group then waits
for its worker for ever; dispatch modes see every operator and neither autograd's threads nor compiled code; functions
of `torch.distributed` may have been imported before they could be replaced.)

**Consequences.** Other operators cost the same as before. Registration is for the process: autograd's threads are
served, and others that call on the group inside of the block. Autograd's formulas lie above our kernels. Compiled code
is served if it runs inside of the block, whenever it was compiled.

**Streams.** A served call runs on the current stream. With `async_op=True` it runs on a stream of the group's own, and
the work's `wait()` makes the current stream wait for it, as the library's does. A functional collective is always
asynchronous in name; those served run on the current stream, for a tensor parallel model uses the result at once.

**Threads.** On CPUs an asynchronous call, functional ones among them, runs at once where all peers have begun it, for
it then ends whatever the program does next. Else it is checked, planned and bound at once, and launched by the group's
`Queue`, so that programs may start collectives of several groups, or messages, in different orders. Peers are
waited for a moment first: to wake a thread takes longer. Only calls through the ring are queued: Triton's interpreter
runs one kernel of a process at a time, and with TUNEDCOMM_DEBUG or TUNEDCOMM_CHECK a call also makes the library's.

**Ranks.** All ranks of a group enter and leave together, for a call must be served everywhere or nowhere, and making
the group's communicator is collective.
"""

from __future__ import annotations

import atexit
import contextlib
import textwrap
import threading
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cache, cached_property, partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from tunedcomm.db.misses import Counter
from tunedcomm.dispatch import misses
from tunedcomm.dispatch.communicator import MAX_PROBLEMS, Communicator, drop_at_exit, on_forget
from tunedcomm.dispatch.decide import MISSES, check_limit, check_policy
from tunedcomm.dispatch.groups import get_communicator, is_dry_run
from tunedcomm.dispatch.launches import intercepted, may_intercept, no_intercept
from tunedcomm.dispatch.plans import Plan
from tunedcomm.dispatch.queue import Job, Queue, put_off, when_due
from tunedcomm.errors import InfeasibleError, UnsupportedInputError
from tunedcomm.integrations import after_warmup, check_torch
from tunedcomm.integrations.direct import OPERATORS, DirectCalls, Read
from tunedcomm.ops.adapter import OpAdapter, Tensors, TorchCall, TorchServe
from tunedcomm.ops.arguments import SUMMED
from tunedcomm.ops.call import forget_last, leave, paths
from tunedcomm.ops.fast_call import is_capturing
from tunedcomm.selection.select import Decision
from tunedcomm.spec import NumericsPolicy, Problem, admits, get_variant
from tunedcomm.state import reusable

_c10d: Any = torch._C._distributed_c10d
_PATIENCE_NS = 50_000  # to hand a call to another thread and back takes about as long
_lock = threading.RLock()
# Groups that are intercepted now. Read without a lock: a call that overlaps a block's end may be intercepted or not.
_by_group: dict[dist.ProcessGroup, RoutedGroup] = {}
atexit.register(_by_group.clear)  # see drop_at_exit
_device_keys: set[Any] = set()
_libraries: list[Any] = []
_direct: list[Any] = []  # the library of `torch.ops.symm_mem`, which is overridden only if a group asks for it
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


class _Record:
    """An entry of the record, which is made when it is read: its reasons take longer than a call may.

    Attributes:
        count: calls so far.
    """

    def __init__(self, tell: Callable[[], RoutedCall]) -> None:
        self.count = 0
        self._tell = tell

    @cached_property
    def entry(self) -> RoutedCall:
        return self._tell()


def _of_plan(group: str, call: str, problem: Problem, by: str, decide_again: Callable[[], Decision]) -> RoutedCall:
    return RoutedCall(group, call, str(problem), by, decide_again().why)


def _counts(records: Iterable[tuple[_Record, int]]) -> dict[RoutedCall, int]:
    counts: dict[RoutedCall, int] = {}
    for record, count in records:
        counts[record.entry] = counts.get(record.entry, 0) + count
    return counts


@dataclass(slots=True)
class Routing:
    """The decision for calls that look alike.

    Attributes:
        served: True if kernels serve these calls.
        record: counts them.
        miss: counts a call of an untuned problem that the library serves; None where that is not noted.
        may_wait: an asynchronous call may be left to the group's queue.
    """

    served: bool
    record: _Record
    may_wait: bool = False
    miss: Counter | None = None


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
        max_sms: limit of its calls, as of `all_reduce`.
        symm_mem: calls of `torch.ops.symm_mem` are intercepted, too.
        depth: number of blocks and installs that hold it.
        record: every routing so far, also those that were replaced since, by the key of its calls and what serves them;
            beyond `MAX_PROBLEMS` one entry for each operator and variant.
    """

    group: dist.ProcessGroup
    device: torch.device
    max_count: int | None = None
    numerics: NumericsPolicy | None = None
    max_sms: int | None = None
    symm_mem: bool = False
    depth: int = 0
    record: dict[tuple[Any, ...], _Record] = field(default_factory=dict)
    side_stream: Any = None
    _communicator: Communicator | None = None
    _routings: dict[Any, Routing] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.direct = DirectCalls(self)
        _groups.add(self)
        drop_at_exit(self, "group")

    @property
    def communicator(self) -> Communicator:
        """The group's communicator; made anew, collectively, after it was released."""
        known = self._communicator
        if known is None:  # another thread may forget it as soon as it is there
            known = self._communicator = get_communicator(self.group, self.device)
        return known

    def serves(
        self,
        call: str,
        adapter: OpAdapter,
        x: torch.Tensor,
        options: tuple[Any, ...],
        *,
        in_place: bool = False,
        symmetric: bool = False,
        others: Tensors = (),
        why: str = "",
        facts: Hashable = None,
        veto: Callable[[Plan], str] | None = None,
        count: bool = True,
    ) -> Routing | None:
        """Count a call of the operator `call`, which is tunedcomm's op of `x`; None if the library serves it.

        Args:
            call: the operator.
            adapter: of the op.
            x, options: a tensor and options that are alike on all ranks.
            in_place: the result takes the input's place.
            symmetric: peers address the input.
            others: the op's other inputs; `options` and `facts` tell calls with different ones apart.
            why: the reason why no kernel serves the call, where that is known.
            veto: gives a reason against a plan by a kernel, or "".
            count: False asks for the routing alone.
        """
        if x.is_nested:  # it has no shape
            return None
        capturing = is_capturing()
        policy = self.communicator.policy(self.numerics)
        seen = (x.shape, x.dtype, x.device, x.layout, why, facts)
        key = (call, adapter.op, options, symmetric, capturing, policy, *seen)
        routing = self._routings.get(key)
        if routing is None:
            memory = {"in_place": in_place, "symmetric": symmetric}
            routing = self._decide(call, adapter, (x, *others), options, memory, key, why, veto)
            # A problem first met in a capture goes to the library in this graph only.
            if not capturing or routing.served:
                if len(self._routings) >= MAX_PROBLEMS:
                    del self._routings[next(iter(self._routings))]
                self._routings[key] = routing
        routing.record.count += count
        if routing.miss is not None:
            routing.miss.count += count
        return routing if routing.served else None

    def on_wire(
        self, call: str, x: torch.Tensor, asked: str | None = None, *, count: bool = True
    ) -> tuple[Any, Routing] | None:
        """The wire of an all_reduce (sum) and its routing; None where it has none, or no kernel is tuned for it.

        Args:
            call, x, count: as in `serves`.
            asked: a wire for all sizes, instead of TUNEDCOMM_WIRE.
        """
        communicator = self.communicator
        wire, least = (asked, 0) if asked else communicator.settings.wire or (None, 0)
        if wire is None or x.dtype not in SUMMED or x.nbytes < least or communicator.policy(self.numerics) == "ordered":
            return None
        routing = self.serves(call, paths["all_reduce_wire"].adapter, x, ("sum", wire), count=count)
        return None if routing is None else (wire, routing)

    def begin(self, call: Job, may_wait: bool, results: Any = None, beside: bool = True) -> tuple[Any, Any]:
        """Make a call, which may go on `beside` the caller: its result, and its work object, or None if it has ended.

        It may be queued if `may_wait`. The work's future has `results`, or as None a list of the call's result.
        """
        communicator = self.communicator
        queue, ring = communicator.queue, communicator.ring
        waits = beside and may_wait and not queue.is_current
        if not waits or (not queue.is_busy and ring is not None and ring.all_arrived(_PATIENCE_NS)):
            return inside(call), None
        forget_last(self.group)
        found, jobs = put_off(lambda: inside(call))

        def run() -> None:
            try:
                for job in jobs:
                    job()
            except BaseException as error:
                communicator.abandon("an asynchronous call", error)
                raise

        return found, _Waiting().start(queue, run, [found] if results is None else results)

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

    def _decide(
        self,
        call: str,
        adapter: OpAdapter,
        inputs: Tensors,
        options: tuple[Any, ...],
        memory: dict[str, bool],
        key: Any,
        why: str,
        veto: Callable[[Plan], str] | None,
    ) -> Routing:
        plan, by, op, x = None, "", adapter.op, inputs[0]
        problem = f"{op} of {tuple(x.shape)} {str(x.dtype).removeprefix('torch.')}"
        why = why or self._unfit(adapter, x, options)
        if not why:
            try:
                with torch.no_grad():
                    path = paths[adapter.operator]
                    policy, max_sms = self.policy(adapter), self.max_sms
                    plan = path.planned(inputs, options, self.group, policy, max_sms=max_sms, **memory)
            except UnsupportedInputError as error:
                why = str(error)
        if why and adapter.reduces and {"sum", "avg"}.intersection(options) and self._must_be_ordered(x):
            raise InfeasibleError(f"{problem} would go to the library, and numerics='ordered' does not admit it: {why}")
        if plan is not None:
            why = veto(plan) if veto is not None else ""
            by = "" if why or plan.candidate.variant == "library" else str(plan.candidate)
        place, named = (key, by), (self.group.group_name, call)
        if place not in self.record and len(self.record) >= MAX_PROBLEMS:
            by = by.partition("(")[0]
            place = ((call, op), by)
            tell = partial(RoutedCall, *named, f"{op} of other sizes", by, f"beyond the first {MAX_PROBLEMS} problems")
        elif plan is None or why:
            tell = partial(RoutedCall, *named, problem, by, why)
        else:
            tell = partial(_of_plan, *named, plan.problem, by, plan.decide_again)
        routing = Routing(bool(by), self.record.setdefault(place, _Record(tell)))
        if plan is not None:
            missed = not by and plan.source in MISSES
            routing.miss = misses.note_problem(self.communicator, plan.problem, plan.source) if missed else None
            settings = self.communicator.settings
            through_ring = x.device.type == "cpu" and not get_variant(op, plan.candidate.variant).kernels
            routing.may_wait = through_ring and not settings.debug and not settings.check[0]
        return routing

    def _must_be_ordered(self, x: torch.Tensor) -> bool:
        """True if the library may not sum `x`: its sums of floats are not ordered."""
        communicator = self.communicator
        is_sum = communicator.world_size > 1 and x.numel() > 0 and x.is_floating_point()
        return is_sum and not admits(communicator.policy(self.numerics), "library")

    def policy(self, adapter: OpAdapter) -> NumericsPolicy | None:
        """The policy of the op's calls."""
        return self.numerics if adapter.reduces else "default"

    def _unfit(self, adapter: OpAdapter, x: torch.Tensor, options: tuple[Any, ...]) -> str:
        """The reason why a call cannot go to the dispatcher, from facts that all ranks share; "" if it can."""
        communicator = self.communicator
        if x.device.type != communicator.device.type:
            return f"tensors on {x.device.type}; this group's kernels work on {communicator.device.type}"
        if communicator.world_size == 1:
            return "a group of one rank"
        if x.layout is not torch.strided:
            return f"a tensor of layout {x.layout}"
        return adapter.torch_refusal(x, options)

    def counts(self) -> dict[RoutedCall, int]:
        """Calls of every kind so far."""
        return _counts((record, record.count) for record in self.record.values())


# By identity, which is how groups are compared; one that is not held any more drops out.
_groups: weakref.WeakSet[RoutedGroup] = weakref.WeakSet()


def _forget_all() -> None:
    for group in list(_groups):
        group.forget()


# Routings and plans are dropped together, so that a call here runs what the op's own path would run.
on_forget.append(_forget_all)


def inside(call: Callable[[], Any]) -> Any:
    """The result of a served call; its own calls of torch.distributed are the library's."""
    with no_intercept():
        return call()


# A served call, on tensors as torch.distributed takes them: it counts elements where tunedcomm's ops look at shapes,
# and allows the input to be a part of the output. So tensors are seen as flat, and a shared input is copied first.


def start(
    of: RoutedGroup, may_wait: bool, call: Job, results: Any, tensors: Sequence[torch.Tensor], beside: bool
) -> Any:
    """Run a served call, which reads and writes `tensors`, and give its work object, which operators return boxed.

    It runs on the current stream, or `beside` it, on a stream or a thread of the group's own, while the caller goes on.
    """
    if beside and tensors[0].is_cuda:
        device = tensors[0].device
        if of.side_stream is None:
            of.side_stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        of.side_stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(of.side_stream):
            inside(call)
            for tensor in tensors:  # their memory may be given to others once the caller drops them
                tensor.record_stream(of.side_stream)
            return _work(results, [device])
    _, work = of.begin(call, may_wait, results, beside)
    return work or _work(results, [tensors[0].device] if tensors[0].is_cuda else None)


def _functional(of: RoutedGroup, routing: Routing, call: Callable[[], Any], out: torch.Tensor | None) -> Any:
    """The result of a served functional call; `wait_tensor` waits for it where it has not ended."""
    found, work = of.begin(call, routing.may_wait)
    if work is not None:
        _c10d._register_work(found if out is None else out, work)
    return found if out is None else out


# Work objects are torch's own. A class of Python's would do, but its overrides are lost once only C++ holds it, as
# functional collectives and DDP do: they would then wait for ever.


def _work(results: Any, devices: list[int | str | torch.device] | None) -> Any:
    """A work object of a call that has ended, or does on the current stream: its wait() makes the stream of then wait.

    On GPUs wait() refuses a timeout.
    """
    if devices is None:
        work = _c10d.PythonCallbackWork(lambda timeout: True)
        work.get_future().set_result(results)
        work.wait()  # is_completed() is true from then on
        return work
    future: Any = torch.futures.Future(devices=devices)
    future.set_result(results)
    return _c10d._create_work_from_future(future)


class _Waiting:
    """A call in a group's queue.

    Its work object is done once that has called `_wait`: with True as what returns, else with an error. An exception
    of Python's would be left in its future, and C++ ends the process when it raises one a second time. So the future
    first gets an error of C++'s, about a value that is no bool, whose class has the exception's text for a name.

    Attributes:
        work: the work object; None once the call has ended, for it holds this object.
    """

    _outcome: object = None
    _error: BaseException | None = None

    def start(self, queue: Queue, job: Job, results: Any) -> Any:
        """Queue the call; the work object."""
        work = self.work = _c10d.PythonCallbackWork(self._wait)
        self._ended = queue.add(partial(self._run, work, job, results))
        return work

    def _run(self, work: Any, job: Job, results: Any) -> None:
        try:
            job()
        except BaseException as error:  # noqa: BLE001 - raised by wait()
            self._fail(work, error)
            self._error = error.with_traceback(None)  # its frames hold the group
        else:
            future = work.get_future()
            if not future.done():  # by a wait that was given up
                future.set_result(results)
            self._outcome = True
            work.wait()
        self.work = None

    def _fail(self, work: Any, error: BaseException) -> None:
        """Let the work's future raise the error's text."""
        self._outcome = type(f"{type(error).__name__}: {error}", (), {})()
        with contextlib.suppress(RuntimeError):
            work.wait()
        self._outcome = None

    def _wait(self, timeout: timedelta) -> Any:
        work = self.work
        if self._outcome is None and work is not None:
            try:
                self._ended.result(timeout.total_seconds() or None)
            except BaseException as error:
                self._fail(work, error)
                raise
        if self._error is not None:
            raise copy(self._error)  # the traceback of what is raised holds this object
        return True if self._outcome is None else self._outcome


def run_served(
    of: RoutedGroup, adapter: OpAdapter, serve: TorchServe, x: torch.Tensor, out: torch.Tensor | None
) -> Any:
    """The op's result in a new tensor or in `out`, which may have any strides, share memory with `x`, or be `x`."""
    path, numerics, max_sms = paths[adapter.operator], of.policy(adapter), of.max_sms
    if out is None:
        return path.serve_again((of.plain(x.detach()), None), serve.options, of.group, numerics, max_sms)
    if out is x and adapter.aliases:
        target = x.detach()
        plain = of.plain(target)
        path.serve_again((plain, plain), serve.options, of.group, numerics, max_sms)
        if plain is not target:
            when_due(lambda: target.copy_(plain))
        return out
    target = out.detach()
    shape: tuple[int, ...] = (out.numel(),)
    if serve.counts_elements:
        source = of.plain(x.detach().reshape(-1))
    else:
        source = x.detach().contiguous()
        shape = adapter.results((source,), serve.options, of.group.size())[0][0]
    sink = target.view(shape) if target.is_contiguous() else target.new_empty(shape)
    overlap = -sink.nbytes < sink.data_ptr() - source.data_ptr() < source.nbytes
    if overlap and not adapter.may_hold_input((source,), serve.options, sink, of.group.rank()):
        source = source.clone()
    path.serve_again((source, sink), serve.options, of.group, numerics, max_sms)
    if sink.data_ptr() != target.data_ptr():
        when_due(lambda: target.copy_(sink.view(target.shape)))
    return out


def _in_parts(run: Callable[[], Any], parts: Sequence[torch.Tensor]) -> None:
    """Run a served call and copy its result, one part a rank, to `parts`."""
    whole = run()

    def copy_parts() -> None:
        for part, found in zip(parts, whole.view(len(parts), *parts[0].shape), strict=True):
            part.detach().copy_(found)

    when_due(copy_parts)


# Reductions that tunedcomm does not know are asked for all the same: its refusal is the reason in the record.
_NAMES = ("sum", "avg", "max", "min", "product", "band", "bor", "bxor")
_REDUCTIONS = {int(getattr(dist.ReduceOp, name.upper())): name for name in _NAMES}


def factor_of(op: Any) -> float | None:
    """The factor of a PREMUL_SUM, by which it multiplies before it sums; None for other reductions."""
    if op != dist.ReduceOp.PREMUL_SUM:
        return None
    factor = op.factor if hasattr(op, "factor") else op.__getstate__()[1]
    return factor if isinstance(factor, float) else None


def _plain_sums(options: Any) -> Any:
    """A class of `torch.distributed`'s options whose PREMUL_SUM by 1 is a sum: operators do not show the factor."""

    class PlainSums(options):  # type: ignore[misc]
        @property
        def reduceOp(self) -> Any:  # noqa: N802 - torch's name
            return super().reduceOp

        @reduceOp.setter
        def reduceOp(self, op: Any) -> None:  # noqa: N802
            options.reduceOp.__set__(self, dist.ReduceOp.SUM if factor_of(op) == 1 else op)

    return PlainSums


_OPTIONS = {name: getattr(distributed_c10d, name) for name in ("AllreduceOptions", "ReduceScatterOptions")}
# Right above the kernels of devices, below autograd's, and where none of these operators has a kernel of torch's.
KEY = "BackendSelect"


def _routed(group: Any) -> RoutedGroup | None:
    """The intercepted group that an operator is given, as an object or by its name; None while a served call runs."""
    if not may_intercept():
        return None
    return _by_group.get(
        _c10d._resolve_process_group(group) if isinstance(group, str) else _c10d.ProcessGroup.unbox(group)
    )


def _abandon(call: str, error: BaseException, arguments: Sequence[Any]) -> None:
    """Handle an exception that leaves a call of the operator `call`."""
    for argument in arguments:
        if isinstance(argument, (str, torch.ScriptObject)):
            with contextlib.suppress(RuntimeError, ValueError):  # not the argument that is the group
                if (of := _routed(argument)) is not None:
                    leave(error, call, torch.empty(0, dtype=torch.uint8, device=of.device.type), of.group)


Serve = Callable[[], Any] | None


# Arguments of PyTorch's operators that ops read by name, or that change nothing in the calls served.
_OTHERS = frozenset("group_size input_split_sizes output_split_sizes root_rank root_tensor sparse_indices src".split())


class _Operator:
    """An operator of PyTorch's and its arguments.

    Attributes:
        is_functional: what the library makes of a call is not intercepted.
    """

    def __init__(self, name: str) -> None:
        namespace, self.base = name.split("::")
        self.name, self.is_functional = name, namespace != "c10d"
        self.kernel = getattr(getattr(torch.ops, namespace), self.base).default
        arguments = self.kernel._schema.arguments
        self._names = [argument.name for argument in arguments]
        self._defaults = [argument.default_value for argument in arguments]

    def values(self, given: tuple[Any, ...], named: dict[str, Any]) -> list[Any]:
        """The arguments in the schema's order; torch leaves out those equal to their default."""
        values = [*given, *self._defaults[len(given) :]]
        for name, value in named.items():
            values[self._names.index(name)] = value
        return values

    def read(self, given: tuple[Any, ...], named: dict[str, Any]) -> Serve:
        """The call to make, or None where the library serves it."""
        raise NotImplementedError


class _Reader(_Operator):
    """Reads calls of one operator, by the names in its schema, as calls of the ops that may serve it."""

    def __init__(self, name: str, adapters: Sequence[OpAdapter]) -> None:
        super().__init__(name)
        self.adapters, base = adapters, self.base
        roles = (
            *("tensors input_tensor input inputs input_tensors", "output_tensor output out outputs output_tensors"),
            "process_group group_name",
            *("reduce_op", "async_op asyncOp", "timeout"),
        )
        places = [[self._names.index(name) for name in names.split() if name in self._names] for names in roles]
        self._x, self._out, self._group, self._reduction, self._async, _ = (at[0] if at else -1 for at in places)
        known = {at[0] for at in places if at}
        self._others = [(name, index) for index, name in enumerate(self._names) if index not in known]
        # A name that nobody reads here may change the call's meaning.
        self.is_readable = min(self._x, self._group) >= 0 and _OTHERS.issuperset(name for name, _ in self._others)
        self._in_place = self._out < 0 and base.endswith("_")
        self._returns_work = len(self.kernel._schema.returns) == 1
        self._is_list = base.rstrip("_").endswith("_coalesced")

    def read(self, given: tuple[Any, ...], named: dict[str, Any]) -> Serve:
        values = self.values(given, named)
        of, x, reduction = _routed(values[self._group]), values[self._x], ""
        if of is None or (isinstance(x, list) and len(x) != 1 and not self._is_list):
            return None
        if self._reduction >= 0:
            reduction = values[self._reduction]
            reduction = reduction.lower() if isinstance(reduction, str) else _REDUCTIONS.get(reduction.op(), "")
            if reduction not in _NAMES:
                return None
        others = {name: values[index] for name, index in self._others}
        if self._is_list:
            return self._read_list(of, x, values, reduction, others)
        results, x = (x, x[0]) if isinstance(x, list) else (None, x)
        out = x if self._in_place else values[self._out] if self._out >= 0 else None
        if isinstance(out, list):
            return self._read_parts(of, x, out, values, others)
        found = self._served(of, x, out, reduction, others)
        if found is None:
            return None
        routing, run = found
        if self.is_functional:
            return partial(_functional, of, routing, run, out)
        is_async, results = values[self._async], [out] if results is None else results
        tensors: Sequence[Any] = (x,) if out is x else (x, out)
        if self._returns_work:
            return lambda: start(of, routing.may_wait, run, results, tensors, is_async).boxed()
        first = results if self._in_place else out
        return lambda: (first, start(of, routing.may_wait, run, results, tensors, is_async).boxed())

    def _read_parts(self, of: RoutedGroup, x: Any, listed: Any, values: Sequence[Any], others: Any) -> Serve:
        """The call of an all_gather into a list of tensors, one a rank; None where the library serves it."""
        parts = listed[0] if len(listed) == 1 else []
        if any((part.shape, part.dtype, part.device) != (x.shape, x.dtype, x.device) for part in parts):
            return None
        found = self._served(of, x, None, "", {**others, "group_size": len(parts)})
        if found is None:
            return None
        routing, run = found
        tensors, call = (x, *parts), partial(_in_parts, run, parts)
        return lambda: (listed, start(of, routing.may_wait, call, listed, tensors, values[self._async]).boxed())

    def _read_list(
        self, of: RoutedGroup, xs: Sequence[Any], values: Sequence[Any], reduction: str, others: Any
    ) -> Serve:
        """The calls of a coalesced operator, one after another; None if not all of them are served."""
        outs = xs if self._in_place else values[self._out] if self._out >= 0 else [None] * len(xs)
        found: list[tuple[Routing, Callable[[], Any]]] = []
        for x, out in zip(xs, outs, strict=True):
            part = self._served(of, x, out, reduction, others)
            if part is None:
                for routing, _ in found:
                    routing.record.count -= 1
                return None
            found.append(part)
        if not found:
            return None
        if self.is_functional:
            return lambda: [_functional(of, *part, out) for part, out in zip(found, outs, strict=True)]
        may_wait, tensors = all(routing.may_wait for routing, _ in found), [*xs, *(outs if outs is not xs else ())]

        def run() -> None:
            for _, each in found:
                each()

        return lambda: start(of, may_wait, run, list(outs), tensors, values[self._async]).boxed()

    def _served(
        self, of: RoutedGroup, x: Any, out: Any, reduction: str, others: dict[str, Any]
    ) -> tuple[Routing, Callable[[], Any]] | None:
        """The routing of the call of one tensor, and the call; None where the library serves it."""
        call = TorchCall(x, out, reduction, others, of.group.size(), of.max_count)
        for adapter in self.adapters:
            if (serve := adapter.serve_torch(call)) is not None:
                break
        else:
            return None
        common = serve.options if serve.common is None else serve.common
        routing = of.serves(self.name, adapter, serve.like, common, in_place=self._in_place)
        if routing is None:
            return None
        return routing, partial(run_served, of, adapter, serve, x, out)


class _DirectReader(_Operator):
    """Reads calls of an operator of `torch.ops.symm_mem`."""

    def __init__(self, base: str, read: Read, known: str) -> None:
        super().__init__(f"symm_mem::{base}")
        self.is_readable = self._names == known.split()
        self._read = read

    def read(self, given: tuple[Any, ...], named: dict[str, Any]) -> Serve:
        values = self.values(given, named)
        try:
            of = _routed(values[self._names.index("group_name")])
        except (RuntimeError, ValueError):  # a name that is not one of torch.distributed's groups
            return None
        if of is None or not of.symm_mem:
            return None
        run = of.direct.serve(self.name, self._read(of.group.size(), *values))
        return None if run is None else partial(inside, run)


@cache
def _direct_readers() -> tuple[_DirectReader, ...]:
    """The readers of operators on symmetric memory, of those that this torch has with the arguments known."""
    import torch.distributed._symmetric_memory  # defines some of them

    present = [_DirectReader(name, *of) for name, of in OPERATORS.items() if hasattr(torch.ops.symm_mem, name)]
    return tuple(reader for reader in present if reader.is_readable)


@cache
def _readers() -> tuple[_Reader, ...]:
    """The readers of all operators of PyTorch that an op serves."""
    served: dict[str, list[OpAdapter]] = {}
    for path in paths.values():
        for name in path.adapter.torch_operators:
            served.setdefault(name, []).append(path.adapter)
    return tuple(_Reader(name, adapters) for name, adapters in served.items())


def _missing() -> Iterator[str]:
    """The internals of torch that interception uses and this torch lacks."""
    if not hasattr(torch._C, "_dispatch_keyset_full_after"):
        yield "torch._C._dispatch_keyset_full_after"
    for name in ("_resolve_process_group", "_register_work", "_create_work_from_future", "PythonCallbackWork"):
        if not hasattr(_c10d, name):
            yield f"torch._C._distributed_c10d.{name}"
    for name in {name for path in paths.values() for name in path.adapter.torch_operators}:
        try:
            is_readable = _Reader(name, ()).is_readable
        except AttributeError:
            is_readable = False
        if not is_readable:
            yield f"the operator {name} with known arguments"


def _kernel(reader: _Operator) -> Callable[..., Any]:
    """A kernel that serves tensors of intercepted devices and passes others on, and the meta ones that compilers try.

    It redispatches to the kernel below without the interpreter's lock. One that is called by `torch.library.get_kernel`
    keeps that lock: a group waits for its worker's lock, while the worker waits for the interpreter's to let go of a
    tensor, both for ever.
    """
    redispatch, meta = reader.kernel.redispatch, torch._C.DispatchKey.Meta
    below = torch._C._dispatch_keyset_full_after(torch._C.DispatchKey.BackendSelect)

    def run(keys: Any, *given: Any, **named: Any) -> Any:
        serve = None
        if not keys.has(meta) and any(map(keys.has, _device_keys)):
            try:
                serve = reader.read(given, named)
                if serve is not None:
                    return serve()
            except BaseException as error:
                _abandon(reader.name, error, (*given, *named.values()))
                raise
        if not reader.is_functional:
            return redispatch(keys & below, *given, **named)
        with no_intercept():  # the library makes one of c10d of it: the same call, which was counted here
            return redispatch(keys & below, *given, **named)

    return run


class Interception:
    """The record of calls on some groups since the block was entered; readable in it and after it."""

    def __init__(self, groups: tuple[RoutedGroup, ...]) -> None:
        self._groups = groups
        self._before = self._all()
        self._after: dict[_Record, int] | None = None

    def _all(self) -> dict[_Record, int]:
        return {record: record.count for group in self._groups for record in list(group.record.values())}

    def end(self) -> None:
        """Count no more."""
        self._after = self._all()

    def calls(self) -> dict[RoutedCall, int]:
        """Kinds of calls, in the order in which they were first met, to how often they were made."""
        now = self._all() if self._after is None else self._after
        new = ((record, count - self._before.get(record, 0)) for record, count in now.items())
        return _counts((record, count) for record, count in new if count)

    @property
    def num_served(self) -> int:
        """Calls that kernels served."""
        return sum(count for kind, count in self.calls().items() if kind.served_by)

    @property
    def num_passed_on(self) -> int:
        """Calls that went to the library."""
        return sum(count for kind, count in self.calls().items() if not kind.served_by)

    def __str__(self) -> str:
        wrapped = textwrap.TextWrapper(120, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
        return "\n".join(wrapped.fill(f"{count} x {kind}") for kind, count in self.calls().items()) or "no calls"


def _register() -> None:
    """Put the kernels in place while any group is intercepted; a library that is dropped takes its kernels out."""
    wanted = {getattr(torch._C.DispatchKey, group.device.type.upper()) for group in _by_group.values()}
    _device_keys.intersection_update(wanted)
    if not wanted:
        _libraries.clear()
        intercepted.clear()
        for name, options in _OPTIONS.items():
            setattr(distributed_c10d, name, options)
    make: Any = torch.library.Library  # untyped
    if wanted and not _libraries:
        libraries = {namespace: make(namespace, "IMPL") for namespace in ("c10d", "_c10d_functional")}
        for reader in _readers():
            namespace, name = reader.name.split("::")
            libraries[namespace].impl(name, _kernel(reader), KEY, with_keyset=True)
        _libraries.extend(libraries.values())
        for name, options in _OPTIONS.items():
            setattr(distributed_c10d, name, _plain_sums(options))
        intercepted.append(True)
    if not any(group.symm_mem for group in _by_group.values()):
        _direct.clear()
    elif not _direct:
        _direct.append(make("symm_mem", "IMPL"))
        for each in _direct_readers():
            _direct[0].impl(each.base, _kernel(each), KEY, with_keyset=True)
    _device_keys.update(wanted)


def _enter(
    groups: tuple[dist.ProcessGroup | None, ...],
    max_count: int | None,
    numerics: NumericsPolicy | None,
    symm_mem: bool,
) -> tuple[RoutedGroup, ...]:
    """Intercept groups once more, collectively over each of them."""
    check_torch("tunedcomm.intercept()", "call tunedcomm.all_reduce and its like directly", _missing)
    check_limit("max_count", max_count, "rows")
    check_policy(numerics)
    # Collective; raises for a group that this rank is not in, or where there is no default group.
    communicators = [get_communicator(group) for group in groups or (None,) if not is_dry_run(group)]
    with _lock:
        for gone in [group for group in _by_group if group not in distributed_c10d._world.pg_names]:
            del _by_group[gone]
        wanted = (max_count, numerics, symm_mem)
        held = []
        for each in communicators:
            routed = _by_group.get(each.group) or RoutedGroup(
                each.group, each.device, max_count, numerics, symm_mem=symm_mem
            )
            if (routed.max_count, routed.numerics, routed.symm_mem) != wanted:
                raise UnsupportedInputError(
                    f"the group is intercepted with max_count={routed.max_count}, numerics={routed.numerics!r} and "
                    f"symm_mem={routed.symm_mem} already; pass the same"
                )
            held.append(routed)
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


@reusable
def intercept(
    *groups: dist.ProcessGroup | None,
    max_count: int | None = None,
    numerics: NumericsPolicy | None = None,
    symm_mem: bool = False,
) -> Iterator[Interception]:
    """Serve PyTorch's collectives on `groups` by tunedcomm inside the `with` block, with no line of the model changed.

    Served where the dispatcher chooses a kernel: `torch.distributed`'s `all_reduce`, `all_gather_into_tensor`,
    `all_gather` into tensors of the input's shape, `reduce_scatter_tensor`, `all_to_all_single` and `broadcast`, also
    with `async_op=True`; the functional collectives of these and what is made of them: their autograd forms, DTensor's
    redistributions, tensor parallel plans, compiled code. Coalesced reductions, gathers and reduce-scatters are served
    one after another if kernels serve all of them. All else, such as other list forms and other dtypes or reductions,
    goes to the library untouched.

    Args:
        groups: process groups that this rank belongs to; none, or None, for the default group. On all ranks of a group
            alike: entering is collective over each one whose first call this is. Blocks may be nested.
        max_count: rows at most that any rank sends any rank by `all_to_all_single` with split sizes, the same on every
            rank; see `all_to_all_v`. Without it such calls are the library's: ranks do not know each other's sizes and
            must choose alike. Functional all_to_all always has split sizes.
        numerics: the policy of these calls, as of `all_reduce`. With `ordered` a sum or mean of floats that no ordered
            variant can serve raises InfeasibleError and does not go to the library.
        symm_mem: also serve `torch.ops.symm_mem`'s `one_shot_all_reduce`, `one_shot_all_reduce_copy`,
            `two_shot_all_reduce_`, `multimem_all_reduce_`, `fused_all_gather_matmul`, `fused_matmul_reduce_scatter`
            and the scaled forms of these two, in the order that PyTorch's own give a program: all-reduces in graph
            captures, where a kernel and the barriers that it needs are faster; products where a fused GEMM is tuned.
            Bits may differ from PyTorch's operators, which round products before they sum them.

    Yields:
        Which calls were served and by what, which were not and why.

    Raises:
        NotInitializedError: no default process group.
        GroupError: not a member of a group, or it has no backend for this device.
        UnsupportedInputError: `max_count` is not a number of rows, `numerics` no policy, or an argument differs from
            a block around this one.
        UnsupportedVersionError: a torch that this is not known to work with (2.11 to 2.14 are).

    Results equal the library's within the tolerance of the variants: `ordered` ones sum in fp32 in rank order.
    """
    held = _enter(groups, max_count, numerics, symm_mem)
    interception = Interception(held)
    try:
        yield interception
    finally:
        interception.end()
        _leave(held)
    for routed in held:
        after_warmup(routed.group, routed.device)


def install(
    *groups: dist.ProcessGroup | None,
    max_count: int | None = None,
    numerics: NumericsPolicy | None = None,
    symm_mem: bool = False,
) -> Interception:
    """`intercept` from here on, until `uninstall()` or the end of the process; arguments and errors are the same."""
    held = _enter(groups, max_count, numerics, symm_mem)
    _installed.append(held)
    return Interception(held)


def uninstall() -> None:
    """Take back every `install()`; blocks of `intercept` that are open stay as they are."""
    while _installed:
        _leave(_installed.pop())
