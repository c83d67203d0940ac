"""`tunedcomm db show`: every stored trial of one problem."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tunedcomm.cli._options import (
    DatabaseOption,
    DtypeOption,
    EitherModeOption,
    HardwareOption,
    InPlaceOption,
    JsonOption,
    Kind,
    LayoutOption,
    OpOption,
    ProblemOptions,
    ScalingOption,
    ShapeOption,
    WorldSizeOption,
)
from tunedcomm.cli._output import emit_json, format_ratio, format_us, note, table
from tunedcomm.cli._pins import print_pins, read_pins
from tunedcomm.cli._stored import Contest, contests, read_trials
from tunedcomm.shapes import format_shape

if TYPE_CHECKING:
    from tunedcomm.db.records import TrialRecord
    from tunedcomm.spec import Problem

__all__ = ["db_show"]

COLUMNS = ("trial", "status", "candidate", "p10 us", "p50 us", "p90 us", "library us", "speed-up", "error", "reason")


def db_show(
    *,
    op: OpOption,
    shape: ShapeOption,
    world_size: WorldSizeOption,
    dtype: DtypeOption = "bfloat16",
    mode: EitherModeOption = None,
    reduction: Annotated[str | None, typer.Option(help="Reduction; by default the op's first.")] = None,
    input_kind: Annotated[Kind, typer.Option(help="Whether peers can address the input.")] = Kind.plain,
    in_place: InPlaceOption = False,
    layout: LayoutOption = None,
    scaling: ScalingOption = None,
    hardware: HardwareOption = None,
    limit: Annotated[int, typer.Option(min=1, help="Most trials to print for one environment.")] = 50,
    db: DatabaseOption = None,
    as_json: JsonOption = False,
) -> None:
    """Print every stored trial of one problem, fastest first, and its pins; exit code 1 if there is no trial.

    Example: tunedcomm db show --op all_reduce --shape 98304 --world-size 4 --hardware H200
    """
    problem = ProblemOptions(
        op=op,
        shape=shape,
        dtype=dtype,
        world_size=world_size,
        mode=mode,
        reduction=reduction,
        input_kind=input_kind,
        in_place=in_place,
        layout=layout,
        scaling=scaling,
    ).problem()
    asked = {problem} if mode is not None else {replace(problem, mode="graph"), replace(problem, mode="eager")}
    found: list[Contest] = []
    others: set[Problem] = set()
    for layer, trials in read_trials(db, op=op, hardware=hardware):
        found += contests(layer, [trial for trial in trials if trial.problem in asked])
        others |= {trial.problem for trial in trials if trial.problem.family == problem.family}
    if as_json:
        emit_json([_to_dict(contest.layer, trial) for contest in found for trial in _by_speed(contest)])
    for contest in [] if as_json else found:
        where = f"{contest.environment} [{contest.environment.digest[:8]}] in the {contest.layer} database"
        title = f"{contest.problem} on {where}"
        table(COLUMNS, [_cells(trial) for trial in _by_speed(contest)[:limit]], title=title)
        if len(contest.trials) > limit:
            note(f"{len(contest.trials) - limit} more trials; --limit {len(contest.trials)} prints them all")
    if not as_json:
        print_pins((name, pin) for name, pin in read_pins(db, op=op, hardware=hardware) if pin.problem in asked)
    if not found:
        near = nearest_shapes(problem, others)
        hint = f"; the nearest shapes stored are {', '.join(near)}" if near else ""
        note(f"no trial of {problem} is stored{hint}; `tunedcomm db list` prints what is")
        raise typer.Exit(1)


def nearest_shapes(problem: Problem, others: Iterable[Problem]) -> list[str]:
    """Shapes of the problems nearest in size, at most three, nearest first."""

    def distance(other: Problem) -> tuple[float, Problem]:
        return abs(math.log((other.numel + 1) / (problem.numel + 1))), other

    return [format_shape(other.shape) for other in sorted(others, key=distance)[:3]]


def _by_speed(contest: Contest) -> list[TrialRecord]:
    """Ok trials by their median, then the others by status."""
    return sorted(contest.trials, key=lambda t: (t.status != "ok", t.status, t.latency_p50_us or 0.0, t.id or 0))


def _cells(trial: TrialRecord) -> list[str]:
    return [
        "-" if trial.id is None else str(trial.id),
        trial.status + (" (final)" if trial.final else ""),
        str(trial.candidate),
        format_us(trial.latency_p10_us),
        format_us(trial.latency_p50_us),
        format_us(trial.latency_p90_us),
        format_us(trial.baseline_p50_us),
        format_ratio(trial.baseline_p50_us, trial.latency_p50_us),
        "-" if trial.error is None else f"{trial.error:.1e}",
        trial.reason,
    ]


def _to_dict(layer: str, trial: TrialRecord) -> dict[str, Any]:
    return {
        "layer": layer,
        "trial_id": trial.id,
        "environment": trial.environment.digest,
        "gpu": trial.environment.gpu,
        "problem": trial.problem.to_dict(),
        "variant": trial.variant,
        "config": trial.config,
        "numerics": trial.numerics,
        "source_hash": trial.source_hash,
        "status": trial.status,
        "reason": trial.reason,
        "final": trial.final,
        "latency_p10_us": trial.latency_p10_us,
        "latency_p50_us": trial.latency_p50_us,
        "latency_p90_us": trial.latency_p90_us,
        "samples": trial.samples,
        "baseline_p50_us": trial.baseline_p50_us,
        "error": trial.error,
        "run_id": trial.run_id,
        "created_at": trial.created_at.isoformat(),
    }
