"""Groups: what their ranks must agree on, symmetric memory, and letting go."""

from __future__ import annotations

import dataclasses
import itertools
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cases import Launched, inputs_of, logged, replaced, report, run_cases, same_bits, settings, spy_on_launches
from harness import run_ranks
from quick import some

import tunedcomm
from tunedcomm import kernels
from tunedcomm.db.records import Trial
from tunedcomm.db.store import Database
from tunedcomm.dispatch import communicator as communicator_module
from tunedcomm.dispatch.communicator import get_communicator, live_communicators
from tunedcomm.kernels.common import sync
from tunedcomm.spec import Problem, get_variant
from tunedcomm.symm import buffer

KERNELS = ("lamport", "one_shot", "two_shot", "two_shot_lamport")
launched: list[Launched] = []


def names() -> list[str]:
    """Variants launched since the last question."""
    found = [entry.variant for entry in launched]
    launched.clear()
    return found


def works(rank: int) -> None:
    tunedcomm.release_communicators()
    x = torch.full((5,), rank + 1.0)
    assert torch.equal(tunedcomm.all_reduce(x), torch.full((5,), 3.0))
    launched.clear()


def refused_everywhere(rank: int, error: type[Exception], text: str) -> None:
    """Every rank hears of it in the same call: nobody is left waiting."""
    started = time.monotonic()
    with pytest.raises(error, match=text):
        tunedcomm.all_reduce(torch.ones(5))
    assert time.monotonic() - started < 40
    assert live_communicators() == []


# What must be the same on every rank.


def settings_that_differ(rank: int) -> None:
    different: list[tuple[str, tuple[str | None, str | None], str]] = [
        ("TUNEDCOMM_MODE", ("off", None), "mode is 'off' on rank 0 and 'cached' on rank 1"),
        ("TUNEDCOMM_FORCE_ALL_REDUCE", (None, "lamport"), r"forced is {} on rank 0 and {'all_reduce': 'lamport'}"),
        ("TUNEDCOMM_PEER_TIMEOUT_S", ("20", "30"), r"peer_timeout_s is 20\.0 on rank 0 and 30\.0 on rank 1"),
        ("TUNEDCOMM_WORKSPACE_MIB", ("2", "1"), "workspace_bytes is 2097152 on rank 0 and 1048576 on rank 1"),
    ]
    for name, values, text in different:
        with settings({name: values[rank]}):
            wanted = rf"the ranks of the group differ in settings: {text}.*set the same TUNEDCOMM_\* variables"
            refused_everywhere(rank, tunedcomm.AgreementError, wanted)
    works(rank)


def a_setting_that_one_rank_cannot_read(rank: int) -> None:
    wrong = {"TUNEDCOMM_MODE": "fast", "TUNEDCOMM_PEER_TIMEOUT_S": "soon", "TUNEDCOMM_WORKSPACE_MIB": "0"}
    for (name, value), culprit in itertools.product(wrong.items(), range(2)):
        with settings({name: value if rank == culprit else None}):
            if rank == culprit:
                refused_everywhere(rank, tunedcomm.SettingError, f"{name}='{value}' is not usable")
            else:
                text = f"rank {culprit} of the group could not find out its settings: SettingError: .*{name}='{value}'"
                refused_everywhere(rank, tunedcomm.AgreementError, text)
    works(rank)


def code_that_differs(rank: int) -> None:
    def other_hash(variant: Any) -> str:
        return "f" * 16

    tunedcomm.release_communicators()
    with replaced(kernels, "source_hash", other_hash, here=rank == 1):
        refused_everywhere(rank, tunedcomm.AgreementError, r"source hash of \w+\.\w+ is .*the same version")
    with replaced(sync, "INTERPRET", False, here=rank == 1):
        refused_everywhere(rank, tunedcomm.AgreementError, "interpreted is True on rank 0 and False on rank 1")
    works(rank)


