"""What each rank of a GPU test of broadcast and of intercepted calls runs, by `run_bodies.py`."""

from __future__ import annotations

import torch
import torch.distributed as dist
from bodies import captured, same_bits

import tunedcomm
from tunedcomm.integrations.intercept import intercept
from tunedcomm.kernels.common.packets import ESCAPE
from tunedcomm.kernels.common.sync import SENTINEL

DTYPES = (torch.bfloat16, torch.float32, torch.int64, torch.uint8, torch.bool, torch.complex128)


def values(numel: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Random bytes, the same wherever the seed is, with words that packets have to disguise."""
    generator = torch.Generator().manual_seed(seed)
    nbytes = numel * torch.empty(0, dtype=dtype).element_size()
    drawn = torch.randint(0, 2 if dtype == torch.bool else 256, (nbytes,), generator=generator, dtype=torch.uint8)
    if dtype != torch.bool and nbytes >= 8:
        words = drawn[: nbytes // 8 * 8].view(torch.int32)
        words[0], words[-1] = SENTINEL.value, ESCAPE.value
    return drawn.view(dtype).cuda()


def variants_body() -> dict[str, object]:
    """Every variant, dtype and root: bits, eagerly, in place and in graphs that are replayed with new inputs."""
    rank, world_size, checked = dist.get_rank(), dist.get_world_size(), 0
    for variant in ("library", "lamport", "push"):
        with tunedcomm.force("broadcast", variant):
            for dtype in DTYPES:
                for numel in (1, 37, 4096, 100_003, 2_000_000 if variant != "lamport" else 200_000):
                    for root in range(world_size):
                        x, due = values(numel, dtype, 100 * root + rank), values(numel, dtype, 101 * root)
                        for _ in range(3):
                            assert same_bits(tunedcomm.broadcast(x, root), due), (variant, dtype, numel, root)
                        assert same_bits(x, values(numel, dtype, 100 * root + rank))
                        assert tunedcomm.broadcast(x, root, out=x) is x
                        assert same_bits(x, due)
                        checked += 1
            for numel in (64, 100_000):
                x, out = torch.zeros(numel, device="cuda"), torch.empty(numel, device="cuda")
                graph = captured(lambda _, x=x, out=out: tunedcomm.broadcast(x, world_size - 1, out=out), 3)
                for turn in range(50):
                    x.fill_(10.0 * turn + rank)
                    graph.replay()
                    assert bool((out == 10.0 * turn + world_size - 1).all()), (variant, numel, turn)
                    checked += 1
    return {"checked": checked}


def ahead_body() -> dict[str, object]:
    """A root that runs ahead of the others overwrites nothing that they have not read."""
    rank, world_size, checked = dist.get_rank(), dist.get_world_size(), 0
    for variant in ("lamport", "push"):
        with tunedcomm.force("broadcast", variant):
            for numel in (64, 50_000):
                found = []
                for turn in range(200):
                    if turn % 7 == rank:
                        torch.cuda._sleep(200_000)
                    found.append(tunedcomm.broadcast(torch.full((numel,), 10.0 * turn + rank, device="cuda"), turn % 2))
                for turn, result in enumerate(found):
                    assert bool((result == 10.0 * turn + turn % 2).all()), (variant, numel, turn)
                    checked += 1
    assert world_size >= 2
    return {"checked": checked}


def intercepted_body() -> dict[str, object]:
    """torch.distributed's calls under `intercept`, with and without `async_op`, on several streams, against NCCL."""
    rank, world_size, checked = dist.get_rank(), dist.get_world_size(), 0
    other = dist.new_group()
    dist.all_reduce(torch.zeros(1, device="cuda"), group=other)  # NCCL's own set-up, outside of what is intercepted
    side = torch.cuda.Stream()
    with intercept() as seen, intercept(other):
        for turn in range(30):
            numel = (64, 5000, 300_000)[turn % 3]
            x, y = (torch.full((numel,), float(rank + 1 + turn + k), device="cuda") for k in (0, 100))
            gathered = torch.empty(world_size, numel, device="cuda")
            z = torch.full((numel,), float(rank), device="cuda")
            with torch.cuda.stream(side) if turn % 2 else torch.cuda.stream(torch.cuda.current_stream()):
                torch.cuda.current_stream().wait_stream(torch.cuda.default_stream())
                first = dist.all_reduce(x, async_op=True)
                second = dist.all_gather_into_tensor(gathered, y, group=other, async_op=True)
                third = dist.broadcast(z, turn % world_size, async_op=True)
                for work in (third, first, second):
                    work.wait()
                x += 1.0
                y += 1.0  # after the gather has read it
                results = x.clone(), gathered.clone(), z.clone()
            torch.cuda.synchronize()
            total = sum(range(1, world_size + 1)) + world_size * turn + 1.0
            assert bool((results[0] == total).all()), turn
            for peer in range(world_size):
                assert bool((results[1][peer] == peer + 101 + turn).all()), turn
            assert bool((results[2] == turn % world_size).all()), turn
            checked += 3
    return {"checked": checked, "seen": str(seen)[:600]}
