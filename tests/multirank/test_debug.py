"""TUNEDCOMM_DEBUG on the host backend: ranks that make different calls are told so, all of them, before a launch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from cases import Case, gives_up_in_time, report, run_cases, settings
from harness import run_ranks

import tunedcomm
from tunedcomm.dispatch.communicator import get_communicator

ON = {"TUNEDCOMM_DEBUG": "1"}
Call = Callable[[], Any]


def works() -> None:
    for _ in range(2):
        assert torch.equal(tunedcomm.all_reduce(torch.ones(64)), torch.full((64,), 2.0))


def different(rank: int, calls: tuple[Call, Call], said: str) -> None:
    """Each rank makes its own call: an error on both at once, and the group is in step."""
    with gives_up_in_time(0.0), pytest.raises(tunedcomm.AgreementError, match=said):
        calls[rank]()
    works()


def calls_that_differ(rank: int) -> None:
    ones = torch.ones
    cases: list[tuple[Call, Call, str]] = [
        (lambda: tunedcomm.all_reduce(ones(64)), lambda: tunedcomm.all_reduce(ones(128)), r"shape is \[64\] on rank 0"),
        (lambda: tunedcomm.all_reduce(ones(64)), lambda: tunedcomm.all_reduce(ones(64).half()), "dtype is 'float32'"),
        (
            lambda: tunedcomm.all_reduce(ones(64)),
            lambda: tunedcomm.all_gather(ones(64)),
            "op is 'all_reduce' on rank 0",
        ),
        (lambda: tunedcomm.all_reduce(ones(64)), lambda: tunedcomm.all_reduce(ones(64), op="avg"), "'avg'"),
        (lambda: tunedcomm.all_reduce(ones(64)), lambda: tunedcomm.all_reduce(ones(64), max_sms=4), "max_sms is None"),
        (lambda: tunedcomm.all_reduce(ones(64)), lambda: tunedcomm.all_reduce(ones(64), numerics="any"), "numerics is"),
        (
            lambda: tunedcomm.all_reduce(ones(64)),
            lambda: tunedcomm.all_reduce_(ones(64)),
            "in_place is False on rank 0",
        ),
        (lambda: tunedcomm.all_reduce(ones(64)), lambda: tunedcomm.all_reduce(ones(0)), r"shape is \[64\] on rank 0"),
        (lambda: tunedcomm.all_gather(ones(4, 4)), lambda: tunedcomm.all_gather(ones(4, 4), dim=1), "options is"),
        (
            lambda: tunedcomm.all_to_all_v(ones(4, 2), [2, 2], [2, 2], max_count=4),
            lambda: tunedcomm.all_to_all_v(ones(4, 2), [2, 2], [2, 2], max_count=8),
            "options is",
        ),
        (
            lambda: tunedcomm.all_reduce_rms_norm(ones(4, 8), ones(8)),
            lambda: tunedcomm.all_reduce_rms_norm(ones(4, 8), ones(8), residual=ones(4, 8)),
            "layout is ''",
        ),
        (
            lambda: tunedcomm.ag_gemm(ones(2, 8), [ones(8, 4), ones(8, 6)]),
            lambda: tunedcomm.ag_gemm(ones(2, 8), [ones(8, 4), ones(8, 5)]),
            r"shape is \[4, 6, 8\] on rank 0",
        ),
    ]
    with settings(ON):
        works()
        for here, there, said in cases:
            different(rank, (here, there), said)
        assert not get_communicator().fast_calls, "a call that asks nothing could not be compared"


def without_it_calls_are_fast(rank: int) -> None:
    works()
    assert get_communicator().fast_calls


CASES: dict[str, Case] = {case.__name__: case for case in (calls_that_differ, without_it_calls_are_fast)}


def body(rank: int, world_size: int) -> dict[str, str]:
    return run_cases(CASES, rank)


@pytest.fixture(scope="module")
def outcomes() -> list[dict[str, str]]:
    return run_ranks(2, body, timeout=120)


@pytest.mark.parametrize("name", CASES)
def test_debug(outcomes: list[dict[str, str]], name: str) -> None:
    report(outcomes, name)
