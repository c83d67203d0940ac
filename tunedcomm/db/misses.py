"""The file of problems that dispatch met untuned: JSON lines that many processes add to, and one command reads.

A line is one `write` to a file opened for appending, so that lines of several processes do not mix and nobody waits for
a lock. Each says how often one problem was called since the process' last line about it; a reader adds them up. Lines
may still be torn or be somebody else's: reading trusts none of them and skips what makes no sense.
"""

from __future__ import annotations

import contextlib
import json
import os
import stat
import time
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any, TypeAlias

from tunedcomm import settings
from tunedcomm.db.engine import data_directory, parse_target
from tunedcomm.db.layers import user_database
from tunedcomm.db.records import canonical_json, int_of, parse_problem, text_of, time_of
from tunedcomm.errors import DatabaseAccessError
from tunedcomm.hardware import HARD_FIELDS
from tunedcomm.spec import Problem, format_shape

__all__ = ["MAX_BYTES", "HardKey", "Miss", "append", "compact", "log_path", "read"]

HardKey: TypeAlias = tuple[Any, ...]

# A file of this size is not added to: some 20,000 lines, far more than anybody tunes.
MAX_BYTES = 8 << 20
# Below PIPE_BUF: a write of this size is not split.
_MAX_LINE = 4000
# A process has the file open for the time of a few writes.
_WRITERS_DONE_S = 0.2
# What a reader that was killed has moved away is taken up by another one after this time.
_LEFT_BEHIND_S = 60.0
_MAX_COUNT = 2**63


@dataclass(frozen=True, slots=True, kw_only=True)
class Miss:
    """A problem that was called without having been tuned.

    Attributes:
        problem: what was called.
        hard_key: hard fields of the environment, as `Environment.hard_key`.
        count: calls; in graph mode captures, for replays are not seen.
        source: where the candidate came from instead: `interpolated`, `borrowed`, `heuristic` or `library`.
        last_seen: when it was last counted.
    """

    problem: Problem
    hard_key: HardKey
    count: int
    source: str
    last_seen: datetime


def log_path() -> Path:
    """Where misses are noted: TUNEDCOMM_MISS_LOG, else beside the user database.

    A database on a server has no place beside it: the user's data directory stands in.

    Raises:
        DatabaseAccessError: there is no such place, for the user has no home directory.
    """
    named = settings.miss_log()
    if isinstance(named, str):
        return Path(os.path.expanduser(named))  # noqa: PTH111 - leaves `~` alone where there is no home
    try:
        path = parse_target(user_database()).path
    except DatabaseAccessError:  # whoever opens that database says so
        path = None
    return (data_directory() if path is None else path.parent) / "misses.jsonl"


def append(path: Path, misses: Iterable[Miss]) -> None:
    """Add one line a miss. The directory is made if it is the user's data directory, which is ours.

    Raises:
        OSError: the file cannot be written, is not a regular file, or has reached `MAX_BYTES`.
    """
    with contextlib.suppress(DatabaseAccessError):  # no home directory: the file was named
        if path.parent == data_directory():
            path.parent.mkdir(parents=True, exist_ok=True)
    # Not blocking: opening a FIFO would wait for a reader.
    file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK, 0o666)
    try:
        found = os.fstat(file)
        if not stat.S_ISREG(found.st_mode):
            raise OSError("not a regular file")
        if found.st_size >= MAX_BYTES:
            raise OSError(f"it has reached {MAX_BYTES >> 20} MiB; `tunedcomm tune --from-misses` makes it smaller")
        # Behind a line that was torn when the disk was full: ours begins on a line of its own. Another process in the
        # middle of a write looks the same and costs an empty line.
        torn = found.st_size > 0 and os.pread(file, 1, found.st_size - 1) != b"\n"
        for miss in misses:
            line = b"\n" * torn + _line(miss)
            if len(line) <= _MAX_LINE and os.write(file, line) < len(line):
                raise OSError("no space left for a whole line")
            torn = False
    finally:
        os.close(file)


