"""The fusion pass on graphs of functional collectives: every pattern, and everything that is left, with its reason."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from cases import Ranks
from fusion_samples import calls_of, compiled, fused_ops
from gemm_samples import drawn
from quick import some
from torch import Tensor, fx

import tunedcomm

WORLD_SIZE = 2
RANKS = Ranks(timeout=400)
M, K, N = 4, 16, 8


def gather(x: Tensor, dim: int = 0) -> Tensor:
    if dim and torch.__version__ < "2.12":  # whose Dynamo does not trace gathers along another dimension than the first
        return torch.cat(gather(x).chunk(WORLD_SIZE), dim)
    return funcol.wait_tensor(funcol.all_gather_tensor(x, dim, dist.group.WORLD))


def scatter(x: Tensor, dim: int = 0, op: str = "sum") -> Tensor:
    return funcol.wait_tensor(funcol.reduce_scatter_tensor(x, op, dim, dist.group.WORLD))


def reduce(x: Tensor, op: str = "sum") -> Tensor:
    return funcol.wait_tensor(funcol.all_reduce(x, op, dist.group.WORLD))


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


NORM = "all_reduce_rms_norm"
linear = torch.nn.functional.linear
# Name to the function, the shapes of its arguments (weights are [N, K] as layers keep them, or [K, N]), and its calls.
FUSED: dict[str, tuple[Callable[..., Any], str, str]] = {
    "gather, product": (lambda x, w: gather(x) @ w.t(), "MK NK", "ag_gemm"),
    "gather, product with [K, N]": (lambda x, w: gather(x) @ w, "MK KN", "ag_gemm"),
    "gather of three dimensions": (lambda x, w: gather(x) @ w, "M3K KN", "ag_gemm"),
    "gather along the sequence": (lambda x, w: gather(x, 1) @ w.t(), "1MK NK", "ag_gemm"),
    "gather, parts joined": (lambda x, w: torch.cat(gather(x).chunk(2), dim=1) @ w.t(), "1MK NK", "ag_gemm"),
    "gather, linear with bias": (lambda x, w, b: linear(gather(x, 1), w, b).relu(), "1MK NK N", "ag_gemm"),
    "gather, used elsewhere": (lambda x, w: let(gather(x), lambda g: (g @ w, g.sum(0))), "MK KN", "ag_gemm_gathered"),
    "gather, q k v": (
        lambda x, q, k, v: let(gather(x, 1), lambda g: (g @ q.t() * (g @ k.t())).sum() + g @ v),
        "1MK NK NK K3",
        "ag_gemm_list",
    ),
    "gather, two products and another user": (
        lambda x, q, k: let(gather(x), lambda g: (g @ q.t(), torch.cos(g), (g * 2) @ k)),
        "MK NK K3",
        "ag_gemm_gathered",
    ),
    "late weight": (
        lambda x, w: let(gather(x), lambda g: g.relu() + g @ (w * 2).t()),
        "MK KK",
        "ag_gemm_gathered",
    ),
    "product, scatter": (lambda x, w: scatter(x @ w.t()), "MK NK", "gemm_rs"),
    "product, scatter avg": (lambda x, w: scatter(x @ w, op="avg"), "MK KN", "gemm_rs"),
    "product, scatter along the sequence": (lambda x, w: scatter(x @ w.t(), 1), "1MK NK", "gemm_rs"),
    "linear with bias, scatter": (lambda x, w, b: scatter(linear(x, w, b), 1), "1MK NK N", "all_reduce gemm_rs"),
    "product, reduce": (lambda x, w: reduce(x @ w.t()) * 2, "MK NK", "gemm_ar"),
    "product, reduce of three dimensions": (lambda x, w: reduce(x @ w), "2MK KN", "gemm_ar"),
    "linear with bias, reduce": (lambda x, w, b: reduce(linear(x, w, b)), "MK NK N", "all_reduce gemm_ar"),
    "reduce, norm": (lambda x, w: norm(reduce(x), w), "MK K", NORM),
    "reduce, residual, norm": (lambda x, w, r: let(r + reduce(x), lambda h: (h, norm(h, w))), "1MK K 1MK", NORM),
    "reduce, bias, residual, norm": (lambda x, w, r, b: norm(reduce(x) + b + r, w), "MK K MK K", NORM),
    "reduce of rows, residual, norm": (lambda x, w, r: norm(reduce(x).view(1, M, K) + r, w), "MK K 1MK", NORM),
    "norm written out": (lambda x, w, r: llama_norm(reduce(x) + r, w), "MK K MK", NORM),
    "two sums in a row": (
        lambda x, w, r: let(r + reduce(x), lambda h: norm(h + reduce(norm(h, w)), w)),
        "MK K MK",
        f"{NORM} {NORM}",
    ),
}


def inputs(rank: int, shapes: str, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """The first one differs by rank."""
    sizes = [[{"M": M, "K": K, "N": N}.get(letter) or int(letter) for letter in shape] for shape in shapes.split()]
    return [drawn(9 + place if place else rank, *shape).to(dtype) for place, shape in enumerate(sizes)]


@pytest.mark.parametrize(
    ("name", "dtype"), some([(name, dtype) for name in FUSED for dtype in (torch.float32, torch.bfloat16)], 5)
)
def test_fused(rank: int, name: str, dtype: torch.dtype) -> None:
    function, shapes, wanted = FUSED[name]
    given = inputs(rank, shapes, dtype)
    calls, fused, fusion = outcome(function, *given)
    assert calls == wanted.split(), str(fusion)
    assert len(fused) == len([op for op in calls if op != "all_reduce"])
    kept, nothing, _ = outcome(function, *given, when="never")
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


LEFT: dict[str, tuple[Callable[..., Any], str]] = {
    "put in another order before any product": (lambda x, w: gather(x, 1) @ w, "3MK KN"),
    "put in another order behind any product": (lambda x, w: scatter(x @ w, 1), "3MK KN"),
    "no product of the gathered rows follows": (lambda x: gather(x) * 2, "MK"),
    "what is gathered has no rows": (lambda x: gather(x) * 2, "M"),
    "is computed after wait_tensor": (lambda x, w: let(gather(x), lambda g: g @ (w + g.sum())), "MK KN"),
    "is not a product of two matrices": (lambda x: scatter(torch.sin(x)), "MK"),
    "it reduces by max": (lambda x, w: reduce(x @ w, "max"), "MK KN"),
    "it reduces by avg": (lambda x, w: reduce(x @ w, "avg"), "MK KN"),
    "mm is used elsewhere, too": (lambda x, w: let(x @ w, lambda y: reduce(y) + y), "MK KN"),
    "what addmm adds is not a row": (lambda x, w, y: reduce(torch.addmm(y, x, w)), "MK KN MN"),
    "scales its summands": (lambda x, w, y: reduce(torch.addmm(y, x, w, alpha=2)), "MK KN N"),
    "differ in columns": (lambda x, w: reduce((x @ w).view(2, -1)), "MK KN"),
    "is added to it is used elsewhere": (lambda x, w, r: let(reduce(x), lambda s: norm(s + r, w) + s.cos()), "MK K MK"),
}


@pytest.mark.parametrize("reason", some(LEFT, 5))
def test_left(rank: int, reason: str) -> None:
    function, shapes = LEFT[reason]
    calls, fused, fusion = outcome(function, *inputs(rank, shapes))
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


# The fusion pass on norms of sums that are quantised, as the native code of serving engines writes them


ROWS, HIDDEN = 8, 256
E4M3, MOST = torch.float8_e4m3fn, 448.0


def wide_norm(x: Tensor, weight: Tensor, residual: Tensor, *, early: bool = False) -> tuple[Tensor, Tensor]:
    """Added in fp32 and normalised before it is rounded; `early`: rounded before the weight, too."""
    total = x.float() + residual.float()
    normal = total * torch.rsqrt(total.pow(2).mean(dim=-1, keepdim=True) + 1e-6)
    y = normal.to(x.dtype) * weight if early else (normal * weight).to(x.dtype)
    return y, total.to(x.dtype)


def gemma_norm(x: Tensor, weight: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
    """Weights are stored less 1; the sum is rounded before the norm."""
    held = x + residual
    wide = held.float()
    normal = wide * torch.rsqrt(wide.pow(2).mean(dim=-1, keepdim=True) + 1e-6)
    return (normal * (1.0 + weight.float())).to(x.dtype), held


def static(y: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    return (y.float() * scale.reciprocal()).clamp(-MOST, MOST).to(E4M3), scale


def by_token(y: Tensor) -> tuple[Tensor, Tensor]:
    most, _ = y.abs().max(dim=-1)
    scale = (most.unsqueeze(-1).float() / MOST).clamp(min=1.0 / (MOST * 512.0))
    return (y.float() * scale.reciprocal()).clamp(-MOST, MOST).to(E4M3), scale


def by_group(y: Tensor, *, pow2: bool = False) -> tuple[Tensor, Tensor]:
    groups = y.view(-1, y.shape[-1] // 128, 128)
    scales = groups.abs().max(dim=-1, keepdim=True)[0].float() / MOST
    if pow2:
        scales = torch.exp2(torch.ceil(torch.log2(scales)))
    scales = scales.clamp(min=1.0 / (MOST * 512.0))
    q = (groups / scales).clamp(-MOST, MOST).to(E4M3).view(y.shape)
    return q, scales.squeeze(-1).reshape(*y.shape[:-1], y.shape[-1] // 128)


def by_group_of_rows(y: Tensor) -> tuple[Tensor, Tensor]:
    """Groups as rows, with the least maximum before the division."""
    rows = y.reshape(y.numel() // 128, 128)
    scales = rows.abs().max(dim=-1, keepdim=True)[0].clamp(min=1e-10).float() / MOST
    return (rows / scales).clamp(min=-MOST, max=MOST).to(E4M3).reshape(y.shape), scales.reshape(*y.shape[:-1], -1)


def through(norm: Callable[..., Any], quantise: Callable[..., Any], *, keeps: bool = False) -> Callable[..., Any]:
    """all_reduce → residual → norm → fp8; `keeps`: what was normalised is used elsewhere, too."""

    def function(x: Tensor, weight: Tensor, residual: Tensor, *scale: Tensor) -> Any:
        y, held = norm(reduce(x), weight, residual)
        return *quantise(y, *scale), held, *([torch.relu(y)] if keeps else [])

    return function


early, pow2 = functools.partial(wide_norm, early=True), functools.partial(by_group, pow2=True)
# Name to the function and what the operator is asked for; () for the basic form with a given scale.
QUANTISED: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "static": (through(early, static), ()),
    "static, norm beside": (through(wide_norm, static, keeps=True), ("tensor", "row", False, True, 0.0)),
    "token, gemma": (through(gemma_norm, by_token), ("token", "row", False, False, 1.0)),
    "token": (through(wide_norm, by_token), ("token", "row", False, False, 0.0)),
    "group, powers of two, gemma": (through(gemma_norm, pow2, keeps=True), ("group128", "row", True, True, 1.0)),
    "token, norm beside": (through(early, by_token, keeps=True), ("token", "row", False, True, 0.0)),
    "group of rows": (through(wide_norm, by_group_of_rows), ("group128", "row", False, False, 0.0)),
    "group": (through(early, by_group), ("group128", "row", False, False, 0.0)),
}


def inputs_of(rank: int, name: str, *, wide: bool = False) -> list[Tensor]:
    draw = torch.Generator().manual_seed(3)
    x, weight, residual = (
        torch.randn(*shape, generator=draw) for shape in ((2, ROWS, HIDDEN), (HIDDEN,), (ROWS, HIDDEN))
    )
    given = [each.to(torch.float32 if wide else torch.bfloat16) for each in (x[rank], weight, residual)]
    return [*given, *([torch.tensor([0.02])] if "static" in name else [])]


def graph_of(function: Callable[..., Any], inputs: list[Tensor], when: Any) -> tuple[list[str], Any, fx.Graph, Any]:
    fusion, graphs = tunedcomm.fusion_pass(when=when), list[fx.Graph]()
    with torch.no_grad():
        got = compiled(function, fusion, graphs)(*inputs)
    return calls_of(*graphs), got, graphs[0], fusion


def back(q: Tensor, scale: Tensor) -> Tensor:
    scale = scale.reshape(-1, 1) if scale.numel() in (1, ROWS) else scale.reshape(ROWS, -1).repeat_interleave(128, -1)
    return q.float() * scale


@pytest.mark.parametrize("name", some(QUANTISED, 2))
def test_quantised_norms(rank: int, name: str) -> None:
    function, options = QUANTISED[name]
    inputs = inputs_of(rank, name)
    calls, got, graph, fusion = graph_of(function, inputs, "always")
    basic = "all_reduce_rms_norm"
    assert calls == [f"{basic}_quantized" if options else basic], str(fusion)
    (node,) = (n for n in graph.nodes if "rms_norm" in str(n.target))
    assert node.args[6 : 6 + len(options)] == options
    if not options:
        assert node.args[6] is E4M3
    # Nothing of the pattern is left to compute.
    assert not [
        n for n in graph.nodes if any(word in str(n.target) for word in ("rsqrt", "clamp", "abs", "max", "float8"))
    ]
    due = function(*inputs)
    assert [(t.dtype, t.shape) for t in got] == [(t.dtype, t.shape) for t in due]
    (q, scale, *rest), (q_due, scale_due, *rest_due) = got, due
    near = {"rtol": 2e-2, "atol": 2e-2}
    torch.testing.assert_close(rest, rest_due, **near)
    if "two" not in name:
        torch.testing.assert_close(scale, scale_due, **near)
    wanted = back(q_due, scale_due)
    assert (back(q, scale) - wanted).norm() <= 0.05 * wanted.norm()


def test_what_another_kernel_would_compute_is_left(rank: int) -> None:
    """Other ranges, other scales and groups of another width: the norm is fused and what follows is left."""

    def narrow(y: Tensor) -> tuple[Tensor, Tensor]:
        most = y.abs().amax(-1, keepdim=True).float() / MOST
        return (y / most).clamp(-240.0, 240.0).to(E4M3), most

    def halved(y: Tensor) -> tuple[Tensor, Tensor]:
        most = y.abs().amax(-1, keepdim=True).float() / 2
        return (y / most).clamp(-MOST, MOST).to(E4M3), most

    def by_64(y: Tensor) -> tuple[Tensor, Tensor]:
        groups = y.view(-1, 64)
        scales = groups.abs().amax(-1, keepdim=True).float() / MOST
        return (groups / scales).clamp(-MOST, MOST).to(E4M3).view(y.shape), scales

    def bounded(y: Tensor) -> tuple[Tensor, Tensor]:
        scale = (y.abs().amax(-1, keepdim=True).float() / MOST).clamp(min=0.5)
        return (y / scale).clamp(-MOST, MOST).to(E4M3), scale

    for quantise in (narrow, halved, by_64, bounded):
        calls, got, graph, _ = graph_of(through(wide_norm, quantise), inputs_of(rank, ""), "always")
        assert calls == ["all_reduce_rms_norm"], quantise
        assert any("float8" in str(n.args) for n in graph.nodes)
        due = through(wide_norm, quantise)(*inputs_of(rank, ""))
        torch.testing.assert_close([t.float() for t in got], [t.float() for t in due], rtol=0.2, atol=0.2)
    calls, _, _, fusion = graph_of(through(wide_norm, by_token), inputs_of(rank, ""), "pays")
    assert calls == ["all_reduce"], "nothing is tuned"
    assert len(fusion.records) >= 2
    assert not any(record.fused for record in fusion.records)
    calls, _, _, _ = graph_of(through(wide_norm, by_token), inputs_of(rank, "", wide=True), "always")
    assert calls == ["all_reduce_rms_norm_quantized"]
