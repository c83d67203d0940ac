"""Adding rows so that running the same transaction a second time adds none twice.

When the connection breaks during a commit, the client cannot know whether the rows are stored. The second attempt
looks for them by what no two trials share: everything that was asked, the run and the microsecond at which the record
was made. On a server the first attempt may even be in the middle of its commit then; so both take a lock that is named
by the client, which the server holds until the first attempt has ended one way or the other.
"""

from __future__ import annotations

import getpass
from collections.abc import Sequence
from typing import Any

from sqlalchemy import Connection, insert, select

from tunedcomm.db.engine import exclusive
from tunedcomm.db.intern import environment_ids, problem_ids, row_id, variant_ids, variant_key
from tunedcomm.db.query import table
from tunedcomm.db.records import TrialRecord, canonical_json, config_digest
from tunedcomm.db.schema import Base, RunRow, TrialRow

__all__ = ["append_run", "append_trials", "login"]

_PLAIN = (
    "status",
    "reason",
    "latency_p10_us",
    "latency_p50_us",
    "latency_p90_us",
    "samples",
    "baseline_p50_us",
    "error",
    "final",
    "run_id",
    "created_at",
)
_TRIAL_IDENTITY = ("problem_id", "environment_id", "variant_id", "config_digest", "final", "run_id", "created_at")
_RUN_IDENTITY = ("command", "host", "user", "started_at")


def append_trials(connection: Connection, batch: Sequence[TrialRecord], *, key: str, again: bool) -> list[int]:
    """Add trials; returns their ids in the same order.

    Args:
        connection: in a transaction that writes.
        batch: what to add.
        key: the client's name for this batch, the same at every attempt.
        again: an attempt before may have added them.
    """
    exclusive(connection, key)
    problems = problem_ids(connection, (r.problem for r in batch))
    environments = environment_ids(connection, (r.environment for r in batch))
    variants = variant_ids(connection, batch)
    rows = [
        {
            "problem_id": problems[r.problem],
            "environment_id": environments[r.environment],
            "variant_id": variants[variant_key(r)],
            "config": canonical_json(r.config),
            "config_digest": config_digest(r.config),
            **{name: getattr(r, name) for name in _PLAIN},
        }
        for r in batch
    ]
    if again and (stored := _stored(connection, TrialRow, _TRIAL_IDENTITY, rows)):
        return stored
    statement = insert(TrialRow).returning(TrialRow.id, sort_by_parameter_order=True)
    return [row_id(id_) for id_ in connection.execute(statement, rows).scalars()]


def append_run(connection: Connection, values: dict[str, Any], *, key: str, again: bool) -> int:
    """Add a run; returns its id. The arguments are those of `append_trials`."""
    exclusive(connection, key)
    if again and (stored := _stored(connection, RunRow, _RUN_IDENTITY, [values])):
        return stored[0]
    return row_id(connection.execute(insert(RunRow).values(values).returning(RunRow.id)).scalar_one())


def _stored(
    connection: Connection, model: type[Base], identity: Sequence[str], rows: Sequence[dict[str, Any]]
) -> list[int]:
    """Ids of rows that were added together, or nothing if they were not: a transaction is stored as a whole."""
    columns = table(model).columns
    ids: list[int] = []
    for row in rows:
        where = [columns[name].is_not_distinct_from(row[name]) for name in identity]
        same = connection.execute(select(columns["id"]).where(*where).order_by(columns["id"])).scalars()
        new = next((int(id_) for id_ in same if id_ not in ids), None)
        if new is None:
            return []
        ids.append(new)
    return ids


def login() -> str:
    """The user's name; empty where unknown."""
    try:
        return getpass.getuser()
    except (KeyError, OSError, ImportError):  # no such user id in a container
        return ""
