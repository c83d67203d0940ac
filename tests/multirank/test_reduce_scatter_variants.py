"""Every reduce_scatter variant on the host backend, against float64 and, for `ordered` ones, against exact bits."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch
from cases import Case, report, run_cases
from harness import run_ranks
from quick import some
from variant_checks import bits_of, check_variant, inputs_of_all, launch_variant

from tunedcomm import kernels
from tunedcomm.dispatch.communicator import get_communicator
from tunedcomm.spec import Problem, variants

kernels.discover()
KERNELS = sorted(name for name, variant in variants("reduce_scatter").items() if variant.kernels)
ORDERED = sorted(name for name in KERNELS if variants("reduce_scatter")[name].numerics == "ordered")
SIZES = (1, 7, 64, 1000, 4099)
WORLD_SIZES = (2, 3, 4)
DTYPES = {2: ("bfloat16", "float16"), 3: ("float16", "bfloat16", "float32"), 4: ("float32", "bfloat16")}


def problem_of(numel: int, dtype: str, world_size: int, reduction: str = "sum") -> Problem:
    return Problem("reduce_scatter", (numel,), dtype, world_size, reduction=reduction, mode="eager")


def sizes(variant: str, rank: int) -> None:
    """Sizes up and down on one lane: every call leaves the lane fit for any other."""
    communicator = get_communicator()
    world_size = communicator.world_size
    for seed, numel in some(enumerate((*SIZES, *reversed(SIZES)))):
        problem = problem_of(numel, DTYPES[world_size][0], world_size, ("avg", "sum")[seed % 2])
        check_variant(communicator, problem, variant, seed=seed, kind="integers" if seed % 3 == 0 else "random")


def awkward(problem: Problem, seed: int) -> list[tuple[torch.Tensor, ...]]:
    """Every rank's inputs, with values in every chunk whose bits are easily lost."""
    everyone = inputs_of_all(problem, seed, "random")
    for rank, (x,) in enumerate(everyone):
        tiny = torch.finfo(x.dtype).smallest_normal / 8
        values = torch.tensor([0.0, -0.0, tiny, -tiny, float("inf"), float("nan"), 1.0, -1.0]).to(x.dtype)
        for chunk in x.view(problem.world_size, -1):
            chunk[:8] = values
            chunk[8:10] = -0.0  # a word of negative zeros on every rank
            chunk[10] = tiny if rank % 2 else -tiny
    return everyone


def same_as_all_reduce(rank: int) -> None:
    """Ordered variants on awkward inputs have the bits of the same part of an ordered all_reduce."""
    communicator = get_communicator()
    world_size = communicator.world_size
    for dtype in DTYPES[world_size]:
        for numel, reduction in ((512, "sum"), (515, "sum"), (515, "avg")):
            problem = problem_of(numel, dtype, world_size, reduction)
            everyone = awkward(problem, 3)
            whole = Problem("all_reduce", (numel * world_size,), dtype, world_size, reduction=reduction, mode="eager")
            (reduced,) = launch_variant(communicator, whole, "two_shot", (everyone[rank][0].clone(),))
            expected = bits_of(reduced.view(world_size, -1)[rank])
            for variant in ORDERED:
                (out,) = launch_variant(communicator, problem, variant, (everyone[rank][0].clone(),))
                assert torch.equal(bits_of(out), expected), (variant, reduction, numel)
                assert bits_of(out)[8] == 0, "negative zeros sum to +0.0"


def library(rank: int) -> None:
    """The library takes every dtype and reduction that the public function admits."""
    communicator = get_communicator()
    world_size = communicator.world_size
    made = inputs_of_all(problem_of(37, "float32", world_size), 5, "integers")
    for dtype in ("bfloat16", "float16", "float32", "float64", "int8", "uint8", "int32", "int64"):
        for reduction in ("sum", "max", "min", *(("avg",) if "float" in dtype else ())):
            problem = problem_of(37, dtype, world_size, reduction)
            everyone = [((x.abs() if dtype == "uint8" else x).to(getattr(torch, dtype)),) for (x,) in made]
            (out,) = launch_variant(communicator, problem, "library", (everyone[rank][0].clone(),))
            stack = torch.stack([x.view(world_size, -1)[rank].double() for (x,) in everyone])
            reduced = {"sum": stack.sum(0), "avg": stack.mean(0), "max": stack.amax(0), "min": stack.amin(0)}[reduction]
            error = (out.double() - reduced).abs().max()
            assert error <= (0.02 if reduction == "avg" else 0), (dtype, reduction, error)


CASES: dict[str, Case] = {
    **{f"sizes of {variant}": functools.partial(sizes, variant) for variant in KERNELS},
    "same bits as all_reduce": same_as_all_reduce,
    "library": library,
}


def cases_of(world_size: int) -> dict[str, Case]:
    """Pieces are the same for any number of ranks, and cost the most time: three ranks are enough for them."""
    return {name: case for name, case in CASES.items() if world_size == 3 or name != "many chunks"}


def cases_body(rank: int, world_size: int) -> dict[str, str]:
    return run_cases(cases_of(world_size), rank)


@pytest.fixture(scope="module")
def outcomes() -> Callable[[int], list[dict[str, str]]]:
    return functools.cache(lambda world_size: run_ranks(world_size, cases_body, timeout=240))


@pytest.mark.parametrize(("world_size", "name"), [(size, name) for size in WORLD_SIZES for name in cases_of(size)])
def test_variants(outcomes: Callable[[int], list[dict[str, str]]], world_size: int, name: str) -> None:
    report(outcomes(world_size), name)


def eight_body(rank: int, world_size: int) -> bool:
    """The largest group that kernels serve, every variant once."""
    for variant in KERNELS:
        check_variant(get_communicator(), problem_of(333, "bfloat16", world_size), variant, seed=1)
    return True


@pytest.mark.slow
def test_eight_ranks() -> None:
    assert run_ranks(8, eight_body, timeout=240) == [True] * 8
