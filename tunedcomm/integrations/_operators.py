"""The kernels that stand before those of `torch.distributed`'s operators while groups are intercepted.

Each asks its group's `RoutedGroup` and either runs one of tunedcomm's ops or goes on to the kernel that is there
anyway, with the arguments as they came. The parameters are those of the operators' schemas, with their defaults: torch
leaves out trailing arguments that are equal to them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from tunedcomm.integrations import _run
from tunedcomm.integrations._routed import Route, RoutedGroup
from tunedcomm.kernels.common.own import own

__all__ = ["KEY", "OPERATORS", "by_group", "by_name", "drop", "is_live", "make_kernels"]

# Groups that are intercepted now. Read without a lock: a call that races with a block's end goes either way.
by_group: dict[dist.ProcessGroup, RoutedGroup] = {}
by_name: dict[str, RoutedGroup] = {}

_PG, _OP = "__torch__.torch.classes.c10d.ProcessGroup", "__torch__.torch.classes.c10d.ReduceOp"
# Operator to the types of its arguments; a group's name may be of type Any.
OPERATORS: dict[tuple[str, str], tuple[str, ...]] = {
    ("c10d", "allreduce_"): ("List[Tensor]", _PG, _OP, "Optional[Tensor]", "bool", "int"),
    ("c10d", "_allgather_base_"): ("Tensor", "Tensor", _PG, "bool", "int"),
    ("c10d", "_reduce_scatter_base_"): ("Tensor", "Tensor", _PG, _OP, "bool", "int"),
    ("c10d", "alltoall_base_"): ("Tensor", "Tensor", _PG, "List[int]", "List[int]", "bool", "int"),
    ("_c10d_functional", "all_reduce"): ("Tensor", "str", "str"),
    ("_c10d_functional", "all_reduce_"): ("Tensor", "str", "str"),
    ("_c10d_functional", "all_gather_into_tensor"): ("Tensor", "int", "str"),
    ("_c10d_functional", "all_gather_into_tensor_out"): ("Tensor", "int", "str", "Tensor"),
    ("_c10d_functional", "reduce_scatter_tensor"): ("Tensor", "str", "int", "str"),
    ("_c10d_functional", "reduce_scatter_tensor_out"): ("Tensor", "str", "int", "str", "Tensor"),
    ("_c10d_functional", "all_to_all_single"): ("Tensor", "List[int]", "List[int]", "str"),
}

# Those that tunedcomm does not know are asked for all the same: its refusal is the reason in the record.
_NAMES = ("sum", "avg", "max", "min", "product", "band", "bor", "bxor")
_REDUCTIONS = {int(getattr(dist.ReduceOp, name.upper())): name for name in _NAMES}


def _routes(call: str, op: str, *, dim: bool = False, in_place: bool = False) -> dict[str, Route]:
    return {name: Route(call, op, (name, 0) if dim else name, in_place) for name in _NAMES}


_ALLREDUCE = _routes("c10d::allreduce_", "all_reduce", in_place=True)
_REDUCE = _routes("_c10d_functional::all_reduce", "all_reduce")
_REDUCE_IN_PLACE = _routes("_c10d_functional::all_reduce_", "all_reduce", in_place=True)
_REDUCE_SCATTER_BASE = _routes("c10d::_reduce_scatter_base_", "reduce_scatter", dim=True)
_SCATTER = _routes("_c10d_functional::reduce_scatter_tensor", "reduce_scatter", dim=True)
_SCATTER_OUT = _routes("_c10d_functional::reduce_scatter_tensor_out", "reduce_scatter", dim=True)
_ALLGATHER_BASE = Route("c10d::_allgather_base_", "all_gather", 0)
_GATHER = Route("_c10d_functional::all_gather_into_tensor", "all_gather", 0)
_GATHER_OUT = Route("_c10d_functional::all_gather_into_tensor_out", "all_gather", 0)
_ALLTOALL_BASE = Route("c10d::alltoall_base_", "all_to_all")
_ALLTOALL_ROWS = Route("c10d::alltoall_base_", "all_to_all_v")
_TO_ALL_ROWS = Route("_c10d_functional::all_to_all_single", "all_to_all_v")

Kernel = Callable[..., Any]
# Right above the kernels of devices, below autograd's, and where no operator of these has a kernel of torch's.
KEY = "BackendSelect"
_BELOW = torch._C._dispatch_keyset_full_after(torch._C.DispatchKey.BackendSelect)


def _of_object(group: Any) -> RoutedGroup | None:
    """The intercepted group behind an operator's argument; None while a served call runs."""
    return None if own.yes else by_group.get(dist.ProcessGroup.unbox(group))


