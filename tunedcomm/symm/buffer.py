"""Symmetric memory: a buffer of the same size on every rank of a group, all of them addressable.

Two backends make it: `cuda` (PyTorch's symmetric memory over NVLink), and the host's here: shared memory for CPU
tensors, whose kernels run in Triton's interpreter. `workspace.allocate` chooses one.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import re
import socket
import sys
import tempfile
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from tunedcomm.errors import WorkspaceError
from tunedcomm.symm.exchange import exchange, set_up

_SHM = Path("/dev/shm")
_HUGE_PAGE = 2 << 20
_ADVICE = getattr(mmap, "MADV_HUGEPAGE", None)
_madvise = getattr(ctypes.CDLL(None), "madvise", None)


@dataclass(frozen=True, slots=True, eq=False)
class SymmetricBuffer:
    """One rank's view of a symmetric allocation.

    Attributes:
        local: this rank's bytes, uint8, zero-filled.
        addresses: where each rank's bytes lie in *this* process's address space, by rank.
        rank: the caller's rank in the group.
        multicast_address: address whose stores reach every rank, 0 where the fabric has none or it is switched off.
        owner: an object that must stay alive as long as the buffer is in use.
    """

    local: torch.Tensor
    addresses: tuple[int, ...]
    rank: int
    multicast_address: int
    owner: object

    @property
    def world_size(self) -> int:
        return len(self.addresses)

    @property
    def nbytes(self) -> int:
        return self.local.numel()


def with_huge_pages(tensor: torch.Tensor) -> torch.Tensor:
    """Ask the kernel for huge pages for a new CPU tensor, and return the tensor; the kernel may have none.

    Faulting in 64 MiB of small pages takes longer than summing 64 MiB.
    """
    first = -(-tensor.data_ptr() // _HUGE_PAGE) * _HUGE_PAGE
    end = (tensor.data_ptr() + tensor.nbytes) // _HUGE_PAGE * _HUGE_PAGE
    if _madvise is not None and _ADVICE is not None and first < end:
        _madvise(ctypes.c_void_p(first), ctypes.c_size_t(end - first), _ADVICE)
    return tensor


def _number(path: Path, name: str = "") -> int:
    """The number that follows a name in one of the kernel's files."""
    found = re.search(rf"^{name}\W*(\d+)", path.read_text(encoding="utf-8"), re.MULTILINE)
    if found is None:
        raise OSError(f"{path} has no number {name}")
    return int(found[1])


def free_memory() -> int:
    """Bytes that the kernel and this process's control group still have."""
    found = [sys.maxsize]
    with contextlib.suppress(OSError):
        found.append(1024 * sum(_number(Path("/proc/meminfo"), name) for name in ("MemAvailable", "SwapFree")))
    with contextlib.suppress(OSError):
        name = Path("/proc/self/cgroup").read_text(encoding="utf-8").rpartition("0::/")[2].strip()
        group = Path("/sys/fs/cgroup", name)
        cached = _number(group / "memory.stat", "inactive_file ")
        found.append(_number(group / "memory.max") - _number(group / "memory.current") + cached)
    return min(found)


def _name() -> str:
    return f"tunedcomm-{os.getpid()}-{uuid.uuid4().hex}"


def _make(nbytes: int, stack: contextlib.ExitStack, path: Path | None = None) -> int | str:
    """A descriptor of a new file, without a name or in /dev/shm, which the stack closes; else the reason.

    All pages are there, so that no access ends in SIGBUS. Files without a name have no limit but the machine's memory,
    where the kernel kills a process: that is looked at before. Returns -1 where the kernel has no such files.
    """
    try:
        if path is None:
            descriptor = os.memfd_create("tunedcomm")
        else:
            stack.callback(path.unlink, missing_ok=True)  # first: an exception may come at any time
            descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
    except (OSError, AttributeError) as error:
        return -1 if path is None else f"cannot create {path}: {error}"
    stack.callback(os.close, descriptor)
    if nbytes > free_memory():
        return f"cannot reserve {nbytes} bytes: less memory is free"
    try:
        os.posix_fallocate(descriptor, 0, nbytes)
    except OSError as error:
        return f"cannot reserve {nbytes} bytes: {error}"
    return descriptor


def _listen(stack: contextlib.ExitStack, *, named: bool) -> tuple[socket.socket, tuple[str, bytes]] | None:
    """A socket for a descriptor, with its address and password; None if it cannot be had."""
    try:
        address = f"{tempfile.gettempdir()}/{_name()}" if named else f"\0{_name()}"
        made = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM))
        if named:
            stack.callback(Path(address).unlink, missing_ok=True)
        made.bind(address)
    except OSError:
        return None
    made.setblocking(False)
    return made, (address, uuid.uuid4().bytes)


def _send(descriptors: Sequence[int], address: str, said: bytes) -> bool:
    """Send descriptors to a peer's socket; False if the socket cannot be reached."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
        sender.setblocking(False)
        try:
            sender.connect(address)
            socket.send_fds(sender, [said], list(descriptors))
        except OSError:
            return False
    return True


def _receive(
    receiver: socket.socket, password: bytes, due: Sequence[int], count: int, stack: contextlib.ExitStack
) -> dict[int, list[int]] | str:
    """The descriptors that the ranks `due` have sent, which the stack closes; strangers' messages are dropped."""
    found: dict[int, list[int]] = {}
    try:
        while not found.keys() >= set(due):
            said, descriptors, _, _ = socket.recv_fds(receiver, len(password) + 2, count)
            for descriptor in descriptors:
                stack.callback(os.close, descriptor)
            if said[:-1] == password and len(descriptors) == count:
                found[said[-1]] = descriptors
    except OSError as error:
        return f"cannot receive a descriptor: {error}"
    return found


