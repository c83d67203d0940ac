"""Variants for CPU tensors in shared memory: exact bits, any size, delays, groups, lost peers, and what they leave."""

from __future__ import annotations

import os
import random
import re
import signal
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cases import HOST, Ranks, gives_up_in_time, replaced, settings
from harness import run_ranks
from quick import FULL, QUICK, some
from variant_checks import bits_of, inputs_of_all, launch_variant

import tunedcomm
from tunedcomm import kernels
from tunedcomm.dispatch.communicator import get_communicator
from tunedcomm.kernels.common.host import REDUCED
from tunedcomm.spec import Problem, get_op, get_variant
from tunedcomm.symm import buffer, ring

kernels.discover()
VARIANTS = ("host_one_shot", "host_two_shot")
RANKS = Ranks(env=HOST, forget=False, timeout=2300 if FULL else 400)
pytestmark = pytest.mark.timeout(2400 if FULL else 500)
STORM_OPS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
LARGE = 9_000_000  # fp32 elements of a result whose pages the C library does not keep
SIZES = (1, 7, 1000, 4099, 16384, 40001)
FLOATS = ("bfloat16", "float16", "float32")


def expected_of(problem: Problem, everyone: list[tuple[torch.Tensor, ...]]) -> torch.Tensor:
    """Ordered sums of fp32 and halves as the op has them; of fp64 and integers in their own dtype."""
    if problem.dtype in FLOATS:
        (exact,) = get_op("all_reduce").ordered_reference(problem, everyone, 0)  # type: ignore[misc]
        return exact
    total = everyone[0][0].clone()
    for (part,) in everyone[1:]:
        if problem.reduction in ("max", "min"):
            total = (torch.maximum if problem.reduction == "max" else torch.minimum)(total, part)
        else:
            total += part
    total = total / len(everyone) if problem.reduction == "avg" else total
    return total + 0.0 if problem.dtype == "float64" else total


