"""The file of checks that borrowed candidates had on this machine: JSON lines beside the user database.

One process of a group reads and writes it. A line is begun before a check's first launch and one is added at its end;
the last line about a problem, candidate and source counts. A check that was begun by a process that has ended since
counts as failed: whatever ended that process shall not end the next one, too. Invalid lines are skipped.
"""

from __future__ import annotations

import contextlib
import json
from typing import Any, get_args

from tunedcomm.db.misses import beside_user_database, lines_with, write_lines
from tunedcomm.db.targets import warn_once
from tunedcomm.db.values import canonical_json, parse_problem, text_of
from tunedcomm.errors import ConfigError, DatabaseAccessError
from tunedcomm.hardware import Environment, kernel_identity, process_start, this_process
from tunedcomm.selection.snapshot import Check, CheckStatus, Snapshot
from tunedcomm.spec import Candidate, format_shape

_NAME = "checks.jsonl"
_BEGUN = "checking"
_STATUSES = (*get_args(CheckStatus), _BEGUN)
_MOST_SAID = 1000
# By digest of the environment: checks that could not be written, for further groups of this process.
_unwritten: dict[str, list[Check]] = {}


def with_checks(snapshot: Snapshot) -> Snapshot:
    """The snapshot with the checks made in its very environment, software included."""
    checks = _read(snapshot.environment, snapshot.world_size)
    return snapshot.with_checks(*checks) if checks else snapshot


def _read(environment: Environment, world_size: int) -> tuple[Check, ...]:
    """The checks of an environment and of groups of this size, oldest first."""
    found: dict[Any, Check] = {}
    for line in _lines(environment.digest):
        try:
            data: dict[str, Any] = json.loads(line)
            if data["environment"] == environment.digest and (check := _parse(data)) is not None:
                place = (check.problem, check.key)
                found.pop(place, None)
                if check.problem.world_size == world_size:
                    found[place] = check
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError, ConfigError):
            continue
    kept = (check for check in _unwritten.get(environment.digest, ()) if check.problem.world_size == world_size)
    return (*found.values(), *kept)


def begin_check(environment: Environment, check: Check) -> None:
    """Note that a check is about to launch."""
    _write(environment, check, _BEGUN)


def store_check(environment: Environment, check: Check) -> None:
    """Store the outcome of a check; a file that cannot be written costs one warning."""
    if not _write(environment, check, check.status):
        _unwritten.setdefault(environment.digest, []).append(check)


def _lines(token: str) -> list[bytes]:
    """The lines that contain `token`."""
    with contextlib.suppress(DatabaseAccessError):
        return lines_with(token, beside_user_database(_NAME))
    return []


def _parse(data: dict[str, Any]) -> Check | None:
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
        problem=parse_problem(data["problem"]),
        candidate=Candidate.of(text_of(candidate["op"], "op"), text_of(candidate["variant"], "variant"), config),
        source_hash=text_of(data["source_hash"], "source_hash"),
        status=status,
        why=why,
    )


def _write(environment: Environment, check: Check, status: str) -> bool:
    """Add a line, and return True if that succeeded."""
    candidate = check.candidate
    data = {
        "environment": environment.digest,
        "problem": {**check.problem.to_dict(), "shape": format_shape(check.problem.shape)},
        "candidate": {"op": candidate.op, "variant": candidate.variant, "config": candidate.config_dict},
        "source_hash": check.source_hash,
        "status": status,
        "why": check.why[:_MOST_SAID],
        "process": list(this_process()),
    }
    try:
        line = canonical_json(data).encode("ascii") + b"\n"
        write_lines(beside_user_database(_NAME), [line], smaller="remove it, and checks are made anew")
    except (OSError, DatabaseAccessError) as error:
        with contextlib.suppress(Exception):
            warn_once(f"checks of borrowed kernels are not kept, so that each start makes them: {error}", _NAME)
        return False
    return True
