"""Checks that all ops share: why a kernel cannot run, how large its grid is, which config to try first."""

from __future__ import annotations

import functools
import heapq
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from tunedcomm.kernels.common import sync
from tunedcomm.kernels.common.packets import PACKET_BYTES, packets_of
from tunedcomm.space import Config, Space, Value
from tunedcomm.spec import Limits, Problem
from tunedcomm.symm.layout import MAX_WORLD_SIZE

T = TypeVar("T")
Launch = Callable[[tuple[Any, ...], tuple[Any, ...], int], None]
RING = 4  # chunks of a rank that the staging holds at once
MAX_NUM_CHUNKS = 32  # the largest value of an axis; stands for as many chunks as the staging needs
_MAX_LOOKS = 4096
_MIN_BLOCKS = 8  # with work for 8 blocks, fewer blocks never won


def kept(function: Callable[[Problem], T]) -> Callable[[Problem], T]:
    """A function of a problem that keeps its last result: all checks of a size ask for it."""
    last: tuple[Problem, T] | None = None

    @functools.wraps(function)
    def of(problem: Problem) -> T:
        nonlocal last
        known = last
        if known is None or known[0] is not problem:
            last = known = problem, function(problem)
        return known[1]

    return of


def power_of_2(count: int) -> int:
    """The least power of two from `count` on; 0 of 0."""
    return 1 << (count - 1).bit_length() if count else 0


def refuse_kernels(problem: Problem, limits: Limits, dtypes: Sequence[str], reductions: Sequence[str]) -> str | None:
    """Return why no kernel can run `problem`, whatever the config; None if one might.

    Args:
        problem, limits: the problem and the machine.
        dtypes: payloads that the op's kernels take.
        reductions: reductions that the kernels do; `("",)` for ops that reduce nothing.
    """
    if not limits.symmetric:
        if limits.backend == "host" and not sync.INTERPRET:
            return "kernels run on CPUs in Triton's interpreter; set TRITON_INTERPRET=1 before the program starts"
        return "the ranks cannot address each other's memory"
    if problem.dtype not in dtypes:
        does = "move" if tuple(reductions) == ("",) else "sum"
        return f"kernels {does} {', '.join(dtypes)}; {problem.dtype} goes to the library"
    if problem.reduction not in reductions:
        return f"kernels do {' and '.join(reductions)}; {problem.reduction} goes to the library"
    if not 2 <= problem.world_size <= MAX_WORLD_SIZE:
        return f"kernels serve 2 to {MAX_WORLD_SIZE} ranks, not {problem.world_size}"
    if problem.numel == 0:
        return "there is nothing to do"
    return None


def refuse_result(problem: Problem, *, wide: bool = False, quantized: bool = False) -> str | None:
    """Return why results are not the problem's, or None.

    Args:
        problem: the problem.
        wide: results are fp32 sums of 16-bit floats, else rounded.
        quantized: payloads travel quantised.
    """
    if quantized != bool(problem.scaling):
        return "its payloads travel quantised; wire= asks for that" if quantized else "its payloads travel as they are"
    if wide == (problem.layout == "float32"):
        return None
    return "its results are fp32 sums" if wide else "its sums are rounded; the variants that end in _fp32 round none"


def refuse_multicast(limits: Limits) -> str | None:
    """Return why multimem kernels must not be launched here, or None."""
    if not limits.multicast and not limits.emulated_multicast:
        return "the fabric reports no NVLink multicast, or it is switched off"
    return None


def packets_a_block(config: Config) -> int:
    """Packets that a block takes at once: `items` a thread, or one if the space has no such axis."""
    return 32 * int(config["num_warps"]) * int(config.get("items", 1))


