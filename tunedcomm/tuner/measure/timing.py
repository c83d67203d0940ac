"""Time launches: rounds of CUDA-graph replays, eager loops, or single launches on the host.

In every round each contender runs once, after a barrier on the device, so that drift of clocks and temperature meets
all of them alike; the order changes from round to round, so that what each leaves behind in caches does, too. A round's
time is that of the slowest rank. Counts are fixed before the first round.

Launches of a round read the same inputs, which are in the cache by then, as what was just produced is. Those of ops
with `cold` inputs (GEMMs, whose weights come from memory) take as many copies in turn as the cache does not hold.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tunedcomm.tuner.gang.protocol import Latency
from tunedcomm.tuner.measure.correctness import Launch, Tensors

# A replay is long against the skew with which ranks leave the barrier (a few µs) and what an event costs.
_REPLAY_US = 1000.0
_MIN_CALLS, _MAX_CALLS = 10, 100
# Above this a call is long enough to be timed by itself.
_LONG_CALL_US = 2000.0
# Head start of the host over the device before a round, so that a replay never waits for its own submission.
_HEAD_START_CYCLES = 150_000
# Inputs of one turn after another: beyond the largest cache (126 MB on Blackwell).
_COLD_BYTES = 160 << 20
_MAX_TURNS = 16


@dataclass(frozen=True, slots=True, eq=False)
class Contender:
    """Something to time.

    Attributes:
        run: does `calls` launches.
        calls: launches in a `run`.
        eager: the host's time counts too.
        lead: one launch before the clock starts: it brings the ranks of a host closer together than the barrier does,
            whose skew (up to 1 ms) is as long as a hundred calls.
    """

    run: Callable[[], None]
    calls: int
    eager: bool
    lead: Callable[[], None] | None = None


def calls_on_host(probe_us: Callable[[int, bool], float]) -> tuple[int, bool]:
    """(launches a round on the host, True if one more leads it).

    Args:
        probe_us: µs a launch of rounds of so many launches, led or not; the same on every rank.
    """
    if probe_us(1, False) >= _LONG_CALL_US:
        return 1, False
    return max(1, min(_MAX_CALLS, int(_REPLAY_US / max(probe_us(2, True), 0.1)))), True


def calls_for(latency_us: float) -> int:
    """Launches a round on a device for something that takes `latency_us`."""
    if latency_us >= _LONG_CALL_US:
        return 3
    return max(_MIN_CALLS, min(_MAX_CALLS, round(_REPLAY_US / max(latency_us, 0.1))))


def num_turns(inputs: Tensors, *, cold: bool) -> int:
    """Number of inputs like these that launches take in turn; one where the cache may hold them."""
    if not cold or not inputs[0].is_cuda:
        return 1
    nbytes = max(1, sum(tensor.nbytes for tensor in inputs))
    return min(_MAX_TURNS, 1 + -(-_COLD_BYTES // nbytes))


def further_turns(inputs: Tensors, *, cold: bool) -> tuple[Tensors, ...]:
    """Copies of `inputs` for launches to take in turn with them."""
    return tuple(tuple(tensor.clone() for tensor in inputs) for _ in range(num_turns(inputs, cold=cold) - 1))


def capture(run: Callable[[], None], stream: torch.cuda.Stream) -> torch.cuda.CUDAGraph:
    """A graph of what `run` launches on `stream`, replayed once, which uploads it."""
    captured = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        # Not torch.cuda.graph(): it collects garbage and empties the allocator's cache at every capture.
        captured.capture_begin(capture_error_mode="thread_local")
        try:
            run()
        except BaseException:
            with contextlib.suppress(RuntimeError):  # the capture is broken already; the first error is the one to show
                captured.capture_end()
            raise
        captured.capture_end()
        captured.replay()
    return captured


def contend(
    launch: Launch,
    inputs: Tensors,
    outputs: Tensors,
    *,
    calls: int,
    graph: bool,
    stream: torch.cuda.Stream | None,
    further: Sequence[Tensors] = (),
    lead: bool = False,
) -> Contender:
    """Make a contender of a bound launch that has already run at least once.

    It does `calls` launches a round, captured on the stream where `graph` asks for it, which take `inputs` and the
    `further` ones, of the same shapes, in turn; on the host after one more if `lead`.
    """
    handle = stream.cuda_stream if stream is not None else 0
    turns = (inputs, *further)
    given = [turns[number % len(turns)] for number in range(calls)]

    def run() -> None:
        for values in given:
            launch(values, outputs, handle)

    if stream is None or not graph:
        return Contender(run, calls, eager=True, lead=(lambda: launch(inputs, outputs, handle)) if lead else None)
    return Contender(capture(run, stream).replay, calls, eager=False)


def take_rounds(
    barrier: Callable[[], object],
    contenders: Sequence[Contender],
    rounds: int,
    stream: torch.cuda.Stream | None,
    *,
    first: int = 0,
) -> list[list[float]]:
    """This rank's µs a call, by contender and round. Waits for the device.

    All ranks call this with the same counts; the stream is None on the host. `barrier` has the current stream wait for
    every rank's. Each round has the order that `order_of_round` says; `first` is the first one's number, where rounds
    are taken one by one.
    """
    by_host = stream is None or contenders[0].eager

    def now() -> Any:
        if stream is not None and by_host:
            stream.synchronize()
        if by_host:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(stream)
        return event

    spans: list[list[tuple[Any, Any]]] = [[] for _ in contenders]
    with contextlib.nullcontext() if stream is None else torch.cuda.stream(stream):
        if not by_host:
            torch.cuda._sleep(_HEAD_START_CYCLES)  # type: ignore[no-untyped-call]
        for number in range(first, first + rounds):
            for index in order_of_round(number, len(contenders)):
                barrier()
                if (lead := contenders[index].lead) is not None:
                    lead()
                begin = now()
                contenders[index].run()
                spans[index].append((begin, now()))
    if stream is not None:
        stream.synchronize()
    return [
        [((end - begin) * 1e6 if by_host else begin.elapsed_time(end) * 1e3) / contender.calls for begin, end in mine]
        for contender, mine in zip(contenders, spans, strict=True)
    ]


def order_of_round(number: int, count: int) -> list[int]:
    """The order in a round: in each `2 * count` rounds all are at each place, and behind each other, equally often.

    A Latin square balanced for what each leaves behind to the next, after E. J. Williams (1949): the round's first, and
    then in turn the next after it and before it; in every other `count` rounds, before it and after it.
    """
    sign = -1 if number // count % 2 else 1
    steps = [(place + 1) // 2 if place % 2 else -(place // 2) for place in range(count)]
    return [(number + sign * step) % count for step in steps]


def summarise(by_rank: Sequence[Sequence[float]]) -> Latency:
    """Percentiles over rounds of each round's slowest rank, by linear interpolation between the closest ones."""
    slowest = [max(times) for times in zip(*by_rank, strict=True)]
    deciles = statistics.quantiles(slowest if len(slowest) > 1 else slowest * 2, n=10, method="inclusive")
    return Latency(p10_us=deciles[0], p50_us=deciles[4], p90_us=deciles[8], samples=len(slowest))
