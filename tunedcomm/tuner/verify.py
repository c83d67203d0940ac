"""Times the stored winners again beside the library, and names the winners that have drifted."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias, get_args

from tunedcomm import kernels
from tunedcomm.db.layers import Layer, load_snapshot
from tunedcomm.db.records import Trial
from tunedcomm.db.snapshot import row_of
from tunedcomm.db.store import Database
from tunedcomm.db.values import LOST
from tunedcomm.hardware import Environment
from tunedcomm.selection.score import Scored, noise
from tunedcomm.selection.select import Registered
from tunedcomm.selection.select import winners as winners_under
from tunedcomm.selection.snapshot import Row, Snapshot
from tunedcomm.spec import Candidate, Limits, Mode, NumericsPolicy, Problem, admits, get_op
from tunedcomm.tuner.gang.protocol import Settings
from tunedcomm.tuner.search.coordinator import Coordinator
from tunedcomm.tuner.search.knowledge import Knowledge
from tunedcomm.tuner.search.progress import Progress
from tunedcomm.tuner.search.spec import load_variants
from tunedcomm.tuner.search.sweep import SweepRun


@dataclass(frozen=True, slots=True, kw_only=True)
class Winner:
    """Dispatch's answer at a measured problem under at least one numerics policy.

    Attributes:
        row: its measurement.
        policies: where it is the answer.
        latency_us, library_us: as stored, comparable with each other; None if the library was not measured beside it.
        runner_up: the fastest other challenger under the first of the policies.
    """

    row: Row
    policies: tuple[NumericsPolicy, ...]
    latency_us: float
    library_us: float | None
    runner_up: Candidate | None = None

    @property
    def problem(self) -> Problem:
        """The problem where it is the answer."""
        return self.row.problem

    @property
    def candidate(self) -> Candidate:
        """The variant and its config."""
        return self.row.candidate

    @property
    def ratio(self) -> float | None:
        """Its latency over the library's."""
        return None if self.library_us is None else self.latency_us / self.library_us


def uncertainty(row: Row) -> float:
    """By how much a median may differ in another run, as a share.

    In graphs that is `noise`. An eager call of a small message takes what the host takes, and what moves a host lasts
    longer than a run: many samples of one run say little about the next. So all of half the 10-90 spread counts.
    """
    if row.problem.mode != "eager" or row.latency_p10_us is None or row.latency_p90_us is None:
        return noise(row)
    return max(noise(row), (row.latency_p90_us - row.latency_p10_us) / (2 * row.latency_p50_us))


def stored_winners(
    snapshot: Snapshot,
    limits: Limits,
    source_hash: Callable[[str, str], str | None],
    wanted: Callable[[Problem], bool] = lambda problem: True,
) -> dict[Problem, tuple[Winner, ...]]:
    """The winners at the wanted problems of a snapshot, pins aside, by problem; the default policy's first.

    They are measured at this very problem, on this hardware and with the kernels as they are. A problem is left out if
    nothing that was measured at it may be used any more, e.g. since its kernels have changed.
    """
    rows = {
        (row.problem, row.candidate): row
        for row in snapshot.rows
        if wanted(row.problem)
        and not row.borrowed
        and (row.is_library or source_hash(row.problem.op, row.candidate.variant) == row.source_hash)
    }
    problems = sorted({problem for problem, _ in rows})
    found: dict[Problem, dict[Candidate, Winner]] = {problem: {} for problem in problems}
    for policy in get_args(NumericsPolicy):  # the default, which most callers get, comes first
        for problem, decision in winners_under(snapshot, Registered(limits, source_hash), problems, policy).items():
            row = rows.get((problem, decision.candidate))
            if decision.source != "exact" or row is None or decision.latency_us is None:
                continue
            first = found[problem].get(row.candidate) or Winner(
                row=row,
                policies=(),
                latency_us=decision.latency_us,
                library_us=decision.library_us,
                runner_up=decision.runner_up,
            )
            found[problem][row.candidate] = replace(first, policies=(*first.policies, policy))
    return {problem: tuple(by_candidate.values()) for problem, by_candidate in found.items() if by_candidate}


