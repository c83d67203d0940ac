from __future__ import annotations

import dataclasses
import json
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tunedcomm import spec
from tunedcomm.errors import UnknownNameError
from tunedcomm.space import Choice, Config, Space
from tunedcomm.spec import Candidate, Limits, OpSpec, Problem, Variant

LIMITS = Limits(
    backend="cuda",
    num_sms=132,
    multicast=False,
    max_blocks=8,
    staging_bytes=1 << 20,
    one_shot_bytes=1 << 20,
    stage_bytes=1 << 20,
)


def make_op(name: str) -> OpSpec:
    return OpSpec(
        name=name,
        summary="does nothing",
        reductions=("sum",),
        dtypes=("bfloat16",),
        shape_help="(numel,)",
        rank_of_shape=1,
        make_inputs=lambda problem, rank, seed, kind, device: (),
        make_outputs=lambda problem, device: (),
        reference=lambda problem, inputs, rank: (),
        tolerance={"bfloat16": 0.0},
        message_bytes=lambda problem: problem.nbytes,
        busbw_factor=None,
        default_shapes=lambda backend, itemsize: [(1,)],
    )


def infeasible(problem: Problem, config: Config, limits: Limits) -> str | None:
    blocks = int(config["num_blocks"])
    return f"{blocks} blocks exceed {limits.max_blocks}" if blocks > limits.max_blocks else None


def make_variant(op: str, name: str, numerics: spec.Numerics = "ordered") -> Variant:
    return Variant(
        op=op,
        name=name,
        numerics=numerics,
        summary="does nothing",
        space=Space({"num_blocks": Choice(4, 8, 16)}),
        infeasible=infeasible,
        default=lambda problem, limits: {"num_blocks": 4},
        bind=lambda problem, config, workspace: lambda inputs, outputs, stream: None,
        num_blocks=lambda problem, config: int(config["num_blocks"]),
    )


