"""A whole sweep: what to tune, run by gangs, stored as it comes, summed up at the end."""

from __future__ import annotations

import importlib
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from tunedcomm import kernels
from tunedcomm.db.records import TrialRecord
from tunedcomm.db.store import Database
from tunedcomm.errors import TuningError
from tunedcomm.hardware import Environment
from tunedcomm.spec import Candidate, Limits, Problem, get_op, get_variant
from tunedcomm.tuner.check import odd_problems
from tunedcomm.tuner.compile_pool import CompilePool, num_workers
from tunedcomm.tuner.job import FAILED, Job, Settings, StoredTrial
from tunedcomm.tuner.outcome import ProblemResult, Progress, SweepOutcome, summarise_problem
from tunedcomm.tuner.plan import SweepSpec, resolve
from tunedcomm.tuner.schedule import search_space
from tunedcomm.tuner.study import default_candidates
from tunedcomm.tuner.supervisor import Supervisor

__all__ = ["ProblemResult", "Progress", "SweepOutcome", "SweepSpec", "resolve", "sweep"]

# Binaries handed to the compile pool; the first problems' come first, and later problems share most of them.
_MAX_COMPILE_AHEAD = 4000


def sweep(spec: SweepSpec, database: Database, progress: Callable[[Progress], None] | None = None) -> SweepOutcome:
    """Tune, and store every trial as it ends. Run again, it goes on where it stopped.

    Args:
        spec: what to tune.
        database: writable; this process is its only writer on this host.
        progress: called after everything that happens, from this thread.

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


@dataclass(slots=True)
class _Tally:
    """Counts of this sweep alone."""

    trials: int = 0
    failures: Counter[str] = field(default_factory=Counter)
    lost_gangs: Counter[str] = field(default_factory=Counter)
    problems_done: set[str] = field(default_factory=set)
    tried: set[tuple[str, Candidate]] = field(default_factory=set)


class _Sweep:
    """A sweep under way: turns events into records and progress."""

    def __init__(
        self,
        spec: SweepSpec,
        problems: tuple[Problem, ...],
        settings: Settings,
        database: Database,
        progress: Callable[[Progress], None] | None,
    ) -> None:
        self._spec, self._problems, self._settings = spec, problems, settings
        self._database = database
        self._progress = progress
        self._begin = time.monotonic()
        self._tally = _Tally()
        self._environment: Environment | None = None
        self._records: dict[Problem, list[TrialRecord]] = {problem: [] for problem in problems}
        for record in stored_records(database, problems):
            self._records[record.problem].append(record)
        self._pending: list[TrialRecord] = []
        self._current: tuple[Problem | None, Candidate | None, bool] = (None, None, False)
        self._planned = self._compiled_ahead = 0
        self._supervisor = Supervisor(
            on_event=self._take, make_job=self._make_job, on_lost=self._lose, on_idle=self._flush
        )
        self._run_id = database.start_run(
            command=spec.command, seed=spec.seed, budget=_budget_text(spec, settings), host=socket.gethostname()
        )
        self._stack = ExitStack()
        self._pool: CompilePool | None = None

    def __enter__(self) -> _Sweep:
        if self._settings.backend == "cuda":
            self._pool = self._stack.enter_context(CompilePool(num_workers()))
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()
        self._flush()
        self._database.finish_run(self._run_id)

    def run(self) -> SweepOutcome:
        """Run to the end and sum up."""
        reason = self._supervisor.run()
        self._flush()
        return SweepOutcome(
            run_id=self._run_id,
            environment=self._environment,
            problems=tuple(self._result(problem) for problem in self._problems),
            reason=reason,
            num_trials=self._tally.trials,
            failures=dict(self._tally.failures),
            dropped=tuple(sorted(self._dropped())),
            num_gangs=self._supervisor.num_gangs,
            seconds=time.monotonic() - self._begin,
            compiled_ahead=self._compiled_ahead,
        )

    def _dropped(self) -> frozenset[str]:
        limit = self._settings.failures_per_variant
        return frozenset(variant for variant, lost in self._tally.lost_gangs.items() if lost >= limit)

    def _make_job(self) -> Job | None:
        self._flush()
        left = None
        if self._spec.budget_s is not None:
            left = self._spec.budget_s - (time.monotonic() - self._begin)
            if left <= 0:
                return None
        records = [record for found in self._records.values() for record in found]
        return Job(
            problems=self._problems,
            settings=self._settings,
            seconds_left=left,
            stored=tuple(_steering(record) for record in records),
            environments=tuple({r.environment.digest: r.environment.to_dict() for r in records}.items()),
            tried=frozenset(self._tally.tried),
            dropped=self._dropped(),
        )

    def _take(self, event: dict[str, Any]) -> None:
        name = event["event"]
        if name == "ready":
            self._environment = Environment.from_dict(event["environment"])
            self._compile_ahead(Limits(**event["limits"]))
        elif name == "problem":
            self._current, self._planned = (Problem.from_dict(event["problem"]), None, False), event["trials"]
        elif name == "trial":
            problem = Problem.from_dict(event["problem"])
            self._current = (problem, _candidate(event), bool(event["final"]))
        elif name == "result":
            self._planned = max(self._planned - 1, 0)
            self._add(self._record(event))
        elif name == "done":
            self._tally.problems_done.add(Problem.from_dict(event["problem"]).digest)
        self._tell()

    def _record(self, event: dict[str, Any]) -> TrialRecord:
        assert self._environment is not None
        candidate = _candidate(event)
        return TrialRecord(
            problem=Problem.from_dict(event["problem"]),
            environment=self._environment,
            variant=candidate.variant,
            config=candidate.config_dict,
            run_id=self._run_id,
            numerics=event["numerics"],
            source_hash=event["source_hash"],
            status=event["status"],
            reason=event["reason"],
            latency_p10_us=event["latency_p10_us"],
            latency_p50_us=event["latency_p50_us"],
            latency_p90_us=event["latency_p90_us"],
            samples=event["samples"],
            baseline_p50_us=event["baseline_p50_us"],
            error=event["error"],
            final=event["final"],
        )

    def _lose(self, problem: Problem, candidate: Candidate, status: str, reason: str) -> None:
        """Record a candidate that took its gang along."""
        assert self._environment is not None
        variant = get_variant(candidate.op, candidate.variant)
        self._add(
            TrialRecord(
                problem=problem,
                environment=self._environment,
                variant=variant.name,
                config=candidate.config_dict,
                run_id=self._run_id,
                numerics=variant.numerics,
                source_hash=kernels.source_hash(variant),
                status="hung" if status == "hung" else "crashed",
                reason=reason,
            )
        )
        self._flush()
        self._tell()

    def _add(self, record: TrialRecord) -> None:
        self._records[record.problem].append(record)
        self._pending.append(record)
        self._tally.tried.add((record.problem.digest, record.candidate))
        if record.status == "infeasible":
            return
        self._tally.trials += 1
        if record.status in FAILED:
            self._tally.failures[record.status] += 1
        if record.status in ("hung", "crashed"):
            self._tally.lost_gangs[record.variant] += 1

    def _flush(self) -> None:
        if self._pending:
            self._database.record(self._pending)
            self._pending = []

    def _compile_ahead(self, limits: Limits) -> None:
        if self._pool is None or self._environment is None:
            return
        job = Job(problems=(), settings=self._settings, dropped=self._dropped())
        requests: dict[Any, None] = {}
        for problem in self._problems:
            allowed = search_space(problem, limits, job)
            first = [candidate for candidate in default_candidates(problem, limits) if candidate in set(allowed)]
            odd = odd_problems(get_op(problem.op), problem)  # checks launch these too
            for candidate in [*first, *allowed]:
                variant = get_variant(candidate.op, candidate.variant)
                for shape in (problem, *odd):
                    requests.update(dict.fromkeys(variant.compile_requests(shape, candidate.config_dict)))
            if len(requests) >= _MAX_COMPILE_AHEAD:
                break
        wanted = list(requests)[:_MAX_COMPILE_AHEAD]
        self._compiled_ahead += self._pool.submit(wanted, self._environment.compute_capability)

    def _tell(self) -> None:
        if self._progress is None:
            return
        problem, candidate, final = self._current
        result = self._result(problem) if problem is not None else None
        self._progress(
            Progress(
                problems=len(self._problems),
                problems_done=len(self._tally.problems_done),
                trials=self._tally.trials,
                trials_planned=self._planned,
                problem=problem,
                candidate=candidate,
                final=final,
                best_us=result.best.latency_p50_us if result and result.best else None,
                library_us=result.library_us if result else None,
                failures=dict(self._tally.failures),
                gangs=self._supervisor.num_gangs,
                elapsed_s=time.monotonic() - self._begin,
            )
        )

    def _result(self, problem: Problem) -> ProblemResult:
        return summarise_problem(problem, [r for r in self._records[problem] if r.environment == self._environment])


def _candidate(event: dict[str, Any]) -> Candidate:
    data = event["candidate"]
    return Candidate.of(data["op"], data["variant"], data["config"])


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
