"""One trial: bind, vote, check, vote, time. Every rank of the gang runs this in step."""

from __future__ import annotations

import contextlib
import math
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import torch

from tunedcomm.errors import InfeasibleError, PeerTimeoutError
from tunedcomm.spec import Candidate, OpSpec, Problem, get_op, get_variant
from tunedcomm.tuner.gang.group import Gang, Trouble, Vote
from tunedcomm.tuner.gang.protocol import (
    LOST,
    TOO_LARGE,
    Command,
    Latency,
    Settings,
    TrialResult,
    pruned,
    rounds_after_look,
)
from tunedcomm.tuner.measure import correctness as check
from tunedcomm.tuner.measure import timing as measure
from tunedcomm.tuner.measure.correctness import Case, Guarded, Judgement, Launch, Tensors
from tunedcomm.tuner.measure.timing import Contender


class CompileCount:
    """Counts the kernels that Triton compiles from now on, without failures, besides whoever listened before."""

    def __init__(self) -> None:
        from triton import knobs

        self.num_compiled = 0
        self._before: Callable[..., None] | None = knobs.compilation.listener
        knobs.compilation.listener = self._hear

    def _hear(self, *, src: Any, metadata: Any, metadata_group: Any, times: Any, cache_hit: bool) -> None:
        self.num_compiled += not cache_hit
        if self._before is not None:
            self._before(src=src, metadata=metadata, metadata_group=metadata_group, times=times, cache_hit=cache_hit)


# (kind, number) of the cases to launch.
Plan: TypeAlias = list[tuple[str, int]]
_SLOT_OF_SECOND = 3  # behind those of the odd shapes
# Launches of a candidate that seems to leak: it does if every batch takes more memory.
_LEAK_BATCHES, _LEAK_LAUNCHES = 5, 4


