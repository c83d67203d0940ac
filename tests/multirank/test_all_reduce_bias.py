"""all_reduce_bias on the host backend: exact bits of ordered variants, and the public call."""

from __future__ import annotations

import pytest
import torch
from cases import HOST, Ranks
from quick import some
from variant_checks import bits_of, check_variant, inputs_of_all

import tunedcomm
from tunedcomm import kernels
from tunedcomm.dispatch.communicator import get_communicator
from tunedcomm.spec import Problem, get_op, variants

OP = "all_reduce_bias"
RANKS = Ranks(env=HOST, forget=False)
kernels.discover()
SHAPES = ((1, 8), (5, 128), (3, 1000), (7, 256), (33, 24), (1, 2048))
FORCED = sorted(variants(OP).keys() - {"in_order"})  # which cannot be forced


def problem_of(shape: tuple[int, int], dtype: str, world_size: int) -> Problem:
    return Problem(OP, shape, dtype, world_size, mode="eager")


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_shapes(rank: int, world_size: int) -> None:
    """Every variant at shapes up and down on one lane."""
    dtype = {2: "bfloat16", 3: "float16", 4: "float32"}[world_size]
    limits, ran = get_communicator().limits, set()
    for seed, shape in some(enumerate((*SHAPES, *reversed(SHAPES)))):
        problem = problem_of(shape, dtype, world_size)
        for name, variant in variants(OP).items():
            if variant.infeasible(problem, variant.default(problem, limits), limits) is None:
                kind = "integers" if seed % 3 == 0 else "random"
                check_variant(get_communicator(), problem, name, seed=seed, kind=kind)
                ran.add(name)
    assert len(ran) >= len(variants(OP)) - 2, "in_order stands in for the library, some need more ranks or a GPU"


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("shape", [(4, 64), (2, 3, 40), (5, 7)])
def test_public_call(rank: int, world_size: int, shape: tuple[int, ...]) -> None:
    problem = problem_of((torch.Size(shape[:-1]).numel(), shape[-1]), "float32", world_size)
    everyone = inputs_of_all(problem, 1, "random")
    (expected,) = get_op(OP).ordered_reference(problem, everyone, rank)  # type: ignore[misc]
    expected = expected.reshape(shape)
    x, bias = everyone[rank][0].reshape(shape), everyone[rank][1]
    for name in FORCED if shape[-1] % 8 == 0 else ["library"]:
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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_bias_of_the_whole_shape(rank: int, dtype: torch.dtype) -> None:
    """The bits of adding it to the ordered sum, and its gradient."""
    x, bias = (torch.randn(2, 3, 40, generator=torch.Generator().manual_seed(7)).to(dtype) for _ in range(2))
    for name in FORCED:
        with tunedcomm.force(OP, name):
            for _ in range(2):
                got = tunedcomm.all_reduce_bias(x, bias)
                due = (tunedcomm.all_reduce(x, numerics="ordered").float() + bias.float()).to(dtype)
                torch.testing.assert_close(got, due, rtol=0, atol=0 if name != "library" else 0.05)
                held = x.clone()
                assert torch.equal(tunedcomm.all_reduce_bias(held, bias, out=held), got)
    assert tunedcomm.all_reduce_bias(x[:0], bias[:0]).shape == (0, 3, 40)
    x, bias = (t.clone().requires_grad_() for t in (x, bias))
    tunedcomm.all_reduce_bias(x, bias).square().sum().backward()
    assert torch.equal(bias.grad, 2 * tunedcomm.all_reduce_bias(x, bias).detach())


def test_bad_input(rank: int) -> None:
    x, bias, whole = torch.ones(4, 8), torch.ones(8), torch.ones(5, 8)
    for given, added, out, said in (
        (x, torch.ones(7), None, "bias"),
        (x, torch.ones(4, 2), None, "bias"),
        (x, bias.double(), None, "bias"),
        (x, None, None, "bias is None"),
        (torch.tensor(1.0), bias, None, "no dimensions"),
        (x.to(torch.complex64), bias, None, "complex"),
        ("x", bias, None, "torch.Tensor"),
        (x, bias, bias.expand(4, 8), "expanded"),
        (whole[:4], bias, whole[1:], "overlaps x"),
        (x, bias, torch.ones(4, 9), "shape"),
    ):
        with pytest.raises(tunedcomm.UnsupportedInputError, match=said):
            tunedcomm.all_reduce_bias(given, added, out=out)
    assert tunedcomm.all_reduce_bias(torch.ones(0, 8), bias).shape == (0, 8)


@pytest.mark.parametrize("world_size", [pytest.param(1, id="alone")])
def test_a_group_of_one(rank: int, world_size: int) -> None:
    x, bias = torch.ones(4, 8), torch.arange(8.0)
    assert torch.equal(tunedcomm.all_reduce_bias(x, bias), x + bias)
    held = x.clone()
    assert tunedcomm.all_reduce_bias(held, bias, out=held) is held
    assert torch.equal(held, x + bias)
