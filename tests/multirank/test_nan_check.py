"""TUNEDCOMM_NAN_CHECK on the host backend: who is told what, and that nothing is asked where it is off."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cases import PEER_TIMEOUT_S, Case, report, run_cases, settings
from harness import run_ranks

import tunedcomm
from tunedcomm.dispatch.communicator import get_communicator
from tunedcomm.kernels.common.launch import AddressLaunch
from tunedcomm.kernels.common.nan import NAN_BITS
from tunedcomm.spec import Problem

ON = {"TUNEDCOMM_NAN_CHECK": "1"}


def with_nan(numel: int, count: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    x = torch.ones(numel)
    x[:: max(numel // max(count, 1), 1)][:count] = float("nan")
    return x.to(dtype)


def every_op_says_where(rank: int) -> None:
    """NaN on every rank: each is told of its own, and the group is still in step."""
    with settings(ON):
        calls = {
            "all_reduce": tunedcomm.all_reduce,
            "all_to_all": tunedcomm.all_to_all,
            "all_to_all_v": lambda x: tunedcomm.all_to_all_v(x, [len(x) // 2] * 2, [len(x) // 2] * 2, max_count=400),
        }
        for op, call in calls.items():
            for variant in ("library", "push" if op != "all_reduce" else "lamport"):
                with tunedcomm.force(op, variant):
                    for _ in range(2):
                        with pytest.raises(
                            tunedcomm.NanInputError, match=rf"^{op}: {3 + rank} NaN in the input of rank {rank}\."
                        ):
                            call(with_nan(600, 3 + rank))
                        assert not torch.isnan(call(torch.ones(600))).any()


def every_float_is_searched(rank: int) -> None:
    with settings(ON):
        for name in NAN_BITS:
            dtype = getattr(torch, name)
            for _ in range(2):
                with pytest.raises(tunedcomm.NanInputError, match="all_to_all: 2 NaN"):
                    tunedcomm.all_to_all(with_nan(40, 2, dtype))
            for value in (float("inf"), -float("inf"), torch.finfo(dtype).max, -0.0):
                fine = torch.full((40,), value, dtype=torch.float64).to(dtype)
                if not torch.isnan(fine.float()).any():  # not every dtype has infinities
                    tunedcomm.all_to_all(fine)
        whole = torch.full((6,), -1, dtype=torch.int32)  # bits that would be a NaN
        assert torch.equal(tunedcomm.all_to_all(whole), whole)
        strided = with_nan(80, 80)[::2]
        with pytest.raises(tunedcomm.NanInputError, match="all_reduce: 40 NaN"):
            tunedcomm.all_reduce(strided)
        assert tunedcomm.all_reduce(torch.empty(0)).shape == (0,)


def repeated_calls_are_searched(rank: int) -> None:
    for values, is_fast in ((ON, False), ({"TUNEDCOMM_NAN_CHECK": None}, True)):
        with settings(values), tunedcomm.force("all_reduce", "lamport"):
            for _ in range(3):
                tunedcomm.all_reduce(torch.ones(64))
            communicator = get_communicator()
            assert {isinstance(plan.launch, AddressLaunch) for plan in communicator.plans.values()} == {is_fast}
            if is_fast:
                assert communicator.nan_watch is None
                assert torch.isnan(tunedcomm.all_reduce(with_nan(64, 1))).any(), "NaN goes through where it is off"
            else:
                with pytest.raises(tunedcomm.NanInputError, match="all_reduce: 1 NaN"):
                    tunedcomm.all_reduce(with_nan(64, 1))


def a_graph_is_heard_of_at_the_next_call(rank: int) -> None:
    """What would be captured is launched here as it is replayed there."""
    with settings(ON):
        communicator, sent = get_communicator(), []

        def launch(inputs: tuple[Any, ...], outputs: tuple[Any, ...], stream: int) -> None:
            sent.append(inputs)

        for name in NAN_BITS:
            dtype = getattr(torch, name)
            problem = Problem("all_to_all", (1500,), name, 2, reduction="")
            captured = communicator.guarded(problem, launch)
            captured((torch.ones(3000).to(dtype),), (), 0)
            communicator.check_peers()
            captured((with_nan(3001, 5, dtype), torch.tensor([-1])), (), 0)
            captured_later = Problem("all_reduce", (7,), name, 2)
            tunedcomm_error = rf"all_to_all: 5 NaN in the input of rank {rank}, in a captured graph"
            with pytest.raises(tunedcomm.NanInputError, match=tunedcomm_error):
                communicator.guarded(captured_later, launch)((torch.ones(7).to(dtype),), (), 0)
            # What is found stays found though there is nothing later in the same place.
            captured((with_nan(9, 1, dtype), torch.ones(9).to(dtype)), (), 0)
            with pytest.raises(tunedcomm.NanInputError, match="all_to_all: 1 NaN"):
                tunedcomm.all_reduce(torch.ones(5))
            assert torch.equal(tunedcomm.all_reduce(torch.ones(5)), torch.full((5,), 2.0)), "said once"
        assert len(sent) == 3 * len(NAN_BITS), "replays are not held back"


def the_others_are_told_of_a_missing_rank(rank: int) -> None:
    """Last, for the group is out of step then."""
    with settings({**ON, "TUNEDCOMM_PEER_TIMEOUT_S": str(PEER_TIMEOUT_S)}), tunedcomm.force("all_reduce", "one_shot"):
        tunedcomm.all_reduce(torch.ones(64))
        error = tunedcomm.NanInputError if rank == 1 else tunedcomm.PeerTimeoutError
        with pytest.raises(error, match="4 NaN in the input of rank 1" if rank == 1 else "missed rank 1"):
            tunedcomm.all_reduce(with_nan(64, 4 * rank))


CASES: dict[str, Case] = {
    case.__name__: case
    for case in (
        every_op_says_where, every_float_is_searched, repeated_calls_are_searched, a_graph_is_heard_of_at_the_next_call,
        the_others_are_told_of_a_missing_rank,
    )
}  # fmt: skip


def body(rank: int, world_size: int) -> dict[str, str]:
    return run_cases(CASES, rank)


@pytest.fixture(scope="module")
def outcomes() -> list[dict[str, str]]:
    return run_ranks(2, body, timeout=240)


@pytest.mark.parametrize("name", CASES)
def test_nan_check(outcomes: list[dict[str, str]], name: str) -> None:
    report(outcomes, name)
