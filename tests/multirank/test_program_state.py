"""The state of the program (default dtype, inference mode, NumPy's error state, …) changes nothing of any result."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from cases import HOST, Ranks, settings
from harness import run_ranks
from program_states import CLEAN, STATES, Results, cases, differences, results_of
from quick import QUICK, some

import tunedcomm
from tunedcomm import spec
from tunedcomm.spec import Problem, Variant, get_op, register_variant, variants

RANKS = Ranks(env=HOST, forget=False)
LARGE = 40_000  # elements that host_two_shot sums


@pytest.mark.parametrize("world_size", [3])
@pytest.mark.parametrize("default", [torch.bfloat16, torch.float16, torch.float64])
def test_sums_are_made_in_fp32(rank: int, world_size: int, default: torch.dtype) -> None:
    """Whatever the default dtype was at the group's first call: 256 + 1 + 1 in bf16 is 258."""
    for numel in (64, LARGE):
        x, found = torch.full((numel,), 1.0 if rank else 256.0, dtype=torch.bfloat16), []
        with settings({}):
            torch.set_default_dtype(default)
            try:
                found += [tunedcomm.all_reduce(x) for _ in range(2)]
            finally:
                torch.set_default_dtype(torch.float32)
            found.append(tunedcomm.all_reduce(x))
        for out in found:
            assert torch.equal(out, torch.full_like(out, 258.0))


@pytest.mark.parametrize("numel", [64, LARGE])
def test_numpy_that_raises(rank: int, numel: int) -> None:
    """Sums that overflow, or have no value, are inf and NaN."""
    x = torch.full((numel,), 3e38)
    x[1] = float("inf") if rank else float("-inf")
    with settings({}), np.errstate(all="raise"):
        for _ in range(3):
            found = tunedcomm.all_reduce(x)
            assert found[0] == float("inf")
            assert found[1].isnan()


def observed() -> tuple[Any, ...]:
    """The state that a sample, a reference or a launch would see now."""
    switches = (torch.is_autocast_enabled("cpu"), torch.is_inference_mode_enabled(), torch.is_grad_enabled())
    precision = (torch.get_float32_matmul_precision(), torch.are_deterministic_algorithms_enabled())
    made = torch.empty(1)
    return (made.dtype, made.device.type, type(made), *switches, *precision)


@pytest.mark.parametrize("state", list(STATES))
def test_trials_see_no_state(rank: int, state: str) -> None:
    """Samples, references and launches; the program finds its state again."""
    op, seen = get_op("all_reduce"), set()

    def watched(function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any) -> Any:
            seen.add(observed())
            return function(*arguments)

        return run

    def bind(variant: Variant, *arguments: Any) -> Any:
        return watched(variant.bind(*arguments))

    held = {name: variant for name, variant in variants(op.name).items() if not variant.kernels}
    spec._ops[op.name] = replace(op, make_inputs=watched(op.make_inputs), reference=watched(op.reference))
    for variant in held.values():
        register_variant(replace(variant, bind=functools.partial(bind, variant)))
    try:
        with STATES[state]("cpu"):
            before = observed()
            problem = Problem(op.name, (1000 + list(STATES).index(state),), "float32", 2, mode="eager")
            tuned = tunedcomm.autotune([problem], budget_s=1.0)
            if not tuned.num_trials:  # on a busy machine
                tuned = tunedcomm.autotune([problem], budget_s=20.0)
            assert observed() == before
    finally:
        spec._ops[op.name] = op
        for variant in held.values():
            register_variant(variant)
    assert tuned.num_trials > 0
    assert seen == {(torch.float32, "cpu", torch.Tensor, False, False, False, "highest", False)}


# Interpreted kernels take long, so one variant of each op that keeps tensors.
KERNELS = {} if QUICK else {"all_reduce fp32": ("lamport",), "ep_dispatch": ("push",), "ep_combine": ("push",)}


def matrix_body(rank: int, world_size: int, state: str, alone: tuple[bool, ...]) -> list[Results]:
    every = tuple(range(world_size))
    return [results_of(state, (0,) if one else every, rank, world_size, "cpu", KERNELS) for one in alone]


@functools.cache
def fresh_results() -> list[list[Results]]:
    """By rank, of processes in which no state was ever set."""
    return run_ranks(2, matrix_body, CLEAN, (False,), timeout=280, env=HOST)


@pytest.mark.parametrize("state", some([state for state in STATES if state != CLEAN], 4))
def test_every_op_in_every_state(state: str) -> None:
    """On all ranks, and on one alone."""
    wanted, wrong, count = fresh_results(), [], 0
    for rank, found in enumerate(run_ranks(2, matrix_body, state, (False, True), timeout=280, env=HOST)):
        for who, results in zip(("all ranks", "rank 0 alone"), found, strict=True):
            wrong += [f"{who}, on rank {rank}: {text}" for text in differences(state, results, wanted[rank][0])]
            count += len(results)
    assert not wrong, "\n".join(wrong)
    assert count >= 2 * 2 * len(cases(0, 2, "cpu"))
