"""Gradients of the ops: against finite differences, PyTorch's own, under checkpointing and compiled."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.nn.functional as dist_nn
from cases import Ranks
from gemm_samples import FP8
from quick import some
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import tunedcomm

WORLD_SIZE = 2
RANKS = Ranks()


class Mine(torch.autograd.Function):
    """Rank r's part of what every rank has whole; with `Whole` it makes the ranks' program one function."""

    @staticmethod
    def forward(ctx: Any, whole: torch.Tensor) -> torch.Tensor:
        return whole[dist.get_rank()].clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return Whole.apply(grad)


class Whole(torch.autograd.Function):
    """What the ranks have, stacked."""

    @staticmethod
    def forward(ctx: Any, mine: torch.Tensor) -> torch.Tensor:
        parts = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, mine.contiguous())
        return torch.stack(parts)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return Mine.apply(grad)


def as_one_function(op: Callable[..., Any]) -> Callable[..., Any]:
    """All ranks' inputs to all ranks' results, as `gradcheck` can perturb them one by one on every rank alike."""

    def function(*stacked: torch.Tensor) -> Any:
        results = op(*(Mine.apply(each) for each in stacked))
        return tuple(map(Whole.apply, results)) if isinstance(results, tuple) else Whole.apply(results)

    return function


def stacked(*shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    made = torch.randn(WORLD_SIZE, *shape, dtype=dtype, generator=torch.Generator().manual_seed(sum(shape)))
    return made.requires_grad_()


def norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, residual: torch.Tensor) -> Any:
    return tunedcomm.all_reduce_rms_norm(x, weight, bias=bias, residual=residual, eps=1e-3)


def experts(x: torch.Tensor, weights: torch.Tensor) -> Any:
    ids = torch.tensor([[0, 3], [2, -1], [3, 1]]).roll(torch.distributed.get_rank(), 0)
    sent = tunedcomm.ep_dispatch(x, ids, num_experts=4, layout="contiguous", alignment=2)
    return tunedcomm.ep_combine(sent.tokens.sin() * sent.tokens, sent, weights)


def experts_by_rank(x: torch.Tensor, weights: torch.Tensor, later: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Weights that travel with the tokens, and others that ep_combine exchanges."""
    ids = torch.tensor([[0, 3], [2, -1], [3, 1]]).roll(torch.distributed.get_rank(), 0)
    sent = tunedcomm.ep_dispatch(x, ids, num_experts=4, layout="contiguous", alignment=2, topk_weights=weights)
    results = sent.tokens.sin() * sent.tokens
    first = tunedcomm.ep_combine(results, sent, reduce="rank")
    return first, tunedcomm.ep_combine(results, replace(sent, weights=None), later, reduce="rank")


