"""Symmetric memory of GPUs: PyTorch's where NVLink multicast can be mapped, else the library's own (`symm.mapped`).

PyTorch numbers the steps of its rendezvous by a counter of the process and not of the group, and puts that number into
the keys under which the ranks meet. Ranks that have met in different numbers of groups before would wait for each other
under different keys, for ever. So every group gets a store here that numbers the steps anew.
"""

from __future__ import annotations

import re
import uuid
import weakref
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem
from torch._C._distributed_c10d import ProcessGroup, _register_process_group, _SymmetricMemory
from torch.distributed.distributed_c10d import PrefixStore, Store, _get_process_group_store

from tunedcomm.errors import WorkspaceError
from tunedcomm.symm import mapped
from tunedcomm.symm.buffer import SymmetricBuffer, by_reason
from tunedcomm.symm.exchange import exchange
from tunedcomm.symm.mapped import Driver, MappedMemory, attempt, views_of

_STEP = re.compile(r"(.*)/(\d+)/(\d+)")


class GroupStore(Store):
    """A group's store that numbers the steps of an exchange from 0 on, whichever numbers ranks give them.

    A key `PREFIX/STEP/RANK` gets the place of STEP among the steps of PREFIX that came before; other keys stay.
    """

    def __init__(self, store: Store) -> None:
        super().__init__()
        self._store = store
        self._places: dict[str, dict[str, int]] = {}

    def _key(self, key: str) -> str:
        found = _STEP.fullmatch(key)
        if found is None:
            return key
        places = self._places.setdefault(found[1], {})
        return f"{found[1]}/{places.setdefault(found[2], len(places))}/{found[3]}"

    def set(self, key: str, value: str) -> None:
        self._store.set(self._key(key), value)

    def get(self, key: str) -> bytes:
        value: bytes = self._store.get(self._key(key))
        return value

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return [self.get(key) for key in keys]

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        limit = () if timeout is None else (timeout,)
        self._store.wait([self._key(key) for key in keys], *limit)


def _meeting(group: dist.ProcessGroup) -> str:
    """Name under which a group meets for tunedcomm's buffers, the same on every rank; registered with PyTorch."""
    if group not in _meetings:
        # Names of groups come again when everything was destroyed and made anew.
        again = sum(name.startswith(f"{group.group_name}/") for name in _names)
        name = f"{group.group_name}/tunedcomm-{again}"
        # A prefix that never was: the store may hold what a group of the same name left.
        prefix = f"tunedcomm/symmetric-memory/{exchange(group, uuid.uuid4().hex)[0]}"
        store = GroupStore(PrefixStore(prefix, _get_process_group_store(group)))
        rank, world_size = dist.get_rank(group), dist.get_world_size(group)
        # A group without backends: only rank, size and store are asked of it.
        made = ProcessGroup(store, rank, world_size)
        _meetings[group] = name, made, store  # PyTorch does not keep the objects alive itself
        _names.append(name)
        _register_process_group(name, made)  # type: ignore[arg-type]
        _SymmetricMemory.set_group_info(name, rank, world_size, store)  # where older versions look
    return _meetings[group][0]


_meetings: weakref.WeakKeyDictionary[dist.ProcessGroup, tuple[str, ProcessGroup, GroupStore]] = (
    weakref.WeakKeyDictionary()
)
_names: list[str] = []


def map_tensor(tensor: torch.Tensor, group: dist.ProcessGroup) -> SymmetricBuffer:
    """Exchange the addresses of a tensor allocated with `symm_mem.empty`; collective over the group.

    Raises:
        WorkspaceError: on every rank, if a tensor was not allocated as symmetric memory or cannot be mapped.
    """
    driver = Driver(tensor.device)
    return _rendezvous(tensor, group) if _has_multicast(group, driver) else mapped.map_tensor(tensor, group, driver)


def _has_multicast(group: dist.ProcessGroup, driver: Driver) -> bool:
    """True if PyTorch shall make a group's memory: it maps multicast, and takes ranks whose GPUs have other numbers."""
    views = views_of(group, driver)
    return all(view.multicast for view in views) and len({view.index for view in views}) == len(views)


def _rendezvous(tensor: torch.Tensor, group: dist.ProcessGroup) -> SymmetricBuffer:
    """`map_tensor` by PyTorch."""
    try:
        handle = _SymmetricMemory.rendezvous(tensor, _meeting(group))
    except RuntimeError as error:
        raise WorkspaceError(f"PyTorch's symmetric memory could not map the tensor for this group: {error}") from error
    offset = int(getattr(handle, "offset", 0))  # newer PyTorch packs several tensors into one allocation
    return SymmetricBuffer(
        local=tensor.view(torch.uint8).view(-1),
        addresses=tuple(int(address) + offset for address in handle.buffer_ptrs),
        rank=int(handle.rank),
        multicast_address=int(handle.multicast_ptr) + offset if handle.multicast_ptr else 0,
        owner=(tensor, handle),
    )


def allocate(group: dist.ProcessGroup, device: torch.device, nbytes: int, *, first: int | None) -> SymmetricBuffer:
    """See `tunedcomm.symm.workspace.allocate`."""
    driver = Driver(device)
    if _has_multicast(group, driver):
        return _allocate_by_rendezvous(group, device, nbytes)
    memory = MappedMemory(group, driver, nbytes)
    memory.back([(0, nbytes if first is None else first)])
    return memory.buffer()


def _allocate_by_rendezvous(group: dist.ProcessGroup, device: torch.device, nbytes: int) -> SymmetricBuffer:
    tensor, failure = attempt(lambda: symm_mem.empty(nbytes, dtype=torch.uint8, device=device).zero_())
    # Before the addresses are exchanged: the others would wait there for a rank that has none.
    if failed := by_reason(exchange(group, failure)):
        raise WorkspaceError(
            f"{nbytes} bytes of symmetric memory could not be allocated on {device} ({failed}); "
            "lower TUNEDCOMM_WORKSPACE_MIB or free device memory"
        )
    torch.cuda.synchronize(device)  # no peer may write before the zeros are there
    buffer = _rendezvous(tensor, group)
    if buffer.addresses[buffer.rank] != tensor.data_ptr():
        raise WorkspaceError(
            f"symmetric memory maps this rank's buffer at {buffer.addresses[buffer.rank]:#x}, but it lies at "
            f"{tensor.data_ptr():#x}; this PyTorch ({torch.__version__}) lays it out in a way that is not supported"
        )
    return buffer
