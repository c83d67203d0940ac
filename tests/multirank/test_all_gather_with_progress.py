"""`all_gather_with_progress` on the host backend: a kernel of a test waits for each chunk and sums it."""

from __future__ import annotations

import os
import random
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cases import PEER_TIMEOUT_S, Ranks, gives_up_in_time, replaced

import tunedcomm
from tunedcomm.dispatch.communicator import get_communicator
from tunedcomm.errors import PeerTimeoutError
from tunedcomm.kernels.common import copies
from tunedcomm.ops import symmetric

WORLD_SIZE = 3
RANKS = Ranks(WORLD_SIZE)


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


def test_bad_input(rank: int) -> None:
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
        said = r"all_gather \(called eagerly\) missed rank 1 of the group of 3"
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
