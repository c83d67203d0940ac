"""Counting: only missed problems, only on the first rank, and never an error."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from db_samples import H200

from tunedcomm import kernels, spec
from tunedcomm.db.misses import read
from tunedcomm.dispatch import misses
from tunedcomm.dispatch.communicator import limits_for, release_communicators
from tunedcomm.dispatch.dispatcher import decide
from tunedcomm.dispatch.launches import wrap_launch
from tunedcomm.dispatch.plans import force, plan_for
from tunedcomm.errors import InfeasibleError
from tunedcomm.kernels.common.launch import AddressLaunch
from tunedcomm.selection.snapshot import Row, Snapshot
from tunedcomm.spec import Candidate, Problem, get_variant, variants, why_no_kernel

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


def test_calls_by_address_count_too(log: Path) -> None:
    seen: list[tuple[int, ...]] = []
    by_address = AddressLaunch(lambda *addresses: seen.append(addresses))
    tuned = plan_for(communicator(bind=lambda problem, candidate: by_address), TUNED, "default")
    assert tuned.launch is by_address
    missed = plan_for(communicator(bind=lambda problem, candidate: by_address), UNTUNED, "default")
    assert isinstance(missed.launch, AddressLaunch), "the short way stays open"
    missed.launch.by_address(0, 16, 32)
    x = SimpleNamespace(data_ptr=lambda: 48)
    missed.launch((x,), (x,), 1)
    assert seen == [(0, 16, 32), (1, 48, 48)]
    misses.flush()
    assert [m.count for m in read(log)[0]] == [2]


def test_a_plan_that_was_never_called_is_no_miss(log: Path) -> None:
    plan_for(communicator(), UNTUNED, "default")
    misses.flush()
    assert not log.exists()


def test_only_the_first_rank_counts(log: Path) -> None:
    assert plan_for(communicator(rank=1), UNTUNED, "default").launch is launch
    misses.flush()
    assert not log.exists()


@pytest.mark.parametrize(
    "changes",
    [{"reduction": "max"}, {"dtype": "int64"}, {"dtype": "float64"}],
    ids=str,
)
def test_what_no_kernel_can_run_is_no_miss(changes: dict[str, str]) -> None:
    asked = Problem(**{**UNTUNED.to_dict(), "shape": (98304,), **changes})
    plan = plan_for(communicator(), asked, "default")
    assert plan.decision.source == "library"
    assert plan.launch is launch


def test_a_policy_that_nothing_can_meet_says_why() -> None:
    limits = limits_for(H200, 4)
    kernels.discover()
    for changes in ({"reduction": "max"}, {"dtype": "int64"}):
        asked = Problem(**{**UNTUNED.to_dict(), "shape": (98304,), **changes})
        with pytest.raises(InfeasibleError, match=r"tuning would find none: .*one_shot.*goes to the library") as caught:
            decide(asked, Snapshot(environment=H200, world_size=4), limits, policy="ordered")
        assert "tunedcomm tune" not in str(caught.value)
        assert why_no_kernel(asked, limits, "any") is not None
    assert why_no_kernel(UNTUNED, limits, "ordered") is None
    untuned = decide(UNTUNED, Snapshot(environment=H200, world_size=4), limits, policy="ordered")
    assert untuned.source == "heuristic"
    assert not untuned.is_answered


def test_what_only_runs_by_name_is_no_reason_to_tune(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels.discover()
    for variant in list(variants("all_reduce").values()):
        monkeypatch.setitem(spec._variants, ("all_reduce", variant.name), replace(variant, bounded=False))
    assert why_no_kernel(UNTUNED, limits_for(H200, 4), "any") is not None
    assert plan_for(communicator(), UNTUNED, "default").launch is launch


def test_what_was_forced_is_no_miss() -> None:
    assert plan_for(communicator(mode="off"), UNTUNED, "default").launch is launch
    with force("all_reduce", "library"):
        assert plan_for(communicator(), UNTUNED, "default").launch is launch


def test_a_tuned_candidate_that_cannot_be_bound_is_no_miss() -> None:
    def bind(problem: Problem, candidate: Candidate) -> Any:
        if candidate.variant != "library":
            raise InfeasibleError("too large")
        return launch

    plan = plan_for(communicator(bind=bind), TUNED, "default")
    assert plan.decision.source == "library"
    assert plan.launch is launch


def test_the_log_can_be_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TUNEDCOMM_MISS_LOG", "0")
    assert plan_for(communicator(), UNTUNED, "default").launch is launch


def test_releasing_communicators_writes(log: Path) -> None:
    call(UNTUNED)
    release_communicators()
    assert read(log)[0][0].count == 1


def test_a_long_run_writes_a_problem_when_its_count_has_doubled(log: Path) -> None:
    plan = plan_for(communicator(), UNTUNED, "default")
    for _ in range(1000):
        plan.launch((), (), 0)
        misses.flush(everything=False)
    assert log.read_bytes().count(b'{"count"') == 10
    assert read(log)[0][0].count == 512
    misses.flush()
    assert read(log)[0][0].count == 1000


def test_one_process_counts_so_many_problems_and_no_more(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(misses, "MAX_PROBLEMS", 3)
    made = [Problem("all_reduce", (8 * (n + 1),), "float32", 4) for n in range(5)]
    plans = [plan_for(communicator(), problem, "default") for problem in made]
    assert [plan.launch is launch for plan in plans] == [False, False, False, True, True]
    assert plan_for(communicator(), made[0], "default").launch is not launch


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


def test_a_read_only_directory_costs_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object) -> int:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr("tunedcomm.db.misses.os.open", refuse)
    for _ in range(2):
        call(UNTUNED)
        misses.flush()
    assert [r.levelname for r in caplog.records if "Read-only" in r.getMessage()] == ["WARNING"]


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


def test_the_end_of_a_process_writes(log: Path) -> None:
    code = (
        "import test_misses as t\n"
        "t.call(t.UNTUNED, 3)\n"
        "import threading\n"
        "assert [x.daemon for x in threading.enumerate() if x.name == 'tunedcomm-misses'] == [True]\n"
    )
    path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, "PYTHONPATH": path}, timeout=60)
    assert read(log)[0][0].count == 3
