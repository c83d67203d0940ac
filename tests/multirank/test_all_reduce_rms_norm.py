"""Every all_reduce_rms_norm variant on the host backend: exact bits of ordered ones, on every rank."""

from __future__ import annotations

import random

import pytest
import torch
from harness import run_ranks
from variant_checks import check_variant, launch_variant, limits_of

from tunedcomm import kernels
from tunedcomm.communicator import get_communicator
from tunedcomm.spec import Problem, get_op, get_variant, variants

OP = "all_reduce_rms_norm"
kernels.discover()
KERNELS = sorted(name for name, variant in variants(OP).items() if variant.kernels)
SHAPES = ((1, 128), (5, 128), (3, 1000), (7, 256), (1, 2048), (4, 24))


def problem_of(shape, dtype, world_size, layout="residual", scaling=""):
    return Problem(OP, shape, dtype, world_size, layout=layout, scaling=scaling, mode="eager")


def shapes_body(rank, world_size, variant, dtype):
    """Shapes up and down on one lane, with all extras: every call leaves the lane fit for any other."""
    communicator = get_communicator()
    layouts = get_op(OP).layouts
    for seed, shape in enumerate((*SHAPES, *reversed(SHAPES))):
        for kind in ("random", "integers") if seed % 3 == 0 else ("random",):
            layout, scaling = layouts[seed % len(layouts)], "fp8" if seed % 5 == 4 else ""
            problem = problem_of(shape, dtype, world_size, layout, scaling)
            check_variant(communicator, problem, variant, seed=seed, kind=kind)
    return True


@pytest.mark.parametrize("variant", [*KERNELS, "library"])
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_shapes(world_size, variant):
    dtype = {2: "bfloat16", 3: "float16", 4: "float32"}[world_size]
    assert run_ranks(world_size, shapes_body, variant, dtype, timeout=240) == [True] * world_size


def agreement_body(rank, world_size, dtype):
    """All ordered variants in several configs on the same inputs; their bits."""
    communicator = get_communicator()
    ordered = [n for n in KERNELS if variants(OP)[n].numerics == "ordered"]
    shuffle, found = random.Random(7), {}
    for number, (shape, layout) in enumerate((((3, 512), "residual"), ((2, 4096), "bias+residual"), ((5, 640), ""))):
        problem = problem_of(shape, dtype, world_size, layout)
        for name in ordered:
            variant, limits = get_variant(OP, name), limits_of(communicator)
            feasible = [c for c in variant.space.enumerate() if variant.infeasible(problem, c, limits) is None]
            for config in shuffle.sample(feasible, min(2, len(feasible))):
                outputs = check_variant(communicator, problem, name, seed=number, config=config)
                found[f"{number} {name} {config}"] = [bytes(t.view(torch.uint8).numpy().tobytes()) for t in outputs]
    return found


@pytest.mark.parametrize(("world_size", "dtype"), [(2, "float16"), (3, "bfloat16"), (4, "float32")])
def test_ordered_variants_and_ranks_give_the_same_bits(world_size, dtype):
    ranks = run_ranks(world_size, agreement_body, dtype, timeout=240)
    for number in range(3):
        same = {tuple(bits) for found in ranks for name, bits in found.items() if name.startswith(f"{number} ")}
        assert len(same) == 1, number
    assert len(ranks[0]) >= 16


def mixed_body(rank, world_size):
    """The variants among those of all_reduce on one lane, in random order."""
    communicator, shuffle = get_communicator(), random.Random(3)
    plain = [n for n, v in variants("all_reduce").items() if v.kernels and v.numerics == "ordered"]
    for seed in range(24):
        if shuffle.random() < 0.5:
            numel = shuffle.choice((1, 333, 4099))
            problem = Problem("all_reduce", (numel,), "bfloat16", world_size, mode="eager")
            check_variant(communicator, problem, shuffle.choice(plain), seed=seed)
        else:
            shape = shuffle.choice(((1, 256), (4, 128), (9, 512)))
            problem = problem_of(shape, "bfloat16", world_size, shuffle.choice(get_op(OP).layouts))
            check_variant(communicator, problem, shuffle.choice(KERNELS), seed=seed)
    return True


@pytest.mark.parametrize("world_size", [2, 3])
def test_among_all_reduce_calls(world_size):
    assert run_ranks(world_size, mixed_body, timeout=240) == [True] * world_size


def in_place_body(rank, world_size):
    """residual_out is the residual."""
    communicator = get_communicator()
    for name in [*KERNELS, "library"]:
        for scaling in ("", "fp8"):
            problem = problem_of((5, 256), "bfloat16", world_size, "residual", scaling)
            op = get_op(OP)
            everyone = [op.make_inputs(problem, r, 5, "random", "cpu") for r in range(world_size)]
            mine = tuple(t.clone() for t in everyone[rank])
            apart = launch_variant(communicator, problem, name, mine)
            variant = get_variant(OP, name)
            from tunedcomm.spec import Candidate

            config = variant.default(problem, limits_of(communicator))
            y = op.make_outputs(problem, "cpu")[0]
            communicator.bind(problem, Candidate.of(OP, name, config))(mine, (y, mine[2]), 0)
            assert torch.equal(y.view(torch.uint8), apart[0].view(torch.uint8)), name
            assert torch.equal(mine[2], apart[1]), name
    return True


def test_residual_in_place():
    assert run_ranks(2, in_place_body, timeout=240) == [True] * 2
