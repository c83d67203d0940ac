"""The table of groups: each group's communicator, made at its first call, and how it ends.

A group's communicators are found by group and kind of device. A group whose set-up was cut short is remembered, so that
its next call says so. All of them go before the interpreter does, and a forked child has none.
"""

from __future__ import annotations

import atexit
import os
import sys
import weakref
from types import FunctionType
from typing import Any, TypeGuard

import torch
import torch.distributed as dist

from tunedcomm.dispatch.communicator import Communicator, current, dropped_at_exit, on_forget, on_release
from tunedcomm.errors import GroupAbortedError, GroupError, NotInitializedError, PeerTimeoutError
from tunedcomm.state import clean_thread
from tunedcomm.symm.exchange import leave, left_by


def _is_member(group: object) -> TypeGuard[dist.ProcessGroup]:
    try:
        return isinstance(group, dist.ProcessGroup) and dist.get_rank(group) >= 0
    except ValueError:  # torch does not know the group, or knows it without this rank
        return False


def _serves(group: dist.ProcessGroup, device: torch.device) -> bool:
    """True if the group has a backend for tensors on this kind of device."""
    try:
        return group._get_backend(torch.device(device.type)) is not None
    except RuntimeError:
        return False


def is_dry_run(group: object) -> bool:
    """True if the group (None: the default group) has PyTorch's backend for dry runs."""
    resolved = dist.group.WORLD if group is None else group
    return _is_member(resolved) and dist.get_backend(resolved) == "fake"


_communicators: dict[tuple[dist.ProcessGroup, str], Communicator] = {}
_ended: dict[tuple[dist.ProcessGroup, str], str] = {}  # why the set-up of a group was cut short


def get_communicator(group: dist.ProcessGroup | None = None, device: torch.device | None = None) -> Communicator:
    """The communicator of a group (None: the default group), made at the first call; collective then.

    Args:
        device: where the tensors live; by default the GPU that the group was given (`device_id`), else the current CUDA
            device, or the CPU where there is none.

    Raises:
        NotInitializedError: torch.distributed is not initialised.
        GroupError: the caller is not a member, the group has no backend for the device, or there is no GPU.
    """
    if not dist.is_available() or not dist.is_initialized():
        raise NotInitializedError(
            "torch.distributed has no default process group; start the program with torchrun and call "
            "torch.distributed.init_process_group() first"
        )
    resolved = dist.group.WORLD if group is None else group
    if not isinstance(resolved, dist.ProcessGroup) and resolved != dist.GroupMember.NON_GROUP_MEMBER:
        raise GroupError(
            f"group is a {type(resolved).__name__}; pass a process group: mesh.get_group(), new_group(ranks), or None"
        )
    if resolved in _groups_of_parent:
        raise GroupError(
            "the process group was made before this process was forked, and this process is not one of its ranks; "
            "start ranks with torchrun or the start method 'spawn', or make a group of this process's own"
        )
    if not _is_member(resolved):
        raise GroupError(
            f"rank {dist.get_rank()} is not a member of the group {group!r}, or the group was destroyed; only the "
            "ranks that were given to torch.distributed.new_group() may call on it"
        )
    if device is not None and device.type == "cuda" and not torch.cuda.is_available():
        raise GroupError(f"device={str(device)!r}, but PyTorch finds no GPU here; leave the device out for CPU tensors")
    if device is None or device == torch.device("cuda"):
        device = _usual_device(resolved)
    key = (resolved, device.type)
    found = _communicators.get(key)
    if found is None:
        if is_dry_run(resolved):
            raise GroupError(
                "the group's backend is 'fake', PyTorch's for dry runs; call torch.distributed, also inside of "
                "tunedcomm.intercept(), or make the group with gloo or nccl"
            )
        if key in _ended:
            raise GroupAbortedError(_ended[key])
        if not _serves(resolved, device):
            raise GroupError(
                f"the group's backend {dist.get_backend(resolved)!r} has nothing for {device.type} tensors; move the "
                "tensor, or make the group with backend 'nccl' for CUDA or 'gloo' for CPU tensors"
            )
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise NotInitializedError(
                "a group's first call cannot be captured: call tunedcomm once outside the graph first (a warm-up run)"
            )
        _drop_destroyed()
        found = Communicator.__new__(Communicator)
        try:
            with clean_thread(), current(device):
                Communicator.__init__(found, resolved, device)
            _communicators[key] = found
        except BaseException as error:
            if getattr(error, "ends_group", True):
                _end(key, "the set-up", error, found if hasattr(found, "control") else None)
            raise
        # Only torch's table of groups keeps this object, which ends with the group's place there.
        if (known := dist.distributed_c10d._world.pg_map.get(resolved)) is not None:
            weakref.finalize(known[1], _leave_table, weakref.ref(resolved)).atexit = False
    return found


