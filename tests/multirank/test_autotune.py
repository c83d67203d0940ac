"""Tuning in the running job, over CPU tensors: what is called untuned is tuned once, alike on every rank."""

from __future__ import annotations

import contextlib
import io
import os
import sqlite3
import time
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from cases import HOST, Ranks, logged
from planted_in_job import STATUS, plant

import tunedcomm
from tunedcomm import kernels, spec
from tunedcomm.db.store import Database
from tunedcomm.spec import Limits, Problem
from tunedcomm.tuner import in_job
from tunedcomm.tuner.in_job import compile_together

WORLD_SIZE = 2
SIZES = (1000, 3500)
GPU = Limits("cuda", 132, False, 512, 64 << 20, 4 << 20, 32 << 20, panel_bytes=1 << 30)


def call(*sizes: int) -> None:
    for numel in sizes:
        x = torch.arange(float(numel)) + dist.get_rank()
        ranks = dist.get_world_size()
        assert torch.equal(tunedcomm.all_reduce(x), torch.arange(float(numel)) * ranks + sum(range(ranks)))


def problem_of(numel: int, *, in_place: bool = False) -> Problem:
    return Problem("all_reduce", (numel,), "float32", WORLD_SIZE, mode="eager", in_place=in_place)


def source_of(numel: int, *, in_place: bool = False) -> str:
    return tunedcomm.explain(tunedcomm.get_communicator(), problem_of(numel, in_place=in_place)).source


def start_again(database: str = "tuned") -> None:
    """A database of its own for every rank, of which only rank 0's is read and written."""
    os.environ["TUNEDCOMM_DB"] = f"{os.environ['TEST_FOLDER']}/{database}{dist.get_rank()}.db"
    tunedcomm.release_communicators()
    call(64)
    dist.barrier()


def set_up(rank: int) -> None:
    in_job.PEER_TIMEOUT_S = 8.0  # beside other work a rank can be late by the usual 2 s: good variants would hang
    start_again()


RANKS = Ranks(env=HOST, setup=set_up, timeout=500, forget=False)


def test_a_block_tunes_what_is_called(rank: int) -> None:
    with logged() as messages, tunedcomm.autotune(budget_s=20.0) as tuned:
        call(*SIZES)
        assert not tuned.results
        assert [source_of(numel) for numel in SIZES] == ["heuristic"] * 2
    assert not [text for text in messages if "database" in text], "rank 0 has just made its own"
    assert {one.problem for one in tuned.results} == {problem_of(numel) for numel in SIZES}
    assert [source_of(numel) for numel in SIZES] == ["exact"] * 2
    assert all(str(one.after) in str(tuned) for one in tuned.results)
    assert tuned.num_trials >= 2 * len(SIZES)
    call(*SIZES)
    plans = tunedcomm.check_agreement().plans
    assert {str(one.after) for one in tuned.results} <= set(plans.values())


def test_rank_0_stores_it(rank: int) -> None:
    path = Path(os.environ["TUNEDCOMM_DB"])
    if rank:
        assert not path.exists(), "only rank 0 writes"
        return
    with Database.open(path, readonly=True) as database:
        (run,) = database.runs()
        assert run.command.startswith("tunedcomm.autotune")
        assert run.finished_at is not None
        assert {trial.run_id for trial in database.trials()} == {run.id}
        assert {trial.problem for trial in database.trials() if trial.status == "ok"} == set(map(problem_of, SIZES))


def test_the_next_start_has_nothing_to_do(rank: int) -> None:
    start_again()
    with tunedcomm.autotune(budget_s=20.0) as tuned:
        call(*SIZES)
        begin = time.perf_counter()
    took_s = time.perf_counter() - begin
    assert (tuned.num_trials, tuned.results) == (0, ())
    assert took_s < 1.0, "bounded by far less on an idle machine"
    assert tunedcomm.autotune([problem_of(numel) for numel in SIZES]).num_trials == 0


