"""The engine that copies databases: every form of one becomes a SQLite file, and one SQL merge adds it to another.

The forms are SQLite files, database servers, and JSON lines: one row a line, keys and lines sorted, nothing that
depends on ids or on the driver. The first line names format and schema, the last one counts the lines before it.
Between them are environments, runs, the variants of each name from the oldest source to the newest, trials and pins. A
trial holds its problem and its variant in full, and refers to environment and run by their digests, so that a line says
in a diff what it means. Times are ISO 8601 in UTC; an infinite error is "inf".

Columns are those of the models, so a new one is copied without a change here.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import timezone
from pathlib import Path
from typing import Any, NoReturn, TypeAlias

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    ColumnElement,
    Connection,
    Float,
    FromClause,
    Integer,
    MetaData,
    Select,
    String,
    Table,
    and_,
    delete,
    exists,
    func,
    insert,
    literal,
    select,
    type_coerce,
    update,
)

from tunedcomm.db import records as parse
from tunedcomm.db.engine import Target, connected, exclusive, file_uri, is_immutable, parse_target, translated
from tunedcomm.db.migrate import copy_file, create_file, ensure_schema, stored_revision
from tunedcomm.db.query import raw, table
from tunedcomm.db.records import Reader, canonical_json, config_digest
from tunedcomm.db.rekey import current_hash
from tunedcomm.db.schema import (
    HEAD,
    REVISIONS,
    Base,
    EnvironmentRow,
    PinRow,
    ProblemRow,
    RunRow,
    TrialRow,
    UtcDateTime,
    VariantRow,
)
from tunedcomm.db.store import Database
from tunedcomm.errors import DatabaseAccessError, DatabaseCorruptError, DatabaseVersionError
from tunedcomm.spec import Problem, format_shape

FORMAT = "tunedcomm-jsonl"
_VERSION = 1
# Longer than any line that is written: the longest texts are bounded.
_MAX_LINE = 1 << 20
_BATCH = 2000
# Columns by which a row of one database is the same as a row of another; a run's end may be known to one alone.
_IDENTITY: Mapping[type[Base], tuple[str, ...]] = {
    EnvironmentRow: ("digest",),
    ProblemRow: ("digest",),
    VariantRow: ("op", "name", "numerics", "source_hash"),
    RunRow: ("command", "seed", "budget", "host", "user", "version", "started_at"),
}

_MODELS: tuple[type[Base], ...] = (EnvironmentRow, ProblemRow, VariantRow, RunRow, TrialRow, PinRow)

Line: TypeAlias = dict[str, Any]
# Told of a row that makes no sense, by table and id, and of what is wrong with it.
OnBad: TypeAlias = Callable[[str, Any, str], None]


# Values of one column as plain JSON values and back, by the column's type; nothing from outside is trusted


def _own_columns(model: type[Base]) -> list[Column[Any]]:
    """The columns that say something of themselves: no ids, no references, no digests of other columns."""
    return [
        column
        for column in table(model).columns
        if not column.primary_key and not column.foreign_keys and column.name not in ("digest", "config_digest")
    ]


def _to_plain(column: Column[Any], value: Any) -> Any:
    """A value as a driver gives it, whatever the driver, as a plain JSON value; ValueError if it is none."""
    if isinstance(column.type, Float) and value is not None:
        number = parse.number_of(value, column.name)
        assert number is not None
        # JSON has no infinity, and an error measure may be infinite. NaN is stored as NULL.
        value = None if math.isnan(number) else number if math.isfinite(number) else str(number)
    if value is None:
        return _absent(column)
    if isinstance(column.type, Boolean):
        return parse.bool_of(value, column.name)
    if isinstance(column.type, UtcDateTime):
        return parse.time_of(value).astimezone(timezone.utc).isoformat(timespec="microseconds")
    return value if isinstance(column.type, Float) else _bounded(column, value)


def _to_stored(column: Column[Any], value: Any) -> Any:
    """A plain JSON value as the column stores it, the inverse of `_to_plain`; ValueError if it is none."""
    name = column.name
    if value is None:
        return _absent(column)
    if isinstance(column.type, Boolean):
        if type(value) is not bool:
            raise ValueError(f"{name} is not true or false: {value!r:.80}")
        return value
    if isinstance(column.type, UtcDateTime):
        if not isinstance(value, str):
            raise ValueError(f"{name} is not a time such as 2026-01-31T12:00:00+00:00: {value!r:.80}")
        return parse.time_of(value).astimezone(timezone.utc)
    if isinstance(column.type, Float):
        if type(value) not in (int, float) and value not in ("inf", "-inf"):
            raise ValueError(f"{name} is not a number: {value!r:.80}")
        try:
            return float(value)
        except OverflowError:
            raise ValueError(f"{name} is larger than any number that can be stored: {value!r:.80}") from None
    return _bounded(column, value)


def _absent(column: Column[Any]) -> None:
    if not column.nullable:
        raise ValueError(f"{column.name} is missing")


def _bounded(column: Column[Any], value: Any) -> Any:
    """An integer or a text that every database can store."""
    if isinstance(column.type, Integer):
        limit = 2**63 if isinstance(column.type, BigInteger) else 2**31
        if type(value) is not int or not -limit <= value < limit:
            raise ValueError(f"{column.name} is not an integer of {limit.bit_length()} bits: {value!r:.80}")
        return value
    text = parse.text_of(value, column.name)
    if "\x00" in text:
        raise ValueError(f"{column.name} holds a NUL character: {text!r:.80}")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError(f"{column.name} holds half of a character: {text!r:.80}") from None
    return text


# Rows to lines


def lines(connection: Connection, on_bad: OnBad) -> Iterator[Line]:
    """Every row that makes sense, between the first line and the last one.

    Args:
        connection: in a transaction that reads a database of this schema.
        on_bad: told of every row that makes no sense; a trial whose problem makes none is one itself.
    """
    sound = SoundRows(connection, on_bad)
    yield {"format": FORMAT, "version": _VERSION, "schema": HEAD}
    count = 1
    for line in _ordered(sound):
        yield line
        count += 1
    yield _end(count)


def _end(count: int) -> Line:
    """The last line, after `count` others."""
    return {"kind": "end", "lines": count}


def _ordered(sound: SoundRows) -> Iterator[Line]:
    yield from _sorted(sound.environments.values())
    ended: dict[str, Line] = {}
    for run in sound.runs.values():  # each once, with its end if that is known
        if (run["finished_at"] or "") >= (ended.get(run["run"], run)["finished_at"] or ""):
            ended[run["run"]] = run
    yield from _sorted(ended.values())
    # Ids are in the order in which sources were first measured; the last of a name is its newest.
    by_name = sorted(sound.variants.items(), key=lambda item: (item[1]["op"], item[1]["variant"], item[0]))
    yield from (line for _, line in by_name)

    def place(id_: int) -> tuple[Any, ...]:  # families together, each from the smallest shape to the largest
        problem, _ = sound.problems[id_]
        return (problem.op, problem.world_size, problem.family, problem.shape, id_)

    problems = sorted(sound.problems, key=place)
    for id_ in problems:
        yield from _sorted((line for _, line in sound.trials(id_)), key=_trial_order)
    yield from _sorted(line for id_ in problems for _, line in sound.pins(id_))
    sound.report_orphans()


def _trial_order(line: Line) -> tuple[Any, ...]:
    names = ("environment", "variant", "source_hash", "numerics")
    return (*(line[name] for name in names), canonical_json(line["config"]), line["final"], line["created_at"])


def _sorted(found: Iterable[Line], *, key: Callable[[Line], tuple[Any, ...]] = lambda line: ()) -> list[Line]:
    return sorted(found, key=lambda line: (key(line), canonical_json(line)))


class SoundRows:
    """The rows of a database that make sense, as lines; every other row is reported.

    Attributes:
        environments, runs, variants: lines by id.
        problems: by id, with their plain values.
    """

    def __init__(self, connection: Connection, on_bad: OnBad) -> None:
        self._connection = connection
        self._on_bad = on_bad
        self._reader = Reader()
        self._bad_runs: set[Any] = set()
        self.environments: dict[int, Line] = self._load(EnvironmentRow, _environment)
        self.runs: dict[int, Line] = self._load(RunRow, _run)
        self.variants: dict[int, Line] = self._load(VariantRow, _variant)
        self.problems: dict[int, tuple[Problem, Line]] = self._load(ProblemRow, _problem)

    def trials(self, problem_id: int) -> Iterator[tuple[Any, Line]]:
        """Id and line of each trial of a sound problem."""
        return self._of_problem(TrialRow, problem_id, self._trial)

    def pins(self, problem_id: int) -> Iterator[tuple[Any, Line]]:
        """Id and line of each pin of a sound problem."""
        return self._of_problem(PinRow, problem_id, self._pin)

    def report_orphans(self) -> None:
        """Report the trials and pins of problems that are not there or make no sense."""
        for model in (TrialRow, PinRow):
            columns = table(model).c
            for id_, problem_id in self._connection.execute(select(raw(columns.id), raw(columns.problem_id))):
                if problem_id not in self.problems:
                    what = f"it refers to problem {problem_id!r:.20}, which is not there or makes no sense"
                    self._on_bad(model.__tablename__, id_, what)

    def _rows(self, model: type[Base], *where: Any) -> Iterator[Any]:
        # As they lie: a result processor would raise in the middle of a fetch.
        columns = [raw(column) for column in table(model).columns]
        yield from self._connection.execute(select(*columns).where(*where)).mappings()

    def _load(self, model: type[Base], plain: Callable[[Mapping[str, Any]], Any]) -> dict[int, Any]:
        found = {}
        for row in self._rows(model):
            try:
                found[row["id"]] = plain(row)
            except ValueError as error:
                self._on_bad(model.__tablename__, row["id"], str(error))
                if model is RunRow:
                    self._bad_runs.add(row["id"])
        return found

    def _of_problem(
        self, model: type[Base], problem_id: int, plain: Callable[[Mapping[str, Any]], Line]
    ) -> Iterator[tuple[Any, Line]]:
        for row in self._rows(model, table(model).c.problem_id == problem_id):
            try:
                if row["problem_id"] != problem_id:  # found by an index that is damaged
                    raise ValueError(f"an index has it under problem {problem_id}, it says {row['problem_id']!r:.40}")
                line = plain(row)
            except ValueError as error:
                self._on_bad(model.__tablename__, row["id"], str(error))
            else:
                yield row["id"], line

    def _trial(self, row: Mapping[str, Any]) -> Line:
        problem, plain_problem = self.problems[row["problem_id"]]
        variant = _referred(self.variants, row["variant_id"], "variant")
        if variant["op"] != problem.op:
            raise ValueError(f"a variant of {variant['op']!r:.80} on a problem of {problem.op!r:.80}")
        is_known = row["run_id"] is not None and row["run_id"] not in self._bad_runs
        config = self._reader.config(row["config"])
        if row["config_digest"] != config_digest(config):
            raise ValueError(f"its config_digest is {row['config_digest']!r:.40}, not that of {row['config']:.80}")
        own = _columns(TrialRow, row, without=("config",))
        _check_trial(own)
        return {
            **own,
            "kind": "trial",
            "problem": plain_problem,
            "environment": _referred(self.environments, row["environment_id"], "environment")["environment"],
            **{name: variant[name] for name in ("variant", "numerics", "source_hash")},
            "config": config,
            "run": _referred(self.runs, row["run_id"], "run")["run"] if is_known else None,
        }

    def _pin(self, row: Mapping[str, Any]) -> Line:
        return {
            **_columns(PinRow, row, without=("config",)),
            "kind": "pin",
            "problem": self.problems[row["problem_id"]][1],
            "environment": _referred(self.environments, row["environment_id"], "environment")["environment"],
            "config": self._reader.config(row["config"]),
        }


def _columns(model: type[Base], row: Mapping[str, Any], *, without: tuple[str, ...] = ()) -> Line:
    return {c.name: _to_plain(c, row[c.name]) for c in _own_columns(model) if c.name not in without}


def _referred(found: Mapping[int, Line], id_: Any, name: str) -> Line:
    if id_ not in found:
        raise ValueError(f"it refers to {name} {id_!r:.20}, which is not there or makes no sense")
    return found[id_]


def _environment(row: Mapping[str, Any]) -> Line:
    digest = parse.parse_environment(row).digest
    _check_digest(row, digest)
    return {**_columns(EnvironmentRow, row), "kind": "environment", "environment": digest}


def _run(row: Mapping[str, Any]) -> Line:
    own = _columns(RunRow, row)
    return {**own, "kind": "run", "run": _run_key(own)}


def _variant(row: Mapping[str, Any]) -> Line:
    variant = parse.parse_variant(row)
    return {**_columns(VariantRow, row, without=("name",)), "kind": "variant", "variant": variant.name}


def _problem(row: Mapping[str, Any]) -> tuple[Problem, Line]:
    problem = parse.parse_problem(row)
    _check_digest(row, problem.digest)
    return problem, {**_columns(ProblemRow, row), "shape": format_shape(problem.shape)}


def _check_digest(row: Mapping[str, Any], digest: str) -> None:
    if row["digest"] != digest:
        raise ValueError(f"its digest is {row['digest']!r:.80}, that of its fields is {digest!r}")


def _run_key(run: Mapping[str, Any]) -> str:
    """A digest of all of a run but its end, by which trials refer to it."""
    identity = {name: run[name] for name in _IDENTITY[RunRow]}
    return hashlib.sha256(canonical_json(identity).encode()).hexdigest()[:16]


def _check_trial(own: Mapping[str, Any]) -> None:
    """Raise ValueError where the plain values of a trial contradict what its status says or its units allow."""
    status = parse.status_of(own["status"])
    for name in ("latency_p10_us", "latency_p50_us", "latency_p90_us", "baseline_p50_us"):
        parse.latency_of(own[name], name)
    if status == "ok" and own["latency_p50_us"] is None:
        raise ValueError("an ok trial without latency_p50_us")
    parse.int_of(own["samples"], "samples")


# Lines to rows


class _Intake:
    """Takes lines in the order in which `lines` gives them and adds their rows to a database without any.

    Args:
        connection: in a transaction that writes.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._batches: dict[type[Base], list[dict[str, Any]]] = {}
        self._ids: dict[type[Base], dict[Any, int]] = {model: {} for model in _MODELS}
        self._columns = {model: _own_columns(model) for model in _MODELS}
        self._problems: dict[str, tuple[int, str]] = {}
        self._configs: dict[str, str] = {}

    def add(self, line: Line) -> None:
        """Take one line; ValueError if it makes no sense, or not after the lines before it."""
        match line.get("kind"):
            case "environment":
                values = self._own(EnvironmentRow, line, "kind", "environment")
                digest = parse.parse_environment(values).digest
                _check_key(line.get("environment"), digest)
                self._put(EnvironmentRow, digest, {**values, "digest": digest})
            case "run":
                values = self._own(RunRow, line, "kind", "run")
                _check_key(line.get("run"), key := _run_key(line))
                self._put(RunRow, key, values)
            case "variant":
                self._variant(line)
            case "trial":
                self._trial(line)
            case "pin":
                self._pin(line)
            case kind:
                raise ValueError(f"kind is {kind!r:.80}, not one of environment, run, variant, trial, pin")

    def finish(self) -> None:
        """Add the rows that were held back, to add many at once."""
        for model in _MODELS:
            if batch := self._batches.pop(model, []):
                self._connection.execute(insert(model), batch)

    def _put(self, model: type[Base], key: Any, values: Mapping[str, Any]) -> int:
        """The id of the row with that key, which is added if it is new."""
        ids = self._ids[model]
        if key not in ids:
            ids[key] = len(ids) + 1
            self._batches.setdefault(model, []).append({"id": ids[key], **values})
        return ids[key]

    def _known(self, model: type[Base], key: Any, name: str) -> int:
        try:
            return self._ids[model][key]
        except (KeyError, TypeError):
            raise ValueError(f"no line before this one gives {name} {key!r:.200}") from None

    def _own(self, model: type[Base], line: Mapping[str, Any], *others: str) -> dict[str, Any]:
        """The values of the model's columns; the line has fields of these names, and `others`."""
        values = {c.name: _to_stored(c, line.get(c.name)) for c in self._columns[model] if c.name not in others}
        if unknown := [name for name in line if name not in values and name not in others]:
            raise ValueError(f"unknown field {unknown[0]!r:.80}")
        return values

    def _variant(self, line: Line) -> None:
        named = {name: value for name, value in line.items() if name not in ("kind", "variant")}
        values = self._own(VariantRow, {**named, "name": line.get("variant")})
        stored = parse.parse_variant(values)
        if not stored.name:
            raise ValueError("a variant without a name")
        values["source_hash"] = stored.source_hash
        self._put(VariantRow, (stored.op, stored.name, stored.numerics, stored.source_hash), values)

    def _problem(self, line: Line) -> tuple[int, str]:
        """Id and op of the line's problem."""
        plain = line.get("problem")
        if not isinstance(plain, dict):
            raise ValueError(f"problem is not an object: {plain!r:.80}")
        text = canonical_json(plain)
        if text not in self._problems:
            values = self._own(ProblemRow, plain)
            problem = parse.parse_problem(values)
            values |= {"shape": format_shape(problem.shape), "digest": problem.digest}
            self._problems[text] = (self._put(ProblemRow, problem.digest, values), problem.op)
        return self._problems[text]

    def _config(self, line: Line) -> dict[str, str]:
        text = canonical_json(line.get("config"))
        if text not in self._configs:
            self._configs[text] = config_digest(parse.parse_config(text))
        return {"config": text, "config_digest": self._configs[text]}

    def _trial(self, line: Line) -> None:
        others = ("kind", "problem", "environment", "variant", "numerics", "source_hash", "config", "run")
        values = self._own(TrialRow, line, *others)
        _check_trial(values)
        problem_id, op = self._problem(line)
        name, stored_hash = str(line.get("variant")), str(line.get("source_hash"))
        variant = (op, name, line.get("numerics"), current_hash(op, name, stored_hash))
        run = line.get("run")
        keys = {
            **self._config(line),
            "problem_id": problem_id,
            "environment_id": self._known(EnvironmentRow, line.get("environment"), "environment"),
            "variant_id": self._known(VariantRow, variant, "variant"),
            "run_id": None if run is None else self._known(RunRow, run, "run"),
        }
        batch = self._batches.setdefault(TrialRow, [])
        batch.append(values | keys)
        if len(batch) >= _BATCH:
            self.finish()

    def _pin(self, line: Line) -> None:
        values = self._own(PinRow, line, "kind", "problem", "environment", "config")
        problem_id, _ = self._problem(line)
        environment_id = self._known(EnvironmentRow, line.get("environment"), "environment")
        if (problem_id, environment_id) in self._ids[PinRow]:
            raise ValueError("a second pin of the same problem in the same environment")
        keys = {"problem_id": problem_id, "environment_id": environment_id, "config": self._config(line)["config"]}
        self._put(PinRow, (problem_id, environment_id), values | keys)


