"""`tunedcomm db pin`: have one problem run what a person says."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tunedcomm.cli._choice import read_layers
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
    check_in_place,
    split,
)
from tunedcomm.cli._output import emit, emit_json, note
from tunedcomm.cli._pins import WrittenOption, environment_for, pin_to_dict, problem_on
from tunedcomm.errors import ConfigError, InfeasibleError
from tunedcomm.spec import admits, get_variant

if TYPE_CHECKING:
    from tunedcomm.hardware import Environment
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
    mode: AnyModeOption = None,
    reduction: Annotated[str | None, typer.Option(help="Reduction; by default the op's first.")] = None,
    input_kind: Annotated[Kind, typer.Option(help="Whether peers can address the input.")] = Kind.plain,
    in_place: InPlaceOption = False,
    hardware: HardwareOption = None,
    db: WrittenOption = None,
    as_json: JsonOption = False,
) -> None:
    """Have dispatch run one variant for one problem on this hardware, however fast others are; replaces an earlier pin.

    Groups that are made from now on go by it. `tunedcomm explain` names the pin and its reason. What failed its check,
    crashed or hung there is refused, and not run where a pin of it was made before.

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
    if not reason.strip():
        raise typer.BadParameter("say why, for whoever finds the pin later", param_hint="--reason")
    chosen = get_variant(options.problem().op, variant)
    from tunedcomm.db.layers import may_be_made, writable_database
    from tunedcomm.db.store import Database
    from tunedcomm.dispatch.communicator import limits_for

    environment = environment_for(hardware, db)
    problem = check_in_place(problem_on(environment, options))
    limits = limits_for(environment, world_size)
    candidate = _candidate(problem, chosen, split(config), limits)
    _check_measured(problem, candidate, environment, limits, db)
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


def _check_measured(
    problem: Problem, candidate: Candidate, environment: Environment, limits: Limits, database: str | None
) -> None:
    """Refuse what dispatch would not run though it were pinned, and say if nothing is known of it."""
    from tunedcomm.db.layers import load_snapshot
    from tunedcomm.dispatch import dispatcher
    from tunedcomm.selection.snapshot import Pinned

    layers = [*([] if database is None else read_layers(database)), *read_layers(None)]
    snapshot = load_snapshot(environment, problem.world_size, layers=layers, like=problem)
    pin = Pinned(problem=problem, candidate=candidate, reason="", layer="")
    decision = dispatcher.decide(problem, replace(snapshot, pins=(pin,)), limits, policy="any")
    if decision.source != "pin":
        reason = dict(decision.passed_over)[str(candidate)].removeprefix("pinned, but ")
        raise typer.BadParameter(
            f"{candidate} {reason}; mend it and have `tunedcomm tune --retry` measure it, or pin another",
            param_hint="--variant",
        )
    if candidate.variant != "library" and decision.latency_us is None:
        note(f"no good trial of {candidate} is stored for this problem: it runs unchecked; `tunedcomm tune` checks it")


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