def hardware_that_differs(rank: int) -> None:
    here = get_communicator().environment
    tunedcomm.release_communicators()
    other = dataclasses.replace(here, gpu="host-other")
    with replaced(communicator_module, "detect", lambda *args, nodes: other, here=rank == 1):
        refused_everywhere(rank, tunedcomm.AgreementError, "differ in hardware: gpu is 'host-.*' on rank 1")
    works(rank)


def databases_that_cannot_be_loaded(rank: int) -> None:
    """Whatever goes wrong on rank 0, the others do not wait for its snapshot."""

    def fail(*args: Any, **options: Any) -> None:
        raise OSError("planted: no file handles left")

    tunedcomm.release_communicators()
    with replaced(communicator_module, "load_snapshot", fail, here=rank == 0):
        error = OSError if rank == 0 else tunedcomm.AgreementError
        refused_everywhere(rank, error, "planted: no file handles left")
    works(rank)


# Symmetric memory.


def symmetric_inputs(rank: int) -> None:
    tunedcomm.release_communicators()
    for numel, dtype in some(((5, "float32"), (1000, "bfloat16"), (4096, "float32"))):
        values, expected = inputs_of(rank, 2, numel, dtype)
        whole = tunedcomm.symmetric_empty(numel + 64, dtype=values.dtype)
        assert torch.equal(whole, torch.zeros_like(whole))
        for name, offset in itertools.product((*KERNELS, "library"), (0, 64)):
            x = whole[offset : offset + numel]
            with tunedcomm.force("all_reduce", name):
                x.copy_(values)
                out = tunedcomm.all_reduce(x)
                assert launched[-1].problem.input_kind == "symmetric"
                assert same_bits(x, values), "out of place leaves the input alone"
                again = tunedcomm.all_reduce(x, out=torch.empty_like(values))
                assert tunedcomm.all_reduce_(x) is x
                assert launched[-1].problem.in_place
                for found in (out, again, x):
                    if name == "library":
                        torch.testing.assert_close(found, expected)
                    else:
                        assert same_bits(found, expected), (name, numel, offset)
            dist.barrier()
        assert set(names()) == {*KERNELS, "library"}


def symmetric_memory_in_vain(rank: int) -> None:
    with pytest.raises(tunedcomm.UnsupportedInputError, match="negative extent"):
        tunedcomm.symmetric_empty((4, -1))
    for sizes in ((64, 4 << 20), (4 << 20, 64)):
        with pytest.raises(tunedcomm.WorkspaceError, match="must be the same on every rank"):
            tunedcomm.symmetric_empty(sizes[rank], dtype=torch.uint8)
    x = torch.ones(4)
    with pytest.raises(
        tunedcomm.UnsupportedInputError, match=r"only CUDA tensors.*not cpu; tunedcomm\.symmetric_empty"
    ):
        tunedcomm.register_symmetric(x)
    works(rank)


def no_shared_memory(rank: int) -> None:
    """One rank that cannot map it: a warning, and the library on every rank."""
    tunedcomm.release_communicators()
    launched.clear()
    with replaced(buffer, "_map", lambda path, nbytes: "planted: cannot map", here=rank == 1), logged() as warnings:
        x = torch.full((64,), rank + 1.0)
        assert torch.equal(tunedcomm.all_reduce(x), torch.full((64,), 3.0))
    assert names() == ["library"]
    assert len(warnings) == 1
    assert "every call goes to the library: rank 0: " in warnings[0]
    assert "rank 1: planted: cannot map" in warnings[0]
    with tunedcomm.force("all_reduce", "lamport"):
        with pytest.raises(tunedcomm.InfeasibleError, match="cannot address each other's memory"):
            tunedcomm.all_reduce(x)
    with pytest.raises(tunedcomm.WorkspaceError, match="use an ordinary tensor"):
        tunedcomm.symmetric_empty(4)
    assert not list(Path("/dev/shm").glob(f"tunedcomm-{os.getpid()}-*")), "nothing is left behind"
    works(rank)


