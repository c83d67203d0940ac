"""Host cost of one eager call, µs: tunedcomm against PyTorch's operator and NCCL, and what interception adds.

    torchrun --nproc-per-node 4 bench/eager_cost.py --csv bench/results/eager_cost.csv

The time is that of the Python thread from call to return, with the device ahead of it (it needs less time a call),
percentiles over blocks of calls, the contenders' blocks in turn. Columns as in the other files of bench/results;
`latency` here is host time. Calls that `tunedcomm.intercept` passes on, or does not handle, are timed outside of it and
inside (`,intercepted`); their tenth percentiles tell best what it adds, for the host's other work is in none of them.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem
from ranks import bf16_sum, block_us, everyones, finish, row_of
from rows import arguments

import tunedcomm
from tunedcomm.tuner.gang.ranks import join_group
from tunedcomm.tuner.measure.timing import summarise

WARM_UP = 5  # blocks
Call = Callable[[], object]


def not_served(device: torch.device) -> dict[str, Call]:
    """Calls that interception passes on to PyTorch, and calls that it does not handle."""
    other, numbers = dist.new_group(), torch.ones(1024, dtype=torch.int64, device=device)
    x, weight = torch.ones(64, 1024, device=device), torch.ones(1024, 1024, device=device)
    return {
        "matmul": lambda: x @ weight,
        "broadcast": lambda: dist.broadcast(x, 0),
        "all_reduce passed on": lambda: dist.all_reduce(numbers, op=dist.ReduceOp.MAX),
        "all_reduce of another group": lambda: dist.all_reduce(numbers, op=dist.ReduceOp.MAX, group=other),
    }


def main() -> None:
    args = arguments(__doc__, bytes=4096, blocks=60, calls=300, csv=None)
    device = join_group()
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
    problem = bf16_sum(numel, "eager")
    plan = communicator.plans[problem, "default", None, False]
    if not hasattr(plan.launch, "by_address"):
        raise SystemExit(f"{plan.candidate} is no kernel: run tunedcomm tune --mode eager first")
    stream = torch.cuda.current_stream().cuda_stream
    addresses = x.data_ptr(), out.data_ptr()
    contenders: dict[str, tuple[str, Call]] = {
        "tuned": (str(plan.candidate), lambda: tunedcomm.all_reduce(x)),
        "tuned_out": (str(plan.candidate), lambda: tunedcomm.all_reduce(x, out=out)),
        "launch": (str(plan.candidate), lambda: plan.launch.by_address(stream, *addresses)),
        "torch_one_shot": ("symmetric input", lambda: torch.ops.symm_mem.one_shot_all_reduce(held, "sum", name)),
        "library": ("in place", lambda: dist.all_reduce(x)),
    }
    within: dict[str, Callable[[], AbstractContextManager[object]]] = dict.fromkeys(contenders, nullcontext)
    for what, call in not_served(device).items():
        for contender, block in ((what, nullcontext), (f"{what},intercepted", tunedcomm.intercept)):
            contenders[contender], within[contender] = ("", call), block
    times: dict[str, list[float]] = {contender: [] for contender in contenders}
    for block_number in range(args.blocks + WARM_UP):
        for contender, (_, call) in contenders.items():  # in turn: the host's clock and its neighbours change with time
            with within[contender]():
                call()  # an intercepted group chooses at its first call
                spent = block_us(call, args.calls, device, to_end=False)
            if block_number >= WARM_UP:
                times[contender].append(spent)
    configs = {contender: config for contender, (config, _) in contenders.items()}
    # What the library's own Python adds to the launch: of calls that allocate nothing, block by block.
    configs["above_launch"] = "tuned_out less launch"
    pairs = zip(times["tuned_out"], times["launch"], strict=True)
    times["above_launch"] = [max(whole - launch, 0.001) for whole, launch in pairs]
    by_rank = everyones(times)
    rows = []
    for contender, config in configs.items():
        found = max((summarise([mine[contender]]) for mine in by_rank), key=lambda latency: latency.p50_us)
        rows.append(row_of(problem, f"host_cost:{contender}", config, found))
    finish(communicator, rows, args.csv)


if __name__ == "__main__":
    main()
