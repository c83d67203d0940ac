"""DeepEP (github.com/deepseek-ai/DeepEP) as a contender of bench/experts.py: its exchange of experts over NVLink.

Needs the package deep_ep. Only the `Buffer` of its first version is used, without RDMA, for its other ones make
multicast objects or need a newer NCCL. Results are new tensors, inputs are ordinary ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from tunedcomm.peers import LeftOut, Peer, Tensors, default_group
from tunedcomm.spec import Problem

NAME = "DeepEP"
IDS = torch.int64
NUM_SMS = 40


def experts_pair(problem: Problem, device: torch.device) -> Callable[[Tensors], torch.Tensor]:
    """Its dispatch and combine of one ep_dispatch problem: tokens, ids and weights there, a row a rank back.

    A result has room for the most tokens that can come, so that the host need not know how many do.

    Args:
        problem: ep_dispatch in the layout `tokens`.
        device: this rank's GPU.

    Returns:
        The call, given x, ids (int64) and weights (float32).

    Raises:
        LeftOut: DeepEP takes no such tokens.
    """
    from deep_ep import Buffer

    tokens, hidden, _, experts = problem.shape
    if problem.dtype != "bfloat16":
        raise LeftOut(f"DeepEP is run for bfloat16, not {problem.dtype}")
    n = problem.world_size
    Buffer.set_num_sms(NUM_SMS)
    configs = Buffer.get_dispatch_config(n), Buffer.get_combine_config(n)
    nbytes = max(config.get_nvl_buffer_size_hint(hidden * 2, n) for config in configs)
    buffer = Buffer(default_group(), nbytes, 0)

    def run(inputs: Tensors) -> torch.Tensor:
        x, ids, weights = inputs
        per_rank, _, per_expert, goes_to, _ = buffer.get_dispatch_layout(ids, experts)
        rows, _, _, _, handle, _ = buffer.dispatch(
            x, num_tokens_per_rank=per_rank, is_token_in_rank=goes_to, num_tokens_per_expert=per_expert, topk_idx=ids,
            topk_weights=weights, num_worst_tokens=n * tokens,
        )  # fmt: skip
        total: torch.Tensor = buffer.combine(rows, handle)[0]
        return total

    return run


def peers(problem: Problem, device: torch.device) -> Iterator[Peer]:
    """No form: bench/experts.py times its pair of ops."""
    import deep_ep  # noqa: F401 - names the package that is missing

    raise LeftOut("DeepEP is timed by bench/experts.py alone: its dispatch and combine are one call")
    yield  # a generator, as of the other adapters