@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("variant", VARIANTS)
def test_bits(rank: int, world_size: int, variant: str) -> None:
    communicator, count, found = get_communicator(), 0, get_variant("all_reduce", variant)
    asked = [(numel, dtype, how) for numel in SIZES for dtype in REDUCED for how in ("sum", "avg", "max", "min")]
    for numel, dtype, reduction in some(asked):
        if reduction == "avg" and dtype.replace("u", "").startswith("int"):
            continue
        seed, in_place = SIZES.index(numel), count % 2 == 0
        problem = Problem(
            "all_reduce", (numel,), dtype, world_size, reduction=reduction, in_place=in_place, mode="eager"
        )
        configs = ({"chunk_kib": 16 << seed % 3, "spins": (1, 64, 1024)[count % 3]}, {"chunk_kib": 16, "spins": 1})
        config = next((c for c in configs if found.infeasible(problem, c, communicator.limits) is None), None)
        if config is None:
            continue
        everyone = inputs_of_all(problem, seed, "integers" if count % 3 == 0 else "random")
        for (values,) in everyone:
            if values.is_floating_point():
                values[0], values[numel // 2] = -0.0, -1e-8  # rounds to −0.0 in a mean of halves
        mine = everyone[rank][0].clone()
        (out,) = launch_variant(communicator, problem, variant, (mine,), config)
        assert torch.equal(bits_of(out), bits_of(expected_of(problem, everyone))), (problem, config)
        assert in_place or torch.equal(bits_of(mine), bits_of(everyone[rank][0])), "the input is as it was"
        count += 1
    assert count >= (20 if QUICK else 60)


def test_an_untuned_host_runs_them(rank: int, world_size: int) -> None:
    chosen = []
    for numel in (256, 1 << 20):
        problem = Problem("all_reduce", (numel,), "float32", world_size, mode="eager")
        decision = tunedcomm.explain(get_communicator(), problem)
        assert decision.source == "heuristic"
        chosen.append(decision.candidate.variant)
        x = torch.full((numel,), float(rank))
        assert torch.equal(tunedcomm.all_reduce(x, numerics="ordered"), torch.full((numel,), 1.0))
        matrix = x.view(2, -1).t()
        assert torch.equal(tunedcomm.all_reduce(matrix), torch.full(matrix.shape, 1.0))
    assert chosen == ["host_one_shot", "host_two_shot"]


def test_a_rule_of_thumb_is_no_answer_of_a_database(rank: int) -> None:
    with settings({"TUNEDCOMM_MODE": "force"}), pytest.raises(tunedcomm.InfeasibleError, match="tunedcomm tune"):
        tunedcomm.all_reduce(torch.ones(16))


def one_call(op: str, x: torch.Tensor, rank: int, ranks: Sequence[int], call: int, group: Any) -> bool:
    """Call an op on `x`, which is arange × (rank + 1) + call on every rank; whether the result is right."""
    index, world_size, numel = torch.arange(len(x)), len(ranks), len(x)
    total = index * sum(r + 1 for r in ranks) + call * world_size
    if op == "all_reduce":
        return torch.equal(tunedcomm.all_reduce(x, group=group), total)
    if op == "all_gather":
        expected = torch.cat([index * (r + 1) + call for r in ranks])
        return torch.equal(tunedcomm.all_gather(x, group=group), expected)
    part = slice(ranks.index(rank) * (numel // world_size), (ranks.index(rank) + 1) * (numel // world_size))
    if op == "reduce_scatter":
        return torch.equal(tunedcomm.reduce_scatter(x, group=group), total[part])
    expected = torch.cat([index[part] * (r + 1) + call for r in ranks])
    return torch.equal(tunedcomm.all_to_all(x, group=group), expected)


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_random_sizes_and_delays(rank: int, world_size: int) -> None:
    """100,000 with TUNEDCOMM_TEST_FULL=1; some of them are of other groups, and each rank has delays of its own."""
    others = dist.new_group(list(range(world_size)))
    pair = dist.new_group([0, world_size - 1])
    shared, own = random.Random(7), random.Random(rank)
    wrong = 0
    for call in range(100_000 if FULL else 800 if QUICK else 2000):
        numel = int(2 ** shared.uniform(0, 15))
        kind, variant, op = shared.randrange(8), shared.choice(VARIANTS), shared.choice(STORM_OPS)
        if own.random() < 0.05:
            time.sleep(own.random() * 0.002)
        group = others if kind == 0 else pair if kind == 1 else None
        if kind == 1 and rank not in (0, world_size - 1):
            continue
        ranks = (0, world_size - 1) if kind == 1 else tuple(range(world_size))
        numel = numel if op in ("all_reduce", "all_gather") else -(-numel // len(ranks)) * len(ranks)
        x = torch.arange(numel, dtype=torch.int64) * (rank + 1) + call
        if call % 100 == 0 and op == "all_reduce" and numel * 8 >= 4096 * world_size:
            with tunedcomm.force("all_reduce", variant, {"chunk_kib": 16, "spins": 64}):
                wrong += not one_call(op, x, rank, ranks, call, group)
        else:
            wrong += not one_call(op, x, rank, ranks, call, group)
    assert wrong == 0


def test_large_new_results_ask_for_huge_pages(rank: int) -> None:
    advised: list[tuple[int, int]] = []
    with replaced(buffer, "_madvise", lambda at, nbytes, advice: advised.append((at.value, nbytes.value))):
        x = torch.full((LARGE,), float(rank + 1))
        for number in range(3):  # the first call, the one that makes a fast call, and a fast call
            out = tunedcomm.all_reduce(x)
            first, nbytes = advised[-1]
            assert len(advised) == number + 1
            assert (out == 3).all()
            assert out.data_ptr() <= first
            assert first % 4096 == 0
            assert first + nbytes <= out.data_ptr() + out.nbytes


def test_two_groups_on_two_threads(rank: int, world_size: int) -> None:
    groups = [dist.new_group(), dist.new_group()]
    for group in groups:
        tunedcomm.all_reduce(torch.ones(1), group=group)  # making a group is collective: not in threads
    wrong = [0, 0]

    def work(which: int) -> None:
        for call in range(300):
            x = torch.full((10 + call * (which + 1),), float(rank + call + which))
            expected = sum(float(r + call + which) for r in range(world_size))
            wrong[which] += not bool((tunedcomm.all_reduce(x, group=groups[which]) == expected).all())

    threads = [threading.Thread(target=work, args=(which,)) for which in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == [0, 0]


def killed_body(rank: int, world_size: int, variant: str) -> tuple[str, list[str]]:
    x = torch.ones(20000)
    with tunedcomm.force("all_reduce", variant):
        assert torch.equal(tunedcomm.all_reduce(x), torch.full((20000,), 3.0))
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        with gives_up_in_time(), pytest.raises(tunedcomm.PeerTimeoutError) as caught:
            tunedcomm.all_reduce(x)
    for tensor in (x, torch.ones(4, dtype=torch.int32)):  # whatever would serve them
        with gives_up_in_time(0.0), pytest.raises(tunedcomm.PeerTimeoutError):
            tunedcomm.all_reduce(tensor)
    return str(caught.value), [path.name for path in Path("/dev/shm").glob(f"tunedcomm-{os.getpid()}-*")]


@pytest.mark.parametrize("variant", some(VARIANTS))
def test_a_peer_that_is_killed(variant: str) -> None:
    settings = {**HOST, "TUNEDCOMM_PEER_TIMEOUT_S": "3"}
    outcomes = run_ranks(3, killed_body, variant, env=settings, killed=[1])
    for said, left in (outcomes[0], outcomes[2]):
        assert re.search(r"all_reduce \(called eagerly\) missed rank 1 of the group of 3", said)
        assert left == []


def full_body(rank: int, world_size: int, room: int) -> tuple[str, list[str]]:
    def reserve(descriptor: int, offset: int, nbytes: int) -> None:
        if nbytes > room:
            raise OSError(28, "No space left on device")
        reserve_all(descriptor, offset, nbytes)

    reserve_all = os.posix_fallocate
    buffer.os.posix_fallocate = reserve  # type: ignore[attr-defined]
    x = torch.full((1000,), float(rank))
    assert torch.equal(tunedcomm.all_reduce(x), torch.full((1000,), 1.0))
    problem = Problem("all_reduce", (1000,), "float32", world_size, mode="eager")
    left = [path.name for path in Path("/dev/shm").glob(f"tunedcomm-{os.getpid()}-*")]
    return tunedcomm.explain(get_communicator(), problem).candidate.variant, left


@pytest.mark.parametrize(("room", "chosen"), [(0, "library"), (16 << 20, "host_one_shot")])
def test_a_full_shared_memory(room: int, chosen: str) -> None:
    """Without room for the ring the library serves; the ring alone fits where interpreted kernels' memory does not."""
    settings = {**HOST, "TUNEDCOMM_WORKSPACE_MIB": "16"}
    assert run_ranks(2, full_body, room, env=settings) == [(chosen, [])] * 2


def test_with_fences(rank: int) -> None:
    with replaced(ring, "_IS_STRONGLY_ORDERED", False), settings({}):  # as on ARM
        assert [tunedcomm.all_reduce(torch.ones(n)).sum().item() for n in (10, 500000)] == [20.0, 1000000.0]
