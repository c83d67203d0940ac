"""From a public call to a launch: the one path of every op, for one tensor and for several.

An `OpAdapter` says what is special about an op; a `CallPath` does the rest, in two ways:

1. A call that looks like an earlier one runs that one's fast call: a function written for it by `make_fast_call`, which
   asks as little as it can and launches. The public function keeps the last one at hand.
2. Every other call is checked, planned, copied into a form that kernels take where that is needed, and launched. If no
   copy was needed, a fast call is made for its like.

A problem depends on what every rank passes alike, never on this rank's strides, alignment or aliases: those are dealt
with by copies that the other ranks do not see.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist
from torch.compiler import is_dynamo_compiling

from tunedcomm.dispatch.communicator import Communicator, PlanKey, current, on_drop, on_forget
from tunedcomm.dispatch.decide import check_library, check_limit, check_policy, forced_here
from tunedcomm.dispatch.group_settings import policies
from tunedcomm.dispatch.groups import end_group, get_communicator
from tunedcomm.dispatch.plans import Plan, library_plan, plan_for
from tunedcomm.dispatch.queue import is_putting_off, when_due
from tunedcomm.errors import NotInitializedError, TunedCommError, UnsupportedInputError
from tunedcomm.ops.adapter import CallArguments, CallSignature, Group, OpAdapter, Results, Tensors
from tunedcomm.ops.arguments import (
    check_apart,
    check_differentiable,
    check_fits,
    check_input,
    goes_by_operator,
    is_traced,
)
from tunedcomm.ops.fast_call import (
    FAST_CALL_NAME,
    FastCall,
    ServedCall,
    current_device,
    is_capturing,
    is_plain,
    is_usable,
    make_fast_call,
    new_result,
    raw_stream,
    world,
)
from tunedcomm.spec import Mode, NumericsPolicy, Problem

# What a call returns: a tensor, or a tuple of them where an op has several results.
Result = TypeVar("Result")

# Fast calls of one key: callers that alternate (with inference mode and without, say) need several.
_MAX_FAST_CALLS = 8
logger = logging.getLogger("tunedcomm")


def detached(tensor: torch.Tensor | None) -> torch.Tensor | None:
    """The tensor as one that needs no gradient."""
    return tensor.detach() if tensor is not None and tensor.requires_grad else tensor


def group_arguments(group: Group) -> tuple[int, str]:
    """A group as an operator's arguments: its size and its name.

    Raises:
        NotInitializedError: there is no default group.
    """
    if group is None:
        group = dist.group.WORLD
    if group is None:
        raise NotInitializedError(
            "torch.distributed has no default process group; call torch.distributed.init_process_group() first"
        )
    return group.size(), group.group_name


def call_operator(name: str, inputs: tuple[Any, ...], settings: tuple[Any, ...], refusal: str) -> Any:
    """The operator's new results.

    Args:
        name: of the operator.
        inputs: tensors, and None for those that are not there.
        settings: the arguments behind them.
        refusal: the call in words, where it has no gradient; "" where it has one.

    Raises:
        UnsupportedInputError: an input needs a gradient and the op has none.
    """
    operator = getattr(torch.ops.tunedcomm, name).default
    if refusal:
        try:
            check_differentiable(refusal, inputs)
        except UnsupportedInputError:
            if not is_dynamo_compiling():  # peers may need no gradients: they get their results
                with torch.no_grad(), contextlib.suppress(TunedCommError):
                    operator(*inputs, *settings)
            raise
    return operator(*inputs, *settings)


def leave(error: BaseException, what: str, x: Any, group: Group) -> None:
    """End the group if `error`, which leaves the public call `what` of `x`, may have come in the midst of it.

    An error with `ends_group = False` says that the call was refused. The same error ends the group if a signal handler
    or a finaliser made the refused call and let the error through into the call that it interrupted.
    """
    if not getattr(error, "ends_group", True) and _num_calls(error) < 2:
        return
    group = world._default_pg if group is None else group
    if isinstance(group, dist.ProcessGroup) and isinstance(x, torch.Tensor) and not is_traced(x):
        end_group(group, x.device.type, what, error)


def _num_calls(error: BaseException) -> int:
    """The number of calls that an error has passed through."""
    count, before, frame = 0, None, error.__traceback__
    serve = CallPath.serve.__code__
    while frame is not None:
        code = frame.tb_frame.f_code
        count += before is not serve and (code is serve or code.co_filename == FAST_CALL_NAME)
        before, frame = code, frame.tb_next
    return count


# Operator (for ops without one, op) to its path.
paths: dict[str, CallPath[Any]] = {}


@contextlib.contextmanager
def numerics(policy: NumericsPolicy) -> Iterator[None]:
    """Set the numerics policy of calls inside the `with` block that pass no `numerics`.

    It holds for the whole process, so for gradients that other threads compute, and for compiled code wherever it was
    compiled; graphs that are captured keep the kernels of their capture. Enter it on all ranks alike. Blocks may be
    nested; entering and leaving one costs about a microsecond, and repeated calls inside cost what others do.

    Args:
        policy: `default`, `ordered` or `any`, as of `all_reduce`.

    Raises:
        UnsupportedInputError: no such policy.
    """
    if policy is None:
        raise UnsupportedInputError("numerics(None) is not a policy; pass default, ordered or any")
    check_policy(policy)
    policies.append(policy)
    _switch()
    try:
        yield
    finally:
        del policies[len(policies) - 1 - policies[::-1].index(policy)]
        _switch()


def _switch() -> None:
    for path in paths.values():
        path.switch()


def forget_last(group: dist.ProcessGroup, dropped: Collection[FastCall] | None = None) -> None:
    """Let the group's next calls come to `CallPath.serve`: all of them, or those that one of `dropped` served last."""
    for path in paths.values():
        for last in list(path._last_by_policy.values()):
            if dropped is None or last.get(group) in dropped:
                last.pop(group, None)


