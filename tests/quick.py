"""What `make test` leaves out of tests that go through many cases; `make test-all` and CI go through all of them."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import TypeVar

__all__ = ["QUICK", "some", "some_of"]

K = TypeVar("K")
T = TypeVar("T")

# Set by conftest.py where the slow tests are left out; ranks and other processes of the tests inherit it.
QUICK = os.environ.get("TEST_QUICK") == "1"


def some(cases: Iterable[T], every: int = 3) -> list[T]:
    """The first and then each `every`-th case in `make test`, else all of them."""
    return list(cases)[:: every if QUICK else 1]


def some_of(cases: Mapping[K, T], every: int = 3) -> dict[K, T]:
    """The same of named cases."""
    return dict(some(cases.items(), every))