def _of_name(group: Any) -> RoutedGroup | None:
    """The same for functional operators, which are given a name or, by newer torch, the group."""
    if not isinstance(group, str):
        return _of_object(group)
    of = None if own.yes else by_name.get(group)
    return of if of is not None and is_live(of.group) else None


def is_live(group: dist.ProcessGroup) -> bool:
    """True unless the group was destroyed: one that is made later may have its name."""
    return group in distributed_c10d._world.pg_names


def drop(routed: RoutedGroup) -> None:
    """Intercept a group no more; another one of its name stays."""
    by_group.pop(routed.group, None)
    for name in [name for name, held in by_name.items() if held is routed]:
        del by_name[name]


def _chosen(of: RoutedGroup | None, route: Route | None, x: torch.Tensor) -> bool:
    return of is not None and route is not None and of.choose(route, x).served


def _flat(x: torch.Tensor) -> torch.Tensor:
    """What is chosen by: the operators of c10d count elements, whatever the shape."""
    return x.detach().reshape(-1) if x.layout is torch.strided else x


def _fits(x: torch.Tensor, out: torch.Tensor, times: int, over: int) -> bool:
    """True if `out` has as many elements as the operator wants; the library says what is wrong with others."""
    return out.numel() * over == x.numel() * times and out.dtype == x.dtype and out.device == x.device


def _allreduce(original: Kernel) -> Kernel:
    def kernel(
        keys: Any,
        tensors: list[torch.Tensor],
        group: Any,
        op: Any,
        sparse: torch.Tensor | None = None,
        async_op: bool = True,
        timeout: int = -1,
    ) -> Any:
        of = _of_object(group)
        if of is None or len(tensors) != 1 or sparse is not None:
            return original(keys, tensors, group, op, sparse, async_op, timeout)
        x, reduction = tensors[0], _REDUCTIONS.get(op.op(), "")
        if not _chosen(of, _ALLREDUCE.get(reduction), x):
            return original(keys, tensors, group, op, sparse, async_op, timeout)
        return tensors, _run.start(of, lambda: _run.reduce(of, x, reduction, x), tensors, (x,), async_op)

    return kernel


def _allgather_base(original: Kernel) -> Kernel:
    def kernel(
        keys: Any, out: torch.Tensor, x: torch.Tensor, group: Any, async_op: bool = True, timeout: int = -1
    ) -> Any:
        of = _of_object(group)
        if of is None or not _fits(x, out, of.group.size(), 1) or not _chosen(of, _ALLGATHER_BASE, _flat(x)):
            return original(keys, out, x, group, async_op, timeout)
        return out, _run.start(of, lambda: _run.gather(of, x, out), [out], (x, out), async_op)

    return kernel


def _reduce_scatter_base(original: Kernel) -> Kernel:
    def kernel(
        keys: Any, out: torch.Tensor, x: torch.Tensor, group: Any, op: Any, async_op: bool = True, timeout: int = -1
    ) -> Any:
        of = _of_object(group)
        if of is None or not _fits(x, out, 1, of.group.size()):
            return original(keys, out, x, group, op, async_op, timeout)
        reduction = _REDUCTIONS.get(op.op(), "")
        if not _chosen(of, _REDUCE_SCATTER_BASE.get(reduction), _flat(x)):
            return original(keys, out, x, group, op, async_op, timeout)
        return out, _run.start(of, lambda: _run.scatter(of, x, reduction, out), [out], (x, out), async_op)

    return kernel


