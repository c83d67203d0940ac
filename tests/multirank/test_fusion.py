"""The fusion pass on graphs of functional collectives: every pattern, and everything that is left, with its reason."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from cases import Ranks
from fusion_samples import calls_of, compiled, fused_ops
from quick import some
from torch import fx

import tunedcomm

WORLD_SIZE = 2
RANKS = Ranks(timeout=400)
M, K, N = 4, 16, 8
Tensor = torch.Tensor


def drawn(rank: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape) + 100 * rank))


def world() -> dist.ProcessGroup:
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def gather(x: Tensor, dim: int = 0) -> Tensor:
    return funcol.wait_tensor(funcol.all_gather_tensor(x, dim, world()))


def scatter(x: Tensor, dim: int = 0, op: str = "sum") -> Tensor:
    return funcol.wait_tensor(funcol.reduce_scatter_tensor(x, op, dim, world()))


def reduce(x: Tensor, op: str = "sum") -> Tensor:
    return funcol.wait_tensor(funcol.all_reduce(x, op, world()))


def let(value: Any, body: Callable[[Any], Any]) -> Any:
    return body(value)


def norm(h: Tensor, weight: Tensor) -> Tensor:
    return torch.nn.functional.rms_norm(h, (h.shape[-1],), weight, 1e-5)


def llama_norm(h: Tensor, weight: Tensor) -> Tensor:
    wide = h.float()
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)).to(h.dtype)


def outcome(
    function: Callable[..., Any], *inputs: Tensor, when: Any = "always"
) -> tuple[list[str], list[str], tunedcomm.FusionPass]:
    """The graph's communication after the pass, what was fused, and the pass; results are as without it."""
    fusion = tunedcomm.fusion_pass(when=when, even_shards=True)
    graphs: list[fx.Graph] = []
    with torch.no_grad():
        got = compiled(function, fusion, graphs)(*inputs)
        near = {"rtol": 2e-2, "atol": 2e-2} if inputs[0].dtype == torch.bfloat16 else {"rtol": 1e-4, "atol": 1e-4}
        torch.testing.assert_close(got, function(*inputs), **near)
    assert len(graphs) == 1
    return calls_of(*graphs), fused_ops(fusion), fusion


