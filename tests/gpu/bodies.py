"""What each rank of a GPU test of all_reduce runs, by `run_bodies.py`, and what bodies of the other ops share."""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import random
import re
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import tunedcomm
from tunedcomm.dispatch.groups import get_communicator
from tunedcomm.selection.snapshot import Pinned, Snapshot
from tunedcomm.spec import Candidate, Problem, check_candidate, get_op, get_variant

ORDERED = ("lamport", "one_shot", "two_shot", "two_shot_lamport")
LARGE = "two_shot_split"  # from 1 MiB on
Launch = Callable[..., None]


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(bytes_of(a), bytes_of(b))


def stream() -> int:
    return torch.cuda.current_stream().cuda_stream


def expected_of(problem: Problem, seed: int, kind: str = "random") -> tuple[torch.Tensor, torch.Tensor]:
    """(this rank's input, exact bits of every ordered variant)."""
    op = get_op("all_reduce")
    everyone = [op.make_inputs(problem, rank, seed, kind, "cuda") for rank in range(problem.world_size)]
    (expected,) = op.ordered_reference(problem, everyone, 0)
    return everyone[dist.get_rank()][0], expected


def pin_variants(op: str, variant_by_numel: dict[int, str]) -> None:
    """Dispatch these bf16 problems to these variants' defaults, whatever any database holds."""
    comm, pins, reduction = get_communicator(), [], "" if op == "all_gather" else "sum"
    for numel, name in variant_by_numel.items():
        for mode in ("eager", "graph"):
            problem = Problem(op, (numel,), "bfloat16", comm.world_size, reduction=reduction, mode=mode)
            candidate = Candidate.of(op, name, get_variant(op, name).default(problem, comm.limits))
            pins.append(Pinned(problem=problem, candidate=candidate, reason="test"))
    comm.replace_snapshot(Snapshot(environment=comm.environment, world_size=comm.world_size, pins=tuple(pins)))


def captured(step: Callable[[int], object], length: int) -> torch.cuda.CUDAGraph:
    """A graph of `step(0)` to `step(length - 1)`, on a stream on which the first is called before."""
    side, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step(0)
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, stream=side):
            for i in range(length):
                step(i)
    return graph


def rotate(launch: Launch, buffers: list[torch.Tensor], i: int) -> None:
    """Launch number `i` of a chain over three buffers."""
    launch((buffers[i % 3],), (buffers[(i + 1) % 3],), stream())


def chains(
    names: Iterable[str], sizes: Iterable[Any], problem_of: Callable[[Any], Problem]
) -> Iterator[tuple[str, Problem, Launch]]:
    """(what it is, problem, launch) of the variants' defaults, with programmatic dependent launch and without it."""
    comm = get_communicator()
    for name, pdl, size in itertools.product(names, (False, True), sizes):
        problem = problem_of(size)
        config = dict(get_variant(problem.op, name).default(problem, comm.limits))
        if "launch_pdl" in config:
            config["launch_pdl"] = pdl
        elif pdl:
            continue
        candidate = Candidate.of(problem.op, name, config)
        if check_candidate(problem, candidate, comm.limits) is None:
            yield f"{name} pdl={pdl} {size}", problem, comm.bind(problem, candidate)
            comm.check_peers()


def variants_body() -> dict[str, object]:
    """Every ordered variant, odd sizes, dtypes and reductions: exact bits, also of subnormals and zeros below zero."""
    comm, checked = get_communicator(), 0
    for seed, numel in enumerate((64, 1001, 4096, 65537, 1 << 20, 3_000_001)):
        for dtype, reduction in itertools.product(("bfloat16", "float16", "float32"), ("sum", "avg")):
            problem = Problem("all_reduce", (numel,), dtype, comm.world_size, reduction=reduction)
            x, _ = expected_of(problem, seed)
            tiny = torch.finfo(x.dtype).smallest_normal / 8
            x[:4] = torch.tensor([-0.0, -0.0, tiny, -tiny], device="cuda").to(x.dtype)
            everyone = [torch.empty_like(x) for _ in range(comm.world_size)]
            dist.all_gather(everyone, x)
            (expected,) = get_op("all_reduce").ordered_reference(problem, [(e,) for e in everyone], 0)
            for name in (*ORDERED, LARGE):
                default = get_variant("all_reduce", name).default(problem, comm.limits)
                candidate = Candidate.of("all_reduce", name, default)
                if check_candidate(problem, candidate, comm.limits) is None:
                    out = torch.empty_like(x)
                    comm.bind(problem, candidate)((x,), (out,), stream())
                    assert same_bits(out, expected), (str(problem), str(candidate))
                    checked += 1
    assert checked > 100, checked
    return {"checked": checked}


