"""Runs a sweep: gangs measure, every trial is stored as it ends, and a summary closes the sweep."""

from __future__ import annotations

import hashlib
import math
import socket
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from typing import Any

from tunedcomm import kernels
from tunedcomm.db.records import Trial
from tunedcomm.db.snapshot import winners_of
from tunedcomm.db.store import Database
from tunedcomm.db.values import canonical_json
from tunedcomm.hardware import Environment
from tunedcomm.spec import Candidate, Limits, Problem, get_op, get_variant, variants
from tunedcomm.symm.layout import limits_for
from tunedcomm.tuner.gang.protocol import Settings
from tunedcomm.tuner.gang.supervisor import GangProgress, Supervisor
from tunedcomm.tuner.machine import environment_of, gang_devices
from tunedcomm.tuner.measure.compile_pool import CompilePool, num_workers
from tunedcomm.tuner.measure.correctness import odd_problems
from tunedcomm.tuner.search.claims import Claims
from tunedcomm.tuner.search.coordinator import Coordinator
from tunedcomm.tuner.search.knowledge import Knowledge
from tunedcomm.tuner.search.progress import Progress, SweepCounters
from tunedcomm.tuner.search.spec import SweepSpec, load_variants, problems_of
from tunedcomm.tuner.search.study import StudyMirror, default_candidates, interleave, journal_path, search_space
from tunedcomm.tuner.search.summary import SweepOutcome, summarise_problem, summarise_variants

# Seconds between two reports of progress.
_PROGRESS_S = 0.25


class SweepRun:
    """The gangs of one command, their compile pool, the storing of their trials and the reports of progress.

    Args:
        settings: of the gangs.
        coordinator: decides for the gangs; its claims are closed at the end.
        database: takes the trials; None stores nothing.
        progress: called a few times a second and at the end.
        mirror: takes a copy of the trials.
    """

    def __init__(
        self,
        settings: Settings,
        coordinator: Coordinator,
        database: Database | None,
        progress: Callable[[Progress], None] | None,
        mirror: StudyMirror | None = None,
    ) -> None:
        self.coordinator, self._settings = coordinator, settings
        self._database, self._mirror = database, mirror
        self._report = progress
        self.counters = SweepCounters()
        self._begin_s, self._reported_s = time.monotonic(), -_PROGRESS_S
        self._busy: dict[int, GangProgress] = {}  # by slot, what each gang was last seen to work on
        self._pool: CompilePool | None = None
        self._ahead: Iterator[int] = iter(())
        self.num_ahead = 0  # binaries handed to the pool
        self.supervisor = Supervisor(
            coordinator,
            settings,
            gang_devices(settings),
            on_result=lambda result: self.counters.add_binding(result, self._elapsed_s),
            on_turn=self._between_turns,
        )

    def __enter__(self) -> SweepRun:
        if self._settings.backend == "cuda" and not self._settings.stand_in:
            self._pool = CompilePool(num_workers())
        return self

    def __exit__(self, *_: object) -> None:
        """Store the last trials, and that the run is over."""
        try:
            if self._pool is not None:
                self._pool.close()
            self._flush()
            if self._database is not None and self.coordinator.run_id is not None:
                self._database.finish_run(self.coordinator.run_id)
        finally:
            if self.coordinator.claims is not None:
                self.coordinator.claims.close()

    def run(self, on_known: Callable[[Knowledge], None]) -> str:
        """Run gangs to the end; returns the reason for the end, `done` or `budget`.

        `on_known` is called once the first gang has reported its environment, before that gang gets a command.
        """
        reason = self.supervisor.run(on_known)
        self._flush()
        self._report_progress(is_over=True)
        return reason

    def compile_ahead(
        self, known: Knowledge, problems: Iterable[Problem], chosen: Mapping[Problem, Sequence[Candidate]] | None = None
    ) -> None:
        """Compile while gangs run, see `compile_ahead`."""
        if self._pool is not None:
            capability = known.environment.compute_capability
            self._ahead = compile_ahead(self._pool, problems, self._settings, known.limits, capability, chosen)

    @property
    def _elapsed_s(self) -> float:
        return time.monotonic() - self._begin_s

    # Called by the supervisor

    def _between_turns(self) -> None:
        """Do everything that no gang waits for."""
        self._flush()
        self.num_ahead += next(self._ahead, 0)  # one problem at a time: listing its binaries takes a while
        up = sum(gang.phase not in ("starting", "ending") for gang in self.supervisor.states())
        self.counters.add_gang_time(self._elapsed_s, up)
        if self._elapsed_s - self._reported_s >= _PROGRESS_S:
            self._report_progress()

    def _flush(self) -> None:
        """Store the trials that ended since the last call; a failure to store is retried at the end."""
        if not (unstored := self.coordinator.unstored):
            return
        trials = [trial for trial, _ in unstored]
        if self.coordinator.claims is not None:
            self.coordinator.claims.record(trials, [claim for _, claim in unstored if claim is not None])
        elif self._database is not None:
            self._database.record(trials)
        unstored.clear()
        if self._mirror is not None:
            self._mirror.add(trials)
        for trial in trials:
            self.counters.add_trial(trial, self._elapsed_s)

    def _report_progress(self, *, is_over: bool = False) -> None:
        self._reported_s = self._elapsed_s
        if self._report is None:
            return
        busy = {gang.slot: gang for gang in self.supervisor.states() if gang.problem is not None}
        before, self._busy = self._busy, self._busy | busy
        left = [
            gang
            for slot, gang in before.items()
            if (gang.problem, gang.final) != (self._busy[slot].problem, self._busy[slot].final)
        ]
        if is_over:
            left += self._busy.values()
        self._report(replace(self.progress(), left=tuple(self._with_latencies(gang) for gang in left)))

    def progress(self) -> Progress:
        """The progress at this moment."""
        coordinator, counters, elapsed_s = self.coordinator, self.counters, self._elapsed_s
        left = [coordinator.trials_left(problem) for problem in coordinator.problems]
        num_left = sum(count or 0 for count in left)
        estimate_s = counters.estimate_s(coordinator.searched, num_left, left.count(None), elapsed_s)
        bounds = [] if estimate_s is None else [estimate_s]
        bounds += [max(coordinator.seconds_left, 0.0)] if math.isfinite(coordinator.seconds_left) else []
        return Progress(
            problems=len(left),
            problems_done=left.count(0),
            trials=counters.trials,
            trials_planned=num_left,
            failures=dict(counters.failures),
            gangs=tuple(self._with_latencies(gang) for gang in self.supervisor.states()),
            num_gangs=self.supervisor.num_gangs,
            elapsed_s=elapsed_s,
            seconds_left=min(bounds, default=None),
            num_compiled=counters.num_compiled,
            bind_share=counters.bind_share,
        )

    def _with_latencies(self, gang: GangProgress) -> GangProgress:
        known = self.coordinator.knowledge
        if gang.problem is None or known is None:
            return gang
        share = self.coordinator.in_place_shares.get(gang.problem)
        chosen = known.answer(gang.problem).candidate
        found = summarise_problem(gang.problem, known.trials(gang.problem), chosen, in_place_share=share)
        return replace(gang, best_us=found.best_us, library_us=found.best_library_us, num_trials=found.num_trials)


