"""Times and rows of the scripts that `torchrun` starts on every rank."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from rows import of_run

from tunedcomm.bench.csv import append_rows
from tunedcomm.dispatch.communicator import Communicator
from tunedcomm.spec import Candidate, Problem, format_shape, get_op, get_variant
from tunedcomm.tuner.gang.protocol import Latency
from tunedcomm.tuner.measure import timing
from tunedcomm.tuner.measure.compile_pool import CompilePool

T = TypeVar("T")
SAMPLE_US = 5000.0  # of a round of `compare`


def bf16_sum(numel: int, mode: str = "graph") -> Problem:
    """The all_reduce that the scripts about all_reduce measure."""
    return Problem("all_reduce", (numel,), "bfloat16", dist.get_world_size(), mode=mode)  # type: ignore[arg-type]


def everyones(value: T) -> list[T]:
    """Every rank's value, by rank."""
    found = [value] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def slowest(times: Sequence[Sequence[float]]) -> list[Latency]:
    """Percentiles over rounds of the slowest rank, of times by contender and round."""
    return [timing.summarise(by_rank) for by_rank in zip(*everyones(times), strict=True)]


def compile_all(candidates: Iterable[tuple[Problem, Candidate]]) -> None:
    """Binaries of candidates on all CPUs, on rank 0 of the host; the others find them in Triton's cache."""
    if torch.cuda.is_available() and dist.get_rank() % int(os.environ.get("LOCAL_WORLD_SIZE", "1")) == 0:
        major, minor = torch.cuda.get_device_capability()
        with closing(CompilePool(max(1, len(os.sched_getaffinity(0)) - 1))) as pool:
            for problem, candidate in candidates:
                variant = get_variant(candidate.op, candidate.variant)
                pool.submit(variant.compile_requests(problem, candidate.config_dict), 10 * major + minor)
            pool.drain()
    dist.barrier()


def times_in_turn(
    contenders: Sequence[timing.TimedRun], rounds: int, stream: torch.cuda.Stream | None
) -> list[list[float]]:
    """This rank's µs a call, by contender and round; the contenders take turns, after a barrier each."""
    token = torch.zeros(1, device="cpu" if stream is None else stream.device)
    return timing.take_rounds(partial(dist.all_reduce, token), contenders, rounds, stream)


def compare(communicator: Communicator, problem: Problem, candidates: Sequence[Candidate], rounds: int) -> list[float]:
    """Medians in µs of the slowest rank, of launches that take turns."""
    op, device = get_op(problem.op), communicator.device
    stream = torch.cuda.Stream(device) if device.type == "cuda" else None
    made = op.make_inputs(problem, communicator.rank, 0, "random", device)
    inputs, outputs = tuple(each for each in made if each is not None), op.make_outputs(problem, device)
    launches = [communicator.bind(problem, candidate) for candidate in candidates]
    for launch in launches:  # a capture may not be the first one
        with torch.cuda.stream(stream):
            launch(inputs, outputs, stream.cuda_stream if stream is not None else 0)
    if stream is not None:
        stream.synchronize()

    def p50_us(calls: int, rounds: int) -> list[float]:
        options: dict[str, Any] = {"calls": calls, "graph": problem.mode == "graph", "stream": stream}
        runs = [timing.make_run(launch, inputs, outputs, **options) for launch in launches]
        return [one.p50_us for one in slowest(times_in_turn(runs, rounds, stream))]

    return p50_us(max(2, min(200, int(SAMPLE_US / min(p50_us(5, 5))))), rounds)


def block_us(call: Callable[[], object], calls: int, device: torch.device, *, to_end: bool) -> float:
    """µs a call over one block of calls, until the host has made them or, `to_end`, until the device has run them."""
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    wait()
    dist.barrier()
    wait()
    begin = time.perf_counter()
    for _ in range(calls):
        call()
    if to_end:
        wait()
    return (time.perf_counter() - begin) * 1e6 / calls


def row_of(problem: Problem, contender: str, config: str, latency: Latency) -> dict[str, Any]:
    """A row with the columns of `tunedcomm bench`."""
    return {
        "op": problem.op, "shape": format_shape(problem.shape), "message_bytes": problem.nbytes, "dtype": problem.dtype,
        "world_size": problem.world_size, "mode": problem.mode, "contender": contender, "config": config,
        "latency_p10_us": round(latency.p10_us, 4), "latency_p50_us": round(latency.p50_us, 4),
        "latency_p90_us": round(latency.p90_us, 4), "input_kind": problem.input_kind, "in_place": problem.in_place,
        "reduction": problem.reduction, "layout": problem.layout, "scaling": problem.scaling,
    }  # fmt: skip


def finish(communicator: Communicator, found: Sequence[dict[str, Any]], path: Path | None) -> None:
    """Print the rows on rank 0, append them to a CSV if one is named, and leave the group."""
    if communicator.rank == 0:
        for row in found:
            spread = f"(p10 {row['latency_p10_us']:.3f}, p90 {row['latency_p90_us']:.3f})"
            size = f"{row['op']} {row['shape']:>10} {row['scaling']:8}"
            print(f"{size} {row['contender']:28} {row['latency_p50_us']:9.3f} us {spread}")
        if path is not None:
            run = of_run(communicator.environment)
            append_rows(path, [{**row, **run} for row in found])
    dist.barrier()
    dist.destroy_process_group()
