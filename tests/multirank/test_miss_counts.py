"""What real groups leave in the log of untuned problems, and that a tuned call knows nothing of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cases import run_cases, same_bits, spy_on_launches
from dispatch_table import LARGE, MIDDLE, SMALL, inputs_of, launched, make_table, problem, ran
from harness import run_ranks

import tunedcomm
from tunedcomm.db.misses import read
from tunedcomm.dispatch.communicator import get_communicator
from tunedcomm.hardware import detect
from tunedcomm.spec import Problem

BETWEEN = 8192


def counts_its_calls(numel: int, dtype: torch.dtype = torch.float32, group: Any = None) -> bool:
    problem = Problem("all_reduce", (numel,), str(dtype).removeprefix("torch."), 2, mode="eager")
    plan = get_communicator(group).plans[problem, "default", None, False]
    launch = getattr(plan.launch, "by_address", plan.launch)
    return "count_and_launch" in launch.__qualname__


def calls(rank: int) -> None:
    other = dist.new_group([0, 1])
    for numel in (SMALL, MIDDLE, LARGE):
        x, expected = inputs_of(rank, numel)
        for _ in range(3):
            assert same_bits(ran(lambda x=x: tunedcomm.all_reduce(x))[1], expected)
        assert not counts_its_calls(numel)
    x, expected = inputs_of(rank, BETWEEN)
    for group in (None, other):
        for _ in range(4):
            assert same_bits(ran(lambda group=group: tunedcomm.all_reduce(x, group=group))[1], expected)
        assert counts_its_calls(BETWEEN, group=group) == (rank == 0)
    strided = torch.ones(2 * SMALL, dtype=torch.bfloat16)[::2]  # through the slow path, each time
    for _ in range(5):
        assert torch.equal(tunedcomm.all_reduce(strided), torch.full((SMALL,), 2.0, dtype=torch.bfloat16))
    tunedcomm.all_reduce(torch.ones(SMALL, dtype=torch.int64))
    tunedcomm.all_reduce(torch.ones(SMALL), op="max")
    with tunedcomm.force("all_reduce", "one_shot"):
        tunedcomm.all_reduce(torch.ones(3 * SMALL))
    tunedcomm.release_communicators()


def body(rank: int, world_size: int) -> str:
    spy_on_launches(launched)
    return run_cases({"calls": calls}, rank)["calls"]


@pytest.mark.slow
def test_groups_note_what_was_not_tuned_and_nothing_else(tmp_path: Path) -> None:
    log, runs, variables = tmp_path / "misses.jsonl", 2, make_table(tmp_path)
    for _ in range(runs):
        assert run_ranks(2, body, env={**variables, "TEST_MISS_LOG": str(log)}) == ["", ""]
    misses, skipped = read(log)
    assert skipped == 0
    assert log.read_bytes().count(b'{"count"') == 2 * runs, "a line a missed problem and process, none for a tuned one"
    untuned = problem(SMALL, dtype="bfloat16")
    assert [(m.problem, m.count, m.source) for m in misses] == [
        (problem(BETWEEN), 16, "interpolated"),
        (untuned, 10, "library"),
    ]
    assert {m.hard_key for m in misses} == {detect().hard_key}
