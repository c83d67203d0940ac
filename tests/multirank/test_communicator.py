"""Groups: what their ranks must agree on, symmetric memory, and letting go."""

from __future__ import annotations

import dataclasses
import itertools
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cases import Launched, Ranks, inputs_of, logged, replaced, same_bits, settings, spy_on_launches
from quick import some
from test_dispatch import trial

import tunedcomm
from tunedcomm import kernels
from tunedcomm.db.store import Database
from tunedcomm.dispatch import communicator as communicator_module
from tunedcomm.dispatch.groups import get_communicator, live_communicators
from tunedcomm.kernels.common import sync
from tunedcomm.spec import Problem, get_variant
from tunedcomm.symm import buffer

KERNELS = ("lamport", "one_shot", "two_shot", "two_shot_lamport")
launched: list[Launched] = []
RANKS = Ranks(setup=lambda rank: spy_on_launches(launched))


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
    with pytest.raises(error, match=text):
        tunedcomm.all_reduce(torch.ones(5))
    assert live_communicators() == []


# What must be the same on every rank.


def test_settings_that_differ(rank: int) -> None:
    different: list[tuple[str, tuple[str | None, str | None], str]] = [
        ("TUNEDCOMM_MODE", ("off", None), r"mode \(TUNEDCOMM_MODE\) is 'off' on rank 0"),
        ("TUNEDCOMM_FORCE_ALL_REDUCE", (None, "lamport"), "forced is {} on rank 0"),
        (
            "TUNEDCOMM_PEER_TIMEOUT_S",
            ("20", "30"),
            r"TUNEDCOMM_PEER_TIMEOUT_S\) is 20\.0 on rank 0 and 30\.0 on rank 1",
        ),
        ("TUNEDCOMM_WORKSPACE_MIB", ("2", "1"), r"TUNEDCOMM_WORKSPACE_MIB\) is 2097152 on rank 0"),
    ]
    for name, values, text in different:
        with settings({name: values[rank]}):
            refused_everywhere(rank, tunedcomm.AgreementError, text)
    works(rank)


def test_a_setting_that_one_rank_cannot_read(rank: int) -> None:
    wrong = {"TUNEDCOMM_MODE": "fast", "TUNEDCOMM_PEER_TIMEOUT_S": "soon", "TUNEDCOMM_WORKSPACE_MIB": "0"}
    wrong |= {"TUNEDCOMM_LOG": "loud", "TUNEDCOMM_DEBUG": "yes"}
    for (name, value), culprit in itertools.product(wrong.items(), range(2)):
        with settings({name: value if rank == culprit else None}):
            if rank == culprit:
                refused_everywhere(rank, tunedcomm.SettingError, f"{name}='{value}' is not usable")
            else:
                refused_everywhere(rank, tunedcomm.AgreementError, f"rank {culprit} .*{name}='{value}'")
    works(rank)


def test_a_misspelt_variable(rank: int) -> None:
    with settings({"TUNEDCOMM_MOD": "off"}), logged() as warnings:
        works(rank)
    assert [("TUNEDCOMM_MODE" in text) for text in warnings] == [True] * (rank == 0)


def test_code_that_differs(rank: int) -> None:
    tunedcomm.release_communicators()
    with replaced(kernels, "source_hash", lambda variant: "f" * 16, here=rank == 1):
        refused_everywhere(rank, tunedcomm.AgreementError, r"source hash of \w+\.\w+ is")
    with replaced(sync, "INTERPRET", False, here=rank == 1):
        refused_everywhere(rank, tunedcomm.AgreementError, "interpreted is True on rank 0")
    works(rank)


def test_hardware_that_differs(rank: int) -> None:
    other = dataclasses.replace(get_communicator().environment, gpu="host-other")
    tunedcomm.release_communicators()
    with replaced(communicator_module, "detect", lambda *args, nodes: other, here=rank == 1):
        refused_everywhere(rank, tunedcomm.AgreementError, "differ in hardware: gpu is 'host-.*' on rank 1")
    works(rank)


def test_databases_that_cannot_be_loaded(rank: int) -> None:
    """Whatever goes wrong on rank 0, the others do not wait for its snapshot."""

    def fail(*args: Any, **options: Any) -> None:
        raise OSError("planted: no file handles left")

    tunedcomm.release_communicators()
    with replaced(communicator_module, "kept_snapshot", fail, here=rank == 0):
        error = OSError if rank == 0 else tunedcomm.AgreementError
        refused_everywhere(rank, error, "planted: no file handles left")
    works(rank)


