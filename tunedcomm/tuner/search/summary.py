"""The summary of a sweep: each problem's best candidate, each variant's failures."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from tunedcomm.db.records import Trial
from tunedcomm.db.values import FAILURES, RAN, was_tried
from tunedcomm.hardware import Environment
from tunedcomm.spec import Candidate, Problem
from tunedcomm.tuner.search.progress import Progress


@dataclass(frozen=True, slots=True, kw_only=True)
class ProblemResult:
    """Results of a problem after the sweep.

    Attributes:
        problem: the problem.
        best: the trial of the candidate that dispatch takes under the default numerics policy, from the tuned database
            alone and without pins; None if dispatch takes no candidate that ran.
        library_us: median of the library in the interleaved run of `best`.
        in_place_us: what the library would take there in place, without a copy; None where this sweep has not measured
            it, and where the library is the best.
        num_trials: candidates tried, in earlier sweeps too.
        failures: failed candidates by status.
        library_failure: the library's last trial if it failed: nothing could be compared with the library.
        reached: False if the budget ended before anything was compared here: nothing is stored then.
    """

    problem: Problem
    best: Trial | None
    library_us: float | None
    num_trials: int
    failures: dict[str, int]
    library_failure: Trial | None = None
    reached: bool = True
    in_place_us: float | None = None

    @property
    def best_us(self) -> float | None:
        """The median of `best`."""
        return None if self.best is None else self.best.latency_p50_us

    @property
    def best_library_us(self) -> float | None:
        """The library's time in its best form."""
        return min((us for us in (self.library_us, self.in_place_us) if us is not None), default=None)

    @property
    def speedup(self) -> float | None:
        """The library's time over the best one; None where either is missing."""
        if self.best_us is None or self.library_us is None:
            return None
        return self.library_us / self.best_us


def summarise_problem(
    problem: Problem,
    records: Iterable[Trial],
    chosen: Candidate | None,
    *,
    reached: bool = True,
    in_place_share: float | None = None,
) -> ProblemResult:
    """Summarise the trials of one problem in one environment, given oldest first; none of a problem not `reached`.

    `chosen` is the candidate that dispatch takes; its final counts before its search. Where dispatch takes a variant
    that was not measured, by rule of thumb, the library is the best. `in_place_share` is the library's time in place
    over its time at the problem.
    """
    known = list(records) if reached else []
    latest: dict[tuple[Candidate, bool], Trial] = {(r.candidate, r.final): r for r in known}
    tried = [record for (_, final), record in latest.items() if not final and was_tried(record.status)]
    ran = {r.candidate: r for r in sorted(latest.values(), key=lambda r: r.final) if r.status == "ok"}
    ran_library = next((r for r in ran.values() if r.variant == "library"), None)
    best = None if chosen is None else ran.get(chosen, ran_library)
    library = [record for record in known if record.variant == "library"]
    library_us = None if ran_library is None else ran_library.latency_p50_us
    in_place_us = None
    if best is not None and best.variant != "library":  # the library's own trial is another run
        library_us = best.baseline_p50_us or library_us
        in_place_us = library_us * in_place_share if library_us and in_place_share else None
    return ProblemResult(
        problem=problem,
        best=best,
        library_us=library_us,
        num_trials=len(tried),
        failures=dict(Counter(r.status for r in tried if r.status in FAILURES)),
        library_failure=library[-1] if library and library[-1].status in FAILURES else None,
        reached=reached,
        in_place_us=in_place_us,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class VariantSummary:
    """One variant's candidates over all problems of its op in a sweep; trials of earlier sweeps count.

    Attributes:
        variant: the variant's name.
        num_ran: trials that ran, fast or not.
        failures: failed trials by status; an infeasible candidate has not failed.
        firsts: the first trial of each kind of failure.
        infeasible: the reason why the variant cannot run, where it cannot run any problem.
    """

    variant: str
    num_ran: int
    failures: Mapping[str, int]
    firsts: tuple[Trial, ...] = ()
    infeasible: str = ""

    @property
    def num_failed(self) -> int:
        """Trials that failed."""
        return sum(self.failures.values())

    @property
    def is_broken(self) -> bool:
        """True if some candidates were tried and none runs."""
        return bool(self.failures) and not self.num_ran


def summarise_variants(records: Iterable[Trial]) -> tuple[VariantSummary, ...]:
    """Summarise, by variant, trials of one environment and of the current kernels."""
    by_variant: dict[tuple[str, str], list[Trial]] = {}
    latest = {(record.problem, record.candidate): record for record in records if not record.final}
    for record in latest.values():
        by_variant.setdefault((record.problem.op, record.variant), []).append(record)
    found = []
    for (_, variant), trials in sorted(by_variant.items()):
        failures = Counter[str](trial.status for trial in trials if trial.status in FAILURES)
        num_ran = sum(trial.status in RAN for trial in trials)
        reasons = [trial.reason for trial in trials if trial.status == "infeasible"]
        found.append(
            VariantSummary(
                variant=variant,
                num_ran=num_ran,
                failures=dict(failures),
                firsts=tuple(next(trial for trial in trials if trial.status == status) for status in failures),
                infeasible=reasons[0] if reasons and not failures and not num_ran else "",
            )
        )
    return tuple(found)


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepOutcome:
    """The outcome of a sweep.

    Attributes:
        run_id: id of the run in the database.
        environment: environment of the gangs; None if no gang came up.
        problems: results in the order of the sweep.
        reason: `done`, or `budget` if time ran out first.
        progress: the progress at the end; its `trials` include finals.
        dropped: variants that were not tried any more because they cost too many gangs.
        start_s: seconds that all gangs together took to start.
        compiled_ahead: binaries handed to the compile pool.
        compile_share: the part of `bind_share` in which a rank waited for the compiler.
        num_skipped: candidates that failed in an earlier sweep and were not tried again.
        variants: a summary of each variant that was named; of all variants if none was named.
    """

    run_id: int
    environment: Environment | None
    problems: tuple[ProblemResult, ...]
    reason: str
    progress: Progress
    dropped: tuple[str, ...]
    start_s: float
    compiled_ahead: int
    compile_share: float | None = None
    num_skipped: int = 0
    variants: tuple[VariantSummary, ...] = ()

    @property
    def ops(self) -> tuple[str, ...]:
        """The ops of the problems, in the order of the sweep."""
        return tuple(dict.fromkeys(result.problem.op for result in self.problems))

    @property
    def unsolved(self) -> tuple[Problem, ...]:
        """Problems that were reached and have no `ok` trial."""
        return tuple(result.problem for result in self.problems if result.best is None and result.reached)
