from __future__ import annotations

import inspect

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
def test_every_error_is_documented_and_caught_as_a_builtin_one(name: str) -> None:
    assert ALL[name].__doc__
    builtin = (ImportError, ValueError, RuntimeError, TimeoutError)
    assert name == "TunedCommError" or issubclass(ALL[name], builtin)
    assert issubclass(ALL[name], errors.DatabaseError) is name.startswith("Database")
