"""From a public call to a launch, for ops with several tensors in and out; `_path` is for one in and one out.

`ManyForm` says what is special about an op. `ManyPath` does the rest: a call that looks like the last one or an earlier
one takes the short way (`_many_fast`), everything else the way on which all is asked, copies are made into a form that
kernels take, and short ways are made.

A problem depends on what every rank passes alike, never on this rank's strides, alignment or aliases: those are dealt
with by copies that the other ranks do not see.
"""

from __future__ import annotations

import operator
from abc import ABC, abstractmethod
from collections.abc import Hashable, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import torch
import torch.distributed as dist

from tunedcomm.dispatch.communicator import Communicator, on_forget, on_release
from tunedcomm.dispatch.dispatcher import Plan, check_max_sms, check_policy, library_plan, plan_for
from tunedcomm.errors import UnsupportedInputError
from tunedcomm.kernels.common.launch import ManyLaunch
from tunedcomm.ops import _many_fast, torch_ops
from tunedcomm.ops._checks import check_apart, check_differentiable, check_input, check_out
from tunedcomm.ops._fast import current_device, is_capturing, raw_stream
from tunedcomm.ops._many_fast import ManyAsked, ManyFastCall, Result
from tunedcomm.ops._path import communicator_for, is_usable, stride_of
from tunedcomm.spec import Mode, NumericsPolicy, Problem

__all__ = ["ManyForm", "ManyPath"]

# Guards made for one key: callers that alternate between kinds of tensors must not pay for one each time.
_MAX_GUARDS = 8
Tensors: TypeAlias = tuple[Any, ...]


class ManyForm(ABC):
    """What is special about one op. Every method is given the op's options as the one value `option`.

    Attributes:
        op: the op's name.
        inputs: names of the arguments that are inputs, in the order of launches; the first is never None.
        outputs: names of the arguments that are outputs.
        aliases: output to the input whose place it may take.
        optional: inputs that may be None.
        arguments: the options as the operator's schema has them: none for None, several for its items.
        operator: the operator's name in `torch.ops.tunedcomm`; the op's, unless an op has several.
    """

    op: str
    optional: tuple[str, ...] = ()
    arguments: tuple[str, ...] = ()
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    aliases: dict[str, str]

    @property
    def operator(self) -> str:
        return self.op

    @property
    def may_be_input(self) -> bool:
        """True if the one output may take the first input's place."""
        return self.aliases == {self.outputs[0]: self.inputs[0]} and len(self.outputs) == 1

    @abstractmethod
    def check(self, inputs: Tensors, option: Any, world_size: int) -> None:
        """Refuse what no variant takes; every input is a dense tensor on one device, or None.

        Raises:
            UnsupportedInputError: says what to do.
        """

    @abstractmethod
    def problem(self, inputs: Tensors, option: Any, world_size: int) -> Problem:
        """The problem of a call that was checked: eager."""

    @abstractmethod
    def results(self, inputs: Tensors, option: Any, world_size: int) -> list[tuple[tuple[int, ...], torch.dtype]]:
        """Shape and dtype of every output."""

    @abstractmethod
    def scalars(self, option: Any) -> tuple[float, ...]:
        """What launches of tensors take after the inputs."""

    @abstractmethod
    def words(self, option: Any) -> tuple[int, ...]:
        """The same for launches by addresses, behind the outputs."""

    def refusal(self, inputs: Tensors, option: Any) -> str:
        """The call in words, where it has no gradient; "" where it has one."""
        del inputs, option
        return ""

    @abstractmethod
    def alone(self, inputs: Tensors, option: Any) -> tuple[torch.Tensor, ...]:
        """The results in a group of one."""

    def key(self, tensors: Tensors) -> Hashable:
        """What tells calls apart, besides the first input's dtype and the options; the first input is a tensor."""
        return tuple(tensors[0].shape)

    def is_idle(self, inputs: Tensors, results: Tensors, option: Any) -> bool:
        """True if the results, filled in now, ask nothing of the peers; every rank must come to the same answer."""
        del results, option
        return bool(inputs[0].numel() == 0)

    def served(self, inputs: Tensors) -> Tensors:
        """What stands for the inputs of a call that is not idle: themselves, or others with the same results."""
        return inputs

    def operands(self, inputs: Tensors) -> Tensors:
        """The inputs in the shapes that launches take: views, or copies where there is no such view."""
        return inputs

    def written(self, output: torch.Tensor) -> torch.Tensor:
        """A contiguous output as a view of the shape that launches write."""
        return output