def test_given_problems_are_tuned_at_once(rank: int) -> None:
    tuned = tunedcomm.autotune([problem_of(3000)], budget_s=20.0)
    assert [one.problem for one in tuned.results] == [problem_of(3000)]
    assert source_of(3000) == "exact"


def test_an_error_in_the_block_tunes_nothing(rank: int) -> None:
    for failing in ((0, 1), (1,)):  # on all ranks, on one
        try:
            with tunedcomm.autotune(budget_s=20.0) as tuned:
                call(5000)
                if rank in failing:
                    raise KeyError("planted")
        except KeyError:
            assert rank in failing
        else:
            assert rank not in failing
        assert tuned.num_trials == 0
        dist.barrier()
    assert source_of(5000) != "exact"
    call(5000)


def test_bad_arguments_are_refused(rank: int) -> None:
    for budget_s in (0, -1.0, float("nan"), float("inf"), "3", True):
        with pytest.raises(tunedcomm.UnsupportedInputError, match="budget_s"):
            tunedcomm.autotune(budget_s=budget_s)  # type: ignore[arg-type]
        with pytest.raises(tunedcomm.UnsupportedInputError, match="compile_s"):
            tunedcomm.autotune(compile_s=budget_s or -1.0)  # type: ignore[arg-type]
    other = Problem("all_reduce", (64,), "float32", WORLD_SIZE + 1, mode="eager")
    with pytest.raises(tunedcomm.UnsupportedInputError):
        tunedcomm.autotune([other])


def test_a_problem_that_the_budget_did_not_reach_waits_for_a_larger_one(rank: int) -> None:
    folder = Path(os.environ["TEST_FOLDER"], f"databases{rank}")
    folder.mkdir()
    os.environ["TUNEDCOMM_DB"] = str(folder / "tuned.db")
    tunedcomm.release_communicators()
    wanted = [problem_of(numel) for numel in (1100, 2100)]
    runs = [tunedcomm.autotune(wanted, budget_s=seconds) for seconds in (1e-4, 1e-4, 20.0, 20.0)]
    assert [len(run.results) for run in runs] == [0, 0, 2, 0]
    assert [run.num_problems for run in runs] == [2, 0, 2, 0]
    assert all(source_of(problem.numel) == "exact" for problem in wanted)
    assert (folder / "unreached.jsonl").exists() == (rank == 0)


@pytest.mark.parametrize("world_size", [pytest.param(3, id="three")])
def test_binaries_get_into_the_cache_of_every_rank(rank: int, world_size: int) -> None:
    folder = Path(os.environ["TEST_FOLDER"], "cache of rank 2" if rank == 2 else "cache")
    os.environ["TRITON_CACHE_DIR"] = str(folder)
    problem = Problem("all_reduce", (1 << 16,), "bfloat16", 2)
    variant = spec.get_variant("all_reduce", "one_shot")
    requests = list(variant.compile_requests(problem, variant.space.validate(variant.default_config(problem, GPU))))
    communicator = tunedcomm.get_communicator()
    compile_together(communicator, requests if rank == 0 else (), 90, 120.0)
    assert len(list(folder.rglob("*.cubin"))) == len(set(requests)) > 0
    assert not list(folder.glob("*.tunedcomm"))
    begin = time.perf_counter()
    compile_together(communicator, requests, 90, 0.0)
    assert time.perf_counter() - begin < 5.0


@pytest.mark.parametrize("world_size", [pytest.param(3, id="three")])
def test_a_subgroup_tunes_without_the_others(rank: int, world_size: int) -> None:
    group = dist.new_group([0, 2])
    if rank == 1:
        dist.barrier()
        return
    with tunedcomm.autotune(group=group, budget_s=20.0) as tuned:
        x = torch.full((700,), rank + 1.0)
        assert torch.equal(tunedcomm.all_reduce(x, group=group), torch.full((700,), 4.0))
    dist.barrier()
    assert [one.problem.world_size for one in tuned.results] == [2]
    assert tuned.num_trials > 1


