"""Messages between the supervisor and the ranks of a gang, over one pipe a rank: pickled values, both ways.

Every rank receives the same: its `Settings` first, `GO` when it may take its device, then a `Command` for each trial.
Ranks send pairs of a name and a value; only `failure` comes from other ranks than rank 0:

    failure  time, text            a launch raised on this rank, or an error ends the rank; monotonic time
    ready    environment, limits   commands may follow
    bind     candidate             rank 0 is about to bind it; it may be the library, to be timed beside the candidate
    run      candidate             every rank has bound it; launches begin
    result   TrialResult           the result of the trial

Messages that a rank sent before it died can still be read. No message ends a gang: the supervisor kills it once it has
no more work, or after a result that says that its ranks may be out of step.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, TypeAlias

from tunedcomm.spec import Candidate, NumericsPolicy, Problem
from tunedcomm.version import VERSION

# Both ends must agree on this, so that a process started after an upgrade of tunedcomm does not work for an old one.
# Every process gets it by its command line.
PROTOCOL = f"{VERSION}/6"
GO = "go"

Backend: TypeAlias = Literal["cuda", "host"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Settings of searches and of gangs; the command line makes them and every rank of a gang gets them.

    Attributes:
        backend, world_size: backend and ranks of a gang.
        gangs: gangs that run at once.
        trials: most candidates a problem; candidates of earlier sweeps count.
        patience: end a search after this many trials without a better one; 0: never.
        seed: seed of the search and of the inputs.
        policy: numerics classes that are measured.
        variants: only these variants besides the library; all if empty.
        retry: try again the candidates that failed in an earlier sweep.
        finals: measure the winners over the whole sweep at the end.
        reach: a candidate within this factor of the best one gets more samples.
        first_rounds: timed replays (launches on the host) of the first look.
        more_rounds: further rounds, interleaved with the library, for a candidate within `reach`.
        final_rounds: timed rounds in the finals.
        round_budget_us: time limit of all timed rounds of a trial, in µs; two rounds always run. 0: no limit.
        search_share: share of a budget that searches may use; the rest is for the finals.
        full_check_bytes: larger problems get the light check alone.
        in_job: trials run in a running job. A lost candidate ends the memory of the trials and is blamed at once; the
            late check of finals follows no more launches than the late check of searches.
        for_kernels: trials in a running job get memory for kernels; on the host only interpreted kernels need it.
        start_timeout_s, compile_timeout_s, trial_timeout_s: a gang that is silent for longer in that phase is killed.
        peer_timeout_s: longest wait of a kernel for a peer.
        failures_per_variant: a variant is dropped from this sweep after it has cost this many gangs.
        plugins: modules that register further ops and variants.
        stand_in: module and arguments that answer for the gangs in tests; empty measures.
    """

    backend: Backend
    world_size: int
    trials: int
    gangs: int = 1
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
    search_share: float = 0.85
    full_check_bytes: float = math.inf
    in_job: bool = False
    for_kernels: bool = True
    start_timeout_s: float = 240.0
    compile_timeout_s: float = 120.0
    trial_timeout_s: float = 30.0
    peer_timeout_s: float = 2.0
    failures_per_variant: int = 3
    plugins: tuple[str, ...] = ()
    stand_in: tuple[str, ...] = ()


# The ranks have no memory for the problem itself; nothing is stored.
TOO_LARGE = "too_large"


@dataclass(frozen=True, slots=True, kw_only=True)
class Latency:
    """Percentiles over `samples` rounds of the slowest rank's time, in µs."""

    p10_us: float
    p50_us: float
    p90_us: float
    samples: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """The coordinator's answer to a gang; only trials are sent to the gang.

    Attributes:
        kind: run a trial, wait for the next command, or end.
        problem, candidate: of the trial.
        baseline: the library's candidate, measured interleaved with the trial's; None where the library cannot run.
        threshold_us: latency of the best rival so far; a candidate out of its reach gets fewer samples.
        full_check: use the full check, odd sizes included.
        final: measure as in the finals.
        reason: the reason for the end: `done` or `budget`.
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
        bind_s: seconds in which the slowest rank bound the candidate, and the library if it was bound first.
        compiled: binaries that were not in the cache, on the rank that compiled most.
        in_place_share: of the library, its time in place over its time at the problem, which is not in place.
    """

    status: str
    reason: str = ""
    latency: Latency | None = None
    baseline_us: float | None = None
    error: float | None = None
    bind_s: float = 0.0
    compiled: int = 0
    in_place_share: float | None = None


def rounds_after_look(command: Command, look_us: float, settings: Settings) -> int:
    """Timed rounds that a candidate gets after a first look of `look_us`; 0: the first look was enough."""
    # The baseline is always measured well. Its name is compared because replays of recorded trials have no variants.
    is_library = command.trial[1].variant == "library"
    near = is_library or look_us <= settings.reach * command.threshold_us
    if command.final:
        # A finalist that is far off at this shape needs a point on its curve, not a precise one.
        return settings.final_rounds if near else settings.first_rounds
    return settings.more_rounds if near else 0


def pruned(command: Command, look: Latency, error: float | None) -> TrialResult:
    """The outcome of a candidate that gets no rounds after its first look."""
    reason = f"{look.p50_us:.4g} µs at first look, the best so far is {command.threshold_us:.4g} µs"
    return TrialResult(status="pruned", reason=reason, latency=look, error=error)
