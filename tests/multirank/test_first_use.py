"""A borrowed candidate is checked before its first call here: once, by all ranks together, and kept by rank 0 alone."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cases import HOST, Ranks, logged, replaced, settings
from planted_in_job import plant
from test_dispatch import trial
from typer.testing import CliRunner

import tunedcomm
from tunedcomm import kernels
from tunedcomm.cli import main
from tunedcomm.db.store import Database
from tunedcomm.dispatch import first_use
from tunedcomm.dispatch.groups import get_communicator
from tunedcomm.hardware import detect, this_process
from tunedcomm.ops import call as call_module
from tunedcomm.selection.select import Decision
from tunedcomm.spec import Problem, register_variant, variants

WORLD_SIZE = 2
SIZES = (1000, 3500)
OTHER_GPU = replace(detect(), gpu="host-other")


def set_up(rank: int) -> None:
    kernels.discover()
    plant()


RANKS = Ranks(env=HOST, setup=set_up, timeout=500, forget=False)


def problem_of(numel: int) -> Problem:
    return Problem("all_reduce", (numel,), "float32", WORLD_SIZE, mode="eager")


def folder_of(name: str, rank: int | None = None) -> Path:
    """A folder for each rank: what rank 0 does not pass on, the others do not have."""
    return Path(os.environ["TEST_FOLDER"], name, str(dist.get_rank() if rank is None else rank))


@contextlib.contextmanager
def borrowing(name: str, *variants: str) -> Iterator[list[Problem]]:
    """Inside the block rows of other hardware serve, the first variant's the fastest; yields what is checked.

    Each rank has a database and a file of checks of its own.
    """
    database = folder_of(name) / "tuned.db"
    if not database.exists():
        database.parent.mkdir(parents=True)
        with Database.open(database, create=True) as made:
            for place, variant in enumerate(variants):
                config = {"chunk_kib": 16, "spins": 1, "threads": 1} if variant == "host_one_shot" else {"only": 1}
                made.record(
                    trial(variant, n, 5.0 + place, problem=problem_of(n), config=config, environment=OTHER_GPU)
                    for n in SIZES
                )
    found: list[Problem] = []
    make = first_use._outcome

    def outcome(communicator: Any, problem: Problem, *args: Any, **more: Any) -> Any:
        found.append(problem)
        return make(communicator, problem, *args, **more)

    more = {"TUNEDCOMM_DB": str(database), "TUNEDCOMM_BORROW": "host-oth*", "TUNEDCOMM_PEER_TIMEOUT_S": "4"}
    with settings(more), replaced(first_use, "_outcome", outcome):
        yield found


def call(numel: int, **options: Any) -> None:
    x = torch.arange(float(numel)) + dist.get_rank()
    assert torch.equal(tunedcomm.all_reduce(x, **options), torch.arange(float(numel)) * 2 + 1)


def decision(numel: int, **options: Any) -> Decision:
    found = tunedcomm.explain(get_communicator(), problem_of(numel), **options)
    tunedcomm.check_agreement()
    return found


def kept(name: str, rank: int = 0) -> list[tuple[str, int, str]]:
    """Variant, elements and status of each line of a rank's file."""
    dist.barrier()
    path = folder_of(name, rank) / "checks.jsonl"
    lines = [json.loads(line) for line in path.read_bytes().splitlines() if line] if path.exists() else []
    return [(line["candidate"]["variant"], int(line["problem"]["shape"]), line["status"]) for line in lines]


def test_each_problem_is_checked_once(rank: int) -> None:
    with borrowing("good", "host_one_shot") as checks:
        assert "first call on this machine checks it" in decision(1000).why
        for numel in (*SIZES, *SIZES):
            call(numel)
        assert checks == list(map(problem_of, SIZES))
        assert decision(1000).source == "borrowed"
        assert "first call" not in decision(1000).why
    statuses = [status for *_, status in kept("good")]
    assert statuses[::2] == ["checking"] * 2
    assert set(statuses[1::2]) <= {"passed", "slower"}
    assert not kept("good", 1), "rank 0 alone writes"
    with borrowing("good", "host_one_shot") as checks:
        call(1000)
        call(2000)
        assert checks == [problem_of(2000)], "what was checked before this start is not checked again"


