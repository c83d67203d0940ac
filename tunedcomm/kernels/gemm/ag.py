"""ag_gemm in one persistent GEMM that works through the tiles of all shards in the order in which the shards come.

A call begins with an exchange of flags, after which nobody reads the panels. Then every rank's shard is pushed into the
peers' panels, to rank + 1 first, then to rank + 2, …, chunk by chunk, each followed by its flag. The panels' data are
the gathered A, [M, K], and behind it, where rows of A have scales of their own, the scales of all M.

**The queue.** The own shard is there; then come shards of rank − 1, rank − 2, …. Within a shard the queue goes chunk by
chunk, and a chunk consists of whole rows of tiles but at the end of a shard. Tiles cross neither, so a tile of a peer's
shard waits for the flag of one chunk. Read through a descriptor of all shards, the last tile of one holds rows of the
next, which may be under way just then; they only reach rows of the product that are not stored. Every chunk is waited
for by some tile, so all that peers push into this rank's panels is there when the kernel ends.

- copy_engine_persistent: copy engines push (see `panels.Sender`). The side streams fork from the caller's after the
  call's beginning and join it at the end, for what follows may overwrite the shard and count the next call. What is
  sent is queued before what waits, so that streams which share one hardware queue do not wait for each other.
- sm_persistent: the first `comm_blocks` blocks of the GEMM kernel push before they take tiles, which a counter hands
  out; the last block to leave sets it back. The sender that is the last to have stored its part of a chunk raises the
  flag: counting it releases what a block stored and acquires what the others did; the flag releases all of it.

No rank waits in a circle: senders wait for nothing but the peers' beginning of the call, copy engines need no SM, and
the first blocks of a grid that fits on the GPU are there when the others are.

Numerics: ordered (nothing is summed over ranks; a tile's products are added in the order of the depth). Graph-safe.
Source: asynchronous tensor parallelism in PyTorch and fused all-gather GEMMs, with call numbers as progress signals;
those that give some SMs to communication (FLUX, Triton-distributed).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import triton
import triton.language as tl

from tunedcomm.kernels.common.copies import NUM_STREAMS, Copies, copies_of
from tunedcomm.kernels.common.feasibility import Launch, refuse_streams
from tunedcomm.kernels.common.lane import select_peer
from tunedcomm.kernels.common.launch import Argument, BoundKernel, bind_kernel
from tunedcomm.kernels.common.panels import (
    COUNTERS,
    DATA,
    Sender,
    announce_to,
    await_chunk,
    begin_panels_kernel,
    bind_begin,
    call_number,
    is_last,
)
from tunedcomm.kernels.common.sync import load_packets, store_packets
from tunedcomm.kernels.gemm import tiles
from tunedcomm.kernels.gemm.op import gemm_layout, rows_of
from tunedcomm.kernels.gemm.tiles import (
    element_type,
    matrix,
    operand_b,
    scaled,
    store_packed_tile,
    store_tile,
    tile_of,
    tile_product,
)
from tunedcomm.space import Choice, Config, Value
from tunedcomm.spec import ITEMSIZE, Limits, Problem
from tunedcomm.symm.layout import PANEL_DATA

if TYPE_CHECKING:
    import torch

    from tunedcomm.symm.workspace import Panels, Workspace

_TAKEN, _LEFT = tl.constexpr(0), tl.constexpr(1)  # counters
SENT = tl.constexpr(2)  # the first counter that sending uses: one for each peer and chunk
_PACKETS = tl.constexpr(2048)  # that a block has under way
_ROWS = tl.constexpr(256)
_MIN_CHUNK = 256 * 1024  # bytes on GPUs: smaller pieces cost more to announce than to send
MIN_SENT_BYTES = 64 * 1024  # that a block should have to send


@triton.jit
def operands(
    a, b, panels, rows, columns, depth,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, NK: tl.constexpr, DTYPE: tl.constexpr,
    WORLD_SIZE: tl.constexpr,
):  # fmt: skip
    """Descriptors of the own shard of A, where the caller has it, of all shards in the panels, and of B."""
    shard = matrix(a, rows, depth, BLOCK_M, BLOCK_K, DTYPE)
    gathered = matrix(panels + DATA, rows * WORLD_SIZE, depth, BLOCK_M, BLOCK_K, DTYPE)
    return shard, gathered, operand_b(b, depth, columns, BLOCK_N, BLOCK_K, NK, DTYPE)


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
    index, shard, gathered, b, out, scale_a, scale_b, panels, scales, epoch, rows, columns, depth, chunk_rows, rank,
    timeout_ns, status,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr, NK: tl.constexpr,
    DTYPE: tl.constexpr, OUT: tl.constexpr, SCALING: tl.constexpr, WORLD_SIZE: tl.constexpr,
    PACKED: tl.constexpr,
):  # fmt: skip
    """Compute tile number `index` (32 bits) of the queue, once its rows of A are here.

    `scale_a` is the address of the own scales of A, `scales` the address of all ranks' scales; `epoch` counts the
    calls. A shard has `rows` rows and a chunk `chunk_rows`, a multiple of BLOCK_M.
    """
    turn, chunk, row, column = place_of(index, rows, columns, chunk_rows, BLOCK_M, BLOCK_N, GROUP)
    source = ((rank - turn + WORLD_SIZE) % WORLD_SIZE).to(tl.int32)
    first = (source * rows).to(tl.int32)
    # 1. Wait for the chunk that has the tile's rows of A, unless they are the own ones.
    if turn == 0:
        x, above = shard, row
    else:
        await_chunk(panels, source, chunk, epoch, timeout_ns, status)
        x, above = gathered, first + row
    # 2. Multiply and store.
    total = tile_product(x, b, above, column, depth, BLOCK_M, BLOCK_N, BLOCK_K, NK)
    row_scales = scale_a
    if SCALING == "rowwise":
        row_scales = tl.where(turn == 0, scale_a, scales + first * 4)
    total = scaled(total, row_scales, scale_b, row, column, rows, columns, SCALING, BLOCK_M, BLOCK_N)
    if PACKED:
        store_packed_tile(out, total, first + row, column, first + rows, columns, BLOCK_M, BLOCK_N, OUT)
    else:
        store_tile(out, total, first + row, column, first + rows, columns, BLOCK_M, BLOCK_N, OUT)


@triton.jit
def take(panels, counter):
    """The next tile's number, 32 bits, from a counter of the panels that is 0 between calls."""
    place = (panels + COUNTERS + counter * 8).to(tl.pointer_type(tl.int64))
    return tl.atomic_add(place, 1, sem="relaxed", scope="gpu").to(tl.int32)


