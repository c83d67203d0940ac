"""Counting: only missed problems, only on the first rank, and never an error."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from db_samples import H200

from tunedcomm import kernels
from tunedcomm.db.misses import read
from tunedcomm.dispatch import misses
from tunedcomm.dispatch.communicator import limits_for
from tunedcomm.dispatch.dispatcher import decide
from tunedcomm.dispatch.launches import wrap_launch
from tunedcomm.dispatch.plans import plan_for
from tunedcomm.errors import InfeasibleError
from tunedcomm.selection.snapshot import Row, Snapshot
from tunedcomm.spec import Candidate, Problem, get_variant, why_no_kernel

TUNED = Problem("all_reduce", (98304,), "bfloat16", 4)
UNTUNED = Problem("all_reduce", (98304,), "float32", 4)


@pytest.fixture(autouse=True)
def _own_counters() -> Iterator[None]:
    misses._forget()
    yield
    misses._forget()


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "misses.jsonl"


def launch(inputs: tuple[Any, ...], outputs: tuple[Any, ...], stream: int) -> None:
    """What every plan here launches."""


def communicator(rank: int = 0, mode: str = "cached", bind: Any = None) -> Any:
    """What `plan_for` needs of one: lamport is tuned at one problem."""
    kernels.discover()
    limits = limits_for(H200, 4)
    lamport = get_variant("all_reduce", "lamport")
    row = Row(
        problem=TUNED,
        candidate=Candidate.of("all_reduce", "lamport", lamport.default(TUNED, limits)),
        source_hash=kernels.source_hash(lamport),
        environment=H200,
        latency_p50_us=4.0,
        baseline_p50_us=14.0,
        final=True,
    )
    return SimpleNamespace(
        rank=rank,
        device=SimpleNamespace(type="cuda"),
        limits=limits,
        environment=H200,
        snapshot=Snapshot(environment=H200, world_size=4, rows=(row,)),
        settings=SimpleNamespace(mode=mode, forced={}, check=(0, False)),
        quarantined={},
        noted=None,
        guarded=lambda problem, launch, counter=None: wrap_launch(launch, counter=counter),
        bind=bind or (lambda problem, candidate: launch),
    )


def call(problem: Problem, times: int = 1, **changes: Any) -> None:
    plan = plan_for(communicator(**changes), problem, "default")
    for _ in range(times):
        plan.launch((), (), 0)


def test_a_tuned_plan_launches_what_was_bound(log: Path) -> None:
    plan = plan_for(communicator(), TUNED, "default")
    assert plan.decision.source == "exact"
    assert plan.launch is launch, "nothing may come between a tuned call and its kernel"
    plan.launch((), (), 0)
    misses.flush()
    assert not log.exists()


def test_a_missed_plan_counts_its_calls(log: Path) -> None:
    near = Problem("all_reduce", (98304 + 512,), "bfloat16", 4)
    call(UNTUNED, 3)
    call(near, 5)
    call(UNTUNED, 4)
    assert not log.exists(), "no file is touched in a call"
    misses.flush()
    found, skipped = read(log)
    assert skipped == 0
    assert [(m.problem, m.count, m.source) for m in found] == [(UNTUNED, 7, "library"), (near, 5, "interpolated")]
    assert found[0].hard_key == H200.hard_key
    misses.flush()
    assert log.read_bytes().count(b'{"count"') == 2, "nothing new, nothing written"
    call(near)
    misses.flush()
    assert sum(m.count for m in read(log)[0]) == 13


def test_only_the_first_rank_counts(log: Path) -> None:
    assert plan_for(communicator(rank=1), UNTUNED, "default").launch is launch
    misses.flush()
    assert not log.exists()


@pytest.mark.parametrize("changes", [{"reduction": "max"}, {"dtype": "int64"}, {"dtype": "float64"}], ids=str)
def test_what_no_kernel_can_run_is_no_miss(changes: dict[str, str]) -> None:
    asked = Problem(**{**UNTUNED.to_dict(), "shape": (98304,), **changes})
    plan = plan_for(communicator(), asked, "default")
    assert plan.decision.source == "library"
    assert plan.launch is launch


def test_a_policy_that_nothing_can_meet_says_why() -> None:
    limits = limits_for(H200, 4)
    kernels.discover()
    asked = Problem("gemm_ar", (64, 8192, 2048), "float32", 4, layout="nk")
    with pytest.raises(InfeasibleError, match=r"tuning would find none: .*one_shot.*goes to the library") as caught:
        decide(asked, Snapshot(environment=H200, world_size=4), limits, policy="ordered")
    assert "tunedcomm tune" not in str(caught.value)
    assert why_no_kernel(asked, limits, "any") is not None
    assert why_no_kernel(UNTUNED, limits, "ordered") is None


def test_a_tuned_candidate_that_cannot_be_bound_is_no_miss() -> None:
    def bind(problem: Problem, candidate: Candidate) -> Any:
        if candidate.variant != "library":
            raise InfeasibleError("too large")
        return launch

    plan = plan_for(communicator(bind=bind), TUNED, "default")
    assert plan.decision.source == "library"
    assert plan.launch is launch


@pytest.mark.parametrize("place", ["directory", "missing/misses.jsonl", "file/misses.jsonl", "fifo", "x" * 300])
def test_a_log_that_cannot_be_written_costs_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, place: str
) -> None:
    (tmp_path / "directory").mkdir()
    (tmp_path / "file").touch()
    os.mkfifo(tmp_path / "fifo")
    monkeypatch.setenv("TUNEDCOMM_MISS_LOG", str(tmp_path / place))
    with caplog.at_level(logging.WARNING, "tunedcomm"):
        for _ in range(3):
            call(UNTUNED)
            misses.flush()
    assert len(caplog.records) == 1
    assert "set TUNEDCOMM_MISS_LOG to a file that can be written, or to 0" in caplog.text
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["directory", "fifo", "file"]


def test_a_forked_child_does_not_count_for_its_parent(log: Path) -> None:
    call(UNTUNED, 5)
    child = os.fork()
    if child == 0:
        try:
            misses.flush()
        finally:
            os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert not log.exists()
    misses.flush()
    assert read(log)[0][0].count == 5
