"""Ranks that see different databases dispatch alike, and say so once; `check_agreement` finds ranks that do not."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pwd
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cases import Launched, Ranks, inputs_of, logged, replaced, same_bits, settings, spy_on_launches
from test_dispatch import trial

import tunedcomm
from tunedcomm import kernels
from tunedcomm.db.store import Database
from tunedcomm.dispatch import communicator as communicator_module
from tunedcomm.dispatch.communicator import Communicator
from tunedcomm.dispatch.groups import get_communicator
from tunedcomm.dispatch.plans import plan_for
from tunedcomm.hardware import detect
from tunedcomm.spec import Candidate, Problem, get_variant
from tunedcomm.symm.layout import LaneLayout, limits_for

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


def prepare(folder: Path) -> dict[str, str]:
    for variant in ("lamport", "one_shot", "two_shot"):
        write(folder / f"{variant}.db", variant)
    write(folder / "lent.db", "one_shot", environment=OTHER_GPU)
    for name in ("corrupt", "corrupt0", "corrupt1", "corrupt2"):  # a file is warned of once
        (folder / f"{name}.db").write_bytes(b"no database at all " * 100)
    return {}


RANKS = Ranks(WORLD_SIZE, prepare=prepare, setup=lambda rank: spy_on_launches(launched))


def path(name: str) -> str:
    return str(Path(os.environ["TEST_FOLDER"], name))


def everyones(value: Any) -> list[Any]:
    gathered: list[Any] = [None] * WORLD_SIZE
    dist.all_gather_object(gathered, value)
    return gathered


def same_everywhere(rank: int, variant: str) -> list[str]:
    """Call from two groups; every rank launches the variant and has the sum. Returns all that any rank logged."""
    ran = []
    x, expected = inputs_of(rank, WORLD_SIZE, NUMEL)
    with logged() as texts:
        for group in (None, dist.new_group()):
            out = tunedcomm.all_reduce(x, group=group)
            ran.append(launched[-1].variant)  # before it come the launches of its check, if the row is borrowed
            if variant == "library":
                torch.testing.assert_close(out, expected)
            else:
                assert same_bits(out, expected)
    assert everyones(ran) == [[variant] * 2] * WORLD_SIZE
    tunedcomm.check_agreement()
    return [f"{by}: {text}" for by, said in enumerate(everyones(texts)) for text in said]


def given(*names: str, **more: str) -> contextlib.AbstractContextManager[None]:
    """Inside the block each rank has another user database."""
    own = names[int(os.environ["RANK"]) % len(names)]
    return settings({"TUNEDCOMM_DB": path(own), **more})


# Different databases. Each rank's user database by name, the variant that all launch, and what rank 0 alone warns of.
DATABASES: dict[str, tuple[tuple[str, ...], str, list[str]]] = {
    "each rank another": (
        ("lamport", "one_shot", "two_shot"),
        "lamport",
        ["rank 1 has .*one_shot.* as user database where rank 0 has .*lamport"],
    ),
    "two kinds": (("two_shot", "lamport"), "two_shot", ["rank 1 has .*lamport"]),
    "rank 0 without": (("never-made", "lamport", "lamport"), "library", ["ranks 1, 2 have .* rank 0 has none"]),
    "rank 2 without": (("lamport", "lamport", "never-made"), "lamport", ["rank 2 has none .* rank 0 has .*lamport"]),
    "no rank has any": (("none", "neither"), "library", []),
    "rank 0 with a corrupt one": (
        ("corrupt0", "lamport", "lamport"),
        "library",
        ["left out .*corrupt", "see different"],
    ),
    "rank 1 with a corrupt one": (("lamport", "corrupt1", "lamport"), "lamport", ["see different .*corrupt"]),
    "a corrupt one on all": (("corrupt",), "library", ["left out .*corrupt.db is not a SQLite database"]),
}


@pytest.mark.parametrize("name", DATABASES)
def test_databases(rank: int, name: str) -> None:
    databases, variant, warnings = DATABASES[name]
    with given(*(f"{database}.db" for database in databases)):
        said = same_everywhere(rank, variant)
    assert not Path(path("never-made.db")).exists(), "dispatch makes no database"
    assert len(said) == len(warnings), said
    assert all(re.search(f"^0: .*{pattern}", text) for text, pattern in zip(said, warnings, strict=True)), said


def test_layers_behind_a_corrupt_database_still_serve(rank: int) -> None:
    with given("corrupt2.db", TUNEDCOMM_DB_PATH=path("two_shot.db")):
        (said,) = same_everywhere(rank, "two_shot")
    assert "left out (user)" in said


@contextlib.contextmanager
def without_home(here: bool) -> Iterator[None]:
    """No HOME, and a user whom the system does not know, on the ranks for which `here` holds."""

    def unknown(uid: int) -> None:
        raise KeyError(uid)

    names = {"HOME": path("home"), "XDG_DATA_HOME": None, "TUNEDCOMM_DB": None, "TUNEDCOMM_MISS_LOG": None}
    with replaced(pwd, "getpwuid", unknown, here=here), settings({**names, **({"HOME": None} if here else {})}):
        yield


def test_rank_0_without_a_home(rank: int) -> None:
    with without_home(rank == 0):
        said = same_everywhere(rank, "library")
        (text,) = said
        assert re.search("^0: .*has no home directory.*Set HOME", text)
    assert not Path("~").exists()


# Borrowed rows


def test_borrowed_rows(rank: int) -> None:
    with settings({"TUNEDCOMM_DB": path("lent.db"), "TUNEDCOMM_BORROW": "host-oth*"}):
        (said,) = same_everywhere(rank, "one_shot")
        assert "0: 1 rows are borrowed from host-other" in said
        assert tunedcomm.explain(get_communicator(), problem()).source == "borrowed"
    with settings({"TUNEDCOMM_DB": path("lent.db")}):
        assert same_everywhere(rank, "library") == []


def test_ranks_that_borrow_differently(rank: int) -> None:
    with settings({"TUNEDCOMM_BORROW": "host-other" if rank == 2 else None}):
        with pytest.raises(tunedcomm.AgreementError, match=r"TUNEDCOMM_BORROW\) is .* on rank 0 and .* on rank 2"):
            tunedcomm.all_reduce(torch.ones(5))


# check_agreement


def test_in_agreement(rank: int) -> None:
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


# Makes one rank differ from rank 0, and gives what check_agreement says of it.
def a_plan(rank: int, communicator: Communicator) -> str:
    tunedcomm.all_reduce(torch.ones(NUMEL))
    if rank == 1:
        ((key, plan),) = communicator.plans.items()
        other = Candidate.of("all_reduce", "lamport", {"num_blocks": 1})
        communicator.plans[key] = dataclasses.replace(plan, candidate=other)
    return r"plan .* is 'library\(\)' on rank 0 and 'lamport\(num_blocks=1\)' on rank 1"


def a_call(rank: int, communicator: Communicator) -> str:
    if rank == 2:
        communicator.plans["in place here"] = plan_for(communicator, problem(in_place=True), "default")
    return r"plan .*\(in place\) .* is not there on rank 0 and 'library\(\)' on rank 2"


def a_snapshot(rank: int, communicator: Communicator) -> str:
    if rank == 2:
        communicator.snapshot = dataclasses.replace(communicator.snapshot, notes=("planted",))
    return r"snapshot digest is '\w{64}' on rank 0 and '\w{64}' on rank 2"


def a_setting(rank: int, communicator: Communicator) -> str:
    if rank == 1:
        communicator.settings = dataclasses.replace(communicator.settings, peer_timeout_s=7.0)
    return r"setting peer_timeout_s is 20\.0 on rank 0 and 7\.0 on rank 1"


@pytest.mark.parametrize("what", ["a_plan", "a_call", "a_snapshot", "a_setting"])
def test_what_differs_is_named(rank: int, what: str) -> None:
    said = globals()[what](rank, get_communicator())
    with pytest.raises(tunedcomm.AgreementError, match=said) as caught:
        tunedcomm.check_agreement()
    assert len(set(everyones(str(caught.value)))) == 1, "the same on every rank"
    tunedcomm.release_communicators()
    tunedcomm.check_agreement()


def test_force_on_one_rank_alone(rank: int) -> None:
    get_communicator()
    with tunedcomm.force("all_reduce", "one_shot") if rank == 1 else contextlib.nullcontext():
        with pytest.raises(tunedcomm.AgreementError, match="is not there on rank 0 and 'one_shot' on rank 1"):
            tunedcomm.check_agreement()


def test_only_rank_0_reads(rank: int) -> None:
    calls: list[Mapping[str, Any]] = []
    real = communicator_module.kept_snapshot

    def spy(*arguments: Any, **options: Any) -> Any:
        calls.append(options)
        return real(*arguments, **options)

    tunedcomm.release_communicators()
    with replaced(communicator_module, "kept_snapshot", spy):
        get_communicator()
    assert len(calls) == (rank == 0)
