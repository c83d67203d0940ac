"""Time named candidates of a fused GEMM beside the GEMM alone and the library, inside CUDA graphs, in one process.

    torchrun --nproc-per-node 4 bench/probe_gemm.py --op gemm_rs --shape 4096x8192x3584 --variant push_reduce
    torchrun ... --variant push_reduce --config '{"block_m": 128}' --config '{"block_m": 64}' --variant torch_fused

A developer's instrument for kernels: no database, no search. A `--config` holds for the `--variant` before it and
changes the axes that it names of the variant's default. Inputs are rotated, so that none is in the cache. Printed are
µs, the ratio to the GEMM alone (cublas), and the error of one launch against float64. `bench` and `tune` are what users
want.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

os.environ.setdefault("TUNEDCOMM_PEER_TIMEOUT_S", "5")

import torch
import torch.distributed as dist

from tunedcomm import kernels
from tunedcomm.bench.contenders import gemm_inputs, gemm_output, run_gemm
from tunedcomm.dispatch.communicator import get_communicator
from tunedcomm.spec import Candidate, Problem, check_candidate, get_op, get_variant, parse_shape
from tunedcomm.tuner.measure.timing import calls_for, contend, further_turns, summarise, take_rounds


class _Append(argparse.Action):
    """Keeps --variant and --config in the order in which they were given."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        del parser
        asked = namespace.asked
        if option_string == "--variant":
            asked.append((values, []))
        else:
            asked[-1][1].append(json.loads(values))


@dataclass(frozen=True, eq=False)
class Entry:
    """Something to time.

    Attributes:
        name: what is printed.
        launch: as variants bind it.
        inputs, outputs: of a launch.
        error: of a launch that was made before; NaN where it is not asked.
    """

    name: str
    launch: Callable[..., None]
    inputs: tuple[torch.Tensor, ...]
    outputs: tuple[torch.Tensor, ...]
    error: float


class _Ranks:
    on_gpu = True

    def __init__(self) -> None:
        self._token = torch.zeros(1, device="cuda")

    def device_barrier(self) -> None:
        dist.all_reduce(self._token)


def candidates(problem: Problem, asked: list[tuple[str, list[dict[str, Any]]]]) -> list[Candidate]:
    """The library, then what was asked for."""
    found, limits = [Candidate.of(problem.op, "library", {})], get_communicator().limits
    for name, configs in asked:
        default = get_variant(problem.op, name).default(problem, limits)
        found += [Candidate.of(problem.op, name, {**default, **config}) for config in configs or [{}]]
    return found


def entries(problem: Problem, asked: list[tuple[str, list[dict[str, Any]]]], seed: int) -> list[Entry]:
    """All that can run, each launched thrice into NaN and judged."""
    comm, op = get_communicator(), get_op(problem.op)
    everyone = [op.make_inputs(problem, rank, seed, "random", "cuda") for rank in range(comm.world_size)]
    inputs, reference = everyone[comm.rank], op.reference(problem, everyone, comm.rank)
    whole = gemm_inputs(problem, inputs)
    product = gemm_output(problem, whole)
    alone = Entry("cublas", lambda i, o, s: run_gemm(problem, i, o[0]), whole, (product,), float("nan"))
    alone.launch(whole, (product,), 0)
    found = [alone]
    for candidate in candidates(problem, asked):
        reason = check_candidate(problem, candidate, comm.limits)
        try:
            launch = comm.bind(problem, candidate) if reason is None else None
        except Exception as error:  # noqa: BLE001 - a compiler may raise anything
            launch, reason = None, repr(error)[:300]
        if launch is None:
            if comm.rank == 0:
                print(f"{candidate}: {reason}", flush=True)
            continue
        outputs = op.make_outputs(problem, "cuda")
        worst = torch.zeros(1, dtype=torch.float64, device="cuda")
        for _ in range(3):
            for output in outputs:
                output.fill_(float("nan"))
            launch(inputs, outputs, torch.cuda.current_stream().cuda_stream)
            for output, wanted in zip(outputs, reference, strict=True):
                error_here = (output.double() - wanted).norm() / wanted.norm()
                worst = torch.maximum(worst, error_here.nan_to_num(float("inf")))
            torch.cuda.synchronize()
            comm.check_peers()
        dist.all_reduce(worst, dist.ReduceOp.MAX)
        found.append(Entry(str(candidate), launch, inputs, outputs, worst.item()))
    return found


def time_all(found: list[Entry], rounds: int) -> list[float]:
    """Median µs of the slowest rank, in the order of the entries; every round runs each once."""
    stream, ranks = torch.cuda.current_stream(), _Ranks()
    further = {id(entry.inputs): further_turns(entry.inputs, cold=True) for entry in found}

    def captured(entry: Entry, calls: int) -> Any:
        turns = further[id(entry.inputs)]
        return contend(entry.launch, entry.inputs, entry.outputs, calls=calls, graph=True, stream=stream, further=turns)

    probe = [captured(found[1], 10)]
    mine = torch.tensor(take_rounds(ranks, probe, 3, stream)[0][-1:], device="cuda")
    dist.all_reduce(mine, dist.ReduceOp.MAX)
    calls = calls_for(mine.item())
    times = take_rounds(ranks, [captured(entry, calls) for entry in found], rounds, stream)
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, times)
    return [summarise([by_rank[index][1:] for by_rank in everyone]).p50_us for index in range(len(found))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--op", required=True)
    parser.add_argument("--shape", required=True, nargs="+", help="MxNxK")
    parser.add_argument("--variant", action=_Append, dest="asked", default=[])
    parser.add_argument("--config", action=_Append, dest="asked")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--layout", default="nk")
    parser.add_argument("--scaling", default=None)
    parser.add_argument("--rounds", type=int, default=12)
    args = parser.parse_args()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl", device_id=device)
    kernels.discover()
    comm, op = get_communicator(), get_op(args.op)
    scaling = op.scalings_of(args.dtype)[0] if args.scaling is None else args.scaling
    for shape in args.shape:
        like = Problem(args.op, parse_shape(shape), args.dtype, comm.world_size, op.reductions[0])
        problem = replace(like, layout=args.layout, scaling=scaling)
        op.check(problem)
        with torch.cuda.stream(torch.cuda.Stream()):
            found = entries(problem, args.asked, 1)
            times = time_all(found, args.rounds)
            comm.check_peers()
        if comm.rank == 0:
            print(problem, flush=True)
            for entry, us in zip(found, times, strict=True):
                text = f"{us:9.2f} us {us / times[0]:6.3f} x cublas  error {entry.error:.1e}"
                print(f"  {text}  {entry.name}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
