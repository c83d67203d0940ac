"""Time every config of the named all_reduce variants at the given sizes, inside CUDA graphs, and check each first.

    torchrun --nproc-per-node 4 bench/probe_all_reduce.py --bytes 4096 65536 --variants lamport two_shot_lamport

A developer's instrument for kernels: no database, no search, one line a config and the best ones last. NCCL and
PyTorch's operators on symmetric memory are timed in the same run. `bench` and `tune` are what users want.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from pathlib import Path

os.environ.setdefault("TUNEDCOMM_PEER_TIMEOUT_S", "2")

import torch
import torch.distributed as dist

from tunedcomm import spec
from tunedcomm.dispatch.communicator import get_communicator


def capture(call, launches: int) -> torch.cuda.CUDAGraph:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        call()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            for _ in range(launches):
                call()
    torch.cuda.synchronize()
    return graph


def replay_us(graph: torch.cuda.CUDAGraph, launches: int, replays: int, fence: torch.Tensor) -> float:
    """Median over replays of the slowest rank's µs a launch."""
    times = []
    for _ in range(replays):
        dist.all_reduce(fence)
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        times.append((start, end))
    torch.cuda.synchronize()
    mine = torch.tensor([s.elapsed_time(e) * 1e3 / launches for s, e in times[1:]], device="cuda")
    dist.all_reduce(mine, dist.ReduceOp.MAX)
    return statistics.median(mine.tolist())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--bytes", type=int, nargs="+", required=True)
    parser.add_argument("--variants", nargs="+", required=True)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--symmetric", action="store_true", help="symmetric input in place")
    parser.add_argument("--seconds", type=float, default=60.0, help="stop starting new configs after this")
    parser.add_argument("--top", type=int, default=4)
    parser.add_argument("--where", default="", help="axis=value,... to keep")
    parser.add_argument("--json", default="")
    args = parser.parse_args()
    rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(rank)
    dist.init_process_group("cpu:gloo,cuda:nccl", device_id=torch.device("cuda", rank))
    comm = get_communicator()
    if rank == 0:
        print(comm.environment, comm.limits, flush=True)
    world_size, op = comm.world_size, spec.get_op("all_reduce")
    fence = torch.ones(1, device="cuda")
    keep = dict(pair.split("=") for pair in args.where.split(",") if pair)
    results: list[dict[str, object]] = []
    begin = time.monotonic()
    for size in args.bytes:
        itemsize = spec.ITEMSIZE[args.dtype]
        kind = "symmetric" if args.symmetric else "plain"
        problem = spec.Problem(
            "all_reduce", (size // itemsize,), args.dtype, world_size, input_kind=kind, in_place=args.symmetric
        )
        everyone = [op.make_inputs(problem, r, 1, "random", "cuda") for r in range(world_size)]
        (x,), (out,) = everyone[rank], op.make_outputs(problem, "cuda")
        (expected,) = op.ordered_reference(problem, everyone, rank)
        (reference,) = op.reference(problem, everyone, rank)
        del everyone
        if args.symmetric:
            from tunedcomm.ops.symmetric import symmetric_empty

            held = symmetric_empty(problem.numel, dtype=x.dtype)
            held.copy_(x)
            original, x = x, held
            out = x
        launches = 50 if size <= 1 << 20 else 20 if size <= 1 << 24 else 10
        replays = 11 if size <= 1 << 24 else 6
        buffer = x.clone()
        nccl = replay_us(capture(lambda b=buffer: dist.all_reduce(b), launches), launches, replays, fence)
        row: dict[str, object] = {"bytes": size, "library": nccl}
        configs = []
        for name in args.variants:
            variant = spec.get_variant("all_reduce", name)
            for config in variant.space.enumerate():
                if any(str(config.get(axis)) != value for axis, value in keep.items() if axis in config):
                    continue
                if variant.infeasible(problem, config, comm.limits) is None:
                    configs.append(spec.Candidate.of("all_reduce", name, config))
        timed: list[tuple[float, str]] = []
        for candidate in configs:
            stop = [time.monotonic() - begin > args.seconds]
            dist.broadcast_object_list(stop, src=0)
            if stop[0]:
                break
            try:
                launch = comm.bind(problem, candidate)
            except Exception as error:  # noqa: BLE001 - a compiler may raise anything
                if rank == 0:
                    print("bind", candidate, repr(error)[:300], flush=True)
                continue

            def call(launch=launch, x=x, out=out) -> None:
                launch((x,), (out,), torch.cuda.current_stream().cuda_stream)

            right = True
            for _ in range(3):
                if args.symmetric:
                    x.copy_(original)
                else:
                    out.fill_(float("nan"))
                torch.cuda.synchronize()
                dist.barrier()
                call()
                torch.cuda.synchronize()
                comm.check_peers()
                if spec.get_variant("all_reduce", candidate.variant).numerics == "ordered":
                    bits = torch.int16 if itemsize == 2 else torch.int32
                    right &= torch.equal(out.view(bits), expected.view(bits))
                else:
                    right &= ((out.double() - reference).norm() / reference.norm()).item() < 1e-2
            if args.symmetric:
                x.zero_().add_(1e-30)
            latency = replay_us(capture(call, launches), launches, replays, fence)
            comm.check_peers()
            if rank == 0 and not right:
                print("WRONG", problem, candidate, flush=True)
            timed.append((latency, f"{candidate}{'' if right else ' WRONG'}"))
        timed.sort()
        row["best"] = timed[: args.top]
        results.append(row)
        if rank == 0:
            best: dict[str, float] = {}
            for latency, text in timed:
                best.setdefault(text.split("(")[0], latency)
            print(f"{size:>10} library {nccl:7.2f} | best by variant {best} ({len(timed)} configs)", flush=True)
            for latency, text in timed[: args.top]:
                print(f"           {latency:7.2f} {text}", flush=True)
    if rank == 0 and args.json:
        Path(args.json).write_text(json.dumps(results, indent=1))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
