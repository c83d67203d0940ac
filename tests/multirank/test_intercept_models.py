"""Tensor parallel models by DTensor's plans, unmodified: the library's results, in inference, training and compiled."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import torch
from cases import Ranks
from test_intercept import WORLD_SIZE, launched, served, setup
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

RANKS = Ranks(setup=setup)
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


def trained(make: Callable[[DeviceMesh], nn.Module], mesh: DeviceMesh, x: torch.Tensor) -> list[torch.Tensor]:
    """Output, the input's gradient and every parameter's, after one forward and one backward."""
    model, x = make(mesh), x.clone().requires_grad_()
    y = model(x)
    y.square().sum().backward()
    assert x.grad is not None
    gradients = [local(parameter.grad) for parameter in model.parameters() if parameter.grad is not None]
    assert len(gradients) == len(list(model.parameters()))
    return [local(y).detach(), x.grad, *gradients]


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
