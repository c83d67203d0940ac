"""Kernels of all_reduce, all_gather and reduce_scatter: exact bits where they promise them, else near float64."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cases import Ranks, bits_of
from quick import QUICK, sample, some
from variant_checks import check_variant, inputs_of_all, launch_variant, limits_of

from tunedcomm import kernels
from tunedcomm.dispatch.groups import get_communicator
from tunedcomm.kernels.common.packets import ESCAPE
from tunedcomm.kernels.common.sync import SENTINEL
from tunedcomm.spec import DTYPES, Problem, get_variant, variants

kernels.discover()
RANKS = Ranks(timeout=500)
# On one node: what spans several has tests of its own, and so have fp32 results and quantised wires.
KERNELS = {
    op: sorted(
        n
        for n, v in variants(op).items()
        if v.kernels and "ranks_per_node" not in v.space.names and not n.endswith(("_fp32", "_quantized"))
    )
    for op in ("all_reduce", "all_gather", "reduce_scatter")
}
ORDERED = {op: [n for n in names if variants(op)[n].numerics == "ordered"] for op, names in KERNELS.items()}
EVERY = [(op, name) for op, names in KERNELS.items() for name in names]
SIZES = (1, 7, 64, 1000, 4099)
# By number of ranks, in turns.
SUMMED = {2: ("bfloat16",), 3: ("float16",), 4: ("float32",)}
MOVED = {2: ("bfloat16",), 3: ("uint8", "float16", "float64"), 4: ("float32", "int8", "int64")}


def problem_of(op: str, numel: int, dtype: str, world_size: int, reduction: str = "sum") -> Problem:
    reduction = "" if op == "all_gather" else reduction
    return Problem(op, (numel,), dtype, world_size, reduction=reduction, mode="eager")


@pytest.mark.parametrize(("op", "variant"), EVERY)
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_sizes(rank: int, world_size: int, op: str, variant: str) -> None:
    """Sizes up and down on one lane: every call leaves the lane fit for any other."""
    dtypes = (MOVED if op == "all_gather" else SUMMED)[world_size]
    for seed, numel in some(enumerate((*SIZES, *reversed(SIZES))), 4):
        problem = problem_of(op, numel, dtypes[seed % len(dtypes)], world_size)
        kind = "random" if seed % 3 else "integers"
        check_variant(get_communicator(), problem, variant, seed=seed, kind=kind)
        if op != "all_gather":
            check_variant(get_communicator(), replace(problem, reduction="avg"), variant, seed=seed, kind=kind)


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


@pytest.mark.parametrize(("world_size", "dtype"), [(2, "float16"), (3, "bfloat16"), (4, "bfloat16"), (3, "float32")])
def test_ordered_variants_give_the_same_bits(rank: int, world_size: int, dtype: str) -> None:
    """On every rank, and each rank's chunk by reduce_scatter."""
    communicator = get_communicator()
    for numel, reduction in some(((512, "sum"), (515, "sum"), (515, "avg")), 2):
        problem = problem_of("reduce_scatter", numel, dtype, world_size, reduction)
        whole = problem_of("all_reduce", numel * world_size, dtype, world_size, reduction)
        everyone = awkward(problem, 3)

        def bits(asked: Problem, variant: str, x: torch.Tensor = everyone[rank][0]) -> torch.Tensor:
            return bits_of(launch_variant(communicator, asked, variant, (x.clone(),))[0])

        expected = bits(whole, "two_shot")
        theirs: list[Any] = [None] * world_size
        dist.all_gather_object(theirs, expected)
        assert all(torch.equal(other, expected) for other in theirs)
        assert expected[8] == 0, "negative zeros sum to +0.0"
        for variant in ORDERED["all_reduce"]:
            assert torch.equal(bits(whole, variant), expected), (variant, reduction, numel)
        for variant in ORDERED["reduce_scatter"]:
            assert torch.equal(bits(problem, variant), expected.view(world_size, -1)[rank]), (variant, reduction, numel)


