"""copy_engine: the copy engines push chunks to their owners' scatter areas, kernels on a few SMs sum what came.

Chunks are cut into pieces; the scatter area holds `RING` = 4 pieces of every rank. Piece c goes out on side streams, to
rank + 1 first. Kernel c, on the caller's stream, comes after this rank's piece c is out and kernel c − 1 has ended: its
first block raises the flags of its row on all peers to c + 1, all its blocks wait until the peers have raised theirs in
that row, and sum piece c.

So the flag c + 1 of a rank says that its piece c is there and that it has read piece c − 1. Piece c + 3 is pushed
after kernel c has ended, into the place of piece c − 1. Pieces 0 to 2 are pushed at once, for peers may write the
scatter area from the start of a call; pieces c + 1 and c + 2 are on their way while piece c is summed.

The end: a kernel of one block raises the flags to `num_chunks` + 1 and waits for those of the peers, who have read all
of their scatter areas then. It adds as many to the epoch; the flags are the only ones of the call.

No rank waits in a circle, in whatever order a GPU runs what it may: copies wait for no flag, and kernel c waits for the
start of the peers' kernels c, which depend on copies and on kernels before c alone.

Numerics: ordered. Graph-safe: side streams fork from the caller's and join it.
Source: copy-engine collectives of PyTorch's asynchronous tensor parallelism, with flags of our own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import triton
import triton.language as tl

from tunedcomm.kernels.common.copies import NUM_STREAMS, Copies, copies_of
from tunedcomm.kernels.common.feasibility import Launch, blocks_and_threads, closest, kernel_blocks
from tunedcomm.kernels.common.lane import (
    EPOCH_OFFSET,
    arrive,
    arrive_at,
    await_at,
    await_peers,
    read_counter,
    write_counter,
)
from tunedcomm.kernels.common.launch import AddressLaunch, CompileRequest, bind_kernel
from tunedcomm.kernels.common.packets import PACKET_BYTES, num_packets
from tunedcomm.kernels.reduce_scatter._common import chunk_packets, constants_of, refuse
from tunedcomm.kernels.reduce_scatter._pieces import sum_piece
from tunedcomm.space import Choice, Config, PowerOfTwo, Space, Value
from tunedcomm.spec import Limits, Problem, Variant, register_variant

if TYPE_CHECKING:
    from tunedcomm.symm.workspace import Workspace

__all__ = ["COPY_ENGINE", "end_kernel", "sum_kernel"]

RING = 4
_AHEAD = RING - 1  # pieces that are out before the first is summed
_MOST_CHUNKS = 32  # of the axis: stands for as many as the area asks for
_LEAST_CHUNK = 512 * 1024  # on GPUs: smaller copies cost more to launch than to send
# Events: the caller's stream, then one a side stream for each piece that is on its way.
_HERE, _PUSHED = 0, 1


@triton.jit
def sum_kernel(
    x, out, numel, local, q0, q1, q2, q3, q4, q5, q6, rank, timeout_ns, status, scatter, span, ring, piece,
    WORLD_SIZE: tl.constexpr, DTYPE: tl.constexpr, WIDTH: tl.constexpr, AVG: tl.constexpr, ALIGN: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Kernel `piece` of the module's text; a piece has `span` packets."""
    epoch = read_counter(local, EPOCH_OFFSET)
    row = tl.program_id(0) * 0
    if tl.program_id(0) == 0:
        arrive_at(row, q0, q1, q2, q3, q4, q5, q6, rank, epoch + piece + 1, WORLD_SIZE)
    await_at(local, row, rank, epoch + piece + 1, timeout_ns, status, WORLD_SIZE)
    nbytes = numel.to(tl.int64) * WIDTH
    start = piece.to(tl.int64) * span
    end = tl.minimum(num_packets(numel, WIDTH), start + span)
    place = local + scatter + (piece % ring) * span * 16 - start * 16
    first = start + tl.program_id(0).to(tl.int64) * BLOCK
    step = tl.num_programs(0).to(tl.int64) * BLOCK
    sum_piece(
        x, out, numel, place, ring * span * 16, first, end, step, nbytes, rank,
        WORLD_SIZE, DTYPE, WIDTH, AVG, ALIGN, BLOCK,
    )  # fmt: skip


@triton.jit
def end_kernel(local, q0, q1, q2, q3, q4, q5, q6, rank, timeout_ns, status, num_chunks, WORLD_SIZE: tl.constexpr):
    """One block: nobody reads any more."""
    epoch = read_counter(local, EPOCH_OFFSET)
    arrive(local, q0, q1, q2, q3, q4, q5, q6, rank, epoch + num_chunks + 1, WORLD_SIZE)
    await_peers(local, rank, epoch + num_chunks + 1, timeout_ns, status, WORLD_SIZE)
    write_counter(local, epoch + num_chunks + 1, EPOCH_OFFSET)


