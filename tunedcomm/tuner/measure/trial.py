"""One trial: bind, vote, check, vote, time. Every rank of the gang runs the same calls in the same order."""

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

from tunedcomm.db.values import LOST
from tunedcomm.dispatch.compare import is_out_of_memory
from tunedcomm.errors import InfeasibleError, PeerTimeoutError
from tunedcomm.kernels.common.feasibility import Launch
from tunedcomm.kernels.common.reference import fill_sentinel
from tunedcomm.spec import Candidate, OpSpec, Problem, get_op, get_variant
from tunedcomm.state import clean_process
from tunedcomm.tuner.gang.group import Gang, Trouble, Vote, combine
from tunedcomm.tuner.gang.protocol import (
    TOO_LARGE,
    Command,
    Latency,
    Settings,
    TrialResult,
    pruned,
    rounds_after_look,
)
from tunedcomm.tuner.measure import correctness, timing
from tunedcomm.tuner.measure.correctness import Case, Guarded, Judgement, Tensors
from tunedcomm.tuner.measure.timing import TimedRun


class CompileCount:
    """Counts the kernels that Triton compiles without failure from now on; an earlier listener still gets its calls."""

    def __init__(self) -> None:
        from triton import knobs

        self.num_compiled = 0
        self._before: Callable[..., None] | None = knobs.compilation.listener
        knobs.compilation.listener = self._hear

    def close(self) -> None:
        """Stop counting."""
        from triton import knobs

        knobs.compilation.listener = self._before

    def _hear(self, *, src: Any, metadata: Any, metadata_group: Any, times: Any, cache_hit: bool) -> None:
        self.num_compiled += not cache_hit
        if self._before is not None:
            self._before(src=src, metadata=metadata, metadata_group=metadata_group, times=times, cache_hit=cache_hit)


# (kind, index) of cases to launch; the index is added to the seed.
CaseKeys: TypeAlias = list[tuple[str, int]]
_SLOT_OF_SECOND = 3  # after the slots of the odd shapes
# A candidate leaks if every one of these batches of launches takes more memory.
_LEAK_BATCHES, _LEAK_LAUNCHES = 5, 4