@pytest.fixture
def registries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Empty registries, so that what a test registers is all there is."""
    monkeypatch.setattr(spec, "_ops", {})
    monkeypatch.setattr(spec, "_variants", {})


problems = st.builds(
    Problem,
    op=st.sampled_from(["all_reduce", "ag_gemm"]),
    shape=st.lists(st.integers(0, 1 << 40), min_size=1, max_size=3).map(tuple),
    dtype=st.sampled_from(spec.DTYPES),
    world_size=st.integers(1, 1024),
    reduction=st.sampled_from(["sum", "avg", ""]),
    input_kind=st.sampled_from(["plain", "symmetric"]),
    in_place=st.booleans(),
    layout=st.sampled_from(["", "nk"]),
    scaling=st.sampled_from(["", "rowwise"]),
    mode=st.sampled_from(["graph", "eager"]),
)


@given(problems)
def test_problem_survives_json(problem: Problem) -> None:
    again = Problem.from_dict(json.loads(json.dumps(problem.to_dict())))
    assert again == problem
    assert again.digest == problem.digest
    assert hash(again) == hash(problem)


def test_digest_is_stable_between_releases() -> None:
    assert Problem("all_reduce", (98304,), "bfloat16", 4).digest == "7782958ba2601304815ef3f22d9348e6"


def test_sizes_of_a_problem() -> None:
    problem = Problem("ag_gemm", (4, 3, 5), "bfloat16", 2)
    assert (problem.numel, problem.nbytes) == (60, 120)
    assert problem.family == dataclasses.replace(problem, shape=())
    assert Problem("all_reduce", (0,), "float32", 2).nbytes == 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dtype": "bf16"}, "bf16.*bfloat16"),
        ({"world_size": 0}, "world_size.*0"),
        ({"input_kind": "pinned"}, "pinned"),
        ({"mode": "lazy"}, "lazy"),
        ({"colour": "red"}, "colour"),
        ({"shape": None}, "not a problem"),
        ({"shape": ["wide"]}, "wide"),
    ],
)
def test_bad_problem_is_refused(change: dict[str, Any], message: str) -> None:
    data = {**Problem("all_reduce", (8,), "bfloat16", 2).to_dict(), **change}
    with pytest.raises(ValueError, match=message):
        Problem.from_dict(data)


@pytest.mark.parametrize("text", ["", "x", "4x", "4,8", "four", "-1", "4x-8", "1.5"])
def test_bad_shape_text_is_named(text: str) -> None:
    with pytest.raises(ValueError, match=f"shape {re.escape(repr(text))}"):
        spec.parse_shape(text)


@pytest.mark.parametrize(
    ("policy", "admitted"),
    [("default", {"ordered", "library"}), ("ordered", {"ordered"}), ("any", {"ordered", "library", "unordered"})],
)
def test_policies(policy: spec.NumericsPolicy, admitted: set[str]) -> None:
    classes: tuple[spec.Numerics, ...] = ("ordered", "library", "unordered")
    assert {name for name in classes if spec.admits(policy, name)} == admitted


@pytest.mark.usefixtures("registries")
def test_registry_lists_the_library_first() -> None:
    spec.register_op(make_op("all_reduce"))
    for name in ("two_shot", "library", "lamport"):
        spec.register_variant(make_variant("all_reduce", name))
    spec.register_variant(make_variant("all_gather", "push"))
    assert list(spec.ops()) == ["all_reduce"]
    assert list(spec.variants("all_reduce")) == ["library", "lamport", "two_shot"]
    assert spec.get_variant("all_reduce", "library").is_library
    assert spec.variants("all_to_all") == {}


@pytest.mark.usefixtures("registries")
def test_unknown_names_come_with_the_nearest() -> None:
    spec.register_op(make_op("all_reduce"))
    spec.register_variant(make_variant("all_reduce", "two_shot"))
    with pytest.raises(UnknownNameError, match="did you mean 'all_reduce'"):
        spec.get_op("allreduce")
    with pytest.raises(UnknownNameError, match="did you mean 'two_shot'"):
        spec.get_variant("all_reduce", "twoshot")


@pytest.mark.usefixtures("registries")
def test_candidates_are_feasible_and_admitted() -> None:
    spec.register_op(make_op("all_reduce"))
    spec.register_variant(make_variant("all_reduce", "two_shot"))
    spec.register_variant(make_variant("all_reduce", "atomic", numerics="unordered"))
    problem = Problem("all_reduce", (8,), "bfloat16", 2)
    default = spec.candidates(problem, LIMITS)
    assert [str(candidate) for candidate in default] == ["two_shot(num_blocks=4)", "two_shot(num_blocks=8)"]
    assert len(spec.candidates(problem, LIMITS, "any")) == 4


@pytest.mark.usefixtures("registries")
def test_check_candidate_says_why_not() -> None:
    spec.register_op(make_op("all_reduce"))
    spec.register_variant(make_variant("all_reduce", "two_shot"))
    problem = Problem("all_reduce", (8,), "bfloat16", 2)

    def check(variant: str, config: Config) -> str | None:
        return spec.check_candidate(problem, Candidate.of("all_reduce", variant, config), LIMITS)

    assert check("two_shot", {"num_blocks": 8}) is None
    assert check("two_shot", {"num_blocks": 16}) == "16 blocks exceed 8"
    assert "num_blocks=5" in (check("two_shot", {"num_blocks": 5}) or "")
    assert "no variant" in (check("three_shot", {"num_blocks": 8}) or "")


@pytest.mark.usefixtures("registries")
def test_a_variant_that_may_wait_for_ever_runs_by_name_only() -> None:
    spec.register_op(make_op("all_reduce"))
    spec.register_variant(dataclasses.replace(make_variant("all_reduce", "spinning"), bounded=False))
    problem = Problem("all_reduce", (8,), "bfloat16", 2)
    candidate = Candidate.of("all_reduce", "spinning", {"num_blocks": 8})
    assert spec.check_candidate(problem, candidate, LIMITS) is None
    assert "wait for a lost peer for ever" in (spec.check_candidate(problem, candidate, LIMITS, by_name=False) or "")


def test_a_variant_of_no_numerics_class_is_refused() -> None:
    with pytest.raises(ValueError, match=r"numerics must be one of \['library', 'ordered', 'unordered'\], got 'exact'"):
        spec.register_variant(dataclasses.replace(make_variant("toy", "v"), numerics="exact"))  # type: ignore[arg-type]
