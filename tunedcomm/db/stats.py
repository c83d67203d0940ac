"""What a database amounts to: how much was tried, what wins, by how much, and how much of it still counts."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, TypeAlias

from sqlalchemy import Connection, String, case, func, select, true, type_coerce

from tunedcomm.db import query
from tunedcomm.db import rows as parse
from tunedcomm.db.rows import Reader, StoredVariant
from tunedcomm.db.schema import ProblemRow, TrialRow
from tunedcomm.db.snapshot import ok_rows
from tunedcomm.db.sources import SourceHash, is_current
from tunedcomm.db.store import Database
from tunedcomm.hardware import Environment
from tunedcomm.selection.score import pool
from tunedcomm.selection.snapshot import Row
from tunedcomm.spec import Candidate, Problem, admits, variants

__all__ = ["DatabaseStats", "GroupStats", "collect_stats", "num_bytes"]

_LIBRARY = "library"
_Key: TypeAlias = tuple[int, str, int, str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupStats:
    """Problems of one op, world size, dtype and mode in one environment.

    Attributes:
        environment: where they were measured.
        op, world_size, dtype, mode: what they have in common.
        problems: those with a trial.
        trials: status to how many ended so.
        finals: trials of the finals.
        winners: variant to the problems that dispatch answers with it under the default numerics policy, at the very
            problem; `library` where no challenger beats it by more than the noise.
        speedup: geometric mean over these problems of the library's latency over the winner's; None if none is known.
        stale: trials of sources that have changed since, which dispatch does not use.
        unknown: trials of variants that this tunedcomm does not have.
        oldest, newest: times of the first and the last trial; None if no time can be read.
    """

    environment: Environment
    op: str
    world_size: int
    dtype: str
    mode: str
    problems: int
    trials: dict[str, int]
    finals: int
    winners: dict[str, int]
    speedup: float | None
    stale: int
    unknown: int
    oldest: datetime | None
    newest: datetime | None

    @property
    def library_share(self) -> float | None:
        """Share of the problems with a winner that the library wins; None if there are none."""
        won = sum(self.winners.values())
        return self.winners.get(_LIBRARY, 0) / won if won else None


@dataclass(frozen=True, slots=True, kw_only=True)
class DatabaseStats:
    """One database.

    Attributes:
        target: the file, or the server's URL without its password.
        num_bytes: of the file and its write-ahead log; None for a server.
        schema: revision of its schema.
        rows: what `Database.stats` says.
        groups: sorted by GPU, environment, op, world size, dtype and mode.
    """

    target: str
    num_bytes: int | None
    schema: str
    rows: dict[str, int]
    groups: tuple[GroupStats, ...]


@dataclass(slots=True)
class _Tally:
    """Counts of one group while they are gathered."""

    problems: int = 0
    finals: int = 0
    stale: int = 0
    unknown: int = 0
    trials: Counter[str] = field(default_factory=Counter)
    winners: Counter[str] = field(default_factory=Counter)
    logs: list[float] = field(default_factory=list)
    times: list[datetime] = field(default_factory=list)


def collect_stats(database: Database, source_hash: SourceHash) -> DatabaseStats:
    """Sum up an open database; rows that make no sense are left out and warned of.

    Args:
        database: open, for reading at least.
        source_hash: what the variants' sources are now; the variants must be registered.
    """
    rows = database.stats()
    reader = Reader()
    with database.reading() as connection:
        environments = query.load_environments(connection, reader)
        tallies = _count(connection, environments, query.load_variants(connection, reader), source_hash)
        for environment_id, world_size in sorted({(key[0], key[2]) for key in tallies}):
            environment = environments[environment_id]
            trials = ok_rows(connection, {environment_id: environment}, world_size, reader)
            _add_winners(tallies, environment_id, trials, source_hash)
    database.warn_skipped(reader)
    groups = [_group(environments[key[0]], key, tally) for key, tally in tallies.items()]
    return DatabaseStats(
        target=str(database.path or database.url),
        num_bytes=None if database.path is None else num_bytes(database.path),
        schema=database.schema_version,
        rows=rows,
        groups=tuple(sorted(groups, key=_order)),
    )


def num_bytes(path: Path) -> int:
    """Size of a SQLite file and of its write-ahead log."""
    log = path.with_name(path.name + "-wal")
    return path.stat().st_size + (log.stat().st_size if log.exists() else 0)


def _order(group: GroupStats) -> tuple[Any, ...]:
    there = group.environment
    return (there.gpu, there.digest, group.op, group.world_size, group.dtype, group.mode)


_GROUP = (TrialRow.environment_id, ProblemRow.op, ProblemRow.world_size, ProblemRow.dtype, ProblemRow.mode)


def _count(
    connection: Connection,
    environments: dict[int, Environment],
    stored: dict[int, StoredVariant],
    source_hash: SourceHash,
) -> dict[_Key, _Tally]:
    """Every group's counts, without its winners."""
    found: dict[_Key, _Tally] = {}
    what = (*_GROUP, TrialRow.variant_id, TrialRow.status)
    times = [type_coerce(end(TrialRow.created_at), String()) for end in (func.min, func.max)]
    finals = func.sum(case((TrialRow.final == true(), 1), else_=0))
    counted = select(*what, func.count(), finals, *times).join(ProblemRow).group_by(*what)
    for *group, variant_id, status, count, num_finals, first, last in connection.execute(counted):
        key = _key(group, environments)
        if key is None:
            continue
        tally = found.setdefault(key, _Tally())
        tally.trials[str(status)] += count
        tally.finals += int(num_finals or 0)
        current = is_current(stored.get(variant_id), source_hash)
        tally.unknown += count if current is None else 0
        tally.stale += count if current is False else 0
        tally.times += _times(first, last)
    problems = select(*_GROUP, func.count(TrialRow.problem_id.distinct())).join(ProblemRow).group_by(*_GROUP)
    for *group, count in connection.execute(problems):
        key = _key(group, environments)
        if key is not None:
            found[key].problems = count
    return found


