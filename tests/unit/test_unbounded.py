"""Variants whose waits nothing ends are measured, but not chosen."""

from __future__ import annotations

import dataclasses

from tunedcomm import kernels
from tunedcomm.db.layers import load_snapshot, packaged_databases
from tunedcomm.db.store import Database
from tunedcomm.dispatch.communicator import limits_for
from tunedcomm.dispatch.dispatcher import decide
from tunedcomm.spec import Candidate, Problem, variants


def test_a_spinning_variant_is_not_chosen_however_fast_it_was() -> None:
    path = next(path for path in packaged_databases() if path.stem.endswith("x4"))
    with Database.open(path, readonly=True) as database:
        (environment,) = database.environments()
    snapshot = load_snapshot(environment, 4)
    problem = Problem("all_reduce", (65536,), "bfloat16", 4)
    kernels.discover()
    spinning = variants("all_reduce")["torch_one_shot"]
    assert not spinning.bounded
    library = next(row for row in snapshot.family_rows(problem) if row.problem == problem and row.is_library)
    fast = dataclasses.replace(
        library,
        candidate=Candidate.of("all_reduce", spinning.name, {}),
        source_hash=kernels.source_hash(spinning),
        latency_p10_us=0.1,
        latency_p50_us=0.1,
        latency_p90_us=0.1,
    )
    richer = dataclasses.replace(snapshot, rows=(*snapshot.rows, fast))
    limits = limits_for(environment, 4)
    chosen = decide(problem, richer, limits)
    assert chosen.candidate.variant != spinning.name
    assert "wait for a lost peer for ever" in dict(chosen.passed_over)[f"{spinning.name}()"]
    forced = Candidate.of("all_reduce", spinning.name, {})
    assert decide(problem, richer, limits, forced=forced).candidate == forced
