"""Which stored winners are timed again, and what besides them."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest
from verify_samples import SIZES, here, known, problem_of, recorded, tuned, tuned_copy

from tunedcomm.db.store import Database
from tunedcomm.dispatch.communicator import limits_for
from tunedcomm.spec import Candidate, get_variant
from tunedcomm.tuner.gang.protocol import Settings
from tunedcomm.tuner.search.sweep import compile_ahead
from tunedcomm.tuner.verify import candidates_to_measure


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A database of one's own."""
    return tuned_copy(tmp_path)


@pytest.fixture
def winners() -> dict[int, Candidate]:
    return dict(tuned()[1])


def test_winners_of_every_policy(path: Path) -> None:
    with Database.open(path) as database:
        library = next(r for r in recorded() if r.variant == "library" and r.problem == problem_of(SIZES[4]))
        now = datetime.now(timezone.utc)
        fast = dict.fromkeys(("latency_p10_us", "latency_p50_us", "latency_p90_us", "baseline_p50_us"), 1.0)
        database.record([replace(library, **fast, final=True, created_at=now)])  # type: ignore[arg-type]
    found = known(path)
    (mine,) = [s for p, s in found.items() if p == problem_of(SIZES[4])]
    assert all(winner.policies for winner in mine)
    asked = [policy for winner in mine for policy in winner.policies]
    assert sorted(asked) == ["any", "default", "ordered"]


def test_neighbours_winners_are_measured_too(path: Path) -> None:
    found = known(path)
    chosen = candidates_to_measure(found)
    sizes = sorted(problem.shape[0] for problem in found)
    for place, size in enumerate(sizes):
        near = sizes[max(place - 1, 0) : place + 2]
        wanted = {w.candidate for n in near for w in found[problem_of(n)] if not w.row.is_library}
        assert wanted <= set(chosen[problem_of(size)])
    assert all(c.variant != "library" for members in chosen.values() for c in members)


def test_what_is_measured_is_compiled_ahead(path: Path) -> None:
    """A new Triton finds an empty cache: nothing but what is measured, at the shapes that the check launches too."""
    chosen = candidates_to_measure(known(path))
    submitted: list[Any] = []

    class Pool:
        def submit(self, requests: list[Any], compute_capability: int) -> int:
            assert compute_capability == 90
            submitted.extend(requests)
            return len(requests)

    settings, limits = Settings(backend="cuda", world_size=4, trials=1), limits_for(here(), 4)
    steps = list(compile_ahead(Pool(), chosen, settings, limits, 90, chosen))  # type: ignore[arg-type]
    assert len(steps) == len(SIZES)
    wanted = {
        request
        for problem, members in chosen.items()
        for candidate in members
        for request in get_variant("all_reduce", candidate.variant).compile_requests(problem, candidate.config_dict)
    }
    assert wanted <= set(submitted)
    everything: list[Any] = list(compile_ahead(Pool(), chosen, settings, limits, 90))  # type: ignore[arg-type]
    assert sum(everything) > sum(steps) > 0
