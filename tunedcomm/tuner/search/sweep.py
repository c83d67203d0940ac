"""A whole sweep: what to tune, run by gangs, stored as it comes, summed up at the end."""

from __future__ import annotations

import hashlib
import importlib
import itertools
import socket
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack

from tunedcomm import kernels
from tunedcomm.db.records import TrialRecord, canonical_json
from tunedcomm.db.store import Database
from tunedcomm.errors import TuningError
from tunedcomm.spec import Problem, get_variant, variants
from tunedcomm.tuner.commands import Outcome, Row
from tunedcomm.tuner.compile_ahead import compile_ahead
from tunedcomm.tuner.fates import num_failed, variant_fates
from tunedcomm.tuner.gang.supervisor import GangState, Supervisor
from tunedcomm.tuner.job import Settings, StoredTrial
from tunedcomm.tuner.measure.compile_pool import CompilePool, num_workers
from tunedcomm.tuner.outcome import GangProgress, ProblemResult, Progress, SweepOutcome, summarise_problem
from tunedcomm.tuner.plan import SweepSpec, gang_devices, resolve
from tunedcomm.tuner.search.claims import Claims
from tunedcomm.tuner.search.coordinator import Coordinator
from tunedcomm.tuner.search.study import StudyMirror, journal_path
from tunedcomm.tuner.tally import Tally

__all__ = ["GangProgress", "ProblemResult", "Progress", "SweepOutcome", "SweepSpec", "resolve", "sweep"]

# Ids by which a server may be behind with showing rows: see `Database.trials`.
_ID_LAG = 1000
# Between two reports of progress.
_PROGRESS_S = 0.25


def sweep(spec: SweepSpec, database: Database, progress: Callable[[Progress], None] | None = None) -> SweepOutcome:
    """Tune, and store every trial as it ends. Run again, it goes on where it stopped.

    Args:
        spec: what to tune.
        database: writable; this process is its only writer on this host.
        progress: called a few times a second and at the end, from this thread.

    Raises:
        TuningError: the sweep could not be started, or gangs keep dying without a result.
    """
    kernels.discover()
    for plugin in spec.plugins:
        _import(plugin)
    problems, settings = resolve(spec)
    with _Sweep(spec, problems, settings, database, progress) as running:
        return running.run()


def _import(module: str) -> None:
    try:
        importlib.import_module(module)
    except ImportError as error:
        raise TuningError(f"plugin module {module!r} cannot be imported: {error}") from error