def test_the_library_stays_where_it_is_faster(rank: int) -> None:
    disturbed, faster = [9.0, 5.0], [4.0, 5.0]
    times = iter([*3 * disturbed, *disturbed, *faster])
    with replaced(first_use, "_median_us", lambda *args: next(times) + rank), borrowing("slower", "host_one_shot"):
        call(1000)
        assert (decision(1000).source, decision(1000).candidate.variant) != ("borrowed", "host_one_shot")
        call(3500)
        assert decision(3500).candidate.variant == "host_one_shot"
    assert kept("slower")[1::2] == [("host_one_shot", 1000, "slower"), ("host_one_shot", 3500, "passed")]


@pytest.mark.parametrize("name", ["not_by_7", "stale"])
def test_wrong_results_are_found_before_the_first_call(rank: int, name: str) -> None:
    with logged() as said, borrowing(name, name, "host_one_shot") as checks:
        call(1000)
        assert decision(1000).candidate.variant != name
        call(1000, numerics="ordered")
        assert decision(1000, policy="ordered").candidate.variant == "host_one_shot", "the next one, checked too"
        call(3500)
        assert checks == [problem_of(1000)] * 2
    assert len([text for text in said if "is not used on this machine" in text]) == (rank == 0)
    assert (name, 1000, "failed") in kept(name)
    with logged() as said, borrowing(name) as checks:
        call(1000)
        assert decision(1000).candidate.variant != name
        assert not checks
        assert not [text for text in said if "is not used" in text]


@pytest.mark.parametrize("name", ["raises", "hangs"])
def test_what_ends_the_group_does_so_once(rank: int, name: str) -> None:
    with borrowing(name, name):
        with pytest.raises((ValueError, tunedcomm.PeerTimeoutError, tunedcomm.GroupAbortedError)):
            call(1000)
        dist.barrier()
    with borrowing(name) as checks:
        for numel in SIZES:
            call(numel)
        assert not checks
        assert decision(1000).candidate.variant != name


def test_a_check_that_ended_its_process_is_not_made_again(rank: int) -> None:
    def begun(process: list[Any]) -> None:
        """A file of a check that has no outcome, on every rank."""
        path = folder_of("ended") / "checks.jsonl"
        data = json.loads((folder_of("good", 0) / "checks.jsonl").read_bytes().split(b"\n")[1])
        path.write_text(json.dumps({**data, "process": process}) + "\n")

    kernel, pid, start = this_process()
    with borrowing("ended", "host_one_shot"):
        begun([kernel, pid, start])
    with borrowing("ended") as checks:
        call(1000)
        assert len(checks) == 1, "a check that a living process makes now says nothing yet"
    begun([kernel, pid, (start or 0) + 1])
    with borrowing("ended") as checks:
        call(1000)
        assert not checks
        assert "ended before its check did" in get_communicator().snapshot.checks[0].why


def test_a_rank_without_memory(rank: int) -> None:
    def make(*args: Any) -> Any:
        raise torch.OutOfMemoryError("planted")

    with borrowing("memory", "host_one_shot"):
        with replaced(first_use, "_call", make, here=rank == 1):
            call(1000)
            assert "rank 1: no memory" in get_communicator().snapshot.checks[0].why
        assert not kept("memory"), "another start may have it"
    with borrowing("memory") as checks:
        call(1000)
        assert len(checks) == 1


