"""How many cases tests go through: few in `make test`, a sample in CI, all with TUNEDCOMM_TEST_FULL=1.

`some` thins cases in `make test` alone; `sample` thins long loops over one path in `make test-all` and CI, too.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import TypeVar

__all__ = ["FULL", "QUICK", "sample", "some", "some_of"]

K = TypeVar("K")
T = TypeVar("T")

# Set by conftest.py; ranks and other processes of the tests inherit them.
QUICK = os.environ.get("TEST_QUICK") == "1"
FULL = os.environ.get("TEST_FULL") == "1"


def some(cases: Iterable[T], every: int = 3) -> list[T]:
    """The first and then each `every`-th case in `make test`, else all of them."""
    return list(cases)[:: every if QUICK else 1]


def sample(cases: Iterable[T], every: int = 2, *, quick: int = 5) -> list[T]:
    """The first and then each `every`-th case, each `quick`-th in `make test`, and all with TUNEDCOMM_TEST_FULL=1."""
    return list(cases)[:: quick if QUICK else 1 if FULL else every]


def some_of(cases: Mapping[K, T], every: int = 3) -> dict[K, T]:
    """The same of named cases."""
    return dict(some(cases.items(), every))
