"""`tunedcomm db unpin`: let measurements decide again."""

from __future__ import annotations

from typing import Annotated

import typer

from tunedcomm.cli._options import (
    AnyModeOption,
    DtypeOption,
    HardwareOption,
    InPlaceOption,
    JsonOption,
    Kind,
    OpOption,
    ProblemOptions,
    ShapeOption,
    WorldSizeOption,
)
from tunedcomm.cli._output import emit, emit_json, note
from tunedcomm.cli._pins import WrittenOption, environment_for, pinned_in, problem_on

__all__ = ["db_unpin"]


def db_unpin(
    *,
    op: OpOption,
    shape: ShapeOption,
    world_size: WorldSizeOption,
    dtype: DtypeOption = "bfloat16",
    mode: AnyModeOption = None,
    reduction: Annotated[str | None, typer.Option(help="Reduction; by default the op's first.")] = None,
    input_kind: Annotated[Kind, typer.Option(help="Whether peers can address the input.")] = Kind.plain,
    in_place: InPlaceOption = False,
    hardware: HardwareOption = None,
    db: WrittenOption = None,
    as_json: JsonOption = False,
) -> None:
    """Remove the pin of one problem on this hardware; exit code 1 if there is none, or another host has one.

    Example: tunedcomm db unpin --op all_reduce --shape 98304 --world-size 4
    """
    options = ProblemOptions(
        op=op,
        shape=shape,
        dtype=dtype,
        world_size=world_size,
        mode=mode,
        reduction=reduction,
        input_kind=input_kind,
        in_place=in_place,
    )
    from tunedcomm.db.layers import Layer, is_absent, named_layers, writable_database
    from tunedcomm.db.store import Database

    environment = environment_for(hardware, db)
    problem = problem_on(environment, options)
    where, removed = writable_database(db), False
    others = [layer for layer in named_layers(db) if layer.target != where]
    if not others or not is_absent(Layer("user", where)):
        with Database.open(where) as opened:
            removed = opened.unpin(problem, environment=environment)
            where = str(opened.path or opened.url)
    left = pinned_in(others, problem, environment)
    if as_json:
        emit_json({"database": where, "problem": problem.to_dict(), "removed": removed, "still_pinned_in": left})
    elif removed:
        emit(f"{problem} is not pinned any more on {environment} in {where}")
    if left:
        note(f"{problem} is still pinned in {', '.join(left)}, which other hosts write; run this command there")
    elif not removed:
        note(f"no pin of {problem} on {environment} is in {where}; `tunedcomm db list` prints the pins of every layer")
    if left or not removed:
        raise typer.Exit(1)
