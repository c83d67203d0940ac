"""Variants for CPU tensors in shared memory: exact bits, any size, delays, groups, lost peers, and what they leave."""

from __future__ import annotations

import itertools
import os
import random
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cases import HOST, Ranks, bits_of, replaced, settings
from harness import run_ranks
from quick import FULL, QUICK, some
from variant_checks import check_variant, inputs_of_all, launch_variant

import tunedcomm
from tunedcomm import kernels
from tunedcomm.dispatch.communicator import Communicator
from tunedcomm.dispatch.groups import get_communicator
from tunedcomm.kernels.common.host import REDUCED
from tunedcomm.kernels.common.reference import reduced
from tunedcomm.kernels.gemm.op import gemm_layout
from tunedcomm.ops.gemm import OUT_DTYPES
from tunedcomm.spec import DTYPES, Problem, get_op, get_variant
from tunedcomm.symm import buffer, ring

kernels.discover()
VARIANTS = ("host_one_shot", "host_two_shot")
RANKS = Ranks(env=HOST, forget=False, timeout=2300 if FULL else 400)
pytestmark = pytest.mark.timeout(2400 if FULL else 500)
STORM_OPS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
LARGE = 9_000_000  # fp32 elements of a result whose pages the C library does not keep
SIZES = (1, 7, 1000, 4099, 16384, 40001)
FLOATS = ("bfloat16", "float16", "float32")


def expected_of(problem: Problem, parts: list[torch.Tensor]) -> torch.Tensor:
    """In fp32 of fp32 and halves, in their own dtype of fp64 and integers."""
    total = reduced(parts, problem.reduction, torch.float32 if problem.dtype in FLOATS else parts[0].dtype)
    total = total.to(parts[0].dtype)
    return total + 0.0 if total.is_floating_point() else total


ABOVE_THE_RING = 1_500_001  # elements: more than all slots of a rank hold at once
MOVES = ("all_gather", "all_to_all", "all_to_all_v")
KINDS = ("random", "integers")


def configs() -> Iterator[dict[str, int]]:
    """Configs in turns."""
    while True:
        for spins in (1, 64, 1024):
            for chunk_kib in (16, 1024, 64):
                yield {"chunk_kib": chunk_kib, "spins": spins, "threads": 1}


def feasible(problem: Problem, config: dict[str, int]) -> dict[str, int]:
    """The config, or the one of smallest chunks where those are too large for the problem."""
    limits = get_communicator().limits
    refused = get_variant(problem.op, "host_one_shot").infeasible(problem, config, limits)
    return {**config, "chunk_kib": 16} if refused else config


def check_sum(communicator: Communicator, problem: Problem, variant: str, config: dict[str, int], seed: int) -> None:
    """Launch and compare all bits with those of the sum in rank order."""
    rank, everyone = communicator.rank, inputs_of_all(problem, seed, KINDS[seed % 2])
    for (values,) in everyone:
        if values.is_floating_point():
            values[0], values[-1] = -0.0, -1e-8  # rounds to −0.0 in a mean of halves
    mine = everyone[rank][0].clone()
    (out,) = launch_variant(communicator, problem, variant, (mine,), config)
    parts = [x if problem.op == "all_reduce" else x.chunk(problem.world_size)[rank] for (x,) in everyone]
    assert torch.equal(bits_of(out), bits_of(expected_of(problem, parts))), (problem, config)
    assert problem.in_place or torch.equal(bits_of(mine), bits_of(everyone[rank][0])), "the input is as it was"


