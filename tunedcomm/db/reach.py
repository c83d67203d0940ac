"""How far failures reach: which good trials of a candidate they keep from being used.

As dispatch has it, a failure counts until the candidate is good at the same problem again. While it counts, the
candidate does not run that problem, and nothing is predicted of it in the whole family.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple, TypeAlias

from sqlalchemy import ColumnElement, Connection, select

from tunedcomm.db import rows as parse
from tunedcomm.db.engine import warn_once
from tunedcomm.db.layers import Layer
from tunedcomm.db.query import raw, table
from tunedcomm.db.records import FAILED
from tunedcomm.db.schema import Base, EnvironmentRow, ProblemRow, TrialRow, VariantRow
from tunedcomm.db.store import Database
from tunedcomm.errors import DatabaseError
from tunedcomm.hardware import HARD_FIELDS
from tunedcomm.spec import Problem

__all__ = ["Reached", "reached"]

_FAMILY = tuple(item.name for item in fields(Problem) if item.name != "shape")
_OK = ("ok",)
# With `ok` what a search counts as measured, and as checked.
_RAN = ("ok", "pruned")
_Reach: TypeAlias = tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Reached:
    """What removing failures would bring back.

    Attributes:
        good: ids of trials in the same database that would be used again, or count as measured.
        kept: ids of failures that keep good trials of other databases from being used.
    """

    good: frozenset[int]
    kept: frozenset[int]


class _Mark(NamedTuple):
    """How one trial ended; `reach` is the hardware, the family of its problem, and the candidate with its source."""

    id: int
    reach: _Reach
    shape: str
    status: str
    created_at: str


def reached(connection: Connection, failures: ColumnElement[bool], elsewhere: Iterable[Layer]) -> Reached:
    """Find the good trials that failures hide.

    Args:
        connection: in a transaction.
        failures: true of the trials whose removal is thought of; of these only failures that count matter.
        elsewhere: other databases that dispatch reads beside this one. One that cannot be read is left out with a
            warning.
    """
    failed = _marks(connection, FAILED, None, failures)
    if not failed:
        return Reached(frozenset(), frozenset())
    asked = {mark.reach for mark in failed}
    here = _marks(connection, _RAN, asked)
    there = [mark for layer in elsewhere for mark in _marks_of(layer, asked)]
    good: dict[tuple[_Reach, str], str] = {}
    for mark in (*here, *there):
        if mark.status == "ok":
            key = (mark.reach, mark.shape)
            good[key] = max(mark.created_at, good.get(key, ""))
    counting = [mark for mark in failed if mark.created_at >= good.get((mark.reach, mark.shape), "")]
    hidden = {mark.reach for mark in there}
    gone = {mark.reach for mark in counting} - hidden
    return Reached(
        good=frozenset(mark.id for mark in here if mark.reach in gone),
        kept=frozenset(mark.id for mark in counting if mark.reach in hidden),
    )


def _marks_of(layer: Layer, asked: Collection[_Reach]) -> list[_Mark]:
    immutable = True if layer.name == "packaged" else None
    try:
        with (
            Database.open(layer.target, readonly=True, immutable=immutable) as database,
            database.reading() as connection,
        ):
            return _marks(connection, _OK, asked)
    except DatabaseError as error:
        warn_once(f"what failures hide in a database of the {layer.name} layer is not known: {error}")
        return []


def _marks(
    connection: Connection, statuses: Sequence[str], asked: Collection[_Reach] | None, *where: ColumnElement[bool]
) -> list[_Mark]:
    """Trials that ended so, of these reaches where they are given; rows that make no sense are no trials."""
    hardware = _by_id(connection, EnvironmentRow, HARD_FIELDS)
    family, shape = _by_id(connection, ProblemRow, _FAMILY), _by_id(connection, ProblemRow, ("shape",))
    variants = _by_id(connection, VariantRow, ("op", "name", "source_hash"))
    names = None if asked is None else {reach[2] for reach in asked}
    ids = [key for key, variant in variants.items() if names is None or variant in names]
    columns = (
        TrialRow.id,
        TrialRow.environment_id,
        TrialRow.problem_id,
        TrialRow.variant_id,
        TrialRow.config_digest,
        TrialRow.status,
        TrialRow.created_at,
    )
    query = select(*map(raw, columns)).where(TrialRow.status.in_(statuses), TrialRow.variant_id.in_(ids), *where)
    found = []
    for id_, environment, problem, variant, config, status, created_at in connection.execute(query):
        try:
            reach = (hardware[environment], family[problem], variants[variant], config)
            if asked is None or reach in asked:
                found.append(_Mark(id_, reach, shape[problem][0], status, parse.time_text(created_at)))
        except (KeyError, ValueError):
            continue
    return found


def _by_id(connection: Connection, model: type[Base], names: Sequence[str]) -> dict[Any, tuple[Any, ...]]:
    columns = table(model).c
    rows = connection.execute(select(raw(columns.id), *(raw(columns[name]) for name in names)))
    return {row[0]: tuple(row[1:]) for row in rows}
