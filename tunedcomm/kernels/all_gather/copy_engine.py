"""copy_engine: the copy engines move everything, ordered by kernels of one block that exchange flags; takes no SMs.

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

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import triton
import triton.language as tl

from tunedcomm.kernels.all_gather._common import refuse
from tunedcomm.kernels.common.copies import NUM_STREAMS, Copies, copies_of
from tunedcomm.kernels.common.feasibility import Launch, closest
from tunedcomm.kernels.common.lane import EPOCH_OFFSET, arrive, await_peers, read_counter, write_counter
from tunedcomm.kernels.common.launch import AddressLaunch, CompileRequest, bind_kernel
from tunedcomm.kernels.common.packets import PACKET_BYTES, packets_of
from tunedcomm.space import Choice, Config, PowerOfTwo, Space, Value
from tunedcomm.spec import Limits, Problem, Variant, register_variant

if TYPE_CHECKING:
    from tunedcomm.symm.workspace import Workspace

__all__ = [
    "COPY_ENGINE",
    "LEAST_CHUNK",
    "MOST_CHUNKS",
    "RING",
    "CopyJob",
    "cut",
    "flags_kernel",
    "flags_request",
    "make_job",
    "refuse_pushes",
]

RING = 4
MOST_CHUNKS = 32  # of the axis: stands for as many as the areas ask for
LEAST_CHUNK = 128 * 1024  # on GPUs: smaller copies cost more to launch than to send
# Events: the caller's stream, then two in turn for pushes (one a side stream) and for copies to the output.
_HERE, _PUSHED, _TAKEN = 0, 1, 1 + 2 * NUM_STREAMS


@triton.jit
def flags_kernel(local, q0, q1, q2, q3, q4, q5, q6, rank, timeout_ns, status, WORLD_SIZE: tl.constexpr):
    """One block: tell all peers that this rank has come here, and wait until they have."""
    epoch = read_counter(local, EPOCH_OFFSET)
    arrive(local, q0, q1, q2, q3, q4, q5, q6, rank, epoch + 1, WORLD_SIZE)
    await_peers(local, rank, epoch + 1, timeout_ns, status, WORLD_SIZE)
    write_counter(local, epoch + 1, EPOCH_OFFSET)


@dataclass(frozen=True, slots=True)
class CopyJob:
    """What a launch needs besides the tensors' addresses.

    Attributes:
        flags: launches the flag kernel on a stream.
        num_streams: side streams that carry what crosses the links; one more carries what does not.
        local, peers: addresses of the staging area that is used, the own one and those of rank + 1, rank + 2, …
        chunk, num_chunks, ring: bytes of a chunk, how many there are, and how many have a place in the area.
    """

    copies: Copies
    flags: Callable[[int], None]
    num_streams: int
    rank: int
    nbytes: int
    local: int
    peers: tuple[int, ...]
    chunk: int
    num_chunks: int
    ring: int

    @property
    def _aside(self) -> int:
        return self.copies.streams[NUM_STREAMS - 1]

    def rank_at(self, step: int) -> int:
        return (self.rank + 1 + step) % (len(self.peers) + 1)

    def extent(self, c: int) -> tuple[int, int]:
        """Where chunk `c` begins, and its size."""
        start = c * self.chunk
        return start, min(self.chunk, self.nbytes - start)

    def place(self, slot: int, c: int) -> int:
        """Where in a slot of the area chunk `c` goes; slot i of a rank is that of the peer i + 1 after it."""
        return (slot * self.ring + c % self.ring) * self.chunk

    def _fork(self, stream: int, *, sends: bool, takes: bool) -> None:
        """Let side streams go on from here; only those that will have work, for a capture wants them joined."""
        self.copies.record(_HERE, stream)
        sides = self.copies.streams[: self.num_streams] if sends else ()
        for side in (*sides, self._aside) if takes else sides:
            self.copies.wait(side, _HERE)

    def source_for(self, step: int, x: int) -> int:
        """Address of what the peer at `step` is sent, where `x` is that of what this rank keeps."""
        del step
        return x

    def _send(self, c: int, x: int) -> None:
        """Push chunk `c` to all peers."""
        start, size = self.extent(c)
        for step, peer in enumerate(self.peers):
            side = self.copies.streams[step % self.num_streams]
            slot = len(self.peers) - 1 - step
            self.copies.copy(side, peer + self.place(slot, c), self.source_for(step, x) + start, size)
        for number, side in enumerate(self.copies.streams[: self.num_streams]):
            self.copies.record(_PUSHED + number + c % 2 * NUM_STREAMS, side)

    def _take(self, c: int, out: int) -> None:
        """Copy chunk `c` of all peers to the output."""
        start, size = self.extent(c)
        for step in range(len(self.peers)):
            target = out + self.rank_at(step) * self.nbytes + start
            self.copies.copy(self._aside, target, self.local + self.place(step, c), size)
        self.copies.record(_TAKEN + c % 2, self._aside)

    def push(self, stream: int, x: int, out: int) -> None:
        """See the module's text."""
        copies = self.copies
        self._fork(stream, sends=False, takes=True)
        copies.copy(self._aside, out + self.rank * self.nbytes, x, self.nbytes)
        for t in range(self.num_chunks + 1):
            if t >= 1:
                for number in range(self.num_streams):
                    copies.wait(stream, _PUSHED + number + (t - 1) % 2 * NUM_STREAMS)
            if t >= 3:
                copies.wait(stream, _TAKEN + (t - 3) % 2)
            self.flags(stream)
            due = [c for c in ((0, 1) if t == 0 else (t + 1,)) if c < self.num_chunks]
            self._fork(stream, sends=bool(due), takes=t >= 1)
            for c in due:
                self._send(c, x)
            if t >= 1:
                self._take(t - 1, out)
        copies.wait(stream, _TAKEN + (self.num_chunks - 1) % 2)

    def pull(self, stream: int, x: int, out: int, sources: tuple[int, ...] | None = None) -> None:
        """See the module's text; `sources` are the peers' addresses of a symmetric input."""
        copies = self.copies
        self._fork(stream, sends=False, takes=True)
        copies.copy(self._aside, out + self.rank * self.nbytes, x, self.nbytes)
        copies.record(_TAKEN, self._aside)
        if sources is None:
            copies.copy(stream, self.local, x, self.nbytes)
        self.flags(stream)
        self._fork(stream, sends=True, takes=False)
        for step, source in enumerate(sources or self.peers):
            if step < len(self.peers):
                side = copies.streams[step % self.num_streams]
                copies.copy(side, out + self.rank_at(step) * self.nbytes, source, self.nbytes)
        for number, side in enumerate(copies.streams[: self.num_streams]):
            copies.record(_PUSHED + number, side)
            copies.wait(stream, _PUSHED + number)
        copies.wait(stream, _TAKEN)
        self.flags(stream)


