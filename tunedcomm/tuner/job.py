"""How a sweep is run, and the part of a stored trial that steers it. Plain JSON in files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal

from tunedcomm.spec import Candidate, Limits, NumericsPolicy, Problem

__all__ = [
    "EXIT_UNUSABLE",
    "FAILED",
    "Settings",
    "StoredTrial",
    "candidate_from_dict",
    "candidate_to_dict",
]

# Exit code of a gang that ended itself because its group may be out of step. The reason travels as an event; this only
# marks the death as meant.
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
        gangs: how many run at once, each on its own GPUs.
        plugins: modules that a gang imports after the kernels, to register further ops and variants.
        replay: a recording that answers in the gangs' place, see `tuner.replay_gang`; None measures.
        replay_trial_s: seconds that such a gang pretends to need for a trial.
        replay_limits: of the recorded machine.
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
    gangs: int = 1
    plugins: tuple[str, ...] = ()
    replay: str | None = None
    replay_trial_s: float = 0.0
    replay_limits: Limits | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Settings:
        """Inverse of `to_dict`."""
        tuples = ("variants", "plugins")
        values: dict[str, Any] = {f.name: data[f.name] for f in fields(cls)}
        limits = values.pop("replay_limits")
        values.update({name: tuple(values[name]) for name in tuples})
        return cls(**values, replay_limits=None if limits is None else Limits(**limits))

    def save(self, path: Path) -> None:
        """Write as JSON."""
        path.write_text(json.dumps(self.to_dict()), encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> Settings:
        """Inverse of `save`."""
        return cls.from_dict(json.loads(path.read_text(encoding="utf-8")))
