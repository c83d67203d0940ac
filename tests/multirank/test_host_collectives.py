"""Variants for CPU tensors of all ops but all_reduce: exact bits, any size and dtype, public calls, lost peers."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
import torch
from cases import HOST, Ranks
from quick import QUICK, some
from variant_checks import bits_of, check_variant, inputs_of_all, launch_variant

import tunedcomm
from tunedcomm import kernels
from tunedcomm.dispatch.communicator import get_communicator
from tunedcomm.kernels.common.host import REDUCED
from tunedcomm.kernels.common.reference import reduced
from tunedcomm.kernels.gemm.op import wanted_of
from tunedcomm.ops.gemm import OUT_DTYPES
from tunedcomm.spec import DTYPES, Problem, get_op, get_variant

kernels.discover()
RANKS = Ranks(env=HOST, forget=False, timeout=400)
SIZES = (1, 7, 1000, 4099, 40001)
ABOVE_THE_RING = 1_500_001  # elements: more than all slots of a rank hold at once
HALVES_AND_SINGLES = ("bfloat16", "float16", "float32")
MOVES = ("all_gather", "all_to_all", "all_to_all_v")
WORLD_SIZES = (2, 3, 4)
KINDS = ("random", "integers")


def configs() -> Iterator[dict[str, int]]:
    """Configs in turns."""
    while True:
        for spins in (1, 64, 1024):
            for chunk_kib in (16, 1024, 64):
                yield {"chunk_kib": chunk_kib, "spins": spins}


def feasible(problem: Problem, config: dict[str, int]) -> dict[str, int]:
    """The config, or the one of smallest chunks where those are too large for the problem."""
    limits = get_communicator().limits
    refused = get_variant(problem.op, "host_one_shot").infeasible(problem, config, limits)
    return {**config, "chunk_kib": 16} if refused else config


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_bits_of_moves(rank: int, world_size: int) -> None:
    communicator, turns = get_communicator(), configs()
    asked = [(numel, dtype) for numel in SIZES for dtype in DTYPES] + [(ABOVE_THE_RING, "float32")]
    for op in MOVES:
        for seed, (numel, dtype) in some(enumerate(asked), 6):
            problem, kind = Problem(op, (numel,), dtype, world_size, reduction="", mode="eager"), KINDS[seed % 2]
            config = feasible(problem, next(turns))
            check_variant(communicator, problem, "host_one_shot", seed=seed, kind=kind, config=config)


def expected_chunk(problem: Problem, everyone: list[tuple[torch.Tensor, ...]], rank: int) -> torch.Tensor:
    """The rank's chunk of the sum: in fp32 of fp32 and halves, in their own dtype of fp64 and integers."""
    parts = [values[rank * problem.numel : (rank + 1) * problem.numel] for (values,) in everyone]
    wide = torch.float32 if problem.dtype in HALVES_AND_SINGLES else parts[0].dtype
    total = reduced(parts, problem.reduction, wide).to(parts[0].dtype)
    return total + 0.0 if total.is_floating_point() else total


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_bits_of_reduce_scatter(rank: int, world_size: int) -> None:
    communicator, turns, seed = get_communicator(), configs(), 0
    asked = [(numel, dtype, how) for numel in SIZES for dtype in REDUCED for how in ("sum", "avg", "max", "min")]
    asked = [*some(asked, 5), (ABOVE_THE_RING, "float32", "sum"), (ABOVE_THE_RING, "bfloat16", "avg")]
    for numel, dtype, reduction in asked:
        if reduction == "avg" and dtype.replace("u", "").startswith("int"):
            continue
        seed += 1
        problem = Problem("reduce_scatter", (numel,), dtype, world_size, reduction=reduction, mode="eager")
        everyone = inputs_of_all(problem, seed, KINDS[seed % 2])
        for (values,) in everyone:
            if values.is_floating_point():
                values[0], values[-1] = -0.0, -1e-8  # rounds to −0.0 in a mean of halves
        mine = everyone[rank][0].clone()
        (out,) = launch_variant(communicator, problem, "host_one_shot", (mine,), feasible(problem, next(turns)))
        assert torch.equal(bits_of(out), bits_of(expected_chunk(problem, everyone, rank))), problem
        assert torch.equal(bits_of(mine), bits_of(everyone[rank][0])), "the input is as it was"


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_bits_of_rows(rank: int, world_size: int) -> None:
    """all_reduce with a bias or a norm, by either algorithm where the message is large enough for it."""
    communicator, count = get_communicator(), 0
    rms_norm = [(layout, scaling) for layout in ("", "residual", "bias", "bias+residual") for scaling in ("", "fp8")]
    asked = [("all_reduce_bias", "", ""), *(("all_reduce_rms_norm", *rest) for rest in rms_norm)]
    for (op, layout, scaling), dtype in some(itertools.product(asked, HALVES_AND_SINGLES), 4):
        for shape in ((1, 1), (3, 7), (5, 264), (70, 1031), (2, 40000)):
            problem = Problem(op, shape, dtype, world_size, layout=layout, scaling=scaling, mode="eager")
            for algorithm in ("one_shot", "two_shot"):
                config = {"algorithm": algorithm, "chunk_kib": (16, 64)[count % 2], "spins": (1, 64)[count % 2]}
                if get_variant(op, "host_unfused").infeasible(problem, config, communicator.limits) is None:
                    check_variant(
                        communicator, problem, "host_unfused", seed=count, kind=KINDS[count % 2], config=config
                    )
                    count += 1
    assert count >= (25 if QUICK else 100)


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_gemms(rank: int, world_size: int) -> None:
    communicator, count = get_communicator(), 0
    for op in ("ag_gemm", "gemm_rs", "gemm_ar"):
        spec, rows = get_op(op), world_size * 11
        for dtype, layout, reduction in itertools.product(OUT_DTYPES, spec.layouts, spec.reductions):
            name = str(dtype).removeprefix("torch.")
            out = wanted_of(Problem(op, (rows, 8, 8), name, world_size, layout=layout)).dtype
            for scaling in spec.scalings_of(name) if getattr(torch, out) in OUT_DTYPES[dtype] else ():
                shape, count = (rows, 37, (16, 300)[count % 2]), count + 1
                problem = Problem(op, shape, name, world_size, reduction, layout=layout, scaling=scaling, mode="eager")
                check_variant(communicator, problem, "host_unfused", seed=count, kind=KINDS[count % 2])
    assert count >= 60


def values_of(rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Small whole numbers, different on every rank."""
    numel = torch.Size(shape).numel()
    return ((torch.arange(numel) * (rank + 3) + rank) % 11).to(dtype).view(shape)


@pytest.mark.parametrize("world_size", WORLD_SIZES)
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
