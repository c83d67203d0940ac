"""Tiles of matrix products, for every fused GEMM: operands through tensor descriptors, products in fp32.

Matrices are row-major and dense. A is [rows, depth]; B is [depth, columns] (`kn`) or [columns, depth] (`nk`, as linear
layers store their weights). Descriptors (TMA on Hopper) read zeros beyond a matrix's edges, so tiles need no masks but
where they are stored. They want bases at multiples of 16 bytes and rows of whole 16 bytes; `refuse_gemm` says so on
the host.

The depth is walked in order with one accumulator, so a tile's bits do not depend on which block computes it, or when.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tunedcomm.kernels.common.packets import _round_bfloat16, narrow
from tunedcomm.kernels.common.sync import INTERPRET

_TYPES = {
    "bfloat16": tl.bfloat16,
    "float16": tl.float16,
    "float32": tl.float32,
    "float8_e4m3fn": tl.float8e4nv,
}


@triton.constexpr_function
def element_type(DTYPE):
    """Triton's type of a dtype's name."""
    return _TYPES[DTYPE]


@triton.constexpr_function
def exact_every(dtype, BLOCK_K):
    """After how many products of such operands their sum is added to one in fp32; None where all sums are in fp32.

    sm_90 adds products of fp8 to about 14 bits. As often as cuBLAS without fast accumulation, at least once a block.
    """
    return min(128, BLOCK_K) if dtype.is_fp8() else None


@triton.jit
def matrix(address, rows, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DTYPE: tl.constexpr):
    """A descriptor of the dense [rows, columns] matrix at `address`, read and written in blocks [ROWS, COLUMNS]."""
    base = address.to(tl.pointer_type(element_type(DTYPE)))
    return tl.make_tensor_descriptor(
        base, shape=[rows.to(tl.int32), columns.to(tl.int32)], strides=[columns.to(tl.int64), 1],
        block_shape=[ROWS, COLUMNS],
    )  # fmt: skip


@triton.jit
def operand_b(
    address, depth, columns, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, NK: tl.constexpr, DTYPE: tl.constexpr
):
    """B's descriptor, whichever way it is stored."""
    if NK:
        return matrix(address, columns, depth, BLOCK_N, BLOCK_K, DTYPE)
    else:
        return matrix(address, depth, columns, BLOCK_K, BLOCK_N, DTYPE)


@triton.jit
def tile_product(
    a, b, row, column, depth,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, NK: tl.constexpr,
):  # fmt: skip
    """The tile of A·B whose first element is at (row, column), in fp32."""
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for k in tl.range(0, depth.to(tl.int32), BLOCK_K):
        x = a.load([row, k])
        y = b.load([column, k]).T if NK else b.load([k, column])
        # The interpreter's dot takes bf16 and fp8 by their raw bits.
        if INTERPRET:
            total = tl.dot(x.to(tl.float32), y.to(tl.float32), total)
        else:
            total = tl.dot(x, y, total, max_num_imprecise_acc=exact_every(x.dtype, BLOCK_K))
    return total


