"""One queue over the tiles of all shards, in the order in which the shards come.

The own shard is there; then come those of rank − 1, rank − 2, …, for every rank pushes to its next peers first. Within
a shard the queue goes chunk by chunk, and a chunk consists of whole rows of tiles but at the end of a shard. Tiles
cross neither, so a tile of a peer's shard waits for the flag of one chunk.

Read through a descriptor of all shards, the last tile of one holds rows of the next, which may be under way just then.
They only reach rows of the product that are not stored.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tunedcomm.kernels.gemm.panels import await_chunk
from tunedcomm.kernels.gemm.tiles import (
    matrix,
    operand_b,
    scaled,
    store_packed_tile,
    store_tile,
    tile_of,
    tile_product,
)
from tunedcomm.symm import layout

__all__ = ["DATA"]

DATA = tl.constexpr(layout.PANEL_DATA)
_COUNTERS = tl.constexpr(layout.PANEL_COUNTERS_OFFSET)


@triton.jit
def operands(
    a, b, panels, rows, columns, depth,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, NK: tl.constexpr, DTYPE: tl.constexpr,
    WORLD_SIZE: tl.constexpr,
):  # fmt: skip
    """Descriptors of the own shard of A, where the caller has it, of all shards in the panels, and of B."""
    own = matrix(a, rows, depth, BLOCK_M, BLOCK_K, DTYPE)
    gathered = matrix(panels + DATA, rows * WORLD_SIZE, depth, BLOCK_M, BLOCK_K, DTYPE)
    return own, gathered, operand_b(b, depth, columns, BLOCK_N, BLOCK_K, NK, DTYPE)


@triton.jit
def num_queued(rows, columns, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, WORLD_SIZE: tl.constexpr):
    """Tiles in the queue; a shard has `rows` rows."""
    return (tl.cdiv(rows, BLOCK_M) * tl.cdiv(columns, BLOCK_N) * WORLD_SIZE).to(tl.int32)


@triton.jit
def place_of(
    index, rows, columns, chunk_rows, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP: tl.constexpr
):  # fmt: skip
    """(which shard in the queue's order, chunk, row in the shard, column) of tile number `index`."""
    high = tl.cdiv(rows, BLOCK_M).to(tl.int32)
    wide = tl.cdiv(columns, BLOCK_N).to(tl.int32)
    turn = index // (high * wide)
    within = index - turn * (high * wide)
    per_chunk = (chunk_rows // BLOCK_M).to(tl.int32)
    chunk = within // (per_chunk * wide)
    above = chunk * per_chunk
    row, column = tile_of(within - above * wide, tl.minimum(per_chunk, high - above), wide, GROUP)
    return turn, chunk, (above + row) * BLOCK_M, column * BLOCK_N


@triton.jit
def queued_tile(
    index, own, gathered, b, out, scale_a, scale_b, panels, scales, number, rows, columns, depth, chunk_rows, rank,
    timeout_ns, status,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr, NK: tl.constexpr,
    DTYPE: tl.constexpr, OUT: tl.constexpr, SCALING: tl.constexpr, WORLD_SIZE: tl.constexpr,
    PACKED: tl.constexpr,
):  # fmt: skip
    """Compute tile number `index`, once its rows of A are here.

    Args:
        index: place in the queue, 32 bits.
        own, gathered, b: of `operands`.
        scale_a, scales: addresses of the own scales of A and, row by row, of all ranks'.
        number: the call's.
        rows, chunk_rows: of a shard and of a chunk, a multiple of BLOCK_M.
    """
    turn, chunk, row, column = place_of(index, rows, columns, chunk_rows, BLOCK_M, BLOCK_N, GROUP)
    source = ((rank - turn + WORLD_SIZE) % WORLD_SIZE).to(tl.int32)
    first = (source * rows).to(tl.int32)
    if turn == 0:
        x, above = own, row
    else:
        await_chunk(panels, source, chunk, number, timeout_ns, status)
        x, above = gathered, first + row
    total = tile_product(x, b, above, column, depth, BLOCK_M, BLOCK_N, BLOCK_K, NK)
    theirs = scale_a
    if SCALING == "rowwise":
        theirs = tl.where(turn == 0, scale_a, scales + first * 4)
    total = scaled(total, theirs, scale_b, row, column, rows, columns, SCALING, BLOCK_M, BLOCK_N)
    if PACKED:
        store_packed_tile(out, total, first + row, column, first + rows, columns, BLOCK_M, BLOCK_N, OUT)
    else:
        store_tile(out, total, first + row, column, first + rows, columns, BLOCK_M, BLOCK_N, OUT)


@triton.jit
def take(panels, counter):
    """The next tile's number, 32 bits, from a counter of the panels that is 0 between calls."""
    place = (panels + _COUNTERS + counter * 8).to(tl.pointer_type(tl.int64))
    return tl.atomic_add(place, 1, sem="relaxed", scope="gpu").to(tl.int32)


@triton.jit
def put_back(panels, counter):
    """Set the counter to 0 for the next call; by one block, when all have seen that there is nothing left."""
    tl.store((panels + _COUNTERS + counter * 8).to(tl.pointer_type(tl.int64)), tl.num_programs(0) * 0)
