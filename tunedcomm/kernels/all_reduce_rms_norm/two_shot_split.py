"""two_shot_split: the rows' two-shot by blocks of three kinds, so that links wait neither for sums nor for norms.

Chunks of rows go the way that `two_shot` says, but one third of the blocks pushes, one third sums and one third takes
rows through bias, residual and norm. Pusher, reducer and finisher k share a lane, with three rows of flags; protocol,
flags and lane rules are those of all_reduce's `two_shot_split`, with a lane's part of the areas for the areas. One
thing is different: a rank's own slices go through its own gather area too, so its reducers and finishers raise their
flags for each other as they do for the peers'.

Reads and writes of the residual are by the same thread, packet by packet, so residual_out may be the residual.

Numerics: ordered (every element is summed once, by its slice's owner). Graph-safe.
Source: all_reduce's `two_shot_split`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import triton
import triton.language as tl

from tunedcomm.kernels.all_reduce.two_shot_split import RING
from tunedcomm.kernels.all_reduce_rms_norm._chunks import finish_chunk, push_chunk, reduce_chunk
from tunedcomm.kernels.all_reduce_rms_norm._common import bind_rows, refuse, row_packets, rows_grid, rows_request
from tunedcomm.kernels.common.feasibility import Launch, closest, kernel_blocks
from tunedcomm.kernels.common.lane import (
    EPOCH_OFFSET,
    arrive_all_at,
    arrive_at,
    await_all_at,
    await_at,
    read_counter,
    write_counter,
)
from tunedcomm.kernels.common.packets import PACKET_BYTES
from tunedcomm.kernels.common.rows import row_block
from tunedcomm.kernels.common.sync import INTERPRET
from tunedcomm.space import Choice, Config, PowerOfTwo, Space, Value
from tunedcomm.spec import Limits, Problem, Variant, register_variant

if TYPE_CHECKING:
    from tunedcomm.symm.workspace import Workspace

__all__ = ["TWO_SHOT_SPLIT", "rms_norm_two_shot_split_kernel"]

_KINDS = tl.constexpr(3)


@triton.jit
def rms_norm_two_shot_split_kernel(
    x, weight, bias, residual, scale, out, residual_out, eps, tokens, row,
    local, q0, q1, q2, q3, q4, q5, q6, rank, timeout_ns, status, scatter, gather, num_chunks, rows,
    WORLD_SIZE: tl.constexpr, DTYPE: tl.constexpr, BIAS: tl.constexpr, RESIDUAL: tl.constexpr, FP8: tl.constexpr,
    BLOCK: tl.constexpr, THREADS: tl.constexpr,
):  # fmt: skip
    """Round c: pushers do chunk c, reducers chunk c − 1, finishers chunk c − 2, each as soon as its flags allow it.

    Interpreted blocks run one after another, so the first third does all three kinds of work in turn there.
    """
    peers = (q0, q1, q2, q3, q4, q5, q6)
    epoch = read_counter(local, EPOCH_OFFSET)
    num_lanes = tl.num_programs(0) // _KINDS
    lane = tl.program_id(0) % num_lanes
    kind = tl.program_id(0) // num_lanes
    block, grid = lane.to(tl.int64), num_lanes.to(tl.int64)
    share = (row + WORLD_SIZE - 1) // WORLD_SIZE
    ring = tl.minimum(num_chunks, RING)
    pushed, summed, finished = lane, lane + num_lanes, lane + 2 * num_lanes

    for c in tl.range(0, num_chunks + 2):
        if (c < num_chunks) & (kind == 0):
            chunk, top = (c % ring * grid + block) * rows, block + c * rows * grid
            if c >= ring:
                await_at(local, summed, rank, epoch + c - ring + 1, timeout_ns, status, WORLD_SIZE)
            push_chunk(x, peers, local, scatter, chunk, top, grid, rows, tokens, row, share, rank, WORLD_SIZE, BLOCK)
            arrive_at(pushed, q0, q1, q2, q3, q4, q5, q6, rank, epoch + c + 1, WORLD_SIZE)
        if (c >= 1) & (c <= num_chunks) & (kind == (0 if INTERPRET else 1)):
            d = c - 1
            chunk, top = (d % ring * grid + block) * rows, block + d * rows * grid
            await_at(local, pushed, rank, epoch + d + 1, timeout_ns, status, WORLD_SIZE)
            if d >= ring:
                await_all_at(local, finished, epoch + d - ring + 1, timeout_ns, status, WORLD_SIZE)
            reduce_chunk(
                x, peers, local, scatter, gather, chunk, top, grid, rows, tokens, row, share, rank,
                WORLD_SIZE, DTYPE, THREADS,
            )  # fmt: skip
            arrive_all_at(local, summed, q0, q1, q2, q3, q4, q5, q6, rank, epoch + d + 1, WORLD_SIZE)
        if (c >= 2) & (kind == (0 if INTERPRET else 2)):
            e = c - 2
            chunk, top = (e % ring * grid + block) * rows, block + e * rows * grid
            await_all_at(local, summed, epoch + e + 1, timeout_ns, status, WORLD_SIZE)
            finish_chunk(
                weight, bias, residual, scale, out, residual_out, eps, local + gather, chunk, top, grid, rows, tokens,
                row, DTYPE, BIAS, RESIDUAL, FP8, BLOCK,
            )  # fmt: skip
            arrive_all_at(local, finished, q0, q1, q2, q3, q4, q5, q6, rank, epoch + e + 1, WORLD_SIZE)
    write_counter(local, epoch + num_chunks, EPOCH_OFFSET)


_SPACE = Space(
    {
        "num_blocks": Choice(3, 24, 48, 96, 132, 198, 264),
        "num_warps": PowerOfTwo(1, 16),
        "rows": PowerOfTwo(1, 4),
    }
)


def _lanes(config: Config) -> int:
    return int(config["num_blocks"]) // int(_KINDS.value)


def _chunks(problem: Problem, config: Config) -> int:
    return -(-problem.shape[0] // (_lanes(config) * int(config["rows"])))


def _infeasible(problem: Problem, config: Config, limits: Limits) -> str | None:
    # What is worked out once for every packet of a row takes as many registers as packets of four ranks.
    if reason := refuse(problem, limits, config, slots=4):
        return reason
    blocks, rows, row = _lanes(config), int(config["rows"]), row_packets(problem)
    if rows > 1 and blocks * rows > problem.shape[0]:
        return f"{problem.shape[0]} rows are less than one chunk of {rows} for each of {blocks} blocks"
    if blocks > problem.shape[0]:
        return f"{problem.shape[0]} rows leave some of {blocks} blocks without work"
    share = -(-row // problem.world_size)
    needed = min(_chunks(problem, config), RING.value) * blocks * rows * problem.world_size * share * PACKET_BYTES
    if needed > limits.staging_bytes:
        return (
            f"chunks of {rows} rows for {blocks} blocks need {needed} bytes of staging; there are "
            f"{limits.staging_bytes} (TUNEDCOMM_WORKSPACE_MIB)"
        )
    if limits.backend == "cuda" and int(config["num_warps"]) < 4:
        return f"{config['num_warps']} warps a block leave the links idle"
    if limits.backend == "host" and blocks > 1:
        return "interpreted blocks run one after another: more than 3 only cost time"
    return rows_grid(problem, config, limits, mixed=False)


def _default(problem: Problem, limits: Limits) -> dict[str, Value]:
    tokens = problem.shape[0]
    if limits.backend == "host":
        wish: dict[str, float] = {"num_blocks": 3, "num_warps": 16, "rows": 1}
    else:
        warps = max(1, min(row_block(row_packets(problem)) // 32, 16))
        wish = {"num_blocks": min(3 * tokens, 132), "num_warps": warps, "rows": 1 if tokens < 1024 else 2}
    return closest(wish, _SPACE, problem, limits, _infeasible)


def _requests(problem: Problem, config: Config) -> Iterable[Any]:
    return (rows_request(rms_norm_two_shot_split_kernel, problem, config),)


def _bind(problem: Problem, config: Config, workspace: Workspace) -> Launch:
    layout = workspace.layout
    request = rows_request(rms_norm_two_shot_split_kernel, problem, config)
    extra = (layout.scatter, layout.gather, _chunks(problem, config), int(config["rows"]))
    return bind_rows(problem, config, workspace, request, *extra)


TWO_SHOT_SPLIT = register_variant(
    Variant(
        op="all_reduce_rms_norm",
        name="two_shot_split",
        numerics="ordered",
        summary="as two_shot, by blocks that push, blocks that sum and blocks that normalise; best for many tokens",
        space=_SPACE,
        infeasible=_infeasible,
        default=_default,
        bind=_bind,
        num_blocks=kernel_blocks,
        num_rounds=_chunks,
        kernels=(rms_norm_two_shot_split_kernel,),
        compile_requests=_requests,
    )
)
