"""Symmetric memory of GPUs that the library makes itself, by the driver's virtual memory management.

Each rank makes memory, exports it as a file descriptor (a fabric handle where the driver has no descriptors), and maps
what the others exported next to its own. Nothing here depends on how a process numbers its GPUs, so ranks may each see
one GPU, or list them in different orders.

The addresses of a whole allocation are reserved at once, and ranges of it are backed by memory as they are needed
(`MappedMemory.back`). Addresses never change, so plans and graphs stay as they are when a range is backed.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from tunedcomm.errors import WorkspaceError
from tunedcomm.hardware import has_multicast, ranks_may_share_a_gpu
from tunedcomm.symm.buffer import SymmetricBuffer, by_reason, send_descriptors
from tunedcomm.symm.exchange import exchange, set_up

DESCRIPTOR, FABRIC = 1, 8  # CUmemAllocationHandleType
_HAS_DESCRIPTORS, _HAS_RDMA, _HAS_FABRIC = 103, 110, 128  # CUdevice_attribute
_PINNED, _ON_DEVICE, _READ_WRITE, _RECOMMENDED = 1, 1, 3, 1
_FABRIC_BYTES = 64
_CURE = "lower TUNEDCOMM_WORKSPACE_MIB, or free device memory"


class _Location(ctypes.Structure):
    """CUmemLocation."""

    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _Properties(ctypes.Structure):
    """CUmemAllocationProp, 32 bytes."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location", _Location),
        ("win32_metadata", ctypes.c_void_p),
        ("compression", ctypes.c_ubyte),
        ("rdma", ctypes.c_ubyte),
        ("usage", ctypes.c_ushort),
        ("reserved", ctypes.c_ubyte * 4),
    )


class _Access(ctypes.Structure):
    """CUmemAccessDesc, 12 bytes."""

    _fields_ = (("location", _Location), ("flags", ctypes.c_int))


@functools.cache
def _library() -> Any:
    """The driver, with the argument types of the functions called here."""
    library = ctypes.CDLL("libcuda.so.1")
    size, address, handle, flags = ctypes.c_size_t, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_ulonglong
    to, integer, anything = ctypes.POINTER, ctypes.c_int, ctypes.c_void_p
    library.cuDeviceGet.argtypes = [to(integer), integer]
    library.cuDeviceGetAttribute.argtypes = [to(integer), integer, integer]
    library.cuMemGetAllocationGranularity.argtypes = [to(size), to(_Properties), integer]
    library.cuMemGetAllocationPropertiesFromHandle.argtypes = [to(_Properties), handle]
    library.cuMemCreate.argtypes = [to(handle), size, to(_Properties), flags]
    library.cuMemRelease.argtypes = [handle]
    library.cuMemAddressReserve.argtypes = [to(address), size, size, address, flags]
    library.cuMemAddressFree.argtypes = [address, size]
    library.cuMemMap.argtypes = [address, size, size, handle, flags]
    library.cuMemUnmap.argtypes = [address, size]
    library.cuMemSetAccess.argtypes = [address, size, to(_Access), size]
    library.cuMemExportToShareableHandle.argtypes = [anything, handle, integer, flags]
    library.cuMemImportFromShareableHandle.argtypes = [to(handle), anything, integer]
    library.cuMemRetainAllocationHandle.argtypes = [to(handle), anything]
    library.cuMemGetAddressRange_v2.argtypes = [to(address), to(size), address]
    library.cuGetErrorName.argtypes = [integer, to(ctypes.c_char_p)]
    return library


class DriverError(Exception):
    """The driver refused a call."""