def test_whoever_calls_first(rank: int) -> None:
    """Interception and serving bind plans before they launch; captures bind nothing."""
    with borrowing("callers", "host_one_shot") as checks:
        with replaced(call_module, "is_capturing", lambda: True):
            call(1000)
        decision(1000)
        assert not checks
        with tunedcomm.intercept():
            x = torch.ones(1000)
            dist.all_reduce(x)
            assert torch.equal(x, torch.full((1000,), 2.0))
        assert [asked.shape for asked in checks] == [(1000,)]
        serving = tunedcomm.ServingAllReduce()
        serving.should_use(torch.ones(3500))
        assert [asked.shape for asked in checks] == [(1000,), (3500,)]
        for numel in SIZES:
            call(numel)
        tunedcomm.check_agreement()


def test_lowered_products_are_no_reference(rank: int) -> None:
    gemm = Problem("gemm_ar", (16, 32, 64), "float32", WORLD_SIZE, mode="eager")
    candidate = first_use.Candidate.of("gemm_ar", "two_shot", {})
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("high")
        found = first_use._outcome(get_communicator(), gemm, candidate, lambda: None, in_full=True)
    finally:
        torch.set_float32_matmul_precision(before)
    assert found.status == "skipped"


def test_checks_made_ahead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kernels.discover()
    database, config = tmp_path / "tuned.db", {"chunk_kib": 16, "spins": 1, "threads": 1}
    with Database.open(database, create=True) as made:
        made.record(trial("host_one_shot", n, 5.0, config=config, environment=OTHER_GPU) for n in SIZES)
    for name, value in {**HOST, "TUNEDCOMM_DB": str(database), "TUNEDCOMM_BORROW": "host-oth*"}.items():
        monkeypatch.setenv(name, value)
    command = ["db", "verify", "--borrowed", "--json"]
    code = f"from tunedcomm.cli import main; main.run({command})"
    for _ in range(2):
        shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=200, check=False)
        assert shown.returncode == 0, shown.stderr
        checks = json.loads(shown.stdout)["checks"]
        assert [check["problem"]["shape"] for check in checks] == [[n] for n in SIZES]
        assert {check["status"] for check in checks} <= {"passed", "slower"}
        lines = (tmp_path / "checks.jsonl").read_bytes().splitlines()
        assert len(list(filter(None, lines))) == 2 * len(SIZES), "the second start makes none"
    assert CliRunner().invoke(main.app, [*command, "--no-store"]).exit_code == 2


@pytest.mark.parametrize("in_buffers", [False, True])
def test_kernels_of_experts_are_checked_where_nothing_was_measured(rank: int, in_buffers: bool) -> None:
    """As on GPUs, where they run by rule of thumb; one that loses its check gives way to the library."""
    name = "tokens_direct" if in_buffers else "tokens_push"
    before = variants("ep_dispatch")
    x, ids = torch.ones(6, 64), torch.tensor([[0, 3]] * 6)
    found: list[str] = []

    def outcome(*args: Any, **more: Any) -> Any:
        made = decide(*args, **more)
        found.append(made.status)
        return made if len(found) == 1 else made._replace(status="slower", why="so the test says")

    decide = first_use._outcome
    try:
        for each in before.values():
            runs = each.name == name
            register_variant(replace(each, default_beats_library=lambda problem, limits, runs=runs: runs))
        with settings({"TUNEDCOMM_DB": str(folder_of(name) / "tuned.db")}), replaced(first_use, "_outcome", outcome):
            buffers = tunedcomm.ep_buffers(6, 64, 2, torch.float32) if in_buffers else None
            for tokens, expected in ((6, name), (5, "library")):
                given = {"num_experts": 4, "layout": "tokens", "buffers": buffers}
                with torch.no_grad():
                    sent = tunedcomm.ep_dispatch(x[:tokens], ids[:tokens], **given)  # type: ignore[call-overload]
                assert torch.equal(sent.tokens, torch.ones(WORLD_SIZE * tokens, 64))
                plans = get_communicator().plans.values()
                (plan,) = [p for p in plans if p.problem.op == "ep_dispatch" and p.problem.shape[0] == tokens]
                assert plan.candidate.variant == expected
        assert found == ["passed", "passed"]
    finally:
        for each in before.values():
            register_variant(each)
