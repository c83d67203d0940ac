"""From a public call to a launch: the one path of every op, for one tensor and for several.

A `Form` says what is special about an op; a `CallPath` does the rest, in two ways:

1. A call that looks like an earlier one runs that one's fast call: a function written for it by `make_fast_call`, which
   asks as little as it can and launches. The public function keeps the last one at hand.
2. Every other call is checked, planned, copied into a form that kernels take where that is needed, and launched. If no
   copy was needed, a fast call is made for its like.

A problem depends on what every rank passes alike, never on this rank's strides, alignment or aliases: those are dealt
with by copies that the other ranks do not see.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Generic, NamedTuple, TypeAlias, TypeVar

import torch
import torch.distributed as dist
from torch.autograd import forward_ad
from torch.compiler import is_dynamo_compiling

from tunedcomm.dispatch.communicator import Communicator, get_communicator, on_forget, policies
from tunedcomm.dispatch.dispatcher import check_limit, check_policy
from tunedcomm.dispatch.plans import Plan, check_library, library_plan, plan_for
from tunedcomm.errors import NotInitializedError, UnsupportedInputError
from tunedcomm.kernels.common.launch import AddressLaunch
from tunedcomm.ops.checks import check_apart, check_differentiable, check_fits, check_input, goes_by_operator
from tunedcomm.spec import Mode, NumericsPolicy, Problem
from tunedcomm.symm.buffer import with_huge_pages

Tensors: TypeAlias = tuple[Any, ...]
Group: TypeAlias = "dist.ProcessGroup | None"
# Shape and dtype of every output.
Results: TypeAlias = list[tuple[tuple[int, ...], torch.dtype]]
# What a call returns: a tensor, or a tuple of them where an op has several results.
Result = TypeVar("Result")
# (inputs…, outputs…, options…, numerics, max_sms) to the result, or None where the call differs from the one before.
FastCall: TypeAlias = Callable[..., Any]

_MISALIGNED = 15  # kernels move 16-byte packets
# Fast calls of one key: callers that alternate (with inference mode and without, say) need several.
_MAX_FAST_CALLS = 8
logger = logging.getLogger("tunedcomm")


# What the hot path asks torch, by the cheapest call that this torch has. All act on the current device.


class _PublicWorld:
    """The default group as torch's public interface has it."""

    @property
    def _default_pg(self) -> Group:
        return dist.group.WORLD


# Where torch keeps the default group: a sixth of what asking the public interface costs.
world: Any = getattr(dist.distributed_c10d, "_world", None)
world = world if hasattr(world, "_default_pg") else _PublicWorld()


