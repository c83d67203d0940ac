"""`tunedcomm lookup` and `tunedcomm explain`: what dispatch would run, on what evidence, and why nothing else."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tunedcomm.cli.options import CallOptions, borrowed, takes
from tunedcomm.cli.output import emit, emit_json, format_ratio, format_us, jsonable, message_of
from tunedcomm.cli.stored import environment_for, read_each, read_layers, stored_environments
from tunedcomm.errors import ConfigError
from tunedcomm.selection.snapshot import gc_paused
from tunedcomm.spec import Candidate, admits, check_candidate, variants

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from tunedcomm.db.layers import Layer
    from tunedcomm.hardware import Environment
    from tunedcomm.selection.select import Decision
    from tunedcomm.spec import Limits, NumericsPolicy, Problem


@takes(CallOptions)
def lookup(options: CallOptions) -> None:
    """Print the candidate that dispatch would run for one problem.

    Example: tunedcomm lookup --op all_reduce --shape 98304 --world-size 4 --hardware H200
    """
    choice = choose(options, with_left_out=options.as_json)
    if options.as_json:
        emit_json(choice)
    else:
        emit(str(choice.decision.candidate))


@takes(CallOptions)
def explain(options: CallOptions) -> None:
    """Say what dispatch would run for one problem, on what evidence, and why nothing else.

    Example: tunedcomm explain --op all_reduce --shape 98304 --dtype bfloat16 --world-size 4 --hardware H200
    """
    choice = choose(options)
    if options.as_json:
        emit_json(choice)
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
        nearest, differences = None, self.environment.differences
        if self.nearest is not None:
            nearest = jsonable(self.nearest) | {"differences": list(differences(self.nearest).values())}
        head = {"problem": self.problem, "asked_for": self.environment}
        return {**head, **self.decision.to_dict(), "left_out": self.left_out, "nearest": nearest}


def choose(options: CallOptions, *, with_left_out: bool = True) -> Choice:
    """Resolve the problem as dispatch would, without a process group.

    To say of the other variants too why they do not run, `with_left_out`, takes a look at all of their trials.
    """
    from tunedcomm import settings
    from tunedcomm.db.layers import load_snapshot
    from tunedcomm.dispatch import dispatcher
    from tunedcomm.hardware import nearest
    from tunedcomm.symm.layout import limits_for

    with gc_paused():
        layers = read_layers(options.db)
        environment = environment_for(options.hardware, layers, options.problem())
        problem = options.problem_in(environment)
        strict, borrow = options.db is not None, borrowed(options.borrow)
        snapshot = load_snapshot(
            environment, problem.world_size, layers=layers, strict=strict, borrow=borrow, like=problem
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
        other = None if snapshot.rows else nearest(environment, stored_environments(layers, is_quiet=True))
        if other is not None and other.hard_key == environment.hard_key:
            other = None
        return Choice(problem, environment, decision, left_out, other)


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
    """The variants of which no candidate was looked at, each with the reason."""
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
            try:
                config = variant.default_config(problem, limits)
                candidate = Candidate.of(problem.op, variant.name, config)
                reason = check_candidate(problem, candidate, limits, by_name=False)
            except ConfigError as error:
                reason = str(error)
            reason = reason or stored.get(variant.name) or "no trial near this problem is stored"
        found.append((variant.name, reason))
    return tuple(found)


def explanation(choice: Choice) -> list[str]:
    """The lines that `explain` prints."""
    problem, environment, decision = choice.problem, choice.environment, choice.decision
    entries: list[tuple[str, str]] = [
        ("on", str(environment)),
        ("fabric", environment.fabric_in_words),
        ("runs", str(decision.candidate)),
        ("source", decision.source),
        ("why", decision.why),
    ]
    if decision.layer:
        trial = "" if decision.trial_id is None else f", trial {decision.trial_id}"
        entries.append(("evidence", f"{decision.layer} database{trial}"))
    if decision.latency_us is not None:
        entries.append(("latency", f"{format_us(decision.latency_us)} µs"))
    if decision.library_us is not None and decision.candidate.variant != "library":
        speed_up = format_ratio(decision.library_us, decision.latency_us)
        entries.append(("library", f"{format_us(decision.library_us)} µs, speed-up {speed_up}"))
    if decision.runner_up is not None:
        after = "" if decision.runner_up_us is None else f", {format_us(decision.runner_up_us)} µs"
        entries.append(("runner-up", f"{decision.runner_up}{after}"))
    if (measured_in := decision.environment) is not None:
        drift = environment.drift(measured_in)
        entries.append(("measured in", f"{measured_in}" + (f"; since then: {', '.join(drift)}" if drift else "")))
        entries += [("not the same", text) for text in environment.differences(measured_in).values()]
    if choice.nearest is not None:
        entries.append(("nearest", f"nothing is stored for this hardware; the nearest is {choice.nearest}"))
        entries += [("", text) for text in environment.mismatches(choice.nearest)]
    lines = [f"{problem} ({message_of(problem)})", *(f"  {name:<12}  {text}" for name, text in entries)]
    if passed_over := (*decision.passed_over, *choice.left_out):
        width = max(len(name) for name, _ in passed_over)
        lines += ["  passed over", *(f"    {name:<{width}}  {reason}" for name, reason in passed_over)]
    return lines
