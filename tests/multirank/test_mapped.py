"""Symmetric memory of GPUs that the library makes itself, on a driver whose memory is the host's."""

from __future__ import annotations

import gc
import os
import tempfile
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import program_states
import pytest
import torch
import torch.distributed as dist
from cases import Ranks, logged, replaced
from fake_driver import FakeDriver, on_fake_driver, users_tensor
from variant_checks import check_variant

import tunedcomm
from tunedcomm import peers
from tunedcomm.dispatch.groups import get_communicator
from tunedcomm.metrics import format_bytes
from tunedcomm.spec import Problem
from tunedcomm.symm import buffer, cuda, mapped
from tunedcomm.symm.mapped import DESCRIPTOR, FABRIC, MappedMemory
from tunedcomm.symm.workspace import Workspace

_KEPT: list[Any] = []


def install(rank: int) -> None:
    block = on_fake_driver()
    block.__enter__()
    _KEPT.append(block)


RANKS = Ranks(timeout=300, setup=install)
CPU = torch.device("cpu")
# A case of each op, with kernels of every area of a lane.
KERNELS = {
    "all_reduce large bf16": ("lamport", "one_shot", "two_shot", "two_shot_lamport"),
    "symmetric": ("two_shot",),
    "all_gather": ("pull", "copy_engine"),
    "reduce_scatter": ("one_shot", "copy_engine"),
    "all_to_all": ("lamport", "push"),
    "all_to_all_v": ("push",),
    "broadcast": ("lamport", "push"),
    "all_gather_list": ("lamport",),
    "all_gather_v": ("lamport", "push"),
    "reduce_scatter_v": ("push",),
    "dcp_combine": ("lamport", "push"),
    "ulysses_scatter": ("push",),
    "ulysses_gather": ("pull",),
    "all_reduce_bias": ("two_shot",),
    "rms_norm": ("one_shot", "two_shot", "lamport"),
    "ag_gemm": ("library_tuned",),
    "gemm_rs": ("chunked",),
    "gemm_ar": ("lamport", "two_shot"),
    "ep_dispatch": ("push",),
    "ep_combine": ("lamport",),
}


def fresh() -> None:
    """No group, and a driver that nothing was planted in."""
    tunedcomm.release_communicators()
    mapped._views.clear()
    FakeDriver.reset()
    assert FakeDriver.left() == (0, 0, 0)
    dist.barrier()


def workspace_of() -> Workspace:
    workspace = get_communicator().workspace
    assert workspace is not None
    return workspace


def reduced(rank: int, numel: int, variant: str) -> None:
    check_variant(get_communicator(), Problem("all_reduce", (numel,), "float32", 2, mode="eager"), variant)


def results() -> program_states.Results:
    every = program_states.cases

    def some(*arguments: Any) -> dict[str, program_states.Case]:
        return {name: case for name, case in every(*arguments).items() if name in KERNELS}

    with replaced(program_states, "cases", some):
        return program_states.results_of("clean", (0, 1), dist.get_rank(), 2, "cpu", KERNELS)


def test_every_op_uses_what_there_is_memory_for(rank: int) -> None:
    """What a variant does not say that it uses has no memory: touching that ends the process."""
    fresh()
    found = results()
    with replaced(cuda, "allocate", lambda group, device, nbytes, *, first: buffer.allocate_on_host(group, nbytes)):
        wanted = results()
    assert found.keys() == wanted.keys()
    forced = [f"{name} {variant}" for name, chosen in KERNELS.items() for variant in chosen]
    assert sum((title, "first") in found for title in forced) == len(forced)
    for place, tensors in found.items():
        assert all(torch.equal(a.words, b.words) for a, b in zip(tensors, wanted[place], strict=True)), place


def test_lanes_grow(rank: int) -> None:
    fresh()
    reduced(rank, 4, "lamport")
    workspace, seen = workspace_of(), list[int]()
    lane = workspace.lanes["eager"]
    for numel, variant in ((4, "lamport"), (5000, "lamport"), (4, "two_shot"), (50_000, "two_shot"), (64, "two_shot")):
        reduced(rank, numel, variant)
        seen.append(sum(workspace.held().values()))
    assert seen == sorted(seen)
    assert len(set(seen)) == 4, "no memory for what there was memory for"
    assert seen[-1] < workspace.layout.total_bytes
    assert workspace.lanes["eager"] is lane
    assert workspace.rearm("eager") == 0
    memory = workspace.buffers["eager"].owner
    assert isinstance(memory, MappedMemory)
    everyone: list[Any] = [None, None]
    dist.all_gather_object(everyone, memory.backed)
    assert everyone[0] == everyone[1]


