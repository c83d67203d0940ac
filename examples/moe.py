"""A mixture-of-experts layer with its experts split over the ranks: router, dispatch, experts, combine.

    torchrun --nproc-per-node 2 examples/moe.py

It runs over gloo on CPUs and over NCCL on GPUs. Every rank has its own tokens, a copy of the router, and a part of the
experts. The router's gradients must be summed over the ranks. The experts' gradients are sums already, because tokens
of all ranks went through the experts.
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch.nn.functional import mse_loss, silu, softmax

import tunedcomm


class MoE(torch.nn.Module):
    """Experts of two matrices with SiLU in between; a token's result is the weighted sum over its `topk` experts.

    Args:
        hidden, intermediate: sizes of a token and within an expert.
        num_experts: of all ranks, a multiple of their number.
        topk: experts of a token.
    """

    def __init__(self, hidden: int, intermediate: int, num_experts: int, topk: int) -> None:
        super().__init__()
        self.num_experts, self.topk = num_experts, topk
        local = num_experts // dist.get_world_size()
        self.router = torch.nn.Linear(hidden, num_experts, bias=False)
        self.up = torch.nn.Parameter(torch.empty(local, hidden, intermediate))
        self.down = torch.nn.Parameter(torch.empty(local, intermediate, hidden))
        for weight in (self.up, self.down):
            torch.nn.init.normal_(weight, std=weight.shape[1] ** -0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[tokens, hidden] to the same shape; the same number of tokens on every rank."""
        scores = softmax(self.router(x), dim=-1)
        weights, ids = scores.topk(self.topk, dim=-1)
        weights = weights / weights.sum(-1, keepdim=True)
        sent = tunedcomm.ep_dispatch(x, ids, num_experts=self.num_experts, layout="tokens", topk_weights=weights)
        assert sent.weights is not None
        # Every token is here once, with the ids of its local experts. Engines pass both to a grouped GEMM; this loop is
        # slower, because it waits for the number of each expert's tokens.
        sums = torch.zeros_like(sent.tokens)
        for expert, (up, down) in enumerate(zip(self.up, self.down, strict=True)):
            rows, k = (sent.expert_ids == expert).nonzero(as_tuple=True)
            results = silu(sent.tokens[rows] @ up) @ down
            sums = sums.index_add(0, rows, results * sent.weights[rows, k].unsqueeze(1).to(x.dtype))
        return tunedcomm.ep_combine(sums, sent)

    def sum_router_gradients(self) -> None:
        """Sum the router's gradients over the ranks, after the backward pass."""
        assert self.router.weight.grad is not None
        tunedcomm.all_reduce_(self.router.weight.grad)


def main() -> None:
    """Train one layer on random numbers."""
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if on_gpu else "gloo")
    device = "cuda" if on_gpu else "cpu"
    torch.manual_seed(0)  # the same router everywhere
    layer = MoE(64, 128, 8, 2).to(device)
    torch.manual_seed(1 + dist.get_rank())
    x, wanted = torch.randn(32, 64, device=device), torch.randn(32, 64, device=device)
    optimizer = torch.optim.Adam(layer.parameters(), lr=1e-2)
    for step in range(20):
        optimizer.zero_grad()
        loss = mse_loss(layer(x), wanted)
        loss.backward()
        layer.sum_router_gradients()
        optimizer.step()
        if dist.get_rank() == 0 and step % 5 == 0:
            print(f"step {step}: loss {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