def _alltoall_base(original: Kernel) -> Kernel:
    def kernel(
        keys: Any,
        out: torch.Tensor,
        x: torch.Tensor,
        group: Any,
        receive: Sequence[int],
        send: Sequence[int],
        async_op: bool = True,
        timeout: int = -1,
    ) -> Any:
        of = _of_object(group)
        if of is None or x.dim() == 0 or out.dtype != x.dtype or out.device != x.device:
            return original(keys, out, x, group, receive, send, async_op, timeout)
        if receive or send:
            # Split sizes that are equal here need not be so on other ranks: only their presence is common to all.
            if not _chosen(of, _ALLTOALL_ROWS, _row(x)):
                return original(keys, out, x, group, receive, send, async_op, timeout)
            sizes = _splits(send, x, of), _splits(receive, out, of)
            return _run.start(of, lambda: _run.to_all_rows(of, x, out, *sizes), [out], (x, out), async_op)
        if not _fits(x, out, 1, 1) or x.shape[0] % of.group.size():
            return original(keys, out, x, group, receive, send, async_op, timeout)
        if not _chosen(of, _ALLTOALL_BASE, _flat(x)):
            return original(keys, out, x, group, receive, send, async_op, timeout)
        return _run.start(of, lambda: _run.to_all(of, x, out), [out], (x, out), async_op)

    return kernel


def _row(x: torch.Tensor) -> torch.Tensor:
    """One row of `x`: ranks have different numbers of them, so that is what all choose by."""
    if x.layout is not torch.strided:
        return x
    return x.detach()[:1] if x.shape[0] else x.detach().new_empty((1, *x.shape[1:]))


