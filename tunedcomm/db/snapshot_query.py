"""What a snapshot needs of one database: every final, the best of each variant where there are none, and failures.

A database of a cluster holds a million trials, a snapshot a few thousand of them. What can be left out is left out by
SQL, over the index `ix_trial_snapshot`; only columns that are used are fetched; problems and variants are read once,
and only those that the rows refer to.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from datetime import datetime, timezone
from typing import Any, NamedTuple

from sqlalchemy import Connection, Select, exists, false, func, select, true

from tunedcomm.db import rows as parse
from tunedcomm.db.query import BEST_OF_VARIANT, load_problems_by_id, load_variants, raw, table
from tunedcomm.db.records import FAILED
from tunedcomm.db.rows import Reader, StoredVariant
from tunedcomm.db.schema import ProblemRow, TrialRow, VariantRow
from tunedcomm.hardware import Environment
from tunedcomm.selection.interpolate import problems_to_load
from tunedcomm.spec import Candidate, Problem

__all__ = ["FailedTrial", "OkTrial", "failed_trials", "ok_trials"]

# What tells the problems of one family from others.
_FAMILY = tuple(item.name for item in fields(Problem) if item.name != "shape")


class OkTrial(NamedTuple):
    """One `ok` trial as a snapshot needs it; a tuple, because there are tens of thousands."""

    id: int
    problem: Problem
    environment: Environment
    candidate: Candidate
    source_hash: str
    latency_p10_us: float | None
    latency_p50_us: float
    latency_p90_us: float | None
    samples: int
    baseline_p50_us: float | None
    final: bool
    created_at: str


class FailedTrial(NamedTuple):
    """One trial that was incorrect, crashed or hung."""

    problem: Problem
    candidate: Candidate
    source_hash: str
    status: str
    created_at: str


# The columns of an `ok` trial in the order in which `_ok_trial` and `_newest` take them; the first four tell candidates
# apart.
_STORED = tuple(
    raw(column)
    for column in (
        TrialRow.problem_id,
        TrialRow.variant_id,
        TrialRow.config,
        TrialRow.final,
        TrialRow.created_at,
        TrialRow.latency_p50_us,
        TrialRow.latency_p10_us,
        TrialRow.latency_p90_us,
        TrialRow.baseline_p50_us,
        TrialRow.samples,
        TrialRow.id,
    )
)


def _of_world(world_size: int, like: Problem | None) -> Select[Any]:
    """Ids of the problems of a world size, or of those that may answer for `like`."""
    if like is None:
        return select(ProblemRow.id).where(ProblemRow.world_size == world_size)
    asked = problems_to_load(like)
    same = [getattr(ProblemRow, name).in_({getattr(problem, name) for problem in asked}) for name in _FAMILY]
    return select(ProblemRow.id).where(*same)


def _finals(environment_id: int, of_world: Select[Any]) -> Select[Any]:
    return select(*_STORED).where(
        TrialRow.environment_id == environment_id,
        TrialRow.status == "ok",
        TrialRow.final == true(),
        TrialRow.problem_id.in_(of_world),
    )


def _best_without_finals(environment_id: int, of_world: Select[Any]) -> Select[Any]:
    """The newest trial of each candidate, and of these the best few of each variant, where finals are lacking.

    A problem lacks finals if none of its finals is of a challenger's newest source: finals of kernels that have
    changed since must not hide what was measured of the new ones.
    """
    newest = (
        select(func.max(VariantRow.id)).where(VariantRow.name != "library").group_by(VariantRow.op, VariantRow.name)
    )
    here = (TrialRow.environment_id == environment_id, TrialRow.status == "ok")
    finished = select(TrialRow.problem_id).where(*here, TrialRow.final == true(), TrialRow.variant_id.in_(newest))
    unfinished = of_world.where(ProblemRow.id.not_in(finished))
    age = func.row_number().over(
        partition_by=(TrialRow.problem_id, TrialRow.variant_id, TrialRow.config_digest),
        order_by=(TrialRow.created_at.desc(), TrialRow.latency_p50_us, TrialRow.id),
    )
    ages = (
        select(TrialRow.id, TrialRow.problem_id, TrialRow.variant_id, TrialRow.latency_p50_us, age.label("age"))
        .where(*here, TrialRow.final == false(), TrialRow.problem_id.in_(unfinished), TrialRow.latency_p50_us > 0)
        .subquery()
    )
    place = func.row_number().over(
        partition_by=(ages.c.problem_id, ages.c.variant_id), order_by=(ages.c.latency_p50_us, ages.c.id)
    )
    places = select(ages.c.id, place.label("place")).where(ages.c.age == 1).subquery()
    best = select(places.c.id).where(places.c.place <= BEST_OF_VARIANT)
    return select(*_STORED).where(TrialRow.id.in_(best))


def _newest_first(row: Sequence[Any]) -> tuple[str, float]:
    created_at, latency = row[4:6]
    if isinstance(created_at, datetime):  # servers give times in the session's zone, which has its own summer
        created_at = created_at.astimezone(timezone.utc)
    return (str(created_at), -latency if isinstance(latency, float) else 0.0)


def ok_trials(
    connection: Connection,
    environments: dict[int, Environment],
    world_size: int,
    reader: Reader,
    *,
    like: Problem | None = None,
) -> list[OkTrial]:
    """What a snapshot needs of one database: every final, and the best of each variant where there are none.

    Args:
        connection: in a transaction.
        environments: where the trials may have run, by id.
        world_size: of their problems.
        reader: counts what makes no sense.
        like: only problems that may answer for this one.
    """
    of_world = _of_world(world_size, like)
    variants = load_variants(connection, reader)
    found: list[OkTrial] = []
    problems: dict[int, Problem] = {}
    asked: set[int] = set()
    for environment_id, environment in sorted(environments.items()):
        newest: dict[Any, Any] = {}
        for query in (_finals(environment_id, of_world), _best_without_finals(environment_id, of_world)):
            for row in connection.execute(query).all():
                known = newest.setdefault(row[:4], row)
                if known is not row and _newest_first(row) > _newest_first(known):
                    newest[row[:4]] = row
        here = {row[0] for row in newest.values()}
        problems |= load_problems_by_id(connection, here - asked, reader)
        asked |= here
        for row in newest.values():
            try:
                problem, variant = problems[row[0]], variants[row[1]]
            except KeyError:
                continue  # It was skipped and counted already, or is not there.
            try:
                found.append(_ok_trial(row, problem, environment, variant, reader))
            except ValueError as error:
                reader.skipped.add(f"trial {row[-1]}: {error}")
    return found


def _ok_trial(
    row: Sequence[Any], problem: Problem, environment: Environment, variant: StoredVariant, reader: Reader
) -> OkTrial:
    _, _, config, final, created_at, p50, p10, p90, baseline, samples, trial_id = row
    latency_us = parse.latency_of(p50, "latency_p50_us")
    if latency_us is None:
        raise ValueError("an ok trial without latency_p50_us")
    if variant.op != problem.op:
        raise ValueError(f"variant of {variant.op:.80} on a problem of {problem.op:.80}")
    return OkTrial(
        parse.id_of(trial_id),
        problem,
        environment,
        reader.candidate(problem.op, variant.name, config),
        variant.source_hash,
        parse.latency_of(p10, "latency_p10_us"),
        latency_us,
        parse.latency_of(p90, "latency_p90_us"),
        parse.int_of(samples, "samples"),
        parse.latency_of(baseline, "baseline_p50_us"),
        parse.bool_of(final, "final"),
        parse.time_text(created_at),
    )


def failed_trials(
    connection: Connection,
    environments: dict[int, Environment],
    world_size: int,
    reader: Reader,
    *,
    like: Problem | None = None,
) -> list[FailedTrial]:
    """Trials that were incorrect, crashed or hung, where the same candidate was not good on the same problem since.

    The arguments are those of `ok_trials`.
    """
    variants = load_variants(connection, Reader())
    columns = (TrialRow.id, TrialRow.problem_id, TrialRow.variant_id, TrialRow.config, TrialRow.status)
    since = table(TrialRow).alias()
    good_since = exists().where(
        since.c.environment_id.in_(list(environments)),
        since.c.status == "ok",
        since.c.latency_p50_us.between(parse.LEAST_US, parse.MOST_US),  # or it is read by nobody
        since.c.final.in_([False, True]),  # lets the index be used through to the candidate
        since.c.problem_id == TrialRow.problem_id,
        since.c.variant_id == TrialRow.variant_id,
        since.c.config_digest == TrialRow.config_digest,
        since.c.created_at > TrialRow.created_at,
    )
    query = select(*(raw(column) for column in (*columns, TrialRow.created_at))).where(
        TrialRow.environment_id.in_(list(environments)),
        TrialRow.status.in_(FAILED),
        TrialRow.problem_id.in_(_of_world(world_size, like)),
        ~good_since,
    )
    rows = connection.execute(query).all()
    problems = load_problems_by_id(connection, {row.problem_id for row in rows}, Reader())
    found = []
    for row in rows:
        problem, variant = problems.get(row.problem_id), variants.get(row.variant_id)
        if problem is None or variant is None or variant.op != problem.op:
            continue
        try:
            candidate = reader.candidate(problem.op, variant.name, row.config)
            created_at = parse.time_text(row.created_at)
        except ValueError as error:
            reader.skipped.add(f"trial {row.id}: {error}")
            continue
        found.append(FailedTrial(problem, candidate, variant.source_hash, row.status, created_at))
    return found
