"""The fused GEMMs by the library's GEMM (cuBLAS), a part of the rows at a time, beside what moves the other parts.

Parts are multiplied one after the other. With two `gemm_streams` every other GEMM goes to a stream of its own, so that
a part's first tiles take the SMs that the last tiles of the one before leave. GEMMs of the library wait for nothing, so
whatever SMs a kernel beside them wants become free. A call's begin, an exchange of flags after which peers may write
each other's panels, is on a side stream: the first GEMM reaches no panels of peers and need not wait for anybody.

**ag_gemm chunked.** Side streams push this rank's shard into the peers' panels: copy engines, chunk by chunk (see
`ag.pushes_by_copies`), or a kernel of a few blocks (see `ag.send_shard`). Meanwhile the own shard is multiplied, then
each chunk of the shards of rank − 1, rank − 2, …; before each product a kernel of one block waits for its flag.

**gemm_rs chunked.** Shards are multiplied in the order rank + 1, rank + 2, …, the own one last, each in `chunks` parts.
A part for another rank goes into this rank's own panels, behind its slots. A side stream waits for it and pushes it
into this rank's slot at the owner: by a copy engine, followed by a copy of the call's number into the owner's flag
(`transport` copy_engine, which takes no SM), or by a small kernel that raises the flag itself (sm). The own parts go
into the own slot. When the caller's stream has joined the side streams, and with them all SMs that the pushes want are
theirs, one kernel waits for the peers' flags and sums the slots.

**gemm_ar chunked.** Products go into the result. A side stream waits for each part and reduces it in place by one of
this library's all_reduce kernels, on a few SMs. All that uses the lane is on that one side stream, in the same order on
every rank.

**gemm_ar copy_engine.** Each part is cut into one share for every rank. On the caller's stream:

    GEMM 0, GEMM 1, sum 0, GEMM 2, sum 1, …, the last GEMM, the last sum but one, all_reduce of the last part

As soon as part c is there, copy engines push its shares into their owners' slots in the panels, each followed by the
call's number as a flag, during GEMM c + 1. Sum c waits for the flags and adds the slots and the own share in rank
order. During GEMM c + 2 the sums go round (`gather`): copy engines push them into the peers' panels, again with flags,
and a side stream that waits for those copies them into the result; or sum c leaves them in the own panels and announces
them, and the peers' copy engines pull them, which is one copy less on a slower way. Nothing hides what the last part
costs, so it is reduced by this library's all_reduce kernel, which has all SMs then. With two `gemm_streams` sums go to
a stream of a higher priority.

No rank waits in a circle: pushes wait for the begin and for GEMMs, sums for pushes, gathers for sums. Each is queued
after the work that it waits for, so streams may share a hardware queue. Gathers overwrite rows that peers were to sum
only after their sum, which is after the push that reads them. Panels are written again only after a begin, when all
ranks have joined the streams that read them; where peers pull, a call ends with a begin, too.

Numerics: library (the products, whose order over the depth is cuBLAS's choice; sums over ranks are ordered and made
once). Graph-safe: side streams fork from the caller's and join it; flags hold call numbers.
Source: asynchronous tensor parallelism in PyTorch, cut by chunk, with flags and sums of our own; two-shot all_reduce
over decomposed GEMMs, our own arrangement.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

import triton
import triton.language as tl

from tunedcomm.kernels.all_reduce.bias import with_bias
from tunedcomm.kernels.common.copies import NUM_STREAMS, copies_of
from tunedcomm.kernels.common.feasibility import Launch, grid_rounds, refuse_streams
from tunedcomm.kernels.common.launch import CompileRequest, bind_kernel
from tunedcomm.kernels.common.packets import PACKET_BYTES, sum_packets, write_elements
from tunedcomm.kernels.common.panels import (
    DATA,
    Sender,
    announce,
    announce_to,
    await_chunk,
    await_chunk_of_all,
    begin_panels_kernel,
    begin_request,
    bind_begin,
    call_number,
    is_last,
)
from tunedcomm.kernels.common.sync import load_packets, store_packets
from tunedcomm.kernels.common.variant import VariantBase
from tunedcomm.kernels.gemm import ag, library
from tunedcomm.kernels.gemm.op import Operands, gemm_layout, operands_of, out_itemsize, product, ready_to_cut, rows_of
from tunedcomm.kernels.gemm.rs import slot_bytes
from tunedcomm.kernels.gemm.tiles import refuse_gemm, whole_packets
from tunedcomm.space import Choice, Config, Space, Value
from tunedcomm.spec import ITEMSIZE, Limits, Problem
from tunedcomm.symm.layout import PANEL_DATA, LaneLayout, Room

if TYPE_CHECKING:
    import torch

    from tunedcomm.symm.workspace import Workspace

_TILE = 128  # rows of the library's tiles
_MULTIPLE = 16  # of rows in a chunk of a shard
_WARPS = 16  # of kernels that send or sum
# Events behind `ag.Pushes`' and `ag.Gathered`'s: the caller's stream, the begin, a part's product (of every other
# one beside), the end of those, a sum, all peers' sums; then the ends of the side streams.
_START, _BEGUN, _MADE, _MADE_BESIDE, _BESIDE, _SUMMED, _READY, _DONE = range(NUM_STREAMS + 1, NUM_STREAMS + 9)


@triton.jit
def await_kernel(panels, source, chunk, timeout_ns, status):
    """One block: wait for chunk `chunk` of rank `source`."""
    await_chunk(panels, source, chunk, call_number(panels), timeout_ns, status)


@triton.jit
def push_chunk_kernel(source, target, packets, panels, owner, rank, chunk, counter, BLOCK: tl.constexpr):
    """Copy `packets` packets from address `source` to `target`, in the panels at `owner`; raise the chunk's flag there.

    Waits for nothing.
    """
    offsets = tl.arange(0, BLOCK).to(tl.int64)
    stride = tl.num_programs(0).to(tl.int64) * BLOCK
    # 1. Store the packets in the owner's panels.
    for start in tl.range(tl.program_id(0).to(tl.int64) * BLOCK, packets, stride):
        packet = start + offsets
        mask = packet < packets
        w0, w1, w2, w3 = load_packets(source + packet * 16, mask)
        store_packets(target + packet * 16, w0, w1, w2, w3, mask)
    # 2. The last block to have stored its part raises the flag there.
    if is_last(panels, counter, tl.num_programs(0)):
        announce_to(owner, rank, chunk, call_number(panels))


@triton.jit
def sum_slots_kernel(
    out, numel, panels, slot_bytes, span, rank, timeout_ns, status,
    WORLD_SIZE: tl.constexpr, DTYPE: tl.constexpr, WIDTH: tl.constexpr, AVG: tl.constexpr, TAIL: tl.constexpr,
    CHUNKS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Sum what lies in the slots of the own panels, in rank order, chunks of `span` packets; the own slot is full.

    Example:
        2 ranks, 8 fp32 results a rank (2 packets), 1 chunk. Rank 0 waits for rank 1's flag of chunk 0. Then it adds
        packet p of slot 0, its own product, and packet p of slot 1, which rank 1 has pushed, for p = 0 and 1.
    """
    epoch = call_number(panels)
    offsets = tl.arange(0, BLOCK).to(tl.int64)
    stride = tl.num_programs(0).to(tl.int64) * BLOCK
    total = slot_bytes // 16
    for chunk in tl.static_range(CHUNKS):
        # 1. Wait until every peer has pushed the chunk.
        await_chunk_of_all(panels, chunk, rank, epoch, timeout_ns, status, WORLD_SIZE)
        end = tl.minimum(total, (chunk + 1) * span)
        # 2. Sum the chunk in rank order.
        for start in tl.range(chunk * span + tl.program_id(0).to(tl.int64) * BLOCK, end, stride):
            packet = start + offsets
            mask = packet < end
            words = ()
            for i in tl.static_range(WORLD_SIZE):
                words = words + load_packets(panels + DATA + i * slot_bytes + packet * 16, mask)
            s0, s1, s2, s3 = sum_packets(words, DTYPE, AVG, WORLD_SIZE)
            write_elements(out, packet, numel, s0, s1, s2, s3, mask, WIDTH, TAIL)


