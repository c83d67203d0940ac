"""What the ranks of `bench/llama_tp.py` do together: agree on what failed, give up on a peer, time in turns."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from tunedcomm.tuner.commands import Latency
from tunedcomm.tuner.measure.timing import summarise

__all__ = ["GAVE_UP", "Contender", "Ranks", "take_turns"]

GAVE_UP = 3  # exit code after a peer did not come
_GRACE_S = 20.0  # ranks other than 0 wait so much longer, for rank 0 writes what was measured
_HEAD_START_CYCLES = 200_000  # so that a replay does not wait for its own submission


class Ranks:
    """The ranks' own channel beside the one that is measured.

    Args:
        stall_s: how long a stage may take before this process is ended.
        on_stall: what to do first, on rank 0, given the stage.
        tracebacks: print those of what fails.
    """

    def __init__(
        self, device: torch.device, stall_s: float, on_stall: Callable[[str], None], *, tracebacks: bool
    ) -> None:
        self.device = device
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        limit = timedelta(seconds=stall_s + 2 * _GRACE_S)
        self._control = dist.new_group(backend="gloo", timeout=limit)
        self._meeting = dist.new_group()  # not the group that is intercepted
        self._token = torch.zeros(1, device=device)
        self._begin = time.monotonic()
        self._stall_s, self._on_stall, self._tracebacks = stall_s, on_stall, tracebacks

    @property
    def host_s(self) -> float:
        """Seconds since the ranks met, by this rank's clock."""
        return time.monotonic() - self._begin

    @property
    def elapsed_s(self) -> float:
        """Seconds since the ranks met, by rank 0's clock: the same on all."""
        spent = torch.tensor([self.host_s], dtype=torch.float64)
        dist.broadcast(spent, 0, group=self._control)
        return float(spent.item())

    def failure(self, error: str) -> str:
        """The ranks' errors in one text, "" if no rank has one; the same on all of them. Every rank comes here."""
        errors: list[str | None] = [None] * self.world_size
        dist.all_gather_object(errors, error, group=self._control)
        found = {each: [rank for rank, other in enumerate(errors) if other == each] for each in errors if each}
        return "; ".join(f"{_named(ranks, self.world_size)}{error}" for error, ranks in found.items())

    def attempt(self, stage: str, action: Callable[[], None]) -> str:
        """Run `action` on every rank and give what went wrong on any of them."""
        error = ""
        with self.watched(stage):
            try:
                action()
                self.synchronize()
            except Exception as caught:  # noqa: BLE001 - whatever it is becomes a row with the reason
                error = f"{type(caught).__name__}: {caught}".strip()
                if self._tracebacks:
                    traceback.print_exc()
            return self.failure(error)

    @contextlib.contextmanager
    def watched(self, stage: str) -> Iterator[None]:
        """End this process if the block takes too long, as it does where a peer failed in the midst of a collective."""

        def give_up() -> None:
            print(f"rank {self.rank}: {stage} took over {self._stall_s:g} s; giving up", file=sys.stderr, flush=True)
            try:
                if self.rank == 0:
                    self._on_stall(stage)
                sys.stdout.flush()
            finally:
                os._exit(GAVE_UP)

        timer = threading.Timer(self._stall_s + (_GRACE_S if self.rank else 0.0), give_up)
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def barrier(self) -> None:
        """On the device, in the current stream."""
        dist.all_reduce(self._token, group=self._meeting)

    def largest(self, values: torch.Tensor) -> torch.Tensor:
        """The largest over the ranks, one by one."""
        values = values.cpu()
        dist.all_reduce(values, dist.ReduceOp.MAX, group=self._control)
        return values

    def summary(self, times: Sequence[float]) -> Latency:
        """Percentiles over the rounds, each as long as on its slowest rank."""
        return summarise([self.largest(torch.tensor(times, dtype=torch.float64)).tolist()])


def _named(ranks: Sequence[int], world_size: int) -> str:
    if len(ranks) == world_size:
        return ""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}: "


@dataclass(frozen=True, slots=True, eq=False)
class Contender:
    """Something to time.

    Attributes:
        run: one step.
        within: what it runs in; entered anew for each turn.
        graph: `run` replays a CUDA graph, which needs nothing around it.
    """

    run: Callable[[], object]
    within: Callable[[], contextlib.AbstractContextManager[object]]
    graph: bool


def take_turns(ranks: Ranks, contenders: Sequence[Contender], *, rounds: int, steps: int) -> list[list[float]]:
    """This rank's µs a step, by contender and round; who comes first changes from round to round."""
    times: list[list[float]] = [[] for _ in contenders]
    warm_up = int(ranks.device.type == "cuda")
    for number in range(rounds + warm_up):
        for place in range(len(contenders)):
            index = (place + number) % len(contenders)
            spent = _turn(ranks, contenders[index], steps)
            if number >= warm_up:
                times[index].append(spent)
    return times


def _turn(ranks: Ranks, contender: Contender, steps: int) -> float:
    if contender.graph:
        torch.cuda._sleep(_HEAD_START_CYCLES)  # type: ignore[no-untyped-call]
        return _timed(ranks, contender.run, steps)
    with contender.within():
        if ranks.device.type == "cuda":
            contender.run()  # an intercepted group chooses at its first calls
            ranks.synchronize()
        return _timed(ranks, contender.run, steps)


def _timed(ranks: Ranks, run: Callable[[], object], steps: int) -> float:
    if ranks.device.type != "cuda":
        ranks.barrier()
        start = time.perf_counter()
        for _ in range(steps):
            run()
        return (time.perf_counter() - start) * 1e6 / steps
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    ranks.barrier()
    begin.record()
    for _ in range(steps):
        run()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) * 1e3 / steps
