"""`tunedcomm demo`: tune, explain and run all_reduce on what this machine has.

Its last step runs this module on every rank.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Annotated

import typer

from tunedcomm.cli.explain import choose, explanation
from tunedcomm.cli.options import CallOptions, JsonOption, backend_or_default, known_op, local_ranks
from tunedcomm.cli.output import emit, emit_json, note
from tunedcomm.cli.tune import report, run_sweep
from tunedcomm.spec import format_shape, parse_shape

# Small, medium and large: enough to see the choice change, short enough to watch.
GPU_SHAPES = ((2048,), (32768,), (524288,), (8388608,))
GPU_BUDGET_S = 120.0
HOST_BUDGET_S = 45.0


def demo(
    *,
    db: Annotated[str, typer.Option(help="Database to write and then dispatch from.")] = "demo.db",
    world_size: Annotated[int | None, typer.Option(min=2, help="Ranks; by default all GPUs, or 2 on the host.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Tune all_reduce here, say what was chosen and why, then run it through the tuned database and check the sum.

    Example: tunedcomm demo --db demo.db
    """
    from tunedcomm.bench.runner import run_module
    from tunedcomm.tuner.search.sweep import SweepSpec

    op = known_op("all_reduce")
    ranks = local_ranks(world_size)
    backend = backend_or_default()
    on_gpu = backend == "cuda"
    shapes = GPU_SHAPES if on_gpu else tuple(op.default_shapes(backend, 2))
    note(f"1/3 tune all_reduce on {ranks} {'GPUs' if on_gpu else 'host ranks (fewer than two GPUs found)'}")
    budget_s = GPU_BUDGET_S if on_gpu else HOST_BUDGET_S
    spec = SweepSpec(op=op.name, shapes=shapes, modes=("eager",), world_size=ranks, backend=backend, budget_s=budget_s)
    outcome, url = run_sweep(replace(spec, command="tunedcomm demo"), db)
    if not as_json:
        report(outcome, url)
    if outcome.unsolved or outcome.environment is None:
        note("no candidate runs here; `tunedcomm doctor` says what is missing")
        raise typer.Exit(1)

    note("2/3 explain what dispatch chooses, and why")
    texts = [format_shape(extents) for extents in shapes]
    asked = CallOptions(
        op=op.name, shape="", world_size=ranks, mode="eager", hardware=outcome.environment.digest, db=db
    )
    choices = [choose(replace(asked, shape=text)) for text in texts]
    if as_json:
        emit_json(choices)
    for line in [] if as_json else [line for choice in choices for line in explanation(choice)]:
        emit(line)

    note("3/3 run tunedcomm.all_reduce through that database and check the sums")
    variables = {"TUNEDCOMM_DB": url, "TUNEDCOMM_MISS_LOG": "0"}
    code = run_module("tunedcomm.cli.demo", texts, world_size=ranks, environment=variables)
    if code:
        note(f"the ranks ended with code {code}")
        raise typer.Exit(1)
    if not as_json:
        emit(f"all sums right on {ranks} ranks, dispatched from {url}")


def main(shapes: list[str]) -> int:
    """Body of one rank: reduce small whole numbers, exact in bf16; returns 0 if every rank has every sum right."""
    import torch
    import torch.distributed as dist

    import tunedcomm
    from tunedcomm.bench.runner import start_group
    from tunedcomm.dispatch.communicator import release_communicators

    device = start_group()
    rank, world_size = dist.get_rank(), dist.get_world_size()
    wrong = 0
    for text in shapes:
        (numel,) = parse_shape(text)
        pattern = torch.arange(numel, device=device) % 5
        x = (pattern + rank).to(torch.bfloat16)
        expected = (pattern * world_size + world_size * (world_size - 1) // 2).to(torch.bfloat16)
        right = bool(torch.equal(tunedcomm.all_reduce(x), expected))
        wrong += not right
        verdict = torch.tensor([int(not right)], device=device)
        dist.all_reduce(verdict)
        if rank == 0:
            state = "sum right on every rank" if not int(verdict) else f"SUM WRONG on {int(verdict)} ranks"
            sys.stdout.write(f"  all_reduce of {numel} elements on {world_size} ranks: {state}\n")
            sys.stdout.flush()
    dist.barrier()
    # A communicator that outlives its group keeps gloo's threads alive into the interpreter's end, which then aborts.
    release_communicators()
    dist.destroy_process_group()
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
