"""From a public call to a launch, for every op with one tensor in and one out.

`Form` says what is special about an op. `CallPath` does the rest, by three ways of rising cost: a call that looks like
the last one (`_fast`), a call that has a plan and that kernels can take as it is, and everything else.

A problem depends on what every rank passes alike, never on this rank's strides or alignment: those are dealt with by
copies that the other ranks do not see.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from tunedcomm.dispatch.communicator import Communicator, get_communicator, on_forget, on_release
from tunedcomm.dispatch.dispatcher import Plan, check_max_sms, check_policy, library_plan, plan_for
from tunedcomm.errors import UnsupportedInputError
from tunedcomm.kernels.common.launch import AddressLaunch
from tunedcomm.ops import _fast, torch_ops
from tunedcomm.ops._checks import check_differentiable, check_input, check_out
from tunedcomm.ops._fast import (
    MISALIGNED,
    Asked,
    FastCall,
    current_device,
    empty,
    is_capturing,
    raw_stream,
    target_kind,
)
from tunedcomm.spec import Mode, NumericsPolicy, Problem

__all__ = ["CallPath", "Form", "communicator_for", "is_usable", "paths", "stride_of", "world"]

# Guards made for one key: callers that alternate (with inference mode and without, say) must not pay for one each time.
_MAX_GUARDS = 8


class _PublicWorld:
    """The default group as torch's public interface has it."""

    @property
    def _default_pg(self) -> dist.ProcessGroup | None:
        return dist.group.WORLD


# Where torch keeps the default group: a sixth of what asking the public interface costs.
world: Any = getattr(dist.distributed_c10d, "_world", None)
world = world if hasattr(world, "_default_pg") else _PublicWorld()


class Form(ABC):
    """What is special about one op. Every method is given the op's options as the one value `option`.

    Attributes:
        op: the op's name.
        may_be_input: the result may overwrite the input.
        arguments: the options as the operator's schema has them: none for None, one for `option`, several for its
            items.
        reduces: the operator takes `numerics`.
    """

    op: str
    may_be_input = False
    arguments: tuple[str, ...] = ()
    reduces = False

    @abstractmethod
    def check(self, x: torch.Tensor, option: Any, world_size: int) -> None:
        """Refuse what no variant takes.

        Raises:
            UnsupportedInputError: says what to do.
        """

    @abstractmethod
    def problem(self, x: torch.Tensor, option: Any, world_size: int) -> Problem:
        """The problem of a call that was checked: eager, on a plain input, out of place."""

    @abstractmethod
    def result_shape(self, x: torch.Tensor, option: Any, world_size: int) -> tuple[int, ...]:
        """Shape of the result as the caller gets it."""

    def refusal(self, x: torch.Tensor, option: Any) -> str:
        """The call in words, where it has no gradient; "" where it has one."""
        del x, option
        return ""

    def is_direct(self, x: torch.Tensor, option: Any) -> bool:
        """True if kernels read `x` and write the result just as the caller has them, strides aside."""
        return True

    def enter(self, x: torch.Tensor, option: Any, world_size: int) -> torch.Tensor:
        """A contiguous tensor that kernels take for `x`, where the call is not direct."""
        return x

    def leave(self, written: torch.Tensor, x: torch.Tensor, option: Any, world_size: int) -> torch.Tensor:
        """What the kernels wrote, one element after another, as a view of the result's shape; not direct calls only.

        Dimensions of the result may be split: (2, 3) may be left where the shape has 6.
        """
        return written


def is_usable(tensor: torch.Tensor) -> bool:
    """True if the bytes at the tensor's address are its elements, in order, for kernels to take as they are."""
    plain = tensor.is_contiguous() and not tensor.data_ptr() & MISALIGNED
    return plain and not tensor.is_neg() and not tensor.is_conj()


