"""`tunedcomm db pin`: have one problem run what a person says."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from tunedcomm.cli._options import (
    CallMode,
    DtypeOption,
    HardwareOption,
    InPlaceOption,
    JsonOption,
    Kind,
    OpOption,
    ProblemOptions,
    ShapeOption,
    WorldSizeOption,
    check_in_place,
    split,
)
from tunedcomm.cli._output import emit, emit_json, note
from tunedcomm.cli._pins import WrittenOption, environment_for, pin_to_dict
from tunedcomm.errors import ConfigError, InfeasibleError
from tunedcomm.spec import admits, get_variant

if TYPE_CHECKING:
    from tunedcomm.spec import Candidate, Limits, Problem, Variant

__all__ = ["db_pin", "parse_config"]


def db_pin(
    *,
    op: OpOption,
    shape: ShapeOption,
    world_size: WorldSizeOption,
    variant: Annotated[str, typer.Option(help="Variant to run.")],
    reason: Annotated[str, typer.Option(help="Why, for whoever finds the pin later.")],
    config: Annotated[
        list[str] | None,
        typer.Option(help="Config as num_blocks=8,num_warps=4; by default the variant's own for this problem."),
    ] = None,
    dtype: DtypeOption = "bfloat16",
    mode: Annotated[CallMode, typer.Option(help="Inside CUDA graphs or not.")] = CallMode.graph,
    reduction: Annotated[str | None, typer.Option(help="Reduction; by default the op's first.")] = None,
    input_kind: Annotated[Kind, typer.Option(help="Whether peers can address the input.")] = Kind.plain,
    in_place: InPlaceOption = False,
    hardware: HardwareOption = None,
    db: WrittenOption = None,
    as_json: JsonOption = False,
) -> None:
    """Have dispatch run one variant for one problem on this hardware, whatever was measured; replaces an earlier pin.

    Groups that are made from now on go by it. `tunedcomm explain` names the pin and its reason.

    Example: tunedcomm db pin --op all_reduce --shape 98304 --world-size 4 --variant library --reason "until ticket 12"
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
    problem = check_in_place(options.problem())
    if not reason.strip():
        raise typer.BadParameter("say why, for whoever finds the pin later", param_hint="--reason")
    chosen = get_variant(problem.op, variant)
    from tunedcomm.communicator import limits_for
    from tunedcomm.db.layers import may_be_made, writable_database
    from tunedcomm.db.store import Database

    environment = environment_for(hardware, db)
    candidate = _candidate(problem, chosen, split(config), limits_for(environment, world_size))
    if not admits("default", chosen.numerics):
        note(f"{variant} is {chosen.numerics}: only calls with numerics='any' run it, others go on as before")
    with Database.open(writable_database(db), create=may_be_made(db)) as opened:
        id_ = opened.pin(problem, candidate, environment=environment, reason=reason.strip())
        (pin,) = [pin for pin in opened.pins() if pin.id == id_]
        where = str(opened.path or opened.url)
    if as_json:
        emit_json({"database": where, **pin_to_dict(pin)})
    else:
        emit(f"{problem} runs {candidate} on {environment}: pinned in {where}")


def _candidate(problem: Problem, variant: Variant, config: list[str], limits: Limits) -> Candidate:
    """The candidate that is to be pinned; one that cannot run there is refused as bad usage."""
    from tunedcomm.db.pins import pinnable

    try:
        return pinnable(problem, variant.name, parse_config(config, variant) if config else None, limits=limits)
    except InfeasibleError as error:
        raise typer.BadParameter(str(error), param_hint="--variant") from None


def parse_config(parts: list[str], variant: Variant) -> dict[str, Any]:
    """Read `num_blocks=8` and so on; a value that its axis does not have stays for the space to refuse.

    Raises:
        ConfigError: not of that form, or an axis that is given twice.
    """
    axes = dict(variant.space.axes)
    values: dict[str, Any] = {}
    for part in parts:
        name, separator, text = (piece.strip() for piece in part.partition("="))
        if not separator or name in values:
            wrong = "is given twice" if name in values else "is not of the form AXIS=VALUE"
            raise ConfigError(f"config {part!r} {wrong}; e.g. --config num_blocks=8,num_warps=4")
        known = {str(value).lower(): value for value in axes[name].values()} if name in axes else {}
        values[name] = known.get(text.lower(), int(text) if text.isdecimal() else text)
    return values
