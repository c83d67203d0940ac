"""one_shot: all_reduce's `one_shot` on plain input, with a bias that every rank adds to the sums as it writes them.

Protocol, areas, flags and lane rules are those of all_reduce's `one_shot`, word for word; the bias is read only.

Numerics: ordered. Graph-safe.
Source: see all_reduce's `one_shot`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import triton
import triton.language as tl

from tunedcomm.kernels.all_reduce._common import message_rounds
from tunedcomm.kernels.all_reduce_bias._common import bind_flat, flat_request, refuse, with_bias
from tunedcomm.kernels.common.feasibility import Launch, blocks_and_threads, kernel_blocks
from tunedcomm.kernels.common.lane import (
    EPOCH_OFFSET,
    address_of,
    arrive,
    await_peers,
    block_range,
    read_counter,
    write_counter,
)
from tunedcomm.kernels.common.packets import insert_own, packets_of, sum_packets
from tunedcomm.kernels.common.protocols import READING_SPACE, reading_default, refuse_one_shot
from tunedcomm.kernels.common.sync import load_packets, store_packets
from tunedcomm.space import Config, Value
from tunedcomm.spec import Limits, Problem, Variant, register_variant

if TYPE_CHECKING:
    from tunedcomm.symm.workspace import Workspace

__all__ = ["ONE_SHOT", "bias_one_shot_kernel"]


@triton.jit
def bias_one_shot_kernel(
    x, bias, out, total, row, local, q0, q1, q2, q3, q4, q5, q6, rank, timeout_ns, status, area, area_bytes,
    WORLD_SIZE: tl.constexpr, DTYPE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Publish the own input, exchange flags, read all ranks' packets, sum and add."""
    epoch = read_counter(local, EPOCH_OFFSET)
    mine = area + (epoch & 1) * area_bytes
    peers = (q0 + mine, q1 + mine, q2 + mine, q3 + mine, q4 + mine, q5 + mine, q6 + mine)
    lanes, first, step = block_range(BLOCK)
    for start in tl.range(first, total, step):
        packet = start + lanes
        here = packet < total
        w0, w1, w2, w3 = load_packets(x + packet * 16, here)
        store_packets(local + mine + packet * 16, w0, w1, w2, w3, here)

    # Releases the copies, acquires the peers'.
    arrive(local, q0, q1, q2, q3, q4, q5, q6, rank, epoch + 1, WORLD_SIZE)
    await_peers(local, rank, epoch + 1, timeout_ns, status, WORLD_SIZE)

    for start in tl.range(first, total, step):
        packet = start + lanes
        here = packet < total
        own = load_packets(x + packet * 16, here)
        words = ()
        for i in tl.static_range(WORLD_SIZE):
            source = address_of(peers, x, i, rank, WORLD_SIZE)
            words = words + load_packets(source + packet * 16, here & (rank != i))
        s = sum_packets(insert_own(words, own, rank, WORLD_SIZE), DTYPE, False, WORLD_SIZE)
        s0, s1, s2, s3 = with_bias(s, bias, packet, row, here, DTYPE)
        store_packets(out + packet * 16, s0, s1, s2, s3, here)
    write_counter(local, epoch + 1, EPOCH_OFFSET)


def _infeasible(problem: Problem, config: Config, limits: Limits) -> str | None:
    if reason := refuse(problem, limits) or refuse_one_shot(problem, limits):
        return reason
    return blocks_and_threads(config, limits, packets_of(problem.nbytes), most_rounds=8)


def _default(problem: Problem, limits: Limits) -> dict[str, Value]:
    return reading_default(packets_of(problem.nbytes), 64, READING_SPACE, problem, limits, _infeasible)


def _requests(problem: Problem, config: Config) -> Iterable[Any]:
    return (flat_request(bias_one_shot_kernel, problem, config),)


def _bind(problem: Problem, config: Config, workspace: Workspace) -> Launch:
    request, layout = flat_request(bias_one_shot_kernel, problem, config), workspace.layout
    return bind_flat(problem, config, workspace, request, layout.one_shot, layout.one_shot_bytes)


ONE_SHOT = register_variant(
    Variant(
        op="all_reduce_bias",
        name="one_shot",
        numerics="ordered",
        summary="every rank reads all inputs, sums them and adds; one exchange of flags",
        space=READING_SPACE,
        infeasible=_infeasible,
        default=_default,
        bind=_bind,
        num_blocks=kernel_blocks,
        num_rounds=message_rounds,
        kernels=(bias_one_shot_kernel,),
        compile_requests=_requests,
    )
)
