"""What the other multi-rank tests stand on must itself report, not hide, what goes wrong: the launcher, the judge."""

from __future__ import annotations

import math
import os
import time

import pytest
import torch
import torch.distributed as dist
from harness import RankError, run_ranks
from variant_checks import error_of


def misbehave(rank: int, world_size: int, how: str) -> None:
    if rank == 1:
        if how == "raise":
            raise ValueError("planted error")
        if how == "exit":
            os._exit(7)
        time.sleep(600)
    dist.barrier()


@pytest.mark.parametrize(
    ("how", "text"), [("raise", "planted error"), ("exit", "code 7"), ("hang", "killed after 6 s")]
)
def test_failures_name_rank_and_cause(how: str, text: str) -> None:
    started = time.monotonic()
    with pytest.raises(RankError, match=rf"(?s)rank 1 .*{text}"):
        run_ranks(2, misbehave, how, timeout=6 if how == "hang" else 60)
    assert time.monotonic() - started < 50


INF, NAN = math.inf, math.nan


@pytest.mark.parametrize(
    ("got", "error"),
    [
        ([3.0, 4.0, INF, -INF, NAN], 0.0),
        ([3.0, 4.5, INF, -INF, NAN], 0.1),
        ([3.0, 4.0, -INF, -INF, NAN], INF),
        ([3.0, 4.0, 3e38, -INF, NAN], INF),
        ([3.0, 4.0, NAN, -INF, NAN], INF),
        ([3.0, 4.0, INF, -INF, INF], INF),
        ([3.0, 4.0, INF, -INF, 0.0], INF),
    ],
)
def test_one_infinity_does_not_hide_what_else_is_wrong(got: list[float], error: float) -> None:
    expected = torch.tensor([3.0, 4.0, INF, -INF, NAN], dtype=torch.float64)
    assert error_of(torch.tensor(got), expected) == pytest.approx(error)
    assert not error_of(torch.tensor([3.0, NAN, INF, -INF, NAN]), expected) <= 1
