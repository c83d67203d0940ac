"""A database as lines of JSON: one row a line, keys and lines sorted, nothing that depends on ids or on the driver.

The first line names format and schema, the last one says how many lines come before it. Between them are environments,
runs, the variants of each name from the oldest source to the newest, trials and pins. A trial holds its problem and
what tells its variant from others in full, and refers to environment and run by their digests, so that a line says in a
diff what it means. Times are ISO 8601 in UTC; an infinite error is "inf". The same rows give the same lines, whichever
database holds them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeAlias

from sqlalchemy import Connection, String, func, select, type_coerce

from tunedcomm.db import rows as parse
from tunedcomm.db.columns import own_columns, to_plain
from tunedcomm.db.query import table
from tunedcomm.db.records import canonical_json, config_digest
from tunedcomm.db.rows import Reader
from tunedcomm.db.schema import HEAD, Base, EnvironmentRow, PinRow, ProblemRow, RunRow, TrialRow, VariantRow
from tunedcomm.spec import Problem, format_shape

__all__ = ["FORMAT", "FORMAT_VERSION", "Line", "OnBad", "check_trial", "end", "lines", "run_key"]

FORMAT = "tunedcomm-jsonl"
FORMAT_VERSION = 1
# Columns by which a run of one database is the same as a run of another; its end may be known to one alone.
RUN_IDENTITY = ("command", "seed", "budget", "host", "user", "version", "started_at")

Line: TypeAlias = dict[str, Any]
# Told of a row that makes no sense, by table and id, and of what is wrong with it.
OnBad: TypeAlias = Callable[[str, str], None]
_Plain: TypeAlias = dict[int, dict[str, Any]]


def end(count: int) -> Line:
    """The last line, after `count` others."""
    return {"kind": "end", "lines": count}


def run_key(run: Mapping[str, Any]) -> str:
    """How trials refer to a run: a digest of all but its end."""
    identity = {name: run[name] for name in RUN_IDENTITY}
    return hashlib.sha256(canonical_json(identity).encode()).hexdigest()[:16]


def lines(connection: Connection, on_bad: OnBad) -> Iterator[Line]:
    """Every row that makes sense, between the first line and the last one.

    Args:
        connection: in a transaction that reads a database of this schema.
        on_bad: told of every row that makes no sense; a trial whose problem makes none is one itself.
    """
    yield {"format": FORMAT, "version": FORMAT_VERSION, "schema": HEAD}
    count = 1
    for line in _Dump(connection, on_bad).rows():
        yield line
        count += 1
    yield end(count)


class _Dump:
    def __init__(self, connection: Connection, on_bad: OnBad) -> None:
        self._connection = connection
        self._on_bad = on_bad
        self._reader = Reader()
        self._environments: _Plain = {}
        self._runs: _Plain = {}
        self._variants: _Plain = {}
        self._problems: dict[int, tuple[Problem, dict[str, Any]]] = {}

    def rows(self) -> Iterator[Line]:
        self._environments = self._load(EnvironmentRow, _environment)
        self._runs = self._load(RunRow, _run)
        self._variants = self._load(VariantRow, _variant)
        self._problems = self._load(ProblemRow, _problem)
        yield from _sorted(self._environments.values())
        yield from _sorted(_last_known(self._runs.values()))
        # Ids are in the order in which sources were first measured; the last of a name is its newest.
        by_name = sorted(self._variants.items(), key=lambda item: (item[1]["op"], item[1]["variant"], item[0]))
        yield from (line for _, line in by_name)
        problems = sorted(self._problems, key=lambda id_: (_order(self._problems[id_][0]), id_))
        for id_ in problems:
            yield from _sorted(self._of_problem(TrialRow, id_, self._trial), key=_trial_order)
        yield from _sorted(line for id_ in problems for line in self._of_problem(PinRow, id_, self._pin))
        self._count_orphans()

    def _rows(self, model: type[Base], *where: Any) -> Iterator[Any]:
        # As they lie: a result processor would raise in the middle of a fetch.
        columns = [type_coerce(column, String()).label(column.key) for column in table(model).columns]
        yield from self._connection.execute(select(*columns).where(*where)).mappings()

    def _load(self, model: type[Base], plain: Callable[[Mapping[str, Any]], Any]) -> dict[int, Any]:
        found = {}
        for row in self._rows(model):
            try:
                found[row["id"]] = plain(row)
            except ValueError as error:
                self._on_bad(f"{model.__tablename__} {row['id']}", str(error))
        return found

    def _of_problem(
        self, model: type[Base], problem_id: int, plain: Callable[[Mapping[str, Any]], Line]
    ) -> Iterator[Line]:
        for row in self._rows(model, table(model).c.problem_id == problem_id):
            try:
                if row["problem_id"] != problem_id:  # found by an index that is damaged
                    raise ValueError(f"an index has it under problem {problem_id}, it says {row['problem_id']!r:.40}")
                yield plain(row)
            except ValueError as error:
                self._on_bad(f"{model.__tablename__} {row['id']}", str(error))

    def _trial(self, row: Mapping[str, Any]) -> Line:
        problem, plain_problem = self._problems[row["problem_id"]]
        variant = _referred(self._variants, row["variant_id"], "variant")
        if variant["op"] != problem.op:
            raise ValueError(f"a variant of {variant['op']!r:.80} on a problem of {problem.op!r:.80}")
        run = None if row["run_id"] is None else _referred(self._runs, row["run_id"], "run")
        config = self._reader.config(row["config"])
        if row["config_digest"] != config_digest(config):
            raise ValueError(f"config_digest is {row['config_digest']!r:.40}, which is not that of its config")
        own = _columns(TrialRow, row, without=("config",))
        check_trial(own)
        return {
            **own,
            "kind": "trial",
            "problem": plain_problem,
            "environment": _referred(self._environments, row["environment_id"], "environment")["environment"],
            **{name: variant[name] for name in ("variant", "numerics", "source_hash")},
            "config": config,
            "run": None if run is None else run["run"],
        }

    def _pin(self, row: Mapping[str, Any]) -> Line:
        return {
            **_columns(PinRow, row, without=("config",)),
            "kind": "pin",
            "problem": self._problems[row["problem_id"]][1],
            "environment": _referred(self._environments, row["environment_id"], "environment")["environment"],
            "config": self._reader.config(row["config"]),
        }

    def _count_orphans(self) -> None:
        for model in (TrialRow, PinRow):
            column = table(model).c.problem_id
            held = self._connection.execute(select(column, func.count()).group_by(column))
            orphans = sum(int(count) for id_, count in held if id_ not in self._problems)
            if orphans:
                what = f"{orphans} rows refer to problems that are not there or make no sense"
                self._on_bad(f"table {model.__tablename__}", what)


def check_trial(own: Mapping[str, Any]) -> None:
    """Raise ValueError where the plain values of a trial contradict what its status says or its units allow."""
    status = parse.status_of(own["status"])
    for name in ("latency_p10_us", "latency_p50_us", "latency_p90_us", "baseline_p50_us"):
        parse.latency_of(own[name], name)
    if status == "ok" and own["latency_p50_us"] is None:
        raise ValueError("an ok trial without latency_p50_us")
    parse.int_of(own["samples"], "samples")


def _columns(model: type[Base], row: Mapping[str, Any], *, without: tuple[str, ...] = ()) -> dict[str, Any]:
    return {c.name: to_plain(c, row[c.name]) for c in own_columns(model) if c.name not in without}


def _referred(found: _Plain, id_: Any, name: str) -> dict[str, Any]:
    if id_ not in found:
        raise ValueError(f"it refers to {name} {id_!r:.20}, which is not there or makes no sense")
    return found[id_]


def _environment(row: Mapping[str, Any]) -> Line:
    environment = parse.parse_environment(row)
    if row["digest"] != environment.digest:
        raise ValueError(f"its digest is {row['digest']!r:.80}, that of its fields is {environment.digest!r}")
    return {**_columns(EnvironmentRow, row), "kind": "environment", "environment": environment.digest}


def _run(row: Mapping[str, Any]) -> Line:
    own = _columns(RunRow, row)
    return {**own, "kind": "run", "run": run_key(own)}


def _variant(row: Mapping[str, Any]) -> Line:
    variant = parse.parse_variant(row)
    own = _columns(VariantRow, row, without=("name",))
    return {**own, "kind": "variant", "variant": variant.name}


def _problem(row: Mapping[str, Any]) -> tuple[Problem, dict[str, Any]]:
    problem = parse.parse_problem(row)
    if row["digest"] != problem.digest:
        raise ValueError(f"its digest is {row['digest']!r:.80}, that of its fields is {problem.digest!r}")
    return problem, {**_columns(ProblemRow, row), "shape": format_shape(problem.shape)}


def _last_known(runs: Any) -> list[Line]:
    """Each run once, with its end if that is known."""
    found: dict[str, Line] = {}
    for run in runs:
        if (run["finished_at"] or "") >= (found.get(run["run"], run)["finished_at"] or ""):
            found[run["run"]] = run
    return list(found.values())


def _order(problem: Problem) -> tuple[Any, ...]:
    """Families together, each from the smallest shape to the largest."""
    family = problem.family
    return (family.op, family.world_size, family, problem.shape)


def _trial_order(line: Line) -> tuple[Any, ...]:
    names = ("environment", "variant", "source_hash", "numerics")
    return (*(line[name] for name in names), canonical_json(line["config"]), line["final"], line["created_at"])


def _sorted(found: Any, *, key: Callable[[Line], tuple[Any, ...]] = lambda line: ()) -> list[Line]:
    return sorted(found, key=lambda line: (key(line), canonical_json(line)))
