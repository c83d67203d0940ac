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

__all__ = ["die_with_parent", "is_alive", "kernel_identity", "kill_group", "kill_processes", "send_kill"]

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when the one that started it ends, however it ends.

    Args:
        parent: pid of that process; if it is gone already, this process ends at once.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def is_alive(pid: int) -> bool:
    """True unless the process is gone, or dead and only waits to be reaped."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] not in ("Z", "X")


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
