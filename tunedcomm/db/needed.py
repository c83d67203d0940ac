"""What dispatch and `explain` need of a database: winners and runners-up, what must not run, and what explains both.

Kept of the trials:

- the newest final of each candidate;
- of what was only searched, the best few candidates of each variant that has no final there, and of every variant
  where a snapshot would look at them: at problems that none of the current kernels has finals for;
- candidates that were incorrect, crashed or hung, with the newest good trial of each of them;
- how a variant's last trial of a problem ended, where it never ran there.

Kept of the rest: pins, what trials and pins refer to, and each variant's newest source. So a snapshot has the digest
that it had before, and decides the same.
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import Connection, Select, and_, delete, exists, false, func, or_, select, true, tuple_, union_all

from tunedcomm.db.query import BEST_OF_VARIANT
from tunedcomm.db.records import FAILED
from tunedcomm.db.schema import EnvironmentRow, PinRow, ProblemRow, RunRow, TrialRow, VariantRow

__all__ = ["keep_needed", "needed_trials"]

_CANDIDATE = (TrialRow.environment_id, TrialRow.problem_id, TrialRow.variant_id, TrialRow.config_digest)
# As dispatch orders the trials of one candidate.
_NEWEST_FIRST = (TrialRow.created_at.desc(), TrialRow.latency_p50_us, TrialRow.id)


def needed_trials() -> Select[Any]:
    """Ids of the trials that are kept."""
    kept = union_all(_finals(), _best_searched(), _failed(), _good_again(), _last_words()).subquery()
    return select(kept.c.id)


def keep_needed(connection: Connection) -> None:
    """Delete every other row of the open SQLite database."""
    connection.execute(delete(TrialRow).where(TrialRow.id.not_in(needed_trials())))
    newest = select(func.max(VariantRow.id)).group_by(VariantRow.op, VariantRow.name)
    variants = union_all(select(TrialRow.variant_id), newest)
    environments = union_all(select(TrialRow.environment_id), select(PinRow.environment_id))
    problems = union_all(select(TrialRow.problem_id), select(PinRow.problem_id))
    runs = select(TrialRow.run_id).where(TrialRow.run_id.is_not(None))
    for model, used in ((VariantRow, variants), (EnvironmentRow, environments), (ProblemRow, problems), (RunRow, runs)):
        connection.execute(delete(model).where(model.id.not_in(used)))


def _newest_of_candidates(*where: Any) -> Select[Any]:
    """The newest of the trials of each candidate that fulfil `where`."""
    age = func.row_number().over(partition_by=_CANDIDATE, order_by=_NEWEST_FIRST)
    ages = select(TrialRow.id, age.label("age")).where(*where).subquery()
    return select(ages.c.id).where(ages.c.age == 1)


def _finals() -> Select[Any]:
    return _newest_of_candidates(TrialRow.status == "ok", TrialRow.final == true())


def _best_searched() -> Select[Any]:
    newest = _newest_of_candidates(TrialRow.status == "ok", TrialRow.final == false(), TrialRow.latency_p50_us > 0)
    variant = (TrialRow.environment_id, TrialRow.problem_id, TrialRow.variant_id)
    place = func.row_number().over(partition_by=variant, order_by=(TrialRow.latency_p50_us, TrialRow.id))
    places = select(TrialRow.id, *variant, place.label("place")).where(TrialRow.id.in_(newest)).subquery()
    final = select(*variant).where(TrialRow.status == "ok", TrialRow.final == true()).distinct().subquery()
    here = and_(final.c.environment_id == places.c.environment_id, final.c.problem_id == places.c.problem_id)
    current = select(func.max(VariantRow.id)).where(VariantRow.name != "library")
    current = current.group_by(VariantRow.op, VariantRow.name)
    has_finals = exists().where(here, final.c.variant_id == places.c.variant_id)
    is_finished = exists().where(here, final.c.variant_id.in_(current))
    return select(places.c.id).where(places.c.place <= BEST_OF_VARIANT, or_(~has_finals, ~is_finished))


def _failed() -> Select[Any]:
    return select(TrialRow.id).where(TrialRow.status.in_(FAILED))


def _good_again() -> Select[Any]:
    """The newest good trial of each candidate that failed somewhere: it may have been good since."""
    candidate = (TrialRow.problem_id, TrialRow.variant_id, TrialRow.config_digest)
    failed = select(*candidate).where(TrialRow.status.in_(FAILED))
    return _newest_of_candidates(TrialRow.status == "ok", tuple_(*candidate).in_(failed))


def _last_words() -> Select[Any]:
    """`explain` gives as the reason how the last trial ended, of a variant none of whose trials was ok."""
    variant = (TrialRow.environment_id, TrialRow.problem_id, TrialRow.variant_id)
    age = func.row_number().over(partition_by=variant, order_by=(TrialRow.created_at.desc(), TrialRow.id.desc()))
    ages = select(TrialRow.id, *variant, age.label("age")).where(TrialRow.status != "infeasible").subquery()
    ran = select(*variant).where(TrialRow.status == "ok").distinct().subquery()
    same = [ran.c[column.key] == ages.c[column.key] for column in variant]
    return select(ages.c.id).where(ages.c.age == 1, ~exists().where(*same))