def _check_key(said: Any, key: str) -> None:
    if said != key:
        raise ValueError(f"its fields have the digest {key}, not {said!r:.80}")


def _is_jsonl(path: Path) -> bool:
    """True if the file begins as JSON lines do; a file that cannot be read does not."""
    try:
        with path.open("rb") as file:
            return file.read(1) == b"{"
    except OSError:
        return False


def _read_lines(path: Path, intake: _Intake) -> None:
    """Take every line of a file that `tunedcomm db export --format jsonl` wrote."""
    number, is_whole = 0, False
    try:
        with path.open("rb") as file:
            for number, text in enumerate(iter(lambda: file.readline(_MAX_LINE + 1), b""), start=1):
                line = _parse_line(text)
                if is_whole:
                    raise ValueError("it comes after the end")
                if number == 1:
                    _check_header(path, line)
                elif line.get("kind") == "end":
                    is_whole = line == _end(number - 1)
                else:
                    intake.add(line)
        if not is_whole:
            raise ValueError("the last line does not count the lines before it: some are missing, or were added")
    except (ValueError, RecursionError) as error:
        what = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise DatabaseCorruptError(
            f"{path}, line {number}: {what}; nothing was imported: correct the line, or export the file again"
        ) from None
    except OSError as error:
        raise DatabaseAccessError(f"cannot read {path}: {error.strerror}; check its permissions") from error
    intake.finish()