def communicator_for(op: str, x: torch.Tensor, group: dist.ProcessGroup | None) -> Communicator:
    """The communicator that serves `x` on `group`, made now if this is the group's first call.

    Raises:
        UnsupportedInputError: the group cannot work where `x` lives.
    """
    if x.device.type not in ("cuda", "cpu"):
        raise UnsupportedInputError(f"{op} serves cuda and cpu tensors, not {x.device}")
    communicator = get_communicator(group, x.device)
    if x.device != communicator.device:
        raise UnsupportedInputError(
            f"the tensor is on {x.device}, but rank {communicator.rank} of this group works on "
            f"{communicator.device}; move the tensor, or call torch.cuda.set_device() before the group's first call"
        )
    return communicator


def stride_of(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides of a contiguous tensor."""
    strides, step = [], 1
    for extent in reversed(shape):
        strides.append(step)
        step *= max(extent, 1)
    return tuple(reversed(strides))


# Op to its path, for those who ask what a call would run without making it.
paths: dict[str, CallPath] = {}


class CallPath:
    """All ways of one op.

    Attributes:
        last: process group to the fast call that served it last; nearly always that of its next call, which asks.
    """

    def __init__(self, form: Form) -> None:
        self.form = form
        paths[form.op] = self
        self.last: dict[dist.ProcessGroup | None, FastCall] = {}
        self._communicators: dict[tuple[dist.ProcessGroup | None, torch.device], Communicator] = {}
        torch_ops.paths[form.op] = self
        torch_ops.define(torch_ops.OneTensor(self))
        on_release(self._communicators.clear)
        on_release(self.last.clear)
        on_forget(self.last.clear)

    def call(
        self,
        x: torch.Tensor,
        option: Hashable,
        out: torch.Tensor | None,
        group: dist.ProcessGroup | None,
        numerics: NumericsPolicy,
        max_sms: int | None,
    ) -> torch.Tensor:
        """Serve a call that `last` did not.

        Args:
            x, out: as the caller gave them, whatever they are.
            option: the op's options.
            group: the process group, None only where there is no default group.
            numerics, max_sms: as the caller gave them.
        """
        if isinstance(group, dist.ProcessGroup) and torch_ops.goes_by_operator((x,)):
            return self.operate(x, option, out, group, numerics, max_sms)
        return self.serve(x, option, out, group, numerics, max_sms)

    def operate(
        self,
        x: torch.Tensor,
        option: Any,
        out: torch.Tensor | None,
        group: dist.ProcessGroup | None,
        numerics: NumericsPolicy,
        max_sms: int | None,
    ) -> torch.Tensor:
        """Serve a call by the operator: what is recorded or traced. Traced by Dynamo itself."""
        form = self.form
        options = option if len(form.arguments) > 1 else (option,) if form.arguments else ()
        policy = (numerics,) if form.reduces else ()
        settings = (*options, *torch_ops.group_arguments(group), *policy, max_sms)
        if out is None:
            result: torch.Tensor = torch_ops.call(form.op, (x,), settings, form.refusal(x, option))
            return result
        in_place = form.may_be_input and out is x
        torch_ops.call_into(form.op, (x,), {"out": out}, settings, in_place=in_place)
        return out

    def serve(
        self,
        x: torch.Tensor,
        option: Hashable,
        out: torch.Tensor | None,
        group: dist.ProcessGroup | None,
        numerics: NumericsPolicy,
        max_sms: int | None,
    ) -> torch.Tensor:
        """`call` for plain tensors, at once."""
        try:
            communicator = self._communicators.get((group, x.device))
        except AttributeError:
            raise UnsupportedInputError(f"{self.form.op} wants a torch.Tensor, got {type(x).__name__}") from None
        if communicator is None:
            communicator = self._communicators[group, x.device] = communicator_for(self.form.op, x, group)
        asked = Asked(option, target_kind(x, out), numerics, max_sms, is_capturing())
        try:
            hash(asked)
        except TypeError:  # an option that cannot even be a key: the slow way says so
            return self._slow(communicator, x, out, asked)
        result = self._known_call(communicator, x, out, asked, group)
        return self._slow(communicator, x, out, asked) if result is None else result

    def planned(self, x: torch.Tensor, option: Hashable, group: dist.ProcessGroup, *, in_place: bool) -> Plan:
        """The plan of a call with such an input in plain memory, by the default policy; bound now, but not launched.

        Raises:
            UnsupportedInputError: the call would be refused.
            InfeasibleError: as for the call.
        """
        communicator, x = communicator_for(self.form.op, x, group), x.detach()
        asked = Asked(option, "input" if in_place else "new", "default", None, is_capturing())
        self._check(x, None, asked, communicator.world_size)
        return self._plan(communicator, x, asked, in_place=in_place, symmetric=False)

    def _known_call(
        self,
        communicator: Communicator,
        x: torch.Tensor,
        out: torch.Tensor | None,
        asked: Asked,
        group: dist.ProcessGroup | None,
    ) -> torch.Tensor | None:
        """A call like an earlier one, or one that has a plan and that kernels take as it is; else None."""
        key = (self.form.op, x.shape, x.dtype, asked)
        fast, count = communicator.fast_calls.get(key, (None, 0))
        if fast is not None and fast is not self.last.get(group):
            result: torch.Tensor | None = fast(x, asked.option, out, asked.numerics, asked.max_sms)
            if result is not None:
                self.last[group] = fast
                return result
        symmetric = communicator.any_symmetric and communicator.is_symmetric(x)
        plan_key = self._plan_key(x, asked, in_place=asked.target == "input", symmetric=symmetric)
        plan = communicator.plans.get((*plan_key, asked.capturing))
        if plan is None or not self._is_plain(x) or current_device() != communicator.device_index:
            return None
        if not self.form.is_direct(x, asked.option):
            return None
        result = self._target(communicator, x, out, asked)
        if result is None or (plan.wants_aligned and (x.data_ptr() | result.data_ptr()) & MISALIGNED):
            return None
        if communicator.status_view[0]:
            communicator.check_peers()
        stream = raw_stream(communicator.device_index)
        if stream != communicator.last_streams[asked.capturing]:
            communicator.order_streams(asked.capturing, stream)
        if asked.capturing:
            communicator.captured(plan)
        plan.launch((x,), (result,), stream)
        if not symmetric and isinstance(plan.launch, AddressLaunch) and count < _MAX_GUARDS:
            fast = _fast.make(communicator, plan.launch.by_address, x, result, asked)
            if fast is not None:
                communicator.fast_calls[key] = (fast, count + 1)
                self.last[group] = fast
        return result

    @staticmethod
    def _is_plain(tensor: torch.Tensor) -> bool:
        """True for dense, contiguous tensors without gradients; memory of lazy ones holds something else."""
        return (
            not tensor.requires_grad
            and tensor.layout is torch.strided
            and tensor.is_contiguous()
            and not tensor.is_neg()
            and not tensor.is_conj()
        )

    def _target(
        self, communicator: Communicator, x: torch.Tensor, out: torch.Tensor | None, asked: Asked
    ) -> torch.Tensor | None:
        """Where kernels may write the result at once; None where the slow way must see to it."""
        if asked.target == "input":
            return x if self.form.may_be_input else None
        shape = self.form.result_shape(x, asked.option, communicator.world_size)
        if out is None:
            return empty(shape, stride_of(shape), x.dtype)
        try:
            fits = tuple(out.shape) == shape and out.dtype == x.dtype and out.device == x.device and self._is_plain(out)
            apart = -out.nbytes < out.data_ptr() - x.data_ptr() < x.nbytes
        except (AttributeError, RuntimeError):  # no tensor, or one without storage
            return None
        return out if fits and not apart else None

    def _slow(
        self, communicator: Communicator, x: torch.Tensor, out: torch.Tensor | None, asked: Asked
    ) -> torch.Tensor:
        """First calls, and everything unusual: checks, plans, and copies into a form that kernels take."""
        form, option, world_size = self.form, asked.option, communicator.world_size
        shape = self._check(x, out, asked, world_size)
        if x.is_cuda and x.get_device() != current_device():
            with torch.cuda.device(x.device):
                return self._slow(communicator, x, out, asked)
        result = torch.empty(shape, dtype=x.dtype, device=x.device) if out is None else out
        if x.numel() == 0:
            return result
        x, target = x.detach(), result.detach()
        in_place = out is not None and target.data_ptr() == x.data_ptr()
        if world_size == 1:
            return result if in_place else result.copy_(x.reshape(shape))
        direct = form.is_direct(x, option)
        symmetric = direct and communicator.any_symmetric and communicator.is_symmetric(x)
        if symmetric and not is_usable(x):
            raise UnsupportedInputError(
                "a tensor in symmetric memory must be contiguous and start at a multiple of 16 bytes, for peers "
                "address it too; pass such a view of it, or x.clone() on every rank"
            )
        plan = self._plan(communicator, x, asked, in_place=in_place, symmetric=symmetric)
        communicator.check_peers()
        stream = raw_stream(communicator.device_index) if x.is_cuda else 0
        communicator.order_streams(asked.capturing, stream)
        source = x if direct else form.enter(x, option, world_size)
        if not is_usable(source):
            source = source.clone(memory_format=torch.contiguous_format)
        sink = source if in_place else target
        if not direct or not is_usable(sink):
            sink = torch.empty(shape, dtype=x.dtype, device=x.device)
        if asked.capturing:
            communicator.captured(plan)
        plan.launch((source,), (sink,), stream)
        if sink.data_ptr() != target.data_ptr():
            left = sink if direct else form.leave(sink, x, option, world_size)
            target.view(left.shape).copy_(left)
        return result

    def _check(self, x: torch.Tensor, out: torch.Tensor | None, asked: Asked, world_size: int) -> tuple[int, ...]:
        """Refuse what no variant takes, with the way out; the result's shape."""
        check_input(self.form.op, x)
        check_policy(asked.numerics)
        check_max_sms(asked.max_sms)
        self.form.check(x, asked.option, world_size)
        shape = self.form.result_shape(x, asked.option, world_size)
        if out is not None:
            check_out(x, out, shape, x.dtype, may_be_input=self.form.may_be_input)
        check_differentiable(self.form.op, (x, out))
        return shape

    def _plan_key(self, x: torch.Tensor, asked: Asked, *, in_place: bool, symmetric: bool) -> tuple[Any, ...]:
        return (self.form.op, x.numel(), x.dtype, asked.option, in_place, asked.numerics, asked.max_sms, symmetric)

    def _plan(
        self, communicator: Communicator, x: torch.Tensor, asked: Asked, *, in_place: bool, symmetric: bool
    ) -> Plan:
        """The plan from the cache, or made now for both modes; inside a capture a new problem cannot be bound."""
        key = self._plan_key(x, asked, in_place=in_place, symmetric=symmetric)
        plan: Plan | None = communicator.plans.get((*key, asked.capturing))
        if plan is not None:
            return plan
        problem = replace(
            self.form.problem(x, asked.option, communicator.world_size),
            in_place=in_place,
            input_kind="symmetric" if symmetric else "plain",
        )
        if asked.capturing:
            return library_plan(communicator, replace(problem, mode="graph"))
        modes: tuple[Mode, ...] = ("eager", "graph") if x.is_cuda else ("eager",)
        for mode in modes:
            plan = plan_for(communicator, replace(problem, mode=mode), asked.numerics, asked.max_sms)
            communicator.plans[(*key, mode == "graph")] = plan
        return communicator.plans[(*key, False)]  # type: ignore[no-any-return]
