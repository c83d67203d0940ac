"""Stand-in for DeepEP: its first `Buffer`, for bfloat16 tokens of CPU ranks; rows of rank r begin at r × tokens."""

import torch
import torch.distributed as dist


class _Config:
    def get_nvl_buffer_size_hint(self, hidden_bytes, num_ranks):
        return hidden_bytes * num_ranks


class Buffer:
    def __init__(self, group, num_nvl_bytes, num_rdma_bytes):
        assert num_nvl_bytes > 0
        assert num_rdma_bytes == 0
        self.group = group

    @staticmethod
    def set_num_sms(num_sms):
        assert num_sms % 2 == 0

    @staticmethod
    def get_dispatch_config(num_ranks):
        return _Config()

    get_combine_config = get_dispatch_config

    def get_dispatch_layout(self, topk_idx, num_experts):
        assert topk_idx.dtype == torch.int64
        n = self.group.size()
        ranks = topk_idx // (num_experts // n)
        goes_to = torch.stack([(ranks == r).any(1) for r in range(n)], 1)
        counts = torch.bincount(topk_idx.flatten(), minlength=num_experts).int()
        return goes_to.sum(0).int(), None, counts, goes_to, None

    def dispatch(
        self, x, *, num_tokens_per_rank, is_token_in_rank, num_tokens_per_expert, topk_idx, topk_weights,
        num_worst_tokens,
    ):  # fmt: skip
        assert x.dtype == torch.bfloat16
        n = self.group.size()
        assert num_worst_tokens == n * len(x)
        rows = x.new_empty(n * len(x), x.shape[1])
        dist.all_gather_into_tensor(rows, x, group=self.group)
        masks = is_token_in_rank.new_empty(n * len(x), n)
        dist.all_gather_into_tensor(masks, is_token_in_rank, group=self.group)
        return rows * masks[:, self.group.rank(), None], topk_idx, topk_weights, [], "handle", None

    def combine(self, x, handle):
        assert handle == "handle"
        total = x.float()
        dist.all_reduce(total, group=self.group)
        return total.view(self.group.size(), -1, x.shape[1])[self.group.rank()].to(x.dtype), None, None