def _parse_line(text: bytes) -> Line:
    if len(text) > _MAX_LINE:
        raise ValueError(f"it is longer than {_MAX_LINE} bytes")
    if not text.endswith(b"\n"):
        raise ValueError("it is cut off")
    line = json.loads(text, parse_constant=_refuse_constant)
    if not isinstance(line, dict):
        raise ValueError(f"it is no JSON object: {text!r:.80}")
    return line


def _refuse_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is not JSON")


def _check_header(path: Path, line: Line) -> None:
    if line.get("format") != FORMAT:
        raise ValueError(f"the first line must begin a file of the format {FORMAT}: {line!r:.80}")
    version, schema = line.get("version"), line.get("schema")
    if version != _VERSION or schema not in REVISIONS:
        raise DatabaseVersionError(
            f"{path} was written by another tunedcomm (format version {version!r:.20}, schema {schema!r:.20}; this one "
            f"reads {_VERSION} and up to {HEAD}): upgrade tunedcomm, or import the database that it was made of"
        )


# Any form to a SQLite file


@dataclass(frozen=True, slots=True)
class Source:
    """A database of any form as a SQLite file of this schema.

    Attributes:
        name: the source, as messages name it: without a password.
        path: the file: the source itself where it is one already.
        schema: the revision that the source has.
    """

    name: str
    path: Path
    schema: str


