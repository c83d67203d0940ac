"""A gang as the supervisor sees it: its processes, its messages, and the reason to give it up."""

from __future__ import annotations

import logging
import math
import multiprocessing
import os
import selectors
import signal
import tempfile
import time
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, Literal, TypeAlias

from tunedcomm.spec import Candidate
from tunedcomm.tuner.gang.protocol import GO, PROTOCOL, Command, Settings
from tunedcomm.tuner.gang.ranks import rank_environment, send_kill, start_ranks


@dataclass(frozen=True, slots=True)
class Loss:
    """The reason to give a gang up.

    Attributes:
        status, reason: recorded for the candidate that is blamed.
        killed: the cause is SIGKILL, which no candidate raises: a person sent it, or the kernel when memory ran out.
    """

    status: Literal["crashed", "hung"]
    reason: str
    killed: bool = False


def loss_by_exit(exits: Mapping[int, int], said: str) -> Loss:
    """The loss of a gang whose ranks have ended.

    Args:
        exits: exit codes of ranks that have ended, in the order in which their deaths were seen; negative for a signal.
        said: the first error that a rank reported.
    """
    # A signal is the cause, whichever death was seen first: the other ranks raise when a peer is gone.
    killed = {rank: -code for rank, code in exits.items() if code < 0}
    if killed:
        rank, first = next(iter(killed.items()))
        reason = f"rank {rank} was killed by {signal.Signals(first).name}"
        return Loss("crashed", reason, killed=all(code == signal.SIGKILL for code in killed.values()))
    rank, code = next(((rank, code) for rank, code in exits.items() if code), next(iter(exits.items())))
    return Loss("crashed", f"rank {rank} ended with exit code {code}" + (f"; {said}" if said else ""))


_log = logging.getLogger("tunedcomm")

_EXIT_WAIT_S = 20.0
# Wait for more deaths after the first one: the first death may be the consequence of a later one.
_GRACE_S = 0.5
# Once a launch has raised on one rank the gang is lost; the other ranks get this long to report their own launch.
_ECHO_S = 5.0
_MAX_OUTPUT = 1 << 20
Phase: TypeAlias = Literal["starting", "waiting", "binding", "running", "ending"]
_PHASE_AFTER: Mapping[str, Phase] = {"ready": "waiting", "bind": "binding", "run": "running", "result": "waiting"}


def gang_environment(settings: Settings, devices: str | None = None) -> dict[str, str]:
    """Environment of a gang's ranks, with short waits in the kernels.

    `devices` are the gang's GPUs, as CUDA_VISIBLE_DEVICES names them; None leaves that variable as it is.
    """
    changes = {"OMP_NUM_THREADS": "1", "TUNEDCOMM_PEER_TIMEOUT_S": f"{settings.peer_timeout_s:g}"}
    return rank_environment(changes if devices is None else {**changes, "CUDA_VISIBLE_DEVICES": devices})


class GangProcess:
    """One gang, a process for each rank, from the start of the processes until all are gone.

    The gang is a spare until `go` is called: its processes import their modules and touch no device. The selector gets
    the gang's pipes, with this object as their data.

    Attributes:
        slot: index among the gangs that run at once.
        phase: current phase; the gang's messages are ignored once it is `ending`.
        begun: candidate that the gang has begun to bind or has launched.
        went_at: monotonic time at which `go` was called.
    """

    def __init__(
        self, slot: int, settings: Settings, selector: selectors.BaseSelector, devices: str | None = None
    ) -> None:
        self.slot = slot
        self.phase: Phase = "starting"
        self.begun: Candidate | None = None
        self.went_at: float | None = None
        self._settings, self._selector = settings, selector
        self._heard_at = time.monotonic()
        self._retired_at = math.inf
        self._exits: dict[int, int] = {}  # exit codes by rank, in the order in which deaths were seen
        self._exited_at = math.inf
        self._failures: list[tuple[float, str]] = []
        self._output = tempfile.TemporaryFile()  # noqa: SIM115 - closed by `is_gone`
        self._lines, rank_ends = zip(
            *(multiprocessing.Pipe() for _ in range(1 if settings.stand_in else settings.world_size)), strict=True
        )
        module = settings.stand_in or ("tunedcomm.tuner.gang.worker",)
        with ExitStack() as stack:
            ends = [stack.enter_context(end).fileno() for end in rank_ends]
            commands = [["-m", *module, str(os.getpid()), str(end), PROTOCOL] for end in ends]
            self._ranks = start_ranks(commands, gang_environment(settings, devices), pipes=ends, output=self._output)
        for line in self._lines:
            self._selector.register(line, selectors.EVENT_READ, self)
            line.send(settings)

    def go(self) -> None:
        """Let the gang take its devices; the watchdog starts."""
        self.went_at = time.monotonic()
        self._send(GO)

    # Talking

    def read(self) -> list[tuple[str, Any]]:
        """Events that the gang sent since the last call, as names and values; updates the phase."""
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
            except (EOFError, OSError):  # the rank has ended; a torn message does not count
                self._hang_up(line)
        for name, value in events:
            self._heard_at = time.monotonic()
            self.phase = _PHASE_AFTER[name]
            self.begun = value if self.phase in ("binding", "running") else None
        return events

    def send(self, command: Command) -> None:
        """Send every rank a command; the watchdog starts again."""
        self.phase = "binding"
        self._send(command)

    def _send(self, value: object) -> None:
        self._heard_at = time.monotonic()
        for line in self._lines:
            with suppress(OSError):  # the rank is gone; `loss` reports it
                line.send(value)

    def _hang_up(self, line: Connection) -> None:
        if not line.closed:
            self._selector.unregister(line)
            line.close()

    # Watching

    def loss(self) -> Loss | None:
        """The reason to give the gang up, or None: a rank has ended, or the gang is silent for too long.

        Call `read` and ask again before you act: the gang's last events may change the answer or its reason.
        """
        now = time.monotonic()
        for rank, process in enumerate(self._ranks):
            if rank not in self._exits and (code := process.poll()) is not None:
                self._exits[rank] = code
                self._exited_at = min(self._exited_at, now)
        if now - self._exited_at > _GRACE_S:
            # A rank that could send no message may have printed its error.
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
        silent = f"no sign of life for {silent_s:.0f} s while {self.phase}"
        return Loss("hung", silent) if silent_s > patience_s else None

    @property
    def silent_s(self) -> float:
        """Seconds since the last message from the gang or to it."""
        return time.monotonic() - self._heard_at

    @property
    def patience_s(self) -> float | None:
        """Seconds for which the gang may be silent in this phase; None if nothing is expected of it."""
        if self.went_at is None or self.phase in ("waiting", "ending"):
            return None
        limits = {"starting": self._settings.start_timeout_s, "binding": self._settings.compile_timeout_s}
        return limits.get(self.phase, self._settings.trial_timeout_s)

    # Ending

    def retire(self) -> None:
        """Kill the gang; see `is_gone`."""
        self.phase, self._retired_at = "ending", time.monotonic()
        for process in self._ranks:
            send_kill(process)
        for line in self._lines:
            self._hang_up(line)

    def is_gone(self) -> bool:
        """True once all processes are gone and their devices free; does not wait."""
        left = [process.pid for process in self._ranks if process.poll() is None]
        if left and time.monotonic() - self._retired_at < _EXIT_WAIT_S:
            return False
        if left:
            _log.error("processes %s of a gang could not be killed; they may still hold GPU memory", left)
        self._output.close()
        return True

    def finish(self) -> None:
        """Kill the gang and wait until it is gone."""
        self.retire()
        while not self.is_gone():
            time.sleep(0.02)