@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize(
    ("op", "variant"), [("all_reduce", name) for name in VARIANTS] + [("reduce_scatter", "host_one_shot")]
)
def test_bits_of_sums(rank: int, world_size: int, op: str, variant: str) -> None:
    communicator, turns, found, count = get_communicator(), configs(), get_variant(op, variant), 0
    asked = itertools.product(SIZES, REDUCED, ("sum", "avg", "max", "min"))
    for numel, dtype, reduction in (*some(asked, 5), (ABOVE_THE_RING, "float32", "sum")):
        in_place = op == "all_reduce" and count % 2 == 0
        problem = Problem(op, (numel,), dtype, world_size, reduction=reduction, in_place=in_place, mode="eager")
        options = (next(turns), {"chunk_kib": 16, "spins": 1, "threads": 1})
        config = next((c for c in options if found.infeasible(problem, c, communicator.limits) is None), None)
        if config is None or (reduction == "avg" and dtype.replace("u", "").startswith("int")):
            continue
        check_sum(communicator, problem, variant, config, seed=count)
        count += 1
    assert count >= (10 if QUICK else 60)


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
            with tunedcomm.force("all_reduce", variant, {"chunk_kib": 16, "spins": 64, "threads": 1}):
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


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_bits_of_moves(rank: int, world_size: int) -> None:
    communicator, turns = get_communicator(), configs()
    asked = [(numel, dtype) for numel in SIZES for dtype in DTYPES] + [(ABOVE_THE_RING, "float32")]
    for op in MOVES:
        for seed, (numel, dtype) in some(enumerate(asked), 6):
            problem, kind = Problem(op, (numel,), dtype, world_size, reduction="", mode="eager"), KINDS[seed % 2]
            config = feasible(problem, next(turns))
            check_variant(communicator, problem, "host_one_shot", seed=seed, kind=kind, config=config)


@pytest.mark.parametrize("world_size", [2, 3])
def test_bits_of_several_threads(rank: int, world_size: int) -> None:
    """Whole chunks and a short last one, and slices too short to share; the caller's number of threads stays."""
    communicator, config = get_communicator(), {"chunk_kib": 512, "spins": 1, "threads": 2}
    sums = [(dtype, reduction) for dtype in REDUCED for reduction in ("sum", "avg", "max")]
    sums = [(d, r) for d, r in some(sums, 5) if r != "avg" or getattr(torch, d).is_floating_point]
    moves = [(name, "host_one_shot", "uint8", "") for name in MOVES]
    sums_of = [*(("all_reduce", name) for name in VARIANTS), ("reduce_scatter", "host_one_shot")]
    before = torch.get_num_threads()
    for op, variant, dtype, reduction in [(*which, *how) for which in sums_of for how in sums] + moves:
        numel = (600 << 10) // getattr(torch, dtype).itemsize + 1
        problem = Problem(op, (numel,), dtype, world_size, reduction=reduction, mode="eager")
        assert "threads" in str(
            get_variant(op, variant).infeasible(problem, config, replace(communicator.limits, host_cores=3))
        )
        if reduction:
            check_sum(communicator, problem, variant, config, seed=0)
        else:
            check_variant(communicator, problem, variant, config=config)
        assert torch.get_num_threads() == before


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_bits_of_rows(rank: int, world_size: int) -> None:
    """all_reduce with a bias or a norm, by either algorithm where the message is large enough for it."""
    communicator, count = get_communicator(), 0
    rms_norm = [(layout, scaling) for layout in ("", "residual", "bias", "bias+residual") for scaling in ("", "fp8")]
    asked = [("all_reduce_bias", "", ""), *(("all_reduce_rms_norm", *rest) for rest in rms_norm)]
    for (op, layout, scaling), dtype in some(itertools.product(asked, FLOATS), 4):
        for shape in ((1, 1), (3, 7), (5, 264), (70, 1031), (2, 40000)):
            problem = Problem(op, shape, dtype, world_size, layout=layout, scaling=scaling, mode="eager")
            for algorithm in ("one_shot", "two_shot"):
                chunk_kib, spins = ((16, 1), (64, 64))[count % 2]
                config = {"algorithm": algorithm, "chunk_kib": chunk_kib, "spins": spins, "threads": 1}
                if get_variant(op, "host_unfused").infeasible(problem, config, communicator.limits) is None:
                    check_variant(
                        communicator, problem, "host_unfused", seed=count, kind=KINDS[count % 2], config=config
                    )
                    count += 1
    assert count >= (25 if QUICK else 100)


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_gemms(rank: int, world_size: int) -> None:
    communicator, count = get_communicator(), 0
    for op in ("ag_gemm", "gemm_rs", "gemm_ar"):
        spec, rows = get_op(op), world_size * 11
        for dtype, layout, reduction in itertools.product(OUT_DTYPES, spec.layouts, spec.reductions):
            name = str(dtype).removeprefix("torch.")
            out = gemm_layout(Problem(op, (rows, 8, 8), name, world_size, layout=layout)).dtype
            for scaling in spec.scalings_of(name) if getattr(torch, out) in OUT_DTYPES[dtype] else ():
                shape, count = (rows, 37, (16, 300)[count % 2]), count + 1
                problem = Problem(op, shape, name, world_size, reduction, layout=layout, scaling=scaling, mode="eager")
                check_variant(communicator, problem, "host_unfused", seed=count, kind=KINDS[count % 2])
    assert count >= 60