# Symmetric memory.


def test_symmetric_inputs(rank: int) -> None:
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


def test_symmetric_memory_in_vain(rank: int) -> None:
    with pytest.raises(tunedcomm.UnsupportedInputError, match="negative extent"):
        tunedcomm.symmetric_empty((4, -1))
    for sizes in ((64, 4 << 20), (4 << 20, 64)):
        with pytest.raises(tunedcomm.WorkspaceError, match="must be the same on every rank"):
            tunedcomm.symmetric_empty(sizes[rank], dtype=torch.uint8)
    x = torch.ones(4)
    with pytest.raises(tunedcomm.UnsupportedInputError, match="only CUDA tensors"):
        tunedcomm.register_symmetric(x)
    with replaced(torch.cuda, "is_available", lambda: False):
        for device in ("cuda", torch.device("cuda", 0)):
            with pytest.raises(tunedcomm.GroupError, match="no GPU"):
                tunedcomm.symmetric_empty(16, device=device)
    works(rank)


def test_no_shared_memory(rank: int) -> None:
    """One rank that cannot map it: a warning, and the library on every rank."""
    tunedcomm.release_communicators()
    launched.clear()
    with (
        replaced(buffer, "_map", lambda descriptor, nbytes: "planted: cannot map", here=rank == 1),
        logged() as warnings,
    ):
        x = torch.full((64,), rank + 1.0)
        assert torch.equal(tunedcomm.all_reduce(x), torch.full((64,), 3.0))
    assert names() == ["library"]
    assert len(warnings) == (rank == 0)
    assert all("every call goes to the library" in text for text in warnings)
    assert all(text.count("rank 1: planted: cannot map") == 1 for text in warnings)
    with tunedcomm.force("all_reduce", "lamport"):
        with pytest.raises(tunedcomm.InfeasibleError, match="cannot address each other's memory"):
            tunedcomm.all_reduce(x)
    with pytest.raises(tunedcomm.WorkspaceError, match="use an ordinary tensor"):
        tunedcomm.symmetric_empty(4)
    assert not list(Path("/dev/shm").glob(f"tunedcomm-{os.getpid()}-*")), "nothing is left behind"
    works(rank)


def test_kernels_without_the_interpreter(rank: int) -> None:
    tunedcomm.release_communicators()
    with replaced(sync, "INTERPRET", False), tunedcomm.force("all_reduce", "lamport"):
        with pytest.raises(tunedcomm.InfeasibleError, match="TRITON_INTERPRET=1"):
            tunedcomm.all_reduce(torch.ones(4))
    works(rank)


def test_no_device_memory(rank: int) -> None:
    """The other ranks must not wait in the exchange of addresses for a rank that could not allocate."""
    from tunedcomm.symm import cuda

    def empty(nbytes: int, **options: Any) -> torch.Tensor:
        if rank == 1:
            raise RuntimeError("planted: out of memory")
        return torch.empty(nbytes, dtype=torch.uint8)

    with replaced(cuda.symm_mem, "empty", empty, here=True):
        with pytest.raises(tunedcomm.WorkspaceError, match="rank 1: planted: out of memory"):
            cuda._allocate_by_rendezvous(dist.group.WORLD, torch.device("cpu"), 4096)


# Letting go.


def test_release(rank: int) -> None:
    """What a group knows changes only when it is made anew."""
    folder = Path(os.environ["TEST_FOLDER"])
    with settings({"TUNEDCOMM_DB": str(folder / "release.db")}):
        x = torch.ones(256)
        tunedcomm.all_reduce(x)
        symmetric = tunedcomm.symmetric_empty(256, dtype=torch.float32)
        first = get_communicator()
        assert get_communicator() is first
        if rank == 0:
            asked = Problem("all_reduce", (256,), "float32", 2, mode="eager")
            config = get_variant("all_reduce", "one_shot").default(asked, first.limits)
            with Database.open(folder / "release.db", create=True) as database:
                database.record([trial("one_shot", 256, 1.0, problem=asked, config=config)])
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


def test_new_default_group(rank: int) -> None:
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
