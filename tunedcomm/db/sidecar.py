"""Files of JSON lines beside the user database, which many processes add to.

| file | a line says |
|---|---|
| `misses.jsonl` | how often a problem was called untuned (`tunedcomm.db.misses`) |
| `checks.jsonl` | the outcome of a check that a borrowed candidate had on this machine |
| `unreached.jsonl` | a problem that `autotune` did not tune within its budget |

A line is one `write` to a file opened for appending, so that lines of several processes do not mix. An empty line comes
before each, so that one that was torn on a full disk spoils no other. Readers skip invalid lines. A shared lock keeps
writers from adding to a file that is being compacted.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, get_args

from tunedcomm.db.layers import user_database
from tunedcomm.db.targets import data_directory, parse_target, warn_once
from tunedcomm.db.values import canonical_json, parse_problem, row_of_problem, text_of
from tunedcomm.errors import ConfigError, DatabaseAccessError
from tunedcomm.hardware import Environment, kernel_identity, process_start, this_process
from tunedcomm.selection.snapshot import Check, CheckStatus, Snapshot
from tunedcomm.spec import Candidate, Problem

T = TypeVar("T")
# A file of this size is not added to: some 20,000 lines, far more than anybody tunes.
MAX_BYTES = 8 << 20
# Below PIPE_BUF: a write of this size is not split.
MAX_LINE = 4000
# Errors of reading a line that makes no sense.
INVALID_LINE = (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError, ConfigError)


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


def line_of(data: Mapping[str, Any]) -> bytes:
    """A record as a line."""
    return canonical_json(data).encode("ascii") + b"\n"


def write_lines(path: Path, lines: Iterable[bytes], *, smaller: str) -> None:
    """Add lines to a file. The directory is made if it is the user's data directory, which is ours.

    Args:
        path, lines: what to add, and where.
        smaller: what to do where the file has reached `MAX_BYTES`.

    Raises:
        OSError: the file cannot be written, is not a regular file, or has reached `MAX_BYTES`.
    """
    with contextlib.suppress(DatabaseAccessError):  # no home directory: the file was named
        if path.parent == data_directory():
            path.parent.mkdir(parents=True, exist_ok=True)
    with opened(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, fcntl.LOCK_SH) as file:
        if os.fstat(file).st_size >= MAX_BYTES:
            raise OSError(f"it has reached {MAX_BYTES >> 20} MiB; {smaller}")
        for line in (b"\n" + line for line in lines):
            if len(line) <= MAX_LINE and os.write(file, line) < len(line):
                raise OSError("no space left for a whole line")


def read_lines(file: int) -> list[bytes]:
    """The lines of an open file, without empty ones."""
    # Writers check the size before they write, so a few lines more than the limit may be there.
    return [line for line in os.pread(file, 2 * MAX_BYTES, 0).splitlines() if line]


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


class _Notes(NamedTuple):
    """A file of records about problems, each of one environment, software included.

    Attributes:
        name: of the file.
        smaller: what to do where it is full.
        loss: the consequence of a file that cannot be written, for the warning.
    """

    name: str
    smaller: str
    loss: str

    def read(self, environment: Environment, parse: Callable[[Problem, dict[str, Any]], T]) -> list[T]:
        """`parse(problem, record)` of every record of the environment, oldest first; none if the file is not there."""
        token, found = environment.digest.encode("ascii"), []
        try:
            with opened(beside_user_database(self.name), os.O_RDONLY, fcntl.LOCK_SH) as file:
                lines = [line for line in read_lines(file) if token in line and len(line) <= MAX_LINE]
        except (OSError, DatabaseAccessError):
            return []
        for line in lines:
            with contextlib.suppress(*INVALID_LINE):
                data: dict[str, Any] = json.loads(line)
                if data["environment"] == environment.digest:
                    found.append(parse(parse_problem(data["problem"]), data))
        return found

    def add(self, environment: Environment, records: Iterable[tuple[Problem, Mapping[str, Any]]]) -> bool:
        """Add records, and return True if that succeeded; a file that cannot be written costs one warning."""
        lines = [
            line_of({"environment": environment.digest, "problem": row_of_problem(problem), **values})
            for problem, values in records
        ]
        try:
            if lines:
                write_lines(beside_user_database(self.name), lines, smaller=self.smaller)
        except (OSError, DatabaseAccessError) as error:
            with contextlib.suppress(Exception):
                warn_once(f"{self.loss}: {error}", self.name)
            return False
        return True


# Problems that `autotune` did not tune within its budget: the next start leaves them alone unless its budget is larger.
# Dispatch does not read them.

_unreached = _Notes(
    "unreached.jsonl",
    smaller="remove it, and its problems are tried again",
    loss="problems that were not tuned are not noted, so that each start tries them",
)


def spent_budgets(environment: Environment) -> dict[Problem, float]:
    """The largest budget in seconds that ended before each problem was tuned, in this very environment."""
    found: dict[Problem, float] = {}
    for problem, budget_s in _unreached.read(environment, lambda problem, data: (problem, float(data["budget_s"]))):
        found[problem] = max(budget_s, found.get(problem, 0.0))
    return found


def note_unreached(environment: Environment, problems: Iterable[Problem], budget_s: float) -> None:
    """Add problems that were not tuned within a budget."""
    _unreached.add(environment, [(problem, {"budget_s": budget_s}) for problem in problems])


# Checks of borrowed candidates. One process of a group reads and writes them. A line is begun before a check's first
# launch and one is added at its end; the last line about a problem, candidate and source counts. A check that was begun
# by a process that has ended since counts as failed: whatever ended that process shall not end the next one, too.

_checks = _Notes(
    "checks.jsonl",
    smaller="remove it, and checks are made anew",
    loss="checks of borrowed kernels are not kept, so that each start makes them",
)
_BEGUN = "checking"
_STATUSES = (*get_args(CheckStatus), _BEGUN)
_MAX_WHY = 1000
# By digest of the environment: checks that could not be written, for further groups of this process.
_unwritten: dict[str, list[Check]] = {}


def with_checks(snapshot: Snapshot) -> Snapshot:
    """The snapshot with the checks made in its very environment, software included, by groups of its size."""
    environment, found = snapshot.environment, dict[Any, Check]()
    for check in filter(None, _checks.read(environment, _parse_check)):
        place = (check.problem, check.key)
        found.pop(place, None)
        found[place] = check
    checks = [*found.values(), *_unwritten.get(environment.digest, ())]
    checks = [check for check in checks if check.problem.world_size == snapshot.world_size]
    return snapshot.with_checks(*checks) if checks else snapshot


def begin_check(environment: Environment, check: Check) -> None:
    """Note that a check is about to launch."""
    _write_check(environment, check, _BEGUN)


def store_check(environment: Environment, check: Check) -> None:
    """Store the outcome of a check."""
    if not _write_check(environment, check, check.status):
        _unwritten.setdefault(environment.digest, []).append(check)


def _parse_check(problem: Problem, data: dict[str, Any]) -> Check | None:
    """The check of a line; None for one that another process is making now."""
    candidate, status = data["candidate"], data["status"]
    if status not in _STATUSES:
        raise ValueError(f"unknown status {status!r}")
    why = text_of(data["why"], "why")
    if status == _BEGUN:
        kernel, pid, start = data["process"]
        if kernel == kernel_identity() and process_start(int(pid)) == start:
            return None
        status, why = "failed", "a process that checked it here ended before its check did"
    config = candidate["config"]
    if not all(isinstance(value, (str, int, bool)) for value in config.values()):
        raise ValueError("not a config")
    return Check(
        problem=problem,
        candidate=Candidate.of(text_of(candidate["op"], "op"), text_of(candidate["variant"], "variant"), config),
        source_hash=text_of(data["source_hash"], "source_hash"),
        status=status,
        why=why,
    )


def _write_check(environment: Environment, check: Check, status: str) -> bool:
    """Add a line, and return True if that succeeded."""
    candidate = check.candidate
    values = {
        "candidate": {"op": candidate.op, "variant": candidate.variant, "config": candidate.config_dict},
        "source_hash": check.source_hash,
        "status": status,
        "why": check.why[:_MAX_WHY],
        "process": list(this_process()),
    }
    return _checks.add(environment, [(check.problem, values)])
