"""copy_engine: the copy engines push chunks to their owners' scatter areas, kernels on a few SMs sum what came.

Chunks are cut into pieces; the scatter area holds `RING` = 4 pieces of every rank. Piece c goes out on side streams, to
rank + 1 first. Kernel c, on the caller's stream, comes after this rank's piece c is out and kernel c − 1 has ended: its
first block raises the flags of its row on all peers to c + 1, all its blocks wait until the peers have raised theirs in
that row, and sum piece c.

So the flag c + 1 of a rank says that its piece c is there and that it has read piece c − 1. Piece c + 3 is pushed
after kernel c has ended, into the place of piece c − 1. Pieces 0 to 2 are pushed at once, for peers may write the
scatter area from the start of a call; pieces c + 1 and c + 2 are on their way while piece c is summed.

The end: a kernel of one block raises the flags to `num_chunks` + 1 and waits for the peers' flags, who have read all
of their scatter areas then. It adds as many to the epoch; the flags are the only ones of the call.

No rank waits in a circle, whatever the order in which a GPU runs kernels and copies: copies wait for no flag, and
kernel c waits for the start of the peers' kernels c, which depend on copies and on kernels before c alone.

Numerics: ordered. Graph-safe: side streams fork from the caller's and join it.
Source: copy-engine collectives of PyTorch's asynchronous tensor parallelism, with flags of our own.
"""

from __future__ import annotations

from collections.abc import Iterable

import triton
import triton.language as tl

from tunedcomm.kernels.common.copies import ChunkSender, copies_of
from tunedcomm.kernels.common.feasibility import (
    MAX_NUM_CHUNKS,
    RING,
    Launch,
    blocks_and_threads,
    cut_to_fit,
    refuse_staging,
    refuse_streams,
)
from tunedcomm.kernels.common.lane import EPOCH_OFFSET, arrive_at, await_at, exchange_flags, read_counter, write_counter
from tunedcomm.kernels.common.launch import AddressLaunch, CompileRequest, bind_kernel
from tunedcomm.kernels.common.packets import PACKET_BYTES, num_packets, packets_of
from tunedcomm.kernels.common.variant import Workspace, lane_arguments
from tunedcomm.kernels.reduce_scatter.op import ReduceScatterVariant
from tunedcomm.kernels.reduce_scatter.push import sum_piece
from tunedcomm.space import Choice, Config, PowerOfTwo, Space
from tunedcomm.spec import Limits, Problem
from tunedcomm.symm.layout import LaneLayout, Room

_AHEAD = RING - 1  # pieces that are out before the first is summed
_MIN_CHUNK = 512 * 1024  # on GPUs: smaller copies cost more to launch than to send


