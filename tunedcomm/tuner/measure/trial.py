"""One trial: bind, vote, check, vote, time. Every rank of the gang runs this in step."""

from __future__ import annotations

import contextlib
import math
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch

from tunedcomm.errors import InfeasibleError, PeerTimeoutError
from tunedcomm.spec import Candidate, Problem, get_variant
from tunedcomm.tuner.bench import Bench, is_out_of_memory
from tunedcomm.tuner.commands import LOST, Command, Latency, Outcome
from tunedcomm.tuner.compile_count import CompileCount
from tunedcomm.tuner.gang.group import Gang, Trouble, Verdict
from tunedcomm.tuner.gang.protocol import write_failure
from tunedcomm.tuner.job import Settings, candidate_to_dict
from tunedcomm.tuner.measure import correctness as check
from tunedcomm.tuner.measure import timing as measure
from tunedcomm.tuner.measure.correctness import Judgement, Launch
from tunedcomm.tuner.measure.timing import Contender
from tunedcomm.tuner.stages import pruned, rounds_after_look

__all__ = ["TrialRunner"]

T = TypeVar("T")

_MAX_REASON = 600


def _sentence(error: BaseException) -> str:
    text = f"{type(error).__name__}: {error}".strip()
    return text if len(text) <= _MAX_REASON else text[:_MAX_REASON] + " …"


def _bind_reason(error: BaseException) -> str:
    """What `bind` raised, and where if that was not in Triton: a mistake that is no error of the compiler."""
    cause: BaseException | None = error
    while cause is not None:
        if any(
            f.f_globals.get("__name__", "").startswith("triton.") for f, _ in traceback.walk_tb(cause.__traceback__)
        ):
            return _sentence(error)
        cause = cause.__cause__ or cause.__context__
    return f"{_sentence(error)} (bind raised it, not the compiler{_place(error, ', at ')})"


def _place(error: BaseException, before: str) -> str:
    """File and line where it was raised, in what a package brings or in ours; nothing where that is not known."""
    places = traceback.extract_tb(error.__traceback__)
    return f"{before}{Path(places[-1].filename).name}:{places[-1].lineno}" if places else ""


def _odd_plan(index: int) -> list[tuple[str, int]]:
    """The cases of the odd shape of this number."""
    return [("random" if index else "integers", 0)]


@dataclass(frozen=True, slots=True)
class _Bound:
    """A candidate bound at the problem's own shape and, for a full check, at the odd shapes next to it."""

    launch: Launch
    odd: tuple[tuple[Bench, Launch], ...]