def grid_rounds(work_packets: int, config: Config) -> int:
    """Rounds of a grid of `num_blocks` for so many packets."""
    return -(-work_packets // (int(config["num_blocks"]) * packets_a_block(config)))


def refuse_residence(config: Config, limits: Limits) -> str | None:
    """Return why the blocks of a grid cannot all be resident, or None: 512 threads an SM fit with any registers."""
    return _refuse_residence(int(config["num_blocks"]), 32 * int(config["num_warps"]), limits)


def _refuse_residence(blocks: int, threads: int, limits: Limits) -> str | None:
    if blocks > limits.max_blocks:
        return f"{blocks} blocks, but the signal area has {limits.max_blocks} rows"
    if limits.backend == "cuda" and blocks > limits.num_sms * max(1, 512 // threads):
        return f"{blocks} blocks of {threads} threads do not all fit on {limits.num_sms} SMs at once"
    if limits.backend == "host" and blocks > 4:
        return "interpreted blocks run one after another: more than 4 only cost time"
    return None


def blocks_and_threads(config: Config, limits: Limits, work_packets: int, *, max_rounds: int) -> str | None:
    """Return why a grid does not suit `work_packets` packets, or None.

    A grid must be resident, have work for each block, and not go round more than `max_rounds` times.
    """
    blocks, threads = int(config["num_blocks"]), 32 * int(config["num_warps"])
    if reason := _refuse_residence(blocks, threads, limits):
        return reason
    per_round = threads * int(config.get("items", 1))
    if (blocks - 1) * per_round >= work_packets and blocks > 1:
        return f"{work_packets} packets leave some of {blocks} blocks without work"
    if blocks * per_round * max_rounds < work_packets:
        return f"{work_packets} packets need more than {max_rounds} rounds of {blocks} blocks"
    if limits.backend == "cuda" and blocks < _MIN_BLOCKS and work_packets >= _MIN_BLOCKS * per_round:
        return f"{blocks} blocks leave the links idle at {work_packets} packets"
    return None


def refuse_one_shot(problem: Problem, limits: Limits, *, messages: int = 1) -> str | None:
    """Return why so many messages do not fit into a one-shot area, or None."""
    if messages * packets_of(problem.nbytes) * PACKET_BYTES > limits.one_shot_bytes:
        return f"{messages * problem.nbytes} bytes exceed the one-shot area of {limits.one_shot_bytes} bytes"
    return None


def refuse_message(nbytes: int, room: int) -> str | None:
    """Return why a message that is staged as a whole does not fit into `room` bytes, or None."""
    return f"{nbytes} bytes exceed the staging of {room} bytes (TUNEDCOMM_WORKSPACE_MIB)" if nbytes > room else None


def refuse_streams(problem: Problem, num_streams: Value) -> str | None:
    """Return why copies do not go to so many side streams, or None."""
    peers = problem.world_size - 1
    return f"{num_streams} streams, but only {peers} peers to copy to" if int(num_streams) > peers else None


def refuse_launch_pdl(config: Config, limits: Limits) -> str | None:
    """Return why `launch_pdl` may not be set here, or None."""
    if config.get("launch_pdl") and not limits.launch_pdl:
        return "programmatic dependent launch is not available here"
    return None


def refuse_stage(problem: Problem, limits: Limits, bytes_of_rank: int) -> str | None:
    """Return why `bytes_of_rank` from every rank do not fit into a stage, or None."""
    if bytes_of_rank * problem.world_size > limits.stage_bytes:
        return f"{bytes_of_rank} bytes from {problem.world_size} ranks exceed a stage of {limits.stage_bytes} bytes"
    return None


def refuse_staging(
    problem: Problem, limits: Limits, *, chunk_bytes: int, num_chunks: int, slots: int, ring: int = RING
) -> str | None:
    """Return why the staging cannot hold `ring` of `num_chunks` chunks from each of `slots` ranks at once, or None."""
    ring = min(num_chunks, ring)
    if (needed := slots * ring * chunk_bytes) > limits.staging_bytes:
        return (
            f"{ring} of the {num_chunks} chunks of {problem.nbytes} bytes need {needed} bytes of staging; "
            f"there are {limits.staging_bytes} (TUNEDCOMM_WORKSPACE_MIB)"
        )
    return None


def cut_to_fit(units: int, chunks: int, *, unit_bytes: int, slots: int, staging_bytes: int) -> tuple[int, int]:
    """Units of a chunk, and number of chunks, where `units` of `unit_bytes` go through a ring of `RING` chunks.

    MAX_NUM_CHUNKS chunks become as many more as it takes for the rings of `slots` ranks to fit into the staging.
    """
    span = -(-units // chunks)
    if chunks == MAX_NUM_CHUNKS:
        span = max(min(span, staging_bytes // (slots * RING * unit_bytes)), 1)
    return span, -(-units // span)


def closest(
    preferred: Mapping[str, float],
    space: Space,
    problem: Problem,
    limits: Limits,
    infeasible: Callable[[Problem, Config, Limits], str | None],
) -> dict[str, Value]:
    """The feasible config nearest to `preferred` (numbers by their ratio); the nearest of all if none is feasible.

    Nearer ones are looked at first, `_MAX_LOOKS` at most: spaces of fused GEMMs have a hundred thousand points.
    """
    axes = [_by_distance(axis.values(), tuple(map(type, axis.values())), preferred[name]) for name, axis in space.axes]

    def entry(places: tuple[int, ...]) -> tuple[float, tuple[int, ...], tuple[int, ...]]:
        entries = [axis[place] for axis, place in zip(axes, places, strict=True)]
        return sum(distance for distance, _, _ in entries), tuple(index for _, index, _ in entries), places

    first = (0,) * len(axes)
    heap, seen = [entry(first)], {first}
    nearest: dict[str, Value] | None = None
    for _ in range(_MAX_LOOKS):
        if not heap:
            break
        _, _, places = heapq.heappop(heap)
        config = {name: axis[place][2] for name, axis, place in zip(space.names, axes, places, strict=True)}
        nearest = nearest or config
        if infeasible(problem, config, limits) is None:
            return config
        for index, place in enumerate(places):
            further = (*places[:index], place + 1, *places[index + 1 :])
            if place + 1 < len(axes[index]) and further not in seen:
                seen.add(further)
                heapq.heappush(heap, entry(further))
    return nearest or {}


@functools.lru_cache(maxsize=512)
def _by_distance(
    values: Sequence[Value], types: tuple[type, ...], preferred: float
) -> tuple[tuple[float, int, Value], ...]:
    """(distance, index, value) of an axis' values of these types, nearest first; True is 1 in a cache's keys."""
    del types

    def distance(value: Value) -> float:
        if isinstance(value, (bool, str)):
            return float(value != preferred)
        return abs(math.log2(value) - math.log2(max(preferred, 1.0)))

    return tuple(sorted((distance(value), index, value) for index, value in enumerate(values)))
