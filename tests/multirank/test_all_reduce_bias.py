"""all_reduce_bias on the host backend: exact bits of ordered variants, and the public call."""

from __future__ import annotations

import pytest
import torch
from harness import run_ranks
from variant_checks import bits_of, check_variant, inputs_of_all

import tunedcomm
from tunedcomm import kernels
from tunedcomm.dispatch.communicator import get_communicator
from tunedcomm.spec import Problem, get_op, variants

OP = "all_reduce_bias"
kernels.discover()
SHAPES = ((1, 8), (5, 128), (3, 1000), (7, 256), (33, 24), (1, 2048))


def problem_of(shape, dtype, world_size):
    return Problem(OP, shape, dtype, world_size, mode="eager")


def shapes_body(rank, world_size, dtype):
    """Every variant at shapes up and down on one lane; and once in place."""
    communicator, ran = get_communicator(), 0
    for seed, shape in enumerate((*SHAPES, *reversed(SHAPES))):
        problem = problem_of(shape, dtype, world_size)
        for name, variant in variants(OP).items():
            if variant.infeasible(problem, variant.default(problem, communicator.limits), communicator.limits) is None:
                check_variant(communicator, problem, name, seed=seed, kind="integers" if seed % 3 == 0 else "random")
                ran += 1
    return ran


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_shapes(world_size):
    dtype = {2: "bfloat16", 3: "float16", 4: "float32"}[world_size]
    ran = run_ranks(world_size, shapes_body, dtype, timeout=240)
    assert len(set(ran)) == 1
    assert ran[0] >= 12 * (len(variants(OP)) - 2)  # in_order stands in for the library, some need more ranks or a GPU


def public_body(rank, world_size):
    for shape in ((4, 64), (2, 3, 40), (5, 7)):
        problem = problem_of((torch.Size(shape[:-1]).numel(), shape[-1]), "float32", world_size)
        everyone = inputs_of_all(problem, 1, "random")
        (expected,) = get_op(OP).ordered_reference(problem, everyone, rank)
        expected = expected.reshape(shape)
        x, bias = everyone[rank][0].reshape(shape), everyone[rank][1]
        for name in sorted(variants(OP).keys() - {"in_order"}) if shape[-1] % 8 == 0 else ["library"]:
            with tunedcomm.force(OP, name):
                for _ in range(3):
                    held, out = x.clone(), torch.full_like(x, float("nan"))
                    assert tunedcomm.all_reduce_bias(x, bias, out=out) is out
                    assert tunedcomm.all_reduce_bias(held, bias, out=held) is held
                    strided = torch.zeros(*shape[:-1], 2 * shape[-1])[..., ::2]
                    tunedcomm.all_reduce_bias(x, bias, out=strided)
                    for got in (tunedcomm.all_reduce_bias(x, bias), out, held, strided):
                        if name == "library":
                            torch.testing.assert_close(got, expected)
                        else:
                            assert torch.equal(bits_of(got), bits_of(expected)), name
    x, bias = torch.ones(4, 8), torch.ones(8)
    for arguments, said in (
        ((x, torch.ones(7)), "bias"),
        ((x, bias.double()), "bias"),
        ((x, None), "bias is None"),
        ((torch.tensor(1.0), bias), "no dimensions"),
        ((x.to(torch.complex64), bias), "complex"),
        (("x", bias), "torch.Tensor"),
    ):
        with pytest.raises(tunedcomm.UnsupportedInputError, match=said):
            tunedcomm.all_reduce_bias(*arguments)
    whole = torch.ones(5, 8)
    for out, said in ((bias.expand(4, 8), "expanded"), (whole[1:], "overlaps x"), (torch.ones(4, 9), "shape")):
        with pytest.raises(tunedcomm.UnsupportedInputError, match=said):
            tunedcomm.all_reduce_bias(whole[:4], bias, out=out)
    assert tunedcomm.all_reduce_bias(torch.ones(0, 8), bias).shape == (0, 8)
    return True


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_public_call(world_size):
    if world_size == 1:
        assert run_ranks(1, alone_body) == [True]
    else:
        assert run_ranks(world_size, public_body, timeout=240) == [True] * world_size


def alone_body(rank, world_size):
    x, bias = torch.ones(4, 8), torch.arange(8.0)
    assert torch.equal(tunedcomm.all_reduce_bias(x, bias), x + bias)
    held = x.clone()
    assert tunedcomm.all_reduce_bias(held, bias, out=held) is held
    assert torch.equal(held, x + bias)
    return True
