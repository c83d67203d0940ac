"""two_shot: rows in chunks through reduce-scatter, all-gather and norm, ordered by flags; best for many tokens.

Block b of a grid of G has the rows b, b + G, … and takes `rows` of them at a time, one chunk. Of every row, slice j of
the packets belongs to rank j. A chunk goes three ways: push each slice to its owner's scatter area, exchange flags, sum
the own slices in rank order and push them into every rank's gather area, exchange flags, take the gathered rows through
bias, residual and norm. Chunks overlap: a chunk is summed `lag` rounds after it was pushed and finished `lag` rounds
after that, so the norm of one runs beside the transfer of the next ones, and with a lag of 2 a block seldom waits for
flags at all. Only sums travel, for y follows from them on every rank.

Lane rules and overwriting: the areas hold 2 · lag + 1 chunks of every block, apart from those of other blocks. In round
c a block pushes chunk c into the place of chunk c − 2 · lag − 1; in round c − 1 it waited until all peers had summed
(read) that one. The sums of chunk d go to the peers' gather place of chunk d − 2 · lag − 1 after this block waited for
their push of chunk d, which they make after they finished that one. From call to call it is as in all_reduce's
`two_shot`. Of one's own slices the sums go to the own gather area by plain stores, which the block barriers of the next
flags order before the same block's reads.

Reads and writes of the residual are by the same thread, packet by packet, so residual_out may be the residual.

Numerics: ordered (every element is summed once, by its slice's owner). Graph-safe.
Source: the two-shot scheme of PyTorch's symmetric memory operators, with the norm in place of the last copy.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import triton
import triton.language as tl

from tunedcomm.kernels.all_reduce_rms_norm._chunks import finish_chunk, push_chunk, reduce_chunk
from tunedcomm.kernels.all_reduce_rms_norm._common import bind_rows, refuse, row_packets, rows_grid, rows_request
from tunedcomm.kernels.common.feasibility import Launch, closest, kernel_blocks
from tunedcomm.kernels.common.lane import EPOCH_OFFSET, arrive, await_peers, read_counter, write_counter
from tunedcomm.kernels.common.packets import PACKET_BYTES
from tunedcomm.kernels.common.rows import row_block
from tunedcomm.space import Choice, Config, PowerOfTwo, Space, Value
from tunedcomm.spec import Limits, Problem, Variant, register_variant

if TYPE_CHECKING:
    from tunedcomm.symm.workspace import Workspace

__all__ = ["TWO_SHOT", "rms_norm_two_shot_kernel"]


@triton.jit
def rms_norm_two_shot_kernel(
    x, weight, bias, residual, scale, out, residual_out, eps, tokens, row,
    local, q0, q1, q2, q3, q4, q5, q6, rank, timeout_ns, status, scatter, gather, num_chunks, rows, lag,
    WORLD_SIZE: tl.constexpr, DTYPE: tl.constexpr, BIAS: tl.constexpr, RESIDUAL: tl.constexpr, FP8: tl.constexpr,
    BLOCK: tl.constexpr, THREADS: tl.constexpr,
):  # fmt: skip
    """In round c: push chunk c, reduce chunk c − lag, finish chunk c − 2 · lag.

    A block's flags count its steps: pushing chunk c is step 2c + 1, reducing chunk d step 2(d + lag) + 2.
    """
    peers = (q0, q1, q2, q3, q4, q5, q6)
    epoch = read_counter(local, EPOCH_OFFSET)
    block, grid = tl.program_id(0).to(tl.int64), tl.num_programs(0).to(tl.int64)
    share = (row + WORLD_SIZE - 1) // WORLD_SIZE
    ring = tl.minimum(num_chunks, 2 * lag + 1)

    for c in tl.range(0, num_chunks + 2 * lag):
        if c < num_chunks:
            chunk, top = (c % ring * grid + block) * rows, block + c * rows * grid
            push_chunk(x, peers, local, scatter, chunk, top, grid, rows, tokens, row, share, rank, WORLD_SIZE, BLOCK)
            arrive(local, q0, q1, q2, q3, q4, q5, q6, rank, epoch + 2 * c + 1, WORLD_SIZE)
        if (c >= lag) & (c < num_chunks + lag):
            d = c - lag
            chunk, top = (d % ring * grid + block) * rows, block + d * rows * grid
            await_peers(local, rank, epoch + 2 * d + 1, timeout_ns, status, WORLD_SIZE)
            reduce_chunk(
                x, peers, local, scatter, gather, chunk, top, grid, rows, tokens, row, share, rank,
                WORLD_SIZE, DTYPE, THREADS,
            )  # fmt: skip
            arrive(local, q0, q1, q2, q3, q4, q5, q6, rank, epoch + 2 * c + 2, WORLD_SIZE)
        if c >= 2 * lag:
            e = c - 2 * lag
            chunk, top = (e % ring * grid + block) * rows, block + e * rows * grid
            await_peers(local, rank, epoch + 2 * (e + lag) + 2, timeout_ns, status, WORLD_SIZE)
            finish_chunk(
                weight, bias, residual, scale, out, residual_out, eps, local + gather, chunk, top, grid, rows, tokens,
                row, DTYPE, BIAS, RESIDUAL, FP8, BLOCK,
            )  # fmt: skip
    write_counter(local, epoch + 2 * (num_chunks + lag), EPOCH_OFFSET)


_SPACE = Space(
    {
        "num_blocks": Choice(1, 2, 8, 32, 64, 128, 132, 264),
        "num_warps": PowerOfTwo(1, 16),
        "rows": Choice(1, 2, 3, 4, 6, 8),
        "lag": Choice(1, 2, 3),
    }
)


def _chunks(problem: Problem, config: Config) -> int:
    return -(-problem.shape[0] // (int(config["num_blocks"]) * int(config["rows"])))


def _infeasible(problem: Problem, config: Config, limits: Limits) -> str | None:
    # What is worked out once for every packet of a row takes as many registers as packets of four ranks.
    if reason := refuse(problem, limits, config, slots=4):
        return reason
    blocks, rows, row = int(config["num_blocks"]), int(config["rows"]), row_packets(problem)
    if rows > 1 and blocks * rows > problem.shape[0]:
        return f"{problem.shape[0]} rows are less than one chunk of {rows} for each of {blocks} blocks"
    if blocks > problem.shape[0]:
        return f"{problem.shape[0]} rows leave some of {blocks} blocks without work"
    chunks, lag = _chunks(problem, config), int(config["lag"])
    if lag > 1 and chunks <= 2 * lag:
        return f"{chunks} chunks are pushed before the first is finished with a lag of {lag}"
    share = -(-row // problem.world_size)
    needed = min(chunks, 2 * lag + 1) * blocks * rows * problem.world_size * share * PACKET_BYTES
    if needed > limits.staging_bytes:
        return (
            f"chunks of {rows} rows for {blocks} blocks need {needed} bytes of staging; there are "
            f"{limits.staging_bytes} (TUNEDCOMM_WORKSPACE_MIB)"
        )
    return rows_grid(problem, config, limits, mixed=False)


def _default(problem: Problem, limits: Limits) -> dict[str, Value]:
    tokens = problem.shape[0]
    if limits.backend == "host":
        wish: dict[str, float] = {"num_blocks": 2, "num_warps": 16, "rows": 1, "lag": 1}
    else:
        warps = max(1, min(row_block(row_packets(problem)) // 32, 16))
        wish = {"num_blocks": min(tokens, 132), "num_warps": warps, "rows": 1 if tokens < 1024 else 4, "lag": 1}
    return closest(wish, _SPACE, problem, limits, _infeasible)


def _requests(problem: Problem, config: Config) -> Iterable[Any]:
    return (rows_request(rms_norm_two_shot_kernel, problem, config),)


def _bind(problem: Problem, config: Config, workspace: Workspace) -> Launch:
    layout = workspace.layout
    request = rows_request(rms_norm_two_shot_kernel, problem, config)
    extra = (layout.scatter, layout.gather, _chunks(problem, config), int(config["rows"]), int(config["lag"]))
    return bind_rows(problem, config, workspace, request, *extra)


TWO_SHOT = register_variant(
    Variant(
        op="all_reduce_rms_norm",
        name="two_shot",
        numerics="ordered",
        summary="rows in chunks through reduce-scatter, all-gather and norm, ordered by flags; best for many tokens",
        space=_SPACE,
        infeasible=_infeasible,
        default=_default,
        bind=_bind,
        num_blocks=kernel_blocks,
        num_rounds=_chunks,
        kernels=(rms_norm_two_shot_kernel,),
        compile_requests=_requests,
    )
)
