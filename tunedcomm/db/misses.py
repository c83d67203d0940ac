"""The file of problems that dispatch met untuned, which many processes add to and one command reads.

A line says how often one problem was called since the process' last line about it; a reader adds them up.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import json
import os
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any, TypeAlias

from tunedcomm import settings
from tunedcomm.db.sidecar import INVALID_LINE, MAX_LINE, beside_user_database, line_of, opened, read_lines, write_lines
from tunedcomm.db.values import int_of, parse_problem, row_of_problem, text_of, time_of
from tunedcomm.hardware import HARD_FIELDS
from tunedcomm.spec import NumericsPolicy, Problem

HardKey: TypeAlias = tuple[Any, ...]

_MAX_COUNT = 2**63


@dataclass(frozen=True, slots=True, kw_only=True)
class Miss:
    """A problem that was called without having been tuned.

    Attributes:
        hard_key: of the environment, as `Environment.hard_key`.
        count: calls; in graph mode captures, for replays are not seen.
        source: where the candidate came from instead: `interpolated`, `borrowed`, `heuristic` or `library`.
        last_seen: time of the last count.
    """

    problem: Problem
    hard_key: HardKey
    count: int
    source: str
    last_seen: datetime


@dataclass(slots=True, eq=False)
class Counter:
    """Calls of one problem, and how many of them the file knows. Threads may lose a count to each other, no more."""

    path: Path
    hard_key: HardKey
    problem: Problem
    source: str
    count: int = 0
    written: int = 0

    def miss(self, count: int, now: datetime) -> Miss:
        """A miss with the calls, of the first `count`, that the file does not know yet."""
        unwritten = count - self.written
        return Miss(problem=self.problem, hard_key=self.hard_key, count=unwritten, source=self.source, last_seen=now)


@dataclass(slots=True, eq=False)
class Note:
    """A problem that was called while somebody wants to tune it.

    Attributes:
        counter: of its calls; None for one that is tuned.
        before: calls that were counted earlier.
        policy: the widest numerics policy that it was called with.
    """

    counter: Counter | None
    before: int
    policy: NumericsPolicy

    @property
    def count(self) -> int:
        """Calls since."""
        return 0 if self.counter is None else self.counter.count - self.before


def log_path() -> Path:
    """The path of the log: TUNEDCOMM_MISS_LOG, else beside a user database that is a file, else in the data directory.

    Raises:
        DatabaseAccessError: the user has no home directory.
    """
    return _log_path(*map(os.environ.get, _VARIABLES))


# What the path depends on: calls at new sizes ask for it, and to work it out takes a tenth of such a call.
_VARIABLES = ("TUNEDCOMM_MISS_LOG", "TUNEDCOMM_DB", "HOME", "XDG_DATA_HOME")


@functools.lru_cache(maxsize=8)
def _log_path(*variables: str | None) -> Path:
    named = settings.miss_log()
    if isinstance(named, str):
        return Path(os.path.expanduser(named))  # noqa: PTH111 - leaves `~` alone where there is no home
    return beside_user_database("misses.jsonl")


def append(path: Path, misses: Iterable[Miss]) -> None:
    """Add one line a miss; see `write_lines`."""
    write_lines(path, map(_line, misses), smaller="`tunedcomm tune --from-misses` makes it smaller")


def _line(miss: Miss) -> bytes:
    record = {
        "problem": row_of_problem(miss.problem),
        "environment": dict(zip(HARD_FIELDS, miss.hard_key, strict=True)),
        "count": miss.count,
        "source": miss.source,
        "last_seen": miss.last_seen.isoformat(timespec="seconds"),
    }
    return line_of(record)


def read(path: Path) -> tuple[list[Miss], int]:
    """Every problem of every environment once, most called first, and the number of invalid lines.

    A missing file is read as an empty one.

    Raises:
        OSError: the file cannot be read.
    """
    try:
        with opened(path, os.O_RDONLY, fcntl.LOCK_SH) as file:
            return _merge(file)
    except FileNotFoundError:
        return [], 0


def _merge(file: int) -> tuple[list[Miss], int]:
    found: dict[tuple[HardKey, Problem], Miss] = {}
    skipped = 0
    for line in read_lines(file):
        try:
            miss = _parse(line)
        except INVALID_LINE:
            skipped += 1
            continue
        known = found.get((miss.hard_key, miss.problem))
        if known is not None:
            newer = max(known, miss, key=lambda m: m.last_seen)
            miss = replace(newer, count=min(known.count + miss.count, _MAX_COUNT - 1))
        found[miss.hard_key, miss.problem] = miss
    return sorted(found.values(), key=lambda m: (-m.count, m.problem, str(m.hard_key))), skipped


def _parse(line: bytes) -> Miss:
    if len(line) > MAX_LINE:
        raise ValueError("the line is too long")
    data: Mapping[str, Any] = json.loads(line)
    environment: Mapping[str, Any] = data["environment"]
    hard_key = tuple(environment[name] for name in HARD_FIELDS)
    if not all(isinstance(value, (str, int)) for value in hard_key):
        raise ValueError("a value is out of range")
    return Miss(
        problem=parse_problem(data["problem"]),
        hard_key=hard_key,
        count=int_of(data["count"], "count", low=1, below=_MAX_COUNT),
        source=text_of(data["source"], "source"),
        last_seen=time_of(data["last_seen"]),
    )


def compact(path: Path, *, without: Collection[tuple[HardKey, Problem]] = ()) -> None:
    """Rewrite a file, if there is one, with one line a problem, leaving out `without`; writers wait meanwhile.

    Raises:
        OSError: the file cannot be read or written.
    """
    with contextlib.suppress(FileNotFoundError), opened(path, os.O_RDWR, fcntl.LOCK_EX) as file:
        misses, _ = _merge(file)
        kept = b"".join(_line(miss) for miss in misses if (miss.hard_key, miss.problem) not in without)
        os.pwrite(file, kept, 0)
        os.ftruncate(file, len(kept))