class Driver:
    """The driver's functions for memory of one GPU; raises DriverError where one of them fails."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._number = ctypes.c_int()
        self._call("cuDeviceGet", ctypes.byref(self._number), device.index)

    def _call(self, name: str, *arguments: Any) -> None:
        if code := getattr(_library(), name)(*arguments):
            said = ctypes.c_char_p()
            _library().cuGetErrorName(code, ctypes.byref(said))
            raise DriverError(f"{name} failed with {(said.value or b'error').decode()} ({code})")

    def _has(self, attribute: int) -> bool:
        found = ctypes.c_int()
        self._call("cuDeviceGetAttribute", ctypes.byref(found), attribute, self._number.value)
        return bool(found.value)

    def _properties(self, kind: int) -> _Properties:
        rdma = int(self._has(_HAS_RDMA))
        location = _Location(_ON_DEVICE, self._number.value)
        return _Properties(type=_PINNED, handle_types=kind, location=location, rdma=rdma)

    def current(self) -> contextlib.AbstractContextManager[object]:
        """A block in which the GPU is the current one."""
        return torch.cuda.device(self.device)

    def view(self) -> View:
        """Return the GPU as this process sees it."""
        kinds = {DESCRIPTOR: self._has(_HAS_DESCRIPTORS), FABRIC: self._has(_HAS_FABRIC)}
        return View(
            uuid=str(torch.cuda.get_device_properties(self.device).uuid),
            index=self.device.index,
            multicast=has_multicast(self.device.index),
            granules={kind: self._granule(kind) for kind, is_there in kinds.items() if is_there},
        )

    def _granule(self, kind: int) -> int:
        found, properties = ctypes.c_size_t(), self._properties(kind)
        self._call("cuMemGetAllocationGranularity", ctypes.byref(found), ctypes.byref(properties), _RECOMMENDED)
        return found.value

    def reserve(self, nbytes: int) -> int:
        """Addresses without memory."""
        found = ctypes.c_uint64()
        self._call("cuMemAddressReserve", ctypes.byref(found), nbytes, 0, 0, 0)
        return found.value

    def free(self, address: int, nbytes: int) -> None:
        """Give addresses back."""
        self._call("cuMemAddressFree", address, nbytes)

    def create(self, nbytes: int, kind: int) -> int:
        """A handle of new memory of this GPU."""
        found, properties = ctypes.c_uint64(), self._properties(kind)
        self._call("cuMemCreate", ctypes.byref(found), nbytes, ctypes.byref(properties), 0)
        return found.value

    def release(self, handle: int) -> None:
        """Give a handle back; its memory lives as long as it is mapped anywhere."""
        self._call("cuMemRelease", handle)

    def map(self, address: int, nbytes: int, handle: int) -> None:
        """Put memory at reserved addresses."""
        self._call("cuMemMap", address, nbytes, 0, handle, 0)

    def allow(self, address: int, nbytes: int) -> None:
        """Let this GPU read and write what is mapped."""
        access = _Access(_Location(_ON_DEVICE, self._number.value), _READ_WRITE)
        self._call("cuMemSetAccess", address, nbytes, ctypes.byref(access), 1)

    def unmap(self, address: int, nbytes: int) -> None:
        """Undo `map`."""
        self._call("cuMemUnmap", address, nbytes)

    def export(self, handle: int, kind: int) -> int | bytes:
        """A descriptor, to be closed by the caller, or the bytes of a fabric handle."""
        if kind == FABRIC:
            room = ctypes.create_string_buffer(_FABRIC_BYTES)
            self._call("cuMemExportToShareableHandle", room, handle, kind, 0)
            return room.raw
        descriptor = ctypes.c_int(-1)
        self._call("cuMemExportToShareableHandle", ctypes.byref(descriptor), handle, kind, 0)
        return descriptor.value

    def take(self, shared: int | bytes) -> int:
        """A handle of what another process exported."""
        found = ctypes.c_uint64()
        if isinstance(shared, int):
            source, kind = ctypes.c_void_p(shared), DESCRIPTOR
        else:
            room = ctypes.create_string_buffer(shared, _FABRIC_BYTES)
            source, kind = ctypes.cast(room, ctypes.c_void_p), FABRIC
        self._call("cuMemImportFromShareableHandle", ctypes.byref(found), source, kind)
        return found.value

    def retain(self, address: int) -> tuple[int, int, int, int]:
        """(handle, its kind of export or 0, base address, bytes) of the allocation at an address."""
        handle, base, nbytes, properties = ctypes.c_uint64(), ctypes.c_uint64(), ctypes.c_size_t(), _Properties()
        self._call("cuMemRetainAllocationHandle", ctypes.byref(handle), address)
        try:
            self._call("cuMemGetAllocationPropertiesFromHandle", ctypes.byref(properties), handle.value)
            self._call("cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(nbytes), address)
        except DriverError:
            self.release(handle.value)
            raise
        kinds = [kind for kind in (DESCRIPTOR, FABRIC) if properties.handle_types & kind]
        return handle.value, kinds[0] if kinds else 0, base.value, nbytes.value

    def tensor(self, address: int, nbytes: int, owner: object = None) -> torch.Tensor:
        """The bytes at an address as a tensor, uint8, which keeps `owner` alive; the first of them must be mapped."""
        return torch.as_tensor(_Bytes(address, nbytes, owner), dtype=torch.uint8, device=self.device)

    def finish(self, fill: Callable[[], object]) -> None:
        """Run `fill` on a stream of its own and wait for it, and for no kernel of the program."""
        stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        with torch.cuda.stream(stream):
            fill()
        stream.synchronize()

    def quiet(self) -> None:
        """Wait until no kernel of this process uses memory that is to be given back."""
        if not torch.cuda.is_current_stream_capturing():
            torch.cuda.synchronize(self.device)


class _Bytes:
    """Memory of a GPU for `torch.as_tensor`, which keeps this object."""

    def __init__(self, address: int, nbytes: int, owner: object) -> None:
        self.__cuda_array_interface__ = {
            "shape": (nbytes,), "typestr": "|u1", "data": (address, False), "version": 3, "strides": None
        }  # fmt: skip
        self.owner = owner


@dataclass(frozen=True, slots=True)
class View:
    """A rank's GPU as its process sees it.

    Attributes:
        uuid: of the GPU.
        index: the GPU's number in the process.
        multicast: the GPU has NVLink multicast, and nobody switched it off.
        granules: kinds of handles that the driver exports, the preferred one first, to the bytes of which their
            memory is a multiple.
    """

    uuid: str
    index: int
    multicast: bool
    granules: dict[int, int]


_views: weakref.WeakKeyDictionary[dist.ProcessGroup, list[View]] = weakref.WeakKeyDictionary()


def views_of(group: dist.ProcessGroup, driver: Driver) -> list[View]:
    """Every rank's GPU as its process sees it; collective at a group's first call.

    Raises:
        WorkspaceError: on every rank, if the driver failed on any, or if ranks share a GPU.
    """
    if group not in _views:
        view, failure = attempt(driver.view)
        everyone = exchange(group, (view, failure))
        if failed := by_reason([text for _, text in everyone]):
            raise WorkspaceError(f"the ranks cannot share memory of their GPUs: {failed}")
        views: list[View] = [view for view, _ in everyone]
        by_uuid: dict[str, list[int]] = {}
        for rank, view in enumerate(views):
            by_uuid.setdefault(view.uuid, []).append(rank)
        shared = [f"ranks {', '.join(map(str, ranks))}" for ranks in by_uuid.values() if len(ranks) > 1]
        if shared and not ranks_may_share_a_gpu():
            raise WorkspaceError(f"{'; '.join(shared)} use the same GPU; give every rank a GPU of its own")
        _views[group] = views
    return _views[group]


def attempt(make: Callable[[], Any]) -> tuple[Any, str]:
    """(what was made, ""), or (None, the driver's reason)."""
    try:
        return make(), ""
    except (DriverError, OSError, RuntimeError) as error:
        return None, str(error)


def _share(
    group: dist.ProcessGroup, own: Sequence[int | bytes], kind: int, stack: contextlib.ExitStack
) -> tuple[list[Sequence[int | bytes]], str]:
    """Every rank's exported memory, by rank, and "", or the reason why some rank lacks another's; collective.

    Args:
        group: process group.
        own: what this rank exported; as many on every rank.
        kind: of that.
        stack: closes the descriptors that are received.
    """
    if kind == FABRIC:
        return exchange(group, list(own)), ""
    rank, ranks = dist.get_rank(group), range(dist.get_world_size(group))
    descriptors = [each for each in own if isinstance(each, int)]
    found, lacking = send_descriptors(group, descriptors, len(own), ranks, stack)
    if lacking:
        sender, receiver = lacking[0]
        return [], (
            f"rank {sender} reaches no socket of rank {receiver}, so it cannot hand over its memory; let them share a "
            "network namespace, or a TMPDIR"
        )
    failed = by_reason(exchange(group, found if isinstance(found, str) else ""))
    if failed or isinstance(found, str):
        return [], failed
    return [own if sender == rank else found[sender] for sender in ranks], ""


class MappedMemory:
    """Addresses of `nbytes` on every rank, ranges of which are backed by memory that all ranks map.

    Collective, as `back` is. The memory lives as long as this object; a peer's mapping keeps a peer's memory alive.

    Attributes:
        addresses: where each rank's bytes lie in this process, by rank.
        backed: offsets (start, stop) that are backed, in the order in which they came.

    Raises:
        WorkspaceError: on every rank alike.
    """

    def __init__(self, group: dist.ProcessGroup, driver: Driver, nbytes: int) -> None:
        self.group, self._driver = group, driver
        self.rank, self.world_size = dist.get_rank(group), dist.get_world_size(group)
        views = views_of(group, driver)
        common = [kind for kind in views[0].granules if all(kind in view.granules for view in views)]
        self._kind = common[0] if common else 0
        self._granule = max(view.granules[self._kind] for view in views) if common else 1
        self.backed: list[tuple[int, int]] = []
        self._mapped: list[tuple[int, int]] = []
        reserved: list[tuple[int, int]] = []
        weakref.finalize(self, _give_back, driver, self._mapped, reserved).atexit = False

        def reserve() -> None:
            if not self._kind:
                raise DriverError("the driver exports no memory")
            size = -(-nbytes // self._granule) * self._granule
            for _ in range(self.world_size):
                reserved.append((driver.reserve(size), size))

        everyone = exchange(group, (nbytes, attempt(reserve)[1]))
        if failed := by_reason([text for _, text in everyone]):
            raise WorkspaceError(f"{nbytes} bytes cannot be shared ({failed})")
        if len({size for size, _ in everyone}) > 1:
            sizes = ", ".join(str(size) for size, _ in everyone)
            raise WorkspaceError(f"the ranks asked for {sizes} bytes: the size must be the same on every rank")
        self.nbytes = nbytes
        self.addresses = tuple(address for address, _ in reserved)

    def back(self, ranges: Iterable[tuple[int, int]], fill: Callable[[torch.Tensor, int], object] | None = None) -> int:
        """Back all bytes of some ranges of offsets (start, stop); collective, never while a graph is captured.

        Args:
            ranges: the same on every rank; the first call begins at 0.
            fill: called with this rank's new bytes and their offset, for what they shall hold: zeros by default.

        Returns:
            The bytes that this rank made.

        Raises:
            WorkspaceError: on every rank alike; nothing has changed then.
        """
        missing = self._missing(ranges)
        if not missing:
            return 0
        with set_up(self.group, anew=False):
            failed = self._try_to_back(missing, fill)
        if failed:  # raised here, since an error that leaves the block ends the set-up
            raise WorkspaceError(failed)
        self.backed.extend(missing)
        return sum(stop - start for start, stop in missing)

    def _try_to_back(
        self, missing: Sequence[tuple[int, int]], fill: Callable[[torch.Tensor, int], object] | None
    ) -> str:
        """Why runs of granules could not be backed, the same on every rank; "" if they are."""
        driver, own_address = self._driver, self.addresses[self.rank]
        done: list[tuple[int, int]] = []
        exported: list[int | bytes] = []
        with driver.current(), contextlib.ExitStack() as stack:
            undo = stack.enter_context(contextlib.ExitStack())
            undo.callback(_give_back, driver, done, [])

            def make() -> None:
                for start, stop in missing:
                    handle = driver.create(stop - start, self._kind)
                    with _released(driver, handle):
                        _map(driver, own_address + start, stop - start, handle, done)
                        exported.append(_export(driver, handle, self._kind, stack))
                    piece = driver.tensor(own_address + start, stop - start)
                    driver.finish(functools.partial(fill, piece, start) if fill else piece.zero_)

            def take(everyone: Sequence[Sequence[int | bytes]]) -> None:
                for rank, pieces in enumerate(everyone):
                    for (start, stop), shared in zip(missing, pieces, strict=True):
                        if rank != self.rank:
                            handle = driver.take(shared)
                            with _released(driver, handle):
                                _map(driver, self.addresses[rank] + start, stop - start, handle, done)

            # Before the others wait for what was exported; no peer may write before this rank's bytes are filled.
            if failed := by_reason(exchange(self.group, attempt(make)[1])):
                total = sum(stop - start for start, stop in missing)
                return f"no {total} bytes of device memory to share ({failed}); {_CURE}"
            everyone, failed = _share(self.group, exported, self._kind, stack)
            if failed:
                return failed
            if failed := by_reason(exchange(self.group, attempt(lambda: take(everyone))[1])):
                return f"the memory of peers cannot be mapped ({failed}); {_CURE}"
            undo.pop_all()
        self._mapped.extend(done)
        return ""

    def _missing(self, ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
        """Return the parts of these ranges without memory, in whole granules, neighbours joined."""
        size = self._granule
        have = {granule for start, stop in self.backed for granule in range(start // size, stop // size)}
        wanted = {
            granule for start, stop in ranges if start < stop for granule in range(start // size, -(-stop // size))
        }
        runs: list[tuple[int, int]] = []
        for granule in sorted(wanted - have):
            start = granule * size
            if runs and runs[-1][1] == start:
                start, _ = runs.pop()
            runs.append((start, (granule + 1) * size))
        return runs

    def buffer(self) -> SymmetricBuffer:
        """The allocation, whose first bytes must be backed; its bytes outside of `backed` must not be touched."""
        local = self._driver.tensor(self.addresses[self.rank], self.nbytes, self)
        return SymmetricBuffer(local, self.addresses, self.rank, 0, self)


def _export(driver: Driver, handle: int, kind: int, stack: contextlib.ExitStack) -> int | bytes:
    """Export memory for peers to import; the stack closes a descriptor."""
    exported = driver.export(handle, kind)
    if isinstance(exported, int):
        stack.callback(os.close, exported)
    return exported


def _map(driver: Driver, address: int, nbytes: int, handle: int, mapped: list[tuple[int, int]]) -> None:
    """Put memory at reserved addresses, note it in `mapped`, and let this GPU use it."""
    driver.map(address, nbytes, handle)
    mapped.append((address, nbytes))
    driver.allow(address, nbytes)


@contextlib.contextmanager
def _released(driver: Driver, handle: int) -> Any:
    """A block after which a handle is given back."""
    try:
        yield
    finally:
        driver.release(handle)


def _give_back(driver: Driver, mapped: list[tuple[int, int]], reserved: list[tuple[int, int]]) -> None:
    """Undo mappings and reservations."""
    if not (mapped or reserved):
        return
    with contextlib.suppress(DriverError, RuntimeError), driver.current():  # the driver may be gone, or broken
        if mapped:
            driver.quiet()
        while mapped:
            driver.unmap(*mapped.pop())
        while reserved:
            driver.free(*reserved.pop())


def map_tensor(tensor: torch.Tensor, group: dist.ProcessGroup, driver: Driver) -> SymmetricBuffer:
    """Map every rank's tensor, whose memory its driver can export; collective.

    Raises:
        WorkspaceError: on every rank, if the memory of any rank's tensor cannot be shared.
    """
    views_of(group, driver)
    mapping = _Mapping(tensor, driver)
    with set_up(group, anew=False):
        failed = mapping.take_peers(group)
    if failed:
        raise WorkspaceError(f"the tensor is not symmetric memory of PyTorch, or cannot be mapped: {failed}")
    return SymmetricBuffer(
        tensor.view(torch.uint8).view(-1), tuple(mapping.addresses), dist.get_rank(group), 0, mapping
    )


class _Mapping:
    """A user's tensor, and the peers' that are mapped for it.

    Attributes:
        addresses: of each rank's tensor, by rank.
    """

    def __init__(self, tensor: torch.Tensor, driver: Driver) -> None:
        self.tensor, self._driver, self.addresses = tensor, driver, list[int]()
        self._mapped, self._reserved = list[tuple[int, int]](), list[tuple[int, int]]()
        weakref.finalize(self, _give_back, driver, self._mapped, self._reserved).atexit = False

    def take_peers(self, group: dist.ProcessGroup) -> str:
        """Map the peers' tensors; why that failed, the same on every rank, or ""."""
        driver, address, rank = self._driver, self.tensor.data_ptr(), dist.get_rank(group)
        exported: list[int | bytes] = []
        with driver.current(), contextlib.ExitStack() as stack:

            def export() -> tuple[int, int, int]:
                """(kind of the handle, offset of the tensor in its allocation, bytes of that)."""
                handle, kind, base, nbytes = driver.retain(address)
                with _released(driver, handle):
                    if not kind:
                        raise DriverError("its memory cannot be exported")
                    if address + self.tensor.nbytes > base + nbytes:
                        raise DriverError("it lies in several allocations")
                    exported.append(_export(driver, handle, kind, stack))
                return kind, address - base, nbytes

            def take(shared: Sequence[Sequence[int | bytes]]) -> None:
                for peer, (_, offset, nbytes) in enumerate(places):
                    if peer == rank:
                        self.addresses.append(address)
                        continue
                    base = driver.reserve(nbytes)
                    self._reserved.append((base, nbytes))
                    handle = driver.take(shared[peer][0])
                    with _released(driver, handle):
                        _map(driver, base, nbytes, handle, self._mapped)
                    self.addresses.append(base + offset)

            everyone = exchange(group, attempt(export))
            if failed := by_reason([text for _, text in everyone]):
                return failed
            places: list[tuple[int, int, int]] = [place for place, _ in everyone]
            if len({kind for kind, *_ in places}) > 1:
                return "the ranks' allocations have handles of different kinds"
            shared, failed = _share(group, exported, places[0][0], stack)
            return failed or by_reason(exchange(group, attempt(lambda: take(shared))[1]))
