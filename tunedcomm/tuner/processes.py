"""Processes that must not outlive the one that started them."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import time
from collections.abc import Iterable
from pathlib import Path

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when the one that started it ends, however it ends.

    Args:
        parent: pid of that process; if it is gone already, this process ends at once.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def process_start(pid: int) -> int | None:
    """When a living process was started, in the kernel's ticks since boot; None if it has ended, reaped or not."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    fields = stat.rpartition(")")[2].split()
    return None if fields[0] in ("Z", "X") else int(fields[19])


def is_alive(pid: int) -> bool:
    """True unless the process has ended."""
    return process_start(pid) is not None


def kill_group(pid: int) -> None:
    """SIGKILL the process group that `pid` leads, if there still is one."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def send_kill(pids: Iterable[int]) -> None:
    """SIGKILL every process, with the group that it leads; does not wait."""
    for pid in pids:
        kill_group(pid)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)


def kill_processes(pids: Iterable[int], wait_s: float) -> list[int]:
    """SIGKILL every process and wait until they are gone; returns those that are not after `wait_s`."""
    left = list(pids)
    send_kill(left)
    deadline = time.monotonic() + wait_s
    while (left := [pid for pid in left if is_alive(pid)]) and time.monotonic() < deadline:
        time.sleep(0.02)
    return left


def kernel_identity() -> str:
    """Names the kernel and the namespace in which process ids mean what they mean here."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:  # nothing can be said about processes then
        return f"unknown {socket.gethostname()} {os.getpid()}"