def as_sqlite(source: str | Path, scratch: Path, *, is_checked: bool = False) -> Source:
    """The source as a SQLite file; it is not changed.

    Args:
        source: a SQLite file, a file of JSON lines, or the URL of a server.
        scratch: a file to make where the source is no such file itself.
        is_checked: check every row, and make the file of the rows alone.

    Raises:
        DatabaseAccessError: it cannot be read.
        DatabaseCorruptError: it is neither, is damaged, or a row that is to be checked makes no sense.
        DatabaseVersionError: it is of a later schema than this tunedcomm.
        DatabaseAwayError: the server does not answer.
    """
    target = parse_target(source)
    name, schema, path = str(target), HEAD, target.path
    if path is None:
        if target.is_sqlite:
            raise DatabaseAccessError(f"{target} is not a SQLite file; give the path of a file, or the URL of a server")
        _download(target, scratch)
        path = scratch
    elif path.is_file() and _is_jsonl(path):
        with connected(create_file(scratch)) as connection, connection.begin():
            _read_lines(path, _Intake(connection))
        return Source(name, scratch, HEAD)
    else:
        schema = _revision_of(target)
        if schema != HEAD:
            copy_file(path, scratch)
            create_file(scratch)
            path = scratch
    if is_checked:
        path = _checked(name, path, scratch.with_name(f"checked-{scratch.name}"))
    return Source(name, path, schema)


