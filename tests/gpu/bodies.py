"""What each rank of a GPU test runs: `torchrun tests/gpu/bodies.py NAME` prints a line of JSON a rank on success."""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import random
import re
import signal
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import tunedcomm
from tunedcomm import kernels, spec
from tunedcomm.dispatch.communicator import get_communicator
from tunedcomm.hardware import gpu_of
from tunedcomm.selection.snapshot import Pinned, Snapshot
from tunedcomm.spec import Candidate, Problem, check_candidate, get_op, get_variant

ORDERED = ("lamport", "one_shot", "two_shot", "two_shot_lamport")
LARGE = "two_shot_split"  # from 1 MiB on
BITS = {2: torch.int16, 4: torch.int32}


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.contiguous().view(BITS[a.element_size()]), b.contiguous().view(BITS[b.element_size()]))


def stream() -> int:
    return torch.cuda.current_stream().cuda_stream


def expected_of(problem: Problem, seed: int, kind: str = "random") -> tuple[torch.Tensor, torch.Tensor]:
    """(this rank's input, exact bits of every ordered variant)."""
    op = get_op("all_reduce")
    everyone = [op.make_inputs(problem, rank, seed, kind, "cuda") for rank in range(problem.world_size)]
    (expected,) = op.ordered_reference(problem, everyone, 0)
    return everyone[dist.get_rank()][0], expected


def pin_variants(variant_by_numel: dict[int, str]) -> None:
    """Dispatch these bf16 problems to these variants' defaults, whatever any database holds."""
    comm, pins = get_communicator(), []
    for numel, name in variant_by_numel.items():
        for mode in ("eager", "graph"):
            problem = Problem("all_reduce", (numel,), "bfloat16", comm.world_size, mode=mode)
            config = get_variant("all_reduce", name).default(problem, comm.limits)
            pins.append(Pinned(problem=problem, candidate=Candidate.of("all_reduce", name, config), reason="test"))
    comm.replace_snapshot(Snapshot(environment=comm.environment, world_size=comm.world_size, pins=tuple(pins)))


def variants_body() -> dict[str, object]:
    """Every ordered variant, odd sizes, dtypes and reductions: exact bits."""
    comm, checked = get_communicator(), 0
    for seed, numel in enumerate((1, 5, 64, 1001, 4096, 65537, 1 << 20, 3_000_001)):
        for dtype in ("bfloat16", "float16", "float32"):
            for reduction in ("sum", "avg"):
                problem = Problem("all_reduce", (numel,), dtype, comm.world_size, reduction=reduction)
                x, expected = expected_of(problem, seed)
                if numel > 16:
                    tiny = torch.finfo(x.dtype).smallest_normal / 8
                    x[:4] = torch.tensor([-0.0, -0.0, tiny, -tiny], device="cuda").to(x.dtype)
                    everyone = [torch.empty_like(x) for _ in range(comm.world_size)]
                    dist.all_gather(everyone, x)
                    (expected,) = get_op("all_reduce").ordered_reference(problem, [(e,) for e in everyone], 0)
                for name in (*ORDERED, LARGE):
                    variant = get_variant("all_reduce", name)
                    config = variant.default(problem, comm.limits)
                    candidate = Candidate.of("all_reduce", name, config)
                    if check_candidate(problem, candidate, comm.limits) is not None:
                        continue
                    launch = comm.bind(problem, candidate)
                    for _ in range(3):
                        out = torch.full_like(x, float("nan"))
                        launch((x,), (out,), stream())
                        assert same_bits(out, expected), (problem, str(candidate))
                    checked += 1
    assert checked > 150, checked
    return {"checked": checked}


def chain_body() -> dict[str, object]:
    """Back-to-back launches that depend on each other over rotating buffers, replayed with new inputs.

    With programmatic dependent launch a kernel starts before its predecessor ends: if it read its input, or overwrote
    a buffer, too early, stale values of the replay before would show.
    """
    comm, replays, length = get_communicator(), 40, 12
    for name in (*ORDERED, LARGE):
        for pdl in (False, True):
            for numel in (2048, 65536, 524288):
                problem = Problem("all_reduce", (numel,), "float32", comm.world_size)
                variant = get_variant("all_reduce", name)
                config = dict(variant.default(problem, comm.limits))
                if "launch_pdl" in config:
                    config["launch_pdl"] = pdl
                elif pdl:
                    continue
                if check_candidate(problem, Candidate.of("all_reduce", name, config), comm.limits):
                    continue
                launch = comm.bind(problem, Candidate.of("all_reduce", name, config))
                buffers = [torch.zeros(numel, device="cuda") for _ in range(3)]
                side = torch.cuda.Stream()
                side.wait_stream(torch.cuda.current_stream())
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.stream(side):
                    launch((buffers[0],), (buffers[1],), stream())
                    torch.cuda.synchronize()
                    with torch.cuda.graph(graph, stream=side):
                        for i in range(length):
                            launch((buffers[i % 3],), (buffers[(i + 1) % 3],), stream())
                for replay in range(replays):
                    x, expected = expected_of(problem, replay, "integers")
                    buffers[0].copy_(x)
                    graph.replay()
                    wanted = expected * float(comm.world_size) ** (length - 1)
                    assert torch.equal(buffers[length % 3], wanted), (name, pdl, numel, replay)
                comm.check_peers()
    return {}