def _line(miss: Miss) -> bytes:
    data = {
        "problem": {**miss.problem.to_dict(), "shape": format_shape(miss.problem.shape)},
        "environment": dict(zip(HARD_FIELDS, miss.hard_key, strict=True)),
        "count": miss.count,
        "source": miss.source,
        "last_seen": miss.last_seen.isoformat(timespec="seconds"),
    }
    return canonical_json(data).encode("ascii") + b"\n"


def read(path: Path) -> tuple[list[Miss], int]:
    """Every problem of every environment once, most called first, and the number of lines that made no sense.

    A file that was never made holds nothing.

    Raises:
        OSError: the file cannot be read.
    """
    lines: list[bytes] = []
    for part in (path, *_moved_away(path)):
        with contextlib.suppress(FileNotFoundError):
            lines += _read_lines(part)
    return _merge(lines)


def _read_lines(path: Path) -> list[bytes]:
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    with os.fdopen(file, "rb") as stream:
        if not stat.S_ISREG(os.fstat(file).st_mode):
            raise OSError(f"{path} is not a regular file")
        # Writers check the size before they write, so a few lines more than this may be there.
        return stream.read(2 * MAX_BYTES).splitlines()


def _merge(lines: Iterable[bytes]) -> tuple[list[Miss], int]:
    found: dict[tuple[HardKey, Problem], Miss] = {}
    skipped = 0
    for line in filter(None, lines):
        try:
            miss = _parse(line)
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
            skipped += 1
            continue
        known = found.get((miss.hard_key, miss.problem))
        if known is not None:
            newer = max(known, miss, key=lambda m: m.last_seen)
            miss = replace(newer, count=min(known.count + miss.count, _MAX_COUNT - 1))
        found[miss.hard_key, miss.problem] = miss
    return sorted(found.values(), key=lambda m: (-m.count, m.problem, str(m.hard_key))), skipped


def _parse(line: bytes) -> Miss:
    if len(line) > _MAX_LINE:
        raise ValueError("the line is too long")
    data: Mapping[str, Any] = json.loads(line)
    environment: Mapping[str, Any] = data["environment"]
    count = int_of(data["count"], "count", low=1)
    hard_key = tuple(environment[name] for name in HARD_FIELDS)
    if count >= _MAX_COUNT or not all(isinstance(value, (str, int)) for value in hard_key):
        raise ValueError("a value is out of range")
    return Miss(
        problem=parse_problem(data["problem"]),
        hard_key=hard_key,
        count=count,
        source=text_of(data["source"], "source"),
        last_seen=time_of(data["last_seen"]),
    )


def _moved_away(path: Path) -> list[Path]:
    """What another reader moved away to compact and left behind."""
    now = time.time()
    found = []
    for left in sorted(path.parent.glob(f"{path.name}.*.old")):
        with contextlib.suppress(OSError):
            found += [left] if now - left.stat().st_ctime > _LEFT_BEHIND_S else []
    return found


def compact(path: Path, *, without: Collection[tuple[HardKey, Problem]] = ()) -> None:
    """Replace the file by one line a problem; lines that are added meanwhile are kept.

    The file is moved away, so that writers begin a new one, and what it held is added to that. A reader that is killed
    in between leaves it behind for the next one.

    Args:
        path: the file.
        without: problems to leave out, each with its environment's hard key.

    Raises:
        OSError: the directory cannot be written.
    """
    moved = path.with_name(f"{path.name}.{os.getpid()}.{time.time_ns()}.old")
    parts: list[Path] = []
    for part in (path, *_moved_away(path)):
        with contextlib.suppress(FileNotFoundError):
            target = moved.with_name(f"{moved.name[: -len('.old')]}.{len(parts)}.old")
            part.rename(target)
            parts.append(target)
    if not parts:
        return
    time.sleep(_WRITERS_DONE_S)
    misses, _ = _merge(line for part in parts for line in _read_lines(part))
    append(path, [miss for miss in misses if (miss.hard_key, miss.problem) not in without])
    for part in parts:
        part.unlink()