_SPACE = Space(
    {
        "direction": Choice("push", "pull"),
        "num_streams": Choice(1, 2, 3, 7),
        "num_chunks": PowerOfTwo(1, MOST_CHUNKS),
    }
)


def cut(problem: Problem, config: Config, staging_bytes: int) -> tuple[int, int, int]:
    """Bytes of a chunk, number of chunks, and of the ring."""
    packets, chunks = packets_of(problem.nbytes), int(config["num_chunks"])
    a_chunk = -(-packets // chunks)
    if chunks == MOST_CHUNKS:
        a_chunk = max(min(a_chunk, staging_bytes // ((problem.world_size - 1) * RING * PACKET_BYTES)), 1)
    num_chunks = -(-packets // a_chunk)
    return a_chunk * PACKET_BYTES, num_chunks, min(num_chunks, RING)


def refuse_pushes(problem: Problem, config: Config, limits: Limits) -> str | None:
    """Why a message cannot be pushed in the chunks of `config`, or None."""
    chunk, num_chunks, ring = cut(problem, config, limits.staging_bytes)
    least = LEAST_CHUNK if limits.backend == "cuda" else PACKET_BYTES
    if int(config["num_chunks"]) > 1 and problem.nbytes < least * int(config["num_chunks"]):
        return f"{problem.nbytes} bytes are too few for {config['num_chunks']} chunks of {least} bytes or more"
    needed = (problem.world_size - 1) * ring * chunk
    if needed > limits.staging_bytes:
        return (
            f"{ring} of the {num_chunks} chunks of {problem.nbytes} bytes from {problem.world_size} ranks need "
            f"{needed} bytes of staging; there are {limits.staging_bytes} (TUNEDCOMM_WORKSPACE_MIB)"
        )
    return None


def _infeasible(problem: Problem, config: Config, limits: Limits) -> str | None:
    if reason := refuse(problem, limits):
        return reason
    if int(config["num_streams"]) > max(problem.world_size - 1, 1):
        return f"{config['num_streams']} streams, but only {problem.world_size - 1} peers to copy to"
    if int(config["num_streams"]) > 1 and problem.nbytes < LEAST_CHUNK and limits.backend == "cuda":
        return f"copies of {problem.nbytes} bytes are over before a second stream has begun"
    if config["direction"] == "pull":
        if config["num_chunks"] != 1:
            return "pulls are not cut: only num_chunks=1"
        if problem.input_kind == "plain" and problem.nbytes > limits.staging_bytes:
            return f"{problem.nbytes} bytes exceed the staging of {limits.staging_bytes} (TUNEDCOMM_WORKSPACE_MIB)"
        return None
    return refuse_pushes(problem, config, limits)


def _default(problem: Problem, limits: Limits) -> dict[str, Value]:
    chunks = 1 if problem.nbytes < 4 << 20 else 8 if problem.nbytes < 64 << 20 else 32
    direction = "pull" if problem.input_kind == "symmetric" else "push"
    wish: dict[str, Any] = {"direction": direction, "num_streams": 1, "num_chunks": chunks}
    if direction == "pull":
        wish["num_chunks"] = 1
    return closest(wish, _SPACE, problem, limits, _infeasible)


def flags_request(problem: Problem) -> CompileRequest:
    return CompileRequest.of(flags_kernel, {"WORLD_SIZE": problem.world_size}, num_warps=1)


def _requests(problem: Problem, config: Config) -> Iterable[Any]:
    del config
    return (flags_request(problem),)


def make_job(problem: Problem, config: Config, workspace: Workspace, kind: type[CopyJob] = CopyJob) -> CopyJob:
    """The job of a config, which binds the flag kernel; pulls use the scatter area, pushes the gather area."""
    lane, layout = workspace.lanes[problem.mode], workspace.layout
    kernel = bind_kernel(flags_request(problem), 1, workspace.device)
    flags = (lane.local, *lane.peers, workspace.rank, workspace.timeout_ns, workspace.status_argument(problem))
    area = layout.scatter if config["direction"] == "pull" else layout.gather
    chunk, num_chunks, ring = cut(problem, config, layout.staging_bytes)
    return kind(
        copies=copies_of(workspace, problem.mode),
        flags=kernel.fix(flags),
        num_streams=int(config["num_streams"]),
        rank=workspace.rank,
        nbytes=problem.nbytes,
        local=lane.local + area,
        peers=tuple(address + area for address in lane.peers[: problem.world_size - 1]),
        chunk=chunk,
        num_chunks=num_chunks,
        ring=ring,
    )


def _bind(problem: Problem, config: Config, workspace: Workspace) -> Launch:
    job, pulls = make_job(problem, config, workspace), config["direction"] == "pull"
    if not pulls or problem.input_kind != "symmetric":
        return AddressLaunch(job.pull if pulls else job.push)
    peers_of = workspace.peers_of

    def pull_symmetric(inputs: tuple[Any, ...], outputs: tuple[Any, ...], stream: int) -> None:
        x = inputs[0]
        job.pull(stream, x.data_ptr(), outputs[0].data_ptr(), peers_of(x))

    return pull_symmetric


COPY_ENGINE = register_variant(
    Variant(
        op="all_gather",
        name="copy_engine",
        numerics="ordered",
        summary="the copy engines move everything, between exchanges of flags; takes no SMs",
        space=_SPACE,
        infeasible=_infeasible,
        default=_default,
        bind=_bind,
        num_blocks=lambda problem, config: 0,
        kernels=(flags_kernel,),
        compile_requests=_requests,
    )
)
