"""`tunedcomm db diff`: what two databases answer differently, in words and in µs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from tunedcomm.cli._options import JsonOption
from tunedcomm.cli._output import emit, emit_json, format_us, table

if TYPE_CHECKING:
    from tunedcomm.db.diff import Answer, Change, Comparison, Difference
    from tunedcomm.hardware import Environment

__all__ = ["counts", "db_diff"]

KINDS = ("winner", "latency", "only before", "only after")
TITLES = {
    "winner": "another winner",
    "latency": "the same winner, another latency",
    "only before": "only in A",
    "only after": "only in B",
}


def db_diff(
    before: Annotated[str, typer.Argument(metavar="A", help="File or URL: the older one.", show_default=False)],
    after: Annotated[str, typer.Argument(metavar="B", help="File or URL: the newer one.", show_default=False)],
    *,
    limit: Annotated[int, typer.Option(min=1, help="Most problems to print of each kind.")] = 50,
    as_json: JsonOption = False,
) -> None:
    """Print what two databases answer differently. As of diff, exit code 1 if they differ and 0 if they do not.

    They are compared as dispatch would choose if all of their kernels could run and were current. A latency is another
    one if it differs by more than the noise of both measurements.

    Example: tunedcomm db diff before.db after.db
    """
    from tunedcomm.db.diff import diff_databases

    found = diff_databases(before, after)
    if as_json:
        emit_json(_to_dict(found))
    else:
        _report(found, limit)
    raise typer.Exit(0 if found.is_empty else 1)


def counts(comparison: Comparison) -> dict[str, int]:
    """How many problems are answered otherwise, by kind."""
    return {kind: sum(change.kind == kind for change in comparison.changes) for kind in KINDS}


def _report(found: Difference, limit: int) -> None:
    for letter, name, index in (("A", found.before, 0), ("B", found.after, 1)):
        held, only = found.trials[index], found.trials_only[index]
        emit(f"{letter}: {name}, schema {found.schemas[index]}, {held} trials, {only} of them in it alone")
    if found.is_empty:
        emit("no difference")
        return
    for letter, environments in zip("AB", found.environments_only, strict=True):
        for environment in environments:
            emit(f"measured only in {letter}: {_named(environment)}")
    for retired in found.retired:
        emit(_retired(retired.op, retired.variant, retired.before, retired.after, retired.finals))
    for change in found.pins:
        where = f"{change.problem} on {_named(change.environment)}"
        was = "none" if change.before is None else f"{change.before.candidate} ({change.before.reason})"
        now = "none" if change.after is None else f"{change.after.candidate} ({change.after.reason})"
        emit(f"pin of {where}: {was} -> {now}")
    for comparison in found.comparisons:
        _report_comparison(comparison, limit)


def _retired(op: str, variant: str, before: str | None, after: str | None, finals: int) -> str:
    if before is None or after is None:
        return f"{op} {variant}: only {'A' if after is None else 'B'} knows it"
    return f"{op} {variant}: its source changed, {before} -> {after}, which retires {finals} finals of A"


def _report_comparison(comparison: Comparison, limit: int) -> None:
    drift = f"; software: {', '.join(comparison.drift)}" if comparison.drift else ""
    changed = len(comparison.changes)
    emit("")
    emit(
        f"{_named(comparison.after)}, {comparison.world_size} ranks: {changed} of {comparison.problems} problems are "
        f"answered otherwise{drift}"
    )
    for kind in KINDS:
        changes = [change for change in comparison.changes if change.kind == kind]
        if not changes:
            continue
        emit(f"{TITLES[kind]}: {len(changes)}")
        table(("problem", "A", "us", "B", "us", "B is"), [_cells(change) for change in changes[:limit]])
        if len(changes) > limit:
            emit(f"... and {len(changes) - limit} more; --limit {len(changes)} prints them all")


def _cells(change: Change) -> tuple[str, ...]:
    problem = f"{change.problem}"
    return (problem, *_answer(change.before), *_answer(change.after), _ratio(change.ratio))


def _answer(answer: Answer | None) -> tuple[str, str]:
    return ("-", "-") if answer is None else (str(answer.candidate), format_us(answer.latency_us))


def _ratio(ratio: float | None) -> str:
    """In words: `1.20x as fast`, or how much slower."""
    if ratio is None:
        return "-"
    return f"{ratio:.2f}x as fast" if ratio >= 1 else f"{1 / ratio:.2f}x slower"


def _named(environment: Environment) -> str:
    return f"{environment} [{environment.digest[:8]}]"


def _to_dict(found: Difference) -> dict[str, Any]:
    sides = ("before", "after")
    return {
        "differ": not found.is_empty,
        **{
            side: {
                "database": (found.before, found.after)[index],
                "schema": found.schemas[index],
                "trials": found.trials[index],
                "trials_only": found.trials_only[index],
                "environments_only": [_environment(e) for e in found.environments_only[index]],
            }
            for index, side in enumerate(sides)
        },
        "sources": [
            {"op": r.op, "variant": r.variant, "before": r.before, "after": r.after, "retired_finals": r.finals}
            for r in found.retired
        ],
        "pins": [
            {
                "problem": change.problem.to_dict(),
                "environment": _environment(change.environment),
                **{
                    side: None if (pin := getattr(change, side)) is None else {**_candidate(pin), "reason": pin.reason}
                    for side in sides
                },
            }
            for change in found.pins
        ],
        "comparisons": [
            {
                "environments": {"before": _environment(c.before), "after": _environment(c.after)},
                "drift": c.drift,
                "world_size": c.world_size,
                "problems": c.problems,
                "changes": [_change(change) for change in c.changes],
            }
            for c in found.comparisons
        ],
    }


def _candidate(pin: Any) -> dict[str, Any]:
    return {"variant": pin.candidate.variant, "config": pin.candidate.config_dict}


def _environment(environment: Environment) -> dict[str, Any]:
    return {"digest": environment.digest, **environment.to_dict()}


def _change(change: Change) -> dict[str, Any]:
    return {
        "kind": change.kind,
        "problem": change.problem.to_dict(),
        "before": None if change.before is None else change.before.to_dict(),
        "after": None if change.after is None else change.after.to_dict(),
        "ratio": change.ratio,
    }
