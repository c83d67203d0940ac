"""Time steps of models on CPUs, unmodified, with plain gloo and inside of `tunedcomm.intercept`, in turns of one run:

    torchrun --nproc-per-node 2 bench/host_steps.py --csv bench/results/model/host_steps.csv

- `ddp`: forward, backward and SGD of an MLP under DistributedDataParallel, 4 MiB of gradients in fp32.
- `tp_dist`: forward of an MLP whose halves each rank holds, then `torch.distributed.all_reduce`.
- `tp_dtensor`: forward and backward of such an MLP in DTensor's colwise and rowwise plan.

A step's communication is what it takes beyond the same step without collectives: DDP's `no_sync`, or the rank's halves
alone. Compared are medians over rounds of the slowest rank; a round has several steps of each. `load` is what other
programs of the machine ask for. After the rounds both ways must have given the same sums, and the same bits on every
rank.
"""

from __future__ import annotations

import contextlib
import copy
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from ranks import block_us, everyones, slowest
from rows import arguments, of_run, show
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import tunedcomm

Step = Callable[[], torch.Tensor]
WIDTH, TOKENS, STEPS = 512, 16, 4


@dataclass(frozen=True)
class Workload:
    """A step as it is, the same without collectives, and the bytes that a rank hands to collectives in a step."""

    step: Step
    alone: Step
    message_bytes: int


def mlp() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH, bias=False), nn.ReLU(), nn.Linear(2 * WIDTH, WIDTH, bias=False))


def ddp() -> Workload:
    model = DistributedDataParallel(mlp())
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    torch.manual_seed(2 + dist.get_rank())
    x = torch.randn(TOKENS, WIDTH)

    def step(without: Callable[[], contextlib.AbstractContextManager[object]] = contextlib.nullcontext) -> torch.Tensor:
        optimizer.zero_grad(set_to_none=False)
        with without():
            model(x).square().mean().backward()
        optimizer.step()
        return next(model.parameters()).grad  # type: ignore[return-value]

    return Workload(step, partial(step, model.no_sync), sum(weight.nbytes for weight in model.parameters()))


def halves(model: nn.Sequential) -> nn.Sequential:
    """This rank's part of both weights."""
    mine = copy.deepcopy(model)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    mine[0].weight = nn.Parameter(model[0].weight.detach().chunk(ranks, 0)[rank].clone())
    mine[2].weight = nn.Parameter(model[2].weight.detach().chunk(ranks, 1)[rank].clone())
    return mine


def tp_dist() -> Workload:
    model, x = halves(mlp()).requires_grad_(False), torch.randn(TOKENS * 4, WIDTH)

    def step() -> torch.Tensor:
        y: torch.Tensor = model(x)
        dist.all_reduce(y)
        return y

    return Workload(step, lambda: model(x), x.nbytes)


def tp_dtensor() -> Workload:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    whole, x = mlp(), torch.randn(TOKENS * 4, WIDTH, requires_grad=True)
    alone = halves(whole)
    model = parallelize_module(whole, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})

    def step(module: nn.Module) -> torch.Tensor:
        x.grad = None
        module(x).square().mean().backward()
        assert x.grad is not None
        return x.grad

    return Workload(partial(step, model), partial(step, alone), 2 * x.nbytes)


def check(plain: torch.Tensor, served: torch.Tensor) -> None:
    torch.testing.assert_close(served, plain, rtol=1e-3, atol=1e-5)
    first, *others = everyones(served)
    assert all(torch.equal(first, other) for other in others), "ranks hold different bits"


def main() -> None:
    args = arguments(__doc__, csv=None, rounds=40)
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    communicator, rows = tunedcomm.get_communicator(), []
    for make in (ddp, tp_dist, tp_dtensor):
        torch.manual_seed(0)
        workload, num_served = make(), 0
        names = ("gloo", "intercept", "alone")
        times: dict[str, list[float]] = {name: [] for name in names}
        results: dict[str, torch.Tensor] = {}
        for number in range(args.rounds + 2):
            for name in names[:: -1 if number % 2 else 1]:
                step = workload.alone if name == "alone" else workload.step
                with tunedcomm.intercept() if name == "intercept" else contextlib.nullcontext() as calls:
                    step()
                    times[name].append(block_us(step, STEPS, communicator.device, to_end=False))
                    results[name] = step().clone()
                num_served += 0 if calls is None else calls.num_served
        if make is not ddp:  # its weights have changed in between
            check(results["gloo"], results["intercept"])
        found = dict(zip(names, slowest([each[2:] for each in times.values()]), strict=True))
        for name in names[:2]:
            beyond_us = found[name].p50_us - found["alone"].p50_us
            row = {
                "workload": make.__name__, "way": name, "world_size": communicator.world_size,
                "message_bytes": workload.message_bytes, "step_p10_us": round(found[name].p10_us, 1),
                "step_p50_us": round(found[name].p50_us, 1), "step_p90_us": round(found[name].p90_us, 1),
                "alone_us": round(found["alone"].p50_us, 1), "communication_us": round(beyond_us, 1),
                "communication_share": round(beyond_us / found[name].p50_us, 3),
                "served": num_served if name == "intercept" else 0, "rounds": args.rounds, "load": os.getloadavg()[0],
            }  # fmt: skip
            rows.append({**row, **of_run(communicator.environment)})
    if communicator.rank == 0:
        show(rows, args.csv)
    tunedcomm.release_communicators()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
