"""gemm_rs, chunked: the library's GEMM once a shard (or a part of one), each part pushed to its owner when it is done.

Shards are multiplied in the order rank + 1, rank + 2, …, the own one last, each in `chunks` parts by rows, in turn on
`gemm_streams` streams: with two, a part's first tiles take the SMs that the last tiles of the one before leave. A part
for another rank goes into this rank's own panels, behind its slots. A side stream waits for it and pushes it into this
rank's slot at the owner: by a copy engine, followed by a copy of the call's number into the owner's flag (`transport`
copy_engine, which takes no SM), or by a small kernel that raises the flag itself (sm). The own parts go into the own
slot. Then one kernel waits for the peers' flags and sums the slots.

The begin of the call runs on the side stream, before the first push, while the first GEMM is under way: that one writes
to nothing that peers reach. The caller's stream joins the side stream before the sum, so all SMs that the pushes want
are theirs before a kernel spins; GEMMs of the library wait for nothing. So waits end: the peers' pushes depend on the
begin, GEMMs and pushes alone.

Numerics: library (the products, whose order over the depth is cuBLAS's choice; the sums are ordered). Graph-safe: side
streams fork from the caller's and join it; flags hold call numbers.
Source: decomposed GEMM + reduce-scatter as in PyTorch's asynchronous tensor parallelism, flags and sum of our own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import triton
import triton.language as tl

from tunedcomm.kernels.common.copies import Copies, copies_of
from tunedcomm.kernels.common.feasibility import Launch, grid_rounds
from tunedcomm.kernels.common.launch import CompileRequest, bind_kernel
from tunedcomm.kernels.common.packets import PACKET_BYTES, sum_packets, write_elements
from tunedcomm.kernels.common.sync import load_packets, store_packets
from tunedcomm.kernels.common.variant import VariantBase
from tunedcomm.kernels.gemm.op import operands_of, out_itemsize, product, ready_to_cut, rows_of, wanted_of
from tunedcomm.kernels.gemm.panels import (
    DATA,
    Sender,
    announce_to,
    await_chunk_of_all,
    begin_panels_kernel,
    begin_request,
    bind_begin,
    call_number,
    is_last,
)
from tunedcomm.kernels.gemm.rs import refuse_scatter, slot_bytes, whole_packets
from tunedcomm.space import Choice, Config, Space, Value
from tunedcomm.spec import ITEMSIZE, Limits, Problem
from tunedcomm.symm.layout import PANEL_DATA

if TYPE_CHECKING:
    import torch

    from tunedcomm.symm.workspace import Panels, Workspace

# Events: the caller's stream at the begin, a part's product, the second stream of GEMMs; side streams from _DONE on.
_HERE, _MADE, _BESIDE, _DONE = range(4)
_PUSH_WARPS = 16


@triton.jit
def push_chunk_kernel(source, target, packets, panels, owner, rank, chunk, counter, BLOCK: tl.constexpr):
    """Copy `packets` packets from address `source` to `target`, in the panels at `owner`; raise the chunk's flag there.

    Waits for nothing.
    """
    lanes = tl.arange(0, BLOCK).to(tl.int64)
    step = tl.num_programs(0).to(tl.int64) * BLOCK
    for start in tl.range(tl.program_id(0).to(tl.int64) * BLOCK, packets, step):
        packet = start + lanes
        here = packet < packets
        w0, w1, w2, w3 = load_packets(source + packet * 16, here)
        store_packets(target + packet * 16, w0, w1, w2, w3, here)
    if is_last(panels, counter, tl.num_programs(0)):
        announce_to(owner, rank, chunk, call_number(panels))


@triton.jit
def sum_slots_kernel(
    out, numel, panels, slot_bytes, span, rank, timeout_ns, status,
    WORLD_SIZE: tl.constexpr, DTYPE: tl.constexpr, WIDTH: tl.constexpr, AVG: tl.constexpr, TAIL: tl.constexpr,
    CHUNKS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Sum what lies in the slots of the own panels, in rank order, chunks of `span` packets; the own slot is full."""
    number = call_number(panels)
    lanes = tl.arange(0, BLOCK).to(tl.int64)
    step = tl.num_programs(0).to(tl.int64) * BLOCK
    total = slot_bytes // 16
    for chunk in tl.static_range(CHUNKS):
        await_chunk_of_all(panels, chunk, rank, number, timeout_ns, status, WORLD_SIZE)
        end = tl.minimum(total, (chunk + 1) * span)
        for start in tl.range(chunk * span + tl.program_id(0).to(tl.int64) * BLOCK, end, step):
            packet = start + lanes
            here = packet < end
            words = ()
            for i in tl.static_range(WORLD_SIZE):
                words = words + load_packets(panels + DATA + i * slot_bytes + packet * 16, here)
            s0, s1, s2, s3 = sum_packets(words, DTYPE, AVG, WORLD_SIZE)
            write_elements(out, packet, numel, s0, s1, s2, s3, here, WIDTH, TAIL)


