"""A whole sweep: what to tune, run by gangs, stored as it comes, summed up at the end."""

from __future__ import annotations

import hashlib
import importlib
import json
import math
import os
import socket
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, fields, replace
from functools import partial
from itertools import product
from typing import Any, Literal

from tunedcomm import kernels
from tunedcomm.db.records import FAILURES, RAN, Trial, canonical_json, fastest, was_tried
from tunedcomm.db.snapshot import build_snapshot, fetch
from tunedcomm.db.store import Database
from tunedcomm.errors import TuningError
from tunedcomm.hardware import Environment, detect, num_gpu_ranks, ranks_share_a_gpu
from tunedcomm.selection.select import Registered, choose
from tunedcomm.spec import (
    ITEMSIZE,
    Candidate,
    InputKind,
    Limits,
    Mode,
    NumericsPolicy,
    Problem,
    admits,
    get_op,
    get_variant,
    variants,
)
from tunedcomm.symm.layout import limits_for
from tunedcomm.tuner.gang.protocol import FAILED, Settings, TrialResult
from tunedcomm.tuner.gang.supervisor import GangProgress, Supervisor
from tunedcomm.tuner.measure.compile_pool import CompilePool, num_workers
from tunedcomm.tuner.measure.correctness import odd_problems
from tunedcomm.tuner.search.claims import Claims
from tunedcomm.tuner.search.coordinator import Coordinator
from tunedcomm.tuner.search.knowledge import Knowledge
from tunedcomm.tuner.search.study import StudyMirror, default_candidates, interleave, journal_path, search_space


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineSpec:
    """Where and how gangs measure. Whatever is None is filled in for the machine, see `resolve_machine`.

    Attributes:
        world_size: ranks; all GPUs, or 2 on the host.
        backend: `cuda` where there are at least two GPUs, else `host`.
        gangs: how many run at once; None fills the machine's GPUs, and is one on the host.
        seed: of the search and the inputs.
        start_timeout_s, compile_timeout_s, trial_timeout_s: a gang silent for longer in that step is killed.
        peer_timeout_s: bound of the kernels' own waits.
        plugins: modules that register further ops and variants.
        command: what to note as the run's command line.
        stand_in: module and arguments that answer in the gangs' place, on a machine without GPUs; empty measures.
    """

    world_size: int | None = None
    backend: Literal["cuda", "host"] | None = None
    gangs: int | None = None
    seed: int = 0
    start_timeout_s: float | None = None
    compile_timeout_s: float | None = None
    trial_timeout_s: float | None = None
    peer_timeout_s: float | None = None
    plugins: tuple[str, ...] = ()
    command: str = ""
    stand_in: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepSpec(MachineSpec):
    """The problems to tune and the effort. Whatever is None or empty is filled in for the machine, see `resolve`.

    Attributes:
        op: the op.
        shapes: canonical shapes; the op's default ones if empty.
        dtypes: payload dtypes.
        modes: call modes; `graph` on GPUs, `eager` on the host if empty.
        reductions: of the problems; by default the op's first.
        input_kinds, in_place: further options of the problems.
        layouts: the op's first if empty.
        scalings: the usual one of each dtype if empty; of those given each dtype is tuned with what suits it.
        problems: tune exactly these instead of the product of the above.
        variants: only these variants besides the library.
        trials: most candidates a problem, stored ones counted.
        patience: end a search when its best has stood for this many trials; 0 never does.
        budget_s: seconds for the whole sweep; None is no bound.
        policy: numerics classes that are measured.
        retry: try again what failed in an earlier sweep.
        finals: measure the winners over the whole sweep at the end.
    """

    op: str
    shapes: tuple[tuple[int, ...], ...] = ()
    dtypes: tuple[str, ...] = ("bfloat16",)
    modes: tuple[Mode, ...] = ()
    reductions: tuple[str, ...] = ()
    input_kinds: tuple[InputKind, ...] = ("plain",)
    in_place: tuple[bool, ...] = (False,)
    layouts: tuple[str, ...] = ()
    scalings: tuple[str, ...] = ()
    problems: tuple[Problem, ...] = ()
    variants: tuple[str, ...] = ()
    trials: int | None = None
    patience: int | None = None
    budget_s: float | None = None
    policy: NumericsPolicy = "any"
    retry: bool = False
    finals: bool = True


