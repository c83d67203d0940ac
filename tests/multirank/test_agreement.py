"""Ranks that see different databases dispatch alike, and say so once; `check_agreement` finds ranks that do not."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cases import Launched, inputs_of, logged, report, run_cases, same_bits, settings, spy_on_launches
from dispatch_table import trial
from harness import run_ranks

import tunedcomm
from tunedcomm import kernels
from tunedcomm.db.store import Database
from tunedcomm.dispatch import communicator as communicator_module
from tunedcomm.dispatch.communicator import get_communicator, limits_for
from tunedcomm.hardware import detect
from tunedcomm.spec import Candidate, Problem, get_variant
from tunedcomm.symm.layout import LaneLayout

WORLD_SIZE = 3
NUMEL = 600
OTHER_GPU = dataclasses.replace(detect(), gpu="host-other")
launched: list[Launched] = []


def problem(numel: int = NUMEL, **changes: Any) -> Problem:
    return dataclasses.replace(Problem("all_reduce", (numel,), "float32", WORLD_SIZE, mode="eager"), **changes)


def write(path: Path, variant: str, **changes: Any) -> None:
    """A database whose fastest variant is the one named."""
    kernels.discover()
    limits = limits_for(detect(), WORLD_SIZE, layout=LaneLayout.for_messages(1 << 20))
    config = get_variant("all_reduce", variant).default(problem(), limits)
    with Database.open(path, create=True) as database:
        database.record([trial(variant, NUMEL, 5.0, problem=problem(), config=config, **changes)])


def path(name: str) -> str:
    return str(Path(os.environ["TEST_FOLDER"], name))


def everyones(value: Any) -> list[Any]:
    gathered: list[Any] = [None] * WORLD_SIZE
    dist.all_gather_object(gathered, value)
    return gathered


def same_everywhere(rank: int, variant: str) -> list[str]:
    """Call from two groups; every rank launches the variant and has the sum. Returns all that any rank logged."""
    started = time.monotonic()
    launched.clear()
    x, expected = inputs_of(rank, WORLD_SIZE, NUMEL)
    with logged() as texts:
        for group in (None, dist.new_group()):
            out = tunedcomm.all_reduce(x, group=group)
            if variant == "library":
                torch.testing.assert_close(out, expected)
            else:
                assert same_bits(out, expected)
    assert everyones([entry.variant for entry in launched]) == [[variant] * 2] * WORLD_SIZE
    tunedcomm.check_agreement()
    assert time.monotonic() - started < 60
    return [f"{by}: {text}" for by, said in enumerate(everyones(texts)) for text in said]


def given(*names: str, **more: str) -> contextlib.AbstractContextManager[None]:
    """Inside the block each rank has another user database."""
    own = names[int(os.environ["RANK"]) % len(names)]
    return settings({"TUNEDCOMM_DB": path(own), **more})


# Different databases


def each_rank_another(rank: int) -> None:
    for names, variant in ((("lamport", "one_shot", "two_shot"), "lamport"), (("two_shot", "lamport"), "two_shot")):
        with given(*(f"{name}.db" for name in names)):
            (said,) = same_everywhere(rank, variant)
        assert said.startswith("0: the ranks of a group see different tuning databases: rank 1 has ")
        assert f"{path(names[1])}.db as user database where rank 0 has {path(names[0])}.db" in said
        assert "All of them dispatch from what rank 0 has" in said


def one_rank_without(rank: int) -> None:
    for without, variant in ((0, "library"), (2, "lamport")):
        names = ["lamport.db"] * WORLD_SIZE
        names[without] = "never-made.db"
        with given(*names):
            (said,) = same_everywhere(rank, variant)
        there = f"rank 2 has none as user database where rank 0 has {path('lamport.db')}"
        absent = f"ranks 1, 2 have {path('lamport.db')} as user database where rank 0 has none"
        assert (absent if without == 0 else there) in said


def one_rank_with_a_corrupt_one(rank: int) -> None:
    for corrupt, variant in ((0, "library"), (1, "lamport")):
        names = ["lamport.db"] * WORLD_SIZE
        names[corrupt] = f"corrupt{corrupt}.db"
        with given(*names):
            said = same_everywhere(rank, variant)
        assert all(text.startswith("0: ") for text in said)
        left_out = [text for text in said if "tuning database left out (user)" in text]
        different = [text for text in said if "see different tuning databases" in text]
        assert (len(left_out), len(different), len(said)) == ((1, 1, 2) if corrupt == 0 else (0, 1, 1)), said
        assert f"corrupt{corrupt}.db" in different[0]


# Borrowed rows


def borrowed_rows(rank: int) -> None:
    with settings({"TUNEDCOMM_DB": path("lent.db"), "TUNEDCOMM_BORROW": "host-oth*"}):
        (said,) = same_everywhere(rank, "one_shot")
        assert said == (
            "0: 1 rows are borrowed from host-other (host backend); they serve where nothing was measured on this "
            "hardware. `tunedcomm tune` measures here"
        )
        decision = tunedcomm.explain(get_communicator(), problem())
        assert decision.source == "borrowed"
        assert decision.why.startswith("borrowed from host-other")
    with settings({"TUNEDCOMM_DB": path("lent.db")}):
        assert same_everywhere(rank, "library") == []


# check_agreement


def in_agreement(rank: int) -> None:
    with settings({"TUNEDCOMM_DB": path("lamport.db")}):
        empty = tunedcomm.check_agreement()
        assert empty.plans == {}
        x, _ = inputs_of(rank, WORLD_SIZE, NUMEL)
        with tunedcomm.force("all_reduce", "one_shot"):
            assert tunedcomm.check_agreement().forced == {"all_reduce": "one_shot"}
        tunedcomm.all_reduce(x)
        tunedcomm.all_reduce(x, numerics="ordered")
        found = tunedcomm.check_agreement()
        (first, *_) = everyones(found)
        assert found == first
        assert found.world_size == WORLD_SIZE
        assert found.snapshot == get_communicator().snapshot.digest
        assert found.settings["mode"] == "cached"
        assert set(found.plans) == {f"{problem()} numerics={policy}" for policy in ("default", "ordered")}
        assert all(plan.startswith("lamport(") for plan in found.plans.values())
        pair = dist.new_group([1, 2])
        if rank > 0:
            assert tunedcomm.check_agreement(pair).world_size == 2


def refused(rank: int, text: str) -> None:
    started = time.monotonic()
    with pytest.raises(tunedcomm.AgreementError, match=text) as caught:
        tunedcomm.check_agreement()
    assert len(set(everyones(str(caught.value)))) == 1, "the same on every rank"
    assert "tunedcomm.release_communicators() on all of them" in str(caught.value)
    assert time.monotonic() - started < 40
    tunedcomm.release_communicators()
    tunedcomm.check_agreement()


def plans_that_differ(rank: int) -> None:
    tunedcomm.all_reduce(torch.ones(NUMEL))
    plans = get_communicator().plans
    if rank == 1:
        ((key, plan),) = plans.items()
        other = dataclasses.replace(plan.decision, candidate=Candidate.of("all_reduce", "lamport", {"num_blocks": 1}))
        plans[key] = dataclasses.replace(plan, decision=other)
    refused(
        rank, rf"plan {problem()} numerics=default is 'library\(\)' on rank 0 and 'lamport\(num_blocks=1\)' on rank 1"
    )


def force_on_one_rank_alone(rank: int) -> None:
    get_communicator()
    with tunedcomm.force("all_reduce", "one_shot") if rank == 1 else contextlib.nullcontext():
        with pytest.raises(
            tunedcomm.AgreementError,
            match=r"tunedcomm.force all_reduce is not there on rank 0 and 'one_shot' on rank 1; make the same calls",
        ):
            tunedcomm.check_agreement()


def snapshots_that_differ(rank: int) -> None:
    communicator = get_communicator()
    if rank == 2:
        communicator.snapshot = dataclasses.replace(communicator.snapshot, notes=("planted",))
    refused(rank, r"snapshot digest is '\w{64}' on rank 0 and '\w{64}' on rank 2")


def only_rank_0_reads(rank: int) -> None:
    real = communicator_module.load_snapshot
    calls: list[Mapping[str, Any]] = []

    def spy(*arguments: Any, **options: Any) -> Any:
        calls.append(options)
        return real(*arguments, **options)

    communicator_module.load_snapshot = spy
    try:
        tunedcomm.release_communicators()
        get_communicator()
    finally:
        communicator_module.load_snapshot = real
    assert len(calls) == (rank == 0)


CASES = {
    "each rank another": each_rank_another,
    "one rank without": one_rank_without,
    "one rank with a corrupt one": one_rank_with_a_corrupt_one,
    "borrowed rows": borrowed_rows,
    "in agreement": in_agreement,
    "plans that differ": plans_that_differ,
    "force on one rank alone": force_on_one_rank_alone,
    "snapshots that differ": snapshots_that_differ,
    "only rank 0 reads": only_rank_0_reads,
}


def body(rank: int, world_size: int) -> dict[str, str]:
    spy_on_launches(launched)
    return run_cases(CASES, rank)


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    folder = tmp_path_factory.mktemp("agreement")
    for variant in ("lamport", "one_shot", "two_shot"):
        write(folder / f"{variant}.db", variant)
    write(folder / "lent.db", "one_shot", environment=OTHER_GPU)
    for name in ("corrupt", "corrupt0", "corrupt1", "corrupt2"):
        (folder / f"{name}.db").write_bytes(b"no database at all " * 100)
    return run_ranks(WORLD_SIZE, body, env={"TEST_FOLDER": str(folder)}, timeout=120)


@pytest.mark.parametrize("name", CASES)
def test_agreement(outcomes: list[dict[str, str]], name: str) -> None:
    report(outcomes, name)
