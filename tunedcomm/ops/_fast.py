"""The shortest way from a call to its launch, for calls that look like one that was served before.

A call costs a few microseconds on the host, most of them in the driver. What Python adds is paid for each question
asked of a tensor, so one guard (that of PyTorch's compiler: type, dtype, device, strides, sizes, gradients, lazy bits)
answers most of them at once. Whatever the guard does not recognise takes the longer way, which asks everything.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
from torch.autograd import forward_ad

from tunedcomm.dispatch.communicator import Communicator
from tunedcomm.spec import NumericsPolicy

__all__ = [
    "MISALIGNED",
    "Asked",
    "FastCall",
    "current_device",
    "empty",
    "is_capturing",
    "make",
    "make_guard",
    "raw_stream",
    "target_kind",
]

MISALIGNED = 15  # kernels move 16-byte packets
# Where the result goes: a new tensor, a tensor of the caller's, or the input.
TargetKind: TypeAlias = Literal["new", "given", "input"]


def _host_empty(shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty_strided(shape, stride, dtype=dtype, device="cpu")


def _cuda_empty(shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty_strided(shape, stride, dtype=dtype, device="cuda")


# What the hot path asks torch, by the cheapest call that this torch has. All act on the current device.
raw_stream: Callable[[int], int] = lambda device: 0  # noqa: E731
is_capturing: Callable[[], bool] = bool
current_device: Callable[[], int] = lambda: -1  # noqa: E731
empty: Callable[[Sequence[int], Sequence[int], torch.dtype], torch.Tensor] = _host_empty
_guards: Any = getattr(torch._C._dynamo, "guards", None)
if torch.cuda.is_available():
    raw_stream = torch._C._cuda_getCurrentRawStream
    is_capturing = torch._C._cuda_isCurrentStreamCapturing
    current_device = torch._C._cuda_getDevice
    # Inductor's allocation: a third of torch.empty's cost.
    empty = getattr(_guards, "_empty_strided_cuda", _cuda_empty)


# (x, option, out, numerics, max_sms) to the result, or None where the call differs from the one that it was made for.
FastCall: TypeAlias = Callable[[Any, Any, Any, str, "int | None"], "torch.Tensor | None"]


class Asked(NamedTuple):
    """What a fast call was made for, besides tensors of one kind.

    Attributes:
        option: the op's own options as one value.
        target: where the result goes.
        numerics, max_sms: as the caller gave them.
        capturing: whether a graph was being captured.
    """

    option: Hashable
    target: TargetKind
    numerics: NumericsPolicy
    max_sms: int | None
    capturing: bool


def target_kind(x: object, out: object) -> TargetKind:
    """Where the result of a call goes."""
    return "new" if out is None else "input" if out is x else "given"


def make_guard(*tensors: torch.Tensor) -> Callable[..., bool] | None:
    """A predicate for tensors like these, or None where this torch has none."""
    try:
        sizes, strides = [list(t.shape) for t in tensors], [list(t.stride()) for t in tensors]
        made = _guards.TensorGuards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides)
        return made.check if made.check(*tensors) else None
    except (AttributeError, TypeError, RuntimeError, SystemError):
        return None


def make(
    communicator: Communicator, by_address: Callable[..., None], x: torch.Tensor, out: torch.Tensor, asked: Asked
) -> FastCall | None:
    """What makes the next call like this one fast, or None where this torch has no guards.

    The caller has found that kernels can take `x` and `out` as they are. Made anew once tensors are registered as
    symmetric, for it asks of those only if there were some.
    """
    looks_alike = make_guard(x, out) if asked.target == "given" else make_guard(x)
    if looks_alike is None:
        return None
    maker = {"new": _into_new, "given": _into_given, "input": _into_input}[asked.target]
    call = maker(communicator, by_address, looks_alike, asked, (x, out))
    return _unless_symmetric(communicator, call) if communicator.any_symmetric else call


def _unless_symmetric(communicator: Communicator, call: FastCall) -> FastCall:
    is_symmetric = communicator.is_symmetric

    def ask(x: Any, _option: Any, out: Any, _numerics: str, _max_sms: int | None) -> torch.Tensor | None:
        if isinstance(x, torch.Tensor) and is_symmetric(x):
            return None
        return call(x, _option, out, _numerics, _max_sms)

    return ask


# The three makers differ in a line or two each, yet a call shared by them would cost what they are there to save. Each
# holds all that it needs in variables of its own, which are the quickest to get at.
#
# Where nothing is allocated, which device is current need not be asked: a kernel of one device's context goes to a
# stream of its own whatever is current, and the driver refuses to launch it on the default stream of another.


def _into_new(
    communicator: Communicator,
    by_address: Callable[..., None],
    looks_alike: Callable[..., bool],
    asked: Asked,
    like: tuple[torch.Tensor, torch.Tensor],
) -> FastCall:
    option, numerics, max_sms, capturing = asked.option, asked.numerics, asked.max_sms, asked.capturing
    shape, stride, dtype = tuple(like[1].shape), like[1].stride(), like[1].dtype
    device_index, status, last_streams = communicator.device_index, communicator.status_view, communicator.last_streams
    stream_of, captures, device_now, make_empty = raw_stream, is_capturing, current_device, empty

    def call(x: Any, _option: Any, out: Any, _numerics: str, _max_sms: int | None) -> torch.Tensor | None:
        if (
            out is not None
            or not looks_alike(x)
            or (_option is not option and _option != option)
            or _numerics is not numerics
            or _max_sms is not max_sms
            or forward_ad._current_level >= 0
        ):
            return None
        stream = stream_of(device_index)
        # The default stream cannot be captured.
        if (stream != 0 and captures()) is not capturing or device_now() != device_index:
            return None
        address = x.data_ptr()
        if address & MISALIGNED:
            return None
        result = make_empty(shape, stride, dtype)
        if status[0]:
            communicator.check_peers()
        if stream != last_streams[capturing]:
            communicator.order_streams(capturing, stream)
        by_address(stream, address, result.data_ptr())
        return result

    return call


def _into_given(
    communicator: Communicator,
    by_address: Callable[..., None],
    looks_alike: Callable[..., bool],
    asked: Asked,
    like: tuple[torch.Tensor, torch.Tensor],
) -> FastCall:
    option, numerics, max_sms, capturing = asked.option, asked.numerics, asked.max_sms, asked.capturing
    before, behind = -like[1].nbytes, like[0].nbytes
    device_index, status, last_streams = communicator.device_index, communicator.status_view, communicator.last_streams
    stream_of, captures, device_now = raw_stream, is_capturing, current_device

    def call(x: Any, _option: Any, out: Any, _numerics: str, _max_sms: int | None) -> torch.Tensor | None:
        if (
            out is None
            or not looks_alike(x, out)
            or (_option is not option and _option != option)
            or _numerics is not numerics
            or _max_sms is not max_sms
            or forward_ad._current_level >= 0
        ):
            return None
        stream = stream_of(device_index)
        if (stream != 0 and captures()) is not capturing:
            return None
        address, target = x.data_ptr(), out.data_ptr()
        if (address | target) & MISALIGNED or before < target - address < behind:
            return None
        if status[0]:
            communicator.check_peers()
        if stream != last_streams[capturing]:
            communicator.order_streams(capturing, stream)
        try:
            by_address(stream, address, target)
        except RuntimeError:
            if device_now() == device_index:
                raise
            return None
        return out  # type: ignore[no-any-return]

    return call


def _into_input(
    communicator: Communicator,
    by_address: Callable[..., None],
    looks_alike: Callable[..., bool],
    asked: Asked,
    like: tuple[torch.Tensor, torch.Tensor],
) -> FastCall:
    del like
    option, numerics, max_sms, capturing = asked.option, asked.numerics, asked.max_sms, asked.capturing
    device_index, status, last_streams = communicator.device_index, communicator.status_view, communicator.last_streams
    stream_of, captures, device_now = raw_stream, is_capturing, current_device

    def call(x: Any, _option: Any, out: Any, _numerics: str, _max_sms: int | None) -> torch.Tensor | None:
        if (
            out is not x
            or not looks_alike(x)
            or (_option is not option and _option != option)
            or _numerics is not numerics
            or _max_sms is not max_sms
            or forward_ad._current_level >= 0
        ):
            return None
        stream = stream_of(device_index)
        if (stream != 0 and captures()) is not capturing:
            return None
        address = x.data_ptr()
        if address & MISALIGNED:
            return None
        if status[0]:
            communicator.check_peers()
        if stream != last_streams[capturing]:
            communicator.order_streams(capturing, stream)
        try:
            by_address(stream, address, address)
        except RuntimeError:
            if device_now() == device_index:
                raise
            return None
        return out  # type: ignore[no-any-return]

    return call
