"""`tunedcomm.all_gather` as callers use it: any tensor, any dimension, or an error that says what to do."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cases import Ranks
from quick import some

import tunedcomm

WORLD_SIZE = 3
VARIANTS = ("library", "lamport", "pull", "push", "copy_engine")
RANKS = Ranks(WORLD_SIZE)


def refused(text: str) -> Any:
    return pytest.raises(tunedcomm.UnsupportedInputError, match=text)


def of_rank(shape: tuple[int, ...], rank: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Values that differ by rank and place."""
    values = torch.arange(math.prod(shape)).view(shape) * 8 + rank
    return (values % 2 == 0) if dtype == torch.bool else values.to(dtype)


def expected(shape: tuple[int, ...], dim: int, dtype: torch.dtype = torch.float32, ranks: int = WORLD_SIZE) -> Any:
    return torch.cat([of_rank(shape, rank, dtype) for rank in range(ranks)], dim)


def test_dimensions(rank: int) -> None:
    for name in ("library", "lamport", "push"):
        with tunedcomm.force("all_gather", name):
            for shape in some(((6,), (4, 5), (1, 7), (2, 3, 5), (1, 1, 9), (3, 1, 2)), 2):
                for dim in range(-len(shape), len(shape)):
                    out = tunedcomm.all_gather(of_rank(shape, rank), dim=dim)
                    assert out.is_contiguous()
                    assert torch.equal(out, expected(shape, dim)), (name, shape, dim)
    scalar = tunedcomm.all_gather(torch.tensor(float(rank)))
    assert torch.equal(scalar, torch.arange(float(WORLD_SIZE)))
    assert torch.equal(tunedcomm.all_gather(torch.tensor(rank), dim=-1), torch.arange(WORLD_SIZE))


def test_dtypes(rank: int) -> None:
    known = [torch.bfloat16, torch.float16, torch.float64, torch.int8, torch.uint8, torch.int16, torch.int32]
    known += [torch.int64, torch.bool, torch.complex64, torch.complex128, torch.uint16, torch.uint32]
    for name in VARIANTS:
        with tunedcomm.force("all_gather", name):
            for dtype in some(known, 4):
                for shape, dim in (((5, 3), 0), ((5, 3), 1), ((), 0)):
                    out = tunedcomm.all_gather(of_rank(shape, rank, dtype), dim=dim)
                    assert out.dtype == dtype
                    every = [of_rank(shape, r, dtype) for r in range(WORLD_SIZE)]
                    assert torch.equal(out, torch.stack(every) if shape == () else torch.cat(every, dim)), (name, dtype)
            for dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
                out = tunedcomm.all_gather(of_rank((9,), rank, torch.uint8).view(dtype))
                assert torch.equal(out.view(torch.uint8), expected((9,), 0, torch.uint8)), (name, dtype)


def test_given_out(rank: int) -> None:
    x = of_rank((4, 6), rank)
    for name in VARIANTS:
        with tunedcomm.force("all_gather", name):
            for dim in (0, 1):
                shape = [4, 6]
                shape[dim] *= WORLD_SIZE
                room = torch.full((2 * shape[0], shape[1] + 3), -1.0)
                for out in (torch.empty(shape), room[: shape[0], : shape[1]], room[::2, 2:-1]):
                    assert tunedcomm.all_gather(x, dim=dim, out=out) is out
                    assert torch.equal(out, expected((4, 6), dim)), (name, dim)
                assert bool((room[1, -1] == -1.0).all()), "nothing beside the view is written"
    whole = torch.empty(12, 6)
    for given, out, said in (
        (x, torch.empty(4, 6), "out has shape"),
        (x, torch.empty(12, 6, dtype=torch.float64), "out has shape .*float64"),
        (whole[4:8], whole, "out overlaps x"),
        (x, torch.empty(1, 6).expand(12, 6), "out is an expanded tensor"),
        (x, [0.0], "out is a list"),
    ):
        with refused(said):
            tunedcomm.all_gather(given, out=out)
    assert torch.equal(tunedcomm.all_gather(x), expected((4, 6), 0)), "the refusals left the group as it was"


def test_nothing_to_move(rank: int) -> None:
    del rank
    for shape, dim, result in (((0,), 0, (0,)), ((3, 0), 0, (9, 0)), ((3, 0, 2), 2, (3, 0, 6))):
        out = tunedcomm.all_gather(torch.empty(shape, dtype=torch.bfloat16), dim=dim)
        assert out.shape == result
        given = torch.empty(result, dtype=torch.bfloat16)
        assert tunedcomm.all_gather(torch.empty(shape, dtype=torch.bfloat16), dim=dim, out=given) is given


def test_bad_input(rank: int) -> None:
    x = of_rank((4, 2), rank)
    for given, options, said in (
        *((x, {"dim": dim}, "is no dimension of a tensor of shape") for dim in (2, -3, "0", None, 1.0)),
        ([1.0], {}, "got list"),
        (x.to_sparse(), {}, "dense tensor"),
        (x.to(torch.float8_e5m2).requires_grad_(), {}, "not differentiable"),
        (torch.empty(4, device="meta"), {}, "not meta"),
        (x, {"max_sms": -1}, "max_sms=-1"),
        (torch.quantize_per_tensor(x, 0.1, 0, torch.quint8), {}, "x.int_repr"),
    ):
        with refused(said):
            tunedcomm.all_gather(given, **options)
    assert torch.equal(tunedcomm.all_gather(x), expected((4, 2), 0))


def test_groups(rank: int) -> None:
    pairs = [dist.new_group([0, 1]), dist.new_group([1, 2]), dist.new_group([0, 2])]
    for step in range(6):
        members = sorted({step % 3, (step + 1) % 3})
        group = pairs[{(0, 1): 0, (1, 2): 1, (0, 2): 2}[members[0], members[1]]]
        if rank in members:
            for name in ("lamport", "push"):
                with tunedcomm.force("all_gather", name):
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


def test_symmetric_inputs(rank: int) -> None:
    x = tunedcomm.symmetric_empty((6, 4), dtype=torch.float32)
    for name in ("pull", "copy_engine", "lamport", "push"):
        with tunedcomm.force("all_gather", name):
            for dim in (0, 1):
                x.copy_(of_rank((6, 4), rank))
                out = tunedcomm.all_gather(x, dim=dim)
                if dim == 0:
                    x.fill_(-1.0)  # nobody reads it any more
                assert torch.equal(out, expected((6, 4), dim)), (name, dim)
    with refused("must be contiguous and start at a multiple of 16 bytes"):
        tunedcomm.all_gather(x.view(-1)[1:5])
