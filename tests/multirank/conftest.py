"""A test with a parameter `rank` runs on ranks; those of one module share one start of their processes (`cases.Ranks`).

    RANKS = Ranks(2)

    def test_sum(rank: int) -> None:
        ...  # on every rank, in the order of the module

Its other parameters come from `parametrize`. With one named `world_size` it runs on as many ranks, else on those of
`RANKS`. The first failure ends the run, for the ranks may be out of step then: the tests after it fail as not run.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from cases import report, run_on_ranks
from harness import RankError, run_ranks
from planted_cases import LATE_OP, OP

from tunedcomm import spec

Outcomes = list[dict[str, str]]


@pytest.fixture(scope="module")
def rank(tmp_path_factory: pytest.TempPathFactory) -> Callable[[pytest.Function], Outcomes]:
    """What the module's tests said on every rank, all of one number of ranks run at the first question."""
    known: dict[int, Outcomes] = {}

    def ask(item: pytest.Function) -> Outcomes:
        if (size := _world_size(item)) not in known:
            known[size] = _run_beside(item, size, tmp_path_factory.mktemp("ranks"))
        return known[size]

    return ask


@pytest.fixture
def world_size(request: pytest.FixtureRequest) -> int:
    return int(request.module.RANKS.world_size)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    if "rank" not in pyfuncitem.fixturenames:
        return None
    report(pyfuncitem.funcargs["rank"](pyfuncitem), pyfuncitem.name)
    return True


def _run_beside(item: pytest.Function, size: int, folder: Path) -> Outcomes:
    """Run all tests of the module that were asked for on as many ranks."""
    every = [
        other for other in item.session.items if isinstance(other, pytest.Function) and other.module is item.module
    ]
    tests = {
        other.name: (other.originalname, _arguments(other))
        for other in every
        if "rank" in other.fixturenames and _world_size(other) == size
    }
    asked = item.module.RANKS
    env = {"TEST_FOLDER": str(folder), **asked.env, **(asked.prepare(folder) if asked.prepare else {})}
    try:
        return run_ranks(size, run_on_ranks, item.module.__name__, tests, timeout=asked.timeout, env=env)
    except RankError as error:
        return [dict.fromkeys(tests, str(error))]


def _parameters(item: pytest.Function) -> dict[str, Any]:
    return item.callspec.params if hasattr(item, "callspec") else {}


def _arguments(item: pytest.Function) -> dict[str, Any]:
    """What the test is given besides its rank."""
    values = {"world_size": _world_size(item), **_parameters(item)}
    return {name: values[name] for name in inspect.signature(item.function).parameters if name != "rank"}


def _world_size(item: pytest.Function) -> int:
    return int(_parameters(item).get("world_size", item.module.RANKS.world_size))


@pytest.fixture(scope="module")
def planted_ops() -> Iterator[None]:
    """The planted ops, for one module alone: other tests look at every registered op."""
    modules = ("planted", "planted_late")
    for name in modules:
        importlib.import_module(name)
    yield
    for key in [key for key in spec._variants if key[0] in (OP, LATE_OP)]:
        spec._variants.pop(key)
    for op in (OP, LATE_OP):
        spec._ops.pop(op)
    for name in modules:
        sys.modules.pop(name)