def chain_body() -> dict[str, object]:
    """Back-to-back launches that depend on each other over rotating buffers, replayed with new inputs.

    With programmatic dependent launch a kernel starts before its predecessor ends: if it read its input, or overwrote
    a buffer, too early, stale values of the replay before would show.
    """
    replays, length, world_size = 40, 12, dist.get_world_size()

    def problem_of(numel: int) -> Problem:
        return Problem("all_reduce", (numel,), "float32", world_size)

    for what, problem, launch in chains((*ORDERED, LARGE), (2048, 65536, 524288), problem_of):
        buffers = [torch.zeros(problem.numel, device="cuda") for _ in range(3)]
        graph = captured(functools.partial(rotate, launch, buffers), length)
        for replay in range(replays):
            x, expected = expected_of(problem, replay, "integers")
            buffers[0].copy_(x)
            graph.replay()
            wanted = expected * float(world_size) ** (length - 1)
            assert torch.equal(buffers[length % 3], wanted), (what, replay)
    return {}


def interleaved(call: Callable[..., torch.Tensor], cases: list[tuple[torch.Tensor, torch.Tensor]]) -> dict[str, object]:
    """Eager calls from two streams in turn, and graphs replayed while eager calls run on another stream."""
    shuffle, streams, late = random.Random(5), [torch.cuda.Stream() for _ in range(2)], []
    outs = [call(x) for x, _ in cases]
    torch.cuda.synchronize()
    for _ in range(200):
        x, expected = cases[shuffle.randrange(len(cases))]
        with torch.cuda.stream(streams[shuffle.randrange(2)]):
            torch.cuda._sleep(random.randrange(30000))
            late.append((call(x), expected))
    for (x, expected), out in zip(cases, outs, strict=True):
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(streams[0]), torch.cuda.graph(graph, stream=streams[0]):
            for _ in range(10):
                call(x, out=out)
        torch.cuda.synchronize()
        for round_number in range(10):
            with torch.cuda.stream(streams[0]):
                out.fill_(0)
                graph.replay()
                late.append((out.clone(), expected))
            with torch.cuda.stream(streams[1]):
                for step in range(5):
                    y, wanted = cases[(round_number + step) % len(cases)]
                    late.append((call(y), wanted))
        torch.cuda.synchronize()
        wrong = [number for number, pair in enumerate(late) if not torch.equal(*map(bytes_of, pair))]
        assert not wrong, (x.numel(), wrong)
        get_communicator().check_peers()
        late.clear()
    return {}


def streams_body() -> dict[str, object]:
    pin_variants("all_reduce", {512: "lamport", 4096: "one_shot", 40000: "two_shot_lamport", 600000: "two_shot"})
    problems = [Problem("all_reduce", (n,), "bfloat16", dist.get_world_size()) for n in (512, 4096, 40000, 600000)]
    cases = [expected_of(problem, problem.numel) for problem in problems]
    return interleaved(functools.partial(tunedcomm.all_reduce, numerics="ordered"), cases)


def slices_body() -> dict[str, object]:
    """2,000 slices of batches of the op SLICES_OP: the bits that they have inside the whole."""
    sys.path.append(str(Path(__file__).parents[1]))
    from slices import Draws, compare

    draws = Draws(get_communicator(), os.environ["SLICES_OP"])
    ran = compare(draws, 500, 4)
    assert len(ran) > 1, ran
    return {"ran": dict(ran)}