def _splits(splits: Sequence[int], x: torch.Tensor, of: RoutedGroup) -> list[int]:
    """Split sizes, equal ones where the caller gave none for this side."""
    size = of.group.size()
    return list(splits) or [x.shape[0] // size] * size


def _all_reduce(original: Kernel) -> Kernel:
    def kernel(keys: Any, x: torch.Tensor, reduction: str, group: Any) -> torch.Tensor:
        of, reduction_name = _of_name(group), reduction.lower()
        if of is None or not _chosen(of, _REDUCE.get(reduction_name), x):
            return original(keys, x, reduction, group)  # type: ignore[no-any-return]
        return _inside(_run.reduce, of, x, reduction_name, None)

    return kernel


def _all_reduce_in_place(original: Kernel) -> Kernel:
    def kernel(keys: Any, x: torch.Tensor, reduction: str, group: Any) -> torch.Tensor:
        of, reduction_name = _of_name(group), reduction.lower()
        if of is None or not _chosen(of, _REDUCE_IN_PLACE.get(reduction_name), x):
            return original(keys, x, reduction, group)  # type: ignore[no-any-return]
        _inside(_run.reduce, of, x, reduction_name, x)
        return x

    return kernel


def _all_gather(original: Kernel) -> Kernel:
    def kernel(keys: Any, x: torch.Tensor, size: int, group: Any) -> torch.Tensor:
        of = _of_name(group)
        if of is None or size != of.group.size() or x.dim() == 0 or not _chosen(of, _GATHER, x):
            return original(keys, x, size, group)  # type: ignore[no-any-return]
        return _inside(_run.gather, of, x, None)

    return kernel


def _all_gather_out(original: Kernel) -> Kernel:
    def kernel(keys: Any, x: torch.Tensor, size: int, group: Any, *, out: torch.Tensor) -> torch.Tensor:
        of = _of_name(group)
        if of is None or not _fits(x, out, of.group.size(), 1) or not _chosen(of, _GATHER_OUT, _flat(x)):
            return original(keys, x, size, group, out=out)  # type: ignore[no-any-return]
        return _inside(_run.gather, of, x, out)

    return kernel


def _reduce_scatter(original: Kernel) -> Kernel:
    def kernel(keys: Any, x: torch.Tensor, reduction: str, size: int, group: Any) -> torch.Tensor:
        of, reduction_name = _of_name(group), reduction.lower()
        if of is None or size != of.group.size() or not _chosen(of, _SCATTER.get(reduction_name), x):
            return original(keys, x, reduction, size, group)  # type: ignore[no-any-return]
        return _inside(_run.scatter, of, x, reduction_name, None)

    return kernel


def _reduce_scatter_out(original: Kernel) -> Kernel:
    def kernel(keys: Any, x: torch.Tensor, reduction: str, size: int, group: Any, *, out: torch.Tensor) -> torch.Tensor:
        of, reduction_name = _of_name(group), reduction.lower()
        fits = of is not None and _fits(x, out, 1, of.group.size())
        if of is None or not fits or not _chosen(of, _SCATTER_OUT.get(reduction_name), _flat(x)):
            return original(keys, x, reduction, size, group, out=out)  # type: ignore[no-any-return]
        return _inside(_run.scatter, of, x, reduction_name, out)

    return kernel


def _all_to_all(original: Kernel) -> Kernel:
    def kernel(keys: Any, x: torch.Tensor, receive: Sequence[int], send: Sequence[int], group: Any) -> torch.Tensor:
        of = _of_name(group)
        if of is None or x.dim() == 0 or not _chosen(of, _TO_ALL_ROWS, _row(x)):
            return original(keys, x, receive, send, group)  # type: ignore[no-any-return]
        return _inside(_run.to_all_rows, of, x, None, list(send), list(receive))

    return kernel


def _inside(run: Callable[..., torch.Tensor], *arguments: Any) -> torch.Tensor:
    """A served call on the current stream; nothing is left to wait for, and waiting for it is allowed."""
    own.yes = True
    try:
        return run(*arguments)
    finally:
        own.yes = False


_MAKERS: dict[tuple[str, str], Callable[[Kernel], Kernel]] = {
    ("c10d", "allreduce_"): _allreduce,
    ("c10d", "_allgather_base_"): _allgather_base,
    ("c10d", "_reduce_scatter_base_"): _reduce_scatter_base,
    ("c10d", "alltoall_base_"): _alltoall_base,
    ("_c10d_functional", "all_reduce"): _all_reduce,
    ("_c10d_functional", "all_reduce_"): _all_reduce_in_place,
    ("_c10d_functional", "all_gather_into_tensor"): _all_gather,
    ("_c10d_functional", "all_gather_into_tensor_out"): _all_gather_out,
    ("_c10d_functional", "reduce_scatter_tensor"): _reduce_scatter,
    ("_c10d_functional", "reduce_scatter_tensor_out"): _reduce_scatter_out,
    ("_c10d_functional", "all_to_all_single"): _all_to_all,
}


def _passed_on(namespace: str, name: str) -> Kernel:
    """What the dispatcher would have called; it runs without the interpreter's lock, as it does for any other caller.

    A kernel that is called by `torch.library.get_kernel` keeps that lock. Then a group waits for its worker's lock,
    while the worker waits for the interpreter's to let go of a tensor: both for ever.
    """
    redispatch, below = getattr(getattr(torch.ops, namespace), name).default.redispatch, _BELOW
    return lambda keys, *arguments, **named: redispatch(keys & below, *arguments, **named)


def _on_devices(kernel: Kernel, original: Kernel, device_keys: frozenset[str]) -> Kernel:
    """`kernel` for tensors of some devices only; shapes that compilers try are not, which are meta as well."""
    wanted, meta = [getattr(torch._C.DispatchKey, key) for key in sorted(device_keys)], torch._C.DispatchKey.Meta

    def run(keys: Any, *given: Any, **named: Any) -> Any:
        served = not keys.has(meta) and any(map(keys.has, wanted))
        return (kernel if served else original)(keys, *given, **named)

    return run


def make_kernels(device_keys: frozenset[str]) -> dict[tuple[str, str], Kernel]:
    """Operator to the kernel that is to stand above those of these devices, under `KEY`."""
    found = {}
    for (namespace, name), make in _MAKERS.items():
        original = _passed_on(namespace, name)
        found[namespace, name] = _on_devices(make(original), original, device_keys)
    return found
