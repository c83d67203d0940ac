"""Starts gangs, listens to them, and ends those that hang; holds no GPU context.

A gang that dies or falls silent costs the candidate that it was running, which is recorded as `crashed` or `hung`, and
a restart. Whatever was reported before is kept.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tunedcomm.errors import TuningError
from tunedcomm.spec import Candidate, Problem
from tunedcomm.tuner.events import EventReader, read_failures
from tunedcomm.tuner.job import Job, Settings, candidate_from_dict
from tunedcomm.tuner.processes import is_alive, kill_group, kill_processes

__all__ = ["GangEnd", "Supervisor", "gang_environment"]

_log = logging.getLogger("tunedcomm")

_POLL_S = 0.05
_EXIT_WAIT_S = 20.0
_MAX_ERROR = 500
# Gangs in a row that may die without one result and without a candidate to blame.
_MAX_FRUITLESS = 3
# Set by whatever launched the supervisor; a gang is a job of its own.
_LAUNCHER_VARIABLES = re.compile(
    r"(RANK|WORLD_SIZE|LOCAL_RANK|LOCAL_WORLD_SIZE|GROUP_RANK|ROLE_RANK|ROLE_NAME|ROLE_WORLD_SIZE|GROUP_WORLD_SIZE|"
    r"MASTER_ADDR|MASTER_PORT|TORCHELASTIC_.*|TORCH_NCCL_ASYNC_ERROR_HANDLING)"
)
# The launcher's summary: a rank with its exit code, minus a signal's number where one killed it.
_EXIT = re.compile(r"rank\s*:\s*(\d+).*?exitcode\s*:\s*(-?\d+)", re.DOTALL)
_ROOT_CAUSE = "Root Cause"
_EXCEPTION = re.compile(r"(?:\[rank(\d+)\]:\s*)?([\w.]*(?:Error|Exception|Interrupt)\b.*)")


def gang_environment(settings: Settings) -> dict[str, str]:
    """Environment of a gang: the supervisor's, less its launcher's, with short waits in the kernels."""
    kept = {name: value for name, value in os.environ.items() if not _LAUNCHER_VARIABLES.fullmatch(name)}
    kept["OMP_NUM_THREADS"] = "1"
    kept["TUNEDCOMM_PEER_TIMEOUT_S"] = f"{settings.peer_timeout_s:g}"
    # One host: a name that resolves to an address nobody answers must not keep its ranks from meeting.
    kept.setdefault("GLOO_SOCKET_IFNAME", "lo")
    # The modules that the supervisor can import, plugins among them.
    kept["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    if settings.backend == "host":
        kept["CUDA_VISIBLE_DEVICES"] = ""
    return kept


@dataclass(frozen=True, slots=True)
class _Running:
    """What a gang is at: a candidate that is bound, or already launched."""

    problem: Problem
    candidate: Candidate
    launched: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class GangEnd:
    """How a gang ended.

    Attributes:
        reason: `done`, `budget`, `unusable` (it said so itself), `hung` or `crashed`.
        detail: what is known about it, a sentence.
        lost: the candidate that it was running when it hung or crashed.
        ready: it came as far as its first command.
        num_results: trials that it reported.
    """

    reason: str
    detail: str = ""
    lost: tuple[Problem, Candidate] | None = None
    ready: bool = False
    num_results: int = 0


@dataclass(slots=True)
class _Gang:
    """A gang that runs."""

    process: subprocess.Popen[bytes]
    folder: Path
    reader: EventReader
    heard: float = field(default_factory=time.monotonic)
    running: _Running | None = None
    ready: bool = False
    end: str = ""
    num_results: int = 0

    def take(self, event: dict[str, Any]) -> None:
        """Follow what the gang is at."""
        self.heard = time.monotonic()
        name = event["event"]
        if name in ("work", "trial", "run"):
            self.running = _Running(
                Problem.from_dict(event["problem"]), candidate_from_dict(event["candidate"]), launched=name == "run"
            )
        elif name == "ready":
            self.ready = True
        elif name == "result":
            self.running = None
            self.num_results += 1
        elif name == "end":
            self.end = event["reason"]

    def patience_s(self, settings: Settings) -> float:
        """How long it may now stay silent."""
        if not self.ready:
            return settings.start_timeout_s
        if self.running is not None and not self.running.launched:
            return settings.compile_timeout_s
        return settings.trial_timeout_s

    def pids(self) -> list[int]:
        """The launcher and every rank that got as far as to say its pid."""
        found = [self.process.pid]
        for path in self.folder.glob("pid-*"):
            with contextlib.suppress(ValueError):
                found.append(int(path.read_text(encoding="ascii")))
        return found


class Supervisor:
    """Runs gangs until a job is done.

    Args:
        on_event: called with every event of every gang, in order, before anything is decided on it.
        make_job: the job of the next gang, made from what is known by then; None if nothing is left.
        on_lost: called with a candidate that took its gang along: problem, candidate, `hung` or `crashed`, reason.
        on_idle: called about twenty times a second.
    """

    def __init__(
        self,
        *,
        on_event: Callable[[dict[str, Any]], None],
        make_job: Callable[[], Job | None],
        on_lost: Callable[[Problem, Candidate, str, str], None],
        on_idle: Callable[[], None] = lambda: None,
    ) -> None:
        self._on_event = on_event
        self._make_job = make_job
        self._on_lost = on_lost
        self._on_idle = on_idle
        self.num_gangs = 0

    def run(self) -> str:
        """Start gangs until one ends by itself; returns its reason, `done` or `budget`.

        Raises:
            TuningError: gangs die one after the other without a result.
        """
        fruitless = 0
        while (job := self._make_job()) is not None:
            self.num_gangs += 1
            end = self._run_gang(job)
            if end.reason in ("done", "budget"):
                return end.reason
            if end.lost is not None:
                _log.warning("a gang %s at %s: %s", end.reason, end.lost[1], end.detail)
                self._on_lost(*end.lost, end.reason, end.detail)
            fruitless = 0 if end.lost is not None or end.num_results else fruitless + 1
            if fruitless >= _MAX_FRUITLESS:
                raise TuningError(
                    f"{fruitless} gangs of {job.settings.world_size} processes in a row {end.reason} without measuring "
                    f"anything; the last one: {end.detail}. Run `tunedcomm doctor` on this machine"
                )
        return "budget"

    def _run_gang(self, job: Job) -> GangEnd:
        with tempfile.TemporaryDirectory(prefix="tunedcomm-gang-") as name:
            folder = Path(name)
            job.save(folder / "job.json")
            gang = self._start(job.settings, folder)
            try:
                return self._listen(gang, job.settings)
            finally:
                self._finish(gang)

    def _start(self, settings: Settings, folder: Path) -> _Gang:
        command = [sys.executable, "-m", "tunedcomm.tuner.launch", str(os.getpid()), str(settings.world_size)]
        with (folder / "output.txt").open("wb") as output:
            process = subprocess.Popen(
                [*command, str(folder / "job.json")],
                env=gang_environment(settings),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        return _Gang(process, folder, EventReader(folder))

    def _listen(self, gang: _Gang, settings: Settings) -> GangEnd:
        """Until the gang ends by itself, dies, or has been silent for too long."""
        while True:
            # Asked before the events are read: a gang that is seen dead has written its last one by now.
            code = gang.process.poll()
            for event in gang.reader.read():
                gang.take(event)
                self._on_event(event)
            if gang.end:
                return GangEnd(reason=gang.end, ready=gang.ready, num_results=gang.num_results)
            if code is not None:
                return self._lost(gang, "crashed", describe_death(gang.folder, code))
            silent_s = time.monotonic() - gang.heard
            if silent_s > gang.patience_s(settings):
                return self._silent(gang, silent_s)
            self._on_idle()
            time.sleep(_POLL_S)

    def _silent(self, gang: _Gang, silent_s: float) -> GangEnd:
        failures = read_failures(gang.folder)
        if failures:
            return self._lost(
                gang, "crashed", f"{'; '.join(failures)}; the other ranks waited for it for {silent_s:.0f} s"
            )
        step = "launching" if gang.running and gang.running.launched else "binding" if gang.ready else "starting"
        return self._lost(gang, "hung", f"no sign of life for {silent_s:.0f} s while {step}")

    def _lost(self, gang: _Gang, reason: str, detail: str) -> GangEnd:
        lost = (gang.running.problem, gang.running.candidate) if gang.running is not None else None
        return GangEnd(reason=reason, detail=detail, lost=lost, ready=gang.ready, num_results=gang.num_results)

    def _finish(self, gang: _Gang) -> None:
        """See to it that no process of the gang is left, so that its devices are free for the next."""
        if gang.end:
            with contextlib.suppress(subprocess.TimeoutExpired):
                gang.process.wait(_EXIT_WAIT_S)
        kill_group(gang.process.pid)
        left = kill_processes(gang.pids(), _EXIT_WAIT_S)
        gang.process.poll()
        if left := [pid for pid in left if pid != gang.process.pid and is_alive(pid)]:
            _log.error("processes %s of a gang could not be killed; they may still hold GPU memory", left)


def describe_death(folder: Path, code: int) -> str:
    """A sentence on why a gang died, from what its ranks and its launcher left."""
    output = (folder / "output.txt").read_text(encoding="utf-8", errors="replace")
    summary = output[output.find(_ROOT_CAUSE) :] if _ROOT_CAUSE in output else ""
    exits = [(int(rank), int(exit_code)) for rank, exit_code in _EXIT.findall(output)]
    # The launcher ends the other ranks by SIGTERM; any other signal is the cause, whoever was seen dead first.
    killed = [(rank, -exit_code) for rank, exit_code in exits if exit_code < 0 and -exit_code != signal.SIGTERM]
    if killed:
        return f"rank {killed[0][0]} was killed by {signal.Signals(killed[0][1]).name}"
    root = _EXIT.search(summary)
    parts = [f"rank {root[1]} ended with exit code {root[2]}" if root else f"the launcher ended with code {code}"]
    parts += read_failures(folder) or [_first_error(output, root[1] if root else None)]
    return "; ".join(part for part in parts if part)


def _first_error(output: str, rank: str | None) -> str:
    """The exception that ended `rank`, or the first one at all: later ones are its echo on other ranks."""
    found = [match for line in output.splitlines() if (match := _EXCEPTION.match(line.strip()))]
    mine = [match for match in found if match[1] == rank] or found
    return mine[0][2][:_MAX_ERROR] if mine else ""