def resolve(spec: SweepSpec) -> tuple[tuple[Problem, ...], Settings]:
    """Fill in what the machine decides.

    Raises:
        TuningError: the machine has too few GPUs for the world size, or for so many gangs of it.
        UnknownNameError: no such op or variant.
        ValueError: an option that the op does not have.
    """
    if spec.problems and spec.world_size is None:
        spec = replace(spec, world_size=spec.problems[0].world_size)
    settings = resolve_machine(spec)
    problems = tuple(dict.fromkeys(spec.problems or _expand(spec, settings.backend, settings.world_size)))
    for name in spec.variants:
        get_variant(spec.op, name)
    for problem in problems:
        check_problem(problem)
    if strangers := [problem for problem in problems if problem.world_size != settings.world_size]:
        raise TuningError(
            f"a sweep has one world size, {settings.world_size}; {strangers[0]} has another. Tune it by itself"
        )
    return problems, settings


def resolve_machine(spec: MachineSpec) -> Settings:
    """The part of `resolve` that asks for no op.

    Raises:
        TuningError: the machine has too few GPUs for the world size, or for so many gangs of it.
    """
    if spec.gangs is not None and spec.gangs < 1:
        raise TuningError(f"a sweep needs at least 1 gang, got {spec.gangs}")
    if spec.stand_in:
        return _settings(spec, "cuda", spec.world_size or 2, spec.gangs or 1)
    gpus = num_gpu_ranks() if spec.backend != "host" else 0
    backend: Literal["cuda", "host"] = spec.backend or ("cuda" if gpus >= 2 else "host")
    world_size = spec.world_size or (gpus if backend == "cuda" and not ranks_share_a_gpu() else 2)
    if world_size < 2 or (backend == "cuda" and world_size > gpus):
        raise TuningError(
            f"world size {world_size} cannot be tuned here: this machine has {gpus} usable GPUs and a group needs "
            "at least 2 ranks; pass --world-size with a smaller number, or --backend host for CPU ranks"
        )
    if backend == "host":  # nothing but patience bounds them
        return _settings(spec, backend, world_size, spec.gangs or 1)
    fitting = 1 if ranks_share_a_gpu() else gpus // world_size
    if spec.gangs is not None and spec.gangs > fitting:
        raise TuningError(
            f"{spec.gangs} gangs of {world_size} ranks need {spec.gangs * world_size} GPUs and this machine has {gpus} "
            f"usable ones: at most {fitting} fit; pass --gangs {fitting}, or auto"
        )
    return _settings(spec, backend, world_size, spec.gangs or fitting)


_DETECT = "import json; from tunedcomm.hardware import detect; print(json.dumps(detect(0).to_dict()))"


def environment_of(backend: Literal["cuda", "host"]) -> Environment:
    """This machine's environment, of its first GPU or of the host; leaves no GPU context in this process.

    Raises:
        TuningError: there is no GPU that can be looked at.
    """
    if backend == "host":
        return detect(None)
    done = subprocess.run([sys.executable, "-c", _DETECT], capture_output=True, text=True, check=False)
    try:
        return Environment.from_dict(json.loads(done.stdout))
    except ValueError:
        last = done.stderr.strip().rpartition("\n")[2]
        raise TuningError(f"the first GPU cannot be looked at: {last}; run `tunedcomm doctor`") from None


def gang_devices(settings: Settings) -> list[str]:
    """CUDA_VISIBLE_DEVICES of each gang: its share of the GPUs that this process may use, which no other gang has."""
    if settings.backend == "host" or settings.stand_in:
        return [""] * settings.gangs
    if ranks_share_a_gpu():
        return [os.environ.get("CUDA_VISIBLE_DEVICES") or "0"]
    visible = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    names = visible or [str(index) for index in range(settings.gangs * settings.world_size)]
    starts = range(0, settings.gangs * settings.world_size, settings.world_size)
    return [",".join(names[start : start + settings.world_size]) for start in starts]


