"""Variants with a GEMM kernel of their own: their base class, and the axes, feasibility and constants of its tiles."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from tunedcomm.kernels.common.launch import CompileRequest
from tunedcomm.kernels.common.variant import VariantBase
from tunedcomm.kernels.gemm.op import operands_of, wanted_of
from tunedcomm.kernels.gemm.panels import begin_panels_kernel, begin_request
from tunedcomm.space import Axis, Choice, Config, Space, Value
from tunedcomm.spec import ITEMSIZE, Limits, Problem

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
_LARGE_TILE = 128
_GROUPED_ROWS = 8


class GemmVariant(VariantBase):
    """A variant whose last kernel multiplies tiles; `begin_panels_kernel`, if it is the first, begins a call."""

    def constants(self, problem: Problem, config: Config) -> dict[str, Value]:
        """Constexpr arguments of the kernel that multiplies."""
        wanted = wanted_of(problem)
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

    def arrange(inputs: tuple[Any, ...], outputs: tuple[Any, ...]) -> tuple[int, ...]:
        a, b, bias, *scales = operands_of(problem, inputs)
        given = (a, b, bias, *scales) if with_bias else (a, b, *scales)
        return (*(0 if tensor is None else tensor.data_ptr() for tensor in given), outputs[0].data_ptr())

    return arrange


def tile_space(**rest: Axis) -> Space:
    """The axes of tiles and others."""
    leading = [(m, n, nbytes // size, warps) for m, n, nbytes, warps in _TILES for size in (1, 2)]
    return Space({**TILE_AXES, **rest}, leading=[*leading, *_HOST_TILES])


def num_tiles(rows: int, problem: Problem, config: Config) -> int:
    """Tiles of a matrix of `rows` rows and the problem's N columns."""
    return -(-rows // int(config["block_m"])) * -(-problem.shape[1] // int(config["block_n"]))


def refuse_tiles(problem: Problem, config: Config, limits: Limits, *, rows: int, shards: int = 1) -> str | None:
    """Why tiles of these sizes do not suit a problem, or None.

    Args:
        rows: of the matrix that is cut into tiles: M, or a rank's share of it.
        shards: such matrices that one kernel multiplies.
    """
    _, n, k = problem.shape
    m_, n_, k_ = (int(config[name]) for name in ("block_m", "block_n", "block_k"))
    warps, stages = int(config["num_warps"]), int(config["num_stages"])
    size = ITEMSIZE[problem.dtype]
    if limits.backend == "host":
        if (m_, n_, k_, warps) not in _HOST_TILES:
            return "interpreted tiles differ in nothing but time: only 16x32x32, 32x32x32 and 64x64x64"
        if stages > 1:
            return "interpreted kernels have no stages: only num_stages=1"
    elif (m_, n_, k_ * size, warps) not in _TILES:
        return f"tiles of {m_}x{n_}x{k_} by {warps} warps are not among those that suit a GPU"
    for extent, block, name in ((rows, m_, "rows"), (n, n_, "columns"), (k, k_, "the depth")):
        if block > 16 and block >= 2 * extent:
            return f"tiles of {block} are more than half empty: {name} are {extent}"
    if limits.backend == "host":
        return None
    if _bytes_of_sums(problem, config) >= 32 * warps * _BYTES_OF_THREAD:
        return f"sums of fp8 take a second accumulator: tiles of {m_}x{n_} by {warps} warps leave no register for more"
    return _unsuited_pipeline(stages, (m_ + n_) * k_ * size) or _unsuited_order(
        problem, config, limits, rows=rows, shards=shards
    )


def _unsuited_pipeline(stages: int, bytes_each: int) -> str | None:
    """Why so many stages of so many bytes of operands do not suit a GPU, or None."""
    shared = stages * bytes_each
    if shared > _SHARED_BYTES:
        return f"{stages} stages take {shared} bytes of shared memory; a block has {_SHARED_BYTES}"
    if stages < 2:
        return "without a second stage every product waits for its operands"
    if stages == 2 and 3 * bytes_each <= _SHARED_BYTES:
        return "a third stage fits: with two, products wait for their operands"
    return None


def _unsuited_order(problem: Problem, config: Config, limits: Limits, *, rows: int, shards: int) -> str | None:
    """Why tiles of this size, taken in this order, do not suit a problem on GPUs, or None."""
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
    """An SM holds two blocks with such tiles at once."""
    m, n, k = (int(config[name]) for name in ("block_m", "block_n", "block_k"))
    shared = int(config["num_stages"]) * (m + n) * k * ITEMSIZE[problem.dtype]
    return 2 * shared <= _SHARED_BYTES and 2 * _bytes_of_sums(problem, config) <= _REGISTER_BYTES * 5 // 8


def _bytes_of_sums(problem: Problem, config: Config) -> int:
    """Registers that a block's sums take on sm_90, which adds fp8 imprecisely: see `_gemm.exact_every`.

    Each group of four warps keeps the latest products of the 64 rows at hand apart; fewer rows are multiplied as fp16.
    """
    m, n, warps = (int(config[name]) for name in ("block_m", "block_n", "num_warps"))
    apart = 64 * (warps // 4) if problem.dtype.startswith("float8") and m % 64 == 0 else 0
    return (m + apart) * n * 4


def tile_wish(problem: Problem, limits: Limits, *, rows: int) -> dict[str, float]:
    """Tiles to try first."""
    if limits.backend == "host":
        return {"block_m": 32, "block_n": 32, "block_k": 32, "group": 1, "num_warps": 4, "num_stages": 1}
    deep = 128 // ITEMSIZE[problem.dtype]
    if rows <= 64:
        block_m = 16 if rows <= 16 else 32 if rows <= 32 else 64
        return {"block_m": block_m, "block_n": 64, "block_k": 2 * deep, "group": 1, "num_warps": 4, "num_stages": 4}
    wide = 256 if num_tiles(rows, problem, {"block_m": 128, "block_n": 256}) >= limits.num_sms else 128
    # Of fp8 the high one, see `refuse_tiles`.
    block_m, block_n = (wide, 128) if problem.dtype.startswith("float8") else (128, wide)
    return {"block_m": block_m, "block_n": block_n, "block_k": deep, "group": 8, "num_warps": 8, "num_stages": 3}
