"""Neither the library variants nor interception print warnings of torch's."""

from __future__ import annotations

import warnings

import torch
import torch.distributed as dist
from harness import run_ranks

import tunedcomm


def body(rank: int, world_size: int) -> list[str]:
    a, b = torch.ones(8, 16, dtype=torch.bfloat16), torch.ones(16, 16, dtype=torch.bfloat16)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for op in ("all_gather", "reduce_scatter", "ag_gemm", "gemm_rs"):
            with tunedcomm.force(op, "library"):
                function = getattr(tunedcomm, op)
                _ = function(a, b) if op.endswith(("gemm", "rs")) else function(a)
        with tunedcomm.intercept():
            x = torch.ones(64)
            dist.all_reduce(x)
    assert x[0] == world_size
    return [f"{each.category.__name__}: {each.message}" for each in caught]


def test_no_warning_is_printed() -> None:
    assert run_ranks(2, body, timeout=90, fresh=True) == [[], []]
