"""The time that a sweep may take."""

from __future__ import annotations

import math
from collections.abc import Callable

__all__ = ["Budget"]


class Budget:
    """Counts from now.

    Args:
        clock: seconds.
        seconds: how many there are; None is no bound.
    """

    def __init__(self, clock: Callable[[], float], seconds: float | None) -> None:
        self._clock = clock
        self._seconds = math.inf if seconds is None else seconds
        self._end = clock() + self._seconds

    def left(self, share: float = 1.0) -> float:
        """Seconds left of a share of it."""
        return self._end - self._seconds * (1 - share) - self._clock() if math.isfinite(self._end) else math.inf
