"""Rows from elsewhere into a new, empty database, every value checked first.

The lines of `jsonl` are what comes in, read from a file or made of the rows of another database. Whatever is wrong with
one of them ends the intake: half of a database is none.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn

from sqlalchemy import Column, Connection, insert

from tunedcomm.db import rows as parse
from tunedcomm.db.columns import own_columns, to_stored
from tunedcomm.db.jsonl import FORMAT, FORMAT_VERSION, Line, check_trial, end, run_key
from tunedcomm.db.records import canonical_json, config_digest
from tunedcomm.db.rekey import current_hash
from tunedcomm.db.schema import HEAD, REVISIONS, Base, EnvironmentRow, PinRow, ProblemRow, RunRow, TrialRow, VariantRow
from tunedcomm.errors import DatabaseAccessError, DatabaseCorruptError, DatabaseVersionError
from tunedcomm.spec import format_shape

__all__ = ["Intake", "is_jsonl", "read_lines"]

# Longer than any line that is written: the longest texts are bounded.
_MAX_LINE = 1 << 20
_BATCH = 2000


class Intake:
    """Takes lines in the order in which `jsonl` writes them and adds their rows to a database without any.

    Args:
        connection: in a transaction that writes.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._batches: dict[type[Base], list[dict[str, Any]]] = {}
        self._ids: dict[type[Base], dict[Any, int]] = {}
        self._columns: dict[type[Base], list[Column[Any]]] = {}
        self._problems: dict[str, tuple[int, str]] = {}
        self._configs: dict[str, str] = {}
        self._take: Mapping[str, Callable[[Line], None]] = {
            "environment": self._environment,
            "run": self._run,
            "variant": self._variant,
            "trial": self._trial,
            "pin": self._pin,
        }

    def add(self, line: Line) -> None:
        """Take one line.

        Raises:
            ValueError: it makes no sense, or not after the lines before it.
        """
        kind = line.get("kind")
        if not isinstance(kind, str) or kind not in self._take:
            raise ValueError(f"kind is {kind!r:.80}, not one of {', '.join(self._take)}")
        self._take[kind](line)

    def finish(self) -> None:
        """Add what was held back, to add many rows at once."""
        for model in (EnvironmentRow, ProblemRow, VariantRow, RunRow, TrialRow, PinRow):
            if batch := self._batches.pop(model, []):
                self._connection.execute(insert(model), batch)

    def _put(self, model: type[Base], key: Any, values: Mapping[str, Any]) -> int:
        """The id of the row with that key, which is added if it is new."""
        ids = self._ids.setdefault(model, {})
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
        """The values of the model's columns; the line has fields of these names, and `others`, which are seen to."""
        columns = self._columns.setdefault(model, own_columns(model))
        values = {c.name: to_stored(c, line.get(c.name)) for c in columns if c.name not in others}
        if unknown := [name for name in line if name not in values and name not in others]:
            raise ValueError(f"unknown field {unknown[0]!r:.80}")
        return values

    def _environment(self, line: Line) -> None:
        values = self._own(EnvironmentRow, line, "kind", "environment")
        digest = parse.parse_environment(values).digest
        if line.get("environment") != digest:
            raise ValueError(f"its fields have the digest {digest}, not {line.get('environment')!r:.80}")
        self._put(EnvironmentRow, digest, {**values, "digest": digest})

    def _run(self, line: Line) -> None:
        values = self._own(RunRow, line, "kind", "run")
        key = run_key(line)
        if line.get("run") != key:
            raise ValueError(f"its fields have the digest {key}, not {line.get('run')!r:.80}")
        self._put(RunRow, key, values)

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
        config = line.get("config")
        text = canonical_json(config)
        if text not in self._configs:
            parse.parse_config(text)
            assert isinstance(config, dict)
            self._configs[text] = config_digest(config)
        return {"config": text, "config_digest": self._configs[text]}

    def _trial(self, line: Line) -> None:
        values = self._own(TrialRow, line, *_TRIAL_FIELDS)
        check_trial(values)
        problem_id, op = self._problem(line)
        name, stored_hash = str(line.get("variant")), str(line.get("source_hash"))
        variant = (op, name, line.get("numerics"), current_hash(op, name, stored_hash))
        run = line.get("run")
        batch = self._batches.setdefault(TrialRow, [])
        batch.append(
            {
                **values,
                **self._config(line),
                "problem_id": problem_id,
                "environment_id": self._known(EnvironmentRow, line.get("environment"), "environment"),
                "variant_id": self._known(VariantRow, variant, "variant"),
                "run_id": None if run is None else self._known(RunRow, run, "run"),
            }
        )
        if len(batch) >= _BATCH:
            self.finish()

    def _pin(self, line: Line) -> None:
        values = self._own(PinRow, line, "kind", "problem", "environment", "config")
        problem_id, _ = self._problem(line)
        environment_id = self._known(EnvironmentRow, line.get("environment"), "environment")
        before = len(self._ids.get(PinRow, ()))
        config = self._config(line)["config"]
        keys = {"problem_id": problem_id, "environment_id": environment_id, "config": config}
        self._put(PinRow, (problem_id, environment_id), {**values, **keys})
        if len(self._ids[PinRow]) == before:
            raise ValueError("a second pin of the same problem in the same environment")


_TRIAL_FIELDS = ("kind", "problem", "environment", "variant", "numerics", "source_hash", "config", "run")


def is_jsonl(path: Path) -> bool:
    """True if the file begins as JSON lines do; a file that cannot be read is none."""
    try:
        with path.open("rb") as file:
            return file.read(1) == b"{"
    except OSError:
        return False


def read_lines(path: Path, intake: Intake) -> None:
    """Take every line of a file that `tunedcomm db export --format jsonl` wrote.

    Raises:
        DatabaseAccessError: the file cannot be read.
        DatabaseCorruptError: a line makes no sense.
        DatabaseVersionError: the file is of a later format or schema.
    """
    number, is_whole = 0, False
    try:
        with path.open("rb") as file:
            for number, text in enumerate(iter(lambda: file.readline(_MAX_LINE + 1), b""), start=1):
                line = _parse(text)
                if is_whole:
                    raise ValueError("it comes after the end")
                if number == 1:
                    _check_header(path, line)
                elif line.get("kind") == "end":
                    is_whole = line == end(number - 1)
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


def _parse(text: bytes) -> Line:
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
    if version == FORMAT_VERSION and schema in REVISIONS:
        return
    raise DatabaseVersionError(
        f"{path} was written by another tunedcomm (format version {version!r:.20}, schema {schema!r:.20}; this one "
        f"reads {FORMAT_VERSION} and up to {HEAD}): upgrade tunedcomm, or import the database that it was made of"
    )
