"""Who holds a claim, and whether that process still lives.

On one host the kernel knows: a process with that number that was started at that moment, or, in another container, one
that holds a lock. Of processes on other hosts only their heartbeats are known, see `Seats`.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import optuna
from optuna.storages import BaseStorage
from optuna.study import StudyDirection
from optuna.trial import TrialState

from tunedcomm.tuner.life_lock import LifeLock
from tunedcomm.tuner.processes import kernel_identity

__all__ = ["Local", "Owner", "Presence", "Seats"]

_SEATS = "tunedcomm supervisors"
_log = logging.getLogger("tunedcomm")


@dataclass(frozen=True, slots=True)
class Owner:
    """A process, such that no other one is equal to it.

    Attributes:
        name: for people, `host:pid`.
        kernel: the boot of the kernel and the space of process numbers in which `pid` means something.
        pid: process number.
        started: when it was started, in the kernel's ticks since boot: process numbers are used again.
    """

    name: str
    kernel: str
    pid: int
    started: int

    @classmethod
    def here(cls) -> Owner:
        """This process."""
        pid = os.getpid()
        stat = _stat(pid)
        return cls(f"{socket.gethostname()}:{pid}", kernel_identity(), pid, 0 if stat is None else stat[1])

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Owner:
        """Inverse of `dataclasses.asdict`."""
        return cls(str(data["name"]), str(data["kernel"]), int(data["pid"]), int(data["started"]))

    def lives(self) -> bool | None:
        """False if the process has ended, None if that cannot be seen from here."""
        if self.kernel != kernel_identity():
            return None
        stat = _stat(self.pid)
        return stat is not None and stat[0] not in ("Z", "X") and stat[1] == self.started


def _stat(pid: int) -> tuple[str, int] | None:
    """State and start of a process; None if there is none."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except OSError:
        return None
    return fields[0], int(fields[19])


class Presence(Protocol):
    """Says which owners of claims are there."""

    def mark(self) -> dict[str, Any]:
        """What goes with a claim of this process."""

    def lives(self, mark: Mapping[str, Any]) -> bool:
        """True unless the process that made this mark has certainly ended."""

    def beat(self) -> None:
        """Tell the others that this process lives; called from a thread, again and again."""

    def disturbed(self) -> None:
        """The storage was away: who is out of date may just not have been able to say anything."""

    def is_trusted(self) -> bool:
        """False if the others may take this process for dead."""

    def leave(self) -> None:
        """Tell the others that this process ends."""


class Local:
    """One host: the kernel says at once who lives; of processes in other containers by the locks that they hold.

    Args:
        owner: this process.
        lock: in a file that all of them share.
    """

    def __init__(self, owner: Owner, lock: LifeLock) -> None:
        self._owner, self._lock = owner, lock

    def mark(self) -> dict[str, Any]:
        return {**asdict(self._owner), "lock": self._lock.place}

    def lives(self, mark: Mapping[str, Any]) -> bool:
        owner = Owner.from_dict(mark)
        if owner == self._owner:
            return True
        seen = owner.lives()
        # Older versions hold no lock: who cannot be seen may live.
        return seen if seen is not None else "lock" not in mark or self._lock.is_held(int(mark["lock"]))

    def beat(self) -> None:
        """Nobody listens."""

    def disturbed(self) -> None:
        """Nothing depends on the storage."""

    def is_trusted(self) -> bool:
        return True

    def leave(self) -> None:
        """The kernel tells."""
        self._lock.close()


