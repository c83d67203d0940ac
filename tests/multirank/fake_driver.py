"""A driver whose memory is the host's: `symm.mapped` runs on it in real processes, with real descriptors and mappings.

What nobody mapped, or allowed, ends the process when it is touched, as a GPU ends a kernel. Calls that the real driver
refuses raise here, too.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import mmap
import os
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from cases import replaced

from tunedcomm.dispatch.communicator import Communicator
from tunedcomm.ops import symmetric
from tunedcomm.symm import cuda, mapped, workspace
from tunedcomm.symm.mapped import DESCRIPTOR, FABRIC, DriverError, View

_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.mmap.restype = ctypes.c_void_p
_LIBC.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_LIBC.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_LIBC.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_FIXED, _NO_RESERVE = 0x10, 0x4000


def _mmap(address: int, nbytes: int, flags: int, descriptor: int = -1) -> int:
    found = _LIBC.mmap(address or None, nbytes, 0, flags, descriptor, 0)
    assert found not in (None, ctypes.c_void_p(-1).value), os.strerror(ctypes.get_errno())
    return int(found)


class FakeDriver:
    """Stands in for `Driver`; all objects of a process share what there is.

    Attributes:
        handles: to descriptors; reserved, mapped: address to bytes.
        calls: how often each function was called.
        fails: (function, number of its call) that fails.
        kinds: of handles that memory has.
        views: changes of a rank's view of its GPU.
    """

    handles: dict[int, int] = {}  # noqa: RUF012 - of the process
    reserved: dict[int, int] = {}  # noqa: RUF012
    mapped: dict[int, tuple[int, int]] = {}  # noqa: RUF012 - address to (bytes, 0 or 1 once allowed)
    calls: Counter[str] = Counter()  # noqa: RUF012
    fails: tuple[str, int] | None = None
    kinds: tuple[int, ...] = (DESCRIPTOR, FABRIC)
    views: dict[int, dict[str, Any]] = {}  # noqa: RUF012
    _numbers = itertools.count(1)

    def __init__(self, device: torch.device) -> None:
        self.device = device

    @classmethod
    def reset(cls) -> None:
        """Forget failures and views; what there is stays."""
        cls.calls, cls.fails, cls.kinds, cls.views = Counter(), None, (DESCRIPTOR, FABRIC), {}

    @classmethod
    def left(cls) -> tuple[int, int, int]:
        """Handles, reservations and mappings of the process."""
        return len(cls.handles), len(cls.reserved), len(cls.mapped)

    def _count(self, name: str) -> None:
        FakeDriver.calls[name] += 1
        if FakeDriver.fails == (name, FakeDriver.calls[name]):
            raise DriverError(f"planted: {name} failed with CUDA_ERROR_OUT_OF_MEMORY (2)")

    def current(self) -> contextlib.AbstractContextManager[object]:
        return contextlib.nullcontext()

    def view(self) -> View:
        self._count("view")
        rank = dist.get_rank()
        usual = {"uuid": f"gpu-{rank}", "index": 0, "multicast": False}
        return View(**{**usual, "granules": dict.fromkeys(self.kinds, mmap.PAGESIZE), **self.views.get(rank, {})})

    def reserve(self, nbytes: int) -> int:
        self._count("reserve")
        assert nbytes > 0
        assert nbytes % mmap.PAGESIZE == 0
        address = _mmap(0, nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE)
        self.reserved[address] = nbytes
        return address

    def free(self, address: int, nbytes: int) -> None:
        self._count("free")
        assert self.reserved.pop(address) == nbytes
        assert not [at for at in self.mapped if address <= at < address + nbytes], "something is mapped there"
        assert _LIBC.munmap(address, nbytes) == 0

    def create(self, nbytes: int, kind: int) -> int:
        self._count("create")
        assert kind in self.kinds
        assert nbytes > 0
        assert nbytes % mmap.PAGESIZE == 0
        descriptor = os.memfd_create("fake")
        os.pwrite(descriptor, b"\xa5" * nbytes, 0)  # what a driver leaves there is not known
        return self._new(descriptor)

    def _new(self, descriptor: int) -> int:
        handle = next(self._numbers)
        self.handles[handle] = descriptor
        return handle

    def release(self, handle: int) -> None:
        self._count("release")
        os.close(self.handles.pop(handle))

    def map(self, address: int, nbytes: int, handle: int) -> None:
        self._count("map")
        assert os.fstat(self.handles[handle]).st_size == nbytes, "a handle is mapped as a whole"
        assert any(at <= address and address + nbytes <= at + size for at, size in self.reserved.items())
        for at, (size, _) in self.mapped.items():
            assert address + nbytes <= at or at + size <= address, "mapped twice"
        _mmap(address, nbytes, mmap.MAP_SHARED | _FIXED, self.handles[handle])
        self.mapped[address] = (nbytes, 0)

    def allow(self, address: int, nbytes: int) -> None:
        self._count("allow")
        assert self.mapped[address][0] == nbytes
        assert _LIBC.mprotect(address, nbytes, mmap.PROT_READ | mmap.PROT_WRITE) == 0
        self.mapped[address] = (nbytes, 1)

    def unmap(self, address: int, nbytes: int) -> None:
        self._count("unmap")
        assert self.mapped.pop(address)[0] == nbytes, "not what was mapped"
        _mmap(address, nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE | _FIXED)

    def export(self, handle: int, kind: int) -> int | bytes:
        self._count("export")
        assert kind in self.kinds
        if kind == DESCRIPTOR:
            return os.dup(self.handles[handle])
        kept = os.dup(self.handles[handle])  # a fabric handle names memory for as long as that lives
        return f"/proc/{os.getpid()}/fd/{kept}".encode().ljust(64, b"\0")

    def take(self, shared: int | bytes) -> int:
        self._count("take")
        if isinstance(shared, bytes):
            return self._new(os.open(shared.rstrip(b"\0"), os.O_RDWR))
        return self._new(os.dup(shared))

    def retain(self, address: int) -> tuple[int, int, int, int]:
        self._count("retain")
        for at, (size, _) in self.mapped.items():
            if at <= address < at + size:
                return self._new(os.dup(_OF_USERS[at])), self.kinds[0] if self.kinds else 0, at, size
        raise DriverError("cuMemRetainAllocationHandle failed with CUDA_ERROR_INVALID_VALUE (1)")

    def tensor(self, address: int, nbytes: int, owner: object = None) -> torch.Tensor:
        at, (size, allowed) = next((a, m) for a, m in self.mapped.items() if a <= address < a + m[0])
        assert allowed, (at, size)
        array = type("Bytes", (ctypes.c_char * nbytes,), {"_type_": ctypes.c_char, "_length_": nbytes})
        memory = array.from_address(address)
        memory.owner = owner
        return torch.frombuffer(memory, dtype=torch.uint8)

    def finish(self, fill: Callable[[], object]) -> None:
        fill()

    def quiet(self) -> None:
        self._count("quiet")


_OF_USERS: dict[int, int] = {}  # address of a user's allocation to its descriptor


def users_tensor(nbytes: int) -> torch.Tensor:
    """A tensor in an allocation of its own that the driver can export."""
    driver = FakeDriver(torch.device("cpu"))
    handle = driver.create(nbytes, FakeDriver.kinds[0])
    address = driver.reserve(nbytes)
    _OF_USERS[address] = os.dup(driver.handles[handle])
    driver.map(address, nbytes, handle)
    driver.allow(address, nbytes)
    driver.release(handle)
    return driver.tensor(address, nbytes).zero_()


@contextlib.contextmanager
def on_fake_driver() -> Iterator[None]:
    """A block in which lanes, panels and symmetric tensors of CPU groups are made as those of GPUs are."""
    back = Communicator._ensure_memory

    def backed(self: Communicator, problem: Any, variant: Any, config: Any) -> None:
        if self.workspace is not None and variant.kernels:
            assert self.workspace.lanes[problem.mode]  # as on GPUs, where they are made at once
        back(self, problem, variant, config)

    def allocate(group: Any, device: torch.device, nbytes: int, *, first: int | None = None) -> Any:
        return cuda.allocate(group, device, nbytes, first=first)

    with (
        replaced(cuda, "Driver", FakeDriver),
        replaced(mapped, "Driver", FakeDriver),
        replaced(workspace, "allocate", allocate),
        replaced(symmetric, "allocate", allocate),
        replaced(Communicator, "_ensure_memory", backed),
    ):
        FakeDriver.reset()
        yield