def several(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> tuple[torch.Tensor, ...]:
    found, gathered = tunedcomm.ag_gemm(a, [b, c.t()], return_gathered=True)
    return (*found, gathered)


def biased(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return tunedcomm.gemm_ar(a, b, bias=bias)


CHECKED: dict[str, tuple[Callable[..., Any], list[tuple[int, ...]]]] = {
    "all_reduce": (tunedcomm.all_reduce, [(2, 3)]),
    "all_reduce avg": (functools.partial(tunedcomm.all_reduce, op="avg"), [(3,)]),
    "all_gather": (tunedcomm.all_gather, [(2, 3)]),
    "all_gather dim -1": (functools.partial(tunedcomm.all_gather, dim=-1), [(2, 3)]),
    "all_gather scalar": (tunedcomm.all_gather, [()]),
    "reduce_scatter": (tunedcomm.reduce_scatter, [(4, 2)]),
    "reduce_scatter avg dim 1": (functools.partial(tunedcomm.reduce_scatter, op="avg", dim=1), [(2, 4)]),
    "all_to_all": (tunedcomm.all_to_all, [(4, 2)]),
    "broadcast": (functools.partial(tunedcomm.broadcast, src=1), [(4, 2)]),
    "all_gather_v": (lambda x: tunedcomm.all_gather_v(x, [2, 2], max_count=3), [(2, 2)]),
    "all_gather_v padded": (lambda x: tunedcomm.all_gather_v(x, max_count=2)[0], [(2, 2)]),
    "reduce_scatter_v": (lambda x: tunedcomm.reduce_scatter_v(x, [1, 1], max_count=2), [(2, 2)]),
    "ulysses_scatter": (tunedcomm.ulysses_scatter, [(1, 2, 2, 1)]),
    "ulysses_gather": (tunedcomm.ulysses_gather, [(1, 2, 1, 2)]),
    "ep_dispatch, ep_combine": (experts, [(3, 2), (3, 2)]),
    "ep_combine by rank": (experts_by_rank, [(3, 2), (3, 2), (3, 2)]),
    "all_reduce_bias": (tunedcomm.all_reduce_bias, [(2, 3), (3,)]),
    "all_reduce_rms_norm": (norm, [(2, 3), (3,), (3,), (2, 3)]),
    "all_reduce_rms_norm one row": (tunedcomm.all_reduce_rms_norm, [(3,), (3,)]),
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


@pytest.mark.parametrize("name", some(CHECKED))
def test_gradient(rank: int, name: str) -> None:
    op, shapes = CHECKED[name]
    inputs = tuple(stacked(*shape) for shape in shapes)
    assert torch.autograd.gradcheck(as_one_function(op), inputs)
    assert torch.autograd.gradgradcheck(as_one_function(op), inputs)


def leaf(rank: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(rank)).requires_grad_()


def grads(function: Callable[..., torch.Tensor], *leaves: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return torch.autograd.grad(function(*leaves).square().sum(), leaves)


def test_as_torch_distributed_nn_functional(rank: int) -> None:
    x = leaf(rank, 4, 6)
    group = dist.group.WORLD

    def scattered(x: torch.Tensor) -> Any:
        return dist_nn.all_to_all([torch.empty(2, 6) for _ in range(2)], list(x.chunk(2)))

    pairs: list[tuple[Any, Any]] = [
        (tunedcomm.all_reduce, lambda x: dist_nn.all_reduce(x.clone(), group=group)),
        (tunedcomm.all_gather, lambda x: torch.cat(dist_nn.all_gather(x))),
        (tunedcomm.all_to_all, lambda x: torch.cat(scattered(x))),
    ]
    for ours, theirs in pairs:
        assert torch.equal(ours(x), theirs(x)), ours
        torch.testing.assert_close(grads(ours, x), grads(theirs, x))


class Recorded(TorchDispatchMode):
    """What is called of the operators."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, ...]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "tunedcomm":
            self.calls.append((str(func), *args[1:]))
        return func(*args, **(kwargs or {}))


def test_settings_carry_over(rank: int) -> None:
    """Group, policy and SMs of the forward pass hold for the backward pass."""
    name = dist.new_group(list(range(WORLD_SIZE)))
    chosen = {"numerics": "any", "max_sms": 8, "group": name}
    said = (WORLD_SIZE, name.group_name, "any", 8)
    with Recorded() as recorded:
        grads(functools.partial(tunedcomm.all_reduce, op="avg", **chosen), leaf(rank, 6))
        grads(functools.partial(tunedcomm.reduce_scatter, **chosen), leaf(rank, 6))
    reduced = ("tunedcomm.all_reduce.default", "avg", *said)
    scattered = ("tunedcomm.reduce_scatter.default", "sum", 0, *said)
    gathered = ("tunedcomm.all_gather.default", 0, WORLD_SIZE, name.group_name, 8)
    assert recorded.calls == [reduced, reduced, scattered, gathered]


def test_inside_no_grad(rank: int) -> None:
    x = leaf(rank, 6)
    with torch.no_grad():
        assert not tunedcomm.all_reduce(x).requires_grad
    with torch.inference_mode():
        assert tunedcomm.all_reduce(x).is_inference()
    assert not tunedcomm.all_reduce(x.detach()).requires_grad
    for variant in ("lamport", "library"):  # a repeated call must not be taken for one that records nothing
        with tunedcomm.force("all_reduce", variant):
            with torch.no_grad():
                for _ in range(3):
                    tunedcomm.all_reduce(x)
            assert tunedcomm.all_reduce(x).requires_grad


def test_refused_operators(rank: int) -> None:
    """Called by name, too, an operator without a gradient refuses and does not forget it."""
    x, w, y, up = leaf(rank, 6), torch.ones(6), leaf(rank, 4, 6), leaf(10, 8, 6)
    settings, ops = (WORLD_SIZE, dist.group.WORLD.group_name), torch.ops.tunedcomm
    eight, b, one = y.detach().to(FP8).requires_grad_(), up.detach().to(FP8).t(), torch.ones(1)
    calls: dict[str, Callable[[], Any]] = {
        "all_reduce with op='max'": lambda: ops.all_reduce(x, "max", *settings),
        "reduce_scatter with op='min'": lambda: ops.reduce_scatter(x, "min", 0, *settings),
        "all_reduce in place": lambda: ops.all_reduce_(x * 1, "sum", *settings),
        "all_reduce into a given tensor": lambda: ops.all_reduce.out(x, "sum", *settings, out=torch.empty(6)),
        "all_reduce_rms_norm with out_dtype": lambda: ops.all_reduce_rms_norm(
            x, w, None, None, one, 1e-6, FP8, *settings
        ),
        "all_gather of torch.float8_e4m3fn": lambda: ops.all_gather(eight, 0, *settings),
        "gemm_ar of torch.float8_e4m3fn": lambda: tunedcomm.gemm_ar(eight, b, scale_a=one, scale_b=one),
        "gemm_rs of torch.float8_e4m3fn": lambda: ops.gemm_rs(eight, b, one, one, None, "sum", *settings),
        "ag_gemm of torch.float8_e4m3fn": lambda: tunedcomm.ag_gemm(eight, [b], scale_a=one, scale_b=[one]),
        "gemm_rs into a given tensor": lambda: tunedcomm.gemm_rs(y, up.t(), out=torch.empty(2, 8)),
        "ag_gemm_gathered into a given tensor": lambda: tunedcomm.ag_gemm(
            y, up.t(), out=torch.empty(8, 8), return_gathered=True
        ),
        "ag_gemm into a given tensor": lambda: tunedcomm.ag_gemm(y, [up.t()], out=[torch.empty(8, 8)]),
    }
    for text, call in calls.items():
        with pytest.raises(tunedcomm.UnsupportedInputError, match=f"{text}.* not differentiable"):
            call()


def layer(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    y, h = tunedcomm.all_reduce_rms_norm(torch.tanh(x), w, residual=x)
    gathered = tunedcomm.all_gather(y, dim=1)
    return tunedcomm.reduce_scatter(gathered.sigmoid(), dim=1) + tunedcomm.all_reduce(h, op="avg")


def test_checkpointed(rank: int) -> None:
    x, w = leaf(rank, 4, 6), leaf(9, 6)
    wanted = grads(layer, x, w)
    for reentrant in (False, True):
        x.grad = w.grad = None
        checkpoint(layer, x, w, use_reentrant=reentrant).square().sum().backward()
        torch.testing.assert_close((x.grad, w.grad), wanted, atol=0, rtol=0)


def parts(rank: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x [4, 6] of this rank, and two weights [N, K] as linear layers keep them."""
    return leaf(rank, 4, 6), leaf(rank + 10, 8, 6), leaf(rank + 20, 6, 8)


def fused(x: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    h = torch.tanh(tunedcomm.ag_gemm(x, up.t()))
    return tunedcomm.gemm_rs(h, down.t(), op="avg") + tunedcomm.gemm_ar(x, up.t()) @ up


def called(function: Callable[..., Any], *leaves: torch.Tensor) -> list[str]:
    """The operators of a forward and a backward pass."""
    with Recorded() as recorded:
        grads(function, *leaves)
    return [call[0].split(".")[1] for call in recorded.calls]


def test_backward_passes_call_only_what_is_needed(rank: int) -> None:
    x, up, _ = parts(rank)
    fixed, plain = x.detach(), up.detach()

    def pair(x: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        return tunedcomm.ag_gemm(x, up.t(), return_gathered=True)[0]

    ops, bias = tunedcomm, leaf(5, 8)
    assert called(lambda bias: ops.all_reduce_bias(torch.ones(3, 8), bias), bias) == ["all_reduce_bias"]
    assert called(ops.all_reduce, x) == ["all_reduce", "all_reduce"]
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
    assert called(lambda bias: ops.gemm_ar(fixed, plain.t(), bias=bias), bias) == ["gemm_ar"]


@pytest.mark.slow
def test_gemms_under_autocast(rank: int) -> None:
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


def listed(x: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    (y, z), gathered = tunedcomm.ag_gemm(x, [up.t(), down], return_gathered=True)
    return tunedcomm.gemm_rs(torch.cat([y * z, gathered @ down], dim=1), torch.cat([down, up.t()], dim=1).t())


@pytest.mark.parametrize(
    "name", ["layer", pytest.param("fused", marks=pytest.mark.slow), pytest.param("listed", marks=pytest.mark.slow)]
)
def test_compiled_and_recomputed(rank: int, name: str) -> None:
    function, leaves = globals()[name], (leaf(rank, 4, 6), leaf(9, 6)) if name == "layer" else parts(rank)
    wanted = grads(function, *leaves)
    for run in (function, functools.partial(checkpoint, function, use_reentrant=False)):
        torch._dynamo.reset()
        got = grads(torch.compile(run, backend="aot_eager", fullgraph=True), *leaves)
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)


def test_transformed(rank: int) -> None:
    """PyTorch has no torch.func transforms of library operators; said before anything is sent."""
    x, w = leaf(rank, 3, 6).detach(), torch.ones(6)
    for function in (tunedcomm.all_reduce, tunedcomm.all_gather, lambda x: tunedcomm.all_reduce_rms_norm(x, w)[0]):
        with pytest.raises(tunedcomm.UnsupportedInputError, match=r"use torch\.autograd\.grad"):
            torch.func.grad(lambda x, f=function: f(x).square().sum())(x)
        with pytest.raises(tunedcomm.UnsupportedInputError, match="outside the transform"):
            torch.vmap(function)(x)


def test_forward_mode(rank: int) -> None:
    """No result would have the tangent, so such a call is refused, also where the call before it was fast."""
    x, weight, counts = leaf(rank, 4, 8).detach(), torch.ones(8), [2, 2]
    calls: tuple[Callable[..., Any], ...] = (
        tunedcomm.all_reduce,
        tunedcomm.all_reduce_,
        tunedcomm.all_gather,
        lambda x: tunedcomm.all_reduce_rms_norm(x, weight),
        lambda x: tunedcomm.all_to_all_v(x, counts, counts, max_count=2),
        lambda x: tunedcomm.ag_gemm(x, [x.new_ones(8, 8)]),
    )
    with tunedcomm.force("all_reduce", "lamport"), tunedcomm.force("all_reduce_rms_norm", "lamport"):
        for call in calls:
            for _ in range(3):
                call(x.clone())
            with forward_ad.dual_level():
                plain = call(x.clone())
                with pytest.raises(tunedcomm.UnsupportedInputError, match="no forward-mode derivatives"):
                    call(forward_ad.make_dual(x.clone(), torch.ones_like(x)))
                assert plain is not None
