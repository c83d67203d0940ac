from __future__ import annotations

import inspect
import re

import pytest

from tunedcomm import errors

ALL = {
    name: value
    for name, value in vars(errors).items()
    if inspect.isclass(value) and issubclass(value, errors.TunedCommError)
}


def test_all_is_sorted_and_complete() -> None:
    assert errors.__all__ == sorted(ALL)


@pytest.mark.parametrize("name", sorted(ALL))
def test_every_error_is_documented_and_drawn(name: str) -> None:
    error = ALL[name]
    assert error.__doc__
    assert re.search(rf"\b{name}\b", errors.__doc__ or ""), f"{name} is missing in the hierarchy at the top"


def test_drawing_tells_the_second_base() -> None:
    """`Name (Base)` in the drawing is true: callers catch ValueError, RuntimeError and TimeoutError by it."""
    drawn = re.findall(r"─ (\w+) \((\w+)\)", errors.__doc__ or "")
    assert len(drawn) >= 10
    builtin = {
        "ImportError": ImportError,
        "ValueError": ValueError,
        "RuntimeError": RuntimeError,
        "TimeoutError": TimeoutError,
    }
    for name, base in drawn:
        assert issubclass(ALL[name], builtin[base]), name
