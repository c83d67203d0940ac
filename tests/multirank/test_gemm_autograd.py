"""Gradients of the fused GEMMs: against finite differences, PyTorch's own, under checkpointing and compiled."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cases import Case, report, run_cases
from gemm_samples import FP8
from harness import run_ranks
from quick import some_of
from test_autograd import Recorded, as_one_function, grads, leaf, stacked
from torch.utils.checkpoint import checkpoint

import tunedcomm

WORLD_SIZE = 2
OPS = torch.ops.tunedcomm


def several(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> tuple[torch.Tensor, ...]:
    found, gathered = tunedcomm.ag_gemm(a, [b, c.t()], return_gathered=True)
    return (*found, gathered)


def biased(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return tunedcomm.gemm_ar(a, b, bias=bias)


CHECKED: dict[str, tuple[Callable[..., Any], list[tuple[int, ...]]]] = {
    "ag_gemm": (tunedcomm.ag_gemm, [(2, 3), (3, 2)]),
    "ag_gemm nk": (lambda a, b: tunedcomm.ag_gemm(a, b.t()), [(1, 2, 3), (2, 3)]),
    "ag_gemm gathered": (functools.partial(tunedcomm.ag_gemm, return_gathered=True), [(2, 3), (3, 2)]),
    "ag_gemm list": (several, [(2, 3), (3, 2), (1, 3)]),
    "ag_gemm list of one": (lambda a, b: tunedcomm.ag_gemm(a, [b])[0], [(1, 3), (3, 2)]),
    "gemm_rs": (tunedcomm.gemm_rs, [(2, 3), (3, 2)]),
    "gemm_rs avg nk": (lambda a, b: tunedcomm.gemm_rs(a, b.t(), op="avg"), [(2, 2, 3), (2, 3)]),
    "gemm_ar": (biased, [(2, 3), (3, 2), (2,)]),
    "gemm_ar nk, one row": (lambda a, b: tunedcomm.gemm_ar(a, b.t()), [(3,), (2, 3)]),
}


def differences(name: str, rank: int) -> None:
    del rank
    op, shapes = CHECKED[name]
    inputs = tuple(stacked(*shape) for shape in shapes)
    assert torch.autograd.gradcheck(as_one_function(op), inputs)
    assert torch.autograd.gradgradcheck(as_one_function(op), inputs)


def parts(rank: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x [4, 6] of this rank, and two weights [N, K] as linear layers keep them."""
    return leaf(rank, 4, 6), leaf(rank + 10, 8, 6), leaf(rank + 20, 6, 8)


