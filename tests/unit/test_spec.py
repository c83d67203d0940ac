from __future__ import annotations

import dataclasses
import json
import logging
import os
import pickle
import re
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
from spec_samples import toy_op, toy_variant

from tunedcomm import kernels, spec
from tunedcomm.errors import ConfigError, UnknownNameError
from tunedcomm.hardware import detect
from tunedcomm.space import Choice, Config, PowerOfTwo, Space, Value
from tunedcomm.spec import Candidate, Limits, Problem, Variant
from tunedcomm.symm.layout import limits_for
from tunedcomm.tuner.search.study import default_candidates, infeasible_variants

LIMITS = Limits("cuda", 132, False, 8, 1 << 20, 1 << 20, 1 << 20)


def infeasible(problem: Problem, config: Config, limits: Limits) -> str | None:
    blocks = int(config["num_blocks"])
    return f"{blocks} blocks exceed {limits.max_blocks}" if blocks > limits.max_blocks else None


def register(*names: str, op: str = "all_reduce", **changes: Any) -> None:
    for name in names:
        values = {"infeasible": infeasible, **changes}
        spec.register_variant(toy_variant(op, name, Space({"num_blocks": Choice(4, 8, 16)}), **values))


@pytest.fixture
def _registries(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test registers besides this op is all there is."""
    monkeypatch.setattr(spec, "_ops", {})
    monkeypatch.setattr(spec, "_variants", {})
    spec.register_op(toy_op("all_reduce"))


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"op": "ag_gemm", "shape": (1 << 40, 0, 3), "layout": "nk", "scaling": "rowwise", "dtype": "float8_e4m3fn"},
        {"reduction": "", "input_kind": "symmetric", "in_place": True, "mode": "eager", "world_size": 1024},
    ],
)
def test_problem_survives_json(changes: dict[str, Any]) -> None:
    problem = Problem(**{"op": "all_reduce", "shape": (8,), "dtype": "bfloat16", "world_size": 4, **changes})
    again = Problem.from_dict(json.loads(json.dumps(problem.to_dict())))
    assert (again, again.digest, hash(again)) == (problem, problem.digest, hash(problem))


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


def test_policies() -> None:
    classes: tuple[Any, ...] = ("ordered", "library", "unordered")
    for policy, count in (("ordered", 1), ("default", 2), ("any", 3)):
        assert tuple(name for name in classes if spec.admits(policy, name)) == classes[:count]


@pytest.mark.usefixtures("_registries")
def test_registry_lists_the_library_first_and_names_the_nearest_to_what_is_unknown() -> None:
    register("two_shot", "library", "lamport")
    register("push", op="all_gather")
    assert list(spec.ops()) == ["all_reduce"]
    assert list(spec.variants("all_reduce")) == ["library", "lamport", "two_shot"]
    assert spec.get_variant("all_reduce", "library").is_library
    assert spec.variants("all_to_all") == {}
    with pytest.raises(UnknownNameError, match="'all_reduce'"):
        spec.get_op("allreduce")
    with pytest.raises(UnknownNameError, match="'two_shot'"):
        spec.get_variant("all_reduce", "twoshot")


PROBLEM = Problem("all_reduce", (8,), "bfloat16", 2)


@pytest.mark.usefixtures("_registries")
def test_candidates_are_feasible_and_admitted() -> None:
    register("two_shot")
    register("atomic", numerics="unordered")
    default = spec.candidates(PROBLEM, LIMITS)
    assert [str(candidate) for candidate in default] == ["two_shot(num_blocks=4)", "two_shot(num_blocks=8)"]
    assert len(spec.candidates(PROBLEM, LIMITS, "any")) == 4


@pytest.mark.usefixtures("_registries")
def test_check_candidate_says_why_not() -> None:
    register("two_shot")
    register("spinning", waits_time_out=False)

    def check(variant: str, num_blocks: int, *, by_name: bool = True) -> str:
        candidate = Candidate.of("all_reduce", variant, {"num_blocks": num_blocks})
        return spec.check_candidate(PROBLEM, candidate, LIMITS, by_name=by_name) or ""

    assert check("two_shot", 8) == check("spinning", 8) == ""
    assert check("two_shot", 16) == "16 blocks exceed 8"
    assert "num_blocks=5" in check("two_shot", 5)
    assert "no variant" in check("three_shot", 8)
    assert "for ever" in check("spinning", 8, by_name=False), "one that may wait so runs by name only"


def test_candidates_are_the_same_in_every_process() -> None:
    candidate = Candidate.of("all_reduce", "two_shot", {"num_blocks": 8, "push": "all"})
    load = f"import pickle; c = pickle.loads({pickle.dumps(candidate)!r})"
    code = f"{load}; print(hash(c) == hash((c.op, c.variant, c.config)))"
    environment = {**os.environ, "PYTHONHASHSEED": "1"}
    printed = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert printed.stdout == "True\n"
    assert set(dataclasses.asdict(candidate)) == {"op", "variant", "config"}


def test_a_config_of_another_type_is_no_config() -> None:
    space = Space({"push": Choice(False, True), "num_blocks": Choice(1, 2)})
    assert space.validate({"num_blocks": 1, "push": True}) == {"push": True, "num_blocks": 1}
    for config in ({"push": 1, "num_blocks": 1}, {"push": True, "num_blocks": True}, {"push": [], "num_blocks": 1}):
        with pytest.raises(ConfigError):
            space.validate(config)


def test_former_keywords_of_plug_ins_still_work() -> None:
    variant = toy_variant("toy", "v", bounded=False, untuned=lambda problem, limits: True)
    assert not variant.waits_time_out
    assert variant.default_beats_library(PROBLEM, LIMITS)

    def cleared(problem: Problem, inputs: tuple[Any, ...], outputs: tuple[Any, ...]) -> tuple[Any, Any]:
        return (), outputs

    op = toy_op("toy")
    words: dict[str, Any] = {field.name: getattr(op, field.name) for field in dataclasses.fields(op)}
    del words["time_cold"], words["mask_unspecified"]
    former = type(op)(**words, cold=True, cleared=cleared)  # type: ignore[call-arg]
    assert former.time_cold
    assert former.mask_unspecified(PROBLEM, (1,), (2,)) == ((), (2,))


def test_a_variant_of_no_numerics_class_is_refused() -> None:
    with pytest.raises(ValueError, match="'exact'"):
        spec.register_variant(toy_variant("toy", "v", numerics="exact"))


# Spaces

SPACE = Space({"num_blocks": Choice(4, 8), "num_warps": PowerOfTwo(1, 4), "pdl": Choice(False, True)})


def test_enumerate_gives_every_point_once_the_last_axis_fastest_and_all_are_valid() -> None:
    points = list(SPACE.enumerate())
    assert len(points) == len({tuple(point.items()) for point in points}) == SPACE.size == 12
    assert [tuple(points[place].values()) for place in (0, 1, -1)] == [(4, 1, False), (4, 1, True), (8, 4, True)]
    for point in points:
        clean = SPACE.validate(dict(reversed(point.items())))
        assert clean == point
        assert list(clean) == SPACE.names


@pytest.mark.parametrize(
    ("config", "parts"),
    [
        ([4, 1, True], ["mapping", "list"]),
        (None, ["mapping", "NoneType"]),
        ({"num_blocks": 4, "num_warps": 1}, ["lacks", "'pdl'"]),
        ({"num_blocks": 4, "num_warps": 1, "pdl": True, "stages": 2}, ["unknown axis", "'stages'"]),
        ({"num_blocks": 5, "num_warps": 1, "pdl": True}, ["num_blocks=5", "[4, 8]"]),
        ({"num_blocks": 4, "num_warps": 3, "pdl": True}, ["num_warps=3", "[1, 2, 4]"]),
    ],
)
def test_refusal_names_axis_value_and_what_is_allowed(config: object, parts: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        SPACE.validate(config)
    assert all(part in str(caught.value) for part in parts)


@pytest.mark.parametrize("value", [1, 0, 1.0, "True", None])
def test_types_are_not_mixed_up(value: object) -> None:
    for wrong in ({"num_warps": 1, "pdl": value}, {"num_warps": True, "pdl": True}):
        with pytest.raises(ConfigError):
            SPACE.validate({"num_blocks": 4, **wrong})


def test_suggest_asks_every_axis_with_its_prefix() -> None:
    asked: dict[str, list[Value]] = {}

    class Trial:
        """The part of an Optuna trial that a space uses; it answers with the last choice."""

        def suggest_categorical(self, name: str, choices: list[Value]) -> Value:
            asked[name] = choices
            return choices[-1]

    assert SPACE.suggest(Trial(), prefix="lamport.") == {"num_blocks": 8, "num_warps": 4, "pdl": True}
    assert asked == {"lamport.num_blocks": [4, 8], "lamport.num_warps": [1, 2, 4], "lamport.pdl": [False, True]}


@pytest.mark.parametrize(("low", "high"), [(0, 4), (3, 8), (2, 6), (-2, 4), (8, 4)])
def test_bad_bounds_are_refused(low: int, high: int) -> None:
    with pytest.raises(ValueError, match=rf"{low}.*{high}"):
        PowerOfTwo(low, high)


def test_powers_of_two_hold_both_ends() -> None:
    assert PowerOfTwo(1, 1).values() == (1,)
    assert PowerOfTwo(16, 128).values() == (16, 32, 64, 128)


# Variants of any package are asked by every call: what raises there ends nothing, and is said

GATHER = Problem("all_gather", (4096,), "float32", 2, reduction="", mode="eager")


def raises(*asked: Any) -> Any:
    raise KeyError("num_pieces")


@pytest.fixture
def bring(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[Variant, Limits]]:
    """Registers `bad`, a variant of all_gather with what the test gives."""
    kernels.discover()
    monkeypatch.setattr(spec, "_variants", dict(spec._variants))
    monkeypatch.setattr(spec, "_warned", set())
    like = dataclasses.replace(spec.get_variant("all_gather", "push"), name="bad")
    return lambda **given: (spec.register_variant(dataclasses.replace(like, **given)), limits_for(detect(None), 2))


@pytest.mark.parametrize(
    ("answer", "said"),
    [(raises, r"KeyError: 'num_pieces' at .*test_spec.py:\d+"), (lambda *asked: False, "returned False")],
)
def test_what_cannot_say_whether_it_runs_does_not(
    answer: Any, said: str, bring: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    variant, limits = bring(infeasible=answer)
    with caplog.at_level(logging.WARNING, "tunedcomm"):
        found = {candidate.variant for candidate in spec.candidates(GATHER, limits, "any")}
        reasons = infeasible_variants(GATHER, limits, "any")
    assert ("push" in found, "bad" in found) == (True, False)
    (reason,) = [reason for candidate, reason in dict(reasons).items() if candidate.variant == "bad"]
    assert re.search(said, reason)
    (told,) = (record.message for record in caplog.records)
    assert "variant bad of all_gather" in told
    assert spec.why_no_kernel(GATHER, limits, "any") is None, "the others can"
    assert variant.infeasible_reason(GATHER, {}, limits) == reason


@pytest.mark.parametrize(("answer", "said"), [(raises, "raised KeyError"), (lambda *asked: None, "returned None")])
def test_a_default_that_raises_is_a_named_error_where_it_is_needed(
    answer: Any, said: str, bring: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    variant, limits = bring(default=answer)
    with pytest.raises(ConfigError, match=rf"all_gather\.bad: its default\(\) .*{said}"):
        variant.default_config(GATHER, limits)
    with caplog.at_level(logging.WARNING, "tunedcomm"):
        assert "bad" not in {candidate.variant for candidate in default_candidates(GATHER, limits)}
    assert "all_gather.bad" in caplog.records[-1].message
    tried = {candidate.variant for candidate in spec.candidates(GATHER, limits, "any")}
    assert "bad" in tried, "other configs are tried"
    assert spec.why_no_kernel(GATHER, limits, "any") is None
