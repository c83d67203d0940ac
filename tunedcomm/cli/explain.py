"""`tunedcomm explain`: what dispatch would run, on what evidence, and why nothing else."""

from __future__ import annotations

from typing import Annotated

import typer

from tunedcomm.cli._choice import Choice, choose
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
from tunedcomm.cli._output import emit, emit_json, format_ratio, format_us
from tunedcomm.cli._problems import message_of

__all__ = ["explain", "explanation"]


def explanation(choice: Choice) -> list[str]:
    """The lines that `explain` prints."""
    problem, decision = choice.problem, choice.decision
    lines = [
        f"{problem} ({message_of(problem)})",
        f"  on            {choice.environment}",
        f"  fabric        {choice.environment.fabric_in_words}",
        f"  runs          {decision.candidate}",
        f"  source        {decision.source}",
        f"  why           {decision.why}",
    ]
    if decision.layer:
        trial = "" if decision.trial_id is None else f", trial {decision.trial_id}"
        lines.append(f"  evidence      {decision.layer} database{trial}")
    if decision.latency_us is not None:
        lines.append(f"  latency       {format_us(decision.latency_us)} µs")
    if decision.library_us is not None and decision.candidate.variant != "library":
        speed_up = format_ratio(decision.library_us, decision.latency_us)
        lines.append(f"  library       {format_us(decision.library_us)} µs, speed-up {speed_up}")
    if decision.runner_up is not None:
        after = "" if decision.runner_up_us is None else f", {format_us(decision.runner_up_us)} µs"
        lines.append(f"  runner-up     {decision.runner_up}{after}")
    if decision.environment is not None:
        drift = choice.environment.drift(decision.environment)
        lines.append(f"  measured in   {decision.environment}" + (f"; since then: {', '.join(drift)}" if drift else ""))
        lines += [f"  not the same  {text}" for text in choice.environment.differences(decision.environment).values()]
    if choice.nearest is not None:
        lines.append(f"  nearest       nothing is stored for this hardware; the nearest is {choice.nearest}")
        lines += [f"                {text}" for text in choice.environment.mismatches(choice.nearest)]
    if passed_over := (*decision.passed_over, *choice.left_out):
        lines.append("  passed over")
        width = max(len(name) for name, _ in passed_over)
        lines += [f"    {name.ljust(width)}  {reason}" for name, reason in passed_over]
    return lines


def explain(
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
    """Say what dispatch would run for one problem, on what evidence, and why nothing else.

    Example: tunedcomm explain --op all_reduce --shape 98304 --dtype bfloat16 --world-size 4 --hardware H200
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
    choice = choose(options, hardware=hardware, database=db, borrow=borrowed(borrow))
    if as_json:
        emit_json(choice.to_dict())
        return
    for line in explanation(choice):
        emit(line)
