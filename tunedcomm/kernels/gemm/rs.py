"""gemm_rs in one persistent GEMM: tiles are walked shard by shard, and go to the ranks that own them.

A shard is the rows of one rank's result. The shard of rank + 1 comes first and the own one last, each chunk by chunk
(`chunks` groups of tile rows). A rank's panels hold one *slot* for each rank's partial result of its rows, of the
result's dtype, rows × N each; slots follow each other at whole packets.

- push_reduce: a tile of another rank's shard is rounded and stored into this rank's slot of the owner's panels; the
  block that comes last to a chunk's counter raises the owner's flag of that chunk. A tile of the own shard stays in the
  accumulator until the peers' flags of its chunk are up; then their partial results are added, and the sum goes to the
  result. There is no other pass. With `late` a block comes to a tile's counter only when its next product is made: what
  it stored to the peer has arrived by then, and it does not stand still for that.
- copy_engine: tiles of other ranks' shards are stored into this rank's own panels, behind its slots, and counted. Side
  streams wait for the counters (`cuStreamWaitValue32`, by the copy engines' own front end), copy a chunk into this
  rank's slot at the owner when all of its tiles are there, then the call's number into the owner's flag. So the GEMM's
  SMs store nothing over the links.
- multimem: tiles are stored into this rank's slot of that owner in its own panels, the own shard's tiles too. When a
  block has no tiles left it waits for the flags of all ranks chunk by chunk and loads sums of the own rows with
  `multimem.ld_reduce`. The block that is the last to have read raises a further flag at all peers and waits for theirs,
  for nobody may write into panels that peers still read. Refused where the fabric reports no multicast.

`epilogue` says how the peers' partial results are read: through descriptors, three on their way at once, or by plain
loads.

Waits end: all blocks are resident, and every block does and counts all its tiles for others before it waits for its
first own one, so that each rank's flags go up whether or not the peers' have. Copies take no SM, so they go on while
the GEMM holds all of them; their counters are cleared behind the last copy, where nothing that runs waits for it, for
that may be a kernel of the driver's; the GEMM is launched before the waits are queued. On the host a launch ends before
copies can be asked for, so there the own shard is a second launch. The peers' slots may be overwritten from the next
call's begin on, which comes after this kernel in stream order.

Numerics: push_reduce and copy_engine ordered; multimem library (each element is summed once, for its one owner, in the
switch's order). Graph-safe: flags hold call numbers, counters end at 0, side streams fork from the caller's and join
it.
Source: fused GEMM + reduce-scatter kernels with an owner-last order, without their separate reduce pass; signals a
chunk between a GEMM and copy engines, as in Triton-distributed and FLUX; NVLink SHARP as PyTorch's multimem operators
use it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import triton
import triton.language as tl

from tunedcomm.kernels.common.copies import copies_of
from tunedcomm.kernels.common.feasibility import refuse_multicast, refuse_streams
from tunedcomm.kernels.common.lane import address_of
from tunedcomm.kernels.common.launch import AddressLaunch, bind_kernel
from tunedcomm.kernels.common.packets import PACKET_BYTES, load_reduce, mean, mean_packets, num_packets, write_elements
from tunedcomm.kernels.common.panels import (
    COUNTERS,
    DATA,
    Sender,
    announce,
    announce_to,
    await_chunk_of_all,
    begin_panels_kernel,
    bind_begin,
    call_number,
    is_last,
)
from tunedcomm.kernels.common.sync import INTERPRET
from tunedcomm.kernels.gemm import tiles
from tunedcomm.kernels.gemm.op import out_itemsize, rows_of
from tunedcomm.kernels.gemm.tiles import element_type, matrix, operand_b, rounded, scaled, tile_of, tile_product
from tunedcomm.space import Axis, Choice, Config, Value
from tunedcomm.spec import Limits, Problem
from tunedcomm.symm.layout import PANEL_COUNTERS_OFFSET, PANEL_DATA

if TYPE_CHECKING:
    from tunedcomm.symm.workspace import Panels, Workspace

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
    p, mask = tile_pointers(address, row, column, columns, BLOCK_M, WIDTH, DTYPE, ALIGNED)
    r = row + tl.arange(0, BLOCK_M)
    tl.store(p, rounded(total, DTYPE), mask=(r < end_row)[:, None] & mask)


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
    own_product, staged, slots, slot_bytes, out, rank, row, column, rows, n,
    BLOCK_M: tl.constexpr, WIDTH: tl.constexpr, OUT: tl.constexpr, WORLD_SIZE: tl.constexpr,
    DESCRIPTOR: tl.constexpr, AVG: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Sum a piece of a tile over the ranks, in rank order, and store it.

    The own partial result is in no slot; what is read in its place is a peer's, which is in the cache anyway.
    """
    own_tile = rounded(own_product, OUT)
    total = tl.zeros((BLOCK_M, WIDTH), tl.float32)
    for i in tl.range(0, WORLD_SIZE, num_stages=_STAGES):
        source = tl.where(i == rank, (i + 1) % WORLD_SIZE, i).to(tl.int32)
        if DESCRIPTOR:
            peer_tile = staged.load([source * rows + row, column])
        else:
            p, mask = tile_pointers(
                slots + source * slot_bytes, row, column, n, BLOCK_M, WIDTH, OUT, ALIGNED
            )  # fmt: skip
            r = row + tl.arange(0, BLOCK_M)
            peer_tile = tl.load(p, mask=(r < rows)[:, None] & mask, other=0.0)
        total += tl.where(i == rank, own_tile.to(tl.float32), peer_tile.to(tl.float32))
    if AVG:
        total = mean(total, WORLD_SIZE)
    store_rounded(out, total, row, column, rows, n, BLOCK_M, WIDTH, OUT, ALIGNED)


