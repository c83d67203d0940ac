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
from pathlib import Path

from tunedcomm import settings
from tunedcomm.db import misses as miss_log
from tunedcomm.db.misses import Counter, HardKey, Note
from tunedcomm.db.targets import warn_once
from tunedcomm.db.values import utc_now
from tunedcomm.dispatch.communicator import Communicator
from tunedcomm.dispatch.decide import MISSES
from tunedcomm.errors import DatabaseAccessError
from tunedcomm.spec import NumericsPolicy, Problem, widest

logger = logging.getLogger("tunedcomm")

# Problems that one process counts: a program that never calls the same size twice must not fill memory or disk.
MAX_PROBLEMS = 1024
_PERIOD_S = 30.0
# At exit the thread may be stuck in a file system that does not answer.
_PATIENCE_S = 2.0


_counters: dict[tuple[Path, HardKey, Problem], Counter] = {}
_refused: set[Path] = set()
_lock = threading.Lock()


def _forget() -> None:
    """Start anew in a forked child: the parent writes its own counters, and its thread does not run here."""
    global _lock  # noqa: PLW0603
    _lock = threading.Lock()
    _counters.clear()
    _refused.clear()


os.register_at_fork(after_in_child=_forget)


def note_problem(
    communicator: Communicator, problem: Problem, source: str, policy: NumericsPolicy = "default"
) -> Counter | None:
    """Note a problem that is bound; the counter of its calls, or None where they are not counted.

    Rank 0 counts for all, for ranks meet the same problems. Once `MAX_PROBLEMS` are counted, new ones are not. The
    readers of counts leave out problems that no kernel can run: to find that out takes longer than a call.

    Args:
        communicator: of the group that calls it. The problem is added to `communicator.noted` if that is a dict.
        problem: what is called.
        source: the rule that chose what is launched.
        policy: numerics classes that the caller accepts.
    """
    noted = communicator.noted
    if communicator.rank != 0 or (noted is None and source not in MISSES):
        return None
    found = _of_log(communicator, problem, source) if source in MISSES and settings.miss_log() is not False else None
    if noted is None:
        return found
    known = noted.get(problem)
    if source in MISSES and found is None:  # counted for the note alone
        earlier = None if known is None else known.counter
        found = earlier or Counter(Path(os.devnull), communicator.environment.hard_key, problem, source)
    policy = policy if known is None else widest([known.policy, policy])
    if known is None or known.counter is not found:
        known = noted[problem] = Note(found, 0 if found is None else found.count, policy)
    known.policy = policy
    return found


def _of_log(communicator: Communicator, problem: Problem, source: str) -> Counter | None:
    """The counter whose calls the file is told of."""
    try:
        key = (miss_log.log_path(), communicator.environment.hard_key, problem)
    except DatabaseAccessError as error:
        warn_once(str(error))
        return None
    if key not in _counters and len(_counters) >= MAX_PROBLEMS:
        logger.info("%s is not counted as untuned: %d problems are already", problem, MAX_PROBLEMS)
        return None
    if not _counters:
        with contextlib.suppress(RuntimeError):  # no more threads, or the interpreter is ending
            threading.Thread(target=_keep_writing, name="tunedcomm-misses", daemon=True).start()
    found = _counters.setdefault(key, Counter(*key, source))
    found.source = source
    return found


def _keep_writing() -> None:
    while True:
        time.sleep(_PERIOD_S)
        flush(everything=False)


def flush(*, everything: bool = True) -> None:
    """Write down what has been counted since; without `everything` only what has doubled.

    So a process that runs for weeks writes a few dozen lines a problem, and one that is killed loses less than half of
    its counts besides the last period's. Called when communicators are released, and so at exit.
    """
    if not _lock.acquire(timeout=_PATIENCE_S):
        return
    try:
        due: dict[Path, list[tuple[Counter, int]]] = {}
        for counter in list(_counters.values()):
            count = counter.count
            if count > counter.written and (everything or count >= 2 * counter.written):
                due.setdefault(counter.path, []).append((counter, count))
        for path in due.keys() - _refused:
            _write(path, due[path])
    finally:
        _lock.release()


def _write(path: Path, due: list[tuple[Counter, int]]) -> None:
    now = utc_now()
    try:
        miss_log.append(path, [counter.miss(count, now) for counter, count in due])
    except (OSError, ValueError) as error:  # ValueError: a path that is none
        _refused.add(path)
        logger.warning(
            "untuned problems are not noted any more: cannot add to %s: %s; set TUNEDCOMM_MISS_LOG to a file that can "
            "be written, or to 0",
            path,
            error,
        )
        return
    for counter, count in due:
        counter.written = count