@triton.jit
def scaled(
    total, scale_a, scale_b, row, column, rows, columns,
    SCALING: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """A tile of products of fp8 operands times their scales, fp32 at the given addresses.

    `tensorwise` has one scale an operand, `rowwise` one for each of A's `rows` and of B's `columns`; "" has none.
    """
    if SCALING == "rowwise":
        r = row + tl.arange(0, BLOCK_M)
        c = column + tl.arange(0, BLOCK_N)
        x = tl.load(scale_a.to(tl.pointer_type(tl.float32)) + r, mask=r < rows, other=0.0)
        y = tl.load(scale_b.to(tl.pointer_type(tl.float32)) + c, mask=c < columns, other=0.0)
        return total * x[:, None] * y[None, :]
    elif SCALING == "tensorwise":
        x = tl.load(scale_a.to(tl.pointer_type(tl.float32)))
        y = tl.load(scale_b.to(tl.pointer_type(tl.float32)))
        return total * x * y
    else:
        return total


@triton.jit
def rounded(total, DTYPE: tl.constexpr):
    """fp32 rounded to nearest even in `DTYPE`."""
    if INTERPRET and DTYPE == "bfloat16":
        bits = _round_bfloat16(total) << 16
        return bits.to(tl.float32, bitcast=True).to(tl.bfloat16)
    else:
        return total.to(element_type(DTYPE))


@triton.jit
def tile_of(index, rows, columns, GROUP: tl.constexpr):
    """(row, column) in tiles of tile number `index` of a matrix of rows × columns tiles.

    Neighbouring numbers share operands: columns of `GROUP` tiles are walked before the next ones.
    """
    per_group = GROUP * columns
    group = index // per_group
    first = group * GROUP
    height = tl.minimum(rows - first, GROUP)
    within = index - group * per_group
    return first + within % height, within // height


@triton.jit
def store_tile(
    out, total, row, column, end_row, columns, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, DTYPE: tl.constexpr
):
    """Store a tile at address `out`, of a row-major matrix with `columns` columns, up to `end_row`."""
    r = row + tl.arange(0, BLOCK_M)
    c = column + tl.arange(0, BLOCK_N)
    p = out.to(tl.pointer_type(element_type(DTYPE))) + r[:, None].to(tl.int64) * columns + c[None, :]
    tl.store(p, rounded(total, DTYPE), mask=(r < end_row)[:, None] & (c < columns)[None, :])


@triton.jit
def store_packed_tile(
    out, total, row, column, end_row, columns, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, DTYPE: tl.constexpr
):
    """`store_tile` where `out` and all rows begin at multiples of 16 bytes: by 16 bytes at a time."""
    width = columns // 4 * 4 if DTYPE == "float32" else columns // 8 * 8  # the compiler is to know what divides it
    r = row + tl.arange(0, BLOCK_M)
    c = column + tl.arange(0, BLOCK_N)
    base = tl.multiple_of(out.to(tl.pointer_type(element_type(DTYPE))), 16)
    p = base + r[:, None].to(tl.int64) * width + c[None, :]
    tl.store(p, rounded(total, DTYPE), mask=(r < end_row)[:, None] & (c < width)[None, :])


@triton.jit
def part_product(
    a, b, row, column, start, end,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, NK: tl.constexpr,
):  # fmt: skip
    """`tile_product` of the depth from `start`, a multiple of BLOCK_K, to `end`, another one or the last."""
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for k in tl.range(start.to(tl.int32), end.to(tl.int32), BLOCK_K):
        x = a.load([row, k])
        y = b.load([column, k]).T if NK else b.load([k, column])
        if INTERPRET:
            total = tl.dot(x.to(tl.float32), y.to(tl.float32), total)
        else:
            total = tl.dot(x, y, total, max_num_imprecise_acc=exact_every(x.dtype, BLOCK_K))
    return total


@triton.jit
def pointer_product(
    a, b, row, column, start, end, rows, columns, depth,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, NK: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """`part_product` of the matrices at addresses `a` and `b`, without descriptors, which take time to make.

    Bases and rows are multiples of 16 bytes as for descriptors. Rows and columns beyond the edges hold anything.
    """
    PER: tl.constexpr = 128 // element_type(DTYPE).primitive_bitwidth
    x_base = a.to(tl.pointer_type(element_type(DTYPE)))
    y_base = b.to(tl.pointer_type(element_type(DTYPE)))
    r = tl.minimum(row + tl.arange(0, BLOCK_M), rows - 1).to(tl.int64)
    c = column + tl.arange(0, BLOCK_N)
    steps = tl.arange(0, BLOCK_K)
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for k in tl.range(start.to(tl.int32), end.to(tl.int32), BLOCK_K):
        at = k + steps
        inside = tl.max_constancy(at < end, PER)[None, :]
        x = tl.load(tl.multiple_of(x_base + (r[:, None] * depth + at[None, :]), (16, 16)), mask=inside, other=0.0)
        if NK:
            height = tl.minimum(c, columns - 1).to(tl.int64)
            p = tl.multiple_of(y_base + (height[:, None] * depth + at[None, :]), (16, 16))
            y = tl.load(p, mask=inside, other=0.0).T
        else:
            mask = (at < end)[:, None] & tl.max_constancy(c < columns, PER)[None, :]
            p = tl.multiple_of(y_base + (at[:, None].to(tl.int64) * columns + c[None, :]), (16, 16))
            y = tl.load(p, mask=mask, other=0.0)
        if INTERPRET:
            total = tl.dot(x.to(tl.float32), y.to(tl.float32), total)
        else:
            total = tl.dot(x, y, total, max_num_imprecise_acc=exact_every(x.dtype, BLOCK_K))
    return total


@triton.jit
def tile_words(total, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, DTYPE: tl.constexpr):
    """A tile as packets: four words of BLOCK_M × (packets of BLOCK_N elements), each element rounded in `DTYPE`."""
    PER: tl.constexpr = 128 // element_type(DTYPE).primitive_bitwidth
    if DTYPE == "float32":
        words = total.to(tl.int32, bitcast=True)
    else:
        low, high = tl.split(tl.reshape(total, (BLOCK_M, BLOCK_N // PER, 4, 2)))
        words = narrow(low, high, DTYPE)
    even, odd = tl.split(tl.reshape(words, (BLOCK_M, BLOCK_N // PER, 2, 2)))
    w0, w2 = tl.split(even)
    w1, w3 = tl.split(odd)
    return w0, w1, w2, w3