class ManyPath:
    """All ways of one op.

    Attributes:
        last: process group to the fast call that served it last; nearly always that of its next call, which asks.
    """

    def __init__(self, form: ManyForm) -> None:
        self.form = form
        self.last: dict[dist.ProcessGroup | None, ManyFastCall] = {}
        self._communicators: dict[tuple[dist.ProcessGroup | None, torch.device], Communicator] = {}
        torch_ops.paths[form.operator] = self
        torch_ops.define(torch_ops.SeveralTensors(self))
        on_release(self._communicators.clear)
        on_release(self.last.clear)
        on_forget(self.last.clear)

    def call(
        self,
        tensors: Tensors,
        option: Hashable,
        group: dist.ProcessGroup | None,
        numerics: NumericsPolicy,
        max_sms: int | None,
    ) -> tuple[torch.Tensor, ...]:
        """Serve a call that `last` did not.

        Args:
            tensors: inputs, then outputs, as the caller gave them, whatever they are.
            option: the op's options.
            group: the process group, None only where there is no default group.
            numerics, max_sms: as the caller gave them.
        """
        if isinstance(group, dist.ProcessGroup) and torch_ops.goes_by_operator(tensors):
            return self.operate(tensors, option, group, numerics, max_sms)
        return self.serve(tensors, option, group, numerics, max_sms)

    def operate(
        self,
        tensors: Tensors,
        option: Any,
        group: dist.ProcessGroup | None,
        numerics: NumericsPolicy,
        max_sms: int | None,
    ) -> tuple[torch.Tensor, ...]:
        """Serve a call by the operator: what is recorded or traced. Traced by Dynamo itself."""
        form = self.form
        inputs, outputs = tensors[: len(form.inputs)], tensors[len(form.inputs) :]
        group_size, group_name = torch_ops.group_arguments(group)
        settings = (*(option or ()), group_size, group_name, numerics, max_sms)
        if all(output is None for output in outputs):
            made = torch_ops.call(form.operator, inputs, settings, form.refusal(inputs, option))
            return made if isinstance(made, tuple) else (made,)
        given = {
            name: inputs[0].new_empty(shape, dtype=dtype) if output is None else output
            for name, output, (shape, dtype) in zip(
                form.outputs, outputs, form.results(inputs, option, group_size), strict=True
            )
        }
        in_place = form.may_be_input and outputs[0] is inputs[0]
        torch_ops.call_into(form.operator, inputs, given, settings, in_place=in_place)
        return tuple(given.values())

    def serve(
        self,
        tensors: Tensors,
        option: Hashable,
        group: dist.ProcessGroup | None,
        numerics: NumericsPolicy,
        max_sms: int | None,
    ) -> tuple[torch.Tensor, ...]:
        """`call` for plain tensors, at once."""
        x = tensors[0]
        if not isinstance(x, torch.Tensor):
            raise UnsupportedInputError(f"{self.form.op} wants a torch.Tensor, got {type(x).__name__}")
        communicator = self._communicators.get((group, x.device))
        if communicator is None:
            communicator = self._communicators[group, x.device] = communicator_for(self.form.op, x, group)
        num_inputs = len(self.form.inputs)
        aliases = tuple(self._alias(tensors, name, tensors[num_inputs + i]) for i, name in enumerate(self.form.outputs))
        present = tuple(tensor is not None for tensor in tensors)
        asked = ManyAsked(option, present, aliases, numerics, max_sms, is_capturing())
        try:
            key = (self.form.op, self.form.key(tensors), x.dtype, asked)
            fast, count = communicator.fast_calls.get(key, (None, 0))
        except TypeError:  # an option that cannot even be a key: the slow way says so
            return self._slow(communicator, tensors, asked)[0]
        if fast is not None and fast is not self.last.get(group):
            results: tuple[torch.Tensor, ...] | None = fast(tensors, option, numerics, max_sms)
            if results is not None:
                self.last[group] = fast
                return results
        found, plan = self._slow(communicator, tensors, asked)
        if plan is not None and count < _MAX_GUARDS:
            fast = self._make_fast(communicator, plan, tensors, found, asked)
            if fast is not None:
                communicator.fast_calls[key] = (fast, count + 1)
                self.last[group] = fast
        return found

    def _alias(self, tensors: Tensors, name: str, output: Any) -> int:
        """Index of the input that an output is, or −1."""
        source = self.form.aliases.get(name)
        if source is None or output is None:
            return -1
        index = self.form.inputs.index(source)
        return index if tensors[index] is output else -1

    def _make_fast(
        self, communicator: Communicator, plan: Plan, tensors: Tensors, found: Sequence[torch.Tensor], asked: ManyAsked
    ) -> ManyFastCall | None:
        if not isinstance(plan.launch, ManyLaunch):
            return None
        results = [Result(tuple(t.shape), stride_of(tuple(t.shape)), t.dtype) for t in found]
        words = self.form.words(asked.option)
        return _many_fast.make(communicator, plan.launch.by_address, tensors, results, words, asked)

    def _slow(
        self, communicator: Communicator, tensors: Tensors, asked: ManyAsked
    ) -> tuple[tuple[torch.Tensor, ...], Plan | None]:
        """Checks, plans, and copies; the results, and the plan if kernels took the tensors as they were."""
        num_inputs = len(self.form.inputs)
        inputs, outputs = tensors[:num_inputs], tensors[num_inputs:]
        wanted = self._check(inputs, outputs, asked, communicator.world_size)
        x = inputs[0]
        if x.is_cuda and x.get_device() != current_device():
            with torch.cuda.device(x.device):
                return self._slow(communicator, tensors, asked)
        results = tuple(
            torch.empty(shape, dtype=dtype, device=x.device) if given is None else given
            for given, (shape, dtype) in zip(outputs, wanted, strict=True)
        )
        inputs = tuple(None if tensor is None else tensor.detach() for tensor in inputs)
        if self.form.is_idle(inputs, tuple(result.detach() for result in results), asked.option):
            return results, None
        served = self.form.served(inputs)
        if communicator.world_size == 1:
            for result, value in zip(results, self.form.alone(served, asked.option), strict=True):
                result.detach().copy_(value)
            return results, None
        plan = self._run(communicator, served, results, asked)
        return results, plan if served is inputs else None

    def _run(
        self, communicator: Communicator, inputs: Tensors, results: Sequence[torch.Tensor], asked: ManyAsked
    ) -> Plan | None:
        """Launch; the plan, if no copy had to be made."""
        plan = self._plan(communicator, inputs, asked)
        communicator.check_peers()
        stream = raw_stream(communicator.device_index) if inputs[0].is_cuda else 0
        communicator.order_streams(asked.capturing, stream)
        given = [tensor for tensor in inputs if tensor is not None]
        taken = [tensor for tensor in self.form.operands(inputs) if tensor is not None]
        sources = [t if is_usable(t) else t.clone(memory_format=torch.contiguous_format) for t in taken]
        targets = [result.detach() for result in results]
        sinks = [t if is_usable(t) else torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in targets]
        written = tuple(self.form.written(sink) for sink in sinks)
        if asked.capturing:
            communicator.captured(plan)
        plan.launch((*sources, *self.form.scalars(asked.option)), written, stream)
        for sink, target in zip(sinks, targets, strict=True):
            if sink is not target:
                target.copy_(sink)
        same = all(source.data_ptr() == tensor.data_ptr() for source, tensor in zip(sources, given, strict=True))
        return plan if same and all(map(operator.is_, sinks, targets)) else None

    def _check(
        self, inputs: Tensors, outputs: Tensors, asked: ManyAsked, world_size: int
    ) -> list[tuple[tuple[int, ...], torch.dtype]]:
        """Refuse what no variant takes, with the way out; shape and dtype of every output."""
        form, x = self.form, inputs[0]
        for name, tensor in zip(form.inputs, inputs, strict=True):
            if tensor is not None:
                check_input(form.op, tensor, name)
                if tensor.device != x.device:
                    raise UnsupportedInputError(
                        f"{name} of {form.op} is on {tensor.device}, {form.inputs[0]} on {x.device}; move one to the "
                        "other's device"
                    )
        check_policy(asked.numerics)
        check_max_sms(asked.max_sms)
        form.check(inputs, asked.option, world_size)
        wanted = form.results(inputs, asked.option, world_size)
        for number, (name, output) in enumerate(zip(form.outputs, outputs, strict=True)):
            if output is None:
                continue
            shape, dtype = wanted[number]
            may_be_input = form.aliases.get(name) == form.inputs[0]
            check_out(x, output, shape, dtype, may_be_input=may_be_input, name=name, input_name=form.inputs[0])
            others = [
                *zip(form.inputs[1:], inputs[1:], strict=True),
                *zip(form.outputs[:number], outputs[:number], strict=True),
            ]
            for other_name, other in others:
                if other is not None:
                    may_be = form.aliases.get(name) == other_name
                    check_apart(other, output, may_be_other=may_be, name=name, other_name=other_name)
        check_differentiable(form.op, (*inputs, *outputs))
        return wanted

    def _plan(self, communicator: Communicator, inputs: Tensors, asked: ManyAsked) -> Plan:
        """The plan from the cache, or made now for both modes; inside a capture a new problem cannot be bound."""
        problem = self.form.problem(inputs, asked.option, communicator.world_size)
        key = (problem, asked.numerics, asked.max_sms)
        plan: Plan | None = communicator.plans.get((*key, asked.capturing))
        if plan is not None:
            return plan
        if asked.capturing:
            return library_plan(communicator, replace(problem, mode="graph"))
        modes: tuple[Mode, ...] = ("eager", "graph") if inputs[0].is_cuda else ("eager",)
        for mode in modes:
            plan = plan_for(communicator, replace(problem, mode=mode), asked.numerics, asked.max_sms)
            communicator.plans[(*key, mode == "graph")] = plan
        return communicator.plans[(*key, False)]  # type: ignore[no-any-return]