def _empty(shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty_strided(shape, stride, dtype=dtype, device=_device_type)


# The C library keeps smaller blocks that were freed, with their pages; those of larger ones are made for each call.
_LEAST_ON_HUGE_PAGES = 32 << 20


def _empty_on_huge_pages(shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    return with_huge_pages(torch.empty_strided(shape, stride, dtype=dtype, device="cpu"))


_device_type = "cpu"
raw_stream: Callable[[int], int] = lambda device: 0  # noqa: E731
is_capturing: Callable[[], bool] = bool
current_device: Callable[[], int] = lambda: -1  # noqa: E731
empty: Callable[[Sequence[int], Sequence[int], torch.dtype], torch.Tensor] = _empty
_guards: Any = getattr(torch._C._dynamo, "guards", None)
if torch.cuda.is_available():
    _device_type = "cuda"
    raw_stream = torch._C._cuda_getCurrentRawStream
    is_capturing = torch._C._cuda_isCurrentStreamCapturing
    current_device = torch._C._cuda_getDevice
    # Inductor's allocation: a third of torch.empty's cost.
    empty = getattr(_guards, "_empty_strided_cuda", _empty)


class Form(ABC):
    """The part of a call that is special to one op.

    Methods get a call's inputs as a tuple in the order of `inputs`, None for those that are not there, and its options
    as a tuple in the order of `options`.

    Attributes:
        op: the op's name.
        inputs, outputs: names of the tensors, in the order of the operator's schema and of launches; the first input is
            never None.
        optional: inputs that may be None.
        aliases: output to the input whose place it may take.
        options: the options as the operator's schema declares them.
        reduces: the operator takes `numerics`.
        has_operator: the op is one of `torch.ops.tunedcomm`.
        repeats: calls with the same options come again, so that fast calls pay.
        tells_memory: problems say whether the input is in symmetric memory and whether the result takes its place.
        wants_aligned: the library, too, takes tensors at 16-byte boundaries only.
    """

    op: str
    inputs: tuple[str, ...] = ("x",)
    outputs: tuple[str, ...] = ("out",)
    optional: tuple[str, ...] = ()
    aliases: Mapping[str, str] = {}
    options: tuple[str, ...] = ()
    reduces = True
    has_operator = True
    repeats = True
    tells_memory = False
    wants_aligned = False

    @property
    def operator(self) -> str:
        """The operator's name in `torch.ops.tunedcomm`; the op's, unless an op has several."""
        return self.op

    @property
    def may_be_input(self) -> bool:
        """True if the one output may take the first input's place."""
        return self.aliases == {self.outputs[0]: self.inputs[0]} and len(self.outputs) == 1

    @abstractmethod
    def check(self, inputs: Tensors, options: Any, world_size: int) -> None:
        """Refuse what no variant takes; every input is a dense tensor on one device, or None.

        Raises:
            UnsupportedInputError: says what to do.
        """

    @abstractmethod
    def problem(self, inputs: Tensors, options: Any, world_size: int) -> Problem:
        """The problem of a call that was checked: eager, on plain inputs, out of place."""

    def results(self, inputs: Tensors, options: Any, world_size: int) -> Results:
        """Shape and dtype of every output; by default those of the first input."""
        return [(tuple(inputs[0].shape), inputs[0].dtype)]

    def refusal(self, inputs: Tensors, options: Any) -> str:
        """The call in words, where it has no gradient; "" where it has one."""
        return ""

    def key(self, tensors: Tensors) -> Hashable:
        """The key that tells calls apart, besides the first input's dtype and the options."""
        return tuple(tensors[0].shape)

    def is_idle(self, inputs: Tensors, results: Tensors, options: Any) -> bool:
        """True if the results, filled in now, ask nothing of the peers; every rank must come to the same answer."""
        return bool(inputs[0].numel() == 0)

    def is_bounded(self, options: Any) -> bool:
        """False for calls that the library serves because ranks have nothing in common to choose a kernel by."""
        return True

    def common_options(self, options: Any) -> Any:
        """The options that every rank passes alike."""
        return options

    def served(self, inputs: Tensors) -> Tensors:
        """Inputs to launch with: those of the call, or others that give the same results."""
        return inputs

    def alone(self, inputs: Tensors, options: Any) -> Tensors:
        """The results in a group of one."""
        return inputs[:1]

    def is_direct(self, inputs: Tensors, options: Any) -> bool:
        """True if kernels write the elements of results in the order in which the caller wants them."""
        return True

    def operands(self, inputs: Tensors, options: Any) -> Tensors:
        """The inputs in the shapes and orders that launches take: views, or copies where there is no such view."""
        return inputs

    def scalars(self, inputs: Tensors, options: Any) -> Tensors:
        """Arguments that launches of tensors take after the inputs."""
        return ()

    def scalar_args(self, options: Any) -> tuple[int, ...]:
        """Arguments that launches by address take after the outputs."""
        return ()

    def written(self, output: torch.Tensor) -> torch.Tensor:
        """A contiguous output as a view of the shape that launches write."""
        return output

    def leave(self, written: torch.Tensor, inputs: Tensors, options: Any, world_size: int) -> torch.Tensor:
        """View what kernels wrote in the result's order, for calls that are not direct.

        Dimensions of the result may be split: (2, 3) may be left where the shape has 6.
        """
        return written


class Asked(NamedTuple):
    """The arguments that a fast call is made for, besides tensors of one kind.

    Attributes:
        options: the op's own.
        present: for each tensor, whether it is there.
        aliases: for each output, the index of the input that it is, or −1.
        numerics, max_sms: as the caller gave them.
        capturing: whether a graph is being captured.
        policy: the numerics policy, where the caller gave none the one in force.
    """

    options: tuple[Any, ...]
    present: tuple[bool, ...]
    aliases: tuple[int, ...]
    numerics: NumericsPolicy | None
    max_sms: int | None
    capturing: bool
    policy: NumericsPolicy


def detached(tensor: torch.Tensor | None) -> torch.Tensor | None:
    """The tensor as one that needs no gradient."""
    return tensor.detach() if tensor is not None and tensor.requires_grad else tensor


def is_plain(tensor: torch.Tensor) -> bool:
    """True if the tensor's memory holds its elements, in order."""
    return tensor.is_contiguous() and not tensor.is_neg() and not tensor.is_conj()


def is_usable(tensor: torch.Tensor) -> bool:
    """True if kernels take the tensor as it is."""
    return is_plain(tensor) and not tensor.data_ptr() & _MISALIGNED


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
    if refusal:
        check_differentiable(refusal, inputs)
    return getattr(torch.ops.tunedcomm, name).default(*inputs, *settings)


# A problem costs more to make than to look up.
problem_of = functools.lru_cache(1024)(Problem)

# Operator (for ops without one, op) to its path.
paths: dict[str, CallPath[Any]] = {}


@contextlib.contextmanager
def numerics(policy: NumericsPolicy) -> Iterator[None]:
    """Let calls inside the `with` block that pass no `numerics` of their own have this one.

    It holds for the whole process, so for gradients that other threads compute, and for compiled code wherever it was
    compiled; graphs that are captured keep the kernels of their capture. Enter it on all ranks alike. Blocks may be
    nested; entering and leaving one costs about a microsecond, and repeated calls inside cost what others do.

    Args:
        policy: `default`, `ordered` or `any`, as of `all_reduce`.

    Raises:
        UnsupportedInputError: no such policy.
    """
    if policy is None:
        raise UnsupportedInputError("numerics(None) is no policy; pass default, ordered or any")
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


class CallPath(Generic[Result]):
    """The path of one op's calls.

    Attributes:
        last: process group to the fast call that served it last; nearly always that of its next call, which asks.
            Calls without a group look up the default one each time, for groups may be destroyed and made again.
            Each policy of `tunedcomm.numerics` has a dict of its own: a repeated call need not ask which is in force.
    """

    def __init__(self, form: Form) -> None:
        self.form = form
        self._names = form.inputs if len(form.inputs) > 1 else ("",)  # in errors
        self._lasts: dict[NumericsPolicy | None, dict[Group, Callable[..., Result | None]]] = {}
        self.switch()
        self._communicators: dict[tuple[Group, torch.device], Communicator] = {}
        paths[form.operator] = self
        on_forget(self._communicators.clear)
        on_forget(self._forget)

    def switch(self) -> None:
        """Let `last` be that of the policy in force."""
        self.last = self._lasts.setdefault(policies[-1] if policies else None, {})

    def _forget(self) -> None:
        for last in self._lasts.values():
            last.clear()

    def call(
        self,
        tensors: Tensors,
        options: tuple[Any, ...],
        group: Group,
        numerics: NumericsPolicy | None,
        max_sms: int | None,
    ) -> Result:
        """Serve a call that `last` did not.

        Args:
            tensors: inputs, then outputs, as the caller gave them, whatever they are.
            options: the op's own.
            group, numerics, max_sms: as the caller gave them.
        """
        if is_dynamo_compiling():
            return self.operate(tensors, options, group, numerics, max_sms)
        if group is None:
            group = world._default_pg
        if isinstance(group, dist.ProcessGroup) and goes_by_operator(tensors):
            return self.operate(tensors, options, group, numerics, max_sms)
        return self.serve(tensors, options, group, numerics, max_sms)

    def operate(
        self,
        tensors: Tensors,
        options: tuple[Any, ...],
        group: Group,
        numerics: NumericsPolicy | None,
        max_sms: int | None,
    ) -> Result:
        """Serve a call by the operator: what is recorded or traced. Traced by Dynamo itself."""
        form = self.form
        inputs, outputs = tensors[: len(form.inputs)], tensors[len(form.inputs) :]
        group_size, group_name = group_arguments(group)
        policy = (numerics,) if form.reduces else ()
        settings = (*options, group_size, group_name, *policy, max_sms)
        if all(output is None for output in outputs):
            made: Result = call_operator(form.operator, inputs, settings, form.refusal(inputs, options))
            return made
        given = {
            name: inputs[0].new_empty(shape, dtype=dtype) if output is None else output
            for name, output, (shape, dtype) in zip(
                form.outputs, outputs, form.results(inputs, options, group_size), strict=True
            )
        }
        check_differentiable(f"{form.operator} into a given tensor", (*inputs, *given.values()))
        if form.may_be_input and outputs[0] is inputs[0]:
            getattr(torch.ops.tunedcomm, f"{form.operator}_").default(*inputs, *settings)
        else:
            getattr(torch.ops.tunedcomm, form.operator).out(*inputs, *settings, **given)
        return _unpacked(tuple(given.values()))  # type: ignore[no-any-return]

    def communicator(self, x: torch.Tensor, group: Group) -> Communicator:
        """The communicator that serves `x` on `group`, remembered; made now if this is the group's first call.

        Raises:
            UnsupportedInputError: the group cannot work where `x` lives.
        """
        found = self._communicators.get((group, x.device))
        if found is not None:
            return found
        if x.device.type not in ("cuda", "cpu"):
            raise UnsupportedInputError(f"{self.form.op} serves cuda and cpu tensors, not {x.device}")
        found = get_communicator(group, x.device)
        if x.device != found.device:
            raise UnsupportedInputError(
                f"the tensor is on {x.device}, but rank {found.rank} of this group works on {found.device}; move the "
                "tensor, or call torch.cuda.set_device() before the group's first call"
            )
        self._communicators[group, x.device] = found
        return found

    def serve(
        self,
        tensors: Tensors,
        options: tuple[Any, ...],
        group: Group,
        numerics: NumericsPolicy | None,
        max_sms: int | None,
    ) -> Result:
        """`call` for plain tensors, at once."""
        form, x = self.form, tensors[0]
        if not isinstance(x, torch.Tensor):
            check_input(form.op, x, self._names[0])
        communicator = self.communicator(x, group)
        lasts, policy = self.last, communicator.policy(numerics)  # in this order: another thread may switch policies
        present = tuple([tensor is not None for tensor in tensors]) if form.repeats else ()
        asked = Asked(options, present, self._aliases(tensors), numerics, max_sms, is_capturing(), policy)
        known: tuple[FastCall, ...] | None = None
        calls = communicator.fast_calls  # another one if the call itself makes the group choose anew
        if form.repeats and not communicator.settings.debug:
            key = (form.operator, form.key(tensors), x.dtype, asked)
            with contextlib.suppress(TypeError):  # an option that cannot even be a key: the checks say so
                known = calls.get(key, ())
        if known is None:
            return _unpacked(self._serve(communicator, tensors, asked)[0])  # type: ignore[no-any-return]
        last = lasts.get(group)
        for fast in known:
            result: Result | None = None if fast is last else fast(*tensors, *options, numerics, max_sms)
            if result is not None:
                lasts[group] = fast
                return result
        results, plan = self._serve(communicator, tensors, asked)
        if plan is not None and len(known) < _MAX_FAST_CALLS and calls is communicator.fast_calls:
            made = make_fast_call(communicator, form, plan, (tensors, results), asked)
            if made is not None:
                calls[key] = (*known, made)
                lasts[group] = made
        return _unpacked(results)  # type: ignore[no-any-return]

    def planned(
        self,
        inputs: Tensors,
        options: tuple[Any, ...],
        group: Group,
        numerics: NumericsPolicy | None,
        *,
        in_place: bool = False,
    ) -> Plan:
        """The plan of a call with such inputs in plain memory; bound now, but not launched.

        Raises:
            UnsupportedInputError: the call would be refused.
            InfeasibleError: as for the call.
        """
        communicator = self.communicator(inputs[0], group)
        for name, tensor in zip(self.form.inputs, inputs, strict=True):
            check_input(self.form.op, tensor, name)
        self.form.check(inputs, options, communicator.world_size)
        inputs = tuple(tensor.detach() for tensor in inputs)
        asked = Asked(options, (), (), numerics, None, is_capturing(), communicator.policy(numerics))
        return self._plan(communicator, inputs, asked, in_place=in_place, symmetric=False)[0]

    def _aliases(self, tensors: Tensors, *, by_memory: bool = False) -> tuple[int, ...]:
        """For each output the index of the input that it is (whose memory it takes), or −1."""
        form = self.form
        if not form.aliases:
            return (-1,) * len(form.outputs)
        found = []
        for name, output in zip(form.outputs, tensors[len(form.inputs) :], strict=True):
            index = form.inputs.index(form.aliases[name]) if name in form.aliases else -1
            source = None if index < 0 or output is None else tensors[index]
            is_it = source is not None and (source.data_ptr() == output.data_ptr() if by_memory else source is output)
            found.append(index if is_it else -1)
        return tuple(found)

    def _serve(
        self, communicator: Communicator, tensors: Tensors, asked: Asked
    ) -> tuple[tuple[torch.Tensor, ...], Plan | None]:
        """Check and run; the results, and the plan if a fast call may be made of it."""
        num_inputs = len(self.form.inputs)
        inputs, outputs = tensors[:num_inputs], tensors[num_inputs:]
        if not asked.capturing:
            communicator.agree_on_call(lambda: self._described(communicator, inputs, outputs, asked))
        wanted = self._check(inputs, outputs, asked, communicator.world_size)
        x = inputs[0]
        if x.is_cuda and x.get_device() != current_device():
            with torch.cuda.device(x.device):
                return self._serve(communicator, tensors, asked)
        device = x.device
        results = tuple(
            [
                _new(shape, dtype, device) if given is None else given
                for given, (shape, dtype) in zip(outputs, wanted, strict=True)
            ]
        )
        return results, self.run(communicator, tuple(map(detached, inputs)), tuple(map(detached, results)), asked)

    def run(self, communicator: Communicator, inputs: Tensors, targets: Tensors, asked: Asked) -> Plan | None:
        """Fill the results of a checked call; the plan, if a fast call may be made of it."""
        form = self.form
        if form.is_idle(inputs, targets, asked.options):
            return None
        served = form.served(inputs)
        if communicator.world_size == 1:
            for target, value in zip(targets, form.alone(served, asked.options), strict=True):
                target.copy_(value)
            return None
        plan = self._launch(communicator, served, targets, asked)
        return plan if served is inputs else None

    def results(
        self, inputs: Tensors, options: Any, world_size: int, numerics: NumericsPolicy | None, max_sms: int | None
    ) -> Results:
        """Shape and dtype of every output, from shapes, dtypes and devices alone.

        Raises:
            UnsupportedInputError: no variant takes such a call; says what to do.
        """
        form, x = self.form, inputs[0]
        for name, tensor in zip(self._names, inputs, strict=True):
            if tensor is not None:
                check_input(form.op, tensor, name)
                if tensor is not x and tensor.device != x.device:
                    raise UnsupportedInputError(
                        f"{name} of {form.op} is on {tensor.device}, {self._names[0]} on {x.device}; move one to the "
                        "other's device"
                    )
        check_policy(numerics)
        check_limit("max_sms", max_sms, "SMs")
        form.check(inputs, options, world_size)
        return form.results(inputs, options, world_size)

    def _check(self, inputs: Tensors, outputs: Tensors, asked: Asked, world_size: int) -> Results:
        """Refuse what no variant takes, with the way out; shape and dtype of every output."""
        form, x = self.form, inputs[0]
        wanted = self.results(inputs, asked.options, world_size, asked.numerics, asked.max_sms)
        for number, (name, output) in enumerate(zip(form.outputs, outputs, strict=True)):
            if output is None:
                continue
            shape, dtype = wanted[number]
            alias = form.aliases.get(name)
            check_fits(x, output, shape, dtype, name=name, input_name=form.inputs[0])
            names = (*form.inputs, *form.outputs[:number])
            for other_name, other in zip(names, (*inputs, *outputs[:number]), strict=True):
                if other is not None:
                    check_apart(other, output, may_be_other=alias == other_name, name=name, other_name=other_name)
        check_differentiable(form.op, (*inputs, *outputs))
        return wanted

    def _described(self, communicator: Communicator, inputs: Tensors, outputs: Tensors, asked: Asked) -> dict[str, Any]:
        """The parts of a call that every rank must ask for alike; refuses what the call would be refused for."""
        form = self.form
        self._check(inputs, outputs, asked, communicator.world_size)
        problem = form.problem(tuple(map(detached, inputs)), asked.options, communicator.world_size)
        if form.tells_memory:
            in_place = self._aliases((*inputs, *outputs), by_memory=True)[0] == 0
            is_symmetric = communicator.is_symmetric(inputs[0]) and form.is_direct(inputs, asked.options)
            problem = replace(problem, in_place=in_place, input_kind="symmetric" if is_symmetric else "plain")
        return {
            "op": form.operator,
            **problem.to_dict(),
            "options": form.common_options(asked.options),
            "numerics": asked.policy,
            "max_sms": asked.max_sms,
        }

    def _launch(self, communicator: Communicator, inputs: Tensors, targets: Tensors, asked: Asked) -> Plan | None:
        """Plan and launch; the plan, if it is kept and kernels took all tensors as they are."""
        form, x, options = self.form, inputs[0], asked.options
        direct = form.is_direct(inputs, options)
        symmetric = form.tells_memory and direct and communicator.any_symmetric and communicator.is_symmetric(x)
        if symmetric and not is_usable(x):
            raise UnsupportedInputError(
                "a tensor in symmetric memory must be contiguous and start at a multiple of 16 bytes, for peers "
                "address it too; pass such a view of it, or x.clone() on every rank"
            )
        shared = self._aliases((*inputs, *targets), by_memory=True)
        plan, kept = self._plan(communicator, inputs, asked, in_place=shared[0] == 0, symmetric=symmetric)
        communicator.check_peers()
        stream = raw_stream(communicator.device_index) if x.is_cuda else 0
        communicator.order_streams(asked.capturing, stream)
        fits = is_usable if plan.wants_aligned or form.wants_aligned else is_plain
        sources = [
            t if t is None or fits(t) else t.clone(memory_format=torch.contiguous_format)
            for t in form.operands(inputs, options)
        ]
        sinks = []
        for target, index in zip(targets, shared, strict=True):
            if index >= 0:
                sinks.append(sources[index])
            else:
                as_is = direct and fits(target)
                sinks.append(target if as_is else torch.empty(target.shape, dtype=target.dtype, device=target.device))
        if asked.capturing:
            communicator.captured(plan)
        given = (*[t for t in sources if t is not None], *form.scalars(inputs, options))
        plan.launch(given, tuple(map(form.written, sinks)), stream)
        for sink, target in zip(sinks, targets, strict=True):
            if sink is not target and sink.data_ptr() != target.data_ptr():
                left = sink if direct else form.leave(sink, inputs, options, communicator.world_size)
                target.view(left.shape).copy_(left)
        # An output that covers its input without being it has no fast call.
        if not (kept and direct and form.repeats and shared == asked.aliases):
            return None
        as_they_are = all(
            source is tensor or source.data_ptr() == tensor.data_ptr()
            for source, tensor in zip((*sources, *sinks), (*inputs, *targets), strict=True)
        )
        return plan if as_they_are else None

    def _plan(
        self, communicator: Communicator, inputs: Tensors, asked: Asked, *, in_place: bool, symmetric: bool
    ) -> tuple[Plan, bool]:
        """The plan, and whether it is kept: made for both modes, but inside a capture a new problem cannot be bound."""
        form, capturing = self.form, asked.capturing
        problem = form.problem(inputs, asked.options, communicator.world_size)
        if form.tells_memory:
            problem = replace(problem, in_place=in_place, input_kind="symmetric" if symmetric else "plain")
        key = (problem, asked.policy, asked.max_sms)
        found: Plan | None = communicator.plans.get((*key, capturing))
        if found is not None:
            return found, True
        if not form.is_bounded(asked.options):
            mode: Mode = "graph" if capturing else "eager"
            plan = communicator.plans[(*key, capturing)] = library_plan(communicator, replace(problem, mode=mode))
            return plan, True
        if capturing:
            check_library(
                replace(problem, mode="graph"), asked.policy, "it is captured without having been called before"
            )
            logger.warning(
                "%s is captured without having been called before: the library serves it in this graph; run the same "
                "call once before the capture (a warm-up) to have it tuned",
                replace(problem, mode="graph"),
            )
            return library_plan(communicator, replace(problem, mode="graph")), False
        modes: tuple[Mode, ...] = ("eager", "graph") if inputs[0].is_cuda else ("eager",)
        for mode in modes:
            plan = plan_for(communicator, replace(problem, mode=mode), asked.policy, asked.max_sms)
            communicator.plans[(*key, mode == "graph")] = plan
        return communicator.plans[(*key, False)], True


def _new(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Memory for a result."""
    made = torch.empty(shape, dtype=dtype, device=device)
    return with_huge_pages(made) if made.nbytes > _LEAST_ON_HUGE_PAGES and device.type == "cpu" else made


def _unpacked(results: tuple[torch.Tensor, ...]) -> Any:
    return results if len(results) > 1 else results[0]


def stride_of(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides of a contiguous tensor."""
    strides, step = [], 1
    for extent in reversed(shape):
        strides.append(step)
        step *= max(extent, 1)
    return tuple(reversed(strides))


def make_guard(*tensors: torch.Tensor) -> Callable[..., bool] | None:
    """A predicate for tensors like these (that of PyTorch's compiler), or None where this torch has none."""
    try:
        sizes, strides = [list(t.shape) for t in tensors], [list(t.stride()) for t in tensors]
        made = _guards.TensorGuards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides)
        return made.check if made.check(*tensors) else None
    except (AttributeError, TypeError, RuntimeError, SystemError):
        return None


_FAST_CALL = """
def make({values}):
    def call({arguments}, numerics, max_sms):
        if {differs}:
            return None
        stream = stream_of(device)
        if {elsewhere}:
            return None
        {addresses}
        if {unfit}:
            return None
        {made}
        if status[0]:
            communicator.check_peers()
        if stream != last_streams[lane]:
            communicator.order_streams(capturing, stream)
        try:
            {launch}
        except RuntimeError:
            if device_now() == device:
                raise
            return None
        return {results}
    return call
"""


def make_fast_call(
    communicator: Communicator,
    form: Form,
    plan: Plan,
    served: tuple[Tensors, tuple[torch.Tensor, ...]],
    asked: Asked,
) -> FastCall | None:
    """A function that serves calls like this one and returns None for others, or None where this torch has no guards.

    A call costs a few microseconds on the host, most of them in the driver. What Python adds is paid for each question
    asked of a tensor, so one guard (type, dtype, device, strides, sizes, gradients, lazy bits) answers most of them.
    The function is `_FAST_CALL`, filled in for the tensors that are there: a loop over them would cost what it is to
    save.

    Where nothing is allocated, which device is current need not be asked: a kernel of one device's context goes to a
    stream of its own whatever is current, and the driver refuses to launch it on the default stream of another.

    Args:
        communicator, form, plan: of the call that was served.
        served: its tensors, which kernels took as they are, and its results.
        asked: the rest of it. A graph that captured the call keeps its plan.
    """
    tensors, results = served
    names = (*form.inputs, *form.outputs)
    of = dict(zip(names, tensors, strict=True))
    # Outputs that are an input, and inputs that are an earlier one: a guard takes no tensor twice.
    alias = {out: form.inputs[i] for out, i in zip(form.outputs, asked.aliases, strict=True) if i >= 0}
    first = {id(of[name]): name for name in reversed(form.inputs) if of[name] is not None}
    alias |= {name: first[id(of[name])] for name in form.inputs if first.get(id(of[name]), name) != name}
    new = [name for name in form.outputs if of[name] is None]
    there = [name for name in names if of[name] is not None and name not in alias]
    if any(of[name].requires_grad for name in there):  # a guard tells that, but not whether gradients are recorded now
        return None
    looks_alike = make_guard(*(of[name] for name in there))
    if looks_alike is None:
        return None
    of |= dict(zip(form.outputs, results, strict=True))
    by_address = plan.launch.by_address if isinstance(plan.launch, AddressLaunch) else None
    options = [declared.split()[-1] for declared in form.options]
    values: dict[str, Any] = {
        "looks_alike": looks_alike, "want_numerics": asked.numerics, "want_max_sms": asked.max_sms,
        "forward_ad": forward_ad, "communicator": communicator, "device": communicator.device_index,
        "status": communicator.status_view, "last_streams": communicator.last_streams, "lane": int(asked.capturing),
        "capturing": asked.capturing, "stream_of": raw_stream, "captures": is_capturing, "make_empty": empty,
        "device_now": current_device, **dict(zip([f"want_{name}" for name in options], asked.options, strict=True)),
    }  # fmt: skip

    differs = [f"{name} is not None" for name in names if name not in there and name not in alias]
    differs += [f"{name} is not {other}" for name, other in alias.items()]
    differs += [f"not looks_alike({', '.join(there)})"]
    if form.tells_memory and communicator.any_symmetric:
        values["is_symmetric"] = communicator.is_symmetric
        differs += [f"is_symmetric(x) is not {plan.problem.input_kind == 'symmetric'}"]
    differs += [f"({name} is not want_{name} and {name} != want_{name})" for name in options]
    differs += ["numerics is not want_numerics", "max_sms is not want_max_sms", "forward_ad._current_level >= 0"]

    elsewhere = ["(stream != 0 and captures()) is not capturing"]  # the default stream cannot be captured
    if new or by_address is None:
        elsewhere += ["device_now() != device"]

    unfit = []
    if by_address is not None or plan.wants_aligned or form.wants_aligned:
        unfit += [f"({' | '.join(f'at_{name}' for name in there)}) & {_MISALIGNED}"]
    for number, name in enumerate(there):
        if name in form.outputs:  # shares no memory with what comes before
            for other in there[:number]:
                values[f"below_{name}_{other}"], values[f"above_{name}_{other}"] = -of[name].nbytes, of[other].nbytes
                unfit += [f"below_{name}_{other} < at_{name} - at_{other} < above_{name}_{other}"]

    made = []
    for name in new:
        values |= {f"shape_{name}": tuple(of[name].shape), f"stride_{name}": stride_of(of[name].shape)}
        values[f"dtype_{name}"] = of[name].dtype
        if of[name].nbytes > _LEAST_ON_HUGE_PAGES and communicator.device.type == "cpu":
            values["make_empty"] = _empty_on_huge_pages
        made += [f"{name} = make_empty(shape_{name}, stride_{name}, dtype_{name})"]
        if by_address is not None:
            made += [f"at_{name} = {name}.data_ptr()"]

    if by_address is not None:
        values["launch"] = by_address
        addresses = [f"at_{alias.get(name, name)}" if name in (*there, *new, *alias) else "0" for name in names]
        values |= {f"scalar_{i}": value for i, value in enumerate(form.scalar_args(asked.options))}
        scalars = [f"scalar_{i}" for i in range(len(form.scalar_args(asked.options)))]
        launch = f"launch({', '.join(['stream', *addresses, *scalars])})"
    else:
        values["launch"] = _by_tensors(form, plan, asked)
        launch = f"launch(({', '.join(form.inputs)},), ({', '.join(form.outputs)},), stream)"
    source = _FAST_CALL.format(
        values=", ".join(values), arguments=", ".join((*names, *options)), differs=" or ".join(differs),
        elsewhere=" or ".join(elsewhere), addresses="; ".join(f"at_{name} = {name}.data_ptr()" for name in there),
        unfit=" or ".join(unfit) or "False", made="; ".join(made) or "pass", launch=launch,
        results=", ".join(form.outputs),
    )  # fmt: skip
    return _compiled(source)(**values)


def _by_tensors(form: Form, plan: Plan, asked: Asked) -> Callable[[Tensors, Tensors, int], None]:
    """The launch of a plan that takes tensors, for a call whose tensors are taken as they are."""
    if form.tells_memory:
        return plan.launch
    launch, options = plan.launch, asked.options

    def run(inputs: Tensors, outputs: Tensors, stream: int) -> None:
        operands = [tensor for tensor in form.operands(inputs, options) if tensor is not None]
        launch((*operands, *form.scalars(inputs, options)), tuple(map(form.written, outputs)), stream)

    return run


@functools.cache
def _compiled(source: str) -> Callable[..., FastCall]:
    """The function `make` of such a source; calls of one kind share it."""
    space: dict[str, Any] = {}
    exec(compile(source, "<tunedcomm fast call>", "exec"), space)  # noqa: S102 - source of our own
    made: Callable[..., FastCall] = space["make"]
    return made
