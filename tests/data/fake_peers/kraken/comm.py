from __future__ import annotations

import torch
from fake_sums import gathered, total


def one_shot_all_reduce(tensor: torch.Tensor, *, max_num_blocks: int, num_warps: int, BLOCK_SIZE: int) -> torch.Tensor:
    assert BLOCK_SIZE % (num_warps * 32) == 0
    return total(tensor).to(tensor.dtype)


def two_shot_all_reduce(tensor: torch.Tensor, *, max_num_blocks: int, num_warps: int, BLOCK_SIZE: int) -> torch.Tensor:
    return total(tensor).to(tensor.dtype)


def all_gather_w_progress(a_shared: torch.Tensor, a_out: torch.Tensor, progress: torch.Tensor) -> torch.Tensor:
    a_out.copy_(gathered(a_shared))
    progress.fill_(1)
    return a_out
