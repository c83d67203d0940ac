"""An all_gather whose every chunk announces itself: kernels that compute may begin before all is there.

The output is symmetric memory: a rank's kernel stores chunk by chunk straight into all ranks' outputs, its own shard
first, and after each chunk raises that chunk's flag in the peers' memory. A kernel that reads the output calls
`wait_chunk` before it touches a chunk. No staging, no copy afterwards.

Flags hold the number of the gather that raised them, which only grows, so nothing is ever reset. That number lives in
device memory, so graphs can be replayed. Three kernels:

- `begin_panels_kernel`, on the caller's stream, exchanges the lane's flags and counts the gather. A rank gets there
  when all that read its output before has ended (stream order), so from then on peers may write it.
- `progress_kernel`, on a side stream or the caller's, sends. Several blocks send a chunk; each adds to a counter when
  its part is stored, and the one that finds all others done raises the flags. The counter's addition releases what the
  block stored and acquires what the others did, and the flag's store releases all of it at system scope.
- `end_kernel`, on the caller's stream once the side stream has joined it, waits for every chunk of every rank.

Flags and counters lie in an allocation of their own, a part a lane, laid out as panels that hold no data; only
`begin_panels_kernel` uses the lane, so other calls may come between beginning and end.

Numerics: nothing is computed. Graph-safe.
Source: the progress counters of asynchronous tensor parallelism in PyTorch and of fused all-gather GEMMs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import triton
import triton.language as tl

from tunedcomm.kernels.common.copies import EVENTS_OF_PROGRESS, NUM_STREAMS, copies_of
from tunedcomm.kernels.common.lane import block_range
from tunedcomm.kernels.common.launch import CompileRequest, bind_kernel
from tunedcomm.kernels.common.panels import CHUNKS, announce, announce_to, begin_request, call_number, is_last
from tunedcomm.kernels.common.sync import load_packets, store_packets, wait
from tunedcomm.spec import Mode, Problem
from tunedcomm.symm.layout import LANES, MAX_WORLD_SIZE, PANEL_DATA, rotate

if TYPE_CHECKING:  # readers of databases import kernels and shall not wait for torch
    from tunedcomm.symm.buffer import SymmetricBuffer
    from tunedcomm.symm.workspace import Workspace

MAX_CHUNKS = 64
AREA_BYTES = PANEL_DATA
_PUSHED = tl.constexpr(MAX_CHUNKS)  # the first counter of chunks in the peers' outputs, behind those in the own one
_RANKS = tl.constexpr(MAX_WORLD_SIZE)
_STREAM = NUM_STREAMS - 2
_BEGUN, _SENT = EVENTS_OF_PROGRESS
_NUM_WARPS, _ITEMS = 16, 2


@triton.jit
def wait_chunk(flags, source, chunk, timeout_ns, status):
    """Wait until chunk `chunk` of rank `source` is in this rank's output; then its bytes may be read.

    For kernels of any op, as a block: all threads come here, and all may read afterwards. Reads by TMA need a proxy
    fence in between. The wait is bounded like every other (see `common.sync`).

    Args:
        flags, timeout_ns, status: the handle's `kernel_arguments`.
        source, chunk: which chunk.
    """
    peer = tl.arange(0, _RANKS)
    none = peer.to(tl.int64) * 0
    epoch = call_number(flags)
    at = flags + (none + source * CHUNKS + chunk) * 8
    # Of a kernel that was launched with plain numbers, small ones come with 32 bits.
    wait(at, epoch + none, peer == 0, (none + source).to(tl.int32), timeout_ns.to(tl.int64), status.to(tl.int64))


@triton.jit
def progress_kernel(
    x, out, nbytes, out_peers, flags, flag_peers, rank, chunk, num_chunks,
    WORLD_SIZE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Store the own shard into the own output, then into the peers', and raise a flag after each `chunk` bytes.

    `out_peers` are the peers' outputs and `flag_peers` their flags, from rank + 1 on.
    """
    epoch = call_number(flags)
    offsets, first, stride = block_range(BLOCK)
    own_shard = rank * nbytes
    # 1. Store the own shard into the own output, unless it lies there; flag each chunk.
    for c in tl.range(0, num_chunks):
        end = tl.minimum((c + 1) * chunk, nbytes) // 16
        if x != out + own_shard:
            for start in tl.range(c * chunk // 16 + first, end, stride):
                packet = start + offsets
                mask = packet < end
                w0, w1, w2, w3 = load_packets(x + packet * 16, mask)
                store_packets(out + own_shard + packet * 16, w0, w1, w2, w3, mask)
        if is_last(flags, c, tl.num_programs(0)):
            announce_to(flags, rank, c, epoch)
    # 2. Store the own shard into every peer's output; flag each chunk there.
    for c in tl.range(0, num_chunks):
        end = tl.minimum((c + 1) * chunk, nbytes) // 16
        for start in tl.range(c * chunk // 16 + first, end, stride):
            packet = start + offsets
            mask = packet < end
            w0, w1, w2, w3 = load_packets(x + packet * 16, mask)
            for i in tl.static_range(WORLD_SIZE - 1):
                store_packets(out_peers[i] + own_shard + packet * 16, w0, w1, w2, w3, mask)
        if is_last(flags, _PUSHED + c, tl.num_programs(0)):
            announce(flag_peers, rank, c, epoch, WORLD_SIZE)


@triton.jit
def end_kernel(flags, timeout_ns, status, num_chunks, WORLD_SIZE: tl.constexpr):
    """One block: wait for every chunk of every rank."""
    peer = tl.arange(0, _RANKS)
    epoch = call_number(flags) + peer.to(tl.int64) * 0
    for c in tl.range(0, num_chunks):
        at = flags + (peer.to(tl.int64) * CHUNKS + c) * 8
        wait(at, epoch, peer < WORLD_SIZE, peer, timeout_ns, status)


def compile_requests(world_size: int) -> tuple[CompileRequest, CompileRequest, CompileRequest]:
    """The binaries of the three kernels."""
    block = 32 * _NUM_WARPS * _ITEMS
    return (
        begin_request(world_size),
        CompileRequest.of(progress_kernel, {"WORLD_SIZE": world_size, "BLOCK": block}, num_warps=_NUM_WARPS),
        CompileRequest.of(end_kernel, {"WORLD_SIZE": world_size}, num_warps=1),
    )


class Sender:
    """Gathers of one group that announce their chunks.

    Args:
        workspace: the group's.
        memory: an allocation of `AREA_BYTES` a lane on every rank, zero-filled; made by all ranks together.
    """

    def __init__(self, workspace: Workspace, memory: SymmetricBuffer) -> None:
        self.workspace = workspace
        self._memory = memory
        self._launches: dict[tuple[Mode, int], tuple[Callable[..., None], ...]] = {}

    def flags(self, mode: Mode) -> int:
        """Address of a lane's area on this rank."""
        return self._memory.addresses[self._memory.rank] + LANES.index(mode) * AREA_BYTES

    def status(self, mode: Mode) -> int:
        """The kernels' argument `status`."""
        return self.workspace.status_argument(Problem("all_gather", (0,), "uint8", 2, reduction="", mode=mode))

    def is_prepared(self, num_blocks: int) -> bool:
        """True if a capture may begin such a gather."""
        return (LANES[0], num_blocks) in self._launches

    def prepare(self, num_blocks: int) -> None:
        """Compile and load the kernels of gathers on `num_blocks` blocks for all lanes; never during a capture."""
        workspace = self.workspace
        requests = zip(compile_requests(workspace.world_size), (1, num_blocks, 1), strict=True)
        begin, send, end = (bind_kernel(request, grid, workspace.device) for request, grid in requests)
        for mode in LANES:
            lane, flags, waits = workspace.lanes[mode], self.flags(mode), (workspace.timeout_ns, self.status(mode))
            offset = LANES.index(mode) * AREA_BYTES
            others = tuple(a + offset if a else 0 for a in rotate(self._memory.addresses, workspace.rank))
            self._launches[mode, num_blocks] = (
                begin.fix((lane.local, lane.peers, workspace.rank, *waits, flags)),
                send.fix((None, None, None, None, flags, others, workspace.rank, None, None)),
                end.fix((flags, *waits, None)),
            )

    def send(
        self, mode: Mode, stream: int, extents: tuple[int, int, int], x: int, out: int, peers: tuple[int, ...],
        *, num_blocks: int, aside: bool,
    ) -> None:  # fmt: skip
        """Begin a gather.

        Args:
            mode, stream: the lane and the caller's stream; `aside`: send on a side stream.
            extents: bytes of a shard, of a chunk, and number of chunks.
            x, out, peers: addresses of the shard, the own output, and the peers' from rank + 1 on.
        """
        nbytes, chunk, num_chunks = extents
        begin, push, _ = self._launches[mode, num_blocks]
        begin(stream)
        copies = copies_of(self.workspace, mode)
        sending = copies.streams[_STREAM] if aside else stream
        if aside:
            copies.record(_BEGUN, stream)
            copies.wait(sending, _BEGUN)
        push(sending, x, out, nbytes, peers, chunk, num_chunks)
        if aside:
            copies.record(_SENT, sending)

    def end(self, mode: Mode, stream: int, num_chunks: int, *, num_blocks: int, aside: bool, begun_on: int) -> None:
        """Hold the caller's stream back until the gather has sent and received everything.

        The stream where it began is held back until all is sent: memory freed there may be the shard's.
        """
        if aside:
            copies = copies_of(self.workspace, mode)
            for held in {stream, begun_on}:
                copies.wait(held, _SENT)
        self._launches[mode, num_blocks][2](stream, num_chunks)
