"""ulysses_scatter and ulysses_gather as callers use them: bits of every variant, refusals, gradients, compiled code."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from cases import HOST, Ranks, same_bits
from quick import some
from variant_checks import check_variant

import tunedcomm
from tunedcomm import kernels
from tunedcomm.bench.contenders import contenders_of
from tunedcomm.dispatch.groups import get_communicator
from tunedcomm.spec import DTYPES, Problem, get_op

kernels.discover()
RANKS = Ranks(env=HOST, forget=False, timeout=400)
OPS = ("ulysses_scatter", "ulysses_gather")
VARIANTS = ("library", "host_unfused", "pull", "push")
FUNCTIONS: dict[str, Callable[..., torch.Tensor]] = {
    "ulysses_scatter": tunedcomm.ulysses_scatter,
    "ulysses_gather": tunedcomm.ulysses_gather,
}


def asked(op: str, shape: tuple[int, ...], dtype: str, world_size: int) -> Problem:
    return Problem(op, shape, dtype, world_size, reduction="", mode="eager")


def whole(batch: int, tokens: int, heads: int, head_dim: int) -> torch.Tensor:
    return torch.arange(float(batch * tokens * heads * head_dim)).view(batch, tokens, heads, head_dim)


def parts(op: str, x: torch.Tensor, rank: int, world_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """This rank's input and result of the whole tensor."""
    by_tokens, by_heads = x.chunk(world_size, 1)[rank], x.chunk(world_size, 2)[rank]
    return (by_tokens, by_heads) if op == "ulysses_scatter" else (by_heads, by_tokens)


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_every_variant(rank: int, world_size: int) -> None:
    """Sizes up and down on one lane, several batches, every dtype: exact bits, disguised words included."""
    communicator, seed = get_communicator(), 0
    shapes = ((12, 1, 192), (24, 3, 192), (36, 2, 384), (132, 1, 768), (12, 1, 192))
    for shape in some(shapes, 3):
        for op in OPS:
            for variant in VARIANTS:
                problem = asked(op, shape, DTYPES[seed % len(DTYPES)], world_size)
                check_variant(communicator, problem, variant, seed=seed, kind="integers" if seed % 2 else "random")
                seed += 1
    for chunks in (2, 8):
        config = {"num_blocks": 1, "num_warps": 4, "items": 1, "num_chunks": chunks}
        for op in OPS:
            check_variant(communicator, asked(op, (96, 3, 384), "float32", world_size), "push", config=config)


@pytest.mark.parametrize("variant", VARIANTS)
def test_public_calls(rank: int, world_size: int, variant: str) -> None:
    """Strides, given outputs, symmetric inputs, and there and back."""
    x = whole(2, 4, 6, 8)
    for op, function in FUNCTIONS.items():
        mine, due = parts(op, x, rank, world_size)
        with tunedcomm.force(op, variant):
            out = torch.zeros(*due.shape[:3], 16)[..., ::2]
            for _ in range(3):
                assert torch.equal(function(mine), due)
                assert function(mine, out=out) is out
                assert torch.equal(out, due)
            held = tunedcomm.symmetric_empty(tuple(mine.shape), dtype=torch.float32, device=torch.device("cpu"))
            held.copy_(mine)
            assert torch.equal(function(held), due)
            assert torch.equal(held, mine)
    with tunedcomm.force("ulysses_scatter", variant), tunedcomm.force("ulysses_gather", variant):
        mine = parts("ulysses_scatter", x, rank, world_size)[0]
        assert torch.equal(tunedcomm.ulysses_gather(tunedcomm.ulysses_scatter(mine)), mine)


def test_odd_heads_and_refusals(rank: int, world_size: int) -> None:
    for op, function in FUNCTIONS.items():
        mine, due = parts(op, whole(1, 6, 2, 3), rank, world_size)
        assert torch.equal(function(mine), due)
        with tunedcomm.force(op, "push"), pytest.raises(tunedcomm.InfeasibleError, match="16 bytes"):
            function(mine)
        assert function(torch.empty(0, 2, 2, 4)).numel() == 0
        for given, options, said in (
            (torch.ones(1, 3, 3, 4), {}, "multiple of 2"),
            (torch.ones(3, 4, 4), {}, "batch, tokens"),
            (torch.ones(1, 2, 2, 4, dtype=torch.complex64), {}, "view_as_real"),
            (mine, {"out": mine}, "out has shape"),
            (mine, {"max_sms": -1}, "max_sms"),
        ):
            with pytest.raises(tunedcomm.UnsupportedInputError, match=said):
                function(given, **options)
        assert torch.equal(function(mine), due)


def test_gradients_are_each_others(rank: int, world_size: int) -> None:
    for op, function in FUNCTIONS.items():
        mine, due = parts(op, whole(2, 4, 6, 4), rank, world_size)
        seeds = whole(2, 4, 6, 4).cos()
        x = mine.clone().requires_grad_()
        result = function(x)
        assert torch.equal(result, due)
        (result * parts(op, seeds, rank, world_size)[1]).sum().backward()
        assert x.grad is not None
        assert torch.equal(x.grad, parts(op, seeds, rank, world_size)[0])


def test_compiled(rank: int, world_size: int) -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        return tunedcomm.ulysses_gather(tunedcomm.ulysses_scatter(x * 2) + 1)

    mine = parts("ulysses_scatter", whole(1, 4, 2, 4), rank, world_size)[0]
    compiled = torch.compile(program, backend="aot_eager", fullgraph=True)
    for _ in range(3):
        assert torch.equal(compiled(mine), mine * 2 + 1)


def test_bench_and_explain_know_them(rank: int, world_size: int) -> None:
    for op, function in FUNCTIONS.items():
        problem = asked(op, (12, 2, 96), "bfloat16", world_size)
        inputs: tuple[Any, ...] = get_op(op).make_inputs(problem, rank, 1, "random", torch.device("cpu"))
        (tuned,) = contenders_of(get_communicator(), problem, inputs, ["tuned"]).present[1:]
        x = inputs[0].unflatten(2, (-1, 48))
        for _ in range(3):
            tuned.launch(tuned.turns[0])
            assert same_bits(tuned.results[0].view(-1), function(x).view(-1))
        assert tunedcomm.explain(op, x).candidate.variant == "host_unfused"