def streams_body() -> dict[str, object]:
    """Eager calls from two streams in turn, and a graph replayed while eager calls run on another stream."""
    group_size = dist.get_world_size()
    shuffle = random.Random(5)
    streams = [torch.cuda.Stream() for _ in range(2)]
    results = []
    pin_variants({512: "lamport", 4096: "one_shot", 40000: "two_shot_lamport", 600000: "two_shot"})
    cases = [expected_of(Problem("all_reduce", (n,), "bfloat16", group_size), n) for n in (512, 4096, 40000, 600000)]
    for x, expected in cases:
        assert same_bits(tunedcomm.all_reduce(x, numerics="ordered"), expected)
    torch.cuda.synchronize()
    for _ in range(200):
        x, expected = cases[shuffle.randrange(len(cases))]
        with torch.cuda.stream(streams[shuffle.randrange(2)]):
            torch.cuda._sleep(random.randrange(30000))
            results.append((tunedcomm.all_reduce(x, numerics="ordered"), expected))
    torch.cuda.synchronize()
    assert all(same_bits(out, expected) for out, expected in results)

    x, expected = cases[1]
    out, graph = torch.empty_like(x), torch.cuda.CUDAGraph()
    with torch.cuda.stream(streams[0]):
        with torch.cuda.graph(graph, stream=streams[0]):
            for _ in range(20):
                tunedcomm.all_reduce(x, out=out, numerics="ordered")
    torch.cuda.synchronize()
    late = []
    for round_number in range(30):
        with torch.cuda.stream(streams[0]):
            out.fill_(float("nan"))
            graph.replay()
            late.append((out.clone(), expected))
        with torch.cuda.stream(streams[1]):
            for step in range(5):
                y, wanted = cases[(round_number + step) % len(cases)]
                late.append((tunedcomm.all_reduce(y, numerics="ordered"), wanted))
    torch.cuda.synchronize()
    assert all(same_bits(a, b) for a, b in late)
    return {"calls": len(results) + len(late)}


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


def lost_peer_body() -> dict[str, object]:
    """One rank stops calling: the others give up within the bound, say for whom, and refuse further calls.

    For every variant, in eager calls and in a graph's replay, each in a group of its own. With LOST_VARIANT, only that
    one in the mode LOST_MODE, and the rank is killed.
    """
    only = os.environ.get("LOST_VARIANT")
    if only:
        return {"waited": lose_peer(only, os.environ["LOST_MODE"], kill=True)}
    waited = [lose_peer(variant, mode, kill=False) for variant in (*ORDERED, LARGE) for mode in ("eager", "graph")]
    return {"waited": max(waited)}


def lose_peer(variant: str, mode: str, *, kill: bool) -> float:
    """Seconds that a survivor waited; 0 on the lost rank."""
    group = dist.new_group()
    last, x = dist.get_world_size() - 1, torch.ones(1 << 20 if variant == LARGE else 2048, device="cuda")

    def calls() -> None:
        for _ in range(3):
            tunedcomm.all_reduce(x, group=group)

    with tunedcomm.force("all_reduce", variant):
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
            waited = miss(run, x, group, f"all_reduce .*{mode}.* missed rank {last} of the group of {last + 1}")
    if not kill:
        dist.barrier()
    return waited


def miss(
    run: Callable[[], None],
    x: torch.Tensor,
    group: dist.ProcessGroup,
    said: str,
    *,
    call: Callable[..., torch.Tensor] = tunedcomm.all_reduce,
) -> float:
    """Run what one rank does not run; seconds until the device was free again."""
    begin = time.monotonic()
    with contextlib.suppress(tunedcomm.PeerTimeoutError):  # eager calls may learn of it while they are made
        run()
    torch.cuda.synchronize()
    waited = time.monotonic() - begin
    for _ in range(2):
        try:
            call(x, group=group)
        except tunedcomm.PeerTimeoutError as error:
            assert re.search(said, str(error)), str(error)
        else:
            raise AssertionError("the call after the bound must raise")
    return waited


def main(name: str, found: Mapping[str, Any] | None = None) -> None:
    """Run `NAME_body` of this module, or of the module whose names are `found`."""
    device = gpu_of(int(os.environ["LOCAL_RANK"]))
    faulthandler.dump_traceback_later(float(os.environ.get("DUMP_AFTER_S", "120")))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    kernels.discover()
    assert spec.variants("all_reduce")
    begin = time.monotonic()
    result = (globals() if found is None else found)[f"{name}_body"]()
    torch.cuda.synchronize()
    result = {"rank": dist.get_rank(), "seconds": round(time.monotonic() - begin, 2), **result}
    sys.stdout.write(json.dumps(result) + "\n")
    sys.stdout.flush()
    if name == "lost_peer":
        os._exit(0)  # the group is out of step by design
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], globals())
