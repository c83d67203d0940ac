"""Why a gang died, from what its ranks and its launcher left."""

from __future__ import annotations

import re
import signal
from dataclasses import dataclass
from pathlib import Path

from tunedcomm.tuner.channel import read_failures

__all__ = ["Death", "read_death"]

_MAX_ERROR = 500
# The launcher's summary: a rank with its exit code, minus a signal's number where one killed it.
_EXIT = re.compile(r"rank\s*:\s*(\d+).*?exitcode\s*:\s*(-?\d+)", re.DOTALL)
_ROOT_CAUSE = "Root Cause"
_EXCEPTION = re.compile(r"(?:\[rank(\d+)\]:\s*)?([\w.]*(?:Error|Exception|Interrupt)\b.*)")


@dataclass(frozen=True, slots=True)
class Death:
    """How a gang died.

    Attributes:
        text: a sentence.
        killed: SIGKILL, which nothing that a candidate does raises: a person, or the kernel when memory ran out.
    """

    text: str
    killed: bool


def read_death(folder: Path, code: int) -> Death:
    """What ended a gang.

    Args:
        folder: of the gang.
        code: with which its launcher ended; minus a signal's number where one killed it.
    """
    output = (folder / "output.txt").read_text(encoding="utf-8", errors="replace")
    summary = output[output.find(_ROOT_CAUSE) :] if _ROOT_CAUSE in output else ""
    exits = [(int(rank), int(exit_code)) for rank, exit_code in _EXIT.findall(output)]
    # The launcher ends the other ranks by SIGTERM; any other signal is the cause, whoever was seen dead first.
    killed = [(rank, -exit_code) for rank, exit_code in exits if exit_code < 0 and -exit_code != signal.SIGTERM]
    if killed:
        text = f"rank {killed[0][0]} was killed by {signal.Signals(killed[0][1]).name}"
        return Death(text, all(number == signal.SIGKILL for _, number in killed))
    root = _EXIT.search(summary)
    if root is None and code < 0:
        return Death(f"it was killed by {signal.Signals(-code).name}", -code == signal.SIGKILL)
    parts = [f"rank {root[1]} ended with exit code {root[2]}" if root else f"the launcher ended with code {code}"]
    parts += read_failures(folder) or [_first_error(output, root[1] if root else None)]
    return Death("; ".join(part for part in parts if part), killed=False)


def _first_error(output: str, rank: str | None) -> str:
    """The exception that ended `rank`, or the first one at all: later ones are its echo on other ranks."""
    found = [match for line in output.splitlines() if (match := _EXCEPTION.match(line.strip()))]
    mine = [match for match in found if match[1] == rank] or found
    return mine[0][2][:_MAX_ERROR] if mine else ""
