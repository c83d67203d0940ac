"""lamport: all_reduce's `lamport` with a bias that every rank adds to the sums as it writes them.

Protocol, stages, clearing and lane rules are those of all_reduce's `lamport`, word for word; the bias is read only.

Numerics: ordered. Graph-safe: the call counter lives in the lane.
Source: see all_reduce's `lamport`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tunedcomm.kernels.all_reduce._common import message_rounds
from tunedcomm.kernels.all_reduce_bias._common import bind_flat, flat_request, refuse, with_bias
from tunedcomm.kernels.common.feasibility import Launch, blocks_and_threads, kernel_blocks
from tunedcomm.kernels.common.lane import STATE_OFFSET, block_range, read_counter, write_counter
from tunedcomm.kernels.common.packets import arm, insert_own, packets_of, sum_packets
from tunedcomm.kernels.common.protocols import LAMPORT_SPACE, lamport_default, refuse_launch_pdl, refuse_stage
from tunedcomm.kernels.common.sync import INTERPRET, SENTINEL, load_packets, poll_packets, store_packets
from tunedcomm.space import Config, Value
from tunedcomm.spec import Limits, Problem, Variant, register_variant

if TYPE_CHECKING:
    from tunedcomm.symm.workspace import Workspace

__all__ = ["LAMPORT", "bias_lamport_kernel"]


@triton.jit
def bias_lamport_kernel(
    x, bias, out, total, row, local, q0, q1, q2, q3, q4, q5, q6, rank, timeout_ns, status, arena, stage_bytes,
    WORLD_SIZE: tl.constexpr, DTYPE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Push own packets to all peers, poll theirs, sum. Slot r of a stage holds rank r's packets, tightly packed."""
    if PDL and not INTERPRET:
        gdc_wait()
    peers = (q0, q1, q2, q3, q4, q5, q6)
    calls = read_counter(local, STATE_OFFSET)
    stage = arena + (calls & 1) * stage_bytes
    lanes, first, step = block_range(BLOCK)

    for start in tl.range(first, total, step):
        packet = start + lanes
        here = packet < total
        w0, w1, w2, w3 = load_packets(x + packet * 16, here)
        w0, w1, w2, w3 = arm(w0), arm(w1), arm(w2), arm(w3)
        place = stage + (rank * total + packet) * 16
        for i in tl.static_range(WORLD_SIZE - 1):
            store_packets(peers[i] + place, w0, w1, w2, w3, here, REMOTE=True)
    if PDL and not INTERPRET:
        gdc_launch_dependents()

    for start in tl.range(first, total, step):
        packet = start + lanes
        here = packet < total
        own = load_packets(x + packet * 16, here)
        place = local + stage + packet * 16
        words = poll_packets(place, total * 16, here, rank, timeout_ns, status, WORLD_SIZE)
        empty = tl.full((BLOCK,), SENTINEL, tl.int32)
        for i in tl.static_range(WORLD_SIZE):
            store_packets(place + i * total * 16, empty, empty, empty, empty, here & (rank != i))
        s = sum_packets(insert_own(words, own, rank, WORLD_SIZE), DTYPE, False, WORLD_SIZE)
        s0, s1, s2, s3 = with_bias(s, bias, packet, row, here, DTYPE)
        store_packets(out + packet * 16, s0, s1, s2, s3, here)
    write_counter(local, calls + 1, STATE_OFFSET)


def _infeasible(problem: Problem, config: Config, limits: Limits) -> str | None:
    if reason := refuse(problem, limits):
        return reason
    packets = packets_of(problem.nbytes)
    if reason := refuse_stage(problem, limits, packets * 16):
        return reason
    if reason := refuse_launch_pdl(config, limits):
        return reason
    return blocks_and_threads(config, limits, packets, most_rounds=4)


def _default(problem: Problem, limits: Limits) -> dict[str, Value]:
    return lamport_default(packets_of(problem.nbytes), problem, limits, _infeasible)


def _requests(problem: Problem, config: Config) -> Iterable[Any]:
    return (flat_request(bias_lamport_kernel, problem, config),)


def _bind(problem: Problem, config: Config, workspace: Workspace) -> Launch:
    request = flat_request(bias_lamport_kernel, problem, config)
    return bind_flat(problem, config, workspace, request, workspace.layout.arena, workspace.layout.stage_bytes)


LAMPORT = register_variant(
    Variant(
        op="all_reduce_bias",
        name="lamport",
        numerics="ordered",
        summary="one-shot push without flags: packets announce themselves; best at small sizes",
        space=LAMPORT_SPACE,
        infeasible=_infeasible,
        default=_default,
        bind=_bind,
        num_blocks=kernel_blocks,
        num_rounds=message_rounds,
        kernels=(bias_lamport_kernel,),
        compile_requests=_requests,
    )
)
