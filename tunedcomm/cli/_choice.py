"""What dispatch would choose for a problem, here or on stored hardware: shared by `lookup`, `explain` and `demo`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from tunedcomm.cli._options import ProblemOptions, check_in_place
from tunedcomm.cli._output import note
from tunedcomm.errors import ConfigError, DatabaseError, UnknownNameError
from tunedcomm.selection.snapshot import gc_paused

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from tunedcomm.db.layers import Layer
    from tunedcomm.db.store import Database
    from tunedcomm.hardware import Environment
    from tunedcomm.selection.select import Decision
    from tunedcomm.spec import Limits, NumericsPolicy, Problem, Variant

__all__ = [
    "Choice",
    "choose",
    "environment_here",
    "match_environments",
    "nearest_stored",
    "open_layer",
    "read_layers",
    "stored_environments",
]


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
        """Plain JSON values; the same keys for `lookup --json` and `explain --json`."""
        return {
            "problem": self.problem.to_dict(),
            "asked_for": {"digest": self.environment.digest, **self.environment.to_dict()},
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
    options: ProblemOptions,
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
    with gc_paused():
        return _choose(options, hardware, database, borrow, with_left_out=with_left_out)


def _choose(
    options: ProblemOptions,
    hardware: str | None,
    database: str | None,
    borrow: Sequence[str],
    *,
    with_left_out: bool,
) -> Choice:
    problem = check_in_place(options.problem())
    from tunedcomm import settings
    from tunedcomm.db.layers import load_snapshot
    from tunedcomm.dispatch import dispatcher
    from tunedcomm.spec import Candidate
    from tunedcomm.symm.layout import limits_for

    layers = read_layers(database)
    environment = _environment(hardware, layers, problem)
    if options.mode is None and environment.is_host:  # which has no graphs; `tune` measures calls there, too
        problem = replace(problem, mode="eager")
    strict = database is not None
    snapshot = load_snapshot(environment, problem.world_size, layers=layers, strict=strict, borrow=borrow, like=problem)
    limits = limits_for(environment, problem.world_size)
    forced = dispatcher.forced_candidate(problem, limits)
    if forced is None and settings.mode() == "off":
        forced = Candidate.of(problem.op, "library", {})
    decision = dispatcher.decide(
        problem, snapshot, limits, policy=options.policy, forced=forced, max_sms=options.max_sms
    )
    decision = dispatcher.note_force_mode(decision, settings.mode())
    if not with_left_out:
        return Choice(problem, environment, decision)
    stored = _stored_reasons(problem, environment, layers)
    left_out = _left_out(problem, decision, limits, options.policy, stored)
    nearest = None if snapshot.rows else nearest_stored(environment, stored_environments(layers, is_quiet=True))
    return Choice(problem, environment, decision, left_out, nearest)


def nearest_stored(environment: Environment, stored: Iterable[Environment]) -> Environment | None:
    """The stored environment that differs least in hardware; None where this very hardware is stored, or nothing."""
    from tunedcomm.hardware import nearest

    found = nearest(environment, stored)
    return None if found is None or found.hard_key == environment.hard_key else found


def _stored_reasons(problem: Problem, environment: Environment, layers: Sequence[Layer]) -> dict[str, str]:
    """Variant to what its trials of this very problem on this hardware came to; the nearest layer's where several have.

    That is its best time where it ran at all, else how its latest trial ended.
    """
    found: dict[str, str] = {}
    for layer in reversed(layers):
        try:
            with open_layer(layer) as database:
                trials = [t for t in database.trials(problem=problem) if t.environment.hard_key == environment.hard_key]
        except DatabaseError:
            continue  # noted when the snapshot was loaded
        best: dict[str, float] = {}
        for trial in trials:
            if trial.latency_p50_us is not None and trial.status == "ok":
                best[trial.variant] = min(trial.latency_p50_us, best.get(trial.variant, trial.latency_p50_us))
            elif trial.status != "infeasible":
                found[trial.variant] = f"{trial.status}: {trial.reason}" if trial.reason else trial.status
        found.update({name: f"{latency_us:.2f} µs at best where it was tried" for name, latency_us in best.items()})
    return found


def _left_out(
    problem: Problem, decision: Decision, limits: Limits, policy: NumericsPolicy, stored: Mapping[str, str]
) -> tuple[tuple[str, str], ...]:
    from tunedcomm.spec import admits, variants

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
    from tunedcomm.spec import Candidate, check_candidate

    try:
        config = variant.default_config(problem, limits)
    except ConfigError as error:
        return str(error)
    return check_candidate(problem, Candidate.of(problem.op, variant.name, config), limits, by_name=False)


def read_layers(database: str | None) -> Sequence[Layer]:
    """Every layer, without a user database that was never made; or only the database that was named."""
    from tunedcomm.db.layers import is_absent, layers, named_layers

    if database is not None:
        return named_layers(database)
    return [layer for layer in layers() if not is_absent(layer)]


def open_layer(layer: Layer) -> Database:
    """Open for reading; what ships with the package cannot change while it is open.

    Raises:
        DatabaseError: it cannot be read.
    """
    from tunedcomm.db.store import Database

    return Database.open(layer.target, readonly=True, immutable=True if layer.name == "packaged" else None)


def environment_here() -> Environment:
    """This machine's environment: of its first GPU, or of the host backend."""
    import torch

    from tunedcomm.hardware import detect

    return detect(0 if torch.cuda.is_available() else None)


def stored_environments(
    layers: Iterable[Layer], serving: Problem | None = None, *, is_quiet: bool = False
) -> dict[Environment, bool]:
    """Environments of all readable layers, nearest layer first, each once; unreadable layers are noted on stderr.

    Each with whether something has run there that serves the op and world size of the problem `serving`.
    """
    found: dict[Environment, bool] = {}
    for layer in layers:
        try:
            with open_layer(layer) as database:
                known = database.environments()
                used = [] if serving is None else database.environments(op=serving.op, world_size=serving.world_size)
        except DatabaseError as error:
            if not is_quiet:
                note(f"skipped the {layer.name} database: {error}")
            continue
        for environment in known:
            found[environment] = environment in used or found.get(environment, False)
    return found


def match_environments(text: str, environments: Sequence[Environment]) -> list[Environment]:
    """Environments whose GPU name holds `text` or fits it as a pattern, or whose digest begins with it."""
    from tunedcomm.selection.snapshot import matches

    return [e for e in environments if matches(text, e)]


def _environment(hardware: str | None, layers: Sequence[Layer], problem: Problem) -> Environment:
    if hardware is None:
        here = environment_here()
        if here.is_host:
            note("no GPU here: answering for the host backend; use --hardware for stored GPU environments")
        return here
    stored = stored_environments(layers, problem)
    matching = match_environments(hardware, list(stored))
    if not matching:
        known = ", ".join(sorted({f"{e.gpu} ({e.digest[:8]})" for e in stored})) or "none"
        raise UnknownNameError(f"no stored environment matches --hardware {hardware!r}; stored are: {known}")
    serving = [e for e in matching if stored[e]] or matching
    if len({e.hard_key for e in serving}) > 1:
        listed = "; ".join(f"{e.digest[:8]} = {e}" for e in serving)
        raise UnknownNameError(f"--hardware {hardware!r} matches several environments, give a digest: {listed}")
    return serving[0]
