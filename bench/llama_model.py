"""A stack of Llama 3 decoder layers under PyTorch's tensor parallel plans, as `bench/llama_tp.py` runs it.

Nothing here knows of tunedcomm. The plan `sequence` is that of PyTorch's tutorials: norms and residuals work on a part
of the tokens, which is gathered before attention and MLP and scattered behind them. The plan `plain`, for decoding,
holds every token on every rank and sums behind attention and MLP.
"""

from __future__ import annotations

import zlib
from typing import Literal, NamedTuple

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

Plan = Literal["sequence", "plain"]
Rope = tuple[torch.Tensor, torch.Tensor]


class Sizes(NamedTuple):
    """Sizes of a layer's matrices."""

    hidden: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn: int


LLAMA_70B = Sizes(hidden=8192, num_heads=64, num_kv_heads=8, head_dim=128, ffn=28672)
TINY = Sizes(hidden=64, num_heads=8, num_kv_heads=4, head_dim=8, ffn=96)
_THETA, _EPS = 500_000.0, 1e-5


class Cache(nn.Module):
    """Keys and values of a context whose last place the newest token takes; a rank holds those of its heads."""

    keys: torch.Tensor
    values: torch.Tensor
    place: torch.Tensor

    def __init__(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        super().__init__()
        self.register_buffer("keys", keys)
        self.register_buffer("values", values)
        self.register_buffer("place", torch.tensor([keys.shape[2] - 1], device=keys.device))

    def forward(self, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.keys.index_copy_(2, self.place, keys), self.values.index_copy_(2, self.place, values)


def rotated(x: torch.Tensor, rope: Rope) -> torch.Tensor:
    """`x` [batch, heads, tokens, head_dim] with its positions in it."""
    low, high = x.chunk(2, dim=-1)
    return x * rope[0] + torch.cat((-high, low), dim=-1) * rope[1]


class Attention(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.head_dim = sizes.head_dim
        width, kv_width = sizes.num_heads * sizes.head_dim, sizes.num_kv_heads * sizes.head_dim
        self.q = nn.Linear(sizes.hidden, width, bias=False)
        self.k = nn.Linear(sizes.hidden, kv_width, bias=False)
        self.v = nn.Linear(sizes.hidden, kv_width, bias=False)
        self.o = nn.Linear(width, sizes.hidden, bias=False)
        self.cache: Cache | None = None

    def forward(self, x: torch.Tensor, rope: Rope) -> torch.Tensor:
        q, k, v = (part(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for part in (self.q, self.k, self.v))
        q, k = rotated(q, rope), rotated(k, rope)
        if self.cache is not None:
            k, v = self.cache(k, v)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=self.cache is None, enable_gqa=True)
        return self.o(mixed.transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.gate = nn.Linear(sizes.hidden, sizes.ffn, bias=False)
        self.up = nn.Linear(sizes.hidden, sizes.ffn, bias=False)
        self.down = nn.Linear(sizes.ffn, sizes.hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(nn.functional.silu(self.gate(x)) * self.up(x))


class Layer(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(sizes.hidden, eps=_EPS), nn.RMSNorm(sizes.hidden, eps=_EPS)
        self.attention, self.mlp = Attention(sizes), Mlp(sizes)

    def forward(self, x: torch.Tensor, rope: Rope) -> torch.Tensor:
        x = x + self.attention(self.norm1(x), rope)
        return x + self.mlp(self.norm2(x))


class Stack(nn.Module):
    """Decoder layers and the norm behind the last one; `cos` and `sin` are of the positions that it is called with."""

    cos: torch.Tensor
    sin: torch.Tensor

    def __init__(self, sizes: Sizes, num_layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(sizes) for _ in range(num_layers))
        self.norm = nn.RMSNorm(sizes.hidden, eps=_EPS)
        self.register_buffer("cos", torch.empty(0))
        self.register_buffer("sin", torch.empty(0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rope = (self.cos, self.sin)
        for layer in self.layers:
            x = layer(x, rope)
        return self.norm(x)


def styles(plan: Plan, num_layers: int) -> dict[str, ParallelStyle]:
    """The plan of a whole stack for `parallelize_module`."""
    sequence = plan == "sequence"
    found: dict[str, ParallelStyle] = {"norm": SequenceParallel(use_local_output=True)} if sequence else {}
    for number in range(num_layers):
        prefix = f"layers.{number}."
        for name in ("attention.q", "attention.k", "attention.v", "mlp.gate", "mlp.up"):
            found[prefix + name] = ColwiseParallel()
        for name in ("attention.o", "mlp.down"):
            found[prefix + name] = RowwiseParallel(output_layouts=Shard(1) if sequence else Replicate())
        if sequence:
            found[prefix + "norm1"], found[prefix + "norm2"] = SequenceParallel(), SequenceParallel()
            found[prefix + "attention"] = PrepareModuleInput(
                input_layouts=(Shard(1), None), desired_input_layouts=(Replicate(), None)
            )
            found[prefix + "mlp"] = PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
    return found


def seeded(name: str, shape: tuple[int, ...], device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """Normal numbers that depend on `name` alone, and so are the same on every rank and in every run."""
    generator = torch.Generator(device).manual_seed(zlib.crc32(name.encode()))
    return torch.randn(shape, generator=generator, device=device, dtype=dtype)


@torch.no_grad()
def _fill(model: Stack, device: torch.device) -> None:
    """Weights whatever the number of ranks: every rank makes the whole matrix and keeps its part."""
    for name, parameter in model.named_parameters():
        whole = seeded(name, tuple(parameter.shape), device, parameter.dtype)
        whole = whole * whole.shape[1] ** -0.5 if whole.dim() == 2 else 1 + 0.1 * whole
        if isinstance(parameter, DTensor):
            part = distribute_tensor(whole, parameter.device_mesh, parameter.placements, src_data_rank=None)
            parameter.to_local().copy_(part.to_local())
        else:
            parameter.copy_(whole)


def _rope(positions: torch.Tensor, head_dim: int, dtype: torch.dtype) -> Rope:
    steps = torch.arange(0, head_dim, 2, device=positions.device, dtype=torch.float32) / head_dim
    angles = torch.outer(positions.float(), _THETA**-steps).repeat(1, 2)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def build(
    sizes: Sizes,
    num_layers: int,
    *,
    plan: Plan,
    mesh: DeviceMesh | None,
    device: torch.device,
    dtype: torch.dtype,
    tokens: int,
    context: int = 0,
    batch: int = 1,
) -> Stack:
    """A stack with its weights, split over a `mesh` of one dimension; the whole of it if that is None.

    It is called with `batch` sequences of `tokens`. Its caches hold `context` tokens, the new one included; 0: none.
    """
    world_size = 1 if mesh is None else mesh.size()
    with torch.device("meta"):
        model = Stack(sizes, num_layers).to(dtype)
    if mesh is not None:
        parallelize_module(model, mesh, styles(plan, num_layers), src_data_rank=None)
    model.to_empty(device=device)
    _fill(model, device)
    first = max(0, context - tokens)
    model.cos, model.sin = _rope(torch.arange(first, first + tokens, device=device), sizes.head_dim, dtype)
    if context:
        rank = 0 if mesh is None else mesh.get_local_rank()
        shape = (batch, sizes.num_kv_heads, context, sizes.head_dim)
        for number, layer in enumerate(model.layers):
            whole = [seeded(f"{number}.{kind}", shape, device, dtype) for kind in ("keys", "values")]
            layer.attention.cache = Cache(*(each.chunk(world_size, dim=1)[rank].clone() for each in whole))
    return model
