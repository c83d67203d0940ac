"""Runs an intercepted call by tunedcomm's ops, on tensors as `torch.distributed` takes them.

`torch.distributed` counts elements where tunedcomm's ops look at shapes, and allows the input to be a part of the
output, so tensors are seen as flat here and a shared input is copied first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from tunedcomm.integrations._routed import RoutedGroup
from tunedcomm.kernels.common.own import own
from tunedcomm.ops.all_gather import all_gather
from tunedcomm.ops.all_reduce import all_reduce
from tunedcomm.ops.all_to_all import all_to_all
from tunedcomm.ops.all_to_all_v import all_to_all_v
from tunedcomm.ops.reduce_scatter import reduce_scatter

__all__ = ["gather", "reduce", "scatter", "start", "to_all", "to_all_rows"]


def start(of: RoutedGroup, call: Callable[[], Any], results: Any, tensors: Sequence[torch.Tensor], beside: bool) -> Any:
    """Run a served call and give the work object that stands for it, as operators return it.

    Args:
        of: the group.
        call: what launches.
        results: what the work's future holds.
        tensors: what is read and written.
        beside: the caller goes on while it runs: on a stream of the group's own, as the library would. Else it runs on
            the current stream, where it is in order with what comes after.
    """
    if beside and tensors[0].is_cuda:
        device = tensors[0].device
        if of.side_stream is None:
            of.side_stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        of.side_stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(of.side_stream):
            _served(call)
            for tensor in tensors:  # their memory may be given to others once the caller drops them
                tensor.record_stream(of.side_stream)
            return _work(results, [device])
    _served(call)
    return _work(results, [tensors[0].device] if tensors[0].is_cuda else None)


def _served(call: Callable[[], Any]) -> None:
    """What the library is asked for in between is the library's."""
    own.yes = True
    try:
        call()
    finally:
        own.yes = False


def _work(results: Any, devices: list[int | str | torch.device] | None) -> Any:
    """A work object that is done when the current stream is here; its wait() makes the stream of then wait.

    It is torch's own around a future, which refuses a timeout. A class of Python's would take one, but what it
    overrides is lost once only C++ holds it, as functional collectives and DDP do: they would then wait for ever.
    """
    future: Any = torch.futures.Future(devices=devices)
    future.set_result(results)
    c10d: Any = torch._C._distributed_c10d
    return c10d._create_work_from_future(future).boxed()


def _flat(x: torch.Tensor) -> torch.Tensor:
    """All elements in a row, without a gradient: the operators are below autograd."""
    return x.detach().reshape(-1)


def _into(
    of: RoutedGroup, x: torch.Tensor, out: torch.Tensor, run: Callable[[torch.Tensor, torch.Tensor], Any]
) -> None:
    """`run(flat input, flat output)`, whatever `out`'s strides are and even where it shares memory with `x`."""
    flat, target = of.plain(_flat(x)), out.detach()
    sink = target.view(-1) if target.is_contiguous() else torch.empty_like(target.reshape(-1))
    if -sink.nbytes < sink.data_ptr() - flat.data_ptr() < flat.nbytes:
        flat = flat.clone()
    run(flat, sink)
    if not target.is_contiguous():
        target.copy_(sink.view(target.shape))


def reduce(of: RoutedGroup, x: torch.Tensor, reduction: str, out: torch.Tensor | None) -> torch.Tensor:
    """All-reduce `x` into a new tensor, or into `x`."""
    x = x.detach()
    plain = of.plain(x)
    found = all_reduce(plain, op=reduction, group=of.group, out=None if out is None else plain)
    return x.copy_(found) if out is not None and plain is not x else found


def gather(of: RoutedGroup, x: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
    """All-gather `x` along dimension 0 into a new tensor, or into as many elements."""
    if out is None:
        return all_gather(of.plain(x.detach()), group=of.group)
    _into(of, x, out, lambda flat, sink: all_gather(flat, group=of.group, out=sink))
    return out


def scatter(of: RoutedGroup, x: torch.Tensor, reduction: str, out: torch.Tensor | None) -> torch.Tensor:
    """Reduce `x` and keep this rank's part of dimension 0 in a new tensor, or in as many elements."""
    if out is None:
        return reduce_scatter(of.plain(x.detach()), op=reduction, group=of.group)
    _into(of, x, out, lambda flat, sink: reduce_scatter(flat, op=reduction, group=of.group, out=sink))
    return out


def to_all(of: RoutedGroup, x: torch.Tensor, out: torch.Tensor) -> None:
    """Exchange equal parts."""
    _into(of, x, out, lambda flat, sink: all_to_all(flat, group=of.group, out=sink))


def to_all_rows(
    of: RoutedGroup, x: torch.Tensor, out: torch.Tensor | None, send: Sequence[int], receive: Sequence[int]
) -> torch.Tensor:
    """Exchange as many rows as the split sizes say."""
    x = x.detach()
    if out is None or not out.is_contiguous():
        rows = all_to_all_v(x, send, receive, max_count=of.max_count, group=of.group)
        return rows if out is None else out.detach().copy_(rows.view(out.shape))
    if out.untyped_storage().data_ptr() == x.untyped_storage().data_ptr():
        x = x.clone()
    shape = (sum(receive), *x.shape[1:])
    all_to_all_v(x, send, receive, max_count=of.max_count, group=of.group, out=out.detach().view(shape))
    return out