def _expand(spec: SweepSpec, backend: Literal["cuda", "host"], world_size: int) -> tuple[Problem, ...]:
    op = get_op(spec.op)
    options = product(
        spec.dtypes,
        spec.modes or (("graph",) if backend == "cuda" else ("eager",)),
        spec.reductions or op.reductions[:1] or ("",),
        spec.input_kinds,
        spec.in_place,
        spec.layouts or op.layouts[:1],
    )
    problems = []
    for dtype, mode, reduction, input_kind, in_place, layout in options:
        allowed = op.scalings_of(dtype)
        suitable = [scaling for scaling in spec.scalings if scaling in allowed]
        for scaling in suitable or spec.scalings[:1] or allowed[:1]:
            for shape in spec.shapes or op.default_shapes(backend, ITEMSIZE[dtype]):
                problem = Problem(
                    op=op.name,
                    shape=shape,
                    dtype=dtype,
                    world_size=world_size,
                    reduction=reduction,
                    input_kind=input_kind,
                    in_place=in_place,
                    layout=layout,
                    scaling=scaling,
                    mode=mode,
                )
                problems.append(problem)
    return tuple(problems)


def check_problem(problem: Problem) -> None:
    """Refuse a problem that its op does not have.

    Raises:
        UnknownNameError: no such op.
        ValueError: an option or a shape that the op does not have.
    """
    op = get_op(problem.op)
    for name, value, allowed in (
        ("dtype", problem.dtype, op.dtypes),
        ("reduction", problem.reduction, op.reductions or ("",)),
        ("layout", problem.layout, op.layouts),
        ("scaling", problem.scaling, op.scalings_of(problem.dtype)),
    ):
        if value not in allowed:
            known = ", ".join(other or "none" for other in allowed)
            raise ValueError(f"{op.name} of {problem.dtype} has no {name} {value!r}; allowed: {known}")
    if len(problem.shape) != op.rank_of_shape:
        raise ValueError(f"shape {problem.shape} does not fit {op.name}: {op.shape_help}")
    if problem.in_place and not op.in_place:
        raise ValueError(f"{op.name} cannot overwrite its input; leave out in_place (--in-place)")
    op.check(problem)


