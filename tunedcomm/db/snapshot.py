"""From the rows of several databases to one snapshot.

A database of a cluster holds a million trials, a snapshot a few thousand of them. What can be left out is left out by
SQL, over the index `ix_trial_snapshot`; only columns that are used are fetched; problems and variants are read once,
and only the ones that rows refer to.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Any, NamedTuple, TypeAlias

from sqlalchemy import Connection, Select, delete, exists, false, func, or_, select, true, tuple_, union_all

from tunedcomm.db import query
from tunedcomm.db.query import BEST_OF_VARIANT, load_problems_by_id, load_variants, raw, table
from tunedcomm.db.records import LATENCIES, LEAST_US, MOST_US, Pin, Reader, Trial, check_op
from tunedcomm.db.schema import PinRow, ProblemRow, TrialRow, VariantRow
from tunedcomm.db.values import DANGEROUS, id_of
from tunedcomm.hardware import SOFT_FIELDS, Environment
from tunedcomm.selection.interpolate import problems_to_load
from tunedcomm.selection.score import quiet_rows
from tunedcomm.selection.select import Decision, Registered, winners
from tunedcomm.selection.snapshot import (
    Failure,
    Numbers,
    Pinned,
    Row,
    Snapshot,
    is_drift,
    is_sibling,
    loans,
    matches,
)
from tunedcomm.settings import SIBLINGS
from tunedcomm.spec import Candidate, Problem

# Problem and candidate as numbers, and the source hash.
_Key: TypeAlias = tuple[int, int, str]
# When a trial was incorrect, crashed or hung.
_Failed: TypeAlias = tuple[str, Failure]


# Queries


# What tells the problems of one family from others.
_FAMILY = tuple(item.name for item in fields(Problem) if item.name != "shape")
_VARIANT = (TrialRow.environment_id, TrialRow.problem_id, TrialRow.variant_id)
_CANDIDATE = (*_VARIANT, TrialRow.config_digest)
_OK, _IS_FINAL = TrialRow.status == "ok", TrialRow.final == true()
_SEARCHED = (TrialRow.final == false(), TrialRow.latency_p50_us > 0)


def _of_world(world_size: int, like: Problem | None) -> Select[Any]:
    """Ids of the problems of a world size, or of the problems that may answer for `like`."""
    if like is None:
        return select(ProblemRow.id).where(ProblemRow.world_size == world_size)
    related = problems_to_load(like)
    same = [getattr(ProblemRow, name).in_({getattr(problem, name) for problem in related}) for name in _FAMILY]
    return select(ProblemRow.id).where(*same)


def _first(most: int, of: Sequence[Any], orders: Sequence[Sequence[Any]], *where: Any) -> Select[Any]:
    """Ids of trials that fulfil `where` and are among the first `most` of their group in one of the orders."""
    places = [
        func.row_number().over(partition_by=of, order_by=order).label(f"place_{i}") for i, order in enumerate(orders)
    ]
    found = select(TrialRow.id, *places).where(*where).subquery()
    return select(found.c.id).where(or_(*(found.c[place.key] <= most for place in places)))


_NEWEST = (TrialRow.created_at.desc(), TrialRow.latency_p50_us, TrialRow.id)
# The library's time beside a trial tells whether the host was loaded.
_QUIETEST = (TrialRow.baseline_p50_us.is_(None), TrialRow.baseline_p50_us, *_NEWEST)


def _finals(*where: Any) -> Select[Any]:
    """The newest good final of each candidate, and the one beside which the library was fastest."""
    return _first(1, _CANDIDATE, [_NEWEST, _QUIETEST], _OK, _IS_FINAL, *where)


def _best_searched(*where: Any) -> Select[Any]:
    """The best few candidates of each variant outside of finals, by time and by ratio to the library's time.

    Times of different runs are not comparable, and neither are ratios where something disturbed the library.
    """
    quietest = TrialRow.id.in_(_first(1, _CANDIDATE, [_QUIETEST], _OK, *_SEARCHED, *where))
    time, ratio = TrialRow.latency_p50_us, TrialRow.latency_p50_us / func.nullif(TrialRow.baseline_p50_us, 0.0)
    orders = [(time, TrialRow.id), (ratio.is_(None), ratio, TrialRow.id)]
    return _first(BEST_OF_VARIANT, _VARIANT, orders, quietest)


def _finished(*columns: Any) -> Select[Any]:
    """Problems at which a challenger's newest source has finals.

    Finals of kernels that have changed since must not hide what was measured of the new ones.
    """
    newest = (
        select(func.max(VariantRow.id)).where(VariantRow.name != "library").group_by(VariantRow.op, VariantRow.name)
    )
    return select(*columns).where(_OK, _IS_FINAL, TrialRow.variant_id.in_(newest))


# Columns whose values a `Row` has, too.
_OF_ROWS = (*LATENCIES, "samples", "final")
# Of an `ok` trial or a failed one.
_READ = ("id", "problem_id", "variant_id", "config", "config_digest", "status", *_OF_ROWS, "created_at")
_COLUMNS = tuple(raw(table(TrialRow).columns[name]) for name in _READ)


def _parsed(connection: Connection, reader: Reader, *where: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """Status and fields of a `Row` of each trial that makes sense."""
    rows: Sequence[Any] = connection.execute(select(*_COLUMNS).where(*where)).all()
    problems = load_problems_by_id(connection, {row.problem_id for row in rows}, reader)
    variants = load_variants(connection, reader) if rows else {}
    for row in rows:
        problem, variant = problems.get(row.problem_id), variants.get(row.variant_id)
        if problem is None or variant is None:
            continue  # It was skipped and counted already, or is not there.
        try:
            check_op(variant, problem)
            values = reader.trial(row._mapping)
            parsed = {name: values[name] for name in _OF_ROWS} | {
                "problem": problem,
                "candidate": reader.candidate(problem.op, variant.name, row.config),
                "source_hash": variant.source_hash,
                "created_at": values["created_at"].isoformat(),
                "trial_id": id_of(row.id),
            }
        except ValueError as error:
            reader.skipped.add("trial", row.id, error)
        else:
            yield row.status, parsed


def ok_rows(
    connection: Connection,
    environments: Mapping[int, Environment],
    world_size: int,
    reader: Reader,
    *,
    serving: Environment,
    layer: str,
    layer_rank: int,
    borrowed: bool,
    like: Problem | None,
) -> list[Row]:
    """The rows that a snapshot needs of one database: finals, and the best of each variant where there are none.

    With `like`, only rows of problems that may answer for it. Rows of other software than `serving` has are marked as
    drift.
    """
    of_world = _of_world(world_size, like)
    found: list[Row] = []
    for environment_id, environment in sorted(environments.items()):
        drift = is_drift(serving, environment)
        in_environment = TrialRow.environment_id == environment_id
        unfinished = of_world.where(ProblemRow.id.not_in(_finished(TrialRow.problem_id).where(in_environment)))
        finals = _finals(in_environment, TrialRow.problem_id.in_(of_world))
        searched = _best_searched(in_environment, TrialRow.problem_id.in_(unfinished))
        found += [
            Row(environment=environment, drift=drift, borrowed=borrowed, layer=layer, layer_rank=layer_rank, **parsed)
            for _, parsed in _parsed(connection, reader, TrialRow.id.in_(union_all(finals, searched)))
        ]
    return found


def _failed_trials(
    connection: Connection,
    environments: Mapping[int, Environment],
    world_size: int,
    reader: Reader,
    like: Problem | None,
) -> list[_Failed]:
    """Trials that were incorrect, crashed or hung, where the same candidate was not good on the same problem since."""
    since = table(TrialRow).alias()
    p50 = since.c.latency_p50_us
    good_since = exists().where(
        since.c.environment_id.in_(list(environments)),
        since.c.status == "ok",
        # As `Reader.trial` has it: any other trial is read by nobody.
        p50.between(LEAST_US, MOST_US),
        func.coalesce(since.c.latency_p10_us, p50) <= p50,
        func.coalesce(since.c.latency_p90_us, p50) >= p50,
        since.c.created_at <= reader.latest,
        since.c.final.in_([False, True]),  # lets the index be used through to the candidate
        since.c.problem_id == TrialRow.problem_id,
        since.c.variant_id == TrialRow.variant_id,
        since.c.config_digest == TrialRow.config_digest,
        since.c.created_at > TrialRow.created_at,
    )
    failed = (
        TrialRow.environment_id.in_(list(environments)),
        TrialRow.status.in_(DANGEROUS),
        TrialRow.problem_id.in_(_of_world(world_size, like)),
        ~good_since,
    )
    of_failure = ("problem", "candidate", "source_hash")
    return [
        (parsed["created_at"], Failure(status=status, **{name: parsed[name] for name in of_failure}))
        for status, parsed in _parsed(connection, reader, *failed)
    ]


class Fetched(NamedTuple):
    """The rows of one database that a snapshot needs.

    `lent_failures` are of hardware that may stand in; `num_skipped` counts invalid rows.
    """

    layer: str
    layer_rank: int
    rows: list[Row]
    failures: list[_Failed]
    lent_failures: list[_Failed]
    pins: list[Pin]
    loans: Mapping[Environment, str | None]
    num_skipped: int = 0


def fetch(
    connection: Connection,
    reader: Reader,
    *,
    environment: Environment,
    world_size: int,
    layer: str = "user",
    layer_rank: int = 0,
    borrow: Sequence[str] = (),
    like: Problem | None = None,
) -> Fetched:
    """Read what `build_snapshot` takes of one database."""
    local = query.environments_like(connection, environment, reader)
    stored = query.load_environments(connection, reader) if borrow else {}
    found = loans(environment, borrow, stored.values())
    lent = {key: other for key, other in stored.items() if other in found and found[other] is None}
    rows: list[Row] = []
    failures: list[list[_Failed]] = []
    for environments in (local, lent):
        arguments = (connection, environments, world_size, reader)
        marks: dict[str, Any] = {"layer": layer, "layer_rank": layer_rank, "borrowed": environments is lent}
        rows += ok_rows(*arguments, serving=environment, like=like, **marks) if environments else []
        failures.append(_failed_trials(*arguments, like) if environments else [])
    pins = query.pins(connection, reader, PinRow.environment_id.in_(list(local)))
    pins = [pin for pin in pins if pin.problem.world_size == world_size]
    return Fetched(layer, layer_rank, rows, failures[0], failures[1], pins, found, reader.skipped.count)


# Building


def row_of(trial: Trial) -> Row:
    """The row of an ok trial that was just measured."""
    assert trial.latency_p50_us is not None
    names = ("problem", "candidate", "source_hash", "environment", *_OF_ROWS)
    return Row(**{name: getattr(trial, name) for name in names}, created_at=trial.created_at.isoformat())


def snapshot_of(environment: Environment, world_size: int, trials: Iterable[Trial]) -> Snapshot:
    """The snapshot of trials that were measured in this environment."""
    rows, failures = list[Row](), list[_Failed]()
    for trial in trials:
        if trial.status == "ok":
            rows.append(row_of(trial))
        elif trial.status in DANGEROUS:
            failure = Failure(
                problem=trial.problem,
                candidate=trial.candidate,
                source_hash=trial.source_hash,
                status=trial.status,
            )
            failures.append((trial.created_at.isoformat(), failure))
    return build_snapshot(environment, world_size, [Fetched("user", 0, rows, failures, [], [], {})])


def build_snapshot(
    environment: Environment, world_size: int, databases: Sequence[Fetched], borrow: Sequence[str] = ()
) -> Snapshot:
    """Merge databases into a snapshot.

    For each candidate and problem the most conclusive row is kept: finals before others, the same software before
    older, nearer layers before farther ones, then the newest beside which the library was not disturbed. A borrowed row
    is a guess: it gives way to any row of this hardware, and is not kept for candidates that failed in the family, here
    or there.
    """
    # Thousands of rows refer to the same few hundred problems and candidates, which are slow to compare.
    problems: Numbers[Problem] = Numbers()
    candidates: Numbers[Candidate] = Numbers()

    def key(trial: Row | Failure) -> _Key:
        return (problems.of(trial.problem), candidates.of(trial.candidate), trial.source_hash)

    def family(key: _Key) -> tuple[Problem, Candidate, str]:
        return (problems.values[key[0]].family, candidates.values[key[1]], key[2])

    def merge(rows: Iterable[Row], failures: Iterable[_Failed]) -> tuple[dict[_Key, Row], dict[_Key, _Failed]]:
        """The row to keep of each candidate, and the latest failure of candidates that were not good since."""
        measured: dict[_Key, list[Row]] = {}
        for row in rows:
            measured.setdefault(key(row), []).append(row)
        good = {place: max(row.created_at for row in group) for place, group in measured.items()}
        kept = {place: _most_conclusive(group) for place, group in measured.items()}
        failed: dict[_Key, _Failed] = {}
        for failure in failures:
            place = key(failure[1])
            latest = failed.get(place, failure)
            if failure[0] >= good.get(place, "") and (failure[0], failure[1].status) >= (latest[0], latest[1].status):
                failed[place] = failure
        return kept, failed

    def of_all(name: str) -> list[Any]:
        return [item for database in databases for item in getattr(database, name)]

    local, failed = merge((row for row in of_all("rows") if not row.borrowed), of_all("failures"))
    rows = [row for place, row in local.items() if place not in failed]
    lent, lent_failed = merge((row for row in of_all("rows") if row.borrowed), of_all("lent_failures"))
    doubtful = {family(place) for place in (*failed, *lent_failed)} if lent else set()
    borrowed = [row for place, row in lent.items() if place not in local and family(place) not in doubtful]
    found = {other: why for database in databases for other, why in database.loans.items()}
    return Snapshot(
        environment=environment,
        world_size=world_size,
        rows=(*rows, *borrowed),
        pins=_nearest_pins(databases),
        failures=_one_a_family(failed.values()),
        notes=(
            *_drift_notes(environment, rows),
            *_borrow_notes(environment, borrowed, borrow if rows else ("*",)),
            *_loan_notes(borrow, found),
        ),
    )


def _most_conclusive(rows: Sequence[Row]) -> Row:
    """The row of one candidate to keep: of the best tier the newest undisturbed one; never by row id."""
    if len(rows) == 1:
        return rows[0]
    tier = min(row.tier for row in rows)

    def weight(row: Row) -> tuple[Any, ...]:
        # Equal times are told apart by content, so that the order of storing never matters.
        content = (-row.latency_p50_us, row.samples, row.baseline_p50_us or 0.0, row.environment.digest)
        return (row.created_at, *content)

    return max(quiet_rows([row for row in rows if row.tier == tier]), key=weight)


def _nearest_pins(databases: Iterable[Fetched]) -> tuple[Pinned, ...]:
    """The newest pin of each problem that has none in a nearer layer."""
    # Equal times are told apart by content, so that every host decides alike.
    found: dict[Problem, Pinned] = {}
    for database in sorted(databases, key=lambda each: -each.layer_rank):
        for pin in sorted(database.pins, key=lambda each: (each.created_at, str(each.candidate), each.reason)):
            found[pin.problem] = Pinned(
                problem=pin.problem, candidate=pin.candidate, reason=pin.reason, layer=database.layer
            )
    return tuple(found.values())


def _one_a_family(failed: Iterable[_Failed]) -> tuple[Failure, ...]:
    """The failure at the first problem of each family: one is enough to keep a candidate from being predicted."""
    kept: dict[tuple[Problem, Candidate, str], Failure] = {}
    for _, failure in sorted(failed, key=lambda each: (each[1].problem, each[0], each[1].status)):
        kept.setdefault((failure.problem.family, failure.candidate, failure.source_hash), failure)
    return tuple(kept.values())


def _drift_notes(environment: Environment, rows: Sequence[Row]) -> tuple[str, ...]:
    drifted = [row.environment for row in rows if row.drift]
    changes = sorted(
        {
            f"{name} {getattr(other, name) or '(none)'} → {getattr(environment, name) or '(none)'}"
            for other in {id(other): other for other in drifted}.values()
            for name in SOFT_FIELDS
            if name != "tunedcomm" and getattr(other, name) != getattr(environment, name)
        }
    )
    note = (
        f"{len(drifted)} of {len(rows)} rows were measured under other software ({', '.join(changes)}); they are used "
        "where there is nothing newer. `tunedcomm tune` measures them again"
    )
    return (note,) if drifted else ()


def _borrow_notes(here: Environment, rows: Iterable[Row], names: Sequence[str]) -> tuple[str, ...]:
    """Remarks on hardware whose rows serve; none on siblings that fill gaps without having been named."""
    counts = Counter(row.environment for row in rows)
    return tuple(
        f"{count} rows are borrowed from {there}; they serve where nothing was measured on this hardware, and each "
        "kernel is checked at its first use. `tunedcomm tune` measures here"
        for there, count in sorted(counts.items(), key=str)
        if not is_sibling(here, there) or any(matches(name, there) for name in names)
    )


def _loan_notes(borrow: Sequence[str], found: Mapping[Environment, str | None]) -> list[str]:
    """Remarks on named hardware that does not serve."""
    refused = {f"nothing is borrowed from {other}: {why}" for other, why in found.items() if why is not None}
    named = [name for name in borrow if name != SIBLINGS]
    unknown = [name for name in named if not any(matches(name, other) for other in found)]
    return sorted(refused) + [f"nothing is borrowed from {name!r}: no database holds such hardware" for name in unknown]


def winners_of(
    connection: Connection,
    reader: Reader,
    *,
    environment: Environment,
    problems: Sequence[Problem],
    catalog: Registered,
) -> dict[Problem, Decision]:
    """Dispatch's answers at problems of one world size, by this database alone, if nothing is pinned."""
    world_size = problems[0].world_size
    fetched = fetch(connection, reader, environment=environment, world_size=world_size)
    return winners(build_snapshot(environment, world_size, [fetched]), catalog, problems)


