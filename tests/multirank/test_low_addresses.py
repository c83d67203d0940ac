"""A status block below 2 GiB, where Debian's Python has its heap: interpreted kernels take it as it is.

A number that fits in 32 bits is such a number to Triton's interpreter, which then makes no pointer of it.
"""

from __future__ import annotations

import ctypes
import mmap
import time

import torch
from harness import run_ranks

import tunedcomm
from tunedcomm.symm import workspace
from tunedcomm.symm.layout import STATUS_BYTES

MAP_FIXED_NOREPLACE = 0x100000


def mapped(at: int) -> torch.Tensor:
    """A status block at that address, or behind it if something else is there; kept for good."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_FIXED_NOREPLACE
    for wanted in range(at, at + (64 << 20), 1 << 20):
        if libc.mmap(wanted, mmap.PAGESIZE, mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, 0) == wanted:
            words = (ctypes.c_int32 * (STATUS_BYTES // 4)).from_address(wanted)
            found = torch.frombuffer(words, dtype=torch.int32)
            assert found.data_ptr() == wanted
            return found
    raise AssertionError(f"nothing is free at {at:#x}: {ctypes.get_errno()}")


def body(rank: int, world_size: int) -> None:
    workspace._status_block = lambda *, pinned: mapped(0x50000000)
    for variant in ("one_shot", "lamport", "two_shot"):
        x = torch.full((37,), rank + 1.0)
        with tunedcomm.force("all_reduce", variant):
            tunedcomm.all_reduce(x)  # binds
            if rank:
                time.sleep(0.3)  # only who waits looks at the block
            assert torch.equal(tunedcomm.all_reduce(x), torch.full((37,), 3.0)), variant


def test_waiting_ranks_read_a_status_block_there() -> None:
    run_ranks(2, body)
