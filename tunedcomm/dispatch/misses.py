"""Counts calls of problems that were not tuned, and notes them in a file for `tunedcomm tune --from-misses`.

Whether a problem is a miss is decided when its plan is made. Only the launch of a missed problem is wrapped, by one
that adds to a counter; a tuned problem's launch is left as it is. Counters reach the file from a thread of their own
and when communicators are released, which is also done at exit. Nothing here ever raises into a call: a file that
cannot be written costs one warning.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tunedcomm import settings
from tunedcomm.db import misses as miss_log
from tunedcomm.db.engine import warn_once
from tunedcomm.db.misses import HardKey, Miss
from tunedcomm.db.records import utc_now
from tunedcomm.errors import DatabaseAccessError
from tunedcomm.spec import Problem, why_no_kernel

if TYPE_CHECKING:
    from tunedcomm.dispatch.communicator import Communicator

logger = logging.getLogger("tunedcomm")

# Problems that one process counts: a program that never calls the same size twice must not fill memory or disk.
MAX_PROBLEMS = 1024
_PERIOD_S = 30.0
# At exit the thread may be stuck in a file system that does not answer.
_PATIENCE_S = 2.0


@dataclass(slots=True, eq=False)
class Counter:
    """Calls of one problem, and how many of them the file knows. Threads may lose a count to each other, no more."""

    path: Path
    hard_key: HardKey
    problem: Problem
    source: str
    count: int = 0
    written: int = 0


class _Counters:
    """Every counter of this process, and the thread that writes them down."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.counters: dict[tuple[Path, HardKey, Problem], Counter] = {}
        self.thread: threading.Thread | None = None
        self.refused: set[Path] = set()

    def counter(self, path: Path, hard_key: HardKey, problem: Problem, source: str) -> Counter | None:
        """The problem's counter, made at its first plan; None if there are too many already."""
        key = (path, hard_key, problem)
        found = self.counters.get(key)
        if found is None:
            if len(self.counters) >= MAX_PROBLEMS:
                logger.info("%s is not counted as untuned: %d problems are already", problem, MAX_PROBLEMS)
                return None
            found = self.counters[key] = Counter(path, hard_key, problem, source)
            if self.thread is None:
                self.thread = threading.Thread(target=self._run, name="tunedcomm-misses", daemon=True)
                with contextlib.suppress(RuntimeError):  # no more threads, or the interpreter is ending
                    self.thread.start()
        found.source = source
        return found

    def _run(self) -> None:
        while True:
            time.sleep(_PERIOD_S)
            self.flush(everything=False)

    def flush(self, *, everything: bool) -> None:
        """Write down what has been counted since; without `everything` only what has doubled.

        So a process that runs for weeks writes a few dozen lines a problem, and one that is killed loses less than
        half of its counts besides those of the last period.
        """
        if not self.lock.acquire(timeout=_PATIENCE_S):
            return
        try:
            due: dict[Path, list[tuple[Counter, int]]] = {}
            for counter in list(self.counters.values()):
                count = counter.count
                if count > counter.written and (everything or count >= 2 * counter.written):
                    due.setdefault(counter.path, []).append((counter, count))
            for path, counted_now in due.items():
                self._write(path, counted_now)
        finally:
            self.lock.release()

    def _write(self, path: Path, due: list[tuple[Counter, int]]) -> None:
        if path in self.refused:
            return
        now = utc_now()
        misses = [
            Miss(
                problem=found.problem,
                hard_key=found.hard_key,
                count=count - found.written,
                source=found.source,
                last_seen=now,
            )
            for found, count in due
        ]
        try:
            miss_log.append(path, misses)
        except (OSError, ValueError) as error:  # ValueError: a path that is none
            self.refused.add(path)
            logger.warning(
                "untuned problems are not noted any more: cannot add to %s: %s; set TUNEDCOMM_MISS_LOG to a file that "
                "can be written, or to 0",
                path,
                error,
            )
            return
        for counter, count in due:
            counter.written = count


_counters = _Counters()


def _forget() -> None:
    """Start empty counters in a forked child: the parent writes its own, and its thread does not run here."""
    global _counters  # noqa: PLW0603
    _counters = _Counters()


os.register_at_fork(after_in_child=_forget)


def counter(communicator: Communicator, problem: Problem, source: str) -> Counter | None:
    """The counter of a missed problem's calls if it is worth tuning, else None.

    All ranks meet the same misses, the first of them counts. What no kernel can run is not worth tuning.

    Args:
        communicator: of the group that calls it.
        problem: what is called.
        source: the rule that chose what is launched.
    """
    if communicator.rank != 0 or settings.miss_log() is False:
        return None
    if why_no_kernel(problem, communicator.limits, "any") is not None:
        return None
    try:
        path = miss_log.log_path()
    except DatabaseAccessError as error:
        warn_once(str(error))
        return None
    return _counters.counter(path, communicator.environment.hard_key, problem, source)


def flush() -> None:
    """Write down every count. Called when communicators are released, and so at exit."""
    _counters.flush(everything=True)