class ProblemTensors:
    """One rank's tensors for one problem, shared by all candidates.

    Objects that live at the same time have different slots; the one at slot 0 is also timed. `make_cases`,
    `make_buffers` and `try_room` make the tensors, in this order, before any candidate runs: a problem that is too
    large for the memory fails there.
    """

    def __init__(
        self, gang: Gang, problem: Problem, seed: int, stream: torch.cuda.Stream | None, *, slot: int = 0
    ) -> None:
        self.problem = problem
        self.op: OpSpec = get_op(problem.op)
        self.baseline_run: TimedRun | None = None
        self.baseline: Candidate | None = None
        self.baseline_us = 0.0  # of the first look
        self.calls = 0
        self.inputs: Tensors = ()
        self.outputs: Tensors = ()
        self.further: tuple[Tensors, ...] = ()  # copies of `inputs`, used in turn with them by timed launches
        self.guarded: list[Guarded] = []
        self._gang, self._seed, self._stream, self._slot = gang, seed, stream, slot
        self._handle = stream.cuda_stream if stream is not None else 0
        self._cases: dict[tuple[str, int], Case] = {}
        self._second: tuple[Tensors, Tensors] | None = None  # inputs and outputs of every second launch of a graph

    def make_cases(self, keys: CaseKeys) -> None:
        """Generate input values and expected results."""
        for kind, index in [("random", 0), *keys]:
            self.case(kind, index)

    def make_buffers(self) -> None:
        """Allocate inputs and outputs, once; collective where peers address the inputs."""
        if self.inputs:
            return
        self.inputs, self.outputs = self._buffers(self._slot)
        if self._slot == 0 and self.problem.mode == "graph" and self.problem.nbytes <= correctness.LARGE_BYTES:
            self._second = self._buffers(_SLOT_OF_SECOND)

    def _buffers(self, slot: int) -> tuple[Tensors, Tensors]:
        like, shape = self.case("random", 0).inputs, f"of shape {self.problem.shape}"
        made = () if self.problem.in_place else self.op.make_outputs(self.problem, self._gang.device)
        addressed = (*like, *made) if self.op.symmetric_outputs else like
        sizes = [tensor.nbytes + correctness.GUARD_BYTES for tensor in addressed]
        rooms = [*self._gang.symmetric_rooms(self.problem, sizes, slot), *(None,) * len(made)]
        inputs = [
            correctness.guard(tensor, f"input {index} {shape}", is_input=True, room=room)
            for index, (tensor, room) in enumerate(zip(like, rooms, strict=False))
        ]
        outputs = [
            correctness.guard(tensor, f"output {index} {shape}", is_input=False, room=room)
            for index, (tensor, room) in enumerate(zip(made, rooms[len(like) :], strict=False))
        ]
        self.guarded += [*inputs, *outputs]
        given = tuple(one.tensor for one in inputs)
        return given, given if self.problem.in_place else tuple(one.tensor for one in outputs)

    def try_room(self, keys: CaseKeys) -> None:
        """Allocate once the further memory that checks and timing need, by judging the expected results."""
        cases = [self.case(kind, index) for kind, index in keys]
        results = [tuple(e.to(o.dtype) for e, o in zip(c.expected, self.outputs, strict=False)) for c in cases]
        self._judge(list(zip(cases, results, strict=True)), ordered=False)
        correctness.are_kept(cases[-1], self.inputs)
        if self._slot == 0 and not self.further:
            cold = self.op.time_cold and self.problem.input_kind == "plain"
            self.further = timing.further_turns(self.case("random", 0).inputs, cold=cold)

    def case(self, kind: str, index: int) -> Case:
        """A case, generated once."""
        if (kind, index) not in self._cases:
            seed = self._seed + index
            self._cases[kind, index] = correctness.make_case(
                self.op, self.problem, self._gang.rank, kind=kind, seed=seed, device=self._gang.device
            )
        return self._cases[kind, index]

    def load(self, case: Case, buffers: tuple[Tensors, Tensors] | None = None) -> None:
        """Copy a case's inputs into the buffers, in stream order, and fill outputs with NaN."""
        inputs, outputs = buffers or (self.inputs, self.outputs)
        for buffer, values in zip(inputs, case.inputs, strict=True):
            buffer.copy_(values)
        if not self.problem.in_place:
            fill_sentinel(outputs)

    def repeat(self, launch: Launch, count: int) -> None:
        """Launch `count` times with the current inputs, and wait."""
        for _ in range(count):
            launch(self.inputs, self.outputs, self._handle)
        self._gang.synchronize()

    def check(self, launch: Launch, keys: CaseKeys, *, ordered: bool) -> Judgement:
        """Launch every case of `keys` in a row, then judge them all; the first wrong one decides."""
        cases = [self.case(kind, index) for kind, index in keys]
        results = []
        for index, case in enumerate(cases):
            self.load(case)
            correctness.rank_delay(self._seed, self._gang.rank, index, self._gang.device)
            launch(self.inputs, self.outputs, self._handle)
            results.append(tuple(output.clone() for output in self.outputs))
        found = self._judge_after(list(zip(cases, results, strict=True)), ordered=ordered)
        if found.right and not self.problem.in_place and not correctness.are_kept(cases[-1], self.inputs):
            reason = f"a launch of shape {self.problem.shape} changed its inputs, which it may only read"
            return Judgement(found.error, reason)
        return found

    def check_replay(self, timed: TimedRun, launch: Launch, *, ordered: bool) -> Judgement:
        """Judge the results of a captured run, then of a graph in which every launch has other inputs than the last.

        All launches of a run read the same inputs, so a launch could reuse data that the last one left behind.
        """
        found = Judgement(0.0)
        if not self.problem.in_place:
            case = self.case("random", 0)
            self.load(case)
            timed.run()
            found = self._judge_after([(case, self.outputs)], ordered=ordered)
        if self._second is None or self._stream is None or not found.right:
            return found
        stream, turns = self._stream, [(self.inputs, self.outputs), self._second]

        def launch_all() -> None:
            for inputs, outputs in turns * (1 if self.problem.in_place else 2):
                launch(inputs, outputs, stream.cuda_stream)

        cases = [self.case("random", 0), self.case("integers", 0)]

        def load() -> None:
            for case, buffers in zip(cases, turns, strict=True):
                self.load(case, buffers)

        load()  # a capture replays once, and indices among the inputs must be valid
        graph = timing.capture(launch_all, stream)
        load()
        graph.replay()
        return self._judge_after([(c, outputs) for c, (_, outputs) in zip(cases, turns, strict=True)], ordered=ordered)

    def _judge_after(self, launched: list[tuple[Case, Tensors]], *, ordered: bool) -> Judgement:
        self._gang.synchronize()
        self._gang.communicator.check_peers()
        return self._judge(launched, ordered=ordered)

    def _judge(self, launched: list[tuple[Case, Tensors]], *, ordered: bool) -> Judgement:
        def judge(index: int, case: Case, result: Tensors) -> Judgement:
            found = correctness.judge(self.op, self.problem, case, result, ordered=ordered)
            reason = f"wrong at launch {index} of shape {self.problem.shape}, {found.reason}"
            return found if found.right else Judgement(found.error, reason)

        return correctness.worst(judge(index, *one) for index, one in enumerate(launched, start=1))


