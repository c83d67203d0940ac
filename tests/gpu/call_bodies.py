"""What each rank of a test of all_reduce's calls runs: `torchrun tests/gpu/call_bodies.py NAME`."""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from bodies import expected_of, main, same_bits

import tunedcomm
from tunedcomm.dispatch.communicator import get_communicator
from tunedcomm.spec import Problem


def nodes_body() -> dict[str, object]:
    """Two nodes of two ranks, as TUNEDCOMM_NODE_OF_RANK has it: eager and in graphs, same bits on all ranks."""
    comm = get_communicator()
    assert comm.limits.ranks_per_node == 2
    for numel in (1, 777, 65536, 3_000_001, 1 << 25):
        problem = Problem("all_reduce", (numel,), "bfloat16" if numel % 2 else "float32", comm.world_size)
        x, expected = expected_of(problem, numel, "integers")
        with tunedcomm.force("all_reduce", "hierarchical"):
            out, graph = tunedcomm.all_reduce(x), torch.cuda.CUDAGraph()
            assert torch.equal(out, expected), numel
            with torch.cuda.graph(graph):
                tunedcomm.all_reduce(tunedcomm.all_reduce(x), out=out)
            for seed in range(3):
                values, expected = expected_of(problem, seed)
                x.copy_(values)
                graph.replay()
                everyone = [torch.empty_like(out) for _ in range(comm.world_size)]
                dist.all_gather(everyone, out)
                assert all(same_bits(theirs, out) for theirs in everyone), numel
                wanted = comm.world_size * expected.double()
                assert ((out.double() - wanted).norm() / wanted.norm()).item() < 2e-2
    return {}


def dispatch_body() -> dict[str, object]:
    """The public call as users make it: any tensor, first in a capture, unusual strides and alignment."""
    world_size, rank = dist.get_world_size(), dist.get_rank()
    total = float(sum(range(1, world_size + 1)))
    base = torch.full((64, 130), float(rank + 1), device="cuda", dtype=torch.bfloat16)
    for x in (base, base.t(), base[:, 1:], base[3:, ::2], base.view(-1)[1:1025], base[:0], base.view(-1)[3:4]):
        out = tunedcomm.all_reduce(x)
        assert out.shape == x.shape
        assert torch.equal(out, torch.full_like(out, total)), x.shape
        held = x.clone(memory_format=torch.preserve_format)
        assert tunedcomm.all_reduce_(held) is held
        assert torch.equal(held, torch.full_like(held, total))
    strided = torch.zeros(64, 260, device="cuda", dtype=torch.bfloat16)[:, ::2]
    assert tunedcomm.all_reduce(base, out=strided) is strided
    assert torch.equal(strided, torch.full_like(strided, total))
    for dtype in (torch.int32, torch.float64, torch.uint8):
        x = torch.full((33,), rank + 1, device="cuda", dtype=dtype)
        assert torch.equal(tunedcomm.all_reduce(x), torch.full_like(x, int(total)))
    for op, wanted in (("max", float(world_size)), ("min", 1.0), ("avg", total / world_size)):
        assert torch.equal(tunedcomm.all_reduce(base, op=op), torch.full_like(base, wanted))
    fresh = torch.full((777,), float(rank + 1), device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):  # never called before: the library serves it
        out = tunedcomm.all_reduce(fresh)
    graph.replay()
    assert torch.equal(out, torch.full_like(out, total))
    return {}


def current_device_body() -> dict[str, object]:
    """Calls that were served fast before, with another device current, on its default stream and on another one."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if torch.cuda.device_count() < world_size:
        return {"skipped": "ranks share GPUs"}
    total, other = float(sum(range(1, world_size + 1))), (rank + 1) % world_size
    base = torch.full((4096,), float(rank + 1), device=f"cuda:{rank}")
    out, side = torch.empty_like(base), torch.cuda.Stream(device=rank)
    for stream in (torch.cuda.default_stream(rank), side):
        with torch.cuda.stream(stream):
            for current in (rank, rank, other, other, rank, other):
                out.zero_()
                held = base.clone()
                torch.cuda.set_device(current)
                tunedcomm.all_reduce(base, out=out)
                assert tunedcomm.all_reduce_(held) is held
                made = tunedcomm.all_reduce(base)
                torch.cuda.set_device(rank)
                stream.synchronize()
                for found in (out, held, made):
                    assert found.device == base.device
                    assert torch.equal(found, torch.full_like(found, total)), (stream, current)
    return {}


def stream_order_body() -> dict[str, object]:
    """A call waits for the group's call before it on another stream, the default one too."""
    x = torch.ones(4096, device="cuda")
    streams = (torch.cuda.default_stream(), torch.cuda.Stream(), torch.cuda.Stream())
    for stream in streams:
        with torch.cuda.stream(stream):
            tunedcomm.all_reduce(x)
    torch.cuda.synchronize()
    for first in streams:
        for second in streams:
            ends = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
            dist.barrier()
            torch.cuda.synchronize()
            with torch.cuda.stream(first):
                torch.cuda._sleep(20_000_000)
                tunedcomm.all_reduce(x)
                ends[0].record()
            with torch.cuda.stream(second):
                tunedcomm.all_reduce(x)
                ends[1].record()
            torch.cuda.synchronize()
            assert ends[0].elapsed_time(ends[1]) >= 0.0, (streams.index(first), streams.index(second))
    return {}


if __name__ == "__main__":
    main(sys.argv[1], globals())
