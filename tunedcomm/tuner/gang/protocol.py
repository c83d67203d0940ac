"""Messages between the supervisor and the ranks of a gang, over a pipe to each: pickled values, both ways.

Down goes the same to every rank: its `Settings` at once, `GO` when it may take its device, then a `Command` for each
trial. Up come pairs of a name and a value, all but the first from rank 0 alone:

    failure  time, text            a launch raised on this rank, or an error ends it; by the monotonic clock
    ready    environment, limits   commands may follow
    bind     candidate             it is about to be bound; or the library, to be timed beside it
    run      candidate             every rank has bound it; launches begin
    result   TrialResult           how the trial ended

What a rank wrote before it died is still there to be read. No message ends a gang: it is killed, as soon as it has
nothing more to do, or where a result says that its ranks may be out of step.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from tunedcomm.spec import Candidate, NumericsPolicy, Problem
from tunedcomm.version import VERSION

# What both ends must have in common: a process that starts after tunedcomm was upgraded does not work for an old one.
# Every process is told it by its command line.
PROTOCOL = f"{VERSION}/4"
GO = "go"
# Variable with the descriptor of the socket, listening at MASTER_PORT, on which rank 0 serves the ranks' store.
STORE_FD = "GANG_STORE_FD"

# Outcomes that are not tried again under the same environment and source unless asked to.
FAILED = frozenset({"infeasible", "compile_error", "incorrect", "crashed", "hung"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Settings of a sweep; the same for every gang of it. What is not said here is as in `SweepSpec`.

    Attributes:
        reach: a candidate within this factor of the best gets more samples.
        first_rounds: timed replays (launches on the host) of the first look.
        more_rounds: further ones, interleaved with the library, for those within reach.
        final_rounds: ones in the finals.
        round_budget_us: timed rounds of a trial take no longer than this in all, but two of them; 0 is no bound.
        for_kernels: trials in a running job get memory for kernels; on the host only interpreted ones need it.
        short: finals make no more launches before their late check than a search does.
        failures_per_variant: a variant is left alone in this sweep after so many lost gangs.
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
    round_budget_us: float = 0.0
    for_kernels: bool = True
    short: bool = False
    start_timeout_s: float = 240.0
    compile_timeout_s: float = 120.0
    trial_timeout_s: float = 30.0
    peer_timeout_s: float = 2.0
    failures_per_variant: int = 3
    gangs: int = 1
    plugins: tuple[str, ...] = ()
    stand_in: tuple[str, ...] = ()


# Outcomes after which the ranks may be out of step: the gang is killed and another one is started.
LOST = frozenset({"crashed", "hung"})
# What becomes of a trial where the ranks have no memory for the problem itself: it is stored for nobody.
TOO_LARGE = "too_large"


@dataclass(frozen=True, slots=True, kw_only=True)
class Latency:
    """Microseconds of the slowest rank: percentiles over `samples` rounds."""

    p10_us: float
    p50_us: float
    p90_us: float
    samples: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """The next thing for a gang to do; only trials are sent to it.

    Attributes:
        kind: run a trial, wait for the next command, or end.
        problem, candidate: of the trial.
        baseline: the library's candidate, measured interleaved with it; None where the library cannot run.
        threshold_us: latency of the best rival so far; candidates out of its reach get fewer samples.
        full_check: check thoroughly, odd sizes included.
        final: measure as in the finals.
        reason: why it ends.
    """

    kind: Literal["trial", "wait", "end"]
    problem: Problem | None = None
    candidate: Candidate | None = None
    baseline: Candidate | None = None
    threshold_us: float = math.inf
    full_check: bool = True
    final: bool = False
    reason: str = ""

    @property
    def trial(self) -> tuple[Problem, Candidate]:
        """The problem and the candidate of a trial."""
        assert self.problem is not None
        assert self.candidate is not None
        return self.problem, self.candidate


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialResult:
    """The result of a trial; the same on every rank.

    Attributes:
        status, reason, latency, baseline_us, error: as in `db.records.Trial`; the status may be `TOO_LARGE`.
        bind_s: seconds for which the slowest rank bound the candidate (and the library, where that was bound first).
        compiled: binaries that were not in the cache then, on the rank that had to compile most.
    """

    status: str
    reason: str = ""
    latency: Latency | None = None
    baseline_us: float | None = None
    error: float | None = None
    bind_s: float = 0.0
    compiled: int = 0


def rounds_after_look(command: Command, look_us: float, settings: Settings) -> int:
    """Timed rounds that a candidate gets after a first look of `look_us`; none if it is left at that look."""
    # The baseline itself is always measured well. By its name: a replay of recorded trials has no variants to look up.
    is_library = command.trial[1].variant == "library"
    near = is_library or look_us <= settings.reach * command.threshold_us
    if command.final:
        # A finalist that is far off at this shape needs a point on its curve, not a precise one.
        return settings.final_rounds if near else settings.first_rounds
    return settings.more_rounds if near else 0


def pruned(command: Command, look: Latency, error: float | None) -> TrialResult:
    """The outcome of a candidate that is left at its first look."""
    reason = f"{look.p50_us:.4g} µs at first look, the best so far is {command.threshold_us:.4g} µs"
    return TrialResult(status="pruned", reason=reason, latency=look, error=error)