class Seats:
    """Many hosts: every process has a trial of its own in a study of supervisors, which it keeps alive by heartbeats.

    A process takes its seat before it claims anything and names it in its claims. When the heartbeats stop, another
    process vacates the seat, once and for all, and with it go all the claims: so there is one heartbeat for each
    process, however many candidates it runs, and none is claimed for ever by one that died between two steps.

    The age of a heartbeat is the database's business; no node's clock matters. As even that clock may jump, and as no
    process can send heartbeats while the database is away, a seat is vacated only if it is seen to be out of date
    twice, with so much time and no disturbance between that a living process would have sent a heartbeat.

    Args:
        storage: with heartbeats.
        owner: this process.
        heartbeat_s: between two heartbeats.
        grace_s: a seat whose last heartbeat is older is out of date.
    """

    def __init__(self, storage: BaseStorage, owner: Owner, *, heartbeat_s: float, grace_s: float) -> None:
        self._storage: Any = storage
        self._owner = owner
        self._heartbeat_s, self._grace_s = heartbeat_s, grace_s
        self._lock = threading.Lock()
        self._suspects: dict[int, float] = {}
        self._taken: set[int] = set()
        self._looked = -float("inf")
        self._beaten = _now()
        self._displaced = False
        self._study = _study(storage)
        self._seat = self._sit()

    def _sit(self) -> int:
        trial = optuna.trial.create_trial(state=TrialState.RUNNING, user_attrs={"owner": self._owner.name})
        seat: int = self._storage.create_new_trial(self._study, template_trial=trial)
        before = _now()
        self._storage.record_heartbeat(seat)
        self._beaten = before
        return seat

    def mark(self) -> dict[str, Any]:
        return {**asdict(self._owner), "seat": self._seat}

    def lives(self, mark: Mapping[str, Any]) -> bool:
        owner = Owner.from_dict(mark)
        if owner == self._owner or (seen := owner.lives()) is True:
            return True
        if seen is False:
            return False
        seat = int(mark["seat"])
        with self._lock:
            # Seats are numbered in the order in which they are taken: a later one is not known yet.
            is_new = seat > max(self._taken, default=-1)
            if is_new or time.monotonic() - self._looked > self._heartbeat_s:
                self._look()
            return seat in self._taken

    def _look(self) -> None:
        now = time.monotonic()
        stale = set(self._storage._get_stale_trial_ids(self._study)) - {self._seat}
        self._suspects = {seat: since for seat, since in self._suspects.items() if seat in stale}
        for seat in stale:
            if now - self._suspects.setdefault(seat, now) >= 2 * self._heartbeat_s:
                self._vacate(seat)
        running = self._storage.get_all_trials(self._study, deepcopy=False, states=(TrialState.RUNNING,))
        self._taken = {trial._trial_id for trial in running}
        self._looked = now

    def _vacate(self, seat: int) -> None:
        try:
            self._storage.set_trial_state_values(seat, state=TrialState.FAIL)
        except optuna.exceptions.UpdateFinishedTrialError:
            return  # Somebody else was faster.
        _log.warning(
            "a supervisor that has sent no heartbeat for %.0f s is given up; others run its work", self._grace_s
        )

    def disturbed(self) -> None:
        """The database was away: whoever is out of date may just not have been able to say anything."""
        with self._lock:
            self._suspects.clear()

    def beat(self) -> None:
        before = _now()
        self._storage.record_heartbeat(self._seat)
        if self._storage.get_trial(self._seat).state == TrialState.RUNNING:
            self._beaten = before
            return
        _log.warning("the other supervisors took this one for dead; it goes on under a new name")
        self._displaced = True  # claims made under the old name are others' now: whoever holds one is to be asked
        self._seat = self._sit()

    def is_trusted(self) -> bool:
        return not self._displaced and _now() - self._beaten < self._grace_s

    def leave(self) -> None:
        try:
            self._storage.set_trial_state_values(self._seat, state=TrialState.PRUNED)
        except optuna.exceptions.UpdateFinishedTrialError:
            return


def _study(storage: BaseStorage) -> int:
    try:
        return storage.get_study_id_from_name(_SEATS)
    except KeyError:
        pass
    try:
        return storage.create_new_study([StudyDirection.MINIMIZE], _SEATS)
    except optuna.exceptions.DuplicatedStudyError:
        return storage.get_study_id_from_name(_SEATS)


def _now() -> float:
    """Seconds that also pass while the machine is suspended."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)
