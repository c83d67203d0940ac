"""The fusion pass on norms of sums that are quantised, as the native code of serving engines writes them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from cases import Ranks
from fusion_samples import calls_of, compiled
from quick import some
from torch import Tensor, fx

import tunedcomm

RANKS = Ranks()
ROWS, HIDDEN = 8, 256
E4M3, MOST = torch.float8_e4m3fn, 448.0


def reduce(x: Tensor) -> Tensor:
    return funcol.wait_tensor(funcol.all_reduce(x, "sum", dist.group.WORLD))


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
FUSED: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
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


def outcome(function: Callable[..., Any], inputs: list[Tensor], when: Any) -> tuple[list[str], Any, fx.Graph, Any]:
    fusion, graphs = tunedcomm.fusion_pass(when=when), list[fx.Graph]()
    with torch.no_grad():
        got = compiled(function, fusion, graphs)(*inputs)
    return calls_of(*graphs), got, graphs[0], fusion


def back(q: Tensor, scale: Tensor) -> Tensor:
    scale = scale.reshape(-1, 1) if scale.numel() in (1, ROWS) else scale.reshape(ROWS, -1).repeat_interleave(128, -1)
    return q.float() * scale


@pytest.mark.parametrize("name", some(FUSED, 2))
def test_fused(rank: int, name: str) -> None:
    function, options = FUSED[name]
    inputs = inputs_of(rank, name)
    calls, got, graph, fusion = outcome(function, inputs, "always")
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
        calls, got, graph, _ = outcome(through(wide_norm, quantise), inputs_of(rank, ""), "always")
        assert calls == ["all_reduce_rms_norm"], quantise
        assert any("float8" in str(n.args) for n in graph.nodes)
        due = through(wide_norm, quantise)(*inputs_of(rank, ""))
        torch.testing.assert_close([t.float() for t in got], [t.float() for t in due], rtol=0.2, atol=0.2)
    calls, _, _, fusion = outcome(through(wide_norm, by_token), inputs_of(rank, ""), "pays")
    assert calls == ["all_reduce"], "nothing is tuned"
    assert len(fusion.records) >= 2
    assert not any(record.fused for record in fusion.records)
    calls, _, _, _ = outcome(through(wide_norm, by_token), inputs_of(rank, "", wide=True), "always")
    assert calls == ["all_reduce_rms_norm_quantized"]
