"""The board in a few statements of SQL, for PostgreSQL and the tables as Optuna makes them.

Through Optuna a claim takes some forty statements, half of them under the lock of its study; with a whole cluster on
one server that lock becomes the bottleneck. Here it is held for two statements, and the trials are the same: Optuna and
its dashboard read them, and Optuna's own way of adding trials takes the same lock.
"""

from __future__ import annotations

import json
from typing import Any

from optuna.distributions import distribution_to_json
from optuna.trial import TrialState
from sqlalchemy import Connection, Engine, text

from tunedcomm.tuner.board import CANDIDATE, OWNER, Board, Entry, Note, parameters

__all__ = ["REVISION", "PostgresBoard"]

# Optuna's schema revision that these statements are written for.
REVISION = "v3.2.0.a"

# Written so that it reads the study's trials alone, whatever the planner knows about tables that were empty yesterday.
_ENTRIES = """
WITH of_study AS MATERIALIZED (
    SELECT trial_id, number, state FROM trials
    WHERE study_id = :study AND (state = 'RUNNING' OR (:told AND state IN ('COMPLETE', 'PRUNED')))
), claims AS MATERIALIZED (
    SELECT *, (
        SELECT value_json FROM trial_user_attributes a WHERE a.trial_id = of_study.trial_id AND a.key = :candidate
    ) AS candidate FROM of_study
)
SELECT trial_id, candidate, (
    SELECT value_json FROM trial_user_attributes a WHERE a.trial_id = claims.trial_id AND a.key = :owner
), state = 'RUNNING' FROM claims
WHERE candidate IS NOT NULL AND (CAST(:key AS text) IS NULL OR candidate = :key) ORDER BY number
"""
_INSERT = """
WITH added AS (
    INSERT INTO trials (study_id, number, state, datetime_start)
    SELECT :study, count(*), 'RUNNING', clock_timestamp() AT TIME ZONE 'UTC' FROM trials WHERE study_id = :study
    RETURNING trial_id
), attributes AS (
    INSERT INTO trial_user_attributes (trial_id, key, value_json)
    SELECT trial_id, a.key, a.value FROM added, json_each_text(CAST(:attributes AS json)) a
), params AS (
    INSERT INTO trial_params (trial_id, param_name, param_value, distribution_json)
    SELECT trial_id, p.name, p.value, p.distribution
    FROM added, json_to_recordset(CAST(:params AS json)) AS p (name text, value float, distribution text)
)
SELECT trial_id FROM added
"""
_END = """
WITH ended AS (
    UPDATE trials SET state = CAST(:state AS trialstate), datetime_complete = clock_timestamp() AT TIME ZONE 'UTC'
    WHERE trial_id = :trial AND state = 'RUNNING' RETURNING trial_id
)
INSERT INTO trial_values (trial_id, objective, value, value_type)
SELECT trial_id, 0, :value, 'FINITE' FROM ended WHERE CAST(:value AS float) IS NOT NULL
"""


class PostgresBoard:
    """See `Board`.

    Args:
        engine: finds Optuna's tables without naming their schema.
        plain: what is done through Optuna as it is done rarely.
    """

    def __init__(self, engine: Engine, plain: Board) -> None:
        self._engine = engine
        self._single = engine.execution_options(isolation_level="AUTOCOMMIT")
        self._plain = plain

    def study(self, name: str) -> int:
        return self._plain.study(name)

    def is_running(self, trial_id: int) -> bool:
        query = text("SELECT state = 'RUNNING' FROM trials WHERE trial_id = :trial")
        with self._single.connect() as connection:
            return bool(connection.execute(query, {"trial": trial_id}).scalar())

    def entries(self, study: int, key: str | None, *, told: bool) -> list[Entry]:
        with self._single.connect() as connection:
            return self._entries(connection, study, key, told=told)

    def claim(self, study: int, note: Note, *, told: bool) -> tuple[int | None, list[Entry]]:
        params, distributions = parameters(note.candidate)
        plain = [
            {
                "name": name,
                "value": distributions[name].to_internal_repr(value),
                "distribution": distribution_to_json(distributions[name]),
            }
            for name, value in params.items()
        ]
        attributes = {
            CANDIDATE: json.dumps(note.key),
            OWNER: json.dumps({**note.mark, "nonce": note.nonce}),
        }
        values = {"study": study, "attributes": json.dumps(attributes), "params": json.dumps(plain)}
        with self._engine.begin() as connection:
            lock = text("SELECT study_id FROM studies WHERE study_id = :study FOR UPDATE")
            connection.execute(lock, {"study": study})
            found = self._entries(connection, study, note.key, told=told)
            mine = [entry.trial_id for entry in found if entry.nonce == note.nonce]
            if mine:  # by an attempt before, whose answer was lost
                return mine[0], []
            if found:
                return None, found
            return int(connection.execute(text(_INSERT), values).scalar_one()), []

    def end(self, trial_id: int, state: TrialState, value: float | None = None) -> None:
        with self._single.connect() as connection:
            connection.execute(text(_END), {"trial": trial_id, "state": state.name, "value": value})

    def _entries(self, connection: Connection, study: int, key: str | None, *, told: bool) -> list[Entry]:
        values = {
            "study": study,
            "key": None if key is None else json.dumps(key),
            "told": told,
            "candidate": CANDIDATE,
            "owner": OWNER,
        }
        return [_entry(*row) for row in connection.execute(text(_ENTRIES), values)]


def _entry(trial_id: int, key: str, owner: str | None, is_running: bool) -> Entry:
    mark: dict[str, Any] = json.loads(owner or "{}")
    return Entry(trial_id, str(json.loads(key)), str(mark.get("nonce")), mark, is_running)
