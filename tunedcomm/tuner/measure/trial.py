"""One trial: bind, vote, check, vote, time. Every rank of the gang runs this in step."""

from __future__ import annotations

import contextlib
import math
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import torch

from tunedcomm.errors import InfeasibleError, PeerTimeoutError
from tunedcomm.spec import Candidate, OpSpec, Problem, get_op, get_variant
from tunedcomm.tuner.gang.group import Gang, Trouble, Vote, combine
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

    def close(self) -> None:
        """Count no more."""
        from triton import knobs

        knobs.compilation.listener = self._before

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
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or "DefaultCPUAllocator" in str(error)


class Bench:
    """One rank's tensors for one problem, used for every candidate of it.

    Benches that live at the same time have different slots; the one at slot 0 is timed, too. Tensors are made by
    `make_cases`, `make_buffers` and `try_room`, in this order: by then what is too large for the memory has said so,
    and no candidate is at work yet.
    """

    def __init__(
        self, gang: Gang, problem: Problem, seed: int, stream: torch.cuda.Stream | None, *, slot: int = 0
    ) -> None:
        self.problem = problem
        self.op: OpSpec = get_op(problem.op)
        self.contender: Contender | None = None
        self.baseline: Candidate | None = None
        self.baseline_us = 0.0  # at its first look
        self.calls = 0
        self.inputs: Tensors = ()
        self.outputs: Tensors = ()
        self.further: tuple[Tensors, ...] = ()  # that timed launches take in turn with `inputs`, all of the first case
        self.guarded: list[Guarded] = []
        self._gang, self._seed, self._stream, self._slot = gang, seed, stream, slot
        self._handle = stream.cuda_stream if stream is not None else 0
        self._cases: dict[tuple[str, int], Case] = {}
        self._second: tuple[Tensors, Tensors] | None = None  # inputs and outputs of every other launch of a graph

    def make_cases(self, plan: Plan) -> None:
        """Generate what the inputs hold and what must come out."""
        for kind, number in [("random", 0), *plan]:
            self.case(kind, number)

    def make_buffers(self) -> None:
        """Allocate what launches read and write, once; collective where peers address the inputs."""
        if self.inputs:
            return
        self.inputs, self.outputs = self._buffers(self._slot)
        if self._slot == 0 and self.problem.mode == "graph" and self.problem.nbytes <= check.LARGE_BYTES:
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
        self.guarded += [*inputs, *outputs]
        given = tuple(one.tensor for one in inputs)
        return given, given if self.problem.in_place else tuple(one.tensor for one in outputs)

    def try_room(self, plan: Plan) -> None:
        """Take once the memory that a check, and the timing, take beside all that: right results are judged."""
        cases = [self.case(kind, number) for kind, number in plan]
        results = [tuple(e.to(o.dtype) for e, o in zip(c.expected, self.outputs, strict=False)) for c in cases]
        self._judge(list(zip(cases, results, strict=True)), ordered=False)
        check.are_kept(cases[-1], self.inputs)
        if self._slot == 0 and not self.further:
            cold = self.op.cold and self.problem.input_kind == "plain"
            self.further = measure.further_turns(self.case("random", 0).inputs, cold=cold)

    def case(self, kind: str, number: int) -> Case:
        """A case, generated once."""
        if (kind, number) not in self._cases:
            seed = self._seed + number
            self._cases[kind, number] = check.make_case(
                self.op, self.problem, self._gang.rank, kind=kind, seed=seed, device=self._gang.device
            )
        return self._cases[kind, number]

    def load(self, case: Case, buffers: tuple[Tensors, Tensors] | None = None) -> None:
        """Put a case's inputs where launches read them, in stream order, and NaN where they write."""
        inputs, outputs = buffers or (self.inputs, self.outputs)
        for buffer, values in zip(inputs, case.inputs, strict=True):
            buffer.copy_(values)
        if not self.problem.in_place:
            check.fill_sentinel(outputs)

    def repeat(self, launch: Launch, count: int) -> None:
        """Launch with the inputs as they are, and wait."""
        for _ in range(count):
            launch(self.inputs, self.outputs, self._handle)
        self._gang.synchronize()

    def check(self, launch: Launch, plan: Plan, *, ordered: bool) -> Judgement:
        """Launch every case of `plan` in a row, then judge them all; the first wrong one decides."""
        cases = [self.case(kind, number) for kind, number in plan]
        results = []
        for step, case in enumerate(cases):
            self.load(case)
            check.rank_delay(self._seed, self._gang.rank, step, self._gang.device)
            launch(self.inputs, self.outputs, self._handle)
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

        cases = [self.case("random", 0), self.case("integers", 0)]

        def load() -> None:
            for case, buffers in zip(cases, turns, strict=True):
                self.load(case, buffers)

        load()  # a capture replays once, and indices among the inputs must be some
        graph = measure.capture(run, stream)
        load()
        graph.replay()
        return self._judge_after([(c, outputs) for c, (_, outputs) in zip(cases, turns, strict=True)], ordered=ordered)

    def _judge_after(self, launched: list[tuple[Case, Tensors]], *, ordered: bool) -> Judgement:
        self._gang.synchronize()
        self._gang.communicator.check_peers()
        return self._judge(launched, ordered=ordered)

    def _judge(self, launched: list[tuple[Case, Tensors]], *, ordered: bool) -> Judgement:
        def judge(number: int, case: Case, result: Tensors) -> Judgement:
            found = check.judge(self.op, self.problem, case, result, ordered=ordered)
            reason = f"wrong at launch {number} of shape {self.problem.shape}, {found.reason}"
            return found if found.right else Judgement(found.error, reason)

        return check.worst(judge(number, *one) for number, one in enumerate(launched, start=1))