def by_parts(x: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    """`fused` by collectives and products."""
    h = torch.tanh(tunedcomm.all_gather(x) @ up.t())
    return tunedcomm.reduce_scatter(h @ down.t(), op="avg") + tunedcomm.all_reduce(x @ up.t()) @ up


def fused(x: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    h = torch.tanh(tunedcomm.ag_gemm(x, up.t()))
    return tunedcomm.gemm_rs(h, down.t(), op="avg") + tunedcomm.gemm_ar(x, up.t()) @ up


def as_by_parts(rank: int) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        leaves = tuple(each.detach().to(dtype).requires_grad_() for each in parts(rank))
        near = {"rtol": 0.1, "atol": 0.5} if dtype == torch.bfloat16 else {"rtol": 1e-4, "atol": 1e-4}
        found = grads(fused, *leaves)
        torch.testing.assert_close(found, grads(by_parts, *leaves), **near)
        assert [g.dtype for g in found] == [dtype] * 3


def called(function: Callable[..., Any], *leaves: torch.Tensor) -> list[str]:
    with Recorded() as recorded:
        grads(function, *leaves)
    return [call[0].split(".")[1] for call in recorded.calls]


def only_what_is_needed(rank: int) -> None:
    x, up, _ = parts(rank)
    fixed, plain = x.detach(), up.detach()

    def pair(x: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        return tunedcomm.ag_gemm(x, up.t(), return_gathered=True)[0]

    ops = tunedcomm
    assert called(lambda x, up: ops.ag_gemm(x, up.t()), x, up) == ["ag_gemm", "gemm_rs", "all_gather"]
    assert called(lambda x: ops.ag_gemm(x, plain.t()), x) == ["ag_gemm", "gemm_rs"]
    assert called(lambda up: ops.ag_gemm(fixed, up.t()), up) == ["ag_gemm", "all_gather"]
    assert called(pair, x, up) == ["ag_gemm_gathered", "reduce_scatter"], "what was returned is kept"
    assert called(lambda up: pair(fixed, up), up) == ["ag_gemm_gathered"]
    assert called(lambda x, up: ops.ag_gemm(x, [up.t()] * 2)[1], x, up) == ["ag_gemm_list", "reduce_scatter"]
    assert called(lambda x, up: sum(ops.ag_gemm(x, [up.t()] * 2)), x, up) == ["ag_gemm_list", "reduce_scatter"]
    assert called(lambda x, up: ops.gemm_rs(x, up.t()), x, up) == ["gemm_rs", "ag_gemm_gathered"]
    assert called(lambda x: ops.gemm_rs(x, plain.t()), x) == ["gemm_rs", "ag_gemm"]
    assert called(lambda up: ops.gemm_rs(fixed, up.t()), up) == ["gemm_rs", "all_gather"]
    assert called(lambda x, up: ops.gemm_ar(x, up.t()), x, up) == ["gemm_ar", "all_reduce"]
    bias = leaf(5, 8)
    assert called(lambda bias: ops.gemm_ar(fixed, plain.t(), bias=bias), bias) == ["gemm_ar"]


def under_autocast(rank: int) -> None:
    """Products are of the operands' dtype, forward and, as every rank sends in it, backward."""
    x, up, _ = parts(rank)
    half, half_up = x.detach().bfloat16(), up.detach().bfloat16()
    wide = tunedcomm.gemm_ar(half, half_up.t(), out_dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(tunedcomm.gemm_ar(half, half_up.t(), out_dtype=torch.float32), wide)
    expected = grads(lambda x, up: tunedcomm.gemm_ar(x, up.t()), x, up)
    loss = tunedcomm.gemm_ar(x, up.t()).square().sum()
    made = tunedcomm.ag_gemm(x, up.t(), return_gathered=True)
    with torch.autocast("cpu", torch.bfloat16):
        assert all(map(torch.equal, torch.autograd.grad(loss, (x, up)), expected))
        (found,) = torch.autograd.grad(made[rank].sum(), x)  # the product on one rank, what was gathered on the other
    torch.testing.assert_close(found, (leaf(10, 8, 6).detach().sum(0) + 1).expand(4, 6))


def refused(rank: int) -> None:
    x, up, _ = parts(rank)
    eight, one = x.detach().to(FP8).requires_grad_(), torch.ones(1)
    b, name = up.detach().to(FP8).t(), dist.group.WORLD.group_name
    calls: dict[str, Callable[[], Any]] = {
        "gemm_ar of torch.float8_e4m3fn": lambda: tunedcomm.gemm_ar(eight, b, scale_a=one, scale_b=one),
        "gemm_rs of torch.float8_e4m3fn": lambda: OPS.gemm_rs(eight, b, one, one, None, "sum", WORLD_SIZE, name),
        "ag_gemm of torch.float8_e4m3fn": lambda: tunedcomm.ag_gemm(eight, [b], scale_a=one, scale_b=[one]),
        "gemm_rs into a given tensor": lambda: tunedcomm.gemm_rs(x, up.t(), out=torch.empty(2, 8)),
        "ag_gemm_gathered into a given tensor": lambda: tunedcomm.ag_gemm(
            x, up.t(), out=torch.empty(8, 8), return_gathered=True
        ),
        "ag_gemm into a given tensor": lambda: tunedcomm.ag_gemm(x, [up.t()], out=[torch.empty(8, 8)]),
    }
    for text, call in calls.items():
        with pytest.raises(tunedcomm.UnsupportedInputError, match=f"{text}.* not differentiable"):
            call()


def compiled(rank: int) -> None:
    leaves = parts(rank)

    def listed(x: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
        (y, z), gathered = tunedcomm.ag_gemm(x, [up.t(), down], return_gathered=True)
        return tunedcomm.gemm_rs(torch.cat([y * z, gathered @ down], dim=1), torch.cat([down, up.t()], dim=1).t())

    for function in (fused, listed):
        wanted = grads(function, *leaves)
        for run in (function, functools.partial(checkpoint, function, use_reentrant=False)):
            torch._dynamo.reset()
            got = grads(torch.compile(run, backend="aot_eager", fullgraph=True), *leaves)
            torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)


CASES: dict[str, Case] = {
    **{name: functools.partial(differences, name) for name in CHECKED},
    "as by parts": as_by_parts,
    "no collective that nobody needs": only_what_is_needed,
    "under autocast": under_autocast,
    "refused": refused,
    "compiled": compiled,
}
CASES = some_of(CASES, 3)


def body(rank: int, world_size: int) -> dict[str, str]:
    return run_cases(CASES, rank)


@pytest.fixture(scope="module")
def outcomes() -> list[dict[str, str]]:
    return run_ranks(WORLD_SIZE, body, timeout=180)


@pytest.mark.parametrize("name", CASES)
def test_gradient(outcomes: list[dict[str, str]], name: str) -> None:
    report(outcomes, name)