@dataclass(frozen=True, slots=True)
class _Job:
    """What a launch needs besides the tensors' addresses.

    Attributes:
        sums: launches kernel c, `(stream, input, output)`, for each piece.
        end: launches the last kernel.
        num_streams: side streams.
        peers: addresses of the scatter areas of rank + 1, rank + 2, …
        piece: bytes of a piece.
        ring: how many have a place in the area.
    """

    copies: Copies
    sums: tuple[Callable[..., None], ...]
    end: Callable[..., None]
    num_streams: int
    rank: int
    nbytes: int
    peers: tuple[int, ...]
    piece: int
    ring: int

    def _event(self, c: int, number: int) -> int:
        return _PUSHED + number + c % _AHEAD * NUM_STREAMS

    def _push(self, pieces: range, x: int, stream: int) -> None:
        """Push pieces to all peers, after what is queued on `stream` now."""
        due = [c for c in pieces if c < len(self.sums)]
        sides = self.copies.streams[: self.num_streams] if due else ()
        if due:
            self.copies.record(_HERE, stream)
        for side in sides:
            self.copies.wait(side, _HERE)
        for c in due:
            start = c * self.piece
            size = min(self.piece, self.nbytes - start)
            place = (self.rank * self.ring + c % self.ring) * self.piece
            for step, peer in enumerate(self.peers):
                owner = (self.rank + 1 + step) % (len(self.peers) + 1)
                side = sides[step % self.num_streams]
                self.copies.copy(side, peer + place, x + owner * self.nbytes + start, size)
            for number, side in enumerate(sides):
                self.copies.record(self._event(c, number), side)

    def run(self, stream: int, x: int, out: int) -> None:
        """See the module's text."""
        self._push(range(_AHEAD), x, stream)
        for c, launch in enumerate(self.sums):
            for number in range(self.num_streams):
                self.copies.wait(stream, self._event(c, number))
            launch(stream, x, out)
            self._push(range(c + _AHEAD, c + _AHEAD + 1), x, stream)
        self.end(stream)


_SPACE = Space(
    {
        "num_blocks": Choice(1, 8, 16, 32, 64),
        "num_warps": Choice(16),
        "num_streams": Choice(1, 2, 3),
        "num_chunks": PowerOfTwo(1, _MOST_CHUNKS),
    }
)


def _cut(problem: Problem, config: Config, staging_bytes: int) -> tuple[int, int, int]:
    """Packets of a piece, number of pieces, and of the ring."""
    packets, chunks = chunk_packets(problem), int(config["num_chunks"])
    span = -(-packets // chunks)
    if chunks == _MOST_CHUNKS:
        span = max(min(span, staging_bytes // (problem.world_size * RING * PACKET_BYTES)), 1)
    num_chunks = -(-packets // span)
    return span, num_chunks, min(num_chunks, RING)


def _infeasible(problem: Problem, config: Config, limits: Limits) -> str | None:
    if reason := refuse(problem, limits):
        return reason
    if int(config["num_streams"]) > problem.world_size - 1:
        return f"{config['num_streams']} streams, but only {problem.world_size - 1} peers to copy to"
    span, num_chunks, ring = _cut(problem, config, limits.staging_bytes)
    least = _LEAST_CHUNK if limits.backend == "cuda" else PACKET_BYTES
    if (int(config["num_chunks"]) > 1 or limits.backend == "cuda") and problem.nbytes < least * num_chunks:
        return f"{problem.nbytes} bytes are too few for {num_chunks} pieces of {least} bytes or more"
    needed = problem.world_size * ring * span * PACKET_BYTES
    if needed > limits.staging_bytes:
        return (
            f"{ring} of the {num_chunks} pieces of {problem.nbytes} bytes need {needed} bytes of staging; "
            f"there are {limits.staging_bytes} (TUNEDCOMM_WORKSPACE_MIB)"
        )
    return blocks_and_threads(config, limits, span, most_rounds=1 << 16)


def _default(problem: Problem, limits: Limits) -> dict[str, Value]:
    wish: dict[str, float]
    if limits.backend == "host":
        wish = {"num_blocks": 1, "num_warps": 16, "num_streams": 1, "num_chunks": 8}
    else:
        chunks = min(max(problem.nbytes >> 21, 1), _MOST_CHUNKS)
        wish = {"num_blocks": 32, "num_warps": 16, "num_streams": 1, "num_chunks": chunks}
    return closest(wish, _SPACE, problem, limits, _infeasible)


def _requests_of(problem: Problem, config: Config) -> tuple[CompileRequest, CompileRequest]:
    sums = CompileRequest.of(sum_kernel, constants_of(problem, config), num_warps=int(config["num_warps"]))
    return sums, CompileRequest.of(end_kernel, {"WORLD_SIZE": problem.world_size}, num_warps=1)


def _requests(problem: Problem, config: Config) -> Iterable[Any]:
    return _requests_of(problem, config)


def _bind(problem: Problem, config: Config, workspace: Workspace) -> Launch:
    lane, scatter = workspace.lanes[problem.mode], workspace.layout.scatter
    sum_request, end_request = _requests_of(problem, config)
    span, num_chunks, ring = _cut(problem, config, workspace.layout.staging_bytes)
    known = (lane.local, *lane.peers, workspace.rank, workspace.timeout_ns, workspace.status_argument(problem))
    kernel = bind_kernel(sum_request, int(config["num_blocks"]), workspace.device)
    head = (None, None, problem.numel, *known, scatter, span, ring)
    job = _Job(
        copies=copies_of(workspace, problem.mode),
        sums=tuple(kernel.fix((*head, c)) for c in range(num_chunks)),
        end=bind_kernel(end_request, 1, workspace.device).fix((*known, num_chunks)),
        num_streams=int(config["num_streams"]),
        rank=workspace.rank,
        nbytes=problem.nbytes,
        peers=tuple(address + scatter for address in lane.peers[: problem.world_size - 1]),
        piece=span * PACKET_BYTES,
        ring=ring,
    )
    return AddressLaunch(job.run)


COPY_ENGINE = register_variant(
    Variant(
        op="reduce_scatter",
        name="copy_engine",
        numerics="ordered",
        summary="copy engines push chunks to their owners piece by piece; few SMs sum what came",
        space=_SPACE,
        infeasible=_infeasible,
        default=_default,
        bind=_bind,
        num_blocks=kernel_blocks,
        kernels=(sum_kernel, end_kernel),
        compile_requests=_requests,
    )
)
