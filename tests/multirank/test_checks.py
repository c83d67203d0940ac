"""Checks that a variable switches on: of calls that differ, of NaN in inputs, and of results of variants."""

from __future__ import annotations

import dataclasses
import functools
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cases import PEER_TIMEOUT_S, Ranks, gives_up_in_time, logged, replaced, settings

import tunedcomm
from tunedcomm import kernels
from tunedcomm.dispatch import communicator as communicator_module
from tunedcomm.dispatch.groups import get_communicator
from tunedcomm.kernels.common.launch import AddressLaunch
from tunedcomm.ops import call as call_module
from tunedcomm.spec import Problem, get_variant, register_variant

WORLD_SIZE = 2
DEBUG, NAN = {"TUNEDCOMM_DEBUG": "1"}, {"TUNEDCOMM_NAN_CHECK": "1"}
NUMEL = 600
TURNS_WRONG_AFTER = 5
PROBLEM = Problem("all_reduce", (NUMEL,), "float32", WORLD_SIZE, mode="eager")
FLOATS = ("bfloat16", "float16", "float32", "float64", "float8_e4m3fn", "float8_e5m2")
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


RANKS = Ranks(setup=plant)


# TUNEDCOMM_DEBUG

Call = Callable[[], Any]


def in_step() -> None:
    for _ in range(2):
        assert torch.equal(tunedcomm.all_reduce(torch.ones(64)), torch.full((64,), 2.0))


def test_calls_that_differ(rank: int) -> None:
    ones = torch.ones
    one = lambda: tunedcomm.all_reduce(ones(64))  # noqa: E731
    rows = functools.partial(tunedcomm.all_to_all_v, ones(4, 2), [2, 2], [2, 2])
    norm = functools.partial(tunedcomm.all_reduce_rms_norm, ones(4, 8), ones(8))

    def products(width: int) -> Call:
        return lambda: tunedcomm.ag_gemm(ones(2, 8), [ones(8, 4), ones(8, width)])

    cases: list[tuple[Call, Call, str]] = [
        (one, lambda: tunedcomm.all_reduce(ones(128)), r"shape is \[64\] on rank 0"),
        (one, lambda: tunedcomm.all_reduce(ones(64).half()), "dtype is 'float32'"),
        (one, lambda: tunedcomm.all_gather(ones(64)), "op is 'all_reduce' on rank 0"),
        (one, lambda: tunedcomm.all_reduce(ones(64), op="avg"), "'avg'"),
        (one, lambda: tunedcomm.all_reduce(ones(64), max_sms=4), "max_sms is None"),
        (one, lambda: tunedcomm.all_reduce(ones(64), numerics="any"), "numerics is"),
        (one, lambda: tunedcomm.all_reduce_(ones(64)), "in_place is False on rank 0"),
        (one, lambda: tunedcomm.all_reduce(ones(0)), r"shape is \[64\] on rank 0"),
        (lambda: tunedcomm.all_gather(ones(4, 4)), lambda: tunedcomm.all_gather(ones(4, 4), dim=1), "options is"),
        (lambda: rows(max_count=4), lambda: rows(max_count=8), "options is"),
        (norm, lambda: norm(residual=ones(4, 8)), "layout is ''"),
        (products(6), products(5), r"shape is \[4, 6, 8\] on rank 0"),
    ]
    with settings(DEBUG):
        in_step()
        for *calls, said in cases:  # each rank makes its own: an error on both at once, and the group is in step
            with gives_up_in_time(0.0), pytest.raises(tunedcomm.AgreementError, match=said):
                calls[rank]()
            in_step()
        with tunedcomm.force("all_reduce", "lamport") if rank else nullcontext():
            with gives_up_in_time(0.0), pytest.raises(tunedcomm.AgreementError, match="force is None on rank 0"):
                one()
        assert not get_communicator().fast_calls, "a call that asks nothing could not be compared"


def test_without_it_calls_are_fast(rank: int) -> None:
    in_step()
    assert get_communicator().fast_calls


# TUNEDCOMM_CHECK


def call(rank: int, number: int, **options: Any) -> bool:
    """True if the result of a call with inputs of its own is right."""
    x = torch.full((NUMEL,), float(number * (rank + 1)))
    return torch.equal(tunedcomm.all_reduce(x, **options), torch.full((NUMEL,), 3.0 * number))


