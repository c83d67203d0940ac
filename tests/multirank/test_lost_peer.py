"""Groups that lost a peer: every variant that waits gives up in time, and says for whom it waited."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from cases import HOST, PEER_TIMEOUT_S, Ranks, gives_up_in_time
from harness import run_ranks
from quick import sample
from variant_checks import inputs_of_all, launch_variant

import tunedcomm
from tunedcomm import kernels
from tunedcomm.dispatch.groups import get_communicator
from tunedcomm.spec import Problem, get_op, variants

kernels.discover()
WORLD_SIZE = 3
FOUND_S = 10.0  # two seconds, and what a busy machine adds
ENVIRONMENT = {**HOST, "TUNEDCOMM_PEER_TIMEOUT_S": str(PEER_TIMEOUT_S)}
RANKS = Ranks(WORLD_SIZE, env=ENVIRONMENT, timeout=500, forget=False)
MOVES = dict.fromkeys(("all_gather", "reduce_scatter", "all_to_all", "all_to_all_v"), (600,))
BY_COUNTS = {"all_gather_list": (600,), "all_gather_v": (5, 48), "reduce_scatter_v": (5, 48)}
ATTENTION = {"dcp_combine": (5, 6, 8), "ulysses_scatter": (6, 2, 48), "ulysses_gather": (6, 2, 48)}
SHAPES = {
    "all_reduce": (3100,),
    **MOVES,
    **BY_COUNTS,
    **ATTENTION,
    "ag_gemm": (63, 56, 72),
    "gemm_rs": (63, 56, 72),
    "gemm_ar": (40, 72, 40),
}
# The first has tests of its own, the second waits in the library.
ELSEWHERE = ("hierarchical", "in_order")
WAITING = [
    f"{op} {name}"
    for op in SHAPES
    for name, variant in variants(op).items()
    if variant.waits_time_out and not variant.is_library and name not in ELSEWHERE
]
SHAPES["ep_dispatch"] = (5, 64, 2, 6)
WAITING += ["ep_dispatch lamport", "ep_dispatch push"]


@pytest.mark.parametrize("name", sample(WAITING, 3, quick=12))
def test_a_rank_that_does_not_come_is_named(rank: int, name: str) -> None:
    op, variant = name.split()
    communicator, is_gemm = get_communicator(dist.new_group()), get_op(op).is_gemm
    is_wide, reduction = variant.endswith("_fp32"), next(iter(get_op(op).reductions), "")
    dtype = "bfloat16" if is_gemm or is_wide else "float32"
    layout = "nk" if is_gemm else "float32" if is_wide else get_op(op).layouts[0]
    wire = "fp8_group128" if variant.endswith("_quantized") else ""
    problem = Problem(op, SHAPES[op], dtype, WORLD_SIZE, reduction, layout=layout, scaling=wire, mode="eager")
    mine = inputs_of_all(problem, 1, "random")[rank]
    launch_variant(communicator, problem, variant, mine)
    dist.barrier()
    if rank != 1:
        said = rf"{op} .*\(called eagerly\) missed rank 1 of the group of 3"
        with gives_up_in_time(), pytest.raises(tunedcomm.PeerTimeoutError, match=said):
            launch_variant(communicator, problem, variant, mine)
    dist.barrier()


@pytest.mark.parametrize(("variant", "lost"), [("lamport", (1,)), ("two_shot", (1, 2))])
def test_a_peer_that_never_calls(rank: int, variant: str, lost: tuple[int, ...]) -> None:
    """An error in time, and at once from then on, whatever would serve the call."""
    group, x = dist.new_group(), torch.ones(600)
    with tunedcomm.force("all_reduce", variant):
        assert torch.equal(tunedcomm.all_reduce(x, group=group), torch.full((600,), 3.0))
        dist.barrier()
        if rank not in lost:
            said = rf"rank \d waited more than 3 s .* missed rank {', '.join(map(str, lost))} of the group of 3"
            with gives_up_in_time(), pytest.raises(tunedcomm.PeerTimeoutError, match=said):
                tunedcomm.all_reduce(x, group=group)
    if rank not in lost:
        for tensor in (x, torch.ones(7), torch.ones(4, dtype=torch.int32)):
            with gives_up_in_time(0.0), pytest.raises(tunedcomm.PeerTimeoutError):
                tunedcomm.all_reduce(tensor, group=group)
    dist.barrier()


def test_other_groups_are_as_they_were_and_a_lost_one_can_be_made_anew(rank: int) -> None:
    for _ in range(2):
        assert torch.equal(tunedcomm.all_reduce(torch.ones(600)), torch.full((600,), 3.0))
        tunedcomm.release_communicators()


def killed_body(rank: int, world_size: int, variant: str) -> tuple[str, list[str]]:
    x = torch.ones(20000)
    with tunedcomm.force("all_reduce", variant):
        assert torch.equal(tunedcomm.all_reduce(x), torch.full((20000,), 3.0))
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        begin = time.monotonic()
        with pytest.raises(tunedcomm.PeerTimeoutError) as caught:
            tunedcomm.all_reduce(x)
        assert time.monotonic() - begin < FOUND_S
    for tensor in (x, torch.ones(4, dtype=torch.int32)):  # whatever would serve them
        with gives_up_in_time(0.0), pytest.raises(tunedcomm.PeerTimeoutError):
            tunedcomm.all_reduce(tensor)
    return str(caught.value), [path.name for path in Path("/dev/shm").glob(f"tunedcomm-{os.getpid()}-*")]


KERNELS = ("lamport", "one_shot", "two_shot", "two_shot_lamport", "two_shot_split", "host_one_shot", "host_two_shot")


@pytest.mark.parametrize("variant", sample(KERNELS))
def test_a_peer_that_is_killed(variant: str) -> None:
    """It is found by its process, long before the group's time-out."""
    outcomes = run_ranks(3, killed_body, variant, env=HOST, killed=[1])
    for said, left in (outcomes[0], outcomes[2]):
        assert "rank 1 of the group of 3 has ended" in said
        assert left == []
