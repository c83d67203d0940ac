"""The adapter with DeepEP's calls: packed closely and with room for the worst, other numbers of tokens on each rank."""

from __future__ import annotations

import pytest
import torch
from cases import HOST, Ranks

import tunedcomm
from tunedcomm.integrations.deep_ep import Buffer

RANKS = Ranks(env=HOST)
EXPERTS = 4


def case_of(rank: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(tokens, ids, weights): 3 tokens on rank 0, 5 on rank 1."""
    generator, count = torch.Generator().manual_seed(rank), 3 + 2 * rank
    x = torch.randint(-8, 8, (count, 128), generator=generator).float()
    ids = torch.rand(count, EXPERTS, generator=generator).argsort(-1)[:, :2]
    ids[-1, 1] = -1
    return x, ids, torch.randint(1, 4, ids.shape, generator=generator).float()


@pytest.mark.parametrize("worst", [0, 12])
@pytest.mark.parametrize("is_fp8", [False, True])
def test_as_deep_ep(rank: int, worst: int, is_fp8: bool) -> None:
    buffer, (x, ids, weights) = Buffer(), case_of(rank)
    layout = buffer.get_dispatch_layout(ids, EXPERTS)
    assert layout[0].tolist() == [int((ids.clamp(min=-2) // 2 == r).any(1).sum()) for r in range(2)]
    assert layout[2].tolist() == [int((ids == e).sum()) for e in range(EXPERTS)]
    scales = torch.arange(1.0, 1 + len(x)).unsqueeze(1)
    given = (x.to(torch.float8_e4m3fn), scales) if is_fp8 else x
    received, found, factors, counts, handle, event = buffer.dispatch(
        given, num_tokens_per_expert=layout[2], topk_idx=ids, topk_weights=weights, expert_alignment=4,
        num_worst_tokens=worst,
    )  # fmt: skip
    event.current_stream_wait()
    assert found is not None
    assert factors is not None
    every = [(case[0][t], case[1][t], t) for case in map(case_of, range(2)) for t in range(len(case[0]))]
    here = [(row, names, t) for row, names, t in every if (names // 2 == rank).any()]
    used = (found >= 0).any(1)
    tokens, come = received if isinstance(received, tuple) else (received, None)
    assert torch.equal(tokens.float()[used], torch.stack([row for row, _, _ in here]))
    assert come is None or come[used].flatten().tolist() == [t + 1 for _, _, t in here]
    mine = torch.stack([names for _, names, _ in here])
    assert torch.equal(found[used], torch.where(mine // 2 == rank, mine - 2 * rank, -1))
    due = [sum(int((names == e).sum()) for _, names, _ in here) for e in (2 * rank, 2 * rank + 1)]
    assert counts == ([] if worst else [-(-count // 4) * 4 for count in due])
    assert len(used) == (worst or len(here))
    again, *_ = buffer.dispatch(x, handle)
    assert isinstance(again, torch.Tensor)
    assert torch.equal(again[used], tokens.float()[used])
    y, back, _ = buffer.combine(again * (rank + 1), handle, factors, bias=torch.ones(128))
    there = [(ids // 2 == r).any(1, keepdim=True) for r in range(2)]
    assert torch.equal(y, x * there[0] + 2 * x * there[1] + 1)
    assert back is not None
    assert torch.equal(back, torch.where(ids >= 0, weights, 0.0))


def test_what_is_refused(rank: int) -> None:
    x, ids, _ = case_of(rank)
    with pytest.raises(tunedcomm.UnsupportedInputError, match="low-latency"):
        Buffer().low_latency_dispatch(x, ids, 128, EXPERTS, use_fp8=True)
    with pytest.raises(tunedcomm.UnsupportedInputError, match="topk_idx"):
        Buffer().dispatch(x)
    with pytest.raises(tunedcomm.UnsupportedInputError, match="num_worst_tokens"):
        Buffer().dispatch(x, num_tokens_per_expert=torch.zeros(EXPERTS), topk_idx=ids, num_worst_tokens=4)
