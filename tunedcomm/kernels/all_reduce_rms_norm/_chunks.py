"""Chunks of rows on their way through a two-shot: pushed to the owners of their slices, summed, finished.

Of every row, slice j of the packets belongs to rank j. Chunk c of a block (or lane) of `grid` has the rows
block + (c · rows + j) · grid for j < `rows`. Of the scatter area a chunk has `rows` × share packets from each rank, of
the gather area whole rows.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tunedcomm.kernels.common.lane import address_of
from tunedcomm.kernels.common.packets import insert_own, sum_packets
from tunedcomm.kernels.common.rows import finish_row, row_extras
from tunedcomm.kernels.common.sync import load_packets, store_packets

__all__: list[str] = []


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
        here = (at < row) & (r < tokens)
        next_here = (at < row) & (j + 1 < rows) & (r + grid < tokens)
        w0, w1, w2, w3 = load_packets(x + (r * row + at) * 16, here)
        v0, v1, v2, v3 = load_packets(x + ((r + grid) * row + at) * 16, next_here)
        place = target + ((chunk * WORLD_SIZE + rank * rows + j) * share + in_slice) * 16
        store_packets(place, w0, w1, w2, w3, here & (owner != rank))
        store_packets(place + share * 16, v0, v1, v2, v3, next_here & (owner != rank))


@triton.jit
def reduce_chunk(
    x, peers, local, scatter, gather, chunk, first, grid, rows, tokens, row, share, rank,
    WORLD_SIZE: tl.constexpr, DTYPE: tl.constexpr, THREADS: tl.constexpr,
):  # fmt: skip
    """Sum the own slices of a chunk's rows and push the sums into every rank's gather area, the own one included."""
    lanes = tl.arange(0, THREADS)
    mine = tl.minimum(share, tl.maximum(row - rank * share, 0))  # packets of a row that this rank sums
    for start in tl.range(0, rows * mine, THREADS):
        index = start + lanes
        j = index // tl.maximum(mine, 1).to(tl.int32)
        in_slice = index - j * mine
        r = first + j * grid
        here = (index < rows * mine) & (r < tokens)
        own = load_packets(x + (r * row + rank * share + in_slice) * 16, here)
        place = local + scatter + ((chunk * WORLD_SIZE + j) * share + in_slice) * 16
        words = ()
        for i in tl.static_range(WORLD_SIZE):
            words = words + load_packets(place + i * rows * share * 16, here & (rank != i))
        s0, s1, s2, s3 = sum_packets(insert_own(words, own, rank, WORLD_SIZE), DTYPE, False, WORLD_SIZE)
        place = gather + ((chunk + j) * row + rank * share + in_slice) * 16
        for i in tl.static_range(WORLD_SIZE - 1):
            store_packets(peers[i] + place, s0, s1, s2, s3, here)
        store_packets(local + place, s0, s1, s2, s3, here)


@triton.jit
def finish_chunk(
    weight, bias, residual, scale, out, residual_out, eps, source, chunk, first, grid, rows, tokens, row,
    DTYPE: tl.constexpr, BIAS: tl.constexpr, RESIDUAL: tl.constexpr, FP8: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Take a chunk's rows, gathered at `source`, through bias, residual and norm."""
    at = tl.arange(0, BLOCK).to(tl.int64)
    weights = load_packets(weight + at * 16, at < row)
    here = (at < row) & (first < tokens)
    s = load_packets(source + (chunk * row + at) * 16, here)
    b, extra = row_extras(bias, residual, at, first * row + at, here, BIAS, RESIDUAL)
    for j in tl.range(0, rows):  # the next row is loaded before this one is summed and stored
        r = first + j * grid
        here, packet = (at < row) & (r < tokens), r * row + at
        next_here = (at < row) & (j + 1 < rows) & (r + grid < tokens)
        next_s = load_packets(source + ((chunk + j + 1) * row + at) * 16, next_here)
        _, next_extra = row_extras(bias, residual, at, packet + grid * row, next_here, False, RESIDUAL)
        finish_row(
            s, b, extra, weights, out, residual_out, scale, eps, row, packet, here, DTYPE, BIAS, RESIDUAL, FP8, BLOCK
        )
        s, extra = next_s, next_extra
