"""What persistent GEMM kernels do with shards, which are the rows of one rank's result, in chunks of tile rows."""

from __future__ import annotations

import triton
import triton.language as tl

from tunedcomm.kernels.common.packets import _mean
from tunedcomm.kernels.common.sync import INTERPRET
from tunedcomm.kernels.gemm.panels import await_chunk_of_all
from tunedcomm.kernels.gemm.tiles import (
    element_type,
    matrix,
    rounded,
    scaled,
    tile_of,
    tile_product,
)
from tunedcomm.symm import layout

__all__: list[str] = []

DATA = tl.constexpr(layout.PANEL_DATA)
COUNTERS = tl.constexpr(layout.PANEL_COUNTERS_OFFSET)
_STAGES = tl.constexpr(3)  # partial results on their way from panels at once


@triton.jit
def place_of(index, tile_rows, tile_columns, CHUNKS: tl.constexpr, GROUP: tl.constexpr):
    """(chunk, tile row, tile column, tiles of the chunk) of tile number `index` of a shard, chunk by chunk."""
    span = (tile_rows + CHUNKS - 1) // CHUNKS
    chunk = index // (span * tile_columns)
    first = chunk * span
    height = tl.minimum(tile_rows - first, span)
    row, column = tile_of(index - first * tile_columns, height, tile_columns, GROUP)
    return chunk, first + row, column, height * tile_columns


@triton.jit
def partial_tile(
    a, b, scale_a, scale_b, row, column, m, n, depth,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, NK: tl.constexpr, SCALING: tl.constexpr,
):  # fmt: skip
    """A tile of this rank's product, in fp32, scaled."""
    total = tile_product(a, b, row, column, depth, BLOCK_M, BLOCK_N, BLOCK_K, NK)
    return scaled(total, scale_a, scale_b, row, column, m, n, SCALING, BLOCK_M, BLOCK_N)


