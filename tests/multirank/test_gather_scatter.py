"""reduce_scatter and all_gather as callers use them: any tensor, any dimension, or an error that says what to do."""

from __future__ import annotations

import math
import os
import random
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cases import PEER_TIMEOUT_S, Ranks, gives_up_in_time, replaced
from quick import some

import tunedcomm
from tunedcomm import kernels
from tunedcomm.dispatch.groups import get_communicator
from tunedcomm.errors import PeerTimeoutError
from tunedcomm.kernels.common import copies
from tunedcomm.ops import symmetric

kernels.discover()


WORLD_SIZE = 3
RANKS = Ranks(WORLD_SIZE)


def values(shape: tuple[int, ...], rank: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return (torch.arange(torch.Size(shape).numel(), dtype=torch.float64).view(shape) % 23 * (rank + 1)).to(dtype)


def wanted(shape: tuple[int, ...], rank: int, dim: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    total = sum(values(shape, r, torch.float64) for r in range(WORLD_SIZE))
    assert isinstance(total, torch.Tensor)
    return total.chunk(WORLD_SIZE, dim)[rank].to(dtype)


def test_reduce_scatter_dimensions(rank: int) -> None:
    shapes = (((4, 6, 9), -1), ((4, 6, 5), 1), ((1, 6, 2), 1), ((1, 1, 3), -1), ((6, 3), -2), ((2, 9), 1))
    for shape, dim in some(shapes, 2):
        for variant in ("lamport", "library"):
            with tunedcomm.force("reduce_scatter", variant):
                for _ in range(2):
                    out = tunedcomm.reduce_scatter(values(shape, rank), dim=dim)
                    assert out.is_contiguous()
                    assert torch.equal(out, wanted(shape, rank, dim)), (shape, dim)
                target = torch.zeros((*out.shape, 2))[..., 0]
                assert tunedcomm.reduce_scatter(values(shape, rank), dim=dim, out=target) is target
                assert torch.equal(target, wanted(shape, rank, dim))


def test_dtypes_and_reductions(rank: int) -> None:
    for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.int8, torch.int32, torch.int64):
        x = (torch.arange(12) % 5 + rank).to(dtype)
        base = (torch.arange(12) % 5)[4 * rank : 4 * rank + 4]
        assert torch.equal(tunedcomm.reduce_scatter(x), (3 * base + 3).to(dtype))
        assert torch.equal(tunedcomm.reduce_scatter(x, op="max"), (base + 2).to(dtype))
        assert torch.equal(tunedcomm.reduce_scatter(x, op="min"), base.to(dtype))
        if dtype.is_floating_point:
            assert torch.equal(tunedcomm.reduce_scatter(x, op="avg"), (base + 1).to(dtype))


def test_reduce_scatter_symmetric_inputs(rank: int) -> None:
    """Read in place by the peers, larger than any area too; plain where the chunks do not lie one after another."""
    for shape in ((WORLD_SIZE * 5, 3), (WORLD_SIZE * 40_000, 4)):
        x = tunedcomm.symmetric_empty(shape, dtype=torch.float32)
        with tunedcomm.force("reduce_scatter", "one_shot"):
            for _ in range(2):
                x.copy_(values(shape, rank))
                out = tunedcomm.reduce_scatter(x)
                assert torch.equal(out, wanted(shape, rank))
                x.zero_()  # at once: nobody reads it any more
    whole = tunedcomm.symmetric_empty((4, 6), dtype=torch.float32)
    whole.copy_(values((4, 6), rank))
    assert torch.equal(tunedcomm.reduce_scatter(whole, dim=1), wanted((4, 6), rank, 1))
    dist.barrier()


def test_reduce_scatter_bad_input(rank: int) -> None:
    good = torch.ones(6, 4)
    assert torch.equal(tunedcomm.reduce_scatter(good), torch.full((2, 4), 3.0))
    integer, out = torch.ones(3, dtype=torch.int32), torch.empty(6, 4)
    for given, options, said in (
        *((x, {}, "multiple of 3 .*pad x") for x in (torch.ones(4, 6), torch.ones(8, 3), torch.ones(24)[:23])),
        (good, {"dim": 1}, "dimension 1 of x, 4 long"),
        (torch.tensor(1.0), {}, "dimension 0 of x, 1 long"),
        *((torch.ones(6, 6), {"dim": dim}, "is not a dimension of") for dim in (2, -3, "0", 1.0, None, True)),
        (good, {"op": "prod"}, "op='prod' is not a reduction"),
        (good, {"op": []}, "is not a reduction"),
        (good, {"out": out}, "out has shape"),
        (good, {"out": good[:2]}, "out overlaps x"),
        (good, {"out": good}, "out has shape"),
        ([1.0], {}, "torch.Tensor"),
        (integer.to(torch.complex64), {}, "complex64"),
        (integer.short(), {}, "int16"),
        (integer, {"op": "avg"}, "would round"),
        (good.clone().requires_grad_(), {"op": "min"}, "not differentiable"),
    ):
        with pytest.raises(tunedcomm.UnsupportedInputError, match=said):
            tunedcomm.reduce_scatter(given, **options)
    assert torch.equal(tunedcomm.reduce_scatter(good), torch.full((2, 4), 3.0))


# all_gather as callers use it: any tensor, any dimension, read while it is under way, or an error that helps


VARIANTS = ("library", "lamport", "pull", "push", "copy_engine")


def of_rank(shape: tuple[int, ...], rank: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Values that differ by rank and place."""
    values = torch.arange(math.prod(shape)).view(shape) * 8 + rank
    return (values % 2 == 0) if dtype == torch.bool else values.to(dtype)


def expected(shape: tuple[int, ...], dim: int, dtype: torch.dtype = torch.float32, ranks: int = WORLD_SIZE) -> Any:
    return torch.cat([of_rank(shape, rank, dtype) for rank in range(ranks)], dim)


def test_all_gather_dimensions(rank: int) -> None:
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
        (whole[1:5], whole, "out overlaps x"),
        (x, torch.empty(1, 6).expand(12, 6), "out is an expanded tensor"),
        (x, [0.0], "out is a list"),
    ):
        with pytest.raises(tunedcomm.UnsupportedInputError, match=said):
            tunedcomm.all_gather(given, out=out)
    assert torch.equal(tunedcomm.all_gather(x), expected((4, 6), 0)), "the refusals left the group as it was"


def test_all_gather_bad_input(rank: int) -> None:
    x = of_rank((4, 2), rank)
    for given, options, said in (
        *((x, {"dim": dim}, "is not a dimension of a tensor of shape") for dim in (2, -3, "0", None, 1.0)),
        ([1.0], {}, "got float"),
        (x.to_sparse(), {}, "dense tensor"),
        (x.to(torch.float8_e5m2).requires_grad_(), {}, "not differentiable"),
        (torch.empty(4, device="meta"), {}, "not meta"),
        (x, {"max_sms": -1}, "max_sms=-1"),
        (torch.quantize_per_tensor(x, 0.1, 0, torch.quint8), {}, "x.int_repr"),
    ):
        with pytest.raises(tunedcomm.UnsupportedInputError, match=said):
            tunedcomm.all_gather(given, **options)
    assert torch.equal(tunedcomm.all_gather(x), expected((4, 2), 0))


def test_all_gather_of_symmetric_inputs(rank: int) -> None:
    x = tunedcomm.symmetric_empty((6, 4), dtype=torch.float32)
    for name in ("pull", "copy_engine", "lamport", "push"):
        with tunedcomm.force("all_gather", name):
            for dim in (0, 1):
                x.copy_(of_rank((6, 4), rank))
                out = tunedcomm.all_gather(x, dim=dim)
                if dim == 0:
                    x.fill_(-1.0)  # nobody reads it any more
                assert torch.equal(out, expected((6, 4), dim)), (name, dim)
    with pytest.raises(tunedcomm.UnsupportedInputError, match="must be contiguous and start at a multiple of 16 bytes"):
        tunedcomm.all_gather(x.view(-1)[1:5])


# `all_gather_with_progress` on the host backend: a kernel of a test waits for each chunk and sums it


def shard(rank: int, rows: int, columns: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed * 31 + rank)
    return torch.randint(-9, 10, (rows, columns), generator=generator).float()


def sums_of(gather: tunedcomm.GatherProgress, columns: int) -> torch.Tensor:
    """Sum of each (rank, chunk) by a kernel that waits for it first; one block goes through all of them."""
    from progress_consumer import sum_kernel

    sums = torch.full((WORLD_SIZE, gather.num_chunks), float("nan"))
    extents = (gather.num_rows * columns, gather.chunk_rows * columns, gather.num_chunks)
    sum_kernel[(WORLD_SIZE,)](gather.out.data_ptr(), sums.data_ptr(), *extents, *gather.kernel_arguments, BLOCK=1024)
    return sums


def test_chunks(rank: int) -> None:
    """Every chunk is whole when its flag is there, call after call on one output, chunks and sizes changing."""
    shuffle = random.Random(1)
    columns = 8
    out = tunedcomm.symmetric_empty((40 * WORLD_SIZE, columns), dtype=torch.float32)
    for seed in range(14):
        rows, num_chunks = shuffle.choice((1, 4, 17, 40)), shuffle.choice((1, 2, 4, 5, 64))
        part = out[: rows * WORLD_SIZE]
        x = shard(rank, rows, columns, seed)
        if seed % 4 == 3:  # the own rows are in place already
            x = part[rank * rows : (rank + 1) * rows].copy_(x)
        if seed % 3 == rank:
            time.sleep(0.05)
        gather = tunedcomm.all_gather_with_progress(
            x, out=part, num_chunks=num_chunks, num_blocks=1 + seed % 2, aside=seed % 2 == 0
        )
        assert gather.num_chunks == -(-rows // gather.chunk_rows) <= num_chunks
        sums = sums_of(gather, columns)
        every = [shard(r, rows, columns, seed) for r in range(WORLD_SIZE)]
        for source in range(WORLD_SIZE):
            for c in range(gather.num_chunks):
                first = c * gather.chunk_rows
                wanted = every[source][first : first + gather.chunk_rows]
                assert sums[source, c] == wanted.sum(), (seed, source, c)
                assert torch.equal(part[gather.rows_of(source, c)], wanted)
        assert gather.finish() is gather.out
        assert torch.equal(gather.finish(), torch.cat(every))


def test_among_other_calls(rank: int) -> None:
    """Other collectives may come between beginning and end; a gather that was not finished is by the next."""
    out = tunedcomm.symmetric_empty((6 * WORLD_SIZE, 4), dtype=torch.float32)
    for seed in range(6):
        gather = tunedcomm.all_gather_with_progress(shard(rank, 6, 4, seed), out=out)
        with tunedcomm.force("all_reduce", ("one_shot", "two_shot", "lamport")[seed % 3]):
            assert torch.equal(tunedcomm.all_reduce(torch.ones(99)), torch.full((99,), float(WORLD_SIZE)))
        with tunedcomm.force("all_gather", ("push", "copy_engine")[seed % 2]):
            assert torch.equal(tunedcomm.all_gather(torch.tensor([rank])), torch.arange(WORLD_SIZE))
        if seed % 2:
            wanted = torch.cat([shard(r, 6, 4, seed) for r in range(WORLD_SIZE)])
            assert torch.equal(gather.finish(), wanted), seed
    gather.finish()


def test_bad_input_of_progress(rank: int) -> None:
    out = tunedcomm.symmetric_empty((4 * WORLD_SIZE, 4), dtype=torch.float32)
    x = shard(rank, 4, 4, 0)
    gather = tunedcomm.all_gather_with_progress
    begin = (rank + 1) % WORLD_SIZE * 4  # another rank's rows
    cases: list[tuple[Any, dict[str, Any], str]] = [
        (x, {"out": torch.empty(4 * WORLD_SIZE, 4)}, "symmetric memory"),
        (shard(rank, 5, 4, 0), {}, r"has shape \(12, 4\)"),
        (torch.tensor(1.0), {}, "the result of gathering"),
        (x[:, :3], {"out": tunedcomm.symmetric_empty((4 * WORLD_SIZE, 3), dtype=torch.float32)}, "rows of 12 bytes"),
        (out.view(-1)[:32].view(4, 8)[:, :4], {}, "lies in out"),
        (out[begin : begin + 4], {}, "lies in out"),
        *((x, {"num_chunks": wrong}, "num_chunks=.* from 1 to 64") for wrong in (0, 65, True, 2.0)),
        (x, {"num_blocks": 0}, "num_blocks=0 .* from 1 to 512"),
        ([1.0], {}, "got list"),
    ]
    for given, options, said in cases:
        with pytest.raises(tunedcomm.UnsupportedInputError, match=said):
            gather(given, **{"out": out, **options})
    assert torch.equal(gather(x, out=out).finish(), torch.cat([shard(r, 4, 4, 0) for r in range(WORLD_SIZE)]))


def test_a_lost_peer(rank: int) -> None:
    """A consumer that waits for a chunk that never comes gives up in time, and the group says for whom it waited."""
    os.environ["TUNEDCOMM_PEER_TIMEOUT_S"] = str(PEER_TIMEOUT_S)
    group = dist.new_group()
    out = tunedcomm.symmetric_empty((4 * WORLD_SIZE, 4), dtype=torch.float32, group=group)
    tunedcomm.all_gather_with_progress(shard(rank, 4, 4, 0), out=out, group=group).finish()
    dist.barrier()
    if rank != 1:
        said = r"all_gather .*\(called eagerly\) missed rank 1 of the group of 3"
        with gives_up_in_time(), pytest.raises(PeerTimeoutError, match=said):
            tunedcomm.all_gather_with_progress(shard(rank, 4, 4, 1), out=out, group=group)
        with gives_up_in_time(0.0), pytest.raises(PeerTimeoutError):
            tunedcomm.all_gather_with_progress(shard(rank, 4, 4, 2), out=out, group=group)
    dist.barrier()


def test_ended_elsewhere(rank: int) -> None:
    """Where it ends on another stream, both streams wait for what is sent; in a capture it cannot end."""
    waited: list[int] = []
    out = tunedcomm.symmetric_empty((4 * WORLD_SIZE, 4), dtype=torch.float32)
    gather = tunedcomm.all_gather_with_progress(shard(rank, 4, 4, 0), out=out)
    with replaced(symmetric, "is_capturing", lambda: True):
        with pytest.raises(tunedcomm.UnsupportedInputError, match="must end in the capture"):
            gather.finish()
    gather._stream = 7
    with replaced(copies.Copies, "wait", lambda self, stream, event: waited.append(stream)):
        gather.finish()
    assert sorted(waited) == [0, 7]
    assert torch.equal(out, torch.cat([shard(r, 4, 4, 0) for r in range(WORLD_SIZE)]))


def test_taking_turns(rank: int) -> None:
    """Beside graphs of large kernels both its beginning and its end are eager calls in their turn."""
    turns: list[str] = []

    class Order:
        taken = True

        def eager(self, launch: Any) -> Any:
            def in_turn(*arguments: Any) -> None:
                turns.append("begin")
                launch(*arguments)
                turns.append("end")

            return in_turn

    out = tunedcomm.symmetric_empty((4 * WORLD_SIZE, 4), dtype=torch.float32)
    with replaced(get_communicator(), "_lane_order", Order()):
        gather = tunedcomm.all_gather_with_progress(shard(rank, 4, 4, 0), out=out)
        assert turns == ["begin", "end"]
        gather.finish()
    assert turns == ["begin", "end"] * 2
