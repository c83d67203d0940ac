"""The engine that copies databases: any form of one is read as lines, and one writer adds them to a database.

The forms are SQLite files, database servers, and JSON lines. Every value is checked on its way, and a new column of the
models is copied without a change here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sqlalchemy import (
    Boolean,
    Column,
    ColumnElement,
    Connection,
    Float,
    MetaData,
    String,
    Table,
    and_,
    delete,
    exists,
    func,
    insert,
    select,
    type_coerce,
    update,
)

from tunedcomm.db import records as parse
from tunedcomm.db.engine import connected, create_file, parse_target
from tunedcomm.db.jsonl import RUN_IDENTITY, Line, OnBad, SoundRows, is_jsonl, key_of, read_lines
from tunedcomm.db.query import table
from tunedcomm.db.records import Reader, canonical_json, config_digest
from tunedcomm.db.schema import Base, EnvironmentRow, PinRow, ProblemRow, RunRow, TrialRow, VariantRow
from tunedcomm.db.store import Database, get_or_create
from tunedcomm.errors import DatabaseCorruptError

_BATCH = 2000


@dataclass(frozen=True, slots=True, kw_only=True)
class Absorbed:
    """The part that one source had in a merge.

    Attributes:
        source: the file or server.
        trials: trials that it holds.
        known: those of them that were there already, equal in every column.
    """

    source: str
    trials: int
    known: int


def absorb(connection: Connection, source: str | Path, on_bad: OnBad | None = None) -> Absorbed:
    """Copy all rows of a database into the open one, all or none; a row that both hold is there once.

    Environments, problems, variants and runs that are there already are used; a pin replaces an older one of the same
    problem and environment. Trials keep their order. The sources of one variant are numbered by
    their first trials, as if all had been measured into this database.

    Args:
        connection: of the database that takes the rows, in no transaction.
        source: a SQLite file, a file of JSON lines, or the URL of a server; it is not changed.
        on_bad: told of rows of a database that make no sense, which are left out; None refuses them.

    Raises:
        DatabaseAccessError: the source cannot be read.
        DatabaseCorruptError: it is damaged, or a line or row makes no sense, which is named.
        DatabaseVersionError: it is of a later schema than this tunedcomm.
        DatabaseAwayError: the server does not answer.
    """
    name = str(parse_target(source))
    with _opened(source, on_bad) as found, connection.begin():
        writer = _Writer(connection)
        for place, line in found:
            try:
                writer.add(line)
            except (ValueError, OverflowError, RecursionError) as error:
                raise _refusal(name, place, error) from None
        held, known = writer.finish()
    return Absorbed(source=name, trials=held, known=known)


def as_database(source: str | Path, scratch: Path) -> str:
    """The source as `Database.open` takes it: itself or, of JSON lines, a new file with their rows."""
    target = parse_target(source)
    if target.path is None or not is_jsonl(target.path):
        return target.name
    with connected(create_file(scratch)) as connection:
        absorb(connection, source)
    return str(scratch)


@contextmanager
def _opened(source: str | Path, on_bad: OnBad | None) -> Iterator[Iterator[tuple[str, Line]]]:
    """The lines of a database of any form, each with its place in words."""
    target = parse_target(source)

    def refuse(table_name: str, id_: Any, what: str) -> None:
        raise _refusal(str(target), f"{table_name} {id_}", what)

    if target.path is not None and is_jsonl(target.path):
        yield read_lines(target.path)
    else:
        with Database.open(target.name, readonly=True) as database, database.reading() as connection:
            yield ((line["kind"], line) for line in SoundRows(connection, on_bad or refuse).lines())


def _refusal(name: str, place: str, what: object) -> DatabaseCorruptError:
    return DatabaseCorruptError(
        f"{name}, {place}: {what}; nothing was imported: correct it, or restore a copy (`tunedcomm db check` lists the "
        "rows of a database that make no sense)"
    )


class _Writer:
    """Adds lines to a database, each after those that it refers to.

    Args:
        connection: in a transaction that writes.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._had_variants = connection.execute(select(VariantRow.id).limit(1)).first() is not None
        columns = [Column(column.name, column.type) for column in table(TrialRow).columns]
        self._trials = Table("incoming", MetaData(), *columns, prefixes=["TEMPORARY"])
        self._trials.create(connection, checkfirst=False)
        self._batch: list[dict[str, Any]] = []
        self._num_trials = 0
        # What lines before have given: key to id.
        self._ids: dict[str, dict[Any, int]] = {"environment": {}, "run": {}, "variant": {}, "problem": {}, "pin": {}}
        self._configs: dict[str, str] = {}
        self._reader = Reader()

    def add(self, line: Line) -> None:
        """Take one line; ValueError if it makes no sense, or not after the lines before it."""
        match line.get("kind"):
            case "environment":
                environment = parse.parse_environment(self._values(EnvironmentRow, line, "kind", "environment"))
                parse.check_digest(line.get("environment"), environment.digest)
                self._ids["environment"][environment.digest] = get_or_create(self._connection, [environment])[
                    environment
                ]
            case "run":
                values = self._values(RunRow, line, "kind", "run")
                parse.check_digest(line.get("run"), key := key_of(RunRow, values))
                self._ids["run"][key] = self._run_id(values)
            case "variant":
                values = self._values(VariantRow, {**line, "name": line.get("variant")}, "kind", "variant")
                variant = parse.parse_variant(values)
                self._ids["variant"][variant] = get_or_create(self._connection, [variant])[variant]
            case "trial":
                self._add_trial(line)
            case "pin":
                self._add_pin(line)
            case kind:
                raise ValueError(f"kind is {kind!r:.80}, not one of environment, run, variant, trial, pin")

    def finish(self) -> tuple[int, int]:
        """Append the trials that are new; returns how many were given, and how many of them were there."""
        self._flush()
        if self._connection.dialect.name == "postgresql":
            self._connection.exec_driver_sql("ANALYZE incoming")
        ours, theirs = table(TrialRow), self._trials
        names = [column.name for column in ours.columns if column.name != "id"]
        there = exists().where(_same(ours, theirs, names)).select_from(ours).correlate(theirs)
        known = self._connection.execute(select(func.count()).select_from(theirs).where(there)).scalar_one()
        new = select(*(theirs.c[name] for name in names)).where(~there).order_by(theirs.c.id)
        self._connection.execute(insert(ours).from_select(names, new))
        self._trials.drop(self._connection, checkfirst=False)
        if self._had_variants and known < self._num_trials:
            _order_variants(self._connection)
        return self._num_trials, int(known)

    def _flush(self) -> None:
        if self._batch:
            self._connection.execute(insert(self._trials), self._batch)
            self._batch.clear()

    def _values(self, model: type[Base], line: Mapping[str, Any], *others: str) -> dict[str, Any]:
        """The typed values of the model's columns; the line has fields of these names, and `others`."""
        values = {}
        for column in parse.own_columns(model):
            value = line.get(column.name)
            if isinstance(value, str):
                value.encode()  # half of a character raises ValueError
                if "\x00" in value:
                    raise ValueError(f"{column.name} holds a NUL character: {value!r:.80}")
            if isinstance(column.type, Boolean) and type(value) is not bool:
                raise ValueError(f"{column.name} is not true or false: {value!r:.80}")
            if isinstance(column.type, Float) and value in ("inf", "-inf"):
                value = float(value)
            values[column.name] = parse.typed(column, value)
        if unknown := [name for name in line if name not in values and name not in others]:
            raise ValueError(f"unknown field {unknown[0]!r:.80}")
        return values

    def _known(self, kind: str, key: Any) -> int:
        try:
            return self._ids[kind][key]
        except (KeyError, TypeError):
            raise ValueError(f"no line before this one gives {kind} {key!r:.200}") from None

    def _run_id(self, values: dict[str, Any]) -> int:
        """The id of a run; a copy that was made while its command ran does not know its end."""
        run = table(RunRow)
        same = [run.c[name].is_not_distinct_from(values[name]) for name in RUN_IDENTITY]
        id_ = self._connection.execute(select(func.min(run.c.id)).where(*same)).scalar()
        if id_ is None:
            id_ = self._connection.execute(insert(run).values(values).returning(run.c.id)).scalar_one()
        elif values["finished_at"] is not None:
            unfinished = update(run).where(run.c.id == id_, run.c.finished_at.is_(None))
            self._connection.execute(unfinished.values(finished_at=values["finished_at"]))
        return int(id_)

    def _add_trial(self, line: Line) -> None:
        values = self._of_problem(TrialRow, line, "variant", "numerics", "source_hash", "run")
        values["config_digest"] = self._configs[values["config"]]
        self._reader.check_trial(values)
        variant = parse.parse_variant({**line, "op": line["problem"]["op"], "name": line.get("variant")})
        values["variant_id"] = self._known("variant", variant)
        values["run_id"] = None if line.get("run") is None else self._known("run", line["run"])
        self._num_trials += 1
        self._batch.append({"id": self._num_trials, **values})
        if len(self._batch) >= _BATCH:
            self._flush()

    def _add_pin(self, line: Line) -> None:
        values = self._of_problem(PinRow, line)
        key = (values["problem_id"], values["environment_id"])
        if key in self._ids["pin"]:
            raise ValueError("a second pin of the same problem in the same environment")
        pin = table(PinRow)
        same = and_(pin.c.problem_id == key[0], pin.c.environment_id == key[1])
        self._connection.execute(delete(pin).where(same, pin.c.created_at < values["created_at"]))
        if (id_ := self._connection.execute(select(pin.c.id).where(same)).scalar()) is None:
            id_ = self._connection.execute(insert(pin).values(values).returning(pin.c.id)).scalar_one()
        self._ids["pin"][key] = int(id_)

    def _of_problem(self, model: type[Base], line: Line, *others: str) -> dict[str, Any]:
        """The values of a trial or a pin, with the ids of its problem and environment."""
        config = canonical_json(line.get("config"))
        if config not in self._configs:
            self._configs[config] = config_digest(parse.parse_config(config))
        values = self._values(model, {**line, "config": config}, "kind", "problem", "environment", *others)
        values["problem_id"] = self._problem_id(line.get("problem"))
        values["environment_id"] = self._known("environment", line.get("environment"))
        return values

    def _problem_id(self, plain: Any) -> int:
        if not isinstance(plain, dict):
            raise ValueError(f"problem is not an object: {plain!r:.80}")
        text, ids = canonical_json(plain), self._ids["problem"]
        if text not in ids:
            problem = parse.parse_problem(self._values(ProblemRow, plain))
            ids[text] = get_or_create(self._connection, [problem])[problem]
        return ids[text]


