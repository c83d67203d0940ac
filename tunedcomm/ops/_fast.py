"""The shortest way from a call to its launch, for calls that look like one that was served before.

A call costs a few microseconds on the host, most of them in the driver. What Python adds is paid for each question
asked of a tensor, so one guard (that of PyTorch's compiler: type, dtype, device, strides, sizes, gradients, lazy bits)
answers most of them at once. Whatever the guard does not recognise takes the longer way, which asks everything.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tunedcomm.communicator import Communicator
from tunedcomm.dispatcher import Plan
from tunedcomm.kernels._launch import AddressLaunch
from tunedcomm.spec import NumericsPolicy

__all__ = ["MISALIGNED", "current_device", "empty", "fast_call", "is_capturing", "raw_stream", "remember"]

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


@dataclass(slots=True)
class FastCall:
    """All that one kind of call needs.

    Attributes:
        op, in_place, numerics, max_sms, capturing: what was asked.
        looks_like: True for tensors in which nothing but the address differs from the one that was served.
        by_address: the plan's launch.
        shape, stride, dtype: of the output.
        nbytes: of the input.
        guards: made so far for this key.
    """

    op: str
    in_place: bool
    numerics: NumericsPolicy
    max_sms: int | None
    capturing: bool
    looks_like: Callable[[object], bool]
    by_address: Callable[..., None]
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    nbytes: int
    guards: int


def _guard(x: torch.Tensor) -> Callable[[object], bool] | None:
    """A predicate for tensors like `x`, or None where this torch has none."""
    try:
        made = _guards.TensorGuards(x, dynamic_dims_sizes=[list(x.shape)], dynamic_dims_strides=[list(x.stride())])
        return made.check if made.check(x) else None
    except (AttributeError, TypeError, RuntimeError, SystemError):
        return None


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
    before = communicator.fast_calls.get(key)
    guards = before.guards + 1 if before is not None else 1
    looks_like = _guard(x) if guards <= _MAX_GUARDS else None
    if looks_like is not None:
        shape, stride, launch = tuple(x.shape), x.stride(), plan.launch.by_address
        asked = (op, in_place, numerics, max_sms, capturing)
        communicator.last_call = communicator.fast_calls[key] = FastCall(
            *asked, looks_like, launch, shape, stride, x.dtype, x.nbytes, guards
        )


def fast_call(
    communicator: Communicator, x: Any, op: str, out: Any, numerics: NumericsPolicy, max_sms: int | None
) -> torch.Tensor | None:
    """Launch and return the result, or None if this call does not look like one that was served before."""
    stream = raw_stream(communicator.device_index)
    capturing = stream != 0 and is_capturing()  # the default stream cannot be captured
    in_place = out is x
    call = communicator.last_call  # calls like the last one are found without hashing what they ask
    if (
        call is None
        or not call.looks_like(x)
        or call.op is not op
        or call.in_place is not in_place
        or call.numerics is not numerics
        or call.max_sms is not max_sms
        or call.capturing is not capturing
    ):
        try:
            call = communicator.fast_calls.get((x.shape, x.dtype, op, in_place, numerics, max_sms, capturing))
        except (AttributeError, TypeError):  # no tensor, or no option: the longer way says so
            return None
        if call is None or not call.looks_like(x):
            return None
        communicator.last_call = call
    if current_device() != communicator.device_index:
        return None
    if communicator.any_symmetric and communicator.is_symmetric(x):
        return None
    address = x.data_ptr()
    if address & MISALIGNED:
        return None
    if out is None:
        out = empty(call.shape, call.stride, call.dtype)
        target = out.data_ptr()
    elif out is x:
        target = address
    else:
        if not call.looks_like(out):
            return None
        target = out.data_ptr()
        if target & MISALIGNED or -call.nbytes < target - address < call.nbytes:
            return None
    if communicator.status_view[0]:
        communicator.check_peers()
    if stream != communicator.last_streams[capturing]:
        communicator.order_streams(capturing, stream)
    call.by_address(stream, address, target)
    return out  # type: ignore[no-any-return]
