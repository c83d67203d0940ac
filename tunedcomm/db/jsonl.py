"""Databases as JSON lines: one row a line, keys and lines sorted, nothing that depends on ids or on the driver.

The first line names format and schema, the last one counts the lines before it. Between them are environments, runs,
the variants of each name from the oldest source to the newest, trials and pins. A trial holds its problem and its
variant in full, and refers to environment and run by their digests, so that a line says in a diff what it means. Times
are ISO 8601 in UTC; an infinite error is "inf". Fields are the columns of the models.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn, TypeAlias, TypeVar

from sqlalchemy import Connection, select

from tunedcomm.db import records as parse
from tunedcomm.db.query import raw, table
from tunedcomm.db.records import Reader, canonical_json
from tunedcomm.db.schema import (
    HEAD,
    REVISIONS,
    Base,
    EnvironmentRow,
    PinRow,
    ProblemRow,
    RunRow,
    TrialRow,
    VariantRow,
)
from tunedcomm.errors import DatabaseAccessError, DatabaseCorruptError, DatabaseVersionError
from tunedcomm.spec import Problem, format_shape

FORMAT = "tunedcomm-jsonl"
_VERSION = 1
# Longer than any line that is written: the longest texts are bounded.
_MAX_LINE = 1 << 20
# Columns by which a run of one database is the same as a run of another; its end may be known to one alone.
RUN_IDENTITY = ("command", "seed", "budget", "host", "user", "version", "started_at")

T = TypeVar("T")
Line: TypeAlias = dict[str, Any]
# Told of a row that makes no sense, by table and id, and of what is wrong with it.
OnBad: TypeAlias = Callable[[str, Any, str], None]


# Rows to lines


def lines(connection: Connection) -> Iterator[Line]:
    """Every row of a database without senseless ones, between the first line and the last one, sorted.

    Raises:
        DatabaseCorruptError: a row makes no sense.
    """

    def refuse(name: str, id_: Any, what: str) -> NoReturn:
        raise DatabaseCorruptError(f"{name} {id_} makes no sense: {what}")

    yield {"format": FORMAT, "version": _VERSION, "schema": HEAD}
    count = 1
    for line in _ordered(SoundRows(connection, refuse)):
        yield line
        count += 1
    yield _end(count)


def _end(count: int) -> Line:
    """The last line, after `count` others."""
    return {"kind": "end", "lines": count}


def _ordered(sound: SoundRows) -> Iterator[Line]:
    yield from sorted(sound.environments.values(), key=canonical_json)
    # Each run once, with its end if that is known.
    runs = sorted(sound.runs.values(), key=lambda run: run["finished_at"] or "")
    yield from sorted({run["run"]: run for run in runs}.values(), key=canonical_json)
    # Ids are in the order in which sources were first measured; the last of a name is its newest.
    yield from sorted(sound.variants.values(), key=lambda line: (line["op"], line["variant"]))

    def place(id_: int) -> tuple[Any, ...]:  # families together, each from the smallest shape to the largest
        problem, _ = sound.problems[id_]
        return (problem.op, problem.world_size, problem.family, problem.shape, id_)

    problems = sorted(sound.problems, key=place)
    for id_ in problems:
        yield from sorted((line for _, line in sound.trials(id_)), key=_trial_order)
    yield from sorted((line for _, line in sound.pins()), key=canonical_json)


def _trial_order(line: Line) -> tuple[Any, ...]:
    names = ("environment", "variant", "source_hash", "numerics")
    plain = canonical_json(line["config"])
    return (*(line[name] for name in names), plain, line["final"], line["created_at"], canonical_json(line))


def _plain(values: Mapping[str, Any]) -> Line:
    """Typed values as JSON values. JSON has neither times nor infinity; NaN, which SQLite cannot store, is None."""
    found = dict(values)
    for name, value in values.items():
        if isinstance(value, datetime):
            found[name] = value.isoformat(timespec="microseconds")
        elif isinstance(value, float) and not math.isfinite(value):
            found[name] = None if math.isnan(value) else str(value)
    return found


def key_of(model: type[Base], values: Mapping[str, Any]) -> str:
    """The digest by which lines refer to an environment or a run; of a run without its end."""
    if model is EnvironmentRow:
        return parse.parse_environment(values).digest
    identity = _plain({name: values[name] for name in RUN_IDENTITY})
    return hashlib.sha256(canonical_json(identity).encode()).hexdigest()[:16]


class SoundRows:
    """The rows of a database that make sense, as lines; every other row is reported, and so is what refers to one.

    Attributes:
        environments, runs, variants: lines by id, in the order of ids.
        problems: by id, with their plain values.
    """

    def __init__(self, connection: Connection, on_bad: OnBad) -> None:
        self._connection = connection
        self._on_bad = on_bad
        self._reader = Reader()
        self._run_ids = set(connection.execute(select(raw(RunRow.id))).scalars())
        self.environments: dict[int, Line] = dict(self._sound(EnvironmentRow, self._named))
        self.runs: dict[int, Line] = dict(self._sound(RunRow, self._named))
        self.variants: dict[int, Line] = dict(self._sound(VariantRow, self._variant))
        self.problems: dict[int, tuple[Problem, Line]] = dict(self._sound(ProblemRow, self._problem))

    def lines(self) -> Iterator[Line]:
        """Every line in the order of ids, those first that others refer to."""
        for named in (self.environments, self.runs, self.variants):
            yield from named.values()
        for found in (self.trials(), self.pins()):
            yield from (line for _, line in found)

    def trials(self, problem_id: int | None = None) -> Iterator[tuple[Any, Line]]:
        """Id and line of each trial, or of those that an index has under a problem."""
        return self._sound(TrialRow, self._trial, problem_id)

    def pins(self) -> Iterator[tuple[Any, Line]]:
        """Id and line of each pin."""
        return self._sound(PinRow, self._of_problem)

    def _sound(
        self, model: type[Base], line_of: Callable[[type[Base], Any], Any], problem_id: int | None = None
    ) -> Iterator[tuple[Any, Any]]:
        columns = table(model).c
        # As they lie: a result processor would raise in the middle of a fetch.
        query = select(*map(raw, columns)).order_by(columns.id)
        if problem_id is not None:
            query = query.where(columns.problem_id == problem_id)
        for row in self._connection.execute(query).mappings():
            try:
                line = line_of(model, row)
            except ValueError as error:
                self._on_bad(model.__tablename__, row["id"], str(error))
            else:
                yield row["id"], line

    def _named(self, model: type[Base], row: Mapping[str, Any]) -> Line:
        values, kind = parse.parse_row(model, row), model.__tablename__
        key = key_of(model, {**row, **values})
        return {**_plain(values), "kind": kind, kind: key}

    def _variant(self, _: type[Base], row: Mapping[str, Any]) -> Line:
        variant = parse.parse_variant(row)
        named = {"op": variant.op, "variant": variant.name}
        return {"kind": "variant", **named, "numerics": variant.numerics, "source_hash": variant.source_hash}

    def _problem(self, _: type[Base], row: Mapping[str, Any]) -> tuple[Problem, Line]:
        problem = parse.parse_problem(row)
        return problem, {**problem.to_dict(), "shape": format_shape(problem.shape)}

    def _trial(self, model: type[Base], row: Mapping[str, Any]) -> Line:
        line = self._of_problem(model, row)
        self._reader.check_trial(row)
        variant = _referred(self.variants, row["variant_id"], "variant")
        if variant["op"] != line["problem"]["op"]:
            raise ValueError(f"a variant of {variant['op']!r:.80} on a problem of {line['problem']['op']!r:.80}")
        run_id = row["run_id"]
        if run_id is not None and run_id not in self._run_ids:
            raise ValueError(f"it refers to run {run_id!r:.20}, which is not there")
        named = {name: variant[name] for name in ("variant", "numerics", "source_hash")}
        return {**line, **named, "run": self.runs[run_id]["run"] if run_id in self.runs else None}

    def _of_problem(self, model: type[Base], row: Mapping[str, Any]) -> Line:
        return {
            **_plain(parse.parse_row(model, row)),
            "kind": model.__tablename__,
            "problem": _referred(self.problems, row["problem_id"], "problem")[1],
            "environment": _referred(self.environments, row["environment_id"], "environment")["environment"],
            "config": self._reader.config(row["config"]),
        }


def _referred(found: Mapping[int, T], id_: Any, name: str) -> T:
    if id_ not in found:
        raise ValueError(f"it refers to {name} {id_!r:.20}, which is not there or makes no sense")
    return found[id_]


# Files


def is_jsonl(path: Path) -> bool:
    """True if the file begins as JSON lines do; a file that cannot be read does not."""
    try:
        with path.open("rb") as file:
            return file.read(1) == b"{"
    except OSError:
        return False


def read_lines(path: Path) -> Iterator[tuple[str, Line]]:
    """The lines of a file between the first and the last one, each with its place in words.

    Raises:
        DatabaseAccessError: the file cannot be read.
        DatabaseCorruptError: a line is no JSON object, or the file is not whole.
        DatabaseVersionError: a later tunedcomm wrote it.
    """
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
                    yield f"line {number}", line
        if not is_whole:
            raise ValueError("the last line does not count the lines before it: some are missing, or were added")
    except (ValueError, RecursionError) as error:
        raise DatabaseCorruptError(
            f"{path}, line {number}: {error}; nothing was imported: correct the line, or export the file again"
        ) from None
    except OSError as error:
        raise DatabaseAccessError(f"cannot read {path}: {error.strerror}; check its permissions") from error


def _parse_line(text: bytes) -> Line:
    if len(text) > _MAX_LINE:
        raise ValueError(f"it is longer than {_MAX_LINE} bytes")
    if not text.endswith(b"\n"):
        raise ValueError("it is cut off")
    line = json.loads(text, parse_constant=parse.refuse_constant)
    if not isinstance(line, dict):
        raise ValueError(f"it is no JSON object: {text!r:.80}")
    return line


def _check_header(path: Path, line: Line) -> None:
    if line.get("format") != FORMAT:
        raise ValueError(f"the first line must begin a file of the format {FORMAT}: {line!r:.80}")
    version, schema = line.get("version"), line.get("schema")
    if version != _VERSION or schema not in REVISIONS:
        raise DatabaseVersionError(
            f"{path} was written by another tunedcomm (format version {version!r:.20}, schema {schema!r:.20}; this one "
            f"reads {_VERSION} and up to {HEAD}): upgrade tunedcomm, or import the database that it was made of"
        )
