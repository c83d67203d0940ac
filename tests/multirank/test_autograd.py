"""Gradients of the ops: against finite differences, PyTorch's own, under checkpointing and compiled."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.nn.functional as dist_nn
from cases import Case, Launched, report, run_cases, spy_on_launches
from harness import run_ranks
from quick import some_of
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import tunedcomm

WORLD_SIZE = 2


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


CHECKED: dict[str, tuple[Callable[..., Any], list[tuple[int, ...]]]] = {
    "all_reduce": (tunedcomm.all_reduce, [(2, 3)]),
    "all_reduce avg": (functools.partial(tunedcomm.all_reduce, op="avg"), [(3,)]),
    "all_gather": (tunedcomm.all_gather, [(2, 3)]),
    "all_gather dim -1": (functools.partial(tunedcomm.all_gather, dim=-1), [(2, 3)]),
    "all_gather scalar": (tunedcomm.all_gather, [()]),
    "reduce_scatter": (tunedcomm.reduce_scatter, [(4, 2)]),
    "reduce_scatter avg dim 1": (functools.partial(tunedcomm.reduce_scatter, op="avg", dim=1), [(2, 4)]),
    "all_to_all": (tunedcomm.all_to_all, [(4, 2)]),
    "ep_dispatch, ep_combine": (experts, [(3, 2), (3, 2)]),
    "all_reduce_bias": (tunedcomm.all_reduce_bias, [(2, 3), (3,)]),
    "all_reduce_rms_norm": (norm, [(2, 3), (3,), (3,), (2, 3)]),
    "all_reduce_rms_norm one row": (tunedcomm.all_reduce_rms_norm, [(3,), (3,)]),
}


def differences(name: str, rank: int) -> None:
    del rank
    op, shapes = CHECKED[name]
    inputs = tuple(stacked(*shape) for shape in shapes)
    assert torch.autograd.gradcheck(as_one_function(op), inputs)
    assert torch.autograd.gradgradcheck(as_one_function(op), inputs)


GRADIENT_CASES: dict[str, Case] = {
    **{name: functools.partial(differences, name) for name in CHECKED},
}
GRADIENT_CASES = some_of(GRADIENT_CASES, 3)


def gradient_body(rank: int, world_size: int) -> dict[str, str]:
    return run_cases(GRADIENT_CASES, rank)


@pytest.fixture(scope="module")
def gradient_outcomes() -> list[dict[str, str]]:
    return run_ranks(WORLD_SIZE, gradient_body, timeout=120)


@pytest.mark.parametrize("name", GRADIENT_CASES)
def test_gradient(gradient_outcomes: list[dict[str, str]], name: str) -> None:
    report(gradient_outcomes, name)


def leaf(rank: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(rank)).requires_grad_()


def grads(function: Callable[..., torch.Tensor], *leaves: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return torch.autograd.grad(function(*leaves).square().sum(), leaves)


def as_pytorch(rank: int) -> None:
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


def only_what_is_needed(rank: int) -> None:
    """A bias alone needs no collective in the backward pass."""
    launched: list[Launched] = []
    with torch.no_grad():
        tunedcomm.release_communicators()
        spy_on_launches(launched)
    bias = leaf(7, 6)
    x = torch.ones(3, 6)
    tunedcomm.all_reduce_bias(x, bias).sum().backward()
    assert torch.equal(bias.grad, torch.full((6,), 3.0))
    assert not launched
    grads(tunedcomm.all_reduce, leaf(rank, 6))
    assert len(launched) == 2, "one forward, one backward"


class Recorded(TorchDispatchMode):
    """What is called of the operators."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, ...]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "tunedcomm":
            self.calls.append((str(func), *args[1:]))
        return func(*args, **(kwargs or {}))


def settings_carry_over(rank: int) -> None:
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


def inside_no_grad(rank: int) -> None:
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