def _same(ours: Table, theirs: Table, names: list[str]) -> ColumnElement[bool]:
    """NULL equals NULL; where there is none a plain comparison lets a server use hashes and indexes."""
    pairs = [(ours.c[name], theirs.c[name]) for name in names]
    return and_(*(one.is_not_distinct_from(other) if one.nullable else one == other for one, other in pairs))


def _order_variants(connection: Connection) -> None:
    """Give of the variants of one name the highest number to the newest: the one whose first trial came last.

    A variant that changes its place gets a row of its own before its trials are moved there: a server checks references
    at every statement.
    """
    ours, trials = table(VariantRow), table(TrialRow)
    # As it is stored: all times of one database are in one form.
    first = type_coerce(func.min(trials.c.created_at), String())
    firsts = dict(map(tuple, connection.execute(select(trials.c.variant_id, first).group_by(trials.c.variant_id))))
    groups: dict[tuple[str, str], list[Any]] = {}
    for row in connection.execute(select(ours).order_by(ours.c.id)).mappings():
        groups.setdefault((row["op"], row["name"]), []).append(row)
    misplaced: list[Any] = []
    for rows in groups.values():
        # One without a trial was known before it could be measured.
        wanted = sorted(rows, key=lambda row: (row["id"] in firsts, firsts.get(row["id"]), row["id"]))
        start = next((i for i, pair in enumerate(zip(wanted, rows, strict=True)) if pair[0] is not pair[1]), len(rows))
        misplaced += wanted[start:]
    if misplaced and connection.dialect.name == "postgresql":
        # A tuner that has looked up the id of a variant stores its trials before the variant goes.
        connection.exec_driver_sql("LOCK TABLE variant IN ACCESS EXCLUSIVE MODE")
    for row in misplaced:
        values = {name: value for name, value in row.items() if name != "id"}
        # Not under its final name yet, which the old row has until it is gone.
        held = connection.execute(insert(ours).values({**values, "source_hash": f"moved from {row['id']}"}))
        assert held.inserted_primary_key is not None
        new = held.inserted_primary_key[0]
        connection.execute(update(trials).where(trials.c.variant_id == row["id"]).values(variant_id=new))
        connection.execute(delete(ours).where(ours.c.id == row["id"]))
        connection.execute(update(ours).where(ours.c.id == new).values(source_hash=row["source_hash"]))