T = TypeVar("T")

_MAX_REASON = 600


def _sentence(error: BaseException) -> str:
    """The error, with the file and line that raised it."""
    text = f"{type(error).__name__}: {error}".strip()
    places = traceback.extract_tb(error.__traceback__)
    where = f" at {Path(places[-1].filename).name}:{places[-1].lineno}" if places else ""
    return (text if len(text) <= _MAX_REASON else text[:_MAX_REASON] + " …") + where


# A candidate bound at the problem's shape and, for a full check, at the odd shapes near it, with the cases to launch.
_Bound: TypeAlias = list[tuple[ProblemTensors, CaseKeys, Launch]]


class _RefusedError(Exception):
    """A vote ends the trial; every rank raises this at the same place."""

    def __init__(self, vote: Vote) -> None:
        super().__init__(vote.reason)
        self.vote = vote


def _accept(vote: Vote) -> Vote:
    """The vote, or _RefusedError if it found trouble."""
    if vote.trouble:
        raise _RefusedError(vote)
    return vote


def _is_ordered(candidate: Candidate) -> bool:
    """True if the variant's class promises bits."""
    return get_variant(candidate.op, candidate.variant).numerics in ("ordered", "quantized")


class TrialRunner:
    """Runs a gang's trials on one rank."""

    def __init__(self, gang: Gang, settings: Settings) -> None:
        self._gang = gang
        self._settings = settings
        self._stream = torch.cuda.Stream(gang.device) if gang.on_gpu else None  # type: ignore[no-untyped-call]
        # Tensors of the problem and, after a full check, of the odd shapes near it.
        self._tensors: list[ProblemTensors] = []
        self._is_full = False
        self._compiles = CompileCount()
        # Of the current trial: error of its check, memory in use after the check, time and binaries of binding.
        self._error: float | None = None
        self._memory_bytes = 0
        self._bind_s, self._num_compiled = 0.0, 0

    @clean_process()
    def run(self, command: Command) -> TrialResult:
        """Run one trial; the outcome is the same on every rank."""
        problem, candidate = command.trial
        self._error, self._bind_s, self._num_compiled = None, 0.0, 0
        with contextlib.nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
            self._gang.report("bind", command.baseline or candidate)
            try:
                tensors = self._tensors_for(problem, full=command.full_check)
                if command.baseline is not None and command.baseline not in (tensors.baseline, candidate):
                    self._prepare_baseline(tensors, command.baseline)
                self._gang.report("bind", candidate)
                launch = self._prepare(tensors, candidate, full=command.full_check)
                self._memory_bytes = correctness.memory_bytes(self._gang.device)
                outcome = self._time(tensors, launch, candidate, command)
            except _RefusedError as refused:
                vote = refused.vote
                outcome = TrialResult(status=vote.trouble.status, reason=vote.reason, error=self._error)
            if outcome.status not in (*LOST, TOO_LARGE):
                outcome = self._left_clean(problem, outcome)
        return replace(outcome, bind_s=self._bind_s, compiled=self._num_compiled)

    def close(self) -> None:
        """Free the memory of trials; no trial may follow."""
        self._drop_tensors()
        self._compiles.close()

    def _left_clean(self, problem: Problem, outcome: TrialResult) -> TrialResult:
        """The outcome; `incorrect` if launches wrote out of bounds or left packets in an arena.

        Such remains would become the next candidate's wrong results, or its crash.
        """
        self._gang.synchronize()
        self._gang.barrier()
        damage = correctness.find_damage([one for tensors in self._tensors for one in tensors.guarded])
        faults = [damage] if damage else []
        workspace = self._gang.communicator.workspace
        if workspace is not None and (count := workspace.rearm(problem.mode)):
            faults.append(f"left {count} words in the arena, which a later call would take for data")
        vote = self._gang.vote(Trouble.INCORRECT if faults else Trouble.NONE, "; ".join(faults))
        if not vote.trouble:
            return outcome
        return TrialResult(status=vote.trouble.status, reason=vote.reason, error=outcome.error)

    def _make_tensors(self, problem: Problem, slot: int) -> ProblemTensors:
        return ProblemTensors(self._gang, problem, self._settings.seed, self._stream, slot=slot)

    def _tensors_for(self, problem: Problem, *, full: bool) -> ProblemTensors:
        """The problem's tensors, if every rank has the memory for them.

        A vote follows each stage, so that no rank waits in the next stage for a rank that ran out of memory.
        """
        if self._tensors and self._tensors[0].problem == problem and (self._is_full or not full):
            return self._tensors[0]
        if not self._tensors or self._tensors[0].problem != problem:
            self._drop_tensors()  # before the next tensors take memory
            self._tensors = [self._make_tensors(problem, 0)]
        if full:
            shapes = correctness.odd_problems(self._tensors[0].op, problem)
            self._tensors += [self._make_tensors(shape, slot) for slot, shape in enumerate(shapes, 1)]
        self._is_full = full
        to_check = self._to_check(full=full)
        to_check[0][1].append(correctness.LATE_CASE)
        stages: list[Callable[[ProblemTensors, CaseKeys], None]] = [
            ProblemTensors.make_cases,
            lambda tensors, _: tensors.make_buffers(),
            ProblemTensors.try_room,
        ]
        for stage in stages:
            trouble, reason = Trouble.NONE, ""
            try:
                for tensors, keys in to_check:
                    stage(tensors, keys)
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                trouble, reason = Trouble.TOO_LARGE, _sentence(error)
            vote = self._gang.vote(trouble, reason)
            if vote.trouble:
                self._drop_tensors()
            _accept(vote)
        return self._tensors[0]

    def _to_check(self, *, full: bool) -> list[tuple[ProblemTensors, CaseKeys]]:
        """The tensors of a check before the timing, each with the cases to launch."""
        tensors, *odd = self._tensors
        to_check = [(tensors, correctness.plan_cases(tensors.problem, full=full))]
        return to_check + [(one, [("random" if index else "integers", 0)]) for index, one in enumerate(odd) if full]

    def _drop_tensors(self) -> None:
        self._tensors, self._is_full = [], False
        if self._gang.on_gpu:
            torch.cuda.empty_cache()

    def _prepare(self, tensors: ProblemTensors, candidate: Candidate, *, full: bool) -> Launch:
        """Bind and check a candidate."""
        bound = self._bind(tensors, candidate, full=full)
        self._gang.report("run", candidate)
        ordered = _is_ordered(candidate)
        # Run every check, whatever this rank finds: the other ranks launch, too.
        vote = self._judge(
            lambda: correctness.worst([one.check(launch, keys, ordered=ordered) for one, keys, launch in bound])
        )
        self._error = vote.value if math.isfinite(vote.value) else None
        _accept(vote)
        return bound[0][2]

    def _bind(self, tensors: ProblemTensors, candidate: Candidate, *, full: bool) -> _Bound:
        """Bind on every rank and vote, before any rank launches."""
        bound: _Bound = []
        trouble, reason = Trouble.NONE, ""
        communicator = self._gang.communicator
        variant = get_variant(candidate.op, candidate.variant)
        to_check = [
            (one, keys)
            for one, keys in self._to_check(full=full)
            if one is tensors
            or variant.infeasible_reason(one.problem, candidate.config_dict, communicator.limits) is None
        ]
        begin, before = time.perf_counter(), self._compiles.num_compiled
        try:
            bound = [(one, keys, communicator.bind(one.problem, candidate)) for one, keys in to_check]
        except InfeasibleError as error:
            trouble, reason = Trouble.INFEASIBLE, str(error)
        except Exception as error:  # noqa: BLE001 - whatever the compiler raises is this candidate's outcome
            if is_out_of_memory(error):
                trouble, reason = Trouble.INFEASIBLE, f"no memory is left to bind it: {_sentence(error)}"
            else:
                trouble, reason = Trouble.COMPILE_ERROR, _sentence(error)
        vote = self._gang.vote(trouble, reason, time.perf_counter() - begin, self._compiles.num_compiled - before)
        self._bind_s += vote.value
        self._num_compiled += vote.count
        _accept(vote)
        return bound

    def _guard(self, action: Callable[[], T]) -> tuple[T | None, Trouble, str]:
        """Run a launch; an error becomes a ballot and is reported to the supervisor, in case no peer can vote."""
        try:
            return action(), Trouble.NONE, ""
        except PeerTimeoutError as error:
            return None, Trouble.HUNG, str(error)
        except Exception as error:  # noqa: BLE001 - a candidate may raise anything
            reason = _sentence(error)
            self._gang.report_failure(reason)
            return None, Trouble.CRASHED, reason

    def _judge(self, action: Callable[[], Judgement], when: str = "") -> Vote:
        """Launch and judge, then vote on the judgement."""
        found, trouble, reason = self._guard(action)
        if found is None:
            return self._gang.vote(trouble, reason)
        trouble = Trouble.NONE if found.right else Trouble.INCORRECT
        return self._gang.vote(trouble, f"{when}{found.reason}", found.error)

    def _prepare_baseline(self, tensors: ProblemTensors, baseline: Candidate) -> None:
        """Bind, run and capture the library, if it was not the problem's first candidate."""
        try:
            timed = self._timed_run(tensors, baseline, self._prepare(tensors, baseline, full=False))
        except _RefusedError as refused:
            raise RuntimeError(f"the library ran {tensors.problem} before and now fails: {refused}") from None
        tensors.baseline_run, tensors.baseline = timed, baseline
        self._error = None

    def _timed_run(self, tensors: ProblemTensors, candidate: Candidate, launch: Launch) -> TimedRun:
        """Make a timed run on every rank, and vote before any rank runs it.

        On a GPU the problem's first candidate, the library if it runs, sets the launches of a round for all candidates.
        On the host each candidate has its own count, since times differ a hundredfold; an interpreted kernel has one.
        """
        if self._stream is None and get_variant(candidate.op, candidate.variant).kernels:
            return self._make_run(tensors, launch, 1)
        if self._stream is None:
            calls, lead = timing.calls_on_host(
                lambda calls, lead: (
                    self._rounds(tensors, [self._make_run(tensors, launch, calls, lead=lead)], 2)[0].p50_us
                )
            )
            return self._make_run(tensors, launch, calls, lead=lead)
        if not tensors.calls:
            (probe,) = self._rounds(tensors, [self._make_run(tensors, launch, 10)], 2)
            tensors.calls = timing.calls_for(probe.p50_us)
        return self._make_run(tensors, launch, tensors.calls)

    def _make_run(self, tensors: ProblemTensors, launch: Launch, calls: int, *, lead: bool = False) -> TimedRun:
        def action() -> TimedRun:
            return timing.make_run(
                launch,
                tensors.inputs,
                tensors.outputs,
                calls=calls,
                graph=tensors.problem.mode == "graph",
                stream=self._stream,
                further=tensors.further,
                lead=lead,
            )

        timed, trouble, reason = self._guard(action)
        _accept(self._gang.vote(trouble, reason))
        assert timed is not None
        return timed

    def _rounds(self, tensors: ProblemTensors, timed_runs: Sequence[TimedRun], rounds: int) -> list[Latency]:
        """Time runs and exchange the times: the latencies are the same on every rank."""

        def action() -> list[list[float]]:
            tensors.load(tensors.case("random", 0))
            times = timing.take_rounds(self._gang.device_barrier, timed_runs, rounds, self._stream)
            self._gang.communicator.check_peers()
            return times

        times, trouble, reason = self._guard(action)
        everyone = self._gang.gather((int(trouble), reason, times or []))
        if any(row[0] for row in everyone):
            raise _RefusedError(combine([row[:2] for row in everyone]))
        return [timing.summarise([row[2][index] for row in everyone]) for index in range(len(timed_runs))]

    def _time(self, tensors: ProblemTensors, launch: Launch, candidate: Candidate, command: Command) -> TrialResult:
        """Time a first look, then more rounds interleaved with the library if the best latency is within reach."""
        ordered = _is_ordered(candidate)
        timed = self._timed_run(tensors, candidate, launch)
        if candidate == command.baseline and tensors.baseline is None:
            tensors.baseline_run, tensors.baseline = timed, candidate
        (look,) = self._rounds(tensors, [timed], self._settings.first_rounds)
        if candidate == tensors.baseline:
            tensors.baseline_us = tensors.baseline_us or look.p50_us
        if self._stream is not None and tensors.problem.mode == "graph":
            _accept(self._judge(lambda: tensors.check_replay(timed, launch, ordered=ordered), "replayed: "))
        # Every rank holds the same look and command, so all ranks get the same count.
        rounds = rounds_after_look(command, look.p50_us, self._settings)
        if not rounds:
            return pruned(command, look, self._error)
        timed_runs = [timed] if tensors.baseline_run is None else [timed, tensors.baseline_run]
        if most_us := self._settings.round_budget_us:
            library_us = tensors.baseline_us * (tensors.baseline_run.calls if tensors.baseline_run is not None else 0)
            rounds = min(rounds, max(2, int(most_us / (timed.calls * look.p50_us + library_us))))
        latencies = self._rounds(tensors, timed_runs, rounds)
        done = (self._settings.first_rounds + rounds) * timed.calls
        is_long = command.final and not self._settings.in_job
        more = correctness.launches_to_go(done, latencies[0].p50_us, final=is_long)
        self._check_late(tensors, timed, launch, done, more, ordered=ordered)
        baseline_us = latencies[1].p50_us if len(latencies) > 1 else None
        share = self._in_place_share(tensors, timed, candidate, rounds, command)
        return TrialResult(
            status="ok", latency=latencies[0], baseline_us=baseline_us, error=self._error, in_place_share=share
        )

    def _in_place_share(
        self, tensors: ProblemTensors, timed: TimedRun, candidate: Candidate, rounds: int, command: Command
    ) -> float | None:
        """The library's time in place over its time here, where a caller may do without the copy; None elsewhere."""
        may_be = tensors.op.in_place and not tensors.problem.in_place and not (command.final or self._settings.in_job)
        if not may_be or not get_variant(candidate.op, candidate.variant).is_library:
            return None
        in_place = replace(tensors.problem, in_place=True, input_kind="plain")

        def bind() -> Launch:
            launch: Launch = self._gang.communicator.bind(in_place, candidate)
            return lambda inputs, outputs, stream: launch(inputs, inputs, stream)

        bound, trouble, reason = self._guard(bind)
        _accept(self._gang.vote(trouble, reason))
        assert bound is not None
        other = self._make_run(tensors, bound, timed.calls, lead=timed.lead is not None)
        usual, in_place_run = self._rounds(tensors, [timed, other], rounds)
        return in_place_run.p50_us / usual.p50_us

    def _check_late(
        self, tensors: ProblemTensors, timed: TimedRun, launch: Launch, done: int, more: int, *, ordered: bool
    ) -> None:
        """Check a candidate with other inputs after its `done` timed launches and `more` launches; find leaks."""

        def action() -> Judgement:
            for _ in range(-(-more // timed.calls)):
                timed.run()
            return tensors.check(launch, [correctness.LATE_CASE], ordered=ordered)

        found, trouble, reason = self._guard(action)
        if found is not None and not found.right:
            trouble, reason = Trouble.INCORRECT, f"after {done + more} launches that were timed: {found.reason}"
        grown = correctness.memory_bytes(self._gang.device) - self._memory_bytes
        vote = _accept(self._gang.vote(trouble, reason, count=max(0, grown)))
        if vote.count > correctness.LEAK_BYTES:
            self._find_leak(tensors, launch)

    def _find_leak(self, tensors: ProblemTensors, launch: Launch) -> None:
        """Refuse a candidate if every batch of launches takes more memory; memory taken once is no leak."""
        total = 0
        for _ in range(_LEAK_BATCHES):
            before = correctness.memory_bytes(self._gang.device)
            _, trouble, reason = self._guard(lambda: tensors.repeat(launch, _LEAK_LAUNCHES))
            grown = correctness.memory_bytes(self._gang.device) - before
            vote = _accept(self._gang.vote(trouble, reason, count=max(0, grown)))
            if vote.count < correctness.LEAK_BYTES // _LEAK_BATCHES:
                return
            total += vote.count
        count = _LEAK_BATCHES * _LEAK_LAUNCHES
        reason = f"leaks memory: {count} launches took {total >> 20} MiB, more in each of {_LEAK_BATCHES} batches"
        raise _RefusedError(Vote(Trouble.INCORRECT, reason))
