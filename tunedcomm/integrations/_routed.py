"""One intercepted group: which of its calls kernels serve, what was served by what, and how often.

Every rank must send a call the same way. So a choice rests on what all ranks pass alike: the operator, the number of
elements, the dtype and the reduction, and for rows of different numbers a bound that the caller names. Where a tensor
lies in memory is this rank's own matter and is dealt with by copies.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from tunedcomm.dispatch import misses
from tunedcomm.dispatch.communicator import Communicator, get_communicator, on_forget, on_release
from tunedcomm.dispatch.dispatcher import MISSES, Plan, unservable
from tunedcomm.errors import UnsupportedInputError
from tunedcomm.ops import all_gather, all_reduce, all_to_all, all_to_all_v, reduce_scatter
from tunedcomm.ops._fast import is_capturing
from tunedcomm.ops._path import paths

# Whose paths are asked: a path is known once its module is imported.
_SERVING = (all_gather, all_reduce, all_to_all, reduce_scatter)

__all__ = ["Choice", "Route", "RoutedCall", "RoutedGroup"]


@dataclass(frozen=True, slots=True)
class RoutedCall:
    """What became of calls of one kind.

    Attributes:
        group: the process group's name.
        call: the operator that was called, e.g. `c10d::allreduce_`.
        problem: what was asked, in words.
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
class Choice:
    """Where calls that look alike go.

    Attributes:
        served: kernels serve them.
        told: the entry in the group's record.
        count: calls so far.
        miss: counts a call of an untuned problem that the library serves; None where that is not noted.
    """

    served: bool
    told: RoutedCall
    count: int = 0
    miss: Callable[..., None] | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Route:
    """What an operator asks of the dispatcher; made once, and told apart by identity.

    Attributes:
        call: the operator's name.
        op: tunedcomm's op.
        option: the op's option as its path takes it; for `all_to_all_v` None.
        in_place: the result overwrites the input.
    """

    call: str
    op: str
    option: Hashable = None
    in_place: bool = False


@dataclass(eq=False)
class RoutedGroup:
    """An intercepted group on the device that it works on.

    Attributes:
        group: the process group.
        device: where it works, known also while there is no communicator.
        max_count: bound for `all_to_all_v`, the same on every rank; None: such calls are the library's.
        depth: how many blocks and installs hold it.
        record: every choice that was made, also those that were made anew since.
    """

    group: dist.ProcessGroup
    device: torch.device
    max_count: int | None = None
    depth: int = 0
    record: dict[RoutedCall, Choice] = field(default_factory=dict)
    side_stream: Any = None
    _communicator: Communicator | None = None
    _choices: dict[Any, Choice] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _groups.add(self)

    @property
    def communicator(self) -> Communicator:
        """The group's communicator; made anew, collectively, after it was released."""
        known = self._communicator
        if known is None:  # another thread may forget it as soon as it is there
            known = self._communicator = get_communicator(self.group, self.device)
        return known

    def choose(self, route: Route, x: torch.Tensor) -> Choice:
        """Where this call goes; counted as made."""
        capturing = is_capturing()
        key = (route, x.shape, x.dtype, x.device, x.layout, capturing)
        choice = self._choices.get(key)
        if choice is None:
            choice = self._decide(route, x)
            # What a capture meets unprepared is the library's in this graph only.
            if not capturing or choice.served:
                self._choices[key] = choice
        choice.count += 1
        if choice.miss is not None:
            choice.miss()
        return choice

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
        self._choices.clear()
        self._communicator = None

    def _decide(self, route: Route, x: torch.Tensor) -> Choice:
        asked = f"{route.op} of {tuple(x.shape)} {str(x.dtype).removeprefix('torch.')}"
        plan: Plan | None = None
        reason = self._unfit(route, x)
        if not reason:
            try:
                with torch.no_grad():
                    plan = self._plan(route, x)
            except UnsupportedInputError as error:
                reason = str(error)
        if plan is None:
            return self._told(RoutedCall(self.group.group_name, route.call, asked, "", reason), served=False)
        candidate = plan.decision.candidate
        served = candidate.variant != "library"
        by = str(candidate) if served else ""
        told = RoutedCall(self.group.group_name, route.call, str(plan.problem), by, plan.decision.why)
        choice = self._told(told, served=served)
        choice.miss = None if served else self._miss(plan)
        return choice

    def _told(self, told: RoutedCall, *, served: bool) -> Choice:
        return self.record.setdefault(told, Choice(served, told))

    def _unfit(self, route: Route, x: torch.Tensor) -> str:
        """Why a call is none for the dispatcher, from what is the same on every rank; else ""."""
        communicator = self.communicator
        if x.device.type != communicator.device.type:
            return f"tensors on {x.device.type}; this group's kernels work on {communicator.device.type}"
        if communicator.world_size == 1:
            return "a group of one rank"
        if x.layout is not torch.strided:
            return f"a tensor of layout {x.layout}"
        if route.op == "all_to_all_v":
            if self.max_count is None:
                return "rows by split sizes, and ranks do not know each other's; a bound is intercept()'s max_count"
            return "" if self.max_count and math.prod(x.shape[1:]) else "nothing moves"
        return "" if x.numel() else "no elements"

    def _plan(self, route: Route, x: torch.Tensor) -> Plan:
        if route.op == "all_to_all_v":
            return all_to_all_v.planned(x, self.max_count, self.group)
        return paths[route.op].planned(x, route.option, self.group, in_place=route.in_place)

    def _miss(self, plan: Plan) -> Callable[..., None] | None:
        """What counts a call of a problem that is worth tuning, as the dispatcher would have."""
        communicator, decision = self.communicator, plan.decision
        if communicator.rank != 0 or decision.source not in MISSES:
            return None
        if unservable(plan.problem, communicator.limits, "any") is not None:
            return None
        counted = misses.counted(_nothing, plan.problem, communicator.environment, decision.source)
        return None if counted is _nothing else counted

    def counts(self) -> dict[RoutedCall, int]:
        """Calls of every kind so far."""
        return {told: choice.count for told, choice in self.record.items()}


def _nothing(*arguments: object) -> None:
    pass


# By identity, which is how groups are compared; one that is not held any more drops out.
_groups: weakref.WeakSet[RoutedGroup] = weakref.WeakSet()


def _forget_all() -> None:
    for group in list(_groups):
        group.forget()


# Choices and plans are dropped together: what is chosen here is what the op's own path would run.
on_forget(_forget_all)
on_release(_forget_all)
