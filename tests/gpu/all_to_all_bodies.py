"""What each rank of a test of all_to_all runs, by `run_bodies.py`."""

from __future__ import annotations

import contextlib
import functools
import random
import time
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from bodies import bytes_of, captured, chains, rotate

import tunedcomm
from tunedcomm.spec import Problem, variants

AWKWARD = (-0x80000000, -0x7FFFFFFF, -0x7FFFFFFE, 0, -1, 0x7FC00001, -0x7F7FFFFB, 0x7F800000, 1, -0x7FFF8000)


def sent_by(problem: Problem, rank: int, seed: int) -> torch.Tensor:
    """Random bits, in part the words that packets must not hold, as far as whole words go."""
    size = problem.nbytes * problem.world_size
    generator = torch.Generator(device="cuda").manual_seed(seed * 97 + rank)
    words = torch.randint(-(2**31), 2**31, (size // 4 + 1,), generator=generator, device="cuda", dtype=torch.int64)
    words = words.to(torch.int32)
    words[seed % 5 :: 37] = torch.tensor(AWKWARD, device="cuda", dtype=torch.int32)[seed % len(AWKWARD)]
    return words.view(torch.uint8)[:size].clone().view(getattr(torch, problem.dtype))


def case_of(problem: Problem, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(what this rank sends, what it must get)."""
    everyone = [sent_by(problem, rank, seed) for rank in range(problem.world_size)]
    wanted = torch.cat([x.view(problem.world_size, -1)[dist.get_rank()] for x in everyone])
    return everyone[dist.get_rank()], wanted


@contextlib.contextmanager
def ends(at_fault: bool, said: str) -> Iterator[None]:
    """A block in which one rank is refused and its peers soon know; then all begin anew."""
    dist.barrier()
    torch.cuda.synchronize()
    begin = time.monotonic()
    with pytest.raises(tunedcomm.UnsupportedInputError if at_fault else tunedcomm.GroupAbortedError, match=said):
        yield
    assert time.monotonic() - begin < 3
    dist.barrier()
    torch.cuda.synchronize()
    tunedcomm.release_communicator()


def asked(numel: int, dtype: str, world_size: int) -> Problem:
    return Problem("all_to_all", (numel,), dtype, world_size, reduction="")


def chain_body() -> dict[str, object]:
    """Launches that depend on each other over rotating buffers, replayed with new inputs; two of them are none."""
    replays, length, world_size = 30, 12, dist.get_world_size()
    names = sorted(n for n, v in variants("all_to_all").items() if v.numerics == "ordered")
    for what, problem, launch in chains(names, (512, 16384, 1 << 20), lambda n: asked(n, "float32", world_size)):
        buffers = [torch.zeros(problem.numel * world_size, device="cuda") for _ in range(3)]
        graph = captured(functools.partial(rotate, launch, buffers), length)
        for replay in range(replays):
            x, _ = case_of(problem, replay)
            buffers[0].copy_(x)
            graph.replay()
            assert torch.equal(bytes_of(buffers[length % 3]), bytes_of(x)), (what, replay)
    return {}


def public_body() -> dict[str, object]:
    """The public call: symmetric inputs, a capture, other dtypes, strides."""
    world_size, rank = dist.get_world_size(), dist.get_rank()
    for numel in (64, 5000, 300_001):
        problem = asked(numel, "bfloat16", world_size)
        values, wanted = case_of(problem, numel)
        x = tunedcomm.symmetric_empty(numel * world_size + 64, dtype=torch.bfloat16)[64:]
        bytes_of(x).copy_(bytes_of(values))
        for name in sorted(variants("all_to_all")):
            with tunedcomm.force("all_to_all", name), contextlib.suppress(tunedcomm.InfeasibleError):
                for given in (x, values):
                    assert torch.equal(bytes_of(tunedcomm.all_to_all(given)), bytes_of(wanted)), (name, numel)
                torch.cuda.synchronize()
                graph, out = torch.cuda.CUDAGraph(), torch.empty_like(values)
                with torch.cuda.graph(graph):
                    for _ in range(3):
                        tunedcomm.all_to_all(values, out=out)
                for _ in range(3):
                    bytes_of(out).fill_(7)
                    graph.replay()
                    assert torch.equal(bytes_of(out), bytes_of(wanted)), (name, numel)
        torch.cuda.synchronize()
        dist.barrier()
    for dtype in (torch.bool, torch.uint8, torch.int32, torch.float64, torch.float8_e5m2):
        x = torch.full((6 * world_size, 7), rank % 2, device="cuda").to(dtype)[:, ::2]
        wanted = torch.cat([torch.full((6, 4), r % 2, device="cuda").to(dtype) for r in range(world_size)])
        assert torch.equal(tunedcomm.all_to_all(x).float(), wanted.float())
    return {}


def uneven_body() -> dict[str, object]:
    """all_to_all_v with random counts, eager and in a graph, beside even calls on the same lane."""
    world_size, rank, numbers, calls = dist.get_world_size(), dist.get_rank(), random.Random(3), 0
    for most, columns in ((3, 8), (700, 3), (512, 4096)):
        for _ in range(4):
            rows = [
                [numbers.choice((0, most, numbers.randint(0, most))) for _ in range(world_size)]
                for _ in range(world_size)
            ]
            make = [torch.Generator(device="cuda").manual_seed(calls * 8 + r) for r in range(world_size)]
            sent = [torch.randn(sum(rows[r]), columns, generator=make[r], device="cuda") for r in range(world_size)]
            wanted = torch.cat([sent[r].split(rows[r])[rank] for r in range(world_size)])
            recv = [rows[r][rank] for r in range(world_size)]
            for name in sorted(variants("all_to_all_v")):
                with tunedcomm.force("all_to_all_v", name), contextlib.suppress(tunedcomm.InfeasibleError):
                    out = tunedcomm.all_to_all_v(sent[rank], rows[rank], recv, max_count=most)
                    assert torch.equal(out, wanted), (most, columns, name)
                    torch.cuda.synchronize()
                    graph = torch.cuda.CUDAGraph()
                    with torch.cuda.graph(graph):
                        tunedcomm.all_to_all_v(sent[rank], rows[rank], recv, max_count=most, out=out)
                    for _ in range(3):
                        out.fill_(7.0)
                        graph.replay()
                        tunedcomm.all_to_all(torch.ones(world_size * 9, device="cuda"))
                        assert torch.equal(out, wanted), (most, columns, name)
                calls += 1
    return {"calls": calls}


def nan_body() -> dict[str, object]:
    """TUNEDCOMM_NAN_CHECK: eager calls raise at once, the NaN of a replay at the next call."""
    world_size, rank = dist.get_world_size(), dist.get_rank()
    for dtype in (torch.bfloat16, torch.float32, torch.float8_e4m3fn, torch.float64):
        x = torch.ones(world_size * 1001, device="cuda").to(dtype)
        tunedcomm.all_to_all(x)
        bad = x.float().clone()
        bad[5:8] = float("nan")
        with pytest.raises(tunedcomm.NanInputError, match=f"all_to_all: 3 NaN in the input of rank {rank}"):
            tunedcomm.all_to_all(bad.to(dtype))
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            tunedcomm.all_to_all(x)
        graph.replay()
        torch.cuda.synchronize()
        tunedcomm.all_to_all(x)
        x.copy_(bad)
        graph.replay()
        torch.cuda.synchronize()
        said = f"all_to_all: 3 NaN in the input of rank {rank}, in a captured graph"
        with pytest.raises(tunedcomm.NanInputError, match=said):
            tunedcomm.all_reduce(torch.ones(8, device="cuda"))
    return {}


def unequal_body() -> dict[str, object]:
    """Experts' results without the rows that are not in use, also where no row is; a wrong shape on one rank."""
    rank, world_size, checked = dist.get_rank(), dist.get_world_size(), 0
    x, last = torch.arange(3 * 256, device="cuda").view(3, 256).to(torch.bfloat16) + rank, 2 * world_size - 1
    everyone = ([[0, 1], [1, 0], [-1, 1]], [[0, last], [last - 1, 1], [1, -1]], [[-1, -1]] * 3)
    for variant in ("push", "lamport"):
        with tunedcomm.force("ep_dispatch", variant), tunedcomm.force("ep_combine", variant):
            for ids in (torch.tensor(ids, device="cuda") for ids in everyone):
                weights, due = torch.ones(3, 2, device="cuda"), x * (ids >= 0).sum(1, keepdim=True)
                sent = tunedcomm.ep_dispatch(x, ids, num_experts=2 * world_size, layout="contiguous")
                used = int((sent.rows.max() + 1).clamp(min=0))
                for behind in (0, 3):
                    assert torch.equal(tunedcomm.ep_combine(sent.tokens[: used + behind].clone(), sent, weights), due)
                    checked += 1
            ids = torch.tensor(everyone[1], device="cuda")
            sent = tunedcomm.ep_dispatch(x, ids, num_experts=2 * world_size)
            wrong = sent.tokens.view(-1, 256) if rank == 0 else sent.tokens
            with ends(rank == 0, "expert_out"):  # on the others at once, in this call or in the next
                tunedcomm.ep_combine(wrong, sent, weights)
                torch.cuda.synchronize()
                tunedcomm.ep_combine(sent.tokens, sent, weights)
            assert torch.equal(tunedcomm.ep_combine(sent.tokens, sent, weights), x * (ids >= 0).sum(1, keepdim=True))
            checked += 1
    # Rows in use that a rank lacks are not read; it learns of them in this call, or afterwards.
    sent = tunedcomm.ep_dispatch(x, ids, num_experts=2 * world_size, layout="contiguous")
    with tunedcomm.force("ep_combine", "push"), ends(rank == 0, "expert_out"):
        tunedcomm.ep_combine(sent.tokens[: 1 if rank == 0 else None], sent, weights)
        if rank:
            torch.cuda.synchronize()
            time.sleep(1.0)
        sent.check()
    counts = [2] * world_size
    with ends(rank == 0, "send_counts"):
        for _ in range(2):
            tunedcomm.all_to_all_v(x[:2].repeat(world_size, 1)[rank == 0 :], counts, counts, max_count=2)
            torch.cuda.synchronize()
    return {"checked": checked}
