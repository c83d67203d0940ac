"""Stored values back into objects, trusting none of them: what a first call reads, without SQLAlchemy.

A database or file may come from elsewhere or be damaged. An invalid value raises ValueError here. The caller counts the
row or line as skipped and goes on without it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import fields
from datetime import datetime, timezone
from typing import Any, Literal, NoReturn, TypeAlias, get_args, get_type_hints

from tunedcomm.spec import Problem, format_shape, parse_shape

# Statuses of trials:
#
# | status        | the candidate                                             | sets that hold it                  |
# |---------------|-----------------------------------------------------------|------------------------------------|
# | ok            | was right, and was timed in full                          | RAN                                |
# | pruned        | was right, and too slow for more than a first look        | RAN                                |
# | infeasible    | cannot run the problem, and never ran                     | UNUSABLE                           |
# | compile_error | did not compile                                           | UNUSABLE FAILURES                  |
# | incorrect     | gave a wrong result                                       | UNUSABLE FAILURES DANGEROUS        |
# | crashed, hung | ended or stopped its ranks, which may be out of step then | UNUSABLE FAILURES DANGEROUS LOST   |
#
# An unusable candidate is not tried again in the same environment and source, unless that is asked for. A dangerous one
# is never dispatched. A lost one costs the gang.
Status: TypeAlias = Literal["ok", "infeasible", "compile_error", "incorrect", "crashed", "hung", "pruned"]
STATUSES: tuple[str, ...] = get_args(Status)
RAN: tuple[str, ...] = ("ok", "pruned")
LOST: tuple[str, ...] = ("crashed", "hung")
DANGEROUS: tuple[str, ...] = ("incorrect", *LOST)
FAILURES: tuple[str, ...] = ("compile_error", *DANGEROUS)
UNUSABLE: tuple[str, ...] = ("infeasible", *FAILURES)


def was_tried(status: str) -> bool:
    """True if commands count the trial: an infeasible candidate never ran."""
    return status != "infeasible"


_MAX_TEXT = 100_000
_SHAPE = re.compile("([0-9]{1,18}(x[0-9]{1,18}){0,15})?")  # extents of less than 63 bits


def utc_now() -> datetime:
    """Now, aware, in UTC."""
    return datetime.now(timezone.utc)


def canonical_json(value: object) -> str:
    """The one JSON text of `value`: keys sorted, no blanks, no NaN or infinity."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


def refuse_constant(text: str) -> NoReturn:
    """Raise ValueError; `json.loads` accepts NaN and Infinity unless this is its `parse_constant`."""
    raise ValueError(f"{text} is not JSON")


def text_of(value: object, name: str) -> str:
    """`value`, checked to be a text of at most `_MAX_TEXT` characters."""
    if not isinstance(value, str):
        raise ValueError(f"{name} is not a text: {value!r:.80}")
    if len(value) > _MAX_TEXT:
        raise ValueError(f"{name} is too long: {len(value)} characters, at most {_MAX_TEXT}")
    return value


def int_of(value: object, name: str, *, low: int = 0, below: int = 2**31) -> int:
    """`value`, checked to be an integer from `low` to below `below`; a boolean is refused."""
    if type(value) is not int or not low <= value < below:
        raise ValueError(f"{name} is not an integer >= {low} of {below.bit_length()} bits: {value!r:.80}")
    return value


def id_of(value: object, name: str = "id") -> int:
    """A row id."""
    return int_of(value, name, low=-(2**63), below=2**63)


def time_of(value: object, name: str = "time") -> datetime:
    """`value` as an aware time in UTC; SQLite returns text, other drivers a datetime."""
    if isinstance(value, str):
        value = datetime.fromisoformat(value)
    if not isinstance(value, datetime):
        raise ValueError(f"{name} is not a time: {value!r:.80}")
    try:
        return value.replace(tzinfo=timezone.utc) if value.tzinfo is None else value.astimezone(timezone.utc)
    except OverflowError:
        raise ValueError(f"{name} is not a time that UTC knows: {value}") from None


def flag_of(value: object, name: str) -> bool:
    """`value` as a boolean; SQLite stores it as an integer."""
    if value not in (0, 1):
        raise ValueError(f"{name} is not a boolean: {value!r:.80}")
    return bool(value)


_TYPES = {field.name: get_type_hints(Problem)[field.name] for field in fields(Problem)}
_OF_TYPE: Mapping[Any, Callable[[object, str], Any]] = {int: int_of, bool: flag_of}  # all others are stored as texts


def parse_problem(row: Mapping[str, Any]) -> Problem:
    """The problem of a row, checked like any other; `digest` is checked where the row has one."""
    values = {name: _OF_TYPE.get(kind, text_of)(row.get(name), name) for name, kind in _TYPES.items()}
    if not _SHAPE.fullmatch(values["shape"]):
        raise ValueError(f"shape is not up to 16 numbers of up to 18 digits: {values['shape']:.80}")
    problem = Problem(**{**values, "shape": parse_shape(values["shape"]) if values["shape"] else ()})
    check_digest(row.get("digest", problem.digest), problem.digest)
    return problem


def row_of_problem(problem: Problem) -> dict[str, Any]:
    """The values of a problem that `parse_problem` reads."""
    return {**problem.to_dict(), "shape": format_shape(problem.shape)}


def check_digest(stored: Any, digest: str) -> None:
    """Raise ValueError unless the fields have the stored digest."""
    if stored != digest:
        raise ValueError(f"its digest is {stored!r:.80}, and its fields have the digest {digest!r}")
