from __future__ import annotations

import torch
from fake_sums import total

from triton_dist.kernels.allreduce import AllReduceMethod


def create_allreduce_ctx(workspace_nbytes: int, rank: int, world_size: int, local_world_size: int) -> int:
    return workspace_nbytes


def all_reduce(x: torch.Tensor, method: AllReduceMethod, ctx: int, output: torch.Tensor) -> torch.Tensor:
    assert method in (AllReduceMethod.OneShot, AllReduceMethod.TwoShot), "the others need multicast"
    assert x.nbytes <= ctx // 2
    output.copy_(total(x))
    return output