def _key(group: Sequence[Any], environments: dict[int, Environment]) -> _Key | None:
    """The group's key; None where its values make no sense, which `db check` lists."""
    environment_id, op, world_size, dtype, mode = group
    texts = all(isinstance(text, str) for text in (op, dtype, mode))
    known = environment_id in environments and type(world_size) is int and world_size >= 1
    return (environment_id, op, world_size, dtype, mode) if texts and known else None


def _times(*values: Any) -> list[datetime]:
    found = []
    for value in values:
        try:
            found.append(parse.time_of(value))
        except ValueError:
            continue
    return found


def _add_winners(
    tallies: dict[_Key, _Tally], environment_id: int, trials: Iterable[Row], source_hash: SourceHash
) -> None:
    by_problem: dict[Problem, list[Row]] = {}
    for trial in trials:
        by_problem.setdefault(trial.problem, []).append(trial)
    for problem, rows in by_problem.items():
        tally = tallies.get((environment_id, problem.op, problem.world_size, problem.dtype, problem.mode))
        if tally is not None:
            variant, speedup = _winner(problem, rows, source_hash)
            tally.winners[variant] += 1
            tally.logs += [] if speedup is None else [math.log(speedup)]


def _winner(problem: Problem, rows: list[Row], source_hash: SourceHash) -> tuple[str, float | None]:
    """What dispatch answers at a problem that was measured, near ties aside, and how much faster than the library."""
    known = variants(problem.op)
    usable: dict[Candidate, str | None] = {}
    fresh = []
    for row in rows:
        variant = known.get(row.candidate.variant)
        if row.is_library:
            fresh.append(row)
        elif variant is not None and source_hash(problem.op, variant.name) == row.source_hash:
            fresh.append(row)
            if variant.bounded and admits("default", variant.numerics):
                usable[row.candidate] = None
    found = pool(fresh, usable)
    if found.library_us is None:
        return _LIBRARY, None
    for scored in found.scored:
        if scored.score < found.library_us * (1 - scored.noise):
            return scored.candidate.variant, found.library_us / scored.score
    return _LIBRARY, 1.0


def _group(environment: Environment, key: _Key, tally: _Tally) -> GroupStats:
    return GroupStats(
        environment=environment,
        op=key[1],
        world_size=key[2],
        dtype=key[3],
        mode=key[4],
        problems=tally.problems,
        trials=dict(tally.trials),
        finals=tally.finals,
        winners=dict(tally.winners.most_common()),
        speedup=math.exp(statistics.fmean(tally.logs)) if tally.logs else None,
        stale=tally.stale,
        unknown=tally.unknown,
        oldest=min(tally.times, default=None),
        newest=max(tally.times, default=None),
    )