# Binaries of the first problems come first, and later problems share most of them.
_MAX_BINARIES = 4000


def compile_ahead(
    pool: CompilePool,
    problems: Iterable[Problem],
    settings: Settings,
    limits: Limits,
    compute_capability: int,
    chosen: Mapping[Problem, Sequence[Candidate]] | None = None,
) -> Iterator[int]:
    """Hand the binaries of one problem to the pool at each `next`; yields the number of new ones.

    Without `chosen` these are the binaries of all candidates that a search may try.
    """
    handed = 0
    for problem in problems:
        allowed = search_space(problem, limits, settings) if chosen is None else chosen[problem]
        first = [candidate for candidate in default_candidates(problem, limits) if candidate in set(allowed)]
        requests: dict[Any, None] = {}
        shapes = [problem, *odd_problems(get_op(problem.op), problem)]  # checks launch at the odd shapes
        for candidate in [*first, *interleave(allowed)]:
            variant = get_variant(candidate.op, candidate.variant)
            for shape in shapes:
                requests.update(dict.fromkeys(variant.compile_requests(shape, candidate.config_dict)))
        fresh = pool.submit(list(requests)[: _MAX_BINARIES - handed], compute_capability)
        handed += fresh
        yield fresh
        if handed >= _MAX_BINARIES:
            return