def refused_operators(rank: int) -> None:
    """Called by name, too, an operator without a gradient refuses and does not forget it."""
    x, settings = leaf(rank, 6), (WORLD_SIZE, dist.group.WORLD.group_name)
    ops = torch.ops.tunedcomm
    w = torch.ones(6)
    fp8 = (None, None, torch.ones(1), 1e-6, torch.float8_e4m3fn)
    calls: dict[str, Callable[[], Any]] = {
        "all_reduce with op='max'": lambda: ops.all_reduce(x, "max", *settings),
        "reduce_scatter with op='min'": lambda: ops.reduce_scatter(x, "min", 0, *settings),
        "all_reduce in place": lambda: ops.all_reduce_(x * 1, "sum", *settings),
        "all_reduce into a given tensor": lambda: ops.all_reduce.out(x, "sum", *settings, out=torch.empty(6)),
        "all_reduce_rms_norm with out_dtype": lambda: ops.all_reduce_rms_norm(x, w, *fp8, *settings),
        "all_gather of torch.float8_e5m2": lambda: ops.all_gather(
            x.detach().to(torch.float8_e5m2).requires_grad_(), 0, *settings
        ),
    }
    for text, call in calls.items():
        with pytest.raises(tunedcomm.UnsupportedInputError, match=f"{text}.* not differentiable"):
            call()


def layer(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    y, h = tunedcomm.all_reduce_rms_norm(torch.tanh(x), w, residual=x)
    gathered = tunedcomm.all_gather(y, dim=1)
    return tunedcomm.reduce_scatter(gathered.sigmoid(), dim=1) + tunedcomm.all_reduce(h, op="avg")


def checkpointed(rank: int) -> None:
    x, w = leaf(rank, 4, 6), leaf(9, 6)
    wanted = grads(layer, x, w)
    for reentrant in (False, True):
        x.grad = w.grad = None
        checkpoint(layer, x, w, use_reentrant=reentrant).square().sum().backward()
        torch.testing.assert_close((x.grad, w.grad), wanted, atol=0, rtol=0)


def compiled(rank: int) -> None:
    x, w = leaf(rank, 4, 6), leaf(9, 6)
    wanted = grads(layer, x, w)

    def recomputed(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return checkpoint(layer, x, w, use_reentrant=False)

    for function in (layer, recomputed):
        torch._dynamo.reset()
        got = grads(torch.compile(function, backend="aot_eager", fullgraph=True), x, w)
        torch.testing.assert_close(got, wanted)


def transformed(rank: int) -> None:
    """PyTorch has no torch.func transforms of library operators; said before anything is sent."""
    x, w = leaf(rank, 3, 6).detach(), torch.ones(6)
    for function in (tunedcomm.all_reduce, tunedcomm.all_gather, lambda x: tunedcomm.all_reduce_rms_norm(x, w)[0]):
        with pytest.raises(tunedcomm.UnsupportedInputError, match=r"use torch\.autograd\.grad"):
            torch.func.grad(lambda x, f=function: f(x).square().sum())(x)
        with pytest.raises(tunedcomm.UnsupportedInputError, match="outside the transform"):
            torch.vmap(function)(x)


def forward_mode(rank: int) -> None:
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


USE_CASES: dict[str, Case] = {
    "forward mode": forward_mode,
    "as torch.distributed.nn.functional": as_pytorch,
    "no collective that nobody needs": only_what_is_needed,
    "settings carry over": settings_carry_over,
    "without gradients": inside_no_grad,
    "refusals of operators": refused_operators,
    "checkpointed": checkpointed,
    "compiled": compiled,
    "torch.func": transformed,
}


def use_body(rank: int, world_size: int) -> dict[str, str]:
    return run_cases(USE_CASES, rank)


@pytest.fixture(scope="module")
def use_outcomes() -> list[dict[str, str]]:
    return run_ranks(WORLD_SIZE, use_body, timeout=180)


@pytest.mark.parametrize("name", USE_CASES)
def test_use(use_outcomes: list[dict[str, str]], name: str) -> None:
    report(use_outcomes, name)
