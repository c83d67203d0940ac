"""The kernel of `push` and `multimem`, and how both cut a message into chunks that go round in the gather areas."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import triton
import triton.language as tl

from tunedcomm.kernels.all_gather._common import as_bytes, constants_of, refuse, refuse_items
from tunedcomm.kernels.common.feasibility import Launch, bind_plain, blocks_and_threads
from tunedcomm.kernels.common.lane import (
    EPOCH_OFFSET,
    arrive,
    await_peers,
    block_range,
    read_counter,
    write_counter,
)
from tunedcomm.kernels.common.launch import CompileRequest
from tunedcomm.kernels.common.packets import PACKET_BYTES, packets_of, store_all, store_bytes
from tunedcomm.kernels.common.sync import load_packets, store_packets
from tunedcomm.space import Choice, Config, PowerOfTwo, Space
from tunedcomm.spec import Limits, Problem

if TYPE_CHECKING:
    from tunedcomm.symm.workspace import Workspace

__all__ = ["LAG", "RING", "SPACE", "bind_ring", "refuse_ring", "ring_kernel", "ring_request"]

LAG = tl.constexpr(2)
RING = tl.constexpr(4)
_MOST_CHUNKS = 32  # of the axis: stands for as many as the areas ask for


@triton.jit
def ring_kernel(
    x, out, nbytes, local, q0, q1, q2, q3, q4, q5, q6, rank, timeout_ns, status,
    multicast, gather, span, num_chunks, ring, spread,
    WORLD_SIZE: tl.constexpr, ALIGN: tl.constexpr, BLOCK: tl.constexpr, MULTIMEM: tl.constexpr,
):  # fmt: skip
    """In round c: send chunk c and, in the same loop, write out the peers' chunk c − LAG.

    A block's flags count its steps: 1 when it has begun, 2 + c when it has sent chunk c. It waits for its peers' flags
    of chunk c − 1 at the end of round c and not where the next one begins: so no block barrier stands between the
    fence of its own flag and the next round, and only the warp that raises the flag waits for its stores to arrive.
    `spread` is 1 where the blocks begin at different places of their first chunk.
    """
    peers = (q0, q1, q2, q3, q4, q5, q6)
    epoch = read_counter(local, EPOCH_OFFSET)
    total = (nbytes + 15) // 16
    lanes, first, step = block_range(BLOCK)
    late = spread * (tl.program_id(0) * (span // step) // tl.num_programs(0)) * step
    slot = ring * span

    # Says that this rank's gather area may be written; the own part of the first chunk fills the time until all have.
    arrive(local, q0, q1, q2, q3, q4, q5, q6, rank, epoch + 1, WORLD_SIZE)
    for start in tl.range(first, tl.minimum(total, span - late), step):
        packet = start + lanes
        here = packet < total
        w0, w1, w2, w3 = load_packets(x + packet * 16, here)
        store_bytes(out + rank * nbytes + packet * 16, nbytes - packet * 16, w0, w1, w2, w3, here, ALIGN)
    await_peers(local, rank, epoch + 1, timeout_ns, status, WORLD_SIZE)

    for c in tl.range(0, num_chunks + LAG):
        lap = (c - c % ring) * span
        back = tl.maximum(c - LAG, 0)
        back = (back - back % ring) * span
        end = tl.minimum((c + 1) * span, total + late + LAG * span)
        end = tl.where((c >= num_chunks) & (c < LAG), 0, end)  # nothing left to send, and nothing there yet
        for start in tl.range(first + c * span, end, step):
            sent = start + lanes
            packet = sent - late
            here = (packet >= 0) & (packet < total)
            came = sent - LAG * span
            taken = came - late
            there = (taken >= 0) & (taken < total)
            w0, w1, w2, w3 = load_packets(x + packet * 16, here)
            words = ()
            for i in tl.static_range(WORLD_SIZE - 1):
                source = (rank + 1 + i) % WORLD_SIZE if MULTIMEM else i
                words = words + load_packets(local + gather + (source * slot + came - back) * 16, there)
            place = gather + (sent - lap) * 16
            if MULTIMEM:
                store_all(multicast, peers, local, place + rank * slot * 16, w0, w1, w2, w3, here, WORLD_SIZE)
            else:
                for i in tl.static_range(WORLD_SIZE - 1):
                    store_packets(peers[i] + place + (WORLD_SIZE - 2 - i) * slot * 16, w0, w1, w2, w3, here)
            own = here & (c > 0)
            store_bytes(out + rank * nbytes + packet * 16, nbytes - packet * 16, w0, w1, w2, w3, own, ALIGN)
            for i in tl.static_range(WORLD_SIZE - 1):
                target = out + ((rank + 1 + i) % WORLD_SIZE) * nbytes + taken * 16
                w0, w1, w2, w3 = words[4 * i], words[4 * i + 1], words[4 * i + 2], words[4 * i + 3]
                store_bytes(target, nbytes - taken * 16, w0, w1, w2, w3, there, ALIGN)
        if c <= num_chunks:
            await_peers(local, rank, epoch + 1 + c, timeout_ns, status, WORLD_SIZE)
        if c < num_chunks:
            arrive(local, q0, q1, q2, q3, q4, q5, q6, rank, epoch + 2 + c, WORLD_SIZE)
    write_counter(local, epoch + 1 + num_chunks, EPOCH_OFFSET)


SPACE = Space(
    {
        "num_blocks": Choice(1, 2, 8, 32, 64, 132, 264),
        "num_warps": PowerOfTwo(4, 16),
        "items": Choice(1, 2),
        "num_chunks": PowerOfTwo(1, _MOST_CHUNKS),
    }
)


@dataclass(frozen=True, slots=True)
class _Cut:
    """How a message is cut: `span` packets of all blocks a chunk, of which `ring` have places in the gather areas."""

    span: int
    num_chunks: int
    ring: int
    spread: int


def _step(config: Config) -> int:
    """Packets that the grid takes at once."""
    return int(config["num_blocks"]) * 32 * int(config["num_warps"]) * int(config["items"])


def _slots(problem: Problem, *, multimem: bool) -> int:
    """Places of a chunk in a gather area: one a peer, or a rank where one store reaches the same place of all."""
    return problem.world_size - (0 if multimem else 1)


def _cut(problem: Problem, config: Config, staging_bytes: int, *, multimem: bool) -> _Cut:
    """`num_chunks` chunks, or more where a ring of them has no room. Blocks that begin late need one more."""
    step = _step(config)
    rounds = -(-packets_of(problem.nbytes) // step)
    most = staging_bytes // (_slots(problem, multimem=multimem) * RING.value * PACKET_BYTES * step)
    chunks = int(config["num_chunks"])
    a_chunk = -(-rounds // chunks)
    if chunks == _MOST_CHUNKS:
        a_chunk = max(min(a_chunk, most), 1)
    spread = 1 if a_chunk > 1 and chunks > 1 else 0
    num_chunks = -(-rounds // a_chunk) + spread
    return _Cut(a_chunk * step, num_chunks, min(num_chunks, RING.value), spread)


def refuse_ring(problem: Problem, config: Config, limits: Limits, *, multimem: bool = False) -> str | None:
    """Why the kernel cannot run `problem` with `config`, or None."""
    if reason := refuse(problem, limits) or refuse_items(problem, config):
        return reason
    packets, chunks = packets_of(problem.nbytes), int(config["num_chunks"])
    rounds = -(-packets // _step(config))
    if rounds < chunks and chunks > 1:
        return f"{rounds} rounds cannot be split into {chunks} chunks"
    cut = _cut(problem, config, limits.staging_bytes, multimem=multimem)
    needed = _slots(problem, multimem=multimem) * cut.ring * cut.span * PACKET_BYTES
    if needed > limits.staging_bytes:
        return (
            f"{cut.ring} of the {cut.num_chunks} chunks of {problem.nbytes} bytes from {problem.world_size} ranks need "
            f"{needed} bytes of staging; there are {limits.staging_bytes} (TUNEDCOMM_WORKSPACE_MIB)"
        )
    return blocks_and_threads(config, limits, packets, most_rounds=64 * chunks if chunks < _MOST_CHUNKS else 1 << 16)


def ring_request(problem: Problem, config: Config, *, multimem: bool) -> CompileRequest:
    """The binary."""
    constants = {**constants_of(problem, config), "MULTIMEM": multimem}
    return CompileRequest.of(ring_kernel, constants, num_warps=int(config["num_warps"]))


def bind_ring(problem: Problem, config: Config, workspace: Workspace, *, multimem: bool) -> Launch:
    """Launch on the lane's gather area; multicast address 0 stands for the emulation under the interpreter."""
    layout = workspace.layout
    cut = _cut(problem, config, layout.staging_bytes, multimem=multimem)
    multicast = workspace.lanes[problem.mode].multicast
    extra = (multicast, layout.gather, cut.span, cut.num_chunks, cut.ring, cut.spread)
    request = ring_request(problem, config, multimem=multimem)
    return bind_plain(as_bytes(problem), config, workspace, request, *extra)