@triton.jit
def sum_share_kernel(
    own_share, bias, row, first, slots, slot_bytes, sums, packets, panels, panel_peers, rank, part, ready,
    timeout_ns, status,
    WORLD_SIZE: tl.constexpr, DTYPE: tl.constexpr, BIAS: tl.constexpr, PULLED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Sum one share of `packets` packets, at address `own_share` and in the slots, into `own_share`.

    If PULLED, the sums go to `sums`, too.
    A row of the result has `row` packets, `first` is the share's first packet in it; the slots are announced as chunk
    `part`, and sums that peers will pull as chunk `ready`.

    Example:
        2 ranks, a part of 8 fp32 results (2 packets), so a share of 1 packet. Rank 0's product of packet 0 lies at
        `own_share`, rank 1's in slot 1 of rank 0's panels. Rank 0 adds them in that order and stores the sum at
        `own_share`.
    """
    epoch = call_number(panels)
    # 1. Wait until every peer has pushed its share of the part.
    await_chunk_of_all(panels, part, rank, epoch, timeout_ns, status, WORLD_SIZE)
    offsets = tl.arange(0, BLOCK).to(tl.int64)
    stride = tl.num_programs(0).to(tl.int64) * BLOCK
    # 2. Sum in rank order, add the bias, store.
    for start in tl.range(tl.program_id(0).to(tl.int64) * BLOCK, packets, stride):
        packet = start + offsets
        mask = packet < packets
        words = ()
        for i in tl.static_range(WORLD_SIZE):
            source = tl.where(rank == i, own_share, slots + i * slot_bytes)
            words = words + load_packets(source + packet * 16, mask)
        s = sum_packets(words, DTYPE, False, WORLD_SIZE)
        if BIAS:
            s = with_bias(s, bias, first + packet, row, mask, DTYPE)
        store_packets(own_share + packet * 16, s[0], s[1], s[2], s[3], mask)
        if PULLED:
            store_packets(sums + packet * 16, s[0], s[1], s[2], s[3], mask)
    # 3. The last block tells the peers that they may pull the sums.
    if PULLED:
        last = is_last(panels, part, tl.num_programs(0))
        if last:
            announce(panel_peers, rank, ready, epoch, WORLD_SIZE)


@triton.jit
def await_all_kernel(panels, chunk, rank, timeout_ns, status, WORLD_SIZE: tl.constexpr):
    """One block: wait for chunk `chunk` of every peer."""
    await_chunk_of_all(panels, chunk, rank, call_number(panels), timeout_ns, status, WORLD_SIZE)


class _Products:
    """The products of a call's parts, in turn on the caller's stream and, with two `gemm_streams`, on one beside it."""

    def __init__(self, problem: Problem, config: Config, workspace: Workspace) -> None:
        self.problem, self.copies = problem, copies_of(workspace, problem.mode)
        self.two = config["gemm_streams"] == 2

    def wait(self, event: int) -> None:
        """Hold back the stream beside."""
        if self.two:
            self.copies.wait(self.copies.beside, event)

    def stream_of(self, index: int, stream: int) -> int:
        """The stream of a product, if `stream` is the caller's."""
        return self.copies.beside if self.two and index % 2 else stream

    def multiply(self, index: int, stream: int, operands: Operands, out: torch.Tensor) -> int:
        """Queue product `index`; return its stream."""
        queue = self.stream_of(index, stream)
        with self.copies.current(queue) if queue != stream else contextlib.nullcontext():
            product(self.problem, operands, out)
        return queue

    def make(self, index: int, stream: int, operands: Operands, out: torch.Tensor, row: int, rows: int) -> int:
        """Queue the product of some rows; return the event that stands for it until the next one on its stream."""
        end, event = row + rows, _MADE_BESIDE if self.two and index % 2 else _MADE
        self.copies.record(event, self.multiply(index, stream, operands.of_rows(self.problem, row, end), out[row:end]))
        return event

    def join(self, stream: int) -> None:
        """Hold back the caller's stream until all products are made."""
        if self.two:
            self.copies.join((self.copies.beside,), stream, _BESIDE)

    def begin(self, stream: int, side: int, begin: Callable[[int], None]) -> None:
        """The call's begin, on a side stream."""
        self.copies.fork(stream, (side,), _START)
        begin(side)
        self.copies.record(_BEGUN, side)


_AWAIT_REQUEST = CompileRequest.of(await_kernel, {}, num_warps=1)


class ChunkedGather(VariantBase, registered=True):
    op = "ag_gemm"
    name = "chunked"
    numerics = "library"
    summary = "cuBLAS once a chunk, as the chunks come; copy engines or a few blocks push them"
    kernels = (begin_panels_kernel, await_kernel, ag.send_kernel)
    space = Space(
        {
            "transport": Choice("copy_engine", "sm"),
            "chunks": Choice(1, 2),
            "gemm_streams": Choice(1, 2),
            "streams": Choice(1, 2, 3),
            "comm_blocks": Choice(1, 8, 16, 32),
        }
    )

    def infeasible(self, problem: Problem, config: Config, limits: Limits) -> str | None:
        senders, by_copies = int(config["comm_blocks"]), config["transport"] == "copy_engine"
        if reason := (
            # The kernel that sends wants rows as descriptors do.
            refuse_gemm(problem, limits, panel_bytes=ag.panel_bytes(problem), descriptors=not by_copies)
            or library.refuse_scaled(problem, limits)
            or refuse_streams(problem, config["streams"])
        ):
            return reason
        if by_copies and senders != 1:
            return "copy engines take no blocks: only comm_blocks=1"
        if not by_copies and int(config["streams"]) != 1:
            return "one kernel sends everything: only streams=1"
        shard = rows_of(problem) * problem.shape[2] * ITEMSIZE[problem.dtype]
        if limits.backend == "host" and senders > 1:
            return "interpreted blocks run one after another: more than 1 only cost time"
        if not by_copies and limits.backend == "cuda" and (senders == 1 or shard < senders * ag.MIN_SENT_BYTES):
            return f"{shard} bytes are not the right work for {senders} blocks that send"
        return ag.refuse_chunks(problem, config, limits, _MULTIPLE)

    def lane_room(self, problem: Problem, config: Config, layout: LaneLayout) -> Room:
        return Room()  # its data is in panels

    def preferred_config(self, problem: Problem, limits: Limits) -> dict[str, Any]:
        streams = 1 if limits.backend == "host" else 2
        return {"transport": "copy_engine", "chunks": 1, "streams": 1, "comm_blocks": 1, "gemm_streams": streams}

    def _send_request(self, problem: Problem) -> CompileRequest:
        constants: dict[str, Value] = {"DTYPE": problem.dtype, "SCALING": problem.scaling}
        return CompileRequest.of(ag.send_kernel, {**constants, "WORLD_SIZE": problem.world_size}, num_warps=_WARPS)

    def compile_requests(self, problem: Problem, config: Config) -> Iterable[CompileRequest]:
        found = (begin_request(problem.world_size), _AWAIT_REQUEST)
        return found if config["transport"] == "copy_engine" else (*found, self._send_request(problem))

    def bind(self, problem: Problem, config: Config, workspace: Workspace) -> Launch:
        rows, world_size, rank = rows_of(problem), problem.world_size, workspace.rank
        panels = workspace.panels(problem.mode, ag.panel_bytes(problem))
        span = ag.rows_of_chunk(problem, config, _MULTIPLE)
        if config["transport"] == "copy_engine":
            pushes = ag.pushes_by_copies(problem, workspace, panels, int(config["streams"]), span)
        else:
            kernel = bind_kernel(self._send_request(problem), int(config["comm_blocks"]), workspace.device)
            pushes = ag.pushes_by_kernel(problem, workspace, panels, kernel, span)
        begin, copied = bind_begin(problem, workspace, panels), ag.Gathered(problem, workspace, panels)
        copies, products = copies_of(workspace, problem.mode), _Products(problem, config, workspace)
        everything, scales = ag.gathered_in(panels, problem)
        own_rows = slice(rank * rows, (rank + 1) * rows)
        waiter = bind_kernel(_AWAIT_REQUEST, 1, workspace.device)
        waits = (workspace.timeout_ns, workspace.status_argument(problem))
        chunks = []  # (wait, first row and end in the gathered A), in the order of arrival
        for source in ((rank - turn) % world_size for turn in range(1, world_size)):
            for chunk, start in enumerate(range(0, rows, span)):
                first, end = source * rows + start, source * rows + min(start + span, rows)
                chunks.append((waiter.fix((panels.local, source, chunk, *waits)), first, end))

        def run(inputs: tuple[Any, ...], outputs: tuple[Any, ...], stream: int) -> None:
            """See the module's text."""
            operands, out, side = ready_to_cut(problem, operands_of(problem, inputs)), outputs[0], copies.streams[0]
            gathered = operands._replace(a=everything, scale_a=operands.scale_a if scales is None else scales)
            a = operands.a.data_ptr()
            products.begin(stream, side, begin)
            pushes.begin(side, a, operands.scale_a.data_ptr() if problem.scaling else 0)
            copied.begin(stream, a, outputs)
            products.multiply(0, stream, operands, out[own_rows])
            copies.wait(stream, _BEGUN)
            products.wait(_BEGUN)
            for index, (wait, first, end) in enumerate(chunks, 1):
                wait(products.stream_of(index, stream))
                products.multiply(index, stream, gathered.of_rows(problem, first, end), out[first:end])
            products.join(stream)
            copied.end(stream, outputs)
            pushes.end(stream)

        return run


_PUSH_REQUEST = CompileRequest.of(push_chunk_kernel, {"BLOCK": 32 * _WARPS}, num_warps=_WARPS)


class ChunkedScatter(VariantBase, registered=True):
    op = "gemm_rs"
    name = "chunked"
    numerics = "library"
    summary = "cuBLAS shard by shard, each pushed to its owner during the next; then one sum"
    kernels = (begin_panels_kernel, push_chunk_kernel, sum_slots_kernel)
    space = Space(
        {
            "chunks": Choice(1, 2, 4),
            "transport": Choice("copy_engine", "sm"),
            "gemm_streams": Choice(1, 2),
            "num_streams": Choice(1, 2, 3),
            "push_blocks": Choice(1, 4, 8, 16, 32),
            "num_blocks": Choice(1, 32, 64, 132, 264, 396, 528),
            "num_warps": Choice(4, 8, 16),
        }
    )

    def _span(self, problem: Problem, config: Config) -> int:
        """Rows of a part."""
        return -(-rows_of(problem) // int(config["chunks"]))

    def _room(self, problem: Problem) -> int:
        return 2 * problem.world_size * slot_bytes(problem)

    def infeasible(self, problem: Problem, config: Config, limits: Limits) -> str | None:
        if reason := refuse_gemm(problem, limits, panel_bytes=self._room(problem), descriptors=False):
            return reason
        chunks, blocks, span = int(config["chunks"]), int(config["push_blocks"]), self._span(problem, config)
        if chunks > 1 and not whole_packets(problem):
            return f"rows of {problem.shape[1]} results are not whole packets, so parts would share some: only chunks=1"
        if -(-rows_of(problem) // span) != chunks:
            return f"{rows_of(problem)} rows do not make {chunks} parts"
        if chunks > 1 and limits.backend == "cuda" and span < _TILE:
            return f"{span} rows a part are less than the library's tiles have"
        if config["transport"] == "copy_engine" and blocks > 1:
            return "copy engines have no blocks: only push_blocks=1"
        if config["transport"] == "sm" and blocks == 1 and limits.backend == "cuda":
            return "one block does not fill a link"
        return refuse_streams(problem, config["num_streams"]) or self._unsuited_sum(problem, config, limits)

    def _unsuited_sum(self, problem: Problem, config: Config, limits: Limits) -> str | None:
        """Return why the grid of the sum does not suit the problem, or None."""
        blocks, threads = int(config["num_blocks"]), 32 * int(config["num_warps"])
        packets = slot_bytes(problem) // PACKET_BYTES
        if limits.backend == "host":
            single = blocks == 1 and threads <= 128
            return None if single else "interpreted blocks run one after another: only one of 4 warps"
        if blocks * threads > limits.num_sms * 2048:
            return f"{blocks} blocks of {threads} threads do not all fit on {limits.num_sms} SMs at once"
        if (blocks - 1) * threads >= packets and blocks > 1:
            return f"{packets} packets leave some of {blocks} blocks without work"
        if blocks == 1 and packets > 8 * threads:
            return f"one block takes long for {packets} packets"
        return None

    def lane_room(self, problem: Problem, config: Config, layout: LaneLayout) -> Room:
        return Room()  # its data is in panels

    def preferred_config(self, problem: Problem, limits: Limits) -> dict[str, Any]:
        preferred: dict[str, Any] = {"chunks": 1, "transport": "copy_engine", "gemm_streams": 1, "push_blocks": 1}
        preferred |= {"num_streams": min(problem.world_size - 1, 2), "num_warps": 8}
        return {**preferred, "num_blocks": min(slot_bytes(problem) / 4096, limits.num_sms)}

    def num_rounds(self, problem: Problem, config: Config) -> int:
        return grid_rounds(slot_bytes(problem) // PACKET_BYTES, config)

    def _sum_request(self, problem: Problem, config: Config) -> CompileRequest:
        constants: dict[str, Value] = {
            "WORLD_SIZE": problem.world_size,
            "DTYPE": gemm_layout(problem).dtype,
            "WIDTH": out_itemsize(problem),
            "AVG": problem.reduction == "avg",
            "TAIL": rows_of(problem) * problem.shape[1] * out_itemsize(problem) % PACKET_BYTES != 0,
            "CHUNKS": int(config["chunks"]),
            "BLOCK": 32 * int(config["num_warps"]),
        }
        return CompileRequest.of(sum_slots_kernel, constants, num_warps=int(config["num_warps"]))

    def compile_requests(self, problem: Problem, config: Config) -> Iterable[CompileRequest]:
        found = (begin_request(problem.world_size), self._sum_request(problem, config))
        return (*found, _PUSH_REQUEST) if config["transport"] == "sm" else found

    def bind(self, problem: Problem, config: Config, workspace: Workspace) -> Launch:
        import torch

        panels, products = workspace.panels(problem.mode, self._room(problem)), _Products(problem, config, workspace)
        copies, rank, rows, n = products.copies, workspace.rank, rows_of(problem), problem.shape[1]
        sides, sender = copies.streams[: int(config["num_streams"])], Sender(copies, rank, panels.local)
        slot, chunks, row_bytes = slot_bytes(problem), int(config["chunks"]), n * out_itemsize(problem)
        span, dtype = self._span(problem, config), getattr(torch, gemm_layout(problem).dtype)
        pusher = None
        if config["transport"] == "sm":
            pusher = bind_kernel(_PUSH_REQUEST, int(config["push_blocks"]), workspace.device)

        def push(turn: int, chunk: int, source: int, offset: int, nbytes: int) -> Callable[[int], None]:
            owner, place = panels.peers[turn], PANEL_DATA + rank * slot + offset
            if pusher is None:
                return lambda stream: sender.send(stream, owner, chunk, (place, source, nbytes))
            packets, counter = -(-nbytes // PACKET_BYTES), turn * chunks + chunk
            return pusher.fix((source, owner + place, packets, panels.local, owner, rank, chunk, counter))

        parts = []  # (first row of A, where its product goes, side stream, push or None for own parts), in order
        for turn in range(problem.world_size):
            owner, is_own = (rank + 1 + turn) % problem.world_size, turn == problem.world_size - 1
            base = PANEL_DATA + (rank if is_own else problem.world_size + turn) * slot
            for chunk, first in enumerate(range(0, rows, span)):
                count, offset = min(span, rows - first), first * row_bytes
                start, nbytes = base + offset, count * row_bytes
                target = panels.buffer.local[start : start + nbytes].view(dtype).view(count, n)
                queue = None if is_own else push(turn, chunk, panels.local + start, offset, nbytes)
                parts.append((owner * rows + first, target, sides[turn % len(sides)], queue))
        summer = bind_kernel(self._sum_request(problem, config), int(config["num_blocks"]), workspace.device)
        waits = (rank, workspace.timeout_ns, workspace.status_argument(problem))
        a_chunk = (span * row_bytes if chunks > 1 else slot) // PACKET_BYTES
        total = summer.fix((None, rows * n, panels.local, slot, a_chunk, *waits))
        begin = bind_begin(problem, workspace, panels)

        def run(inputs: tuple[Any, ...], outputs: tuple[Any, ...], stream: int) -> None:
            """See the module's text."""
            operands = ready_to_cut(problem, operands_of(problem, inputs))
            products.begin(stream, sides[0], begin)
            for side in sides[1:]:
                copies.wait(side, _BEGUN)
            products.wait(_START)
            for index, (row, target, side, queue) in enumerate(parts):
                cut = operands.of_rows(problem, row, row + target.shape[0])
                made = products.multiply(index, stream, cut, target)
                if queue is not None:
                    copies.fork(made, (side,), _MADE)
                    queue(side)
            products.join(stream)
            copies.join(sides, stream, _DONE)
            total(stream, outputs[0].data_ptr())

        return run


def _parts_of(problem: Problem, config: Config) -> list[tuple[int, int]]:
    """First row and number of rows of each of `chunks` parts, of whole tiles if they are many.

    With `taper` the last one is cut in two. No rows are one part without any.
    """
    m = problem.shape[0]
    a_part = max(1, _whole_tiles(-(-m // int(config["chunks"]))))
    parts = [(row, min(a_part, m - row)) for row in range(0, max(1, m), a_part)]
    if config.get("taper", False):
        row, rows = parts.pop()
        first = min(_whole_tiles(-(-rows // 2)), rows)
        parts += [(row, first), *([(row + first, rows - first)] if first < rows else [])]
    return parts


def _whole_tiles(rows: int) -> int:
    """Rounded up to tiles, if it is more than one."""
    tile = _TILE if rows > _TILE else 1
    return -(-rows // tile) * tile


def _refuse_parts(problem: Problem, config: Config) -> str | None:
    """Return why the result is not cut into such parts, or None."""
    row_bytes, parts = problem.shape[1] * out_itemsize(problem), _parts_of(problem, config)
    if len(parts) != int(config["chunks"]) + bool(config.get("taper", False)):
        return f"{problem.shape[0]} rows make {len(parts)} parts, not {config['chunks']}"
    if any(row * row_bytes % PACKET_BYTES for row, _ in parts):
        return "parts would not begin with whole packets"
    return None


class ChunkedReduce(VariantBase, registered=True):
    op = "gemm_ar"
    name = "chunked"
    numerics = "library"
    summary = "cuBLAS part by part; each part is reduced by kernels on few SMs beside the next one's GEMM"
    kernels = library.REDUCE_KERNELS
    space = Space(
        {
            "chunks": Choice(2, 4, 8),
            "algorithm": Choice("two_shot", "two_shot_lamport"),
            "num_blocks": Choice(1, 2, 8, 16, 32, 64),
            "num_warps": Choice(8, 16),
            "num_chunks": Choice(1, 2, 4),
        }
    )

    def infeasible(self, problem: Problem, config: Config, limits: Limits) -> str | None:
        if reason := refuse_gemm(problem, limits, descriptors=False):
            return reason
        if reason := _refuse_parts(problem, config):
            return reason
        parts = _parts_of(problem, config)
        if limits.backend == "cuda" and parts[0][1] < _TILE:
            return f"{parts[0][1]} rows a part are less than the library's tiles have"
        for rows in {rows for _, rows in parts}:
            if reason := library.refuse_reduction(problem, config, limits, rows):
                return f"parts of {rows} rows: {reason}"
        return None

    def lane_room(self, problem: Problem, config: Config, layout: LaneLayout) -> Room:
        sizes = {rows for _, rows in _parts_of(problem, config)}
        rooms = [library.reduction_of(problem, config, rows).lane_room(layout) for rows in sizes]
        return functools.reduce(Room.__or__, rooms)

    def preferred_config(self, problem: Problem, limits: Limits) -> dict[str, Any]:
        preferred: dict[str, Any] = {"algorithm": "two_shot", "num_warps": 16, "num_chunks": 1}
        if limits.backend == "host":
            return {**preferred, "num_blocks": 2, "chunks": 2}
        return {**preferred, "num_blocks": 16, "chunks": min(max(problem.shape[0] // 512, 2), 8)}

    def num_blocks(self, problem: Problem, config: Config) -> int:
        return int(config["num_blocks"])

    def compile_requests(self, problem: Problem, config: Config) -> Iterable[CompileRequest]:
        sizes = {rows for _, rows in _parts_of(problem, config)}
        requests = (library.reduction_of(problem, config, rows).compile_requests() for rows in sizes)
        return tuple(dict.fromkeys(itertools.chain.from_iterable(requests)))

    def bind(self, problem: Problem, config: Config, workspace: Workspace) -> Launch:
        parts, copies = _parts_of(problem, config), copies_of(workspace, problem.mode)
        sizes = sorted({rows for _, rows in parts})
        reductions = {rows: library.bind_reduction(problem, config, workspace, rows) for rows in sizes}
        fused, sides = library.adds_bias(problem, str(config["algorithm"])), copies.streams[:1]

        def run(inputs: tuple[Any, ...], outputs: tuple[Any, ...], stream: int) -> None:
            """See the module's text."""
            operands, out = ready_to_cut(problem, operands_of(problem, inputs)), outputs[0]
            for row, rows in parts:
                part = out[row : row + rows]
                product(problem, operands.of_rows(problem, row, row + rows), part)
                copies.fork(stream, sides, _MADE)
                reductions[rows](sides[0], part.data_ptr(), operands.bias.data_ptr() if fused else 0)
            copies.join(sides, stream, _DONE)
            if operands.bias is not None and not fused:
                out.add_(operands.bias)

        return run


class _Part(NamedTuple):
    """A part but the last of gemm_ar copy_engine; offsets are of the result, or of a rank's panels.

    Attributes:
        row, rows, own_start: first row and number of rows of the result; offset of the own share.
        shares: side stream, peer, chunk, offset in its panels, offset and bytes of the share, of each peer.
        sums: the same of the own sum, if it is pushed.
        fetched: side stream, offset, address and bytes of each peer's sum.
        total: `(stream, own share, bias)` to the sum.
        ready: `(stream)` waits until all peers' sums are announced.
    """

    row: int
    rows: int
    own_start: int
    shares: list[tuple[int, int, int, int, int, int]]
    sums: list[tuple[int, int, int, int, int, int]]
    fetched: list[tuple[int, int, int, int]]
    total: Callable[..., None]
    ready: Callable[..., None]


def _slot_bytes(problem: Problem, rows: int) -> int:
    """Bytes of a rank's share of `rows` rows; the last rank's share may have fewer."""
    packets = rows * problem.shape[1] * out_itemsize(problem) // PACKET_BYTES
    return -(-packets // problem.world_size) * PACKET_BYTES


class CopyEngine(VariantBase, registered=True):
    op = "gemm_ar"
    name = "copy_engine"
    numerics = "library"
    summary = "cuBLAS part by part; copy engines move shares and sums beside the next parts' GEMMs"
    kernels = (begin_panels_kernel, sum_share_kernel, await_all_kernel, *library.REDUCE_KERNELS)
    space = Space(
        {
            "chunks": Choice(2, 3, 4, 6, 8),
            "taper": Choice(False, True),
            "gather": Choice("push", "pull"),
            "gemm_streams": Choice(1, 2),
            "num_streams": Choice(1, 2, 3),
            "num_blocks": Choice(1, 66, 132, 264),
        }
    )

    def room(self, problem: Problem, config: Config) -> int:
        """Bytes of panels: of each part but the last a slot of every rank, and the sums, the own ones or all."""
        slots = problem.world_size + (1 if config["gather"] == "pull" else problem.world_size)
        return sum(slots * _slot_bytes(problem, rows) for _, rows in _parts_of(problem, config)[:-1])

    def infeasible(self, problem: Problem, config: Config, limits: Limits) -> str | None:
        if reason := refuse_gemm(problem, limits, panel_bytes=self.room(problem, config), descriptors=False):
            return reason
        if reason := _refuse_parts(problem, config):
            return reason
        if gemm_layout(problem).bias and not whole_packets(problem):
            return f"rows of {problem.shape[1]} results are not whole packets, as sums with a bias want"
        if reason := refuse_streams(problem, config["num_streams"]):
            return reason
        parts, blocks, host = _parts_of(problem, config), int(config["num_blocks"]), limits.backend == "host"
        tail = parts[-1][1]
        if reason := library.refuse_reduction(problem, library.usual_reduction(problem, tail, host=host), limits, tail):
            return f"the last {tail} rows: {reason}"
        if host:
            return "interpreted blocks run one after another: only num_blocks=1" if blocks > 1 else None
        if (least := min(rows for _, rows in parts)) < _TILE:
            return f"{least} rows a part are less than the library's tiles have"
        if blocks == 1 or blocks > 2 * limits.num_sms:
            return f"{blocks} blocks do not suit {limits.num_sms} SMs"
        return None

    def lane_room(self, problem: Problem, config: Config, layout: LaneLayout) -> Room:
        tail = _parts_of(problem, config)[-1][1]
        return library.reduction_of(problem, library.usual_reduction(problem, tail), tail).lane_room(layout)

    def preferred_config(self, problem: Problem, limits: Limits) -> dict[str, Any]:
        preferred: dict[str, Any] = {"taper": False, "gather": "push", "num_streams": 1}
        if limits.backend == "host":
            return {**preferred, "chunks": 2, "gemm_streams": 1, "num_blocks": 1}
        chunks = min(max(problem.shape[0] // 1024, 2), 8)
        return {**preferred, "chunks": chunks, "gemm_streams": 2, "num_blocks": limits.num_sms}

    def sum_request(self, problem: Problem, config: Config) -> CompileRequest:
        wanted = gemm_layout(problem)
        constants: dict[str, Value] = {
            "WORLD_SIZE": problem.world_size,
            "DTYPE": wanted.dtype,
            "BIAS": wanted.bias,
            "PULLED": config["gather"] == "pull",
            "BLOCK": 32 * _WARPS,
        }
        return CompileRequest.of(sum_share_kernel, constants, num_warps=_WARPS)

    def ready_request(self, problem: Problem) -> CompileRequest:
        return CompileRequest.of(await_all_kernel, {"WORLD_SIZE": problem.world_size}, num_warps=1)

    def compile_requests(self, problem: Problem, config: Config) -> Iterable[CompileRequest]:
        tail = _parts_of(problem, config)[-1][1]
        kernels = (begin_request(problem.world_size), self.sum_request(problem, config), self.ready_request(problem))
        reduction = library.reduction_of(problem, library.usual_reduction(problem, tail), tail)
        return (*kernels, *reduction.compile_requests())

    def _bind_parts(
        self, problem: Problem, config: Config, workspace: Workspace, pushing: tuple[int, ...],
        gathering: tuple[int, ...], aside: int,
    ) -> Iterable[_Part]:  # fmt: skip
        """All parts but the last; the side streams push shares, move sums, and wait for the peers' sums."""
        panels = workspace.panels(problem.mode, self.room(problem, config))
        rank, world_size, pulled = workspace.rank, problem.world_size, config["gather"] == "pull"
        row_bytes, parts = problem.shape[1] * out_itemsize(problem), _parts_of(problem, config)[:-1]
        waits = (workspace.timeout_ns, workspace.status_argument(problem))
        total = bind_kernel(self.sum_request(problem, config), int(config["num_blocks"]), workspace.device)
        ready = bind_kernel(self.ready_request(problem), 1, workspace.device)
        slots, fetching = PANEL_DATA, gathering if pulled else (aside,)
        for chunk, (row, rows) in enumerate(parts):
            slot, begin, end = _slot_bytes(problem, rows), row * row_bytes, (row + rows) * row_bytes
            starts = [min(begin + owner * slot, end) for owner in range(world_size + 1)]
            sizes = [stop - start for start, stop in itertools.pairwise(starts)]
            own_start, sums, gathered = starts[rank], slots + world_size * slot, len(parts) + chunk
            shares, pushed, fetched = [], [], []
            for turn, peer in enumerate(panels.peers[: world_size - 1]):
                owner = (rank + 1 + turn) % world_size
                start, nbytes, side = starts[owner], sizes[owner], gathering[turn % len(gathering)]
                shares.append((pushing[turn % len(pushing)], peer, chunk, slots + rank * slot, start, nbytes))
                source = peer + sums if pulled else panels.local + sums + owner * slot
                fetched.append((fetching[turn % len(fetching)], start, source, nbytes))
                if not pulled:
                    pushed.append((side, peer, gathered, sums + rank * slot, own_start, sizes[rank]))
            row_and_first = (row_bytes // PACKET_BYTES, own_start // PACKET_BYTES)
            places = (*row_and_first, panels.local + slots, slot, panels.local + sums)
            memory = (*places, sizes[rank] // PACKET_BYTES, panels.local, panels.peers, rank, chunk, gathered)
            launches = total.fix((None, None, *memory, *waits)), ready.fix((panels.local, gathered, rank, *waits))
            yield _Part(row, rows, own_start, shares, pushed, fetched, *launches)
            slots = sums + (1 if pulled else world_size) * slot

    def bind(self, problem: Problem, config: Config, workspace: Workspace) -> Launch:
        panels = workspace.panels(problem.mode, self.room(problem, config))
        products = _Products(problem, config, workspace)
        copies, count, pulled = products.copies, int(config["num_streams"]), config["gather"] == "pull"
        sender, begin = Sender(copies, workspace.rank, panels.local), bind_begin(problem, workspace, panels)
        pushing, gathering = copies.streams[:count], copies.streams[count : 2 * count]
        aside, *sums_beside = copies.streams[2 * count : 2 * count + 1 + products.two]
        parts = list(self._bind_parts(problem, config, workspace, pushing, gathering, aside))
        last_row, rows = _parts_of(problem, config)[-1]
        reducing = library.usual_reduction(problem, rows, host=workspace.device.type == "cpu")
        fused = library.adds_bias(problem, str(reducing["algorithm"]))
        reduce_tail = library.bind_reduction(problem, reducing, workspace, rows)

        def send(moves: list[tuple[int, int, int, int, int, int]], target: int) -> None:
            for side, peer, chunk, place, start, nbytes in moves:
                sender.send(side, peer, chunk, (place, target + start, nbytes))

        def finish(part: _Part, target: int, bias: int, summing: int) -> None:
            """Queue the sum of the own share after the products made so far, then the moves of all sums."""
            if products.two:
                copies.wait(summing, _MADE)
                copies.wait(summing, _MADE_BESIDE)
            part.total(summing, target + part.own_start, bias)
            copies.fork(summing, (*gathering, aside), _SUMMED)
            send(part.sums, target)
            part.ready(aside)
            if pulled:
                copies.fork(aside, gathering, _READY)
            for side, start, source, nbytes in part.fetched:
                if nbytes:
                    copies.copy(side, target + start, source, nbytes)

        def run(inputs: tuple[Any, ...], outputs: tuple[Any, ...], stream: int) -> None:
            """See the module's text."""
            operands, out = ready_to_cut(problem, operands_of(problem, inputs)), outputs[0]
            target, summing = out.data_ptr(), sums_beside[0] if products.two else stream
            bias = 0 if operands.bias is None else operands.bias.data_ptr()
            products.begin(stream, pushing[0], begin)
            products.wait(_START)
            if products.two:
                copies.wait(summing, _BEGUN)
            for index, part in enumerate(parts):
                made = products.make(index, stream, operands, out, part.row, part.rows)
                for side in pushing:
                    copies.wait(side, _BEGUN)
                    copies.wait(side, made)
                send(part.shares, target)
                if index:
                    finish(parts[index - 1], target, bias, summing)
                else:
                    copies.wait(stream, _BEGUN)
            made = products.make(len(parts), stream, operands, out, last_row, rows)
            finish(parts[-1], target, bias, summing)
            copies.wait(stream, made)
            tail = out[last_row:]
            reduce_tail(stream, tail.data_ptr(), bias if fused else 0)
            if operands.bias is not None and not fused:
                tail.add_(operands.bias)
            copies.join((*pushing, *gathering, aside, *sums_beside), stream, _DONE)
            products.join(stream)
            if pulled:  # the peers may still be at it
                begin(stream)

        return run