def test_reserve(rank: int) -> None:
    fresh()
    assert workspace_of().lanes["eager"], "made now"
    assert workspace_of().lanes["graph"]
    with pytest.raises(tunedcomm.UnsupportedInputError, match="nbytes=0"):
        tunedcomm.reserve(0)
    with pytest.raises(tunedcomm.AgreementError, match="1000, 1001"):
        tunedcomm.reserve(1000 + rank)
    tunedcomm.reserve(1 << 18)
    tunedcomm.reserve(1 << 12)
    made, held = FakeDriver.calls["create"], workspace_of().held()
    for variant in ("lamport", "one_shot", "two_shot"):
        reduced(rank, 1 << 15, variant)
    assert (FakeDriver.calls["create"], workspace_of().held()) == (made, held)
    tunedcomm.reserve(1 << 30)  # no more than the workspace has
    assert workspace_of().rooms["graph"] == workspace_of().layout.room


STEPS = ("view", "reserve", "create", "map", "allow", "export", "take")


def test_a_driver_that_fails_on_one_rank(rank: int) -> None:
    """Every rank raises, nothing is left, and what follows works."""
    for step in STEPS:
        for number in (1, 2) if step in ("reserve", "map") else (1,):
            fresh()
            FakeDriver.fails = (step, number) if rank == 1 else None
            with pytest.raises(tunedcomm.WorkspaceError, match=f"rank 1: planted: {step} failed"):
                cuda.allocate(dist.group.WORLD, CPU, 1 << 16, first=None)
            gc.collect()
            assert FakeDriver.left() == (0, 0, 0), step
            memory = cuda.allocate(dist.group.WORLD, CPU, 1 << 16, first=None)
            assert not memory.local.any()
            dist.barrier()
            del memory


def test_no_room_to_grow(rank: int) -> None:
    """The library serves that size on every rank, smaller ones run kernels, and later there is room."""
    fresh()
    reduced(rank, 4, "lamport")
    held = workspace_of().held()
    FakeDriver.fails = ("create", FakeDriver.calls["create"] + 1) if rank == 1 else None
    problem = Problem("all_reduce", (60_000,), "float32", 2, mode="eager")
    with pytest.raises(tunedcomm.InfeasibleError, match="rank 1: planted: create failed"):
        check_variant(get_communicator(), problem, "two_shot")
    assert workspace_of().held() == held
    reduced(rank, 4, "lamport")
    check_variant(get_communicator(), problem, "two_shot")
    grown = workspace_of().held()["eager lane"]
    assert grown > held["eager lane"] > 0
    told = str(tunedcomm.explain(get_communicator(), problem))
    assert f"eager lane {format_bytes(grown)}" in told, told


def test_fabric_handles_where_there_are_no_descriptors(rank: int) -> None:
    fresh()
    FakeDriver.kinds = (FABRIC,)
    with replaced(buffer, "_send", lambda *arguments: pytest.fail("nothing is sent")):
        memory = cuda.allocate(dist.group.WORLD, CPU, 5000, first=None)
    memory.local.fill_(rank + 1)
    dist.barrier()
    theirs = FakeDriver(CPU).tensor(memory.addresses[1 - rank], 5000)
    assert theirs.eq(2 - rank).all()
    dist.barrier()
    FakeDriver.kinds = ()
    mapped._views.clear()
    with pytest.raises(tunedcomm.WorkspaceError, match="exports no memory"):
        cuda.allocate(dist.group.WORLD, CPU, 5000, first=None)
    FakeDriver.kinds = (DESCRIPTOR,) if rank else (DESCRIPTOR, FABRIC)
    mapped._views.clear()
    assert cuda.allocate(dist.group.WORLD, CPU, 5000, first=None).nbytes == 5000


