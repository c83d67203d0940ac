"""Do the stored winners still win? Times them again beside the library, and says what has drifted."""

from __future__ import annotations

import importlib
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Literal

from tunedcomm import kernels
from tunedcomm.db.layers import Layer, load_snapshot
from tunedcomm.db.records import TrialRecord
from tunedcomm.db.store import Database
from tunedcomm.errors import TuningError
from tunedcomm.hardware import Environment
from tunedcomm.spec import Limits, Mode, Problem, get_variant, variants
from tunedcomm.tuner.commands import Outcome, Row
from tunedcomm.tuner.compile_ahead import compile_ahead
from tunedcomm.tuner.gang.supervisor import GangState, Supervisor
from tunedcomm.tuner.job import Settings
from tunedcomm.tuner.measure.compile_pool import CompilePool, num_workers
from tunedcomm.tuner.outcome import GangProgress, Progress
from tunedcomm.tuner.plan import SweepSpec, gang_devices, resolve_machine
from tunedcomm.tuner.recheck import Recheck, Work
from tunedcomm.tuner.tally import Tally
from tunedcomm.tuner.verdict import Verified, judge
from tunedcomm.tuner.winners import Stored, candidates_to_measure, stored_winners

__all__ = ["VerifyOutcome", "VerifySpec", "verify"]

