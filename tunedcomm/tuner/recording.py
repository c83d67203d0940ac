"""Recordings: trials in a text file of JSON lines, small enough to be kept beside the tests that replay them.

The first line holds the environment; then comes a line for each problem, followed by one for each of its trials.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable
from datetime import datetime
from pathlib import Path
from typing import Any

from tunedcomm.db.records import TrialRecord, canonical_json
from tunedcomm.hardware import Environment
from tunedcomm.spec import Problem
from tunedcomm.tuner.replay import Replay

__all__ = ["read_recording", "write_recording"]

_FORMAT = 1
# Left out of a line where they are empty.
_OPTIONAL = (
    "reason",
    "latency_p10_us",
    "latency_p50_us",
    "latency_p90_us",
    "samples",
    "baseline_p50_us",
    "error",
    "final",
)


def write_recording(path: Path, records: Iterable[TrialRecord]) -> None:
    """Write the newest trials of one environment, sorted; compressed if the name ends in `.gz`.

    The same trials in any order give the same bytes. Numbers are kept to six digits, times to the second.

    Raises:
        ValueError: see `Replay`.
    """
    replay = Replay(records)
    lines: list[dict[str, Any]] = [{"format": _FORMAT, "environment": replay.environment.to_dict()}]
    for problem in replay.problems():
        lines.append({"problem": problem.to_dict()})
        lines += sorted(map(_trial_line, replay.records(problem)), key=canonical_json)
    data = "".join(f"{canonical_json(line)}\n" for line in lines).encode()
    # No time in the header of the compressed file: the same trials are the same bytes.
    path.write_bytes(gzip.compress(data, mtime=0) if path.suffix == ".gz" else data)


def _trial_line(record: TrialRecord) -> dict[str, Any]:
    values = {name: getattr(record, name) for name in _OPTIONAL}
    kept = {name: _round(value) for name, value in values.items() if value not in (None, "", False)}
    return {
        "variant": record.variant,
        "config": record.config,
        "numerics": record.numerics,
        "source_hash": record.source_hash,
        "status": record.status,
        "created_at": record.created_at.isoformat(timespec="seconds"),
        **kept,
    }


def _round(value: Any) -> Any:
    return float(f"{value:.6g}") if isinstance(value, float) else value


def read_recording(path: Path) -> list[TrialRecord]:
    """Inverse of `write_recording`.

    Raises:
        ValueError: not such a file, or of a later version.
    """
    data = path.read_bytes()
    text = (gzip.decompress(data) if path.suffix == ".gz" else data).decode()
    lines = [json.loads(line) for line in text.splitlines()]
    if not lines or lines[0].get("format") != _FORMAT:
        raise ValueError(f"{path} is no recording of format {_FORMAT}; write one with write_recording")
    environment = Environment.from_dict(lines[0]["environment"])
    records: list[TrialRecord] = []
    problem: Problem | None = None
    for line in lines[1:]:
        if "problem" in line:
            problem = Problem.from_dict(line["problem"])
            continue
        if problem is None:
            raise ValueError(f"{path}: a trial stands before the first problem: {line}")
        created_at = datetime.fromisoformat(line["created_at"])
        records.append(
            TrialRecord(**{**line, "problem": problem, "environment": environment, "created_at": created_at})
        )
    return records