def is_out_of_memory(error: BaseException) -> bool:
    """True if there was no memory for a tensor, on the GPU or on the host."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error)


class Bench:
    """One rank's tensors for one problem, used for every candidate of it.

    Benches that live at the same time have different slots. Tensors are made by `make_cases`, `make_buffers` and
    `try_room`, in this order: by then what is too large for the memory has said so, and no candidate is at work yet.
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
        self._slot = slot
        self.inputs: Tensors = ()
        self.outputs: Tensors = ()
        self._guarded: list[Guarded] = []
        self._second: tuple[Tensors, Tensors] | None = None  # inputs and outputs of every other launch of a graph

    def make_cases(self, plan: Plan) -> None:
        """Generate what the inputs hold and what must come out."""
        for kind, number in [("random", 0), *plan]:
            self.case(kind, number)

    def make_buffers(self, *, timed: bool) -> None:
        """Allocate what launches read and write, once; collective where peers address the inputs."""
        if not self.inputs:
            self.inputs, self.outputs = self._buffers(self._slot)
        if timed and self._second is None and self.problem.mode == "graph" and self.problem.nbytes <= check.LARGE_BYTES:
            self._second = self._buffers(_SLOT_OF_SECOND)

    def _buffers(self, slot: int) -> tuple[Tensors, Tensors]:
        like, shape = self.case("random", 0).inputs, f"of shape {self.problem.shape}"
        sizes = [tensor.nbytes + check.GUARD_BYTES for tensor in like]
        rooms = self._gang.symmetric_rooms(self.problem, sizes, slot)
        inputs = [
            check.guard(tensor, f"input {number} {shape}", is_input=True, room=room)
            for number, (tensor, room) in enumerate(zip(like, rooms, strict=True))
        ]
        made = () if self.problem.in_place else self.op.make_outputs(self.problem, self._gang.device)
        outputs = [check.guard(t, f"output {number} {shape}", is_input=False) for number, t in enumerate(made)]
        self._guarded += [*inputs, *outputs]
        given = tuple(one.tensor for one in inputs)
        return given, given if self.problem.in_place else tuple(one.tensor for one in outputs)

    def find_damage(self) -> str:
        """Say what launches wrote next to their tensors since the last call; empty if nothing."""
        return check.find_damage(self._guarded)

    def try_room(self, plan: Plan, *, timed: bool) -> None:
        """Take once the memory that a check, and the timing, take beside all that: right results are judged."""
        cases = [self.case(kind, number) for kind, number in plan]
        results = [tuple(e.to(o.dtype) for e, o in zip(c.expected, self.outputs, strict=False)) for c in cases]
        self._judge(list(zip(cases, results, strict=True)), ordered=False)
        check.are_kept(cases[-1], self.inputs)
        if timed:
            assert self.further is not None

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
        self._put(case, self.inputs, self.outputs)

    def _put(self, case: Case, inputs: Tensors, outputs: Tensors) -> None:
        for buffer, values in zip(inputs, case.inputs, strict=True):
            buffer.copy_(values)
        if not self.problem.in_place:
            check.fill_sentinel(outputs)

    @property
    def further(self) -> tuple[Tensors, ...]:
        """Inputs that timed launches take in turn with `inputs`, holding the first random case for good."""
        if self._further is None:
            cold = self.op.cold and self.problem.input_kind == "plain"
            self._further = measure.further_turns(self.case("random", 0).inputs, cold=cold)
        return self._further

    @property
    def _handle(self) -> int:
        return self._stream.cuda_stream if self._stream is not None else 0

    def repeat(self, launch: Launch, count: int) -> None:
        """Launch with the inputs as they are, and wait."""
        for _ in range(count):
            launch(self.inputs, self.outputs, self._handle)
        self._gang.synchronize()

    def check(self, launch: Launch, plan: Plan, *, ordered: bool) -> Judgement:
        """Launch every case of `plan` in a row, then judge them all; the first wrong one decides."""
        cases = [self.case(kind, number) for kind, number in plan]
        handle, results = self._handle, []
        for step, case in enumerate(cases):
            self.load(case)
            check.rank_delay(self._seed, self._gang.rank, step, self._gang.device)
            launch(self.inputs, self.outputs, handle)
            results.append(tuple(output.clone() for output in self.outputs))
        found = self._judge_after(list(zip(cases, results, strict=True)), ordered=ordered)
        if found.right and not self.problem.in_place and not check.are_kept(cases[-1], self.inputs):
            reason = f"a launch of shape {self.problem.shape} changed its inputs, which it may only read"
            return Judgement(found.error, reason)
        return found

    def check_replay(self, contender: Contender, launch: Launch, *, ordered: bool) -> Judgement:
        """Judge what a captured contender leaves behind, and launches in a graph of which no two in a row are alike.

        All that a contender launches reads the same inputs, so it may well take what the launch before it left.
        """
        found = Judgement(0.0)
        if not self.problem.in_place:
            case = self.case("random", 0)
            self.load(case)
            contender.run()
            found = self._judge_after([(case, self.outputs)], ordered=ordered)
        if self._second is None or self._stream is None or not found.right:
            return found
        stream, turns = self._stream, [(self.inputs, self.outputs), self._second]

        def run() -> None:
            for inputs, outputs in turns * (1 if self.problem.in_place else 2):
                launch(inputs, outputs, stream.cuda_stream)

        graph = measure.capture(run, stream)
        cases = [self.case("random", 0), self.case("integers", 0)]
        for case, (inputs, outputs) in zip(cases, turns, strict=True):
            self._put(case, inputs, outputs)
        graph.replay()
        return self._judge_after([(c, outputs) for c, (_, outputs) in zip(cases, turns, strict=True)], ordered=ordered)

    def _judge_after(self, launched: list[tuple[Case, Tensors]], *, ordered: bool) -> Judgement:
        self._gang.synchronize()
        self._gang.communicator.check_peers()
        return self._judge(launched, ordered=ordered)

    def _judge(self, launched: list[tuple[Case, Tensors]], *, ordered: bool) -> Judgement:
        worst = 0.0
        for number, (case, result) in enumerate(launched, start=1):
            found = check.judge(self.op, self.problem, case, result, ordered=ordered)
            if not found.right:
                reason = f"wrong at launch {number} of shape {self.problem.shape}, {found.reason}"
                return Judgement(found.error, reason)
            worst = max(worst, found.error)
        return Judgement(worst)


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


class _RefusedError(Exception):
    """A trial ends here, by a vote: every rank raises this at the same place."""

    def __init__(self, vote: Vote) -> None:
        super().__init__(vote.reason)
        self.vote = vote


def _accept(vote: Vote) -> Vote:
    """The vote, if it found no trouble."""
    if vote.trouble:
        raise _RefusedError(vote)
    return vote


