"""broadcast as callers use it: any tensor, any root, in place, compiled, differentiated, intercepted, benchmarked."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from cases import HOST, Ranks

import tunedcomm
from tunedcomm import kernels
from tunedcomm.bench.contenders import contenders_of
from tunedcomm.dispatch.groups import get_communicator
from tunedcomm.kernels.common.packets import ESCAPE
from tunedcomm.kernels.common.sync import SENTINEL
from tunedcomm.spec import Problem, get_op

kernels.discover()

WORLD_SIZE = 3
RANKS = Ranks(WORLD_SIZE, env=HOST, forget=False)
VARIANTS = ("library", "host_one_shot", "lamport", "push")


def values(numel: int, rank: int, dtype: torch.dtype) -> torch.Tensor:
    """Random bytes with words that the packet protocol has to disguise."""
    generator = torch.Generator().manual_seed(100 * numel + rank)
    nbytes = numel * torch.empty(0, dtype=dtype).element_size()
    drawn = torch.randint(0, 2 if dtype == torch.bool else 256, (nbytes,), generator=generator, dtype=torch.uint8)
    if dtype != torch.bool and nbytes >= 8:
        words = drawn[: nbytes // 8 * 8].view(torch.int32)
        words[0], words[-1] = SENTINEL.value, ESCAPE.value
    return drawn.view(dtype)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.contiguous().view(-1).view(torch.uint8), b.contiguous().view(-1).view(torch.uint8))


@pytest.mark.parametrize("variant", VARIANTS)
def test_bits_of_any_root(rank: int, variant: str) -> None:
    interpreted = variant in ("lamport", "push")
    dtypes = (
        (torch.float32, torch.uint8) if interpreted else (torch.bfloat16, torch.bool, torch.int64, torch.complex128)
    )
    with tunedcomm.force("broadcast", variant):
        for dtype in dtypes:
            for numel in (1, 37, 1001):
                for root in (1, 0, 2, 1):
                    x, wanted = values(numel, rank, dtype), values(numel, root, dtype)
                    assert same_bits(tunedcomm.broadcast(x, root), wanted)
                    assert same_bits(x, values(numel, rank, dtype))
                    assert tunedcomm.broadcast(x, root, out=x) is x
                    assert same_bits(x, wanted)


@pytest.mark.parametrize("variant", ["lamport", "host_one_shot"])
def test_a_root_that_runs_ahead_overwrites_nothing(rank: int, variant: str) -> None:
    with tunedcomm.force("broadcast", variant):
        found = [tunedcomm.broadcast(torch.full((300,), 10.0 * turn + rank), turn % 2) for turn in range(12)]
    for turn, result in enumerate(found):
        assert torch.equal(result, torch.full((300,), 10.0 * turn + turn % 2))


def test_strides_and_refusals(rank: int) -> None:
    x = torch.arange(24.0).view(4, 6).T + 100 * rank
    target = torch.zeros(6, 4, 2)[..., 0]
    assert tunedcomm.broadcast(x, 2, out=target) is target
    assert torch.equal(target, torch.arange(24.0).view(4, 6).T + 200)
    assert tunedcomm.broadcast(torch.empty(0, 3)).shape == (0, 3)
    for root in (3, -1, 1.0, True, None, "0"):
        with pytest.raises(tunedcomm.UnsupportedInputError, match="from 0 to 2"):
            tunedcomm.broadcast(x, root)  # type: ignore[arg-type]
    assert torch.equal(tunedcomm.broadcast(x, 1), torch.arange(24.0).view(4, 6).T + 100)


def test_src_is_a_global_rank_and_group_src_is_not(rank: int) -> None:
    pair = dist.new_group([1, 2])
    if rank in (1, 2):
        x = torch.full((40,), float(rank))
        for _ in range(3):
            assert torch.equal(tunedcomm.broadcast(x, 2, group=pair), torch.full((40,), 2.0))
            assert torch.equal(tunedcomm.broadcast(x, group=pair, group_src=0), torch.full((40,), 1.0))
        with pytest.raises(tunedcomm.UnsupportedInputError, match="src=0"):
            tunedcomm.broadcast(x, 0, group=pair)
    dist.barrier()


def test_gradient_is_the_sum_at_the_root(rank: int) -> None:
    x = torch.ones(5, requires_grad=True)
    (tunedcomm.broadcast(x, 1) * (rank + 1)).sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, torch.full((5,), 6.0 if rank == 1 else 0.0))


def test_compiled(rank: int) -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        return tunedcomm.broadcast(x * 2, 2) + 1

    compiled = torch.compile(program, backend="aot_eager", fullgraph=True)
    for _ in range(3):
        assert torch.equal(compiled(torch.full((9,), float(rank))), torch.full((9,), 5.0))


def test_intercepted(rank: int) -> None:
    """In place, asynchronously, functionally, within a subgroup, and what PyTorch makes of it; one table says so."""
    from torch.distributed import _functional_collectives as functional

    pair = dist.new_group([1, 2])
    with tunedcomm.force("broadcast", "host_one_shot"), tunedcomm.intercept() as calls:
        for _ in range(3):
            x = torch.full((50,), rank, dtype=torch.int64)
            dist.broadcast(x, 1)
            assert torch.equal(x, torch.ones(50, dtype=torch.int64))
            y = torch.full((7, 3), float(rank)).T
            work = dist.broadcast(y, 2, async_op=True)
            assert work is not None
            work.wait()
            assert torch.equal(y, torch.full((3, 7), 2.0))
            z = functional.broadcast(torch.full((5,), float(rank)), 1, dist.group.WORLD)
            assert torch.equal(z + 0, torch.ones(5))
        told = [{"from": rank}]
        dist.broadcast_object_list(told, src=2)
        assert told == [{"from": 2}]
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
        weights = [torch.empty(4, 4) for _ in range(WORLD_SIZE)]
        dist.all_gather(weights, next(model.parameters()).detach())
        assert all(torch.equal(weights[0], other) for other in weights)
    by = {call.call: call.served_by for call in calls.calls()}
    assert by["c10d::broadcast_"].startswith("host_one_shot")
    assert by["_c10d_functional::broadcast"].startswith("host_one_shot")
    if rank:
        with tunedcomm.force("broadcast", "host_one_shot"), tunedcomm.intercept(pair) as inner:
            x = torch.full((50,), float(rank))
            dist.broadcast(x, 2, group=pair)
            assert torch.equal(x, torch.full((50,), 2.0))
            assert inner.num_served == 1
    dist.barrier()


def test_the_first_call_of_an_intercepted_group_sets_it_up(rank: int) -> None:
    """The package's own exchanges never come to the communicator that they make."""
    tunedcomm.release_communicators()
    with tunedcomm.force("broadcast", "host_one_shot"), tunedcomm.intercept() as calls:
        tunedcomm.release_communicator()
        x = torch.full((8,), float(rank))
        dist.broadcast(x, 1)
        assert torch.equal(x, torch.ones(8))
    assert calls.num_served == 1


def test_bench_makes_the_public_call(rank: int) -> None:
    problem = Problem("broadcast", (40,), "float32", WORLD_SIZE, reduction="", mode="eager")
    inputs: tuple[Any, ...] = get_op("broadcast").make_inputs(problem, rank, 1, "random", torch.device("cpu"))
    root = get_op("broadcast").make_inputs(problem, 1, 1, "random", torch.device("cpu"))[0]
    (tuned,) = contenders_of(get_communicator(), problem, inputs, ["tuned"]).present[1:]
    for _ in range(3):
        tuned.launch(tuned.turns[0])
        assert torch.equal(tuned.results[0], root)