# Name to the function, and the shapes of its arguments: weights are [N, K] as layers keep them, or [K, N].
FUSED: dict[str, tuple[Callable[..., Any], list[tuple[int, ...]], list[str]]] = {
    "gather, product": (lambda x, w: gather(x) @ w.t(), [(M, K), (N, K)], ["ag_gemm"]),
    "gather, product with [K, N]": (lambda x, w: gather(x) @ w, [(M, K), (K, N)], ["ag_gemm"]),
    "gather of three dimensions": (lambda x, w: gather(x) @ w, [(M, 3, K), (K, N)], ["ag_gemm"]),
    "gather along the sequence": (lambda x, w: gather(x, 1) @ w.t(), [(1, M, K), (N, K)], ["ag_gemm"]),
    "gather, parts joined along the sequence": (
        lambda x, w: torch.cat(torch.chunk(gather(x), WORLD_SIZE), dim=1) @ w.t(),
        [(1, M, K), (N, K)],
        ["ag_gemm"],
    ),
    "gather, linear with bias": (
        lambda x, w, b: torch.relu(torch.nn.functional.linear(gather(x, 1), w, b)),
        [(1, M, K), (N, K), (N,)],
        ["ag_gemm"],
    ),
    "gather, used elsewhere, too": (
        lambda x, w: let(gather(x), lambda g: (g @ w, g.sum(0))),
        [(M, K), (K, N)],
        ["ag_gemm_gathered"],
    ),
    "gather, q k v": (
        lambda x, q, k, v: let(gather(x, 1), lambda g: (g @ q.t() * (g @ k.t())).sum() + g @ v),
        [(1, M, K), (N, K), (N, K), (K, 3)],
        ["ag_gemm_list"],
    ),
    "gather, two products and another user": (
        lambda x, q, k: let(gather(x), lambda g: (g @ q.t(), torch.cos(g), (g * 2) @ k)),
        [(M, K), (N, K), (K, 3)],
        ["ag_gemm_gathered"],
    ),
    "gather, weight computed later": (
        lambda x, w: let(gather(x), lambda g: torch.relu(g) + g @ (w * 2).t()),
        [(M, K), (K, K)],
        ["ag_gemm_gathered"],
    ),
    "product, scatter": (lambda x, w: scatter(x @ w.t()), [(M, K), (N, K)], ["gemm_rs"]),
    "product, scatter avg": (lambda x, w: scatter(x @ w, op="avg"), [(M, K), (K, N)], ["gemm_rs"]),
    "product, scatter along the sequence": (lambda x, w: scatter(x @ w.t(), 1), [(1, M, K), (N, K)], ["gemm_rs"]),
    "linear with bias, scatter": (
        lambda x, w, b: scatter(torch.nn.functional.linear(x, w, b), 1),
        [(1, M, K), (N, K), (N,)],
        ["all_reduce", "gemm_rs"],
    ),
    "product, reduce": (lambda x, w: reduce(x @ w.t()) * 2, [(M, K), (N, K)], ["gemm_ar"]),
    "product, reduce of three dimensions": (lambda x, w: reduce(x @ w), [(2, M, K), (K, N)], ["gemm_ar"]),
    "linear with bias, reduce": (
        lambda x, w, b: reduce(torch.nn.functional.linear(x, w, b)),
        [(M, K), (N, K), (N,)],
        ["all_reduce", "gemm_ar"],
    ),
    "reduce, norm": (lambda x, w: norm(reduce(x), w), [(M, K), (K,)], ["all_reduce_rms_norm"]),
    "reduce, residual, norm": (
        lambda x, w, r: let(r + reduce(x), lambda h: (h, norm(h, w))),
        [(1, M, K), (K,), (1, M, K)],
        ["all_reduce_rms_norm"],
    ),
    "reduce, bias, residual, norm": (
        lambda x, w, r, b: norm(reduce(x) + b + r, w),
        [(M, K), (K,), (M, K), (K,)],
        ["all_reduce_rms_norm"],
    ),
    "reduce of rows, residual, norm": (
        lambda x, w, r: norm(reduce(x).view(1, M, K) + r, w),
        [(M, K), (K,), (1, M, K)],
        ["all_reduce_rms_norm"],
    ),
    "norm written out": (lambda x, w, r: llama_norm(reduce(x) + r, w), [(M, K), (K,), (M, K)], ["all_reduce_rms_norm"]),
    "two sums in a row": (
        lambda x, w, r: let(r + reduce(x), lambda h: norm(h + reduce(norm(h, w)), w)),
        [(M, K), (K,), (M, K)],
        ["all_reduce_rms_norm", "all_reduce_rms_norm"],
    ),
}


@pytest.mark.parametrize(
    ("name", "dtype"), some([(name, dtype) for name in FUSED for dtype in (torch.float32, torch.bfloat16)], 5)
)
def test_fused(rank: int, name: str, dtype: torch.dtype) -> None:
    function, shapes, wanted = FUSED[name]
    inputs = [drawn(rank if place == 0 else 9 + place, *shape).to(dtype) for place, shape in enumerate(shapes)]
    calls, fused, fusion = outcome(function, *inputs)
    assert calls == wanted, str(fusion)
    assert len(fused) == len([op for op in wanted if op != "all_reduce"])
    kept, nothing, _ = outcome(function, *inputs, when="never")
    assert not nothing
    assert not any(call.startswith(("ag_", "gemm_")) or "norm" in call for call in kept)


def norm_of_converted(dtype: torch.dtype, after: bool = False) -> Callable[[Tensor, Tensor], Tensor]:
    """A norm in which numbers are rounded to another dtype, before it or in it."""

    def function(x: Tensor, w: Tensor) -> Tensor:
        h = reduce(x)
        wide = h if after else h.to(dtype).float()
        normal = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)
        return w * (normal.to(dtype).float() if after else normal)

    return function


def test_lossy_norms_are_left(rank: int) -> None:
    """What a conversion drops is no part of the fused op."""
    x, w = drawn(rank, M, K) * 3, drawn(9, K)
    for dtype in (torch.int8, torch.float8_e4m3fn, torch.bfloat16):
        for after in (False, True):
            calls, fused, _ = outcome(norm_of_converted(dtype, after), x, w)
            assert (calls, fused) == (["all_reduce"], []), (dtype, after)


def through_gather_order(x: Tensor, w: Tensor) -> Tensor:
    return gather(x, 1) @ w


def weight_from_gather(x: Tensor, w: Tensor) -> Tensor:
    gathered = gather(x)
    return gathered @ (w + gathered.sum())


