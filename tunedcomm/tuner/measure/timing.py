"""Time launches: rounds of CUDA-graph replays, eager loops, or single launches on the host.

In every round each run executes once, after a barrier on the device, so that drift of clocks and temperature affects
all runs alike. The order changes from round to round, so that leftovers in caches affect all runs alike, too. The
slowest rank gives a round's time. Counts are fixed before the first round.

The launches of a run read the same inputs, which are then in the cache, as a producer's output is. Ops with `cold`
inputs (GEMMs, whose weights come from memory) take turns with more copies of the inputs than the cache holds.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tunedcomm.kernels.common.feasibility import Launch
from tunedcomm.tuner.gang.protocol import Latency
from tunedcomm.tuner.measure.correctness import Tensors

# A replay takes much longer than an event, and than the skew (a few µs) with which ranks leave the barrier.
_REPLAY_US = 1000.0
_MIN_CALLS, _MAX_CALLS = 10, 100
# A longer call is timed by itself.
_LONG_CALL_US = 2000.0
# Head start of the host over the device before a round, so that a replay never waits for its own submission.
_HEAD_START_CYCLES = 150_000
# Inputs of all turns together: more than the largest cache (126 MB on Blackwell).
_COLD_BYTES = 160 << 20
_MAX_TURNS = 16


@dataclass(frozen=True, slots=True, eq=False)
class TimedRun:
    """Launches that are timed together.

    Attributes:
        run: does `calls` launches.
        calls: launches of one `run`.
        eager: the host's time counts too.
        lead: one launch before the clock starts. It aligns the ranks of a host better than the barrier does, whose skew
            (up to 1 ms) is as long as a hundred calls.
    """

    run: Callable[[], None]
    calls: int
    eager: bool
    lead: Callable[[], None] | None = None


def calls_on_host(probe_us: Callable[[int, bool], float]) -> tuple[int, bool]:
    """Launches a round on the host, and True if one more launch leads each round.

    Args:
        probe_us: (launches a round, lead) to µs a launch; the same on every rank.
    """
    if probe_us(1, False) >= _LONG_CALL_US:
        return 1, False
    return max(1, min(_MAX_CALLS, int(_REPLAY_US / max(probe_us(2, True), 0.1)))), True


def calls_for(latency_us: float) -> int:
    """Launches a round on a device, for a launch that takes `latency_us`."""
    if latency_us >= _LONG_CALL_US:
        return 3
    return max(_MIN_CALLS, min(_MAX_CALLS, round(_REPLAY_US / max(latency_us, 0.1))))


def num_turns(inputs: Tensors, *, cold: bool) -> int:
    """Number of copies of these inputs that launches take in turn; one where the inputs may be in the cache."""
    if not cold or not inputs[0].is_cuda:
        return 1
    nbytes = max(1, sum(tensor.nbytes for tensor in inputs))
    return min(_MAX_TURNS, 1 + -(-_COLD_BYTES // nbytes))


def further_turns(inputs: Tensors, *, cold: bool) -> tuple[Tensors, ...]:
    """Copies of `inputs` for launches to take in turn with them."""
    return tuple(tuple(tensor.clone() for tensor in inputs) for _ in range(num_turns(inputs, cold=cold) - 1))


def capture(run: Callable[[], None], stream: torch.cuda.Stream) -> torch.cuda.CUDAGraph:
    """A graph of the launches of `run` on `stream`; one replay uploads it."""
    captured = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        # Not torch.cuda.graph(): it collects garbage and empties the allocator's cache at every capture.
        captured.capture_begin(capture_error_mode="thread_local")
        try:
            run()
        except BaseException:
            with contextlib.suppress(RuntimeError):  # the capture is broken already; report the first error
                captured.capture_end()
            raise
        captured.capture_end()
        captured.replay()
    return captured


def make_run(
    launch: Launch,
    inputs: Tensors,
    outputs: Tensors,
    *,
    calls: int,
    graph: bool,
    stream: torch.cuda.Stream | None,
    further: Sequence[Tensors] = (),
    lead: bool = False,
) -> TimedRun:
    """A timed run of a bound launch that has already run at least once.

    Args:
        launch: the bound launch.
        inputs, outputs: of its launches.
        calls: launches a round.
        graph: capture the launches on the stream.
        stream: None on the host.
        further: more inputs of the same shapes; launches take them in turn with `inputs`.
        lead: one more launch leads each round (on the host alone).
    """
    handle = stream.cuda_stream if stream is not None else 0
    turns = (inputs, *further)
    in_turn = [turns[index % len(turns)] for index in range(calls)]

    def run() -> None:
        for values in in_turn:
            launch(values, outputs, handle)

    if stream is None or not graph:
        return TimedRun(run, calls, eager=True, lead=(lambda: launch(inputs, outputs, handle)) if lead else None)
    return TimedRun(capture(run, stream).replay, calls, eager=False)


def take_rounds(
    barrier: Callable[[], object],
    runs: Sequence[TimedRun],
    rounds: int,
    stream: torch.cuda.Stream | None,
    *,
    first: int = 0,
) -> list[list[float]]:
    """This rank's µs a call, by run and round. Waits for the device.

    All ranks call this with the same counts.

    Args:
        barrier: makes the current stream wait for every rank's stream.
        runs: timed in the order that `order_of_round` gives for each round.
        rounds: number of rounds.
        stream: None on the host.
        first: index of the first round, for callers that take rounds one by one.
    """
    by_host = stream is None or runs[0].eager

    def now() -> Any:
        if stream is not None and by_host:
            stream.synchronize()
        if by_host:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(stream)
        return event

    spans: list[list[tuple[Any, Any]]] = [[] for _ in runs]
    with contextlib.nullcontext() if stream is None else torch.cuda.stream(stream):
        if not by_host:
            torch.cuda._sleep(_HEAD_START_CYCLES)  # type: ignore[no-untyped-call]
        for round_index in range(first, first + rounds):
            for index in order_of_round(round_index, len(runs)):
                barrier()
                if (lead := runs[index].lead) is not None:
                    lead()
                begin = now()
                runs[index].run()
                spans[index].append((begin, now()))
    if stream is not None:
        stream.synchronize()
    return [
        [((end - begin) * 1e6 if by_host else begin.elapsed_time(end) * 1e3) / run.calls for begin, end in run_spans]
        for run, run_spans in zip(runs, spans, strict=True)
    ]


def order_of_round(round_index: int, count: int) -> list[int]:
    """The order of `count` runs in a round.

    In every `2 * count` rounds each run has each position, and follows each other run, equally often. This is a Latin
    square balanced for carry-over effects, after E. J. Williams (1949): a round takes its first run, then in turn the
    next run after it and before it; every other `count` rounds take the run before it first.
    """
    sign = -1 if round_index // count % 2 else 1
    offsets = [(position + 1) // 2 if position % 2 else -(position // 2) for position in range(count)]
    return [(round_index + sign * offset) % count for offset in offsets]


def summarise(by_rank: Sequence[Sequence[float]]) -> Latency:
    """Percentiles of the slowest rank's time over rounds, by linear interpolation."""
    slowest = [max(times) for times in zip(*by_rank, strict=True)]
    deciles = statistics.quantiles(slowest if len(slowest) > 1 else slowest * 2, n=10, method="inclusive")
    return Latency(p10_us=deciles[0], p50_us=deciles[4], p90_us=deciles[8], samples=len(slowest))
