"""A sweep finds out variants that are right at first and do harm later, and dispatch takes the good one beside them."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from planted_cases import LATE_BAD, LATE_OP, NEVER, NEXT, OP

from tunedcomm import spec
from tunedcomm.db.layers import Layer, load_snapshot
from tunedcomm.db.records import Trial
from tunedcomm.db.store import Database
from tunedcomm.dispatch.communicator import limits_for
from tunedcomm.selection.select import Registered, choose
from tunedcomm.tuner.search.sweep import SweepOutcome, SweepSpec, hash_if_known, sweep

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", autouse=True)
def planted_ops() -> Iterator[None]:
    """Registered for this module alone: other tests look at every registered op."""
    for name in ("planted", "planted_late"):
        importlib.import_module(name)
    yield
    for op in (OP, LATE_OP):
        spec._ops.pop(op)
    for key in [key for key in spec._variants if key[0] in (OP, LATE_OP)]:
        spec._variants.pop(key)
    for name in ("planted", "planted_late"):
        sys.modules.pop(name)


def swept_at(path: Path, *variants: str, shapes: tuple[tuple[int, ...], ...]) -> tuple[SweepOutcome, list[Trial]]:
    wanted = SweepSpec(
        op=LATE_OP,
        shapes=shapes,
        dtypes=("float32",),
        backend="host",
        world_size=2,
        variants=variants,
        plugins=("planted_late",),
        command="pytest",
    )
    with Database.open(path, create=True) as database:
        return sweep(wanted, database), database.trials()


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory) -> tuple[SweepOutcome, list[Trial]]:
    path = tmp_path_factory.mktemp("trust") / "tuned.db"
    # What leaks takes long over it, and would be left alone beside the others.
    leaking = swept_at(path, "leaks", shapes=((64,),))[1]
    outcome, trials = swept_at(path, "good", "settles", *LATE_BAD, shapes=((64,),))
    assert {trial.id for trial in leaking} <= {trial.id for trial in trials}
    return outcome, trials


@pytest.mark.parametrize("variant", sorted(LATE_BAD))
def test_late_damage_is_incorrect(swept: tuple[SweepOutcome, list[Trial]], variant: str) -> None:
    # On a slow machine too few launches fit into the search, and the finals find it out: the last trial counts.
    trial = [trial for trial in swept[1] if trial.variant == variant][-1]
    assert trial.status == "incorrect", trial.reason
    assert re.search(LATE_BAD[variant], trial.reason), trial.reason


def test_the_good_variants_beside_them_are_taken(swept: tuple[SweepOutcome, list[Trial]]) -> None:
    outcome, trials = swept
    ran = {trial.variant for trial in trials if trial.status == "ok" and trial.final}
    assert ran == {"library", "good", "settles"}
    (problem,) = outcome.problems
    assert problem.best is not None
    assert problem.best.variant in ("good", "settles")


def test_damage_is_not_charged_to_the_library(tmp_path: Path) -> None:
    outcome, trials = swept_at(tmp_path / "tuned.db", "good", "damages", shapes=((64,), (NEXT,), (NEVER,)))
    by_size = {size: [t for t in trials if t.problem.shape == (size,)] for size in (64, NEXT, NEVER)}
    for size in (64, NEXT):
        assert {t.status for t in by_size[size] if t.variant == "library"} == {"ok"}
    assert {t.status for t in by_size[NEXT] if t.variant == "good"} == {"ok"}
    assert [t.status for t in by_size[NEXT] if t.variant == "damages"] == ["crashed"]
    assert [t.status for t in by_size[NEVER] if t.variant == "library"] == ["crashed"]
    assert [result.library_failure is None for result in outcome.problems] == [True, True, False]
    assert outcome.problems[1].best is not None
    assert outcome.problems[1].best.variant == "good"
    assert outcome.problems[1].library_us is not None
    assert outcome.dropped == ()
    with Database.open(tmp_path / "tuned.db") as database:
        snapshot = load_snapshot(trials[0].environment, 2, layers=[Layer("user", database.target)], strict=True)
    limits = limits_for(trials[0].environment, 2)
    for result in outcome.problems:
        chosen = choose(snapshot, result.problem, Registered(limits, hash_if_known)).candidate
        assert result.best is None or result.best.candidate == chosen