@triton.jit
def known_aligned(value, TO: tl.constexpr, ALIGNED: tl.constexpr):
    """`value`, which is a multiple of `TO` if `ALIGNED`, so that the compiler knows it and moves whole packets."""
    if ALIGNED:
        return tl.multiple_of(value // TO * TO, TO)
    else:
        return value


@triton.jit
def tile_pointers(
    address, row, column, columns, BLOCK_M: tl.constexpr, WIDTH: tl.constexpr, DTYPE: tl.constexpr,
    ALIGNED: tl.constexpr,
):  # fmt: skip
    """Pointers to a tile of a row-major matrix, and which of its columns there are.

    ALIGNED: base and rows are whole packets.
    """
    base = known_aligned(address, 16, ALIGNED).to(tl.pointer_type(element_type(DTYPE)))
    if ALIGNED:
        base = tl.multiple_of(base, 16)  # is lost on the way to a pointer, where it is not lost here
    columns = known_aligned(columns, 16 // (element_type(DTYPE).primitive_bitwidth // 8), ALIGNED)
    r = row + tl.arange(0, BLOCK_M)
    c = column + tl.arange(0, WIDTH)
    return base + r[:, None].to(tl.int64) * columns + c[None, :], (c < columns)[None, :]


@triton.jit
def store_rounded(
    address, total, row, column, end_row, columns,
    BLOCK_M: tl.constexpr, WIDTH: tl.constexpr, DTYPE: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Round a tile and store it at `address`, up to `end_row`."""
    p, there = tile_pointers(address, row, column, columns, BLOCK_M, WIDTH, DTYPE, ALIGNED)
    r = row + tl.arange(0, BLOCK_M)
    tl.store(p, rounded(total, DTYPE), mask=(r < end_row)[:, None] & there)


@triton.jit
def _halves(tile, BLOCK_M: tl.constexpr, WIDTH: tl.constexpr):
    return tl.split(tl.permute(tl.reshape(tile, (BLOCK_M, 2, WIDTH // 2)), (0, 2, 1)))


@triton.jit
def cut(tile, BLOCK_M: tl.constexpr, WIDTH: tl.constexpr, PIECES: tl.constexpr):
    """A tile as a tuple of 1, 2 or 4 pieces of some of its columns, from left to right."""
    if PIECES == 1:
        return (tile,)
    else:
        left, right = _halves(tile, BLOCK_M, WIDTH)
        if PIECES == 2:
            return (left, right)
        else:
            a, b = _halves(left, BLOCK_M, WIDTH // 2)
            c, d = _halves(right, BLOCK_M, WIDTH // 2)
            return (a, b, c, d)


@triton.jit
def _finish_piece(
    own, staged, slots, slot_bytes, out, rank, row, column, rows, n,
    BLOCK_M: tl.constexpr, WIDTH: tl.constexpr, OUT: tl.constexpr, WORLD_SIZE: tl.constexpr,
    DESCRIPTOR: tl.constexpr, AVG: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Sum a piece of a tile over the ranks, in rank order, and store it.

    The own partial result is in no slot; what is read in its place is a peer's, which is in the cache anyway.
    """
    mine = rounded(own, OUT)
    total = tl.zeros((BLOCK_M, WIDTH), tl.float32)
    for i in tl.range(0, WORLD_SIZE, num_stages=_STAGES):
        source = tl.where(i == rank, (i + 1) % WORLD_SIZE, i).to(tl.int32)
        if DESCRIPTOR:
            theirs = staged.load([source * rows + row, column])
        else:
            p, there = tile_pointers(
                slots + source * slot_bytes, row, column, n, BLOCK_M, WIDTH, OUT, ALIGNED
            )  # fmt: skip
            r = row + tl.arange(0, BLOCK_M)
            theirs = tl.load(p, mask=(r < rows)[:, None] & there, other=0.0)
        total += tl.where(i == rank, mine.to(tl.float32), theirs.to(tl.float32))
    if AVG:
        total = _mean(total, WORLD_SIZE)
    store_rounded(out, total, row, column, rows, n, BLOCK_M, WIDTH, OUT, ALIGNED)


@triton.jit
def staged_matrix(
    panels, rows, n,
    BLOCK_M: tl.constexpr, WIDTH: tl.constexpr, OUT: tl.constexpr, WORLD_SIZE: tl.constexpr,
    DESCRIPTOR: tl.constexpr,
):  # fmt: skip
    """A descriptor of all slots one below the other; any number where partial results are read without."""
    if DESCRIPTOR:
        return matrix(panels + DATA, rows * WORLD_SIZE, n, BLOCK_M, WIDTH, OUT)
    else:
        return rows


@triton.jit
def finish_tile(
    own, staged, panels, slot_bytes, out, rank, row, column, rows, n, chunk, number, timeout_ns, status,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PIECES: tl.constexpr, OUT: tl.constexpr,
    WORLD_SIZE: tl.constexpr, DESCRIPTOR: tl.constexpr, AVG: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Wait for the peers' chunk and make a tile of the result out of the own product, `PIECES` times some columns."""
    await_chunk_of_all(panels, chunk, rank, number, timeout_ns, status, WORLD_SIZE)
    WIDTH: tl.constexpr = BLOCK_N // PIECES
    mine = cut(own, BLOCK_M, BLOCK_N, PIECES)
    for i in tl.static_range(PIECES):
        _finish_piece(
            mine[i], staged, panels + DATA, slot_bytes, out, rank, row, column + i * WIDTH, rows, n,
            BLOCK_M, WIDTH, OUT, WORLD_SIZE, DESCRIPTOR, AVG, ALIGNED,
        )  # fmt: skip


@triton.jit
def count_tile(panels, counter):
    """Count a tile that this block has stored; who sees the count sees the tile."""
    if not INTERPRET:
        tl.debug_barrier()  # all threads of the block have stored
    place = (panels + COUNTERS + counter * 8).to(tl.pointer_type(tl.int64))
    tl.atomic_add(place, 1, sem="release", scope="sys")


@triton.jit
def add_tile(address, total, row, column, end_row, columns, BLOCK_M: tl.constexpr, WIDTH: tl.constexpr,
             ALIGNED: tl.constexpr):  # fmt: skip
    """Add a tile to the fp32 matrix at `address`, element by element at once, while others do."""
    p, there = tile_pointers(address, row, column, columns, BLOCK_M, WIDTH, "float32", ALIGNED)
    r = row + tl.arange(0, BLOCK_M)
    tl.atomic_add(p, total, mask=(r < end_row)[:, None] & there, sem="relaxed", scope="sys")


@triton.jit
def finish_added(
    own, panels, out, row, column, rows, n,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PIECES: tl.constexpr, OUT: tl.constexpr, WORLD_SIZE: tl.constexpr,
    AVG: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Add the own product to what the peers have added up in the own panels, and store the result."""
    WIDTH: tl.constexpr = BLOCK_N // PIECES
    mine = cut(own, BLOCK_M, BLOCK_N, PIECES)
    for i in tl.static_range(PIECES):
        p, there = tile_pointers(panels + DATA, row, column + i * WIDTH, n, BLOCK_M, WIDTH, "float32", ALIGNED)
        r = row + tl.arange(0, BLOCK_M)
        total = tl.load(p, mask=(r < rows)[:, None] & there, other=0.0) + mine[i]
        if AVG:
            total = _mean(total, WORLD_SIZE)
        store_rounded(out, total, row, column + i * WIDTH, rows, n, BLOCK_M, WIDTH, OUT, ALIGNED)
