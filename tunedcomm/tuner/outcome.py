"""What a sweep tells while it runs and when it has ended."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from tunedcomm.db.records import FAILED as DANGEROUS
from tunedcomm.db.records import TrialRecord, fastest
from tunedcomm.hardware import Environment
from tunedcomm.spec import Candidate, Problem, admits, variants
from tunedcomm.tuner.fates import VariantFate
from tunedcomm.tuner.job import FAILED

__all__ = ["GangProgress", "ProblemResult", "Progress", "SweepOutcome", "summarise_problem"]


@dataclass(frozen=True, slots=True, kw_only=True)
class GangProgress:
    """What one gang is at.

    Attributes:
        slot: its number among those that run at once.
        step: `starting`, `binding`, `running`, `waiting` or `ending`.
        problem, candidate: what it runs; None where there is nothing.
        final: it is measured as in the finals.
        best_us, library_us: of that problem; None where not yet known.
    """

    slot: int
    step: str
    problem: Problem | None = None
    candidate: Candidate | None = None
    final: bool = False
    best_us: float | None = None
    library_us: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """Where a sweep stands.

    Attributes:
        problems, problems_done: all of them, and those whose search is over.
        trials, trials_planned: measured in this sweep, and still to come in the searches that are under way, at most.
        failures: failed trials of this sweep by status.
        gangs: those that are up, by slot.
        num_gangs: started so far.
        elapsed_s: seconds since the sweep began.
        seconds_left: what is left of the budget, or an estimate where that is less; None while nobody knows.
        num_compiled, bind_share: see `SweepOutcome`.
    """

    problems: int
    problems_done: int
    trials: int
    trials_planned: int
    failures: dict[str, int]
    gangs: tuple[GangProgress, ...]
    num_gangs: int
    elapsed_s: float
    seconds_left: float | None = None
    num_compiled: int = 0
    bind_share: float | None = None

    @property
    def trials_per_minute(self) -> float:
        """Over the whole sweep."""
        return 60 * self.trials / self.elapsed_s if self.elapsed_s > 0 else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ProblemResult:
    """What is known about a problem after the sweep.

    Attributes:
        problem: what was tuned.
        best: the fastest `ok` trial, beside the library in its run, that the default numerics policy admits; None if
            nothing ran.
        library_us: median of the library, from the same interleaved run as `best`.
        num_trials: candidates tried, stored ones counted.
        failures: how many of them failed, by status.
    """

    problem: Problem
    best: TrialRecord | None
    library_us: float | None
    num_trials: int
    failures: dict[str, int]

    @property
    def speedup(self) -> float | None:
        """Library over best; None where either is missing."""
        if self.best is None or self.best.latency_p50_us is None or self.library_us is None:
            return None
        return self.library_us / self.best.latency_p50_us


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepOutcome:
    """What a sweep did.

    Attributes:
        run_id: of the database.
        environment: where it was measured.
        problems: results in the order of the sweep.
        reason: `done`, or `budget` if time ran out first.
        num_trials: measured in this sweep, finals included.
        failures: failed trials of this sweep by status.
        dropped: variants left alone after they had cost too many gangs.
        num_gangs: gangs started.
        start_s: seconds that they took until they were ready, in all.
        seconds: wall time.
        compiled_ahead: binaries handed to the compile pool.
        num_compiled: trials for which a rank still had to compile.
        bind_share: share of the gangs' time that went into binding, by the slowest rank, after the first 30 s of the
            sweep; None if it was over by then.
        compile_share: the part of it in which a rank waited for the compiler.
        num_skipped: candidates that failed in an earlier sweep, and were not tried again.
        fates: what became of each variant that was asked for; of all if none was.
    """

    run_id: int
    environment: Environment | None
    problems: tuple[ProblemResult, ...]
    reason: str
    num_trials: int
    failures: dict[str, int]
    dropped: tuple[str, ...]
    num_gangs: int
    start_s: float
    seconds: float
    compiled_ahead: int
    num_compiled: int = 0
    bind_share: float | None = None
    compile_share: float | None = None
    num_skipped: int = 0
    fates: tuple[VariantFate, ...] = ()

    @property
    def unsolved(self) -> tuple[Problem, ...]:
        """Problems without a single `ok` trial."""
        return tuple(result.problem for result in self.problems if result.best is None)


def summarise_problem(problem: Problem, records: Iterable[TrialRecord]) -> ProblemResult:
    """Sum up the records of one problem in one environment, oldest first; finals count before searches.

    Of a candidate's the last one counts. What failed after it was good is not used, as in dispatch.
    """
    known = list(records)
    lost = {candidate for candidate, r in {r.candidate: r for r in known}.items() if r.status in DANGEROUS}
    latest: dict[tuple[Candidate, bool], TrialRecord] = {(r.candidate, r.final): r for r in known}
    tried = [record for (_, final), record in latest.items() if not final and record.status != "infeasible"]
    ran = [r for r in latest.values() if r.status == "ok" and admits("default", r.numerics) and _may_be_chosen(r)]
    ran = [r for r in ran if r.candidate not in lost]
    ran = [r for r in ran if r.final] or ran
    best = fastest(ran)
    library = [r.latency_p50_us for r in ran if r.variant == "library"]
    library_us = library[0] if library else None
    if best is not None and best.variant != "library":  # the library measured by itself is another run
        library_us = best.baseline_p50_us or library_us
    failures: Counter[str] = Counter(r.status for r in tried if r.status in FAILED)
    return ProblemResult(
        problem=problem, best=best, library_us=library_us, num_trials=len(tried), failures=dict(failures)
    )


def _may_be_chosen(record: TrialRecord) -> bool:
    known = variants(record.problem.op).get(record.variant)
    return known is None or known.bounded