def test_bad_variants_are_recorded_and_the_group_goes_on(rank: int) -> None:
    start_again("faults")
    kernels.discover()
    plant()
    others = tunedcomm.autotune([problem_of(7 * 64)], budget_s=20.0)
    tuned = tunedcomm.autotune([problem_of(7 * 300)], budget_s=20.0, plugins=True)
    for one in (*others.results, *tuned.results):
        assert one.after.variant not in STATUS, one
    assert len(tuned.results) == 1
    call(7 * 64, 7 * 300, 4096)
    tunedcomm.check_agreement()
    dist.barrier()
    if rank == 0:
        found: dict[str, list[str]] = {}
        with Database.open(os.environ["TUNEDCOMM_DB"], readonly=True) as database:
            for trial in database.trials():
                found.setdefault(f"{trial.problem.numel} {trial.variant}", []).append(trial.status)
        assert not [name for name in found if name.startswith("448 ") and name.removeprefix("448 ") in STATUS]
        assert {variant: found[f"2100 {variant}"] for variant in STATUS} == {v: [s] for v, s in STATUS.items()}
        assert "ok" in found["2100 host_one_shot"]
    for variant in STATUS:
        del spec._variants["all_reduce", variant]


def test_at_the_end_of_a_warmup(rank: int) -> None:
    os.environ.update(TUNEDCOMM_AUTOTUNE="20")
    start_again("variable")
    adapter = tunedcomm.ServingAllReduce(device="cpu")
    with adapter.capture():
        assert adapter.custom_all_reduce(torch.ones(900)) is not None
    assert source_of(900) == "exact"
    call(1700)
    with adapter.capture():
        pass
    assert source_of(1700) != "exact", "once for a group"


def test_at_the_end_of_an_interception(rank: int) -> None:
    tunedcomm.release_communicators()
    said = io.StringIO()
    with contextlib.redirect_stderr(said), warnings.catch_warnings(), tunedcomm.intercept():
        warnings.simplefilter("error", RuntimeWarning)
        dist.all_reduce(torch.ones(1700))
        dist.all_reduce(torch.ones(1700, dtype=torch.float16))
    assert source_of(1700, in_place=True) == "exact"
    told = [line.partition(" in ")[0] for line in said.getvalue().splitlines()]
    assert told == ["tunedcomm: tuned 2 of 2 problems"] * (rank == 0)


def doubt(path: str) -> None:
    """Have every stored time be a hundredth of what it was, and without a spread, which on a busy host explains all."""
    connection = sqlite3.connect(path)
    times = ", ".join(f"latency_{p}_us = latency_p50_us / 100" for p in ("p10", "p50", "p90"))
    connection.execute(f"UPDATE trial SET {times} WHERE status = 'ok'")
    connection.commit()
    connection.close()


def test_a_check_warns_of_what_does_not_hold(rank: int) -> None:
    """On a busy machine a check may time the winner close to the library, or not in time: some check must warn."""
    os.environ["TUNEDCOMM_AUTOTUNE"] = "check"
    if rank == 0:
        doubt(os.environ["TUNEDCOMM_DB"])
    dist.barrier()
    warned = [False]
    for _ in range(10):
        tunedcomm.release_communicators()
        with logged() as messages, tunedcomm.intercept():
            dist.all_reduce(torch.ones(1700))
            assert source_of(1700, in_place=True) == "exact"
        found = [text for text in messages if "does not hold" in text]
        assert rank == 0 or not found
        warned = [bool(found)]
        dist.broadcast_object_list(warned, src=0)
        if warned[0]:
            break
    assert warned[0], "no check warned"
    if rank == 0:
        with Database.open(os.environ["TUNEDCOMM_DB"], readonly=True) as database:
            assert len(database.runs()) == 2, "a check stores nothing"


def test_a_rank_that_stays_away_is_named(rank: int) -> None:
    tunedcomm.release_communicators()
    del os.environ["TUNEDCOMM_AUTOTUNE"]
    os.environ["TUNEDCOMM_PEER_TIMEOUT_S"] = "1"
    call(64)
    if rank == 0:
        with pytest.raises(tunedcomm.TuningError, match="rank 1"):
            tunedcomm.autotune([problem_of(6000)])
    dist.barrier()
