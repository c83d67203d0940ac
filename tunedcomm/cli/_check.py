"""One line of `tunedcomm doctor`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

__all__ = ["Check", "Level"]

Level: TypeAlias = Literal["ok", "warn", "fail"]


@dataclass(frozen=True, slots=True)
class Check:
    """One line of the doctor's answer.

    Attributes:
        name: what was looked at.
        level: `ok`, `warn` (works, but not as well as it could) or `fail`.
        detail: what was found.
        fix: what to do; "" where all is well.
    """

    name: str
    level: Level
    detail: str
    fix: str = ""
