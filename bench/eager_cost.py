"""Host cost of one eager call, µs: tunedcomm against PyTorch's operator and NCCL, in one process.

    torchrun --nproc-per-node 4 bench/eager_cost.py --csv bench/results/eager_cost.csv

The time is that of the Python thread from call to return, with the device ahead of it (it needs less time a call),
median over blocks of calls, the contenders' blocks in turn. Columns as in the other files of bench/results; `latency`
here is host time.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem
from rows import Line, append

import tunedcomm
from tunedcomm.ops import call as call_module
from tunedcomm.spec import Problem

WARM_UP = 5  # blocks


def host_us(call: Callable[[], object], calls: int) -> float:
    """µs a call on the host, over one block of calls."""
    torch.cuda.synchronize()
    dist.barrier()
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(calls):
        call()
    return (time.perf_counter() - begin) * 1e6 / calls


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--bytes", type=int, default=4096)
    parser.add_argument("--blocks", type=int, default=60)
    parser.add_argument("--calls", type=int, default=300, help="in a block")
    parser.add_argument("--csv", type=Path)
    args = parser.parse_args()
    rank = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    numel = args.bytes // 2
    x = torch.randn(numel, device=device).to(torch.bfloat16)
    out = torch.empty_like(x)
    held = symm_mem.empty(numel, dtype=torch.bfloat16, device=device)
    symm_mem.rendezvous(held, dist.group.WORLD)
    held.copy_(x)
    name = dist.group.WORLD.group_name
    communicator = tunedcomm.get_communicator()
    tunedcomm.all_reduce(x)
    tunedcomm.all_reduce(x, out=out)
    problem = Problem("all_reduce", (numel,), "bfloat16", dist.get_world_size(), mode="eager")
    plan = communicator.plans[problem, "default", None, False]
    stream = torch.cuda.current_stream().cuda_stream
    addresses = x.data_ptr(), out.data_ptr()
    contenders: dict[str, tuple[str, Callable[[], object]]] = {
        "tuned": (str(plan.decision.candidate), lambda: tunedcomm.all_reduce(x)),
        "tuned_out": (str(plan.decision.candidate), lambda: tunedcomm.all_reduce(x, out=out)),
        "launch": (str(plan.decision.candidate), lambda: plan.launch.by_address(stream, *addresses)),
        "torch_one_shot": ("symmetric input", lambda: torch.ops.symm_mem.one_shot_all_reduce(held, "sum", name)),
        "library": ("in place", lambda: dist.all_reduce(x)),
        "allocation": ("of the output alone", lambda: call_module.empty((numel,), (1,), torch.bfloat16)),
        "is_capturing": ("asked on streams other than the default one", call_module.is_capturing),
    }
    times: dict[str, list[float]] = {contender: [] for contender in contenders}
    for block in range(args.blocks + WARM_UP):
        for contender, (_, call) in contenders.items():  # in turn: the host's clock and its neighbours change with time
            spent = host_us(call, args.calls)
            if block >= WARM_UP:
                times[contender].append(spent)
    configs = {contender: config for contender, (config, _) in contenders.items()}
    # What the library's own Python adds to the launch: of calls that allocate nothing, block by block.
    configs["above_launch"] = "tuned_out less launch"
    pairs = zip(times["tuned_out"], times["launch"], strict=True)
    times["above_launch"] = [max(whole - launch, 0.001) for whole, launch in pairs]
    rows = []
    for contender, config in configs.items():
        found = sorted(times[contender])
        values = [found[len(found) // 10], statistics.median(found), found[9 * len(found) // 10]]
        slowest = torch.tensor(values, device=device)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        rows.append((contender, config, [round(value, 3) for value in slowest.tolist()]))
    if rank == 0:
        environment = communicator.environment
        for contender, config, (low, middle, high) in rows:
            print(f"{contender:16} {middle:7.2f} us a call on the host (p10 {low:.2f}, p90 {high:.2f})  {config}")
        if args.csv:
            lines = [Line(numel, f"host_cost:{contender}", config, *times) for contender, config, times in rows]
            append(args.csv, lines, environment, world_size=dist.get_world_size(), mode="eager")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
