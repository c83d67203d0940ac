"""Axes, feasibility and binaries that the variants with a GEMM kernel of their own share."""

from __future__ import annotations

from typing import Any

from tunedcomm.kernels._launch import CompileRequest
from tunedcomm.kernels._matmul import wanted_of
from tunedcomm.space import Axis, Choice, Config, Value
from tunedcomm.spec import ITEMSIZE, Limits, Problem

__all__ = ["TILE_AXES", "num_tiles", "refuse_tiles", "tile_constants", "tile_request", "tile_wish"]

_SHARED_BYTES = 227 * 1024  # that a block may have on GPUs with tensor descriptors in hardware
_REGISTER_BYTES = 255 * 4

TILE_AXES: dict[str, Axis] = {
    "block_m": Choice(16, 32, 64, 128, 256),
    "block_n": Choice(32, 64, 128, 256),
    "block_k": Choice(32, 64, 128, 256),
    "group": Choice(1, 4, 8),
    "num_warps": Choice(4, 8),
    "num_stages": Choice(1, 2, 3, 4, 6),
}


def num_tiles(rows: int, problem: Problem, config: Config) -> int:
    """Tiles of a matrix of `rows` rows and the problem's N columns."""
    return -(-rows // int(config["block_m"])) * -(-problem.shape[1] // int(config["block_n"]))


def refuse_tiles(problem: Problem, config: Config, limits: Limits, *, rows: int, epilogue_bytes: int = 0) -> str | None:
    """Why tiles of these sizes do not suit a problem, or None.

    Args:
        rows: of the matrix that is cut into tiles: M, or a rank's share of it.
        epilogue_bytes: shared memory that the epilogue takes besides the stages.
    """
    _, n, k = problem.shape
    m_, n_, k_ = (int(config[name]) for name in ("block_m", "block_n", "block_k"))
    warps, stages = int(config["num_warps"]), int(config["num_stages"])
    size = ITEMSIZE[problem.dtype]
    for extent, block, name in ((rows, m_, "rows"), (n, n_, "columns"), (k, k_, "the depth")):
        if block > 16 and block >= 2 * extent:
            return f"tiles of {block} are more than half empty: {name} are {extent}"
    if limits.backend == "host":
        if (m_, n_, k_) not in ((16, 32, 32), (32, 32, 32), (64, 64, 64)):
            return "interpreted tiles differ in nothing but time: only 16x32x32, 32x32x32 and 64x64x64"
        if warps > 4 or stages > 1 or int(config["group"]) > 4:
            return "interpreted kernels have neither warps nor stages: only num_warps=4, num_stages=1, group up to 4"
        return None
    if k_ * size > 256:
        return f"rows of {k_ * size} bytes in a tile; tensor descriptors read 256 at most"
    if stages < 2:
        return "without a second stage every product waits for its operands"
    shared = stages * (m_ + n_) * k_ * size + epilogue_bytes
    if shared > _SHARED_BYTES:
        return f"{stages} stages of {m_}x{n_}x{k_} take {shared} bytes of shared memory; a block has {_SHARED_BYTES}"
    if m_ * n_ * 4 > warps * 32 * _REGISTER_BYTES * 3 // 4:
        return f"sums of {m_}x{n_} do not fit into the registers of {warps} warps"
    if m_ * n_ < warps * 32 * 8:
        return f"{warps} warps for tiles of {m_}x{n_}: most of them would wait"
    if warps == 8 and m_ < 128 and n_ < 128:
        return f"8 warps share no tile of {m_}x{n_} well"
    return None


def tile_constants(problem: Problem, config: Config) -> dict[str, Value]:
    """Constants that every GEMM kernel takes."""
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


def tile_request(kernel: Any, problem: Problem, config: Config, **constants: Value) -> CompileRequest:
    """The binary of a GEMM kernel with the usual constants and these."""
    return CompileRequest.of(
        kernel,
        {**tile_constants(problem, config), **constants},
        num_warps=int(config["num_warps"]),
        num_stages=int(config["num_stages"]),
    )


def tile_wish(problem: Problem, limits: Limits, *, rows: int) -> dict[str, float]:
    """Tiles to try first."""
    if limits.backend == "host":
        return {"block_m": 32, "block_n": 32, "block_k": 32, "group": 1, "num_warps": 4, "num_stages": 1}
    deep = 128 // ITEMSIZE[problem.dtype]
    if rows <= 64:
        block_m = 16 if rows <= 16 else 32 if rows <= 32 else 64
        return {"block_m": block_m, "block_n": 64, "block_k": 2 * deep, "group": 1, "num_warps": 4, "num_stages": 4}
    wide = 256 if num_tiles(rows, problem, {"block_m": 128, "block_n": 256}) >= limits.num_sms else 128
    return {"block_m": 128, "block_n": wide, "block_k": deep, "group": 8, "num_warps": 8, "num_stages": 3}
