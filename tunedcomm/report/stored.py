"""What a report reads of a tuning database: its trials, what dispatch makes of them, and where they were measured."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from tunedcomm import kernels
from tunedcomm.db.layers import Layer, load_snapshot
from tunedcomm.db.records import RunRecord, TrialRecord
from tunedcomm.db.store import Database
from tunedcomm.dispatch import dispatcher
from tunedcomm.errors import UnknownNameError
from tunedcomm.hardware import Environment
from tunedcomm.report.measured import LIBRARY, Group, Measured
from tunedcomm.selection.score import Scored
from tunedcomm.selection.select import Registered, measured_pool
from tunedcomm.selection.snapshot import Snapshot
from tunedcomm.spec import Candidate, Problem, format_shape, get_op
from tunedcomm.symm.layout import limits_for

__all__ = ["Answer", "Chooser", "StoredFile", "group_of", "measurements", "read_layer"]


@dataclass(frozen=True, slots=True)
class StoredFile:
    """One database.

    Attributes:
        name: of its layer, or the file's.
        target: path or URL, without a password.
        trials, runs, environments: all of them, oldest first.
    """

    name: str
    target: str
    trials: tuple[TrialRecord, ...]
    runs: tuple[RunRecord, ...]
    environments: tuple[Environment, ...]


def read_layer(layer: Layer, *, name: str, op: str | None = None) -> StoredFile:
    """Read one database.

    Raises:
        DatabaseError: it cannot be read.
    """
    immutable = True if layer.name == "packaged" else None
    with Database.open(layer.target, readonly=True, immutable=immutable) as database:
        trials = tuple(database.trials(op=op))
        used = {trial.environment for trial in trials}
        environments = tuple(there for there in database.environments() if there in used)
        return StoredFile(name, str(database.path or database.url), trials, tuple(database.runs()), environments)


@dataclass(frozen=True, slots=True)
class Answer:
    """What dispatch makes of a problem that was measured.

    Attributes:
        candidate: what it would run; None where this tunedcomm does not have the op.
        why: the reason.
        scored: the candidates that it compares.
        library_us: what it takes the library to need; None where that was never measured.
    """

    candidate: Candidate | None = None
    why: str = ""
    scored: Mapping[Candidate, Scored] = field(default_factory=dict)
    library_us: float | None = None

    def library_reckoned_us(self, trial: TrialRecord) -> float | None:
        """The library's time that dispatch sets against a trial's; None where that is the one of the trial's run."""
        found = self.scored.get(trial.candidate)
        if found is None or self.library_us is None or found.row.latency_p50_us != trial.latency_p50_us:
            return None  # dispatch goes by other rows
        reckoned_us = self.library_us / found.score * found.row.latency_p50_us
        is_by_ratio = trial.baseline_p50_us is not None and math.isclose(reckoned_us, trial.baseline_p50_us)
        return None if is_by_ratio else reckoned_us


class Chooser:
    """What dispatch would run by the databases given, on the hardware that they were measured on."""

    def __init__(self, layers: Sequence[Layer]) -> None:
        kernels.discover()
        self._layers = layers
        self._snapshots: dict[tuple[Environment, int], Snapshot] = {}

    def choose(self, problem: Problem, environment: Environment) -> Answer:
        """What dispatch would run there, and what it goes by."""
        try:
            get_op(problem.op)
        except UnknownNameError:
            return Answer()
        key = (environment, problem.world_size)
        if key not in self._snapshots:
            self._snapshots[key] = load_snapshot(environment, problem.world_size, layers=self._layers)
        snapshot, limits = self._snapshots[key], limits_for(environment, problem.world_size)
        decision = dispatcher.decide(problem, snapshot, limits)
        found = measured_pool(snapshot, problem, Registered(limits, dispatcher.source_hash_of))
        scored = {one.candidate: one for one in found.scored}
        return Answer(decision.candidate, decision.why, scored, found.library_us)


def group_of(origin: str, problem: Problem, environment: Environment) -> Group:
    """The figure that a stored problem belongs into."""
    return Group(
        origin=origin,
        op=problem.op,
        world_size=problem.world_size,
        dtype=problem.dtype,
        mode=problem.mode,
        reduction=problem.reduction,
        input_kind=problem.input_kind,
        in_place=problem.in_place,
        layout=problem.layout,
        gpu=environment.gpu,
        fabric=environment.fabric,
    )


def measurements(stored: StoredFile, chooser: Chooser) -> list[Measured]:
    """The best of each variant at each problem, and which of them dispatch chooses.

    The finals count where there are any, as for dispatch. What is chosen is a row of its own where it is another
    config of its variant than the one that was fastest there.
    """
    best: dict[tuple[str, Problem], dict[Candidate, TrialRecord]] = {}
    places = {}
    for trial in stored.trials:
        if trial.status == "ok" and trial.latency_p50_us is not None:
            places[trial.environment.digest] = trial.environment
            there = best.setdefault((trial.environment.digest, trial.problem), {})
            other = there.get(trial.candidate)
            # Of one candidate the finals count, and of these the last.
            if other is None or (trial.final, trial.created_at) >= (other.final, other.created_at):
                there[trial.candidate] = trial
    found: list[Measured] = []
    for (digest, problem), trials in best.items():
        found += _of_problem(stored.name, problem, places[digest], trials, chooser)
    return found


def _of_problem(
    origin: str, problem: Problem, environment: Environment, trials: dict[Candidate, TrialRecord], chooser: Chooser
) -> Iterable[Measured]:
    answer = chooser.choose(problem, environment)
    chosen = answer.candidate
    kept: dict[str, TrialRecord] = {}
    for trial in sorted(trials.values(), key=lambda trial: _rank(trial, answer)):
        kept.setdefault(trial.variant, trial)
    if chosen is not None and chosen in trials:
        kept[chosen.variant] = trials[chosen]
    try:
        message_bytes = get_op(problem.op).message_bytes(problem)
    except UnknownNameError:
        message_bytes = problem.nbytes
    for name, trial in kept.items():
        assert trial.latency_p50_us is not None
        is_chosen = chosen == trial.candidate or (chosen is not None and name == LIBRARY == chosen.variant)
        yield Measured(
            group=group_of(origin, problem, environment),
            shape=format_shape(problem.shape),
            message_bytes=message_bytes,
            contender=name,
            config=str(trial.candidate),
            latency_p50_us=trial.latency_p50_us,
            latency_p10_us=trial.latency_p10_us,
            latency_p90_us=trial.latency_p90_us,
            library_us=trial.latency_p50_us if name == LIBRARY else trial.baseline_p50_us,
            library_reckoned_us=None if name == LIBRARY else answer.library_reckoned_us(trial),
            error=trial.error,
            date=trial.created_at.isoformat(timespec="seconds"),
            run_id="" if trial.run_id is None else str(trial.run_id),
            is_chosen=is_chosen,
            why=answer.why if is_chosen else "",
        )


def _rank(trial: TrialRecord, answer: Answer) -> tuple[bool, bool, float]:
    """Order of one variant's trials: what dispatch compares first, then finals, then by what they are taken to need."""
    assert trial.latency_p50_us is not None
    found = answer.scored.get(trial.candidate)
    return found is None, not trial.final, trial.latency_p50_us if found is None else found.score
