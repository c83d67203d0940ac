"""`tunedcomm lookup` and `tunedcomm explain`: what dispatch would run, on what evidence, and why nothing else."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tunedcomm.cli.options import BorrowOption, CallOptions, DatabaseOption, HardwareOption, JsonOption, borrowed, takes
from tunedcomm.cli.output import emit, emit_json, format_ratio, format_us, message_of
from tunedcomm.cli.stored import environment_for, nearest_stored, read_each, read_layers, stored_environments
from tunedcomm.errors import ConfigError
from tunedcomm.selection.snapshot import gc_paused
from tunedcomm.spec import Candidate, admits, check_candidate, variants

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from tunedcomm.db.layers import Layer
    from tunedcomm.hardware import Environment
    from tunedcomm.selection.select import Decision
    from tunedcomm.spec import Limits, NumericsPolicy, Problem, Variant


@takes(CallOptions)
def lookup(
    options: CallOptions,
    *,
    hardware: HardwareOption = None,
    borrow: BorrowOption = None,
    db: DatabaseOption = None,
    as_json: JsonOption = False,
) -> None:
    """Print the candidate that dispatch would run for one problem.

    Example: tunedcomm lookup --op all_reduce --shape 98304 --world-size 4 --hardware H200
    """
    choice = choose(options, hardware=hardware, database=db, borrow=borrowed(borrow), with_left_out=as_json)
    if as_json:
        emit_json(choice.to_dict())
    else:
        emit(str(choice.decision.candidate))


@takes(CallOptions)
def explain(
    options: CallOptions,
    *,
    hardware: HardwareOption = None,
    borrow: BorrowOption = None,
    db: DatabaseOption = None,
    as_json: JsonOption = False,
) -> None:
    """Say what dispatch would run for one problem, on what evidence, and why nothing else.

    Example: tunedcomm explain --op all_reduce --shape 98304 --dtype bfloat16 --world-size 4 --hardware H200
    """
    choice = choose(options, hardware=hardware, database=db, borrow=borrowed(borrow))
    if as_json:
        emit_json(choice.to_dict())
        return
    for line in explanation(choice):
        emit(line)


@dataclass(frozen=True, slots=True)
class Choice:
    """A problem, the environment it was asked for, and what dispatch answers.

    Attributes:
        problem, environment: what was asked.
        decision: what dispatch runs, with the candidates that it looked at.
        left_out: variants of which it looked at no candidate, each with the reason.
        nearest: where nothing is stored for this hardware, the stored environment that differs least from it.
    """

    problem: Problem
    environment: Environment
    decision: Decision
    left_out: tuple[tuple[str, str], ...] = ()
    nearest: Environment | None = None

    def to_dict(self) -> dict[str, Any]:
        """For JSON; the same keys for `lookup --json` and `explain --json`."""
        return {
            "problem": self.problem,
            "asked_for": self.environment,
            **self.decision.to_dict(),
            "left_out": [list(entry) for entry in self.left_out],
            "nearest": None
            if self.nearest is None
            else {
                "digest": self.nearest.digest,
                **self.nearest.to_dict(),
                "differences": list(self.environment.differences(self.nearest).values()),
            },
        }


def choose(
    options: CallOptions,
    *,
    hardware: str | None,
    database: str | None,
    borrow: Sequence[str] = (),
    with_left_out: bool = True,
) -> Choice:
    """Resolve the problem as dispatch would, without a process group.

    Args:
        options: the problem, as typed.
        hardware: the stored environment to answer for; None for this machine.
        database: what to read instead of every layer.
        borrow: other hardware whose measurements may serve where there are none.
        with_left_out: say of the other variants too why they do not run, which takes a look at all of their trials.

    Raises:
        UnknownNameError: no such op, or no stored environment matches `hardware`.
        DatabaseError: `database` cannot be read.
    """
    from tunedcomm import settings
    from tunedcomm.db.layers import load_snapshot
    from tunedcomm.dispatch import dispatcher
    from tunedcomm.symm.layout import limits_for

    with gc_paused():
        layers = read_layers(database)
        environment = environment_for(hardware, layers, options.problem())
        problem = options.problem_in(environment)
        snapshot = load_snapshot(
            environment,
            problem.world_size,
            layers=layers,
            strict=database is not None,
            borrow=borrow,
            like=problem,
        )
        limits = limits_for(environment, problem.world_size)
        forced = dispatcher.forced_candidate(problem, limits)
        if forced is None and settings.mode() == "off":
            forced = Candidate.of(problem.op, "library", {})
        decision = dispatcher.decide(
            problem, snapshot, limits, policy=options.numerics, forced=forced, max_sms=options.max_sms
        )
        decision = dispatcher.note_force_mode(decision, settings.mode())
        if not with_left_out:
            return Choice(problem, environment, decision)
        stored = _stored_reasons(problem, environment, layers)
        left_out = _left_out(problem, decision, limits, options.numerics, stored)
        nearest = None if snapshot.rows else nearest_stored(environment, stored_environments(layers, is_quiet=True))
        return Choice(problem, environment, decision, left_out, nearest)


def _stored_reasons(problem: Problem, environment: Environment, layers: Sequence[Layer]) -> dict[str, str]:
    """Variant to what its trials of this very problem on this hardware came to; the nearest layer's where several have.

    That is its best time where it ran at all, else how its latest trial ended.
    """
    found: dict[str, str] = {}
    # Quiet: the layers that cannot be read were noted when the snapshot was loaded.
    for _, trials in read_each(reversed(layers), lambda database: database.trials(problem=problem), is_quiet=True):
        best: dict[str, float] = {}
        for trial in trials:
            if trial.environment.hard_key != environment.hard_key:
                continue
            if trial.latency_p50_us is not None and trial.status == "ok":
                best[trial.variant] = min(trial.latency_p50_us, best.get(trial.variant, trial.latency_p50_us))
            elif trial.status != "infeasible":
                found[trial.variant] = f"{trial.status}: {trial.reason}" if trial.reason else trial.status
        found.update({name: f"{latency_us:.2f} µs at best where it was tried" for name, latency_us in best.items()})
    return found


def _left_out(
    problem: Problem, decision: Decision, limits: Limits, policy: NumericsPolicy, stored: Mapping[str, str]
) -> tuple[tuple[str, str], ...]:
    looked_at = {name.partition("(")[0] for name, _ in decision.passed_over} | {decision.candidate.variant}
    found = []
    for variant in variants(problem.op).values():
        if variant.name in looked_at:
            continue
        reason: str | None
        if not admits(policy, variant.numerics):
            reason = f"its numerics class, {variant.numerics}, is not admitted by the policy {policy!r}"
        elif variant.is_library and decision.library_us is not None and decision.latency_us is not None:
            reason = f"{decision.library_us:.2f} µs against {decision.latency_us:.2f} µs"
        else:
            reason = _against_default(problem, variant, limits)
            reason = reason or stored.get(variant.name) or "no trial near this problem is stored"
        found.append((variant.name, reason))
    return tuple(found)


def _against_default(problem: Problem, variant: Variant, limits: Limits) -> str | None:
    try:
        config = variant.default_config(problem, limits)
    except ConfigError as error:
        return str(error)
    return check_candidate(problem, Candidate.of(problem.op, variant.name, config), limits, by_name=False)


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
