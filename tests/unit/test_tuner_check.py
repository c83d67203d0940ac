"""The judge lets no wrong result pass and no right one fail; times are summed up as promised."""

from __future__ import annotations

import math
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tunedcomm.spec import OpSpec, Problem
from tunedcomm.tuner.gang.group import Trouble, Vote, combine
from tunedcomm.tuner.gang.protocol import TrialResult
from tunedcomm.tuner.measure import correctness as check
from tunedcomm.tuner.measure import timing as measure
from tunedcomm.tuner.measure.correctness import Case, fill_sentinel, judge, make_case, odd_problems, plan_cases
from tunedcomm.tuner.measure.trial import TrialRunner, _sentence

Tensors = tuple[torch.Tensor, ...]
DTYPES = ("bfloat16", "float16", "float32")


def make_inputs(problem: Problem, rank: int, seed: int, kind: str, device: torch.device) -> Tensors:
    generator = torch.Generator().manual_seed(seed * 31 + rank)
    dtype = getattr(torch, problem.dtype)
    if kind == "integers":
        return (torch.randint(-8, 9, (problem.numel,), generator=generator).to(dtype),)
    return (torch.randn(problem.numel, generator=generator).to(dtype),)


def reference(problem: Problem, inputs: Sequence[Tensors], rank: int) -> Tensors:
    total = torch.stack([values.double() for (values,) in inputs]).sum(0)
    return (total / len(inputs) if problem.reduction == "avg" else total,)


def ordered(problem: Problem, inputs: Sequence[Tensors], rank: int) -> Tensors:
    total = torch.zeros(problem.numel)
    for (values,) in inputs:
        total += values.float()
    return (total.to(getattr(torch, problem.dtype)),)


SPEC = OpSpec(
    name="judged",
    summary="",
    reductions=("sum", "avg"),
    dtypes=DTYPES,
    shape_help="",
    rank_of_shape=1,
    make_inputs=make_inputs,
    make_outputs=lambda problem, device: (torch.empty(problem.numel, dtype=getattr(torch, problem.dtype)),),
    reference=reference,
    tolerance={"bfloat16": 8e-3, "float16": 1e-3, "float32": 1e-6},
    message_bytes=lambda problem: problem.nbytes,
    busbw_factor=None,
    default_shapes=lambda backend, itemsize: [],
    ordered_reference=ordered,
)


def problem_of(numel: int = 257, dtype: str = "float32", reduction: str = "sum") -> Problem:
    return Problem(op="judged", shape=(numel,), dtype=dtype, world_size=3, reduction=reduction)


def case_of(problem: Problem, kind: str = "random") -> Case:
    return make_case(SPEC, problem, 1, kind=kind, seed=5, device=torch.device("cpu"))


def bits_of(case: Case) -> torch.Tensor:
    assert case.bits is not None
    return case.bits[0].clone()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["random", "integers"])
@pytest.mark.parametrize("strict", [True, False])
def test_right_result_passes(dtype: str, kind: str, strict: bool) -> None:
    problem = problem_of(dtype=dtype)
    case = case_of(problem, kind)
    found = judge(SPEC, problem, case, (bits_of(case),), ordered=strict)
    assert found.right, found.reason
    assert found.error <= SPEC.tolerance[dtype]


def test_untouched_output_is_wrong_under_every_rule() -> None:
    problem = problem_of()
    out = torch.empty(problem.numel)
    fill_sentinel([out])
    for kind in ("random", "integers"):
        for strict in (True, False):
            assert not judge(SPEC, problem, case_of(problem, kind), (out,), ordered=strict).right


def test_candidate_that_leaves_packets_in_an_arena_is_wrong() -> None:
    runner: Any = TrialRunner.__new__(TrialRunner)
    workspace = SimpleNamespace(rearm=lambda mode: 4)
    runner._gang = SimpleNamespace(
        communicator=SimpleNamespace(workspace=workspace), synchronize=bool, barrier=bool, vote=Vote
    )
    runner._benches = []
    found = runner._left_clean(problem_of(), TrialResult(status="ok"))
    assert found.status == "incorrect"
    assert "4 words" in found.reason


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_wrong_element_of_whole_numbers_is_found_and_named(dtype: str) -> None:
    problem = problem_of(100_003, dtype)
    case = case_of(problem, "integers")
    out = bits_of(case)
    out[70_001] += 1
    found = judge(SPEC, problem, case, (out,), ordered=False)
    assert "1 of 100003 elements" in found.reason
    assert "at 70001" in found.reason


def test_single_nan_is_wrong_though_the_rest_is_right() -> None:
    problem = problem_of(4096)
    case = case_of(problem)
    out = bits_of(case)
    out[-1] = math.nan
    assert "nan" in judge(SPEC, problem, case, (out,), ordered=False).reason


def test_last_bit_counts_for_ordered_variants_alone() -> None:
    problem = problem_of()
    case = case_of(problem)
    out = bits_of(case)
    out[3] = torch.nextafter(out[3], torch.tensor(1e9))
    assert judge(SPEC, problem, case, (out,), ordered=False).right
    assert "bits" in judge(SPEC, problem, case, (out,), ordered=True).reason


