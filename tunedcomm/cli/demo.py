"""`tunedcomm demo`: tune, explain and run all_reduce on what this machine has."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from tunedcomm.cli._choice import choose
from tunedcomm.cli._gang import local_ranks, num_gpus
from tunedcomm.cli._options import CallMode, JsonOption, ProblemOptions, known_op
from tunedcomm.cli._output import emit, emit_json, note
from tunedcomm.cli.explain import explanation
from tunedcomm.cli.tune import report, run_sweep
from tunedcomm.spec import format_shape

if TYPE_CHECKING:
    from tunedcomm.hardware import Environment

__all__ = ["demo"]

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
    on_gpu = num_gpus() >= 2
    shapes = GPU_SHAPES if on_gpu else tuple(op.default_shapes("host", 2))
    note(f"1/3 tune all_reduce on {ranks} {'GPUs' if on_gpu else 'host ranks (no two GPUs found)'}")
    spec = SweepSpec(
        op=op.name,
        shapes=shapes,
        modes=("eager",),
        world_size=ranks,
        backend="cuda" if on_gpu else "host",
        budget_s=GPU_BUDGET_S if on_gpu else HOST_BUDGET_S,
        command="tunedcomm demo",
    )
    outcome, url = run_sweep(spec, db)
    if not as_json:
        report(outcome, url, as_json=False)
    if outcome.unsolved or outcome.environment is None:
        note("no candidate runs here; `tunedcomm doctor` says what is missing")
        raise typer.Exit(1)

    texts = [format_shape(extents) for extents in shapes]
    _explain(texts, ranks, outcome.environment, db, as_json=as_json)
    note("3/3 run tunedcomm.all_reduce through that database and check the sums")
    code = run_module(
        "tunedcomm.cli._demo_rank",
        texts,
        world_size=ranks,
        environment={"TUNEDCOMM_DB": url, "TUNEDCOMM_MISS_LOG": "0"},
    )
    if code:
        note(f"the ranks ended with code {code}")
        raise typer.Exit(1)
    if not as_json:
        emit(f"all sums right on {ranks} ranks, dispatched from {url}")


def _explain(shapes: list[str], world_size: int, environment: Environment, db: str, *, as_json: bool) -> None:
    note("2/3 explain what dispatch chooses, and why")
    choices = [
        choose(
            ProblemOptions(op="all_reduce", shape=shape, dtype="bfloat16", world_size=world_size, mode=CallMode.eager),
            hardware=environment.digest,
            database=db,
        )
        for shape in shapes
    ]
    if as_json:
        emit_json([choice.to_dict() for choice in choices])
        return
    for choice in choices:
        for line in explanation(choice):
            emit(line)
