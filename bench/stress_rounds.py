"""The launches of bench/stress.py: one after the other, each judged, or captured with nothing between them."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import torch
import torch.distributed as dist

from tunedcomm.dispatch.communicator import Communicator
from tunedcomm.spec import Candidate, Problem, Variant

Tensors: TypeAlias = tuple[torch.Tensor, ...]

ROUNDS = 20  # between two looks at the results


@dataclass(eq=False, slots=True)
class Trial:
    """One candidate at one problem, bound.

    Attributes:
        outputs: two sets in turn, so that what a launch writes late falls upon the next but one.
        wrong: set on the device where a result was not right.
    """

    candidate: Candidate
    problem: Problem
    launch: Callable[[Tensors, Tensors, int], None]
    inputs: Tensors
    is_right: Callable[[Tensors], torch.Tensor]
    outputs: tuple[Tensors, Tensors]
    wrong: torch.Tensor
    count: int = 0


@dataclass(eq=False, slots=True)
class Entry:
    """A variant with what it is launched on, or the reason why it is not."""

    variant: Variant
    trials: list[Trial] = field(default_factory=list)
    reasons: Counter[str] = field(default_factory=Counter)


def poison(outputs: Tensors) -> None:
    for output in outputs:
        output.view(-1).view(torch.uint8).fill_(0xFF)


def wait_for_a_while(noise: random.Random) -> None:
    """Or not; on the device, and on the host."""
    if torch.cuda.is_available() and noise.random() < 0.3:
        torch.cuda._sleep(noise.randrange(200_000))
    if noise.random() < 0.005:
        time.sleep(noise.random() * 0.002)


def current_stream() -> int:
    return torch.cuda.current_stream().cuda_stream if torch.cuda.is_available() else 0


def launch_once(trial: Trial, noise: random.Random) -> None:
    """Poison, wait for a while or not, launch, judge; nothing here waits for the device."""
    outputs = trial.outputs[trial.count % 2]
    poison(outputs)
    wait_for_a_while(noise)
    trial.launch(trial.inputs, outputs, current_stream())
    trial.wrong += ~trial.is_right(outputs)
    trial.count += 1


@dataclass(eq=False, slots=True)
class Graph:
    """One launch of every variant, captured in the order given; on the host they are launched anew each time."""

    trials: Sequence[Trial]
    which: int
    captured: torch.cuda.CUDAGraph | None = None

    def launch_all(self) -> None:
        """Poison all, launch all without anything between, judge all."""
        for trial in self.trials:
            poison(trial.outputs[self.which])
        for trial in self.trials:
            trial.launch(trial.inputs, trial.outputs[self.which], current_stream())
        for trial in self.trials:
            trial.wrong += ~trial.is_right(trial.outputs[self.which])

    def capture(self) -> None:
        self.captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.captured):
            self.launch_all()

    def replay(self, noise: random.Random) -> None:
        wait_for_a_while(noise)
        (self.launch_all if self.captured is None else self.captured.replay)()
        for trial in self.trials:
            trial.count += 1


def graphs_of(order: Sequence[Entry], shuffle: random.Random, noise: random.Random) -> list[Graph]:
    """As many as have every trial; all of them are launched once before, for a capture may not be the first launch."""
    for entry in order:
        for trial in entry.trials:
            launch_once(trial, noise)
    found = []
    for number in range(max((len(entry.trials) for entry in order), default=0)):
        trials = [entry.trials[number % len(entry.trials)] for entry in order]
        found.append(Graph(shuffle.sample(trials, len(trials)), number % 2))
        if torch.cuda.is_available():
            found[-1].capture()
    return found


def run(communicator: Communicator, entries: Sequence[Entry], launches: int, seconds: float, *, graph: bool) -> float:
    """Until each variant had so many launches, or the time is over; returns the seconds it took."""
    shuffle, noise = random.Random(11), random.Random(1000 + dist.get_rank())
    begin, order, done = time.monotonic(), [entry for entry in entries if entry.trials], 0
    if not order:
        raise SystemExit("no variant can run here: " + "; ".join(reason for e in entries for reason in e.reasons))
    graphs = graphs_of(order, shuffle, noise) if graph else []
    while done < launches:
        for _ in range(min(ROUNDS, launches - done)):
            shuffle.shuffle(order)
            if graphs:
                shuffle.choice(graphs).replay(noise)
            for entry in order if not graphs else ():
                launch_once(shuffle.choice(entry.trials), noise)
            done += 1
        if communicator.device.type == "cuda":
            torch.cuda.synchronize()
        communicator.check_peers()
        wrong = torch.stack([trial.wrong for entry in order for trial in entry.trials]).sum()
        over = torch.tensor([time.monotonic() - begin > seconds or bool(wrong)], device=communicator.device).int()
        dist.all_reduce(over, dist.ReduceOp.MAX)
        if over.item():
            break
    return time.monotonic() - begin
