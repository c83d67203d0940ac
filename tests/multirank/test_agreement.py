"""Ranks that see different databases dispatch alike, and say so once; `check_agreement` finds ranks that do not."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pwd
import time
from collections.abc import Iterator, Mapping
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
from tunedcomm.dispatch.plans import plan_for
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


def no_rank_has_any(rank: int) -> None:
    with given("none.db", "neither.db"):
        assert same_everywhere(rank, "library") == []


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


def every_rank_with_the_corrupt_one(rank: int) -> None:
    with given("corrupt.db"):
        (said,) = same_everywhere(rank, "library")
    assert "0: tuning database left out (user)" in said
    assert "corrupt.db is not a SQLite database" in said


def a_corrupt_one_before_a_good_one(rank: int) -> None:
    """The layers behind it still serve."""
    with given("corrupt2.db", TUNEDCOMM_DB_PATH=path("two_shot.db")):
        (said,) = same_everywhere(rank, "two_shot")
    assert "left out (user)" in said


@contextlib.contextmanager
def without_home(here: bool) -> Iterator[None]:
    """No HOME, and a user whom the system does not know, on the ranks for which `here` holds."""

    def unknown(uid: int) -> None:
        raise KeyError(uid)

    before = pwd.getpwuid
    names = {"HOME": path("home"), "XDG_DATA_HOME": None, "TUNEDCOMM_DB": None, "TUNEDCOMM_MISS_LOG": None}
    if here:
        pwd.getpwuid = unknown  # type: ignore[assignment]
        names["HOME"] = None
    try:
        with settings(names):
            yield
    finally:
        pwd.getpwuid = before


def rank_0_without_a_home(rank: int) -> None:
    with without_home(rank == 0):
        said = same_everywhere(rank, "library")
        assert len(said) == 1, said
        assert said[0].startswith("0: user ")
        assert "has no home directory" in said[0]
        assert "Set HOME, or TUNEDCOMM_DB" in said[0]
    assert not Path("~").exists()


def another_rank_without_a_home(rank: int) -> None:
    """Which that rank has no use for."""
    with without_home(rank == 1), settings({"TUNEDCOMM_DB_PATH": path("lamport.db")}):
        assert same_everywhere(rank, "lamport") == []


def rank_0_without_a_home_that_others_have(rank: int) -> None:
    """Two things to say, each said once."""
    with settings({"TUNEDCOMM_DB": path("one_shot.db")}), without_home(rank == 0):
        if rank != 0:
            os.environ["TUNEDCOMM_DB"] = path("one_shot.db")
        said = same_everywhere(rank, "library")
    assert sum("has no home directory" in text for text in said) <= 1
    assert sum(f"ranks 1, 2 have {path('one_shot.db')} as user database where rank 0 has none" in t for t in said) == 1


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


def ranks_that_borrow_differently(rank: int) -> None:
    with settings({"TUNEDCOMM_BORROW": "host-other" if rank == 2 else None}):
        with pytest.raises(
            tunedcomm.AgreementError, match=r"borrow is \(\) on rank 0 and \('host-other',\) on rank 2; set the same"
        ):
            tunedcomm.all_reduce(torch.ones(5))


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


def a_call_on_one_rank_alone(rank: int) -> None:
    communicator = get_communicator()
    if rank == 2:
        communicator.plans["in place here"] = plan_for(communicator, problem(in_place=True), "default")
    refused(rank, r"plan .*\(in place\) numerics=default is not there on rank 0 and 'library\(\)' on rank 2")


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


def settings_that_differ(rank: int) -> None:
    communicator = get_communicator()
    if rank == 1:
        communicator.settings = dataclasses.replace(communicator.settings, peer_timeout_s=7.0)
    refused(rank, r"setting peer_timeout_s is 20\.0 on rank 0 and 7\.0 on rank 1")


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
    "no rank has any": no_rank_has_any,
    "one rank with a corrupt one": one_rank_with_a_corrupt_one,
    "every rank with the corrupt one": every_rank_with_the_corrupt_one,
    "a corrupt one before a good one": a_corrupt_one_before_a_good_one,
    "rank 0 without a home": rank_0_without_a_home,
    "another rank without a home": another_rank_without_a_home,
    "rank 0 without a home that others have": rank_0_without_a_home_that_others_have,
    "borrowed rows": borrowed_rows,
    "ranks that borrow differently": ranks_that_borrow_differently,
    "in agreement": in_agreement,
    "plans that differ": plans_that_differ,
    "a call on one rank alone": a_call_on_one_rank_alone,
    "force on one rank alone": force_on_one_rank_alone,
    "snapshots that differ": snapshots_that_differ,
    "settings that differ": settings_that_differ,
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
