"""What looking at a database found."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

__all__ = ["Finding", "Level"]

Level: TypeAlias = Literal["ok", "warn", "fail"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        name: what was looked at.
        level: `ok`, `warn` (it works, and somebody should know) or `fail` (the database is not sound).
        detail: what was found.
        mend: what to do; "" where all is well.
    """

    name: str
    level: Level
    detail: str
    mend: str = ""