@triton.jit
def put_back(panels, counter):
    """Set the counter to 0 for the next call; by one block, when all have seen that there is nothing left."""
    tl.store((panels + COUNTERS + counter * 8).to(tl.pointer_type(tl.int64)), tl.num_programs(0) * 0)


@triton.jit
def _send_scales(scale_a, target, start, end, num_senders):
    first = tl.program_id(0).to(tl.int64) * _ROWS
    for at in tl.range(start + first, end, num_senders.to(tl.int64) * _ROWS):
        row = at + tl.arange(0, _ROWS).to(tl.int64)
        mask = row < end
        x = tl.load(scale_a.to(tl.pointer_type(tl.int32)) + row, mask=mask, other=0)
        tl.store(target.to(tl.pointer_type(tl.int32)) + row, x, mask=mask)


@triton.jit
def send_shard(
    a, scale_a, panels, panel_peers, scales, epoch, rows, depth, chunk_rows, num_senders, rank,
    DTYPE: tl.constexpr, SCALING: tl.constexpr, WORLD_SIZE: tl.constexpr,
):  # fmt: skip
    """Send the shard chunk by chunk to all peers; called by the first `num_senders` blocks.

    Args:
        a, scale_a: addresses of the shard and of the scales of its rows.
        panels, panel_peers: addresses of the own panels and of the peers' panels.
        scales: offset of the scales within panels.
        epoch: the call's number.
    """
    row_packets = depth.to(tl.int64) * (element_type(DTYPE).primitive_bitwidth // 8) // 16
    offsets = tl.arange(0, _PACKETS).to(tl.int64) + tl.program_id(0).to(tl.int64) * _PACKETS
    stride = num_senders.to(tl.int64) * _PACKETS
    num_chunks = tl.cdiv(rows, chunk_rows)
    first = (rank * rows).to(tl.int64)
    for turn in tl.range(0, (num_chunks * (WORLD_SIZE - 1)).to(tl.int32)):
        peer = turn // num_chunks
        chunk = turn - peer * num_chunks
        target = select_peer(panel_peers, peer)
        place = target + DATA + first * row_packets * 16
        start = (chunk * chunk_rows).to(tl.int64)
        end = tl.minimum(start + chunk_rows, rows)
        # 1. Store this block's part of the chunk in the peer's panels.
        for packet in tl.range(start * row_packets, end * row_packets, stride):
            at = packet + offsets
            mask = at < end * row_packets
            w0, w1, w2, w3 = load_packets(a + at * 16, mask)
            store_packets(place + at * 16, w0, w1, w2, w3, mask)
        if SCALING == "rowwise":
            _send_scales(scale_a, target + scales + first * 4, start, end, num_senders)
        # 2. The last block to have stored its part raises the chunk's flag there.
        if is_last(panels, SENT + turn, num_senders):
            announce_to(target, rank, chunk, epoch)


@triton.jit
def send_kernel(
    a, scale_a, panels, panel_peers, scales, rows, depth, chunk_rows, rank,
    DTYPE: tl.constexpr, SCALING: tl.constexpr, WORLD_SIZE: tl.constexpr,
):  # fmt: skip
    """All blocks send the shard."""
    send_shard(
        a, scale_a, panels, panel_peers, scales, call_number(panels), rows, depth, chunk_rows,
        tl.num_programs(0), rank, DTYPE, SCALING, WORLD_SIZE,
    )  # fmt: skip


@triton.jit
def queue_kernel(
    a, b, out, scale_a, scale_b, panels, scales, rows, columns, depth, chunk_rows, rank, timeout_ns, status,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr, NK: tl.constexpr,
    DTYPE: tl.constexpr, OUT: tl.constexpr, SCALING: tl.constexpr, WORLD_SIZE: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """Block b takes tiles b, b + grid, b + 2 · grid, … of the queue.

    Example:
        2 ranks, shards of 2 tiles, 1 chunk, 1 block. On rank 0 tiles 0 and 1 of the queue are the tiles of its own
        shard, read from `a`. Tiles 2 and 3 are the tiles of rank 1's shard, read from the panels once rank 1 has raised
        the flag of its chunk 0; they are the lower half of the result.
    """
    epoch = call_number(panels)
    shard, gathered, y = operands(
        a, b, panels, rows, columns, depth, BLOCK_M, BLOCK_N, BLOCK_K, NK, DTYPE, WORLD_SIZE
    )  # fmt: skip
    count = num_queued(rows, columns, BLOCK_M, BLOCK_N, WORLD_SIZE)
    for index in tl.range(tl.program_id(0), count, tl.num_programs(0)):
        queued_tile(
            index, shard, gathered, y, out, scale_a, scale_b, panels, scales, epoch, rows, columns, depth, chunk_rows,
            rank, timeout_ns, status, BLOCK_M, BLOCK_N, BLOCK_K, GROUP, NK, DTYPE, OUT, SCALING, WORLD_SIZE, PACKED,
        )  # fmt: skip


@triton.jit
def sending_kernel(
    a, b, out, scale_a, scale_b, panels, panel_peers, scales, rows, columns, depth, chunk_rows,
    num_senders, rank, timeout_ns, status,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr, NK: tl.constexpr,
    DTYPE: tl.constexpr, OUT: tl.constexpr, SCALING: tl.constexpr, WORLD_SIZE: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """The first `num_senders` blocks send the shard; then all blocks take tiles until there are none."""
    epoch = call_number(panels)
    # 1. The first blocks push the own shard to every peer.
    if tl.program_id(0) < num_senders:
        send_shard(
            a, scale_a, panels, panel_peers, scales, epoch, rows, depth, chunk_rows, num_senders, rank,
            DTYPE, SCALING, WORLD_SIZE,
        )  # fmt: skip
    # 2. All blocks take tiles from the queue.
    shard, gathered, y = operands(
        a, b, panels, rows, columns, depth, BLOCK_M, BLOCK_N, BLOCK_K, NK, DTYPE, WORLD_SIZE
    )  # fmt: skip
    count = num_queued(rows, columns, BLOCK_M, BLOCK_N, WORLD_SIZE)
    index = take(panels, _TAKEN)
    while index < count:
        queued_tile(
            index, shard, gathered, y, out, scale_a, scale_b, panels, panels + scales, epoch, rows, columns, depth,
            chunk_rows, rank, timeout_ns, status,
            BLOCK_M, BLOCK_N, BLOCK_K, GROUP, NK, DTYPE, OUT, SCALING, WORLD_SIZE, PACKED,
        )  # fmt: skip
        index = take(panels, _TAKEN)
    # 3. The last block to leave sets the queue back.
    if is_last(panels, _LEFT, tl.num_programs(0)):
        put_back(panels, _TAKEN)


def _scales_offset(problem: Problem) -> int:
    """Bytes from the beginning of the panels to the scales of all rows."""
    m, _, k = problem.shape
    return PANEL_DATA + -(-m * k * ITEMSIZE[problem.dtype] // 256) * 256


def panel_bytes(problem: Problem) -> int:
    """Bytes of data in the panels."""
    return _scales_offset(problem) - PANEL_DATA + (4 * problem.shape[0] if problem.scaling == "rowwise" else 0)


def gathered_in(panels: Panels, problem: Problem) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The panels' A, [M, K], and the scales of its rows, [M, 1], if they have any."""
    import torch

    m, _, k = problem.shape
    memory, end, start = panels.buffer.local, PANEL_DATA + m * k * ITEMSIZE[problem.dtype], _scales_offset(problem)
    whole = memory[PANEL_DATA:end].view(getattr(torch, problem.dtype)).view(m, k)
    rowwise = problem.scaling == "rowwise"
    return whole, memory[start : start + 4 * m].view(torch.float32).view(m, 1) if rowwise else None


def rows_of_chunk(problem: Problem, config: Config, multiple: int) -> int:
    """Rows of one of the `chunks` of a shard, in whole multiples."""
    even = -(-rows_of(problem) // int(config["chunks"]))
    return -(-even // multiple) * multiple


def refuse_chunks(problem: Problem, config: Config, limits: Limits, multiple: int) -> str | None:
    """Return why a shard is not cut into `chunks` pieces of whole multiples of rows, or None."""
    chunks, rows = int(config["chunks"]), rows_of(problem)
    if chunks == 1:
        return None
    a_chunk = rows_of_chunk(problem, config, multiple)
    if -(-rows // a_chunk) != chunks:
        return f"{rows} rows do not fill {chunks} chunks of whole {multiple} rows"
    if limits.backend == "cuda" and a_chunk * problem.shape[2] * ITEMSIZE[problem.dtype] < _MIN_CHUNK:
        return f"chunks of {a_chunk} rows are less than {_MIN_CHUNK} bytes: announcing them costs more than it brings"
    return None


# Events: the caller's stream, then the end of each side stream.
_HERE, _SENT = 0, 1
_ASIDE = NUM_STREAMS - 1


@dataclass(frozen=True, slots=True)
class Pushes:
    """A shard on its way into all peers' panels.

    Attributes:
        copies: queues of the lane.
        sides: side streams.
        send: `(shard, its scales)`, addresses, queues everything on them.
    """

    copies: Copies
    sides: tuple[int, ...]
    send: Callable[[int, int], None]

    def begin(self, stream: int, a: int, scale_a: int) -> None:
        """Queue everything, after what is queued on `stream` now."""
        self.copies.fork(stream, self.sides, _HERE)
        self.send(a, scale_a)

    def end(self, stream: int) -> None:
        """Hold the stream back until everything is sent."""
        self.copies.join(self.sides, stream, _SENT)


def pushes_by_copies(
    problem: Problem, workspace: Workspace, panels: Panels, num_streams: int, chunk_rows: int
) -> Pushes:
    """Pushes by copy engines, chunk by chunk, to rank + 1 first; the peers share the side streams in turn."""
    copies = copies_of(workspace, problem.mode)
    sender, sides = Sender(copies, workspace.rank, panels.local), copies.streams[:num_streams]
    rows, row_bytes = rows_of(problem), problem.shape[2] * ITEMSIZE[problem.dtype]
    scales = _scales_offset(problem) if problem.scaling == "rowwise" else 0

    def send(a: int, scale_a: int) -> None:
        for turn, peer in enumerate(panels.peers[: problem.world_size - 1]):
            for chunk, start in enumerate(range(0, rows, chunk_rows)):
                count, first = min(chunk_rows, rows - start), workspace.rank * rows + start
                moves = [(PANEL_DATA + first * row_bytes, a + start * row_bytes, count * row_bytes)]
                if scales:
                    moves.append((scales + first * 4, scale_a + start * 4, count * 4))
                sender.send(sides[turn % len(sides)], peer, chunk, *moves)

    return Pushes(copies, sides, send)


def pushes_by_kernel(
    problem: Problem, workspace: Workspace, panels: Panels, kernel: BoundKernel, chunk_rows: int
) -> Pushes:
    """Pushes by `send_kernel`, bound to a few blocks."""
    copies, extents = copies_of(workspace, problem.mode), (rows_of(problem), problem.shape[2], chunk_rows)
    memory = (panels.local, panels.peers, _scales_offset(problem))
    side, launch = copies.streams[0], kernel.fix((None, None, *memory, *extents, workspace.rank))
    return Pushes(copies, (side,), lambda a, scale_a: launch(side, a, scale_a))


class Gathered:
    """Copies the gathered A from the panels to the caller's output, if the caller wants it."""

    def __init__(self, problem: Problem, workspace: Workspace, panels: Panels) -> None:
        self.wanted, self.copies = gemm_layout(problem).gathered, copies_of(workspace, problem.mode)
        self.aside = self.copies.streams[_ASIDE]
        shard = rows_of(problem) * problem.shape[2] * ITEMSIZE[problem.dtype]
        self.start, self.stop = workspace.rank * shard, (workspace.rank + 1) * shard
        self.data, self.size = panels.data, problem.world_size * shard

    def begin(self, stream: int, a: int, outputs: tuple[Any, ...]) -> None:
        """Copy the own shard, beside what follows on `stream`."""
        if self.wanted:
            self.copies.fork(stream, (self.aside,), _HERE)
            self.copies.copy(self.aside, outputs[1].data_ptr() + self.start, a, self.stop - self.start)

    def end(self, stream: int, outputs: tuple[Any, ...]) -> None:
        """Copy the other shards, after the kernels on `stream` that waited for them."""
        if self.wanted:
            for start, end in ((0, self.start), (self.stop, self.size)):
                if end > start:
                    self.copies.copy(stream, outputs[1].data_ptr() + start, self.data + start, end - start)
            self.copies.join((self.aside,), stream, _SENT + _ASIDE)


class QueueVariant(tiles.GemmVariant):
    """A persistent GEMM over the queue, after the call's begin and beside the pushes of copy engines.

    Where the space has the axis `comm_blocks`, so many blocks of the kernel push instead.
    """

    op = "ag_gemm"

    def infeasible(self, problem: Problem, config: Config, limits: Limits) -> str | None:
        return (
            tiles.refuse_gemm(problem, limits, panel_bytes=panel_bytes(problem))
            or tiles.refuse_tiles(problem, config, limits, rows=rows_of(problem), shards=problem.world_size)
            or refuse_chunks(problem, config, limits, int(config["block_m"]))
        )

    def preferred_config(self, problem: Problem, limits: Limits) -> dict[str, float]:
        senders = 1 if limits.backend == "host" else 16
        rest = {"comm_blocks": senders, "blocks_per_sm": 1, "chunks": 1, "streams": 1}
        return {**tiles.preferred_tile(problem, limits, rows=rows_of(problem)), **rest}

    def constants(self, problem: Problem, config: Config) -> dict[str, Value]:
        return {**super().constants(problem, config), "PACKED": tiles.whole_packets(problem)}

    def bind(self, problem: Problem, config: Config, workspace: Workspace) -> Launch:
        panels, senders = workspace.panels(problem.mode, panel_bytes(problem)), int(config.get("comm_blocks", 0))
        rows, (_, n, k), offset = rows_of(problem), problem.shape, _scales_offset(problem)
        chunk_rows = rows_of_chunk(problem, config, int(config["block_m"]))
        most = _queue_length(problem, config) + senders  # blocks that find something to do
        grid = min(most, 2)
        if workspace.device.type == "cuda":
            import torch

            num_sms = torch.cuda.get_device_properties(workspace.device).multi_processor_count
            grid = min(most, int(config.get("blocks_per_sm", 1)) * num_sms)
        arguments: tuple[Argument, ...] = (panels.local, panels.local + offset, rows, n, k, chunk_rows)
        if senders:
            arguments = (panels.local, panels.peers, offset, rows, n, k, chunk_rows, senders)
        waits = (workspace.rank, workspace.timeout_ns, workspace.status_argument(problem))
        kernel = bind_kernel(self.request(problem, config), grid, workspace.device)
        multiply, begin = kernel.fix((*(None,) * 5, *arguments, *waits)), bind_begin(problem, workspace, panels)
        gathered, pushes = Gathered(problem, workspace, panels), None
        if not senders:
            pushes = pushes_by_copies(problem, workspace, panels, int(config["streams"]), chunk_rows)

        def run(inputs: tuple[Any, ...], outputs: tuple[Any, ...], stream: int) -> None:
            a = inputs[0].data_ptr()
            scale_a, scale_b = (inputs[2].data_ptr(), inputs[3].data_ptr()) if problem.scaling else (0, 0)
            begin(stream)
            if pushes is not None:
                pushes.begin(stream, a, scale_a)
            gathered.begin(stream, a, outputs)
            multiply(stream, a, inputs[1].data_ptr(), outputs[0].data_ptr(), scale_a, scale_b)
            gathered.end(stream, outputs)
            if pushes is not None:
                pushes.end(stream)

        return run


def _queue_length(problem: Problem, config: Config) -> int:
    """Tiles of all shards."""
    return problem.world_size * tiles.num_tiles(rows_of(problem), problem, config)


class CopyEnginePersistent(QueueVariant, registered=True):
    name = "copy_engine_persistent"
    summary = "copy engines push shards and their flags; one persistent GEMM takes tiles in the order of arrival"
    kernels = (begin_panels_kernel, queue_kernel)
    space = tiles.tile_space(blocks_per_sm=Choice(1, 2), chunks=Choice(1, 2, 4), streams=Choice(1, 2, 3))

    def infeasible(self, problem: Problem, config: Config, limits: Limits) -> str | None:
        if reason := super().infeasible(problem, config, limits) or refuse_streams(problem, config["streams"]):
            return reason
        if config["blocks_per_sm"] == 1:
            return None
        if limits.backend == "host" or _queue_length(problem, config) <= limits.num_sms:
            return "there is no tile for a second block on an SM"
        return None if tiles.two_fit(problem, config) else "two blocks with such tiles do not fit on an SM"


class SmPersistent(QueueVariant, registered=True):
    name = "sm_persistent"
    summary = "one persistent GEMM, of which some blocks push the shards first"
    kernels = (begin_panels_kernel, sending_kernel)
    space = tiles.tile_space(comm_blocks=Choice(1, 2, 4, 8, 16, 32), chunks=Choice(1, 2, 4))

    def infeasible(self, problem: Problem, config: Config, limits: Limits) -> str | None:
        if reason := super().infeasible(problem, config, limits):
            return reason
        senders = int(config["comm_blocks"])
        if limits.backend == "host":
            return None if senders == 1 else "interpreted blocks run one after another: only comm_blocks=1"
        if senders == 1:
            return "one block cannot keep a link busy"
        if senders > limits.num_sms // 2:
            return f"{senders} of {limits.num_sms} SMs leave too few for the products"
        shard = rows_of(problem) * problem.shape[2] * ITEMSIZE[problem.dtype]
        if senders > 2 and shard < senders * MIN_SENT_BYTES:
            return f"{shard} bytes are too few for {senders} blocks to send"
        return None
