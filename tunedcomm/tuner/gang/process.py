"""A gang as the supervisor sees it: started, listened to, and seen to its end without waiting for it."""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import logging
import multiprocessing
import os
import re
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tunedcomm.spec import Candidate
from tunedcomm.tuner.gang.protocol import (
    GO_FD,
    LINE_FD,
    STORE_FD,
    STORE_PORT,
    Command,
    Settings,
    failure_age_s,
    read_failures,
)

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


def is_alive(pid: int) -> bool:
    """True unless the process has ended."""
    return process_start(pid) is not None


def send_kill(pids: Iterable[int]) -> None:
    """SIGKILL every process, with the group that it leads; does not wait."""
    for pid in pids:
        for kill in (os.killpg, os.kill):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                kill(pid, signal.SIGKILL)


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


_MAX_ERROR = 500
_EXCEPTION = re.compile(r"(?:\[rank(\d+)\]:\s*)?([\w.]*(?:Error|Exception|Interrupt)\b.*)")


@dataclass(frozen=True, slots=True)
class ExitStatus:
    """The end of a gang, in a sentence.

    `killed`: by SIGKILL, which nothing that a candidate does raises: by a person, or the kernel when memory ran out.
    """

    text: str
    killed: bool


def exit_status_of(exits: Mapping[int, int], folder: Path) -> ExitStatus:
    """The end of a gang, from the exit codes (minus a signal's number) of the ranks that have ended, first dead first.

    `folder` is the gang's, with its output and its failures.
    """
    failed = {rank: code for rank, code in exits.items() if code}
    # A signal is the cause, whoever was seen dead first: the others raise when a peer is gone.
    killed = {rank: -code for rank, code in failed.items() if code < 0}
    if killed:
        rank, number = next(iter(killed.items()))
        text = f"rank {rank} was killed by {signal.Signals(number).name}"
        return ExitStatus(text, all(number == signal.SIGKILL for number in killed.values()))
    root, code = next(iter(failed.items()), (None, 0))
    output = ""
    with contextlib.suppress(OSError):
        output = (folder / "output.txt").read_text(encoding="utf-8", errors="replace")
    parts = ["its ranks ended unasked" if root is None else f"rank {root} ended with exit code {code}"]
    parts += read_failures(folder) or [_first_error(output, root)]
    return ExitStatus("; ".join(part for part in parts if part), killed=False)


def _first_error(output: str, rank: int | None) -> str:
    """The exception that ended `rank`, or the first one at all: later ones are its echo on other ranks."""
    found = [match for line in output.splitlines() if (match := _EXCEPTION.match(line.strip()))]
    mine = [match for match in found if match[1] == str(rank)] or found
    return mine[0][2][:_MAX_ERROR] if mine else ""


_log = logging.getLogger("tunedcomm")

_EXIT_WAIT_S = 20.0
# Ranks that die within so long of the first one are asked for their exit code: it may be the first that was the echo.
_GRACE_S = 0.5
# Once a launch has raised on one rank the gang is lost: the others get so long to say what became of theirs.
_ECHO_S = 5.0
# Of this kernel's processes: a temporary directory may be shared with other hosts or containers.
_FOLDER = f"tunedcomm-gang-{hashlib.sha256(kernel_identity().encode()).hexdigest()[:8]}-"
# Set by whatever launched the supervisor; a gang is a job of its own.
_LAUNCHER_VARIABLES = re.compile(
    r"(RANK|WORLD_SIZE|LOCAL_RANK|LOCAL_WORLD_SIZE|GROUP_RANK|ROLE_RANK|ROLE_NAME|ROLE_WORLD_SIZE|GROUP_WORLD_SIZE|"
    r"MASTER_ADDR|MASTER_PORT|TORCHELASTIC_.*|TORCH_NCCL_ASYNC_ERROR_HANDLING)"
)


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


def _command(settings: Settings, path: Path) -> list[str]:
    module = settings.stand_in or ("tunedcomm.tuner.gang.worker",)
    return [sys.executable, "-m", *module, str(os.getpid()), str(path)]


