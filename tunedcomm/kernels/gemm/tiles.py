"""Tiles of matrix products, for every fused GEMM: device code, axes, feasibility, and the base class of variants.

Matrices are row-major and dense. A is [rows, depth]; B is [depth, columns] (`kn`) or [columns, depth] (`nk`, as linear
layers store their weights). Descriptors (TMA on Hopper) read zeros beyond a matrix's edges, so tiles need no masks but
where they are stored. They want bases at multiples of 16 bytes and rows of whole 16 bytes; `refuse_gemm` says so on
the host. Products are summed in fp32.

The depth is walked in order with one accumulator, so a tile's bits do not depend on which block computes it, or when.
GPUs multiply tiles of 64 rows and more by another instruction than smaller ones. Where `Limits.ordered` asks for the
same bits from every config, all tiles there have 64 rows at least, however few rows there are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import triton
import triton.language as tl

from tunedcomm.kernels.common.feasibility import refuse_kernels
from tunedcomm.kernels.common.launch import CompileRequest
from tunedcomm.kernels.common.packets import PACKET_BYTES, _round_bfloat16, narrow
from tunedcomm.kernels.common.panels import begin_panels_kernel, begin_request
from tunedcomm.kernels.common.sync import INTERPRET
from tunedcomm.kernels.common.variant import VariantBase
from tunedcomm.kernels.gemm.op import DTYPES, OUT_DTYPES, gemm_layout, operands_of, out_itemsize
from tunedcomm.space import Axis, Choice, Config, Space, Value
from tunedcomm.spec import ITEMSIZE, Limits, Problem, get_op
from tunedcomm.symm.layout import LaneLayout, Room

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
    """Number of products after which their sum is added to an fp32 sum; None where all sums are in fp32.

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
    PER_PACKET: tl.constexpr = 128 // element_type(DTYPE).primitive_bitwidth
    x_base = a.to(tl.pointer_type(element_type(DTYPE)))
    y_base = b.to(tl.pointer_type(element_type(DTYPE)))
    r = tl.minimum(row + tl.arange(0, BLOCK_M), rows - 1).to(tl.int64)
    c = column + tl.arange(0, BLOCK_N)
    steps = tl.arange(0, BLOCK_K)
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for k in tl.range(start.to(tl.int32), end.to(tl.int32), BLOCK_K):
        at = k + steps
        inside = tl.max_constancy(at < end, PER_PACKET)[None, :]
        x = tl.load(tl.multiple_of(x_base + (r[:, None] * depth + at[None, :]), (16, 16)), mask=inside, other=0.0)
        if NK:
            height = tl.minimum(c, columns - 1).to(tl.int64)
            p = tl.multiple_of(y_base + (height[:, None] * depth + at[None, :]), (16, 16))
            y = tl.load(p, mask=inside, other=0.0).T
        else:
            mask = (at < end)[:, None] & tl.max_constancy(c < columns, PER_PACKET)[None, :]
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
    PER_PACKET: tl.constexpr = 128 // element_type(DTYPE).primitive_bitwidth
    if DTYPE == "float32":
        words = total.to(tl.int32, bitcast=True)
    else:
        low, high = tl.split(tl.reshape(total, (BLOCK_M, BLOCK_N // PER_PACKET, 4, 2)))
        words = narrow(low, high, DTYPE)
    even, odd = tl.split(tl.reshape(words, (BLOCK_M, BLOCK_N // PER_PACKET, 2, 2)))
    w0, w2 = tl.split(even)
    w1, w3 = tl.split(odd)
    return w0, w1, w2, w3


_REGISTER_BYTES = 256 * 1024  # of an SM
_BYTES_OF_THREAD = 255 * 4  # registers that it may have
_SHARED_BYTES = 227 * 1024  # that a block may have on GPUs with tensor descriptors in hardware

TILE_AXES: dict[str, Axis] = {
    "block_m": Choice(16, 32, 64, 128, 256),
    "block_n": Choice(32, 64, 128, 256),
    "block_k": Choice(32, 64, 128, 256),
    "num_warps": Choice(4, 8),
    "group": Choice(1, 8),
    "num_stages": Choice(1, 2, 3, 4, 6),
}
# (block_m, block_n, bytes of block_k, num_warps): what fills a wgmma and leaves room for a pipeline. Products of all
# axes would be a hundred times as many, each some seconds of the compiler's time.
_TILES = frozenset(
    {
        *((16, 64, 256, 4), (16, 128, 256, 4), (32, 64, 256, 4), (32, 128, 256, 4)),
        *((64, 64, 256, 4), (64, 128, 128, 4), (64, 128, 256, 4), (64, 256, 128, 4)),
        *((128, 128, 128, 4), (128, 128, 128, 8), (128, 128, 256, 8), (128, 256, 128, 8), (256, 128, 128, 8)),
    }
)
_HOST_TILES = frozenset({(16, 32, 32, 4), (32, 32, 32, 4), (64, 64, 64, 4)})
_ORDERED_ROWS = 64  # of a tile at least
_LARGE_TILE = 128
_GROUPED_ROWS = 8


class GemmVariant(VariantBase):
    """A variant whose last kernel multiplies tiles; `begin_panels_kernel`, if it is the first, begins a call."""

    def lane_room(self, problem: Problem, config: Config, layout: LaneLayout) -> Room:
        return Room()  # its data is in panels

    def constants(self, problem: Problem, config: Config) -> dict[str, Value]:
        """Constexpr arguments of the kernel that multiplies."""
        wanted = gemm_layout(problem)
        return {
            "BLOCK_M": config["block_m"],
            "BLOCK_N": config["block_n"],
            "BLOCK_K": config["block_k"],
            "GROUP": config["group"],
            "NK": wanted.nk,
            "DTYPE": problem.dtype,
            "OUT": wanted.dtype,
            "SCALING": problem.scaling,
            "WORLD_SIZE": problem.world_size,
        }

    def request(self, problem: Problem, config: Config) -> CompileRequest:
        """The binary of the kernel that multiplies."""
        warps, stages, pdl = int(config["num_warps"]), int(config["num_stages"]), bool(config.get("launch_pdl", False))
        constants = self.constants(problem, config)
        return CompileRequest.of(self.kernels[-1], constants, num_warps=warps, num_stages=stages, launch_pdl=pdl)

    def compile_requests(self, problem: Problem, config: Config) -> Iterable[CompileRequest]:
        begin = (begin_request(problem.world_size),) if self.kernels[0] is begin_panels_kernel else ()
        return (*begin, self.request(problem, config))


def addresses(problem: Problem) -> Callable[[tuple[Any, ...], tuple[Any, ...]], tuple[int, ...]]:
    """`(inputs, outputs)` to the addresses of a, b, the bias (gemm_ar alone), scale_a, scale_b and the result.

    0 for what the problem does not have.
    """
    with_bias = problem.op == "gemm_ar"

    def of_call(inputs: tuple[Any, ...], outputs: tuple[Any, ...]) -> tuple[int, ...]:
        a, b, bias, *scales = operands_of(problem, inputs)
        given = (a, b, bias, *scales) if with_bias else (a, b, *scales)
        return (*(0 if tensor is None else tensor.data_ptr() for tensor in given), outputs[0].data_ptr())

    return of_call


def tile_space(**rest: Axis) -> Space:
    """The axes of tiles and others."""
    leading = [(m, n, nbytes // size, warps) for m, n, nbytes, warps in _TILES for size in (1, 2)]
    return Space({**TILE_AXES, **rest}, leading=[*leading, *_HOST_TILES])


def whole_packets(problem: Problem) -> bool:
    """True if the result's rows are whole packets."""
    return problem.shape[1] * out_itemsize(problem) % PACKET_BYTES == 0


def refuse_gemm(
    problem: Problem, limits: Limits, *, panel_bytes: int = 0, descriptors: bool = True, packets: bool = False
) -> str | None:
    """Return why no kernel of ours can run `problem`, whatever the config; None if one might.

    Args:
        problem, limits: what is asked, and where.
        panel_bytes: data that a call keeps in its panels.
        descriptors: operands are read through tensor descriptors.
        packets: rows of the result are moved as packets.
    """
    (m, n, k), wanted = problem.shape, gemm_layout(problem)
    reductions = (problem.reduction,) if problem.op == "ag_gemm" else get_op(problem.op).reductions
    if reason := refuse_kernels(problem, limits, DTYPES, reductions):
        return reason
    if wanted.dtype not in OUT_DTYPES:
        return f"kernels write {', '.join(OUT_DTYPES)}; {wanted.dtype} goes to the library"
    if problem.op != "gemm_ar" and m % problem.world_size:
        return f"{m} rows are not the same number for each of {problem.world_size} ranks"
    if panel_bytes > limits.panel_bytes:
        most = f"panels hold {limits.panel_bytes} at most, 16 times TUNEDCOMM_WORKSPACE_MIB"
        return f"{panel_bytes} bytes of matrices; {most}"
    for columns in (k,) if wanted.nk else (k, n):
        if descriptors and columns * ITEMSIZE[problem.dtype] % PACKET_BYTES:
            return f"rows of {columns} {problem.dtype} are not multiples of 16 bytes, as tensor descriptors want"
    if packets and not whole_packets(problem):
        return f"rows of {n} results are not whole packets of {PACKET_BYTES} bytes"
    return None


def num_tiles(rows: int, problem: Problem, config: Config) -> int:
    """Tiles of a matrix of `rows` rows and the problem's N columns."""
    return -(-rows // int(config["block_m"])) * -(-problem.shape[1] // int(config["block_n"]))


def refuse_tiles(problem: Problem, config: Config, limits: Limits, *, rows: int, shards: int = 1) -> str | None:
    """Return why tiles of these sizes do not suit a problem, or None.

    Args:
        rows: of the matrix that is cut into tiles: M, or a rank's share of it.
        shards: such matrices that one kernel multiplies.
    """
    _, n, k = problem.shape
    m_, n_, k_ = (int(config[name]) for name in ("block_m", "block_n", "block_k"))
    warps, stages = int(config["num_warps"]), int(config["num_stages"])
    size = ITEMSIZE[problem.dtype]
    if limits.ordered and limits.backend == "cuda" and m_ < _ORDERED_ROWS:
        return f"tiles of {m_} rows may round otherwise than tiles of other configs, which numerics='ordered' excludes"
    if limits.backend == "host":
        if (m_, n_, k_, warps) not in _HOST_TILES:
            return "interpreted tiles differ in nothing but time: only 16x32x32, 32x32x32 and 64x64x64"
        if stages > 1:
            return "interpreted kernels have no stages: only num_stages=1"
    elif (m_, n_, k_ * size, warps) not in _TILES:
        return f"tiles of {m_}x{n_}x{k_} by {warps} warps are not among those that suit a GPU"
    for extent, block, name in ((rows, m_, "rows"), (n, n_, "columns"), (k, k_, "the depth")):
        if block > 16 and block >= 2 * extent and not limits.ordered:
            return f"tiles of {block} are more than half empty: {name} are {extent}"
    if limits.backend == "host":
        return None
    if _bytes_of_sums(problem, config) >= 32 * warps * _BYTES_OF_THREAD:
        return f"sums of fp8 take a second accumulator: tiles of {m_}x{n_} by {warps} warps leave no register for more"
    shared, a_stage = stages * (m_ + n_) * k_ * size, (m_ + n_) * k_ * size
    if shared > _SHARED_BYTES:
        return f"{stages} stages take {shared} bytes of shared memory; a block has {_SHARED_BYTES}"
    if stages < 2:
        return "without a second stage every product waits for its operands"
    if stages == 2 and 3 * a_stage <= _SHARED_BYTES:
        return "a third stage fits: with two, products wait for their operands"
    return _unsuited_order(problem, config, limits, rows=rows, shards=shards)


def _unsuited_order(problem: Problem, config: Config, limits: Limits, *, rows: int, shards: int) -> str | None:
    """Return why tiles of this size, taken in this order, do not suit a problem on GPUs, or None."""
    m_, n_, grouped = int(config["block_m"]), int(config["block_n"]), int(config["group"]) > 1
    large = {"block_m": _LARGE_TILE, "block_n": _LARGE_TILE}
    if min(m_, n_) < _LARGE_TILE and num_tiles(rows, problem, large) * shards >= 2 * limits.num_sms:
        return f"tiles of {m_}x{n_} read more than larger ones would, of which there are enough for all SMs"
    tile_rows = -(-rows // m_)
    if grouped and tile_rows < 2:
        return "one row of tiles makes no group: only group=1"
    if not grouped and tile_rows >= _GROUPED_ROWS:
        return f"{tile_rows} rows of tiles one after the other find little of A in the cache: only group=8"
    return None


def two_fit(problem: Problem, config: Config) -> bool:
    """True if an SM holds two blocks with such tiles at once."""
    m, n, k = (int(config[name]) for name in ("block_m", "block_n", "block_k"))
    shared = int(config["num_stages"]) * (m + n) * k * ITEMSIZE[problem.dtype]
    return 2 * shared <= _SHARED_BYTES and 2 * _bytes_of_sums(problem, config) <= _REGISTER_BYTES * 5 // 8


def _bytes_of_sums(problem: Problem, config: Config) -> int:
    """Registers that a block's sums take on sm_90, which adds fp8 imprecisely: see `exact_every`.

    Each group of four warps keeps the latest products of the 64 rows at hand apart; fewer rows are multiplied as fp16.
    """
    m, n, warps = (int(config[name]) for name in ("block_m", "block_n", "num_warps"))
    apart = 64 * (warps // 4) if problem.dtype.startswith("float8") and m % 64 == 0 else 0
    return (m + apart) * n * 4


def preferred_tile(problem: Problem, limits: Limits, *, rows: int) -> dict[str, float]:
    """Tiles to try first."""
    if limits.backend == "host":
        return {"block_m": 32, "block_n": 32, "block_k": 32, "group": 1, "num_warps": 4, "num_stages": 1}
    deep = 128 // ITEMSIZE[problem.dtype]
    if rows <= 64:
        block_m = 64 if rows > 32 or limits.ordered else 32 if rows > 16 else 16
        return {"block_m": block_m, "block_n": 64, "block_k": 2 * deep, "group": 1, "num_warps": 4, "num_stages": 4}
    wide = 256 if num_tiles(rows, problem, {"block_m": 128, "block_n": 256}) >= limits.num_sms else 128
    # Of fp8 the high one, see `refuse_tiles`.
    block_m, block_n = (wide, 128) if problem.dtype.startswith("float8") else (128, wide)
    return {"block_m": block_m, "block_n": block_n, "block_k": deep, "group": 8, "num_warps": 8, "num_stages": 3}
