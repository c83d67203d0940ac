"""`tunedcomm db show`: every stored trial of one problem."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
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
from tunedcomm.cli._stored import Contest, contests, library_us, read_trials
from tunedcomm.spec import format_shape

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
    stored: list[tuple[str, Problem]] = []
    for layer, trials in read_trials(db, op=op, hardware=hardware):
        found += contests(layer, [trial for trial in trials if trial.problem in asked])
        stored += dict.fromkeys((layer, trial.problem) for trial in trials)
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
        note(f"no trial of {_named(asked)} is stored{_hint(asked, stored)}; `tunedcomm db list` prints what is")
        raise typer.Exit(1)


def _named(asked: set[Problem]) -> str:
    """One problem, or one that was asked for in either mode."""
    first = min(asked)
    return str(first) if len(asked) == 1 else str(first).replace(f" {first.mode}", " in either mode", 1)


def _hint(asked: set[Problem], stored: Sequence[tuple[str, Problem]]) -> str:
    """The options under which this very shape is stored, else the nearest shapes that are."""
    problem = min(asked)
    if same := [(layer, other) for layer, other in stored if other.shape == problem.shape]:
        nearest = same[0][0]
        ways = {_change_to(other, asked) for layer, other in same if layer == nearest}
        fewest = sorted(ways, key=lambda way: (way.count("--"), way))[:3]
        return f"; {format_shape(problem.shape)} is stored in the {nearest} database: {' or '.join(fewest)}"
    families = {one.family for one in asked}
    near = nearest_shapes(problem, {other for _, other in stored if other.family in families})
    return f"; the nearest shapes stored are {', '.join(near)}" if near else ""


def _change_to(other: Problem, asked: set[Problem]) -> str:
    """What to change in the command that asked, to have it ask for the other problem."""
    problem = next((one for one in asked if one.mode == other.mode), min(asked))
    named = {
        "--dtype": (problem.dtype, other.dtype),
        "--world-size": (str(problem.world_size), str(other.world_size)),
        "--mode": (problem.mode, other.mode),
        "--reduction": (problem.reduction, other.reduction),
        "--input-kind": (problem.input_kind, other.input_kind),
        "--layout": (problem.layout, other.layout),
        "--scaling": (problem.scaling, other.scaling),
    }
    changed = [f"{option} {there or 'none'}" for option, (here, there) in named.items() if here != there]
    changed += ["--in-place"] if other.in_place and not problem.in_place else []
    parts = [f"pass {' '.join(changed)}"] if changed else []
    parts += ["leave out --in-place"] if problem.in_place and not other.in_place else []
    return " and ".join(parts)


def nearest_shapes(problem: Problem, others: Iterable[Problem]) -> list[str]:
    """Shapes of the problems nearest in size, at most three, nearest first, each once."""

    def distance(other: Problem) -> tuple[float, Problem]:
        return abs(math.log((other.numel + 1) / (problem.numel + 1))), other

    return list(dict.fromkeys(format_shape(other.shape) for other in sorted(others, key=distance)))[:3]


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
        format_us(library_us(trial)),
        format_ratio(library_us(trial), trial.latency_p50_us),
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
