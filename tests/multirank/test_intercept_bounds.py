"""What interception leaves alone: groups made later, tunedcomm's own calls, and where tensors lie in memory."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from cases import Case, Launched, report, run_cases, spy_on_launches
from harness import run_ranks

import tunedcomm

WORLD_SIZE = 2
NUMEL = 4096
launched: list[Launched] = []


def reduced(x: torch.Tensor) -> torch.Tensor:
    """Its sum over the default group, by the functional collective."""
    assert dist.group.WORLD is not None
    return funcol.all_reduce(x, "sum", dist.group.WORLD) + 0


def own_calls_are_the_librarys(rank: int) -> None:
    """What a library variant asks `torch.distributed` for is not served by a kernel again."""
    x = torch.full((NUMEL,), rank + 1.0)
    a, b = torch.ones(64, 16), torch.ones(16, 64)
    tunedcomm.all_reduce(x, max_sms=0)  # bound before
    with tunedcomm.intercept() as seen:
        launched.clear()
        for _ in range(2):
            assert torch.equal(tunedcomm.all_reduce(x, max_sms=0), torch.full((NUMEL,), 3.0))
        assert tunedcomm.gemm_ar(a, b)[0, 0] == 16 * WORLD_SIZE
        assert not seen.calls(), str(seen)
        dist.all_reduce(torch.ones(NUMEL))
        assert seen.num_passed_on == 1
    # Without a bound of their own, rows are sent whatever bound the block names for others.
    with tunedcomm.force("all_to_all_v", "push"), tunedcomm.intercept(max_count=4) as seen:
        sent = tunedcomm.all_to_all_v(x.view(-1, 8), [NUMEL // 16] * 2, [NUMEL // 16] * 2)
        assert torch.equal(sent.sum(0), torch.full((8,), 3.0 * NUMEL / 16))
        assert not seen.calls(), str(seen)


def symmetric_memory(rank: int) -> None:
    """Legal for `torch.distributed` wherever it begins, on some ranks or on all."""
    shared = tunedcomm.symmetric_empty(NUMEL + 4, dtype=torch.float32)
    plain = torch.zeros(NUMEL + 4)
    for first in (0, 1, 1 + rank, 4 * rank):
        for source in (shared, (plain, shared)[rank]):
            launched.clear()
            source.fill_(rank + 1.0)
            x = source[first : first + NUMEL]
            out = torch.empty(NUMEL * WORLD_SIZE)
            with tunedcomm.force("all_reduce", "two_shot"), tunedcomm.force("all_gather", "pull"):
                with tunedcomm.intercept() as seen:
                    dist.all_gather_into_tensor(out, x)
                    total = reduced(x)
                    dist.all_reduce(x)
                assert seen.num_served == 3
                serving = tunedcomm.ServingAllReduce()
                assert serving.should_use(x)
                assert torch.equal(serving.all_reduce(x, x), torch.full((NUMEL,), 6.0))
            assert torch.equal(out, torch.tensor([1.0, 2.0]).repeat_interleave(NUMEL))
            assert torch.equal(total, torch.full((NUMEL,), 3.0))
            assert torch.equal(x, torch.full((NUMEL,), 6.0))
            assert (source == rank + 1.0).sum() == 4, "what is beside it"
            assert {seen.problem.input_kind for seen in launched} == {"plain"}
    dist.barrier()


CASES: dict[str, Case] = {
    "own calls are the library's": own_calls_are_the_librarys,
    "symmetric memory": symmetric_memory,
}


def body(rank: int, world_size: int) -> dict[str, str]:
    for op in ("all_reduce", "all_gather"):
        spy_on_launches(launched, op)
    return run_cases(CASES, rank)


@pytest.fixture(scope="module")
def outcomes() -> list[dict[str, str]]:
    return run_ranks(WORLD_SIZE, body, timeout=120)


@pytest.mark.parametrize("name", CASES)
def test_bounds(outcomes: list[dict[str, str]], name: str) -> None:
    report(outcomes, name)


def later_groups_body(rank: int, world_size: int, folder: str) -> tuple[int, int]:
    """A group of a destroyed one's name is another group, until it is intercepted itself."""
    with tunedcomm.force("all_reduce", "two_shot"):
        first = tunedcomm.install()
        name = dist.group.WORLD.group_name  # type: ignore[union-attr]
        assert reduced(torch.ones(NUMEL))[0] == world_size
        tunedcomm.release_communicators()
        dist.destroy_process_group()
        dist.init_process_group("gloo", init_method=f"file://{folder}/second", rank=rank, world_size=world_size)
        assert dist.group.WORLD.group_name == name  # type: ignore[union-attr]
        assert reduced(torch.ones(NUMEL))[0] == world_size
        second = tunedcomm.install()
        assert reduced(torch.ones(NUMEL))[0] == world_size
        return first.num_served, second.num_served


def test_later_groups_of_the_same_name(tmp_path: Path) -> None:
    assert run_ranks(WORLD_SIZE, later_groups_body, str(tmp_path), timeout=60) == [(1, 1)] * WORLD_SIZE
