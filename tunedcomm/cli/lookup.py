"""`tunedcomm lookup`: the candidate that dispatch would run, in one line."""

from __future__ import annotations

from typing import Annotated

import typer

from tunedcomm.cli._choice import choose
from tunedcomm.cli._options import (
    AnyModeOption,
    BorrowOption,
    DatabaseOption,
    DtypeOption,
    HardwareOption,
    InPlaceOption,
    JsonOption,
    Kind,
    LayoutOption,
    MaxSmsOption,
    OpOption,
    Policy,
    ProblemOptions,
    ScalingOption,
    ShapeOption,
    WorldSizeOption,
    borrowed,
)
from tunedcomm.cli._output import emit, emit_json

__all__ = ["lookup"]


def lookup(
    *,
    op: OpOption,
    shape: ShapeOption,
    world_size: WorldSizeOption,
    dtype: DtypeOption = "bfloat16",
    mode: AnyModeOption = None,
    reduction: Annotated[str | None, typer.Option(help="Reduction; by default the op's first.")] = None,
    input_kind: Annotated[Kind, typer.Option(help="Whether peers can address the input.")] = Kind.plain,
    in_place: InPlaceOption = False,
    numerics: Annotated[Policy, typer.Option(help="Numerics classes that may run.")] = Policy.default,
    max_sms: MaxSmsOption = None,
    layout: LayoutOption = None,
    scaling: ScalingOption = None,
    hardware: HardwareOption = None,
    borrow: BorrowOption = None,
    db: DatabaseOption = None,
    as_json: JsonOption = False,
) -> None:
    """Print the candidate that dispatch would run for one problem.

    Example: tunedcomm lookup --op all_reduce --shape 98304 --world-size 4 --hardware H200
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
        numerics=numerics,
        max_sms=max_sms,
        layout=layout,
        scaling=scaling,
    )
    choice = choose(options, hardware=hardware, database=db, borrow=borrowed(borrow), with_left_out=as_json)
    if as_json:
        emit_json(choice.to_dict())
    else:
        emit(str(choice.decision.candidate))
