"""What a gang tells the supervisor: one JSON line per event, appended to a file in the gang's folder.

A file and not a pipe: it outlives both ends, so that nothing that was measured is lost when either is killed.

Events, all with `event` (the name) and `time` (seconds since the gang began):

    ready       environment, limits
    problem     problem, trials (planned)              a search begins
    trial       problem, candidate, final              a candidate is about to be bound
    run         problem, candidate                     every rank has bound it; launches begin
    result      the fields of a trial record           how it ended
    done        problem                                a search ended
    work        what                                   a sign of life in a long step
    end         reason ("done", "budget", "unusable")  nothing follows

Besides, a rank on which a launch raised leaves `failure-<rank>.json` before anything else happens to it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

__all__ = ["EVENTS_FILE", "EventReader", "EventWriter", "read_failures", "write_failure"]

EVENTS_FILE = "events.jsonl"


class EventWriter:
    """Appends events; each is one `write` to an unbuffered file, so a line is in the kernel's hands when it returns."""

    def __init__(self, folder: Path) -> None:
        self._file = (folder / EVENTS_FILE).open("ab", buffering=0)
        self._begin = time.monotonic()

    def write(self, event: str, data: Mapping[str, Any] | None = None) -> None:
        """Append one event."""
        line = {"event": event, "time": round(time.monotonic() - self._begin, 4), **(data or {})}
        self._file.write(json.dumps(line).encode() + b"\n")


class EventReader:
    """Reads what was appended since the last call; a line that is not yet whole waits for the next one."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / EVENTS_FILE
        self._offset = 0

    def read(self) -> list[dict[str, Any]]:
        """New events, oldest first."""
        if not self._path.exists():
            return []
        with self._path.open("rb") as file:
            file.seek(self._offset)
            data = file.read()
        whole = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        return [json.loads(line) for line in whole.splitlines()]


def write_failure(folder: Path, rank: int, text: str) -> None:
    """Leave the error of a launch for the supervisor: the other ranks may never answer again."""
    (folder / f"failure-{rank}.json").write_text(json.dumps({"rank": rank, "error": text}), encoding="utf-8")


def read_failures(folder: Path) -> list[str]:
    """What `write_failure` left, as sentences, by rank."""
    texts = []
    for path in sorted(folder.glob("failure-*.json")):
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
        except ValueError:
            continue  # the rank died while it wrote
        texts.append(f"rank {data['rank']}: {data['error']}")
    return texts
