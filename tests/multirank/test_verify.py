"""Real gangs time stored winners again: bad ones are found out, whatever they do, and the sound ones hold."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from planted_cases import OP

from tunedcomm import kernels
from tunedcomm.db.layers import Layer, load_snapshot
from tunedcomm.db.records import Trial
from tunedcomm.db.store import Database
from tunedcomm.dispatch.communicator import limits_for
from tunedcomm.dispatch.dispatcher import decide
from tunedcomm.hardware import detect
from tunedcomm.spec import Candidate, Problem, get_variant
from tunedcomm.tuner.verify import VerifyOutcome, VerifySpec, verify

# Shape to the stored winner there and the verdict that it must get.
SLOW, WRONG, SEGFAULT, DEADLOCK, SOUND = 64, 1024, 4096, 8192, 16384
# tests/unit/test_tuner_verify.py asks the same of made-up gangs.
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("planted_ops")]

STORED: dict[int, tuple[str, dict[str, Any], str, str]] = {
    SLOW: ("good", {"delay_ms": 40}, "slower", "longer than the library"),
    WRONG: ("wrong_by_one_element", {}, "failed", "incorrect: on rank 1"),
    SEGFAULT: ("segfaults", {}, "failed", "SIGSEGV"),
    DEADLOCK: ("deadlocks", {}, "failed", "no sign of life"),
    SOUND: ("library", {}, "ok", ""),
}


def problem(numel: int) -> Problem:
    return Problem(OP, (numel,), "float32", 2, mode="eager")


def trial(numel: int, variant: str, config: dict[str, Any], latency_us: float) -> Trial:
    known = get_variant(OP, variant)
    return Trial(
        problem=problem(numel),
        environment=detect(),
        variant=variant,
        numerics=known.numerics,
        source_hash=kernels.source_hash(known),
        config=config,
        status="ok",
        latency_p50_us=latency_us,
        baseline_p50_us=100.0,
        samples=20,
        final=True,
    )


@pytest.fixture(scope="module")
def verified(tmp_path_factory: pytest.TempPathFactory) -> tuple[VerifyOutcome, Path]:
    """All of it at once: each lost gang costs seconds."""
    path = tmp_path_factory.mktemp("verify") / "tuned.db"
    with Database.open(path, create=True) as database:
        for numel, (variant, config, *_) in STORED.items():
            database.record([trial(numel, "library", {}, 100.0)])
            if variant != "library":
                database.record([trial(numel, variant, config, 50.0)])
        database.record([trial(SOUND, "good", {"delay_ms": 20}, 200.0)])
        wanted = VerifySpec(
            layers=(Layer("user", str(path)),),
            backend="host",
            world_size=2,
            plugins=("planted",),
            trial_timeout_s=10.0,
            compile_timeout_s=10.0,
            command="pytest",
        )
        return verify(wanted, database), path


@pytest.mark.parametrize("numel", STORED)
def test_verdict(verified: tuple[VerifyOutcome, Path], numel: int) -> None:
    variant, config, verdict, why = STORED[numel]
    results = [r for r in verified[0].results if r.winner.problem.shape == (numel,)]
    (found,) = (r for r in results if "default" in r.winner.policies)
    assert found.winner.candidate == Candidate.of(OP, variant, config)
    assert found.verdict == verdict, found.why
    assert why in found.why


def test_dispatch_goes_by_what_was_found(verified: tuple[VerifyOutcome, Path]) -> None:
    outcome, path = verified
    snapshot = load_snapshot(detect(), 2, layers=[Layer("user", str(path))], strict=True)
    limits = limits_for(detect(), 2)
    assert {decide(problem(numel), snapshot, limits).candidate.variant for numel in STORED} == {"library"}
    with Database.open(path, readonly=True) as database:
        mine = [t for t in database.trials() if t.run_id == outcome.run_id]
    assert len(mine) == outcome.num_trials
    statuses = {t.variant: t.status for t in mine if t.variant not in ("library", "good")}
    assert statuses == {"wrong_by_one_element": "incorrect", "segfaults": "crashed", "deadlocks": "hung"}


def test_gangs_that_were_lost_are_replaced(verified: tuple[VerifyOutcome, Path]) -> None:
    outcome, _ = verified
    assert outcome.num_gangs == 7  # what crashed is tried again in a fresh one
    assert len([r for r in outcome.wrong if "default" in r.winner.policies]) == 4
