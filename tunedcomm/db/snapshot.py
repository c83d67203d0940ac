"""From the rows of several databases to one snapshot.

A database of a cluster holds a million trials, a snapshot a few thousand of them. What can be left out is left out by
SQL, over the index `ix_trial_snapshot`; only columns that are used are fetched; problems and variants are read once,
and only those that the rows refer to.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from datetime import datetime, timezone
from typing import Any, NamedTuple, TypeAlias

from sqlalchemy import Connection, Select, and_, delete, exists, false, func, or_, select, true, tuple_, union_all

from tunedcomm.db import query
from tunedcomm.db import records as parse
from tunedcomm.db.query import BEST_OF_VARIANT, load_problems_by_id, load_variants, raw, table
from tunedcomm.db.records import FAILED, Pin, Reader
from tunedcomm.db.schema import PinRow, ProblemRow, TrialRow, VariantRow
from tunedcomm.hardware import SOFT_FIELDS, Environment
from tunedcomm.selection.interpolate import problems_to_load
from tunedcomm.selection.snapshot import Failure, Numbers, Pinned, Row, Snapshot, is_drift, loans, matches
from tunedcomm.spec import Candidate, Problem

# Problem and candidate as numbers, and the source hash.
_Key: TypeAlias = tuple[int, int, str]
# What tells the problems of one family from others.
_FAMILY = tuple(item.name for item in fields(Problem) if item.name != "shape")


class _Failed(NamedTuple):
    """One trial that was incorrect, crashed or hung."""

    problem: Problem
    candidate: Candidate
    source_hash: str
    status: str
    created_at: str


# Queries


# What a snapshot reads of a trial; the first four columns tell candidates apart.
_COLUMNS = tuple(
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
        TrialRow.status,
        TrialRow.config_digest,
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
    return select(*_COLUMNS).where(
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
    return select(*_COLUMNS).where(TrialRow.id.in_(best))


def _newest_first(row: Sequence[Any]) -> tuple[str, float]:
    created_at, latency = row[4:6]
    if isinstance(created_at, datetime):  # servers give times in the session's zone, which has its own summer
        created_at = created_at.astimezone(timezone.utc)
    return (str(created_at), -latency if isinstance(latency, float) else 0.0)


def ok_rows(
    connection: Connection,
    environments: Mapping[int, Environment],
    world_size: int,
    reader: Reader,
    *,
    here: Environment | None = None,
    layer: str = "user",
    layer_rank: int = 0,
    borrowed: bool = False,
    like: Problem | None = None,
) -> list[Row]:
    """The rows that a snapshot needs of one database: every final, and the best of each variant where there are none.

    With `like` only of problems that may answer for that one. Rows of other software than `here` are marked as drift.
    """
    of_world = _of_world(world_size, like)
    variants = load_variants(connection, reader)
    found: list[Row] = []
    problems: dict[int, Problem] = {}
    asked: set[int] = set()
    for environment_id, environment in sorted(environments.items()):
        drift = here is not None and is_drift(here, environment)
        newest: dict[Any, Any] = {}
        for statement in (_finals(environment_id, of_world), _best_without_finals(environment_id, of_world)):
            for row in connection.execute(statement).all():
                known = newest.setdefault(row[:4], row)
                if known is not row and _newest_first(row) > _newest_first(known):
                    newest[row[:4]] = row
        wanted = {row[0] for row in newest.values()}
        problems |= load_problems_by_id(connection, wanted - asked, reader)
        asked |= wanted
        for row in newest.values():
            problem, variant = problems.get(row.problem_id), variants.get(row.variant_id)
            if problem is None or variant is None:
                continue  # It was skipped and counted already, or is not there.
            try:
                p10, p50, p90, created_at = reader.check_trial(row._mapping)
                assert p50 is not None
                parse.check_op(variant, problem)
                found.append(
                    Row(
                        problem=problem,
                        candidate=reader.candidate(problem.op, variant.name, row.config),
                        source_hash=variant.source_hash,
                        environment=environment,
                        latency_p50_us=p50,
                        latency_p10_us=p10,
                        latency_p90_us=p90,
                        samples=parse.int_of(row.samples, "samples"),
                        baseline_p50_us=parse.latency_of(row.baseline_p50_us, "baseline_p50_us"),
                        final=parse.bool_of(row.final, "final"),
                        drift=drift,
                        borrowed=borrowed,
                        layer=layer,
                        layer_rank=layer_rank,
                        created_at=created_at,
                        trial_id=parse.id_of(row.id),
                    )
                )
            except ValueError as error:
                reader.skipped.add(f"trial {row.id}: {error}")
    return found


def _failed_trials(
    connection: Connection,
    environments: Mapping[int, Environment],
    world_size: int,
    reader: Reader,
    like: Problem | None,
) -> list[_Failed]:
    """Trials that were incorrect, crashed or hung, where the same candidate was not good on the same problem since."""
    variants = load_variants(connection, Reader())
    since = table(TrialRow).alias()
    p50 = since.c.latency_p50_us
    good_since = exists().where(
        since.c.environment_id.in_(list(environments)),
        since.c.status == "ok",
        # As `check_trial` has it: any other trial is read by nobody.
        p50.between(parse.LEAST_US, parse.MOST_US),
        func.coalesce(since.c.latency_p10_us, p50) <= p50,
        func.coalesce(since.c.latency_p90_us, p50) >= p50,
        since.c.created_at <= reader.latest,
        since.c.final.in_([False, True]),  # lets the index be used through to the candidate
        since.c.problem_id == TrialRow.problem_id,
        since.c.variant_id == TrialRow.variant_id,
        since.c.config_digest == TrialRow.config_digest,
        since.c.created_at > TrialRow.created_at,
    )
    statement = select(*_COLUMNS).where(
        TrialRow.environment_id.in_(list(environments)),
        TrialRow.status.in_(FAILED),
        TrialRow.problem_id.in_(_of_world(world_size, like)),
        ~good_since,
    )
    rows: Sequence[Any] = connection.execute(statement).all()
    problems = load_problems_by_id(connection, {row.problem_id for row in rows}, Reader())
    found = []
    for row in rows:
        problem, variant = problems.get(row.problem_id), variants.get(row.variant_id)
        if problem is None or variant is None or variant.op != problem.op:
            continue
        try:
            *_, created_at = reader.check_trial(row._mapping)
            candidate = reader.candidate(problem.op, variant.name, row.config)
            found.append(_Failed(problem, candidate, variant.source_hash, row.status, created_at))
        except ValueError as error:
            reader.skipped.add(f"trial {row.id}: {error}")
    return found


# Building


@dataclass(slots=True)
class _Rows:
    """Rows of one kind of hardware from the layers read so far.

    Attributes:
        rows, failures: at most one a candidate and problem.
        good: when each candidate last ran well, in a row that is kept or in one that is not.
    """

    rows: dict[_Key, Row] = field(default_factory=dict)
    failures: dict[_Key, _Failed] = field(default_factory=dict)
    good: dict[_Key, str] = field(default_factory=dict)

    def failed(self) -> dict[_Key, _Failed]:
        """Candidates that have not run well since they failed, whoever measured them before."""
        return {k: f for k, f in self.failures.items() if f.created_at >= self.good.get(k, "")}


class Fetched(NamedTuple):
    """The rows of one database that a snapshot needs; `lent_failures` are of hardware that may stand in."""

    layer: str
    layer_rank: int
    rows: Sequence[Row]
    failures: Sequence[_Failed]
    lent_failures: Sequence[_Failed]
    pins: Sequence[Pin]
    loans: Mapping[Environment, str | None]


class SnapshotBuilder:
    """Merges databases, nearest layer first, into a snapshot of one environment and world size.

    For each candidate and problem the most conclusive row is kept: finals before others, the same software before
    older, nearer layers before farther ones, then the newest. A borrowed row is a guess: it gives way to any row of
    this hardware, and is not kept for candidates that failed in the family, here or there.
    """

    def __init__(self, environment: Environment, world_size: int, borrow: Sequence[str] = ()) -> None:
        self._environment, self._world_size, self._borrow = environment, world_size, borrow
        self._own, self._lent = _Rows(), _Rows()
        self._pins: dict[Problem, tuple[tuple[Any, ...], Pinned]] = {}
        self._loans: dict[Environment, str | None] = {}
        # Thousands of rows refer to the same few hundred problems and candidates, which are slow to compare.
        self._problems: Numbers[Problem] = Numbers()
        self._candidates: Numbers[Candidate] = Numbers()

    def fetch(
        self, connection: Connection, reader: Reader, *, layer: str, layer_rank: int, like: Problem | None = None
    ) -> Fetched:
        """Read what `add` takes of one database; that is only added once it was read to the end."""
        own = query.environments_like(connection, self._environment, reader)
        stored = query.load_environments(connection, reader) if self._borrow else {}
        found = loans(self._environment, self._borrow, stored.values())
        lent = {key: there for key, there in stored.items() if there in found and found[there] is None}
        rows: list[Row] = []
        failures: list[list[_Failed]] = []
        for environments in (own, lent):
            asked = (connection, environments, self._world_size, reader)
            marks: dict[str, Any] = {"layer": layer, "layer_rank": layer_rank, "borrowed": environments is lent}
            rows += ok_rows(*asked, here=self._environment, like=like, **marks) if environments else []
            failures.append(_failed_trials(*asked, like) if environments else [])
        pins = query.pins(connection, reader, PinRow.environment_id.in_(list(own)))
        return Fetched(layer, layer_rank, rows, failures[0], failures[1], pins, found)

    def add(self, fetched: Fetched) -> None:
        """Merge a database that is no nearer than those before."""
        for row in fetched.rows:
            into, key = self._lent if row.borrowed else self._own, self._key(row)
            into.good[key] = max(row.created_at, into.good.get(key, ""))
            known = into.rows.get(key)
            if known is None or _replaces(row, known):
                into.rows[key] = row
        for into, failures in ((self._own, fetched.failures), (self._lent, fetched.lent_failures)):
            for failure in failures:
                key = self._key(failure)
                latest = into.failures.get(key)
                if latest is None or (failure.created_at, failure.status) > (latest.created_at, latest.status):
                    into.failures[key] = failure
        for pin in fetched.pins:  # the newest of each problem that has none from a nearer layer
            if pin.problem.world_size != self._world_size or pin.environment.hard_key != self._environment.hard_key:
                continue
            # Equal times are told apart by content, so that every host decides alike.
            age = (-fetched.layer_rank, pin.created_at, str(pin.candidate), pin.reason)
            if pin.problem not in self._pins or age > self._pins[pin.problem][0]:
                candidate, reason = pin.candidate, pin.reason
                pinned = Pinned(problem=pin.problem, candidate=candidate, reason=reason, layer=fetched.layer)
                self._pins[pin.problem] = (age, pinned)
        self._loans.update(fetched.loans)

    def _key(self, trial: Row | _Failed) -> _Key:
        return (self._problems.of(trial.problem), self._candidates.of(trial.candidate), trial.source_hash)

    def build(self) -> Snapshot:
        """The snapshot of what was read."""
        failures = self._own.failed()
        rows = {key: row for key, row in self._own.rows.items() if key not in failures}
        lent: dict[_Key, Row] = {}
        if self._lent.rows:
            doubtful = {self._family(key) for key in (*failures, *self._lent.failed())}
            kept = ((k, row) for k, row in self._lent.rows.items() if k not in self._own.rows)
            lent = {key: row for key, row in kept if self._family(key) not in doubtful}
        return Snapshot(
            environment=self._environment,
            world_size=self._world_size,
            rows=(*rows.values(), *lent.values()),
            pins=tuple(pinned for _, pinned in self._pins.values()),
            failures=_one_a_family(failures.values()),
            notes=(
                *_drift_notes(self._environment, rows.values()),
                *_borrow_notes(lent.values()),
                *self._loan_notes(),
            ),
        )

    def _family(self, key: _Key) -> tuple[Problem, Candidate, str]:
        return (self._problems.values[key[0]].family, self._candidates.values[key[1]], key[2])

    def _loan_notes(self) -> list[str]:
        """Remarks on named hardware that does not serve."""
        refused = {f"nothing is borrowed from {there}: {why}" for there, why in self._loans.items() if why is not None}
        unknown = [name for name in self._borrow if not any(matches(name, there) for there in self._loans)]
        return sorted(refused) + [
            f"nothing is borrowed from {name!r}: no database holds such hardware" for name in unknown
        ]


def _replaces(row: Row, known: Row) -> bool:
    """True if `row` replaces `known`, of the same candidate: by tier, then the newest; never by row id."""
    if row.tier != known.tier:
        return row.tier < known.tier
    return _age(row) > _age(known)


def _age(row: Row) -> tuple[Any, ...]:
    # Equal times are told apart by content, so that the order of storing never matters.
    return (row.created_at, -row.latency_p50_us, row.samples, row.baseline_p50_us or 0.0, row.environment.digest)


def _one_a_family(trials: Iterable[_Failed]) -> tuple[Failure, ...]:
    """The failure at the first problem of each family: one is enough to keep a candidate from being predicted."""
    kept: dict[tuple[Problem, Candidate, str], _Failed] = {}
    for trial in sorted(trials, key=lambda t: (t.problem, t.created_at, t.status)):
        kept.setdefault((trial.problem.family, trial.candidate, trial.source_hash), trial)
    return tuple(
        Failure(problem=t.problem, candidate=t.candidate, source_hash=t.source_hash, status=t.status)
        for t in kept.values()
    )


def _drift_notes(here: Environment, rows: Collection[Row]) -> tuple[str, ...]:
    drifted = [row.environment for row in rows if row.drift]
    changes = sorted(
        {
            f"{name} {getattr(there, name) or '(none)'} → {getattr(here, name) or '(none)'}"
            for there in {id(there): there for there in drifted}.values()
            for name in SOFT_FIELDS
            if name != "tunedcomm" and getattr(there, name) != getattr(here, name)
        }
    )
    note = (
        f"{len(drifted)} of {len(rows)} rows were measured under other software ({', '.join(changes)}); they are used "
        "where there is nothing newer. `tunedcomm tune` measures them again"
    )
    return (note,) if drifted else ()


def _borrow_notes(rows: Iterable[Row]) -> tuple[str, ...]:
    return tuple(
        f"{count} rows are borrowed from {environment}; they serve where nothing was measured on this hardware. "
        "`tunedcomm tune` measures here"
        for environment, count in sorted(Counter(str(row.environment) for row in rows).items())
    )


# What dispatch and `explain` need of a database: winners and runners-up, what must not run, and what explains both
#
# Kept of the trials: the newest final of each candidate; of what was only searched, the best few candidates of each
# variant that has no final there, and of every variant where a snapshot would look at them, at problems that none of
# the current kernels has finals for; candidates that were incorrect, crashed or hung, with the newest good trial of
# each; and how a variant's last trial of a problem ended, where it never ran there. Kept of the rest: pins, what trials
# and pins refer to, and each variant's newest source. So a snapshot has the digest that it had before.

_CANDIDATE = (TrialRow.environment_id, TrialRow.problem_id, TrialRow.variant_id, TrialRow.config_digest)
# As dispatch orders the trials of one candidate.
_NEWEST_FIRST = (TrialRow.created_at.desc(), TrialRow.latency_p50_us, TrialRow.id)


def needed_trials() -> Select[Any]:
    """Ids of the trials that are kept."""
    kept = union_all(_final_trials(), _best_searched(), _failures(), _good_again(), _last_words()).subquery()
    return select(kept.c.id)


def keep_needed(connection: Connection) -> None:
    """Delete every other row of the open SQLite database."""
    connection.execute(delete(TrialRow).where(TrialRow.id.not_in(needed_trials())))
    for model, rows in query.unused_rows(true()).items():
        connection.execute(delete(model).where(table(model).c.id.in_(rows)))


def _newest_of_candidates(*where: Any) -> Select[Any]:
    """The newest of the trials of each candidate that fulfil `where`."""
    age = func.row_number().over(partition_by=_CANDIDATE, order_by=_NEWEST_FIRST)
    ages = select(TrialRow.id, age.label("age")).where(*where).subquery()
    return select(ages.c.id).where(ages.c.age == 1)


def _final_trials() -> Select[Any]:
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


def _failures() -> Select[Any]:
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