def _revision_of(target: Target) -> str:
    try:
        with Database.open(target.name, readonly=True) as database:
            return database.schema_version
    except DatabaseVersionError:
        if (older := stored_revision(target)) not in REVISIONS:
            raise
        return str(older)


def _checked(name: str, path: Path, checked: Path) -> Path:
    """Fill a new database with the rows of another one, each of them checked."""

    def refuse(table_name: str, id_: Any, what: str) -> NoReturn:
        text = f"{name}, {table_name} {id_}: {what}"
        raise DatabaseCorruptError(f"{text}; nothing was imported: restore a copy of the database")

    try:
        with (
            Database.open(path, readonly=True) as database,
            database.reading() as reading,
            connected(create_file(checked)) as connection,
            connection.begin(),
        ):
            intake = _Intake(connection)
            for line in lines(reading, refuse):
                if "kind" in line and line["kind"] != "end":
                    intake.add(line)
            intake.finish()
    except ValueError as error:
        raise DatabaseCorruptError(f"{name}: {error}; nothing was imported: restore a copy of the database") from None
    return checked


def _download(source: Target, path: Path) -> None:
    """Write every row of a server's database, as it is at one moment, with its id to a new file."""
    with connected(source, readonly=True) as there, connected(create_file(path)) as here:
        ensure_schema(there.engine, source, create=False, readonly=True)
        there.execution_options(isolation_level="REPEATABLE READ")
        with there.begin(), here.begin():
            for ours in Base.metadata.sorted_tables:
                _copy_rows(there, ours, here, ours)