_PUSH_REQUEST = CompileRequest.of(push_chunk_kernel, {"BLOCK": 32 * _PUSH_WARPS}, num_warps=_PUSH_WARPS)


class Chunked(VariantBase):
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
        if reason := refuse_scatter(problem, limits, room=self._room(problem), descriptors=False):
            return reason
        chunks, streams, span = int(config["chunks"]), int(config["num_streams"]), self._span(problem, config)
        if chunks > 1 and not whole_packets(problem):
            return f"rows of {problem.shape[1]} results are no whole packets, so parts would share some: only chunks=1"
        if -(-rows_of(problem) // span) != chunks:
            return f"{rows_of(problem)} rows do not make {chunks} parts"
        if chunks > 1 and limits.backend == "cuda" and span < 128:
            return f"{span} rows a part are less than the library's tiles have"
        if streams > problem.world_size - 1:
            return f"{streams} streams, but only {problem.world_size - 1} peers to push to"
        by_kernel = config["transport"] == "sm"
        if not by_kernel and int(config["push_blocks"]) > 1:
            return "copy engines have no blocks: only push_blocks=1"
        if by_kernel and int(config["push_blocks"]) == 1 and limits.backend == "cuda":
            return "one block does not fill a link"
        return self._unsuited_sum(problem, config, limits)

    def _unsuited_sum(self, problem: Problem, config: Config, limits: Limits) -> str | None:
        """Why the grid of the sum does not suit the problem, or None."""
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

    def wish(self, problem: Problem, limits: Limits) -> dict[str, Any]:
        wish: dict[str, Any] = {"chunks": 1, "transport": "copy_engine", "gemm_streams": 1, "push_blocks": 1}
        wish |= {"num_streams": min(problem.world_size - 1, 2), "num_warps": 8}
        return {**wish, "num_blocks": min(slot_bytes(problem) / 4096, limits.num_sms)}

    def num_rounds(self, problem: Problem, config: Config) -> int:
        return grid_rounds(slot_bytes(problem) // PACKET_BYTES, config)

    def _sum_request(self, problem: Problem, config: Config) -> CompileRequest:
        wanted = wanted_of(problem).dtype
        constants: dict[str, Value] = {
            "WORLD_SIZE": problem.world_size,
            "DTYPE": wanted,
            "WIDTH": ITEMSIZE[wanted],
            "AVG": problem.reduction == "avg",
            "TAIL": rows_of(problem) * problem.shape[1] * out_itemsize(problem) % PACKET_BYTES != 0,
            "CHUNKS": int(config["chunks"]),
            "BLOCK": 32 * int(config["num_warps"]),
        }
        return CompileRequest.of(sum_slots_kernel, constants, num_warps=int(config["num_warps"]))

    def compile_requests(self, problem: Problem, config: Config) -> Iterable[CompileRequest]:
        found = (begin_request(problem.world_size), self._sum_request(problem, config))
        return (*found, _PUSH_REQUEST) if config["transport"] == "sm" else found

    def _parts(
        self, problem: Problem, config: Config, workspace: Workspace, panels: Panels, copies: Copies
    ) -> list[tuple[int, torch.Tensor, int, Callable[[int], None] | None]]:
        """(first row of A, where its product goes, side stream, push or None for own parts) of each part, in order."""
        import torch

        (_, n, _), world_size, slot, rank = problem.shape, problem.world_size, slot_bytes(problem), workspace.rank
        rows, span, row_bytes = rows_of(problem), self._span(problem, config), n * out_itemsize(problem)
        chunks, dtype = int(config["chunks"]), getattr(torch, wanted_of(problem).dtype)
        sender, kernel, parts = Sender(copies, rank, panels.local), None, []
        if config["transport"] == "sm":
            kernel = bind_kernel(_PUSH_REQUEST, int(config["push_blocks"]), workspace.device)

        def push(step: int, chunk: int, source: int, offset: int, nbytes: int) -> Callable[[int], None]:
            owner, place = panels.peers[step], PANEL_DATA + rank * slot + offset
            if kernel is None:
                return lambda stream: sender.send(stream, owner, chunk, (place, source, nbytes))
            packets, counter = -(-nbytes // PACKET_BYTES), step * chunks + chunk
            return kernel.fix((source, owner + place, packets, panels.local, owner, rank, chunk, counter))

        for step in range(world_size):
            owner, own = (rank + 1 + step) % world_size, step == world_size - 1
            base = (rank if own else world_size + step) * slot
            for chunk in range(chunks):
                first, last = chunk * span, min((chunk + 1) * span, rows)
                at, nbytes = PANEL_DATA + base + first * row_bytes, (last - first) * row_bytes
                target = panels.buffer.local[at : at + nbytes].view(dtype).view(last - first, n)
                queue = None if own else push(step, chunk, panels.local + at, first * row_bytes, nbytes)
                parts.append((owner * rows + first, target, step % int(config["num_streams"]), queue))
        return parts

    def bind(self, problem: Problem, config: Config, workspace: Workspace) -> Launch:
        slot, rows, n = slot_bytes(problem), rows_of(problem), problem.shape[1]
        panels, copies = workspace.panels(problem.mode, self._room(problem)), copies_of(workspace, problem.mode)
        parts = self._parts(problem, config, workspace, panels, copies)
        kernel = bind_kernel(self._sum_request(problem, config), int(config["num_blocks"]), workspace.device)
        waits = (workspace.rank, workspace.timeout_ns, workspace.status_argument(problem))
        span = self._span(problem, config) * n * out_itemsize(problem) if int(config["chunks"]) > 1 else slot
        total = kernel.fix((None, rows * n, panels.local, slot, span // PACKET_BYTES, *waits))
        begin = bind_begin(problem, workspace, panels)
        sides, aside = copies.streams[: int(config["num_streams"])], copies.beside
        two_streams = config["gemm_streams"] == 2

        def run(inputs: tuple[Any, ...], outputs: tuple[Any, ...], stream: int) -> None:
            """See the module's text."""
            operands = ready_to_cut(problem, operands_of(problem, inputs))
            copies.record(_HERE, stream)
            copies.wait(sides[0], _HERE)
            begin(sides[0])
            copies.record(_DONE, sides[0])
            for side in sides[1:]:
                copies.wait(side, _DONE)
            if two_streams:
                copies.wait(aside, _HERE)
            for number, (row, target, side, queue) in enumerate(parts):
                away = two_streams and number % 2 == 1
                cut = slice(row, row + target.shape[0])
                given = operands
                if problem.scaling == "rowwise":
                    given = operands._replace(scale_a=operands.scale_a[cut])
                with copies.current(aside) if away else contextlib.nullcontext():
                    product(problem, given, target, operands.a[cut])
                if queue is not None:
                    copies.record(_MADE, aside if away else stream)
                    copies.wait(sides[side], _MADE)
                    queue(sides[side])
            if two_streams:
                copies.record(_BESIDE, aside)
                copies.wait(stream, _BESIDE)
            for number, side in enumerate(sides):
                copies.record(_DONE + number, side)
                copies.wait(stream, _DONE + number)
            total(stream, outputs[0].data_ptr())

        return run


CHUNKED = Chunked().register()
