"""Warnings that a process gives once, however often their cause is met."""

from __future__ import annotations

import logging

__all__ = ["warn_once"]

_log = logging.getLogger("tunedcomm")
_warned: set[str] = set()


def warn_once(message: str) -> None:
    """Log a warning, unless this very text was logged before."""
    if message not in _warned:
        _warned.add(message)
        _log.warning("%s", message)