def _settings(spec: MachineSpec, backend: Literal["cuda", "host"], world_size: int, gangs: int) -> Settings:
    """The spec's settings, and the backend's where it has none.

    Interpreted launches take about 0.1 s, so the host gets few trials, few samples of what takes long, and patient
    watchdogs.
    """
    base = Settings(backend=backend, world_size=world_size, trials=160, patience=48)
    if backend == "host":
        base = replace(
            base,
            trials=8,
            patience=0,
            first_rounds=2,
            more_rounds=8,
            final_rounds=8,
            round_budget_us=200_000.0,
            trial_timeout_s=60.0,
            peer_timeout_s=20.0,
        )
    asked: dict[str, Any] = {item.name: getattr(spec, item.name, None) for item in fields(Settings)}
    asked.update(backend=backend, world_size=world_size, gangs=gangs)
    return replace(base, **{name: value for name, value in asked.items() if value is not None})


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
        num_compiled: trials for which a rank still had to compile.
        bind_share: share of the gangs' time that went into binding, by the slowest rank, after the first 30 s of the
            sweep; None if it was over by then.
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
    """Results of a problem after the sweep.

    Attributes:
        problem: what was tuned.
        best: the trial of the candidate that dispatch takes under the default numerics policy, from the tuned database
            alone and pins aside; None if it takes none that ran.
        library_us: median of the library, from the same interleaved run as `best`.
        num_trials: candidates tried, stored ones counted.
        failures: how many of them failed, by status.
        library_failure: the library's last trial, where it failed: nothing could be compared with it.
    """

    problem: Problem
    best: Trial | None
    library_us: float | None
    num_trials: int
    failures: dict[str, int]
    library_failure: Trial | None = None

    @property
    def speedup(self) -> float | None:
        """Library over best; None where either is missing."""
        if self.best is None or self.best.latency_p50_us is None or self.library_us is None:
            return None
        return self.library_us / self.best.latency_p50_us


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepOutcome:
    """The outcome of a sweep.

    Attributes:
        run_id: of the database.
        environment: where it was measured.
        problems: results in the order of the sweep.
        reason: `done`, or `budget` if time ran out first.
        progress: where the sweep stood at its end; `trials` has the finals' too.
        dropped: variants left alone after they had cost too many gangs.
        start_s: seconds that gangs took until they were ready, in all.
        compiled_ahead: binaries handed to the compile pool.
        compile_share: the part of `bind_share` in which a rank waited for the compiler.
        num_skipped: candidates that failed in an earlier sweep, and were not tried again.
        variants: a summary of each variant that was asked for; of all if none was.
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
    def unsolved(self) -> tuple[Problem, ...]:
        """Problems without a single `ok` trial."""
        return tuple(result.problem for result in self.problems if result.best is None)


def summarise_problem(problem: Problem, records: Iterable[Trial], chosen: Candidate | None) -> ProblemResult:
    """Sum up the records of one problem in one environment, oldest first.

    `chosen` is the candidate that dispatch takes; its final counts before its search.
    """
    known = list(records)
    latest: dict[tuple[Candidate, bool], Trial] = {(r.candidate, r.final): r for r in known}
    tried = [record for (_, final), record in latest.items() if not final and was_tried(record.status)]
    ran = {r.candidate: r for r in sorted(latest.values(), key=lambda r: r.final) if r.status == "ok"}
    best = None if chosen is None else ran.get(chosen)
    library = [record for record in known if record.variant == "library"]
    library_us = next((r.latency_p50_us for r in ran.values() if r.variant == "library"), None)
    if best is not None and best.variant != "library":  # the library measured by itself is another run
        library_us = best.baseline_p50_us or library_us
    failures: Counter[str] = Counter(r.status for r in tried if r.status in FAILED)
    return ProblemResult(
        problem=problem,
        best=best,
        library_us=library_us,
        num_trials=len(tried),
        failures=dict(failures),
        library_failure=library[-1] if library and library[-1].status in FAILURES else None,
    )


# A sweep's first binds compile whatever the pool has not come to yet: what they wait says nothing about the rest.
_WARM_UP_S = 30.0


class SweepCounters:
    """Counts of this sweep alone, as `Progress` and `SweepOutcome` tell them; times are seconds since it began."""

    def __init__(self) -> None:
        self.trials = self.num_compiled = 0
        self.failures: Counter[str] = Counter()
        self._by_problem: Counter[Problem] = Counter()
        self._first_s: float | None = None
        self._gang_s = self._bind_s = self._compile_s = 0.0
        self._seen_s = _WARM_UP_S

    def add(self, trial: Trial, now: float) -> None:
        """Count a trial; an infeasible candidate is none."""
        if not was_tried(trial.status):
            return
        self.trials += 1
        self._by_problem[trial.problem] += not trial.final
        if self._first_s is None:
            self._first_s = now
        if trial.status in FAILED:
            self.failures[trial.status] += 1

    def bound(self, result: TrialResult, now: float) -> None:
        """Count what a trial that ended now had taken to bind."""
        self.num_compiled += result.compiled > 0
        if now > _WARM_UP_S:
            self._bind_s += result.bind_s
            self._compile_s += result.bind_s if result.compiled else 0.0

    def pass_time(self, now: float, num_gangs: int) -> None:
        """So many gangs were up until now."""
        if now > self._seen_s:
            self._gang_s += num_gangs * (now - self._seen_s)
            self._seen_s = now

    @property
    def bind_share(self) -> float | None:
        """Share of the gangs' time that went into binding, once they are warmed up."""
        return min(1.0, self._bind_s / self._gang_s) if self._gang_s > 0 else None

    @property
    def compile_share(self) -> float | None:
        """The part of `bind_share` in which a rank waited for the compiler."""
        return min(1.0, self._compile_s / self._gang_s) if self._gang_s > 0 else None

    def estimate_s(self, searched: Collection[Problem], planned: int, unopened: int, now: float) -> float | None:
        """Seconds that the rest may take: so many trials planned, and problems that will be like those before."""
        counts = [count for problem in searched if (count := self._by_problem[problem])]
        if self._first_s is None or self.trials < 2 or (unopened and not counts):
            return None
        trials = planned + (unopened * statistics.mean(counts) if unopened else 0)
        return trials * (now - self._first_s) / self.trials