def _copy_rows(reading: Connection, source: Table, writing: Connection, into: Table) -> None:
    rows = reading.execute(select(source).order_by(source.c.id), execution_options={"yield_per": _BATCH})
    for chunk in rows.mappings().partitions():
        writing.execute(insert(into), [dict(row) for row in chunk])


# A SQLite file into another database
#
# A SQLite database has the source attached, a server gets its rows in temporary tables; the statements are the same.
# The source is read in one transaction, so that a tuner may go on writing to it.

# Where the source's rows have gone. Made once, as all that statements are made of: so they are compiled once.
_MOVED = Table(
    "moved",
    MetaData(),
    Column("kind", String, primary_key=True),
    Column("old", BigInteger, primary_key=True),
    Column("new", BigInteger, nullable=False),
    prefixes=["TEMPORARY"],
)
_attached = MetaData(schema="source")
_ATTACHED = {name: ours.to_metadata(_attached).alias("theirs") for name, ours in Base.metadata.tables.items()}
_Theirs: TypeAlias = Mapping[str, FromClause]


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


def absorb(connection: Connection, source: Source, *, in_order: bool = False) -> Absorbed:
    """Copy all rows of `source` into the open database, all or none; a row that both hold is there once.

    Environments, problems, variants and runs that are there already are used; a pin replaces an older one of the same
    problem and environment. Trials keep their order.

    Args:
        connection: of the database that takes the rows, in no transaction.
        source: where they come from.
        in_order: where both databases had variants, number those of one name by their first trials, as if all had been
            measured into this database.

    Raises:
        DatabaseError: the source cannot be read, or its rows contradict each other or those that are there.
    """
    target = parse_target(source.path)
    if connection.dialect.name != "sqlite":
        with translated(target), connection.begin():
            return _merge(connection, source.name, _upload(connection, target), in_order=in_order)
    driver = connection.connection.driver_connection
    assert driver is not None
    with translated(target):
        # Outside of a transaction: within one nothing can be attached.
        uri = file_uri(source.path, readonly=True, immutable=is_immutable(source.path))
        driver.execute("ATTACH DATABASE ? AS source", (uri,))
        try:
            with connection.begin():
                return _merge(connection, source.name, _ATTACHED, in_order=in_order)
        finally:
            driver.execute("DETACH DATABASE source")


