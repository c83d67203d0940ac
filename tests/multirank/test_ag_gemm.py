"""Every ag_gemm variant on the host backend, against products in float64, and against the library's gathered A."""

from __future__ import annotations

import functools
import os
import random
import re
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cases import PEER_TIMEOUT_S, Case, gives_up_in_time, report, run_cases
from harness import run_ranks
from quick import some
from variant_checks import bits_of, check_variant, inputs_of_all, limits_of

import tunedcomm
from tunedcomm import kernels
from tunedcomm.dispatch.communicator import get_communicator
from tunedcomm.spec import Problem, get_variant, variants

kernels.discover()
KERNELS = sorted(name for name, variant in variants("ag_gemm").items() if variant.kernels)
SHAPE = (21, 56, 72)  # rows of a rank, N, K: no multiples of any tile


def problem_of(world_size: int, dtype: str = "bfloat16", shape: tuple[int, ...] = SHAPE, **more: Any) -> Problem:
    rows, n, k = shape
    more = {"layout": "nk", **more}
    return Problem("ag_gemm", (rows * world_size, n, k), dtype, world_size, reduction="", mode="eager", **more)


def plain(variant: str, rank: int) -> None:
    """Dtypes and both ways to store B, several calls on one lane with other values, sizes up and down."""
    communicator = get_communicator()
    world_size = communicator.world_size
    asked = (
        ("bfloat16", "nk", SHAPE),
        ("bfloat16", "kn", (33, 40, 32)),
        ("float16", "nk", (4, 23, 40)),
        ("float16", "kn", SHAPE),
        ("bfloat16", "nk+float32", SHAPE),
        ("bfloat16", "nk", SHAPE),
    )
    for seed, (dtype, layout, shape) in some(enumerate(asked), 2):
        problem = problem_of(world_size, dtype, shape, layout=layout)
        check_variant(communicator, problem, variant, seed=seed, kind=("random", "integers")[seed % 2])


def fp8(variant: str, rank: int) -> None:
    communicator = get_communicator()
    for seed, (scaling, layout) in enumerate(
        (("tensorwise", "nk"), ("rowwise", "nk"), ("rowwise", "kn+float16"), ("rowwise", "nk+gathered"))
    ):
        problem = problem_of(communicator.world_size, "float8_e4m3fn", (21, 48, 96), layout=layout, scaling=scaling)
        check_variant(communicator, problem, variant, seed=seed)


def gathered(variant: str, rank: int) -> None:
    """The gathered A has every bit, while the result is right too."""
    communicator = get_communicator()
    for seed, layout in enumerate(("nk+gathered", "kn+gathered", "nk+gathered+float16")):
        problem = problem_of(communicator.world_size, layout=layout)
        everyone = inputs_of_all(problem, seed, "random")
        _, whole = check_variant(communicator, problem, variant, everyone=everyone)
        assert torch.equal(bits_of(whole), bits_of(torch.cat([given[0] for given in everyone])))


def same_bits(variant: str, rank: int) -> None:
    """The same bits again and again, with calls of other ops and other values in between."""
    communicator = get_communicator()
    problem = problem_of(communicator.world_size)
    first = check_variant(communicator, problem, variant, seed=3)[0]
    delays = random.Random(rank)
    for seed in range(2):
        time.sleep(delays.random() / 20)
        check_variant(communicator, problem, variant, seed=seed)
        for op, other in (("all_gather", "lamport"), ("all_gather", "push"), ("all_gather", "copy_engine")):
            between = Problem(op, (200,), "bfloat16", communicator.world_size, reduction="", mode="eager")
            check_variant(communicator, between, other, seed=seed)
        again = check_variant(communicator, problem, variant, seed=3)[0]
        assert torch.equal(bits_of(first), bits_of(again))


def lost_peer(variant: str, rank: int) -> None:
    """A rank that does not come is an error that names it and the op, in time; in a group of its own."""
    os.environ["TUNEDCOMM_PEER_TIMEOUT_S"] = str(PEER_TIMEOUT_S)
    group = dist.new_group()
    communicator = get_communicator(group)
    problem = problem_of(communicator.world_size)
    check_variant(communicator, problem, variant)
    dist.barrier()
    if rank != 1:
        said = r"ag_gemm \(called eagerly\) missed rank 1 of the group"
        with gives_up_in_time(), pytest.raises(tunedcomm.PeerTimeoutError, match=said):
            check_variant(communicator, problem, variant)
    dist.barrier()


def refusals(variant: str, rank: int) -> None:
    """What cannot run says why."""
    limits = limits_of(get_communicator())
    world_size = get_communicator().world_size
    problem = problem_of(world_size)
    found = get_variant("ag_gemm", variant)
    config = found.default(problem, limits)
    assert found.infeasible(problem, config, limits) is None
    for wrong, text in (
        (replace(problem, layout="nk+float64"), "float64 goes to the library"),
        (replace(problem, shape=(20 * world_size + 1, 56, 72)), "rows are not the same number"),
        (replace(problem, shape=(0, 56, 72)), "nothing to do"),
        (replace(problem, shape=(1 << 20, 56, 72)), "panels hold .* TUNEDCOMM_WORKSPACE_MIB"),
    ):
        reason = found.infeasible(wrong, config, limits)
        assert reason is not None, wrong
        assert re.search(text, reason), (wrong, reason)
    forced = get_variant("ag_gemm", "torch_fused")
    assert "need GPUs" in (forced.infeasible(problem, {"native": False}, limits) or "")


WHAT = (plain, fp8, gathered, same_bits, refusals, lost_peer)
CASES: dict[str, Case] = {f"{case.__name__} {name}": functools.partial(case, name) for case in WHAT for name in KERNELS}
OF_FOUR = tuple(name for name in CASES if name.endswith(" doubling"))  # takes no fewer ranks
OF_TWO = tuple(name for name in CASES if name not in OF_FOUR)
CASES_OF = {
    2: tuple(some(OF_TWO, 2)),
    3: tuple(name for name in OF_TWO if not name.startswith(("configs", "refusals", "lost_peer"))),
    4: (*(name for name in OF_TWO if name.startswith("gathered")), *OF_FOUR),
}


def cases_body(rank: int, world_size: int) -> dict[str, str]:
    return run_cases({name: CASES[name] for name in CASES_OF[world_size]}, rank)


@pytest.fixture(scope="module")
def outcomes() -> Callable[[int], list[dict[str, str]]]:
    return functools.cache(lambda world_size: run_ranks(world_size, cases_body, timeout=240))


@pytest.mark.parametrize(("world_size", "name"), [(size, name) for size, names in CASES_OF.items() for name in names])
def test_variants(outcomes: Callable[[int], list[dict[str, str]]], world_size: int, name: str) -> None:
    report(outcomes(world_size), name)
