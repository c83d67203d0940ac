"""`tunedcomm db list`: which problems are stored for which environment, and what won."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from tunedcomm.cli._options import DatabaseOption, HardwareOption, JsonOption
from tunedcomm.cli._output import emit, emit_json, format_ratio, format_us, table
from tunedcomm.cli._pins import pin_to_dict, print_pins, read_pins
from tunedcomm.cli._problems import kind_of, message_of
from tunedcomm.cli._stored import Contest, contests, library_us, read_trials, winner
from tunedcomm.spec import format_shape

if TYPE_CHECKING:
    from tunedcomm.db.records import PinRecord

__all__ = ["db_list"]

COLUMNS = ("shape", "bytes", "dtype", "ranks", "mode", "input", "winner", "p50 us", "library us", "speed-up", "trials")


def db_list(
    *,
    op: Annotated[str | None, typer.Option(help="Only this op.")] = None,
    hardware: HardwareOption = None,
    db: DatabaseOption = None,
    as_json: JsonOption = False,
) -> None:
    """List stored problems by environment with the fastest trial of each, then the pins.

    Example: tunedcomm db list --op all_reduce --hardware H200
    """
    found: list[Contest] = []
    for layer, trials in read_trials(db, op=op, hardware=hardware):
        found += contests(layer, trials)
    pins = read_pins(db, op=op, hardware=hardware)
    if as_json:
        emit_json([*(_to_dict(contest, pins) for contest in found), *_only_pinned(found, pins)])
        return
    if not found and not pins:
        emit("no trials stored; `tunedcomm tune --op all_reduce` makes some")
        return
    headings: dict[tuple[str, str, str], list[Contest]] = {}
    for contest in found:
        headings.setdefault((contest.layer, contest.environment.digest, contest.problem.op), []).append(contest)
    for (layer, digest, name), members in headings.items():
        title = f"{name} on {members[0].environment} [{digest[:8]}] in the {layer} database"
        table(COLUMNS, [_cells(contest) for contest in members], title=title)
    print_pins(pins)


def _is_about(contest: Contest, layer: str, pin: PinRecord) -> bool:
    same_hardware = pin.environment.hard_key == contest.environment.hard_key
    return layer == contest.layer and pin.problem == contest.problem and same_hardware


def _only_pinned(found: list[Contest], pins: list[tuple[str, PinRecord]]) -> list[dict[str, Any]]:
    """Entries for pins of problems without a trial."""
    alone = [(name, pin) for name, pin in pins if not any(_is_about(contest, name, pin) for contest in found)]
    return [_to_dict(Contest(name, pin.environment, pin.problem, ()), pins) for name, pin in alone]


def _cells(contest: Contest) -> list[str]:
    problem, best = contest.problem, winner(contest.trials)
    start = [format_shape(problem.shape), message_of(problem), problem.dtype, str(problem.world_size)]
    kind = kind_of(problem)
    if best is None:
        return [*start, problem.mode, kind, "(none ran)", "-", "-", "-", str(len(contest.trials))]
    return [
        *start,
        problem.mode,
        kind,
        str(best.candidate),
        format_us(best.latency_p50_us),
        format_us(library_us(best)),
        format_ratio(library_us(best), best.latency_p50_us),
        str(len(contest.trials)),
    ]


def _to_dict(contest: Contest, pins: list[tuple[str, PinRecord]]) -> dict[str, Any]:
    best = winner(contest.trials)
    pinned = [pin_to_dict(pin) for name, pin in pins if _is_about(contest, name, pin)]
    return {
        "layer": contest.layer,
        "environment": {"digest": contest.environment.digest, **contest.environment.to_dict()},
        "problem": contest.problem.to_dict(),
        "trials": len(contest.trials),
        "winner": None
        if best is None
        else {
            "variant": best.variant,
            "config": best.config,
            "latency_p50_us": best.latency_p50_us,
            "library_us": library_us(best),
            "trial_id": best.id,
        },
        "pin": pinned[0] if pinned else None,
    }