def _usual_device(group: dist.ProcessGroup) -> torch.device:
    """Where a group's tensors live if nobody says: what the group was given, whichever device is current."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return getattr(group, "bound_device_id", None) or torch.device("cuda", torch.cuda.current_device())


def _leave_table(reference: weakref.ref[dist.ProcessGroup]) -> None:
    """Ask again which groups there are, after one was destroyed, and free its memory."""
    for callback in on_forget:
        callback()
    _drop_destroyed(reference())


def _drop_destroyed(ended: dist.ProcessGroup | None = None) -> None:
    """Free the memory of groups that were destroyed, such as `ended`, unless graphs may still use it."""
    for key, communicator in list(_communicators.items()):
        if (key[0] is ended or not _is_member(key[0])) and not communicator._captured:
            if communicator.device.type == "cuda":
                torch.cuda.synchronize(communicator.device)
            communicator.release(for_graphs=False)
            del _communicators[key]


def end_group(group: dist.ProcessGroup, kind: str, what: str, error: BaseException) -> None:
    """End a group on every rank, for `error` ended the call `what` of tensors on `cuda` or `cpu` midway here."""
    if (group, kind) not in _ended:
        _end((group, kind), what, error, _communicators.get((group, kind)))


def _end(key: tuple[dist.ProcessGroup, str], what: str, error: BaseException, found: Communicator | None) -> None:
    """End a group that has a communicator, or part of one that was being made, or none."""
    if key not in _communicators:
        is_timeout = isinstance(error, PeerTimeoutError)
        _ended[key] = str(error) if is_timeout else f"rank {dist.get_rank(key[0])} {left_by(what, error)}"
        leave(key[0], error)
    if found is not None:
        found.abandon(what, error)


def live_communicators() -> list[Communicator]:
    """Every communicator made so far."""
    return list(_communicators.values())


def release_communicator(group: dist.ProcessGroup | None = None) -> None:
    """Forget a group's communicators, so that the group's next call, made by all ranks, sets them up anew.

    That is the way back after `GroupAbortedError` or `PeerTimeoutError`, to be gone by every rank of the group. It is
    local: it waits for this rank's GPU, but for no peer. Other groups stay as they are, and what graphs captured keeps
    its memory. A group that has none is left alone.

    Args:
        group: process group, by default the default group.
    """
    resolved = dist.group.WORLD if group is None else group
    for key in [key for key in (*_communicators, *_ended) if key[0] is resolved]:
        _ended.pop(key, None)
        if (communicator := _communicators.pop(key, None)) is not None:
            if communicator.device.type == "cuda":
                torch.cuda.synchronize(communicator.device)
            communicator.queue.join()
            communicator.release(for_graphs=True)
    for callback in (*on_forget, *on_release):
        callback()


def release_communicators() -> None:
    """Forget every communicator, so that the next call makes it anew from settings and databases.

    Also to be called before `torch.distributed.destroy_process_group()` if groups are made again in the process. Wait
    for the GPU before it, and replay no graph that was captured with one afterwards: their memory is given back.
    """
    for communicator in _communicators.values():
        communicator.queue.join()
        communicator.release(for_graphs=False)
    _communicators.clear()
    _ended.clear()
    for callback in (*on_forget, *on_release):
        callback()


def _disown() -> None:
    """Leave the parent's groups to the parent, in a forked child: its copies of their memory are the parent's."""
    _kept_for_parent.append(dict(_communicators))  # what they would give back at their end is not this process's
    _groups_of_parent.update(getattr(dist.distributed_c10d._world, "pg_map", ()) if dist.is_available() else ())
    _communicators.clear()
    dropped_at_exit.clear()  # a group's end waits for threads, which a child does not have
    for callback in on_forget:
        callback()


_groups_of_parent: set[dist.ProcessGroup] = set()
_kept_for_parent: list[dict[Any, Communicator]] = []
os.register_at_fork(after_in_child=_disown)


def _let_go_of_groups() -> None:
    for communicator in _communicators.values():
        communicator.control.end()
    release_communicators()
    for holder, names in list(dropped_at_exit.items()):
        for name in names:
            vars(holder).pop(name, None)
    # PyTorch holds the default group itself where this module was first imported after the group was made, which ours
    # do by way of Dynamo: its functions have `group=group.WORLD` for a default. None is what an earlier import has.
    for function in vars(sys.modules.get("torch.distributed.nn.functional", object)).values():
        defaults = getattr(function, "__defaults__", None)
        if isinstance(function, FunctionType) and defaults:
            function.__defaults__ = tuple(None if isinstance(one, dist.ProcessGroup) else one for one in defaults)


atexit.register(_let_go_of_groups)
