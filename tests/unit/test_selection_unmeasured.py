"""Ops of experts on GPUs where nothing near is measured: kernels run, once their first call has checked them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from db_samples import H200, row
from db_samples import snapshot as snapshot_of

from tunedcomm import kernels
from tunedcomm.dispatch import decide as dispatch_decide
from tunedcomm.kernels import source_hash_of
from tunedcomm.selection.select import Decision
from tunedcomm.selection.snapshot import Check, Row, Snapshot
from tunedcomm.spec import Candidate, Problem, get_variant
from tunedcomm.symm.layout import limits_for

kernels.discover()
RANKS = 4
LIMITS = limits_for(H200, RANKS)
NOTHING = snapshot_of(())
TUNED = Problem("ep_dispatch", (64, 7168, 8, 256), "bfloat16", RANKS, "", layout="padded")
CONFIG = {"num_blocks": 8, "num_warps": 4, "split": 1, "items": 1}


def asked(tokens: int, op: str = "ep_dispatch", hidden: int = 7168, experts: int = 64, **changes: Any) -> Problem:
    layout = "padded" if op == "ep_dispatch" else ""
    return replace(Problem(op, (tokens, hidden, 8, experts), "bfloat16", RANKS, "", layout=layout), **changes)


def decide(problem: Problem, snapshot: Snapshot = NOTHING, **options: Any) -> Decision:
    return dispatch_decide.decide(problem, snapshot, LIMITS, **options)


def checked(snapshot: Snapshot, problem: Problem, decision: Decision, status: Any) -> Snapshot:
    candidate = decision.candidate
    source_hash = source_hash_of(candidate.op, candidate.variant) or ""
    return snapshot.with_checks(
        Check(problem=problem, candidate=candidate, source_hash=source_hash, status=status, why="a check")
    )


@pytest.mark.parametrize(
    ("problem", "variant"),
    [
        (asked(16), "lamport"),
        (asked(256), "push"),
        (asked(1024), "two_phase"),
        (asked(4096, layout="contiguous", scaling="token"), "two_phase"),
        (asked(1024, "ep_combine"), "push"),
        (asked(64, "ep_combine", dtype="float32"), "lamport"),
        (asked(64, "ep_combine", layout="rank"), "tokens_lamport"),
        (asked(4096, "ep_combine", layout="rank"), "tokens_push"),
        (asked(4096, layout="tokens"), "tokens_push"),
        (asked(4096, layout="tokens", input_kind="symmetric"), "tokens_direct"),
        (asked(16, dtype="float64"), "library"),
        (asked(16, hidden=1001), "library"),
        (asked(16, "ep_combine", hidden=1001), "library"),
    ],
)
def test_kernels_run_where_they_can(problem: Problem, variant: str) -> None:
    decision = decide(problem)
    assert decision.candidate.variant == variant
    assert decision.is_unproven is (variant != "library")
    assert decide(problem, policy="ordered").candidate.variant == variant
    assert dispatch_decide.decide(problem, NOTHING, replace(LIMITS, backend="host")).candidate.variant != "lamport"


def measured(variant: str, latency_us: float, config: dict[str, Any], problem: Problem = TUNED) -> Row:
    candidate, source_hash = Candidate.of("ep_dispatch", variant, config), source_hash_of("ep_dispatch", variant)
    return row(variant, latency_us, problem=problem, candidate=candidate, source_hash=source_hash or "")


def test_the_nearest_tuned_shape_serves_within_bounds() -> None:
    snapshot = snapshot_of([measured("lamport", 5.0, CONFIG), measured("library", 10.0, {})])
    assert not decide(TUNED, snapshot).is_unproven
    for problem in (asked(8, experts=64), asked(128, experts=1024), asked(16, hidden=4096, experts=128)):
        near = decide(problem, snapshot)
        assert (near.source, near.candidate.config_dict, near.is_unproven) == ("interpolated", CONFIG, True), problem
    for problem in (asked(7), asked(64, experts=32), asked(64, hidden=1024)):
        assert decide(problem, snapshot).source == "heuristic", problem


def test_a_comparison_with_other_variants_alone_does_not_answer() -> None:
    """At the size itself, in another layout, nearby, between two sizes and outside of graphs; elsewhere rows do."""
    config = {"chunk_tokens": 256, "num_blocks": 8, "num_warps": 4, "split": 1, "items": 1}
    larger = replace(TUNED, shape=(4096, *TUNED.shape[1:]))
    rows = [
        *(measured("library", 10.0, {}, problem) for problem in (TUNED, larger)),
        *(measured("push", 20.0, config, problem) for problem in (TUNED, larger)),
        measured("two_phase", 20.0, config, replace(TUNED, shape=(64, 256, 1, 8))),
    ]
    asked_for = [replace(larger, shape=(tokens, *TUNED.shape[1:]), mode="graph") for tokens in (1024, 4096, 8192)]
    asked_for += [replace(each, layout="contiguous") for each in asked_for]
    asked_for += [replace(each, mode="eager") for each in asked_for]
    for problem in asked_for:
        decision = decide(problem, snapshot_of(rows))
        assert (decision.source, decision.candidate.variant, decision.is_unproven) == ("heuristic", "two_phase", True)
        assert decision.why.count("first call") == 1
        known = snapshot_of([*rows, *(measured("two_phase", 20.0, config, each) for each in (TUNED, larger))])
        assert decide(problem, known).candidate.variant == "library", problem


def test_a_check_at_the_first_call_has_the_last_word() -> None:
    snapshot, problem = snapshot_of([measured("lamport", 5.0, CONFIG), measured("library", 10.0, {})]), asked(16)
    near = decide(problem, snapshot)
    passed = checked(snapshot, problem, near, "passed")
    assert decide(problem, passed).candidate == near.candidate
    failed = checked(snapshot, problem, near, "failed")
    instead = decide(problem, failed)
    default = get_variant("ep_dispatch", "lamport").default(problem, LIMITS)
    assert (instead.source, instead.candidate.config_dict, instead.is_unproven) == ("heuristic", default, True)
    for status in ("failed", "slower", "skipped"):
        assert decide(problem, checked(failed, problem, instead, status)).candidate.variant == "library"
    alone = decide(problem)
    assert decide(problem, checked(NOTHING, problem, alone, "slower")).candidate.variant == "library"
    elsewhere = decide(asked(32), checked(failed, problem, instead, "slower"))
    assert elsewhere.candidate.variant == "lamport", "slower counts at its own size alone"


@pytest.mark.parametrize(("op", "variant"), [("ep_dispatch", "tokens_direct"), ("ep_combine", "tokens_pull")])
@pytest.mark.parametrize("max_sms", [8, 24, 60])
def test_on_few_sms_the_default_takes_no_more(op: str, variant: str, max_sms: int) -> None:
    problem = Problem(op, (4096, 7168, 8, 256), "bfloat16", RANKS, "", layout="tokens", input_kind="symmetric")
    found = decide(problem, max_sms=max_sms).candidate
    assert found.variant == variant
    blocks = get_variant(op, variant).num_blocks(problem, found.config_dict)
    assert max_sms // 2 < blocks <= max_sms
    assert found.config_dict["num_warps"] == 32


@pytest.mark.parametrize("kind", ["plain", "symmetric"])
def test_without_sms_no_kernel_runs(kind: Any) -> None:
    assert decide(asked(4096, layout="tokens", input_kind=kind), max_sms=0).candidate.variant == "library"