class _Sweep:
    """A sweep under way: turns rows into records and progress."""

    def __init__(
        self,
        spec: SweepSpec,
        problems: tuple[Problem, ...],
        settings: Settings,
        database: Database,
        progress: Callable[[Progress], None] | None,
    ) -> None:
        self._problems, self._settings = problems, settings
        self._database = database
        self._progress = progress
        self._begin = time.monotonic()
        self._budget_s = spec.budget_s
        self._tally = Tally()
        self._records: dict[Problem, list[TrialRecord]] = {problem: [] for problem in problems}
        self._known = known = stored_records(database, problems)
        for record in known:
            self._records[record.problem].append(record)
        self._pending: list[TrialRecord] = []
        self._told_s = -_PROGRESS_S
        self._ahead: Iterator[int] | None = None
        self._claims: Claims | None = None
        self._mirror = StudyMirror(journal_path(database))
        self._seen = {problem: {r.id or 0 for r in found} for problem, found in self._records.items()}
        self._compiled_ahead = 0
        self._coordinator = Coordinator(
            problems,
            settings,
            source_hash=lambda op, variant: kernels.source_hash(get_variant(op, variant)),
            on_row=self._add,
            stored=map(_steering, known),
            environments={record.environment.digest: record.environment for record in known},
            news=self._news,
            seconds_left=spec.budget_s,
        )
        self._supervisor = Supervisor(
            self._coordinator,
            settings,
            gang_devices(settings),
            on_ready=self._welcome,
            on_outcome=self._bound,
            on_turn=self._turn,
        )
        self._run_id = database.start_run(
            command=spec.command, seed=spec.seed, budget=_budget_text(spec, settings), host=socket.gethostname()
        )
        self._stack = ExitStack()
        self._pool: CompilePool | None = None

    def __enter__(self) -> _Sweep:
        if self._settings.backend == "cuda" and self._settings.replay is None:
            self._pool = self._stack.enter_context(CompilePool(num_workers()))
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()
        try:
            self._flush()
        finally:
            if self._claims is not None:
                self._claims.close()
            self._mirror.close()
        self._database.finish_run(self._run_id)

    def run(self) -> SweepOutcome:
        """Run to the end and sum up."""
        reason = self._supervisor.run()
        self._flush()
        self._tell()
        return SweepOutcome(
            run_id=self._run_id,
            environment=self._coordinator.environment,
            problems=tuple(self._result(problem) for problem in self._problems),
            reason=reason,
            num_trials=self._tally.trials,
            failures=dict(self._tally.failures),
            dropped=tuple(sorted(self._coordinator.dropped)),
            num_gangs=self._supervisor.num_gangs,
            start_s=self._supervisor.start_s,
            seconds=self._elapsed_s,
            compiled_ahead=self._compiled_ahead,
            num_compiled=self._tally.num_compiled,
            bind_share=self._tally.bind_share,
            compile_share=self._tally.compile_share,
            num_skipped=0 if self._settings.retry else num_failed(filter(self._is_wanted, self._known)),
            fates=variant_fates(filter(self._is_wanted, itertools.chain(*self._records.values()))),
        )

    @property
    def _elapsed_s(self) -> float:
        return time.monotonic() - self._begin

    # What the supervisor calls

    def _welcome(self, slot: int) -> None:
        """The first gang that is ready says in what environment trials run, and for what machine to compile."""
        del slot
        here, limits = self._coordinator.environment, self._coordinator.limits
        if self._claims is None and here is not None:
            self._claims = self._coordinator.claims = Claims(self._database, here.digest, _source_digest)
        if self._pool is None or self._ahead is not None or here is None or limits is None:
            return
        self._ahead = compile_ahead(self._pool, self._problems, self._settings, limits, here.compute_capability)

    def _bound(self, slot: int, outcome: Outcome) -> None:
        del slot
        self._tally.bound(outcome, self._elapsed_s)

    def _turn(self) -> None:
        """Everything that gangs do not wait for."""
        self._flush()
        # A problem at a time: listing its binaries takes a while.
        self._compiled_ahead += next(self._ahead, 0) if self._ahead is not None else 0
        up = sum(state.step not in ("starting", "ending") for state in self._supervisor.states())
        self._tally.pass_time(self._elapsed_s, up)
        if self._elapsed_s - self._told_s >= _PROGRESS_S:
            self._tell()

    # Rows

    def _add(self, row: Row) -> None:
        environment = self._coordinator.environment
        assert environment is not None
        record = TrialRecord(**row.fields(), environment=environment, run_id=self._run_id)
        self._records[row.problem].append(record)
        self._pending.append(record)
        self._tally.add(row, self._elapsed_s)

    def _flush(self) -> None:
        if self._pending:
            self._database.record(self._pending)
            self._coordinator.rows_stored()
            self._mirror.add(self._pending)
            self._pending = []

    def _news(self, problem: Problem) -> list[StoredTrial]:
        """What other supervisors have stored of a problem since the last call."""
        seen = self._seen[problem]
        after = max(max(seen, default=0) - _ID_LAG, 0)
        fresh = set(self._database.trial_ids(problem, after_id=after, except_run=self._run_id)) - seen
        if not fresh:
            return []
        seen |= fresh
        found = self._database.trials(problem=problem, after_id=min(fresh) - 1)
        mine = [record for record in found if record.id in fresh]
        self._records[problem] += mine
        return [_steering(record) for record in mine]

    # Telling

    def _tell(self) -> None:
        self._told_s = self._elapsed_s
        if self._progress is None:
            return
        searched = self._coordinator.searched
        planned = {problem: self._coordinator.planned(problem) for problem in self._problems}
        gangs = tuple(map(self._gang_progress, self._supervisor.states()))
        self._progress(
            Progress(
                problems=len(self._problems),
                problems_done=len(searched),
                trials=self._tally.trials,
                trials_planned=sum(count or 0 for count in planned.values()),
                failures=dict(self._tally.failures),
                gangs=gangs,
                num_gangs=self._supervisor.num_gangs,
                elapsed_s=self._elapsed_s,
                seconds_left=self._seconds_left(planned),
                num_compiled=self._tally.num_compiled,
                bind_share=self._tally.bind_share,
            )
        )

    def _seconds_left(self, planned: dict[Problem, int | None]) -> float | None:
        known = sum(count or 0 for count in planned.values())
        unopened = sum(count is None for count in planned.values())
        bounds = [self._tally.estimate_s(self._coordinator.searched, known, unopened, self._elapsed_s)]
        bounds += [max(self._budget_s - self._elapsed_s, 0.0)] if self._budget_s is not None else []
        return min((bound for bound in bounds if bound is not None), default=None)

    def _gang_progress(self, state: GangState) -> GangProgress:
        command = state.command
        if command is None or command.problem is None:
            return GangProgress(slot=state.slot, step=state.step)
        result = self._result(command.problem)
        return GangProgress(
            slot=state.slot,
            step=state.step,
            problem=command.problem,
            candidate=command.candidate,
            final=command.final,
            best_us=result.best.latency_p50_us if result.best else None,
            library_us=result.library_us,
        )

    def _is_wanted(self, record: TrialRecord) -> bool:
        """True for a trial of what is tuned."""
        asked = self._settings.variants
        return (not asked or record.variant in asked) and self._is_current(record)

    def _is_current(self, record: TrialRecord) -> bool:
        """True for a trial in this environment and of the kernels as they are."""
        variant = variants(record.problem.op).get(record.variant)
        if variant is None or record.environment != self._coordinator.environment:
            return False
        return variant.is_library or record.source_hash == kernels.source_hash(variant)

    def _result(self, problem: Problem) -> ProblemResult:
        return summarise_problem(problem, filter(self._is_current, self._records[problem]))


def _budget_text(spec: SweepSpec, settings: Settings) -> str:
    seconds = f"{spec.budget_s:g} s, " if spec.budget_s is not None else ""
    return f"{seconds}{settings.trials} trials a problem"


def stored_records(database: Database, problems: Iterable[Problem]) -> list[TrialRecord]:
    """What the database holds on these problems, in any environment, oldest first."""
    wanted = set(problems)
    found = [
        record
        for op, world_size in {(problem.op, problem.world_size) for problem in wanted}
        for record in database.trials(op=op, world_size=world_size)
        if record.problem in wanted
    ]
    return sorted(found, key=lambda record: (record.created_at, record.id or 0))


def _source_digest(op: str) -> str:
    """Of the sources of all variants of an op."""
    sources = {variant.name: kernels.source_hash(variant) for variant in variants(op).values()}
    return hashlib.sha256(canonical_json(sources).encode()).hexdigest()


def _steering(record: TrialRecord) -> StoredTrial:
    return StoredTrial(
        problem=record.problem,
        candidate=record.candidate,
        status=record.status,
        source_hash=record.source_hash,
        environment=record.environment.digest,
        latency_us=record.latency_p50_us,
        final=record.final,
    )
