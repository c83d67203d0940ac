"""all_gather_v, reduce_scatter_v and lists on GPUs: bits, counts that change between replays, ranks ahead."""

from __future__ import annotations

import contextlib
import itertools
from typing import Any

import torch
import torch.distributed as dist
from bodies import captured, same_bits

import tunedcomm

OPS = ("all_gather_v", "reduce_scatter_v")
VARIANTS = ("library", "lamport", "push")


def shares(most: int, turn: int) -> list[int]:
    """Rows of every rank, none on some."""
    return [(most, 0, most // 2, 1)[(rank + turn) % 4] for rank in range(dist.get_world_size())]


def values(rank: int, rows: int, width: int, dtype: torch.dtype, turn: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * turn + rank)
    return torch.randint(-8, 9, (rows, width), generator=generator).to(dtype).cuda()


def case(op: str, counts: list[int], width: int, dtype: torch.dtype, turn: int) -> tuple[torch.Tensor, torch.Tensor]:
    """This rank's rows and its result."""
    rank, n = dist.get_rank(), dist.get_world_size()
    if op == "all_gather_v":
        every = [values(r, counts[r], width, dtype, turn) for r in range(n)]
        return every[rank], torch.cat(every)
    every = [values(r, sum(counts), width, dtype, turn) for r in range(n)]
    return every[rank], torch.stack([x.float() for x in every]).sum(0).to(dtype).split(counts)[rank]


def roomy(x: torch.Tensor, rows: int) -> torch.Tensor:
    return torch.cat([x, torch.full((rows - len(x), x.shape[1]), 77.0, device="cuda").to(x.dtype)])


def calls_body() -> dict[str, object]:
    """Every variant and form, eagerly, and in graphs whose counts in memory change between replays."""
    checked, n = 0, dist.get_world_size()
    dtypes = (torch.bfloat16, torch.float32, torch.float16)
    shapes = ((1, 8), (4, 7168), (7, 33), (64, 7168), (300, 1024))
    for (most, width), op, variant in itertools.product(shapes, OPS, VARIANTS):
        function: Any = getattr(tunedcomm, op)
        rooms = most if op == "all_gather_v" else most * n
        with tunedcomm.force(op, variant), contextlib.suppress(tunedcomm.InfeasibleError):
            dtype = dtypes[most % 3]
            for turn in range(4):
                counts = shares(most, turn)
                x, due = case(op, counts, width, dtype, turn)
                for _ in range(3):
                    assert same_bits(function(x, counts, max_count=most), due), (op, variant, counts)
                given = torch.tensor(counts, dtype=torch.int32, device="cuda")
                found = function(roomy(x, rooms), given, max_count=most)
                assert same_bits(found[: len(due)], due), (op, variant, counts)
                if op == "all_gather_v":
                    padded, told = tunedcomm.all_gather_v(x, max_count=most)
                    assert told.tolist() == counts
                    assert same_bits(torch.cat([padded[r, :c] for r, c in enumerate(counts)]), due)
                checked += 1
            held, given = torch.zeros(rooms, width, dtype=dtype, device="cuda"), torch.zeros_like(given)
            out = torch.zeros(n * most if op == "all_gather_v" else most, width, dtype=dtype, device="cuda")

            def step(_: int, held: Any = held, given: Any = given, out: Any = out, function: Any = function) -> None:
                function(held, given, max_count=most, out=out)  # noqa: B023 - captured at once

            graph = captured(step, 3)
            for turn in range(40):
                counts = shares(most, turn)
                x, due = case(op, counts, width, dtype, turn % 5)
                held.copy_(roomy(x, rooms))
                given.copy_(torch.tensor(counts, dtype=torch.int32))
                out.fill_(7.0)
                graph.replay()
                assert same_bits(out[: len(due)], due), (op, variant, turn)
                checked += 1
    assert checked > 500, checked
    return {"checked": checked}


def lists_body() -> dict[str, object]:
    """Several tensors in one launch; also in a graph."""
    rank, n = dist.get_rank(), dist.get_world_size()
    for variant, sizes in itertools.product(("library", "lamport"), ((1024, 1024, 1024), (7, 33, 1), (16, 5000, 0, 2))):
        kinds = (torch.float32, torch.uint8, torch.bfloat16, torch.int64)
        every = [[values(r, size, 1, kind, 1) for size, kind in zip(sizes, kinds, strict=False)] for r in range(n)]
        due = [torch.cat(parts) for parts in zip(*every, strict=True)]
        with tunedcomm.force("all_gather_list", variant), contextlib.suppress(tunedcomm.InfeasibleError):
            for _ in range(3):
                assert all(map(same_bits, tunedcomm.all_gather(every[rank]), due)), (variant, sizes)
            outs = [torch.zeros_like(each) for each in due]
            graph = captured(lambda _, outs=outs, xs=every[rank]: tunedcomm.all_gather(xs, out=outs), 3)
            for _ in range(20):
                for out in outs:
                    out.fill_(3)
                graph.replay()
                assert all(map(same_bits, outs, due)), (variant, sizes)
    return {}


def ahead_body() -> dict[str, object]:
    """Ranks that run ahead of each other, with launches of other ops between, overwrite nothing that is still read."""
    for op, variant, most in itertools.product(OPS, ("lamport", "push"), (2, 200)):
        function: Any = getattr(tunedcomm, op)
        late, cases = (
            [],
            [(shares(most, turn), *case(op, shares(most, turn), 512, torch.bfloat16, turn)) for turn in range(8)],
        )
        with tunedcomm.force(op, variant), tunedcomm.force("all_reduce", "lamport"):
            for turn in range(300):
                if turn % 7 == dist.get_rank():
                    torch.cuda._sleep(200_000)
                counts, x, due = cases[turn % len(cases)]
                late.append((function(x, counts, max_count=most), due))
                if turn % 3 == 0:
                    total = tunedcomm.all_reduce(torch.ones(100, device="cuda"))
                    late.append((total, torch.full_like(total, float(dist.get_world_size()))))
            assert all(same_bits(found, due) for found, due in late), (op, variant, most)
    return {}
