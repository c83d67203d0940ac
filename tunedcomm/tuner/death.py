"""Why a gang died, from what its ranks and its launcher left."""

from __future__ import annotations

import contextlib
import json
import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tunedcomm.tuner.gang.protocol import read_failures

__all__ = ["Death", "read_death", "write_exits"]

_MAX_ERROR = 500
_EXITS_FILE = "exits.json"
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


def write_exits(folder: Path, exits: Sequence[tuple[int, int]]) -> None:
    """Leave which ranks ended by themselves and with which code, minus a signal's number where one killed it."""
    (folder / _EXITS_FILE).write_text(json.dumps(list(exits)), encoding="ascii")


def _read_exits(folder: Path) -> list[tuple[int, int]]:
    try:
        return [(int(rank), int(code)) for rank, code in json.loads((folder / _EXITS_FILE).read_text("ascii"))]
    except (OSError, ValueError):  # the launcher did not get that far
        return []


def read_death(folder: Path, code: int) -> Death:
    """What ended a gang.

    Args:
        folder: of the gang.
        code: with which its launcher ended; minus a signal's number where one killed it.
    """
    failed = [(rank, exit_code) for rank, exit_code in _read_exits(folder) if exit_code]
    # A signal is the cause, whoever was seen dead first: the others raise when a peer is gone.
    killed = [(rank, -exit_code) for rank, exit_code in failed if exit_code < 0]
    if killed:
        text = f"rank {killed[0][0]} was killed by {signal.Signals(killed[0][1]).name}"
        return Death(text, all(number == signal.SIGKILL for _, number in killed))
    if not failed and code < 0:
        return Death(f"it was killed by {signal.Signals(-code).name}", -code == signal.SIGKILL)
    root = failed[0] if failed else None
    output = ""
    with contextlib.suppress(OSError):
        output = (folder / "output.txt").read_text(encoding="utf-8", errors="replace")
    parts = [f"rank {root[0]} ended with exit code {root[1]}" if root else f"the launcher ended with code {code}"]
    parts += read_failures(folder) or [_first_error(output, str(root[0]) if root else None)]
    return Death("; ".join(part for part in parts if part), killed=False)


def _first_error(output: str, rank: str | None) -> str:
    """The exception that ended `rank`, or the first one at all: later ones are its echo on other ranks."""
    found = [match for line in output.splitlines() if (match := _EXCEPTION.match(line.strip()))]
    mine = [match for match in found if match[1] == rank] or found
    return mine[0][2][:_MAX_ERROR] if mine else ""
