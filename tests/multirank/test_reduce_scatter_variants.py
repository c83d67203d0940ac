"""Every reduce_scatter variant on the host backend, against float64 and, for `ordered` ones, against exact bits."""

from __future__ import annotations

import pytest
import torch
from harness import run_ranks
from variant_checks import bits_of, check_variant, inputs_of_all, launch_variant, limits_of

from tunedcomm import kernels
from tunedcomm.spec import Problem, variants

kernels.discover()
EVERY = sorted(variants("reduce_scatter"))
KERNELS = sorted(name for name, variant in variants("reduce_scatter").items() if variant.kernels)
ORDERED = sorted(name for name in KERNELS if variants("reduce_scatter")[name].numerics == "ordered")
SIZES = (1, 7, 64, 1000, 4099)


def problem_of(numel, dtype, world_size, reduction="sum"):
    return Problem("reduce_scatter", (numel,), dtype, world_size, reduction=reduction, mode="eager")


def sizes_body(rank, world_size, variant, dtype):
    """Sizes up and down on one lane: every call leaves the lane fit for any other."""
    from tunedcomm.communicator import get_communicator

    communicator = get_communicator()
    count = 0
    for seed, numel in enumerate((*SIZES, *reversed(SIZES))):
        for reduction in ("sum", "avg") if seed % 2 else ("sum",):
            kind = "integers" if seed % 3 == 0 else "random"
            check_variant(communicator, problem_of(numel, dtype, world_size, reduction), variant, seed=seed, kind=kind)
            count += 1
    return count


@pytest.mark.parametrize("variant", KERNELS)
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_sizes(world_size, variant):
    dtype = {2: "bfloat16", 3: "float16", 4: "float32"}[world_size]
    assert run_ranks(world_size, sizes_body, variant, dtype, timeout=240) == [15] * world_size


def awkward(problem, seed):
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


def agreement_body(rank, world_size, dtype):
    """All ordered variants on the same awkward inputs; the same part of an ordered all_reduce has the same bits."""
    from tunedcomm.communicator import get_communicator

    communicator = get_communicator()
    for numel in (512, 515):
        for reduction in ("sum", "avg"):
            problem = problem_of(numel, dtype, world_size, reduction)
            everyone = awkward(problem, 3)
            whole = Problem("all_reduce", (numel * world_size,), dtype, world_size, reduction=reduction, mode="eager")
            (reduced,) = launch_variant(communicator, whole, "two_shot", (everyone[rank][0].clone(),))
            expected = bits_of(reduced.view(world_size, -1)[rank])
            for variant in ORDERED:
                (out,) = launch_variant(communicator, problem, variant, (everyone[rank][0].clone(),))
                assert torch.equal(bits_of(out), expected), (variant, reduction, numel)
            if reduction == "sum":
                assert out[8] == 0
                assert not torch.signbit(out[8]), "negative zeros sum to +0.0"
    return True


@pytest.mark.parametrize(("world_size", "dtype"), [(2, "float16"), (3, "bfloat16"), (4, "bfloat16"), (3, "float32")])
def test_ordered_variants_give_the_bits_of_all_reduce(world_size, dtype):
    assert run_ranks(world_size, agreement_body, dtype, timeout=240) == [True] * world_size


def chunks_body(rank, world_size):
    """push cut into more chunks than its area holds, sizes that do not divide, twice each, in both ways."""
    from tunedcomm.communicator import get_communicator

    communicator, count = get_communicator(), 0
    for numel in (16 * 256 * 8, 13 * 256 * 8 + 1234, 11 * 256 * 8 + 7):
        for chunks in (1, 2, 4, 8, 16):
            for split in (False, True):
                config = {"num_blocks": 2, "num_warps": 8, "items": 1, "num_chunks": chunks, "split": split}
                problem = problem_of(numel, "bfloat16", world_size)
                if variants("reduce_scatter")["push"].infeasible(problem, config, limits_of(communicator)):
                    continue
                for seed in (1, 2):
                    check_variant(communicator, problem, "push", seed=seed, config=config)
                    count += 1
    return count


@pytest.mark.parametrize("world_size", [2, 3])
def test_push_in_many_chunks(world_size):
    counts = run_ranks(world_size, chunks_body, timeout=240)
    assert counts == [counts[0]] * world_size
    assert counts[0] >= 20


def mixed_body(rank, world_size):
    """Variants of several ops in random order on one lane, the same order on every rank."""
    import random

    from tunedcomm.communicator import get_communicator

    communicator, shuffle = get_communicator(), random.Random(7)
    ordered = [name for name, v in variants("all_reduce").items() if v.kernels and v.numerics == "ordered"]
    choices = [("reduce_scatter", name) for name in KERNELS] + [("all_reduce", name) for name in ordered]
    for seed in range(60):
        op, variant = shuffle.choice(choices)
        numel = shuffle.choice((1, 30, 257, 1024, 5000))
        problem = Problem(op, (numel,), "bfloat16", world_size, mode="eager")
        check_variant(communicator, problem, variant, seed=seed)
    return True


@pytest.mark.parametrize("world_size", [2, 4])
def test_variants_share_a_lane(world_size):
    assert run_ranks(world_size, mixed_body, timeout=240) == [True] * world_size


def eight_body(rank, world_size):
    """The largest group that kernels serve, every variant once."""
    from tunedcomm.communicator import get_communicator

    communicator = get_communicator()
    for variant in KERNELS:
        check_variant(communicator, problem_of(333, "bfloat16", world_size), variant, seed=1)
    return True


def test_eight_ranks():
    assert run_ranks(8, eight_body, timeout=240) == [True] * 8


def library_body(rank, world_size):
    """The library takes every dtype and reduction that the public function admits."""
    from tunedcomm.communicator import get_communicator

    communicator = get_communicator()
    for dtype in ("bfloat16", "float16", "float32", "float64", "int8", "uint8", "int32", "int64"):
        for reduction in ("sum", "max", "min", *(("avg",) if "float" in dtype else ())):
            problem = problem_of(37, dtype, world_size, reduction)
            made = inputs_of_all(problem_of(37, "float32", world_size), 5, "integers")
            everyone = [((x.abs() if dtype == "uint8" else x).to(getattr(torch, dtype)),) for (x,) in made]
            (out,) = launch_variant(communicator, problem, "library", (everyone[rank][0].clone(),))
            stack = torch.stack([x.view(world_size, -1)[rank].double() for (x,) in everyone])
            reduced = {"sum": stack.sum(0), "avg": stack.mean(0), "max": stack.amax(0), "min": stack.amin(0)}[reduction]
            assert torch.allclose(out.double(), reduced, rtol=4e-3 if reduction == "avg" else 0, atol=0), (
                dtype,
                reduction,
            )
    return True


@pytest.mark.parametrize("world_size", [2, 3])
def test_library(world_size):
    assert run_ranks(world_size, library_body, timeout=120) == [True] * world_size