def test_minus_zero_is_not_plus_zero_to_an_ordered_variant() -> None:
    problem = problem_of(8)
    zeros = tuple(torch.zeros(8) for _ in range(1))
    case = Case("random", zeros, (torch.zeros(8, dtype=torch.float64),), True, zeros)
    out = torch.zeros(8)
    assert judge(SPEC, problem, case, (out,), ordered=True).right
    out[2] = -0.0
    assert not judge(SPEC, problem, case, (out,), ordered=True).right


def test_whole_numbers_that_the_dtype_cannot_hold_are_judged_by_tolerance() -> None:
    problem = problem_of(reduction="avg")
    case = case_of(problem, "integers")
    assert not case.exact
    out = case.expected[0].float() * (1 + 1e-7)
    assert judge(SPEC, problem, case, (out,), ordered=False).right
    assert not judge(SPEC, problem, case, (out * 1.01,), ordered=False).right


def test_wrong_shape_and_missing_output_are_wrong() -> None:
    problem = problem_of()
    case = case_of(problem)
    assert "shape" in judge(SPEC, problem, case, (torch.zeros(4),), ordered=False).reason
    assert "outputs" in judge(SPEC, problem, case, (), ordered=False).reason


def test_odd_sizes_lie_next_to_the_shape_and_large_messages_are_spared() -> None:
    assert [p.shape for p in odd_problems(SPEC, problem_of(1024))] == [(1023,), (1027,)]
    assert [p.shape for p in odd_problems(SPEC, problem_of(1))] == [(4,)]
    large = problem_of((check.LARGE_BYTES // 4) + 1)
    assert odd_problems(SPEC, large) == []
    assert [kind for kind, _ in plan_cases(large, full=True)] == ["random"]
    assert [kind for kind, _ in plan_cases(problem_of(), full=True)] == ["random", "integers"]
    assert [kind for kind, _ in plan_cases(problem_of(), full=False)] == ["random"]


def test_latency_is_the_slowest_ranks_of_each_round() -> None:
    latency = measure.summarise([[1.0, 9.0, 3.0, 2.0, 5.0], [4.0, 1.0, 8.0, 2.0, 6.0]])
    assert (latency.p50_us, latency.samples) == (6.0, 5)
    assert latency.p10_us == pytest.approx(2.8)  # rounds: 4, 9, 8, 2, 6
    assert latency.p90_us == pytest.approx(8.6)


def test_vote_names_the_ranks_with_the_heaviest_trouble() -> None:
    verdict = combine([(0, ""), (int(Trouble.HUNG), "waited"), (int(Trouble.CRASHED), "boom")])
    assert (verdict.trouble, verdict.reason) == (Trouble.CRASHED, "on rank 2 of 3: boom")
    assert combine([(2, "no ptx"), (2, "no ptx")]).reason == "no ptx"
    assert Trouble.CRASHED.status == "crashed"
    assert Trouble.NONE.status == "ok"


def test_reason_of_an_error_says_where_it_was_raised() -> None:
    with pytest.raises(ValueError, match="planted") as caught:
        exec(compile("\nraise ValueError('planted')", "/somewhere/my_variant.py", "exec"))
    assert _sentence(caught.value) == "ValueError: planted at my_variant.py:2"
    assert _sentence(ValueError("never raised")) == "ValueError: never raised"


@pytest.mark.parametrize(
    "like",
    [torch.empty(5), torch.empty(4, 3, dtype=torch.bfloat16).t(), torch.empty(0), torch.empty(7, dtype=torch.uint8)],
    ids=["vector", "transposed", "empty", "bytes"],
)
@pytest.mark.parametrize("is_input", [False, True])
def test_bytes_around_a_tensor_are_watched(like: torch.Tensor, is_input: bool) -> None:
    guarded = check.guard(like, "it", is_input=is_input)
    tensor = guarded.tensor
    assert (tensor.shape, tensor.stride(), tensor.dtype) == (like.shape, like.stride(), like.dtype)
    assert tensor.data_ptr() % 16 == 0
    tensor.fill_(3)
    assert not check.find_damage([guarded])
    guarded.before[-20:-16] = 1
    guarded.behind[9] = 2
    said = check.find_damage([guarded])
    assert "4 bytes before it, up to 20 bytes away" in said
    assert "1 bytes behind it, up to 10 bytes away" in said
    assert not check.find_damage([guarded]), "damage is told once"


def test_output_of_nothing_but_zeros_must_be_written_too() -> None:
    problem = problem_of()
    zeros = torch.zeros(problem.numel)
    case = Case("integers", (zeros,), (zeros.double(),), exact=True, bits=(zeros,))
    out = torch.empty(problem.numel)
    fill_sentinel([out])
    for strict in (True, False):
        assert judge(SPEC, problem, case, (zeros,), ordered=strict).right
        assert not judge(SPEC, problem, case, (out,), ordered=strict).right
