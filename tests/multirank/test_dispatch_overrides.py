"""What runs instead of what is tuned: what is forced, what settings say, and what another snapshot holds."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any

import pytest
import torch
from cases import logged, report, same_bits, settings
from dispatch_table import (
    MIDDLE,
    SMALL,
    TUNED,
    check_tuned,
    inputs_of,
    launched,
    problem,
    ran,
    run_on_table,
    run_with_table,
    tuned_config,
)

import tunedcomm
from tunedcomm.dispatch.communicator import get_communicator
from tunedcomm.spec import Problem, get_variant, register_variant


def forced(rank: int) -> None:
    x, expected = inputs_of(rank, SMALL)
    chosen = {"num_blocks": 2, "num_warps": 2, "items": 2}

    def name_of() -> str:
        name, out = ran(lambda: tunedcomm.all_reduce(x))
        assert name == "library" or same_bits(out, expected)
        return name

    assert name_of() == "lamport"
    with tunedcomm.force("all_reduce", "two_shot"):
        assert name_of() == "two_shot"
        assert tunedcomm.explain(get_communicator(), problem(SMALL)).source == "forced"
        with tunedcomm.force("all_reduce", "one_shot", chosen):
            assert name_of() == "one_shot"
            assert launched[0].config == chosen
            chosen["num_blocks"] = 1  # the caller's dict is the caller's
            assert name_of() == "one_shot"
            with tunedcomm.force("all_reduce", "library"):
                assert name_of() == "library"
            with pytest.raises(ZeroDivisionError), tunedcomm.force("all_reduce", "library"):
                raise ZeroDivisionError
            assert name_of() == "one_shot"
        assert name_of() == "two_shot"
    assert name_of() == "lamport"


def forced_in_vain(rank: int) -> None:
    x = torch.ones(SMALL)
    wrong: list[tuple[tuple[Any, ...], type[Exception], str]] = [
        (("all_reduce", "lamprt"), tunedcomm.UnknownNameError, "no variant 'lamprt'; did you mean 'lamport'"),
        (("all_reduse", "lamport"), tunedcomm.UnknownNameError, "unknown op 'all_reduse'; did you mean 'all_reduce'"),
        (("all_reduce", "lamport", {"num_blocks": 3}), tunedcomm.ConfigError, "num_blocks=3 is not in its axis"),
        (("all_reduce", "library", {"num_blocks": 1}), tunedcomm.ConfigError, "unknown axis 'num_blocks'"),
    ]
    for arguments, error, text in wrong:
        with pytest.raises(error, match=text), tunedcomm.force(*arguments):
            raise AssertionError("the block must not be entered")
    # Known, but not for this problem, on this machine, or in this space's point.
    with tunedcomm.force("all_reduce", "torch_one_shot"):
        with pytest.raises(tunedcomm.InfeasibleError, match=r"torch_one_shot.* is forced for .*need GPUs"):
            tunedcomm.all_reduce(x)
    with tunedcomm.force("all_reduce", "multimem_one_shot"):
        with pytest.raises(tunedcomm.InfeasibleError, match=r"multimem_one_shot.* is forced for .*multicast"):
            tunedcomm.all_reduce(x)
    with tunedcomm.force("all_reduce", "lamport"):
        with pytest.raises(tunedcomm.InfeasibleError, match="max goes to the library"):
            tunedcomm.all_reduce(x, op="max")
        with pytest.raises(tunedcomm.InfeasibleError, match="float64 goes to the library"):
            tunedcomm.all_reduce(x.double())
        with pytest.raises(tunedcomm.InfeasibleError, match="exceed a stage"):
            tunedcomm.all_reduce(torch.ones(1 << 20))
    with tunedcomm.force("all_reduce", "one_shot", {"num_blocks": 4, "num_warps": 16, "items": 2}):
        with pytest.raises(tunedcomm.InfeasibleError, match="without work"):
            tunedcomm.all_reduce(x)
    check_tuned(rank, SMALL, "lamport", "exact")


def a_plan_that_cannot_be_bound(rank: int) -> None:
    """What only turns out when the kernel is loaded: the library instead, if the policy allows it."""
    real = get_variant("all_reduce", "lamport")

    def too_large(problem: Problem, config: Any, workspace: Any) -> Any:
        raise tunedcomm.InfeasibleError("4 blocks do not fit on 1 SM")

    register_variant(dataclasses.replace(real, bind=too_large))
    communicator = get_communicator()
    communicator.forget_plans()
    try:
        x, _ = inputs_of(rank, SMALL)
        with logged() as warnings:
            name, _ = ran(lambda: tunedcomm.all_reduce(x))
        assert name == "library"
        assert len(warnings) == 1
        assert "do not fit on 1 SM" in warnings[0]
        plan = communicator.plans[Problem("all_reduce", (SMALL,), "float32", 2, mode="eager"), "default", None, False]
        assert plan.decision.candidate.variant == "library"
        assert "do not fit on 1 SM" in plan.decision.why
        for policy, context in (("ordered", None), ("default", "lamport")):
            with pytest.raises(tunedcomm.InfeasibleError, match="do not fit on 1 SM"):
                with tunedcomm.force("all_reduce", context) if context else contextlib.nullcontext():
                    tunedcomm.all_reduce(x, numerics=policy)
    finally:
        register_variant(real)
        tunedcomm.release_communicators()
    check_tuned(rank, SMALL, "lamport", "exact")


def few_sms(rank: int) -> None:
    x, expected = inputs_of(rank, MIDDLE)
    blocks = {name: int(tuned_config(name, MIDDLE)["num_blocks"]) for name in TUNED[MIDDLE]}
    most = max(blocks.values())
    for _ in range(2):  # the second time from the cache, in turn with calls of other limits
        for limit in (None, 512, most, 1, 0):
            name, out = ran(lambda limit=limit: tunedcomm.all_reduce(x, max_sms=limit))  # type: ignore[misc]
            fitting = [v for v in blocks if limit is None or blocks[v] <= limit]
            assert (name in fitting) if fitting else name == "library"
            assert name == "library" or same_bits(out, expected)
    assert "max_sms=0" in str(tunedcomm.explain(get_communicator(), problem(MIDDLE), max_sms=0).passed_over)


def mode_off(rank: int) -> None:
    x, _ = inputs_of(rank, SMALL)
    with settings({"TUNEDCOMM_MODE": "off"}):
        assert ran(lambda: tunedcomm.all_reduce(x))[0] == "library"
        with tunedcomm.force("all_reduce", "one_shot"):
            assert ran(lambda: tunedcomm.all_reduce(x))[0] == "one_shot"
    assert ran(lambda: tunedcomm.all_reduce(x))[0] == "lamport"


def mode_force(rank: int) -> None:
    x, _ = inputs_of(rank, SMALL)
    with settings({"TUNEDCOMM_MODE": "force"}):
        assert ran(lambda: tunedcomm.all_reduce(x))[0] == "lamport"
        with pytest.raises(
            tunedcomm.InfeasibleError,
            match=r"TUNEDCOMM_MODE=force, but no database .*tunedcomm tune --op all_reduce --shape 1024",
        ):
            tunedcomm.all_reduce(x.bfloat16())
        asked = dataclasses.replace(problem(SMALL), dtype="bfloat16")
        said = "with TUNEDCOMM_MODE=force a call raises InfeasibleError"
        assert tunedcomm.explain(get_communicator(), asked).why.endswith(said)
        assert said not in tunedcomm.explain(get_communicator(), problem(SMALL)).why
        with tunedcomm.force("all_reduce", "library"):
            assert ran(lambda: tunedcomm.all_reduce(x.bfloat16()))[0] == "library"


def forced_by_setting(rank: int) -> None:
    x, expected = inputs_of(rank, SMALL)
    with settings({"TUNEDCOMM_FORCE_ALL_REDUCE": "two_shot_lamport"}):
        name, out = ran(lambda: tunedcomm.all_reduce(x))
        assert name == "two_shot_lamport"
        assert same_bits(out, expected)
        with tunedcomm.force("all_reduce", "one_shot"):
            assert ran(lambda: tunedcomm.all_reduce(x))[0] == "one_shot"
        with pytest.raises(tunedcomm.InfeasibleError, match="max goes to the library"):
            tunedcomm.all_reduce(x, op="max")
    with settings({"TUNEDCOMM_FORCE_ALL_REDUCE": "lamprt"}):
        with pytest.raises(tunedcomm.UnknownNameError, match=r"TUNEDCOMM_FORCE_ALL_REDUCE='lamprt': .*'lamport'"):
            tunedcomm.all_reduce(x)


CASES = {
    "force": forced,
    "force in vain": forced_in_vain,
    "a plan that cannot be bound": a_plan_that_cannot_be_bound,
    "TUNEDCOMM_MODE=off": mode_off,
    "max_sms": few_sms,
    "TUNEDCOMM_MODE=force": mode_force,
    "TUNEDCOMM_FORCE_ALL_REDUCE": forced_by_setting,
}


def body(rank: int, world_size: int) -> dict[str, str]:
    return run_on_table(CASES, rank)


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    return run_with_table(body, tmp_path_factory.mktemp("dispatch"))


@pytest.mark.parametrize("name", CASES)
def test_dispatch(outcomes: list[dict[str, str]], name: str) -> None:
    report(outcomes, name)
