from __future__ import annotations

import torch
from fake_sums import gathered, own_rows, total

__all__ = ["ag_gemm", "create_ag_gemm_context", "create_gemm_rs_context", "gemm_rs"]


def create_ag_gemm_context(
    max_M: int, N: int, K: int, dtype: torch.dtype, rank: int, num_ranks: int, num_local_ranks: int
) -> tuple[int, int, int]:
    assert N % num_ranks == 0
    return max_M, N // num_ranks, K


def ag_gemm(A: torch.Tensor, B: torch.Tensor, ctx: tuple[int, int, int], autotune: bool) -> torch.Tensor:
    a = gathered(A)
    assert (a.shape[0], B.shape[1], a.shape[1]) == ctx
    return (a.float() @ B.float()).to(A.dtype)


def create_gemm_rs_context(
    max_M: int, N: int, rank: int, world_size: int, local_world_size: int, output_dtype: torch.dtype, rs_stream: object
) -> tuple[int, int]:
    return max_M, N


def gemm_rs(A: torch.Tensor, B: torch.Tensor, ctx: tuple[int, int], autotune: bool) -> torch.Tensor:
    assert (A.shape[0], B.shape[1]) == ctx
    return own_rows(total(A.float() @ B.float())).to(A.dtype)