def remove_stale_folders() -> None:
    """Remove what gangs left whose supervisor was killed."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_FOLDER}*"):
        pid = folder.name.removeprefix(_FOLDER).partition("-")[0]
        if pid.isdigit() and not is_alive(int(pid)):
            shutil.rmtree(folder, ignore_errors=True)  # of another user: left alone


class GangProcess:
    """One gang, one process for each rank, from its start until none of them is left.

    It is a spare until `go` is called: its processes import what they need and touch no device.

    The selector is told of its socket, with this object as the data.

    Attributes:
        slot: its number among those that run at once.
        ready: it came as far as to ask for its first command.
        waiting: nothing for it to do for now.
        begun: candidate that it has begun to bind, or launched.
        launched: every rank has bound `begun`.
        end: why it ended by itself; "" until it says so.
        num_results: trials that it reported.
    """

    def __init__(
        self, slot: int, settings: Settings, selector: selectors.BaseSelector, devices: str | None = None
    ) -> None:
        self.slot = slot
        self.ready = self.waiting = self.launched = False
        self.begun: Candidate | None = None
        self.end = ""
        self.num_results = 0
        self._settings = settings
        self._folder = Path(tempfile.mkdtemp(prefix=f"{_FOLDER}{os.getpid()}-"))
        self._deadline: float | None = None
        self._went: float | None = None
        self._ready_at: float | None = None
        self._killed = False
        self._selector = selector
        self._channel, theirs = multiprocessing.Pipe()
        selector.register(self._channel, selectors.EVENT_READ, self)
        self._exits: dict[int, int] = {}  # of the ranks that have ended, first dead first
        self._failed_at: float | None = None
        wanted, self._go = os.pipe()
        try:
            self._ranks = self._spawn(gang_environment(settings, devices), wanted, theirs.fileno())
        finally:
            os.close(wanted)
            theirs.close()
        self._heard = self._spoken = time.monotonic()

    def _spawn(self, environment: dict[str, str], wanted: int, line: int) -> list[subprocess.Popen[bytes]]:
        """Start every rank. They meet at a store whose socket rank 0 inherits, so that nobody else takes its port."""
        world_size = 1 if self._settings.stand_in else self._settings.world_size
        path = self._folder / "settings.json"
        self._settings.save(path)
        ranks = []
        with (
            socket.socket(socket.AF_INET, socket.SOCK_STREAM) as store,
            (self._folder / "output.txt").open("wb") as output,
        ):
            store.bind(("127.0.0.1", 0))
            store.listen(128)
            environment[STORE_PORT] = str(store.getsockname()[1])
            environment["WORLD_SIZE"] = environment["LOCAL_WORLD_SIZE"] = str(world_size)
            for rank in range(world_size):
                inherited = {GO_FD: wanted, **({LINE_FD: line, STORE_FD: store.fileno()} if rank == 0 else {})}
                own = {"RANK": str(rank), "LOCAL_RANK": str(rank), **{name: str(fd) for name, fd in inherited.items()}}
                ranks.append(
                    subprocess.Popen(
                        _command(self._settings, path),
                        env={**environment, **own},
                        stdin=subprocess.DEVNULL,
                        stdout=output,
                        stderr=output,
                        start_new_session=True,
                        pass_fds=tuple(inherited.values()),
                    )
                )
        return ranks

    def go(self) -> None:
        """Let it take its devices; its silence counts from now."""
        self._close_go()
        self._went = self._heard = self._spoken = time.monotonic()

    # Talking

    def read(self) -> list[tuple[str, Any]]:
        """Events that the gang sent since the last call, as names and values; updates its step."""
        events: list[tuple[str, Any]] = []
        try:
            while not self._channel.closed and self._channel.poll():
                events.append(self._channel.recv())
        except (EOFError, OSError):  # no rank has the other end any more; what is torn was never said
            self._hang_up()
        for name, value in events:
            self._heard = time.monotonic()
            if name in ("work", "trial", "run"):
                self.begun, self.launched = value, name == "run"
            elif name == "ready":
                self.ready, self._ready_at = True, self._heard
            elif name == "result":
                self.begun, self.launched = None, False
                self.num_results += 1
            elif name == "end":
                self.end = value
        return events

    def send(self, command: Command) -> None:
        """Tell it what to do; its silence counts from now."""
        self.waiting = command.kind == "wait"
        self._heard = self._spoken = time.monotonic()
        with contextlib.suppress(OSError):  # it is gone, which is seen elsewhere
            self._channel.send(command)

    def _hang_up(self) -> None:
        if not self._channel.closed:
            self._selector.unregister(self._channel)
            self._channel.close()

    @property
    def start_s(self) -> float:
        """Seconds from `go` until it was ready, or until now; 0 for a spare."""
        if self._went is None:
            return 0.0
        return (self._ready_at or time.monotonic()) - self._went

    @property
    def seconds_since_command(self) -> float:
        return time.monotonic() - self._spoken

    # Watching

    def exit_status(self) -> ExitStatus | None:
        """The status with which it ended; None while it runs. Call `read` first: its last events may say why."""
        return exit_status_of(self._exits, self._folder) if self.is_dead() else None

    def is_dead(self) -> bool:
        """True once all ranks have ended, or one failed a moment ago: what it had to say is there to be read then."""
        for rank, process in enumerate(self._ranks):
            if rank not in self._exits and (code := process.poll()) is not None:
                self._exits[rank] = code
                if code and self._failed_at is None:
                    self._failed_at = time.monotonic()
        failed = self._failed_at is not None and time.monotonic() - self._failed_at > _GRACE_S
        return failed or len(self._exits) == len(self._ranks)

    def silence(self) -> tuple[str, str] | None:
        """`hung` or `crashed` and a sentence, if it has been silent for longer than it may."""
        silent_s, patience_s = time.monotonic() - self._heard, self._patience_s()
        if silent_s <= min(_ECHO_S, patience_s) or (self.waiting and not self._channel.closed):
            return None
        is_late, failures = silent_s > patience_s, read_failures(self._folder)
        if failures and (is_late or min(silent_s, failure_age_s(self._folder)) > _ECHO_S):
            return "crashed", f"{'; '.join(failures)}; the other ranks waited for it for {silent_s:.0f} s"
        if not is_late:
            return None
        return "hung", f"no sign of life for {silent_s:.0f} s while {self._step()}"

    def _step(self) -> str:
        if self.launched:
            return "launching"
        if self.begun is not None:
            return "binding"
        return "taking a command" if self.ready else "starting"

    def _patience_s(self) -> float:
        if not self.ready:
            return self._settings.start_timeout_s
        if self.begun is not None and not self.launched:
            return self._settings.compile_timeout_s
        return self._settings.trial_timeout_s

    # Ending

    @property
    def retired(self) -> bool:
        """True once its end is being seen to: nothing that it says matters any more."""
        return self._deadline is not None

    def retire(self) -> None:
        """See to its end from now on, see `is_gone`: by itself if it said so, else by force."""
        self._hang_up()
        self._deadline = time.monotonic() + _EXIT_WAIT_S
        if not self.end:
            self._kill()
        self._close_go()  # after a spare has been killed: it must not take its devices now

    def _close_go(self) -> None:
        if self._go >= 0:
            os.close(self._go)
            self._go = -1

    def _kill(self) -> None:
        self._killed = True
        self._deadline = time.monotonic() + _EXIT_WAIT_S
        send_kill(self._pids())

    def _pids(self) -> list[int]:
        """The ranks that have not ended."""
        return [process.pid for process in self._ranks if process.poll() is None]

    def is_gone(self) -> bool:
        """True once no process of it is left, so that its devices are free for the next; does not wait."""
        assert self._deadline is not None
        late = time.monotonic() > self._deadline
        if not self._killed and (late or self.is_dead()):
            self._kill()  # ranks that outlived one that failed, or all of them
            late = False
        left = self._pids()
        if not self._killed or (left and not late):
            return False
        if left:
            _log.error("processes %s of a gang could not be killed; they may still hold GPU memory", left)
        shutil.rmtree(self._folder, ignore_errors=True)
        return True

    def finish(self) -> None:
        """End it at once, and wait for that."""
        if not self.retired:
            self.retire()
        self._kill()
        while not self.is_gone():
            time.sleep(0.02)
