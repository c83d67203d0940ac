"""copy_engine of all_gather and all_to_all: copy engines move everything, kernels of one block exchange flags; no SMs.

Push: chunk c goes from the input to a place in the peers' gather areas, which hold `RING` = 4 chunks of each rank, and
from there to the output. Flag kernel t comes after this rank's push of chunk t − 1 and its copy of chunk t − 3 to the
output. After it chunk t − 1 of all peers is there, and is copied to the output. Chunk t + 1 is pushed after it, into
the place of chunk t − 3, which all peers have copied by then; chunks 0 and 1 are pushed after flag kernel 0, which says
that the areas are free: each rank launches it after its call before. So chunk t is on its way while flags t travel.

Pull: plain input is copied to the own scatter area, which this rank may write as soon as its call before has ended:
then every peer has raised a flag after its last read of it. Flags; everybody copies everybody's input to its output;
flags, after which nobody reads that area any more. Symmetric input is read where it lies, with the same flags.

A copy is over, its bytes in the peer's memory, before what waits for it starts: flag kernels release no more than that.

Numerics: ordered (nothing is computed). Graph-safe: side streams fork from the caller's and join it.
Source: copy-engine collectives of PyTorch's asynchronous tensor parallelism, with flags of our own.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from tunedcomm.kernels.all_gather.op import AllGatherVariant
from tunedcomm.kernels.common.copies import FREE_EVENT, NUM_STREAMS, ChunkSender, copies_of
from tunedcomm.kernels.common.feasibility import (
    MAX_NUM_CHUNKS,
    RING,
    Launch,
    cut_to_fit,
    refuse_message,
    refuse_staging,
    refuse_streams,
)
from tunedcomm.kernels.common.lane import EPOCH_OFFSET, exchange_flags, read_counter, write_counter
from tunedcomm.kernels.common.launch import AddressLaunch, CompileRequest, bind_kernel
from tunedcomm.kernels.common.packets import PACKET_BYTES, packets_of
from tunedcomm.kernels.common.variant import Workspace, lane_arguments
from tunedcomm.space import Choice, Config, PowerOfTwo, Space
from tunedcomm.spec import Limits, Problem
from tunedcomm.symm.layout import LaneLayout, Room

_MIN_CHUNK = 128 * 1024  # on GPUs: smaller copies cost more to launch than to send
_TAKEN = FREE_EVENT  # and the next: of copies to the output, in turn


@triton.jit
def flags_kernel(local, peers, rank, timeout_ns, status, WORLD_SIZE: tl.constexpr):
    """One block: exchange flags with all peers."""
    epoch = read_counter(local, EPOCH_OFFSET)
    exchange_flags(local, peers, rank, epoch + 1, timeout_ns, status, WORLD_SIZE)
    write_counter(local, epoch + 1, EPOCH_OFFSET)


class CopyEngine(AllGatherVariant, registered=True):
    name = "copy_engine"
    summary = "the copy engines move everything, between exchanges of flags; takes no SMs"
    kernels = (flags_kernel,)
    space = Space(
        {
            "direction": Choice("push", "pull"),
            "num_streams": Choice(1, 2, 3, 7),
            "num_chunks": PowerOfTwo(1, MAX_NUM_CHUNKS),
        }
    )
    least_for_streams = _MIN_CHUNK  # bytes that last until a second stream has begun
    first_streams = 1  # to try first
    per_peer = False  # each peer gets a chunk of its own

    def cut(self, problem: Problem, config: Config, staging_bytes: int) -> tuple[int, int]:
        """Bytes of a chunk, and number of chunks."""
        packets, slots = packets_of(problem.nbytes), problem.world_size - 1
        span, num_chunks = cut_to_fit(
            packets, int(config["num_chunks"]), unit_bytes=PACKET_BYTES, slots=slots, staging_bytes=staging_bytes
        )
        return span * PACKET_BYTES, num_chunks

    def infeasible(self, problem: Problem, config: Config, limits: Limits) -> str | None:
        streams, chunks, on_gpu = int(config["num_streams"]), int(config["num_chunks"]), limits.backend == "cuda"
        if reason := self.refuse(problem, limits) or refuse_streams(problem, streams):
            return reason
        if streams > 1 and problem.nbytes < self.least_for_streams and on_gpu:
            return f"copies of {problem.nbytes} bytes are over before a second stream has begun"
        if config["direction"] == "pull":
            if chunks != 1:
                return "pulls are not cut: only num_chunks=1"
            if problem.input_kind == "symmetric":
                return None
            if self.per_peer:
                return "only symmetric inputs are pulled"
            return refuse_message(problem.nbytes, limits.staging_bytes)
        least = _MIN_CHUNK if on_gpu else PACKET_BYTES
        if chunks > 1 and problem.nbytes < least * chunks:
            return f"{problem.nbytes} bytes are too few for {chunks} chunks of {least} bytes or more"
        chunk, num_chunks = self.cut(problem, config, limits.staging_bytes)
        slots = problem.world_size - 1
        return refuse_staging(problem, limits, chunk_bytes=chunk, num_chunks=num_chunks, slots=slots)

    def lane_room(self, problem: Problem, config: Config, layout: LaneLayout) -> Room:
        if config["direction"] == "pull":
            return Room() if problem.input_kind == "symmetric" else Room(scatter=problem.nbytes)
        chunk, num_chunks = self.cut(problem, config, layout.staging_bytes)
        return Room(gather=(problem.world_size - 1) * min(num_chunks, RING) * chunk)

    def preferred_config(self, problem: Problem, limits: Limits) -> dict[str, Any]:
        if problem.input_kind == "symmetric":
            return {"direction": "pull", "num_streams": self.first_streams, "num_chunks": 1}
        chunks = 1 if problem.nbytes < 4 << 20 else 8 if problem.nbytes < 64 << 20 else MAX_NUM_CHUNKS
        return {"direction": "push", "num_streams": self.first_streams, "num_chunks": chunks}

    def request(self, problem: Problem, config: Config) -> CompileRequest:
        return CompileRequest.of(flags_kernel, {"WORLD_SIZE": problem.world_size}, num_warps=1)

    def bind(self, problem: Problem, config: Config, workspace: Workspace) -> Launch:
        """Pulls use the scatter area, pushes the gather area: slot i of a rank's area belongs to rank + 1 + i."""
        lane, layout, pulls = workspace.lanes[problem.mode], workspace.layout, config["direction"] == "pull"
        kernel = bind_kernel(self.request(problem, config), 1, workspace.device)
        area = layout.scatter if pulls else layout.gather
        chunk, num_chunks = self.cut(problem, config, layout.staging_bytes)
        slot = 0 if pulls else min(num_chunks, RING) * chunk
        slots = reversed(range(problem.world_size - 1))
        copies, rank, nbytes = copies_of(workspace, problem.mode), workspace.rank, problem.nbytes
        sender = ChunkSender(
            copies=copies,
            num_streams=int(config["num_streams"]),
            rank=rank,
            nbytes=nbytes,
            stride=nbytes if self.per_peer else 0,
            targets=tuple(peer + area + index * slot for index, peer in zip(slots, lane.peers, strict=False)),
            chunk=chunk,
            num_chunks=num_chunks,
        )
        flags = kernel.fix(lane_arguments(problem, workspace))
        own_area, stride, peers = lane.local + area, sender.stride, range(problem.world_size - 1)
        aside = copies.streams[NUM_STREAMS - 1]  # carries what does not cross the links

        def copy_own(stream: int, x: int, out: int) -> None:
            sender.fork(stream, (aside,))
            copies.copy(aside, out + rank * nbytes, x + rank * stride, nbytes)

        def take(c: int, out: int) -> None:
            """Copy chunk `c` of all peers to the output; slot i of the area belongs to rank + 1 + i."""
            start, size = sender.extent(c)
            for turn in peers:
                source = own_area + turn * slot + sender.place(c)
                copies.copy(aside, out + sender.rank_at(turn) * nbytes + start, source, size)
            copies.record(_TAKEN + c % 2, aside)

        def push(stream: int, x: int, out: int) -> None:
            """Push to `out`; the module's text says why in this order."""
            copy_own(stream, x, out)
            for t in range(num_chunks + 1):
                if t >= 1:
                    sender.await_sent(t - 1, stream)
                if t >= 3:
                    copies.wait(stream, _TAKEN + (t - 3) % 2)
                flags(stream)
                due = range(0 if t == 0 else t + 1, min(t + 2, num_chunks))
                sender.fork(stream, (*(sender.sides if due else ()), *((aside,) if t >= 1 else ())))
                for c in due:
                    sender.send(c, x)
                if t >= 1:
                    take(t - 1, out)
            copies.wait(stream, _TAKEN + (num_chunks - 1) % 2)

        def pull(stream: int, x: int, out: int, *sources: int) -> None:
            """Pull to `out`: from the peers' addresses of a symmetric input, else from their areas."""
            copy_own(stream, x, out)
            copies.record(_TAKEN, aside)
            if not sources:
                copies.copy(stream, own_area, x, nbytes)
            flags(stream)
            sender.fork(stream, sender.sides)
            for turn, source in zip(peers, sources or sender.targets, strict=False):
                target = out + sender.rank_at(turn) * nbytes
                copies.copy(sender.sides[turn % len(sender.sides)], target, source + rank * stride, nbytes)
            sender.note_sent(0)
            sender.await_sent(0, stream)
            copies.wait(stream, _TAKEN)
            flags(stream)

        if not pulls or problem.input_kind != "symmetric":
            return AddressLaunch(pull if pulls else push)
        peers_of = workspace.peers_of

        def pull_symmetric(inputs: tuple[Any, ...], outputs: tuple[Any, ...], stream: int) -> None:
            x = inputs[0]
            pull(stream, x.data_ptr(), outputs[0].data_ptr(), *peers_of(x))

        return pull_symmetric


class CopyEngineOfAllToAll(CopyEngine, registered=True):
    """The variant for all_to_all: only symmetric inputs are pulled, so pulls use no area."""

    op = "all_to_all"
    least_for_streams = 0
    first_streams = 3
    per_peer = True