def test_off_asks_nothing(rank: int) -> None:
    with tunedcomm.force("all_reduce", "lamport"):
        for number in range(1, 4):
            assert call(rank, number)
        communicator = get_communicator()
        assert communicator.settings.check == (0, False)
        assert [type(plan.launch) for plan in communicator.plans.values()] == [AddressLaunch]


def test_it_raises_on_every_rank_and_the_library_takes_over(rank: int) -> None:
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


def test_it_falls_back_where_that_is_set(rank: int) -> None:
    launches.clear()
    with settings({"TUNEDCOMM_CHECK": "3,fallback"}), tunedcomm.force("all_reduce", "stale"):
        with logged() as texts:
            right = [call(rank, number) for number in range(1, 20)]
        assert right == [True] * 19, "call 6 is the first wrong one, and it is looked at"
        assert len(launches) == 6
        assert any("stale(" in text and "rank 1: output 0" in text for text in texts)


def test_the_caller_who_wants_ordered_sums_gets_no_others(rank: int) -> None:
    launches.clear()
    with settings({"TUNEDCOMM_CHECK": "6,fallback"}), tunedcomm.force("all_reduce", "stale"):
        assert all(call(rank, number, numerics="ordered") for number in range(1, 6))
        with pytest.raises(tunedcomm.WrongResultError):
            call(rank, 6, numerics="ordered")


def test_right_kernels_pass(rank: int) -> None:
    """Every op, in place and out of place, on odd values; no false alarm, and each call is looked at."""
    odd, held = torch.randn(NUMEL), torch.randn(4, 64)
    odd[::7], odd[1::7], odd[2::7] = float("nan"), float("inf"), -1e38
    ones, drawn, rows = torch.ones, torch.randn, [[2, 3] if rank else [3, 2]] * 2

    def brain(*shape: int) -> torch.Tensor:
        return drawn(shape).bfloat16()

    def eight(*shape: int) -> torch.Tensor:
        return drawn(shape).to(torch.float8_e4m3fn)

    calls: dict[tuple[str, str], list[Callable[[], Any]]] = {
        ("all_reduce", "lamport"): [
            lambda: tunedcomm.all_reduce(drawn(NUMEL)),
            lambda: tunedcomm.all_reduce_(drawn(NUMEL)),
            lambda: tunedcomm.all_reduce(odd, op="avg"),
            lambda: tunedcomm.all_reduce(brain(NUMEL) - rank * 100),
            lambda: tunedcomm.all_reduce((-1.0) ** rank * torch.full((NUMEL,), 7.001)),
            lambda: tunedcomm.all_reduce(tunedcomm.symmetric_empty(NUMEL, dtype=torch.float32).fill_(1.0)),
        ],
        ("all_gather", "lamport"): [lambda: tunedcomm.all_gather(odd), lambda: tunedcomm.all_gather(odd.int())],
        ("reduce_scatter", "lamport"): [lambda: tunedcomm.reduce_scatter(drawn(NUMEL))],
        ("all_to_all", "push"): [lambda: tunedcomm.all_to_all(odd)],
        ("all_to_all_v", "push"): [lambda: tunedcomm.all_to_all_v(drawn(5, 8), *rows, max_count=4)],
        ("all_reduce_rms_norm", "lamport"): [
            lambda: tunedcomm.all_reduce_rms_norm(drawn(4, 64), ones(64), residual=drawn(4, 64)),
            lambda: tunedcomm.all_reduce_rms_norm(drawn(4, 64), ones(64), residual=held, residual_out=held),
        ],
        ("all_reduce_bias", "one_shot"): [lambda: tunedcomm.all_reduce_bias(drawn(4, 64), ones(64))],
        ("gemm_ar", "two_shot"): [lambda: tunedcomm.gemm_ar(brain(16, 64), brain(32, 64).t())],
        ("gemm_rs", "push_reduce"): [
            lambda: tunedcomm.gemm_rs(eight(16, 64), eight(32, 64).t(), scale_a=ones(1), scale_b=ones(1))
        ],
        ("ag_gemm", "sm_persistent"): [lambda: tunedcomm.ag_gemm(brain(16, 64), brain(64, 32))],
    }
    with settings({"TUNEDCOMM_CHECK": "1"}):
        for (op, variant), several in calls.items():
            with tunedcomm.force(op, variant):
                for made in several:
                    for _ in range(2):
                        made()
            assert get_communicator().quarantined == {}, (op, variant)


