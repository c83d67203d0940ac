"""`tunedcomm.all_reduce` and `tunedcomm.all_reduce_`."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from tunedcomm.communicator import Communicator, get_communicator, on_release
from tunedcomm.dispatcher import Plan, check_max_sms, check_policy, library_plan, plan_for
from tunedcomm.errors import UnsupportedInputError
from tunedcomm.ops._fast import (
    MISALIGNED,
    current_device,
    empty,
    is_capturing,
    other_call,
    raw_stream,
    remember,
)
from tunedcomm.spec import Mode, NumericsPolicy, Problem

__all__ = ["all_reduce", "all_reduce_"]

_DTYPES = {
    torch.bfloat16: "bfloat16",
    torch.float16: "float16",
    torch.float32: "float32",
    torch.float64: "float64",
    torch.int8: "int8",
    torch.uint8: "uint8",
    torch.int32: "int32",
    torch.int64: "int64",
}
_REDUCTIONS = ("sum", "avg", "max", "min")


class _PublicWorld:
    """The default group as torch's public interface has it."""

    @property
    def _default_pg(self) -> dist.ProcessGroup | None:
        return dist.group.WORLD


# Where torch keeps the default group: a sixth of what asking the public interface costs.
_world: Any = getattr(dist.distributed_c10d, "_world", None)
_world = _world if hasattr(_world, "_default_pg") else _PublicWorld()

_by_group: dict[tuple[dist.ProcessGroup | None, torch.device], Communicator] = {}
# The communicator that served a group's last call: nearly always that of its next one, which is checked.
_recent: dict[dist.ProcessGroup | None, Communicator] = {}
on_release(_by_group.clear)
on_release(_recent.clear)


def all_reduce(
    x: torch.Tensor,
    *,
    op: str = "sum",
    group: dist.ProcessGroup | None = None,
    out: torch.Tensor | None = None,
    numerics: NumericsPolicy = "default",
    max_sms: int | None = None,
) -> torch.Tensor:
    """Reduce `x` elementwise over all ranks of `group`; every rank gets the result.

    Args:
        x: any shape, any strides, bf16, fp16 or fp32 (kernels), fp64 or an integer type (library). The same number of
            elements and dtype on every rank. Left as it is unless `out` is `x`.
        op: `sum`, `avg`, `max` or `min`; `avg` not for integers.
        group: process group, by default the default group. Its first call is collective set-up and cannot be captured.
        out: where to write, same shape, dtype and device as `x`; any strides; may be `x`.
        numerics: `default` allows variants whose results are the same bits on every rank; `ordered` only those that sum
            in fp32 in rank order with one rounding at the end, whose bits do not depend on tuning; `any` allows all.
        max_sms: SMs at most that the kernel may take, the same on every rank, for callers that compute beside it; the
            best candidate that takes no more is run, and the library, which chooses for itself, where there is none.

    Returns:
        `out`, or a new contiguous tensor of `x`'s shape and dtype.

    Raises:
        NotInitializedError: no default process group, or a first call inside a graph capture.
        GroupError: not a member of `group`, or it has no backend for `x`'s device.
        UnsupportedInputError: a dtype, layout, device, option or `out` that cannot be served; says what to do.
        PeerTimeoutError: an earlier call on the group waited for a peer in vain.

    Accumulates in fp32 (ordered kernels). Can be captured in CUDA graphs; enqueues on the current stream; never
    synchronises the host.
    """
    if group is None:
        group = _world._default_pg  # looked up anew: groups may be destroyed and made again
    recent = _recent.get(group)
    if recent is not None:
        call = recent.last_call
        result = None if call is None else call(x, op, out, numerics, max_sms)
        if result is None:
            result = other_call(recent, x, op, out, numerics, max_sms)
        if result is not None:
            return result
    try:
        communicator = _by_group.get((group, x.device))
    except AttributeError:
        raise UnsupportedInputError(f"all_reduce wants a torch.Tensor, got {type(x).__name__}") from None
    if communicator is None:
        communicator = _first_call(x, group)
    capturing = is_capturing()
    result = _prepared_call(communicator, x, op, out, numerics, max_sms, capturing)
    if result is None:
        return _slow_path(communicator, x, op, out, numerics, max_sms, capturing)
    _recent[group] = communicator
    return result