@triton.jit
def sum_kernel(
    x, out, numel, local, peers, rank, timeout_ns, status, scatter, span, ring, piece,
    WORLD_SIZE: tl.constexpr, DTYPE: tl.constexpr, WIDTH: tl.constexpr, AVG: tl.constexpr, ALIGN: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Kernel `piece` of the module's text; a piece has `span` packets.

    Example:
        2 ranks, 8 fp32 elements each: chunk j is packet j, 1 piece. A copy engine has put packet 1 of rank 0 into slot
        0 of rank 1's scatter area and packet 0 of rank 1 into slot 1 of rank 0's. Rank 0 adds its own packet 0 and
        slot 1 and writes the sum to its output.
    """
    epoch = read_counter(local, EPOCH_OFFSET)
    row = tl.program_id(0) * 0
    # 1. One block tells the peers that this rank's piece is there; all blocks wait for the peers' pieces.
    if tl.program_id(0) == 0:
        arrive_at(row, peers, rank, epoch + piece + 1, WORLD_SIZE)
    await_at(local, row, rank, epoch + piece + 1, timeout_ns, status, WORLD_SIZE)
    nbytes = numel.to(tl.int64) * WIDTH
    start = piece.to(tl.int64) * span
    end = tl.minimum(num_packets(numel, WIDTH), start + span)
    place = local + scatter + (piece % ring) * span * 16 - start * 16
    first = start + tl.program_id(0).to(tl.int64) * BLOCK
    stride = tl.num_programs(0).to(tl.int64) * BLOCK
    # 2. Sum the piece in rank order.
    sum_piece(
        x, out, numel, place, ring * span * 16, first, end, stride, nbytes, rank,
        WORLD_SIZE, DTYPE, WIDTH, AVG, ALIGN, BLOCK,
    )  # fmt: skip


@triton.jit
def end_kernel(local, peers, rank, timeout_ns, status, num_chunks, WORLD_SIZE: tl.constexpr):
    """One block: wait until no peer reads its scatter area any more."""
    epoch = read_counter(local, EPOCH_OFFSET)
    exchange_flags(local, peers, rank, epoch + num_chunks + 1, timeout_ns, status, WORLD_SIZE)
    write_counter(local, epoch + num_chunks + 1, EPOCH_OFFSET)


class CopyEngine(ReduceScatterVariant, registered=True):
    name = "copy_engine"
    summary = "copy engines push chunks to their owners piece by piece; few SMs sum what came"
    kernels = (sum_kernel, end_kernel)
    space = Space(
        {
            "num_blocks": Choice(1, 8, 16, 32, 64),
            "num_warps": Choice(16),
            "num_streams": Choice(1, 2, 3),
            "num_chunks": PowerOfTwo(1, MAX_NUM_CHUNKS),
        }
    )

    def cut(self, problem: Problem, config: Config, staging_bytes: int) -> tuple[int, int]:
        """Packets of a piece, and number of pieces."""
        packets, chunks = packets_of(problem.nbytes), int(config["num_chunks"])
        return cut_to_fit(
            packets, chunks, unit_bytes=PACKET_BYTES, slots=problem.world_size, staging_bytes=staging_bytes
        )

    def infeasible(self, problem: Problem, config: Config, limits: Limits) -> str | None:
        if reason := self.refuse(problem, limits) or refuse_streams(problem, config["num_streams"]):
            return reason
        span, num_chunks = self.cut(problem, config, limits.staging_bytes)
        least = _MIN_CHUNK if limits.backend == "cuda" else PACKET_BYTES
        if (int(config["num_chunks"]) > 1 or limits.backend == "cuda") and problem.nbytes < least * num_chunks:
            return f"{problem.nbytes} bytes are too few for {num_chunks} pieces of {least} bytes or more"
        return refuse_staging(
            problem, limits, chunk_bytes=span * PACKET_BYTES, num_chunks=num_chunks, slots=problem.world_size
        ) or blocks_and_threads(config, limits, span, max_rounds=1 << 16)

    def lane_room(self, problem: Problem, config: Config, layout: LaneLayout) -> Room:
        span, num_chunks = self.cut(problem, config, layout.staging_bytes)
        return Room(scatter=problem.world_size * min(num_chunks, RING) * span * PACKET_BYTES)

    def preferred_config(self, problem: Problem, limits: Limits) -> dict[str, float]:
        if limits.backend == "host":
            return {"num_blocks": 1, "num_warps": 16, "num_streams": 1, "num_chunks": 8}
        chunks = min(max(problem.nbytes >> 21, 1), MAX_NUM_CHUNKS)
        return {"num_blocks": 32, "num_warps": 16, "num_streams": 1, "num_chunks": chunks}

    def num_rounds(self, problem: Problem, config: Config) -> int:
        return 0

    def compile_requests(self, problem: Problem, config: Config) -> Iterable[CompileRequest]:
        end = CompileRequest.of(end_kernel, {"WORLD_SIZE": problem.world_size}, num_warps=1)
        return self.request(problem, config), end

    def bind(self, problem: Problem, config: Config, workspace: Workspace) -> Launch:
        lane, scatter = workspace.lanes[problem.mode], workspace.layout.scatter
        sum_request, end_request = self.compile_requests(problem, config)
        span, num_chunks = self.cut(problem, config, workspace.layout.staging_bytes)
        ring = min(num_chunks, RING)
        known = lane_arguments(problem, workspace)
        kernel = bind_kernel(sum_request, int(config["num_blocks"]), workspace.device)
        head = (*self.first_arguments(problem), *known, scatter, span, ring)
        slot = scatter + workspace.rank * ring * span * PACKET_BYTES
        sender = ChunkSender(
            copies=copies_of(workspace, problem.mode),
            num_streams=int(config["num_streams"]),
            rank=workspace.rank,
            nbytes=problem.nbytes,
            stride=problem.nbytes,
            targets=tuple(address + slot for address in lane.peers[: problem.world_size - 1]),
            chunk=span * PACKET_BYTES,
            num_chunks=num_chunks,
        )
        sums = [kernel.fix((*head, c)) for c in range(num_chunks)]
        end = bind_kernel(end_request, 1, workspace.device).fix((*known, num_chunks))

        def push(pieces: range, x: int, stream: int) -> None:
            """Push pieces to all peers, after what is queued on `stream` now."""
            if pieces:
                sender.fork(stream, sender.sides)
            for c in pieces:
                sender.send(c, x)

        def run(stream: int, x: int, out: int) -> None:
            """Push and sum all pieces; the module's text says why in this order."""
            push(range(min(_AHEAD, num_chunks)), x, stream)
            for c, launch in enumerate(sums):
                sender.await_sent(c, stream)
                launch(stream, x, out)
                push(range(c + _AHEAD, min(c + _AHEAD + 1, num_chunks)), x, stream)
            end(stream)

        return AddressLaunch(run)