def values_of(rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Small whole numbers, different on every rank."""
    numel = torch.Size(shape).numel()
    return ((torch.arange(numel) * (rank + 3) + rank) % 11).to(dtype).view(shape)


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_public_calls(rank: int, world_size: int) -> None:
    """Each call twice, so that fast calls are made and used; strided inputs, outputs that are given, empty ones."""
    ranks = range(world_size)
    for rows, columns in ((1, 1), (3, 5), (64, 1031), (0, 4)):
        for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.bool):
            given = [values_of(r, (world_size * rows, columns), dtype) for r in ranks]
            strided = given[rank].t().contiguous().t()
            chunks = [values.chunk(world_size) if rows else [values] * world_size for values in given]
            received = torch.cat([parts[rank] for parts in chunks])
            send = [(rank + peer) % 2 * rows for peer in ranks]
            rows_sent = [torch.cat([c[: (r + p) % 2 * rows] for p, c in enumerate(chunks[r])]) for r in ranks]
            rows_received = torch.cat([chunks[r][rank][: (r + rank) % 2 * rows] for r in ranks])
            for x in (given[rank], given[rank], strided):
                assert torch.equal(tunedcomm.all_gather(x), torch.cat(given))
                assert torch.equal(tunedcomm.all_gather(x, dim=1), torch.cat(given, 1))
                assert torch.equal(tunedcomm.all_to_all(x), received)
                assert torch.equal(tunedcomm.all_to_all(x, out=torch.empty_like(x)), received)
                got = tunedcomm.all_to_all_v(rows_sent[rank], send, send, max_count=max(rows, 1))
                assert torch.equal(got, rows_received)
                if dtype is not torch.bool:
                    total = sum(parts[rank].double() for parts in chunks)
                    assert torch.equal(tunedcomm.reduce_scatter(x).double(), total)
                    largest = torch.stack([parts[rank] for parts in chunks]).amax(0) if rows else received
                    assert torch.equal(tunedcomm.reduce_scatter(x, op="max"), largest)


def test_sizes_that_never_repeat_keep_no_buffers(rank: int) -> None:
    """A plan of a size keeps some KiB, and no memory of the message's size."""

    def private_bytes() -> int:  # a fork's pages count before as after they are written
        status = Path("/proc/self/status").read_text(encoding="ascii")
        return next(int(line.split()[1]) << 10 for line in status.splitlines() if line.startswith("RssAnon"))

    for dtype in (torch.float32, torch.bfloat16):
        x, out = torch.ones(1 << 18).to(dtype), torch.empty(1 << 18).to(dtype)
        with tunedcomm.force("all_reduce", "host_one_shot"):
            tunedcomm.all_reduce(x, out=out)
            before = private_bytes()
            for turn in range(60):
                size = (1 << 17) + 64 * turn
                tunedcomm.all_reduce(x[:size], out=out[:size])
        grown = private_bytes() - before
        assert torch.equal(out, torch.full_like(out, 2.0))
        assert grown < 5 << 20, (dtype, grown)
