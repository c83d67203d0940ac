"""Waiting for a database that is away or locked instead of losing a night's sweep."""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from tunedcomm.errors import DatabaseAwayError, DatabaseBusyError

__all__ = ["Patience"]

_FIRST_WAIT_S = 0.05
_LONGEST_WAIT_S = 5.0
_GROWTH = 1.6

T = TypeVar("T")
_log = logging.getLogger("tunedcomm")


class Patience:
    """Retries what fails because the database is away or locked; every other error passes at once.

    An operation is one transaction and may be run several times. When a connection breaks during a commit, nobody can
    say whether it was carried out; so an operation that adds something is told that it runs again, and looks for what
    the attempt before has left.

    Args:
        limit_s: after so many seconds the error passes; 0 retries nothing.
        clock: seconds that never jump.
        sleep: waits so many seconds.
    """

    def __init__(
        self,
        limit_s: float,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._limit_s = limit_s
        self._clock = clock
        self._sleep = sleep
        self._lock = threading.Lock()
        self._last_failure: float | None = None

    def run(self, operation: Callable[[bool], T]) -> T:
        """Run `operation(again)`; `again` is true where an attempt before may have been carried out.

        Raises:
            DatabaseAwayError: the server was away for longer than the limit.
            DatabaseBusyError: another writer held the database for longer than the limit.
        """
        begin = self._clock()
        wait = _FIRST_WAIT_S
        attempts = 0
        while True:
            try:
                result = operation(attempts > 0)
            except (DatabaseAwayError, DatabaseBusyError) as error:
                with self._lock:
                    self._last_failure = self._clock()
                waited = self._clock() - begin
                if waited >= self._limit_s:
                    raise
                if attempts == 0:
                    _log.warning("%s. Waiting for it, for up to %.0f s", error, self._limit_s)
                attempts += 1
                # Scattered, so that a cluster does not come back all at once.
                self._sleep(min(wait * random.uniform(0.5, 1.0), self._limit_s - waited))  # noqa: S311
                wait = min(wait * _GROWTH, _LONGEST_WAIT_S)
                continue
            if attempts:
                _log.info("the database is back after %.1f s", self._clock() - begin)
            return result

    @property
    def undisturbed_s(self) -> float:
        """Seconds since the database was last away or locked; infinity if it never was."""
        with self._lock:
            return float("inf") if self._last_failure is None else self._clock() - self._last_failure