def test_numbers_that_are_not_finite_hide_nothing(rank: int) -> None:
    """Nor do those whose squares are too large for fp32."""
    launches.clear()
    with settings({"TUNEDCOMM_CHECK": "6"}), tunedcomm.force("all_reduce", "stale"):
        x = torch.ones(NUMEL)
        x[:4] = torch.tensor([float("inf"), float("nan"), -float("inf"), 3e30])
        for number in range(1, 6):
            tunedcomm.all_reduce(x * number)
        with pytest.raises(tunedcomm.WrongResultError, match="rank 1: output 0"):
            tunedcomm.all_reduce(x * 6)


def test_over_more_sizes_than_are_kept_ranks_drop_the_same_plans(rank: int) -> None:
    """Each rank's tensors are aligned at other calls, so it has other fast calls; results are checked, two captured."""
    most, draw = 8, random.Random(1)
    with (
        settings({"TUNEDCOMM_CHECK": "3"}),
        replaced(communicator_module, "MAX_PROBLEMS", most),
        replaced(communicator_module, "MAX_KINDS", most + 2),
        tunedcomm.force("all_reduce", "lamport"),
    ):
        communicator = get_communicator()
        bound: list[list[tuple[int, ...]]] = []
        captured: list[tuple[Any, ...]] = []
        for number in range(150):
            numel = draw.choice(range(40, 60))
            offset = int((number // 8 + rank) % 2)
            x = torch.full((numel + 1,), float(number * (rank + 1)))[offset : offset + numel]
            assert torch.equal(tunedcomm.all_reduce(x), torch.full((numel,), 3.0 * number))
            bound.append(sorted(key[0].shape for key in communicator.plans))
            if number in (5, 90):  # what a GPU's call binds for captures is bound for eager calls here
                (key,) = [key for key in communicator.plans if key[0].shape == (numel,)]
                communicator.keep_plans(key[:-1], {True: communicator.plans[key]})
                with replaced(call_module, "is_capturing", lambda: True):
                    tunedcomm.all_reduce(x)
                captured.append((*key[:-1], True))
        assert len(communicator.plans) == most + 4, "two problems of both modes besides"
        assert len(communicator.fast_calls) <= most + 2
        assert set(captured) <= set(communicator.plans)
        first, second = communicator.exchange((bound, sorted(communicator._checked.values())))
        assert first == second
        assert len({tuple(shapes) for shapes in bound}) > 20, "plans come and go"
        tunedcomm.check_agreement()


# TUNEDCOMM_NAN_CHECK


def with_nan(numel: int, count: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    x = torch.ones(numel)
    x[:: max(numel // max(count, 1), 1)][:count] = float("nan")
    return x.to(dtype)


@contextmanager
def ended_by_nan(match: str) -> Iterator[None]:
    """Inside the block NaN is found, on every rank, which ends the group: a rank may hear of another one's first."""
    dist.barrier()  # a peer may still be in the call before, and would hear of it there
    with pytest.raises((tunedcomm.NanInputError, tunedcomm.GroupAbortedError), match=match):
        yield
    dist.barrier()
    tunedcomm.release_communicator()


def test_every_op_says_where(rank: int) -> None:
    """NaN on every rank: each is told of a rank's."""
    with settings(NAN):
        calls = {
            "all_reduce": tunedcomm.all_reduce,
            "all_to_all": tunedcomm.all_to_all,
            "all_to_all_v": lambda x: tunedcomm.all_to_all_v(x, [len(x) // 2] * 2, [len(x) // 2] * 2, max_count=400),
        }
        for op, call in calls.items():
            for variant in ("library", "push" if op != "all_reduce" else "lamport"):
                with tunedcomm.force(op, variant):
                    for _ in range(2):
                        with ended_by_nan(rf"{op}: (3 NaN in the input of rank 0|4 NaN in the input of rank 1)\."):
                            call(with_nan(600, 3 + rank))
                        assert not torch.isnan(call(torch.ones(600))).any()


def test_every_float_is_searched(rank: int) -> None:
    with settings(NAN):
        for name in FLOATS:
            dtype = getattr(torch, name)
            for _ in range(2):
                with ended_by_nan("all_to_all: 2 NaN"):
                    tunedcomm.all_to_all(with_nan(40, 2, dtype))
            for value in (float("inf"), -float("inf"), torch.finfo(dtype).max, -0.0):
                fine = torch.full((40,), value, dtype=torch.float64).to(dtype)
                if not torch.isnan(fine.float()).any():  # not every dtype has infinities
                    tunedcomm.all_to_all(fine)
        whole = torch.full((6,), -1, dtype=torch.int32)  # bits that would be a NaN
        assert torch.equal(tunedcomm.all_to_all(whole), whole)
        strided = with_nan(80, 80)[::2]
        with ended_by_nan("all_reduce: 40 NaN"):
            tunedcomm.all_reduce(strided)
        assert tunedcomm.all_reduce(torch.empty(0)).shape == (0,)


def test_repeated_calls_are_searched(rank: int) -> None:
    for values, is_fast in ((NAN, False), ({"TUNEDCOMM_NAN_CHECK": None}, True)):
        with settings(values), tunedcomm.force("all_reduce", "lamport"):
            for _ in range(3):
                tunedcomm.all_reduce(torch.ones(64))
            communicator = get_communicator()
            assert {isinstance(plan.launch, AddressLaunch) for plan in communicator.plans.values()} == {is_fast}
            if is_fast:
                assert communicator.nan_watch is None
                assert torch.isnan(tunedcomm.all_reduce(with_nan(64, 1))).any(), "NaN goes through where it is off"
            else:
                with ended_by_nan("all_reduce: 1 NaN"):
                    tunedcomm.all_reduce(with_nan(64, 1))


def test_a_graph_is_heard_of_at_the_next_call(rank: int) -> None:
    """What would be captured is launched here as it is replayed there."""
    with settings(NAN):
        sent: list[Any] = []

        def launch(inputs: tuple[Any, ...], outputs: tuple[Any, ...], stream: int) -> None:
            sent.append(inputs)

        for name in FLOATS:
            communicator = get_communicator()
            dtype = getattr(torch, name)
            problem = Problem("all_to_all", (1500,), name, 2, reduction="")
            captured = communicator.wrap(problem, launch)
            captured((torch.ones(3000).to(dtype),), (), 0)
            communicator.check_peers()
            captured((with_nan(3001, 5, dtype), torch.tensor([-1])), (), 0)
            captured_later = Problem("all_reduce", (7,), name, 2)
            tunedcomm_error = rf"all_to_all: 5 NaN in the input of rank {rank}, in a captured graph"
            with pytest.raises(tunedcomm.NanInputError, match=tunedcomm_error):
                communicator.wrap(captured_later, launch)((torch.ones(7).to(dtype),), (), 0)
            # What is found stays found though there is nothing later in the same place.
            captured((with_nan(9, 1, dtype), torch.ones(9).to(dtype)), (), 0)
            with ended_by_nan("all_to_all: 1 NaN"):
                tunedcomm.all_reduce(torch.ones(5))
            assert torch.equal(tunedcomm.all_reduce(torch.ones(5)), torch.full((5,), 2.0)), "said once"
        assert len(sent) == 3 * len(FLOATS), "replays are not held back"


def test_the_others_are_told_of_a_missing_rank(rank: int) -> None:
    """At once: long before the wait would end."""
    with settings({**NAN, "TUNEDCOMM_PEER_TIMEOUT_S": str(PEER_TIMEOUT_S)}), tunedcomm.force("all_reduce", "one_shot"):
        tunedcomm.all_reduce(torch.ones(64))
        dist.barrier()
        error = tunedcomm.NanInputError if rank == 1 else tunedcomm.GroupAbortedError
        with gives_up_in_time(0.0), pytest.raises(error, match="4 NaN in the input of rank 1"):
            tunedcomm.all_reduce(with_nan(64, 4 * rank))
