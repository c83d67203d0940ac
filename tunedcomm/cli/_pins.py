"""What `db pin` and `db unpin` share, and pins as `db list` and `db show` print them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import typer

from tunedcomm.cli._choice import environment_here, match_environments, open_layer, read_layers, stored_environments
from tunedcomm.cli._options import ProblemOptions
from tunedcomm.cli._output import note, table
from tunedcomm.cli._problems import kind_of
from tunedcomm.errors import DatabaseError, UnknownNameError
from tunedcomm.spec import format_shape

if TYPE_CHECKING:
    from tunedcomm.db.layers import Layer
    from tunedcomm.db.records import PinRecord
    from tunedcomm.hardware import Environment
    from tunedcomm.spec import Problem

__all__ = ["WrittenOption", "environment_for", "pin_to_dict", "pinned_in", "print_pins", "problem_on", "read_pins"]

COLUMNS = ("shape", "dtype", "ranks", "mode", "input", "pinned", "reason", "by", "since", "on")

WrittenOption: TypeAlias = Annotated[
    str | None,
    typer.Option("--db", help="Database to write, a path or a SQLAlchemy URL; by default the user database."),
]


def environment_for(hardware: str | None, database: str | None) -> Environment:
    """This machine's environment, or the one kind of hardware stored there or in a layer that `--hardware` means.

    Raises:
        UnknownNameError: nothing stored matches, or several kinds of hardware do.
    """
    if hardware is None:
        here = environment_here()
        if here.is_host:
            note("no GPU here: this is about the host backend; use --hardware for stored GPU environments")
        return here
    stored = stored_environments([*([] if database is None else read_layers(database)), *read_layers(None)])
    matching = match_environments(hardware, list(stored))
    if not matching:
        known = ", ".join(sorted({f"{e.gpu} ({e.digest[:8]})" for e in stored})) or "none"
        raise UnknownNameError(f"no stored environment matches --hardware {hardware!r}; stored are: {known}")
    if len({there.hard_key for there in matching}) > 1:
        listed = "; ".join(f"{there.digest[:8]} = {there}" for there in matching)
        raise UnknownNameError(f"--hardware {hardware!r} matches several environments, give a digest: {listed}")
    return matching[0]


def problem_on(environment: Environment, options: ProblemOptions) -> Problem:
    """The problem that is meant: without a mode that of calls in graphs, on the host backend, which has none, eager."""
    problem = options.problem()
    return replace(problem, mode="eager") if options.mode is None and environment.is_host else problem


def read_pins(
    database: str | None, *, op: str | None = None, hardware: str | None = None
) -> list[tuple[str, PinRecord]]:
    """(layer's name, pin) for the named database or for every layer that can be read."""
    found = []
    for layer in read_layers(database):
        try:
            with open_layer(layer) as opened:
                pins = opened.pins()
        except DatabaseError:
            continue  # whoever reads the trials says so
        pins = [pin for pin in pins if op in (None, pin.problem.op)]
        if hardware is not None:
            wanted = {e.digest for e in match_environments(hardware, [pin.environment for pin in pins])}
            pins = [pin for pin in pins if pin.environment.digest in wanted]
        found += [(layer.name, pin) for pin in pins]
    return found


def pinned_in(layers: Iterable[Layer], problem: Problem, environment: Environment) -> list[str]:
    """Those of the layers that hold a pin of the problem for such hardware; what cannot be read holds none."""
    found = []
    for layer in layers:
        with contextlib.suppress(DatabaseError), open_layer(layer) as opened:
            pins = [pin for pin in opened.pins() if pin.problem == problem]
            found += [layer.target] if any(p.environment.hard_key == environment.hard_key for p in pins) else []
    return found


def print_pins(pins: Iterable[tuple[str, PinRecord]]) -> None:
    """A table of the pins of each layer; nothing where there are none."""
    by_layer: dict[str, list[PinRecord]] = {}
    for layer, pin in pins:
        by_layer.setdefault(layer, []).append(pin)
    for layer, members in by_layer.items():
        table(COLUMNS, [_cells(pin) for pin in members], title=f"pins in the {layer} database")


def _cells(pin: PinRecord) -> list[str]:
    problem = pin.problem
    return [
        format_shape(problem.shape),
        problem.dtype,
        str(problem.world_size),
        problem.mode,
        kind_of(problem),
        str(pin.candidate),
        pin.reason,
        pin.user or "-",
        pin.created_at.date().isoformat(),
        str(pin.environment),
    ]


def pin_to_dict(pin: PinRecord) -> dict[str, Any]:
    """Plain JSON values."""
    return {
        "problem": pin.problem.to_dict(),
        "environment": {"digest": pin.environment.digest, **pin.environment.to_dict()},
        "variant": pin.candidate.variant,
        "config": pin.candidate.config_dict,
        "reason": pin.reason,
        "user": pin.user,
        "created_at": pin.created_at.isoformat(),
    }