def groups_body() -> dict[str, object]:
    """Overlapping groups of 2, 3 and all ranks, used in turn."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    members = [list(range(world_size))] + [[i, (i + 1) % world_size] for i in range(world_size)]
    if world_size >= 4:
        members += [[0, 1, 2], [1, 2, 3]]
    groups = [(sorted(set(ranks)), dist.new_group(sorted(set(ranks)))) for ranks in members]
    calls = 0
    for round_number in range(6):
        for ranks, group in groups:
            if rank not in ranks:
                continue
            x = torch.full((3000 + 8 * round_number,), float(rank + 1), device="cuda")
            for numerics in ("default", "any"):
                out = tunedcomm.all_reduce(x, group=group, numerics=numerics)
                assert torch.equal(out, torch.full_like(x, float(sum(r + 1 for r in ranks)))), (ranks, round_number)
            for name in ORDERED:
                with tunedcomm.force("all_reduce", name):
                    out = tunedcomm.all_reduce(x, group=group)
                assert torch.equal(out, torch.full_like(x, float(sum(r + 1 for r in ranks)))), (ranks, name)
            calls += 1
    outside = next((group for ranks, group in groups if rank not in ranks), None)
    if outside is not None:
        try:
            tunedcomm.all_reduce(torch.ones(4, device="cuda"), group=outside)
        except tunedcomm.GroupError:
            calls += 1
        else:
            raise AssertionError("a call on a group of others must raise")
    return {"calls": calls}


def symmetric_body() -> dict[str, object]:
    """Symmetric inputs, in and out of place, views at an offset, and torch's own allocations."""
    import torch.distributed._symmetric_memory as symm_mem

    comm = get_communicator()
    for numel in (64, 5000, 300_000):
        for name in ("one_shot", "two_shot", "lamport"):
            problem = Problem("all_reduce", (numel,), "bfloat16", comm.world_size)
            values, expected = expected_of(problem, numel)
            whole = tunedcomm.symmetric_empty(numel + 64, dtype=torch.bfloat16)
            x = whole[64:]
            with tunedcomm.force("all_reduce", name):
                x.copy_(values)
                out = tunedcomm.all_reduce(x)
                assert same_bits(out, expected), (name, numel)
                assert same_bits(x, values), "out of place leaves the input alone"
                assert tunedcomm.all_reduce_(x) is x
                assert same_bits(x, expected), (name, numel)
            torch.cuda.synchronize()
            dist.barrier()
    theirs = symm_mem.empty(4096, dtype=torch.float32, device=torch.device("cuda", torch.cuda.current_device()))
    tunedcomm.register_symmetric(theirs)
    theirs.fill_(1.0)
    with tunedcomm.force("all_reduce", "two_shot"):
        tunedcomm.all_reduce_(theirs)
    assert torch.equal(theirs, torch.full_like(theirs, float(comm.world_size)))
    return {}


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
    # A group whose first call, captures and replays are made while another device is current.
    group = dist.new_group()
    torch.cuda.set_device(other)
    try:
        assert torch.equal(tunedcomm.all_reduce(base, group=group), torch.full_like(base, total))
        assert tunedcomm.symmetric_empty(64, dtype=torch.float32).device == base.device
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=side):
            tunedcomm.all_reduce(base, out=out, group=group)
        assert torch.cuda.current_device() == other
        for turn in range(3):
            base.fill_(turn * (rank + 1.0))
            out.zero_()
            graph.replay()
            torch.cuda.synchronize(rank)
            assert torch.equal(out, torch.full_like(out, turn * total)), turn
        del graph
        tunedcomm.release_communicator(group)
    finally:
        torch.cuda.set_device(rank)
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


def lost_peer_body() -> dict[str, object]:
    """One rank stops calling: the others give up within the bound, say for whom, and refuse further calls.

    For every variant, in eager calls and in a graph's replay, each in a group of its own. With LOST_VARIANT, only that
    one in the mode LOST_MODE, and the rank is killed.
    """
    only = os.environ.get("LOST_VARIANT")
    if only:
        return {"waited": lose_peer("all_reduce", only, os.environ["LOST_MODE"], 2048, kill=True)}
    return {"waited": max(lose_peer("all_reduce", *each) for each in lost((*ORDERED, LARGE), LARGE, 1 << 20))}


def lost(names: Iterable[str], large: str, numel: int) -> Iterator[tuple[str, str, int]]:
    """(variant, mode, elements), of which the large one needs more."""
    for name, mode in itertools.product(names, ("eager", "graph")):
        yield name, mode, numel if name == large else 2048


def lose_peer(op: str, variant: str, mode: str, numel: int, *, kill: bool = False) -> float:
    """Seconds that a survivor waited, in a group of its own; 0 on the lost rank."""
    group, call = dist.new_group(), getattr(tunedcomm, op)
    last, x = dist.get_world_size() - 1, torch.ones(numel, device="cuda")

    def calls() -> None:
        for _ in range(3):
            call(x, group=group)

    with tunedcomm.force(op, variant):
        calls()
        run = calls
        if mode == "graph":
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                calls()
            run = graph.replay
        run()
        torch.cuda.synchronize()
        dist.barrier()
        torch.cuda.synchronize()
        waited = 0.0
        if dist.get_rank() == last:
            if kill:
                os.kill(os.getpid(), signal.SIGKILL)
        else:
            # The call after it says which call waited; that the process of a killed rank has ended may be seen first.
            said = f"{op} .*{mode}.* missed rank {last} of the group of {last + 1}"
            if kill:
                said += f"|rank {last} of the group of {last + 1} has ended"
            waited = miss(run, functools.partial(call, x, group=group), said)
    if not kill:
        dist.barrier()
    return waited


def miss(run: Callable[[], None], call: Callable[[], object], said: str) -> float:
    """Run what one rank does not run; seconds until the device was free again."""
    begin = time.monotonic()
    with contextlib.suppress(tunedcomm.PeerTimeoutError):  # eager calls may learn of it while they are made
        run()
    torch.cuda.synchronize()
    waited = time.monotonic() - begin
    for _ in range(2):
        try:
            call()
        except tunedcomm.PeerTimeoutError as error:
            assert re.search(said, str(error)), str(error)
        else:
            raise AssertionError("the call after the bound must raise")
    return waited
