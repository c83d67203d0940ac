"""What the ag_gemm variants share on the host: what lies in the panels, how shards are cut, feasibility.

The panels' data are the gathered A, [M, K], and behind it, where rows of A have scales of their own, those of all M.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from tunedcomm.kernels.common.feasibility import closest
from tunedcomm.kernels.gemm.op import out_itemsize, refuse_gemm
from tunedcomm.kernels.gemm.variant import num_tiles, refuse_tiles, tile_space, tile_wish
from tunedcomm.space import Config, Value
from tunedcomm.spec import ITEMSIZE, Limits, Problem
from tunedcomm.symm.layout import PANEL_DATA

if TYPE_CHECKING:
    import torch

    from tunedcomm.symm.workspace import Panels

__all__ = [
    "closest_tiles",
    "gathered_in",
    "grid_of",
    "is_packed",
    "panel_bytes",
    "queue_length",
    "refuse_chunks",
    "refuse_gather",
    "refuse_queue",
    "rows_of",
    "rows_of_chunk",
    "scales_in",
    "scales_offset",
]

_LEAST_CHUNK = 256 * 1024  # on GPUs: smaller pieces cost more to announce than to send
_PACKET_BYTES = 16


def rows_of(problem: Problem) -> int:
    """Rows of A that one rank has; rounded up where `refuse` will say that they are not the same number on each."""
    return -(-problem.shape[0] // problem.world_size)


def scales_offset(problem: Problem) -> int:
    """Where the scales of all rows lie in the panels, from their beginning."""
    m, _, k = problem.shape
    return PANEL_DATA + -(-m * k * ITEMSIZE[problem.dtype] // 256) * 256


def panel_bytes(problem: Problem) -> int:
    """Bytes of data in the panels."""
    return scales_offset(problem) - PANEL_DATA + (4 * problem.shape[0] if problem.scaling == "rowwise" else 0)


def gathered_in(panels: Panels, problem: Problem) -> torch.Tensor:
    """The panels' A, [M, K]."""
    import torch

    m, _, k = problem.shape
    size = m * k * ITEMSIZE[problem.dtype]
    return panels.buffer.local[PANEL_DATA : PANEL_DATA + size].view(getattr(torch, problem.dtype)).view(m, k)


def scales_in(panels: Panels, problem: Problem) -> torch.Tensor:
    """The panels' scales of A's rows, [M, 1]."""
    import torch

    start = scales_offset(problem)
    return panels.buffer.local[start : start + 4 * problem.shape[0]].view(torch.float32).view(-1, 1)


def is_packed(problem: Problem) -> bool:
    """True if rows of the result begin at multiples of 16 bytes."""
    return problem.shape[1] * out_itemsize(problem) % _PACKET_BYTES == 0


def rows_of_chunk(problem: Problem, chunks: int, multiple: int) -> int:
    """Rows of one of so many chunks of a shard, in whole multiples."""
    even = -(-rows_of(problem) // chunks)
    return -(-even // multiple) * multiple


def grid_of(device: Any, most: int, per_sm: int = 1) -> int:
    """Blocks of a kernel that stays until all is done."""
    if device.type == "cpu":
        return min(most, 2)
    import torch

    return min(most, per_sm * torch.cuda.get_device_properties(device).multi_processor_count)


def refuse_gather(problem: Problem, limits: Limits, *, descriptors: bool = True) -> str | None:
    """Why no variant with panels can run `problem`, whatever the config; None if one might."""
    if problem.shape[0] % problem.world_size:
        return f"{problem.shape[0]} rows are not the same number on each of {problem.world_size} ranks"
    return refuse_gemm(problem, limits, panel_bytes=panel_bytes(problem), descriptors=descriptors)


def refuse_chunks(problem: Problem, config: Config, limits: Limits, multiple: int) -> str | None:
    """Why a shard is not cut into `chunks` pieces of whole multiples of rows, or None."""
    chunks, rows = int(config["chunks"]), rows_of(problem)
    if chunks == 1:
        return None
    a_chunk = rows_of_chunk(problem, chunks, multiple)
    if -(-rows // a_chunk) != chunks:
        return f"{rows} rows do not fill {chunks} chunks of whole {multiple} rows"
    if limits.backend == "cuda" and a_chunk * problem.shape[2] * ITEMSIZE[problem.dtype] < _LEAST_CHUNK:
        return f"chunks of {a_chunk} rows are less than {_LEAST_CHUNK} bytes: announcing them costs more than it brings"
    return None


def refuse_queue(problem: Problem, config: Config, limits: Limits) -> str | None:
    """Why a queue of tiles does not suit a problem, or None."""
    if reason := refuse_gather(problem, limits):
        return reason
    if reason := refuse_tiles(problem, config, limits, rows=rows_of(problem), shards=problem.world_size):
        return reason
    return refuse_chunks(problem, config, limits, int(config["block_m"]))


def queue_length(problem: Problem, config: Config) -> int:
    """Tiles of all shards."""
    return problem.world_size * num_tiles(rows_of(problem), problem, config)


def closest_tiles(problem: Problem, limits: Limits, rest: Mapping[str, Value], infeasible: Any) -> dict[str, Value]:
    """The config with the best feasible tiles, given the values of the other axes."""
    wish = tile_wish(problem, limits, rows=rows_of(problem))

    def refuses(problem: Problem, config: Config, limits: Limits) -> str | None:
        found: str | None = infeasible(problem, {**config, **rest}, limits)
        return found

    return {**closest(wish, tile_space(), problem, limits, refuses), **rest}