def all_reduce_(
    x: torch.Tensor,
    *,
    op: str = "sum",
    group: dist.ProcessGroup | None = None,
    numerics: NumericsPolicy = "default",
    max_sms: int | None = None,
) -> torch.Tensor:
    """`all_reduce` in place: `x` holds the result and is returned."""
    return all_reduce(x, op=op, group=group, out=x, numerics=numerics, max_sms=max_sms)


def _prepared_call(
    communicator: Communicator,
    x: torch.Tensor,
    op: str,
    out: torch.Tensor | None,
    numerics: NumericsPolicy,
    max_sms: int | None,
    capturing: bool,
) -> torch.Tensor | None:
    """A call that has a plan and that kernels can take as it is; None where the slow path must see to it."""
    in_place = out is x
    symmetric = communicator.any_symmetric and communicator.is_symmetric(x)
    try:
        plan = communicator.plans.get((x.numel(), x.dtype, op, in_place, numerics, max_sms, symmetric, capturing))
    except TypeError:  # an option that cannot even be a key: the slow path says so
        return None
    if plan is None or x.requires_grad or x.layout is not torch.strided or not x.is_contiguous():
        return None
    # Lazily negated memory holds the opposite.
    if x.is_neg() or current_device() != communicator.device_index:
        return None
    address = x.data_ptr()
    if out is None:
        out = empty(tuple(x.shape), x.stride(), x.dtype)
    elif not in_place:
        try:
            fits = (
                out.shape == x.shape
                and out.dtype == x.dtype
                and out.device == x.device
                and out.is_contiguous()
                and not out.requires_grad
                and not out.is_neg()
                and abs(out.data_ptr() - address) >= x.nbytes
            )
        except (AttributeError, RuntimeError):  # no tensor, or one without storage
            return None
        if not fits:
            return None
    if plan.wants_aligned and (address | out.data_ptr()) & MISALIGNED:
        return None
    if communicator.status_view[0]:
        communicator.check_peers()
    stream = raw_stream(communicator.device_index)
    if stream != communicator.last_streams[capturing]:
        communicator.order_streams(capturing, stream)
    plan.launch((x,), (out,), stream)
    if not symmetric:
        remember(communicator, plan, x, op, in_place, numerics, max_sms, capturing)
    return out


def _first_call(x: torch.Tensor, group: dist.ProcessGroup | None) -> Communicator:
    if x.device.type not in ("cuda", "cpu"):
        raise UnsupportedInputError(f"all_reduce serves cuda and cpu tensors, not {x.device}")
    communicator = get_communicator(group, x.device)
    if x.device != communicator.device:
        raise UnsupportedInputError(
            f"the tensor is on {x.device}, but rank {communicator.rank} of this group works on {communicator.device}; "
            "move the tensor, or call torch.cuda.set_device() before the group's first call"
        )
    _by_group[group, x.device] = communicator
    return communicator


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    """First byte and one past the last byte that a non-empty tensor covers."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()


def _check_out(x: torch.Tensor, out: torch.Tensor) -> None:
    if not isinstance(out, torch.Tensor) or out.layout is not torch.strided:
        what = f"a tensor of layout {out.layout}" if isinstance(out, torch.Tensor) else f"a {type(out).__name__}"
        raise UnsupportedInputError(f"out is {what}; it must be a dense tensor, e.g. torch.empty_like(x)")
    if out.shape != x.shape or out.dtype != x.dtype or out.device != x.device:
        raise UnsupportedInputError(
            f"out has shape {tuple(out.shape)}, {out.dtype}, {out.device}; it must match x: {tuple(x.shape)}, "
            f"{x.dtype}, {x.device}"
        )
    if out.numel() == 0:
        return
    if any(stride == 0 and size > 1 for size, stride in zip(out.shape, out.stride(), strict=True)):
        raise UnsupportedInputError("out is an expanded tensor: several of its elements share one place in memory")
    (low, high), (out_low, out_high) = _extent(x), _extent(out)
    same = out_low == low and out.stride() == x.stride()
    if not same and out_low < high and low < out_high:
        raise UnsupportedInputError("out overlaps x without being x; pass out=x, or a tensor with memory of its own")


def _check(x: torch.Tensor, op: str, out: torch.Tensor | None, numerics: NumericsPolicy, max_sms: int | None) -> None:
    """Refuse what no variant takes, with the way out."""
    if x.layout is not torch.strided:
        raise UnsupportedInputError(f"all_reduce wants a dense tensor, got layout {x.layout}; call .to_dense() first")
    if x.is_complex():
        raise UnsupportedInputError(
            f"all_reduce does not take {x.dtype}; pass torch.view_as_real(x), whose sum and avg are the same"
        )
    if x.dtype not in _DTYPES:
        allowed = ", ".join(sorted(_DTYPES.values()))
        raise UnsupportedInputError(f"all_reduce does not take {x.dtype}; allowed: {allowed}")
    check_policy(numerics)
    check_max_sms(max_sms)
    if op not in _REDUCTIONS:
        raise UnsupportedInputError(f"op={op!r} is no reduction; allowed: {', '.join(_REDUCTIONS)}")
    if op == "avg" and not x.is_floating_point():
        raise UnsupportedInputError(f"avg of {x.dtype} would round; use op='sum' and divide, or a floating-point dtype")
    if out is not None:
        _check_out(x, out)
    if torch.is_grad_enabled() and (x.requires_grad or (out is not None and out.requires_grad)):
        raise UnsupportedInputError(
            "all_reduce is not differentiable; call it under torch.no_grad() or pass x.detach()"
        )


def _usable(tensor: torch.Tensor) -> bool:
    """True if the bytes at the tensor's address are its elements, in order, for kernels to take as they are."""
    return tensor.is_contiguous() and not tensor.data_ptr() & MISALIGNED and not tensor.is_neg()