def sweep(spec: SweepSpec, database: Database, progress: Callable[[Progress], None] | None = None) -> SweepOutcome:
    """Tune, and store every trial as it ends. A second call goes on where the first one stopped.

    Args:
        spec: the problems and the settings.
        database: writable.
        progress: called a few times a second and at the end, from this thread.

    Raises:
        TuningError: the sweep could not be started, or gangs keep dying without a result.
    """
    settings = spec.settings
    load_variants(settings.plugins)
    problems = problems_of(spec)
    stored = stored_trials(database, problems)
    run_id = database.start_run(
        command=spec.command,
        seed=settings.seed,
        budget=("" if spec.budget_s is None else f"{spec.budget_s:g} s, ") + f"{settings.trials} trials a problem",
        host=socket.gethostname(),
    )
    coordinator = Coordinator(
        problems,
        settings,
        source_hash=kernels.source_hash_of,
        stored=stored,
        seconds_left=spec.budget_s,
        run_id=run_id,
    )
    with (
        closing(StudyMirror(journal_path(database))) as mirror,
        SweepRun(settings, coordinator, database, progress, mirror) as run,
    ):

        def begin(known: Knowledge) -> None:
            digest = known.environment.digest
            coordinator.claims = Claims(database, digest, _source_digest, run_id=run_id, known=stored)
            run.compile_ahead(known, problems)

        if (place := _environment_if_finished(problems, settings, stored)) is None:
            reason = run.run(begin)
        else:
            coordinator.gang_ready(0, *place)
            reason = "done"
        return _outcome(spec, problems, stored, database, run, reason, run_id)


def _outcome(
    spec: SweepSpec,
    problems: Sequence[Problem],
    stored: Iterable[Trial],
    database: Database,
    run: SweepRun,
    reason: str,
    run_id: int,
) -> SweepOutcome:
    coordinator = run.coordinator
    known = coordinator.knowledge
    chosen = {} if known is None else _chosen(database, known, problems)
    unreached = coordinator.unreached
    trials = {problem: [] if known is None else known.trials(problem) for problem in problems}
    named = spec.settings.variants
    before = summarise_variants(
        t for t in stored if (not named or t.variant in named) and known is not None and known.counts(t)
    )
    num_skipped = 0 if spec.settings.retry else sum(v.num_failed for v in before if v.variant != "library")
    return SweepOutcome(
        run_id=run_id,
        environment=None if known is None else known.environment,
        problems=tuple(
            summarise_problem(
                p,
                trials[p],
                chosen.get(p),
                reached=p not in unreached,
                in_place_share=coordinator.in_place_shares.get(p),
            )
            for p in problems
        ),
        reason=reason,
        progress=run.progress(),
        dropped=tuple(sorted(coordinator.dropped)),
        start_s=run.supervisor.start_s,
        compiled_ahead=run.num_ahead,
        compile_share=run.counters.compile_share,
        num_skipped=num_skipped,
        variants=summarise_variants(t for found in trials.values() for t in found if not named or t.variant in named),
    )


def _chosen(database: Database, known: Knowledge, problems: Sequence[Problem]) -> dict[Problem, Candidate]:
    """The candidates that dispatch chooses by the tuned database if nothing is pinned."""
    read = partial(winners_of, environment=known.environment, problems=problems, catalog=known.catalog)
    return {problem: decision.candidate for problem, decision in database.ask(read).items()}


def _environment_if_finished(
    problems: Collection[Problem], settings: Settings, stored: Sequence[Trial]
) -> tuple[Environment, Limits] | None:
    """Environment and limits of gangs here, if nothing of the sweep is left to measure in them; else None."""
    if settings.stand_in or not {trial.problem for trial in stored if trial.final}.issuperset(problems):
        return None
    environment = environment_of(settings.backend)
    limits = limits_for(environment, settings.world_size)
    probe = Coordinator(problems, settings, source_hash=kernels.source_hash_of, stored=stored)
    probe.gang_ready(0, environment, limits)
    return (environment, limits) if probe.next(0).kind == "end" else None


def stored_trials(database: Database, problems: Collection[Problem]) -> list[Trial]:
    """Stored trials of these problems, in any environment, oldest first."""
    wanted, kinds = set(problems), {(problem.op, problem.world_size) for problem in problems}
    found = [trial for op, ranks in kinds for trial in database.trials(op=op, world_size=ranks)]
    return sorted((t for t in found if t.problem in wanted), key=lambda t: (t.created_at, t.id or 0))


def _source_digest(op: str) -> str:
    """Digest of the sources of all variants of an op."""
    sources = {variant.name: kernels.source_hash(variant) for variant in variants(op).values()}
    return hashlib.sha256(canonical_json(sources).encode()).hexdigest()