class TrialRunner:
    """Runs a gang's trials on one rank.

    Args:
        gang: this rank's end of the gang.
        settings: how to measure.
    """

    def __init__(self, gang: Gang, settings: Settings) -> None:
        self._gang = gang
        self._settings = settings
        self._stream = _new_stream(gang.device) if gang.on_gpu else None
        self._bench: Bench | None = None
        self._odd: list[Bench] = []
        self._fits: set[bool] = set()  # for which checks, full or not, the bench is made
        self._compiles = CompileCount()
        self._bind_s, self._num_compiled = 0.0, 0

    def run(self, command: Command) -> Outcome:
        """Run one trial; the same outcome on every rank."""
        problem, candidate = command.problem, command.candidate
        assert problem is not None
        assert candidate is not None
        self._bind_s, self._num_compiled = 0.0, 0
        with contextlib.nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
            self._report("work", command.baseline or candidate)
            bench, verdict = self._bench_for(problem, full=command.full_check)
            if verdict.trouble:
                return Outcome(status=verdict.trouble.status, reason=verdict.reason)
            if command.baseline is not None and command.baseline not in (bench.baseline, candidate):
                self._prepare_baseline(bench, command.baseline)
            self._report("trial", candidate)
            outcome = self._trial(bench, candidate, command)
            if outcome.status not in LOST:
                outcome = self._left_clean(problem, outcome)
        return outcome.with_binding(self._bind_s, self._num_compiled)

    def _left_clean(self, problem: Problem, outcome: Outcome) -> Outcome:
        """The outcome, unless launches left packets in an arena: those would be the next candidate's wrong results."""
        workspace = self._gang.communicator.workspace
        if workspace is None:
            return outcome
        self._gang.synchronize()
        self._gang.barrier()
        count = workspace.rearm(problem.mode)
        reason = f"left {count} words in the arena, which a later call would take for data" if count else ""
        verdict = self._gang.vote(Trouble.INCORRECT if count else Trouble.NONE, reason)
        if not verdict.trouble:
            return outcome
        return Outcome(status=verdict.trouble.status, reason=verdict.reason, error=outcome.error)

    def _report(self, event: str, candidate: Candidate) -> None:
        self._gang.report(event, {"candidate": candidate_to_dict(candidate)})

    def _bench_for(self, problem: Problem, *, full: bool) -> tuple[Bench, Verdict]:
        """The problem's tensors; the verdict is whether every rank has the memory for them.

        A vote after each step, so that no rank waits in the next one for a rank that has none.
        """
        seed = self._settings.seed
        if self._bench is None or self._bench.problem != problem:
            self._drop_bench()  # before the next one takes memory
            self._bench = Bench(self._gang, problem, seed, self._stream)
        bench = self._bench
        if full in self._fits:
            return bench, Verdict()
        if full:
            shapes = check.odd_problems(bench.op, problem)
            self._odd = [Bench(self._gang, p, seed, self._stream, slot=1 + i) for i, p in enumerate(shapes)]
        plans = [(bench, check.plan_cases(problem, full=full))]
        plans += [(one, _odd_plan(number)) for number, one in enumerate(self._odd)]

        def make_cases() -> None:
            for one, plan in plans:
                one.make_cases(plan)

        def make_buffers() -> None:
            for one, _ in plans:
                one.make_buffers(timed=one is bench)

        def try_room() -> None:
            for one, plan in plans:
                one.try_room(plan, timed=one is bench)

        for step in (make_cases, make_buffers, try_room):
            verdict = self._try_memory(step)
            if verdict.trouble:
                self._drop_bench()
                return bench, verdict
        self._fits |= {full, False}
        return bench, Verdict()

    def _try_memory(self, action: Callable[[], None]) -> Verdict:
        trouble, reason = Trouble.NONE, ""
        try:
            action()
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            trouble, reason = Trouble.TOO_LARGE, _sentence(error)
        return self._gang.vote(trouble, reason)

    def _drop_bench(self) -> None:
        self._bench, self._odd = None, []
        self._fits.clear()
        if self._gang.on_gpu:
            torch.cuda.empty_cache()

    def _trial(self, bench: Bench, candidate: Candidate, command: Command) -> Outcome:
        ordered = get_variant(candidate.op, candidate.variant).numerics == "ordered"
        verdict, bound = self._bind(bench, candidate, full=command.full_check)
        if verdict.trouble or bound is None:
            return Outcome(status=verdict.trouble.status, reason=verdict.reason)
        self._report("run", candidate)
        verdict = self._check(bench, bound, ordered=ordered, full=command.full_check)
        error = verdict.number if math.isfinite(verdict.number) else None
        if verdict.trouble:
            return Outcome(status=verdict.trouble.status, reason=verdict.reason, error=error)
        return self._time(bench, bound.launch, candidate, command, ordered=ordered, error=error)

    def _bind(self, bench: Bench, candidate: Candidate, *, full: bool) -> tuple[Verdict, _Bound | None]:
        """Bind on every rank and vote, before any rank launches."""
        bound, trouble, reason = None, Trouble.NONE, ""
        communicator = self._gang.communicator
        variant = get_variant(candidate.op, candidate.variant)
        odd = self._odd if full else []
        odd = [
            b for b in odd if variant.infeasible_reason(b.problem, candidate.config_dict, communicator.limits) is None
        ]
        begin, before = time.perf_counter(), self._compiles.num_compiled
        try:
            launch = communicator.bind(bench.problem, candidate)
            bound = _Bound(launch, tuple((b, communicator.bind(b.problem, candidate)) for b in odd))
        except InfeasibleError as error:
            trouble, reason = Trouble.INFEASIBLE, str(error)
        except Exception as error:  # noqa: BLE001 - whatever the compiler raises is this candidate's outcome
            if is_out_of_memory(error):
                trouble, reason = Trouble.INFEASIBLE, f"no memory is left for what it binds: {_sentence(error)}"
            else:
                trouble, reason = Trouble.COMPILE_ERROR, _bind_reason(error)
        verdict = self._gang.vote(trouble, reason, time.perf_counter() - begin, self._compiles.num_compiled - before)
        self._bind_s += verdict.number
        self._num_compiled += verdict.count
        return verdict, bound

    def _guard(self, action: Callable[[], T]) -> tuple[T | None, Trouble, str]:
        """Run what launches; an error becomes a ballot, and is left for the supervisor if nobody may answer."""
        try:
            return action(), Trouble.NONE, ""
        except PeerTimeoutError as error:
            return None, Trouble.HUNG, str(error)
        except Exception as error:  # noqa: BLE001 - a candidate may raise anything
            reason = _sentence(error) + _place(error, " at ")
            write_failure(self._gang.folder, self._gang.rank, reason)
            return None, Trouble.CRASHED, reason

    def _check(self, bench: Bench, bound: _Bound, *, ordered: bool, full: bool) -> Verdict:
        def action() -> Judgement:
            found = bench.check(bound.launch, check.plan_cases(bench.problem, full=full), ordered=ordered)
            for index, (odd, launch) in enumerate(bound.odd):
                more = odd.check(launch, _odd_plan(index), ordered=ordered)
                found = Judgement(max(found.error, more.error), found.reason or more.reason)
            return found

        found, trouble, reason = self._guard(action)
        if found is None:
            return self._gang.vote(trouble, reason)
        return self._gang.vote(Trouble.NONE if found.right else Trouble.INCORRECT, found.reason, found.error)

    def _prepare_baseline(self, bench: Bench, baseline: Candidate) -> None:
        """Bind, run and capture the library, where the problem did not begin with it."""
        verdict, bound = self._bind(bench, baseline, full=False)
        if not verdict.trouble and bound is not None:
            self._report("run", baseline)
            verdict = self._check(bench, bound, ordered=False, full=False)
            if not verdict.trouble:
                verdict = self._adopt_baseline(bench, bound.launch, baseline)
        if verdict.trouble:
            raise RuntimeError(f"the library ran {bench.problem} before and now fails: {verdict.reason}")

    def _adopt_baseline(self, bench: Bench, launch: Launch, baseline: Candidate) -> Verdict:
        """Fix the launches a round by the library's latency, and keep it as the contender to interleave with."""
        verdict = self._fix_calls(bench, launch)
        if verdict.trouble:
            return verdict
        contender, trouble, reason = self._guard(lambda: self._contend(bench, launch))
        verdict = self._gang.vote(trouble, reason)
        if not verdict.trouble:
            bench.contender, bench.baseline = contender, baseline
        return verdict

    def _contend(self, bench: Bench, launch: Launch) -> Contender:
        return measure.contend(
            launch,
            bench.inputs,
            bench.outputs,
            calls=bench.calls,
            graph=bench.problem.mode == "graph",
            stream=self._stream,
            further=bench.further,
        )

    def _fix_calls(self, bench: Bench, launch: Launch) -> Verdict:
        bench.calls = 1
        if self._stream is None:
            return Verdict()
        bench.calls = 10
        verdict, latencies = self._rounds(bench, lambda: [self._contend(bench, launch)], 1, 2)
        if not verdict.trouble:
            bench.calls = measure.calls_for(latencies[0].p50_us)
        return verdict

    def _rounds(
        self, bench: Bench, contenders: Callable[[], list[Contender]], count: int, rounds: int
    ) -> tuple[Verdict, list[Latency]]:
        """Time `count` contenders and exchange the times: the latencies are the same on every rank."""

        def action() -> list[list[float]]:
            bench.load(bench.case("random", 0))
            times = measure.take_rounds(self._gang, contenders(), rounds, self._stream)
            self._gang.communicator.check_peers()
            return times

        times, trouble, reason = self._guard(action)
        flat = [us for row in times for us in row] if times else [0.0] * (count * rounds)
        everyone = self._gang.gather([float(trouble), *flat])
        if any(row[0] for row in everyone):
            return self._gang.vote(trouble, reason), []
        starts = range(1, 1 + count * rounds, rounds)
        return Verdict(), [measure.summarise([row[start : start + rounds] for row in everyone]) for start in starts]

    def _time(
        self,
        bench: Bench,
        launch: Launch,
        candidate: Candidate,
        command: Command,
        *,
        ordered: bool,
        error: float | None,
    ) -> Outcome:
        if candidate == command.baseline and bench.baseline is None:
            verdict = self._adopt_baseline(bench, launch, candidate)
            if verdict.trouble:
                return Outcome(status=verdict.trouble.status, reason=verdict.reason, error=error)
        if not bench.calls:
            self._fix_calls(bench, launch)
        made: list[Contender] = []

        def first() -> list[Contender]:
            made.append(self._contend(bench, launch))
            return made

        verdict, latencies = self._rounds(bench, first, 1, self._settings.first_rounds)
        if not verdict.trouble and self._stream is not None and bench.problem.mode == "graph":
            verdict = self._check_replay(bench, made[0], launch, ordered=ordered)
        if verdict.trouble:
            return Outcome(status=verdict.trouble.status, reason=verdict.reason, error=error)
        # From numbers that every rank holds: the gathered look, and what rank 0 broadcast.
        rounds = rounds_after_look(command, latencies[0].p50_us, self._settings)
        return self._more(bench, made[0], rounds, error) if rounds else pruned(command, latencies[0], error)

    def _check_replay(self, bench: Bench, contender: Contender, launch: Launch, *, ordered: bool) -> Verdict:
        found, trouble, reason = self._guard(lambda: bench.check_replay(contender, launch, ordered=ordered))
        if found is None:
            return self._gang.vote(trouble, reason)
        reason = found.reason and f"replayed: {found.reason}"
        return self._gang.vote(Trouble.NONE if found.right else Trouble.INCORRECT, reason, found.error)

    def _more(self, bench: Bench, contender: Contender, rounds: int, error: float | None) -> Outcome:
        """More samples, interleaved with the library."""
        contenders = [contender] if bench.contender is None else [contender, bench.contender]
        verdict, latencies = self._rounds(bench, lambda: contenders, len(contenders), rounds)
        if verdict.trouble:
            return Outcome(status=verdict.trouble.status, reason=verdict.reason, error=error)
        baseline_us = latencies[1].p50_us if len(latencies) > 1 else None
        return Outcome(status="ok", latency=latencies[0], baseline_us=baseline_us, error=error)


def _new_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