# What dispatch and `explain` need of a database: winners and runners-up, what must not run, and what explains both
#
# Kept of the trials: the newest final of each candidate, and the final of its quietest run; of what was only searched,
# the best few candidates of each variant that has no final there, and of every variant where a snapshot would look at
# them, at problems that none of the current kernels has finals for; candidates that were incorrect, crashed or hung,
# with the newest good trial of each; and how a variant's last trial of a problem ended, where it never ran there, which
# `explain` gives as the reason. Kept of the rest: pins, what trials and pins refer to, and each variant's newest
# source. So a snapshot has the digest that it had before.


def needed_trials() -> Select[Any]:
    """Ids of the trials that are kept."""
    problem, variant = tuple_(*_VARIANT[:2]), tuple_(*_VARIANT)
    candidate = (TrialRow.problem_id, TrialRow.variant_id, TrialRow.config_digest)
    ran = select(*_VARIANT).where(_OK)
    searched = or_(variant.not_in(ran.where(_IS_FINAL)), problem.not_in(_finished(*_VARIANT[:2])))
    failed = TrialRow.status.in_(DANGEROUS)
    last_first = (TrialRow.created_at.desc(), TrialRow.id.desc())
    kept = (
        _finals(),
        _best_searched(searched),
        _first(1, _CANDIDATE, [_NEWEST], _OK, tuple_(*candidate).in_(select(*candidate).where(failed))),
        _first(1, _VARIANT, [last_first], TrialRow.status != "infeasible", variant.not_in(ran)),
    )
    return select(TrialRow.id).where(or_(failed, *map(TrialRow.id.in_, kept)))


def keep_needed(connection: Connection) -> None:
    """Delete every other row of the open SQLite database."""
    connection.execute(delete(TrialRow).where(TrialRow.id.not_in(needed_trials())))
    for model, rows in query.unused_rows(true()).items():
        connection.execute(delete(model).where(table(model).c.id.in_(rows)))