class TrialRunner:
    """Runs a gang's trials on one rank."""

    def __init__(self, gang: Gang, settings: Settings) -> None:
        self._gang = gang
        self._settings = settings
        self._stream = _new_stream(gang.device) if gang.on_gpu else None
        self._bench: Bench | None = None
        self._odd: list[Bench] = []
        self._fits: set[bool] = set()  # for which checks, full or not, the bench is made
        self._compiles = CompileCount()
        # Of the trial under way: the error that its check found, memory taken after it, and what binding took.
        self._error: float | None = None
        self._memory_bytes = 0
        self._bind_s, self._num_compiled = 0.0, 0

    def run(self, command: Command) -> TrialResult:
        """Run one trial; the same outcome on every rank."""
        problem, candidate = command.trial
        self._error, self._bind_s, self._num_compiled = None, 0.0, 0
        with contextlib.nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
            self._report("work", command.baseline or candidate)
            try:
                bench = self._bench_for(problem, full=command.full_check)
                if command.baseline is not None and command.baseline not in (bench.baseline, candidate):
                    self._prepare_baseline(bench, command.baseline)
                self._report("trial", candidate)
                outcome = self._trial(bench, candidate, command)
            except _RefusedError as refused:
                vote = refused.vote
                outcome = TrialResult(status=vote.trouble.status, reason=vote.reason, error=self._error)
            if outcome.status not in (*LOST, TOO_LARGE):
                outcome = self._left_clean(problem, outcome)
        return replace(outcome, bind_s=self._bind_s, compiled=self._num_compiled)

    def _left_clean(self, problem: Problem, outcome: TrialResult) -> TrialResult:
        """The outcome, unless launches wrote where they may not, or left packets in an arena.

        Those would be the next candidate's wrong results, or its crash.
        """
        self._gang.synchronize()
        self._gang.barrier()
        benches = [*([] if self._bench is None else [self._bench]), *self._odd]
        faults = [damage for bench in benches if (damage := bench.find_damage())]
        workspace = self._gang.communicator.workspace
        if workspace is not None and (count := workspace.rearm(problem.mode)):
            faults.append(f"left {count} words in the arena, which a later call would take for data")
        vote = self._gang.vote(Trouble.INCORRECT if faults else Trouble.NONE, "; ".join(faults))
        if not vote.trouble:
            return outcome
        return TrialResult(status=vote.trouble.status, reason=vote.reason, error=outcome.error)

    def _report(self, event: str, candidate: Candidate) -> None:
        self._gang.report(event, candidate)

    def _bench_for(self, problem: Problem, *, full: bool) -> Bench:
        """The problem's tensors, if every rank has the memory for them.

        A vote after each step, so that no rank waits in the next one for a rank that has none.
        """
        seed = self._settings.seed
        if self._bench is None or self._bench.problem != problem:
            self._drop_bench()  # before the next one takes memory
            self._bench = Bench(self._gang, problem, seed, self._stream)
        bench = self._bench
        if full in self._fits:
            return bench
        if full:
            shapes = check.odd_problems(bench.op, problem)
            self._odd = [Bench(self._gang, p, seed, self._stream, slot=1 + i) for i, p in enumerate(shapes)]
        plans = [(bench, [*check.plan_cases(problem, full=full), check.LATE_CASE])]
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
            vote = self._try_memory(step)
            if vote.trouble:
                self._drop_bench()
                raise _RefusedError(vote)
        self._fits |= {full, False}
        return bench

    def _try_memory(self, action: Callable[[], None]) -> Vote:
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

    def _trial(self, bench: Bench, candidate: Candidate, command: Command) -> TrialResult:
        ordered = get_variant(candidate.op, candidate.variant).numerics == "ordered"
        bound = self._bind(bench, candidate, full=command.full_check)
        self._report("run", candidate)
        vote = self._check(bench, bound, ordered=ordered, full=command.full_check)
        self._error = vote.number if math.isfinite(vote.number) else None
        _accept(vote)
        self._memory_bytes = check.memory_bytes(self._gang.device)
        return self._time(bench, bound.launch, candidate, command, ordered=ordered)

    def _bind(self, bench: Bench, candidate: Candidate, *, full: bool) -> _Bound:
        """Bind on every rank and vote, before any rank launches."""
        bound: _Bound | None = None
        trouble, reason = Trouble.NONE, ""
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
        vote = self._gang.vote(trouble, reason, time.perf_counter() - begin, self._compiles.num_compiled - before)
        self._bind_s += vote.number
        self._num_compiled += vote.count
        _accept(vote)
        assert bound is not None
        return bound

    def _guard(self, action: Callable[[], T]) -> tuple[T | None, Trouble, str]:
        """Run what launches; an error becomes a ballot, and is left for the supervisor if nobody may answer."""
        try:
            return action(), Trouble.NONE, ""
        except PeerTimeoutError as error:
            return None, Trouble.HUNG, str(error)
        except Exception as error:  # noqa: BLE001 - a candidate may raise anything
            reason = _sentence(error) + _place(error, " at ")
            self._gang.report_failure(reason)
            return None, Trouble.CRASHED, reason

    def _check(self, bench: Bench, bound: _Bound, *, ordered: bool, full: bool) -> Vote:
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
        try:
            bound = self._bind(bench, baseline, full=False)
            self._report("run", baseline)
            _accept(self._check(bench, bound, ordered=False, full=False))
            self._adopt_baseline(bench, bound.launch, baseline)
        except _RefusedError as refused:
            raise RuntimeError(f"the library ran {bench.problem} before and now fails: {refused}") from None

    def _adopt_baseline(self, bench: Bench, launch: Launch, baseline: Candidate) -> None:
        """Fix the launches a round by the library's latency, and keep it as the contender to interleave with."""
        self._fix_calls(bench, launch)
        contender, trouble, reason = self._guard(lambda: self._contend(bench, launch))
        _accept(self._gang.vote(trouble, reason))
        bench.contender, bench.baseline = contender, baseline

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

    def _fix_calls(self, bench: Bench, launch: Launch) -> None:
        bench.calls = 1
        if self._stream is not None:
            bench.calls = 10
            bench.calls = measure.calls_for(self._rounds(bench, lambda: [self._contend(bench, launch)], 1, 2)[0].p50_us)

    def _rounds(
        self, bench: Bench, contenders: Callable[[], list[Contender]], count: int, rounds: int
    ) -> list[Latency]:
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
            _accept(self._gang.vote(trouble, reason))
        starts = range(1, 1 + count * rounds, rounds)
        return [measure.summarise([row[start : start + rounds] for row in everyone]) for start in starts]

    def _time(
        self, bench: Bench, launch: Launch, candidate: Candidate, command: Command, *, ordered: bool
    ) -> TrialResult:
        """Time a first look and, within reach of the best, more samples, interleaved with the library."""
        if candidate == command.baseline and bench.baseline is None:
            self._adopt_baseline(bench, launch, candidate)
        if not bench.calls:
            self._fix_calls(bench, launch)
        made: list[Contender] = []

        def first() -> list[Contender]:
            made.append(self._contend(bench, launch))
            return made

        (look,) = self._rounds(bench, first, 1, self._settings.first_rounds)
        contender = made[0]
        if self._stream is not None and bench.problem.mode == "graph":
            self._check_replay(bench, contender, launch, ordered=ordered)
        # From numbers that every rank holds: the gathered look, and the command.
        rounds = rounds_after_look(command, look.p50_us, self._settings)
        if not rounds:
            return pruned(command, look, self._error)
        contenders = [contender] if bench.contender is None else [contender, bench.contender]
        latencies = self._rounds(bench, lambda: contenders, len(contenders), rounds)
        done = (self._settings.first_rounds + rounds) * contender.calls
        more = check.launches_to_go(done, latencies[0].p50_us, final=command.final)
        self._check_late(bench, contender, launch, done, more, ordered=ordered)
        baseline_us = latencies[1].p50_us if len(latencies) > 1 else None
        return TrialResult(status="ok", latency=latencies[0], baseline_us=baseline_us, error=self._error)

    def _check_late(
        self, bench: Bench, contender: Contender, launch: Launch, done: int, more: int, *, ordered: bool
    ) -> None:
        """Check what has made `done` launches, and makes `more` first, with other inputs than those; find its leaks."""

        def action() -> Judgement:
            for _ in range(-(-more // contender.calls)):
                contender.run()
            return bench.check(launch, [check.LATE_CASE], ordered=ordered)

        found, trouble, reason = self._guard(action)
        if found is not None and not found.right:
            trouble, reason = Trouble.INCORRECT, f"after {done + more} launches that were timed: {found.reason}"
        grown = check.memory_bytes(self._gang.device) - self._memory_bytes
        vote = _accept(self._gang.vote(trouble, reason, count=max(0, grown)))
        if vote.count > check.LEAK_BYTES:
            self._find_leak(bench, launch)

    def _find_leak(self, bench: Bench, launch: Launch) -> None:
        """Refuse a candidate of which every batch of launches takes more memory; what it keeps for later is no leak."""
        total = 0
        for _ in range(_LEAK_BATCHES):
            before = check.memory_bytes(self._gang.device)
            _, trouble, reason = self._guard(lambda: bench.repeat(launch, _LEAK_LAUNCHES))
            grown = check.memory_bytes(self._gang.device) - before
            vote = _accept(self._gang.vote(trouble, reason, count=max(0, grown)))
            if vote.count < check.LEAK_BYTES // _LEAK_BATCHES:
                return
            total += vote.count
        count = _LEAK_BATCHES * _LEAK_LAUNCHES
        reason = f"leaks memory: {count} launches took {total >> 20} MiB, more in each of {_LEAK_BATCHES} batches"
        raise _RefusedError(Vote(Trouble.INCORRECT, reason))

    def _check_replay(self, bench: Bench, contender: Contender, launch: Launch, *, ordered: bool) -> None:
        found, trouble, reason = self._guard(lambda: bench.check_replay(contender, launch, ordered=ordered))
        if found is not None and not found.right:
            trouble, reason = Trouble.INCORRECT, f"replayed: {found.reason}"
        _accept(self._gang.vote(trouble, reason))


def _new_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
