"""A gang as the supervisor sees it: started, listened to, and given up when it has died or fallen silent."""

from __future__ import annotations

import ctypes
import logging
import math
import multiprocessing
import os
import re
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal, TypeAlias

from tunedcomm.spec import Candidate
from tunedcomm.tuner.gang.protocol import GO, PROTOCOL, STORE_FD, Command, Settings

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when `parent`, which started it, ends; at once if it is gone already."""
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


def kernel_identity() -> str:
    """Names the kernel and the namespace in which process ids mean what they mean here."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:  # nothing can be said about processes then
        return f"unknown {socket.gethostname()} {os.getpid()}"


def send_kill(process: subprocess.Popen[bytes]) -> None:
    """SIGKILL a process that leads a group of its own, with that group, unless it has ended; does not wait."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)


@dataclass(frozen=True, slots=True)
class Loss:
    """The reason to give a gang up.

    Attributes:
        status, reason: of the candidate that is blamed for it.
        killed: by SIGKILL, which nothing that a candidate does raises: by a person, or the kernel when memory ran out.
    """

    status: Literal["crashed", "hung"]
    reason: str
    killed: bool = False


def loss_by_exit(exits: Mapping[int, int], said: str) -> Loss:
    """Say how a gang was lost.

    Args:
        exits: exit codes of the ranks that have ended, first dead first; minus its number for a signal.
        said: the first error that a rank told of.
    """
    # A signal is the cause, whoever was seen dead first: the others raise when a peer is gone.
    killed = {rank: -code for rank, code in exits.items() if code < 0}
    if killed:
        rank, number = next(iter(killed.items()))
        reason = f"rank {rank} was killed by {signal.Signals(number).name}"
        return Loss("crashed", reason, killed=all(number == signal.SIGKILL for number in killed.values()))
    rank, code = next(((rank, code) for rank, code in exits.items() if code), next(iter(exits.items())))
    return Loss("crashed", f"rank {rank} ended with exit code {code}" + (f"; {said}" if said else ""))


_log = logging.getLogger("tunedcomm")

_EXIT_WAIT_S = 20.0
# Ranks that die within so long of the first one are asked for their exit code: it may be the first that was the echo.
_GRACE_S = 0.5
# Once a launch has raised on one rank the gang is lost: the others get so long to say what became of theirs.
_ECHO_S = 5.0
_MAX_OUTPUT = 1 << 20
# Set by whatever launched the supervisor; a gang is a job of its own.
_LAUNCHER_VARIABLES = re.compile(
    r"(RANK|WORLD_SIZE|LOCAL_RANK|LOCAL_WORLD_SIZE|GROUP_RANK|ROLE_RANK|ROLE_NAME|ROLE_WORLD_SIZE|GROUP_WORLD_SIZE|"
    r"MASTER_ADDR|MASTER_PORT|TORCHELASTIC_.*|TORCH_NCCL_ASYNC_ERROR_HANDLING)"
)
Step: TypeAlias = Literal["starting", "waiting", "binding", "running", "ending"]
_STEP_AFTER: Mapping[str, Step] = {"ready": "waiting", "bind": "binding", "run": "running", "result": "waiting"}


def gang_environment(settings: Settings, devices: str | None = None) -> dict[str, str]:
    """Environment of a gang: the supervisor's, less its launcher's, with short waits in the kernels.

    `devices` are the gang's GPUs, as CUDA_VISIBLE_DEVICES names them; None leaves that variable as it is.
    """
    kept = {name: value for name, value in os.environ.items() if not _LAUNCHER_VARIABLES.fullmatch(name)}
    kept["OMP_NUM_THREADS"] = "1"
    kept["TUNEDCOMM_PEER_TIMEOUT_S"] = f"{settings.peer_timeout_s:g}"
    # One host: a name that resolves to an address nobody answers must not keep its ranks from meeting.
    kept.setdefault("GLOO_SOCKET_IFNAME", "lo")
    # The modules that the supervisor can import, plugins among them.
    kept["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    if devices is not None:
        kept["CUDA_VISIBLE_DEVICES"] = devices
    return kept


class GangProcess:
    """One gang, one process for each rank, from its start until none of them is left.

    It is a spare until `go` is called: its processes import what they need and touch no device.

    The selector is told of its pipes, with this object as the data.

    Attributes:
        slot: its number among those that run at once.
        step: the part of its life that it is in; `ending` once it is killed, and nothing that it says matters any more.
        begun: candidate that it has begun to bind, or launched.
        went_at: when `go` was called, by the monotonic clock.
    """

    def __init__(
        self, slot: int, settings: Settings, selector: selectors.BaseSelector, devices: str | None = None
    ) -> None:
        self.slot = slot
        self.step: Step = "starting"
        self.begun: Candidate | None = None
        self.went_at: float | None = None
        self._settings, self._selector = settings, selector
        self._heard_at = time.monotonic()
        self._retired_at = math.inf
        self._exits: dict[int, int] = {}  # of the ranks that have ended, first dead first
        self._exited_at = math.inf
        self._failures: list[tuple[float, str]] = []
        self._output = tempfile.TemporaryFile()  # noqa: SIM115 - closed by `is_gone`
        self._ranks: list[subprocess.Popen[bytes]] = []
        self._lines: list[Connection] = []
        world_size = 1 if settings.stand_in else settings.world_size
        environment = gang_environment(settings, devices)
        environment["WORLD_SIZE"] = environment["LOCAL_WORLD_SIZE"] = str(world_size)
        # The ranks meet at a store whose socket they inherit, so that nobody else takes its port.
        with socket.create_server(("127.0.0.1", 0)) as store:
            environment.update({"MASTER_PORT": str(store.getsockname()[1]), STORE_FD: str(store.fileno())})
            for rank in range(world_size):
                self._start_rank(rank, environment, store.fileno())

    def _start_rank(self, rank: int, environment: Mapping[str, str], store: int) -> None:
        module = self._settings.stand_in or ("tunedcomm.tuner.gang.worker",)
        mine, theirs = multiprocessing.Pipe()
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-m", *module, str(os.getpid()), str(theirs.fileno()), PROTOCOL],
                env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdin=subprocess.DEVNULL,
                stdout=self._output,
                stderr=self._output,
                start_new_session=True,
                pass_fds=(theirs.fileno(), store),
            )
        self._ranks.append(process)
        self._lines.append(mine)
        self._selector.register(mine, selectors.EVENT_READ, self)
        mine.send(self._settings)

    def go(self) -> None:
        """Let it take its devices; its silence counts from now."""
        self.went_at = time.monotonic()
        self._send(GO)

    # Talking

    def read(self) -> list[tuple[str, Any]]:
        """Events that the gang sent since the last call, as names and values; updates its step."""
        events: list[tuple[str, Any]] = []
        for rank, line in enumerate(self._lines):
            try:
                while not line.closed and line.poll():
                    name, value = line.recv()
                    if name == "failure":
                        failed_at, text = value
                        self._failures.append((failed_at, f"rank {rank}: {text}"))
                    else:
                        events.append((name, value))
            except (EOFError, OSError):  # the rank has ended; what is torn was never said
                self._hang_up(line)
        for name, value in events:
            self._heard_at = time.monotonic()
            self.step = _STEP_AFTER[name]
            self.begun = value if self.step in ("binding", "running") else None
        return events

    def send(self, command: Command) -> None:
        """Tell every rank what to do; the gang's silence counts from now."""
        self.step = "binding"
        self._send(command)

    def _send(self, value: object) -> None:
        self._heard_at = time.monotonic()
        for line in self._lines:
            with suppress(OSError):  # the rank is gone, which is seen elsewhere
                line.send(value)

    def _hang_up(self, line: Connection) -> None:
        if not line.closed:
            self._selector.unregister(line)
            line.close()

    # Watching

    def loss(self) -> Loss | None:
        """The reason to give it up, or None: it is dead, or silent for longer than it may be.

        Ask again after `read` before acting on it: its last events may say otherwise, or why.
        """
        now = time.monotonic()
        for rank, process in enumerate(self._ranks):
            if rank not in self._exits and (code := process.poll()) is not None:
                self._exits[rank] = code
                self._exited_at = min(self._exited_at, now)
        if now - self._exited_at > _GRACE_S:
            # Ranks that could not say anything else have printed it.
            output = os.pread(self._output.fileno(), _MAX_OUTPUT, 0).decode(errors="replace").strip()
            said = min(self._failures)[1] if self._failures else output.rpartition("\n")[2]
            return loss_by_exit(self._exits, said)
        if (patience_s := self.patience_s) is None:
            return None
        silent_s = self.silent_s
        if self._failures:
            failed_at, text = min(self._failures)
            if silent_s > patience_s or min(silent_s, now - failed_at) > _ECHO_S:
                return Loss("crashed", f"{text}; the other ranks waited for it for {silent_s:.0f} s")
        silent = f"no sign of life for {silent_s:.0f} s while {self.step}"
        return Loss("hung", silent) if silent_s > patience_s else None

    @property
    def silent_s(self) -> float:
        """Seconds since it was heard of, or told something."""
        return time.monotonic() - self._heard_at

    @property
    def patience_s(self) -> float | None:
        """Seconds for which it may be silent in this step; None if nothing is waited for."""
        if self.went_at is None or self.step in ("waiting", "ending"):
            return None
        limits = {"starting": self._settings.start_timeout_s, "binding": self._settings.compile_timeout_s}
        return limits.get(self.step, self._settings.trial_timeout_s)

    # Ending

    def retire(self) -> None:
        """Kill it; see `is_gone`."""
        self.step, self._retired_at = "ending", time.monotonic()
        for process in self._ranks:
            send_kill(process)
        for line in self._lines:
            self._hang_up(line)

    def is_gone(self) -> bool:
        """True once no process of it is left, so that its devices are free for the next; does not wait."""
        left = [process.pid for process in self._ranks if process.poll() is None]
        if left and time.monotonic() - self._retired_at < _EXIT_WAIT_S:
            return False
        if left:
            _log.error("processes %s of a gang could not be killed; they may still hold GPU memory", left)
        self._output.close()
        return True

    def finish(self) -> None:
        """End it at once, and wait for that."""
        self.retire()
        while not self.is_gone():
            time.sleep(0.02)
