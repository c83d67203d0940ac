"""Databases as JSON lines: one record a line, keys and lines sorted, nothing that depends on ids or on the driver.

The first line names format and schema, the last one counts the lines before it. Between them are environments, runs,
the variants of each name from the oldest source to the newest, trials and pins. A trial holds its problem and its
variant in full, and refers to environment and run by their digests, so that a diff shows the meaning of a line. Times
are ISO 8601 in UTC; an infinite error is "inf". Fields are the columns of the models.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any, TypeAlias

from sqlalchemy import Boolean, Connection, Float

from tunedcomm.db import query
from tunedcomm.db import records as parse
from tunedcomm.db.records import Pin, Reader, Run, StoredVariant, Trial, config_digest
from tunedcomm.db.schema import HEAD, REVISIONS, Base, EnvironmentRow, PinRow, ProblemRow, RunRow, TrialRow, VariantRow
from tunedcomm.db.values import canonical_json, check_digest, parse_problem, refuse_constant, row_of_problem
from tunedcomm.errors import DatabaseAccessError, DatabaseCorruptError, DatabaseVersionError
from tunedcomm.hardware import Environment
from tunedcomm.spec import Candidate, Problem

FORMAT = "tunedcomm-jsonl"
_VERSION = 1
# Longer than any line that is written: the longest texts are bounded.
_MAX_LINE = 1 << 20

Line: TypeAlias = dict[str, Any]
# What databases exchange; a trial belongs to the run whose `id` is its `run_id`.
Record: TypeAlias = Environment | Run | StoredVariant | Trial | Pin


# Writing


def lines(connection: Connection) -> Iterator[Line]:
    """Every row of a sound database, between the first line and the last one, sorted."""
    yield {"format": FORMAT, "version": _VERSION, "schema": HEAD}
    count = 1
    for line in _ordered(connection):
        yield line
        count += 1
    yield {"kind": "end", "lines": count}


def _ordered(connection: Connection) -> Iterator[Line]:
    reader = Reader()
    environments = query.load_environments(connection, reader).values()
    yield from sorted(
        ({**e.to_dict(), "kind": "environment", "environment": e.digest} for e in environments), key=canonical_json
    )
    runs = {run.id: {**_plain(RunRow, run), "kind": "run", "run": _key(run)} for run in query.runs(connection, reader)}
    yield from sorted(runs.values(), key=canonical_json)
    # Ids are in the order in which sources were first measured; the last of a name is its newest.
    variants = query.load_variants(connection, reader).values()
    for variant in sorted(variants, key=lambda each: (each.op, each.name)):
        yield {"kind": "variant", "op": variant.op, **_named(variant)}

    def place(item: tuple[int, Problem]) -> tuple[Any, ...]:  # families together, each from its smallest shape
        return (item[1].op, item[1].world_size, item[1].family, item[1].shape)

    for id_, _ in sorted(query.load_problems(connection, reader).items(), key=place):
        found = []
        for trial in query.trials(connection, reader, TrialRow.problem_id == id_):
            run = None if trial.run_id is None else runs[trial.run_id]["run"]
            found.append({**_of_problem(TrialRow, trial), **_named(trial.stored_variant), "run": run})
        yield from sorted(found, key=_trial_order)
    chosen = [(pin, pin.candidate) for pin in query.pins(connection, reader)]
    pins = ({**_of_problem(PinRow, pin), "variant": one.variant, "config": one.config_dict} for pin, one in chosen)
    yield from sorted(pins, key=canonical_json)


def _trial_order(line: Line) -> tuple[Any, ...]:
    names = ("environment", "variant", "source_hash", "numerics")
    plain = canonical_json(line["config"])
    return (*(line[name] for name in names), plain, line["final"], line["created_at"], canonical_json(line))


def _named(variant: StoredVariant) -> Line:
    return {"variant": variant.name, "numerics": variant.numerics, "source_hash": variant.source_hash}


def _of_problem(model: type[Base], record: Trial | Pin) -> Line:
    referred = {"problem": row_of_problem(record.problem), "environment": record.environment.digest}
    return {**_plain(model, record), "kind": model.__tablename__, **referred}


def _plain(model: type[Base], record: Record) -> Line:
    """The columns that are attributes of the record, as JSON values.

    JSON has neither times nor infinity; NaN, which SQLite cannot store, is None.
    """
    found = {}
    for name in (column.name for column in parse.own_columns(model) if hasattr(record, column.name)):
        value = getattr(record, name)
        if isinstance(value, datetime):
            value = value.isoformat(timespec="microseconds")
        elif isinstance(value, float) and not math.isfinite(value):
            value = None if math.isnan(value) else str(value)
        found[name] = value
    return found


def _key(run: Run) -> str:
    """The digest by which trials refer to a run; its end may be known to one database alone."""
    identity = {name: value for name, value in _plain(RunRow, run).items() if name != "finished_at"}
    return hashlib.sha256(canonical_json(identity).encode()).hexdigest()[:16]


# Reading


def is_jsonl(path: Path) -> bool:
    """True if the file begins as JSON lines do; a file that cannot be read does not."""
    try:
        with path.open("rb") as file:
            return file.read(1) == b"{"
    except OSError:
        return False


def read_lines(path: Path) -> Iterator[Record]:
    """The records of a file, every value checked.

    Raises:
        DatabaseAccessError: the file cannot be read.
        DatabaseCorruptError: a line makes no sense, which is named, or the file is not whole.
        DatabaseVersionError: a later tunedcomm wrote it.
    """
    index, is_whole, parser = 0, False, _Parser()
    try:
        with path.open("rb") as file:
            for index, text in enumerate(iter(lambda: file.readline(_MAX_LINE + 1), b""), start=1):
                line = _parse_line(text)
                if is_whole:
                    raise ValueError("it comes after the end")
                if index == 1:
                    _check_header(path, line)
                elif line.get("kind") == "end":
                    is_whole = line == {"kind": "end", "lines": index - 1}
                else:
                    yield parser.record(line)
        if not is_whole:
            raise ValueError("the last line does not count the lines before it: some are missing, or were added")
    except (ValueError, OverflowError, RecursionError) as error:
        raise DatabaseCorruptError(
            f"{path}, line {index}: {error}; nothing was imported: correct the line, or export the file again"
        ) from None
    except OSError as error:
        raise DatabaseAccessError(f"cannot read {path}: {error.strerror}; check its permissions") from error


def _parse_line(text: bytes) -> Line:
    if len(text) > _MAX_LINE:
        raise ValueError(f"it is longer than {_MAX_LINE} bytes")
    if not text.endswith(b"\n"):
        raise ValueError("it is cut off")
    line = json.loads(text, parse_constant=refuse_constant)
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


class _Parser:
    """Makes records of lines, each after the records that it refers to."""

    def __init__(self) -> None:
        self._reader = Reader()
        self._problems: dict[str, Problem] = {}
        # What lines before have given.
        self._known: dict[str, dict[Any, Any]] = {"environment": {}, "run": {}, "variant": {}, "pin": {}}

    def record(self, line: Line) -> Record:
        """The record of one line; ValueError if it makes no sense, or not after the lines before it."""
        match line.get("kind"):
            case "environment":
                environment = parse.parse_environment(_values(EnvironmentRow, line, "kind", "environment"))
                check_digest(line.get("environment"), environment.digest)
                self._known["environment"][environment.digest] = environment
                return environment
            case "run":
                run = Run(id=len(self._known["run"]) + 1, **_values(RunRow, line, "kind", "run"))
                check_digest(line.get("run"), _key(run))
                self._known["run"][_key(run)] = run
                return run
            case "variant":
                named = {**line, "name": line.get("variant")}
                variant = parse.parse_variant(_values(VariantRow, named, "kind", "variant"))
                self._known["variant"][variant] = variant
                return variant
            case "trial":
                return self._trial(line)
            case "pin":
                values = self._of_problem(PinRow, line)
                candidate = Candidate.of(values["problem"].op, values.pop("variant"), values.pop("config"))
                key = (values["problem"], values["environment"])
                if key in self._known["pin"]:
                    raise ValueError("a second pin of the same problem in the same environment")
                self._known["pin"][key] = pin = Pin(candidate=candidate, **values)
                return pin
            case kind:
                raise ValueError(f"kind is {kind!r:.80}, not one of environment, run, variant, trial, pin")

    def _trial(self, line: Line) -> Trial:
        values = self._of_problem(TrialRow, line, "variant", "numerics", "source_hash", "run")
        digest = config_digest(values["config"])
        self._reader.trial({**values, "config": canonical_json(values["config"]), "config_digest": digest})
        variant = parse.parse_variant({**line, "op": values["problem"].op, "name": line.get("variant")})
        self._find("variant", variant)
        run_id = None if line.get("run") is None else self._find("run", line["run"]).id
        return Trial(**values, **_named(variant), run_id=run_id)

    def _of_problem(self, model: type[Base], line: Line, *others: str) -> dict[str, Any]:
        """The values of a trial or a pin, with its problem and environment."""
        config, plain = canonical_json(line.get("config")), line.get("problem")
        values = _values(model, {**line, "config": config}, "kind", "problem", "environment", *others)
        values["config"] = dict(self._reader.config(config))
        if not isinstance(plain, dict):
            raise ValueError(f"problem is not an object: {plain!r:.80}")
        if (text := canonical_json(plain)) not in self._problems:
            self._problems[text] = parse_problem(_values(ProblemRow, plain))
        values["problem"] = self._problems[text]
        values["environment"] = self._find("environment", line.get("environment"))
        return values

    def _find(self, kind: str, key: Any) -> Any:
        try:
            return self._known[kind][key]
        except (KeyError, TypeError):
            raise ValueError(f"no line before this one gives {kind} {key!r:.200}") from None


def _values(model: type[Base], line: Mapping[str, Any], *others: str) -> dict[str, Any]:
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
