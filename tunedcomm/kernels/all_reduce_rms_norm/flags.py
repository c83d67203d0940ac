"""one_shot, two_shot: rows summed and taken through the norm, ordered by flags.

**one_shot.** Every rank reads all ranks' rows and takes their sums through the norm; one flag exchange a block. Areas,
flags and lane rules are as in all_reduce's `one_shot` on plain input, row by row: a block copies its rows into the
one-shot area, exchanges flags with the blocks of its number, and reads from the peers the rows that those copied.

**two_shot.** Rows go in chunks through reduce-scatter, all-gather and norm. Of every row, slice j of the packets
belongs to rank j. A chunk of `rows` rows goes three ways: push each slice to its owner's scatter area, exchange flags,
sum the own slices in rank order and push them into every rank's gather area, exchange flags, take the gathered rows
through bias, residual and norm. Only sums travel, for y follows from them on every rank. Chunk c of block b of G has
the rows b + (c · `rows` + j) · G for j < `rows`. Of the scatter area a chunk has `rows` × share packets from each rank,
of the gather area whole rows.

Each block of two_shot does all three. Chunks overlap: a chunk is summed `lag` rounds after it was pushed and finished
`lag` rounds after that, so the norm of one runs beside the transfer of the next ones, and with a lag of 2 a block
seldom waits for flags at all.

Why no area is overwritten too early: every block has its own part of the areas, with room for 2 · lag + 1 chunks. In
round c a block pushes chunk c into the place of chunk c − 2 · lag − 1; in round c − 1 it waited until all peers had
summed (read) that chunk. The sums of chunk d go to the peers' gather place of chunk d − 2 · lag − 1 after this block
waited for their push of chunk d, which they make after they finished that chunk. From call to call it is as in
all_reduce's `two_shot`. Sums of the own slices go to the own gather area by plain stores, which the block barriers of
the next flags order before the same block's reads.

Numerics: ordered (every element is summed in rank order; in two_shot once, by its slice's owner). Graph-safe.
Source: all_reduce's `one_shot`, with the norm behind it as in Kraken's one-shot; the two-shot scheme of PyTorch's
symmetric memory operators, with the norm in place of the last copy.
"""

from __future__ import annotations

from collections.abc import Mapping

import triton
import triton.language as tl

from tunedcomm.kernels.all_reduce_rms_norm.op import RmsNormVariant, row_packets, row_warps
from tunedcomm.kernels.all_reduce_rms_norm.rows import finish_row, row_extras
from tunedcomm.kernels.common.feasibility import refuse_one_shot
from tunedcomm.kernels.common.lane import (
    EPOCH_OFFSET,
    address_of,
    arrive,
    await_peers,
    read_counter,
    shifted,
    write_counter,
)
from tunedcomm.kernels.common.packets import PACKET_BYTES, insert_own, packets_of, sum_packets
from tunedcomm.kernels.common.sync import load_packets, store_packets
from tunedcomm.kernels.common.variant import HOST_GRID, Workspace
from tunedcomm.space import Choice, Config, PowerOfTwo, Space
from tunedcomm.spec import Limits, Problem
from tunedcomm.symm.layout import LaneLayout, Room


