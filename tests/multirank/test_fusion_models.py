"""The fusion pass on DTensor's plans, with no line of the model changed: results and gradients as without it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from cases import Ranks
from fusion_samples import calls_of, compiled, fused_ops, inductor
from test_intercept_models import HIDDEN, TOKENS, WIDTH, Mlp, close, local, sequence_parallel_block, x_of
from torch import fx, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import tunedcomm

WORLD_SIZE = 2
RANKS = Ranks(prepare=inductor)
pytestmark = pytest.mark.slow


class Layers(nn.Module):
    """Two layers in the order of a decoder's: product, sum over ranks, residual, RMS norm."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Mlp(), Mlp()
        self.norm = nn.RMSNorm(WIDTH, eps=1e-5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = x + self.first(x)
        return h + self.second(self.norm(h))


def tensor_parallel_layers(mesh: DeviceMesh) -> nn.Module:
    torch.manual_seed(1)
    plan: dict[str, Any] = {}
    for name in ("first", "second"):
        plan |= {f"{name}.up": ColwiseParallel(), f"{name}.down": RowwiseParallel()}
    return parallelize_module(Layers(), mesh, plan)


def step(model: nn.Module, run: Callable[..., Any], x: torch.Tensor) -> list[torch.Tensor]:
    """Output, the input's gradient and every parameter's."""
    x = x.clone().requires_grad_()
    y = run(x)
    y.square().sum().backward()
    assert x.grad is not None
    found = [local(y).detach(), x.grad]
    for parameter in model.parameters():
        assert parameter.grad is not None
        found.append(local(parameter.grad).clone())
        parameter.grad = None
    return found


def test_sequence_parallel(rank: int) -> None:
    mesh = init_device_mesh("cpu", (WORLD_SIZE,))
    model = sequence_parallel_block(mesh)
    x = x_of(rank, 1, TOKENS // WORLD_SIZE, WIDTH, same=False)
    expected = step(model, model, x)
    fusion, graphs = tunedcomm.fusion_pass(mesh.get_group(), when="always"), []  # type: ignore[var-annotated]
    close(step(model, compiled(model, fusion, graphs), x), expected)
    forward, backward = map(calls_of, graphs)
    # DTensor splits a replicated bias over the ranks, which is why it is summed on its own.
    assert forward == ["ag_gemm_list", "gemm_rs", "ag_gemm_gathered", "all_reduce", "gemm_rs"], str(fusion)
    assert backward.count("ag_gemm_gathered") == 2, str(fusion)
    assert backward.count("gemm_rs") == 1, str(fusion)
    # What reached q, k and v is one sum of three products, which no op has.
    assert backward.count("reduce_scatter_tensor") == 1, str(fusion)
    assert len(fusion.records) == len(fused_ops(fusion)) + 1


def test_sequence_parallel_in_a_batch(rank: int) -> None:
    """Sequences side by side: what is gathered along them is no matrix of rows, and all stays as it was."""
    mesh = init_device_mesh("cpu", (WORLD_SIZE,))
    model = sequence_parallel_block(mesh)
    x = x_of(rank, 3, TOKENS // WORLD_SIZE, WIDTH, same=False)
    expected = step(model, model, x)
    fusion = tunedcomm.fusion_pass(mesh.get_group(), when="always")
    close(step(model, compiled(model, fusion), x), expected)
    assert len(fusion.records) == 8
    assert all(not record.fused and "those of several sequences are" in record.why for record in fusion.records)


def test_tensor_parallel(rank: int) -> None:
    mesh = init_device_mesh("cpu", (WORLD_SIZE,))
    model, x = tensor_parallel_layers(mesh), x_of(rank, TOKENS, WIDTH, same=True)
    expected = step(model, model, x)
    fusion, graphs = tunedcomm.fusion_pass(mesh.get_group(), when="always"), []  # type: ignore[var-annotated]
    close(step(model, compiled(model, fusion, graphs), x), expected)
    assert fused_ops(fusion).count("gemm_ar") >= 3, str(fusion)
    # What the ranks' sum is without the residual is kept for the backward pass, and the fused norm does not give it.
    assert "the sum without what is added to it is used elsewhere, too" in str(fusion)


def test_inference(rank: int) -> None:
    mesh = init_device_mesh("cpu", (WORLD_SIZE,))
    model, x = tensor_parallel_layers(mesh), x_of(rank, TOKENS, WIDTH, same=True)
    graphs: list[fx.Graph] = []
    with torch.no_grad():
        expected = local(model(x)) + 0
        fusion = tunedcomm.fusion_pass(mesh.get_group(), when="always")
        close([local(compiled(model, fusion, graphs)(x)) + 0], [expected])
    assert calls_of(*graphs) == ["all_reduce_rms_norm", "all_reduce", "gemm_ar"], str(fusion)


class Uneven(nn.Module):
    """As many hidden features as cannot be split evenly over the ranks, beside layers that can."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, hidden, bias=False), nn.Linear(hidden, WIDTH, bias=False)
        self.even = Mlp()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.even(self.down(torch.relu(self.up(x))))


def test_uneven_shards(rank: int) -> None:
    """What ranks differ in is left on all of them, also where one rank's part looks like that of an even layer."""
    for hidden, fused in ((HIDDEN - 1, 0), (HIDDEN + 5, 2)):
        mesh = init_device_mesh("cpu", (WORLD_SIZE,))
        torch.manual_seed(1)
        plan: dict[str, Any] = {}
        for prefix in ("", "even."):
            up = ColwiseParallel(use_local_output=False)  # as a local tensor it counts as one of equal parts
            plan |= {f"{prefix}up": up, f"{prefix}down": RowwiseParallel()}
        model, x = parallelize_module(Uneven(hidden), mesh, plan), x_of(rank, TOKENS, WIDTH, same=True)
        expected = step(model, model, x)
        fusion = tunedcomm.fusion_pass(mesh.get_group(), when="always")
        close(step(model, compiled(model, fusion), x), expected)
        assert fused_ops(fusion) == ["gemm_ar"] * fused, str(fusion)
        assert str(fusion).count("ranks may differ in") == 4 - fused, str(fusion)


def test_inductor(rank: int) -> None:
    """By `torch.compile` itself, from the cache the second time."""
    mesh = init_device_mesh("cpu", (WORLD_SIZE,))
    model, x = tensor_parallel_layers(mesh), x_of(rank, TOKENS, WIDTH, same=True)
    expected = step(model, model, x)
    fusions = [tunedcomm.fusion_pass(mesh.get_group(), when="always") for _ in range(2)]
    for fusion in fusions:
        torch._dynamo.reset()
        close(step(model, torch.compile(model, options={"post_grad_custom_post_pass": fusion}), x), expected)
    found = [f"{fused_ops(fusion)} of {len(fusion.records)}" for fusion in fusions]
    assert found == [f"{['gemm_ar'] * 4} of 6", "[] of 0"]  # two in the forward pass, two in the backward pass
