"""What `tune` says of variants that do not run, and of what it did not try again."""

from __future__ import annotations

import shlex
from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING, Any

from tunedcomm.spec import Problem, admits, format_shape, get_op, variants

if TYPE_CHECKING:
    from tunedcomm.tuner.fates import VariantFate
    from tunedcomm.tuner.search.sweep import SweepOutcome

__all__ = ["broken", "fate_lines", "fate_to_dict"]


def fate_lines(outcome: SweepOutcome, named: Collection[str], database: str | None) -> Iterator[str]:
    """A line each for what was left out, for each way in which a variant fails, and for what dispatch will not run.

    Told are variants that were `named`, and others of which nothing runs.
    """
    op = outcome.problems[0].problem.op if outcome.problems else ""
    if count := outcome.num_skipped:
        whose, are = ("1 candidate", "is") if count == 1 else (f"{count} candidates", "are")
        yield (
            f"{whose} failed in an earlier sweep and {are} not tried again: after mending a kernel raise its variant's "
            "`version`, or pass --retry"
        )
    for fate in outcome.fates:
        if fate.variant in named and fate.infeasible:
            yield f"{fate.variant} is infeasible for every problem of this sweep: {fate.infeasible}"
        if fate.is_broken or (fate.variant in named and fate.failures):
            yield from _failures(fate, database)
        if fate.variant in named and fate.num_ran:
            yield from _not_by_default(op, fate.variant)


def _not_by_default(op: str, name: str) -> Iterator[str]:
    variant = variants(op).get(name)
    if variant is not None and not variant.bounded:
        yield f"{name} was measured, and runs only when it is forced: it would wait for a lost peer for ever"
    elif variant is not None and not admits("default", variant.numerics):
        yield (
            f'{name} was measured, and runs only in calls with numerics="any", of ops that take it, or if forced: '
            f"its class is {variant.numerics}"
        )


def _failures(fate: VariantFate, database: str | None) -> Iterator[str]:
    if fate.is_broken:
        yield f"{fate.variant}: none of {sum(fate.failures.values())} that were tried works"
    for first in fate.firsts:
        count = f"{fate.failures[first.status]} {first.status}"
        yield f"{fate.variant}: {count}, the first {first.candidate}: {first.reason}"
    yield f"{fate.variant}: all trials: {show_command(fate.firsts[0].problem, database)}"


def show_command(problem: Problem, database: str | None) -> str:
    """The command that prints every trial of a problem."""
    words = ["tunedcomm", "db", "show", "--op", problem.op, "--shape", format_shape(problem.shape)]
    words += ["--world-size", str(problem.world_size), "--dtype", problem.dtype, "--mode", problem.mode]
    if problem.reduction and problem.reduction not in get_op(problem.op).reductions[:1]:
        words += ["--reduction", problem.reduction]
    if problem.input_kind != "plain":
        words += ["--input-kind", problem.input_kind]
    words += ["--in-place"] if problem.in_place else []
    words += ["--layout", problem.layout] if problem.layout else []
    words += ["--scaling", problem.scaling] if problem.scaling else []
    return shlex.join([*words, *(["--db", database] if database else [])])


def broken(outcome: SweepOutcome, named: Collection[str]) -> list[str]:
    """Those of the variants asked for of which nothing runs, though some was tried."""
    return [fate.variant for fate in outcome.fates if fate.variant in named and fate.is_broken]


def fate_to_dict(fate: VariantFate) -> dict[str, Any]:
    """Plain JSON values."""
    return {
        "variant": fate.variant,
        "num_ran": fate.num_ran,
        "failures": dict(fate.failures),
        "reasons": {first.status: first.reason for first in fate.firsts},
        "infeasible": fate.infeasible,
    }