_PROGRESS_S = 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifySpec:
    """What to time again.

    Attributes:
        ops, dtypes, modes: only problems of these; any where empty.
        limit: at most so many problems, those first whose winner is most in doubt: measured under other software, then
            longest ago.
        tolerance: how much slower a winner may have become, by itself and against the library, besides the noise, 0.1
            for 10 %.
        layers: databases that the winners are read from; None reads those that dispatch reads.
        world_size: ranks; all GPUs, or 2 on the host.
        backend: `cuda` where there are at least two GPUs, else `host`.
        gangs: how many groups of ranks measure side by side; None fills the machine's GPUs.
        seed: of the inputs.
        start_timeout_s, compile_timeout_s, trial_timeout_s: a gang silent for longer in that step is killed.
        plugins: modules that register further ops and variants.
        command: what to note as the run's command line.
        replay, replay_trial_s: see `SweepSpec`.
    """

    ops: tuple[str, ...] = ()
    dtypes: tuple[str, ...] = ()
    modes: tuple[Mode, ...] = ()
    limit: int | None = None
    tolerance: float = 0.1
    layers: Sequence[Layer] | None = None
    world_size: int | None = None
    backend: Literal["cuda", "host"] | None = None
    gangs: int | None = None
    seed: int = 0
    start_timeout_s: float | None = None
    compile_timeout_s: float | None = None
    trial_timeout_s: float | None = None
    plugins: tuple[str, ...] = ()
    command: str = ""
    replay: str | None = None
    replay_trial_s: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.tolerance < 10:
            raise ValueError(f"tolerance must be a share from 0 to 10, e.g. 0.1 for 10 %, got {self.tolerance}")
        if self.limit is not None and self.limit < 1:
            raise ValueError(f"limit must be at least 1, got {self.limit}")

    @property
    def machine(self) -> SweepSpec:
        """The part that a sweep has too."""
        return SweepSpec(
            op="",
            world_size=self.world_size,
            backend=self.backend,
            gangs=self.gangs,
            seed=self.seed,
            start_timeout_s=self.start_timeout_s,
            compile_timeout_s=self.compile_timeout_s,
            trial_timeout_s=self.trial_timeout_s,
            plugins=self.plugins,
            replay=self.replay,
            replay_trial_s=self.replay_trial_s,
        )

    def wants(self, problem: Problem) -> bool:
        """True if the problem is among those that are meant."""
        asked = ((self.ops, problem.op), (self.dtypes, problem.dtype), (self.modes, problem.mode))
        return all(not allowed or value in allowed for allowed, value in asked)


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyOutcome:
    """What came of it.

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
    kernels.discover()
    for plugin in spec.plugins:
        try:
            importlib.import_module(plugin)
        except ImportError as error:
            raise TuningError(f"plugin module {plugin!r} cannot be imported: {error}") from error
    with _Verify(spec, resolve_machine(spec.machine), database, progress) as running:
        return running.run()


def _source_hash(op: str, variant: str) -> str | None:
    found = variants(op).get(variant)
    return None if found is None else kernels.source_hash(found)


class _Verify:
    """A verification under way."""

    def __init__(
        self,
        spec: VerifySpec,
        settings: Settings,
        database: Database | None,
        progress: Callable[[Progress], None] | None,
    ) -> None:
        self._spec, self._settings = spec, settings
        self._database, self._progress = database, progress
        self._begin = time.monotonic()
        self._told_s = -_PROGRESS_S
        self._tally = Tally()
        self._stored: dict[Problem, Stored] = {}
        self._records: list[TrialRecord] = []
        self._num_flushed = 0
        self._run_id: int | None = None
        self._recheck = Recheck(
            settings,
            source_hash=lambda op, variant: kernels.source_hash(get_variant(op, variant)),
            on_row=self._add,
            choose=self._choose,
        )
        self._supervisor = Supervisor(
            self._recheck, settings, gang_devices(settings), on_outcome=self._bound, on_turn=self._turn
        )
        self._stack = ExitStack()
        self._pool: CompilePool | None = None
        self._ahead: Iterator[int] = iter(())

    def __enter__(self) -> _Verify:
        if self._settings.backend == "cuda" and self._settings.replay is None:
            self._pool = self._stack.enter_context(CompilePool(num_workers()))
        return self

    def __exit__(self, *_: object) -> None:
        """Store what was measured, and that the run is over."""
        self._stack.close()
        self._flush()
        if self._database is not None and self._run_id is not None:
            self._database.finish_run(self._run_id)

    def run(self) -> VerifyOutcome:
        """Run to the end and judge."""
        self._supervisor.run()
        self._flush()
        self._tell()
        results = [
            judge(winner, self._records, tolerance=self._spec.tolerance)
            for stored in self._stored.values()
            for winner in stored.winners
        ]
        return VerifyOutcome(
            environment=self._recheck.environment,
            world_size=self._settings.world_size,
            results=tuple(results),
            run_id=self._run_id,
            num_trials=self._tally.trials,
            num_gangs=self._supervisor.num_gangs,
            seconds=self._elapsed_s,
        )

    @property
    def _elapsed_s(self) -> float:
        return time.monotonic() - self._begin

    # What coordinator and supervisor call

    def _choose(self, environment: Environment, limits: Limits) -> Work:
        spec = self._spec
        snapshot = load_snapshot(
            environment, self._settings.world_size, layers=spec.layers, strict=spec.layers is not None
        )
        found = stored_winners(snapshot, limits, _source_hash, spec.wants)
        first = sorted(found, key=lambda problem: (found[problem].age, problem))[: spec.limit]
        self._stored = {problem: found[problem] for problem in sorted(first)}
        if self._database is not None and self._stored:
            self._run_id = self._database.start_run(
                command=spec.command,
                seed=spec.seed,
                budget=f"winners of {len(self._stored)} problems",
                host=socket.gethostname(),
            )
        winners = [winner for stored in self._stored.values() for winner in stored.winners]
        chosen = candidates_to_measure(self._stored)
        if self._pool is not None:
            compute_capability = environment.compute_capability
            self._ahead = compile_ahead(self._pool, chosen, self._settings, limits, compute_capability, chosen)
        return Work(chosen, frozenset((winner.problem, winner.candidate) for winner in winners))

    def _add(self, row: Row) -> None:
        environment = self._recheck.environment
        assert environment is not None
        self._records.append(TrialRecord(**row.fields(), environment=environment, run_id=self._run_id))
        self._tally.add(row, self._elapsed_s)

    def _bound(self, slot: int, outcome: Outcome) -> None:
        del slot
        self._tally.bound(outcome, self._elapsed_s)

    def _turn(self) -> None:
        self._flush()
        next(self._ahead, None)  # a problem at a time, as gangs have come up
        up = sum(state.step not in ("starting", "ending") for state in self._supervisor.states())
        self._tally.pass_time(self._elapsed_s, up)
        if self._elapsed_s - self._told_s >= _PROGRESS_S:
            self._tell()

    def _flush(self) -> None:
        fresh = self._records[self._num_flushed :]
        if fresh and self._database is not None:
            self._database.record(fresh)
        self._num_flushed += len(fresh)

    # Telling

    def _tell(self) -> None:
        self._told_s = self._elapsed_s
        if self._progress is None:
            return
        gangs = tuple(map(self._gang_progress, self._supervisor.states()))
        planned = {problem: self._recheck.planned(problem) for problem in self._stored}
        busy = {gang.problem for gang in gangs}
        self._progress(
            Progress(
                problems=len(planned),
                problems_done=sum(not count and problem not in busy for problem, count in planned.items()),
                trials=self._tally.trials,
                trials_planned=sum(planned.values()),
                failures=dict(self._tally.failures),
                gangs=gangs,
                num_gangs=self._supervisor.num_gangs,
                elapsed_s=self._elapsed_s,
                seconds_left=self._tally.estimate_s((), sum(planned.values()), 0, self._elapsed_s),
                num_compiled=self._tally.num_compiled,
                bind_share=self._tally.bind_share,
            )
        )

    def _gang_progress(self, state: GangState) -> GangProgress:
        command = state.command
        if command is None or command.problem is None:
            return GangProgress(slot=state.slot, step=state.step)
        winner = self._stored[command.problem].winners[0]
        return GangProgress(
            slot=state.slot,
            step=state.step,
            problem=command.problem,
            candidate=command.candidate,
            final=True,
            best_us=winner.latency_us,
            library_us=winner.library_us,
        )