@pytest.mark.parametrize("world_size", [2, 3])
def test_two_shot_in_many_chunks(rank: int, world_size: int) -> None:
    """More chunks than its areas hold, sizes that do not divide, twice each."""
    for numel in (16 * 128 * 8 * world_size, 13 * 128 * 8 * world_size + 1234):
        for chunks in some((1, 2, 4, 8, 16) if numel % 128 == 0 else (4, 8), 4):
            config = {"num_blocks": 1, "num_warps": 4, "items": 1, "num_chunks": chunks}
            problem = problem_of("all_reduce", numel, "bfloat16", world_size)
            for seed in some((1, 2)):
                check_variant(get_communicator(), problem, "two_shot", seed=seed, config=config)


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_all_gather_in_many_chunks(rank: int, world_size: int) -> None:
    """More chunks than the gather areas hold, sizes that do not divide, twice each."""
    communicator, count = get_communicator(), 0
    for numel, blocks in some(((16 * 128 * 4, 1), (13 * 128 * 4 + 123, 2), (33 * 128 * 4 + 1, 1)), 2):
        for chunks in sample((1, 2, 4, 8, 16, 32), quick=3):
            config = {"num_blocks": blocks, "num_warps": 4, "items": 1, "num_chunks": chunks}
            problem, name = problem_of("all_gather", numel, "float32", world_size), ("multimem", "push")[count % 3 != 2]
            if get_variant("all_gather", name).infeasible(problem, config, limits_of(communicator)) is None:
                for seed in (1, 2):
                    check_variant(communicator, problem, name, seed=seed, config=config)
                count += 1
    assert count > (1 if QUICK else 5)


def test_all_gather_of_every_dtype(rank: int, world_size: int) -> None:
    """Every dtype through every variant, the library included."""
    names = KERNELS["all_gather"]
    for seed, dtype in some(enumerate(DTYPES)):
        problem = problem_of("all_gather", 75 + seed, dtype, world_size)
        for name in ("library", *names) if seed % 3 == 0 and not QUICK else ("library", names[seed % len(names)]):
            check_variant(get_communicator(), problem, name, seed=seed, kind="integers")


def payload(kind: str, num_words: int, seed: int, rank: int) -> torch.Tensor:
    """Words of a payload that tries the packets' disguise, as float32."""
    generator = torch.Generator().manual_seed(seed * 101 + rank)
    words = torch.randint(-(2**31), 2**31, (num_words,), generator=generator, dtype=torch.int64).to(torch.int32)
    coin = torch.randint(0, 2, (num_words,), generator=generator).bool()
    if kind == "sentinels":
        words[:] = SENTINEL.value
    elif kind == "escapes":
        words[:] = ESCAPE.value
    elif kind == "both":
        words = torch.where(coin, SENTINEL.value, ESCAPE.value).to(torch.int32)
    elif kind == "one word":
        words[seed % num_words] = SENTINEL.value if coin[0] else ESCAPE.value
    return words.view(torch.float32)


@pytest.mark.parametrize("kind", ["sentinels", "escapes", "both", "one word", "any bits"])
def test_all_gather_leaves_its_arena_clean(rank: int, world_size: int, kind: str) -> None:
    """Nothing but sentinels is left once all ranks have ended a call, masks included; the payload is whole."""
    communicator, seed = get_communicator(), len(kind)
    every = [payload(kind, 301, seed, r) for r in range(world_size)]
    problem = problem_of("all_gather", 301, "float32", world_size)
    (out,) = launch_variant(communicator, problem, "lamport", (every[rank],))
    assert torch.equal(bits_of(out), bits_of(torch.cat(every)))
    dist.barrier()
    workspace = communicator.workspace
    assert workspace is not None
    arena = workspace.buffers["eager"].local[workspace.layout.arena : workspace.layout.one_shot].view(torch.int32)
    assert bool((arena == SENTINEL.value).all())
    dist.barrier()


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_reduce_scatter_of_the_library(rank: int, world_size: int) -> None:
    """Every dtype and reduction that the public function admits."""
    made = inputs_of_all(problem_of("reduce_scatter", 37, "float32", world_size), 5, "integers")
    for dtype in ("bfloat16", "float16", "float32", "float64", "int8", "uint8", "int32", "int64"):
        for reduction in ("sum", "max", "min", *(("avg",) if "float" in dtype else ())):
            problem = problem_of("reduce_scatter", 37, dtype, world_size, reduction)
            everyone = [((x.abs() if dtype == "uint8" else x).to(getattr(torch, dtype)),) for (x,) in made]
            (out,) = launch_variant(get_communicator(), problem, "library", (everyone[rank][0].clone(),))
            stack = torch.stack([x.view(world_size, -1)[rank].double() for (x,) in everyone])
            reduced = {"sum": stack.sum(0), "avg": stack.mean(0), "max": stack.amax(0), "min": stack.amin(0)}[reduction]
            assert (out.double() - reduced).abs().max() <= (0.02 if reduction == "avg" else 0), (dtype, reduction)


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [8])
def test_eight_ranks(rank: int, world_size: int) -> None:
    """The largest group that kernels serve."""
    for variant in KERNELS["reduce_scatter"]:
        check_variant(get_communicator(), problem_of("reduce_scatter", 333, "bfloat16", 8), variant, seed=1)
