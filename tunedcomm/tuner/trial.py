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
from tunedcomm.spec import Candidate, OpSpec, Problem, get_op, get_variant
from tunedcomm.tuner import check, measure
from tunedcomm.tuner.channel import write_failure
from tunedcomm.tuner.check import Case, Judgement, Launch, Tensors
from tunedcomm.tuner.commands import LOST, Command, Latency, Outcome
from tunedcomm.tuner.compile_count import CompileCount
from tunedcomm.tuner.gang import Gang, Trouble, Verdict
from tunedcomm.tuner.job import Settings, candidate_to_dict
from tunedcomm.tuner.measure import Contender
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
    places = traceback.extract_tb(error.__traceback__)
    where = f" at {Path(places[-1].filename).name}:{places[-1].lineno}" if places else ""
    return f"{_sentence(error)} (bind raised it, not the compiler{where})"


class Bench:
    """One rank's tensors for one problem, used for every candidate of it.

    Benches that live at the same time have different slots.
    """

    def __init__(
        self, gang: Gang, problem: Problem, seed: int, stream: torch.cuda.Stream | None, *, slot: int = 0
    ) -> None:
        self.problem = problem
        self.op: OpSpec = get_op(problem.op)
        self.contender: Contender | None = None
        self.baseline: Candidate | None = None
        self.calls = 0
        self._gang = gang
        self._seed = seed
        self._stream = stream
        self._cases: dict[tuple[str, int], Case] = {}
        self._further: tuple[Tensors, ...] | None = None
        first = self.case("random", 0)
        self.inputs: Tensors = gang.input_buffers(problem, first.inputs, slot)
        self.outputs: Tensors = self.inputs if problem.in_place else self.op.make_outputs(problem, gang.device)

    def case(self, kind: str, number: int) -> Case:
        """A case, generated once."""
        if (kind, number) not in self._cases:
            seed = self._seed + number
            self._cases[kind, number] = check.make_case(
                self.op, self.problem, self._gang.rank, kind=kind, seed=seed, device=self._gang.device
            )
        return self._cases[kind, number]

    def load(self, case: Case) -> None:
        """Put a case's inputs where launches read them, in stream order, and NaN where they write."""
        for buffer, values in zip(self.inputs, case.inputs, strict=True):
            buffer.copy_(values)
        if not self.problem.in_place:
            check.fill_sentinel(self.outputs)

    @property
    def further(self) -> tuple[Tensors, ...]:
        """Inputs that timed launches take in turn with `inputs`, holding the first random case for good."""
        if self._further is None:
            cold = self.op.cold and self.problem.input_kind == "plain"
            self._further = measure.further_turns(self.case("random", 0).inputs, cold=cold)
        return self._further

    def check(self, launch: Launch, plan: list[tuple[str, int]], *, ordered: bool) -> Judgement:
        """Launch every case of `plan` in a row, then judge them all; the first wrong one decides."""
        cases = [self.case(kind, number) for kind, number in plan]
        handle = self._stream.cuda_stream if self._stream is not None else 0
        results = []
        for step, case in enumerate(cases):
            self.load(case)
            check.rank_delay(self._seed, self._gang.rank, step, self._gang.device)
            launch(self.inputs, self.outputs, handle)
            results.append(tuple(output.clone() for output in self.outputs))
        self._gang.synchronize()
        self._gang.communicator.check_peers()
        return self._judge(list(zip(cases, results, strict=True)), ordered=ordered)

    def check_replay(self, contender: Contender, *, ordered: bool) -> Judgement:
        """Judge what a captured contender leaves behind after a replay."""
        case = self.case("random", 0)
        self.load(case)
        contender.run()
        self._gang.synchronize()
        self._gang.communicator.check_peers()
        return self._judge([(case, self.outputs)], ordered=ordered)

    def _judge(self, launched: list[tuple[Case, Tensors]], *, ordered: bool) -> Judgement:
        worst = 0.0
        for number, (case, result) in enumerate(launched, start=1):
            found = check.judge(self.op, self.problem, case, result, ordered=ordered)
            if not found.right:
                reason = f"wrong at launch {number} of shape {self.problem.shape}, {found.reason}"
                return Judgement(found.error, reason)
            worst = max(worst, found.error)
        return Judgement(worst)


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
        self._odd: list[Bench] | None = None
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
            bench = self._bench_for(problem)
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

    def _bench_for(self, problem: Problem) -> Bench:
        if self._bench is None or self._bench.problem != problem:
            self._bench = self._odd = None  # before the next one takes memory
            self._bench = Bench(self._gang, problem, self._settings.seed, self._stream)
        return self._bench

    def _odd_benches(self, bench: Bench) -> list[Bench]:
        if self._odd is None:
            shapes = check.odd_problems(bench.op, bench.problem)
            seed = self._settings.seed
            self._odd = [Bench(self._gang, p, seed, self._stream, slot=1 + i) for i, p in enumerate(shapes)]
        return self._odd

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
        odd = self._odd_benches(bench) if full else []
        odd = [b for b in odd if variant.infeasible(b.problem, candidate.config_dict, communicator.limits) is None]
        begin, before = time.perf_counter(), self._compiles.num_compiled
        try:
            launch = communicator.bind(bench.problem, candidate)
            bound = _Bound(launch, tuple((b, communicator.bind(b.problem, candidate)) for b in odd))
        except InfeasibleError as error:
            trouble, reason = Trouble.INFEASIBLE, str(error)
        except Exception as error:  # noqa: BLE001 - whatever the compiler raises is this candidate's outcome
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
            write_failure(self._gang.folder, self._gang.rank, _sentence(error))
            return None, Trouble.CRASHED, _sentence(error)

    def _check(self, bench: Bench, bound: _Bound, *, ordered: bool, full: bool) -> Verdict:
        def action() -> Judgement:
            found = bench.check(bound.launch, check.plan_cases(bench.problem, full=full), ordered=ordered)
            for index, (odd, launch) in enumerate(bound.odd):
                more = odd.check(launch, [("random" if index else "integers", 0)], ordered=ordered)
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
        if not verdict.trouble and self._captured(bench):
            verdict = self._check_replay(bench, made[0], ordered=ordered)
        if verdict.trouble:
            return Outcome(status=verdict.trouble.status, reason=verdict.reason, error=error)
        # From numbers that every rank holds: the gathered look, and what rank 0 broadcast.
        rounds = rounds_after_look(command, latencies[0].p50_us, self._settings)
        return self._more(bench, made[0], rounds, error) if rounds else pruned(command, latencies[0], error)

    def _captured(self, bench: Bench) -> bool:
        return self._stream is not None and bench.problem.mode == "graph" and not bench.problem.in_place

    def _check_replay(self, bench: Bench, contender: Contender, *, ordered: bool) -> Verdict:
        found, trouble, reason = self._guard(lambda: bench.check_replay(contender, ordered=ordered))
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
