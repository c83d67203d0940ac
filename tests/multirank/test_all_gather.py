"""`tunedcomm.all_gather` as callers use it: any tensor, any dimension, or an error that says what to do."""

from __future__ import annotations

import contextlib
import functools
import math
import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cases import PEER_TIMEOUT_S, Case, gives_up_in_time, report, run_cases
from harness import run_ranks
from quick import some

import tunedcomm
from tunedcomm.errors import PeerTimeoutError

WORLD_SIZE = 3
VARIANTS = ("library", "lamport", "pull", "push", "copy_engine")
LOST = VARIANTS[1:]


def refused(text: str) -> Any:
    return pytest.raises(tunedcomm.UnsupportedInputError, match=text)


def of_rank(shape: tuple[int, ...], rank: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Values that differ by rank and place."""
    values = torch.arange(math.prod(shape)).view(shape) * 8 + rank
    return (values % 2 == 0) if dtype == torch.bool else values.to(dtype)


def expected(shape: tuple[int, ...], dim: int, dtype: torch.dtype = torch.float32, ranks: int = WORLD_SIZE) -> Any:
    return torch.cat([of_rank(shape, rank, dtype) for rank in range(ranks)], dim)


@contextlib.contextmanager
def each(names: tuple[str, ...] = VARIANTS) -> Iterator[Iterator[str]]:
    """Names one variant after another, each forced as long as it is the last one named."""
    with contextlib.ExitStack() as stack:

        def forced() -> Iterator[str]:
            for name in names:
                stack.close()
                stack.enter_context(tunedcomm.force("all_gather", name))
                yield name

        yield forced()


def dimensions(rank: int) -> None:
    with each(("library", "lamport", "push")) as names:
        for name in names:
            for shape in some(((6,), (4, 5), (1, 7), (2, 3, 5), (1, 1, 9), (3, 1, 2)), 2):
                for dim in range(-len(shape), len(shape)):
                    out = tunedcomm.all_gather(of_rank(shape, rank), dim=dim)
                    assert out.is_contiguous()
                    assert torch.equal(out, expected(shape, dim)), (name, shape, dim)
    scalar = tunedcomm.all_gather(torch.tensor(float(rank)))
    assert torch.equal(scalar, torch.arange(float(WORLD_SIZE)))
    assert torch.equal(tunedcomm.all_gather(torch.tensor(rank), dim=-1), torch.arange(WORLD_SIZE))


def dtypes(rank: int) -> None:
    known = [torch.bfloat16, torch.float16, torch.float64, torch.int8, torch.uint8, torch.int16, torch.int32]
    known += [torch.int64, torch.bool, torch.complex64, torch.complex128, torch.uint16, torch.uint32]
    with each() as names:
        for name in names:
            for dtype in some(known, 4):
                for shape, dim in (((5, 3), 0), ((5, 3), 1), ((), 0)):
                    out = tunedcomm.all_gather(of_rank(shape, rank, dtype), dim=dim)
                    assert out.dtype == dtype
                    every = [of_rank(shape, r, dtype) for r in range(WORLD_SIZE)]
                    assert torch.equal(out, torch.stack(every) if shape == () else torch.cat(every, dim)), (name, dtype)
            for dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
                out = tunedcomm.all_gather(of_rank((9,), rank, torch.uint8).view(dtype))
                assert torch.equal(out.view(torch.uint8), expected((9,), 0, torch.uint8)), (name, dtype)


def given_out(rank: int) -> None:
    x = of_rank((4, 6), rank)
    with each() as names:
        for name in names:
            for dim in (0, 1):
                shape = [4, 6]
                shape[dim] *= WORLD_SIZE
                room = torch.full((2 * shape[0], shape[1] + 3), -1.0)
                for out in (torch.empty(shape), room[: shape[0], : shape[1]], room[::2, 2:-1]):
                    assert tunedcomm.all_gather(x, dim=dim, out=out) is out
                    assert torch.equal(out, expected((4, 6), dim)), (name, dim)
                assert bool((room[1, -1] == -1.0).all()), "nothing beside the view is written"
    with refused(r"out has shape \(4, 6\).*the result has: \(12, 6\)"):
        tunedcomm.all_gather(x, out=torch.empty(4, 6))
    with refused(r"out has shape .*float64"):
        tunedcomm.all_gather(x, out=torch.empty(12, 6, dtype=torch.float64))
    whole = torch.empty(12, 6)
    with refused("out overlaps x; give it memory of its own"):
        tunedcomm.all_gather(whole[4:8], out=whole)
    with refused("out is an expanded tensor"):
        tunedcomm.all_gather(x, out=torch.empty(1, 6).expand(12, 6))
    with refused("out is a list; it must be a dense tensor"):
        tunedcomm.all_gather(x, out=[0.0])
    assert torch.equal(tunedcomm.all_gather(x), expected((4, 6), 0)), "the refusals left the group as it was"


def nothing_to_move(rank: int) -> None:
    del rank
    for shape, dim, result in (((0,), 0, (0,)), ((3, 0), 0, (9, 0)), ((3, 0, 2), 2, (3, 0, 6))):
        out = tunedcomm.all_gather(torch.empty(shape, dtype=torch.bfloat16), dim=dim)
        assert out.shape == result
        given = torch.empty(result, dtype=torch.bfloat16)
        assert tunedcomm.all_gather(torch.empty(shape, dtype=torch.bfloat16), dim=dim, out=given) is given


def bad_input(rank: int) -> None:
    x = of_rank((4, 2), rank)
    for dim in (2, -3, "0", None, 1.0):
        with refused(r"dim=.* of all_gather is no dimension of a tensor of shape \(4, 2\); allowed: -2 to 1"):
            tunedcomm.all_gather(x, dim=dim)
    with refused("all_gather wants a torch.Tensor, got list"):
        tunedcomm.all_gather([1.0])
    with refused("wants a dense tensor, got layout"):
        tunedcomm.all_gather(x.to_sparse())
    with refused("all_gather of torch.float8_e5m2 is not differentiable"):
        tunedcomm.all_gather(x.to(torch.float8_e5m2).requires_grad_())
    with refused("serves cuda and cpu tensors, not meta"):
        tunedcomm.all_gather(torch.empty(4, device="meta"))
    with refused("max_sms=-1 is no number of SMs"):
        tunedcomm.all_gather(x, max_sms=-1)
    with refused("does not take torch.quint8; gather x.int_repr"):
        tunedcomm.all_gather(torch.quantize_per_tensor(x, 0.1, 0, torch.quint8))
    assert torch.equal(tunedcomm.all_gather(x), expected((4, 2), 0))


def groups(rank: int) -> None:
    pairs = [dist.new_group([0, 1]), dist.new_group([1, 2]), dist.new_group([0, 2])]
    for step in range(6):
        members = sorted({step % 3, (step + 1) % 3})
        group = pairs[{(0, 1): 0, (1, 2): 1, (0, 2): 2}[members[0], members[1]]]
        if rank in members:
            with each(("lamport", "push")) as names:
                for name in names:
                    out = tunedcomm.all_gather(of_rank((step + 3,), rank), group=group)
                    wanted = torch.cat([of_rank((step + 3,), member) for member in members])
                    assert torch.equal(out, wanted), (name, members)
        else:
            with pytest.raises(tunedcomm.GroupError, match="not a member of the group"):
                tunedcomm.all_gather(torch.ones(2), group=group)
    alone = [dist.new_group([member]) for member in range(WORLD_SIZE)][rank]
    x = of_rank((3, 2), rank).t()
    out = tunedcomm.all_gather(x, dim=1, group=alone)
    assert torch.equal(out, x)
    assert out.data_ptr() != x.data_ptr()


def symmetric_inputs(rank: int) -> None:
    x = tunedcomm.symmetric_empty((6, 4), dtype=torch.float32)
    with each(("pull", "copy_engine", "lamport", "push")) as names:
        for name in names:
            for dim in (0, 1):
                x.copy_(of_rank((6, 4), rank))
                out = tunedcomm.all_gather(x, dim=dim)
                if dim == 0:
                    x.fill_(-1.0)  # nobody reads it any more
                assert torch.equal(out, expected((6, 4), dim)), (name, dim)
    with refused("must be contiguous and start at a multiple of 16 bytes"):
        tunedcomm.all_gather(x.view(-1)[1:5])


CASES: dict[str, Case] = {
    case.__name__: case
    for case in (
        dimensions,
        dtypes,
        given_out,
        nothing_to_move,
        bad_input,
        groups,
        symmetric_inputs,
    )
}


def body(rank: int, world_size: int) -> dict[str, str]:
    del world_size
    return run_cases(CASES, rank)


@pytest.fixture(scope="module")
def outcomes() -> list[dict[str, str]]:
    return run_ranks(WORLD_SIZE, body, timeout=300)


@pytest.mark.parametrize("name", CASES)
def test_all_gather(outcomes: list[dict[str, str]], name: str) -> None:
    report(outcomes, name)


def lose(variant: str, rank: int) -> None:
    """One rank does not call: the other gives up in time, says for whom it waited, and refuses at once from then on."""
    os.environ["TUNEDCOMM_PEER_TIMEOUT_S"] = str(PEER_TIMEOUT_S)
    group = dist.new_group()
    with tunedcomm.force("all_gather", variant):
        tunedcomm.all_gather(torch.ones(600), group=group)
        dist.barrier()
        if rank == 0:
            said = r"all_gather \(called eagerly\) missed rank 1 of the group"
            for least in (PEER_TIMEOUT_S, 0.0):
                with gives_up_in_time(least), pytest.raises(PeerTimeoutError, match=said):
                    tunedcomm.all_gather(torch.ones(600), group=group)
        dist.barrier()


def lost_body(rank: int, world_size: int) -> dict[str, str]:
    del world_size
    return run_cases({name: functools.partial(lose, name) for name in some(LOST)}, rank)


@pytest.fixture(scope="module")
def lost_outcomes() -> list[dict[str, str]]:
    return run_ranks(2, lost_body, timeout=120)


@pytest.mark.parametrize("name", some(LOST))
def test_a_lost_peer(lost_outcomes: list[dict[str, str]], name: str) -> None:
    report(lost_outcomes, name)
