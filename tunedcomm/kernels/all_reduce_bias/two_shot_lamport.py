"""two_shot_lamport: all_reduce's `two_shot_lamport`, whose owners add the bias to their slices before they push them.

Protocol, stages and lane rules are those of all_reduce's `two_shot_lamport`, but that slices are not padded: packets
behind the end of the matrix are neither sent nor awaited, and every slice has a packet (`infeasible` sees to it). A sum
by the ordered rule is never −0.0, nor is it with a bias, so `arm` changes nothing.

Numerics: ordered (every element is summed once, by its slice's owner). Graph-safe.
Source: see all_reduce's `two_shot_lamport`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tunedcomm.kernels.all_reduce._common import slice_packets, slice_rounds
from tunedcomm.kernels.all_reduce_bias._common import bind_flat, flat_request, refuse, with_bias
from tunedcomm.kernels.common.feasibility import Launch, blocks_and_threads, kernel_blocks
from tunedcomm.kernels.common.lane import STATE_OFFSET, block_range, read_counter, write_counter
from tunedcomm.kernels.common.packets import arm, insert_own, packets_of, sum_packets
from tunedcomm.kernels.common.protocols import refuse_launch_pdl, two_shot_lamport_default
from tunedcomm.kernels.common.sync import INTERPRET, SENTINEL, load_packets, poll_packets, store_packets
from tunedcomm.kernels.common.words import poll_from
from tunedcomm.space import Choice, Config, PowerOfTwo, Space, Value
from tunedcomm.spec import Limits, Problem, Variant, register_variant

if TYPE_CHECKING:
    from tunedcomm.symm.workspace import Workspace

__all__ = ["TWO_SHOT_LAMPORT", "bias_two_shot_lamport_kernel"]


@triton.jit
def bias_two_shot_lamport_kernel(
    x, bias, out, total, row, local, q0, q1, q2, q3, q4, q5, q6, rank, timeout_ns, status, arena, stage_bytes,
    WORLD_SIZE: tl.constexpr, DTYPE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Three loops over a slice: push all, reduce and push sums, collect all."""
    if PDL and not INTERPRET:
        gdc_wait()
    peers = (q0, q1, q2, q3, q4, q5, q6)
    calls = read_counter(local, STATE_OFFSET)
    scatter = arena + (calls & 1) * stage_bytes
    share = (total + WORLD_SIZE - 1) // WORLD_SIZE
    gather = scatter + WORLD_SIZE * share * 16
    lanes, first, step = block_range(BLOCK)
    empty = tl.full((BLOCK,), SENTINEL, tl.int32)

    for start in tl.range(first, share, step):
        at = start + lanes
        here = at < share
        place = scatter + (rank * share + at) * 16
        for i in tl.static_range(WORLD_SIZE - 1):
            packet = (rank + 1 + i) % WORLD_SIZE * share + at
            there = here & (packet < total)
            w0, w1, w2, w3 = load_packets(x + packet * 16, there)
            store_packets(peers[i] + place, arm(w0), arm(w1), arm(w2), arm(w3), there, REMOTE=True)

    for start in tl.range(first, share, step):
        at = start + lanes
        packet = rank * share + at
        here = (at < share) & (packet < total)
        own = load_packets(x + packet * 16, here)
        place = local + scatter + at * 16
        words = poll_packets(place, share * 16, here, rank, timeout_ns, status, WORLD_SIZE)
        s = sum_packets(insert_own(words, own, rank, WORLD_SIZE), DTYPE, False, WORLD_SIZE)
        s0, s1, s2, s3 = with_bias(s, bias, packet, row, here, DTYPE)
        s0, s1, s2, s3 = arm(s0), arm(s1), arm(s2), arm(s3)
        for i in tl.static_range(WORLD_SIZE - 1):
            store_packets(peers[i] + gather + packet * 16, s0, s1, s2, s3, here, REMOTE=True)
        store_packets(out + packet * 16, s0, s1, s2, s3, here)
        for i in tl.static_range(WORLD_SIZE):
            store_packets(place + i * share * 16, empty, empty, empty, empty, here & (rank != i))
    if PDL and not INTERPRET:
        gdc_launch_dependents()

    for start in tl.range(first, share, step):
        at = start + lanes
        for i in tl.static_range(WORLD_SIZE):
            packet = i * share + at
            theirs = (at < share) & (packet < total) & (rank != i)
            place = local + gather + packet * 16
            w0, w1, w2, w3 = poll_from(place, theirs, tl.full((BLOCK,), i, tl.int32), timeout_ns, status)
            store_packets(out + packet * 16, w0, w1, w2, w3, theirs)
            store_packets(place, empty, empty, empty, empty, theirs)
    write_counter(local, calls + 1, STATE_OFFSET)


_SPACE = Space(
    {
        "num_blocks": Choice(1, 2, 4, 8, 16, 32, 64, 96, 132, 264),
        "num_warps": PowerOfTwo(1, 16),
        "launch_pdl": Choice(False, True),
    }
)


def _infeasible(problem: Problem, config: Config, limits: Limits) -> str | None:
    if reason := refuse(problem, limits):
        return reason
    share = slice_packets(problem)
    if (problem.world_size - 1) * share >= packets_of(problem.nbytes):
        return f"{problem.nbytes} bytes leave some of {problem.world_size} ranks without a slice"
    if 2 * problem.world_size * share * 16 > limits.stage_bytes:
        return f"{problem.nbytes} bytes need more than a stage of {limits.stage_bytes} bytes"
    if reason := refuse_launch_pdl(config, limits):
        return reason
    return blocks_and_threads(config, limits, share, most_rounds=4)


def _default(problem: Problem, limits: Limits) -> dict[str, Value]:
    return two_shot_lamport_default(slice_packets(problem), _SPACE, problem, limits, _infeasible)


def _requests(problem: Problem, config: Config) -> Iterable[Any]:
    return (flat_request(bias_two_shot_lamport_kernel, problem, config),)


def _bind(problem: Problem, config: Config, workspace: Workspace) -> Launch:
    request = flat_request(bias_two_shot_lamport_kernel, problem, config)
    return bind_flat(problem, config, workspace, request, workspace.layout.arena, workspace.layout.stage_bytes)


TWO_SHOT_LAMPORT = register_variant(
    Variant(
        op="all_reduce_bias",
        name="two_shot_lamport",
        numerics="ordered",
        summary="reduce-scatter and all-gather by self-announcing packets in one kernel; best at medium sizes",
        space=_SPACE,
        infeasible=_infeasible,
        default=_default,
        bind=_bind,
        num_blocks=kernel_blocks,
        num_rounds=slice_rounds,
        kernels=(bias_two_shot_lamport_kernel,),
        compile_requests=_requests,
    )
)
