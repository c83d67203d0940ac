"""Persistent GEMMs whose tiles lie one by one in the ranks' panels: device code, axes, feasibility and launches.

Block b of a grid of G computes the tiles b, b + G, b + 2G, … on every rank, so what it hands to the peers it hands to
their blocks b, by the flags of the lane's row b. A tile's place in the panels, its slot, is dense: BLOCK_M × BLOCK_N
elements, whatever hangs over the edges of the result included.

These kernels begin with flags of their own, which say what those of `begin_panels_kernel` say: a peer whose block b has
begun is done with its call before. Each block looks at them after its first product, when they have long come, and
writes panels only after that.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import triton
import triton.language as tl

from tunedcomm.kernels.common.feasibility import Launch
from tunedcomm.kernels.common.launch import CompileRequest, bind_kernel
from tunedcomm.kernels.common.sync import load_packets, store_packets
from tunedcomm.kernels.gemm.ar_launches import bind_addresses
from tunedcomm.kernels.gemm.ar_sums import refuse_packets
from tunedcomm.kernels.gemm.op import out_itemsize, wanted_of
from tunedcomm.kernels.gemm.tiles import element_type, rounded
from tunedcomm.kernels.gemm.variant import (
    num_tiles,
    refuse_tiles,
    tile_request,
    tile_space,
    tile_wish,
    two_fit,
)
from tunedcomm.space import Choice, Config, Space, Value
from tunedcomm.spec import Limits, Problem
from tunedcomm.symm.layout import PANEL_DATA

if TYPE_CHECKING:
    from tunedcomm.symm.workspace import Workspace

__all__ = [
    "bind_slots",
    "refuse_slots",
    "rounds_of",
    "scattered_bytes",
    "slot_bytes",
    "slot_request",
    "slot_space",
    "slot_wish",
    "turns_of",
]


def slot_space() -> Space:
    """Tiles and a grid of them; with two blocks an SM, one multiplies while the other moves and sums tiles."""
    return tile_space(num_blocks=Choice(1, 2, 64, 128, 132, 264))


@triton.jit
def store_slot(address, total, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, DTYPE: tl.constexpr):
    """Store a tile, rounded, to the slot at `address`."""
    within = tl.arange(0, BLOCK_M)[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    p = address.to(tl.pointer_type(element_type(DTYPE))) + within
    tl.store(tl.multiple_of(p, (16, 16)), rounded(total, DTYPE))


@triton.jit
def packets_in(at, row, column, m, packets, BLOCK_N: tl.constexpr, DTYPE: tl.constexpr):
    """Of packets number `at` of the slot of the tile at (row, column): column, number in the result, if they exist.

    The result has `m` rows of `packets` packets; columns are counted in packets too.
    """
    PER: tl.constexpr = 128 // element_type(DTYPE).primitive_bitwidth
    r = row.to(tl.int64) + at // (BLOCK_N // PER)
    c = column.to(tl.int64) // PER + at % (BLOCK_N // PER)
    return c, r * packets + c, (r < m) & (c < packets)


@triton.jit
def copy_slot(
    out, source, m, packets, row, column,
    BLOCK_N: tl.constexpr, DTYPE: tl.constexpr, SLOT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Copy the tile at (row, column) from its slot, `SLOT` packets at address `source`, to the result."""
    lanes = tl.arange(0, BLOCK).to(tl.int64)
    for start in tl.range(0, SLOT, BLOCK):
        at = start + lanes
        _, packet, here = packets_in(at, row, column, m, packets, BLOCK_N, DTYPE)
        here = here & (at < SLOT)
        w0, w1, w2, w3 = load_packets(source + at * 16, here)
        store_packets(out + packet * 16, w0, w1, w2, w3, here)


def slot_bytes(problem: Problem, config: Config) -> int:
    """Bytes of a slot."""
    return int(config["block_m"]) * int(config["block_n"]) * out_itemsize(problem)


def turns_of(problem: Problem, config: Config) -> int:
    """How often each rank has a turn to own one of a block's tiles."""
    return -(-rounds_of(problem, config) // problem.world_size)


def scattered_bytes(problem: Problem, config: Config) -> int:
    """Bytes of the slots for partial tiles of own tiles, one of every rank for each block's turn."""
    return turns_of(problem, config) * int(config["num_blocks"]) * problem.world_size * slot_bytes(problem, config)


def rounds_of(problem: Problem, config: Config) -> int:
    """Tiles of a block, of the one that has the most."""
    return -(-num_tiles(problem.shape[0], problem, config) // int(config["num_blocks"]))


def refuse_slots(problem: Problem, config: Config, limits: Limits, *, panel_bytes: int) -> str | None:
    """Why such a kernel cannot run `problem`, or None."""
    if reason := refuse_packets(problem, limits, panel_bytes=panel_bytes):
        return reason
    if reason := refuse_tiles(problem, config, limits, rows=problem.shape[0]):
        return reason
    tiles, blocks = num_tiles(problem.shape[0], problem, config), int(config["num_blocks"])
    if blocks > tiles:
        return f"{blocks} blocks, but only {tiles} tiles"
    most = limits.num_sms if limits.backend == "cuda" else 2
    if limits.backend == "cuda" and blocks > most and two_fit(problem, config):
        most *= 2
    if blocks > min(most, limits.max_blocks):
        return f"{blocks} blocks; {min(most, limits.max_blocks)} are resident at once, with flags of their own"
    if 2 * blocks < min(tiles, most) and limits.backend == "cuda":
        return f"{blocks} blocks leave most SMs idle"
    return None


def slot_wish(problem: Problem, limits: Limits) -> dict[str, float]:
    """Tiles and blocks to try first."""
    wish = tile_wish(problem, limits, rows=problem.shape[0])
    tiles = num_tiles(problem.shape[0], problem, wish)  # type: ignore[arg-type]
    return {**wish, "num_blocks": min(tiles, limits.num_sms if limits.backend == "cuda" else 2)}


def slot_request(kernel: Any, problem: Problem, config: Config, **constants: Value) -> CompileRequest:
    """The binary of such a kernel, which takes BIAS and BLOCK besides what all GEMMs take.

    BLOCK is what its loops over packets take at once, in tiles of all ranks: enough to keep the links busy.
    """
    items = 4 if problem.world_size == 2 else 2 if problem.world_size <= 4 else 1
    block = 32 * int(config["num_warps"]) * items
    return tile_request(kernel, problem, config, BIAS=wanted_of(problem).bias, BLOCK=block, **constants)


def bind_slots(
    problem: Problem, config: Config, workspace: Workspace, request: CompileRequest, panel_bytes: int, *extra: int,
    multicast: bool = False,
) -> Launch:  # fmt: skip
    """Launch of such a kernel.

    Its arguments are `(a, b, bias, scale_a, scale_b, out, m, n, k, local, q0 … q6, rank, timeout_ns, status, panels,
    p0 … p6, *extra, constants)`, with the addresses of the panels' data, and of its multicast before `extra` if asked.
    """
    lane, panels = workspace.lanes[problem.mode], workspace.panels(problem.mode, panel_bytes)
    kernel = bind_kernel(request, int(config["num_blocks"]), workspace.device)
    everywhere = ((panels.multicast + PANEL_DATA if panels.multicast else 0),) if multicast else ()
    tail = (
        *problem.shape, lane.local, *lane.peers, workspace.rank, workspace.timeout_ns,
        workspace.status_argument(problem), panels.data, *(p + PANEL_DATA if p else 0 for p in panels.peers),
        *everywhere, *extra,
    )  # fmt: skip
    return bind_addresses(problem, kernel, tail, keep=panels)
