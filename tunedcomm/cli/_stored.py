"""Stored trials for `db list`, `db show` and `tune`: which layers hold them, and which trial of a problem won."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tunedcomm.cli._choice import match_environments, open_layer, read_layers
from tunedcomm.cli._output import note
from tunedcomm.errors import DatabaseError
from tunedcomm.spec import Problem

if TYPE_CHECKING:
    from tunedcomm.db.records import TrialRecord
    from tunedcomm.hardware import Environment

__all__ = ["Contest", "contests", "library_us", "read_trials", "winner"]


@dataclass(frozen=True, slots=True)
class Contest:
    """All trials of one problem in one environment in one layer.

    Attributes:
        layer: name of the layer that holds them.
        environment, problem: what they were measured in and for.
        trials: at least one.
    """

    layer: str
    environment: Environment
    problem: Problem
    trials: tuple[TrialRecord, ...]


def read_trials(
    database: str | None, *, op: str | None = None, hardware: str | None = None
) -> Iterator[tuple[str, list[TrialRecord]]]:
    """(layer's name, its trials) for the named database or for every layer.

    A layer that cannot be read is noted on stderr and skipped, the named database raises.

    Raises:
        DatabaseError: the named database cannot be read.
    """
    for layer in read_layers(database):
        try:
            with open_layer(layer) as opened:
                trials = opened.trials(op=op)
        except DatabaseError as error:
            if database is not None:
                raise
            note(f"skipped the {layer.name} database: {error}")
            continue
        if hardware is not None:
            wanted = {e.digest for e in match_environments(hardware, [trial.environment for trial in trials])}
            trials = [trial for trial in trials if trial.environment.digest in wanted]
        yield layer.name, trials


def contests(layer: str, trials: Iterable[TrialRecord]) -> list[Contest]:
    """Group trials by environment and problem; sorted by GPU, world size, op, dtype, mode and size."""
    groups: dict[tuple[str, Problem], list[TrialRecord]] = {}
    environments = {}
    for trial in trials:
        environments[trial.environment.digest] = trial.environment
        groups.setdefault((trial.environment.digest, trial.problem), []).append(trial)
    found = [
        Contest(layer, environments[digest], problem, tuple(members)) for (digest, problem), members in groups.items()
    ]
    return sorted(found, key=_order)


def _order(contest: Contest) -> tuple[object, ...]:
    environment, p = contest.environment, contest.problem
    return (environment.gpu, environment.digest, p.op, p.world_size, p.dtype, p.mode, p.family, p.numel)


def library_us(trial: TrialRecord) -> float | None:
    """The library's median in the trial's own run; its own latency where the trial is the library."""
    return trial.latency_p50_us if trial.variant == "library" else trial.baseline_p50_us


def winner(trials: Sequence[TrialRecord]) -> TrialRecord | None:
    """The fastest ok trial beside the library, of those in the finals where there are any; None if none is ok."""
    from tunedcomm.db.records import fastest

    ran = [trial for trial in trials if trial.status == "ok"]
    return fastest([trial for trial in ran if trial.final] or ran)