def no_device_memory(rank: int) -> None:
    """The other ranks must not wait in the exchange of addresses for a rank that could not allocate."""
    from tunedcomm.symm import cuda

    def empty(nbytes: int, **options: Any) -> torch.Tensor:
        if rank == 1:
            raise RuntimeError("planted: out of memory")
        return torch.empty(nbytes, dtype=torch.uint8)

    with replaced(cuda.symm_mem, "empty", empty, here=True):
        with pytest.raises(
            tunedcomm.WorkspaceError, match=r"rank 1: planted: out of memory\); lower TUNEDCOMM_WORKSPACE"
        ):
            cuda.allocate(dist.group.WORLD, torch.device("cpu"), 4096)


# Letting go.


def release(rank: int) -> None:
    """What a group knows changes only when it is made anew."""
    folder = Path(os.environ["TEST_FOLDER"])
    with settings({"TUNEDCOMM_DB": str(folder / "release.db")}):
        x = torch.ones(256)
        tunedcomm.all_reduce(x)
        symmetric = tunedcomm.symmetric_empty(256, dtype=torch.float32)
        first = get_communicator()
        assert get_communicator() is first
        if rank == 0:
            variant = get_variant("all_reduce", "one_shot")
            problem = Problem("all_reduce", (256,), "float32", 2, mode="eager")
            record = Trial(
                problem=problem,
                environment=first.environment,
                variant=variant.name,
                numerics=variant.numerics,
                source_hash=kernels.source_hash(variant),
                config=variant.default(problem, first.limits),
                status="ok",
                latency_p50_us=1.0,
                baseline_p50_us=9.0,
            )
            with Database.open(folder / "release.db", create=True) as database:
                database.record([record])
        dist.barrier()
        tunedcomm.all_reduce(x)
        assert names()[-1] == "library"
        tunedcomm.release_communicators()
        assert live_communicators() == []
        tunedcomm.all_reduce(x)
        assert names() == ["one_shot"]
        assert get_communicator() is not first
        symmetric.fill_(rank + 1.0)  # still memory, though the new group knows nothing of it
        assert torch.equal(tunedcomm.all_reduce(symmetric), torch.full((256,), 3.0))
        assert launched[-1].problem.input_kind == "plain"


def new_default_group(rank: int) -> None:
    """After release, destroy and init the same process serves the new group."""
    tunedcomm.release_communicators()
    dist.destroy_process_group()
    with pytest.raises(tunedcomm.NotInitializedError, match="init_process_group"):
        tunedcomm.all_reduce(torch.ones(4))
    store = Path(os.environ["TEST_FOLDER"], "second-store")
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=1 - rank, world_size=2)
    assert get_communicator().rank == 1 - rank
    with tunedcomm.force("all_reduce", "lamport"):
        out = tunedcomm.all_reduce(torch.full((64,), rank + 1.0))
    assert torch.equal(out, torch.full((64,), 3.0))


CASES = {
    "settings that differ": settings_that_differ,
    "a setting that one rank cannot read": a_setting_that_one_rank_cannot_read,
    "code that differs": code_that_differs,
    "hardware that differs": hardware_that_differs,
    "databases that cannot be loaded": databases_that_cannot_be_loaded,
    "symmetric inputs": symmetric_inputs,
    "symmetric memory in vain": symmetric_memory_in_vain,
    "no shared memory": no_shared_memory,
    "no device memory": no_device_memory,
    "release": release,
    "a new default group": new_default_group,
}


def body(rank: int, world_size: int) -> dict[str, str]:
    spy_on_launches(launched)
    return run_cases(CASES, rank)


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    return run_ranks(2, body, env={"TEST_FOLDER": str(tmp_path_factory.mktemp("groups"))}, timeout=120)


@pytest.mark.parametrize("name", CASES)
def test_group(outcomes: list[dict[str, str]], name: str) -> None:
    report(outcomes, name)
