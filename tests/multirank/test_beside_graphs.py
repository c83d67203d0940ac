"""What a group's graphs ask of it: buffers that stay, and eager kernels that leave them room."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
import torch
from cases import replaced, report, run_cases
from harness import run_ranks

import tunedcomm
from tunedcomm.dispatch import communicator as communicator_module
from tunedcomm.dispatch.communicator import get_communicator
from tunedcomm.kernels.common import launch


def what_graphs_replay_is_kept(rank: int) -> None:
    """Whoever dispatches anew drops plans, but not those of captured calls: graphs write to their buffers."""
    from tunedcomm.ops import call as call_module

    x, weight = torch.ones(4, 64), torch.ones(64)
    communicator = get_communicator()
    for call in (
        lambda: tunedcomm.all_reduce(x),
        lambda: tunedcomm.all_reduce_rms_norm(x, weight),
        lambda: tunedcomm.all_to_all_v(x, [2, 2], [2, 2], max_count=2),
    ):
        call()
        before = set(communicator._captured)
        warm = {id(plan) for plan in communicator.plans.values()}
        assert not before & warm
        for key, plan in list(communicator.plans.items()):
            communicator.plans[(*key[:-1], True)] = plan
        communicator.forget_calls()
        with replaced(call_module, "is_capturing", lambda: True):
            call()
        communicator.forget_plans()
        call()
        (kept,) = set(communicator._captured) - before
        assert kept in warm


def large_kernels_leave_room_for_graphs(rank: int) -> None:
    """An eager kernel that takes most of the GPU serves until a graph is captured, then is no candidate any more."""

    @contextlib.contextmanager
    def whole(limit: float) -> Iterator[launch.Residency]:
        yield launch.Residency(limit, share=1.0)

    tunedcomm.release_communicators()
    x = torch.ones(256)
    communicator = get_communicator()
    with tunedcomm.force("all_reduce", "two_shot"), replaced(communicator_module, "within", whole):
        tunedcomm.all_reduce(x)
        (plan,) = communicator.plans.values()
        communicator.captured(plan)
        assert not communicator.plans
        with pytest.raises(tunedcomm.InfeasibleError, match=r"two_shot\(.*100% of the GPU; once a group has captured"):
            tunedcomm.all_reduce(x)
    tunedcomm.all_reduce(x)


CASES = {
    "what graphs replay is kept": what_graphs_replay_is_kept,
    "large kernels leave room for graphs": large_kernels_leave_room_for_graphs,
}


def body(rank: int, world_size: int) -> dict[str, str]:
    return run_cases(CASES, rank)


@pytest.fixture(scope="module")
def outcomes() -> list[dict[str, str]]:
    return run_ranks(2, body)


@pytest.mark.parametrize("name", CASES)
def test_beside_graphs(outcomes: list[dict[str, str]], name: str) -> None:
    report(outcomes, name)
