"""Groups that lost a peer: every variant that waits gives up in time, and says for whom it waited."""

from __future__ import annotations

import os
import re
import signal
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cases import PEER_TIMEOUT_S, gives_up_in_time, report, run_cases
from harness import run_ranks
from quick import some

import tunedcomm

KERNELS = ("lamport", "one_shot", "two_shot", "two_shot_lamport", "two_shot_split")


def miss(group: dist.ProcessGroup, variant: str, said: str) -> None:
    """A call that some ranks of the group do not make: an error in time, and at once from then on."""
    x = torch.ones(600)
    with tunedcomm.force("all_reduce", variant):
        with gives_up_in_time(), pytest.raises(tunedcomm.PeerTimeoutError, match=said):
            tunedcomm.all_reduce(x, group=group)
    for tensor in (x, torch.ones(7), torch.ones(4, dtype=torch.int32)):
        with gives_up_in_time(0.0), pytest.raises(tunedcomm.PeerTimeoutError):
            tunedcomm.all_reduce(tensor, group=group)


def lose_peers(rank: int, variant: str, lost: tuple[int, ...], said: str) -> None:
    os.environ["TUNEDCOMM_PEER_TIMEOUT_S"] = str(PEER_TIMEOUT_S)
    group = dist.new_group()
    with tunedcomm.force("all_reduce", variant):
        assert torch.equal(tunedcomm.all_reduce(torch.ones(600), group=group), torch.full((600,), 3.0))
    dist.barrier()
    if rank not in lost:
        miss(group, variant, said)
    dist.barrier()


def recover(rank: int) -> None:
    """Other groups are as they were, and a lost one can be made anew."""
    for _ in range(2):
        assert torch.equal(tunedcomm.all_reduce(torch.ones(600)), torch.full((600,), 3.0))
        tunedcomm.release_communicators()


def silent_body(rank: int, world_size: int) -> dict[str, str]:
    def case(variant: str, lost: tuple[int, ...], said: str) -> Any:
        return lambda rank: lose_peers(rank, variant, lost, said)

    one = r"rank \d waited more than 3 s for its peers: all_reduce \(called eagerly\) missed rank 1 of the group of 3"
    two = r"all_reduce \(called eagerly\) missed rank 1, 2 of the group of 3"
    cases = {variant: case(variant, (1,), one) for variant in some(KERNELS)}
    return run_cases({**cases, "two at once": case("two_shot", (1, 2), two), "recovery": recover}, rank)


@pytest.fixture(scope="module")
def silent_outcomes() -> list[dict[str, str]]:
    return run_ranks(3, silent_body, timeout=120)


@pytest.mark.parametrize("name", [*some(KERNELS), "two at once", "recovery"])
def test_a_peer_that_never_calls(silent_outcomes: list[dict[str, str]], name: str) -> None:
    report(silent_outcomes, name)


def killed_body(rank: int, world_size: int, variant: str) -> str:
    x = torch.ones(600)
    with tunedcomm.force("all_reduce", variant):
        assert torch.equal(tunedcomm.all_reduce(x), torch.full((600,), 2.0))
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        with gives_up_in_time(), pytest.raises(tunedcomm.PeerTimeoutError) as caught:
            tunedcomm.all_reduce(x)
    return str(caught.value)


@pytest.mark.parametrize("variant", some(KERNELS, 5))
def test_a_peer_that_is_killed(variant: str) -> None:
    settings = {"TUNEDCOMM_PEER_TIMEOUT_S": str(PEER_TIMEOUT_S), "TUNEDCOMM_WORKSPACE_MIB": "1"}
    said, nothing = run_ranks(2, killed_body, variant, env=settings, killed=[1])
    assert nothing is None
    assert re.search(r"all_reduce \(called eagerly\) missed rank 1 of the group of 2", said)