def send_descriptors(
    group: dist.ProcessGroup, own: Sequence[int], count: int, senders: Sequence[int], stack: contextlib.ExitStack
) -> tuple[dict[int, list[int]] | str, list[tuple[int, int]]]:
    """Send each sender's descriptors to all other ranks; collective, and no rank fails alone.

    They go to an abstract socket of each peer, or to one in the temporary directory where the sender cannot reach that,
    as in another network namespace.

    Args:
        group: process group of at most 256 ranks.
        own: this rank's descriptors, if it is a sender.
        count: how many each sender has.
        senders: ranks.
        stack: closes what is received.

    Returns:
        The descriptors by sender, or the reason why some were not received, which is this rank's alone; and the pairs
        (sender, receiver) that no socket connects, the same on every rank.
    """
    rank, ranks = dist.get_rank(group), range(dist.get_world_size(group))
    lacking = [(sender, peer) for sender in senders for peer in ranks if peer != sender]
    found: dict[int, list[int]] = {}
    failure = ""
    for named in (False, True):
        if not lacking:
            break
        with contextlib.ExitStack() as sockets:
            endpoint = _listen(sockets, named=named) if any(peer == rank for _, peer in lacking) else None
            offers = exchange(group, endpoint and endpoint[1])
            peers = [peer for sender, peer in lacking if sender == rank and offers[peer]]
            reached = [p for p in peers if _send(own, offers[p][0], offers[p][1] + bytes([rank]))]
            sent = exchange(group, reached)
            due = [sender for sender in senders if rank in sent[sender]]
            if endpoint is not None and due:
                come = _receive(endpoint[0], endpoint[1][1], due, count, stack)
                failure = come if isinstance(come, str) else failure
                found |= {} if isinstance(come, str) else come
        lacking = [(sender, peer) for sender, peer in lacking if peer not in sent[sender]]
    return failure or found, lacking


def _share(group: dist.ProcessGroup, nbytes: int, stack: contextlib.ExitStack) -> int | str:
    """A descriptor of the same new memory on every rank, which the stack closes, or the reason; collective.

    Rank 0 sends it to its peers. Where it reaches none of a peer's sockets, the memory has a name as long as the stack
    lives.
    """
    rank = dist.get_rank(group)
    made: int | str = _make(nbytes, stack) if rank == 0 else -1
    first = exchange(group, made)[0]
    if isinstance(first, str):
        return first
    if first != -1:
        found, lacking = send_descriptors(group, [first], 1, [0], stack)
        if not lacking:
            return made if rank == 0 else found if isinstance(found, str) else found[0][0]
    path = _SHM / _name()
    if rank == 0:
        made = _make(nbytes, stack, path)
    path, failure = exchange(group, (path, made if isinstance(made, str) else ""))[0]
    if failure or rank == 0:
        return failure or made
    try:
        descriptor = os.open(path, os.O_RDWR)
    except OSError as error:
        return f"cannot open {path}: {error}"
    stack.callback(os.close, descriptor)
    return descriptor


def _map(descriptor: int, nbytes: int) -> mmap.mmap | str:
    try:
        if (found := os.fstat(descriptor).st_size) != nbytes:
            return f"asked for {nbytes} bytes in all, rank 0 for {found}: the size must be the same on every rank"
        return mmap.mmap(descriptor, nbytes)
    except (OSError, ValueError) as error:
        return f"cannot map shared memory: {error}"


def by_reason(reasons: Sequence[str | None]) -> str:
    """Every reason once, with the ranks that give it; "" where none does."""
    ranks: dict[str, list[str]] = {}
    for rank, reason in enumerate(reasons):
        if reason:
            ranks.setdefault(reason, []).append(str(rank))
    whole = len(ranks) == 1 and len(reasons) == len(next(iter(ranks.values())))
    return "; ".join(
        text if whole else f"rank{'s' if len(who) > 1 else ''} {', '.join(who)}: {text}" for text, who in ranks.items()
    )


def allocate_on_host(group: dist.ProcessGroup, nbytes: int) -> SymmetricBuffer:
    """See `workspace.allocate`. One shared file, a slice for each rank.

    Raises:
        WorkspaceError: on every rank of the group if it failed on any.
    """
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    stride = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
    with set_up(group, anew=False), contextlib.ExitStack() as stack:
        shared = _share(group, stride * world_size, stack)
        mapping = shared if isinstance(shared, str) else _map(shared, stride * world_size)
        failed = by_reason(exchange(group, mapping if isinstance(mapping, str) else None))
    if failed or isinstance(mapping, str):
        raise WorkspaceError(
            f"{world_size} ranks cannot share {nbytes} bytes each ({failed}); free memory, or lower "
            "TUNEDCOMM_WORKSPACE_MIB"
        )
    whole = torch.frombuffer(mapping, dtype=torch.uint8)
    base = whole.data_ptr()
    return SymmetricBuffer(
        local=whole[rank * stride : rank * stride + nbytes],
        addresses=tuple(base + r * stride for r in range(world_size)),
        rank=rank,
        multicast_address=0,
        owner=mapping,
    )
