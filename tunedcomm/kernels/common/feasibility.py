"""What variants of all ops share on the host: feasibility rules, grids, launches."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tunedcomm.kernels.common.launch import AddressLaunch, CompileRequest, bind_kernel
from tunedcomm.space import Config, Space, Value
from tunedcomm.spec import Limits, Problem
from tunedcomm.symm.layout import MAX_WORLD_SIZE

if TYPE_CHECKING:
    from tunedcomm.symm.workspace import Workspace

__all__ = [
    "Launch",
    "bind_flagged",
    "bind_plain",
    "blocks_and_threads",
    "closest",
    "grid_rounds",
    "kernel_blocks",
    "launch_flagged",
    "refuse_kernels",
    "refuse_multicast",
]

Launch = Callable[[tuple[Any, ...], tuple[Any, ...], int], None]
_MOST_LOOKS = 4096
_MIN_BLOCKS = 8  # fewer never won where there was work for that many


def refuse_kernels(problem: Problem, limits: Limits, dtypes: Sequence[str], reductions: Sequence[str]) -> str | None:
    """Why no kernel of ours can run `problem`, whatever the config; None if one might.

    Args:
        problem, limits: what is asked, and where.
        dtypes: payloads that the op's kernels take.
        reductions: reductions that they do; `("",)` for ops that reduce nothing.
    """
    if not limits.symmetric:
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


def refuse_multicast(limits: Limits) -> str | None:
    """Why multimem kernels must not be launched here, or None."""
    if not limits.multicast and not limits.emulated_multicast:
        return "the fabric reports no NVLink multicast, or it is switched off"
    return None


def kernel_blocks(problem: Problem, config: Config) -> int:
    """Thread blocks of a config that has a `num_blocks` axis."""
    del problem
    return int(config["num_blocks"])


def grid_rounds(work_packets: int, config: Config) -> int:
    """How often a grid of `num_blocks`, `num_warps` and perhaps `items` goes round for so many packets."""
    per_round = int(config["num_blocks"]) * 32 * int(config["num_warps"]) * int(config.get("items", 1))
    return -(-work_packets // per_round)


def blocks_and_threads(config: Config, limits: Limits, work_packets: int, *, most_rounds: int) -> str | None:
    """Why a grid does not suit `work_packets` packets, or None.

    A grid must be resident (512 threads an SM fit whatever registers a kernel takes), have work for each block, and not
    go round more than `most_rounds` times.
    """
    blocks, threads = int(config["num_blocks"]), 32 * int(config["num_warps"])
    if blocks > limits.max_blocks:
        return f"{blocks} blocks, but the signal area has {limits.max_blocks} rows"
    if limits.backend == "cuda" and blocks * threads > limits.num_sms * 512:
        return f"{blocks} blocks of {threads} threads do not all fit on {limits.num_sms} SMs at once"
    if limits.backend == "host" and blocks > 4:
        return "interpreted blocks run one after another: more than 4 only cost time"
    per_round = threads * int(config.get("items", 1))
    if (blocks - 1) * per_round >= work_packets and blocks > 1:
        return f"{work_packets} packets leave some of {blocks} blocks without work"
    if blocks * per_round * most_rounds < work_packets:
        return f"{work_packets} packets need more than {most_rounds} rounds of {blocks} blocks"
    if limits.backend == "cuda" and blocks < _MIN_BLOCKS and work_packets >= _MIN_BLOCKS * per_round:
        return f"{blocks} blocks leave the links idle at {work_packets} packets"
    return None


def bind_plain(problem: Problem, config: Config, workspace: Workspace, request: CompileRequest, *extra: int) -> Launch:
    """Launch of a kernel `(x, out, numel, local, q0 … q6, rank, timeout_ns, status, *extra, constants)`."""
    lane = workspace.lanes[problem.mode]
    lane_arguments = (problem.numel, lane.local, *lane.peers, workspace.rank, workspace.timeout_ns)
    kernel = bind_kernel(request, int(config["num_blocks"]), workspace.device)
    return AddressLaunch(kernel.fix((None, None, *lane_arguments, workspace.status_argument(problem), *extra)))


def bind_flagged(
    problem: Problem, config: Config, workspace: Workspace, request: CompileRequest, *extra: int
) -> Launch:
    """Launch of a kernel like `bind_plain`'s with the peers' addresses of the input, x0 … x6, before `extra`.

    The request's constant SYMMETRIC says whether the input is addressed on the peers; where it is not, they are 0.
    """
    lane = workspace.lanes[problem.mode]
    lane_arguments = (problem.numel, lane.local, *lane.peers, workspace.rank, workspace.timeout_ns)
    head = (None, None, *lane_arguments, workspace.status_argument(problem))
    return launch_flagged(config, workspace, request, head, extra)


def launch_flagged(
    config: Config, workspace: Workspace, request: CompileRequest, head: Sequence[int | None], extra: Sequence[int]
) -> Launch:
    """Launch of a kernel whose arguments are `head`, the peers' addresses of the input, x0 … x6, and `extra`."""
    kernel = bind_kernel(request, int(config["num_blocks"]), workspace.device)
    if not dict(request.constants)["SYMMETRIC"]:
        return AddressLaunch(kernel.fix((*head, *(0,) * (MAX_WORLD_SIZE - 1), *extra)))
    launch, peers_of = kernel.fix((*head, *(None,) * (MAX_WORLD_SIZE - 1), *extra)), workspace.peers_of

    def run_symmetric(inputs: tuple[Any, ...], outputs: tuple[Any, ...], stream: int) -> None:
        x = inputs[0]
        launch(stream, x.data_ptr(), outputs[0].data_ptr(), *peers_of(x))

    return run_symmetric


def closest(
    wish: Mapping[str, float],
    space: Space,
    problem: Problem,
    limits: Limits,
    infeasible: Callable[[Problem, Config, Limits], str | None],
) -> dict[str, Value]:
    """The feasible config nearest to `wish` (numbers by their ratio), or the nearest of all where none is found.

    Nearer ones are looked at first, `_MOST_LOOKS` at most: spaces of fused GEMMs have a hundred thousand points.
    """
    axes = [_by_distance(axis.values(), wish[name]) for name, axis in space.axes]

    def entry(places: tuple[int, ...]) -> tuple[float, tuple[int, ...], tuple[int, ...]]:
        steps = [axis[place] for axis, place in zip(axes, places, strict=True)]
        return sum(step[0] for step in steps), tuple(step[1] for step in steps), places

    first = (0,) * len(axes)
    heap, seen = [entry(first)], {first}
    nearest: dict[str, Value] | None = None
    for _ in range(_MOST_LOOKS):
        if not heap:
            break
        _, _, places = heapq.heappop(heap)
        config = {name: axis[place][2] for name, axis, place in zip(space.names, axes, places, strict=True)}
        nearest = nearest or config
        if infeasible(problem, config, limits) is None:
            return config
        for number, place in enumerate(places):
            further = (*places[:number], place + 1, *places[number + 1 :])
            if place + 1 < len(axes[number]) and further not in seen:
                seen.add(further)
                heapq.heappush(heap, entry(further))
    return nearest or {}


def _by_distance(values: Sequence[Value], wish: float) -> list[tuple[float, int, Value]]:
    """(distance, index, value) of an axis' values, nearest first."""

    def distance(value: Value) -> float:
        if isinstance(value, (bool, str)):
            return float(value != wish)
        return abs(math.log2(value) - math.log2(max(wish, 1.0)))

    return sorted((distance(value), index, value) for index, value in enumerate(values))
