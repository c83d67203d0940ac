"""`tunedcomm.intercept`, `install` and `uninstall`: unmodified models, served by the dispatcher.

    with tunedcomm.intercept(mesh.get_group()) as calls:
        model(x)                      # torch.distributed, functional collectives, DTensor's tensor parallel plans
    print(calls)                      # which calls were served, by what, how often; which were not, and why

**The mechanism.** Every collective of PyTorch ends in an operator of the dispatcher: `torch.distributed.all_reduce` in
`c10d::allreduce_`, a functional collective, and so DTensor, its autograd formula and compiled code, in
`_c10d_functional::*`. Kernels for these operators are registered with `torch.library` while at least one group is
intercepted, under the dispatch key that comes right before those of devices, `BackendSelect`. They look the group up,
and redispatch the arguments as they came to the device's kernel wherever the dispatcher would run the library, or the
group is another one. What was weighed against it:

- Kernels in the devices' place would have to call the ones that were there before (`torch.library.get_kernel`), which
  keeps the interpreter's lock: a gloo group then waits for its worker and its worker for that lock, for ever.
- `TorchDispatchMode` would see the same operators, but every other operator of the model, too, at several microseconds
  each, and neither the autograd engine's threads nor compiled code run under the mode of the thread that entered it.
- `TorchFunctionMode` sees functions that take part in `__torch_function__`; `torch.distributed`'s do not.
- A backend by `Backend.register_backend` serves groups that are made with it, not those that a model already has,
  cannot be left at the end of a block, and has to forward every method of NCCL's, public or not.
- Replacing functions of `torch.distributed` misses who imported them earlier, DDP's reducer, which is C++, and compiled
  code.

**What follows from it.** Other operators are not touched: a call of one costs the same as before. Registration is for
the process: autograd's threads are served, and so are other threads that call on the same group inside of the block.
No kernel of torch's is replaced, and autograd's formulas lie above ours. Compiled code calls the operators and is
served if it runs inside of the block, whenever it was compiled.

**Streams.** A served call runs on the current stream. With `async_op=True` it runs on a stream of the group's own, and
the work's `wait()` makes the current stream wait for it, as the library's does. A functional collective is always
asynchronous in name; those served run on the current stream, for a tensor parallel model uses the result at once.

**Ranks.** All ranks of a group enter and leave together, for a call must be served everywhere or nowhere, and making
the group's communicator is collective.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from tunedcomm.dispatch.communicator import get_communicator
from tunedcomm.errors import NotInitializedError, UnsupportedInputError, UnsupportedVersionError
from tunedcomm.integrations import _operators
from tunedcomm.integrations._routed import RoutedCall, RoutedGroup
from tunedcomm.integrations.torch_version import check_torch
from tunedcomm.kernels.common.own import intercepted

__all__ = ["Interception", "RoutedCall", "install", "intercept", "uninstall"]

_INSTEAD = "call tunedcomm.all_reduce and its like directly"
_lock = threading.RLock()
_libraries: list[Any] = []
_device_keys: set[str] = set()
_installed: list[tuple[RoutedGroup, ...]] = []


class Interception:
    """What became of the calls on some groups since the block was entered; may be read in it and after it."""

    def __init__(self, groups: tuple[RoutedGroup, ...]) -> None:
        self._groups = groups
        self._before = {id(group): group.counts() for group in groups}
        self._after: dict[RoutedCall, int] | None = None

    def calls(self) -> dict[RoutedCall, int]:
        """Kinds of calls, in the order in which they were first met, to how often they were made."""
        if self._after is not None:
            return dict(self._after)
        found: dict[RoutedCall, int] = {}
        for group in self._groups:
            before = self._before[id(group)]
            for told, count in group.counts().items():
                if count > before.get(told, 0):
                    found[told] = count - before.get(told, 0)
        return found

    @property
    def num_served(self) -> int:
        """Calls that kernels served."""
        return sum(count for told, count in self.calls().items() if told.served_by)

    @property
    def num_passed_on(self) -> int:
        """Calls that went to the library."""
        return sum(count for told, count in self.calls().items() if not told.served_by)

    def _freeze(self) -> None:
        self._after = self.calls()

    def __str__(self) -> str:
        return "\n".join(f"{count} x {told}" for told, count in self.calls().items()) or "no calls"


def _register() -> None:
    """Put the kernels in place for the kinds of devices that intercepted groups work on."""
    wanted = {group.device.type.upper() for group in _operators.by_group.values()}
    if wanted == _device_keys:
        return
    _unregister()
    made = _operators.make_kernels(frozenset(wanted))
    make: Any = torch.library.Library  # untyped
    libraries = {namespace: make(namespace, "IMPL") for namespace, _ in made}
    for (namespace, name), kernel in made.items():
        libraries[namespace].impl(name, kernel, _operators.KEY, with_keyset=True)
    _libraries.extend(libraries.values())
    intercepted.append(True)
    _device_keys.update(wanted)


def _unregister() -> None:
    """A library that is dropped takes its kernels out again."""
    _libraries.clear()
    intercepted.clear()
    _device_keys.clear()


def _check() -> None:
    check_torch("tunedcomm.intercept()", _operators.OPERATORS, _INSTEAD)
    for owner, name in (
        (torch.ops.c10d.allreduce_.default, "redispatch"),
        (torch._C, "_dispatch_keyset_full_after"),
        (dist.ProcessGroup, "unbox"),
        (dist.distributed_c10d._world, "pg_names"),
        (torch._C._distributed_c10d, "_create_work_from_future"),
    ):
        if not hasattr(owner, name):
            raise UnsupportedVersionError(
                f"tunedcomm.intercept() needs {name}, which this build of torch {torch.__version__} lacks; install a "
                f"release of torch, or {_INSTEAD}"
            )


def _enter(groups: tuple[dist.ProcessGroup | None, ...], max_count: int | None) -> tuple[RoutedGroup, ...]:
    """Intercept groups once more, collectively over each of them."""
    _check()
    if max_count is not None and (not isinstance(max_count, int) or isinstance(max_count, bool) or max_count < 0):
        raise UnsupportedInputError(f"max_count={max_count!r} is no number of rows; pass an integer from 0 on, or None")
    if not dist.is_available() or not dist.is_initialized():
        raise NotInitializedError(
            "torch.distributed has no default process group; call torch.distributed.init_process_group() first"
        )
    resolved = [dist.group.WORLD if group is None else group for group in groups or (None,)]
    # Collective, and refuses what is no group of this rank's.
    devices = [get_communicator(group).device for group in resolved]
    with _lock:
        for gone in [each for each in _operators.by_group.values() if not _operators.is_live(each.group)]:
            _operators.drop(gone)
        held: list[RoutedGroup] = []
        for group, device in zip(resolved, devices, strict=True):
            assert group is not None
            routed = _operators.by_group.get(group) or RoutedGroup(group, device, max_count)
            if routed.max_count != max_count:
                raise UnsupportedInputError(
                    f"the group is intercepted with max_count={routed.max_count} already; pass the same"
                )
            held.append(routed)
        for routed in held:
            routed.depth += 1
            _operators.by_group[routed.group] = _operators.by_name[routed.group.group_name] = routed
        try:
            _register()
        except BaseException:
            _leave(tuple(held))
            raise
    return tuple(held)


def _leave(groups: tuple[RoutedGroup, ...]) -> None:
    """Take back one `_enter`; other holders of a group keep it."""
    with _lock:
        for routed in groups:
            routed.depth -= 1
            if routed.depth == 0:
                _operators.drop(routed)
                routed.forget()
        if not _operators.by_group:
            _unregister()


@contextlib.contextmanager
def intercept(*groups: dist.ProcessGroup | None, max_count: int | None = None) -> Iterator[Interception]:
    """Serve PyTorch's collectives on `groups` by tunedcomm inside the `with` block, with no line of the model changed.

    Served where the dispatcher chooses a kernel: `torch.distributed`'s `all_reduce`, `all_gather_into_tensor`,
    `reduce_scatter_tensor` and `all_to_all_single`, also with `async_op=True`; the functional collectives of these and
    what is made of them: their autograd forms, DTensor's redistributions, tensor parallel plans, compiled code. All
    else, such as list forms, coalesced forms and other dtypes or reductions, goes to the library untouched.

    Args:
        groups: process groups that this rank belongs to; none, or None, for the default group. On all ranks of a group
            alike: entering is collective over each one whose first call this is. Blocks may be nested.
        max_count: rows at most that any rank sends any rank by `all_to_all_single` with split sizes, the same on every
            rank; see `all_to_all_v`. Without it such calls are the library's: ranks do not know each other's sizes and
            must choose alike. Functional all_to_all always has split sizes.

    Yields:
        Which calls were served and by what, which were not and why.

    Raises:
        NotInitializedError: no default process group.
        GroupError: not a member of a group, or it has no backend for this device.
        UnsupportedInputError: `max_count` is no number of rows, or not the one of a block around this.
        UnsupportedVersionError: a torch that this is not known to work with (2.11 to 2.13 are).

    Results equal the library's within the tolerance of the variants: `ordered` ones sum in fp32 in rank order.
    """
    held = _enter(groups, max_count)
    try:
        interception = Interception(held)
        try:
            yield interception
        finally:
            interception._freeze()
    finally:
        _leave(held)


def install(*groups: dist.ProcessGroup | None, max_count: int | None = None) -> Interception:
    """`intercept` from here on, until `uninstall()` or the end of the process; arguments and errors are the same."""
    held = _enter(groups, max_count)
    _installed.append(held)
    return Interception(held)


def uninstall() -> None:
    """Take back every `install()`; blocks of `intercept` that are open stay as they are."""
    while _installed:
        _leave(_installed.pop())