on_drop.append(forget_last)


class LastCalls(dict[Group, Callable[..., Result | None]], Generic[Result]):
    """Process group to its last fast call; for a group that has none a function that, like one, serves no call."""

    def __missing__(self, group: Group) -> Callable[..., None]:
        return lambda *arguments: None


class CallPath(Generic[Result]):
    """The path of one op's calls.

    Attributes:
        last_fast_calls: process group to the fast call that served it last; nearly always the one of its next call,
            which asks. Calls without a group look up the default one each time, for groups may be destroyed and made
            again. Each policy of `tunedcomm.numerics` has a dict of its own: a repeated call need not ask which is in
            force.
    """

    def __init__(self, adapter: OpAdapter) -> None:
        self.adapter = adapter
        self._names = adapter.inputs if len(adapter.inputs) > 1 else ("",)  # in errors
        self._last_by_policy: dict[NumericsPolicy | None, LastCalls[Result]] = {}
        self.switch()
        self._communicators: dict[tuple[Group, torch.device], Communicator] = {}
        paths[adapter.operator] = self
        on_forget.extend((self._communicators.clear, self._forget))

    def switch(self) -> None:
        """Let `last_fast_calls` belong to the policy in force."""
        self.last_fast_calls = self._last_by_policy.setdefault(policies[-1] if policies else None, LastCalls())

    def _forget(self) -> None:
        for last in self._last_by_policy.values():
            last.clear()

    def call(
        self,
        tensors: Tensors,
        options: tuple[Any, ...],
        group: Group,
        numerics: NumericsPolicy | None,
        max_sms: int | None,
    ) -> Result:
        """Serve a call that no fast call served at once.

        Args:
            tensors: inputs, then outputs, as the caller gave them, whatever they are.
            options: the op's own.
            group, numerics, max_sms: as the caller gave them.
        """
        if is_dynamo_compiling():
            return self.operate(CallArguments(tensors, options, group, numerics, max_sms))
        if group is None:
            group = world._default_pg
        given = CallArguments(tensors, options, group, numerics, max_sms)
        if isinstance(group, dist.ProcessGroup) and goes_by_operator(tensors):
            return self.operate(given)
        return self.serve(given)

    def operate(self, given: CallArguments) -> Result:
        """Serve a call by the operator: what is recorded or traced. Traced by Dynamo itself."""
        adapter, options = self.adapter, given.options
        inputs, outputs = given.tensors[: len(adapter.inputs)], given.tensors[len(adapter.inputs) :]
        group_size, group_name = group_arguments(given.group)
        policy = (given.numerics,) if adapter.reduces else ()
        settings = (*options, group_size, group_name, *policy, given.max_sms)
        if all(output is None for output in outputs):
            made: Result = call_operator(adapter.operator, inputs, settings, adapter.refusal(inputs, options))
            return made
        filled = {
            name: inputs[0].new_empty(shape, dtype=dtype) if output is None else output
            for name, output, (shape, dtype) in zip(
                adapter.outputs, outputs, adapter.results(inputs, options, group_size), strict=True
            )
        }
        if is_dynamo_compiling():  # the operator checks its calls
            check_differentiable(f"{adapter.operator} into a given tensor", (*inputs, *filled.values()))
        if adapter.may_be_input and outputs[0] is inputs[0]:
            getattr(torch.ops.tunedcomm, f"{adapter.operator}_").default(*inputs, *settings)
        else:
            getattr(torch.ops.tunedcomm, adapter.operator).out(*inputs, *settings, **filled)
        return _unpacked(tuple(filled.values()))  # type: ignore[no-any-return]

    def on_error(self, error: BaseException, x: Any, group: Any) -> None:
        """Handle an exception that leaves the public function; see `leave`."""
        if isinstance(group, list):  # a TypeError of `last_fast_calls`, which takes no list for a key
            try:
                get_communicator(group)  # type: ignore[arg-type]
            except TunedCommError as refused:
                raise refused from None
        try:
            if not is_dynamo_compiling():
                leave(error, self.adapter.op, x, group)
        except BaseException:  # a second Ctrl-C
            leave(error, self.adapter.op, x, group)
            raise

    def communicator(self, x: torch.Tensor, group: Group) -> Communicator:
        """The communicator that serves `x` on `group`, remembered; made now if this is the group's first call.

        Raises:
            UnsupportedInputError: the group cannot work where `x` lives.
        """
        found = self._communicators.get((group, x.device)) if isinstance(group, dist.ProcessGroup) else None
        if found is not None:
            return found
        if x.device.type not in ("cuda", "cpu"):
            raise UnsupportedInputError(f"{self.adapter.op} serves cuda and cpu tensors, not {x.device}")
        found = get_communicator(group, x.device)
        if x.device != found.device:
            raise UnsupportedInputError(
                f"the tensor is on {x.device}, but rank {found.rank} of this group works on {found.device}; move the "
                "tensor, or call torch.cuda.set_device() before the group's first call"
            )
        self._communicators[group, x.device] = found
        return found

    def serve(self, given: CallArguments) -> Result:
        """Try the fast calls of this kind, else check, plan and launch; the tensors' device need not be current."""
        adapter, (tensors, options, group, numerics, max_sms) = self.adapter, given
        x = tensors[0]
        if not isinstance(x, torch.Tensor):
            check_input(adapter.op, x, self._names[0])
        if x.is_cuda and x.get_device() != current_device():
            with torch.cuda.device(x.device):
                return self.serve(given)
        communicator = self.communicator(x, group)
        options = adapter.check_own(options, communicator)
        put_off = is_putting_off()
        if not put_off:
            communicator.queue.join()
        lasts = self.last_fast_calls  # before the policy, for another thread may switch policies
        policy = communicator.policy(numerics)
        present = tuple([tensor is not None for tensor in tensors]) if adapter.repeats else ()
        signature = CallSignature(options, present, self._aliases(tensors), numerics, max_sms, is_capturing(), policy)
        kind = None  # the key of fast calls: what makes two calls of an op alike for this group
        if adapter.repeats and not (put_off or communicator.settings.debug):
            kind = (adapter.operator, adapter.key(tensors), x.dtype, signature)
        calls = communicator.fast_calls  # another one if the call itself makes the group choose anew
        try:
            known: tuple[tuple[FastCall, Plan], ...] | None = None if kind is None else calls.get(kind)
        except TypeError:  # an option that cannot even be a key: the checks say so
            kind = known = None
        for fast, _ in known or ():
            result: Result | None = fast(*tensors, *options, numerics, max_sms)
            if result is not None:
                lasts[group] = fast
                return result
        inputs, outputs = tensors[: len(adapter.inputs)], tensors[len(adapter.inputs) :]
        if communicator.settings.debug and not signature.capturing:
            communicator.agree_on_call(lambda: self._described(communicator, inputs, outputs, signature))
        wanted = self.checked_results(inputs, options, communicator.world_size, numerics, max_sms)
        values = tuple(map(detached, inputs))
        try:
            self._check_outputs(communicator, inputs, outputs, wanted, options)
        except UnsupportedInputError:  # which rests on this rank alone: it takes part, so that no peer waits for it
            with contextlib.suppress(TunedCommError):
                self.fill_results(communicator, values, _complete((None,) * len(outputs), wanted, x.device), signature)
            raise
        results = _complete(outputs, wanted, x.device)
        plan = self.fill_results(communicator, values, tuple(map(detached, results)), signature)
        if kind is not None and plan is not None and calls is communicator.fast_calls:
            if known is None:  # to write a function pays from the second call on
                communicator.keep_fast_call(kind)
            elif len(known) < _MAX_FAST_CALLS:
                made = make_fast_call(ServedCall(communicator, adapter, plan, tensors, results, signature))
                if made is not None:
                    communicator.keep_fast_call(kind, made, plan)
                    lasts[group] = made
        return _unpacked(results)  # type: ignore[no-any-return]

    def serve_again(
        self,
        tensors: Tensors,
        options: tuple[Any, ...],
        group: Group,
        numerics: NumericsPolicy | None,
        max_sms: int | None,
    ) -> Result:
        """`serve`, but by the group's last fast call if that takes the call."""
        result = self.last_fast_calls[group](*tensors, *options, numerics, max_sms)
        return self.serve(CallArguments(tensors, options, group, numerics, max_sms)) if result is None else result

    def run_problem(self, problem: Problem, inputs: Tensors, outputs: Tensors) -> None:
        """The public call that asks for `problem` on the default group, for benchmarks."""
        tensors, options = self.adapter.call_of(problem, inputs, outputs)
        self.serve_again(tensors, options, world._default_pg, None if self.adapter.reduces else "default", None)

    def planned(
        self,
        inputs: Tensors,
        options: tuple[Any, ...],
        group: Group,
        numerics: NumericsPolicy | None,
        *,
        max_sms: int | None = None,
        in_place: bool = False,
        symmetric: bool = False,
    ) -> Plan:
        """The plan of a call with such inputs, in plain memory if not `symmetric`; bound now, but not launched.

        Raises:
            UnsupportedInputError: the call would be refused.
            InfeasibleError: as for the call.
        """
        communicator = self.communicator(inputs[0], group)
        for name, tensor in zip(self.adapter.inputs, inputs, strict=True):
            if tensor is not None:
                check_input(self.adapter.op, tensor, name)
        self.adapter.check(inputs, options, communicator.world_size)
        inputs = tuple(map(detached, inputs))
        with current(communicator.device):
            policy = communicator.policy(numerics)
            signature = CallSignature(options, (), (), numerics, max_sms, is_capturing(), policy)
            problem = self._problem(communicator, inputs, signature, in_place=in_place, symmetric=symmetric)
            return self._plan(communicator, problem, signature)[0]

    def _aliases(self, tensors: Tensors, *, by_memory: bool = False) -> tuple[int, ...]:
        """For each output the index of the input that it is (whose memory it takes), or −1."""
        adapter = self.adapter
        if not adapter.aliases:
            return (-1,) * len(adapter.outputs)
        found = []
        for name, output in zip(adapter.outputs, tensors[len(adapter.inputs) :], strict=True):
            index = adapter.inputs.index(adapter.aliases[name]) if name in adapter.aliases else -1
            source = None if index < 0 or output is None else tensors[index]
            is_it = source is not None and (source.data_ptr() == output.data_ptr() if by_memory else source is output)
            found.append(index if is_it else -1)
        return tuple(found)

    def fill_results(
        self, communicator: Communicator, inputs: Tensors, targets: Tensors, signature: CallSignature
    ) -> Plan | None:
        """Fill the results of a checked call; the plan, if a fast call may be made of it."""
        adapter = self.adapter
        if adapter.needs_no_peers(inputs, targets, signature.options):
            return None
        served = adapter.launch_inputs(inputs)
        if communicator.world_size == 1:
            adapter.fill_alone(communicator, served, targets, signature.options)
            return None
        shared = self._aliases((*served, *targets), by_memory=True)
        problem = self._problem(communicator, served, signature, in_place=shared[0] == 0)
        plan, kept = self._plan(communicator, problem, signature)
        if signature.capturing:
            communicator.captured(plan)  # also where another one is launched in its place
        plan = adapter.extend(plan, communicator, served, signature)
        as_they_are = self._launch(communicator, plan, served, targets, shared, signature)
        # An output that covers its input without being it has no fast call.
        repeats = kept and adapter.repeats and served is inputs and shared == signature.aliases
        return plan if repeats and as_they_are else None

    def checked_results(
        self, inputs: Tensors, options: Any, world_size: int, numerics: NumericsPolicy | None, max_sms: int | None
    ) -> Results:
        """Shape and dtype of every output, from shapes, dtypes and devices alone.

        Raises:
            UnsupportedInputError: no variant takes such a call; says what to do.
        """
        adapter, x = self.adapter, inputs[0]
        for name, tensor in zip(self._names, inputs, strict=True):
            if tensor is not None:
                check_input(adapter.op, tensor, name)
                if tensor is not x and tensor.device != x.device:
                    raise UnsupportedInputError(
                        f"{name} of {adapter.op} is on {tensor.device}, {self._names[0]} on {x.device}; move one to "
                        "the other's device"
                    )
        check_policy(numerics)
        check_limit("max_sms", max_sms, "SMs")
        adapter.check(inputs, options, world_size)
        return adapter.results(inputs, options, world_size)

    def _check_outputs(
        self, communicator: Communicator, inputs: Tensors, outputs: Tensors, wanted: Results, options: Any
    ) -> None:
        """Refuse outputs that cannot hold the results, with the way out."""
        adapter, x = self.adapter, inputs[0]
        for index, (name, output) in enumerate(zip(adapter.outputs, outputs, strict=True)):
            if output is None:
                continue
            shape, dtype = wanted[index]
            alias = adapter.aliases.get(name)
            check_fits(x, output, shape, dtype, name=name, input_name=adapter.inputs[0])
            names = (*adapter.inputs, *adapter.outputs[:index])
            for other_name, other in zip(names, (*inputs, *outputs[:index]), strict=True):
                held = other is x and adapter.may_hold_input(inputs, options, output, communicator.rank)
                if other is not None and not (held and not communicator.is_symmetric(x)):
                    check_apart(other, output, may_be_other=alias == other_name, name=name, other_name=other_name)
        check_differentiable(adapter.op, (*inputs, *outputs))

    def _described(
        self, communicator: Communicator, inputs: Tensors, outputs: Tensors, signature: CallSignature
    ) -> dict[str, Any]:
        """The parts of a call that every rank must ask for alike; refuses what the call would be refused for."""
        adapter = self.adapter
        wanted = self.checked_results(
            inputs, signature.options, communicator.world_size, signature.numerics, signature.max_sms
        )
        self._check_outputs(communicator, inputs, outputs, wanted, signature.options)
        in_place = self._aliases((*inputs, *outputs), by_memory=True)[0] == 0
        problem = self._problem(communicator, tuple(map(detached, inputs)), signature, in_place=in_place)
        return {
            "op": adapter.operator,
            **problem.to_dict(),
            "tensors": ", ".join(name for name, x in zip(adapter.inputs, inputs, strict=True) if x is not None),
            "options": adapter.common_options(signature.options),
            "numerics": signature.policy,
            "max_sms": signature.max_sms,
            "tunedcomm.force": forced_here().get(adapter.op),
        }

    def _problem(
        self,
        communicator: Communicator,
        inputs: Tensors,
        signature: CallSignature,
        *,
        in_place: bool,
        symmetric: bool | None = None,
    ) -> Problem:
        """The problem of a call, alike on all ranks.

        Args:
            communicator, inputs, signature: of the call.
            in_place: the first output takes the memory of its input.
            symmetric: peers can address the first input; None: as it is.

        Raises:
            UnsupportedInputError: peers can address it, but not as kernels do.
        """
        adapter, x, options = self.adapter, inputs[0], signature.options
        problem = adapter.problem(inputs, options, communicator.world_size)
        if adapter.depends_on_memory:
            if symmetric is None:
                symmetric = communicator.any_symmetric and adapter.is_direct(inputs, options)
                symmetric = symmetric and communicator.is_symmetric(x)
                if symmetric and not is_usable(x):
                    raise UnsupportedInputError(
                        "a tensor in symmetric memory must be contiguous and start at a multiple of 16 bytes, for "
                        "peers address it too; pass such a view of it, or x.clone() on every rank"
                    )
            problem = replace(problem, in_place=in_place, input_kind="symmetric" if symmetric else "plain")
        return adapter.under_policy(problem, signature.policy)

    def _plan(self, communicator: Communicator, problem: Problem, signature: CallSignature) -> tuple[Plan, bool]:
        """Return the plan, and True if the group keeps it.

        A new problem gets a plan for each mode. In a capture the library serves a new problem, by a plan that is not
        kept, for nothing can be bound there.
        """
        capturing, key = signature.capturing, (problem, signature.policy, signature.max_sms)
        found: Plan | None = communicator.plans.get(PlanKey(*key, capturing))
        if found is not None:
            return found, True
        now = replace(problem, mode="graph" if capturing else "eager")
        if not self.adapter.is_bounded(signature.options):
            plan = library_plan(communicator, now)
            communicator.keep_plans(key, {capturing: plan})
            return plan, True
        if capturing:
            check_library(now, signature.policy, "it is captured without having been called before")
            logger.warning(
                "%s is captured without having been called before: the library serves it in this graph; run the same "
                "call once before the capture (a warm-up) to have it tuned",
                now,
            )
            return library_plan(communicator, now), False
        modes: tuple[Mode, ...] = ("eager", "graph") if communicator.device.type == "cuda" else ("eager",)
        made: dict[Mode, Plan] = {}
        checks = None
        while checks is not communicator.snapshot.checks:  # a check of one mode may rule the other's candidate out
            checks = communicator.snapshot.checks
            for mode in modes:
                made[mode] = plan_for(communicator, replace(problem, mode=mode), signature.policy, signature.max_sms)
        communicator.keep_plans(key, {mode == "graph": plan for mode, plan in made.items()})
        return made["eager"], True

    def _launch(
        self,
        communicator: Communicator,
        plan: Plan,
        inputs: Tensors,
        targets: Tensors,
        shared: tuple[int, ...],
        signature: CallSignature,
    ) -> bool:
        """Launch, with copies of tensors that kernels do not take; True if they took all as they are.

        Args:
            communicator, plan, signature: of the call.
            inputs, targets: tensors that it reads and fills.
            shared: for each target the index of the input whose memory it takes, or −1.
        """
        adapter, options = self.adapter, signature.options
        stream = raw_stream(communicator.device_index) if inputs[0].is_cuda else 0
        communicator.order_streams(signature.capturing, stream)
        direct = adapter.is_direct(inputs, options)
        fits = is_usable if plan.wants_aligned or adapter.wants_aligned else is_plain
        sources = [
            t if t is None or fits(t) else t.clone(memory_format=torch.contiguous_format)
            for t in adapter.operands(inputs, options)
        ]
        sinks: list[Any] = []
        for target, index in zip(targets, shared, strict=True):
            if index < 0 and not (direct and fits(target)):
                sinks.append(torch.empty(target.shape, dtype=target.dtype, device=target.device))
            else:
                sinks.append(target if index < 0 else sources[index])
        if signature.capturing:
            communicator.captured(plan)
        given = (*[t for t in sources if t is not None], *adapter.scalars(inputs, options))

        def launch() -> None:
            communicator.check_peers()
            plan.launch(given, tuple(map(adapter.launch_output, sinks)), stream)
            for sink, target in zip(sinks, targets, strict=True):
                if sink is not target and sink.data_ptr() != target.data_ptr():
                    left = sink if direct else adapter.as_result(sink, inputs, options, communicator.world_size)
                    target.view(left.shape).copy_(left)

        when_due(launch)
        return direct and all(
            source is tensor or source.data_ptr() == tensor.data_ptr()
            for source, tensor in zip((*sources, *sinks), (*inputs, *targets), strict=True)
        )


def _complete(outputs: Tensors, wanted: Results, device: torch.device) -> tuple[torch.Tensor, ...]:
    """The outputs, those that are None in new memory."""
    return tuple(
        [
            new_result(shape, dtype, device) if given is None else given
            for given, (shape, dtype) in zip(outputs, wanted, strict=True)
        ]
    )


def _unpacked(results: tuple[torch.Tensor, ...]) -> Any:
    return results if len(results) > 1 else results[0]
