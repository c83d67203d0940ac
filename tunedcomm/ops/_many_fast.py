"""The shortest way from a call to its launch, for ops with several tensors in and out; see `_fast` for the idea.

A call gives its tensors as one tuple, inputs first, None for those that it does not have. Which of them are there, and
which output is an input again, is part of what a fast call was made for.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import torch
from torch.autograd import forward_ad

from tunedcomm.dispatch.communicator import Communicator
from tunedcomm.ops._fast import MISALIGNED, current_device, empty, is_capturing, make_guard, raw_stream
from tunedcomm.spec import NumericsPolicy

__all__ = ["ManyAsked", "ManyFastCall", "Result", "make", "nearness"]

Tensors: TypeAlias = tuple[Any, ...]
# (tensors, option, numerics, max_sms) to the results, or None where the call differs from the one that it was made for.
ManyFastCall: TypeAlias = Callable[[Tensors, Any, str, "int | None"], "tuple[torch.Tensor, ...] | None"]


class Result(NamedTuple):
    """An output that the caller does not give."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


class ManyAsked(NamedTuple):
    """What a fast call was made for, besides tensors of one kind.

    Attributes:
        option: the op's own options as one value.
        present: for each tensor, whether it is there.
        aliases: for each output, the index of the input that it is, or −1.
        numerics, max_sms: as the caller gave them.
        capturing: whether a graph was being captured.
    """

    option: Hashable
    present: tuple[bool, ...]
    aliases: tuple[int, ...]
    numerics: NumericsPolicy
    max_sms: int | None
    capturing: bool


def nearness(one: torch.Tensor, other: torch.Tensor) -> tuple[int, int]:
    """Differences of addresses, `one` − `other`, between which two contiguous tensors share memory."""
    return -one.nbytes, other.nbytes


def _picker(indices: Sequence[int]) -> Callable[[Sequence[Any]], tuple[Any, ...]]:
    """`operator.itemgetter` that gives a tuple for one index and for none, too."""
    if len(indices) > 1:
        return operator.itemgetter(*indices)
    return lambda values: tuple(values[i] for i in indices)


@dataclass(frozen=True, slots=True)
class _Plan:
    """What a fast call knows of its tensors; a place is an index into the addresses of those that are there.

    Attributes:
        there, missing: indices of tensors that are there and that are not; outputs that are inputs are in neither.
        new: (index, shape, stride, dtype) of outputs to be made.
        order: places in the order in which the launch takes addresses; those of new outputs, then of 0, come last.
        pairs: (place, place, least, most) of tensors that must not share memory, as in `nearness`.
        same: (index of an output, index of the input that it is).
        num_inputs: of all tensors, the first so many.
    """

    there: tuple[int, ...]
    missing: tuple[int, ...]
    new: tuple[tuple[Any, ...], ...]
    order: tuple[int, ...]
    pairs: tuple[tuple[int, ...], ...]
    same: tuple[tuple[int, int], ...]
    num_inputs: int

    @classmethod
    def of(cls, tensors: Tensors, results: Sequence[Result], asked: ManyAsked) -> _Plan:
        num_inputs = len(tensors) - len(results)
        same = {num_inputs + number: alias for number, alias in enumerate(asked.aliases) if alias >= 0}
        # A guard takes no tensor twice.
        there = tuple(i for i, present in enumerate(asked.present) if present and i not in same)
        missing = tuple(i for i, present in enumerate(asked.present) if not present)
        new = tuple((i, *results[i - num_inputs]) for i in missing if i >= num_inputs)
        pool = {index: place for place, index in enumerate((*there, *(made[0] for made in new)))}
        pool |= {index: pool[alias] for index, alias in same.items()}
        pairs = []
        for index in (i for i, present in enumerate(asked.present) if present and i >= num_inputs):
            others = (*(i for i in there if i < num_inputs), *(i for i in pool if index < i and asked.present[i]))
            for other in (i for i in others if pool[i] != pool[index]):
                pairs.append((pool[index], pool[other], *nearness(tensors[index], tensors[other])))
        return cls(
            there=there,
            missing=missing,
            new=new,
            order=tuple(pool.get(i, len(there) + len(new)) for i in range(len(tensors))),
            pairs=tuple(pairs),
            same=tuple(same.items()),
            num_inputs=num_inputs,
        )


def make(
    communicator: Communicator,
    by_address: Callable[..., None],
    tensors: Tensors,
    results: Sequence[Result],
    scalars: tuple[int, ...],
    asked: ManyAsked,
) -> ManyFastCall | None:
    """What makes the next call like this one fast, or None where this torch has no guards.

    Args:
        communicator, by_address: whom to launch for, and how.
        tensors: of a call that was served, and whose tensors kernels take as they are.
        results: of every output, given or not.
        scalars: what the launch takes after the addresses.
        asked: what was asked for.
    """
    plan = _Plan.of(tensors, results, asked)
    looks_alike = make_guard(*(tensors[i] for i in plan.there))
    if looks_alike is None:
        return None
    present, absent, nothing = _picker(plan.there), _picker(plan.missing), (None,) * len(plan.missing)
    enter = _entrance(communicator, plan, asked)
    new, arrange, num_inputs = plan.new, _picker(plan.order), plan.num_inputs
    option, numerics, max_sms, make_empty = asked.option, asked.numerics, asked.max_sms, empty

    def call(tensors: Tensors, _option: Any, _numerics: str, _max_sms: int | None) -> tuple[torch.Tensor, ...] | None:
        given = present(tensors)
        if (
            absent(tensors) != nothing
            or not looks_alike(*given)
            or (_option is not option and _option != option)
            or _numerics is not numerics
            or _max_sms is not max_sms
            or forward_ad._current_level >= 0
        ):
            return None
        addresses: list[int] = []
        stream = enter(tensors, given, addresses)
        if stream < 0:
            return None
        if new:
            full = [*tensors]
            for index, shape, stride, dtype in new:
                full[index] = made = make_empty(shape, stride, dtype)
                addresses.append(made.data_ptr())
            tensors = tuple(full)
        addresses.append(0)
        by_address(stream, *arrange(addresses), *scalars)
        return tensors[num_inputs:]

    return call


def _entrance(
    communicator: Communicator, plan: _Plan, asked: ManyAsked
) -> Callable[[Tensors, Sequence[torch.Tensor], list[int]], int]:
    """What fills in the addresses and returns the stream to launch on, or −1 where the call is not to be served so."""
    device_index, status, last_streams = communicator.device_index, communicator.status_view, communicator.last_streams
    stream_of, captures, device_now = raw_stream, is_capturing, current_device
    capturing, pairs, same, address_of = asked.capturing, plan.pairs, plan.same, torch.Tensor.data_ptr

    def enter(tensors: Tensors, given: Sequence[torch.Tensor], addresses: list[int]) -> int:
        stream = stream_of(device_index)
        # The default stream cannot be captured.
        if (stream != 0 and captures()) is not capturing or device_now() != device_index:
            return -1
        bits = 0
        for tensor in given:
            address = address_of(tensor)
            bits |= address
            addresses.append(address)
        if bits & MISALIGNED:
            return -1
        for one, other, least, most in pairs:
            if least < addresses[one] - addresses[other] < most:
                return -1
        for index, alias in same:
            if tensors[index] is not tensors[alias]:
                return -1
        if status[0]:
            communicator.check_peers()
        if stream != last_streams[capturing]:
            communicator.order_streams(capturing, stream)
        return stream

    return enter
