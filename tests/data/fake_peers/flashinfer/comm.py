from __future__ import annotations

import torch
from fake_sums import total


class AllReduceFusionPattern:
    kAllReduce = 0
    kARResidualRMSNorm = 1


class Workspace:
    def __init__(self, max_elements: int) -> None:
        self.max_elements = max_elements


def create_allreduce_fusion_workspace(
    backend: str, world_size: int, rank: int, max_token_num: int, hidden_dim: int, dtype: torch.dtype
) -> Workspace:
    assert backend == "trtllm", "the others may make multicast objects"
    assert 0 <= rank < world_size
    return Workspace(max_token_num * hidden_dim)


def allreduce_fusion(
    input: torch.Tensor,  # noqa: A002 - its name there
    workspace: Workspace,
    pattern: int,
    launch_with_pdl: bool,
    use_oneshot: bool,
    fp32_acc: bool,
    output: torch.Tensor | None = None,
    residual_in: torch.Tensor | None = None,
    residual_out: torch.Tensor | None = None,
    norm_out: torch.Tensor | None = None,
    rms_gamma: torch.Tensor | None = None,
    rms_eps: float = 1e-6,
) -> None:
    assert input.dim() == 2
    assert input.numel() <= workspace.max_elements
    found = total(input)
    if pattern == AllReduceFusionPattern.kAllReduce:
        assert output is not None
        output.copy_(found)
        return
    assert residual_in is not None
    assert residual_out is not None
    assert norm_out is not None
    assert rms_gamma is not None
    found = found + residual_in.float()
    residual_out.copy_(found)
    norm_out.copy_(found * (found.square().mean(-1, keepdim=True) + rms_eps).rsqrt() * rms_gamma.float())
