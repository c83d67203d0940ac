"""`tunedcomm lookup` and `tunedcomm explain`: what dispatch would run, on what evidence, and why nothing else."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from tunedcomm.cli.options import CallOptions, borrowed, takes
from tunedcomm.cli.output import Table, attributes, named_candidate, show
from tunedcomm.cli.stored import environment_for, read_each, read_layers, stored_environments
from tunedcomm.errors import ConfigError
from tunedcomm.metrics import format_us, plural
from tunedcomm.selection.snapshot import gc_paused
from tunedcomm.spec import ITEMSIZE, Candidate, admits, check_candidate, get_op, variants

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from tunedcomm.db.layers import Layer
    from tunedcomm.db.store import Database
    from tunedcomm.hardware import Environment
    from tunedcomm.selection.select import Decision
    from tunedcomm.spec import Limits, NumericsPolicy, Problem, Variant


@takes(CallOptions)
def lookup(options: CallOptions) -> None:
    """Print the candidate that dispatch would run for one problem.

    Example: tunedcomm lookup --op all_reduce --shape 98304 --world-size 4 --hardware H200
    """
    choice = decide_offline(options, with_left_out=False)
    value = named_candidate(choice.candidate) | attributes(choice, "source latency_us library_us")
    show(value, [str(choice.candidate)], as_json=options.as_json)


@takes(CallOptions)
def explain(
    options: CallOptions,
    *,
    every: Annotated[bool, typer.Option("--all", help="Say why each other candidate was passed over.")] = False,
) -> None:
    """Show what dispatch would run for one problem, and why. With --all, also why nothing else.

    Example: tunedcomm explain --op all_reduce --shape 98304 --world-size 4 --hardware H200
    """
    choice = decide_offline(options)
    passed_over = (*choice.passed_over, *choice.left_out)
    rest: str | Table = Table(("candidate", "reason"), [(f"  {c}", why) for c, why in passed_over], has_heading=False)
    if not every:
        rest = f"{plural(len(passed_over), 'candidate')} passed over; --all lists them with the reasons"
    show(choice, [*explanation(choice), rest], as_json=options.as_json)


def decide_offline(options: CallOptions, *, with_left_out: bool = True) -> Decision:
    """Resolve the problem as dispatch would, without a process group.

    To say of the other variants too why they do not run, `with_left_out`, takes a look at all of their trials.
    """
    from tunedcomm import settings
    from tunedcomm.db.layers import load_snapshot
    from tunedcomm.db.sidecar import with_checks
    from tunedcomm.dispatch.decide import beside_ordered, decide, forced_candidate, note_force_mode
    from tunedcomm.hardware import nearest
    from tunedcomm.symm.layout import limits_for

    with gc_paused():
        layers = read_layers(options.db)
        environment = environment_for(options.hardware, layers, options.problem())
        if options.dtype is None:
            options = replace(options, dtype=_stored_dtype(options, environment, layers))
        problem = options.problem_in(environment)
        strict, borrow = options.db is not None, borrowed(options.borrow)
        read = partial(load_snapshot, environment, problem.world_size, layers=layers, strict=strict)
        snapshot = with_checks(read(borrow=borrow, like=problem))
        limits = limits_for(environment, problem.world_size)
        forced = forced_candidate(problem, options.numerics, limits, settings.mode())
        decision = decide(problem, snapshot, limits, policy=options.numerics, forced=forced, max_sms=options.max_sms)
        decision = note_force_mode(decision, settings.mode())
        decision = replace(decision, problem=problem, asked_for=environment)
        if not with_left_out:
            return decision
        decision = beside_ordered(decision, problem, snapshot, limits, max_sms=options.max_sms)
        stored = _stored_reasons(problem, environment, layers)
        left_out = _left_out(problem, decision, limits, options.numerics, stored)
        other = None if snapshot.rows else nearest(environment, stored_environments(layers, is_quiet=True))
        if other is not None and other.hard_key == environment.hard_key:
            other = None
        return replace(decision, left_out=left_out, nearest=other)


def _stored_dtype(options: CallOptions, environment: Environment, layers: Sequence[Layer]) -> str | None:
    """The dtype in which the op has run on hardware like `environment`; None if it ran in none or in several."""

    def read(database: Database) -> set[str]:
        return database.dtypes(op=options.op, world_size=options.world_size, environment=environment)

    # Quiet: loading the snapshot notes the layers that cannot be read.
    found = set[str]().union(*(dtypes for _, dtypes in read_each(layers, read, is_quiet=True)))
    return found.pop() if len(found) == 1 else None


def _stored_reasons(problem: Problem, environment: Environment, layers: Sequence[Layer]) -> dict[str, str]:
    """Variant to its trials' outcome at this very problem on this hardware; the nearest layer's where several have.

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
        found |= {name: f"{format_us(latency_us)} µs at best where it was tried" for name, latency_us in best.items()}
    return found


def _left_out(
    problem: Problem, decision: Decision, limits: Limits, policy: NumericsPolicy, stored: Mapping[str, str]
) -> tuple[tuple[str, str], ...]:
    """The variants of which no candidate was looked at, each with the reason; none that never runs here."""
    looked_at = {name.partition("(")[0] for name, _ in decision.passed_over} | {decision.candidate.variant}
    others = [variant for variant in variants(problem.op).values() if variant.name not in looked_at]
    is_host = limits.backend == "host" and any(
        v.default_beats_library(problem, limits) for v in variants(problem.op).values()
    )
    shapes = get_op(problem.op).default_shapes(limits.backend, ITEMSIZE[problem.dtype])
    found = []
    for variant in others:
        reason = _why_not(variant, problem, limits)
        if reason is not None and all(_why_not(variant, replace(problem, shape=shape), limits) for shape in shapes):
            continue
        if reason is None and is_host and variant.kernels and variant.name not in stored:
            continue  # beside variants of CPU tensors, interpreted kernels run only if they are forced
        if not admits(policy, variant.numerics):
            reason = f"its numerics class, {variant.numerics}, is not admitted by the policy {policy!r}"
        elif variant.is_library and decision.library_us is not None and decision.latency_us is not None:
            reason = f"{format_us(decision.library_us)} µs against {format_us(decision.latency_us)} µs"
        found.append((variant.name, reason or stored.get(variant.name) or "no trial near this problem is stored"))
    return tuple(found)


def _why_not(variant: Variant, problem: Problem, limits: Limits) -> str | None:
    """The reason why the variant's default config cannot run the problem unless it is forced, or None."""
    try:
        candidate = Candidate.of(problem.op, variant.name, variant.default_config(problem, limits))
    except ConfigError as error:
        return str(error)
    return check_candidate(problem, candidate, limits, by_name=False)


def explanation(choice: Decision) -> list[str | Table]:
    """The decision in three lines or more, for the terminal."""
    head, entries = choice.explanation()
    return [head, Table(("", ""), [(f"  {name:<12}", text) for name, text in entries], has_heading=False)]