def candidates_to_measure(stored: Mapping[Problem, Sequence[Winner]]) -> dict[Problem, tuple[Candidate, ...]]:
    """The candidates of each problem to measure besides the library, in the order of the problems.

    These are its winners, its first runner-up, and the winners of the next problem of its family on either side.
    Between two sizes dispatch compares candidates that were measured at both, and it ignores measurements under other
    software or in farther layers where better ones exist.
    """
    by_family: dict[tuple[Problem, tuple[int, ...]], list[Problem]] = {}
    for problem in sorted(stored, key=lambda p: (get_op(p.op).message_bytes(p), p)):
        by_family.setdefault((problem.family, problem.shape[1:]), []).append(problem)
    found: dict[Problem, tuple[Candidate, ...]] = dict.fromkeys(stored, ())
    for members in by_family.values():
        for place, problem in enumerate(members):
            near = [*members[max(place - 1, 0) : place], *members[place + 1 : place + 2]]
            chosen = [winner.candidate for winner in stored[problem]]
            chosen += filter(None, [stored[problem][0].runner_up])
            chosen += [winner.candidate for other in near for winner in stored[other]]
            found[problem] = tuple(dict.fromkeys(c for c in chosen if c.variant != "library"))
    return found


Verdict: TypeAlias = Literal["ok", "tied", "drifted", "slower", "failed", "unmeasured"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Verified:
    """A stored winner and its new measurement.

    Attributes:
        winner: the stored winner.
        verdict: `ok`; `tied`: as fast as the library within the noise, so the library will serve; `drifted`: slower
            than before, by itself and against the library, beyond the tolerance; `slower`: slower than the library,
            beyond the noise; `failed`: does not run or is wrong; `unmeasured`: not tried.
        why: the reason, as one sentence.
        latency_us, library_us: times of the winner and the library in one interleaved run; None if not measured.
        noise: relative uncertainty of `latency_us`; None if not measured.
        faster: another candidate that is now faster, by itself and against the library, beyond the noise; its score is
            comparable with `latency_us`.
    """

    winner: Winner
    verdict: Verdict
    why: str
    latency_us: float | None = None
    library_us: float | None = None
    noise: float | None = None
    faster: Scored | None = None

    @property
    def is_wrong(self) -> bool:
        """True if somebody should look at it."""
        return self.verdict not in ("ok", "tied")

    @property
    def ratio(self) -> float | None:
        """The winner's new latency over the library's."""
        return self.latency_us / self.library_us if self.latency_us and self.library_us else None


def judge(winner: Winner, records: Sequence[Trial], *, tolerance: float) -> Verified:
    """Compare a winner with all trials of the verification, given in order.

    `tolerance` is the share by which the winner may have become slower, besides the noise.
    """
    latest = {record.candidate: record for record in records if record.problem == winner.problem}
    trial = latest.get(winner.candidate)
    if trial is None:
        return Verified(winner=winner, verdict="unmeasured", why=_why_unmeasured(winner, records))
    if trial.status != "ok" or trial.latency_p50_us is None:
        return Verified(winner=winner, verdict="failed", why=f"{trial.status}: {trial.reason}")
    library_us = trial.library_us
    if library_us is None:
        why = "the library, which it is compared with, could not be measured beside it"
        return Verified(winner=winner, verdict="unmeasured", why=why, latency_us=trial.latency_p50_us)
    now = row_of(trial)
    verdict, why = _compare(winner, now, library_us, tolerance)
    return Verified(
        winner=winner,
        verdict=verdict,
        why=why,
        latency_us=trial.latency_p50_us,
        library_us=library_us,
        noise=noise(now),
        faster=_faster(winner, latest.values(), now, library_us),
    )


def _compare(winner: Winner, row: Row, library_us: float, tolerance: float) -> tuple[Verdict, str]:
    """Compare a winner's new time with the stored one.

    A loss against the library alone is no fault of the winner: the library's time moves too.
    """
    if winner.row.is_library:
        return "ok", "the library serves"
    ratio, now = row.latency_p50_us / library_us, noise(row)
    # Where the library may not run at all, being slower than it is no fault.
    may_be_library = any(admits(policy, "library") for policy in winner.policies)
    if may_be_library and ratio > 1 + now:
        return "slower", f"it takes {ratio:.2f}x the library's time, and the noise is {now:.1%}"
    uncertain = max(uncertainty(winner.row), uncertainty(row))
    lost = 0.0 if winner.ratio is None else ratio / winner.ratio - 1
    longer = row.latency_p50_us / winner.row.latency_p50_us - 1
    if min(lost, longer) > tolerance + uncertain:
        return "drifted", (
            f"it takes {1 + longer:.2f}x the stored time, and {1 + lost:.2f}x relative to the library; {tolerance:.1%} "
            f"more and a noise of {uncertain:.1%} are tolerated"
        )
    if may_be_library and ratio >= 1 - now:
        return "tied", f"it is no longer faster than the library by more than the noise of {now:.1%}"
    if lost > tolerance + uncertain:
        return "ok", f"the library became faster: the kernel takes {1 + longer:.2f}x the stored time"
    return "ok", "as fast against the library as it was" if winner.ratio is not None else "faster than the library"


def _why_unmeasured(winner: Winner, records: Sequence[Trial]) -> str:
    name = winner.candidate.variant
    lost = [f"{trial.status} at {trial.problem}" for trial in records if trial.variant == name and trial.status in LOST]
    if lost:
        return f"not tried, for {name} had cost {len(lost)} gangs: {'; '.join(lost)}. Tune it again, or pin another one"
    return "not tried: the command was stopped, or there was no memory for the problem, as the log says then"


def _faster(winner: Winner, records: Iterable[Trial], now: Row, library_us: float) -> Scored | None:
    """The fastest other challenger that every policy of the winner admits, if it beats the winner beyond the noise.

    Each was timed beside the library, but not beside the winner: it must be faster as it was timed, and by its ratio to
    the library.
    """
    found: list[Scored] = []
    for record in records:
        may_run = all(admits(policy, record.numerics) for policy in winner.policies)
        is_other = record.candidate != winner.candidate and record.variant != "library"
        if may_run and is_other and record.status == "ok" and record.latency_p50_us and record.baseline_p50_us:
            row = row_of(record)
            score = row.latency_p50_us / record.baseline_p50_us * library_us
            if max(score, row.latency_p50_us) * (1 + max(uncertainty(row), uncertainty(now))) < now.latency_p50_us:
                found.append(Scored(row, score, noise(row)))
    return min(found, key=lambda scored: scored.score, default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifySpec:
    """The winners to time again, and the settings of the gangs that time them.

    Attributes:
        settings: of the gangs; `machine_settings` has the usual ones.
        ops, dtypes, modes: only problems of these; any where empty.
        limit: time at most this many problems: those with winners measured under other software first, then the oldest.
        tolerance: the share by which a winner may have become slower, by itself and against the library, besides the
            noise: 0.1 for 10 %.
        layers: databases that the winners are read from; None reads the databases of dispatch.
        command: command line to store with the run.
    """

    settings: Settings
    ops: tuple[str, ...] = ()
    dtypes: tuple[str, ...] = ()
    modes: tuple[Mode, ...] = ()
    limit: int | None = None
    tolerance: float = 0.1
    layers: Sequence[Layer] | None = None
    command: str = ""

    def __post_init__(self) -> None:
        if not 0 <= self.tolerance < 10:
            raise ValueError(f"tolerance must be a share from 0 to 10, e.g. 0.1 for 10 %, got {self.tolerance}")
        if self.limit is not None and self.limit < 1:
            raise ValueError(f"limit must be at least 1, got {self.limit}")

    def wants(self, problem: Problem) -> bool:
        """True if the spec selects the problem."""
        filters = ((self.ops, problem.op), (self.dtypes, problem.dtype), (self.modes, problem.mode))
        return all(not allowed or value in allowed for allowed, value in filters)


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyOutcome:
    """The outcome of a verification.

    Attributes:
        environment: of this machine; None if no gang came up.
        world_size: ranks of a gang.
        results: every stored winner, by problem.
        run_id: of the database; None if nothing was stored.
        num_trials: measured, the library's included.
        num_gangs: gangs started.
        seconds: wall time.
    """

    environment: Environment | None
    world_size: int
    results: tuple[Verified, ...]
    run_id: int | None
    num_trials: int
    num_gangs: int
    seconds: float

    @property
    def wrong(self) -> tuple[Verified, ...]:
        """Winners that somebody should look at."""
        return tuple(result for result in self.results if result.is_wrong)


def verify(
    spec: VerifySpec, database: Database | None, progress: Callable[[Progress], None] | None = None
) -> VerifyOutcome:
    """Time the stored winners of this machine's hardware and world size again, with their runners-up and the library.

    Each candidate passes the same check as in a sweep before it is timed, interleaved with the library, by a gang that
    is ended if it hangs.

    Args:
        spec: what to time.
        database: takes the new timings, as finals: dispatch uses them from then on; None stores nothing.
        progress: called a few times a second and at the end, from this thread.

    Raises:
        TuningError: the machine cannot run a gang, or gangs keep dying without a result.
        DatabaseError: a layer that was named cannot be read, or `database` cannot be written.
    """
    settings = spec.settings
    load_variants(settings.plugins)
    winners: dict[Problem, tuple[Winner, ...]] = {}
    coordinator = Coordinator((), settings, source_hash=kernels.source_hash_of)
    with SweepRun(settings, coordinator, database, progress) as run:

        def begin(known: Knowledge) -> None:
            """Take the winners of the machine that the first gang reports."""
            winners.update(_most_in_doubt(spec, known))
            if database is not None and winners:
                coordinator.run_id = database.start_run(
                    command=spec.command,
                    seed=settings.seed,
                    budget=f"winners of {len(winners)} problems",
                    host=socket.gethostname(),
                )
            chosen = candidates_to_measure(winners)
            run.compile_ahead(known, chosen, chosen)
            exempt = {(problem, winner.candidate) for problem, found in winners.items() for winner in found}
            coordinator.measure_only(chosen, exempt)

        run.run(begin)
        known, done = coordinator.knowledge, run.progress()
        trials = [trial for problem in winners for trial in known.trials(problem)] if known is not None else []
        return VerifyOutcome(
            environment=None if known is None else known.environment,
            world_size=settings.world_size,
            results=tuple(judge(winner, trials, tolerance=spec.tolerance) for ws in winners.values() for winner in ws),
            run_id=coordinator.run_id,
            num_trials=done.trials,
            num_gangs=done.num_gangs,
            seconds=done.elapsed_s,
        )


def _most_in_doubt(spec: VerifySpec, known: Knowledge) -> dict[Problem, tuple[Winner, ...]]:
    """The stored winners of this machine, at as many problems as the spec allows, sorted by problem."""
    snapshot = load_snapshot(
        known.environment, spec.settings.world_size, layers=spec.layers, strict=spec.layers is not None
    )
    found = stored_winners(snapshot, known.limits, kernels.source_hash_of, spec.wants)

    def doubt(problem: Problem) -> tuple[tuple[bool, str], Problem]:
        """Sort key: winners measured under other software first, then the oldest."""
        return min((not winner.row.drift, winner.row.created_at) for winner in found[problem]), problem

    return {problem: found[problem] for problem in sorted(sorted(found, key=doubt)[: spec.limit])}