LEFT: dict[str, tuple[Callable[..., Any], list[tuple[int, ...]]]] = {
    "put in another order before any product": (through_gather_order, [(3, M, K), (K, N)]),
    "put in another order behind any product": (lambda x, w: scatter(x @ w, 1), [(3, M, K), (K, N)]),
    "no product of the gathered rows follows": (lambda x: gather(x) * 2, [(M, K)]),
    "what is gathered has no rows": (lambda x: gather(x) * 2, [(M,)]),
    "is computed after wait_tensor": (weight_from_gather, [(M, K), (K, N)]),
    "is no product of two matrices": (lambda x: scatter(torch.sin(x)), [(M, K)]),
    "it reduces by max": (lambda x, w: reduce(x @ w, "max"), [(M, K), (K, N)]),
    "it reduces by avg": (lambda x, w: reduce(x @ w, "avg"), [(M, K), (K, N)]),
    "mm is used elsewhere, too": (lambda x, w: let(x @ w, lambda y: reduce(y) + y), [(M, K), (K, N)]),
    "what addmm adds is no row": (lambda x, w, y: reduce(torch.addmm(y, x, w)), [(M, K), (K, N), (M, N)]),
    "scales its summands": (lambda x, w, y: reduce(torch.addmm(y, x, w, alpha=2)), [(M, K), (K, N), (N,)]),
    "columns are not those of what is reduced": (lambda x, w: reduce((x @ w).view(2, -1)), [(M, K), (K, N)]),
    "what is added to it is used elsewhere, too": (
        lambda x, w, r: let(reduce(x), lambda s: norm(s + r, w) + s.cos()),
        [(M, K), (K,), (M, K)],
    ),
}


@pytest.mark.parametrize("reason", some(LEFT, 5))
def test_left(rank: int, reason: str) -> None:
    function, shapes = LEFT[reason]
    inputs = [drawn(rank if place == 0 else 9 + place, *shape) for place, shape in enumerate(shapes)]
    calls, fused, fusion = outcome(function, *inputs)
    assert not fused
    assert all(call.startswith(("all_", "reduce_scatter")) and "norm" not in call for call in calls)
    assert any(reason in record.why for record in fusion.records), str(fusion)


@pytest.mark.slow
def test_other_groups(rank: int) -> None:
    other = dist.new_group(list(range(WORLD_SIZE)))
    assert other is not None

    def function(x: Tensor, w: Tensor) -> Tensor:
        y = funcol.wait_tensor(funcol.all_reduce(x @ w, "sum", other))
        return gather(y) @ w.t()

    x, w = drawn(rank, M, K), drawn(9, K, N)
    calls, _, fusion = outcome(function, x, w)
    assert calls == ["all_reduce", "ag_gemm"]
    assert f"all_reduce: left (group {other.group_name!r} is not among the pass's)" in str(fusion)
    both = tunedcomm.fusion_pass(other, None, when="always", even_shards=True)
    graphs: list[fx.Graph] = []
    with torch.no_grad():
        torch.testing.assert_close(compiled(function, both, graphs)(x, w), function(x, w), rtol=1e-4, atol=1e-4)
    assert calls_of(*graphs) == ["gemm_ar", "ag_gemm"]


@pytest.mark.slow
def test_dynamic_shapes(rank: int) -> None:
    """Any number of rows is fused if that is always to be; else it cannot be known whether it pays."""

    def function(x: Tensor, q: Tensor, k: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        gathered = gather(x)
        y = (gathered @ q.t()) * (gathered @ k.t())
        return scatter(y @ q), gathered, norm(reduce(x) + x, w), reduce(x @ k.t())

    x, q, k, w = drawn(rank, M, K), drawn(9, N, K), drawn(8, N, K), drawn(7, K)
    torch._dynamo.mark_dynamic(x, 0)
    calls, fused, fusion = outcome(function, x, q, k, w)
    assert fused == ["ag_gemm", "gemm_rs", "all_reduce_rms_norm", "gemm_ar"], str(fusion)
    assert calls[0] == "ag_gemm_list"
    calls, fused, fusion = outcome(function, x, q, k, w, when="pays")
    assert not fused
    assert "its sizes are symbolic: whether it pays depends on them" in str(fusion)


@pytest.mark.slow
def test_refused_operands(rank: int) -> None:
    """What the op itself refuses is left, in its words."""
    x = torch.ones(M, K, dtype=torch.int32)
    calls, _, fusion = outcome(lambda x, w: reduce(x @ w), x, torch.ones(K, N, dtype=torch.int32))
    assert calls == ["all_reduce"]
    assert "does not take a of torch.int32" in str(fusion)
