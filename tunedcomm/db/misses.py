"""The file of problems that dispatch met untuned: JSON lines that many processes add to, and one command reads.

A line is one `write` to a file opened for appending, so that lines of several processes do not mix. It says how often
one problem was called since the process' last line about it; a reader adds them up. A shared lock keeps writers from
adding to a file that is being compacted. An empty line comes before each, so that one that was torn on a full disk
spoils no other. Invalid lines are skipped.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import json
import os
import stat
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any, TypeAlias

from tunedcomm import settings
from tunedcomm.db.layers import user_database
from tunedcomm.db.targets import data_directory, parse_target
from tunedcomm.db.values import canonical_json, int_of, parse_problem, text_of, time_of
from tunedcomm.errors import DatabaseAccessError
from tunedcomm.hardware import HARD_FIELDS
from tunedcomm.spec import NumericsPolicy, Problem, format_shape

HardKey: TypeAlias = tuple[Any, ...]

# A file of this size is not added to: some 20,000 lines, far more than anybody tunes.
MAX_BYTES = 8 << 20
# Below PIPE_BUF: a write of this size is not split.
MAX_LINE = 4000
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


def beside_user_database(name: str) -> Path:
    """A file beside a user database that is a file, else in the data directory.

    Raises:
        DatabaseAccessError: the user has no home directory.
    """
    try:
        path = parse_target(user_database()).path
    except DatabaseAccessError:  # whoever opens that database says so
        path = None
    return (data_directory() if path is None else path.parent) / name


def append(path: Path, misses: Iterable[Miss]) -> None:
    """Add one line a miss. The directory is made if it is the user's data directory, which is ours.

    Raises:
        OSError: the file cannot be written, is not a regular file, or has reached `MAX_BYTES`.
    """
    write_lines(path, map(_line, misses), smaller="`tunedcomm tune --from-misses` makes it smaller")


def write_lines(path: Path, lines: Iterable[bytes], *, smaller: str) -> None:
    """Add lines to a file; `smaller` says what to do where it has reached `MAX_BYTES`. Else as `append`."""
    with contextlib.suppress(DatabaseAccessError):  # no home directory: the file was named
        if path.parent == data_directory():
            path.parent.mkdir(parents=True, exist_ok=True)
    with opened(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, fcntl.LOCK_SH) as file:
        if os.fstat(file).st_size >= MAX_BYTES:
            raise OSError(f"it has reached {MAX_BYTES >> 20} MiB; {smaller}")
        for line in (b"\n" + line for line in lines):
            if len(line) <= MAX_LINE and os.write(file, line) < len(line):
                raise OSError("no space left for a whole line")


def lines_with(token: str, path: Path) -> list[bytes]:
    """The lines of a file that contain an ASCII `token`; none if it cannot be read."""
    try:
        with opened(path, os.O_RDONLY, fcntl.LOCK_SH) as file:
            lines = os.pread(file, 2 * MAX_BYTES, 0).splitlines()
    except OSError:
        return []
    return [line for line in lines if token.encode("ascii") in line and len(line) <= MAX_LINE]


@contextlib.contextmanager
def opened(path: Path, flags: int, lock: int) -> Iterator[int]:
    """A regular file, open and locked."""
    # Not blocking: opening a FIFO would wait for the other end.
    file = os.open(path, flags | os.O_CLOEXEC | os.O_NONBLOCK, 0o666)
    try:
        if not stat.S_ISREG(os.fstat(file).st_mode):
            raise OSError("not a regular file")
        with contextlib.suppress(OSError):  # not every file system has locks, and a lost count does little harm
            fcntl.flock(file, lock)
        yield file
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
    # Writers check the size before they write, so a few lines more than the limit may be there.
    for line in filter(None, os.pread(file, 2 * MAX_BYTES, 0).splitlines()):
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