T = TypeVar("T")

_MAX_REASON = 600


def _sentence(error: BaseException) -> str:
    """The error, and the file and line where it was raised, in what a package brings or in ours."""
    text = f"{type(error).__name__}: {error}".strip()
    places = traceback.extract_tb(error.__traceback__)
    where = f" at {Path(places[-1].filename).name}:{places[-1].lineno}" if places else ""
    return (text if len(text) <= _MAX_REASON else text[:_MAX_REASON] + " …") + where


# A candidate bound at the problem's own shape and, for a full check, at the odd shapes next to it: the cases to launch.
_Bound: TypeAlias = list[tuple[Bench, Plan, Launch]]


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


def _is_ordered(candidate: Candidate) -> bool:
    return get_variant(candidate.op, candidate.variant).numerics == "ordered"


class TrialRunner:
    """Runs a gang's trials on one rank."""

    def __init__(self, gang: Gang, settings: Settings) -> None:
        self._gang = gang
        self._settings = settings
        self._stream = torch.cuda.Stream(gang.device) if gang.on_gpu else None  # type: ignore[no-untyped-call]
        self._benches: list[Bench] = []  # of the problem and, once there was a full check, of the odd shapes next to it
        self._is_full = False
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
            self._gang.report("bind", command.baseline or candidate)
            try:
                bench = self._bench_for(problem, full=command.full_check)
                if command.baseline is not None and command.baseline not in (bench.baseline, candidate):
                    self._prepare_baseline(bench, command.baseline)
                self._gang.report("bind", candidate)
                launch = self._prepare(bench, candidate, full=command.full_check)
                self._memory_bytes = check.memory_bytes(self._gang.device)
                outcome = self._time(bench, launch, candidate, command)
            except _RefusedError as refused:
                vote = refused.vote
                outcome = TrialResult(status=vote.trouble.status, reason=vote.reason, error=self._error)
            if outcome.status not in (*LOST, TOO_LARGE):
                outcome = self._left_clean(problem, outcome)
        return replace(outcome, bind_s=self._bind_s, compiled=self._num_compiled)

    def close(self) -> None:
        """Give back the memory that trials took; no trial may follow."""
        self._drop_benches()
        self._compiles.close()

    def _left_clean(self, problem: Problem, outcome: TrialResult) -> TrialResult:
        """The outcome, unless launches wrote where they may not, or left packets in an arena.

        Those would be the next candidate's wrong results, or its crash.
        """
        self._gang.synchronize()
        self._gang.barrier()
        damage = check.find_damage([one for bench in self._benches for one in bench.guarded])
        faults = [damage] if damage else []
        workspace = self._gang.communicator.workspace
        if workspace is not None and (count := workspace.rearm(problem.mode)):
            faults.append(f"left {count} words in the arena, which a later call would take for data")
        vote = self._gang.vote(Trouble.INCORRECT if faults else Trouble.NONE, "; ".join(faults))
        if not vote.trouble:
            return outcome
        return TrialResult(status=vote.trouble.status, reason=vote.reason, error=outcome.error)

    def _bench_for(self, problem: Problem, *, full: bool) -> Bench:
        """The problem's tensors, if every rank has the memory for them.

        A vote after each step, so that no rank waits in the next one for a rank that has none.
        """
        if self._benches and self._benches[0].problem == problem and (self._is_full or not full):
            return self._benches[0]
        if not self._benches or self._benches[0].problem != problem:
            self._drop_benches()  # before the next ones take memory
            self._benches = [Bench(self._gang, problem, self._settings.seed, self._stream)]
        if full:
            shapes = check.odd_problems(self._benches[0].op, problem)
            self._benches += [
                Bench(self._gang, p, self._settings.seed, self._stream, slot=slot) for slot, p in enumerate(shapes, 1)
            ]
        self._is_full = full
        plans = self._plans(full=full)
        plans[0][1].append(check.LATE_CASE)
        steps: list[Callable[[Bench, Plan], None]] = [Bench.make_cases, lambda b, _: b.make_buffers(), Bench.try_room]
        for step in steps:
            trouble, reason = Trouble.NONE, ""
            try:
                for bench, plan in plans:
                    step(bench, plan)
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                trouble, reason = Trouble.TOO_LARGE, _sentence(error)
            vote = self._gang.vote(trouble, reason)
            if vote.trouble:
                self._drop_benches()
            _accept(vote)
        return self._benches[0]

    def _plans(self, *, full: bool) -> list[tuple[Bench, Plan]]:
        """The benches of a check before anything is timed, each with the cases to launch."""
        bench, *odd = self._benches
        plans = [(bench, check.plan_cases(bench.problem, full=full))]
        return plans + [(one, [("random" if number else "integers", 0)]) for number, one in enumerate(odd) if full]

    def _drop_benches(self) -> None:
        self._benches, self._is_full = [], False
        if self._gang.on_gpu:
            torch.cuda.empty_cache()

    def _prepare(self, bench: Bench, candidate: Candidate, *, full: bool) -> Launch:
        """Bind and check a candidate."""
        bound = self._bind(bench, candidate, full=full)
        self._gang.report("run", candidate)
        ordered = _is_ordered(candidate)
        # All of them, whatever this rank finds: the others launch, too.
        vote = self._judge(
            lambda: check.worst([one.check(launch, plan, ordered=ordered) for one, plan, launch in bound])
        )
        self._error = vote.number if math.isfinite(vote.number) else None
        _accept(vote)
        return bound[0][2]

    def _bind(self, bench: Bench, candidate: Candidate, *, full: bool) -> _Bound:
        """Bind on every rank and vote, before any rank launches."""
        bound: _Bound = []
        trouble, reason = Trouble.NONE, ""
        communicator = self._gang.communicator
        variant = get_variant(candidate.op, candidate.variant)
        plans = [
            (one, plan)
            for one, plan in self._plans(full=full)
            if one is bench
            or variant.infeasible_reason(one.problem, candidate.config_dict, communicator.limits) is None
        ]
        begin, before = time.perf_counter(), self._compiles.num_compiled
        try:
            bound = [(one, plan, communicator.bind(one.problem, candidate)) for one, plan in plans]
        except InfeasibleError as error:
            trouble, reason = Trouble.INFEASIBLE, str(error)
        except Exception as error:  # noqa: BLE001 - whatever the compiler raises is this candidate's outcome
            if is_out_of_memory(error):
                trouble, reason = Trouble.INFEASIBLE, f"no memory is left for what it binds: {_sentence(error)}"
            else:
                trouble, reason = Trouble.COMPILE_ERROR, _sentence(error)
        vote = self._gang.vote(trouble, reason, time.perf_counter() - begin, self._compiles.num_compiled - before)
        self._bind_s += vote.number
        self._num_compiled += vote.count
        _accept(vote)
        return bound

    def _guard(self, action: Callable[[], T]) -> tuple[T | None, Trouble, str]:
        """Run what launches; an error becomes a ballot, and is left for the supervisor if nobody may answer."""
        try:
            return action(), Trouble.NONE, ""
        except PeerTimeoutError as error:
            return None, Trouble.HUNG, str(error)
        except Exception as error:  # noqa: BLE001 - a candidate may raise anything
            reason = _sentence(error)
            self._gang.report_failure(reason)
            return None, Trouble.CRASHED, reason

    def _judge(self, action: Callable[[], Judgement], when: str = "") -> Vote:
        """Run what launches and judges, and vote on what it found."""
        found, trouble, reason = self._guard(action)
        if found is None:
            return self._gang.vote(trouble, reason)
        trouble = Trouble.NONE if found.right else Trouble.INCORRECT
        return self._gang.vote(trouble, f"{when}{found.reason}", found.error)

    def _prepare_baseline(self, bench: Bench, baseline: Candidate) -> None:
        """Bind, run and capture the library, where the problem did not begin with it."""
        try:
            contender = self._contend(bench, baseline, self._prepare(bench, baseline, full=False))
        except _RefusedError as refused:
            raise RuntimeError(f"the library ran {bench.problem} before and now fails: {refused}") from None
        bench.contender, bench.baseline = contender, baseline
        self._error = None

    def _contend(self, bench: Bench, candidate: Candidate, launch: Launch) -> Contender:
        """Make a contender on every rank, and vote before any rank runs it.

        The first one of a problem, the library if it runs, says how many launches a round has. On the host each says it
        for itself, for they differ a hundredfold; an interpreted kernel has one.
        """
        if self._stream is None and get_variant(candidate.op, candidate.variant).kernels:
            return self._make_contender(bench, launch, 1)
        if self._stream is None:
            calls, lead = measure.calls_on_host(
                lambda calls, lead: (
                    self._rounds(bench, [self._make_contender(bench, launch, calls, lead=lead)], 2)[0].p50_us
                )
            )
            return self._make_contender(bench, launch, calls, lead=lead)
        if not bench.calls:
            (probe,) = self._rounds(bench, [self._make_contender(bench, launch, 10)], 2)
            bench.calls = measure.calls_for(probe.p50_us)
        return self._make_contender(bench, launch, bench.calls)

    def _make_contender(self, bench: Bench, launch: Launch, calls: int, *, lead: bool = False) -> Contender:
        def action() -> Contender:
            return measure.contend(
                launch,
                bench.inputs,
                bench.outputs,
                calls=calls,
                graph=bench.problem.mode == "graph",
                stream=self._stream,
                further=bench.further,
                lead=lead,
            )

        contender, trouble, reason = self._guard(action)
        _accept(self._gang.vote(trouble, reason))
        assert contender is not None
        return contender

    def _rounds(self, bench: Bench, contenders: Sequence[Contender], rounds: int) -> list[Latency]:
        """Time contenders and exchange the times: the latencies are the same on every rank."""

        def action() -> list[list[float]]:
            bench.load(bench.case("random", 0))
            times = measure.take_rounds(self._gang.device_barrier, contenders, rounds, self._stream)
            self._gang.communicator.check_peers()
            return times

        times, trouble, reason = self._guard(action)
        everyone = self._gang.gather((int(trouble), reason, times or []))
        if any(row[0] for row in everyone):
            raise _RefusedError(combine([row[:2] for row in everyone]))
        return [measure.summarise([row[2][index] for row in everyone]) for index in range(len(contenders))]

    def _time(self, bench: Bench, launch: Launch, candidate: Candidate, command: Command) -> TrialResult:
        """Time a first look and, within reach of the best, more samples, interleaved with the library."""
        ordered = _is_ordered(candidate)
        contender = self._contend(bench, candidate, launch)
        if candidate == command.baseline and bench.baseline is None:
            bench.contender, bench.baseline = contender, candidate
        (look,) = self._rounds(bench, [contender], self._settings.first_rounds)
        if candidate == bench.baseline:
            bench.baseline_us = bench.baseline_us or look.p50_us
        if self._stream is not None and bench.problem.mode == "graph":
            _accept(self._judge(lambda: bench.check_replay(contender, launch, ordered=ordered), "replayed: "))
        # From numbers that every rank holds: the gathered look, and the command.
        rounds = rounds_after_look(command, look.p50_us, self._settings)
        if not rounds:
            return pruned(command, look, self._error)
        contenders = [contender] if bench.contender is None else [contender, bench.contender]
        if most_us := self._settings.round_budget_us:
            library_us = bench.baseline_us * (bench.contender.calls if bench.contender is not None else 0)
            rounds = min(rounds, max(2, int(most_us / (contender.calls * look.p50_us + library_us))))
        latencies = self._rounds(bench, contenders, rounds)
        done = (self._settings.first_rounds + rounds) * contender.calls
        is_long = command.final and not self._settings.short
        more = check.launches_to_go(done, latencies[0].p50_us, final=is_long)
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
