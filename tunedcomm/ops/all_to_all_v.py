"""`tunedcomm.all_to_all_v`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from tunedcomm.dispatch.communicator import Communicator
from tunedcomm.dispatch.dispatcher import Plan, check_max_sms, decide, library_plan, plan_for
from tunedcomm.errors import UnsupportedInputError
from tunedcomm.kernels.all_to_all.op import layout_of, row_numel
from tunedcomm.kernels.common.launch import undisturbed
from tunedcomm.ops._checks import MOVED, check_differentiable, check_dtype, check_input, check_out
from tunedcomm.ops._fast import current_device, is_capturing, raw_stream
from tunedcomm.ops._path import communicator_for, is_usable, world
from tunedcomm.ops.torch_ops import check_plain
from tunedcomm.spec import Candidate, Mode, Problem

__all__ = ["all_to_all_v", "planned", "run_problem"]

_OP = "all_to_all_v"


def _counts(name: str, counts: Any, world_size: int, max_count: int | None) -> list[int]:
    """The counts as a list of ints, one a rank."""
    try:
        given = counts.tolist() if isinstance(counts, torch.Tensor) and not counts.is_cuda else list(counts)
    except TypeError:
        given = []
    if isinstance(counts, torch.Tensor) and counts.is_cuda:
        raise UnsupportedInputError(f"{name} is on {counts.device}; pass host integers, e.g. {name}.tolist()")
    if len(given) != world_size or any(not isinstance(n, int) or isinstance(n, bool) or n < 0 for n in given):
        raise UnsupportedInputError(
            f"{name}={counts!r} is not a number of rows from 0 on for each of the {world_size} ranks"
        )
    if max_count is not None and max(given) > max_count:
        raise UnsupportedInputError(
            f"{name}={given} exceeds max_count={max_count}; pass the same larger max_count on every rank, or none"
        )
    return given


def _check_rows(x: torch.Tensor, send: Sequence[int], recv: Sequence[int], rank: int) -> None:
    if x.dim() == 0 or x.shape[0] != sum(send):
        raise UnsupportedInputError(
            f"send_counts={list(send)} names {sum(send)} rows, but x has shape {tuple(x.shape)}; its dimension 0 must "
            "be their sum"
        )
    if send[rank] != recv[rank]:
        raise UnsupportedInputError(
            f"rank {rank} sends itself {send[rank]} rows and expects {recv[rank]} of itself; send_counts and "
            "recv_counts must be equal there"
        )


def _unbounded_plan(communicator: Communicator, dtype: str, mode: Mode) -> Plan:
    """The library, for calls whose ranks have nothing in common by which a kernel could be chosen."""
    problem = Problem(_OP, (0,), dtype, communicator.world_size, reduction="", mode=mode)
    library = Candidate.of(_OP, "library", {})
    decision = decide(problem, communicator.snapshot, communicator.limits, policy="any", forced=library)
    launch = communicator.guarded(problem, undisturbed(communicator.bind(problem, library), communicator.device.type))
    return Plan(problem, decision, launch, False, "any")


def _plan(communicator: Communicator, x: torch.Tensor, row: int, max_count: int | None, max_sms: int | None) -> Plan:
    """The plan from the cache, or made now for both modes; inside a capture a new problem cannot be bound."""
    capturing = is_capturing()
    key = (_OP, row, x.dtype, max_count, max_sms)
    plan: Plan | None = communicator.plans.get((*key, capturing))
    if plan is not None:
        return plan
    dtype, world_size = MOVED[x.dtype], communicator.world_size
    if max_count is None:
        mode: Mode = "graph" if capturing else "eager"
        plan = communicator.plans[(*key, capturing)] = _unbounded_plan(communicator, dtype, mode)
        return plan
    layout = layout_of(row * x.element_size(), max_count)
    problem = Problem(_OP, (max_count * row,), dtype, world_size, reduction="", layout=layout, mode="eager")
    if capturing:
        return library_plan(communicator, replace(problem, mode="graph"))
    modes: tuple[Mode, ...] = ("eager", "graph") if x.is_cuda else ("eager",)
    for mode in modes:
        plan = plan_for(communicator, replace(problem, mode=mode), "default", max_sms)
        communicator.plans[(*key, mode == "graph")] = plan
    return communicator.plans[(*key, False)]  # type: ignore[no-any-return]


def _serve(
    communicator: Communicator,
    x: torch.Tensor,
    counts: tuple[list[int], list[int]],
    result: torch.Tensor,
    max_count: int | None,
    max_sms: int | None,
) -> None:
    """Launch a checked call of several ranks; ranks that send and get nothing come along."""
    row = math.prod(x.shape[1:])
    plan = _plan(communicator, x, row, max_count, max_sms)
    communicator.check_peers()
    stream = raw_stream(communicator.device_index) if x.is_cuda else 0
    communicator.order_streams(capturing := is_capturing(), stream)
    source, sink = x, result
    if not (is_usable(x) if plan.wants_aligned else x.is_contiguous() and not x.is_neg()):
        source = x.clone(memory_format=torch.contiguous_format)
    if not (is_usable(sink) if plan.wants_aligned else sink.is_contiguous() and not sink.is_neg()):
        sink = torch.empty(result.shape, dtype=x.dtype, device=x.device)
    send, recv = (torch.tensor(of, device="cpu") * row for of in counts)
    if capturing:
        communicator.captured(plan)
    plan.launch((source, send, recv), (sink,), stream)
    if sink is not result:
        result.copy_(sink)


def planned(x: torch.Tensor, max_count: int | None, group: dist.ProcessGroup) -> Plan:
    """The plan of a call with such rows; made and bound now, but not launched.

    Raises:
        UnsupportedInputError: the call would be refused.
    """
    check_input(_OP, x)
    check_dtype(_OP, x, MOVED)
    return _plan(communicator_for(_OP, x, group), x, math.prod(x.shape[1:]), max_count, None)


def all_to_all_v(
    x: torch.Tensor,
    send_counts: Sequence[int],
    recv_counts: Sequence[int],
    *,
    max_count: int | None = None,
    group: dist.ProcessGroup | None = None,
    out: torch.Tensor | None = None,
    max_sms: int | None = None,
) -> torch.Tensor:
    """Send the first `send_counts[0]` rows of `x` to rank 0, the next `send_counts[1]` to rank 1, and so on.

    Args:
        x: rows along dimension 0, as many as `send_counts` names; any strides, any floating-point (fp8 too), integer or
            bool dtype; complex ones as `torch.view_as_real(x)`. Dtype and all dimensions but the first are the same on
            every rank. Left as it is.
        send_counts: rows for each rank of the group, one integer a rank, on the host (a list or a CPU tensor); 0 is
            allowed.
        recv_counts: rows that come from each rank, likewise: `recv_counts[i]` here is `send_counts[r]` on rank i, where
            r is this rank.
        max_count: rows at most that any rank sends any rank, the same on every rank, e.g. a capacity. Ranks do not know
            each other's counts, and all must run the same kernel: it is chosen by this bound alone, and tuned for it.
            As None the variant `library` serves the call. Round it up to few different values, e.g. to powers of two:
            every new one is a new problem.
        group: process group; None is the default group. Its first call is collective set-up: all ranks make it, outside
            of graph captures.
        out: where to write: `sum(recv_counts)` rows of `x`'s dtype and device, any strides; no memory in common with
            `x`. None allocates it.
        max_sms: SMs at most that the kernel may take, a whole number, the same on every rank, for callers that compute
            beside it. The best candidate that takes no more runs, or, where there is none, the variant `library`, which
            chooses for itself. None: no limit.

    Returns:
        `out`, or a new contiguous tensor: the rows from rank 0, then those from rank 1, and so on.

    Raises:
        NotInitializedError: no default process group, or a first call inside a graph capture.
        GroupError: this rank is not a member of `group`, or the group has no backend for the tensors' device.
        UnsupportedInputError: counts that do not fit `x`, each other or `max_count`, a dtype, layout, device, option or
            `out` that cannot be served; says what to do.
        InfeasibleError: a variant that is forced cannot run the call, or with TUNEDCOMM_MODE=force no database has an
            answer.
        PeerTimeoutError: an earlier call on the group waited for a peer in vain.

    Every bit comes through as it was sent. Can be captured in CUDA graphs, which replay the counts of the capture;
    enqueues on the current stream; never synchronises the host. Every rank must make the call, also one without rows.
    """
    check_input(_OP, x)
    check_plain(_OP, (x, out))
    check_dtype(_OP, x, MOVED)
    check_max_sms(max_sms)
    if max_count is not None and (not isinstance(max_count, int) or isinstance(max_count, bool) or max_count < 0):
        raise UnsupportedInputError(f"max_count={max_count!r} is no number of rows; pass an integer from 0 on, or None")
    communicator = communicator_for(_OP, x, world._default_pg if group is None else group)
    world_size = communicator.world_size
    counts = (
        _counts("send_counts", send_counts, world_size, max_count),
        _counts("recv_counts", recv_counts, world_size, max_count),
    )
    _check_rows(x, *counts, communicator.rank)
    shape = (sum(counts[1]), *x.shape[1:])
    if out is not None:
        check_out(x, out, shape, x.dtype, may_be_input=False)
    check_differentiable(_OP, (x, out))
    result = torch.empty(shape, dtype=x.dtype, device=x.device) if out is None else out
    if math.prod(x.shape[1:]) == 0 or max_count == 0:  # nothing moves, on any rank
        return result
    if world_size == 1:
        result.detach().copy_(x.detach())
    elif x.is_cuda and x.get_device() != current_device():
        with torch.cuda.device(x.device):
            _serve(communicator, x.detach(), counts, result.detach(), max_count, max_sms)
    else:
        _serve(communicator, x.detach(), counts, result.detach(), max_count, max_sms)
    return result


def run_problem(problem: Problem, inputs: tuple[torch.Tensor, ...], outputs: tuple[torch.Tensor, ...]) -> None:
    """The public call that asks for `problem` on the default group, for benchmarks."""
    row = row_numel(problem)
    send, recv = ([count // row for count in counts.tolist()] for counts in inputs[1:])
    x, out = inputs[0].view(-1, row), outputs[0].view(-1, row)
    all_to_all_v(x, send, recv, max_count=problem.numel // row, out=out)
