"""TUNEDCOMM_CHECK on the host backend: a variant that turns wrong is found, named and not used any more."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from cases import Case, logged, report, run_cases, settings
from harness import run_ranks

import tunedcomm
from tunedcomm import kernels
from tunedcomm.dispatch.communicator import get_communicator
from tunedcomm.kernels.common.launch import AddressLaunch
from tunedcomm.spec import Problem, get_variant, register_variant

WORLD_SIZE = 2
NUMEL = 600
TURNS_WRONG_AFTER = 5
PROBLEM = Problem("all_reduce", (NUMEL,), "float32", WORLD_SIZE, mode="eager")
launches: list[int] = []


def plant(rank: int) -> None:
    """`stale`: right for some launches, from then on rank 1 gives the result before."""
    kernels.discover()
    good = get_variant("all_reduce", "two_shot")

    def bind(problem: Problem, config: Mapping[str, Any], workspace: Any) -> Any:
        launch, before = good.bind(problem, config, workspace), []

        def run(inputs: tuple[Any, ...], outputs: tuple[Any, ...], stream: int) -> None:
            launch(inputs, outputs, stream)
            launches.append(len(launches))
            before.append(outputs[0].clone())
            if rank == 1 and len(launches) > TURNS_WRONG_AFTER:
                outputs[0].copy_(before[-2])

        return run

    register_variant(dataclasses.replace(good, name="stale", bind=bind))


def call(rank: int, number: int, **options: Any) -> bool:
    """True if the result of a call with inputs of its own is right."""
    x = torch.full((NUMEL,), float(number * (rank + 1)))
    return torch.equal(tunedcomm.all_reduce(x, **options), torch.full((NUMEL,), 3.0 * number))


def off_asks_nothing(rank: int) -> None:
    with tunedcomm.force("all_reduce", "lamport"):
        for number in range(1, 4):
            assert call(rank, number)
        communicator = get_communicator()
        assert communicator.settings.check == (0, False)
        assert [type(plan.launch) for plan in communicator.plans.values()] == [AddressLaunch]


def it_raises_on_every_rank_and_the_library_takes_over(rank: int) -> None:
    launches.clear()
    with settings({"TUNEDCOMM_CHECK": "4"}), tunedcomm.force("all_reduce", "stale"):
        right = [call(rank, number) for number in range(1, 8)]
        assert right == [True] * 5 + [rank == 0] * 2, "only every fourth call is looked at"
        with pytest.raises(tunedcomm.WrongResultError, match=r"^stale\(.* is wrong: call 8 of .*rank 1: output 0"):
            call(rank, 8)
        assert len(launches) == 8
        decision = tunedcomm.explain(get_communicator(), PROBLEM)
        assert (decision.candidate.variant, decision.source) == ("library", "library")
        assert "TUNEDCOMM_CHECK" in decision.why
        assert all(call(rank, number) for number in range(9, 20))
        assert call(rank, 20, numerics="any")
        with pytest.raises(tunedcomm.InfeasibleError, match="does not admit the library"):
            call(rank, 21, numerics="ordered")
        assert len(launches) == 8


def it_falls_back_where_that_is_set(rank: int) -> None:
    launches.clear()
    with settings({"TUNEDCOMM_CHECK": "3,fallback"}), tunedcomm.force("all_reduce", "stale"):
        with logged() as texts:
            right = [call(rank, number) for number in range(1, 20)]
        assert right == [True] * 19, "call 6 is the first wrong one, and it is looked at"
        assert len(launches) == 6
        assert any("stale(" in text and "rank 1: output 0" in text for text in texts)


def the_caller_who_wants_ordered_sums_gets_no_others(rank: int) -> None:
    launches.clear()
    with settings({"TUNEDCOMM_CHECK": "6,fallback"}), tunedcomm.force("all_reduce", "stale"):
        assert all(call(rank, number, numerics="ordered") for number in range(1, 6))
        with pytest.raises(tunedcomm.WrongResultError):
            call(rank, 6, numerics="ordered")


def right_kernels_pass(rank: int) -> None:
    """Every op, in place and out of place, on odd values; no false alarm, and each call is looked at."""
    norm = {"weight": torch.ones(64), "residual": torch.randn(4, 64)}
    odd = torch.randn(NUMEL)
    odd[::7], odd[1::7], odd[2::7] = float("nan"), float("inf"), -1e38
    held = torch.randn(4, 64)

    def small(*shape: int) -> torch.Tensor:
        return torch.randn(shape).to(torch.float8_e4m3fn)

    symmetric_of = functools.partial(tunedcomm.symmetric_empty, dtype=torch.float32)
    calls = {
        ("all_reduce", "lamport"): [
            lambda: tunedcomm.all_reduce(torch.randn(NUMEL)),
            lambda: tunedcomm.all_reduce_(torch.randn(NUMEL)),
            lambda: tunedcomm.all_reduce(odd, op="avg"),
            lambda: tunedcomm.all_reduce(torch.randn(NUMEL).bfloat16() - rank * 100),
            lambda: tunedcomm.all_reduce((-1.0) ** rank * torch.full((NUMEL,), 7.001)),
            lambda: tunedcomm.all_reduce(symmetric_of(NUMEL).fill_(1.0)),
        ],
        ("all_gather", "lamport"): [lambda: tunedcomm.all_gather(odd), lambda: tunedcomm.all_gather(odd.int())],
        ("reduce_scatter", "lamport"): [lambda: tunedcomm.reduce_scatter(torch.randn(NUMEL))],
        ("all_to_all", "push"): [lambda: tunedcomm.all_to_all(odd)],
        ("all_to_all_v", "push"): [
            lambda: tunedcomm.all_to_all_v(torch.randn(5, 8), *[[2, 3] if rank else [3, 2]] * 2, max_count=4)
        ],
        ("all_reduce_rms_norm", "lamport"): [
            lambda: tunedcomm.all_reduce_rms_norm(torch.randn(4, 64), **norm),
            lambda: tunedcomm.all_reduce_rms_norm(torch.randn(4, 64), torch.ones(64), residual=held, residual_out=held),
        ],
        ("all_reduce_bias", "one_shot"): [lambda: tunedcomm.all_reduce_bias(torch.randn(4, 64), torch.ones(64))],
        ("gemm_ar", "two_shot"): [
            lambda: tunedcomm.gemm_ar(torch.randn(16, 64).bfloat16(), torch.randn(32, 64).bfloat16().t())
        ],
        ("gemm_rs", "push_reduce"): [
            lambda: tunedcomm.gemm_rs(small(16, 64), small(32, 64).t(), scale_a=torch.ones(1), scale_b=torch.ones(1))
        ],
        ("ag_gemm", "sm_persistent"): [
            lambda: tunedcomm.ag_gemm(torch.randn(16, 64).bfloat16(), torch.randn(64, 32).bfloat16())
        ],
    }
    with settings({"TUNEDCOMM_CHECK": "1"}):
        for (op, variant), several in calls.items():
            with tunedcomm.force(op, variant):
                for made in several:
                    for _ in range(2):
                        made()
            assert get_communicator().quarantined == {}, (op, variant)


def numbers_that_are_not_finite_hide_nothing(rank: int) -> None:
    """Nor do those whose squares are too large for fp32."""
    launches.clear()
    with settings({"TUNEDCOMM_CHECK": "6"}), tunedcomm.force("all_reduce", "stale"):
        x = torch.ones(NUMEL)
        x[:4] = torch.tensor([float("inf"), float("nan"), -float("inf"), 3e30])
        for number in range(1, 6):
            tunedcomm.all_reduce(x * number)
        with pytest.raises(tunedcomm.WrongResultError, match="rank 1: output 0"):
            tunedcomm.all_reduce(x * 6)


def ranks_must_agree(rank: int) -> None:
    with settings({"TUNEDCOMM_CHECK": str(rank)}), pytest.raises(tunedcomm.AgreementError, match="check"):
        tunedcomm.all_reduce(torch.ones(5))


CASES: dict[str, Case] = {
    case.__name__: case
    for case in (
        off_asks_nothing, it_raises_on_every_rank_and_the_library_takes_over, it_falls_back_where_that_is_set,
        the_caller_who_wants_ordered_sums_gets_no_others, right_kernels_pass,
        numbers_that_are_not_finite_hide_nothing, ranks_must_agree,
    )
}  # fmt: skip


def body(rank: int, world_size: int) -> dict[str, str]:
    plant(rank)
    return run_cases(CASES, rank)


@pytest.fixture(scope="module")
def outcomes() -> list[dict[str, str]]:
    return run_ranks(WORLD_SIZE, body, timeout=240)


@pytest.mark.parametrize("name", CASES)
def test_result_check(outcomes: list[dict[str, str]], name: str) -> None:
    report(outcomes, name)
