"""Values of one column as plain JSON values and back, by the column's type; nothing that comes from outside is trusted.

A new column needs nothing here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from datetime import datetime, timezone
from typing import Any

from sqlalchemy import BigInteger, Boolean, Column, Float, Integer

from tunedcomm.db import rows as parse
from tunedcomm.db.query import table
from tunedcomm.db.schema import Base, UtcDateTime

__all__ = ["own_columns", "to_plain", "to_stored"]

# JSON has no infinity, and an error measure may be infinite. NaN is stored as NULL.
_INFINITE: Mapping[str, float] = {"inf": math.inf, "-inf": -math.inf}
_DERIVED = ("digest", "config_digest")


def own_columns(model: type[Base]) -> list[Column[Any]]:
    """The columns that say something of themselves: no ids, no references, no digests of other columns."""
    return [
        column
        for column in table(model).columns
        if not column.primary_key and not column.foreign_keys and column.name not in _DERIVED
    ]


def to_plain(column: Column[Any], value: Any) -> Any:
    """A value as a driver gives it, whatever the driver, as a plain JSON value.

    Raises:
        ValueError: it is none of the column's.
    """
    name, kind = column.name, column.type
    if value is None:
        return _absent(column)
    if isinstance(kind, Boolean):
        return parse.bool_of(value, name)
    if isinstance(kind, UtcDateTime):
        return _in_utc(value).isoformat(timespec="microseconds")
    if isinstance(kind, Float):
        number = parse.error_of(value)
        assert number is not None
        if math.isnan(number):
            return _absent(column)
        return number if math.isfinite(number) else str(number)
    return _bounded(column, value)


def to_stored(column: Column[Any], value: Any) -> Any:
    """A plain JSON value as the column stores it: the inverse of `to_plain`.

    Raises:
        ValueError: it is none of the column's.
    """
    name, kind = column.name, column.type
    if value is None:
        return _absent(column)
    if isinstance(kind, Boolean):
        if type(value) is not bool:
            raise ValueError(f"{name} is not true or false: {value!r:.80}")
        return value
    if isinstance(kind, UtcDateTime):
        if not isinstance(value, str):
            raise ValueError(f"{name} is not a time such as 2026-01-31T12:00:00+00:00: {value!r:.80}")
        return _in_utc(value)
    if isinstance(kind, Float):
        if isinstance(value, str) and value in _INFINITE:
            return _INFINITE[value]
        if type(value) not in (int, float):
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


def _in_utc(value: Any) -> datetime:
    return parse.time_of(value).astimezone(timezone.utc)