@triton.jit
def staged_matrix(
    panels, rows, n,
    BLOCK_M: tl.constexpr, WIDTH: tl.constexpr, OUT: tl.constexpr, WORLD_SIZE: tl.constexpr,
    DESCRIPTOR: tl.constexpr,
):  # fmt: skip
    """A descriptor of all slots, one below the other; `rows` where partial results are read by plain loads."""
    if DESCRIPTOR:
        return matrix(panels + DATA, rows * WORLD_SIZE, n, BLOCK_M, WIDTH, OUT)
    else:
        return rows


@triton.jit
def finish_tile(
    own_product, staged, panels, slot_bytes, out, rank, row, column, rows, n, chunk, epoch, timeout_ns, status,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PIECES: tl.constexpr, OUT: tl.constexpr,
    WORLD_SIZE: tl.constexpr, DESCRIPTOR: tl.constexpr, AVG: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Wait for the peers' chunk and make a tile of the result out of the own product, `PIECES` times some columns."""
    await_chunk_of_all(panels, chunk, rank, epoch, timeout_ns, status, WORLD_SIZE)
    WIDTH: tl.constexpr = BLOCK_N // PIECES
    own_pieces = cut(own_product, BLOCK_M, BLOCK_N, PIECES)
    for i in tl.static_range(PIECES):
        _finish_piece(
            own_pieces[i], staged, panels + DATA, slot_bytes, out, rank, row, column + i * WIDTH, rows, n,
            BLOCK_M, WIDTH, OUT, WORLD_SIZE, DESCRIPTOR, AVG, ALIGNED,
        )  # fmt: skip


@triton.jit
def count_tile(panels, counter):
    """Count a tile that this block has stored; a reader that sees the count sees the tile."""
    if not INTERPRET:
        tl.debug_barrier()  # all threads of the block have stored
    place = (panels + COUNTERS + counter * 8).to(tl.pointer_type(tl.int64))
    tl.atomic_add(place, 1, sem="release", scope="sys")


@triton.jit
def _count(panels, panel_peers, rank, turn, chunk, tiles, epoch, CHUNKS: tl.constexpr, WORLD_SIZE: tl.constexpr):
    """Count a tile of the chunk for rank + 1 + `turn`; the last tile raises that rank's flag."""
    if is_last(panels, turn * CHUNKS + chunk, tiles):
        owner = ((rank + 1 + turn) % WORLD_SIZE).to(tl.int32)
        announce_to(address_of(panel_peers, panels, owner, rank, WORLD_SIZE), rank, chunk, epoch)


@triton.jit
def push_reduce_kernel(
    a, b, scale_a, scale_b, out, m, n, depth, panels, panel_peers, rank, timeout_ns, status, slot_bytes,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr, NK: tl.constexpr,
    DTYPE: tl.constexpr, OUT: tl.constexpr, SCALING: tl.constexpr, WORLD_SIZE: tl.constexpr, CHUNKS: tl.constexpr,
    AVG: tl.constexpr, ALIGNED: tl.constexpr, PIECES: tl.constexpr, DESCRIPTOR: tl.constexpr, LATE: tl.constexpr,
):  # fmt: skip
    """Multiply tiles shard by shard, the own shard last; see the module's text.

    Example:
        2 ranks, 4 tiles, 2 a shard, 1 block. Rank 0 multiplies tiles 2 and 3, stores them in slot 0 of rank 1's panels
        and raises rank 1's flag. Then rank 0 multiplies tiles 0 and 1, waits for rank 1's flag, adds slot 1 of its own
        panels to each, in rank order, and stores the sums in its result.
    """
    epoch = call_number(panels)
    rows = (m // WORLD_SIZE).to(tl.int32)
    tile_rows, tile_columns = tl.cdiv(rows, BLOCK_M), tl.cdiv(n, BLOCK_N).to(tl.int32)
    shard = tile_rows * tile_columns
    x = matrix(a, m, depth, BLOCK_M, BLOCK_K, DTYPE)
    y = operand_b(b, depth, n, BLOCK_N, BLOCK_K, NK, DTYPE)
    staged = staged_matrix(panels, rows, n, BLOCK_M, BLOCK_N // PIECES, OUT, WORLD_SIZE, DESCRIPTOR)
    due = tl.program_id(0) * 0  # tiles stored, but not counted
    last_turn, last_chunk, last_count = due, due, due
    for tile in tl.range(tl.program_id(0), shard * WORLD_SIZE, tl.num_programs(0)):
        turn = tile // shard
        owner = ((rank + 1 + turn) % WORLD_SIZE).to(tl.int32)
        chunk, tile_row, tile_column, count = place_of(tile - turn * shard, tile_rows, tile_columns, CHUNKS, GROUP)
        row, column = tile_row * BLOCK_M, tile_column * BLOCK_N
        # 1. Multiply the tile.
        total = partial_tile(
            x, y, scale_a, scale_b, owner * rows + row, column, m, n, depth, BLOCK_M, BLOCK_N, BLOCK_K, NK, SCALING
        )  # fmt: skip
        if LATE:  # noqa: SIM102 - the compiler's choice, then the GPU's
            if due > 0:
                _count(panels, panel_peers, rank, last_turn, last_chunk, last_count, epoch, CHUNKS, WORLD_SIZE)
                due -= 1
        # 2. A tile of a peer's shard: store it in the owner's panels; the chunk's last tile raises the flag there.
        if turn < WORLD_SIZE - 1:
            target = address_of(panel_peers, panels, owner, rank, WORLD_SIZE)
            slot = target + DATA + rank * slot_bytes
            store_rounded(slot, total, row, column, rows, n, BLOCK_M, BLOCK_N, OUT, ALIGNED)
            if LATE:
                due, last_turn, last_chunk, last_count = due + 1, turn, chunk, count
            else:
                _count(panels, panel_peers, rank, turn, chunk, count, epoch, CHUNKS, WORLD_SIZE)
        else:
            # 3. A tile of the own shard: wait for the peers' tiles, sum in rank order.
            finish_tile(
                total, staged, panels, slot_bytes, out, rank, row, column, rows, n, chunk, epoch, timeout_ns, status,
                BLOCK_M, BLOCK_N, PIECES, OUT, WORLD_SIZE, DESCRIPTOR, AVG, ALIGNED,
            )  # fmt: skip
    if LATE:  # noqa: SIM102
        if due > 0:
            _count(panels, panel_peers, rank, last_turn, last_chunk, last_count, epoch, CHUNKS, WORLD_SIZE)


@triton.jit
def counted_gemm_kernel(
    a, b, scale_a, scale_b, out, first, end, m, n, depth, panels, panel_peers, rank, timeout_ns, status,
    slot_bytes,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr, NK: tl.constexpr,
    DTYPE: tl.constexpr, OUT: tl.constexpr, SCALING: tl.constexpr, WORLD_SIZE: tl.constexpr, CHUNKS: tl.constexpr,
    AVG: tl.constexpr, ALIGNED: tl.constexpr, PIECES: tl.constexpr, DESCRIPTOR: tl.constexpr,
):  # fmt: skip
    """Multiply tiles `first` to `end` of all shards, the own shard last; see the module's text."""
    epoch = call_number(panels)
    rows = (m // WORLD_SIZE).to(tl.int32)
    tile_rows, tile_columns = tl.cdiv(rows, BLOCK_M), tl.cdiv(n, BLOCK_N).to(tl.int32)
    shard = tile_rows * tile_columns
    x = matrix(a, m, depth, BLOCK_M, BLOCK_K, DTYPE)
    y = operand_b(b, depth, n, BLOCK_N, BLOCK_K, NK, DTYPE)
    staged = staged_matrix(panels, rows, n, BLOCK_M, BLOCK_N // PIECES, OUT, WORLD_SIZE, DESCRIPTOR)
    for tile in tl.range(first.to(tl.int32) + tl.program_id(0), end.to(tl.int32), tl.num_programs(0)):
        turn = tile // shard
        owner = ((rank + 1 + turn) % WORLD_SIZE).to(tl.int32)
        chunk, tile_row, tile_column, _ = place_of(tile - turn * shard, tile_rows, tile_columns, CHUNKS, GROUP)
        row, column = tile_row * BLOCK_M, tile_column * BLOCK_N
        # 1. Multiply the tile.
        total = partial_tile(
            x, y, scale_a, scale_b, owner * rows + row, column, m, n, depth, BLOCK_M, BLOCK_N, BLOCK_K, NK, SCALING
        )  # fmt: skip
        # 2. A tile of a peer's shard: store it in the own panels and count it; a copy engine takes the chunk away.
        if turn < WORLD_SIZE - 1:
            place = panels + DATA + (WORLD_SIZE + turn) * slot_bytes
            store_rounded(place, total, row, column, rows, n, BLOCK_M, BLOCK_N, OUT, ALIGNED)
            count_tile(panels, turn * CHUNKS + chunk)
        else:
            # 3. A tile of the own shard: wait for the peers' tiles, sum in rank order.
            finish_tile(
                total, staged, panels, slot_bytes, out, rank, row, column, rows, n, chunk, epoch, timeout_ns, status,
                BLOCK_M, BLOCK_N, PIECES, OUT, WORLD_SIZE, DESCRIPTOR, AVG, ALIGNED,
            )  # fmt: skip


@triton.jit
def _load_sums(
    out, panels, panel_peers, multicast, slot_bytes, rank, numel, span, epoch, timeout_ns, status,
    WORLD_SIZE: tl.constexpr, OUT: tl.constexpr, WIDTH: tl.constexpr, CHUNKS: tl.constexpr, AVG: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Load and store the sums of the own rows, in chunks of `span` packets, as their flags go up."""
    total = num_packets(numel, WIDTH)
    offsets = tl.arange(0, BLOCK).to(tl.int64)
    stride = tl.num_programs(0).to(tl.int64) * BLOCK
    for chunk in tl.static_range(CHUNKS):
        await_chunk_of_all(panels, chunk, -1, epoch, timeout_ns, status, WORLD_SIZE)
        end = tl.minimum(total, (chunk + 1) * span)
        for start in tl.range(chunk * span + tl.program_id(0).to(tl.int64) * BLOCK, end, stride):
            packet = start + offsets
            mask = packet < end
            sums = load_reduce(
                multicast, panel_peers, panels, DATA + rank * slot_bytes + packet * 16, mask, OUT, WORLD_SIZE
            )
            s0, s1, s2, s3 = mean_packets(sums, OUT, AVG, WORLD_SIZE)
            write_elements(out, packet, numel, s0, s1, s2, s3, mask, WIDTH, True)


@triton.jit
def multimem_gemm_kernel(
    a, b, scale_a, scale_b, out, m, n, depth, panels, panel_peers, rank, timeout_ns, status, slot_bytes,
    multicast,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr, NK: tl.constexpr,
    DTYPE: tl.constexpr, OUT: tl.constexpr, SCALING: tl.constexpr, WORLD_SIZE: tl.constexpr, CHUNKS: tl.constexpr,
    AVG: tl.constexpr, ALIGNED: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Multiply all tiles into the own panels, then load the sums of the own rows; see the module's text."""
    epoch = call_number(panels)
    rows = (m // WORLD_SIZE).to(tl.int32)
    tile_rows, tile_columns = tl.cdiv(rows, BLOCK_M), tl.cdiv(n, BLOCK_N).to(tl.int32)
    shard = tile_rows * tile_columns
    x = matrix(a, m, depth, BLOCK_M, BLOCK_K, DTYPE)
    y = operand_b(b, depth, n, BLOCK_N, BLOCK_K, NK, DTYPE)
    # 1. Multiply and store every tile in the own panels; a chunk's last tile raises its owner's flag.
    for tile in tl.range(tl.program_id(0), shard * WORLD_SIZE, tl.num_programs(0)):
        turn = tile // shard
        owner = ((rank + 1 + turn) % WORLD_SIZE).to(tl.int32)
        chunk, tile_row, tile_column, count = place_of(tile - turn * shard, tile_rows, tile_columns, CHUNKS, GROUP)
        row, column = tile_row * BLOCK_M, tile_column * BLOCK_N
        total = partial_tile(
            x, y, scale_a, scale_b, owner * rows + row, column, m, n, depth, BLOCK_M, BLOCK_N, BLOCK_K, NK, SCALING
        )  # fmt: skip
        store_rounded(
            panels + DATA + owner * slot_bytes, total, row, column, rows, n, BLOCK_M, BLOCK_N, OUT, ALIGNED
        )  # fmt: skip
        if is_last(panels, turn * CHUNKS + chunk, count):
            announce_to(address_of(panel_peers, panels, owner, rank, WORLD_SIZE), rank, chunk, epoch)
    # 2. Load the sums of the own rows, which the switch makes.
    span = (tile_rows + CHUNKS - 1) // CHUNKS * BLOCK_M * n * WIDTH // 16
    if CHUNKS == 1:
        span = slot_bytes // 16
    _load_sums(
        out, panels, panel_peers, multicast, slot_bytes, rank, rows * n, span, epoch, timeout_ns, status,
        WORLD_SIZE, OUT, WIDTH, CHUNKS, AVG, BLOCK,
    )  # fmt: skip
    # 3. The last block to have read waits until every peer has read.
    if is_last(panels, WORLD_SIZE * CHUNKS, tl.num_programs(0)):
        announce(panel_peers, rank, CHUNKS, epoch, WORLD_SIZE)
        await_chunk_of_all(panels, CHUNKS, rank, epoch, timeout_ns, status, WORLD_SIZE)


# As many as there are SMs, fewer to leave some to others, or two an SM, one of which multiplies while the other stores.
NUM_BLOCKS = Choice(1, 64, 120, 132, 264)
_BLOCKS_PER_SM = 2
_PIECE = 64  # elements a thread of a piece of a tile that is summed at once, beside the accumulator
_GRID_AXES: dict[str, Axis] = {"chunks": Choice(1, 2, 4), "num_blocks": NUM_BLOCKS}
_EPILOGUE_AXES: dict[str, Axis] = {**_GRID_AXES, "epilogue": Choice("descriptor", "pointer")}


def slot_bytes(problem: Problem) -> int:
    """Bytes from one slot to the next."""
    size = rows_of(problem) * problem.shape[1] * out_itemsize(problem)
    return -(-size // PACKET_BYTES) * PACKET_BYTES


class ScatterVariant(tiles.GemmVariant):
    """A persistent GEMM of gemm_rs.

    Its kernel takes the addresses of a, b, scale_a, scale_b and the result, what else varies, m, n, depth, panels,
    panel_peers, rank, timeout_ns, status, slot_bytes, `further`, and constants.
    """

    op = "gemm_rs"

    def room(self, problem: Problem) -> int:
        """Bytes of panels."""
        return problem.world_size * slot_bytes(problem)

    def infeasible(self, problem: Problem, config: Config, limits: Limits) -> str | None:
        if reason := tiles.refuse_gemm(problem, limits, panel_bytes=self.room(problem)):
            return reason
        rows, chunks = rows_of(problem), int(config["chunks"])
        if reason := tiles.refuse_tiles(problem, config, limits, rows=rows, shards=problem.world_size):
            return reason
        tile_rows = -(-rows // int(config["block_m"]))
        if chunks > 1 and -(-tile_rows // -(-tile_rows // chunks)) != chunks:
            return f"{tile_rows} rows of tiles a shard do not make {chunks} chunks"
        return _unsuited_grid(problem, config, limits) or _unsuited_epilogue(problem, config, limits)

    def preferred_config(self, problem: Problem, limits: Limits) -> dict[str, Any]:
        preferred = tiles.preferred_tile(problem, limits, rows=rows_of(problem))
        blocks = 1 if limits.backend == "host" else limits.num_sms
        return {
            **preferred,
            "chunks": 1,
            "num_blocks": blocks,
            "epilogue": "descriptor",
            "late": False,
            "num_streams": 1,
        }

    def constants(self, problem: Problem, config: Config) -> dict[str, Value]:
        found, aligned = super().constants(problem, config), tiles.whole_packets(problem)
        found |= {"CHUNKS": config["chunks"], "AVG": problem.reduction == "avg", "ALIGNED": aligned}
        if "epilogue" in config:
            pieces = _pieces_of(config, out_itemsize(problem))
            found |= {"PIECES": pieces, "DESCRIPTOR": config["epilogue"] == "descriptor"}
        return found

    def num_blocks(self, problem: Problem, config: Config) -> int:
        """Blocks that are launched: no more than there are tiles."""
        return min(int(config["num_blocks"]), problem.world_size * tiles.num_tiles(rows_of(problem), problem, config))

    def further(self, panels: Panels) -> tuple[int, ...]:
        """Last runtime arguments of the kernel."""
        return ()

    def bind_gemm(
        self, problem: Problem, config: Config, workspace: Workspace, panels: Panels, num_varying: int = 5
    ) -> Callable[..., None]:
        """`(stream, *addresses and what else varies)` to a launch of the GEMM kernel."""
        kernel = bind_kernel(self.request(problem, config), self.num_blocks(problem, config), workspace.device)
        varying = (None,) * num_varying
        waits = (workspace.rank, workspace.timeout_ns, workspace.status_argument(problem), slot_bytes(problem))
        return kernel.fix((*varying, *problem.shape, panels.local, panels.peers, *waits, *self.further(panels)))

    def bind(self, problem: Problem, config: Config, workspace: Workspace) -> AddressLaunch:
        panels = workspace.panels(problem.mode, self.room(problem))
        begin = bind_begin(problem, workspace, panels)
        gemm = self.bind_gemm(problem, config, workspace, panels)

        def by_address(stream: int, *given: int) -> None:
            begin(stream)
            gemm(stream, *given)

        return AddressLaunch(by_address, tiles.addresses(problem))


def _unsuited_grid(problem: Problem, config: Config, limits: Limits) -> str | None:
    """Return why a persistent kernel of so many blocks does not suit the problem, or None."""
    blocks = int(config["num_blocks"])
    if limits.backend == "host":
        return "an interpreted block would wait for blocks after it: only num_blocks=1" if blocks > 1 else None
    count = problem.world_size * tiles.num_tiles(rows_of(problem), problem, config)
    if blocks > _BLOCKS_PER_SM * limits.num_sms:
        return f"{blocks} blocks do not all fit on {limits.num_sms} SMs at once"
    if blocks > limits.num_sms and not tiles.two_fit(problem, config):
        return "two blocks with such tiles do not fit on an SM"
    fewer = [value for value in NUM_BLOCKS.values() if int(value) < blocks]
    if fewer and int(fewer[-1]) >= count:
        return f"{count} tiles leave some of {blocks} blocks without work"
    if blocks == 1 and count > 1:
        return "one block leaves the other SMs idle"
    return None


def _unsuited_epilogue(problem: Problem, config: Config, limits: Limits) -> str | None:
    """Return why partial results cannot be read the way that `epilogue` says, if there is a choice, or None."""
    if "epilogue" not in config:
        return None
    if config["epilogue"] == "descriptor" and not tiles.whole_packets(problem):
        return f"rows of {problem.shape[1]} results are not whole packets, as tensor descriptors want"
    if config["epilogue"] == "pointer" and tiles.whole_packets(problem) and limits.backend == "cuda":
        return "plain loads of partial results take twice as long as descriptors, which suit this result"
    if limits.backend == "host" and int(config["block_n"]) > 128:
        return "interpreted tiles are small"
    return None


def _pieces_of(config: Config, itemsize: int) -> int:
    """Pieces in which a tile is finished, so that what is read, of elements of so many bytes, has registers."""
    a_thread = int(config["block_m"]) * int(config["block_n"]) // (32 * int(config["num_warps"]))
    return min(max(1, a_thread * itemsize // (2 * _PIECE)), 4)


class PushReduce(ScatterVariant, registered=True):
    name = "push_reduce"
    summary = "one persistent GEMM that stores tiles to their owners and sums the own rows in its last tiles"
    kernels = (begin_panels_kernel, push_reduce_kernel)
    space = tiles.tile_space(**_EPILOGUE_AXES, late=Choice(False, True))

    def constants(self, problem: Problem, config: Config) -> dict[str, Value]:
        return {**super().constants(problem, config), "LATE": config["late"]}


class Multimem(ScatterVariant, registered=True):
    name = "multimem"
    numerics = "library"
    summary = "one persistent GEMM into own panels, whose rows the switch sums (NVLink multicast)"
    kernels = (begin_panels_kernel, multimem_gemm_kernel)
    space = tiles.tile_space(**_GRID_AXES)

    def infeasible(self, problem: Problem, config: Config, limits: Limits) -> str | None:
        if reason := refuse_multicast(limits) or super().infeasible(problem, config, limits):
            return reason
        if int(config["chunks"]) > 1 and not tiles.whole_packets(problem):
            return f"rows of {problem.shape[1]} results are not whole packets: chunks would share some; use chunks=1"
        return None

    def constants(self, problem: Problem, config: Config) -> dict[str, Value]:
        block = 32 * int(config["num_warps"])
        return {**super().constants(problem, config), "WIDTH": out_itemsize(problem), "BLOCK": block}

    def further(self, panels: Panels) -> tuple[int, ...]:
        return (panels.multicast,)


_BEGUN, _DONE = 0, 1  # events: the begin on the caller's stream; then one a side stream at its end


class CopyEngine(ScatterVariant, registered=True):
    name = "copy_engine"
    summary = "one persistent GEMM; copy engines take its chunks to their owners, its last tiles take the sums"
    kernels = (begin_panels_kernel, counted_gemm_kernel)
    space = tiles.tile_space(**_EPILOGUE_AXES, num_streams=Choice(1, 2, 3))

    def room(self, problem: Problem) -> int:
        return (2 * problem.world_size - 1) * slot_bytes(problem)

    def infeasible(self, problem: Problem, config: Config, limits: Limits) -> str | None:
        return super().infeasible(problem, config, limits) or refuse_streams(problem, config["num_streams"])

    def bind(self, problem: Problem, config: Config, workspace: Workspace) -> AddressLaunch:
        panels, copies = workspace.panels(problem.mode, self.room(problem)), copies_of(workspace, problem.mode)
        begin = bind_begin(problem, workspace, panels)
        gemm = self.bind_gemm(problem, config, workspace, panels, num_varying=7)
        sides, sender = copies.streams[: int(config["num_streams"])], Sender(copies, workspace.rank, panels.local)
        others, rows, row_bytes = problem.world_size - 1, rows_of(problem), problem.shape[1] * out_itemsize(problem)
        slot, counters = slot_bytes(problem), panels.local + PANEL_COUNTERS_OFFSET
        shard, tile_rows = tiles.num_tiles(rows, problem, config), -(-rows // int(config["block_m"]))
        span = -(-tile_rows // int(config["chunks"])) * int(config["block_m"])
        pushes = []  # every chunk of other ranks' shards, in the order in which they are finished
        for turn in range(others):
            for chunk, first in enumerate(range(0, rows, span)):
                offset, count = first * row_bytes, min(span, rows - first)
                source = panels.data + (problem.world_size + turn) * slot + offset
                move = (PANEL_DATA + workspace.rank * slot + offset, source, count * row_bytes)
                needed = tiles.num_tiles(count, problem, config)
                pushes.append((sides[turn % len(sides)], needed, panels.peers[turn], chunk, move))
        at_once = workspace.device.type == "cuda"

        def by_address(stream: int, *given: int) -> None:
            """See the module's text."""
            begin(stream)
            copies.fork(stream, sides, _BEGUN)
            gemm(stream, *given, 0, (problem.world_size if at_once else others) * shard)
            for index, (side, needed, peer, chunk, move) in enumerate(pushes):
                copies.await_count(side, counters + 8 * index, needed)
                sender.send(side, peer, chunk, move)
            copies.join(sides[1:], sides[0], _DONE + 1)
            copies.clear(sides[0], counters, 2 * len(pushes))
            copies.join(sides[:1], stream, _DONE)
            if not at_once:
                gemm(stream, *given, others * shard, problem.world_size * shard)

        return AddressLaunch(by_address, tiles.addresses(problem))
