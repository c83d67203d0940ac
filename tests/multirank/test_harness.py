"""The launcher that the other multi-rank tests stand on must itself report, not hide, what goes wrong."""

from __future__ import annotations

import os
import time

import pytest
import torch
import torch.distributed as dist
from harness import RankError, run_ranks


def total(rank: int, world_size: int, start: float) -> float:
    value = torch.tensor([start + rank])
    dist.all_reduce(value)
    assert dist.get_world_size() == world_size
    return float(value)


def misbehave(rank: int, world_size: int, how: str) -> None:
    if rank == 1:
        if how == "raise":
            raise ValueError("planted error")
        if how == "exit":
            os._exit(7)
        time.sleep(600)
    dist.barrier()


def test_results_come_back_in_rank_order() -> None:
    assert run_ranks(2, total, 10.0) == [21.0, 21.0]


@pytest.mark.parametrize(
    ("how", "text"), [("raise", "planted error"), ("exit", "code 7"), ("hang", "killed after 6 s")]
)
def test_failures_name_rank_and_cause(how: str, text: str) -> None:
    started = time.monotonic()
    with pytest.raises(RankError, match=rf"(?s)rank 1 .*{text}"):
        run_ranks(2, misbehave, how, timeout=6 if how == "hang" else 60)
    assert time.monotonic() - started < 50
