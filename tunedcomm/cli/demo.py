"""`tunedcomm demo`: tune all_reduce on what this machine has, show what was won and why, and check the sums.

Its last step runs this module on every rank.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Annotated

import typer

from tunedcomm.cli.explain import decide_offline, explanation
from tunedcomm.cli.options import CallOptions, JsonOption, backend_or_default, known_op, local_ranks
from tunedcomm.cli.output import Table, emit, format_ratio, message_of, note, show
from tunedcomm.cli.tune import run_sweep
from tunedcomm.hardware import num_gpu_ranks
from tunedcomm.metrics import format_us
from tunedcomm.spec import ITEMSIZE, Problem, format_shape, parse_shape

if TYPE_CHECKING:
    from tunedcomm.selection.select import Decision

# Small to large: enough to see the choice change, short enough to watch.
SIZES = (1 << 10, 8 << 10, 64 << 10, 512 << 10, 4 << 20)
SHIPPED_SIZES = (8 << 10, 1 << 20, 64 << 20)
BUDGET_S, TRIALS = 6.0, 6


def demo(
    *,
    db: Annotated[str, typer.Option(help="Database to write and then dispatch from.")] = "demo.db",
    world_size: Annotated[int | None, typer.Option(min=2, help="Ranks; by default all GPUs, or 2 on the host.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Tune all_reduce here in 20 seconds and show what was won. The sums are checked on every rank.

    Example: tunedcomm demo --db demo.db
    """
    from tunedcomm.tuner.gang.ranks import run_forked, run_module
    from tunedcomm.tuner.machine import machine_settings
    from tunedcomm.tuner.search.spec import SweepSpec

    op, backend, ranks = known_op("all_reduce"), backend_or_default(), local_ranks(world_size)
    dtype, library = ("bfloat16", "NCCL") if backend == "cuda" else ("float32", "gloo")
    shapes = tuple((size // ITEMSIZE[dtype],) for size in SIZES)
    spec = SweepSpec(
        op=op.name,
        shapes=shapes,
        dtypes=(dtype,),
        modes=("eager",),
        settings=replace(machine_settings(backend, ranks), trials=TRIALS),
        budget_s=BUDGET_S,
        command="tunedcomm demo",
    )
    outcome, url = run_sweep(spec, db, is_quiet=True)
    if outcome.unsolved or outcome.environment is None:
        note("no candidate runs here; `tunedcomm doctor` says what is missing")
        raise typer.Exit(1)
    machine = outcome.environment
    call = CallOptions(
        op=op.name, shape="", world_size=ranks, dtype=dtype, mode="eager", hardware=machine.digest, db=url
    )
    texts = [format_shape(shape) for shape in shapes]
    choices = [decide_offline(replace(call, shape=text)) for text in texts]
    shares = {one.problem: (one.best_library_us or 0.0) / one.library_us for one in outcome.problems if one.library_us}
    won = Table.of(_columns(library, shares), choices, f"{op.name} of {dtype} on {ranks} ranks, {machine}")
    show(choices, [won, *explanation(choices[len(choices) // 2])], as_json=as_json)
    environment = {"TUNEDCOMM_DB": url, "TUNEDCOMM_MISS_LOG": "0"}
    if num_gpu_ranks():
        code = run_module("tunedcomm.cli.demo", [dtype, *texts], world_size=ranks, environment=environment)
    else:
        code = run_forked(partial(main, dtype, texts), world_size=ranks, environment=environment)
    if code:
        note(f"a sum was wrong, or a rank failed: the ranks ended with code {code}")
        raise typer.Exit(1)
    if not as_json:
        emit(f"checked: every sum is right on all {ranks} ranks, dispatched from {url}")
        _show_shipped()
        place = quote(url if "://" in url else str(Path(url).absolute()))  # the program may run in another folder
        emit(f"next, with these choices:  TUNEDCOMM_DB={place} torchrun --nproc-per-node {ranks} YOUR_PROGRAM.py")
        emit(f"next, for every program:   tunedcomm tune --op {op.name} --budget 5m")


def _columns(library: str, shares: Mapping[Problem, float]) -> Mapping[str, Callable[[Decision], object]]:
    """Columns of choices; `shares` are the library's times in its best form over its times out of place."""

    def library_us(choice: Decision) -> float | None:
        share = 1.0 if choice.problem is None else shares.get(choice.problem, 1.0)
        return None if choice.library_us is None else choice.library_us * share

    return {
        "message": lambda choice: "-" if choice.problem is None else message_of(choice.problem),
        f"{library} µs": lambda choice: format_us(library_us(choice)),
        "tuned µs": lambda choice: format_us(choice.latency_us),
        "times as fast": lambda choice: format_ratio(library_us(choice), choice.latency_us),
        "what runs": lambda choice: choice.candidate,
    }


def _show_shipped() -> None:
    """Print a few rows of the shipped database of 4 H200."""
    from tunedcomm.db.layers import packaged_databases

    shipped = [str(path) for path in packaged_databases() if path.name.endswith("-x4.db")]
    call = CallOptions(op="all_reduce", shape="", world_size=4, dtype="bfloat16", hardware="H200", db=(*shipped, "")[0])
    texts = [str(size // ITEMSIZE["bfloat16"]) for size in SHIPPED_SIZES]
    choices = [decide_offline(replace(call, shape=text), with_left_out=False) for text in texts if shipped]
    title = "shipped, measured on 4 H200 in CUDA graphs, bfloat16 (not on this machine)"
    emit(Table.of(_columns("NCCL", {}), choices, title))


def main(dtype_name: str, shapes: Sequence[str]) -> int:
    """Body of one rank: reduce small whole numbers, which are exact; returns 0 if every rank has every sum right."""
    import torch
    import torch.distributed as dist

    import tunedcomm
    from tunedcomm.dispatch.groups import release_communicators
    from tunedcomm.tuner.gang.ranks import join_group

    device, dtype = join_group(), getattr(torch, dtype_name)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    num_wrong = 0
    for text in shapes:
        (numel,) = parse_shape(text)
        pattern = torch.arange(numel, dtype=torch.int64, device=device) % 5
        expected = (pattern * world_size + world_size * (world_size - 1) // 2).to(dtype)
        if not torch.equal(tunedcomm.all_reduce((pattern + rank).to(dtype)), expected):
            num_wrong += 1
            sys.stderr.write(f"rank {rank}: the sum of {numel} elements is WRONG\n")
    dist.barrier()
    # A communicator that outlives its group keeps gloo's threads alive into the interpreter's end, which then aborts.
    release_communicators()
    dist.destroy_process_group()
    return int(num_wrong > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
