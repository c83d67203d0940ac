"""two_shot: all_reduce's `two_shot` on plain input, whose owners add the bias to their slices before they push them.

Protocol, areas, flags and lane rules are those of all_reduce's `two_shot`, word for word; the bias is read only, and
packets behind the end of the matrix are neither sent nor read.

Numerics: ordered (every element is summed once, by its slice's owner). Graph-safe.
Source: see all_reduce's `two_shot`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import triton
import triton.language as tl

from tunedcomm.kernels.all_reduce._common import slice_packets, slice_rounds
from tunedcomm.kernels.all_reduce.two_shot import RING
from tunedcomm.kernels.all_reduce_bias._common import bind_flat, flat_request, refuse, with_bias
from tunedcomm.kernels.common.feasibility import Launch, blocks_and_threads, closest, kernel_blocks
from tunedcomm.kernels.common.lane import (
    EPOCH_OFFSET,
    arrive,
    await_peers,
    block_range,
    read_counter,
    write_counter,
)
from tunedcomm.kernels.common.packets import PACKET_BYTES, insert_own, sum_packets
from tunedcomm.kernels.common.sync import load_packets, store_packets
from tunedcomm.space import Choice, Config, PowerOfTwo, Space, Value
from tunedcomm.spec import Limits, Problem, Variant, register_variant

if TYPE_CHECKING:
    from tunedcomm.symm.workspace import Workspace

__all__ = ["TWO_SHOT", "bias_two_shot_kernel"]


@triton.jit
def bias_two_shot_kernel(
    x, bias, out, total, row, local, q0, q1, q2, q3, q4, q5, q6, rank, timeout_ns, status,
    scatter, gather, num_chunks,
    WORLD_SIZE: tl.constexpr, DTYPE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Plain input. In round c: push chunk c, reduce chunk c − 1, collect chunk c − 2.

    A block's flags count its steps. With C chunks, pushing chunk c is step max(1, 2c) and reducing it min(2c + 3, 2C).
    """
    peers = (q0, q1, q2, q3, q4, q5, q6)
    epoch = read_counter(local, EPOCH_OFFSET)
    share = (total + WORLD_SIZE - 1) // WORLD_SIZE
    lanes, first, step = block_range(BLOCK)
    span = ((share + step - 1) // step + num_chunks - 1) // num_chunks * step
    ring = tl.minimum(num_chunks, RING)
    slot = ring * span

    for c in tl.range(0, num_chunks + 2):
        if c < num_chunks:
            lap = (c - c % ring) * span
            for start in tl.range(first + c * span, tl.minimum(share, (c + 1) * span), step):
                at = start + lanes
                here = at < share
                for i in tl.static_range(WORLD_SIZE - 1):
                    packet = (rank + 1 + i) % WORLD_SIZE * share + at
                    there = here & (packet < total)
                    w0, w1, w2, w3 = load_packets(x + packet * 16, there)
                    store_packets(peers[i] + scatter + (rank * slot + at - lap) * 16, w0, w1, w2, w3, there)
            arrive(local, q0, q1, q2, q3, q4, q5, q6, rank, epoch + tl.maximum(1, 2 * c), WORLD_SIZE)
        if (c >= 1) & (c <= num_chunks):
            d = c - 1
            lap = (d - d % ring) * span
            await_peers(local, rank, epoch + tl.maximum(1, 2 * d), timeout_ns, status, WORLD_SIZE)
            for start in tl.range(first + d * span, tl.minimum(share, (d + 1) * span), step):
                at = start + lanes
                packet = rank * share + at
                here = (at < share) & (packet < total)
                own = load_packets(x + packet * 16, here)
                words = ()
                for i in tl.static_range(WORLD_SIZE):
                    words = words + load_packets(local + scatter + (i * slot + at - lap) * 16, here & (rank != i))
                s = sum_packets(insert_own(words, own, rank, WORLD_SIZE), DTYPE, False, WORLD_SIZE)
                s0, s1, s2, s3 = with_bias(s, bias, packet, row, here, DTYPE)
                for i in tl.static_range(WORLD_SIZE - 1):
                    store_packets(peers[i] + gather + (rank * slot + at - lap) * 16, s0, s1, s2, s3, here)
                store_packets(out + packet * 16, s0, s1, s2, s3, here)
            reduced = epoch + tl.minimum(2 * d + 3, 2 * num_chunks)
            arrive(local, q0, q1, q2, q3, q4, q5, q6, rank, reduced, WORLD_SIZE)
        if c >= 2:
            e = c - 2
            lap = (e - e % ring) * span
            await_peers(local, rank, epoch + tl.minimum(2 * e + 3, 2 * num_chunks), timeout_ns, status, WORLD_SIZE)
            for start in tl.range(first + e * span, tl.minimum(share, (e + 1) * span), step):
                at = start + lanes
                here = at < share
                for i in tl.static_range(WORLD_SIZE):
                    packet = i * share + at
                    theirs = here & (packet < total) & (rank != i)
                    w0, w1, w2, w3 = load_packets(local + gather + (i * slot + at - lap) * 16, theirs)
                    store_packets(out + packet * 16, w0, w1, w2, w3, theirs)
    write_counter(local, epoch + 2 * num_chunks, EPOCH_OFFSET)


_SPACE = Space(
    {
        "num_blocks": Choice(1, 2, 8, 32, 64, 132, 264),
        "num_warps": PowerOfTwo(4, 16),
        "num_chunks": PowerOfTwo(1, 16),
    }
)


def _infeasible(problem: Problem, config: Config, limits: Limits) -> str | None:
    if reason := refuse(problem, limits):
        return reason
    share, chunks = slice_packets(problem), int(config["num_chunks"])
    per_block = 32 * int(config["num_warps"])
    if per_block > 256 and problem.world_size > 4:
        return f"{per_block} packets a block at once from {problem.world_size} ranks spill registers"
    rounds = -(-share // (int(config["num_blocks"]) * per_block))
    if rounds < chunks and chunks > 1:
        return f"{rounds} rounds cannot be split into {chunks} chunks"
    span = -(-rounds // chunks) * int(config["num_blocks"]) * per_block
    needed = problem.world_size * min(chunks, RING.value) * span * PACKET_BYTES
    if needed > limits.staging_bytes:
        return (
            f"{min(chunks, RING.value)} of the {chunks} chunks of {problem.nbytes} bytes need {needed} "
            f"bytes of staging; there are {limits.staging_bytes} (TUNEDCOMM_WORKSPACE_MIB)"
        )
    return blocks_and_threads(config, limits, share, most_rounds=64 * chunks)


def _default(problem: Problem, limits: Limits) -> dict[str, Value]:
    share = slice_packets(problem)
    if limits.backend == "host":
        wish: dict[str, float] = {"num_blocks": 2, "num_warps": 16, "num_chunks": 2}
    else:
        chunks = 1 if share < 132 * 512 * 8 else 4 if share < 1 << 21 else 16
        wish = {"num_blocks": min(share / 512, 132), "num_warps": 16, "num_chunks": chunks}
    return closest(wish, _SPACE, problem, limits, _infeasible)


def _requests(problem: Problem, config: Config) -> Iterable[Any]:
    return (flat_request(bias_two_shot_kernel, problem, config),)


def _bind(problem: Problem, config: Config, workspace: Workspace) -> Launch:
    layout = workspace.layout
    extra = (layout.scatter, layout.gather, int(config["num_chunks"]))
    return bind_flat(problem, config, workspace, flat_request(bias_two_shot_kernel, problem, config), *extra)


TWO_SHOT = register_variant(
    Variant(
        op="all_reduce_bias",
        name="two_shot",
        numerics="ordered",
        summary="reduce-scatter then all-gather ordered by flags, chunks overlapped; best at large sizes",
        space=_SPACE,
        infeasible=_infeasible,
        default=_default,
        bind=_bind,
        num_blocks=kernel_blocks,
        num_rounds=slice_rounds,
        kernels=(bias_two_shot_kernel,),
        compile_requests=_requests,
    )
)
