"""One rank's tensors for one problem, and the judging of what launches make of them."""

from __future__ import annotations

from typing import TypeAlias

import torch

from tunedcomm.spec import Candidate, OpSpec, Problem, get_op
from tunedcomm.tuner.gang.group import Gang
from tunedcomm.tuner.measure import correctness as check
from tunedcomm.tuner.measure import timing as measure
from tunedcomm.tuner.measure.correctness import Case, Judgement, Launch, Tensors
from tunedcomm.tuner.measure.timing import Contender

__all__ = ["Bench", "is_out_of_memory"]

# (kind, number) of the cases to launch.
Plan: TypeAlias = list[tuple[str, int]]
_SLOT_OF_SECOND = 3  # behind those of the odd shapes


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
        inputs = self._gang.input_buffers(self.problem, self.case("random", 0).inputs, slot)
        return inputs, inputs if self.problem.in_place else self.op.make_outputs(self.problem, self._gang.device)

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

    def check(self, launch: Launch, plan: Plan, *, ordered: bool) -> Judgement:
        """Launch every case of `plan` in a row, then judge them all; the first wrong one decides."""
        cases = [self.case(kind, number) for kind, number in plan]
        handle = self._stream.cuda_stream if self._stream is not None else 0
        results = []
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