@dataclass(frozen=True, slots=True, kw_only=True)
class VariantSummary:
    """One variant's candidates over all problems of a sweep, trials of earlier sweeps counted.

    Attributes:
        variant: its name.
        num_ran: trials that ran, fast or not.
        failures: status to how many failed with it; what is infeasible has not failed.
        firsts: the first trial of each kind of failure.
        infeasible: why it cannot run, where that holds for every problem.
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
        """True if some were tried and none runs."""
        return bool(self.failures) and not self.num_ran


def summarise_variants(records: Iterable[Trial]) -> tuple[VariantSummary, ...]:
    """Sum up trials of one environment and of the kernels as they are, by variant."""
    by_variant: dict[str, list[Trial]] = {}
    latest = {(record.problem, record.candidate): record for record in records if not record.final}
    for record in latest.values():
        by_variant.setdefault(record.variant, []).append(record)
    found = []
    for variant, mine in sorted(by_variant.items()):
        failures = Counter[str](record.status for record in mine if record.status in FAILURES)
        num_ran = sum(record.status in RAN for record in mine)
        reasons = [record.reason for record in mine if record.status == "infeasible"]
        found.append(
            VariantSummary(
                variant=variant,
                num_ran=num_ran,
                failures=dict(failures),
                firsts=tuple(next(r for r in mine if r.status == status) for status in failures),
                infeasible=reasons[0] if reasons and not failures and not num_ran else "",
            )
        )
    return tuple(found)


# Between two reports of progress.
_PROGRESS_S = 0.25


def load_variants(plugins: Iterable[str]) -> None:
    """Import the kernels and further modules that register ops and variants.

    Raises:
        TuningError: a module cannot be imported.
    """
    kernels.discover()
    for plugin in plugins:
        try:
            importlib.import_module(plugin)
        except ImportError as error:
            raise TuningError(f"plugin module {plugin!r} cannot be imported: {error}") from error


def hash_if_known(op: str, variant: str) -> str | None:
    """Hash of a variant's kernels as they are now; None if it is not registered."""
    found = variants(op).get(variant)
    return None if found is None else kernels.source_hash(found)