def test_ranks_that_no_socket_connects(rank: int) -> None:
    fresh()
    real = buffer._send
    with replaced(buffer, "_send", lambda *arguments: rank == 0 and real(*arguments)):
        with pytest.raises(tunedcomm.WorkspaceError, match="rank 1 reaches no socket of rank 0"):
            cuda.allocate(dist.group.WORLD, CPU, 5000, first=None)
    gc.collect()
    assert FakeDriver.left() == (0, 0, 0)
    assert not list(Path(tempfile.gettempdir()).glob(f"tunedcomm-{os.getpid()}-*")), "sockets with names are gone"


def test_two_ranks_on_one_gpu(rank: int) -> None:
    fresh()
    FakeDriver.views = {0: {"uuid": "same"}, 1: {"uuid": "same"}}
    with pytest.raises(tunedcomm.WorkspaceError, match="ranks 0, 1 use the same GPU"):
        cuda.allocate(dist.group.WORLD, CPU, 5000, first=None)
    assert FakeDriver.calls["create"] == FakeDriver.calls["export"] == 0


def test_pytorch_makes_memory_only_where_it_maps_multicast(rank: int) -> None:
    """Not where GPUs have the same number in their processes, which its rendezvous refuses."""
    made = {"multicast": True}
    for views, expected in (
        ({0: {**made, "index": 0}, 1: {**made, "index": 1}}, True),
        ({0: made, 1: made}, False),
        ({0: {**made, "index": 0}, 1: {"index": 1}}, False),
    ):
        fresh()
        FakeDriver.views = views
        assert cuda._has_multicast(dist.group.WORLD, FakeDriver(CPU)) is expected  # type: ignore[arg-type]


def test_what_needs_pytorchs_memory_is_left_out_where_it_refuses(rank: int) -> None:
    with replaced(peers, "ranks_may_share_a_gpu", lambda: False):
        peers.need_rendezvous(CPU)
        for numbers, refused in ((0, True), (rank, False)):
            peers._indices.cache_clear()
            with pytest.raises(peers.LeftOut, match="the same number") if refused else nullcontext():
                peers.need_rendezvous(torch.device("cuda", numbers))


def test_a_users_tensor(rank: int) -> None:
    fresh()
    driver: Any = FakeDriver(CPU)
    memory = users_tensor(8192)
    x = memory[4096 * rank :][:4096]  # at different places of the allocations
    x.fill_(rank + 5)
    shared = mapped.map_tensor(x, dist.group.WORLD, driver)
    dist.barrier()
    assert shared.addresses[rank] == x.data_ptr()
    assert driver.tensor(shared.addresses[1 - rank], 4096).eq(6 - rank).all()
    dist.barrier()
    held = FakeDriver.left()
    del shared
    gc.collect()
    assert (held[1] - 1, held[2] - 1) == FakeDriver.left()[1:] == (1, 1), "the peer's is given back"
    with pytest.raises(tunedcomm.WorkspaceError, match="rank 1: cuMemRetainAllocationHandle"):
        mapped.map_tensor(x if rank == 0 else torch.zeros(4096), dist.group.WORLD, driver)
    at = memory.data_ptr()
    driver.unmap(at, 8192)
    driver.free(at, 8192)


def test_destroyed_groups_leave_nothing(rank: int) -> None:
    fresh()
    group = dist.new_group()
    with tunedcomm.force("all_reduce", "two_shot"):
        x = torch.full((700,), rank + 1.0)
        assert torch.equal(tunedcomm.all_reduce(x, group=group), torch.full((700,), 3.0))
    assert FakeDriver.left()[2] > 0
    dist.barrier()
    dist.destroy_process_group(group)
    del group
    gc.collect()
    assert FakeDriver.left() == (0, 0, 0)


def test_warning_where_ranks_share_a_gpu(rank: int) -> None:
    fresh()
    FakeDriver.views = {0: {"uuid": "same"}, 1: {"uuid": "same"}}
    with logged() as warnings, tunedcomm.force("all_reduce", "library"):
        assert torch.equal(tunedcomm.all_reduce(torch.ones(64)), torch.full((64,), 2.0))
        with pytest.raises(tunedcomm.WorkspaceError, match="use the same GPU"):
            tunedcomm.symmetric_empty(64)
    assert not [text for text in warnings if "hang" in text]
    fresh()
