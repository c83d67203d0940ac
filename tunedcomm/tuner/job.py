"""What the supervisor tells a gang: problems, what is known already, and settings. Plain JSON in a file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal

from tunedcomm.spec import Candidate, NumericsPolicy, Problem

__all__ = [
    "EXIT_UNUSABLE",
    "FAILED",
    "Job",
    "Settings",
    "StoredTrial",
    "candidate_from_dict",
    "candidate_to_dict",
]

# Exit code of a gang that ended itself because its group may be out of step; torchrun passes no other code on, so the
# reason travels as an event and this only marks the death as meant.
EXIT_UNUSABLE = 75

# Outcomes that are not tried again under the same environment and source unless asked to.
FAILED = frozenset({"infeasible", "compile_error", "incorrect", "crashed", "hung"})


def candidate_to_dict(candidate: Candidate) -> dict[str, Any]:
    """Plain JSON values."""
    return {"op": candidate.op, "variant": candidate.variant, "config": candidate.config_dict}


def candidate_from_dict(data: Mapping[str, Any]) -> Candidate:
    """Inverse of `candidate_to_dict`."""
    return Candidate.of(data["op"], data["variant"], data["config"])


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTrial:
    """The part of a stored trial that steers a sweep.

    Attributes:
        problem: what was asked.
        candidate: what was tried.
        status: how it ended.
        source_hash: of the variant's kernels when it was tried.
        environment: digest of the whole environment.
        latency_us: median of the slowest rank, if it ran.
        final: measured in the finals.
    """

    problem: Problem
    candidate: Candidate
    status: str
    source_hash: str
    environment: str
    latency_us: float | None = None
    final: bool = False

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            "problem": self.problem.to_dict(),
            "candidate": candidate_to_dict(self.candidate),
            "status": self.status,
            "source_hash": self.source_hash,
            "environment": self.environment,
            "latency_us": self.latency_us,
            "final": self.final,
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> StoredTrial:
        """Inverse of `to_dict`."""
        return cls(
            problem=Problem.from_dict(data["problem"]),
            candidate=candidate_from_dict(data["candidate"]),
            status=data["status"],
            source_hash=data["source_hash"],
            environment=data["environment"],
            latency_us=data["latency_us"],
            final=data["final"],
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How a sweep is run; the same for every gang of it.

    Attributes:
        backend: `cuda` or `host`.
        world_size: ranks of a gang.
        trials: most candidates measured a problem, stored ones counted.
        patience: a search ends when its best has stood for this many trials; 0 never ends it early.
        seed: of the search and of the inputs.
        policy: numerics classes that are measured.
        variants: only these variants besides the library; empty means all.
        retry: try again what failed before.
        finals: measure the winners over the whole sweep at the end.
        reach: a candidate within this factor of the best gets more samples.
        first_rounds: timed replays (launches on the host) of the first look.
        more_rounds: further ones, interleaved with the library, for those within reach.
        final_rounds: ones in the finals.
        start_timeout_s: a gang without a sign of life for so long at its start is killed.
        compile_timeout_s: the same while a candidate is bound.
        trial_timeout_s: the same while it runs.
        peer_timeout_s: bound of the kernels' own waits.
        failures_per_variant: a variant is left alone in this sweep after so many lost gangs.
        storage: Optuna storage URL; None keeps the studies in rank 0's memory.
        plugins: modules that a gang imports after the kernels, to register further ops and variants.
    """

    backend: Literal["cuda", "host"]
    world_size: int
    trials: int
    patience: int = 0
    seed: int = 0
    policy: NumericsPolicy = "any"
    variants: tuple[str, ...] = ()
    retry: bool = False
    finals: bool = True
    reach: float = 1.3
    first_rounds: int = 3
    more_rounds: int = 12
    final_rounds: int = 20
    start_timeout_s: float = 240.0
    compile_timeout_s: float = 120.0
    trial_timeout_s: float = 30.0
    peer_timeout_s: float = 2.0
    failures_per_variant: int = 3
    storage: str | None = None
    plugins: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Settings:
        """Inverse of `to_dict`."""
        tuples = ("variants", "plugins")
        values: dict[str, Any] = {f.name: data[f.name] for f in fields(cls)}
        return cls(**{**values, **{name: tuple(values[name]) for name in tuples}})


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One gang's work.

    Attributes:
        problems: in the order in which they are tuned.
        settings: how.
        seconds_left: of the sweep's budget; None is no bound.
        stored: what is known, from the database and from this sweep's earlier gangs.
        environments: digest to the readable environment of `stored`.
        tried: (problem digest, candidate) pairs that this sweep's earlier gangs ended with, for `retry`.
        dropped: variants that this sweep leaves alone from here on.
    """

    problems: tuple[Problem, ...]
    settings: Settings
    seconds_left: float | None = None
    stored: tuple[StoredTrial, ...] = ()
    environments: tuple[tuple[str, dict[str, Any]], ...] = ()
    tried: frozenset[tuple[str, Candidate]] = frozenset()
    dropped: frozenset[str] = frozenset()

    def save(self, path: Path) -> None:
        """Write as JSON."""
        data = {
            "problems": [problem.to_dict() for problem in self.problems],
            "settings": self.settings.to_dict(),
            "seconds_left": self.seconds_left,
            "stored": [trial.to_dict() for trial in self.stored],
            "environments": dict(self.environments),
            "tried": [[digest, candidate_to_dict(candidate)] for digest, candidate in self.tried],
            "dropped": sorted(self.dropped),
        }
        path.write_text(json.dumps(data), encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> Job:
        """Inverse of `save`."""
        data = json.loads(path.read_text(encoding="utf-8"))
        return cls(
            problems=tuple(Problem.from_dict(problem) for problem in data["problems"]),
            settings=Settings.from_dict(data["settings"]),
            seconds_left=data["seconds_left"],
            stored=tuple(StoredTrial.from_dict(trial) for trial in data["stored"]),
            environments=tuple(data["environments"].items()),
            tried=frozenset((digest, candidate_from_dict(candidate)) for digest, candidate in data["tried"]),
            dropped=frozenset(data["dropped"]),
        )