def _upload(connection: Connection, source: Target) -> _Theirs:
    """Send the source's rows to temporary tables of the server's session."""
    # Whoever adds such rows waits for this transaction, as they do for each other.
    exclusive(connection, "intern")
    metadata, theirs = MetaData(), {}
    with connected(source, readonly=True) as reading, reading.begin():
        for ours in Base.metadata.sorted_tables:
            columns = [Column(column.name, column.type) for column in ours.columns]
            copy = Table(f"source_{ours.name}", metadata, *columns, prefixes=["TEMPORARY"])
            copy.create(connection, checkfirst=False)
            _copy_rows(reading, ours, connection, copy)
            connection.exec_driver_sql(f"ANALYZE {copy.name}")
            theirs[ours.name] = copy
    return theirs


def _merge(connection: Connection, name: str, theirs: _Theirs, *, in_order: bool) -> Absorbed:
    had_variants = _count(connection, select(VariantRow.id)) > 0
    _MOVED.create(connection, checkfirst=False)
    for model, identity in _IDENTITY.items():
        _get_or_create(connection, name, theirs, model, identity)
    _finish_runs(connection, theirs)
    absorbed = _append_trials(connection, name, theirs)
    _merge_pins(connection, theirs)
    for temporary in (_MOVED, *(copy for copy in theirs.values() if isinstance(copy, Table))):
        temporary.drop(connection, checkfirst=False)
    if in_order and had_variants and absorbed.known < absorbed.trials:
        _order_variants(connection)
    return absorbed


def _same(ours: Table, theirs: Any, names: Iterable[str]) -> ColumnElement[bool]:
    """NULL equals NULL; where there is none a plain comparison lets a server use hashes and indexes."""

    def equal(name: str) -> ColumnElement[bool]:
        one, other = ours.c[name], theirs.c[name]
        return one.is_not_distinct_from(other) if one.nullable else one == other

    return and_(*map(equal, names))


def _get_or_create(
    connection: Connection, source: str, tables: _Theirs, model: type[Base], identity: tuple[str, ...]
) -> None:
    """Add rows that are new and note where every row has gone."""
    ours, theirs = table(model), tables[model.__tablename__]
    same = _same(ours, theirs, identity)
    names = [column.name for column in ours.columns if column.name != "id"]
    new = select(*(theirs.c[name] for name in names)).where(~exists().where(same).select_from(ours).correlate(theirs))
    connection.execute(insert(ours).from_select(names, new.order_by(theirs.c.id)))
    other = ~_same(ours, theirs, names)
    if identity == ("digest",) and (count := _count(connection, select(ours.c.id).join(theirs, same).where(other))):
        raise DatabaseCorruptError(
            f"{source} holds {count} rows in table {ours.name} that have the digest of another one; leave it out, "
            "or restore a copy of it"
        )
    moved = select(literal(ours.name), theirs.c.id, func.min(ours.c.id)).join(ours, same).group_by(theirs.c.id)
    connection.execute(insert(_MOVED).from_select(["kind", "old", "new"], moved))


