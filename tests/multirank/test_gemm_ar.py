"""Every gemm_ar variant on the host backend, against float64."""

from __future__ import annotations

import functools
import os
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cases import PEER_TIMEOUT_S, Case, gives_up_in_time, report, run_cases
from harness import run_ranks
from quick import some
from variant_checks import check_variant, inputs_of_all, launch_variant, limits_of

import tunedcomm
from tunedcomm import kernels
from tunedcomm.dispatch.communicator import get_communicator
from tunedcomm.spec import Problem, variants

kernels.discover()
KERNELS = sorted(name for name, variant in variants("gemm_ar").items() if variant.kernels)
WORLD_SIZES = (2, 3)
# The last rows and columns of tiles hang over, and so does the depth.
SHAPES = ((40, 72, 40), (7, 136, 72), (33, 24, 56))


def problem_of(shape: tuple[int, ...], world_size: int, layout: str = "nk", **named: Any) -> Problem:
    dtype = named.pop("dtype", "bfloat16")
    return Problem("gemm_ar", shape, dtype, world_size, layout=layout, mode="eager", **named)


def drawn(variant: str, problem: Problem, seed: int) -> dict[str, Any]:
    """A feasible config of the variant, drawn at random, its algorithms in turn; the same on every rank."""
    found, limits = variants("gemm_ar")[variant], limits_of(get_communicator())
    feasible = [c for c in found.space.enumerate() if found.infeasible(problem, c, limits) is None]
    algorithms = sorted({str(config.get("algorithm")) for config in feasible})
    chosen = algorithms[seed % len(algorithms)]
    return random.Random(seed).choice([config for config in feasible if str(config.get("algorithm")) == chosen])


def check(variant: str, problem: Problem, seed: int, *, default: bool = False) -> None:
    """Random inputs within the tolerance, small integers exactly."""
    kind = "integers" if seed % 2 else "random"
    config = None if default else drawn(variant, problem, seed)
    communicator = get_communicator()
    (out,) = check_variant(communicator, problem, variant, seed=seed, kind=kind, config=config)
    if kind == "integers" and not problem.scaling:
        everyone = inputs_of_all(problem, seed, kind)
        (reference,) = reference_of(problem, everyone, communicator.rank)
        assert torch.equal(out.double(), reference), (variant, problem, config)


def reference_of(problem: Problem, everyone: Any, rank: int) -> tuple[torch.Tensor, ...]:
    from tunedcomm.spec import get_op

    return get_op("gemm_ar").reference(problem, everyone, rank)


def shapes(variant: str, rank: int) -> None:
    """Shapes, layouts and biases up and down on one lane, other ops' calls in between."""
    world_size = get_communicator().world_size
    for seed, shape in some(enumerate((*SHAPES, *SHAPES[:2]))):
        layout = ("nk", "kn+bias", "nk+bias+float32", "kn", "nk+bias")[seed]
        dtype = ("bfloat16", "float16")[seed % 3 == 1]
        check(variant, problem_of(shape, world_size, layout, dtype=dtype), seed, default=seed < 2)
        between = Problem("all_reduce", (257,), "bfloat16", world_size, mode="eager")
        check_variant(get_communicator(), between, ("lamport", "two_shot")[seed % 2], seed=seed)
    dist.barrier()
    assert get_communicator().workspace.rearm("eager") == 0
    dist.barrier()


def scaled(variant: str, rank: int) -> None:
    world_size = get_communicator().world_size
    for seed, scaling in some(enumerate(("tensorwise", "rowwise", "rowwise"))):
        layout = ("nk+float32", "kn+bias", "nk+float16")[seed]
        problem = problem_of((40, 48, 48), world_size, layout, dtype="float8_e4m3fn", scaling=scaling)
        check(variant, problem, seed)


def lost_peers(rank: int) -> None:
    """Every variant gives up in time and names the op and whom it missed; each in a group of its own."""
    os.environ["TUNEDCOMM_PEER_TIMEOUT_S"] = str(PEER_TIMEOUT_S)
    for variant in some(KERNELS, 5):
        communicator = get_communicator(dist.new_group())
        problem = problem_of(SHAPES[0], communicator.world_size)
        mine = inputs_of_all(problem, 1, "random")[rank]
        launch_variant(communicator, problem, variant, mine)
        dist.barrier()
        if rank != 1:
            said = r"gemm_ar \(called eagerly\) missed rank 1"
            with gives_up_in_time(), pytest.raises(tunedcomm.PeerTimeoutError, match=said):
                launch_variant(communicator, problem, variant, mine)
        dist.barrier()


CASES: dict[str, Case] = {
    **{f"shapes of {variant}": functools.partial(shapes, variant) for variant in KERNELS},
    **{f"scales of {variant}": functools.partial(scaled, variant) for variant in KERNELS},
    "lost peers": lost_peers,
}


def cases_body(rank: int, world_size: int) -> dict[str, str]:
    return run_cases(CASES, rank)


@pytest.fixture(scope="module")
def outcomes() -> Callable[[int], list[dict[str, str]]]:
    return functools.cache(lambda world_size: run_ranks(world_size, cases_body, timeout=300))


@pytest.mark.parametrize(("world_size", "name"), [(size, name) for size in WORLD_SIZES for name in CASES])
def test_variants(outcomes: Callable[[int], list[dict[str, str]]], world_size: int, name: str) -> None:
    report(outcomes(world_size), name)
