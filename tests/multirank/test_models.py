"""Models by DTensor's plans, unmodified: intercepted and fused, in inference, training and compiled."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from cases import Ranks
from fusion_samples import calls_of, compiled, fused_ops, inductor
from test_intercept import WORLD_SIZE, launched, served, setup
from torch import fx, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import tunedcomm

RANKS = Ranks(setup=setup, prepare=inductor)
WIDTH, HIDDEN, HEADS, TOKENS = 16, 32, 4, 8


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x)))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        size = WIDTH // HEADS
        q, k, v = (part(x).unflatten(-1, (-1, size)).transpose(1, 2) for part in (self.q, self.k, self.v))
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(mixed.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """A decoder's layer: what torch's documentation parallelizes by sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention, self.mlp = Attention(), Mlp()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


def tensor_parallel_mlp(mesh: DeviceMesh) -> nn.Module:
    torch.manual_seed(1)
    return parallelize_module(Mlp(), mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})


def sequence_parallel_block(mesh: DeviceMesh) -> nn.Module:
    torch.manual_seed(1)
    gathered = PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate())
    return parallelize_module(
        Block(),
        mesh,
        {
            "norm1": SequenceParallel(),
            "norm2": SequenceParallel(),
            "attention": gathered,
            "attention.q": ColwiseParallel(),
            "attention.k": ColwiseParallel(),
            "attention.v": ColwiseParallel(),
            "attention.o": RowwiseParallel(output_layouts=Shard(1)),
            "mlp": gathered,
            "mlp.up": ColwiseParallel(),
            "mlp.down": RowwiseParallel(output_layouts=Shard(1)),
        },
    )


def local(x: torch.Tensor) -> torch.Tensor:
    return x.to_local() if isinstance(x, DTensor) else x


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


def trained(make: Callable[[DeviceMesh], nn.Module], mesh: DeviceMesh, x: torch.Tensor) -> list[torch.Tensor]:
    model = make(mesh)
    return step(model, model, x)


def close(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


def x_of(rank: int, *shape: int, same: bool) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0 if same else rank))


def test_mlp(rank: int) -> None:
    mesh = init_device_mesh("cpu", (WORLD_SIZE,))
    x = x_of(rank, TOKENS, WIDTH, same=True)
    expected = trained(tensor_parallel_mlp, mesh, x)
    with served(mesh.get_group()) as calls:
        close(trained(tensor_parallel_mlp, mesh, x), expected)
    ops = Counter(seen.problem.op for seen in launched)
    assert ops["all_reduce"] == 2, ops  # one forward, one for the input's gradient
    assert calls.num_served == len(launched)
    torch.manual_seed(1)
    close([expected[0]], [Mlp()(x).detach()])


def test_compiled_mlp(rank: int) -> None:
    """Compiled outside of the block: the code calls the operators, and they are what is served."""
    mesh = init_device_mesh("cpu", (WORLD_SIZE,))
    model, x = tensor_parallel_mlp(mesh), x_of(rank, TOKENS, WIDTH, same=True)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        expected = local(compiled(x)) + 0
        with served(mesh.get_group()):
            close([local(compiled(x)) + 0], [expected])
            assert [seen.problem.op for seen in launched] == ["all_reduce"]
        launched.clear()
        close([local(compiled(x)) + 0], [expected])
        assert launched == []


def test_data_parallel_model(rank: int) -> None:
    """DDP's reducer calls from C++, on the autograd engine's threads."""

    def step() -> list[torch.Tensor]:
        torch.manual_seed(2)
        model = nn.parallel.DistributedDataParallel(Mlp())
        model(x_of(rank, 4, WIDTH, same=False)).square().sum().backward()
        return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]

    expected = step()
    with served() as calls:
        close(step(), expected)
    assert calls.num_served >= 1, str(calls)
    assert launched


# The fusion pass on DTensor's plans, with no line of the model changed: results and gradients as without it


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


@pytest.mark.slow
def test_fusion_sequence_parallel(rank: int) -> None:
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


@pytest.mark.slow
def test_fusion_tensor_parallel(rank: int) -> None:
    mesh = init_device_mesh("cpu", (WORLD_SIZE,))
    model, x = tensor_parallel_layers(mesh), x_of(rank, TOKENS, WIDTH, same=True)
    expected = step(model, model, x)
    fusion, graphs = tunedcomm.fusion_pass(mesh.get_group(), when="always"), []  # type: ignore[var-annotated]
    close(step(model, compiled(model, fusion, graphs), x), expected)
    assert fused_ops(fusion).count("gemm_ar") >= 3, str(fusion)
    # What the ranks' sum is without the residual is kept for the backward pass, and the fused norm does not give it.
    assert "the sum without what is added to it is used elsewhere, too" in str(fusion)


@pytest.mark.slow
def test_fusion_inference(rank: int) -> None:
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


@pytest.mark.slow
def test_fusion_uneven_shards(rank: int) -> None:
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


@pytest.mark.slow
def test_fusion_inductor(rank: int) -> None:
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