@triton.jit
def rms_norm_one_shot_kernel(
    x, weight, bias, residual, scale, out, residual_out, eps, shape,
    local, peers, rank, timeout_ns, status, area, area_bytes,
    WORLD_SIZE: tl.constexpr, DTYPE: tl.constexpr, BIAS: tl.constexpr, RESIDUAL: tl.constexpr, FP8: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Publish own rows, exchange flags; then row by row: read all ranks', sum, add, normalise."""
    tokens, row = shape
    epoch = read_counter(local, EPOCH_OFFSET)
    own_area = area + (epoch & 1) * area_bytes
    sources = shifted(peers, own_area)
    at = tl.arange(0, BLOCK).to(tl.int64)
    mask = at < row
    # 1. Copy the own rows to the own area.
    for r in tl.range(tl.program_id(0), tokens, tl.num_programs(0)):
        packet = at + r * row
        w0, w1, w2, w3 = load_packets(x + packet * 16, mask)
        store_packets(local + own_area + packet * 16, w0, w1, w2, w3, mask)

    # 2. Exchange flags. Releases the copies, acquires the peers'; the weight is loaded meanwhile.
    arrive(peers, rank, epoch + 1, WORLD_SIZE)
    of_row = load_packets(weight + at * 16, mask & (tl.program_id(0) < tokens))
    await_peers(local, rank, epoch + 1, timeout_ns, status, WORLD_SIZE)

    # 3. Row by row: read the row of every rank, sum in rank order, add bias and residual, normalise.
    for r in tl.range(tl.program_id(0), tokens, tl.num_programs(0)):
        packet = at + r * row
        own = load_packets(x + packet * 16, mask)
        b, extra = row_extras(bias, residual, at, packet, mask, BIAS, RESIDUAL)
        words = ()
        for i in tl.static_range(WORLD_SIZE):
            source = address_of(sources, x, i, rank, WORLD_SIZE)
            words = words + load_packets(source + packet * 16, mask & (rank != i))
        s = sum_packets(insert_own(words, own, rank, WORLD_SIZE), DTYPE, False, WORLD_SIZE)
        finish_row(
            s, b, extra, of_row, out, residual_out, scale, eps, row, packet, mask, DTYPE, BIAS, RESIDUAL, FP8, BLOCK
        )
    write_counter(local, epoch + 1, EPOCH_OFFSET)


class OneShot(RmsNormVariant, registered=True):
    name = "one_shot"
    summary = "every rank reads all ranks' rows, sums and normalises them; one exchange of flags"
    kernels = (rms_norm_one_shot_kernel,)
    trailing_arguments = ("one_shot", "one_shot_bytes")
    space = Space({"num_blocks": Choice(1, 2, 4, 8, 16, 32, 64, 128), "num_warps": PowerOfTwo(1, 32)})

    host_preferred = HOST_GRID

    def refuse_config(self, problem: Problem, config: Config, limits: Limits) -> str | None:
        if reason := super().refuse_config(problem, config, limits) or refuse_one_shot(problem, limits):
            return reason
        if int(config["num_blocks"]) > problem.shape[0]:
            return f"{config['num_blocks']} blocks for {problem.shape[0]} rows: the others would have nothing to do"
        return None

    def lane_room(self, problem: Problem, config: Config, layout: LaneLayout) -> Room:
        return Room(one_shot=packets_of(problem.nbytes) * PACKET_BYTES)

    def preferred_config(self, problem: Problem, limits: Limits) -> dict[str, float]:
        return {"num_blocks": min(problem.shape[0], 128), "num_warps": row_warps(problem)}


@triton.jit
def push_chunk(
    x, peers, local, scatter, chunk, first, grid, rows, tokens, row, share, rank,
    WORLD_SIZE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Push the slices of a chunk's rows to their owners.

    Args:
        chunk: number of the chunk's first row among all rows that the areas hold.
        first: the chunk's first row in the matrix.
    """
    at = tl.arange(0, BLOCK)
    owner = at // share.to(tl.int32)
    in_slice = at - owner * share.to(tl.int32)
    target = address_of(peers, local, owner, rank, WORLD_SIZE) + scatter
    for j in tl.range(0, rows, 2):  # two rows at a time: the second is loaded before the first is stored
        r = first + j * grid
        mask = (at < row) & (r < tokens)
        next_mask = (at < row) & (j + 1 < rows) & (r + grid < tokens)
        w0, w1, w2, w3 = load_packets(x + (r * row + at) * 16, mask)
        v0, v1, v2, v3 = load_packets(x + ((r + grid) * row + at) * 16, next_mask)
        place = target + ((chunk * WORLD_SIZE + rank * rows + j) * share + in_slice) * 16
        store_packets(place, w0, w1, w2, w3, mask & (owner != rank))
        store_packets(place + share * 16, v0, v1, v2, v3, next_mask & (owner != rank))


@triton.jit
def reduce_chunk(
    x, peers, local, scatter, gather, chunk, first, grid, rows, tokens, row, share, rank,
    WORLD_SIZE: tl.constexpr, DTYPE: tl.constexpr, THREADS: tl.constexpr,
):  # fmt: skip
    """Sum the own slices of a chunk's rows and push the sums into every rank's gather area, the own one included."""
    offsets = tl.arange(0, THREADS)
    own_packets = tl.minimum(share, tl.maximum(row - rank * share, 0))  # packets of a row that this rank sums
    for start in tl.range(0, rows * own_packets, THREADS):
        index = start + offsets
        j = index // tl.maximum(own_packets, 1).to(tl.int32)
        in_slice = index - j * own_packets
        r = first + j * grid
        mask = (index < rows * own_packets) & (r < tokens)
        own = load_packets(x + (r * row + rank * share + in_slice) * 16, mask)
        place = local + scatter + ((chunk * WORLD_SIZE + j) * share + in_slice) * 16
        words = ()
        for i in tl.static_range(WORLD_SIZE):
            words = words + load_packets(place + i * rows * share * 16, mask & (rank != i))
        s0, s1, s2, s3 = sum_packets(insert_own(words, own, rank, WORLD_SIZE), DTYPE, False, WORLD_SIZE)
        place = gather + ((chunk + j) * row + rank * share + in_slice) * 16
        for i in tl.static_range(WORLD_SIZE - 1):
            store_packets(peers[i] + place, s0, s1, s2, s3, mask)
        store_packets(local + place, s0, s1, s2, s3, mask)


@triton.jit
def finish_chunk(
    weight, bias, residual, scale, out, residual_out, eps, source, chunk, first, grid, rows, tokens, row,
    DTYPE: tl.constexpr, BIAS: tl.constexpr, RESIDUAL: tl.constexpr, FP8: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Take a chunk's rows, gathered at `source`, through bias, residual and norm."""
    at = tl.arange(0, BLOCK).to(tl.int64)
    weights = load_packets(weight + at * 16, at < row)
    mask = (at < row) & (first < tokens)
    s = load_packets(source + (chunk * row + at) * 16, mask)
    b, extra = row_extras(bias, residual, at, first * row + at, mask, BIAS, RESIDUAL)
    for j in tl.range(0, rows):  # the next row is loaded before this one is summed and stored
        r = first + j * grid
        mask, packet = (at < row) & (r < tokens), r * row + at
        next_mask = (at < row) & (j + 1 < rows) & (r + grid < tokens)
        next_s = load_packets(source + ((chunk + j + 1) * row + at) * 16, next_mask)
        _, next_extra = row_extras(bias, residual, at, packet + grid * row, next_mask, False, RESIDUAL)
        finish_row(
            s, b, extra, weights, out, residual_out, scale, eps, row, packet, mask, DTYPE, BIAS, RESIDUAL, FP8, BLOCK
        )
        s, extra = next_s, next_extra


@triton.jit
def rms_norm_two_shot_kernel(
    x, weight, bias, residual, scale, out, residual_out, eps, shape,
    local, peers, rank, timeout_ns, status, scatter, gather, num_chunks, rows, lag,
    WORLD_SIZE: tl.constexpr, DTYPE: tl.constexpr, BIAS: tl.constexpr, RESIDUAL: tl.constexpr, FP8: tl.constexpr,
    BLOCK: tl.constexpr, THREADS: tl.constexpr,
):  # fmt: skip
    """In round c: push chunk c, reduce chunk c − lag, finish chunk c − 2 · lag.

    A block raises its flags to 2c + 1 when it has pushed chunk c, and to 2(d + lag) + 2 when it has reduced chunk d.

    Example:
        2 ranks, 1 token of 8 fp32 elements (a row of 2 packets, slice j is packet j), lag 1. Round 0: rank 0 pushes
        packet 1 to rank 1's scatter area, rank 1 pushes packet 0 to rank 0's. Round 1: rank 0 sums packet 0 and stores
        the sum in both gather areas, rank 1 does so with packet 1. Round 2: each rank normalises the gathered row.
    """
    tokens, row = shape
    epoch = read_counter(local, EPOCH_OFFSET)
    block, grid = tl.program_id(0).to(tl.int64), tl.num_programs(0).to(tl.int64)
    share = (row + WORLD_SIZE - 1) // WORLD_SIZE
    ring = tl.minimum(num_chunks, 2 * lag + 1)

    for c in tl.range(0, num_chunks + 2 * lag):
        # 1. Push chunk c of slice j to rank j.
        if c < num_chunks:
            chunk, top = (c % ring * grid + block) * rows, block + c * rows * grid
            push_chunk(x, peers, local, scatter, chunk, top, grid, rows, tokens, row, share, rank, WORLD_SIZE, BLOCK)
            arrive(peers, rank, epoch + 2 * c + 1, WORLD_SIZE)
        # 2. Sum chunk c − lag of the own slices, push the sums to every rank.
        if (c >= lag) & (c < num_chunks + lag):
            d = c - lag
            chunk, top = (d % ring * grid + block) * rows, block + d * rows * grid
            await_peers(local, rank, epoch + 2 * d + 1, timeout_ns, status, WORLD_SIZE)
            reduce_chunk(
                x, peers, local, scatter, gather, chunk, top, grid, rows, tokens, row, share, rank,
                WORLD_SIZE, DTYPE, THREADS,
            )  # fmt: skip
            arrive(peers, rank, epoch + 2 * c + 2, WORLD_SIZE)
        # 3. Take the gathered rows of chunk c − 2 · lag through bias, residual and norm.
        if c >= 2 * lag:
            e = c - 2 * lag
            chunk, top = (e % ring * grid + block) * rows, block + e * rows * grid
            await_peers(local, rank, epoch + 2 * (e + lag) + 2, timeout_ns, status, WORLD_SIZE)
            finish_chunk(
                weight, bias, residual, scale, out, residual_out, eps, local + gather, chunk, top, grid, rows, tokens,
                row, DTYPE, BIAS, RESIDUAL, FP8, BLOCK,
            )  # fmt: skip
    write_counter(local, epoch + 2 * (num_chunks + lag), EPOCH_OFFSET)


class TwoShot(RmsNormVariant, registered=True):
    """Blocks take `rows` rows at a time, one chunk; `num_rounds` is the number of a block's chunks."""

    name = "two_shot"
    summary = "rows in chunks through reduce-scatter, all-gather and norm, ordered by flags; best for many tokens"
    kernels = (rms_norm_two_shot_kernel,)
    trailing_arguments = ("scatter", "gather", "num_chunks", "rows", "lag")
    host_preferred: Mapping[str, float] = {**HOST_GRID, "rows": 1}
    space = Space(
        {
            "num_blocks": Choice(1, 2, 8, 32, 64, 128, 132, 264),
            "num_warps": PowerOfTwo(1, 16),
            "rows": Choice(1, 2, 3, 4, 6, 8),
            "lag": Choice(1, 2, 3),
        }
    )
    slots = 4  # what is worked out once for every packet of a row takes as many registers as packets of four ranks

    def num_rounds(self, problem: Problem, config: Config) -> int:
        return -(-problem.shape[0] // (int(config["num_blocks"]) * int(config["rows"])))

    def refuse_config(self, problem: Problem, config: Config, limits: Limits) -> str | None:
        if reason := super().refuse_config(problem, config, limits):
            return reason
        blocks, rows, lag = int(config["num_blocks"]), int(config["rows"]), int(config["lag"])
        if rows > 1 and blocks * rows > problem.shape[0]:
            return f"{problem.shape[0]} rows are less than one chunk of {rows} for each of {blocks} blocks"
        if blocks > problem.shape[0]:
            return f"{problem.shape[0]} rows leave some of {blocks} blocks without work"
        chunks, needed = self.num_rounds(problem, config), self._staged(problem, config)
        if needed > limits.staging_bytes:
            return (
                f"chunks of {rows} rows for {blocks} blocks need {needed} bytes of staging; there are "
                f"{limits.staging_bytes} (TUNEDCOMM_WORKSPACE_MIB)"
            )
        if lag > 1 and chunks <= 2 * lag:
            return f"{chunks} chunks are pushed before the first is finished with a lag of {lag}"
        return None

    def _staged(self, problem: Problem, config: Config) -> int:
        """Bytes of the chunks that are under way."""
        share = -(-row_packets(problem) // problem.world_size)
        num_rows = int(config["num_blocks"]) * int(config["rows"])
        ring = min(self.num_rounds(problem, config), 2 * int(config["lag"]) + 1)
        return ring * num_rows * problem.world_size * share * PACKET_BYTES

    def lane_room(self, problem: Problem, config: Config, layout: LaneLayout) -> Room:
        nbytes = self._staged(problem, config)
        return Room(scatter=nbytes, gather=nbytes)

    def arguments(self, problem: Problem, config: Config, workspace: Workspace) -> tuple[int, ...]:
        counted = {**config, "num_chunks": self.num_rounds(problem, config)}
        return super().arguments(problem, counted, workspace)

    def preferred_config(self, problem: Problem, limits: Limits) -> dict[str, float]:
        tokens = problem.shape[0]
        rows = 1 if tokens < 1024 else 4
        return {"num_blocks": min(tokens, 132), "num_warps": row_warps(problem), "rows": rows, "lag": 1}