def _finish_runs(connection: Connection, tables: _Theirs) -> None:
    """Note the end of runs: a copy that was made while a command ran does not know it."""
    ours, theirs = table(RunRow), tables[RunRow.__tablename__]
    end = (
        select(func.max(theirs.c.finished_at))
        .join(_MOVED, and_(_MOVED.c.kind == ours.name, _MOVED.c.old == theirs.c.id))
        .where(_MOVED.c.new == ours.c.id)
        .correlate(ours)
    )
    connection.execute(update(ours).where(ours.c.finished_at.is_(None)).values(finished_at=end.scalar_subquery()))


def _moved_rows(tables: _Theirs, model: type[Base]) -> tuple[Select[Any], list[str]]:
    """Rows of the source with the ids that they refer to replaced, and the names of their columns."""
    ours, theirs = table(model), tables[model.__tablename__]
    names = [column.name for column in ours.columns if column.name != "id"]
    joined: Any = theirs
    columns: list[Any] = [theirs.c.id.label("old")]
    for name in names:
        keys = list(ours.c[name].foreign_keys)
        if not keys:
            columns.append(theirs.c[name])
            continue
        moved = _MOVED.alias(f"moved_{name}")
        here = and_(moved.c.kind == keys[0].column.table.name, moved.c.old == theirs.c[name])
        joined = joined.join(moved, here, isouter=bool(ours.c[name].nullable))
        columns.append(moved.c.new.label(name))
    return select(*columns).select_from(joined), names


def _append_trials(connection: Connection, source: str, tables: _Theirs) -> Absorbed:
    ours, theirs = table(TrialRow), tables[TrialRow.__tablename__]
    rows, names = _moved_rows(tables, TrialRow)
    held, whole = _count(connection, select(theirs.c.id)), _count(connection, rows)
    if whole != held:
        raise DatabaseCorruptError(
            f"{held - whole} trials of {source} refer to problems, environments or variants that it does not "
            "hold; leave it out, or restore a copy of it"
        )
    moved = rows.subquery()
    known = exists().where(_same(ours, moved, names)).select_from(ours).correlate(moved)
    before = _count(connection, select(ours.c.id))
    new = select(*(moved.c[name] for name in names)).where(~known).order_by(moved.c.old)
    connection.execute(insert(ours).from_select(names, new))
    added = _count(connection, select(ours.c.id)) - before
    return Absorbed(source=source, trials=held, known=held - added)


def _merge_pins(connection: Connection, tables: _Theirs) -> None:
    ours = table(PinRow)
    rows, names = _moved_rows(tables, PinRow)
    moved = rows.subquery()
    same = _same(ours, moved, ("problem_id", "environment_id"))
    older = exists().where(same, moved.c.created_at > ours.c.created_at).select_from(moved).correlate(ours)
    connection.execute(delete(ours).where(older))
    there = exists().where(same).select_from(ours).correlate(moved)
    new = select(*(moved.c[name] for name in names)).where(~there).order_by(moved.c.old)
    connection.execute(insert(ours).from_select(names, new))


def _count(connection: Connection, rows: Select[Any]) -> int:
    return int(connection.execute(select(func.count()).select_from(rows.subquery())).scalar_one())


def _order_variants(connection: Connection) -> None:
    """Give of the variants of one name the highest number to the newest: the one whose first trial came last.

    A variant that changes its place gets a row of its own before its trials are moved there: a server checks references
    at every statement.
    """
    ours, trials = table(VariantRow), table(TrialRow)
    # As it is stored: all times of one database are in one form.
    first = type_coerce(func.min(trials.c.created_at), String())
    made = connection.execute(select(trials.c.variant_id, first).group_by(trials.c.variant_id))
    firsts = {int(row[0]): row[1] for row in made}
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