def _slow_path(
    communicator: Communicator,
    x: torch.Tensor,
    op: str,
    out: torch.Tensor | None,
    numerics: NumericsPolicy,
    max_sms: int | None,
    capturing: bool,
) -> torch.Tensor:
    """First calls, and everything unusual: checks, plans, and copies into a form that kernels take.

    The problem depends on what every rank passes alike, never on this rank's strides or alignment: those are dealt
    with by copies that the other ranks do not see.
    """
    _check(x, op, out, numerics, max_sms)
    if x.is_cuda and x.get_device() != current_device():
        with torch.cuda.device(x.device):
            return all_reduce(x, op=op, group=communicator.group, out=out, numerics=numerics, max_sms=max_sms)
    result = torch.empty(x.shape, dtype=x.dtype, device=x.device) if out is None else out
    if x.numel() == 0:
        return result
    x, target = x.detach(), result.detach()
    in_place = out is not None and target.data_ptr() == x.data_ptr()
    if communicator.world_size == 1:
        return result if in_place else result.copy_(x)
    symmetric = communicator.any_symmetric and communicator.is_symmetric(x)
    if symmetric and not _usable(x):
        raise UnsupportedInputError(
            "a tensor in symmetric memory must be contiguous and start at a multiple of 16 bytes, for peers address it "
            "too; pass such a view of it, or x.clone() on every rank"
        )
    plan = _plan(communicator, x, op, in_place, numerics, max_sms, symmetric, capturing)
    communicator.check_peers()
    stream = raw_stream(communicator.device_index) if x.is_cuda else 0
    communicator.order_streams(capturing, stream)
    source = x if _usable(x) else x.clone(memory_format=torch.contiguous_format)
    sink = source if in_place else target
    if not _usable(sink):
        sink = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    plan.launch((source,), (sink,), stream)
    if sink.data_ptr() != target.data_ptr():
        target.copy_(sink)
    return result


def _plan(
    communicator: Communicator,
    x: torch.Tensor,
    op: str,
    in_place: bool,
    numerics: NumericsPolicy,
    max_sms: int | None,
    symmetric: bool,
    capturing: bool,
) -> Plan:
    """The plan from the cache, or made now for both modes; inside a capture a new problem cannot be bound."""
    key = (x.numel(), x.dtype, op, in_place, numerics, max_sms, symmetric)
    plan: Plan | None = communicator.plans.get((*key, capturing))
    if plan is not None:
        return plan
    if capturing:
        return library_plan(communicator, _problem(communicator, key, "graph"))
    modes: tuple[Mode, ...] = ("eager", "graph") if x.is_cuda else ("eager",)
    for mode in modes:
        plan = plan_for(communicator, _problem(communicator, key, mode), numerics, max_sms)
        communicator.plans[(*key, mode == "graph")] = plan
    return communicator.plans[(*key, False)]  # type: ignore[no-any-return]


def _problem(communicator: Communicator, key: tuple[Any, ...], mode: Mode) -> Problem:
    numel, dtype, op, in_place, _, _, symmetric = key
    return Problem(
        op="all_reduce",
        shape=(numel,),
        dtype=_DTYPES[dtype],
        world_size=communicator.world_size,
        reduction=op,
        input_kind="symmetric" if symmetric else "plain",
        in_place=in_place,
        mode=mode,
    )
