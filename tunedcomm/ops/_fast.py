"""The shortest way from a call to its launch, for calls that look like one that was served before.

A call costs a few microseconds on the host, most of them in the driver. What Python adds is paid for each question
asked of a tensor, so one guard (that of PyTorch's compiler: type, dtype, device, strides, sizes, gradients, lazy bits)
answers most of them at once. Whatever the guard does not recognise takes the longer way, which asks everything.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch

from tunedcomm.communicator import Communicator
from tunedcomm.dispatcher import Plan
from tunedcomm.kernels._launch import AddressLaunch
from tunedcomm.spec import NumericsPolicy

__all__ = ["MISALIGNED", "current_device", "empty", "is_capturing", "other_call", "raw_stream", "remember"]

MISALIGNED = 15  # kernels move 16-byte packets
# Guards made for one key: callers that alternate (with inference mode and without, say) must not pay for one each time.
_MAX_GUARDS = 8


def _host_empty(shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty_strided(shape, stride, dtype=dtype)


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


# (x, op, out, numerics, max_sms) to the result, or None where the call differs from the one that it was made for.
FastCall: TypeAlias = Callable[[Any, str, Any, str, "int | None"], "torch.Tensor | None"]


def _guard(x: torch.Tensor) -> Callable[[object], bool] | None:
    """A predicate for tensors like `x`, or None where this torch has none."""
    try:
        made = _guards.TensorGuards(x, dynamic_dims_sizes=[list(x.shape)], dynamic_dims_strides=[list(x.stride())])
        return made.check if made.check(x) else None
    except (AttributeError, TypeError, RuntimeError, SystemError):
        return None


def _make(
    communicator: Communicator,
    by_address: Callable[..., None],
    looks_like: Callable[[object], bool],
    x: torch.Tensor,
    asked: tuple[str, bool, NumericsPolicy, int | None, bool],
) -> FastCall:
    """A call that holds all that it needs in variables of its own, which are the quickest to get at."""
    op, in_place, numerics, max_sms, capturing = asked
    shape, stride, dtype, nbytes = tuple(x.shape), x.stride(), x.dtype, x.nbytes
    device_index, status, last_streams = communicator.device_index, communicator.status_view, communicator.last_streams
    stream_of, captures, device_now, make_empty = raw_stream, is_capturing, current_device, empty

    def call(x: Any, _op: str, out: Any, _numerics: str, _max_sms: int | None) -> torch.Tensor | None:
        if (
            not looks_like(x)
            or _op is not op
            or _numerics is not numerics
            or _max_sms is not max_sms
            or (out is x) is not in_place
        ):
            return None
        stream = stream_of(device_index)
        # The default stream cannot be captured.
        if (stream != 0 and captures()) is not capturing or device_now() != device_index:
            return None
        if communicator.any_symmetric and communicator.is_symmetric(x):
            return None
        address = x.data_ptr()
        if address & MISALIGNED:
            return None
        if out is None:
            out = make_empty(shape, stride, dtype)
            target = out.data_ptr()
        elif in_place:
            target = address
        else:
            if not looks_like(out):
                return None
            target = out.data_ptr()
            if target & MISALIGNED or -nbytes < target - address < nbytes:
                return None
        if status[0]:
            communicator.check_peers()
        if stream != last_streams[capturing]:
            communicator.order_streams(capturing, stream)
        by_address(stream, address, target)
        return out  # type: ignore[no-any-return]

    return call


def remember(
    communicator: Communicator,
    plan: Plan,
    x: torch.Tensor,
    op: str,
    in_place: bool,
    numerics: NumericsPolicy,
    max_sms: int | None,
    capturing: bool,
) -> None:
    """Make the next call like this one fast. The caller has found that kernels can take `x` as it is."""
    if not isinstance(plan.launch, AddressLaunch):
        return
    key = (x.shape, x.dtype, op, in_place, numerics, max_sms, capturing)
    _, before = communicator.fast_calls.get(key, (None, 0))
    looks_like = _guard(x) if before < _MAX_GUARDS else None
    if looks_like is not None:
        asked = (op, in_place, numerics, max_sms, capturing)
        call = _make(communicator, plan.launch.by_address, looks_like, x, asked)
        communicator.fast_calls[key] = (call, before + 1)
        communicator.last_call = call


def other_call(
    communicator: Communicator, x: Any, op: str, out: Any, numerics: NumericsPolicy, max_sms: int | None
) -> torch.Tensor | None:
    """As the last call does, for calls that look like an earlier one: launch and return the result, or None."""
    stream = raw_stream(communicator.device_index)
    capturing = stream != 0 and is_capturing()
    try:
        known = communicator.fast_calls.get((x.shape, x.dtype, op, out is x, numerics, max_sms, capturing))
    except (AttributeError, TypeError):  # no tensor, or no option: the longer way says so
        return None
    if known is None or known[0] is communicator.last_call:
        return None
    result: torch.Tensor | None = known[0](x, op, out, numerics, max_sms)
    if result is not None:
        communicator.last_call = known[0]
    return result
