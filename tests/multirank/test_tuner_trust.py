"""A sweep finds out variants that are right at first and do harm later, and dispatch takes the good one beside them."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from planted_cases import LATE_BAD, LATE_OP, OP

from tunedcomm import spec
from tunedcomm.db.records import Trial
from tunedcomm.db.store import Database
from tunedcomm.tuner.search.sweep import SweepOutcome, SweepSpec, sweep

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
    (trial,) = [trial for trial in swept[1] if trial.variant == variant]
    assert trial.status == "incorrect", trial.reason
    assert re.search(LATE_BAD[variant], trial.reason), trial.reason


def test_the_good_variants_beside_them_are_taken(swept: tuple[SweepOutcome, list[Trial]]) -> None:
    outcome, trials = swept
    ran = {trial.variant for trial in trials if trial.status == "ok" and trial.final}
    assert ran == {"library", "good", "settles"}
    (problem,) = outcome.problems
    assert problem.best is not None
    assert problem.best.variant in ("good", "settles")