class Running:
    """Gangs at work for one command: their compile pool, what they store and what is told of them.

    Args:
        settings, coordinator: of the gangs, and what decides for them; its claims are closed at the end.
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
        self._settings, self._coordinator = settings, coordinator
        self._database, self._mirror = database, mirror
        self._report = progress
        self.supervisor = Supervisor(
            coordinator,
            settings,
            gang_devices(settings),
            on_result=lambda result: self.counters.bound(result, self._elapsed_s),
            on_turn=self._turn,
        )
        self.counters = SweepCounters()
        self._begin_s, self._told_s = time.monotonic(), -_PROGRESS_S
        self._pool: CompilePool | None = None
        self._ahead: Iterator[int] = iter(())
        self.num_ahead = 0  # binaries handed to the pool

    def __enter__(self) -> None:
        if self._settings.backend == "cuda" and not self._settings.stand_in:
            self._pool = CompilePool(num_workers())

    def __exit__(self, *_: object) -> None:
        """Store what was measured, and that the run is over."""
        try:
            if self._pool is not None:
                self._pool.close()
            self._flush()
            if self._database is not None and self._coordinator.run_id is not None:
                self._database.finish_run(self._coordinator.run_id)
        finally:
            if self._coordinator.claims is not None:
                self._coordinator.claims.close()

    def run(self) -> str:
        """Run gangs to the end; returns why it ended, `done` or `budget`."""
        reason = self.supervisor.run()
        self._flush()
        self._tell()
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

    # What the supervisor calls

    def _turn(self) -> None:
        """Do everything that gangs do not wait for."""
        self._flush()
        self.num_ahead += next(self._ahead, 0)  # a problem at a time: listing its binaries takes a while
        up = sum(state.step not in ("starting", "ending") for state in self.supervisor.states())
        self.counters.pass_time(self._elapsed_s, up)
        if self._elapsed_s - self._told_s >= _PROGRESS_S:
            self._tell()

    def _flush(self) -> None:
        """Store the trials that ended since the last call; what fails is tried again at the end."""
        if not (unstored := self._coordinator.unstored):
            return
        trials = [trial for trial, _ in unstored]
        if self._coordinator.claims is not None:
            self._coordinator.claims.record(trials, [claim for _, claim in unstored if claim is not None])
        elif self._database is not None:
            self._database.record(trials)
        unstored.clear()
        if self._mirror is not None:
            self._mirror.add(trials)
        for trial in trials:
            self.counters.add(trial, self._elapsed_s)

    def _tell(self) -> None:
        self._told_s = self._elapsed_s
        if self._report is not None:
            self._report(self.progress())

    def progress(self) -> Progress:
        """Where the work stands."""
        coordinator, counters, elapsed_s = self._coordinator, self.counters, self._elapsed_s
        planned = [coordinator.planned(problem) for problem in coordinator.problems]
        num_planned = sum(count or 0 for count in planned)
        estimate_s = counters.estimate_s(coordinator.searched, num_planned, planned.count(None), elapsed_s)
        bounds = [] if estimate_s is None else [estimate_s]
        bounds += [max(coordinator.seconds_left, 0.0)] if math.isfinite(coordinator.seconds_left) else []
        return Progress(
            problems=len(planned),
            problems_done=planned.count(0),
            trials=counters.trials,
            trials_planned=num_planned,
            failures=dict(counters.failures),
            gangs=tuple(self._with_latencies(gang) for gang in self.supervisor.states()),
            num_gangs=self.supervisor.num_gangs,
            elapsed_s=elapsed_s,
            seconds_left=min(bounds, default=None),
            num_compiled=counters.num_compiled,
            bind_share=counters.bind_share,
        )

    def _with_latencies(self, gang: GangProgress) -> GangProgress:
        known = self._coordinator.knowledge
        if gang.problem is None or known is None:
            return gang
        ran = [t for t in known.trials(gang.problem) if t.status == "ok" and admits("default", t.numerics)]
        best, library = fastest(ran), [trial.latency_p50_us for trial in ran if trial.variant == "library"]
        best_us = best.latency_p50_us if best is not None else None
        return replace(gang, best_us=best_us, library_us=library[-1] if library else None)


# Compiling ahead

# The first problems' come first, and later problems share most of them.
_MAX_BINARIES = 4000


def compile_ahead(
    pool: CompilePool,
    problems: Iterable[Problem],
    settings: Settings,
    limits: Limits,
    compute_capability: int,
    chosen: Mapping[Problem, Sequence[Candidate]] | None = None,
) -> Iterator[int]:
    """Hand over the binaries of one problem at each step; yields how many of them were new.

    Without `chosen`, those of all candidates that a search may try.
    """
    handed = 0
    for problem in problems:
        allowed = search_space(problem, limits, settings) if chosen is None else chosen[problem]
        first = [candidate for candidate in default_candidates(problem, limits) if candidate in set(allowed)]
        requests: dict[Any, None] = {}
        shapes = [problem, *odd_problems(get_op(problem.op), problem)]  # those of the checks too
        for candidate in [*first, *interleave(allowed)]:
            variant = get_variant(candidate.op, candidate.variant)
            for shape in shapes:
                requests.update(dict.fromkeys(variant.compile_requests(shape, candidate.config_dict)))
        fresh = pool.submit(list(requests)[: _MAX_BINARIES - handed], compute_capability)
        handed += fresh
        yield fresh
        if handed >= _MAX_BINARIES:
            return


def _chosen(
    database: Database, known: Knowledge, problems: Iterable[Problem], world_size: int
) -> dict[Problem, Candidate]:
    """The candidates that dispatch would choose from the tuned database, if nothing were pinned."""
    fetched = database.ask(partial(fetch, environment=known.environment, world_size=world_size))
    snapshot = replace(build_snapshot(known.environment, world_size, [fetched]), pins=())
    registered = Registered(known.limits, hash_if_known)
    return {problem: choose(snapshot, problem, registered).candidate for problem in problems}


def sweep(spec: SweepSpec, database: Database, progress: Callable[[Progress], None] | None = None) -> SweepOutcome:
    """Tune, and store every trial as it ends. Run again, it goes on where it stopped.

    Args:
        spec: what to tune.
        database: writable.
        progress: called a few times a second and at the end, from this thread.

    Raises:
        TuningError: the sweep could not be started, or gangs keep dying without a result.
    """
    load_variants(spec.plugins)
    problems, settings = resolve(spec)
    stored = stored_records(database, problems)
    budget = f"{spec.budget_s:g} s, " if spec.budget_s is not None else ""
    run_id = database.start_run(
        command=spec.command,
        seed=spec.seed,
        budget=f"{budget}{settings.trials} trials a problem",
        host=socket.gethostname(),
    )
    asked = spec.variants or tuple(variants(spec.op))

    def begin(known: Knowledge) -> None:
        digest = known.environment.digest
        coordinator.claims = Claims(database, digest, _source_digest, run_id=run_id, known=stored)
        running.compile_ahead(known, problems)

    coordinator = Coordinator(
        problems,
        settings,
        source_hash=hash_if_known,
        stored=stored,
        seconds_left=spec.budget_s,
        run_id=run_id,
        on_known=begin,
    )

    with closing(StudyMirror(journal_path(database))) as mirror:
        running = Running(settings, coordinator, database, progress, mirror)
        with running:
            if (here := _if_measured(problems, settings, stored)) is None:
                reason = running.run()
            else:
                coordinator.gang_ready(0, *here)
                reason = "done"
            knowledge = coordinator.knowledge
            chosen = {} if knowledge is None else _chosen(database, knowledge, problems, settings.world_size)
            trials = {problem: [] if knowledge is None else knowledge.trials(problem) for problem in problems}
            before = summarise_variants(t for t in stored if t.variant in asked and knowledge and knowledge.counts(t))
            return SweepOutcome(
                run_id=run_id,
                environment=None if knowledge is None else knowledge.environment,
                problems=tuple(summarise_problem(p, trials[p], chosen.get(p)) for p in problems),
                reason=reason,
                progress=running.progress(),
                dropped=tuple(sorted(coordinator.dropped)),
                start_s=running.supervisor.start_s,
                compiled_ahead=running.num_ahead,
                compile_share=running.counters.compile_share,
                num_skipped=0 if spec.retry else sum(f.num_failed for f in before if f.variant != "library"),
                variants=summarise_variants(t for found in trials.values() for t in found if t.variant in asked),
            )


def _if_measured(
    problems: Collection[Problem], settings: Settings, stored: Sequence[Trial]
) -> tuple[Environment, Limits] | None:
    """Where gangs would run, if nothing of the sweep is left to measure there; else None."""
    if settings.stand_in or not {trial.problem for trial in stored if trial.final}.issuperset(problems):
        return None
    environment = environment_of(settings.backend)
    limits = limits_for(environment, settings.world_size)
    asked = Coordinator(problems, settings, source_hash=hash_if_known, stored=stored)
    asked.gang_ready(0, environment, limits)
    return (environment, limits) if asked.next(0).kind == "end" else None


def stored_records(database: Database, problems: Collection[Problem]) -> list[Trial]:
    """Stored trials of these problems, in any environment, oldest first."""
    wanted, kinds = set(problems), {(problem.op, problem.world_size) for problem in problems}
    found = [trial for op, ranks in kinds for trial in database.trials(op=op, world_size=ranks)]
    return sorted((t for t in found if t.problem in wanted), key=lambda t: (t.created_at, t.id or 0))


def _source_digest(op: str) -> str:
    """Of the sources of all variants of an op."""
    sources = {variant.name: kernels.source_hash(variant) for variant in variants(op).values()}
    return hashlib.sha256(canonical_json(sources).encode()).hexdigest()
